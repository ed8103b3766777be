//! The link between a store and the memory handles that callers hold: the ranges in use, and a connection back to the
//! store.
//!
//! Handles may outlive their store, and an open adopts caller-owned memory before the store exists. Therefore each
//! handle refers to a link, and the store connects to the link when it starts.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use super::lent_ranges::LentRanges;
use super::{EngineDevice, Fence};
use crate::error::{Error, Result};

/// The calls that a memory handle makes to its store, implemented by the store.
pub(crate) trait StoreHandle: Send + Sync {
    /// Records an error that occurred when memory was used, and returns the error to report to the caller.
    fn report_failure(&self, error: Error) -> Error;

    /// Returns a fence that passes when every batch submitted so far is applied.
    ///
    /// # Errors
    /// `Closed`; a device error.
    fn applied(&self) -> Result<Fence>;

    /// Keeps an owner alive until the fence has passed. Returns the owner as `Err` if the store no longer exists.
    fn keep(&self, owner: MemoryOwner, fence: Fence) -> Result<(), MemoryOwner>;
}

/// The value that keeps an allocation alive; dropping it frees the memory.
pub(crate) type MemoryOwner = Arc<dyn Any + Send + Sync>;

/// The link between one store and its memory handles, shared by threads.
#[derive(Default)]
pub(crate) struct MemoryLink {
    pub ranges: Arc<LentRanges>,
    store: OnceLock<Box<dyn StoreHandle>>,
}

impl MemoryLink {
    /// Connects the store, to which the link forwards calls from now on.
    pub fn connect(&self, store: impl StoreHandle + 'static) {
        let connected = self.store.set(Box::new(store));
        assert!(connected.is_ok(), "one store a link");
    }

    /// Passes an error to the store, and returns the error to report to the caller. Before the store starts, returns
    /// `error` unchanged; the open then fails with it.
    pub fn report_failure(&self, error: Error) -> Error {
        match self.store.get() {
            Some(store) => store.report_failure(error),
            None => error,
        }
    }

    /// Returns a fence that passes when every batch submitted so far is applied.
    ///
    /// # Errors
    /// `Closed`; a device error.
    pub fn applied(&self) -> Result<Fence> {
        self.store.get().ok_or(Error::Closed)?.applied()
    }

    /// Drops an owner after the fence has passed. If the store no longer exists, blocks this thread until the fence has
    /// passed.
    pub fn drop_after(&self, device: &EngineDevice, owner: MemoryOwner, fence: Fence) {
        let kept = match self.store.get() {
            Some(store) => store.keep(owner, fence),
            None => Err(owner),
        };
        if let Err(owner) = kept {
            drop_when_passed(device, owner, fence);
        }
    }
}

/// Waits until the fence has passed, then drops an owner. The owner is leaked if the fence never passes.
pub(crate) fn drop_when_passed(device: &EngineDevice, owner: MemoryOwner, fence: Fence) {
    if let Err(error) = device.wait(fence) {
        tracing::warn!(%error, "caller-owned memory is not released, because a stream may still use it");
        std::mem::forget(owner);
    }
}
