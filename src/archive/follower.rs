//! Follows an archive: returns the archived batches in order.
//!
//! The line of the archive states the order of the runs, and each frame contains the chain hash of the frame before it.
//! A frame is verified like one in a log (I3). Only proven frames are archived, so that no later open drops a batch
//! that was returned. Two kinds of events end a follower. After a *cut*, the archive continues at an earlier batch,
//! because a user requested it. After a *gap* or a *boundary*, the archive does not contain the next batch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use remanent_archive::Error as Failure;
use remanent_archive::line::{Cut, FollowPoint, FoundCursor, LineCursor};
use remanent_archive::object::{BatchPoint, Content, Fence, LineObject, Manifest, Run};
use remanent_format::frame::{
    FRAME_HEADER_LEN, FrameHeader, FrameHeaderRaw, FrameKind, UncheckedFrame, check_payload,
};
use remanent_format::log::{header_in_order, next_locations};
use remanent_format::segment::Opening;
use remanent_format::store::StoreFile;
use remanent_format::{Defect, FileName, Incarnation, LogPoint, Lsn};

use super::archived_disk::{ArchivedDisk, PartSource, SourceParts};
use super::bucket::open_bucket;
use super::failures::error_of;
use super::part_cache::PartCache;
use crate::base::process::ForkGuard;
use crate::base::sync::Instant;
use crate::disk::Disk;
use crate::error::{ArchiveError, ArchiveErrorKind, Error, IoAction, Result};
use crate::follower::{self, BatchFrame, BatchSource, FollowFrom, FollowedBatch, Follower, FollowerPosition};
use crate::options::ArchiveOptions;

/// Minimum time between two requests for an object that does not exist yet.
const INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Number of requests for the next object after which the follower checks that a boundary has not passed its position.
const CHECK_EVERY: u64 = 10;

/// Opens a follower of an archive. `folder` is an empty temporary folder, and `local` is a [`Disk`] for the same
/// folder.
///
/// # Errors
/// The errors of [`Follower::open_archive`].
pub(crate) fn open_follower(
    options: &ArchiveOptions,
    from: FollowFrom,
    folder: tempfile::TempDir,
    local: Arc<dyn Disk>,
) -> Result<Follower> {
    let bucket = open_bucket(options)?;
    let file = tempfile::tempfile_in(folder.path());
    let file =
        file.map_err(|source| Error::folder(IoAction::Create, folder.path().display().to_string(), source))?;
    let source = SourceParts {
        url: options.url.clone(),
        bucket,
        cache: PartCache::new(file, options.cache_len_max),
        _folder: folder,
    };
    let source: PartSource = Arc::new(ForkGuard::new(source));
    let interval = options.interval.max(INTERVAL_MIN);
    let mut follower = ArchiveFollower::find(source, local, from, interval)?;
    // Compares the position with the archive, as far as it is archived.
    while !follower.is_verified && follower.read_object()? {}
    Ok(Follower::of(Box::new(follower)))
}

/// A follower of an archive.
struct ArchiveFollower {
    source: PartSource,
    /// The directory of the local files.
    local: Arc<dyn Disk>,
    cursor: LineCursor,
    /// An object that was read from the line and not processed yet, because processing it failed.
    object: Option<LineObject>,
    /// The run whose batches are being returned.
    run: Option<OpenRun>,
    /// STORE of the newest fence that was read.
    store: Option<StoreFile>,
    /// The openings that fences list, each with its segment number, by the number of the incarnation.
    openings: BTreeMap<u32, (u64, Opening)>,
    /// The cuts that the line contained when the follower was opened and that the follower has not reached, oldest
    /// first.
    cuts: Vec<Cut>,
    /// The last batch that was returned.
    position: FollowerPosition,
    /// Whether `position` was compared with the archive. A mismatch is an error.
    is_verified: bool,
    /// The last batch that was read, once it is known.
    batch: Option<BatchPoint>,
    /// The point in the log after the last frame that was read, once it is known.
    point: Option<LogPoint>,
    /// The number of parts that the processed runs list. The cache identifies the next part by this number.
    parts: usize,
    /// The earliest time of the next request if `is_delayed` is true.
    poll_after: Instant,
    is_delayed: bool,
    interval: Duration,
    polls: u64,
}

/// A run that is being read.
struct OpenRun {
    run: Run,
    /// The bytes of all frames. `at` is the offset of the next frame.
    frames: Vec<u8>,
    at: usize,
    /// A disk with the files that the batches name.
    disk: Arc<dyn Disk>,
    /// The last batch to return. A later cut has removed the batches after it.
    until: Lsn,
}

/// The next frame of a run.
struct NextFrame {
    header: FrameHeader,
    payload: Vec<u8>,
    /// The point in the log after the frame.
    end: LogPoint,
    /// The length of the frame in bytes.
    len: usize,
}

impl ArchiveFollower {
    fn find(source: PartSource, local: Arc<dyn Disk>, from: FollowFrom, interval: Duration) -> Result<Self> {
        let point = match from {
            FollowFrom::Beginning => FollowPoint::Beginning,
            FollowFrom::Snapshot => FollowPoint::Manifest,
            FollowFrom::Position(position) => FollowPoint::Batch(position.lsn),
        };
        let parts = source.check()?;
        let lsn = if let FollowPoint::Batch(lsn) = point { lsn.next() } else { Lsn(1) };
        let found = parts.bucket.block_on(LineCursor::find(parts.archive(), point));
        let FoundCursor { cursor, fence, cuts, manifest } =
            found.map_err(|failure| error_of_follower(&parts.url, lsn, &failure))?;
        let position = match from {
            FollowFrom::Position(position) => position,
            FollowFrom::Snapshot => manifest.map_or(FollowerPosition::BEGINNING, |it| position_of(&it.end)),
            FollowFrom::Beginning => FollowerPosition::BEGINNING,
        };
        let is_beginning = position.lsn == Lsn(0);
        let mut follower = Self {
            source,
            local,
            cursor,
            object: None,
            run: None,
            store: None,
            openings: BTreeMap::new(),
            cuts,
            position,
            is_verified: is_beginning,
            batch: is_beginning.then(BatchPoint::default),
            point: None,
            parts: 0,
            poll_after: Instant::now(),
            is_delayed: false,
            interval,
            polls: 0,
        };
        follower.check_cuts()?;
        if let Some(fence) = &fence {
            follower.note_fence(fence)?;
        }
        Ok(follower)
    }

    /// Returns an error if a cut has removed the batch at the follower's position. Then removes the cuts below that
    /// batch from `cuts`.
    fn check_cuts(&mut self) -> Result<()> {
        let FollowerPosition { incarnation, lsn, .. } = self.position;
        for cut in self.cuts.iter().filter(|cut| cut.batch.lsn < lsn) {
            // The cut removed only batches of incarnations below `cut.incarnation`.
            if incarnation.number < cut.incarnation {
                return Err(follower::diverged(self.position, Some(cut.batch.lsn)));
            }
        }
        self.cuts.retain(|cut| cut.batch.lsn >= lsn);
        Ok(())
    }

    /// Reads and processes the next object of the line. Returns false if the object does not exist yet. After an error,
    /// the next call tries again.
    fn read_object(&mut self) -> Result<bool> {
        // Delays the next request by one interval, unless this call processes an object. More objects may follow it
        // immediately.
        self.poll_after = Instant::now() + self.interval;
        self.is_delayed = true;
        let source = self.source.clone();
        let parts = source.check()?;
        if self.object.is_none() {
            let lsn = self.position.lsn.next();
            let failed = |failure| error_of_follower(&parts.url, lsn, &failure);
            self.polls += u64::from(!self.cursor.has_next());
            self.object = parts.bucket.block_on(self.cursor.next(parts.archive())).map_err(failed)?;
            if self.object.is_none() && self.polls.is_multiple_of(CHECK_EVERY) {
                parts.bucket.block_on(self.cursor.check_kept(parts.archive())).map_err(failed)?;
            }
        }
        let Some(object) = self.object.take() else { return Ok(false) };
        if let Err(error) = self.take_object(&object, parts) {
            self.object = Some(object);
            return Err(error);
        }
        self.is_delayed = false;
        Ok(true)
    }

    fn take_object(&mut self, object: &LineObject, parts: &SourceParts) -> Result<()> {
        match &object.content {
            Content::Run(run) => self.open_run(object, run, parts)?,
            Content::Fence(fence) => self.pass_fence(object, fence)?,
            Content::Manifest(manifest) if manifest.follows_gap => self.pass_gap(manifest)?,
            Content::Manifest(_) | Content::Boundary(_) | Content::Catalog(_) => {}
        }
        if self.run.is_none() && !self.is_verified {
            self.verify(&object.archived)?;
        }
        self.skip_returned()
    }

    /// Opens a run that contains batches after the position.
    fn open_run(&mut self, object: &LineObject, run: &Run, parts: &SourceParts) -> Result<()> {
        // A later cut has removed all batches above the cut.
        let cut =
            self.cuts.iter().filter(|cut| cut.position > object.position).map(|cut| cut.batch.lsn).min();
        let until = cut.unwrap_or(run.after.lsn).min(run.after.lsn);
        if !self.is_verified {
            if run.before.lsn <= self.position.lsn {
                self.batch = Some(run.before);
            }
            self.verify(&run.before)?;
        }
        if until <= run.before.lsn {
            return Ok(());
        }
        if self.batch.is_some_and(|batch| batch != run.before) {
            let (found, expected) = (run.before, self.batch.unwrap_or_default());
            return Err(
                self.damaged(format!("the run at {} follows {found}, not {expected}", object.position))
            );
        }
        if run.after.lsn <= self.position.lsn {
            (self.batch, self.point) = (Some(run.after), None);
            return Ok(());
        }
        let frames = parts.bucket.block_on(self.cursor.frames(parts.archive(), object));
        let lsn = run.before.lsn.next();
        let frames = frames.map_err(|failure| error_of_follower(&parts.url, lsn, &failure))?;
        let files = self.cursor.listed_files(object);
        let first = self.parts;
        self.parts += files.len();
        let files = (first..).zip(files);
        let disk = Arc::new(ArchivedDisk::new(self.local.clone(), files, lsn, self.source.clone()));
        self.run = Some(OpenRun { run: run.clone(), frames, at: 0, disk, until });
        Ok(())
    }

    /// Processes a fence: records its openings and, if the fence cuts the line, continues at the cut.
    fn pass_fence(&mut self, object: &LineObject, fence: &Fence) -> Result<()> {
        self.note_fence(fence)?;
        if let Some(cut) = Cut::of(object.position, fence) {
            self.cuts.retain(|known| known.position > object.position);
            if cut.batch.lsn < self.position.lsn {
                return Err(follower::diverged(self.position, Some(cut.batch.lsn)));
            }
            // The next run begins at the cut, in another incarnation.
            (self.batch, self.point) = (Some(cut.batch), None);
        }
        Ok(())
    }

    fn note_fence(&mut self, fence: &Fence) -> Result<()> {
        let store = StoreFile::decode(&fence.store_file);
        let store = store.map_err(|defect| self.damaged(format!("STORE in a fence: {defect}")))?;
        // With STORE, a batch that names a missing file is reported as damaged. Without STORE, the error would be that
        // no store exists.
        if self.store.is_none() {
            let file = self.local.create(FileName::Store)?;
            file.write_at(0, &fence.store_file)?;
        }
        self.store = Some(store);
        for header in &fence.openings {
            if let Some(opening) = header.opening {
                self.openings.insert(opening.incarnation.number, (header.segment, opening));
            }
        }
        // The follower does not return to earlier incarnations.
        let current = self.position.incarnation.number;
        self.openings.retain(|number, _| *number >= current);
        Ok(())
    }

    /// Processes a manifest that follows a gap. Returns an error if the gap contains batches after the follower's
    /// position.
    fn pass_gap(&mut self, manifest: &Manifest) -> Result<()> {
        if manifest.end.lsn > self.position.lsn {
            let (lsn, snapshot) = (self.position.lsn.next(), Some(manifest.snapshot));
            return Err(Error::Overtaken { lsn, snapshot });
        }
        (self.batch, self.point) = (Some(manifest.end), None);
        Ok(())
    }

    /// Compares the follower's position with `found`, an archived batch. Does nothing if `found` is below the position.
    fn verify(&mut self, found: &BatchPoint) -> Result<()> {
        let position = self.position;
        if found.lsn > position.lsn {
            // The archive no longer keeps the batch at the position.
            return Err(Error::Overtaken { lsn: position.lsn.next(), snapshot: None });
        }
        if found.lsn < position.lsn {
            return Ok(());
        }
        if found.incarnation == position.incarnation {
            if found.chain != position.chain {
                return Err(follower::diverged(position, None));
            }
        } else {
            // A later incarnation may have copied the batch at the position.
            let opening = self.openings.get(&found.incarnation.number);
            let copied = opening.filter(|(_, opening)| is_successor(opening, position.incarnation));
            let Some((segment, opening)) = copied else { return Err(follower::diverged(position, None)) };
            follower::behind(position, *segment, opening)?;
        }
        self.is_verified = true;
        self.batch = Some(*found);
        self.position = position_of(found);
        Ok(())
    }

    /// Skips seals and the batches up to the position.
    fn skip_returned(&mut self) -> Result<()> {
        while let Some(next) = self.next_frame()? {
            let NextFrame { header, end, len, .. } = next;
            if header.kind == FrameKind::Batch && header.lsn > self.position.lsn {
                return Ok(());
            }
            self.pass(&header, end, len);
            if header.kind == FrameKind::Batch && !self.is_verified {
                self.verify(&batch_point(end))?;
            }
        }
        Ok(())
    }

    /// Advances past a frame of the run. `end` is the point after the frame.
    fn pass(&mut self, header: &FrameHeader, end: LogPoint, len: usize) {
        self.point = Some(end);
        if header.kind == FrameKind::Batch {
            self.batch = Some(batch_point(end));
        }
        if let Some(run) = &mut self.run {
            run.at += len;
        }
    }

    /// Returns the next frame of the run, or `None` if no run is open. Closes the run after its last batch.
    fn next_frame(&mut self) -> Result<Option<NextFrame>> {
        let Some(open) = &self.run else { return Ok(None) };
        if self.batch.is_some_and(|batch| batch.lsn >= open.until) {
            let is_complete = open.at == open.frames.len() && self.batch == Some(open.run.after);
            let is_cut = open.until < open.run.after.lsn;
            if !is_complete && !is_cut {
                return Err(self.damaged(format!("a run does not end at {}", open.run.after)));
            }
            self.run = None;
            return Ok(None);
        }
        let bytes = &open.frames[open.at..];
        let frame = bytes.get(..FrameHeaderRaw::LEN).ok_or(Defect::Missing).and_then(UncheckedFrame::decode);
        let frame = frame.map_err(|defect| self.damaged_frame(&defect))?;
        let found = *frame.unproven();
        let len = found.frame_len() as usize;
        let bytes = bytes.get(..len).ok_or_else(|| self.damaged_frame(&Defect::Missing))?;
        let before = self.point_before(&found, &open.run.before)?;
        let (header, end) = header_in_order(bytes, &before, self.cursor.store(), found.segment, found.offset)
            .map_err(|defect| self.damaged_frame(&defect))?;
        let payload = &bytes[FRAME_HEADER_LEN as usize..][..header.payload_len as usize];
        check_payload(&header, payload).map_err(|defect| self.damaged_frame(&defect))?;
        Ok(Some(NextFrame { header, payload: payload.to_vec(), end, len }))
    }

    /// Returns the point in the log at which a frame starts. `before` is the last batch before the run.
    fn point_before(&self, found: &FrameHeader, before: &BatchPoint) -> Result<LogPoint> {
        if let Some(point) = self.point.filter(|point| point.incarnation == found.incarnation) {
            if !next_locations(&point).contains(&(found.segment, found.offset)) {
                return Err(self.damaged_frame(&Defect::Field { what: "location", found: found.offset }));
            }
            return Ok(point);
        }
        let last = self.batch.unwrap_or(*before);
        if self.point.is_none() && last.incarnation == found.incarnation {
            // The follower starts at this frame. It knows the chain hash of the previous batch, but not its location.
            let BatchPoint { incarnation, lsn, chain } = last;
            let (segment, offset) = (found.segment, found.offset);
            return Ok(LogPoint { incarnation, lsn, segment, offset, chain });
        }
        let opening = self.openings.get(&found.incarnation.number);
        let opening = opening.filter(|(_, opening)| {
            let LogPoint { lsn, chain, .. } = opening.predecessor;
            opening.incarnation == found.incarnation && (lsn, chain) == (last.lsn, last.chain)
        });
        let Some((segment, opening)) = opening else {
            return Err(
                self.damaged(format!("no fence lists the opening of incarnation {}", found.incarnation))
            );
        };
        Ok(opening.start(*segment))
    }

    fn damaged_frame(&self, defect: &Defect) -> Error {
        let lsn = self.batch.map_or(Lsn(0), |batch| batch.lsn);
        self.damaged(format!("the frame after lsn {lsn} does not continue the log: {defect}"))
    }

    fn damaged(&self, reason: String) -> Error {
        let (url, kind) = (self.source.url.clone(), ArchiveErrorKind::Damaged);
        ArchiveError { url, kind, reason }.into()
    }

    /// Returns the next batch of the run, or `None` after the last batch.
    fn take(&mut self) -> Result<Option<FollowedBatch>> {
        self.skip_returned()?;
        let Some(NextFrame { header, payload, end, len }) = self.next_frame()? else { return Ok(None) };
        let (Some(open), Some(store)) = (&self.run, &self.store) else {
            return Err(self.damaged("no fence precedes a run".to_owned()));
        };
        // Archived batches are durable.
        let durable = header.durable.max(header.lsn);
        let frame = BatchFrame { disk: &open.disk, store, header, payload, end, durable };
        let batch = frame.open()?;
        // The position advances only after the batch was decoded, so that a failed attempt can be repeated.
        self.pass(&header, end, len);
        self.position = batch.position();
        Ok(Some(batch))
    }
}

impl BatchSource for ArchiveFollower {
    fn label(&self) -> String {
        self.source.url.clone()
    }

    fn position(&self) -> FollowerPosition {
        self.position
    }

    fn next(&mut self, timeout: Duration) -> Result<Option<FollowedBatch>> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(batch) = self.take()? {
                return Ok(Some(batch));
            }
            let now = Instant::now();
            if !self.is_delayed || now >= self.poll_after {
                self.read_object()?;
                continue;
            }
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(now));
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::park_timeout(self.poll_after.saturating_duration_since(now).min(left));
        }
    }

    fn checks(&self) -> u64 {
        self.polls
    }
}

/// Returns true if `opening` starts an incarnation that continues `incarnation`, possibly after incarnations without
/// batches.
fn is_successor(opening: &Opening, incarnation: Incarnation) -> bool {
    let before = opening.predecessor.incarnation;
    before == incarnation || (before.number + 1..opening.incarnation.number).contains(&incarnation.number)
}

fn batch_point(LogPoint { incarnation, lsn, chain, .. }: LogPoint) -> BatchPoint {
    BatchPoint { incarnation, lsn, chain }
}

fn position_of(batch: &BatchPoint) -> FollowerPosition {
    let BatchPoint { incarnation, lsn, chain } = *batch;
    FollowerPosition { incarnation, lsn, chain }
}

/// Converts an error of the archive at `url`. `lsn` is the batch that the follower needs.
fn error_of_follower(url: &str, lsn: Lsn, failure: &Failure) -> Error {
    match failure {
        Failure::Overtaken { .. } => Error::Overtaken { lsn, snapshot: None },
        failure => error_of(url, failure),
    }
}
