//! Injected faults, and counters of live resources. Tests look up these entry points like those of CUDA.

use std::sync::Mutex;

use crate::{context, memory, stream};

/// If this environment variable is set, each injected fault prints the name of the call that fails.
const TELL: &str = "FAKE_DRIVER_TELL";

/// The fault to inject: the number of calls before the fault, and its error code.
struct Armed {
    left: u64,
    code: u32,
}

static ARMED: Mutex<Option<Armed>> = Mutex::new(None);

/// The name of the call that failed with the most recent injected fault.
static STRUCK: Mutex<&str> = Mutex::new("");

/// Error codes from this value on also destroy the context.
const LOST_MIN: u32 = 700;

/// Counts a call of the entry point `name`, and returns the injected error if this is the call to fail.
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

/// Makes the `nth` call from now on fail with `code`. The fault occurs once, and the call has no other
/// effect. A code of at least `LOST_MIN` also destroys the calling thread's context.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_arm(nth: u64, code: u32) {
    assert!(nth > 0, "calls are counted from 1");
    *ARMED.lock().unwrap() = Some(Armed { left: nth, code });
}

/// Destroys a device's context with a fault immediately, whatever its streams are executing. A faulty kernel
/// of another part of the process has the same effect.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_lose(device: u32, code: u32) {
    assert!(code >= LOST_MIN, "{code} leaves the context as it is");
    context::lose(device, code);
}

/// Disarms the fault. Returns 1 if no call has failed with this fault.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_disarm() -> u32 {
    u32::from(ARMED.lock().unwrap().take().is_some())
}

/// Name parts of the calls that release a resource, or that must precede such a call.
const GIVING: [&str; 5] =
    ["Free", "Destroy", "Unregister", "CtxPushCurrent", "ThreadExchangeStreamCaptureMode"];

/// Returns 1 if the call that failed last may have been part of releasing a resource.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_struck_giving_back() -> u32 {
    let name = *STRUCK.lock().unwrap();
    u32::from(GIVING.iter().any(|giving| name.contains(giving)))
}

/// Releases all resources of a device whose context is lost. Callers must not use these resources afterwards.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_forget(device: u32) {
    // A fault that was injected while no context was current destroyed none.
    context::lose(device, LOST_MIN);
    stream::forget(device);
    memory::forget(device);
}

/// Returns the number of a device's streams, events and allocations that have not been released.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_alive(device: u32) -> u64 {
    stream::alive(device) + memory::alive(device)
}

/// Returns the number of copies made directly from one device to another.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_peer_copies() -> u64 {
    stream::peer_copies()
}

/// Makes all later registrations of host memory fail with `code`, or succeed again if `code` is 0.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_refuse_registrations(code: u32) {
    memory::refuse_registrations(code);
}

/// Sets the number of devices that the process sees from now on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_set_devices(count: u32) {
    context::set_devices(count);
}
