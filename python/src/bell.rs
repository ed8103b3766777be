//! Futures of the engine for an event loop. A thread of the store that wakes a task never takes the
//! interpreter's lock: it notes the task's number and writes to an eventfd, which the loop watches like any
//! other.

use std::future::Future;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use remanent::{Ack, Acknowledged, Result, Ticket};

/// What wakes an event loop, and the numbers of the tasks that are to be looked at.
#[pyclass(frozen, module = "remanent._native")]
pub struct Bell(Arc<Rope>);

struct Rope {
    event: OwnedFd,
    ready: Mutex<Vec<u64>>,
}

/// A task that waits; dropped, it waits no more.
#[pyclass(frozen, module = "remanent._native")]
pub struct Waiting {
    _future: Mutex<Acknowledged>,
}

struct Pull {
    rope: Arc<Rope>,
    id: u64,
}

impl Wake for Pull {
    fn wake(self: Arc<Self>) {
        self.rope.ready.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
        let one = 1_u64;
        // A full counter has rung already.
        // SAFETY: the descriptor is open as long as the rope, and eight bytes are there.
        let _ = unsafe { libc::write(self.rope.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

#[pymethods]
impl Bell {
    #[new]
    fn new() -> PyResult<Self> {
        // SAFETY: the call takes numbers only.
        let event = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(PyOSError::new_err(std::io::Error::last_os_error().to_string()));
        }
        // SAFETY: a new descriptor, which nothing else has.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        Ok(Self(Arc::new(Rope { event, ready: Mutex::default() })))
    }

    /// The descriptor that becomes readable.
    fn fileno(&self) -> i32 {
        self.0.event.as_raw_fd()
    }

    /// The numbers of the tasks that are to be looked at.
    fn take(&self) -> Vec<u64> {
        let mut count = 0_u64;
        // SAFETY: the descriptor is open, and eight bytes are there. An empty one says so, which is fine.
        let _ = unsafe { libc::read(self.0.event.as_raw_fd(), (&raw mut count).cast(), 8) };
        std::mem::take(&mut self.0.ready.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Looks once; `None` says that the batch is acknowledged.
pub fn poll(ticket: &Ticket, bell: &Bell, id: u64, ack: Ack) -> Result<Option<Waiting>> {
    let mut future = ticket.acknowledged(ack);
    let waker = Waker::from(Arc::new(Pull { rope: bell.0.clone(), id }));
    match Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
        Poll::Ready(acknowledged) => acknowledged.map(|()| None),
        Poll::Pending => Ok(Some(Waiting { _future: Mutex::new(future) })),
    }
}
