//! Engine errors as Python exceptions. `remanent._store.errors` defines the classes; this module maps errors to
//! them.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use remanent::error::{ArchiveErrorKind, Invalid, IoObject, NoSuchState, Refused, Taken};
use remanent::{Error, Key};

/// Returns the name of the exception class for an error.
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::Io { .. } => "StoreIOError",
        Error::DiskFull { .. } => "DiskFullError",
        Error::Damaged(_) => "DamagedError",
        Error::Locked { .. } => "LockedError",
        Error::Superseded { .. } => "SupersededError",
        Error::Forked { .. } => "ForkedError",
        Error::NoStore { found: None, .. } => "NoStoreError",
        Error::NoStore { .. } => "ForeignDirectoryError",
        Error::Mismatch(_) => "MismatchError",
        Error::Diverged { .. } | Error::Invalid(Invalid::OutOfOrder { .. }) => "DivergedError",
        Error::Invalid(_) | Error::Limit { .. } => "InvalidError",
        Error::UnknownPage { .. } => "UnknownPageError",
        Error::UnknownKey { .. } => "UnknownKeyError",
        Error::OutOfBounds { .. } => "OutOfBoundsError",
        Error::Taken(_) => "TakenError",
        Error::Conflict { .. } => "ConflictError",
        Error::OverBudget { .. } => "OverBudgetError",
        Error::OutOfMemory { .. } => "OutOfMemoryError",
        Error::Unavailable(_)
        | Error::Refused(Refused::Stream { .. } | Refused::Hint { .. })
        | Error::Device { .. } => "DeviceError",
        Error::Refused(_) => "MemoryRefusedError",
        Error::Leased { .. } => "LeasedError",
        Error::NoSuchState(_) => "NoStateError",
        Error::Overtaken { .. } => "OvertakenError",
        Error::Poisoned(_) | Error::Panicked { .. } => "PoisonedError",
        Error::Archive(_) => "ArchiveError",
        Error::Closed => "ClosedError",
        _ => "Error",
    }
}

/// Returns the name of a kind of failure of an archive.
fn kind_of(kind: ArchiveErrorKind) -> &'static str {
    match kind {
        ArchiveErrorKind::NoArchive => "no archive",
        ArchiveErrorKind::Settings => "settings",
        ArchiveErrorKind::Superseded => "superseded",
        ArchiveErrorKind::Diverged => "diverged",
        ArchiveErrorKind::Lost => "lost",
        ArchiveErrorKind::OtherStore => "other store",
        ArchiveErrorKind::Bucket => "bucket",
        ArchiveErrorKind::Unsupported => "unsupported",
        ArchiveErrorKind::Damaged => "damaged",
        ArchiveErrorKind::Limit => "limit",
        ArchiveErrorKind::Directory => "directory",
        ArchiveErrorKind::Unnamed => "unnamed",
        ArchiveErrorKind::NotGiven => "not given",
        _ => "unknown",
    }
}

/// Returns the directory that the error names.
fn path_of(error: &Error) -> Option<&str> {
    match error {
        Error::NoStore { path, .. } | Error::Io { object: IoObject::Folder { path }, .. } => Some(path),
        Error::Io { store, .. }
        | Error::DiskFull { store, .. }
        | Error::Locked { store, .. }
        | Error::Superseded { store, .. }
        | Error::Panicked { store, .. } => store.as_deref(),
        Error::Damaged(damage) => damage.store.as_deref(),
        Error::Poisoned(cause) => path_of(cause),
        _ => None,
    }
}

/// Returns a key as a Python object: str if it is UTF-8, else bytes.
pub fn key_to_py<'py>(py: Python<'py>, key: &Key) -> Bound<'py, PyAny> {
    match key.as_str() {
        Some(text) => PyString::new(py, text).into_any(),
        None => pyo3::types::PyBytes::new(py, key.as_bytes()).into_any(),
    }
}

/// Returns the attributes that describe what the error is about.
fn details<'py>(py: Python<'py>, error: &Error, path: Option<&str>) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("remedy", error.advice())?;
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
        Error::Taken(Taken::Key { key, holder }) => {
            fields.set_item("key", key_to_py(py, key))?;
            fields.set_item("page", holder.0)?;
        }
        Error::Taken(Taken::Name { name, snapshot }) => {
            fields.set_item("name", name)?;
            fields.set_item("snapshot", snapshot.0)?;
        }
        Error::Conflict { page, expected, found } => {
            fields.set_item("page", page.0)?;
            fields.set_item("expected", expected.0)?;
            fields.set_item("found", found.0)?;
        }
        Error::Locked { holder, .. } | Error::Superseded { holder, .. } => {
            fields.set_item("holder", holder)?;
        }
        Error::Forked { opener } => fields.set_item("opener", opener)?,
        Error::DiskFull { needed, .. } => fields.set_item("needed", needed)?,
        Error::OverBudget { place, requested, available, .. } => {
            fields.set_item("place", place.to_string())?;
            fields.set_item("asked", requested)?;
            fields.set_item("available", available)?;
        }
        Error::NoSuchState(NoSuchState::OutsideWindow { oldest, newest, .. }) => {
            fields.set_item("oldest", oldest.0)?;
            fields.set_item("newest", newest.0)?;
        }
        Error::Overtaken { snapshot, .. } => fields.set_item("snapshot", snapshot.map(|id| id.0))?,
        Error::NoSuchState(NoSuchState::NotCommitted { newest, .. }) => {
            fields.set_item("newest", newest.0)?
        }
        Error::Archive(archive) => {
            fields.set_item("url", &archive.url)?;
            fields.set_item("kind", kind_of(archive.kind))?;
        }
        Error::Io { source, .. } => fields.set_item("errno", source.raw_os_error())?,
        _ => {}
    }
    Ok(fields)
}

/// Returns the exception for an engine error. `path` is the store's directory, used if the error does not
/// name one.
pub fn to_py(py: Python<'_>, error: &Error, path: Option<&str>) -> PyErr {
    to_py_with(py, error, "", path)
}

/// Returns the exception for an engine error, with `addition` at the end of its message.
pub fn to_py_with(py: Python<'_>, error: &Error, addition: &str, path: Option<&str>) -> PyErr {
    let made = || {
        let class = py.import("remanent._store.errors")?.getattr(class_of(error))?;
        // The remedy is an attribute of the exception.
        let message = error.to_string();
        let failure = message.strip_suffix(&format!("; {}", error.advice())).unwrap_or(&message);
        let raised = class.call((format!("{failure}{addition}"),), Some(&details(py, error, path)?))?;
        let raised = PyErr::from_value(raised);
        if let Error::Poisoned(cause) = error {
            raised.set_cause(py, Some(to_py(py, cause, path)));
        }
        Ok::<PyErr, PyErr>(raised)
    };
    made().unwrap_or_else(|failure| failure)
}

pyo3::import_exception!(remanent._store.errors, InvalidError);
pyo3::import_exception!(remanent._store.errors, InvalidTypeError);
pyo3::import_exception!(remanent._store.errors, MemoryRefusedError);
pyo3::import_exception!(remanent._store.errors, OutOfBoundsError);
pyo3::import_exception!(remanent._store.errors, InUseError);
pyo3::import_exception!(remanent._store.errors, StoreIOError);

/// Returns the exception for an argument with a wrong value.
pub fn invalid(message: impl Into<String>, remedy: impl Into<String>) -> PyErr {
    InvalidError::new_err((message.into(), remedy.into()))
}

/// Returns the exception for an argument of a wrong type.
pub fn invalid_type(message: impl Into<String>, remedy: impl Into<String>) -> PyErr {
    InvalidTypeError::new_err((message.into(), remedy.into()))
}

/// Returns whether the exception is one of [`invalid_type`].
pub fn is_invalid_type(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<InvalidTypeError>(py)
}

/// Returns the exception for memory that a call cannot use.
pub fn memory_refused(message: impl Into<String>, remedy: impl Into<String>) -> PyErr {
    MemoryRefusedError::new_err((message.into(), remedy.into()))
}

/// Returns the exception for an index out of range.
pub fn out_of_bounds(message: impl Into<String>) -> PyErr {
    OutOfBoundsError::new_err((message.into(), "pass an index below the number of ranges"))
}

/// Returns the exception for an object that another thread is using.
pub fn in_use(message: &str) -> PyErr {
    InUseError::new_err((message.to_owned(), "call it from one thread at a time"))
}

/// Returns the exception for a call that the operating system rejected.
pub fn store_io(message: String, remedy: &str) -> PyErr {
    StoreIOError::new_err((message, remedy.to_owned()))
}

/// The texts of the error for a call on a closed object of one kind: the failure, and how to create a new
/// object.
#[derive(Clone, Copy)]
pub struct Handle {
    ended: &'static str,
    remedy: &'static str,
}

pub const LEASE: Handle =
    Handle { ended: "the lease has ended", remedy: "create a new lease with store.lease(page)" };
pub const PIN: Handle =
    Handle { ended: "the pin has ended", remedy: "create a new pin with store.pin(page)" };
pub const LIVE_VIEW: Handle =
    Handle { ended: "the view is closed", remedy: "create a new view with store.view()" };
pub const VIEW: Handle =
    Handle { ended: "the view is closed", remedy: "open a new view with remanent.View(path)" };
pub const STORE: Handle =
    Handle { ended: "the store is closed", remedy: "open it again with remanent.Store(path)" };
pub const FOLLOWER: Handle = Handle {
    ended: "the follower is closed",
    remedy: "open a new follower with remanent.Follower(path, follower.position)",
};
pub const CHANGE_STREAM: Handle =
    Handle { ended: "the stream of changes is closed", remedy: "create a new stream with store.changes()" };

impl Handle {
    /// Returns the exception for a call after the object was closed.
    pub fn closed(self, py: Python<'_>, path: Option<&str>) -> PyErr {
        own(py, "ClosedError", self.ended, self.remedy, path)
    }
}

/// Returns an exception of the binding itself, for conditions that the engine does not know.
pub fn own(py: Python<'_>, class: &str, message: &str, remedy: &str, path: Option<&str>) -> PyErr {
    let made = || {
        let fields = PyDict::new(py);
        fields.set_item("remedy", remedy)?;
        fields.set_item("path", path)?;
        let raised = py.import("remanent._store.errors")?.getattr(class)?.call((message,), Some(&fields))?;
        Ok::<PyErr, PyErr>(PyErr::from_value(raised))
    };
    made().unwrap_or_else(|failure| failure)
}

/// Conversion of engine results to Python results.
pub trait OrRaise<T> {
    /// Raises the exception for the error.
    fn or_raise(self, py: Python<'_>, path: Option<&str>) -> PyResult<T>;

    /// Raises the exception for the error of a call on an object that may be closed.
    fn or_raise_of(self, py: Python<'_>, path: Option<&str>, handle: Handle) -> PyResult<T>;
}

impl<T> OrRaise<T> for remanent::Result<T> {
    fn or_raise(self, py: Python<'_>, path: Option<&str>) -> PyResult<T> {
        self.map_err(|error| to_py(py, &error, path))
    }

    fn or_raise_of(self, py: Python<'_>, path: Option<&str>, handle: Handle) -> PyResult<T> {
        self.map_err(|error| match error {
            Error::Closed => handle.closed(py, path),
            error => to_py(py, &error, path),
        })
    }
}
