//! The wall clock: the time that a snapshot names, and by which retention tells its age.
//!
//! It may be wrong for a while and jump in either direction. Nothing but the age of snapshots depends on it.

#[cfg(feature = "testing")]
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// How far this process's clock is ahead of the machine's, in milliseconds.
#[cfg(feature = "testing")]
static AHEAD_MS: AtomicI64 = AtomicI64::new(0);

/// The time in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    #[cfg(feature = "testing")]
    let now = now.saturating_add_signed(AHEAD_MS.load(Ordering::Relaxed));
    now
}

/// Sets this process's clock this far ahead of the machine's, or behind it, as a clock that is set does.
#[cfg(feature = "testing")]
pub fn jump_to(ahead_ms: i64) {
    AHEAD_MS.store(ahead_ms, Ordering::Relaxed);
}
