//! Pages, images and logs longer than 4 GiB, on real file systems: damage, kills and a full disk at offsets of more
//! than 32 bits.
//!
//! The short form needs little space. It uses files with holes, memory that is never written, and compressed images of
//! zeros. Slow cases run only at full size. With `REMANENT_PAST_4_GIB=1`, every byte is written, which needs up to 12
//! GiB of `/dev/shm` and some minutes. Run this form alone.

mod long_log;
mod model;
mod sparse;

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use remanent::disk::dir::DirReader;
use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::options::{Compression, ImageIo, ImageOptions, ScrubSchedule, SnapshotSchedule};
use remanent::testing::phases::{self, Edge, Phase};
use remanent::{Ack, DeviceChoice, Error, Lsn, Options, PageId, Place, StatePoint, Store};
use remanent_format::FileName;
use remanent_format::image::ImageRef;
use remanent_format::judge::{ImageProofs, judge};
use remanent_format::state::survey::Survey;

use self::model::{FOUR_GIB, LEN, Model, add_change};
use crate::machine::mounts::Mount;
use crate::machine::{alone_for, effort, skipped};
use crate::pages_on_disk::commit;
use crate::size::is_full;

const LONG_FORM: &str = "REMANENT_PAST_4_GIB";
/// Environment variable for the role of a worker and its directory.
const ERRAND: &str = "REMANENT_PAST_4_GIB_ERRAND";
/// Maximum time between two lines of a worker's output.
const PATIENCE: Duration = Duration::from_secs(300);
/// A folder on a memory file system.
const IN_MEMORY: &str = "/dev/shm";
const BEFORE: &str = "before";
/// The first batch that changes the long page. Batch 1 creates a short page, and batch 2 creates the long page.
const FIRST_CHANGE: u64 = 3;

fn is_long_form() -> bool {
    effort(LONG_FORM).is_some()
}

/// Returns true if the slow cases also run.
fn is_complete() -> bool {
    is_full() || is_long_form()
}

fn limit() -> Duration {
    Duration::from_secs(if is_complete() { 900 } else { 240 })
}

/// Returns the options of the store. In the long form, images are not compressed.
fn options() -> Options {
    let compression = if is_long_form() { Compression::Off } else { Compression::Zstd };
    let options = Options::new().device(DeviceChoice::Host);
    let options = options.images(ImageOptions::new().compression(compression));
    options.snapshots(SnapshotSchedule::never()).scrubs(ScrubSchedule::new().interval(None))
}

fn folder() -> tempfile::TempDir {
    if is_long_form() { tempfile::tempdir_in(IN_MEMORY) } else { tempfile::tempdir() }.unwrap()
}

/// Creates a store with a snapshot of a short page, and then the long page.
fn create(directory: &Path, options: Options, place: Place) -> (Store, PageId) {
    let store = options.open(directory).unwrap();
    commit(&store, |batch| _ = batch.create_from(*b"short", Place::Host).key("short"));
    store.snapshot_with(remanent::SnapshotOptions::new().name(BEFORE)).unwrap();
    let long = commit(&store, |batch| _ = batch.create(LEN, place).key("long"))[0];
    (store, long)
}

fn long_page(store: &Store) -> PageId {
    store.page_by_key("long").unwrap().page
}

fn apply_changes(store: &Store, count: u64) {
    let page = long_page(store);
    for _ in 0..count {
        let number = store.lsn().0 + 1;
        commit(store, |batch| add_change(batch, page, number));
    }
}

/// Returns the expected content of the long page after the store's newest batch.
fn model_of(store: &Store) -> Model {
    Model::after(FIRST_CHANGE..=store.lsn().0)
}

fn check(what: &str, store: &Store) {
    let page = long_page(store);
    model_of(store).check_changed(what, |offset, out| _ = store.read(page, offset, out).unwrap());
}

/// Asserts that the state before the long page can be viewed.
fn check_named(directory: &Path) {
    let view = Store::open_at(directory, StatePoint::Name(BEFORE.to_owned())).unwrap();
    let page = view.page_by_key("short").unwrap().page;
    let mut bytes = [0; 5];
    view.read(page, 0, &mut bytes).unwrap();
    assert_eq!((&bytes, view.pages().count()), (b"short", 1));
}

/// Returns the long page's image in the newest snapshot.
fn image_of(directory: &Path, page: PageId) -> ImageRef {
    let survey = Survey::read(&DirReader::new(directory)).unwrap();
    let newest = survey.snapshot(*survey.links.keys().next_back().unwrap()).unwrap();
    newest.entries.iter().find(|entry| entry.page == page).unwrap().image.unwrap()
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}

/// Asserts that `verify`, and an open or a read, report this file and offset.
fn damage_is_named(directory: &Path, file: FileName, offset: u64) {
    let files = DirReader::new(directory);
    let verdict = judge(&Survey::read(&files).unwrap(), &files, &mut ImageProofs::new(&files));
    let start = &verdict.starts[0];
    let mut found = start.blocked_by.iter().chain(start.damaged_pages.iter().map(|(_, damage)| damage));
    assert!(found.any(|damage| (damage.file, damage.offset) == (file, offset)), "{verdict:?}");
    // There is no older state to start from.
    let opened = options().open(directory).and_then(|store| {
        let page = store.page_by_key("long").or_else(|_| store.page_by_key("p"))?;
        [0, page.len - 1].into_iter().try_for_each(|at| store.read(page.page, at, &mut [0]).map(drop))
    });
    match opened {
        Err(Error::Damaged(damage)) => assert_eq!((damage.file, damage.offset), (file, offset)),
        other => panic!("{file} at {offset}: {other:?}"),
    }
}

/// Deltas at offsets below and above 4 GiB change an otherwise unwritten page in memory and one on disk. A reader, a
/// replica, a replay and, for the page on disk, a whole image and an overlay have the same bytes. The page on disk is a
/// slow case.
#[test]
fn deltas_on_both_sides_of_4_gib_are_exact() {
    alone_for(limit(), || {
        let places = if is_complete() { &[Place::Host, Place::Disk][..] } else { &[Place::Host] };
        for place in places.iter().copied() {
            let directory = folder();
            let (store, page) = create(directory.path(), options(), place);
            apply_changes(&store, 32);
            let model = model_of(&store);
            check("open", &store);
            let view = Store::open_read_only(directory.path()).unwrap();
            model.check_changed("a view", |offset, out| view.read(page, offset, out).unwrap());
            drop(view);
            let mut replica = Replica::default();
            let mut follower = Follower::open(directory.path(), FollowFrom::Beginning).unwrap();
            while let Some(batch) = follower.next(Duration::ZERO).unwrap() {
                replica.apply(&batch).unwrap();
            }
            model.check_changed("a replica", |offset, out| {
                out.copy_from_slice(&replica.bytes(page).unwrap()[offset as usize..][..out.len()]);
            });
            drop((replica, follower, store));
            let store = options().open(directory.path()).unwrap();
            check("a replay", &store);
            if place == Place::Disk {
                store.snapshot().unwrap();
                apply_changes(&store, 32);
                let overlay = store.snapshot().unwrap();
                assert!(overlay.bytes_written < LEN / 8, "{} bytes", overlay.bytes_written);
                apply_changes(&store, 8);
                check("an overlay", &store);
                drop(store);
                let store = options().open(directory.path()).unwrap();
                let read = |offset, out: &mut [u8]| _ = store.read(page, offset, out).unwrap();
                model_of(&store).check_all("an overlay, opened again", read);
            }
        }
    });
}

/// A worker process, and the lines of its output.
struct Worker {
    process: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Worker {
    fn start(test: &str, errand: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", test]).env(ERRAND, errand);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines }
    }

    /// Waits for a line that begins with `line`. Returns the last number of a logged batch before this line.
    fn wait_for(&mut self, line: &str) -> Option<u64> {
        let mut logged = None;
        loop {
            let found =
                self.lines.next().unwrap_or_else(|| panic!("the worker ended before `{line}`")).unwrap();
            if found == line {
                return logged;
            }
            logged = found.strip_prefix("logged ").map(|number| number.parse().unwrap()).or(logged);
        }
    }

    /// Kills the worker. Returns its output since the last call.
    fn kill(mut self) -> Vec<String> {
        self.process.kill().unwrap();
        let status = self.process.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "the worker ended by itself: {status}");
        self.lines.map_while(Result::ok).collect()
    }
}

fn last_logged(lines: &[String]) -> Option<u64> {
    lines.iter().rev().find_map(|line| line.strip_prefix("logged ")?.parse().ok())
}

/// Ends this process when its parent closes the pipe or ends.
fn end_with_the_parent() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
}

const KILL_TEST: &str = "past_4_gib::page_past_4_gib_survives_kill_during_snapshot";

/// Takes the first snapshot of the long page and commits until the worker is killed.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
fn snapshot_until_killed(directory: &Path, place: Place) -> ! {
    end_with_the_parent();
    let (store, page) = create(directory, options(), place);
    apply_changes(&store, 20);
    println!("logged {}", store.lsn());
    phases::on_phase(|phase, edge| {
        if (phase, edge) == (Phase::SnapshotGather, Edge::Enter) {
            println!("gather");
        }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            store.snapshot().unwrap();
            println!("taken");
        });
        loop {
            let mut batch = store.batch();
            add_change(&mut batch, page, store.lsn().0 + 1);
            let ticket = store.submit(batch).unwrap();
            ticket.wait(Ack::Logged).unwrap();
            println!("logged {}", ticket.position().lsn);
            std::thread::park_timeout(Duration::from_millis(5));
        }
    })
}

/// Returns the length of the longest image file.
fn longest_image(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory.join("pages")).unwrap();
    entries.filter_map(|entry| Some(entry.unwrap().metadata().ok()?.len())).max().unwrap_or(0)
}

fn killed_snapshot(place: Place) {
    let directory = folder();
    let mut worker = Worker::start(KILL_TEST, &format!("{place} {}", directory.path().display()));
    let mut logged = worker.wait_for("gather");
    if is_long_form() {
        // Wait until more than 4 GiB of the image are written.
        let started = Instant::now();
        while longest_image(directory.path()) < FOUR_GIB + (32 << 20) {
            assert!(started.elapsed() < PATIENCE, "no image");
            std::thread::park_timeout(Duration::from_millis(1));
        }
    } else {
        std::thread::park_timeout(Duration::from_millis(200));
    }
    let lines = worker.kill();
    assert!(!lines.iter().any(|line| line == "taken"), "the kill came too late");
    logged = last_logged(&lines).or(logged);

    check_named(directory.path());
    let store = options().open(directory.path()).unwrap();
    assert!(store.lsn() >= Lsn(logged.unwrap()), "{logged:?} was logged, {} is there", store.lsn());
    let page = long_page(&store);
    model_of(&store).check_all("opened", |offset, out| _ = store.read(page, offset, out).unwrap());
    store.snapshot().unwrap();
    apply_changes(&store, 8);
    drop(store);
    if is_long_form() {
        damaged_image(directory.path(), page);
    }
    let store = options().open(directory.path()).unwrap();
    check("opened again", &store);
}

/// Flips a byte beyond 4 GiB in the long page's image, and then restores it.
fn damaged_image(directory: &Path, page: PageId) {
    let image = image_of(directory, page);
    assert!(image.stored_len > FOUR_GIB);
    let file = FileName::Pages(image.file);
    let path: PathBuf = directory.join("pages").join(file.name());
    let flipped = image.offset + FOUR_GIB + 99_999;
    flip(&path, flipped);
    let files = DirReader::new(directory);
    let verdict = judge(&Survey::read(&files).unwrap(), &files, &mut ImageProofs::new(&files));
    let start = &verdict.starts[0];
    let mut found = start.blocked_by.iter().chain(start.damaged_pages.iter().map(|(_, damage)| damage));
    assert!(found.any(|damage| (damage.file, damage.offset) == (file, image.offset)), "{verdict:?}");
    flip(&path, flipped);
}

#[test]
fn page_past_4_gib_survives_kill_during_snapshot() {
    if let Ok(errand) = std::env::var(ERRAND) {
        let (place, directory) = errand.split_once(' ').unwrap();
        snapshot_until_killed(Path::new(directory), place.parse().unwrap());
    }
    alone_for(limit(), || {
        killed_snapshot(Place::Disk);
        if is_long_form() {
            killed_snapshot(Place::Host);
        }
    });
}

/// The disk becomes full while the image is written. In the long form, this happens beyond 4 GiB of the image.
#[test]
fn full_disk_in_an_image_past_4_gib_changes_nothing() {
    alone_for(limit(), || {
        let folder = tempfile::tempdir().unwrap();
        let size = if is_long_form() { FOUR_GIB + (160 << 20) } else { 64 << 20 };
        let mount =
            |options: &str, path| Mount::new(Path::new("tmpfs"), path, &["-t", "tmpfs", "-o", options]);
        for (number, io) in [ImageIo::Buffered, ImageIo::Mapped].into_iter().enumerate() {
            let mounted = match mount(&format!("size={size}"), folder.path().join(number.to_string())) {
                Ok(mounted) => mounted,
                Err(reason) => return skipped("a full disk past 4 GiB", &reason),
            };
            let directory = mounted.path.join("store");
            let options = || options().images(ImageOptions::new().compression(Compression::Off).io(io));
            let (store, page) = create(&directory, options(), Place::Disk);
            apply_changes(&store, 20);
            for _ in 0..2 {
                let error = store.snapshot().expect_err("there is no room for the image");
                assert!(matches!(error, Error::DiskFull { .. }), "{io}: {error}");
                apply_changes(&store, 5);
                check("after a full disk", &store);
            }
            check_named(&directory);
            drop(store);
            let mut store = options().open(&directory).unwrap();
            check("opened on a full disk", &store);
            if is_long_form() {
                let space = format!("remount,size={}", size + FOUR_GIB);
                let told = Command::new("mount").args(["-o", &space]).arg(&mounted.path).output().unwrap();
                assert!(told.status.success(), "{told:?}");
                let snapshot = store.snapshot().unwrap();
                assert!(snapshot.bytes_written > FOUR_GIB);
                apply_changes(&store, 5);
                drop(store);
                store = options().open(&directory).unwrap();
                let read = |offset, out: &mut [u8]| _ = store.read(page, offset, out).unwrap();
                model_of(&store).check_all("an image that had room", read);
            }
            drop(store);
        }
    });
}
