//! Snapshots that are kept because of their age, while the wall clock jumps.

use std::time::{SystemTime, UNIX_EPOCH};

use super::Life;
use super::model::Kept;
use super::text::{Command, Kind};

/// Number of snapshots that a store keeps.
pub const SNAPSHOTS_KEPT: usize = 2;
/// Ages up to which an open keeps every snapshot.
pub const KEPT_FOR_MS: [u64; 4] = [0, 0, 60_000, 3_600_000];
const CLOCK_JUMPS_MS: [u64; 4] = [1000, 60_000, 3_600_000, 7 * 24 * 3_600_000];

impl Life {
    pub(super) fn prune(&mut self) {
        let kept = self.kept();
        let names: Vec<String> = kept.into_iter().filter_map(|kept| kept.name).collect();
        let give_up =
            (!names.is_empty()).then(|| names[self.random.below(names.len() as u64) as usize].clone());
        let snapshots_kept = 1 + self.random.below(3) as usize;
        let before = self.kept();
        let earliest = self.now_ms();
        self.ask(&Command::Prune { snapshots_kept, give_up });
        let latest = self.now_ms();
        let after = self.kept();
        self.check_ages(snapshots_kept, &before, &after, earliest, latest);
    }

    /// Changes the wall clock, while the store is open or between two opens.
    pub(super) fn jump(&mut self) {
        let by = i64::try_from(CLOCK_JUMPS_MS[self.random.below(4) as usize]).expect("less than a year");
        self.clock_ms = match self.random.below(4) {
            0 => 0,
            1 => -by,
            _ => by,
        };
        // Take two snapshots that may become old.
        for _ in 0..SNAPSHOTS_KEPT {
            self.commit();
            self.ask(&Command::Snapshot(Kind::Fuzzy));
            self.tally.snapshots += 1;
        }
        let is_between = self.random.below(2) == 0;
        if is_between {
            self.ask(&Command::Close);
            self.with.kept_for_ms = KEPT_FOR_MS[2];
        }
        self.set_clock();
        if is_between {
            self.open();
            self.model.reopen();
        }
        // While a page is not loaded, no snapshot is removed.
        self.compare();
        let (mut before, earliest) = (self.kept(), self.now_ms());
        self.ask(&Command::Snapshot(Kind::Fuzzy));
        let (after, latest) = (self.kept(), self.now_ms());
        let is_new = |kept: &&Kept| before.iter().all(|other| other.id != kept.id);
        let taken: Vec<Kept> = after.iter().filter(is_new).cloned().collect();
        before.extend(taken);
        self.check_ages(SNAPSHOTS_KEPT, &before, &after, earliest, latest);
        self.tally.snapshots += 1;
        self.tally.jumps += 1;
    }

    /// Checks a prune against the rule for ages. The time of a snapshot is the earliest of its own time and
    /// those of later snapshots, and a time in the future counts as now.
    fn check_ages(&mut self, count: usize, before: &[Kept], after: &[Kept], earliest: u64, latest: u64) {
        // A thin snapshot replaces the previous one. Other tests check which of the two is kept.
        if before.windows(2).any(|pair| pair[0].redo == pair[1].redo) {
            return;
        }
        for (at, kept) in before.iter().enumerate().filter(|(_, kept)| kept.name.is_none()) {
            // Named snapshots may be kept without the log after them, and then do not count among the newest.
            let later = before[at..].iter().skip(1).filter(|later| later.name.is_none()).count();
            let time = before[at..].iter().map(|later| later.unix_ms).min().expect("itself");
            let stays = after.iter().any(|other| other.id == kept.id);
            let is_young = latest.saturating_sub(time) < self.with.kept_for_ms;
            let is_old = later >= count && earliest.saturating_sub(time) >= self.with.kept_for_ms;
            if is_young && !stays || is_old && stays {
                let (id, max) = (kept.id, self.with.kept_for_ms);
                self.fail(&format!("{earliest} to {latest}: {id} stays: {stays}; up to {max}: {before:?}"));
            }
            self.tally.aged += u64::from(is_old && self.with.kept_for_ms > 0);
        }
    }

    /// Returns the current time of the worker's clock.
    fn now_ms(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970");
        u64::try_from(now.as_millis()).expect("a time in this age").saturating_add_signed(self.clock_ms)
    }

    pub(super) fn set_clock(&mut self) {
        let clock = Command::Clock(self.clock_ms);
        self.ask(&clock);
    }
}
