//! Reading ahead: the pages of the next steps are on their way while a caller uses those of one.
//!
//! How many steps are on their way follows from two times, measured: how long the pages of a step take to
//! come, and how long the caller takes between two steps. A fixed number is too few where pages come from
//! the disk, and where they come from memory it makes others leave for nothing.

use std::collections::VecDeque;
use std::time::Duration;

use remanent_format::{PageId, Place};

use super::mover::{Hits, PageMover};
use super::prefetch::{Prefetch, PrefetchThread};
use crate::base::process::Process;
use crate::base::sync::Instant;
use crate::error::{Error, Result};

/// The most steps on their way.
const STEPS_MAX: usize = 64;
/// The part of a place's budget that steps on their way take at most: the others are in use.
const BUDGET_PART: u64 = 4;

/// Steps of a caller that uses some pages after the other, from
/// [`Store::read_ahead`](crate::Store::read_ahead): layers of a model, requests in a queue. The pages of the
/// steps to come are brought to a place in time.
///
/// ```
/// use remanent::{Options, Place, Store};
/// let store = Store::temporary(Options::default())?;
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
    coming: VecDeque<Step>,
    /// Bytes of the steps on their way.
    bytes: u64,
    /// The budget of the place.
    budget: u64,
    pace: Pace,
    /// When the caller got its last step.
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
        // The budget of the disk is for what is written there, and none is needed to go there.
        let budget = if place == Place::Disk { u64::MAX } else { mover.engine.arena.budget(place) };
        Self {
            mover,
            prefetcher,
            place,
            coming: VecDeque::new(),
            bytes: 0,
            budget,
            pace: Pace::default(),
            given: None,
            opener: Process::current(),
        }
    }

    /// Whether the pages of another step are worth bringing now. Asked again after each [`push`](Self::push).
    /// While one step is used another one is on its way; more of them where pages take longer to come than
    /// the caller takes for a step, up to 64 steps and a quarter of the place's budget. A step of more than
    /// half of the budget has none behind it.
    #[must_use]
    pub fn wants_more(&self) -> bool {
        // It is used next, and the others are behind it.
        let Some(first) = self.coming.front() else { return true };
        let behind = self.bytes - first.bytes;
        self.coming.len() <= self.pace.distance()
            && (behind == 0 || behind < self.budget / BUDGET_PART)
            && self.bytes <= self.budget / 2
    }

    /// Steps on their way.
    #[must_use]
    pub fn steps_coming(&self) -> usize {
        self.coming.len()
    }

    /// Adds a step after all others, and has its pages brought. Returns at once.
    ///
    /// # Errors
    /// As for [`Store::prefetch`](crate::Store::prefetch); the step is not added then.
    pub fn push(&mut self, pages: &[PageId]) -> Result<()> {
        self.opener.check()?;
        let prefetch = self.in_store(self.prefetcher.prefetch(pages, self.place))?;
        let bytes = pages.iter().map(|page| self.mover.byte_len(*page)).fold(0, u64::saturating_add);
        self.bytes = self.bytes.saturating_add(bytes);
        self.coming.push_back(Step { pages: pages.to_vec(), bytes, prefetch });
        Ok(())
    }

    /// The pages of the first step, once they are there; `None` if there is none. What has not begun to move
    /// by now is moved by this call. Pages that are deleted meanwhile are left out.
    ///
    /// # Errors
    /// [`Error::Forked`]; those of [`Store::ensure`](crate::Store::ensure), and the step is gone then. Pages
    /// that were loaded on demand may be [`Error::Damaged`].
    pub fn next_step(&mut self) -> Result<Option<Vec<PageId>>> {
        self.opener.check()?;
        let called = Instant::now();
        let Some(Step { mut pages, bytes, prefetch }) = self.coming.pop_front() else { return Ok(None) };
        self.bytes -= bytes;
        if let Some(given) = self.given {
            self.pace.interval.note(called - given);
        }
        prefetch.cancel()?;
        let moving = prefetch.moving_since()?;
        // Those that came ahead came for this.
        let hits = if moving.is_some() { Hits::Arrivals } else { Hits::Uses };
        // Whatever kept pages from coming ahead is met here again, or has passed.
        let there = self.mover.bring_existing(&mut pages, self.place, hits);
        let now = Instant::now();
        self.given = Some(now);
        self.in_store(there)?;
        let begun = moving.map_or(called, |(begun, _)| begun);
        // Where all came ahead, they were there before the call.
        let ended = moving.and_then(|(_, ended)| ended).unwrap_or(now);
        self.pace.latency.note(ended - begun);
        Ok(Some(pages))
    }

    fn in_store<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error: Error| error.in_store(&self.mover.engine.disk.label()))
    }
}

impl Drop for ReadAhead<'_> {
    /// Gives up what is not under way yet.
    fn drop(&mut self) {
        // All of them first: else the next one begins while the one before it is waited for. In a forked
        // child there is nothing to give up.
        let given_up = self.coming.iter().try_for_each(|step| step.prefetch.give_up());
        let ended = given_up.and_then(|()| self.coming.iter().try_for_each(|step| step.prefetch.cancel()));
        debug_assert!(ended.is_ok() || !self.opener.is_current());
    }
}

impl std::fmt::Debug for ReadAhead<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadAhead")
            .field("place", &self.place)
            .field("steps_coming", &self.coming.len())
            .finish_non_exhaustive()
    }
}

/// How fast pages come, and how fast a caller goes through steps.
#[derive(Debug, Default)]
struct Pace {
    latency: Estimate,
    interval: Estimate,
}

impl Pace {
    /// How many steps are on their way while one is used, so that the next one is there when it is due: as
    /// many as the caller uses while a slow one comes.
    fn distance(&self) -> usize {
        let (Some(latency), Some(interval)) = (self.latency.late(), self.interval.mean()) else { return 1 };
        let steps = latency.as_secs_f64() / interval.as_secs_f64().max(1e-9);
        // A number beyond all others saturates.
        (steps.ceil() as usize).clamp(1, STEPS_MAX)
    }
}

/// A time that is measured again and again: its mean, and how far it strays. The weights are those by which
/// TCP estimates how long an answer takes (RFC 6298).
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

    /// A time that few measurements exceed.
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
    fn as_many_steps_come_as_are_used_while_a_slow_one_comes() {
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

    /// A caller that becomes slower, or a disk that becomes faster, needs fewer steps ahead.
    #[test]
    fn the_distance_follows_both_times() {
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
