//! When a follower looks again, and when it begins to suspect that the next frame is not late but damaged.
//!
//! A follower looks again and again, after pauses that double from [`PAUSE_MIN`] to [`PAUSE_MAX`], because a
//! batch is near after another one. After that a pause is an eighth of the time for which nothing came, up to
//! [`PAUSE_MAX_UNTOLD`] or [`PAUSE_MAX_TOLD`]: a process may have some hundred followers of logs that stand
//! still.
//!
//! A pause ends early where the system tells that files were written, made or renamed. A buffered or a direct
//! log is written by system calls, and each of its batches is noticed at once. Stores into a mapping make no
//! event, so the writer of a mapped log makes one for the first batch after a silence
//! ([`crate::disk::Disk::tell_watchers`]). That silence is shorter than the time for which a follower looks
//! often.

use std::time::{Duration, Instant};

/// The first pause after a batch.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// The longest pause soon after a batch: the next one is handed over at most about this late.
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// The longest pause of an idle follower: 300 of them take less than a hundredth of a core.
const PAUSE_MAX_UNTOLD: Duration = Duration::from_secs(4);
/// The same of one that is told of changes, and looks only because the system may be wrong.
const PAUSE_MAX_TOLD: Duration = Duration::from_secs(8);
const IDLE_PART: u32 = 8;
/// The pause between looks for new segments and incarnations where the system does not tell of them.
const LOOK_AFTER: Duration = Duration::from_millis(10);
/// The same where the system does tell: it may be wrong.
const LOOK_AFTER_TOLD: Duration = Duration::from_secs(1);
/// A frame that was begun and is not whole after this long is worth a closer look.
const SUSPECT_AFTER: Duration = Duration::from_millis(20);
/// A log that was silent for this long is worth a closer look too; the next look comes after twice as long.
const JUDGE_AFTER: Duration = Duration::from_secs(10);
const JUDGE_AFTER_MAX: Duration = Duration::from_secs(600);

/// The pauses of one wait.
pub(super) struct Pauses {
    next: Duration,
    look_at: Option<Instant>,
}

impl Pauses {
    pub fn new() -> Self {
        Self { next: PAUSE_MIN, look_at: None }
    }

    /// The next pause, given the time for which the log has been `idle`.
    pub fn next(&mut self, idle: Duration, told: bool) -> Duration {
        let pause = self.next;
        self.next = (2 * pause).min(PAUSE_MAX);
        pause.max((idle / IDLE_PART).min(if told { PAUSE_MAX_TOLD } else { PAUSE_MAX_UNTOLD }))
    }

    /// Whether it is time to look at the names in the folder: always at first.
    pub fn may_look(&mut self, now: Instant, told: bool) -> bool {
        let due = self.look_at.is_none_or(|at| at <= now);
        if due {
            self.look_at = Some(now + if told { LOOK_AFTER_TOLD } else { LOOK_AFTER });
        }
        due
    }

    /// Makes a look at the names due, because the system told of a change of names.
    pub fn look_now(&mut self) {
        self.look_at = None;
    }
}

/// The time at which the log's end is judged next.
pub(super) struct Suspicion {
    at: Instant,
    again_after: Duration,
    /// Whether any end was judged yet.
    judged: bool,
    /// Whether something that resembles a frame was noted, and put the judgement forward.
    noted: bool,
}

impl Suspicion {
    /// Makes the first judgement due at once: the age of the end that is found first is not known.
    pub fn new() -> Self {
        Self { at: Instant::now(), again_after: JUDGE_AFTER, judged: false, noted: false }
    }

    /// Notes that a frame was found.
    pub fn progress(&mut self) {
        let pause = if self.judged { JUDGE_AFTER } else { Duration::ZERO };
        *self = Self { at: Instant::now() + pause, again_after: JUDGE_AFTER, noted: false, ..*self };
    }

    /// Whether it is time to judge.
    pub fn due(&self, now: Instant) -> bool {
        self.at <= now
    }

    /// Notes that bytes lie where the next frame should be, and are not a whole frame.
    pub fn note(&mut self, now: Instant) {
        if !self.noted {
            self.noted = true;
            self.at = self.at.min(now + SUSPECT_AFTER);
        }
    }

    /// Notes that the end was judged, and nothing was wrong with it.
    pub fn judged(&mut self, now: Instant) {
        self.judged = true;
        self.at = now + self.again_after;
        self.again_after = (2 * self.again_after).min(JUDGE_AFTER_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::TELL_AFTER;

    /// How often a follower looks at a log that is idle for this time.
    fn looks(idle: Duration, told: bool) -> u32 {
        let (mut pauses, mut passed, mut looks) = (Pauses::new(), Duration::ZERO, 0);
        while passed < idle {
            passed += pauses.next(passed, told);
            looks += 1;
        }
        looks
    }

    #[test]
    fn an_idle_follower_looks_rarely() {
        let hour = Duration::from_secs(3600);
        // A look takes some 100 us of a core, and 300 followers may take a hundredth of one.
        let allowed = hour.as_micros() / 100 / 300 / 100;
        for told in [true, false] {
            let looks = u128::from(looks(hour, told));
            assert!(looks <= allowed, "{looks} looks an hour, of {allowed}; told: {told}");
        }
    }

    #[test]
    fn a_pause_is_short_after_a_batch() {
        for told in [true, false] {
            assert_eq!(Pauses::new().next(Duration::ZERO, told), PAUSE_MIN);
            assert!(looks(Duration::from_millis(10), told) > 5, "{told}");
        }
    }

    /// A mapped log's batch makes no event where it comes sooner than that after another one.
    #[test]
    fn a_follower_looks_often_for_as_long_as_a_writer_may_be_silent_without_telling() {
        let (mut pauses, mut passed) = (Pauses::new(), Duration::ZERO);
        while passed < TELL_AFTER {
            let pause = pauses.next(passed, true);
            assert!(pause <= PAUSE_MAX, "{pause:?} after {passed:?}");
            passed += pause;
        }
    }
}
