//! Retention: which files go with the snapshots that are not kept (I8). `plan.rs` says which are kept.
//!
//! A crash here leaves files that nothing needs; the next retention or open removes them.

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

/// Bytes of files that several threads remove: the system gives their page cache back page by page.
const LONG_REMOVAL: u64 = 64 << 20;
const REMOVERS_MAX: usize = 4;

/// The files and snapshots that a retention removed, or would remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PruneReport {
    /// The snapshots that go.
    pub snapshots: Vec<SnapshotInfo>,
    /// The snapshots that no rule keeps, but a reader does.
    pub held: Vec<SnapshotId>,
    /// The files that go, with their lengths in bytes. Segments of the log may be used again.
    pub files: Vec<(FileName, u64)>,
}

impl PruneReport {
    /// Bytes of all files that go.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, len)| len).sum()
    }
}

/// A catalog with the disk that it describes: enough to say what may go, whether the store is open or not.
pub(crate) struct Subject<'a> {
    pub disk: &'a dyn Disk,
    /// The snapshots, tables and files that are kept.
    pub catalog: &'a Catalog,
    /// The segment that takes frames: it never goes.
    pub current_segment: u64,
}

impl Snapshots {
    /// The record of phase 6: every verified snapshot that stays, and whether the log after it does.
    ///
    /// Returns when a seal that says so is synced. Only such a record licenses recycling (I7).
    pub fn record(
        &self,
        catalog: &mut Catalog,
        floor: Option<Lsn>,
        stays: impl Fn(&SnapshotId) -> bool,
    ) -> Result<()> {
        let is_in_record = |kept: &RetainedSnapshot| kept.info.verified && stays(&kept.info.id);
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

    /// Verifies and records the snapshots with names, before another one is published. After a crash an open
    /// knows the newest one, and of those before only what a record names: one that was durable, and that its
    /// name is to keep, would be gone (I7).
    pub fn record_named(&self, catalog: &mut Catalog) -> Result<()> {
        if catalog.snapshots.values().all(|kept| kept.is_recorded || kept.info.name.is_none()) {
            return Ok(());
        }
        self.verify(catalog)?;
        self.record(catalog, catalog.floor, |_| true)
    }

    /// The record of phase 6, and phase 7. While a page is unloaded only the record: if an image turns
    /// out damaged, an older snapshot and more log can stand in for it.
    pub fn retain(&self, catalog: &mut Catalog) -> Result<()> {
        if self.engine.applier.unloaded().is_any() {
            self.record(catalog, catalog.floor, |_| true)?;
        } else {
            self.prune(catalog, &self.retention)?;
        }
        self.unverified.owe_retention(false);
        Ok(())
    }

    /// Says what `prune` would remove. It waits for no snapshot: files that are being written for one are
    /// left out.
    pub fn would_prune(&self, retention: &Retention) -> Result<PruneReport> {
        let latest = self.catalog.latest();
        // A copy of the catalog: the lock on it may be held for as long as a snapshot takes.
        let mut pruned = self.subject(&latest.catalog).would_prune(retention)?;
        pruned.files.retain(|(file, _)| match file {
            FileName::Pages(number) | FileName::Table(number) => *number < latest.next_file,
            _ => true,
        });
        Ok(pruned)
    }

    /// Removes what nothing needs: first the record of it, then manifests, log, images. Each step is
    /// durable before the next, so that what can still be found is whole: a manifest has its log and its
    /// images, a batch its images.
    pub fn prune(&self, catalog: &mut Catalog, retention: &Retention) -> Result<PruneReport> {
        // I7: a snapshot that is not verified stands in for no other.
        self.verify(catalog)?;
        assert!(catalog.snapshots.values().all(|kept| kept.info.verified)); // I7
        // A batch that is refused removes its own file. Held off meanwhile, it cannot take one away that
        // the plan has listed.
        let files = catalog.files.clone();
        let _none_goes = files.block_removals();
        // I8: what a reader holds stays, and no reader begins at what is going until all of it is gone.
        let mut going = Vec::new();
        let (plan, pruned) = self.subject(catalog).plan(retention, &mut |id| {
            // The lock is kept until all is gone: a reader that begins meanwhile would find half of it.
            let lock = self.engine.disk.try_retire(id)?;
            let is_free = lock.is_some();
            going.extend(lock);
            Ok(is_free)
        })?;
        // 1. The floor and the list, in a seal that is synced. Before it nothing has gone, and a crash
        //    finds the older floor with all that it needs. From it on nothing starts below the new one,
        //    so no crash in 2 to 4 leaves a start with a part missing. Only a durable record licenses
        //    recycling, too (I7): a manifest whose rename a power cut takes away must not have cost us
        //    the one before.
        // The floor never goes back: below it files may be missing already.
        let floor = catalog.floor.max(plan.log_from.map(|(_, redo)| redo).filter(|redo| redo.0 > 0));
        self.record(catalog, floor, |id| plan.snapshots.contains(id))?;
        let _phase = phases::enter(Phase::Recycle);
        catalog.floor = floor;
        catalog.snapshots.retain(|id, _| plan.snapshots.contains(id));
        // A replay from the new floor on meets no restore before it.
        catalog.tables.retain(|_, table| is_needed(table.restored_at, &plan));
        if catalog.unread.is_some_and(|unread| floor.is_some_and(|floor| floor >= unread)) {
            // All that could need files which nothing names lies below the floor now.
            catalog.unread = None;
        }
        let segments: Vec<u64> = pruned
            .files
            .iter()
            .filter_map(|(file, _)| if let FileName::Segment(number) = file { Some(*number) } else { None })
            .collect();
        self.check_plan(catalog, &plan, &segments);
        // 2. Manifests. Gone after their log or images, one that survived a crash would name what is
        //    missing. A failure poisons: a manifest that stays, and that the catalog does not know any
        //    more, would come back with the next open, when what it needs is gone.
        self.remove_all(Folder::Snapshots, &pruned).map_err(|error| self.engine.poison.set(error))?;
        // 3. Segments: before images, so that a batch which survived a crash still finds the images that it
        //    names.
        self.engine.log.pool.recycle(&segments)?;
        // 4. Images and tables.
        files.recycled(floor.unwrap_or_default());
        self.recycle_images(catalog, &pruned)?;
        Ok(pruned)
    }

    /// Step 4: image files that go become spares as far as they may, and are removed otherwise. All that
    /// named them is gone by now, durably (I13).
    ///
    /// Only files whose numbers a kept manifest says are taken: the number of another one may be given again
    /// after a crash, and its chunks in a spare would look like new ones.
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
            number(file).into_iter().for_each(|number| spares.let_go(number));
            self.engine.disk.remove(file)
        };
        let is_long = going.iter().map(|(_, len)| len).sum::<u64>() >= LONG_REMOVAL;
        let threads = if is_long { parallel::threads(REMOVERS_MAX) } else { 1 };
        parallel::map_indexed(threads, going.len(), || (), |(), at| remove(going[at].0))?;
        let free: Vec<(u64, u64)> =
            free.into_iter().filter_map(|&(file, len)| Some((number(file)?, len))).collect();
        if free.is_empty() && spares.is_empty() {
            // A folder from which nothing went needs no sync.
            return if going.is_empty() { Ok(()) } else { self.engine.disk.sync_folder(Folder::Pages) };
        }
        let named = self.subject(catalog).named_image_files()?;
        // Spares and files that stay take at most twice what the snapshots name: that is what a snapshot of
        // all pages takes at its end, with the one that it replaces.
        let live: u64 = named.iter().map(NamedImageFile::live_len).sum();
        let taken: u64 = named.iter().map(|file| file.len).sum();
        let bound = live.saturating_mul(2).saturating_sub(taken);
        // The next snapshot will probably write as much as one of these did.
        let written = catalog.snapshots.values().map(|kept| kept.info.bytes_written).max().unwrap_or(0);
        let useful = written.saturating_add(written / HEADS_SHARE + IMAGE_FILES_MAX * HEADS_BYTES);
        let bytes_max = if self.keeps_spares { bound.min(useful) } else { 0 };
        spares.recycle(&free, bytes_max, !going.is_empty())?;
        // Registered here, where it is no commit's wait: the next snapshot but one writes to it.
        if self.images.is_in_place() {
            let (arena, staging) = (&self.engine.arena, &self.engine.staging);
            let is_ready = |kept: &KeptReady, len| {
                kept.downcast_ref::<RegisteredFile>().is_some_and(|file| file.is_registered(len))
            };
            spares.keep_ready(is_ready, |file| arena.register(file, staging).map(|file| file as KeptReady));
        }
        Ok(())
    }

    /// The shortest image file that is worth another sync of its folder: half a chunk.
    fn spare_len_min(&self) -> u64 {
        self.chunk_len / 2
    }

    /// Asserts that nothing goes that a kept snapshot needs (I8): the catalog is what stays, `segments`
    /// are what goes.
    fn check_plan(&self, catalog: &Catalog, plan: &RetentionPlan, segments: &[u64]) {
        let Some(newest) = segments.iter().max() else { return };
        let redo = plan.log_from.map(|(_, redo)| redo).filter(|redo| redo.0 > 0);
        assert!(redo <= catalog.floor); // I8: the record, which is durable, says that nothing starts below.
        assert!(*newest < self.engine.log.current_segment()); // I8: frames enter the current segment.
        // I8: each start keeps the segment in which its replay begins, and all after it.
        let mut starts = catalog.snapshots.values().filter(|kept| catalog.reaches(kept));
        assert!(starts.all(|kept| *newest < kept.redo.segment));
    }

    /// Removes the files of a folder that go, and syncs it: the next step must not outrun these on the disk.
    fn remove_all(&self, folder: Folder, pruned: &PruneReport) -> Result<()> {
        let files = || pruned.files.iter().map(|(file, _)| *file).filter(|file| file.folder() == folder);
        files().try_for_each(|file| self.engine.disk.remove(file))?;
        // A folder from which nothing went needs no sync.
        if files().next().is_some() { self.engine.disk.sync_folder(folder) } else { Ok(()) }
    }

    /// The catalog with its disk, for the rules.
    fn subject<'a>(&'a self, catalog: &'a Catalog) -> Subject<'a> {
        Subject { disk: &*self.engine.disk, catalog, current_segment: self.engine.log.current_segment() }
    }
}

impl Subject<'_> {
    /// Says what would go.
    pub fn would_prune(&self, retention: &Retention) -> Result<PruneReport> {
        let (_, pruned) = self.plan(retention, &mut |id| self.disk.is_held(id).map(|is_held| !is_held))?;
        Ok(pruned)
    }

    /// Says what stays, and what goes. `is_free` says whether no reader holds a snapshot, or the log's
    /// beginning, which has number 0.
    fn plan(
        &self,
        retention: &Retention,
        is_free: &mut dyn FnMut(SnapshotId) -> Result<bool>,
    ) -> Result<(RetentionPlan, PruneReport)> {
        let Self { catalog, .. } = *self;
        let log = self.log_on_disk()?;
        let (now, no_reader) = (unix_ms(), BTreeSet::new());
        // Planned twice: first without readers, to know which snapshots a reader must be asked about.
        // Asked about all, each prune would try a lock a snapshot.
        let wanted = plan(&catalog.snapshots, retention, &log, now, &no_reader, false);
        // A snapshot that a name keeps may lose the log after it, which its reader may be following.
        let mut held = BTreeSet::new();
        for (id, _) in catalog.snapshots.iter().filter(|(_, kept)| wanted.takes_from(kept, &log)) {
            // I8: it stays, with the log after it, until its reader has gone.
            if !is_free(*id)? {
                held.insert(*id);
            }
        }
        let beginning_held = !is_free(SnapshotId(0))?;
        let mut plan = plan(&catalog.snapshots, retention, &log, now, &held, beginning_held);
        // A reader may also have begun at a link that is there only for the snapshots which follow it, or
        // that a crash left. The catalog does not know any more what that reader needs: until it has
        // gone, all stays.
        for id in self.links_alone()? {
            if !is_free(id)? {
                plan =
                    RetentionPlan { snapshots: catalog.snapshots.keys().copied().collect(), log_from: None };
            }
        }
        // Kept by no rule, and held by no reader.
        let gone = catalog.snapshots.values().filter(|kept| !plan.snapshots.contains(&kept.info.id));
        let snapshots = gone.map(|kept| kept.info.clone()).collect();
        let files = self.unneeded_files(&plan, &log)?;
        let held = held.into_iter().filter(|id| !wanted.snapshots.contains(id)).collect();
        Ok((plan, PruneReport { snapshots, held, files }))
    }

    /// Lists the files that no kept snapshot, table or frame needs, in the order of their removal.
    fn unneeded_files(&self, plan: &RetentionPlan, log: &LogOnDisk) -> Result<Vec<(FileName, u64)>> {
        let Self { catalog, .. } = *self;
        let kept = || catalog.snapshots.values().filter(|kept| plan.snapshots.contains(&kept.info.id));
        // A snapshot needs its own link, and all that it follows down to its base (I8).
        let links: BTreeSet<SnapshotId> =
            kept().flat_map(|kept| kept.links.iter().copied().chain([kept.info.id])).collect();
        // A table goes when no kept replay comes to its restore.
        let tables = || catalog.tables.iter().filter(|(_, table)| is_needed(table.restored_at, plan));
        // Images that a kept snapshot or a kept table names (I8).
        let named: BTreeSet<u64> = kept()
            .flat_map(|kept| kept.files.keys())
            .chain(tables().flat_map(|(_, table)| &table.files))
            .copied()
            .collect();
        // A manifest that could not be read goes with the ones of its age: until then it is evidence.
        let settled = kept().filter(|kept| plan.log_from.is_some_and(|from| kept.redo.lsn >= from.1));
        let settled = settled.map(|kept| kept.info.id).min();
        let mut files = self.lens(Folder::Snapshots, |file| match file {
            FileName::Manifest(number) => {
                let id = SnapshotId(number);
                // Older than every snapshot that can be started from.
                let is_old = settled.is_some_and(|settled| id < settled);
                !links.contains(&id) && (is_old || catalog.snapshots.contains_key(&id))
            }
            _ => false,
        })?;
        // Images go only if log may go, too: a frame of the log may name them.
        let (bound, redo) = plan.log_from.unwrap_or_default();
        if plan.log_from.is_some() {
            // A manifest or table that could not be read may need any file that was there before this run.
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
                // The number is known to be taken only while the file is there, or once a manifest says so.
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

    /// Measures the image files that kept snapshots and kept tables name.
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

    /// Lists the manifests on disk that are no snapshots of their own any more.
    fn links_alone(&self) -> Result<Vec<SnapshotId>> {
        let names = self.disk.list(Folder::Snapshots)?;
        let ids = names.iter().filter_map(|name| match FileName::parse(Folder::Snapshots, name) {
            Some(FileName::Manifest(number)) => Some(SnapshotId(number)),
            _ => None,
        });
        Ok(ids.filter(|id| !self.catalog.snapshots.contains_key(id)).collect())
    }

    /// Lists the segments on disk, with the rules' other facts about the log.
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

    /// Lists the wanted files of a folder, with their lengths in bytes.
    fn lens(&self, folder: Folder, wanted: impl Fn(FileName) -> bool) -> Result<Vec<(FileName, u64)>> {
        let names = self.disk.list(folder)?;
        let files =
            names.iter().filter_map(|name| FileName::parse(folder, name)).filter(|file| wanted(*file));
        let len = |file| match self.disk.open(file, false) {
            Ok(open) => open.len().map(|len| Some((file, len))),
            // It was there when the folder was listed: a snapshot was just given up.
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        files.filter_map(|file| len(file).transpose()).collect()
    }
}

/// Bytes of an image file that are no image's: headers, heads of chunks, paddings.
const HEADS_BYTES: u64 = 3 * GROUP_ALIGN;
/// The same for heads and paddings of many chunks, as a share of the images' bytes.
const HEADS_SHARE: u64 = 16;

/// An image file that stays.
struct NamedImageFile {
    len: u64,
    /// The most bytes that any kept snapshot names of it.
    live_bytes: u64,
}

impl NamedImageFile {
    /// The bytes that are named, with their heads: of a file in which nothing is wasted, all of it. Without
    /// the share of many chunks, one file of several that a snapshot frees would never fit.
    fn live_len(&self) -> u64 {
        self.len.min(self.live_bytes.saturating_add(self.live_bytes / HEADS_SHARE + HEADS_BYTES))
    }
}

/// The number of an image file or a table: they share one count.
fn number(file: FileName) -> Option<u64> {
    match file {
        FileName::Pages(number) | FileName::Table(number) => Some(number),
        _ => None,
    }
}

/// Whether replay from what stays may pass a restore, and so need its table.
fn is_needed(restored_at: Lsn, plan: &RetentionPlan) -> bool {
    plan.log_from.is_none_or(|(_, redo)| restored_at > redo)
}
