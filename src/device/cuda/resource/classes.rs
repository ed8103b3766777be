//! Lengths of blocks, and of the slabs from which blocks are cut.
//!
//! Lengths are rounded up to a class, with four classes per doubling, so at most a fifth of a block is wasted. The
//! first slab of a class is small, and each further slab is twice as long, up to a length that the pool sets. Blocks
//! longer than the longest class have slabs of their own.

/// The block length of the smallest class, in bytes: somewhat more than a warp moves in one access.
const CLASS_LEN_MIN: u64 = 256;
/// The block length, in bytes, of the longest class that shares slabs.
const CLASS_LEN_MAX: u64 = 16 << 20;
/// The unit of slab lengths in bytes, which is also the driver's unit of allocation.
const SLAB_LEN_MIN: u64 = 2 << 20;
/// The maximum length, in bytes, of a slab with several blocks, unless a pool sets another length.
pub(super) const SLAB_LEN_MAX: u64 = 64 << 20;
/// The number of classes per doubling of the block length.
const STEPS: u64 = 4;

/// Number of classes that share slabs.
pub(super) const CLASSES: usize = (STEPS * (CLASS_LEN_MAX / CLASS_LEN_MIN).ilog2() as u64 + 1) as usize;

/// The class of blocks for allocations of some length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Blocks of the class with this number, cut from slabs.
    Shared(usize),
    /// A block that occupies a slab of its own, with this length in bytes.
    Dedicated(u64),
}

impl Class {
    /// Returns the class for `len` bytes, or `None` if the length exceeds any machine's memory.
    pub fn of(len: u64) -> Option<Self> {
        if len > CLASS_LEN_MAX {
            return len.checked_next_multiple_of(SLAB_LEN_MIN).map(Self::Dedicated);
        }
        // The steps divide the interval between two powers of two; a class ends where its step ends.
        let last = len.max(CLASS_LEN_MIN) - 1;
        let doubling = u64::from(last.ilog2());
        let step = (last >> (doubling - u64::from(STEPS.ilog2()))) % STEPS;
        let index = doubling * STEPS + step + 1 - u64::from(CLASS_LEN_MIN.ilog2()) * STEPS;
        Some(Self::Shared(index as usize))
    }

    /// Returns the length of the class's blocks in bytes.
    pub fn block_len(self) -> u64 {
        match self {
            Self::Shared(index) => {
                let (doubling, step) = (index as u64 / STEPS, index as u64 % STEPS);
                (CLASS_LEN_MIN + step * CLASS_LEN_MIN / STEPS) << doubling
            }
            Self::Dedicated(len) => len,
        }
    }

    /// Returns the length in bytes of the class's next slab when the class has `count` slabs. The slab has whole
    /// blocks, and exceeds `longest` by at most one block.
    pub fn slab_len(self, count: usize, longest: u64) -> u64 {
        let block_len = self.block_len();
        if let Self::Dedicated(len) = self {
            return len;
        }
        let doubled = SLAB_LEN_MIN.max(block_len) << count.min(5);
        // Whole blocks, without a remainder after the last one that the driver would round up to anyway.
        doubled.min(longest).next_multiple_of(block_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(len: u64) -> u64 {
        Class::of(len).unwrap().block_len()
    }

    #[test]
    fn size_classes_waste_at_most_a_fifth() {
        for len in (1..5000).chain((1 << 20)..(1 << 20) + 300).chain([CLASS_LEN_MAX - 1, CLASS_LEN_MAX]) {
            let class = served(len);
            assert!(class >= len && class.is_multiple_of(64), "{len} in {class}");
            assert!(len < CLASS_LEN_MIN || (class - len) * 5 <= class, "{len} in {class}");
        }
        assert_eq!([0, 1, 256, 257].map(served), [256, 256, 256, 320]);
        assert_eq!(Class::of(CLASS_LEN_MAX), Some(Class::Shared(CLASSES - 1)));
        assert_eq!(Class::of(CLASS_LEN_MAX + 1), Some(Class::Dedicated(CLASS_LEN_MAX + SLAB_LEN_MIN)));
        assert_eq!(Class::of(u64::MAX), None);
    }

    #[test]
    fn size_class_is_the_smallest_that_fits() {
        let lens: Vec<u64> = (0..CLASSES).map(|index| Class::Shared(index).block_len()).collect();
        assert!(lens.is_sorted() && lens[0] == CLASS_LEN_MIN, "{lens:?}");
        for (index, len) in lens.iter().enumerate() {
            assert_eq!(Class::of(*len), Some(Class::Shared(index)), "{len}");
            assert_eq!(Class::of(len - 63).unwrap(), Class::Shared(index), "{len} less 63");
        }
    }

    #[test]
    fn slabs_hold_whole_blocks_and_grow() {
        for class in (0..CLASSES).map(Class::Shared) {
            let block_len = class.block_len();
            for longest in [SLAB_LEN_MIN, 4 << 20, SLAB_LEN_MAX] {
                let lens: Vec<u64> = (0..8).map(|count| class.slab_len(count, longest)).collect();
                assert!(
                    lens.iter().all(|len| len.is_multiple_of(block_len) && *len >= block_len),
                    "{lens:?}"
                );
                assert!(lens.is_sorted() && lens[7] < longest + block_len, "{block_len}: {lens:?}");
            }
        }
        assert_eq!(Class::of(1 << 30).unwrap().slab_len(3, SLAB_LEN_MAX), 1 << 30);
    }
}
