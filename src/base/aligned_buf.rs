//! Aligned buffers for direct I/O.

use std::ops::{Deref, DerefMut};

use remanent_format::limits::GROUP_ALIGN;
use zerocopy::FromZeros;

use super::huge_pages;

const ALIGN: usize = GROUP_ALIGN as usize;

/// A zero-initialized buffer for direct I/O. Its address is a multiple of 4096.
#[derive(Debug)]
pub struct AlignedBuf {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuf {
    /// Creates a zeroed buffer of `len` bytes. A failed allocation aborts the process.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self::of(vec![0; len + ALIGN - 1], len)
    }

    /// Creates a zeroed buffer of `len` bytes, or returns `None` if the allocation fails. The system is advised to back
    /// a long buffer with huge pages.
    #[must_use]
    pub fn try_new(len: usize) -> Option<Self> {
        let mut bytes = u8::new_vec_zeroed(len.checked_add(ALIGN - 1)?).ok()?;
        huge_pages::advise(&mut bytes);
        Some(Self::of(bytes, len))
    }

    fn of(bytes: Vec<u8>, len: usize) -> Self {
        let start = bytes.as_ptr().addr().wrapping_neg() % ALIGN;
        Self { bytes, start, len }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Returns whether direct I/O at file offset `offset` can read into `bytes` without a bounce buffer.
pub(crate) fn is_aligned(offset: u64, bytes: &[u8]) -> bool {
    offset.is_multiple_of(GROUP_ALIGN)
        && bytes.len().is_multiple_of(ALIGN)
        && bytes.as_ptr().addr().is_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_any_length_is_aligned() {
        for len in [0, 1, 4096, 100_000] {
            for area in [AlignedBuf::new(len), AlignedBuf::try_new(len).unwrap()] {
                assert_eq!(area.len(), len);
                assert!(is_aligned(0, &area[..len / ALIGN * ALIGN]));
            }
        }
        for absurd in [usize::MAX, usize::MAX / 2] {
            assert!(AlignedBuf::try_new(absurd).is_none());
        }
        let area = AlignedBuf::new(2 * ALIGN);
        for (offset, bytes) in [(1, &area[..]), (0, &area[1..=ALIGN]), (0, &area[..5])] {
            assert!(!is_aligned(offset, bytes));
        }
    }
}
