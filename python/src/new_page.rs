//! A page that a batch creates, as a handle for its caller.

use pyo3::prelude::*;
use remanent::batch::NewPage;

/// A page that a batch creates, usable in later calls of the same batch.
#[pyclass(frozen, name = "NewPage", module = "remanent", from_py_object)]
#[derive(Clone)]
pub struct PyNewPage(pub NewPage);

#[pymethods]
impl PyNewPage {
    /// The index of the page's id in the `pages` of the committed batch.
    #[getter]
    fn index(&self) -> usize {
        self.0.index()
    }

    fn __repr__(&self) -> String {
        format!("NewPage(index={})", self.0.index())
    }
}
