//! Holds a snapshot, so that the log after the last archived batch is retained.

use std::sync::Arc;

use remanent_format::{FileName, Folder, Lsn, SnapshotId};

use crate::disk::{Disk, DiskLock, Hold};
use crate::error::Result;
use crate::snapshot::Snapshots;

/// A lock that retains a snapshot, the log after it, and the images that its batches name.
pub(super) struct LogHold {
    /// Number of the snapshot. Number 0 represents the beginning of the log.
    pub snapshot: SnapshotId,
    _lock: Option<Box<dyn DiskLock>>,
}

/// Replaces `held` with the newest snapshot from which the log leads to batch `archived`, or with the oldest one if
/// `archived` is `None`. `held` is unchanged if there is no newer snapshot or if it cannot be locked. `held` becomes
/// `None` if the log after `archived` is not retained.
pub(super) fn renew(
    disk: &Arc<dyn Disk>,
    snapshots: &Snapshots,
    archived: Option<Lsn>,
    held: &mut Option<LogHold>,
) -> Result<()> {
    let Some(start) = start(snapshots, archived) else {
        *held = None;
        return Ok(());
    };
    if held.as_ref().is_some_and(|held| held.snapshot >= start) {
        return Ok(());
    }
    // The lock fails if the snapshot is being removed, or if the file system does not support locks.
    if let Hold::Held(lock) = disk.hold(start)?
        && exists(disk, start)?
    {
        *held = Some(LogHold { snapshot: start, _lock: Some(lock) });
    }
    Ok(())
}

/// Returns true if the snapshot still exists after it was locked.
fn exists(disk: &Arc<dyn Disk>, snapshot: SnapshotId) -> Result<bool> {
    let name = FileName::Manifest(snapshot.0).name();
    Ok(snapshot == SnapshotId(0) || disk.list(Folder::Snapshots)?.contains(&name))
}

/// Locks the newest verified snapshot, and returns the lock with the snapshot's last batch. On a file system without
/// locks, the returned value retains no files. Returns `None` if no verified snapshot exists or if it is being removed.
pub(super) fn newest(disk: &Arc<dyn Disk>, snapshots: &Snapshots) -> Result<Option<(LogHold, Lsn)>> {
    let latest = snapshots.catalog.latest();
    let kept = latest.catalog.snapshots.values().filter(|kept| kept.info.verified && kept.is_sound);
    let Some(newest) = kept.max_by_key(|kept| kept.info.id) else { return Ok(None) };
    let (snapshot, end) = (newest.info.id, newest.info.end);
    let lock = match disk.hold(snapshot)? {
        Hold::Held(lock) => Some(lock),
        Hold::Impossible => None,
        Hold::Retiring => return Ok(None),
    };
    Ok(exists(disk, snapshot)?.then_some((LogHold { snapshot, _lock: lock }, end)))
}

/// Returns the snapshot to hold, as described for [`renew`]. Number 0 represents the beginning of the log. Returns
/// `None` if the log after batch `archived` is not retained.
fn start(snapshots: &Snapshots, archived: Option<Lsn>) -> Option<SnapshotId> {
    let latest = snapshots.catalog.latest();
    let catalog = &latest.catalog;
    let beginning = catalog.floor.is_none().then_some(SnapshotId(0));
    let kept = catalog.snapshots.values().filter(|kept| catalog.reaches(kept));
    match archived {
        None => beginning.or_else(|| kept.min_by_key(|kept| kept.redo.lsn).map(|kept| kept.info.id)),
        Some(archived) => {
            let suitable = kept.filter(|kept| kept.redo.lsn <= archived);
            suitable.max_by_key(|kept| (kept.redo.lsn, kept.info.id)).map(|kept| kept.info.id).or(beginning)
        }
    }
}
