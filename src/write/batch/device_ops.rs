//! Operations with bytes that only the device has seen: deltas that a kernel made.
//!
//! Their place in the payload stays blank when the batch is encoded; [`DeviceFill`] says what goes there.
//! The device fills it, so that the bytes reach the log without passing through the caller's hands.

use std::ops::Range;

use remanent_format::limits::FRAME_PAYLOAD_LEN_MAX;
use remanent_format::op::{Indices, OP_HEADER_LEN, Op, PayloadBytes, scatter_values_at};
use remanent_format::{PageId, Width};

use super::encode::{Encoder, zeroed};
use super::sparse::SparseElements;
use super::{BatchStep, PageRef, WorkingCopy, WriteBatch};
use crate::device::{DIGEST_CHUNK_LEN, DeviceBytes, Span, digest_count};
use crate::error::{Error, Result};

/// A range of a payload that the device fills.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFill<'f> {
    /// Where the range begins in the payload.
    pub at: usize,
    /// Where its bytes come from.
    pub content: FillSource<'f>,
}

impl DeviceFill<'_> {
    /// The length of the range in bytes.
    pub fn byte_len(&self) -> u64 {
        match &self.content {
            FillSource::Bytes(span) | FillSource::Chunks { span, .. } | FillSource::Indices { span, .. } => {
                span.len
            }
            FillSource::Elements { width, indices, .. } => (indices.len() * width.bytes()) as u64,
        }
    }

    /// Cuts the range off after `len` bytes, which is a multiple of a chunk's length, and returns what
    /// follows; `None` for indices and elements, which stay together.
    pub fn split_off(&mut self, len: u64) -> Option<Self> {
        let after = |span: Span| Span { offset: span.offset + len, len: span.len - len, ..span };
        let rest = match &mut self.content {
            FillSource::Bytes(span) => {
                let rest = FillSource::Bytes(after(*span));
                span.len = len;
                rest
            }
            FillSource::Chunks { span, key, step, first } => {
                let first = *first + digest_count(len) as usize;
                let rest = FillSource::Chunks { span: after(*span), key: *key, step: *step, first };
                span.len = len;
                rest
            }
            FillSource::Indices { .. } | FillSource::Elements { .. } => return None,
        };
        Some(Self { at: self.at + len as usize, content: rest })
    }
}

/// The source of a blank's bytes.
#[derive(Clone, Debug)]
pub(crate) enum FillSource<'f> {
    /// Bytes as they lie on the device.
    Bytes(Span),
    /// Chunks of a working copy, from number `first` of its page on. Their digests under this key are those
    /// of the bytes that come to the blank. `step` is the capture.
    Chunks { span: Span, key: Span, step: usize, first: usize },
    /// Indices that may be equal, or not below the bound: the device checks them. `step` is their operation.
    Indices { span: Span, bound: u64, step: usize },
    /// Single elements of a range, by their indices.
    Elements { source: Span, width: Width, indices: &'f [u32] },
}

/// The changes that a capture found in a part of its page.
#[derive(Clone, Debug)]
pub(crate) struct CapturedPart {
    /// Where the part begins in the page.
    pub offset: u64,
    /// The part's bytes. They are staged, unless `key` says that they are the copy's own.
    pub staged: Span,
    /// The key of digests, if the part is whole chunks of a copy that is compared with its digests.
    pub key: Option<Span>,
    /// Changed ranges of the part, in bytes.
    pub runs: Vec<Range<u64>>,
    /// Changed elements of the part, outside of these ranges.
    pub elements: SparseElements,
}

impl CapturedPart {
    /// How many bytes changed.
    pub fn changed_bytes(&self, width: Width) -> u64 {
        let in_runs: u64 = self.runs.iter().map(|run| run.end - run.start).sum();
        in_runs + (self.elements.indices.len() * width.bytes()) as u64
    }
}

impl WriteBatch {
    /// Replaces bytes of the page by these, from `offset` on. They are read once, when the batch
    /// is submitted: log and page get the same bytes, whatever is written to the memory meanwhile.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::default().device(DeviceChoice::Host);
    /// let store = Store::temporary(options)?;
    /// let memory = store.device_bytes(16, Place::Device(0))?;
    /// memory.write(0, b"made by a kernel")?; // which would use `memory.address()`
    /// let mut batch = store.batch();
    /// let page = batch.create(4096, Place::Device(0)).page();
    /// batch.write_device(page, 100, &memory);
    /// let committed = store.commit(batch)?;
    ///
    /// let mut bytes = [0; 16];
    /// store.read(committed.pages[0], 100, &mut bytes)?;
    /// assert_eq!(&bytes, b"made by a kernel");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn write_device(&mut self, page: impl Into<PageRef>, offset: u64, bytes: &DeviceBytes) -> &mut Self {
        self.step(BatchStep::WriteDevice { page: self.own(page), offset, bytes: bytes.clone() })
    }

    /// Replaces single elements, as [`WriteBatch::scatter`] does, with indices (little-endian u32) and
    /// values from the device's memory. The device checks that all indices are different and within the
    /// page, before anything is logged. The log gets four bytes an index: they are not brought into
    /// order.
    pub fn scatter_device(
        &mut self,
        page: impl Into<PageRef>,
        width: Width,
        indices: &DeviceBytes,
        values: &DeviceBytes,
    ) -> &mut Self {
        let (indices, values) = (indices.clone(), values.clone());
        self.step(BatchStep::ScatterDevice { page: self.own(page), width, indices, values })
    }

    /// Replaces those elements of its page that changed in a working copy. The copy is read once, when
    /// the batch is submitted; then its page's epoch is checked, which must be the copy's. When the batch
    /// is committed the copy belongs to the new epoch, so that it can be changed and captured again.
    ///
    /// No other operation of the batch may change the page's bytes. The log gets ranges where changes lie
    /// close and single elements where they do not, whichever is shorter.
    ///
    /// Submitting takes memory beside pages, in the budget of the copy's place, until it returns: the
    /// length of the ranges that are looked at, two bits for each of their elements, and then the length
    /// of the batch's payload. For a page of 1 GiB of 2-byte elements that is 1 GiB, 128 MiB, and the
    /// changes. Where the ranges and the bits have no room together, it fails with
    /// [`Error::OverBudget`](crate::Error::OverBudget) before anything is copied, and the copy can be
    /// captured later, or range by range. Captures of one batch are looked at together, as long as their bits
    /// are 32 MiB at most, and there is room.
    ///
    /// Of a page on disk, of which more than a quarter changed, all bytes go to an image file, and the log
    /// names it.
    ///
    /// ```
    /// use remanent::{Options, Place, Shadow, Store, Width};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::default().device(DeviceChoice::Host);
    /// let store = Store::temporary(options)?;
    /// let mut batch = store.batch();
    /// batch.create(1 << 20, Place::Device(0));
    /// let page = store.commit(batch)?.pages[0];
    ///
    /// let copy = store.working_copy(page, Width::W2, Shadow::Page)?;
    /// copy.bytes().write(4000, &[1, 2])?; // a kernel's work
    /// let logged = store.stats().log.bytes;
    /// let mut batch = store.batch();
    /// batch.capture(&copy).set_root("step", 1u64);
    /// store.commit(batch)?;
    /// assert!(store.stats().log.bytes - logged < 8192, "of a page of a mebibyte");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn capture(&mut self, copy: &WorkingCopy) -> &mut Self {
        self.step(BatchStep::Capture { copy: copy.clone(), ranges: None })
    }

    /// As [`WriteBatch::capture`], if the caller knows which ranges of the page, in bytes, may have
    /// changed: only these are looked at. A change outside of them stays in the copy, and is captured
    /// when its range is named, or all of the copy is.
    pub fn capture_ranges(&mut self, copy: &WorkingCopy, ranges: &[Range<u64>]) -> &mut Self {
        self.step(BatchStep::Capture { copy: copy.clone(), ranges: Some(ranges.to_vec()) })
    }

    /// The captures, and which ranges they look at, by their operation's index.
    pub(crate) fn captures(&self) -> impl Iterator<Item = (usize, &WorkingCopy, Option<&[Range<u64>]>)> {
        self.steps.iter().enumerate().filter_map(|(index, step)| match step {
            BatchStep::Capture { copy, ranges } => Some((index, copy, ranges.as_deref())),
            _ => None,
        })
    }

    /// The pages of which the lengths must be known, because only the device knows which of their
    /// elements change.
    pub(crate) fn scattered_pages(&self) -> impl Iterator<Item = PageId> {
        self.steps.iter().filter_map(|step| match step {
            BatchStep::ScatterDevice { page, .. } => page.existing(),
            _ => None,
        })
    }

    /// The device's memory from which the batch takes bytes, captures left out.
    pub(crate) fn device_bytes(&self) -> impl Iterator<Item = &DeviceBytes> {
        self.steps.iter().flat_map(|step| {
            match step {
                BatchStep::WriteDevice { bytes, .. } => [Some(bytes), None],
                BatchStep::ScatterDevice { indices, values, .. } => [Some(indices), Some(values)],
                _ => [None, None],
            }
            .into_iter()
            .flatten()
        })
    }

    /// Refuses a batch that changes the bytes of a captured page by another operation, too: afterwards
    /// the copy would be of no state of the page.
    ///
    /// # Errors
    /// `InvalidOperation`.
    pub(crate) fn check_captures(&self, pages: &[PageId]) -> Result<()> {
        for (index, copy, _) in self.captures() {
            let mut new_pages = pages.iter().copied();
            let changes = self.steps.iter().filter_map(|step| step.changes(pages, &mut new_pages));
            if changes.filter(|page| *page == copy.page()).count() > 1 {
                let page = copy.page();
                let reason =
                    format!("page {page} is captured, and changed by another operation of the batch too");
                return Err(Error::InvalidOperation { index, reason });
            }
        }
        Ok(())
    }
}

impl<'f, B: PayloadBytes> Encoder<'f, B> {
    /// Writes an operation whose bytes the device fills in.
    pub(super) fn push_bytes(&mut self, page: PageId, offset: u64, span: Span) -> Result<()> {
        self.check_blank(page, span.len)?;
        let body_at = self.writer.len() + OP_HEADER_LEN;
        self.push_blank_write(page, offset, span.len)?;
        self.blanks.push(DeviceFill { at: body_at, content: FillSource::Bytes(span) });
        Ok(())
    }

    /// Writes a sparse delta with indices and values that the device fills in.
    pub(super) fn push_scatter(
        &mut self,
        page: PageId,
        width: Width,
        indices: Span,
        values: Span,
    ) -> Result<()> {
        let count = indices.len / 4;
        if !indices.len.is_multiple_of(4) || values.len != count * width.bytes() as u64 {
            let reason = format!(
                "{} bytes of indices, of 4 bytes each, and {} bytes of values, of {} bytes each",
                indices.len,
                values.len,
                width.bytes()
            );
            return Err(Error::InvalidOperation { index: self.index, reason });
        }
        let page_len = *self.lens.get(&page).ok_or(Error::UnknownPage { page })?;
        let blank = self.blank(page, indices.len.saturating_add(values.len))?;
        let body_at = self.writer.len() + OP_HEADER_LEN;
        self.push(&Op::Scatter {
            page,
            width,
            base: 0,
            indices: Indices::plain(&blank[..indices.len as usize]),
            values: &blank[..values.len as usize],
        })?;
        let bound = page_len / width.bytes() as u64;
        let content = FillSource::Indices { span: indices, bound, step: self.index };
        self.blanks.push(DeviceFill { at: body_at, content });
        let values_at = body_at + scatter_values_at(indices.len as usize);
        self.blanks.push(DeviceFill { at: values_at, content: FillSource::Bytes(values) });
        Ok(())
    }

    /// Writes the changes that a capture found.
    pub(super) fn push_captured(&mut self, page: PageId, width: Width, part: &'f CapturedPart) -> Result<()> {
        for run in &part.runs {
            let span =
                Span { offset: part.staged.offset + run.start, len: run.end - run.start, ..part.staged };
            let offset = part.offset + run.start;
            self.push_bytes(page, offset, span)?;
            if let (Some(key), Some(blank)) = (part.key, self.blanks.last_mut()) {
                let (step, first) = (self.index, (offset / DIGEST_CHUNK_LEN) as usize);
                blank.content = FillSource::Chunks { span, key, step, first };
            }
        }
        let SparseElements { indices: elements, coded } = &part.elements;
        if elements.is_empty() {
            return Ok(());
        }
        self.check_blank(page, (elements.len() * width.bytes()) as u64)?;
        let values_at = self.writer.len() + OP_HEADER_LEN + scatter_values_at(coded.byte_len());
        self.push_blank_scatter(page, width, part.offset, coded.indices())?;
        let content = FillSource::Elements { source: part.staged, width, indices: elements };
        self.blanks.push(DeviceFill { at: values_at, content });
        Ok(())
    }

    /// Zeros, in the place of bytes that the device fills in.
    ///
    /// # Errors
    /// Those of [`check_blank`](Self::check_blank), before that much is allocated; `OutOfMemory`.
    fn blank(&self, page: PageId, len: u64) -> Result<Vec<u8>> {
        self.check_blank(page, len)?;
        zeroed(len).ok_or_else(|| Error::no_memory(len))
    }

    /// Checks that the device may fill in bytes of a page.
    ///
    /// # Errors
    /// `Limit`; `InvalidOperation` for a page that the batch copies from its own state: the bytes that are
    /// copied must be known by now.
    fn check_blank(&self, page: PageId, len: u64) -> Result<()> {
        let found = len.saturating_add(self.writer.len() as u64);
        if found > FRAME_PAYLOAD_LEN_MAX {
            return Err(Error::Limit { what: "batch", found, limit: FRAME_PAYLOAD_LEN_MAX });
        }
        if self.is_copied_whole(page) {
            let reason = format!(
                "page {page} is copied by this batch, so the batch cannot write bytes of a device to it"
            );
            return Err(Error::InvalidOperation { index: self.index, reason });
        }
        Ok(())
    }
}
