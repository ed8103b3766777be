//! Snapshots during commits, in the background, and with little memory.

use std::time::Duration;

use remanent::options::{MemoryOptions, SnapshotSchedule};
use remanent::snapshot::ScrubReport;
use remanent::{Ack, Lsn, Place, SnapshotOptions};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};

use crate::ground::{Ground, PAGE_LEN, files, options};
use crate::runner::{at_once, explore};

#[test]
fn a_snapshot_during_commits_holds_whole_batches() {
    explore(|time| {
        let ground = Ground::new(time, options(), 1);
        let write = || ground.count_to(3, 0, Ack::Logged);
        let snapshot = || {
            let snapshot = ground.store.snapshot().unwrap();
            // I7: everything that the snapshot needs is durable.
            let (durable, _) = ground.after_power_cut();
            assert!(snapshot.redo <= snapshot.end && snapshot.end <= durable, "{snapshot:?} {durable}");
        };
        at_once(&[&write, &snapshot]);
        ground.close(Lsn(4), Duration::ZERO);
    });
}

#[test]
fn exact_snapshot_equals_state_at_its_batch() {
    explore(|time| {
        let ground = Ground::new(time, options(), 1);
        let write = || ground.count_to(3, 0, Ack::Applied);
        let snapshot = || {
            let snapshot = ground.store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
            assert_eq!(snapshot.redo, snapshot.end);
            let options = RebuildOptions {
                base: Some(snapshot.id),
                until: Some(snapshot.end),
                ..RebuildOptions::default()
            };
            let alone = rebuild(&files(&ground.disk.after_power_cut()), &options).unwrap();
            assert_eq!((alone.table.lsn(), alone.batches), (snapshot.end, 0));
            // Batch 1 created the pages, and batch n + 1 filled both with n.
            let count = snapshot.end.0 - 1;
            assert_eq!(ground.count_of(0, &alone), count);
        };
        at_once(&[&write, &snapshot]);
        ground.close(Lsn(4), Duration::ZERO);
    });
}

#[test]
fn concurrent_snapshots_and_scrub_find_no_damage() {
    explore(|time| {
        let ground = Ground::new(time, options(), 1);
        let snapshots = || {
            let first = ground.store.snapshot().unwrap();
            ground.count(0, 1, Ack::Durable).unwrap();
            assert!(first.id < ground.store.snapshot().unwrap().id);
        };
        let scrub = || {
            let ScrubReport { damage, .. } = ground.store.scrub().unwrap();
            assert_eq!(damage.len(), 0, "{damage:?}");
        };
        at_once(&[&snapshots, &scrub]);
        ground.close(Lsn(2), Duration::ZERO);
    });
}

#[test]
fn store_closes_during_background_snapshot() {
    explore(|time| {
        let ground = Ground::new(time, options().snapshots(SnapshotSchedule::never().log_bytes(1)), 1);
        ground.count_to(2, 0, Ack::Logged);
        ground.close(Lsn(3), Duration::ZERO);
    });
}

#[test]
fn background_snapshot_is_reported() {
    explore(|time| {
        let ground = Ground::new(time, options().snapshots(SnapshotSchedule::never().log_bytes(1)), 1);
        ground.count(0, 1, Ack::Logged).unwrap();
        ground.store.wait_for_snapshots(1);
        let stats = ground.store.stats().snapshots;
        assert!(stats.taken >= 1 && stats.failed == 0, "{stats:?}");
        ground.close(Lsn(2), Duration::ZERO);
    });
}

#[test]
fn snapshot_with_little_memory_blocks_no_commit() {
    explore(|time| {
        // The budget suffices for both pages and one more.
        let options = options().memory(MemoryOptions::new().budget(Place::Host, 3 * PAGE_LEN));
        let ground = Ground::new(time, options, 1);
        let come_and_go = || {
            for _ in 0..2 {
                let mut batch = ground.store.batch();
                batch.create(PAGE_LEN, Place::Host);
                let page = ground.store.commit(batch).unwrap().pages[0];
                let mut batch = ground.store.batch();
                batch.delete(page);
                ground.store.commit(batch).unwrap();
            }
        };
        at_once(&[&come_and_go, &|| _ = ground.store.snapshot().unwrap()]);
        ground.close(Lsn(5), Duration::ZERO);
    });
}
