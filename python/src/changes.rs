//! `ChangeStream`: the changes of each batch, reported within this process once the batch is applied.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use remanent::follow::{AppliedBatch, AppliedChange, AppliedPage, ChangeEvent, ChangeStream};

use crate::arguments;
use crate::errors::CHANGE_STREAM;
use crate::gate::{Gate, seconds};
use crate::shared_source::SharedSource;
use crate::values::REPORT;

/// A stream of the changes of each batch, reported once the batch is applied. Iterable, also asynchronously.
/// Yields `AppliedBatch` and `Lagged`. Created by `Store.changes`.
///
/// Batches never wait for the stream. A consumer that falls behind by about 65,000 changes receives a
/// `Lagged` in place of the batches that it missed. A restore, which replaces all pages, is also reported as
/// `Lagged`. The iteration ends when the store is closed.
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
    events: SharedSource<ChangeStream, ChangeEvent>,
}

impl PyChangeStream {
    pub fn begin(py: Python<'_>, gate: &Gate) -> PyResult<Self> {
        let stream = gate.call(py, remanent::Store::changes)?;
        let begin = stream.begin_lsn().0;
        let events = SharedSource::new(
            stream,
            gate.path.clone(),
            "another thread is waiting for this stream",
            CHANGE_STREAM,
        );
        Ok(Self { begin, events })
    }

    /// Returns the next event. An inner `Err(Closed)` means that the stream has ended.
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
    /// The Lsn of the batch after which the stream begins. All later batches are reported.
    #[getter]
    fn begin_lsn(&self) -> u64 {
        self.begin
    }

    /// Returns the next event, or None if no event arrives within `timeout` seconds. A timeout of 0 checks
    /// once, and None waits indefinitely.
    ///
    /// :raises ClosedError: the store is closed, and all events have been returned.
    /// :raises PoisonedError: an earlier failure stopped the store.
    /// :raises InUseError: another thread is waiting for the stream.
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

    /// Reads the next event and keeps it for `_take`, so that no event is lost if a task is canceled. Returns
    /// whether there is an event, or None if the stream has ended.
    fn _fetch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::seconds)] timeout: f64,
    ) -> PyResult<Option<bool>> {
        Ok(self.events.fetch(py, seconds(Some(timeout))?, ChangeStream::next_timeout)?.ok())
    }

    /// Returns the event that `_fetch` read, or None if another caller has already taken the event.
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
        slf.py().import("remanent._store.aio")?.call_method1("next_event", (slf,))
    }

    /// Closes the stream. Batches no longer spend any work on it.
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
        // The stream may hold the last reference to state of the applier, whose destructor may wait.
        self.events.end();
    }
}

/// The changes of one batch. Yielded by `ChangeStream`.
#[pyclass(frozen, name = "AppliedBatch", module = "remanent")]
pub struct PyAppliedBatch(Arc<AppliedBatch>);

#[pymethods]
impl PyAppliedBatch {
    /// The Lsn of the batch.
    #[getter]
    fn lsn(&self) -> u64 {
        self.0.lsn.0
    }

    /// The changed pages, ordered by id.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let page = |index| PyAppliedPage { batch: self.0.clone(), index };
        REPORT.freeze_list(py, (0..self.0.pages.len()).map(page))
    }

    /// Whether the batch changed the root.
    #[getter]
    fn root_changed(&self) -> bool {
        self.0.root_changed
    }

    fn __repr__(&self) -> String {
        format!("AppliedBatch(lsn={}, pages={})", self.0.lsn, self.0.pages.len())
    }
}

/// The changes that one batch made to one page.
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
    /// The id of the page.
    #[getter(page)]
    fn id(&self) -> u64 {
        self.page().page.0
    }

    /// The page's epoch after the batch, or its last epoch if the batch deleted the page.
    #[getter]
    fn epoch(&self) -> u64 {
        self.page().epoch.0
    }

    /// Whether the batch created the page. If True, all bytes are new, and `ranges` is empty.
    #[getter]
    fn created(&self) -> bool {
        self.page().changes.contains(&AppliedChange::Created)
    }

    /// Whether the batch deleted the page.
    #[getter]
    fn deleted(&self) -> bool {
        self.page().changes.contains(&AppliedChange::Deleted)
    }

    /// The page's new length in bytes, or None if the batch did not change the length.
    #[getter]
    fn length(&self) -> Option<u64> {
        self.find(|change| match change {
            AppliedChange::Resized { len } => Some(*len),
            _ => None,
        })
    }

    /// The place to which the batch moved the page, or None if the page did not move.
    #[getter]
    fn place(&self) -> Option<String> {
        self.find(|change| match change {
            AppliedChange::Moved { place } => Some(place.to_string()),
            _ => None,
        })
    }

    /// The ranges of bytes that the batch wrote, as (start, end) pairs in ascending order. Ranges neither
    /// overlap nor touch. Single elements are reported as the one range that contains them.
    #[getter]
    fn ranges<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ranges = self.find(|change| match change {
            AppliedChange::Written { ranges } => Some(ranges),
            _ => None,
        });
        let ranges = ranges.into_iter().flatten().map(|range| (range.start, range.end));
        REPORT.freeze_list(py, ranges.collect::<Vec<_>>())
    }

    /// Whether the batch set or removed entries of the page's metadata.
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

/// A gap in a change stream. The batches from `lsn` up to the next reported one are not reported, so read the
/// pages again. A gap occurs if the consumer falls behind, if there is no memory for events, or if a restore
/// replaces all pages.
#[pyclass(frozen, get_all, eq, module = "remanent")]
#[derive(PartialEq)]
pub struct Lagged {
    /// The Lsn of the first batch that is not reported.
    pub lsn: u64,
}

#[pymethods]
impl Lagged {
    fn __repr__(&self) -> String {
        format!("Lagged(lsn={})", self.lsn)
    }
}
