//! The result of looking up a page.

use pyo3::prelude::*;
use remanent::PageInfo;

use crate::errors::key_to_py;
use crate::values::{METADATA, metadata_to_py};

/// A page's id, key, length in bytes, version, place and metadata.
///
/// >>> with remanent.Store(directory) as store:
/// ...     store["k"] = b"v"
/// ...     store.info("k")
/// PageInfo(page=1, key=k, length=1, epoch=1, lsn=1, place=host)
#[pyclass(frozen, name = "PageInfo", module = "remanent", eq)]
#[derive(PartialEq)]
pub struct Info(pub PageInfo);

#[pymethods]
impl Info {
    /// The page's id.
    #[getter]
    fn page(&self) -> u64 {
        self.0.page.0
    }

    /// The page's key, or None. It is a str if it is UTF-8, else bytes.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.0.key.as_ref().map(|key| key_to_py(py, key))
    }

    /// The page's length in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.0.len
    }

    /// The page's version, incremented by each batch that changes content, length or metadata.
    #[getter]
    fn epoch(&self) -> u64 {
        self.0.epoch.0
    }

    /// The Lsn of the batch that last changed or moved the page.
    #[getter]
    fn lsn(&self) -> u64 {
        self.0.lsn.0
    }

    /// The place where the page lives: "host", "pinned", "device:N" or "disk".
    #[getter]
    fn place(&self) -> String {
        self.0.place.to_string()
    }

    /// The page's metadata, as a read-only copy. `Batch.set_metadata` changes it.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        METADATA.freeze(metadata_to_py(py, &self.0.metadata)?)
    }

    fn __repr__(&self) -> String {
        let key = self.0.key.as_ref().map_or_else(String::new, |key| format!(", key={key}"));
        let PageInfo { page, len, epoch, lsn, place, .. } = &self.0;
        format!("PageInfo(page={page}{key}, length={len}, epoch={epoch}, lsn={lsn}, place={place})")
    }
}
