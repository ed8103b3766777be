//! The frames of the log, read and proven on a thread of their own, ahead of who uses them. When pages are
//! loaded, that thread makes the device's lists of them, too: reading, checksums and lists take about as long as
//! what the host device does with the lists then, and the frames of short deltas are read in the cache that has them.
//!
//! They are read into staging and stay where they were read, so that a device takes its deltas from there. Two
//! pieces of it, of a megabyte or of the longest frame, are on their way from one thread to the other.

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

/// Runs that are read ahead.
const AHEAD_MAX: usize = 2;

/// Where frames come from.
pub(super) struct Frames<'a> {
    pub source: &'a DiskSource,
    pub map: &'a LogMap,
    /// The highest mark that is known from elsewhere.
    pub mark: Lsn,
    pub staging: &'a StagingPool,
}

/// Batches that lie in one piece of memory, in their order.
pub(super) struct BatchRun {
    pub memory: StagingBuf,
    pub batches: Vec<LoggedBatch>,
}

/// One of them.
pub(super) struct LoggedBatch {
    pub header: FrameHeader,
    /// Where its payload lies.
    pub payload: Range<usize>,
}

/// Where a walk stopped.
pub(super) struct StopPoint {
    pub point: LogPoint,
    /// The log's end, if it came so far.
    pub end: Option<LogEnd>,
}

impl LoggedBatch {
    /// What is wrong with it, with its place.
    pub fn damage(&self, defect: Defect) -> Damage {
        defect.at_lsn(FileName::Segment(self.header.segment), self.header.offset, self.header.lsn)
    }
}

impl From<ProducerPanic> for Error {
    fn from(_: ProducerPanic) -> Self {
        Error::panicked("the thread that reads the log ahead")
    }
}

impl Frames<'_> {
    /// Reads the batches after `from` up to `until`, or to the log's end. Who reads a run makes of it what `each` is
    /// given: so some of the work is done where the run's bytes are in the cache. What becomes of the run's memory is
    /// up to the two.
    ///
    /// # Errors
    /// [`Error::Damaged`] where the log must go on and does not; what `each` fails with, whichever lies first in
    /// the log. `OutOfMemory`, a device error.
    pub fn read<T: Send>(
        &self,
        from: LogPoint,
        until: Option<Lsn>,
        make: impl Fn(BatchRun) -> T + Sync,
        each: impl FnMut(T) -> Result<()>,
    ) -> Result<StopPoint> {
        let no_staging = Mutex::new(None);
        // A short log is read sooner than a thread is started.
        let ahead_max = if self.map.segments().range(from.segment..).count() > 2 { AHEAD_MAX } else { 0 };
        let walk =
            |give: &mut dyn FnMut(T) -> bool| self.walk(from, until, &no_staging, &mut |run| give(make(run)));
        let read = parallel::pipeline(ahead_max, walk, each)?;
        read.map_err(|damage| no_staging.into_inner().unwrap_or_else(|| damage.into()))
    }

    fn walk(
        &self,
        from: LogPoint,
        until: Option<Lsn>,
        no_staging: &Mutex<Option<Error>>,
        give: &mut dyn FnMut(BatchRun) -> bool,
    ) -> Result<StopPoint, Damage> {
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
        // The last run's memory is its own then. What lies before damage is handed out, too.
        drop(walk);
        if let Some(last) = run {
            give(BatchRun::new(last));
        }
        walked.map(|()| stopped)
    }

    /// Leaves the last run in `run`.
    fn walk_to(
        &self,
        walk: &mut LogWalk<'_, StagingBuf>,
        until: Option<Lsn>,
        run: &mut Option<(Arc<StagingBuf>, Vec<LoggedBatch>)>,
        give: &mut dyn FnMut(BatchRun) -> bool,
    ) -> Result<(), Damage> {
        while until.is_none_or(|until| walk.point().lsn < until) {
            let Some(frame) = walk.next()? else { break };
            if frame.header.kind != FrameKind::Batch {
                continue;
            }
            let payload = frame.payload_at..frame.payload_at + frame.payload.len();
            let batch = LoggedBatch { header: frame.header, payload };
            match run {
                Some((memory, batches)) if Arc::ptr_eq(memory, frame.memory) => batches.push(batch),
                _ => {
                    let read = run.replace((frame.memory.clone(), vec![batch]));
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
    fn new((memory, batches): (Arc<StagingBuf>, Vec<LoggedBatch>)) -> Self {
        let memory = Arc::into_inner(memory).expect("the walk reads on elsewhere");
        Self { memory, batches }
    }

    pub fn payload(&self, batch: &LoggedBatch) -> &[u8] {
        &self.memory[batch.payload.clone()]
    }
}
