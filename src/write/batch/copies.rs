//! Operations that copy between pages: clones of whole pages, and copies of ranges.
//!
//! The log contains only after-images (I2), so a copy operation is logged with the copied bytes. These bytes are read
//! before the batch is encoded. If the source page has changed by the time the batch is logged, `write/commit` encodes
//! the batch again with newly read bytes.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use remanent_format::limits::FRAME_PAYLOAD_LEN_MAX;
use remanent_format::op::{Op, PayloadBytes};
use remanent_format::{Metadata, PageId, Place};

use super::encode::Encoder;
use super::{BatchStep, PageRef, WriteBatch};
use crate::base::allocation::{copied, push};
use crate::error::{Error, Invalid, Result};

/// A page from which a batch copies, in host memory. The bytes include the effects of the batch's previous operations.
#[derive(Clone, Debug)]
pub(crate) struct CopiedPage {
    pub place: Place,
    pub metadata: Metadata,
    pub bytes: Vec<u8>,
}

/// The pages and ranges that must be read before a batch with copies is encoded.
#[derive(Debug, Default)]
pub(crate) struct CopySources {
    /// The pages that must be read as a whole. These are pages that the batch clones, and pages that the batch changes
    /// or creates before it copies from them.
    pub whole: BTreeSet<PageId>,
    /// The ranges to read from pages that the batch does not change before the copy. Each has the index of the copy
    /// operation.
    pub ranges: Vec<(usize, PageId, Range<u64>)>,
}

/// The bytes that a batch copies, as read before the batch is encoded.
#[derive(Debug, Default)]
pub(crate) struct CopiedBytes {
    /// For each existing page in [`CopySources::whole`], its bytes before the batch.
    pub whole: HashMap<PageId, CopiedPage>,
    /// The bytes of the ranges of [`CopySources::ranges`], by the operation's index.
    pub ranges: HashMap<usize, Vec<u8>>,
}

impl CopiedBytes {
    /// Returns the total length of the copied bytes, as an estimate of their length in the payload.
    pub fn byte_len(&self) -> usize {
        let whole = self.whole.values().map(|page| page.bytes.len());
        whole.chain(self.ranges.values().map(Vec::len)).fold(0, usize::saturating_add)
    }
}

impl WriteBatch {
    /// Creates a copy of a page in its state at this point of the batch, including bytes, length, place and metadata
    /// but not the key. The log stores the bytes, so a clone takes as much log space as the page is long.
    pub fn clone_page<'k>(&mut self, source: impl Into<PageRef<'k>>) -> super::NewPage {
        let source = self.target(source);
        self.step(BatchStep::Clone { source });
        self.new_page()
    }

    /// Copies a range of a page to another or the same page, starting at `offset`.
    ///
    /// The copied bytes are those that the source has at this point in the batch: after all earlier operations of the
    /// batch, and before all later operations. The source range and the target range may overlap. The log stores the
    /// bytes, so a copy takes as much log space as the range is long.
    ///
    /// Only the range is read, unless an earlier operation of the batch changes bytes of the source. In that case the
    /// whole source is read, and the batch must not write device bytes to it.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// batch.create_from(*b"abcdefgh", Place::Host);
    /// batch.create(4, Place::Host);
    /// let pages = store.commit(batch)?.pages;
    ///
    /// let mut batch = store.batch();
    /// batch.copy(pages[0], 2..4, pages[1], 1); // before the write: "cd"
    /// batch.write(pages[0], 3, b"X").copy(pages[0], 3..4, pages[1], 3); // after it: "X"
    /// store.commit(batch)?;
    /// assert_eq!(store.read_to_vec(pages[1])?, b"\0cdX");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn copy<'k>(
        &mut self,
        source: impl Into<PageRef<'k>>,
        range: Range<u64>,
        target: impl Into<PageRef<'k>>,
        offset: u64,
    ) -> &mut Self {
        let (source, target) = (self.target(source), self.target(target));
        self.step(BatchStep::Copy { source, range, target, offset })
    }

    /// Returns the pages and ranges that must be read for the batch's copies. `pages` contains the ids of the new
    /// pages.
    ///
    /// # Errors
    /// `Invalid` for a range that ends before it begins; `Limit` if the ranges do not fit into a frame; `OutOfMemory`.
    pub(crate) fn copy_sources(&self, pages: &[PageId]) -> Result<CopySources> {
        let mut sources = CopySources::default();
        if !self.steps.iter().any(|step| matches!(step, BatchStep::Clone { .. } | BatchStep::Copy { .. })) {
            return Ok(sources);
        }
        let (mut changed, mut new_pages, mut found) = (BTreeSet::new(), pages.iter().copied(), 0);
        for (index, step) in self.steps.iter().enumerate() {
            match step {
                BatchStep::Clone { source } => {
                    sources.whole.insert(source.resolve(pages));
                }
                BatchStep::Copy { source, range, .. } => {
                    let Some(len) = range.end.checked_sub(range.start) else {
                        let reason = format!("the range {range:?} ends before it begins");
                        return Err(Error::Invalid(Invalid::Operation { index, reason }));
                    };
                    let source = source.resolve(pages);
                    found = len.saturating_add(found);
                    if changed.contains(&source) {
                        sources.whole.insert(source);
                    } else {
                        push(&mut sources.ranges, (index, source, range.clone()))?;
                    }
                }
                _ => {}
            }
            changed.extend(step.changes(pages, &mut new_pages));
        }
        if found > FRAME_PAYLOAD_LEN_MAX {
            return Err(Error::Limit { what: "batch", found, limit: FRAME_PAYLOAD_LEN_MAX });
        }
        Ok(sources)
    }
}

impl<B: PayloadBytes> Encoder<'_, B> {
    /// Writes a copy of a range to the payload. The bytes come from the ranges that were read before encoding or, if
    /// the batch has changed the source page, from the encoder's copy of that page.
    pub(super) fn push_copy(
        &mut self,
        (source, range): (PageId, &Range<u64>),
        target: PageId,
        offset: u64,
    ) -> Result<()> {
        let bytes = match self.copied.ranges.remove(&self.index) {
            Some(bytes) => bytes,
            None => self.copied_range(source, range)?,
        };
        self.push(&Op::Write { page: target, offset, bytes: &bytes })
    }

    /// Returns the bytes of a range of a page that the batch has changed, with the effects of the previous operations.
    fn copied_range(&self, page: PageId, range: &Range<u64>) -> Result<Vec<u8>> {
        let source = self.copied.whole.get(&page).ok_or(Error::UnknownPage { page })?;
        let page_len = source.bytes.len() as u64;
        if range.end > page_len {
            let len = range.end - range.start;
            return Err(Error::OutOfBounds { page, offset: range.start, len, page_len });
        }
        copied(&source.bytes[range.start as usize..range.end as usize])
    }
}
