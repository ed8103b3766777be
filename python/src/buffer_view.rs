//! A view of another object's bytes by the buffer protocol. PyO3's own refuses arrays without a dimension.

use std::ffi::CStr;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;

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
            return Err(PyTypeError::new_err(format!("{kind} of objects: they have no bytes of their own")));
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
