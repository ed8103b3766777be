//! Ids of page memory. An id consists of a slot of a table and the slot's generation.
//!
//! A generation is odd while its slot is in use. It rises by one when the slot is taken and when it is released. A
//! released id therefore never becomes valid again, and a use after the release or a second release is detected. A slot
//! whose generations are exhausted is not used again.
//!
//! Command lists refer to page memory thousands of times, so lookups acquire no lock. Taking or releasing a slot
//! acquires one of
//! several locks.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use super::resource::{Kind, own_shard};
use crate::base::sync::Mutex;
use crate::device::{MemoryId, Span};

/// The number of slots in the first chunk of the table. Each further chunk has twice as many.
const CHUNK_SLOTS_MIN: u32 = 1 << 10;
/// The number of chunks. Together they have as many slots as a u32 can number.
const CHUNKS: usize = (u32::BITS - CHUNK_SLOTS_MIN.ilog2()) as usize;
/// The number of lists of free slots.
const SHARDS: usize = super::resource::SHARDS;

/// An allocation of page memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    /// The address of the first byte; 0 if the allocation is empty.
    pub address: u64,
    /// The length in bytes.
    pub len: u64,
    /// The kind of memory.
    pub kind: Kind,
    /// Whether another owner frees the memory: the caller, or an allocation that contains this one.
    pub is_adopted: bool,
    /// Whether the memory belongs to a file. Then `is_adopted` is also set, because the file's mapping is freed
    /// separately.
    pub is_file: bool,
}

impl Allocation {
    /// Returns the address at which a span of the allocation begins. The address of an empty allocation is
    /// arbitrary.
    ///
    /// # Panics
    /// If the span exceeds the allocation.
    pub fn at(&self, span: Span) -> u64 {
        let end = span.offset.checked_add(span.len);
        let within = end.is_some_and(|end| end <= self.len);
        assert!(within, "{span:?} is not within its memory of {} bytes", self.len);
        self.address + span.offset
    }
}

impl Allocation {
    /// Returns whether one call can free this allocation together with `next`: they have the same kind, length and
    /// owner.
    pub fn is_freed_with(&self, next: &Self) -> bool {
        (self.kind, self.len, self.is_adopted) == (next.kind, next.len, next.is_adopted)
    }
}

/// Page memory by id. Threads share the table.
pub(super) struct Handles {
    chunks: [OnceLock<Box<[HandleSlot]>>; CHUNKS],
    free: [Mutex<Vec<u32>>; SHARDS],
    /// The number of the first slot that was never taken.
    next: AtomicU32,
}

#[derive(Default)]
struct HandleSlot {
    generation: AtomicU32,
    kind: AtomicU8,
    is_adopted: AtomicBool,
    is_file: AtomicBool,
    address: AtomicU64,
    len: AtomicU64,
}

impl Handles {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self { chunks: Default::default(), free: Default::default(), next: AtomicU32::new(0) }
    }

    /// Adds an allocation and returns a new id for it.
    pub fn insert(&self, allocation: Allocation) -> MemoryId {
        self.insert_at(self.free_slot(), allocation)
    }

    /// Adds allocations and appends their new ids to `names`, in order.
    pub fn insert_all(
        &self,
        allocations: impl ExactSizeIterator<Item = Allocation>,
        names: &mut Vec<MemoryId>,
    ) {
        let mut free = {
            let mut free = self.free[own_shard()].lock();
            let kept = free.len().saturating_sub(allocations.len());
            free.split_off(kept)
        };
        let name = |allocation| self.insert_at(free.pop().unwrap_or_else(|| self.free_slot()), allocation);
        names.extend(allocations.map(name));
    }

    fn insert_at(&self, number: u32, allocation: Allocation) -> MemoryId {
        let Allocation { address, len, kind, is_adopted, is_file } = allocation;
        let slot = self.slot(number).expect("a slot that was taken is there");
        // No other thread knows the id yet, so these stores may be in any order before the generation.
        slot.address.store(address, Ordering::Relaxed);
        slot.len.store(len, Ordering::Relaxed);
        slot.kind.store(kind as u8, Ordering::Relaxed);
        slot.is_adopted.store(is_adopted, Ordering::Relaxed);
        slot.is_file.store(is_file, Ordering::Relaxed);
        let generation = slot.generation.load(Ordering::Relaxed) + 1;
        slot.generation.store(generation, Ordering::Release);
        MemoryId(u64::from(generation) << u32::BITS | u64::from(number))
    }

    /// Returns the allocation with this id, or `None` if it was released or never existed.
    pub fn get(&self, id: MemoryId) -> Option<Allocation> {
        let (generation, number) = parts(id);
        let slot = self.slot(number)?;
        if generation % 2 == 0 || slot.generation.load(Ordering::Acquire) != generation {
            return None;
        }
        let allocation = Allocation {
            address: slot.address.load(Ordering::Relaxed),
            len: slot.len.load(Ordering::Relaxed),
            kind: Kind::ALL[usize::from(slot.kind.load(Ordering::Relaxed))],
            is_adopted: slot.is_adopted.load(Ordering::Relaxed),
            is_file: slot.is_file.load(Ordering::Relaxed),
        };
        // If the slot was released and used again during these reads, the fields may belong to different allocations.
        fence(Ordering::Acquire);
        (slot.generation.load(Ordering::Relaxed) == generation).then_some(allocation)
    }

    /// Returns the allocation with this id.
    ///
    /// # Panics
    /// If it was released or never existed.
    pub fn named(&self, id: MemoryId) -> Allocation {
        self.get(id).unwrap_or_else(|| panic!("{id:?} is no memory of this device"))
    }

    /// Retires an id and returns its allocation, or `None` if the id is not in use. If two threads retire the same id,
    /// only one gets the allocation.
    pub fn remove(&self, id: MemoryId) -> Option<Allocation> {
        let (allocation, freed) = self.take_out(id)?;
        if let Some(number) = freed {
            self.free[own_shard()].lock().push(number);
        }
        Some(allocation)
    }

    /// Retires ids and returns their allocations, in order, with `None` for each id that is not in use.
    pub fn remove_all(&self, ids: impl ExactSizeIterator<Item = MemoryId>) -> Vec<Option<Allocation>> {
        let mut freed = Vec::with_capacity(ids.len());
        let remove = |id| {
            let (allocation, number) = self.take_out(id)?;
            freed.extend(number);
            Some(allocation)
        };
        let removed = ids.map(remove).collect();
        // Reversed, because slots are taken from the end of the list.
        self.free[own_shard()].lock().extend(freed.into_iter().rev());
        removed
    }

    /// Retires an id and returns its allocation. Also returns the id's slot, unless the slot's generations are
    /// exhausted.
    fn take_out(&self, id: MemoryId) -> Option<(Allocation, Option<u32>)> {
        let allocation = self.get(id)?;
        let (generation, number) = parts(id);
        let slot = self.slot(number)?;
        let released = slot.generation.compare_exchange(
            generation,
            generation.wrapping_add(1),
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        released.ok()?;
        Some((allocation, (generation < u32::MAX).then_some(number)))
    }

    /// Retires all ids and returns their allocations.
    pub fn drain(&self) -> Vec<Allocation> {
        let numbers = 0..self.next.load(Ordering::Acquire);
        let live = numbers.filter_map(|number| {
            let generation = self.slot(number)?.generation.load(Ordering::Acquire);
            self.remove(MemoryId(u64::from(generation) << u32::BITS | u64::from(number)))
        });
        live.collect()
    }

    fn free_slot(&self) -> u32 {
        let own = own_shard();
        for shard in (0..SHARDS).map(|distance| (own + distance) % SHARDS) {
            if let Some(number) = self.free[shard].lock().pop() {
                return number;
            }
        }
        let number = self.next.fetch_add(1, Ordering::AcqRel);
        assert!(number < u32::MAX - CHUNK_SLOTS_MIN, "more pages than there are names");
        let (chunk, slots, _) = position(number);
        self.chunks[chunk].get_or_init(|| (0..slots).map(|_| HandleSlot::default()).collect());
        number
    }

    fn slot(&self, number: u32) -> Option<&HandleSlot> {
        let (chunk, _, index) = position(number);
        self.chunks.get(chunk)?.get()?.get(index)
    }
}

/// Splits an id into its generation and its slot.
fn parts(id: MemoryId) -> (u32, u32) {
    ((id.0 >> u32::BITS) as u32, id.0 as u32)
}

/// Returns the chunk that contains a slot, the chunk's number of slots, and the slot's index in the chunk.
fn position(number: u32) -> (usize, u32, usize) {
    let shifted = u64::from(number) + u64::from(CHUNK_SLOTS_MIN);
    let chunk = shifted.ilog2() - CHUNK_SLOTS_MIN.ilog2();
    let slots = u64::from(CHUNK_SLOTS_MIN) << chunk;
    (chunk as usize, slots as u32, (shifted - slots) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(address: u64) -> Allocation {
        let (is_adopted, is_file) = (address.is_multiple_of(2), address.is_multiple_of(3));
        Allocation { address, len: 2 * address, kind: Kind::Pinned, is_adopted, is_file }
    }

    #[test]
    fn handles_are_created_and_released_concurrently() {
        let handles = Handles::new();
        let mut names = Vec::new();
        for round in 0..3 {
            names.clear();
            let kept = handles.insert(allocation(5000));
            let allocations: Vec<Allocation> = (1..3000).map(allocation).collect();
            handles.insert_all(allocations.iter().copied(), &mut names);
            assert!((1..).zip(&names).all(|(address, name)| handles.get(*name) == Some(allocation(address))));
            let removed = handles.remove_all(names.iter().copied());
            assert!(removed.into_iter().eq(allocations.into_iter().map(Some)));
            assert!(handles.remove_all(names.iter().copied()).iter().all(Option::is_none));
            assert!(names.iter().all(|name| handles.get(*name).is_none()));
            assert_eq!(handles.get(kept), Some(allocation(5000)), "in round {round}");
        }
        assert!(handles.next.load(Ordering::Relaxed) < 3003, "slots are taken again");
    }

    #[test]
    fn released_handle_is_invalid() {
        let handles = Handles::new();
        let first = handles.insert(allocation(1));
        assert_eq!(handles.get(first), Some(allocation(1)));
        assert_eq!(handles.remove(first), Some(allocation(1)));
        assert_eq!((handles.get(first), handles.remove(first)), (None, None));
        // The slot is used again, with another id.
        let second = handles.insert(allocation(2));
        assert_eq!(parts(second).1, parts(first).1);
        assert_eq!((handles.get(first), handles.remove(first)), (None, None));
        assert_eq!(handles.get(second), Some(allocation(2)));
    }

    #[test]
    fn unknown_handles_are_invalid() {
        let handles = Handles::new();
        handles.insert(allocation(1));
        for id in [0, 1, 99, 1 << 32 | 1, 2 << 32, 3 << 32, u64::MAX] {
            assert_eq!((handles.get(MemoryId(id)), handles.remove(MemoryId(id))), (None, None), "{id:#x}");
        }
    }

    #[test]
    fn exhausted_slot_is_not_reused() {
        let handles = Handles::new();
        let slot = parts(handles.insert(allocation(1))).1;
        handles.slot(slot).unwrap().generation.store(u32::MAX, Ordering::Relaxed);
        let last = MemoryId(u64::from(u32::MAX) << 32 | u64::from(slot));
        assert_eq!(handles.remove(last), Some(allocation(1)));
        assert_ne!(parts(handles.insert(allocation(2))).1, slot);
    }

    #[test]
    fn slots_follow_each_other_from_chunk_to_chunk() {
        let mut expected = (0, 0);
        for number in 0..10 * CHUNK_SLOTS_MIN {
            let (chunk, slots, index) = position(number);
            assert_eq!((chunk, index), expected);
            expected = if index as u32 + 1 == slots { (chunk + 1, 0) } else { (chunk, index + 1) };
        }
        assert!(position(u32::MAX - CHUNK_SLOTS_MIN).0 < CHUNKS);
    }

    #[test]
    fn double_release_of_name_frees_once() {
        let handles = Handles::new();
        let barrier = std::sync::Barrier::new(2);
        for round in 1..2000 {
            let id = handles.insert(allocation(round));
            let release = || {
                barrier.wait();
                handles.remove(id)
            };
            let [one, other] = std::thread::scope(|scope| {
                let elsewhere = scope.spawn(release);
                [release(), elsewhere.join().unwrap()]
            });
            assert_eq!(one.xor(other), Some(allocation(round)));
        }
    }

    #[test]
    fn handle_refers_to_one_allocation_despite_slot_reuse() {
        const READS: u64 = 20_000;
        let handles = Handles::new();
        let newest = AtomicU64::new(handles.insert(allocation(1)).0);
        let reads = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while reads.load(Ordering::Relaxed) < READS {
                    let id = MemoryId(newest.load(Ordering::Acquire));
                    if let Some(found) = handles.get(id) {
                        // There is only one slot, so the n-th id refers to the n-th allocation.
                        assert_eq!(found, allocation(u64::from(parts(id).0).div_ceil(2)));
                        reads.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            for round in 2.. {
                handles.remove(MemoryId(newest.load(Ordering::Relaxed))).expect("in use");
                newest.store(handles.insert(allocation(round)).0, Ordering::Release);
                if reads.load(Ordering::Relaxed) >= READS {
                    return;
                }
            }
        });
    }

    #[test]
    fn threads_never_share_a_name() {
        let handles = Handles::new();
        std::thread::scope(|scope| {
            for thread in 1..=4_u64 {
                let handles = &handles;
                scope.spawn(move || {
                    let mut live = Vec::new();
                    for round in 0..5000 {
                        let mine = allocation(thread << 32 | round);
                        live.push((handles.insert(mine), mine));
                        if round % 3 == 0 {
                            let (id, mine) = live.swap_remove(live.len() / 2);
                            assert_eq!(handles.remove(id), Some(mine));
                        }
                    }
                    for (id, mine) in live {
                        assert_eq!((handles.get(id), handles.remove(id)), (Some(mine), Some(mine)));
                    }
                });
            }
        });
        assert_eq!(handles.drain(), []);
    }
}
