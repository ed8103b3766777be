//! A view of another object's bytes, by the buffer protocol. PyO3's own type rejects arrays without
//! dimensions.

use std::ffi::CStr;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::dtype::Dtype;
use crate::elements::Elements;
use crate::errors::invalid_type;

/// A buffer-protocol view. The exporter keeps the bytes in place as long as the view exists.
pub struct BufferView(Box<ffi::Py_buffer>);

// SAFETY: its memory stays unchanged until it is released, which happens with the interpreter's lock held.
unsafe impl Send for BufferView {}
// SAFETY: as above; a shared view is only read.
unsafe impl Sync for BufferView {}

impl BufferView {
    /// Returns a view of an object's bytes.
    ///
    /// # Errors
    /// Errors of the object, and `TypeError` for an array of Python objects, whose bytes are addresses.
    pub fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let view = match Self::get(object, ffi::PyBUF_FULL_RO) {
            Ok(view) => view,
            // NumPy has no format for some element types, such as dates.
            Err(refused) => return Self::get(object, ffi::PyBUF_STRIDES).map_err(|_| refused),
        };
        if view.has_objects() {
            let kind = object.get_type().name()?;
            return Err(invalid_type(
                format!("a {kind} of Python objects has no bytes to store"),
                "convert it to an array of numbers or bytes",
            ));
        }
        Ok(view)
    }

    fn get(object: &Bound<'_, PyAny>, flags: std::ffi::c_int) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object is alive, and the view is memory to fill. A view that is refused is never released.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self(view))
    }

    /// Returns whether elements, or parts of elements, are references to Python objects.
    fn has_objects(&self) -> bool {
        if self.0.format.is_null() {
            return false;
        }
        // SAFETY: this is the exporter's text, which lives as long as the view.
        let format = unsafe { CStr::from_ptr(self.0.format) }.to_bytes();
        // Names of fields are between colons.
        format.split(|byte| *byte == b':').step_by(2).any(|kinds| kinds.contains(&b'O'))
    }

    /// Returns the element type and shape according to the view's format. If the view has no format, the
    /// element type is the dtype of `object`.
    ///
    /// # Errors
    /// Errors raised by the object's own code.
    pub fn elements(&self, object: &Bound<'_, PyAny>) -> PyResult<Elements> {
        let shape = match (self.0.shape.is_null(), self.0.ndim) {
            (_, 0) => Vec::new(),
            (true, _) => vec![self.0.len as u64 / (self.0.itemsize as u64).max(1)],
            // SAFETY: the exporter states this number of dimensions, and keeps them alive as long as the
            // view.
            (false, ndim) => unsafe { std::slice::from_raw_parts(self.0.shape, ndim as usize) }
                .iter()
                .map(|dim| *dim as u64)
                .collect(),
        };
        if self.0.format.is_null() {
            // An element type for which the protocol has no format, such as NumPy's dates and the floats of
            // ml_dtypes.
            let Some(dtype) = object.getattr_opt("dtype")? else { return Ok(Elements::Bytes) };
            let name = dtype.str()?.to_string();
            return Ok(Elements::of(Dtype::parse(&name).ok(), shape, || name.clone()));
        }
        // SAFETY: this is the exporter's text, which lives as long as the view.
        let format = unsafe { CStr::from_ptr(self.0.format) }.to_bytes();
        let unnamed = || match object.getattr("dtype").and_then(|dtype| dtype.str()) {
            Ok(name) => name.to_string(),
            Err(_) => format!("with format {:?}", String::from_utf8_lossy(format)),
        };
        Ok(Elements::of(Dtype::of_format(format, self.0.itemsize as usize), shape, unnamed))
    }

    pub fn address(&self) -> usize {
        self.0.buf as usize
    }

    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    pub fn is_read_only(&self) -> bool {
        self.0.readonly != 0
    }

    /// Returns whether the elements are contiguous in row-major order.
    pub fn is_contiguous(&self) -> bool {
        // SAFETY: this view was filled.
        unsafe { ffi::PyBuffer_IsContiguous(&raw const *self.0, b'C' as std::ffi::c_char) != 0 }
    }
}

impl Drop for BufferView {
    fn drop(&mut self) {
        // Without an interpreter, the exporter no longer exists.
        Python::try_attach(|_| {
            // SAFETY: this view was filled, and is released once.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
        });
    }
}
