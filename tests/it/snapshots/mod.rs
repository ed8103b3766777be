//! The cost of snapshots, the files that they share, and how long these files are kept.

mod retention;
mod damage;
mod deferred;

use std::collections::BTreeSet;
use std::num::NonZero;
use std::ops::Range;

use remanent::error::FileName;
use remanent::options::{Compression, ImageOptions, Retention};
use remanent::snapshot::SnapshotInfo;
use remanent::testing::sim_disk::{SimDisk, SyncPoint};
use remanent::{Error, Options, PageId, Place, SnapshotId, SnapshotOptions, StatePoint, Store};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;

use crate::files::{self, Files, State, open_with};
use crate::with_options::With;

const PAGE_LEN: u64 = 1000;
/// Chunk length for which each page has its own chunk and file, if there are enough threads.
const CHUNK_LEN: u64 = PAGE_LEN / 8;

/// Options with the smallest segments, and uncompressed images.
fn small() -> Options {
    files::small().images(ImageOptions::new().compression(Compression::Off))
}

/// Creates a store with this number of written pages.
fn store_of(disk: &SimDisk, options: Options, pages: usize) -> (Store, Vec<PageId>) {
    let store = open_with(disk, options).unwrap();
    let mut created = Vec::new();
    for number in 0..pages {
        let mut batch = store.batch();
        let page = batch.create(PAGE_LEN, Place::Host).page();
        batch.fill(page, 0, PAGE_LEN, &(number as u32).to_le_bytes());
        created.extend(store.commit(batch).unwrap().pages);
    }
    (store, created)
}

fn change(store: &Store, pages: &[PageId], value: u32) {
    for page in pages {
        let mut batch = store.batch();
        batch.fill(*page, 4, 8, &value.to_le_bytes()).set_root("value", u64::from(value));
        store.commit(batch).unwrap();
    }
}

/// Asserts that every kept snapshot can be rebuilt from the files, and has its state.
fn check_kept(disk: &SimDisk, expected: &[(SnapshotId, State)]) {
    let files = Files::of(disk);
    for (id, state) in expected {
        let survey = Survey::read(&files).unwrap();
        let end = survey.snapshot(*id).unwrap().end;
        let options = RebuildOptions { base: Some(*id), until: Some(end), ..RebuildOptions::default() };
        assert_eq!(&State::rebuilt(&rebuild(&files, &options).unwrap()), state, "snapshot {id}");
    }
}

/// Returns the chain of a snapshot, beginning with the snapshot itself.
fn chain(disk: &SimDisk, id: SnapshotId) -> Vec<SnapshotId> {
    let survey = Survey::read(&Files::of(disk)).unwrap();
    survey.chain(id).unwrap().iter().map(|link| link.snapshot).collect()
}

fn ids(store: &Store) -> Vec<u64> {
    store.snapshots().iter().map(|info| info.id.0).collect()
}

#[test]
fn snapshot_writes_only_changed_pages() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small(), 40);
    let costs = |info: &SnapshotInfo| (info.pages, info.bytes / PAGE_LEN, info.bytes_written / PAGE_LEN);
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 40, 40));
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 40, 0));
    change(&store, &pages[3..5], 1);
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 40, 2));
    let mut batch = store.batch();
    batch.delete(pages[0]).resize(pages[1], 0);
    let empty = batch.create(0, Place::Host).page();
    batch.set_metadata(empty, "name", "empty");
    store.commit(batch).unwrap();
    change(&store, &pages[39..], 2);
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 38, 1));
    let state = State::of(&store);
    let last = store.snapshots().last().unwrap().clone();
    store.close().unwrap();
    assert_eq!(chain(&disk, SnapshotId(4)), [4, 3, 2, 1].map(SnapshotId));

    // The next open bases its first snapshot on that of the previous process.
    let store = open_with(&disk, small()).unwrap();
    assert_eq!(State::of(&store), state);
    assert_eq!(store.recovered().snapshot, Some(last.id));
    assert_eq!(store.snapshots().last(), Some(&last));
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 38, 0));
    assert_eq!(chain(&disk, SnapshotId(5)).len(), 5);
}

#[test]
fn long_or_much_changed_chain_is_folded() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small(), 30);
    let mut lens = Vec::new();
    for round in 0..12 {
        change(&store, &pages[round..=round], 77);
        let taken = store.snapshot().unwrap();
        lens.push(chain(&disk, taken.id).len());
        check_kept(&disk, &[(taken.id, State::of(&store))]);
    }
    // The ninth snapshot contains all changes since the base. Links are removed together with their
    // snapshots.
    assert_eq!(lens, [1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5]);
    change(&store, &pages[..14], 78);
    let much = store.snapshot().unwrap();
    assert_eq!(chain(&disk, much.id).len(), 1, "more than half of the pages since the base");
    assert_eq!(much.bytes_written, 14 * PAGE_LEN, "a base names older images all the same");
    let state = State::of(&store);
    store.close().unwrap();
    assert_eq!(State::of(&open_with(&disk, small()).unwrap()), state);
}

#[test]
fn links_and_images_stay_as_long_as_a_kept_snapshot_needs_them() {
    links_and_images_stay(|| small().retention(Retention::new().snapshots_kept(2)));
}

#[test]
fn each_sync_of_multi_file_snapshots_matters() {
    links_and_images_stay(|| {
        small()
            .retention(Retention::new().snapshots_kept(2))
            .with(|options| options.images.chunk_len = Some(CHUNK_LEN))
    });
}

fn links_and_images_stay(options: impl Fn() -> Options) {
    let disk = SimDisk::new();
    let (mut store, pages) = store_of(&disk, options(), 24);
    let mut states = Vec::new();
    for round in 0..20_u32 {
        change(&store, &pages[round as usize % 20..][..2], round);
        let id = store.snapshot().unwrap().id;
        states.push((id, State::of(&store)));
        let kept = ids(&store);
        states.retain(|(id, _)| kept.contains(&id.0));
        assert_eq!(states.len(), kept.len().min(2), "round {round}");
        check_kept(&disk, &states);
        // No other file stays.
        let survey = Survey::read(&Files::of(&disk)).unwrap();
        let needed: BTreeSet<SnapshotId> = kept.iter().flat_map(|id| chain(&disk, SnapshotId(*id))).collect();
        assert_eq!(survey.links.keys().copied().collect::<BTreeSet<_>>(), needed, "round {round}");
        let files = kept.iter().flat_map(|id| survey.snapshot(SnapshotId(*id)).unwrap().entries.clone());
        let files: BTreeSet<FileName> =
            files.filter_map(|entry| entry.image).map(|image| FileName::Pages(image.file)).collect();
        let there = Files::of(&disk).names(|file| matches!(file, FileName::Pages(_)));
        assert_eq!(there.into_iter().collect::<BTreeSet<_>>(), files, "round {round}");
        if round % 3 == 2 {
            store.close().unwrap();
            store = open_with(&disk, options()).unwrap();
            assert_eq!(ids(&store), kept, "links that are there for others are no snapshots");
            assert_eq!(State::of(&store), states.last().unwrap().1);
        }
    }
}

/// Each thread that writes a snapshot has its own file, if there are enough bytes to write.
#[test]
fn threads_write_files_concurrently() {
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(4) as u64;
    let disk = SimDisk::new();
    // Use three pages per chunk, because files with one page each would be so sparse that they are emptied.
    let options = || {
        small()
            .retention(Retention::new().snapshots_kept(2))
            .with(|options| options.images.chunk_len = Some(3 * PAGE_LEN))
    };
    let (store, pages) = store_of(&disk, options(), 160);
    let there = || Files::of(&disk).names(|file| matches!(file, FileName::Pages(_)));
    let files = |numbers: Range<u64>| numbers.map(FileName::Pages).collect::<Vec<_>>();
    // The timing of threads determines which file contains which page. No file is empty.
    let own = |store: &Store, numbers: Range<u64>| {
        let survey = Survey::read(&Files::of(&disk)).unwrap();
        let last = store.snapshots().last().unwrap().id;
        let link = survey.links[&last].as_ref().unwrap().0.clone();
        assert_eq!(link.next_file, numbers.end);
        let images = link.entries.iter().filter_map(|entry| entry.image);
        let own: Vec<u64> = images.map(|image| image.file).filter(|file| numbers.contains(file)).collect();
        assert!(numbers.clone().all(|file| own.contains(&file)), "{own:?}");
        own.len() as u64
    };
    assert_eq!(store.snapshot().unwrap().bytes_written, 160 * PAGE_LEN);
    assert_eq!((there(), own(&store, 1..threads + 1)), (files(1..threads + 1), 160));
    // Pages that fit into a few chunks are written to one file.
    let next = threads + 1;
    change(&store, &pages[5..6], 1);
    assert_eq!(store.snapshot().unwrap().bytes_written, PAGE_LEN);
    assert_eq!((there().last(), own(&store, next..next + 1)), (Some(&FileName::Pages(next)), 1));
    // An image of a batch is between the files of two snapshots.
    let mut batch = store.batch();
    batch.create_from(vec![7; 8 * PAGE_LEN as usize], Place::Host);
    let born = store.commit(batch).unwrap().pages;
    change(&store, &pages[..130], 2);
    assert_eq!(store.snapshot().unwrap().bytes_written, 130 * PAGE_LEN);
    assert_eq!(own(&store, next + 2..next + 2 + threads), 130);

    let (state, kept) = (State::of(&store), store.snapshots());
    store.close().unwrap();
    let store = open_with(&disk, options()).unwrap();
    assert_eq!((State::of(&store), store.snapshots()), (state.clone(), kept.clone()));
    change(&store, &pages[20..40], 3);
    let taken = store.snapshot().unwrap();
    let kept = [&kept[1..], &[taken]].concat();
    assert_eq!(store.snapshots(), kept);
    store.close().unwrap();
    // Each snapshot is reported as when it was taken, except that the previous link of the oldest one was
    // removed. Up to as many files as a snapshot may write therefore count as files of the oldest one. If one
    // thread writes, this includes the file of the first snapshot.
    let store = open_with(&disk, options()).unwrap();
    let mut found = store.snapshots();
    assert_eq!(found[0].bytes_written, if threads == 1 { 160 } else { 130 } * PAGE_LEN);
    found[0].bytes_written = kept[0].bytes_written;
    assert_eq!(found, kept);
    check_kept(&disk, &[(kept[0].id, state)]);
    // All files are removed once no snapshot names them.
    store.prune(&store.retention().snapshots_kept(1)).unwrap();
    (0..4).for_each(|value| {
        change(&store, &[&pages[..], &born].concat(), 10 + value);
        store.snapshot().unwrap();
    });
    let survey = Survey::read(&Files::of(&disk)).unwrap();
    let entries =
        ids(&store).into_iter().flat_map(|id| survey.snapshot(SnapshotId(id)).unwrap().entries.clone());
    let images = entries.filter_map(|entry| entry.image);
    let named: BTreeSet<FileName> = images.map(|image| FileName::Pages(image.file)).collect();
    assert_eq!(there().into_iter().collect::<BTreeSet<_>>(), named);
    assert!(named.iter().all(|file| *file > FileName::Pages(next + 2 + threads)), "{named:?}");
}

#[test]
fn the_snapshot_after_a_restore_names_the_images_of_its_table() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small(), 20);
    change(&store, &pages[..3], 1);
    let first = store.snapshot().unwrap();
    let state = State::of(&store);
    change(&store, &pages[2..6], 2);
    let mut batch = store.batch();
    batch.delete(pages[10]);
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    store.restore(StatePoint::Snapshot(first.id)).unwrap();
    let after = store.snapshots().last().unwrap().clone();
    assert_eq!((after.pages, after.bytes_written), (20, 0), "all images were there");
    change(&store, &pages[10..11], 3);
    assert_eq!(store.snapshot().unwrap().bytes_written, PAGE_LEN);
    store.close().unwrap();
    let store = open_with(&disk, small()).unwrap();
    let restored = State::of(&store);
    assert_eq!(restored.pages.len(), state.pages.len());
    check_kept(&disk, &[(store.snapshots().last().unwrap().id, restored)]);
}

#[test]
fn sparsely_used_image_file_is_compacted_and_removed() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 60);
    store.snapshot().unwrap();
    let file = FileName::Pages(1);
    assert!(disk.bytes(file).is_some());
    // A third of the file is still named. The next snapshot rewrites that part, and then no snapshot names
    // the file.
    change(&store, &pages[..40], 1);
    assert_eq!(store.snapshot().unwrap().bytes_written, 40 * PAGE_LEN);
    assert!(disk.bytes(file).is_some());
    let emptied = store.snapshot().unwrap();
    assert_eq!(emptied.bytes_written, 20 * PAGE_LEN);
    assert_eq!(disk.bytes(file), None);
    assert_eq!(store.snapshot().unwrap().bytes_written, 0, "once is enough");
    let state = State::of(&store);
    check_kept(&disk, &[(store.snapshots()[0].id, state.clone())]);
    store.close().unwrap();
    assert_eq!(State::of(&open_with(&disk, small()).unwrap()), state);
}

#[test]
fn file_of_named_snapshot_is_not_compacted() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 60);
    store.snapshot().unwrap();
    change(&store, &pages[..40], 1);
    // A third of the first file is used. Without the named snapshot, the file would now be emptied.
    store.snapshot_with(SnapshotOptions::new().name("with a third of it")).unwrap();
    assert_eq!(ids(&store), [2]);
    assert_eq!(store.snapshot().unwrap().bytes_written, 0);
    assert!(disk.bytes(FileName::Pages(1)).is_some());
}

#[test]
fn published_snapshot_replaces_others_once_verified() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 4);
    store.snapshot().unwrap();
    change(&store, &pages, 1);
    let published = store.snapshot_with(SnapshotOptions::new().only_published()).unwrap();
    assert_eq!((published.id, published.verified), (SnapshotId(2), false));
    let state = State::of(&store);
    let cut = open_with(&disk.after_power_cut(), small()).unwrap();
    assert_eq!((cut.recovered().snapshot, State::of(&cut)), (Some(published.id), state));
    store.wait_verified().unwrap();
    let [kept] = &store.snapshots()[..] else { panic!("{:?}", ids(&store)) };
    assert_eq!((kept.id, kept.verified), (published.id, true));
    // A snapshot names images of the snapshots that were published before it.
    for value in 2..6 {
        change(&store, &pages[..1], value);
        store.snapshot_with(SnapshotOptions::new().only_published()).unwrap();
    }
    change(&store, &pages[1..2], 6);
    let last = store.snapshot().unwrap();
    assert!(last.verified);
    assert_eq!(ids(&store), [last.id.0]);
    change(&store, &pages[..1], 7);
    let published = store.snapshot_with(SnapshotOptions::new().only_published()).unwrap();
    let state = State::of(&store);
    store.close().unwrap();
    // The close waited for the verification, so the snapshot is recorded and not published again.
    let store = open_with(&disk, small()).unwrap();
    assert_eq!((store.recovered().snapshot, State::of(&store)), (Some(published.id), state));
    let name = FileName::Manifest(published.id.0).to_string();
    assert_eq!(disk.history().iter().filter(|event| event.ends_with(&format!("to {name}"))).count(), 1);
}

#[test]
fn snapshot_lost_by_skipped_sync_loses_no_state() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().retention(Retention::new().snapshots_kept(1)), 4);
    store.snapshot().unwrap();
    change(&store, &pages, 1);
    let state = State::of(&store);
    disk.skip_syncs(|point| matches!(point, SyncPoint::File(FileName::Pages(_))));
    let published = store.snapshot_with(SnapshotOptions::new().only_published()).unwrap();
    let error = store.wait_verified().unwrap_err();
    assert!(matches!(error, Error::Poisoned(_)), "{error}");
    assert!(matches!(error.file(), Some(FileName::Pages(_))), "{error}");
    let refused = store.snapshot().unwrap_err();
    assert_eq!(refused.file(), error.file(), "{refused}");
    assert_eq!(ids(&store), [1, published.id.0], "nothing was removed for it");
    drop(store);
    let store = open_with(&disk.after_power_cut(), small()).unwrap();
    assert_eq!((store.recovered().snapshot, State::of(&store)), (Some(SnapshotId(1)), state));
}
