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
mod page_refs;
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
pub use page_refs::{NewPage, PageRef};
pub use sources::ByteSource;
pub(crate) use sources::SourcePage;
pub(crate) use sparse::SparseElements;
pub(crate) use whole_pages::{OpImages, WHOLE_PAGE_LEN_MIN, WholePage};
pub use working_copy::WorkingCopy;
pub(crate) use working_copy::{ChunkDigests, CopyShadow, UNKNOWN_DIGEST};

use remanent_format::{Epoch, Key, Metadata, PageId, Place, Value, Width};

use crate::applier::Handover;
use crate::base::allocation::{copied, make_room, push};
use crate::device::DeviceBytes;
use crate::error::{Error, Result};
use crate::log::SpacePurpose;
use page_refs::Target;

/// A sequence of operations that become visible and durable together, or not at all.
///
/// An operation names its page by an id, a key, or the reference that a create returned ([`PageRef`]).
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
    /// The keys by which operations name pages, one for each use.
    keys: Vec<Key>,
    new_pages: usize,
    /// The caller-owned memory for new pages. Each entry also contains the index of its page among the pages that the
    /// batch creates.
    lent: Vec<(usize, DeviceBytes)>,
    expectations: Vec<(PageId, Epoch)>,
    /// The receiver of the memory of the page that the batch deletes, if the caller requested this memory.
    handover: Option<Arc<Handover>>,
    /// The error with which the commit must fail, or `None`. The commit must fail if memory for a copy could not be
    /// allocated or if a key is invalid.
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
        source: Target,
    },
    Copy {
        source: Target,
        range: Range<u64>,
        target: Target,
        offset: u64,
    },
    Write {
        page: Target,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// Sets all bytes of a page from a source. This step follows the step that sets the page's length.
    Source {
        page: Target,
        len: u64,
        source: Arc<dyn ByteSource>,
    },
    Masked {
        page: Target,
        offset: u64,
        width: Width,
        mask: Vec<u8>,
        bytes: Vec<u8>,
    },
    Scatter {
        page: Target,
        width: Width,
        indices: Vec<u32>,
        values: Vec<u8>,
    },
    WriteDevice {
        page: Target,
        offset: u64,
        bytes: DeviceBytes,
    },
    ScatterDevice {
        page: Target,
        width: Width,
        indices: DeviceBytes,
        values: DeviceBytes,
    },
    Capture {
        copy: WorkingCopy,
        ranges: Option<Vec<Range<u64>>>,
    },
    Fill {
        page: Target,
        offset: u64,
        len: u64,
        pattern: Vec<u8>,
    },
    Resize {
        page: Target,
        len: u64,
    },
    Delete {
        page: Target,
    },
    Move {
        page: Target,
        place: Place,
    },
    SetMetadata {
        page: Target,
        name: String,
        value: Value,
    },
    RemoveMetadata {
        page: Target,
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

    /// Returns an error if the commit must fail.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if memory for a copy or an operation could not be allocated; the error of an invalid key.
    pub(crate) fn check_copies(&self) -> Result<()> {
        self.refused.clone().map_or(Ok(()), Err)
    }

    /// Returns the step at index `step`, so that a [`CreatePage`] can set its key or metadata. Returns `None` if memory
    /// for a step could not be allocated. The commit then fails, and the step may be missing.
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
        // If no step could be added, the commit fails, and the index is not used.
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
    /// The commit fails and leaves the store unchanged with [`Error::Refused`] if another page is in part of the
    /// memory, even one that the same batch deletes; if the memory belongs to another store or is being written; or if
    /// the store cannot wait for the work on the stream that fills the memory.
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
    pub fn write<'k>(&mut self, page: impl Into<PageRef<'k>>, offset: u64, bytes: &[u8]) -> &mut Self {
        let bytes = self.copied(bytes);
        let page = self.target(page);
        self.step(BatchStep::Write { page, offset, bytes })
    }

    /// Replaces elements of a range according to a mask. An element is replaced if its bit in `mask` is 1. The lowest
    /// bit belongs to the first element.
    ///
    /// `bytes` covers the whole range. `mask` has one bit per element, rounded up to whole bytes. The log stores the
    /// whole range, so [`WriteBatch::scatter`] takes less log space unless most elements are replaced.
    pub fn write_masked<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        offset: u64,
        width: Width,
        mask: &[u8],
        bytes: &[u8],
    ) -> &mut Self {
        let (mask, bytes) = (self.copied(mask), self.copied(bytes));
        let page = self.target(page);
        self.step(BatchStep::Masked { page, offset, width, mask, bytes })
    }

    /// Replaces single elements. `values` contains one element for each index, in the same order. Indices
    /// count elements from the start of the page, and must be distinct.
    ///
    /// The log stores each element with its index, which takes at most 4 bytes. Indices are sorted if
    /// necessary, and stored as gaps if that is shorter: about 1.3 bytes each if one element in a hundred is
    /// replaced.
    pub fn scatter<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        width: Width,
        indices: &[u32],
        values: &[u8],
    ) -> &mut Self {
        let (indices, values) = (self.copied(indices), self.copied(values));
        let page = self.target(page);
        self.step(BatchStep::Scatter { page, width, indices, values })
    }

    /// Fills `len` bytes, starting at `offset`, with copies of a pattern of 1, 2, 4, 8 or 16 bytes.
    pub fn fill<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        offset: u64,
        len: u64,
        pattern: &[u8],
    ) -> &mut Self {
        let pattern = self.copied(pattern);
        let page = self.target(page);
        self.step(BatchStep::Fill { page, offset, len, pattern })
    }

    /// Changes the length of the page. New bytes are zeros.
    pub fn resize<'k>(&mut self, page: impl Into<PageRef<'k>>, len: u64) -> &mut Self {
        let page = self.target(page);
        self.step(BatchStep::Resize { page, len })
    }

    /// Deletes the page. Its key becomes available for other pages, but its id is never reused.
    pub fn delete<'k>(&mut self, page: impl Into<PageRef<'k>>) -> &mut Self {
        let page = self.target(page);
        self.step(BatchStep::Delete { page })
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
    pub fn move_to<'k>(&mut self, page: impl Into<PageRef<'k>>, place: Place) -> &mut Self {
        let page = self.target(page);
        self.step(BatchStep::Move { page, place })
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
    pub fn set_metadata<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        name: impl Into<String>,
        value: impl Into<Value>,
    ) -> &mut Self {
        let page = self.target(page);
        self.step(BatchStep::SetMetadata { page, name: name.into(), value: value.into() })
    }

    /// Removes one entry of the page's metadata, if it exists.
    pub fn remove_metadata<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        name: impl Into<String>,
    ) -> &mut Self {
        let page = self.target(page);
        self.step(BatchStep::RemoveMetadata { page, name: name.into() })
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

    /// Deletes the page `handover.page`. The applier then stores the page's memory in `handover` instead of freeing it.
    pub(crate) fn hand_over(&mut self, handover: Arc<Handover>) -> &mut Self {
        let page = handover.page;
        self.handover = Some(handover);
        self.delete(page)
    }

    /// Returns the [`Handover`] that receives the memory of a deleted page, if the caller requested this memory.
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
            BatchStep::Resize { page, .. } | BatchStep::Clone { source: page } => page.existing(),
            _ => None,
        })
    }

    /// Returns whether the batch is plain, so that it can be committed without reading a page or writing a file. A
    /// plain batch contains all of its bytes, moves no page, and writes fewer than `ahead_bytes_min` bytes, the minimum
    /// for which images are written.
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

    /// Returns the purpose for which the batch needs disk space. A batch that only deletes pages may use the space
    /// reserved for a full disk, because its deletes free more space than its frame takes.
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
