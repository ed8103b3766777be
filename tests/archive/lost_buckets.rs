//! Buckets that are temporarily unreachable.

use std::fs;
use std::time::Duration;

use remanent::error::ArchiveErrorKind;
use remanent::options::Create;
use remanent::{Ack, Error};

use crate::bed::{Bed, archive_steps, pages, pause, plain_options, step, step_of};

fn take_away(bed: &Bed) {
    fs::rename(bed.bucket(), bed.path("away")).unwrap();
}

fn bring_back(bed: &Bed) {
    fs::rename(bed.path("away"), bed.bucket()).unwrap();
}

fn wait_for_failure(store: &remanent::Store, count: u64) {
    let mut polls = 0;
    while store.stats().archive.unwrap().failures < count {
        pause(Duration::from_millis(10));
        polls += 1;
        assert!(polls < 6000, "{:?}", store.stats().archive);
    }
}

#[test]
fn archive_catches_up_when_bucket_returns() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 3);
    take_away(&bed);
    let ticket = step(&store, &pages).unwrap();
    wait_for_failure(&store, 1);
    let stats = store.stats().archive.unwrap();
    let failure = stats.last_failure.expect("the last attempt failed");
    assert!(matches!(&failure, Error::Archive(error) if error.kind == ArchiveErrorKind::Bucket), "{failure}");
    // Commits and snapshots continue, and the log that is not archived is retained.
    for _ in 0..3 {
        (0..60).for_each(|_| step(&store, &pages).unwrap().wait(Ack::Durable).unwrap());
        store.snapshot().unwrap();
    }
    assert!(!ticket.wait_timeout(Ack::Archived, Duration::from_millis(50)).unwrap());
    bring_back(&bed);
    archive_steps(&store, &pages, 1);
    assert!(ticket.is_acknowledged(Ack::Archived).unwrap());
    assert_eq!(store.stats().archive.unwrap().gaps, 0);
    assert_eq!(bed.restored_step("restored"), step_of(&store));
}

/// The object of the last batch is created, but the check for a newer boundary fails. The archive then completes the
/// append without a further batch.
#[test]
fn run_of_unknown_outcome_is_completed_without_further_batches() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 3);
    fs::write(bed.bucket().join("bound"), b"a file, so that no boundary can be looked for").unwrap();
    let ticket = step(&store, &pages).unwrap();
    assert!(!ticket.wait_timeout(Ack::Archived, Duration::from_millis(300)).unwrap());
    wait_for_failure(&store, 1);
    let failures = store.stats().archive.unwrap().failures;
    wait_for_failure(&store, failures + 1);
    assert!(!ticket.is_acknowledged(Ack::Archived).unwrap(), "acknowledged although the check failed");
    fs::remove_file(bed.bucket().join("bound")).unwrap();
    ticket.wait(Ack::Archived).unwrap();
    assert_eq!(bed.restored_step("restored"), 4);
}

/// A caller that waits for the archive is notified when the store closes.
#[test]
fn close_wakes_waiting_callers() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 3);
    take_away(&bed);
    let ticket = step(&store, &pages).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| ticket.wait(Ack::Archived));
        wait_for_failure(&store, 1);
        store.close().unwrap();
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Closed), "{error}");
    });
    bring_back(&bed);
    let store = bed.open();
    archive_steps(&store, &pages, 1);
    assert_eq!(bed.restored_step("restored"), 5);
}

/// The bucket rejects fences for so long that the directory cannot record every attempt.
#[test]
fn refused_fences_do_not_fill_the_directory() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 3);
    store.close().unwrap();
    let record = || fs::metadata(bed.store().join("ARCHIVE")).unwrap().len();
    let before = record();
    let open = || {
        let archive = bed.archive().required(false);
        plain_options(Create::Never).archive(archive).open(bed.store()).unwrap()
    };
    fs::write(bed.bucket().join("bound"), b"a file, so that no fence can be checked").unwrap();
    for _ in 0..2 {
        let store = open();
        wait_for_failure(&store, 4);
        store.close().unwrap();
    }
    assert!(record() < before + 1000, "{} bytes", record());
    fs::remove_file(bed.bucket().join("bound")).unwrap();
    let store = open();
    archive_steps(&store, &pages, 1);
    assert_eq!(bed.restored_step("restored"), 4);
}

/// When the log that is not archived exceeds its limit, it is released. The archive continues with a snapshot.
#[test]
fn archive_continues_with_snapshot_after_bound() {
    let bed = Bed::new();
    let options = || plain_options(Create::IfEmpty).archive(bed.archive().log_len_max(128 << 10));
    let store = options().open(bed.store()).unwrap();
    let pages = pages(&store);
    archive_steps(&store, &pages, 3);
    take_away(&bed);
    let ticket = step(&store, &pages).unwrap();
    wait_for_failure(&store, 1);
    for _ in 0..6 {
        (0..200).for_each(|_| _ = step(&store, &pages).unwrap());
        store.snapshot().unwrap();
        let failures = store.stats().archive.unwrap().failures;
        wait_for_failure(&store, failures + 1);
    }
    let names = fs::read_dir(bed.store().join("log")).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let segments = names.iter().filter(|name| name.ends_with(".log")).count();
    assert!(segments < 8, "the log is kept for an archive that is too far behind: {names:?}");
    bring_back(&bed);
    ticket.wait(Ack::Archived).unwrap();
    archive_steps(&store, &pages, 2);
    let archive = store.stats().archive.unwrap();
    assert_eq!(archive.gaps, 1, "{archive:?}");
    assert_eq!(bed.restored_step("restored"), step_of(&store));
    store.close().unwrap();
    let store = options().open(bed.store()).unwrap();
    archive_steps(&store, &pages, 5);
    assert_eq!(bed.restored_step("restored"), step_of(&store));
}

#[test]
fn open_without_bucket_fails_unless_not_required() {
    let bed = Bed::new();
    let store = bed.open();
    let pages = pages(&store);
    archive_steps(&store, &pages, 3);
    store.close().unwrap();
    // The folder exists, but its objects cannot be read.
    fs::rename(bed.bucket().join("line"), bed.path("line")).unwrap();
    fs::write(bed.bucket().join("line"), b"a file").unwrap();
    let error = bed.options().open(bed.store()).unwrap_err();
    assert!(matches!(&error, Error::Archive(error) if error.kind == ArchiveErrorKind::Bucket), "{error:?}");
    let options = plain_options(Create::Never).archive(bed.archive().required(false));
    let store = options.open(bed.store()).unwrap();
    let ticket = step(&store, &pages).unwrap();
    wait_for_failure(&store, 1);
    fs::remove_file(bed.bucket().join("line")).unwrap();
    fs::rename(bed.path("line"), bed.bucket().join("line")).unwrap();
    ticket.wait(Ack::Archived).unwrap();
    assert_eq!(bed.restored_step("restored"), 4);
}
