//! A bucket that prefetches, in parallel, the objects to which a hint refers.
//!
//! The search for the end of a line reads one object after another, because each object links to the next one. If the
//! hint is current, the keys of these objects are known in advance. The search itself is unchanged: its reads return
//! the prefetched objects. Existing objects never change.
//!
//! The answer that an object does not exist describes the moment of its request. A prefetched one is returned only to a
//! search, only once, so that a repeated request detects an object that was created since, and not after the caller has
//! created an object. The answer to a later request is returned again until another request has ended: everything that
//! the caller knows is then older than this request.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{StreamExt, iter};

use crate::bucket::{Bucket, BucketError, Creation};
use crate::object::{Folder, Hint, ObjectKey};

/// Maximum number of objects from the start in the hint on that are read in advance.
const AHEAD_MAX: usize = 16;
/// Maximum number of concurrent requests.
const REQUESTS_MAX: usize = 64;
/// Maximum number of bytes of prefetched objects in memory. Objects beyond that are read when they are needed.
const BYTES_MAX: usize = 64 << 20;

/// A bucket that prefetches the objects to which its hint refers.
pub(crate) struct ReadAhead<'b, B> {
    bucket: &'b B,
    /// Prefetched objects, or `None` for an object that did not exist.
    answers: RefCell<BTreeMap<ObjectKey, Option<Vec<u8>>>>,
    /// Number of requests that have ended.
    ended: Cell<u64>,
    /// The object that did not exist at the last request, if no other request has ended since this one was sent, and
    /// the number of requests that had ended after it.
    absent: Cell<Option<(ObjectKey, u64)>>,
}

impl<'b, B: Bucket> ReadAhead<'b, B> {
    pub fn new(bucket: &'b B) -> Self {
        Self { bucket, answers: RefCell::default(), ended: Cell::new(0), absent: Cell::new(None) }
    }

    fn note_end(&self) {
        self.ended.set(self.ended.get() + 1);
    }

    /// Returns the prefetched answer to a read, or `None` if the object was not prefetched. Keeps only line objects and
    /// boundaries for further reads.
    fn take(&self, key: ObjectKey, range: Option<&Range<u64>>) -> Option<Option<Vec<u8>>> {
        let mut answers = self.answers.borrow_mut();
        let (Some(bytes), false) = (answers.get(&key)?, matches!(key, ObjectKey::Data(_))) else {
            let answer = answers.remove(&key)?;
            // A caller that reads a whole object of the line knows that the object existed.
            let is_search = range.is_some() || !matches!(key, ObjectKey::Line(_));
            return (answer.is_some() || is_search).then_some(answer);
        };
        let Some(range) = range else { return Some(Some(bytes.clone())) };
        let end = range.end.min(bytes.len() as u64) as usize;
        bytes.get(range.start as usize..end).map(|bytes| Some(bytes.to_vec()))
    }

    /// Reads the objects that a hint names, and those after the end that a search looks for.
    async fn follow(&self, hint: &[u8]) {
        let Ok(hint) = Hint::decode(hint, None) else { return };
        // A search that was overtaken starts again.
        self.answers.borrow_mut().clear();
        let after_end = (0..Hint::PROBES).map(|power| hint.end.saturating_add((2 << power) - 1));
        let after = after_end.map(ObjectKey::Line).chain([ObjectKey::Bound(hint.bound.saturating_add(1))]);
        self.get_all(keys_of(&hint).chain(after), true).await;
    }

    /// Reads the objects that the caller's own hint names. The caller may create an object meanwhile.
    pub async fn fetch(&self, hint: &Hint) {
        self.get_all(keys_of(hint), false).await;
    }

    /// Discards the answers that an object does not exist. They are older than the object that is being created.
    fn forget_absent(&self) {
        self.answers.borrow_mut().retain(|_, found| found.is_some());
    }

    /// Reads objects together, until their bytes fill the memory for them. A read that fails is repeated by the caller
    /// that needs it. With `keeps_absent`, also records which objects do not exist.
    async fn get_all(&self, keys: impl Iterator<Item = ObjectKey>, keeps_absent: bool) {
        let is_new = |key: &ObjectKey| {
            let is_number = !matches!(key, ObjectKey::Line(0) | ObjectKey::Bound(0));
            is_number && !self.answers.borrow().contains_key(key)
        };
        let mut keys: Vec<ObjectKey> = keys.filter(is_new).collect();
        keys.sort_unstable();
        keys.dedup();
        let read = |key| async move { (key, self.bucket.get(key, None).await) };
        let len = |found: &Option<Vec<u8>>| found.as_ref().map_or(0, Vec::len);
        let mut bytes: usize = self.answers.borrow().values().map(len).sum();
        let mut answers = iter(keys.into_iter().map(read)).buffer_unordered(REQUESTS_MAX);
        while bytes < BYTES_MAX
            && let Some((key, answer)) = answers.next().await
        {
            self.note_end();
            if let Ok(found) = answer
                && (found.is_some() || keeps_absent)
            {
                bytes += len(&found);
                self.answers.borrow_mut().insert(key, found);
            }
        }
    }
}

/// Returns the keys of the objects that a hint names.
fn keys_of(hint: &Hint) -> impl Iterator<Item = ObjectKey> {
    let Hint { end, manifest, bound, start, lines, data } = hint;
    let from_start = (*start..*end).take(AHEAD_MAX);
    let lines = [*end, *manifest].into_iter().chain(from_start).chain(lines.iter().copied());
    let data = data.iter().copied().map(ObjectKey::Data);
    lines.map(ObjectKey::Line).chain([ObjectKey::Bound(*bound)]).chain(data)
}

impl<B: Bucket> Bucket for ReadAhead<'_, B> {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        self.forget_absent();
        let created = self.bucket.create(key, bytes).await;
        self.note_end();
        if let (Ok(Creation::Created), ObjectKey::Line(_)) = (&created, key) {
            self.answers.borrow_mut().insert(key, Some(bytes.to_vec()));
        }
        created
    }

    async fn create_shared(&self, key: ObjectKey, bytes: &Arc<Vec<u8>>) -> Result<Creation, BucketError> {
        self.forget_absent();
        let created = self.bucket.create_shared(key, bytes).await;
        self.note_end();
        created
    }

    async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), BucketError> {
        self.answers.borrow_mut().remove(&key);
        let put = self.bucket.put(key, bytes).await;
        self.note_end();
        put
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        if let Some(answer) = self.take(key, range.as_ref()) {
            return Ok(answer);
        }
        if self.absent.get() == Some((key, self.ended.get())) {
            return Ok(None);
        }
        let ended = self.ended.get();
        let found = self.bucket.get(key, range).await;
        self.note_end();
        let found = found?;
        if found.is_none() && self.ended.get() == ended + 1 {
            self.absent.set(Some((key, ended + 1)));
        }
        if let (ObjectKey::Newest, Some(hint)) = (key, &found) {
            self.follow(hint).await;
        }
        Ok(found)
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        let names = self.bucket.list(folder).await;
        self.note_end();
        names
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        self.answers.borrow_mut().remove(&key);
        let deleted = self.bucket.delete(key).await;
        self.note_end();
        deleted
    }

    async fn pause(&self, attempt: u32, failure: &BucketError) -> bool {
        self.bucket.pause(attempt, failure).await
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use remanent_format::StoreId;

    use super::*;

    /// Objects in memory. No request waits.
    #[derive(Default)]
    struct Objects(RefCell<BTreeMap<ObjectKey, Vec<u8>>>);

    impl Bucket for Objects {
        async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
            self.0.borrow_mut().insert(key, bytes.to_vec());
            Ok(Creation::Created)
        }

        async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), BucketError> {
            self.0.borrow_mut().insert(key, bytes.to_vec());
            Ok(())
        }

        async fn get(
            &self,
            key: ObjectKey,
            range: Option<Range<u64>>,
        ) -> Result<Option<Vec<u8>>, BucketError> {
            let whole = self.0.borrow().get(&key).cloned();
            let range = range.map(|range| range.start as usize..range.end as usize);
            Ok(whole.map(|bytes| range.map_or(bytes.clone(), |range| bytes[range].to_vec())))
        }

        async fn list(&self, _: Folder) -> Result<Vec<String>, BucketError> {
            Ok(Vec::new())
        }

        async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
            self.0.borrow_mut().remove(&key);
            Ok(())
        }

        async fn pause(&self, _: u32, _: &BucketError) -> bool {
            false
        }
    }

    fn ready<T>(future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return output;
            }
        }
    }

    /// Returns a bucket with objects of `len` bytes at the positions 1 to `end`, and a hint that names them.
    fn line(end: u64, len: usize) -> Objects {
        let objects = Objects::default();
        let names = (1..=end).map(|position| (ObjectKey::Line(position), vec![position as u8; len]));
        objects.0.borrow_mut().extend(names);
        let hint = Hint { end, manifest: 0, bound: 0, start: 1, lines: Vec::new(), data: Vec::new() };
        objects.0.borrow_mut().insert(ObjectKey::Newest, hint.encode(StoreId([1; 16]), 1));
        objects
    }

    /// A read of an object that was created after the prefetch finds the object, unless a search asks for the first time.
    #[test]
    fn object_created_after_the_prefetch_is_found() {
        let objects = line(4, 10);
        let ahead = ReadAhead::new(&objects);
        ready(ahead.get(ObjectKey::Newest, None)).unwrap().unwrap();
        for position in [5, 7] {
            objects.0.borrow_mut().insert(ObjectKey::Line(position), vec![9; 10]);
        }
        let exists = |position| ready(ahead.get(ObjectKey::Line(position), Some(0..4))).unwrap().is_some();
        assert_eq!([exists(4), exists(5), exists(5)], [true, false, true]);
        let whole = ready(ahead.get(ObjectKey::Line(7), None)).unwrap();
        assert_eq!(whole, Some(vec![9; 10]), "a reader that knows of the object");
    }

    /// Prefetched objects take bounded memory. The others are read when they are needed.
    #[test]
    fn prefetch_takes_bounded_memory() {
        let objects = line(4, BYTES_MAX / 2);
        let ahead = ReadAhead::new(&objects);
        ready(ahead.get(ObjectKey::Newest, None)).unwrap().unwrap();
        assert_eq!(ahead.answers.borrow().values().flatten().count(), 2);
        for position in 1..=4 {
            assert!(ready(ahead.get(ObjectKey::Line(position), None)).unwrap().is_some());
        }
    }
}
