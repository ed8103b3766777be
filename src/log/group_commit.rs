//! Who waits for syncs, and whether the next sync waits for more of them.
//!
//! Threads that commit again and again fall into two halves: one waits while the group of the other is synced, and
//! each thread waits for two syncs a commit. Of short groups a sync takes little longer for both halves than for one.
//! So the next one begins only when those whom the last one served are back with another commit. Not all of them may
//! come: they are waited for half a sync at most, counted from the end of the last one, and where most did not come in
//! that time, not at all for a while. `remanent bench commit --threads 8 --len 4KiB --ack durable` on 2 cores, without
//! and with it: 0.87 and 1.00 times the raw loop's commits.
//!
//! Of long groups a sync takes as long as their bytes do, and so does it to copy and check the next ones: the disk is
//! to have one half while the processors have the other. So nobody waits for more than [`ENOUGH_BYTES`].
//!
//! Kept behind the log's lock; nothing here waits. A crash here loses nothing: nobody was told of what waits.

use std::time::Duration;

use crate::base::sync::Instant;

/// After waiting in vain again and again, so many syncs begin at once before the next try.
const HASTE_MAX: u32 = 32;

/// A group so long waits for nobody. Where 8 threads that committed 64 KiB each were waited for, a write of six frames
/// took 320 us and the disk was idle for 165 us before the next one; now it writes four in 240 us and is idle for
/// 40 us, as in the raw loop (0.80 and 0.92 of its commits). With twice the bound four threads made a
/// twentieth more, and eight with 32 KiB a twelfth less.
///
/// A thread that does nothing but sync, and goes on with the next group at once, did worse than that: whom it woke ran
/// before it had begun the next write (0.60 of the raw loop; 0.80 if it woke one, who woke the others).
const ENOUGH_BYTES: u64 = 128 << 10;

/// The threads that wait for their batches to be durable.
pub(super) struct Waiters {
    /// How many of them the sync under way serves, and how many the next one will.
    served_now: usize,
    served_next: usize,
    /// How many the last one served, and how many of those have not come back.
    served_last: usize,
    away: usize,
    /// Whether one of them wakes by itself, to begin the sync without those who are away.
    pub is_watched: bool,
    /// When the last sync began, and when it ended.
    began: Instant,
    ended: Instant,
    /// How long those who are away are waited for.
    patience: Duration,
    /// How long the last sync took.
    took: Duration,
    /// So many syncs begin at once, because waiting was in vain; and how many they were in all.
    haste: u32,
    haste_len: u32,
}

impl Waiters {
    /// Nobody.
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
            haste: 0,
            haste_len: 0,
        }
    }

    /// Somebody waits for a batch that the sync under way has taken.
    pub fn come_late(&mut self) {
        self.served_now += 1;
    }

    /// Somebody waits for a batch that the next sync will take.
    pub fn come(&mut self) {
        self.served_next += 1;
        // Nobody is away while a sync is under way.
        self.away = self.away.saturating_sub(1);
    }

    /// Whether somebody waits who will begin the next sync.
    pub fn has_next(&self) -> bool {
        self.served_next > 0
    }

    /// Until when the next sync, which takes so many bytes by now, waits for more; `None` if it may begin.
    pub fn more_until(&self, bytes: u64, now: Instant) -> Option<Instant> {
        let until = self.ended + self.patience;
        (self.away > 0 && bytes < ENOUGH_BYTES && self.haste == 0 && now < until).then_some(until)
    }

    /// A sync begins.
    pub fn begin(&mut self, now: Instant) {
        let waited = !self.patience.is_zero() && now >= self.ended + self.patience;
        if self.haste > 0 {
            self.haste -= 1;
        } else if self.away <= self.served_last / 2 {
            self.haste_len = 0;
        } else if waited {
            self.haste_len = (2 * self.haste_len).clamp(1, HASTE_MAX);
            self.haste = self.haste_len;
        }
        // Who watched may wake after this sync has ended, and is not to keep others from watching for the next one.
        self.is_watched = false;
        self.served_now += std::mem::take(&mut self.served_next);
        self.away = 0;
        self.began = now;
    }

    /// The sync has ended; returns how many it served.
    pub fn end(&mut self, now: Instant) -> usize {
        let took = now - self.began;
        // A sync that took unusually long says nothing about the next one.
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

    /// Waiters, and what time it is for them.
    struct Log {
        waiters: Waiters,
        now: Instant,
    }

    impl Log {
        /// Two syncs have served `count` threads.
        fn with(count: usize) -> Self {
            let now = Instant::now();
            let mut log = Self { waiters: Waiters::new(now), now };
            for _ in 0..2 {
                log.come(count);
                log.sync(SYNC);
            }
            log
        }

        fn come(&mut self, count: usize) {
            (0..count).for_each(|_| self.waiters.come());
        }

        fn sync(&mut self, took: Duration) -> usize {
            self.waiters.begin(self.now);
            self.now += took;
            self.waiters.end(self.now)
        }

        /// How long the next sync waits if nobody comes.
        fn waits(&self) -> Duration {
            self.waits_with(0)
        }

        /// The same, if it takes so many bytes.
        fn waits_with(&self, bytes: u64) -> Duration {
            self.waiters.more_until(bytes, self.now).map_or(Duration::ZERO, |until| until - self.now)
        }
    }

    #[test]
    fn a_sync_waits_for_those_whom_the_last_one_served_and_no_longer() {
        let mut log = Log::with(3);
        assert_eq!(log.waits(), SYNC / 2);
        log.come(2);
        log.now += SYNC / 4;
        assert_eq!(log.waits(), SYNC / 4);
        log.come(1);
        assert_eq!(log.waits(), Duration::ZERO, "all are back");
        assert_eq!(log.sync(SYNC), 3);
        log.now += SYNC / 2;
        assert_eq!(log.waits(), Duration::ZERO, "the time is over");
    }

    #[test]
    fn a_long_group_waits_for_nobody() {
        let mut log = Log::with(8);
        log.come(4);
        assert_eq!(
            [ENOUGH_BYTES - 1, ENOUGH_BYTES].map(|bytes| log.waits_with(bytes)),
            [SYNC / 2, Duration::ZERO]
        );
        // That nobody was waited for says nothing of those who are away.
        log.sync(SYNC);
        assert_eq!(log.waits(), SYNC / 2);
    }

    #[test]
    fn two_halves_become_one() {
        let mut log = Log::with(4);
        log.come(4);
        log.waiters.begin(log.now);
        // The other half, and one whose batch the sync has taken already.
        (0..3).for_each(|_| log.waiters.come());
        log.waiters.come_late();
        log.now += SYNC;
        assert_eq!(log.waiters.end(log.now), 5);
        assert!(log.waiters.has_next());
        assert_eq!(log.waits(), SYNC / 2);
        log.come(5);
        assert_eq!((log.waits(), log.sync(SYNC)), (Duration::ZERO, 8));
        assert!(!log.waiters.has_next());
    }

    #[test]
    fn nobody_waits_for_himself_or_where_nobody_was_served() {
        let mut log = Log::with(1);
        log.come(1);
        assert_eq!(log.waits(), Duration::ZERO);
        log.sync(SYNC);
        // The keeper's sync.
        assert_eq!(log.sync(SYNC), 0);
        log.come(1);
        assert_eq!(log.waits(), Duration::ZERO);
    }

    #[test]
    fn those_who_do_not_come_back_are_waited_for_less_and_less_often() {
        let mut log = Log::with(4);
        let mut waited = Vec::new();
        for _ in 0..80 {
            log.come(1);
            let waits = log.waits();
            waited.push(waits > Duration::ZERO);
            log.now += waits;
            // The others of the four are still served: each time by a sync that ends after they came.
            (0..3).for_each(|_| log.waiters.come_late());
            log.sync(SYNC);
        }
        let tries: Vec<usize> = (0..80).filter(|at| waited[*at]).collect();
        assert_eq!(tries, [0, 2, 5, 10, 19, 36, 69]);
        // Most of them come.
        for _ in 0..40 {
            log.come(3);
            log.waiters.come_late();
            log.sync(SYNC);
        }
        log.come(3);
        assert!(log.waits() > Duration::ZERO);
    }

    #[test]
    fn who_watched_for_one_sync_keeps_nobody_from_watching_for_the_next() {
        let mut log = Log::with(4);
        log.waiters.is_watched = true;
        // It has not woken yet when the sync ends.
        log.sync(SYNC);
        assert!(!log.waiters.is_watched);
    }

    #[test]
    fn a_sync_that_nobody_waited_with_says_nothing_of_those_who_are_away() {
        let mut log = Log::with(4);
        // By the keeper, or for a new segment.
        log.come(1);
        log.sync(SYNC);
        assert_eq!(log.waits(), SYNC / 2);
    }

    #[test]
    fn a_sync_that_took_long_makes_no_other_wait_long() {
        let mut log = Log::with(2);
        log.come(2);
        log.sync(100 * SYNC);
        assert_eq!(log.waits(), SYNC / 2);
    }
}
