//! Random histories of a store against a plain model in memory.
//!
//! A history is batches of every operation, valid and not, snapshots with and without names, pruning,
//! restores, forks, clean reopenings and crashes; in one of the runs the store takes snapshots on its own,
//! too. A crash forgets the store and opens a copy of its directory, as it lies there in the middle of its
//! work: so does the death of a process leave it. `plain.rs` is the model, written from the promises and not
//! from the engine; `history.rs` says what a history is, `draw.rs` draws one, `run.rs` runs it. After every
//! opening, and at the end, the store, the pure `rebuild` of its directory, and the model must agree on
//! everything.
//!
//! The fuzzer makes histories of its own, and runs them on simulated disks (`fuzz/src/histories.rs`).
//!
//! Histories are drawn from seeds, the same ones in every run. A failure names its seed and is shrunk;
//! `REMANENT_SEED=n cargo test --test it model` runs the histories of that seed alone.

pub mod draw;
pub mod history;
pub mod plain;
pub mod run;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::disk::dir::{DirDisk, DirReader};
use remanent::testing::late_device::LateDevice;
use remanent::{Error, LogIo, Options, PageLoad, StatePoint, Store};
use remanent_format::ReadAt;
use tempfile::TempDir;

use crate::{direct_io, gpu};
use draw::history;
use history::Action;
use plain::Refusal;
use run::{Floors, Ground, Left, Setting, Tally, with_tiers};

/// Seeds that every run draws histories from.
const SEEDS: std::ops::Range<u64> = 0..20;

#[test]
fn the_store_is_what_the_model_says() {
    let tally = std::cell::RefCell::new(Tally::default());
    let asked: Option<u64> = std::env::var("REMANENT_SEED").ok().map(|seed| seed.parse().unwrap());
    let has_gpu = gpu::device().is_some();
    let direct = direct_io::log_io();
    for seed in asked.map_or(SEEDS, |seed| seed..seed + 1) {
        let config =
            Config { cases: 2, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
        let outcome = runner.run(&history(), |actions| {
            // The same history on a device that does all at once, on one that does all late, and on a GPU
            // (I11), and by each way to write the log.
            let other = if seed % 2 == 0 { LogIo::Buffered } else { direct };
            let host = || Arc::new(HostDevice::new()) as Arc<dyn Device>;
            let late = || Arc::new(LateDevice::seeded(host(), seed)) as Arc<dyn Device>;
            let gpu = || gpu::device().expect("it was there at the start") as Arc<dyn Device>;
            let options =
                |log_io| with_tiers(Options::default().log_io(log_io).image_io(direct_io::image_io(log_io)));
            // With short chunks, pages on disk of some hundred bytes have overlays.
            let on_demand = options(other).page_load(PageLoad::OnDemand).chunk_len(4 << 10);
            let run = |label: &str, options, in_background, device: &dyn Fn() -> Arc<dyn Device>| {
                let tally = &mut *tally.borrow_mut();
                let ran = catch_unwind(AssertUnwindSafe(|| {
                    run(&actions, options, in_background, tally, device);
                }));
                let told = |panic: Box<dyn Any + Send>| {
                    let message = panic_message(&*panic);
                    TestCaseError::fail(format!("on {label}, in {}: {message}", tally.under_way))
                };
                ran.map_err(told)
            };
            run("a host device, mapped", options(LogIo::Mapped), false, &host)?;
            run(&format!("a late device, {other}, in the background"), on_demand, true, &late)?;
            if has_gpu {
                run(&format!("a GPU, {direct}"), options(direct), false, &gpu)?;
            }
            Ok(())
        });
        match outcome {
            Ok(()) => {}
            Err(TestError::Fail(reason, actions)) => panic!("seed {seed}: {reason}\n{actions:#?}"),
            Err(TestError::Abort(reason)) => panic!("seed {seed}: {reason}"),
        }
    }
    // The seeds must lead everywhere: a change to how histories are drawn must not make this test idle.
    let tally = tally.into_inner();
    let Tally {
        commits,
        crashes,
        restores,
        looks,
        forks,
        names,
        given_up,
        images,
        background,
        unloaded,
        moves,
        captures,
        ..
    } = tally;
    let enough = commits >= 400 && crashes >= 100 && restores >= 40 && looks >= 40 && forks >= 30;
    let enough = enough && names >= 30 && given_up >= 1 && images >= 80 && background >= 1 && unloaded >= 50;
    let enough = enough && moves >= 60 && captures >= 60;
    assert!(asked.is_some() || enough && tally.refusals.len() == Refusal::COUNT, "{tally:?}");
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

/// Runs a history in a directory.
fn run(
    actions: &[Action],
    options: Options,
    in_background: bool,
    tally: &mut Tally,
    device: &dyn Fn() -> Arc<dyn Device>,
) {
    let setting = Setting { options, in_background, device };
    run::run(actions, Directory::new(), &setting, tally);
}

/// A directory that is removed at the end.
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

    /// A copy of the directory, as it lies there in the middle of its work.
    fn crash(self, store: Store, _pick: u64) -> Left<Self> {
        let ground = copy_as_it_lies(&store, &self.path);
        let floors = Floors::of(&store);
        // Its threads live on and may still write; this directory is not read again.
        std::mem::forget(store);
        Left { ground, floors, is_between: true }
    }
}

/// Copies a store directory in use. The store's own threads may be making a segment or writing a seal, so a
/// copy is used only if nothing of that kind happened meanwhile: it existed at one moment.
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

/// Files and folders below a folder, folders before what is in them.
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
