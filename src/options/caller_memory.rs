//! Memory of the caller's own: where it lies, and the value that keeps it.
//!
//! It lies here, below the devices that adopt it, because an open may be told of it.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Memory of the caller's own, such as a tensor's, for a device to adopt. The code that makes one, by
/// `CallerMemory::from_cuda` or [`CallerMemory::from_host`], vouches for it.
#[derive(Clone)]
pub struct CallerMemory {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) owner: Arc<dyn Any + Send + Sync>,
}

/// Memory on the host that something else owns, such as an array of another library's.
///
/// The store looks at the bytes, and changes them, within the calls that say so; the owner leaves them alone
/// meanwhile, or a call takes some of both.
pub trait HostMemory: Send + Sync {
    /// Length in bytes. It never changes.
    fn byte_len(&self) -> u64;

    /// A range of the bytes, to read.
    ///
    /// # Panics
    /// If they do not lie in the memory.
    fn bytes(&self, range: Range<usize>) -> &[u8];

    /// A range of the bytes, to write.
    ///
    /// # Panics
    /// As for [`bytes`](Self::bytes).
    fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8];
}

impl CallerMemory {
    /// The address of the first byte; 0 for memory that only the host device finds.
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
