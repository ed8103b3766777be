//! The known log. It consists of the batches that can be proven even if the frames around them are damaged.
//!
//! The walk of [`crate::log`] stops at the first frame that does not follow the previous frame. In a damaged log, valid
//! batches can exist after that frame. This module finds them. A frame is known if its header, position and payload are
//! valid and it meets one of these conditions:
//!
//! - A structure of its own incarnation states that the batch was durable. No recovery cuts such a batch off (I5).
//! - Its chain hash shows that it follows a known frame, and it is located before the end of its incarnation.
//!
//! A batch that a recovery cut off is therefore never known. No condition depends on seals, so a lost seal hides no
//! batch.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::defect::{Damage, Defect, collected};
use crate::frame::{FRAME_HEADER_LEN, FrameHeader, FrameKind, UncheckedFrame, check_payload};
use crate::ids::{Incarnation, LogPoint, Lsn, PageId};
use crate::image::read::read_range;
use crate::log::{Segment, frames_of_segment};
use crate::names::{FileName, ReadAt};
use crate::op::{Op, OpAt, decode_payload};
use crate::segment::Opening;
use crate::state::survey::Survey;
use crate::state::trail::OpLocation;

/// A batch whose frame is proven.
struct KnownBatch {
    header: FrameHeader,
    end: LogPoint,
    touches: Vec<(PageId, OpLocation)>,
    /// Number and checksum of the table that the batch restores, or `None` if the batch is not a restore.
    restores: Option<(u64, u32)>,
}

/// All known batches of the log, indexed by Lsn and by page.
pub(super) struct KnownLog {
    batches: BTreeMap<Lsn, KnownBatch>,
    /// Runs of consecutive known batches. The key is the first Lsn of the run, and the value is the last.
    runs: BTreeMap<Lsn, Lsn>,
    /// Lsns of the batches that restore an earlier state.
    restores: BTreeSet<Lsn>,
    /// Operations on each page, in the order of the log.
    touches: BTreeMap<PageId, Vec<OpLocation>>,
    /// Lsn of the newest batch that a structure proves to be durable; see [`super::LogRemainder`].
    pub durable: Lsn,
    pub seen: Lsn,
    pub hidden: Option<Damage>,
}

impl KnownLog {
    /// Searches all segments for known batches.
    ///
    /// # Errors
    /// Returns [`Damage`] with [`Defect::Memory`] if there is not enough memory. The batch may be intact.
    pub fn read(source: &dyn ReadAt, survey: &Survey) -> Result<Self, Damage> {
        let segments = survey.log.segments();
        let mut frames: Vec<UncheckedFrame> = segments
            .keys()
            .flat_map(|number| frames_of_segment(source, survey.store.store, *number))
            .collect();
        // Sort the frames in the order in which they were written.
        frames.sort_unstable_by_key(|frame| {
            let header = frame.unproven();
            (header.incarnation, header.segment, header.offset)
        });
        let openings: Vec<(u64, Opening)> = segments
            .iter()
            .filter_map(|(number, segment)| Some((*number, segment.header.as_ref().ok()?.opening?)))
            .collect();
        let marks = marks(&frames, &openings, survey);
        let mut points = starts(&openings, survey);
        let mut batches = BTreeMap::new();
        for frame in &frames {
            let (header, end) = (*frame.unproven(), frame.end());
            let lsn_before = match header.kind {
                FrameKind::Batch => Lsn(header.lsn.0.saturating_sub(1)),
                FrameKind::Seal => header.lsn,
            };
            let is_durable = marks.get(&header.incarnation).is_some_and(|mark| header.lsn <= *mark);
            let follows =
                points.contains(&(lsn_before, header.chain_prev)) && !is_past_end(&header, &openings);
            if !is_durable && !follows {
                continue;
            }
            let at =
                |defect: Defect| defect.at_lsn(FileName::Segment(header.segment), header.offset, header.lsn);
            let payload = match read_payload(source, &header) {
                Ok(payload) => payload,
                Err(defect @ Defect::Memory { .. }) => return Err(at(defect)),
                Err(_) => continue,
            };
            points.insert((end.lsn, end.chain));
            // A recovery copies some batches. The copy sorts last, so its location is kept.
            if header.kind == FrameKind::Batch && header.lsn > Lsn(0) {
                match decode_payload(&payload) {
                    Ok(ops) => {
                        let batch = KnownBatch::new(header, end, &payload, &ops).map_err(at)?;
                        batches.insert(header.lsn, batch);
                    }
                    Err(defect @ Defect::Memory { .. }) => return Err(at(defect)),
                    Err(_) => {}
                }
            }
        }
        let durable = marks.values().copied().max().unwrap_or_default();
        let seen = frames.iter().map(|frame| frame.unproven().lsn).max().unwrap_or_default();
        Ok(Self::of(batches, durable, seen, hidden(survey, &frames)))
    }

    fn of(mut batches: BTreeMap<Lsn, KnownBatch>, durable: Lsn, seen: Lsn, hidden: Option<Damage>) -> Self {
        let mut runs: BTreeMap<Lsn, Lsn> = BTreeMap::new();
        let mut touches: BTreeMap<PageId, Vec<OpLocation>> = BTreeMap::new();
        for (lsn, batch) in &mut batches {
            match runs.last_entry() {
                Some(mut run) if run.get().next() == *lsn => _ = run.insert(*lsn),
                _ => _ = runs.insert(*lsn, *lsn),
            }
            for (page, location) in std::mem::take(&mut batch.touches) {
                touches.entry(page).or_default().push(location);
            }
        }
        let restores =
            batches.iter().filter(|(_, batch)| batch.restores.is_some()).map(|(lsn, _)| *lsn).collect();
        Self { batches, runs, restores, touches, durable, seen, hidden }
    }

    /// Returns the Lsn of the last batch in the run of known batches after `lsn`. Returns `lsn` if the next batch is
    /// not known.
    pub fn reach(&self, lsn: Lsn) -> Lsn {
        match self.runs.range(..=lsn.next()).next_back() {
            Some((_, last)) if *last > lsn => *last,
            _ => lsn,
        }
    }

    /// Returns the same Lsn as [`KnownLog::reach`], but stops before the next restore, because a restore can replace
    /// pages.
    pub fn reach_before_restore(&self, lsn: Lsn) -> Lsn {
        let reach = self.reach(lsn);
        self.restores.range(lsn.next()..).next().map_or(reach, |restore| reach.min(Lsn(restore.0 - 1)))
    }

    /// Reads the payload of a known batch. Returns the payload and the point at the end of the batch.
    ///
    /// # Errors
    /// Returns [`Damage`] if the batch is not known or can no longer be read.
    pub fn payload(&self, source: &dyn ReadAt, lsn: Lsn) -> Result<(Vec<u8>, LogPoint), Damage> {
        let batch = self.batches.get(&lsn).ok_or_else(|| self.hole(lsn))?;
        let at =
            |defect: Defect| defect.at_lsn(FileName::Segment(batch.end.segment), batch.header.offset, lsn);
        Ok((read_payload(source, &batch.header).map_err(at)?, batch.end))
    }

    /// Returns the known operations on a page in the batches after `after` and up to `until`.
    pub fn touches(&self, page: PageId, after: Lsn, until: Lsn) -> &[OpLocation] {
        let locations = self.touches.get(&page).map_or(&[][..], Vec::as_slice);
        let start = locations.partition_point(|location| location.lsn <= after);
        let end = locations.partition_point(|location| location.lsn <= until);
        &locations[start..end.max(start)]
    }

    /// Returns the pages that known operations change.
    pub fn pages(&self) -> impl Iterator<Item = PageId> {
        self.touches.keys().copied()
    }

    /// Returns the numbers and checksums of the tables that known restores name.
    pub fn tables(&self) -> impl Iterator<Item = (u64, u32)> {
        self.restores.iter().filter_map(|lsn| self.batches[lsn].restores)
    }

    /// Returns damage that reports batch `lsn` as missing, located at the end of the last known batch before `lsn`.
    pub fn hole(&self, lsn: Lsn) -> Damage {
        let (segment, offset) = self
            .batches
            .range(..lsn)
            .next_back()
            .map_or((0, 0), |(_, before)| (before.end.segment, before.end.offset));
        Defect::Missing.at_lsn(FileName::Segment(segment), offset, lsn)
    }
}

impl KnownBatch {
    fn new(header: FrameHeader, end: LogPoint, payload: &[u8], ops: &[OpAt<'_>]) -> Result<Self, Defect> {
        let touch = |(index, at): (usize, &OpAt<'_>)| {
            Some((at.op.page()?, OpLocation::new(&header, payload, ops, index)))
        };
        let touches = collected(ops.iter().enumerate().filter_map(touch))?;
        let restores = ops.iter().find_map(|at| match at.op {
            Op::Restore { table, table_crc, .. } => Some((table, table_crc)),
            _ => None,
        });
        Ok(Self { header, end, touches, restores })
    }
}

/// Returns the newest durable Lsn of each incarnation, according to all structures on disk.
fn marks(
    frames: &[UncheckedFrame],
    openings: &[(u64, Opening)],
    survey: &Survey,
) -> HashMap<Incarnation, Lsn> {
    let headers = frames.iter().map(UncheckedFrame::unproven);
    // A mark above the Lsn of its own frame is invalid (I4).
    let sound = headers.filter(|header| header.durable <= header.lsn);
    let of_frames = sound.map(|header| (header.incarnation, header.durable));
    let of_openings = openings.iter().flat_map(|(_, opening)| {
        let predecessor = opening.predecessor;
        [(opening.incarnation, opening.accepted), (predecessor.incarnation, predecessor.lsn)]
    });
    // The log was durable up to the manifest's `end` before the manifest was published (I7).
    let of_manifests = survey.readable().map(|manifest| (manifest.redo.incarnation, manifest.end));
    let mut marks: HashMap<Incarnation, Lsn> = HashMap::new();
    for (incarnation, lsn) in of_frames.chain(of_openings).chain(of_manifests) {
        let mark = marks.entry(incarnation).or_default();
        *mark = lsn.max(*mark);
    }
    marks
}

/// Returns the points that a known frame can follow although no known frame ends at them. A point is an Lsn and a chain
/// hash.
fn starts(openings: &[(u64, Opening)], survey: &Survey) -> HashSet<(Lsn, u32)> {
    let of_openings = openings.iter().map(|(number, opening)| opening.start(*number));
    let of_manifests = survey.readable().map(|manifest| manifest.redo);
    of_openings
        .chain(of_manifests)
        .chain([LogPoint::default()])
        .map(|point| (point.lsn, point.chain))
        .collect()
}

/// Returns true if a frame is located after the end of its incarnation, which the next opening states.
fn is_past_end(header: &FrameHeader, openings: &[(u64, Opening)]) -> bool {
    openings.iter().map(|(_, opening)| opening.predecessor).any(|end| {
        end.incarnation == header.incarnation && (header.segment, header.offset) >= (end.segment, end.offset)
    })
}

/// Returns the damage of the first segment that must contain frames but is missing, empty or truncated (I8). Frames
/// that no other structure mentions may be lost.
fn hidden(survey: &Survey, frames: &[UncheckedFrame]) -> Option<Damage> {
    let segments = survey.log.segments();
    let highest = segments.keys().next_back().copied().unwrap_or(0);
    let last = frames.iter().map(|frame| frame.unproven().segment).max().unwrap_or(0);
    // Each point from which a snapshot is replayed follows a frame.
    let redo = survey.readable().map(|manifest| manifest.redo.segment).max().unwrap_or(0);
    if let Some(defect) = segments.get(&last).and_then(Segment::cut_short) {
        return Some(defect.clone().at(FileName::Segment(last), 0));
    }
    let first = last.saturating_add(1);
    (first..=highest.max(redo).max(first)).find_map(|number| {
        let defect = match segments.get(&number).map(|segment| &segment.header) {
            None => Defect::Missing,
            Some(Ok(_)) if number <= redo => Defect::Magic { expected: "frame" },
            // The newest segment is empty, because a frame is written to a segment only after the next segment exists.
            Some(Err(defect)) if number < highest => defect.clone(),
            Some(_) => return None,
        };
        Some(defect.at(FileName::Segment(number), 0))
    })
}

fn read_payload(source: &dyn ReadAt, header: &FrameHeader) -> Result<Vec<u8>, Defect> {
    let file = FileName::Segment(header.segment);
    let payload = read_range(source, file, header.offset + FRAME_HEADER_LEN, header.payload_len.into())?;
    check_payload(header, &payload)?;
    Ok(payload)
}
