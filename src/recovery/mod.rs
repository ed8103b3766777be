//! Opening a store directory: create, recover, begin a new incarnation.
//!
//! # The decision table
//!
//! What may lie on disk, how it gets there, and what is done. The tests are in `tests/it/recovery/mod.rs`.
//!
//! | on disk | how | what is done | test |
//! |---|---|---|---|
//! | nothing | a new directory | create | `empty_directory_is_created` |
//! | foreign files, no STORE | a wrong path | refuse, touch nothing | `foreign_directory_is_refused` |
//! | no STORE, segments without batches | a crash in creation: STORE comes last | start creation over | `creation_cut_short_starts_over` |
//! | no STORE, but its temporary file, and images or a manifest | a crash in a fork: STORE comes last | start over | `fork_cut_short_starts_over` |
//! | no STORE, but batches, images or manifests | STORE was lost | refuse | `missing_store_file_is_refused` |
//! | STORE damaged, of a newer version, or with an unknown feature | bit rot; a newer build | refuse | `damaged_store_file_is_refused` |
//! | STORE without a feature of what this build writes | an older build | add it, before anything else is written | `features_are_added_to_an_older_store_before_anything_else_is_written` |
//! | another identity or layout fingerprint | the caller's mistake | refuse | `other_identity_is_refused` |
//! | STORE but no log | the log was lost | refuse | `missing_log_is_refused` |
//! | temporary files | a crash before a rename | remove: nothing names them | `temporary_files_are_removed` |
//! | image files of snapshots that nothing names | a crash in a snapshot | remove | `unnamed_images_are_removed` |
//! | image files of batches that nothing known names | a crash before the batch was logged; older log names them | keep until the floor is above every batch that may name them | `images_of_batches_stay` |
//! | an image that a batch names bad or missing | bit rot | refuse, name the image | `bad_image_of_a_batch_is_refused` |
//! | newest manifest: one copy bad | a rotten sector | use the other copy, write both anew | `one_bad_manifest_copy_costs_nothing` |
//! | newest manifest: both copies bad, or missing | bit rot | older snapshot and more log | `bad_manifest_falls_back` |
//! | an image of the newest snapshot bad or missing | bit rot | older snapshot and more log | `bad_image_falls_back` |
//! | images that every kept snapshot needs bad | bit rot | refuse, name the image | `bad_shared_image_is_refused` |
//! | a link that the newest snapshot follows: one copy bad | a rotten sector | use the other copy, write both anew | `one_bad_copy_of_a_link_is_mended` |
//! | the same: both copies bad, or missing | bit rot | as if all snapshots that follow it were lost | `lost_link_is_a_lost_snapshot` |
//! | a manifest that the record names missing, or not the one verified | a lost file | report, once: the next record does not name it | `missing_manifest_of_a_kept_snapshot_is_reported` |
//! | links that no record names | snapshots that others follow | they stay for those, and are not kept themselves | `links_of_others_are_no_snapshots` |
//! | manifest not recorded as verified | a crash between rename and seal | publish and verify it anew | `unrecorded_manifest_is_published_anew` |
//! | frames after the last valid one, no mark covers them | a torn tail | cut, report | `torn_tail_is_cut` |
//! | the same, but a mark covers them | bit rot, a lost write | refuse with file, offset, lsn | `damage_under_a_mark_is_refused` |
//! | a place of the next frame that cannot be read | a latent sector error | refuse: an error says nothing about the log | `unreadable_log_is_refused` |
//! | frames of an older incarnation past its end | cut by an earlier recovery | never read | `cut_frames_stay_cut` |
//! | the newest segment missing | a lost file | refuse: a segment with frames has a successor | `missing_newest_segment_is_refused` |
//! | a segment in between missing, foreign, cut short | a lost or swapped file | refuse | `missing_segment_is_refused` |
//! | the header of a segment with frames bad | bit rot | refuse | `bad_segment_header_is_refused` |
//! | the header of the empty newest segment bad | bit rot | nothing is lost: replaced | `bad_header_of_empty_segment_is_harmless` |
//! | a newest incarnation without a batch | an open that committed nothing | it is left out of the line, and its segments go | `opens_that_commit_nothing_leave_the_disk_as_it_was` |
//! | an incarnation that its successor left out | a crash before its segments went | it means nothing: recycled | `a_crash_while_an_incarnation_is_left_out_costs_nothing` |
//! | a newest incarnation without a batch, but a manifest's `redo` lies in it | a fork's first one; a snapshot without commits before it | it stays as long as the manifest | `an_incarnation_in_which_a_replay_begins_stays` |
//! | the same, but a manifest cannot be read | bit rot | it stays: the manifest may be one that points into it | `an_unreadable_manifest_keeps_every_incarnation` |
//! | an empty segment more than needed | a crash before the opening's rename | replaced or recycled | `crash_before_the_rename_changes_nothing` |
//!
//! Pages that are loaded on demand are judged when they are loaded: `lazy_load.rs`.
//!
//! # The order
//!
//! 1. Lock; sync the folders, so that every name that a listing shows is durable; read STORE.
//! 2. Survey the files. Resolve the final page table from the newest usable snapshot and the log (I10).
//! 3. Check the budget; load images past the cache; replay the log onto them. A page that is wanted only
//!    on demand, and is exactly what its image says, is left for `lazy_load.rs`. Until here nothing is
//!    written: a store that is refused is left as it is.
//! 4. Add to STORE the features of what this build writes, where it lacks any. A crash from here on
//!    leaves a store that an older build refuses, and never one in which it meets bytes that it does not
//!    know. Publish anew a snapshot that is not recorded as verified (I7). Begin the new incarnation
//!    (I5): build the opening segment whole under a temporary name, sync it, read it back; make the empty
//!    segment after it; rename; sync the folder. **The rename is the only commit point**: before it,
//!    nothing has changed and the next open does all of this again. An incarnation that accepted no batch
//!    is left out of the line: the new one names the same predecessor, and begins where the one left out
//!    began.
//! 5. Recycle what was cut and what was left out, unless a reader is on its way through it; remove what
//!    nothing names; report. A crash in between leaves segments of an incarnation that is not on the line,
//!    and so does a reader. They mean nothing; the next open, or the next snapshot, recycles them.

pub(crate) mod create;
mod survey;
mod log_reader;
pub(crate) mod image_loader;
mod catalog;
mod verified_snapshots;
mod lent_pages;
mod page_memory;
mod lowered_pages;
mod loaded_pages;
mod submitted_lists;
mod deltas;
mod load;
mod candidates;
pub(crate) mod opening;
mod outlook;
mod report;
mod page_sources;
mod lazy_load;

use std::collections::HashMap;
use std::sync::Arc;

use remanent_format::judge::Record;
use remanent_format::log::LogEnd;
use remanent_format::segment::FORMAT_VERSION;
use remanent_format::state::follow::Resolution;
use remanent_format::state::survey::Survey;
use remanent_format::store::StoreFile;
use remanent_format::{Defect, FileName, Folder, LogPoint, PageId, PageTable, Position, SnapshotId, StoreId};

use self::candidates::BestCandidate;
pub(crate) use self::lazy_load::PageLoader;
use self::lowered_pages::LoweredPages;
use self::opening::{Predecessor, begin};
pub(crate) use self::outlook::Outlook;
pub use self::report::RecoveryReport;
use crate::applier::AppliedState;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::base::sync::Instant;
use crate::catalog::Catalog;
use crate::catalog::publish::{MakeOfSpare, publish, publish_manifest};
use crate::device::Device;
use crate::disk::image_spares::ImageSpares;
use crate::disk::source::DiskSource;
use crate::disk::{Disk, DiskLock};
use crate::error::{Error, Result};
use crate::images::disk_pages::DiskPages;
use crate::log::{LogStart, SegmentPool, SegmentRules, SpacePurpose};
use crate::memory::arena::Arena;
use crate::memory::staging::StagingPool;
use crate::options::{LogIo, Options};

/// A recovered store, as recovery hands it over.
pub(crate) struct RecoveredStore {
    /// STORE, with the features of what this build writes.
    pub store: StoreFile,
    /// The state as the applier has it: table, memory, and the point in the log.
    pub applied: AppliedState,
    /// The same table as the applier's, for commits.
    pub submitted: PageTable,
    /// The pages that are not as the newest snapshot has them.
    pub changed: Vec<PageId>,
    /// Where the log goes on, in the new incarnation.
    pub log: LogStart,
    /// The payload of a batch that the tables have and the log does not.
    pub first_batch: Option<Vec<u8>>,
    /// Segments for the log to come, and those that wait to be used again.
    pub pool: Arc<SegmentPool>,
    /// The files that are kept, and why.
    pub catalog: Catalog,
    /// How much log lies after the newest snapshot.
    pub behind: ReplayBacklog,
    /// The report for the caller.
    pub recovered: RecoveryReport,
}

/// How much log lies after the newest snapshot: the next one is due by this.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReplayBacklog {
    /// Bytes of its segments on disk, at their full length, and of the images that it names. A short run
    /// that commits little still takes whole segments, so the bytes of frames alone would never make a
    /// snapshot due.
    pub bytes: u64,
    /// The openings in it, that of this run among them. Each has a segment of its own, however little it
    /// committed.
    pub restarts: usize,
}

impl ReplayBacklog {
    /// Counts from the snapshot that was used: the next open would replay the same again.
    fn of(survey: &Survey, resolution: &Resolution) -> Self {
        let base = resolution.base.and_then(|base| survey.links[&base].as_ref().ok());
        let (from, offset) = base.map_or((0, 0), |(link, _)| (link.redo.segment, link.redo.offset));
        let segments = survey.log.segments().range(from..).filter(|(_, segment)| segment.frames.is_some());
        let segment_bytes: u64 = segments.map(|(_, segment)| segment.file_len).sum();
        let openings = survey.log.line().iter().filter(|(segment, _)| *segment > from);
        // Where nothing was committed after the snapshot, another one would gain nothing.
        let bytes = if resolution.batches == 0 { 0 } else { segment_bytes.saturating_sub(offset) };
        Self { bytes: bytes.saturating_add(resolution.ahead_bytes), restarts: openings.count() + 1 }
    }
}

/// Writes a small file for an open, which must work on a full disk: where there is no space, it is made of a
/// spare, or spares give theirs. Deletes free space, but only in a store that is open.
fn with_reserve<T>(pool: &SegmentPool, mut write: impl FnMut(&MakeOfSpare) -> Result<T>) -> Result<T> {
    let spare = |temporary, len| pool.make_small(temporary, len, 0, SpacePurpose::Open);
    loop {
        match write(&spare) {
            Err(Error::DiskFull { .. }) if pool.release_reserve()? => {}
            written => return written,
        }
    }
}

/// Spares beyond the reserve take at most this share of the file system, unless the options say otherwise.
const SPARE_SHARE: u64 = 100;
/// Spares beyond the reserve take at most this number of bytes, unless the options say otherwise.
const SPARE_BYTES_MAX: u64 = 512 << 20;

/// The parts of a store that a recovery works with.
pub(crate) struct Recovery<'a> {
    /// The directory, whose lock the caller holds.
    pub disk: Arc<dyn Disk>,
    pub device: Arc<dyn Device>,
    /// Page memory, with the budget that holds for it (I10).
    pub arena: &'a Arena,
    /// Host memory that lanes copy through.
    pub staging: &'a StagingPool,
    /// The caller's wishes: budget, identity, what may be loaded later.
    pub options: &'a Options,
    /// How the log will be written.
    pub log_io: LogIo,
    /// The parts that pages on disk share.
    pub disk_pages: Arc<DiskPages>,
}

impl Recovery<'_> {
    /// Creates or recovers the store. The caller holds the lock.
    pub fn open(&self) -> Result<RecoveredStore> {
        let _phase = phases::enter(Phase::Recovery);
        let started = Instant::now();
        let is_store = |name: &String| FileName::parse(Folder::Root, name) == Some(FileName::Store);
        let exists = self.disk.list(Folder::Root)?.iter().any(is_store);
        let mut opened = if exists { self.recover()? } else { self.create()? };
        opened.recovered.elapsed = started.elapsed();
        Ok(opened)
    }

    /// Recovers a store. The numbers are those of the order in the module's docs: up to 3 nothing is
    /// written, so that a refusal, or a crash, costs nothing.
    fn recover(&self) -> Result<RecoveredStore> {
        // I6: a name that is not durable yet must not be trusted. A rename may be in the cache only: a
        // power cut after this open would bring the old name back, when the new incarnation already
        // relies on the new one. A folder that is missing is judged later, by what it should hold.
        // 1.
        let inner: Vec<Folder> = Folder::INNER.into_iter().collect();
        let present = self.disk.list(Folder::Root)?;
        for folder in inner.iter().filter(|folder| present.iter().any(|name| name == folder.name())) {
            self.disk.sync_folder(*folder)?;
        }
        self.disk.sync_folder(Folder::Root)?;

        // The source notes which ranges of the log the cache did not have: those came from the medium,
        // and step 3 need not read them again (I6).
        let source = DiskSource::noting(self.disk.clone());
        // 2. and 3.
        let survey = survey::read(&source)?;
        self.check_identity(&survey.store)?;
        // Segments are made before STORE, so a store always has a log: an empty folder means that the log
        // was lost. Taken for a new store, it would acknowledge batches under numbers that were given
        // before.
        if survey.log.newest().is_none() {
            let (number, defect) = match survey.log.segments().iter().next_back() {
                Some((number, newest)) => (*number, newest.header.clone().err().unwrap_or(Defect::Missing)),
                None => (1, Defect::Missing),
            };
            return Err(defect.at_lsn(FileName::Segment(number), 0, survey.mark()).into());
        }

        let BestCandidate { resolution, mut loaded, mut draft, mut harmless } =
            self.load_best(&source, &survey)?;
        let end = resolution.end.clone().expect("followed to its end");
        // I4: a mark above the log's end is damage, which is refused before.
        assert!(end.accepted.lsn >= survey.mark());
        assert!(end.proven.lsn <= end.accepted.lsn); // I6
        harmless.extend(end.harmless.iter().cloned());
        // A snapshot that is recorded and not there is forgotten with the seal that comes: only this open
        // can report it.
        for damage in Record(&end.verified).lost(&survey) {
            if harmless.iter().all(|known| (known.file, &known.defect) != (damage.file, &damage.defect)) {
                tracing::warn!(%damage, "a snapshot that was kept is lost");
                harmless.push(damage);
            }
        }

        // 4. The new incarnation. Each step assumes that the one before is durable: features before any
        //    byte that an older build would misread; manifests before the seal that records them.
        let store = survey.store.store;
        let highest = survey.log.segments().keys().next_back().copied().unwrap_or(0);
        let (tail, lowered) = (std::mem::take(&mut loaded.tail), loaded.lowered.take());
        // All is read and proven. From here on the directory changes; a store that was refused was not
        // touched.
        for folder in inner {
            self.disk.make_folder(folder)?;
        }
        // Before anything new is made: later, an unfinished file of a crash could not be told from one in
        // use.
        self.remove_temporaries()?;
        let pool = self.pool(store)?;
        let store_file = self.with_features(&pool, survey.store.clone())?;
        let copied_batches = tail.len() as u64;
        let newest = end.accepted.incarnation;
        let on_line = end_without(&survey, &end).unwrap_or_else(|| end.clone());
        // The opening goes over the highest segment. That one is empty: a segment with frames has a
        // successor (I8). So the rename replaces nothing that counts.
        let before = Predecessor { segment: highest, newest, end: Some(on_line.clone()), tail };
        // I7: the opening seal records the snapshot as verified. A manifest that no frame under a mark
        // records may have its name in the cache only, so it is published anew before that. The seal,
        // under a mark, could outlive the name: then the next open would miss a snapshot that licensed
        // recycling.
        for link in std::mem::take(&mut draft.anew) {
            with_reserve(&pool, |spare| publish_manifest(&self.disk, link, usize::MAX, spare))?;
        }
        let (log, position) = begin(&pool, store, &before, draft.verified.clone())?;
        assert!(position.lsn == end.accepted.lsn); // I5: every batch that could be read is carried on.
        assert!(position.incarnation.number > newest.number); // I5: no incarnation begins twice.

        // 5. Remains of the crash: segments of batches that were copied, and the incarnation that was left
        //    out of the line. Only now: before the rename nothing was ours to change, and until its folder
        //    is synced a power cut may bring the incarnation back. Segments that such an incarnation needs
        //    would be gone then.
        let goes = on_line.proven.segment + 1..highest;
        let mut junk: Vec<u64> = survey.log.segments().keys().copied().filter(|n| goes.contains(n)).collect();
        // I8: a replay from the snapshot that was used begins before all of them.
        let base = resolution.base.and_then(|base| survey.links[&base].as_ref().ok());
        assert!(base.is_none_or(|(link, _)| link.redo.segment <= on_line.proven.segment));
        let readers_locked_out =
            if junk.is_empty() { Some(Vec::new()) } else { self.lock_out_readers(&survey) };
        if readers_locked_out.is_none() {
            // I8: a reader that has begun may be on its way through them, up to the last batch.
            junk.retain(|number| *number > end.accepted.segment);
        }
        pool.recycle(&junk)?;
        drop(readers_locked_out);
        let mut changed = std::mem::take(&mut draft.changed);
        let mut submitted = std::mem::take(&mut draft.submitted);
        let spares = pool.image_spares().clone();
        let catalog = self.keep(draft, spares, &survey, resolution.base, end.accepted.lsn)?;

        let mut recovered = self.report(position, false);
        recovered.previous = Some(Position { incarnation: end.accepted.incarnation, lsn: end.accepted.lsn });
        recovered.snapshot = resolution.base;
        let behind = ReplayBacklog::of(&survey, &resolution);
        recovered.replayed_batches = resolution.batches;
        recovered.replayed_bytes = resolution.bytes;
        recovered.copied_batches = copied_batches;
        recovered.torn = end.torn;
        recovered.harmless = harmless;
        tracing::info!(
            incarnation = %position.incarnation, lsn = %position.lsn, snapshot = ?recovered.snapshot,
            replayed = recovered.replayed_batches, copied = copied_batches, torn = ?recovered.torn, "recovered"
        );
        // From here on nothing fails, so the memory need not be given back any more.
        let (memory, on_disk, unloaded) = loaded.keep()?;
        // I10: each page of the table has the memory that was claimed for it, and there is no other.
        let (left, _) = unloaded.left();
        let count = memory.len() + on_disk.len();
        assert!(count as u64 + left == resolution.resolved.table.pages().len() as u64);
        recovered.unloaded_pages = left;
        let (mut table, unloaded) = (resolution.resolved.table, Arc::new(unloaded));
        let mut first_batch = None;
        if let Some(LoweredPages { table: after, pages, payload }) = lowered {
            (table, submitted) = (after.clone(), after);
            changed.extend(&pages);
            recovered.lowered_pages = pages.len() as u64;
            first_batch = Some(payload);
        }
        let applied = AppliedState {
            table,
            memory,
            on_disk: self.disk_pages.table(on_disk),
            unloaded,
            point: log.point,
            deleted: None,
            cut: None,
            catches: HashMap::new(),
        };
        Ok(RecoveredStore {
            store: store_file,
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

    /// Keeps readers from beginning anywhere. `None` if a reader has begun: it may be on its way through
    /// the log. A lock that cannot be tried, for want of space or of a handle, counts as a reader: what the
    /// crash left goes with a later snapshot then.
    fn lock_out_readers(&self, survey: &Survey) -> Option<Vec<Box<dyn DiskLock>>> {
        // Number 0 is the log's beginning. A reader may also have begun at a link that no record names.
        let starts = survey.links.keys().copied().chain([SnapshotId(0)]);
        let mut locks = Vec::new();
        for snapshot in starts {
            match self.disk.try_retire(snapshot) {
                Ok(lock) => locks.push(lock?),
                Err(error) => {
                    tracing::warn!(%error, "segments that a reader may need stay for now");
                    return None;
                }
            }
        }
        Some(locks)
    }

    /// Refuses a store that is not the caller's, or not for this build to write.
    ///
    /// A store with features that this build does not know can at most be read. Bytes written by it could
    /// break what the features promise.
    fn check_identity(&self, store: &StoreFile) -> Result<()> {
        if !store.is_writable() {
            let features = store.features.read_compatible;
            return Err(Defect::Version { version: FORMAT_VERSION, features }.at(FileName::Store, 0).into());
        }
        let record = &store.record;
        if self.options.identity.as_ref().is_some_and(|identity| *identity != record.identity) {
            return Err(Error::IdentityMismatch { found: record.identity.clone() });
        }
        if let Some(expected) = self.options.layout_fingerprint
            && record.layout_fingerprint != Some(expected)
        {
            return Err(Error::LayoutMismatch { expected, found: record.layout_fingerprint });
        }
        Ok(())
    }

    /// STORE with the features of what this build writes. They are on disk, too, when this returns.
    fn with_features(&self, pool: &SegmentPool, store: StoreFile) -> Result<StoreFile> {
        let features = store.features.with_written();
        if features == store.features {
            return Ok(store);
        }
        let store = StoreFile { features, ..store };
        let bytes = store.encode().map_err(|defect| Error::from(defect.at(FileName::Store, 0)))?;
        with_reserve(pool, |spare| publish(&self.disk, FileName::Store, 0, &[&bytes], spare)).map(|()| store)
    }

    /// Removes files under temporary names: a crash left them before their rename, so nothing names them.
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

    /// Makes the pool of segments for the log to come.
    ///
    /// Spares beyond the reserve keep a busy log from making each segment anew, zeros and a sync, while
    /// committers wait. They are bounded, because they take space that pages could have.
    fn pool(&self, store: StoreId) -> Result<Arc<SegmentPool>> {
        let rules = SegmentRules {
            len: self.options.segment_len,
            reserve: self.options.reserve_segments(),
            spare_bytes: match self.options.spare_bytes {
                Some(bytes) => bytes,
                None => {
                    let total = self.disk.total_bytes().unwrap_or_else(|error| {
                        tracing::debug!(%error, "the length of the file system cannot be told");
                        None
                    });
                    total.map_or(SPARE_BYTES_MAX, |total| total / SPARE_SHARE).min(SPARE_BYTES_MAX)
                }
            },
        };
        let image_spares = Arc::new(ImageSpares::open(self.disk.clone(), store)?);
        Ok(Arc::new(SegmentPool::new(self.disk.clone(), store, rules, self.log_io, image_spares)?))
    }
}

/// Where the log ends if its newest incarnation is left out of the line: where that one began. `None` if
/// it must stay.
///
/// Without this, a store that is opened again and again and commits nothing would fill its disk: each
/// open takes a segment, and only a snapshot after further commits gives it back.
///
/// The incarnation may go only if nothing relies on what it said. It accepted no batch, not as a copy
/// either, so that it ends where it began. No manifest's `redo` lies in it: a replay begins there. A
/// manifest that cannot be read may be one whose `redo` does.
fn end_without(survey: &Survey, end: &LogEnd) -> Option<LogEnd> {
    let newest = survey.log.newest()?;
    let (_, opening) = survey.log.line().last().filter(|(_, opening)| opening.incarnation == newest)?;
    let began = opening.predecessor;
    let is_without_batches = opening.accepted == began.lsn && end.accepted.lsn == began.lsn;
    let all_is_readable = survey.links.values().all(Result::is_ok);
    let begins_replay = || survey.readable().any(|manifest| manifest.redo.incarnation == newest);
    // One of these is enough: what was said in it may be what a replay, or an acknowledgement, goes by.
    if !is_without_batches || !all_is_readable || begins_replay() {
        return None;
    }
    // The new opening begins as the one left out began: with its batches, and its chain hash.
    let accepted = LogPoint { lsn: opening.accepted, chain: opening.accepted_chain, ..began };
    Some(LogEnd { accepted, proven: began, ..end.clone() })
}
