//! Injected faults, and the number of live resources. Tests look these entry points up as they do CUDA's.

use std::sync::Mutex;

use crate::{context, memory, stream};

/// If this environment variable is set, each injected fault prints the name of the call that it makes fail.
const TELL: &str = "FAKE_DRIVER_TELL";

/// The fault to inject: the number of calls before it, and its error code.
struct Armed {
    left: u64,
    code: u32,
}

static ARMED: Mutex<Option<Armed>> = Mutex::new(None);

/// The name of the call that failed with the last injected fault.
static STRUCK: Mutex<&str> = Mutex::new("");

/// Error codes from this one on also destroy the context.
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

/// Makes the `nth` call from now on fail with `code`, once and without any effect. A code of at least
/// `LOST_MIN` also destroys the calling thread's context.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_arm(nth: u64, code: u32) {
    assert!(nth > 0, "calls are counted from 1");
    *ARMED.lock().unwrap() = Some(Armed { left: nth, code });
}

/// Destroys a device's context with a fault at once, whatever its streams are executing, as a faulty kernel
/// of another part of the process does.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_lose(device: u32, code: u32) {
    assert!(code >= LOST_MIN, "{code} leaves the context as it is");
    context::lose(device, code);
}

/// Disarms the fault; returns 1 if no call has failed with it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_disarm() -> u32 {
    u32::from(ARMED.lock().unwrap().take().is_some())
}

/// The calls that release a resource, and those that must precede such a call.
const GIVING: [&str; 5] =
    ["Free", "Destroy", "Unregister", "CtxPushCurrent", "ThreadExchangeStreamCaptureMode"];

/// Whether the call that failed last may have been part of releasing a resource.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_struck_giving_back() -> u32 {
    let name = *STRUCK.lock().unwrap();
    u32::from(GIVING.iter().any(|giving| name.contains(giving)))
}

/// Releases all resources of a device whose context is lost. Callers must no longer use any of them.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_forget(device: u32) {
    // An injected fault that came while no context was current has destroyed none.
    context::lose(device, LOST_MIN);
    stream::forget(device);
    memory::forget(device);
}

/// Returns the number of a device's streams, events and allocations that were not released.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_alive(device: u32) -> u64 {
    stream::alive(device) + memory::alive(device)
}

/// Returns the number of copies that went directly from one device to another.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_peer_copies() -> u64 {
    stream::peer_copies()
}

/// Makes all later registrations of host memory fail with `code`; 0 allows them again.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_refuse_registrations(code: u32) {
    memory::refuse_registrations(code);
}

/// Sets the number of devices that the process sees from now on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_driver_set_devices(count: u32) {
    context::set_devices(count);
}
