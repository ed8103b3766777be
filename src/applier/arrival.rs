//! Long writes are proven where they arrive (I12).
//!
//! The log has a batch's bytes with their checksum, and the host sends them to the device from memory of its
//! own. What arrives is summed by the device in the same list, right after each long write: a later one may
//! change the same bytes. Until the sums are there, no batch of the list is told as applied, and no turn
//! runs. So no read, no snapshot and no ticket has bytes that changed on the way, and the next open makes
//! them anew from the log.

use remanent_format::op::Op;

use crate::base::allocation::push;
use crate::device::sums::{changed_on_the_way, sums_in, sums_len};
use crate::device::{Command, Device, Span, Staging, StagingSpan};
use crate::error::Result;
use crate::memory::staging::{StagingBuf, StagingPool};

/// From this length in bytes on, a write is proven. With sums of 64 KiB, an H100 applied a write after 80 µs
/// and not after 44, and commits lost 0.45 of their rate.
const PROVEN_LEN_MIN: u64 = 1 << 20;

/// The sums that the long writes of a batch must have where they arrive. They are made before the batch is
/// logged: after that, memory for them could not be refused any more.
pub(crate) struct ArrivalSums {
    /// CRC-32 of the bytes of each write, in the order of the operations.
    pub sums: Vec<u32>,
    /// Where the device's sums come back.
    pub staging: StagingBuf,
}

/// Sums that a list brings back.
pub(crate) struct ArrivalProof {
    /// The list's staging that they come back in.
    index: usize,
    /// The sums that they must be.
    sums: Vec<u32>,
    /// How many of them have their command so far.
    asked: usize,
}

/// Whether the operation's bytes are proven where they arrive. Masked and scattered elements change a part of
/// what lies there: a sum of that says nothing about what arrived.
pub(crate) fn is_proven(op: &Op<'_>) -> bool {
    let is_dense = matches!(op, Op::Write { .. } | Op::Image { .. });
    is_dense && op.range().is_some_and(|(_, len)| len >= PROVEN_LEN_MIN)
}

impl ArrivalSums {
    /// Sums the long writes among these operations; `None` if there are none.
    ///
    /// # Errors
    /// `OutOfMemory`, a device error.
    pub fn of<'o>(ops: impl Iterator<Item = &'o Op<'o>>, pool: &StagingPool) -> Result<Option<Self>> {
        let mut sums = Vec::new();
        for op in ops.filter(|op| is_proven(op)) {
            let sum = match op {
                Op::Write { bytes, .. } => crc32fast::hash(bytes),
                Op::Image { image, .. } => image.raw_crc,
                _ => unreachable!("no other operation is proven"),
            };
            push(&mut sums, sum)?;
        }
        if sums.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self { staging: pool.take(sums_len(sums.len()))?, sums }))
    }
}

impl ArrivalProof {
    /// A proof by these sums, which come back in the list's staging `index`.
    pub fn new(index: usize, sums: Vec<u32>) -> Self {
        Self { index, sums, asked: 0 }
    }

    /// The command that sums the next long write, which has just arrived.
    pub fn sum(&mut self, target: Span) -> Command {
        let offset = sums_len(self.asked);
        self.asked += 1;
        assert!(self.asked <= self.sums.len()); // I12: each long write was summed before it was logged.
        let back = StagingSpan { index: self.index, offset, len: sums_len(1) };
        Command::Crc { sources: vec![target], target: back }
    }

    /// Takes the list's staging for one that is `count` places further back.
    pub fn shift(&mut self, count: usize) {
        self.index += count;
    }

    /// Fails if something arrived that was not sent. `returned` is the list's staging.
    ///
    /// # Errors
    /// A device error.
    pub fn check(&self, returned: &[Staging], device: &dyn Device) -> Result<()> {
        assert!(self.asked == self.sums.len()); // I12: no long write went without its sum.
        let of_device = &returned[self.index][..sums_len(self.sums.len())];
        let holds = sums_in(of_device).eq(self.sums.iter().copied());
        if holds { Ok(()) } else { Err(changed_on_the_way(device, "bytes of a batch")) }
    }
}
