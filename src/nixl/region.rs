//! Registered memory: regions of this agent, and descriptions of regions of other agents.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_int;
use std::fmt;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use remanent_format::Place;

use self::sealed::Location;
use super::endpoint::Endpoint;
use super::library::{Owned, Raw};
use super::wire::{Reader, Writer};
use crate::applier::descriptor::{MemoryDescriptor, MemoryKind};
use crate::applier::lease::Lease;
use crate::applier::pin::Pin;
use crate::base::sync::Mutex;
use crate::device::DeviceBytes;
use crate::error::{Error, NixlError, Result, Unavailable};

/// The magic number and the version of an encoded [`RemoteRegion`].
const MAGIC: [u8; 4] = *b"RMNr";
const VERSION: u8 = 1;

/// Alignment of a [`HostBuffer`] in bytes: the page size of the system.
const ALIGN: usize = 4096;

/// The kind of memory of a region. The numbers are those of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionKind {
    /// Host memory, which may be pinned.
    Host = 0,
    /// Memory of a GPU.
    Device = 1,
    /// A file.
    File = 4,
}

impl RegionKind {
    fn of(number: u8) -> Option<Self> {
        [Self::Host, Self::Device, Self::File].into_iter().find(|kind| *kind as u8 == number)
    }

    pub(super) fn number(self) -> c_int {
        self as c_int
    }
}

impl Location {
    /// Returns an error if the range is empty or exceeds the region.
    fn check(&self, offset: u64, len: u64) -> Result<(), NixlError> {
        let end = offset.checked_add(len);
        if len == 0 || end.is_none_or(|end| end > self.len) {
            return Err(NixlError::OutOfRegion { offset, len, region_len: self.len });
        }
        Ok(())
    }
}

pub(super) mod sealed {
    use super::RegionKind;
    use crate::error::Result;

    /// The location of a region in its process.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Location {
        pub kind: RegionKind,
        /// Address of the first byte, or its offset in a file.
        pub address: u64,
        pub len: u64,
        /// Number of the GPU, file descriptor, or 0.
        pub device: u64,
        /// Whether transfers may write to the region.
        pub is_writable: bool,
    }

    /// The implementation of [`Memory`](super::Memory).
    pub trait Located {
        /// Returns the location of the bytes, which does not change during the lifetime of the value.
        fn location(&self) -> Result<Location>;

        /// Waits until the memory contains all bytes that were written before this call.
        fn wait_written(&self) -> Result<()> {
            Ok(())
        }
    }
}

/// Memory that an agent can register: a [`Lease`], a [`Pin`], [`DeviceBytes`], a [`HostBuffer`] or a [`FileRange`].
///
/// Transfers can only read leased and pinned pages, because the store would not log writes to them. A transfer that
/// writes a pinned page to a peer contains every batch that was submitted before the transfer starts. Commit no further
/// batch to the page until the transfer has ended. Transfers do not synchronize with streams: wait for the work of
/// streams on [`DeviceBytes`] before starting a transfer.
pub trait Memory: sealed::Located + Send + Sync {}

impl<M: sealed::Located + Send + Sync> Memory for M {}

/// Returns the location of a page that has an address.
fn location_of_page(page: &MemoryDescriptor) -> Result<Location> {
    let (kind, device) = match page.kind {
        MemoryKind::Device => (RegionKind::Device, page.gpu.unwrap_or(0)),
        MemoryKind::Pinned | MemoryKind::Host => (RegionKind::Host, 0),
        MemoryKind::Unified => {
            return Err(NixlError::UnsupportedMemory { kind: page.kind.to_string() }.into());
        }
    };
    Ok(Location { kind, address: page.address, len: page.len, device: device.into(), is_writable: false })
}

impl sealed::Located for Lease<'_> {
    fn location(&self) -> Result<Location> {
        if self.address().is_some() {
            return location_of_page(&self.descriptor()?);
        }
        // The slice stays at this address, even if the lease value is moved.
        let bytes = self.bytes()?;
        let address = bytes.as_ptr().expose_provenance() as u64;
        Ok(Location {
            kind: RegionKind::Host,
            address,
            len: bytes.len() as u64,
            device: 0,
            is_writable: false,
        })
    }
}

impl sealed::Located for Pin<'_> {
    fn location(&self) -> Result<Location> {
        location_of_page(&self.descriptor()?)
    }

    fn wait_written(&self) -> Result<()> {
        self.wait_applied()
    }
}

impl sealed::Located for DeviceBytes {
    fn location(&self) -> Result<Location> {
        self.check_unused()?;
        let place = self.place();
        let reason = "kernels cannot reach these bytes, so they have no address";
        let address = self.address().ok_or(Error::Unavailable(Unavailable::Place { place, reason }))?;
        let (kind, device) = match place {
            Place::Device(_) => (RegionKind::Device, self.gpu().unwrap_or(0)),
            Place::Unified => return Err(NixlError::UnsupportedMemory { kind: place.to_string() }.into()),
            _ => (RegionKind::Host, 0),
        };
        Ok(Location { kind, address, len: self.byte_len(), device: device.into(), is_writable: true })
    }
}

/// Host memory for transfers, zeroed and aligned to 4096 bytes. Clones refer to the same bytes.
///
/// Bytes are copied in and out instead of being borrowed, because a peer may write to a registered buffer at any time.
///
/// ```
/// use remanent::nixl::HostBuffer;
/// let buffer = HostBuffer::new(1024)?;
/// buffer.write(16, b"born")?;
/// let mut bytes = [0; 6];
/// buffer.read(15, &mut bytes)?;
/// assert_eq!(&bytes, b"\0born\0");
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone)]
pub struct HostBuffer(Arc<HostBytes>);

struct HostBytes {
    start: NonNull<u8>,
    len: usize,
    /// Locked while this process copies bytes in or out.
    copying: Mutex<()>,
}

// SAFETY: the value owns the allocation, and the lock excludes concurrent accesses of threads.
unsafe impl Send for HostBytes {}
// SAFETY: as above.
unsafe impl Sync for HostBytes {}

impl HostBytes {
    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len.max(1), ALIGN).ok()
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        let layout = Self::layout(self.len).expect("the layout of the allocation");
        // SAFETY: the memory was allocated with this layout and is not used again.
        unsafe { dealloc(self.start.as_ptr(), layout) };
    }
}

impl HostBuffer {
    /// Allocates a zeroed buffer of `len` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(len: usize) -> Result<Self> {
        let short = || Error::OutOfMemory { place: Place::Host, len: len as u64 };
        let layout = HostBytes::layout(len).ok_or_else(short)?;
        // SAFETY: the layout has a length of at least 1.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(short)?;
        Ok(Self(Arc::new(HostBytes { start, len, copying: Mutex::default() })))
    }

    /// Returns the length of the buffer in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.0.len as u64
    }

    /// Copies bytes from the buffer, starting at `offset`, to `out`.
    ///
    /// # Errors
    /// [`NixlError::OutOfRegion`] if the range exceeds the buffer.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let _copying = self.0.copying.lock();
        let from = self.at(offset, out.len())?;
        // SAFETY: the range is part of the allocation, and the caller owns the slice. If a peer writes at the same
        // time, the copy contains some of the peer's bytes.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Appends `len` bytes from the buffer, starting at `offset`, to `out`, which must have capacity for them.
    ///
    /// # Errors
    /// `OutOfRegion`.
    pub(super) fn append(&self, offset: u64, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let _copying = self.0.copying.lock();
        let from = self.at(offset, len)?;
        let spare = &mut out.spare_capacity_mut()[..len];
        // SAFETY: the range is part of the allocation, and the caller owns the spare capacity. If a peer writes at the
        // same time, the copy contains some of the peer's bytes.
        unsafe { std::ptr::copy_nonoverlapping(from, spare.as_mut_ptr().cast(), len) };
        let filled = out.len() + len;
        // SAFETY: the bytes up to this length were filled.
        unsafe { out.set_len(filled) };
        Ok(())
    }

    /// Copies `bytes` into the buffer, starting at `offset`.
    ///
    /// # Errors
    /// [`NixlError::OutOfRegion`] if the range exceeds the buffer.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let _copying = self.0.copying.lock();
        let to = self.at(offset, bytes.len())?;
        // SAFETY: the range is part of the allocation, the lock excludes other threads, and the slice belongs to the
        // caller.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Returns the address of a range.
    fn at(&self, offset: u64, len: usize) -> Result<*mut u8> {
        let region_len = self.byte_len();
        let end = offset.checked_add(len as u64);
        if end.is_none_or(|end| end > region_len) {
            return Err(NixlError::OutOfRegion { offset, len: len as u64, region_len }.into());
        }
        // SAFETY: the offset is at most the length of the allocation.
        Ok(unsafe { self.0.start.as_ptr().add(offset as usize) })
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("byte_len", &self.byte_len()).finish()
    }
}

impl sealed::Located for HostBuffer {
    fn location(&self) -> Result<Location> {
        let address = self.0.start.as_ptr().expose_provenance() as u64;
        Ok(Location { kind: RegionKind::Host, address, len: self.byte_len(), device: 0, is_writable: true })
    }
}

/// The first bytes of a file, for agents with [`Backend::posix`](super::Backend::posix).
///
/// To register an image file of a store, open the file while a [`View`](crate::View) of a snapshot with that image
/// exists, and keep the view for the lifetime of the region. Otherwise, the store may reuse the file for other images.
#[derive(Debug)]
pub struct FileRange {
    file: File,
    len: u64,
    is_writable: bool,
}

impl FileRange {
    /// Creates a range of the first `len` bytes of a file that is open for reading. Transfers can only read these
    /// bytes.
    #[must_use]
    pub fn new(file: File, len: u64) -> Self {
        Self { file, len, is_writable: false }
    }

    /// Creates a range of the first `len` bytes of a file that is open for reading and writing.
    #[must_use]
    pub fn writable(file: File, len: u64) -> Self {
        Self { file, len, is_writable: true }
    }
}

impl sealed::Located for FileRange {
    fn location(&self) -> Result<Location> {
        let (kind, device) = (RegionKind::File, self.file.as_raw_fd() as u64);
        Ok(Location { kind, address: 0, len: self.len, device, is_writable: self.is_writable })
    }
}

/// Memory that is registered with an agent. Returned by [`Agent::register`](super::Agent::register).
///
/// The region keeps its memory alive: a page stays leased or pinned until the region and all its transfers are dropped.
/// In a forked child, dropping a region frees nothing.
pub struct Region<M: Memory>(Arc<Registration<M>>);

/// A registration of memory with an agent. Dropping it deregisters the memory.
pub(super) struct Registration<M: Memory> {
    agent: Arc<Endpoint>,
    location: Location,
    memory: ManuallyDrop<M>,
}

/// A registration of memory of any type.
pub(super) trait Registered: Send + Sync {
    fn agent(&self) -> &Arc<Endpoint>;
    fn location(&self) -> &Location;
    fn wait_written(&self) -> Result<()>;
}

impl<M: Memory> Registered for Registration<M> {
    fn agent(&self) -> &Arc<Endpoint> {
        &self.agent
    }

    fn location(&self) -> &Location {
        &self.location
    }

    fn wait_written(&self) -> Result<()> {
        self.memory.wait_written()
    }
}

impl<M: Memory> Region<M> {
    pub(super) fn register(agent: &Arc<Endpoint>, memory: M) -> Result<Self> {
        let location = memory.location()?;
        memory.wait_written()?;
        location.check(0, location.len)?;
        let list = list(agent, &location)?;
        let library = agent.library();
        // SAFETY: the agent and the list are live, and `memory` keeps the range valid until the registration ends.
        unsafe { library.register(agent.raw()?, list.raw(), std::ptr::null_mut()) }
            .map_err(|fault| agent.failed(fault))?;
        Ok(Self(Arc::new(Registration { agent: agent.clone(), location, memory: ManuallyDrop::new(memory) })))
    }

    /// Returns the registered memory.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.0.memory
    }

    /// Returns the length of the region in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.0.location.len
    }

    /// Returns a range of the region for the local side of a transfer.
    ///
    /// # Errors
    /// [`NixlError::OutOfRegion`] if the range is empty or exceeds the region.
    pub fn range<'m>(&self, offset: u64, len: u64) -> Result<LocalRange<'m>>
    where
        M: 'm,
    {
        self.0.location.check(offset, len)?;
        Ok(LocalRange { region: self.0.clone(), offset, len })
    }

    /// Returns a description of the region for peers. A peer that loaded this agent's metadata before the region was
    /// registered must load it again.
    #[must_use]
    pub fn describe(&self) -> RemoteRegion {
        RemoteRegion { agent: self.0.agent.name().to_owned(), location: self.0.location }
    }
}

impl<M: Memory> fmt::Debug for Region<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Location { kind, len, .. } = &self.0.location;
        f.debug_struct("Region").field("kind", kind).field("byte_len", len).finish_non_exhaustive()
    }
}

impl<M: Memory> Drop for Registration<M> {
    fn drop(&mut self) {
        // A forked child must not use the agent of its parent. The parent's registration is not affected.
        let Ok(raw) = self.agent.raw() else { return };
        let ended = list(&self.agent, &self.location).and_then(|list| {
            // SAFETY: the agent and the list are live, and no transfer with the region is in flight.
            let ended = unsafe { self.agent.library().deregister(raw, list.raw(), std::ptr::null_mut()) };
            ended.map_err(|fault| self.agent.failed(fault))
        });
        match ended {
            // SAFETY: the memory is not used again.
            Ok(_) => unsafe { ManuallyDrop::drop(&mut self.memory) },
            // The library may still access the memory, so the memory is leaked.
            Err(error) => tracing::warn!(%error, "cannot deregister memory; it stays allocated"),
        }
    }
}

/// Creates a list of registrations that contains one location.
fn list(agent: &Endpoint, location: &Location) -> Result<Owned> {
    let library = agent.library();
    let kind = location.kind.number();
    let failed = |fault| agent.failed(fault);
    let list = Owned::create(
        library,
        // SAFETY: the pointer points to a live handle.
        |list| unsafe { library.create_registrations(kind, list) },
        super::library::Library::destroy_registrations,
    )
    .map_err(failed)?;
    let Location { address, len, device, .. } = *location;
    // SAFETY: the list is live, and the registration has no metadata.
    unsafe {
        library.add_registration(list.raw(), address as usize, len as usize, device, std::ptr::null(), 0)
    }
    .map_err(failed)?;
    Ok(list)
}

/// A range of a [`Region`]. The range keeps the region registered.
#[derive(Clone)]
pub struct LocalRange<'m> {
    pub(super) region: Arc<dyn Registered + 'm>,
    offset: u64,
    pub(super) len: u64,
}

impl LocalRange<'_> {
    /// Returns the address and the device of the range.
    pub(super) fn address(&self) -> (usize, u64) {
        let location = self.region.location();
        ((location.address + self.offset) as usize, location.device)
    }
}

impl fmt::Debug for LocalRange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalRange")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A description of a region of another agent. The owner creates it with [`Region::describe`], and sends its
/// [bytes](RemoteRegion::to_bytes) to peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    agent: String,
    location: Location,
}

impl RemoteRegion {
    /// Returns the name of the agent that registered the region.
    #[must_use]
    pub fn agent(&self) -> &str {
        &self.agent
    }

    /// Returns the kind of memory.
    #[must_use]
    pub fn kind(&self) -> RegionKind {
        self.location.kind
    }

    /// Returns the length of the region in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.location.len
    }

    /// Returns true if transfers may write to the region.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.location.is_writable
    }

    /// Returns a range of the region for the remote side of a transfer.
    ///
    /// # Errors
    /// [`NixlError::OutOfRegion`] if the range is empty or exceeds the region.
    pub fn range(&self, offset: u64, len: u64) -> Result<RemoteRange> {
        self.location.check(offset, len)?;
        Ok(RemoteRange { region: self.clone(), offset, len })
    }

    /// Encodes the description, so that the caller can send it to peers.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let Location { kind, address, len, device, is_writable } = self.location;
        Writer::new(MAGIC, VERSION)
            .u8(kind as u8)
            .u8(is_writable.into())
            .u64(address)
            .u64(len)
            .u64(device)
            .bytes(self.agent.as_bytes())
            .finish()
    }

    /// Decodes a description that a peer encoded with [`to_bytes`](RemoteRegion::to_bytes).
    ///
    /// # Errors
    /// [`NixlError::InvalidMetadata`], [`NixlError::OtherPeerVersion`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (version, mut reader) = Reader::open(bytes, MAGIC)?;
        if version != VERSION {
            return Err(super::metadata::other_message_version("of the region", version, VERSION).into());
        }
        let invalid = NixlError::InvalidMetadata { reason: "the kind of memory is unknown" };
        let kind = RegionKind::of(reader.u8()?).ok_or(invalid)?;
        let is_writable = reader.u8()? != 0;
        let (address, len, device) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let agent = reader.text()?;
        reader.finish()?;
        if address.checked_add(len).is_none() {
            return Err(NixlError::InvalidMetadata { reason: "the region exceeds the address space" }.into());
        }
        Ok(Self { agent, location: Location { kind, address, len, device, is_writable } })
    }
}

/// A range of a [`RemoteRegion`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteRange {
    pub(super) region: RemoteRegion,
    offset: u64,
    pub(super) len: u64,
}

impl RemoteRange {
    /// Returns the address and the device of the range.
    pub(super) fn address(&self) -> (usize, u64) {
        let Location { address, device, .. } = self.region.location;
        ((address + self.offset) as usize, device)
    }
}

/// Creates a list of ranges for a transfer.
pub(super) fn ranges(
    agent: &Endpoint,
    kind: RegionKind,
    ranges: impl Iterator<Item = ((usize, u64), u64)>,
) -> Result<Owned> {
    let library = agent.library();
    let failed = |fault| agent.failed(fault);
    let list = Owned::create(
        library,
        // SAFETY: the pointer points to a live handle.
        |list: *mut Raw| unsafe { library.create_ranges(kind.number(), list) },
        super::library::Library::destroy_ranges,
    )
    .map_err(failed)?;
    for ((address, device), len) in ranges {
        // SAFETY: the list is live.
        unsafe { library.add_range(list.raw(), address, len as usize, device) }.map_err(failed)?;
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_description_round_trips() {
        let location =
            Location { kind: RegionKind::Device, address: 1 << 40, len: 8192, device: 3, is_writable: true };
        let region = RemoteRegion { agent: "trainer-1".to_owned(), location };
        assert_eq!(RemoteRegion::from_bytes(&region.to_bytes()).unwrap(), region);
        let beyond = RemoteRegion { location: Location { address: u64::MAX, ..location }, ..region };
        let error = RemoteRegion::from_bytes(&beyond.to_bytes()).unwrap_err();
        assert!(error.to_string().contains("the region exceeds the address space"), "{error}");
        let unknown = Writer::new(MAGIC, VERSION).u8(2).u8(0).u64(0).u64(1).u64(0).bytes(b"a").finish();
        assert!(RemoteRegion::from_bytes(&unknown).is_err());
        let newer = Writer::new(MAGIC, VERSION + 1).finish();
        let error = RemoteRegion::from_bytes(&newer).unwrap_err();
        assert!(
            matches!(&error, Error::Nixl(error) if matches!(**error, NixlError::OtherPeerVersion { .. }))
        );
    }

    #[test]
    fn buffer_accesses_are_bounds_checked() {
        let buffer = HostBuffer::new(8).unwrap();
        assert!(buffer.read(8, &mut []).is_ok() && buffer.write(4, b"abcd").is_ok());
        for (offset, len) in [(9, 0), (8, 1), (5, 4), (u64::MAX, 2)] {
            assert!(buffer.read(offset, &mut vec![0; len]).is_err(), "{offset} {len}");
            assert!(buffer.write(offset, &vec![0; len]).is_err(), "{offset} {len}");
        }
        assert!(HostBuffer::new(usize::MAX).is_err());
    }
}
