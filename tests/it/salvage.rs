//! Pages salvaged from damaged stores are correct. A page reported as exact has its last content, a page
//! reported as older had its content at that time, and lost batches are reported. Most of the store is
//! salvaged.

use std::cell::RefCell;
use std::collections::BTreeMap;

use remanent::error::{Defect, FileName};
use remanent::history::InitialState;
use remanent::options::{Create, ImageOptions};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Lsn, Metadata, Options, PageInfo, Place, StatePoint, Store};
use remanent_format::frame::FRAME_HEADER_LEN;
use remanent_format::limits::SECTOR_LEN;
use remanent_format::log::frames_of_segment;
use remanent_format::salvage::{PageRemains, Salvage};
use remanent_format::store::StoreFile;

use crate::damage::{Victim, damage_files, mix, on_disk};
use crate::files::{Files, State, open_with, small};
use crate::size::sized;
use crate::with_options::With;

/// The result of salvaging a damaged store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Outcome {
    /// The batch of the salvaged state, or `None` if it cannot be determined.
    lsn: Option<Lsn>,
    /// Whether later batches are reported as lost or possibly lost.
    is_cut: bool,
    exact: usize,
    older: usize,
    lost: usize,
}

impl Outcome {
    fn is_all(&self, last: Lsn) -> bool {
        self.lsn == Some(last) && self.older + self.lost == 0
    }
}

/// Salvages damaged files of a store, and compares the result with the states that callers of the store read.
fn salvage(what: &str, files: &Files, victim: &Victim) -> Outcome {
    // STORE may be the damaged file, in which case the command determines the id.
    let store = StoreFile::decode(&victim.files.0[&FileName::Store]).unwrap();
    let salvage = Salvage::read(files, store, 1 << 20).unwrap();
    let (state, states) = (salvage.state(), &victim.states);
    let (lsn, last) = (state.table.lsn(), victim.last);
    let beyond = salvage.beyond();
    let mut outcome = Outcome {
        lsn: state.is_whole.then_some(lsn),
        is_cut: beyond.durable > lsn || beyond.hidden.is_some(),
        ..Outcome::default()
    };
    let empty = State { pages: Vec::new(), contents: BTreeMap::new(), root: Metadata::new() };
    if state.is_whole {
        let expected = states.get(&lsn).unwrap_or(&empty);
        assert!(lsn <= last && (lsn == Lsn(0) || states.contains_key(&lsn)), "{what}: no state at {lsn}");
        assert!(state.table.pages().eq(expected.pages.iter().cloned()), "{what}: other pages at {lsn}");
        assert_eq!(**state.table.root(), expected.root, "{what}: another root at {lsn}");
    }
    for info in state.table.pages() {
        match salvage.find(&info) {
            PageRemains::Exact(bytes) => {
                let bytes = salvage.window(&bytes, 0..info.len).unwrap();
                assert!(bytes == states[&lsn].contents[&info.page], "{what}: wrong bytes in {}", info.page);
                outcome.exact += 1;
            }
            PageRemains::Older { version, bytes, .. } => {
                let then = &states[&version.lsn];
                let bytes = salvage.window(&bytes, 0..version.len).unwrap();
                assert!(then.pages.contains(&version), "{what}: {version:?} never was");
                assert!(bytes == then.contents[&info.page], "{what}: older bytes of {} are wrong", info.page);
                assert!(version.page == info.page && version.epoch <= info.epoch, "{what}: {version:?}");
                outcome.older += 1;
            }
            PageRemains::Lost(_) => outcome.lost += 1,
        }
    }
    outcome
}

/// Returns a cleanly closed store that was restored to an earlier state, and whose pages have different
/// histories.
fn restored() -> Victim {
    restored_with(small())
}

fn restored_with(options: Options) -> Victim {
    let disk = SimDisk::new();
    let mut states = BTreeMap::new();
    let options = options.with(|options| {
        options.log.reserve_bytes = Some(0);
        options.retention.snapshots_kept = 3;
    });
    let mut store = open_with(&disk, options.clone()).unwrap();
    let mut batch = store.batch();
    (0..6).for_each(|_| _ = batch.create(600, Place::Host).page());
    let pages = store.commit(batch).unwrap().pages;
    states.insert(store.lsn(), State::of(&store));
    for number in 0..36u8 {
        let mut batch = store.batch();
        // Each batch changes one page, so a lost batch does not affect the other five.
        let page = pages[usize::from(number) % 6];
        match number % 5 {
            3 => batch.move_to(page, if number % 2 == 0 { Place::Host } else { Place::Pinned }),
            _ => batch.fill(page, u64::from(number), 200, &[number + 1]),
        };
        if number % 4 == 0 {
            batch.set_root("step", u64::from(number));
        }
        store.commit(batch).unwrap();
        states.insert(store.lsn(), State::of(&store));
        match number {
            9 | 31 => _ = store.snapshot().unwrap(),
            14 => {
                store.close().unwrap();
                store = open_with(&disk, options.clone()).unwrap();
            }
            20 => {
                store.restore(StatePoint::Lsn(Lsn(12))).unwrap();
                states.insert(store.lsn(), State::of(&store));
            }
            _ => {}
        }
    }
    let last = store.lsn();
    store.close().unwrap();
    Victim { files: Files::of(&disk), states, last, marked: last, older: Vec::new() }
}

/// Returns the stores to damage.
fn victims() -> [Victim; 4] {
    // The snapshots of the last store are in several image files.
    [
        Victim::closed(),
        Victim::killed(),
        Victim::reopened(),
        restored_with(small().images(ImageOptions::new().chunk_len(75))),
    ]
}

#[test]
fn sound_store_is_salvaged_completely() {
    for victim in victims() {
        let outcome = salvage("sound", &victim.files, &victim);
        let exact = victim.states[&victim.last].pages.len();
        assert_eq!(outcome, Outcome { lsn: Some(victim.last), exact, ..Outcome::default() });
    }
}

/// Pages on disk with images, overlays and captured images. If a file is damaged, at most the pages in this
/// file are older or lost.
#[test]
fn pages_on_disk_are_salvaged() {
    let victim = on_disk::victim();
    let outcome = salvage("sound", &victim.files, &victim);
    let exact = victim.states[&victim.last].pages.len();
    assert_eq!(outcome, Outcome { lsn: Some(victim.last), exact, ..Outcome::default() });
    let count = RefCell::new(Count::default());
    damage_files(&victim.files, &Files::default(), |what, damaged| {
        let outcome = salvage(what, damaged, &victim);
        if !what.starts_with("log/") {
            let pages = on_disk::pages_in(&victim, &on_disk::changed(&victim, damaged));
            assert!(outcome.older + outcome.lost <= pages.len(), "{what}: {outcome:?}, not only {pages:?}");
        }
        count.borrow_mut().add(outcome, victim.last);
    });
    // There are older images of each page, so no page is lost completely.
    let Count { all, older, lost, .. } = count.into_inner();
    assert!(all > 100 && older > sized(2, 10) && lost == 0, "{all} all, {older} older, {lost} lost");
}

#[test]
fn truncated_batches_are_reported_lost() {
    let disk = SimDisk::new();
    let store = open_with(&disk, small().with(|options| options.log.segment_len = 64 << 10)).unwrap();
    let mut ends = Vec::new();
    for number in 0..3u64 {
        let mut batch = store.batch();
        batch.set_root("step", number);
        store.commit(batch).unwrap();
        // The next batch is in a separate group, whose frame records that this batch is durable.
        store.wait_durable(store.lsn()).unwrap();
        let written = disk.bytes(FileName::Segment(1)).unwrap();
        ends.push(written.iter().rposition(|byte| *byte != 0).unwrap().next_multiple_of(4096));
    }
    store.close().unwrap();
    let mut files = Files::of(&disk);
    files.0.get_mut(&FileName::Segment(1)).unwrap().truncate(ends[1]);
    let identity = StoreFile::decode(&files.0[&FileName::Store]).unwrap();
    let salvage = Salvage::read(&files, identity, 1 << 20).unwrap();
    assert_eq!(salvage.state().table.lsn(), Lsn(2));
    let hidden = salvage.beyond().hidden.expect("the third batch's frame may have been there");
    assert_eq!(hidden.file, FileName::Segment(1));
}

/// Numbers of stores that were salvaged completely, and of stores in which a page is older or lost, or a
/// batch is lost.
#[derive(Debug, Default)]
struct Count {
    all: usize,
    older: usize,
    lost: usize,
    cut: usize,
}

impl Count {
    fn add(&mut self, outcome: Outcome, last: Lsn) {
        self.all += usize::from(outcome.is_all(last));
        self.older += outcome.older;
        self.lost += outcome.lost;
        self.cut += usize::from(outcome.lsn.is_some_and(|lsn| lsn < last));
    }
}

#[test]
fn damaged_file_yields_no_wrong_bytes() {
    for victim in victims() {
        let count = RefCell::new(Count::default());
        damage_files(&victim.files, &Files::default(), |what, damaged| {
            let outcome = salvage(what, damaged, &victim);
            let is_swapped = what.contains("swapped");
            if !what.starts_with("log/") && !is_swapped {
                assert!(outcome.is_all(victim.last), "{what}: {outcome:?}, all of it lies twice");
            }
            if !is_swapped {
                assert_eq!(
                    outcome.older + outcome.lost,
                    0,
                    "{what}: every page was in a snapshot and in the log"
                );
            }
            // Batches that a mark covers must not be lost without a report.
            if outcome.lsn.is_some_and(|lsn| lsn < victim.marked) {
                assert!(outcome.is_cut, "{what}: {outcome:?}");
            }
            count.borrow_mut().add(outcome, victim.last);
        });
        let count = count.into_inner();
        assert!(count.all > sized(30, 400) && count.cut >= sized(0, 11), "{count:?}");
    }
}

/// Zeroes a random sector that is not already zero. Returns a description of the sector.
fn zero_sector(files: &mut Files, random: u64) -> String {
    let sectors = |bytes: &Vec<u8>| bytes.len().div_ceil(SECTOR_LEN);
    let live = |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0);
    let places: Vec<(FileName, usize)> = files
        .0
        .iter()
        .filter(|(file, _)| **file != FileName::Store)
        .flat_map(|(file, bytes)| (0..sectors(bytes)).map(|sector| (*file, sector)))
        .filter(|(file, sector)| live(files.0[file].chunks(SECTOR_LEN).nth(*sector).unwrap()))
        .collect();
    let (file, sector) = places[random as usize % places.len()];
    files.0.get_mut(&file).unwrap().chunks_mut(SECTOR_LEN).nth(sector).unwrap().fill(0);
    format!("sector {sector} of {file}")
}

#[test]
fn lost_sectors_and_files_yield_no_wrong_bytes() {
    let mut count = Count::default();
    for victim in victims() {
        for seed in 0..600 {
            let (mut files, mut what) = (victim.files.clone(), format!("seed {seed}:"));
            for number in 0..2 + seed % 7 {
                what += &format!(" {}", zero_sector(&mut files, mix(seed * 100 + number)));
            }
            if seed % 3 == 0 {
                let names = files.names(|file| file != FileName::Store);
                let name = names[mix(seed) as usize % names.len()];
                files.0.remove(&name);
                what += &format!(", without {name}");
            }
            let outcome = salvage(&what, &files, &victim);
            count.add(outcome, victim.last);
        }
    }
    let Count { all, older, lost, cut } = count;
    assert!(all > 100 && older > 100 && lost > 10 && cut > 300, "{all}, {older}, {lost}, {cut}");
}

#[test]
fn lost_batch_affects_only_changed_page() {
    let victim = restored();
    // Without the newest images, only the log contains the later changes of pages.
    let newest = victim.files.names(|file| matches!(file, FileName::Pages(_))).pop().unwrap();
    let store = StoreFile::decode(&victim.files.0[&FileName::Store]).unwrap().store;
    let (mut exact, mut older) = (0, 0);
    for segment in victim.files.segments() {
        let FileName::Segment(number) = segment else { unreachable!("it is a segment") };
        for frame in frames_of_segment(&victim.files, store, number) {
            let mut files = victim.files.clone();
            files.0.remove(&newest);
            let frame = frame.unproven();
            let payload_at = (frame.offset + FRAME_HEADER_LEN) as usize;
            files.0.get_mut(&segment).unwrap()[payload_at] ^= 1;
            let outcome = salvage(&format!("{frame:?} damaged"), &files, &victim);
            if outcome.lsn == Some(victim.last) {
                assert!(outcome.older + outcome.lost <= 1, "{outcome:?}: {frame:?} changed one page");
                exact += usize::from(outcome.exact == 6);
                older += outcome.older;
            }
        }
    }
    assert!(exact > 10 && older > 5, "all exact {exact} times, one older {older} times");
}

/// Returns the initial state of a new store that contains all salvaged pages.
fn seed(store: StoreFile, search: &Salvage) -> InitialState {
    let state = search.state();
    InitialState {
        features: store.features,
        record: store.record,
        table: state.table.clone(),
        point: state.point,
    }
}

/// Reads a range of a page whose bytes are all intact.
fn read_exact(search: &Salvage, info: &PageInfo, offset: u64, out: &mut [u8]) {
    match search.find(info) {
        PageRemains::Exact(bytes) => {
            out.copy_from_slice(&search.window(&bytes, offset..offset + out.len() as u64).unwrap());
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn created_store_is_complete_or_absent() {
    let victim = restored();
    let store = StoreFile::decode(&victim.files.0[&FileName::Store]).unwrap();
    let search = Salvage::read(&victim.files, store.clone(), 1 << 20).unwrap();
    let origin = seed(store, &search);
    let read = |info: &PageInfo, offset, out: &mut [u8]| read_exact(&search, info, offset, out);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new");
    let mut left = 3;
    let stopped = Store::create_at(&path, &origin, |info, offset, out| -> Result<_, Error> {
        left -= 1;
        if left == 0 {
            return Err(Defect::Missing.at(FileName::Pages(1), 0).into());
        }
        read(info, offset, out);
        Ok(())
    });
    assert!(matches!(stopped, Err(Error::Damaged(_))), "{stopped:?}");
    let opened = small().create(Create::Never).open(&path);
    assert!(matches!(opened, Err(Error::NoStore { .. })), "{opened:?}");

    Store::check_create_at(&path).unwrap();
    let founded = Store::create_at(&path, &origin, |info, offset, out| {
        read(info, offset, out);
        Ok::<_, Error>(())
    });
    let id = founded.unwrap();
    assert!(matches!(Store::check_create_at(&path), Err(Error::NoStore { found: Some(_), .. })));
    let store = small().open(&path).unwrap();
    assert_eq!(State::of(&store), victim.states[&victim.last]);
    assert_eq!((store.id(), store.lsn()), (id, victim.last));
    let mut batch = store.batch();
    batch.create(1, Place::Host);
    assert_eq!(store.commit(batch).unwrap().position.lsn, victim.last.next());
}

/// A salvaged store begins with a snapshot and, like a fork, has no seal or log of its own.
#[test]
fn a_salvaged_store_survives_a_hundred_opens() {
    let victim = restored();
    let store = StoreFile::decode(&victim.files.0[&FileName::Store]).unwrap();
    let search = Salvage::read(&victim.files, store.clone(), 1 << 20).unwrap();
    let origin = seed(store, &search);
    let read = |info: &PageInfo, offset: u64, out: &mut [u8]| {
        read_exact(&search, info, offset, out);
        Ok::<_, Error>(())
    };
    // One store is only opened. Another one sometimes commits, and takes a snapshot late.
    for is_busy in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        Store::create_at(&path, &origin, read).unwrap();
        let mut expected = victim.states[&victim.last].clone();
        let mut lsn = victim.last;
        for open in 0..100 {
            let store = small().open(&path).unwrap_or_else(|error| panic!("open {open}: {error}"));
            assert_eq!(State::of(&store), expected, "open {open}");
            assert_eq!(store.lsn(), lsn, "open {open}");
            if is_busy && open % 7 == 3 {
                let mut batch = store.batch();
                batch.create(10, Place::Host);
                store.commit(batch).unwrap();
                (expected, lsn) = (State::of(&store), store.lsn());
            }
            if is_busy && open == 60 {
                store.snapshot().unwrap();
            }
            // End with or without a close.
            if open % 2 == 0 { store.close().unwrap() } else { drop(store) }
        }
        let segments = std::fs::read_dir(path.join("log")).unwrap().count();
        assert!(segments < 60, "{segments} files of the log");
    }
}
