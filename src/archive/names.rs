//! Archives named snapshots, and removes them from the archive when their names are given up.

use std::io;

use remanent_archive::Error as Failure;
use remanent_archive::directory::NameChanges;
use remanent_format::SnapshotId;

use super::failures::error_of;
use super::uploader::Uploader;
use crate::base::sync::Instant;
use crate::catalog::{Catalog, RetainedSnapshot};
use crate::disk::Hold;

/// Number of failed attempts after which a named snapshot that cannot be read is skipped.
const READ_ATTEMPTS: u32 = 3;

impl Uploader<'_> {
    /// Determines which named snapshots both the directory and the archive contain. Called after a fence was created.
    pub(super) fn begin_names(&mut self) -> Result<(), Failure> {
        // The directory may be an older copy that lacks snapshots of the archive. It must not reuse their numbers.
        let newest = self.line.catalog().last().map_or(SnapshotId(0), |kept| kept.snapshot);
        if self.snapshots.catalog.latest().catalog.next_snapshot <= newest.0 {
            let mut catalog = self.snapshots.catalog.lock();
            catalog.next_snapshot = catalog.next_snapshot.max(newest.0 + 1);
        }
        let common = self.name_changes().common;
        self.progress.set_named(common.iter().copied());
        if self.has_lost_snapshots {
            // Recorded, because a later open does not detect the loss, and would treat the names of the lost snapshots
            // as given up.
            self.directory.record_names(self.line.catalog(), &common, true)?;
        }
        Ok(())
    }

    /// Returns the differences between the named snapshots of the directory and of the archive.
    fn name_changes(&self) -> NameChanges {
        let latest = self.snapshots.catalog.latest();
        let catalog = &latest.catalog;
        let is_complete = !self.has_lost_snapshots && catalog.unread.is_none();
        self.directory.name_changes_of(self.line.catalog(), is_complete, |kept| {
            let found = catalog.snapshots.get(&kept.snapshot);
            found.is_some_and(|found| found.info.name.as_ref() == Some(&kept.name))
        })
    }

    /// Archives the named snapshots that the archive lacks, and removes the snapshots whose names were given up from
    /// it.
    pub(super) fn archive_names(&mut self) -> Result<(), Failure> {
        let mut given_up = self.name_changes().given_up;
        while let Some(snapshot) = self.next_named() {
            let result = self.archive_named(snapshot, &given_up);
            match &result {
                Ok(true) => {
                    self.record_names()?;
                    given_up = self.name_changes().given_up;
                }
                // The snapshot is being removed, or the store is closing.
                Ok(false) => break,
                Err(Failure::Local(_)) if !self.is_last_attempt(snapshot) => {}
                Err(failure @ (Failure::Local(_) | Failure::TooLarge { .. } | Failure::NotNewer { .. })) => {
                    self.note_failure(failure);
                    self.progress.refuse_named(snapshot, error_of(&self.options.url, failure));
                    continue;
                }
                Err(_) => {}
            }
            result?;
        }
        if !given_up.is_empty() {
            let append = self.line.append_catalog(&self.directory, &given_up, None);
            if let Some(appended) = self.bucket.block_on(append)? {
                tracing::info!(?given_up, "removed named snapshots from the archive");
                self.note(&appended);
            }
        }
        // Also records snapshots that an earlier process archived but did not record.
        self.record_names()
    }

    /// Counts a failed attempt to archive a named snapshot. Returns true if it was the last attempt.
    fn is_last_attempt(&mut self, snapshot: SnapshotId) -> bool {
        let attempts = self.failed_names.entry(snapshot).or_default();
        *attempts += 1;
        *attempts >= READ_ATTEMPTS
    }

    fn record_names(&mut self) -> Result<(), Failure> {
        let common = self.name_changes().common;
        self.progress.set_named(common.iter().copied());
        Ok(self.directory.record_names(self.line.catalog(), &common, false)?)
    }

    /// Returns the oldest named snapshot that the archive lacks. Returns `None` if there is none, or if the snapshot
    /// cannot be archived yet: its batches are not archived, or it is not verified. The thread is woken when either
    /// condition changes.
    fn next_named(&self) -> Option<SnapshotId> {
        if self.lacks_parts() {
            return None;
        }
        let latest = self.snapshots.catalog.latest();
        let kept = oldest_after(&latest.catalog, |id| {
            let is_archived = self.line.catalog().iter().any(|kept| kept.snapshot == id);
            !is_archived && !self.progress.is_refused(id)
        })?;
        let is_ready = kept.info.verified && kept.info.end <= self.line.archived().lsn;
        is_ready.then_some(kept.info.id)
    }

    /// Archives a named snapshot, and removes the snapshots in `given_up` from the archive. Appends runs between
    /// uploads, so that batches do not wait for a large snapshot. Returns false if the snapshot is being removed, or if
    /// the time limit of a close has passed.
    fn archive_named(&mut self, snapshot: SnapshotId, given_up: &[SnapshotId]) -> Result<bool, Failure> {
        let _lock = match self.engine.disk.hold(snapshot).map_err(io::Error::other)? {
            Hold::Held(lock) => Some(lock),
            Hold::Impossible => None,
            Hold::Retiring => return Ok(false),
        };
        if !self.snapshots.catalog.latest().catalog.snapshots.contains_key(&snapshot) {
            return Ok(false); // The snapshot was removed before it was locked.
        }
        let (mut named, pieces) = self.directory.named_snapshot(snapshot)?;
        let late_at = self.late_at;
        let is_late = || late_at.is_some_and(|late_at| Instant::now() >= late_at);
        let Some(parts) = self.upload(&pieces, is_late)? else { return Ok(false) };
        named.parts = parts;
        // The snapshot is recorded first, because its name may be given up before the outcome of the append is known.
        self.directory.record_name_ahead(snapshot)?;
        let append = self.line.append_catalog(&self.directory, given_up, Some(&named));
        if let Some(appended) = self.bucket.block_on(append)? {
            self.note(&appended);
        }
        tracing::info!(%snapshot, name = named.name, "archived a named snapshot");
        Ok(true)
    }
}

/// Returns the oldest intact and exact named snapshot for which `is_new` returns true. Only stores of very early
/// versions contain named snapshots that are not exact.
fn oldest_after(catalog: &Catalog, is_new: impl Fn(SnapshotId) -> bool) -> Option<&RetainedSnapshot> {
    catalog.snapshots.values().find(|kept| {
        let info = &kept.info;
        info.name.is_some() && kept.is_sound && info.redo == info.end && is_new(info.id)
    })
}
