//! Submits batches and moves pages. If a place lacks free memory, waits until the [`keeper`](super::keeper) has evicted
//! pages from it.

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

/// The maximum number of attempts to submit a batch for which pages were evicted. Each time, other threads may use the
/// freed memory first.
const TRIES_MAX: usize = 100;
/// The maximum number of pages that one batch moves if there is room for all pages of a call.
const BATCH_PAGES: usize = 4096;
/// The maximum number of bytes that one batch moves if there is room for all pages of a call. A longer page is moved
/// alone.
const BATCH_BYTES: u64 = 256 << 20;
/// The maximum number of threads that concurrently submit the batches of one call.
const MOVERS_MAX: usize = 4;

/// Submits batches, and moves pages to the places that callers request.
pub(crate) struct PageMover {
    pub engine: Arc<Engine>,
    pub committer: Arc<Committer>,
    /// The keeper that evicts pages to make room, or `None` if the store has no tiers.
    pub keeper: Option<Arc<TierKeeper>>,
    /// The statistics, shared with the keeper.
    pub counts: Arc<TierCounts>,
}

/// The report to the eviction policy about a requested page that is already in the requested place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hits {
    /// The page is reported as used.
    Uses,
    /// The page is not reported, because the same caller has just moved the page to this place.
    Arrivals,
}

/// A guard that prevents the eviction of pages while a call moves other pages to the same place.
struct HeldPages<'m>(Option<&'m TierKeeper>, &'m [PageId]);

impl PageMover {
    /// Logs a batch, like [`Committer::submit`]. If a place of the tiers has no room for the batch, pages are evicted
    /// from that place first.
    pub fn submit(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        let submitted = self.submit_with_others(batch);
        let Some(keeper) = self.waits_for_others(&submitted) else { return submitted };
        // The lock is released before the submission. The batch may read from a caller's source, whose code may itself
        // move pages and acquire this lock.
        drop(keeper.moves_in_progress.write());
        self.submit_with_others(batch)
    }

    /// Returns the keeper if `tried` failed for lack of memory that evictions could free. The caller must then try
    /// again while no other call moves pages. Pages in use by other calls cannot be evicted, so concurrent calls may
    /// make each other fail although there is enough memory for each call alone.
    fn waits_for_others<T>(&self, tried: &Result<T>) -> Option<&TierKeeper> {
        let Err(Error::OverBudget { place, requested, .. }) = tried else { return None };
        self.keeper.as_deref().filter(|keeper| keeper.may_make_room(*place, *requested))
    }

    fn submit_with_others(&self, batch: &WriteBatch) -> Result<(LogPoint, Vec<PageId>)> {
        let Some(keeper) = &self.keeper else { return self.committer.submit(batch) };
        let mut tries = 1;
        loop {
            match self.committer.submit(batch) {
                Err(Error::OverBudget { place, requested, .. })
                    if tries < TRIES_MAX
                        && (keeper.make_room(place, requested)?
                            || self.demote_for(keeper, batch, place, requested)?) =>
                {
                    tries += 1;
                }
                submitted => {
                    keeper.wake_if_short();
                    return submitted;
                }
            }
        }
    }

    /// Demotes the pages that the batch resizes or clones, if the batch needs more room in their place than the budget
    /// of that place. The store may have promoted these pages earlier, and such a promotion must not determine whether
    /// a batch fits. Returns whether any page was demoted.
    fn demote_for(&self, keeper: &TierKeeper, batch: &WriteBatch, place: Place, bytes: u64) -> Result<bool> {
        let Some(below) = keeper.place_below(place, bytes) else { return Ok(false) };
        let begun = Instant::now();
        let is_there = |page: PageId| {
            let at = self.engine.versions.page(page, |seen| (seen.place(), seen.len()));
            at.filter(|(at, _)| *at == place).map(|(_, len)| (page, place, len))
        };
        let going: Vec<_> = set_of(batch.pages_that_grow()).into_iter().filter_map(is_there).collect();
        match self.move_all(&going, below, begun) {
            // Another thread has deleted or leased one of the pages. If that matters to the batch, its submission
            // returns the error.
            Err(Error::UnknownPage { .. } | Error::Leased { .. }) => Ok(true),
            moved => moved.map(|point| point.is_some()),
        }
    }

    /// Moves pages to a place, given the current place and the length of each page. Returns the position of the last
    /// batch that moved pages, or `None` if there are no pages.
    ///
    /// Many pages are moved by several batches that are submitted concurrently: while one batch is planned and copied,
    /// the next batch is prepared. If the place lacks free memory for all pages, a single batch requests it. Thus a
    /// call that cannot get enough memory moves nothing, and concurrent calls do not take memory from each other.
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

    /// Moves the pages that are not yet in `place` to it. Returns the position of the last batch that moved pages, or
    /// `None` if all pages are already in `place`.
    pub fn move_to_place(&self, pages: &[PageId], place: Place) -> Result<Option<LogPoint>> {
        self.move_counting(pages, place, Hits::Uses)
    }

    fn move_counting(&self, pages: &[PageId], place: Place, hits: Hits) -> Result<Option<LogPoint>> {
        let tried = {
            let _with_others = self.keeper.as_ref().map(|keeper| keeper.moves_in_progress.read());
            self.move_held(pages, place, hits)
        };
        let Some(keeper) = self.waits_for_others(&tried) else { return tried };
        let _alone = keeper.moves_in_progress.write();
        self.move_held(pages, place, hits)
    }

    fn move_held(&self, pages: &[PageId], place: Place, noted: Hits) -> Result<Option<LogPoint>> {
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
                // The eviction policy is notified when the page arrives, so the page is not reported as used here.
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

    /// Moves pages to a place before a caller needs them, like [`move_to_place`](Self::move_to_place). Removes deleted
    /// pages from `pages`. Pages that are not loaded yet are loaded first.
    pub fn move_existing(&self, pages: &mut Vec<PageId>, place: Place, hits: Hits) -> Result<()> {
        loop {
            match self.move_counting(pages, place, hits) {
                Ok(point) => {
                    // With a direct log, lookups return the new place only after the batch is logged.
                    point.map_or(Ok(()), |point| self.engine.log.wait_logged(point.lsn))?;
                    return self.engine.applier.unloaded().wait(pages.iter().copied());
                }
                // All deleted pages are removed in one pass, because there may be thousands.
                Err(Error::UnknownPage { page }) => pages
                    .retain(|other| *other != page && self.engine.versions.page(*other, |_| ()).is_some()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Stops loading pages that are not loaded yet, because the store closes.
    pub fn end_loads(&self) {
        self.engine.applier.unloaded().end(Error::Closed);
    }

    /// Returns the length of a page in bytes, or 0 if the page does not exist.
    pub fn byte_len(&self, page: PageId) -> u64 {
        self.engine.versions.page(page, |seen| seen.len()).unwrap_or(0)
    }
}

/// Divides pages into batches of at most `BATCH_PAGES` pages and `BATCH_BYTES` bytes.
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
        self.0.iter().for_each(|keeper| keeper.release(self.1));
    }
}
