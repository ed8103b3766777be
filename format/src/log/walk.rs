//! The walk along the log. It returns the frames that are valid in order (I3), and decides how the log ends (I4).

use std::collections::HashMap;
use std::sync::Arc;

use super::map::{LogMap, Segment};
use super::order::{header_in_order, next_locations};
use super::reader::{ORDINARY, Reading, SegmentReader, own_frames};
use crate::defect::{Damage, Defect};
use crate::frame::{
    FRAME_HEADER_LEN, FrameHeader, FrameHeaderRaw, FrameKind, VerifiedSnapshot, check_payload_crc,
    counting_entries, decode_seal, looks_like_frame,
};
use crate::ids::{LogPoint, Lsn};
use crate::limits::{FRAME_ALIGN, align_up};
use crate::names::{FileName, ReadAt};
use crate::segment::SEGMENT_HEADER_BLOCK;

/// A valid frame that a walk returned, with its payload in memory.
#[derive(Debug)]
pub struct Frame<'w, B = Vec<u8>> {
    /// The decoded header of the frame.
    pub header: FrameHeader,
    /// The bytes of the payload.
    pub payload: &'w [u8],
    /// The buffer that contains the payload. While the caller keeps a clone of the `Arc`, the buffer stays unchanged
    /// and the walk reads into another buffer.
    pub memory: &'w Arc<B>,
    /// Offset in bytes of the payload in `memory`.
    pub payload_at: usize,
    /// The point at the end of the frame.
    pub end: LogPoint,
    /// Whether the frame belongs to the newest incarnation.
    pub newest: bool,
}

/// The result of a walk that reached the end of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEnd {
    /// The end of the last valid batch.
    pub accepted: LogPoint,
    /// The end of the last batch that a durable mark proves. Batches between `proven` and `accepted` may exist only in
    /// the page cache (I6).
    pub proven: LogPoint,
    /// The torn tail after `accepted`, or `None` if no trace of a torn tail was found.
    pub torn: Option<TornTail>,
    /// The snapshots that the last seal lists as verified. Empty if the walk read no seal.
    pub verified: Vec<VerifiedSnapshot>,
    /// Damage that affects no batch, such as an invalid header of an empty segment.
    pub harmless: Vec<Damage>,
}

/// An incomplete part of the log after the last valid batch, which a walk cuts off. A crash usually leaves such a tail,
/// and no batch in it was acknowledged as durable. A walk reports the tail, because damage to batches that no durable
/// mark covers looks the same.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TornTail {
    /// The segment that contains the first frame of the tail.
    pub segment: u64,
    /// The offset of the first frame of the tail, in bytes from the start of the segment.
    pub offset: u64,
    /// The first batch that was cut off.
    pub first: Lsn,
    /// The last batch whose frame header was found in the tail.
    pub last: Lsn,
    /// The reason why the first frame of the tail is invalid.
    pub defect: Defect,
}

/// A location where the next frame could start but no valid frame was found, with the reason.
struct Break {
    segment: u64,
    offset: u64,
    /// Whether the bytes at this location resemble a frame or cannot be read. If true, reports name this location.
    is_frame_like: bool,
    defect: Defect,
}

impl Break {
    /// Selects the location that a report names. Prefers an unreadable location to one that resembles a frame (SPEC
    /// E6), and otherwise prefers `self`.
    fn or(self, other: Self) -> Self {
        let rank = |of: &Self| (of.defect.is_unreadable(), of.is_frame_like);
        if rank(&other) > rank(&self) { other } else { self }
    }

    fn damage(self, lost: Lsn) -> Damage {
        self.defect.at_lsn(FileName::Segment(self.segment), self.offset, lost)
    }
}

/// A walk along the log, from a start point to the end of the log. Each call of [`LogWalk::next`] returns one frame.
pub struct LogWalk<'s, B = Vec<u8>> {
    source: &'s dyn ReadAt,
    map: &'s LogMap,
    reading: Reading<'s, B>,
    reader: SegmentReader<'s, B>,
    point: LogPoint,
    /// End of the last batch. Seals do not change this point.
    accepted: LogPoint,
    mark: Lsn,
    /// Ends of the returned batches that no durable mark covers yet.
    unproven: Vec<LogPoint>,
    proven: LogPoint,
    verified: Vec<VerifiedSnapshot>,
    end: Option<LogEnd>,
    /// The start point of this walk, and the damage that earlier walks found from their start points. `None` unless the
    /// walk shares outcomes.
    shared: Option<(LogPoint, HashMap<LogPoint, Damage>)>,
}

impl<'s> LogWalk<'s> {
    /// Starts a walk at the point `from`. `mark` is the highest durable mark from other sources, such as the `end` of
    /// valid manifests.
    ///
    /// # Errors
    /// Returns [`Damage`] if `from` is not on the line of incarnations, if no frame can end at `from`, or if the
    /// segment of `from` is missing or invalid.
    pub fn new(source: &'s dyn ReadAt, map: &'s LogMap, from: LogPoint, mark: Lsn) -> Result<Self, Damage> {
        Self::reading_into(source, map, from, mark, Reading::single_threaded(ORDINARY))
    }
}

impl<'s, B: AsRef<[u8]> + AsMut<[u8]>> LogWalk<'s, B> {
    /// Starts a walk that reads as `reading` configures. The configuration supplies buffers, and optionally several
    /// threads.
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`LogWalk::new`].
    pub fn reading_into(
        source: &'s dyn ReadAt,
        map: &'s LogMap,
        from: LogPoint,
        mark: Lsn,
        reading: Reading<'s, B>,
    ) -> Result<Self, Damage> {
        let file = FileName::Segment(from.segment);
        let on_line = Some(from.incarnation) == map.newest || map.successor(from.incarnation).is_some();
        if !on_line && let Some(damage) = &map.chain_break {
            return Err(damage.clone());
        }
        if !on_line {
            return Err(Defect::Mismatch {
                what: "incarnation of the first frame needed",
                found: map.newest.map_or(0, |newest| newest.number.into()),
                expected: from.incarnation.number.into(),
            }
            .at_lsn(file, from.offset, from.lsn));
        }
        let mut walk = Self {
            source,
            map,
            reading,
            reader: SegmentReader::reading_into(source, from.segment, reading),
            point: from,
            accepted: from,
            mark,
            unproven: Vec::new(),
            proven: from,
            verified: Vec::new(),
            end: None,
            shared: None,
        };
        walk.check_segment(from.segment)?;
        walk.check_start()?;
        // The `accepted` Lsn of an opening segment is a durable mark.
        walk.note_opening(from.segment);
        Ok(walk)
    }

    /// Shares damage that this walk finds with other walks of the same [`LogMap`]. This walk fails as soon as it
    /// reaches the start point of a walk that failed, because both would find the same damage.
    ///
    /// A second walk from the same start point reads all frames again, because its caller needs the batches before the
    /// damage.
    #[must_use]
    pub fn sharing_outcomes(self) -> Self {
        let shared = Some((self.point, self.map.failed_starts.known()));
        Self { shared, ..self }
    }

    /// Returns the next valid frame. Returns `None` at the end of the log, after which [`LogWalk::end`] describes the
    /// end.
    ///
    /// # Errors
    /// Returns [`Damage`] if the log is damaged at the next frame.
    #[expect(clippy::should_implement_trait, reason = "a frame borrows the walk's buffer")]
    pub fn next(&mut self) -> Result<Option<Frame<'_, B>>, Damage> {
        let advanced = self.advance().inspect_err(|damage| {
            if let Some((from, _)) = &self.shared {
                self.map.failed_starts.note(*from, damage);
            }
        })?;
        let Some((header, end)) = advanced else { return Ok(None) };
        let newest = Some(header.incarnation) == self.map.newest;
        let payload_len = header.payload_len as usize;
        let (memory, payload_at) = self
            .reader
            .shared(header.offset + FRAME_HEADER_LEN, payload_len)
            .map_err(|defect| defect.at_lsn(FileName::Segment(header.segment), header.offset, header.lsn))?;
        let payload = &(**memory).as_ref()[payload_at..payload_at + payload_len];
        Ok(Some(Frame { header, payload, memory, payload_at, end, newest }))
    }

    /// Finds the next valid frame and moves to its end. Returns `None` at the end of the log.
    fn advance(&mut self) -> Result<Option<(FrameHeader, LogPoint)>, Damage> {
        if self.end.is_some() {
            return Ok(None);
        }
        self.cross_to_successors()?;
        if let Some((from, failed_starts)) = &self.shared
            && self.point != *from
            && let Some(damage) = failed_starts.get(&self.point)
        {
            return Err(damage.clone());
        }
        let found = self.find_next().or_else(|_| {
            // A running writer may have changed the file since these bytes were buffered.
            self.reader.forget();
            self.find_next()
        });
        let at_break = match found {
            Ok((header, end)) => {
                self.accept(&header, end)?;
                return Ok(Some((header, end)));
            }
            Err(at_break) => at_break,
        };
        self.end = Some(self.judge(at_break)?);
        Ok(None)
    }

    /// Returns the end of the log, or `None` before [`LogWalk::next`] has returned `None`.
    #[must_use]
    pub fn end(&self) -> Option<&LogEnd> {
        self.end.as_ref()
    }

    /// Returns the end of the last frame that the walk returned.
    #[must_use]
    pub fn point(&self) -> LogPoint {
        self.point
    }

    /// Returns the snapshots that the last returned seal lists as verified.
    #[must_use]
    pub fn verified(&self) -> &[VerifiedSnapshot] {
        &self.verified
    }

    /// If the walk is at the end of its incarnation, moves to the first segment of the next incarnation (SPEC W2).
    fn cross_to_successors(&mut self) -> Result<(), Damage> {
        while let Some((segment, opening)) = self.map.successor(self.point.incarnation) {
            let last = opening.predecessor;
            if (self.point.segment, self.point.offset) != (last.segment, last.offset) {
                let passed = (self.point.segment, self.point.offset) > (last.segment, last.offset);
                if passed || self.point.lsn > last.lsn {
                    return Err(Defect::Mismatch {
                        what: "end of the incarnation",
                        found: self.point.offset,
                        expected: last.offset,
                    }
                    .at_lsn(
                        FileName::Segment(self.point.segment),
                        self.point.offset,
                        self.point.lsn,
                    ));
                }
                return Ok(());
            }
            if (self.point.lsn, self.point.chain) != (last.lsn, last.chain) {
                return Err(Defect::Mismatch {
                    what: "chain hash at the incarnation's end",
                    found: self.point.chain.into(),
                    expected: last.chain.into(),
                }
                .at_lsn(FileName::Segment(segment), 0, last.lsn));
            }
            self.check_segment(segment)?;
            self.point = opening.start(segment);
            self.accepted = self.point;
            self.proven = self.point;
            self.unproven.clear();
            self.reader = self.reader_of(segment);
            self.note_opening(segment);
        }
        Ok(())
    }

    /// Creates a reader for a segment. Several threads are used only if the segment contains frames.
    fn reader_of(&self, segment: u64) -> SegmentReader<'s, B> {
        let has_frames = self.map.segments.get(&segment).is_some_and(|segment| segment.frames.is_some());
        let windows = self.reading.windows.filter(|_| has_frames);
        SegmentReader::reading_into(self.source, segment, Reading { windows, ..self.reading })
    }

    fn note_opening(&mut self, segment: u64) {
        if let Some(opening) = self.map.segments.get(&segment).and_then(Segment::opening) {
            self.mark = self.mark.max(opening.accepted);
        }
    }

    /// Finds the next frame in order, and checks its payload (SPEC W3).
    fn find_next(&mut self) -> Result<(FrameHeader, LogPoint), Break> {
        let [(here, after), (_, group), (next, start)] = next_locations(&self.point);
        let mut at_break = match self.try_or_break(here, after) {
            Ok(found) => return Ok(found),
            Err(at_break) => at_break,
        };
        if group != after {
            match self.try_or_break(here, group) {
                Ok(found) => return Ok(found),
                Err(other) => at_break = at_break.or(other),
            }
        }
        // The order can continue only in a valid next segment. `judge` decides whether a missing or damaged segment is
        // damage.
        if self.check_segment(next).is_ok() {
            let of_next = self.reader_of(next);
            let reader = std::mem::replace(&mut self.reader, of_next);
            match self.try_or_break(next, start) {
                Ok(found) => return Ok(found),
                Err(other) => at_break = at_break.or(other),
            }
            self.reader = reader;
        }
        Err(at_break)
    }

    /// Reads the next frame at a location. Returns a [`Break`] if there is no valid frame.
    fn try_or_break(&mut self, segment: u64, offset: u64) -> Result<(FrameHeader, LogPoint), Break> {
        self.try_at(segment, offset).map_err(|defect| {
            let running = self.point.incarnation;
            let is_frame = |bytes| looks_like_frame(bytes, self.map.store, running, segment, offset);
            let is_frame_like = match defect {
                ref defect if defect.is_unreadable() => true,
                _ => self.reader.bytes(offset, FrameHeaderRaw::LEN).is_ok_and(is_frame),
            };
            Break { segment, offset, is_frame_like, defect }
        })
    }

    /// Reads the frame at a location and checks that it is valid in order (SPEC F7). Returns the header and the point
    /// after the frame.
    fn try_at(&mut self, segment: u64, offset: u64) -> Result<(FrameHeader, LogPoint), Defect> {
        let bytes = self.reader.bytes(offset, FrameHeaderRaw::LEN)?;
        let (header, end) = header_in_order(bytes, &self.point, self.map.store, segment, offset)?;
        let payload_crc = self.reader.crc(offset + FRAME_HEADER_LEN, header.payload_len as usize)?;
        check_payload_crc(&header, payload_crc)?;
        Ok((header, end))
    }

    fn accept(&mut self, header: &FrameHeader, end: LogPoint) -> Result<(), Damage> {
        self.point = end;
        self.mark = self.mark.max(header.durable);
        match header.kind {
            FrameKind::Batch => {
                self.accepted = end;
                self.unproven.push(end);
            }
            FrameKind::Seal => {
                let file = FileName::Segment(header.segment);
                let payload = self
                    .reader
                    .bytes(header.offset + FRAME_HEADER_LEN, header.payload_len as usize)
                    .and_then(decode_seal)
                    .map_err(|defect| defect.at_lsn(file, header.offset, header.lsn))?;
                // The snapshots were verified before the seal was written, so the seal needs no durable mark.
                self.verified = counting_entries(payload);
            }
        }
        self.settle();
        Ok(())
    }

    /// Advances `proven` to the last batch that the durable mark covers.
    fn settle(&mut self) {
        let covered = self.unproven.partition_point(|point| point.lsn <= self.mark);
        if covered > 0 {
            self.proven = self.unproven[covered - 1];
            self.unproven.drain(..covered);
        }
    }

    /// Checks that `segment` exists and has a valid header (SPEC F8).
    fn check_segment(&self, segment: u64) -> Result<(), Damage> {
        let file = FileName::Segment(segment);
        match self.map.segments.get(&segment) {
            None => Err(Defect::Missing.at_lsn(file, 0, self.point.lsn.next())),
            Some(Segment { header: Err(defect), .. }) => {
                Err(defect.clone().at_lsn(file, 0, self.point.lsn.next()))
            }
            Some(_) => Ok(()),
        }
    }

    /// Checks that a frame can end at the start of the walk (SPEC W1). From any other offset, the walk would find no
    /// frame and no damage.
    fn check_start(&self) -> Result<(), Damage> {
        let LogPoint { segment, offset, lsn, .. } = self.point;
        let file_len = self.map.segments.get(&segment).map_or(0, |segment| segment.file_len);
        if (SEGMENT_HEADER_BLOCK..=file_len).contains(&offset) && offset.is_multiple_of(FRAME_ALIGN) {
            return Ok(());
        }
        let defect = Defect::Field { what: "offset at which the log walk starts", found: offset };
        Err(defect.at_lsn(FileName::Segment(segment), 0, lsn.next()))
    }

    /// Decides whether the log ends at a torn tail or is damaged (I4, SPEC E1 to E7).
    fn judge(&mut self, at_break: Break) -> Result<LogEnd, Damage> {
        let break_at = align_up(self.point.offset, FRAME_ALIGN);
        let lost = self.point.lsn.next();
        let highest = self.map.segments.keys().next_back().copied().unwrap_or(0);
        let mut harmless = Vec::new();

        // 1. In an older incarnation, frames must continue up to the predecessor's end (SPEC E1). The cause may be a
        //    segment that is missing or damaged.
        if Some(self.point.incarnation) != self.map.newest {
            let next = self.point.segment.saturating_add(1);
            let in_reach =
                self.map.successor(self.point.incarnation).map(|(_, opening)| opening.predecessor.segment);
            if in_reach.is_some_and(|last| next <= last) {
                self.check_segment(next)?;
            }
            return Err(at_break.damage(lost));
        }
        // 2. A segment with frames has a successor, which was created and synced before its first frame (I8, SPEC E2
        //    and E3).
        for number in self.point.segment..=highest.max(self.point.segment.saturating_add(1)) {
            let file = FileName::Segment(number);
            match self.map.segments.get(&number) {
                None => return Err(Defect::Missing.at_lsn(file, 0, lost)),
                Some(Segment { header: Err(defect), frames, .. }) => {
                    // The newest segment is empty, so damage to its header is harmless (SPEC E4).
                    if number < highest || frames.is_some() {
                        return Err(defect.clone().at_lsn(file, 0, lost));
                    }
                    harmless.push(defect.clone().at(file, 0));
                }
                Some(Segment { frames: Some(_), .. }) if number == highest => {
                    return Err(Defect::Missing.at_lsn(FileName::Segment(number + 1), 0, lost));
                }
                Some(_) => {}
            }
        }
        // 3. Frames beyond the break also contain durable marks.
        let mut last_seen: Option<Lsn> = None;
        let mut note = |frame: &FrameHeader, mark: &mut Lsn| {
            if Some(frame.incarnation) == self.map.newest && frame.lsn > self.point.lsn {
                last_seen = last_seen.max(Some(frame.lsn));
                *mark = (*mark).max(frame.durable);
            }
        };
        let mut mark = self.mark;
        let held = self.map.segments.range(self.point.segment..).filter(|(_, segment)| !segment.is_blank);
        for (&number, _) in held {
            let mut reader = SegmentReader::for_search(self.source, number);
            let from = if number == self.point.segment { break_at } else { SEGMENT_HEADER_BLOCK };
            // Frames inside groups count as well, because a later frame of a group may contain a newer mark than the
            // first.
            for frame in own_frames(&mut reader, self.map.store, number, from) {
                note(frame.unproven(), &mut mark);
            }
        }
        // An error of the medium says nothing about the log, and the next attempt may succeed (SPEC E5 and E6).
        if mark >= lost || at_break.defect.is_unreadable() {
            return Err(at_break.damage(lost));
        }
        self.mark = mark;
        self.settle();
        // 4. No mark covers a missing batch, so the log ends here (SPEC E7). Report the bytes that are cut off.
        let torn = (last_seen.is_some() || at_break.is_frame_like).then(|| TornTail {
            segment: at_break.segment,
            offset: at_break.offset,
            first: lost,
            last: last_seen.unwrap_or(lost),
            defect: at_break.defect,
        });
        Ok(LogEnd {
            accepted: self.accepted,
            proven: self.proven,
            torn,
            verified: self.verified.clone(),
            harmless,
        })
    }
}

impl<B> std::fmt::Debug for LogWalk<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogWalk")
            .field("point", &self.point)
            .field("accepted", &self.accepted)
            .field("mark", &self.mark)
            .finish_non_exhaustive()
    }
}
