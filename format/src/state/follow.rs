//! Computes a state from a snapshot and the batches after the snapshot. The bytes of pages are not read. The caller
//! walks the log and passes each batch, so that the walk can run on another thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect, check_limit};
use crate::frame::{FrameHeader, FrameKind, VerifiedSnapshot};
use crate::ids::{LogPoint, Lsn, PageId, SnapshotId};
use crate::log::{Frame, LogEnd, LogWalk, Reading};
use crate::manifest::{Manifest, ManifestKind, SingleThread, WorkPool};
use crate::names::{FileName, ReadAt};
use crate::op::{Op, OpAt, decode_payload};
use crate::state::page_changes::PageChanges;
use crate::state::replay::{ResolvedState, Resolver};
use crate::state::survey::{Survey, read_manifest};
use crate::state::window::{PageWindow, load_base};

/// A computed state without the bytes of its pages, and totals of the batches that were replayed.
#[derive(Debug)]
pub struct Resolution {
    /// The snapshot from which the state was computed, or `None` for the beginning of the log.
    pub base: Option<SnapshotId>,
    /// The page table of the state, and the base of each page.
    pub resolved: ResolvedState,
    /// The end of the log, or `None` if the caller requested an earlier batch and the walk stopped there. The verified
    /// snapshots are those of the last seal in the log, even if that seal precedes the base.
    pub end: Option<LogEnd>,
    /// Number of replayed batches.
    pub batches: u64,
    /// Total length of the replayed frames in bytes.
    pub bytes: u64,
    /// The image files that the replayed batches name. The value is the Lsn of the last batch that names the file.
    pub ahead: BTreeMap<u64, Lsn>,
    /// Total stored length in bytes of the images that the replayed batches name.
    pub ahead_bytes: u64,
}

impl Resolution {
    /// Checks that the total length of all pages is at most `limit` bytes (I10).
    ///
    /// # Errors
    /// Returns [`Damage`] with [`Defect::Limit`] if the pages are longer.
    pub fn check_page_bytes(&self, limit: u64) -> Result<(), Damage> {
        let lens = self.resolved.bases.iter().map(|(page, _)| self.resolved.final_len(page));
        let found = lens.fold(0, u64::saturating_add);
        check_limit("bytes of all pages", found, limit).map_err(|defect| defect.at(FileName::Store, 0))
    }
}

/// Computes a state from batches, which the caller passes in the order of the log.
pub struct StateWalk<'s> {
    survey: &'s Survey,
    source: &'s dyn ReadAt,
    base: Option<&'s Manifest>,
    resolver: Resolver,
    start: LogPoint,
    batches: u64,
    bytes: u64,
    ahead: BTreeMap<u64, Lsn>,
    ahead_bytes: u64,
}

impl<'s> StateWalk<'s> {
    /// Starts from the state of `base`, which must name all pages, or from the empty state at the beginning of the log.
    ///
    /// # Errors
    /// Returns [`Damage`] if `base` is a change, or if the beginning of the log no longer exists.
    pub fn new(
        survey: &'s Survey,
        source: &'s dyn ReadAt,
        base: Option<&'s Arc<Manifest>>,
    ) -> Result<Self, Damage> {
        Self::new_by(survey, source, base, &SingleThread)
    }

    /// Starts as [`StateWalk::new`] does. The threads of a pool share the work.
    ///
    /// # Errors
    /// Returns the same [`Damage`] as [`StateWalk::new`].
    pub fn new_by(
        survey: &'s Survey,
        source: &'s dyn ReadAt,
        base: Option<&'s Arc<Manifest>>,
        threads: &impl WorkPool,
    ) -> Result<Self, Damage> {
        let beginning =
            || survey.log.beginning().ok_or(Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1)));
        let (resolver, start) = match base {
            Some(manifest) if manifest.kind != ManifestKind::Base => {
                let file = FileName::Manifest(manifest.snapshot.0);
                let found = manifest.kind.to_raw().into();
                return Err(Defect::Field { what: "manifest kind", found }.at(file, 0));
            }
            Some(manifest) => (Resolver::from_manifest_by(manifest, threads), manifest.redo),
            None => (Resolver::new(), beginning()?),
        };
        let base = base.map(AsRef::as_ref);
        Ok(Self {
            survey,
            source,
            base,
            resolver,
            start,
            batches: 0,
            bytes: 0,
            ahead: BTreeMap::new(),
            ahead_bytes: 0,
        })
    }

    /// Returns the point in the log at which the caller must start the walk.
    #[must_use]
    pub fn start(&self) -> LogPoint {
        self.start
    }

    /// Returns the page table and the bases as of the last batch that was passed.
    #[must_use]
    pub fn resolver(&self) -> &Resolver {
        &self.resolver
    }

    /// Applies the next batch of the log. Returns its operations.
    ///
    /// # Errors
    /// Returns [`Damage`] if the batch is invalid, or if the batch restores a damaged table.
    pub fn batch<'p>(&mut self, header: &FrameHeader, payload: &'p [u8]) -> Result<Vec<OpAt<'p>>, Damage> {
        let lsn = header.lsn;
        let at = |defect: Defect| defect.at_lsn(FileName::Segment(header.segment), header.offset, lsn);
        let ops = decode_payload(payload).map_err(at)?;
        // A restore must be the only operation. `Resolver::batch` rejects any other combination.
        if let [OpAt { op: Op::Restore { table, table_crc, .. }, .. }] = ops.as_slice() {
            let table = self.survey.read_table(self.source, *table, *table_crc)?;
            self.resolver.restore(lsn, table).map_err(at)?;
        } else {
            self.resolver.batch(lsn, &ops).map_err(at)?;
        }
        let images =
            ops.iter().filter_map(|at| if let Op::Image { image, .. } = &at.op { Some(image) } else { None });
        for image in images {
            self.ahead.insert(image.file, lsn);
            self.ahead_bytes = self.ahead_bytes.saturating_add(image.stored_len);
        }
        self.batches += 1;
        self.bytes += header.frame_len();
        Ok(ops)
    }

    /// Applies the next batches of the log, given their summary. Returns `false`, with no batch applied, if the caller
    /// must pass each of these batches to [`batch`](Self::batch).
    pub fn page_changes(&mut self, changes: &PageChanges) -> bool {
        let followed = self.resolver.page_changes(changes);
        if followed {
            self.batches += changes.batches as u64;
            self.bytes += changes.frame_bytes;
        }
        followed
    }

    /// Returns the state after the last batch that was passed. `point` is the point at which the walk of the log
    /// stopped. `end` is the end of the log, or `None` if the walk stopped at an earlier batch.
    ///
    /// # Errors
    /// Returns [`Damage`] if the walk stopped before the `end` of the snapshot, or if two pages have the same key.
    pub fn finish(self, mut end: Option<LogEnd>, point: LogPoint) -> Result<Resolution, Damage> {
        if let Some((end, base)) = end.as_mut().zip(self.base)
            && end.verified.is_empty()
        {
            end.verified = self.recorded_before(base);
        }
        let here = FileName::Segment(point.segment);
        self.resolve(end, |defect| defect.at_lsn(here, point.offset, point.lsn.next()))
    }

    /// Returns the state of the snapshot without reading the log. All pages of the snapshot must have been captured as
    /// of the same batch.
    ///
    /// # Errors
    /// Returns [`Damage`] if the pages were captured as of different batches, or if two pages have the same key.
    pub fn finish_at_base(self) -> Result<Resolution, Damage> {
        let file = FileName::Manifest(self.base.map_or(0, |base| base.snapshot.0));
        self.resolve(None, |defect| defect.at(file, 0))
    }

    fn resolve(self, end: Option<LogEnd>, at: impl Fn(Defect) -> Damage) -> Result<Resolution, Damage> {
        let Self { resolver, base, batches, bytes, ahead, ahead_bytes, .. } = self;
        let resolved = resolver.finish().map_err(at)?;
        Ok(Resolution {
            base: base.map(|base| base.snapshot),
            resolved,
            end,
            batches,
            bytes,
            ahead,
            ahead_bytes,
        })
    }

    /// Returns the verified snapshots of the last seal before a snapshot's `redo`.
    ///
    /// The seal that lists a snapshot is written before the next snapshot begins. A crash can remove all seals after
    /// the `redo` of the newest snapshot, so the list must then come from a seal before that point.
    fn recorded_before(&self, base: &Manifest) -> Vec<VerifiedSnapshot> {
        let Self { survey, source, .. } = self;
        let place = |point: LogPoint| (point.segment, point.offset);
        let older = survey.links.range(..base.snapshot).rev().filter_map(|(_, read)| read.as_ref().ok());
        // The walks from newer snapshots have already searched the log from this point on.
        let mut until = place(base.redo);
        let mut records = older.filter_map(|(link, _)| {
            let mut walk = LogWalk::new(*source, &survey.log, link.redo, survey.mark()).ok()?;
            while place(walk.point()) < until {
                walk.next().ok()??;
            }
            until = until.min(place(link.redo));
            Some(walk.verified().to_vec()).filter(|record| !record.is_empty())
        });
        records.next().unwrap_or_default()
    }
}

/// A function that is called after each batch. Its arguments are the state after the batch, the frame, and the
/// operations of the batch.
pub(crate) type BatchNote<'n> = &'n mut dyn FnMut(&Resolver, &Frame<'_>, &[OpAt<'_>]) -> Result<(), Damage>;

impl Survey {
    /// Computes the state after batch `until`, or at the end of the log if `until` is `None`. `base` must name all
    /// pages. The log is not read if all pages of the snapshot were captured at batch `until`.
    ///
    /// # Errors
    /// Returns [`Damage`] if the log or a restored table is damaged, or if `base` is a change.
    pub fn resolve(
        &self,
        source: &dyn ReadAt,
        base: Option<&Arc<Manifest>>,
        until: Option<Lsn>,
    ) -> Result<Resolution, Damage> {
        self.follow(source, base, until, &mut |_, _, _| Ok(()))
    }

    /// Computes a state as [`Survey::resolve`] does, and calls `note` after each batch.
    pub(crate) fn follow(
        &self,
        source: &dyn ReadAt,
        base: Option<&Arc<Manifest>>,
        until: Option<Lsn>,
        note: BatchNote<'_>,
    ) -> Result<Resolution, Damage> {
        let mut following = StateWalk::new(self, source, base)?;
        if base.is_some_and(|manifest| Some(manifest.redo.lsn) == until) {
            return following.finish_at_base();
        }
        let allocate = |len| source.allocate(len);
        let reading = Reading::single_threaded(&allocate);
        let walk = LogWalk::reading_into(source, &self.log, following.start(), self.mark(), reading)?;
        // Only a walk to the end of the log may share its outcome.
        let mut walk = if until.is_none() { walk.sharing_outcomes() } else { walk };
        while until.is_none_or(|until| walk.point().lsn < until) {
            let Some(frame) = walk.next()? else { break };
            if frame.header.kind == FrameKind::Batch {
                let ops = following.batch(&frame.header, frame.payload)?;
                note(following.resolver(), &frame, &ops)?;
            }
        }
        following.finish(walk.end().cloned(), walk.point())
    }

    /// Reads the bytes of all pages of a state. Damage to an image affects only its own page.
    ///
    /// # Errors
    /// Returns [`Damage`] if the log has changed since the state was computed, or if the total length of the pages
    /// exceeds `page_bytes_max` bytes.
    pub fn load(
        &self,
        source: &dyn ReadAt,
        resolution: &Resolution,
        page_bytes_max: u64,
    ) -> Result<BTreeMap<PageId, Result<Vec<u8>, Damage>>, Damage> {
        let resolved = &resolution.resolved;
        resolution.check_page_bytes(page_bytes_max)?;
        // The maps are filled item by item. `collect` sorts all items in one allocation, whose failure cannot be
        // returned.
        let mut heads: BTreeMap<PageId, Result<PageWindow, Damage>> = BTreeMap::new();
        for (page, base) in resolved.bases.iter() {
            heads.insert(page, load_base(source, &base, resolved.final_len(page)));
        }
        let bytes = |heads: BTreeMap<PageId, Result<PageWindow, Damage>>| {
            let mut bytes = BTreeMap::new();
            for (page, head) in heads {
                bytes.insert(page, head.map(PageWindow::into_bytes));
            }
            bytes
        };
        let base = resolution.base.and_then(|base| self.links.get(&base)?.as_ref().ok());
        let from = match base {
            Some((manifest, _)) => manifest.redo,
            None => self.log.beginning().ok_or(Defect::Missing.at_lsn(FileName::Segment(1), 0, Lsn(1)))?,
        };
        if resolution.batches == 0 {
            return Ok(bytes(heads));
        }
        // Read the same part of the log again, to apply its bytes.
        let mut walk = LogWalk::new(source, &self.log, from, self.mark())?;
        while walk.point().lsn < resolved.table.lsn() {
            let Some(frame) = walk.next()? else { break };
            if frame.header.kind != FrameKind::Batch {
                continue;
            }
            let (lsn, file, offset) =
                (frame.header.lsn, FileName::Segment(frame.header.segment), frame.header.offset);
            for at in decode_payload(frame.payload).map_err(|defect| defect.at_lsn(file, offset, lsn))? {
                let Some(page) = at.op.page().filter(|page| resolved.applies(*page, lsn)) else { continue };
                if let Ok(head) = heads.get_mut(&page).expect("every base is a page's") {
                    head.apply(&at.op);
                }
            }
        }
        Ok(bytes(heads))
    }

    /// Reads the page table of an earlier state. The number and the checksum of the table come from a restore
    /// operation.
    ///
    /// # Errors
    /// Returns [`Damage`] if the table is missing or damaged, or if its checksum differs.
    pub fn read_table(&self, source: &dyn ReadAt, table: u64, table_crc: u32) -> Result<Manifest, Damage> {
        let file = FileName::Table(table);
        let (manifest, health) = read_manifest(source, file, &self.store)?;
        if health.header_crc != table_crc {
            let (found, expected) = (health.header_crc.into(), table_crc.into());
            return Err(
                Defect::Mismatch { what: "checksum of the restored table", found, expected }.at(file, 0)
            );
        }
        Ok(manifest)
    }
}

impl std::fmt::Debug for StateWalk<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateWalk")
            .field("start", &self.start)
            .field("batches", &self.batches)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
