//! Encodes a batch as a payload, and performs all checks that require no read of a page.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use remanent_format::image::ImageRef;
use remanent_format::limits::{DEVICE_ORDINAL_MAX, FRAME_ALIGN, FRAME_PAYLOAD_LEN_MAX, NUMBER_MAX};
use remanent_format::op::{Indices, OP_HEADER_LEN, Op, PAYLOAD_HEAD_LEN, PayloadBytes, PayloadWriter};
use remanent_format::state::apply::apply;
use remanent_format::{Defect, PageId, Place, Width};
use zerocopy::FromZeros;

use super::sparse::{CodedIndices, ascending};
use super::{BatchStep, CapturedPart, CopiedBytes, CopiedPage, DeviceFill, OpImages, WriteBatch};
use crate::base::allocation::{copied, insert};
use crate::error::{Error, Invalid, Result, Unavailable};

/// The inputs of the encoding that depend on the store's state. The committer determines them before it encodes a
/// batch.
pub(crate) struct BatchFacts<'a> {
    /// The pages that must be read as a whole ([`super::CopySources::whole`]).
    pub copied_whole: &'a BTreeSet<PageId>,
    /// The bytes that the batch copies from pages, as they were before the batch.
    pub copied: CopiedBytes,
    /// The images that contain the bytes of some operations. The payload names these images instead of containing the
    /// bytes.
    pub images: OpImages,
    /// The bytes of short pages that were read from sources, by the operation's index.
    pub read: &'a BTreeMap<usize, Vec<u8>>,
    /// The changes that each capture found, by the operation's index.
    pub captured: &'a BTreeMap<usize, Vec<CapturedPart>>,
    /// The length, before the batch, of each page that the batch changes at indices in device memory.
    pub lens: HashMap<PageId, u64>,
}

impl Default for BatchFacts<'_> {
    /// Returns the data for a batch without copies, sources, images and captures.
    fn default() -> Self {
        const NO_PAGES: &BTreeSet<PageId> = &BTreeSet::new();
        const NONE_READ: &BTreeMap<usize, Vec<u8>> = &BTreeMap::new();
        const NONE_CAPTURED: &BTreeMap<usize, Vec<CapturedPart>> = &BTreeMap::new();
        let (copied, images, lens) = Default::default();
        Self { copied_whole: NO_PAGES, copied, images, read: NONE_READ, captured: NONE_CAPTURED, lens }
    }
}

impl WriteBatch {
    /// Estimates the length in bytes of the payload from its large parts.
    pub(crate) fn payload_len(&self, found: &BatchFacts<'_>) -> usize {
        let in_payload = self.steps.iter().enumerate().filter(|(index, _)| !found.images.contains_key(index));
        let steps = in_payload.map(|(index, step)| step.bytes_len(found.captured.get(&index)));
        steps.fold(PAYLOAD_HEAD_LEN + found.copied.byte_len(), usize::saturating_add)
    }

    /// Writes the batch's payload, with zeros as placeholders for bytes that only the device has. Returns the payload
    /// and the placeholders that the device must fill, in order. `pages` contains the ids of the new pages.
    pub(crate) fn encode<'f, B: PayloadBytes>(
        &self,
        pages: &[PageId],
        found: BatchFacts<'f>,
        payload: &mut B,
    ) -> Result<Vec<DeviceFill<'f>>> {
        let BatchFacts { copied_whole, copied: bytes, images, read, captured, lens } = found;
        let writer = PayloadWriter::on(payload);
        let mut encoder =
            Encoder { index: 0, writer, copied_whole, copied: bytes, placeholders: Vec::new(), lens };
        let mut new_pages = pages.iter().copied();
        let mut next_new = || new_pages.next().expect("as many ids as new pages");
        for (index, step) in self.steps.iter().enumerate() {
            encoder.index = index;
            let invalid = |reason: String| Error::Invalid(Invalid::Operation { index, reason });
            match step {
                BatchStep::Create { len, place, key, metadata } => {
                    let (page, key, metadata) = (next_new(), key.clone(), metadata.clone());
                    insert(&mut encoder.lens, page, *len)?;
                    encoder.push(&Op::Create { page, len: *len, place: *place, key, metadata })?;
                }
                BatchStep::Clone { source } => {
                    encoder.push_clone(source.resolve(pages), next_new())?;
                }
                BatchStep::Copy { source, range, target, offset } => {
                    encoder.push_copy((source.resolve(pages), range), target.resolve(pages), *offset)?;
                }
                BatchStep::Write { page, offset, bytes } => {
                    let write = Op::Write { page: page.resolve(pages), offset: *offset, bytes };
                    match images.get(&index) {
                        Some(image) => encoder.push_image(&write, *image)?,
                        None => encoder.push(&write)?,
                    }
                }
                BatchStep::Source { page, len, .. } => {
                    let page = page.resolve(pages);
                    if let Some(image) = images.get(&index) {
                        encoder.push(&Op::Image { page, len: *len, image: *image })?;
                    } else if let Some(bytes) = read.get(&index) {
                        encoder.push(&Op::Write { page, offset: 0, bytes })?;
                    }
                }
                BatchStep::Masked { page, offset, width, mask, bytes } => {
                    let (page, offset, width) = (page.resolve(pages), *offset, *width);
                    check_mask(width, mask, bytes).map_err(invalid)?;
                    let (mask, bytes) = canonical_mask(width, mask, bytes)?;
                    encoder.push(&Op::Masked { page, offset, width, mask: &mask, bytes: &bytes })?;
                }
                BatchStep::Scatter { page, width, indices, values } => {
                    let (indices, values) = ascending(*width, indices, values, invalid)?;
                    let coded = CodedIndices::smaller(&indices)?;
                    let (page, indices) = (page.resolve(pages), coded.indices());
                    encoder.push(&Op::Scatter { page, width: *width, base: 0, indices, values: &values })?;
                }
                BatchStep::Fill { page, offset, len, pattern } => {
                    let (page, offset, len) = (page.resolve(pages), *offset, *len);
                    check_pattern(pattern, len).map_err(invalid)?;
                    encoder.push(&Op::Fill { page, offset, len, pattern })?;
                }
                BatchStep::WriteDevice { page, offset, bytes } => {
                    encoder.push_bytes(page.resolve(pages), *offset, bytes.span())?;
                }
                BatchStep::ScatterDevice { page, width, indices, values } => {
                    encoder.push_scatter(page.resolve(pages), *width, indices.span(), values.span())?;
                }
                BatchStep::Capture { copy, .. } if images.contains_key(&index) => {
                    let (page, len) = (copy.page(), copy.bytes().byte_len());
                    encoder.push(&Op::Image { page, len, image: images[&index] })?;
                }
                BatchStep::Capture { copy, .. } => {
                    for part in &captured[&index] {
                        encoder.push_captured(copy.page(), copy.width(), part)?;
                    }
                }
                BatchStep::Resize { page, len } => {
                    let page = page.resolve(pages);
                    insert(&mut encoder.lens, page, *len)?;
                    encoder.push(&Op::Resize { page, len: *len })?;
                }
                BatchStep::Delete { page } => encoder.push(&Op::Delete { page: page.resolve(pages) })?,
                BatchStep::Move { page, place } => {
                    encoder.push(&Op::Move { page: page.resolve(pages), place: *place })?;
                }
                BatchStep::SetMetadata { page, name, value } => {
                    let (page, name, value) = (page.resolve(pages), name.clone(), value.clone());
                    encoder.push(&Op::SetMetadata { page, name, value })?;
                }
                BatchStep::RemoveMetadata { page, name } => {
                    encoder.push(&Op::RemoveMetadata { page: page.resolve(pages), name })?;
                }
                BatchStep::SetRoot { name, value } => {
                    encoder.push(&Op::SetRoot { name: name.clone(), value: value.clone() })?;
                }
                BatchStep::RemoveRoot { name } => encoder.push(&Op::RemoveRoot { name })?,
                BatchStep::Note { text } => encoder.push(&Op::Note { text })?,
            }
        }
        let len = encoder.writer.finish().byte_len() as u64;
        if len > FRAME_PAYLOAD_LEN_MAX {
            return Err(Error::Limit { what: "batch", found: len, limit: FRAME_PAYLOAD_LEN_MAX });
        }
        Ok(encoder.placeholders)
    }
}

impl BatchStep {
    /// Estimates the number of bytes that an operation takes in a payload, excluding the contents of a clone.
    /// `captured` contains the changes that a capture found.
    fn bytes_len(&self, captured: Option<&Vec<CapturedPart>>) -> usize {
        const FIXED: usize = OP_HEADER_LEN + 2 * FRAME_ALIGN as usize;
        let of_part = |part: &CapturedPart, width: Width| {
            let runs = part.runs.iter().map(|run| FIXED + (run.end - run.start) as usize).sum::<usize>();
            FIXED + runs + part.elements.byte_len(width)
        };
        let len = match self {
            BatchStep::Write { bytes, .. } => bytes.len(),
            BatchStep::Source { len, .. } => *len as usize,
            BatchStep::Masked { mask, bytes, .. } => mask.len() + bytes.len(),
            BatchStep::Scatter { indices, values, .. } => 4 * indices.len() + values.len(),
            BatchStep::WriteDevice { bytes, .. } => bytes.span().len as usize,
            BatchStep::ScatterDevice { indices, values, .. } => {
                (indices.span().len as usize).saturating_add(values.span().len as usize)
            }
            BatchStep::Capture { copy, .. } => {
                captured.into_iter().flatten().map(|part| of_part(part, copy.width())).sum()
            }
            _ => 0,
        };
        len.saturating_add(FIXED)
    }
}

/// Writes operations to a payload. Also applies them to the pages from which the batch copies, so that later copies
/// include their effects.
pub(super) struct Encoder<'a, B> {
    pub index: usize,
    pub writer: PayloadWriter<B>,
    /// The pages that must be read as a whole.
    copied_whole: &'a BTreeSet<PageId>,
    /// The current bytes of the pages from which the batch copies, updated by each operation, and the ranges that later
    /// copy operations write.
    pub copied: CopiedBytes,
    /// The ranges of the payload that the device must fill, in order.
    pub placeholders: Vec<DeviceFill<'a>>,
    /// The known lengths of pages in bytes, after the previous operations.
    pub lens: HashMap<PageId, u64>,
}

impl<B: PayloadBytes> Encoder<'_, B> {
    pub fn is_copied_whole(&self, page: PageId) -> bool {
        self.copied_whole.contains(&page)
    }

    pub fn push(&mut self, op: &Op<'_>) -> Result<()> {
        self.check(op)?;
        self.log(op)
    }

    /// Writes operations that create `page` as a clone of `source`.
    fn push_clone(&mut self, source: PageId, page: PageId) -> Result<()> {
        let CopiedPage { place, metadata, bytes } =
            self.copied.whole.get(&source).ok_or(Error::UnknownPage { page: source })?;
        // The bytes are copied, because a later operation may clone this clone.
        let (place, metadata, bytes) = (*place, metadata.clone(), copied(bytes)?);
        let len = bytes.len() as u64;
        insert(&mut self.lens, page, len)?;
        self.push(&Op::Create { page, len, place, key: None, metadata })?;
        if len > 0 {
            self.push(&Op::Write { page, offset: 0, bytes: &bytes })?;
        }
        Ok(())
    }

    /// Writes an operation that refers to `image`, which contains the bytes of `write`, instead of the bytes.
    fn push_image(&mut self, write: &Op<'_>, image: ImageRef) -> Result<()> {
        self.check(write)?;
        let (Some(page), Some((_, len))) = (write.page(), write.range()) else { return self.log(write) };
        self.log(&Op::Image { page, len, image })
    }

    /// Writes an operation with `len` zeros. The bytes are filled in later. The batch must not copy the page.
    pub fn push_placeholder_write(&mut self, page: PageId, offset: u64, len: u64) -> Result<()> {
        check_page(page)?;
        let pushed = self.writer.push_placeholder_write(page, offset, len);
        self.logged(pushed)
    }

    /// Writes a sparse delta whose elements are zeros. The elements are filled in later. The batch must not copy the
    /// page.
    pub fn push_placeholder_scatter(
        &mut self,
        page: PageId,
        width: Width,
        base: u64,
        indices: Indices<'_>,
    ) -> Result<()> {
        check_page(page)?;
        let pushed = self.writer.push_placeholder_scatter(page, width, base, indices);
        self.logged(pushed)
    }

    fn check(&mut self, op: &Op<'_>) -> Result<()> {
        if let Some(page) = op.page() {
            check_page(page)?;
            if self.is_copied_whole(page) {
                self.stage(page, op)?;
            }
        }
        if let Op::Create { place, .. } | Op::Move { place, .. } = *op
            && let Place::Device(ordinal) = place
            && ordinal > DEVICE_ORDINAL_MAX
        {
            return Err(Error::Unavailable(Unavailable::Place {
                place,
                reason: "device slots are numbered from 0 to 63",
            }));
        }
        Ok(())
    }

    fn log(&mut self, op: &Op<'_>) -> Result<()> {
        let pushed = self.writer.push(op);
        self.logged(pushed)
    }

    /// Converts a defect reported by the payload writer to an error.
    fn logged(&self, pushed: Result<(), Defect>) -> Result<()> {
        pushed.map_err(|defect| match defect {
            Defect::Limit { what, found, limit } => Error::Limit { what, found, limit },
            Defect::Memory { needed } => Error::no_memory(needed),
            other => Error::Invalid(Invalid::Operation { index: self.index, reason: other.to_string() }),
        })
    }

    fn stage(&mut self, page: PageId, op: &Op<'_>) -> Result<()> {
        if let Op::Create { len, place, metadata, .. } = op {
            let bytes = zeroed(*len).ok_or(Error::OutOfMemory { place: *place, len: *len })?;
            self.copied.whole.insert(page, CopiedPage { place: *place, metadata: metadata.clone(), bytes });
            return Ok(());
        }
        let source = self.copied.whole.get_mut(&page).ok_or(Error::UnknownPage { page })?;
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
            Op::Move { place, .. } => source.place = *place,
            Op::Delete { .. } => {
                self.copied.whole.remove(&page);
            }
            _ => apply(op, &mut source.bytes),
        }
        Ok(())
    }
}

/// Returns an error if the store never assigns this page id. Recovery rejects a frame with such an id.
fn check_page(page: PageId) -> Result<()> {
    if page == PageId(0) || page.0 > NUMBER_MAX { Err(Error::UnknownPage { page }) } else { Ok(()) }
}

/// Allocates zeros, or returns `None` if the allocation fails.
pub(super) fn zeroed(len: u64) -> Option<Vec<u8>> {
    u8::new_vec_zeroed(usize::try_from(len).ok()?).ok()
}

/// Returns an error unless a mask has exactly one bit per element.
fn check_mask(width: Width, mask: &[u8], bytes: &[u8]) -> Result<(), String> {
    let width = width.bytes();
    let count = bytes.len() / width;
    if !bytes.len().is_multiple_of(width) {
        return Err(format!("{} bytes are not a whole number of elements of {width} bytes", bytes.len()));
    }
    if mask.len() != count.div_ceil(8) {
        return Err(format!(
            "a mask for {count} elements is {} bytes long, not {}",
            count.div_ceil(8),
            mask.len()
        ));
    }
    Ok(())
}

/// Returns an error unless repetitions of a pattern can fill `len` bytes.
fn check_pattern(pattern: &[u8], len: u64) -> Result<(), String> {
    let pattern_len = pattern.len();
    if Width::from_bytes(pattern_len).is_none() || !len.is_multiple_of(pattern_len as u64) {
        return Err(format!(
            "a pattern of {pattern_len} bytes cannot fill {len} bytes: it must be 1, 2, 4, 8 or 16 bytes long and \
             divide the range"
        ));
    }
    Ok(())
}

/// Clears the mask's bits after the last element, and the bytes of elements that are not replaced. Thus equal deltas
/// have equal bytes in the log, and the caller's unused bytes are not logged.
fn canonical_mask(width: Width, mask: &[u8], bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
    let (mut mask, mut bytes) = (copied(mask)?, copied(bytes)?);
    let width = width.bytes();
    let count = bytes.len() / width;
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
