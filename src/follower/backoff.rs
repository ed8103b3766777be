//! Determines when a follower checks for new batches again, and when it checks whether the next frame is damaged
//! instead of late.
//!
//! After a batch, a follower checks repeatedly, with pauses that double from [`PAUSE_MIN`] to [`PAUSE_MAX`], because
//! another batch is likely to follow. After a longer idle time, a pause is an eighth of the idle time, up to
//! [`PAUSE_MAX_POLLING`] or [`PAUSE_MAX_NOTIFIED`], because a process may have several hundred followers of idle logs.
//!
//! A pause ends early if the system reports that files were written, created or renamed. Buffered and direct logs are
//! written by system calls, so each of their batches is detected immediately. Stores into a mapping cause no event, so
//! the writer of a mapped log triggers an event for the first batch after an idle period
//! ([`crate::disk::Disk::notify_watchers`]). That period is shorter than the time during which a follower checks often.

use std::time::{Duration, Instant};

/// The length of the first pause between two checks after a batch.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// The maximum pause soon after a batch, which is approximately the maximum delay of the next batch.
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// The maximum pause of an idle follower without notifications. With this pause, 300 idle followers use less than a
/// hundredth of a core.
const PAUSE_MAX_POLLING: Duration = Duration::from_secs(4);
/// The maximum pause of an idle follower with notifications. The follower still checks, because a notification can be
/// missed.
const PAUSE_MAX_NOTIFIED: Duration = Duration::from_secs(8);
const IDLE_PART: u32 = 8;
/// The interval between checks for new segments and incarnations without notifications.
const CHECK_AFTER: Duration = Duration::from_millis(10);
/// The interval between checks for new segments and incarnations with notifications. The checks are still needed,
/// because a notification can be missed.
const CHECK_AFTER_NOTIFIED: Duration = Duration::from_secs(1);
/// The time for which a frame must stay incomplete before it is checked for damage.
const SUSPECT_AFTER: Duration = Duration::from_millis(20);
/// The idle time after which the end of the log is first checked for damage. The time doubles after each check, up to
/// `JUDGE_AFTER_MAX`.
const JUDGE_AFTER: Duration = Duration::from_secs(10);
const JUDGE_AFTER_MAX: Duration = Duration::from_secs(600);

/// The lengths of the pauses between checks during one wait for a batch.
pub(super) struct Pauses {
    next: Duration,
    check_at: Option<Instant>,
}

impl Pauses {
    pub fn new() -> Self {
        Self { next: PAUSE_MIN, check_at: None }
    }

    /// Returns the length of the next pause. `idle` is the time since the last batch.
    pub fn next(&mut self, idle: Duration, is_notified: bool) -> Duration {
        let pause = self.next;
        self.next = (2 * pause).min(PAUSE_MAX);
        pause.max((idle / IDLE_PART).min(if is_notified { PAUSE_MAX_NOTIFIED } else { PAUSE_MAX_POLLING }))
    }

    /// Returns whether the names in the log folder should be checked now. The first check is always due.
    pub fn is_check_due(&mut self, now: Instant, is_notified: bool) -> bool {
        let due = self.check_at.is_none_or(|at| at <= now);
        if due {
            self.check_at = Some(now + if is_notified { CHECK_AFTER_NOTIFIED } else { CHECK_AFTER });
        }
        due
    }

    /// Makes the next check of the names due immediately, because the system reported a change.
    pub fn check_now(&mut self) {
        self.check_at = None;
    }
}

/// Schedules the checks of the log's end for damage.
pub(super) struct Suspicion {
    at: Instant,
    again_after: Duration,
    /// Whether the log's end has been checked for damage since the follower was opened.
    was_checked: bool,
    /// Whether data that resembles a frame has already moved the next check to an earlier time.
    was_noted: bool,
}

impl Suspicion {
    /// Creates a schedule whose first check is due immediately, because the age of the log's end is unknown.
    pub fn new() -> Self {
        Self { at: Instant::now(), again_after: JUDGE_AFTER, was_checked: false, was_noted: false }
    }

    /// Records that a frame was found, which postpones the next check.
    pub fn progress(&mut self) {
        let pause = if self.was_checked { JUDGE_AFTER } else { Duration::ZERO };
        *self = Self { at: Instant::now() + pause, again_after: JUDGE_AFTER, was_noted: false, ..*self };
    }

    /// Returns whether a check for damage is due.
    pub fn due(&self, now: Instant) -> bool {
        self.at <= now
    }

    /// Records that the position of the next frame contains data that is not a complete frame. The next check is then
    /// due soon.
    pub fn note(&mut self, now: Instant) {
        if !self.was_noted {
            self.was_noted = true;
            self.at = self.at.min(now + SUSPECT_AFTER);
        }
    }

    /// Records that a check found no damage, and schedules the next check.
    pub fn note_check(&mut self, now: Instant) {
        self.was_checked = true;
        self.at = now + self.again_after;
        self.again_after = (2 * self.again_after).min(JUDGE_AFTER_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::NOTIFY_AFTER;

    /// Returns the number of checks that a follower makes while the log is idle for the given time.
    fn checks(idle: Duration, is_notified: bool) -> u32 {
        let (mut pauses, mut passed, mut checks) = (Pauses::new(), Duration::ZERO, 0);
        while passed < idle {
            passed += pauses.next(passed, is_notified);
            checks += 1;
        }
        checks
    }

    #[test]
    fn idle_follower_polls_rarely() {
        let hour = Duration::from_secs(3600);
        // A check takes about 100 us of CPU time, and 300 followers may use a hundredth of a core.
        let allowed = hour.as_micros() / 100 / 300 / 100;
        for is_notified in [true, false] {
            let checks = u128::from(checks(hour, is_notified));
            assert!(checks <= allowed, "{checks} looks an hour, of {allowed}; told: {is_notified}");
        }
    }

    #[test]
    fn a_pause_is_short_after_a_batch() {
        for is_notified in [true, false] {
            assert_eq!(Pauses::new().next(Duration::ZERO, is_notified), PAUSE_MIN);
            assert!(checks(Duration::from_millis(10), is_notified) > 5, "{is_notified}");
        }
    }

    /// The writer of a mapped log triggers no event for a batch that soon follows another one. During that time, the
    /// follower must therefore check often.
    #[test]
    fn follower_polls_often_while_writer_may_be_silent() {
        let (mut pauses, mut passed) = (Pauses::new(), Duration::ZERO);
        while passed < NOTIFY_AFTER {
            let pause = pauses.next(passed, true);
            assert!(pause <= PAUSE_MAX, "{pause:?} after {passed:?}");
            passed += pause;
        }
    }
}
