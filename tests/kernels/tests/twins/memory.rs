//! Memory that ends at an unmapped page, so that the first access beyond its end faults. Also random numbers.

use std::ops::{Deref, DerefMut};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

const GRANULE: usize = 64 << 10;

/// Bytes that end at an unmapped page. A kernel that accesses memory beyond them faults.
pub struct Fenced {
    mapping: *mut u8,
    mapping_len: usize,
    begin: *mut u8,
    len: usize,
}

impl Fenced {
    pub fn zeroed(len: usize) -> Self {
        let room = len.next_multiple_of(GRANULE);
        let mapping_len = room + GRANULE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the system selects affects no other memory.
        let mapping = unsafe { mmap_anonymous(std::ptr::null_mut(), mapping_len, access, MapFlags::PRIVATE) }
            .expect("memory can be mapped")
            .cast::<u8>();
        // SAFETY: the last granule is within the mapping of `room + GRANULE` bytes.
        let fence = unsafe { mapping.add(room) };
        // SAFETY: the granule belongs to this mapping, and nothing uses it.
        unsafe { mprotect(fence.cast(), GRANULE, MprotectFlags::empty()) }.expect("memory can be fenced");
        // SAFETY: `len` is at most `room`, so this is within the mapping.
        let begin = unsafe { fence.sub(len) };
        Self { mapping, mapping_len, begin, len }
    }

    pub fn of(bytes: &[u8]) -> Self {
        let mut fenced = Self::zeroed(bytes.len());
        fenced.copy_from_slice(bytes);
        fenced
    }

    /// Returns the address of the first byte, in the form used in tables.
    pub fn address(&self) -> u64 {
        self.begin as u64
    }
}

impl Deref for Fenced {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes from `begin` are mapped, zeroed at first, and live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.begin, self.len) }
    }
}

impl DerefMut for Fenced {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.begin, self.len) }
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no slice of the mapping outlives the value.
        unsafe { munmap(self.mapping.cast(), self.mapping_len) }.expect("what was mapped can be unmapped");
    }
}

/// A SplitMix64 random number generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Returns a random number below a bound.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    /// Returns a random length, which is usually short and sometimes long enough for every unrolled loop.
    pub fn len(&mut self, max: usize) -> usize {
        let bound = [20, 200, 2000, max][self.below(4)];
        self.below(bound.min(max) + 1)
    }
}
