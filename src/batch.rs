//! Floor 4. A batch under construction: what the caller asked for, checked and turned into a payload.
//!
//! Building never fails; `encode` checks everything that can be checked without looking at a page, before
//! the first byte is logged.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::apply::apply;
use remanent_format::limits::{DEVICE_ORDINAL_MAX, FRAME_PAYLOAD_LEN_MAX, NUMBER_MAX};
use remanent_format::op::{Op, PayloadWriter};
use remanent_format::{Defect, Epoch, Key, Metadata, PageId, Place, Value, Width};

use crate::error::{Error, Result};

/// Ids begin at 1: this one is no page's, ever.
const NOWHERE: PageId = PageId(0);

/// A page of a batch: one that exists, or one that the same batch creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRef(Target);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Target {
    Existing(PageId),
    New(NewPage),
}

/// A page that a batch creates: usable in the same batch and in no other, where it is no page at all. Once
/// the batch is committed, [`NewPage::index`] says where its id stands in [`crate::Committed::pages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NewPage {
    batch: u64,
    index: usize,
}

impl NewPage {
    /// How many pages the batch creates before this one.
    #[must_use]
    pub fn index(self) -> usize {
        self.index
    }
}

impl From<PageId> for PageRef {
    fn from(page: PageId) -> Self {
        Self(Target::Existing(page))
    }
}

impl From<NewPage> for PageRef {
    fn from(page: NewPage) -> Self {
        Self(Target::New(page))
    }
}

/// Operations that become visible and durable together or not at all, in their order.
///
/// ```
/// use remanent::{Options, Place, Store};
/// let store = Store::temporary(Options::default())?;
/// let mut batch = store.batch();
/// let page = batch.create(8, Place::Host);
/// batch.write(page, 2, &[7, 7]).note("first bytes");
/// let committed = store.commit(batch)?;
///
/// let mut bytes = [0; 8];
/// store.read(committed.pages[0], 0, &mut bytes)?;
/// assert_eq!(bytes, [0, 0, 7, 7, 0, 0, 0, 0]);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a batch does nothing until it is committed"]
pub struct WriteBatch {
    /// Tells this batch's new pages from those of others: an index alone would name a wrong page there.
    number: u64,
    steps: Vec<Step>,
    new_pages: usize,
    expectations: Vec<(PageId, Epoch)>,
}

#[derive(Clone, Debug)]
enum Step {
    Create { len: u64, place: Place, key: Option<Key>, metadata: Metadata },
    Clone { source: PageRef },
    Write { page: PageRef, offset: u64, bytes: Vec<u8> },
    Masked { page: PageRef, offset: u64, width: Width, mask: Vec<u8>, bytes: Vec<u8> },
    Scatter { page: PageRef, width: Width, indices: Vec<u32>, values: Vec<u8> },
    Fill { page: PageRef, offset: u64, len: u64, pattern: Vec<u8> },
    Resize { page: PageRef, len: u64 },
    Delete { page: PageRef },
    SetMetadata { page: PageRef, name: String, value: Value },
    RemoveMetadata { page: PageRef, name: String },
    SetRoot { name: String, value: Value },
    RemoveRoot { name: String },
    Note { text: String },
}

/// What a clone copies.
#[derive(Clone, Debug)]
pub(crate) struct CloneSource {
    pub place: Place,
    pub metadata: Metadata,
    pub bytes: Vec<u8>,
}

impl Default for WriteBatch {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { number, steps: Vec::new(), new_pages: 0, expectations: Vec::new() }
    }
}

impl WriteBatch {
    /// The page, unless another batch creates it: then it resolves to one that exists nowhere.
    fn own(&self, page: impl Into<PageRef>) -> PageRef {
        match page.into() {
            PageRef(Target::New(new)) if new.batch != self.number => PageRef(Target::Existing(NOWHERE)),
            page => page,
        }
    }

    fn step(&mut self, step: Step) -> &mut Self {
        self.steps.push(step);
        self
    }

    fn new_page(&mut self) -> NewPage {
        self.new_pages += 1;
        NewPage { batch: self.number, index: self.new_pages - 1 }
    }

    /// Creates a page of `len` zeros, without key or metadata.
    pub fn create(&mut self, len: u64, place: Place) -> NewPage {
        self.create_with(len, place, None, Metadata::new())
    }

    /// Creates a page of `len` zeros. The key must be no other page's.
    pub fn create_with(&mut self, len: u64, place: Place, key: Option<Key>, metadata: Metadata) -> NewPage {
        self.step(Step::Create { len, place, key, metadata });
        self.new_page()
    }

    /// Creates a copy of a page, as it is at this point of the batch: bytes, length, place and metadata,
    /// but no key. The log gets the bytes, so a clone costs as much log as the page is long.
    pub fn clone_page(&mut self, source: impl Into<PageRef>) -> NewPage {
        self.step(Step::Clone { source: self.own(source) });
        self.new_page()
    }

    /// Replaces `bytes.len()` bytes from `offset` on.
    pub fn write(&mut self, page: impl Into<PageRef>, offset: u64, bytes: &[u8]) -> &mut Self {
        self.step(Step::Write { page: self.own(page), offset, bytes: bytes.to_vec() })
    }

    /// Replaces those elements of a range whose bit in `mask` is 1, lowest bit first. `bytes` covers the
    /// whole range; `mask` has one bit an element, rounded up to whole bytes. The log gets the whole
    /// range: below one element in about `1 + 4 / width` use [`WriteBatch::scatter`].
    pub fn write_masked(
        &mut self,
        page: impl Into<PageRef>,
        offset: u64,
        width: Width,
        mask: &[u8],
        bytes: &[u8],
    ) -> &mut Self {
        self.step(Step::Masked {
            page: self.own(page),
            offset,
            width,
            mask: mask.to_vec(),
            bytes: bytes.to_vec(),
        })
    }

    /// Replaces single elements: `values` holds one element for each index, in the same order. Indices
    /// count elements from the page's start and must all be different.
    pub fn scatter(
        &mut self,
        page: impl Into<PageRef>,
        width: Width,
        indices: &[u32],
        values: &[u8],
    ) -> &mut Self {
        self.step(Step::Scatter {
            page: self.own(page),
            width,
            indices: indices.to_vec(),
            values: values.to_vec(),
        })
    }

    /// Repeats a pattern of 1, 2, 4, 8 or 16 bytes over `len` bytes from `offset` on.
    pub fn fill(&mut self, page: impl Into<PageRef>, offset: u64, len: u64, pattern: &[u8]) -> &mut Self {
        self.step(Step::Fill { page: self.own(page), offset, len, pattern: pattern.to_vec() })
    }

    /// Cuts the page, or extends it by zeros.
    pub fn resize(&mut self, page: impl Into<PageRef>, len: u64) -> &mut Self {
        self.step(Step::Resize { page: self.own(page), len })
    }

    /// Deletes the page; its key is free again, its id is never used again.
    pub fn delete(&mut self, page: impl Into<PageRef>) -> &mut Self {
        self.step(Step::Delete { page: self.own(page) })
    }

    /// Sets one entry of the page's metadata.
    pub fn set_metadata(
        &mut self,
        page: impl Into<PageRef>,
        name: impl Into<String>,
        value: impl Into<Value>,
    ) -> &mut Self {
        self.step(Step::SetMetadata { page: self.own(page), name: name.into(), value: value.into() })
    }

    /// Removes one entry of the page's metadata; none of that name is fine too.
    pub fn remove_metadata(&mut self, page: impl Into<PageRef>, name: impl Into<String>) -> &mut Self {
        self.step(Step::RemoveMetadata { page: self.own(page), name: name.into() })
    }

    /// Sets one entry of the root, the store's own metadata.
    pub fn set_root(&mut self, name: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        self.step(Step::SetRoot { name: name.into(), value: value.into() })
    }

    /// Removes one entry of the root; none of that name is fine too.
    pub fn remove_root(&mut self, name: impl Into<String>) -> &mut Self {
        self.step(Step::RemoveRoot { name: name.into() })
    }

    /// Adds a remark that travels with the batch in the log.
    pub fn note(&mut self, text: impl Into<String>) -> &mut Self {
        self.step(Step::Note { text: text.into() })
    }

    /// Demands that the page is at this epoch when the batch is committed; epoch 0 demands that it does
    /// not exist. Otherwise the commit fails with [`Error::Conflict`] and changes nothing.
    pub fn expect_epoch(&mut self, page: PageId, epoch: Epoch) -> &mut Self {
        self.expectations.push((page, epoch));
        self
    }

    /// Number of pages that the batch creates.
    pub(crate) fn new_pages(&self) -> usize {
        self.new_pages
    }

    /// The preconditions.
    pub(crate) fn expectations(&self) -> &[(PageId, Epoch)] {
        &self.expectations
    }

    /// Whether the batch only frees space: such batches may use the reserve of a full disk.
    pub(crate) fn only_deletes(&self) -> bool {
        let deletes = self.steps.iter().any(|step| matches!(step, Step::Delete { .. }));
        deletes && self.steps.iter().all(|step| matches!(step, Step::Delete { .. } | Step::Note { .. }))
    }

    /// The existing pages that the batch clones.
    pub(crate) fn clone_sources(&self) -> Vec<PageId> {
        let mut sources: Vec<PageId> =
            self.steps.iter().filter_map(Step::cloned).filter_map(PageRef::existing).collect();
        sources.sort_unstable();
        sources.dedup();
        sources
    }

    /// The batch's payload. `pages` are the ids of the new pages; `staged` holds the pages of
    /// [`WriteBatch::clone_sources`] as they are before the batch.
    pub(crate) fn encode(&self, pages: &[PageId], staged: HashMap<PageId, CloneSource>) -> Result<Vec<u8>> {
        let cloned = self.steps.iter().filter_map(Step::cloned).map(|page| page.resolve(pages)).collect();
        let mut encoder = Encoder { index: 0, writer: PayloadWriter::default(), cloned, staged };
        let mut new_pages = pages.iter().copied();
        let mut next_new = || new_pages.next().expect("as many ids as new pages");
        for (index, step) in self.steps.iter().enumerate() {
            encoder.index = index;
            let invalid = |reason: String| Error::InvalidOperation { index, reason };
            match step {
                Step::Create { len, place, key, metadata } => {
                    let (key, metadata) = (key.clone(), metadata.clone());
                    encoder.push(&Op::Create {
                        page: next_new(),
                        len: *len,
                        place: *place,
                        key,
                        metadata,
                    })?;
                }
                Step::Clone { source } => {
                    let source = source.resolve(pages);
                    let CloneSource { place, metadata, bytes } =
                        encoder.staged.get(&source).cloned().ok_or(Error::UnknownPage { page: source })?;
                    let (page, len) = (next_new(), bytes.len() as u64);
                    encoder.push(&Op::Create { page, len, place, key: None, metadata })?;
                    if len > 0 {
                        encoder.push(&Op::Write { page, offset: 0, bytes: &bytes })?;
                    }
                }
                Step::Write { page, offset, bytes } => {
                    encoder.push(&Op::Write { page: page.resolve(pages), offset: *offset, bytes })?;
                }
                Step::Masked { page, offset, width, mask, bytes } => {
                    let (mask, bytes) = canonical_mask(*width, mask, bytes).map_err(invalid)?;
                    let page = page.resolve(pages);
                    encoder.push(&Op::Masked {
                        page,
                        offset: *offset,
                        width: *width,
                        mask: &mask,
                        bytes: &bytes,
                    })?;
                }
                Step::Scatter { page, width, indices, values } => {
                    check_scatter(*width, indices, values).map_err(invalid)?;
                    let indices: Vec<u8> = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
                    let page = page.resolve(pages);
                    encoder.push(&Op::Scatter { page, width: *width, base: 0, indices: &indices, values })?;
                }
                Step::Fill { page, offset, len, pattern } => {
                    let pattern_len = pattern.len();
                    if Width::from_bytes(pattern_len).is_none() || !len.is_multiple_of(pattern_len as u64) {
                        return Err(invalid(format!(
                            "a pattern of {pattern_len} bytes cannot fill {len} bytes: it must be 1, 2, 4, 8 or 16 \
                             bytes long and divide the range"
                        )));
                    }
                    encoder.push(&Op::Fill {
                        page: page.resolve(pages),
                        offset: *offset,
                        len: *len,
                        pattern,
                    })?;
                }
                Step::Resize { page, len } => {
                    encoder.push(&Op::Resize { page: page.resolve(pages), len: *len })?;
                }
                Step::Delete { page } => encoder.push(&Op::Delete { page: page.resolve(pages) })?,
                Step::SetMetadata { page, name, value } => {
                    let (page, name, value) = (page.resolve(pages), name.clone(), value.clone());
                    encoder.push(&Op::SetMetadata { page, name, value })?;
                }
                Step::RemoveMetadata { page, name } => {
                    encoder.push(&Op::RemoveMetadata { page: page.resolve(pages), name })?;
                }
                Step::SetRoot { name, value } => {
                    encoder.push(&Op::SetRoot { name: name.clone(), value: value.clone() })?;
                }
                Step::RemoveRoot { name } => encoder.push(&Op::RemoveRoot { name })?,
                Step::Note { text } => encoder.push(&Op::Note { text })?,
            }
        }
        let len = encoder.writer.len() as u64;
        if len > FRAME_PAYLOAD_LEN_MAX {
            return Err(Error::Limit { what: "batch", found: len, limit: FRAME_PAYLOAD_LEN_MAX });
        }
        Ok(encoder.writer.finish())
    }
}

impl Step {
    fn cloned(&self) -> Option<PageRef> {
        match self {
            Step::Clone { source } => Some(*source),
            _ => None,
        }
    }
}

impl PageRef {
    fn existing(self) -> Option<PageId> {
        match self.0 {
            Target::Existing(page) => Some(page),
            Target::New(_) => None,
        }
    }

    fn resolve(self, pages: &[PageId]) -> PageId {
        match self.0 {
            Target::Existing(page) => page,
            // A clone of this batch may have gone on to create more.
            Target::New(new) => pages.get(new.index).copied().unwrap_or(NOWHERE),
        }
    }
}

/// Writes operations, and keeps the pages that are cloned up to date with them.
struct Encoder {
    index: usize,
    writer: PayloadWriter,
    cloned: HashSet<PageId>,
    staged: HashMap<PageId, CloneSource>,
}

impl Encoder {
    fn push(&mut self, op: &Op<'_>) -> Result<()> {
        if let Some(page) = op.page() {
            // No store gives such an id, and a frame with one would not be read again.
            if page == PageId(0) || page.0 > NUMBER_MAX {
                return Err(Error::UnknownPage { page });
            }
            if self.cloned.contains(&page) {
                self.stage(page, op)?;
            }
        }
        if let Op::Create { place: place @ Place::Device(ordinal), .. } = *op
            && ordinal > DEVICE_ORDINAL_MAX
        {
            return Err(Error::PlaceUnavailable { place, reason: "device slots go from 0 to 63" });
        }
        self.writer.push(op).map_err(|defect| match defect {
            Defect::Limit { what, found, limit } => Error::Limit { what, found, limit },
            other => Error::InvalidOperation { index: self.index, reason: other.to_string() },
        })
    }

    fn stage(&mut self, page: PageId, op: &Op<'_>) -> Result<()> {
        if let Op::Create { len, place, metadata, .. } = op {
            let bytes = zeroed(*len).ok_or(Error::OutOfMemory { place: *place, len: *len })?;
            self.staged.insert(page, CloneSource { place: *place, metadata: metadata.clone(), bytes });
            return Ok(());
        }
        let source = self.staged.get_mut(&page).ok_or(Error::UnknownPage { page })?;
        let page_len = source.bytes.len() as u64;
        if let Some((offset, len)) = op.range()
            && offset.checked_add(len).is_none_or(|end| end > page_len)
        {
            return Err(Error::OutOfBounds { page, offset, len, page_len });
        }
        match op {
            Op::SetMetadata { name, value, .. } => {
                source.metadata.insert(name.clone(), value.clone());
            }
            Op::RemoveMetadata { name, .. } => {
                source.metadata.remove(*name);
            }
            Op::Resize { len, .. } if zeroed(*len).is_none() => {
                return Err(Error::OutOfMemory { place: source.place, len: *len });
            }
            Op::Delete { .. } => {
                self.staged.remove(&page);
            }
            _ => apply(op, &mut source.bytes),
        }
        Ok(())
    }
}

/// Zeros, unless there is no room for them.
fn zeroed(len: u64) -> Option<Vec<u8>> {
    let len = usize::try_from(len).ok()?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).ok()?;
    bytes.resize(len, 0);
    Some(bytes)
}

/// The mask with no bits past the last element, and the bytes with zeros where nothing is replaced: equal
/// deltas have equal bytes in the log, and nothing of the caller's leaks into it.
fn canonical_mask(width: Width, mask: &[u8], bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
    let width = width.bytes();
    let count = bytes.len() / width;
    if !bytes.len().is_multiple_of(width) {
        return Err(format!("{} bytes are no whole number of elements of {width} bytes", bytes.len()));
    }
    if mask.len() != count.div_ceil(8) {
        return Err(format!(
            "a mask for {count} elements is {} bytes long, not {}",
            count.div_ceil(8),
            mask.len()
        ));
    }
    let (mut mask, mut bytes) = (mask.to_vec(), bytes.to_vec());
    if let Some(last) = mask.last_mut()
        && !count.is_multiple_of(8)
    {
        *last &= (1 << (count % 8)) - 1;
    }
    for (index, element) in bytes.chunks_exact_mut(width).enumerate() {
        if mask[index / 8] >> (index % 8) & 1 == 0 {
            element.fill(0);
        }
    }
    Ok((mask, bytes))
}

fn check_scatter(width: Width, indices: &[u32], values: &[u8]) -> Result<(), String> {
    if values.len() != indices.len() * width.bytes() {
        return Err(format!(
            "{} indices of elements of {} bytes, but {} bytes of values",
            indices.len(),
            width.bytes(),
            values.len()
        ));
    }
    // Ascending indices, the common case, need no set.
    let ascending = indices.is_sorted_by(|left, right| left < right);
    let mut seen = HashSet::new();
    if let Some(twice) = indices.iter().find(|index| !ascending && !seen.insert(**index)) {
        return Err(format!("element {twice} is given twice"));
    }
    Ok(())
}
