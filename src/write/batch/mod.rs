//! Batches under construction: the operations that a caller requested, and their encoding as a payload.
//!
//! Building a batch never fails, so calls can be chained. If memory for a copy cannot be allocated, the commit returns
//! the error. Before the first byte is logged, `encode` performs all checks that require no read of a page.

mod copies;
mod create_page;
mod device_ops;
mod changed_ranges;
mod encode;
mod page_changes;
mod sources;
mod sparse;
mod whole_pages;
mod working_copy;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use changed_ranges::ElementChanges;
pub(crate) use copies::{CopiedBytes, CopiedPage, CopySources};
pub use create_page::CreatePage;
pub(crate) use device_ops::{CapturedPart, DeviceFill, FillSource};
pub(crate) use encode::BatchFacts;
pub use page_changes::PageChanges;
pub use sources::ByteSource;
pub(crate) use sources::SourcePage;
pub(crate) use sparse::SparseElements;
pub(crate) use whole_pages::{OpImages, WHOLE_PAGE_LEN_MIN, WholePage};
pub use working_copy::WorkingCopy;
pub(crate) use working_copy::{ChunkDigests, CopyShadow, UNKNOWN_DIGEST};

use remanent_format::{Epoch, Key, Metadata, PageId, PageInfo, Place, Value, Width};

use crate::applier::Handover;
use crate::base::allocation::{copied, make_room, push};
use crate::device::DeviceBytes;
use crate::error::{Error, Result};
use crate::log::SpacePurpose;

/// An id that no page ever has, because ids begin at 1.
const NO_PAGE: PageId = PageId(0);

/// A reference to a page in a batch: an existing page, or a page that the same batch creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRef(OpTarget);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum OpTarget {
    Existing(PageId),
    New(NewPage),
}

/// A page that a batch creates, as a target for later operations of the same batch. In any other batch the value refers
/// to no page.
///
/// Once the batch is committed, [`NewPage::index`] is the position of the page's id in [`crate::CommitReceipt::pages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NewPage {
    batch: u64,
    index: usize,
}

impl NewPage {
    /// Returns the number of pages that the batch creates before this page.
    #[must_use]
    pub fn index(self) -> usize {
        self.index
    }
}

impl From<PageId> for PageRef {
    fn from(page: PageId) -> Self {
        Self(OpTarget::Existing(page))
    }
}

impl From<PageInfo> for PageRef {
    fn from(info: PageInfo) -> Self {
        info.page.into()
    }
}

impl From<&PageInfo> for PageRef {
    fn from(info: &PageInfo) -> Self {
        info.page.into()
    }
}

impl From<NewPage> for PageRef {
    fn from(page: NewPage) -> Self {
        Self(OpTarget::New(page))
    }
}

/// A sequence of operations that become visible and durable together, or not at all.
///
/// ```
/// use remanent::{Place, Store};
/// let store = Store::temporary()?;
/// let mut batch = store.batch();
/// let page = batch.create(8, Place::Host).page();
/// batch.write(page, 2, &[7, 7]).note("first bytes");
/// let committed = store.commit(batch)?;
///
/// let mut bytes = [0; 8];
/// store.read(committed.pages[0], 0, &mut bytes)?;
/// assert_eq!(bytes, [0, 0, 7, 7, 0, 0, 0, 0]);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a batch does nothing until it is committed"]
pub struct WriteBatch {
    /// A number that distinguishes this batch's new pages from the new pages of other batches. The number is 0 until
    /// the batch creates a page, because all threads draw numbers from one counter, and most batches create no pages.
    number: u64,
    steps: Vec<BatchStep>,
    new_pages: usize,
    /// The caller-owned memory for new pages, each with the number of pages that the batch creates before the page.
    lent: Vec<(usize, DeviceBytes)>,
    expectations: Vec<(PageId, Epoch)>,
    /// The receiver for the memory of the page that the batch deletes, if the caller wants this memory.
    handover: Option<Arc<Handover>>,
    /// The error with which the commit must fail, if any: memory for a copy could not be allocated, or a key is
    /// invalid.
    refused: Option<Error>,
}

#[derive(Clone, Debug)]
enum BatchStep {
    Create {
        len: u64,
        place: Place,
        key: Option<Key>,
        metadata: Metadata,
    },
    Clone {
        source: PageRef,
    },
    Copy {
        source: PageRef,
        range: Range<u64>,
        target: PageRef,
        offset: u64,
    },
    Write {
        page: PageRef,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// Sets all bytes of a page from a source. This step follows the step that sets the page's length.
    Source {
        page: PageRef,
        len: u64,
        source: Arc<dyn ByteSource>,
    },
    Masked {
        page: PageRef,
        offset: u64,
        width: Width,
        mask: Vec<u8>,
        bytes: Vec<u8>,
    },
    Scatter {
        page: PageRef,
        width: Width,
        indices: Vec<u32>,
        values: Vec<u8>,
    },
    WriteDevice {
        page: PageRef,
        offset: u64,
        bytes: DeviceBytes,
    },
    ScatterDevice {
        page: PageRef,
        width: Width,
        indices: DeviceBytes,
        values: DeviceBytes,
    },
    Capture {
        copy: WorkingCopy,
        ranges: Option<Vec<Range<u64>>>,
    },
    Fill {
        page: PageRef,
        offset: u64,
        len: u64,
        pattern: Vec<u8>,
    },
    Resize {
        page: PageRef,
        len: u64,
    },
    Delete {
        page: PageRef,
    },
    Move {
        page: PageRef,
        place: Place,
    },
    SetMetadata {
        page: PageRef,
        name: String,
        value: Value,
    },
    RemoveMetadata {
        page: PageRef,
        name: String,
    },
    SetRoot {
        name: String,
        value: Value,
    },
    RemoveRoot {
        name: String,
    },
    Note {
        text: String,
    },
}

impl WriteBatch {
    /// Returns the number of operations that were added to the batch. A commit may log more or fewer operations.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.steps.len()
    }

    /// Returns `page`, or a page that never exists if `page` belongs to another batch.
    fn own(&self, page: impl Into<PageRef>) -> PageRef {
        match page.into() {
            PageRef(OpTarget::New(new)) if new.batch != self.number => PageRef(OpTarget::Existing(NO_PAGE)),
            page => page,
        }
    }

    fn step(&mut self, step: BatchStep) -> &mut Self {
        if let Err(error) = push(&mut self.steps, step) {
            self.refused.get_or_insert(error);
        }
        self
    }

    /// Copies data that the caller passed. If the allocation fails, returns an empty list and makes the commit fail.
    fn copied<T: Copy>(&mut self, given: &[T]) -> Vec<T> {
        copied(given).unwrap_or_else(|error| {
            self.refused.get_or_insert(error);
            Vec::new()
        })
    }

    /// Returns the error with which the commit must fail, if any.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if memory for a copy or an operation could not be allocated; the error of an invalid key.
    pub(crate) fn check_copies(&self) -> Result<()> {
        self.refused.clone().map_or(Ok(()), Err)
    }

    /// Returns an operation whose details later calls set. Returns `None` if the batch cannot be committed, because the
    /// operation may then be missing.
    fn created(&mut self, step: usize) -> Option<&mut BatchStep> {
        if self.refused.is_some() { None } else { self.steps.get_mut(step) }
    }

    fn new_page(&mut self) -> NewPage {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if self.number == 0 {
            self.number = NEXT.fetch_add(1, Ordering::Relaxed);
        }
        self.new_pages += 1;
        NewPage { batch: self.number, index: self.new_pages - 1 }
    }

    /// Creates a page of `len` zeros. Chain calls to the result to set the page's key and metadata.
    /// [`CreatePage::page`] returns a reference to the page for later calls.
    pub fn create(&mut self, len: u64, place: Place) -> CreatePage<'_> {
        self.step(BatchStep::Create { len, place, key: None, metadata: Metadata::new() });
        // If the operation could not be added, the batch cannot be committed.
        let (step, page) = (self.steps.len().saturating_sub(1), self.new_page());
        CreatePage::new(self, step, page)
    }

    /// Creates a page in caller-owned memory, such as a tensor or memory from [`Store::device_bytes`]. The page has the
    /// length of that memory.
    ///
    /// Initially the page contains zeros. To keep the memory's contents, write them to the page with
    /// [`WriteBatch::write_device`] from the same memory in the same batch.
    ///
    /// After the commit, only the store may write to the memory, and it logs every change first. The caller's kernels
    /// may read the memory, ordered by [`Store::pin`], which keeps the page at its address, or by [`Store::lease`]. The
    /// page leaves the memory when it is resized, moved to another place, deleted, or changed while it is leased. A
    /// restore overwrites the page in this memory. When the store is opened again, the page is in the store's own
    /// memory in the same place.
    ///
    /// The store holds the handle until the page has left the memory and no work in flight uses the memory. The next
    /// commit, [`Store::trim`] or the close then drops the handle on its own thread. [`DeviceBytes::page`] returns the
    /// page that is in the memory.
    ///
    /// The page takes no additional budget, because the memory belongs to the caller or was counted when the store
    /// allocated it.
    ///
    /// ```
    /// use remanent::{Ack, Options, Place};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::new().device(DeviceChoice::Host);
    /// let store = options.ack(Ack::Applied).open_temporary()?;
    /// let tensor = store.device_bytes(8, Place::Device(0))?; // or `caller_bytes`, for a framework's
    /// let mut batch = store.batch();
    /// let page = batch.create_in(&tensor).key("weight").page();
    /// batch.write(page, 2, &[7, 7]);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let mut bytes = [0; 8];
    /// tensor.read(0, &mut bytes)?;
    /// assert_eq!(bytes, [0, 0, 7, 7, 0, 0, 0, 0]);
    /// assert_eq!(tensor.page(), Some(page));
    /// assert!(tensor.write(0, &[1]).is_err(), "only the store writes there");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// The commit fails and leaves the store unchanged with [`Error::Refused`] if another page is in part of the memory,
    /// even one that the same batch deletes; if the memory belongs to another store or is being written; or if the store
    /// cannot wait for the work on the stream that fills the memory.
    ///
    /// [`Store::pin`]: crate::Store::pin
    /// [`Store::lease`]: crate::Store::lease
    /// [`Store::trim`]: crate::Store::trim
    /// [`Store::device_bytes`]: crate::Store::device_bytes
    pub fn create_in(&mut self, memory: &DeviceBytes) -> CreatePage<'_> {
        let CreatePage { step, page, .. } = self.create(memory.byte_len(), memory.place());
        if let Err(error) = push(&mut self.lent, (page.index(), memory.clone())) {
            self.refused.get_or_insert(error);
        }
        CreatePage::new(self, step, page)
    }

    /// Creates a page with the contents `bytes`. A `Vec` is moved into the batch without a copy.
    ///
    /// If the pages that a batch writes as a whole total at least a quarter of a segment, their bytes are written once,
    /// to an image file. The log and the next snapshot then contain only references to the images. A
    /// [`WriteBatch::write`] of all bytes of a page is handled in the same way.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// let page = batch.create_from(vec![1; 8 << 20], Place::Host).key("embedding").page();
    /// let committed = store.commit(batch)?;
    /// assert_eq!(store.page(committed.pages[page.index()])?.len, 8 << 20);
    /// assert!(store.stats().log.bytes < 4096, "the log only names it");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn create_from(&mut self, bytes: impl Into<Vec<u8>>, place: Place) -> CreatePage<'_> {
        let bytes = bytes.into();
        let CreatePage { step, page, .. } = self.create(bytes.len() as u64, place);
        if !bytes.is_empty() {
            self.step(BatchStep::Write { page: page.into(), offset: 0, bytes });
        }
        CreatePage::new(self, step, page)
    }

    /// Replaces `bytes.len()` bytes of the page, starting at `offset`.
    pub fn write(&mut self, page: impl Into<PageRef>, offset: u64, bytes: &[u8]) -> &mut Self {
        let bytes = self.copied(bytes);
        self.step(BatchStep::Write { page: self.own(page), offset, bytes })
    }

    /// Replaces elements of a range according to a mask. An element is replaced if its bit in `mask` is 1. The lowest
    /// bit belongs to the first element.
    ///
    /// `bytes` covers the whole range. `mask` has one bit per element, rounded up to whole bytes. The log stores the
    /// whole range, so [`WriteBatch::scatter`] takes less log space unless most elements are replaced.
    pub fn write_masked(
        &mut self,
        page: impl Into<PageRef>,
        offset: u64,
        width: Width,
        mask: &[u8],
        bytes: &[u8],
    ) -> &mut Self {
        let (mask, bytes) = (self.copied(mask), self.copied(bytes));
        self.step(BatchStep::Masked { page: self.own(page), offset, width, mask, bytes })
    }

    /// Replaces single elements. `values` contains one element for each index, in the same order. Indices
    /// count elements from the start of the page, and must be distinct.
    ///
    /// The log stores each element with its index, which takes at most 4 bytes. Indices are sorted if
    /// necessary, and stored as gaps if that is shorter: about 1.3 bytes each if one element in a hundred is
    /// replaced.
    pub fn scatter(
        &mut self,
        page: impl Into<PageRef>,
        width: Width,
        indices: &[u32],
        values: &[u8],
    ) -> &mut Self {
        let (indices, values) = (self.copied(indices), self.copied(values));
        self.step(BatchStep::Scatter { page: self.own(page), width, indices, values })
    }

    /// Fills `len` bytes, starting at `offset`, with copies of a pattern of 1, 2, 4, 8 or 16 bytes.
    pub fn fill(&mut self, page: impl Into<PageRef>, offset: u64, len: u64, pattern: &[u8]) -> &mut Self {
        let pattern = self.copied(pattern);
        self.step(BatchStep::Fill { page: self.own(page), offset, len, pattern })
    }

    /// Changes the length of the page. New bytes are zeros.
    pub fn resize(&mut self, page: impl Into<PageRef>, len: u64) -> &mut Self {
        self.step(BatchStep::Resize { page: self.own(page), len })
    }

    /// Deletes the page. Its key becomes available for other pages, but its id is never reused.
    pub fn delete(&mut self, page: impl Into<PageRef>) -> &mut Self {
        self.step(BatchStep::Delete { page: self.own(page) })
    }

    /// Moves the page to another place, for example from one GPU to another, or between a GPU and pinned host memory.
    /// Its contents, metadata and epoch are unchanged, and its Lsn becomes that of the batch.
    ///
    /// The budget of the destination must have room for the page. The old memory is freed once neither the device's
    /// queue nor a lease uses it. An existing lease keeps its contents and its address. A move to the page's current
    /// place only costs a record in the log.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// let page = batch.create(8, Place::Host).page();
    /// batch.write(page, 0, &[7; 8]);
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let epoch = store.page(page)?.epoch;
    /// let mut batch = store.batch();
    /// batch.move_to(page, Place::Pinned);
    /// store.commit(batch)?;
    ///
    /// let moved = store.page(page)?;
    /// assert_eq!((moved.place, moved.epoch), (Place::Pinned, epoch));
    /// let mut bytes = [0; 8];
    /// store.read(page, 0, &mut bytes)?;
    /// assert_eq!(bytes, [7; 8]);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// The commit fails with [`Error::OverBudget`], [`Error::OutOfMemory`] or [`Error::Unavailable`], and leaves
    /// the store unchanged, if the destination cannot hold the page.
    pub fn move_to(&mut self, page: impl Into<PageRef>, place: Place) -> &mut Self {
        self.step(BatchStep::Move { page: self.own(page), place })
    }

    /// Moves these pages to another place, like [`move_to`](Self::move_to).
    pub(crate) fn move_all_to(&mut self, pages: impl ExactSizeIterator<Item = PageId>, place: Place) {
        if let Err(error) = make_room(&mut self.steps, pages.len()) {
            self.refused.get_or_insert(error);
            return;
        }
        pages.for_each(|page| _ = self.move_to(page, place));
    }

    /// Sets one entry of the page's metadata, and replaces an entry with the same name.
    pub fn set_metadata(
        &mut self,
        page: impl Into<PageRef>,
        name: impl Into<String>,
        value: impl Into<Value>,
    ) -> &mut Self {
        self.step(BatchStep::SetMetadata { page: self.own(page), name: name.into(), value: value.into() })
    }

    /// Removes one entry of the page's metadata, if it exists.
    pub fn remove_metadata(&mut self, page: impl Into<PageRef>, name: impl Into<String>) -> &mut Self {
        self.step(BatchStep::RemoveMetadata { page: self.own(page), name: name.into() })
    }

    /// Sets one entry of the root, which is the store's own metadata, and replaces an entry with the same name.
    pub fn set_root(&mut self, name: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        self.step(BatchStep::SetRoot { name: name.into(), value: value.into() })
    }

    /// Removes one entry of the root, if it exists.
    pub fn remove_root(&mut self, name: impl Into<String>) -> &mut Self {
        self.step(BatchStep::RemoveRoot { name: name.into() })
    }

    /// Adds a text note. The log stores the note with the batch.
    pub fn note(&mut self, text: impl Into<String>) -> &mut Self {
        self.step(BatchStep::Note { text: text.into() })
    }

    /// Makes the commit fail with [`Error::Conflict`], and leave the store unchanged, unless the page has the epoch
    /// `epoch` when the batch is committed. Epoch 0 requires that the page does not exist.
    pub fn expect_epoch(&mut self, page: PageId, epoch: Epoch) -> &mut Self {
        if let Err(error) = push(&mut self.expectations, (page, epoch)) {
            self.refused.get_or_insert(error);
        }
        self
    }

    /// Deletes the page for which `handover` waits, and passes the page's memory to `handover`.
    pub(crate) fn hand_over(&mut self, handover: Arc<Handover>) -> &mut Self {
        let page = handover.page;
        self.handover = Some(handover);
        self.delete(page)
    }

    /// Returns the receiver for the memory of the page that the batch deletes, if any.
    pub(crate) fn handover(&self) -> Option<Arc<Handover>> {
        self.handover.clone()
    }

    pub(crate) fn new_pages(&self) -> usize {
        self.new_pages
    }

    /// Returns the caller-owned memory of each new page. `pages` contains the ids of the new pages. Pages of length 0
    /// are omitted, because they have no bytes.
    pub(crate) fn lent(&self, pages: &[PageId]) -> impl Iterator<Item = (PageId, &DeviceBytes)> {
        let with_bytes = self.lent.iter().filter(|(_, memory)| memory.byte_len() > 0);
        with_bytes.map(|(index, memory)| (pages[*index], memory))
    }

    pub(crate) fn expectations(&self) -> &[(PageId, Epoch)] {
        &self.expectations
    }

    /// Returns the existing pages that the batch resizes or clones. The batch needs memory in the places of these
    /// pages.
    pub(crate) fn pages_that_grow(&self) -> impl Iterator<Item = PageId> {
        self.steps.iter().filter_map(|step| match step {
            BatchStep::Resize { page: PageRef(OpTarget::Existing(page)), .. }
            | BatchStep::Clone { source: PageRef(OpTarget::Existing(page)) } => Some(*page),
            _ => None,
        })
    }

    /// Returns whether the batch is plain: it contains all of its bytes, moves no page, and writes too few bytes for
    /// images. Images are written for at least `ahead_bytes_min` bytes.
    pub(crate) fn is_plain(&self, ahead_bytes_min: u64) -> bool {
        let mut written = 0;
        let is_plain = self.steps.iter().all(|step| match step {
            BatchStep::Write { bytes, .. } => {
                written += bytes.len() as u64;
                true
            }
            BatchStep::Clone { .. }
            | BatchStep::Copy { .. }
            | BatchStep::Source { .. }
            | BatchStep::WriteDevice { .. }
            | BatchStep::ScatterDevice { .. }
            | BatchStep::Capture { .. }
            | BatchStep::Move { .. } => false,
            _ => true,
        });
        is_plain && written < ahead_bytes_min && self.lent.is_empty() && self.handover.is_none()
    }

    /// Returns the purpose for which the batch needs disk space. A batch that only deletes pages may use the reserve of
    /// a full disk, because the batch frees more space than it takes.
    pub(crate) fn space_purpose(&self) -> SpacePurpose {
        let is_delete = |step: &BatchStep| matches!(step, BatchStep::Delete { .. });
        let is_note = |step: &BatchStep| matches!(step, BatchStep::Note { .. });
        let only_deletes = self.steps.iter().any(is_delete)
            && self.steps.iter().all(|step| is_delete(step) || is_note(step));
        if only_deletes { SpacePurpose::Delete } else { SpacePurpose::User }
    }
}

/// Takes the operations out of a batch and leaves it empty, so that a chain of calls can be committed directly.
///
/// ```
/// use remanent::Store;
/// let store = Store::temporary()?;
/// store.commit(store.batch().set_root("step", 1u64))?;
/// # Ok::<(), remanent::Error>(())
/// ```
impl From<&mut WriteBatch> for WriteBatch {
    fn from(batch: &mut WriteBatch) -> Self {
        std::mem::take(batch)
    }
}

impl PageRef {
    fn existing(self) -> Option<PageId> {
        match self.0 {
            OpTarget::Existing(page) => Some(page),
            OpTarget::New(_) => None,
        }
    }

    fn resolve(self, pages: &[PageId]) -> PageId {
        match self.0 {
            OpTarget::Existing(page) => page,
            // The page may have been created in a clone of this batch, which has more pages.
            OpTarget::New(new) => pages.get(new.index).copied().unwrap_or(NO_PAGE),
        }
    }
}
