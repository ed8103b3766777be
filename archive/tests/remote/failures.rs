//! Failures of servers and connections, and the errors that the bucket reports.

use std::future::Future;
use std::time::Instant;

use remanent_archive::bucket::{Bucket, BucketError, Creation, FailureClass};
use remanent_archive::object::{Folder, ObjectKey};
use remanent_archive::remote::{RemoteBucket, RemoteOptions};

use crate::life::{commit, create, restore, whole_life};
use crate::server::{Fault, Server};

const KEY: ObjectKey = ObjectKey::Line(1);
const NAME: &str = "line/0000000000000001";

fn open(server: &Server) -> RemoteBucket {
    RemoteBucket::open("s3://bucket", server.options().setting("timeout", "2 seconds")).unwrap()
}

fn create_error(server: &Server, fault: Fault) -> BucketError {
    let bucket = open(server);
    server.fail([fault]);
    bucket.block_on(bucket.create(KEY, b"x")).expect_err("the create fails")
}

#[test]
fn archive_operations_work_on_a_server() {
    let server = Server::start();
    let bucket = RemoteBucket::open("s3://bucket/a/b", server.options()).unwrap();
    bucket.block_on(whole_life(&bucket)).unwrap();
    assert!(server.object("a/b/bound/0000000000000001").is_some());
}

#[test]
fn create_failures_are_classified() {
    let server = Server::start();
    let table = [
        (400, "ExpiredToken", FailureClass::Expired),
        (401, "", FailureClass::Denied),
        (403, "AccessDenied", FailureClass::Denied),
        (403, "RequestTimeTooSkewed", FailureClass::ClockSkew),
        (404, "NoSuchBucket", FailureClass::Other),
        (409, "ConditionalRequestConflict", FailureClass::InDoubt),
        (429, "", FailureClass::Throttled),
        (500, "InternalError", FailureClass::InDoubt),
        (501, "NotImplemented", FailureClass::NotSupported),
        (503, "SlowDown", FailureClass::Throttled),
        (507, "", FailureClass::Full),
    ];
    for (status, code, class) in table {
        let error = create_error(&server, Fault::code(status, code));
        assert_eq!(error.class, class, "{error}");
        assert!(error.message.contains(&status.to_string()) && error.message.contains(code), "{error}");
        let sent = server.take_received().len();
        assert_eq!(sent, 1, "a create is sent once, also after {status}");
    }
}

#[test]
fn existing_objects_are_reported_without_a_failure() {
    let server = Server::start();
    let bucket = open(&server);
    for (status, code) in [(412, "PreconditionFailed"), (409, "BlobAlreadyExists"), (409, ""), (304, "")] {
        server.fail([Fault::code(status, code)]);
        assert_eq!(bucket.block_on(bucket.create(KEY, b"x")).unwrap(), Creation::Exists, "{status} {code}");
    }
}

#[test]
fn conflicts_of_a_put_are_in_doubt_or_failed() {
    let server = Server::start();
    let bucket = open(&server);
    server.fail([Fault::code(409, "OperationAborted")]);
    let error = bucket.block_on(bucket.put(ObjectKey::Newest, b"x")).unwrap_err();
    assert_eq!(error.class, FailureClass::InDoubt, "{error}");
}

#[test]
fn dropped_connections_leave_a_create_in_doubt() {
    let server = Server::start();
    for (fault, is_created) in
        [(Fault::DropBefore, false), (Fault::DropAfter, true), (Fault::StatusAfter(500), true)]
    {
        server.take_received();
        let error = create_error(&server, fault);
        assert_eq!(error.class, FailureClass::InDoubt, "{error}");
        assert_eq!(server.take_received().len(), 1, "a create is sent once");
        assert_eq!(server.object(NAME).is_some(), is_created);
    }
}

#[test]
fn silent_server_causes_timeout() {
    let server = Server::start();
    let started = Instant::now();
    let error = create_error(&server, Fault::Hang);
    assert_eq!(error.class, FailureClass::InDoubt, "{error}");
    assert!(error.message.contains("time-out"), "{error}");
    assert!(started.elapsed().as_secs() < 10);
}

#[test]
fn unreachable_servers_are_classified() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for endpoint in [format!("http://127.0.0.1:{port}"), "http://host.invalid".to_owned()] {
        let options = RemoteOptions::default()
            .setting("endpoint", &endpoint)
            .setting("allow_http", "true")
            .setting("skip_signature", "true");
        let bucket = RemoteBucket::open("s3://bucket", options).unwrap();
        let error = bucket.block_on(bucket.create(KEY, b"x")).unwrap_err();
        assert_eq!(error.class, FailureClass::Unreachable, "{endpoint}: {error}");
    }
}

#[test]
fn truncated_bodies_are_completed_or_fail() {
    let server = Server::start();
    let bucket = open(&server);
    let object: Vec<u8> = (0..100_000u32).map(|at| at as u8).collect();
    server.store(NAME, &object);
    server.fail([Fault::Truncate]);
    assert_eq!(bucket.block_on(bucket.get(KEY, None)).unwrap().as_ref(), Some(&object));
    server.fail([const { Fault::Truncate }; 8]);
    let error = bucket.block_on(bucket.get(KEY, None)).unwrap_err();
    assert_eq!(error.class, FailureClass::InDoubt, "{error}");
}

#[test]
fn reads_and_deletes_are_repeated() {
    let server = Server::start();
    let bucket = open(&server);
    server.store(NAME, b"x");
    server.fail([Fault::code(500, "InternalError"), Fault::code(503, "SlowDown")]);
    assert_eq!(bucket.block_on(bucket.get(KEY, None)).unwrap(), Some(b"x".to_vec()));
    server.fail([Fault::code(500, "InternalError")]);
    assert_eq!(bucket.block_on(bucket.list(Folder::Line)).unwrap(), [NAME]);
    server.fail([Fault::code(500, "InternalError")]);
    bucket.block_on(bucket.delete(KEY)).unwrap();
    assert_eq!(server.object(NAME), None);
}

#[test]
fn missing_bucket_is_not_a_missing_object() {
    let server = Server::start();
    let bucket = open(&server);
    for code in ["NoSuchBucket", "ContainerNotFound"] {
        server.fail([Fault::code(404, code), Fault::code(404, code)]);
        let error = bucket.block_on(bucket.get(KEY, None)).unwrap_err();
        assert_eq!(error.class, FailureClass::Other, "{error}");
        let error = bucket.block_on(bucket.delete(KEY)).unwrap_err();
        assert!(error.message.contains(code), "{error}");
    }
    assert_eq!(bucket.block_on(bucket.get(KEY, None)).unwrap(), None);
}

#[test]
fn oversized_objects_are_refused() {
    let server = Server::start();
    let bucket = open(&server);
    server.store(NAME, &vec![0; (8 << 20) + 1]);
    let error = bucket.block_on(bucket.get(KEY, None)).unwrap_err();
    assert_eq!(error.class, FailureClass::Other, "{error}");
    assert!(error.message.contains("8388609"), "{error}");
}

#[test]
fn ranges_are_clipped_to_object_length() {
    let server = Server::start();
    let bucket = open(&server);
    server.store(NAME, b"0123456789");
    assert_eq!(bucket.block_on(bucket.get(KEY, Some(2..4))).unwrap(), Some(b"23".to_vec()));
    assert_eq!(bucket.block_on(bucket.get(KEY, Some(8..400))).unwrap(), Some(b"89".to_vec()));
    server.store(NAME, b"");
    assert_eq!(bucket.block_on(bucket.get(KEY, Some(0..128))).unwrap(), Some(Vec::new()));
}

/// Faults during the create of a run never lose or duplicate an acknowledged batch.
#[test]
fn runs_survive_every_fault_of_a_create() {
    let faults = [
        Fault::DropBefore,
        Fault::DropAfter,
        Fault::StatusAfter(500),
        Fault::code(409, ""),
        Fault::code(409, "ConditionalRequestConflict"),
        Fault::code(503, "SlowDown"),
    ];
    let server = Server::start();
    let delay = std::time::Duration::from_millis(1);
    let bucket = RemoteBucket::open("s3://bucket", server.options().delays(delay, delay)).unwrap();
    bucket.block_on(async {
        let (mut line, local) = create(&bucket).await.unwrap();
        for (token, fault) in (1..).zip(faults.clone()) {
            server.fail([fault]);
            commit(&mut line, &local, &[token]).await.unwrap();
        }
        let expected: Vec<u64> = (1..=faults.len() as u64).collect();
        assert_eq!(restore(&bucket).await.unwrap(), expected);
    });
}

#[test]
fn pause_returns_false_after_last_attempt() {
    let server = Server::start();
    let delay = std::time::Duration::from_millis(1);
    let options = server.options().delays(delay, delay).attempts(3);
    let bucket = RemoteBucket::open("s3://bucket", options).unwrap();
    let failure = BucketError { class: FailureClass::InDoubt, message: String::new() };
    let pauses = [1, 2, 3].map(|attempt| bucket.block_on(bucket.pause(attempt, &failure)));
    assert_eq!(pauses, [true, true, false]);
}

#[test]
fn stop_ends_a_pause() {
    let server = Server::start();
    let delay = std::time::Duration::from_secs(600);
    let bucket = RemoteBucket::open("s3://bucket", server.options().delays(delay, delay)).unwrap();
    let failure = BucketError { class: FailureClass::Throttled, message: String::new() };
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| bucket.block_on(bucket.pause(1, &failure)));
        bucket.stop();
        assert!(!waiting.join().unwrap());
    });
    assert!(!bucket.block_on(bucket.pause(1, &failure)));
}

#[test]
fn requests_of_one_bucket_run_concurrently() {
    let server = Server::start();
    let bucket = RemoteBucket::open("s3://bucket", server.options()).unwrap();
    server.fail([Fault::Hang]);
    let waker = &mut std::task::Context::from_waker(std::task::Waker::noop());
    let mut stalled = Box::pin(bucket.create(KEY, b"x"));
    assert!(stalled.as_mut().poll(waker).is_pending());
    while server.take_received().is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(bucket.block_on(bucket.create(KEY, b"y")).unwrap(), Creation::Created);
    assert!(stalled.as_mut().poll(waker).is_pending());
}
