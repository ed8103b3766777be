//! Handles to device memory that callers hold. The caller's kernels write the memory, and batches read from it.
//!
//! A handle to any range keeps the whole allocation alive. The allocation belongs to the store, or to the caller and is
//! adopted by the device. Its owner is dropped together with the last handle.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::{PageId, Place};

use super::lent_ranges::{CallerUse, MemoryRange, RangeInUse, RangeUse};
use super::memory_link::{MemoryLink, MemoryOwner};
use super::stream_uses::{Access, LastUse, StreamUses};
use super::{CallerMemory, Command, CommandList, EngineDevice, Lane, MemoryId, RawStream, Span, StagingSpan};
use crate::base::allocation::collected;
use crate::base::process::ForkGuard;
use crate::error::{Error, Refused, Result};

/// A range of device memory. Clones refer to the same bytes, and the memory lives as long as any clone.
///
/// The caller's kernels access the bytes at [`DeviceBytes::address`]. Without kernels, as in tests or when pages are in
/// host memory, use [`DeviceBytes::write`] and [`DeviceBytes::read`] instead.
///
/// ```
/// use remanent::{Options, Place};
/// # use remanent::DeviceChoice;
/// # let options = Options::new().device(DeviceChoice::Host);
/// let store = options.open_temporary()?;
/// let memory = store.device_bytes(1024, Place::Device(0))?;
/// memory.part(16..20)?.write(0, b"born")?;
/// let mut bytes = [0; 6];
/// memory.read(15, &mut bytes)?;
/// assert_eq!(&bytes, b"\0born\0");
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone)]
pub struct DeviceBytes {
    memory: Arc<ForkGuard<OwnedMemory>>,
    offset: u64,
    len: u64,
    stream: Option<RawStream>,
}

/// An allocation, with the owner whose drop frees it.
struct OwnedMemory {
    device: Arc<EngineDevice>,
    memory: MemoryId,
    place: Place,
    /// The address space of the allocation, and the offset of its first byte in that space.
    origin: (u64, u64),
    /// The ranges of the memory that pages or callers use, and the connection to the store.
    link: Arc<MemoryLink>,
    /// The uses of the memory by callers' streams.
    uses: Arc<StreamUses>,
    /// The owner of the memory, whose drop frees it.
    _owner: Box<dyn Any + Send + Sync>,
}

/// Caller-owned memory that a device adopted. When it is released, it returns to its owner and never to the arena.
struct AdoptedMemory {
    device: Arc<EngineDevice>,
    memory: MemoryId,
    link: Arc<MemoryLink>,
    uses: Arc<StreamUses>,
    owner: Option<MemoryOwner>,
}

impl Drop for AdoptedMemory {
    /// Drops the owner without waiting for the caller's streams, which may still use the memory. All command lists that
    /// use the memory have completed, except copies to shadows, which read only the store's own memory.
    fn drop(&mut self) {
        if let Err(error) = self.device.release(self.memory) {
            tracing::warn!(%error, "cannot unregister caller-owned memory from the device");
        }
        let Some(owner) = self.owner.take() else { return };
        match self.uses.last() {
            LastUse::None => drop(owner),
            LastUse::At(fence) => self.link.drop_after(&self.device, owner, fence),
            // It is unknown when the uses end, so the owner is leaked.
            LastUse::Unknown => std::mem::forget(owner),
        }
    }
}

impl DeviceBytes {
    /// Wraps the bytes of `span`. Dropping `owner` frees the allocation after the stream uses recorded in `uses`.
    pub(crate) fn new(
        device: Arc<EngineDevice>,
        span: Span,
        place: Place,
        link: Arc<MemoryLink>,
        uses: Arc<StreamUses>,
        owner: impl Any + Send + Sync,
    ) -> Self {
        let Span { memory, offset, len } = span;
        let origin = device.origin(memory);
        let owned = OwnedMemory { device, memory, place, origin, link, uses, _owner: Box::new(owner) };
        Self { memory: Arc::new(ForkGuard::new(owned)), offset, len, stream: None }
    }

    /// Adopts caller-owned memory on a device.
    ///
    /// # Errors
    /// `Refused`; a device error.
    pub(crate) fn adopt(
        device: &Arc<EngineDevice>,
        memory: &CallerMemory,
        link: &Arc<MemoryLink>,
    ) -> Result<Self> {
        let (id, place) = device.adopt(memory)?;
        let uses = Arc::<StreamUses>::default();
        let owner = AdoptedMemory {
            device: device.clone(),
            memory: id,
            link: link.clone(),
            uses: uses.clone(),
            owner: Some(memory.owner()),
        };
        let span = Span { memory: id, offset: 0, len: memory.byte_len() };
        Ok(Self::new(device.clone(), span, place, link.clone(), uses, owner))
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// Returns the place of the memory.
    #[must_use]
    pub fn place(&self) -> Place {
        self.memory.place
    }

    /// Returns the address at which kernels access the first byte. Returns `None` in a forked child, or if kernels
    /// cannot access the memory.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.memory.check().ok()?;
        self.memory.device.address(self.memory.memory).map(|address| address + self.offset)
    }

    /// Returns the ordinal of the GPU for bytes in GPU memory or unified memory, and `None` for other memory.
    #[cfg(any(feature = "nccl", feature = "nixl"))]
    pub(crate) fn gpu(&self) -> Option<u32> {
        self.memory.device.gpu_with(self.memory.memory)
    }

    /// Returns the page that is stored in these bytes or in a part of them, as requested by [`WriteBatch::create_in`]
    /// or by an open. Returns `None` after the page has moved elsewhere or was deleted, and in a forked child.
    ///
    /// [`WriteBatch::create_in`]: crate::WriteBatch::create_in
    #[must_use]
    pub fn page(&self) -> Option<PageId> {
        self.memory.check().ok()?;
        self.memory.link.ranges.page_in(self.range())
    }

    /// Returns the location of the bytes.
    fn range(&self) -> MemoryRange {
        let (space, origin) = self.memory.origin;
        let start = origin + self.offset;
        MemoryRange { space, start, end: start + self.len }
    }

    /// Checks that no two of the ranges share a byte, because the copies of one call run in any order.
    ///
    /// # Errors
    /// [`Error::Refused`] if two ranges overlap.
    pub(crate) fn check_apart<'b>(memory: impl Iterator<Item = &'b Self>) -> Result<()> {
        let mut ranges = collected(memory.filter(|bytes| bytes.len > 0).map(Self::range))?;
        ranges.sort_unstable_by_key(|range| (range.space, range.start));
        match ranges.windows(2).find(|pair| pair[0].overlaps(&pair[1])) {
            None => Ok(()),
            Some(pair) => {
                let reason = "it overlaps other memory of the same call".to_owned();
                Err(Error::Refused(Refused::Memory { len: pair[1].end - pair[1].start, reason }))
            }
        }
    }

    /// Returns an error if a page is stored in the bytes, because only the store may write to a page.
    ///
    /// # Errors
    /// [`Error::Refused`] if a page is stored in the bytes.
    pub(crate) fn check_unused(&self) -> Result<()> {
        self.page().map_or(Ok(()), |page| Err(Error::Refused(Refused::MemoryInUse { len: self.len, page })))
    }

    /// Begins a caller's use of these bytes. No page is placed in the bytes until the returned use is dropped.
    ///
    /// # Errors
    /// [`Error::Refused`] if `by` writes and a page is stored in the bytes.
    pub(super) fn begin_use(&self, by: CallerUse) -> Result<RangeUse> {
        let begun = self.memory.link.ranges.begin(self.range(), by);
        begun.map_err(|page| Error::Refused(Refused::MemoryInUse { len: self.len, page }))
    }

    /// Blocks this thread until the store may use the bytes: until the ended uses by streams are done, and until the
    /// work that is now queued in the stream that produces the bytes is done.
    ///
    /// # Errors
    /// [`Error::Refused`] while a stream's guard is open or if the device rejects the stream; a device error.
    pub(crate) fn arrived(&self, access: Access) -> Result<Span> {
        self.wait_uses(access)?;
        if let Some(stream) = self.stream {
            self.memory.device.wait_stream(stream)?;
        }
        Ok(self.span())
    }

    /// Waits for the streams' uses of these bytes, then begins a call that writes to the bytes. No page is placed in
    /// the bytes until the returned use is dropped.
    ///
    /// # Errors
    /// [`Error::Refused`] if a page is stored in the bytes; otherwise same as [`arrived`](Self::arrived).
    pub(crate) fn begin_write(&self) -> Result<(RangeUse, Span)> {
        let begun = self.begin_use(CallerUse::Call)?;
        Ok((begun, self.arrived(Access::Write)?))
    }

    /// Waits like [`arrived`](Self::arrived), but not for the work of the stream that produces the bytes.
    ///
    /// # Errors
    /// Same as `arrived`.
    pub(crate) fn wait_uses(&self, access: Access) -> Result<()> {
        let is_excluded = self.memory.link.ranges.is_excluded_by_stream(self.range(), access);
        // Bytes that the caller names together with their stream are read at the stream's current point, even while a
        // guard of that stream is open.
        if is_excluded && (self.stream.is_none() || access == Access::Write) {
            let reason = "a stream uses it: end the guard first".to_owned();
            return Err(Error::Refused(Refused::Memory { len: self.len, reason }));
        }
        // A device without streams has no uses by streams.
        let Some(streams) = self.memory.device.abilities().streams else { return Ok(()) };
        let points = self.memory.uses.before(streams, &self.offsets(), access)?;
        points.iter().try_for_each(|point| streams.wait_event(point))
    }

    /// Returns the range's offsets within its allocation.
    pub(super) fn offsets(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    pub(super) fn device(&self) -> &Arc<EngineDevice> {
        &self.memory.device
    }

    pub(super) fn link(&self) -> &MemoryLink {
        &self.memory.link
    }

    pub(super) fn uses(&self) -> &StreamUses {
        &self.memory.uses
    }

    /// Returns the error to report to the caller. A failed device poisons the store, because the store's
    /// pages are lost too.
    pub(super) fn report_error(&self, error: Error) -> Error {
        self.memory.link.report_failure(error)
    }

    /// Stores a page in these bytes, which must not be empty, and returns a memory id for the page. Returns `None` if
    /// another page has left a part of the bytes and a lane may still use that part.
    ///
    /// # Errors
    /// [`Error::Refused`] if a page is stored in the bytes, while a call writes to them, or while a stream uses them; a
    /// device error.
    pub(crate) fn lend(&self, page: PageId) -> Result<Option<MemoryId>> {
        match self.memory.link.ranges.lend(self.range(), page) {
            Ok(()) => {}
            Err(RangeInUse::Retired) => return Ok(None),
            Err(RangeInUse::Page(page)) => {
                return Err(Error::Refused(Refused::MemoryInUse { len: self.len, page }));
            }
            Err(RangeInUse::Caller) => {
                let reason = "a call writes to it, or a stream uses it".to_owned();
                return Err(Error::Refused(Refused::Memory { len: self.len, reason }));
            }
        }
        let named = self.memory.device.alias(self.memory.place, self.span());
        named.map(Some).inspect_err(|_| self.end_loan())
    }

    /// Records that the page has left these bytes, while a lane may still use them.
    pub(crate) fn retire_loan(&self) {
        self.memory.link.ranges.retire(self.range());
    }

    /// Ends the loan: the store no longer uses these bytes.
    pub(crate) fn end_loan(&self) {
        self.memory.link.ranges.end(self.range());
    }

    /// Returns a sub-range of these bytes.
    ///
    /// # Errors
    /// [`Error::Refused`] if the range exceeds these bytes.
    pub fn part(&self, range: Range<u64>) -> Result<Self> {
        let within = range.start <= range.end && range.end <= self.len;
        if !within {
            let reason = format!("bytes {}..{} are not within them", range.start, range.end);
            return Err(Error::Refused(Refused::Memory { len: self.len, reason }));
        }
        Ok(Self { offset: self.offset + range.start, len: range.end - range.start, ..self.clone() })
    }

    /// Returns the same bytes, marked as produced on a caller's stream. A call that uses the returned bytes waits, on
    /// its own thread, for the work queued in the stream at the time of the call. Commits that use no bytes from
    /// streams are not delayed.
    #[must_use]
    pub fn on(&self, stream: RawStream) -> Self {
        Self { stream: Some(stream), ..self.clone() }
    }

    /// Returns the stream that produces the bytes.
    #[must_use]
    pub fn stream(&self) -> Option<RawStream> {
        self.stream
    }

    /// Replaces bytes starting at `offset`, after the work queued in the stream that produces them.
    ///
    /// # Errors
    /// [`Error::Refused`] if the range exceeds these bytes, if a page is stored in them, or if the device rejects the
    /// stream; [`Error::Poisoned`] if the device failed, which also poisons the store; [`Error::Forked`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory.check()?;
        self.try_write(offset, bytes).map_err(|error| self.report_error(error))
    }

    fn try_write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let part = self.part(offset..offset.saturating_add(bytes.len() as u64))?;
        // Until this value is dropped, no page is stored in the bytes.
        let (_no_page_comes, target) = part.begin_write()?;
        let mut staging = self.memory.device.staging(bytes.len())?;
        staging.copy_from_slice(bytes);
        let source = StagingSpan { index: 0, offset: 0, len: bytes.len() };
        self.run(Command::Upload { source, target }, staging).map(drop)
    }

    /// Fills `out` with the bytes starting at `offset`, after the work queued in the stream that produces
    /// them.
    ///
    /// # Errors
    /// Same as [`DeviceBytes::write`].
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.memory.check()?;
        self.try_read(offset, out).map_err(|error| self.report_error(error))
    }

    fn try_read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let source = self.part(offset..offset.saturating_add(out.len() as u64))?.arrived(Access::Read)?;
        let target = StagingSpan { index: 0, offset: 0, len: out.len() };
        let staging = self.memory.device.staging(out.len())?;
        out.copy_from_slice(&self.run(Command::Download { source, target }, staging)?[..out.len()]);
        Ok(())
    }

    /// Checks that this process created the bytes.
    ///
    /// # Errors
    /// [`Error::Forked`] in any other process, such as a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.memory.check().map(drop)
    }

    /// Returns the range for commands of the device that owns the memory.
    pub(crate) fn span(&self) -> Span {
        Span { memory: self.memory.memory, offset: self.offset, len: self.len }
    }

    /// Checks that the memory belongs to `device`.
    ///
    /// # Errors
    /// [`Error::Refused`] if the memory belongs to another device.
    pub(crate) fn check_device(&self, device: &Arc<EngineDevice>) -> Result<()> {
        if self.memory.device.is_same(device) {
            return Ok(());
        }
        let reason = "it is another store's: make it with this one's `device_bytes`".to_owned();
        Err(Error::Refused(Refused::Memory { len: self.len, reason }))
    }

    fn run(&self, command: Command, staging: super::Staging) -> Result<super::Staging> {
        let list = CommandList { commands: vec![command], staging: vec![staging] };
        let device = &*self.memory.device;
        let mut returned = device.finish(device.submit(Lane::Stage, list)?)?;
        Ok(returned.pop().expect("one staging went in"))
    }
}

impl fmt::Debug for DeviceBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBytes({} bytes in {}", self.len, self.memory.place)?;
        self.stream.map_or(Ok(()), |stream| write!(f, " on stream {:#x}", stream.handle()))?;
        f.write_str(")")
    }
}
