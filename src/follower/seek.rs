//! Where to begin: from a position, from a snapshot, from the first batch. Nothing here waits.
//!
//! A position names no place on disk. The batch is looked for in the segments of its incarnation, and its
//! chain hash must be the one remembered. Where the incarnation has a successor, the successor's opening says
//! what became of the batch:
//!
//! | the batch | where to go on |
//! |---|---|
//! | above what the successor accepted | nowhere: a crash took it, the position diverged |
//! | above the proven end | at the successor's start; copies that were handed over before are passed over |
//! | the proven end itself | at the successor's start |
//! | below | in the segments of its own incarnation |
//!
//! The next open leaves an incarnation that committed nothing out of the line. Then the first opening with a
//! higher number says what became of its positions, by Lsn and chain hash. Such an incarnation has no batch
//! below its beginning.
//!
//! A batch that cannot be found any more because a newer snapshot made it superfluous was overtaken.

use std::sync::Arc;

use remanent_format::frame::{FrameHeaderRaw, FrameKind, UncheckedFrame};
use remanent_format::log::LogWalk;
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK};
use remanent_format::state::survey::Survey;
use remanent_format::{Incarnation, LogPoint, Lsn, StoreId};

use super::position::FollowerPosition;
use super::segment::LiveSegment;
use super::survey::missing;
use super::tail::Tail;
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// The point from which to read on after a position, and the position as it is known there.
pub(super) fn locate(
    disk: &Arc<dyn Disk>,
    survey: &Survey,
    position: FollowerPosition,
) -> Result<(LogPoint, FollowerPosition)> {
    if position == FollowerPosition::BEGINNING {
        let Some(start) = survey.log.beginning() else {
            return Err(missing(disk, LogPoint { segment: 1, ..LogPoint::default() }));
        };
        return Ok((start, at(start)));
    }
    let incarnation = position.incarnation;
    check_on_line(disk, survey, position)?;
    if let Some((segment, opening)) = successor(survey, incarnation)
        && let Some(point) = behind(position, segment, &opening)?
    {
        return Ok((point, at_start(position, point)));
    }
    if let Some((segment, opening)) = opening_of(survey, incarnation)
        && position.lsn <= opening.predecessor.lsn
    {
        // The start of an incarnation has the last batch of the one before, and its chain hash.
        let start = opening.start(segment);
        return if at(start) == position { Ok((start, position)) } else { Err(diverged(position, None)) };
    }
    find(disk, survey, position).map(|point| (point, position))
}

/// Where to go on after a position of an incarnation that ended, if that place is not within it.
///
/// # Errors
/// [`Error::Diverged`].
pub(super) fn behind(position: FollowerPosition, segment: u64, next: &Opening) -> Result<Option<LogPoint>> {
    let survived = Some(next.accepted);
    if position.lsn > next.accepted {
        return Err(diverged(position, survived));
    }
    let known = [(next.accepted, next.accepted_chain), (next.predecessor.lsn, next.predecessor.chain)];
    if known.iter().any(|(lsn, chain)| *lsn == position.lsn && *chain != position.chain) {
        return Err(diverged(position, survived));
    }
    Ok((position.lsn >= next.predecessor.lsn).then(|| next.start(segment)))
}

/// A position as the incarnation that starts at `start` knows it, if it knows it.
pub(super) fn at_start(position: FollowerPosition, start: LogPoint) -> FollowerPosition {
    if position.lsn == start.lsn { at(start) } else { position }
}

/// The last batch before a point.
pub(super) fn at(point: LogPoint) -> FollowerPosition {
    FollowerPosition { incarnation: point.incarnation, lsn: point.lsn, chain: point.chain }
}

/// The error of a position that is not on the store's line.
pub(super) fn diverged(position: FollowerPosition, survived: Option<Lsn>) -> Error {
    Error::Diverged { position: position.batch(), survived }
}

/// Refuses an incarnation that is not one of the store's, as far as that can be told.
fn check_on_line(disk: &Arc<dyn Disk>, survey: &Survey, position: FollowerPosition) -> Result<()> {
    let incarnation = position.incarnation;
    let log = &survey.log;
    if log.newest() == Some(incarnation)
        || opening_of(survey, incarnation).is_some()
        || successor(survey, incarnation).is_some()
    {
        return Ok(());
    }
    // The openings that are left reach back to the oldest one's predecessor; nothing is known of earlier
    // ones.
    let oldest = log.line().first().map(|(_, opening)| opening.predecessor.incarnation).or(log.newest());
    if oldest.is_none_or(|oldest| incarnation.number >= oldest.number) {
        return Err(diverged(position, None));
    }
    let first = log.segments().keys().next().copied().unwrap_or_default();
    let before_all = LogPoint { lsn: position.lsn, segment: first.saturating_sub(1), ..LogPoint::default() };
    Err(missing(disk, before_all))
}

/// The opening by which an incarnation's end is judged: the one that follows it on the line, even if the
/// incarnation was left out of the line.
fn successor(survey: &Survey, incarnation: Incarnation) -> Option<(u64, Opening)> {
    let next = survey
        .log
        .line()
        .iter()
        .copied()
        .find(|(_, opening)| opening.incarnation.number > incarnation.number);
    next.filter(|(_, opening)| {
        opening.predecessor.incarnation == incarnation || leaves_out(opening, incarnation)
    })
}

/// Whether an opening begins the incarnation after one that was left out of the line. Two incarnations with
/// the same number are told apart by their other fields.
pub(super) fn leaves_out(opening: &Opening, incarnation: Incarnation) -> bool {
    (opening.predecessor.incarnation.number + 1..opening.incarnation.number).contains(&incarnation.number)
}

fn opening_of(survey: &Survey, incarnation: Incarnation) -> Option<(u64, Opening)> {
    survey.log.line().iter().copied().find(|(_, opening)| opening.incarnation == incarnation)
}

/// Looks for a batch in the segments of its incarnation.
fn find(disk: &Arc<dyn Disk>, survey: &Survey, position: FollowerPosition) -> Result<LogPoint> {
    let store = survey.store.store;
    let own =
        survey.log.segments().iter().filter(|(_, segment)| segment.frames == Some(position.incarnation));
    let mut start = None;
    let mut first = None;
    for (&number, _) in own {
        first = first.or(Some(number));
        let Some(point) = first_point(disk, store, number)? else { continue };
        if point.incarnation == position.incarnation && point.lsn < position.lsn {
            start = Some(point);
        }
    }
    let Some(start) = start else {
        let segment = first.unwrap_or_default().saturating_sub(1);
        return Err(missing(disk, LogPoint { lsn: position.lsn, segment, ..LogPoint::default() }));
    };
    let mut tail = Tail::new(disk.clone(), store, start);
    while tail.point().lsn < position.lsn {
        let Some(taken) = tail.peek()? else {
            // The batch was handed over once, so it was whole. It was recycled, or it is damaged, or the log
            // ends before it, as a power cut leaves it.
            let point = tail.point();
            if let overtaken @ Error::Overtaken { .. } = missing(disk, point) {
                return Err(overtaken);
            }
            let source = DiskSource::new(disk.clone());
            LogWalk::new(&source, &survey.log, point, survey.mark())?.next()?;
            return Err(diverged(position, Some(point.lsn)));
        };
        tail.go_to(taken.end);
    }
    let point = tail.point();
    if at(point) == position { Ok(point) } else { Err(diverged(position, None)) }
}

/// The point before the first frame of a segment, as that frame tells it. A walk from there must arrive at a
/// chain hash that is known.
fn first_point(disk: &Arc<dyn Disk>, store: StoreId, number: u64) -> Result<Option<LogPoint>> {
    let Some(mut open) = LiveSegment::open(&**disk, store, number)? else { return Ok(None) };
    let Some(bytes) = open.bytes(SEGMENT_HEADER_BLOCK, FrameHeaderRaw::LEN)? else { return Ok(None) };
    let Ok(frame) = UncheckedFrame::decode(bytes) else { return Ok(None) };
    let header = *frame.unproven();
    let lsn = match header.kind {
        FrameKind::Batch => Lsn(header.lsn.0.saturating_sub(1)),
        FrameKind::Seal => header.lsn,
    };
    let own = frame.lies_at(store, number, SEGMENT_HEADER_BLOCK);
    Ok(own.then_some(LogPoint {
        incarnation: header.incarnation,
        lsn,
        segment: number,
        offset: SEGMENT_HEADER_BLOCK,
        chain: header.chain_prev,
    }))
}
