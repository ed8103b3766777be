//! The map of the log: its segments, and the line of incarnations.

use std::collections::BTreeMap;

use super::failed_starts::FailedStarts;
use super::reader::{SegmentReader, own_frames};
use crate::defect::{Damage, Defect};
use crate::frame::UncheckedFrame;
use crate::ids::{Incarnation, LogPoint, StoreId};
use crate::limits::GROUP_ALIGN;
use crate::names::{FileName, Folder, ReadAt};
use crate::segment::{Opening, SEGMENT_HEADER_BLOCK, SegmentHeader, SegmentHeaderRaw};

/// A segment file in the log folder: its length, its header, and whether it contains frames.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The length of the file in bytes.
    pub file_len: u64,
    /// The decoded header, or the reason why the header is invalid.
    pub header: Result<SegmentHeader, Defect>,
    /// The incarnation of the first frame at a multiple of 4096 whose header names its own location. `None` if there is
    /// no such frame.
    pub frames: Option<Incarnation>,
    /// Whether the segment is readable, has a valid header, and contains no frame. A walk that searches for durable
    /// marks (I4) skips such a segment. If a running writer adds frames later, the next call of [`LogMap::read`] finds
    /// them.
    pub(super) is_blank: bool,
}

impl Segment {
    /// Returns the defect of the header if the file is shorter than the length that the header states.
    pub(crate) fn cut_short(&self) -> Option<&Defect> {
        let defect = self.header.as_ref().err()?;
        let &Defect::Mismatch { found, expected, .. } = defect else { return None };
        (expected == self.file_len && found > expected).then_some(defect)
    }

    pub(super) fn opening(&self) -> Option<Opening> {
        self.header.as_ref().ok().and_then(|header| header.opening)
    }
}

/// The segments of a store, and the line of incarnations: the sequence from the oldest incarnation whose opening
/// segment still exists to the newest incarnation.
#[derive(Clone, Debug)]
pub struct LogMap {
    pub(super) store: StoreId,
    pub(super) segments: BTreeMap<u64, Segment>,
    pub(super) newest: Option<Incarnation>,
    /// Openings of the incarnations on the line, with the numbers of their segments, oldest first.
    line: Vec<(u64, Opening)>,
    /// Damage of the segment header at which the line of incarnations ends. `None` if no damaged header ends the line.
    pub(super) chain_break: Option<Damage>,
    /// Start points of failed walks. Walks for which [`LogWalk::sharing_outcomes`](super::LogWalk::sharing_outcomes)
    /// was called use these points.
    pub(super) failed_starts: FailedStarts,
}

impl LogMap {
    /// Reads the headers of all segments, and searches the segments for their first frames.
    ///
    /// # Errors
    /// Returns [`Damage`] if the folder cannot be listed, the length of a file cannot be read, or the system lacks a
    /// resource. Damaged bytes are not an error; the map records them.
    pub fn read(source: &dyn ReadAt, store: StoreId) -> Result<Self, Damage> {
        let names =
            source.list(Folder::Log).map_err(|error| Defect::of_read(&error).at(FileName::Segment(0), 0))?;
        let mut segments = BTreeMap::new();
        for name in names {
            if let Some(FileName::Segment(number)) = FileName::parse(Folder::Log, &name) {
                segments.extend(read_segment(source, store, number)?.map(|segment| (number, segment)));
            }
        }
        let newest = segments
            .values()
            .rev()
            .find_map(|segment| segment.opening().map(|opening| opening.incarnation).or(segment.frames));
        let mut line = Vec::new();
        let mut wanted = newest;
        let mut chain_break = None;
        while let Some(incarnation) = wanted {
            let found = segments.iter().find_map(|(&number, segment)| {
                segment
                    .opening()
                    .filter(|opening| opening.incarnation == incarnation)
                    .map(|opening| (number, opening))
            });
            wanted =
                found.map(|(_, opening)| opening.predecessor.incarnation).filter(|before| before.number > 0);
            line.extend(found);
            if found.is_none() {
                chain_break = damaged_opening(&segments, incarnation);
            }
        }
        line.reverse();
        Ok(Self { store, segments, newest, line, chain_break, failed_starts: FailedStarts::default() })
    }

    /// Returns the id of the store.
    #[must_use]
    pub fn store(&self) -> StoreId {
        self.store
    }

    /// Returns the segments, keyed by their numbers.
    #[must_use]
    pub fn segments(&self) -> &BTreeMap<u64, Segment> {
        &self.segments
    }

    /// Returns the newest incarnation, or `None` if no segment names an incarnation.
    #[must_use]
    pub fn newest(&self) -> Option<Incarnation> {
        self.newest
    }

    /// Returns the openings of the incarnations on the line, with the numbers of their segments, oldest first. Segments
    /// with earlier openings may have been recycled.
    #[must_use]
    pub fn line(&self) -> &[(u64, Opening)] {
        &self.line
    }

    /// Returns the damaged segment header at which the line ends. Returns `None` if the oldest opening on the line has
    /// no predecessor, or if the segment with the opening of the predecessor was recycled.
    #[must_use]
    pub fn chain_break(&self) -> Option<&Damage> {
        self.chain_break.as_ref()
    }

    /// Returns the point at which the log of the store begins, or `None` if the first opening segment was recycled.
    #[must_use]
    pub fn beginning(&self) -> Option<LogPoint> {
        let (segment, opening) = self.line.first()?;
        // A store that was created from the state of another log has no beginning, because its first pages are in a
        // manifest.
        (opening.predecessor == LogPoint::default()).then(|| opening.start(*segment))
    }

    /// Returns true if any segment contains a frame at a multiple of 4096 whose header names its own location.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.segments.values().any(|segment| segment.frames.is_some())
    }

    /// Returns the opening of the incarnation that follows `incarnation` on the line, and the number of its segment.
    #[must_use]
    pub fn successor(&self, incarnation: Incarnation) -> Option<(u64, Opening)> {
        self.line.iter().copied().find(|(_, opening)| opening.predecessor.incarnation == incarnation)
    }
}

/// Finds the first segment that contains frames of `incarnation`. Returns its damage if its header is invalid, because
/// the segment may have been the opening of the incarnation.
fn damaged_opening(segments: &BTreeMap<u64, Segment>, incarnation: Incarnation) -> Option<Damage> {
    let (number, segment) = segments.iter().find(|(_, segment)| segment.frames == Some(incarnation))?;
    let defect = segment.header.as_ref().err()?;
    Some(defect.clone().at(FileName::Segment(*number), 0))
}

/// Reads the header of a segment and searches for its first frame. Returns `None` if a writer recycled the segment
/// after the folder was listed.
fn read_segment(source: &dyn ReadAt, store: StoreId, number: u64) -> Result<Option<Segment>, Damage> {
    let file = FileName::Segment(number);
    let unreadable = |error: std::io::Error| Defect::of_read(&error).at(file, 0);
    let Some(file_len) = source.len(file).map_err(unreadable)? else { return Ok(None) };
    let mut reader = SegmentReader::for_search(source, number);
    let header = reader
        .bytes(0, SegmentHeaderRaw::LEN)
        .and_then(|bytes| SegmentHeader::decode_at(bytes, store, number, file_len));
    if let Err(defect @ Defect::Shortage { .. }) = header {
        return Err(defect.at(file, 0));
    }
    // The first frame that names its own location usually starts a group. If it does not, the start of its group is
    // damaged.
    let mut own = own_frames(&mut reader, store, number, SEGMENT_HEADER_BLOCK);
    let first = own.next();
    let starts_group = |frame: &UncheckedFrame| frame.unproven().offset.is_multiple_of(GROUP_ALIGN);
    let frames = first.into_iter().chain(own).find(starts_group).map(|frame| frame.unproven().incarnation);
    let is_blank = header.is_ok() && first.is_none() && reader.all_is_readable();
    Ok(Some(Segment { file_len, header, frames, is_blank }))
}
