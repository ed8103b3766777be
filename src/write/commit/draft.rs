//! A draft is an encoded batch that can be logged. This module performs the steps that require the submission lock: it
//! repeats the checks, appends the batch to the log, and passes it to the applier.
//!
//! A draft owns all memory that these steps need. Therefore any thread that holds the lock can log it, not only the
//! thread that prepared it ([`super::combine`]).
//!
//! A crash before the append loses a batch that was never acknowledged. After the append, recovery replays the batch.

use remanent_format::op::OpAt;
use remanent_format::state::table::{Changes, PlanMode, Refusal};
use remanent_format::{Epoch, LogPoint, Lsn, PageId, PageTable, Place};

use super::Committer;
use super::disk_moves::{DiskOps, new_places};
use super::page_memory::{
    changed_in_place, location, location_in, moves_to_other_memory, page_moved_away, required_memory,
};
use crate::applier::{ApplyWork, Provision};
use crate::engine::Engine;
use crate::error::{Error, Invalid, Result, Taken, Unavailable};
use crate::log::SpacePurpose;
use crate::memory::arena::PageMemory;
use crate::memory::staging::GrownBytes;

/// A batch that is ready to be logged, with all memory that the applier needs for it.
pub(super) struct Draft {
    pub payload: GrownBytes,
    /// The payload's checksum, computed before an Lsn is assigned (I1).
    pub payload_crc: u32,
    pub purpose: SpacePurpose,
    /// The pages that must have a given epoch when the batch is logged, as preconditions of the batch.
    pub expected: Vec<(PageId, Epoch)>,
    /// The pages whose bytes were read while the draft was prepared, with the versions that were read. If one has
    /// changed, the draft is stale.
    pub staged: SourceVersions,
    /// The pages whose bytes are in images, with the length that each page had when its image was written.
    pub lens: Vec<(PageId, Option<u64>)>,
    /// The operations that affect pages on disk, as found while the draft was prepared.
    pub disk_ops: DiskOps,
    /// The memory and images that the applier needs in addition to the payload, or `None` if it needs only the payload.
    pub provision: Option<Box<Provision>>,
}

/// Pages that were read, each with the Lsn of its last change at that time. Changes of bytes, metadata and place count.
pub(super) type SourceVersions = Vec<(PageId, Lsn)>;

/// The outcome of an attempt to log a draft.
pub(super) enum Outcome {
    /// The draft is in the log, and was passed to the applier.
    Logged(LogPoint),
    /// Nothing is logged, because a page has changed since the draft was prepared. The committer must prepare the draft
    /// again.
    Stale(Draft),
    /// Nothing is logged, because the batch fails with this error.
    Refused(Error, Draft),
}

/// The position of an appended draft in the log, and the changes that it makes to the page table.
pub(super) type AppendResult = (LogPoint, Changes);

impl Draft {
    /// Creates a draft that needs only its payload. It becomes stale only if a page in `expected` changes.
    pub fn new(
        payload: GrownBytes,
        payload_crc: u32,
        purpose: SpacePurpose,
        expected: Vec<(PageId, Epoch)>,
    ) -> Self {
        let (staged, lens, disk_ops) = (SourceVersions::new(), Vec::new(), DiskOps::default());
        Self { payload, payload_crc, purpose, expected, staged, lens, disk_ops, provision: None }
    }

    /// Returns the memory for the batch's creates, resizes and moves, in order.
    fn memory(&self) -> impl Iterator<Item = &PageMemory> {
        self.provision.iter().flat_map(|provision| &provision.memory)
    }

    /// Returns the memory to which leased pages move.
    fn relocations(&self) -> &[(PageId, PageMemory)] {
        self.provision.as_ref().map_or(&[], |provision| &provision.relocations)
    }
}

impl Committer {
    /// Checks a draft against the current state, and appends it to the log. `ops` contains the operations of the
    /// payload.
    ///
    /// Returns `None` if the draft is stale. A draft is stale in two cases:
    ///
    /// - A page has changed since the draft copied its bytes.
    /// - The length or place of a page has changed since its bytes were written or its memory was allocated.
    ///
    /// Staleness is checked before preconditions and plan, because the errors of a stale draft would describe a past
    /// state.
    pub(super) fn append(
        &self,
        table: &PageTable,
        draft: &Draft,
        ops: &[OpAt<'_>],
    ) -> Result<Option<AppendResult>> {
        self.engine.poison.check()?;
        let location_of = |page| location_in(table, page);
        // Only leases that exist now need a relocation. A lease that is taken later shows the page after this batch.
        let has_relocation = |page: &PageId| {
            let is_relocation_of_page = |(moved, memory): &(PageId, PageMemory)| {
                moved == page && Some(location(memory)) == location_of(*page)
            };
            // A page on disk has no memory, so it cannot be leased.
            let is_on_disk = || location_of(*page).is_some_and(|(place, _)| place == Place::Disk);
            draft.relocations().iter().any(is_relocation_of_page) || is_on_disk()
        };
        if !self.engine.leases.leased(changed_in_place(ops)).iter().all(has_relocation) {
            return Ok(None);
        }
        // A kernel that reads this memory through a lease would otherwise read what its new owner writes.
        if let Some(handover) = draft.provision.as_ref().and_then(|provision| provision.handover.as_ref()) {
            self.engine.leases.check_unleased(handover.page)?;
            if location_of(handover.page).is_some_and(|(place, _)| place == Place::Disk) {
                let reason = "a page on disk has no memory to release: move it to memory first";
                return Err(Error::Unavailable(Unavailable::Place { place: Place::Disk, reason }));
            }
        }
        // A pinned page keeps its address, which callers use in captured graphs.
        self.engine
            .leases
            .check_unpinned(ops.iter().filter_map(|at| page_moved_away(&at.op, location_of)))?;
        // Changes of metadata and place count too, because a clone copies them.
        let lsn_of = |page| table.entry(page).map(|entry| entry.lsn);
        let len_of = |page| location_of(page).map(|(_, len)| len);
        // The copied bytes must be those of the current page version. Changes that this batch makes before the copy
        // were applied to the copied bytes after they were read.
        if draft.staged.iter().any(|(page, lsn)| lsn_of(*page) != Some(*lsn))
            || draft.lens.iter().any(|(page, len)| len_of(*page) != *len)
        {
            return Ok(None);
        }
        // Otherwise a page would get memory of another length or in another place than the table states (I10).
        if ops.iter().any(|at| moves_to_other_memory(&at.op))
            && !draft.memory().map(location).eq(required_memory(ops, table)?.iter().map(|made| made.at))
        {
            return Ok(None);
        }
        // Which bytes were staged and which images were written depends on which pages are on disk.
        if !self.disk_ops(ops, Some(table))?.is_same(&draft.disk_ops) {
            return Ok(None);
        }
        for &(page, expected) in &draft.expected {
            let found = table.entry(page).map_or(Epoch(0), |entry| entry.epoch);
            if found != expected {
                return Err(Error::Conflict { page, expected, found });
            }
        }
        // The plan checks all operations before the append: a frame in the log must be applicable, here and in
        // recovery.
        let lsn = table.lsn().next();
        let planned = table.plan(lsn, ops, PlanMode::Commit);
        let changes = planned.map_err(|(index, refusal)| refused(index, refusal))?;
        let point = self.engine.log.append(&draft.payload, draft.payload_crc, draft.purpose)?;
        self.engine.disk_pages.note(new_places(ops));
        assert!(point.lsn == lsn); // I1: the table and the log assign the same Lsn, and the Lsn has its frame.
        Ok(Some((point, changes)))
    }

    /// Installs an appended draft in the table and in the readers' versions, and passes it to the applier. Calls `then`
    /// before these steps.
    ///
    /// The caller must still hold the lock of the append, because the next draft is planned on this table.
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
        assert!(table.lsn() == point.lsn); // I1: the table is never above the end of the log.
        let Engine { versions, applier, .. } = &*self.engine;
        versions.install(&changes);
        then(point, &changes);
        let Draft { payload, provision, .. } = draft;
        // `push` makes the batch visible to lookups and to reads at the same time.
        let work = ApplyWork { point, payload, changes, provision };
        applier.push(work, || versions.show(point.lsn));
        Outcome::Logged(point)
    }

    /// Frees the resources of a draft that was not logged.
    pub(super) fn release_draft(&self, draft: Draft) {
        let Engine { staging, arena, .. } = &*self.engine;
        staging.put_grown(draft.payload);
        if let Some(provision) = draft.provision {
            provision.give_back(staging, arena);
        }
    }
}

/// Converts the reason why operation `index` cannot be applied to an error.
fn refused(index: usize, refusal: Refusal) -> Error {
    match refusal {
        Refusal::UnknownPage(page) => Error::UnknownPage { page },
        Refusal::OutOfBounds { page, offset, len, page_len } => {
            Error::OutOfBounds { page, offset, len, page_len }
        }
        Refusal::KeyTaken { key, holder } => Error::Taken(Taken::Key { key, holder }),
        Refusal::Limit { what, found, limit } => Error::Limit { what, found, limit },
        Refusal::Memory { needed } => Error::no_memory(needed),
        other => Error::Invalid(Invalid::Operation { index, reason: other.to_string() }),
    }
}
