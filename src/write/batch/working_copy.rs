//! Working copies: copies of a page in device memory that the caller's kernels may modify. A working copy records the
//! page's epoch when it was copied.
//!
//! A caller never writes to the page itself. The changes in the copy become a delta, which is logged before it is
//! applied to the page (I1).

use std::sync::Arc;

use remanent_format::{Epoch, PageId, Width};

use crate::base::sync::Mutex;
use crate::device::{DeviceBytes, Digest};

/// A copy of a page that the caller's kernels may modify, returned by
/// [`Store::working_copy`](crate::Store::working_copy). [`WriteBatch::capture`] logs the changes.
///
/// A clone of this handle refers to the same copy. The copy belongs to one state of its page, and each capture advances
/// it to the next state. If another batch changes the page, captures fail with [`Error::Conflict`] until
/// [`Store::reload`](crate::Store::reload) has copied the page's bytes again.
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
    shadow: CopyShadow,
    state: Mutex<CopyState>,
}

/// The data with which a working copy is compared to find changes.
#[derive(Debug)]
pub(crate) enum CopyShadow {
    /// The page itself.
    Page,
    /// A separate buffer with the contents that the working copy had when it last equaled the page.
    Kept(DeviceBytes),
    /// Digests of the contents that the working copy had when it last equaled the page. The value is the key for the
    /// digests.
    Digests(DeviceBytes),
}

/// The version of the page that the working copy last equaled.
#[derive(Debug, Default)]
struct CopyState {
    /// The epoch of that version, or 0 if it is unknown. No page has epoch 0.
    epoch: Epoch,
    /// The digest of each chunk in that version, or [`UNKNOWN_DIGEST`]. Empty if the copy is not compared by digests.
    digests: Vec<Digest>,
}

/// The placeholder for a chunk whose digest is unknown. The chunk then counts as changed. No chunk has this digest,
/// because both halves of a digest are below 2^61.
pub(crate) const UNKNOWN_DIGEST: Digest = [0xFF; 16];

/// The digests of consecutive chunks of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkDigests {
    /// The number of the first of these chunks, counted from the start of the page.
    pub first: usize,
    /// The digest of each chunk, in order.
    pub digests: Vec<Digest>,
}

impl WorkingCopy {
    /// Creates a working copy that does not belong to any state of its page yet.
    pub(crate) fn new(page: PageId, width: Width, memory: DeviceBytes, shadow: CopyShadow) -> Self {
        Self(Arc::new(Copy { page, width, memory, shadow, state: Mutex::default() }))
    }

    /// Returns the id of the page that the copy follows.
    #[must_use]
    pub fn page(&self) -> PageId {
        self.0.page
    }

    /// Returns the width of the elements that are compared.
    #[must_use]
    pub fn width(&self) -> Width {
        self.0.width
    }

    /// Returns the memory of the copy, which has the length of the page.
    #[must_use]
    pub fn bytes(&self) -> &DeviceBytes {
        &self.0.memory
    }

    /// Returns the epoch of the page state to which the copy belongs, or 0 in a forked child.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        if self.0.memory.check_process().is_err() {
            return Epoch(0);
        }
        self.0.state.lock().epoch
    }

    pub(crate) fn shadow(&self) -> &CopyShadow {
        &self.0.shadow
    }

    /// Records that the working copy equals the page at `epoch`, with these digests of its chunks.
    pub(crate) fn belongs_to(&self, epoch: Epoch, digests: Vec<Digest>) {
        *self.0.state.lock() = CopyState { epoch, digests };
    }

    /// Advances the copy to a new state of the page after a capture at epoch `before`, and updates the digests of the
    /// captured chunks. Does nothing if the copy was reloaded since that capture.
    pub(crate) fn captured<'d>(
        &self,
        before: Epoch,
        epoch: Epoch,
        captured: impl IntoIterator<Item = &'d ChunkDigests>,
    ) {
        let mut state = self.0.state.lock();
        if state.epoch != before {
            return;
        }
        state.epoch = epoch;
        for ChunkDigests { first, digests } in captured {
            if let Some(known) = state.digests.get_mut(*first..first + digests.len()) {
                known.copy_from_slice(digests);
            }
        }
    }

    /// Calls `take` with the digest of each chunk in order, starting with chunk number `first`. Returns whether the
    /// copy's recorded epoch is still `epoch`.
    pub(crate) fn each_digest(&self, epoch: Epoch, first: usize, mut take: impl FnMut(&Digest)) -> bool {
        let state = self.0.state.lock();
        state.digests.iter().skip(first).for_each(&mut take);
        state.epoch == epoch
    }

    /// Returns whether the digest of any chunk is known.
    pub(crate) fn has_digests(&self) -> bool {
        self.0.state.lock().digests.iter().any(|digest| *digest != UNKNOWN_DIGEST)
    }
}
