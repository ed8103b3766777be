//! Single pages of a state, without loading all of it: the locations of the operations that make a page
//! from its base.
//!
//! [`Survey::resolve`] walks the log once and keeps only the table. [`Trails::follow`] does the same, and
//! also notes for each page the locations of its operations: 56 bytes each, and as much for every mebibyte
//! that one writes. Then [`Trails::load`] reads a page's base and its own operations, and nothing of other
//! pages.
//!
//! Of a long page any window can be had without the rest: [`Trails::prove`] proves its image once, and
//! [`Trails::window`] reads what the window has of it, and those operations that reach there. An operation
//! that sets elements here and there is read for each window between its first and its last one.
//!
//! A place keeps the checksum of the bytes that the walk proved there. A later read, while a writer recycles
//! segments, gets these bytes or an error.

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

/// More bytes of one write have several locations, so that a window of the page reads no more of them than it
/// has.
const WRITTEN_AT_ONCE: usize = 1 << 20;

/// Where an operation lies in the log, or a part of the bytes that one writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpLocation {
    segment: u64,
    /// From the segment's start.
    offset: u64,
    pub lsn: Lsn,
    /// The bytes of its page that it can change.
    from: u64,
    to: u64,
    len: u32,
    crc: u32,
    /// Whether there lie bytes which go to `from`, and not an operation.
    is_part: bool,
}

/// Where operations lie that were cut out of the payload of a frame.
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
    /// The place of the operation `index` of a batch whose payload was checked.
    pub fn new(header: &FrameHeader, payload: &[u8], ops: &[OpAt<'_>], index: usize) -> Self {
        let start = ops[index].body_at - OP_HEADER_LEN;
        let end = ops.get(index + 1).map_or(payload.len(), |next| next.body_at - OP_HEADER_LEN);
        FramePart { header, payload }.place(start..end, reach(&ops[index].op), false)
    }

    /// As [`OpLocation::new`], but a long write has several, one behind the other.
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

    /// Whether it can change bytes of a window of its page.
    pub fn reaches(&self, window: &Range<u64>) -> bool {
        self.from < window.end && window.start < self.to
    }

    /// Reads what lies there, and applies it to its page.
    ///
    /// # Errors
    /// [`Damage`] if it is not what was checked.
    pub fn apply(&self, source: &dyn ReadAt, page: PageId, target: &mut PageWindow) -> Result<(), Damage> {
        let bytes = self.read(source)?;
        if self.is_part {
            target.apply(&Op::Write { page, offset: self.from, bytes: &bytes });
        } else {
            target.apply(&decode_single(&bytes).map_err(|defect| self.at(defect))?);
        }
        Ok(())
    }

    /// Notes the bytes of the page that it writes.
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
    /// [`Damage`] if they are not those that were checked.
    pub fn read(&self, source: &dyn ReadAt) -> Result<Vec<u8>, Damage> {
        let file = FileName::Segment(self.segment);
        let bytes =
            read_range(source, file, self.offset, self.len.into()).map_err(|defect| self.at(defect))?;
        check_crc("operation", self.crc, &bytes).map_err(|defect| self.at(defect))?;
        Ok(bytes)
    }

    /// A defect of this operation.
    pub fn at(&self, defect: Defect) -> Damage {
        defect.at_lsn(FileName::Segment(self.segment), self.offset, self.lsn)
    }
}

/// The bytes of its page that an operation can change. One that makes the page anew, longer or shorter counts
/// everywhere: it says how long the page is by then.
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

/// A page of which any window can be had: its image, if it is made from one, was proven.
#[derive(Clone, Debug)]
pub struct ProvenPage {
    page: PageId,
    base_len: u64,
    image: Option<ProvenImage>,
}

impl ProvenPage {
    /// Proves what a page is made from: an image of `base_len` bytes, or as many zeros.
    pub(crate) fn prove(
        source: &dyn ReadAt,
        page: PageId,
        image: Option<ImageRef>,
        base_len: u64,
    ) -> Result<Self, Damage> {
        let image = image.map(|image| ProvenImage::prove(source, &image, base_len)).transpose()?;
        Ok(Self { page, base_len, image })
    }

    /// A window of it, with these operations on top.
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

/// One page with the operations on top of what it is made from, noted by a walk of the caller's own: for a
/// page that is too long to be put together in memory.
#[derive(Debug)]
pub struct PageTrail {
    proven: ProvenPage,
    locations: Vec<OpLocation>,
}

impl PageTrail {
    /// Proves what the page is made from.
    ///
    /// # Errors
    /// [`Damage`] in its image, or there is no memory.
    pub fn prove(source: &dyn ReadAt, page: PageId, base: &Base) -> Result<Self, Damage> {
        Ok(Self { proven: ProvenPage::prove(source, page, base.image, base.len)?, locations: Vec::new() })
    }

    /// Notes operation `index` of a batch whose payload was checked: it is on this page, and after its base.
    ///
    /// # Errors
    /// [`Defect::Memory`].
    pub fn note(
        &mut self,
        header: &FrameHeader,
        payload: &[u8],
        ops: &[OpAt<'_>],
        index: usize,
    ) -> Result<(), Defect> {
        note(&mut self.locations, header, payload, ops, index)
    }

    /// A window of the page as it is after these operations, which ends where the page does or before.
    ///
    /// # Errors
    /// [`Damage`] that was not there when the page was proven and its operations noted, or there is no
    /// memory.
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

/// The operations that a page's bytes need on top of its base, for all pages of a state.
#[derive(Debug, Default)]
pub struct Trails {
    pages: HashMap<PageId, Vec<OpLocation>>,
    point: LogPoint,
}

impl Trails {
    /// Follows the log as [`Survey::resolve`] does, and notes where each page's operations lie. After an
    /// error [`Trails::point`] says how far it came.
    ///
    /// # Errors
    /// As for [`Survey::resolve`].
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
        // A page that was made anew on the way, by a restore or a create, needs nothing from before.
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

    /// The end of the last batch that was followed, whether or not the walk ended well.
    #[must_use]
    pub fn point(&self) -> LogPoint {
        self.point
    }

    /// The image that holds exactly a page's bytes, if there is one.
    #[must_use]
    pub fn exact_image(&self, resolved: &ResolvedState, page: PageId) -> Option<ImageRef> {
        let base = resolved.bases.get(page).filter(|_| !self.pages.contains_key(&page))?;
        base.image
    }

    /// Puts the bytes of one page together.
    ///
    /// # Errors
    /// [`Damage`] in its image or one of its operations; [`Defect::Memory`] if there is no room for it.
    ///
    /// # Panics
    /// If the page is not in the state's table.
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
            if self.hides_image(source, resolved, page) {
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

    /// Proves what a page is made from, so that its bytes can be had window by window. Its operations were
    /// proven where they were noted.
    ///
    /// # Errors
    /// [`Damage`] in its image.
    ///
    /// # Panics
    /// If the page is not in the state's table.
    pub fn prove(
        &self,
        source: &dyn ReadAt,
        resolved: &ResolvedState,
        page: PageId,
    ) -> Result<ProvenPage, Damage> {
        let base = resolved.bases.get(page).expect("a page of the table");
        ProvenPage::prove(source, page, base.image, base.len).or_else(|damage| {
            if self.hides_image(source, resolved, page) {
                ProvenPage::prove(source, page, None, base.len)
            } else {
                Err(damage)
            }
        })
    }

    /// Whether batches wrote all of a page since its image, so that no byte of the image is left in it.
    /// Operations that cannot be read any more hide nothing.
    ///
    /// # Panics
    /// If the page is not in the state's table.
    #[must_use]
    pub fn hides_image(&self, source: &dyn ReadAt, resolved: &ResolvedState, page: PageId) -> bool {
        let base = resolved.bases.get(page).expect("a page of the table");
        let mut coverage = Coverage::new(base.len);
        let locations = self.pages.get(&page).map_or(&[][..], Vec::as_slice);
        let noted = locations.iter().try_for_each(|location| location.note_in(source, &mut coverage));
        noted.is_ok() && coverage.is_whole()
    }

    /// The bytes of a window of a page, which ends where the page does in this state or before.
    ///
    /// # Errors
    /// [`Damage`] in its image, which held when it was proven, or in one of its operations;
    /// [`Defect::Memory`] if there is no room for it.
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
