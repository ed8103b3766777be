//! Commits and moves that wait for room where there are tiers.

use std::sync::Arc;

use remanent_format::{LogPoint, PageId, Place};

use super::keeper::TierKeeper;
use super::stats::TierCounts;
use crate::base::allocation::set_of;
use crate::base::sync::Instant;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::write::batch::WriteBatch;
use crate::write::commit::Committer;

/// How often a batch is tried for which room was made. Other threads may take the room each time.
const TRIES_MAX: usize = 100;

/// Submits batches, and moves pages to where they are needed.
pub(crate) struct PageMover {
    pub engine: Arc<Engine>,
    pub committer: Arc<Committer>,
    /// The thread that makes room, where there are tiers.
    pub keeper: Option<Arc<TierKeeper>>,
    /// The keeper's as well.
    pub counts: Arc<TierCounts>,
}

/// Pages that do not leave their place while others are brought there.
struct HeldPages<'m>(Option<&'m TierKeeper>, &'m [PageId]);

impl PageMover {
    /// Logs a batch, as [`Committer::submit`] does. Where a place of the tiers has no room for it, pages
    /// leave that place first.
    pub fn submit(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        let Some(keeper) = &self.keeper else { return self.committer.submit(batch) };
        let mut tries = 1;
        loop {
            match self.committer.submit(batch) {
                Err(Error::OverBudget { place, asked, .. })
                    if tries < TRIES_MAX && keeper.make_room(place, asked)? =>
                {
                    tries += 1;
                }
                submitted => {
                    keeper.look_after();
                    return submitted;
                }
            }
        }
    }

    /// Moves pages to a place, those that are not there, in one batch; `None` if all are.
    pub fn bring(&self, pages: &[PageId], place: Place) -> Result<Option<LogPoint>> {
        let begun = Instant::now();
        let _held = HeldPages::new(self.keeper.as_deref(), pages);
        let mut batch = WriteBatch::default();
        let mut coming = Vec::new();
        let mut hits = 0;
        for page in set_of(pages.iter().copied()) {
            let at = |seen: &crate::versions::SeenPage<'_>| (seen.place(), seen.len());
            let (from, len) = self.engine.versions.page(page, at).ok_or(Error::UnknownPage { page })?;
            if from == place {
                self.engine.versions.used(page);
                hits += 1;
            } else {
                // The policy of the place hears that it arrives, which is no use of it yet.
                batch.move_to(page, place);
                coming.push((from, len));
            }
        }
        self.counts.at(place, |counts| {
            counts.hits += hits;
            counts.misses += coming.len() as u64;
        });
        if coming.is_empty() {
            return Ok(None);
        }
        let (point, _) = self.submit(&batch)?;
        self.counts.moved(place, &coming, begun.elapsed());
        Ok(Some(point))
    }
}

impl<'m> HeldPages<'m> {
    fn new(keeper: Option<&'m TierKeeper>, pages: &'m [PageId]) -> Self {
        keeper.iter().for_each(|keeper| keeper.hold(pages));
        Self(keeper, pages)
    }
}

impl Drop for HeldPages<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|keeper| keeper.let_go(self.1));
    }
}
