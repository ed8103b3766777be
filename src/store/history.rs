//! Snapshots, what is kept of them, and going back.

use std::sync::Arc;

use remanent_format::limits::SNAPSHOT_NAME_LEN_MAX;
use remanent_format::{FileName, Lsn, Position};

use super::{Store, StoreParts};
use crate::catalog::{Catalog, RetainedSnapshot, SnapshotInfo};
use crate::disk::Disk;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::history::point::StatePoint;
use crate::history::restore::RestoreRun;
use crate::options::{Retention, SnapshotOptions};
use crate::recovery::Outlook;
use crate::snapshot::{AfterPublication, PROVERS_MAX, PruneReport, SnapshotRequest, Subject};

impl Store {
    /// Takes a snapshot while commits go on, verifies it, and removes what is not kept any more. It writes
    /// the pages that changed since the snapshot before, and shares the images of all others with it. One at
    /// a time; a second caller waits. One that the background is writing slowly is finished at full speed
    /// first.
    ///
    /// Image files of which less than half is still named give their last images to the next snapshot, as
    /// many as it writes anyway, or 4 MiB, so that they can go.
    ///
    /// On a full disk pages that were deleted give back what they take first, as far as the rules of
    /// retention let go of it: a *thin* snapshot takes the place of the newest one, begins where that one
    /// begins, says which pages are gone, and writes no image. Then the snapshot is tried once more.
    ///
    /// # Errors
    /// [`Error::DiskFull`], and [`Error::Io`] where the system is short of open files, memory or threads,
    /// change nothing; any other failure poisons the store. Where it is short only of what reading back
    /// takes, the snapshot stands and is not `verified`: the next one makes up for it.
    pub fn snapshot(&self) -> Result<SnapshotInfo> {
        self.check_process()?;
        self.snapshot_with(SnapshotOptions::new())
    }

    /// Takes a snapshot as [`Store::snapshot`] does, with a name, of one moment, or without waiting until it
    /// is read back: see [`SnapshotOptions`].
    ///
    /// # Errors
    /// [`Error::NameTaken`] and, for a name of no byte or more than 64, [`Error::Limit`]; where an exact
    /// snapshot finds no room to copy pages aside, [`Error::OverBudget`] and [`Error::OutOfMemory`]: all of
    /// them change nothing. Else as for [`Store::snapshot`].
    pub fn snapshot_with(&self, options: SnapshotOptions) -> Result<SnapshotInfo> {
        self.check_process()?;
        let SnapshotOptions { name, exact, only_published } = options;
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
            return Err(Error::NameTaken { name, snapshot: holder.info.id });
        }
        let taken = snapshots.take(&mut catalog, &request);
        drop(catalog);
        if only_published && taken.is_ok() {
            snapshots.attend_later();
        }
        self.in_store(taken)
    }

    /// Reads the images back that long batches have written ahead of themselves since the last snapshot: of
    /// new pages, and of pages on disk that were written whole. The next snapshot does so before it names
    /// them; a caller that has many batches to commit before it takes one has it done meanwhile, by a thread
    /// of its own. Two threads read, so that the others have their cores. Snapshots wait until this returns.
    /// What does not hold the next snapshot writes again, or says that it cannot, as if it had found it.
    ///
    /// Returns how many bytes of pages were read back.
    ///
    /// ```
    /// # use remanent::{Options, Place, Store, WriteBatch};
    /// # let directory = tempfile::tempdir()?;
    /// # let store = Store::open(directory.path(), Options::default())?;
    /// let mut batch = WriteBatch::default();
    /// batch.create_from(vec![7; 20 << 20], Place::Disk);
    /// store.commit(batch)?;
    /// assert_eq!(store.prove_written_ahead()?, 20 << 20);
    /// assert_eq!(store.prove_written_ahead()?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], which changes nothing.
    pub fn prove_written_ahead(&self) -> Result<u64> {
        self.check_process()?;
        let snapshots = &self.parts.snapshots;
        snapshots.prove_written_ahead(&snapshots.catalog.lock(), PROVERS_MAX)
    }

    /// Waits until all snapshots that are published are verified, and what they take the place of is removed.
    ///
    /// # Errors
    /// [`Error::Poisoned`] if one of them is not on the medium what was written, or the store failed
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

    /// Waits until `count` snapshots have ended since the store was opened, well or not: for tests, which
    /// must not guess when one in the background is through.
    #[doc(hidden)]
    pub fn wait_for_snapshots(&self, count: u64) {
        if self.check_process().is_err() {
            return;
        }
        self.parts.snapshots.progress.wait_ended(count);
    }

    /// What the store keeps of the past: the rules of the options with which it was opened.
    #[must_use]
    pub fn retention(&self) -> Retention {
        self.parts.options.retention.clone()
    }

    /// Says what [`Store::prune`] would remove now, and removes nothing. It does not wait for a snapshot that
    /// is being taken, and passes over what that one writes.
    ///
    /// # Errors
    /// What the system says.
    pub fn would_prune(&self, retention: &Retention) -> Result<PruneReport> {
        self.check_process()?;
        self.in_store(self.parts.snapshots.would_prune(retention))
    }

    /// As [`Store::would_prune_at`], on any disk: the way in for tests, which bring simulated ones.
    ///
    /// # Errors
    /// As there.
    #[doc(hidden)]
    pub fn would_prune_on(disk: &Arc<dyn Disk>, retention: &Retention) -> Result<PruneReport> {
        let look = || {
            let Outlook { catalog, current_segment, under_way_from } = Outlook::take(disk)?;
            let mut pruned =
                Subject { disk: &**disk, catalog: &catalog, current_segment }.would_prune(retention)?;
            let is_under_way = |file: &FileName| match file {
                FileName::Pages(number) | FileName::Table(number) => {
                    under_way_from.is_some_and(|from| *number >= from)
                }
                _ => false,
            };
            pruned.files.retain(|(file, _)| !is_under_way(file));
            Ok(pruned)
        };
        look().map_err(|error: Error| error.in_store(&disk.label()))
    }

    /// Removes what these rules do not keep, and nothing that a kept snapshot, the log after it or a reader
    /// needs. A snapshot whose name is given up stays as long as another rule keeps it, and has its name
    /// again then. Log segments that waited to be used again go too, except for the reserve. The store goes
    /// on by its own rules.
    ///
    /// # Errors
    /// [`Error::DiskFull`] changes nothing; after [`Error::Io`] where the system is short of open files, the
    /// next call removes the rest; any other failure poisons the store.
    pub fn prune(&self, retention: &Retention) -> Result<PruneReport> {
        self.check_process()?;
        let snapshots = &self.parts.snapshots;
        let Engine { poison, applier, .. } = self.engine();
        applier.unloaded().wait_all()?;
        poison.check()?;
        let pruned = snapshots.prune(&mut snapshots.catalog.lock(), retention).and_then(|pruned| {
            // A caller that prunes wants the space, not segments that are ready.
            self.engine().log.pool.release_surplus().map(|_| pruned)
        });
        self.in_store(pruned.map_err(|error| if error.is_passing() { error } else { poison.set(error) }))
    }

    /// The snapshots kept, oldest first; none in a forked child. It waits for nothing: one that is being
    /// taken is not among them.
    #[must_use]
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        if self.check_process().is_err() {
            return Vec::new();
        }
        self.parts.snapshots.list()
    }

    /// Takes all pages and the root back to an earlier state: the one after a batch, or a snapshot's by
    /// number or name. This goes forward: it is one more batch, and what it leaves can be gone back to in
    /// turn. Page ids given meanwhile are not given again; pages that change get an epoch above all that were
    /// ever given. Commits wait.
    ///
    /// The window opens at the end of the oldest snapshot after which the log is kept, and closes at the
    /// newest batch. From before that, the states of named snapshots can be gone back to, each by its own
    /// batch and no other. The snapshot of the restored state that is taken at the end removes nothing; later
    /// ones do as ever.
    ///
    /// ```
    /// use remanent::{Options, Place, StatePoint, Store};
    /// let store = Store::temporary(Options::default())?;
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
    /// [`Error::NoSnapshot`], [`Error::NoSnapshotNamed`], [`Error::OutsideWindow`], [`Error::Overtaken`]
    /// where an image that the state needs is gone, [`Error::Damaged`], [`Error::OverBudget`],
    /// [`Error::OutOfMemory`], [`Error::DiskFull`], [`Error::Io`] where the system is short of something and,
    /// while any page is leased or pinned, [`Error::Leased`] change nothing; a failure later poisons the
    /// store, whose directory then holds the restored state.
    pub fn restore(&self, point: &StatePoint) -> Result<Position> {
        self.check_process()?;
        self.engine().poison.check()?;
        let mut catalog = self.parts.snapshots.catalog.lock();
        let lsn = match point {
            StatePoint::Lsn(lsn) => *lsn,
            StatePoint::Snapshot(snapshot) => {
                let snapshot = *snapshot;
                catalog.snapshots.get(&snapshot).ok_or(Error::NoSnapshot { snapshot })?.info.end
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

    fn restore_lsn(&self, lsn: Lsn, catalog: &mut Catalog) -> Result<Position> {
        let StoreParts { committer, snapshots, options, .. } = &*self.parts;
        let engine = self.engine();
        let Engine { applier, leases, log, poison, .. } = engine;
        // Memory is overwritten as a whole.
        applier.unloaded().wait_all()?;
        let mut submitted = committer.lock();
        leases.check_none().map_err(|error| poison.set_by_device(error))?;
        let restore = RestoreRun { engine, budget: &options.budget, images: snapshots.images };
        let point = log.pool.with_surplus(|| restore.run(lsn, &mut submitted, catalog))?;
        // Still under both locks: this snapshot is exact, and later opens start from it.
        let (keeps_others, then) = (true, AfterPublication::KeepAll);
        let request = SnapshotRequest { keeps_others, then, ..SnapshotRequest::default() };
        match snapshots.take(catalog, &request) {
            // The restore stands without it: recovery replays the record.
            Ok(_) | Err(Error::OutOfMemory { .. }) => {}
            Err(error) if error.is_passing() => {}
            Err(error) => return Err(error),
        }
        Ok(Position { incarnation: point.incarnation, lsn: point.lsn })
    }
}
