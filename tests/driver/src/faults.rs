//! Arranged faults, and the count of what is alive. Tests find these entry points among CUDA's.

use std::sync::Mutex;

use crate::{context, memory, stream};

/// If this variable is set, faults tell where they strike.
const TELL: &str = "FAKE_DRIVER_TELL";

/// The call that fails, counted down, and its code.
struct Armed {
    left: u64,
    code: u32,
}

static ARMED: Mutex<Option<Armed>> = Mutex::new(None);

/// The name of the call that the last fault struck.
static STRUCK: Mutex<&str> = Mutex::new("");

/// Codes from here on take the context with them.
const LOST_MIN: u32 = 700;

/// Counts a call, and fails it if its turn has come. `name` holds the name of its entry point.
#[track_caller]
pub fn strike(name: &'static str) -> Result<(), u32> {
    let mut armed = ARMED.lock().unwrap();
    let Some(fault) = armed.as_mut() else { return Ok(()) };
    fault.left -= 1;
    if fault.left > 0 {
        return Ok(());
    }
    let code = fault.code;
    if std::env::var_os(TELL).is_some() {
        eprintln!("the fault {code} strikes {name} at {}", std::panic::Location::caller());
    }
    *armed = None;
    drop(armed);
    *STRUCK.lock().unwrap() = name;
    if code >= LOST_MIN
        && let Ok(context) = context::current()
    {
        context.lose(code);
    }
    Err(code)
}

/// Makes the `nth` call from now on return `code`, once, and do nothing. A code of a fault takes the calling
/// thread's context with it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_arm(nth: u64, code: u32) {
    assert!(nth > 0, "calls are counted from 1");
    *ARMED.lock().unwrap() = Some(Armed { left: nth, code });
}

/// Takes a device's context with a fault now, whatever its streams are at: like a bad kernel that another
/// part of the process launched.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_lose(device: u32, code: u32) {
    assert!(code >= LOST_MIN, "{code} leaves the context as it is");
    context::lose(device, code);
}

/// Takes the fault back; returns 1 if it had not struck.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_disarm() -> u32 {
    u32::from(ARMED.lock().unwrap().take().is_some())
}

/// The calls that give something back, and those that must go before one that does.
const GIVING: [&str; 5] =
    ["Free", "Destroy", "Unregister", "CtxPushCurrent", "ThreadExchangeStreamCaptureMode"];

/// Whether the call that the last fault struck may have been on the way to give something back.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_struck_giving_back() -> u32 {
    let name = *STRUCK.lock().unwrap();
    u32::from(GIVING.iter().any(|giving| name.contains(giving)))
}

/// Takes back the leftovers of a device whose context is lost. No caller may use any of it any more.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_forget(device: u32) {
    // A fault that struck while no context was current took none.
    context::lose(device, LOST_MIN);
    stream::forget(device);
    memory::forget(device);
}

/// The number of a device's streams, events and allocations that are alive.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_alive(device: u32) -> u64 {
    stream::alive(device) + memory::alive(device)
}

/// The number of copies that went straight from one device to another.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_peer_copies() -> u64 {
    stream::peer_copies()
}

/// Has registrations of memory refused with this code from now on; with 0 none is.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_refuse_registrations(code: u32) {
    memory::refuse_registrations(code);
}

/// Lets the process see `count` devices from now on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_set_devices(count: u32) {
    context::set_devices(count);
}
