//! A lane: a stream, its fences, and the memory that its lists use until their fences have passed.
//!
//! Lists of a lane are queued one after the other, under the lane's lock. A fence is the value that the stream writes
//! after a list.
//!
//! # Locks
//!
//! A thread holds the lock of one lane at a time. When one lane is made to wait for a point of another lane, only the
//! other lane is locked. Two threads that make two lanes wait for each other's points therefore cannot deadlock. Driver
//! calls under the lock only queue work. The exception is a long copy, which may wait (see `bulk_copies`).

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

/// A lane's stream, its fences, and the command lists in flight.
pub(super) struct Timeline {
    context: &'static Context,
    stream: Arc<Stream>,
    fences: CompletionWord,
    pieces: Arc<CompletionWord>,
    /// The event with which another stream is made to wait for this stream. Recording and the wait both happen under
    /// the queue's lock, because a second recording in between would move the point.
    event: CudaEvent,
    is_urgent: bool,
    queue: Mutex<VecDeque<ListResources>>,
}

/// Memory that a list uses until its fence has passed.
struct ListResources {
    /// The list's fence, or `u64::MAX` if the list may have started and has no fence.
    fence: u64,
    /// The list's staging. It is kept here so that dropping a `Pending` early does not free it while the list uses it.
    _staging: Arc<ReturnedStaging>,
    /// The list's tables and scratch.
    _blocks: Vec<DeviceBlock>,
}

/// The exclusive right to queue a lane's next list.
pub(super) struct LaneTurn<'t> {
    lane: &'t Timeline,
    queue: MutexGuard<'t, VecDeque<ListResources>>,
}

impl Timeline {
    /// Creates a lane. An urgent lane has priority when the GPU can choose, and in long copies.
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

    /// Returns the stream. Only the thread that holds the [`LaneTurn`] may launch or copy on it.
    pub fn stream(&self) -> CUstream {
        self.stream.raw()
    }

    /// Returns whether the lane has priority over lanes that are not urgent.
    pub fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// Returns the word whose values are the lane's fences.
    pub fn fences(&self) -> &CompletionWord {
        &self.fences
    }

    /// Returns the word that counts pieces of long copies.
    pub fn pieces(&self) -> &Arc<CompletionWord> {
        &self.pieces
    }

    /// Acquires the right to queue the next list. First frees the memory of earlier lists that are done. This cannot be
    /// done when their fences pass, because the GPU notifies no thread.
    pub fn turn(&self) -> LaneTurn<'_> {
        let mut queue = self.queue.lock();
        let reached = self.fences.reached();
        while queue.front().is_some_and(|list| list.fence <= reached) {
            queue.pop_front();
        }
        LaneTurn { lane: self, queue }
    }

    /// Waits until the stream has done all queued work. Waiting for the newest fence would not suffice: a
    /// list that was only partly queued has no fence and may still run.
    ///
    /// # Errors
    /// A device error if the stream stopped.
    pub fn drain(&self) -> Result<()> {
        self.stream.drain()
    }

    /// Makes this lane wait for all work currently queued on `other`, which may belong to another GPU, before it runs
    /// any work that is queued on this lane afterwards.
    ///
    /// # Errors
    /// A device error.
    pub fn follow(&self, other: &Self) -> Result<()> {
        // The lock prevents other threads from queuing on that lane, or from recording the event again before the wait
        // refers to it.
        let _turn = other.queue.lock();
        let point = &other.event;
        // The driver records an event only on a stream of the event's own context. A wait may cross contexts.
        {
            let entered = other.context.enter()?;
            // SAFETY: its context is current, and a lane's handles live as long as it does.
            unsafe { point.record(&entered, other.stream()) }.map_err(|code| other.context.fault(code))?;
        }
        let entered = self.context.enter()?;
        // SAFETY: the same. An event of one GPU can delay streams of every GPU.
        unsafe { point.delay(&entered, self.stream()) }.map_err(|code| self.context.fault(code))
    }

    /// Makes this lane wait for all work currently queued on a caller's stream, before it runs any work that is queued
    /// on the lane afterwards.
    ///
    /// # Errors
    /// `Refused`, a device error.
    pub fn follow_stream(&self, stream: RawStream) -> Result<()> {
        let entered = self.context.enter()?;
        stream::check(self.context, &entered, stream)?;
        self.record(&entered, stream::raw(stream), self.stream())
            .map_err(|code| stream::refused(self.context, stream, code))
    }

    /// Makes a caller's stream wait for all work currently queued on this lane, before it runs any work that is queued
    /// on the stream afterwards.
    ///
    /// # Errors
    /// `Refused`, a device error.
    pub fn lead_stream(&self, stream: RawStream) -> Result<()> {
        // This check precedes the recording of the event. Within a capture, the wait would become a part of the
        // caller's graph, and be repeated at every launch of the graph.
        let entered = self.context.enter()?;
        stream::check(self.context, &entered, stream)?;
        self.record(&entered, self.stream(), stream::raw(stream))
            .map_err(|code| stream::refused(self.context, stream, code))
    }

    /// Makes the stream `later` wait for the current point of the stream `earlier`.
    fn record(&self, entered: &ContextGuard<'_>, earlier: CUstream, later: CUstream) -> Result<(), Code> {
        // The lock prevents other threads from queuing on this lane, or from recording the event again before the wait
        // refers to it.
        let _turn = self.queue.lock();
        // SAFETY: the context is current; a lane's handles live as long as it does, and the creator of a
        // `RawStream` guarantees that the caller's stream is valid.
        unsafe { self.event.record(entered, earlier) }?;
        // SAFETY: the same.
        unsafe { self.event.delay(entered, later) }
    }
}

impl LaneTurn<'_> {
    /// Ends a queued list and returns its fence.
    ///
    /// # Errors
    /// A device error. The memory that the list uses then stays allocated until the lane is dropped.
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

    /// Abandons a list that may be partly queued. Its fence never passes, so the memory of this list and of all later
    /// lists stays allocated until the lane is dropped. The device accepts no lists afterwards.
    pub fn abandon(mut self, staging: &Arc<ReturnedStaging>, blocks: Vec<DeviceBlock>) {
        self.queue.push_back(ListResources { fence: u64::MAX, _staging: staging.clone(), _blocks: blocks });
    }
}

impl Drop for Timeline {
    /// Waits for the stream, so that it does not write to freed memory. If the stream has stopped, the memory that it
    /// was using is leaked.
    fn drop(&mut self) {
        let lists = std::mem::take(self.queue.get_mut());
        if let Err(error) = self.drain() {
            tracing::warn!(%error, "a lane stopped; the memory of its lists stays allocated");
            lists.into_iter().for_each(std::mem::forget);
        }
    }
}
