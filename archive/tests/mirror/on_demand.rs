//! Restores on demand: what they leave in the archive, and how many requests follow each other.

use std::cell::Cell;
use std::fs;
use std::ops::Range;
use std::path::Path;

use remanent::Place;
use remanent_archive::bucket::{Bucket, BucketError, Creation};
use remanent_archive::directory::{RestoreTarget, UnfetchedParts};
use remanent_archive::line::{Archive, Line, RestoredEnd, fetch_part};
use remanent_archive::mirror;
use remanent_archive::object::{DataKey, Folder, Hint, ObjectKey};
use remanent_archive::rules::Rules;
use remanent_archive::testing::bucket::{SimBucket, reschedule};

use crate::bed::{Bed, block_on, lock, open};

/// Depth of the requests of a restore with a current hint: the hint, the objects that it names, the claim, and the look
/// for a newer boundary after it.
const DEPTH: u32 = 4;
/// Maximum depth with a hint that is out of date, and without one.
const STALE_DEPTH_MAX: u32 = 11;
const NO_HINT_DEPTH_MAX: u32 = 12;

/// A bucket that counts the requests that follow each other: a request is one deeper than the deepest request that had
/// ended when it was sent.
struct DepthBucket {
    bucket: SimBucket,
    depth: Cell<u32>,
}

impl DepthBucket {
    async fn send<T>(&self, request: impl Future<Output = T>) -> T {
        let depth = self.depth.get() + 1;
        // Requests that are sent together have the same depth.
        reschedule().await;
        let answer = request.await;
        self.depth.set(self.depth.get().max(depth));
        answer
    }
}

impl Bucket for DepthBucket {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        self.send(self.bucket.create(key, bytes)).await
    }

    async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), BucketError> {
        self.send(self.bucket.put(key, bytes)).await
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        self.send(self.bucket.get(key, range)).await
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        self.send(self.bucket.list(folder)).await
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        self.send(self.bucket.delete(key)).await
    }

    async fn pause(&self, attempt: u32, failure: &BucketError) -> bool {
        self.bucket.pause(attempt, failure).await
    }
}

/// Archives a store of long pages with every push, so that the archive has boundaries.
fn archived(bed: &Bed, pushes: u64) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    (0..pushes).for_each(|number| push(bed, directory.path(), number));
    directory
}

fn push(bed: &Bed, directory: &Path, number: u64) {
    let store = open(directory);
    let mut batch = store.batch();
    batch.create(70_000, Place::Host);
    batch.set_root("push", number);
    store.commit(batch).unwrap();
    store.snapshot().unwrap();
    store.commit(store.batch().set_root("after", number)).unwrap();
    store.close().unwrap();
    bed.push(directory).unwrap();
}

/// Returns the hint at the end of the archive, as an object.
fn hint(bed: &Bed) -> Vec<u8> {
    let bucket = bed.bucket();
    let mut line = Line::new(Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() });
    block_on(line.find()).unwrap();
    block_on(line.write_hint()).unwrap();
    block_on(bucket.get(ObjectKey::Newest, None)).unwrap().unwrap()
}

/// Restores a copy of the archive on demand, with `hint` as its hint, and fetches the first part of an image file. Returns
/// the depth of the requests: of the restore, and with the part. Also returns the restored end.
fn restored(bed: &Bed, hint: Option<&[u8]>) -> ((u32, u32), RestoredEnd) {
    let bed = bed.copy();
    block_on(async {
        match hint {
            Some(hint) => bed.bucket().put(ObjectKey::Newest, hint).await,
            None => bed.bucket().delete(ObjectKey::Newest).await,
        }
    })
    .unwrap();
    let directory = tempfile::tempdir().unwrap();
    let nonces = bed.bucket();
    let bucket = DepthBucket { bucket: bed.bucket(), depth: Cell::new(0) };
    let archive = Archive { bucket: &bucket, nonces: &nonces, rules: Rules::default() };
    let target = RestoreTarget::open(directory.path(), lock(directory.path())).unwrap();
    let end = block_on(mirror::restore_on_demand(archive, &target)).unwrap();
    let restored = bucket.depth.get();
    let bytes = fs::read(directory.path().join("UNFETCHED")).unwrap();
    let unfetched = UnfetchedParts::decode(&bytes).unwrap();
    let part = unfetched.files.values().next_back().unwrap().values().next().unwrap();
    assert!(!block_on(fetch_part(archive, part)).unwrap().is_empty());
    ((restored, bucket.depth.get()), end)
}

#[test]
fn requests_before_first_page_do_not_grow_with_archive() {
    let mut found = Vec::new();
    for pushes in [3, 12, 40] {
        let bed = Bed::new(pushes);
        let directory = archived(&bed, pushes - 1);
        let stale = hint(&bed);
        push(&bed, directory.path(), pushes - 1);
        let (current, end) = restored(&bed, Some(&hint(&bed)));
        for hint in [Some(stale.as_slice()), None] {
            assert_eq!(restored(&bed, hint).1, end);
        }
        found.push((pushes, current, restored(&bed, Some(&stale)).0, restored(&bed, None).0));
    }
    println!("pushes, and depths with a current hint, with a stale one, and without: {found:?}");
    for (_, current, stale, without) in &found {
        assert_eq!(*current, (DEPTH, DEPTH + 1), "{found:?}");
        assert!(stale.1 <= STALE_DEPTH_MAX && without.1 <= NO_HINT_DEPTH_MAX, "{found:?}");
    }
}

/// A hint that names wrong objects only costs requests.
#[test]
fn wrong_hint_restores_same_state() {
    let bed = Bed::new(5);
    let directory = archived(&bed, 4);
    let current = Hint::decode(&hint(&bed), None).unwrap();
    let (_, expected) = restored(&bed, None);
    let data = current.data.clone();
    let missing = DataKey { term: 1, random: 7, index: 9 };
    let hints = [
        Hint { end: current.end + 1, ..current.clone() },
        Hint { end: current.end - 1, bound: current.bound - 1, ..current.clone() },
        Hint { end: 1, manifest: 1, bound: 1, start: 1, lines: vec![1, 2], data: data.clone() },
        Hint { manifest: current.end, start: current.end + 7, lines: vec![], ..current.clone() },
        Hint { bound: current.bound + 5, data: vec![missing], ..current.clone() },
        Hint { end: 900, manifest: 901, bound: 902, start: 890, lines: vec![903, 903], data: vec![missing] },
        Hint { lines: vec![current.end + 1], ..current.clone() },
    ];
    let store = expected.store;
    for hint in hints {
        let (depth, end) = restored(&bed, Some(&hint.encode(store, 1)));
        assert_eq!(end, expected, "{hint:?}, {depth:?}");
    }
    let foreign = current.encode(remanent_format::StoreId([9; 16]), 1);
    assert_eq!(restored(&bed, Some(&foreign)).1, expected);
    drop(directory);
}
