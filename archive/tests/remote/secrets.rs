//! Credentials: a bucket reads them again after a denied request, and no error, `Debug` output or log contains them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use remanent_archive::bucket::{Bucket, FailureClass};
use remanent_archive::object::{Folder, ObjectKey};
use remanent_archive::remote::{RemoteBucket, RemoteOptions};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::server::{Fault, Server};

const KEY: ObjectKey = ObjectKey::Line(1);
/// Encoded in Base64, as Azure requires.
const SECRET: &str = "aHVudGVyMmh1bnRlcjJodW50ZXIy";

/// Records all events and spans.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<String>>);

impl Visit for Log {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.lock().unwrap().push_str(&format!("{field}={value:?} "));
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        span.record(&mut self.clone());
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, values: &Record<'_>) {
        values.record(&mut self.clone());
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Sends requests that fail in several ways, with answers that repeat the credential. Returns the text of all errors.
fn reports(url: &str, options: RemoteOptions, server: &Server) -> String {
    let bucket = RemoteBucket::open(url, options.setting("timeout", "2 seconds")).unwrap();
    let mut text = format!("{bucket:?}");
    let message = format!("<Error><Code>SignatureDoesNotMatch</Code><Message>{SECRET}</Message></Error>");
    let faults = [
        Fault::Status(401, message.clone()),
        Fault::Status(403, message.clone()),
        Fault::Status(400, message.clone()),
        Fault::Status(404, message),
        Fault::DropBefore,
        Fault::DropAfter,
    ];
    for fault in faults {
        server.fail(std::iter::repeat_n(fault, 6));
        let results = bucket.block_on(async {
            let created = bucket.create(KEY, b"x").await;
            let put = bucket.put(ObjectKey::Newest, b"x").await;
            let got = bucket.get(KEY, None).await;
            let listed = bucket.list(Folder::Line).await;
            (created, put, got, listed)
        });
        text.push_str(&format!("{results:?}"));
        if let Err(error) = results.0 {
            text.push_str(&error.to_string());
        }
    }
    text
}

#[test]
fn credentials_appear_in_no_error_and_no_log() {
    let log = Log::default();
    // The subscriber is installed for all threads, because requests run on the thread of the bucket.
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let server = Server::start();
    let s3 = server.options_without_credential().setting("access_key_id", SECRET);
    let s3 = s3.setting("secret_access_key", SECRET).setting("session_token", SECRET);
    let azure = RemoteOptions::default()
        .setting("endpoint", server.url())
        .setting("allow_http", "true")
        .setting("account_name", "account");
    let mut text = reports("s3://bucket", s3, &server);
    text += &reports("az://container", azure.clone().setting("access_key", SECRET), &server);
    text +=
        &reports("az://container", azure.setting("sas_key", format!("sv=2024-01-01&sig={SECRET}")), &server);
    assert!(text.contains("SignatureDoesNotMatch") && text.contains("403"), "{text}");
    assert!(!text.contains(SECRET), "{text}");
    let log = log.0.lock().unwrap();
    assert!(log.contains("retry"), "the log has events: {log}");
    assert!(!log.contains(SECRET), "{log}");
}

#[test]
fn refused_settings_show_no_credential() {
    let account = format!("{{\"private_key\": \"{SECRET}\", \"other\": {SECRET}");
    let refused = [
        ("gs://bucket", "service_account_key", account.as_str()),
        ("s3://bucket", "allow_http", SECRET),
        ("s3://bucket", "endpoint", SECRET),
        ("az://container", "access_key", SECRET),
        ("s3://bucket", "no_such_setting", SECRET),
    ];
    for (url, key, value) in refused {
        let error = RemoteBucket::open(url, RemoteOptions::default().setting(key, value)).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
    }
}

#[test]
fn denied_requests_read_credentials_again() {
    for status in [401, 403] {
        let server = Server::start();
        let calls = Arc::new(AtomicU32::new(0));
        let counted = calls.clone();
        let options = server.options_without_credential().settings_from(move || {
            let call = counted.fetch_add(1, Ordering::SeqCst);
            vec![
                ("access_key_id".to_owned(), format!("key{call}")),
                ("secret_access_key".to_owned(), "secret".to_owned()),
            ]
        });
        let bucket = RemoteBucket::open("s3://bucket", options).unwrap();
        server.fail([Fault::code(status, "AccessDenied")]);
        bucket.block_on(async {
            let error = bucket.create(KEY, b"x").await.unwrap_err();
            assert_eq!(error.class, FailureClass::Denied, "{error}");
            assert!(bucket.pause(1, &error).await, "new credentials are worth another attempt");
            bucket.create(KEY, b"x").await.unwrap();
            // The next denial is not retried, because the credentials were just read.
            server.fail([Fault::code(status, "AccessDenied")]);
            let error = bucket.delete(KEY).await.unwrap_err();
            assert!(!bucket.pause(1, &error).await);
        });
        let heads: Vec<String> = server.take_received().into_iter().map(|request| request.head).collect();
        assert!(heads[0].contains("Credential=key0/") && heads[1].contains("Credential=key1/"), "{heads:?}");
        assert_eq!(calls.load(Ordering::SeqCst), 2);
    }
}
