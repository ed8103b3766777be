//! Random histories of a store against a plain model in memory.
//!
//! A history is batches of every operation, valid and not, snapshots with and without names, pruning, restores,
//! forks, clean reopenings and crashes; in one of the runs the store takes snapshots of its own accord, too. A crash forgets the store and opens a copy of its directory, as it lies there in the middle of
//! things: that is what the death of a process leaves. `plain.rs` is the model, written from the promises
//! and not from the engine; `history.rs` draws histories. After every opening, and at the end, the store,
//! the pure `rebuild` of its directory, and the model must agree on everything.
//!
//! Histories are drawn from seeds, the same ones in every run. A failure names its seed and is shrunk;
//! `REMANENT_SEED=n cargo test --test it model` runs the histories of that seed alone.

mod history;
mod plain;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::device::late::LateDevice;
use remanent::disk::dir::{DirDisk, DirReader};
use remanent::{Error, Key, LogIo, Lsn, Options, PageInfo, Position, RestorePoint, Snapshot, Store};
use remanent_format::rebuild::{RebuildOptions, rebuild};

use crate::{direct, gpu};
use history::{Action, KEYS, SNAPSHOT_NAMES, Step, history};
use plain::{Draft, Model, Page, Refusal};

/// Seeds that every run draws histories from.
const SEEDS: std::ops::Range<u64> = 0..20;
/// Snapshots that a store keeps by default.
const SNAPSHOTS_KEPT: usize = 2;

#[test]
fn the_store_is_what_the_model_says() {
    let tally = std::cell::RefCell::new(Tally::default());
    let asked: Option<u64> = std::env::var("REMANENT_SEED").ok().map(|seed| seed.parse().unwrap());
    let has_gpu = gpu::device().is_some();
    let direct = direct::log_io();
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
            run(&actions, LogIo::Mapped, false, &mut tally.borrow_mut(), || Arc::new(HostDevice::new()));
            run(&actions, other, true, &mut tally.borrow_mut(), || {
                Arc::new(LateDevice::seeded(Arc::new(HostDevice::new()), seed))
            });
            if has_gpu {
                let gpu = || gpu::device().expect("it was there at the start") as Arc<dyn Device>;
                run(&actions, direct, false, &mut tally.borrow_mut(), gpu);
            }
            Ok(())
        });
        match outcome {
            Ok(()) => {}
            Err(TestError::Fail(reason, actions)) => panic!("seed {seed}: {reason}\n{actions:#?}"),
            Err(TestError::Abort(reason)) => panic!("seed {seed}: {reason}"),
        }
    }
    // The seeds lead everywhere: a change to how histories are drawn must not make this test idle.
    let tally = tally.into_inner();
    let Tally { commits, crashes, restores, looks, forks, names, given_up, images, background, .. } = tally;
    let enough = commits >= 400 && crashes >= 100 && restores >= 40 && looks >= 40 && forks >= 30;
    let enough = enough && names >= 30 && given_up >= 1 && images >= 80 && background >= 1;
    assert!(asked.is_some() || enough && tally.refusals.len() == Refusal::COUNT, "{tally:?}");
}

/// What the histories came to.
#[derive(Debug, Default)]
struct Tally {
    commits: usize,
    refusals: HashSet<Refusal>,
    crashes: usize,
    restores: usize,
    looks: usize,
    forks: usize,
    names: usize,
    /// Snapshots that went with their names.
    given_up: usize,
    /// Pages that were written whole.
    images: usize,
    /// Snapshots that the store took of its own accord.
    background: u64,
}

/// Runs a history on a device made anew for each opening.
fn run(
    actions: &[Action],
    log_io: LogIo,
    in_background: bool,
    tally: &mut Tally,
    device: impl Fn() -> Arc<dyn Device>,
) {
    let options = Options::default().segment_len(16 << 10).log_io(log_io).snapshot_interval(None);
    let options = || options.clone().snapshot_log_bytes(in_background.then_some(12 << 10));
    let open = |path: &Path| {
        Store::open_on(Arc::new(DirDisk::new(path)), device(), options()).unwrap_or_else(|e| panic!("{e}"))
    };
    let mut model = Model::default();
    model.in_background = in_background;
    let mut by_hand = 0;
    let mut directory = tempfile::tempdir().unwrap();
    let mut store = open(directory.path());
    for action in actions {
        if in_background {
            model.adopt(&store.snapshots());
        }
        match action {
            Action::Commit(steps) => {
                let mut draft = Draft::new(&model);
                let refusal = steps.iter().find_map(|step| draft.step(step));
                let (batch, changed) = draft.finish(refusal);
                let result = store.commit(batch);
                match (result, refusal) {
                    (Ok(committed), None) => {
                        tally.commits += 1;
                        tally.images +=
                            steps.iter().filter(|step| matches!(step, Step::Replace { .. })).count();
                        model.install(changed, &committed.pages);
                        assert_eq!(committed.position.lsn, Lsn(model.lsn), "the batch's number");
                        assert_eq!(committed.position.incarnation, store.recovered().position.incarnation);
                    }
                    (Err(error), Some(refusal)) => {
                        tally.refusals.insert(refusal);
                        assert!(refusal.is(&error), "expected {refusal:?}: {error}");
                        compare_table(&store, &model);
                    }
                    (Ok(_), Some(refusal)) => panic!("expected {refusal:?}, and it was committed"),
                    (Err(error), None) => panic!("a good batch was refused: {error}"),
                }
            }
            Action::Snapshot { exact } => {
                let snapshot =
                    if *exact { store.snapshot_exact().unwrap() } else { store.snapshot().unwrap() };
                assert_eq!((snapshot.redo, snapshot.end), (Lsn(model.lsn), Lsn(model.lsn)));
                assert_eq!(snapshot.pages, model.pages.len() as u64);
                by_hand += 1;
                model.keep(snapshot.id, None, SNAPSHOTS_KEPT);
            }
            Action::Name(pick) => {
                let name = SNAPSHOT_NAMES[*pick];
                let holder = model.names.iter().find(|(_, held)| *held == name).map(|(id, _)| *id);
                match (store.snapshot_named(name), holder) {
                    (Ok(snapshot), None) => {
                        tally.names += 1;
                        by_hand += 1;
                        assert_eq!((snapshot.redo, snapshot.end), (Lsn(model.lsn), Lsn(model.lsn)));
                        assert_eq!(snapshot.name.as_deref(), Some(name));
                        model.keep(snapshot.id, Some(name), SNAPSHOTS_KEPT);
                    }
                    (Err(Error::NameTaken { snapshot, .. }), Some(holder)) => assert_eq!(snapshot, holder),
                    (result, holder) => panic!("{name:?}, which {holder:?} has: {result:?}"),
                }
            }
            Action::GiveUp(pick) => {
                let name = SNAPSHOT_NAMES[*pick];
                let went = store.prune(&store.retention().give_up(name)).unwrap().snapshots;
                let named = went.iter().filter_map(|info| info.name.as_deref()).collect::<Vec<_>>();
                assert!(named.iter().all(|gone| *gone == name), "{named:?} went with {name:?}");
                tally.given_up += named.len();
                if in_background {
                    model.names.retain(|id, _| went.iter().all(|info| info.id != *id));
                } else {
                    model.retain(SNAPSHOTS_KEPT, Some(name));
                }
            }
            Action::Restore(pick) => {
                let Some(snapshot) = model.snapshot(*pick) else { continue };
                let position = match store.restore_from_snapshot(snapshot) {
                    Ok(position) => position,
                    Err(Error::NoSnapshot { .. }) if in_background => continue,
                    Err(error) => panic!("{error}"),
                };
                tally.restores += 1;
                by_hand += 1;
                let end = model.snapshots[&snapshot];
                restored(&store, &mut model, position, end);
            }
            Action::RestoreTo(pick) => {
                let beyond = Lsn(model.lsn + 1);
                let refused = store.restore_to(beyond).unwrap_err();
                let Error::OutsideWindow { asked, newest, .. } = refused else { panic!("{refused}") };
                assert_eq!((asked, newest), (beyond, Lsn(model.lsn)));
                let lsn = in_window(&model, *pick);
                let position = match store.restore_to(Lsn(lsn)) {
                    Ok(position) => position,
                    Err(Error::OutsideWindow { oldest, .. }) if in_background && oldest > Lsn(lsn) => {
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                };
                tally.restores += 1;
                by_hand += 1;
                restored(&store, &mut model, position, lsn);
            }
            Action::Fork(pick) => {
                let (lsn, parent) = (in_window(&model, *pick), tempfile::tempdir().unwrap());
                let path = parent.path().join("fork");
                match store.fork(&path, &RestorePoint::Lsn(Lsn(lsn))) {
                    Ok(_) => {}
                    Err(Error::OutsideWindow { oldest, .. }) if in_background && oldest > Lsn(lsn) => {
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                }
                tally.forks += 1;
                compare(&open(&path), &model.at(lsn));
                compare_rebuilt(&path, &model.at(lsn));
            }
            Action::Look(pick) => {
                tally.looks += 1;
                look(directory.path(), &model, *pick as u64 % (model.lsn + 1));
            }
            Action::Read(pick, from, to) => read_part(&store, &model, *pick, *from, *to),
            Action::Reopen => {
                tally.background += store.stats().snapshots.taken.saturating_sub(by_hand);
                by_hand = 0;
                store.close().unwrap();
                compare_rebuilt(directory.path(), &model);
                store = open(directory.path());
                compare_opened(&store, &model);
            }
            Action::Crash => {
                tally.crashes += 1;
                tally.background += store.stats().snapshots.taken.saturating_sub(by_hand);
                by_hand = 0;
                let left = copy_as_it_lies(&store, directory.path());
                compare_rebuilt(left.path(), &model);
                let crashed = std::mem::replace(&mut store, open(left.path()));
                std::mem::forget(crashed);
                // Its threads live on and may still write; nobody reads that.
                directory = left;
                compare_opened(&store, &model);
            }
        }
    }
    compare(&store, &model);
    store.close().unwrap();
    compare_rebuilt(directory.path(), &model);
    compare_opened(&open(directory.path()), &model);
}

/// Follows a restore to the state behind batch `lsn`.
fn restored(store: &Store, model: &mut Model, position: Position, lsn: u64) {
    model.restore(lsn);
    assert_eq!(position.lsn, Lsn(model.lsn), "a restore is one batch more");
    // Its snapshot removes none.
    let newest = store.snapshots().last().unwrap().id;
    model.keep(newest, None, usize::MAX);
    compare(store, model);
}

/// One of the batches that can be gone back to.
fn in_window(model: &Model, pick: usize) -> u64 {
    let oldest = model.oldest();
    oldest + pick as u64 % (model.lsn - oldest + 1)
}

/// Looks at an earlier state, beside the open store.
fn look(directory: &Path, model: &Model, lsn: u64) {
    match Store::open_at(directory, &RestorePoint::Lsn(Lsn(lsn))) {
        Ok(old) => compare_snapshot(&old, &model.at(lsn)),
        // What is older than the window may be there still.
        Err(Error::OutsideWindow { asked, oldest, newest }) => {
            assert_eq!((asked, newest), (Lsn(lsn), Lsn(model.lsn)));
            assert!(Lsn(lsn) < oldest);
            // Of its own accord the store may have moved the window on.
            if !model.in_background {
                assert!(lsn < model.oldest(), "batch {lsn} is in the window from {}", model.oldest());
                assert!(oldest <= Lsn(model.oldest()), "{oldest}");
            }
        }
        Err(error) => panic!("the state at {lsn}: {error}"),
    }
    compare_snapshot(&Store::open_read_only(directory).unwrap(), model);
}

/// Compares everything that a state on disk can be asked.
fn compare_snapshot(old: &Snapshot, model: &Model) {
    assert_eq!(old.lsn(), Lsn(model.lsn));
    assert_eq!(**old.root(), model.root);
    compare_infos(&old.pages().cloned().collect::<Vec<_>>(), model);
    for (page, expected) in &model.pages {
        let mut bytes = vec![0xEE; expected.bytes.len()];
        old.read(*page, 0, &mut bytes).unwrap();
        assert_eq!(bytes, expected.bytes, "bytes of page {page} at {}", model.lsn);
        if let Some(key) = &expected.key {
            assert_eq!(old.page_by_key(key).unwrap().page, *page);
        }
    }
}

/// Copies a store directory in use. The store's own threads may be making a segment or writing a seal, so
/// what is copied is taken only if nothing of that kind happened meanwhile: it existed at one moment.
fn copy_as_it_lies(store: &Store, source: &Path) -> tempfile::TempDir {
    let moment = || {
        let mut names: Vec<_> = walk(source).into_iter().map(|(path, _)| path).collect();
        names.sort_unstable();
        (names, store.stats().log)
    };
    loop {
        let before = moment();
        let target = tempfile::tempdir().unwrap();
        let copied = walk(source).into_iter().try_for_each(|(path, is_folder)| {
            let copy = target.path().join(path.strip_prefix(source).unwrap());
            if is_folder { std::fs::create_dir(copy) } else { std::fs::copy(&path, copy).map(drop) }
        });
        if copied.is_ok() && moment() == before {
            return target;
        }
    }
}

/// Files and folders below a folder, folders before what is in them.
fn walk(folder: &Path) -> Vec<(std::path::PathBuf, bool)> {
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

/// Compares after an opening: nothing was lost, nothing was cut, nothing is damaged.
fn compare_opened(store: &Store, model: &Model) {
    let recovered = store.recovered();
    assert_eq!(recovered.position.lsn, Lsn(model.lsn), "the batch reached");
    assert_eq!((&recovered.torn, &recovered.harmless[..]), (&None, &[][..]));
    compare(store, model);
}

/// Compares everything that a store can be asked.
fn compare(store: &Store, model: &Model) {
    compare_table(store, model);
    for (page, expected) in &model.pages {
        let mut bytes = vec![0xEE; expected.bytes.len()];
        assert_eq!(store.read(*page, 0, &mut bytes).unwrap(), Lsn(model.lsn));
        assert_eq!(bytes, expected.bytes, "bytes of page {page}");
    }
    for key in KEYS.map(|key| Key::new(key).unwrap()) {
        let holder = model.pages.iter().find(|(_, page)| page.key.as_ref() == Some(&key));
        match (store.page_by_key(&key), holder) {
            (Ok(info), Some((page, _))) => assert_eq!(info.page, *page, "holder of {key}"),
            (Err(Error::UnknownKey { .. }), None) => {}
            (found, expected) => panic!("key {key}: {found:?} instead of {expected:?}"),
        }
    }
    for page in &model.gone {
        assert!(matches!(store.page(*page), Err(Error::UnknownPage { .. })), "page {page} is gone");
    }
}

/// Compares what takes no page's bytes.
fn compare_table(store: &Store, model: &Model) {
    assert_eq!(store.lsn(), Lsn(model.lsn));
    assert_eq!(*store.root().unwrap(), model.root);
    compare_infos(&store.pages().unwrap(), model);
    if model.in_background {
        return;
    }
    let snapshots: Vec<_> = store.snapshots().iter().map(|snapshot| snapshot.id).collect();
    assert_eq!(snapshots, model.snapshots.keys().copied().collect::<Vec<_>>(), "snapshots kept");
}

fn compare_infos(found: &[PageInfo], model: &Model) {
    let ids: Vec<_> = found.iter().map(|info| info.page).collect();
    assert_eq!(ids, model.pages.keys().copied().collect::<Vec<_>>(), "pages");
    for (info, (page, expected)) in found.iter().zip(&model.pages) {
        let Page { key, epoch, lsn, place, metadata, bytes } = expected;
        assert_eq!((info.epoch.0, info.lsn.0), (*epoch, *lsn), "version of page {page}");
        assert_eq!((&info.key, info.place), (key, *place), "page {page}");
        assert_eq!(info.len, bytes.len() as u64, "length of page {page}");
        assert_eq!(*info.metadata, *metadata, "metadata of page {page}");
    }
}

/// Compares the pure rebuild of a directory.
fn compare_rebuilt(directory: &Path, model: &Model) {
    let rebuilt = rebuild(&DirReader::new(directory), &RebuildOptions::default()).unwrap();
    assert_eq!(rebuilt.table.lsn(), Lsn(model.lsn));
    assert_eq!(**rebuilt.table.root(), model.root);
    compare_infos(&rebuilt.table.pages().cloned().collect::<Vec<_>>(), model);
    for (page, expected) in &model.pages {
        assert_eq!(rebuilt.contents[page], expected.bytes, "rebuilt bytes of page {page}");
    }
    assert_eq!(rebuilt.passed_over, []);
}

/// Reads a range of one page, and one past its end.
fn read_part(store: &Store, model: &Model, pick: usize, from: u16, to: u16) {
    let Some((page, expected)) = model.pages.iter().nth(pick % model.pages.len().max(1)) else { return };
    let len = expected.bytes.len();
    let (from, to) = (usize::from(from) % (len + 1), usize::from(to) % (len + 1));
    let range = from.min(to)..from.max(to);
    let mut out = vec![0; range.len()];
    store.read(*page, range.start as u64, &mut out).unwrap();
    assert_eq!(out, expected.bytes[range.clone()], "bytes {range:?} of page {page}");
    let past_end = store.read(*page, range.start as u64, &mut vec![0; len - range.start + 1]);
    assert!(matches!(past_end, Err(Error::OutOfBounds { .. })), "{past_end:?}");
}
