//! Concurrent uploads.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::task::Poll;

use remanent_archive::bucket::{Bucket, BucketError, Creation};
use remanent_archive::directory::ArchivedDirectory;
use remanent_archive::line::{Archive, Line, Takeover, UPLOADS_MAX};
use remanent_archive::local::FilePiece;
use remanent_archive::mirror;
use remanent_archive::object::{Folder, ObjectKey, Part, Role, crc64};
use remanent_archive::rules::Rules;
use remanent_archive::testing::bucket::SimBucket;

use crate::bed::{Bed, Life, block_on, lock};

/// A bucket that counts concurrent creates of data objects.
struct CountingBucket {
    inner: SimBucket,
    running: Cell<usize>,
    most: Cell<usize>,
    /// Number of creates of data objects.
    created: Cell<usize>,
}

impl Bucket for CountingBucket {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        let is_data = usize::from(matches!(key, ObjectKey::Data(_)));
        self.running.set(self.running.get() + is_data);
        self.most.set(self.most.get().max(self.running.get()));
        self.created.set(self.created.get() + is_data);
        // A simulated request takes less time than reading a part.
        let mut polls = 0;
        poll_fn(|context| {
            polls += 1;
            context.waker().wake_by_ref();
            if polls < 100 { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
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

impl CountingBucket {
    fn new(inner: SimBucket) -> Self {
        Self { inner, running: Cell::new(0), most: Cell::new(0), created: Cell::new(0) }
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
    let bucket = CountingBucket::new(inner.clone());
    let archive = Archive { bucket: &bucket, nonces: &inner, rules: Rules::default() };
    let mut directory = ArchivedDirectory::open(&life.path, lock(&life.path)).unwrap();
    let pushed = block_on(mirror::push(archive, &mut directory, Takeover::Refused)).unwrap();
    drop(directory);
    assert_eq!((pushed.named, bucket.running.get()), (8, 0));
    assert_eq!(bucket.most.get(), UPLOADS_MAX);
    life.check_names(&bed.restored().1, "after the push");
}

/// Uploads 12 pieces, of which the ninth cannot be read at first.
#[test]
fn failed_upload_continues_after_uploaded_pieces() {
    let bed = Bed::new(32);
    let mut life = Life::new(32);
    life.work(3).close().unwrap();
    let inner = bed.bucket();
    let bucket = CountingBucket::new(inner.clone());
    let mut line = Line::new(Archive { bucket: &bucket, nonces: &inner, rules: Rules::default() });
    let mut directory = ArchivedDirectory::open(&life.path, lock(&life.path)).unwrap();
    block_on(line.find()).unwrap();
    block_on(line.fence(&mut directory, Takeover::Refused)).unwrap();

    let pieces: Vec<FilePiece> =
        (0..12).map(|at| FilePiece { role: Role::Images, file: 900 + at, offset: 0, len: 1000 }).collect();
    let reads = Cell::new(0);
    let read = |piece: &FilePiece, out: &mut [u8]| {
        reads.set(reads.get() + 1);
        if reads.get() == 9 {
            return Err(io::Error::other("unreadable"));
        }
        out.fill(piece.file as u8);
        Ok(crc64(out))
    };
    let failed = block_on(line.upload_pieces(&pieces, read, || false));
    assert!(matches!(failed, Err(remanent_archive::Error::Local(_))), "{failed:?}");
    assert_eq!((reads.get(), bucket.created.get(), bucket.running.get()), (9, 8, 0));
    let first = block_on(line.upload_pieces(&pieces, read, || true)).unwrap();
    assert_eq!((first.len(), bucket.created.get()), (1, 8));
    let parts = block_on(line.upload_pieces(&pieces, read, || false)).unwrap();
    let expected: Vec<Part> =
        pieces.iter().map(|piece| piece.part(crc64(&[piece.file as u8; 1000]))).collect();
    assert_eq!((parts, reads.get(), bucket.created.get()), (expected, 22, 12));
    assert_eq!(bucket.most.get(), UPLOADS_MAX);
}
