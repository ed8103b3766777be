//! Restores on demand: what they leave in the archive, and how many requests follow each other.

use std::cell::Cell;
use std::fs;
use std::ops::Range;

use remanent::Place;
use remanent_archive::bucket::{Bucket, BucketError, Creation};
use remanent_archive::directory::{RestoreTarget, UnfetchedParts};
use remanent_archive::line::{Archive, Line, fetch_part};
use remanent_archive::mirror;
use remanent_archive::object::{Folder, ObjectKey};
use remanent_archive::rules::Rules;
use remanent_archive::testing::bucket::{SimBucket, reschedule};

use crate::bed::{Bed, block_on, lock, open};

/// Maximum depth of the requests of a restore with a good hint and of the first part.
const HINT_DEPTH_MAX: u32 = 10;

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
    for push in 0..pushes {
        let store = open(directory.path());
        let mut batch = store.batch();
        batch.create(70_000, Place::Host);
        batch.set_root("push", push);
        store.commit(batch).unwrap();
        store.snapshot().unwrap();
        store.commit(store.batch().set_root("after", push)).unwrap();
        store.close().unwrap();
        bed.push(directory.path()).unwrap();
    }
    directory
}

/// Restores a copy of the archive on demand, and fetches the first part of an image file. Returns the depth of the
/// requests: of the restore, and with the part.
fn depths(bed: &Bed, has_hint: bool) -> (u32, u32) {
    let bed = bed.copy();
    if has_hint {
        let bucket = bed.bucket();
        let mut line = Line::new(Archive { bucket: &bucket, nonces: &bucket, rules: Rules::default() });
        block_on(line.find()).unwrap();
        block_on(line.write_hint()).unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    let nonces = bed.bucket();
    let bucket = DepthBucket { bucket: bed.bucket(), depth: Cell::new(0) };
    let archive = Archive { bucket: &bucket, nonces: &nonces, rules: Rules::default() };
    let target = RestoreTarget::open(directory.path(), lock(directory.path())).unwrap();
    block_on(mirror::restore_on_demand(archive, &target)).unwrap();
    let restored = bucket.depth.get();
    let bytes = fs::read(directory.path().join("UNFETCHED")).unwrap();
    let unfetched = UnfetchedParts::decode(&bytes).unwrap();
    let part = unfetched.files.values().next_back().unwrap().values().next().unwrap();
    assert!(!block_on(fetch_part(archive, part)).unwrap().is_empty());
    (restored, bucket.depth.get())
}

#[test]
fn requests_before_first_page_do_not_grow_with_archive() {
    let mut found = Vec::new();
    for pushes in [3, 12, 40] {
        let bed = Bed::new(pushes);
        let _directory = archived(&bed, pushes);
        found.push((pushes, depths(&bed, true), depths(&bed, false)));
    }
    println!("pushes, with a hint, without: {found:?}");
    for (_, with_hint, _) in &found {
        assert!(with_hint.1 <= HINT_DEPTH_MAX, "{found:?}");
    }
}
