//! Access to single pages of a state without loading all of it, through the locations of the operations that
//! make each page from its base.
//!
//! [`Survey::resolve`] walks the log once and keeps only the table. [`OpLocations::follow`] does the same and
//! also records the locations of each page's operations: 56 bytes per operation, and per MiB of a long write.
//! [`OpLocations::load`] then reads a page's base and operations, and nothing of other pages.
//!
//! Any window of a long page can be read without the rest. [`OpLocations::prove`] proves its image once;
//! [`OpLocations::window`] reads the window's part of the image and the operations that reach into the
//! window. An operation on scattered elements is read for each window between its first and its last element.
//!
//! A location includes the checksum of the bytes that the walk proved there. If a writer recycles segments
//! meanwhile, a later read returns exactly these bytes or an error.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::defect::{Damage, Defect, check_crc};
use crate::frame::{FRAME_HEADER_LEN, FrameHeader};
use crate::ids::{LogPoint, Lsn, PageId};
use crate::image::ImageRef;
use crate::image::proven::ProvenImage;
use crate::image::read::read_range;
use crate::log::Frame;
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::op::{OP_HEADER_LEN, Op, OpAt, decode_single};
use crate::state::bases::Base;
use crate::state::coverage::Coverage;
use crate::state::follow::Resolution;
use crate::state::replay::{ResolvedState, Resolver};
use crate::state::survey::Survey;
use crate::state::window::{PageWindow, load_base, load_window};

/// Maximum number of bytes of a write per location. Longer writes are split, so that reading a window of the
/// page reads little more of them than the window contains.
const WRITTEN_AT_ONCE: usize = 1 << 20;

/// The location of an operation in the log, or of a part of the bytes of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpLocation {
    segment: u64,
    /// Offset in bytes from the start of the segment.
    offset: u64,
    pub lsn: Lsn,
    /// Range of the page's bytes that it can change.
    from: u64,
    to: u64,
    len: u32,
    crc: u32,
    /// Whether the location contains only bytes to write at `from`, rather than an encoded operation.
    is_part: bool,
}

/// The payload of a frame whose operations are located.
struct FramePart<'p> {
    header: &'p FrameHeader,
    payload: &'p [u8],
}

impl FramePart<'_> {
    fn place(&self, range: Range<usize>, reach: Range<u64>, is_part: bool) -> OpLocation {
        let Self { header, payload } = self;
        let offset = header.offset + FRAME_HEADER_LEN + range.start as u64;
        let bytes = &payload[range];
        OpLocation {
            segment: header.segment,
            offset,
            lsn: header.lsn,
            from: reach.start,
            to: reach.end,
            len: u32::try_from(bytes.len()).expect("a part of a payload, whose length is a u32"),
            crc: crc32fast::hash(bytes),
            is_part,
        }
    }
}

impl OpLocation {
    /// Locates operation `index` of a batch whose payload was checked.
    pub fn new(header: &FrameHeader, payload: &[u8], ops: &[OpAt<'_>], index: usize) -> Self {
        let start = ops[index].body_at - OP_HEADER_LEN;
        let end = ops.get(index + 1).map_or(payload.len(), |next| next.body_at - OP_HEADER_LEN);
        FramePart { header, payload }.place(start..end, reach(&ops[index].op), false)
    }

    /// Locates an operation like [`OpLocation::new`], but splits a long write into several locations.
    fn parts<'p>(
        header: &'p FrameHeader,
        payload: &'p [u8],
        ops: &[OpAt<'_>],
        index: usize,
    ) -> impl Iterator<Item = Self> + use<'p> {
        let OpAt { op, body_at } = &ops[index];
        let (whole, long) = match op {
            Op::Write { offset, bytes, .. } if bytes.len() > WRITTEN_AT_ONCE => {
                (None, Some((*offset, *body_at, bytes.len())))
            }
            _ => (Some(Self::new(header, payload, ops, index)), None),
        };
        let parts = long.into_iter().flat_map(move |(offset, body_at, len)| {
            (0..len).step_by(WRITTEN_AT_ONCE).map(move |from| {
                let to = len.min(from + WRITTEN_AT_ONCE);
                let reach = offset + from as u64..offset + to as u64;
                FramePart { header, payload }.place(body_at + from..body_at + to, reach, true)
            })
        });
        whole.into_iter().chain(parts)
    }

    /// Returns true if it can change bytes of a window of its page.
    pub fn reaches(&self, window: &Range<u64>) -> bool {
        self.from < window.end && window.start < self.to
    }

    /// Reads the operation, and applies it to its page.
    ///
    /// # Errors
    /// Returns [`Damage`] if the bytes are not those that were checked.
    pub fn apply(&self, source: &dyn ReadAt, page: PageId, target: &mut PageWindow) -> Result<(), Damage> {
        let bytes = self.read(source)?;
        if self.is_part {
            target.apply(&Op::Write { page, offset: self.from, bytes: &bytes });
        } else {
            target.apply(&decode_single(&bytes).map_err(|defect| self.at(defect))?);
        }
        Ok(())
    }

    /// Records the bytes of the page that it writes.
    fn note_in(&self, source: &dyn ReadAt, coverage: &mut Coverage) -> Result<(), Damage> {
        if self.is_part {
            coverage.write(self.from..self.to);
        } else {
            let bytes = self.read(source)?;
            coverage.apply(&decode_single(&bytes).map_err(|defect| self.at(defect))?);
        }
        Ok(())
    }

    /// Reads the operation's bytes, for [`decode_single`].
    ///
    /// # Errors
    /// Returns [`Damage`] if they are not those that were checked.
    pub fn read(&self, source: &dyn ReadAt) -> Result<Vec<u8>, Damage> {
        let file = FileName::Segment(self.segment);
        let bytes =
            read_range(source, file, self.offset, self.len.into()).map_err(|defect| self.at(defect))?;
        check_crc("operation", self.crc, &bytes).map_err(|defect| self.at(defect))?;
        Ok(bytes)
    }

    /// Locates a defect at this operation.
    pub fn at(&self, defect: Defect) -> Damage {
        defect.at_lsn(FileName::Segment(self.segment), self.offset, self.lsn)
    }
}

/// Returns the range of the page's bytes that an operation can change. A create, resize or delete reaches
/// everywhere, because it determines the length of the page.
pub(crate) fn reach(op: &Op<'_>) -> Range<u64> {
    match (op, op.range()) {
        (Op::Scatter { width, base, indices, .. }, Some((_, len))) => {
            let first = indices.lowest().unwrap_or(0);
            base.saturating_add(u64::from(first) * width.bytes() as u64)..base.saturating_add(len)
        }
        (Op::Write { .. } | Op::Masked { .. } | Op::Fill { .. }, Some((offset, len))) => {
            offset..offset.saturating_add(len)
        }
        (Op::Create { .. } | Op::Resize { .. } | Op::Delete { .. }, _) => 0..u64::MAX,
        _ => 0..0,
    }
}

/// A page whose base is proven, so that any window of it can be read.
#[derive(Clone, Debug)]
pub struct ProvenPage {
    page: PageId,
    base_len: u64,
    image: Option<ProvenImage>,
}

impl ProvenPage {
    /// Proves the base of a page: an image of `base_len` bytes, or zeros.
    pub(crate) fn prove(
        source: &dyn ReadAt,
        page: PageId,
        image: Option<ImageRef>,
        base_len: u64,
    ) -> Result<Self, Damage> {
        let image = image.map(|image| ProvenImage::prove(source, &image, base_len)).transpose()?;
        Ok(Self { page, base_len, image })
    }

    /// Reads a window of the page, with these operations applied.
    pub(crate) fn window(
        &self,
        source: &dyn ReadAt,
        locations: &[OpLocation],
        window: &Range<u64>,
    ) -> Result<Vec<u8>, Damage> {
        let mut bytes = load_window(source, self.base_len, self.image.as_ref(), window.clone())?;
        for location in locations.iter().filter(|location| location.reaches(window)) {
            location.apply(source, self.page, &mut bytes)?;
        }
        Ok(bytes.into_bytes())
    }
}

/// A proven base and the operations on top of it, recorded by the caller's own walk, for a page too long for
/// memory.
#[derive(Debug)]
pub struct PageTrail {
    proven: ProvenPage,
    locations: Vec<OpLocation>,
}

impl PageTrail {
    /// Proves the base of the page.
    ///
    /// # Errors
    /// Returns [`Damage`] in its image, or if there is no memory.
    pub fn prove(source: &dyn ReadAt, page: PageId, base: &Base) -> Result<Self, Damage> {
        Ok(Self { proven: ProvenPage::prove(source, page, base.image, base.len)?, locations: Vec::new() })
    }

    /// Records operation `index` of a batch whose payload was checked. It must apply to this page and follow
    /// its base.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if there is no memory for the location.
    pub fn note(
        &mut self,
        header: &FrameHeader,
        payload: &[u8],
        ops: &[OpAt<'_>],
        index: usize,
    ) -> Result<(), Defect> {
        note(&mut self.locations, header, payload, ops, index)
    }

    /// Reads a window of the page as it is after the recorded operations. The window must not extend past the
    /// end of the page.
    ///
    /// # Errors
    /// Returns [`Damage`] that occurred after the page was proven and its operations recorded, or if there is
    /// no memory.
    pub fn window(&self, source: &dyn ReadAt, window: &Range<u64>) -> Result<Vec<u8>, Damage> {
        self.proven.window(source, &self.locations, window)
    }
}

/// Adds the locations of an operation.
fn note(
    locations: &mut Vec<OpLocation>,
    header: &FrameHeader,
    payload: &[u8],
    ops: &[OpAt<'_>],
    index: usize,
) -> Result<(), Defect> {
    for location in OpLocation::parts(header, payload, ops, index) {
        let needed = (2 * locations.len() * size_of::<OpLocation>()) as u64;
        locations.try_reserve(1).map_err(|_| Defect::Memory { needed })?;
        locations.push(location);
    }
    Ok(())
}

/// The locations of the operations on top of the bases, for all pages of a state.
#[derive(Debug, Default)]
pub struct OpLocations {
    pages: HashMap<PageId, Vec<OpLocation>>,
    point: LogPoint,
}

impl OpLocations {
    /// Follows the log like [`Survey::resolve`], and records the locations of each page's operations. After
    /// an error, [`OpLocations::point`] returns the point reached.
    ///
    /// # Errors
    /// Returns [`Damage`] as [`Survey::resolve`] does, or if there is no memory for a location.
    pub fn follow(
        &mut self,
        survey: &Survey,
        source: &dyn ReadAt,
        base: Option<&Arc<Manifest>>,
        until: Option<Lsn>,
    ) -> Result<Resolution, Damage> {
        self.pages.clear();
        self.point = base.map_or_else(LogPoint::default, |manifest| manifest.redo);
        let resolution = survey.follow(source, base, until, &mut |resolver, frame, ops| {
            let header = &frame.header;
            self.note(resolver, frame, ops)
                .map_err(|defect| defect.at_lsn(FileName::Segment(header.segment), header.offset, header.lsn))
        })?;
        // A page re-created on the way, by a restore or a create, needs no earlier operations.
        let resolved = &resolution.resolved;
        self.pages.retain(|page, locations| {
            locations.retain(|location| resolved.applies(*page, location.lsn));
            !locations.is_empty()
        });
        Ok(resolution)
    }

    fn note(&mut self, resolver: &Resolver, frame: &Frame<'_>, ops: &[OpAt<'_>]) -> Result<(), Defect> {
        let lsn = frame.header.lsn;
        self.point = frame.end;
        for (index, at) in ops.iter().enumerate() {
            let Some(page) = at.op.page().filter(|page| resolver.applies(*page, lsn)) else { continue };
            if !at.op.changes_bytes() {
                continue;
            }
            let needed = (self.pages.len() * size_of::<OpLocation>()) as u64;
            self.pages.try_reserve(1).map_err(|_| Defect::Memory { needed })?;
            note(self.pages.entry(page).or_default(), &frame.header, frame.payload, ops, index)?;
        }
        Ok(())
    }

    /// Returns the end of the last batch followed, whether or not the walk succeeded.
    #[must_use]
    pub fn point(&self) -> LogPoint {
        self.point
    }

    /// Returns the image that contains exactly a page's bytes, if there is one.
    #[must_use]
    pub fn exact_image(&self, resolved: &ResolvedState, page: PageId) -> Option<ImageRef> {
        let base = resolved.bases.get(page).filter(|_| !self.pages.contains_key(&page))?;
        base.image
    }

    /// Loads the bytes of one page.
    ///
    /// # Errors
    /// Returns [`Damage`] in its image or one of its operations, or with [`Defect::Memory`] if there is no
    /// memory for it.
    ///
    /// # Panics
    /// Panics if the page is not in the state's table.
    pub fn load(
        &self,
        source: &dyn ReadAt,
        resolved: &ResolvedState,
        page: PageId,
    ) -> Result<Vec<u8>, Damage> {
        let base = resolved.bases.get(page).expect("a page of the table");
        let final_len = resolved.final_len(page);
        let mut whole = load_base(source, &base, final_len).or_else(|damage| {
            let zeros = Base { image: None, ..base };
            if self.is_image_overwritten(source, resolved, page) {
                load_base(source, &zeros, final_len)
            } else {
                Err(damage)
            }
        })?;
        for location in self.pages.get(&page).into_iter().flatten() {
            location.apply(source, page, &mut whole)?;
        }
        Ok(whole.into_bytes())
    }

    /// Proves the base of a page, so that the page can be read by windows. Its operations were proven when
    /// they were recorded.
    ///
    /// # Errors
    /// Returns [`Damage`] in its image.
    ///
    /// # Panics
    /// Panics if the page is not in the state's table.
    pub fn prove(
        &self,
        source: &dyn ReadAt,
        resolved: &ResolvedState,
        page: PageId,
    ) -> Result<ProvenPage, Damage> {
        let base = resolved.bases.get(page).expect("a page of the table");
        ProvenPage::prove(source, page, base.image, base.len).or_else(|damage| {
            if self.is_image_overwritten(source, resolved, page) {
                ProvenPage::prove(source, page, None, base.len)
            } else {
                Err(damage)
            }
        })
    }

    /// Returns true if batches have overwritten every byte of a page's image. Operations that can no longer
    /// be read hide nothing.
    ///
    /// # Panics
    /// Panics if the page is not in the state's table.
    #[must_use]
    pub fn is_image_overwritten(&self, source: &dyn ReadAt, resolved: &ResolvedState, page: PageId) -> bool {
        let base = resolved.bases.get(page).expect("a page of the table");
        let mut coverage = Coverage::new(base.len);
        let locations = self.pages.get(&page).map_or(&[][..], Vec::as_slice);
        let noted = locations.iter().try_for_each(|location| location.note_in(source, &mut coverage));
        noted.is_ok() && coverage.is_whole()
    }

    /// Reads a window of a page. It must not extend past the end of the page in this state.
    ///
    /// # Errors
    /// Returns [`Damage`] in its image that occurred after it was proven, or in one of its operations, or
    /// with [`Defect::Memory`] if there is no memory for it.
    pub fn window(
        &self,
        source: &dyn ReadAt,
        proven: &ProvenPage,
        window: &Range<u64>,
    ) -> Result<Vec<u8>, Damage> {
        let locations = self.pages.get(&proven.page).map_or(&[][..], Vec::as_slice);
        proven.window(source, locations, window)
    }
}
