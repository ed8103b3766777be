//! NCCL without GPUs: the functions that `src/device/cuda/nccl` calls, with NCCL's signatures.
//!
//! Ranks are communicators of one process. An operation is a function that each rank's stream calls. The function waits
//! until all ranks have called theirs, and the last one moves the bytes. The module `faults` makes a call fail, reports
//! an asynchronous error, or stalls a rank, and counts the communicators that were not freed.
//!
//! A call that breaks the library's rules aborts the process with a message.

#![allow(non_snake_case, reason = "the names are NCCL's")]
#![allow(clippy::missing_safety_doc, reason = "NCCL's own terms hold for all functions")]

mod bytes;
mod driver;
mod faults;
mod group;

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use bytes::{Call, Kind};
use group::{Communicator, Id};

/// Result codes.
mod code {
    pub const SUCCESS: u32 = 0;
    pub const CUDA: u32 = 1;
    pub const INVALID_ARGUMENT: u32 = 4;
    pub const IN_PROGRESS: u32 = 7;
}

/// The version that this library reports.
const VERSION: c_int = 22_803;

/// How a communicator is created, up to the fields that this library reads.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// Runs a call unless it is to fail. `work` returns the call's result code.
fn call(name: &str, work: impl FnOnce() -> u32) -> u32 {
    faults::strike(name).map_or_else(|code| code, |()| work())
}

/// Returns the communicator of a handle.
///
/// # Safety
/// The handle is that of a live communicator.
unsafe fn of(handle: *mut c_void) -> Arc<Communicator> {
    assert!(!handle.is_null(), "no communicator");
    // SAFETY: handles come from `Arc::into_raw`, and this one is live.
    unsafe { Arc::increment_strong_count(handle.cast::<Communicator>()) };
    // SAFETY: the count was increased for this value.
    unsafe { Arc::from_raw(handle.cast::<Communicator>()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> u32 {
    call("ncclGetVersion", || {
        // SAFETY: NCCL's terms.
        unsafe { *version = VERSION };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> u32 {
    call("ncclGetUniqueId", || {
        // SAFETY: NCCL's terms.
        unsafe { *id = group::new_id() };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    c"a text of the fake library".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    communicator: *mut *mut c_void,
    ranks: c_int,
    id: Id,
    rank: c_int,
    config: *mut Config,
) -> u32 {
    call("ncclCommInitRankConfig", || {
        // SAFETY: NCCL's terms.
        let Config { size, magic, version, blocking } = unsafe { config.read() };
        if magic != 0xCAFE_BEEF || size < size_of::<Config>() || version < 21_400 || blocking != 0 {
            return code::INVALID_ARGUMENT;
        }
        if !driver::has_context() {
            return code::CUDA;
        }
        let Some(joined) = group::join(id, rank as u32, ranks as u32) else { return code::INVALID_ARGUMENT };
        // SAFETY: NCCL's terms.
        unsafe { *communicator = Arc::into_raw(joined).cast_mut().cast() };
        code::IN_PROGRESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(communicator: *mut c_void, code: *mut u32) -> u32 {
    call("ncclCommGetAsyncError", || {
        // SAFETY: NCCL's terms.
        let state = unsafe { of(communicator) }.state();
        // SAFETY: the same.
        unsafe { *code = state };
        code::SUCCESS
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(communicator: *mut c_void) -> u32 {
    // SAFETY: NCCL's terms.
    call("ncclCommFinalize", || unsafe { of(communicator) }.finalize())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(communicator: *mut c_void) -> u32 {
    // SAFETY: NCCL's terms: the handle is not used again.
    call("ncclCommDestroy", || unsafe { Arc::from_raw(communicator.cast::<Communicator>()) }.destroy())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(communicator: *mut c_void) -> u32 {
    call("ncclCommAbort", || {
        // SAFETY: NCCL's terms: the handle is not used again.
        unsafe { Arc::from_raw(communicator.cast::<Communicator>()) }.abort();
        code::SUCCESS
    })
}

/// Queues an operation on a stream of a rank.
///
/// # Safety
/// The communicator is live.
unsafe fn queue(name: &str, communicator: *mut c_void, stream: *mut c_void, of_rank: Call) -> u32 {
    call(name, || {
        if !of_rank.is_supported() {
            return code::INVALID_ARGUMENT;
        }
        // SAFETY: the caller's promise.
        unsafe { of(communicator) }.queue(stream, of_rank)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    reduction: c_int,
    communicator: *mut c_void,
    stream: *mut c_void,
) -> u32 {
    let kind = Kind::AllReduce { reduction };
    let of_rank = Call { kind, source: source as u64, target: target as u64, count, element };
    // SAFETY: NCCL's terms.
    unsafe { queue("ncclAllReduce", communicator, stream, of_rank) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    reduction: c_int,
    communicator: *mut c_void,
    stream: *mut c_void,
) -> u32 {
    let kind = Kind::ReduceScatter { reduction };
    let of_rank = Call { kind, source: source as u64, target: target as u64, count, element };
    // SAFETY: NCCL's terms.
    unsafe { queue("ncclReduceScatter", communicator, stream, of_rank) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    communicator: *mut c_void,
    stream: *mut c_void,
) -> u32 {
    let of_rank =
        Call { kind: Kind::AllGather, source: source as u64, target: target as u64, count, element };
    // SAFETY: NCCL's terms.
    unsafe { queue("ncclAllGather", communicator, stream, of_rank) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    root: c_int,
    communicator: *mut c_void,
    stream: *mut c_void,
) -> u32 {
    let kind = Kind::Broadcast { root: root as u32 };
    let of_rank = Call { kind, source: source as u64, target: target as u64, count, element };
    // SAFETY: NCCL's terms.
    unsafe { queue("ncclBroadcast", communicator, stream, of_rank) }
}
