//! Progress and statistics of snapshots. They have their own lock, so that a query never waits for a snapshot.

use remanent_format::SnapshotId;

use crate::base::sync::{Condvar, Mutex};
use crate::error::Result;

/// The current phase of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SnapshotPhase {
    /// No snapshot is being taken.
    #[default]
    Idle,
    /// The snapshot copies pages and writes them to image files.
    Gather,
    /// The snapshot syncs the image files and publishes a manifest that names them.
    Publish,
    /// The snapshot is read back, bypassing the page cache.
    Verify,
    /// The files of superseded snapshots are removed, or kept for reuse.
    Recycle,
}

/// Counters of snapshots since the store was opened, and the progress of the current snapshot.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SnapshotStats {
    /// The phase of the current snapshot, or [`SnapshotPhase::Idle`].
    pub phase: SnapshotPhase,
    /// The number of pages that the current snapshot has gathered. If no snapshot is running, the value is that of the
    /// last snapshot.
    pub pages_done: u64,
    /// The number of pages that the current or last snapshot must gather.
    pub pages_total: u64,
    /// The number of bytes in the gathered pages, before compression.
    pub bytes_done: u64,
    /// The total length in bytes of all pages to gather, measured when the snapshot began.
    pub bytes_total: u64,
    /// The number of image files that were written over spare files since the open.
    pub files_reused: u64,
    /// The number of page bytes that the device copied directly to the memory of image files since the open. Only
    /// [`ImageIo::Mapped`](crate::options::ImageIo::Mapped) copies directly.
    pub bytes_in_place: u64,
    /// The number of snapshots taken since the open.
    pub taken: u64,
    /// The number of snapshots that failed since the open.
    pub failed: u64,
    /// The outcome of the last snapshot, or `None` if none has ended.
    pub last: Option<Result<SnapshotId>>,
}

/// The snapshot statistics, and a condition variable that is notified when a snapshot ends.
#[derive(Default)]
pub(crate) struct SnapshotProgress {
    stats: Mutex<SnapshotStats>,
    ended: Condvar,
}

impl SnapshotProgress {
    pub fn stats(&self) -> SnapshotStats {
        self.stats.lock().clone()
    }

    pub fn enter(&self, phase: SnapshotPhase) {
        self.stats.lock().phase = phase;
    }

    /// Records that a snapshot starts to gather `pages` pages with a total length of `bytes` bytes.
    pub fn begin(&self, pages: u64, bytes: u64) {
        let mut stats = self.stats.lock();
        stats.phase = SnapshotPhase::Gather;
        (stats.pages_done, stats.pages_total) = (0, pages);
        (stats.bytes_done, stats.bytes_total) = (0, bytes);
    }

    /// Adds `files` to the number of image files that were written over spare files.
    pub fn reused(&self, files: u64) {
        self.stats.lock().files_reused += files;
    }

    pub fn copied_in_place(&self, bytes: u64) {
        self.stats.lock().bytes_in_place += bytes;
    }

    /// Counts pages and bytes that were gathered or found deleted.
    pub fn gathered(&self, pages: u64, bytes: u64) {
        let mut stats = self.stats.lock();
        stats.pages_done += pages;
        stats.bytes_done += bytes;
    }

    /// Records the end of the snapshot. The catalog must already contain the snapshot, because this call wakes callers
    /// that look up the snapshot.
    pub fn end(&self, result: Result<SnapshotId>) {
        let mut stats = self.stats.lock();
        stats.phase = SnapshotPhase::Idle;
        *if result.is_ok() { &mut stats.taken } else { &mut stats.failed } += 1;
        stats.last = Some(result);
        drop(stats);
        self.ended.notify_all();
    }

    /// Waits until `count` snapshots have ended, successfully or not.
    pub fn wait_ended(&self, count: u64) {
        let mut stats = self.stats.lock();
        while stats.taken + stats.failed < count {
            self.ended.wait(&mut stats);
        }
    }
}
