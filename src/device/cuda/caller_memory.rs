//! Memory of the caller's: the code that vouches for it, and what CUDA can tell of it.
//!
//! The driver knows every address that it gave out, its kind and its length. So an address that it never gave
//! out, a length that is too long, and the memory of another GPU are refused before any access to them. Memory
//! that was mapped piece by piece, as expandable segments are, may reach over several mappings. The driver
//! cannot tell whether the memory is still what the caller takes it for: its owner is held for that.

use std::any::Any;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use remanent_format::Place;

use super::context::{Context, ContextGuard};
use super::resource::Kind;
use crate::device::CallerMemory;
use crate::error::{Error, Result};

/// Questions that the driver answers about an address, by its numbers.
mod attribute {
    use std::ffi::c_uint;

    pub const MEMORY_TYPE: c_uint = 2;
    pub const IS_MANAGED: c_uint = 8;
    pub const DEVICE_ORDINAL: c_uint = 9;
    pub const IS_LEGACY_IPC_CAPABLE: c_uint = 10;
    pub const RANGE_START: c_uint = 11;
    pub const RANGE_LEN: c_uint = 12;
}

/// The driver's number for memory of the host, which it pinned.
const TYPE_HOST: c_uint = 1;
/// The driver's number for memory of a GPU.
const TYPE_DEVICE: c_uint = 2;

impl CallerMemory {
    /// `len` bytes at the address that kernels use, such as a tensor's `data_ptr()`: in the memory of the GPU
    /// that holds the pages, in pinned memory of the host, or in managed memory. `owner` keeps them, and is
    /// dropped with the last handle to them.
    ///
    /// # Safety
    /// As long as `owner` lives the bytes are there, and are not given to anything else.
    #[must_use]
    pub unsafe fn from_cuda(address: u64, len: u64, owner: impl Any + Send + Sync) -> Self {
        Self { address, len, owner: Arc::new(owner) }
    }
}

/// A piece of the driver's memory: an allocation, or a mapping of an address range that was reserved.
struct Piece {
    kind: Kind,
    /// The address after its last byte.
    end: u64,
    /// Whether it is a mapping: others may follow it that the caller takes for one memory, as expandable
    /// segments do.
    is_mapping: bool,
}

/// The kind of memory in which the range lies.
///
/// # Errors
/// `MemoryRefused`, a device error.
pub(super) fn kind_of(context: &Context, entered: &ContextGuard<'_>, memory: &CallerMemory) -> Result<Kind> {
    let refused = |reason: String| Err(Error::MemoryRefused { len: memory.len, reason });
    if memory.len == 0 {
        return refused("it is empty".to_owned());
    }
    if memory.address == 0 {
        return refused("it lies on the host, where only a store without a GPU finds it".to_owned());
    }
    let at = Asked { context, entered, address: memory.address, len: memory.len };
    let Some(first) = at.piece()? else {
        return refused(format!("CUDA knows of no memory at {:#x}", memory.address));
    };
    let mut end = first.end;
    while end - memory.address < memory.len {
        let next = if first.is_mapping { Asked { address: end, ..at }.piece()? } else { None };
        match next {
            Some(next) if next.is_mapping && next.kind == first.kind => end = next.end,
            _ => {
                let there = end - memory.address;
                return refused(format!(
                    "the allocation at {:#x} has {there} bytes from there on",
                    memory.address
                ));
            }
        }
    }
    Ok(first.kind)
}

/// An address that the driver is asked about.
#[derive(Clone, Copy)]
struct Asked<'a> {
    context: &'a Context,
    entered: &'a ContextGuard<'a>,
    address: u64,
    /// The length of the whole range, for an error.
    len: u64,
}

impl Asked<'_> {
    /// The piece in which the address lies; `None` where the driver knows nothing of it.
    fn piece(&self) -> Result<Option<Piece>> {
        let Self { address, .. } = *self;
        let Some(memory_type) = self.ask::<c_uint>(attribute::MEMORY_TYPE)? else { return Ok(None) };
        let start = self.ask::<u64>(attribute::RANGE_START)?.unwrap_or(address);
        let len = self.ask::<usize>(attribute::RANGE_LEN)?.unwrap_or(0) as u64;
        let kind = self.kind(memory_type)?;
        let is_mapping = kind == Kind::Device
            && self.ask::<c_int>(attribute::IS_LEGACY_IPC_CAPABLE)?.is_some_and(|is| is == 0);
        // What no byte follows is no piece: a walk over such would not end.
        let end = start.saturating_add(len);
        Ok((end > address).then_some(Piece { kind, end, is_mapping }))
    }

    fn kind(&self, memory_type: c_uint) -> Result<Kind> {
        let refused = |reason: String| Err(Error::MemoryRefused { len: self.len, reason });
        if self.ask::<c_uint>(attribute::IS_MANAGED)?.is_some_and(|managed| managed != 0) {
            return Ok(Kind::Managed);
        }
        match memory_type {
            TYPE_HOST => Ok(Kind::Pinned),
            TYPE_DEVICE => match self.ask::<c_int>(attribute::DEVICE_ORDINAL)? {
                Some(ordinal) if ordinal as u32 == self.context.ordinal => Ok(Kind::Device),
                other => refused(format!("it is memory of GPU {}", other.unwrap_or(-1))),
            },
            other => refused(format!("CUDA calls it memory of type {other}, which has no plain bytes")),
        }
    }

    /// The driver's answer; `None` where it knows nothing of the address.
    fn ask<T: Default>(&self, attribute: c_uint) -> Result<Option<T>> {
        let mut value = T::default();
        // SAFETY: the context is current; the value is of the type that this attribute has, by the constants
        // above and their uses. Any address may be asked for.
        let asked =
            unsafe { self.entered.pointer_attribute((&raw mut value).cast(), attribute, self.address) };
        match asked {
            Ok(()) => Ok(Some(value)),
            Err(code) if code.is_invalid_value() => Ok(None),
            Err(code) => Err(self.context.fault(code)),
        }
    }
}

/// The place of memory of this kind.
pub(super) fn place_of(kind: Kind) -> Place {
    match kind {
        Kind::Device => Place::Device(0),
        Kind::Pinned => Place::Pinned,
        Kind::Managed => Place::Unified,
    }
}
