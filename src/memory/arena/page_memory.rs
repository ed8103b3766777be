//! A handle to the memory of one page.

use remanent_format::Place;

use super::Purpose;
use crate::device::{MemoryId, Span};

/// The memory of one page. The owner must return the value with [`retire`](super::Arena::retire) or
/// [`discard`](super::Arena::discard) and not drop it, because a drop cannot determine whether a lane still uses the
/// memory.
#[derive(Debug)]
pub struct PageMemory {
    pub(super) memory: MemoryId,
    pub(super) len: u64,
    /// The ordinal of the memory's place. The place is stored as two numbers, which makes this type smaller: each page
    /// has a value of this type.
    pub(super) place_ordinal: u32,
    pub(super) place_kind: u8,
    pub(super) purpose: Purpose,
    pub(super) is_returned: bool,
}

const _: () = assert!(size_of::<PageMemory>() == 24);

impl PageMemory {
    /// Creates the handle for memory that the device has just allocated for `purpose`.
    pub(super) fn new(memory: MemoryId, place: Place, len: u64, purpose: Purpose) -> Self {
        let (place_kind, place_ordinal) = place.to_raw();
        Self { memory, len, place_ordinal, place_kind, purpose, is_returned: false }
    }

    /// Returns the span of the whole memory.
    #[must_use]
    pub fn span(&self) -> Span {
        Span { memory: self.memory, offset: 0, len: self.len }
    }

    /// Returns the span of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If the span exceeds the page.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Span {
        let within = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(within, "bytes {offset}..+{len} are not within a page of {} bytes", self.len);
        Span { memory: self.memory, offset, len }
    }

    /// Returns whether the memory is caller-owned. Such memory initially contains the bytes of its last use.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.purpose == Purpose::Lent
    }

    /// Returns the place of the memory.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::from_raw(self.place_kind, self.place_ordinal).expect("the numbers of a place")
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.len
    }
}

impl Drop for PageMemory {
    fn drop(&mut self) {
        if !self.is_returned {
            tracing::warn!(
                memory = self.memory.0,
                place = %self.place(),
                len = self.len,
                "page memory was dropped without being released; it stays allocated and counts in the budget"
            );
        }
    }
}
