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

use std::ops::BitOrAssign;
use std::sync::atomic::{AtomicU64, Ordering};

use super::lane::Timeline;
use super::resource::Kind;
use crate::base::sync::RwLock;
use crate::device::{Lane, MemoryId};

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

/// Stripes that several threads find.
#[derive(Debug, Default)]
pub(super) struct FoundStripes(AtomicU64);

impl FoundStripes {
    /// Adds those of this memory, if it is pinned.
    pub fn add(&self, kind: Kind, memory: MemoryId) {
        let WrittenStripes(more) = WrittenStripes::of(kind, memory);
        // Mostly they are there.
        if self.0.load(Ordering::Relaxed) & more != more {
            self.0.fetch_or(more, Ordering::Relaxed);
        }
    }

    /// All that were found.
    pub fn all(self) -> WrittenStripes {
        WrittenStripes(self.0.into_inner())
    }
}

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
    /// Those of this memory, if it is pinned.
    pub fn of(kind: Kind, memory: MemoryId) -> Self {
        if kind == Kind::Pinned { Self(1 << stripe_of(memory)) } else { Self::default() }
    }
}

impl BitOrAssign for WrittenStripes {
    fn bitor_assign(&mut self, others: Self) {
        self.0 |= others.0;
    }
}

/// Names that are given one after the other are of different stripes.
fn stripe_of(memory: MemoryId) -> usize {
    memory.0 as usize % STRIPES
}
