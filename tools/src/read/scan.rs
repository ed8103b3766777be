//! A scan of all frames in the log whose headers name their own location, in the order of segments and offsets.
//!
//! Recovery stops at the first invalid frame. An inspection of a damaged store also needs the frames after that frame.
//! The scan therefore returns every such frame, and reports how the frame is related to the previous frame.

use std::io;

use remanent_format::frame::{
    FRAME_HEADER_LEN, FrameHeader, FrameHeaderRaw, FrameKind, UncheckedFrame, check_payload,
};
use remanent_format::limits::{GROUP_ALIGN, align_up};
use remanent_format::log::LogMap;
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::{Defect, FileName, Incarnation, LogPoint, Lsn, ReadAt, StoreId};

/// The relation of a frame to the frames before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chain {
    /// The frame names the chain hash of the previous frame.
    Follows,
    /// The frame is the first frame that still exists in the log.
    First,
    /// This defect breaks the chain between the previous frame and this frame.
    Broken(Defect),
    /// The frame is after the end of its incarnation, because a later open removed it from the log.
    LeftBehind {
        /// The incarnation that continues the log before the frame.
        by: Incarnation,
    },
}

/// A frame whose header names the location where the frame was found.
#[derive(Clone, Debug)]
pub struct ScannedFrame {
    /// The decoded header of the frame.
    pub header: FrameHeader,
    /// The relation of the frame to the previous frames.
    pub chain: Chain,
    /// The payload, or the reason why it is invalid.
    pub payload: Result<Vec<u8>, Defect>,
}

/// The number of bytes of a segment that are read at a time, so that a log of short frames needs few reads.
const READ_LEN: u64 = 1 << 20;

/// An iterator over all frames of a log whose headers name their own location.
pub struct Scan<'s> {
    source: &'s dyn ReadAt,
    store: StoreId,
    map: &'s LogMap,
    /// Numbers of the remaining segments, in descending order.
    segments: Vec<u64>,
    segment: u64,
    offset: u64,
    file_len: u64,
    before: Option<LogPoint>,
    /// The bytes of the segment that were read last.
    buffer: Vec<u8>,
    /// Offset of `buffer` in the segment.
    buffer_at: u64,
}

impl<'s> Scan<'s> {
    /// Creates a scan of all segments in the map.
    pub fn new(source: &'s dyn ReadAt, store: StoreId, map: &'s LogMap) -> Self {
        let segments = map.segments().keys().rev().copied().collect();
        Self {
            source,
            store,
            map,
            segments,
            segment: 0,
            offset: 0,
            file_len: 0,
            before: None,
            buffer: Vec::new(),
            buffer_at: 0,
        }
    }

    /// Advances to the next segment. Returns `None` after the last segment.
    fn next_segment(&mut self) -> Option<()> {
        let number = self.segments.pop()?;
        let segment = &self.map.segments()[&number];
        (self.segment, self.offset, self.file_len) = (number, SEGMENT_HEADER_BLOCK, segment.file_len);
        self.buffer.clear();
        if let Ok(header) = &segment.header
            && let Some(opening) = header.opening
        {
            self.before = Some(opening.start(number));
        }
        Some(())
    }

    /// Returns `len` bytes of the segment at `offset`. The range must be within the file.
    fn bytes(&mut self, offset: u64, len: usize) -> io::Result<&[u8]> {
        let buffered = self.buffer_at..self.buffer_at + self.buffer.len() as u64;
        let end = offset + len as u64;
        if offset < buffered.start || end > buffered.end {
            // A bad sector must not make the bytes before it unreadable.
            let ahead = (offset + READ_LEN).min(self.file_len).max(end);
            self.fill(offset, ahead).or_else(|_| self.fill(offset, end))?;
        }
        let at = (offset - self.buffer_at) as usize;
        Ok(&self.buffer[at..at + len])
    }

    /// Replaces the content of the buffer with a range of the segment.
    fn fill(&mut self, from: u64, to: u64) -> io::Result<()> {
        self.buffer_at = from;
        self.buffer.resize((to - from) as usize, 0);
        let read = self.source.read_at(FileName::Segment(self.segment), from, &mut self.buffer);
        read.inspect_err(|_| self.buffer.clear())
    }

    /// Returns the frame at the current offset, or `None` if no header at this offset names its own location.
    fn frame_here(&mut self) -> Option<UncheckedFrame> {
        let (store, segment, offset) = (self.store, self.segment, self.offset);
        let frame = UncheckedFrame::decode(self.bytes(offset, FrameHeaderRaw::LEN).ok()?).ok()?;
        frame.is_at(store, segment, offset).then_some(frame)
    }

    fn payload(&mut self, header: &FrameHeader) -> Result<Vec<u8>, Defect> {
        // Check that the file is long enough before the length is used.
        let end = header.offset.saturating_add(FRAME_HEADER_LEN + u64::from(header.payload_len));
        if end > self.file_len {
            return Err(Defect::Truncated { needed: end, have: self.file_len });
        }
        let payload = self
            .bytes(header.offset + FRAME_HEADER_LEN, header.payload_len as usize)
            .map_err(|error| Defect::Unreadable(error.to_string()))?;
        check_payload(header, payload)?;
        Ok(payload.to_vec())
    }

    /// Returns how a frame is related to the previous frames, and the point at the end of the frame.
    fn relate(&self, frame: UncheckedFrame) -> (Chain, Option<LogPoint>) {
        let header = *frame.unproven();
        let follow = |before: &LogPoint| frame.follow(before, self.store, self.segment, self.offset);
        // Point that the frame names as its predecessor.
        let claimed = LogPoint {
            incarnation: header.incarnation,
            lsn: match header.kind {
                FrameKind::Batch => Lsn(header.lsn.0.saturating_sub(1)),
                FrameKind::Seal => header.lsn,
            },
            segment: header.segment,
            offset: header.offset,
            chain: header.chain_prev,
        };
        let end = follow(&claimed).ok().map(|(_, end)| end);
        let chain = match &self.before {
            None => Chain::First,
            Some(before) => match follow(before) {
                Ok(_) => Chain::Follows,
                Err(defect) => Chain::Broken(defect),
            },
        };
        let successor =
            self.map.line().iter().find(|(_, opening)| opening.predecessor.incarnation == header.incarnation);
        match successor {
            Some((_, opening))
                if (header.segment, header.offset)
                    >= (opening.predecessor.segment, opening.predecessor.offset) =>
            {
                (Chain::LeftBehind { by: opening.incarnation }, end)
            }
            _ => (chain, end),
        }
    }
}

impl Iterator for Scan<'_> {
    type Item = ScannedFrame;

    fn next(&mut self) -> Option<ScannedFrame> {
        loop {
            if self.offset.saturating_add(FRAME_HEADER_LEN) > self.file_len {
                self.next_segment()?;
                continue;
            }
            let Some(frame) = self.frame_here() else {
                // The next frame starts a group.
                self.offset = align_up(self.offset + 1, GROUP_ALIGN);
                continue;
            };
            let header = *frame.unproven();
            let (chain, end) = self.relate(frame);
            let payload = self.payload(&header);
            self.before = end.or(self.before);
            // The checksum of the header proves the length, even if the payload is invalid.
            self.offset = header.end();
            return Some(ScannedFrame { header, chain, payload });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    use remanent_format::segment::{Opening, SegmentHeader};

    use crate::read::store_dir::StoreDir;

    const STORE: StoreId = StoreId([7; 16]);
    const SEGMENT_LEN: usize = 16 << 10;

    fn incarnation(number: u32) -> Incarnation {
        Incarnation { number, random: 9 }
    }

    fn opening(segment: u64, number: u32, predecessor: LogPoint) -> Vec<u8> {
        let opening = Opening {
            incarnation: incarnation(number),
            predecessor,
            accepted: predecessor.lsn,
            accepted_chain: predecessor.chain,
        };
        let header =
            SegmentHeader { store: STORE, segment, segment_len: SEGMENT_LEN as u64, opening: Some(opening) };
        let mut bytes = header.encode().to_vec();
        bytes.resize(SEGMENT_LEN, 0);
        bytes
    }

    /// Writes a frame at the next group boundary after `point`, and moves `point` to its end.
    fn append(segment: &mut [u8], point: &mut LogPoint, payload: &[u8]) {
        let offset = align_up(point.offset, GROUP_ALIGN);
        let header = FrameHeader {
            kind: FrameKind::Batch,
            group_start: true,
            incarnation: point.incarnation,
            store: STORE,
            segment: point.segment,
            offset,
            lsn: point.lsn.next(),
            durable: point.lsn,
            payload_len: payload.len() as u32,
            payload_crc: crc32fast::hash(payload),
            chain_prev: point.chain,
        };
        let (bytes, chain) = header.encode();
        let at = offset as usize;
        segment[at..at + bytes.len()].copy_from_slice(&bytes);
        segment[at + bytes.len()..][..payload.len()].copy_from_slice(payload);
        *point = LogPoint { lsn: header.lsn, offset: header.end(), chain, ..*point };
    }

    /// Returns segment 1 with three frames, and segment 2 with an incarnation that continues after the second frame.
    fn two_incarnations() -> [Vec<u8>; 2] {
        let mut first = opening(1, 1, LogPoint::default());
        let mut point = LogPoint {
            incarnation: incarnation(1),
            segment: 1,
            offset: SEGMENT_HEADER_BLOCK,
            ..LogPoint::default()
        };
        append(&mut first, &mut point, &[1; 100]);
        append(&mut first, &mut point, &[2; 100]);
        let predecessor = point;
        append(&mut first, &mut point, &[3; 100]);
        let mut second = opening(2, 2, predecessor);
        let mut point =
            LogPoint { incarnation: incarnation(2), segment: 2, offset: SEGMENT_HEADER_BLOCK, ..predecessor };
        append(&mut second, &mut point, &[4; 100]);
        [first, second]
    }

    fn scan(segments: [Vec<u8>; 2]) -> Vec<(u64, &'static str, bool)> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("log")).unwrap();
        for (number, bytes) in (1..).zip(segments) {
            fs::write(dir.path().join(FileName::Segment(number).to_string()), bytes).unwrap();
        }
        let dir = StoreDir::open(dir.path()).unwrap();
        let map = LogMap::read(&dir, STORE).unwrap();
        let row = |frame: ScannedFrame| {
            let chain = match frame.chain {
                Chain::Follows => "follows",
                Chain::First => "first",
                Chain::Broken(_) => "broken",
                Chain::LeftBehind { by } => {
                    assert_eq!(by, incarnation(2));
                    "left behind"
                }
            };
            (frame.header.lsn.0, chain, frame.payload.is_ok())
        };
        Scan::new(&dir, STORE, &map).map(row).collect()
    }

    #[test]
    fn scan_lists_frames_of_both_incarnations() {
        assert_eq!(
            scan(two_incarnations()),
            [(1, "follows", true), (2, "follows", true), (3, "left behind", true), (3, "follows", true)]
        );
    }

    #[test]
    fn scan_continues_after_damage() {
        let [mut first, second] = two_incarnations();
        first[4096 + 200 - 120] ^= 1;
        first[8192 + 3] ^= 1;
        assert_eq!(
            scan([first, second]),
            [(1, "follows", false), (3, "left behind", true), (3, "follows", true)]
        );
        let [mut first, second] = two_incarnations();
        first[..4096].fill(0);
        first[4096] ^= 1;
        assert_eq!(
            scan([first, second]),
            [(2, "first", true), (3, "left behind", true), (3, "follows", true)]
        );
    }

    #[test]
    fn frame_with_wrong_chain_hash_is_broken() {
        let [first, mut second] = two_incarnations();
        // No frame has the chain hash that the opening names.
        let header = SegmentHeader::decode(&second[..128]).unwrap();
        let mut opening = header.opening.unwrap();
        opening.predecessor.chain ^= 1;
        second[..128].copy_from_slice(&SegmentHeader { opening: Some(opening), ..header }.encode());
        assert_eq!(scan([first, second])[3], (3, "broken", true));
    }
}
