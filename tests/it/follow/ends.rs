//! The two ways in which following a log ends: the log was recycled before the follower read it, or the follower's
//! batch was lost.

use crate::with_options::With;
use remanent::error::{FileName, Folder, Remedy};
use remanent::history::Incarnation;
use remanent::options::Retention;

use super::*;

/// Commits until the segment that contains `lsn` is recycled.
fn recycle_up_to(writer: &mut Writer, disk: &SimDisk) {
    let first = |disk: &SimDisk| disk.list(Folder::Log).unwrap()[0].clone();
    let before = first(disk);
    while first(disk) == before {
        writer.commit(10);
        writer.store.snapshot().unwrap();
    }
}

#[test]
fn overtaken_follower_gets_restart_position() {
    let (sim, disk) = sim();
    // A restore takes a snapshot. Together with the next snapshot, there are two after it. If only two were kept, the
    // restore's table would be removed before the follower reads it.
    let mut writer = Writer::open(&disk, options().retention(Retention::new().snapshots_kept(3)));
    let mut reader = Reader::open(&disk);
    writer.commit(5);
    assert!(reader.step().unwrap().is_some());
    let early = reader.follower.position();
    recycle_up_to(&mut writer, &sim);
    let newest = writer.store.snapshots().last().unwrap().id;

    // Test a follower that is reading, one that resumes, and one that starts at the beginning of the log.
    let errors = [
        loop {
            match reader.step() {
                Ok(batch) => assert!(batch.is_some(), "what was missed is not there yet"),
                Err(error) => break error,
            }
        },
        Follower::open_on(disk.clone(), early.into()).map(drop).unwrap_err(),
        Follower::open_on(disk.clone(), FollowFrom::Beginning).map(drop).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::Overtaken { snapshot: Some(id), .. } if id == newest), "{error}");
        assert_eq!(error.remedy(), Remedy::StartOver);
    }
    // A new follower starts from a snapshot and is not overtaken again.
    let mut reader = Reader::from_snapshot(&disk);
    assert_eq!(reader.catch_up().unwrap(), writer.store.lsn());
    for _ in 0..30 {
        writer.commit(2);
        writer.store.snapshot().unwrap();
        assert_eq!(reader.catch_up().unwrap(), writer.store.lsn());
    }
    assert!(writer.store.stats().segment > 10);
}

/// A power cut may undo the removal of one segment but not that of the next. Neither segment is needed any more.
#[test]
fn resurrected_segment_is_not_damage() {
    let (sim, disk) = sim();
    let store =
        crate::files::open_with(&sim, options().retention(Retention::new().snapshots_kept(1))).unwrap();
    let segment = |number| sim.bytes(FileName::Segment(number));
    let fill = |segments: u64| {
        let until = store.stats().segment + segments;
        while store.stats().segment < until {
            let mut batch = store.batch();
            batch.note("n".repeat(900));
            store.commit(batch).unwrap();
        }
    };
    fill(3);
    let bytes = segment(1).unwrap();
    let mut follower = Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap();
    let first = follower.next(Duration::ZERO).unwrap().expect("a batch is there").position();
    let snapshot = store.snapshot().unwrap();
    drop(store);
    assert!(segment(1).is_none() && segment(2).is_none());
    sim.create(FileName::Segment(1)).unwrap().write_at(0, &bytes).unwrap();
    let mut follower = Follower::open_on(disk.clone(), first.into()).unwrap();
    let error = loop {
        match follower.next(Duration::ZERO) {
            Ok(batch) => assert!(batch.is_some(), "what was missed is not there yet"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Overtaken { snapshot: Some(id), .. } if id == snapshot.id), "{error}");
    assert!(follower.position().lsn > first.lsn, "what came back can be read");
}

#[test]
fn a_follower_at_the_end_is_not_overtaken_by_recycling() {
    let (sim, disk) = sim();
    for _ in 0..4 {
        let mut writer = Writer::open(&disk, options());
        let mut reader = Reader::from_snapshot(&disk);
        reader.catch_up().unwrap();
        for _ in 0..6 {
            writer.commit(3);
            assert_eq!(reader.catch_up().unwrap(), writer.store.lsn());
            // The position remains valid after the preceding segments were removed.
            writer.store.snapshot().unwrap();
            reader.reopen(&disk).unwrap();
            assert!(reader.step().unwrap().is_none());
        }
    }
    assert!(!sim.history().is_empty());
}

#[test]
fn a_snapshot_is_followed_from_its_end() {
    let (_, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    let from_nothing = Follower::open_on(disk.clone(), FollowFrom::Snapshot).unwrap();
    assert_eq!(from_nothing.position().lsn, Lsn(0));
    writer.commit(7);
    let end = writer.store.snapshot().unwrap().end;
    writer.commit(2);
    let mut follower = Follower::open_on(disk.clone(), FollowFrom::Snapshot).unwrap();
    assert_eq!(follower.position().lsn, end);
    assert_eq!(Replica::from_snapshot_on(&disk).unwrap().position(), follower.position());
    assert_eq!(follower.next(Duration::ZERO).unwrap().unwrap().lsn(), end.next());
}

#[test]
fn follower_diverges_after_power_cut_loses_batches() {
    let (sim, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    let mut reader = Reader::open(&disk);
    writer.commit(3);
    writer.store.wait_durable(Lsn(3)).unwrap();
    reader.catch_up().unwrap();
    let durable = reader.follower.position();
    sim.skip_syncs(|_| true);
    writer.commit(4);
    assert_eq!(reader.catch_up().unwrap(), Lsn(7));
    let lost = reader.follower.position();
    let cut: Arc<dyn Disk> = Arc::new(sim.after_power_cut());
    drop(writer);

    let diverged = |position: FollowerPosition, survived| {
        let error = Follower::open_on(cut.clone(), position.into()).map(drop).unwrap_err();
        assert!(
            matches!(&error, Error::Diverged { position: of, survived: to }
                if *of == position.batch() && *to == survived),
            "{error}"
        );
        assert_eq!(error.remedy(), Remedy::StartOver);
    };
    // The follower diverges before the next open, after it, and when new batches have the Lsns of the lost ones.
    diverged(lost, Some(Lsn(3)));
    let mut writer = Writer::open(&cut, options());
    diverged(lost, Some(Lsn(3)));
    writer.commit(6);
    diverged(lost, Some(Lsn(3)));
    // A follower that had not read the lost batches continues.
    let mut follower = Follower::open_on(cut.clone(), durable.into()).unwrap();
    assert_eq!(follower.next(Duration::ZERO).unwrap().unwrap().lsn(), Lsn(4));

    // The store was never at these positions.
    for forged in [
        FollowerPosition { chain: durable.chain ^ 1, ..durable },
        FollowerPosition { lsn: Lsn(0), ..durable },
    ] {
        let error = Follower::open_on(cut.clone(), forged.into()).map(drop).unwrap_err();
        assert!(matches!(error, Error::Diverged { .. }), "{forged}: {error}");
    }
    for number in [1, 2, 3] {
        let incarnation = Incarnation { number, random: durable.incarnation.random ^ 1 };
        diverged(FollowerPosition { incarnation, ..durable }, None);
    }
    diverged(Follower::open_on(other_store(), FollowFrom::Snapshot).unwrap().position(), None);
}

/// Returns another store, in its first incarnation.
fn other_store() -> Arc<dyn Disk> {
    let (_, disk) = sim();
    let mut writer = Writer::open(&disk, options());
    writer.commit(2);
    writer.store.snapshot().unwrap();
    disk
}

#[test]
fn running_follower_detects_divergence() {
    // The follower keeps running while the writer's machine loses power, as with a directory on a network file system.
    let (sim, disk) = sim();
    let long = options().with(|options| options.log.segment_len = 128 << 10);
    let mut writer = Writer::open(&disk, long.clone());
    writer.commit(3);
    writer.store.wait_durable(Lsn(3)).unwrap();
    sim.skip_syncs(|_| true);
    writer.commit(4);
    let seen = SimDisk::new();
    for folder in [Folder::Root].into_iter().chain(Folder::INNER) {
        seen.make_folder(folder).unwrap();
    }
    show(&sim, &seen);
    let seen_disk: Arc<dyn Disk> = Arc::new(seen.clone());
    let mut reader = Reader::open(&seen_disk);
    assert_eq!(reader.catch_up().unwrap(), Lsn(7));

    let cut = sim.after_power_cut();
    drop(writer);
    let cut_disk: Arc<dyn Disk> = Arc::new(cut.clone());
    Writer::open(&cut_disk, long).commit(6);
    show(&cut, &seen);
    let error = reader.step().unwrap_err();
    assert!(matches!(error, Error::Diverged { survived: Some(Lsn(3)), .. }), "{error}");
}

/// Replaces all files of `target` with those of `source`.
fn show(source: &SimDisk, target: &SimDisk) {
    for folder in [Folder::Root].into_iter().chain(Folder::INNER) {
        for file in source.list(folder).unwrap().iter().filter_map(|name| FileName::parse(folder, name)) {
            if !matches!(file, FileName::Lock) {
                target.create(file).unwrap().write_at(0, &source.bytes(file).unwrap()).unwrap();
            }
        }
    }
}

/// A close omits frames of the last segment that retention no longer keeps. A follower that has not read them is
/// overtaken, and one that has read them continues.
#[test]
fn close_overtakes_followers_behind_the_kept_log() {
    let (sim, disk) = sim();
    let open = || {
        crate::files::open_with(
            &sim,
            options()
                .retention(Retention::new().snapshots_kept(1))
                .with(|options| options.log.segment_len = 1 << 20),
        )
        .unwrap()
    };
    let commit = |store: &remanent::Store| {
        let mut batch = store.batch();
        batch.note("n".repeat(900));
        store.commit(batch).unwrap();
    };
    let follow = |from: FollowFrom, batches: usize| {
        let mut follower = Follower::open_on(disk.clone(), from)?;
        for _ in 0..batches {
            follower.next(Duration::ZERO)?.expect("a batch is there");
        }
        Ok::<_, Error>(follower)
    };
    let store = open();
    commit(&store);
    // This follower is not polled before the second close.
    let mut asleep = follow(FollowFrom::Beginning, 1).unwrap();
    store.close().unwrap();
    let store = open();
    // The segment of this batch also contains the next batches.
    let mut long = store.batch();
    let page = long.create(250_000, Place::Host).page();
    long.write(page, 0, &[1; 240_000]);
    store.commit(long).unwrap();
    (0..5).for_each(|_| commit(&store));
    let late = follow(FollowFrom::Beginning, 3).unwrap().position();
    let mut early = follow(FollowFrom::Beginning, 7).unwrap();
    let newest = store.snapshot().unwrap().id;
    (0..3).for_each(|_| commit(&store));
    early.next(Duration::ZERO).unwrap().expect("the first batch after the snapshot");
    let resumed = early.position();
    (0..2).for_each(|_| _ = early.next(Duration::ZERO).unwrap().expect("a later batch"));
    let segment = FileName::Segment(store.stats().segment);
    let before = sim.bytes(segment).unwrap();
    store.close().unwrap();
    let after = sim.bytes(segment).unwrap();
    assert!(after.len() < before.len() && after[4096..8192] != before[4096..8192], "no frame was left out");

    let is_overtaken = |error: Error| {
        assert!(matches!(error, Error::Overtaken { snapshot: Some(id), .. } if id == newest), "{error}");
    };
    is_overtaken(follow(late.into(), 0).map(drop).unwrap_err());
    is_overtaken(asleep.next(Duration::from_secs(20)).map(drop).unwrap_err());
    // From the snapshot on, no batch is missing.
    follow(resumed.into(), 2).unwrap();
    // At the end of the log, no batch is missing, for a running follower and for one that resumes.
    let mut back = follow(early.position().into(), 0).unwrap();
    for follower in [&mut early, &mut back] {
        assert!(follower.next(Duration::ZERO).unwrap().is_none());
    }
    let store = open();
    is_overtaken(follow(late.into(), 0).map(drop).unwrap_err());
    follow(resumed.into(), 2).unwrap();
    commit(&store);
    for follower in [&mut early, &mut back] {
        let batch = follower.next(Duration::from_secs(20)).unwrap().expect("the next batch");
        assert_eq!(batch.lsn(), store.lsn());
    }
}

/// After a prune of names, a close keeps the log after a removed snapshot for followers, although no kept snapshot
/// begins there.
#[test]
fn close_keeps_log_after_released_name() {
    let (sim, disk) = sim();
    let options = options()
        .retention(Retention::new().snapshots_kept(2))
        .with(|options| options.log.segment_len = 1 << 20);
    let store = crate::files::open_with(&sim, options).unwrap();
    let commit = || {
        let mut batch = store.batch();
        batch.note("n".repeat(900));
        store.commit(batch).unwrap();
    };
    // The segment of this batch also contains the next batches.
    let mut long = store.batch();
    let page = long.create(250_000, Place::Host).page();
    long.write(page, 0, &[1; 240_000]);
    store.commit(long).unwrap();
    store.snapshot_with("first").unwrap();
    let segment = store.stats().segment;
    commit();
    let mut follower = Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap();
    (0..2).for_each(|_| _ = follower.next(Duration::ZERO).unwrap().expect("a batch"));
    let position = follower.position();
    drop(follower);
    commit();
    store.snapshot().unwrap();
    let pruned = store.prune(&store.retention().give_up("first").names_only(true)).unwrap();
    assert_eq!((pruned.snapshots.len(), store.stats().segment), (1, segment));
    store.close().unwrap();
    let mut follower = Follower::open_on(disk.clone(), position.into()).unwrap();
    follower.next(Duration::ZERO).unwrap().expect("the batch after the position");
}
