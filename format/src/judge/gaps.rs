//! Gaps, which are ranges of states that cannot be computed.
//!
//! A state is computed from the newest start that ends at or before the state. The computation needs the images of that
//! start, the log after it, and all images and tables that the batches of that log name. An image is needed even if a
//! later batch replaces its page.

use std::sync::Arc;

use super::ImageProofs;
use crate::defect::{Damage, Defect};
use crate::frame::VerifiedSnapshot;
use crate::ids::Lsn;
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::op::{Op, OpAt};
use crate::state::replay::Resolver;
use crate::state::survey::Survey;

/// A range of states that cannot be computed, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The first state of the range.
    pub first: Lsn,
    /// The last state that is known to be in the range.
    pub last: Lsn,
    /// The damage that prevents the computation of these states.
    pub damage: Damage,
}

/// Number of the feature bit that lets a seal record the floor of the log.
const FLOOR: u32 = 0;

/// Finds the gaps between a start and batch `until`, or the end of the log. `None` as the start means the beginning of
/// the log. Reads and proves the images that batches after the state of the start name.
pub(super) fn gaps(
    survey: &Survey,
    source: &dyn ReadAt,
    base: Option<&Arc<Manifest>>,
    until: Option<Lsn>,
    images: &mut ImageProofs<'_>,
) -> Vec<Gap> {
    let own = base.map_or(Lsn(0), |base| base.end);
    let mut found = Vec::new();
    if until.is_some_and(|until| until <= own) {
        return found;
    }
    let mut reached = own;
    let walked = survey.follow(source, base, until, &mut |resolver, frame, ops| {
        let lsn = frame.header.lsn;
        if lsn > own {
            reached = lsn;
            let damaged = damaged_images(resolver, lsn, ops, images).into_iter();
            found.extend(damaged.map(|damage| Gap { first: lsn, last: lsn, damage }));
        }
        Ok(())
    });
    if let Err(damage) = walked {
        let first = reached.next();
        found.push(Gap { first, last: until.unwrap_or(first).max(first), damage });
    }
    found
}

/// Returns the damage to images that a batch names and the state after the batch still uses.
fn damaged_images(
    resolver: &Resolver,
    lsn: Lsn,
    ops: &[OpAt<'_>],
    images: &mut ImageProofs<'_>,
) -> Vec<Damage> {
    if let [OpAt { op: Op::Restore { .. }, .. }] = ops {
        let bases = resolver.bases().iter();
        return bases.filter_map(|(_, base)| images.check(lsn, base.image, base.len)).collect();
    }
    let brought = ops.iter().filter_map(|at| match at.op {
        Op::Image { page, len, image } => Some((page, len, image)),
        _ => None,
    });
    // A batch can replace a page with an image and then delete the page.
    let stands = brought.filter(|(page, _, image)| {
        resolver.bases().get(*page).is_some_and(|base| base.image == Some(*image))
    });
    stands.filter_map(|(_, len, image)| images.check(lsn, Some(image), len)).collect()
}

/// Returns damage if the beginning of the log is missing although it must exist. It must exist if the last seal lists
/// snapshots but flags none, so that the seal records no floor. A seal without snapshots proves nothing, because a fork
/// has no beginning until its first open writes a seal.
pub(super) fn lost_beginning(survey: &Survey, record: &[VerifiedSnapshot]) -> Option<Damage> {
    let is_given_up = record.iter().any(|entry| entry.log_kept);
    let is_kept = survey.store.features.has(FLOOR) && !record.is_empty() && !is_given_up;
    if !is_kept || survey.log.beginning().is_some() {
        return None;
    }
    if let Some(damage) = survey.log.chain_break() {
        return Some(damage.clone());
    }
    let segments = survey.log.segments();
    let lowest = segments.keys().next().copied().unwrap_or_default();
    let before = survey.log.line().first().map_or(lowest, |(_, opening)| opening.predecessor.segment);
    let missing = (1..=before).rev().find(|number| !segments.contains_key(number)).unwrap_or(1);
    Some(Defect::Missing.at_lsn(FileName::Segment(missing), 0, Lsn(1)))
}
