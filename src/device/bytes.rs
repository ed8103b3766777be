//! Bytes in a device's memory, as callers hold them: bytes that their kernels write, and that a batch takes.
//!
//! A value keeps its memory, so the holder of a range can use it. Memory is the store's own, or it is the
//! caller's and was adopted; either way its owner is dropped with the last range of it.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use remanent_format::{PageId, Place};

use super::counted::uncounted;
use super::lent_ranges::{CallerUse, MemoryRange, RangeInUse, RangeUse};
use super::memory_link::{MemoryLink, MemoryOwner};
use super::stream_uses::{Access, LastUse, StreamUses};
use super::{CallerMemory, Command, CommandList, Device, Lane, MemoryId, RawStream, Span, StagingSpan};
use crate::base::allocation::collected;
use crate::base::process::ForkGuard;
use crate::error::{Error, Result};

/// A range of a device's memory. Clones are the same bytes; the memory lives as long as one of them.
///
/// Kernels of the caller find it at [`DeviceBytes::address`]. Where pages live in host memory there are no
/// kernels: there, and in tests, [`DeviceBytes::write`] and [`DeviceBytes::read`] take their place.
///
/// ```
/// use remanent::{Options, Place, Store};
/// # use remanent::DeviceChoice;
/// # let options = Options::default().device(DeviceChoice::Host);
/// let store = Store::temporary(options)?;
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

/// A memory, and the owner that gives it back.
struct OwnedMemory {
    device: Arc<dyn Device>,
    memory: MemoryId,
    place: Place,
    /// Where its first byte is: the space, and the offset there.
    origin: (u64, u64),
    /// The ranges in use, of all memory of the store, and the way to the store.
    link: Arc<MemoryLink>,
    /// What streams of the caller's do with it.
    uses: Arc<StreamUses>,
    /// Gives the memory back when it is dropped.
    _owner: Box<dyn Any + Send + Sync>,
}

/// Memory of the caller's own that a device adopted. It is returned to its owner, and never to the arena.
struct AdoptedMemory {
    device: Arc<dyn Device>,
    memory: MemoryId,
    link: Arc<MemoryLink>,
    uses: Arc<StreamUses>,
    owner: Option<MemoryOwner>,
}

impl Drop for AdoptedMemory {
    /// Lists that name it were waited for, all but copies to shadows: those read the store's own memory. The
    /// caller's streams may still use it, and are not waited for here.
    fn drop(&mut self) {
        if let Err(error) = self.device.release(self.memory) {
            tracing::warn!(%error, "a caller's memory stays known to the device");
        }
        let Some(owner) = self.owner.take() else { return };
        match self.uses.last() {
            LastUse::None => drop(owner),
            LastUse::At(fence) => self.link.drop_after(&*self.device, owner, fence),
            // Nothing tells when it may go.
            LastUse::Unknown => std::mem::forget(owner),
        }
    }
}

impl DeviceBytes {
    /// All bytes of a memory. `owner` gives it back when it is dropped, after the streams' uses that it finds
    /// in `uses`.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        memory: MemoryId,
        place: Place,
        len: u64,
        link: Arc<MemoryLink>,
        uses: Arc<StreamUses>,
        owner: impl Any + Send + Sync,
    ) -> Self {
        let origin = device.origin(memory);
        let owned = OwnedMemory { device, memory, place, origin, link, uses, _owner: Box::new(owner) };
        Self { memory: Arc::new(ForkGuard::new(owned)), offset: 0, len, stream: None }
    }

    /// Makes memory of the caller's own known to a device.
    ///
    /// # Errors
    /// `MemoryRefused`; a device error.
    pub(crate) fn adopt(
        device: &Arc<dyn Device>,
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
        Ok(Self::new(device.clone(), id, place, memory.byte_len(), link.clone(), uses, owner))
    }

    /// Length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// The place where the memory is.
    #[must_use]
    pub fn place(&self) -> Place {
        self.memory.place
    }

    /// The address at which kernels find the first byte; `None` where no kernel reaches it, and in a forked
    /// child.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.memory.check().ok()?;
        self.memory.device.address(self.memory.memory).map(|address| address + self.offset)
    }

    /// The page that lives in these bytes, or in a part of them, since [`WriteBatch::create_in`] put it there
    /// or an open did. `None` once the page has left, and in a forked child.
    ///
    /// [`WriteBatch::create_in`]: crate::WriteBatch::create_in
    #[must_use]
    pub fn page(&self) -> Option<PageId> {
        self.memory.check().ok()?;
        self.memory.link.ranges.page_in(self.range())
    }

    /// Where the bytes lie.
    fn range(&self) -> MemoryRange {
        let (space, origin) = self.memory.origin;
        let start = origin + self.offset;
        MemoryRange { space, start, end: start + self.len }
    }

    /// Refuses memory of which two share a byte: copies of one call come in no order.
    ///
    /// # Errors
    /// [`Error::MemoryRefused`].
    pub(crate) fn check_apart<'b>(memory: impl Iterator<Item = &'b Self>) -> Result<()> {
        let mut ranges = collected(memory.filter(|bytes| bytes.len > 0).map(Self::range))?;
        ranges.sort_unstable_by_key(|range| (range.space, range.start));
        match ranges.windows(2).find(|pair| pair[0].overlaps(&pair[1])) {
            None => Ok(()),
            Some(pair) => {
                let reason = "it overlaps other memory of the same call".to_owned();
                Err(Error::MemoryRefused { len: pair[1].end - pair[1].start, reason })
            }
        }
    }

    /// Refuses bytes in which a page lives: only the store writes there.
    ///
    /// # Errors
    /// [`Error::MemoryInUse`].
    pub(crate) fn check_unused(&self) -> Result<()> {
        self.page().map_or(Ok(()), |page| Err(Error::MemoryInUse { len: self.len, page }))
    }

    /// Begins a use of the caller's of these bytes. No page is put there meanwhile.
    ///
    /// # Errors
    /// [`Error::MemoryInUse`] if the use writes, and a page lives there.
    pub(super) fn begin_use(&self, by: CallerUse) -> Result<RangeUse> {
        let begun = self.memory.link.ranges.begin(self.range(), by);
        begun.map_err(|page| Error::MemoryInUse { len: self.len, page })
    }

    /// Waits, on this thread, until the store may use the bytes: until streams' uses that have ended are
    /// done, and the stream on which the bytes are made has come here.
    ///
    /// # Errors
    /// [`Error::MemoryRefused`] while a stream's guard is open; [`Error::StreamRefused`]; a device error.
    pub(crate) fn arrived(&self, access: Access) -> Result<Span> {
        self.wait_uses(access)?;
        if let Some(stream) = self.stream {
            self.memory.device.wait_stream(stream)?;
        }
        Ok(self.span())
    }

    /// Begins a call that writes to these bytes, once the streams' uses of them are done. No page is put
    /// there before the use is dropped.
    ///
    /// # Errors
    /// [`Error::MemoryInUse`]; as for [`arrived`](Self::arrived).
    pub(crate) fn begin_write(&self) -> Result<(RangeUse, Span)> {
        let begun = self.begin_use(CallerUse::Call)?;
        Ok((begun, self.arrived(Access::Write)?))
    }

    /// As [`arrived`](Self::arrived), without the stream on which the bytes are made.
    ///
    /// # Errors
    /// As for `arrived`.
    pub(crate) fn wait_uses(&self, access: Access) -> Result<()> {
        let is_excluded = self.memory.link.ranges.is_excluded_by_stream(self.range(), access);
        // Bytes that are named with their stream are taken as they are there now, guard or not.
        if is_excluded && (self.stream.is_none() || access == Access::Write) {
            let reason = "a stream uses it: end the guard first".to_owned();
            return Err(Error::MemoryRefused { len: self.len, reason });
        }
        let device = &*self.memory.device;
        let points = self.memory.uses.before(device, &self.offsets(), access)?;
        points.iter().try_for_each(|point| device.wait_event(point))
    }

    /// The range in its memory.
    pub(super) fn offsets(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    pub(super) fn device(&self) -> &Arc<dyn Device> {
        &self.memory.device
    }

    pub(super) fn link(&self) -> &MemoryLink {
        &self.memory.link
    }

    pub(super) fn uses(&self) -> &StreamUses {
        &self.memory.uses
    }

    /// The error that the caller sees. A failed device poisons the store, for its pages are lost too.
    pub(super) fn hear(&self, error: Error) -> Error {
        self.memory.link.hear(error)
    }

    /// Lets a page live in these bytes, which are not empty, and returns the name under which it has them;
    /// `None` if a page gave up a part of them that a lane may still use.
    ///
    /// # Errors
    /// [`Error::MemoryInUse`] if a page lives there;
    /// [`Error::MemoryRefused`] while a call writes there or a stream uses it; a device error.
    pub(crate) fn lend(&self, page: PageId) -> Result<Option<MemoryId>> {
        match self.memory.link.ranges.lend(self.range(), page) {
            Ok(()) => {}
            Err(RangeInUse::Retired) => return Ok(None),
            Err(RangeInUse::Page(page)) => return Err(Error::MemoryInUse { len: self.len, page }),
            Err(RangeInUse::Caller) => {
                let reason = "a call writes to it, or a stream uses it".to_owned();
                return Err(Error::MemoryRefused { len: self.len, reason });
            }
        }
        let named = self.memory.device.alias(self.span());
        named.map(Some).inspect_err(|_| self.end_loan())
    }

    /// The page has given these bytes up, and a lane may still use them.
    pub(crate) fn retire_loan(&self) {
        self.memory.link.ranges.retire(self.range());
    }

    /// Nothing of the store uses these bytes any more.
    pub(crate) fn end_loan(&self) {
        self.memory.link.ranges.end(self.range());
    }

    /// A range of these bytes.
    ///
    /// # Errors
    /// [`Error::MemoryRefused`] if it does not lie within them.
    pub fn part(&self, range: Range<u64>) -> Result<Self> {
        let within = range.start <= range.end && range.end <= self.len;
        if !within {
            let reason = format!("bytes {}..{} are not within them", range.start, range.end);
            return Err(Error::MemoryRefused { len: self.len, reason });
        }
        Ok(Self { offset: self.offset + range.start, len: range.end - range.start, ..self.clone() })
    }

    /// The same bytes, made on a stream of the caller's. A call that takes them waits, on its own thread, for
    /// the work that is in the stream by then. Commits that take nothing from streams go on meanwhile.
    #[must_use]
    pub fn on(&self, stream: RawStream) -> Self {
        Self { stream: Some(stream), ..self.clone() }
    }

    /// The stream on which they are made.
    #[must_use]
    pub fn stream(&self) -> Option<RawStream> {
        self.stream
    }

    /// Replaces bytes from `offset` on, when the stream on which they are made has come here.
    ///
    /// # Errors
    /// [`Error::MemoryRefused`] if they are outside; [`Error::MemoryInUse`] if a page lives there;
    /// [`Error::StreamRefused`]; [`Error::Poisoned`] if the device failed, as the store is then;
    /// [`Error::Forked`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.memory.check()?;
        self.try_write(offset, bytes).map_err(|error| self.hear(error))
    }

    fn try_write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let part = self.part(offset..offset.saturating_add(bytes.len() as u64))?;
        // Until the bytes have landed.
        let (_no_page_comes, target) = part.begin_write()?;
        let mut staging = self.memory.device.staging(bytes.len())?;
        staging.copy_from_slice(bytes);
        let source = StagingSpan { index: 0, offset: 0, len: bytes.len() };
        self.run(Command::Upload { source, target }, staging).map(drop)
    }

    /// Fills `out` with the bytes from `offset` on, when the stream on which they are made has come here.
    ///
    /// # Errors
    /// As for [`DeviceBytes::write`].
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.memory.check()?;
        self.try_read(offset, out).map_err(|error| self.hear(error))
    }

    fn try_read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let source = self.part(offset..offset.saturating_add(out.len() as u64))?.arrived(Access::Read)?;
        let target = StagingSpan { index: 0, offset: 0, len: out.len() };
        let staging = self.memory.device.staging(out.len())?;
        out.copy_from_slice(&self.run(Command::Download { source, target }, staging)?[..out.len()]);
        Ok(())
    }

    /// Refuses bytes that a forked child inherited.
    ///
    /// # Errors
    /// [`Error::Forked`], in any process but the one that made them.
    pub(crate) fn check_process(&self) -> Result<()> {
        self.memory.check().map(drop)
    }

    /// The range, for commands of the device on which it lies.
    pub(crate) fn span(&self) -> Span {
        Span { memory: self.memory.memory, offset: self.offset, len: self.len }
    }

    /// Refuses the memory of another device.
    ///
    /// # Errors
    /// [`Error::MemoryRefused`], if it is another device's.
    pub(crate) fn check_device(&self, device: &Arc<dyn Device>) -> Result<()> {
        // Another store on the same device counts by itself, and knows the same memory.
        if ptr::addr_eq(uncounted(&self.memory.device), uncounted(device)) {
            return Ok(());
        }
        let reason = "it is another store's: make it with this one's `device_bytes`".to_owned();
        Err(Error::MemoryRefused { len: self.len, reason })
    }

    fn run(&self, command: Command, staging: super::Staging) -> Result<super::Staging> {
        let list = CommandList { commands: vec![command], staging: vec![staging] };
        let device = &*self.memory.device;
        let mut returned = device.submit(Lane::Stage, list)?.finish(device)?;
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
