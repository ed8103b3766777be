//! Advises the system to use huge pages for memory that is about to be filled.

use std::alloc::{Layout, alloc_zeroed};
use std::ffi::c_void;
use std::io;

use rustix::mm::{Advice, madvise};

/// The size of a huge page in bytes.
const HUGE_LEN: usize = 2 << 20;
/// The maximum length in bytes of an allocation that aborts the process if it fails.
const SHORT_LEN: usize = 64 << 10;

/// Advises the system to back `memory` with huge pages where it covers whole huge pages. Call this function before the
/// memory is filled, because page faults of 4 KiB pages took two thirds of the time of a read into fresh memory.
///
/// The bytes do not change. The advice has no effect if the system does not support huge pages or the memory maps a
/// file.
pub(crate) fn advise(memory: &mut [u8]) {
    let start = memory.as_ptr().align_offset(HUGE_LEN);
    let len = memory.len().saturating_sub(start) / HUGE_LEN * HUGE_LEN;
    if len == 0 {
        return;
    }
    let within = &mut memory[start..start + len];
    // SAFETY: the caller has write access to the whole range, and the advice changes none of its bytes.
    let advised = unsafe { madvise(within.as_mut_ptr().cast::<c_void>(), len, Advice::LinuxHugepage) };
    if let Err(error) = advised {
        tracing::trace!(%error, "no huge pages");
    }
}

/// Allocates zeroed memory that the system backs with huge pages once it is touched, if it is long enough.
///
/// # Errors
/// `OutOfMemory` for more than 64 KiB. A failure to allocate less memory aborts the process.
pub(crate) fn allocate(len: usize) -> io::Result<Vec<u8>> {
    if len <= SHORT_LEN {
        return Ok(vec![0; len]);
    }
    let layout = Layout::array::<u8>(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    // SAFETY: the length is not zero here. The allocator returns zeroed memory of this layout, or null.
    let start = unsafe { alloc_zeroed(layout) };
    if start.is_null() {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    // SAFETY: the global allocator has just allocated the memory, with the alignment of bytes and this capacity. All of
    // its bytes are initialized.
    let mut memory = unsafe { Vec::from_raw_parts(start, len, len) };
    advise(&mut memory);
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_memory_is_zeroed_or_refused() {
        for len in [0, 1, SHORT_LEN + 1, HUGE_LEN + 3, 5 * HUGE_LEN] {
            let memory = allocate(len).unwrap();
            assert!(memory.len() == len && memory.iter().all(|byte| *byte == 0));
        }
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert_eq!(allocate(len).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        }
    }

    #[test]
    fn huge_page_advice_changes_no_byte() {
        let mut memory: Vec<u8> = (0..3 * HUGE_LEN + 17).map(|at| (at / 7) as u8).collect();
        let before = memory.clone();
        for range in [0..memory.len(), 1..memory.len(), 5..5, 0..HUGE_LEN - 1] {
            advise(&mut memory[range]);
        }
        assert!(memory == before);
    }
}
