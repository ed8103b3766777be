//! Small file systems that are really full: ext4 and XFS on loop devices, and tmpfs.
//!
//! A simulated disk refuses by a rule. These file systems refuse when they run out: in the middle of a write,
//! or only when space that was promised is asked for. One life is led on all of them, with every number of
//! bytes free.

use std::path::Path;
use std::sync::Arc;

use remanent::device::host::HostDevice;
use remanent::disk::{Disk, dir::DirDisk};
use remanent::testing::sim_disk::SimDisk;
use remanent::{
    Ack, Compression, Create, Error, LogIo, Options, PageId, Place, Remedy, SnapshotOptions, Store,
};

use crate::damage::mix;
use crate::files::{State, small};
use crate::kill::workload::Random;
use crate::machine::filler::Filler;
use crate::machine::mounts::{self, Kind, Mount};
use crate::machine::{alone, effort, in_parallel, skipped};

const PAGE_LEN: u64 = 100_000;
const WRITERS: [LogIo; 3] = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct];

/// Bytes that no codec compresses.
fn noise(seed: u64, len: u64) -> Vec<u8> {
    (0..len).map(|at| mix(seed << 32 | at) as u8).collect()
}

/// Demands that a commit, a bulk create and a snapshot are refused; none of them changes anything.
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

/// Demands that all three work on a store that has room again.
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
        let options: Options = small().log_io(io).ack(Ack::Durable);
        let store = Store::open(&directory, options.clone()).unwrap();
        let mut batch = store.batch();
        let page = batch.create_from(noise(0, PAGE_LEN), Place::Host).page();
        batch.write(page, 0, b"first");
        let page = store.commit(batch).unwrap().pages[0];
        store.snapshot().unwrap();

        let filler = Filler::all(root);
        refuses_everything(&store, page);
        drop(filler);
        goes_on(&store, page);
        let state = State::of(&store);
        store.close().unwrap();

        // By the reserve, which leaves no space to try whether the disk can be written to in this way.
        let filler = Filler::all(root);
        let store = Store::open(&directory, options.clone().create(Create::Never)).unwrap();
        assert_eq!(State::of(&store), state, "{io} on a full {name}");
        store.close().unwrap();
        drop(filler);
        let store = Store::open(&directory, options).unwrap();
        assert_eq!(State::of(&store), state, "{io} on {name}");
        store.close().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

// Each in a process of its own: a child that another test forks keeps removed files open, and their space
// returns only when it ends.

fn a_full_loop_device(name: &'static str, kind: Kind, len: u64, least_free: u64) {
    let folder = tempfile::tempdir().unwrap();
    let mounted = mounts::make(kind, &folder.path().join("image"), len)
        .and_then(|image| Mount::new(&image, folder.path().join("mounted"), &["-o", "loop"]));
    match mounted {
        Ok(mount) => {
            a_full_file_system(name, &mount.path);
            lives(name, &mount.path, least_free);
        }
        Err(reason) => skipped(&format!("a full {name}"), &reason),
    }
}

#[test]
fn on_a_full_ext4_the_same_store_goes_on_when_space_returns() {
    alone(|| a_full_loop_device("ext4", Kind::Ext4, 16 << 20, 0));
}

/// XFS refuses even to rename. It may refuse new files while more than 100 KiB are free, because it makes
/// inodes by the chunk. An open is then refused, too, until some space is freed, and no life can be led
/// there.
#[test]
fn on_a_full_xfs_the_same_store_goes_on_when_space_returns() {
    alone(|| a_full_loop_device("XFS", Kind::XfsWithoutReflinks, 320 << 20, 256 << 10));
}

#[test]
fn on_a_full_tmpfs_the_same_store_goes_on_when_space_returns() {
    alone(|| {
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

/// Length of the pages of a [`life`], in bytes.
const LIFE_LEN: u64 = 64 << 10;

/// Runs a call that may be refused on a full disk, and then changes nothing.
fn changes_nothing_if_refused<T>(why: &str, store: &Store, call: impl FnOnce() -> Result<T, Error>) -> bool {
    let before = State::of(store);
    match call() {
        Ok(_) => true,
        Err(error) => {
            assert!(matches!(error, Error::DiskFull { .. }), "{why}: {error}");
            assert_eq!(State::of(store), before, "{why}");
            false
        }
    }
}

/// A life on a disk on which `fill` leaves little space. A refused call changes nothing, and batches that
/// only delete, prunes, closes and opens are not refused. At its end all deleted pages have given their space
/// back.
fn life(why: &str, open: &dyn Fn() -> Result<Store, Error>, fill: impl FnOnce()) {
    let create = |store: &Store, seed: u64| {
        let mut batch = store.batch();
        let page = batch.create(LIFE_LEN, Place::Host).page();
        batch.write(page, 0, &noise(seed, LIFE_LEN / 2));
        store.commit(batch).map(|committed| committed.pages[0])
    };
    let write = |store: &Store, page: PageId, seed: u64| {
        let mut batch = store.batch();
        batch.write(page, 8, &noise(seed, 2000));
        store.commit(batch)
    };
    // Of the named snapshots only the newest stays.
    let prune = |store: &Store| {
        let names = store.snapshots().into_iter().filter_map(|info| info.name);
        let retention = names.fold(store.retention(), |retention, name| retention.give_up(name));
        store.prune(&retention).unwrap_or_else(|error| panic!("{why}: a prune: {error}"));
    };
    let mut store = open().unwrap();
    for seed in 0..4 {
        create(&store, seed).unwrap();
        store.snapshot().unwrap();
    }
    for info in store.pages().unwrap() {
        write(&store, info.page, 9).unwrap();
    }
    store.wait_durable(store.lsn()).unwrap();
    fill();
    let mut left = 3;
    while left > 0 {
        left -= 1;
        for seed in 0..4 {
            let page = store.pages().unwrap().next().unwrap().page;
            changes_nothing_if_refused(why, &store, || write(&store, page, seed));
        }
        changes_nothing_if_refused(why, &store, || store.snapshot());
        let page = store.pages().unwrap().next().unwrap().page;
        let mut batch = store.batch();
        batch.delete(page);
        store.commit(batch).unwrap_or_else(|error| panic!("{why}: a delete, {left} left: {error}"));
        changes_nothing_if_refused(why, &store, || store.snapshot());
        changes_nothing_if_refused(why, &store, || create(&store, 50 + left));
        changes_nothing_if_refused(why, &store, || {
            store.snapshot_with(SnapshotOptions::new().name(format!("with {left} left")))
        });
        prune(&store);
        let state = State::of(&store);
        store.close().unwrap_or_else(|error| panic!("{why}: a close, {left} left: {error}"));
        store = open().unwrap_or_else(|error| panic!("{why}: an open, {left} left: {error}"));
        assert_eq!(State::of(&store), state, "{why}");
    }
    let mut batch = store.batch();
    store.pages().unwrap().for_each(|info| _ = batch.delete(info.page));
    store.commit(batch).unwrap_or_else(|error| panic!("{why}: all are deleted: {error}"));
    store.snapshot().unwrap_or_else(|error| panic!("{why}: nothing is left: {error}"));
    prune(&store);
    create(&store, 100).unwrap_or_else(|error| panic!("{why}: a page at the end: {error}"));
    store.snapshot().unwrap_or_else(|error| panic!("{why}: a snapshot at the end: {error}"));
    store.close().unwrap();
}

fn life_options(io: LogIo) -> Options {
    small().log_io(io).segment_len(64 << 10).snapshots_kept(1).compression(Compression::Off)
}

#[test]
fn a_life_on_a_simulated_disk_with_any_space_left() {
    for name_bytes in [0, 4096] {
        let cases: Vec<(LogIo, u64)> =
            WRITERS.iter().flat_map(|io| (0..100).map(|step| (*io, step * 4096))).collect();
        in_parallel(&cases, |(io, free)| {
            let disk = SimDisk::new();
            disk.set_name_bytes(name_bytes);
            let open =
                || Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), life_options(*io));
            life(&format!("{io}, {free} bytes free, {name_bytes} for a name"), &open, || {
                disk.set_capacity(Some(disk.used_bytes() + free));
            });
        });
    }
}

/// Batches, snapshots and opens in any order on a disk on which `fill` leaves little space: a refused call
/// changes nothing, and a store that is closed opens again.
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
fn a_store_opens_again_whatever_was_done_on_a_full_disk() {
    let cases: Vec<u64> = (0..effort("REMANENT_CRAMPED_LIVES").unwrap_or(300) as u64).collect();
    in_parallel(&cases, |seed| {
        let (disk, io) = (SimDisk::new(), WRITERS[*seed as usize % WRITERS.len()]);
        disk.set_name_bytes(if seed & 1 == 0 { 0 } else { 4096 });
        let open = || Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), life_options(io));
        life_in_any_order(&format!("seed {seed}, {io}"), *seed, &open, |free| {
            disk.set_capacity(Some(disk.used_bytes() + free));
        });
    });
}

/// Lives on a real file system: [`life`] with some numbers of bytes free, [`life_in_any_order`] with some
/// seeds.
fn lives(name: &str, root: &Path, least_free: u64) {
    for io in WRITERS {
        let directory = root.join(format!("{io:?}"));
        std::fs::create_dir(&directory).unwrap();
        let refused = DirDisk::new(&directory).refuses(io).unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
        if let Some(reason) = refused {
            skipped(&format!("{io} on {name}"), &reason);
            continue;
        }
        let open = || Store::open(&directory, life_options(io));
        let fill = |free| {
            let filler = Filler::all(root);
            filler.leave(free);
            filler
        };
        // A filler gives up its space when its life is over.
        let in_a_folder = |live: &dyn Fn()| {
            std::fs::create_dir(&directory).unwrap();
            live();
            std::fs::remove_dir_all(&directory).unwrap();
        };
        for free in (least_free..least_free + (400 << 10)).step_by(44 << 10) {
            in_a_folder(&|| {
                let mut filler = None;
                life(&format!("{io} on {name}, {free} bytes free"), &open, || filler = Some(fill(free)));
            });
        }
        for seed in 0..10 {
            in_a_folder(&|| {
                let mut filler = None;
                life_in_any_order(&format!("seed {seed}, {io} on {name}"), seed, &open, |free| {
                    filler = Some(fill(least_free + free));
                });
            });
        }
    }
}
