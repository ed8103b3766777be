//! Follows the log in a store directory, while a writer may be appending to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use remanent_format::frame::FrameKind;
use remanent_format::log::LogWalk;
use remanent_format::segment::Opening;
use remanent_format::store::StoreFile;
use remanent_format::{Damage, Defect, FileName, Folder, LogPoint, Lsn};

use super::backoff::{Pauses, Suspicion};
use super::batch::BatchFrame;
use super::seek::{self, at_start, behind, diverged, is_skipped_successor, locate};
use super::segment::{self, LiveSegment, lacks_first_frames};
use super::survey::{ask, left_out, missing, needs_confirmation, newest_snapshot, segments, survey};
use super::tail::{Tail, TakenFrame};
use super::{BatchSource, FollowFrom, FollowedBatch, FollowerPosition};
use crate::disk::source::DiskSource;
use crate::disk::{Disk, Watch};
use crate::error::{Error, Result};

/// The maximum number of consecutive checks of a log's end while segments are renamed.
const JUDGEMENTS: usize = 16;

/// A follower of the log in a store directory.
pub(super) struct LogFollower {
    disk: Arc<dyn Disk>,
    store: StoreFile,
    tail: Tail,
    position: FollowerPosition,
    /// The newest batch that is durable according to the files read so far.
    mark: Lsn,
    suspicion: Suspicion,
    /// The time at which the follower last found a frame, from which the idle time is computed.
    idle_since: Instant,
    watch: Box<dyn Watch>,
    checks: u64,
    /// The point of the last check for omitted frames in a segment that lacks its first frames. The check found that no
    /// frame after the point was omitted.
    checked_gap: Option<LogPoint>,
}

impl LogFollower {
    /// Opens a follower of a store.
    ///
    /// # Errors
    /// The errors of [`Follower::open`](super::Follower::open).
    pub fn open(disk: Arc<dyn Disk>, from: FollowFrom) -> Result<Self> {
        let complaint = |error: &Error| match error {
            // The snapshot that was found has been replaced by a newer one in the meantime.
            Error::Overtaken { .. } => from == FollowFrom::Snapshot,
            error => needs_confirmation(error),
        };
        let lsn = match from {
            FollowFrom::Position(position) => position.lsn.next(),
            FollowFrom::Beginning | FollowFrom::Snapshot => Lsn(1),
        };
        let opened = ask(&disk, lsn, complaint, |survey| {
            let position = match (from, newest_snapshot(survey)) {
                (FollowFrom::Position(position), _) => position,
                (FollowFrom::Snapshot, Some((_, redo, end))) => {
                    return Self::behind_end(disk.clone(), &survey.store, redo, end);
                }
                (FollowFrom::Beginning | FollowFrom::Snapshot, _) => FollowerPosition::BEGINNING,
            };
            let (point, position) = locate(&disk, survey, position)?;
            Ok(Self::at(disk.clone(), survey.store.clone(), survey.mark(), point, position))
        });
        opened.map_err(|error| error.in_store(&disk.label()))
    }

    /// Creates a follower that starts after the end of a snapshot. The pages of a snapshot reflect different batches,
    /// so its state is consistent only at its end. The follower therefore reads the batches from `redo` to `end` first,
    /// without returning them.
    pub fn behind_end(disk: Arc<dyn Disk>, store: &StoreFile, redo: LogPoint, end: Lsn) -> Result<Self> {
        let position = seek::at(redo);
        // I7: the log is durable up to the end of a published snapshot.
        let mut follower = Self::at(disk, store.clone(), end, redo, position);
        while follower.position.lsn < end {
            follower.wait_for_batch(Duration::MAX)?;
        }
        Ok(follower)
    }

    fn at(
        disk: Arc<dyn Disk>,
        store: StoreFile,
        mark: Lsn,
        point: LogPoint,
        position: FollowerPosition,
    ) -> Self {
        let watch = disk.watch(Folder::Log);
        let tail = Tail::new(disk.clone(), store.store, point);
        Self {
            disk,
            store,
            tail,
            position,
            mark,
            suspicion: Suspicion::new(),
            idle_since: Instant::now(),
            watch,
            checks: 0,
            checked_gap: None,
        }
    }

    fn wait_for_batch(&mut self, timeout: Duration) -> Result<Option<FollowedBatch>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut pauses = Pauses::new();
        loop {
            // 1. Return the next frame's batch, if the frame is complete.
            if let Some(batch) = self.take()? {
                return Ok(Some(batch));
            }
            // 2. Check whether the log has changed around the frame. This must precede any check for damage, because
            //    the end of an incarnation that has a successor is not the end of the log.
            let now = Instant::now();
            if self.tail.looks_like_frame() {
                self.suspicion.note(now);
            }
            let due = self.suspicion.due(now);
            let is_check_due = pauses.is_check_due(now, self.watch.has_notifications());
            if (due || is_check_due) && self.check_names()? {
                pauses.check_now();
                continue;
            }
            // 3. Check whether the next frame is damaged, in which case waiting is useless.
            if due {
                self.judge()?;
                self.suspicion.note_check(now);
                // The frame may have been completed in the meantime.
                continue;
            }
            // 4. Wait for changes, or for the pause to end.
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(now));
            if left.is_zero() {
                return Ok(None);
            }
            let pause =
                pauses.next(now.saturating_duration_since(self.idle_since), self.watch.has_notifications());
            if self.watch.wait(pause.min(left)) {
                pauses.check_now();
            }
        }
    }

    /// Takes the next batch that was not returned yet, if its frame is complete. Skips seals and batches that were
    /// copied to a new incarnation.
    fn take(&mut self) -> Result<Option<FollowedBatch>> {
        self.checks += 1;
        while let Some(taken) = self.tail.peek()? {
            let header = taken.header;
            let end = taken.end;
            let mut handed = None;
            if header.kind == FrameKind::Batch && header.lsn > self.position.lsn {
                let TakenFrame { payload, .. } = taken;
                let (disk, store, durable) = (&self.disk, &self.store, header.durable);
                handed = Some(BatchFrame { disk, store, header, payload, end, durable }.open()?);
            }
            // The point advances only after the batch was decoded, so that a failed attempt can be repeated.
            self.tail.go_to(end);
            self.mark = self.mark.max(header.durable);
            self.suspicion.progress();
            self.idle_since = Instant::now();
            // If this is a copy of the last returned batch, the follower's position moves to the copy.
            if header.kind == FrameKind::Batch && header.lsn >= self.position.lsn {
                self.position = seek::at(end);
            }
            if handed.is_some() {
                return Ok(handed);
            }
        }
        Ok(None)
    }

    /// Checks the names in the log folder for new segments and incarnations. Returns whether the follower advanced to a
    /// new incarnation.
    fn check_names(&mut self) -> Result<bool> {
        let segments = segments(&*self.disk)?;
        let here = self.tail.point();
        if let Some((segment, opening)) = self.first_opening(&segments)?
            && self.cross(segment, &opening)?
        {
            return Ok(true);
        }
        if !segments.contains(&here.segment) && self.tail.peek()?.is_none() {
            return Err(missing(&self.disk, here));
        }
        // A segment without its first frames never changes again, so it is checked once per point.
        if self.checked_gap != Some(here)
            && lacks_first_frames(&*self.disk, self.store.store, here.segment)?
            && self.tail.peek()?.is_none()
        {
            if let Some(overtaken) = left_out(&self.disk, here) {
                return Err(overtaken);
            }
            self.checked_gap = Some(here);
        }
        Ok(false)
    }

    /// Advances to the incarnation that begins with `opening`, if the current incarnation ended at the current point.
    fn cross(&mut self, segment: u64, opening: &Opening) -> Result<bool> {
        let here = self.tail.point();
        let before = opening.predecessor.incarnation;
        if before != here.incarnation && !is_skipped_successor(opening, here.incarnation) {
            // Either the incarnations between the two were recycled, or the current incarnation was omitted from the
            // store's history.
            let on_line = before.number > here.incarnation.number;
            let error = if on_line { missing(&self.disk, here) } else { diverged(self.position, None) };
            return Err(error);
        }
        let Some(start) = behind(self.position, segment, opening)? else { return Ok(false) };
        self.tail.go_to(start);
        self.position = at_start(self.position, start);
        self.mark = self.mark.max(opening.accepted);
        tracing::debug!(position = %self.position, "following the next incarnation");
        Ok(true)
    }

    /// Returns the first opening segment after the follower's position in the log, with the segment's number. This
    /// segment opens the next incarnation of the writer, or a later incarnation if the next incarnation's segment was
    /// recycled.
    ///
    /// # Errors
    /// [`Error::Diverged`] if the directory now contains another store.
    fn first_opening(&self, segments: &[u64]) -> Result<Option<(u64, Opening)>> {
        let (here, store) = (self.tail.point(), self.store.store);
        for &number in segments.iter().filter(|number| **number >= here.segment) {
            let open = LiveSegment::open(&*self.disk, store, number)?;
            if open.is_none() && segment::is_foreign(&*self.disk, store, number)? {
                return Err(diverged(self.position, None));
            }
            let opening = open.and_then(|open| open.opening);
            if let Some(opening) = opening.filter(|opening| opening.incarnation != here.incarnation) {
                return Ok(Some((number, opening)));
            }
        }
        Ok(None)
    }

    /// Checks whether the next frame must exist but is missing (I4).
    ///
    /// The log is read twice, because the first read may have found later frames before the missing frame was written.
    /// After an open, a writer repeatedly creates, replaces and recycles segments by renaming them. Therefore the check
    /// is repeated if names have changed during the check.
    fn judge(&mut self) -> Result<()> {
        for _ in 0..JUDGEMENTS {
            let names = self.disk.list(Folder::Log)?;
            let Some(first) = self.damage()? else { return Ok(()) };
            if self.tail.peek()?.is_some() {
                return Ok(());
            }
            let is_certain = self.damage()?.as_ref() == Some(&first) && self.disk.list(Folder::Log)? == names;
            if !is_certain {
                continue;
            }
            // A segment that was recycled after the last check of names is missing from both reads of the log.
            if self.check_names()? {
                return Ok(());
            }
            return match (&first.defect, first.file) {
                // After a power cut, the segment of this point may still exist although the following segment was
                // removed, because neither segment is needed any more.
                (Defect::Missing, FileName::Segment(segment)) => {
                    let point = LogPoint { segment, offset: first.offset, ..self.tail.point() };
                    Err(missing(&self.disk, point))
                }
                _ => Err(first.into()),
            };
        }
        Ok(())
    }

    /// Reads the log once, and returns the damage after the current point, or `None` if there is no damage.
    fn damage(&self) -> Result<Option<Damage>> {
        let survey = survey(&self.disk)?;
        let source = DiskSource::new(self.disk.clone());
        let mark = self.mark.max(survey.mark());
        let walk = LogWalk::new(&source, &survey.log, self.tail.point(), mark);
        Ok(walk.and_then(|mut walk| walk.next().map(drop)).err())
    }
}

impl BatchSource for LogFollower {
    fn label(&self) -> String {
        self.disk.label()
    }

    fn position(&self) -> FollowerPosition {
        self.position
    }

    fn next(&mut self, timeout: Duration) -> Result<Option<FollowedBatch>> {
        self.wait_for_batch(timeout).map_err(|error| error.in_store(&self.disk.label()))
    }

    fn checks(&self) -> u64 {
        self.checks
    }
}
