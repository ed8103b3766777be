//! A CUDA driver without a GPU: the entry points that `src/device/cuda` calls, with CUDA's signatures.
//!
//! Streams are threads that execute their work after random delays. Device memory is host memory that is
//! initially filled with junk, and kernels are the same `.cu` files, compiled for the CPU. The module
//! `faults` makes a call fail, and counts the resources that have not been released. Tests thus reach every
//! error path of the device without a GPU.
//!
//! A call that breaks the API's rules returns the real driver's error, or aborts the process with a message.

#![allow(non_snake_case, reason = "the names are CUDA's")]
#![allow(clippy::missing_safety_doc, reason = "the driver API's own terms hold for all entry points")]

mod caller;
mod context;
mod faults;
mod memory;
mod module;
mod stream;

/// Error codes of the driver API.
mod code {
    pub const INVALID_VALUE: u32 = 1;
    pub const OUT_OF_MEMORY: u32 = 2;
    pub const INVALID_DEVICE: u32 = 101;
    pub const INVALID_IMAGE: u32 = 200;
    pub const INVALID_CONTEXT: u32 = 201;
    pub const PEER_UNSUPPORTED: u32 = 217;
    pub const INVALID_HANDLE: u32 = 400;
    pub const NOT_FOUND: u32 = 500;
    pub const NOT_READY: u32 = 600;
    pub const ILLEGAL_ADDRESS: u32 = 700;
    pub const PEER_ALREADY: u32 = 704;
    pub const HOST_ALREADY_REGISTERED: u32 = 712;
    pub const CAPTURE_UNSUPPORTED: u32 = 900;
    pub const CAPTURE_INVALIDATED: u32 = 901;
}

/// The result of a call: success, or the driver's error code.
type Done = Result<(), u32>;

/// Counts a call and runs it. Returns an error instead if the call is selected to fail or the context is
/// lost.
#[track_caller]
fn call<W: FnOnce() -> Done>(work: W) -> u32 {
    // The type name of a closure contains the name of the enclosing function, which is the entry point.
    let result = faults::strike(std::any::type_name::<W>()).and_then(|()| work());
    result.err().unwrap_or(0)
}

/// Runs a call that needs a current, valid context.
#[track_caller]
fn call_in_context<W: FnOnce(&'static context::Context) -> Done>(work: W) -> u32 {
    call(|| work(context::current()?))
}
