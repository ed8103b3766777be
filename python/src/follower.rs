//! `Follower`, which reads each batch of a store once and in order, and `Replica`, a copy of the pages.

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyStopIteration;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use remanent::PageId;
use remanent::follow::{FollowFrom, FollowedBatch, Follower, FollowerPosition, Replica};

use crate::arguments;
use crate::array::{BufferParts, fill_buffer, release_buffer};
use crate::errors::{FOLLOWER, OrRaise, invalid};
use crate::gate::seconds;
use crate::operations::{BytesForm, operation_to_py, plain_indices};
use crate::page_info::Info;
use crate::reader::Reader;
use crate::shared_source::SharedSource;
use crate::source::{Source, locked};
use crate::values::REPORT;

/// Reads the batches of a store in order, each once, while another process may be writing. An endless
/// iterator and asynchronous iterator. Takes no locks and writes nothing.
///
/// :param start: "beginning", "snapshot" (after the newest snapshot), or the `position` of a batch or another
///     follower.
/// :raises NoStoreError: the directory contains no store.
/// :raises OvertakenError: log segments were recycled before their batches were read.
/// :raises DivergedError: a crash removed the batch at the position.
/// :raises DamagedError: bytes on disk differ from the bytes that were written.
///
/// >>> store = remanent.Store(directory)
/// >>> store["k"] = b"v"
/// >>> follower = remanent.Follower(directory)
/// >>> batch = follower.next(timeout=10)
/// >>> batch.lsn, [operation["kind"] for operation in batch.operations]
/// (1, ['create', 'write'])
/// >>> later = remanent.Follower(directory, follower.position)
/// >>> later.next(0) is None
/// True
/// >>> store.close()
#[pyclass(frozen, weakref, name = "Follower", module = "remanent")]
pub struct PyFollower {
    /// The position of the newest batch that was returned. Has a lock of its own, so that the position can be
    /// read while another thread reads batches.
    position: Mutex<FollowerPosition>,
    batches: SharedSource<Follower, FollowedBatch>,
}

impl PyFollower {
    fn note(&self, batch: &FollowedBatch) {
        *self.position.lock().unwrap_or_else(PoisonError::into_inner) = batch.position();
    }

    fn converted(&self, batch: FollowedBatch) -> PyFollowedBatch {
        let payload_len = batch.payload().len() as i64;
        PyFollowedBatch { path: self.batches.path().to_owned(), batch, payload_len }
    }

    fn next_batch(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<Option<PyFollowedBatch>> {
        let next = self.batches.next(py, timeout, Follower::next, |batch| self.note(batch))?;
        let batch = next.map_err(|error| self.batches.raised(py, &error))?;
        Ok(batch.map(|batch| self.converted(batch)))
    }
}

#[pymethods]
impl PyFollower {
    #[new]
    #[pyo3(signature = (path, start="beginning"))]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::path)] path: PathBuf,
        #[pyo3(from_py_with = arguments::follow_start)] start: &str,
    ) -> PyResult<Self> {
        let from = match start {
            "beginning" => FollowFrom::Beginning,
            "snapshot" => FollowFrom::Snapshot,
            text => FollowFrom::Position(text.parse().map_err(
                |error: remanent::follow::ParsePositionError| {
                    invalid(
                        format!("start must be \"beginning\", \"snapshot\" or a position: {error}"),
                        "pass \"beginning\", \"snapshot\", or the position of a follower or batch",
                    )
                },
            )?),
        };
        let shown = path.display().to_string();
        crate::log::update_level(py)?;
        let follower = py.detach(|| Follower::open(&path, from)).or_raise(py, Some(&shown))?;
        let position = Mutex::new(follower.position());
        let batches =
            SharedSource::new(follower, shown, "another thread is reading from this follower", FOLLOWER);
        Ok(Self { position, batches })
    }

    /// The position after the newest batch that was returned, as text. Pass it to another `Follower` to
    /// continue from there.
    #[getter]
    fn position(&self, py: Python<'_>) -> PyResult<String> {
        self.batches.check_process(py)?;
        Ok(self.position.lock().unwrap_or_else(PoisonError::into_inner).to_string())
    }

    /// Returns the next batch, or None if no batch arrives within `timeout` seconds. A timeout of 0 checks
    /// once, and None waits indefinitely.
    #[pyo3(signature = (timeout=None))]
    fn next(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::timeout)] timeout: Option<f64>,
    ) -> PyResult<Option<PyFollowedBatch>> {
        self.next_batch(py, seconds(timeout)?)
    }

    /// Reads the next batch and keeps it for `_take`, so that no batch is lost if a task is canceled. Returns
    /// whether there is a batch.
    fn _fetch(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::seconds)] timeout: f64,
    ) -> PyResult<bool> {
        let fetched = self.batches.fetch(py, seconds(Some(timeout))?, Follower::next)?;
        fetched.map_err(|error| self.batches.raised(py, &error))
    }

    /// Returns the batch that `_fetch` read, or None if another caller has already taken the batch.
    fn _take(&self, py: Python<'_>) -> PyResult<Option<PyFollowedBatch>> {
        self.batches.check_process(py)?;
        Ok(self.batches.take(|batch| self.note(batch)).map(|batch| self.converted(batch)))
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<PyFollowedBatch> {
        self.next_batch(py, None)?.ok_or_else(|| PyStopIteration::new_err(()))
    }

    fn __aiter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __anext__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("remanent._store.aio")?.call_method1("next_batch", (slf,))
    }

    fn __repr__(&self) -> String {
        let position = self.position.lock().unwrap_or_else(PoisonError::into_inner).to_string();
        let state = if self.batches.is_closed() { ", closed" } else { "" };
        format!("Follower({:?}, position={position:?}{state})", self.batches.path())
    }

    /// Closes the follower. Later calls raise `ClosedError`.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.batches.close(py)
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

/// A batch as it was committed. Every byte is verified. Returned by `Follower.next`.
#[pyclass(frozen, name = "FollowedBatch", module = "remanent")]
pub struct PyFollowedBatch {
    path: String,
    batch: FollowedBatch,
    /// The length of the payload in bytes, in the type that the buffer protocol needs.
    payload_len: i64,
}

#[pymethods]
impl PyFollowedBatch {
    /// The Lsn of the batch.
    #[getter]
    fn lsn(&self) -> u64 {
        self.batch.lsn().0
    }

    /// The position after this batch, as text. A `Follower` can start from there.
    #[getter]
    fn position(&self) -> String {
        self.batch.position().to_string()
    }

    /// The Lsn of the newest batch that was durable when this batch was logged.
    #[getter]
    fn durable(&self) -> u64 {
        self.batch.durable().0
    }

    /// The note of the batch, or None.
    #[getter]
    fn note(&self) -> Option<String> {
        self.batch.note()
    }

    /// The Lsn of the batch whose state this batch restored, or None if it is not a restore.
    #[getter]
    fn restored(&self) -> Option<u64> {
        self.batch.restored().map(|restored| restored.of().0)
    }

    /// The pages of the restored state if this batch is a restore, or else an empty list.
    #[getter]
    fn restored_pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let restored = self.batch.restored();
        let pages = restored.map_or(&[][..], |restored| restored.pages());
        REPORT.freeze_list(py, pages.iter().cloned().map(Info))
    }

    /// The operations in order. Each is a dict with "kind" and the entries of that kind.
    ///
    /// The kinds are "create", "write", "masked", "scatter", "fill", "resize", "delete", "set_metadata",
    /// "remove_metadata", "set_root", "remove_root", "note", "image", "restore" and "other". A "scatter"
    /// changes elements of `width` bytes; `indices`, an Array of uint32, counts elements from byte `base` on.
    /// The contents of a page after an "image" are in a file, which `image(page)` reads.
    #[getter]
    fn operations<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let list = PyList::empty(py);
        let (ops, indices) = py.detach(|| {
            let ops = self.batch.operations();
            let indices = plain_indices(&ops);
            (ops, indices)
        });
        for (op, indices) in ops.iter().zip(indices.or_raise(py, Some(&self.path))?) {
            list.append(operation_to_py(py, op, BytesForm::Own { indices })?)?;
        }
        REPORT.freeze(list)
    }

    /// Returns the operations with offsets into the batch's payload in place of bytes. The buffer protocol
    /// exposes the payload. `indices`, of which there are `count`, are encoded as in the log. Without `gaps`,
    /// each takes four bytes. With `gaps`, each is the number of elements skipped before it, in groups of
    /// seven bits, lowest first. The highest bit is set in all bytes but the last.
    fn _layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for op in py.detach(|| self.batch.operations()) {
            list.append(operation_to_py(py, &op, BytesForm::Within(self.batch.payload()))?)?;
        }
        Ok(list)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let payload = this.batch.payload();
        let parts = BufferParts {
            address: payload.as_ptr() as usize,
            len: payload.len(),
            item: 1,
            format: c"B".as_ptr(),
            shape: &raw const this.payload_len,
            ndim: 1,
            read_only: true,
        };
        // SAFETY: the interpreter passes a view to fill; the memory it refers to lives as long as this
        // object, which the view keeps alive, and never changes.
        unsafe { fill_buffer(view, flags, slf.into_any(), parts) }
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: this is the view that `__getbuffer__` filled, released once.
        unsafe { release_buffer(view) };
    }

    /// Returns the contents that an "image" operation gives a page, read from a file and verified.
    fn image<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = arguments::page_id)] page: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| match self.batch.restored() {
            Some(restored) => restored.read(PageId(page)),
            None => self.batch.image(PageId(page)),
        });
        Ok(PyBytes::new(py, &bytes.or_raise(py, Some(&self.path))?))
    }

    fn __repr__(&self) -> String {
        format!("FollowedBatch(lsn={}, operations={})", self.lsn(), self.batch.operations().len())
    }
}

/// A copy of a store's pages in host memory. Applying a follower's batches keeps the copy up to date.
///
/// :param path: the directory of a store whose newest snapshot is the initial state. None creates an empty
///     replica, for the state before the first batch.
///
/// >>> with remanent.Store(directory) as store:
/// ...     store["k"] = b"v"
/// >>> replica, follower = remanent.Replica(), remanent.Follower(directory)
/// >>> replica.apply(follower.next(10))
/// >>> replica["k"], replica.position == follower.position
/// (b'v', True)
#[pyclass(frozen, name = "Replica", module = "remanent", extends = Reader)]
pub struct PyReplica;

#[pymethods]
impl PyReplica {
    /// Creates an empty replica, or one with the newest snapshot of the store at `path`.
    #[new]
    #[pyo3(signature = (path=None))]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::optional_path)] path: Option<PathBuf>,
    ) -> PyResult<PyClassInitializer<Self>> {
        crate::log::update_level(py)?;
        let replica = match &path {
            None => Replica::default(),
            Some(path) => {
                let loaded = py.detach(|| Replica::from_snapshot(path));
                loaded.or_raise(py, Some(&path.display().to_string()))?
            }
        };
        let reader = Reader::new(Source::Replica(Mutex::new(replica)));
        Ok(PyClassInitializer::from(reader).add_subclass(Self))
    }

    /// Applies a batch, which must be the next one.
    ///
    /// :raises DivergedError: the batch is not the next one after `position`.
    fn apply(
        slf: PyRef<'_, Self>,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::followed_batch)] batch: Bound<'_, PyFollowedBatch>,
    ) -> PyResult<()> {
        let Source::Replica(replica) = &slf.as_super().source else {
            unreachable!("the source of a Replica")
        };
        let batch = &batch.get().batch;
        py.detach(|| replica.lock().unwrap_or_else(PoisonError::into_inner).apply(batch)).or_raise(py, None)
    }

    fn __repr__(slf: PyRef<'_, Self>) -> String {
        format!("Replica(position={:?})", Self::position(slf))
    }

    /// The position after the last applied batch, as text. Pass it to a `Follower` for this replica.
    #[getter]
    fn position(slf: PyRef<'_, Self>) -> String {
        let Source::Replica(replica) = &slf.as_super().source else {
            unreachable!("the source of a Replica")
        };
        locked(slf.py(), replica).position().to_string()
    }
}
