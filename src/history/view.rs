//! Looking at a state of a store, read-only: nothing is written, no device is used, and a writer
//! may go on meanwhile.
//!
//! [`crate::history::state`] finds the state and reads pages; here is the handle.

use std::fmt;
use std::sync::Arc;

use remanent_format::{Key, Lsn, Metadata, PageId, PageInfo, SnapshotId, StoreId};

use crate::base::process::Process;
use crate::base::{huge_pages, parallel};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::history::point::StatePoint;
use crate::history::state::PastState;

/// Threads that read pages together. Each gives a few gigabytes a second from the page cache, and eight take
/// what memory gives.
const READERS_MAX: usize = 8;

/// A state of a store, to look at: pages, root and bytes as they were right after one batch.
///
/// [`Store::open_at`](crate::Store::open_at) and [`Store::open_read_only`](crate::Store::open_read_only)
/// give one. It stays at its batch, whatever a writer does meanwhile, and nothing that it needs is
/// removed while it lives. The exception are places where no lock can be taken, such as read-only media:
/// there a writer elsewhere may remove files, and then reads fail with [`Error::Overtaken`].
///
/// A page's bytes are put together when they are read, from its image and its own operations in the log, and
/// at most 64 MiB of them are kept for later reads. A page whose bytes on disk are damaged fails alone.
///
/// An image has one checksum. So the first read of a page longer than 4 MiB reads all of its image, to prove
/// it, and holds no more than a piece of it at a time; later reads read what they need, a mebibyte at least.
/// Batches that set single elements all over the page are read again for each window, so a reader that goes
/// on where it stopped gets longer ones, up to 32 MiB.
pub struct View {
    opener: Process,
    past: PastState,
}

impl View {
    /// Opens a state on any disk: the way in for tests, which bring simulated ones.
    ///
    /// # Errors
    /// As for [`Store::open_at`](crate::Store::open_at).
    #[doc(hidden)]
    pub fn open_on(disk: &Arc<dyn Disk>, point: Option<&StatePoint>) -> Result<Self> {
        let past = PastState::open(disk, point);
        Ok(Self { opener: Process::current(), past: past.map_err(|error| error.in_store(&disk.label()))? })
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
        self.past()?.read(page, offset, out)
    }

    /// Fills memory with whole pages, each as long as its memory, by several threads. Images are read once,
    /// and summed on the way. After an error any of the memory may be filled or not. For memory of a GPU
    /// there is [`DeviceCopier`](crate::DeviceCopier).
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// # use remanent::DeviceChoice;
    /// # let directory = tempfile::tempdir()?;
    /// let store = Store::open(directory.path(), Options::default().device(DeviceChoice::Host))?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"keys".to_vec(), Place::Disk);
    /// batch.create_from(b"values".to_vec(), Place::Disk);
    /// let pages = store.commit(batch)?.pages;
    ///
    /// let (mut keys, mut values) = ([0; 4], [0; 6]);
    /// let view = Store::open_read_only(directory.path())?;
    /// view.read_pages(&mut [(pages[0], &mut keys[..]), (pages[1], &mut values[..])])?;
    /// assert_eq!((&keys, &values), (b"keys", b"values"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors As for [`read`](Self::read); [`Error::OutOfBounds`] for memory that is shorter or longer than
    /// its page.
    pub fn read_pages(&self, pages: &mut [(PageId, &mut [u8])]) -> Result<()> {
        let past = self.past()?;
        for (page, out) in &*pages {
            let (len, page_len) = (out.len() as u64, past.page_len(*page)?);
            if len != page_len {
                return Err(Error::OutOfBounds { page: *page, offset: 0, len, page_len });
            }
        }
        let read = |(page, out): &mut (PageId, &mut [u8])| {
            huge_pages::advise(out);
            past.read(*page, 0, out)
        };
        parallel::for_each(parallel::threads(READERS_MAX), pages, read).map(drop)
    }

    /// Proves pages: reads all that their bytes are made from, by several threads, holds it against its
    /// checksums, and keeps none of it. For a caller that has to know that pages can be read before it
    /// writes over what it has. However long a page is, no more than pieces of it are in memory.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// # use remanent::DeviceChoice;
    /// # let directory = tempfile::tempdir()?;
    /// let store = Store::open(directory.path(), Options::default().device(DeviceChoice::Host))?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"weights".to_vec(), Place::Disk);
    /// let pages = store.commit(batch)?.pages;
    ///
    /// let (view, mut weights) = (Store::open_read_only(directory.path())?, *b"current");
    /// view.prove_pages(&pages)?;
    /// view.read_pages(&mut [(pages[0], &mut weights[..])])?;
    /// assert_eq!(&weights, b"weights");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn prove_pages(&self, pages: &[PageId]) -> Result<()> {
        let past = self.past()?;
        let prove = |(): &mut (), index: usize| past.prove(pages[index]);
        parallel::map_indexed(parallel::threads(READERS_MAX), pages.len(), || (), prove).map(drop)
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
