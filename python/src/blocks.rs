//! The new contents of a page of tensors: the layout of its arrays, and their bytes.
//!
//! A save creates one block for each page and one layout for each tensor.

use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice, PyString, PyTuple};

use crate::untracked::{untrack, untracked};

/// The name, element type, shape, offset and strides of an array within a page.
#[pyclass(frozen, module = "remanent._store._native")]
pub struct ArrayLayout {
    /// The name can contain text that is not valid Unicode, so it stays a Python object.
    #[pyo3(get)]
    name: Py<PyString>,
    #[pyo3(get)]
    dtype: Py<PyString>,
    shape: Vec<u64>,
    /// The strides in elements, or None for row-major order.
    stride: Option<Vec<i64>>,
    #[pyo3(get)]
    offset: u64,
}

#[pymethods]
impl ArrayLayout {
    #[new]
    #[pyo3(signature = (name, dtype, shape, stride=None, offset=0))]
    fn new(
        py: Python<'_>,
        name: Py<PyString>,
        dtype: Py<PyString>,
        shape: Vec<u64>,
        stride: Option<Vec<i64>>,
        offset: u64,
    ) -> PyResult<Bound<'_, Self>> {
        untracked(py, Self { name, dtype, shape, stride, offset })
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.stride.as_ref().map(|stride| PyTuple::new(py, stride)).transpose()
    }

    /// Returns the values that represent the layout in JSON.
    fn listed<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let shape = PyList::new(py, &self.shape)?.into_any();
        let stride =
            self.stride.as_ref().map(|stride| PyList::new(py, stride)).transpose()?.into_pyobject(py)?;
        let (name, dtype) = (self.name.bind(py).clone().into_any(), self.dtype.bind(py).clone().into_any());
        PyList::new(py, [name, dtype, shape, stride, self.offset.into_pyobject(py)?.into_any()])
    }

    fn __eq__(&self, py: Python<'_>, other: &Self) -> PyResult<bool> {
        Ok(self.offset == other.offset
            && self.shape == other.shape
            && self.stride == other.stride
            && self.name.bind(py).as_any().eq(&other.name)?
            && self.dtype.bind(py).as_any().eq(&other.dtype)?)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let listed = self.listed(py)?.repr()?;
        Ok(format!("ArrayLayout({})", listed.to_string_lossy().trim_start_matches('[').trim_end_matches(']')))
    }
}

/// The new contents of a page: its arrays, and a contiguous uint8 buffer with their bytes.
#[pyclass(frozen, module = "remanent._store._native")]
pub struct Block {
    #[pyo3(get)]
    arrays: Py<PyTuple>,
    data: Py<PyAny>,
    #[pyo3(get)]
    nbytes: u64,
    /// The offset of the block's bytes in `data` if `data` also contains the bytes of other blocks.
    start: Option<u64>,
    /// Whether the commit compares the bytes in place with the page.
    #[pyo3(get)]
    captured: bool,
}

#[pymethods]
impl Block {
    #[new]
    #[pyo3(signature = (arrays, data, nbytes, *, start=None, captured=false))]
    fn new(
        py: Python<'_>,
        arrays: Py<PyTuple>,
        data: Py<PyAny>,
        nbytes: u64,
        start: Option<u64>,
        captured: bool,
    ) -> PyResult<Bound<'_, Self>> {
        for array in arrays.bind(py) {
            array.cast::<ArrayLayout>()?;
        }
        untrack(arrays.bind(py));
        untracked(py, Self { arrays, data, nbytes, start, captured })
    }

    /// The bytes of the block. If the buffer also contains bytes of other blocks, this is a new slice of the
    /// buffer.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let data = self.data.bind(py);
        let Some(start) = self.start else { return Ok(data.clone()) };
        let (start, end) = (isize::try_from(start)?, isize::try_from(start + self.nbytes)?);
        data.get_item(PySlice::new(py, start, end, 1))
    }

    /// Returns a block with the same layouts whose bytes are in another buffer.
    ///
    /// `start` is the offset of the bytes if the buffer also contains bytes of other blocks.
    #[pyo3(signature = (data, *, start=None))]
    fn moved<'py>(&self, py: Python<'py>, data: Py<PyAny>, start: Option<u64>) -> PyResult<Bound<'py, Self>> {
        let arrays = self.arrays.clone_ref(py);
        untracked(py, Self { arrays, data, nbytes: self.nbytes, start, captured: false })
    }
}
