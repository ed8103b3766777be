//! Read-only access to a state of a store, concurrently with a writer. A view writes nothing and needs no device.
//!
//! This module contains the handle. [`crate::history::state`] finds the state and reads pages.

use std::fmt;
use std::sync::Arc;

use remanent_format::{Lsn, Metadata, PageId, PageInfo, SnapshotId, StoreId};

use crate::base::process::Process;
use crate::base::{huge_pages, parallel};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::history::point::StatePoint;
use crate::history::state::{KnownFiles, PastState, check_is_store};

/// The maximum number of threads that read pages for one call. Each thread reads a few gigabytes per second from the
/// page cache, and eight threads saturate the memory bandwidth.
const READERS_MAX: usize = 8;

/// A read-only view of one state of a store: its pages, root and bytes right after one batch. Returned by
/// [`Store::open_at`](crate::Store::open_at) and [`Store::open_read_only`](crate::Store::open_read_only), and with the
/// feature `archive` by `View::open_archive`.
///
/// A view never moves to a later batch, and the files that it needs are kept during its lifetime. There is one
/// exception: where no lock can be taken, for example on read-only media, a writer elsewhere may remove files, and
/// reads then fail with [`Error::Overtaken`].
///
/// The bytes of a page are composed when they are read, from its image and its operations in the log. At most 64 MiB of
/// composed bytes are cached for later reads. If the data of a page on disk is damaged, only reads of that page fail.
///
/// An image has one checksum. The first read of a page longer than 4 MiB therefore reads the whole image to verify it,
/// one piece at a time. Later reads read only the required parts, but at least 1 MiB. Batches that set scattered
/// elements of a page are read again for each window, so the windows of a sequential reader grow up to 32 MiB.
pub struct View {
    opener: Process,
    past: PastState,
}

impl View {
    /// Opens a state on any disk, such as a simulated disk in a test.
    ///
    /// # Errors
    /// The errors of [`Store::open_at`](crate::Store::open_at).
    #[doc(hidden)]
    pub fn open_on(disk: &Arc<dyn Disk>, point: Option<&StatePoint>) -> Result<Self> {
        let past = PastState::open(disk, point);
        Ok(Self { opener: Process::current(), past: past.map_err(|error| error.in_store(&disk.label()))? })
    }

    /// Returns the state if this process opened the view. A forked child gets an error, because locks that the parent's
    /// threads held at the fork are never released in the child.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn past(&self) -> Result<&PastState> {
        self.opener.check().map(|()| &self.past)
    }

    /// Returns the id of the store.
    #[must_use]
    pub fn id(&self) -> StoreId {
        self.past.store().store
    }

    /// Returns the newest batch that the view reflects.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.past.lsn()
    }

    /// Returns the snapshot from which the state is composed, or `None` if the state is composed from the log alone.
    #[must_use]
    pub fn base(&self) -> Option<SnapshotId> {
        self.past.base()
    }

    /// Returns all pages, in the order of their ids.
    pub fn pages(&self) -> impl ExactSizeIterator<Item = PageInfo> {
        self.past.table().pages()
    }

    /// Returns the length, version, key and metadata of a page.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::Forked`].
    pub fn page(&self, page: PageId) -> Result<PageInfo> {
        self.past()?.table().get(page).ok_or(Error::UnknownPage { page })
    }

    /// Returns the information of the page with key `key`.
    ///
    /// # Errors
    /// [`Error::UnknownKey`], [`Error::Forked`].
    pub fn page_by_key(&self, key: impl AsRef<[u8]>) -> Result<PageInfo> {
        let key = key.as_ref();
        self.past()?.table().get_key(key).ok_or_else(|| Error::unknown_key(key))
    }

    /// Returns the root: the metadata of the store.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        self.past.table().root()
    }

    /// Fills `out` with the page's bytes starting at `offset`.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::OutOfBounds`]; [`Error::Damaged`] if the files from which this page is composed
    /// are damaged, which does not affect other pages; [`Error::Archive`] if data of an archive is missing, damaged or
    /// unreachable; [`Error::Overtaken`]; [`Error::OutOfMemory`]; [`Error::Forked`].
    pub fn read(&self, page: PageId, offset: u64, out: &mut [u8]) -> Result<()> {
        self.past()?.read(page, offset, out)
    }

    /// Reads whole pages into memory with several threads. Each slice must have the length of its page. Images are read
    /// once, and checksummed in the same pass. After an error, the contents of the slices are undefined. To read into
    /// GPU memory, use [`DeviceCopier`](crate::history::DeviceCopier).
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// # use remanent::DeviceChoice;
    /// # let directory = tempfile::tempdir()?;
    /// let store = Options::new().device(DeviceChoice::Host).open(directory.path())?;
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
    /// # Errors
    /// The errors of [`read`](Self::read); [`Error::OutOfBounds`] if the length of a slice differs from that of its
    /// page.
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

    /// Verifies that pages are readable: several threads read all data from which the pages are composed, compare the
    /// data with its checksums, and discard it. Use this before overwriting another copy of the data. Only pieces of a
    /// page are in memory at a time, regardless of its length.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// # use remanent::DeviceChoice;
    /// # let directory = tempfile::tempdir()?;
    /// let store = Options::new().device(DeviceChoice::Host).open(directory.path())?;
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
    /// The errors of [`read`](Self::read).
    pub fn prove_pages(&self, pages: &[PageId]) -> Result<()> {
        let past = self.past()?;
        let prove = |(): &mut (), index: usize| past.prove(pages[index]);
        parallel::map_indexed(parallel::threads(READERS_MAX), pages.len(), || (), prove).map(drop)
    }

    /// Returns the CRC-32 of a page's bytes as recorded with its image, without reading the bytes. Returns `None` if
    /// later batches changed the page, so that no image contains exactly its bytes, and for an empty page.
    ///
    /// # Errors
    /// [`Error::UnknownPage`], [`Error::Forked`].
    pub fn image_checksum(&self, page: PageId) -> Result<Option<u32>> {
        let past = self.past()?;
        let is_empty = past.page_len(page)? == 0;
        Ok(past.exact_image(page).filter(|_| !is_empty).map(|image| image.raw_crc))
    }
}

/// The files of a store, read once to open many of its states, such as all versions of a run.
///
/// Opening a state reads all manifests of the store, whose number grows with the number of kept snapshots. Views that
/// are opened from this value share one reading. If the files have changed since then, the directory is read again to
/// find a state. Keep this value only while states are opened, because it also keeps some files open.
///
/// ```
/// use remanent::history::KeptStates;
/// use remanent::{Place, Store};
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("mystore");
/// let store = Store::open(&path)?;
/// let mut batch = store.batch();
/// batch.create_from(*b"one", Place::Host);
/// let page = store.commit(batch)?.pages[0];
/// let first = store.snapshot_with("first")?;
/// let mut batch = store.batch();
/// batch.write(page, 0, b"two");
/// store.commit(batch)?;
/// let second = store.snapshot_with("second")?;
///
/// let states = KeptStates::read(&path)?;
/// for (snapshot, expected) in [(first, b"one"), (second, b"two")] {
///     let view = states.open(snapshot.end)?;
///     let mut bytes = [0; 3];
///     view.read(page, 0, &mut bytes)?;
///     assert_eq!(&bytes, expected);
/// }
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct KeptStates {
    opener: Process,
    disk: Arc<dyn Disk>,
    known: KnownFiles,
}

impl KeptStates {
    /// Reads the files on any disk, such as a simulated disk in a test.
    ///
    /// # Errors
    /// The errors of [`KeptStates::read`].
    #[doc(hidden)]
    pub fn read_on(disk: &Arc<dyn Disk>) -> Result<Self> {
        let known = check_is_store(disk).and_then(|()| KnownFiles::read(disk));
        let known = known.map_err(|error| error.in_store(&disk.label()))?;
        Ok(Self { opener: Process::current(), disk: disk.clone(), known })
    }

    /// Opens the state after batch `lsn`, like [`Store::open_at`](crate::Store::open_at).
    ///
    /// # Errors
    /// The errors of `Store::open_at`; [`Error::Forked`].
    pub fn open(&self, lsn: Lsn) -> Result<View> {
        self.opener.check()?;
        let past = PastState::open_known(&self.disk, &self.known, lsn);
        let past = past.map_err(|error| error.in_store(&self.disk.label()))?;
        Ok(View { opener: self.opener, past })
    }
}

impl fmt::Debug for KeptStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptStates").field("directory", &self.disk.label()).finish_non_exhaustive()
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
