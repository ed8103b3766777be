//! One rank of a communicator.
//!
//! The communicator is non-blocking: each library call returns immediately, and the communicator's asynchronous error
//! reports the result. A thread that waits for this result or for the GPU also checks the time limit, and whether
//! another thread wants to abort. With a blocking communicator, a call would hang if another rank never joins.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use super::Rank;
use super::codes;
use super::library::{Config, Fault, Library, RawCommunicator, RawId};
use super::presence::Presence;
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::base::sync::{Mutex, mpsc, threads};
use crate::device::cuda::completion::{Backoff, Stream};
use crate::device::cuda::context::Context;
use crate::device::cuda::event::CudaEvent;
use crate::device::cuda::stream;
use crate::device::{
    Collective, CollectiveKind, Element, QueuedPoint, RankTransport, RawStream, Reduction, StreamEvent,
};
use crate::error::{Error, NcclError, Result, Unavailable};

/// The maximum number of ranks. The library passes ranks as C integers.
const RANKS_MAX: u32 = c_int::MAX as u32;

/// The time for which a drop waits for the library to free a communicator whose operations are all complete. The
/// library waits for the other ranks on the host, which may use their communicators for much longer.
const FREE_LIMIT: Duration = Duration::from_secs(2);

/// A rank of a communicator, on one GPU.
pub(super) struct NcclRank {
    library: &'static Library,
    context: &'static Context,
    rank: u32,
    ranks: u32,
    timeout: Duration,
    presence: Presence,
    /// The communicator, or `None` after it was aborted. The lock serializes calls, as the library requires.
    raw: Mutex<Option<Handle>>,
    /// Whether a thread waits for the lock in order to abort. The thread that holds the lock then stops waiting.
    is_aborting: AtomicBool,
    /// For each stream with operations, the point after the newest operation.
    queued: Mutex<Vec<(RawStream, QueuedPoint)>>,
    /// The stream for callers without their own stream.
    stream: Stream,
}

/// The handle of a communicator.
#[derive(Clone, Copy)]
struct Handle(RawCommunicator);

// SAFETY: the library accepts a communicator on any thread, and the lock around it keeps calls apart.
unsafe impl Send for Handle {}

/// The method by which the library frees a communicator.
#[derive(Clone, Copy)]
enum Ending {
    /// Frees the communicator after `ncclCommFinalize` has completed.
    Destroy,
    Abort,
}

/// A rank that has started to join and waits for the other ranks.
pub(super) struct JoiningRank(NcclRank);

impl JoiningRank {
    /// Starts joining a communicator without waiting for other ranks.
    ///
    /// # Errors
    /// `Unavailable`, `NoSuchRank`, `RankTaken`, `Failed`; a device error.
    pub fn start(library: &'static Library, id: &RawId, of: &Rank) -> Result<Self> {
        let Rank { rank, ranks, gpu, timeout } = *of;
        if rank >= ranks || ranks > RANKS_MAX {
            return Err(NcclError::NoSuchRank { rank, ranks }.into());
        }
        let unavailable =
            |reason| Error::Unavailable(Unavailable::Device { device: format!("cuda:{gpu}"), reason });
        let context = Context::of(gpu).map_err(unavailable)?;
        let presence = Presence::announce(id, rank, ranks)?;
        let stream = Stream::new(context, false)?;
        let mut raw: RawCommunicator = std::ptr::null_mut();
        {
            let _entered = context.enter()?;
            let mut config = Config::non_blocking();
            // SAFETY: the rank's context is current, the pointers are to live values, and the numbers were checked.
            let started = unsafe { library.join(&mut raw, ranks as c_int, *id, rank as c_int, &mut config) };
            started.map_err(|fault| library.failed_in((rank, ranks), fault))?;
        }
        Ok(Self(NcclRank {
            library,
            context,
            rank,
            ranks,
            timeout,
            presence,
            raw: Mutex::new(Some(Handle(raw))),
            is_aborting: AtomicBool::new(false),
            queued: Mutex::default(),
            stream,
        }))
    }

    /// Waits until all ranks have joined.
    ///
    /// # Errors
    /// `JoinTimedOut`, `Failed`.
    pub fn finish(self) -> Result<NcclRank> {
        let Self(mut rank) = self;
        let joined = {
            let mut raw = rank.raw.lock();
            rank.settle(&mut raw, "ncclCommInitRankConfig")
        };
        match joined {
            Ok(()) => {
                rank.presence.record();
                Ok(rank)
            }
            Err(Error::Nccl(error)) if matches!(*error, NcclError::TimedOut { .. }) => {
                let absent = rank.presence.absent();
                Err(NcclError::JoinTimedOut {
                    rank: rank.rank,
                    ranks: rank.ranks,
                    waited: rank.timeout,
                    absent,
                }
                .into())
            }
            Err(error) => Err(error),
        }
    }
}

impl NcclRank {
    /// Waits until the newest call of the library has completed. After an error, the communicator is aborted.
    fn settle(&self, raw: &mut Option<Handle>, call: &'static str) -> Result<()> {
        let started = Instant::now();
        let mut backoff = None;
        loop {
            let code = self.asynchronous_error(raw)?;
            match code {
                codes::SUCCESS => return Ok(()),
                codes::IN_PROGRESS if self.is_aborting.load(Ordering::Acquire) => {
                    return Err(self.end(raw, self.aborted()));
                }
                codes::IN_PROGRESS if started.elapsed() >= self.timeout => {
                    return Err(self.end(raw, self.timed_out(call)));
                }
                codes::IN_PROGRESS => backoff.get_or_insert_with(Backoff::new).take(),
                code => {
                    let error = self.library.failed_in((self.rank, self.ranks), Fault { call, code });
                    return Err(self.end(raw, error));
                }
            }
        }
    }

    /// Returns the communicator's asynchronous error code.
    fn asynchronous_error(&self, raw: &mut Option<Handle>) -> Result<u32> {
        let Some(Handle(handle)) = *raw else { return Err(self.aborted().into()) };
        let mut code = codes::SUCCESS;
        // SAFETY: the communicator is live as long as the handle is in its lock, the pointer is to a live integer.
        let asked = unsafe { self.library.asynchronous_error(handle, &mut code) };
        match asked {
            Ok(()) => Ok(code),
            Err(fault) => Err(self.end(raw, self.library.failed_in((self.rank, self.ranks), fault))),
        }
    }

    /// Aborts the communicator because of `error`, and returns the error to report. Operations in streams end, and
    /// their targets have unspecified contents.
    fn end(&self, raw: &mut Option<Handle>, error: NcclError) -> Error {
        if let Some(handle) = raw.take() {
            self.free(handle, Ending::Abort, self.timeout);
        }
        error.into()
    }

    /// Frees a communicator whose handle was taken, and waits at most `limit`. The library joins its threads, which may
    /// not end before the other ranks on the host end their communicators. A separate thread waits for that, if
    /// necessary until the process ends.
    fn free(&self, handle: Handle, ending: Ending, limit: Duration) {
        let (library, context, rank) = (self.library, self.context, self.rank);
        let (done, is_done) = mpsc::channel();
        let work = move || {
            free_now(library, context, rank, handle, ending);
            // Sending fails if the caller no longer waits.
            let _is_over = done.send(());
        };
        match threads::start("remanent-nccl", work) {
            Ok(_detached) => {
                if is_done.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
                    tracing::warn!(rank, "a communicator is freed only after other ranks free theirs");
                }
            }
            Err(error) => {
                tracing::warn!(%error, rank, "a communicator is freed without a time limit");
                free_now(library, context, rank, handle, ending);
            }
        }
    }

    /// Returns the error for calls after the communicator has ended. The call that ended it returned the reason.
    fn aborted(&self) -> NcclError {
        NcclError::Aborted { rank: self.rank, ranks: self.ranks }
    }

    fn timed_out(&self, call: &'static str) -> NcclError {
        let Self { rank, ranks, timeout, .. } = *self;
        NcclError::TimedOut { rank, ranks, call, waited: timeout, ended: self.presence.ended() }
    }

    /// Calls the library's function for an operation.
    ///
    /// # Safety
    /// The ranges of the operation are memory of this GPU that stays allocated until the stream has reached the point
    /// after the operation, and the stream is live.
    unsafe fn call(&self, Handle(handle): Handle, stream: RawStream, of: &Collective) -> Result<(), Fault> {
        let Collective { kind, source, target, count, element } = *of;
        let (source, target) = (source as *const _, target as *mut _);
        let (element, stream) = (element_code(element), stream::raw(stream));
        let library = self.library;
        match kind {
            CollectiveKind::AllReduce(reduction) => {
                let reduction = reduction_code(reduction);
                // SAFETY: the caller's promise; the communicator is live, and its lock is held.
                unsafe { library.all_reduce(source, target, count, element, reduction, handle, stream) }
            }
            CollectiveKind::ReduceScatter(reduction) => {
                let reduction = reduction_code(reduction);
                // SAFETY: the same.
                unsafe { library.reduce_scatter(source, target, count, element, reduction, handle, stream) }
            }
            // SAFETY: the same.
            CollectiveKind::AllGather => unsafe {
                library.all_gather(source, target, count, element, handle, stream)
            },
            CollectiveKind::Broadcast { root } => {
                let root = root as c_int;
                // SAFETY: the same.
                unsafe { library.broadcast(source, target, count, element, root, handle, stream) }
            }
        }
    }

    /// Waits until all queued operations have ended, then frees the communicator. Aborts the communicator if the
    /// operations do not end within the time limit or the library fails.
    fn close(&self) {
        let queued = std::mem::take(&mut *self.queued.lock());
        for (_, point) in queued {
            if self.wait(&point).is_err() {
                return;
            }
        }
        let mut raw = self.raw.lock();
        let Some(Handle(handle)) = *raw else { return };
        let Ok(entered) = self.context.enter() else { return };
        // SAFETY: the communicator is live, and its lock is held.
        let finalized = unsafe { self.library.finalize(handle) };
        let finalized = finalized.map_err(|fault| {
            let error = self.library.failed_in((self.rank, self.ranks), fault);
            self.end(&mut raw, error)
        });
        let finalized = finalized.and_then(|()| self.settle(&mut raw, "ncclCommFinalize"));
        if let Err(error) = finalized {
            tracing::warn!(%error, "a communicator was aborted when it was dropped");
            return;
        }
        *raw = None;
        drop(entered);
        self.free(Handle(handle), Ending::Destroy, self.timeout.min(FREE_LIMIT));
    }
}

impl RankTransport for NcclRank {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn gpu(&self) -> u32 {
        self.context.ordinal
    }

    fn stream(&self) -> RawStream {
        RawStream(self.stream.raw() as u64)
    }

    fn queue(&self, stream: RawStream, of: &Collective) -> Result<QueuedPoint> {
        let mut raw = self.raw.lock();
        let Some(handle) = *raw else { return Err(self.aborted().into()) };
        let call = call_name(of.kind);
        {
            let entered = self.context.enter()?;
            // Within a capture, the operation would become part of the caller's graph.
            stream::check(self.context, &entered, stream)?;
            // SAFETY: the callers of this method hold uses of the ranges until their streams have passed the
            // operation, and the creator of the `RawStream` guarantees that the stream is valid.
            let called = unsafe { self.call(handle, stream, of) };
            if let Err(fault) = called {
                let error = self.library.failed_in((self.rank, self.ranks), fault);
                return Err(self.end(&mut raw, error));
            }
        }
        self.settle(&mut raw, call)?;
        let point = QueuedPoint { event: StreamEvent::new(stream::point(self.context, stream)?), call };
        let mut queued = self.queued.lock();
        match queued.iter_mut().find(|(of, _)| *of == stream) {
            Some((_, newest)) => *newest = point.clone(),
            None => queued.push((stream, point.clone())),
        }
        Ok(point)
    }

    fn wait(&self, point: &QueuedPoint) -> Result<()> {
        let started = Instant::now();
        let mut backoff = None;
        while !point.event.of::<CudaEvent>().is_reached()? {
            if self.is_aborting.load(Ordering::Acquire) {
                self.abort();
            }
            self.check()?;
            if started.elapsed() >= self.timeout {
                let mut raw = self.raw.lock();
                return Err(self.end(&mut raw, self.timed_out(point.call)));
            }
            backoff.get_or_insert_with(Backoff::new).take();
        }
        // After an abort, streams continue past the operation, whose result is then missing.
        self.check()
    }

    fn check(&self) -> Result<()> {
        let mut raw = self.raw.lock();
        match self.asynchronous_error(&mut raw)? {
            codes::SUCCESS | codes::IN_PROGRESS => Ok(()),
            code => {
                let fault = Fault { call: "ncclCommGetAsyncError", code };
                let error = self.library.failed_in((self.rank, self.ranks), fault);
                Err(self.end(&mut raw, error))
            }
        }
    }

    fn abort(&self) {
        self.is_aborting.store(true, Ordering::Release);
        let mut raw = self.raw.lock();
        if raw.is_some() {
            self.end(&mut raw, self.aborted());
        }
    }
}

impl Drop for NcclRank {
    fn drop(&mut self) {
        self.close();
    }
}

/// Frees a communicator whose handle was taken from its lock.
fn free_now(library: &Library, context: &Context, rank: u32, Handle(handle): Handle, ending: Ending) {
    // Without a context, the library cannot free its memory on the GPU.
    let entered = context.enter();
    let freed = match ending {
        // SAFETY: the handle was taken, so nothing uses the communicator afterwards.
        Ending::Destroy => unsafe { library.destroy(handle) },
        // SAFETY: the same.
        Ending::Abort => unsafe { library.abort(handle) },
    };
    if let Err(Fault { call, code }) = freed {
        tracing::warn!(rank, call, code, "a communicator stays allocated");
    }
    drop(entered);
}

/// Returns the name of the library's function for an operation.
fn call_name(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllReduce(_) => "ncclAllReduce",
        CollectiveKind::AllGather => "ncclAllGather",
        CollectiveKind::Broadcast { .. } => "ncclBroadcast",
        CollectiveKind::ReduceScatter(_) => "ncclReduceScatter",
    }
}

/// Returns the library's number for an element type: `ncclDataType_t`.
fn element_code(element: Element) -> c_int {
    match element {
        Element::I8 => 0,
        Element::U8 => 1,
        Element::I32 => 2,
        Element::U32 => 3,
        Element::I64 => 4,
        Element::U64 => 5,
        Element::F16 => 6,
        Element::F32 => 7,
        Element::F64 => 8,
        Element::Bf16 => 9,
    }
}

/// Returns the library's number for a reduction: `ncclRedOp_t`.
fn reduction_code(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Product => 1,
        Reduction::Max => 2,
        Reduction::Min => 3,
        Reduction::Average => 4,
    }
}
