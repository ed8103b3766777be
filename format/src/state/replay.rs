//! Replay, which computes the final page table from a snapshot and the log after the snapshot. The bytes of the pages
//! are not read.
//!
//! The pages of a snapshot are captured at different Lsns. Replay therefore skips operations that an image includes. It
//! also skips operations on pages that were deleted before they were captured, which tombstones record. An operation on
//! any other unknown page is damage (SPEC R2). The table is computed before pages are loaded, so that budgets can be
//! checked and memory is allocated for the final length of each page (I10).

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use crate::defect::Defect;
use crate::ids::{Lsn, PageId};
use crate::manifest::{Manifest, ManifestEntry, SingleThread, WorkPool};
use crate::op::{Op, OpAt};
use crate::state::bases::{Base, Bases};
use crate::state::page_changes::PageChanges;
use crate::state::table::{PageInfo, PageTable, PlanMode};

/// Computes a page table and the bases of its pages from batches, which the caller passes in the order of the log.
#[derive(Clone, Debug)]
pub struct Resolver {
    table: PageTable,
    bases: Bases,
    tombstones: HashMap<PageId, Lsn>,
    /// Lsn up to which the root of the snapshot includes all changes.
    root_lsn: Lsn,
    /// Lsn of the batch that replay must reach, so that all pages represent the same Lsn.
    end: Lsn,
    /// Highest Lsn that a captured page may include. Every later batch applies to all pages.
    caught_newest: Lsn,
}

/// A computed state: the page table, and the base of each page. The bytes of the pages are not read.
#[derive(Clone, Debug)]
pub struct ResolvedState {
    /// The descriptions of the pages, the root, and the counters that never decrease.
    pub table: PageTable,
    /// The base of each page in the table.
    pub bases: Bases,
}

impl ResolvedState {
    /// Returns the final length in bytes of a page that has a base.
    pub(crate) fn final_len(&self, page: PageId) -> u64 {
        self.table.get(page).expect("every base is a page's").len
    }

    /// Returns true if the operations of batch `lsn` must be applied to the bytes of `page`.
    #[must_use]
    pub fn applies(&self, page: PageId, lsn: Lsn) -> bool {
        self.bases.get(page).is_some_and(|base| lsn > base.lsn)
    }
}

impl Default for Resolver {
    fn default() -> Self {
        Self {
            table: PageTable::new(),
            bases: Bases::default(),
            tombstones: HashMap::new(),
            root_lsn: Lsn(0),
            end: Lsn(0),
            caught_newest: Lsn(0),
        }
    }
}

impl Resolver {
    /// Starts replay from the empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts replay from a snapshot. The manifest must name all pages.
    #[must_use]
    pub fn from_manifest(manifest: &Arc<Manifest>) -> Self {
        Self::from_manifest_by(manifest, &SingleThread)
    }

    /// Starts replay from a snapshot as [`Resolver::from_manifest`] does. The threads of a pool share the work.
    #[must_use]
    pub fn from_manifest_by(manifest: &Arc<Manifest>, threads: &impl WorkPool) -> Self {
        Self {
            table: table_of(manifest, threads),
            bases: Bases::of_snapshot(manifest.clone()),
            tombstones: manifest.tombstones.iter().map(|tombstone| (tombstone.page, tombstone.lsn)).collect(),
            root_lsn: manifest.end,
            end: manifest.end,
            caught_newest: manifest.end,
        }
    }

    /// Applies a batch to the page table and the bases.
    ///
    /// # Errors
    /// Returns [`Defect::Batch`] if the batch cannot be applied to the current state, or [`Defect::Memory`] if there is
    /// not enough memory.
    pub fn batch(&mut self, lsn: Lsn, ops: &[OpAt<'_>]) -> Result<(), Defect> {
        if self.is_news(lsn)
            && let Some(changed) = self.table.change_bytes(lsn, ops)
        {
            return changed.map_err(Defect::from);
        }
        let is_news = |at: &&OpAt<'_>| match at.op.page() {
            Some(page) => {
                let caught = self.table.get(page).is_some_and(|info| info.lsn >= lsn);
                !caught && self.tombstones.get(&page).is_none_or(|deleted| *deleted < lsn)
            }
            None => lsn > self.root_lsn,
        };
        let news = ops.iter().filter(is_news);
        let changes =
            self.table.plan(lsn, news, PlanMode::Replay).map_err(|(_, refusal)| Defect::from(refusal))?;
        // Most operations only change bytes and create no base. Select the others here, so that `is_news` is called
        // only for them.
        let makes_base = |at: &&OpAt<'_>| {
            matches!(at.op, Op::Create { .. } | Op::Resize { .. } | Op::Image { .. } | Op::Delete { .. })
        };
        for OpAt { op, .. } in ops.iter().filter(makes_base).filter(is_news) {
            match op {
                // The base precedes the create, so that the create and all other operations of the batch are applied.
                Op::Create { page, len, .. } => {
                    let before = Lsn(lsn.0 - 1);
                    let (image, resized) = (None, false);
                    self.bases.insert(*page, Base { image, len: *len, lsn: before, resized });
                }
                Op::Resize { page, .. } => {
                    if let Some(base) = self.bases.get(*page) {
                        self.bases.insert(*page, Base { resized: true, ..base });
                    }
                }
                // The image includes this batch. Later batches are applied.
                Op::Image { page, len, image } => {
                    let (image, resized) = (Some(*image), false);
                    self.bases.insert(*page, Base { image, len: *len, lsn, resized });
                }
                Op::Delete { page } => {
                    self.bases.remove(*page);
                }
                _ => {}
            }
        }
        self.table.install(&changes);
        Ok(())
    }

    /// Returns true if no captured page can include batch `lsn` or a later one.
    fn is_news(&self, lsn: Lsn) -> bool {
        lsn > self.caught_newest
    }

    /// Applies the batches that a summary describes. The result is the same as that of calling [`batch`](Self::batch)
    /// for each batch. Returns `false`, with no batch applied, if a captured page may include one of the batches, or if
    /// a batch cannot be applied.
    pub fn page_changes(&mut self, changes: &PageChanges) -> bool {
        self.is_news(changes.first) && self.table.change_pages(changes)
    }

    /// Replaces the pages and the root with the table that the restore in batch `lsn` names. The caller must have read
    /// and checked the table. The table contains the complete state, because no snapshot spans a restore.
    ///
    /// # Errors
    /// Returns [`Defect::Mismatch`] if the table belongs to another batch. Returns [`Defect::Batch`] if replay started
    /// from a snapshot that ends at or after this batch.
    pub fn restore(&mut self, lsn: Lsn, table: Manifest) -> Result<(), Defect> {
        table.check_restored(lsn)?;
        if lsn <= self.end {
            return Err(Defect::Batch(format!(
                "a restore lies within the snapshot that ends at {}",
                self.end
            )));
        }
        self.table.replace(lsn, table.entries.iter().map(page_info), table.root.clone());
        self.caught_newest = self.caught_newest.max(table.end);
        self.bases = Bases::of_restore(lsn, Arc::new(table));
        Ok(())
    }

    /// Returns true if the operations of batch `lsn` must be applied to the bytes of `page`. The caller must have
    /// passed the batch to [`batch`](Self::batch) before.
    #[must_use]
    pub fn applies(&self, page: PageId, lsn: Lsn) -> bool {
        self.bases.get(page).is_some_and(|base| lsn > base.lsn)
    }

    /// Returns the Lsn of the last batch that was applied.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.table.lsn()
    }

    /// Returns the bases of all pages, as of the last batch that was applied.
    #[must_use]
    pub fn bases(&self) -> &Bases {
        &self.bases
    }

    /// Returns the final state. Checks that replay has reached the end of the snapshot (SPEC R3).
    ///
    /// # Errors
    /// Returns [`Defect::Mismatch`] if replay has not reached the end, or [`Defect::Batch`] if two pages have the same
    /// key.
    pub fn finish(mut self) -> Result<ResolvedState, Defect> {
        if self.table.lsn() < self.end {
            return Err(Defect::Mismatch {
                what: "end of the log",
                found: self.table.lsn().0,
                expected: self.end.0,
            });
        }
        self.table.index_keys()?;
        Ok(ResolvedState { table: self.table, bases: self.bases })
    }
}

fn table_of(manifest: &Manifest, threads: &impl WorkPool) -> PageTable {
    let Manifest { entries, root, next_page, epoch_high, redo, .. } = manifest;
    let of = |entries: &[ManifestEntry]| {
        PageTable::from_parts(entries.iter().map(page_info), root.clone(), *next_page, *epoch_high, redo.lsn)
    };
    let pieces = entries.chunks(threads.pieces_len()).collect();
    let Ok(tables) = threads.map_pieces(pieces, |entries| Ok::<_, Infallible>(of(entries)));
    tables.into_iter().reduce(PageTable::joined).unwrap_or_else(|| of(&[]))
}

/// Converts an entry of a manifest to the description of a page.
#[must_use]
pub fn page_info(entry: &ManifestEntry) -> PageInfo {
    PageInfo {
        page: entry.page,
        key: entry.key.clone(),
        len: entry.len,
        epoch: entry.epoch,
        lsn: entry.lsn,
        place: entry.place,
        metadata: entry.metadata.clone(),
    }
}
