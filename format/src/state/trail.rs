//! Reads single pages of a state, without reading the bytes of all pages. A page is computed from its base and from the
//! operations on the page, whose locations in the log are recorded.
//!
//! [`Survey::resolve`] walks the log once and keeps only the page table. [`OpLocations::follow`] also records the
//! locations of all operations. A location has 56 bytes. An operation has one location, except that a long write has
//! one per MiB. [`OpLocations::load`] then reads the base and the operations of one page.
//!
//! A window of a long page can be read without the other bytes of the page. [`OpLocations::prove`] first proves
//! the page's image. An operation on scattered elements is read for every window between its first and its last
//! element, even if the window contains none of the elements.
//!
//! A location contains the checksum of the bytes that the walk proved. If a writer recycles the segment, a later read
//! returns the same bytes or an error.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::defect::{Damage, Defect, check_crc};
use crate::frame::{FRAME_HEADER_LEN, FrameHeader};
use crate::ids::{LogPoint, Lsn, PageId};
use crate::image::ImageRef;
use crate::image::proven::ProvenImage;
use crate::image::read::{check_image, read_image_into, read_range};
use crate::log::Frame;
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::op::{OP_HEADER_LEN, Op, OpAt, decode_single};
use crate::state::apply::write_clipped;
use crate::state::bases::Base;
use crate::state::coverage::Coverage;
use crate::state::follow::Resolution;
use crate::state::replay::{ResolvedState, Resolver};
use crate::state::survey::Survey;
use crate::state::window::{PageWindow, load_base, load_window};

/// Maximum number of bytes of a write per location. Longer writes have several locations, so that a read of a window
/// reads few bytes outside the window.
const WRITTEN_AT_ONCE: usize = 1 << 20;

/// The location of an operation in the log, or of a part of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpLocation {
    segment: u64,
    /// Offset of the operation's bytes, from the start of the segment.
    offset: u64,
    pub lsn: Lsn,
    /// Start of the range of the page that the operation can change, in bytes.
    from: u64,
    to: u64,
    len: u32,
    crc: u32,
    /// Whether the location contains only bytes, to be written at `from`. If false, it contains an encoded operation.
    is_part: bool,
}

/// A frame and its payload, from which the locations of operations are computed.
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
    /// Returns the location of operation `index` of a batch. The payload must have been checked.
    pub fn new(header: &FrameHeader, payload: &[u8], ops: &[OpAt<'_>], index: usize) -> Self {
        let start = ops[index].body_at - OP_HEADER_LEN;
        let end = ops.get(index + 1).map_or(payload.len(), |next| next.body_at - OP_HEADER_LEN);
        FramePart { header, payload }.place(start..end, reach(&ops[index].op), false)
    }

    /// Returns the locations of operation `index`. A long write has several locations, and any other operation has one.
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

    /// Returns true if the operation can change bytes inside `window`, a range of its page.
    pub fn reaches(&self, window: &Range<u64>) -> bool {
        self.from < window.end && window.start < self.to
    }

    /// Returns true if the operation does not change the length of its page.
    fn keeps_len(&self) -> bool {
        self.to < u64::MAX
    }

    /// Reads the operation and applies it to a window of its page.
    ///
    /// # Errors
    /// Returns [`Damage`] if the bytes have changed since the location was recorded.
    pub fn apply(&self, source: &dyn ReadAt, page: PageId, target: &mut PageWindow) -> Result<(), Damage> {
        self.with_op(source, page, |op| target.apply(op))
    }

    /// Reads the operation and passes it to `sink`.
    ///
    /// # Errors
    /// Returns [`Damage`] if the bytes have changed since the location was recorded.
    fn with_op(&self, source: &dyn ReadAt, page: PageId, sink: impl FnOnce(&Op<'_>)) -> Result<(), Damage> {
        let bytes = self.read(source)?;
        if self.is_part {
            sink(&Op::Write { page, offset: self.from, bytes: &bytes });
        } else {
            sink(&decode_single(&bytes).map_err(|defect| self.at(defect))?);
        }
        Ok(())
    }

    /// Adds the ranges of the page that the operation writes to `coverage`.
    fn note_in(&self, source: &dyn ReadAt, coverage: &mut Coverage) -> Result<(), Damage> {
        if self.is_part {
            coverage.write(self.from..self.to);
        } else {
            let bytes = self.read(source)?;
            coverage.apply(&decode_single(&bytes).map_err(|defect| self.at(defect))?);
        }
        Ok(())
    }

    /// Reads the bytes of the encoded operation. [`decode_single`] can decode them.
    ///
    /// # Errors
    /// Returns [`Damage`] if the bytes have changed since the location was recorded.
    pub fn read(&self, source: &dyn ReadAt) -> Result<Vec<u8>, Damage> {
        let file = FileName::Segment(self.segment);
        let bytes =
            read_range(source, file, self.offset, self.len.into()).map_err(|defect| self.at(defect))?;
        check_crc("operation", self.crc, &bytes).map_err(|defect| self.at(defect))?;
        Ok(bytes)
    }

    /// Returns a defect with the location of this operation.
    pub fn at(&self, defect: Defect) -> Damage {
        defect.at_lsn(FileName::Segment(self.segment), self.offset, self.lsn)
    }
}

/// Returns the range of the page that an operation can change, in bytes. A create, a resize and a delete can change all
/// bytes.
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

/// A page whose base is proven. The bytes of the page can be read in windows.
#[derive(Clone, Debug)]
pub struct ProvenPage {
    page: PageId,
    base_len: u64,
    image: Option<ProvenImage>,
}

impl ProvenPage {
    /// Reads and proves the base of a page, which is an image of `base_len` bytes or zeros.
    pub(crate) fn prove(
        source: &dyn ReadAt,
        page: PageId,
        image: Option<ImageRef>,
        base_len: u64,
    ) -> Result<Self, Damage> {
        let image = image.map(|image| ProvenImage::prove(source, &image, base_len)).transpose()?;
        Ok(Self { page, base_len, image })
    }

    /// Computes a window of the page from the base and the operations at `locations`.
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

/// A page that is too long for memory. It consists of a proven base and the locations of later operations, which the
/// caller adds while it walks the log.
#[derive(Debug)]
pub struct PageTrail {
    proven: ProvenPage,
    locations: Vec<OpLocation>,
}

impl PageTrail {
    /// Reads and proves the base of a page.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image is damaged, or if there is not enough memory.
    pub fn prove(source: &dyn ReadAt, page: PageId, base: &Base) -> Result<Self, Damage> {
        Ok(Self { proven: ProvenPage::prove(source, page, base.image, base.len)?, locations: Vec::new() })
    }

    /// Records the location of operation `index` of a batch. The caller must have checked the payload. The operation
    /// must change this page, and its batch must be after the base.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if there is not enough memory.
    pub fn note(
        &mut self,
        header: &FrameHeader,
        payload: &[u8],
        ops: &[OpAt<'_>],
        index: usize,
    ) -> Result<(), Defect> {
        note(&mut self.locations, header, payload, ops, index)
    }

    /// Reads a window of the page as of the last recorded operation. The window must be within the page.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image or an operation has changed on disk since it was proven, or if there is not
    /// enough memory.
    pub fn window(&self, source: &dyn ReadAt, window: &Range<u64>) -> Result<Vec<u8>, Damage> {
        self.proven.window(source, &self.locations, window)
    }
}

/// Appends the locations of operation `index` of a batch.
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

/// The locations in the log of all operations on the pages of a state. An operation that the base of its page includes
/// is not recorded.
#[derive(Debug, Default)]
pub struct OpLocations {
    pages: HashMap<PageId, Vec<OpLocation>>,
    point: LogPoint,
}

impl OpLocations {
    /// Computes a state as [`Survey::resolve`] does, and records the locations of the operations on each page. After an
    /// error, [`OpLocations::point`] returns the end of the last batch.
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`Survey::resolve`], or [`Damage`] with [`Defect::Memory`] if there is not enough
    /// memory.
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
        // A restore or a create may have replaced the page, so drop the operations before its base.
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

    /// Returns the end of the last batch that was applied, even if the walk failed later.
    #[must_use]
    pub fn point(&self) -> LogPoint {
        self.point
    }

    /// Returns the image that contains the final bytes of a page. Returns `None` if later operations changed the page,
    /// or if the page has no image.
    #[must_use]
    pub fn exact_image(&self, resolved: &ResolvedState, page: PageId) -> Option<ImageRef> {
        let base = resolved.bases.get(page).filter(|_| !self.pages.contains_key(&page))?;
        base.image
    }

    /// Reads the bytes of one page.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image or an operation of the page is damaged, or if there is not enough memory.
    ///
    /// # Panics
    /// Panics if the page is not in the table of the state.
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
        for location in self.of(page) {
            location.apply(source, page, &mut whole)?;
        }
        Ok(whole.into_bytes())
    }

    /// Returns the base of a page if none of the later operations changes the length of the page. The final bytes are
    /// then the bytes of the base, overwritten by these operations. Returns `None` otherwise.
    ///
    /// # Panics
    /// Panics if the page is not in the table of the state.
    #[must_use]
    pub fn base_in_place(&self, resolved: &ResolvedState, page: PageId) -> Option<Base> {
        let base = resolved.bases.get(page).expect("a page of the table");
        let keeps_len = self.of(page).iter().all(OpLocation::keeps_len);
        (keeps_len && base.len == resolved.final_len(page)).then_some(base)
    }

    /// Reads the bytes of one page into `out`, whose length must be that of the page. The bytes are read once and without
    /// a copy. Returns `false`, and reads nothing, if [`base_in_place`](Self::base_in_place) returns `None`.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image or an operation of the page is damaged. The contents of `out` are then unspecified.
    ///
    /// # Panics
    /// Panics if the page is not in the table of the state.
    pub fn read_into(
        &self,
        source: &dyn ReadAt,
        resolved: &ResolvedState,
        page: PageId,
        out: &mut [u8],
    ) -> Result<bool, Damage> {
        let Some(base) = self.base_in_place(resolved, page) else { return Ok(false) };
        let read = base.image.map(|image| read_image_into(source, &image, out));
        match read {
            Some(Ok(())) => {}
            // Every byte of the image is overwritten below.
            Some(Err(damage)) if !self.is_image_overwritten(source, resolved, page) => return Err(damage),
            _ => out.fill(0),
        }
        self.write_over(source, page, 0, out)?;
        Ok(true)
    }

    /// Applies the operations of a page to `bytes`, which are bytes of the page's base from offset `from` on. The page
    /// must have a [`base_in_place`](Self::base_in_place).
    ///
    /// # Errors
    /// Returns [`Damage`] if an operation has changed on disk since its location was recorded.
    ///
    /// # Panics
    /// Panics if an operation changes the length of the page.
    pub fn write_over(
        &self,
        source: &dyn ReadAt,
        page: PageId,
        from: u64,
        bytes: &mut [u8],
    ) -> Result<(), Damage> {
        let window = from..from + bytes.len() as u64;
        let mut reaching = self.of(page).iter().filter(|location| location.reaches(&window));
        reaching.try_for_each(|location| location.with_op(source, page, |op| write_clipped(op, bytes, from)))
    }

    /// Returns the ranges of a page that its operations can change, in ascending order. Ranges that are less than
    /// `gap_min` bytes apart are joined.
    #[must_use]
    pub fn changed_ranges(&self, page: PageId, gap_min: u64) -> Vec<Range<u64>> {
        let mut ranges: Vec<_> = self.of(page).iter().map(|location| location.from..location.to).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            match joined.last_mut().filter(|last| range.start < last.end.saturating_add(gap_min)) {
                Some(last) => last.end = last.end.max(range.end),
                None => joined.push(range),
            }
        }
        joined
    }

    /// Reads and checks everything from which one page is computed, in pieces and without keeping the bytes.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image or an operation of the page is damaged.
    ///
    /// # Panics
    /// Panics if the page is not in the table of the state.
    pub fn check(&self, source: &dyn ReadAt, resolved: &ResolvedState, page: PageId) -> Result<(), Damage> {
        let base = resolved.bases.get(page).expect("a page of the table");
        if let Some(image) = base.image
            && let Err(damage) = check_image(source, &image, base.len)
            && !self.is_image_overwritten(source, resolved, page)
        {
            return Err(damage);
        }
        self.of(page).iter().try_for_each(|location| location.read(source).map(drop))
    }

    fn of(&self, page: PageId) -> &[OpLocation] {
        self.pages.get(&page).map_or(&[], Vec::as_slice)
    }

    /// Reads and proves the base of a page, so that windows of the page can be read. The operations were proven when
    /// their locations were recorded.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image is damaged.
    ///
    /// # Panics
    /// Panics if the page is not in the table of the state.
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

    /// Returns true if later operations have overwritten every byte of a page's image. Returns false if an operation
    /// can no longer be read.
    ///
    /// # Panics
    /// Panics if the page is not in the table of the state.
    #[must_use]
    pub fn is_image_overwritten(&self, source: &dyn ReadAt, resolved: &ResolvedState, page: PageId) -> bool {
        let base = resolved.bases.get(page).expect("a page of the table");
        let mut coverage = Coverage::new(base.len);
        let noted = self.of(page).iter().try_for_each(|location| location.note_in(source, &mut coverage));
        noted.is_ok() && coverage.is_whole()
    }

    /// Reads a window of a page. The window must be within the page in this state.
    ///
    /// # Errors
    /// Returns [`Damage`] if the image has changed since it was proven, if an operation has changed, or if there is not
    /// enough memory.
    pub fn window(
        &self,
        source: &dyn ReadAt,
        proven: &ProvenPage,
        window: &Range<u64>,
    ) -> Result<Vec<u8>, Damage> {
        proven.window(source, self.of(proven.page), window)
    }
}
