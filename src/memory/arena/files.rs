//! Memory of image files to which the device copies pages. The memory is registered within the budget of pinned memory,
//! and released when any other use needs that budget.
//!
//! File memory is released in this order: the command lists that use it complete, the device unregisters it, and the
//! mapping ends. Only then may the file be truncated or removed. If it is unknown whether the last list has completed,
//! the memory stays registered until the device is dropped.

use std::ops::Range;
use std::sync::{Arc, Weak};

use crc32fast::Hasher;
use remanent_format::Place;

use super::scratch::SCRATCH_PIECE_LEN;
use super::{Arena, PageMemory, Purpose};
use crate::base::allocation::{collected, push};
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::base::sync::{Mutex, Rank};
use crate::device::sums::{sums_in, sums_len, transfer_corrupted};
use crate::device::{Command, CommandList, Fence, Lane, MemoryId, Pending, Span};
use crate::disk::DiskFile;
use crate::error::{Error, Refused, Result};
use crate::memory::staging::StagingPool;

/// The files that are registered with the device.
#[derive(Default)]
pub(super) struct RegisteredFiles {
    files: Mutex<Vec<Weak<RegisteredFile>>>,
    /// Whether the device has rejected a file. If so, no more files are registered.
    is_refused: AtomicBool,
}

/// A file to whose memory the device copies. The memory stays registered until it is released or this value is dropped.
pub(crate) struct RegisteredFile {
    arena: Arc<Arena>,
    staging: Arc<StagingPool>,
    len: u64,
    state: Mutex<FileState>,
}

struct FileState {
    /// The device's id for the memory, or `None` once the memory is released.
    memory: Option<MemoryId>,
    /// The number of writers, which is the number of [`FileTarget`] values for the file. While it is above 0, the
    /// memory is not released.
    users: usize,
    /// For each lane, the fence of the last command list that uses the memory, or a fence with value 0 if there is
    /// none.
    last_uses: [Fence; FILE_LANES.len()],
    /// Whether a command list that uses the memory may have been queued without a known fence.
    is_end_unknown: bool,
}

/// The direction of copies between the device and a file. Each direction has a separate lane, because a copy queued
/// behind a read-back in the same lane would delay the queue of long copies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyDirection {
    To,
    From,
}

impl CopyDirection {
    fn lane(self) -> Lane {
        FILE_LANES[self as usize]
    }
}

/// The lanes for copies to and from files.
const FILE_LANES: [Lane; 2] = [Lane::Drain, Lane::Load];

/// The right to copy to a file's memory. The memory is not released before this value is dropped.
pub(crate) struct FileTarget {
    file: Arc<RegisteredFile>,
    memory: MemoryId,
}

impl Arena {
    /// Registers the memory of a file. Returns `None` if the device cannot copy to the file directly, and the bytes
    /// must be copied through staging. This is the case if the file does not support shared mappings, the device
    /// rejects it, or the budget of pinned memory has no room.
    pub(crate) fn register(
        self: &Arc<Self>,
        file: &dyn DiskFile,
        staging: &Arc<StagingPool>,
    ) -> Option<Arc<RegisteredFile>> {
        if self.files.is_refused.load(Ordering::Relaxed) {
            return None;
        }
        match self.try_register(file, staging) {
            Ok(registered) => registered,
            Err(error) => {
                tracing::debug!(%error, "cannot register the memory of an image file");
                if matches!(error, Error::Refused(Refused::Memory { .. })) {
                    self.files.is_refused.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }

    fn try_register(
        self: &Arc<Self>,
        file: &dyn DiskFile,
        staging: &Arc<StagingPool>,
    ) -> Result<Option<Arc<RegisteredFile>>> {
        let Some(mapping) = file.memory()? else { return Ok(None) };
        let (len, account) = (mapping.byte_len(), self.account(Place::Pinned));
        // The budget is claimed before the device is called (I10).
        account.claim(len)?;
        let memory = self
            .device
            .files(len)
            .and_then(|files| files.register(mapping))
            .inspect_err(|_| account.unclaim(len))?;
        account.allocated(Purpose::Image, 1, len);
        let last_uses = FILE_LANES.map(|lane| Fence { lane, value: 0 });
        let state = FileState { memory: Some(memory), users: 0, last_uses, is_end_unknown: false };
        let (arena, staging) = (self.clone(), staging.clone());
        let registered = Arc::new(RegisteredFile {
            arena,
            staging,
            len,
            state: Mutex::of_rank(Rank::REGISTERED_FILE, state),
        });
        let mut files = self.files.files.lock();
        files.retain(|file| file.strong_count() > 0);
        files.push(Arc::downgrade(&registered));
        Ok(Some(registered))
    }

    /// Releases the memory of files without writers, oldest first, until `needed` bytes of pinned memory are free.
    /// Returns whether any memory was freed.
    pub(super) fn release_files(&self, needed: u64) -> bool {
        let files: Vec<Arc<RegisteredFile>> =
            self.files.files.lock().iter().filter_map(Weak::upgrade).collect();
        let mut freed = 0;
        for file in files {
            if freed >= needed {
                break;
            }
            if file.release_unused() {
                freed += file.len;
            }
        }
        freed > 0
    }
}

impl RegisteredFile {
    /// Returns the right to copy to the file, or `None` if the file's memory was released.
    pub fn target(self: &Arc<Self>) -> Option<FileTarget> {
        let mut state = self.state.lock();
        let memory = state.memory?;
        state.users += 1;
        Some(FileTarget { file: self.clone(), memory })
    }

    /// Returns whether the file has length `len` and its memory is registered.
    pub fn is_registered(&self, len: u64) -> bool {
        self.len == len && self.state.lock().memory.is_some()
    }

    fn release_unused(&self) -> bool {
        let mut state = self.state.lock();
        state.users == 0 && self.give_up(&mut state)
    }

    /// Unregisters the file's memory with the device, and returns whether that succeeded. The caller must hold the lock
    /// of `state`: a writer that finds `memory` empty may truncate the file, and the device must not access it then.
    fn give_up(&self, state: &mut FileState) -> bool {
        let Some(memory) = state.memory.take() else { return false };
        let device = &self.arena.device;
        if state.is_end_unknown {
            tracing::warn!("the memory of a file stays registered, because its last use may not have ended");
            return false;
        }
        let ended = state.last_uses.into_iter().try_for_each(|fence| device.wait(fence));
        match ended.and_then(|()| device.files(self.len)?.unregister(memory)) {
            Ok(()) => {
                let account = self.arena.account(Place::Pinned);
                account.retired(Purpose::Image, 1, self.len);
                account.released(self.len);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "a file's memory stays mapped until the process ends");
                false
            }
        }
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        let state = &mut *state;
        // No [`FileTarget`] exists here, because each of them keeps this value alive.
        self.give_up(state);
    }
}

impl FileTarget {
    /// Returns the length in bytes of the file's registered memory.
    pub fn byte_len(&self) -> u64 {
        self.file.len
    }

    /// Returns a range of the file's memory for use in commands.
    pub fn part(&self, offset: u64, len: u64) -> Span {
        Span { memory: self.memory, offset, len }
    }

    /// Submits a command list that uses the file's memory, on the lane for direction `way`. The list waits for the
    /// fence `after`.
    ///
    /// # Errors
    /// A device error.
    pub fn submit(&self, way: CopyDirection, after: Option<Fence>, list: CommandList) -> Result<Pending> {
        let device = &self.file.arena.device;
        after.map_or(Ok(()), |fence| device.after(way.lane(), fence))?;
        let queued = device.submit(way.lane(), list);
        let mut state = self.file.state.lock();
        match &queued {
            // The device may have started the list although it returned no fence.
            Err(_) => state.is_end_unknown = true,
            Ok(pending) => {
                let last = &mut state.last_uses[way as usize];
                last.value = last.value.max(pending.fence().value);
            }
        }
        queued
    }

    /// Computes the CRC-32 of each of `ranges` on the device, and waits for the results. The ranges must be ascending.
    ///
    /// If there is a bus between device and file, the ranges are first copied across the bus to memory of `place`,
    /// because a copy engine reads faster than kernels that checksum bytes across a bus. The copy is omitted if `place`
    /// is not the device's own memory or has no room.
    ///
    /// # Errors
    /// A device error; `OutOfMemory`.
    pub fn sums(&self, place: Place, ranges: &[Range<u64>]) -> Result<Vec<u32>> {
        let mut sums = collected(ranges.iter().map(|_| Hasher::new()))?;
        let mut parts: Vec<(Range<u64>, usize)> = Vec::new();
        for (number, range) in ranges.iter().enumerate() {
            let mut start = range.start;
            while start < range.end {
                let first = parts.first().map_or(start, |(first, _)| first.start);
                let end = range.end.min(start + SCRATCH_PIECE_LEN);
                if end - first > SCRATCH_PIECE_LEN {
                    self.add_sums(place, &parts, &mut sums)?;
                    parts.clear();
                }
                push(&mut parts, (start..end, number))?;
                start = end;
            }
        }
        self.add_sums(place, &parts, &mut sums)?;
        collected(sums.into_iter().map(Hasher::finalize))
    }

    /// Adds the checksums of parts to the checksums of their ranges. Each part contains the index of its range.
    /// Together the parts may span at most the length of a piece.
    fn add_sums(&self, place: Place, parts: &[(Range<u64>, usize)], sums: &mut [Hasher]) -> Result<()> {
        let Some((start, end)) =
            parts.first().map(|first| first.0.start).zip(parts.last().map(|last| last.0.end))
        else {
            return Ok(());
        };
        let RegisteredFile { arena, staging, .. } = &*self.file;
        let read_back = self.read_back_memory(place, end - start)?;
        let mut last_use = Fence { lane: CopyDirection::From.lane(), value: 0 };
        let mut sum = || {
            let mut list = CommandList::default();
            if let Some(memory) = read_back.first() {
                let target = memory.part(0, end - start);
                push(&mut list.commands, Command::Copy { source: self.part(start, end - start), target })?;
            }
            let bytes_of = |part: &Range<u64>| match read_back.first() {
                Some(memory) => memory.part(part.start - start, part.end - part.start),
                None => self.part(part.start, part.end - part.start),
            };
            staging.add_sums(&mut list, collected(parts.iter().map(|(part, _)| bytes_of(part)))?)?;
            let pending = self.submit(CopyDirection::From, None, list)?;
            last_use = pending.fence();
            Ok::<_, Error>(arena.device.finish(pending)?.into_iter().next().expect("one staging went in"))
        };
        let words = sum();
        match &words {
            Ok(_) => read_back.into_iter().try_for_each(|memory| arena.discard(memory))?,
            // The copy may still be in flight, so the memory is freed after its fence.
            Err(_) => read_back.into_iter().for_each(|memory| arena.retire(memory, last_use)),
        }
        let words = words?;
        for ((part, number), sum) in parts.iter().zip(sums_in(&words[..sums_len(parts.len())])) {
            sums[*number].combine(&Hasher::new_with_initial_len(sum, part.end - part.start));
        }
        staging.put(words);
        Ok(())
    }

    /// Returns the error for a device that copied wrong bytes to the file, or read wrong bytes from the file.
    pub fn transfer_corrupted(&self) -> Error {
        transfer_corrupted(&self.file.arena.device, "bytes of pages")
    }

    /// Allocates memory into which parts of the file are read back. Returns an empty list if kernels can checksum the
    /// file directly at the same speed because there is no bus, or if there is no room.
    fn read_back_memory(&self, place: Place, len: u64) -> Result<Vec<PageMemory>> {
        let arena = &self.file.arena;
        if !matches!(place, Place::Device(_)) || !arena.device.crosses_bus() {
            return Ok(Vec::new());
        }
        arena.try_scratch(place, len).map(Option::unwrap_or_default)
    }
}

impl Drop for FileTarget {
    fn drop(&mut self) {
        self.file.state.lock().users -= 1;
    }
}
