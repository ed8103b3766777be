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

/// How much memory pages may use, and how an open loads them.
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
    /// When an open loads pages into memory.
    pub load: PageLoad,
    /// The source of caller-owned memory for pages.
    pub(crate) page_memory: Option<PageMemorySource>,
}

impl MemoryOptions {
    /// Returns the defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the budget of `place` in bytes. Default: no limit, except that [`Place::Disk`] has 128 MiB
    /// ([`Budget`]).
    ///
    /// Set it to share a GPU or a host with other programs. A batch that does not fit fails with
    /// [`Error::OverBudget`], or has other pages demoted if [`Options::tiers`](super::Options::tiers) are set.
    #[must_use]
    pub fn budget(mut self, place: Place, bytes: u64) -> Self {
        self.budget = self.budget.with(place, bytes);
        self
    }

    /// Sets when an open loads pages into memory. Default: [`PageLoad::Eager`], which loads all of them
    /// before the open returns.
    ///
    /// Use [`PageLoad::OnDemand`] if a process must serve before all of a large store is loaded.
    ///
    /// With [`PageLoad::OnDemand`], the open returns when the page table is complete, the memory of all pages
    /// is allocated, and the pages that the log changed since the newest snapshot are loaded. The other pages
    /// are *unloaded*, and are loaded in the background. A read, a lease or a batch that needs an unloaded
    /// page has it loaded next and waits for it. [`Store::unloaded_pages`] returns how many remain, and
    /// [`Store::wait_loaded`] waits for all of them.
    ///
    /// Pages stay unloaded only if the snapshot is recorded as verified; if a crash prevented that, the open
    /// loads all pages. While any page is unloaded, new snapshots remove nothing, and [`Store::prune`] and
    /// restores wait. A damaged image is detected only when its page is loaded: every call that needs the
    /// page then fails with [`Error::Damaged`], and the store is poisoned, but can still be read. The next
    /// eager open detects all damage that it would have found before, and skips the snapshot if it can.
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

    /// Sets a source of memory for pages. Default: none, so the store allocates the memory of all pages.
    ///
    /// Use it to recover weights directly into a framework's tensors, without a second copy. The open calls `source` on its own
    /// thread for each page with a length above 0, passing the page's state after recovery: key, length,
    /// place, metadata. If `source` returns `None`, the store allocates the page's memory. A page in
    /// caller-owned memory behaves as after [`WriteBatch::create_in`].
    ///
    /// The caller must have no work in flight on the memory. The memory does not contain the page until the
    /// open has returned or, with [`PageLoad::OnDemand`], until the page is
    /// loaded. If the open fails, the content of the memory is undefined. An open that skips a damaged
    /// snapshot calls `source` again.
    ///
    /// The open fails with [`Error::Refused`] if the length of the memory differs from that of the
    /// page, if the memory is in another place, or if the device does not know it; with
    /// [`Error::Refused`] if the memory of two pages overlaps; and with [`Error::Panicked`] if `source`
    /// panics.
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
