//! Group commit: determines which committers a sync serves, and whether the next sync waits for more committers.
//!
//! Threads that commit repeatedly split into two halves. One half waits while the group of the other half is synced, so
//! each thread waits for two syncs per commit. For short groups, a sync that serves both halves takes little longer
//! than a sync that serves a single half. Therefore the next sync begins only when the committers that the last sync
//! served have each appended another batch.
//!
//! Some of these committers may not return. The log waits for them for at most half the duration of a sync, counted
//! from the end of the last sync. If most of them did not return in time, the log stops waiting for a while.
//! `remanent-bench commit --threads 8 --len 4KiB --ack durable` compares commits with a loop that only writes and
//! syncs. On 2 cores, commits reached 0.87 of the loop's rate without this wait and 1.00 with it.
//!
//! A long group keeps the disk busy in proportion to its bytes, and copying and checksumming the next group takes CPU
//! time in the same proportion. The disk should write one half while the CPUs prepare the other. Therefore no sync
//! waits once it covers [`ENOUGH_BYTES`].
//!
//! The log's lock guards this state, and no function here blocks. A crash loses no acknowledged batch, because the
//! counted batches were not yet acknowledged as durable.

use std::time::Duration;

use crate::base::sync::Instant;

/// The maximum number of syncs that begin without a wait after waits were repeatedly unsuccessful. Then the log tries a
/// wait again.
const IMMEDIATE_SYNCS_LIMIT: u32 = 32;

/// The number of bytes in a group at which the next sync begins without waiting for further committers.
///
/// Without this bound, 8 threads that committed 64 KiB each wrote six frames at a time. The write took 320 us, and the
/// disk was idle for 165 us before the next write. With the bound, a write contains four frames and takes 240 us, and
/// the disk is idle for 40 us, as in a loop that only writes and syncs. The bound raised the commits from 0.80 to 0.92
/// of that loop's rate.
const ENOUGH_BYTES: u64 = 128 << 10;

/// The committers that wait for a sync, and the time that the next sync waits for further committers.
pub(super) struct Waiters {
    /// The number of committers that the current sync serves.
    served_now: usize,
    /// The number of committers that the next sync will serve.
    served_next: usize,
    /// The number of committers that the last sync served.
    served_last: usize,
    /// The number of committers that the last sync served and that have not yet appended another batch.
    away: usize,
    /// Whether a waiting committer has set a timer, and will begin the next sync when `patience` expires.
    pub is_watched: bool,
    /// The time at which the last sync began.
    began: Instant,
    ended: Instant,
    /// The maximum time after the end of the last sync that the next sync waits for the committers counted in `away`.
    patience: Duration,
    /// The duration of the last sync.
    took: Duration,
    /// The number of coming syncs that begin without a wait, because earlier waits were unsuccessful.
    immediate_syncs: u32,
    /// The value that `immediate_syncs` gets after the next unsuccessful wait. The value doubles after each
    /// unsuccessful wait, so that syncs rarely wait if the committers never return.
    immediate_syncs_max: u32,
}

impl Waiters {
    pub fn new(now: Instant) -> Self {
        Self {
            served_now: 0,
            served_next: 0,
            served_last: 0,
            away: 0,
            is_watched: false,
            began: now,
            ended: now,
            patience: Duration::ZERO,
            took: Duration::ZERO,
            immediate_syncs: 0,
            immediate_syncs_max: 0,
        }
    }

    /// Counts a committer whose batch the current sync already covers.
    pub fn arrive_late(&mut self) {
        self.served_now += 1;
    }

    /// Counts a committer whose batch the next sync will cover.
    pub fn arrive(&mut self) {
        self.served_next += 1;
        // `away` is zero during a sync, so a committer that arrives during a sync is not counted as one that returned.
        self.away = self.away.saturating_sub(1);
    }

    /// Returns whether a waiting committer will begin the next sync.
    pub fn has_next(&self) -> bool {
        self.served_next > 0
    }

    /// Returns the time until which the next sync waits for more committers. Returns `None` if the sync may begin now.
    /// `bytes` is the number of bytes that the sync covers so far.
    pub fn more_until(&self, bytes: u64, now: Instant) -> Option<Instant> {
        let until = self.ended + self.patience;
        (self.away > 0 && bytes < ENOUGH_BYTES && self.immediate_syncs == 0 && now < until).then_some(until)
    }

    /// Records the beginning of a sync that serves all waiting committers.
    pub fn begin(&mut self, now: Instant) {
        // The wait was unsuccessful only if it lasted for all of `patience`. A sync that began earlier because its
        // group was long enough gives no information about the committers that were away.
        let waited = !self.patience.is_zero() && now >= self.ended + self.patience;
        if self.immediate_syncs > 0 {
            self.immediate_syncs -= 1;
        } else if self.away <= self.served_last / 2 {
            self.immediate_syncs_max = 0;
        } else if waited {
            self.immediate_syncs_max = (2 * self.immediate_syncs_max).clamp(1, IMMEDIATE_SYNCS_LIMIT);
            self.immediate_syncs = self.immediate_syncs_max;
        }
        // The committer with the timer may wake only after this sync has ended. If the flag remained set, no other
        // committer would set a timer for the next sync, which would begin late.
        self.is_watched = false;
        self.served_now += std::mem::take(&mut self.served_next);
        self.away = 0;
        self.began = now;
    }

    /// Records the end of the current sync, and returns the number of committers that it served.
    pub fn end(&mut self, now: Instant) -> usize {
        let took = now - self.began;
        // The shorter of the last two durations is used, so that one unusually long sync does not lengthen the next
        // wait.
        self.patience = took.min(self.took) / 2;
        self.took = took;
        self.ended = now;
        self.served_last = std::mem::take(&mut self.served_now);
        self.away = self.served_last;
        self.served_last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYNC: Duration = Duration::from_micros(100);

    /// The state under test, with a simulated clock.
    struct Log {
        waiters: Waiters,
        now: Instant,
    }

    impl Log {
        /// Creates a log whose last two syncs served `count` threads each.
        fn with(count: usize) -> Self {
            let now = Instant::now();
            let mut log = Self { waiters: Waiters::new(now), now };
            for _ in 0..2 {
                log.arrive(count);
                log.sync(SYNC);
            }
            log
        }

        fn arrive(&mut self, count: usize) {
            (0..count).for_each(|_| self.waiters.arrive());
        }

        fn sync(&mut self, took: Duration) -> usize {
            self.waiters.begin(self.now);
            self.now += took;
            self.waiters.end(self.now)
        }

        /// Returns the time that the next sync waits if no committer arrives.
        fn waits(&self) -> Duration {
            self.waits_with(0)
        }

        /// Returns the time that the next sync waits if it covers `bytes` bytes and no committer arrives.
        fn waits_with(&self, bytes: u64) -> Duration {
            self.waiters.more_until(bytes, self.now).map_or(Duration::ZERO, |until| until - self.now)
        }
    }

    #[test]
    fn sync_waits_only_for_committers_of_previous_sync() {
        let mut log = Log::with(3);
        assert_eq!(log.waits(), SYNC / 2);
        log.arrive(2);
        log.now += SYNC / 4;
        assert_eq!(log.waits(), SYNC / 4);
        log.arrive(1);
        assert_eq!(log.waits(), Duration::ZERO, "all are back");
        assert_eq!(log.sync(SYNC), 3);
        log.now += SYNC / 2;
        assert_eq!(log.waits(), Duration::ZERO, "the time is over");
    }

    #[test]
    fn a_long_group_does_not_wait() {
        let mut log = Log::with(8);
        log.arrive(4);
        assert_eq!(
            [ENOUGH_BYTES - 1, ENOUGH_BYTES].map(|bytes| log.waits_with(bytes)),
            [SYNC / 2, Duration::ZERO]
        );
        // A sync without a wait gives no information about the committers that are away.
        log.sync(SYNC);
        assert_eq!(log.waits(), SYNC / 2);
    }

    #[test]
    fn two_buffer_halves_are_joined() {
        let mut log = Log::with(4);
        log.arrive(4);
        log.waiters.begin(log.now);
        // Three committers arrive for the next sync. One more waits for the current sync, which covers its batch.
        (0..3).for_each(|_| log.waiters.arrive());
        log.waiters.arrive_late();
        log.now += SYNC;
        assert_eq!(log.waiters.end(log.now), 5);
        assert!(log.waiters.has_next());
        assert_eq!(log.waits(), SYNC / 2);
        log.arrive(5);
        assert_eq!((log.waits(), log.sync(SYNC)), (Duration::ZERO, 8));
        assert!(!log.waiters.has_next());
    }

    #[test]
    fn committer_waits_neither_for_itself_nor_after_empty_sync() {
        let mut log = Log::with(1);
        log.arrive(1);
        assert_eq!(log.waits(), Duration::ZERO);
        log.sync(SYNC);
        // The keeper began this sync, which served no committer.
        assert_eq!(log.sync(SYNC), 0);
        log.arrive(1);
        assert_eq!(log.waits(), Duration::ZERO);
    }

    #[test]
    fn absent_committers_are_awaited_less_and_less_often() {
        let mut log = Log::with(4);
        let mut waited = Vec::new();
        for _ in 0..80 {
            log.arrive(1);
            let waits = log.waits();
            waited.push(waits > Duration::ZERO);
            log.now += waits;
            // A sync still serves the other three committers, because each sync ends after they have arrived.
            (0..3).for_each(|_| log.waiters.arrive_late());
            log.sync(SYNC);
        }
        let tries: Vec<usize> = (0..80).filter(|at| waited[*at]).collect();
        assert_eq!(tries, [0, 2, 5, 10, 19, 36, 69]);
        // Now most of the committers return.
        for _ in 0..40 {
            log.arrive(3);
            log.waiters.arrive_late();
            log.sync(SYNC);
        }
        log.arrive(3);
        assert!(log.waits() > Duration::ZERO);
    }

    #[test]
    fn watcher_of_one_sync_does_not_block_next() {
        let mut log = Log::with(4);
        log.waiters.is_watched = true;
        // The committer with the timer has not woken yet when the sync ends.
        log.sync(SYNC);
        assert!(!log.waiters.is_watched);
    }

    #[test]
    fn sync_without_committer_keeps_absence_unknown() {
        let mut log = Log::with(4);
        // The keeper began this sync, or a committer that needed a new segment.
        log.arrive(1);
        log.sync(SYNC);
        assert_eq!(log.waits(), SYNC / 2);
    }

    #[test]
    fn slow_sync_does_not_lengthen_later_waits() {
        let mut log = Log::with(2);
        log.arrive(2);
        log.sync(100 * SYNC);
        assert_eq!(log.waits(), SYNC / 2);
    }
}
