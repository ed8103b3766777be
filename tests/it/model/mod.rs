//! Random histories of a store, compared with a simple model in memory.
//!
//! A history consists of valid and invalid batches with every operation, snapshots with and without names,
//! pruning, scrubs, restores, forks, clean reopens and crashes. In one of the runs, the store also takes
//! background snapshots, and in another it demotes pages because its tiers are too small. A crash drops the
//! store and opens a copy of its directory that was taken while the store was working, as a kill of the
//! process would leave it. `plain.rs` is the model, which is based on the documentation and not on the
//! engine. `history.rs` defines histories, `draw.rs` generates them, and `run.rs` runs them. After every
//! open, and at the end, the store, the pure `rebuild` of its directory, and the model must have the same
//! state.
//!
//! The fuzzer also generates histories and runs them on simulated disks (`fuzz/src/histories.rs`).
//!
//! Histories are generated from seeds, which are the same in every run. A failure reports its seed, and its
//! history is shrunk. `REMANENT_SEED=n cargo test --test it model` runs only the histories of that seed.

pub mod draw;
pub mod history;
pub mod plain;
pub mod run;

use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::disk::dir::{DirDisk, DirReader};
use remanent::options::{ImageOptions, LogIo, LogOptions, PageLoad};
use remanent::testing::late_device::LateDevice;
use remanent::{Error, Options, Place, StatePoint, Store};
use remanent_format::ReadAt;
use tempfile::TempDir;

use crate::with_options::With;
use crate::{direct_io, gpu};
use draw::history;
use history::{Action, Step};
use plain::Refusal;
use run::{Floors, Ground, Left, Setting, Tally, with_cramped_tiers, with_tiers};

/// The seeds of the histories in every run.
const SEEDS: Range<u64> = 0..20;
/// The seeds of histories with small tiers.
const CRAMPED_SEEDS: Range<u64> = 0..12;

#[test]
fn store_matches_model() {
    let tally = RefCell::new(Tally::default());
    let has_gpu = gpu::device().is_some();
    let direct = direct_io::log_io();
    each_history(SEEDS, |seed, actions| {
        // Run the same history on early and late devices, on a GPU (I11), and in each mode of writing the
        // log.
        let other = if seed % 2 == 0 { LogIo::Buffered } else { direct };
        let late = || Arc::new(LateDevice::seeded(host(), seed)) as Arc<dyn Device>;
        let options = |log_io| {
            with_tiers(
                Options::new()
                    .log(LogOptions::new().io(log_io))
                    .images(ImageOptions::new().io(direct_io::image_io(log_io))),
            )
        };
        // With short chunks, pages on disk of a few hundred bytes have overlays.
        let on_demand = options(other).with(|options| {
            options.memory.load = PageLoad::OnDemand;
            options.images.chunk_len = Some(4 << 10);
        });
        let plain = Setting {
            options: options(LogIo::Mapped),
            in_background: false,
            is_cramped: false,
            device: &host,
        };
        run("a host device, mapped", actions, &plain, &tally)?;
        let in_background = Setting { options: on_demand, in_background: true, device: &late, ..plain };
        run(&format!("a late device, {other}, in the background"), actions, &in_background, &tally)?;
        if has_gpu {
            let on_gpu = Setting { options: options(direct), device: &on_gpu, ..plain };
            run(&format!("a GPU, {direct}"), actions, &on_gpu, &tally)?;
        }
        Ok(())
    });
    // Even if the random selection of actions changes, the histories must still cover all of them.
    let tally = tally.into_inner();
    let Tally {
        commits,
        crashes,
        restores,
        views,
        forks,
        names,
        given_up,
        names_of_newest,
        published,
        pruned,
        scrubs,
        images,
        background,
        unloaded,
        moves,
        captures,
        ..
    } = tally;
    let enough = commits >= 400 && crashes >= 100 && restores >= 40 && views >= 40 && forks >= 30;
    let enough = enough && names >= 30 && given_up >= 1 && images >= 80 && background >= 1 && unloaded >= 50;
    let enough = enough && moves >= 60 && captures >= 60 && published >= 20 && names_of_newest >= 2;
    let enough = enough && pruned >= 5 && scrubs >= 20;
    assert!(asked_for().is_some() || enough && tally.refusals.len() == Refusal::COUNT, "{tally:?}");
}

/// Runs histories of a store whose tiers are smaller than its pages. The store constantly demotes pages, and
/// each page must have its bytes and be in the requested place or a lower one.
#[test]
fn store_with_moves_matches_model() {
    let tally = RefCell::new(Tally::default());
    let has_gpu = gpu::device().is_some();
    each_history(CRAMPED_SEEDS, |seed, actions| {
        let late = || Arc::new(LateDevice::seeded(host(), seed)) as Arc<dyn Device>;
        let log_io = [LogIo::Mapped, LogIo::Buffered][seed as usize % 2];
        let options = Options::new()
            .log(LogOptions::new().io(log_io))
            .images(ImageOptions::new().io(direct_io::image_io(log_io)));
        let options = with_cramped_tiers(options).with(|options| {
            options.memory.load = if seed % 3 == 0 { PageLoad::OnDemand } else { PageLoad::Eager };
            options.images.chunk_len = Some(4 << 10);
        });
        let (label, device): (&str, &dyn Fn() -> Arc<dyn Device>) = match seed % 4 {
            0 => ("a late device", &late),
            1 if has_gpu => ("a GPU", &on_gpu),
            _ => ("a host device", &host),
        };
        let setting = Setting { options, in_background: true, is_cramped: true, device };
        // First create more pages than fit.
        let page = Step::Create { len: 500, place: Place::Device(0), key: None, metadata: None };
        let full = (0..3).map(|_| Action::Commit(vec![page.clone(); 8]));
        let actions: Vec<Action> = full.chain(actions.iter().cloned()).collect();
        run(&format!("{label}, {log_io}"), &actions, &setting, &tally)
    });
    let tally = tally.into_inner();
    let Tally { commits, crashes, restores, forks, evictions, moves, captures, without_room, .. } = tally;
    let enough = commits >= 150 && crashes >= 30 && restores >= 15 && forks >= 10 && evictions >= 300;
    let enough = enough && moves >= 40 && captures >= 5 && (1..commits / 2).contains(&without_room);
    assert!(asked_for().is_some() || enough, "{tally:?}");
}

/// Returns the seed that the environment requests.
fn asked_for() -> Option<u64> {
    std::env::var("REMANENT_SEED").ok().map(|seed| seed.parse().unwrap())
}

/// Generates and checks histories from each seed. A failure reports its seed, and its history is shrunk.
fn each_history(seeds: Range<u64>, check: impl Fn(u64, &[Action]) -> Result<(), TestCaseError>) {
    for seed in asked_for().map_or(seeds, |seed| seed..seed + 1) {
        let config =
            Config { cases: 2, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
        match runner.run(&history(), |actions| check(seed, &actions)) {
            Ok(()) => {}
            Err(TestError::Fail(reason, actions)) => panic!("seed {seed}: {reason}\n{actions:#?}"),
            Err(TestError::Abort(reason)) => panic!("seed {seed}: {reason}"),
        }
    }
}

fn host() -> Arc<dyn Device> {
    Arc::new(HostDevice::new())
}

fn on_gpu() -> Arc<dyn Device> {
    gpu::device().expect("it was there at the start")
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

/// Runs a history in a directory.
fn run(
    label: &str,
    actions: &[Action],
    setting: &Setting,
    tally: &RefCell<Tally>,
) -> Result<(), TestCaseError> {
    let tally = &mut *tally.borrow_mut();
    let ran = catch_unwind(AssertUnwindSafe(|| run::run(actions, Directory::new(), setting, tally)));
    ran.map_err(|panic| {
        TestCaseError::fail(format!("on {label}, in {}: {}", tally.under_way, panic_message(&*panic)))
    })
}

/// A temporary directory.
struct Directory {
    path: PathBuf,
    _parent: TempDir,
}

impl Directory {
    fn new() -> Self {
        let parent = tempfile::tempdir().unwrap();
        Self { path: parent.path().join("store"), _parent: parent }
    }
}

impl Ground for Directory {
    fn disk(&self) -> Arc<dyn Disk> {
        Arc::new(DirDisk::new(&self.path))
    }

    fn files(&self) -> Box<dyn ReadAt + '_> {
        Box::new(DirReader::new(&self.path))
    }

    fn fork(&self, store: &Store, point: &StatePoint) -> Result<Self, Error> {
        let fork = Self::new();
        store.fork(&fork.path, point)?;
        Ok(fork)
    }

    fn begin(&mut self, _floors: Floors) {}

    /// Copies the directory while the store is working.
    fn crash(self, store: Store, _pick: u64) -> Left<Self> {
        let ground = copy_as_it_lies(&store, &self.path);
        let floors = Floors::of(&store);
        // The threads of the store continue and may still write, but this directory is not read again.
        std::mem::forget(store);
        Left { ground, floors, is_between: true }
    }
}

/// Copies the directory of a store in use. The store's threads may be creating a segment or writing a seal,
/// so a copy is used only if no such change happened during it. Such a copy is a state that existed at one
/// instant.
fn copy_as_it_lies(store: &Store, source: &Path) -> Directory {
    let moment = || {
        let mut names: Vec<_> = walk(source).into_iter().map(|(path, _)| path).collect();
        names.sort_unstable();
        (names, store.stats().log)
    };
    loop {
        let before = moment();
        let target = Directory::new();
        std::fs::create_dir(&target.path).unwrap();
        let copied = walk(source).into_iter().try_for_each(|(path, is_folder)| {
            let copy = target.path.join(path.strip_prefix(source).unwrap());
            if is_folder { std::fs::create_dir(copy) } else { std::fs::copy(&path, copy).map(drop) }
        });
        if copied.is_ok() && moment() == before {
            return target;
        }
    }
}

/// Returns files and folders below a folder; folders precede their contents.
fn walk(folder: &Path) -> Vec<(PathBuf, bool)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_folder = path.is_dir();
        found.push((path.clone(), is_folder));
        if is_folder {
            found.extend(walk(&path));
        }
    }
    found
}
