//! Limits the rate of background reads and writes. The limit is suspended while a caller waits for the background work.
//! Closing the store cancels the work.

use std::time::Duration;

use crate::base::sync::{Condvar, Instant, Mutex};
use crate::error::{Error, Result};

/// A limit in bytes per second on background work, so that commits get the remaining disk bandwidth.
#[derive(Default)]
pub(crate) struct Pace {
    bytes_per_second: Option<u64>,
    state: Mutex<PaceState>,
    changed: Condvar,
}

#[derive(Default)]
struct PaceState {
    /// Whether the store is closing.
    is_closing: bool,
    /// The number of callers that wait for the background work. While this count is greater than 0, the rate limit is
    /// suspended.
    callers: usize,
}

/// A guard that suspends the rate limit while its owner waits for the background work.
pub(crate) struct UrgentWaitGuard<'a>(&'a Pace);

impl Drop for UrgentWaitGuard<'_> {
    fn drop(&mut self) {
        self.0.state.lock().callers -= 1;
    }
}

impl Pace {
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, ..Self::default() }
    }

    /// Suspends the rate limit until the returned guard is dropped.
    pub fn expedite(&self) -> UrgentWaitGuard<'_> {
        self.state.lock().callers += 1;
        self.changed.notify_all();
        UrgentWaitGuard(self)
    }

    /// Waits until a transfer of `bytes` bytes that began at `since` is within the rate limit. Returns early if
    /// a caller waits for the background work.
    ///
    /// # Errors
    /// [`Error::Closed`] if the store closes. The caller must then abandon the background work.
    pub fn keep(&self, since: Instant, bytes: u64) -> Result<()> {
        self.wait(self.bytes_per_second.map(|limit| since + time_for(bytes, limit)), |state| {
            state.callers > 0
        })
    }

    /// Waits until the time `until`. If `until` is `None`, waits until the store closes or [`LONGEST`] has
    /// passed.
    pub fn rest(&self, until: Option<Instant>) -> Result<()> {
        self.wait(Some(until.unwrap_or_else(|| Instant::now() + LONGEST)), |_| false)
    }

    fn wait(&self, until: Option<Instant>, is_over: impl Fn(&PaceState) -> bool) -> Result<()> {
        let mut state = self.state.lock();
        while !state.is_closing {
            let until = until.filter(|until| *until > Instant::now() && !is_over(&state));
            let Some(until) = until else { return Ok(()) };
            self.changed.wait_until(&mut state, until);
        }
        Err(Error::Closed)
    }

    /// Cancels all current and future background work.
    pub fn call_off(&self) {
        self.state.lock().is_closing = true;
        self.changed.notify_all();
    }

    pub fn is_called_off(&self) -> bool {
        self.state.lock().is_closing
    }
}

/// The longest wait for the rate limit. The value exceeds the duration of any snapshot, and can be added to any
/// `Instant` without overflow.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Returns the minimum duration of a transfer of `bytes` bytes at the given rate, at most [`LONGEST`].
fn time_for(bytes: u64, bytes_per_second: u64) -> Duration {
    Duration::try_from_secs_f64(bytes as f64 / bytes_per_second as f64).unwrap_or(LONGEST).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_take_time_by_length() {
        assert_eq!(time_for(0, 1), Duration::ZERO);
        assert_eq!(time_for(3 << 20, 1 << 20), Duration::from_secs(3));
        assert_eq!(time_for(1, 1 << 20).as_nanos(), 954);
        assert_eq!(time_for(u64::MAX, 1), LONGEST);
    }

    #[test]
    fn waiting_caller_lifts_rate_limit() {
        let pace = Pace::new(Some(1));
        let began = Instant::now();
        std::thread::scope(|scope| {
            let paced = scope.spawn(|| pace.keep(began, u64::MAX / 2));
            let _hurry = pace.expedite();
            paced.join().unwrap().unwrap();
            pace.keep(began, u64::MAX / 2).unwrap();
        });
        assert_eq!(pace.state.lock().callers, 0, "no caller waits any more");
    }

    #[test]
    fn pace_wait_is_cancelled() {
        let pace = Pace::new(Some(1));
        let began = Instant::now();
        assert!(pace.keep(began, 0).is_ok());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pace.keep(began, u64::MAX / 2));
            pace.call_off();
            assert!(matches!(waits.join().unwrap(), Err(Error::Closed)));
        });
        assert!(matches!(pace.keep(began, 0), Err(Error::Closed)));
    }
}
