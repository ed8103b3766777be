//! Operations whose bytes are in device memory, such as deltas computed by a kernel.
//!
//! When the batch is encoded, the payload contains placeholders for these bytes, and a [`DeviceFill`] describes the
//! source of each placeholder. The device fills the placeholders, so the bytes reach the log without passing through
//! the caller.

use std::ops::Range;

use remanent_format::limits::FRAME_PAYLOAD_LEN_MAX;
use remanent_format::op::{Indices, OP_HEADER_LEN, Op, PayloadBytes, scatter_values_at};
use remanent_format::{PageId, Width};

use super::encode::{Encoder, zeroed};
use super::sparse::SparseElements;
use super::{BatchStep, PageRef, WorkingCopy, WriteBatch};
use crate::device::{DIGEST_CHUNK_LEN, DeviceBytes, Span, digest_count};
use crate::error::{Error, Invalid, Result};

/// A placeholder in a payload: a range whose bytes the device fills in.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFill<'f> {
    /// The offset of the range in the payload.
    pub at: usize,
    /// The source of the range's bytes.
    pub content: FillSource<'f>,
}

impl DeviceFill<'_> {
    /// Returns the length of the range in bytes.
    pub fn byte_len(&self) -> u64 {
        match &self.content {
            FillSource::Bytes(span) | FillSource::Chunks { span, .. } | FillSource::Indices { span, .. } => {
                span.len
            }
            FillSource::Elements { width, indices, .. } => (indices.len() * width.bytes()) as u64,
        }
    }

    /// Splits the range after `len` bytes, which must be a multiple of the chunk length, and returns the second part.
    /// Returns `None` for indices and elements, which cannot be split.
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

/// The source from which the device fills a placeholder in a payload.
#[derive(Clone, Debug)]
pub(crate) enum FillSource<'f> {
    /// Bytes in device memory.
    Bytes(Span),
    /// Consecutive chunks of a working copy. `first` is the number of the first chunk in the page. `key` is the key for
    /// the digests of the chunks. `step` is the index of the capture.
    Chunks { span: Span, key: Span, step: usize, first: usize },
    /// Indices of elements. The device checks that they are distinct and less than `bound`. `step` is the index of
    /// their operation.
    Indices { span: Span, bound: u64, step: usize },
    /// Single elements of the range `source`, selected by index.
    Elements { source: Span, width: Width, indices: &'f [u32] },
}

/// The changes that a capture found in one part of its page.
#[derive(Clone, Debug)]
pub(crate) struct CapturedPart {
    /// The offset of the part in the page.
    pub offset: u64,
    /// The location of the part's bytes: staging memory or, if `key` is set, the working copy itself.
    pub staged: Span,
    /// The key for digests, or `None` if the working copy is not compared by digests. With a key, the part consists of
    /// whole chunks.
    pub key: Option<Span>,
    /// The changed byte ranges of the part.
    pub runs: Vec<Range<u64>>,
    /// The changed elements of the part outside `runs`.
    pub elements: SparseElements,
}

impl CapturedPart {
    /// Returns the number of changed bytes, for elements of this width.
    pub fn changed_bytes(&self, width: Width) -> u64 {
        let in_runs: u64 = self.runs.iter().map(|run| run.end - run.start).sum();
        in_runs + (self.elements.indices.len() * width.bytes()) as u64
    }
}

impl WriteBatch {
    /// Replaces bytes of the page, starting at `offset`, with the contents of device memory. The memory is
    /// read once, when the batch is submitted. The log and the page get the same bytes even if the memory is
    /// written concurrently.
    ///
    /// ```
    /// use remanent::{Options, Place};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::new().device(DeviceChoice::Host);
    /// let store = options.open_temporary()?;
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
    pub fn write_device<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        offset: u64,
        bytes: &DeviceBytes,
    ) -> &mut Self {
        let page = self.target(page);
        self.step(BatchStep::WriteDevice { page, offset, bytes: bytes.clone() })
    }

    /// Replaces single elements like [`WriteBatch::scatter`], with indices (little-endian u32) and values
    /// from device memory. Before anything is logged, the device checks that all indices are distinct and
    /// within the page. The log stores four bytes per index, because the indices are not sorted.
    pub fn scatter_device<'k>(
        &mut self,
        page: impl Into<PageRef<'k>>,
        width: Width,
        indices: &DeviceBytes,
        values: &DeviceBytes,
    ) -> &mut Self {
        let (indices, values) = (indices.clone(), values.clone());
        let page = self.target(page);
        self.step(BatchStep::ScatterDevice { page, width, indices, values })
    }

    /// Replaces the elements of a page that have changed in a working copy.
    ///
    /// The copy is read once, when the batch is submitted. The page must still have the copy's epoch at that time. Once
    /// the batch is committed, the copy belongs to the new epoch and can be changed and captured again.
    ///
    /// No other operation of the batch may change the page's bytes. The log stores ranges where changes are close
    /// together and single elements elsewhere.
    ///
    /// Submitting allocates temporary memory from the budget of the copy's place: first a copy of the examined ranges
    /// and two bits for each of their elements, and then up to 16 MiB for the changes, or more if one list of single
    /// elements is longer. For example, a page of 1 GiB of 2-byte elements takes 1 GiB, 128 MiB, and then 16 MiB. If
    /// the budget lacks room for the ranges and the bits together, the call fails with
    /// [`Error::OverBudget`](crate::Error::OverBudget) before any byte is copied. The copy can then be captured later
    /// or range by range. The captures of a batch are compared in groups whose bits take up to 32 MiB.
    ///
    /// If more than a quarter of a page on disk has changed, the batch may write all bytes of the page to an image file
    /// that the log names, instead of logging the changes.
    pub fn capture(&mut self, copy: &WorkingCopy) -> &mut Self {
        self.step(BatchStep::Capture { copy: copy.clone(), ranges: None })
    }

    /// Captures the changes in these byte ranges of the page, like [`WriteBatch::capture`]. Use this method if the
    /// changed ranges are known. Changes outside the ranges remain in the copy, and are captured when their range or
    /// the whole copy is captured.
    pub fn capture_ranges(&mut self, copy: &WorkingCopy, ranges: &[Range<u64>]) -> &mut Self {
        self.step(BatchStep::Capture { copy: copy.clone(), ranges: Some(ranges.to_vec()) })
    }

    /// Returns the working copies that the batch captures, each with the operation's index and the ranges to examine.
    pub(crate) fn captures(&self) -> impl Iterator<Item = (usize, &WorkingCopy, Option<&[Range<u64>]>)> {
        self.steps.iter().enumerate().filter_map(|(index, step)| match step {
            BatchStep::Capture { copy, ranges } => Some((index, copy, ranges.as_deref())),
            _ => None,
        })
    }

    /// Returns the existing pages in which the batch replaces elements at indices in device memory. The lengths of
    /// these pages must be determined before the batch is encoded, because only the device knows the indices.
    pub(crate) fn scattered_pages(&self) -> impl Iterator<Item = PageId> {
        self.steps.iter().filter_map(|step| match step {
            BatchStep::ScatterDevice { page, .. } => page.existing(),
            _ => None,
        })
    }

    /// Returns the device memory from which the batch reads bytes. The memory of captured working copies is not
    /// included.
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

    /// Returns an error if another operation of the batch changes the bytes of a captured page. With such a change, the
    /// working copy would match no state of the page.
    ///
    /// # Errors
    /// `Invalid`.
    pub(crate) fn check_captures(&self, pages: &[PageId]) -> Result<()> {
        for (index, copy, _) in self.captures() {
            let mut new_pages = pages.iter().copied();
            let changes = self.steps.iter().filter_map(|step| step.changes(pages, &mut new_pages));
            if changes.filter(|page| *page == copy.page()).count() > 1 {
                let page = copy.page();
                let reason =
                    format!("page {page} is captured, and changed by another operation of the batch too");
                return Err(Error::Invalid(Invalid::Operation { index, reason }));
            }
        }
        Ok(())
    }
}

impl<'f, B: PayloadBytes> Encoder<'f, B> {
    /// Writes an operation to the payload with a placeholder that the device fills with the bytes of `span`.
    pub(super) fn push_bytes(&mut self, page: PageId, offset: u64, span: Span) -> Result<()> {
        self.check_placeholder(page, span.len)?;
        let body_at = self.writer.len() + OP_HEADER_LEN;
        self.push_placeholder_write(page, offset, span.len)?;
        self.placeholders.push(DeviceFill { at: body_at, content: FillSource::Bytes(span) });
        Ok(())
    }

    /// Writes a sparse delta to the payload with placeholders that the device fills with indices and values.
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
            return Err(Error::Invalid(Invalid::Operation { index: self.index, reason }));
        }
        let page_len = *self.lens.get(&page).ok_or(Error::UnknownPage { page })?;
        let placeholder = self.placeholder(page, indices.len.saturating_add(values.len))?;
        let body_at = self.writer.len() + OP_HEADER_LEN;
        self.push(&Op::Scatter {
            page,
            width,
            base: 0,
            indices: Indices::plain(&placeholder[..indices.len as usize]),
            values: &placeholder[..values.len as usize],
        })?;
        let bound = page_len / width.bytes() as u64;
        let content = FillSource::Indices { span: indices, bound, step: self.index };
        self.placeholders.push(DeviceFill { at: body_at, content });
        let values_at = body_at + scatter_values_at(indices.len as usize);
        self.placeholders.push(DeviceFill { at: values_at, content: FillSource::Bytes(values) });
        Ok(())
    }

    /// Writes the changes that a capture found in one part of a page to the payload.
    pub(super) fn push_captured(&mut self, page: PageId, width: Width, part: &'f CapturedPart) -> Result<()> {
        for run in &part.runs {
            let span =
                Span { offset: part.staged.offset + run.start, len: run.end - run.start, ..part.staged };
            let offset = part.offset + run.start;
            self.push_bytes(page, offset, span)?;
            if let (Some(key), Some(placeholder)) = (part.key, self.placeholders.last_mut()) {
                let (step, first) = (self.index, (offset / DIGEST_CHUNK_LEN) as usize);
                placeholder.content = FillSource::Chunks { span, key, step, first };
            }
        }
        let SparseElements { indices: elements, coded } = &part.elements;
        if elements.is_empty() {
            return Ok(());
        }
        self.check_placeholder(page, (elements.len() * width.bytes()) as u64)?;
        let values_at = self.writer.len() + OP_HEADER_LEN + scatter_values_at(coded.byte_len());
        self.push_placeholder_scatter(page, width, part.offset, coded.indices())?;
        let content = FillSource::Elements { source: part.staged, width, indices: elements };
        self.placeholders.push(DeviceFill { at: values_at, content });
        Ok(())
    }

    /// Returns `len` zeros as a placeholder for bytes that the device fills in later.
    ///
    /// # Errors
    /// The errors of [`check_placeholder`](Self::check_placeholder), which runs before the allocation; `OutOfMemory`.
    fn placeholder(&self, page: PageId, len: u64) -> Result<Vec<u8>> {
        self.check_placeholder(page, len)?;
        zeroed(len).ok_or_else(|| Error::no_memory(len))
    }

    /// Returns an error if the device cannot fill in `len` bytes of a page.
    ///
    /// # Errors
    /// `Limit`; `Invalid` for a page that the batch copies as a whole, because the bytes of such a page must be known
    /// when the batch is encoded.
    fn check_placeholder(&self, page: PageId, len: u64) -> Result<()> {
        let found = len.saturating_add(self.writer.len() as u64);
        if found > FRAME_PAYLOAD_LEN_MAX {
            return Err(Error::Limit { what: "batch", found, limit: FRAME_PAYLOAD_LEN_MAX });
        }
        if self.is_copied_whole(page) {
            let reason = format!(
                "page {page} is copied by this batch, so the batch cannot write bytes of a device to it"
            );
            return Err(Error::Invalid(Invalid::Operation { index: self.index, reason }));
        }
        Ok(())
    }
}
