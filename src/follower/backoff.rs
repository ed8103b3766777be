//! When a follower looks again, and when it begins to suspect that the next frame is not late but damaged.
//!
//! A writer appends by stores into a mapping, and makes no event in the system that a process could wait for.
//! So a follower looks again and again, after pauses that double from [`PAUSE_MIN`] to [`PAUSE_MAX`].
//! Directly after a batch the next one is near, and an idle log costs a hundred short reads a second. Where
//! the system tells of files written, made and renamed, it ends a pause early: a writer that uses system
//! calls is noticed at once.
//!
//! Where the system tells of nothing, each look reads names and headers, too. There a follower that has been
//! idle for long pauses for an eighth of that time, up to [`PAUSE_MAX_UNTOLD`].

use std::time::{Duration, Instant};

/// The first pause after a batch.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// The longest pause: an idle log's next batch is handed over late by about this time at most.
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// The longest pause of a follower that is idle and told of nothing. 300 of them take less than a hundredth
/// of a core.
const PAUSE_MAX_UNTOLD: Duration = Duration::from_secs(4);
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
        if told { pause } else { pause.max((idle / IDLE_PART).min(PAUSE_MAX_UNTOLD)) }
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
    fn an_idle_follower_that_is_told_of_nothing_looks_rarely() {
        let hour = Duration::from_secs(3600);
        // A look takes some 100 us of a core, and 300 followers may take a hundredth of one.
        let allowed = hour.as_micros() / 100 / 300 / 100;
        let untold = u128::from(looks(hour, false));
        assert!(untold <= allowed, "{untold} looks an hour, of {allowed}");
        assert!(looks(hour, true) > 300_000, "one that is told only looks at the next frame");
    }

    #[test]
    fn a_pause_is_short_behind_a_batch() {
        for told in [true, false] {
            let mut pauses = Pauses::new();
            assert_eq!(pauses.next(Duration::ZERO, told), PAUSE_MIN);
            assert!(looks(Duration::from_millis(10), told) > 5, "{told}");
        }
    }
}
