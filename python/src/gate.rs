//! The entry from Python into an open store: no call enters a closed store, none touches it in a forked
//! child, and none blocks the interpreter.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use remanent::{Ack, Error, Result, Store};

use crate::errors::{OrRaise, STORE, invalid, own};

/// How long a wait lasts before it checks for Ctrl-C.
const SLICE: Duration = Duration::from_millis(50);

/// The stores of this process, to be closed before interpreter shutdown.
static OPEN: Mutex<Vec<Weak<Gate>>> = Mutex::new(Vec::new());

/// An open store, with the calls that are inside it and the handles that depend on it.
pub struct Gate {
    /// The id of the process that opened the store.
    opener: u32,
    /// The store's directory, as given by the caller.
    pub path: String,
    /// What commits wait for by default.
    pub ack: Ack,
    state: Mutex<GateState>,
    /// Notified when no call is inside the store, or it is closed.
    quiet: Condvar,
}

struct GateState {
    store: Option<Arc<Store>>,
    /// A thread is closing the store: it has been taken from `store` and is not closed yet.
    is_closing: bool,
    calls: usize,
    handles: usize,
}

/// A call that is inside the store and keeps it open.
pub struct Call<'g> {
    gate: &'g Gate,
    store: ManuallyDrop<Arc<Store>>,
}

/// A lease or view, which prevents its store from being closed.
pub struct Handle {
    gate: Arc<Gate>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in one call does not corrupt the counts: each update is a single step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Rejects a handle that a forked child inherited, before any lock is touched: the thread that holds the lock
/// may not exist in the child.
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
        // In a forked child, a thread that does not exist may hold the list forever. A store that is not
        // listed is left to the interpreter.
        if let Ok(mut open) = OPEN.try_lock() {
            open.retain(|gate| gate.strong_count() > 0);
            open.push(Arc::downgrade(&gate));
        }
        gate
    }

    /// Enters the store for one call.
    ///
    /// # Errors
    /// `Forked`, `Closed`.
    pub fn enter(&self) -> Result<Call<'_>> {
        check_process(self.opener)?;
        let mut state = lock(&self.state);
        let store = state.store.clone().ok_or(Error::Closed)?;
        state.calls += 1;
        Ok(Call { gate: self, store: ManuallyDrop::new(store) })
    }

    /// Enters the store for the lifetime of a lease or view.
    ///
    /// # Errors
    /// `Forked`, `Closed`.
    pub fn hold(self: &Arc<Self>) -> Result<(Handle, Arc<Store>)> {
        check_process(self.opener)?;
        let mut state = lock(&self.state);
        let store = state.store.clone().ok_or(Error::Closed)?;
        state.handles += 1;
        Ok((Handle { gate: self.clone() }, store))
    }

    /// Runs a call without the interpreter's lock.
    pub fn call<T: Send>(&self, py: Python<'_>, run: impl FnOnce(&Store) -> Result<T> + Send) -> PyResult<T> {
        py.detach(|| self.enter().and_then(|call| run(&call))).or_raise_of(py, Some(&self.path), STORE)
    }

    /// Runs a call that does not wait: releasing the interpreter's lock would cost more than the call.
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

    /// Closes the store once no call is inside it. When this returns, the store is closed, by this or another
    /// thread.
    ///
    /// # Errors
    /// `InUseError` while leases or views depend on the store; errors of closing it.
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
                let message = format!("{count} leases or views still use the store in {}", self.path);
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

/// Drops a value whose destructor waits for a disk or device, without the interpreter's lock.
pub fn detached<T: Send>(value: T) {
    let mut value = Some(value);
    // Without an interpreter there is no lock to release.
    Python::try_attach(|py| py.detach(|| drop(value.take())));
    drop(value);
}

/// Closes all open stores, before interpreter shutdown but not in a forked child.
pub fn close_all(py: Python<'_>) {
    let gates: Vec<Arc<Gate>> = {
        let own = std::process::id();
        // This is a child's first use of the list: a thread of the parent may have held it at the fork.
        let Ok(open) = OPEN.try_lock() else { return };
        open.iter().filter_map(Weak::upgrade).filter(|gate| gate.opener == own).collect()
    };
    for gate in gates {
        // A store that is in use is left as after a crash: nothing acknowledged is lost.
        let _ = gate.close(py);
    }
}

/// Returns whether this is the main thread of the process, which receives the interpreter's signals.
fn is_main_thread() -> bool {
    // SAFETY: the call has no arguments and cannot fail.
    let thread = unsafe { libc::gettid() };
    u32::try_from(thread) == Ok(std::process::id())
}

/// Waits in slices and checks for Ctrl-C between them. `wait` waits up to the given time and returns whether
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

/// Converts seconds given by Python.
pub fn seconds(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds
        .map(|seconds| {
            if seconds.is_nan() {
                Err(invalid("a time is a number of seconds, not nan", "give a number of seconds, or None"))
            } else {
                Ok(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
            }
        })
        .transpose()
}
