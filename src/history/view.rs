//! Looking at a state of a store, read-only: nothing is written, no device is used, and a writer
//! may go on meanwhile.
//!
//! [`crate::history::state`] finds the state and reads pages; here are the handle and its cache.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use remanent_format::{Key, Lsn, Metadata, PageId, PageInfo, SnapshotId, StoreId};

use crate::base::process::Process;
use crate::base::sync::Mutex;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::history::point::StatePoint;
use crate::history::state::PastState;

/// Bytes of pages that a handle keeps. A page that is longer is kept alone, so that reading it piece by
/// piece puts it together once.
const CACHE_BYTES: u64 = 64 << 20;

/// A state of a store, to look at: pages, root and bytes as they were right after one batch.
///
/// [`Store::open_at`](crate::Store::open_at) and [`Store::open_read_only`](crate::Store::open_read_only)
/// give one. It stays at its batch, whatever a writer does meanwhile, and nothing that it needs is
/// removed while it lives. The exception are places where no lock can be taken, such as read-only media:
/// there a writer elsewhere may remove files, and then reads fail with [`Error::Overtaken`].
///
/// A page's bytes are put together when they are first read, from its image and its own operations in the
/// log. At most 64 MiB of pages are kept for later reads, or one page that is longer. A page whose bytes on
/// disk are damaged fails alone.
pub struct View {
    opener: Process,
    past: PastState,
    cache: Mutex<Cache>,
}

impl View {
    /// Opens a state on any disk: the way in for tests, which bring simulated ones.
    ///
    /// # Errors
    /// As for [`Store::open_at`](crate::Store::open_at).
    #[doc(hidden)]
    pub fn open_on(disk: &Arc<dyn Disk>, point: Option<&StatePoint>) -> Result<Self> {
        let past = PastState::open(disk, point);
        Ok(Self {
            opener: Process::current(),
            past: past.map_err(|error| error.in_store(&disk.label()))?,
            cache: Mutex::default(),
        })
    }

    /// The state that it reads from, for the process that opened it. In a forked child, locks of the
    /// parent's threads may be held for ever.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn past(&self) -> Result<&PastState> {
        self.opener.check().map(|()| &self.past)
    }

    /// The identity of the store.
    #[must_use]
    pub fn id(&self) -> StoreId {
        self.past.store().store
    }

    /// The batch after which this is the state.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.past.lsn()
    }

    /// The snapshot that the state is computed from, with the log after it; `None` is the log's beginning.
    #[must_use]
    pub fn base(&self) -> Option<SnapshotId> {
        self.past.base()
    }

    /// All pages, in the order of their ids.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = PageInfo> {
        self.past.table().pages()
    }

    /// A page's length, version, key and metadata.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::Forked`].
    pub fn page(&self, page: PageId) -> Result<PageInfo> {
        self.past()?.table().get(page).ok_or(Error::UnknownPage { page })
    }

    /// The page that has this key.
    ///
    /// # Errors
    /// [`Error::UnknownKey`], [`Error::Forked`].
    pub fn page_by_key(&self, key: &Key) -> Result<PageInfo> {
        self.past()?.table().get_key(key).ok_or_else(|| Error::UnknownKey { key: key.clone() })
    }

    /// The root: the store's own metadata.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        self.past.table().root()
    }

    /// Fills `out` with the page's bytes from `offset` on.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Damaged`] if the files that this page is
    /// made from are damaged, which says nothing of other pages; [`Error::Overtaken`];
    /// [`Error::OutOfMemory`]; [`Error::Forked`].
    pub fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<()> {
        let (len, page_len) = (out.len() as u64, self.page(page)?.len);
        if offset.checked_add(len).is_none_or(|end| end > page_len) {
            return Err(Error::OutOfBounds { page, offset, len, page_len });
        }
        let bytes = self.bytes(page)?;
        out.copy_from_slice(&bytes[offset as usize..][..out.len()]);
        Ok(())
    }

    fn bytes(&self, page: PageId) -> Result<Arc<Vec<u8>>> {
        if let Some(bytes) = self.cache.lock().get(page) {
            return Ok(bytes);
        }
        // Others may read meanwhile; at worst two threads put the same page together.
        let bytes = Arc::new(self.past.load(page)?);
        self.cache.lock().insert(page, bytes.clone());
        Ok(bytes)
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View")
            .field("store", &self.id())
            .field("lsn", &self.lsn())
            .field("base", &self.base())
            .finish_non_exhaustive()
    }
}

/// Pages that were read lately.
#[derive(Default)]
struct Cache {
    pages: HashMap<PageId, (u64, Arc<Vec<u8>>)>,
    /// The pages by the time of their last use.
    used: BTreeMap<u64, PageId>,
    now: u64,
    bytes: u64,
}

impl Cache {
    fn get(&mut self, page: PageId) -> Option<Arc<Vec<u8>>> {
        let (used, bytes) = self.pages.get_mut(&page)?;
        self.used.remove(used);
        self.now += 1;
        *used = self.now;
        self.used.insert(self.now, page);
        Some(bytes.clone())
    }

    fn insert(&mut self, page: PageId, bytes: Arc<Vec<u8>>) {
        self.remove(page);
        self.now += 1;
        self.bytes += bytes.len() as u64;
        self.pages.insert(page, (self.now, bytes));
        self.used.insert(self.now, page);
        while self.bytes > CACHE_BYTES && self.pages.len() > 1 {
            let (_, oldest) = self.used.first_key_value().expect("each page was used once");
            self.remove(*oldest);
        }
    }

    fn remove(&mut self, page: PageId) {
        if let Some((used, bytes)) = self.pages.remove(&page) {
            self.used.remove(&used);
            self.bytes -= bytes.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(len: u64) -> Arc<Vec<u8>> {
        Arc::new(vec![0; len as usize])
    }

    #[test]
    fn the_cache_keeps_what_was_used_last_within_its_bound() {
        let mut cache = Cache::default();
        let third = CACHE_BYTES / 3;
        for number in 1..=3 {
            cache.insert(PageId(number), page(third));
        }
        assert!(cache.get(PageId(1)).is_some());
        cache.insert(PageId(4), page(third));
        assert!(cache.get(PageId(2)).is_none(), "the page that was not used longest goes first");
        assert!([1, 3, 4].into_iter().all(|number| cache.get(PageId(number)).is_some()));
        assert_eq!(cache.bytes, 3 * third);
    }

    #[test]
    fn a_page_longer_than_the_bound_is_kept_alone() {
        let mut cache = Cache::default();
        cache.insert(PageId(1), page(10));
        cache.insert(PageId(2), page(CACHE_BYTES + 1));
        assert!(cache.get(PageId(1)).is_none());
        assert!(cache.get(PageId(2)).is_some());
        cache.insert(PageId(3), page(10));
        assert!(cache.get(PageId(2)).is_none());
        // The same page again takes its own place.
        cache.insert(PageId(3), page(20));
        assert_eq!((cache.bytes, cache.pages.len(), cache.used.len()), (20, 1, 1));
    }
}
