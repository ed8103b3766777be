//! Checksums that a device computes over page memory, so that bytes are verified on both sides of the bus (I12).
//!
//! A checksum of the bytes that the host sends proves nothing about the bytes that arrived in page memory. A checksum
//! of the bytes that arrived at the host proves nothing about the page memory that they came from. If each side of a
//! copy is checksummed separately, a bit flipped by the bus, by staging or by host memory is detected before anything
//! relies on the copy.
//!
//! A checksum has four little-endian bytes, which the device writes to a separate staging buffer.

use super::{Command, EngineDevice, Span, StagingSpan};
use crate::error::Error;

/// The shortest write, in bytes, whose arrival is verified. Writing fewer bytes takes a GPU less time than
/// launching their checksum.
pub(crate) const PROVEN_LEN_MIN: u64 = 64 << 10;

/// Returns the length, in bytes, of the staging for `count` checksums.
pub(crate) fn sums_len(count: usize) -> usize {
    4 * count
}

/// Returns a command that checksums each of these ranges and writes the results to staging number `index` of the list.
pub(crate) fn sum_each(sources: Vec<Span>, index: usize) -> Command {
    let target = StagingSpan { index, offset: 0, len: sums_len(sources.len()) };
    Command::Crc { sources, target }
}

/// Returns the checksums in a list's staging.
pub(crate) fn sums_in(staged: &[u8]) -> impl ExactSizeIterator<Item = u32> {
    staged.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")))
}

/// Returns the error for bytes that changed between host and device, in both attempts if a second attempt was possible.
/// The data on disk is not damaged, because it matches the host's checksum.
pub(crate) fn transfer_corrupted(device: &EngineDevice, what: &str) -> Error {
    let label = device.label();
    Error::Device {
        reason: format!(
            "{what} changed in transit between the host and {label}; check the memory of both, and the bus"
        ),
        context_lost: false,
    }
}
