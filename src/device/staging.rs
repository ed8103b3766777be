//! Staging: host memory that a list owns while it runs, and gets back to its caller when it is done.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{Device, Fence};
use crate::error::Result;

/// Host memory that a lane copies from or to. It is readable and writable while the caller owns it. While a
/// list owns it no other code can touch it, which is what asynchronous copies demand.
pub struct Staging(Box<dyn StagingMemory>);

/// The memory that a device makes staging of.
pub trait StagingMemory: Any + Send + Sync {
    /// The bytes, to read.
    fn bytes(&self) -> &[u8];
    /// The bytes, to write.
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
    /// Staging made of that memory.
    pub fn new(memory: impl StagingMemory + 'static) -> Self {
        Self(Box::new(memory))
    }

    /// The memory that it is made of. For devices, to tell it from other devices' staging.
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

/// A list in flight. It keeps the list's staging until the fence has passed.
#[derive(Debug)]
pub struct Pending {
    fence: Fence,
    returned: Arc<ReturnedStaging>,
}

/// The place where a device leaves a list's staging when the list is done.
pub type ReturnedStaging = crate::base::sync::Mutex<Vec<Staging>>;

impl Pending {
    /// A list that passes `fence` and whose staging will lie in `returned` by then. For devices.
    #[must_use]
    pub fn new(fence: Fence, returned: Arc<ReturnedStaging>) -> Self {
        Self { fence, returned }
    }

    /// The fence that passes when the list is done.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Waits for the fence and gives the staging back, in the list's order.
    ///
    /// # Errors
    /// A device error.
    pub fn finish(self, device: &dyn Device) -> Result<Vec<Staging>> {
        device.wait(self.fence)?;
        Ok(std::mem::take(&mut *self.returned.lock()))
    }
}
