//! What snapshots cost, what they share, how long they and their files stay.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use remanent::disk::sim::{Moment, SimDisk, SyncPoint};
use remanent::disk::{Disk, Hold};
use remanent::{
    Compression, Error, FileName, Lsn, Metadata, Options, PageId, Place, RestorePoint, Snapshot, SnapshotId,
    SnapshotInfo, Store,
};
use remanent_format::rebuild::{RebuildOptions, Survey, rebuild};

use crate::files::{self, Files, State, open_with};

const PAGE_LEN: u64 = 1000;
/// A chunk for each page, and another file for each page, if there are threads for so many.
const CHUNK_LEN: u64 = PAGE_LEN / 8;

/// The smallest segments, and images as long as their pages.
fn small() -> Options {
    files::small().compression(Compression::Off)
}

/// A store of so many pages, each of them written.
fn store_of(disk: &SimDisk, options: Options, pages: usize) -> (Store, Vec<PageId>) {
    let store = open_with(disk, options).unwrap();
    let mut created = Vec::new();
    for number in 0..pages {
        let mut batch = store.batch();
        let page = batch.create(PAGE_LEN, Place::Host);
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

/// Every kept snapshot can be rebuilt from the files, to the state that it was taken of.
fn check_kept(disk: &SimDisk, expected: &[(SnapshotId, State)]) {
    let files = Files::of(disk);
    for (id, state) in expected {
        let survey = Survey::read(&files).unwrap();
        let end = survey.snapshot(*id).unwrap().end;
        let options = RebuildOptions { base: Some(*id), until: Some(end), ..RebuildOptions::default() };
        assert_eq!(&State::rebuilt(&rebuild(&files, &options).unwrap()), state, "snapshot {id}");
    }
}

/// The links of a snapshot, its own first.
fn chain(disk: &SimDisk, id: SnapshotId) -> Vec<SnapshotId> {
    let survey = Survey::read(&Files::of(disk)).unwrap();
    survey.chain(id).unwrap().iter().map(|link| link.snapshot).collect()
}

/// A read-only handle shows these pages' bytes.
fn check_seen(seen: &Snapshot, state: &State) {
    for (page, expected) in &state.contents {
        let mut bytes = vec![0; expected.len()];
        seen.read(*page, 0, &mut bytes).unwrap();
        assert_eq!(bytes, *expected, "{page}");
    }
}

fn ids(store: &Store) -> Vec<u64> {
    store.snapshots().iter().map(|info| info.id.0).collect()
}

#[test]
fn a_snapshot_writes_what_changed_and_names_the_rest() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small(), 40);
    let costs = |info: &SnapshotInfo| (info.pages, info.bytes / PAGE_LEN, info.bytes_written / PAGE_LEN);
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 40, 40));
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 40, 0));
    change(&store, &pages[3..5], 1);
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 40, 2));
    let mut batch = store.batch();
    batch.delete(pages[0]).resize(pages[1], 0);
    let empty = batch.create(0, Place::Host);
    batch.set_metadata(empty, "name", "empty");
    store.commit(batch).unwrap();
    change(&store, &pages[39..], 2);
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 38, 1));
    let state = State::of(&store);
    let last = store.snapshots().last().unwrap().clone();
    store.close().unwrap();
    assert_eq!(chain(&disk, SnapshotId(4)), [4, 3, 2, 1].map(SnapshotId));

    // The next open knows what its snapshot has.
    let store = open_with(&disk, small()).unwrap();
    assert_eq!(State::of(&store), state);
    assert_eq!(store.recovered().snapshot, Some(last.id));
    assert_eq!(store.snapshots().last(), Some(&last));
    assert_eq!(costs(&store.snapshot().unwrap()), (40, 38, 0));
    assert_eq!(chain(&disk, SnapshotId(5)).len(), 5);
}

#[test]
fn a_chain_is_folded_when_it_is_long_or_much_changed() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small(), 30);
    let mut lens = Vec::new();
    for round in 0..12 {
        change(&store, &pages[round..=round], 77);
        let taken = store.snapshot().unwrap();
        lens.push(chain(&disk, taken.id).len());
        check_kept(&disk, &[(taken.id, State::of(&store))]);
    }
    // The ninth takes the place of all changes since the base; their links go with the snapshots that they are.
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
    links_and_images_stay(|| small().snapshots_kept(2));
}

#[test]
fn the_same_of_snapshots_of_several_files() {
    links_and_images_stay(|| small().snapshots_kept(2).chunk_len(CHUNK_LEN));
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
        // Nothing else stays.
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

/// Each thread that writes a snapshot has a file of its own, if there is enough to write.
#[test]
fn threads_write_files_side_by_side() {
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(4) as u64;
    let disk = SimDisk::new();
    // Three pages a chunk: with one in each, files would be wasteful enough to be emptied.
    let options = || small().snapshots_kept(2).chunk_len(3 * PAGE_LEN);
    let (store, pages) = store_of(&disk, options(), 160);
    let there = || Files::of(&disk).names(|file| matches!(file, FileName::Pages(_)));
    let files = |numbers: Range<u64>| numbers.map(FileName::Pages).collect::<Vec<_>>();
    // Which file has what is up to the threads; none is empty.
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
    // What fits into a few chunks is one file.
    let next = threads + 1;
    change(&store, &pages[5..6], 1);
    assert_eq!(store.snapshot().unwrap().bytes_written, PAGE_LEN);
    assert_eq!((there().last(), own(&store, next..next + 1)), (Some(&FileName::Pages(next)), 1));
    // An image that was written ahead of its batch lies between the files of two snapshots.
    let mut batch = store.batch();
    batch.create_from(vec![7; 8 * PAGE_LEN as usize], Place::Host, None, Metadata::new());
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
    // Each as it was when it was taken. The link before the oldest is gone, so as many files count as its own as a
    // snapshot may have: where one thread writes, that of the first snapshot, too.
    let store = open_with(&disk, options()).unwrap();
    let mut found = store.snapshots();
    assert_eq!(found[0].bytes_written, if threads == 1 { 160 } else { 130 } * PAGE_LEN);
    found[0].bytes_written = kept[0].bytes_written;
    assert_eq!(found, kept);
    check_kept(&disk, &[(kept[0].id, state)]);
    // All are gone once none of them is named any more.
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
    store.restore_from_snapshot(first.id).unwrap();
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
fn a_file_of_which_little_is_named_is_emptied_and_goes() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1), 60);
    store.snapshot().unwrap();
    let file = FileName::Pages(1);
    assert!(disk.bytes(file).is_some());
    // A third of it is named still: the next snapshot writes that, too, and then nothing names the file.
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
fn a_file_that_a_named_snapshot_needs_is_not_emptied() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1), 60);
    store.snapshot().unwrap();
    change(&store, &pages[..40], 1);
    // A third of the first file: it would be emptied now, but for the name.
    store.snapshot_named("with a third of it").unwrap();
    assert_eq!(ids(&store), [2]);
    assert_eq!(store.snapshot().unwrap().bytes_written, 0);
    assert!(disk.bytes(FileName::Pages(1)).is_some());
}

#[test]
fn a_named_snapshot_stays_until_its_name_is_given_up() {
    let disk = SimDisk::new();
    let options = || small().snapshots_kept(1);
    let (store, pages) = store_of(&disk, options(), 24);
    change(&store, &pages[..2], 1);
    let named = store.snapshot_named("before").unwrap();
    let before = State::of(&store);
    assert_eq!((named.name.as_deref(), named.redo), (Some("before"), named.end));
    assert!(
        matches!(store.snapshot_named("before"), Err(Error::NameTaken { snapshot, .. }) if snapshot == named.id)
    );
    for name in [String::new(), "x".repeat(65)] {
        assert!(matches!(store.snapshot_named(&name), Err(Error::Limit { .. })), "{name:?}");
    }
    for round in 0..12 {
        change(&store, &pages, round);
        store.snapshot().unwrap();
    }
    store.close().unwrap();
    let files = Files::of(&disk);
    let redo = Survey::read(&files).unwrap().snapshot(named.id).unwrap().redo;
    assert!(!files.0.contains_key(&FileName::Segment(redo.segment)), "its log is gone");
    check_kept(&disk, &[(named.id, before.clone())]);

    let store = open_with(&disk, options()).unwrap();
    assert_eq!(store.snapshots()[0], named);
    store.restore_from_snapshot(named.id).unwrap();
    let restored = State::of(&store);
    assert_eq!(restored.pages.len(), before.pages.len());
    change(&store, &pages, 99);
    store.snapshot().unwrap();
    store.snapshot().unwrap();

    let given_up = store.retention().give_up("before").give_up("nobody's");
    let listed = || Files::of(&disk).0.into_keys().collect::<BTreeSet<_>>();
    let there = listed();
    let would_go = store.would_prune(&given_up).unwrap();
    assert_eq!(would_go.snapshots, std::slice::from_ref(&named));
    assert!(would_go.bytes() > 24 * PAGE_LEN, "its images: {would_go:?}");
    assert_eq!(listed(), there, "nothing was done yet");
    assert_eq!(store.prune(&given_up).unwrap(), would_go);
    let gone: BTreeSet<FileName> = would_go.files.iter().map(|(file, _)| *file).collect();
    assert!(listed().is_disjoint(&gone));
    assert!(matches!(store.restore_from_snapshot(named.id), Err(Error::NoSnapshot { .. })));
    let state = State::of(&store);
    store.close().unwrap();
    let store = open_with(&disk, options()).unwrap();
    assert_eq!(ids(&store).len(), 1, "and it stays gone");
    assert_eq!(State::of(&store), state);
}

#[test]
fn a_name_given_up_costs_no_snapshot_that_is_needed() {
    let disk = SimDisk::new();
    let (store, _) = store_of(&disk, small().snapshots_kept(1), 4);
    let named = store.snapshot_named("newest").unwrap();
    let pruned = store.prune(&store.retention().give_up("newest")).unwrap();
    assert_eq!(pruned.snapshots, []);
    assert_eq!(store.snapshots(), [named]);
}

#[test]
fn what_a_reader_holds_stays() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1), 24);
    let held = store.snapshot().unwrap();
    let state = State::of(&store);
    let Hold::Held(hold) = disk.hold(held.id).unwrap() else { panic!("nobody takes it away") };
    for round in 0..3 {
        change(&store, &pages, round);
        store.snapshot().unwrap();
    }
    assert_eq!(ids(&store), [held.id.0, 4]);
    check_kept(&disk, &[(held.id, state)]);
    assert_eq!(store.would_prune(&store.retention()).unwrap().held, [held.id]);
    drop(hold);
    let pruned = store.prune(&store.retention()).unwrap();
    assert_eq!(pruned.snapshots, [held]);
    assert_eq!(ids(&store), [4]);
}

/// A name keeps a snapshot's own state. A later one is made of the log behind it, and who reads that holds both.
#[test]
fn the_log_behind_a_snapshot_with_a_name_stays_while_somebody_reads_it() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1), 24);
    let named = store.snapshot_named("named").unwrap();
    change(&store, &pages, 1);
    let (state, at) = (State::of(&store), RestorePoint::Lsn(store.lsn()));
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let seen = Snapshot::open_on(&shared, Some(&at)).unwrap();
    for value in 2..5 {
        change(&store, &pages, value);
        store.snapshot().unwrap();
    }
    check_seen(&seen, &state);
    drop(seen);
    assert_eq!(store.would_prune(&store.retention()).unwrap().held, []);
    let pruned = store.prune(&store.retention()).unwrap();
    assert!(pruned.files.iter().any(|(file, _)| matches!(file, FileName::Segment(_))), "{pruned:?}");
    let gone = Snapshot::open_on(&shared, Some(&at)).unwrap_err();
    assert!(matches!(gone, Error::OutsideWindow { .. }), "{gone}");
    // What the name keeps is there all the time.
    Snapshot::open_on(&shared, Some(&RestorePoint::Snapshot(named.id))).unwrap();
}

/// It is there only for the snapshot that follows it.
#[test]
fn what_is_read_from_a_link_stays_until_its_reader_has_gone() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1), 24);
    let link = store.snapshot().unwrap();
    let (state, at) = (State::of(&store), RestorePoint::Lsn(link.end));
    change(&store, &pages[..1], 2);
    store.snapshot().unwrap();
    assert!(!ids(&store).contains(&link.id.0), "no rule keeps it");
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let seen = Snapshot::open_on(&shared, Some(&at)).unwrap();
    for value in 3..50 {
        change(&store, &pages, value);
        store.snapshot().unwrap();
    }
    check_seen(&seen, &state);
    drop(seen);
    store.snapshot().unwrap();
    assert_eq!(ids(&store).len(), 1);
    let gone = Snapshot::open_on(&shared, Some(&at)).unwrap_err();
    assert!(matches!(gone, Error::OutsideWindow { .. }), "{gone}");
}

#[test]
fn snapshots_are_kept_for_their_age_and_for_the_log_behind_them() {
    for (options, expected) in [
        (small().snapshots_kept(1), vec![6]),
        (small().snapshots_kept(1).snapshots_kept_for(Duration::from_secs(3600)), vec![1, 2, 3, 4, 5, 6]),
        // A segment is shorter than one round of changes.
        (small().snapshots_kept(1).log_kept(16 << 10), vec![5, 6]),
        (small().snapshots_kept(1).log_kept(1 << 40), vec![1, 2, 3, 4, 5, 6]),
    ] {
        let disk = SimDisk::new();
        let (store, pages) = store_of(&disk, options.clone(), 24);
        for round in 0..6 {
            change(&store, &pages, round);
            store.snapshot().unwrap();
        }
        let kept = ids(&store);
        if expected.len() == 2 {
            assert!(kept.len() >= 2 && kept.len() < 6 && kept.ends_with(&[6]), "{options:?}: {kept:?}");
            // Every state since the older one can be gone back to.
            let (files, from) = (Files::of(&disk), store.snapshots()[0].end);
            let last = store.lsn();
            for lsn in [from, from.next(), last] {
                let options = RebuildOptions { until: Some(lsn), ..RebuildOptions::default() };
                assert_eq!(rebuild(&files, &options).unwrap().table.lsn(), lsn);
            }
        } else if expected.len() == 1 {
            assert_eq!(kept, expected, "{options:?}");
        } else {
            // The base of all log that there is; what lies between may go, unless it is young.
            assert_eq!((kept.first(), kept.last()), (expected.first(), expected.last()), "{options:?}");
        }
    }
}

/// The newest snapshot's record may be missing, and no seal lie behind its redo: then the record of the ones
/// before lies before it.
#[test]
fn a_kill_between_a_snapshot_and_its_record_forgets_no_other() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1), 4);
    store.snapshot_named("before").unwrap();
    change(&store, &pages, 1);
    let before = disk.events();
    let newest = store.snapshot().unwrap().id;
    let moments = before..=disk.events();
    let mut unrecorded = 0;
    for event in moments {
        let left = disk.after_kill(Moment { event, tear: None });
        let files = Files::of(&left);
        let names_newest = files.0.contains_key(&FileName::Manifest(newest.0));
        let store = open_with(&left, small().snapshots_kept(1)).unwrap();
        let named = store.snapshots().into_iter().filter(|info| info.name.as_deref() == Some("before"));
        assert_eq!(named.count(), 1, "killed at event {event}, where the newest is there: {names_newest}");
        unrecorded += usize::from(names_newest && store.recovered().snapshot == Some(newest));
    }
    assert!(unrecorded > 1, "no kill struck between the snapshot and its record");
}

/// A link that is there for those that follow it has lost images that none of them names: what lies behind it is
/// reached from the kept snapshot before.
#[test]
fn a_state_behind_a_link_that_is_not_kept_is_reached_from_before() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1).log_kept(1 << 20), 10);
    let first = store.snapshot().unwrap();
    let mut taken = Vec::new();
    for value in 1..=2 {
        change(&store, &pages[..2], value);
        taken.push((store.snapshot().unwrap(), State::of(&store)));
    }
    let (link, state) = &taken[0];
    assert_eq!(ids(&store), [first.id.0, taken[1].0.id.0]);
    assert_eq!(chain(&disk, taken[1].0.id), [taken[1].0.id, link.id, first.id]);
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let old = Snapshot::open_on(&shared, Some(&RestorePoint::Lsn(link.end))).unwrap();
    assert_eq!(old.base(), Some(first.id));
    for (page, bytes) in &state.contents {
        let mut found = vec![0; bytes.len()];
        old.read(*page, 0, &mut found).unwrap();
        assert_eq!(&found, bytes, "page {page}");
    }
    drop(old);
    store.restore_to(link.end).unwrap();
    assert_eq!(State::of(&store).contents, state.contents);
}

/// As above, but no older snapshot is kept, and the log begins behind the one that could be followed from.
#[test]
fn a_state_behind_a_link_whose_images_went_is_outside_the_window() {
    let disk = SimDisk::new();
    let options = small().segment_len(64 << 10).snapshots_kept(1);
    let (store, pages) = store_of(&disk, options, 24);
    let base = store.snapshot().unwrap();
    for value in 0..400 {
        change(&store, &pages[..2], value);
    }
    let taken: Vec<SnapshotInfo> = (1..=2)
        .map(|value| {
            change(&store, &pages[..2], value);
            store.snapshot().unwrap()
        })
        .collect();
    let [link, kept] = &taken[..] else { unreachable!("two were taken") };
    assert_eq!(ids(&store), [kept.id.0]);
    assert_eq!(chain(&disk, kept.id), [kept.id, link.id, base.id]);
    let survey = Survey::read(&Files::of(&disk)).unwrap();
    let log_of = |id: SnapshotId| survey.links[&id].as_ref().unwrap().0.redo.segment;
    assert!(survey.log.segments().contains_key(&log_of(link.id)), "the log behind it is there");
    assert!(!survey.log.segments().contains_key(&log_of(base.id)), "and that behind the base is not");

    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let outside = |asked: Lsn, error: Error| match error {
        Error::OutsideWindow { asked: named, oldest, newest } => {
            assert_eq!((named, oldest, newest), (asked, kept.end, store.lsn()));
        }
        other => panic!("{other}"),
    };
    outside(link.end, Snapshot::open_on(&shared, Some(&RestorePoint::Lsn(link.end))).unwrap_err());
    outside(link.end, store.restore_to(link.end).unwrap_err());
    // Not even what lies before it makes the window begin there.
    let before = Lsn(link.end.0 - 1);
    outside(before, Snapshot::open_on(&shared, Some(&RestorePoint::Lsn(before))).unwrap_err());
}

#[test]
fn a_published_snapshot_is_durable_and_takes_the_place_of_others_once_it_is_verified() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1), 4);
    store.snapshot().unwrap();
    change(&store, &pages, 1);
    let published = store.publish_snapshot().unwrap();
    assert_eq!((published.id, published.verified), (SnapshotId(2), false));
    let state = State::of(&store);
    let cut = open_with(&disk.after_power_cut(), small()).unwrap();
    assert_eq!((cut.recovered().snapshot, State::of(&cut)), (Some(published.id), state));
    store.wait_verified().unwrap();
    let [kept] = &store.snapshots()[..] else { panic!("{:?}", ids(&store)) };
    assert_eq!((kept.id, kept.verified), (published.id, true));
    // A snapshot names images of those that were published before it.
    for value in 2..6 {
        change(&store, &pages[..1], value);
        store.publish_snapshot().unwrap();
    }
    change(&store, &pages[1..2], 6);
    let last = store.snapshot().unwrap();
    assert!(last.verified);
    assert_eq!(ids(&store), [last.id.0]);
    change(&store, &pages[..1], 7);
    let published = store.publish_snapshot().unwrap();
    let state = State::of(&store);
    store.close().unwrap();
    // Closing waited for it, so it is recorded, and not published anew.
    let store = open_with(&disk, small()).unwrap();
    assert_eq!((store.recovered().snapshot, State::of(&store)), (Some(published.id), state));
    let name = FileName::Manifest(published.id.0).to_string();
    assert_eq!(disk.history().iter().filter(|event| event.ends_with(&format!("to {name}"))).count(), 1);
}

#[test]
fn a_published_snapshot_that_is_not_on_the_medium_costs_nothing() {
    let disk = SimDisk::new();
    let (store, pages) = store_of(&disk, small().snapshots_kept(1), 4);
    store.snapshot().unwrap();
    change(&store, &pages, 1);
    let state = State::of(&store);
    disk.skip_syncs(|point| matches!(point, SyncPoint::File(FileName::Pages(_))));
    let published = store.publish_snapshot().unwrap();
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
