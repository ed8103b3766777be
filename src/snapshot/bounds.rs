//! Where a snapshot begins and ends: turns of the applier between two batches.
//!
//! Nothing is written here, so a crash loses nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::{Epoch, LogPoint, Lsn, Metadata, PageId};

use super::Snapshots;
use super::compact::CARRY_BYTES_MAX;
use crate::applier::{AppliedState, ExactCut, Turn};
use crate::catalog::{Beginning, Catalog, SnapshotWork};
use crate::device::CommandList;
use crate::error::{Error, Result};

/// The outcome of phase 1: where the snapshot begins, and what it has to do.
pub(super) struct SnapshotStart {
    pub redo: LogPoint,
    pub sorted: SnapshotWork,
    /// The end of an exact snapshot, which ends where it begins.
    pub end: Option<End>,
}

/// The state at a snapshot's end: all of it but the pages.
pub(super) struct End {
    pub point: LogPoint,
    pub root: Arc<Metadata>,
    /// The next page id: ids of deleted pages are not in the table, and must not come again.
    pub next_page: u64,
    /// The highest epoch ever given: a page that is made later must not repeat one.
    pub epoch_high: Epoch,
    /// The pages that were deleted since the snapshot began, each with its batch.
    pub deleted: BTreeMap<PageId, Lsn>,
}

impl Snapshots {
    /// Phase 1. An exact snapshot looks at all its pages in one turn, any other at some of them in each turn:
    /// a turn is a time in which no batch is applied, and going through a million pages took most of 0.35 to
    /// 0.6 s.
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
                let look = |pages: Vec<PageId>| {
                    let standings = known.look(table, None, &pages);
                    || standings
                };
                let sorted = known.sort_out(pages, &wasteful, CARRY_BYTES_MAX, look)?;
                // All in one turn: no batch is applied between the look at the pages and the cut that
                // keeps them.
                let end = Some(End::here(turn));
                turn.applied.cut = Some(ExactCut::new(sorted.gather.iter().map(|(page, _)| *page)));
                Ok(SnapshotStart { redo: turn.applied.point, sorted, end })
            });
        }
        // Deletes are noted from `redo` on, in the same turn: a delete in between would be noted nowhere,
        // and the gathering would miss a page of which nothing says that it is gone.
        let (redo, pages) = self.engine.applier.turn(|turn| {
            let pages = beginning(turn)?;
            turn.applied.deleted = Some(BTreeMap::new());
            Ok((turn.applied.point, pages))
        })?;
        let look = |pages: Vec<PageId>| {
            let known = known.clone();
            self.engine.applier.queue_turn(move |turn| {
                let AppliedState { table, deleted, .. } = turn.applied;
                known.look(table, deleted.as_ref(), &pages)
            })
        };
        match known.sort_out(pages, &wasteful, CARRY_BYTES_MAX, look) {
            Ok(sorted) => Ok(SnapshotStart { redo, sorted, end: None }),
            Err(error) => {
                // The applier notes deletes for a snapshot that does not come.
                self.stop_watching()?;
                Err(error)
            }
        }
    }

    /// Phase 3: the last batch applied, with the root and the numbers of that moment.
    pub(super) fn end(&self) -> Result<End> {
        self.engine.applier.turn(|turn| Ok(End::here(turn)))
    }

    /// Ends what the applier does for a snapshot between its begin and its end.
    pub(super) fn stop_watching(&self) -> Result<()> {
        self.engine.applier.turn(|turn| {
            // Nothing notes deletes any more: the table of them would grow as long as the store is open.
            turn.applied.deleted = None;
            if let Some(cut) = turn.applied.cut.take() {
                // Copies to pages kept aside may be in flight: their memory goes after them in the lane.
                let last_use = turn.submit(CommandList::default())?.fence();
                cut.retire(turn.arena, last_use);
            }
            Ok(())
        })
    }
}

impl End {
    /// Takes the state at the moment of a turn, between two batches.
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

/// The pages that a snapshot begins with, at the moment of a turn.
pub(super) fn beginning(turn: &mut Turn<'_>) -> Result<Beginning> {
    let table = &mut turn.applied.table;
    let changed = table.changed().map_err(Error::of_memory)?;
    Ok(Beginning { changed, count: table.pages().len() })
}
