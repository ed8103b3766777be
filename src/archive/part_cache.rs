//! A cache of fetched parts of image files, in one unnamed temporary file.
//!
//! The file consists of slots, each as long as the longest part. If all slots are in use, the least recently read part
//! is replaced. If several threads need the same part, one thread fetches it and the others wait.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use remanent_archive::object::PART_LEN_MAX;

use crate::base::sync::{Condvar, Mutex};
use crate::error::Result;

/// The minimum number of slots. With fewer slots, concurrent readers would replace each other's parts.
const SLOTS_MIN: u64 = 8;

/// The fetched parts of one view or follower.
pub(super) struct PartCache {
    file: File,
    slots_max: u64,
    state: Mutex<CacheState>,
    /// Signaled when a fetch of a part has succeeded or failed.
    arrived: Condvar,
}

#[derive(Default)]
struct CacheState {
    parts: HashMap<usize, Part>,
    /// The number of slots in the file.
    slots: u64,
    /// The slots that contain no part.
    free: Vec<Arc<Slot>>,
    /// The number of reads so far.
    reads: u64,
}

/// A part that is being fetched or is in the file.
enum Part {
    Fetching,
    Held {
        slot: Arc<Slot>,
        /// The value of `reads` at the last read of this part.
        last_read: u64,
    },
}

/// A slot of the file. A slot is not overwritten while a reader has a reference to it.
struct Slot {
    index: u64,
}

/// A fetched part, whose bytes are in the file or in memory.
pub(super) enum FetchedPart {
    InFile(PartInFile),
    /// The bytes of the part, if writing them to the file failed.
    InMemory(Vec<u8>),
}

/// A part in the file of a cache. Its slot is not overwritten during the lifetime of this value.
pub(super) struct PartInFile {
    slot: Arc<Slot>,
}

impl PartCache {
    /// Creates an empty cache in `file`. The cache keeps at most `len_max` bytes, or 8 parts if that is more.
    pub fn new(file: File, len_max: u64) -> Self {
        let slots_max = (len_max / PART_LEN_MAX as u64).max(SLOTS_MIN);
        Self { file, slots_max, state: Mutex::default(), arrived: Condvar::new() }
    }

    /// Returns the part with the given number. Calls `fetch` if the cache does not contain the part.
    ///
    /// # Errors
    /// The errors of `fetch`.
    pub fn part(&self, number: usize, fetch: impl FnOnce() -> Result<Vec<u8>>) -> Result<FetchedPart> {
        if let Some(slot) = self.held(number) {
            return Ok(FetchedPart::InFile(PartInFile { slot }));
        }
        let fetching = Fetching { cache: self, number };
        let bytes = fetch()?;
        let slot = self.take_slot();
        let stored = self.file.write_all_at(&bytes, slot.index * PART_LEN_MAX as u64);
        if let Err(error) = stored {
            tracing::debug!(%error, "a part of an image file is not kept");
            self.state.lock().free.push(slot);
            return Ok(FetchedPart::InMemory(bytes));
        }
        fetching.complete(slot.clone());
        Ok(FetchedPart::InFile(PartInFile { slot }))
    }

    /// Returns the slot of a part. If another thread is fetching the part, waits for that thread. Returns `None` if the
    /// caller must fetch the part.
    fn held(&self, number: usize) -> Option<Arc<Slot>> {
        let mut state = self.state.lock();
        loop {
            state.reads += 1;
            let reads = state.reads;
            match state.parts.get_mut(&number) {
                Some(Part::Held { slot, last_read }) => {
                    *last_read = reads;
                    return Some(slot.clone());
                }
                Some(Part::Fetching) => self.arrived.wait(&mut state),
                None => {
                    state.parts.insert(number, Part::Fetching);
                    return None;
                }
            }
        }
    }

    /// Returns a slot for another part: a free slot, a new slot, or the slot of the least recently read part.
    fn take_slot(&self) -> Arc<Slot> {
        let state = &mut *self.state.lock();
        if let Some(slot) = state.free.pop() {
            return slot;
        }
        if state.slots >= self.slots_max {
            let idle = state.parts.iter().filter_map(|(number, part)| match part {
                Part::Held { slot, last_read } if Arc::strong_count(slot) == 1 => Some((*last_read, *number)),
                _ => None,
            });
            if let Some((_, oldest)) = idle.min()
                && let Some(Part::Held { slot, .. }) = state.parts.remove(&oldest)
            {
                return slot;
            }
        }
        // If all parts are being read, the file grows beyond its bound.
        let slot = Arc::new(Slot { index: state.slots });
        state.slots += 1;
        slot
    }
}

impl FetchedPart {
    /// Fills `out` with bytes of the part, starting at `offset`.
    ///
    /// # Errors
    /// An I/O error of the file; `UnexpectedEof` if the part is too short.
    pub fn read(&self, cache: &PartCache, offset: u64, out: &mut [u8]) -> io::Result<()> {
        match self {
            FetchedPart::InFile(part) => {
                cache.file.read_exact_at(out, part.slot.index * PART_LEN_MAX as u64 + offset)
            }
            FetchedPart::InMemory(bytes) => {
                let bytes = bytes.get(offset as usize..).and_then(|bytes| bytes.get(..out.len()));
                out.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }
}

/// A guard for a part that a thread is fetching. If the thread fails or panics, dropping the guard lets another thread
/// fetch the part.
struct Fetching<'a> {
    cache: &'a PartCache,
    number: usize,
}

impl Fetching<'_> {
    fn complete(self, slot: Arc<Slot>) {
        let mut state = self.cache.state.lock();
        let last_read = state.reads;
        state.parts.insert(self.number, Part::Held { slot, last_read });
    }
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.state.lock();
        if matches!(state.parts.get(&self.number), Some(Part::Fetching)) {
            state.parts.remove(&self.number);
        }
        self.cache.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn cache() -> PartCache {
        PartCache::new(tempfile::tempfile().unwrap(), 0)
    }

    fn read(cache: &PartCache, number: usize, fetches: &mut u32) -> [u8; 4] {
        let fetch = || {
            *fetches += 1;
            Ok([number as u8; 9].to_vec())
        };
        let part = cache.part(number, fetch).unwrap();
        let mut out = [0; 4];
        part.read(cache, 5, &mut out).unwrap();
        out
    }

    #[test]
    fn least_recently_read_part_is_replaced() {
        let (cache, mut fetches) = (cache(), 0);
        let slots = SLOTS_MIN as usize;
        for number in 0..slots {
            assert_eq!(read(&cache, number, &mut fetches), [number as u8; 4]);
        }
        read(&cache, 0, &mut fetches);
        assert_eq!(fetches as usize, slots);
        // Part 1 is replaced, and part 0 is kept.
        read(&cache, slots, &mut fetches);
        read(&cache, 0, &mut fetches);
        assert_eq!(fetches as usize, slots + 1);
        assert_eq!(read(&cache, 1, &mut fetches), [1; 4]);
        assert_eq!(fetches as usize, slots + 2);
        assert_eq!(cache.state.lock().slots, SLOTS_MIN);
    }

    #[test]
    fn parts_that_are_read_are_not_replaced() {
        let (cache, mut fetches) = (cache(), 0);
        let held: Vec<FetchedPart> = (0..SLOTS_MIN as usize)
            .map(|number| cache.part(number, || Ok(vec![number as u8; 9])).unwrap())
            .collect();
        for number in 100..110 {
            assert_eq!(read(&cache, number, &mut fetches), [number as u8; 4]);
        }
        for (number, part) in held.iter().enumerate() {
            let mut out = [0; 9];
            part.read(&cache, 0, &mut out).unwrap();
            assert_eq!(out, [number as u8; 9]);
        }
        assert_eq!(cache.state.lock().slots, SLOTS_MIN + 1, "the file grows by one slot");
    }

    #[test]
    fn failed_fetch_is_repeated_by_next_reader() {
        let (cache, mut fetches) = (cache(), 0);
        let failed = cache.part(3, || Err(Error::Closed));
        assert!(failed.is_err());
        assert_eq!(read(&cache, 3, &mut fetches), [3; 4]);
    }

    #[test]
    fn concurrent_readers_fetch_a_part_once() {
        let cache = cache();
        let fetches = std::sync::atomic::AtomicU32::new(0);
        let start = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    start.wait();
                    let fetch = || {
                        fetches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        std::thread::yield_now();
                        Ok(vec![7; 9])
                    };
                    let mut out = [0; 9];
                    cache.part(1, fetch).unwrap().read(&cache, 0, &mut out).unwrap();
                    assert_eq!(out, [7; 9]);
                });
            }
        });
        assert_eq!(fetches.into_inner(), 1);
    }
}
