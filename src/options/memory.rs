//! Options of page memory.

use std::fmt;
use std::sync::Arc;

use remanent_format::{PageInfo, Place};

use super::caller_memory::CallerMemory;
use super::{Budget, PageLoad};
#[cfg(doc)]
use crate::error::Error;

/// A function that returns the memory for a page, or `None`.
type PageMemoryFn = dyn Fn(&PageInfo) -> Option<CallerMemory> + Send + Sync;

/// A [`PageMemoryFn`], shared by clones of the options.
#[derive(Clone)]
pub(crate) struct PageMemorySource(pub Arc<PageMemoryFn>);

impl fmt::Debug for PageMemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageMemorySource")
    }
}

/// Options that limit the memory for pages and determine how an open loads pages.
///
/// ```
/// use remanent::options::MemoryOptions;
/// use remanent::{Error, Options, Place};
/// let memory = MemoryOptions::new().budget(Place::Host, 1 << 20);
/// let store = Options::new().memory(memory).open_temporary()?;
/// let mut batch = store.batch();
/// batch.create(2 << 20, Place::Host);
/// assert!(matches!(store.commit(batch), Err(Error::OverBudget { .. })));
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MemoryOptions {
    /// The limits of places in bytes.
    pub budget: Budget,
    /// The time at which an open loads pages into memory.
    pub load: PageLoad,
    /// The source of caller-owned memory for pages.
    pub(crate) page_memory: Option<PageMemorySource>,
    /// The ranks with which an open shares the loading of pages.
    #[cfg(feature = "nccl")]
    pub(crate) gather: Option<super::GatherSource>,
}

impl MemoryOptions {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the budget of `place` in bytes. Default: no limit, except that [`Place::Disk`] has 128 MiB
    /// ([`Budget`]).
    ///
    /// Set it to share a GPU or a host with other programs. A batch that does not fit fails with [`Error::OverBudget`].
    /// If [`Options::tiers`](super::Options::tiers) are set, other pages are demoted instead.
    #[must_use]
    pub fn budget(mut self, place: Place, bytes: u64) -> Self {
        self.budget = self.budget.with(place, bytes);
        self
    }

    /// Sets when an open loads pages into memory. Default: [`PageLoad::Eager`].
    ///
    /// Use [`PageLoad::OnDemand`] if a process must serve requests before a large store is fully loaded. The open then
    /// returns when three steps are complete:
    ///
    /// - The page table is read.
    /// - The memory of all pages is allocated.
    /// - The pages that the log changed since the newest snapshot are loaded.
    ///
    /// All other pages are *unloaded*, and are loaded in the background. A read, a lease or a batch that needs an
    /// unloaded page waits while that page is loaded before others. [`Store::unloaded_pages`] returns how many pages
    /// are unloaded, and [`Store::wait_loaded`] waits until none is.
    ///
    /// The open loads all pages if the snapshot is not recorded as verified, for example because a crash prevented it.
    /// While any page is unloaded, new snapshots remove no files, and [`Store::prune`] and restores wait.
    ///
    /// A damaged image is detected only when its page is loaded. Every call that needs the page then fails with
    /// [`Error::Damaged`], and the store is poisoned, but can still be read. The next open with [`PageLoad::Eager`]
    /// detects such damage, and skips the snapshot if it can.
    ///
    /// ```
    /// use remanent::options::{MemoryOptions, PageLoad};
    /// use remanent::{Options, Place, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path)?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host).page();
    /// batch.write(page, 0, b"then");
    /// let page = store.commit(batch)?.pages[0];
    /// store.snapshot()?;
    /// store.close()?;
    ///
    /// let memory = MemoryOptions::new().load(PageLoad::OnDemand);
    /// let store = Options::new().memory(memory).open(&path)?;
    /// assert_eq!(store.recovered().unloaded_pages, 1);
    /// let mut bytes = [0; 4];
    /// store.read(page, 0, &mut bytes)?; // loads the page if it is not loaded yet
    /// assert_eq!(&bytes, b"then");
    /// store.wait_loaded()?;
    /// assert_eq!(store.unloaded_pages().pages, 0);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// [`Store::unloaded_pages`]: crate::Store::unloaded_pages
    /// [`Store::wait_loaded`]: crate::Store::wait_loaded
    /// [`Store::prune`]: crate::Store::prune
    #[must_use]
    pub fn load(mut self, load: PageLoad) -> Self {
        self.load = load;
        self
    }

    /// Sets a source of caller-owned memory for pages. Default: none, so the store allocates the memory of all pages.
    ///
    /// Use it to recover weights directly into a framework's tensors, without a second copy. The open calls `source` on
    /// its own thread for each page with a length above 0, passing the page's state after recovery: key, length, place,
    /// metadata. If `source` returns `None`, the store allocates the page's memory. A page in caller-owned memory
    /// behaves as after [`WriteBatch::create_in`].
    ///
    /// The caller must have no work in flight on the memory. The memory contains the page's bytes when the open has
    /// returned or, with [`PageLoad::OnDemand`], when the page is loaded. If the open fails, the content of the memory
    /// is undefined. An open that skips a damaged snapshot calls `source` again.
    ///
    /// The open fails with [`Error::Refused`] in these cases:
    ///
    /// - The length of the memory differs from that of the page.
    /// - The memory is in another place than the page.
    /// - The device does not recognize the memory.
    /// - The memory of two pages overlaps.
    ///
    /// The open fails with [`Error::Panicked`] if `source` panics.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::device::CallerMemory;
    /// use remanent::options::MemoryOptions;
    /// use remanent::{DeviceChoice, Options, Place};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let options = Options::new().device(DeviceChoice::Host);
    /// let store = options.clone().open(&path)?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"recovered".to_vec(), Place::Device(0)).key("weight");
    /// let page = store.commit(batch)?.pages[0];
    /// store.close()?;
    ///
    /// // A stand-in for a tensor, which `CallerMemory::from_cuda` would describe.
    /// let tensor = CallerMemory::from_vec(vec![0; 9], Place::Device(0));
    /// let of_weight = tensor.clone();
    /// let memory = MemoryOptions::new().page_memory(move |info| {
    ///     let is_weight = info.key.as_ref().is_some_and(|key| key.as_str() == Some("weight"));
    ///     is_weight.then(|| of_weight.clone())
    /// });
    /// let store = options.memory(memory).open(&path)?;
    /// let bytes = store.caller_bytes(&tensor)?;
    /// let mut found = [0; 9];
    /// bytes.read(0, &mut found)?;
    /// assert_eq!((&found, bytes.page()), (b"recovered", Some(page)));
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// [`WriteBatch::create_in`]: crate::WriteBatch::create_in
    #[must_use]
    pub fn page_memory(
        mut self,
        source: impl Fn(&PageInfo) -> Option<CallerMemory> + Send + Sync + 'static,
    ) -> Self {
        self.page_memory = Some(PageMemorySource(Arc::new(source)));
        self
    }
}
