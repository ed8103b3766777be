//! Engine futures for an event loop. A store thread that wakes a task never takes the interpreter's lock: it
//! records the task's number and writes to an eventfd, which the loop watches like any other file descriptor.

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

/// An eventfd that wakes an event loop, with the numbers of the tasks to poll again.
#[pyclass(frozen, module = "remanent._native")]
pub struct Bell(Arc<Rope>);

struct Rope {
    event: OwnedFd,
    ready: Mutex<Vec<u64>>,
}

/// A waiting task; dropping it ends the wait.
#[pyclass(frozen, module = "remanent._native")]
pub struct Waiting {
    _future: Mutex<Acknowledged>,
}

struct Pull {
    rope: Arc<Rope>,
    id: u64,
}

impl Rope {
    /// Marks a task as ready to be polled.
    fn pull(&self, id: u64) {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        let one = 1_u64;
        // If the counter is full, the write fails, but the descriptor is already readable.
        // SAFETY: the descriptor is open as long as `self`, and the pointer is to eight bytes.
        let _ = unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

impl Wake for Pull {
    fn wake(self: Arc<Self>) {
        self.rope.pull(self.id);
    }
}

/// The waker of a future on which several tasks of any event loop and several threads wait: the engine keeps
/// only one waker per future.
#[derive(Default)]
pub struct Bells {
    state: Mutex<BellsState>,
    rung: Condvar,
}

#[derive(Default)]
struct BellsState {
    count: u64,
    tasks: Vec<(Arc<Rope>, u64)>,
}

impl Bells {
    /// Adds a task to be woken once.
    pub fn add(&self, bell: &Bell, id: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.tasks.iter().any(|(rope, task)| *task == id && Arc::ptr_eq(rope, &bell.0)) {
            state.tasks.push((bell.0.clone(), id));
        }
    }

    /// Returns the number of wake-ups so far; see [`wait`](Self::wait).
    pub fn count(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).count
    }

    /// Waits up to `timeout` for a wake-up after the first `count` ones.
    pub fn wait(&self, count: u64, timeout: Duration) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.rung.wait_timeout_while(state, timeout, |state| state.count == count));
    }
}

impl Wake for Bells {
    fn wake(self: Arc<Self>) {
        let tasks = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.count += 1;
            std::mem::take(&mut state.tasks)
        };
        self.rung.notify_all();
        tasks.iter().for_each(|(rope, id)| rope.pull(*id));
    }
}

#[pymethods]
impl Bell {
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
        Ok(Self(Arc::new(Rope { event, ready: Mutex::default() })))
    }

    /// Returns the file descriptor that becomes readable.
    fn fileno(&self) -> i32 {
        self.0.event.as_raw_fd()
    }

    /// Returns and clears the numbers of the tasks to poll.
    fn take(&self) -> Vec<u64> {
        let mut count = 0_u64;
        // A read of an empty counter fails, which is harmless.
        // SAFETY: the descriptor is open, and the pointer is to eight bytes.
        let _ = unsafe { libc::read(self.0.event.as_raw_fd(), (&raw mut count).cast(), 8) };
        std::mem::take(&mut self.0.ready.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Polls once; `None` means that the batch is acknowledged.
pub fn poll(ticket: &Ticket, bell: &Bell, id: u64, ack: Ack) -> Result<Option<Waiting>> {
    let mut future = ticket.acknowledged(ack);
    let waker = Waker::from(Arc::new(Pull { rope: bell.0.clone(), id }));
    match Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
        Poll::Ready(acknowledged) => acknowledged.map(|()| None),
        Poll::Pending => Ok(Some(Waiting { _future: Mutex::new(future) })),
    }
}
