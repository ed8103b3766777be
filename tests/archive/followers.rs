//! Followers of archives.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use remanent::error::ArchiveErrorKind;
use remanent::follow::{FollowFrom, FollowedBatch, Follower, FollowerPosition, Replica};
use remanent::options::{ArchiveOptions, Create};
use remanent::{Ack, Error, Lsn, PageId, Store};
use remanent_archive::object::{BatchPoint, Content, Fence, LineObject, Nonce, ObjectKey};

use crate::bed::{
    Bed, archive_steps, check_replica, copy_directory, files, pages, pause, plain_options, step, step_of,
};

const LONG: Duration = Duration::from_secs(60);
/// An interval so long that a follower requests an object that does not exist yet only once.
const NEVER: Duration = Duration::from_secs(24 * 3600);

fn open(bed: &Bed, from: impl Into<FollowFrom>) -> Result<Follower, Error> {
    Follower::open_archive(&bed.archive(), from.into())
}

/// Returns the next batches up to `lsn`.
fn read_to(follower: &mut Follower, lsn: Lsn) -> Vec<FollowedBatch> {
    let mut batches = Vec::new();
    while follower.position().lsn < lsn {
        batches.push(follower.next(LONG).unwrap().expect("the batch is archived"));
    }
    batches
}

/// Returns all batches that the follower can read without waiting, and the error after them.
fn drain(follower: &mut Follower) -> (Vec<FollowedBatch>, Option<Error>) {
    let mut batches = Vec::new();
    loop {
        match follower.next(Duration::ZERO) {
            Ok(Some(batch)) => batches.push(batch),
            Ok(None) => return (batches, None),
            Err(error) => return (batches, Some(error)),
        }
    }
}

fn positions(batches: &[FollowedBatch]) -> Vec<FollowerPosition> {
    batches.iter().map(FollowedBatch::position).collect()
}

fn kind(error: &Error) -> ArchiveErrorKind {
    match error {
        Error::Archive(archive) => archive.kind,
        error => panic!("{error:?}"),
    }
}

/// Commits steps, and then restores the state before them, so that a batch names a table.
fn archive_a_restore(store: &Store, pages: &[PageId]) {
    let before = store.lsn();
    archive_steps(store, pages, 2);
    store.restore(before).unwrap();
    store.submit(store.batch().note("restored")).unwrap().wait(Ack::Archived).unwrap();
}

/// Returns the objects of the line in order, with their paths.
fn line(bed: &Bed) -> Vec<(PathBuf, LineObject)> {
    let objects = files(&bed.bucket().join("line")).into_iter().map(|(path, bytes)| {
        let name = path.file_name().unwrap().to_str().unwrap();
        let position = u64::from_str_radix(name, 16).unwrap();
        (path, LineObject::decode(&bytes, position, None).unwrap())
    });
    objects.collect()
}

/// Appends a fence that cuts the line at `batch`, like a restore that continues at an earlier batch.
fn append_cut(bed: &Bed, batch: BatchPoint) {
    let (_, last) = line(bed).pop().unwrap();
    let (position, links) = (last.position + 1, last.links.after(&last));
    let fences = line(bed).into_iter().filter_map(|(_, object)| match object.content {
        Content::Fence(fence) => Some((object.position, fence)),
        _ => None,
    });
    let fence = fences.max_by_key(|(position, _)| *position).unwrap().1;
    let content = Content::Fence(Fence { openings: Vec::new(), cut: Some(batch), ..fence });
    let (nonce, nonce_before) = (Nonce([7; 16]), last.nonce);
    let object = LineObject {
        position,
        term: position,
        nonce,
        nonce_before,
        links,
        archived: batch,
        data: Vec::new(),
        content,
        ..last
    };
    fs::write(bed.bucket().join(ObjectKey::Line(position).to_string()), object.encode().unwrap()).unwrap();
}

#[test]
fn each_batch_is_returned_once_in_order() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 7);
    let mut follower = open(&bed, FollowFrom::Beginning).unwrap();
    let mut batches = read_to(&mut follower, store.lsn());
    // The writer continues, and the follower waits for its batches.
    for count in [1, 12, 3] {
        archive_steps(&store, &created, count);
        batches.extend(read_to(&mut follower, store.lsn()));
    }
    archive_a_restore(&store, &created);
    batches.extend(read_to(&mut follower, store.lsn()));
    store.close().unwrap();
    // The next open starts another incarnation.
    let store = bed.open();
    archive_steps(&store, &created, 9);
    batches.extend(read_to(&mut follower, store.lsn()));
    assert!(follower.next(Duration::ZERO).unwrap().is_none());

    let mut local = Follower::open(bed.store(), FollowFrom::Beginning).unwrap();
    let logged = read_to(&mut local, store.lsn());
    assert_eq!(positions(&batches), positions(&logged));
    let mut replica = Replica::default();
    for (batch, logged) in batches.iter().zip(&logged) {
        assert_eq!(batch.payload(), logged.payload());
        assert!(batch.durable() >= batch.lsn());
        replica.apply(batch).unwrap();
    }
    assert_eq!(check_replica(&replica), step_of(&store));
    assert!(batches.iter().any(|batch| batch.restored().is_some()));
}

#[test]
fn position_of_either_follower_continues_the_other() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    for _ in 0..4 {
        archive_steps(&store, &created, 3);
    }
    store.close().unwrap();
    let store = bed.open();
    archive_steps(&store, &created, 4);
    let all = read_to(&mut open(&bed, FollowFrom::Beginning).unwrap(), store.lsn());
    assert_eq!(all.len() as u64, store.lsn().0);
    for (at, batch) in all.iter().enumerate() {
        let position: FollowerPosition = batch.position().to_string().parse().unwrap();
        let mut later = open(&bed, position).unwrap();
        assert_eq!(later.position(), position);
        assert_eq!(
            positions(&read_to(&mut later, store.lsn())),
            positions(&all[at + 1..]),
            "after {position}"
        );
        let mut local = Follower::open(bed.store(), position.into()).unwrap();
        assert_eq!(positions(&read_to(&mut local, store.lsn())), positions(&all[at + 1..]));
    }
}

/// A position of a follower of the log may be above the end of the archive.
#[test]
fn position_ahead_of_the_archive_is_awaited() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 3);
    let copy = bed.path("copy");
    copy_directory(&bed.bucket(), &copy);
    archive_steps(&store, &created, 3);
    let mut local = Follower::open(bed.store(), FollowFrom::Beginning).unwrap();
    let ahead = read_to(&mut local, store.lsn())[4].position();
    archive_steps(&store, &created, 2);
    store.close().unwrap();
    let archive =
        ArchiveOptions::new(format!("file://{}", copy.display())).interval(Duration::from_millis(20));
    let mut follower = Follower::open_archive(&archive, ahead.into()).unwrap();
    assert!(follower.next(Duration::ZERO).unwrap().is_none());
    copy_directory(&bed.bucket(), &copy);
    assert_eq!(follower.next(LONG).unwrap().unwrap().lsn(), ahead.lsn.next());
    // Another batch with the same Lsn is archived.
    let other = FollowerPosition { chain: ahead.chain ^ 1, ..ahead };
    let error = Follower::open_archive(&archive, other.into()).unwrap_err();
    assert!(matches!(error, Error::Diverged { .. }), "{error:?}");
}

#[test]
fn deleted_batches_are_overtaken() {
    let bed = Bed::new();
    let store = bed.open();
    archive_steps(&store, &pages(&store), 4);
    store.close().unwrap();
    let mut behind = open(&bed, FollowFrom::Beginning).unwrap();
    let first = behind.next(LONG).unwrap().unwrap();
    for _ in 0..4 {
        let store = bed.open();
        archive_steps(&store, &pages(&store), 3);
        store.snapshot().unwrap();
        store.close().unwrap();
        bed.push();
    }
    for from in [FollowFrom::Beginning, first.position().into()] {
        let error = open(&bed, from).unwrap_err();
        assert!(matches!(error, Error::Overtaken { .. }), "{from:?}: {error:?}");
    }
    // A follower that was open also returns the error, after the batches that it has read.
    let (_, error) = drain(&mut behind);
    let error = error.unwrap_or_else(|| behind.next(LONG).unwrap_err());
    assert!(matches!(error, Error::Overtaken { .. }), "{error:?}");
    let mut newest = open(&bed, FollowFrom::Snapshot).unwrap();
    assert!(newest.position().lsn > first.lsn());
    assert!(newest.next(Duration::ZERO).unwrap().is_none());
}

#[test]
fn cut_ends_followers_of_removed_batches() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    for _ in 0..5 {
        archive_steps(&store, &created, 2);
    }
    store.close().unwrap();
    let mut above = open(&bed, FollowFrom::Beginning).unwrap();
    let (all, error) = drain(&mut above);
    assert!(error.is_none(), "{error:?}");
    let mut at_cut = open(&bed, all[5].position()).unwrap();
    let runs = line(&bed);
    let at = runs.iter().find_map(|(_, object)| match &object.content {
        Content::Run(run) if run.after.lsn == all[4].lsn() => Some(run.after),
        _ => None,
    });
    append_cut(&bed, at.expect("a run ends there"));

    let survived = Some(all[4].lsn());
    let is_diverged = |error: &Error, position: FollowerPosition| match error {
        Error::Diverged { position: found, survived: kept } => {
            (*found, *kept) == (position.batch(), survived)
        }
        _ => false,
    };
    let error = above.next(LONG).unwrap_err();
    assert!(is_diverged(&error, all.last().unwrap().position()), "{error:?}");
    let (_, error) = drain(&mut at_cut);
    assert!(matches!(error, Some(Error::Diverged { .. })), "{error:?}");
    let error = open(&bed, all[5].position()).unwrap_err();
    assert!(is_diverged(&error, all[5].position()), "{error:?}");
    // Followers that are at a batch that the cut keeps continue, and do not return the removed batches.
    let (kept, error) = drain(&mut open(&bed, FollowFrom::Beginning).unwrap());
    assert!(error.is_none(), "{error:?}");
    assert_eq!(positions(&kept), positions(&all[..5]));
    let (kept, error) = drain(&mut open(&bed, all[4].position()).unwrap());
    assert!(kept.is_empty() && error.is_none(), "{error:?}");
}

#[test]
fn batches_in_a_gap_are_overtaken() {
    let bed = Bed::new();
    let options = plain_options(Create::IfEmpty).archive(bed.archive().log_len_max(128 << 10));
    let store = options.open(bed.store()).unwrap();
    let pages = pages(&store);
    archive_steps(&store, &pages, 3);
    let mut follower = open(&bed, FollowFrom::Beginning).unwrap();
    read_to(&mut follower, store.lsn());
    fs::rename(bed.bucket(), bed.path("away")).unwrap();
    let mut failures = 0;
    for _ in 0..6 {
        (0..200).for_each(|_| _ = step(&store, &pages).unwrap());
        store.snapshot().unwrap();
        while store.stats().archive.unwrap().failures <= failures {
            pause(Duration::from_millis(10));
        }
        failures = store.stats().archive.unwrap().failures;
    }
    fs::rename(bed.path("away"), bed.bucket()).unwrap();
    archive_steps(&store, &pages, 2);
    assert_eq!(store.stats().archive.unwrap().gaps, 1);
    let error = follower.next(LONG).unwrap_err();
    assert!(
        matches!(error, Error::Overtaken { lsn, .. } if lsn == follower.position().lsn.next()),
        "{error:?}"
    );
    let mut replica = Replica::from_archive(&bed.archive()).unwrap();
    let mut follower = open(&bed, replica.position()).unwrap();
    read_to(&mut follower, store.lsn()).iter().for_each(|batch| replica.apply(batch).unwrap());
    assert_eq!(check_replica(&replica), step_of(&store));
}

#[test]
fn replica_of_an_archive_continues_with_its_follower() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 8);
    assert_eq!(Replica::from_archive(&bed.archive()).unwrap().lsn(), Lsn(0));
    store.close().unwrap();
    for _ in 0..2 {
        let store = plain_options(Create::Never).archive(bed.archive()).open(bed.store()).unwrap();
        archive_steps(&store, &created, 3);
        store.snapshot().unwrap();
        store.close().unwrap();
    }
    bed.push();
    let store = bed.open();
    archive_steps(&store, &created, 6);
    let mut replica = Replica::from_archive(&bed.archive()).unwrap();
    assert_eq!(check_replica(&replica), 14);
    let mut follower = open(&bed, replica.position()).unwrap();
    let batches = read_to(&mut follower, store.lsn());
    assert_eq!(batches.len(), 6);
    batches.iter().for_each(|batch| replica.apply(batch).unwrap());
    assert_eq!((check_replica(&replica), replica.position()), (20, follower.position()));
}

/// A follower sends one request per interval, regardless of the number of calls.
#[test]
fn idle_follower_sends_one_request_per_interval() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 5);
    let archive = bed.archive().interval(NEVER);
    let mut follower = Follower::open_archive(&archive, FollowFrom::Beginning).unwrap();
    read_to(&mut follower, store.lsn());
    drain(&mut follower);
    let before = follower.checks();
    for _ in 0..50 {
        assert!(follower.next(Duration::ZERO).unwrap().is_none());
    }
    assert!(follower.next(Duration::from_millis(1)).unwrap().is_none());
    assert_eq!(follower.checks(), before);
}

#[test]
fn unreachable_bucket_does_not_end_a_follower() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    archive_steps(&store, &created, 5);
    let mut follower = open(&bed, FollowFrom::Beginning).unwrap();
    let mut batches = vec![follower.next(LONG).unwrap().unwrap()];
    let line = bed.bucket().join("line");
    fs::rename(&line, bed.path("line")).unwrap();
    fs::write(&line, b"a file, so that no object can be read").unwrap();
    let error = loop {
        match follower.next(LONG) {
            Ok(batch) => batches.extend(batch),
            Err(error) => break error,
        }
    };
    assert_eq!(kind(&error), ArchiveErrorKind::Bucket, "{error}");
    fs::remove_file(&line).unwrap();
    fs::rename(bed.path("line"), &line).unwrap();
    archive_steps(&store, &created, 2);
    batches.extend(read_to(&mut follower, store.lsn()));
    assert_eq!(batches.len() as u64, store.lsn().0);
}

#[test]
fn damaged_and_missing_objects_are_named() {
    let bed = Bed::new();
    let store = bed.open();
    let created = pages(&store);
    for _ in 0..4 {
        archive_steps(&store, &created, 5);
    }
    store.close().unwrap();
    let check = |name: &str, text: &str| {
        let (batches, error) = match open(&bed, FollowFrom::Beginning) {
            Ok(mut follower) => drain(&mut follower),
            Err(error) => (Vec::new(), Some(error)),
        };
        // An image is fetched when it is read.
        let read = |batch: &FollowedBatch| {
            let mut replica = Replica::from_archive(&bed.archive())?;
            let _ = replica.apply(batch);
            batch.operations().iter().filter_map(|op| op.page()).try_for_each(|page| {
                match batch.image(page) {
                    Err(Error::UnknownPage { .. }) => Ok(()),
                    read => read.map(drop),
                }
            })
        };
        let error = error.or_else(|| batches.iter().find_map(|batch| read(batch).err()));
        let error = error.unwrap_or_else(|| panic!("{name} is not missed"));
        assert_eq!(kind(&error), ArchiveErrorKind::Damaged, "{error}");
        assert!(error.to_string().contains(name) && error.to_string().contains(text), "{error}");
    };
    let runs = line(&bed).into_iter().filter(|(_, object)| matches!(object.content, Content::Run(_)));
    let runs: Vec<PathBuf> = runs.map(|(path, _)| path).collect();
    let data: Vec<PathBuf> = files(&bed.bucket().join("data")).into_keys().collect();
    assert!(runs.len() > 2 && data.len() > 2);
    for path in runs[1..runs.len() - 1].iter().chain(&data) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let bytes = fs::read(path).unwrap();
        let mut flipped = bytes.clone();
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(path, flipped).unwrap();
        check(name, "damaged");
        if data.contains(path) {
            fs::remove_file(path).unwrap();
            check(name, "missing");
        }
        fs::write(path, bytes).unwrap();
    }
}
