//! Memory of the caller's own: where it lies, and the value that keeps it.
//!
//! It lies here, below the devices that adopt it, because an open may be told of it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Memory of the caller's own, such as a tensor's, for a device to adopt. The code that makes one, by
/// `CallerMemory::from_cuda`, vouches for it.
#[derive(Clone)]
pub struct CallerMemory {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) owner: Arc<dyn Any + Send + Sync>,
}

impl CallerMemory {
    /// The address of the first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// The value that keeps the memory.
    pub(crate) fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        self.owner.clone()
    }
}

impl fmt::Debug for CallerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallerMemory({} bytes at {:#x})", self.len, self.address)
    }
}
