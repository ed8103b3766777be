//! Snapshots: fuzzy, published in order, verified, and what they allow to be recycled.
//!
//! A snapshot stops no commit and no reader. In its phases:
//!
//! 1. **Begin** (a turn of the applier, and one for every thousand pages that it looks at): `redo` is the
//!    last batch applied; from here on the applier notes deletes; the pages are sorted into those that
//!    are to be gathered and those with a known image.
//! 2. **Gather** (a turn a chunk): pages are copied aside on the device, in lane order with the deltas,
//!    each with its table entry of that moment; the copy drains to disk while commits go on.
//! 3. **End** (a turn): `end` is the last batch applied; root, numbers, and tombstones of pages that were
//!    deleted before they were gathered.
//! 4. **Sync** the image files and their names; wait until the log is durable up to `end` (I7).
//! 5. **Publish** the manifest. From this rename on a crash starts from here.
//! 6. **Verify**: read the manifest and the images back past the cache; record that in a seal.
//! 7. **Recycle** what neither a kept snapshot nor the log after the oldest of them needs (I8). The next
//!    snapshot writes over image files that are free (I13).
//!
//! An exact snapshot ends where it begins: pages that a batch is about to change are kept aside until
//! they are gathered (`applier/exact_cut.rs`), and all of phase 1 is one turn, with phase 3 in it.
//!
//! A crash in 1 to 4 leaves image files that nothing names; in 5 to 7, a snapshot that the next open
//! publishes and verifies again. No space in 2 to 5 is a clean failure, and so is a system that is short
//! of something; everything else poisons: it may be unknown then whether the manifest has its name.
//!
//! In phases 2 to 5 the order is that of I7. Were the manifest published before the sync of its images, a
//! power cut could leave it without them; before the log is durable, with pages that are newer than any
//! batch that recovery finds. Recycling comes after the verification: a disk that lied in 4 would
//! otherwise cost the old snapshot and the new one.

mod compact;
mod background;
mod gather;
mod plan;
mod progress;
mod retain;
mod scrub;
mod thin_snapshot;
mod verify;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind, Tombstone};
use remanent_format::{Epoch, LogPoint, Lsn, Metadata, PageId, SnapshotId};

pub(crate) use self::background::{BackgroundSnapshots, LastSnapshot, Rules};
use self::compact::CARRY_BYTES_MAX;
pub(crate) use self::progress::SnapshotProgress;
pub use self::progress::{SnapshotPhase, SnapshotStats};
pub use self::retain::PruneReport;
pub(crate) use self::retain::Subject;
pub(crate) use self::scrub::{Scrub, Scrubber};
pub use self::scrub::{ScrubReport, ScrubStats};
use self::verify::{UnverifiedSnapshots, WrittenSnapshot};
use crate::applier::{AppliedState, ExactCut, Turn};
use crate::base::allocation::{append, collected};
use crate::base::pace::Pace;
use crate::base::parallel;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::sync::{Instant, Mutex};
use crate::base::wall_clock::unix_ms;
use crate::catalog::publish::{PublishedFile, publish_unchecked};
use crate::catalog::{
    Beginning, Catalog, CatalogLock, ImageTotals, KnownImages, Link, NewestSnapshot, RetainedSnapshot,
    SnapshotInfo, SnapshotWork,
};
use crate::device::CommandList;
use crate::disk::source::DiskSource;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::numbers::ImageFiles;
use crate::images::{ImageOptions, ImageWriters, chunk_threads, file_count};
use crate::log::SpacePurpose;
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
            return Ok(());
        }
        self.progress.enter(SnapshotPhase::Verify);
        self.verify(catalog)?;
        self.progress.enter(SnapshotPhase::Recycle);
        if then == AfterPublication::KeepAll {
            return self.record(catalog, catalog.floor, |_| true);
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
        let written = self.engine.log.pool.with_surplus(|| self.write(catalog, request, is_short));
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
        let taken = taken.map_err(|error| self.heard(error));
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
    /// e. **Publish** (phases 4 and 5). The manifest's number counts as taken before: after a failure it
    ///    may lie on the disk, and a name is never used for two contents.
    /// f. **Keep** it: from now on it counts for retention, and waits to be verified (phase 6).
    fn write(&self, catalog: &mut Catalog, request: &SnapshotRequest, is_short: bool) -> Result<SnapshotId> {
        let threads_max = request.threads_max();
        // a.
        catalog.known.prove(&DiskSource::past_cache(self.engine.disk.clone()));
        // b.
        // Without space no image is written again only to empty its file.
        let wasteful = if is_short { Vec::new() } else { self.wasteful_files(catalog)? };
        let SnapshotStart { redo, sorted, end } = self.begin(catalog, wasteful, request.exact)?;
        let ahead_from = catalog.files.ahead_from(redo.lsn);
        // c.
        let plan = self.plan_files(catalog, &sorted, threads_max);
        let gathered = plan.and_then(|plan| {
            let gathered = self.gather_and_end(&catalog.files, &plan, &sorted.gather, end, request);
            Ok((gathered.map_err(|error| needing(plan.gather_bytes, error))?, plan))
        });
        // d.
        self.stop_watching()?;
        let (GatheredImages { writers, caught, end }, plan) = gathered?;
        // e.
        self.progress.enter(SnapshotPhase::Publish);
        let (follows, visited) = (sorted.follows, sorted.visited);
        let manifest = self.manifest(
            catalog.next_snapshot,
            request.name.clone(),
            redo,
            sorted,
            caught,
            end,
            &plan,
            ahead_from,
        );
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
        self.unverified.push(WrittenSnapshot { snapshot: id, manifest: file, images: writers });
        catalog.snapshots.insert(id, kept);
        Ok(id)
    }

    /// Phase 1. An exact snapshot looks at all its pages in one turn, any other at some of them a turn: a
    /// turn is a time in which no batch is applied, and going through a million pages took most of 0.35
    /// to 0.6 s.
    fn begin(&self, catalog: &Catalog, wasteful: Vec<(u64, u64)>, exact: bool) -> Result<SnapshotStart> {
        let known = catalog.known.clone();
        if exact {
            return self.engine.applier.turn(move |turn| {
                let pages = beginning(turn)?;
                let table = &mut turn.applied.table;
                let look = |pages: Vec<PageId>| {
                    let standings = known.look(table, None, &pages);
                    || standings
                };
                let sorted = known.sort_out(pages, &wasteful, CARRY_BYTES_MAX, look)?;
                // All in one turn: no batch is applied between the look at the pages and the cut that
                // keeps them.
                let end = Some(End::here(turn));
                turn.applied.cut = Some(ExactCut::new(sorted.gather.iter().map(|(page, _)| *page)));
                Ok(SnapshotStart { redo: turn.applied.point, sorted, end })
            });
        }
        // Deletes are noted from `redo` on, in the same turn: a delete in between would be noted nowhere,
        // and the gathering would miss a page of which nothing says that it is gone.
        let (redo, pages) = self.engine.applier.turn(|turn| {
            let pages = beginning(turn)?;
            turn.applied.deleted = Some(BTreeMap::new());
            Ok((turn.applied.point, pages))
        })?;
        let look = |pages: Vec<PageId>| {
            let known = known.clone();
            self.engine.applier.queue_turn(move |turn| {
                let AppliedState { table, deleted, .. } = turn.applied;
                known.look(table, deleted.as_ref(), &pages)
            })
        };
        match known.sort_out(pages, &wasteful, CARRY_BYTES_MAX, look) {
            Ok(sorted) => Ok(SnapshotStart { redo, sorted, end: None }),
            Err(error) => {
                // The applier notes deletes for a snapshot that does not come.
                self.stop_watching()?;
                Err(error)
            }
        }
    }

    /// Chooses how many threads gather, and how many files they write. The files' numbers are taken for good.
    fn plan_files(&self, catalog: &Catalog, sorted: &SnapshotWork, threads_max: usize) -> Result<GatherPlan> {
        let gather_bytes = sorted.gather.iter().map(|(_, len)| len).sum();
        self.progress.begin(sorted.gather.len() as u64, gather_bytes);
        let longest = sorted.gather.iter().map(|(_, len)| (*len).min(self.piece_len())).max().unwrap_or(0);
        let threads = chunk_threads(longest).min(threads_max);
        // A file for which there is no chunk would stay empty, and be kept for nothing.
        let chunks = self.chunk_count(&sorted.gather)?.max(1);
        let files = file_count(gather_bytes, self.chunk_len, threads).min(chunks);
        Ok(GatherPlan { gather_bytes, threads, numbers: catalog.files.take_numbers(files) })
    }

    /// Phases 2 and 3. After a failure the image files are gone: nothing names them yet.
    fn gather_and_end(
        &self,
        files: &ImageFiles,
        plan: &GatherPlan,
        pages: &[(PageId, u64)],
        end: Option<End>,
        request: &SnapshotRequest,
    ) -> Result<GatheredImages> {
        let (writers, caught) = self.gather_into(files, plan, pages, request)?;
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
        request: &SnapshotRequest,
    ) -> Result<(Option<ImageWriters>, Vec<ManifestEntry>)> {
        if pages.is_empty() {
            return Ok((None, Vec::new()));
        }
        let GatherPlan { numbers, gather_bytes, threads } = plan;
        let (store, threads_max) = (self.engine.store, request.threads_max());
        // A pace, or a caller that waits: the same number of threads compresses and reads back.
        let writers =
            ImageWriters::create(files, store, numbers.clone(), *gather_bytes, self.images, threads_max)?;
        self.progress.reused(writers.reused_count());
        match self.gather_all(&writers, *threads, pages, request.paced) {
            Ok(caught) => Ok((Some(writers), caught)),
            Err(error) => {
                writers.abandon();
                Err(error)
            }
        }
    }

    /// Phase 3: the last batch applied, with the root and the numbers of that moment.
    fn end(&self) -> Result<End> {
        self.engine.applier.turn(|turn| Ok(End::here(turn)))
    }

    /// Ends what the applier does for a snapshot between its begin and its end.
    fn stop_watching(&self) -> Result<()> {
        self.engine.applier.turn(|turn| {
            // Nothing notes deletes any more: the table of them would grow as long as the store is open.
            turn.applied.deleted = None;
            if let Some(cut) = turn.applied.cut.take() {
                // Copies to pages kept aside may be in flight: their memory goes after them in the lane.
                let last_use = turn.submit(CommandList::default())?.fence();
                cut.retire(turn.arena, last_use);
            }
            Ok(())
        })
    }

    /// Puts the manifest together: entries that were known before, those that were gathered, and
    /// tombstones of pages that were deleted meanwhile.
    #[expect(clippy::too_many_arguments, reason = "a manifest says all of this, and is put together once")]
    fn manifest(
        &self,
        number: u64,
        name: Option<String>,
        redo: LogPoint,
        sorted: SnapshotWork,
        caught: Vec<ManifestEntry>,
        end: End,
        plan: &GatherPlan,
        ahead_from: u64,
    ) -> Result<Manifest> {
        Ok(Manifest {
            kind: sorted.follows.map_or(ManifestKind::Base, |(previous, previous_crc)| {
                ManifestKind::Change { previous, previous_crc }
            }),
            store: self.engine.store,
            snapshot: SnapshotId(number),
            name,
            created_unix_ms: unix_ms(),
            redo,
            end: end.point.lsn,
            next_page: end.next_page,
            epoch_high: end.epoch_high,
            next_file: plan.numbers.end,
            ahead_from,
            tombstones: tombstones(&sorted, &caught, redo.lsn, &end.deleted)?,
            entries: in_order(sorted.entries, caught)?,
            root: end.root,
        })
    }

    /// Phases 4 and 5, after which the catalog of known images goes on to this snapshot. Returns what it
    /// names, together, and the links before it.
    ///
    /// The known images go on only once it is published: after a failure the next snapshot follows the
    /// one before.
    fn publish_newest(
        &self,
        known: &KnownImages,
        writers: Option<&ImageWriters>,
        manifest: &Manifest,
        follows: Option<(SnapshotId, u32)>,
        threads_max: usize,
    ) -> Result<(PublishedFile, (ImageTotals, Vec<SnapshotId>))> {
        let publish = || self.publish_all(writers, manifest, threads_max);
        let Some((previous, _)) = follows else {
            // It names all pages: its form in memory is made while it is written.
            let base = || NewestSnapshot::of_base(manifest);
            let (base, published) = if threads_max == 1 {
                let published = publish();
                (base(), published)
            } else {
                parallel::join(base, publish)
            };
            let published = published?;
            let named = known.advance_to_base(manifest, published.header_crc, base);
            return Ok((published, named));
        };
        let link = Link::of(manifest, 0)?;
        let published = publish()?;
        let link = Link { manifest_crc: published.header_crc, ..link };
        let named = known.advance_by_change(manifest, link, previous);
        Ok((published, named))
    }

    /// Phases 4 and 5: I7, step by step.
    ///
    /// 1. **Sync** the image files and their names. A manifest that is published before could name bytes
    ///    that a power cut takes away.
    /// 2. **Wait** until the log is durable up to `end`. An image may hold batches up to there: published
    ///    before, a crash could lose their frames, and leave pages of a state that no prefix of the log
    ///    has.
    /// 3. **Publish** the manifest. From this rename on a crash starts from here.
    fn publish_all(
        &self,
        writers: Option<&ImageWriters>,
        manifest: &Manifest,
        threads_max: usize,
    ) -> Result<PublishedFile> {
        assert!(manifest.redo.lsn <= manifest.end); // I7: a replay from `redo` comes to `end`.
        writers.map_or(Ok(()), ImageWriters::sync)?;
        self.engine.log.wait_durable(manifest.end)?;
        assert!(manifest.end <= self.engine.log.durable()); // I7: the manifest's end is a mark (I4).
        self.publish_manifest(manifest, threads_max)
    }

    /// Publishes a manifest, by up to `threads_max` threads. On a full disk it may use the reserve.
    fn publish_manifest(&self, manifest: &Manifest, threads_max: usize) -> Result<PublishedFile> {
        let _phase = phases::enter(Phase::Publish);
        // A manifest without images takes little, and gives back what deleted pages took. So it may go
        // deeper into the reserve, as a seal may.
        let purpose = if manifest.entries.is_empty() { SpacePurpose::Seal } else { SpacePurpose::User };
        let spare = |temporary, len| self.engine.log.make_small(temporary, len, purpose);
        loop {
            match publish_unchecked(&self.engine.disk, manifest, threads_max, &spare) {
                // Without it the images would have been written for nothing. One spare may be too little for
                // one that is longer than a spare.
                Err(Error::DiskFull { .. }) if self.engine.log.release_one(purpose)? => {}
                published => return published,
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

/// The pages that a snapshot begins with, at the moment of a turn.
fn beginning(turn: &mut Turn<'_>) -> Result<Beginning> {
    let table = &mut turn.applied.table;
    let changed = table.changed().map_err(Error::of_memory)?;
    Ok(Beginning { changed, count: table.pages().len() })
}

/// The outcome of phase 1: where the snapshot begins, and what it has to do.
struct SnapshotStart {
    redo: LogPoint,
    sorted: SnapshotWork,
    /// The end of an exact snapshot, which ends where it begins.
    end: Option<End>,
}

/// How pages are gathered: by how many threads, into which files.
struct GatherPlan {
    /// The lengths of the pages to gather, together.
    gather_bytes: u64,
    threads: usize,
    /// The numbers of the image files.
    numbers: Range<u64>,
}

/// The outcome of phases 2 and 3.
struct GatheredImages {
    /// The image files; `None` if nothing had to be gathered.
    writers: Option<ImageWriters>,
    /// The entries of the pages that were gathered, in their order.
    caught: Vec<ManifestEntry>,
    end: End,
}

/// The state at a snapshot's end: all of it but the pages.
struct End {
    point: LogPoint,
    root: Arc<Metadata>,
    /// The next page id: ids of deleted pages are not in the table, and must not come again.
    next_page: u64,
    /// The highest epoch ever given: a page that is made later must not repeat one.
    epoch_high: Epoch,
    /// The pages that were deleted since the snapshot began, each with its batch.
    deleted: BTreeMap<PageId, Lsn>,
}

impl End {
    /// Takes the state at the moment of a turn, between two batches.
    fn here(turn: &mut Turn<'_>) -> Self {
        let table = &turn.applied.table;
        Self {
            point: turn.applied.point,
            root: table.root().clone(),
            next_page: table.next_page(),
            epoch_high: table.epoch_high(),
            deleted: turn.applied.deleted.take().unwrap_or_default(),
        }
    }
}

/// The pages that were to be gathered and were deleted before they could be; and, in a change, those that
/// were gone when it began. Without tombstones, replay would meet batches of pages that no entry has, and
/// the link before would bring others back.
fn tombstones(
    sorted: &SnapshotWork,
    caught: &[ManifestEntry],
    redo: Lsn,
    deleted: &BTreeMap<PageId, Lsn>,
) -> Result<Vec<Tombstone>> {
    // Both lists ascend. Mostly all pages are caught, and none has to be looked for.
    let mut caught = caught.iter().peekable();
    let all_are_caught = caught.len() == sorted.gather.len();
    let mut is_caught = |page| all_are_caught || caught.next_if(|entry| entry.page == page).is_some();
    let missed = sorted.gather.iter().filter(|(page, _)| !is_caught(*page));
    let missed = missed.map(|(page, _)| Tombstone {
        page: *page,
        lsn: *deleted.get(page).expect("a page that could not be gathered was deleted"),
    });
    // Replay begins after their deletion, so any Lsn up to `redo` will do.
    let gone = sorted.gone.iter().filter(|_| sorted.follows.is_some());
    let gone = gone.map(|page| Tombstone { page: *page, lsn: redo });
    let mut tombstones = collected(missed.chain(gone))?;
    tombstones.sort_unstable_by_key(|tombstone| tombstone.page);
    Ok(tombstones)
}

/// All entries in the order of their pages: those with known images, and those that were gathered.
fn in_order(known: Vec<ManifestEntry>, caught: Vec<ManifestEntry>) -> Result<Vec<ManifestEntry>> {
    let mut entries = known;
    if entries.is_empty() {
        return Ok(caught);
    }
    append(&mut entries, caught)?;
    // No page is among both. (A stable sort takes memory that cannot be refused.)
    entries.sort_unstable_by_key(|entry| entry.page);
    Ok(entries)
}
