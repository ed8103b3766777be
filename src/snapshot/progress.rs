//! Snapshot progress, for callers that ask while a snapshot is taken. It has its own lock, so that they never
//! wait for a snapshot.

use remanent_format::SnapshotId;

use crate::base::sync::{Condvar, Mutex};
use crate::error::Result;

/// The phase of the snapshot being taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SnapshotPhase {
    /// No snapshot is being taken.
    #[default]
    Idle,
    /// Pages are copied aside and written.
    Gather,
    /// The image files are synced, and a manifest that names them is published.
    Publish,
    /// The snapshot is read back past the cache.
    Verify,
    /// Superseded files are removed or reused.
    Recycle,
}

/// Counts of snapshots since the store was opened, and the progress of the current one.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SnapshotStats {
    /// The phase of the current snapshot.
    pub phase: SnapshotPhase,
    /// Pages gathered so far by the current snapshot, or by the last one if none is running.
    pub pages_done: u64,
    /// Pages that the current or last snapshot gathers in total.
    pub pages_total: u64,
    /// Bytes of the gathered pages, before compression.
    pub bytes_done: u64,
    /// Bytes of the pages to gather, by their lengths when the snapshot began.
    pub bytes_total: u64,
    /// Image files written over spare files since the open.
    pub files_reused: u64,
    /// Bytes of pages that the device copied directly to the memory of image files since the open; see
    /// [`ImageIo::Mapped`](crate::options::ImageIo::Mapped).
    pub bytes_in_place: u64,
    /// Snapshots taken since the open.
    pub taken: u64,
    /// Snapshots that failed since the open.
    pub failed: u64,
    /// The outcome of the last snapshot; `None` before the first one ends.
    pub last: Option<Result<SnapshotId>>,
}

/// The statistics, with a condition variable for callers that wait for a snapshot to end.
#[derive(Default)]
pub(crate) struct SnapshotProgress {
    stats: Mutex<SnapshotStats>,
    ended: Condvar,
}

impl SnapshotProgress {
    pub fn stats(&self) -> SnapshotStats {
        self.stats.lock().clone()
    }

    /// Records that the snapshot enters a phase.
    pub fn enter(&self, phase: SnapshotPhase) {
        self.stats.lock().phase = phase;
    }

    /// Records that a snapshot starts to gather this many pages and bytes.
    pub fn begin(&self, pages: u64, bytes: u64) {
        let mut stats = self.stats.lock();
        stats.phase = SnapshotPhase::Gather;
        (stats.pages_done, stats.pages_total) = (0, pages);
        (stats.bytes_done, stats.bytes_total) = (0, bytes);
    }

    /// Counts image files that were begun over spares.
    pub fn reused(&self, files: u64) {
        self.stats.lock().files_reused += files;
    }

    /// Counts bytes copied directly to image files.
    pub fn copied_in_place(&self, bytes: u64) {
        self.stats.lock().bytes_in_place += bytes;
    }

    /// Counts pages and bytes that were gathered, or were found deleted.
    pub fn gathered(&self, pages: u64, bytes: u64) {
        let mut stats = self.stats.lock();
        stats.pages_done += pages;
        stats.bytes_done += bytes;
    }

    /// Ends the snapshot. The catalog must already contain it, because callers that this wakes look there.
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
