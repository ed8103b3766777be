//! Floor 4. The image files of an open store: their numbers, and which of them batches name.
//!
//! A snapshot's images are named by its manifest, so what is kept says which of their files stay. A batch's
//! images are named by its frame, and by nothing else until a snapshot takes them over: their file stays as
//! long as the segment that holds the frame.
//!
//! A crash loses what this knows. Recovery takes every file that says that it was written for a batch for one
//! that the newest segment names: it stays longer than it must, never shorter.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::FileName;

use crate::disk::Disk;
use crate::sync::{Mutex, MutexGuard};

/// The numbers of image files and tables, and the files that batches name.
pub(crate) struct ImageFiles {
    disk: Arc<dyn Disk>,
    state: Mutex<State>,
    /// Held while files are looked for and removed. Taken before `state`.
    removals: Mutex<()>,
}

struct State {
    next: u64,
    /// Files written for batches, and the newest segment that may name each; `None` while its batch is not
    /// logged.
    for_batches: BTreeMap<u64, Option<u64>>,
}

impl ImageFiles {
    /// Image files of which `next` is the first number that is free; `for_batches` are those that frames up
    /// to a segment may name.
    pub fn new(disk: Arc<dyn Disk>, next: u64, for_batches: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let for_batches = for_batches.into_iter().map(|(file, segment)| (file, Some(segment))).collect();
        Self { disk, state: Mutex::new(State { next, for_batches }), removals: Mutex::new(()) }
    }

    /// Where they lie.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
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

    /// The batch is logged, in `segment`.
    pub fn logged(&self, file: u64, segment: u64) {
        self.state.lock().for_batches.insert(file, Some(segment));
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

    /// Whether a file was written for a batch that is under way, or in `bound` or a later segment.
    pub fn is_for_batch(&self, file: u64, bound: u64) -> bool {
        let segment = self.state.lock().for_batches.get(&file).copied();
        segment.is_some_and(|segment| segment.is_none_or(|segment| segment >= bound))
    }

    /// Segments below `bound` are no longer kept: what only their frames named may go.
    pub fn recycled(&self, bound: u64) {
        self.state.lock().for_batches.retain(|_, segment| segment.is_none_or(|segment| segment >= bound));
    }
}
