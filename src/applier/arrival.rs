//! Long writes are proven where they arrive (I12).
//!
//! The log has a batch's bytes with their checksum, and the host sends them to the device from memory of its
//! own. What arrives is summed by the device in the same list, many writes by one command, but before a later
//! write changes the same bytes. Until the sums are there, no batch of the list is told as applied, and no
//! turn runs. So no read, no snapshot and no ticket has bytes that changed on the way, and the next open
//! makes them anew from the log.

use remanent_format::op::Op;

use crate::base::allocation::push;
use crate::device::sums::{PROVEN_LEN_MIN, changed_on_the_way, sums_in, sums_len};
use crate::device::{Command, Device, Span, Staging, StagingSpan};
use crate::error::Result;
use crate::memory::staging::{StagingBuf, StagingPool};

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
    /// How many of their writes are in the list so far.
    asked: usize,
}

/// Long writes that are in a list, and whose sums are not yet.
#[derive(Default)]
pub(crate) struct UnsummedWrites(Vec<UnsummedWrite>);

struct UnsummedWrite {
    source: Span,
    /// Where its sum comes back.
    target: StagingSpan,
}

/// The most writes that are summed together: each later operation of the list is held against all of them.
const SUMMED_TOGETHER_MAX: usize = 128;

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

    /// Where the sum of the list's next long write comes back.
    pub fn next_sum(&mut self) -> StagingSpan {
        let offset = sums_len(self.asked);
        self.asked += 1;
        assert!(self.asked <= self.sums.len()); // I12: each long write was summed before it was logged.
        StagingSpan { index: self.index, offset, len: sums_len(1) }
    }

    /// The list's staging in which the sums come back.
    pub fn index(&self) -> usize {
        self.index
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

impl UnsummedWrites {
    /// Takes a long write, which the list has by now. Returns whether they are to be summed now.
    pub fn push(&mut self, source: Span, target: StagingSpan) -> bool {
        self.0.push(UnsummedWrite { source, target });
        self.0.len() >= SUMMED_TOGETHER_MAX
    }

    /// Whether one of them wrote to the range.
    pub fn any_in(&self, range: Span) -> bool {
        self.0.iter().any(|write| write.source.overlaps(range))
    }

    /// How many commands [`commands`](Self::commands) gives at most.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The commands that sum all of them: one for those whose sums lie one after the other. A device makes
    /// all of them at once, because they follow each other.
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
    fn writes_are_summed_by_few_commands_and_known_until_then() {
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
