//! Snapshots: fuzzy by default, published in order, verified, and the basis for recycling files.
//!
//! A snapshot blocks neither commits nor readers. Its phases:
//!
//! 1. **Begin**: `redo` is the last batch applied. From here on, the applier records deletes. Between batches, a
//!    thousand at a time, pages are divided into pages to gather and pages that already have a known image.
//! 2. **Gather**: between two batches, the device copies the pages of one chunk, and their table entries are captured.
//!    The copies are written to disk while commits continue.
//! 3. **End**: `end` is the last batch applied. The root, the counters, and tombstones for pages deleted before they
//!    were gathered are captured at the same time.
//! 4. **Sync** the image files and their directory entries, then wait until the log is durable up to `end` (I7).
//! 5. **Publish** the manifest. After this rename, recovery starts from the new snapshot.
//! 6. **Verify**: read the manifest and the images back, bypassing the page cache, and record the result in a seal. The
//!    device reads back the images that it copied to in-memory files (`in_place.rs`).
//! 7. **Recycle** the files that neither a kept snapshot nor the log after the oldest kept snapshot needs (I8). The
//!    next snapshot overwrites the image files freed in this phase (I13).
//!
//! An exact snapshot ends where it begins. The old bytes of a page that a batch is about to change are kept until the
//! page is gathered (`applier/exact_cut.rs`). Phases 1 and 3 then run together, between the same two batches.
//!
//! A crash in phases 1 to 4 leaves image files that no manifest names. A crash in phases 5 to 7 leaves a snapshot that
//! the next open publishes and verifies again. Three failures leave the store unchanged: a full disk or a shortage of
//! another system resource in phases 2 to 5, and an unreadable page on disk in phase 2. Any other error poisons the
//! store, because it may be unknown whether the manifest has its name.
//!
//! Phases 2 to 5 follow the order that I7 requires. If the manifest were published before its images are synced, a
//! power cut could lose the images. If the manifest were published before the log is durable, its pages could be newer
//! than any batch that recovery finds. Recycling follows verification because a disk may report a sync in phase 4 that
//! it did not perform. Recycling first would then lose both the old and the new snapshot.

mod compact;
mod background;
mod bounds;
mod gather;
mod in_place;
mod overlays;
mod plan;
pub(crate) mod progress;
mod publication;
mod retain;
pub(crate) mod scrub;
mod thin_snapshot;
mod verify;

use std::ops::Range;
use std::sync::Arc;

use remanent_format::{LogPoint, PageId, SnapshotId};

pub(crate) use self::background::{BackgroundSnapshots, LastSnapshot, Rules};
use self::bounds::{End, SnapshotStart};
use self::gather::GatheredEntries;
use self::overlays::{GatherTarget, OverlayRules};
pub use self::progress::SnapshotPhase;
pub(crate) use self::progress::SnapshotProgress;
use self::publication::ManifestParts;
pub use self::retain::PruneReport;
pub(crate) use self::retain::RetentionContext;
pub use self::scrub::ScrubReport;
pub(crate) use self::scrub::{Scrub, Scrubber};
pub(crate) use self::verify::PROVERS_MAX;
use self::verify::{UnverifiedSnapshots, WrittenSnapshot};
use crate::base::pace::Pace;
use crate::base::sync::{Instant, Mutex};
pub use crate::catalog::SnapshotInfo;
use crate::catalog::{Catalog, CatalogLock, RetainedSnapshot, SnapshotWork};
use crate::disk::source::DiskSource;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::numbers::ImageFiles;
use crate::images::{ImageWriters, chunk_threads, file_count};
use crate::options::{ImageOptions, Retention};

/// Takes, publishes and verifies the snapshots of a store, and recycles the files that they supersede.
pub(crate) struct Snapshots {
    pub engine: Arc<Engine>,
    /// The rules for the snapshots and the log to keep.
    pub retention: Retention,
    /// The options for writing images, such as compression.
    pub images: ImageOptions,
    /// The number of bytes of images in one chunk, which is the unit of gathering and writing.
    pub chunk_len: u64,
    /// Whether unneeded image files are kept as spares and overwritten by later images.
    pub keeps_spares: bool,
    /// The catalog of kept snapshots. Its lock is held while a snapshot is taken, so that snapshots are taken one at a
    /// time.
    pub catalog: CatalogLock,
    /// The published snapshots that are not verified yet. Until they are, no file is recycled (I7).
    pub unverified: UnverifiedSnapshots,
    pub progress: SnapshotProgress,
    /// The rate limit of background snapshots, and the signal that cancels them.
    pub pace: Arc<Pace>,
    /// The last batch and the time of the last snapshot, with which the background thread decides when the next one is
    /// due.
    pub last: Mutex<LastSnapshot>,
}

/// The options of one snapshot, as requested by a caller or by the background thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct SnapshotRequest {
    /// The snapshot's name, or `None`. A named snapshot is kept until its name is removed.
    pub name: Option<String>,
    /// Whether the snapshot captures the state after a single batch, so that `redo` equals `end`.
    pub exact: bool,
    /// Whether the snapshot is written at the background rate. Such a snapshot is abandoned when the store closes.
    pub paced: bool,
    /// Whether older snapshots must be kept even if the disk is too full for this snapshot.
    pub keeps_others: bool,
    /// The verification and retention to run after the snapshot is published.
    pub then: AfterPublication,
}

/// The verification and retention that follow the publication of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AfterPublication {
    /// Verifies the snapshot, and removes the files that the snapshot supersedes.
    #[default]
    Retain,
    /// Verifies the snapshot, and keeps all older snapshots and their files.
    KeepAll,
    /// Leaves verification and retention to a background thread, which [`Snapshots::attend_later`] starts.
    Leave,
}

impl SnapshotRequest {
    /// Returns the maximum number of threads for this snapshot. A rate-limited snapshot uses one thread, which leaves
    /// the other cores free.
    fn threads_max(&self) -> usize {
        if self.paced { 1 } else { usize::MAX }
    }
}

impl Snapshots {
    /// Takes a snapshot. The caller must hold the catalog lock. If the disk is full, frees the space of deleted pages
    /// and tries again once.
    pub fn take(&self, catalog: &mut Catalog, request: &SnapshotRequest) -> Result<SnapshotInfo> {
        // Checked under the catalog lock, so that two callers cannot both take the last place in the queue of
        // unverified snapshots.
        if request.then == AfterPublication::Leave && self.unverified.is_full() {
            self.finish(catalog)?;
        }
        // A full snapshot is tried first, because a thin snapshot adds a link that every replay must follow.
        match self.take_once(catalog, request, false) {
            Err(full @ Error::DiskFull { .. }) if !request.keeps_others => {
                match self.release_empty(catalog) {
                    Ok(true) => self.take_once(catalog, request, true),
                    Ok(false) => Err(full),
                    Err(error) if error.is_passing() => {
                        tracing::warn!(%error, "cannot free the space of deleted pages yet");
                        Err(full)
                    }
                    Err(error) => Err(self.poison_unless_harmless(error)),
                }
            }
            taken => taken,
        }
    }

    /// Takes a snapshot when the store closes, if too many openings of the store follow the last snapshot. Each opening
    /// creates a log segment, and a process that is restarted often may never run long enough for a background
    /// snapshot.
    pub fn take_at_close(&self) -> Result<()> {
        let last = *self.last.lock();
        if last.is_in_pieces() && self.engine.log.length().0 > last.lsn {
            self.take(&mut self.catalog.lock(), &SnapshotRequest::default())?;
        }
        Ok(())
    }

    /// Verifies the published snapshot and removes superseded files (phases 6 and 7), or leaves this to the background
    /// thread if `then` is [`AfterPublication::Leave`]. Files are removed only after every file of the snapshot was
    /// read back (I7).
    fn follow_up(&self, catalog: &mut Catalog, then: AfterPublication) -> Result<()> {
        if then == AfterPublication::Leave {
            self.unverified.set_retention_pending(true);
            return Ok(());
        }
        self.progress.enter(SnapshotPhase::Verify);
        self.verify(catalog)?;
        self.progress.enter(SnapshotPhase::Recycle);
        if then == AfterPublication::KeepAll {
            self.record(catalog, catalog.floor, |_| true)?;
            self.unverified.set_retention_pending(false);
            return Ok(());
        }
        self.retain(catalog)
    }

    /// Performs all phases once. A shortage of memory or disk space after publication does not fail the snapshot.
    /// `is_short` states whether a previous attempt found the disk full.
    fn take_once(
        &self,
        catalog: &mut Catalog,
        request: &SnapshotRequest,
        is_short: bool,
    ) -> Result<SnapshotInfo> {
        self.engine.poison.check()?;
        let _span = tracing::info_span!("snapshot", is_exact = request.exact).entered();
        // The length of the log before the snapshot begins: later commits count towards the next snapshot.
        let (began, (_, log_bytes)) = (Instant::now(), self.engine.log.length());
        // On a full disk, freed space refills the reserve first, because without the reserve no delete could free more.
        // The length of the images is not known yet.
        self.engine.log.pool.fill(u64::MAX).map_err(|error| self.poison_unless_harmless(error))?;
        // Surplus spares are released if images need the space.
        let written = self.engine.log.pool.with_surplus(|| self.write(catalog, request, is_short));
        let taken = match written {
            Ok(WriteOutcome::Published(id)) => match self.follow_up(catalog, request.then) {
                Ok(()) => Ok(catalog.snapshots[&id].info.clone()),
                // The snapshot cannot be verified or recorded now. It is published and therefore valid, but no files
                // may be recycled for it yet (I7).
                Err(error) if error.is_passing() => {
                    tracing::warn!(%error, snapshot = %id, "published; verification is left to the next snapshot");
                    Ok(catalog.snapshots[&id].info.clone())
                }
                Err(error) => Err(self.poison_unless_harmless(error)),
            },
            Ok(WriteOutcome::Unreadable(error)) => {
                self.engine.disk_pages.note_unreadable(Some(&error));
                Err(error)
            }
            Err(error) => Err(self.poison_unless_harmless(error)),
        };
        if let Ok(info) = &taken {
            self.engine.disk_pages.note_unreadable(None);
            let bytes = i64::try_from(log_bytes).unwrap_or(i64::MAX);
            *self.last.lock() = LastSnapshot { lsn: info.end, bytes, restarts: 0, at: began };
        }
        // The catalog is updated before the end is announced, because a caller that waits for the end then looks the
        // snapshot up in the catalog.
        self.catalog.publish_copy(catalog);
        self.progress.end(taken.as_ref().map(|info| info.id).map_err(Error::clone));
        taken
    }

    /// Poisons the store unless `error` leaves the store unchanged, and returns `error`.
    fn poison_unless_harmless(&self, error: Error) -> Error {
        match error {
            // `OverBudget`: the budget had no room for copies of pages that an exact snapshot preserves. Only the
            // snapshot fails, not the batches.
            Error::Closed | Error::OutOfMemory { .. } | Error::OverBudget { .. } => error,
            error if error.is_passing() => error,
            error => self.engine.poison.set(error),
        }
    }

    /// Returns the kept snapshots, oldest first.
    pub fn list(&self) -> Vec<SnapshotInfo> {
        self.catalog.list()
    }

    /// Reads back the images that were written before their batches were logged. Returns the number of page bytes read.
    pub fn verify_pending_images(&self, catalog: &Catalog, threads_max: usize) -> Result<u64> {
        catalog.known.prove(&DiskSource::bypassing_cache(self.engine.disk.clone()), threads_max)
    }

    /// Runs phases 1 to 5: writes a snapshot and publishes it.
    ///
    /// a. **Prove** the images that were written before their batches were logged, and the images that earlier
    ///    snapshots name. The manifest will name these images, so they are read back first (I7). A snapshot whose
    ///    verification is left to the background thread does not wait: its manifest names the images of batches
    ///    immediately, and phase 6 reads them back. Until then the previous snapshot and the log after it are kept.
    ///    However, such a snapshot does wait if the previous snapshot has a name, because an open finds the previous
    ///    snapshot only through its record.
    ///
    /// b. **Begin** (phase 1). This phase determines `redo`, and with it the files that may belong to later batches. A
    /// batch that takes a file number after this phase is above `redo`.
    ///
    /// c. **Gather** and **end** (phases 2 and 3). An end taken before gathering would omit batches that the images
    /// already contain.
    ///
    /// d. **Stop watching**, whether step c succeeded or not. Otherwise the applier would continue to record deletes
    /// and to preserve pages for a snapshot that is never finished.
    ///
    /// e. **Publish** (phases 4 and 5), once all named snapshots are recorded. The manifest number counts as used
    /// before the attempt, because after a failure the file may exist on disk, and a file name is never used for two
    /// contents.
    ///
    /// f. **Keep** the snapshot: it now counts for retention and waits for verification (phase 6).
    fn write(
        &self,
        catalog: &mut Catalog,
        request: &SnapshotRequest,
        is_short: bool,
    ) -> Result<WriteOutcome> {
        self.verify_earlier(catalog, request)?; // a
        // On a full disk, no images are rewritten merely to empty their file.
        let wasteful = if is_short { Vec::new() } else { self.wasteful_files(catalog)? };
        let overlays = self.overlay_rules(&catalog.known, &wasteful);
        let SnapshotStart { redo, sorted, end } = self.begin(catalog, wasteful, request.exact)?; // b
        let ahead_from = catalog.files.ahead_from(redo.lsn);
        let gathered = self.gather_and_end(&catalog.files, &sorted.gather, overlays, end, request); // c
        self.stop_watching()?; // d
        if let Err(error @ Error::Damaged(_)) = gathered {
            return Ok(WriteOutcome::Unreadable(error));
        }
        let images = gathered?;
        let published =
            self.publish_gathered(catalog, request, SortedPages { redo, sorted, ahead_from }, images)?; // e
        Ok(WriteOutcome::Published(self.keep(catalog, published))) // f
    }

    /// Performs step e of [`Snapshots::write`]. On failure, the image files are removed, unless a published manifest
    /// may name them.
    fn publish_gathered(
        &self,
        catalog: &mut Catalog,
        request: &SnapshotRequest,
        pages: SortedPages,
        images: GatheredImages,
    ) -> Result<PublishedSnapshot> {
        self.progress.enter(SnapshotPhase::Publish);
        let SortedPages { redo, sorted, ahead_from } = pages;
        let (follows, visited) = (sorted.follows, sorted.visited);
        let GatheredImages { writers, numbers, gathered_entries, end } = images;
        let GatheredEntries { entries, on_disk } = gathered_entries;
        // This number may exceed those in the plan: the base of an overlay may be an image that was written during this
        // snapshot, for a batch that moved a page to disk.
        let next_file = catalog.files.next_number();
        let manifest = self.record_named(catalog).and_then(|()| {
            let manifest = self.manifest(ManifestParts {
                snapshot: SnapshotId(catalog.next_snapshot),
                name: request.name.clone(),
                redo,
                sorted,
                gathered_entries: entries,
                end,
                next_file,
                ahead_from,
            })?;
            let of_batches = catalog.known.unverified_in(&manifest.entries)?;
            Ok((manifest, of_batches))
        });
        let (manifest, of_batches) = match manifest {
            Ok(manifest) => manifest,
            Err(error) => {
                writers.into_iter().for_each(ImageWriters::abandon);
                return Err(error);
            }
        };
        catalog.next_snapshot += 1;
        let threads_max = request.threads_max();
        let is_own = |file| numbers.contains(&file);
        match self.publish_newest(&catalog.known, writers.as_ref(), &manifest, follows, threads_max) {
            Ok((file, (sums, links))) => Ok(PublishedSnapshot {
                kept: RetainedSnapshot::new(&manifest, is_own, sums, links, file.header_crc, false),
                written: WrittenSnapshot {
                    snapshot: manifest.snapshot,
                    manifest: file,
                    images: writers,
                    of_batches,
                    on_disk,
                },
                visited,
            }),
            // Only these errors guarantee that no manifest names the images. After any other error, a published
            // manifest may need them.
            Err(error) if error.is_passing() => {
                writers.into_iter().for_each(ImageWriters::abandon);
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Performs step f of [`Snapshots::write`].
    fn keep(&self, catalog: &mut Catalog, published: PublishedSnapshot) -> SnapshotId {
        let PublishedSnapshot { kept, written, visited } = published;
        let info = &kept.info;
        tracing::info!(
            snapshot = %info.id, redo = %info.redo, end = %info.end, bytes = info.bytes,
            bytes_written = info.bytes_written, visited, "snapshot published"
        );
        let id = info.id;
        self.unverified.push(written);
        catalog.snapshots.insert(id, kept);
        id
    }

    /// Verifies the images that must be verified before the snapshot names them.
    fn verify_earlier(&self, catalog: &mut Catalog, request: &SnapshotRequest) -> Result<()> {
        let names_unverified = request.then == AfterPublication::Leave;
        if self.unverified.names_batch_images() && (!names_unverified || !catalog.are_named_recorded()) {
            self.verify(catalog)?;
        }
        if !names_unverified {
            self.verify_pending_images(catalog, request.threads_max())?;
        }
        catalog.known.set_names_unverified(names_unverified);
        Ok(())
    }

    /// Chooses the number of gathering threads and of image files, and assigns the files' numbers.
    fn plan_files(
        &self,
        files: &ImageFiles,
        pages: &[(PageId, u64)],
        threads_max: usize,
    ) -> Result<GatherPlan> {
        let gather_bytes = pages.iter().map(|(_, len)| len).sum();
        self.progress.begin(pages.len() as u64, gather_bytes);
        let longest = pages.iter().map(|(_, len)| (*len).min(self.piece_len())).max().unwrap_or(0);
        let threads = chunk_threads(longest).min(threads_max);
        let expected_bytes = self.expected_bytes(pages)?;
        // There are at most as many files as chunks, because an empty file would be kept like any other.
        let chunks = self.chunk_count(pages)?.max(1);
        let count = file_count(expected_bytes, self.chunk_len, threads).min(chunks);
        Ok(GatherPlan { expected_bytes, threads, numbers: files.take_numbers(count) })
    }

    /// Performs phases 2 and 3. On failure the image files are removed, because no record names them yet.
    fn gather_and_end(
        &self,
        files: &ImageFiles,
        pages: &[(PageId, u64)],
        overlays: OverlayRules,
        end: Option<End>,
        request: &SnapshotRequest,
    ) -> Result<GatheredImages> {
        let plan = self.plan_files(files, pages, request.threads_max())?;
        let needing_all = |error| needing(plan.expected_bytes, error);
        let (writers, gathered_entries) =
            self.gather_into(files, &plan, pages, overlays, request).map_err(needing_all)?;
        match end.map_or_else(|| self.end(), Ok) {
            Ok(end) => Ok(GatheredImages { writers, numbers: plan.numbers, gathered_entries, end }),
            Err(error) => {
                writers.into_iter().for_each(ImageWriters::abandon);
                Err(needing_all(error))
            }
        }
    }

    /// Performs phase 2. Creates no image file if no page must be gathered.
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
        // The thread limit also applies to compression and read-back.
        let writers =
            ImageWriters::create(files, store, numbers.clone(), *expected_bytes, self.images, threads_max)?;
        self.progress.reused(writers.reused_count());
        let gathered = {
            let target = GatherTarget { writers: &writers, overlays };
            self.gather_all(&target, *threads, pages, request.paced)
        };
        match gathered {
            Ok(gathered_entries) => Ok((Some(writers), gathered_entries)),
            Err(error) => {
                writers.abandon();
                Err(error)
            }
        }
    }
}

/// Replaces the number of bytes in a disk-full error by the length of all images of the snapshot. The failed write may
/// have been a single chunk, and a caller that freed only so much space would fail again at a later chunk.
fn needing(bytes: u64, error: Error) -> Error {
    match error {
        Error::DiskFull { file, needed, store } => Error::DiskFull { file, needed: needed.max(bytes), store },
        error => error,
    }
}

/// The number of gathering threads of a snapshot, and the image files that the threads write.
struct GatherPlan {
    /// The estimated length of all images in bytes.
    expected_bytes: u64,
    threads: usize,
    /// The numbers assigned to the image files.
    numbers: Range<u64>,
}

/// The result of phases 2 and 3: the images and manifest entries of the gathered pages, and the snapshot's end.
struct GatheredImages {
    /// The writers of the image files, or `None` if the snapshot gathers no pages.
    writers: Option<ImageWriters>,
    /// The numbers assigned to the image files.
    numbers: Range<u64>,
    /// The entries of the gathered pages, in page order.
    gathered_entries: GatheredEntries,
    end: End,
}

/// The result of phase 1 that a manifest needs, in addition to the gathered pages.
struct SortedPages {
    redo: LogPoint,
    /// The entries of unchanged pages, and the pages to gather.
    sorted: SnapshotWork,
    /// A file number. Each file with a lower number that was written for a batch belongs to a batch up to `redo`.
    ahead_from: u64,
}

/// A snapshot after phase 5, which is neither in the catalog nor verified yet.
struct PublishedSnapshot {
    kept: RetainedSnapshot,
    written: WrittenSnapshot,
    /// The number of pages that were classified.
    visited: usize,
}

/// The result of [`Snapshots::write`].
enum WriteOutcome {
    Published(SnapshotId),
    /// A page cannot be read from its image. The failure affects the page alone, because no record names the files
    /// written so far, and the log is intact. A snapshot can be taken again once the page is overwritten or deleted.
    Unreadable(Error),
}
