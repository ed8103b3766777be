//! A working copy: a page's bytes where the caller's kernels may write them, and the page's epoch that
//! they were taken from.
//! A caller never writes the page itself. Changes in the copy become a delta, which is logged
//! before it reaches the page (I1).

use std::sync::Arc;

use remanent_format::{Epoch, PageId, Width};

use crate::base::sync::Mutex;
use crate::device::{DeviceBytes, Digest};

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
    shadow: CopyShadow,
    state: Mutex<CopyState>,
}

/// What a working copy is compared with.
#[derive(Debug)]
pub(crate) enum CopyShadow {
    /// The page itself.
    Page,
    /// The copy as it was when it was last the page.
    Kept(DeviceBytes),
    /// Digests of the copy as it was then, under this key.
    Digests(DeviceBytes),
}

/// What a working copy was when it was last the page.
#[derive(Debug, Default)]
struct CopyState {
    /// The epoch of the page's bytes that the copy began with; 0, which no page has, if they are of no
    /// known state.
    epoch: Epoch,
    /// The digest of each chunk, or [`UNKNOWN_DIGEST`]; empty where none are kept.
    digests: Vec<Digest>,
}

/// Stands for the digest of a chunk that is not known, so that the chunk counts as changed. No chunk has it:
/// both halves of a digest are below 2^61.
pub(crate) const UNKNOWN_DIGEST: Digest = [0xFF; 16];

/// Digests of chunks that follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkDigests {
    /// The number of the first chunk in its page.
    pub first: usize,
    /// The digests, from that chunk on.
    pub digests: Vec<Digest>,
}

impl WorkingCopy {
    /// Makes a copy that belongs to no state yet.
    pub(crate) fn new(page: PageId, width: Width, memory: DeviceBytes, shadow: CopyShadow) -> Self {
        Self(Arc::new(Copy { page, width, memory, shadow, state: Mutex::default() }))
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
        self.0.state.lock().epoch
    }

    /// What the copy is compared with.
    pub(crate) fn shadow(&self) -> &CopyShadow {
        &self.0.shadow
    }

    /// From now on the copy belongs to this state of the page, in which its chunks have these digests.
    pub(crate) fn belongs_to(&self, epoch: Epoch, digests: Vec<Digest>) {
        *self.0.state.lock() = CopyState { epoch, digests };
    }

    /// The copy was captured as it was at epoch `before`: from now on it belongs to this state of the page,
    /// and these chunks have these digests. A copy that was loaded meanwhile stays what it was loaded as.
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

    /// Looks at the digests of chunks from `first` on, one after the other, as they were at this epoch.
    /// Returns whether the copy is at that epoch still.
    pub(crate) fn each_digest(&self, epoch: Epoch, first: usize, mut look: impl FnMut(&Digest)) -> bool {
        let state = self.0.state.lock();
        state.digests.iter().skip(first).for_each(&mut look);
        state.epoch == epoch
    }

    /// Whether the digest of any chunk is known.
    pub(crate) fn has_digests(&self) -> bool {
        self.0.state.lock().digests.iter().any(|digest| *digest != UNKNOWN_DIGEST)
    }
}
