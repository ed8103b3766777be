//! The log of the model: its blocks, and how a process reads them after a crash.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::disk::{Disk, File, Name};
use super::rule::{Batchless, Newest, Proven, Rule};

/// An increasing number and a random number, as in the file format.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Incarnation {
    pub number: u32,
    pub random: u32,
}

/// A batch, identified by the process run that committed it and its Lsn. Its effect is not modeled.
pub type Batch = (u32, u64);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Batch(Batch),
    Seal,
}

/// A frame. `whole` states whether its payload was written. If not, only the header is valid.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Frame {
    pub incarnation: Incarnation,
    pub segment: u64,
    pub position: usize,
    pub lsn: u64,
    pub durable: u64,
    pub chain_prev: u64,
    pub kind: Kind,
    pub whole: bool,
}

impl Frame {
    /// Returns the hash that the next frame must contain. It covers the header, which covers the payload's
    /// checksum.
    pub fn chain(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        Frame { whole: true, ..*self }.hash(&mut hasher);
        hasher.finish()
    }
}

/// The end of a batch's frame. An opening records such a point as the end of the previous incarnation.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Point {
    pub incarnation: Incarnation,
    pub lsn: u64,
    pub segment: u64,
    pub position: usize,
    pub chain: u64,
}

/// One block of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Block {
    /// Zeros, or bytes whose header checksum is wrong.
    Nothing,
    /// The header of a segment that was prepared for later use. It contains an incarnation only under a wrong
    /// rule.
    Ahead { segment: u64, incarnation: Option<Incarnation> },
    /// The header of an incarnation's first segment.
    Opening { segment: u64, incarnation: Incarnation, predecessor: Point, accepted: u64 },
    /// One frame of the log.
    Frame(Frame),
}

/// The reason why an open fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A segment is missing between two others.
    Gap,
    /// The newest segment has frames, so the empty segment after it is missing.
    NewestMissing,
    /// A segment's header belongs to another segment, or is unreadable although frames follow.
    BadHeader,
    /// No segment begins the incarnation.
    NoOpening,
    /// There is an invalid frame before the end that the next incarnation recorded.
    BeforePredecessorEnd,
    /// A durable mark covers an invalid frame.
    UnderMark,
}

/// The content of the log, as recovery reads it.
pub struct Log {
    /// The newest incarnation.
    pub incarnation: Incarnation,
    /// The highest segment, which is empty.
    pub newest: u64,
    /// The segments of the newest incarnation that were read.
    pub read: Vec<u64>,
    /// The end of the last batch that is known to be on the medium, D in the rule.
    pub proven: Point,
    /// The batches up to D, then the accepted tail up to T.
    pub batches: Vec<Batch>,
    /// The end of T, for the wrong rule that relies on the frames of the tail in place.
    pub accepted: Point,
    /// The predecessor of the newest incarnation, and the Lsn up to which the newest incarnation accepted the
    /// predecessor's batches.
    pub opening: (Point, u64),
    pub is_batchless: bool,
}

type Segments<'a> = BTreeMap<u64, &'a File>;

/// Reads the log according to the rule. Changes nothing.
pub fn read(disk: &Disk, rule: Rule) -> Result<Log, Refused> {
    let segments: Segments = disk
        .list()
        .filter_map(|(name, file)| match name {
            Name::Segment(segment) => Some((segment, file)),
            Name::Temporary(_) => None,
        })
        .collect();
    check_segments(&segments)?;
    let incarnation = newest_incarnation(&segments, rule)?;
    let (&first, _) =
        segments.iter().rev().find(|(_, file)| opening(file).is_some()).ok_or(Refused::NoOpening)?;
    let (opened, predecessor, accepted) = opening(segments[&first]).expect("just found");
    check_gaps(&segments, first)?;
    let from_before = accepted;

    // The part before the predecessor's end must be complete.
    let mut batches = closed_part(&segments, predecessor)?;

    // I4: the newest incarnation may end in a torn tail, but only above every mark.
    let mut mark = if opened == incarnation { accepted } else { predecessor.lsn };
    let mut cursor = Cursor::new(&segments, first, incarnation, predecessor);
    let mut points = vec![predecessor];
    let mut is_batchless = opened == incarnation;
    while let Some(frame) = cursor.next_valid() {
        mark = mark.max(frame.durable);
        if let Kind::Batch(batch) = frame.kind {
            batches.push(batch);
            is_batchless &= rule.batchless == Batchless::WithCopies && frame.lsn <= from_before;
        }
        if frame.kind != Kind::Seal || rule.proven == Proven::EndOfFrame {
            points.push(cursor.point());
        }
    }
    mark = mark.max(cursor.testimony());
    let accepted = *points.last().expect("starts with the predecessor");
    if mark > accepted.lsn {
        return Err(Refused::UnderMark);
    }
    // D is the end of a *batch*, because a seal after it may be no more durable than the tail.
    let proven = points.into_iter().rfind(|point| point.lsn <= mark).unwrap_or(predecessor);
    let newest = *segments.keys().next_back().expect("checked above");
    let read = segments.range(first..newest).map(|(&segment, _)| segment).collect();
    let opening = (predecessor, from_before);
    Ok(Log { incarnation, newest, read, proven, batches, accepted, opening, is_batchless })
}

/// Checks the segments as files, before any frame is used.
fn check_segments(segments: &Segments) -> Result<(), Refused> {
    for (&segment, file) in segments {
        match *file[0].visible() {
            Block::Ahead { segment: own, .. } | Block::Opening { segment: own, .. } if own == segment => {}
            Block::Nothing if own_frame(segment, file).is_none() => {}
            _ => return Err(Refused::BadHeader),
        }
    }
    match segments.iter().next_back() {
        None => Err(Refused::NoOpening),
        Some((&segment, file)) if opening(file).is_some() || own_frame(segment, file).is_some() => {
            Err(Refused::NewestMissing) // I8: its successor was made before the first frame
        }
        Some(_) => Ok(()),
    }
}

/// From the newest opening segment on, no segment may be missing. Earlier segments may be missing where an
/// incarnation was omitted. If one of them is needed, reading its frames fails.
fn check_gaps(segments: &Segments, first: u64) -> Result<(), Refused> {
    let present = segments.range(first..).map(|(&segment, _)| segment);
    if present.zip(first..).all(|(segment, expected)| segment == expected) {
        return Ok(());
    }
    Err(Refused::Gap)
}

/// Returns the incarnation of the highest segment that proves one. Prepared segments prove nothing, because
/// they may have been prepared for an incarnation that a crash prevented.
fn newest_incarnation(segments: &Segments, rule: Rule) -> Result<Incarnation, Refused> {
    let proves = |(&segment, file): (&u64, &&File)| match (rule.newest, *file[0].visible()) {
        (_, Block::Opening { incarnation, .. }) => Some(incarnation),
        (Newest::ByHeader, Block::Ahead { incarnation, .. }) => incarnation,
        _ => own_frame(segment, file).map(|frame| frame.incarnation),
    };
    segments.iter().rev().find_map(proves).ok_or(Refused::NoOpening)
}

fn opening(file: &File) -> Option<(Incarnation, Point, u64)> {
    match *file[0].visible() {
        Block::Opening { incarnation, predecessor, accepted, .. } => {
            Some((incarnation, predecessor, accepted))
        }
        _ => None,
    }
}

/// Returns the frame in this block if it was written for this position.
fn own_frame(segment: u64, file: &File) -> Option<Frame> {
    file.iter().enumerate().find_map(|(position, block)| match *block.visible() {
        Block::Frame(frame) if (frame.segment, frame.position) == (segment, position) => Some(frame),
        _ => None,
    })
}

/// Returns the batches up to the point that an opening segment recorded. Frames after this point are not
/// read.
fn closed_part(segments: &Segments, end: Point) -> Result<Vec<Batch>, Refused> {
    if end.lsn == 0 {
        return Ok(Vec::new());
    }
    let (&first, (incarnation, predecessor, _)) = segments
        .range(..=end.segment)
        .rev()
        .find_map(|(segment, file)| Some((segment, opening(file)?)))
        .ok_or(Refused::NoOpening)?;
    // Segments of an omitted incarnation follow this end, if they still exist.
    if incarnation != end.incarnation {
        return Err(Refused::NoOpening);
    }
    let mut batches = closed_part(segments, predecessor)?;
    let mut cursor = Cursor::new(segments, first, incarnation, predecessor);
    while cursor.point() != end {
        match cursor.next_valid().ok_or(Refused::BeforePredecessorEnd)?.kind {
            Kind::Batch(batch) => batches.push(batch),
            Kind::Seal => {}
        }
    }
    Ok(batches)
}

/// Reads the frames of one incarnation in order.
struct Cursor<'a> {
    segments: &'a Segments<'a>,
    incarnation: Incarnation,
    segment: u64,
    position: usize,
    lsn: u64,
    chain: u64,
}

impl<'a> Cursor<'a> {
    fn new(segments: &'a Segments<'a>, segment: u64, incarnation: Incarnation, after: Point) -> Self {
        Self { segments, incarnation, segment, position: 0, lsn: after.lsn, chain: after.chain }
    }

    /// Returns the frame at the next position, if it is valid (I3).
    fn next_valid(&mut self) -> Option<Frame> {
        let (segment, position) = match self.segments.get(&self.segment)?.get(self.position + 1) {
            Some(_) => (self.segment, self.position + 1),
            None => (self.segment + 1, 1),
        };
        let Block::Frame(frame) = *self.segments.get(&segment)?[position].visible() else { return None };
        let lsn_expected = match frame.kind {
            Kind::Batch(_) => self.lsn + 1,
            Kind::Seal => self.lsn,
        };
        let valid = frame.whole
            && frame.incarnation == self.incarnation
            && (frame.segment, frame.position) == (segment, position)
            && frame.lsn == lsn_expected
            && frame.chain_prev == self.chain;
        if !valid {
            return None;
        }
        (self.segment, self.position) = (segment, position);
        (self.lsn, self.chain) = (frame.lsn, frame.chain());
        Some(frame)
    }

    fn point(&self) -> Point {
        let (segment, position) = (self.segment, self.position);
        Point { incarnation: self.incarnation, lsn: self.lsn, segment, position, chain: self.chain }
    }

    /// Returns the highest mark of the frames after the first invalid one. Their chain hashes cannot be
    /// checked, and their payloads may be missing.
    fn testimony(&self) -> u64 {
        let beyond = self.segments.range(self.segment..).flat_map(|(&segment, file)| {
            file.iter().enumerate().map(move |(position, block)| (segment, position, block.visible()))
        });
        beyond
            .filter(|&(segment, position, _)| (segment, position) > (self.segment, self.position))
            .filter_map(|(segment, position, block)| match block {
                Block::Frame(frame)
                    if frame.incarnation == self.incarnation
                        && (frame.segment, frame.position) == (segment, position)
                        && frame.lsn > self.lsn =>
                {
                    Some(frame.durable)
                }
                _ => None,
            })
            .max()
            .unwrap_or(0)
    }
}
