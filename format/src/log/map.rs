//! The map of the log: its segments, the newest incarnation, and the line that leads back from it.

use std::collections::BTreeMap;

use super::dead_ends::DeadEnds;
use super::reader::{SegmentReader, own_frames};
use crate::defect::{Damage, Defect};
use crate::frame::UncheckedFrame;
use crate::ids::{Incarnation, LogPoint, StoreId};
use crate::limits::GROUP_ALIGN;
use crate::names::{FileName, Folder, ReadAt};
use crate::segment::{Opening, SEGMENT_HEADER_BLOCK, SegmentHeader, SegmentHeaderRaw};

/// A segment file.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The file's length in bytes.
    pub file_len: u64,
    /// Its header, if that is whole, this store's, and fits the file.
    pub header: Result<SegmentHeader, Defect>,
    /// The incarnation of the frames that were written at their place in this file, if there are any.
    pub frames: Option<Incarnation>,
    /// Whether all of it was read, and no own frame lies in it at any multiple of 16. Then nothing in it
    /// testifies (I4), and it need not be looked through once more. Frames that a living writer puts there
    /// later are for the next map.
    pub(super) is_blank: bool,
}

impl Segment {
    /// The defect of its header, if the file is shorter than the header says.
    pub(crate) fn cut_short(&self) -> Option<&Defect> {
        let defect = self.header.as_ref().err()?;
        let &Defect::Mismatch { found, expected, .. } = defect else { return None };
        (expected == self.file_len && found > expected).then_some(defect)
    }

    pub(super) fn opening(&self) -> Option<Opening> {
        self.header.as_ref().ok().and_then(|header| header.opening)
    }
}

/// All segments of a store, and the line of incarnations.
#[derive(Clone, Debug)]
pub struct LogMap {
    pub(super) store: StoreId,
    pub(super) segments: BTreeMap<u64, Segment>,
    pub(super) newest: Option<Incarnation>,
    /// Openings on the line, oldest first, with their segments.
    line: Vec<(u64, Opening)>,
    /// The damaged header at which the line ends, if it ends at one.
    pub(super) break_of_line: Option<Damage>,
    /// Where walks of this map that share their outcome did not come to its end.
    pub(super) dead_ends: DeadEnds,
}

impl LogMap {
    /// Reads all segment headers, and the parts of the segments that are needed to find their frames.
    ///
    /// # Errors
    /// [`Damage`] if a file cannot be read at all. Damaged bytes are recorded, not refused.
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
        let mut break_of_line = None;
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
                break_of_line = damaged_opening(&segments, incarnation);
            }
        }
        line.reverse();
        Ok(Self { store, segments, newest, line, break_of_line, dead_ends: DeadEnds::default() })
    }

    /// The store whose log it is.
    #[must_use]
    pub fn store(&self) -> StoreId {
        self.store
    }

    /// The segments by number.
    #[must_use]
    pub fn segments(&self) -> &BTreeMap<u64, Segment> {
        &self.segments
    }

    /// The newest incarnation; `None` if no segment shows one.
    #[must_use]
    pub fn newest(&self) -> Option<Incarnation> {
        self.newest
    }

    /// The openings on the line, oldest first, with their segments. Older ones may be recycled.
    #[must_use]
    pub fn line(&self) -> &[(u64, Opening)] {
        &self.line
    }

    /// The damaged header at which the line ends. An opening that is merely gone was recycled.
    #[must_use]
    pub fn break_of_line(&self) -> Option<&Damage> {
        self.break_of_line.as_ref()
    }

    /// The start of the very first incarnation, if its opening is still there.
    #[must_use]
    pub fn beginning(&self) -> Option<LogPoint> {
        let (segment, opening) = self.line.first()?;
        // A store that was created from the seed of another log's state has no beginning: its pages came from
        // a manifest.
        (opening.predecessor == LogPoint::default()).then(|| opening.start(*segment))
    }

    /// Whether any segment holds a frame that was written there.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.segments.values().any(|segment| segment.frames.is_some())
    }

    /// The opening after an incarnation on the line, with its segment.
    #[must_use]
    pub fn successor(&self, incarnation: Incarnation) -> Option<(u64, Opening)> {
        self.line.iter().copied().find(|(_, opening)| opening.predecessor.incarnation == incarnation)
    }
}

/// The first segment with frames of an incarnation, if its header is damaged: it may have been the opening.
fn damaged_opening(segments: &BTreeMap<u64, Segment>, incarnation: Incarnation) -> Option<Damage> {
    let (number, segment) = segments.iter().find(|(_, segment)| segment.frames == Some(incarnation))?;
    let defect = segment.header.as_ref().err()?;
    Some(defect.clone().at(FileName::Segment(*number), 0))
}

/// Looks into a segment; `None` if a writer recycled it after the folder was listed.
fn read_segment(source: &dyn ReadAt, store: StoreId, number: u64) -> Result<Option<Segment>, Damage> {
    let file = FileName::Segment(number);
    let unreadable = |error: std::io::Error| Defect::of_read(&error).at(file, 0);
    let Some(file_len) = source.len(file).map_err(unreadable)? else { return Ok(None) };
    let mut reader = SegmentReader::looking_into(source, number);
    let header = reader
        .bytes(0, SegmentHeaderRaw::LEN)
        .and_then(|bytes| SegmentHeader::decode_at(bytes, store, number, file_len));
    if let Err(defect @ Defect::Shortage { .. }) = header {
        return Err(defect.at(file, 0));
    }
    // The first frame nearly always starts a group. If it does not, its group's start is damaged.
    let mut own = own_frames(&mut reader, store, number, SEGMENT_HEADER_BLOCK);
    let first = own.next();
    let starts_group = |frame: &UncheckedFrame| frame.unproven().offset.is_multiple_of(GROUP_ALIGN);
    let frames = first.into_iter().chain(own).find(starts_group).map(|frame| frame.unproven().incarnation);
    let is_blank = header.is_ok() && first.is_none() && reader.all_is_readable();
    Ok(Some(Segment { file_len, header, frames, is_blank }))
}
