//! Caller-owned memory: the unsafe constructor, whose caller vouches for the memory, and the driver's checks.
//!
//! The driver records the kind and length of every allocation that it made. Three kinds of memory are therefore
//! rejected before any access: an address that the driver did not allocate, a range that exceeds its allocation, and
//! memory of another GPU. A range that is reserved at once and mapped piece by piece, as by an allocator of expandable
//! segments, counts as one allocation and may lack memory at its end.
//!
//! The driver cannot detect that the memory was freed and reallocated in the meantime. The caller prevents this by
//! passing an owner that keeps the memory alive.

use std::any::Any;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use remanent_format::Place;

use super::context::{Context, ContextGuard};
use super::resource::Kind;
use crate::device::CallerMemory;
use crate::error::{Error, Refused, Result};

/// The driver's numbers for pointer attributes.
mod attribute {
    use std::ffi::c_uint;

    pub const MEMORY_TYPE: c_uint = 2;
    pub const IS_MANAGED: c_uint = 8;
    pub const DEVICE_ORDINAL: c_uint = 9;
    pub const IS_LEGACY_IPC_CAPABLE: c_uint = 10;
    pub const RANGE_START: c_uint = 11;
    pub const RANGE_LEN: c_uint = 12;
    pub const MAPPING_LEN: c_uint = 18;
    pub const MAPPING_START: c_uint = 19;
}

/// The driver's number for pinned host memory.
const TYPE_HOST: c_uint = 1;
/// The driver's number for GPU memory.
const TYPE_DEVICE: c_uint = 2;

impl CallerMemory {
    /// Wraps `len` bytes at the address that kernels use, such as a tensor's `data_ptr()`. The memory may be that of
    /// the GPU that holds the pages, pinned host memory, or managed memory. `owner` keeps the memory alive and is
    /// dropped with the last handle to it.
    ///
    /// # Safety
    /// While `owner` lives, the bytes must exist and must not be used for any other purpose.
    #[must_use]
    pub unsafe fn from_cuda(address: u64, len: u64, owner: impl Any + Send + Sync) -> Self {
        Self { address, len, owner: Arc::new(owner) }
    }
}

/// Returns the kind of memory that contains the range.
///
/// # Errors
/// `Refused` if the device cannot use the range; a device error.
pub(super) fn kind_of(context: &Context, entered: &ContextGuard<'_>, memory: &CallerMemory) -> Result<Kind> {
    let refused = |reason: String| Err(Error::Refused(Refused::Memory { len: memory.len, reason }));
    if memory.len == 0 {
        return refused("it is empty".to_owned());
    }
    if memory.address == 0 {
        return refused("it lies on the host, where only a store without a GPU finds it".to_owned());
    }
    let first = AskedAddress { context, entered, address: memory.address };
    let Some(memory_type) = first.ask::<c_uint>(attribute::MEMORY_TYPE)? else {
        return refused(format!("CUDA knows of no memory at {:#x}", memory.address));
    };
    let start = first.ask::<u64>(attribute::RANGE_START)?.unwrap_or(memory.address);
    let range_len = first.ask::<usize>(attribute::RANGE_LEN)?.unwrap_or(0) as u64;
    let there = start.saturating_add(range_len).saturating_sub(memory.address);
    let there = there.min(first.mapped_len(memory.len)?.unwrap_or(there));
    if there < memory.len {
        return refused(format!("the allocation at {:#x} has {there} bytes from there on", memory.address));
    }
    if first.ask::<c_uint>(attribute::IS_MANAGED)?.is_some_and(|managed| managed != 0) {
        return Ok(Kind::Managed);
    }
    match memory_type {
        TYPE_HOST => Ok(Kind::Pinned),
        TYPE_DEVICE => match first.ask::<c_int>(attribute::DEVICE_ORDINAL)? {
            Some(ordinal) if ordinal as u32 == context.ordinal => Ok(Kind::Device),
            other => refused(format!("it is memory of GPU {}", other.unwrap_or(-1))),
        },
        other => refused(format!("CUDA calls it memory of type {other}, which has no plain bytes")),
    }
}

/// Returns the place whose pages use memory of this kind.
pub(super) fn place_of(kind: Kind) -> Place {
    match kind {
        Kind::Device => Place::Device(0),
        Kind::Pinned => Place::Pinned,
        Kind::Managed => Place::Unified,
    }
}

/// An address about which the driver is queried.
struct AskedAddress<'a> {
    context: &'a Context,
    entered: &'a ContextGuard<'a>,
    address: u64,
}

impl AskedAddress<'_> {
    /// Returns the number of contiguous mapped bytes from this address, at most `len`. Returns `None` if the memory was
    /// not allocated by mapping.
    fn mapped_len(&self, len: u64) -> Result<Option<u64>> {
        let is_mapped =
            self.ask::<c_int>(attribute::IS_LEGACY_IPC_CAPABLE)?.is_some_and(|capable| capable == 0);
        if !is_mapped || self.ask::<usize>(attribute::MAPPING_LEN)?.is_none_or(|len| len == 0) {
            return Ok(None);
        }
        let ordinal = self.ask::<c_int>(attribute::DEVICE_ORDINAL)?;
        let mut end = self.address;
        while end - self.address < len {
            let next = Self { address: end, ..*self };
            let start = next.ask::<u64>(attribute::MAPPING_START)?.unwrap_or(end);
            let mapping_len = next.ask::<usize>(attribute::MAPPING_LEN)?.unwrap_or(0) as u64;
            let is_of_gpu = next.ask::<c_int>(attribute::DEVICE_ORDINAL)? == ordinal;
            let after = start.saturating_add(mapping_len);
            if !is_of_gpu || after <= end {
                break;
            }
            end = after;
        }
        Ok(Some(end - self.address))
    }

    /// Queries an attribute of the address. Returns `None` if the driver has no allocation at the address.
    fn ask<T: Default>(&self, attribute: c_uint) -> Result<Option<T>> {
        let mut value = T::default();
        // SAFETY: the context is current; the value has the type of this attribute, as its uses with the
        // constants above ensure. Any address may be queried.
        let requested =
            unsafe { self.entered.pointer_attribute((&raw mut value).cast(), attribute, self.address) };
        match requested {
            Ok(()) => Ok(Some(value)),
            Err(code) if code.is_invalid_value() => Ok(None),
            Err(code) => Err(self.context.fault(code)),
        }
    }
}
