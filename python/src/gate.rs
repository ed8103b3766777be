//! Access from Python to an open store. A call returns an error if the store is closed, or if a forked child
//! inherited the store. No call blocks the interpreter while it waits.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use remanent::{Ack, Error, Result, Store};

use crate::errors::{OrRaise, STORE, invalid, own};

/// The longest wait between two checks for Ctrl-C.
const SLICE: Duration = Duration::from_millis(50);

/// The stores of this process, to be closed before interpreter shutdown.
static OPEN: Mutex<Vec<Weak<Gate>>> = Mutex::new(Vec::new());

/// An open store, with the number of calls inside it and of handles that keep it open.
pub struct Gate {
    opener: u32,
    /// The store's directory, as passed by the caller.
    pub path: String,
    /// The acknowledgement that commits wait for by default.
    pub ack: Ack,
    state: Mutex<GateState>,
    /// Notified when the last call has left the store, and when the store is closed.
    quiet: Condvar,
}

struct GateState {
    store: Option<Arc<Store>>,
    /// Whether a thread has taken the store to close it, and has not finished yet.
    is_closing: bool,
    calls: usize,
    handles: usize,
}

/// A call inside the store, which keeps the store open.
pub struct Call<'g> {
    gate: &'g Gate,
    store: ManuallyDrop<Arc<Store>>,
}

/// The part of a lease, pin or view that keeps its store open.
pub struct Handle {
    gate: Arc<Gate>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic does not corrupt the counts, because each update is a single step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns `Error::Forked` for a handle that a forked child inherited. Called before any lock is taken,
/// because the holder of a lock may not exist in the child.
pub fn check_process(opener: u32) -> Result<()> {
    if std::process::id() == opener { Ok(()) } else { Err(Error::Forked { opener }) }
}

impl Gate {
    pub fn new(store: Store, path: &Path, ack: Ack) -> Arc<Self> {
        let state = GateState { store: Some(Arc::new(store)), is_closing: false, calls: 0, handles: 0 };
        let gate = Arc::new(Self {
            opener: std::process::id(),
            path: path.display().to_string(),
            ack,
            state: Mutex::new(state),
            quiet: Condvar::new(),
        });
        // In a forked child, the lock may belong to a thread that does not exist there and never releases it.
        // A store that is not listed is not closed at interpreter exit.
        if let Ok(mut open) = OPEN.try_lock() {
            open.retain(|gate| gate.strong_count() > 0);
            open.push(Arc::downgrade(&gate));
        }
        gate
    }

    /// Enters the store for one call, which keeps the store open.
    ///
    /// # Errors
    /// `Forked` in a forked child, and `Closed` if the store is closed.
    pub fn enter(&self) -> Result<Call<'_>> {
        check_process(self.opener)?;
        let mut state = lock(&self.state);
        let store = state.store.clone().ok_or(Error::Closed)?;
        state.calls += 1;
        Ok(Call { gate: self, store: ManuallyDrop::new(store) })
    }

    /// Enters the store for the lifetime of a lease, pin or view.
    ///
    /// # Errors
    /// `Forked` in a forked child, and `Closed` if the store is closed.
    pub fn hold(self: &Arc<Self>) -> Result<(Handle, Arc<Store>)> {
        check_process(self.opener)?;
        let mut state = lock(&self.state);
        let store = state.store.clone().ok_or(Error::Closed)?;
        state.handles += 1;
        Ok((Handle { gate: self.clone() }, store))
    }

    /// Runs a call without the interpreter lock.
    pub fn call<T: Send>(&self, py: Python<'_>, run: impl FnOnce(&Store) -> Result<T> + Send) -> PyResult<T> {
        py.detach(|| self.enter().and_then(|call| run(&call))).or_raise_of(py, Some(&self.path), STORE)
    }

    /// Runs a call that does not wait. The interpreter lock stays held, because releasing it would cost more
    /// than the call.
    pub fn inspect<T>(&self, py: Python<'_>, run: impl FnOnce(&Store) -> Result<T>) -> PyResult<T> {
        self.enter().and_then(|call| run(&call)).or_raise_of(py, Some(&self.path), STORE)
    }

    fn wait_while<'s>(
        &'s self,
        state: MutexGuard<'s, GateState>,
        mut is_so: impl FnMut(&GateState) -> bool,
    ) -> MutexGuard<'s, GateState> {
        self.quiet.wait_while(state, |state| is_so(state)).unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_closed(&self) -> bool {
        check_process(self.opener).is_ok() && lock(&self.state).store.is_none()
    }

    /// Closes the store once no call is inside it. When this returns, this or another thread has closed the
    /// store.
    ///
    /// # Errors
    /// `InUseError` while leases, pins or views depend on the store, and errors of closing it.
    pub fn close(&self, py: Python<'_>) -> PyResult<()> {
        let closed = py.detach(|| {
            check_process(self.opener)?;
            let mut state = lock(&self.state);
            if state.store.is_some() && state.handles > 0 {
                return Ok(Some(state.handles));
            }
            let Some(store) = state.store.take() else {
                drop(self.wait_while(state, |state| state.is_closing));
                return Ok(None);
            };
            state.is_closing = true;
            drop(self.wait_while(state, |state| state.calls > 0));
            let closed = Arc::into_inner(store).map_or(Ok(()), Store::close);
            lock(&self.state).is_closing = false;
            self.quiet.notify_all();
            closed.map(|()| None)
        });
        match closed.or_raise(py, Some(&self.path))? {
            None => Ok(()),
            Some(count) => {
                let message = format!("{count} leases, pins or views still use the store in {}", self.path);
                Err(own(
                    py,
                    "InUseError",
                    &message,
                    "end or close them, then close the store",
                    Some(&self.path),
                ))
            }
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let store = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).store.take();
        detached(store);
    }
}

impl std::ops::Deref for Call<'_> {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.store
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        // SAFETY: dropped here and nowhere else, before the count that a closing thread waits for.
        unsafe { ManuallyDrop::drop(&mut self.store) };
        let mut state = lock(&self.gate.state);
        state.calls -= 1;
        if state.calls == 0 {
            self.gate.quiet.notify_all();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if check_process(self.gate.opener).is_ok() {
            lock(&self.gate.state).handles -= 1;
        }
    }
}

/// Drops a value without the interpreter lock, because its destructor may wait for a disk or device.
pub fn detached<T: Send>(value: T) {
    let mut value = Some(value);
    // Without an interpreter there is no lock to release.
    Python::try_attach(|py| py.detach(|| drop(value.take())));
    drop(value);
}

/// Closes all stores of this process that are still open. Called before interpreter shutdown, and ignores
/// stores that a forked child inherited.
pub fn close_all(py: Python<'_>) {
    let gates: Vec<Arc<Gate>> = {
        let own = std::process::id();
        // In a forked child, the lock of the list may belong to a thread of the parent, which never releases
        // it there.
        let Ok(open) = OPEN.try_lock() else { return };
        open.iter().filter_map(Weak::upgrade).filter(|gate| gate.opener == own).collect()
    };
    for gate in gates {
        // Closing fails if the store is in use. The store is then left as after a crash, which loses no
        // acknowledged batch.
        let _ = gate.close(py);
    }
}

/// Returns whether this is the main thread of the process, which receives the interpreter's signals.
fn is_main_thread() -> bool {
    // SAFETY: the call has no arguments and cannot fail.
    let thread = unsafe { libc::gettid() };
    u32::try_from(thread) == Ok(std::process::id())
}

/// Waits in slices and checks for Ctrl-C after each. `wait` waits up to the passed time and returns whether
/// the wait is over.
pub fn wait<F>(py: Python<'_>, timeout: Option<Duration>, path: Option<&str>, mut wait: F) -> PyResult<bool>
where
    F: FnMut(Duration) -> Result<bool> + Send,
{
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    // Other threads receive no signals, so they need no slices.
    let slice = if is_main_thread() { SLICE } else { Duration::from_secs(3600) };
    loop {
        let left = until.map_or(slice, |until| until.saturating_duration_since(Instant::now()).min(slice));
        if py.detach(|| wait(left)).or_raise(py, path)? {
            return Ok(true);
        }
        py.check_signals()?;
        if until.is_some_and(|until| Instant::now() >= until) {
            return Ok(false);
        }
    }
}

pub fn seconds(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds
        .map(|seconds| {
            if seconds.is_nan() {
                Err(invalid("a time in seconds must not be nan", "pass a number of seconds, or None"))
            } else {
                Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
            }
        })
        .transpose()
}
