//! How far back a store goes: from which snapshots replay may start, and which stand for their own end only.
//!
//! The files on disk do not tell. A segment may be there when the images of its batches are gone, and a link
//! may be there only for the links that follow it. The log's last seal tells: it records the snapshots that
//! are kept, and flags those after which the log is kept. The oldest `redo` of a flagged one is the
//! **floor**.
//!
//! | the last seal | a snapshot is | the log's beginning is a start |
//! |---|---|---|
//! | flags some | as its own entry says | no |
//! | flags none | a start, if the log after it is there | yes, if it is there |
//!
//! Recovery, views of earlier states, the pure rebuild, retention, scrubs and the inspectors ask here and
//! nowhere else.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect};
use crate::frame::VerifiedSnapshot;
use crate::ids::{LogPoint, Lsn, SnapshotId};
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::state::follow::Resolution;
use crate::state::survey::Survey;

/// The part that a link on disk plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Every state from its end on: the log after it is kept, with all that the log names.
    Start,
    /// Its own end only: it was caught at one moment, and the log after it is not promised.
    OwnEnd,
    /// No state: it is there for the snapshots that follow it, or is about to be deleted. Its images may be
    /// gone.
    Link,
}

/// How far back a store goes, as its last seal says.
#[derive(Clone, Debug)]
pub struct Reach {
    /// The roles of the links that can be read, with their ends.
    roles: BTreeMap<SnapshotId, (Role, Lsn)>,
    beginning: Option<LogPoint>,
    floor: Option<Lsn>,
}

impl Reach {
    /// The reach that `recorded`, the entries of the log's last seal, gives to the links of a survey.
    #[must_use]
    pub fn of(survey: &Survey, recorded: &[VerifiedSnapshot]) -> Self {
        let has_floor = recorded.iter().any(|entry| entry.log_kept);
        let newest = recorded.iter().map(|entry| entry.snapshot).max();
        let entry = |id: SnapshotId| recorded.iter().find(|entry| entry.snapshot == id);
        let own_end = |link: &Manifest| if link.redo.lsn == link.end { Role::OwnEnd } else { Role::Link };
        let role = |link: &Manifest| match entry(link.snapshot) {
            Some(entry) if entry.log_kept => Role::Start,
            Some(_) if has_floor => own_end(link),
            // As stores were before there was a floor: the log says itself how far back it goes.
            Some(_) if survey.log.segments().contains_key(&link.redo.segment) => Role::Start,
            Some(_) => own_end(link),
            // Published, and not recorded yet.
            None if newest.is_none_or(|newest| link.snapshot > newest) => Role::Start,
            None => Role::Link,
        };
        let roles = survey.readable().map(|link| (link.snapshot, (role(link), link.end))).collect();
        let flagged =
            survey.readable().filter(|link| entry(link.snapshot).is_some_and(|entry| entry.log_kept));
        let floor = flagged.map(|link| link.redo.lsn).min();
        let beginning = survey.log.beginning().filter(|_| !has_floor);
        Self { roles, beginning, floor }
    }

    /// The reach that the log's last seal gives, and the newest batch; `None` if no candidate leads to the
    /// log's end.
    #[must_use]
    pub fn at_the_end(survey: &Survey, source: &dyn ReadAt) -> Option<(Lsn, Self)> {
        let end_from = |base: Option<Arc<Manifest>>| survey.resolve(source, base.as_ref(), None).ok();
        let resolution = survey.candidates().find_map(|base| end_from(base.ok()?))?;
        let end = resolution.end?;
        Some((resolution.resolved.table.lsn(), Self::of(survey, &end.verified)))
    }

    /// Follows the log from a candidate to its end, as an open does: the last seal there must leave it a
    /// start.
    ///
    /// # Errors
    /// [`Damage`]: as for [`Survey::resolve`]; or the log after the candidate is missing, because no seal
    /// promises it.
    pub fn follow(
        survey: &Survey,
        source: &dyn ReadAt,
        base: Option<&Arc<Manifest>>,
    ) -> Result<Resolution, Damage> {
        let resolution = survey.resolve(source, base, None)?;
        let recorded = resolution.end.as_ref().map(|end| &end.verified[..]).unwrap_or_default();
        Self::of(survey, recorded).check_start(base.map(AsRef::as_ref))?;
        Ok(resolution)
    }

    /// The role of a link; `None` if it cannot be read.
    #[must_use]
    pub fn role(&self, snapshot: SnapshotId) -> Role {
        self.roles.get(&snapshot).map_or(Role::Link, |(role, _)| *role)
    }

    /// Whether replay may start from a snapshot, or from the log's beginning, which is `None`.
    #[must_use]
    pub fn is_start(&self, base: Option<SnapshotId>) -> bool {
        base.map_or(self.beginning.is_some(), |base| self.role(base) == Role::Start)
    }

    /// Whether a candidate leads to the state at batch `until`, or to the newest one, with the seal's
    /// promise: replay may start there, or the candidate stands for just this state.
    #[must_use]
    pub fn leads_to(&self, base: Option<SnapshotId>, until: Option<Lsn>) -> bool {
        let Some(base) = base else { return self.beginning.is_some() };
        match self.roles.get(&base) {
            Some((Role::Start, _)) => true,
            Some((Role::OwnEnd, end)) => until == Some(*end),
            Some((Role::Link, _)) | None => false,
        }
    }

    /// Refuses a start that the floor leaves out. Batches after it may lack their images, and the log after
    /// it may be deleted at any moment.
    ///
    /// # Errors
    /// [`Damage`]: the log after it is missing, because no seal promises it.
    pub fn check_start(&self, base: Option<&Manifest>) -> Result<(), Damage> {
        let is_start = self.is_start(base.map(|base| base.snapshot));
        if is_start { Ok(()) } else { Err(missing_log(base)) }
    }

    /// Refuses a candidate for the state at batch `until` that [`leads_to`](Self::leads_to) leaves out.
    ///
    /// # Errors
    /// As for [`check_start`](Self::check_start).
    pub fn check_state(&self, base: Option<&Manifest>, until: Lsn) -> Result<(), Damage> {
        let leads_there = self.leads_to(base.map(|base| base.snapshot), Some(until));
        if leads_there { Ok(()) } else { Err(missing_log(base)) }
    }

    /// The log's beginning, if replay may start there.
    #[must_use]
    pub fn beginning(&self) -> Option<LogPoint> {
        self.beginning
    }

    /// The oldest `redo` from which replay is promised; `None` while no seal said so.
    #[must_use]
    pub fn floor(&self) -> Option<Lsn> {
        self.floor
    }

    /// The oldest state of the window in which every state can be computed up to the newest; `None` if there
    /// is no start.
    #[must_use]
    pub fn opens_at(&self) -> Option<Lsn> {
        let starts = self.roles.values().filter(|(role, _)| *role == Role::Start).map(|(_, end)| *end);
        self.beginning.map(|_| Lsn(0)).or_else(|| starts.min())
    }

    /// The single states that can be looked at below the window, ascending.
    #[must_use]
    pub fn below(&self) -> Vec<Lsn> {
        let opens_at = self.opens_at();
        let alone = self.roles.values().filter(|(role, _)| *role == Role::OwnEnd).map(|(_, end)| *end);
        let mut alone: Vec<Lsn> =
            alone.filter(|end| opens_at.is_none_or(|opens_at| *end < opens_at)).collect();
        alone.sort_unstable();
        alone.dedup();
        alone
    }
}

/// The damage of a start after which no seal promises the log.
fn missing_log(base: Option<&Manifest>) -> Damage {
    let redo = base.map_or(LogPoint::default(), |base| base.redo);
    Defect::Missing.at_lsn(FileName::Segment(redo.segment.max(1)), redo.offset, redo.lsn.next())
}
