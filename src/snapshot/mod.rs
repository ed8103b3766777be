//! Snapshots: fuzzy, published in order, verified, and what they allow to be recycled.
//!
//! A snapshot stops nobody. In its phases:
//!
//! 1. **Begin** (a turn of the applier, and one for every thousand pages that it looks at): `redo` is the
//!    last batch applied; from here on the applier notes deletes; sort the pages into those that are to be
//!    gathered and those of which an image is known.
//! 2. **Gather** (a turn a chunk): pages are copied aside on the device, in lane order with the deltas,
//!    each with its table entry of that moment; the copy drains to disk while commits go on.
//! 3. **End** (a turn): `end` is the last batch applied; root, numbers, and tombstones of pages that were
//!    deleted before they were gathered.
//! 4. **Sync** the image files and their names; wait until the log is durable up to `end` (I7).
//! 5. **Publish** the manifest. From this rename on a crash starts from here.
//! 6. **Verify**: read the manifest and the images back past the cache; record that in a seal.
//! 7. **Recycle** what neither a kept snapshot nor the log behind the oldest of them needs (I8).
//!
//! An exact snapshot ends where it begins: pages that a batch is about to change are kept aside until they are
//! gathered (`applier/cut.rs`), and all of phase 1 is one turn, with phase 3 in it.
//!
//! A crash in 1 to 4 leaves image files that are nobody's; in 5 to 7, a snapshot that the next open
//! publishes and verifies again. No space in 2 to 5 is a clean failure, and so is a system that is short of something;
//! everything else poisons.

mod compact;
mod background;
mod gather;
mod plan;
mod progress;
mod retain;
mod scrub;
mod thin_snapshot;
mod verify;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::image::ImagePurpose;
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind, Tombstone};
use remanent_format::{Epoch, LogPoint, Lsn, Metadata, PageId, SnapshotId, StoreId};

pub(crate) use self::background::{BackgroundSnapshots, Mark, Rules};
use self::compact::CARRY_BYTES_MAX;
pub(crate) use self::progress::SnapshotProgress;
pub use self::progress::{SnapshotPhase, SnapshotStats};
pub use self::retain::PruneReport;
pub(crate) use self::retain::Subject;
pub(crate) use self::scrub::{Scrub, Scrubber};
pub use self::scrub::{ScrubReport, ScrubStats};
use self::verify::{UnverifiedSnapshots, WrittenSnapshot};
use crate::applier::{AppliedState, Applier, ExactCut, Turn};
use crate::base::pace::Pace;
use crate::base::parallel;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::poison::Poison;
use crate::base::sync::{Instant, Mutex};
use crate::catalog::publish::{PublishedFile, publish_unchecked};
use crate::catalog::retention::Retention;
use crate::catalog::{
    Beginning, Catalog, CatalogLock, NewestSnapshot, RetainedSnapshot, SnapshotInfo, SnapshotWork, unix_ms,
};
use crate::device::{CommandList, Device};
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::{ImageWriters, chunk_threads, file_count};
use crate::log::{Log, SegmentPool, SpacePurpose};
use crate::memory::staging::StagingPool;
use crate::options::Compression;

/// Takes snapshots and recycles what they make superfluous.
pub(crate) struct Snapshots {
    pub disk: Arc<dyn Disk>,
    pub store: StoreId,
    pub device: Arc<dyn Device>,
    pub staging: Arc<StagingPool>,
    pub applier: Arc<Applier>,
    pub log: Arc<Log>,
    pub pool: Arc<SegmentPool>,
    pub poison: Arc<Poison>,
    pub retention: Retention,
    pub compression: Compression,
    /// A chunk of images is written when it has this many bytes.
    pub chunk_len: u64,
    /// Held while a snapshot is taken: one at a time.
    pub catalog: CatalogLock,
    pub unverified: UnverifiedSnapshots,
    pub progress: SnapshotProgress,
    pub pace: Arc<Pace>,
    /// How far the last one goes.
    pub last: Mutex<Mark>,
}

/// What kind of snapshot is wanted.
#[derive(Clone, Debug, Default)]
pub(crate) struct SnapshotRequest {
    /// Its name.
    pub name: Option<String>,
    /// Whether it is the state of one moment, so that `redo` is `end`.
    pub exact: bool,
    /// Whether it is written at the pace of background snapshots, and given up when the store closes.
    pub paced: bool,
    /// Whether it writes no image again only to empty a file: there is no space for it.
    pub spare: bool,
}

impl SnapshotRequest {
    /// How many threads may do the same for it at once: who is to be slow needs no help, and leaves all other cores to
    /// those who do not wait for it.
    fn threads_max(&self) -> usize {
        if self.paced { 1 } else { usize::MAX }
    }
}

impl Snapshots {
    /// Takes a snapshot.
    pub fn take(&self, wanted: SnapshotRequest) -> Result<SnapshotInfo> {
        self.take_retaining(&mut self.catalog.lock(), wanted)
    }

    /// Takes a snapshot in the background, if it is still due when no other is being taken any more.
    pub fn take_if(
        &self,
        wanted: SnapshotRequest,
        is_due: impl FnOnce() -> bool,
    ) -> Result<Option<SnapshotInfo>> {
        let mut catalog = self.catalog.lock_patiently();
        is_due().then(|| self.take_retaining(&mut catalog, wanted)).transpose()
    }

    /// Takes a snapshot before the store closes, if its log consists of too many runs: the thread had no time for it.
    pub fn take_at_close(&self) -> Result<()> {
        let last = *self.last.lock();
        if last.is_in_pieces() && self.log.length().0 > last.lsn {
            self.take(SnapshotRequest::default())?;
        }
        Ok(())
    }

    /// Takes an exact snapshot with a name for a caller who holds the lock on what is kept.
    pub fn take_named(&self, catalog: &mut Catalog, name: String) -> Result<SnapshotInfo> {
        let wanted = SnapshotRequest { name: Some(name), exact: true, ..SnapshotRequest::default() };
        self.take_retaining(catalog, wanted)
    }

    /// Takes a snapshot for a caller who holds the lock on what is kept, and removes nothing for it.
    pub fn take_keeping_all(&self, catalog: &mut Catalog) -> Result<SnapshotInfo> {
        self.take_and(catalog, SnapshotRequest::default(), |catalog| {
            self.record(catalog, catalog.floor, |_| true)
        })
    }

    /// Takes a snapshot, and removes what it makes superfluous.
    fn take_retaining(&self, catalog: &mut Catalog, wanted: SnapshotRequest) -> Result<SnapshotInfo> {
        self.with_space(catalog, wanted, |catalog, wanted| {
            self.take_and(catalog, wanted, |catalog| self.retain(catalog))
        })
    }

    /// Takes a snapshot, and does with what is kept as told.
    fn take_and(
        &self,
        catalog: &mut Catalog,
        wanted: SnapshotRequest,
        then: impl FnOnce(&mut Catalog) -> Result<()>,
    ) -> Result<SnapshotInfo> {
        self.take_then(catalog, wanted, |catalog| {
            self.progress.enter(SnapshotPhase::Verify);
            self.verify(catalog)?;
            self.progress.enter(SnapshotPhase::Recycle);
            then(catalog)
        })
    }

    /// Phases 1 to 5, and then what is told.
    fn take_then(
        &self,
        catalog: &mut Catalog,
        wanted: SnapshotRequest,
        then: impl FnOnce(&mut Catalog) -> Result<()>,
    ) -> Result<SnapshotInfo> {
        self.poison.check()?;
        let (began, (_, log_bytes)) = (Instant::now(), self.log.length());
        self.pool.fill().map_err(|error| self.heard(error))?;
        let written = self.pool.with_surplus(|| self.write(catalog, wanted.clone()));
        let taken = written.and_then(|id| {
            match then(catalog) {
                Ok(()) => Ok(catalog.snapshots[&id].info.clone()),
                // Nothing to record or verify it with: the snapshot stands, only nothing is recycled for it as yet.
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
            *self.last.lock() = Mark { lsn: info.end, bytes, restarts: 0, at: began };
        }
        // Who waits for the end is to find it.
        self.catalog.tell(catalog);
        self.progress.end(taken.as_ref().map(|info| info.id).map_err(Error::clone));
        taken
    }

    /// Poisons the store, unless nothing changed.
    fn heard(&self, error: Error) -> Error {
        match error {
            // Over budget are the pages that an exact snapshot keeps aside.
            Error::Closed | Error::OutOfMemory { .. } | Error::OverBudget { .. } => error,
            error if error.is_passing() => error,
            error => self.poison.set(error),
        }
    }

    /// The snapshots kept, oldest first.
    pub fn list(&self) -> Vec<SnapshotInfo> {
        self.catalog.list()
    }

    /// Phases 1 to 5.
    fn write(&self, catalog: &mut Catalog, wanted: SnapshotRequest) -> Result<SnapshotId> {
        catalog.known.prove(&DiskSource::past_cache(self.disk.clone()));
        let wasteful = if wanted.spare { Vec::new() } else { self.wasteful_files(catalog)? };
        let SnapshotStart { redo, sorted, end } = self.begin(catalog, wasteful, wanted.exact)?;
        let ahead_from = catalog.files.ahead_from(redo.lsn);
        let bytes = sorted.gather.iter().map(|(_, len)| len).sum();
        self.progress.begin(sorted.gather.len() as u64, bytes);
        let longest = sorted.gather.iter().map(|(_, len)| (*len).min(self.piece_len())).max().unwrap_or(0);
        let threads_max = wanted.threads_max();
        let threads = chunk_threads(longest).min(threads_max);
        // A file for which there is no chunk would stay empty.
        let files = file_count(bytes, self.chunk_len, threads).min(self.chunk_count(&sorted.gather).max(1));
        let numbers = catalog.files.take_numbers(files);
        let gathered = self.gather_into(numbers.clone(), threads, &sorted.gather, &wanted);
        let gathered = gathered.and_then(|(writers, caught)| match end.map_or_else(|| self.end(), Ok) {
            Ok(end) => Ok((writers, caught, end)),
            Err(error) => {
                writers.into_iter().for_each(ImageWriters::abandon);
                Err(error)
            }
        });
        // Gathered or given up: the applier need not watch any more.
        self.stop_watching()?;
        let (writers, caught, end) = gathered.map_err(|error| needing(bytes, error))?;
        self.progress.enter(SnapshotPhase::Publish);
        let manifest = Manifest {
            kind: sorted.follows.map_or(ManifestKind::Base, |(previous, previous_crc)| {
                ManifestKind::Change { previous, previous_crc }
            }),
            store: self.store,
            snapshot: SnapshotId(catalog.next_snapshot),
            name: wanted.name,
            created_unix_ms: unix_ms(),
            redo,
            end: end.point.lsn,
            next_page: end.next_page,
            epoch_high: end.epoch_high,
            next_file: numbers.end,
            ahead_from,
            tombstones: tombstones(&sorted, &caught, redo.lsn, &end.deleted),
            entries: in_order(sorted.entries, caught),
            root: end.root,
        };
        // From here on the number is taken, whatever happens: a name is never used for two contents.
        catalog.next_snapshot += 1;
        let publish = || self.publish_all(writers.as_ref(), &manifest, threads_max);
        let known = &catalog.known;
        let published = match sorted.follows {
            None => {
                // It names all pages: what that is in memory is made while it is written.
                let base = || NewestSnapshot::of_base(&manifest);
                let (base, published) = if threads_max == 1 {
                    let published = publish();
                    (base(), published)
                } else {
                    parallel::join(base, publish)
                };
                published.map(|published| {
                    let named = known.advance_to_base(&manifest, published.header_crc, base);
                    (published, named)
                })
            }
            Some((previous, _)) => publish().map(|published| {
                let named = known.advance_by_change(&manifest, published.header_crc, previous);
                (published, named)
            }),
        };
        let (published, (sums, before)) = match published {
            Ok(published) => published,
            // Only these leave it certain that no manifest names the images.
            Err(error) if error.is_passing() => {
                writers.into_iter().for_each(ImageWriters::abandon);
                return Err(error);
            }
            Err(error) => return Err(error),
        };
        let (is_own, crc) = (|file| numbers.contains(&file), published.header_crc);
        let kept = RetainedSnapshot::new(&manifest, is_own, sums, before, crc, false);
        let info = &kept.info;
        tracing::info!(
            snapshot = %info.id, redo = %info.redo, end = %info.end, bytes = info.bytes,
            bytes_written = info.bytes_written, visited = sorted.visited, "snapshot published"
        );
        let id = info.id;
        self.unverified.push(WrittenSnapshot { snapshot: id, manifest: published, images: writers });
        catalog.snapshots.insert(id, kept);
        Ok(id)
    }

    /// Phase 1. An exact snapshot looks at its pages in one turn, any other at some of them a turn.
    fn begin(&self, catalog: &Catalog, wasteful: Vec<(u64, u64)>, exact: bool) -> Result<SnapshotStart> {
        let known = catalog.known.clone();
        if exact {
            return self.applier.turn(move |turn| {
                let pages = beginning(turn);
                let table = &mut turn.applied.table;
                let look = |pages: Vec<PageId>| {
                    let standings = known.look(table, None, &pages);
                    || Ok(standings)
                };
                let sorted = known.sort_out(pages, &wasteful, CARRY_BYTES_MAX, look)?;
                let end = Some(End::here(turn));
                turn.applied.cut = Some(ExactCut::new(sorted.gather.iter().map(|(page, _)| *page)));
                Ok(SnapshotStart { redo: turn.applied.point, sorted, end })
            });
        }
        let (redo, pages) = self.applier.turn(|turn| {
            turn.applied.deleted = Some(HashMap::new());
            Ok((turn.applied.point, beginning(turn)))
        })?;
        let look = |pages: Vec<PageId>| {
            let known = known.clone();
            self.applier.turn_ahead(move |turn| {
                let AppliedState { table, deleted, .. } = turn.applied;
                Ok(known.look(table, deleted.as_ref(), &pages))
            })
        };
        // A turn fails only with the applier, and nobody has to tell that to stop watching.
        let sorted = known.sort_out(pages, &wasteful, CARRY_BYTES_MAX, look)?;
        Ok(SnapshotStart { redo, sorted, end: None })
    }

    /// Phase 2, by so many threads. Where nothing is to be gathered, no file is made.
    fn gather_into(
        &self,
        numbers: Range<u64>,
        threads: usize,
        pages: &[(PageId, u64)],
        wanted: &SnapshotRequest,
    ) -> Result<(Option<ImageWriters>, Vec<ManifestEntry>)> {
        if pages.is_empty() {
            return Ok((None, Vec::new()));
        }
        let (disk, store, purpose) = (self.disk.clone(), self.store, ImagePurpose::Snapshot);
        let (compression, threads_max) = (self.compression, wanted.threads_max());
        let writers = ImageWriters::create(disk, store, numbers, purpose, compression, threads_max)?;
        match self.gather_all(&writers, threads, pages, wanted.paced) {
            Ok(caught) => Ok((Some(writers), caught)),
            Err(error) => {
                writers.abandon();
                Err(error)
            }
        }
    }

    /// Phases 4 and 5.
    fn publish_all(
        &self,
        writers: Option<&ImageWriters>,
        manifest: &Manifest,
        threads_max: usize,
    ) -> Result<PublishedFile> {
        writers.map_or(Ok(()), ImageWriters::sync)?;
        self.log.wait_durable(manifest.end)?; // I7
        self.publish_manifest(manifest, threads_max)
    }

    /// Ends what the applier does for a snapshot between its begin and its end.
    fn stop_watching(&self) -> Result<()> {
        self.applier.turn(|turn| {
            turn.applied.deleted = None;
            if let Some(cut) = turn.applied.cut.take() {
                let last_use = turn.submit(CommandList::default())?.fence();
                cut.retire(turn.arena, last_use);
            }
            Ok(())
        })
    }

    /// Publishes a manifest, by up to `threads_max` threads. On a full disk it may use the reserve.
    fn publish_manifest(&self, manifest: &Manifest, threads_max: usize) -> Result<PublishedFile> {
        let _phase = phases::enter(Phase::Publish);
        let publish = || publish_unchecked(&self.disk, manifest, threads_max);
        // One without images takes little, and gives back what deleted pages took.
        let purpose = if manifest.entries.is_empty() { SpacePurpose::Seal } else { SpacePurpose::User };
        match publish() {
            Err(Error::DiskFull { .. }) if self.log.release_one(purpose)? => publish(),
            published => published,
        }
    }

    /// Phase 3.
    fn end(&self) -> Result<End> {
        self.applier.turn(|turn| Ok(End::here(turn)))
    }
}

/// What a snapshot needs that does not fit: the images that it writes, and not only those of the chunk that failed.
fn needing(bytes: u64, error: Error) -> Error {
    match error {
        Error::DiskFull { file, needed, store } => Error::DiskFull { file, needed: needed.max(bytes), store },
        error => error,
    }
}

/// The pages at the moment of a turn.
fn beginning(turn: &mut Turn<'_>) -> Beginning {
    let table = &mut turn.applied.table;
    Beginning { changed: table.changed(), count: table.pages().len() }
}

/// What phase 1 gives.
struct SnapshotStart {
    redo: LogPoint,
    sorted: SnapshotWork,
    /// Of an exact snapshot, which ends where it begins.
    end: Option<End>,
}

struct End {
    point: LogPoint,
    root: Arc<Metadata>,
    next_page: u64,
    epoch_high: Epoch,
    deleted: HashMap<PageId, Lsn>,
}

impl End {
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

/// The pages that were to be gathered and were deleted before they could be; and, in a change, those that were
/// gone when it began.
fn tombstones(
    sorted: &SnapshotWork,
    caught: &[ManifestEntry],
    redo: Lsn,
    deleted: &HashMap<PageId, Lsn>,
) -> Vec<Tombstone> {
    // Both ascend. Mostly all are caught, and none has to be looked for.
    let mut caught = caught.iter().peekable();
    let all_are_caught = caught.len() == sorted.gather.len();
    let mut is_caught = |page| all_are_caught || caught.next_if(|entry| entry.page == page).is_some();
    let missed = sorted.gather.iter().filter(|(page, _)| !is_caught(*page));
    let missed = missed.map(|(page, _)| Tombstone {
        page: *page,
        lsn: *deleted.get(page).expect("a page that could not be gathered was deleted"),
    });
    // Replay begins behind their deletion: that they are gone is all that matters.
    let gone = sorted.gone.iter().filter(|_| sorted.follows.is_some());
    let gone = gone.map(|page| Tombstone { page: *page, lsn: redo });
    let mut tombstones: Vec<Tombstone> = missed.chain(gone).collect();
    tombstones.sort_unstable_by_key(|tombstone| tombstone.page);
    tombstones
}

fn in_order(known: Vec<ManifestEntry>, caught: Vec<ManifestEntry>) -> Vec<ManifestEntry> {
    let mut entries = known;
    if entries.is_empty() {
        return caught;
    }
    entries.extend(caught);
    entries.sort_by_key(|entry| entry.page);
    entries
}
