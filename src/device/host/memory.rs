//! The host device's allocations and the location of their bytes. A long allocation has a block of its own. Short
//! allocations share slabs: a slab is one block with 64 slots of equal length. A separate block for each page, with its
//! lock and counts, took 88 bytes beyond the page's own and two more cache misses for each access.
//!
//! A slab's lock is the lock of every allocation in it. Commands on short allocations hold that lock for a copy of one
//! kilobyte at most.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::Place;
use remanent_format::state::id_map::IdMap;
use zerocopy::FromZeros;

use super::super::{MemoryId, Span};
use crate::base::sync::locks::RwLock;
use crate::device::HostMemory;
use crate::error::{Error, Result};

/// The longest allocation, in bytes, that is placed in a slab.
const SLOT_LEN_MAX: u64 = 1024;
/// The unit of slot lengths in bytes. Allocations of similar length thus share slabs.
const SLOT_ALIGN: u64 = 16;
/// The number of slots in a slab. A `u64` has one bit for each slot.
const SLOTS: u64 = u64::BITS as u64;

/// All allocations of a device.
#[derive(Debug, Default)]
pub struct HostMemories {
    memories: IdMap<MemoryId, HostAllocation>,
    last: u64,
    /// Slabs with at least one free slot, by slot length and block number.
    slabs: BTreeMap<(u64, u64), HostSlab>,
    last_slab: u64,
}

/// A slab that is not full.
#[derive(Debug)]
struct HostSlab {
    block: Arc<HostBlock>,
    /// The free slots, one bit each.
    free: u64,
}

/// A shared handle to an allocation. A range of an allocation can have a handle too.
#[derive(Clone, Debug)]
pub struct HostAllocation {
    block: Arc<HostBlock>,
    /// The slot in the slab; `None` if the allocation occupies the whole block.
    slot: Option<HostSlot>,
    /// The place that the memory represents, packed into two bytes to fit the alignment gap.
    place: (u8, u8),
}

const _: () = assert!(size_of::<HostAllocation>() == 16);

#[derive(Clone, Copy, Debug)]
struct HostSlot {
    number: u16,
    /// The allocation's length, which may be less than the slot's.
    len: u16,
}

/// A block of memory: one long allocation, or a slab of short ones. The lock is held during one command, which acquires
/// no other lock, so a test's scheduler need not control it.
#[derive(Debug)]
pub struct HostBlock {
    pub bytes: RwLock<SharedBytes>,
    /// Length of the allocation in bytes, or of each slot of a slab.
    len: u64,
    /// The number of the slab; 0 if the block is not a slab.
    number: u64,
    /// For an alias of a range: the block that contains the range's bytes, and the offset of the first byte. An
    /// additional block for the few aliased ranges keeps the record of every page small.
    within: Option<(Arc<HostBlock>, u64)>,
}

/// Bytes that readers may share. The next command that changes shared bytes first copies them, so a reader's bytes
/// never change. Most pages are never shared. Bytes that were never shared need one allocation less.
#[derive(Debug)]
pub enum SharedBytes {
    Ours(Vec<u8>),
    Shared(Arc<Vec<u8>>),
    /// Bytes that another object owns.
    External(External),
}

/// Memory of a file or of the caller.
pub struct External(Box<dyn HostMemory>);

impl fmt::Debug for External {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "External({} bytes)", self.0.byte_len())
    }
}

impl HostMemories {
    /// Returns the allocation with this id.
    pub fn get(&self, id: MemoryId) -> &HostAllocation {
        self.memories.get(id).unwrap_or_else(|| panic!("{id:?} is no memory of this device"))
    }

    /// Returns the allocation with this id, or `None` if it was released.
    pub fn find(&self, id: MemoryId) -> Option<&HostAllocation> {
        self.memories.get(id)
    }

    /// Adds a long allocation.
    pub fn insert(&mut self, memory: HostAllocation) -> MemoryId {
        self.last += 1;
        self.memories.insert(MemoryId(self.last), memory);
        MemoryId(self.last)
    }

    /// Adds a short allocation, in a slot of the oldest slab with a free slot.
    pub fn insert_short(&mut self, place: Place, len: u64) -> Result<MemoryId> {
        assert!(HostAllocation::is_short(len), "{len} bytes do not fit a slot");
        let slot_len = len.max(1).next_multiple_of(SLOT_ALIGN);
        let with_room = self.slabs.range((slot_len, 0)..=(slot_len, u64::MAX)).next();
        let key = with_room.map_or((slot_len, self.last_slab + 1), |(key, _)| *key);
        if with_room.is_none() {
            let bytes = RwLock::new(SharedBytes::Ours(zeroed(place, slot_len * SLOTS)?));
            let block = Arc::new(HostBlock { bytes, len: slot_len, number: key.1, within: None });
            self.slabs.insert(key, HostSlab { block, free: u64::MAX });
            self.last_slab = key.1;
        }
        let slab = self.slabs.get_mut(&key).expect("found or made just now");
        let slot = HostSlot { number: slab.free.trailing_zeros() as u16, len: len as u16 };
        let memory = HostAllocation { block: slab.block.clone(), slot: Some(slot), place: packed(place) };
        slab.free &= slab.free - 1;
        if slab.free == 0 {
            self.slabs.remove(&key);
        }
        Ok(self.insert(memory))
    }

    /// Replaces the id of an allocation with a new id.
    pub fn rename(&mut self, id: MemoryId) -> MemoryId {
        let renamed = self.memories.remove(id);
        self.insert(renamed.unwrap_or_else(|| panic!("{id:?} is no memory of this device")))
    }

    /// Removes an allocation. Its bytes are freed when the returned handle is dropped. A slab that becomes empty is
    /// removed.
    pub fn remove(&mut self, id: MemoryId) -> HostAllocation {
        let removed = self.memories.remove(id);
        let memory = removed.unwrap_or_else(|| panic!("{id:?} is no memory of this device"));
        if let Some(slot) = memory.slot {
            let key = (memory.block.len, memory.block.number);
            let full = || HostSlab { block: memory.block.clone(), free: 0 };
            let slab = self.slabs.entry(key).or_insert_with(full);
            slab.free |= 1 << slot.number;
            if slab.free == u64::MAX {
                self.slabs.remove(&key);
            }
        }
        memory
    }
}

impl HostAllocation {
    /// Returns whether an allocation of this length is placed in a slab.
    pub fn is_short(len: u64) -> bool {
        len <= SLOT_LEN_MAX
    }

    /// Allocates a long allocation with its own block. Returns `None` for a short length, which belongs in a slab.
    pub fn long_only(place: Place, len: u64) -> Result<Option<Self>> {
        let long = || Ok(Self::of(Arc::new(HostBlock::of(zeroed(place, len)?)), place));
        (!Self::is_short(len)).then(long).transpose()
    }

    /// Wraps a whole block as one allocation.
    pub fn of(block: Arc<HostBlock>, place: Place) -> Self {
        Self { block, slot: None, place: packed(place) }
    }

    /// Returns the place that the memory represents.
    pub fn place(&self) -> Place {
        let (kind, ordinal) = self.place;
        Place::from_raw(kind, ordinal.into()).expect("the numbers of a place")
    }

    /// Returns a range of this allocation as an allocation.
    pub fn alias(&self, span: Span) -> Self {
        let at = self.range(span).start as u64;
        let bytes = RwLock::new(SharedBytes::Ours(Vec::new()));
        let within = Some((self.block().clone(), at));
        Self::of(Arc::new(HostBlock { bytes, len: span.len, number: 0, within }), self.place())
    }

    /// Returns the block that contains the bytes. The block of a short allocation also contains other allocations.
    pub fn block(&self) -> &Arc<HostBlock> {
        self.block.within.as_ref().map_or(&self.block, |(block, _)| block)
    }

    /// Calls `inspect` with a span of the bytes. `inspect` must not access any allocation, because the block's lock is
    /// held and another allocation may be in the same block.
    pub fn read<Seen>(&self, span: Span, inspect: impl FnOnce(&[u8]) -> Seen) -> Seen {
        inspect(self.block().bytes.read().part(self.range(span)))
    }

    /// Calls `change` with a span of the bytes. `change` must not access any allocation, because the block's lock is
    /// held.
    pub fn write(&self, span: Span, change: impl FnOnce(&mut [u8])) {
        change(self.block().bytes.write().part_mut(self.range(span)));
    }

    /// Returns whether the allocation has `len` bytes at `offset`.
    pub fn has(&self, offset: u64, len: u64) -> bool {
        let (_, whole) = self.extent();
        offset.checked_add(len).is_some_and(|end| end <= whole)
    }

    /// Returns the offset of the first byte in its block, and the length in bytes.
    pub fn extent(&self) -> (u64, u64) {
        match (self.slot, &self.block.within) {
            (Some(HostSlot { number, len }), _) => (u64::from(number) * self.block.len, len.into()),
            (None, Some((_, at))) => (*at, self.block.len),
            (None, None) => (0, self.block.len),
        }
    }

    /// Converts a span of the allocation to a range of its block. Panics if the span exceeds the allocation.
    pub fn range(&self, span: Span) -> Range<usize> {
        let (at, len) = self.extent();
        let end = span.offset.checked_add(span.len).filter(|end| *end <= len);
        assert!(end.is_some(), "{span:?} is not within its memory of {len} bytes");
        // The block's length fits in a usize.
        (at + span.offset) as usize..(at + span.offset + span.len) as usize
    }

    /// Returns the current bytes. The returned bytes never change. Bytes of a slot are copied.
    pub fn share(&self) -> Arc<Vec<u8>> {
        if self.slot.is_none() && self.block.within.is_none() {
            return self.block.bytes.write().share();
        }
        let (at, len) = self.extent();
        Arc::new(self.block().bytes.read().part(at as usize..(at + len) as usize).to_vec())
    }
}

impl HostBlock {
    /// Returns the address of the bytes if another object owns them, because such bytes never move. Returns `None`
    /// otherwise.
    pub fn external_address(&self) -> Option<u64> {
        match &*self.bytes.read() {
            SharedBytes::External(External(memory)) if memory.byte_len() > 0 => {
                Some(memory.bytes(0..1).as_ptr().addr() as u64)
            }
            _ => None,
        }
    }

    /// Creates a block of these bytes.
    pub fn of(bytes: Vec<u8>) -> Self {
        let len = bytes.len() as u64;
        Self { bytes: RwLock::new(SharedBytes::Ours(bytes)), len, number: 0, within: None }
    }

    /// Creates a block of bytes that another object owns.
    pub fn external(memory: Box<dyn HostMemory>) -> Self {
        let len = memory.byte_len();
        let bytes = RwLock::new(SharedBytes::External(External(memory)));
        Self { bytes, len, number: 0, within: None }
    }

    /// Returns the length in bytes.
    pub fn byte_len(&self) -> u64 {
        self.len
    }
}

impl SharedBytes {
    fn share(&mut self) -> Arc<Vec<u8>> {
        let bytes = match self {
            SharedBytes::Ours(bytes) => Arc::new(std::mem::take(bytes)),
            SharedBytes::Shared(bytes) => bytes.clone(),
            // The bytes remain with their owner, and the reader gets a copy.
            SharedBytes::External(External(memory)) => {
                return Arc::new(memory.bytes(0..memory.byte_len() as usize).to_vec());
            }
        };
        *self = SharedBytes::Shared(bytes.clone());
        bytes
    }

    /// Returns a range of the bytes.
    pub fn part(&self, range: Range<usize>) -> &[u8] {
        match self {
            SharedBytes::Ours(bytes) => &bytes[range],
            SharedBytes::Shared(bytes) => &bytes[range],
            SharedBytes::External(External(memory)) => memory.bytes(range),
        }
    }

    /// Returns all bytes for writing.
    pub fn make_mut(&mut self) -> &mut [u8] {
        match self {
            SharedBytes::Ours(bytes) => bytes,
            SharedBytes::Shared(bytes) => Arc::make_mut(bytes).as_mut_slice(),
            SharedBytes::External(External(memory)) => {
                let len = memory.byte_len() as usize;
                memory.bytes_mut(0..len)
            }
        }
    }

    /// Returns a range of the bytes for writing.
    pub fn part_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        match self {
            // Only this range is borrowed, because other threads may write to other ranges, such as other chunks of a
            // file.
            SharedBytes::External(External(memory)) => memory.bytes_mut(range),
            _ => &mut self.make_mut()[range],
        }
    }
}

/// Packs a place into two bytes: its kind and its slot number. Slot numbers above 255 are stored as 255.
fn packed(place: Place) -> (u8, u8) {
    let (kind, ordinal) = place.to_raw();
    (kind, u8::try_from(ordinal).unwrap_or(u8::MAX))
}

/// Allocates zeroed bytes, because safe Rust has no uninitialized memory. An excessive length returns an error instead
/// of aborting. The operating system zeroes memory on first access, so an open does not wait for that.
fn zeroed(place: Place, len: u64) -> Result<Vec<u8>> {
    let bytes = usize::try_from(len).ok().and_then(|len| u8::new_vec_zeroed(len).ok());
    bytes.ok_or(Error::OutOfMemory { place, len })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each short allocation keeps its own bytes, and no empty slab is kept, in any order of releases.
    #[test]
    fn short_memories_share_slabs_and_no_bytes() {
        let mut memories = HostMemories::default();
        let mut live: Vec<(MemoryId, u64, u8)> = Vec::new();
        let all = |id, len| Span { memory: id, offset: 0, len };
        let mut random = 7_u64;
        for step in 0..4000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let drawn = random >> 33;
            // Mostly inserts, then mostly removals.
            if live.is_empty() || drawn % 8 < if step < 2000 { 6 } else { 3 } {
                let len = [0, 1, 16, 17, 64, 64, 64, 1000, SLOT_LEN_MAX][(drawn / 8 % 9) as usize];
                let id = memories.insert_short(Place::Host, len).unwrap();
                memories.get(id).write(all(id, len), |bytes| bytes.fill(step as u8));
                live.push((id, len, step as u8));
            } else {
                let (id, len, filled) = live.swap_remove((drawn / 8) as usize % live.len());
                assert_eq!(*memories.remove(id).share(), vec![filled; len as usize], "at step {step}");
            }
        }
        assert!(!live.is_empty());
        for (id, len, filled) in live {
            assert_eq!(*memories.get(id).share(), vec![filled; len as usize]);
            memories.remove(id);
        }
        assert!(memories.slabs.is_empty() && memories.memories.is_empty());
    }

    #[test]
    fn free_slots_are_used_before_another_slab_is_made() {
        let mut memories = HostMemories::default();
        let ids: Vec<MemoryId> =
            (0..3 * SLOTS).map(|_| memories.insert_short(Place::Host, 50).unwrap()).collect();
        ids.iter().step_by(3).for_each(|id| _ = memories.remove(*id));
        // Another length that uses slots of the same length.
        (0..SLOTS).for_each(|_| _ = memories.insert_short(Place::Host, 60).unwrap());
        assert_eq!((memories.last_slab, memories.slabs.len()), (3, 0));
    }

    #[test]
    #[should_panic(expected = "is not within its memory of 50 bytes")]
    fn span_never_exceeds_short_memory_in_its_slot() {
        let mut memories = HostMemories::default();
        let memory = memories.insert_short(Place::Host, 50).unwrap();
        memories.get(memory).range(Span { memory, offset: 10, len: 41 });
    }
}
