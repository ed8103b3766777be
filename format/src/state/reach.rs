//! The reach of a store into the past: the snapshots from which replay can start, and the snapshots that provide only
//! their own state.
//!
//! The files on disk do not determine the reach. A segment may still exist after the images of its batches were
//! deleted, and a manifest may exist only as a link of later snapshots. The last seal of the log determines the reach.
//! It lists the kept snapshots, and flags those after which the log is kept. The lowest `redo` of a flagged snapshot is
//! the **floor**.
//!
//! | the last seal flags | role of a snapshot | the log's beginning is a start |
//! |---|---|---|
//! | some snapshots | determined by its own entry | no |
//! | none | a start, if the log after it exists | yes, if it exists |
//!
//! Recovery, views of earlier states, the rebuild, retention, scrubs and the inspectors use this module.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect};
use crate::frame::VerifiedSnapshot;
use crate::ids::{LogPoint, Lsn, SnapshotId};
use crate::manifest::Manifest;
use crate::names::{FileName, ReadAt};
use crate::state::follow::Resolution;
use crate::state::survey::Survey;

/// The states that can be computed from a snapshot's manifest on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Replay can start from the snapshot. The log after the snapshot is kept, and so are the files that its batches
    /// name. Every state from the snapshot's end on can be computed.
    Start,
    /// Only the state of the snapshot itself can be computed. All its pages were captured as of the same batch, and the
    /// log after the snapshot may be deleted.
    EndOnly,
    /// No state can be computed. The manifest exists only as a link of later snapshots, or will be deleted. Its images
    /// may already be deleted.
    Link,
}

/// The states of the past that a store can compute, as determined by the last seal of the log.
#[derive(Clone, Debug)]
pub struct Reach {
    /// Role and end of each readable manifest.
    roles: BTreeMap<SnapshotId, (Role, Lsn)>,
    beginning: Option<LogPoint>,
    floor: Option<Lsn>,
}

impl Reach {
    /// Determines the reach of a store. `recorded` contains the entries of the last seal of the log.
    #[must_use]
    pub fn of(survey: &Survey, recorded: &[VerifiedSnapshot]) -> Self {
        let has_floor = recorded.iter().any(|entry| entry.log_kept);
        let newest = recorded.iter().map(|entry| entry.snapshot).max();
        let entry = |id: SnapshotId| recorded.iter().find(|entry| entry.snapshot == id);
        let own_end = |link: &Manifest| if link.redo.lsn == link.end { Role::EndOnly } else { Role::Link };
        let role = |link: &Manifest| match entry(link.snapshot) {
            Some(entry) if entry.log_kept => Role::Start,
            Some(_) if has_floor => own_end(link),
            // The seal records no floor, so the existing segments determine the reach.
            Some(_) if survey.log.segments().contains_key(&link.redo.segment) => Role::Start,
            Some(_) => own_end(link),
            // The snapshot was published after the seal was written.
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

    /// Returns the Lsn of the newest batch, and the reach of the store. Reads the log to find its last seal. Returns
    /// `None` if the log cannot be read to its end from any candidate.
    #[must_use]
    pub fn at_the_end(survey: &Survey, source: &dyn ReadAt) -> Option<(Lsn, Self)> {
        let end_from = |base: Option<Arc<Manifest>>| survey.resolve(source, base.as_ref(), None).ok();
        let resolution = survey.candidates().find_map(|base| end_from(base.ok()?))?;
        let end = resolution.end?;
        Some((resolution.resolved.table.lsn(), Self::of(survey, &end.verified)))
    }

    /// Computes the state at the end of the log from a candidate, as an open does. Checks that the last seal permits a
    /// start from this candidate.
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`Survey::resolve`]. If the seal does not permit the start, returns [`Damage`]
    /// that reports the log after the candidate as missing.
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

    /// Returns the role of a snapshot's manifest. The role is [`Role::Link`] if the manifest cannot be read.
    #[must_use]
    pub fn role(&self, snapshot: SnapshotId) -> Role {
        self.roles.get(&snapshot).map_or(Role::Link, |(role, _)| *role)
    }

    /// Returns true if replay can start from the snapshot `base`, or from the beginning of the log if `base` is `None`.
    #[must_use]
    pub fn is_start(&self, base: Option<SnapshotId>) -> bool {
        base.map_or(self.beginning.is_some(), |base| self.role(base) == Role::Start)
    }

    /// Returns true if the state after batch `until` can be computed from a candidate. `None` means the newest state.
    #[must_use]
    pub fn leads_to(&self, base: Option<SnapshotId>, until: Option<Lsn>) -> bool {
        let Some(base) = base else { return self.beginning.is_some() };
        match self.roles.get(&base) {
            Some((Role::Start, _)) => true,
            Some((Role::EndOnly, end)) => until == Some(*end),
            Some((Role::Link, _)) | None => false,
        }
    }

    /// Checks that replay can start from a candidate. The log after a candidate that is not a start may be deleted at
    /// any time, and so may the images that its batches name.
    ///
    /// # Errors
    /// Returns [`Damage`] that reports the log after the candidate as missing.
    pub fn check_start(&self, base: Option<&Manifest>) -> Result<(), Damage> {
        let is_start = self.is_start(base.map(|base| base.snapshot));
        if is_start { Ok(()) } else { Err(missing_log(base)) }
    }

    /// Checks that the state after batch `until` can be computed from a candidate, as [`leads_to`](Self::leads_to)
    /// does.
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`check_start`](Self::check_start).
    pub fn check_state(&self, base: Option<&Manifest>, until: Lsn) -> Result<(), Damage> {
        let leads_there = self.leads_to(base.map(|base| base.snapshot), Some(until));
        if leads_there { Ok(()) } else { Err(missing_log(base)) }
    }

    /// Returns the beginning of the log, or `None` if replay cannot start at the beginning.
    #[must_use]
    pub fn beginning(&self) -> Option<LogPoint> {
        self.beginning
    }

    /// Returns the lowest `redo` from which the log is kept, or `None` if no seal recorded a floor.
    #[must_use]
    pub fn floor(&self) -> Option<Lsn> {
        self.floor
    }

    /// Returns the oldest Lsn from which on every state can be computed, or `None` if replay cannot start from any
    /// candidate.
    #[must_use]
    pub fn opens_at(&self) -> Option<Lsn> {
        let starts = self.roles.values().filter(|(role, _)| *role == Role::Start).map(|(_, end)| *end);
        self.beginning.map(|_| Lsn(0)).or_else(|| starts.min())
    }

    /// Returns the Lsns of the states below [`opens_at`](Self::opens_at) that can be computed, in ascending order.
    #[must_use]
    pub fn below(&self) -> Vec<Lsn> {
        let opens_at = self.opens_at();
        let alone = self.roles.values().filter(|(role, _)| *role == Role::EndOnly).map(|(_, end)| *end);
        let mut alone: Vec<Lsn> =
            alone.filter(|end| opens_at.is_none_or(|opens_at| *end < opens_at)).collect();
        alone.sort_unstable();
        alone.dedup();
        alone
    }
}

/// Returns damage that reports the log after a candidate as missing.
fn missing_log(base: Option<&Manifest>) -> Damage {
    let redo = base.map_or(LogPoint::default(), |base| base.redo);
    Defect::Missing.at_lsn(FileName::Segment(redo.segment.max(1)), redo.offset, redo.lsn.next())
}
