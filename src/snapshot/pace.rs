//! Floor 6. How fast background snapshots write, and how they are called off when the store closes.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::sync::{Condvar, Instant, Mutex};

/// A limit on bytes a second; commits have the rest of the disk.
#[derive(Default)]
pub(crate) struct Pace {
    bytes_per_second: Option<u64>,
    /// Whether the store closes.
    closing: Mutex<bool>,
    called_off: Condvar,
}

impl Pace {
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, ..Self::default() }
    }

    /// Waits until who began at `since` may have written so many bytes.
    ///
    /// # Errors
    /// [`Error::Closed`] if the store closes: what is being written is given up.
    pub fn keep(&self, since: Instant, bytes: u64) -> Result<()> {
        self.wait(self.bytes_per_second.map(|limit| since + time_for(bytes, limit)))
    }

    /// Waits until then; for good if there is no such time.
    ///
    /// # Errors
    /// [`Error::Closed`] if the store closes.
    pub fn rest(&self, until: Option<Instant>) -> Result<()> {
        self.wait(Some(until.unwrap_or_else(|| Instant::now() + LONGEST)))
    }

    fn wait(&self, until: Option<Instant>) -> Result<()> {
        let mut closing = self.closing.lock();
        while !*closing {
            let Some(until) = until.filter(|until| *until > Instant::now()) else { return Ok(()) };
            self.called_off.wait_until(&mut closing, until);
        }
        Err(Error::Closed)
    }

    /// Calls off what is being written, now and from now on.
    pub fn call_off(&self) {
        *self.closing.lock() = true;
        self.called_off.notify_all();
    }

    pub fn is_called_off(&self) -> bool {
        *self.closing.lock()
    }
}

/// Longer than any snapshot takes, and short enough to be added to any time.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// The time that so many bytes take at least.
fn time_for(bytes: u64, bytes_per_second: u64) -> Duration {
    Duration::try_from_secs_f64(bytes as f64 / bytes_per_second as f64).unwrap_or(LONGEST).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_their_time() {
        assert_eq!(time_for(0, 1), Duration::ZERO);
        assert_eq!(time_for(3 << 20, 1 << 20), Duration::from_secs(3));
        assert_eq!(time_for(1, 1 << 20).as_nanos(), 954);
        assert_eq!(time_for(u64::MAX, 1), LONGEST);
    }

    #[test]
    fn who_waits_for_the_pace_is_called_off() {
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
