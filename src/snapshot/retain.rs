//! Retention: removes the files of snapshots that are not kept (I8). `plan.rs` decides which snapshots are kept.
//!
//! A crash here leaves unneeded files, which the next retention or open removes.

use std::collections::BTreeSet;
use std::io::ErrorKind;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::{FileName, Folder, Lsn, SnapshotId};

use super::Snapshots;
use super::plan::{LogOnDisk, RetentionPlan, plan};
use crate::base::parallel;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::wall_clock::unix_ms;
use crate::catalog::{Catalog, RetainedSnapshot, SnapshotInfo};
use crate::disk::Disk;
use crate::disk::image_spares::KeptReady;
use crate::error::{Error, Result};
use crate::images::IMAGE_FILES_MAX;
use crate::memory::arena::RegisteredFile;
use crate::options::Retention;

/// The minimum total length in bytes of files that several threads remove. The kernel frees the page cache of a
/// removed file page by page, which is slow.
const LONG_REMOVAL: u64 = 64 << 20;
const REMOVERS_MAX: usize = 4;

/// The snapshots and files that [`Store::prune`](crate::Store::prune) removed or, in a dry run, would remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PruneReport {
    /// The removed snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// The snapshots that no retention rule keeps, but that were not removed because a reader holds them.
    pub held: Vec<SnapshotId>,
    /// The removed files, each with its length in bytes. The store may have reused a log segment instead of removing
    /// it.
    pub files: Vec<(FileName, u64)>,
}

impl PruneReport {
    /// Returns the total length of `files` in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, len)| len).sum()
    }
}

/// A catalog and its disk, from which retention can be planned whether the store is open or closed.
pub(crate) struct RetentionContext<'a> {
    pub disk: &'a dyn Disk,
    /// The catalog of kept snapshots, tables and files.
    pub catalog: &'a Catalog,
    /// The number of the segment that receives frames. Retention never removes this segment.
    pub current_segment: u64,
}

impl Snapshots {
    /// Writes the record of phase 6: the kept verified snapshots, whether the log after each of them is kept, and the
    /// floor, below which no replay may start.
    ///
    /// Returns once a seal with the record is synced. Files may be recycled only after that (I7).
    pub fn record(
        &self,
        catalog: &mut Catalog,
        floor: Option<Lsn>,
        stays: impl Fn(&SnapshotId) -> bool,
    ) -> Result<()> {
        // If the first verification of a snapshot finds damage, the snapshot is not recorded: an open that tries it
        // must read its images.
        let is_in_record = |kept: &RetainedSnapshot| {
            kept.info.verified && (kept.is_sound || kept.is_recorded) && stays(&kept.info.id)
        };
        let kept = catalog.snapshots.values().filter(|kept| is_in_record(kept));
        let record = kept.map(|kept| VerifiedSnapshot {
            snapshot: kept.info.id,
            manifest_crc: kept.manifest_crc,
            log_kept: floor.is_some_and(|floor| kept.redo.lsn >= floor),
        });
        self.engine.log.record_verified(record.collect())?;
        catalog.snapshots.values_mut().for_each(|kept| kept.is_recorded |= is_in_record(kept));
        Ok(())
    }

    /// Verifies and records all named snapshots. This must precede the publication of another snapshot: after a crash,
    /// opening the store finds only the newest snapshot and the recorded ones, so an unrecorded named snapshot would be
    /// lost (I7).
    pub fn record_named(&self, catalog: &mut Catalog) -> Result<()> {
        if catalog.are_named_recorded() {
            return Ok(());
        }
        self.verify(catalog)?;
        self.record(catalog, catalog.floor, |_| true)
    }

    /// Performs phase 7, including the record of phase 6. While pages are still being loaded, only the record is
    /// written: if an image is damaged, loading needs an older snapshot and the log after it.
    pub fn retain(&self, catalog: &mut Catalog) -> Result<()> {
        if self.engine.applier.unloaded().is_any() {
            self.record(catalog, catalog.floor, |_| true)?;
        } else {
            self.prune(catalog, &self.retention)?;
        }
        self.unverified.set_retention_pending(false);
        Ok(())
    }

    /// Returns a report of the files that `prune` would remove, without waiting for a running snapshot. The report
    /// omits files of a running snapshot.
    pub fn would_prune(&self, retention: &Retention) -> Result<PruneReport> {
        let latest = self.catalog.latest();
        // Uses a copy of the catalog, whose lock may be held until a snapshot ends.
        let mut pruned = self.subject(&latest.catalog).would_prune(retention)?;
        pruned.files.retain(|(file, _)| match file {
            FileName::Pages(number) | FileName::Table(number) => *number < latest.next_file,
            _ => true,
        });
        Ok(pruned)
    }

    /// Removes all unneeded files: first writes the record, then removes manifests, log and images. Each step is
    /// durable before the next step starts. Thus after a crash every remaining manifest has its log and images, and
    /// every remaining batch has its images.
    pub fn prune(&self, catalog: &mut Catalog, retention: &Retention) -> Result<PruneReport> {
        // I7: a snapshot that is not verified cannot replace another.
        self.verify(catalog)?;
        assert!(catalog.snapshots.values().all(|kept| kept.info.verified)); // I7
        // The file that a failed commit has written is removed by its committer. This is blocked meanwhile, so that all
        // files in the plan still exist.
        let files = catalog.files.clone();
        let _none_goes = files.block_removals();
        // I8: snapshots that readers hold are kept, and no reader may start from a retiring snapshot until its files
        // are removed.
        let mut going = Vec::new();
        let (plan, pruned) = self.subject(catalog).plan(retention, &mut |id| {
            // The lock is held until all files are removed, because a reader that started in between would miss some of
            // them.
            let lock = self.engine.disk.try_retire(id)?;
            let is_free = lock.is_some();
            going.extend(lock);
            Ok(is_free)
        })?;
        // 1. Record the floor and the list of kept snapshots in a synced seal. Before this, nothing was removed, and
        //    after a crash the old floor is valid with all that it needs. Afterwards no replay starts below the new
        //    floor, so even after a crash in steps 2 to 4 no replay needs the files that they remove. Only a durable
        //    record permits recycling (I7): otherwise a power cut that undoes a manifest's rename would also lose the
        //    previous snapshot. The floor never decreases, because files below it may be missing already.
        let floor = catalog.floor.max(plan.log_from.map(|(_, redo)| redo).filter(|redo| redo.0 > 0));
        self.record(catalog, floor, |id| plan.snapshots.contains(id))?;
        let _phase = phases::enter(Phase::Recycle);
        catalog.floor = floor;
        catalog.snapshots.retain(|id, _| plan.snapshots.contains(id));
        // Removes the tables of restores that no replay from the new floor reaches.
        catalog.tables.retain(|_, table| is_needed(table.restored_at, &plan));
        if catalog.unread.is_some_and(|unread| floor.is_some_and(|floor| floor >= unread)) {
            // An unreadable manifest or table cannot be needed any more if it is below the floor.
            catalog.unread = None;
        }
        let segments: Vec<u64> = pruned
            .files
            .iter()
            .filter_map(|(file, _)| if let FileName::Segment(number) = file { Some(*number) } else { None })
            .collect();
        self.check_plan(catalog, &plan, &segments);
        // 2. Remove manifests. If they were removed after their log or images, a manifest that survived a crash would
        //    name missing files. A failure poisons the store: a manifest that remains on disk but not in the catalog
        //    would reappear at the next open, without the files that it needs.
        self.remove_all(Folder::Snapshots, &pruned).map_err(|error| self.engine.poison.set(error))?;
        // 3. Remove segments before images, so that a batch that survived a crash still finds the images that it names.
        self.engine.log.pool.recycle(&segments)?;
        // 4. Remove images and tables.
        files.recycled(floor.unwrap_or_default());
        self.recycle_images(catalog, &pruned)?;
        // If the start of replay is unknown, all of the log is kept.
        self.engine.log.set_replay_start(plan.log_from.and_then(|_| catalog.replay_start()));
        Ok(pruned)
    }

    /// Performs step 4 of [`prune`](Self::prune): turns removed image files into spares, or deletes them. All records
    /// that named these files have been durably removed (I13).
    ///
    /// Only a file whose number is below the next file number in a kept manifest can become a spare. Otherwise the
    /// number may be assigned again after a crash, and the spare's old chunks would be taken for new ones.
    fn recycle_images(&self, catalog: &Catalog, pruned: &PruneReport) -> Result<()> {
        let next_file = catalog.snapshots.values().map(|kept| kept.next_file).max().unwrap_or(0);
        let is_free = |file: FileName, len: u64| match file {
            FileName::Pages(number) => self.keeps_spares && number < next_file && len >= self.spare_len_min(),
            _ => false,
        };
        let of_images = || pruned.files.iter().filter(|(file, _)| file.folder() == Folder::Pages);
        let (free, going): (Vec<&_>, Vec<&_>) = of_images().partition(|(file, len)| is_free(*file, *len));
        let spares = catalog.files.spares();
        let remove = |file: FileName| {
            number(file).into_iter().for_each(|number| spares.drop_kept_ready(number));
            self.engine.disk.remove(file)
        };
        let is_long = going.iter().map(|(_, len)| len).sum::<u64>() >= LONG_REMOVAL;
        let threads = if is_long { parallel::threads(REMOVERS_MAX) } else { 1 };
        parallel::map_indexed(threads, going.len(), || (), |(), at| remove(going[at].0))?;
        let free: Vec<(u64, u64)> =
            free.into_iter().filter_map(|&(file, len)| Some((number(file)?, len))).collect();
        if free.is_empty() && spares.is_empty() {
            // A folder from which nothing was removed needs no sync.
            return if going.is_empty() { Ok(()) } else { self.engine.disk.sync_folder(Folder::Pages) };
        }
        let named = self.subject(catalog).named_image_files()?;
        // Spares and kept files together may take at most twice the bytes that the snapshots name. A snapshot of all
        // pages takes that much at its end, together with the one that it replaces.
        let live: u64 = named.iter().map(NamedImageFile::live_len).sum();
        let taken: u64 = named.iter().map(|file| file.len).sum();
        let bound = live.saturating_mul(2).saturating_sub(taken);
        // The next snapshot will probably write as much as one of the kept ones did.
        let written = catalog.snapshots.values().map(|kept| kept.info.bytes_written).max().unwrap_or(0);
        let useful = written.saturating_add(written / HEADS_SHARE + IMAGE_FILES_MAX * HEADS_BYTES);
        let bytes_max = if self.keeps_spares { bound.min(useful) } else { 0 };
        spares.recycle(&free, bytes_max, !going.is_empty())?;
        // The memory is registered with the device now, so that no commit waits for it later.
        if self.images.is_in_place() {
            let (arena, staging) = (&self.engine.arena, &self.engine.staging);
            let is_ready = |kept: &KeptReady, len| {
                kept.downcast_ref::<RegisteredFile>().is_some_and(|file| file.is_registered(len))
            };
            spares.keep_ready(is_ready, |file| arena.register(file, staging).map(|file| file as KeptReady));
        }
        Ok(())
    }

    /// Returns the minimum length in bytes of an image file that is kept as a spare: half a chunk. Reusing a shorter
    /// file saves less than the additional sync of the folder costs.
    fn spare_len_min(&self) -> u64 {
        self.chunk_len / 2
    }

    /// Panics if the plan removes a segment that a kept snapshot needs (I8). `catalog` contains the kept snapshots, and
    /// `segments` contains the removed segments.
    fn check_plan(&self, catalog: &Catalog, plan: &RetentionPlan, segments: &[u64]) {
        let Some(newest) = segments.iter().max() else { return };
        let redo = plan.log_from.map(|(_, redo)| redo).filter(|redo| redo.0 > 0);
        assert!(redo <= catalog.floor); // I8: the durable record states that no replay starts below.
        assert!(*newest < self.engine.log.current_segment()); // I8: frames enter the current segment.
        // I8: each start keeps the segment in which its replay begins, and all later ones.
        let mut starts = catalog.snapshots.values().filter(|kept| catalog.reaches(kept));
        assert!(starts.all(|kept| *newest < kept.redo.segment));
    }

    /// Removes the files of `folder` that `pruned` lists, and syncs the folder, so that these removals are durable
    /// before those of the next step.
    fn remove_all(&self, folder: Folder, pruned: &PruneReport) -> Result<()> {
        let files = || pruned.files.iter().map(|(file, _)| *file).filter(|file| file.folder() == folder);
        files().try_for_each(|file| self.engine.disk.remove(file))?;
        // A folder from which nothing was removed needs no sync.
        if files().next().is_some() { self.engine.disk.sync_folder(folder) } else { Ok(()) }
    }

    fn subject<'a>(&'a self, catalog: &'a Catalog) -> RetentionContext<'a> {
        RetentionContext {
            disk: &*self.engine.disk,
            catalog,
            current_segment: self.engine.log.current_segment(),
        }
    }
}

impl RetentionContext<'_> {
    /// Returns a report of the snapshots and files that `prune` would remove.
    pub fn would_prune(&self, retention: &Retention) -> Result<PruneReport> {
        let (_, pruned) = self.plan(retention, &mut |id| self.disk.is_held(id).map(|is_held| !is_held))?;
        Ok(pruned)
    }

    /// Determines the snapshots and files to keep and to remove. `is_free` returns whether no reader holds the snapshot
    /// with a given number. Number 0 represents the beginning of the log.
    fn plan(
        &self,
        retention: &Retention,
        is_free: &mut dyn FnMut(SnapshotId) -> Result<bool>,
    ) -> Result<(RetentionPlan, PruneReport)> {
        let Self { catalog, .. } = *self;
        let log = self.log_on_disk()?;
        let (now, no_reader) = (unix_ms(), BTreeSet::new());
        // The rules are first applied as if there were no readers. Only the snapshots that would then lose something
        // are checked for readers, which costs a file lock each.
        let wanted = plan(&catalog.snapshots, retention, &log, now, &no_reader, false);
        // A named snapshot may remain but lose the log after it, which a reader may be following.
        let mut held = BTreeSet::new();
        for (id, _) in catalog.snapshots.iter().filter(|(_, kept)| wanted.takes_from(kept, &log)) {
            // I8: the snapshot and the log after it are kept until its reader has ended.
            if !is_free(*id)? {
                held.insert(*id);
            }
        }
        let is_beginning_held = !is_free(SnapshotId(0))?;
        let mut plan = plan(&catalog.snapshots, retention, &log, now, &held, is_beginning_held);
        // A reader may also have started from a manifest that is kept only because later snapshots are based on it, or
        // that a crash left behind. Which files that reader needs is unknown, so everything is kept until it has ended.
        for id in self.links_without_snapshot()? {
            if !is_free(id)? {
                plan =
                    RetentionPlan { snapshots: catalog.snapshots.keys().copied().collect(), log_from: None };
            }
        }
        // The snapshots that no rule keeps and no reader holds.
        let gone = catalog.snapshots.values().filter(|kept| !plan.snapshots.contains(&kept.info.id));
        let snapshots = gone.map(|kept| kept.info.clone()).collect();
        let files = self.unneeded_files(&plan, &log)?;
        let held = held.into_iter().filter(|id| !wanted.snapshots.contains(id)).collect();
        Ok((plan, PruneReport { snapshots, held, files }))
    }

    /// Lists the files that no kept snapshot, table or frame needs, in the order in which they must be removed.
    fn unneeded_files(&self, plan: &RetentionPlan, log: &LogOnDisk) -> Result<Vec<(FileName, u64)>> {
        let Self { catalog, .. } = *self;
        let kept = || catalog.snapshots.values().filter(|kept| plan.snapshots.contains(&kept.info.id));
        // A snapshot needs its own manifest and the chain of manifests on which it is based (I8).
        let links: BTreeSet<SnapshotId> =
            kept().flat_map(|kept| kept.links.iter().copied().chain([kept.info.id])).collect();
        // The table of a restore is needed only if replay may reach the restore.
        let tables = || catalog.tables.iter().filter(|(_, table)| is_needed(table.restored_at, plan));
        // Images that a kept snapshot or a kept table names (I8).
        let named: BTreeSet<u64> = kept()
            .flat_map(|kept| kept.files.keys())
            .chain(tables().flat_map(|(_, table)| &table.files))
            .copied()
            .collect();
        // An unreadable manifest is not removed until all manifests that are as old are removed. It may help to
        // diagnose the damage.
        let settled = kept().filter(|kept| plan.log_from.is_some_and(|from| kept.redo.lsn >= from.1));
        let settled = settled.map(|kept| kept.info.id).min();
        let mut files = self.lens(Folder::Snapshots, |file| match file {
            FileName::Manifest(number) => {
                let id = SnapshotId(number);
                // Older than every snapshot from which recovery can start.
                let is_old = settled.is_some_and(|settled| id < settled);
                !links.contains(&id) && (is_old || catalog.snapshots.contains_key(&id))
            }
            _ => false,
        })?;
        // If no log may be removed, no image may be removed either, because a frame may name it.
        let (bound, redo) = plan.log_from.unwrap_or_default();
        if plan.log_from.is_some() {
            // An unreadable manifest or table may name any file that was written before this open.
            let unread = catalog.unread.is_some_and(|unread| redo < unread);
            let first = if unread { catalog.files.first() } else { 0 };
            let mut pages = self.lens(Folder::Pages, |file| match file {
                FileName::Pages(number) => number >= first,
                FileName::Table(number) => number >= first,
                _ => false,
            })?;
            let next_file = kept().map(|kept| kept.next_file).max().unwrap_or(1);
            let highest = pages.iter().filter_map(|(file, _)| number(*file)).max();
            pages.retain(|(file, _)| match *file {
                // Unless a kept manifest states that the highest file number is in use, only the file itself proves
                // this.
                FileName::Pages(number) if Some(number) == highest && number >= next_file => false,
                FileName::Pages(number) => {
                    !named.contains(&number)
                        && !catalog.files.is_for_batch(number, redo)
                        && !catalog.files.is_read_from(number)
                }
                FileName::Table(number) => !tables().any(|(kept, _)| *kept == number),
                _ => false,
            });
            files.extend(pages);
        }
        // Only segments before the one in which the oldest kept replay begins.
        files.extend(log.segments.range(..bound).map(|(number, len)| (FileName::Segment(*number), *len)));
        Ok(files)
    }

    /// Returns the lengths of the image files that kept snapshots and tables name.
    fn named_image_files(&self) -> Result<Vec<NamedImageFile>> {
        let Self { catalog, .. } = *self;
        let named = catalog.named_files();
        let files = self
            .lens(Folder::Pages, |file| matches!(file, FileName::Pages(number) if named.contains(&number)))?;
        let live_bytes = |file: u64, len: u64| {
            if catalog.is_in_table(file) { len } else { catalog.live_bytes(file).min(len) }
        };
        let measured = files.into_iter().filter_map(|(file, len)| Some((number(file)?, len)));
        Ok(measured.map(|(file, len)| NamedImageFile { len, live_bytes: live_bytes(file, len) }).collect())
    }

    /// Returns the manifests on disk that are kept only because other snapshots are based on them.
    fn links_without_snapshot(&self) -> Result<Vec<SnapshotId>> {
        let names = self.disk.list(Folder::Snapshots)?;
        let ids = names.iter().filter_map(|name| match FileName::parse(Folder::Snapshots, name) {
            Some(FileName::Manifest(number)) => Some(SnapshotId(number)),
            _ => None,
        });
        Ok(ids.filter(|id| !self.catalog.snapshots.contains_key(id)).collect())
    }

    /// Returns the lengths of the segments on disk, with the current segment and the earliest start of replay.
    fn log_on_disk(&self) -> Result<LogOnDisk> {
        let segments = self.lens(Folder::Log, |file| matches!(file, FileName::Segment(_)))?;
        let segments = segments.into_iter().filter_map(|(file, len)| match file {
            FileName::Segment(number) => Some((number, len)),
            _ => None,
        });
        Ok(LogOnDisk {
            segments: segments.collect(),
            current: self.current_segment,
            floor: self.catalog.floor,
        })
    }

    /// Returns the files of a folder that `wanted` selects, with their lengths in bytes.
    fn lens(&self, folder: Folder, wanted: impl Fn(FileName) -> bool) -> Result<Vec<(FileName, u64)>> {
        let names = self.disk.list(folder)?;
        let files =
            names.iter().filter_map(|name| FileName::parse(folder, name)).filter(|file| wanted(*file));
        let len = |file| match self.disk.open(file, false) {
            Ok(open) => open.len().map(|len| Some((file, len))),
            // A concurrent commit that failed has removed its file since the folder was listed.
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        files.filter_map(|file| len(file).transpose()).collect()
    }
}

/// The estimated number of bytes in an image file that belong to no image: headers, heads of chunks, and padding.
const HEADS_BYTES: u64 = 3 * GROUP_ALIGN;
/// The inverse of the overhead of chunk heads and padding in a file of many chunks, relative to the length of its
/// images.
const HEADS_SHARE: u64 = 16;

/// An image file that a kept snapshot or table names.
struct NamedImageFile {
    len: u64,
    /// The maximum number of the file's bytes that any kept snapshot names.
    live_bytes: u64,
}

impl NamedImageFile {
    /// Returns the number of bytes that snapshots name, plus the estimated overhead, but at most the length of the
    /// file. Without the overhead, the limit on spares would exclude one of several files that a snapshot frees
    /// together.
    fn live_len(&self) -> u64 {
        self.len.min(self.live_bytes.saturating_add(self.live_bytes / HEADS_SHARE + HEADS_BYTES))
    }
}

/// Returns the number of an image file or table. Both kinds share one sequence of numbers.
fn number(file: FileName) -> Option<u64> {
    match file {
        FileName::Pages(number) | FileName::Table(number) => Some(number),
        _ => None,
    }
}

/// Returns whether replay of the kept log may reach the restore that was logged as batch `restored_at`, and therefore
/// needs the table of the restore.
fn is_needed(restored_at: Lsn, plan: &RetentionPlan) -> bool {
    plan.log_from.is_none_or(|(_, redo)| restored_at > redo)
}
