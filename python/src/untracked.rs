//! Objects at which Python's garbage collector does not look.
//!
//! It looks at every container now and then, the sooner the more of them have been made and kept: a save that
//! made some for each tensor had all of a process looked through every few saves, which takes 0.1 s and more
//! with torch imported.

use pyo3::PyClass;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Makes such an object. Nothing that it holds may come to hold it: they would never be freed.
pub fn untracked<T>(py: Python<'_>, value: T) -> PyResult<Bound<'_, T>>
where
    T: PyClass + Into<pyo3::PyClassInitializer<T>>,
{
    let made = Bound::new(py, value)?;
    // SAFETY: the collector looks at objects of this class, as at those of all classes of this crate.
    unsafe { ffi::PyObject_GC_UnTrack(made.as_ptr().cast()) };
    Ok(made)
}

/// Has the collector no longer look at a tuple. None of its items may come to hold it.
pub fn untrack(tuple: &Bound<'_, PyTuple>) {
    // SAFETY: the collector looks at tuples; it may have found out already that it need not look at this one,
    // which is no error here.
    unsafe { ffi::PyObject_GC_UnTrack(tuple.as_ptr().cast()) };
}
