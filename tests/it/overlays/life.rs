//! Random operations on long pages on disk, compared with plain bytes while snapshots write overlays.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent::disk::Disk;
use remanent::error::NoSuchState;
use remanent::options::ImageIo;
use remanent::store::ReadPages;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, SnapshotOptions, StatePoint, Store, View};

use super::{image_of, is_overlay};
use crate::files::{Files, small};
use crate::kill::workload::Random;
use crate::pages_on_disk::{commit, move_to, opened, uncompressed};
use crate::with_options::With;

/// Lengths below and above the limits up to which a page is written or read in one piece, and longer ones.
const LENS: [u64; 8] =
    [1 << 16, (1 << 16) + 1, 100_000, 1 << 20, (1 << 20) + 1, (3 << 20) + 77, (4 << 20) + 5, 70_001];
const STEPS: u64 = 250;
const PAGES_MAX: usize = 8;

type Plain = BTreeMap<PageId, Vec<u8>>;

struct Life {
    disk: SimDisk,
    options: Options,
    /// The open store, or `None` between two opens.
    store: Option<Store>,
    random: Random,
    /// The expected bytes of the pages.
    plain: Plain,
    /// Earlier states, with the expected bytes.
    points: Vec<(StatePoint, Plain)>,
}

/// The number of requested states that no longer existed, and the number of overlays that were found.
#[derive(Default)]
struct Counts {
    overlays: usize,
    points: usize,
}

impl Life {
    fn store(&self) -> &Store {
        self.store.as_ref().expect("it is open")
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random.next() as usize % limit
    }

    fn any_page(&mut self) -> PageId {
        let number = self.below(self.plain.len());
        *self.plain.keys().nth(number).expect("one of them")
    }

    fn any_len(&mut self) -> u64 {
        LENS[self.below(LENS.len())]
    }

    fn create(&mut self) {
        let len = self.any_len();
        // Every second page is compressible.
        let bytes = match self.below(2) {
            0 => self.random.bytes(len),
            _ => vec![self.random.next() as u8; len as usize],
        };
        let page = commit(self.store(), |batch| _ = batch.create_from(bytes.clone(), Place::Disk))[0];
        self.plain.insert(page, bytes);
    }

    /// Writes to a page in one batch, at one or several offsets.
    fn write(&mut self) {
        let page = self.any_page();
        let (count, longest) = ([1, 3, 40][self.below(3)], [10, 700, 9000, 40_000][self.below(4)]);
        let len = self.plain[&page].len();
        let mut writes = Vec::new();
        for _ in 0..count {
            let count = 1 + self.below(longest.min(len));
            let at = match self.below(4) {
                0 => 0,
                1 => len - count,
                // Write across the boundary of the bytes that are read in one piece.
                2 => ((1 << 20) - count / 2).min(len - count),
                _ => self.below(len - count + 1),
            };
            writes.push((at, self.random.bytes(count as u64)));
        }
        self.commit_writes(page, &writes);
    }

    fn commit_writes(&mut self, page: PageId, writes: &[(usize, Vec<u8>)]) {
        commit(self.store(), |batch| {
            writes.iter().for_each(|(at, bytes)| _ = batch.write(page, *at as u64, bytes));
        });
        let plain = self.plain.get_mut(&page).expect("it is there");
        writes.iter().for_each(|(at, bytes)| plain[*at..at + bytes.len()].copy_from_slice(bytes));
    }

    fn step(&mut self, kind: usize, seen: &mut Counts) {
        match kind {
            0..2 if self.plain.len() < PAGES_MAX => self.create(),
            2 if self.plain.len() > 3 => {
                let page = self.any_page();
                commit(self.store(), |batch| _ = batch.delete(page));
                self.plain.remove(&page);
            }
            3 => {
                let (page, len) = (self.any_page(), self.any_len());
                commit(self.store(), |batch| _ = batch.resize(page, len));
                self.plain.get_mut(&page).expect("it is there").resize(len as usize, 0);
            }
            4 | 5 => {
                let page = self.any_page();
                let is_on_disk = self.store().page(page).unwrap().place == Place::Disk;
                move_to(self.store(), page, if is_on_disk { Place::Host } else { Place::Disk });
            }
            6 => {
                let page = self.any_page();
                let bytes = self.random.bytes(self.plain[&page].len() as u64);
                self.commit_writes(page, &[(0, bytes)]);
            }
            7..20 => self.write(),
            20..27 => _ = self.store().snapshot().unwrap(),
            27 => _ = self.store().snapshot_with(SnapshotOptions::new().exact()).unwrap(),
            28 | 29 => _ = self.store().snapshot_with(SnapshotOptions::new().only_published()).unwrap(),
            30 => self.open_anew(),
            31 => self.snapshots_beside_writes(),
            32 => {
                let taken = self.store().snapshot_with(SnapshotOptions::new().exact()).unwrap();
                self.points.push((StatePoint::Lsn(taken.end), self.plain.clone()));
                self.points.drain(..self.points.len().saturating_sub(3));
            }
            33 | 34 => self.go_back(kind == 34, seen),
            35 => assert!(self.store().scrub().unwrap().damage.is_empty()),
            _ => self.store().wait_verified().unwrap(),
        }
    }

    fn open_anew(&mut self) {
        self.store = None;
        self.store = Some(opened(&self.disk, self.options.clone()));
    }

    fn snapshots_beside_writes(&mut self) {
        let store = self.store.take().expect("it is open");
        std::thread::scope(|scope| {
            let snapshots = scope.spawn(|| (0..3).for_each(|_| _ = store.snapshot().unwrap()));
            for _ in 0..30 {
                let page = self.any_page();
                let plain = self.plain.get_mut(&page).expect("it is there");
                let at = self.random.next() as usize % (plain.len() - 1000);
                let bytes = self.random.bytes(1000);
                commit(&store, |batch| _ = batch.write(page, at as u64, &bytes));
                plain[at..at + 1000].copy_from_slice(&bytes);
            }
            snapshots.join().unwrap();
        });
        self.store = Some(store);
    }

    /// Views, forks or restores an earlier state.
    fn go_back(&mut self, restores: bool, seen: &mut Counts) {
        let Some(last) = self.points.len().checked_sub(1) else { return };
        let (point, then) = self.points[self.random.next() as usize % (last + 1)].clone();
        if restores {
            match self.store().restore(&point) {
                Ok(_) => (self.plain, seen.points) = (then, seen.points + 1),
                Err(error) => {
                    assert!(matches!(error, Error::NoSuchState(NoSuchState::OutsideWindow { .. })), "{error}")
                }
            }
            return;
        }
        let shared: Arc<dyn Disk> = Arc::new(self.disk.clone());
        let view = match View::open_on(&shared, Some(&point)) {
            Ok(view) => view,
            Err(error) => {
                return assert!(
                    matches!(error, Error::NoSuchState(NoSuchState::OutsideWindow { .. })),
                    "{error}"
                );
            }
        };
        seen.points += 1;
        let forked = SimDisk::new();
        view.fork_on(&(Arc::new(forked.clone()) as Arc<dyn Disk>)).unwrap();
        let fork = opened(&forked, self.options.clone());
        for (page, bytes) in &then {
            assert!(view.read_to_vec(*page).unwrap() == *bytes, "{page} in a view");
            commit(&fork, |batch| _ = batch.write(*page, 1, b"of the fork"));
            fork.snapshot().unwrap();
            let mut of_fork = bytes.clone();
            of_fork[1..12].copy_from_slice(b"of the fork");
            assert!(fork.read_to_vec(*page).unwrap() == of_fork, "{page} in a fork");
        }
    }

    fn check(&mut self, store: &Store, why: &str) {
        let pages: Vec<PageId> = self.plain.keys().copied().collect();
        for page in pages {
            let len = self.plain[&page].len();
            let (at, count) = (self.below(len - 5), 1 + self.below(1 << 16));
            let plain = &self.plain[&page][at..len.min(at + count)];
            let mut part = vec![0; plain.len()];
            store.read(page, at as u64, &mut part).unwrap();
            assert!(part == plain, "{why}: {page} from {at}");
            assert!(store.read_to_vec(page).unwrap() == self.plain[&page], "{why}: {page}");
        }
    }

    /// Takes a snapshot and opens a copy of the files, as a process that is started now would find them. The
    /// store continues in the meantime.
    fn check_a_copy(&mut self, why: &str, seen: &mut Counts) {
        let taken = self.store().snapshot().unwrap();
        let images = self.plain.keys().map(|page| image_of(&self.disk, &taken, *page));
        seen.overlays += images.filter(is_overlay).count();
        let copy = opened(&Files::of(&self.disk).disk(), self.options.clone());
        self.check(&copy, why);
        assert!(copy.audit().unwrap().changed.is_empty(), "{why}");
    }
}

#[test]
fn pages_match_writes_over_random_lives() {
    let mut seen = Counts::default();
    for seed in 0..6 {
        let options = if seed % 2 == 0 { uncompressed() } else { small() };
        let io = [ImageIo::Buffered, ImageIo::Mapped, ImageIo::Direct][seed as usize % 3];
        let options = options.with(|options| {
            options.images.io = io;
            options.retention.snapshots_kept = 1 + seed as usize % 3;
            options.retention.log_kept = 1 << 30;
        });
        let options = if seed == 4 {
            options.with(|options| options.images.chunk_len = Some(64 << 10))
        } else {
            options
        };
        let disk = SimDisk::new();
        let store = Some(opened(&disk, options.clone()));
        let (plain, points) = (Plain::new(), Vec::new());
        let mut life = Life { disk, options, store, random: Random(7919 * seed + 5), plain, points };
        (0..4).for_each(|_| life.create());
        for step in 0..STEPS {
            let kind = life.below(37);
            life.step(kind, &mut seen);
            let why = format!("seed {seed}, step {step} of kind {kind}");
            if step % 10 == 9 {
                let store = life.store.take().expect("it is open");
                life.check(&store, &why);
                life.store = Some(store);
            }
            if step % 50 == 49 {
                life.check_a_copy(&why, &mut seen);
            }
        }
        life.open_anew();
        let store = life.store.take().expect("it is open");
        life.check(&store, &format!("seed {seed}, at the end"));
    }
    assert!(seen.overlays > 20 && seen.points > 10, "{} overlays, {} points", seen.overlays, seen.points);
}
