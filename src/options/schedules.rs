//! Schedules of the snapshots and scrubs that run in the background.

use std::time::Duration;

use super::invalid;
use crate::error::Result;

/// The schedule and the rate limit of background snapshots.
///
/// Log bytes and time are counted from the beginning of the last snapshot, whether it was taken in the background or by
/// [`Store::snapshot`](crate::Store::snapshot). No snapshot is taken if no batch was committed since then.
///
/// ```
/// use std::time::Duration;
/// use remanent::Options;
/// use remanent::options::SnapshotSchedule;
/// let schedule = SnapshotSchedule::new().log_bytes(1 << 30).interval(Duration::from_secs(600));
/// let store = Options::new().snapshots(schedule).open_temporary()?;
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotSchedule {
    /// The number of log bytes after which a snapshot is taken; `None` disables this trigger.
    pub log_bytes: Option<u64>,
    /// The time after which a snapshot is taken; `None` disables this trigger.
    pub interval: Option<Duration>,
    /// The maximum number of bytes per second that a background snapshot writes; `None` sets no limit.
    pub bytes_per_second: Option<u64>,
}

impl Default for SnapshotSchedule {
    fn default() -> Self {
        Self { log_bytes: Some(256 << 20), interval: Some(Duration::from_secs(60)), bytes_per_second: None }
    }
}

impl SnapshotSchedule {
    /// Returns the default schedule.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a schedule without background snapshots, for programs that call
    /// [`Store::snapshot`](crate::Store::snapshot) themselves.
    #[must_use]
    pub fn never() -> Self {
        Self { log_bytes: None, interval: None, bytes_per_second: None }
    }

    /// Sets the number of log bytes after which a snapshot is taken. `None` disables this trigger. Default: 256 MiB.
    ///
    /// Reduce it for a faster recovery, because it bounds the amount of log to replay; increase it to write less.
    /// Images written before their batch was logged are counted.
    #[must_use]
    pub fn log_bytes(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.log_bytes = bytes.into();
        self
    }

    /// Sets the time after which a snapshot is taken. `None` disables this trigger. Default: 60 seconds.
    ///
    /// Increase it to write less; reduce it if the log is small but its batches are slow to replay.
    #[must_use]
    pub fn interval(mut self, interval: impl Into<Option<Duration>>) -> Self {
        self.interval = interval.into();
        self
    }

    /// Limits how many bytes per second a background snapshot writes. Default: no limit.
    ///
    /// Set it if snapshots slow down other users of the disk. A snapshot that the caller waits for is not
    /// limited. Whatever the limit, a background snapshot runs on a single thread and uses at most one core.
    #[must_use]
    pub fn bytes_per_second(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.bytes_per_second = bytes.into();
        self
    }

    /// Returns whether any trigger is set.
    pub(crate) fn is_enabled(&self) -> bool {
        self.log_bytes.is_some() || self.interval.is_some()
    }

    /// Returns an error for a rate of 0, at which no snapshot would end.
    pub(super) fn check(&self) -> Result<()> {
        check_rate("snapshots.bytes_per_second", self.bytes_per_second)
    }
}

/// The schedule and the rate limit of background scrubs.
///
/// A background scrub reads the data on disk as [`Store::scrub`](crate::Store::scrub) does, so that damage is
/// found while the page is still in memory and can be repaired from there.
///
/// ```
/// use std::time::Duration;
/// use remanent::Options;
/// use remanent::options::ScrubSchedule;
/// let weekly = ScrubSchedule::new().interval(Duration::from_secs(7 * 24 * 3600));
/// let store = Options::new().scrubs(weekly).open_temporary()?;
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScrubSchedule {
    /// The time between scrubs; `None` disables them.
    pub interval: Option<Duration>,
    /// The maximum number of bytes per second that a background scrub reads; `None` sets no limit.
    pub bytes_per_second: Option<u64>,
}

impl Default for ScrubSchedule {
    fn default() -> Self {
        Self { interval: Some(Duration::from_secs(24 * 3600)), bytes_per_second: Some(64 << 20) }
    }
}

impl ScrubSchedule {
    /// Returns the default schedule.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the time between scrubs. `None` disables them. Default: 24 hours.
    ///
    /// Reduce it to detect damage sooner; disable scrubs on storage that verifies its own data. The time is
    /// counted from the open, or from the beginning of the last background scrub.
    #[must_use]
    pub fn interval(mut self, interval: impl Into<Option<Duration>>) -> Self {
        self.interval = interval.into();
        self
    }

    /// Limits how many bytes per second a background scrub reads. `None` sets no limit. Default: 64 MiB, at
    /// which 1 TiB takes four and a half hours.
    ///
    /// Increase it if a scrub takes longer than its interval; reduce it if scrubs slow down other users of the
    /// disk.
    #[must_use]
    pub fn bytes_per_second(mut self, bytes: impl Into<Option<u64>>) -> Self {
        self.bytes_per_second = bytes.into();
        self
    }

    /// Returns an error for a rate of 0, at which no data would be read.
    pub(super) fn check(&self) -> Result<()> {
        check_rate("scrubs.bytes_per_second", self.bytes_per_second)
    }
}

fn check_rate(option: &'static str, bytes_per_second: Option<u64>) -> Result<()> {
    match bytes_per_second {
        Some(0) => invalid(option, "must be greater than 0".to_owned()),
        _ => Ok(()),
    }
}
