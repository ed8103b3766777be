//! A working copy: a page's bytes where the caller's kernels may write them, and the page's epoch that
//! they were taken from.
//! A caller never writes the page itself. Changes in the copy become a delta, which is logged
//! before it reaches the page (I1).

use std::sync::Arc;

use remanent_format::{Epoch, PageId, Width};

use crate::base::sync::Mutex;
use crate::device::DeviceBytes;

/// A copy of a page for the caller's kernels to write. [`WriteBatch::capture`] logs what changed in it.
///
/// Clones are the same copy. It belongs to one state of its page, and a capture takes it to the next.
/// When another batch changes the page, a capture fails with [`Error::Conflict`] until
/// [`Store::reload`](crate::Store::reload) has taken the page's bytes anew.
///
/// [`WriteBatch::capture`]: super::WriteBatch::capture
/// [`Error::Conflict`]: crate::Error::Conflict
#[derive(Clone, Debug)]
pub struct WorkingCopy(Arc<Copy>);

#[derive(Debug)]
struct Copy {
    page: PageId,
    width: Width,
    memory: DeviceBytes,
    shadow: Option<DeviceBytes>,
    /// The epoch of the page's bytes that the copy began with; 0, which no page has, if they are of no
    /// known state.
    epoch: Mutex<Epoch>,
}

impl WorkingCopy {
    /// Makes a copy that belongs to no state yet.
    pub(crate) fn new(page: PageId, width: Width, memory: DeviceBytes, shadow: Option<DeviceBytes>) -> Self {
        Self(Arc::new(Copy { page, width, memory, shadow, epoch: Mutex::new(Epoch(0)) }))
    }

    /// The page that this is a copy of.
    #[must_use]
    pub fn page(&self) -> PageId {
        self.0.page
    }

    /// The width of the elements by which changes are found.
    #[must_use]
    pub fn width(&self) -> Width {
        self.0.width
    }

    /// The copy's bytes, as long as the page.
    #[must_use]
    pub fn bytes(&self) -> &DeviceBytes {
        &self.0.memory
    }

    /// The page's epoch that the copy belongs to; 0 in a forked child.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        if self.0.memory.check_process().is_err() {
            return Epoch(0);
        }
        *self.0.epoch.lock()
    }

    /// The copy as it was when it was last the page, if that is kept.
    pub(crate) fn shadow(&self) -> Option<&DeviceBytes> {
        self.0.shadow.as_ref()
    }

    /// From now on the copy belongs to this state of the page.
    pub(crate) fn belongs_to(&self, epoch: Epoch) {
        *self.0.epoch.lock() = epoch;
    }
}
