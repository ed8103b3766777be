//! Reads of pinned page memory on a caller's thread while no list writes to that memory.
//!
//! A kernel that writes memory while a thread reads it is a data race, even if the bytes read are discarded. Therefore
//! a list that writes to pinned memory is announced before any part of it is queued, and its submission waits for
//! current readers. A thread reads only if every announced list has passed. The thread holds a lock during the read and
//! copies 64 KiB at a time, so a list waits for some microseconds.
//!
//! Locks are chosen by a few bits of a memory's id. Two pages with the same bits share a lock. A read may then be
//! rejected because a list writes to the other page; the read then uses the lane instead.
//!
//! The caller's kernels never write to pages, so only command lists can conflict with a read.

use std::ops::BitOrAssign;
use std::sync::atomic::{AtomicU64, Ordering};

use super::lane::Timeline;
use super::resource::Kind;
use crate::base::sync::RwLock;
use crate::device::{Lane, MemoryId};

/// The number of locks. A mask has one bit for each.
const STRIPES: usize = u64::BITS as usize;

/// The lists that write to pinned memory, by stripe. A stripe is all memory that shares a lock.
#[derive(Default)]
pub(super) struct PinnedReads {
    stripes: Vec<RwLock<PinnedWrites>>,
}

/// The lists that write to memory of one stripe.
#[derive(Clone, Copy, Debug, Default)]
struct PinnedWrites {
    /// The number of announced lists that have no fence yet.
    announced: usize,
    /// For each lane, the newest fence of a list that writes to the stripe.
    fences: [u64; Lane::ALL.len()],
}

/// The stripes of pinned memory that a list writes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WrittenStripes(u64);

/// A set of stripes that several threads add to.
#[derive(Debug, Default)]
pub(super) struct FoundStripes(AtomicU64);

impl FoundStripes {
    /// Adds the stripe of the memory, if the memory is pinned.
    pub fn add(&self, kind: Kind, memory: MemoryId) {
        let WrittenStripes(more) = WrittenStripes::of(kind, memory);
        // Usually the stripe is already set.
        if self.0.load(Ordering::Relaxed) & more != more {
            self.0.fetch_or(more, Ordering::Relaxed);
        }
    }

    /// Returns all collected stripes.
    pub fn all(self) -> WrittenStripes {
        WrittenStripes(self.0.into_inner())
    }
}

impl PinnedReads {
    /// Creates the state in which no list writes to pinned memory.
    pub fn new() -> Self {
        Self { stripes: (0..STRIPES).map(|_| RwLock::default()).collect() }
    }

    /// Announces a list, and waits for current readers of the memory that the list writes to.
    pub fn announce(&self, written: WrittenStripes) {
        self.each(written, |writes| writes.announced += 1);
    }

    /// Records the fence of an announced list. The fence is 0 if no part of the list was queued.
    pub fn queued(&self, written: WrittenStripes, lane: Lane, fence: u64) {
        self.each(written, |writes| {
            writes.announced -= 1;
            let newest = &mut writes.fences[lane as usize];
            *newest = (*newest).max(fence);
        });
    }

    /// Runs `work` while no thread reads this memory.
    pub fn without_readers<T>(&self, memory: MemoryId, work: impl FnOnce() -> T) -> T {
        let _no_reader = self.stripes[stripe_of(memory)].write();
        work()
    }

    /// Runs `work` while no thread reads any memory.
    pub fn without_any_reader<T>(&self, work: impl FnOnce() -> T) -> T {
        // All threads acquire the locks in the same order. Elsewhere, no thread that holds one of them waits for
        // another.
        let _no_readers: Vec<_> = self.stripes.iter().map(RwLock::write).collect();
        work()
    }

    /// Runs `read` while no list writes to this memory. Returns `None` immediately if a list may write to it.
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

    /// Changes one stripe after the other. Two lists that share stripes therefore never wait for each other.
    fn each(&self, written: WrittenStripes, change: impl Fn(&mut PinnedWrites)) {
        let mut left = written.0;
        while left != 0 {
            change(&mut self.stripes[left.trailing_zeros() as usize].write());
            left &= left - 1;
        }
    }
}

impl WrittenStripes {
    /// Returns the stripe of this memory if it is pinned, and no stripe otherwise.
    pub fn of(kind: Kind, memory: MemoryId) -> Self {
        if kind == Kind::Pinned { Self(1 << stripe_of(memory)) } else { Self::default() }
    }
}

impl BitOrAssign for WrittenStripes {
    fn bitor_assign(&mut self, others: Self) {
        self.0 |= others.0;
    }
}

/// Returns the number of the stripe of an allocation. Consecutive ids have different stripes.
fn stripe_of(memory: MemoryId) -> usize {
    memory.0 as usize % STRIPES
}
