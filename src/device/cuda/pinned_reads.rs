//! Reads of pinned page memory by a caller's thread, while no list writes to it.
//!
//! A kernel that writes where a thread reads is a data race, even if what was read is dropped. So a list that
//! writes to pinned memory says so before anything of it is queued, and waits for threads that are reading
//! just then; a thread reads only if every list that said so has passed. It holds a lock meanwhile, and
//! copies 64 KiB at a time, so a list waits some microseconds.
//!
//! Memory is told apart by a few bits of its name. Two pages that share them share a lock: then a read may be
//! refused because of a list that writes to the other page, and goes by the lane.
//!
//! The caller's kernels write to memory of the caller's own, never to pages, so lists are all there is to
//! wait for.

use super::lane::Timeline;
use crate::base::sync::RwLock;
use crate::device::many_deltas::look_at;
use crate::device::{Command, Lane, MemoryId, Span};

/// As many as a mask has bits.
const STRIPES: usize = u64::BITS as usize;

/// Which lists write to pinned memory.
#[derive(Default)]
pub(super) struct PinnedReads {
    stripes: Vec<RwLock<PinnedWrites>>,
}

/// Lists that write to memory of one stripe.
#[derive(Clone, Copy, Debug, Default)]
struct PinnedWrites {
    /// How many have said so and have no fence yet.
    announced: usize,
    /// The newest fence of each lane.
    fences: [u64; Lane::ALL.len()],
}

/// Stripes of pinned memory that a list writes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WrittenStripes(u64);

impl PinnedReads {
    /// Nothing is written.
    pub fn new() -> Self {
        Self { stripes: (0..STRIPES).map(|_| RwLock::default()).collect() }
    }

    /// Announces a list. Waits for reads of what it writes to.
    pub fn announce(&self, written: WrittenStripes) {
        self.each(written, |writes| writes.announced += 1);
    }

    /// What was announced is queued before this fence; 0 if nothing of it is.
    pub fn queued(&self, written: WrittenStripes, lane: Lane, fence: u64) {
        self.each(written, |writes| {
            writes.announced -= 1;
            let newest = &mut writes.fences[lane as usize];
            *newest = (*newest).max(fence);
        });
    }

    /// Does `work` while no thread reads this memory.
    pub fn without_readers<T>(&self, memory: MemoryId, work: impl FnOnce() -> T) -> T {
        let _no_reader = self.stripes[stripe_of(memory)].write();
        work()
    }

    /// Does `work` while no thread reads any memory.
    pub fn without_any_reader<T>(&self, work: impl FnOnce() -> T) -> T {
        // Always in the same order, and no other thread waits for one while it holds another.
        let _no_readers: Vec<_> = self.stripes.iter().map(RwLock::write).collect();
        work()
    }

    /// Does `read` while no list writes to this memory; `None`, at once, if one does.
    pub fn read<T>(
        &self,
        memory: MemoryId,
        lanes: &[Timeline; Lane::ALL.len()],
        read: impl FnOnce() -> T,
    ) -> Option<T> {
        let writes = self.stripes[stripe_of(memory)].read();
        let mut newest = lanes.iter().zip(writes.fences);
        let has_passed = newest.all(|(lane, fence)| fence == 0 || lane.fences().reached() >= fence);
        (writes.announced == 0 && has_passed).then(read)
    }

    /// One stripe after the other: two lists that share some do not wait for each other.
    fn each(&self, written: WrittenStripes, change: impl Fn(&mut PinnedWrites)) {
        let mut left = written.0;
        while left != 0 {
            change(&mut self.stripes[left.trailing_zeros() as usize].write());
            left &= left - 1;
        }
    }
}

impl WrittenStripes {
    /// What these commands write to, of the memory for which `is_pinned` says true.
    pub fn of(commands: &[Command], is_pinned: impl Fn(MemoryId) -> bool + Sync) -> Self {
        let written = look_at(commands, |commands| Self::of_some(commands, &is_pinned));
        Self(written.into_iter().fold(0, |all, written| all | written.0))
    }

    fn of_some(commands: &[Command], is_pinned: impl Fn(MemoryId) -> bool) -> Self {
        let mut written = Self::default();
        let mut add = |span: &Span| {
            if is_pinned(span.memory) {
                written.0 |= 1 << stripe_of(span.memory);
            }
        };
        for command in commands {
            match command {
                Command::Upload { target, .. }
                | Command::Copy { target, .. }
                | Command::Fill { target, .. }
                | Command::Gather { target, .. }
                | Command::Diff { target, .. }
                | Command::Pick { target, .. } => add(target),
                Command::Apply { pieces } => pieces.iter().for_each(|piece| add(&piece.target)),
                Command::Scatter { targets, .. } => targets.iter().for_each(|(_, target)| add(target)),
                Command::Select { bitmaps, .. } => bitmaps.iter().for_each(|bitmap| add(&bitmap.indices)),
                // To staging.
                Command::Download { .. }
                | Command::Crc { .. }
                | Command::Digest { .. }
                | Command::Validate { .. } => {}
            }
        }
        written
    }
}

/// Names that are given one after the other are of different stripes.
fn stripe_of(memory: MemoryId) -> usize {
    memory.0 as usize % STRIPES
}
