//! The image files of an open store: their numbers, and which of them batches name.
//!
//! A snapshot's manifest names the snapshot's images, so the kept manifests say which of their files stay. A
//! batch's frame names the batch's images, and nothing else does until a snapshot takes them over. Their file
//! stays while replay may start before the frame, that is, while the frame's Lsn is above the floor. The
//! segment in which the frame lies does not matter.
//!
//! A crash loses this list. Recovery reads it from the frames that it replays. It takes other files of
//! batches for files that the newest possible batch names (`ahead_from` in manifests). So they stay longer
//! than they must, never shorter.

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
    /// Files that are free, for images to come.
    spares: Arc<ImageSpares>,
    /// The pages that are read from image files.
    disk_pages: Arc<DiskPages>,
    state: Mutex<NumberState>,
    /// The first number of this run of the store.
    first: u64,
    /// Held while files are looked for and removed. Taken before `state`.
    removals: Mutex<()>,
}

struct NumberState {
    next: u64,
    /// Files written for batches, each with the newest batch that may name it; `None` while its batch is not
    /// logged.
    for_batches: BTreeMap<u64, Option<Lsn>>,
}

impl ImageFiles {
    /// Makes the list of image files. `next` is the first free number; `for_batches` are the files that
    /// frames up to a batch may name.
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

    /// The disk on which the files lie.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// The files that are free, for images to come.
    pub fn spares(&self) -> &Arc<ImageSpares> {
        &self.spares
    }

    /// The number that is taken next.
    pub fn next_number(&self) -> u64 {
        self.state.lock().next
    }

    /// Takes a number for an image file or a table. It stays taken, whatever happens: a name never stands for
    /// two contents.
    pub fn take_number(&self) -> u64 {
        self.take_numbers(1).start
    }

    /// Takes `count` numbers that follow each other.
    pub fn take_numbers(&self, count: u64) -> Range<u64> {
        let mut state = self.state.lock();
        let first = state.next;
        state.next += count;
        first..state.next
    }

    /// Takes numbers for `count` files that are written for a batch. They stay while the batch is under way.
    pub fn begin_for_batch(&self, count: u64) -> Range<u64> {
        let mut state = self.state.lock();
        let numbers = state.next..state.next + count;
        state.next = numbers.end;
        for number in numbers.clone() {
            let before = state.for_batches.insert(number, None);
            assert!(before.is_none()); // I8: a number names one file, or the old one's end takes the new one.
        }
        numbers
    }

    /// Notes that batch `lsn`, which names the file, is logged.
    pub fn logged(&self, file: u64, lsn: Lsn) {
        let before = self.state.lock().for_batches.insert(file, Some(lsn));
        assert!(before == Some(None)); // I8: the file was kept since it got its number.
    }

    /// The first number of this run of the store: this run made the files from there on.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// A number below which every batch's file belongs to a logged batch up to `redo`. It is for the manifest
    /// of a snapshot that begins at `redo`. The caller knows `redo` before it asks, so a batch that takes a
    /// number later is above it.
    pub fn ahead_from(&self, redo: Lsn) -> u64 {
        let state = self.state.lock();
        let mut ahead = state.for_batches.iter().filter(|(_, lsn)| lsn.is_none_or(|lsn| lsn > redo));
        ahead.next().map_or(state.next, |(file, _)| *file)
    }

    /// Forgets a file that was not made after all.
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

    /// Keeps every file of a batch until the guard is dropped: a caller that has found one will find it
    /// again.
    pub fn block_removals(&self) -> MutexGuard<'_, ()> {
        self.removals.lock()
    }

    /// Whether a page on disk has its bytes in a file.
    pub fn is_read_from(&self, file: u64) -> bool {
        self.disk_pages.uses_file(file)
    }

    /// Whether a file was written for a batch that is under way, or is above `floor`.
    pub fn is_for_batch(&self, file: u64, floor: Lsn) -> bool {
        let lsn = self.state.lock().for_batches.get(&file).copied();
        lsn.is_some_and(|lsn| lsn.is_none_or(|lsn| lsn > floor))
    }

    /// Notes that nothing is replayed from below `floor` any more: files that only batches up to there name
    /// may go.
    pub fn recycled(&self, floor: Lsn) {
        self.state.lock().for_batches.retain(|_, lsn| lsn.is_none_or(|lsn| lsn > floor));
    }
}
