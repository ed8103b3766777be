//! What a look-up gives of a page.

use pyo3::prelude::*;
use remanent::PageInfo;

use crate::errors::key_to_py;
use crate::values::{METADATA, metadata_to_py};

/// A page's length in bytes, version, key and metadata.
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

    /// Its key, or None: text where it is UTF-8, else bytes.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.0.key.as_ref().map(|key| key_to_py(py, key))
    }

    /// Its length in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.0.len
    }

    /// Its version: one more with each batch that changes content, length or metadata.
    #[getter]
    fn epoch(&self) -> u64 {
        self.0.epoch.0
    }

    /// The batch that changed or moved it last.
    #[getter]
    fn lsn(&self) -> u64 {
        self.0.lsn.0
    }

    /// Where it lives: "host", "pinned", "device:N".
    #[getter]
    fn place(&self) -> String {
        self.0.place.to_string()
    }

    /// Its metadata, as a read-only copy. `Batch.set_metadata` changes it.
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
