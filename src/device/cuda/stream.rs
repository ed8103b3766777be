//! Callers' streams: the unsafe constructor, whose caller vouches for the handle, and the checks of a stream.
//!
//! The store never queues work on a caller's stream. It records the stream's current point, or makes the stream wait
//! for a lane. Both calls fail while a graph is being captured from the stream: a captured wait would become part of
//! the caller's graph and be repeated at every launch of the graph.

use std::ffi::c_uint;

use super::context::{Context, ContextGuard};
use super::driver::CUstream;
use super::errors::Code;
use super::event::CudaEvent;
use crate::device::RawStream;
use crate::error::{Error, Refused, Result};

impl RawStream {
    /// Wraps the CUDA stream with this handle. Handles 0 and 1 are the legacy default stream. Handle 2 is the
    /// per-thread default stream of the thread that makes the call.
    ///
    /// # Safety
    /// The handle must be that of a stream of this process, created in the primary context of the GPU that holds the
    /// pages. The stream must outlive every call that uses it. A lease makes one more such call when it ends.
    #[must_use]
    pub unsafe fn from_cuda(handle: u64) -> Self {
        Self(handle)
    }
}

/// Returns the handle in the driver's type.
pub(super) fn raw(stream: RawStream) -> CUstream {
    stream.handle() as CUstream
}

/// Checks that no graph is being captured from a stream.
///
/// # Errors
/// `Refused` if a graph is being captured; a device error.
pub(super) fn check(context: &Context, entered: &ContextGuard<'_>, stream: RawStream) -> Result<()> {
    let mut status: c_uint = 0;
    // SAFETY: the context is current, the pointer is to a live integer, and the creator of the `RawStream`
    // guarantees that the stream is valid.
    let requested = unsafe { entered.capture_status(raw(stream), &mut status) };
    requested.map_err(|code| refused(context, stream, code))?;
    // Any other status means that a capture is active, or was invalidated and has not ended.
    if status == 0 { Ok(()) } else { Err(captured(stream)) }
}

/// Records the current point of a caller's stream in an event.
///
/// # Errors
/// `Refused` if the stream cannot be used; a device error.
pub(super) fn point(context: &'static Context, stream: RawStream) -> Result<CudaEvent> {
    let event = CudaEvent::new(context)?;
    let entered = context.enter()?;
    check(context, &entered, stream)?;
    // SAFETY: the creator of the `RawStream` guarantees that the stream is valid.
    let recorded = unsafe { event.record(&entered, raw(stream)) };
    recorded.map_err(|code| refused(context, stream, code))?;
    Ok(event)
}

/// Makes later work of a caller's stream wait for an event.
///
/// # Errors
/// `Refused` if the stream cannot be used; a device error.
pub(super) fn hold(context: &Context, stream: RawStream, event: &CudaEvent) -> Result<()> {
    let entered = context.enter()?;
    // Within a capture, the wait would become part of the caller's graph.
    check(context, &entered, stream)?;
    // SAFETY: the creator of the `RawStream` guarantees that the stream is valid.
    let held = unsafe { event.delay(&entered, raw(stream)) };
    held.map_err(|code| refused(context, stream, code))
}

/// Converts the error code of a call that uses a caller's stream to an error.
pub(super) fn refused(context: &Context, stream: RawStream, code: Code) -> Error {
    if code.is_of_capture() {
        captured(stream)
    } else if code.is_foreign_handle() {
        let reason = "it is not a stream of the GPU that holds the page";
        Error::Refused(Refused::Stream { stream: stream.handle(), reason })
    } else {
        context.fault(code)
    }
}

fn captured(stream: RawStream) -> Error {
    let reason = "a graph is being captured from it: use it before the capture, or after";
    Error::Refused(Refused::Stream { stream: stream.handle(), reason })
}
