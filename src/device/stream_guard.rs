//! A guard of memory that a stream of the caller's uses.

use std::fmt;

use super::bytes::DeviceBytes;
use super::lent_ranges::{CallerUse, RangeUse};
use super::stream_uses::Access;
use super::{CommandList, Fence, Lane, RawStream};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;

/// The time in which a stream of the caller's is given work that uses some memory. The end records where the
/// stream is by then; whatever uses the memory next comes after that, and the host waits for none of it.
///
/// [`DeviceBytes::begin`] makes one. It ends when it is dropped.
pub struct StreamGuard {
    bytes: DeviceBytes,
    stream: RawStream,
    access: Access,
    /// Keeps pages out of the range. `None` once the guard has ended.
    in_use: Option<RangeUse>,
}

impl DeviceBytes {
    /// Begins a use of these bytes by work that is put on a stream of the caller's from now on, until the
    /// guard is dropped. The host waits for nothing:
    ///
    /// - The stream first waits, on the device, for uses by other streams that have ended: a read for writes,
    ///   a write for all. Where a page [lives](DeviceBytes::page) in the bytes, a read also waits for every
    ///   batch submitted before.
    /// - When the guard ends, the present point of the stream is recorded. Later uses come after it, and so
    ///   do calls of the store that take the bytes, which wait for it on their own thread.
    /// - The last handle may be dropped at once: the memory goes to its next user, or back to its owner, only
    ///   after that work. Memory of the caller's own is then dropped by the next commit,
    ///   [`Store::trim`](crate::Store::trim) or the close.
    ///
    /// While a guard is open the store neither takes nor writes the bytes, unless they are named with their
    /// stream, by [`DeviceBytes::on`]. Guards that are open at the same time are the caller's to order. As
    /// with a [`Pin`](crate::Pin), a batch that changes a page does not wait for a guard that reads it.
    ///
    /// ```no_run
    /// use remanent::{Access, Options, Place, RawStream, Store};
    /// # fn launch(_: Option<u64>) {}
    /// let store = Store::temporary(Options::default())?;
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
    /// [`Error::MemoryInUse`] for a write where a page lives; [`Error::StreamRefused`] if a graph is being
    /// captured from the stream, if it is another device's, or if pages live in host memory;
    /// [`Error::Closed`] for a page of a store that is closed; [`Error::Forked`]; a device error.
    pub fn begin(&self, stream: RawStream, access: Access) -> Result<StreamGuard> {
        self.check_process()?;
        self.try_begin(stream, access).map_err(|error| self.hear(error))
    }

    fn try_begin(&self, stream: RawStream, access: Access) -> Result<StreamGuard> {
        // First: from here on no page is put there that this could miss.
        let in_use = self.begin_use(CallerUse::Stream(access))?;
        // A fence that has passed, where no page is: the stream is looked at all the same.
        let passed = Fence { lane: Lane::Callers, value: 0 };
        let after = if self.page().is_some() { self.link().applied()? } else { passed };
        let device = self.device();
        device.signal_external(stream, after)?;
        for point in self.uses().before(&**device, &self.offsets(), access)? {
            device.hold_stream(stream, &point)?;
        }
        Ok(StreamGuard { bytes: self.clone(), stream, access, in_use: Some(in_use) })
    }
}

impl StreamGuard {
    /// The bytes that the stream uses.
    #[must_use]
    pub fn bytes(&self) -> &DeviceBytes {
        &self.bytes
    }

    /// Ends the guard, as dropping it does, and reports whether that went well.
    ///
    /// # Errors
    /// [`Error::StreamRefused`] if a graph is being captured from the stream now; a
    /// device error. The memory then stays in use until the process ends.
    /// [`Error::Forked`]: the parent's guard goes on.
    pub fn end(mut self) -> Result<()> {
        self.bytes.check_process()?;
        self.end_now()
    }

    fn end_now(&mut self) -> Result<()> {
        // A guard that is dropped in a forked child is still the parent's.
        if self.bytes.check_process().is_err() {
            std::mem::forget(self.in_use.take());
            return Ok(());
        }
        let Some(in_use) = self.in_use.take() else { return Ok(()) };
        let ended = self.record();
        if ended.is_err() {
            // No page may live there, and the memory is not given back: nothing tells when the work is done.
            std::mem::forget(in_use);
            self.bytes.uses().lose();
        }
        ended.map_err(|error| self.bytes.hear(error))
    }

    fn record(&self) -> Result<()> {
        let device = &**self.bytes.device();
        let point = device.stream_event(self.stream)?;
        // The lane that waits for callers: no other one does, and the stream may stand still.
        device.wait_external(Lane::Callers, self.stream)?;
        let fence = device.submit(Lane::Callers, CommandList::default())?.fence();
        self.bytes.uses().end(device, self.bytes.offsets(), self.access, point, fence)
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        if let Err(error) = self.end_now() {
            tracing::warn!(%error, "a caller's memory stays in use");
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
