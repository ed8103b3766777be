//! File systems of a few megabytes that are really full: ext4 on a loop device, and tmpfs.
//!
//! What a simulated disk refuses by a rule, these refuse as they come to it: in the middle of a write, or only when
//! room that was promised is asked for.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use remanent::disk::{Disk, dir::DirDisk};
use remanent::{
    Ack, Create, Error, FileName, Folder, LogIo, Metadata, Options, PageId, Place, Remedy, Store,
};

use crate::damage::mix;
use crate::files::{State, small};
use crate::machine::mounts::{self, Kind, Mount};
use crate::machine::{alone, skipped};

const PAGE_LEN: u64 = 100_000;
const WRITERS: [LogIo; 3] = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct];

/// Bytes that nothing compresses.
fn noise(seed: u64, len: u64) -> Vec<u8> {
    (0..len).map(|at| mix(seed << 32 | at) as u8).collect()
}

/// What takes all the space there is, until it is removed.
struct Filler(std::path::PathBuf);

impl Filler {
    fn new(folder: &Path) -> Self {
        let path = folder.join("filler");
        let mut file = File::create(&path).unwrap();
        for len in [64 << 10, 4 << 10, 512] {
            let full = loop {
                if let Err(error) = file.write_all(&vec![1; len]).and_then(|()| file.sync_data()) {
                    break error;
                }
            };
            assert_eq!(full.kind(), io::ErrorKind::StorageFull, "{full}");
        }
        Self(path)
    }

    fn remove(self) {
        std::fs::remove_file(self.0).unwrap();
    }
}

/// What a commit, a bulk create and a snapshot are refused with; none of them changes anything.
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
    bulk.create_from(noise(1, 4 * PAGE_LEN), Place::Host, None, Metadata::new());
    is_refused("a bulk create", store.commit(bulk).map(drop));
    is_refused("a snapshot", store.snapshot().map(drop));
    assert_eq!(State::of(store), before);
    assert_eq!(store.snapshots().len(), 1);
}

/// All three on a store that has room again.
fn goes_on(store: &Store, page: PageId) {
    let mut batch = store.batch();
    batch.write(page, 0, b"there is room again");
    store.commit(batch).unwrap();
    let mut bulk = store.batch();
    bulk.create_from(noise(2, 4 * PAGE_LEN), Place::Host, None, Metadata::new());
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
        let page = batch.create_from(noise(0, PAGE_LEN), Place::Host, None, Metadata::new());
        batch.write(page, 0, b"first");
        let page = store.commit(batch).unwrap().pages[0];
        store.snapshot().unwrap();

        let filler = Filler::new(root);
        refuses_everything(&store, page);
        filler.remove();
        goes_on(&store, page);
        let state = State::of(&store);
        store.close().unwrap();

        // What is tried at open is the disk's to answer for, not the caller's.
        let filler = Filler::new(root);
        let options = options.create(Create::Never);
        if io == LogIo::Direct {
            let error = Store::open(&directory, options.clone()).unwrap_err();
            let file = FileName::Temporary(Folder::Log, 0);
            assert!(matches!(error, Error::DiskFull { file: found, .. } if found == file), "{error}");
            assert_eq!(error.remedy(), Remedy::FreeSpace);
        }
        filler.remove();
        let store = Store::open(&directory, options).unwrap();
        assert_eq!(State::of(&store), state, "{io} on {name}");
        store.close().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

// Each in a process of its own: a child that some other test forks keeps files that are removed here, and gives their
// space back when it ends.

#[test]
fn on_a_full_ext4_the_same_store_goes_on_when_space_returns() {
    alone(|| {
        let folder = tempfile::tempdir().unwrap();
        let mounted = mounts::make(Kind::Ext4, &folder.path().join("image"), 16 << 20)
            .and_then(|image| Mount::new(&image, folder.path().join("mounted"), &["-o", "loop"]));
        match mounted {
            Ok(mount) => a_full_file_system("ext4", &mount.path),
            Err(reason) => skipped("a full ext4", &reason),
        }
    });
}

#[test]
fn on_a_full_tmpfs_the_same_store_goes_on_when_space_returns() {
    alone(|| {
        let folder = tempfile::tempdir().unwrap();
        let arguments = ["-t", "tmpfs", "-o", "size=8m"];
        match Mount::new(Path::new("tmpfs"), folder.path().join("mounted"), &arguments) {
            Ok(mount) => a_full_file_system("tmpfs", &mount.path),
            Err(reason) => skipped("a full tmpfs", &reason),
        }
    });
}
