//! The wall clock, which provides the timestamps in snapshots. Retention computes the age of a snapshot from them.
//!
//! The clock may be temporarily wrong and jump in either direction. Only the age of snapshots depends on it.

#[cfg(feature = "testing")]
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The offset of the simulated clock from the machine's clock, in milliseconds.
#[cfg(feature = "testing")]
static OFFSET_MS: AtomicI64 = AtomicI64::new(0);

/// Returns the number of milliseconds since the start of 1970 (UTC).
pub(crate) fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    #[cfg(feature = "testing")]
    let now = now.saturating_add_signed(OFFSET_MS.load(Ordering::Relaxed));
    now
}

/// Sets this process's clock ahead of the machine's clock by `offset_ms` milliseconds, to simulate a clock adjustment.
/// A negative value sets the clock back.
#[cfg(feature = "testing")]
pub fn jump_to(offset_ms: i64) {
    OFFSET_MS.store(offset_ms, Ordering::Relaxed);
}
