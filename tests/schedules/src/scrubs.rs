//! Scrubs of a store while batches are committed.

use std::time::Duration;

use remanent::disk::Disk;
use remanent::error::{FileName, Folder};
use remanent::options::{Retention, ScrubSchedule};
use remanent::snapshot::ScrubReport;
use remanent::{Ack, Lsn, SnapshotId};
use remanent_format::image::ImageRef;
use remanent_format::state::survey::Survey;

use crate::ground::{Ground, files, options};
use crate::runner::{at_once, explore};

#[test]
fn scrub_ignores_segment_under_construction() {
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
            let ScrubReport { damage, .. } = ground.store.scrub().unwrap();
            assert!(damage.is_empty(), "{damage:?}");
        };
        at_once(&[&write, &scrub]);
        assert!(ground.store.stats().log.rolls >= 2);
        ground.close(Lsn(5), Duration::ZERO);
    });
}

#[test]
fn scrub_never_resurrects_pruned_snapshot() {
    explore(|time| {
        let ground = Ground::new(time, options().retention(Retention::new().snapshots_kept(1)), 1);
        ground.store.snapshot().unwrap();
        // One copy of the manifest is damaged, so the scrub rewrites the file.
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

/// Returns the image from which recovery would load the first page of a writer, without the log, if the power
/// failed now.
fn image(ground: &Ground, writer: usize) -> ImageRef {
    let survey = Survey::read(&files(&ground.disk.after_power_cut())).unwrap();
    let newest = survey.snapshot(*survey.links.keys().next_back().expect("one was taken")).unwrap();
    let page = ground.pages(writer)[0];
    newest
        .entries
        .iter()
        .find(|entry| entry.page == page)
        .and_then(|entry| entry.image)
        .expect("it has bytes")
}

#[test]
fn concurrent_snapshot_never_names_image_found_damaged() {
    explore(|time| {
        let ground = Ground::new(time, options().retention(Retention::new().snapshots_kept(1)), 2);
        ground.store.snapshot().unwrap();
        // The image of a page that never changes, which every snapshot names.
        let damaged = image(&ground, 1);
        let file = FileName::Pages(damaged.file);
        let byte = ground.disk.bytes(file).expect("it was published")[damaged.offset as usize];
        ground.disk.damage(file, damaged.offset, &[byte ^ 1]);
        let snapshots = || {
            for count in 1..=2 {
                ground.store.submit(ground.batch(0, count)).unwrap().wait(Ack::Durable).unwrap();
                ground.store.snapshot().unwrap();
            }
        };
        let scrub = || {
            let ScrubReport { damage, .. } = ground.store.scrub().unwrap();
            assert!(damage.iter().any(|damage| damage.file == file), "{damage:?}");
        };
        at_once(&[&snapshots, &scrub]);
        assert_ne!(image(&ground, 1), damaged);
        ground.close(Lsn(3), Duration::ZERO);
    });
}

#[test]
fn scrub_ignores_concurrently_recycled_files() {
    explore(|time| {
        // A scrub takes longer than the interval between two scrubs, so that they directly follow each other,
        // and it waits after each frame.
        let slow =
            options().scrubs(ScrubSchedule::new().interval(Duration::from_millis(1)).bytes_per_second(1000));
        let ground = Ground::new(time, slow.retention(Retention::new().snapshots_kept(1)), 1);
        // Each batch fills one segment.
        let write = |count| {
            let mut batch = ground.batch(0, count);
            batch.note("x".repeat(7000));
            ground.store.submit(batch).unwrap().wait(Ack::Durable).unwrap();
        };
        ground.store.snapshot().unwrap();
        (1..=3).for_each(write);
        ground.store.wait_for_scrubs(1);
        for count in 4..=9 {
            ground.store.snapshot().unwrap();
            write(count);
        }
        ground.store.wait_for_scrubs(ground.store.stats().scrubs.done + 1);
        let stats = ground.store.stats().scrubs;
        assert_eq!((stats.failed, stats.damaged), (0, 0), "{:?}", stats.last);
        let survey = Survey::read(&files(&ground.disk)).unwrap();
        assert!(survey.log.beginning().is_none(), "the log was recycled");
        ground.close(Lsn(10), Duration::from_secs(3600));
    });
}
