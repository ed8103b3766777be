//! Engine futures for an event loop. A store thread wakes a task without acquiring the interpreter lock: it records
//! the task's number and writes to an eventfd, which the event loop watches like any other file descriptor.

use std::future::Future;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pyo3::prelude::*;
use remanent::store::Acknowledged;
use remanent::{Ack, Result, Ticket};

use crate::errors::store_io;

/// An eventfd that wakes an event loop, and the numbers of the tasks to poll again.
#[pyclass(frozen, module = "remanent._store._native")]
pub struct EventFd(Arc<WakeQueue>);

struct WakeQueue {
    event: OwnedFd,
    ready: Mutex<Vec<u64>>,
}

/// A task that waits for an acknowledgement. Dropping the object ends the wait.
#[pyclass(frozen, module = "remanent._store._native")]
pub struct Waiting {
    _future: Mutex<Acknowledged>,
}

struct TaskWaker {
    queue: Arc<WakeQueue>,
    id: u64,
}

impl WakeQueue {
    /// Marks a task as ready to be polled.
    fn wake_task(&self, id: u64) {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        let one = 1_u64;
        // If the counter is full, the write fails, but the descriptor is already readable.
        // SAFETY: the descriptor is open as long as `self`, and the pointer is to eight bytes.
        let _ = unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.queue.wake_task(self.id);
    }
}

/// The waker of a future on which tasks of several event loops and several threads wait. The engine keeps
/// only one waker per future.
#[derive(Default)]
pub struct SharedWaker {
    state: Mutex<SharedWakerState>,
    woken: Condvar,
}

#[derive(Default)]
struct SharedWakerState {
    count: u64,
    tasks: Vec<(Arc<WakeQueue>, u64)>,
}

impl SharedWaker {
    /// Registers task `id`, which the next wake-up reports through `event_fd`.
    pub fn add(&self, event_fd: &EventFd, id: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.tasks.iter().any(|(queue, task)| *task == id && Arc::ptr_eq(queue, &event_fd.0)) {
            state.tasks.push((event_fd.0.clone(), id));
        }
    }

    /// Returns the number of wake-ups so far, for [`wait`](Self::wait).
    pub fn count(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).count
    }

    /// Waits until the number of wake-ups exceeds `count`, or until `timeout` has elapsed.
    pub fn wait(&self, count: u64, timeout: Duration) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.woken.wait_timeout_while(state, timeout, |state| state.count == count));
    }
}

impl Wake for SharedWaker {
    fn wake(self: Arc<Self>) {
        let tasks = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.count += 1;
            std::mem::take(&mut state.tasks)
        };
        self.woken.notify_all();
        tasks.iter().for_each(|(queue, id)| queue.wake_task(*id));
    }
}

#[pymethods]
impl EventFd {
    #[new]
    fn new() -> PyResult<Self> {
        // SAFETY: the call takes only numbers.
        let event = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(store_io(
                std::io::Error::last_os_error().to_string(),
                "close files that are not needed",
            ));
        }
        // SAFETY: this is a new descriptor that nothing else owns.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        Ok(Self(Arc::new(WakeQueue { event, ready: Mutex::default() })))
    }

    /// Returns the file descriptor of the eventfd, which is readable while tasks must be polled.
    fn fileno(&self) -> i32 {
        self.0.event.as_raw_fd()
    }

    /// Returns the numbers of the tasks to poll, and clears them.
    fn take(&self) -> Vec<u64> {
        let mut count = 0_u64;
        // A read of an empty counter fails, which is harmless.
        // SAFETY: the descriptor is open, and the pointer is to eight bytes.
        let _ = unsafe { libc::read(self.0.event.as_raw_fd(), (&raw mut count).cast(), 8) };
        std::mem::take(&mut self.0.ready.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Polls a ticket once. Returns `None` if the batch is acknowledged, and otherwise registers task `id`.
pub fn poll(ticket: &Ticket, event_fd: &EventFd, id: u64, ack: Ack) -> Result<Option<Waiting>> {
    let mut future = ticket.acknowledged(ack);
    let waker = Waker::from(Arc::new(TaskWaker { queue: event_fd.0.clone(), id }));
    match Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
        Poll::Ready(acknowledged) => acknowledged.map(|()| None),
        Poll::Pending => Ok(Some(Waiting { _future: Mutex::new(future) })),
    }
}
