//! Takes snapshots, applies retention, and restores earlier states.

use std::sync::Arc;
use std::time::Duration;

use remanent_format::limits::SNAPSHOT_NAME_LEN_MAX;
use remanent_format::{FileName, Lsn, Position, SnapshotId};

use super::{Store, StoreParts};
use crate::base::sync::Instant;
use crate::catalog::{Catalog, RetainedSnapshot, SnapshotInfo};
use crate::disk::Disk;
use crate::engine::Engine;
use crate::error::{ArchiveError, Error, NoSuchState, Result, Taken};
use crate::history::point::StatePoint;
use crate::history::restore::RestoreRun;
use crate::options::{Retention, SnapshotOptions};
use crate::recovery::{OpenPreview, SurveyedStore};
use crate::snapshot::{AfterPublication, PROVERS_MAX, PruneReport, RetentionContext, SnapshotRequest};

impl Store {
    /// Takes a snapshot while commits continue, verifies the snapshot, and removes data that retention no longer keeps.
    ///
    /// The snapshot writes the pages that changed since the previous snapshot, and shares the images of all other pages
    /// with that snapshot. Snapshots run one at a time, and a second caller waits. If a rate-limited background
    /// snapshot is in progress, it first completes at full speed.
    ///
    /// If less than half of an image file is still in use, the snapshot also rewrites the file's remaining images, so
    /// that the file can be removed. The snapshot rewrites at most as many bytes as the changed pages have, or 4 MiB if
    /// that is more.
    ///
    /// On a full disk, the space of deleted pages is freed first, as far as retention permits. For this, the newest
    /// snapshot is replaced by a *thin* snapshot, which has the same start, records the deleted pages, and writes no
    /// images. Then the snapshot is attempted once more.
    ///
    /// # Errors
    /// These leave the store unchanged: [`Error::DiskFull`]; [`Error::Io`] if the system is short of open files, memory
    /// or threads; [`Error::OutOfMemory`]; and [`Error::Damaged`] if a page on disk cannot be read from its image. Any
    /// other failure poisons the store. If only the resources for reading the snapshot back are missing, the snapshot
    /// remains valid but not `verified`, and the next snapshot verifies it.
    pub fn snapshot(&self) -> Result<SnapshotInfo> {
        self.check_process()?;
        self.snapshot_with(SnapshotOptions::new())
    }

    /// Takes a snapshot like [`Store::snapshot`], with options. [`SnapshotOptions`] can name the snapshot, make it
    /// exact, or return before it is verified.
    ///
    /// # Errors
    /// These leave the store unchanged: [`Error::Taken`]; [`Error::Limit`] for an empty name or a name of more than 64
    /// bytes; [`Error::OverBudget`] and [`Error::OutOfMemory`] if an exact snapshot has no room for copies of pages.
    /// Otherwise the same as [`Store::snapshot`].
    pub fn snapshot_with(&self, options: impl Into<SnapshotOptions>) -> Result<SnapshotInfo> {
        self.check_process()?;
        let SnapshotOptions { name, exact, only_published } = options.into();
        let snapshots = &self.parts.snapshots;
        let exact = exact || name.is_some();
        let then = if only_published { AfterPublication::Leave } else { AfterPublication::Retain };
        let request = SnapshotRequest { name, exact, then, ..SnapshotRequest::default() };
        if let Some(name) = &request.name {
            let (found, limit) = (name.len() as u64, SNAPSHOT_NAME_LEN_MAX as u64);
            if !(1..=limit).contains(&found) {
                return Err(Error::Limit { what: "snapshot name length", found, limit });
            }
        }
        let mut catalog = snapshots.catalog.lock();
        let holder = |kept: &&RetainedSnapshot| kept.info.name.is_some() && kept.info.name == request.name;
        if let Some(holder) = catalog.snapshots.values().find(holder) {
            let name = request.name.unwrap_or_default();
            return Err(Error::Taken(Taken::Name { name, snapshot: holder.info.id }));
        }
        let taken = snapshots.take(&mut catalog, &request);
        drop(catalog);
        if only_published && taken.is_ok() {
            snapshots.attend_later();
        }
        self.in_store(taken)
    }

    /// Verifies the images that long batches have written since the last snapshot, and returns the number of page bytes
    /// read back.
    ///
    /// These images contain new pages, and pages on disk that were overwritten completely. The next snapshot must
    /// verify them before it can use them. After many long batches, a separate thread can call this function to do that
    /// work earlier. The function uses two threads for reading, and snapshots wait until it returns.
    ///
    /// Damaged images are not reported here. The next snapshot writes the page of a damaged image again, or fails if
    /// the page cannot be read.
    ///
    /// ```
    /// # use remanent::{Place, Store, WriteBatch};
    /// # let directory = tempfile::tempdir()?;
    /// # let store = Store::open(directory.path())?;
    /// let mut batch = WriteBatch::default();
    /// batch.create_from(vec![7; 20 << 20], Place::Disk);
    /// store.commit(batch)?;
    /// assert_eq!(store.verify_pending_images()?, 20 << 20);
    /// assert_eq!(store.verify_pending_images()?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], which leaves the store unchanged.
    pub fn verify_pending_images(&self) -> Result<u64> {
        self.check_process()?;
        let snapshots = &self.parts.snapshots;
        snapshots.verify_pending_images(&snapshots.catalog.lock(), PROVERS_MAX)
    }

    /// Waits until all published snapshots are verified, and the data that these snapshots replace has been removed.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if a snapshot on the medium differs from what was written, or if the store has failed
    /// otherwise.
    pub fn wait_verified(&self) -> Result<()> {
        self.check_process()?;
        let snapshots = &self.parts.snapshots;
        self.engine().poison.check()?;
        let mut catalog = snapshots.catalog.lock();
        if catalog.snapshots.values().all(|kept| kept.info.verified) {
            return Ok(());
        }
        self.in_store(snapshots.finish(&mut catalog))
    }

    /// Waits until the archive keeps a named snapshot, or until `timeout` has passed. Returns whether the archive
    /// keeps it. Named snapshots are archived in the order in which they were taken, once they are verified. From
    /// then on, a store that is restored from the archive contains the snapshot, until its name is given up.
    ///
    /// # Errors
    /// [`Error::NoSuchState`] if there is no such snapshot, or no longer, and [`Error::Archive`] if the snapshot has
    /// no name or cannot be archived, the store has no archive, or the archive has ended.
    pub fn wait_archived(&self, snapshot: SnapshotId, timeout: Option<Duration>) -> Result<bool> {
        self.check_process()?;
        let archive = self.engine().archive()?;
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let has_name = || {
            let latest = self.parts.snapshots.catalog.latest();
            latest.catalog.snapshots.get(&snapshot).map(|kept| kept.info.name.is_some())
        };
        let no_such_snapshot = Error::NoSuchState(NoSuchState::Snapshot { snapshot });
        match has_name() {
            None => return Err(no_such_snapshot),
            Some(false) => return Err(ArchiveError::unnamed(snapshot).into()),
            Some(true) => {}
        }
        let is_archived = archive.wait_named(snapshot, until, || has_name().is_some());
        match is_archived {
            Ok(false) if has_name().is_none() => Err(no_such_snapshot),
            waited => self.in_store(waited),
        }
    }

    /// Waits until `count` snapshots have ended since the store was opened, successfully or not. Tests use this to wait
    /// for a background snapshot.
    #[doc(hidden)]
    pub fn wait_for_snapshots(&self, count: u64) {
        if self.check_process().is_err() {
            return;
        }
        self.parts.snapshots.progress.wait_ended(count);
    }

    /// Returns the retention rules that the store was opened with.
    #[must_use]
    pub fn retention(&self) -> Retention {
        self.parts.options.retention.clone()
    }

    /// Returns what [`Store::prune`] would remove now, without removing it. The call does not wait for a snapshot in
    /// progress, and ignores the files of that snapshot.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn would_prune(&self, retention: &Retention) -> Result<PruneReport> {
        self.check_process()?;
        self.in_store(self.parts.snapshots.would_prune(retention))
    }

    /// Returns what [`Store::would_prune_at`] would return for the store on `disk`. Tests use this function with
    /// simulated disks.
    ///
    /// # Errors
    /// Same as [`Store::would_prune_at`].
    #[doc(hidden)]
    pub fn would_prune_on(disk: &Arc<dyn Disk>, retention: &Retention) -> Result<PruneReport> {
        let pruned = OpenPreview::take(disk).and_then(|preview| would_prune(&**disk, preview, retention));
        pruned.map_err(|error| error.in_store(&disk.label()))
    }

    /// Returns what [`Store::would_prune_at`] would return for a store that the caller has already read.
    ///
    /// # Errors
    /// Same as [`Store::would_prune_at`].
    #[doc(hidden)]
    pub fn would_prune_surveyed(
        disk: &Arc<dyn Disk>,
        store: &SurveyedStore<'_>,
        retention: &Retention,
    ) -> Result<PruneReport> {
        let pruned =
            OpenPreview::of(disk, store).and_then(|preview| would_prune(&**disk, preview, retention));
        pruned.map_err(|error| error.in_store(&disk.label()))
    }

    /// Removes the snapshots and files that `retention` does not keep, and returns a report of them. Files that a kept
    /// snapshot, the log after a kept snapshot, or a reader needs are never removed.
    ///
    /// If another rule keeps a snapshot whose name is given up, the snapshot remains and keeps its name. Log segments
    /// that were waiting for reuse are also removed, except for the reserve. The store's own retention rules do not
    /// change.
    ///
    /// # Errors
    /// [`Error::DiskFull`] leaves the store unchanged. After an [`Error::Io`] because the system is short of open
    /// files, the next call removes the remaining files. Any other failure poisons the store.
    pub fn prune(&self, retention: &Retention) -> Result<PruneReport> {
        self.check_process()?;
        let snapshots = &self.parts.snapshots;
        let Engine { poison, applier, .. } = self.engine();
        applier.unloaded().wait_all()?;
        poison.check()?;
        let pruned = snapshots.prune(&mut snapshots.catalog.lock(), retention).and_then(|pruned| {
            // A caller that prunes wants free space more than spare segments.
            self.engine().log.pool.release_surplus().map(|_| pruned)
        });
        self.in_store(pruned.map_err(|error| if error.is_passing() { error } else { poison.set(error) }))
    }

    /// Returns the kept snapshots, oldest first, or none in a forked child. The call never waits, so a snapshot in
    /// progress is not included.
    #[must_use]
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        if self.check_process().is_err() {
            return Vec::new();
        }
        self.parts.snapshots.list()
    }

    /// Restores all pages and the root to an earlier state, given by batch, snapshot number or snapshot name, and
    /// returns the position of the restoring batch.
    ///
    /// A restore is itself a new batch, so the states that it replaces can be restored later. Page ids allocated since
    /// the earlier state are not reused, and every page that changes receives an epoch above all epochs ever assigned.
    /// Commits wait while a restore runs.
    ///
    /// States can be restored from the end of the oldest snapshot whose following log is kept, up to the newest batch.
    /// Before that window, only named snapshots can be restored. The restore ends with a snapshot of the restored
    /// state. That snapshot removes nothing, and later snapshots apply retention as usual.
    ///
    /// ```
    /// use remanent::{Place, StatePoint, Store};
    /// let store = Store::temporary()?;
    /// let mut batch = store.batch();
    /// let page = batch.create(4, Place::Host).page();
    /// batch.write(page, 0, b"good");
    /// let good = store.commit(batch)?;
    /// let mut batch = store.batch();
    /// batch.write(good.pages[0], 0, b"bad!");
    /// store.commit(batch)?;
    ///
    /// let restored = store.restore(&StatePoint::Lsn(good.position.lsn))?;
    /// assert_eq!(restored.lsn.0, 3);
    /// let mut bytes = [0; 4];
    /// store.read(good.pages[0], 0, &mut bytes)?;
    /// assert_eq!(&bytes, b"good");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// These leave the store unchanged: [`Error::NoSuchState`];
    /// [`Error::Overtaken`] if an image that the state needs is gone; [`Error::Damaged`], [`Error::OverBudget`],
    /// [`Error::OutOfMemory`], [`Error::DiskFull`]; [`Error::Io`] if the system is short of a resource; and
    /// [`Error::Leased`] while any page is leased or pinned. A later failure poisons the store. Its directory then
    /// contains the restored state.
    pub fn restore<P>(&self, point: P) -> Result<Position>
    where
        P: TryInto<StatePoint, Error: Into<Error>>,
    {
        self.check_process()?;
        let point = point.try_into().map_err(Into::into)?;
        self.engine().poison.check()?;
        let mut catalog = self.parts.snapshots.catalog.lock();
        let lsn = match &point {
            StatePoint::Lsn(lsn) => *lsn,
            StatePoint::Snapshot(snapshot) => {
                let snapshot = *snapshot;
                catalog
                    .snapshots
                    .get(&snapshot)
                    .ok_or(Error::NoSuchState(NoSuchState::Snapshot { snapshot }))?
                    .info
                    .end
            }
            StatePoint::Name(name) => {
                let named = |kept: &&RetainedSnapshot| kept.info.name.as_ref() == Some(name);
                let known = || catalog.snapshots.values().filter_map(|kept| kept.info.name.as_deref());
                let refused = || Error::no_snapshot_named(name, known());
                catalog.snapshots.values().find(named).ok_or_else(refused)?.info.end
            }
        };
        self.in_store(self.restore_lsn(lsn, &mut catalog))
    }

    /// Restores all pages and the root to the state at the end of a kept snapshot, and returns the position of the
    /// restoring batch. Equivalent to [`restore`](Self::restore) with a [`StatePoint::Snapshot`].
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
    /// let page = store.put("weights", b"good", Place::Host)?.0;
    /// let snapshot = store.snapshot()?;
    /// store.put("weights", b"bad!", Place::Host)?;
    ///
    /// store.restore_from_snapshot(snapshot.id)?;
    /// assert_eq!(store.read_to_vec(page)?, b"good");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`restore`](Self::restore); [`Error::NoSuchState`] if the snapshot is not kept.
    pub fn restore_from_snapshot(&self, snapshot: SnapshotId) -> Result<Position> {
        self.restore(snapshot)
    }

    fn restore_lsn(&self, lsn: Lsn, catalog: &mut Catalog) -> Result<Position> {
        let StoreParts { committer, snapshots, options, .. } = &*self.parts;
        let engine = self.engine();
        let Engine { applier, leases, log, poison, .. } = engine;
        // The restore overwrites page memory as a whole.
        applier.unloaded().wait_all()?;
        let mut submitted = committer.lock();
        leases.check_none().map_err(|error| poison.set_by_device(error))?;
        let restore = RestoreRun { engine, budget: &options.memory.budget, images: snapshots.images };
        let point = log.pool.with_surplus(|| restore.run(lsn, &mut submitted, catalog))?;
        // Both locks are still held, so this snapshot is exact. Later opens start from it.
        let (keeps_others, then) = (true, AfterPublication::KeepAll);
        let request = SnapshotRequest { keeps_others, then, ..SnapshotRequest::default() };
        match snapshots.take(catalog, &request) {
            // The restore is complete even without the snapshot: recovery replays the restoring batch.
            Ok(_) | Err(Error::OutOfMemory { .. }) => {}
            Err(error) if error.is_passing() => {}
            Err(error) => return Err(error),
        }
        Ok(Position { incarnation: point.incarnation, lsn: point.lsn })
    }
}

/// Returns what a prune of the previewed store would remove, except files that a writer may still be creating.
fn would_prune(disk: &dyn Disk, preview: OpenPreview, retention: &Retention) -> Result<PruneReport> {
    let OpenPreview { catalog, current_segment, under_way_from } = preview;
    let mut pruned = RetentionContext { disk, catalog: &catalog, current_segment }.would_prune(retention)?;
    let is_under_way = |file: &FileName| match file {
        FileName::Pages(number) | FileName::Table(number) => {
            under_way_from.is_some_and(|from| *number >= from)
        }
        _ => false,
    };
    pruned.files.retain(|(file, _)| !is_under_way(file));
    Ok(pruned)
}
