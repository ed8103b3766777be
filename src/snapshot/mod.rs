//! Snapshots: fuzzy, published in order, verified, and what they allow to be recycled.
//!
//! A snapshot stops no commit and no reader. In its phases:
//!
//! 1. **Begin** (a turn of the applier, and one for every thousand pages that it looks at): `redo` is the
//!    last batch applied; from here on the applier notes deletes; the pages are sorted into those that
//!    are to be gathered and those with a known image.
//! 2. **Gather** (a turn for each chunk): pages are copied aside on the device, in lane order with the
//!    deltas, each with its table entry of that moment; the copy drains to disk while commits go on.
//! 3. **End** (a turn): `end` is the last batch applied; root, numbers, and tombstones of pages that were
//!    deleted before they were gathered.
//! 4. **Sync** the image files and their names; wait until the log is durable up to `end` (I7).
//! 5. **Publish** the manifest. From this rename on a crash starts from here.
//! 6. **Verify**: read the manifest and the images back past the cache; record that in a seal. Images that
//!    the device copied to files in memory are read back by the device (`in_place.rs`).
//! 7. **Recycle** what neither a kept snapshot nor the log after the oldest of them needs (I8). The next
//!    snapshot writes over image files that are free (I13).
//!
//! An exact snapshot ends where it begins: pages that a batch is about to change are kept aside until
//! they are gathered (`applier/exact_cut.rs`), and all of phase 1 is one turn, with phase 3 in it.
//!
//! A crash in 1 to 4 leaves image files that nothing names; in 5 to 7, a snapshot that the next open
//! publishes and verifies again. No space in 2 to 5 is a clean failure, and so is a system that is short
//! of something, or in 2 a page on disk that cannot be read; everything else poisons: it may be unknown then
//! whether the manifest has its name.
//!
//! In phases 2 to 5 the order is that of I7. Were the manifest published before the sync of its images, a
//! power cut could leave it without them; before the log is durable, with pages that are newer than any
//! batch that recovery finds. Recycling comes after the verification: a disk that lied in 4 would
//! otherwise cost the old snapshot and the new one.

mod compact;
mod background;
mod bounds;
mod gather;
mod in_place;
mod overlays;
mod plan;
mod progress;
mod publication;
mod retain;
mod scrub;
mod thin_snapshot;
mod verify;

use std::ops::Range;
use std::sync::Arc;

use remanent_format::{PageId, SnapshotId};

pub(crate) use self::background::{BackgroundSnapshots, LastSnapshot, Rules};
use self::bounds::{End, SnapshotStart};
use self::gather::GatheredEntries;
use self::overlays::{GatherTarget, OverlayRules};
pub(crate) use self::progress::SnapshotProgress;
pub use self::progress::{SnapshotPhase, SnapshotStats};
pub use self::retain::PruneReport;
pub(crate) use self::retain::Subject;
pub(crate) use self::scrub::{Scrub, Scrubber};
pub use self::scrub::{ScrubReport, ScrubStats};
pub(crate) use self::verify::PROVERS_MAX;
use self::verify::{UnverifiedSnapshots, WrittenSnapshot};
use crate::base::pace::Pace;
use crate::base::sync::{Instant, Mutex};
use crate::catalog::{Catalog, CatalogLock, RetainedSnapshot, SnapshotInfo, SnapshotWork};
use crate::disk::source::DiskSource;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::numbers::ImageFiles;
use crate::images::{ImageOptions, ImageWriters, chunk_threads, file_count};
use crate::options::Retention;

/// Takes snapshots and recycles what they make superfluous.
pub(crate) struct Snapshots {
    pub engine: Arc<Engine>,
    /// The rules by which snapshots and log stay.
    pub retention: Retention,
    /// How images are written.
    pub images: ImageOptions,
    /// A chunk of images is written when it has this number of bytes.
    pub chunk_len: u64,
    /// Whether image files that nothing needs are kept, to be written again.
    pub keeps_spares: bool,
    /// Held while a snapshot is taken, so that there is one at a time: each follows the one before.
    pub catalog: CatalogLock,
    /// Published snapshots that license nothing yet (I7).
    pub unverified: UnverifiedSnapshots,
    pub progress: SnapshotProgress,
    /// The pace of snapshots in the background, and the call that ends them.
    pub pace: Arc<Pace>,
    /// How far the last snapshot goes: the next one is due by this.
    pub last: Mutex<LastSnapshot>,
}

/// The kind of snapshot that a caller wants.
#[derive(Clone, Debug, Default)]
pub(crate) struct SnapshotRequest {
    /// Its name; a snapshot with a name stays until the name is given up.
    pub name: Option<String>,
    /// Whether it is the state of one moment, so that `redo` is `end`.
    pub exact: bool,
    /// Whether it is written at the pace of background snapshots, and given up when the store closes.
    pub paced: bool,
    /// Whether nothing else is given up to make space for it on a full disk.
    pub keeps_others: bool,
    /// What is done once it is published.
    pub then: AfterPublication,
}

/// What follows the publication of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AfterPublication {
    /// It is verified, and what it makes superfluous is removed.
    #[default]
    Retain,
    /// It is verified, and nothing is removed for it.
    KeepAll,
    /// Both are left to a thread: [`Snapshots::attend_later`].
    Leave,
}

impl SnapshotRequest {
    /// How many threads may work on it at once. A paced snapshot is to be slow: it needs no help, and
    /// leaves all other cores to the threads that do not wait for it.
    fn threads_max(&self) -> usize {
        if self.paced { 1 } else { usize::MAX }
    }
}

impl Snapshots {
    /// Takes a snapshot, for the holder of the catalog's lock. Without space for it, takes it once more when
    /// deleted pages have given theirs back.
    pub fn take(&self, catalog: &mut Catalog, request: &SnapshotRequest) -> Result<SnapshotInfo> {
        // Under the catalog's lock: of two callers only one finds the last place in the queue.
        if request.then == AfterPublication::Leave && self.unverified.is_full() {
            self.finish(catalog)?;
        }
        // Tried in full first: a thin snapshot is one more link that replays follow.
        match self.take_once(catalog, request, false) {
            Err(full @ Error::DiskFull { .. }) if !request.keeps_others => match self.give_back(catalog) {
                Ok(true) => self.take_once(catalog, request, true),
                Ok(false) => Err(full),
                Err(error) if error.is_passing() => {
                    tracing::warn!(%error, "the space of deleted pages cannot be given back as yet");
                    Err(full)
                }
                Err(error) => Err(self.heard(error)),
            },
            taken => taken,
        }
    }

    /// Takes a snapshot before the store closes, if its log consists of too many runs. A process that is
    /// started often and ends soon is never alive long enough for the thread to take it, and each run
    /// takes a segment.
    pub fn take_at_close(&self) -> Result<()> {
        let last = *self.last.lock();
        if last.is_in_pieces() && self.engine.log.length().0 > last.lsn {
            self.take(&mut self.catalog.lock(), &SnapshotRequest::default())?;
        }
        Ok(())
    }

    /// Phases 6 and 7, as far as the request wants them now. What the snapshot replaces goes after all that
    /// it wrote was read back (I7).
    fn follow_up(&self, catalog: &mut Catalog, then: AfterPublication) -> Result<()> {
        if then == AfterPublication::Leave {
            self.unverified.owe_retention(true);
            return Ok(());
        }
        self.progress.enter(SnapshotPhase::Verify);
        self.verify(catalog)?;
        self.progress.enter(SnapshotPhase::Recycle);
        if then == AfterPublication::KeepAll {
            self.record(catalog, catalog.floor, |_| true)?;
            self.unverified.owe_retention(false);
            return Ok(());
        }
        self.retain(catalog)
    }

    /// All phases, once. A passing failure after the publication costs no snapshot. `is_short` says that the
    /// disk was full just now.
    fn take_once(
        &self,
        catalog: &mut Catalog,
        request: &SnapshotRequest,
        is_short: bool,
    ) -> Result<SnapshotInfo> {
        self.engine.poison.check()?;
        let _span = tracing::info_span!("snapshot", is_exact = request.exact).entered();
        // The length of the log before the snapshot begins: later commits count for the next one.
        let (began, (_, log_bytes)) = (Instant::now(), self.engine.log.length());
        // Space that came back to a full disk is the reserve's first: without the reserve no delete could
        // free more.
        self.engine.log.pool.fill().map_err(|error| self.heard(error))?;
        // Superfluous spares give way to images.
        let mut is_unreadable = false;
        let pool = &self.engine.log.pool;
        let written = pool.with_surplus(|| self.write(catalog, request, is_short, &mut is_unreadable));
        let taken = written.and_then(|id| {
            match self.follow_up(catalog, request.then) {
                Ok(()) => Ok(catalog.snapshots[&id].info.clone()),
                // It cannot be verified or recorded now. It stands all the same, because it is published;
                // only nothing is recycled for it as yet (I7).
                Err(error) if error.is_passing() => {
                    tracing::warn!(%error, snapshot = %id, "published; the next snapshot does the rest");
                    Ok(catalog.snapshots[&id].info.clone())
                }
                Err(error) => Err(error),
            }
        });
        let taken = taken.map_err(|error| if is_unreadable { error } else { self.heard(error) });
        match &taken {
            Ok(_) => self.engine.disk_pages.note_unreadable(None),
            Err(error) if is_unreadable => self.engine.disk_pages.note_unreadable(Some(error)),
            Err(_) => {}
        }
        if let Ok(info) = &taken {
            let bytes = i64::try_from(log_bytes).unwrap_or(i64::MAX);
            *self.last.lock() = LastSnapshot { lsn: info.end, bytes, restarts: 0, at: began };
        }
        // Before the end is announced: a caller that waits for it is to find the snapshot in the catalog.
        self.catalog.tell(catalog);
        self.progress.end(taken.as_ref().map(|info| info.id).map_err(Error::clone));
        taken
    }

    /// Poisons the store, unless the error says that nothing changed.
    fn heard(&self, error: Error) -> Error {
        match error {
            // Over budget: the pages that an exact snapshot keeps aside. The snapshot fails, and no batch
            // does.
            Error::Closed | Error::OutOfMemory { .. } | Error::OverBudget { .. } => error,
            error if error.is_passing() => error,
            error => self.engine.poison.set(error),
        }
    }

    /// The snapshots kept, oldest first.
    pub fn list(&self) -> Vec<SnapshotInfo> {
        self.catalog.list()
    }

    /// Reads images back that batches wrote ahead. Returns how many bytes of pages.
    pub fn prove_written_ahead(&self, catalog: &Catalog, threads_max: usize) -> Result<u64> {
        catalog.known.prove(&DiskSource::past_cache(self.engine.disk.clone()), threads_max)
    }

    /// Phases 1 to 5: writes a snapshot and publishes it.
    ///
    /// a. **Prove** images that batches wrote ahead: the manifest is to name them, so they are read back
    ///    first (I7).
    /// b. **Begin** (phase 1). Only now is `redo` known, and with it which files may belong to later
    ///    batches. A batch that takes a file's number after that lies above `redo`.
    /// c. **Gather** and **end** (phases 2 and 3). An end that was taken before would leave out batches
    ///    that the images already hold.
    /// d. **Stop watching**, whether that went well or not. Otherwise the applier would note deletes, and
    ///    keep pages aside, for a snapshot that nothing finishes.
    /// e. **Publish** (phases 4 and 5), once the snapshots with names are recorded. The manifest's number
    ///    counts as taken before: after a failure it may lie on the disk, and a name is never used for two
    ///    contents.
    /// f. **Keep** it: from now on it counts for retention, and waits to be verified (phase 6).
    ///
    /// `is_unreadable` is set if this fails because a page cannot be read from its image. That concerns the
    /// page alone: nothing names what was written, and the log has all that it had. Once the page is given
    /// new bytes, or deleted, a snapshot can be taken again.
    fn write(
        &self,
        catalog: &mut Catalog,
        request: &SnapshotRequest,
        is_short: bool,
        is_unreadable: &mut bool,
    ) -> Result<SnapshotId> {
        let threads_max = request.threads_max();
        // a.
        self.prove_written_ahead(catalog, threads_max)?;
        // b.
        // Without space no image is written again only to empty its file.
        let wasteful = if is_short { Vec::new() } else { self.wasteful_files(catalog)? };
        let overlays = self.overlay_rules(&catalog.known, &wasteful);
        let SnapshotStart { redo, sorted, end } = self.begin(catalog, wasteful, request.exact)?;
        let ahead_from = catalog.files.ahead_from(redo.lsn);
        // c.
        let plan = self.plan_files(catalog, &sorted, threads_max);
        let gathered = plan.and_then(|plan| {
            let gathered = self.gather_and_end(&catalog.files, &plan, &sorted.gather, overlays, end, request);
            Ok((gathered.map_err(|error| needing(plan.expected_bytes, error))?, plan))
        });
        // d.
        self.stop_watching()?;
        *is_unreadable = matches!(gathered, Err(Error::Damaged(_)));
        let (GatheredImages { writers, caught, end }, plan) = gathered?;
        // e.
        self.progress.enter(SnapshotPhase::Publish);
        let (follows, visited) = (sorted.follows, sorted.visited);
        // Not the plan's end: an overlay may lie over an image that was written since, for a batch that took
        // its page to disk.
        let next_file = catalog.files.next_number();
        let manifest = self.record_named(catalog).and_then(|()| {
            self.manifest(
                catalog.next_snapshot,
                request.name.clone(),
                redo,
                sorted,
                caught.entries,
                end,
                next_file,
                ahead_from,
            )
        });
        let manifest = match manifest {
            Ok(manifest) => manifest,
            Err(error) => {
                writers.into_iter().for_each(ImageWriters::abandon);
                return Err(error);
            }
        };
        catalog.next_snapshot += 1;
        let published =
            self.publish_newest(&catalog.known, writers.as_ref(), &manifest, follows, threads_max);
        let (file, (sums, links)) = match published {
            Ok(published) => published,
            // Only after these is it certain that no manifest names the images. After any other failure
            // it may have its name, and must not lose them.
            Err(error) if error.is_passing() => {
                writers.into_iter().for_each(ImageWriters::abandon);
                return Err(error);
            }
            Err(error) => return Err(error),
        };
        // f.
        let is_own = |file| plan.numbers.contains(&file);
        let kept = RetainedSnapshot::new(&manifest, is_own, sums, links, file.header_crc, false);
        let info = &kept.info;
        tracing::info!(
            snapshot = %info.id, redo = %info.redo, end = %info.end, bytes = info.bytes,
            bytes_written = info.bytes_written, visited, "snapshot published"
        );
        let id = info.id;
        let on_disk = caught.on_disk;
        self.unverified.push(WrittenSnapshot { snapshot: id, manifest: file, images: writers, on_disk });
        catalog.snapshots.insert(id, kept);
        Ok(id)
    }

    /// Chooses how many threads gather, and how many files they write. The files' numbers are taken for good.
    fn plan_files(&self, catalog: &Catalog, sorted: &SnapshotWork, threads_max: usize) -> Result<GatherPlan> {
        let gather_bytes = sorted.gather.iter().map(|(_, len)| len).sum();
        self.progress.begin(sorted.gather.len() as u64, gather_bytes);
        let longest = sorted.gather.iter().map(|(_, len)| (*len).min(self.piece_len())).max().unwrap_or(0);
        let threads = chunk_threads(longest).min(threads_max);
        let expected_bytes = self.expected_bytes(&sorted.gather)?;
        // A file for which there is no chunk would stay empty, and be kept for nothing.
        let chunks = self.chunk_count(&sorted.gather)?.max(1);
        let files = file_count(expected_bytes, self.chunk_len, threads).min(chunks);
        Ok(GatherPlan { expected_bytes, threads, numbers: catalog.files.take_numbers(files) })
    }

    /// Phases 2 and 3. After a failure the image files are gone: nothing names them yet.
    fn gather_and_end(
        &self,
        files: &ImageFiles,
        plan: &GatherPlan,
        pages: &[(PageId, u64)],
        overlays: OverlayRules,
        end: Option<End>,
        request: &SnapshotRequest,
    ) -> Result<GatheredImages> {
        let (writers, caught) = self.gather_into(files, plan, pages, overlays, request)?;
        match end.map_or_else(|| self.end(), Ok) {
            Ok(end) => Ok(GatheredImages { writers, caught, end }),
            Err(error) => {
                writers.into_iter().for_each(ImageWriters::abandon);
                Err(error)
            }
        }
    }

    /// Phase 2. Where nothing is to be gathered, no file is made.
    fn gather_into(
        &self,
        files: &ImageFiles,
        plan: &GatherPlan,
        pages: &[(PageId, u64)],
        overlays: OverlayRules,
        request: &SnapshotRequest,
    ) -> Result<(Option<ImageWriters>, GatheredEntries)> {
        if pages.is_empty() {
            return Ok((None, GatheredEntries::default()));
        }
        let GatherPlan { numbers, expected_bytes, threads, .. } = plan;
        let (store, threads_max) = (self.engine.store, request.threads_max());
        // A pace, or a caller that waits: the same number of threads compresses and reads back.
        let writers =
            ImageWriters::create(files, store, numbers.clone(), *expected_bytes, self.images, threads_max)?;
        self.progress.reused(writers.reused_count());
        let gathered = {
            let target = GatherTarget { writers: &writers, overlays };
            self.gather_all(&target, *threads, pages, request.paced)
        };
        match gathered {
            Ok(caught) => Ok((Some(writers), caught)),
            Err(error) => {
                writers.abandon();
                Err(error)
            }
        }
    }
}

/// Says what a snapshot needs that does not fit: all images that it writes. With the failed chunk alone,
/// a caller would free too little, and fail again at the next chunk.
fn needing(bytes: u64, error: Error) -> Error {
    match error {
        Error::DiskFull { file, needed, store } => Error::DiskFull { file, needed: needed.max(bytes), store },
        error => error,
    }
}

/// How pages are gathered: by how many threads, into which files.
struct GatherPlan {
    /// About how many bytes are written.
    expected_bytes: u64,
    threads: usize,
    /// The numbers of the image files.
    numbers: Range<u64>,
}

/// The outcome of phases 2 and 3.
struct GatheredImages {
    /// The image files; `None` if nothing had to be gathered.
    writers: Option<ImageWriters>,
    /// The entries of the pages that were gathered, in their order.
    caught: GatheredEntries,
    end: End,
}
