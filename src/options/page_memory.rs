//! Which of the caller's memory an open puts pages into.

use std::fmt;
use std::sync::Arc;

use remanent_format::PageInfo;

use super::{CallerMemory, Options};
#[cfg(doc)]
use crate::error::Error;

/// The caller's answer for each page, as a function.
type PageMemoryFn = dyn Fn(&PageInfo) -> Option<CallerMemory> + Send + Sync;

/// The function, shared by the clones of its options.
#[derive(Clone)]
pub(crate) struct PageMemorySource(pub Arc<PageMemoryFn>);

impl fmt::Debug for PageMemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageMemorySource")
    }
}

impl Options {
    /// Puts pages into memory that exists when the store is opened: so recovered weights land in a
    /// framework's tensors, and are there once. The open asks `source` for each page that has bytes, on its
    /// own thread, with the page as it is after the recovery: key, length, place, metadata. `None` leaves the
    /// page to the store's own memory. A page lives in what it is given as after [`WriteBatch::create_in`].
    ///
    /// No work of the caller's is under way in the memory, and what lies there is not the page until the open
    /// has returned; with [`PageLoad::OnDemand`](super::PageLoad::OnDemand), until the page is loaded. Where
    /// an open fails it leaves anything there. One that passes over a damaged snapshot asks again.
    ///
    /// The open fails with [`Error::MemoryRefused`] if the memory has another length than the page, is in
    /// another place, or is none that the device knows; with [`Error::MemoryInUse`] if two pages get parts in
    /// common; with [`Error::Panicked`] if `source` panics.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use remanent::{CallerMemory, DeviceChoice, Options, Place, Store};
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
