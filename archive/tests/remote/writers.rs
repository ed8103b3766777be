//! Several writers compete for one line, on real servers and on the test server.
//!
//! `.ci/nightly/archive` starts servers and runs the ignored test here with these variables:
//!
//! | variable | meaning |
//! |---|---|
//! | `REMANENT_ARCHIVE_URL` | URL of an empty archive |
//! | `REMANENT_ARCHIVE_SETTINGS` | settings, as `KEY=VALUE` with commas between them |
//! | `REMANENT_ARCHIVE_WRITERS` | number of writers |
//! | `REMANENT_ARCHIVE_RACES` | `no`, or `yes` for a server that is known to race; the test then expects a violation |

use std::collections::HashMap;
use std::future::Future;
use std::ops::Range;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use remanent_archive::Error;
use remanent_archive::bucket::{Bucket, BucketError, Creation};
use remanent_archive::line::probe;
use remanent_archive::object::{Folder, ObjectKey};
use remanent_archive::remote::{RemoteBucket, RemoteOptions};
use remanent_archive::testing::store::SimStore;
use remanent_format::StoreId;

use crate::life::{archive, commit, create, random, restore, snapshot, take_over};
use crate::server::Server;

/// Time after which no writer starts another term.
const CONTEST: Duration = Duration::from_secs(45);
/// Number of terms of each writer.
const TERMS: u64 = 3;
/// Number of runs in each term.
const RUNS: u64 = 3;

/// The record of all creates, acknowledgements and violations of a contest.
#[derive(Default)]
struct Contest {
    /// For each line object, the bytes of each create that the bucket reported as successful.
    created: Mutex<HashMap<ObjectKey, Vec<Vec<u8>>>>,
    acknowledged: Mutex<Vec<u64>>,
    violations: Mutex<Vec<String>>,
}

impl Contest {
    fn violation(&self, text: String) {
        self.violations.lock().unwrap().push(text);
    }
}

/// A bucket that records successful creates.
struct Counted<'a> {
    bucket: &'a RemoteBucket,
    contest: &'a Contest,
}

impl Bucket for Counted<'_> {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        let creation = self.bucket.create(key, bytes).await;
        if creation == Ok(Creation::Created) {
            self.contest.created.lock().unwrap().entry(key).or_default().push(bytes.to_vec());
        }
        creation
    }

    fn put(&self, key: ObjectKey, bytes: &[u8]) -> impl Future<Output = Result<(), BucketError>> {
        self.bucket.put(key, bytes)
    }

    fn get(
        &self,
        key: ObjectKey,
        range: Option<Range<u64>>,
    ) -> impl Future<Output = Result<Option<Vec<u8>>, BucketError>> {
        self.bucket.get(key, range)
    }

    fn list(&self, folder: Folder) -> impl Future<Output = Result<Vec<String>, BucketError>> {
        self.bucket.list(folder)
    }

    fn delete(&self, key: ObjectKey) -> impl Future<Output = Result<(), BucketError>> {
        self.bucket.delete(key)
    }

    fn pause(&self, attempt: u32, failure: &BucketError) -> impl Future<Output = bool> {
        self.bucket.pause(attempt, failure)
    }
}

/// Repeatedly takes over the line, and appends runs until another writer takes over.
async fn write(bucket: &Counted<'_>, writer: u64) {
    let began = Instant::now();
    let mut terms = 0;
    for attempt in 0.. {
        if terms == TERMS || began.elapsed() > CONTEST {
            return;
        }
        match term(bucket, writer << 32 | attempt << 8).await {
            Ok(()) => terms += 1,
            Err(Error::Superseded { .. } | Error::Diverged { .. }) => {}
            Err(error) => return bucket.contest.violation(error.to_string()),
        }
    }
}

async fn term(bucket: &Counted<'_>, first: u64) -> Result<(), Error> {
    let (mut line, local) = take_over(bucket).await?;
    // Later restores start from this snapshot, so that their duration does not grow.
    snapshot(&mut line, &local).await?;
    for token in first..first + RUNS {
        local.with(|store| store.commit(token));
        local.with(SimStore::seal);
        line.append_run(&local).await?;
        bucket.contest.acknowledged.lock().unwrap().push(token);
    }
    Ok(())
}

/// Runs writers that compete for one line. Returns the number of acknowledged batches and the violations.
fn contend(open: &(dyn Fn() -> RemoteBucket + Sync), writers: u64) -> (usize, Vec<String>) {
    let contest = Contest::default();
    let bucket = open();
    let counted = Counted { bucket: &bucket, contest: &contest };
    bucket.block_on(async {
        let (mut line, local) = create(&counted).await.expect("the archive is empty");
        commit(&mut line, &local, &[1]).await.expect("the first run is archived");
    });
    contest.acknowledged.lock().unwrap().push(1);
    std::thread::scope(|scope| {
        for writer in 1..=writers {
            let contest = &contest;
            scope.spawn(move || {
                let bucket = open();
                bucket.block_on(write(&Counted { bucket: &bucket, contest }, writer));
            });
        }
    });
    check(&bucket, &contest);
    (contest.acknowledged.into_inner().unwrap().len(), contest.violations.into_inner().unwrap())
}

/// Checks that each position was created once and is unchanged, and that a restore contains every acknowledged batch
/// exactly once.
fn check(bucket: &RemoteBucket, contest: &Contest) {
    let created = std::mem::take(&mut *contest.created.lock().unwrap());
    for (key, bodies) in created {
        if bodies.len() > 1 {
            contest.violation(format!("{key} was created {} times", bodies.len()));
        }
        let found = bucket.block_on(bucket.get(key, None)).unwrap();
        if found.as_ref() != bodies.first() {
            contest.violation(format!("{key} is not the object that was created"));
        }
    }
    let restored = match bucket.block_on(restore(bucket)) {
        Ok(restored) => restored,
        Err(error) => return contest.violation(error.to_string()),
    };
    for token in contest.acknowledged.lock().unwrap().iter() {
        let count = restored.iter().filter(|found| *found == token).count();
        if count != 1 {
            contest.violation(format!("the acknowledged batch {token} was restored {count} times"));
        }
    }
}

/// Runs writers that create the same keys concurrently, until a violation is found. Returns the violations.
fn race(open: &(dyn Fn() -> RemoteBucket + Sync), writers: u64, rounds: u64) -> Vec<String> {
    let violations = Mutex::new(Vec::new());
    let winners = Mutex::new(Vec::new());
    let barrier = Barrier::new(writers as usize);
    std::thread::scope(|scope| {
        for writer in 1..=writers {
            let (violations, winners, barrier) = (&violations, &winners, &barrier);
            scope.spawn(move || {
                let bucket = open();
                for round in 1..=rounds {
                    let key = ObjectKey::Probe(round);
                    let body = writer.to_le_bytes();
                    barrier.wait();
                    match bucket.block_on(bucket.create(key, &body)) {
                        Ok(Creation::Created) => winners.lock().unwrap().push(body.to_vec()),
                        Ok(Creation::Exists) => {}
                        Err(error) => violations.lock().unwrap().push(error.to_string()),
                    }
                    if barrier.wait().is_leader() {
                        let found = bucket.block_on(bucket.get(key, None)).unwrap();
                        let winners = std::mem::take(&mut *winners.lock().unwrap());
                        if winners.len() != 1 || found.as_ref() != winners.first() {
                            let text = format!("{} creates of {key} succeeded", winners.len());
                            violations.lock().unwrap().push(text);
                        }
                    }
                    barrier.wait();
                    if !violations.lock().unwrap().is_empty() {
                        return;
                    }
                }
            });
        }
    });
    violations.into_inner().unwrap()
}

#[test]
fn writers_of_a_sound_server_never_fork() {
    let server = Server::start();
    let open = || RemoteBucket::open("s3://bucket/contest", server.options()).unwrap();
    let (acknowledged, violations) = contend(&open, 4);
    assert_eq!(violations, Vec::<String>::new());
    assert!(acknowledged > RUNS as usize, "{acknowledged} batches");
    assert_eq!(race(&open, 4, 20), Vec::<String>::new());
}

#[test]
fn writers_of_a_folder_never_fork() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().display());
    let open = || RemoteBucket::open(&url, RemoteOptions::default()).unwrap();
    let (acknowledged, violations) = contend(&open, 4);
    assert_eq!(violations, Vec::<String>::new());
    assert!(acknowledged > RUNS as usize, "{acknowledged} batches");
    assert_eq!(race(&open, 4, 20), Vec::<String>::new());
}

#[test]
fn servers_that_ignore_conditions_are_detected() {
    let server = Server::start();
    server.ignore_conditions();
    let open = || RemoteBucket::open("s3://bucket/contest", server.options()).unwrap();
    assert!(!race(&open, 4, 2).is_empty());
    let (_, violations) = contend(&open, 4);
    assert!(!violations.is_empty());
    let bucket = open();
    let refused = bucket.block_on(probe(archive(&bucket), StoreId([1; 16])));
    assert!(matches!(refused, Err(Error::NotSupported { .. })), "{refused:?}");
}

#[test]
#[ignore = "needs an object store; .ci/nightly/archive starts some"]
fn real_server_prevents_forks() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let url = variable("REMANENT_ARCHIVE_URL");
    let writers: u64 = variable("REMANENT_ARCHIVE_WRITERS").parse().unwrap();
    let must_race = variable("REMANENT_ARCHIVE_RACES") == "yes";
    let settings = variable("REMANENT_ARCHIVE_SETTINGS");
    // Each part and each call uses a new archive.
    let run = random();
    let open = |part: &str| {
        let pairs = settings.split(',').filter_map(|pair| pair.split_once('='));
        let options =
            pairs.fold(RemoteOptions::default(), |options, (key, value)| options.setting(key, value));
        RemoteBucket::open(&format!("{url}/{run:x}/{part}"), options).unwrap()
    };
    let bucket = open("life");
    bucket.block_on(crate::life::whole_life(&bucket)).unwrap();
    let mut violations = race(&|| open("race"), writers, if must_race { 2_000 } else { 200 });
    println!("race: {} violations: {:?}", violations.len(), violations.first());
    let (acknowledged, more) = contend(&|| open("contest"), writers);
    println!("contest: {acknowledged} batches, {} violations: {:?}", more.len(), more.first());
    violations.extend(more);
    if must_race {
        assert!(!violations.is_empty(), "the server is known to race, and no test has seen it");
    } else {
        assert_eq!(violations, Vec::<String>::new());
        assert!(acknowledged > RUNS as usize, "{acknowledged} batches");
    }
}
