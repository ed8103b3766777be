//! What applying a batch takes besides its payload, taken before the batch is logged.
//!
//! Memory that is refused must refuse the batch: once it is logged, it must be applied (I10). A batch that
//! fails here leaves nothing, and neither does a crash: memory is gone with the process, and the next open
//! removes images that no frame names.

use std::collections::BTreeMap;

use remanent_format::op::{Op, OpAt};
use remanent_format::{PageId, PageTable};

use super::disk_moves::DiskOps;
use super::draft::SourceVersions;
use super::fills::FillSources;
use super::page_memory::{changed_in_place, may_take_memory};
use super::{Committer, CommitterWork};
use crate::applier::{ArrivalSums, ListRoom, Provision, is_payload_enough, needs_aside, stage_aside};
use crate::base::allocation::{append, collected, map_of};
use crate::base::parallel;
use crate::engine::Engine;
use crate::error::Result;

/// Bytes beside the payload that are worth a thread of their own.
const SHARE_LEN: usize = 1 << 20;
/// Threads that write them.
const HOST_THREADS_MAX: usize = 8;

/// What a draft takes for the applier; none for a batch that only writes to pages in memory.
type DraftProvision = Option<Box<Provision>>;

impl Committer {
    /// Takes it. `None` if the draft is stale: a page changed meanwhile that it takes to disk, or came to
    /// memory. The versions of pages that are read without the lock are noted in `staged`.
    ///
    /// # Errors
    /// `OutOfMemory`, `OverBudget`, no space; those of the files that pages come from; a device error.
    pub(super) fn provide<'s>(
        &'s self,
        disk_ops: &DiskOps,
        staged: &mut SourceVersions,
        own: &mut CommitterWork<'_, 's>,
        ops: &[OpAt<'_>],
        locked: Option<&PageTable>,
    ) -> Result<Option<DraftProvision>> {
        let Engine { device, leases, arena, .. } = &*self.engine;
        // Handles that pages have left are dropped by this thread: their owners are callers' code.
        arena.drop_let_go();
        let handover = own.batch.handover();
        // Most batches change a few bytes of pages in memory: they take nothing.
        let is_plain = is_payload_enough(ops, device.crosses_bus())
            && disk_ops.is_empty()
            && handover.is_none()
            && leases.leased(changed_in_place(ops)).is_empty()
            && !ops.iter().any(|at| may_take_memory(&at.op));
        if is_plain {
            return Ok(Some(None));
        }
        let pending = self.claim_pending(disk_ops, ops, locked)?;
        let Some(going) = self.going_pages(disk_ops, ops, locked)? else { return Ok(None) };
        own.going = going;
        if !own.captured.suit(ops, disk_ops) {
            return Ok(None);
        }
        append(staged, own.going.versions.iter().copied())?;
        let to_disk = std::mem::take(&mut own.going.images);
        let mut provision = Provision { pending, to_disk, handover, ..Provision::default() };
        let provided = self.provide_memory(&mut provision, disk_ops, own, ops, locked);
        match provided.and_then(|read| append(staged, read)) {
            Ok(()) => Ok(Some(Some(Box::new(provision)))),
            Err(error) => {
                provision.give_back(&self.engine.staging, &self.engine.arena);
                Err(error)
            }
        }
    }

    /// Takes memory, of pages and of the applier's, and fills that of pages that come from elsewhere. Returns
    /// the versions of the pages that were read for it.
    fn provide_memory(
        &self,
        provision: &mut Provision,
        disk_ops: &DiskOps,
        own: &mut CommitterWork<'_, '_>,
        ops: &[OpAt<'_>],
        locked: Option<&PageTable>,
    ) -> Result<SourceVersions> {
        let Engine { staging, device, .. } = &*self.engine;
        let whole: BTreeMap<PageId, &[u8]> =
            map_of(own.whole.pages.iter().map(|whole| (whole.page, whole.bytes)));
        let made = self.allocate(provision, ops, own.lent, &mut own.whole.memory, locked)?;
        let from = FillSources { sources: own.sources, disk_ops };
        let versions = self.fill_memory(provision, &from, ops, &made)?;
        provision.room = ListRoom::of(ops)?;
        // Moves bring no bytes, and change none. They may be thousands.
        if ops.iter().all(|at| matches!(at.op, Op::Move { .. })) {
            return Ok(versions);
        }
        // What the applier finds in place, or reads from disk, it takes from nowhere else.
        let filled = &provision.filled;
        let is_there = |op: &Op<'_>| matches!(op, Op::Image { page, .. } if filled.has_image_of(*page));
        let is_taken = |index: usize, op: &Op<'_>| !disk_ops.has(index) && !is_there(op);
        let taken = || (0..).zip(ops).filter(|(index, at)| is_taken(*index, &at.op)).map(|(_, at)| &at.op);
        let aside = collected(taken().filter(|op| needs_aside(op)))?;
        let len: usize = aside.iter().map(|op| aside_len(op)).sum();
        let threads = parallel::threads(HOST_THREADS_MAX.min(1 + len / SHARE_LEN));
        let staged = parallel::map_indexed(
            threads,
            aside.len(),
            || (),
            |(), at| stage_aside(aside[at], &whole, staging),
        );
        let mut asides = Vec::new();
        append(&mut asides, staged?.into_iter().flatten())?;
        provision.asides = asides.into();
        if device.crosses_bus() {
            provision.sums = ArrivalSums::of(taken(), staging)?;
        }
        provision.relocations = self.relocations(ops, locked)?;
        Ok(versions)
    }
}

/// About how many bytes lie beside the payload for an operation.
fn aside_len(op: &Op<'_>) -> usize {
    match op {
        Op::Image { len, .. } => *len as usize,
        Op::Scatter { indices, values, .. } => 4 * indices.len() + values.len(),
        _ => 0,
    }
}
