//! Injected faults. Tests look these functions up as they do NIXL's.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The function of which a call fails, the number of its calls until then, and the status.
static ARMED: Mutex<Option<(String, u64, c_int)>> = Mutex::new(None);
/// The number of status calls that a transfer remains in flight; `u64::MAX` for ever.
static DELAY: AtomicU64 = AtomicU64::new(0);
/// The number of transfers of which a bit is still to be flipped.
static FLIPS: AtomicU64 = AtomicU64::new(0);
/// The number of objects that were not freed.
static ALIVE: AtomicU64 = AtomicU64::new(0);

/// Returns the injected error if this is the call to fail.
pub fn strike(name: &str) -> Result<(), c_int> {
    let mut armed = ARMED.lock().unwrap();
    let Some((armed_name, left, status)) = armed.as_mut() else { return Ok(()) };
    if armed_name != name {
        return Ok(());
    }
    *left -= 1;
    if *left > 0 {
        return Ok(());
    }
    let status = *status;
    *armed = None;
    Err(status)
}

pub fn delay() -> u64 {
    DELAY.load(Ordering::SeqCst)
}

/// Returns whether a bit of this transfer is to be flipped.
pub fn flips() -> bool {
    FLIPS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

pub fn born() {
    ALIVE.fetch_add(1, Ordering::SeqCst);
}

pub fn freed() {
    ALIVE.fetch_sub(1, Ordering::SeqCst);
}

/// Makes the `nth` call from now on of a function fail with `status`, without any effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_nixl_arm(name: *const c_char, nth: u64, status: c_int) {
    assert!(nth > 0, "calls are counted from 1");
    // SAFETY: the tests give a string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().expect("a name").to_owned();
    *ARMED.lock().unwrap() = Some((name, nth, status));
}

/// Disarms the fault; returns 1 if no call has failed with it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_disarm() -> u32 {
    u32::from(ARMED.lock().unwrap().take().is_some())
}

/// Keeps transfers in flight for a number of status calls; `u64::MAX` for ever.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_delay(calls: u64) {
    DELAY.store(calls, Ordering::SeqCst);
}

/// Flips a bit in each of the next transfers.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_flip(transfers: u64) {
    FLIPS.store(transfers, Ordering::SeqCst);
}

/// Returns the number of objects that were not freed.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_alive() -> u64 {
    ALIVE.load(Ordering::SeqCst)
}
