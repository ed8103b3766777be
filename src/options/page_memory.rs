//! Caller-owned memory into which an open loads pages.

use std::fmt;
use std::sync::Arc;

use remanent_format::PageInfo;

use super::Options;
use super::caller_memory::CallerMemory;
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

impl Options {
    /// Loads pages into memory that already exists when the store is opened, so that recovered weights are
    /// written directly into a framework's tensors, without a second copy. The open calls `source` on its own
    /// thread for each page with a length above 0, passing the page's state after recovery: key, length,
    /// place, metadata. If `source` returns `None`, the store allocates the page's memory. A page in
    /// caller-owned memory behaves as after [`WriteBatch::create_in`].
    ///
    /// The caller must have no work in flight on the memory. The memory does not contain the page until the
    /// open has returned or, with [`PageLoad::OnDemand`](super::PageLoad::OnDemand), until the page is
    /// loaded. If the open fails, the content of the memory is undefined. An open that skips a damaged
    /// snapshot calls `source` again.
    ///
    /// The open fails with [`Error::Refused`] if the length of the memory differs from that of the
    /// page, if the memory is in another place, if the device does not know it, or if the memory of two
    /// pages overlaps; and with [`Error::Panicked`] if `source` panics.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::device::CallerMemory;
    /// use remanent::{DeviceChoice, Options, Place, Store};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let options = Options::default().device(DeviceChoice::Host);
    /// let store = Store::open(&path, options.clone())?;
    /// let mut batch = store.batch();
    /// batch.create_from(b"recovered".to_vec(), Place::Device(0)).key("weight");
    /// let page = store.commit(batch)?.pages[0];
    /// store.close()?;
    ///
    /// // A stand-in for a tensor, which `CallerMemory::from_cuda` would describe.
    /// let tensor = CallerMemory::from_vec(vec![0; 9], Place::Device(0));
    /// let of_weight = tensor.clone();
    /// let store = Store::open(&path, options.page_memory(move |info| {
    ///     let is_weight = info.key.as_ref().is_some_and(|key| key.as_str() == Some("weight"));
    ///     is_weight.then(|| of_weight.clone())
    /// }))?;
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
