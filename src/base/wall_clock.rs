//! The wall clock: the time that a snapshot names, and by which retention tells its age.
//!
//! It may be wrong for a while and jump in either direction. Nothing but the age of snapshots depends on it.

#[cfg(feature = "testing")]
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// How much later this process's clock is than the machine's, in milliseconds.
#[cfg(feature = "testing")]
static OFFSET_MS: AtomicI64 = AtomicI64::new(0);

/// The time in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    #[cfg(feature = "testing")]
    let now = now.saturating_add_signed(OFFSET_MS.load(Ordering::Relaxed));
    now
}

/// Sets this process's clock this much later than the machine's, or earlier, as a clock that is set does.
#[cfg(feature = "testing")]
pub fn jump_to(offset_ms: i64) {
    OFFSET_MS.store(offset_ms, Ordering::Relaxed);
}
