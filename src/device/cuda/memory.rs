//! Floor 3. Memory in slabs: a driver's allocation costs up to milliseconds and giving one back stops the
//! whole GPU, so both are rare.
//!
//! Lengths are rounded up to a class, four classes to each doubling, so at most a fifth of a block lies idle.
//! A class cuts its blocks from slabs; the first slab of a class is small, each further one twice as long.
//! Blocks longer than the longest class are slabs of their own. What is free stays with its class until
//! somebody asks for it: [`Slabs::trim`] gives empty slabs back to the driver.
//!
//! Nothing here knows of fences: a block is freed by who has waited for its last use.

use std::collections::BTreeMap;
use std::ffi::c_void;

use parking_lot::Mutex;
use remanent_format::Place;

use super::context::Context;
use super::errors::Code;
use crate::error::{Error, Result};

/// The smallest class: what a warp moves in one access, and then some.
const CLASS_LEN_MIN: u64 = 256;
/// The longest class that shares slabs.
const CLASS_LEN_MAX: u64 = 16 << 20;
/// Slabs are multiples of this, as the driver's own are.
const SLAB_LEN_MIN: u64 = 2 << 20;
/// The longest slab of several blocks.
const SLAB_LEN_MAX: u64 = 64 << 20;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: for every GPU, at the same address. The host's
/// caches stay on, for it reads what is downloaded.
const HOST_FLAGS: u32 = 3;
/// `CU_MEM_ATTACH_GLOBAL`.
const MANAGED_FLAGS: u32 = 1;

/// Where the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// In the GPU's memory.
    Device,
    /// In host memory, pinned, at an address that the GPU knows too.
    Pinned,
    /// Wherever they were used last.
    Managed,
}

/// Memory of one kind. Shared by threads.
pub(super) struct Slabs {
    context: &'static Context,
    kind: Kind,
    /// What a shortage is reported as.
    place: Place,
    state: Mutex<BTreeMap<u64, Class>>,
}

/// Memory handed out. It is given back by [`Slabs::free`]; dropped, it stays allocated.
#[derive(Debug)]
pub(super) struct Block {
    /// The first byte, to GPU and host alike.
    pub address: u64,
    class_len: u64,
    slab: usize,
}

#[derive(Default)]
struct Class {
    /// By number; the numbers of those given back are used again.
    slabs: Vec<Option<Slab>>,
    free: Vec<(usize, u64)>,
}

struct Slab {
    address: u64,
    len: u64,
    blocks_used: u64,
}

/// Why the driver gave no slab.
enum Refused {
    /// There is no memory left.
    Full,
    /// Something else is wrong.
    Failed(Error),
}

impl Slabs {
    /// Without memory yet.
    pub fn new(context: &'static Context, kind: Kind, place: Place) -> Self {
        Self { context, kind, place, state: Mutex::default() }
    }

    /// A block of at least `len` bytes, whose content is what its last user left.
    ///
    /// # Errors
    /// `OutOfMemory`, a device error.
    pub fn allocate(&self, len: u64) -> Result<Block> {
        let out_of_memory = Error::OutOfMemory { place: self.place, len };
        let class_len = class_of(len).ok_or_else(|| out_of_memory.clone())?;
        if let Some(block) = self.state.lock().entry(class_len).or_default().take(class_len) {
            return Ok(block);
        }
        // The lock is not held while the driver works. Who comes meanwhile may make a slab too, which will
        // be used.
        let count = self.state.lock().get(&class_len).map_or(0, |class| class.slabs.iter().flatten().count());
        for slab_len in [slab_len(class_len, count), slab_len(class_len, 0)] {
            match self.make(slab_len) {
                Ok(address) => {
                    let mut state = self.state.lock();
                    let class = state.entry(class_len).or_default();
                    class.add(Slab { address, len: slab_len, blocks_used: 0 }, class_len);
                    return Ok(class.take(class_len).expect("a slab has at least one block"));
                }
                Err(Refused::Full) => {}
                Err(Refused::Failed(error)) => return Err(error),
            }
        }
        Err(out_of_memory)
    }

    /// Takes a block back.
    pub fn free(&self, block: Block) {
        let mut state = self.state.lock();
        let class = state.get_mut(&block.class_len).expect("the class that the block came from");
        let slab = class.slabs[block.slab].as_mut().expect("a slab with a block in use stays");
        slab.blocks_used -= 1;
        class.free.push((block.slab, block.address));
    }

    /// Gives empty slabs back to the driver, and returns how many bytes that were. The driver waits for all
    /// the GPU's work, the caller's own included, so this is for shortages and for who asks.
    ///
    /// # Errors
    /// A device error.
    pub fn trim(&self) -> Result<u64> {
        let mut empty = Vec::new();
        for class in self.state.lock().values_mut() {
            class.take_empty(&mut empty);
        }
        let bytes = empty.iter().map(|slab| slab.len).sum();
        for slab in empty {
            self.unmake(&slab).map_err(|code| self.context.fault(code))?;
        }
        Ok(bytes)
    }

    /// Bytes held from the driver, in use or not.
    pub fn reserved_bytes(&self) -> u64 {
        self.state.lock().values().flat_map(|class| class.slabs.iter().flatten()).map(|slab| slab.len).sum()
    }

    /// Asks the driver for a slab.
    fn make(&self, len: u64) -> Result<u64, Refused> {
        let len = usize::try_from(len).map_err(|_| Refused::Full)?;
        let entered = self.context.enter().map_err(Refused::Failed)?;
        let refused = |code: Code| {
            if code.is_out_of_memory() { Refused::Full } else { Refused::Failed(self.context.fault(code)) }
        };
        match self.kind {
            Kind::Device => {
                let mut address = 0;
                // SAFETY: the context is current, the pointer is to a live address.
                unsafe { entered.allocate(&mut address, len) }.map_err(refused)?;
                Ok(address)
            }
            Kind::Pinned => {
                let mut address = std::ptr::null_mut();
                // SAFETY: the context is current, the pointer is to a live address.
                unsafe { entered.allocate_host(&mut address, len, HOST_FLAGS) }.map_err(refused)?;
                Ok(address as u64)
            }
            Kind::Managed => {
                // More managed memory than the GPU has free can hang it, so no more is asked for.
                let (mut free, mut total) = (0, 0);
                // SAFETY: the context is current, the pointers are to live integers.
                unsafe { entered.memory_info(&mut free, &mut total) }.map_err(refused)?;
                if len > free {
                    return Err(Refused::Full);
                }
                let mut address = 0;
                // SAFETY: the context is current, the pointer is to a live address.
                unsafe { entered.allocate_managed(&mut address, len, MANAGED_FLAGS) }.map_err(refused)?;
                Ok(address)
            }
        }
    }

    fn unmake(&self, slab: &Slab) -> Result<(), Code> {
        // With the context its memory is gone.
        let Ok(entered) = self.context.enter() else { return Ok(()) };
        match self.kind {
            // SAFETY: the driver gave it, no block of it is in use, and it leaves our hands here.
            Kind::Device | Kind::Managed => unsafe { entered.free(slab.address) },
            // SAFETY: the same.
            Kind::Pinned => unsafe { entered.free_host(slab.address as *mut c_void) },
        }
    }
}

impl Drop for Slabs {
    /// Blocks that were never freed keep their slabs: something may still use them.
    fn drop(&mut self) {
        if let Err(error) = self.trim() {
            tracing::warn!(%error, "memory could not be given back to the driver");
        }
    }
}

impl Class {
    fn take(&mut self, class_len: u64) -> Option<Block> {
        let (slab, address) = self.free.pop()?;
        self.slabs[slab].as_mut().expect("free blocks lie in slabs that are there").blocks_used += 1;
        Some(Block { address, class_len, slab })
    }

    fn add(&mut self, slab: Slab, class_len: u64) {
        let number = self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len());
        // Backwards, for the last one is taken first.
        let blocks = (0..slab.len / class_len).rev().map(|block| (number, slab.address + block * class_len));
        self.free.extend(blocks);
        if number == self.slabs.len() {
            self.slabs.push(Some(slab));
        } else {
            self.slabs[number] = Some(slab);
        }
    }

    fn take_empty(&mut self, empty: &mut Vec<Slab>) {
        for slab in &mut self.slabs {
            empty.extend(slab.take_if(|slab| slab.blocks_used == 0));
        }
        self.free.retain(|(slab, _)| self.slabs[*slab].is_some());
    }
}

/// The length of the blocks from which `len` bytes are served; `None` beyond any machine's memory.
fn class_of(len: u64) -> Option<u64> {
    if len > CLASS_LEN_MAX {
        return len.checked_next_multiple_of(SLAB_LEN_MIN);
    }
    let len = len.max(CLASS_LEN_MIN);
    // The powers of two, and three steps between each and the next.
    let step = (len.next_power_of_two() / 8).max(CLASS_LEN_MIN / 4);
    Some(len.next_multiple_of(step))
}

/// The length of a class's next slab when it has `count`.
fn slab_len(class_len: u64, count: usize) -> u64 {
    if class_len > CLASS_LEN_MAX {
        return class_len;
    }
    let doubled = SLAB_LEN_MIN.max(class_len) << count.min(5);
    // Whole blocks, and nothing beyond the last one that the driver would round up to in any case.
    doubled.min(SLAB_LEN_MAX).next_multiple_of(class_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_at_most_a_fifth() {
        for len in (1..5000).chain((1 << 20)..(1 << 20) + 300).chain([CLASS_LEN_MAX - 1, CLASS_LEN_MAX]) {
            let class = class_of(len).unwrap();
            assert!(class >= len && class.is_multiple_of(64), "{len} in {class}");
            assert!(len < CLASS_LEN_MIN || (class - len) * 5 <= class, "{len} in {class}");
        }
        assert_eq!([0, 1, 256, 257].map(class_of), [256, 256, 256, 320].map(Some));
        assert_eq!(class_of(CLASS_LEN_MAX + 1), Some(CLASS_LEN_MAX + SLAB_LEN_MIN));
        assert_eq!(class_of(u64::MAX), None);
    }

    #[test]
    fn slabs_hold_whole_blocks_and_grow() {
        for class in (0..=24).flat_map(|power| [4, 5, 6, 7].map(|part| part << power)) {
            if !(CLASS_LEN_MIN..=CLASS_LEN_MAX).contains(&class) {
                continue;
            }
            let lens: Vec<u64> = (0..8).map(|count| slab_len(class, count)).collect();
            assert!(lens.iter().all(|len| len.is_multiple_of(class) && *len >= class), "{class}: {lens:?}");
            assert!(lens.is_sorted() && lens[7] < SLAB_LEN_MAX + class, "{class}: {lens:?}");
        }
        assert_eq!(slab_len(1 << 30, 3), 1 << 30);
    }
}
