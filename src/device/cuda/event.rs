//! Events: points of streams, kept by the driver.
//!
//! A lane's own points are words that its stream writes (see `completion`). An event stands for a point of a
//! caller's stream, to which the store queues nothing, and for a point that another stream is told to wait
//! for.

use super::completion::Naps;
use super::context::{Context, ContextGuard};
use super::driver::{CUevent, CUstream};
use super::errors::Code;
use crate::error::Result;

/// `CU_EVENT_DISABLE_TIMING`: the store asks no event for its time.
const NO_TIMING: u32 = 2;

/// An event of the driver's.
pub(super) struct CudaEvent {
    context: &'static Context,
    raw: CUevent,
}

// SAFETY: the handle is a name, and the driver takes it on any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: the same; the driver locks what calls with one event share.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// An event that was not recorded yet.
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

    /// Makes the event stand for the point at which the stream is now.
    ///
    /// # Safety
    /// The stream is live.
    ///
    /// # Errors
    /// The driver's refusal.
    pub unsafe fn record(&self, entered: &ContextGuard<'_>, stream: CUstream) -> Result<(), Code> {
        // SAFETY: the context is current; the event lives until it is dropped, and the stream is the caller's
        // promise.
        unsafe { entered.record_event(self.raw, stream) }
    }

    /// Makes work that is put into the stream from now on wait for the event's point.
    ///
    /// # Safety
    /// The stream is live.
    ///
    /// # Errors
    /// The driver's refusal.
    pub unsafe fn hold_back(&self, entered: &ContextGuard<'_>, stream: CUstream) -> Result<(), Code> {
        // SAFETY: the same. The wait takes the event as it was recorded, so that it may be recorded again.
        unsafe { entered.wait_event(stream, self.raw, 0) }
    }

    /// Waits, on this thread, until the event's point has passed.
    ///
    /// # Errors
    /// A device error.
    pub fn wait(&self) -> Result<()> {
        let mut naps = Naps::new();
        while !self.is_reached()? {
            naps.take();
        }
        Ok(())
    }

    /// Whether the event's point has passed.
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
        // SAFETY: the context is current, the handle leaves our hands here, and a stream that waits for the
        // event has taken its point already.
        if let Err(code) = unsafe { entered.destroy_event(self.raw) } {
            tracing::warn!(%code, "an event could not be given back");
        }
    }
}
