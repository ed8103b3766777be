//! The queue of requests to the applier, which also determines when the applier's thread is woken.
//!
//! A committer usually adds a batch without waking the thread, because a batch that no caller waits for can be applied
//! when the thread's timer expires. The thread is woken if a caller waits for a batch or for a closure, and when enough
//! bytes for a command list are queued. Queued batches are logged, so a crash loses none of them.

use std::collections::VecDeque;
use std::time::Duration;

use remanent_format::Lsn;

use super::{ApplyWork, LIST_BYTES, Turn};
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard, Rank};

/// The time for which the applier collects batches that no caller waits for. A timer wakes the applier's thread,
/// because a wake-up by a committer is a system call that costs as much as all other work of a small commit.
const BATCHING_DELAY: Duration = Duration::from_micros(200);
/// The number of payload bytes in the queue above which committers wait for the applier. The limit bounds the memory of
/// queued payloads.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// The maximum capacity, in requests, of a queue that is kept for reuse.
const REQUESTS_KEPT: usize = 4 << 10;

pub(super) type TurnFn = Box<dyn FnOnce(&mut Turn<'_>) + Send>;

/// A request to the applier: a batch to apply, or a function to run between batches. Batches are not boxed, because one
/// thread would allocate the boxes and another thread would free them.
pub(super) enum Request {
    Batch(ApplyWork),
    Turn(TurnFn),
}

/// The queue of requests that committers and readers share with the applier's thread.
pub(super) struct Requests {
    queue: Mutex<RequestQueue>,
    wake: Condvar,
    /// A condition variable that is notified when the applier has taken all requests of the queue.
    taken: Condvar,
}

#[derive(Default)]
struct RequestQueue {
    requests: VecDeque<Request>,
    /// The total number of payload bytes of the queued batches.
    payload_bytes: usize,
    /// Whether the applier should take the requests immediately, because a caller waits or there are enough bytes for a
    /// command list.
    is_urgent: bool,
    /// The Lsn of the newest batch for which any caller has waited. The batch may not be queued yet.
    awaited: Lsn,
    /// Whether the thread is waiting, and how it will be woken.
    wake_state: WakeState,
    must_stop: bool,
    /// Whether the thread has ended. Requests are then no longer taken.
    has_ended: bool,
}

/// The state of the applier's thread, which determines whether a new request must wake it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum WakeState {
    /// The thread is running, and will check the queue before it waits again.
    #[default]
    Awake,
    /// The thread waits for its timer, which expires soon enough for batches that no caller waits for.
    Nap,
    /// The thread waits until it is notified.
    Sleep,
}

impl Requests {
    pub fn new() -> Self {
        Self {
            queue: Mutex::of_rank(Rank::STATE, RequestQueue::default()),
            wake: Condvar::new(),
            taken: Condvar::new(),
        }
    }

    /// Queues a batch, after waiting while too many bytes are queued. `show` makes the batch visible and runs under the
    /// queue lock, so that a thread that sees the batch also finds it in the queue.
    pub fn push(&self, work: ApplyWork, show: impl FnOnce()) {
        let mut queue = self.queue.lock();
        while queue.payload_bytes >= QUEUED_BYTES_MAX && !queue.has_ended {
            self.taken.wait(&mut queue);
        }
        queue.payload_bytes += work.payload.len();
        let is_urgent = queue.payload_bytes >= LIST_BYTES || work.point.lsn <= queue.awaited;
        show();
        self.request(queue, Request::Batch(work), is_urgent);
    }

    /// Returns whether nothing is queued.
    pub fn is_empty(&self) -> bool {
        self.queue.lock().requests.is_empty()
    }

    /// Queues a closure that runs between two batches, and wakes the thread.
    pub fn turn(&self, turn: TurnFn) {
        self.request(self.queue.lock(), Request::Turn(turn), true);
    }

    /// Makes [`take`](Self::take) return `false` once all requests have been taken.
    pub fn stop(&self) {
        let mut queue = self.queue.lock();
        queue.must_stop = true;
        queue.is_urgent = true;
        self.wake_for(queue);
    }

    /// Records that the thread has ended, and drops the queued requests. Later requests are also dropped.
    pub fn end(&self) {
        let mut queue = self.queue.lock();
        queue.has_ended = true;
        queue.requests.clear();
        self.taken.notify_all();
    }

    fn request(&self, mut queue: MutexGuard<'_, RequestQueue>, request: Request, is_urgent: bool) {
        if queue.has_ended {
            // Dropping the closure notifies the caller that waits for its result.
            return;
        }
        queue.requests.push_back(request);
        queue.is_urgent |= is_urgent;
        self.wake_for(queue);
    }

    /// Records that a caller waits for this batch.
    pub fn expedite(&self, lsn: Lsn) {
        let mut queue = self.queue.lock();
        queue.awaited = queue.awaited.max(lsn);
        // A batch that is no longer in the queue is already being processed.
        if !queue.requests.is_empty() {
            queue.is_urgent = true;
            self.wake_for(queue);
        }
    }

    /// Wakes the thread if the queued requests cannot wait for its timer.
    fn wake_for(&self, mut queue: MutexGuard<'_, RequestQueue>) {
        let must_wake = match queue.wake_state {
            WakeState::Awake => false,
            WakeState::Nap => queue.is_urgent,
            WakeState::Sleep => true,
        };
        if must_wake {
            // A single wake-up suffices for all requests that arrive before the thread runs.
            queue.wake_state = WakeState::Awake;
            drop(queue);
            self.wake.notify_one();
        }
    }

    /// Takes all requests, and leaves the emptied queue `requests` in their place. Returns `false` if no requests are
    /// left and the store is closing. The two queues are swapped on every call, because a new queue would have to grow
    /// while committers wait for its lock.
    pub fn take(&self, requests: &mut VecDeque<Request>) -> bool {
        if requests.capacity() > REQUESTS_KEPT {
            *requests = VecDeque::new();
        }
        let mut queue = self.queue.lock();
        let is_over = |queue: &RequestQueue| queue.is_urgent || queue.must_stop;
        // Batches are collected first. If no batch arrives within the delay, the thread sleeps until it is notified.
        let nap_end = Instant::now() + BATCHING_DELAY;
        let mut is_delay_over = false;
        while !is_over(&queue) && (!is_delay_over || queue.requests.is_empty()) {
            if is_delay_over {
                queue.wake_state = WakeState::Sleep;
                self.wake.wait(&mut queue);
            } else {
                queue.wake_state = WakeState::Nap;
                is_delay_over = self.wake.wait_until(&mut queue, nap_end).timed_out();
            }
        }
        queue.wake_state = WakeState::Awake;
        queue.is_urgent = false;
        if queue.payload_bytes >= QUEUED_BYTES_MAX {
            self.taken.notify_all();
        }
        queue.payload_bytes = 0;
        std::mem::swap(&mut queue.requests, requests);
        !requests.is_empty() || !queue.must_stop
    }
}
