//! Floor 0. Following the log from a snapshot, batch by batch, to a state without its bytes. Whoever walks the log
//! hands each batch over; so the walk may run on a thread of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::defect::{Damage, Defect};
use crate::frame::{FrameHeader, VerifiedSnapshot};
use crate::ids::{LogPoint, Lsn};
use crate::log::{LogEnd, LogWalk};
use crate::manifest::{Alone, Manifest, ManifestKind, Share};
use crate::names::{FileName, ReadAt};
use crate::op::{Op, OpAt, decode_payload};
use crate::rebuild::{Resolution, Survey};
use crate::replay::Resolver;

/// A state on its way along the log.
pub struct Following<'s> {
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

impl<'s> Following<'s> {
    /// The state of `base`, a whole snapshot, or the empty one of the log's beginning.
    ///
    /// # Errors
    /// [`Damage`] if `base` is a change, or the log's beginning is not there any more.
    pub fn new(
        survey: &'s Survey,
        source: &'s dyn ReadAt,
        base: Option<&'s Arc<Manifest>>,
    ) -> Result<Self, Damage> {
        Self::new_by(survey, source, base, &Alone)
    }

    /// As [`Following::new`], by several threads.
    ///
    /// # Errors
    /// As for [`Following::new`].
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

    /// Where the walk begins.
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

    /// The snapshot's own state, for whoever needs no log: it was caught at one moment.
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

    /// The last record of verified snapshots before a snapshot's redo: a snapshot is recorded before the next one
    /// begins, so that it lies behind the redo of one of those before. A crash between a snapshot and its own
    /// record, where no other seal lies behind its redo, must not make the others forgotten.
    fn recorded_before(&self, base: &Manifest) -> Vec<VerifiedSnapshot> {
        let Self { survey, source, .. } = self;
        let place = |point: LogPoint| (point.segment, point.offset);
        let older = survey.links.range(..base.snapshot).rev().filter_map(|(_, read)| read.as_ref().ok());
        let mut records = older.filter_map(|(link, _)| {
            let mut walk = LogWalk::new(*source, &survey.log, link.redo, survey.mark()).ok()?;
            while place(walk.point()) < place(base.redo) {
                walk.next().ok()??;
            }
            Some(walk.verified().to_vec()).filter(|record| !record.is_empty())
        });
        records.next().unwrap_or_default()
    }
}
