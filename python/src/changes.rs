//! What batches change, told to this process as soon as they are applied.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use remanent::{AppliedBatch, AppliedChange, AppliedPage, ChangeEvent, ChangeStream};

use crate::arguments;
use crate::errors::CHANGE_STREAM;
use crate::gate::{Gate, seconds};
use crate::handover::Handover;
use crate::values::REPORT;

/// What each batch changes from now on, told once it is applied: an iterator of AppliedBatch and Lagged, also
/// an asynchronous one. Made by `Store.changes`.
///
/// Batches never wait for it. A caller that falls back by some 65,000 changes gets Lagged in place of the
/// batches that it missed; so it does for a restore, which replaces all pages. The iterator ends when the
/// store is closed.
///
/// >>> with remanent.Store(directory) as store:
/// ...     changes = store.changes()
/// ...     page = store.put("k", b"remanent")
/// ...     with store.batch() as batch:
/// ...         batch.write("k", 2, b"XYZ")
/// ...     created, written = changes.next(timeout=60), changes.next(timeout=60)
/// >>> created.pages[0].created, written.lsn, written.pages[0].ranges, written.pages[0].page == page
/// (True, 2, [(2, 5)], True)
#[pyclass(frozen, weakref, name = "ChangeStream", module = "remanent")]
pub struct PyChangeStream {
    begin: u64,
    events: Handover<ChangeStream, ChangeEvent>,
}

impl PyChangeStream {
    pub fn begin(py: Python<'_>, gate: &Gate) -> PyResult<Self> {
        let stream = gate.call(py, remanent::Store::changes)?;
        let begin = stream.begin_lsn().0;
        let events = Handover::new(
            stream,
            gate.path.clone(),
            "another thread is waiting for this stream",
            CHANGE_STREAM,
        );
        Ok(Self { begin, events })
    }

    /// The next event; `Err(Closed)` within says that none will come.
    fn next_event(
        &self,
        py: Python<'_>,
        timeout: Option<Duration>,
    ) -> PyResult<remanent::Result<Option<ChangeEvent>>> {
        self.events.next(py, timeout, ChangeStream::next_timeout, |_| ())
    }
}

fn event_to_py(py: Python<'_>, event: ChangeEvent) -> PyResult<Bound<'_, PyAny>> {
    Ok(match event {
        ChangeEvent::Applied(batch) => Bound::new(py, PyAppliedBatch(batch))?.into_any(),
        ChangeEvent::Lagged { from } => Bound::new(py, Lagged { lsn: from.0 })?.into_any(),
    })
}

#[pymethods]
impl PyChangeStream {
    /// The batch after which the stream begins: all later ones are told.
    #[getter]
    fn begin_lsn(&self) -> u64 {
        self.begin
    }

    /// The next event; None if none came within `timeout` seconds. 0 looks once, None waits for ever.
    ///
    /// :raises ClosedError: the store is closed, and all was told. PoisonedError: it failed. InUseError:
    ///     another thread waits for the stream.
    #[pyo3(signature = (timeout=None))]
    fn next<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let event = self.next_event(py, seconds(timeout)?)?;
        let event = event.map_err(|error| self.events.raised(py, &error))?;
        event.map(|event| event_to_py(py, event)).transpose()
    }

    /// Takes the next event and keeps it; says whether there is one, None that none will come. For a task
    /// that may be called off.
    fn _fetch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::seconds)] timeout: f64,
    ) -> PyResult<Option<bool>> {
        Ok(self.events.fetch(py, seconds(Some(timeout))?, ChangeStream::next_timeout)?.ok())
    }

    /// Takes the event that `_fetch` keeps, if no one else did.
    fn _take<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.events.check_process(py)?;
        self.events.take(|_| ()).map(|event| event_to_py(py, event)).transpose()
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.next_event(py, None)? {
            Ok(Some(event)) => event_to_py(py, event),
            Ok(None) | Err(_) => Err(PyStopIteration::new_err(())),
        }
    }

    fn __aiter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __anext__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("remanent._aio")?.call_method1("next_event", (slf,))
    }

    /// Ends the stream; batches cost nothing for it any more.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.events.close(py)
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

    fn __repr__(&self) -> String {
        format!("ChangeStream({:?}, begin_lsn={})", self.events.path(), self.begin)
    }
}

impl Drop for PyChangeStream {
    fn drop(&mut self) {
        // It may be the last that holds the applier's parts.
        self.events.end();
    }
}

/// What one batch changed.
#[pyclass(frozen, name = "AppliedBatch", module = "remanent")]
pub struct PyAppliedBatch(Arc<AppliedBatch>);

#[pymethods]
impl PyAppliedBatch {
    /// The batch that was applied.
    #[getter]
    fn lsn(&self) -> u64 {
        self.0.lsn.0
    }

    /// The pages that it changed, in the order of their ids.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let page = |index| PyAppliedPage { batch: self.0.clone(), index };
        REPORT.freeze_list(py, (0..self.0.pages.len()).map(page))
    }

    /// Whether it changed the root.
    #[getter]
    fn root_changed(&self) -> bool {
        self.0.root_changed
    }

    fn __repr__(&self) -> String {
        format!("AppliedBatch(lsn={}, pages={})", self.0.lsn, self.0.pages.len())
    }
}

/// What one batch changed of a page.
#[pyclass(frozen, name = "AppliedPage", module = "remanent")]
pub struct PyAppliedPage {
    batch: Arc<AppliedBatch>,
    index: usize,
}

impl PyAppliedPage {
    fn page(&self) -> &AppliedPage {
        &self.batch.pages[self.index]
    }

    fn find<'a, T>(&'a self, of: impl Fn(&'a AppliedChange) -> Option<T>) -> Option<T> {
        self.page().changes.iter().find_map(of)
    }
}

#[pymethods]
impl PyAppliedPage {
    /// The page's id.
    #[getter(page)]
    fn id(&self) -> u64 {
        self.page().page.0
    }

    /// Its version after the batch; the last one of a page that is deleted.
    #[getter]
    fn epoch(&self) -> u64 {
        self.page().epoch.0
    }

    /// Whether the page is new. All its bytes are, so `ranges` is empty.
    #[getter]
    fn created(&self) -> bool {
        self.page().changes.contains(&AppliedChange::Created)
    }

    /// Whether the page is gone.
    #[getter]
    fn deleted(&self) -> bool {
        self.page().changes.contains(&AppliedChange::Deleted)
    }

    /// Its length in bytes if the batch changed that, else None.
    #[getter]
    fn length(&self) -> Option<u64> {
        self.find(|change| match change {
            AppliedChange::Resized { len } => Some(*len),
            _ => None,
        })
    }

    /// The place that it went to if the batch moved it, else None.
    #[getter]
    fn place(&self) -> Option<String> {
        self.find(|change| match change {
            AppliedChange::Moved { place } => Some(place.to_string()),
            _ => None,
        })
    }

    /// The bytes that were written, as (start, end) in ascending order; they neither overlap nor touch. Of
    /// single elements the range is told in which they lie.
    #[getter]
    fn ranges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ranges = self.find(|change| match change {
            AppliedChange::Written { ranges } => Some(ranges),
            _ => None,
        });
        let ranges = ranges.into_iter().flatten().map(|range| (range.start, range.end));
        REPORT.freeze_list(py, ranges.collect::<Vec<_>>())
    }

    /// Whether entries of its metadata were set or removed.
    #[getter]
    fn metadata_changed(&self) -> bool {
        self.page().changes.contains(&AppliedChange::Metadata)
    }

    fn __repr__(&self) -> String {
        let of = |change: &AppliedChange| match change {
            AppliedChange::Created => "created",
            AppliedChange::Deleted => "deleted",
            AppliedChange::Resized { .. } => "resized",
            AppliedChange::Moved { .. } => "moved",
            AppliedChange::Written { .. } => "written",
            AppliedChange::Metadata => "metadata",
            _ => "changed",
        };
        let AppliedPage { page, epoch, changes, .. } = self.page();
        let words: Vec<&str> = changes.iter().map(of).collect();
        format!("AppliedPage(page={page}, epoch={epoch}, changes={})", words.join("+"))
    }
}

/// Batch `lsn`, and those up to the next one that is told, are not told: look at pages anew. The caller did
/// not keep up, there was no memory for it, or a restore replaced all pages.
#[pyclass(frozen, get_all, eq, module = "remanent")]
#[derive(PartialEq)]
pub struct Lagged {
    /// The first batch that is not told.
    pub lsn: u64,
}

#[pymethods]
impl Lagged {
    fn __repr__(&self) -> String {
        format!("Lagged(lsn={})", self.lsn)
    }
}
