//! Single pages of a state, without loading all of it: the places of the operations that make a page from its
//! base.
//!
//! [`Survey::resolve`] walks the log once and keeps only the table. [`Trails::follow`] does the same, and
//! also notes for each page the places of its operations: some 32 bytes each, however long they are. Then
//! [`Trails::load`] reads a page's base and its own operations, and nothing of other pages.
//!
//! A place keeps the checksum of the bytes that the walk proved there. A later read, while a writer recycles
//! segments, gets these bytes or an error.

use std::collections::HashMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect, check_crc};
use crate::frame::{FRAME_HEADER_LEN, FrameHeader};
use crate::ids::{LogPoint, Lsn, PageId};
use crate::image::ImageRef;
use crate::image::read::read_range;
use crate::log::Frame;
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::op::{OP_HEADER_LEN, OpAt, decode_single};
use crate::state::follow::Resolution;
use crate::state::head::load_base;
use crate::state::replay::{ResolvedState, Resolver};
use crate::state::survey::Survey;

/// The place of an operation in the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpPlace {
    segment: u64,
    /// From the segment's start.
    offset: u64,
    len: u32,
    crc: u32,
    pub lsn: Lsn,
}

impl OpPlace {
    /// The place of the operation `index` of a batch whose payload was checked.
    pub fn new(header: &FrameHeader, payload: &[u8], ops: &[OpAt<'_>], index: usize) -> Self {
        let start = ops[index].body_at - OP_HEADER_LEN;
        let end = ops.get(index + 1).map_or(payload.len(), |next| next.body_at - OP_HEADER_LEN);
        let bytes = &payload[start..end];
        Self {
            segment: header.segment,
            offset: header.offset + FRAME_HEADER_LEN + start as u64,
            len: u32::try_from(bytes.len()).expect("a part of a payload, whose length is a u32"),
            crc: crc32fast::hash(bytes),
            lsn: header.lsn,
        }
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

/// The operations that a page's bytes need on top of its base, for all pages of a state.
#[derive(Debug, Default)]
pub struct Trails {
    pages: HashMap<PageId, Vec<OpPlace>>,
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
            self.note(resolver, frame, ops);
        })?;
        // A page that was made anew on the way, by a restore or a create, needs nothing from before.
        let resolved = &resolution.resolved;
        self.pages.retain(|page, places| {
            places.retain(|place| resolved.applies(*page, place.lsn));
            !places.is_empty()
        });
        Ok(resolution)
    }

    fn note(&mut self, resolver: &Resolver, frame: &Frame<'_>, ops: &[OpAt<'_>]) {
        let lsn = frame.header.lsn;
        self.point = frame.end;
        for (index, at) in ops.iter().enumerate() {
            let Some(page) = at.op.page().filter(|page| resolver.applies(*page, lsn)) else { continue };
            if !at.op.changes_bytes() {
                continue;
            }
            self.pages.entry(page).or_default().push(OpPlace::new(&frame.header, frame.payload, ops, index));
        }
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
        let mut head = load_base(source, &base, resolved.final_len(page))?;
        for place in self.pages.get(&page).into_iter().flatten() {
            let bytes = place.read(source)?;
            head.apply(&decode_single(&bytes).map_err(|defect| place.at(defect))?);
        }
        Ok(head.into_bytes())
    }
}
