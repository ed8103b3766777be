//! The image files of an open store: their numbers, and which of them batches name.
//!
//! A snapshot's manifest names the snapshot's images, so the kept manifests determine which of their files
//! are kept. A batch's images are named only by the batch's frame, until a snapshot takes them over. Their
//! file is kept while replay may start before the frame, that is, while the frame's Lsn is above the floor,
//! regardless of the frame's segment.
//!
//! A crash loses this list. Recovery rebuilds it from the frames that it replays. For other files of batches
//! it assumes that the newest possible batch names them (`ahead_from` in manifests), so they are kept longer
//! than needed, but never too short.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::{FileName, Lsn};

use crate::base::sync::{Mutex, MutexGuard};
use crate::disk::Disk;
use crate::disk::image_spares::ImageSpares;
use crate::images::disk_pages::DiskPages;

/// The numbers of image files and tables, and the files that batches name.
pub(crate) struct ImageFiles {
    disk: Arc<dyn Disk>,
    /// Free files, for future images.
    spares: Arc<ImageSpares>,
    /// The pages that are read from image files.
    disk_pages: Arc<DiskPages>,
    state: Mutex<NumberState>,
    /// The first number of this run of the store.
    first: u64,
    /// Held while files are listed and removed. Taken before `state`.
    removals: Mutex<()>,
}

struct NumberState {
    next: u64,
    /// Files written for batches, each with the newest batch that may name it; `None` while its batch is not
    /// logged.
    for_batches: BTreeMap<u64, Option<Lsn>>,
}

impl ImageFiles {
    /// Creates the list of image files. `next` is the first free number; `for_batches` are the files that
    /// existing frames may name, each with the newest batch that may.
    pub fn new(
        disk: Arc<dyn Disk>,
        spares: Arc<ImageSpares>,
        disk_pages: Arc<DiskPages>,
        next: u64,
        for_batches: impl IntoIterator<Item = (u64, Lsn)>,
    ) -> Self {
        let for_batches = for_batches.into_iter().map(|(file, lsn)| (file, Some(lsn))).collect();
        let state = Mutex::new(NumberState { next, for_batches });
        Self { disk, spares, disk_pages, state, first: next, removals: Mutex::new(()) }
    }

    /// Returns the disk that contains the files.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// Returns the free files, for future images.
    pub fn spares(&self) -> &Arc<ImageSpares> {
        &self.spares
    }

    /// Returns the next number to be taken.
    pub fn next_number(&self) -> u64 {
        self.state.lock().next
    }

    /// Takes a number for an image file or a table. It stays used up in any case: a file name is never used
    /// for two contents.
    pub fn take_number(&self) -> u64 {
        self.take_numbers(1).start
    }

    /// Takes `count` consecutive numbers.
    pub fn take_numbers(&self, count: u64) -> Range<u64> {
        let mut state = self.state.lock();
        let first = state.next;
        state.next += count;
        first..state.next
    }

    /// Takes numbers for `count` files that are written for a batch. The files are kept while the batch is in
    /// progress.
    pub fn begin_for_batch(&self, count: u64) -> Range<u64> {
        let mut state = self.state.lock();
        let numbers = state.next..state.next + count;
        state.next = numbers.end;
        for number in numbers.clone() {
            let before = state.for_batches.insert(number, None);
            assert!(before.is_none()); // I8: or removing the old file would take the new one.
        }
        numbers
    }

    /// Records that batch `lsn`, which names the file, is logged.
    pub fn logged(&self, file: u64, lsn: Lsn) {
        let before = self.state.lock().for_batches.insert(file, Some(lsn));
        assert!(before == Some(None)); // I8: the file was kept since it got its number.
    }

    /// Returns the first number of this run of the store: this run created the files from that number on.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Returns a number below which every batch's file belongs to a logged batch up to `redo`, for the
    /// manifest of a snapshot that begins at `redo`. The caller knows `redo` before it asks, so a batch that
    /// takes a number later is above it.
    pub fn ahead_from(&self, redo: Lsn) -> u64 {
        let state = self.state.lock();
        let mut ahead = state.for_batches.iter().filter(|(_, lsn)| lsn.is_none_or(|lsn| lsn > redo));
        ahead.next().map_or(state.next, |(file, _)| *file)
    }

    /// Drops a file that was not created after all.
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

    /// Keeps every file of a batch until the guard is dropped, so that a file found by the caller stays.
    pub fn block_removals(&self) -> MutexGuard<'_, ()> {
        self.removals.lock()
    }

    /// Whether a page on disk is read from a file.
    pub fn is_read_from(&self, file: u64) -> bool {
        self.disk_pages.uses_file(file)
    }

    /// Whether a file was written for a batch that is in progress or above `floor`.
    pub fn is_for_batch(&self, file: u64, floor: Lsn) -> bool {
        let lsn = self.state.lock().for_batches.get(&file).copied();
        lsn.is_some_and(|lsn| lsn.is_none_or(|lsn| lsn > floor))
    }

    /// Records that replay no longer starts below `floor`: files that only batches up to there name may be
    /// removed.
    pub fn recycled(&self, floor: Lsn) {
        self.state.lock().for_batches.retain(|_, lsn| lsn.is_none_or(|lsn| lsn > floor));
    }
}
