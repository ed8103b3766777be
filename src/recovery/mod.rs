//! Opening a store directory: creates or recovers the store, then begins a new incarnation.
//!
//! # The decision table
//!
//! The states that can be found on disk, their causes, and the response to each. The tests are in
//! `tests/it/recovery/mod.rs`.
//!
//! | on disk | cause | response | test |
//! |---|---|---|---|
//! | nothing | a new directory | create | `empty_directory_is_created` |
//! | foreign files, no STORE | a wrong path | refuse, touch nothing | `foreign_directory_is_refused` |
//! | no STORE, segments without batches | a crash during creation: STORE comes last | restart the creation | `interrupted_creation_starts_over` |
//! | no STORE, but its temporary file, and images or a manifest | a crash during a fork: STORE comes last | restart the creation | `interrupted_fork_starts_over` |
//! | no STORE, but batches, images or manifests | STORE was lost | refuse | `missing_store_file_is_refused` |
//! | STORE damaged, of a newer version, or with an unknown feature | bit rot; a newer build | refuse | `damaged_store_file_is_refused` |
//! | STORE lacks a feature that this build writes | an older build | add the feature before anything else is written | `features_are_added_to_older_store_before_other_writes` |
//! | another identity or layout fingerprint | the caller's mistake | refuse | `other_identity_is_refused` |
//! | STORE but no log | the log was lost | refuse | `missing_log_is_refused` |
//! | temporary files | a crash before a rename | remove: nothing names them | `temporary_files_are_removed` |
//! | image files of snapshots that nothing names | a crash during a snapshot | remove | `unnamed_images_are_removed` |
//! | image files of batches that nothing known names | a crash before the batch was logged, or older log names them | keep until the floor is above every batch that may name them | `images_of_batches_stay` |
//! | an image that a batch names is bad or missing | bit rot | refuse, name the image | `bad_image_of_a_batch_is_refused` |
//! | newest manifest: one copy bad | a rotten sector | use the other copy, rewrite both | `one_bad_manifest_copy_costs_nothing` |
//! | newest manifest: both copies bad, or missing | bit rot | use an older snapshot and more log | `bad_manifest_falls_back` |
//! | an image of the newest snapshot is bad or missing | bit rot | use an older snapshot and more log | `damaged_image_makes_open_use_older_snapshot` |
//! | images that every kept snapshot needs are bad | bit rot | refuse, name the image | `bad_shared_image_is_refused` |
//! | a link that the newest snapshot follows: one copy bad | a rotten sector | use the other copy, rewrite both | `one_bad_copy_of_link_is_repaired` |
//! | such a link: both copies bad, or missing | bit rot | treat all snapshots that follow it as lost | `lost_link_loses_its_snapshot` |
//! | a manifest that the record names is missing, or not the one verified | a lost file | report once: the next record does not name it | `missing_manifest_of_a_kept_snapshot_is_reported` |
//! | links that no record names | snapshots that others follow | keep them for those others only, not as snapshots | `links_kept_for_other_snapshots_are_not_listed` |
//! | manifest not recorded as verified | a crash between rename and seal | publish and verify it again | `unrecorded_manifest_is_published_again` |
//! | frames after the last valid one, covered by no mark | a torn tail | cut, report | `torn_tail_is_cut` |
//! | frames after the last valid one, covered by a mark | bit rot, a lost write | refuse with file, offset, lsn | `damage_under_a_mark_is_refused` |
//! | the next frame's position cannot be read | a latent sector error | refuse: an unreadable position proves neither a frame nor the log's end | `unreadable_log_is_refused` |
//! | frames of an older incarnation past its end | cut by an earlier recovery | never read | `truncated_frames_stay_truncated` |
//! | the newest segment is missing | a lost file | refuse: a segment with frames has a successor | `missing_newest_segment_is_refused` |
//! | a segment in between is missing, foreign or cut short | a lost or swapped file | refuse | `missing_segment_is_refused` |
//! | the header of a segment with frames is bad | bit rot | refuse | `bad_segment_header_is_refused` |
//! | the header of the empty newest segment is bad | bit rot | replace the segment: nothing is lost | `bad_header_of_empty_segment_is_harmless` |
//! | the newest incarnation has no batch | an open that committed nothing | omit it from the store's history, and recycle its segments | `opens_without_commits_leave_disk_unchanged` |
//! | an incarnation that its successor omitted | a crash before its segments were recycled | recycle: it has no meaning | `crash_while_skipping_incarnation_loses_nothing` |
//! | the newest incarnation has no batch, but contains a manifest's `redo` | a fork's first incarnation; a snapshot without commits before it | keep as long as the manifest | `incarnation_of_replay_start_is_kept` |
//! | the newest incarnation has no batch, but a manifest cannot be read | bit rot | keep: the manifest's `redo` may be in it | `an_unreadable_manifest_keeps_every_incarnation` |
//! | one empty segment more than needed | a crash before the opening's rename | replace or recycle | `crash_before_the_rename_changes_nothing` |
//!
//! Pages that are loaded on demand are checked when they are loaded: `lazy_load.rs`.
//!
//! # The order of steps
//!
//! 1. Lock the store. Sync the folders, so that every listed name is durable. Read STORE.
//! 2. Survey the files. Resolve the final page table from the newest usable snapshot and the log (I10).
//! 3. Check the budget, load images from the medium, and replay the log onto them. If pages are loaded on demand,
//!    `lazy_load.rs` later loads the pages that still equal their images. Nothing has been written so far, so an open
//!    that fails leaves the store unchanged.
//! 4. Add to STORE any features that this build writes and STORE lacks. From here on, a crash leaves a store that older
//!    builds refuse to open, because they cannot read the new bytes. Publish snapshots again that are not recorded as
//!    verified (I7). Begin the new incarnation (I5): build the complete opening segment under a temporary name, sync
//!    the segment and read it back, create the empty segment after it, rename the opening segment, and sync the folder.
//!    **The rename is the only commit point.** Before the rename the log is unchanged, and the next open repeats these
//!    steps. An incarnation that accepted no batch is omitted from the store's history: the new incarnation names the
//!    same predecessor, and begins where the omitted one began.
//! 5. Recycle the segments that were cut or omitted, unless a reader may be using them. Remove unnamed files, and
//!    create the report. After a crash, or because of a reader, segments of an omitted incarnation may remain. Such
//!    segments have no meaning, and the next open or snapshot recycles them.

pub(crate) mod create;
pub(crate) mod archive_url;
mod survey;
mod log_reader;
pub(crate) mod image_loader;
mod catalog;
mod verified_snapshots;
mod lent_pages;
#[cfg(feature = "nccl")]
mod gather;
mod page_memory;
mod lowered_pages;
mod loaded_pages;
mod submitted_lists;
mod deltas;
mod load;
mod candidates;
pub(crate) mod opening;
mod open_preview;
mod report;
mod page_sources;
mod lazy_load;

use std::collections::HashMap;
use std::sync::Arc;

use remanent_format::judge::Record;
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::log::LogEnd;
use remanent_format::segment::FORMAT_VERSION;
use remanent_format::state::follow::Resolution;
use remanent_format::state::survey::Survey;
use remanent_format::store::StoreFile;
use remanent_format::{
    Damage, Defect, FileName, Folder, LogPoint, PageId, PageTable, Position, SnapshotId, StoreId,
};

use self::candidates::BestCandidate;
use self::catalog::CatalogDraft;
#[cfg(feature = "nccl")]
pub(crate) use self::gather::OpenGather;
pub(crate) use self::lazy_load::PageLoader;
use self::loaded_pages::LoadedPages;
use self::lowered_pages::LoweredPages;
pub(crate) use self::open_preview::OpenPreview;
pub use self::open_preview::SurveyedStore;
use self::opening::{Predecessor, begin};
#[cfg(feature = "nccl")]
pub use self::report::GatherReport;
pub use self::report::RecoveryReport;
use crate::applier::AppliedState;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::sync::Instant;
use crate::catalog::Catalog;
use crate::catalog::publish::{CreateFromSpare, publish, publish_manifest};
use crate::device::EngineDevice;
use crate::disk::image_spares::ImageSpares;
use crate::disk::source::DiskSource;
use crate::disk::{Disk, DiskLock};
use crate::error::{Error, Mismatch, Result};
use crate::images::disk_pages::DiskPages;
use crate::log::{LogStart, SegmentPool, SegmentRules, SpacePurpose};
use crate::memory::arena::Arena;
use crate::memory::staging::StagingPool;
use crate::options::{LogIo, Options};

/// The result of an open, from which the running store is built.
pub(crate) struct RecoveredStore {
    /// The contents of the STORE file, including the features that this build writes.
    pub store: StoreFile,
    /// The applier's initial state: table, memory and position in the log.
    pub applied: AppliedState,
    /// A copy of the applier's page table, to which new commits apply.
    pub submitted: PageTable,
    /// The pages that differ from the newest snapshot, which the next snapshot must check.
    pub changed: Vec<PageId>,
    /// The position at which the log continues in the new incarnation.
    pub log: LogStart,
    /// The payload of a batch that the tables already contain and that must be logged first, or `None`.
    pub first_batch: Option<Vec<u8>>,
    /// The pool of new and spare log segments.
    pub pool: Arc<SegmentPool>,
    /// The catalog of kept snapshots, tables and files.
    pub catalog: Catalog,
    /// The amount of log after the newest snapshot, from which the due time of the next snapshot is computed.
    pub behind: ReplayBacklog,
    /// The report that [`Store::recovered`](crate::Store::recovered) returns.
    pub recovered: RecoveryReport,
}

/// The incarnation that an open began, in which the store continues the log.
struct NewIncarnation {
    pool: Arc<SegmentPool>,
    /// The contents of the STORE file, including the features that this build writes.
    store: StoreFile,
    log: LogStart,
    position: Position,
    /// The end of the log after which the incarnation begins. An omitted incarnation is not part of this log.
    on_line: LogEnd,
    /// The number of the highest segment before the incarnation began.
    highest: u64,
}

/// The amount of log after the newest snapshot, which determines when the next snapshot is due.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReplayBacklog {
    /// The total length in bytes of the log's segments on disk and of the images that their batches name. The full
    /// length of a segment counts, because even a short run with few commits uses whole segments.
    pub bytes: u64,
    /// The number of openings of the store in that log, including the current one. Each opening uses at least one
    /// segment.
    pub restarts: usize,
}

impl ReplayBacklog {
    /// Counts the log after the loaded snapshot. The next open would replay this log again.
    fn of(survey: &Survey, resolution: &Resolution) -> Self {
        let base = resolution.base.and_then(|base| survey.links[&base].as_ref().ok());
        let (from, offset) = base.map_or((0, 0), |(link, _)| (link.redo.segment, link.redo.offset));
        let segments = survey.log.segments().range(from..).filter(|(_, segment)| segment.frames.is_some());
        let segment_bytes: u64 = segments.map(|(_, segment)| segment.file_len).sum();
        let openings = survey.log.line().iter().filter(|(segment, _)| *segment > from);
        // If no batch was committed after the snapshot, another snapshot would gain nothing.
        let bytes = if resolution.batches == 0 { 0 } else { segment_bytes.saturating_sub(offset) };
        Self { bytes: bytes.saturating_add(resolution.ahead_bytes), restarts: openings.count() + 1 }
    }
}

/// Writes a small file during an open, even on a full disk. If the disk has no free space, the file is created from a
/// spare, or spares are removed.
///
/// An open must succeed on a full disk, because only an open store can free space by deleting pages.
fn with_reserve<T>(pool: &SegmentPool, mut write: impl FnMut(&CreateFromSpare) -> Result<T>) -> Result<T> {
    let spare = |temporary, len| pool.make_small(temporary, len, 0, SpacePurpose::Open);
    loop {
        match write(&spare) {
            Err(Error::DiskFull { .. }) if pool.release_reserve()? => {}
            written => return written,
        }
    }
}

/// The inverse of the maximum share of the file system that one segment may occupy. With the empty segments and the
/// reserve, there are five segments, and a small disk needs most of its space for pages.
const SEGMENT_SHARE: u64 = 64;
/// The minimum length in bytes to which `SEGMENT_SHARE` may shorten a segment.
const SEGMENT_SHARE_MIN: u64 = 256 << 10;
/// The inverse of the default maximum share of the file system that spares beyond the reserve may occupy.
const SPARE_SHARE: u64 = 100;
/// The default maximum total length in bytes of spares beyond the reserve.
const SPARE_BYTES_MAX: u64 = 512 << 20;

/// The resources that an open uses: disk, device, memory and options.
pub(crate) struct Recovery<'a> {
    /// The disk with the store's directory. The caller must have locked the directory.
    pub disk: Arc<dyn Disk>,
    pub device: Arc<EngineDevice>,
    /// The allocator of page memory, with its budget (I10).
    pub arena: &'a Arena,
    /// The pool of staging buffers through which lanes copy.
    pub staging: &'a StagingPool,
    /// The caller's options, such as the budget, the identity and the load policy.
    pub options: &'a Options,
    /// The mode in which the opened store will write its log.
    pub log_io: LogIo,
    /// The shared state of the pages on disk: counters, uses of image files, and the memory for pending writes.
    pub disk_pages: Arc<DiskPages>,
    /// The ranks with which the open shares the loading of pages.
    #[cfg(feature = "nccl")]
    pub gather: OpenGather<'a>,
}

impl Recovery<'_> {
    /// Creates or recovers the store. The caller must hold the store's lock.
    pub fn open(&self) -> Result<RecoveredStore> {
        let _phase = phases::enter(Phase::Recovery);
        let started = Instant::now();
        let is_store = |name: &String| FileName::parse(Folder::Root, name) == Some(FileName::Store);
        let exists = self.disk.list(Folder::Root)?.iter().any(is_store);
        let opened = if exists { self.recover() } else { self.create() };
        #[cfg(feature = "nccl")]
        self.decline_gather();
        let mut opened = opened?;
        opened.recovered.elapsed = started.elapsed();
        Ok(opened)
    }

    /// Recovers a store. The numbers in the code refer to the order of steps in the module's docs. Nothing is written
    /// up to step 3, so an error or a crash in these steps has no effect.
    fn recover(&self) -> Result<RecoveredStore> {
        self.sync_folders()?; // 1
        // The source records which ranges of the log were not in the page cache. They were read from the medium, so
        // step 3 need not read them again (I6).
        let source = DiskSource::noting(self.disk.clone());
        // Steps 2 and 3.
        let survey = survey::read(&source)?;
        self.check_identity(&survey.store)?;
        check_has_log(&survey)?;
        let BestCandidate { resolution, mut loaded, mut draft, mut harmless } =
            self.load_best(&source, &survey)?;
        let end = resolution.end.clone().expect("followed to its end");
        // I4: a mark above the log's end is damage, which was refused before.
        assert!(end.accepted.lsn >= survey.mark());
        assert!(end.proven.lsn <= end.accepted.lsn); // I6
        harmless.extend(end.harmless.iter().cloned());
        report_lost_snapshots(&survey, &end, &mut harmless);

        let (tail, lowered) = (std::mem::take(&mut loaded.tail), loaded.lowered.take());
        let copied_batches = tail.len() as u64;
        let continued = self.begin_incarnation(&survey, &end, &mut draft, tail)?; // 4
        // I8: a replay from the loaded snapshot begins before all segments that are recycled.
        let base = resolution.base.and_then(|base| survey.links[&base].as_ref().ok());
        assert!(base.is_none_or(|(link, _)| link.redo.segment <= continued.on_line.proven.segment));
        self.recycle_omitted(&survey, &end, &continued)?; // 5
        let NewIncarnation { pool, store, log, position, .. } = continued;
        let mut changed = std::mem::take(&mut draft.changed);
        let mut submitted = std::mem::take(&mut draft.submitted);
        let spares = pool.image_spares().clone();
        let catalog = self.keep(draft, spares, &survey, resolution.base, end.accepted.lsn)?;

        let mut recovered = RecoveryReport {
            previous: Some(Position { incarnation: end.accepted.incarnation, lsn: end.accepted.lsn }),
            snapshot: resolution.base,
            replayed_batches: resolution.batches,
            replayed_bytes: resolution.bytes,
            copied_batches,
            torn: end.torn,
            harmless,
            ..self.report(position, false)
        };
        let behind = ReplayBacklog::of(&survey, &resolution);
        tracing::info!(
            incarnation = %position.incarnation, lsn = %position.lsn, snapshot = ?recovered.snapshot,
            replayed = recovered.replayed_batches, copied = copied_batches, torn = ?recovered.torn, "recovered"
        );
        // No later step fails, so the memory need not be freed.
        let (mut applied, unloaded_pages) = self.applied(resolution.resolved.table, loaded, &log)?;
        recovered.unloaded_pages = unloaded_pages;
        let mut first_batch = None;
        if let Some(LoweredPages { table: after, pages, payload }) = lowered {
            (applied.table, submitted) = (after.clone(), after);
            changed.extend(&pages);
            recovered.lowered_pages = pages.len() as u64;
            first_batch = Some(payload);
        }
        Ok(RecoveredStore {
            store,
            applied,
            submitted,
            changed,
            log,
            first_batch,
            pool,
            catalog,
            behind,
            recovered,
        })
    }

    /// Syncs the folders, because names that are not durable yet must not be relied on (I6). A rename may exist only in
    /// the cache. A power cut after this open would restore the old name, although the new incarnation already relies
    /// on the new one. Missing folders are checked later, by their expected contents.
    fn sync_folders(&self) -> Result<()> {
        let present = self.disk.list(Folder::Root)?;
        for folder in Folder::INNER {
            if present.iter().any(|name| name == folder.name()) {
                self.disk.sync_folder(folder)?;
            }
        }
        self.disk.sync_folder(Folder::Root)
    }

    /// Begins the incarnation in which the opened store continues the log. The directory is changed only from here on,
    /// when everything is read and verified.
    ///
    /// Each step assumes that the previous one is durable: features before any byte that an older build would misread,
    /// and manifests before the seal that records them.
    fn begin_incarnation(
        &self,
        survey: &Survey,
        end: &LogEnd,
        draft: &mut CatalogDraft<'_>,
        tail: Vec<Vec<u8>>,
    ) -> Result<NewIncarnation> {
        let store = survey.store.store;
        let highest = survey.log.segments().keys().next_back().copied().unwrap_or(0);
        for folder in Folder::INNER {
            self.disk.make_folder(folder)?;
        }
        // Temporary files are removed before new ones are created, because those of a crash could not be distinguished
        // later.
        self.remove_temporaries()?;
        let pool = self.pool(store)?;
        let store_file = self.with_features(&pool, survey.store.clone())?;
        let newest = end.accepted.incarnation;
        let on_line = end_without(survey, end).unwrap_or_else(|| end.clone());
        // The opening replaces the highest segment, which is empty, because a segment with frames has a successor (I8).
        let before = Predecessor { segment: highest, newest, end: Some(on_line.clone()), tail };
        // I7: the opening seal records the snapshot as verified. A manifest that no frame under a mark records may have
        // its name only in the cache, so it is published again first. Otherwise the seal, which is under a mark, could
        // outlive the name, and the next open would miss a snapshot that permitted recycling.
        for link in std::mem::take(&mut draft.anew) {
            with_reserve(&pool, |spare| publish_manifest(&self.disk, link, usize::MAX, spare))?;
        }
        let (log, position) = begin(&pool, store, &before, draft.verified.clone())?;
        assert!(position.lsn == end.accepted.lsn); // I5: every accepted batch is carried over.
        assert!(position.incarnation.number > newest.number); // I5: no incarnation begins twice.
        Ok(NewIncarnation { pool, store: store_file, log, position, on_line, highest })
    }

    /// Recycles segments that a crash left: segments whose batches were copied, and segments of the omitted
    /// incarnation.
    ///
    /// They are recycled only after the new incarnation has begun. Before the rename, no file may be changed. Until the
    /// folder is synced, a power cut may restore the omitted incarnation, which would then lack its segments.
    fn recycle_omitted(&self, survey: &Survey, end: &LogEnd, continued: &NewIncarnation) -> Result<()> {
        let removed = continued.on_line.proven.segment + 1..continued.highest;
        let mut junk: Vec<u64> =
            survey.log.segments().keys().copied().filter(|number| removed.contains(number)).collect();
        if junk.is_empty() {
            return Ok(());
        }
        let readers_locked_out = self.lock_out_readers(survey);
        if readers_locked_out.is_none() {
            // I8: an active reader may be anywhere in the log up to the last batch.
            junk.retain(|number| *number > end.accepted.segment);
        }
        continued.pool.recycle(&junk)
    }

    /// Returns the applier's initial state, and the number of pages that are not loaded yet.
    fn applied(
        &self,
        table: PageTable,
        loaded: LoadedPages<'_>,
        log: &LogStart,
    ) -> Result<(AppliedState, u64)> {
        let (memory, on_disk, unloaded) = loaded.keep()?;
        // I10: each page of the table has the memory claimed for it, and no other memory is allocated.
        let (left, _) = unloaded.left();
        let count = memory.len() + on_disk.len();
        assert!(count as u64 + left == table.pages().len() as u64);
        let applied = AppliedState {
            table,
            memory,
            on_disk: self.disk_pages.table(on_disk),
            unloaded: Arc::new(unloaded),
            point: log.point,
            deleted: None,
            cut: None,
            gathers: HashMap::new(),
        };
        Ok((applied, left))
    }

    /// Locks all snapshots against new readers. Returns `None` if a reader is active, because the reader may be at any
    /// position in the log, or if a lock cannot be taken for lack of disk space or file handles. The files are then
    /// kept, and a later snapshot removes them.
    fn lock_out_readers(&self, survey: &Survey) -> Option<Vec<Box<dyn DiskLock>>> {
        // Number 0 represents the beginning of the log. A reader may also have started from a manifest that no seal
        // records.
        let starts = survey.links.keys().copied().chain([SnapshotId(0)]);
        let mut locks = Vec::new();
        for snapshot in starts {
            match self.disk.try_retire(snapshot) {
                Ok(lock) => locks.push(lock?),
                Err(error) => {
                    tracing::warn!(%error, "segments that a reader may need are not removed yet");
                    return None;
                }
            }
        }
        Some(locks)
    }

    /// Returns an error for a store with another identity or layout, or a store that this build must not write.
    ///
    /// This build can at most read a store with unknown features, because the bytes that this build writes could
    /// violate the guarantees of those features.
    fn check_identity(&self, store: &StoreFile) -> Result<()> {
        if !store.is_writable() {
            let features = store.features.read_compatible;
            return Err(Defect::Version { version: FORMAT_VERSION, features }.at(FileName::Store, 0).into());
        }
        let record = &store.record;
        if self.options.identity.as_ref().is_some_and(|identity| *identity != record.identity) {
            return Err(Error::Mismatch(Mismatch::Identity { found: record.identity.clone() }));
        }
        if let Some(expected) = self.options.layout_fingerprint
            && record.layout_fingerprint != Some(expected)
        {
            return Err(Error::Mismatch(Mismatch::Layout { expected, found: record.layout_fingerprint }));
        }
        Ok(())
    }

    /// Adds the features that this build writes to the STORE file. Returns once the STORE file is durable.
    fn with_features(&self, pool: &SegmentPool, store: StoreFile) -> Result<StoreFile> {
        let features = store.features.with_written();
        if features == store.features {
            return Ok(store);
        }
        let store = StoreFile { features, ..store };
        let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
        with_reserve(pool, |spare| publish(&self.disk, FileName::Store, 0, &[&bytes], spare)).map(|()| store)
    }

    /// Removes files under temporary names. A crash left them before their rename, and no record names them.
    fn remove_temporaries(&self) -> Result<()> {
        for folder in [Folder::Root, Folder::Log, Folder::Pages, Folder::Snapshots] {
            for name in self.disk.list(folder)? {
                if let Some(file @ FileName::Temporary(..)) = FileName::parse(folder, &name) {
                    self.disk.remove(file)?;
                }
            }
        }
        Ok(())
    }

    /// Creates the pool of segments for the log.
    ///
    /// With spares beyond the reserve, committers of a busy log need not wait for the zeros of new segments to be
    /// written and synced. The number of spares is bounded, because they take space that pages could use.
    fn pool(&self, store: StoreId) -> Result<Arc<SegmentPool>> {
        let total = self.disk.total_bytes().unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot determine the size of the file system");
            None
        });
        let share = |of: u64| total.map_or(u64::MAX, |total| total / of);
        let segment_len_max = share(SEGMENT_SHARE).max(SEGMENT_SHARE_MIN) / GROUP_ALIGN * GROUP_ALIGN;
        let spare_bytes = self.options.log.spare_bytes.unwrap_or(share(SPARE_SHARE).min(SPARE_BYTES_MAX));
        let len = self.options.log.segment_len.min(segment_len_max);
        let rules = SegmentRules { len, reserve: self.options.log.reserve_segments(len), spare_bytes };
        let image_spares = Arc::new(ImageSpares::open(self.disk.clone(), store)?);
        Ok(Arc::new(SegmentPool::new(self.disk.clone(), store, rules, self.log_io, image_spares)?))
    }
}

/// Returns an error for a store without segments. A creation writes segments before STORE, so such a store has lost its
/// log. If it were treated as a new store, it would assign batch numbers a second time.
fn check_has_log(survey: &Survey) -> Result<()> {
    if survey.log.newest().is_none() {
        let (number, defect) = match survey.log.segments().iter().next_back() {
            Some((number, newest)) => (*number, newest.header.clone().err().unwrap_or(Defect::Missing)),
            None => (1, Defect::Missing),
        };
        return Err(defect.at_lsn(FileName::Segment(number), 0, survey.mark()).into());
    }
    Ok(())
}

/// Adds the snapshots that the log records and the directory lacks to the damage that an open reports. The next seal
/// omits these snapshots, so only this open can report them.
fn report_lost_snapshots(survey: &Survey, end: &LogEnd, harmless: &mut Vec<Damage>) {
    for damage in Record(&end.verified).lost(survey) {
        if harmless.iter().all(|known| (known.file, &known.defect) != (damage.file, &damage.defect)) {
            tracing::warn!(%damage, "a retained snapshot is lost");
            harmless.push(damage);
        }
    }
}

/// Returns the end of the log before its newest incarnation, or `None` if that incarnation must be kept.
///
/// Omitting an incarnation without batches frees its segment. Otherwise a store that is opened repeatedly without
/// commits would fill its disk, because each open uses a segment, and only a snapshot after further commits frees it.
///
/// The incarnation may be omitted only if no data relies on it:
///
/// - The incarnation accepted no batch, not even as a copy, so that it ends where it began.
/// - No manifest's `redo` is in the incarnation, because a replay begins at a `redo`.
/// - All manifests are readable, because an unreadable manifest may have its `redo` in the incarnation.
fn end_without(survey: &Survey, end: &LogEnd) -> Option<LogEnd> {
    let newest = survey.log.newest()?;
    let (_, opening) = survey.log.line().last().filter(|(_, opening)| opening.incarnation == newest)?;
    let began = opening.predecessor;
    let is_without_batches = opening.accepted == began.lsn && end.accepted.lsn == began.lsn;
    let all_is_readable = survey.links.values().all(Result::is_ok);
    let begins_replay = || survey.readable().any(|manifest| manifest.redo.incarnation == newest);
    // A replay or an acknowledgement may depend on the incarnation, so it is kept.
    if !is_without_batches || !all_is_readable || begins_replay() {
        return None;
    }
    // The new incarnation begins where the omitted one began, with the same batches and chain hash.
    let accepted = LogPoint { lsn: opening.accepted, chain: opening.accepted_chain, ..began };
    Some(LogEnd { accepted, proven: began, ..end.clone() })
}
