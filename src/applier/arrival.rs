//! Verifies that long writes arrived intact in page memory (I12).
//!
//! The host sends the bytes of a batch to the device from its own memory. The device computes checksums of the received
//! bytes in the same command list, before a later write of the list changes them. One command covers many writes. Until
//! these checksums have been compared with the checksums in the log, no batch of the list is reported as applied, and
//! no read or snapshot of page memory starts. Thus no read, snapshot or ticket ever includes bytes that changed in
//! transit, and the next open rebuilds such bytes from the log.

use remanent_format::op::Op;

use crate::base::allocation::push;
use crate::device::sums::{PROVEN_LEN_MIN, sums_in, sums_len, transfer_corrupted};
use crate::device::{Command, EngineDevice, Span, Staging, StagingSpan};
use crate::error::Result;
use crate::memory::staging::{StagingBuf, StagingPool};

/// The expected checksums of a batch's long writes. The committer computes them before the batch is logged,
/// because the computation may fail for lack of memory and a logged batch must not fail.
pub(crate) struct ArrivalSums {
    /// The CRC-32 of each long write's bytes, in the order of the operations.
    pub sums: Vec<u32>,
    /// The staging buffer that receives the checksums computed by the device.
    pub staging: StagingBuf,
}

/// The expected checksums of the long writes of a command list, and the location of the checksums that the
/// device computes.
pub(crate) struct ArrivalProof {
    /// The index, in the command list, of the staging buffer that receives the device's checksums.
    index: usize,
    /// The expected CRC-32 of each long write, in order.
    sums: Vec<u32>,
    /// The number of long writes for which a location in that staging buffer has been assigned.
    requested: usize,
}

/// The long writes of a command list for which the list contains no checksum command yet.
#[derive(Default)]
pub(crate) struct UnsummedWrites(Vec<UnsummedWrite>);

struct UnsummedWrite {
    source: Span,
    /// The location in a staging buffer that receives the checksum of the write.
    target: StagingSpan,
}

/// The maximum number of writes whose checksums one command computes. The limit matters because each later
/// operation of the list is compared with every write whose checksum is still pending.
const SUMMED_TOGETHER_MAX: usize = 128;

/// Returns whether the operation is a long write whose bytes are verified on arrival. Masked and sparse deltas change
/// only some bytes of their range, so a checksum of the range would not verify them.
pub(crate) fn is_proven(op: &Op<'_>) -> bool {
    let is_dense = matches!(op, Op::Write { .. } | Op::Image { .. });
    is_dense && op.range().is_some_and(|(_, len)| len >= PROVEN_LEN_MIN)
}

impl ArrivalSums {
    /// Computes the checksums of the long writes among these operations. Returns `None` if there are no long writes.
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
    /// Creates a proof from the expected checksums `sums`. `index` is the index, in the command list, of the
    /// staging buffer that receives the device's checksums.
    pub fn new(index: usize, sums: Vec<u32>) -> Self {
        Self { index, sums, requested: 0 }
    }

    /// Returns the location that receives the checksum of the next long write.
    pub fn next_sum(&mut self) -> StagingSpan {
        let offset = sums_len(self.requested);
        self.requested += 1;
        assert!(self.requested <= self.sums.len()); // I12: each long write was summed before it was logged.
        StagingSpan { index: self.index, offset, len: sums_len(1) }
    }

    pub fn index(&self) -> usize {
        self.index
    }

    /// Updates the index of the staging buffer after `count` buffers were inserted before it in the command list.
    pub fn shift(&mut self, count: usize) {
        self.index += count;
    }

    /// Returns an error if the device's checksums differ from the expected ones. `returned` contains the staging
    /// buffers of the completed command list.
    ///
    /// # Errors
    /// A device error.
    pub fn check(&self, returned: &[Staging], device: &EngineDevice) -> Result<()> {
        assert!(self.requested == self.sums.len()); // I12: no long write was sent without its sum.
        let of_device = &returned[self.index][..sums_len(self.sums.len())];
        let holds = sums_in(of_device).eq(self.sums.iter().copied());
        if holds { Ok(()) } else { Err(transfer_corrupted(device, "bytes of a batch")) }
    }
}

impl UnsummedWrites {
    /// Adds a long write that is already in the list. Returns `true` once there are [`SUMMED_TOGETHER_MAX`] writes. The
    /// caller must then add the [`commands`](Self::commands) to the list.
    pub fn push(&mut self, source: Span, target: StagingSpan) -> bool {
        self.0.push(UnsummedWrite { source, target });
        self.0.len() >= SUMMED_TOGETHER_MAX
    }

    /// Returns whether one of the writes overlaps the range.
    pub fn any_in(&self, range: Span) -> bool {
        self.0.iter().any(|write| write.source.overlaps(range))
    }

    /// Returns the maximum number of commands that [`commands`](Self::commands) can return.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Removes all writes, and returns the commands that compute their checksums. Writes whose checksums are stored at
    /// adjacent locations share one command. A device can run consecutive commands of this kind in parallel.
    pub fn commands(&mut self) -> impl Iterator<Item = Command> {
        let writes = std::mem::take(&mut self.0);
        let mut commands: Vec<(Vec<Span>, StagingSpan)> = Vec::new();
        for UnsummedWrite { source, target } in writes {
            match commands.last_mut() {
                Some((sources, sums))
                    if sums.index == target.index && sums.offset + sums.len == target.offset =>
                {
                    sources.push(source);
                    sums.len += target.len;
                }
                _ => commands.push((vec![source], target)),
            }
        }
        commands.into_iter().map(|(sources, target)| Command::Crc { sources, target })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::MemoryId;

    #[test]
    fn writes_are_checksummed_by_few_commands() {
        let mut unsummed = UnsummedWrites::default();
        let write = |memory, offset| Span { memory: MemoryId(memory), offset, len: 100 };
        let (mut first, mut second) = (ArrivalProof::new(1, vec![0; 3]), ArrivalProof::new(2, vec![0; 1]));
        assert!(!unsummed.push(write(1, 0), first.next_sum()));
        assert!(!unsummed.push(write(2, 0), first.next_sum()));
        assert!(!unsummed.push(write(1, 100), second.next_sum()));
        assert!(!unsummed.push(write(3, 0), first.next_sum()));
        assert!(unsummed.any_in(write(1, 199)) && !unsummed.any_in(write(1, 200)));
        assert!(unsummed.any_in(write(3, 99)) && !unsummed.any_in(write(4, 0)));
        let staged = |index, offset, len| StagingSpan { index, offset, len };
        let expected = [
            (vec![write(1, 0), write(2, 0)], staged(1, 0, 8)),
            (vec![write(1, 100)], staged(2, 0, 4)),
            (vec![write(3, 0)], staged(1, 8, 4)),
        ];
        let commands: Vec<_> = unsummed
            .commands()
            .map(|command| match command {
                Command::Crc { sources, target } => (sources, target),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(commands, expected);
        assert!(!unsummed.any_in(write(1, 0)), "they are summed");
    }
}
