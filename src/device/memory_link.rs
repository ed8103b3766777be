//! The link between a store and the memory that callers have of it: the ranges in use, and the way back.
//!
//! Handles outlive their store, and an open takes callers' memory before there is a store; so each handle
//! holds the link, and the store comes to the link when it starts.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use super::lent_ranges::LentRanges;
use super::{Device, Fence};
use crate::error::{Error, Result};

/// A store's end of the link.
pub(crate) trait StoreEnd: Send + Sync {
    /// Hears of an error in using memory; returns the error that the caller sees.
    fn hear(&self, error: Error) -> Error;

    /// A fence after every batch submitted so far.
    ///
    /// # Errors
    /// `Closed`; a device error.
    fn applied(&self) -> Result<Fence>;

    /// Keeps an owner until the fence has passed; `Err` where there is no store any more that could.
    fn keep(&self, owner: MemoryOwner, fence: Fence) -> Result<(), MemoryOwner>;
}

/// The value that keeps a memory, and whose drop gives it back.
pub(crate) type MemoryOwner = Arc<dyn Any + Send + Sync>;

/// The link of one store. Shared by threads.
#[derive(Default)]
pub(crate) struct MemoryLink {
    pub ranges: Arc<LentRanges>,
    store: OnceLock<Box<dyn StoreEnd>>,
}

impl MemoryLink {
    /// Brings the store to the link.
    pub fn connect(&self, store: impl StoreEnd + 'static) {
        let connected = self.store.set(Box::new(store));
        assert!(connected.is_ok(), "one store a link");
    }

    /// Tells the store of an error. Before the store starts it is the open that fails by it.
    pub fn hear(&self, error: Error) -> Error {
        match self.store.get() {
            Some(store) => store.hear(error),
            None => error,
        }
    }

    /// A fence after every batch submitted so far.
    ///
    /// # Errors
    /// `Closed`; a device error.
    pub fn applied(&self) -> Result<Fence> {
        self.store.get().ok_or(Error::Closed)?.applied()
    }

    /// Drops an owner after the fence has passed. Where the store is gone, this thread waits for that.
    pub fn drop_after(&self, device: &dyn Device, owner: MemoryOwner, fence: Fence) {
        let kept = match self.store.get() {
            Some(store) => store.keep(owner, fence),
            None => Err(owner),
        };
        if let Err(owner) = kept {
            drop_when_passed(device, owner, fence);
        }
    }
}

/// Waits until the fence has passed, and drops an owner. It stays where the fence never passes.
pub(crate) fn drop_when_passed(device: &dyn Device, owner: MemoryOwner, fence: Fence) {
    if let Err(error) = device.wait(fence) {
        tracing::warn!(%error, "a caller's memory stays held: a stream may still use it");
        std::mem::forget(owner);
    }
}
