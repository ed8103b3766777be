//! A lane: a stream, its fences, and the memory that its lists use until their fences have passed.
//!
//! Lists of a lane are queued one after the other, under its lock. A fence is the value that the stream
//! writes after the list.
//!
//! # Locks
//!
//! A thread holds one lane's lock at a time. Where two lanes wait for each other's points, only the lane that
//! is waited for is locked, so two threads that make two lanes follow each other cannot deadlock. The
//! driver's calls under the lock only queue; the one that may wait is a long copy (see `bulk_copies`).

use std::collections::VecDeque;
use std::sync::Arc;

use super::completion::{CompletionWord, Stream};
use super::context::{Context, ContextGuard};
use super::driver::CUstream;
use super::errors::Code;
use super::event::CudaEvent;
use super::memory::{DeviceBlock, PlaceMemory};
use super::stream;
use crate::base::sync::{Mutex, MutexGuard};
use crate::device::{RawStream, ReturnedStaging};
use crate::error::Result;

/// A lane's stream and its points.
pub(super) struct Timeline {
    context: &'static Context,
    stream: Arc<Stream>,
    fences: CompletionWord,
    pieces: Arc<CompletionWord>,
    /// Stands for one point of a stream while another stream is told to wait for it. It is recorded and taken
    /// under the queue's lock: a second recording in between would move the point.
    event: CudaEvent,
    is_urgent: bool,
    queue: Mutex<VecDeque<ListResources>>,
}

/// Memory that a list uses until its fence has passed.
struct ListResources {
    /// The list's fence; beyond all others if the list may have begun and has none.
    fence: u64,
    /// Held so that a `Pending` that is dropped early frees nothing that the list uses.
    _staging: Arc<ReturnedStaging>,
    /// The list's tables and scratch.
    _blocks: Vec<DeviceBlock>,
}

/// The right to queue a lane's next list.
pub(super) struct LaneTurn<'t> {
    lane: &'t Timeline,
    queue: MutexGuard<'t, VecDeque<ListResources>>,
}

impl Timeline {
    /// A new lane. An urgent one goes before others, where the GPU can choose and in long copies.
    ///
    /// # Errors
    /// `OutOfMemory`, a device error.
    pub fn new(context: &'static Context, pinned: &PlaceMemory, is_urgent: bool) -> Result<Self> {
        let stream = Arc::new(Stream::new(context, is_urgent)?);
        Ok(Self {
            context,
            fences: CompletionWord::new(&stream, pinned)?,
            pieces: Arc::new(CompletionWord::new(&stream, pinned)?),
            stream,
            event: CudaEvent::new(context)?,
            is_urgent,
            queue: Mutex::default(),
        })
    }

    /// The stream, for launches and copies of the thread that has the lane's turn.
    pub fn stream(&self) -> CUstream {
        self.stream.raw()
    }

    /// Whether the lane goes before others.
    pub fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// The lane's fences, as values of a word.
    pub fn fences(&self) -> &CompletionWord {
        &self.fences
    }

    /// The word that counts pieces of long copies.
    pub fn pieces(&self) -> &Arc<CompletionWord> {
        &self.pieces
    }

    /// Takes the right to queue the next list. Memory of earlier lists that are done is freed first, here and
    /// not when a fence passes: the GPU tells no thread of that.
    pub fn turn(&self) -> LaneTurn<'_> {
        let mut queue = self.queue.lock();
        let reached = self.fences.reached();
        while queue.front().is_some_and(|list| list.fence <= reached) {
            queue.pop_front();
        }
        LaneTurn { lane: self, queue }
    }

    /// Waits until the stream has done everything that was queued. Waiting for the newest fence would not do:
    /// a list that failed half queued has none, and may still run.
    ///
    /// # Errors
    /// A device error: the stream stopped.
    pub fn drain(&self) -> Result<()> {
        self.stream.drain()
    }

    /// Makes work that is queued on `self` from now on run after everything that is queued on `other` by now,
    /// which may be another GPU's.
    ///
    /// # Errors
    /// A device error.
    pub fn follow(&self, other: &Self) -> Result<()> {
        // With the other lane's turn in hand no thread queues there meanwhile, nor records the event anew
        // before the wait has taken it.
        let _turn = other.queue.lock();
        let point = &other.event;
        // The driver records an event only on a stream of the event's own context. A wait may cross contexts.
        {
            let entered = other.context.enter()?;
            // SAFETY: its context is current, and a lane's handles live as long as it does.
            unsafe { point.record(&entered, other.stream()) }.map_err(|code| other.context.fault(code))?;
        }
        let entered = self.context.enter()?;
        // SAFETY: the same. An event of one GPU holds back streams of all of them.
        unsafe { point.hold_back(&entered, self.stream()) }.map_err(|code| self.context.fault(code))
    }

    /// Makes work that is queued on this lane from now on run after everything that is in a caller's stream
    /// by now.
    ///
    /// # Errors
    /// `StreamRefused`, a device error.
    pub fn follow_stream(&self, stream: RawStream) -> Result<()> {
        let entered = self.context.enter()?;
        stream::check(self.context, &entered, stream)?;
        self.record(&entered, stream::raw(stream), self.stream())
            .map_err(|code| stream::refused(self.context, stream, code))
    }

    /// Makes work that is put into a caller's stream from now on run after everything that is queued here by
    /// now.
    ///
    /// # Errors
    /// `StreamRefused`, a device error.
    pub fn lead_stream(&self, stream: RawStream) -> Result<()> {
        // Checked before the event is recorded: within a capture the wait would become a part of the caller's
        // graph, and be repeated at every launch of it.
        let entered = self.context.enter()?;
        stream::check(self.context, &entered, stream)?;
        self.record(&entered, self.stream(), stream::raw(stream))
            .map_err(|code| stream::refused(self.context, stream, code))
    }

    /// Makes `later` wait for the point at which `earlier` is now.
    fn record(&self, entered: &ContextGuard<'_>, earlier: CUstream, later: CUstream) -> Result<(), Code> {
        // With the turn in hand no thread queues here meanwhile, nor records the event anew before the wait
        // has taken it.
        let _turn = self.queue.lock();
        // SAFETY: the context is current; a lane's handles live as long as it does, and a caller's stream is
        // vouched for by the maker of its `RawStream`.
        unsafe { self.event.record(entered, earlier) }?;
        // SAFETY: the same.
        unsafe { self.event.hold_back(entered, later) }
    }
}

impl LaneTurn<'_> {
    /// Ends a list that is queued, and returns its fence.
    ///
    /// # Errors
    /// A device error. The memory that the list uses then stays until the lane is dropped.
    pub fn end(
        mut self,
        entered: &ContextGuard<'_>,
        staging: &Arc<ReturnedStaging>,
        blocks: Vec<DeviceBlock>,
    ) -> Result<u64> {
        match self.lane.fences.count(entered) {
            Ok(fence) => {
                self.queue.push_back(ListResources { fence, _staging: staging.clone(), _blocks: blocks });
                Ok(fence)
            }
            Err(error) => {
                self.abandon(staging, blocks);
                Err(error)
            }
        }
    }

    /// Gives up a list that may be queued in part: the memory that it uses stays until the lane is dropped.
    /// Its fence never comes, so it holds back the memory of later lists too; the device takes none after
    /// this.
    pub fn abandon(mut self, staging: &Arc<ReturnedStaging>, blocks: Vec<DeviceBlock>) {
        self.queue.push_back(ListResources { fence: u64::MAX, _staging: staging.clone(), _blocks: blocks });
    }
}

impl Drop for Timeline {
    /// Waits for the stream, so that it writes to nothing that is freed. Memory that a stopped stream was
    /// using is left to it.
    fn drop(&mut self) {
        let lists = std::mem::take(self.queue.get_mut());
        if let Err(error) = self.drain() {
            tracing::warn!(%error, "a lane stopped: the memory of its lists stays allocated");
            lists.into_iter().for_each(std::mem::forget);
        }
    }
}
