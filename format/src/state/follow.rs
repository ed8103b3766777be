//! Follows the log from a snapshot, batch by batch, to a state without its bytes. The caller walks the log
//! and passes each batch, so the walk may run on another thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect, check_limit};
use crate::frame::{FrameHeader, FrameKind, VerifiedSnapshot};
use crate::ids::{LogPoint, Lsn, PageId, SnapshotId};
use crate::log::{Frame, LogEnd, LogWalk};
use crate::manifest::{Manifest, ManifestKind, SingleThread, WorkPool};
use crate::names::{FileName, ReadAt};
use crate::op::{Op, OpAt, decode_payload};
use crate::state::page_changes::PageChanges;
use crate::state::replay::{ResolvedState, Resolver};
use crate::state::survey::{Survey, read_manifest};
use crate::state::window::{PageWindow, load_base};

/// A state without its bytes.
#[derive(Debug)]
pub struct Resolution {
    /// The snapshot from which the state was computed, or `None` for the log's beginning.
    pub base: Option<SnapshotId>,
    /// The state reached.
    pub resolved: ResolvedState,
    /// The end of the log, or `None` if the walk stopped earlier, at the requested batch. Its list of
    /// verified snapshots is the last one in the log, even if that precedes the base.
    pub end: Option<LogEnd>,
    /// Number of batches replayed.
    pub batches: u64,
    /// Total length of their frames in bytes.
    pub bytes: u64,
    /// The image files that the batches name, each with the last batch that names it.
    pub ahead: BTreeMap<u64, Lsn>,
    /// Stored length of these images in bytes.
    pub ahead_bytes: u64,
}

impl Resolution {
    /// Checks that the pages that have a base take at most `limit` bytes of memory in total (I10).
    ///
    /// # Errors
    /// Returns [`Damage`] with [`Defect::Limit`] if they take more.
    pub fn check_page_bytes(&self, limit: u64) -> Result<(), Damage> {
        let lens = self.resolved.bases.iter().map(|(page, _)| self.resolved.final_len(page));
        let found = lens.fold(0, u64::saturating_add);
        check_limit("bytes of all pages", found, limit).map_err(|defect| defect.at(FileName::Store, 0))
    }
}

/// A state being computed along the log.
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
    /// Starts with the state of `base`, which must be a whole snapshot, or with the empty state at the log's
    /// beginning.
    ///
    /// # Errors
    /// Returns [`Damage`] if `base` is a change, or if the log's beginning no longer exists.
    pub fn new(
        survey: &'s Survey,
        source: &'s dyn ReadAt,
        base: Option<&'s Arc<Manifest>>,
    ) -> Result<Self, Damage> {
        Self::new_by(survey, source, base, &SingleThread)
    }

    /// Starts like [`StateWalk::new`], with several threads.
    ///
    /// # Errors
    /// Returns [`Damage`] as [`StateWalk::new`] does.
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

    /// Returns the point at which the walk must start.
    #[must_use]
    pub fn start(&self) -> LogPoint {
        self.start
    }

    /// Returns the state so far.
    #[must_use]
    pub fn resolver(&self) -> &Resolver {
        &self.resolver
    }

    /// Applies the next batch of the walk, and returns its operations.
    ///
    /// # Errors
    /// Returns [`Damage`] in the batch, or in a table that a restore names.
    pub fn batch<'p>(&mut self, header: &FrameHeader, payload: &'p [u8]) -> Result<Vec<OpAt<'p>>, Damage> {
        let lsn = header.lsn;
        let at = |defect: Defect| defect.at_lsn(FileName::Segment(header.segment), header.offset, lsn);
        let ops = decode_payload(payload).map_err(at)?;
        // A restore combined with other operations is rejected by the plan, because it must be alone.
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

    /// Applies the next batches of the walk from their summary. Returns `false`, with nothing applied, if
    /// each of them must be passed to [`batch`](Self::batch).
    pub fn page_changes(&mut self, changes: &PageChanges) -> bool {
        let followed = self.resolver.page_changes(changes);
        if followed {
            self.batches += changes.batches as u64;
            self.bytes += changes.frame_bytes;
        }
        followed
    }

    /// Returns the state at the point where the walk stopped. `end` is the end of the log, if the walk
    /// reached it.
    ///
    /// # Errors
    /// Returns [`Damage`] if the snapshot needs more of the log, or if two pages have the same key.
    pub fn finish(self, mut end: Option<LogEnd>, point: LogPoint) -> Result<Resolution, Damage> {
        if let Some((end, base)) = end.as_mut().zip(self.base)
            && end.verified.is_empty()
        {
            end.verified = self.recorded_before(base);
        }
        let here = FileName::Segment(point.segment);
        self.resolve(end, |defect| defect.at_lsn(here, point.offset, point.lsn.next()))
    }

    /// Returns the snapshot's own state without any log, which requires that the snapshot was captured at one
    /// moment.
    ///
    /// # Errors
    /// Returns [`Damage`] if it was not, or if two pages have the same key.
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

    /// Finds the last list of verified snapshots before a snapshot's `redo`.
    ///
    /// A snapshot is recorded before the next one begins, so its record follows the `redo` of an earlier
    /// snapshot. If a crash occurs after a snapshot but before its record, there may be no seal after its
    /// `redo`; the other snapshots must not be forgotten in that case.
    fn recorded_before(&self, base: &Manifest) -> Vec<VerifiedSnapshot> {
        let Self { survey, source, .. } = self;
        let place = |point: LogPoint| (point.segment, point.offset);
        let older = survey.links.range(..base.snapshot).rev().filter_map(|(_, read)| read.as_ref().ok());
        // An earlier walk found no record up to here, so each part of the log is searched once.
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

/// Called after each batch is applied, with its operations.
pub(crate) type BatchNote<'n> = &'n mut dyn FnMut(&Resolver, &Frame<'_>, &[OpAt<'_>]) -> Result<(), Damage>;

impl Survey {
    /// Follows the log from `base`, which must be a whole snapshot, to the log's end or to `until`. No log is
    /// needed if the snapshot was captured at one moment and `until` is that moment.
    ///
    /// # Errors
    /// Returns [`Damage`] in the log or in a table that a restore names, or if `base` is a change.
    pub fn resolve(
        &self,
        source: &dyn ReadAt,
        base: Option<&Arc<Manifest>>,
        until: Option<Lsn>,
    ) -> Result<Resolution, Damage> {
        self.follow(source, base, until, &mut |_, _, _| Ok(()))
    }

    /// Follows the log like [`Survey::resolve`], and calls `note` after each batch is applied.
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
        let walk = LogWalk::new(source, &self.log, following.start(), self.mark())?;
        // A walk that stops before the end may not reach the damage that other walks met.
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

    /// Loads the bytes of a state. Damage to an image affects only its own page.
    ///
    /// # Errors
    /// Returns [`Damage`] in the log that occurred after the state was resolved, or if the pages take more
    /// than `page_bytes_max` bytes in total.
    pub fn load(
        &self,
        source: &dyn ReadAt,
        resolution: &Resolution,
        page_bytes_max: u64,
    ) -> Result<BTreeMap<PageId, Result<Vec<u8>, Damage>>, Damage> {
        let resolved = &resolution.resolved;
        resolution.check_page_bytes(page_bytes_max)?;
        // This map and the one below are filled item by item, because `collect` first sorts all items in one
        // allocation, whose failure cannot be reported.
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
        // Walk the same part of the log again, now for the bytes.
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

    /// Reads the table of an old state that a restore names.
    ///
    /// # Errors
    /// Returns [`Damage`] if the table is missing, damaged, or not the one with this checksum.
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
