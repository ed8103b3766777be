//! Errors of the engine as Python's exceptions. The classes are `remanent._errors`'; here is which error is
//! which.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use remanent::{Error, Key};

/// The name of the exception's class.
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::Io { .. }
        | Error::Folder { .. }
        | Error::Thread { .. }
        | Error::Randomness { .. }
        | Error::SourceFailed { .. } => "StoreIOError",
        Error::DiskFull { .. } => "DiskFullError",
        Error::Damaged(_) => "DamagedError",
        Error::Locked { .. } => "LockedError",
        Error::Forked { .. } => "ForkedError",
        Error::NoStore { .. } => "NoStoreError",
        Error::ForeignDirectory { .. } => "ForeignDirectoryError",
        Error::IdentityMismatch { .. } | Error::LayoutMismatch { .. } => "MismatchError",
        Error::InvalidOption { .. }
        | Error::InvalidKey(_)
        | Error::InvalidOperation { .. }
        | Error::Limit { .. }
        | Error::LengthsDiffer { .. } => "InvalidError",
        Error::UnknownPage { .. } => "UnknownPageError",
        Error::UnknownKey { .. } => "UnknownKeyError",
        Error::OutOfBounds { .. } => "OutOfBoundsError",
        Error::KeyTaken { .. } | Error::NameTaken { .. } => "TakenError",
        Error::Conflict { .. } => "ConflictError",
        Error::OverBudget { .. } => "OverBudgetError",
        Error::OutOfMemory { .. } => "OutOfMemoryError",
        Error::PlaceUnavailable { .. }
        | Error::DeviceUnavailable { .. }
        | Error::StreamRefused { .. }
        | Error::HintRefused { .. }
        | Error::Device { .. } => "DeviceError",
        Error::MemoryRefused { .. } | Error::MemoryInUse { .. } => "MemoryRefusedError",
        Error::Leased { .. } => "LeasedError",
        Error::NoSnapshot { .. } | Error::NoSnapshotNamed { .. } | Error::OutsideWindow { .. } => {
            "NoStateError"
        }
        Error::Overtaken { .. } => "OvertakenError",
        Error::Diverged { .. } | Error::OutOfOrder { .. } => "DivergedError",
        Error::Poisoned(_) | Error::Panicked { .. } => "PoisonedError",
        Error::Closed => "ClosedError",
        _ => "Error",
    }
}

/// The directory that the error names.
fn path_of(error: &Error) -> Option<&str> {
    match error {
        Error::Io { store, .. }
        | Error::DiskFull { store, .. }
        | Error::Locked { store, .. }
        | Error::Thread { store, .. }
        | Error::Panicked { store, .. } => store.as_deref(),
        Error::Damaged(damage) => damage.store.as_deref(),
        Error::NoStore { path } | Error::ForeignDirectory { path, .. } | Error::Folder { path, .. } => {
            Some(path)
        }
        Error::Poisoned(cause) => path_of(cause),
        _ => None,
    }
}

/// A key as Python has it: text where it is UTF-8, else bytes.
pub fn key_to_py<'py>(py: Python<'py>, key: &Key) -> Bound<'py, PyAny> {
    match key.as_str() {
        Some(text) => PyString::new(py, text).into_any(),
        None => pyo3::types::PyBytes::new(py, key.as_bytes()).into_any(),
    }
}

/// Sets the attributes that say what the error is about.
fn details<'py>(py: Python<'py>, error: &Error, path: Option<&str>) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("remedy", error.remedy().to_string())?;
    fields.set_item("path", path_of(error).or(path))?;
    fields.set_item("file", error.file().map(|file| file.to_string()))?;
    fields.set_item("offset", error.offset())?;
    fields.set_item("lsn", error.lsn().map(|lsn| lsn.0))?;
    match error {
        Error::UnknownPage { page } | Error::Leased { page } => fields.set_item("page", page.0)?,
        Error::OutOfBounds { page, page_len, .. } => {
            fields.set_item("page", page.0)?;
            fields.set_item("page_length", page_len)?;
        }
        Error::UnknownKey { key } => fields.set_item("key", key_to_py(py, key))?,
        Error::KeyTaken { key, holder } => {
            fields.set_item("key", key_to_py(py, key))?;
            fields.set_item("page", holder.0)?;
        }
        Error::NameTaken { name, snapshot } => {
            fields.set_item("name", name)?;
            fields.set_item("snapshot", snapshot.0)?;
        }
        Error::Conflict { page, expected, found } => {
            fields.set_item("page", page.0)?;
            fields.set_item("expected", expected.0)?;
            fields.set_item("found", found.0)?;
        }
        Error::Locked { holder, .. } => fields.set_item("holder", holder)?,
        Error::Forked { opener } => fields.set_item("opener", opener)?,
        Error::DiskFull { needed, .. } => fields.set_item("needed", needed)?,
        Error::OverBudget { place, asked, available, .. } => {
            fields.set_item("place", place.to_string())?;
            fields.set_item("asked", asked)?;
            fields.set_item("available", available)?;
        }
        Error::OutsideWindow { oldest, newest, .. } => {
            fields.set_item("oldest", oldest.0)?;
            fields.set_item("newest", newest.0)?;
        }
        Error::Overtaken { snapshot, .. } => fields.set_item("snapshot", snapshot.map(|id| id.0))?,
        Error::Io { source, .. } | Error::Folder { source, .. } | Error::Thread { source, .. } => {
            fields.set_item("errno", source.raw_os_error())?;
        }
        _ => {}
    }
    Ok(fields)
}

/// The exception for an error of the engine. `path` is the store's directory, where the error does not name
/// it.
pub fn to_py(py: Python<'_>, error: &Error, path: Option<&str>) -> PyErr {
    let made = || {
        let class = py.import("remanent._errors")?.getattr(class_of(error))?;
        let raised = class.call((error.to_string(),), Some(&details(py, error, path)?))?;
        let raised = PyErr::from_value(raised);
        if let Error::Poisoned(cause) = error {
            raised.set_cause(py, Some(to_py(py, cause, path)));
        }
        Ok::<PyErr, PyErr>(raised)
    };
    made().unwrap_or_else(|failure| failure)
}

/// An exception of the binding's own, for what the engine does not know of.
pub fn own(py: Python<'_>, class: &str, message: &str, remedy: &str, path: Option<&str>) -> PyErr {
    let made = || {
        let fields = PyDict::new(py);
        fields.set_item("remedy", remedy)?;
        fields.set_item("path", path)?;
        let raised = py.import("remanent._errors")?.getattr(class)?.call((message,), Some(&fields))?;
        Ok::<PyErr, PyErr>(PyErr::from_value(raised))
    };
    made().unwrap_or_else(|failure| failure)
}

/// A result of the engine as Python's.
pub trait OrRaise<T> {
    /// Raises the exception for the error.
    fn or_raise(self, py: Python<'_>, path: Option<&str>) -> PyResult<T>;
}

impl<T> OrRaise<T> for remanent::Result<T> {
    fn or_raise(self, py: Python<'_>, path: Option<&str>) -> PyResult<T> {
        self.map_err(|error| to_py(py, &error, path))
    }
}
