//! Driver calls that a program makes concurrently with a store on the same GPU: its own copies and functions, waits
//! that stall a stream, and graph captures.
//!
//! While a graph is captured from a stream, the stream only records its work. During a capture in global mode
//! (the strictest one), a call that may wait fails on every thread whose capture mode is not relaxed, and
//! invalidates the capture. The store must never make such a call.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::context::{self, Context};
use crate::memory::{self, Kind};
use crate::stream::{self, Work};
use crate::{call, call_in_context, code};

/// `CU_STREAM_WAIT_VALUE_GEQ`: the wait ends when the word is at least the value.
const AT_LEAST: c_uint = 0;

static GRAPHS: Mutex<BTreeMap<u64, Arc<Vec<Work>>>> = Mutex::new(BTreeMap::new());
static NEXT_GRAPH: AtomicU64 = AtomicU64::new(1);

fn graph_of(handle: *mut c_void) -> Result<Arc<Vec<Work>>, u32> {
    GRAPHS.lock().unwrap().get(&(handle as u64)).cloned().ok_or(code::INVALID_HANDLE)
}

fn new_graph(work: Arc<Vec<Work>>) -> *mut c_void {
    let handle = NEXT_GRAPH.fetch_add(1, Ordering::Relaxed);
    GRAPHS.lock().unwrap().insert(handle, work);
    handle as *mut c_void
}

fn forget_graph(handle: *mut c_void) -> Result<(), u32> {
    GRAPHS.lock().unwrap().remove(&(handle as u64)).map(drop).ok_or(code::INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> u32 {
    call(|| {
        // SAFETY: the handle is null or was created by this driver, which never destroys contexts.
        context::set_current(unsafe { context.cast::<Context>().as_ref() });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(made: *mut *mut c_void, flags: c_uint) -> u32 {
    // SAFETY: the caller upholds the contract of the called function.
    unsafe { stream::cuStreamCreateWithPriority(made, flags, c_int::default()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(handle: *mut c_void) -> u32 {
    call_in_context(|context| {
        stream::refuse_in_capture()?;
        stream::synchronize(context, handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitValue32_v2(
    handle: *mut c_void,
    address: u64,
    value: c_uint,
    flags: c_uint,
) -> u32 {
    call_in_context(|context| {
        if memory::kind_of(address, 4) != Some(Kind::Pinned) || flags != AT_LEAST {
            return Err(code::INVALID_VALUE);
        }
        stream::queue(context, handle, Work::WaitValue { address, value })
    })
}

/// Calls a function of the program after the work that is queued on the stream. Later work waits for the function.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(
    handle: *mut c_void,
    function: extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> u32 {
    call_in_context(|context| {
        stream::queue(context, handle, Work::HostFunction { function, data: data as u64 })
    })
}

/// Copies in the direction that follows from the two addresses.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(target: u64, source: u64, len: usize, handle: *mut c_void) -> u32 {
    call_in_context(|context| {
        if memory::kind_of(target, len).is_none() || memory::kind_of(source, len).is_none() {
            return Err(code::INVALID_VALUE);
        }
        stream::queue(context, handle, Work::Copy { target, source, len })
    })
}

/// Copies to the host. Waits for the default stream only, which never has queued work here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(target: *mut c_void, source: u64, len: usize) -> u32 {
    call_in_context(|_| {
        stream::refuse_in_capture()?;
        if memory::kind_of(source, len).is_none() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the source was checked above, and the caller passes a target of this length.
        unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target.cast(), len) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(target: u64, value: u8, len: usize) -> u32 {
    call_in_context(|_| {
        stream::refuse_in_capture()?;
        if memory::kind_of(target, len).is_none() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the range was checked above.
        unsafe { (target as *mut u8).write_bytes(value, len) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(handle: *mut c_void, mode: c_uint) -> u32 {
    call_in_context(|_| stream::begin_capture(handle, mode))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(handle: *mut c_void, graph: *mut *mut c_void) -> u32 {
    call_in_context(|_| {
        let work = stream::end_capture(handle)?;
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *graph = new_graph(Arc::new(work)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    executable: *mut *mut c_void,
    graph: *mut c_void,
    _flags: c_ulonglong,
) -> u32 {
    call_in_context(|_| {
        let work = graph_of(graph)?;
        // SAFETY: the API requires the caller to pass valid pointers.
        unsafe { *executable = new_graph(work) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(executable: *mut c_void, handle: *mut c_void) -> u32 {
    call_in_context(|context| {
        graph_of(executable)?.iter().try_for_each(|work| stream::queue(context, handle, work.clone()))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: *mut c_void) -> u32 {
    call_in_context(|_| forget_graph(graph))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(executable: *mut c_void) -> u32 {
    call_in_context(|_| forget_graph(executable))
}
