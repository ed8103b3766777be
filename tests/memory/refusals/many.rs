//! Operations on a store of 50,000 short pages with keys and metadata, so that tables, key indices, manifests
//! and lists with an item per page are long.

use std::ops::Range;
use std::path::Path;

use remanent::batch::Width;
use remanent::options::MemoryOptions;
use remanent::{
    Key, Lsn, PageId, Place, Retention, SnapshotId, SnapshotOptions, StatePoint, Store, WriteBatch,
};

use super::Operation::{self, Call, Commit, Outside};
use super::{
    call, follow, fork, open, open_on_demand, options, publish, read_view, restore_newest,
    restore_the_batch_before, salvage, scrub,
};

const COUNT: u64 = 50_000;

fn key(index: u64) -> Key {
    Key::new(format!("page {index}")).unwrap()
}

fn create(store: &Store, keys: Range<u64>) -> WriteBatch {
    let mut batch = store.batch();
    for index in keys {
        let metadata = [("index".to_owned(), index.into())];
        batch.create(8, Place::Host).key(key(index)).metadata(metadata.into());
    }
    batch
}

/// Returns a batch that doubles the number of pages, with new keys.
fn create_more(store: &Store) -> WriteBatch {
    let first = 4 * COUNT * (1 + store.lsn().0);
    create(store, first..first + COUNT)
}

/// Returns a batch that changes one in `step` pages.
fn write(store: &Store, step: usize) -> WriteBatch {
    let mut batch = store.batch();
    for page in (1..=COUNT).step_by(step) {
        batch.write(PageId(page), 0, &(step as u64 + page).to_le_bytes());
    }
    batch
}

fn delete_some(store: &Store) -> WriteBatch {
    let mut batch = store.batch();
    let last = store.pages().unwrap().last().unwrap().page;
    for page in last.0 - 20_000..last.0 {
        if store.contains(PageId(page)).unwrap() {
            batch.delete(PageId(page));
        }
    }
    batch
}

/// Creates a base snapshot, a snapshot that follows it, later batches, a restore, and more batches.
pub fn prepare(directory: &Path) {
    let store = options().open(directory).unwrap();
    store.commit(create(&store, 0..COUNT)).unwrap();
    store.commit(write(&store, 1)).unwrap();
    store.snapshot().unwrap();
    store.commit(write(&store, 7)).unwrap();
    store.snapshot().unwrap();
    store.commit(write(&store, 3)).unwrap();
    store.commit(create(&store, COUNT..COUNT + 25_000)).unwrap();
    store.commit(delete_some(&store)).unwrap();
    store.restore(StatePoint::Lsn(Lsn(store.lsn().0 - 2))).unwrap();
    store.commit(create(&store, 2 * COUNT..2 * COUNT + 10_000)).unwrap();
    store.commit(write(&store, 11)).unwrap();
    store.close().unwrap();
}

fn touch(store: &Store) {
    store.commit(write(store, 5)).unwrap();
}

fn touch_all(store: &Store) {
    store.commit(write(store, 1)).unwrap();
}

pub const MANY: [(&str, Operation); 35] = [
    ("open", Outside(open)),
    ("open on demand", Outside(open_on_demand)),
    (
        "open that loads all later",
        Outside(|directory| {
            let store = options()
                .memory(MemoryOptions::new().load(remanent::options::PageLoad::OnDemand))
                .open(directory)?;
            let loaded = store.wait_loaded();
            store.close()?;
            loaded
        }),
    ),
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
    (
        "commit of one page",
        Commit(|store| {
            let mut batch = store.batch();
            batch.write(PageId(7), 0, &[7; 8]);
            batch
        }),
    ),
    ("commit of writes to all pages", Commit(|store| write(store, 1))),
    ("commit of creations", Commit(create_more)),
    ("commit of deletions", Commit(delete_some)),
    (
        "commit of metadata of all pages",
        Commit(|store| {
            let mut batch = store.batch();
            for page in 1..=COUNT {
                batch.set_metadata(PageId(page), "index", page + store.lsn().0);
            }
            batch
        }),
    ),
    (
        "commit that moves all pages",
        Commit(|store| {
            let mut batch = store.batch();
            for page in 1..=COUNT {
                batch.move_to(PageId(page), Place::Pinned);
            }
            batch
        }),
    ),
    (
        "commit that resizes all pages",
        Commit(|store| {
            let mut batch = store.batch();
            for page in 1..=COUNT {
                batch.resize(PageId(page), 12).write(PageId(page), 8, &[8; 4]);
            }
            batch
        }),
    ),
    (
        "commit of clones",
        Commit(|store| {
            let mut batch = store.batch();
            for page in 1..=20_000 {
                batch.clone_page(PageId(page));
            }
            batch
        }),
    ),
    (
        "commit of elements",
        Commit(|store| {
            let mut batch = store.batch();
            for page in 1..=COUNT {
                batch.scatter(PageId(page), Width::W1, &[0, 2, 5], &[1, 2, store.lsn().0 as u8]);
            }
            batch
        }),
    ),
    (
        "commit of whole pages",
        Commit(|store| {
            let mut batch = store.batch();
            for page in 0..3000 {
                batch.create_from(vec![page as u8; 4096 + page], Place::Host);
            }
            batch
        }),
    ),
    ("batch that writes all pages", call(|store, _| store.commit(write(store, 1)).map(drop))),
    ("batch that creates", call(|store, _| store.commit(create_more(store)).map(drop))),
    (
        "snapshot of few pages",
        Call(
            |store| {
                store.snapshot().unwrap();
                store.commit(write(store, 1000)).unwrap();
            },
            |store, _| store.snapshot().map(drop),
        ),
    ),
    ("snapshot of some pages", Call(touch, |store, _| store.snapshot().map(drop))),
    ("snapshot of all pages", Call(touch_all, |store, _| store.snapshot().map(drop))),
    (
        "exact snapshot",
        Call(touch_all, |store, _| store.snapshot_with(SnapshotOptions::new().exact()).map(drop)),
    ),
    (
        "exact snapshot beside commits",
        Call(touch_all, |store, _| {
            std::thread::scope(|scope| {
                let snapshot = scope.spawn(|| store.snapshot_with(SnapshotOptions::new().exact()));
                let mut written = Ok(());
                while !snapshot.is_finished() && written.is_ok() {
                    written = store.commit(write(store, 1)).map(drop);
                }
                snapshot.join().unwrap()?;
                written
            })
        }),
    ),
    ("published snapshot", Call(touch_all, publish)),
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
                store.snapshot().unwrap();
                touch(store);
                touch_all(store);
            },
            restore_the_batch_before,
        ),
    ),
    ("would_prune", call(|store, _| store.would_prune(&Retention::default()).map(drop))),
    (
        "prune",
        Call(
            |store| {
                let named = SnapshotOptions::new().name(format!("name {}", store.lsn()));
                store.snapshot_with(named).unwrap();
                touch(store);
                store.snapshot().unwrap();
            },
            |store, _| {
                let names = store.snapshots().into_iter().filter_map(|info| info.name);
                let retention = Retention::default().snapshots_kept(1);
                store.prune(&names.fold(retention, Retention::give_up)).map(drop)
            },
        ),
    ),
    ("scrub", call(scrub)),
    ("audit", call(|store, _| store.audit().map(drop))),
    (
        "live view",
        call(|store, _| {
            let view = store.view()?;
            view.pages().for_each(drop);
            view.page_by_key(key(77))?;
            view.read(PageId(1), 0, &mut [0; 8])
        }),
    ),
    (
        "pages and reads",
        call(|store, _| {
            store.page_by_key(key(77))?;
            store.pages()?.try_for_each(|info| store.read(info.page, 0, &mut [0; 8]).map(drop))
        }),
    ),
    ("fork", call(fork)),
    ("salvage", Outside(salvage)),
];
