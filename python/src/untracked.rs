//! Objects that Python's garbage collector does not scan.
//!
//! The collector scans every container from time to time, and more often if many new containers are kept. If
//! a save created a container for each tensor, every few saves would cause a scan of the whole process, which
//! takes 0.1 s or more after torch is imported.

use pyo3::PyClass;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Creates an object that the garbage collector does not scan. No object to which it refers may ever refer to
/// it, because such a cycle would never be freed.
pub fn untracked<T>(py: Python<'_>, value: T) -> PyResult<Bound<'_, T>>
where
    T: PyClass + Into<pyo3::PyClassInitializer<T>>,
{
    let made = Bound::new(py, value)?;
    // SAFETY: objects of this class are tracked by the collector, as are those of all classes of this crate.
    unsafe { ffi::PyObject_GC_UnTrack(made.as_ptr().cast()) };
    Ok(made)
}

/// Stops the collector from scanning a tuple. None of the tuple's items may ever refer to the tuple.
pub fn untrack(tuple: &Bound<'_, PyTuple>) {
    // SAFETY: tuples are tracked by the collector. It may have untracked this one already, which is not an
    // error.
    unsafe { ffi::PyObject_GC_UnTrack(tuple.as_ptr().cast()) };
}
