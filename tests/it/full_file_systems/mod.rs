//! Small file systems that are really full: ext4 and XFS on loop devices, and tmpfs.
//!
//! A simulated disk refuses calls by a fixed rule. Real file systems fail when they run out of space, which
//! can be in the middle of a write, or only when allocated space is used. The same life runs on all of them,
//! with various numbers of free bytes.

mod life;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::disk::{Disk, dir::DirDisk};
use remanent::error::Remedy;
use remanent::options::{Create, ImageOptions, LogIo};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Options, PageId, Place, StatePoint, Store, View};

use self::life::{Course, LIFE_LEN, Ways, changes_nothing_if_refused, is_fork_of, life, life_options, noise};
use crate::direct_io;
use crate::faults::disk_full::{is_held, until};
use crate::files::{State, small};
use crate::kill::workload::Random;
use crate::machine::filler::Filler;
use crate::machine::mounts::{self, Kind, Mount};
use crate::machine::{alone_for, effort, in_parallel, skipped};
use crate::size::sized;
use crate::with_options::With;

const PAGE_LEN: u64 = 100_000;
/// Number of spares in the reserve of these stores.
const RESERVE: usize = 2;
/// Environment variable for the difference in free space between two lives on a real file system, in KiB.
const STEP: &str = "REMANENT_CRAMPED_STEP";
/// Number of free bytes that XFS requires to create a file. In measurements, 188 KiB was the lowest number
/// with which it succeeded.
const FILE_BYTES: u64 = 188 << 10;
const WRITERS: [LogIo; 3] = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct];

/// Asserts that a commit, a bulk create and a snapshot fail, and that none of them changes anything.
fn refuses_everything(store: &Store, page: PageId) {
    let is_refused = |what: &str, refused: Result<(), Error>| {
        let error = refused.expect_err(what);
        assert!(matches!(error, Error::DiskFull { .. }), "{what}: {error}");
        assert_eq!(error.remedy(), Remedy::FreeSpace);
    };
    let mut before = State::of(store);
    let full = (0..200).find_map(|count| {
        before = State::of(store);
        let mut batch = store.batch();
        batch.write(page, 0, &noise(count, 100)).note("n".repeat(3000));
        store.commit(batch).err()
    });
    is_refused("a commit", full.map_or(Ok(()), Err));
    assert_eq!(State::of(store), before);

    let mut bulk = store.batch();
    bulk.create_from(noise(1, 4 * PAGE_LEN), Place::Host);
    is_refused("a bulk create", store.commit(bulk).map(drop));
    is_refused("a snapshot", store.snapshot().map(drop));
    assert_eq!(State::of(store), before);
    assert_eq!(store.snapshots().len(), 1);
}

/// Asserts that a commit, a bulk create and a snapshot work on a store that has space again.
fn goes_on(store: &Store, page: PageId) {
    let mut batch = store.batch();
    batch.write(page, 0, b"there is room again");
    store.commit(batch).unwrap();
    let mut bulk = store.batch();
    bulk.create_from(noise(2, 4 * PAGE_LEN), Place::Host);
    store.commit(bulk).unwrap();
    store.snapshot().unwrap();
}

fn a_full_file_system(name: &str, root: &Path) {
    for io in WRITERS {
        let directory = root.join(format!("{io:?}"));
        std::fs::create_dir(&directory).unwrap();
        let disk = DirDisk::new(&directory);
        if let Some(reason) = disk.refuses(io).unwrap() {
            skipped(&format!("{io} on {name}"), &reason);
            continue;
        }
        let images = direct_io::image_io(io);
        let options: Options = small()
            .images(ImageOptions::new().io(images))
            .ack(Ack::Durable)
            .with(|options| options.log.io = Some(io));
        let store = options.clone().open(&directory).unwrap();
        let mut batch = store.batch();
        let page = batch.create_from(noise(0, PAGE_LEN), Place::Host).page();
        batch.write(page, 0, b"first");
        let page = store.commit(batch).unwrap().pages[0];
        store.snapshot().unwrap();

        // A segment that is under construction when the disk becomes full is discarded, which would leave
        // space for a snapshot.
        until(|| is_held(&disk, RESERVE));
        let filler = Filler::all(root);
        refuses_everything(&store, page);
        drop(filler);
        goes_on(&store, page);
        let state = State::of(&store);
        store.close().unwrap();

        // The open uses the reserve, which leaves no space to test whether the disk supports the mode of
        // writing the log.
        let filler = Filler::all(root);
        let store = options.clone().create(Create::Never).open(&directory).unwrap();
        assert_eq!(State::of(&store), state, "{io} on a full {name}");
        store.close().unwrap();
        drop(filler);
        let store = options.open(&directory).unwrap();
        assert_eq!(State::of(&store), state, "{io} on {name}");
        store.close().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

// Each test has its own process. A child forked by another test would keep removed files open, and their
// space would be freed only when the child ends.

/// Creates a folder for the file of a loop device, in memory if possible, because the test needs no real
/// disk.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Returns the time limit. Testing every 4 KiB of each file system takes minutes. The short form takes ten
/// seconds, or a minute together with other tests on few cores.
fn limit() -> Duration {
    Duration::from_secs(if effort(STEP).is_some() { 3600 } else { 300 })
}

fn a_full_loop_device(name: &'static str, kind: Kind, len: u64, opens_from: u64) {
    let folder = folder();
    let mounted = mounts::make(kind, &folder.path().join("image"), len)
        .and_then(|image| Mount::new(&image, folder.path().join("mounted"), &["-o", "loop"]));
    match mounted {
        Ok(mount) => {
            a_full_file_system(name, &mount.path);
            lives(name, &mount.path, opens_from);
        }
        Err(reason) => skipped(&format!("a full {name}"), &reason),
    }
}

#[test]
fn full_ext4_store_continues_when_space_returns() {
    alone_for(limit(), || a_full_loop_device("ext4", Kind::Ext4, 16 << 20, 0));
}

/// If fewer than [`FILE_BYTES`] are free, XFS refuses new files and even renames, because it allocates inodes
/// in chunks. The reserve is then not refilled. Once opens have used it up, an open may fail until some space
/// is freed. Lives with an open after each step therefore have a larger reserve.
#[test]
fn full_xfs_store_continues_when_space_returns() {
    alone_for(limit(), || a_full_loop_device("XFS", Kind::XfsWithoutReflinks, 320 << 20, 256 << 10));
}

#[test]
fn full_tmpfs_store_continues_when_space_returns() {
    alone_for(limit(), || {
        let folder = tempfile::tempdir().unwrap();
        let arguments = ["-t", "tmpfs", "-o", "size=8m"];
        match Mount::new(Path::new("tmpfs"), folder.path().join("mounted"), &arguments) {
            Ok(mount) => {
                a_full_file_system("tmpfs", &mount.path);
                lives("tmpfs", &mount.path, 0);
            }
            Err(reason) => skipped("a full tmpfs", &reason),
        }
    });
}

#[test]
fn store_survives_simulated_disk_with_random_free_space() {
    // In some cases, a folder needs another block for a name, and a file needs many blocks, as on XFS.
    let usual = [(0, 0, false), (4096, 0, true), (4096, FILE_BYTES, false)];
    let all = [(4096, 0, false), (0, 0, true), (0, FILE_BYTES, false)];
    let all = all.into_iter().filter(|_| effort(STEP).is_some());
    for (name_bytes, file_bytes, each_step) in usual.into_iter().chain(all) {
        let all = Mutex::new(Course::default());
        // Opens take most of the time, so fewer sizes are tested with an open after each step.
        let by = if each_step && effort(STEP).is_none() { 3 } else { 1 } * sized(4, 1);
        let levels = |io: LogIo| (0..100).step_by(by).map(move |step| (io, step * 4096));
        let cases: Vec<(LogIo, u64)> = WRITERS.into_iter().flat_map(levels).collect();
        in_parallel(&cases, |(io, free)| {
            let disk = SimDisk::new();
            disk.set_name_bytes(name_bytes);
            disk.set_file_bytes(file_bytes);
            let open_on = |disk: &SimDisk| {
                Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), life_options(*io))
            };
            let why = format!("{io}, {free} bytes free, {name_bytes} for a name, {file_bytes} for a file");
            // The fork is on its own disk, which is also nearly full. Hard links between the disks are
            // impossible.
            let fork = |store: &Store| {
                let (source, target) = (Arc::new(disk.clone()) as Arc<dyn Disk>, SimDisk::new());
                target.set_capacity(Some(8 * free));
                store.wait_durable(store.lsn())?;
                let view = View::open_on(&source, Some(&StatePoint::Lsn(store.lsn())))?;
                view.fork_on(&(Arc::new(target.clone()) as Arc<dyn Disk>))?;
                is_fork_of(&why, store, open_on(&target)?);
                Ok(())
            };
            let refuses_files = file_bytes > 0;
            let ways = Ways { disk: &disk, open: &|| open_on(&disk), fork: &fork, each_step, refuses_files };
            let course = life(&why, &ways, || disk.set_capacity(Some(disk.used_bytes() + free)));
            all.lock().unwrap().add(&course);
        });
        all.into_inner().unwrap().show(
            &format!(
                "a simulated disk, {name_bytes} for a name, {file_bytes} for a file, opened after each step: \
                 {each_step}"
            ),
            each_step,
        );
    }
}

/// Runs batches, snapshots and opens in random order on a disk on which `fill` leaves little space. A refused
/// call must change nothing, and a closed store can be opened again.
fn life_in_any_order(why: &str, seed: u64, open: &dyn Fn() -> Result<Store, Error>, fill: impl FnOnce(u64)) {
    let mut random = Random(seed);
    let mut store = open().unwrap();
    for seed in 0..6 {
        let mut batch = store.batch();
        let page = batch.create(LIFE_LEN, Place::Host).page();
        batch.write(page, 0, &noise(seed, LIFE_LEN / 2));
        store.commit(batch).unwrap();
    }
    store.snapshot().unwrap();
    fill(4096 * random.below(40));
    let mut told = why.to_owned();
    for _ in 0..40 {
        let pages: Vec<PageId> = store.pages().unwrap().map(|info| info.page).collect();
        let mut batch = store.batch();
        let step = match random.below(7) {
            0..=1 if !pages.is_empty() => "write",
            2 if pages.len() > 2 => "delete",
            3 => "create",
            4 => "snapshot",
            _ => "reopen",
        };
        told.push_str(", ");
        told.push_str(step);
        match step {
            "write" => _ = batch.write(pages[0], 8, &noise(seed, 1 + random.below(6000))),
            "delete" => _ = batch.delete(pages[random.below(pages.len() as u64) as usize]),
            "create" => _ = batch.create(LIFE_LEN, Place::Host).page(),
            _ => {}
        }
        match step {
            "reopen" => {
                let state = State::of(&store);
                store.close().unwrap_or_else(|error| panic!("{told}: a close: {error}"));
                store = open().unwrap_or_else(|error| panic!("{told}: an open: {error}"));
                assert_eq!(State::of(&store), state, "{told}");
            }
            "snapshot" => _ = changes_nothing_if_refused(&told, &store, || store.snapshot()),
            _ => _ = changes_nothing_if_refused(&told, &store, || store.commit(batch)),
        }
    }
    store.close().unwrap();
}

#[test]
fn store_reopens_after_any_work_on_full_disk() {
    let cases: Vec<u64> = (0..effort("REMANENT_CRAMPED_LIVES").unwrap_or(sized(60, 300)) as u64).collect();
    in_parallel(&cases, |seed| {
        let (disk, io) = (SimDisk::new(), WRITERS[*seed as usize % WRITERS.len()]);
        disk.set_name_bytes(if seed & 1 == 0 { 0 } else { 4096 });
        let open = || Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), life_options(io));
        life_in_any_order(&format!("seed {seed}, {io}"), *seed, &open, |free| {
            disk.set_capacity(Some(disk.used_bytes() + free));
        });
    });
}

/// Runs lives on a real file system: [`life`] with various numbers of free bytes, and [`life_in_any_order`]
/// with various seeds.
fn lives(name: &str, root: &Path, opens_from: u64) {
    let step = effort(STEP).map(|kib| kib << 10);
    let seeds = effort("REMANENT_CRAMPED_LIVES").unwrap_or(sized(3, 10)) as u64;
    // A few lives of one writer need not contain every event, because some file systems free space in the background.
    let mut courses = [Course::default(), Course::default()];
    for io in WRITERS {
        let directory = root.join(format!("{io:?}"));
        std::fs::create_dir(&directory).unwrap();
        let refused = DirDisk::new(&directory).refuses(io).unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
        if let Some(reason) = refused {
            skipped(&format!("{io} on {name}"), &reason);
            continue;
        }
        let open = || life_options(io).open(&directory);
        let fill = |free| {
            let filler = Filler::all(root);
            filler.leave(free);
            filler
        };
        // The space of a filler is freed when its life ends.
        let in_a_folder = |live: &mut dyn FnMut()| {
            std::fs::create_dir(&directory).unwrap();
            live();
            std::fs::remove_dir_all(&directory).unwrap();
        };
        // The fork is on the same disk as the store, in the remaining space.
        let directory_new = root.join("fork");
        for each_step in [false, true] {
            let all = &mut courses[usize::from(each_step)];
            // Opens take most of the time, so fewer sizes are tested with an open after each step.
            let step = step.unwrap_or(if each_step { 176 << 10 } else { sized(176 << 10, 44 << 10) });
            // The initial reserve suffices for a life without many opens, whatever the number of free bytes.
            let least_free = if each_step { opens_from } else { 0 };
            for free in (least_free..least_free + (400 << 10)).step_by(step) {
                let why = format!("{io} on {name}, {free} bytes free, opened after each step: {each_step}");
                let fork = |store: &Store| {
                    let forked = store.fork(&directory_new, StatePoint::Lsn(store.lsn())).and_then(|_| {
                        is_fork_of(&why, store, life_options(io).open(&directory_new)?);
                        Ok(())
                    });
                    match std::fs::remove_dir_all(&directory_new) {
                        Err(error) if error.kind() != ErrorKind::NotFound => panic!("{why}: {error}"),
                        _ => forked,
                    }
                };
                let refuses_files = opens_from > 0;
                let disk = DirDisk::new(&directory);
                let ways = Ways { disk: &disk, open: &open, fork: &fork, each_step, refuses_files };
                in_a_folder(&mut || {
                    let mut filler = None;
                    all.add(&life(&why, &ways, || filler = Some(fill(free))));
                });
            }
        }
        for seed in 0..seeds {
            in_a_folder(&mut || {
                let mut filler = None;
                life_in_any_order(&format!("seed {seed}, {io} on {name}"), seed, &open, |free| {
                    filler = Some(fill(opens_from + free));
                });
            });
        }
    }
    for (course, each_step) in courses.iter().zip([false, true]).filter(|(course, _)| course.lives > 0) {
        course.show(&format!("{name}, opened after each step: {each_step}"), each_step);
    }
}
