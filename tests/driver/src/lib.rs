//! A CUDA driver without a GPU: the entry points that `src/device/cuda` calls, with CUDA's signatures.
//!
//! Streams are threads that run late, at random; device memory is host memory full of junk; kernels are the
//! same `.cu` files, run on the CPU. A call can be made to fail (`faults`), and resources that were not given
//! back can be counted, so that every error path of the real device is walked without a GPU.
//!
//! A call that breaks the API's rules is refused as the real driver refuses it, or ends the process with a
//! word on why.

#![allow(non_snake_case, reason = "the names are CUDA's")]
#![allow(clippy::missing_safety_doc, reason = "the driver API's own terms hold for all entry points")]

mod caller;
mod context;
mod faults;
mod memory;
mod module;
mod stream;

/// The results that calls return.
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

/// The result of a call once it was let in: nothing, or an error's code.
type Done = Result<(), u32>;

/// Runs a call: counted, failed if it is its turn, and refused if the context is lost.
#[track_caller]
fn call<W: FnOnce() -> Done>(work: W) -> u32 {
    // A closure's type is named after the entry point that it is written in.
    let result = faults::strike(std::any::type_name::<W>()).and_then(|()| work());
    result.err().unwrap_or(0)
}

/// Runs a call that needs a current context that is not lost.
#[track_caller]
fn call_in_context<W: FnOnce(&'static context::Context) -> Done>(work: W) -> u32 {
    call(|| work(context::current()?))
}
