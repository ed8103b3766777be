//! Finds the starting point of a follower: from a position, from a snapshot, or from the first batch. No function in
//! this module waits.
//!
//! A position contains no location on disk. The batch is searched for in the segments of its incarnation, and must have
//! the recorded chain hash. If the incarnation has a successor, the successor's opening determines what happened to the
//! batch:
//!
//! | the batch | where to resume |
//! |---|---|
//! | above the batches that the successor accepted | nowhere: it was lost in a crash, the position has diverged |
//! | above the proven end | at the successor's start; copies of batches returned before are skipped |
//! | the proven end itself | at the successor's start |
//! | below | in the segments of its own incarnation |
//!
//! An open omits an earlier incarnation that committed nothing from the store's history. For a position in an omitted
//! incarnation, the first opening with a higher number determines what happened to the batch, by Lsn and chain hash.
//! An omitted incarnation contains no batch of its own.
//!
//! If a batch cannot be found because a newer snapshot made it obsolete, the follower was overtaken.

use std::sync::Arc;

use remanent_format::frame::{FrameHeaderRaw, FrameKind, UncheckedFrame};
use remanent_format::log::LogWalk;
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK};
use remanent_format::state::survey::Survey;
use remanent_format::{Incarnation, LogPoint, Lsn, StoreId};

use super::position::FollowerPosition;
use super::segment::{LiveSegment, lacks_first_frames};
use super::survey::{left_out, missing};
use super::tail::Tail;
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// Returns the point at which to continue reading after `position`, and the position as recorded at that point.
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
        // The start of an incarnation has the Lsn and the chain hash of the last batch of the previous one.
        let start = opening.start(segment);
        return if at(start) == position { Ok((start, position)) } else { Err(diverged(position, None)) };
    }
    find(disk, survey, position).map(|point| (point, position))
}

/// Returns the point at which to continue reading after a position of an incarnation that ended. Returns `None` if that
/// point is within the incarnation itself.
///
/// # Errors
/// [`Error::Diverged`].
pub(crate) fn behind(position: FollowerPosition, segment: u64, next: &Opening) -> Result<Option<LogPoint>> {
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

/// Returns the position in the new incarnation if `position` is the last batch before `start`. Otherwise returns
/// `position` unchanged.
pub(super) fn at_start(position: FollowerPosition, start: LogPoint) -> FollowerPosition {
    if position.lsn == start.lsn { at(start) } else { position }
}

/// Returns the position of the last batch before a point.
pub(crate) fn at(point: LogPoint) -> FollowerPosition {
    FollowerPosition { incarnation: point.incarnation, lsn: point.lsn, chain: point.chain }
}

/// Returns the error for a position that is not in the store's history.
pub(crate) fn diverged(position: FollowerPosition, survived: Option<Lsn>) -> Error {
    Error::Diverged { position: position.batch(), survived }
}

/// Returns an error if an incarnation is known not to be in the store's history.
fn check_on_line(disk: &Arc<dyn Disk>, survey: &Survey, position: FollowerPosition) -> Result<()> {
    let incarnation = position.incarnation;
    let log = &survey.log;
    if log.newest() == Some(incarnation)
        || opening_of(survey, incarnation).is_some()
        || successor(survey, incarnation).is_some()
    {
        return Ok(());
    }
    // The oldest remaining opening also states its predecessor. Nothing is known about earlier incarnations.
    let oldest = log.line().first().map(|(_, opening)| opening.predecessor.incarnation).or(log.newest());
    if oldest.is_none_or(|oldest| incarnation.number >= oldest.number) {
        return Err(diverged(position, None));
    }
    let first = log.segments().keys().next().copied().unwrap_or_default();
    let before_all = LogPoint { lsn: position.lsn, segment: first.saturating_sub(1), ..LogPoint::default() };
    Err(missing(disk, before_all))
}

/// Returns the opening that determines where an incarnation ended. This is the next opening in the store's history,
/// even if the incarnation itself was omitted from the history.
fn successor(survey: &Survey, incarnation: Incarnation) -> Option<(u64, Opening)> {
    let next = survey
        .log
        .line()
        .iter()
        .copied()
        .find(|(_, opening)| opening.incarnation.number > incarnation.number);
    next.filter(|(_, opening)| {
        opening.predecessor.incarnation == incarnation || is_skipped_successor(opening, incarnation)
    })
}

/// Returns whether an opening begins the incarnation that replaced a given incarnation without batches. The replaced
/// incarnation is omitted from the store's history.
pub(super) fn is_skipped_successor(opening: &Opening, incarnation: Incarnation) -> bool {
    (opening.predecessor.incarnation.number + 1..opening.incarnation.number).contains(&incarnation.number)
}

fn opening_of(survey: &Survey, incarnation: Incarnation) -> Option<(u64, Opening)> {
    survey.log.line().iter().copied().find(|(_, opening)| opening.incarnation == incarnation)
}

/// Returns the point after a batch in the segments of its incarnation.
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
    // When a log is closed, the first frames of a segment may be omitted. Replay then begins inside the segment.
    let redos = survey.readable().map(|manifest| manifest.redo).filter(|redo| {
        redo.incarnation == position.incarnation
            && redo.lsn <= position.lsn
            && survey.log.segments().contains_key(&redo.segment)
    });
    let start = start.into_iter().chain(redos).max_by_key(|point| (point.segment, point.offset));
    let Some(start) = start else {
        let segment = first.unwrap_or_default().saturating_sub(1);
        return Err(missing(disk, LogPoint { lsn: position.lsn, segment, ..LogPoint::default() }));
    };
    let mut tail = Tail::new(disk.clone(), store, start);
    while tail.point().lsn < position.lsn {
        let Some(taken) = tail.peek()? else {
            // The follower has returned this batch before, so its frame was complete. It is now recycled or damaged, or
            // a power cut has shortened the log.
            let point = tail.point();
            if let overtaken @ Error::Overtaken { .. } = missing(disk, point) {
                return Err(overtaken);
            }
            if lacks_first_frames(&**disk, store, point.segment)?
                && let Some(overtaken) = left_out(disk, point)
            {
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

/// Returns the point before the first frame of a segment, as stated by the unverified frame. The caller must follow the
/// frames from that point to a known chain hash.
fn first_point(disk: &Arc<dyn Disk>, store: StoreId, number: u64) -> Result<Option<LogPoint>> {
    let Some(mut open) = LiveSegment::open(&**disk, store, number)? else { return Ok(None) };
    let Some(bytes) = open.bytes(SEGMENT_HEADER_BLOCK, FrameHeaderRaw::LEN)? else { return Ok(None) };
    let Ok(frame) = UncheckedFrame::decode(bytes) else { return Ok(None) };
    let header = *frame.unproven();
    let lsn = match header.kind {
        FrameKind::Batch => Lsn(header.lsn.0.saturating_sub(1)),
        FrameKind::Seal => header.lsn,
    };
    let own = frame.is_at(store, number, SEGMENT_HEADER_BLOCK);
    Ok(own.then_some(LogPoint {
        incarnation: header.incarnation,
        lsn,
        segment: number,
        offset: SEGMENT_HEADER_BLOCK,
        chain: header.chain_prev,
    }))
}
