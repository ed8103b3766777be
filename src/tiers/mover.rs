//! Commits and moves that wait for room where there are tiers.

use std::convert::Infallible;
use std::sync::Arc;

use remanent_format::{LogPoint, PageId, Place};

use super::keeper::TierKeeper;
use super::stats::TierCounts;
use crate::base::allocation::{collected, push, set_of};
use crate::base::parallel;
use crate::base::sync::Instant;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::write::batch::WriteBatch;
use crate::write::commit::Committer;

/// How often a batch is tried for which room was made. Other threads may take the room each time.
const TRIES_MAX: usize = 100;
/// Pages that one batch moves, and their bytes, where there is room for all of a call. A longer page moves
/// alone.
const BATCH_PAGES: usize = 4096;
const BATCH_BYTES: u64 = 256 << 20;
/// Threads that submit the batches of a call.
const MOVERS_MAX: usize = 4;

/// Submits batches, and moves pages to where they are needed.
pub(crate) struct PageMover {
    pub engine: Arc<Engine>,
    pub committer: Arc<Committer>,
    /// The thread that makes room, where there are tiers.
    pub keeper: Option<Arc<TierKeeper>>,
    /// The keeper's as well.
    pub counts: Arc<TierCounts>,
}

/// What a page that is in its place already says to the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hits {
    /// It is in use.
    Uses,
    /// Nothing: the same caller brought it just now.
    Arrivals,
}

/// Pages that do not leave their place while others are brought there.
struct HeldPages<'m>(Option<&'m TierKeeper>, &'m [PageId]);

impl PageMover {
    /// Logs a batch, as [`Committer::submit`] does. Where a place of the tiers has no room for it, pages
    /// leave that place first.
    pub fn submit(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        let submitted = self.submit_with_others(batch);
        let Some(keeper) = self.waits_for_others(&submitted) else { return submitted };
        // Not under the lock: sources of the batch are the caller's code, and may bring pages themselves.
        drop(keeper.bringing.write());
        self.submit_with_others(batch)
    }

    /// The keeper, if a call was refused room that pages can leave. Those that other calls bring do not leave
    /// meanwhile: two calls that have room one after the other would refuse each other.
    fn waits_for_others<T>(&self, tried: &Result<T>) -> Option<&TierKeeper> {
        let Err(Error::OverBudget { place, asked, .. }) = tried else { return None };
        self.keeper.as_deref().filter(|keeper| keeper.may_make_room(*place, *asked))
    }

    fn submit_with_others(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        let Some(keeper) = &self.keeper else { return self.committer.submit(batch) };
        let mut tries = 1;
        loop {
            match self.committer.submit(batch) {
                Err(Error::OverBudget { place, asked, .. })
                    if tries < TRIES_MAX
                        && (keeper.make_room(place, asked)?
                            || self.take_down(keeper, batch, place, asked)?) =>
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

    /// Takes pages down that the batch is to resize or clone, and that are in a place which can never have
    /// all that it asks for. A move of the store's own may have put them there: whether a batch fits must
    /// not depend on that. Returns whether any page went.
    fn take_down(&self, keeper: &TierKeeper, batch: &WriteBatch, place: Place, bytes: u64) -> Result<bool> {
        let Some(below) = keeper.place_below(place, bytes) else { return Ok(false) };
        let begun = Instant::now();
        let is_there = |page: PageId| {
            let at = self.engine.versions.page(page, |seen| (seen.place(), seen.len()));
            at.filter(|(at, _)| *at == place).map(|(_, len)| (page, place, len))
        };
        let going: Vec<_> = set_of(batch.pages_that_grow()).into_iter().filter_map(is_there).collect();
        match self.move_all(&going, below, begun) {
            // Another thread deleted one or leased it: the batch meets that itself.
            Err(Error::UnknownPage { .. } | Error::Leased { .. }) => Ok(true),
            moved => moved.map(|point| point.is_some()),
        }
    }

    /// Moves pages to a place, each from where it is, with its length. Returns the last batch that did so;
    /// `None` if there is no page.
    ///
    /// Many pages go by several batches, submitted side by side: while one is planned and copied, the next
    /// one is made ready. Where there is no room for all of them one batch asks for it, so that a call which
    /// cannot have it moves nothing, and calls of several threads do not take each other's room.
    fn move_all(
        &self,
        pages: &[(PageId, Place, u64)],
        to: Place,
        begun: Instant,
    ) -> Result<Option<LogPoint>> {
        if pages.is_empty() {
            return Ok(None);
        }
        let bytes = pages.iter().map(|(.., len)| len).sum::<u64>();
        let has_room = to == Place::Disk || self.engine.arena.room(to).free_soon() >= bytes;
        let batches = if has_room { batches(pages) } else { vec![pages] };
        let moved = parallel::map_indexed(
            parallel::threads(MOVERS_MAX),
            batches.len(),
            || (),
            |(), at| Ok::<_, Infallible>(self.move_batch(batches[at], to)),
        );
        let Ok(moved) = moved;
        let is_moved = batches.iter().zip(&moved).filter(|(_, moved)| moved.is_ok());
        let lens: Vec<_> =
            is_moved.flat_map(|(batch, _)| batch.iter().map(|(_, from, len)| (*from, *len))).collect();
        self.counts.moved(to, &lens, begun.elapsed());
        let points = moved.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(points.into_iter().max_by_key(|point| point.lsn))
    }

    fn move_batch(&self, pages: &[(PageId, Place, u64)], to: Place) -> Result<LogPoint> {
        let mut batch = WriteBatch::default();
        batch.move_all_to(pages.iter().map(|(page, ..)| *page), to);
        self.submit_with_others(&batch).map(|(point, _)| point)
    }

    /// Moves pages to a place, those that are not there. Returns the last batch that did so; `None` if all
    /// are.
    pub fn bring(&self, pages: &[PageId], place: Place) -> Result<Option<LogPoint>> {
        self.bring_by(pages, place, Hits::Uses)
    }

    fn bring_by(&self, pages: &[PageId], place: Place, hits: Hits) -> Result<Option<LogPoint>> {
        let tried = {
            let _with_others = self.keeper.as_ref().map(|keeper| keeper.bringing.read());
            self.bring_held(pages, place, hits)
        };
        let Some(keeper) = self.waits_for_others(&tried) else { return tried };
        let _alone = keeper.bringing.write();
        self.bring_held(pages, place, hits)
    }

    fn bring_held(&self, pages: &[PageId], place: Place, noted: Hits) -> Result<Option<LogPoint>> {
        let begun = Instant::now();
        let _held = HeldPages::new(self.keeper.as_deref(), pages);
        let mut coming = Vec::new();
        let mut hits = 0;
        let mut sorted = collected(pages.iter().copied())?;
        sorted.sort_unstable();
        sorted.dedup();
        let mut walk = self.engine.versions.walk();
        for page in sorted {
            let (from, len) =
                walk.page(page, |seen| (seen.place(), seen.len())).ok_or(Error::UnknownPage { page })?;
            if from == place {
                if noted == Hits::Uses {
                    self.engine.versions.used(page);
                    hits += 1;
                }
            } else {
                // The policy of the place hears that it arrives, which is no use of it yet.
                push(&mut coming, (page, from, len))?;
            }
        }
        let point = self.move_all(&coming, place, begun)?;
        self.counts.at(place, |counts| {
            counts.hits += hits;
            counts.misses += coming.len() as u64;
        });
        Ok(point)
    }

    /// As [`bring`](Self::bring), ahead of a caller: pages that are gone are taken out, and those that an
    /// open left on disk are loaded, before others.
    pub fn bring_existing(&self, pages: &mut Vec<PageId>, place: Place, hits: Hits) -> Result<()> {
        loop {
            match self.bring_by(pages, place, hits) {
                Ok(point) => {
                    // A direct log shows the pages in their place once it has the batch.
                    point.map_or(Ok(()), |point| self.engine.log.wait_logged(point.lsn))?;
                    return self.engine.applier.unloaded().wait(pages.iter().copied());
                }
                // All that are gone at once: there may be thousands.
                Err(Error::UnknownPage { page }) => pages
                    .retain(|other| *other != page && self.engine.versions.page(*other, |_| ()).is_some()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Has no page loaded any more that an open left on disk: the store closes.
    pub fn end_loads(&self) {
        self.engine.applier.unloaded().end(Error::Closed);
    }

    /// The length of a page in bytes; 0 of one that is not there.
    pub fn byte_len(&self, page: PageId) -> u64 {
        self.engine.versions.page(page, |seen| seen.len()).unwrap_or(0)
    }
}

/// The pages that one batch each moves.
fn batches(pages: &[(PageId, Place, u64)]) -> Vec<&[(PageId, Place, u64)]> {
    let (mut batches, mut rest) = (Vec::new(), pages);
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |(.., len): &&(PageId, Place, u64)| {
            bytes += len;
            bytes <= BATCH_BYTES
        };
        let (batch, after) = rest.split_at(rest.iter().take(BATCH_PAGES).take_while(fits).count().max(1));
        batches.push(batch);
        rest = after;
    }
    batches
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
