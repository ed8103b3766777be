//! How far a snapshot has come, for callers that ask while it is taken. Its own lock, so that they wait
//! for no snapshot.

use remanent_format::SnapshotId;

use crate::base::sync::{Condvar, Mutex};
use crate::error::Result;

/// The stage that a snapshot has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SnapshotPhase {
    /// No snapshot is being taken.
    #[default]
    Idle,
    /// Pages are copied aside and written.
    Gather,
    /// The image files are synced, and a manifest names them.
    Publish,
    /// It is read back past the cache.
    Verify,
    /// Files that it makes superfluous are removed or reused.
    Recycle,
}

/// Counts of snapshots since the store was opened, and how far the one being taken has come.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SnapshotStats {
    /// The stage of the snapshot that is being taken.
    pub phase: SnapshotPhase,
    /// Pages gathered, of those that this snapshot, or the last one, writes.
    pub pages_done: u64,
    /// Pages that this snapshot, or the last one, writes.
    pub pages_total: u64,
    /// Bytes of the pages gathered, before compression.
    pub bytes_done: u64,
    /// Bytes of the pages to gather, as long as they were when it began.
    pub bytes_total: u64,
    /// Image files that were written over files which nothing needed any more, since the open.
    pub files_reused: u64,
    /// Bytes of pages that the device copied straight to the memory of image files, since the open; see
    /// [`ImageIo::Mapped`](crate::ImageIo::Mapped).
    pub bytes_in_place: u64,
    /// Snapshots taken since the open.
    pub taken: u64,
    /// Snapshots that failed since the open.
    pub failed: u64,
    /// The outcome of the last one; `None` if there was none.
    pub last: Option<Result<SnapshotId>>,
}

/// The figures, and the callers that wait for an end.
#[derive(Default)]
pub(crate) struct SnapshotProgress {
    stats: Mutex<SnapshotStats>,
    ended: Condvar,
}

impl SnapshotProgress {
    pub fn stats(&self) -> SnapshotStats {
        self.stats.lock().clone()
    }

    /// A snapshot goes on to this phase.
    pub fn enter(&self, phase: SnapshotPhase) {
        self.stats.lock().phase = phase;
    }

    /// A snapshot of this number of pages and bytes begins to gather.
    pub fn begin(&self, pages: u64, bytes: u64) {
        let mut stats = self.stats.lock();
        stats.phase = SnapshotPhase::Gather;
        (stats.pages_done, stats.pages_total) = (0, pages);
        (stats.bytes_done, stats.bytes_total) = (0, bytes);
    }

    /// That many image files were begun over spares.
    pub fn reused(&self, files: u64) {
        self.stats.lock().files_reused += files;
    }

    /// That many bytes were copied straight to image files.
    pub fn copied_in_place(&self, bytes: u64) {
        self.stats.lock().bytes_in_place += bytes;
    }

    /// That many more were gathered, or were gone.
    pub fn gathered(&self, pages: u64, bytes: u64) {
        let mut stats = self.stats.lock();
        stats.pages_done += pages;
        stats.bytes_done += bytes;
    }

    /// Ends the snapshot. The catalog knows it by now: a caller that this wakes looks there.
    pub fn end(&self, result: Result<SnapshotId>) {
        let mut stats = self.stats.lock();
        stats.phase = SnapshotPhase::Idle;
        *if result.is_ok() { &mut stats.taken } else { &mut stats.failed } += 1;
        stats.last = Some(result);
        drop(stats);
        self.ended.notify_all();
    }

    /// Waits until `count` snapshots have ended, well or not.
    pub fn wait_ended(&self, count: u64) {
        let mut stats = self.stats.lock();
        while stats.taken + stats.failed < count {
            self.ended.wait(&mut stats);
        }
    }
}
