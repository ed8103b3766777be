//! Following the log from a snapshot, batch by batch, to a state without its bytes. The caller walks the log
//! and hands each batch over, so the walk may run on a thread of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect, check_limit};
use crate::frame::{FrameHeader, FrameKind, VerifiedSnapshot};
use crate::ids::{LogPoint, Lsn, PageId, SnapshotId};
use crate::log::{Frame, LogEnd, LogWalk};
use crate::manifest::{Manifest, ManifestKind, Share, SingleThread};
use crate::names::{FileName, ReadAt};
use crate::op::{Op, OpAt, decode_payload};
use crate::state::page_changes::PageChanges;
use crate::state::replay::{ResolvedState, Resolver};
use crate::state::survey::{Survey, read_manifest};
use crate::state::window::{PageWindow, load_base};

/// A state without its bytes.
#[derive(Debug)]
pub struct Resolution {
    /// The snapshot from which it was followed; `None` is the log's beginning.
    pub base: Option<SnapshotId>,
    /// The state reached.
    pub resolved: ResolvedState,
    /// The end of the log; `None` if the walk stopped before, at the batch asked for. Its record of verified
    /// snapshots is the last one there is, also where that lies before the base.
    pub end: Option<LogEnd>,
    /// Number of batches replayed.
    pub batches: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// The image files that they name, each with the last batch that does.
    pub ahead: BTreeMap<u64, Lsn>,
    /// Bytes of these images, as they are stored.
    pub ahead_bytes: u64,
}

impl Resolution {
    /// Refuses pages that take more than `limit` bytes of memory together (I10): those that have a base here.
    ///
    /// # Errors
    /// [`Defect::Limit`].
    pub fn check_page_bytes(&self, limit: u64) -> Result<(), Damage> {
        let lens = self.resolved.bases.iter().map(|(page, _)| self.resolved.final_len(page));
        let found = lens.fold(0, u64::saturating_add);
        check_limit("bytes of all pages", found, limit).map_err(|defect| defect.at(FileName::Store, 0))
    }
}

/// A state on its way along the log.
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
    /// The state of `base`, a whole snapshot, or the empty one of the log's beginning.
    ///
    /// # Errors
    /// [`Damage`] if `base` is a change, or the log's beginning is not there any more.
    pub fn new(
        survey: &'s Survey,
        source: &'s dyn ReadAt,
        base: Option<&'s Arc<Manifest>>,
    ) -> Result<Self, Damage> {
        Self::new_by(survey, source, base, &SingleThread)
    }

    /// As [`StateWalk::new`], by several threads.
    ///
    /// # Errors
    /// As for [`StateWalk::new`].
    pub fn new_by(
        survey: &'s Survey,
        source: &'s dyn ReadAt,
        base: Option<&'s Arc<Manifest>>,
        threads: &impl Share,
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

    /// The point at which the walk begins.
    #[must_use]
    pub fn start(&self) -> LogPoint {
        self.start
    }

    /// The state so far.
    #[must_use]
    pub fn resolver(&self) -> &Resolver {
        &self.resolver
    }

    /// Follows the next batch of the walk, and returns its operations.
    ///
    /// # Errors
    /// [`Damage`] in the batch, or in a table that a restore names.
    pub fn batch<'p>(&mut self, header: &FrameHeader, payload: &'p [u8]) -> Result<Vec<OpAt<'p>>, Damage> {
        let lsn = header.lsn;
        let at = |defect: Defect| defect.at_lsn(FileName::Segment(header.segment), header.offset, lsn);
        let ops = decode_payload(payload).map_err(at)?;
        // A restore among other operations is refused by the plan: it must stand alone.
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

    /// Follows the next batches of the walk, whose changes were summed up. Returns `false`, with nothing
    /// done, if [`batch`](Self::batch) must follow each of them.
    pub fn page_changes(&mut self, changes: &PageChanges) -> bool {
        let followed = self.resolver.page_changes(changes);
        if followed {
            self.batches += changes.batches as u64;
            self.bytes += changes.frame_bytes;
        }
        followed
    }

    /// The state at the point where the walk stopped, with the log's end if it came so far.
    ///
    /// # Errors
    /// [`Damage`] if the snapshot needs more of the log, or two pages have one key.
    pub fn finish(self, mut end: Option<LogEnd>, point: LogPoint) -> Result<Resolution, Damage> {
        if let Some((end, base)) = end.as_mut().zip(self.base)
            && end.verified.is_empty()
        {
            end.verified = self.recorded_before(base);
        }
        let here = FileName::Segment(point.segment);
        self.resolve(end, |defect| defect.at_lsn(here, point.offset, point.lsn.next()))
    }

    /// The snapshot's own state, for a caller that needs no log: the snapshot was caught at one moment.
    ///
    /// # Errors
    /// [`Damage`] if it was not, or two pages have one key.
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

    /// The last record of verified snapshots before a snapshot's redo. A snapshot is recorded before the next
    /// one begins, so its record lies after the redo of an earlier one. After a crash between a snapshot and
    /// its own record, no other seal may lie after its redo; the other snapshots must not be forgotten then.
    fn recorded_before(&self, base: &Manifest) -> Vec<VerifiedSnapshot> {
        let Self { survey, source, .. } = self;
        let place = |point: LogPoint| (point.segment, point.offset);
        let older = survey.links.range(..base.snapshot).rev().filter_map(|(_, read)| read.as_ref().ok());
        // Where a walk has looked already there is no record: each part of the log is looked at once.
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

/// Sees each batch once it was followed, with its operations.
pub(crate) type BatchNote<'n> = &'n mut dyn FnMut(&Resolver, &Frame<'_>, &[OpAt<'_>]) -> Result<(), Damage>;

impl Survey {
    /// Follows the log from `base`, a whole snapshot, to the log's end or to `until`. A snapshot that was
    /// caught at one moment, and at which the walk is to stop, needs no log at all.
    ///
    /// # Errors
    /// [`Damage`] in the log, or a table that a restore names; `base` is a change.
    pub fn resolve(
        &self,
        source: &dyn ReadAt,
        base: Option<&Arc<Manifest>>,
        until: Option<Lsn>,
    ) -> Result<Resolution, Damage> {
        self.follow(source, base, until, &mut |_, _, _| Ok(()))
    }

    /// As [`Survey::resolve`]; `note` sees each batch once it was followed.
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
        // A walk that stops before the end may not come to the damage that other walks met.
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

    /// Loads the bytes of a state, each page on its own: damage to an image costs its page and no other.
    ///
    /// # Errors
    /// [`Damage`] in the log, which held when the state was resolved; or the pages take more than
    /// `page_bytes_max` together.
    pub fn load(
        &self,
        source: &dyn ReadAt,
        resolution: &Resolution,
        page_bytes_max: u64,
    ) -> Result<BTreeMap<PageId, Result<Vec<u8>, Damage>>, Damage> {
        let resolved = &resolution.resolved;
        resolution.check_page_bytes(page_bytes_max)?;
        // A map is filled one by one, here and below: `collect` sorts all items in one piece of memory first,
        // and that cannot be refused.
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
        // The same walk again: it held a moment ago, and now the bytes are wanted.
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
    /// [`Damage`] if it is missing, damaged, or another one.
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
