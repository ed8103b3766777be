//! A stream, and counter words in pinned memory that the stream increments.
//!
//! A word is a timeline: the stream writes rising values to it, each after the work queued before the write. Reading
//! the stream's progress therefore costs one load, and a point in the stream needs no driver object. Each write follows
//! a system-wide barrier, so a reader that observes the value also observes the bytes written before it.
//!
//! A stream that has stopped at a fault never writes again. Therefore a thread that has waited for long also queries
//! the state of the stream.

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

/// `CU_STREAM_NON_BLOCKING`: the stream and the default stream do not wait for each other.
const NON_BLOCKING: u32 = 1;

/// The time for which a waiter spins before it sleeps. It is a few times the duration of a small list.
const SPIN: Duration = Duration::from_micros(40);
/// The shortest sleep between two checks.
const SLEEP_MIN: Duration = Duration::from_micros(20);
const SLEEP_MAX: Duration = Duration::from_micros(200);
/// The divisor of the time waited so far that yields the length of the next sleep. It bounds the delay in detecting
/// completion.
const SLEEP_PART: u32 = 16;
/// The maximum delay, in nanoseconds, that the system may add to a sleep. The system's default, 50 µs, is longer than
/// most sleeps.
const SLEEP_SLACK_NS: NonZeroU64 = NonZeroU64::new(1000).expect("not 0");

/// A stream that the store owns; never the default stream.
pub(super) struct Stream {
    context: &'static Context,
    raw: CUstream,
}

// SAFETY: the handle is an opaque id, which the driver accepts on any thread.
unsafe impl Send for Stream {}
// SAFETY: the same; the driver locks the state that calls on one stream share.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream. The GPU schedules an urgent stream before others when it can choose.
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

    /// Returns the handle, which is valid as long as the stream.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Returns whether all queued work is done.
    ///
    /// # Errors
    /// A device error if the stream stopped at a fault.
    fn is_done(&self) -> Result<bool> {
        // SAFETY: the context is current; the handle is live until it is dropped.
        self.context.query(|entered| unsafe { entered.query_stream(self.raw) })
    }

    /// Waits until all queued work is done, including work that writes no value.
    ///
    /// # Errors
    /// A device error if the stream stopped at a fault.
    pub fn drain(&self) -> Result<()> {
        let mut backoff = Backoff::new();
        // A rejected query has no effect, so it is repeated once. The work that the caller waits for may still be
        // running.
        let mut may_be_refused = true;
        loop {
            match self.is_done() {
                Ok(true) => return Ok(()),
                Ok(false) => backoff.take(),
                Err(Error::Device { context_lost: false, .. }) if may_be_refused => may_be_refused = false,
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: the context is current, and the handle is not used again; the driver lets queued work
        // finish first.
        if let Err(code) = unsafe { entered.destroy_stream(self.raw) } {
            tracing::warn!(%code, "cannot destroy a stream");
        }
    }
}

/// A counter word that a stream increments.
pub(super) struct CompletionWord {
    stream: Arc<Stream>,
    block: ManuallyDrop<DeviceBlock>,
    /// The newest value that the stream was instructed to write.
    given: AtomicU64,
}

impl CompletionWord {
    /// Creates a counter word with value 0 in pinned memory.
    ///
    /// # Errors
    /// `OutOfMemory`, a device error.
    pub fn new(stream: &Arc<Stream>, memory: &PlaceMemory) -> Result<Self> {
        let block = memory.allocate(size_of::<u64>() as u64)?;
        // SAFETY: the block is pinned, long enough, aligned by its class, and not shared yet.
        unsafe { std::ptr::write(block.address as *mut u64, 0) };
        Ok(Self { stream: stream.clone(), block: ManuallyDrop::new(block), given: AtomicU64::new(0) })
    }

    /// Returns the newest value that the stream has written.
    pub fn reached(&self) -> u64 {
        // SAFETY: the block is aligned, was written when the word was created, and lives as long as the word.
        // Host and GPU access it as one 64-bit value.
        let word = unsafe { AtomicU64::from_ptr(self.address() as *mut u64) };
        word.load(Ordering::Acquire)
    }

    /// Returns the newest value that the stream was instructed to write.
    pub fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// Queues a write of the next value after all queued work, and returns the value. Only one thread may call this at
    /// a time. The lane's lock ensures this, because a thread holds it while it queues on the stream.
    ///
    /// # Errors
    /// A device error; the value is then not used.
    pub fn count(&self, entered: &ContextGuard<'_>) -> Result<u64> {
        let value = self.given() + 1;
        // SAFETY: the context is current; the word lives until the stream was waited for or has stopped.
        // Without flags, the write follows a system-wide barrier.
        let written = unsafe { entered.write_value(self.stream.raw, self.address(), value, 0) };
        written.map_err(|code| self.stream.context.fault(code))?;
        self.given.store(value, Ordering::Release);
        Ok(value)
    }

    /// Waits until the stream has written a value that it was instructed to write.
    ///
    /// # Errors
    /// A device error if the stream stopped before that value.
    pub fn wait(&self, value: u64) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < SPIN {
            if self.reached() >= value {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let mut backoff = Backoff::new();
        while self.reached() < value {
            self.stream.is_done()?;
            backoff.take();
        }
        Ok(())
    }

    fn address(&self) -> u64 {
        self.block.address
    }
}

impl Drop for CompletionWord {
    /// Frees the word if the stream has written all of its values. Otherwise the stream has stopped, and the word is
    /// leaked.
    fn drop(&mut self) {
        if self.reached() >= self.given() {
            // SAFETY: the block is not used again.
            unsafe { ManuallyDrop::drop(&mut self.block) };
        }
    }
}

/// Sleeps between checks for an event that no signal reports. Each sleep is longer than the last, in proportion to the
/// time waited.
pub(super) struct Backoff {
    since: Instant,
    /// The thread's own timer slack, restored on drop.
    slack: Option<NonZeroU64>,
}

impl Backoff {
    pub fn new() -> Self {
        let own = current_timer_slack().ok().and_then(NonZeroU64::new).filter(|own| *own > SLEEP_SLACK_NS);
        // If the system rejects the change, sleeps are lengthened by the default timer slack.
        let slack = own.filter(|_| set_current_timer_slack(Some(SLEEP_SLACK_NS)).is_ok());
        Self { since: Instant::now(), slack }
    }

    #[expect(clippy::disallowed_methods, reason = "no signal tells the host of a GPU's progress")]
    pub fn take(&mut self) {
        std::thread::sleep((self.since.elapsed() / SLEEP_PART).clamp(SLEEP_MIN, SLEEP_MAX));
    }
}

impl Drop for Backoff {
    fn drop(&mut self) {
        if self.slack.is_some()
            && let Err(error) = set_current_timer_slack(self.slack)
        {
            tracing::debug!(%error, "cannot restore the timer slack of a thread");
        }
    }
}
