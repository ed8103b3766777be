//! Events: points of streams, recorded by the driver.
//!
//! A lane's own points are words that its stream writes (see `completion`). Events serve two other cases: a point of a
//! caller's stream, on which the store queues nothing, and a point for which another stream waits.

use super::completion::Backoff;
use super::context::{Context, ContextGuard};
use super::driver::{CUevent, CUstream};
use super::errors::Code;
use crate::error::Result;

/// `CU_EVENT_DISABLE_TIMING`: the event records no time, because the store never reads it.
const NO_TIMING: u32 = 2;

/// A driver event.
pub(super) struct CudaEvent {
    context: &'static Context,
    raw: CUevent,
}

// SAFETY: the handle is an opaque id, which the driver accepts on any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: the same; the driver locks the state that calls with one event share.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Creates an event that is not recorded yet.
    ///
    /// # Errors
    /// A device error.
    pub fn new(context: &'static Context) -> Result<Self> {
        let entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current, the pointer is to a live handle.
        unsafe { entered.create_event(&mut raw, NO_TIMING) }.map_err(|code| context.fault(code))?;
        Ok(Self { context, raw })
    }

    /// Records the stream's current point in the event.
    ///
    /// # Safety
    /// The stream must be live.
    ///
    /// # Errors
    /// The driver's error code.
    pub unsafe fn record(&self, entered: &ContextGuard<'_>, stream: CUstream) -> Result<(), Code> {
        // SAFETY: the context is current; the event lives until it is dropped, and the caller promises that
        // the stream is live.
        unsafe { entered.record_event(self.raw, stream) }
    }

    /// Makes work that is queued on the stream from now on wait for the event's point.
    ///
    /// # Safety
    /// The stream must be live.
    ///
    /// # Errors
    /// The driver's error code.
    pub unsafe fn delay(&self, entered: &ContextGuard<'_>, stream: CUstream) -> Result<(), Code> {
        // SAFETY: the same. The wait captures the event's recorded point, so the event may be recorded again.
        unsafe { entered.wait_event(stream, self.raw, 0) }
    }

    /// Blocks this thread until the event's point has passed.
    ///
    /// # Errors
    /// A device error.
    pub fn wait(&self) -> Result<()> {
        let mut backoff = Backoff::new();
        while !self.is_reached()? {
            backoff.take();
        }
        Ok(())
    }

    /// Returns whether the event's point has passed.
    ///
    /// # Errors
    /// A device error.
    pub fn is_reached(&self) -> Result<bool> {
        // SAFETY: the context is current; the event lives until it is dropped.
        self.context.query(|entered| unsafe { entered.query_event(self.raw) })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: the context is current, the handle is not used again, and a stream that waits for the event
        // has already captured its point.
        if let Err(code) = unsafe { entered.destroy_event(self.raw) } {
            tracing::warn!(%code, "cannot destroy an event");
        }
    }
}
