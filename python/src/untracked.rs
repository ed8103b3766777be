//! Objects that Python's garbage collector does not scan.
//!
//! The collector scans every container from time to time, the sooner the more of them have been created and
//! kept. When a save created some for each tensor, every few saves caused a scan of the whole process, which
//! takes 0.1 s or more with torch imported.

use pyo3::PyClass;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Creates such an object. Nothing that it refers to may come to refer to it: they would never be freed.
pub fn untracked<T>(py: Python<'_>, value: T) -> PyResult<Bound<'_, T>>
where
    T: PyClass + Into<pyo3::PyClassInitializer<T>>,
{
    let made = Bound::new(py, value)?;
    // SAFETY: objects of this class are tracked by the collector, as are those of all classes of this crate.
    unsafe { ffi::PyObject_GC_UnTrack(made.as_ptr().cast()) };
    Ok(made)
}

/// Stops the collector from scanning a tuple. None of its items may come to refer to it.
pub fn untrack(tuple: &Bound<'_, PyTuple>) {
    // SAFETY: tuples are tracked by the collector. It may have untracked this one already, which is not an
    // error.
    unsafe { ffi::PyObject_GC_UnTrack(tuple.as_ptr().cast()) };
}
