//! The rows about incarnations without a commit.

use std::sync::Arc;

use remanent::disk::Disk;
use remanent::error::FileName;
use remanent::testing::sim_disk::{CrashImage, CrashPlan, SimDisk, Tears};
use remanent::{Lsn, SnapshotId, View};
use remanent_format::state::survey::Survey;

use super::bench::{create_page, flip, step, stepped};
use crate::files::{Files, State, open};

/// Returns the numbers of the incarnations on the line, oldest first.
fn line(disk: &SimDisk) -> Vec<u32> {
    let survey = Survey::read(&Files::of(disk)).unwrap();
    survey.log.line().iter().map(|(_, opening)| opening.incarnation.number).collect()
}

/// Returns the total length and the number of a closed store's files.
fn disk_use(disk: &SimDisk) -> (usize, usize) {
    let files = Files::of(disk);
    (files.bytes_len(), files.0.len())
}

#[test]
fn opens_without_commits_leave_disk_unchanged() {
    for steps in [None, Some(3), Some(100)] {
        let (disk, before) = match steps {
            None => (SimDisk::new(), vec![]),
            Some(steps) => (stepped(steps).0, vec![1]),
        };
        let reopen = |number: u32| {
            let store = open(&disk).unwrap();
            assert_eq!(store.recovered().position.incarnation.number, number, "{steps:?}");
            assert_eq!(store.recovered().position.lsn, Lsn(steps.map_or(0, |steps| steps as u64 + 1)));
            let state = State::of(&store);
            store.close().unwrap();
            state
        };
        let first = before.len() as u32 + 1;
        let state = reopen(first);
        (first + 1..first + 4).for_each(|number| _ = reopen(number));
        let settled = disk_use(&disk);
        for number in first + 4..first + 100 {
            assert_eq!(reopen(number), state);
            assert_eq!(line(&disk), [&before[..], &[number]].concat(), "{steps:?}");
        }
        let (bytes, files) = disk_use(&disk);
        // Prepared segments may or may not exist at the time of the close.
        let most = (settled.0 + 4 * (16 << 10), settled.1 + 4);
        assert!(bytes <= most.0 && files <= most.1, "{steps:?}: {settled:?} became {bytes}, {files}");
        // Later batches follow all of these incarnations.
        let store = open(&disk).unwrap();
        let page = create_page(&store);
        step(&store, page, 7);
        let state = State::of(&store);
        store.close().unwrap();
        assert_eq!(State::of(&open(&disk).unwrap()), state, "{steps:?}");
    }
}

/// Explores crashes to a depth of two, while files are created, renamed or recycled.
#[test]
fn crash_while_skipping_incarnation_loses_nothing() {
    let (disk, _, state) = stepped(3);
    (0..2).for_each(|_| open(&disk).unwrap().close().unwrap());
    let disk = Files::of(&disk).disk();
    let from = disk.events();
    drop(open(&disk).unwrap());
    let (mut with, mut without) = (0, 0);
    let check = |image: &CrashImage| {
        let name = image.to_string();
        let before = line(&image.disk);
        let from = image.disk.events();
        let store = open(&image.disk).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(State::of(&store), state, "{name}");
        let position = store.recovered().position;
        assert_eq!(
            (position.incarnation.number, position.lsn),
            (before[before.len() - 1] + 1, Lsn(4)),
            "{name}"
        );
        drop(store);
        assert_eq!(line(&image.disk), [1, position.incarnation.number], "{name}");
        (before[before.len() - 1], from)
    };
    let plan =
        CrashPlan { events: from..disk.events(), images_max: 24, tears: Tears::None, ..CrashPlan::default() };
    let mut outer = 0;
    let mut twice = |image: CrashImage| {
        let (newest, from) = check(&image);
        *(if newest == 3 { &mut with } else { &mut without }) += 1;
        outer += 1;
        if outer % 8 > 0 {
            return;
        }
        let plan = CrashPlan {
            events: from..image.disk.events(),
            images_max: 2,
            tears: Tears::None,
            ..CrashPlan::default()
        };
        image.disk.kill_images(&plan, |image| _ = check(&image));
        image.disk.power_images(&plan, |image| _ = check(&image));
    };
    disk.kill_images(&plan, &mut twice);
    disk.power_images(&plan, &mut twice);
    // The number of crash images depends on the concurrent writes of other threads.
    assert!(with > 3 && without > 3, "{with} with it, {without} without");
}

#[test]
fn incarnation_of_replay_start_is_kept() {
    // The first manifest of a fork points into the fork's first incarnation.
    let (source, ..) = stepped(3);
    let source: Arc<dyn Disk> = Arc::new(source);
    let forked = SimDisk::new();
    View::open_on(&source, None).unwrap().fork_on(&(Arc::new(forked.clone()) as Arc<dyn Disk>)).unwrap();
    // The same applies to a snapshot before the first commit.
    let (quiet, ..) = stepped(3);
    let store = open(&quiet).unwrap();
    store.snapshot().unwrap();
    store.close().unwrap();
    for disk in [forked, quiet] {
        let first = line(&disk);
        let began = *first.last().unwrap();
        let mut state = None;
        for number in began + 1..began + 6 {
            let store = open(&disk).unwrap();
            assert_eq!(*state.get_or_insert(State::of(&store)), State::of(&store));
            assert_eq!(store.recovered().snapshot, Some(SnapshotId(1)));
            assert_eq!(store.recovered().harmless, []);
            store.close().unwrap();
            assert!(line(&disk).ends_with(&[began, number]), "{:?}", line(&disk));
        }
    }
}

#[test]
fn an_unreadable_manifest_keeps_every_incarnation() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let page = create_page(&store);
    step(&store, page, 9);
    store.snapshot().unwrap();
    let state = State::of(&store);
    store.close().unwrap();
    let manifest = FileName::Manifest(1);
    let len = disk.bytes(manifest).unwrap().len() as u64;
    let damaged = Files::of(&disk).disk();
    [20, len / 2 + 20].into_iter().for_each(|at| flip(&damaged, manifest, at));
    for (disk, all_stay) in [(disk, false), (damaged, true)] {
        let before = line(&disk);
        for _ in 0..3 {
            let store = open(&disk).unwrap();
            assert_eq!(State::of(&store), state);
            store.close().unwrap();
        }
        let grown = line(&disk).len() - before.len();
        assert_eq!(grown, if all_stay { 3 } else { 1 }, "{before:?} became {:?}", line(&disk));
    }
}
