//! The wall clock: the source of the timestamps in snapshots, from which retention computes their age.
//!
//! The clock may be wrong temporarily and jump in either direction. Only the age of snapshots depends on it.

#[cfg(feature = "testing")]
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The offset of this process's clock from the machine's, in milliseconds.
#[cfg(feature = "testing")]
static OFFSET_MS: AtomicI64 = AtomicI64::new(0);

/// Returns the time in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    #[cfg(feature = "testing")]
    let now = now.saturating_add_signed(OFFSET_MS.load(Ordering::Relaxed));
    now
}

/// Sets this process's clock ahead of the machine's by `offset_ms`, or behind if negative, to simulate a
/// clock adjustment.
#[cfg(feature = "testing")]
pub fn jump_to(offset_ms: i64) {
    OFFSET_MS.store(offset_ms, Ordering::Relaxed);
}
