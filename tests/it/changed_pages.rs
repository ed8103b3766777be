//! A snapshot examines only pages that are flagged as changed. Each kind of change must therefore flag its
//! page, and the flag must stay until a snapshot that contains the page is published.
//!
//! At the start of each case, the newest snapshot contains all pages and no page is flagged. The next
//! snapshot, which is rebuilt from the files, must contain the pages that the case changes. A change that
//! this snapshot missed would be lost, because replay starts after the change. The snapshot's own link must
//! name exactly the changed pages.

use std::collections::BTreeSet;

use remanent::batch::{Shadow, Width};
use remanent::error::FileName;
use remanent::options::{Compression, ImageOptions};
use remanent::snapshot::SnapshotInfo;
use remanent::testing::sim_disk::{DiskFault, ENOSPC, Moment, Operation, SimDisk};
use remanent::{Error, Options, PageId, Place, StatePoint, Store, WriteBatch};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;

use crate::files::{self, Files, State, open_with};

const PAGE_LEN: u64 = 1000;
const PAGES: usize = 40;
const PLACE: Place = Place::Device(0);

fn small() -> Options {
    files::small().images(ImageOptions::new().compression(Compression::Off))
}

fn commit(store: &Store, change: impl FnOnce(&mut WriteBatch)) -> Vec<PageId> {
    let mut batch = store.batch();
    change(&mut batch);
    store.commit(batch).unwrap().pages
}

/// Returns a store whose pages are all in a snapshot.
fn settled(disk: &SimDisk) -> (Store, Vec<PageId>) {
    let store = open_with(disk, small()).unwrap();
    let pages = commit(&store, |batch| {
        for number in 0..PAGES as u8 {
            let page = batch.create(PAGE_LEN, PLACE).page();
            batch.fill(page, 0, PAGE_LEN, &[number]).set_metadata(page, "old", "old");
        }
    });
    // The first snapshot contains all pages, and the second finds no changed page.
    store.snapshot().unwrap();
    store.snapshot().unwrap();
    (store, pages)
}

/// Returns the pages that the link of a snapshot names.
fn link(disk: &SimDisk, info: &SnapshotInfo) -> BTreeSet<PageId> {
    let survey = Survey::read(&Files::of(disk)).unwrap();
    let (link, _) = survey.links[&info.id].as_ref().unwrap();
    let tombstones = link.tombstones.iter().map(|tombstone| tombstone.page);
    link.entries.iter().map(|entry| entry.page).chain(tombstones).collect()
}

/// Asserts that the next snapshot has the state of the store, and that its link names exactly the expected
/// pages.
fn check(disk: &SimDisk, store: &Store, why: &str, expected: &[PageId]) {
    let state = State::of(store);
    let info = store.snapshot().unwrap();
    assert_eq!(link(disk, &info), expected.iter().copied().collect(), "{why}");
    let options = RebuildOptions { base: Some(info.id), until: Some(info.end), ..RebuildOptions::default() };
    let rebuilt = rebuild(&Files::of(disk), &options).unwrap();
    assert!(State::rebuilt(&rebuilt) == state, "{why}: the snapshot is not the state");
    // After this snapshot, no page is flagged as changed.
    let next = store.snapshot().unwrap();
    assert_eq!(link(disk, &next), BTreeSet::new(), "{why}: again");
}

#[test]
fn every_kind_of_change_is_in_next_snapshot() {
    type Operation = fn(&mut WriteBatch, PageId);
    type Change = fn(&Store, &[PageId]) -> Vec<PageId>;
    let one: [(&str, Operation); 9] = [
        ("a range", |batch, page| _ = batch.write(page, 3, b"range")),
        ("a mask", |batch, page| _ = batch.write_masked(page, 8, Width::W1, &[0b101], b"mask1234")),
        ("elements", |batch, page| _ = batch.scatter(page, Width::W4, &[1, 200], b"elements")),
        ("a pattern", |batch, page| _ = batch.fill(page, 0, 500, b"ab")),
        ("a new length", |batch, page| _ = batch.resize(page, 700)),
        ("metadata", |batch, page| _ = batch.set_metadata(page, "new", 1u64)),
        ("metadata that goes", |batch, page| _ = batch.remove_metadata(page, "old")),
        ("a move", |batch, page| _ = batch.move_to(page, Place::Host)),
        ("its end", |batch, page| _ = batch.delete(page)),
    ];
    for (why, change) in one {
        let disk = SimDisk::new();
        let (store, pages) = settled(&disk);
        commit(&store, |batch| change(batch, pages[7]));
        check(&disk, &store, why, &pages[7..8]);
    }

    let others: [(&str, Change); 7] = [
        ("creation", |store, _| commit(store, |batch| _ = batch.create(10, PLACE).page())),
        ("creation and end", |store, pages| {
            let new = commit(store, |batch| _ = batch.create(10, PLACE).page());
            commit(store, |batch| _ = batch.delete(new[0]).write(pages[0], 0, b"x"));
            pages[..1].to_vec()
        }),
        ("a clone", |store, pages| commit(store, |batch| _ = batch.clone_page(pages[5]))),
        ("bytes that lie on the device", |store, pages| {
            let bytes = store.device_bytes(16, PLACE).unwrap();
            bytes.write(0, b"from the device!").unwrap();
            commit(store, |batch| _ = batch.write_device(pages[39], 20, &bytes));
            pages[39..].to_vec()
        }),
        ("a capture", |store, pages| {
            let copy = store.working_copy(pages[9], Width::W1, Shadow::Page).unwrap();
            copy.bytes().write(30, b"captured").unwrap();
            commit(store, |batch| _ = batch.capture(&copy));
            pages[9..10].to_vec()
        }),
        ("a page written ahead of its batch", |store, pages| {
            let content: Vec<u8> = (0..20_000_u32).map(|at| (at % 251) as u8).collect();
            let mut changed = commit(store, |batch| {
                batch.create_from(content, PLACE);
            });
            changed.extend(&pages[30..31]);
            commit(store, |batch| _ = batch.write(pages[30], 0, b"meanwhile"));
            changed
        }),
        ("a restore", |store, pages| {
            let before = store.lsn();
            commit(store, |batch| _ = batch.write(pages[1], 0, b"undone").delete(pages[2]));
            commit(store, |batch| _ = batch.create(10, PLACE).page());
            store.restore(StatePoint::Lsn(before)).unwrap();
            // The store has taken a background snapshot.
            Vec::new()
        }),
    ];
    for (why, change) in others {
        let disk = SimDisk::new();
        let (store, pages) = settled(&disk);
        let changed = change(&store, &pages);
        check(&disk, &store, why, &changed);
    }
}

#[test]
fn failed_snapshot_keeps_changes() {
    // Returns true if the snapshot failed for lack of space. Other tests cover calls that succeed on a full
    // disk or poison the store.
    let fails = |what: &str, strike: &dyn Fn(&SimDisk)| {
        let disk = SimDisk::new();
        let (store, pages) = settled(&disk);
        commit(&store, |batch| _ = batch.write(pages[4], 0, b"first").delete(pages[5]));
        strike(&disk);
        let Err(Error::DiskFull { .. }) = store.snapshot() else { return false };
        disk.set_capacity(None);
        commit(&store, |batch| _ = batch.write(pages[6], 0, b"second"));
        check(&disk, &store, what, &pages[4..7]);
        true
    };
    assert!(fails("a full disk", &|disk| disk.set_capacity(Some(0))));
    // Let one operation fail, possibly in the thread that creates segments.
    for operation in [Operation::Create, Operation::Write, Operation::SyncFolder] {
        for skip in 0..3 {
            let fault = DiskFault { operation, skip, times: 1, errno: ENOSPC };
            fails(&format!("{operation:?}, {skip}"), &|disk| disk.fail(fault));
        }
    }
}

fn end(disk: &SimDisk) -> Moment {
    Moment { event: disk.events(), tear: None }
}

#[test]
fn replayed_changes_are_in_next_snapshot() {
    let disk = SimDisk::new();
    let (store, pages) = settled(&disk);
    commit(&store, |batch| _ = batch.write(pages[0], 0, b"replayed").delete(pages[1]));
    let new = commit(&store, |batch| _ = batch.create(10, PLACE).page());
    let killed = disk.after_kill(end(&disk));
    drop(store);
    let store = open_with(&killed, small()).unwrap();
    assert!(store.recovered().replayed_batches >= 2);
    commit(&store, |batch| _ = batch.write(pages[20], 0, b"since"));
    check(&killed, &store, "replayed, and since", &[pages[0], pages[1], pages[20], new[0]]);

    // A restore is replayed because its snapshot was never published.
    let disk = SimDisk::new();
    let (store, pages) = settled(&disk);
    let before = store.lsn();
    commit(&store, |batch| _ = batch.write(pages[3], 0, b"undone").delete(pages[4]));
    let events = disk.events();
    store.restore(StatePoint::Lsn(before)).unwrap();
    drop(store);
    let mut replayed = 0;
    for event in events..=disk.events() {
        let killed = disk.after_kill(Moment { event, tear: None });
        let store = open_with(&killed, small()).unwrap();
        let has_both = store.page(pages[4]).is_ok();
        let changed = [(3, true), (4, true)].map(|(at, _)| pages[at]);
        let is_replayed = store.recovered().snapshot.is_some_and(|id| id.0 == 2);
        if is_replayed {
            replayed += usize::from(has_both);
            check(&killed, &store, &format!("killed at {event}"), &changed);
        }
    }
    assert!(replayed > 0, "no moment lies between the restore and its snapshot");
}

#[test]
fn damaged_image_is_rewritten_for_unchanged_page() {
    let disk = SimDisk::new();
    let (store, pages) = settled(&disk);
    let survey = Survey::read(&Files::of(&disk)).unwrap();
    let snapshot = survey.snapshot(*survey.links.keys().next_back().unwrap()).unwrap();
    let image = snapshot.entries.iter().find(|entry| entry.page == pages[11]).unwrap().image.unwrap();
    disk.damage(FileName::Pages(image.file), image.offset + 5, b"damage");
    let state = State::of(&store);
    assert!(store.scrub().unwrap().mended.is_some());
    let mended = store.snapshots().last().unwrap().clone();
    assert_eq!(link(&disk, &mended), pages[11..12].iter().copied().collect());
    assert_eq!(mended.bytes_written, PAGE_LEN);
    check(&disk, &store, "mended", &[]);
    store.close().unwrap();
    assert!(State::of(&open_with(&disk, small()).unwrap()) == state);
}
