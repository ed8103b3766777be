//! Kills pushes and restores at each request.

use std::fs;

use remanent::options::Create;
use remanent_archive::directory::{ArchivedDirectory, RestoreTarget};
use remanent_archive::line::{Archive, Takeover};
use remanent_archive::mirror;
use remanent_archive::rules::Rules;

use crate::bed::{Bed, Life, copy_directory, lock, open_state, options, poll_times};

/// Returns a bucket with an archived store, and the store with further batches and a snapshot that are not archived.
fn archived_life(seed: u64) -> (Bed, Life) {
    let bed = Bed::new(seed);
    let mut life = Life::new(seed);
    life.work(4).close().unwrap();
    bed.push(&life.path).unwrap();
    let store = life.work(3);
    store.snapshot().unwrap();
    store.close().unwrap();
    life.work(3).close().unwrap();
    (bed, life)
}

#[test]
fn push_after_a_killed_push_continues() {
    let (before, mut life) = archived_life(3);
    let newest = *life.states.keys().next_back().unwrap();
    let mut is_killed = true;
    let mut polls = 0;
    while is_killed {
        for arrives in [false, true] {
            let scratch = tempfile::tempdir().unwrap();
            let path = scratch.path().join("store");
            copy_directory(&life.path, &path);
            let bed = before.copy();
            let bucket = bed.bucket();
            let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
            let mut directory = ArchivedDirectory::open(&path, lock(&path)).unwrap();
            let push = mirror::push(archive, &mut directory, Takeover::Refused);
            is_killed = poll_times(push, polls).is_none();
            drop(directory);
            let in_flight = bed.world.borrow_mut().in_flight.remove(&bucket.process);
            if let Some(request) = in_flight.filter(|_| arrives) {
                bed.world.borrow_mut().apply(&request);
            }
            let pushed = bed.push(&path).unwrap_or_else(|error| panic!("after {polls} polls: {error}"));
            assert_eq!(pushed.archived.lsn.0, newest);
            assert!(bed.restored_state() == life.states[&newest], "after {polls} polls");
        }
        polls += 1;
    }
    assert!(polls > 10, "{polls}");
    life.work(1).close().unwrap();
}

#[test]
fn killed_restore_leaves_no_openable_store() {
    let (before, life) = archived_life(4);
    before.push(&life.path).unwrap();
    let newest = *life.states.keys().next_back().unwrap();
    let mut is_killed = true;
    let mut polls = 0;
    let mut refused = 0;
    while is_killed {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path();
        let bed = before.copy();
        let bucket = bed.bucket();
        let archive = Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() };
        let target = RestoreTarget::open(path, lock(path)).unwrap();
        let restored = poll_times(mirror::restore(archive, &target), polls);
        drop(target);
        is_killed = restored.is_none();
        if is_killed {
            options(Create::Never).open(path).unwrap_err();
            if path.join("ARCHIVE").exists() {
                options(Create::IfEmpty).open(path).unwrap_err();
                refused += 1;
            }
            bed.restore(path).unwrap_or_else(|error| panic!("after {polls} polls: {error}"));
        }
        assert!(open_state(path) == life.states[&newest], "after {polls} polls");
        polls += 1;
    }
    assert!(refused > 0, "{polls}");
}

/// A restore publishes STORE last, when all other files exist.
#[test]
fn restore_without_store_file_is_refused() {
    let (bed, life) = archived_life(5);
    bed.push(&life.path).unwrap();
    let directory = tempfile::tempdir().unwrap();
    bed.restore(directory.path()).unwrap();
    let (store, temporary) = (directory.path().join("STORE"), directory.path().join("0000000000000000.tmp"));
    for is_temporary in [false, true] {
        if is_temporary {
            fs::copy(&store, &temporary).unwrap();
        }
        let bytes = fs::read(&store).unwrap();
        fs::remove_file(&store).unwrap();
        let refused = options(Create::IfEmpty).open(directory.path()).unwrap_err();
        assert!(refused.to_string().contains("STORE"), "{refused}");
        fs::write(&store, bytes).unwrap();
    }
    fs::remove_file(&store).unwrap();
    bed.restore(directory.path()).unwrap();
    let newest = *life.states.keys().next_back().unwrap();
    assert!(open_state(directory.path()) == life.states[&newest]);
    let refused = bed.restore(directory.path()).unwrap_err();
    assert!(refused.to_string().contains("contains STORE; restore into an empty directory"), "{refused}");
}
