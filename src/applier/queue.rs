//! The queue of requests to the applier, and when its thread is woken for them.
//!
//! Committers push without waking the thread: its timer wakes it soon enough for any request without a
//! waiter. A turn, a batch with a waiter, and enough bytes for a list are urgent. A crash here loses nothing,
//! since queued batches are logged.

use std::collections::VecDeque;
use std::time::Duration;

use remanent_format::Lsn;

use super::{ApplyWork, LIST_BYTES, Turn};
use crate::base::sync::{Condvar, Instant, Mutex, MutexGuard};

/// How long the applier collects batches that have no waiter. The timer wakes it instead of the committers,
/// because a wake-up is a system call that costs as much as the rest of a small commit.
const BATCHING_DELAY: Duration = Duration::from_micros(200);
/// Payload bytes in the queue before a committer waits for the applier: they are held in memory until it
/// takes them.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// A queue with room for more than this number of requests is not reused.
const REQUESTS_KEPT: usize = 4 << 10;

pub(super) type TurnFn = Box<dyn FnOnce(&mut Turn<'_>) + Send>;

/// Batches are not boxed: one thread would allocate the boxes and another one free them.
pub(super) enum Request {
    Batch(ApplyWork),
    Turn(TurnFn),
}

/// The queue to the applier's thread.
pub(super) struct Requests {
    queue: Mutex<RequestQueue>,
    wake: Condvar,
    /// Signalled when the applier has taken the queue.
    taken: Condvar,
}

#[derive(Default)]
struct RequestQueue {
    requests: VecDeque<Request>,
    /// Bytes of the payloads in the queue.
    payload_bytes: usize,
    /// Whether the queue is to be taken immediately, because it has a waiter or enough bytes for a list.
    is_urgent: bool,
    /// The newest batch that any caller has waited for. It may not be queued yet.
    awaited: Lsn,
    /// Whether the thread runs, naps or sleeps.
    wake_state: WakeState,
    must_stop: bool,
    /// Whether the thread has ended, so that requests are no longer taken.
    has_ended: bool,
}

/// Whether the applier's thread must be woken.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum WakeState {
    /// The thread checks the queue before it rests again.
    #[default]
    Awake,
    /// The thread wakes on its own, in time for any request without a waiter.
    Nap,
    /// The thread waits to be woken.
    Sleep,
}

impl Requests {
    pub fn new() -> Self {
        Self { queue: Mutex::default(), wake: Condvar::new(), taken: Condvar::new() }
    }

    /// Queues a batch. Waits while too much is queued. `show` runs under the queue lock: a thread that
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

    /// Takes all requests in exchange for an empty queue. Returns `false` if nothing is left and the store is
    /// closing. The two queues are swapped repeatedly, because a new one would grow under the committers'
    /// lock each time.
    pub fn take(&self, requests: &mut VecDeque<Request>) -> bool {
        if requests.capacity() > REQUESTS_KEPT {
            *requests = VecDeque::new();
        }
        let mut queue = self.queue.lock();
        let is_over = |queue: &RequestQueue| queue.is_urgent || queue.must_stop;
        // Batches collect first. If none arrives within the nap, the thread sleeps until it is woken.
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
