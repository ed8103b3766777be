//! Reads frames under a durable mark, for runs and for snapshots that follow a gap (rules 7 and 28).

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;

use remanent_format::frame::{FrameHeader, FrameKind};
use remanent_format::log::{LogEnd, LogMap, LogWalk};
use remanent_format::op::{Op, decode_payload};
use remanent_format::state::reach::{Reach, Role as StartRole};
use remanent_format::state::survey::Survey;
use remanent_format::{FileName, LogPoint, Lsn};

use super::ArchivedDirectory;
use super::files::{StoreFiles, invalid};
use crate::local::SealedFrames;
use crate::object::{BatchPoint, PART_LEN_MAX, Part, Role, crc64};

/// Maximum length of the frames of a run in bytes. A run with a single batch may be longer.
const RUN_LEN_MAX: usize = 8 << 20;
/// Minimum distance between two points of the index, in bytes of frames.
const INDEX_STEP: u64 = 1 << 20;

/// An index of the log, which starts at the oldest state from which replay can start.
#[derive(Debug)]
pub(super) struct LogIndex {
    /// The points at which reads of the log can start, in log order.
    points: RefCell<Vec<LogPoint>>,
    /// The newest batch that a durable mark proves.
    proven: Lsn,
    /// The end of the log when the directory was read.
    pub end: LogEnd,
    /// The states from which replay can start.
    pub reach: Reach,
}

impl LogIndex {
    /// Reads the log to its end, starting from the oldest state from which this is possible.
    pub fn read(survey: &Survey, files: &StoreFiles) -> io::Result<Self> {
        let (_, reach) = Reach::at_the_end(survey, files).ok_or_else(|| {
            invalid("the log cannot be followed to its end from any snapshot; run `remanent verify`")
        })?;
        let snapshots = survey.readable().filter(|link| reach.role(link.snapshot) == StartRole::Start);
        let mut starts: Vec<LogPoint> = snapshots.map(|link| link.redo).collect();
        starts.sort_unstable_by_key(|start| start.lsn);
        let mut failure = None;
        for start in reach.beginning().into_iter().chain(starts) {
            match follow(survey, files, start) {
                Ok((points, end)) => {
                    let (points, proven) = (RefCell::new(points), end.proven.lsn);
                    return Ok(Self { points, proven, end, reach });
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| {
            invalid("there is no snapshot from which replay can start; run `remanent verify`")
        }))
    }

    /// Returns the last indexed point at or below a batch.
    fn point_before(&self, lsn: Lsn) -> Option<LogPoint> {
        let points = self.points.borrow();
        let count = points.partition_point(|point| point.lsn <= lsn);
        points[..count].last().copied()
    }

    /// Sets the newest proven batch. `log` contains the current segments. Removes points in recycled segments, points
    /// in incarnations that are no longer in the history, and points above the previous proven batch. An opening may
    /// have dropped or copied the batches above the previous proven batch.
    pub(super) fn advance(&mut self, proven: Lsn, log: &LogMap) {
        let first = log.segments().keys().next().copied().unwrap_or_default();
        let is_on_line =
            |incarnation| log.newest() == Some(incarnation) || log.successor(incarnation).is_some();
        let old = self.proven;
        let points = self.points.get_mut();
        points.retain(|point| point.lsn <= old && point.segment >= first && is_on_line(point.incarnation));
        if points.is_empty() {
            points.extend(log.beginning());
        }
        self.proven = proven;
    }

    /// Inserts the end of a batch into the index.
    fn insert(&self, point: LogPoint) {
        let mut points = self.points.borrow_mut();
        let at = points.partition_point(|known| known.lsn < point.lsn);
        if points.get(at).is_none_or(|known| known.lsn > point.lsn) {
            points.insert(at, point);
        }
    }

    /// Appends the end of a batch to the index if it is above all indexed points.
    pub(super) fn push(&self, point: LogPoint) {
        let mut points = self.points.borrow_mut();
        if points.last().is_none_or(|last| last.lsn < point.lsn) {
            points.push(point);
        }
    }
}

/// Reads the log from `start` to its end. Returns points at which later reads can start, and the end.
fn follow(survey: &Survey, files: &StoreFiles, start: LogPoint) -> io::Result<(Vec<LogPoint>, LogEnd)> {
    let mut walk = LogWalk::new(files, &survey.log, start, survey.mark()).map_err(invalid)?;
    let mut points = vec![start];
    let mut passed = 0;
    while let Some(frame) = walk.next().map_err(invalid)? {
        passed += frame.header.frame_len();
        // If several points have the same Lsn, `point_before` must return the end of the batch.
        if passed >= INDEX_STEP && frame.header.kind == FrameKind::Batch {
            points.push(frame.end);
            passed = 0;
        }
    }
    let end = walk.end().cloned().ok_or_else(|| invalid("the log has no end"))?;
    Ok((points, end))
}

/// The image files and tables that frames name, by role and file number.
#[derive(Default)]
struct NamedFiles(BTreeSet<(Role, u64)>);

impl ArchivedDirectory {
    /// Returns true if the log after batch `archived` is retained, so that a run can continue after it.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn continues(&self, archived: &BatchPoint) -> io::Result<bool> {
        let found = self.point_at(archived.lsn)?;
        Ok(found.is_some_and(|point| point.chain == archived.chain))
    }

    /// Adds the end of batch `lsn` to the index. The log after the batch can then be read even if the log before it is
    /// recycled.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn remember(&self, lsn: Lsn) -> io::Result<()> {
        if let Some(point) = self.point_at(lsn)? {
            self.log.insert(point);
        }
        Ok(())
    }

    /// Returns the point after a proven batch, or `None` if the log does not contain it or it is not proven.
    pub(super) fn point_at(&self, lsn: Lsn) -> io::Result<Option<LogPoint>> {
        let Some(from) = self.log.point_before(lsn).filter(|_| lsn <= self.log.proven) else {
            return Ok(None);
        };
        if from.lsn == lsn {
            return Ok(Some(from));
        }
        let mut walk = self.walk(from)?;
        while let Some(frame) = walk.next().map_err(invalid)? {
            if frame.header.lsn == lsn {
                return Ok(Some(frame.end));
            }
        }
        Ok(None)
    }

    fn walk(&self, from: LogPoint) -> io::Result<LogWalk<'_>> {
        LogWalk::new(&self.files, &self.survey.log, from, self.survey.mark()).map_err(invalid)
    }

    /// Returns the frames of the next run after `archived`, or `None` if no later batch is proven. First records the
    /// last batch of the run in ARCHIVE.
    pub(super) fn frames_after(&self, archived: &BatchPoint) -> io::Result<Option<SealedFrames>> {
        let proven = self.log.proven;
        if proven <= archived.lsn {
            return Ok(None);
        }
        let from = self.point_at(archived.lsn)?.filter(|point| point.chain == archived.chain);
        let from = from.ok_or_else(|| invalid(format!("the log after {archived} was recycled")))?;
        let mut walk = self.walk(from)?;
        let mut bytes = Vec::new();
        let (mut end, mut len) = (from, 0);
        let mut named = NamedFiles::default();
        while end.lsn < proven
            && let Some(frame) = walk.next().map_err(invalid)?
        {
            let header = frame.header;
            if len > 0 && bytes.len() as u64 + header.frame_len() > RUN_LEN_MAX as u64 {
                break;
            }
            push_frame(&mut bytes, &header, frame.payload);
            if header.kind == FrameKind::Batch {
                self.note_files(&header, frame.payload, &mut named)?;
                (end, len) = (frame.end, bytes.len());
            }
        }
        bytes.truncate(len); // Removes the seals after the last batch.
        if len == 0 {
            return Err(invalid(format!("the log ends before lsn {proven}, which a mark proves")));
        }
        let after = of_frame(end);
        self.log.push(end);
        let files = self.parts_of(named)?;
        self.record_batches(&[*archived, after])?;
        Ok(Some(SealedFrames { before: *archived, after, bytes, files }))
    }

    /// Adds the files that a batch names to `named`.
    fn note_files(&self, header: &FrameHeader, payload: &[u8], named: &mut NamedFiles) -> io::Result<()> {
        let file = FileName::Segment(header.segment);
        let ops = decode_payload(payload);
        for at in ops.map_err(|defect| invalid(defect.at_lsn(file, header.offset, header.lsn)))? {
            match at.op {
                Op::Image { image, .. } => _ = named.0.insert((Role::Images, image.file)),
                Op::Restore { table, table_crc, .. } => {
                    named.0.insert((Role::Table, table));
                    let table = self.survey.read_table(&self.files, table, table_crc).map_err(invalid)?;
                    let images = table.entries.iter().filter_map(|entry| entry.image);
                    let files = images.flat_map(|image| image.files());
                    named.0.extend(files.map(|(file, _)| (Role::Images, file)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn parts_of(&self, named: NamedFiles) -> io::Result<Vec<Part>> {
        let mut parts = Vec::new();
        for (role, file) in named.0 {
            parts.extend(self.files.parts_of(&self.files.pieces_of(role, file)?)?);
        }
        Ok(parts)
    }

    /// Returns the frames from `redo` to batch `end` as parts, and the parts of the files that they name. Also returns
    /// the point after `end`.
    pub(super) fn gap_parts(&mut self, redo: LogPoint, end: Lsn) -> io::Result<(Vec<Part>, LogPoint)> {
        let mut named = NamedFiles::default();
        let mut frames = Vec::new();
        let (mut bytes, mut offset) = (Vec::new(), 0_u64);
        let (mut before, mut skipped) = (redo, 0);
        let mut point = redo;
        let mut walk = self.walk(redo)?;
        while point.lsn < end {
            let Some(frame) = walk.next().map_err(invalid)? else {
                return Err(invalid(format!("the log ends before lsn {end}, the end of a snapshot")));
            };
            let (frame_before, mut start) = (point, bytes.len() as u64);
            let mut consumed = 0;
            push_frame(&mut bytes, &frame.header, frame.payload);
            point = frame.end;
            if frame.header.kind == FrameKind::Batch {
                self.note_files(&frame.header, frame.payload, &mut named)?;
            }
            while bytes.len() >= PART_LEN_MAX || point.lsn == end && !bytes.is_empty() {
                let rest = bytes.split_off(bytes.len().min(PART_LEN_MAX));
                let len = bytes.len() as u64;
                let part = Part { role: Role::Frames, file: redo.lsn.0 + 1, offset, len, crc: crc64(&bytes) };
                frames.push((part, (before, skipped)));
                offset += len;
                bytes = rest;
                // The next part starts within this frame or at its end.
                consumed += len - start;
                start = 0;
                (before, skipped) = (frame_before, consumed);
            }
        }
        drop(walk);
        let mut parts = self.parts_of(named)?;
        parts.extend(frames.iter().map(|(part, _)| *part));
        self.frame_parts = frames.into_iter().collect();
        Ok((parts, point))
    }

    /// Returns the bytes of a frame part that [`gap_parts`](Self::gap_parts) returned.
    pub(super) fn read_frames(&self, part: &Part) -> io::Result<Vec<u8>> {
        let known = self.frame_parts.get(part).copied();
        let (from, mut skipped) =
            known.ok_or_else(|| invalid("the part does not belong to the newest snapshot"))?;
        let mut walk = self.walk(from)?;
        let mut bytes = Vec::new();
        let mut frame_bytes = Vec::new();
        while (bytes.len() as u64) < part.len
            && let Some(frame) = walk.next().map_err(invalid)?
        {
            frame_bytes.clear();
            push_frame(&mut frame_bytes, &frame.header, frame.payload);
            let skip = skipped.min(frame_bytes.len() as u64);
            skipped -= skip;
            let room = (part.len as usize) - bytes.len();
            let kept = &frame_bytes[skip as usize..];
            bytes.extend_from_slice(&kept[..kept.len().min(room)]);
        }
        if bytes.len() as u64 == part.len && crc64(&bytes) == part.crc {
            return Ok(bytes);
        }
        Err(invalid("the log has changed since the snapshot was listed"))
    }
}

/// Appends a frame to `bytes`, encoded as in the log, including its padding.
fn push_frame(bytes: &mut Vec<u8>, header: &FrameHeader, payload: &[u8]) {
    let end = bytes.len() + header.frame_len() as usize;
    bytes.extend_from_slice(&header.encode().0);
    bytes.extend_from_slice(payload);
    bytes.resize(end, 0);
}

/// Returns the batch whose frame ends at `point`.
fn of_frame(point: LogPoint) -> BatchPoint {
    BatchPoint { incarnation: point.incarnation, lsn: point.lsn, chain: point.chain }
}
