//! The calls of the driver that this library makes: of the simulated driver, which the process has loaded.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

type LaunchHostFunc = extern "C" fn(*mut c_void, extern "C" fn(*mut c_void), *mut c_void) -> u32;
type PriorityRange = unsafe extern "C" fn(*mut c_int, *mut c_int) -> u32;

/// Returns a function of the driver.
fn function<F: Copy>(name: &[u8]) -> F {
    static DRIVER: OnceLock<Library> = OnceLock::new();
    // SAFETY: the library is loaded already, under this name.
    let driver = DRIVER.get_or_init(|| unsafe { Library::new("libcuda.so") }.expect("a driver"));
    // SAFETY: the callers give the driver's signatures.
    *unsafe { driver.get::<F>(name) }.expect("a function of the driver")
}

/// Returns whether a context is current on this thread.
pub fn has_context() -> bool {
    let range: PriorityRange = function(b"cuCtxGetStreamPriorityRange");
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: the pointers are to live integers.
    unsafe { range(&mut least, &mut greatest) == 0 }
}

/// Queues a function on a stream. Returns whether the driver accepted it.
pub fn queue(stream: *mut c_void, work: extern "C" fn(*mut c_void), data: *mut c_void) -> bool {
    let launch: LaunchHostFunc = function(b"cuLaunchHostFunc");
    launch(stream, work, data) == 0
}
