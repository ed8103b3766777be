//! Every kind of damage: flipped bits, zeroed sectors, and files that are truncated, removed, swapped,
//! extended or replaced, in a store that was closed cleanly and in one whose process was killed.
//!
//! The rule (I4): an open returns the final state, or fails, or returns the state after an earlier batch and
//! reports the cut, if no mark covers the lost batches. In a store that was closed cleanly, a mark covers
//! every batch, so the result is the final state or an error. The expected states were read from the open
//! store after each batch, so they do not come from the files under test.
//!
//! The test stores, and the stores that are opened from damaged files, use the three modes of writing images
//! in turn. `in_place.rs` contains a store whose image files were overwritten in place. `sweeps.rs` selects
//! how much is damaged.

mod in_place;
mod kept_states;
pub mod on_disk;
mod shared;
mod sweeps;
mod verdicts;

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use remanent::batch::Width;
use remanent::error::{FileName, Folder};
use remanent::options::{ImageIo, ImageOptions};
use remanent::testing::sim_disk::{CrashPlan, Moment, SimDisk, Tears};
use remanent::{Error, Key, Lsn, Metadata, PageId, Place, SnapshotId, Store};
use remanent_format::limits::SECTOR_LEN;
use remanent_format::log::TornTail;
use remanent_format::state::rebuild::rebuild;
use remanent_format::state::survey::Survey;
use remanent_format::{Damage, ReadAt};

use crate::files::{Files, State, open, open_with, small};
use crate::with_options::With;
use sweeps::{Count, at_least, bits, here, is_long, sweep};

/// The files of a store, and its known states.
pub struct Victim {
    pub files: Files,
    /// The state after each batch.
    pub states: BTreeMap<Lsn, State>,
    /// The last batch of the store.
    pub last: Lsn,
    /// The last batch that a mark covers.
    pub marked: Lsn,
    /// The files after every eighth batch, or after each batch in the long form.
    pub older: Vec<Files>,
}

/// The outcome of opening or rebuilding a damaged store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The final state.
    Whole,
    /// An earlier state, and the cut was reported.
    Cut(Lsn),
    /// An earlier state. No mark covered the later batches, and they left no trace.
    Traceless(Lsn),
    /// No state, only an error.
    Refused,
}

impl Victim {
    /// Returns a store with two snapshots and a log after each, closed cleanly and reopened once in between.
    /// Its images are written through mappings.
    pub fn closed() -> Self {
        let (disk, states, older) = Self::build(ImageIo::Mapped);
        Self::of(Files::of(&disk), states, older)
    }

    /// Returns such a store whose process was killed, with batches in the log that no mark covers. Its images
    /// are written with direct I/O.
    pub fn killed() -> Self {
        let (disk, states, older) = Self::build(ImageIo::Direct);
        let last = *states.keys().next_back().unwrap();
        let mut found = None;
        let plan = CrashPlan { tears: Tears::None, ..CrashPlan::default() };
        disk.kill_images(&plan, |image| {
            let end = rebuild(&image.disk, &Default::default()).ok().and_then(|rebuilt| rebuilt.end);
            if end.is_some_and(|end| end.accepted.lsn == last && end.proven.lsn < last) {
                found = Some(Files::of(&image.disk));
            }
        });
        Self::of(found.expect("no mark covers the last batch before its sync"), states, older)
    }

    /// Returns the killed store after a reopen, which copied the tail of its log to the new segment.
    pub fn reopened() -> Self {
        let killed = Self::killed();
        let disk = killed.files.disk();
        let store = open_victim(&disk);
        assert!(store.recovered().copied_batches > 0);
        let dead = disk.after_kill(Moment { event: disk.events(), tear: None });
        Self::of(Files::of(&dead), killed.states, killed.older)
    }

    fn of(files: Files, states: BTreeMap<Lsn, State>, older: Vec<Files>) -> Self {
        let rebuilt = rebuild(&files, &Default::default()).unwrap();
        let end = rebuilt.end.unwrap();
        let (last, marked) = (end.accepted.lsn, end.proven.lsn);
        assert_eq!((end.torn, rebuilt.base), (None, Some(SnapshotId(2))));
        Self { files, states, last, marked, older }
    }

    fn build(io: ImageIo) -> (SimDisk, BTreeMap<Lsn, State>, Vec<Files>) {
        let disk = SimDisk::new();
        let (mut states, mut older) = (BTreeMap::new(), Vec::new());
        let mut store = open_by(&disk, io);
        let mut batch = store.batch();
        let key = Key::new("weights").unwrap();
        batch
            .create(2000, Place::Host)
            .key(key)
            .metadata(Metadata::from([("dtype".to_owned(), "bf16".into())]));
        for len in [700, 0, 300] {
            batch.create(len, Place::Device(0));
        }
        let pages = store.commit(batch).unwrap().pages;
        let mut number = 0;
        for batches in [40, 25, 12] {
            for left in (0..batches).rev() {
                number += 1;
                commit(&store, &pages, number);
                states.insert(store.lsn(), State::of(&store));
                if number % 8 == 0 || is_long() {
                    // A copy is needed, because the disk changes while the store is open.
                    let then = disk.after_kill(Moment { event: disk.events(), tear: None });
                    older.push(Files::of(&then));
                }
                // However fast the machine is, at most three batches remain for the timer of the log's
                // thread.
                if left == 3 {
                    store.wait_durable(store.lsn()).unwrap();
                }
            }
            if batches > 12 {
                store.snapshot().unwrap();
            }
            if batches == 25 {
                store.close().unwrap();
                store = open_by(&disk, io);
            }
        }
        store.close().unwrap();
        (disk, states, older)
    }

    /// Checks the result of a rebuild or an open against the rule.
    fn judge(&self, what: &str, state: &State, lsn: Lsn, torn: Option<&TornTail>) -> Verdict {
        let expected = self.states.get(&lsn).unwrap_or_else(|| panic!("{what}: no state at {lsn}"));
        assert!(state == expected, "{what}: a wrong state at {lsn}");
        assert!(lsn >= self.marked, "{what}: a mark covers {}, the state is that of {lsn}", self.marked);
        match torn {
            _ if lsn == self.last => Verdict::Whole,
            Some(torn) => {
                assert_eq!(torn.first, lsn.next(), "{what}");
                Verdict::Cut(lsn)
            }
            None => Verdict::Traceless(lsn),
        }
    }

    fn rebuild(&self, what: &str, source: &dyn ReadAt) -> Verdict {
        self.try_rebuild(what, source).unwrap_or(Verdict::Refused)
    }

    /// Rebuilds the state. Returns the damage if the state cannot be rebuilt.
    fn try_rebuild(&self, what: &str, source: &dyn ReadAt) -> Result<Verdict, Damage> {
        let rebuilt = rebuild(source, &Default::default())?;
        let end = rebuilt.end.as_ref().unwrap();
        Ok(self.judge(what, &State::rebuilt(&rebuilt), end.accepted.lsn, end.torn.as_ref()))
    }

    /// Opens the files, and then opens the files that the first open left.
    fn open(&self, what: &str, files: &Files) -> Verdict {
        let disk = files.disk();
        // Replay by one thread and by several in windows must follow the same rule.
        let drawn = draw(what);
        let window_len = [0, 4 << 10, 12 << 10][drawn as usize % 3];
        match open_with(
            &disk,
            small()
                .images(ImageOptions::new().io(image_io(drawn >> 8)))
                .with(|options| options.log.replay_window_len = Some(window_len)),
        ) {
            Ok(store) => {
                let recovered = store.recovered();
                let state = State::of(&store);
                let verdict = self.judge(what, &state, recovered.position.lsn, recovered.torn.as_ref());
                verdicts::agrees(what, files, Ok(recovered));
                // Some opened stores also write images in addition to the damaged ones.
                if drawn >> 32 & 7 == 0 {
                    store.snapshot().unwrap_or_else(|error| panic!("{what}: a snapshot: {error}"));
                }
                drop(store);
                let store = open(&disk).unwrap_or_else(|error| panic!("{what}: opened once: {error}"));
                assert!(State::of(&store) == state, "{what}: another state when opened again");
                assert_eq!(store.recovered().torn, None, "{what}");
                verdict
            }
            Err(Error::Damaged(damage)) => {
                assert!(Files::of(&disk) == *files, "{what}: refused, but modified: {damage}");
                verdicts::agrees(what, files, Err(&damage));
                Verdict::Refused
            }
            Err(error) => panic!("{what}: {error}"),
        }
    }
}

/// Opens a store that reserves no space, so that most bytes of its files are in use.
fn open_victim(disk: &SimDisk) -> Store {
    open_by(disk, ImageIo::Buffered)
}

/// Opens such a store with a mode of writing images.
fn open_by(disk: &SimDisk, io: ImageIo) -> Store {
    open_with(
        disk,
        small().images(ImageOptions::new().io(io)).with(|options| options.log.reserve_bytes = Some(0)),
    )
    .unwrap()
}

/// Returns a mode of writing images. Consecutive numbers cycle through all modes.
pub fn image_io(number: u64) -> ImageIo {
    [ImageIo::Mapped, ImageIo::Buffered, ImageIo::Direct][number as usize % 3]
}

/// Returns a hash of a case's name, which is equal in every run.
pub fn draw(what: &str) -> u64 {
    what.bytes().fold(0, |drawn, byte| mix(drawn ^ u64::from(byte)))
}

/// Commits one batch with operations of every kind.
fn commit(store: &Store, pages: &[PageId], number: u64) {
    let byte = number as u8;
    let place = if number.is_multiple_of(2) { Place::Pinned } else { Place::Device(0) };
    let mut batch = store.batch();
    batch.write(pages[0], number * 7, &[byte; 150]).set_root("step", number);
    batch.scatter(pages[1], Width::W4, &[byte.into(), 0], &[byte; 8]);
    match number % 5 {
        0 => batch.resize(pages[2], number).set_metadata(pages[2], "step", number),
        1 => batch.fill(pages[3], 10, 200, &[byte, 1]).move_to(pages[1], place).note("filled"),
        2 => {
            let copy = batch.clone_page(pages[3]);
            batch.write(copy, 0, &[byte])
        }
        3 => batch.write_masked(pages[3], 8, Width::W1, &[0x55, 0xaa], &[byte; 16]),
        _ => match store.pages().unwrap().find(|info| !pages.contains(&info.page)) {
            Some(copy) => batch.delete(copy.page),
            None => &mut batch,
        },
    };
    store.commit(batch).unwrap();
}

/// One step of Steele, Lea and Flood's SplitMix64.
pub fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the file and the offset of byte `number` of all files, as if they were concatenated.
fn place(files: &Files, mut number: usize) -> (FileName, usize) {
    for (file, bytes) in &files.0 {
        if number < bytes.len() {
            return (*file, number);
        }
        number -= bytes.len();
    }
    panic!("no file has that byte");
}

fn flip(files: &mut Files, (file, offset): (FileName, usize), bit: u64) {
    files.0.get_mut(&file).unwrap()[offset] ^= 1 << bit;
}

/// Returns true if the sector around a byte consists of zeros and therefore has no meaning.
fn is_in_zeros(files: &Files, (file, offset): (FileName, usize)) -> bool {
    let (bytes, from) = (&files.0[&file], offset / SECTOR_LEN * SECTOR_LEN);
    bytes[from..bytes.len().min(from + SECTOR_LEN)].iter().all(|byte| *byte == 0)
}

/// Flips a bit of every byte of every file, one at a time. In the short form, flips one in eight bytes of
/// sectors that consist of zeros, as most sectors do. A rejection must name the damaged file, and a structure
/// that begins at or before the bit.
fn flip_every_byte(victim: &Victim) -> [usize; 4] {
    let count = Count::default();
    sweep(&victim.files, victim.files.bytes_len(), |files, number| {
        let place = place(&victim.files, number);
        if !is_long() && is_in_zeros(&victim.files, place) && mix(number as u64) % 64 >= 8 {
            return;
        }
        for bit in bits(number) {
            flip(files, place, bit);
            let what = format!("bit {bit} of {place:?}");
            count.add(victim.try_rebuild(&what, files).unwrap_or_else(|damage| {
                assert_eq!(damage.file, place.0, "{what}: {damage}");
                assert!(damage.offset <= place.1 as u64, "{what}: {damage}");
                Verdict::Refused
            }));
            flip(files, place, bit);
        }
    });
    count.get("a bit flipped, rebuilt")
}

#[test]
fn bit_flip_is_harmless_after_close_or_reopen() {
    for victim in [Victim::closed(), Victim::reopened()] {
        assert_eq!(victim.marked, victim.last, "a seal, or an opening, covers everything");
        let [whole, cut, traceless, refused] = flip_every_byte(&victim);
        assert_eq!((cut, traceless), (0, 0));
        assert!(whole >= at_least(10_000) && refused >= at_least(1000), "{whole} whole, {refused} refused");
    }
}

#[test]
fn bit_flip_after_kill_is_repaired_reported_or_refused() {
    let victim = Victim::killed();
    let [whole, cut, traceless, refused] = flip_every_byte(&victim);
    assert_eq!(traceless, 0, "one bit leaves enough of a header to report it");
    let enough = whole >= at_least(10_000) && cut >= at_least(100) && refused >= at_least(500);
    assert!(enough, "{whole} whole, {cut} cut, {refused} refused");
}

/// Opens the files with a flipped bit, and asserts that a rebuild has the same result.
fn open_flipped(victim: &Victim, files: &mut Files, place: (FileName, usize), bit: u64) -> Verdict {
    let what = format!("bit {bit} of {place:?}");
    flip(files, place, bit);
    let verdict = victim.open(&what, files);
    assert_eq!(verdict, victim.rebuild(&what, files), "{what}");
    flip(files, place, bit);
    verdict
}

#[test]
fn open_and_rebuild_agree_on_bit_flips() {
    for victim in [Victim::closed(), Victim::killed(), Victim::reopened()] {
        let count = Count::default();
        // Half of the flips are in bytes that have been written.
        let written = |place: &(FileName, usize)| victim.files.0[&place.0][place.1] != 0;
        let places: Vec<_> =
            (0..victim.files.bytes_len()).map(|number| place(&victim.files, number)).collect();
        let live: Vec<_> = places.iter().copied().filter(written).collect();
        if is_long() {
            sweep(&victim.files, places.len(), |files, number| {
                (0..8).for_each(|bit| count.add(open_flipped(&victim, files, places[number], bit)));
            });
        } else {
            sweep(&victim.files, 700, |files, number| {
                let random = mix(number as u64 ^ victim.marked.0 << 32);
                let among = if number % 2 == 0 { &places } else { &live };
                let place = among[(random >> 8) as usize % among.len()];
                count.add(open_flipped(&victim, files, place, random % 8));
            });
        }
        let [whole, cut, traceless, refused] = count.get("a bit flipped, opened");
        assert!(
            whole >= at_least(100) && refused >= at_least(10) && traceless == 0,
            "{whole}, {cut}, {traceless}, {refused}"
        );
    }
}

/// Damages one file in every way except bit flips, and calls `each` with the result.
pub fn damage_files(whole: &Files, foreign: &Files, each: impl Fn(&str, &Files)) {
    let each = here(each);
    for (file, bytes) in &whole.0 {
        let with = |what: &str, bytes: Option<Vec<u8>>| {
            let mut files = whole.clone();
            match bytes {
                Some(bytes) => files.0.insert(*file, bytes),
                None => files.0.remove(file),
            };
            each(&format!("{file} {what}"), &files);
        };
        with("removed", None);
        with("zeroed", Some(vec![0; bytes.len()]));
        for sector in 0..bytes.len().div_ceil(SECTOR_LEN) {
            let mut bytes = bytes.clone();
            let end = bytes.len().min((sector + 1) * SECTOR_LEN);
            bytes[sector * SECTOR_LEN..end].fill(0);
            with(&format!("sector {sector} zeroed"), Some(bytes));
        }
        let borders = (0..bytes.len()).step_by(4096).flat_map(|border| [border, border + 1, border + 2000]);
        let some = borders.chain([bytes.len() - 1, bytes.len() / 2 + 1]).filter(|len| *len < bytes.len());
        let lens: Vec<usize> = if is_long() { (0..bytes.len()).collect() } else { some.collect() };
        for len in lens {
            with(&format!("cut to {len}"), Some(bytes[..len].to_vec()));
        }
        for len in [1, 512, 4096, 20_000] {
            let garbage = (0..len).map(|at| mix(at) as u8);
            with(&format!("longer by {len}"), Some(bytes.iter().copied().chain(garbage).collect()));
        }
        if let Some(theirs) = foreign.0.get(file) {
            with("of another store", Some(theirs.clone()));
        }
        for (other, theirs) in whole.0.range(file..).skip(1) {
            if std::mem::discriminant(file) == std::mem::discriminant(other) {
                let mut files = whole.clone();
                files.0.insert(*file, theirs.clone());
                files.0.insert(*other, bytes.clone());
                each(&format!("{file} swapped with {other}"), &files);
            }
        }
    }
}

#[test]
fn file_damage_after_close_or_reopen_is_detected_or_harmless() {
    let foreign = Victim::closed().files;
    for victim in [Victim::closed(), Victim::reopened()] {
        let count = Count::default();
        damage_files(&victim.files, &foreign, |what, files| {
            let verdict = victim.open(what, files);
            assert_eq!(verdict, victim.rebuild(what, files), "{what}");
            count.add(verdict);
        });
        let [whole, cut, traceless, refused] = count.get("a file damaged, opened");
        assert_eq!((cut, traceless), (0, 0));
        assert!(whole >= at_least(100) && refused >= at_least(50), "{whole} whole, {refused} refused");
    }
}

#[test]
fn file_damage_after_kill_loses_only_unmarked_batches() {
    let (victim, foreign) = (Victim::killed(), Victim::closed().files);
    let count = Count::default();
    damage_files(&victim.files, &foreign, |what, files| {
        let verdict = victim.open(what, files);
        assert_eq!(verdict, victim.rebuild(what, files), "{what}");
        // The sector may contain the last batch's header. The log then looks as if that batch was never
        // written, and there is no cut to report.
        if let Verdict::Traceless(lsn) = verdict {
            assert!(what.contains("zeroed") && lsn.next() == victim.last, "{what}: {verdict:?}");
        }
        count.add(verdict);
    });
    let [whole, cut, traceless, refused] = count.get("a file damaged, opened");
    assert!(
        whole >= at_least(100) && cut >= at_least(1) && traceless <= 1 && refused >= at_least(50),
        "{whole}, {cut}, {traceless}, {refused}"
    );
}

/// Simulates lost and misdirected writes. Replaces one sector with the content of another, or swaps two
/// sectors, and calls `each` with the result.
fn misplace(victim: &Victim, each: impl Fn(&str, &Files)) {
    let each = here(each);
    let with = |what: &str, sectors: &[((FileName, usize), &[u8])]| {
        let mut files = victim.files.clone();
        for ((file, sector), bytes) in sectors {
            files.0.get_mut(file).unwrap()[sector * SECTOR_LEN..][..bytes.len()].copy_from_slice(bytes);
        }
        if files != victim.files {
            each(what, &files);
        }
    };
    for (file, bytes) in &victim.files.0 {
        let selves: Vec<&Vec<u8>> = victim.older.iter().filter_map(|files| files.0.get(file)).collect();
        let others: Vec<_> = victim.files.0.iter().filter(|(other, _)| *other > file).collect();
        for (sector, here) in bytes.chunks_exact(SECTOR_LEN).enumerate() {
            let place = (*file, sector);
            let nth = |bytes: &'_ Vec<u8>| bytes.chunks_exact(SECTOR_LEN).nth(sector).map(<[u8]>::to_vec);
            for older in selves.iter().filter_map(|bytes| nth(bytes)).collect::<BTreeSet<_>>() {
                with(&format!("{place:?} of long ago"), &[(place, &older)]);
            }
            if let Some(next) = bytes.chunks_exact(SECTOR_LEN).nth(sector + 1) {
                let next_place = (*file, sector + 1);
                with(&format!("{place:?} swapped with the next"), &[(place, next), (next_place, here)]);
            }
            for (other, theirs) in &others {
                let Some(there) = nth(theirs) else { continue };
                let other_place = (**other, sector);
                let what = format!("{place:?} swapped with {other_place:?}");
                with(&what, &[(place, &there), (other_place, here)]);
            }
        }
    }
}

#[test]
fn stale_or_misplaced_sector_is_detected_or_harmless() {
    for victim in [Victim::closed(), Victim::reopened(), Victim::killed()] {
        let count = Count::default();
        misplace(&victim, |what, files| {
            let verdict = victim.open(what, files);
            assert_eq!(verdict, victim.rebuild(what, files), "{what}");
            count.add(verdict);
        });
        let [whole, cut, traceless, refused] = count.get("a sector stale or misplaced, opened");
        // As with zeroed sectors, batches that no mark covers may be lost without a trace.
        assert!(whole >= at_least(100) && refused >= at_least(50), "{whole} whole, {refused} refused");
        assert!(victim.marked < victim.last || cut + traceless == 0, "{cut} cut, {traceless} traceless");
    }
}

/// A source in which one sector cannot be read.
struct BadSector<'a> {
    files: &'a Files,
    file: FileName,
    sector: usize,
}

impl ReadAt for BadSector<'_> {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        self.files.list(folder)
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        self.files.len(file)
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let (from, to) = (self.sector * SECTOR_LEN, (self.sector + 1) * SECTOR_LEN);
        if file == self.file && (offset as usize) < to && offset as usize + out.len() > from {
            return Err(io::Error::other("a latent sector error"));
        }
        self.files.read_at(file, offset, out)
    }
}

#[test]
fn unreadable_sector_is_never_taken_for_log_end() {
    for victim in [Victim::closed(), Victim::killed()] {
        let count = Count::default();
        for (file, bytes) in &victim.files.0 {
            for sector in 0..bytes.len().div_ceil(SECTOR_LEN) {
                let source = BadSector { files: &victim.files, file: *file, sector };
                count.add(victim.rebuild(&format!("sector {sector} of {file} unreadable"), &source));
            }
        }
        let [whole, cut, traceless, refused] = count.get("a sector unreadable, rebuilt");
        assert_eq!((cut, traceless), (0, 0));
        assert!(whole >= at_least(100) && refused >= at_least(10), "{whole} whole, {refused} refused");
    }
}

#[test]
fn bad_sector_after_log_end_loses_nothing() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let mut batch = store.batch();
    batch.create(100, Place::Host);
    store.commit(batch).unwrap();
    let state = State::of(&store);
    store.close().unwrap();
    let files = Files::of(&disk);
    // The header, the opening seal, the batch and the seal occupy one block each. The rest of the last block
    // was never written. One read covers the whole segment and must not fail because of its last sector.
    let segment = FileName::Segment(1);
    let sector = files.0[&segment].len() / SECTOR_LEN - 1;
    let rebuilt = rebuild(&BadSector { files: &files, file: segment, sector }, &Default::default()).unwrap();
    assert_eq!(State::rebuilt(&rebuilt), state);
    assert_eq!(rebuilt.end.unwrap().torn, None);
}

#[test]
fn damaged_test_stores_have_the_required_shape() {
    for victim in [Victim::closed(), Victim::killed(), Victim::reopened()] {
        let survey = Survey::read(&victim.files).unwrap();
        assert_eq!(survey.links.len(), 2);
        let [older, newer] = [1, 2].map(|id| survey.snapshot(SnapshotId(id)).unwrap());
        assert!(older.end < newer.redo.lsn && newer.end < victim.last, "log lies after both");
        assert!(survey.log.newest().unwrap().number > newer.redo.incarnation.number, "it was opened again");
        let len = victim.files.bytes_len();
        assert!((64 << 10..512 << 10).contains(&len), "{len} bytes");
    }
    let killed = Victim::killed();
    assert!(killed.marked < killed.last);
}
