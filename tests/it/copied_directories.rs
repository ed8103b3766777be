//! Directories of closed stores that were copied with common tools, including hard links. The copy and the
//! original can both be opened, and changes of one do not affect the other.

use std::path::Path;
use std::process::Command;

use remanent::{Ack, Options, PageId, Place, Retention};

use crate::files::{State, small};
use crate::with_options::With;

const LEN: u64 = 8 << 10;

/// Commands for `sh` that copy the directory `store` to `copy`. They run in the parent directory.
const WAYS: [(&str, &str); 8] = [
    ("cp -a", "cp -a store copy"),
    ("cp --sparse", "cp -a --sparse=always store copy"),
    ("cp -al", "cp -al store copy"),
    ("cp -rL of a symbolic link", "cp -rL link copy"),
    ("tar", "mkdir copy; tar -C store -cf - . | tar -C copy -xf -"),
    ("tar -S", "mkdir copy; tar -C store -cSf - . | tar -C copy -xf -"),
    ("rsync -a", "rsync -a store/ copy"),
    ("rsync -aSH", "rsync -aSH store/ copy"),
];

/// Options with which a store soon reuses its files.
fn options(is_mapped: bool) -> Options {
    let io = if is_mapped { remanent::options::LogIo::Mapped } else { remanent::options::LogIo::Buffered };
    small().ack(Ack::Durable).with(|options| {
        options.log.io = Some(io);
        options.log.spare_bytes = Some(1 << 20);
    })
}

/// Changes a store until its segments and image files have been reused. Returns its state.
fn changed(path: &Path, page: PageId, seed: u8, is_mapped: bool) -> State {
    let store = options(is_mapped).open(path).unwrap();
    for round in 0..4_u8 {
        for byte in 0..8_u8 {
            let mut batch = store.batch();
            batch.write(page, 0, &[seed ^ (round * 8 + byte); LEN as usize]);
            batch.set_root("round", u64::from(round));
            store.commit(batch).unwrap();
        }
        store.snapshot().unwrap();
        store.prune(&Retention::default().snapshots_kept(1)).unwrap();
    }
    let state = State::of(&store);
    store.close().unwrap();
    state
}

#[test]
fn copies_are_independent_of_originals() {
    for (name, command) in WAYS {
        if name.starts_with("rsync") && Command::new("rsync").arg("--version").output().is_err() {
            eprintln!("SKIPPED: {name}: rsync is not installed");
            continue;
        }
        for is_mapped in [false, true] {
            let above = tempfile::tempdir().unwrap();
            let (path, copy) = (above.path().join("store"), above.path().join("copy"));
            std::os::unix::fs::symlink("store", above.path().join("link")).unwrap();
            let store = options(is_mapped).open(&path).unwrap();
            let mut batch = store.batch();
            batch.create(LEN, Place::Host);
            let page = store.commit(batch).unwrap().pages[0];
            store.close().unwrap();
            let mut original = changed(&path, page, 0x55, is_mapped);
            let copied =
                Command::new("sh").arg("-c").arg(command).current_dir(above.path()).status().unwrap();
            assert!(copied.success(), "{name}");
            let of_copy = options(is_mapped).open(&copy).unwrap();
            assert_eq!(State::of(&of_copy), original, "{name}");
            of_copy.close().unwrap();
            // Each store in turn overwrites the files that it reuses, and the other store keeps its state.
            for seed in [0x11, 0x22] {
                let of_copy = changed(&copy, page, seed, is_mapped);
                let state = options(is_mapped).open(&path).map(|store| State::of(&store));
                assert_eq!(state.unwrap(), original, "{name}");
                original = changed(&path, page, seed ^ 0x77, is_mapped);
                let state = options(is_mapped).open(&copy).map(|store| State::of(&store));
                assert_eq!(state.unwrap(), of_copy, "{name}");
            }
        }
    }
}
