//! Injected faults. Tests look these functions up as they do NCCL's.

use std::ffi::{CStr, c_char};
use std::sync::Mutex;

use crate::group;

/// The function of which a call fails, the number of its calls until then, and the code.
static ARMED: Mutex<Option<(String, u64, u32)>> = Mutex::new(None);

/// Returns the injected error if this is the call to fail.
pub fn strike(name: &str) -> Result<(), u32> {
    let mut armed = ARMED.lock().unwrap();
    let Some((armed_name, left, code)) = armed.as_mut() else { return Ok(()) };
    if armed_name != name {
        return Ok(());
    }
    *left -= 1;
    if *left > 0 {
        return Ok(());
    }
    let code = *code;
    *armed = None;
    Err(code)
}

/// Makes the `nth` call from now on of a function fail with `code`, without any effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_nccl_arm(name: *const c_char, nth: u64, code: u32) {
    assert!(nth > 0, "calls are counted from 1");
    // SAFETY: the tests give a string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().expect("a name").to_owned();
    *ARMED.lock().unwrap() = Some((name, nth, code));
}

/// Disarms the fault; returns 1 if no call has failed with it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nccl_disarm() -> u32 {
    u32::from(ARMED.lock().unwrap().take().is_some())
}

/// Sets the asynchronous error of one rank of each communicator; code 0 ends it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nccl_set_error(rank: u32, code: u32) {
    group::set_error((code != 0).then_some((rank, code)));
}

/// Makes the calls of one rank never complete; `u32::MAX` for none.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nccl_stall(rank: u32) {
    group::stall(rank);
}

/// Returns the number of communicators that were not freed.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nccl_alive() -> u64 {
    group::alive()
}
