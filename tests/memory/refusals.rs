//! A refused allocation is an error like any other. Whichever long allocation of an operation it is, the
//! process lives, the call says that there was no memory, nothing is changed by it, and the store goes on.
//!
//! An allocation that cannot fail aborts the process, so each case has one of its own.

use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use remanent::{
    Error, FollowFrom, Follower, Options, PageId, PageLoad, Place, Replica, Result, SnapshotId,
    SnapshotOptions, StatePoint, Store, Width,
};

use crate::allocator::{alone, refuse};

/// The variable that names the case of a process: the operation and the number of the allocation.
const CASE: &str = "REMANENT_REFUSED";
const DIRECTORY: &str = "REMANENT_REFUSED_IN";
/// The exit status if the operation made fewer long allocations.
const NONE_REFUSED: i32 = 42;

/// Longer than a piece, of one piece, and short.
const LENS: [u64; 3] = [9 << 20, 3 << 20, 1000];

fn options() -> Options {
    Options::default().snapshot_log_bytes(None).snapshot_interval(None)
}

fn content(page: usize, salt: u8) -> Vec<u8> {
    let noise = |at: u64| ((at ^ (at >> 9)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8;
    // One that compresses, and one that does not.
    (0..LENS[page]).map(|at| if page == 1 { (at >> 14) as u8 ^ salt } else { noise(at) ^ salt }).collect()
}

fn all(salt: u8) -> Vec<Vec<u8>> {
    (0..LENS.len()).map(|page| content(page, salt)).collect()
}

fn write(store: &Store, salt: u8) -> remanent::WriteBatch {
    let mut batch = store.batch();
    for (page, content) in all(salt).iter().enumerate() {
        batch.write(PageId(page as u64 + 1), 0, content);
    }
    batch
}

/// Makes three pages, a snapshot with their first content, and a batch in the log after it.
fn prepare(directory: &Path) {
    let store = Store::open(directory, options()).unwrap();
    let mut batch = store.batch();
    for len in LENS {
        batch.create(len, Place::Host);
    }
    store.commit(batch).unwrap();
    store.commit(write(&store, 0)).unwrap();
    store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.write(PageId(1), 5 << 20, &[1; 10]);
    store.commit(batch).unwrap();
    store.close().unwrap();
}

/// Elements of the first page, in no order.
static INDICES: LazyLock<Vec<u32>> = LazyLock::new(|| (0..600_000).rev().collect());

/// The pages as `prepare` leaves them.
fn prepared() -> Vec<Vec<u8>> {
    let mut all = all(0);
    all[0][5 << 20..][..10].fill(1);
    all
}

fn pages(store: &Store) -> Vec<Vec<u8>> {
    let page = |(index, len): (usize, &u64)| {
        let mut bytes = vec![0; *len as usize];
        store.read(PageId(index as u64 + 1), 0, &mut bytes).unwrap();
        bytes
    };
    LENS.iter().enumerate().map(page).collect()
}

/// An operation on a store, and on the directory that it lies in.
type Operation = fn(&Store, &Path, remanent::WriteBatch, &mut [u8]) -> Result<()>;

/// Operations on an open store. The first byte of the last page tells their changes apart.
const OPERATIONS: [(&str, Operation); 12] = [
    ("commit", |store, _, batch, _| store.commit(batch).map(drop)),
    ("batch that writes", |store, _, _, out| {
        let mut batch = store.batch();
        batch.write(PageId(1), 0, out);
        store.commit(batch).map(drop)
    }),
    ("batch with a mask", |store, _, _, out| {
        let mut batch = store.batch();
        batch.write_masked(PageId(1), 0, Width::W1, &out[..out.len() / 8], out);
        store.commit(batch).map(drop)
    }),
    ("batch of elements", |store, _, _, out| {
        let mut batch = store.batch();
        batch.scatter(PageId(1), Width::W4, &INDICES, &out[..4 * INDICES.len()]);
        store.commit(batch).map(drop)
    }),
    ("snapshot", |store, _, _, _| store.snapshot().map(drop)),
    ("exact snapshot", |store, _, _, _| store.snapshot_with(SnapshotOptions::new().exact()).map(drop)),
    ("restore", |store, _, _, _| store.restore(&StatePoint::Snapshot(SnapshotId(1))).map(drop)),
    ("scrub", |store, _, _, _| store.scrub().map(drop)),
    ("audit", |store, _, _, _| store.audit().map(drop)),
    ("read", |store, _, _, _| store.read_to_vec(PageId(1)).map(drop)),
    ("fork", |store, directory, _, _| {
        store.fork(directory.with_extension("fork"), &StatePoint::Lsn(store.lsn())).map(drop)
    }),
    ("view", |_, directory, _, out| {
        Store::open_read_only(directory).and_then(|view| view.read(PageId(1), 0, out))
    }),
];

/// Runs one case, in a process of its own.
#[test]
fn case() {
    let (Ok(case), Ok(directory)) = (std::env::var(CASE), std::env::var(DIRECTORY)) else { return };
    let (name, number) = case.split_once(':').unwrap();
    let (number, directory) = (number.parse().unwrap(), Path::new(&directory));
    let mut now = prepared();
    let outcome = match name {
        "open" => refuse(number, || Store::open(directory, options()).and_then(|store| store.close())),
        "open on demand" => refuse(number, || {
            let store = Store::open(directory, options().page_load(PageLoad::OnDemand))?;
            let read = store.read(PageId(1), 0, &mut [0; 5]);
            store.close()?;
            read.map(drop)
        }),
        "follower" => refuse(number, || {
            let mut replica = Replica::from_snapshot(directory)?;
            let mut follower = Follower::open(directory, FollowFrom::Position(replica.position()))?;
            while let Some(batch) = follower.next(Duration::ZERO)? {
                replica.apply(&batch)?;
            }
            Ok(())
        }),
        _ => {
            let store = Store::open(directory, options()).unwrap();
            let operation = OPERATIONS.iter().find(|(other, _)| *other == name).unwrap().1;
            let (batch, mut out) = (write(&store, 7), vec![0; LENS[0] as usize]);
            LazyLock::force(&INDICES);
            let outcome = refuse(number, || operation(&store, directory, batch, &mut out));
            let mut batch = store.batch();
            batch.create(1, Place::Host);
            match store.commit(batch) {
                Ok(_) if outcome.0.is_err() => {
                    assert!(pages(&store) == prepared(), "{name} {number}: it changed something");
                }
                Ok(_) => {}
                // The restore was logged: memory is lost, and the next open has the restored state.
                Err(Error::Poisoned(_)) if name == "restore" => now = all(0),
                Err(error) => panic!("{name} {number}: the store goes on: {error}"),
            }
            _ = store.close();
            outcome
        }
    };
    let (result, is_refused) = outcome;
    if let Err(error) = &result {
        let refused = match error {
            // A page that cannot be loaded stops the store, whose files are unchanged. So does a restore that
            // is logged and cannot be brought to memory.
            Error::Poisoned(first) if ["open on demand", "restore"].contains(&name) => &**first,
            error => error,
        };
        assert!(is_refused && matches!(refused, Error::OutOfMemory { .. }), "{name} {number}: {error}");
        let store = Store::open(directory, options()).unwrap();
        assert!(pages(&store) == now, "{name} {number}: all is there when it is opened again");
    }
    std::process::exit(if is_refused { 0 } else { NONE_REFUSED });
}

#[test]
fn no_refused_memory_ends_the_process_or_the_store() {
    let _alone = alone();
    let template = tempfile::tempdir().unwrap();
    prepare(template.path());
    let names = ["open", "open on demand", "follower"].into_iter();
    let mut failed = Vec::new();
    for name in names.chain(OPERATIONS.map(|(name, _)| name)) {
        let mut cases = 0;
        for number in 1.. {
            let place = tempfile::tempdir().unwrap();
            let directory = place.path().join("store");
            copy(template.path(), &directory);
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "refusals::case", "--nocapture", "--test-threads", "1"])
                .env(CASE, format!("{name}:{number}"))
                .env(DIRECTORY, &directory)
                .output()
                .unwrap();
            match child.status.code() {
                Some(0) => cases += 1,
                Some(NONE_REFUSED) => break,
                other => {
                    let told = String::from_utf8_lossy(&child.stderr);
                    failed.push(format!("{name}, allocation {number}: {other:?}: {told}"));
                }
            }
            assert!(number < 200, "{name} makes ever more long allocations");
        }
        assert!(cases > 0 || !failed.is_empty(), "{name} makes no long allocation");
    }
    assert!(failed.is_empty(), "{} cases failed:\n{}", failed.len(), failed.join("\n"));
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for found in std::fs::read_dir(from).unwrap() {
        let found = found.unwrap();
        let target = to.join(found.file_name());
        if found.file_type().unwrap().is_dir() {
            copy(&found.path(), &target);
        } else {
            std::fs::copy(found.path(), target).unwrap();
        }
    }
}
