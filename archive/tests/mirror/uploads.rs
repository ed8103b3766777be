//! Concurrent uploads.

use std::cell::Cell;
use std::ops::Range;

use remanent_archive::bucket::{Bucket, BucketError, Creation};
use remanent_archive::directory::ArchivedDirectory;
use remanent_archive::line::{Archive, Takeover, UPLOADS_MAX};
use remanent_archive::mirror;
use remanent_archive::object::{Folder, ObjectKey};
use remanent_archive::rules::Rules;
use remanent_archive::testing::bucket::SimBucket;

use crate::bed::{Bed, Life, block_on, lock};

/// A bucket that counts concurrent creates of data objects.
struct CountingBucket {
    inner: SimBucket,
    running: Cell<usize>,
    most: Cell<usize>,
}

impl Bucket for CountingBucket {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        let is_data = usize::from(matches!(key, ObjectKey::Data(_)));
        self.running.set(self.running.get() + is_data);
        self.most.set(self.most.get().max(self.running.get()));
        let created = self.inner.create(key, bytes).await;
        self.running.set(self.running.get() - is_data);
        created
    }

    async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), BucketError> {
        self.inner.put(key, bytes).await
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        self.inner.get(key, range).await
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        self.inner.list(folder).await
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        self.inner.delete(key).await
    }

    async fn pause(&self, attempt: u32, failure: &BucketError) -> bool {
        self.inner.pause(attempt, failure).await
    }
}

/// The number of concurrent uploads is bounded, because each one needs memory.
#[test]
fn parts_of_snapshot_are_uploaded_concurrently() {
    let bed = Bed::new(31);
    let mut life = Life::new(31);
    for round in 0..8 {
        let store = life.work(3);
        life.name(&store, &format!("round {round}"));
        store.close().unwrap();
    }
    let inner = bed.bucket();
    let bucket = CountingBucket { inner: inner.clone(), running: Cell::new(0), most: Cell::new(0) };
    let archive = Archive { bucket: &bucket, nonces: &inner, rules: Rules::default() };
    let mut directory = ArchivedDirectory::open(&life.path, lock(&life.path)).unwrap();
    let pushed = block_on(mirror::push(archive, &mut directory, Takeover::Refused)).unwrap();
    drop(directory);
    assert_eq!((pushed.named, bucket.running.get()), (8, 0));
    assert_eq!(bucket.most.get(), UPLOADS_MAX);
    life.check_names(&bed.restored().1, "after the push");
}
