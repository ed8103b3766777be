//! The snapshot that keeps the log from the first batch that is not archived.

use std::sync::Arc;

use remanent_format::{FileName, Folder, Lsn, SnapshotId};

use crate::disk::{Disk, DiskLock, Hold};
use crate::error::Result;
use crate::snapshot::Snapshots;

/// A held start of replay: the snapshot, the log after it, and the images that its batches name are kept.
pub(super) struct LogHold {
    /// The snapshot; number 0 is the beginning of the log.
    pub snapshot: SnapshotId,
    _lock: Option<Box<dyn DiskLock>>,
}

/// Replaces `held` by the newest start from which the log leads to batch `archived`, or the oldest start if `archived` is
/// `None`. `held` stays if there is no newer start, or if it cannot be held. It becomes `None` if the log after `archived` is
/// not kept.
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
    // The start may be on its way to be removed, or the file system has no locks.
    if let Hold::Held(lock) = disk.hold(start)?
        && exists(disk, start)?
    {
        *held = Some(LogHold { snapshot: start, _lock: Some(lock) });
    }
    Ok(())
}

/// Returns true if a held snapshot was not removed before it was held.
fn exists(disk: &Arc<dyn Disk>, snapshot: SnapshotId) -> Result<bool> {
    let name = FileName::Manifest(snapshot.0).name();
    Ok(snapshot == SnapshotId(0) || disk.list(Folder::Snapshots)?.contains(&name))
}

/// Holds the newest verified snapshot, and returns it with its end. On a file system without locks, nothing keeps its files. Returns `None` if there is
/// no snapshot, or if it is being removed.
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

/// Returns the start to hold; number 0 is the beginning of the log.
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
