//! Checks that `remanent_format::judge` agrees with the engine. Its verdict on damaged files is compared with
//! an open of the same files, also for stores with named, exact and restored snapshots, with released names,
//! and for a fork.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use remanent::disk::Disk;
use remanent::error::{Damage, FileName};
use remanent::options::{Compression, ImageIo, ImageOptions};
use remanent::store::RecoveryReport;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Lsn, Options, PageId, Place, SnapshotOptions, StatePoint, Store, View};
use remanent_format::judge::{ImageProofs, Verdict, judge};
use remanent_format::limits::SECTOR_LEN;
use remanent_format::state::reach::Role;
use remanent_format::state::survey::Survey;

use super::sweeps::sweep_all;
use super::{draw, flip, image_io, mix};
use crate::files::{Files, State, open_with, small};
use crate::with_options::With;

/// Returns the pages that the verdict reports as damaged in the state that recovery starts from.
pub fn damaged_pages(verdict: &Verdict) -> BTreeSet<PageId> {
    verdict.start().iter().flat_map(|start| &start.damaged_pages).map(|(page, _)| *page).collect()
}

/// The result of an open.
pub type Opened<'a> = Result<&'a RecoveryReport, &'a Damage>;

/// Compares the verdict on the files with the result of an open.
pub fn agrees(what: &str, files: &Files, opened: Opened<'_>) -> Option<(Survey, Verdict)> {
    let survey = match Survey::read(files) {
        Ok(survey) => survey,
        Err(damage) => {
            assert!(opened.is_err(), "{what}: opened, but the judge says {damage}");
            return None;
        }
    };
    let verdict = judge(&survey, files, &mut ImageProofs::new(files));
    let skipped = verdict.starts.iter().take(verdict.opens_from.unwrap_or(usize::MAX));
    let skipped: Vec<&Damage> = skipped.flat_map(|start| &start.blocked_by).collect();
    match (opened, verdict.start()) {
        (Ok(recovered), Some(start)) => {
            let state = verdict.state.as_ref().unwrap();
            let end = state.end.as_ref().unwrap();
            assert_eq!(start.snapshot, recovered.snapshot, "{what}");
            assert_eq!(state.resolved.table.lsn(), recovered.position.lsn, "{what}");
            assert_eq!(end.torn, recovered.torn, "{what}");
            assert_eq!(end.accepted.lsn.0 - end.proven.lsn.0, recovered.copied_batches, "{what}");
            for damage in skipped.iter().copied().chain(&verdict.lost).chain(&end.harmless) {
                let is_said = recovered.harmless.iter().any(|said| said.file == damage.file);
                assert!(is_said, "{what}: {damage} is not in {:?}", recovered.harmless);
            }
            for said in &recovered.harmless {
                let mut judged = skipped.iter().copied().chain(&verdict.lost).chain(&end.harmless);
                // Damage found by reading one structure names the batch that needs the structure. Damage
                // found by reading a whole file does not.
                let is_it = |damage: &Damage| {
                    (damage.file, damage.offset, &damage.defect) == (said.file, said.offset, &said.defect)
                };
                assert!(judged.any(is_it), "{what}: the judge does not know of {said}");
            }
        }
        (Err(refused), None) => {
            let is_known = survey.log.newest().is_none() || verdict.starts.is_empty();
            let is_named = skipped.iter().any(|damage| damage.file == refused.file);
            assert!(is_known || is_named, "{what}: refused for {refused}, the judge says {skipped:?}");
        }
        (Ok(recovered), None) => {
            panic!("{what}: opened from {:?}, judged {skipped:?}", recovered.snapshot)
        }
        (Err(refused), Some(start)) => panic!("{what}: judged to open from {:?}: {refused}", start.snapshot),
    }
    Some((survey, verdict))
}

pub fn options(io: ImageIo) -> Options {
    small().images(ImageOptions::new().io(io)).with(|options| options.log.reserve_bytes = Some(0))
}

/// A closed store, and its state after each batch.
pub struct Subject {
    pub name: &'static str,
    pub files: Files,
    /// The state after each batch.
    pub states: BTreeMap<Lsn, State>,
}

/// An open store whose states are recorded.
pub struct Work {
    disk: SimDisk,
    pub store: Store,
    states: BTreeMap<Lsn, State>,
    pub pages: Vec<PageId>,
    options: Options,
}

impl Work {
    pub fn new(io: ImageIo) -> Self {
        Self::with_pages(&[3000, 500, 100], Place::Host, options(io))
    }

    pub fn with_pages(lens: &[u64], place: Place, options: Options) -> Self {
        let disk = SimDisk::new();
        let store = open_with(&disk, options.clone()).unwrap();
        let mut batch = store.batch();
        for len in lens {
            batch.create_from(vec![*len as u8; *len as usize], place);
        }
        let pages = store.commit(batch).unwrap().pages;
        let mut work = Self { disk, store, states: BTreeMap::new(), pages, options };
        work.note();
        work
    }

    pub fn note(&mut self) {
        self.states.insert(self.store.lsn(), State::of(&self.store));
    }

    pub fn commit(&mut self, batches: u64) -> Lsn {
        for _ in 0..batches {
            let lsn = self.store.lsn().0;
            let mut batch = self.store.batch();
            let page = self.pages[(lsn % 3) as usize];
            batch.fill(page, lsn % 50, 50, &[lsn as u8 + 1]).set_root("step", lsn);
            self.store.commit(batch).unwrap();
            self.note();
        }
        self.store.lsn()
    }

    pub fn restore_to(&mut self, lsn: Lsn) {
        self.store.restore(StatePoint::Lsn(lsn)).unwrap();
        self.note();
    }

    pub fn reopen(self) -> Self {
        self.store.close().unwrap();
        Self { store: open_with(&self.disk, self.options.clone()).unwrap(), ..self }
    }

    pub fn close(self, name: &'static str) -> Subject {
        let Self { disk, store, states, .. } = self;
        store.close().unwrap();
        Subject { name, files: Files::of(&disk), states }
    }
}

fn named() -> Subject {
    let mut work = Work::new(ImageIo::Mapped);
    work.commit(3);
    work.store.snapshot_with(SnapshotOptions::new().name("good")).unwrap();
    work.commit(4);
    work.close("a named snapshot, and more log")
}

fn named_and_newer() -> Subject {
    let mut work = Work::new(ImageIo::Direct);
    work.commit(3);
    work.store.snapshot_with(SnapshotOptions::new().name("good")).unwrap();
    for _ in 0..4 {
        work.commit(3);
        work.store.snapshot().unwrap();
    }
    work.commit(2);
    work.close("a named snapshot that newer ones outlived")
}

fn exact() -> Subject {
    let mut work = Work::new(ImageIo::Buffered);
    work.commit(3);
    work.store.snapshot().unwrap();
    work.commit(3);
    work.store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
    work.commit(2);
    work.close("an exact snapshot after another one")
}

fn restored() -> Subject {
    let mut work = Work::new(ImageIo::Direct);
    let good = work.commit(3);
    work.store.snapshot_with(SnapshotOptions::new().name("before")).unwrap();
    work.commit(3);
    work.restore_to(good);
    work.commit(2);
    work.close("a restored state, and log after it")
}

fn restored_in_the_log() -> Subject {
    let mut work = Work::new(ImageIo::Mapped);
    work.commit(2);
    work.store.snapshot().unwrap();
    let good = work.commit(2);
    work.commit(2);
    work.restore_to(good);
    work.commit(1);
    work = work.reopen();
    work.commit(1);
    let subject = work.close("a restore with no snapshot of its own");
    // Create the files after a crash directly after the restore, before its snapshot is published.
    let newest = subject.files.names(|file| matches!(file, FileName::Manifest(_)));
    let mut files = subject.files;
    files.0.remove(newest.last().unwrap());
    Subject { files, ..subject }
}

fn forked() -> Subject {
    let mut work = Work::new(ImageIo::Buffered);
    work.commit(3);
    work.store.snapshot().unwrap();
    let at = work.commit(2);
    let source: Arc<dyn Disk> = Arc::new(work.disk.clone());
    let old = View::open_on(&source, Some(&StatePoint::Lsn(at))).unwrap();
    let disk = SimDisk::new();
    old.fork_on(&(Arc::new(disk.clone()) as Arc<dyn Disk>)).unwrap();
    let store = open_with(&disk, work.options.clone()).unwrap();
    let mut fork = Work {
        disk,
        store,
        options: work.options.clone(),
        states: work.states.clone(),
        pages: work.pages.clone(),
    };
    fork.commit(3);
    fork.close("a fork, with log of its own")
}

fn reopened() -> Subject {
    let mut work = Work::new(ImageIo::Direct);
    work.commit(2);
    work.store.snapshot().unwrap();
    work = work.reopen();
    work.commit(2);
    work = work.reopen();
    work.store.snapshot_with(SnapshotOptions::new().name("late")).unwrap();
    work.commit(1);
    work = work.reopen();
    work.close("several incarnations")
}

/// Returns a store with several pages on disk. For some, the newest snapshot has the image, or an overlay
/// over an older image. One page has changed since. The image of one page was written with its batch, and no
/// snapshot names it yet.
fn on_disk() -> Subject {
    // Pages longer than a few bytes may have overlays.
    let options = options(ImageIo::Mapped).with(|options| {
        options.images.chunk_len = Some(4096);
        options.images.compression = Compression::Off;
    });
    let mut work = Work::with_pages(&[3000, 2900, 2800, 2700], Place::Disk, options);
    work.store.snapshot().unwrap();
    work.commit(1);
    work.store.snapshot().unwrap();
    work.commit(1);
    let mut batch = work.store.batch();
    batch.create_from(vec![9; 2600], Place::Disk);
    batch.create_from(vec![8; 900], Place::Host);
    work.store.commit(batch).unwrap();
    work.note();
    work.close("pages on disk")
}

/// Damages one store in all ways. Returns the numbers of opens that succeeded, of opens that failed, and of
/// usable snapshots.
fn damage_all(subject: &Subject) -> [usize; 3] {
    let files: Vec<FileName> = subject.files.0.keys().copied().collect();
    let written: Vec<(FileName, usize)> = subject
        .files
        .0
        .iter()
        .flat_map(|(file, bytes)| {
            bytes.iter().enumerate().filter(|(_, byte)| **byte != 0).map(move |(at, _)| (*file, at))
        })
        .collect();
    let sectors: Vec<(FileName, usize)> = subject
        .files
        .0
        .iter()
        .flat_map(|(file, bytes)| (0..bytes.len()).step_by(SECTOR_LEN).map(move |at| (*file, at)))
        .filter(|(file, at)| {
            let bytes = &subject.files.0[file];
            bytes[*at..bytes.len().min(at + SECTOR_LEN)].iter().any(|byte| *byte != 0)
        })
        .collect();
    let flips = 250;
    let counts = [(); 3].map(|()| AtomicUsize::new(0));
    sweep_all(&subject.files, 1 + files.len() + sectors.len() + flips, |scratch, number| {
        let mut number = number;
        let mut within = |len: usize| {
            let here = (number < len).then_some(number);
            number = number.wrapping_sub(len);
            here
        };
        let (what, changed) = if within(1).is_some() {
            ("nothing".to_owned(), None)
        } else if let Some(at) = within(files.len()) {
            (format!("{} removed", files[at]), Some(files[at]))
        } else if let Some(at) = within(sectors.len()) {
            (format!("sector at {:?} zeroed", sectors[at]), Some(sectors[at].0))
        } else {
            let place = written[mix(number as u64) as usize % written.len()];
            flip(scratch, place, mix(number as u64 + 7) % 8);
            (format!("bit of {place:?} flipped"), Some(place.0))
        };
        if what.ends_with("removed") {
            scratch.0.remove(&changed.unwrap());
        }
        if what.ends_with("zeroed") {
            let at =
                sectors.iter().position(|(file, at)| what.contains(&format!("{:?}", (*file, *at)))).unwrap();
            let (file, at) = sectors[at];
            let bytes = scratch.0.get_mut(&file).unwrap();
            let end = bytes.len().min(at + SECTOR_LEN);
            bytes[at..end].fill(0);
        }
        let what = format!("{}: {what}", subject.name);
        check(subject, &what, scratch, &counts);
        if let Some(file) = changed {
            scratch.0.insert(file, subject.files.0[&file].clone());
        }
    });
    counts.map(AtomicUsize::into_inner)
}

/// Reads an open store, and asserts that it is in `state` except for pages on disk with reported damage.
/// Returns these damaged pages.
fn check_pages(what: &str, store: &Store, state: &State) -> BTreeSet<PageId> {
    let mut damaged = BTreeSet::new();
    for info in &state.pages {
        match store.read_to_vec(info.page) {
            Ok(bytes) => assert!(bytes == state.contents[&info.page], "{what}: page {}", info.page),
            Err(Error::Damaged(damage)) => {
                assert_eq!(info.place, Place::Disk, "{what}: {damage}");
                damaged.insert(info.page);
            }
            Err(error) => panic!("{what}: page {}: {error}", info.page),
        }
    }
    assert!(store.pages().unwrap().eq(state.pages.iter().cloned()), "{what}: wrong pages");
    assert!(*store.root().unwrap() == state.root, "{what}: a wrong root");
    damaged
}

/// Checks one damaged store: the verdict, the open, and each snapshot that the verdict reports as usable.
fn check(subject: &Subject, what: &str, files: &Files, [opened, refused, stood]: &[AtomicUsize; 3]) {
    let disk = files.disk();
    let judged = match open_with(&disk, options(image_io(draw(what)))) {
        Ok(store) => {
            opened.fetch_add(1, Ordering::Relaxed);
            let damaged = check_pages(what, &store, &subject.states[&store.lsn()]);
            let judged = agrees(what, files, Ok(store.recovered()));
            if let Some((_, verdict)) = &judged {
                assert_eq!(damaged, damaged_pages(verdict), "{what}: the pages that cannot be read");
            }
            judged
        }
        Err(Error::Damaged(damage)) => {
            refused.fetch_add(1, Ordering::Relaxed);
            agrees(what, files, Err(&damage))
        }
        Err(error) => panic!("{what}: {error}"),
    };
    let Some((survey, verdict)) = judged else { return };
    for start in verdict.starts.iter().filter(|start| start.role != Role::Link && start.lost_by.is_empty()) {
        let Some(id) = start.snapshot else { continue };
        let end = survey.snapshot(id).unwrap().end;
        let disk: Arc<dyn Disk> = Arc::new(files.disk());
        let old = View::open_on(&disk, Some(&StatePoint::Lsn(end)));
        let old = old.unwrap_or_else(|error| panic!("{what}: snapshot {id} is said to stand: {error}"));
        for (page, bytes) in &subject.states[&end].contents {
            let mut found = vec![0; bytes.len()];
            old.read(*page, 0, &mut found).unwrap_or_else(|error| panic!("{what}: page {page}: {error}"));
            assert!(found == *bytes, "{what}: page {page} of snapshot {id}");
        }
        stood.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn verdict_matches_open_for_any_retention() {
    for subject in [
        named(),
        named_and_newer(),
        exact(),
        restored(),
        restored_in_the_log(),
        forked(),
        reopened(),
        on_disk(),
    ] {
        let [opened, refused, stood] = damage_all(&subject);
        let enough = opened >= 60 && refused >= 12 && stood >= 60;
        assert!(enough, "{}: {opened} opened, {refused} refused, {stood} stood", subject.name);
    }
}
