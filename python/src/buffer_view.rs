//! A view of another object's bytes by the buffer protocol. PyO3's own refuses arrays without a dimension.

use std::ffi::CStr;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::dtype::Dtype;
use crate::elements::Elements;
use crate::errors::invalid_type;

/// A view, which keeps the bytes where they are.
pub struct BufferView(Box<ffi::Py_buffer>);

// SAFETY: what it points to stays as it is until it is released, which is done with the interpreter's lock.
unsafe impl Send for BufferView {}
// SAFETY: as above; a shared one is only read.
unsafe impl Sync for BufferView {}

impl BufferView {
    /// Takes an object's view.
    ///
    /// # Errors
    /// What the object refuses it with; `TypeError` for an array of Python's objects, whose bytes are
    /// addresses.
    pub fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let view = match Self::get(object, ffi::PyBUF_FULL_RO) {
            Ok(view) => view,
            // NumPy has no format for some kinds of elements, such as dates.
            Err(refused) => return Self::get(object, ffi::PyBUF_STRIDES).map_err(|_| refused),
        };
        if view.has_objects() {
            let kind = object.get_type().name()?;
            return Err(invalid_type(
                format!("{kind} of objects: they have no bytes of their own"),
                "convert it to an array of numbers or bytes",
            ));
        }
        Ok(view)
    }

    fn get(object: &Bound<'_, PyAny>, flags: std::ffi::c_int) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the object is alive, and the view is there to be filled. A refused one is never released.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self(view))
    }

    /// Whether elements, or parts of them, are references to objects.
    fn has_objects(&self) -> bool {
        if self.0.format.is_null() {
            return false;
        }
        // SAFETY: the exporter's text, which lives as long as the view.
        let format = unsafe { CStr::from_ptr(self.0.format) }.to_bytes();
        // Names of parts stand between colons.
        format.split(|byte| *byte == b':').step_by(2).any(|kinds| kinds.contains(&b'O'))
    }

    /// The elements, by the format and shape of the view; `object` is asked for its dtype where the view has
    /// no format.
    ///
    /// # Errors
    /// What the object's own code raises.
    pub fn elements(&self, object: &Bound<'_, PyAny>) -> PyResult<Elements> {
        let shape = match (self.0.shape.is_null(), self.0.ndim) {
            (_, 0) => Vec::new(),
            (true, _) => vec![self.0.len as u64 / (self.0.itemsize as u64).max(1)],
            // SAFETY: the exporter says that there are as many, and keeps them as long as the view.
            (false, ndim) => unsafe { std::slice::from_raw_parts(self.0.shape, ndim as usize) }
                .iter()
                .map(|dim| *dim as u64)
                .collect(),
        };
        if self.0.format.is_null() {
            // Of a kind that the protocol has no format for, as NumPy's dates and ml_dtypes' floats.
            let Some(dtype) = object.getattr_opt("dtype")? else { return Ok(Elements::Bytes) };
            let name = dtype.str()?.to_string();
            return Ok(Elements::of(Dtype::parse(&name).ok(), shape, || name.clone()));
        }
        // SAFETY: the exporter's text, which lives as long as the view.
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

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    pub fn is_read_only(&self) -> bool {
        self.0.readonly != 0
    }

    /// Whether the bytes lie one after the other, in the order of the elements.
    pub fn is_contiguous(&self) -> bool {
        // SAFETY: a view that was filled.
        unsafe { ffi::PyBuffer_IsContiguous(&raw const *self.0, b'C' as std::ffi::c_char) != 0 }
    }
}

impl Drop for BufferView {
    fn drop(&mut self) {
        // Without an interpreter there is no object to give it back to.
        Python::try_attach(|_| {
            // SAFETY: a view that was filled, released once.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
        });
    }
}
