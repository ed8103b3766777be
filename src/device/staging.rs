//! Staging: host memory that a list owns while it runs. The caller gets the memory back afterwards.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{Device, Fence};
use crate::error::Result;

/// Host memory that a lane copies from or to. The caller can read and write the memory until it submits it with a list.
/// While a list owns the memory, no other code can access it, as asynchronous copies require.
pub struct Staging(Box<dyn StagingMemory>);

/// The bytes of a [`Staging`], implemented by each device for the kind of host memory that its lanes can copy from and
/// to, such as pinned memory.
pub trait StagingMemory: Any + Send + Sync {
    /// Returns the bytes for reading.
    fn bytes(&self) -> &[u8];
    /// Returns the bytes for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl StagingMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl Staging {
    /// Creates staging backed by `memory`.
    pub fn new(memory: impl StagingMemory + 'static) -> Self {
        Self(Box::new(memory))
    }

    /// Returns the backing memory. A device downcasts it to recognize staging that it created.
    #[must_use]
    pub fn memory(&self) -> &dyn Any {
        &*self.0
    }
}

impl Deref for Staging {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for Staging {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staging({} bytes)", self.len())
    }
}

/// A command list in flight. It keeps the list's staging until the list's fence has passed.
#[derive(Debug)]
pub struct Pending {
    fence: Fence,
    returned: Arc<ReturnedStaging>,
}

/// The slot in which a device leaves a list's staging when the list is done.
pub type ReturnedStaging = crate::base::sync::Mutex<Vec<Staging>>;

impl Pending {
    /// Creates the handle of a list that passes `fence` when it is done. By then, the device must have stored the
    /// list's staging in `returned`. For implementations of devices.
    #[must_use]
    pub fn new(fence: Fence, returned: Arc<ReturnedStaging>) -> Self {
        Self { fence, returned }
    }

    /// Returns the fence that passes when the list is done.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Waits for the fence and returns the staging, in the list's order.
    ///
    /// # Errors
    /// A device error.
    pub fn finish(self, device: &(impl Device + ?Sized)) -> Result<Vec<Staging>> {
        device.wait(self.fence)?;
        Ok(self.take())
    }

    /// Returns the staging of a list that is done.
    pub(super) fn take(self) -> Vec<Staging> {
        std::mem::take(&mut *self.returned.lock())
    }
}
