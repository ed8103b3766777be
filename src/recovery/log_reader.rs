//! Reads and verifies frames of the log on a separate thread, in advance of the thread that uses them.
//!
//! A long log is read in *windows* of some mebibytes. All cores read a window in chunks, and each chunk is checksummed
//! while it is in the core's cache. Then the reading thread follows the headers, frame by frame, and combines the
//! checksums of the chunks to verify the payloads. Frames are thus accepted or rejected in log order, regardless of the
//! order in which chunks were completed (I4). All cores also decode the operations of verified frames. If the reading
//! thread finds no frame at a position, it reads the bytes once more before it decides that the log ends there.
//!
//! Frames are read into staging memory, from which a device can read deltas. A window passes through three steps: it is
//! read, converted to a command list, and used. One window may wait before each of the last two steps, so up to five
//! are in memory. Each window is at least as long as its longest frame. If frames are longer than windows, the reading
//! thread builds the command lists itself, and only three windows are in memory. One thread reads a short log, or any
//! log on a system with few cores, in successive windows of one megabyte.
//!
//! This module writes nothing to disk, so a crash loses nothing.

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

/// The maximum number of runs (batches that share a staging buffer) that wait to be used, if one thread reads the log.
/// Each run uses staging memory of up to the length of the longest frame.
const RUNS_MAX: usize = 2;
/// The maximum number of windows that wait for the next step, in addition to the window that is being read.
const WINDOWS_READY_MAX: usize = 1;
/// The maximum number of threads that read and checksum one window.
const THREADS_MAX: usize = 16;
/// The minimum number of threads for reading in windows. With fewer threads, reading and using the log keep all of them
/// busy already. On two busy cores, windows took 1.2 times the CPU time without a gain.
const THREADS_MIN: usize = 4;
/// The number of bytes of a window per thread. Each step of a window ends when the last thread has completed its part,
/// so short windows are inefficient. Several windows should fit in the last-level cache.
const WINDOW_LEN_EACH: u64 = 1 << 20;
/// The maximum length of a window in bytes, regardless of the number of threads (I10).
const WINDOW_LEN_MAX: u64 = 16 << 20;
/// The minimum length of a window in bytes. One thread reads a shorter window as fast as several threads.
const WINDOW_LEN_MIN: u64 = 2 << 20;
/// The minimum length of a log that is read in windows, as a number of windows. For a shorter log, touching the memory
/// of the windows and pinning it on a GPU would take too long.
const WINDOWS_MIN: u64 = 8;
/// The length of a segment, in windows, above which its frames count as long.
const LONG_WINDOWS: u64 = 4;
/// The number of bytes that a thread reads and checksums at a time. They fit in the L2 cache of a core.
const CHUNK_LEN: u64 = 256 << 10;
/// The minimum number of operations that a thread decodes at a time. Starting a thread for fewer operations takes
/// longer than decoding them.
const OPS_AT_ONCE: usize = 1024;

/// Reads the frames of a log from disk into staging memory.
pub(super) struct Frames<'a> {
    pub source: &'a DiskSource,
    pub map: &'a LogMap,
    /// The highest durable mark in the manifests. A log that ends earlier is damaged (I4).
    pub mark: Lsn,
    pub staging: &'a StagingPool,
    /// The window length in bytes. Tests set it to override the length derived from the log.
    pub window_len: Option<u64>,
}

/// The lengths of windows and chunks, and the number of threads, with which a log is read in windows.
#[derive(Clone, Copy)]
struct WindowRules {
    len: u64,
    chunk_len: u64,
    threads: usize,
    /// Whether a frame may be much longer than a window. If so, the reading thread builds the lists, and fewer windows
    /// are in memory.
    has_long_frames: bool,
}

/// Consecutive verified batches of the log that share one staging buffer.
pub(super) struct BatchRun {
    pub memory: StagingBuf,
    pub batches: Vec<LoggedBatch>,
    /// The number of threads that process the batches of the run.
    threads: usize,
}

/// A verified batch whose payload is in the buffer of a [`BatchRun`].
pub(super) struct LoggedBatch {
    pub header: FrameHeader,
    /// The range of the batch's payload in the buffer of the run.
    pub payload: Range<usize>,
}

/// The effect of one or more batches of a run on the page table.
pub(super) enum RunStep {
    /// Consecutive batches that only change bytes of pages. Nearly all batches of a long log are of this kind.
    Changes(Range<usize>, PageChanges),
    /// A batch that changes more than the bytes of pages, or that is not decoded yet. Contains its index in the run.
    Batch(usize),
}

/// The last point that a reader of the log reached, and whether the log ends at this point.
pub(super) struct StopPoint {
    pub point: LogPoint,
    /// The end of the log, or `None` if the reader stopped earlier.
    pub end: Option<LogEnd>,
}

impl LoggedBatch {
    /// Returns the damage report for a defect at the batch's position in the log.
    pub fn damage(&self, defect: Defect) -> Damage {
        defect.at_lsn(FileName::Segment(self.header.segment), self.header.offset, self.header.lsn)
    }
}

impl From<ProducerPanic> for Error {
    // A panic of the reading thread fails only this open. The process and its other stores continue.
    fn from(_: ProducerPanic) -> Self {
        Error::panicked("the thread that reads the log ahead")
    }
}

impl Frames<'_> {
    /// Reads the batches after `from` up to `until`, or to the end of the log. Passes each run to `make`, and the
    /// result of `make` to `each` on the calling thread. Either function must return the run's memory to the pool.
    ///
    /// `make` runs on the reading thread, while the run's bytes are in the core's cache. With windows, `make` normally
    /// runs on a separate thread.
    ///
    /// # Errors
    /// - [`Error::Damaged`] if the log ends where it must continue.
    /// - The error of `each`, if it comes first in the log.
    /// - [`Error::OutOfMemory`] or a device error.
    pub fn read<T: Send>(
        &self,
        from: LogPoint,
        until: Option<Lsn>,
        make: impl Fn(BatchRun) -> T + Sync,
        each: impl FnMut(T) -> Result<()>,
    ) -> Result<StopPoint> {
        // A failed allocation of staging memory must not be reported as damage, because the open would then skip an
        // intact snapshot. It is recorded here, and returned as its own error.
        let no_staging = Mutex::new(None);
        let is_empty = until.is_some_and(|until| until <= from.lsn);
        let rules = if is_empty { None } else { self.windows(from) };
        // Reading a short log takes less time than starting a thread.
        let runs_max = match rules {
            Some(_) => WINDOWS_READY_MAX,
            None if self.map.segments().range(from.segment..).count() > 2 => RUNS_MAX,
            None => 0,
        };
        let walk = |emit: &mut dyn FnMut(BatchRun) -> bool| self.walk(from, until, rules, &no_staging, emit);
        let read = match rules {
            None => {
                let make_each = |emit: &mut dyn FnMut(T) -> bool| walk(&mut |run| emit(make(run)));
                parallel::pipeline(runs_max, make_each, each)?
            }
            Some(rules) => with_crew(rules.threads, |crew| {
                let walk = |emit: &mut dyn FnMut(BatchRun) -> bool| {
                    let _crew = crew.join();
                    walk(emit)
                };
                let make_each = |emit: &mut dyn FnMut(T) -> bool| {
                    let _crew = crew.join();
                    if rules.has_long_frames {
                        return Ok(walk(&mut |run| emit(make(run))));
                    }
                    // If `each` has failed, no more runs are needed, and its error is returned.
                    let emit_made = |run| if emit(make(run)) { Ok(()) } else { Err(ProducerPanic) };
                    parallel::pipeline(runs_max, walk, emit_made)
                };
                let _crew = crew.join();
                parallel::pipeline(runs_max, make_each, each)
            })??,
        };
        read.map_err(|damage| no_staging.into_inner().unwrap_or_else(|| damage.into()))
    }

    /// Returns the parameters for reading the log after `from` in windows, or `None` if one thread is as fast.
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
        // A frame that is longer than a segment gets a segment of its own length.
        let has_long_frames = lens.max().is_some_and(|longest| longest > LONG_WINDOWS * len);
        Some(WindowRules { len, chunk_len, threads, has_long_frames })
    }

    /// Reads and checksums a window with several threads.
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

    /// Follows the log on the reading thread. Passes a run to `emit` when the next frame is in another buffer.
    fn walk(
        &self,
        from: LogPoint,
        until: Option<Lsn>,
        rules: Option<WindowRules>,
        no_staging: &Mutex<Option<Error>>,
        emit: &mut dyn FnMut(BatchRun) -> bool,
    ) -> Result<StopPoint, Damage> {
        // The buffers are staging, from which a device can read deltas without another copy.
        let allocate = |len: usize| {
            // The reader may retry with a smaller buffer. The error remains recorded, because the result of such a read
            // cannot be trusted to be the end of the log.
            self.staging.take(len).map_err(|error| {
                *no_staging.lock() = Some(error.clone());
                io::Error::other(error)
            })
        };
        let read = |segment: u64, offset: u64, window: &mut [u8]| {
            self.read_window(rules.expect("windows have rules"), segment, offset, window)
        };
        let windows = rules.map(|rules| Windows { len: rules.len, read: &read });
        let reading = Reading { allocate: &allocate, windows };
        let walk = LogWalk::reading_into(self.source, self.map, from, self.mark, reading)?;
        let mut walk = if until.is_none() { walk.sharing_outcomes() } else { walk };
        let mut run: Option<(Arc<StagingBuf>, Vec<LoggedBatch>)> = None;
        let threads = rules.map_or(1, |rules| rules.threads);
        let mut emit = |run| emit(BatchRun::new(run, threads));
        let walked = self.walk_to(&mut walk, until, &mut run, &mut emit);
        let stopped = StopPoint { point: walk.point(), end: walk.end().cloned() };
        // Dropping the reader releases the memory of the last run. Batches before damage are passed on, too: if one of
        // them causes an error, that error is returned instead.
        drop(walk);
        if let Some(last) = run {
            emit(last);
        }
        walked.map(|()| stopped)
    }

    /// Follows the log up to `until`. Leaves the last run in `run`, because the reader still refers to its memory.
    fn walk_to(
        &self,
        walk: &mut LogWalk<'_, StagingBuf>,
        until: Option<Lsn>,
        run: &mut Option<(Arc<StagingBuf>, Vec<LoggedBatch>)>,
        emit: &mut dyn FnMut((Arc<StagingBuf>, Vec<LoggedBatch>)) -> bool,
    ) -> Result<(), Damage> {
        while until.is_none_or(|until| walk.point().lsn < until) {
            let Some(frame) = walk.next()? else { break };
            // A seal changes no page. The reader itself evaluates the seal's list of verified snapshots.
            if frame.header.kind != FrameKind::Batch {
                continue;
            }
            let payload = frame.payload_at..frame.payload_at + frame.payload.len();
            let batch = LoggedBatch { header: frame.header, payload };
            match run {
                Some((memory, batches)) if Arc::ptr_eq(memory, frame.memory) => batches.push(batch),
                _ => {
                    let read = run.replace((frame.memory.clone(), vec![batch]));
                    // The thread that uses the runs has failed, and its error is returned.
                    if !read.is_none_or(&mut *emit) {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

impl BatchRun {
    /// Creates a run from memory that the reader has released.
    fn new((memory, batches): (Arc<StagingBuf>, Vec<LoggedBatch>), threads: usize) -> Self {
        let memory = Arc::into_inner(memory).expect("the walk reads on elsewhere");
        Self { memory, batches, threads }
    }

    /// Runs `work` on groups of this run's batches with several threads, and returns the results in log order. `ops_of`
    /// returns the cost of a batch as an equivalent number of operations.
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

    /// Returns the effects of this run's batches. If a single thread reads the log, the batches are returned undecoded,
    /// and the thread that uses the run decodes them.
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

    pub fn payload(&self, batch: &LoggedBatch) -> &[u8] {
        &self.memory[batch.payload.clone()]
    }
}
