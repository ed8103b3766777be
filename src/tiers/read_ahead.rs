//! Read-ahead: moves the pages of a caller's next steps while the caller uses the pages of the current step.
//!
//! The number of steps in flight is computed from two measured times: the time that the pages of a step take to arrive,
//! and the time that the caller takes between two steps. A fixed number would be too small for pages on disk. For pages
//! in memory, a fixed number would evict other pages unnecessarily.

use std::collections::VecDeque;
use std::time::Duration;

use remanent_format::{PageId, Place};

use super::keeper::TierKeeper;
use super::mover::{Hits, PageMover};
use super::prefetch::{Prefetch, PrefetchThread};
use crate::base::process::Process;
use crate::base::sync::Instant;
use crate::error::{Error, Result};

/// The maximum number of steps in flight.
const STEPS_MAX: usize = 64;
/// The divisor of a place's budget that limits the total bytes of steps in flight.
const BUDGET_PART: u64 = 4;

/// A sequence of steps of a caller, created by [`Store::read_ahead`](crate::Store::read_ahead). Each step uses some
/// pages, such as a layer of a model or a request in a queue. The pages of the next steps are moved to a place in
/// advance. The pages of the current step and of the steps in flight are evicted only if the place cannot get enough
/// memory from other pages. To be sure that a page stays in its place, lease it.
///
/// ```
/// use remanent::{Place, Store};
/// let store = Store::temporary()?;
/// let mut batch = store.batch();
/// for layer in 0..8 {
///     batch.create_from([layer; 4096], Place::Disk);
/// }
/// let layers = store.commit(batch)?.pages;
///
/// let mut ahead = store.read_ahead(Place::Host)?;
/// let mut steps = layers.iter();
/// let mut used = 0;
/// loop {
///     while ahead.wants_more()
///         && let Some(layer) = steps.next()
///     {
///         ahead.push(&[*layer])?;
///     }
///     let Some(pages) = ahead.next_step()? else { break };
///     assert_eq!(store.page(pages[0])?.place, Place::Host);
///     used += pages.len();
/// }
/// assert_eq!(used, 8);
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct ReadAhead<'s> {
    mover: &'s PageMover,
    prefetcher: &'s PrefetchThread,
    place: Place,
    upcoming: VecDeque<Step>,
    /// The pages of the current step, which the caller uses.
    current: Vec<PageId>,
    /// The total length in bytes of the steps in flight.
    bytes: u64,
    /// The budget of the place in bytes.
    budget: u64,
    pace: Pace,
    /// The time at which the caller received its previous step.
    given: Option<Instant>,
    opener: Process,
}

struct Step {
    pages: Vec<PageId>,
    bytes: u64,
    prefetch: Prefetch,
}

impl<'s> ReadAhead<'s> {
    pub(crate) fn new(mover: &'s PageMover, prefetcher: &'s PrefetchThread, place: Place) -> Self {
        // The budget of [`Place::Disk`] limits only the memory for pending writes, which moving a page to disk does not
        // need.
        let budget = if place == Place::Disk { u64::MAX } else { mover.engine.arena.budget(place) };
        Self {
            mover,
            prefetcher,
            place,
            upcoming: VecDeque::new(),
            current: Vec::new(),
            bytes: 0,
            budget,
            pace: Pace::default(),
            given: None,
            opener: Process::current(),
        }
    }

    /// Returns whether another step should be pushed now. Call this method again after each [`push`](Self::push).
    ///
    /// While one step is in use, another is in flight. If pages take longer to arrive than the caller takes for a step,
    /// several steps are in flight, up to 64 steps and a quarter of the place's budget. After a step of more than half
    /// of the budget, the method returns `false`.
    #[must_use]
    pub fn wants_more(&self) -> bool {
        // The first step is the one that the caller uses next. Only the steps after it count as prefetched.
        let Some(first) = self.upcoming.front() else { return true };
        let behind = self.bytes - first.bytes;
        self.upcoming.len() <= self.pace.distance()
            && (behind == 0 || behind < self.budget / BUDGET_PART)
            && self.bytes <= self.budget / 2
    }

    /// Returns the number of steps in flight.
    #[must_use]
    pub fn steps_in_flight(&self) -> usize {
        self.upcoming.len()
    }

    /// Appends a step, starts moving its pages, and returns immediately.
    ///
    /// # Errors
    /// The errors of [`Store::prefetch`](crate::Store::prefetch); the step is then not added.
    pub fn push(&mut self, pages: &[PageId]) -> Result<()> {
        self.opener.check()?;
        let prefetch = self.in_store(self.prefetcher.prefetch(pages, self.place))?;
        let bytes = pages.iter().map(|page| self.mover.byte_len(*page)).fold(0, u64::saturating_add);
        self.keeper().iter().for_each(|keeper| keeper.keep(pages));
        self.bytes = self.bytes.saturating_add(bytes);
        self.upcoming.push_back(Step { pages: pages.to_vec(), bytes, prefetch });
        Ok(())
    }

    /// Waits until the pages of the first step have arrived, and returns them. Returns `None` if there are no steps.
    /// This call itself moves pages that have not begun to move. Pages that were deleted in the meantime are omitted.
    ///
    /// # Errors
    /// [`Error::Forked`]; the errors of [`Store::ensure`](crate::Store::ensure), after which the step is lost.
    /// [`Error::Damaged`] if a page that is loaded on demand cannot be read.
    pub fn next_step(&mut self) -> Result<Option<Vec<PageId>>> {
        self.opener.check()?;
        let called = Instant::now();
        let previous = std::mem::take(&mut self.current);
        self.keeper().iter().for_each(|keeper| keeper.unkeep(&previous));
        let Some(Step { mut pages, bytes, prefetch }) = self.upcoming.pop_front() else { return Ok(None) };
        self.bytes -= bytes;
        self.current.clone_from(&pages);
        if let Some(given) = self.given {
            self.pace.interval.note(called - given);
        }
        prefetch.cancel()?;
        let moving = prefetch.moving_since()?;
        // Pages that a prefetch moved for this step do not count as hits.
        let hits = if moving.is_some() { Hits::Arrivals } else { Hits::Uses };
        // If a prefetch has failed, this call either returns the same error, or succeeds because the cause no longer
        // exists.
        let there = self.mover.move_existing(&mut pages, self.place, hits);
        let now = Instant::now();
        self.given = Some(now);
        self.in_store(there)?;
        let begun = moving.map_or(called, |(begun, _)| begun);
        // If all pages were prefetched, they arrived before this call.
        let ended = moving.and_then(|(_, ended)| ended).unwrap_or(now);
        self.pace.latency.note(ended - begun);
        Ok(Some(pages))
    }

    /// Returns the keeper that protects the pages of the steps from eviction, if the store has tiers.
    fn keeper(&self) -> Option<&TierKeeper> {
        self.mover.keeper.as_deref()
    }

    fn in_store<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error: Error| error.in_store(&self.mover.engine.disk.label()))
    }
}

impl Drop for ReadAhead<'_> {
    /// Cancels all moves that have not begun.
    fn drop(&mut self) {
        // All moves are canceled before the first wait. Otherwise the moves of the next step would begin during the
        // wait. In a forked child, there is nothing to cancel.
        let given_up = self.upcoming.iter().try_for_each(|step| step.prefetch.give_up());
        let ended = given_up.and_then(|()| self.upcoming.iter().try_for_each(|step| step.prefetch.cancel()));
        debug_assert!(ended.is_ok() || !self.opener.is_current());
        // In a forked child, another thread may have held the keeper's lock, and nothing is evicted.
        if self.opener.is_current()
            && let Some(keeper) = self.keeper()
        {
            self.upcoming.iter().for_each(|step| keeper.unkeep(&step.pages));
            keeper.unkeep(&self.current);
        }
    }
}

impl std::fmt::Debug for ReadAhead<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadAhead")
            .field("place", &self.place)
            .field("steps_in_flight", &self.upcoming.len())
            .finish_non_exhaustive()
    }
}

/// The measured times from which the number of steps in flight is computed.
#[derive(Debug, Default)]
struct Pace {
    latency: Estimate,
    interval: Estimate,
}

impl Pace {
    /// Returns the number of steps to keep in flight so that the next step arrives in time. This is the number of steps
    /// that the caller uses while a slow step arrives.
    fn distance(&self) -> usize {
        let (Some(latency), Some(interval)) = (self.latency.late(), self.interval.mean()) else { return 1 };
        let steps = latency.as_secs_f64() / interval.as_secs_f64().max(1e-9);
        // The conversion to `usize` saturates.
        (steps.ceil() as usize).clamp(1, STEPS_MAX)
    }
}

/// A running estimate of the mean and deviation of a repeatedly measured time. The weights are those with which TCP
/// estimates round-trip times (RFC 6298).
#[derive(Debug, Default)]
struct Estimate(Option<(f64, f64)>);

impl Estimate {
    fn note(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.0 = Some(match self.0 {
            None => (took, took / 2.0),
            Some((mean, stray)) => (mean + (took - mean) / 8.0, stray + ((took - mean).abs() - stray) / 4.0),
        });
    }

    fn mean(&self) -> Option<Duration> {
        self.0.map(|(mean, _)| Duration::from_secs_f64(mean))
    }

    /// Returns the mean plus four deviations, a time that few measurements exceed.
    fn late(&self) -> Option<Duration> {
        self.0.map(|(mean, stray)| Duration::from_secs_f64(mean + 4.0 * stray))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(latencies: &[u64], intervals: &[u64]) -> usize {
        let mut pace = Pace::default();
        latencies.iter().for_each(|took| pace.latency.note(Duration::from_micros(*took)));
        intervals.iter().for_each(|took| pace.interval.note(Duration::from_micros(*took)));
        pace.distance()
    }

    #[test]
    fn read_ahead_keeps_pace_during_slow_step() {
        for (why, latencies, intervals, expected) in [
            ("nothing is known yet", vec![], vec![], 1),
            ("only one of the times is", vec![10_000], vec![], 1),
            ("pages come at once", vec![0; 20], vec![1000; 20], 1),
            ("they come within a step", vec![400; 100], vec![1000; 100], 1),
            ("a step takes a tenth of their time", vec![10_000; 100], vec![1000; 100], 10),
            ("the first measurement is taken to stray", vec![10_000], vec![1000], 30),
            ("the caller never stops for anything", vec![1000; 20], vec![0; 20], STEPS_MAX),
            ("a day's wait", vec![86_400_000_000; 4], vec![1], STEPS_MAX),
        ] {
            assert_eq!(pace(&latencies, &intervals), expected, "{why}");
        }
        let strays: Vec<u64> = (0..100).map(|round| if round % 2 == 0 { 100 } else { 1900 }).collect();
        let steady = pace(&[1000; 100], &[1000; 100]);
        assert!(pace(&strays, &[1000; 100]) > 2 * steady, "times that stray call for more");
    }

    /// A slower caller or a faster disk needs fewer steps in flight.
    #[test]
    fn read_ahead_distance_follows_both_times() {
        let mut pace = Pace::default();
        let mut go = |latency, interval| {
            for _ in 0..60 {
                pace.latency.note(Duration::from_micros(latency));
                pace.interval.note(Duration::from_micros(interval));
            }
            pace.distance()
        };
        assert_eq!([go(7500, 1000), go(7500, 4000), go(1000, 4000), go(7500, 1000)], [8, 2, 1, 8]);
    }
}
