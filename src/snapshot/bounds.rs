//! Determines the first and the last batch of a snapshot. Both are determined on the applier, between two batches.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::{Epoch, LogPoint, Lsn, Metadata, PageId};

use super::Snapshots;
use super::compact::CARRY_BYTES_MAX;
use crate::applier::{AppliedState, ExactCut, Turn};
use crate::catalog::{Beginning, Catalog, SnapshotWork};
use crate::device::CommandList;
use crate::error::{Error, Result};

/// The result of phase 1 ([`snapshot`](super)): the batch at which the snapshot begins, and the pages to write.
pub(super) struct SnapshotStart {
    pub redo: LogPoint,
    pub sorted: SnapshotWork,
    /// The end of an exact snapshot, which equals its beginning. `None` for a fuzzy snapshot.
    pub end: Option<End>,
}

/// The state at the end of a snapshot: the last batch, the root and the counters, without the pages.
pub(super) struct End {
    pub point: LogPoint,
    pub root: Arc<Metadata>,
    /// The next page id to assign. The value is stored because deleted pages are not in the table, and their ids must
    /// not be reused.
    pub next_page: u64,
    /// The highest epoch ever assigned, which a page created later must exceed.
    pub epoch_high: Epoch,
    /// The pages deleted since the snapshot began, each with the batch that deleted it.
    pub deleted: BTreeMap<PageId, Lsn>,
}

impl Snapshots {
    /// Performs phase 1. An exact snapshot classifies all pages at once, between two batches. A fuzzy snapshot
    /// classifies a limited number of pages at a time, because no batch can be applied during the classification.
    /// Classifying a million pages at once took most of 0.35 to 0.6 s.
    pub(super) fn begin(
        &self,
        catalog: &Catalog,
        wasteful: Vec<(u64, u64)>,
        exact: bool,
    ) -> Result<SnapshotStart> {
        let known = catalog.known.clone();
        if exact {
            return self.engine.applier.turn(move |turn| {
                let pages = beginning(turn)?;
                let table = &mut turn.applied.table;
                let classify = |pages: Vec<PageId>| {
                    let classes = known.classify(table, None, &pages);
                    || classes
                };
                let sorted = known.plan_work(pages, &wasteful, CARRY_BYTES_MAX, classify)?;
                // The pages are classified and the exact cut is created between the same two batches, so that both have
                // the same state.
                let end = Some(End::here(turn));
                turn.applied.cut = Some(ExactCut::new(sorted.gather.iter().map(|(page, _)| *page)));
                Ok(SnapshotStart { redo: turn.applied.point, sorted, end })
            });
        }
        // The applier records deletes from here on, where `redo` is determined. A page that was deleted unrecorded
        // after `redo` would be missing from the snapshot without a tombstone.
        let (redo, pages) = self.engine.applier.turn(|turn| {
            let pages = beginning(turn)?;
            turn.applied.deleted = Some(BTreeMap::new());
            Ok((turn.applied.point, pages))
        })?;
        let classify = |pages: Vec<PageId>| {
            let known = known.clone();
            self.engine.applier.queue_turn(move |turn| {
                let AppliedState { table, deleted, .. } = turn.applied;
                known.classify(table, deleted.as_ref(), &pages)
            })
        };
        match known.plan_work(pages, &wasteful, CARRY_BYTES_MAX, classify) {
            Ok(sorted) => Ok(SnapshotStart { redo, sorted, end: None }),
            Err(error) => {
                // Otherwise the applier would continue to record deletes for an abandoned snapshot.
                self.stop_watching()?;
                Err(error)
            }
        }
    }

    /// Performs phase 3: returns the last applied batch, with the root and the counters after that batch.
    pub(super) fn end(&self) -> Result<End> {
        self.engine.applier.turn(|turn| Ok(End::here(turn)))
    }

    /// Stops the applier from recording deleted pages for a snapshot.
    pub(super) fn stop_watching(&self) -> Result<()> {
        self.engine.applier.turn(|turn| {
            // The set of deleted pages would otherwise grow for as long as the store is open.
            turn.applied.deleted = None;
            if let Some(cut) = turn.applied.cut.take() {
                // Commands in flight may still read the memory of preserved pages. It is freed after these commands.
                let last_use = turn.submit(CommandList::default())?.fence();
                cut.retire(turn.arena, last_use);
            }
            Ok(())
        })
    }
}

impl End {
    /// Returns the current state. Must be called between two batches.
    pub(super) fn here(turn: &mut Turn<'_>) -> Self {
        let table = &turn.applied.table;
        Self {
            point: turn.applied.point,
            root: table.root().clone(),
            next_page: table.next_page(),
            epoch_high: table.epoch_high(),
            deleted: turn.applied.deleted.take().unwrap_or_default(),
        }
    }
}

/// Returns the pages that may differ from the newest snapshot, for a snapshot that begins between these two batches.
pub(super) fn beginning(turn: &mut Turn<'_>) -> Result<Beginning> {
    let table = &mut turn.applied.table;
    let changed = table.changed().map_err(Error::of_memory)?;
    Ok(Beginning { changed, count: table.pages().len() })
}
