//! Operations on a store of three pages, two of which are long.

use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};

use remanent::batch::{ByteSource, Shadow, Width};
use remanent::{PageId, Place, Retention, SnapshotId, SnapshotOptions, StatePoint, Store, WriteBatch};

use super::Operation::{self, Call, Commit, Outside};
use super::{
    call, follow, fork, open, open_on_demand, options, publish, read_view, restore_newest,
    restore_the_batch_before, salvage, scrub,
};

/// Lengths of the pages: more than one piece, one piece, and short.
const LENS: [u64; 3] = [9 << 20, 3 << 20, 1000];

fn byte_of(page: usize, at: u64) -> u8 {
    // The content of one page is compressible, and that of the others is not.
    if page == 1 {
        (at >> 14) as u8
    } else {
        ((at ^ (at >> 9)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
    }
}

fn content(page: usize, salt: u8) -> Vec<u8> {
    (0..LENS[page]).map(|at| byte_of(page, at) ^ salt).collect()
}

fn write(store: &Store, salt: u8) -> WriteBatch {
    let mut batch = store.batch();
    for page in 0..LENS.len() {
        batch.write(PageId(page as u64 + 1), 0, &content(page, salt));
    }
    batch
}

/// Creates three pages, a snapshot of their first content, and a later batch.
pub fn prepare(directory: &Path) {
    let store = options().open(directory).unwrap();
    let mut batch = store.batch();
    for len in LENS {
        batch.create(len, Place::Host);
    }
    store.commit(batch).unwrap();
    store.commit(write(&store, 0)).unwrap();
    store.snapshot().unwrap();
    touch(&store);
    store.close().unwrap();
}

/// Makes a short change to the first page.
fn touch(store: &Store) {
    let mut batch = store.batch();
    batch.write(PageId(1), 5 << 20, &[1; 10]);
    store.commit(batch).unwrap();
}

/// Indices of elements of the first page, in descending order.
static INDICES: LazyLock<Vec<u32>> = LazyLock::new(|| (0..600_000).rev().collect());
static CONTENT: LazyLock<Vec<u8>> = LazyLock::new(|| content(0, 9));

/// The content of a page, computed on demand so that it needs no memory.
#[derive(Debug)]
struct Computed(usize);

impl ByteSource for Computed {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<()> {
        let Self(page) = self;
        (offset..).zip(bytes).for_each(|(at, byte)| *byte = byte_of(*page, at));
        Ok(())
    }
}

fn source(page: usize) -> Arc<dyn ByteSource> {
    Arc::new(Computed(page))
}

/// Allocates the input of operations before allocations fail.
pub fn make_inputs() {
    LazyLock::force(&INDICES);
    LazyLock::force(&CONTENT);
}

/// Bytes that a caller passes to the store.
static GIVEN: Mutex<Option<Vec<u8>>> = Mutex::new(None);

fn give(_: &Store) {
    *GIVEN.lock().unwrap() = Some(CONTENT.clone());
}

pub const LONG: [(&str, Operation); 37] = [
    ("open", Outside(open)),
    ("open on demand", Outside(open_on_demand)),
    ("follower", Outside(follow)),
    ("view", Outside(|directory| read_view(&Store::open_read_only(directory)?))),
    (
        "view of a snapshot",
        Outside(|directory| read_view(&Store::open_at(directory, StatePoint::Snapshot(SnapshotId(1)))?)),
    ),
    (
        "would_prune_at",
        Outside(|directory| Store::would_prune_at(directory, &Retention::default()).map(drop)),
    ),
    ("salvage", Outside(salvage)),
    ("commit", Commit(|store| write(store, 7))),
    (
        "batch that writes",
        call(|store, _| {
            let mut batch = store.batch();
            batch.write(PageId(1), 0, &CONTENT);
            store.commit(batch).map(drop)
        }),
    ),
    (
        "batch with a mask",
        call(|store, _| {
            let mut batch = store.batch();
            batch.write_masked(PageId(1), 0, Width::W1, &CONTENT[..CONTENT.len() / 8], &CONTENT);
            store.commit(batch).map(drop)
        }),
    ),
    (
        "batch of elements",
        call(|store, _| {
            let mut batch = store.batch();
            batch.scatter(PageId(1), Width::W4, &INDICES, &CONTENT[..4 * INDICES.len()]);
            store.commit(batch).map(drop)
        }),
    ),
    (
        "create_from",
        Call(give, |store, _| {
            let mut batch = store.batch();
            batch.create_from(GIVEN.lock().unwrap().take().unwrap(), Place::Host);
            store.commit(batch).map(drop)
        }),
    ),
    (
        "create_from_source",
        call(|store, _| {
            let mut batch = store.batch();
            for (page, len) in LENS.into_iter().enumerate() {
                batch.create_from_source(len, source(page), Place::Host);
            }
            store.commit(batch).map(drop)
        }),
    ),
    (
        "replace_from_source",
        call(|store, _| {
            let mut batch = store.batch();
            batch.replace_from_source(PageId(1), LENS[0], source(0));
            store.commit(batch).map(drop)
        }),
    ),
    (
        "resize",
        call(|store, _| {
            let mut batch = store.batch();
            // Lengthen the page. The next operation restores its length.
            batch.resize(PageId(1), LENS[0] + 1000).resize(PageId(2), LENS[1] / 2);
            store.commit(batch)?;
            let mut batch = store.batch();
            batch.resize(PageId(1), LENS[0]).resize(PageId(2), LENS[1]);
            store.commit(batch).map(drop)
        }),
    ),
    (
        "move_to",
        call(|store, _| {
            let other = if store.page(PageId(1))?.place == Place::Host { Place::Pinned } else { Place::Host };
            let mut batch = store.batch();
            batch.move_to(PageId(1), other);
            store.commit(batch).map(drop)
        }),
    ),
    (
        "clone_page",
        call(|store, _| {
            let mut batch = store.batch();
            batch.clone_page(PageId(1));
            store.commit(batch).map(drop)
        }),
    ),
    (
        "capture",
        call(|store, _| {
            let copy = store.working_copy(PageId(1), Width::W4, Shadow::Page)?;
            let mut batch = store.batch();
            batch.capture(&copy);
            store.commit(batch).map(drop)
        }),
    ),
    (
        "capture by digests",
        call(|store, _| {
            let copy = store.working_copy(PageId(1), Width::W4, Shadow::Digest)?;
            let mut bytes = [0; 4];
            copy.bytes().read(70_000, &mut bytes)?;
            copy.bytes().write(70_000, &bytes.map(|byte| !byte))?;
            let mut batch = store.batch();
            batch.capture(&copy);
            store.commit(batch).map(drop)
        }),
    ),
    (
        "lease",
        call(|store, _| {
            let lease = store.lease(PageId(1))?;
            lease.bytes()?;
            lease.end()
        }),
    ),
    (
        "leased page that changes",
        call(|store, _| {
            let lease = store.lease(PageId(1))?;
            let mut batch = store.batch();
            batch.write(PageId(1), 77, &[7]);
            let changed = std::thread::scope(|scope| scope.spawn(|| store.commit(batch)).join().unwrap());
            lease.end()?;
            changed.map(drop)
        }),
    ),
    ("pin", call(|store, _| store.pin(PageId(1)).map(drop))),
    ("snapshot", Call(touch, |store, _| store.snapshot().map(drop))),
    ("exact snapshot", Call(touch, |store, _| store.snapshot_with(SnapshotOptions::new().exact()).map(drop))),
    (
        "named snapshot",
        Call(touch, |store, _| {
            store.snapshot_with(SnapshotOptions::new().name(store.lsn().to_string())).map(drop)
        }),
    ),
    ("published snapshot", Call(touch, publish)),
    (
        "restore",
        Call(
            |store| {
                store.snapshot().unwrap();
                touch(store);
            },
            restore_newest,
        ),
    ),
    (
        "restore to a batch",
        Call(
            |store| {
                // Take a snapshot, so that each restore replays as much log as the first one.
                store.snapshot().unwrap();
                touch(store);
                touch(store);
            },
            restore_the_batch_before,
        ),
    ),
    ("would_prune", call(|store, _| store.would_prune(&Retention::default()).map(drop))),
    (
        "prune",
        Call(
            |store| {
                touch(store);
                store.snapshot().unwrap();
            },
            |store, _| store.prune(&Retention::default().snapshots_kept(1)).map(drop),
        ),
    ),
    ("scrub", call(scrub)),
    ("audit", call(|store, _| store.audit().map(drop))),
    ("read", call(|store, _| store.read_to_vec(PageId(1)).map(drop))),
    (
        "read_into",
        call(|store, _| {
            let mut buffer = Vec::new();
            store.read_into(PageId(2), &mut buffer).map(drop)
        }),
    ),
    (
        "live view",
        call(|store, _| {
            let view = store.view()?;
            view.read(PageId(1), 0, &mut [0; 100])
        }),
    ),
    ("pages", call(|store, _| store.pages().map(|pages| pages.for_each(drop)))),
    ("fork", call(fork)),
];
