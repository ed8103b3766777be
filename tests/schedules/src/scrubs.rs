//! Scrubs of a store that goes on meanwhile.

use std::time::Duration;

use remanent::disk::Disk;
use remanent::{Ack, FileName, Folder, Lsn, Scrubbed, SnapshotId};

use crate::ground::{Ground, options};
use crate::runner::{at_once, explore};

#[test]
fn a_scrub_takes_no_segment_that_is_being_made_for_a_missing_one() {
    explore(|time| {
        let ground = Ground::new(time, options(), 1);
        let write = || {
            for count in 1..=4 {
                let mut batch = ground.batch(0, count);
                batch.note("x".repeat(7000));
                ground.store.submit(batch).unwrap().wait(Ack::Durable).unwrap();
            }
        };
        let scrub = || {
            let Scrubbed { damage, .. } = ground.store.scrub().unwrap();
            assert!(damage.is_empty(), "{damage:?}");
        };
        at_once(&[&write, &scrub]);
        assert!(ground.store.stats().log.rolls >= 2);
        ground.close(Lsn(5), Duration::ZERO);
    });
}

#[test]
fn a_scrub_brings_no_snapshot_back_that_is_pruned_meanwhile() {
    explore(|time| {
        let ground = Ground::new(time, options().snapshots_kept(1), 1);
        ground.store.snapshot().unwrap();
        // One copy of its manifest: the scrub means to write the file anew.
        let manifest = FileName::Manifest(1);
        let byte = ground.disk.bytes(manifest).expect("it was published")[300];
        ground.disk.damage(manifest, 300, &[byte ^ 1]);
        let snapshots = || {
            for count in 1..=2 {
                ground.count(0, count, Ack::Durable).unwrap();
                ground.store.snapshot().unwrap();
            }
        };
        at_once(&[&snapshots, &|| _ = ground.store.scrub().unwrap()]);
        let kept: Vec<SnapshotId> = ground.store.snapshots().iter().map(|kept| kept.id).collect();
        let names = ground.disk.list(Folder::Snapshots).unwrap();
        let on_disk = names.iter().filter_map(|name| match FileName::parse(Folder::Snapshots, name) {
            Some(FileName::Manifest(id)) => Some(SnapshotId(id)),
            _ => None,
        });
        assert_eq!(on_disk.collect::<Vec<_>>(), kept);
        ground.close(Lsn(3), Duration::ZERO);
    });
}
