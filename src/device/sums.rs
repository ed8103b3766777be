//! Sums that a device makes of page memory, so that bytes are proven on both sides of the bus (I12).
//!
//! A host that sums what it sends says nothing about what arrived, and a host that sums what arrived says
//! nothing about what lay in memory. Where the two sides of a copy are summed each on its own, a bit that
//! the bus, staging or host memory turned over shows before anything relies on the copy.
//!
//! A sum is four little-endian bytes, which come back in staging of their own.

use super::{Command, Device, Span, StagingSpan};
use crate::error::Error;

/// From this length in bytes on, a write is proven where it arrives. A shorter one takes a GPU less time than
/// the launches of its sum.
pub(crate) const PROVEN_LEN_MIN: u64 = 64 << 10;

/// The length of the staging that these sums come back in.
pub(crate) fn sums_len(count: usize) -> usize {
    4 * count
}

/// The command that sums each of these ranges, into the list's staging `index`.
pub(crate) fn sum_each(sources: Vec<Span>, index: usize) -> Command {
    let target = StagingSpan { index, offset: 0, len: sums_len(sources.len()) };
    Command::Crc { sources, target }
}

/// The sums in the staging that came back.
pub(crate) fn sums_in(staged: &[u8]) -> impl ExactSizeIterator<Item = u32> {
    staged.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")))
}

/// The failure of a device that changed bytes on their way, and again where they could be sent again.
/// Nothing on disk is to blame: the host's sum of what lies there holds.
pub(crate) fn changed_on_the_way(device: &dyn Device, what: &str) -> Error {
    let label = device.label();
    Error::Device {
        reason: format!(
            "{what} changed on the way between the host and {label}: look for errors of its memory, of the bus \
             and of the host's memory"
        ),
        context_lost: false,
    }
}
