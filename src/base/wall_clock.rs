//! The wall clock, for the creation times of snapshots. Retention computes the age of a snapshot from its creation
//! time.
//!
//! The clock may be temporarily wrong and jump in either direction. Only the age of snapshots depends on the clock.

#[cfg(feature = "testing")]
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The offset of the simulated clock from the machine's clock, in milliseconds.
#[cfg(feature = "testing")]
static OFFSET_MS: AtomicI64 = AtomicI64::new(0);

/// Returns the number of milliseconds since the Unix epoch.
pub(crate) fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    #[cfg(feature = "testing")]
    let now = now.saturating_add_signed(OFFSET_MS.load(Ordering::Relaxed));
    now
}

/// Sets this process's clock to the machine's clock plus `offset_ms` milliseconds, to simulate a clock adjustment.
#[cfg(feature = "testing")]
pub fn jump_to(offset_ms: i64) {
    OFFSET_MS.store(offset_ms, Ordering::Relaxed);
}
