//! Followers: readers of a store's batches in order, as they are logged, in the same or another process.
//!
//! A follower holds no lock and writes nothing. The writer does not know of the follower, so the data that a follower
//! reads may be unfinished, replaced or recycled at any moment. Three rules make such reads safe:
//!
//! 1. A returned batch is verified: its frame by its checksums, its position and the chain hash of the previous frame
//!    (I3). A file that was recycled during the read fails these checks.
//! 2. An incomplete frame is treated as not yet written. The frame counts as damaged only if the check of the log's end
//!    (I4) finds the same frame damaged twice, without a rename between the two checks. Data that the first check
//!    considered durable was written before the second check began.
//! 3. A missing batch was overtaken if a snapshot states that the batch is no longer needed. The opening of the next
//!    incarnation states which batches of the previous incarnation were lost in a crash. A follower that had read such
//!    a batch has diverged.
//!
//! [`tail`] reads the next frame of the log. [`seek`] finds the starting point and the end of an incarnation.
//! [`survey`](mod@survey) distinguishes removed from lost files. [`backoff`] chooses the waiting times. [`replica`]
//! applies the returned batches.

mod batch;
mod seek;
mod backoff;
mod position;
mod replica;
mod segment;
mod survey;
mod tail;

use std::sync::Arc;
use std::time::{Duration, Instant};

use remanent_format::frame::FrameKind;
use remanent_format::log::LogWalk;
use remanent_format::op::{Op, OpAt, decode_payload};
use remanent_format::segment::Opening;
use remanent_format::state::replay::page_info;
use remanent_format::state::survey::read_manifest;
use remanent_format::store::StoreFile;
use remanent_format::{Damage, Defect, FileName, Folder, LogPoint, Lsn};

pub use batch::{FollowedBatch, RestoredState};
pub use position::{FollowerPosition, ParsePositionError};
pub use replica::Replica;

use crate::base::allocation::collected;
use crate::base::process::Process;
use crate::disk::source::DiskSource;
use crate::disk::{Disk, Watch};
use crate::error::{Error, Result};
use backoff::{Pauses, Suspicion};
use seek::{at_start, behind, diverged, is_skipped_successor, locate};
use segment::{LiveSegment, lacks_first_frames};
use survey::{ask, left_out, missing, missing_file, needs_confirmation, newest_snapshot, segments, survey};
use tail::{Tail, TakenFrame};

/// The maximum number of consecutive checks of a log's end while segments are renamed.
const JUDGEMENTS: usize = 16;

/// The point from which a follower reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FollowFrom {
    /// Starts with the first batch of the store.
    Beginning,
    /// Starts after the end of the newest snapshot, or with the first batch if there is no snapshot.
    Snapshot,
    /// Starts after the batch at a position that a follower returned before.
    Position(FollowerPosition),
}

impl From<FollowerPosition> for FollowFrom {
    fn from(position: FollowerPosition) -> Self {
        FollowFrom::Position(position)
    }
}

/// A reader of a store's batches in order, while another process may be writing.
///
/// ```
/// use std::time::Duration;
/// use remanent::follow::{FollowFrom, Follower, Replica};
/// use remanent::{Place, Store};
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("mystore");
/// let store = Store::open(&path)?;
/// let mut follower = Follower::open(&path, FollowFrom::Beginning)?;
/// let mut replica = Replica::default();
/// assert!(follower.next(Duration::ZERO)?.is_none());
///
/// let mut batch = store.batch();
/// let page = batch.create(8, Place::Host).page();
/// batch.write(page, 0, b"remanent").note("first");
/// let committed = store.commit(batch)?;
///
/// let batch = follower.next(Duration::from_secs(10))?.expect("it is logged");
/// assert_eq!(batch.lsn(), committed.position.lsn);
/// assert_eq!(batch.note().as_deref(), Some("first"));
/// replica.apply(&batch)?;
/// assert_eq!(replica.bytes(committed.pages[0]), Some(&b"remanent"[..]));
///
/// // Another process resumes from here.
/// let text = follower.position().to_string();
/// let mut later = Follower::open(&path, FollowFrom::Position(text.parse().unwrap()))?;
/// assert!(later.next(Duration::ZERO)?.is_none());
/// # Ok::<(), remanent::Error>(())
/// ```
pub struct Follower {
    opener: Process,
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

impl Follower {
    /// Creates a follower of a store on any disk, such as a simulated disk in a test. Other callers use
    /// [`Follower::open`].
    ///
    /// # Errors
    /// The errors of [`Follower::open`].
    #[doc(hidden)]
    pub fn open_on(disk: Arc<dyn Disk>, from: FollowFrom) -> Result<Self> {
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
    fn behind_end(disk: Arc<dyn Disk>, store: &StoreFile, redo: LogPoint, end: Lsn) -> Result<Self> {
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
        let opener = Process::current();
        Self {
            opener,
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

    /// Returns the position after the last returned batch. Another follower can resume from this position.
    #[must_use]
    pub fn position(&self) -> FollowerPosition {
        self.position
    }

    /// Returns the next batch, or `None` if no batch was logged within `timeout`. A timeout of zero checks once.
    ///
    /// Usually, a batch is returned within about 10 ms of being logged. A follower that has been idle for long waits
    /// for a notification from the system. Without a notification, a batch may be delayed by an eighth of the idle
    /// time, up to 4 seconds, or 8 seconds if a notification was expected.
    ///
    /// The system sends no notifications if the user's inotify instances are used up (all followers of a store in a
    /// process share one), if another machine writes the files, or if the writer of a mapped log has no file descriptor
    /// left. In any case, 300 idle followers use about a hundredth of a processor.
    ///
    /// Batches are returned in order, without gaps and exactly once, even if the writer dies and the store is
    /// recovered. A batch is returned once it is logged, so a power cut may still lose it. [`FollowedBatch::durable`]
    /// states which batches are durable.
    ///
    /// # Errors
    /// [`Error::Overtaken`] if batches were recycled before they were read, [`Error::Diverged`] if a crash lost the
    /// batch at the follower's position. After either error the follower cannot continue. [`Error::Damaged`] if data
    /// under a durable mark is damaged; [`Error::Forked`]; errors of the file system.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<FollowedBatch>> {
        // A forked child would consume notifications meant for the parent.
        self.opener.check()?;
        self.wait_for_batch(timeout).map_err(|error| error.in_store(&self.disk.label()))
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

    /// Returns the number of times that the follower has checked for a batch since it was opened. A test can use this
    /// number to measure the cost of an idle follower.
    #[doc(hidden)]
    #[must_use]
    pub fn checks(&self) -> u64 {
        self.checks
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
                handed = Some(self.open_batch(taken)?);
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

    /// Decodes and checks the batch in a frame. For a restore, also reads the table.
    fn open_batch(&self, taken: TakenFrame) -> Result<FollowedBatch> {
        let TakenFrame { header, payload, end } = taken;
        let at = |defect: Defect| defect.at_lsn(FileName::Segment(header.segment), header.offset, header.lsn);
        let ops = decode_payload(&payload).map_err(at)?;
        let restored = match ops.as_slice() {
            [OpAt { op: Op::Restore { table, table_crc, restored }, .. }] => {
                Some(self.open_restore(header.lsn, *table, *table_crc, *restored)?)
            }
            _ => None,
        };
        Ok(FollowedBatch {
            disk: self.disk.clone(),
            position: seek::at(end),
            durable: header.durable,
            segment: header.segment,
            offset: header.offset,
            payload,
            restored,
        })
    }

    fn open_restore(&self, lsn: Lsn, table: u64, table_crc: u32, of: Lsn) -> Result<RestoredState> {
        let file = FileName::Table(table);
        let gone = |damage: Damage| match damage.defect {
            Defect::Missing => missing_file(&self.disk, lsn, damage),
            _ => damage.into(),
        };
        let source = DiskSource::new(self.disk.clone());
        let (table, health) = read_manifest(&source, file, &self.store).map_err(gone)?;
        if health.header_crc != table_crc {
            let (found, expected) = (health.header_crc.into(), table_crc.into());
            let defect = Defect::Mismatch { what: "checksum of the restored table", found, expected };
            return Err(defect.at_lsn(file, 0, lsn).into());
        }
        table.check_restored(lsn).map_err(|defect| Error::from(defect.at_lsn(file, 0, lsn)))?;
        let pages = collected(table.entries.iter().map(page_info))?;
        Ok(RestoredState { disk: self.disk.clone(), lsn, of, table: Arc::new(table), pages })
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

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower")
            .field("disk", &self.disk.label())
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

/// An iterator over the batches of a follower, returned by [`Follower::batches`].
#[derive(Debug)]
pub struct Batches<'f> {
    follower: &'f mut Follower,
    /// Whether the iterator has returned an error and therefore ended.
    has_ended: bool,
}

impl Follower {
    /// Returns an iterator over the batches. The iterator waits for each batch like [`Follower::next`] without a
    /// timeout, and ends after the first error.
    ///
    /// ```
    /// use remanent::follow::{FollowFrom, Follower};
    /// use remanent::Store;
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = directory.path().join("mystore");
    /// let store = Store::open(&path)?;
    /// for step in 1..=3u64 {
    ///     store.commit(store.batch().set_root("step", step))?;
    /// }
    /// let mut follower = Follower::open(&path, FollowFrom::Beginning)?;
    /// for (lsn, batch) in (1..=3).zip(follower.batches()) {
    ///     assert_eq!(batch?.lsn().0, lsn);
    /// }
    /// assert_eq!(follower.position().lsn, store.lsn());
    /// # Ok::<(), remanent::Error>(())
    /// ```
    pub fn batches(&mut self) -> Batches<'_> {
        Batches { follower: self, has_ended: false }
    }
}

impl Iterator for Batches<'_> {
    type Item = Result<FollowedBatch>;

    fn next(&mut self) -> Option<Result<FollowedBatch>> {
        if self.has_ended {
            return None;
        }
        let next = self.follower.next(Duration::MAX).transpose();
        self.has_ended = next.as_ref().is_none_or(Result::is_err);
        next
    }
}

impl<'f> IntoIterator for &'f mut Follower {
    type Item = Result<FollowedBatch>;
    type IntoIter = Batches<'f>;

    fn into_iter(self) -> Batches<'f> {
        self.batches()
    }
}
