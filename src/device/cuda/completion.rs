//! A stream, and words in pinned memory that it counts up.
//!
//! A word is a timeline: the stream writes rising values to it, each after the work that was queued before.
//! So asking how far the stream is costs a load, and a point in it needs no object of the driver's. The write
//! comes after a barrier for the whole system: a reader that sees the value sees the bytes that were written
//! before it.
//!
//! A stream that stopped at a fault never writes again, so a thread that waits for long asks the stream
//! itself.

use std::mem::ManuallyDrop;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{current_timer_slack, set_current_timer_slack};

use super::context::{Context, ContextGuard};
use super::driver::CUstream;
use super::memory::{DeviceBlock, PlaceMemory};
use crate::error::{Error, Result};

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the default stream, nor the default stream for it.
const NON_BLOCKING: u32 = 1;

/// The time that a waiter spins before it lets others have its core: a few times what a small list takes.
const SPIN: Duration = Duration::from_micros(40);
/// The bounds of a nap between looks after that.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_micros(200);
/// A nap is this part of the time that was waited: what is waited for is seen late by no more than that.
const NAP_PART: u32 = 16;
/// How much later than asked the system may end a nap. Its own choice, 50 µs, is longer than most naps.
const NAP_SLACK_NS: NonZeroU64 = NonZeroU64::new(1000).expect("not 0");

/// A stream of our own, never the default one.
pub(super) struct Stream {
    context: &'static Context,
    raw: CUstream,
}

// SAFETY: the handle is a name, and the driver takes it on any thread.
unsafe impl Send for Stream {}
// SAFETY: the same; the driver locks what calls on one stream share.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of its own. Urgent ones go before others where the GPU can choose.
    ///
    /// # Errors
    /// A device error.
    pub fn new(context: &'static Context, urgent: bool) -> Result<Self> {
        let entered = context.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current, the pointers are to live integers.
        unsafe { entered.priority_range(&mut least, &mut greatest) }.map_err(|code| context.fault(code))?;
        let priority = if urgent { greatest } else { least };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current, the pointer is to a live handle.
        unsafe { entered.create_stream(&mut raw, NON_BLOCKING, priority) }
            .map_err(|code| context.fault(code))?;
        Ok(Self { context, raw })
    }

    /// The handle, for calls while the stream lives.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Whether all queued work is done.
    ///
    /// # Errors
    /// A device error: the stream has stopped at a fault.
    fn is_done(&self) -> Result<bool> {
        // SAFETY: the context is current; the handle is live until it is dropped.
        self.context.query(|entered| unsafe { entered.query_stream(self.raw) })
    }

    /// Waits until all queued work is done, whether or not it wrote a value.
    ///
    /// # Errors
    /// A device error: the stream has stopped at a fault.
    pub fn drain(&self) -> Result<()> {
        let mut naps = Naps::new();
        // A query that is refused does nothing, so it is repeated, once: giving up would lose the work that
        // is waited for.
        let mut may_be_refused = true;
        loop {
            match self.is_done() {
                Ok(true) => return Ok(()),
                Ok(false) => naps.take(),
                Err(Error::Device { context_lost: false, .. }) if may_be_refused => may_be_refused = false,
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: the context is current, the handle leaves our hands here; the driver lets queued work
        // finish first.
        if let Err(code) = unsafe { entered.destroy_stream(self.raw) } {
            tracing::warn!(%code, "a stream could not be given back");
        }
    }
}

/// A word that a stream counts up.
pub(super) struct CompletionWord {
    stream: Arc<Stream>,
    block: ManuallyDrop<DeviceBlock>,
    /// The newest value that the stream was told to write.
    given: AtomicU64,
}

impl CompletionWord {
    /// A word at 0, in pinned memory.
    ///
    /// # Errors
    /// `OutOfMemory`, a device error.
    pub fn new(stream: &Arc<Stream>, memory: &PlaceMemory) -> Result<Self> {
        let block = memory.allocate(size_of::<u64>() as u64)?;
        // SAFETY: the block is pinned, long enough, aligned by its class, and not shared yet.
        unsafe { std::ptr::write(block.address as *mut u64, 0) };
        Ok(Self { stream: stream.clone(), block: ManuallyDrop::new(block), given: AtomicU64::new(0) })
    }

    /// The newest value that has passed.
    pub fn reached(&self) -> u64 {
        // SAFETY: the block is aligned, was written when the word was made, and lives as long as the word.
        // Host and GPU access it as one 64-bit value.
        let word = unsafe { AtomicU64::from_ptr(self.address() as *mut u64) };
        word.load(Ordering::Acquire)
    }

    /// The newest value that the stream was told to write.
    pub fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// Has the stream write the next value after all queued work, and returns it. One caller at a time: a
    /// thread that queues on the stream holds its lane.
    ///
    /// # Errors
    /// A device error; the value does not count then.
    pub fn count(&self, entered: &ContextGuard<'_>) -> Result<u64> {
        let value = self.given() + 1;
        // SAFETY: the context is current; the word lives until the stream was waited for, or has stopped.
        // Without flags the write comes after a barrier for the whole system.
        let written = unsafe { entered.write_value(self.stream.raw, self.address(), value, 0) };
        written.map_err(|code| self.stream.context.fault(code))?;
        self.given.store(value, Ordering::Release);
        Ok(value)
    }

    /// Waits until a value that the stream was told to write has passed.
    ///
    /// # Errors
    /// A device error: the stream stopped before it.
    pub fn wait(&self, value: u64) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < SPIN {
            if self.reached() >= value {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let mut naps = Naps::new();
        while self.reached() < value {
            self.stream.is_done()?;
            naps.take();
        }
        Ok(())
    }

    fn address(&self) -> u64 {
        self.block.address
    }
}

impl Drop for CompletionWord {
    /// Frees the word, unless the stream may still write to it: a stream that stopped, or that cannot be
    /// asked, keeps it.
    fn drop(&mut self) {
        if self.reached() >= self.given() {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.block) };
        }
    }
}

/// Naps between looks at an event that no signal reports, longer the longer it takes.
pub(super) struct Naps {
    since: Instant,
    /// The thread's own slack, which it gets back.
    slack: Option<NonZeroU64>,
}

impl Naps {
    pub fn new() -> Self {
        let own = current_timer_slack().ok().and_then(NonZeroU64::new).filter(|own| *own > NAP_SLACK_NS);
        // Where the system refuses, naps are as long as it makes them.
        let slack = own.filter(|_| set_current_timer_slack(Some(NAP_SLACK_NS)).is_ok());
        Self { since: Instant::now(), slack }
    }

    #[expect(clippy::disallowed_methods, reason = "no signal tells the host of a GPU's progress")]
    pub fn take(&mut self) {
        std::thread::sleep((self.since.elapsed() / NAP_PART).clamp(NAP_MIN, NAP_MAX));
    }
}

impl Drop for Naps {
    fn drop(&mut self) {
        if self.slack.is_some()
            && let Err(error) = set_current_timer_slack(self.slack)
        {
            tracing::debug!(%error, "a thread keeps short naps");
        }
    }
}
