//! The locks of a store and of a view are released when their owner ends, and only then. They are not
//! released when another descriptor of the file is closed, and children that outlive the owner do not keep
//! them.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::{Ack, Error, Place, StatePoint, Store, View};

use super::children::{LivingChild, fork_a_bystander, in_child};
use super::small;
use crate::machine::alone;

/// Opens the store in another process.
fn open_elsewhere(path: &Path) -> Result<(), String> {
    in_child(|| small().open(path).map(drop).map_err(|error| error.to_string()))
}

fn created(path: &Path) -> Store {
    let store = small().ack(Ack::Durable).open(path).unwrap();
    let mut batch = store.batch();
    batch.create(64 << 10, Place::Host);
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    store
}

/// Reads every file below a directory, as a backup program does. The store may remove some of the files in
/// the meantime.
fn read_all(path: &Path) {
    for entry in std::fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_all(&path);
        } else if let Err(error) = std::fs::read(path) {
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
        }
    }
}

#[test]
fn reading_own_directory_keeps_the_lock() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let store = created(directory.path());
        read_all(directory.path());
        open_elsewhere(directory.path()).unwrap_err();
        assert!(matches!(small().open(directory.path()), Err(Error::Locked { .. })));
        open_elsewhere(directory.path()).unwrap_err();
        store.commit(store.batch()).unwrap();
        store.close().unwrap();
        open_elsewhere(directory.path()).unwrap();
    });
}

#[test]
fn children_of_killed_owner_keep_no_lock() {
    alone(|| {
        // An `exec` also closes descriptors.
        let exec = || {
            let mut command = Command::new("sleep");
            // SAFETY: the closure does nothing. With a closure, the child is forked instead of spawned.
            unsafe { command.pre_exec(|| Ok(())) };
            drop(command.arg("100").stdin(Stdio::null()).spawn().unwrap());
        };
        let spawn = || drop(Command::new("sleep").arg("100").stdin(Stdio::null()).spawn().unwrap());
        for have_children in [fork_a_bystander as fn(), exec, spawn] {
            let directory = tempfile::tempdir().unwrap();
            let owner = LivingChild::fork(|| {
                let store = created(directory.path());
                have_children();
                store
            });
            open_elsewhere(directory.path()).unwrap_err();
            owner.kill();
            small().open(directory.path()).unwrap().close().unwrap();
        }
    });
}

#[test]
fn a_child_forked_during_an_open_keeps_no_lock() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        created(directory.path()).close().unwrap();
        for _ in 0..10 {
            let owner = LivingChild::fork(|| {
                let is_open = AtomicBool::new(false);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        for _ in 0..30 {
                            if !is_open.load(Ordering::Relaxed) {
                                fork_a_bystander();
                            }
                        }
                    });
                    let store = small().open(directory.path()).unwrap();
                    is_open.store(true, Ordering::Relaxed);
                    store
                })
            });
            owner.kill();
            assert!(owner.has_living_process());
            small().open(directory.path()).unwrap().close().unwrap();
        }
    });
}

/// Returns the number of snapshots that readers keep from being removed.
fn held(store: &Store) -> usize {
    for _ in 0..3 {
        store.snapshot().unwrap();
    }
    store.prune(&store.retention().snapshots_kept(1).log_kept(0)).unwrap().held.len()
}

fn oldest(store: &Store) -> StatePoint {
    StatePoint::Snapshot(store.snapshots()[0].id)
}

#[test]
fn closed_view_keeps_no_lock_despite_forked_child() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let store = created(directory.path());
        let view = Store::open_at(directory.path(), oldest(&store)).unwrap();
        // The child has a copy of the view and never drops it.
        let child = LivingChild::fork(|| ());
        assert_eq!(held(&store), 1);
        drop(view);
        assert_eq!(held(&store), 0);
        assert!(child.has_living_process());
        child.kill();
    });
}

#[test]
fn children_of_killed_reader_keep_no_lock() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let store = created(directory.path());
        let point = oldest(&store);
        let reader = LivingChild::fork(|| -> View {
            let view = Store::open_at(directory.path(), &point).unwrap();
            fork_a_bystander();
            view
        });
        assert_eq!(held(&store), 1);
        reader.kill();
        assert!(reader.has_living_process());
        assert_eq!(held(&store), 0);
    });
}

#[test]
fn child_that_drops_a_view_releases_no_lock() {
    alone(|| {
        let directory = tempfile::tempdir().unwrap();
        let store = created(directory.path());
        let view = Store::open_at(directory.path(), oldest(&store)).unwrap();
        let mut copy = Some(view);
        // The child's own files may reuse the numbers of descriptors that it closed when it was forked.
        in_child(|| {
            let files: Vec<_> = (0..64).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
            drop(copy.take());
            files.iter().try_for_each(|file| file.metadata().map(drop)).map_err(|error| error.to_string())
        })
        .unwrap();
        assert_eq!(held(&store), 1);
    });
}
