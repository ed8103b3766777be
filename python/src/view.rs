//! Views: of an open store as of one batch, and of an earlier state.

use pyo3::prelude::*;
use remanent::Store;

use crate::errors::OrRaise;
use crate::page_name::state_point;
use crate::reader::Reader;
use crate::source::{PastSource, Source};

/// Pages and root of an open store as of one batch. Made by `Store.view`; its store cannot be closed before
/// it.
///
/// It keeps no page's bytes: reading a page that has changed since raises OvertakenError.
///
/// >>> store = remanent.Store(directory)
/// >>> store["k"] = b"old"
/// >>> with store.view() as view:
/// ...     store["k"] = b"new"
/// ...     try:
/// ...         view["k"]
/// ...     except remanent.OvertakenError:
/// ...         "changed", view.info("k").lsn, store.info("k").lsn
/// ('changed', 1, 2)
/// >>> store.close()
#[pyclass(frozen, name = "LiveView", module = "remanent", extends = Reader)]
pub struct PyLiveView;

#[pymethods]
impl PyLiveView {
    /// Lets go of the view; its store can be closed then.
    fn close(slf: PyRef<'_, Self>) -> PyResult<()> {
        let reader = slf.as_super();
        let Source::Live(live) = &reader.source else { unreachable!("made with one") };
        live.close().or_raise(slf.py(), Some(&live.path))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        slf: PyRef<'_, Self>,
        kind: Option<Bound<'_, PyAny>>,
        error: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (kind, error, traceback);
        Self::close(slf)
    }
}

/// A state of a store, read-only, without a lock, beside a writer in any process; as a context manager it
/// closes.
///
/// :param at: an Lsn, "lsn:N", "snapshot:N", "name:S" or a SnapshotInfo; the newest state if None.
/// :raises NoStoreError, NoStateError; DamagedError; OvertakenError where no lock can be taken.
///
/// >>> with remanent.Store(directory) as store:
/// ...     store["k"] = b"then"
/// ...     store["k"] = b"now!"
/// ...     remanent.View(directory, 1)["k"], remanent.View(directory)["k"]
/// (b'then', b'now!')
#[pyclass(frozen, name = "View", module = "remanent", extends = Reader)]
pub struct PyView;

impl PyView {
    fn past(reader: &Reader) -> &PastSource {
        let Source::Past(past) = &reader.source else { unreachable!("made with one") };
        past
    }
}

#[pymethods]
impl PyView {
    #[new]
    #[pyo3(signature = (path, at=None))]
    fn new(
        py: Python<'_>,
        path: std::path::PathBuf,
        at: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let point = at.map(|at| state_point(&at)).transpose()?;
        let view = py.detach(|| match &point {
            Some(point) => Store::open_at(&path, point),
            None => Store::open_read_only(&path),
        });
        let path = path.display().to_string();
        let view = view.or_raise(py, Some(&path))?;
        let reader = Reader::new(Source::Past(PastSource::new(view, path)));
        Ok(PyClassInitializer::from(reader).add_subclass(Self))
    }

    /// The identity of the store, as hexadecimal text.
    #[getter]
    fn id(slf: PyRef<'_, Self>) -> PyResult<String> {
        let past = Self::past(slf.as_super());
        Ok(past.get().or_raise(slf.py(), Some(&past.path))?.id().to_string())
    }

    /// The snapshot that the state is computed from; None is the log's beginning.
    #[getter]
    fn base(slf: PyRef<'_, Self>) -> PyResult<Option<u64>> {
        let past = Self::past(slf.as_super());
        Ok(past.get().or_raise(slf.py(), Some(&past.path))?.base().map(|id| id.0))
    }

    /// Makes a new store, with an id of its own, that begins at this state. Returns its id.
    fn fork(slf: PyRef<'_, Self>, path: std::path::PathBuf) -> PyResult<String> {
        let (py, past) = (slf.py(), Self::past(slf.as_super()));
        let forked = py.detach(|| past.get()?.fork(&path));
        forked.or_raise(py, Some(&past.path)).map(|id| id.to_string())
    }

    /// Lets go of the state: what only it needs may be removed then.
    fn close(slf: PyRef<'_, Self>) -> PyResult<()> {
        let past = Self::past(slf.as_super());
        past.close().or_raise(slf.py(), Some(&past.path))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        slf: PyRef<'_, Self>,
        kind: Option<Bound<'_, PyAny>>,
        error: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (kind, error, traceback);
        Self::close(slf)
    }
}
