//! Moves of pages to a place before they are used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::prelude::*;
use pyo3::types::PyIterator;
use remanent::tiers::{Prefetch, ReadAhead};
use remanent::{PageId, Place, Store};
use self_cell::self_cell;

use crate::arguments;
use crate::errors::{OrRaise, STORE, in_use};
use crate::gate::{Gate, Handle, check_process, detached, seconds, wait};
use crate::page_name::{found, iterable, page_names};

/// A move of pages to a place in the background. Deleting this object does not stop the move. Created by
/// `Store.prefetch`.
///
/// >>> with remanent.Store(directory, device="host") as store:
/// ...     store.put("k", b"far", place="disk")
/// ...     coming = store.prefetch(["k"], "host")
/// ...     coming.wait(), coming.done(), store.info("k").place
/// 1
/// (True, True, 'host')
#[pyclass(frozen, name = "Prefetch", module = "remanent")]
pub struct PyPrefetch {
    path: String,
    prefetch: Prefetch,
}

impl PyPrefetch {
    pub fn begin(py: Python<'_>, gate: &Arc<Gate>, pages: &Bound<'_, PyAny>, place: Place) -> PyResult<Self> {
        let names = page_names(pages)?;
        let prefetch = gate.call(py, |store| store.prefetch(&found(store, &names)?, place))?;
        Ok(Self { path: gate.path.clone(), prefetch })
    }
}

#[pymethods]
impl PyPrefetch {
    /// Waits until all pages have arrived or the move has stopped. Returns False if this takes more than
    /// `timeout` seconds.
    ///
    /// Pages that are deleted in the meantime are skipped. If the move failed, the first call raises its
    /// error.
    ///
    /// :raises Error: the move failed, for example with `OverBudgetError`, `LeasedError` or `DamagedError`.
    #[pyo3(signature = (timeout=None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        wait(py, timeout, Some(&self.path), |slice| self.prefetch.wait_timeout(slice))
    }

    /// Returns whether all pages have arrived or the move has stopped.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.prefetch.is_done()).or_raise(py, Some(&self.path))
    }

    /// Cancels the moves of pages that have not started, and waits for those in flight. Pages that have
    /// arrived stay at their new place.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.prefetch.cancel()).or_raise(py, Some(&self.path))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        // A forked child inherits no moves.
        let state = if py.detach(|| self.prefetch.is_done()).unwrap_or(true) { "done" } else { "in flight" };
        format!("Prefetch({:?}, {state})", self.path)
    }
}

self_cell! {
    struct ReadAheadCell {
        owner: Arc<Store>,
        #[covariant]
        dependent: ReadAhead,
    }
}

/// A reader and the handle that keeps its store open. The reader is dropped first.
struct HeldReadAhead {
    cell: ReadAheadCell,
    _handle: Handle,
}

/// An iterator over steps that use different pages, such as the layers of a model. Yields the ids of each
/// step's pages once these pages have arrived. Pages of later steps are moved in the meantime. The number of
/// prefetched steps depends on the duration of a move and of a step. Created by `Store.read_ahead`.
///
/// >>> with remanent.Store(directory, device="host") as store:
/// ...     layers = [store.put(f"layer {n}", bytes([n]) * 100, place="disk") for n in range(8)]
/// ...     with store.read_ahead(([layer] for layer in layers), "host") as steps:
/// ...         sum(store[page][0] for pages in steps for page in pages)
/// ...     store.info("layer 7").place
/// 28
/// 'host'
#[pyclass(frozen, name = "ReadAhead", module = "remanent")]
pub struct PyReadAhead {
    opener: u32,
    path: String,
    gate: Arc<Gate>,
    steps: Py<PyIterator>,
    ahead: Mutex<Option<HeldReadAhead>>,
}

impl PyReadAhead {
    pub fn begin(py: Python<'_>, gate: &Arc<Gate>, steps: &Bound<'_, PyAny>, place: Place) -> PyResult<Self> {
        let steps = iterable(steps, "steps must be an iterable of iterables of pages")?.unbind();
        let held = py.detach(|| {
            let (handle, store) = gate.hold()?;
            let cell = ReadAheadCell::try_new(store, |store| store.read_ahead(place))?;
            Ok(HeldReadAhead { cell, _handle: handle })
        });
        let held = held.or_raise_of(py, Some(&gate.path), STORE)?;
        let (opener, path) = (std::process::id(), gate.path.clone());
        Ok(Self { opener, path, gate: gate.clone(), steps, ahead: Mutex::new(Some(held)) })
    }

    /// Returns the reader, or an error if another thread is using it.
    fn ahead(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Option<HeldReadAhead>>> {
        check_process(self.opener).or_raise(py, Some(&self.path))?;
        match self.ahead.try_lock() {
            Ok(ahead) => Ok(ahead),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(in_use("another thread is waiting for a step")),
        }
    }

    /// Returns the pages of the next step of the caller's iterable, or `None` after the last step.
    fn given(&self, py: Python<'_>) -> PyResult<Option<Vec<PageId>>> {
        let Some(pages) = self.steps.bind(py).clone().next() else { return Ok(None) };
        let names = page_names(&pages?)?;
        self.gate.call(py, |store| found(store, &names)).map(Some)
    }
}

#[pymethods]
impl PyReadAhead {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Vec<u64>>> {
        let mut held = self.ahead(py)?;
        let Some(HeldReadAhead { cell, .. }) = &mut *held else { return Ok(None) };
        while cell.borrow_dependent().wants_more() {
            let Some(pages) = self.given(py)? else { break };
            let pushed = py.detach(|| cell.with_dependent_mut(|_, ahead| ahead.push(&pages)));
            pushed.or_raise(py, Some(&self.path))?;
        }
        let step = py.detach(|| cell.with_dependent_mut(|_, ahead| ahead.next_step()));
        let step = step.or_raise(py, Some(&self.path))?;
        if step.is_none() {
            detached(held.take());
        }
        Ok(step.map(|pages| pages.into_iter().map(|page| page.0).collect()))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let is_closed = self.ahead(py).is_ok_and(|ahead| ahead.is_none());
        format!("ReadAhead({:?}{})", self.path, if is_closed { ", closed" } else { "" })
    }

    /// Ends the iteration, as its last step does. Moves in flight continue, and the store can be closed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let held = self.ahead(py)?.take();
        detached(held);
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<Bound<'_, PyAny>>,
        error: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (kind, error, traceback);
        self.close(py)
    }
}

impl Drop for PyReadAhead {
    fn drop(&mut self) {
        detached(self.ahead.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}
