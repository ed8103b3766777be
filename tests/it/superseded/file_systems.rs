//! Two writer processes on real file systems. The second writer can open the store because a program removed
//! `LOCK`, or because the file system dropped the locks of the first writer.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use remanent::error::Invalid;
use remanent::options::LogIo;
use remanent::{Ack, DeviceChoice, Error, Options, PageId, Place, Store};

use super::superseded;
use crate::direct_io;
use crate::files::small;
use crate::fork::children::in_child;
use crate::machine::mounts::{self, Kind, Mount};
use crate::machine::{alone_for, skipped};
use crate::with_options::With;

const PAGE_LEN: u64 = 50_000;

fn options(io: LogIo) -> Options {
    // A forked child cannot use its parent's GPU.
    let host = small().device(DeviceChoice::Host);
    host.ack(Ack::Durable).with(|options| {
        options.log.io = Some(io);
        options.images.io = direct_io::image_io(io);
    })
}

fn write(store: &Store, page: PageId, byte: u8) -> Result<(), Error> {
    let mut batch = store.batch();
    batch.write(page, 0, &[byte; PAGE_LEN as usize]);
    store.commit(batch).map(drop)
}

fn byte(store: &Store, page: PageId) -> u8 {
    let mut bytes = vec![0; PAGE_LEN as usize];
    store.read(page, 0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

/// The failure of a lock: its name, and a function that causes it.
type LockFailure = (&'static str, fn(&Path));

/// Removes the locked file, as another program might.
fn lock_file_removed(path: &Path) {
    std::fs::remove_file(path.join("LOCK")).unwrap();
}

/// Drops the locks, as a file system that loses them does.
fn locks_dropped(path: &Path) {
    let lock = path.join("LOCK").canonicalize().unwrap();
    let is_lock = |fd: &RawFd| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|of| of == lock);
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
    let fds: Vec<RawFd> = fds.map(|name| name.to_str().unwrap().parse().unwrap()).filter(is_lock).collect();
    assert_eq!(fds.len(), 1, "the store holds one descriptor of LOCK");
    let unlocked = libc::flock { l_type: libc::F_UNLCK as _, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the descriptor belongs to the open store, and the call only reads the structure.
    assert_eq!(unsafe { libc::fcntl(fds[0], libc::F_OFD_SETLK, &raw const unlocked) }, 0);
    // Closing any descriptor of the file releases the lock of the process.
    assert!(File::open(lock).unwrap().as_raw_fd() >= 0);
}

/// Returns the content of all files of a store.
fn content(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(content(&path));
        } else {
            found.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    found
}

/// Runs the second writer, which commits enough to reuse the files of the first writer.
fn second_writer(path: &Path, io: LogIo, page: PageId) -> Result<(), String> {
    let store = options(io).open(path).map_err(|error| error.to_string())?;
    if byte(&store, page) != 5 {
        return Err("not the first writer's last batch".to_owned());
    }
    for number in 10..20 {
        write(&store, page, number).map_err(|error| error.to_string())?;
        if number % 3 == 0 {
            store.snapshot().map_err(|error| error.to_string())?;
        }
    }
    let retention = store.retention().snapshots_kept(1).log_kept(0);
    store.prune(&retention).map_err(|error| error.to_string())?;
    store.close().map_err(|error| error.to_string())
}

/// Runs two writers in a directory, for each mode of writing the log and each failure of a lock.
fn two_writers(name: &str, root: &Path) {
    let failures: [LockFailure; 2] = [("removed", lock_file_removed), ("dropped", locks_dropped)];
    for io in [LogIo::Mapped, LogIo::Buffered, LogIo::Direct] {
        for (failure, fail) in failures {
            let path = root.join(format!("{io}-{failure}"));
            let store = match options(io).open(&path) {
                Err(error @ Error::Invalid(Invalid::Option { .. })) => {
                    skipped(&format!("{io} on {name}"), &error.to_string());
                    continue;
                }
                store => store.unwrap(),
            };
            let mut batch = store.batch();
            batch.create(PAGE_LEN, Place::Host);
            let page = store.commit(batch).unwrap().pages[0];
            for number in 1..=5 {
                write(&store, page, number).unwrap();
            }
            store.snapshot().unwrap();
            fail(&path);
            in_child(|| second_writer(&path, io, page))
                .unwrap_or_else(|error| panic!("{name} {io}: {error}"));

            let before = content(&path);
            let refused = |what: &str, outcome: Result<(), Error>| {
                let error = outcome.expect_err(what);
                assert!(superseded(&error), "{name} {io} {failure}: {what}: {error}");
            };
            refused("a commit", write(&store, page, 6));
            refused("a commit", write(&store, page, 7));
            refused("a snapshot", store.snapshot().map(drop));
            let retention = store.retention().snapshots_kept(1).log_kept(0);
            refused("a prune", store.prune(&retention).map(drop));
            refused("a close", store.close());
            let after = content(&path);
            let names = |content: &BTreeMap<PathBuf, Vec<u8>>| content.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&before), names(&after), "{name} {io} {failure}");
            let changed: Vec<_> = before.iter().filter(|(path, bytes)| after[*path] != **bytes).collect();
            assert!(changed.is_empty(), "{name} {io} {failure}: {:?}", changed[0].0);

            let store = options(io).open(&path).unwrap();
            assert_eq!(byte(&store, page), 19);
            assert!(store.scrub().unwrap().damage.is_empty());
            store.close().unwrap();
        }
    }
}

#[test]
fn superseded_writer_changes_no_file() {
    alone_for(Duration::from_secs(300), || {
        let folder = tempfile::tempdir().unwrap();
        two_writers("the temporary folder", folder.path());
        for (name, kind, len) in
            [("ext4", Kind::Ext4, 64 << 20), ("XFS", Kind::Xfs, 320 << 20), ("btrfs", Kind::Btrfs, 256 << 20)]
        {
            let image = folder.path().join(format!("{name}.image"));
            let mounted = mounts::make(kind, &image, len)
                .and_then(|image| Mount::new(&image, folder.path().join(name), &["-o", "loop"]));
            match mounted {
                Ok(mount) => two_writers(name, &mount.path),
                Err(reason) => skipped(&format!("two writers on {name}"), &reason),
            }
        }
        let tmpfs =
            Mount::new(Path::new("tmpfs"), folder.path().join("tmpfs"), &["-t", "tmpfs", "-o", "size=64m"]);
        match tmpfs {
            Ok(mount) => {
                two_writers("tmpfs", &mount.path);
                // The layers of an overlay file system must be on another kind of file system.
                let layer = |layer: &str| {
                    let path = mount.path.join(layer);
                    std::fs::create_dir(&path).unwrap();
                    path.display().to_string()
                };
                let layers =
                    format!("lowerdir={},upperdir={},workdir={}", layer("low"), layer("up"), layer("work"));
                let at = folder.path().join("overlayfs");
                match Mount::new(Path::new("overlay"), at, &["-t", "overlay", "-o", &layers]) {
                    Ok(overlay) => two_writers("overlayfs", &overlay.path),
                    Err(reason) => skipped("two writers on overlayfs", &reason),
                }
            }
            Err(reason) => skipped("two writers on tmpfs and overlayfs", &reason),
        }
    });
}
