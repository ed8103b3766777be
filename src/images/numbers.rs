//! The image files of an open store: their numbers, and which of them batches name.
//!
//! A snapshot's images are named by its manifest, so what is kept says which of their files stay. A batch's
//! images are named by its frame, and by nothing else until a snapshot takes them over: their file stays while
//! replay may start before the frame, which is to say, while the frame's Lsn is above the floor. Which segment the
//! frame lies in does not matter.
//!
//! A crash loses what this knows. Recovery reads it from the frames that it replays, and takes other files of
//! batches for such as the newest batch names that they can be of (`ahead_from` in manifests): they stay longer than
//! they must, never shorter.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::{FileName, Lsn};

use crate::base::sync::{Mutex, MutexGuard};
use crate::disk::Disk;

/// The numbers of image files and tables, and the files that batches name.
pub(crate) struct ImageFiles {
    disk: Arc<dyn Disk>,
    state: Mutex<NumberState>,
    /// The first number of this run of the store.
    first: u64,
    /// Held while files are looked for and removed. Taken before `state`.
    removals: Mutex<()>,
}

struct NumberState {
    next: u64,
    /// Files written for batches, and the newest batch that may name each; `None` while its batch is not
    /// logged.
    for_batches: BTreeMap<u64, Option<Lsn>>,
}

impl ImageFiles {
    /// Image files of which `next` is the first number that is free; `for_batches` are those that frames up
    /// to a batch may name.
    pub fn new(disk: Arc<dyn Disk>, next: u64, for_batches: impl IntoIterator<Item = (u64, Lsn)>) -> Self {
        let for_batches = for_batches.into_iter().map(|(file, lsn)| (file, Some(lsn))).collect();
        let state = Mutex::new(NumberState { next, for_batches });
        Self { disk, state, first: next, removals: Mutex::new(()) }
    }

    /// Where they lie.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// The number that is taken next.
    pub fn next_number(&self) -> u64 {
        self.state.lock().next
    }

    /// A number for an image file or a table. It is taken, whatever happens: a name is never used for two
    /// contents.
    pub fn take_number(&self) -> u64 {
        self.take_numbers(1).start
    }

    /// So many of them, one behind the other.
    pub fn take_numbers(&self, count: u64) -> Range<u64> {
        let mut state = self.state.lock();
        let first = state.next;
        state.next += count;
        first..state.next
    }

    /// A number for a file that is written for a batch, which stays while the batch is under way.
    pub fn begin_for_batch(&self) -> u64 {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.for_batches.insert(number, None);
        number
    }

    /// Batch `lsn`, which names the file, is logged.
    pub fn logged(&self, file: u64, lsn: Lsn) {
        self.state.lock().for_batches.insert(file, Some(lsn));
    }

    /// The first number of this run of the store: files from there on were made by it.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// A number below which no file is that of a batch which is under way, or above `redo`: for the manifest of a
    /// snapshot that begins there. Taken once `redo` is known: a batch that takes its number later is above it.
    pub fn ahead_from(&self, redo: Lsn) -> u64 {
        let state = self.state.lock();
        let mut ahead = state.for_batches.iter().filter(|(_, lsn)| lsn.is_none_or(|lsn| lsn > redo));
        ahead.next().map_or(state.next, |(file, _)| *file)
    }

    /// A file was not made after all.
    pub fn forget(&self, file: u64) {
        let _none_is_looked_for = self.removals.lock();
        self.state.lock().for_batches.remove(&file);
    }

    /// Removes a file whose batch was not logged.
    pub fn abandon(&self, file: u64) {
        let _none_is_looked_for = self.removals.lock();
        self.state.lock().for_batches.remove(&file);
        if let Err(error) = self.disk.remove(FileName::Pages(file)) {
            tracing::warn!(%error, "cannot remove images of a batch that was not logged");
        }
    }

    /// While this is held no file of a batch goes: who has found one will find it again.
    pub fn hold_removals(&self) -> MutexGuard<'_, ()> {
        self.removals.lock()
    }

    /// Whether a file was written for a batch that is under way, or above `floor`.
    pub fn is_for_batch(&self, file: u64, floor: Lsn) -> bool {
        let lsn = self.state.lock().for_batches.get(&file).copied();
        lsn.is_some_and(|lsn| lsn.is_none_or(|lsn| lsn > floor))
    }

    /// Nothing is replayed from below `floor` any more: what only batches up to there named may go.
    pub fn recycled(&self, floor: Lsn) {
        self.state.lock().for_batches.retain(|_, lsn| lsn.is_none_or(|lsn| lsn > floor));
    }
}
