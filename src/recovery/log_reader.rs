//! The frames of the log, read and proven on a thread of their own, ahead of the thread that uses them.
//! When pages are loaded, the reading thread makes the device's lists of them, too. Reading, checksums
//! and lists take about as long as the work of the host device with the lists then, and the frames of
//! short deltas are still in that core's cache.
//!
//! Frames are read into staging and stay where they were read, so that a device takes its deltas from
//! there. Two pieces of staging, each of a megabyte or of the longest frame, are on their way from one
//! thread to the other.
//!
//! Nothing is written here, so a crash loses nothing.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameKind};
use remanent_format::log::{LogEnd, LogMap, LogWalk};
use remanent_format::{Damage, Defect, FileName, LogPoint, Lsn};

use crate::base::parallel;
use crate::base::parallel::ProducerPanic;
use crate::base::sync::Mutex;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::memory::staging::{StagingBuf, StagingPool};

/// Runs that are read ahead of their use. Each holds staging, of the longest frame in the worst case.
const RUNS_MAX: usize = 2;

/// Where frames come from, and where they are read to.
pub(super) struct Frames<'a> {
    pub source: &'a DiskSource,
    pub map: &'a LogMap,
    /// The highest mark that is known from elsewhere: manifests give it. The walk takes an end below it
    /// for damage (I4).
    pub mark: Lsn,
    pub staging: &'a StagingPool,
}

/// Batches that lie in one piece of memory, in the order of the log.
pub(super) struct BatchRun {
    pub memory: StagingBuf,
    pub batches: Vec<LoggedBatch>,
}

/// One batch of a run, by its place there.
pub(super) struct LoggedBatch {
    pub header: FrameHeader,
    /// Where its payload lies in the run's memory.
    pub payload: Range<usize>,
}

/// Where a walk stopped, and why.
pub(super) struct StopPoint {
    pub point: LogPoint,
    /// The log's end, if the walk came that far.
    pub end: Option<LogEnd>,
}

impl LoggedBatch {
    /// Damage to the batch, with its place in the log.
    pub fn damage(&self, defect: Defect) -> Damage {
        defect.at_lsn(FileName::Segment(self.header.segment), self.header.offset, self.header.lsn)
    }
}

impl From<ProducerPanic> for Error {
    // A panic there fails the open; the process, and other stores in it, go on.
    fn from(_: ProducerPanic) -> Self {
        Error::panicked("the thread that reads the log ahead")
    }
}

impl Frames<'_> {
    /// Reads the batches after `from` up to `until`, or to the log's end. The reading thread passes each
    /// run to `make`, while the run's bytes are in its cache; the caller's thread passes the result to
    /// `each`. One of the two gives the run's memory back.
    ///
    /// # Errors
    /// [`Error::Damaged`] where the log must go on and does not; the error of `each`, if it lies first in
    /// the log. `OutOfMemory`, a device error.
    pub fn read<T: Send>(
        &self,
        from: LogPoint,
        until: Option<Lsn>,
        make: impl Fn(BatchRun) -> T + Sync,
        each: impl FnMut(T) -> Result<()>,
    ) -> Result<StopPoint> {
        // The walk speaks of damage only. Refused staging is noted here: told as damage, it would cost
        // the store a snapshot that is sound.
        let no_staging = Mutex::new(None);
        // A short log is read sooner than a thread is started.
        let runs_max = if self.map.segments().range(from.segment..).count() > 2 { RUNS_MAX } else { 0 };
        let walk =
            |give: &mut dyn FnMut(T) -> bool| self.walk(from, until, &no_staging, &mut |run| give(make(run)));
        let read = parallel::pipeline(runs_max, walk, each)?;
        read.map_err(|damage| no_staging.into_inner().unwrap_or_else(|| damage.into()))
    }

    /// Walks the log on the reading thread, and gives each run away as soon as the walk reads elsewhere.
    fn walk(
        &self,
        from: LogPoint,
        until: Option<Lsn>,
        no_staging: &Mutex<Option<Error>>,
        give: &mut dyn FnMut(BatchRun) -> bool,
    ) -> Result<StopPoint, Damage> {
        // Read into staging, from where a device can take its deltas without another copy.
        let supply = |len: usize| {
            self.staging.take(len).map_err(|error| {
                *no_staging.lock() = Some(error.clone());
                io::Error::other(error)
            })
        };
        let mut walk = LogWalk::reading_into(self.source, self.map, from, self.mark, &supply)?;
        let mut run: Option<(Arc<StagingBuf>, Vec<LoggedBatch>)> = None;
        let walked = self.walk_to(&mut walk, until, &mut run, give);
        let stopped = StopPoint { point: walk.point(), end: walk.end().cloned() };
        // After this the last run's memory has one owner. Batches before damage are given, too: an error
        // in one of them lies first in the log, and is the one to report.
        drop(walk);
        if let Some(last) = run {
            give(BatchRun::new(last));
        }
        walked.map(|()| stopped)
    }

    /// Walks up to `until`, and leaves the last run in `run`: the walk still shares its memory.
    fn walk_to(
        &self,
        walk: &mut LogWalk<'_, StagingBuf>,
        until: Option<Lsn>,
        run: &mut Option<(Arc<StagingBuf>, Vec<LoggedBatch>)>,
        give: &mut dyn FnMut(BatchRun) -> bool,
    ) -> Result<(), Damage> {
        while until.is_none_or(|until| walk.point().lsn < until) {
            let Some(frame) = walk.next()? else { break };
            // A seal changes no page. The walk itself takes its record of verified snapshots.
            if frame.header.kind != FrameKind::Batch {
                continue;
            }
            let payload = frame.payload_at..frame.payload_at + frame.payload.len();
            let batch = LoggedBatch { header: frame.header, payload };
            match run {
                Some((memory, batches)) if Arc::ptr_eq(memory, frame.memory) => batches.push(batch),
                _ => {
                    let read = run.replace((frame.memory.clone(), vec![batch]));
                    // The thread that uses the runs failed: it takes no more, and its error is the one
                    // that counts.
                    if !read.is_none_or(|read| give(BatchRun::new(read))) {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

impl BatchRun {
    /// Takes a run whose memory the walk has let go of.
    fn new((memory, batches): (Arc<StagingBuf>, Vec<LoggedBatch>)) -> Self {
        let memory = Arc::into_inner(memory).expect("the walk reads on elsewhere");
        Self { memory, batches }
    }

    /// The payload of a batch of this run.
    pub fn payload(&self, batch: &LoggedBatch) -> &[u8] {
        &self.memory[batch.payload.clone()]
    }
}
