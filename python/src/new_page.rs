//! A page that a batch creates, as a caller names it.

use pyo3::prelude::*;
use remanent::NewPage;

/// A page that a batch creates: usable in the calls of that batch that follow.
#[pyclass(frozen, name = "NewPage", module = "remanent", from_py_object)]
#[derive(Clone)]
pub struct PyNewPage(pub NewPage);

#[pymethods]
impl PyNewPage {
    /// The place of the page's id in what the commit returns as `pages`.
    #[getter]
    fn index(&self) -> usize {
        self.0.index()
    }

    fn __repr__(&self) -> String {
        format!("NewPage(index={})", self.0.index())
    }
}
