//! A bucket that prefetches, in parallel, the objects to which a hint refers.
//!
//! The search for the end of a line reads one object after another, because each object determines the key of the next
//! one. If the hint is up to date, these keys are known in advance. The search itself is unchanged, but its reads
//! return prefetched objects. If a prefetch found that an object does not exist, only the first read returns this
//! result. A repeated read thus finds an object that was created in the meantime. Existing objects never change.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join_all;

use crate::bucket::{Bucket, BucketError, Creation};
use crate::object::{Bound, Content, Folder, Hint, LineObject, ObjectKey, Role};

/// Maximum number of runs that are prefetched. The same limit applies to the data objects of a manifest.
const AHEAD_MAX: usize = 8;

/// A bucket that prefetches the objects to which its hint refers.
pub(crate) struct ReadAhead<'b, B> {
    bucket: &'b B,
    /// Prefetched objects, or `None` for an object that did not exist.
    answers: RefCell<BTreeMap<ObjectKey, Option<Vec<u8>>>>,
}

impl<'b, B: Bucket> ReadAhead<'b, B> {
    pub fn new(bucket: &'b B) -> Self {
        Self { bucket, answers: RefCell::default() }
    }

    /// Returns the prefetched answer to a read, or `None` if the object was not prefetched. Keeps only line objects and
    /// boundaries for further reads.
    fn take(&self, key: ObjectKey, range: Option<&Range<u64>>) -> Option<Option<Vec<u8>>> {
        let mut answers = self.answers.borrow_mut();
        let (Some(bytes), false) = (answers.get(&key)?, matches!(key, ObjectKey::Data(_))) else {
            return answers.remove(&key);
        };
        let Some(range) = range else { return Some(Some(bytes.clone())) };
        let end = range.end.min(bytes.len() as u64) as usize;
        bytes.get(range.start as usize..end).map(|bytes| Some(bytes.to_vec()))
    }

    /// Prefetches the objects to which a hint refers: the end and the newest manifest, and then the objects to which
    /// these link.
    async fn follow(&self, hint: &[u8]) {
        let Ok(Hint { end, manifest, bound }) = Hint::decode(hint, None) else { return };
        // The cached answers may be from an earlier search, which a boundary has overtaken.
        self.answers.borrow_mut().clear();
        let lines = [end, end.saturating_add(1), manifest].map(ObjectKey::Line);
        let bounds = [bound, bound.saturating_add(1)].map(ObjectKey::Bound);
        self.get_all(lines.into_iter().chain(bounds)).await;

        let mut positions = vec![1];
        let mut data = Vec::new();
        if let Some(bound) =
            self.bytes(ObjectKey::Bound(bound)).and_then(|bytes| Bound::decode(&bytes, bound, None).ok())
        {
            positions = bound.boundary().iter().map(|boundary| boundary.start).collect();
        }
        if let Some(last) = self.line(end) {
            let links = last.links.after(&last);
            positions.extend([links.fence, links.boundary, links.catalog, links.manifest]);
        }
        if let Some(object) = self.line(manifest) {
            if let Content::Manifest(manifest) = &object.content {
                positions.extend((manifest.start..end).take(AHEAD_MAX));
            }
            let files = object.data.iter().filter(|entry| entry.part.role != Role::Images);
            data.extend(files.take(AHEAD_MAX).map(|entry| ObjectKey::Data(entry.key)));
        }
        self.get_all(positions.into_iter().map(ObjectKey::Line).chain(data)).await;
    }

    fn bytes(&self, key: ObjectKey) -> Option<Vec<u8>> {
        self.answers.borrow().get(&key).cloned().flatten()
    }

    fn line(&self, position: u64) -> Option<LineObject> {
        LineObject::decode(&self.bytes(ObjectKey::Line(position))?, position, None).ok()
    }

    /// Prefetches objects concurrently. If a read fails, the caller that needs the object repeats the read.
    async fn get_all(&self, keys: impl Iterator<Item = ObjectKey>) {
        let is_new = |key: &ObjectKey| {
            let is_number = !matches!(key, ObjectKey::Line(0) | ObjectKey::Bound(0));
            is_number && !self.answers.borrow().contains_key(key)
        };
        let mut keys: Vec<ObjectKey> = keys.filter(is_new).collect();
        keys.sort_unstable();
        keys.dedup();
        let read = |key| async move { (key, self.bucket.get(key, None).await) };
        for (key, answer) in join_all(keys.into_iter().map(read)).await {
            if let Ok(found) = answer {
                self.answers.borrow_mut().insert(key, found);
            }
        }
    }
}

impl<B: Bucket> Bucket for ReadAhead<'_, B> {
    async fn create(&self, key: ObjectKey, bytes: &[u8]) -> Result<Creation, BucketError> {
        self.answers.borrow_mut().remove(&key);
        self.bucket.create(key, bytes).await
    }

    async fn create_shared(&self, key: ObjectKey, bytes: &Arc<Vec<u8>>) -> Result<Creation, BucketError> {
        self.answers.borrow_mut().remove(&key);
        self.bucket.create_shared(key, bytes).await
    }

    async fn put(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), BucketError> {
        self.answers.borrow_mut().remove(&key);
        self.bucket.put(key, bytes).await
    }

    async fn get(&self, key: ObjectKey, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, BucketError> {
        if let Some(answer) = self.take(key, range.as_ref()) {
            return Ok(answer);
        }
        let found = self.bucket.get(key, range).await?;
        if let (ObjectKey::Newest, Some(hint)) = (key, &found) {
            self.follow(hint).await;
        }
        Ok(found)
    }

    async fn list(&self, folder: Folder) -> Result<Vec<String>, BucketError> {
        self.bucket.list(folder).await
    }

    async fn delete(&self, key: ObjectKey) -> Result<(), BucketError> {
        self.answers.borrow_mut().remove(&key);
        self.bucket.delete(key).await
    }

    async fn pause(&self, attempt: u32, failure: &BucketError) -> bool {
        self.bucket.pause(attempt, failure).await
    }
}
