//! The queue of requests to the applier, which also determines when the applier's thread is woken.
//!
//! Committers push without waking the thread, because its timer wakes it soon enough for any request without a waiter.
//! Urgent requests are a turn, a batch with a waiter, and enough bytes for a list. A crash here loses nothing, because
//! queued batches are logged.

use std::collections::VecDeque;
use std::time::Duration;

use remanent_format::Lsn;

use super::{ApplyWork, LIST_BYTES, Turn};
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard, Rank};

/// The time for which the applier collects batches without a waiter. The timer wakes it instead of the committers,
/// because a wake-up is a system call that costs as much as all other work of a small commit.
const BATCHING_DELAY: Duration = Duration::from_micros(200);
/// The number of payload bytes in the queue at which committers wait for the applier, because these bytes are in memory
/// until it takes them.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// The maximum capacity of a queue that is reused, in requests.
const REQUESTS_KEPT: usize = 4 << 10;

pub(super) type TurnFn = Box<dyn FnOnce(&mut Turn<'_>) + Send>;

/// A request to the applier. Batches are not boxed, because one thread would allocate the boxes and another thread
/// would free them.
pub(super) enum Request {
    Batch(ApplyWork),
    Turn(TurnFn),
}

/// The queue to the applier's thread.
pub(super) struct Requests {
    queue: Mutex<RequestQueue>,
    wake: Condvar,
    /// A condition variable that is notified when the applier has taken the queue.
    taken: Condvar,
}

#[derive(Default)]
struct RequestQueue {
    requests: VecDeque<Request>,
    /// The number of payload bytes in the queue.
    payload_bytes: usize,
    /// Whether the queue should be taken immediately, because it has a waiter or enough bytes for a list.
    is_urgent: bool,
    /// The newest batch that any caller has waited for, which may not be queued yet.
    awaited: Lsn,
    /// Whether and how the thread is waiting.
    wake_state: WakeState,
    must_stop: bool,
    /// Whether the thread has ended, so that requests are no longer taken.
    has_ended: bool,
}

/// Whether the applier's thread must be woken.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum WakeState {
    /// The thread is running, and will check the queue before it waits again.
    #[default]
    Awake,
    /// The thread will wake by its timer, in time for any request without a waiter.
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

    /// Queues a batch. Waits while too many bytes are queued. `show` runs under the queue lock, so that a thread that
    /// observes its effects also finds the batch in the queue.
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

    /// Queues a turn.
    pub fn turn(&self, turn: TurnFn) {
        self.request(self.queue.lock(), Request::Turn(turn), true);
    }

    /// Makes [`take`](Self::take) return `false` once the queue is empty.
    pub fn stop(&self) {
        let mut queue = self.queue.lock();
        queue.must_stop = true;
        queue.is_urgent = true;
        self.wake_for(queue);
    }

    /// Records that the thread has ended.
    pub fn end(&self) {
        let mut queue = self.queue.lock();
        queue.has_ended = true;
        queue.requests.clear();
        self.taken.notify_all();
    }

    fn request(&self, mut queue: MutexGuard<'_, RequestQueue>, request: Request, is_urgent: bool) {
        if queue.has_ended {
            // Dropping a turn notifies its waiter.
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

    /// Wakes the thread if it would not check the queue in time.
    fn wake_for(&self, mut queue: MutexGuard<'_, RequestQueue>) {
        let must_wake = match queue.wake_state {
            WakeState::Awake => false,
            WakeState::Nap => queue.is_urgent,
            WakeState::Sleep => true,
        };
        if must_wake {
            // One wake-up is enough, however many requests arrive before the thread runs.
            queue.wake_state = WakeState::Awake;
            drop(queue);
            self.wake.notify_one();
        }
    }

    /// Takes all requests in exchange for an empty queue. Returns `false` if no requests are left and the store is
    /// closing. The two queues are swapped repeatedly, because a new queue would grow under the committers' lock each
    /// time.
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
