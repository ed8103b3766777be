//! The verdicts of `verify` on damaged stores, compared with an open of the same directory: where recovery
//! starts, and whether anything is damaged. The stores are of the same kinds as in the engine's tests of its
//! judge.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use remanent::error::NoSuchState;
use remanent::options::{Compression, ImageOptions, LogOptions, Retention};
use remanent::{Error, Lsn, Options, Place, SnapshotOptions, StatePoint, Store};

use crate::command::{Scratch, run};
use crate::inspect::{copy, files, newest};

const SECTOR_LEN: usize = 512;
/// The numbers of flipped bits and zeroed sectors for each subject. Each file is also missing once.
const FLIPS: usize = 25;
const ZEROED: usize = 15;

fn options() -> Options {
    Options::new()
        .log(LogOptions::new().segment_len(64 << 10).reserve_bytes(0))
        .images(ImageOptions::new().compression(Compression::Off).chunk_len(4096))
}

fn open(path: &str) -> Result<Store, Error> {
    options().open(path)
}

/// An open store in its own directory.
struct Work {
    scratch: Scratch,
    store: Store,
}

impl Work {
    fn new() -> Self {
        let scratch = Scratch::new();
        let store = open(&scratch.store()).unwrap();
        let mut batch = store.batch();
        for len in [3000, 500, 100] {
            batch.create(len, Place::Host);
        }
        store.commit(batch).unwrap();
        Self { scratch, store }
    }

    fn commit(&self, batches: u64) -> Lsn {
        let pages: Vec<_> = self.store.pages().unwrap().map(|info| info.page).collect();
        for _ in 0..batches {
            let lsn = self.store.lsn().0;
            let mut batch = self.store.batch();
            batch.fill(pages[(lsn % 3) as usize], lsn % 50, 50, &[lsn as u8 + 1]).set_root("step", lsn);
            self.store.commit(batch).unwrap();
        }
        self.store.lsn()
    }

    fn reopen(self) -> Self {
        self.store.close().unwrap();
        Self { store: open(&self.scratch.store()).unwrap(), ..self }
    }

    fn close(self) -> Scratch {
        self.store.close().unwrap();
        self.scratch
    }
}

fn named() -> Scratch {
    let work = Work::new();
    work.commit(3);
    work.store.snapshot_with(SnapshotOptions::new().name("good")).unwrap();
    work.commit(4);
    work.close()
}

fn named_and_newer() -> Scratch {
    let work = Work::new();
    work.commit(3);
    work.store.snapshot_with(SnapshotOptions::new().name("good")).unwrap();
    for _ in 0..4 {
        work.commit(3);
        work.store.snapshot().unwrap();
    }
    work.commit(2);
    work.close()
}

fn exact() -> Scratch {
    let work = Work::new();
    work.commit(3);
    work.store.snapshot().unwrap();
    work.commit(3);
    work.store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
    work.commit(2);
    work.close()
}

fn restored() -> Scratch {
    let work = Work::new();
    let good = work.commit(3);
    work.store.snapshot_with(SnapshotOptions::new().name("before")).unwrap();
    work.commit(3);
    work.store.restore(StatePoint::Lsn(good)).unwrap();
    work.commit(2);
    work.close()
}

/// Creates the state that a crash right after a restore leaves, before the restore's own snapshot.
fn restored_in_the_log() -> Scratch {
    let work = Work::new();
    work.commit(2);
    work.store.snapshot().unwrap();
    let good = work.commit(2);
    work.commit(2);
    work.store.restore(StatePoint::Lsn(good)).unwrap();
    work.commit(1);
    let work = work.reopen();
    work.commit(1);
    let scratch = work.close();
    fs::remove_file(newest(&scratch.store(), "snapshots", "manifest")).unwrap();
    scratch
}

fn forked() -> Scratch {
    let work = Work::new();
    work.commit(3);
    work.store.snapshot().unwrap();
    let at = work.commit(2);
    let scratch = Scratch::new();
    work.store.fork(scratch.store(), StatePoint::Lsn(at)).unwrap();
    let fork = Work { store: open(&scratch.store()).unwrap(), scratch };
    fork.commit(3);
    fork.close()
}

fn reopened() -> Scratch {
    let mut work = Work::new();
    work.commit(2);
    work.store.snapshot().unwrap();
    work = work.reopen();
    work.commit(2);
    work = work.reopen();
    work.store.snapshot_with(SnapshotOptions::new().name("late")).unwrap();
    work.commit(1);
    work.reopen().close()
}

/// Creates two pages on disk with images in the newest snapshot, one of them as an overlay over an older
/// image.
fn on_disk() -> Scratch {
    let scratch = Scratch::new();
    let work = Work { store: open(&scratch.store()).unwrap(), scratch };
    let mut batch = work.store.batch();
    for len in [3000, 2900] {
        batch.create_from(vec![len as u8; len], Place::Disk);
    }
    batch.create(100, Place::Host);
    work.store.commit(batch).unwrap();
    work.store.snapshot().unwrap();
    work.commit(2);
    work.store.snapshot().unwrap();
    work.close()
}

/// The damage to one file.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Nothing,
    Missing,
    /// One bit of the byte at this offset.
    Flipped(usize),
    /// The sector that begins at this offset.
    Zeroed(usize),
}

fn mix(number: usize) -> usize {
    (number as u64 ^ 0x5bd1_e995).wrapping_mul(0x9e37_79b9_7f4a_7c15) as usize >> 20
}

/// Returns all damages of a store, each with the path of its file.
fn damages(store: &str) -> Vec<(PathBuf, Damage)> {
    let sound: Vec<(PathBuf, Vec<u8>)> = files(store)
        .into_iter()
        .map(|(path, (bytes, _))| (path.strip_prefix(store).unwrap().to_owned(), bytes))
        .filter(|(path, _)| ![Path::new("LOCK"), Path::new("READERS")].contains(&path.as_path()))
        .collect();
    // Written lines of 64 bytes, by file and offset.
    let lines: Vec<(usize, usize)> = sound
        .iter()
        .enumerate()
        .flat_map(|(file, (_, bytes))| {
            let is_written = move |at: &usize| bytes[*at..].iter().take(64).any(|byte| *byte != 0);
            (0..bytes.len()).step_by(64).filter(is_written).map(move |at| (file, at))
        })
        .collect();
    let mut all = vec![(sound[0].0.clone(), Damage::Nothing)];
    all.extend(sound.iter().map(|(path, _)| (path.clone(), Damage::Missing)));
    for number in 0..FLIPS + ZEROED {
        let (file, line) = lines[mix(number) % lines.len()];
        let damage = match number < FLIPS {
            true => Damage::Flipped(sound[file].1.len().min(line + mix(number + 1) % 64 + 1) - 1),
            false => Damage::Zeroed(line - line % SECTOR_LEN),
        };
        all.push((sound[file].0.clone(), damage));
    }
    all
}

fn inflict(damage: Damage, path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    match damage {
        Damage::Nothing => return,
        Damage::Missing => return fs::remove_file(path).unwrap(),
        Damage::Flipped(at) => bytes[at] ^= 1 << (at % 8),
        Damage::Zeroed(at) => {
            let end = bytes.len().min(at + SECTOR_LEN);
            bytes[at..end].fill(0);
        }
    }
    fs::write(path, bytes).unwrap();
}

/// Compares the command's verdict on a directory with the result of an open.
fn agree(what: &str, path: &str) -> Verdict {
    let verify = run(&["verify", path, "--json"]);
    let all = format!("{what}: ended with {}\n{}{}", verify.code, verify.out, verify.err);
    // The command takes the store's id from STORE, so without it there may be no summary.
    let summary = verify.json().pop().filter(|line| line["kind"] == "summary");
    let from = summary.as_ref().map_or(&serde_json::Value::Null, |line| &line["opens_from"]);
    match open(path) {
        Ok(store) => {
            let recovered = store.recovered();
            let expected =
                recovered.snapshot.map_or("the log's beginning".to_owned(), |id| format!("snapshot {id}"));
            assert_eq!(from, &serde_json::Value::from(expected), "{all}");
            assert_eq!(summary.as_ref().unwrap()["lsn"], recovered.position.lsn.0, "{all}");
            assert!(
                verify.code == 1 || verify.code == 0 && recovered.harmless.is_empty(),
                "{all}{recovered:?}"
            );
            for info in store.pages().unwrap() {
                let is_damaged = match store.read_to_vec(info.page) {
                    Err(Error::Damaged(_)) => true,
                    read => read.map(|_| false).unwrap_or_else(|error| panic!("{all}\nbut {error}")),
                };
                let costs = format!("page {}: reads fail until", info.page);
                let is_named = verify
                    .json()
                    .iter()
                    .any(|line| line["cost"].as_str().is_some_and(|cost| cost.contains(&costs)));
                assert_eq!(is_damaged, is_named, "page {}: {all}", info.page);
            }
            if verify.code == 0 { Verdict::Clean } else { Verdict::Opens }
        }
        Err(error @ (Error::Damaged(_) | Error::NoStore { .. })) => {
            assert!(from.is_null(), "{all}\nbut {error}");
            // A directory without STORE is not a store, so the exit code is that of a usage error.
            let code = if matches!(error, Error::Damaged(_)) { 1 } else { 2 };
            assert_eq!(verify.code, code, "{all}\nbut {error}");
            Verdict::Refused
        }
        Err(error) => panic!("{all}\nbut {error}"),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Verdict {
    Clean,
    Opens,
    Refused,
}

#[test]
fn verify_agrees_with_an_open() {
    type Subject = (&'static str, fn() -> Scratch);
    let subjects: [Subject; 8] = [
        ("a named snapshot, and more log", named),
        ("a named snapshot, and newer snapshots", named_and_newer),
        ("an exact snapshot after another one", exact),
        ("a restored state, and log after it", restored),
        ("a restore without a later snapshot", restored_in_the_log),
        ("a fork, with log of its own", forked),
        ("several incarnations", reopened),
        ("pages on disk", on_disk),
    ];
    std::thread::scope(|scope| {
        for (name, make) in subjects {
            scope.spawn(move || {
                let sound = make();
                let counts = [(); 3].map(|()| AtomicUsize::new(0));
                for (number, (file, damage)) in damages(&sound.store()).into_iter().enumerate() {
                    let damaged = Scratch::new();
                    copy(&sound.store(), &damaged.store());
                    inflict(damage, &Path::new(&damaged.store()).join(&file));
                    let what = format!("{name}, {}: {damage:?}", file.display());
                    let verdict = agree(&what, &damaged.store());
                    assert!(number > 0 || verdict != Verdict::Refused, "{what}");
                    counts[verdict as usize].fetch_add(1, Ordering::Relaxed);
                }
                let [clean, opens, refused] = counts.map(AtomicUsize::into_inner);
                // This subject lacks a snapshot before anything is damaged.
                let is_sound = name != "a restore without a later snapshot";
                let is_enough = (clean > 0) == is_sound && opens > 2 && refused > 2;
                assert!(is_enough, "{name}: {clean} clean, {opens} opened, {refused} refused");
            });
        }
    });
}

/// Once the state that a restore produced is no longer kept, the table of the restore is not needed.
#[test]
fn restore_without_retained_table_is_sound() {
    let scratch = Scratch::new();
    let store = options()
        .retention(Retention::new().snapshots_kept(1).log_kept(1 << 30))
        .open(scratch.store())
        .unwrap();
    let mut work = Work { scratch, store };
    let mut batch = work.store.batch();
    batch.create(3000, Place::Host);
    batch.create(500, Place::Host);
    batch.create(100, Place::Host);
    work.store.commit(batch).unwrap();
    let good = work.commit(3);
    work.store.snapshot().unwrap();
    work.commit(3);
    work.store.restore(StatePoint::Lsn(good)).unwrap();
    let tables = |path: &str| {
        let pages = fs::read_dir(Path::new(path).join("pages")).unwrap().map(|entry| entry.unwrap().path());
        pages.filter(|path| path.extension().is_some_and(|found| found == "table")).count()
    };
    let path = work.scratch.store();
    assert_eq!(tables(&path), 1);
    work.commit(3);
    work.store.close().unwrap();
    work.store = open(&path).unwrap();
    for _ in 0..3 {
        work.commit(2);
        work.store.snapshot().unwrap();
    }
    work.store.prune(&remanent::Retention::default().snapshots_kept(1).log_kept(0)).unwrap();
    assert_eq!(tables(&path), 0, "the table is not needed any more");
    run(&["verify", &path]).expect(0);
    work.store.close().unwrap();
    run(&["verify", &path]).expect(0);
    let before = Store::open_at(&path, StatePoint::Lsn(good));
    assert!(
        matches!(before, Err(Error::NoSuchState(NoSuchState::OutsideWindow { .. }))),
        "{:?}",
        before.err()
    );
}
