//! Caller-owned memory and the value that keeps it alive.
//!
//! These types are not in the module of the devices that adopt the memory, because options refer to them, too.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Caller-owned memory, such as a tensor's, that a device can adopt. The code that creates the value with
/// `CallerMemory::from_cuda` or [`CallerMemory::from_host`] guarantees that the memory is valid.
#[derive(Clone)]
pub struct CallerMemory {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) owner: Arc<dyn Any + Send + Sync>,
}

/// Host memory owned by another object, such as an array of another library.
///
/// The store accesses the bytes only during calls whose documentation states that they do. If the owner changes the
/// bytes during such a call, the result is a mixture of old and new bytes.
pub trait HostMemory: Send + Sync {
    /// Returns the length in bytes, which never changes.
    fn byte_len(&self) -> u64;

    /// Returns a range of the bytes for reading.
    ///
    /// # Panics
    /// If the range is out of bounds.
    fn bytes(&self, range: Range<usize>) -> &[u8];

    /// Returns a range of the bytes for writing.
    ///
    /// # Panics
    /// If the range is out of bounds.
    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8];
}

impl CallerMemory {
    /// Returns the address of the first byte, or 0 for memory that only the host device can access.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// Returns the value that keeps the memory alive.
    pub(crate) fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        self.owner.clone()
    }
}

impl fmt::Debug for CallerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallerMemory({} bytes at {:#x})", self.len, self.address)
    }
}
