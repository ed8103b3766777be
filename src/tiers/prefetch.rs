//! Prefetching: a background thread moves pages to the places in which callers will need them.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use remanent_format::{PageId, Place};

use super::mover::{Hits, PageMover};
use crate::base::process::ForkGuard;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard, Rank, threads};
use crate::error::{Error, Result};

/// The maximum number of pages that one batch moves. A canceled prefetch waits for at most one batch.
const BATCH_PAGES: usize = 64;
/// The number of bytes at which no further page is added to a batch.
const BATCH_BYTES: u64 = 16 << 20;

/// A handle to pages that are being moved to a place, returned by [`Store::prefetch`](crate::Store::prefetch). Dropping
/// the handle does not stop the moves.
///
/// The handle is also a future with the result of [`wait`](Self::wait). Await `&mut coming` to keep the handle, for
/// example to cancel the prefetch after a timeout.
///
/// ```
/// use remanent::{Place, Store};
/// let store = Store::temporary()?;
/// let mut batch = store.batch();
/// batch.create_from([7; 4096], Place::Disk);
/// let pages = store.commit(batch)?.pages;
///
/// let coming = store.prefetch(&pages, Place::Host)?;
/// // Meanwhile, the caller does something else.
/// coming.wait()?;
/// assert_eq!(store.page(pages[0])?.place, Place::Host);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Debug)]
pub struct Prefetch {
    job: ForkGuard<Arc<Job>>,
}

#[derive(Debug)]
struct Job {
    place: Place,
    state: Mutex<JobState>,
    changed: Condvar,
}

#[derive(Debug)]
struct JobState {
    /// The pages that have not been moved yet.
    left: VecDeque<PageId>,
    /// Whether a batch that moves pages of this job is in progress.
    is_moving: bool,
    /// The time at which the first batch began, or `None` before the first batch.
    begun: Option<Instant>,
    /// The time at which all pages had arrived, or `None` before that time.
    ended: Option<Instant>,
    outcome: Option<Result<()>>,
    /// The waker of the task that waits for the result, or `None` if no task waits.
    task: Option<Waker>,
}

impl Prefetch {
    /// Cancels all moves that have not begun, and waits for those in progress. Pages that have arrived remain in the
    /// place.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn cancel(&self) -> Result<()> {
        let job = self.job.check()?;
        let mut state = job.state.lock();
        state.left.clear();
        while state.is_moving {
            job.changed.wait(&mut state);
        }
        state.outcome.get_or_insert(Ok(()));
        job.changed.notify_all();
        wake(state);
        Ok(())
    }

    /// Returns the time at which the first page began to move, and the time at which all pages had arrived, if they
    /// have. Returns `None` if no page has begun to move, or if the prefetch failed.
    pub(super) fn moving_since(&self) -> Result<Option<(Instant, Option<Instant>)>> {
        let state = self.job.check()?.state.lock();
        let has_failed = matches!(state.outcome, Some(Err(_)));
        Ok(state.begun.filter(|_| !has_failed).map(|begun| (begun, state.ended)))
    }

    /// Cancels all moves that have not begun. Unlike [`cancel`](Self::cancel), does not wait for a batch in progress.
    pub(super) fn give_up(&self) -> Result<()> {
        self.job.check()?.state.lock().left.clear();
        Ok(())
    }

    /// Returns whether all pages have arrived, or the prefetch failed or was canceled.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn is_done(&self) -> Result<bool> {
        Ok(self.job.check()?.state.lock().outcome.is_some())
    }

    /// Waits until all pages have arrived. Returns immediately if the prefetch was canceled. Only the first
    /// call after a failure returns the error.
    ///
    /// # Errors
    /// The errors of [`Store::ensure`](crate::Store::ensure), except that pages deleted in the meantime are
    /// skipped; [`Error::Closed`] if the store was closed first.
    pub fn wait(&self) -> Result<()> {
        let job = self.job.check()?;
        let mut state = job.state.lock();
        loop {
            match &mut state.outcome {
                Some(outcome) => return std::mem::replace(outcome, Ok(())),
                None => job.changed.wait(&mut state),
            }
        }
    }

    /// Waits like [`wait`](Self::wait), but for at most `timeout`. Returns whether the prefetch is done.
    ///
    /// # Errors
    /// The errors of [`wait`](Self::wait).
    pub fn wait_timeout(&self, timeout: std::time::Duration) -> Result<bool> {
        let job = self.job.check()?;
        let Some(until) = Instant::now().checked_add(timeout) else { return self.wait().map(|()| true) };
        let mut state = job.state.lock();
        while state.outcome.is_none() && Instant::now() < until {
            job.changed.wait_until(&mut state, until);
        }
        match &mut state.outcome {
            Some(outcome) => std::mem::replace(outcome, Ok(())).map(|()| true),
            None => Ok(false),
        }
    }
}

impl Future for Prefetch {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let mut state = self.job.check()?.state.lock();
        if let Some(outcome) = &mut state.outcome {
            return Poll::Ready(std::mem::replace(outcome, Ok(())));
        }
        state.task = Some(context.waker().clone());
        Poll::Pending
    }
}

/// Wakes the task that waits for a job. Releases the job's lock first, because an executor may poll the task inside the
/// wake-up call.
fn wake(mut state: MutexGuard<'_, JobState>) {
    let task = state.task.take();
    drop(state);
    task.into_iter().for_each(Waker::wake);
}

impl Job {
    /// Takes the pages to move next, or returns `None` if none are left.
    fn next(&self, len_of: impl Fn(PageId) -> u64) -> Option<Vec<PageId>> {
        let mut state = self.state.lock();
        let (mut pages, mut bytes) = (Vec::new(), 0u64);
        while pages.len() < BATCH_PAGES && bytes < BATCH_BYTES {
            let Some(page) = state.left.pop_front() else { break };
            bytes = bytes.saturating_add(len_of(page));
            pages.push(page);
        }
        state.is_moving = !pages.is_empty();
        if state.is_moving {
            state.begun.get_or_insert_with(Instant::now);
        }
        state.is_moving.then_some(pages)
    }

    fn end(&self, outcome: Result<()>) {
        let mut state = self.state.lock();
        // If the job was canceled in the meantime, not all pages have arrived.
        if outcome.is_ok() && state.outcome.is_none() {
            state.ended = Some(Instant::now());
        }
        state.left.clear();
        state.is_moving = false;
        state.outcome.get_or_insert(outcome);
        self.changed.notify_all();
        wake(state);
    }
}

/// The background thread that moves the pages of all prefetches, one prefetch after another. The first prefetch starts
/// the thread.
pub(crate) struct PrefetchThread {
    mover: Arc<PageMover>,
    jobs: Arc<Jobs>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Jobs {
    state: Mutex<JobQueue>,
    changed: Condvar,
}

#[derive(Default)]
struct JobQueue {
    waiting: VecDeque<Arc<Job>>,
    is_over: bool,
}

impl PrefetchThread {
    pub fn new(mover: Arc<PageMover>) -> Self {
        Self { mover, jobs: Arc::default(), thread: Mutex::of_rank(Rank::STATE, None) }
    }

    /// Starts moving pages to a place.
    ///
    /// # Errors
    /// [`Error::Io`] if the thread cannot be started; no page is moved then.
    pub fn prefetch(&self, pages: &[PageId], place: Place) -> Result<Prefetch> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (mover, jobs) = (self.mover.clone(), self.jobs.clone());
            let started = threads::start("remanent-prefetch", move || jobs.live(&mover));
            *thread = Some(started.map_err(|error| Error::thread("the thread for prefetching", error))?);
        }
        let mut queue = self.jobs.state.lock();
        if queue.is_over {
            return Err(Error::Closed);
        }
        let left = pages.iter().copied().collect();
        let state = JobState { left, is_moving: false, begun: None, ended: None, outcome: None, task: None };
        let job = Arc::new(Job { place, state: Mutex::new(state), changed: Condvar::new() });
        queue.waiting.push_back(job.clone());
        self.jobs.changed.notify_all();
        Ok(Prefetch { job: ForkGuard::new(job) })
    }
}

impl Jobs {
    fn live(&self, mover: &PageMover) {
        let _over = EndJobsOnDrop(self);
        loop {
            let mut queue = self.state.lock();
            let job = loop {
                if queue.is_over {
                    return;
                }
                match queue.waiting.pop_front() {
                    Some(job) => break job,
                    None => self.changed.wait(&mut queue),
                }
            };
            drop(queue);
            let _panicked = EndJobOnPanic(&job);
            job.end(self.move_all(&job, mover));
        }
    }

    fn move_all(&self, job: &Job, mover: &PageMover) -> Result<()> {
        let pages = job.state.lock().left.len();
        let _span = tracing::debug_span!("prefetch", place = %job.place, pages).entered();
        while let Some(mut pages) = job.next(|page| mover.byte_len(page)) {
            if self.state.lock().is_over {
                return Err(Error::Closed);
            }
            mover.move_existing(&mut pages, job.place, Hits::Uses)?;
        }
        Ok(())
    }
}

/// A guard that ends a job when its thread panics, so that no call waits for the job.
struct EndJobOnPanic<'j>(&'j Job);

impl Drop for EndJobOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end(Err(Error::panicked("the thread for prefetching")));
        }
    }
}

/// A guard that ends all waiting jobs when the thread ends, so that no call waits for a job forever.
struct EndJobsOnDrop<'j>(&'j Jobs);

impl Drop for EndJobsOnDrop<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.state.lock();
        queue.is_over = true;
        let waiting = std::mem::take(&mut queue.waiting);
        // The lock is released first, because a woken task may request another prefetch immediately.
        drop(queue);
        waiting.into_iter().for_each(|job| job.end(Err(Error::Closed)));
    }
}

impl Drop for PrefetchThread {
    fn drop(&mut self) {
        self.jobs.state.lock().is_over = true;
        self.jobs.changed.notify_all();
        let Some(thread) = self.thread.lock().take() else { return };
        // The thread may be waiting for a page whose load is delayed by a lack of memory.
        self.mover.end_loads();
        if thread.join().is_err() {
            tracing::error!("the thread for prefetching panicked");
        }
    }
}
