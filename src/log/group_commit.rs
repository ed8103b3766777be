//! Group commit: decides which committers a sync serves, and whether the next sync waits for more of them.
//!
//! Threads that commit repeatedly split into two halves. One half waits while the group of the other half is
//! synced, so each thread waits for two syncs per commit. For short groups, a sync that serves both halves
//! takes little longer than one that serves a single half. So the next sync begins only when the committers
//! that the last one served are back with another commit.
//!
//! Some of them may not come back. The log waits for them for at most half a sync, counted from the end of
//! the last one. If most of them did not come in that time, it does not wait at all for a while. `remanent
//! bench commit --threads 8 --len 4KiB --ack durable` on 2 cores reached 0.87 of the raw loop's commits
//! without this wait and 1.00 with it.
//!
//! A long group keeps the disk busy in proportion to its bytes, and copying and checksumming the next group
//! takes CPU time in the same proportion. The disk should write one half while the CPUs prepare the other. So
//! no sync waits once it covers [`ENOUGH_BYTES`].
//!
//! This is guarded by the log's lock; nothing here blocks. A crash here loses nothing: a batch counted here
//! was not yet acknowledged as durable.

use std::time::Duration;

use crate::base::sync::Instant;

/// The maximum number of syncs that begin immediately, after repeated waits in vain, before the log tries to
/// wait again.
const IMMEDIATE_SYNCS_LIMIT: u32 = 32;

/// A group of this length waits for no further committer. When the log waited for 8 threads that committed 64
/// KiB each, a write of six frames took 320 us and the disk was idle for 165 us before the next one. With
/// this bound a write takes four frames and 240 us, and the disk is idle for 40 us, as in the raw loop (0.80
/// and 0.92 of its commits).
const ENOUGH_BYTES: u64 = 128 << 10;

/// The committers that wait for their batches to become durable, and the time for which the next sync waits
/// for more of them.
pub(super) struct Waiters {
    /// Committers that the current sync serves.
    served_now: usize,
    /// Committers that the next sync will serve.
    served_next: usize,
    /// Committers that the last sync served.
    served_last: usize,
    /// Committers among those that have not come back with another commit.
    away: usize,
    /// Whether one of them will wake up by itself to begin the sync without the committers that are away.
    pub is_watched: bool,
    /// The times at which the last sync began and ended.
    began: Instant,
    ended: Instant,
    /// How long the next sync waits for the committers that are away.
    patience: Duration,
    /// The duration of the last sync.
    took: Duration,
    /// The number of syncs still to begin immediately because waiting was in vain.
    immediate_syncs: u32,
    /// The initial value of `immediate_syncs`, doubled each time, so that a load whose threads never return
    /// pays little.
    immediate_syncs_max: u32,
}

impl Waiters {
    /// Creates the state without any waiting committer.
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

    /// Counts a committer whose batch is covered by the current sync.
    pub fn arrive_late(&mut self) {
        self.served_now += 1;
    }

    /// Counts a committer whose batch the next sync will cover.
    pub fn arrive(&mut self) {
        self.served_next += 1;
        // `away` is zero during a sync, so a committer that arrives then is not mistaken for one that
        // returned.
        self.away = self.away.saturating_sub(1);
    }

    /// Whether a committer is waiting that will begin the next sync.
    pub fn has_next(&self) -> bool {
        self.served_next > 0
    }

    /// Returns the time until which the next sync waits for more, given the bytes that it covers so far;
    /// `None` if it may begin.
    pub fn more_until(&self, bytes: u64, now: Instant) -> Option<Instant> {
        let until = self.ended + self.patience;
        (self.away > 0 && bytes < ENOUGH_BYTES && self.immediate_syncs == 0 && now < until).then_some(until)
    }

    /// Records that a sync begins; it serves every committer that is waiting.
    pub fn begin(&mut self, now: Instant) {
        // The wait was in vain only if it ran to its end. A sync that began early because its group was long
        // enough says nothing about the committers that were away.
        let waited = !self.patience.is_zero() && now >= self.ended + self.patience;
        if self.immediate_syncs > 0 {
            self.immediate_syncs -= 1;
        } else if self.away <= self.served_last / 2 {
            self.immediate_syncs_max = 0;
        } else if waited {
            self.immediate_syncs_max = (2 * self.immediate_syncs_max).clamp(1, IMMEDIATE_SYNCS_LIMIT);
            self.immediate_syncs = self.immediate_syncs_max;
        }
        // The committer that kept watch may wake only after this sync has ended. A stale flag would keep
        // others from watching for the next sync, which would then begin late.
        self.is_watched = false;
        self.served_now += std::mem::take(&mut self.served_next);
        self.away = 0;
        self.began = now;
    }

    /// Records that the sync has ended; returns the number of committers it served.
    pub fn end(&mut self, now: Instant) -> usize {
        let took = now - self.began;
        // An unusually long sync says nothing about the next one, so the shorter of the last two counts.
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

    /// The waiters, with a simulated clock.
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

        /// Returns how long the next sync waits if no committer comes.
        fn waits(&self) -> Duration {
            self.waits_with(0)
        }

        /// Returns how long it waits if it covers this many bytes.
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
        // The absence of a wait says nothing about the committers that are away.
        log.sync(SYNC);
        assert_eq!(log.waits(), SYNC / 2);
    }

    #[test]
    fn two_buffer_halves_are_joined() {
        let mut log = Log::with(4);
        log.arrive(4);
        log.waiters.begin(log.now);
        // The other half, and one committer whose batch the sync has already covered.
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
        // The keeper began this sync, and it served no committer.
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
            // A sync still serves the other three: each time one that ends after they came.
            (0..3).for_each(|_| log.waiters.arrive_late());
            log.sync(SYNC);
        }
        let tries: Vec<usize> = (0..80).filter(|at| waited[*at]).collect();
        assert_eq!(tries, [0, 2, 5, 10, 19, 36, 69]);
        // Now most of them come back.
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
        // The watcher has not woken yet when the sync ends.
        log.sync(SYNC);
        assert!(!log.waiters.is_watched);
    }

    #[test]
    fn sync_without_committer_keeps_absence_unknown() {
        let mut log = Log::with(4);
        // The keeper began it, or a committer that needed a new segment.
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
