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
        self.or_alone(self.submit_with_others(batch), || self.submit_with_others(batch))
    }

    /// Tries again what found no room, alone: pages that other calls bring do not leave meanwhile. Two calls
    /// that have room one after the other would refuse each other.
    fn or_alone<T>(&self, tried: Result<T>, again: impl FnOnce() -> Result<T>) -> Result<T> {
        match (&self.keeper, tried) {
            (Some(keeper), Err(Error::OverBudget { .. })) => {
                let _alone = keeper.bringing.write();
                again()
            }
            (_, tried) => tried,
        }
    }

    fn submit_with_others(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
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
        let tried = {
            let _with_others = self.keeper.as_ref().map(|keeper| keeper.bringing.read());
            self.bring_held(pages, place)
        };
        self.or_alone(tried, || self.bring_held(pages, place))
    }

    fn bring_held(&self, pages: &[PageId], place: Place) -> Result<Option<LogPoint>> {
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
        let point = match coming.is_empty() {
            true => None,
            false => Some(self.submit_with_others(&batch)?.0),
        };
        self.counts.at(place, |counts| {
            counts.hits += hits;
            counts.misses += coming.len() as u64;
        });
        if point.is_some() {
            self.counts.moved(place, &coming, begun.elapsed());
        }
        Ok(point)
    }

    /// As [`bring`](Self::bring), ahead of a caller: pages that are gone are taken out, and those that an
    /// open left on disk are loaded, before others.
    pub fn bring_existing(&self, pages: &mut Vec<PageId>, place: Place) -> Result<()> {
        loop {
            match self.bring(pages, place) {
                Ok(_) => return self.engine.applier.unloaded().wait(pages.iter().copied()),
                Err(Error::UnknownPage { page }) => pages.retain(|other| *other != page),
                Err(error) => return Err(error),
            }
        }
    }

    /// The length of a page in bytes; 0 of one that is not there.
    pub fn byte_len(&self, page: PageId) -> u64 {
        self.engine.versions.page(page, |seen| seen.len()).unwrap_or(0)
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
