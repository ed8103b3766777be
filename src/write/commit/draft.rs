//! A batch that is ready to be logged: what is left to check under the submission lock, the append, and the
//! hand-over to the applier.
//!
//! A draft owns whatever that takes. So whoever holds the lock can log it: its committer, or another one for it
//! ([`super::combine`]).
//!
//! A crash before the append loses a batch that nobody was told of; after it, recovery replays the batch.

use std::collections::VecDeque;

use remanent_format::op::OpAt;
use remanent_format::state::table::{Changes, PlanMode, Refusal};
use remanent_format::{Epoch, LogPoint, Lsn, PageId, PageTable};

use super::Committer;
use super::page_memory::{changed_in_place, goes_elsewhere, home, home_in, homes_made, taken_elsewhere};
use crate::applier::ApplyWork;
use crate::error::{Error, Result};
use crate::log::SpacePurpose;
use crate::memory::arena::PageMemory;
use crate::memory::staging::StagingBuf;

/// A batch on its way into the log.
pub(super) struct Draft {
    pub payload: StagingBuf,
    pub payload_crc: u32,
    pub purpose: SpacePurpose,
    /// Epochs at which pages must be.
    pub expected: Vec<(PageId, Epoch)>,
    /// Pages copied for clones, and what they were.
    pub staged: SourceVersions,
    /// Pages whose bytes are in images, and the lengths that they were said to have before.
    pub lens: Vec<(PageId, Option<u64>)>,
    /// For the creates, resizes and moves, in their order.
    pub memory: VecDeque<PageMemory>,
    /// For the pages that are leased.
    pub spares: Vec<(PageId, PageMemory)>,
    /// What the applier copies from elsewhere than the payload.
    pub asides: VecDeque<StagingBuf>,
}

/// The last change of each page when it was copied: of its bytes, its metadata or its place.
pub(super) type SourceVersions = Vec<(PageId, Lsn)>;

/// What became of a draft.
pub(super) enum Outcome {
    /// It is in the log, and on its way to the device.
    Logged(LogPoint),
    /// Nothing is: a page is not what it was when the draft was made.
    Stale(Draft),
    /// Nothing is, and nothing will be.
    Refused(Error, Draft),
}

/// A draft in the log, and what it does to the table.
pub(super) type AppendResult = (LogPoint, Changes);

impl Committer {
    /// Checks a draft against the state that it is to follow, and appends it. `None` if a page changed after it was
    /// staged for a clone, or has another length or place than when its bytes were taken for all of it or memory was
    /// allocated for it. `ops` are the payload's.
    pub(super) fn append(
        &self,
        table: &PageTable,
        draft: &Draft,
        ops: &[OpAt<'_>],
    ) -> Result<Option<AppendResult>> {
        self.poison.check()?;
        let home_of = |page| home_in(table, page);
        // Who leases a page from now on gets it behind this batch.
        let has_spare = |page: &PageId| {
            let is_its_own = |(spared, memory): &(PageId, PageMemory)| {
                spared == page && Some(home(memory)) == home_of(*page)
            };
            draft.spares.iter().any(is_its_own)
        };
        if !self.leases.leased(changed_in_place(ops)).iter().all(has_spare) {
            return Ok(None);
        }
        self.leases.check_unpinned(ops.iter().filter_map(|at| taken_elsewhere(&at.op, home_of)))?;
        let lsn_of = |page| table.get(page).map(|info| info.lsn);
        let len_of = |page| home_of(page).map(|(_, len)| len);
        if draft.staged.iter().any(|(page, lsn)| lsn_of(*page) != Some(*lsn))
            || draft.lens.iter().any(|(page, len)| len_of(*page) != *len)
        {
            return Ok(None);
        }
        if ops.iter().any(|at| goes_elsewhere(&at.op))
            && !draft.memory.iter().map(home).eq(homes_made(ops, home_of)?)
        {
            return Ok(None);
        }
        for &(page, expected) in &draft.expected {
            let found = table.get(page).map_or(Epoch(0), |info| info.epoch);
            if found != expected {
                return Err(Error::Conflict { page, expected, found });
            }
        }
        let lsn = table.lsn().next();
        let planned = table.plan(lsn, ops, PlanMode::Commit);
        let changes = planned.map_err(|(index, refusal)| refused(index, refusal))?;
        let point = self.log.append(&draft.payload, draft.payload_crc, draft.purpose)?;
        assert!(point.lsn == lsn);
        Ok(Some((point, changes)))
    }

    /// Makes a draft that was appended what the table says, and has it applied. `then` comes between the two.
    pub(super) fn hand_over(
        &self,
        table: &mut PageTable,
        draft: Draft,
        appended: Result<Option<AppendResult>>,
        then: impl FnOnce(LogPoint, &Changes),
    ) -> Outcome {
        let (point, changes) = match appended {
            Ok(Some(appended)) => appended,
            Ok(None) => return Outcome::Stale(draft),
            Err(error) => return Outcome::Refused(error, draft),
        };
        table.install(&changes);
        // Before the applier has it: a reader that finds a page's bytes changed finds its new version, too.
        self.versions.install(&changes);
        then(point, &changes);
        let Draft { payload, memory, spares, asides, .. } = draft;
        self.applier.push(ApplyWork { point, payload, changes, memory, spares, asides });
        Outcome::Logged(point)
    }

    /// Takes back what a draft holds that was not logged.
    pub(super) fn take_back(&self, draft: Draft) {
        let Draft { payload, memory, spares, asides, .. } = draft;
        for staged in asides.into_iter().chain([payload]) {
            self.staging.give(staged.into_staging());
        }
        self.discard(memory.into_iter().chain(spares.into_iter().map(|(_, spare)| spare)));
    }
}

fn refused(index: usize, refusal: Refusal) -> Error {
    match refusal {
        Refusal::UnknownPage(page) => Error::UnknownPage { page },
        Refusal::OutOfBounds { page, offset, len, page_len } => {
            Error::OutOfBounds { page, offset, len, page_len }
        }
        Refusal::KeyTaken { key, holder } => Error::KeyTaken { key, holder },
        Refusal::Limit { what, found, limit } => Error::Limit { what, found, limit },
        other => Error::InvalidOperation { index, reason: other.to_string() },
    }
}
