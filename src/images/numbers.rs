//! The image files of an open store: their numbers, and the files that were written for batches.
//!
//! A snapshot's manifest names the snapshot's images, so the kept manifests determine which of their files are kept.
//! Until a snapshot names a batch's images, only the batch's frame names them. Their file is kept while replay may
//! start before the frame, that is, while the frame's Lsn is above the floor, regardless of the frame's segment.
//!
//! A crash loses this list. Recovery rebuilds it from the frames that it replays. For each other file that was written
//! for a batch, recovery assumes the newest batch that could name it (`ahead_from` in manifests). Such a file may be
//! kept longer than needed, but is never removed too early.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::{FileName, Lsn};

use crate::base::sync::{Mutex, MutexGuard, Rank};
use crate::disk::Disk;
use crate::disk::image_spares::ImageSpares;
use crate::images::disk_pages::DiskPages;

/// Assigns the numbers of image files and tables, and tracks the image files that batches name.
pub(crate) struct ImageFiles {
    disk: Arc<dyn Disk>,
    /// The spare files for future images.
    spares: Arc<ImageSpares>,
    /// The pages on disk. Their images must not be removed.
    disk_pages: Arc<DiskPages>,
    state: Mutex<NumberState>,
    /// The first number that can be assigned since this open.
    first: u64,
    /// A lock that is held while files are listed and removed. This lock is acquired before `state`.
    removals: Mutex<()>,
}

struct NumberState {
    next: u64,
    /// The files that were written for batches, by number. The value is the newest batch that may name the file, or
    /// `None` while the batch is not logged.
    for_batches: BTreeMap<u64, Option<Lsn>>,
}

impl ImageFiles {
    /// Creates the list of image files. `next` is the first free number. `for_batches` contains the files that existing
    /// frames may name, each with the newest batch that may name the file.
    pub fn new(
        disk: Arc<dyn Disk>,
        spares: Arc<ImageSpares>,
        disk_pages: Arc<DiskPages>,
        next: u64,
        for_batches: impl IntoIterator<Item = (u64, Lsn)>,
    ) -> Self {
        let for_batches = for_batches.into_iter().map(|(file, lsn)| (file, Some(lsn))).collect();
        let state = Mutex::of_rank(Rank::IMAGE_NUMBERS, NumberState { next, for_batches });
        Self {
            disk,
            spares,
            disk_pages,
            state,
            first: next,
            removals: Mutex::of_rank(Rank::IMAGE_REMOVALS, ()),
        }
    }

    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    pub fn spares(&self) -> &Arc<ImageSpares> {
        &self.spares
    }

    /// Returns the number of the next file, without assigning the number.
    pub fn next_number(&self) -> u64 {
        self.state.lock().next
    }

    /// Assigns a number for an image file or a table. The number is never assigned again, even if no file is created,
    /// so that a file name never has two contents.
    pub fn take_number(&self) -> u64 {
        self.take_numbers(1).start
    }

    /// Assigns `count` consecutive numbers, like [`take_number`](Self::take_number).
    pub fn take_numbers(&self, count: u64) -> Range<u64> {
        let mut state = self.state.lock();
        let first = state.next;
        state.next += count;
        first..state.next
    }

    /// Assigns numbers for `count` files that are written for a batch. The files are not removed while the batch is in
    /// progress.
    pub fn begin_for_batch(&self, count: u64) -> Range<u64> {
        let mut state = self.state.lock();
        let numbers = state.next..state.next + count;
        state.next = numbers.end;
        for number in numbers.clone() {
            let before = state.for_batches.insert(number, None);
            assert!(before.is_none()); // I8: otherwise removing the old file would remove the new one.
        }
        numbers
    }

    /// Records that the log contains batch `lsn`, which names image file `file`.
    pub fn logged(&self, file: u64, lsn: Lsn) {
        let before = self.state.lock().for_batches.insert(file, Some(lsn));
        assert!(before == Some(None)); // I8: the file was kept since its number was assigned.
    }

    /// Returns the first number that can be assigned since this open. Every file with this number or a greater number
    /// was created since this open.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Returns a file number for the manifest of a snapshot that begins at `redo`. Each file with a lower number that
    /// was written for a batch belongs to a logged batch up to `redo`. The caller must determine `redo` before the
    /// call, so that every batch that gets a number later is above `redo`.
    pub fn ahead_from(&self, redo: Lsn) -> u64 {
        let state = self.state.lock();
        let mut ahead = state.for_batches.iter().filter(|(_, lsn)| lsn.is_none_or(|lsn| lsn > redo));
        ahead.next().map_or(state.next, |(file, _)| *file)
    }

    /// Removes `file` from the list of batches' files, because the file was never created.
    pub fn forget(&self, file: u64) {
        let _none_is_looked_for = self.removals.lock();
        self.state.lock().for_batches.remove(&file);
    }

    /// Removes `file` from the list and from the disk. The file's batch must not have been logged.
    pub fn abandon(&self, file: u64) {
        let _none_is_looked_for = self.removals.lock();
        self.state.lock().for_batches.remove(&file);
        if let Err(error) = self.disk.remove(FileName::Pages(file)) {
            tracing::warn!(%error, "cannot remove images of a batch that was not logged");
        }
    }

    /// Prevents the removal of any batch's file until the guard is dropped, so that files that the caller has found
    /// remain.
    pub fn block_removals(&self) -> MutexGuard<'_, ()> {
        self.removals.lock()
    }

    /// Returns whether a page on disk uses an image in `file`.
    pub fn is_read_from(&self, file: u64) -> bool {
        self.disk_pages.uses_file(file)
    }

    /// Returns whether `file` was written for a batch that is in progress or above `floor`.
    pub fn is_for_batch(&self, file: u64, floor: Lsn) -> bool {
        let lsn = self.state.lock().for_batches.get(&file).copied();
        lsn.is_some_and(|lsn| lsn.is_none_or(|lsn| lsn > floor))
    }

    /// Records that replay no longer starts below batch `floor`. Files that only batches up to `floor` name may then be
    /// removed.
    pub fn recycled(&self, floor: Lsn) {
        self.state.lock().for_batches.retain(|_, lsn| lsn.is_none_or(|lsn| lsn > floor));
    }
}
