//! The result of looking up a page.

use pyo3::prelude::*;
use remanent::PageInfo;

use crate::errors::key_to_py;
use crate::values::{METADATA, metadata_to_py};

/// The result of looking up a page: its id, key, length in bytes, epoch, place and metadata.
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
    /// The id of the page.
    #[getter]
    fn page(&self) -> u64 {
        self.0.page.0
    }

    /// The key of the page as a str, or as bytes if the key is not UTF-8. None if the page has no key.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.0.key.as_ref().map(|key| key_to_py(py, key))
    }

    /// The length of the page in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.0.len
    }

    /// The page's version number. Each batch that changes contents, length or metadata increments it.
    #[getter]
    fn epoch(&self) -> u64 {
        self.0.epoch.0
    }

    /// The Lsn of the batch that last changed or moved the page.
    #[getter]
    fn lsn(&self) -> u64 {
        self.0.lsn.0
    }

    /// The place of the page: "host", "pinned", "device:N" or "disk".
    #[getter]
    fn place(&self) -> String {
        self.0.place.to_string()
    }

    /// The metadata of the page, as a read-only copy. To change metadata, use `Batch.set_metadata`.
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
