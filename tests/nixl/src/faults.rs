//! Injected faults. Tests look up these functions like those of NIXL.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::network;

/// The function of which a call will fail, the number of its calls until then, and the status that the call returns.
static ARMED: Mutex<Option<(String, u64, c_int)>> = Mutex::new(None);
/// The number of status calls for which a transfer stays in flight. `u64::MAX` means forever.
static DELAY: AtomicU64 = AtomicU64::new(0);
/// The number of further transfers in which a bit is flipped.
static FLIPS: AtomicU64 = AtomicU64::new(0);
/// The number of objects that were created and not freed.
static ALIVE: AtomicU64 = AtomicU64::new(0);

/// Returns the injected status if this call must fail.
pub fn injected_fault(name: &str) -> Result<(), c_int> {
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

/// Returns true if a bit of this transfer must be flipped.
pub fn flips() -> bool {
    FLIPS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

pub fn object_created() {
    ALIVE.fetch_add(1, Ordering::SeqCst);
}

pub fn object_freed() {
    ALIVE.fetch_sub(1, Ordering::SeqCst);
}

/// Makes the `nth` call of a function from now on return `status` without any other effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_nixl_arm(name: *const c_char, nth: u64, status: c_int) {
    assert!(nth > 0, "calls are counted from 1");
    // SAFETY: the tests give a string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().expect("a name").to_owned();
    *ARMED.lock().unwrap() = Some((name, nth, status));
}

/// Removes the injected fault. Returns 1 if no call has failed because of it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_disarm() -> u32 {
    u32::from(ARMED.lock().unwrap().take().is_some())
}

/// Keeps each transfer in flight for a number of status calls. `u64::MAX` means forever.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_delay(calls: u64) {
    DELAY.store(calls, Ordering::SeqCst);
}

/// Flips a bit in each of the next `transfers` transfers.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_flip(transfers: u64) {
    FLIPS.store(transfers, Ordering::SeqCst);
}

/// Returns the number of objects that were created and not freed.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_alive() -> u64 {
    ALIVE.load(Ordering::SeqCst)
}

/// Returns the number of agents with a progress thread.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nixl_progress_threads() -> u64 {
    network::progress_threads()
}
