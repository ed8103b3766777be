//! The frames of the log, read and proven on a thread of their own, ahead of the thread that uses them.
//!
//! A long log is read by *windows* of some mebibytes. All cores read a window in chunks, each of which is
//! summed while it is in that core's cache. Then the reading thread walks along the headers, one frame after
//! the other, and takes the sums of payloads from there: the verdict on the log follows its order, and never
//! the order in which chunks were done (I4). The operations of proven frames are decoded by all cores, too.
//! A walk that finds no frame reads once more by itself before it judges.
//!
//! Frames are read into staging and stay where they were read, so that a device takes its deltas from
//! there. A window is read, one is made into a list, another one is used, and one is on its way to each of
//! the latter. Each is as long as its longest frame at least: where frames are longer than windows, the
//! thread that reads them makes the lists, and three are held instead of five. A short log is read as one
//! window of a megabyte after the other, by one thread, and so is every log where few threads can run at
//! once.
//!
//! Nothing is written here, so a crash loses nothing.

use std::convert::Infallible;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameKind};
use remanent_format::limits::GROUP_ALIGN;
use remanent_format::log::{ChunkSums, LogEnd, LogMap, LogWalk, Reading, Windows};
use remanent_format::op::claimed_ops;
use remanent_format::state::page_changes::PageChanges;
use remanent_format::{Damage, Defect, FileName, LogPoint, Lsn, ReadAt};

use crate::base::crew::with_crew;
use crate::base::parallel;
use crate::base::parallel::ProducerPanic;
use crate::base::sync::Mutex;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::memory::staging::{StagingBuf, StagingPool};

/// Runs of a log without windows that are read ahead of their use. Each holds staging, of the longest frame
/// in the worst case.
const RUNS_MAX: usize = 2;
/// Windows that are read ahead of their use, besides the one that is being read.
const WINDOWS_READY_MAX: usize = 1;
/// Threads that read and sum windows.
const THREADS_MAX: usize = 16;
/// The fewest threads that gain by windows. Two are kept busy by reading one run and using another:
/// on two busy cores windows took 1.2 times the processor's time and saved none.
const THREADS_MIN: usize = 4;
/// Bytes of a window for each of the threads. Each step of a window ends when the last thread has done its
/// part, so it must not be short; several windows should stay in the last cache.
const WINDOW_LEN_EACH: u64 = 1 << 20;
/// The longest window, whatever the number of threads (I10).
const WINDOW_LEN_MAX: u64 = 16 << 20;
/// The shortest window that several threads read sooner than one does.
const WINDOW_LEN_MIN: u64 = 2 << 20;
/// A log is read by this number of windows at least: memory for them is touched, and on a GPU pinned.
const WINDOWS_MIN: u64 = 8;
/// Frames are long if a segment is longer than this number of windows.
const LONG_WINDOWS: u64 = 4;
/// Bytes that a thread reads and sums at once: they stay in its core's second cache.
const CHUNK_LEN: u64 = 256 << 10;
/// Operations that a thread decodes at once, at least. Fewer are decoded sooner than a thread is started.
const OPS_AT_ONCE: usize = 1024;

/// Where frames come from, and where they are read to.
pub(super) struct Frames<'a> {
    pub source: &'a DiskSource,
    pub map: &'a LogMap,
    /// The highest mark that is known from elsewhere: manifests give it. The walk takes an end below it
    /// for damage (I4).
    pub mark: Lsn,
    pub staging: &'a StagingPool,
    /// Bytes of a window, for a test that wants other ones than the log's length asks for.
    pub window_len: Option<u64>,
}

/// How a log is read by windows.
#[derive(Clone, Copy)]
struct WindowRules {
    len: u64,
    chunk_len: u64,
    threads: usize,
    /// Whether a frame may be much longer than a window. Fewer of them are held then: lists are made by the
    /// reading thread.
    has_long_frames: bool,
}

/// Batches that lie in one piece of memory, in the order of the log.
pub(super) struct BatchRun {
    pub memory: StagingBuf,
    pub batches: Vec<LoggedBatch>,
    /// The threads that share work on its batches.
    threads: usize,
}

/// One batch of a run, by its place there.
pub(super) struct LoggedBatch {
    pub header: FrameHeader,
    /// Where its payload lies in the run's memory.
    pub payload: Range<usize>,
}

/// What a run's batches do to the table, in their order.
pub(super) enum RunStep {
    /// Batches that change bytes of pages and do nothing else: these are nearly all batches of a long log.
    Changes(Range<usize>, PageChanges),
    /// A batch that does more, or is yet to be decoded.
    Batch(usize),
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
    /// Reads the batches after `from` up to `until`, or to the log's end. Each run goes to `make`, and the
    /// result to `each`, on the caller's thread. One of the two gives the run's memory back. `make` runs on
    /// the reading thread, while the run's bytes are in its cache; of windows on a thread of its own.
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
        let is_empty = until.is_some_and(|until| until <= from.lsn);
        let rules = if is_empty { None } else { self.windows(from) };
        // A short log is read sooner than a thread is started.
        let runs_max = match rules {
            Some(_) => WINDOWS_READY_MAX,
            None if self.map.segments().range(from.segment..).count() > 2 => RUNS_MAX,
            None => 0,
        };
        let walk = |give: &mut dyn FnMut(BatchRun) -> bool| self.walk(from, until, rules, &no_staging, give);
        let read = match rules {
            None => {
                let make_each = |give: &mut dyn FnMut(T) -> bool| walk(&mut |run| give(make(run)));
                parallel::pipeline(runs_max, make_each, each)?
            }
            Some(rules) => with_crew(rules.threads, |crew| {
                let walk = |give: &mut dyn FnMut(BatchRun) -> bool| {
                    let _crew = crew.join();
                    walk(give)
                };
                let make_each = |give: &mut dyn FnMut(T) -> bool| {
                    let _crew = crew.join();
                    if rules.has_long_frames {
                        return Ok(walk(&mut |run| give(make(run))));
                    }
                    // Where no more are wanted, the error of `each` is the one that counts.
                    let give_made = |run| if give(make(run)) { Ok(()) } else { Err(ProducerPanic) };
                    parallel::pipeline(runs_max, walk, give_made)
                };
                let _crew = crew.join();
                parallel::pipeline(runs_max, make_each, each)
            })??,
        };
        read.map_err(|damage| no_staging.into_inner().unwrap_or_else(|| damage.into()))
    }

    /// The windows by which the log after `from` is read; `None` if one thread reads it as soon.
    fn windows(&self, from: LogPoint) -> Option<WindowRules> {
        let threads = parallel::threads(THREADS_MAX);
        let segments = self.map.segments().range(from.segment..).map(|(_, segment)| segment);
        let lens = segments.filter(|segment| segment.frames.is_some()).map(|segment| segment.file_len);
        let log_len = lens.clone().fold(0, u64::saturating_add);
        let by_log = (log_len.saturating_sub(from.offset) / WINDOWS_MIN).next_multiple_of(CHUNK_LEN);
        let len = by_log.min(WINDOW_LEN_EACH * threads as u64).min(WINDOW_LEN_MAX);
        let (len, chunk_len, threads) = match self.window_len {
            Some(0) => return None,
            Some(len) => (len, GROUP_ALIGN, threads.max(2)),
            None if threads < THREADS_MIN || len < WINDOW_LEN_MIN => return None,
            None => (len, CHUNK_LEN, threads),
        };
        // A frame that fits no segment has one of its own.
        let has_long_frames = lens.max().is_some_and(|longest| longest > LONG_WINDOWS * len);
        Some(WindowRules { len, chunk_len, threads, has_long_frames })
    }

    /// Reads a window by several threads, and sums it.
    fn read_window(
        &self,
        rules: WindowRules,
        segment: u64,
        offset: u64,
        window: &mut [u8],
    ) -> io::Result<Vec<ChunkSums>> {
        let chunks = window.chunks_mut(rules.chunk_len as usize);
        let chunks = (offset..).step_by(rules.chunk_len as usize).zip(chunks);
        parallel::for_each(rules.threads, chunks, |(offset, chunk)| {
            self.source.read_at(FileName::Segment(segment), offset, chunk)?;
            Ok(ChunkSums::of(chunk, self.map.store(), segment, offset))
        })
    }

    /// Walks the log on the reading thread, and gives each run away as soon as the walk reads elsewhere.
    fn walk(
        &self,
        from: LogPoint,
        until: Option<Lsn>,
        rules: Option<WindowRules>,
        no_staging: &Mutex<Option<Error>>,
        give: &mut dyn FnMut(BatchRun) -> bool,
    ) -> Result<StopPoint, Damage> {
        // Read into staging, from where a device can take its deltas without another copy.
        let supply = |len: usize| {
            // Where much was refused, less may do. The note stays all the same: a walk that is refused at
            // last goes on to judge, with staging that it may get.
            self.staging.take(len).map_err(|error| {
                *no_staging.lock() = Some(error.clone());
                io::Error::other(error)
            })
        };
        let read = |segment: u64, offset: u64, window: &mut [u8]| {
            self.read_window(rules.expect("windows have rules"), segment, offset, window)
        };
        let windows = rules.map(|rules| Windows { len: rules.len, read: &read });
        let reading = Reading { supply: &supply, windows };
        let walk = LogWalk::reading_into(self.source, self.map, from, self.mark, reading)?;
        let mut walk = if until.is_none() { walk.sharing_outcomes() } else { walk };
        let mut run: Option<(Arc<StagingBuf>, Vec<LoggedBatch>)> = None;
        let threads = rules.map_or(1, |rules| rules.threads);
        let mut give = |run| give(BatchRun::new(run, threads));
        let walked = self.walk_to(&mut walk, until, &mut run, &mut give);
        let stopped = StopPoint { point: walk.point(), end: walk.end().cloned() };
        // After this the last run's memory has one owner. Batches before damage are given, too: an error
        // in one of them lies first in the log, and is the one to report.
        drop(walk);
        if let Some(last) = run {
            give(last);
        }
        walked.map(|()| stopped)
    }

    /// Walks up to `until`, and leaves the last run in `run`: the walk still shares its memory.
    fn walk_to(
        &self,
        walk: &mut LogWalk<'_, StagingBuf>,
        until: Option<Lsn>,
        run: &mut Option<(Arc<StagingBuf>, Vec<LoggedBatch>)>,
        give: &mut dyn FnMut((Arc<StagingBuf>, Vec<LoggedBatch>)) -> bool,
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
                    if !read.is_none_or(&mut *give) {
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
    fn new((memory, batches): (Arc<StagingBuf>, Vec<LoggedBatch>), threads: usize) -> Self {
        let memory = Arc::into_inner(memory).expect("the walk reads on elsewhere");
        Self { memory, batches, threads }
    }

    /// Does `work` with the batches of this run by several threads, some batches at a time, and returns the
    /// results in the order of the log. `ops_of` says how many operations a batch takes as long as.
    pub fn by_threads<T: Send, E: Send>(
        &self,
        ops_of: impl Fn(&LoggedBatch) -> usize,
        work: impl Fn(Range<usize>) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        if self.threads == 1 {
            return Ok(vec![work(0..self.batches.len())?]);
        }
        let all: usize = self.batches.iter().map(&ops_of).sum();
        let at_once = (all / self.threads).max(OPS_AT_ONCE);
        let (mut groups, mut first, mut ops) = (Vec::new(), 0, 0);
        for (index, batch) in self.batches.iter().enumerate() {
            ops += ops_of(batch);
            if ops >= at_once || index + 1 == self.batches.len() {
                groups.push(first..index + 1);
                (first, ops) = (index + 1, 0);
            }
        }
        let each = |(): &mut (), index: usize| work(Range::clone(&groups[index]));
        parallel::map_indexed(self.threads, groups.len(), || (), each)
    }

    /// The steps that follow its batches. If one thread reads the log, that has none to spare: the thread
    /// that follows decodes the batches then.
    pub fn steps(&self) -> Vec<RunStep> {
        let each_batch = |batches: Range<usize>| batches.map(RunStep::Batch).collect();
        if self.threads == 1 {
            return each_batch(0..self.batches.len());
        }
        let steps = |mut batches: Range<usize>| {
            let mut steps = Vec::new();
            while !batches.is_empty() {
                let left = self.batches[batches.clone()].iter();
                let changes = PageChanges::of(left.map(|batch| (&batch.header, self.payload(batch))));
                let from = batches.start;
                batches.start += changes.as_ref().map_or(1, |changes| changes.batches);
                steps.push(match changes {
                    Some(changes) => RunStep::Changes(from..batches.start, changes),
                    None => RunStep::Batch(from),
                });
            }
            Ok::<_, Infallible>(steps)
        };
        let Ok(steps) = self.by_threads(|batch| claimed_ops(self.payload(batch)), steps);
        steps.into_iter().flatten().collect()
    }

    /// The payload of a batch of this run.
    pub fn payload(&self, batch: &LoggedBatch) -> &[u8] {
        &self.memory[batch.payload.clone()]
    }
}
