//! Streams of the caller's: the code that vouches for a handle, and the streams that are refused.
//!
//! The store never queues work on them. It records a stream's present point, or tells it to wait for a lane.
//! Both are refused while a graph is being captured from the stream: a captured wait would be a part of the
//! caller's graph, and be waited for at every launch of it.

use std::ffi::c_uint;

use super::context::{Context, ContextGuard};
use super::driver::CUstream;
use super::errors::Code;
use super::event::CudaEvent;
use crate::device::RawStream;
use crate::error::{Error, Result};

impl RawStream {
    /// The CUDA stream with this handle. 0 and 1 are the default stream; 2, the default stream of each
    /// thread, is that of the thread that calls the store with it.
    ///
    /// # Safety
    /// The handle is that of a stream of this process, made in the primary context of the GPU that holds the
    /// pages, and the stream lives as long as anything is called with it. A lease calls with it once more
    /// when it ends.
    #[must_use]
    pub unsafe fn from_cuda(handle: u64) -> Self {
        Self(handle)
    }
}

/// The handle, as the driver takes it.
pub(super) fn raw(stream: RawStream) -> CUstream {
    stream.handle() as CUstream
}

/// Refuses a stream from which a graph is being captured.
///
/// # Errors
/// `StreamRefused`, a device error.
pub(super) fn check(context: &Context, entered: &ContextGuard<'_>, stream: RawStream) -> Result<()> {
    let mut status: c_uint = 0;
    // SAFETY: the context is current, the pointer is to a live integer, and the stream is vouched for by the
    // maker of its `RawStream`.
    let asked = unsafe { entered.capture_status(raw(stream), &mut status) };
    asked.map_err(|code| refused(context, stream, code))?;
    // The capture is active, or invalidated and not ended yet.
    if status == 0 { Ok(()) } else { Err(captured(stream)) }
}

/// The point at which a caller's stream is now.
///
/// # Errors
/// `StreamRefused`, a device error.
pub(super) fn point(context: &'static Context, stream: RawStream) -> Result<CudaEvent> {
    let event = CudaEvent::new(context)?;
    let entered = context.enter()?;
    check(context, &entered, stream)?;
    // SAFETY: the stream is vouched for by the maker of its `RawStream`.
    let recorded = unsafe { event.record(&entered, raw(stream)) };
    recorded.map_err(|code| refused(context, stream, code))?;
    Ok(event)
}

/// Makes later work of a caller's stream wait for an event.
///
/// # Errors
/// `StreamRefused`, a device error.
pub(super) fn hold(context: &Context, stream: RawStream, event: &CudaEvent) -> Result<()> {
    let entered = context.enter()?;
    // Within a capture the wait would become a part of the caller's graph.
    check(context, &entered, stream)?;
    // SAFETY: the stream is vouched for by the maker of its `RawStream`.
    let held = unsafe { event.hold_back(&entered, raw(stream)) };
    held.map_err(|code| refused(context, stream, code))
}

/// The error for a call with a caller's stream.
pub(super) fn refused(context: &Context, stream: RawStream, code: Code) -> Error {
    if code.is_of_capture() {
        captured(stream)
    } else if code.is_foreign_handle() {
        let reason = "it is not a stream of the GPU that holds the page";
        Error::StreamRefused { stream: stream.handle(), reason }
    } else {
        context.fault(code)
    }
}

fn captured(stream: RawStream) -> Error {
    let reason = "a graph is being captured from it: use it before the capture, or after";
    Error::StreamRefused { stream: stream.handle(), reason }
}
