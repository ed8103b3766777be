//! Changes of a page's bytes, and the binary search for the first bad state.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use remanent::history::{BisectVerdict, Bisection, ChangeCause};
use remanent::store::ReadPages;
use remanent::{Lsn, PageInfo, View};

use crate::arguments;
use crate::dtype::Dtype;
use crate::errors::own;
use crate::page_name::PageName;
use crate::values::{REPORT, metadata_to_py};

/// A change of a page's bytes. Returned by `View.blame` and `Store.blame`.
#[pyclass(frozen, name = "ValueChange", module = "remanent")]
pub struct PyValueChange(remanent::history::ValueChange);

#[pymethods]
impl PyValueChange {
    /// The Lsn of the batch that made the change. If `cause` is "snapshot", this is the last batch before the
    /// snapshot that changed the page.
    #[getter]
    fn lsn(&self) -> u64 {
        self.0.lsn.0
    }

    /// The cause of the change: "batch", "restore" (of an earlier state) or "snapshot". A change has the
    /// cause "snapshot" if it was found by comparing two snapshots, because the batches between them are no
    /// longer kept.
    #[getter]
    fn cause(&self) -> &'static str {
        match self.0.cause {
            ChangeCause::Batch => "batch",
            ChangeCause::Restore => "restore",
            ChangeCause::Snapshot => "snapshot",
        }
    }

    /// The bytes before the change, or None if the page did not exist or ended before them.
    #[getter]
    fn before<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.0.before.as_ref().map(|bytes| PyBytes::new(py, bytes))
    }

    /// The bytes after the change, or None if the page does not exist or ends before them.
    #[getter]
    fn after<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.0.after.as_ref().map(|bytes| PyBytes::new(py, bytes))
    }

    /// The note of the batch, or None.
    #[getter]
    fn note(&self) -> Option<&str> {
        self.0.note.as_deref()
    }

    /// The root after the batch, or None if it is unknown.
    #[getter]
    fn root<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0.root.as_ref().map(|root| REPORT.freeze(metadata_to_py(py, root)?)).transpose()
    }

    fn __repr__(&self) -> String {
        let note = self.0.note.as_ref().map_or_else(String::new, |note| format!(", note={note:?}"));
        format!("ValueChange(lsn={}, cause={:?}{note})", self.0.lsn, self.cause())
    }
}

/// Returns the bytes per element according to the page's metadata, or 1 if the page has no known dtype.
fn width_of(info: &PageInfo) -> u64 {
    let dtype = info.metadata.get("dtype").and_then(remanent::Value::as_str);
    dtype.and_then(|dtype| Dtype::parse(dtype).ok()).map_or(1, |dtype| dtype.item_size() as u64)
}

/// Returns the changes of a page's bytes up to the state of `view`.
pub fn blame(
    view: &View,
    page: &PageName,
    offset: u64,
    length: Option<u64>,
) -> remanent::Result<Vec<PyValueChange>> {
    let info = page.find(view as &dyn ReadPages)?;
    let len = length.unwrap_or_else(|| width_of(&info));
    let changes = view.blame(info.page, offset..offset.saturating_add(len))?;
    Ok(changes.into_iter().map(PyValueChange).collect())
}

/// The binary search of `remanent.bisect`. Chooses the version to test next.
#[pyclass(frozen, module = "remanent._store._native")]
pub struct Bisect(std::sync::Mutex<Bisection>);

#[pymethods]
impl Bisect {
    #[new]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::good)] good: u64,
        #[pyo3(from_py_with = arguments::bad)] bad: u64,
    ) -> PyResult<Self> {
        let search = Bisection::new(Lsn(good), Lsn(bad)).ok_or_else(|| {
            let message = format!(
                "the good state must be older than the bad one, but lsn {good} is not older than lsn {bad}"
            );
            own(py, "InvalidError", &message, "pass an older state as good, or a later one as bad", None)
        })?;
        Ok(Self(std::sync::Mutex::new(search)))
    }

    /// Returns the number of the version to test next, or None if the search has ended.
    fn next(&self) -> Option<u64> {
        self.search().next().map(|lsn| lsn.0)
    }

    /// Records the result for a version: True for good, False for bad, and None if it could not be
    /// determined.
    fn tell(
        &self,
        #[pyo3(from_py_with = arguments::lsn)] lsn: u64,
        #[pyo3(from_py_with = arguments::is_good)] is_good: Option<bool>,
    ) {
        let verdict = match is_good {
            Some(true) => BisectVerdict::Good,
            Some(false) => BisectVerdict::Bad,
            None => BisectVerdict::Skip,
        };
        self.search().record(Lsn(lsn), verdict);
    }

    /// Returns the newest version known to be good and the oldest version known to be bad.
    fn bounds(&self) -> (u64, u64) {
        let search = self.search();
        (search.good().0, search.bad().0)
    }
}

impl Bisect {
    fn search(&self) -> std::sync::MutexGuard<'_, Bisection> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
