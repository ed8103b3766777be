//! The reach of a store into the past: the snapshots from which replay may start, and those that provide only
//! their own state.
//!
//! The files on disk do not determine this. A segment may still exist after the images of its batches were
//! deleted, and a link may exist only for the links that follow it. The log's last seal determines it: the
//! seal records the snapshots that are kept, and flags those after which the log is kept. The lowest `redo`
//! of a flagged snapshot is the **floor**.
//!
//! | the last seal flags | role of a snapshot | the log's beginning is a start |
//! |---|---|---|
//! | some snapshots | determined by its own entry | no |
//! | none | a start, if the log after it exists | yes, if it exists |
//!
//! Recovery, views of earlier states, the rebuild, retention, scrubs and the inspectors all use this module.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect};
use crate::frame::VerifiedSnapshot;
use crate::ids::{LogPoint, Lsn, SnapshotId};
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::state::follow::Resolution;
use crate::state::survey::Survey;

/// The role of a link on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A start: every state from its end on can be computed. The log after it is kept, with everything that
    /// the log names.
    Start,
    /// A snapshot that provides only its own state: it was captured at one moment, and the log after it is
    /// not promised.
    OwnEnd,
    /// A link that provides no state. It exists for the snapshots that follow it, or is about to be deleted.
    /// Its images may already be gone.
    Link,
}

/// The reach of a store into the past, as its last seal determines it.
#[derive(Clone, Debug)]
pub struct Reach {
    /// Roles of the readable links, with their ends.
    roles: BTreeMap<SnapshotId, (Role, Lsn)>,
    beginning: Option<LogPoint>,
    floor: Option<Lsn>,
}

impl Reach {
    /// Determines the reach of a surveyed store from `recorded`, the entries of the log's last seal.
    #[must_use]
    pub fn of(survey: &Survey, recorded: &[VerifiedSnapshot]) -> Self {
        let has_floor = recorded.iter().any(|entry| entry.log_kept);
        let newest = recorded.iter().map(|entry| entry.snapshot).max();
        let entry = |id: SnapshotId| recorded.iter().find(|entry| entry.snapshot == id);
        let own_end = |link: &Manifest| if link.redo.lsn == link.end { Role::OwnEnd } else { Role::Link };
        let role = |link: &Manifest| match entry(link.snapshot) {
            Some(entry) if entry.log_kept => Role::Start,
            Some(_) if has_floor => own_end(link),
            // A store without a floor: the existing segments determine how far back the log reaches.
            Some(_) if survey.log.segments().contains_key(&link.redo.segment) => Role::Start,
            Some(_) => own_end(link),
            // Published but not recorded yet.
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

    /// Returns the newest batch and the reach determined by the log's last seal. Returns `None` if no
    /// candidate leads to the log's end.
    #[must_use]
    pub fn at_the_end(survey: &Survey, source: &dyn ReadAt) -> Option<(Lsn, Self)> {
        let end_from = |base: Option<Arc<Manifest>>| survey.resolve(source, base.as_ref(), None).ok();
        let resolution = survey.candidates().find_map(|base| end_from(base.ok()?))?;
        let end = resolution.end?;
        Some((resolution.resolved.table.lsn(), Self::of(survey, &end.verified)))
    }

    /// Follows the log from a candidate to its end, as an open does, and checks that the last seal there
    /// allows this start.
    ///
    /// # Errors
    /// Returns [`Damage`] as [`Survey::resolve`] does, or reports the log after the candidate as missing if
    /// the seal does not promise it.
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

    /// Returns the role of a link; [`Role::Link`] if it cannot be read.
    #[must_use]
    pub fn role(&self, snapshot: SnapshotId) -> Role {
        self.roles.get(&snapshot).map_or(Role::Link, |(role, _)| *role)
    }

    /// Returns true if replay may start from a snapshot, or from the log's beginning if `base` is `None`.
    #[must_use]
    pub fn is_start(&self, base: Option<SnapshotId>) -> bool {
        base.map_or(self.beginning.is_some(), |base| self.role(base) == Role::Start)
    }

    /// Returns true if a candidate is promised to lead to the state at batch `until`, or to the newest state:
    /// replay may start there, or the candidate provides exactly this state.
    #[must_use]
    pub fn leads_to(&self, base: Option<SnapshotId>, until: Option<Lsn>) -> bool {
        let Some(base) = base else { return self.beginning.is_some() };
        match self.roles.get(&base) {
            Some((Role::Start, _)) => true,
            Some((Role::OwnEnd, end)) => until == Some(*end),
            Some((Role::Link, _)) | None => false,
        }
    }

    /// Checks that replay may start from a candidate. Otherwise batches after it may lack their images, and
    /// the log after it may be deleted at any moment.
    ///
    /// # Errors
    /// Returns [`Damage`] that reports the log after the candidate as missing.
    pub fn check_start(&self, base: Option<&Manifest>) -> Result<(), Damage> {
        let is_start = self.is_start(base.map(|base| base.snapshot));
        if is_start { Ok(()) } else { Err(missing_log(base)) }
    }

    /// Checks that a candidate is promised to lead to the state at batch `until`; see
    /// [`leads_to`](Self::leads_to).
    ///
    /// # Errors
    /// Returns [`Damage`] as [`check_start`](Self::check_start) does.
    pub fn check_state(&self, base: Option<&Manifest>, until: Lsn) -> Result<(), Damage> {
        let leads_there = self.leads_to(base.map(|base| base.snapshot), Some(until));
        if leads_there { Ok(()) } else { Err(missing_log(base)) }
    }

    /// Returns the log's beginning, if replay may start there.
    #[must_use]
    pub fn beginning(&self) -> Option<LogPoint> {
        self.beginning
    }

    /// Returns the lowest `redo` from which replay is promised, or `None` if no seal recorded one.
    #[must_use]
    pub fn floor(&self) -> Option<Lsn> {
        self.floor
    }

    /// Returns the oldest state from which every state up to the newest can be computed, or `None` if there
    /// is no start.
    #[must_use]
    pub fn opens_at(&self) -> Option<Lsn> {
        let starts = self.roles.values().filter(|(role, _)| *role == Role::Start).map(|(_, end)| *end);
        self.beginning.map(|_| Lsn(0)).or_else(|| starts.min())
    }

    /// Returns the individual states available below that window, in ascending order.
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

/// Returns the damage of a start after which no seal promises the log.
fn missing_log(base: Option<&Manifest>) -> Damage {
    let redo = base.map_or(LogPoint::default(), |base| base.redo);
    Defect::Missing.at_lsn(FileName::Segment(redo.segment.max(1)), redo.offset, redo.lsn.next())
}
