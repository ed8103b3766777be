//! Acquires the memory and the images that the applier needs for a batch, in addition to the payload, before the batch
//! is logged.
//!
//! A batch for which memory is unavailable must fail before it is logged, because a logged batch must be applied (I10).
//! Such a batch leaves no state behind. Neither does a crash: memory ends with the process, and the next open removes
//! images that no frame names.

use std::collections::BTreeMap;

use remanent_format::op::{Op, OpAt};
use remanent_format::{PageId, PageTable};

use super::Committer;
use super::disk_moves::DiskOps;
use super::draft::SourceVersions;
use super::fills::FillSources;
use super::page_memory::{changed_in_place, may_take_memory};
use super::prepared::PreparedBatch;
use crate::applier::{ArrivalSums, ListRoom, Provision, is_payload_enough, needs_aside, stage_aside};
use crate::base::allocation::{append, collected, map_of};
use crate::base::parallel;
use crate::engine::Engine;
use crate::error::Result;

/// The number of bytes outside the payload that one thread copies.
const SHARE_LEN: usize = 1 << 20;
/// The maximum number of threads that write bytes outside the payload.
const HOST_THREADS_MAX: usize = 8;

/// The resources of a draft in addition to its payload, or `None` for a batch that only changes bytes of pages in
/// memory.
type DraftProvision = Option<Box<Provision>>;

impl Committer {
    /// Acquires the resources of a draft. Adds the versions of pages that were read without the lock to `staged`.
    ///
    /// Returns `None` if the draft is stale: a page that the batch moves to disk has changed, or a page with a captured
    /// image has moved to memory.
    ///
    /// # Errors
    /// `OutOfMemory`, `OverBudget`, `DiskFull`; errors of the files that pages are read from; a device error.
    pub(super) fn provide<'s>(
        &'s self,
        disk_ops: &DiskOps,
        staged: &mut SourceVersions,
        prepared: Option<&mut PreparedBatch<'s>>,
        ops: &[OpAt<'_>],
        locked: Option<&PageTable>,
    ) -> Result<Option<DraftProvision>> {
        let Engine { device, leases, arena, .. } = &*self.engine;
        // Frees memory that pages have left. This runs here and not on the applier, because dropping a handle to
        // caller-owned memory may run the caller's code.
        arena.drop_released();
        let handover = prepared.as_ref().and_then(|prepared| prepared.handover.clone());
        // Most batches change a few bytes of pages in memory, and need no other resources.
        let is_plain = is_payload_enough(ops, device.crosses_bus())
            && disk_ops.is_empty()
            && handover.is_none()
            && leases.leased(changed_in_place(ops)).is_empty()
            && !ops.iter().any(|at| may_take_memory(&at.op));
        if is_plain {
            return Ok(Some(None));
        }
        let mut none = PreparedBatch::none(self);
        let own = prepared.unwrap_or(&mut none);
        let pending = self.claim_pending(disk_ops, ops, locked)?;
        let Some(demoted) = self.demoted_pages(disk_ops, ops, locked)? else { return Ok(None) };
        own.demoted = demoted;
        if !own.captured.are_on_disk(ops, disk_ops) {
            return Ok(None);
        }
        append(staged, own.demoted.versions.iter().copied())?;
        let to_disk = std::mem::take(&mut own.demoted.images);
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

    /// Allocates page memory and staging memory for the applier. Fills the memory of pages that are read from sources
    /// or from disk, and returns the versions of the pages that were read.
    fn provide_memory(
        &self,
        provision: &mut Provision,
        disk_ops: &DiskOps,
        own: &mut PreparedBatch<'_>,
        ops: &[OpAt<'_>],
        locked: Option<&PageTable>,
    ) -> Result<SourceVersions> {
        let Engine { staging, device, .. } = &*self.engine;
        let whole: BTreeMap<PageId, &[u8]> =
            map_of(own.whole.pages.iter().map(|whole| (whole.page, whole.bytes)));
        let made = self.allocate(provision, ops, &own.lent, &mut own.whole.memory, locked)?;
        let from = FillSources { sources: &own.sources, disk_ops };
        let versions = self.fill_memory(provision, &from, ops, &made)?;
        provision.room = ListRoom::of(ops)?;
        // A batch that only moves pages needs no staging memory. It may contain thousands of moves, so the search below
        // is skipped.
        if ops.iter().all(|at| matches!(at.op, Op::Move { .. })) {
            return Ok(versions);
        }
        // If the bytes of an operation are already in page memory, or its page is on disk, the operation needs no
        // staging memory.
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

/// Estimates the number of bytes that an operation needs in staging buffers outside the payload.
fn aside_len(op: &Op<'_>) -> usize {
    match op {
        Op::Image { len, .. } => *len as usize,
        Op::Scatter { indices, values, .. } => 4 * indices.len() + values.len(),
        _ => 0,
    }
}
