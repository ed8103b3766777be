//! A guard for the period in which a caller's stream uses some memory.

use std::fmt;

use super::bytes::DeviceBytes;
use super::lent_ranges::{CallerUse, RangeUse};
use super::stream_uses::Access;
use super::{CommandList, Fence, Lane, RawStream};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

/// A guard held while a caller queues work on a stream that uses some memory. Ending the guard records the stream's
/// current point. Later uses of the memory run after that point, and the host does not wait.
///
/// [`DeviceBytes::begin`] creates a guard. The guard ends when it is dropped.
pub struct StreamGuard {
    bytes: DeviceBytes,
    stream: RawStream,
    access: Access,
    /// The use that keeps pages out of the range. `None` after the guard has ended.
    in_use: Option<RangeUse>,
}

impl DeviceBytes {
    /// Begins a use of these bytes by work that the caller queues on a stream until the guard is dropped. The
    /// host does not wait:
    ///
    /// - The stream first waits, on the device, for ended uses by other streams: a read waits for writes, a
    ///   write waits for all uses. If a page is [stored](DeviceBytes::page) in the bytes, a read also waits for
    ///   every batch submitted before.
    /// - When the guard ends, the stream's current point is recorded. Later uses are ordered after it, and so
    ///   are store calls that take the bytes, which wait for it on their own thread.
    /// - The last handle may be dropped immediately: the memory passes to its next user, or back to its
    ///   owner, only after that work. Caller-owned memory is then dropped by the next commit, by
    ///   [`Store::trim`](crate::Store::trim) or when the store is closed.
    ///
    /// While a guard is open, the store neither reads nor writes the bytes unless they are named with their
    /// stream by [`DeviceBytes::on`]. The caller must order guards that are open at the same time. As with a
    /// [`Pin`](crate::Pin), a batch that changes a page does not wait for a guard that reads it.
    ///
    /// ```no_run
    /// use remanent::device::{Access, RawStream};
    /// use remanent::{Options, Place, Store};
    /// # fn launch(_: Option<u64>) {}
    /// let store = Store::temporary()?;
    /// assert!(store.supports_streams(), "pages live in host memory, so there are no streams");
    /// let memory = store.device_bytes(1 << 20, Place::Device(0))?;
    /// # let handle = 0;
    /// // SAFETY: a stream of this process, which outlives the guard.
    /// let stream = unsafe { RawStream::from_cuda(handle) };
    /// let guard = memory.begin(stream, Access::Write)?;
    /// launch(memory.address());
    /// guard.end()?;
    /// let mut batch = store.batch();
    /// let page = batch.create(1 << 20, Place::Device(0)).page();
    /// batch.write_device(page, 0, &memory); // waits for the kernel
    /// store.commit(batch)?;
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Refused`] for a write to bytes in which a page is stored, if a graph is being captured from the stream,
    /// if the stream belongs to another device, or if pages are in host memory; [`Error::Closed`] for a page of a
    /// closed store; [`Error::Forked`]; a device error.
    pub fn begin(&self, stream: RawStream, access: Access) -> Result<StreamGuard> {
        self.check_process()?;
        self.try_begin(stream, access).map_err(|error| self.report_error(error))
    }

    fn try_begin(&self, stream: RawStream, access: Access) -> Result<StreamGuard> {
        // This comes first, so that no page is stored in the bytes after the following checks.
        let in_use = self.begin_use(CallerUse::Stream(access))?;
        // If no page is stored in the bytes, a fence that has already passed is used. The call still checks the stream.
        let passed = Fence { lane: Lane::Callers, value: 0 };
        let after = if self.page().is_some() { self.link().applied()? } else { passed };
        let device = self.device();
        let streams = device.streams(stream)?;
        streams.signal_external(stream, after)?;
        for point in self.uses().before(streams, &self.offsets(), access)? {
            streams.hold_stream(stream, &point)?;
        }
        Ok(StreamGuard { bytes: self.clone(), stream, access, in_use: Some(in_use) })
    }
}

impl StreamGuard {
    /// Returns the bytes that the stream uses.
    #[must_use]
    pub fn bytes(&self) -> &DeviceBytes {
        &self.bytes
    }

    /// Ends the guard in the same way as a drop, and returns any error.
    ///
    /// # Errors
    /// [`Error::Refused`] if a graph is being captured from the stream, or a device error: the memory then stays in use
    /// until the process ends. [`Error::Forked`] in a forked child: the parent's guard stays open.
    pub fn end(mut self) -> Result<()> {
        self.bytes.check_process()?;
        self.end_now()
    }

    fn end_now(&mut self) -> Result<()> {
        // A guard dropped in a forked child still belongs to the parent.
        if self.bytes.check_process().is_err() {
            std::mem::forget(self.in_use.take());
            return Ok(());
        }
        let Some(in_use) = self.in_use.take() else { return Ok(()) };
        let ended = self.record();
        if ended.is_err() {
            // It is unknown when the stream's work ends, so no page is ever stored in the range, and the memory is
            // never freed.
            std::mem::forget(in_use);
            self.bytes.uses().mark_unknown();
        }
        ended.map_err(|error| self.bytes.report_error(error))
    }

    fn record(&self) -> Result<()> {
        let device = &**self.bytes.device();
        let streams = device.streams(self.stream)?;
        let point = streams.stream_event(self.stream)?;
        // No other lane waits for this lane, so a stalled stream delays no other work of the store.
        streams.wait_external(Lane::Callers, self.stream)?;
        let fence = device.submit(Lane::Callers, CommandList::default())?.fence();
        self.bytes.uses().end(streams, self.bytes.offsets(), self.access, point, fence)
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        if let Err(error) = self.end_now() {
            tracing::warn!(%error, "cannot end the use of caller-owned memory by a stream");
        }
    }
}

impl fmt::Debug for StreamGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamGuard")
            .field("bytes", &self.bytes)
            .field("stream", &self.stream)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}
