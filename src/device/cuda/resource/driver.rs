//! The sources that wrap no other source: the CUDA driver, and the host's own allocator for machines without a GPU.

use std::alloc::Layout;
use std::ffi::c_void;

use remanent_format::Place;

use super::{ALIGN, MemoryAccess, MemoryResource, StreamPoint, StreamPoints};
use crate::base::sync::Mutex;
use crate::device::RawStream;
use crate::device::cuda::completion::Stream;
use crate::device::cuda::context::Context;
use crate::device::cuda::errors::Code;
use crate::device::cuda::event::CudaEvent;
use crate::device::cuda::stream;
use crate::error::{Error, Result, Unavailable};

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: every GPU can access the memory, at the same address. The
/// host's caches stay enabled for it, because the host reads downloaded bytes.
const HOST_FLAGS: u32 = 3;
/// `CU_MEM_ATTACH_GLOBAL`: work on every stream may access the memory.
const MANAGED_FLAGS: u32 = 1;

/// The kind of memory that the driver allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::device::cuda) enum Kind {
    /// The GPU's own memory.
    Device,
    /// Pinned host memory, at an address that the GPU uses too.
    Pinned,
    /// Managed memory, which migrates to the side that uses it.
    Managed,
}

impl Kind {
    /// All kinds of memory, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Device, Self::Pinned, Self::Managed];
}

/// Memory allocated by the driver. A call takes up to milliseconds, and freeing memory waits for all work of the GPU.
/// Wrap this source in a [`Pool`](super::Pool).
pub struct DriverMemory {
    context: &'static Context,
    kind: Kind,
    /// The stream for [`MemoryAccess`], created on first use.
    stream: Mutex<Option<Stream>>,
}

impl DriverMemory {
    /// Creates a source for the memory of the GPU with this number among those visible to the process.
    ///
    /// # Errors
    /// `Unavailable`, which names the missing part.
    pub fn of(ordinal: u32) -> Result<Self> {
        let unavailable =
            |reason| Error::Unavailable(Unavailable::Device { device: format!("cuda:{ordinal}"), reason });
        Ok(Self::new(Context::of(ordinal).map_err(unavailable)?, Kind::Device))
    }

    pub(in crate::device::cuda) fn new(context: &'static Context, kind: Kind) -> Self {
        Self { context, kind, stream: Mutex::new(None) }
    }

    fn error(&self, code: Code, len: u64) -> Error {
        if code.is_out_of_memory() { self.out_of_memory(len) } else { self.context.fault(code) }
    }

    fn out_of_memory(&self, len: u64) -> Error {
        let place = match self.kind {
            Kind::Device => Place::Device(0),
            Kind::Pinned => Place::Pinned,
            Kind::Managed => Place::Unified,
        };
        Error::OutOfMemory { place, len }
    }

    /// Queues a copy on the source's own stream and waits for it.
    fn copy(&self, queue: impl FnOnce(&Stream) -> Result<()>) -> Result<()> {
        let mut stream = self.stream.lock();
        let stream = match &mut *stream {
            Some(stream) => stream,
            none => none.insert(Stream::new(self.context, false)?),
        };
        queue(stream)?;
        stream.drain()
    }
}

// SAFETY: the driver's own promise, in a context that shares one address space with the host.
unsafe impl MemoryResource for DriverMemory {
    fn allocate(&self, len: u64) -> Result<u64> {
        let Ok(bytes) = usize::try_from(len) else { return Err(self.out_of_memory(len)) };
        let entered = self.context.enter()?;
        match self.kind {
            Kind::Device => {
                let mut address = 0;
                // SAFETY: the context is current, the pointer is to a live address.
                unsafe { entered.allocate(&mut address, bytes) }.map_err(|code| self.error(code, len))?;
                Ok(address)
            }
            Kind::Pinned => {
                let mut address = std::ptr::null_mut();
                // SAFETY: the context is current, the pointer is to a live address.
                unsafe { entered.allocate_host(&mut address, bytes, HOST_FLAGS) }
                    .map_err(|code| self.error(code, len))?;
                Ok(address as u64)
            }
            Kind::Managed => {
                // Managed memory beyond the GPU's free memory can hang the GPU, so such a request is
                // rejected.
                let (mut free, mut total) = (0, 0);
                // SAFETY: the context is current, the pointers are to live integers.
                unsafe { entered.memory_info(&mut free, &mut total) }
                    .map_err(|code| self.error(code, len))?;
                if bytes > free {
                    return Err(self.out_of_memory(len));
                }
                let mut address = 0;
                // SAFETY: the context is current, the pointer is to a live address.
                unsafe { entered.allocate_managed(&mut address, bytes, MANAGED_FLAGS) }
                    .map_err(|code| self.error(code, len))?;
                Ok(address)
            }
        }
    }

    unsafe fn free(&self, address: u64, _len: u64) -> Result<()> {
        // If the context is lost, its memory no longer exists.
        let Ok(entered) = self.context.enter() else { return Ok(()) };
        match self.kind {
            // SAFETY: the caller's promise: the driver allocated it, and nothing uses it.
            Kind::Device | Kind::Managed => unsafe { entered.free(address) },
            // SAFETY: the same.
            Kind::Pinned => unsafe { entered.free_host(address as *mut c_void) },
        }
        .map_err(|code| self.context.fault(code))
    }
}

// SAFETY: copies in the context in which the memory was allocated, waited for before the call returns.
unsafe impl MemoryAccess for DriverMemory {
    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.copy(|stream| {
            let entered = self.context.enter()?;
            let source = bytes.as_ptr().cast::<c_void>();
            // SAFETY: the caller's promise for the target; the source stays valid until the copy was waited
            // for.
            unsafe { entered.copy_to_device(address, source, bytes.len(), stream.raw()) }
                .map_err(|code| self.context.fault(code))
        })
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        self.copy(|stream| {
            let entered = self.context.enter()?;
            let target = bytes.as_mut_ptr().cast::<c_void>();
            // SAFETY: the caller's promise for the source; the target stays valid until the copy was waited
            // for.
            unsafe { entered.copy_to_host(target, address, bytes.len(), stream.raw()) }
                .map_err(|code| self.context.fault(code))
        })
    }
}

impl StreamPoints for DriverMemory {
    fn point(&self, stream: RawStream) -> Result<Box<dyn StreamPoint>> {
        Ok(Box::new(stream::point(self.context, stream)?))
    }
}

impl StreamPoint for CudaEvent {
    fn has_passed(&self) -> Result<bool> {
        self.is_reached()
    }
}

/// A source of ordinary host memory, for trying the wrappers on a machine without a GPU. No GPU can access this memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostMemory;

impl HostMemory {
    fn layout(len: u64) -> Option<Layout> {
        Layout::from_size_align(usize::try_from(len).ok()?, ALIGN as usize).ok()
    }
}

// SAFETY: the allocator's own promise. No kernel can access the memory, as the type's documentation states;
// no launch takes memory from this source.
unsafe impl MemoryResource for HostMemory {
    fn allocate(&self, len: u64) -> Result<u64> {
        let out_of_memory = Error::OutOfMemory { place: Place::Host, len };
        let Some(layout) = Self::layout(len).filter(|layout| layout.size() > 0) else {
            return Err(out_of_memory);
        };
        // SAFETY: the layout is not empty.
        let address = unsafe { std::alloc::alloc_zeroed(layout) };
        if address.is_null() { Err(out_of_memory) } else { Ok(address as u64) }
    }

    unsafe fn free(&self, address: u64, len: u64) -> Result<()> {
        let layout = Self::layout(len).expect("a length that was allocated");
        // SAFETY: the caller's promise: allocated above with this layout, and nothing uses it.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
        Ok(())
    }
}

// SAFETY: the host can access its own memory.
unsafe impl MemoryAccess for HostMemory {
    unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl std::fmt::Debug for DriverMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DriverMemory").finish_non_exhaustive()
    }
}
