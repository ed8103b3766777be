//! `NewPage`, the handle to a page that a batch creates.

use pyo3::prelude::*;
use remanent::batch::NewPage;

/// A page that a batch creates. Later calls of the same batch accept this handle as a page.
#[pyclass(frozen, name = "NewPage", module = "remanent", from_py_object)]
#[derive(Clone)]
pub struct PyNewPage(pub NewPage);

#[pymethods]
impl PyNewPage {
    /// The index of the page's id in `Batch.pages` after the commit.
    #[getter]
    fn index(&self) -> usize {
        self.0.index()
    }

    fn __repr__(&self) -> String {
        format!("NewPage(index={})", self.0.index())
    }
}
