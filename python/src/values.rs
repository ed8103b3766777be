//! Converts metadata and root entries between the engine's typed values and plain Python values.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use remanent::{Metadata, Value};

use crate::errors::{invalid, invalid_type};

/// The nesting limit of lists and dicts, which is that of the format. The limit also ends the conversion of a
/// value that contains itself.
const DEPTH_MAX: usize = 32;

/// The description of a property whose value is a copy of engine state. Changes to the copy would be lost, so
/// the copy is read-only.
#[derive(Clone, Copy)]
pub struct ReadOnly {
    what: &'static str,
    instead: &'static str,
}

pub const ROOT: ReadOnly =
    ReadOnly { what: "the root", instead: "use batch.set_root(name, value) or batch.remove_root(name)" };
pub const METADATA: ReadOnly = ReadOnly {
    what: "a page's metadata",
    instead: "use batch.set_metadata(page, name, value) or batch.remove_metadata(page, name)",
};
pub const REPORT: ReadOnly = ReadOnly { what: "this report", instead: "copy it with dict() or list() first" };

impl ReadOnly {
    /// Converts a dict or list, with the dicts and lists inside it, to a class that raises an error on
    /// changes.
    pub fn freeze<'py, T>(self, copy: Bound<'py, T>) -> PyResult<Bound<'py, PyAny>> {
        let py = copy.py();
        static FREEZE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let freeze = FREEZE.get_or_try_init(py, || {
            Ok::<_, PyErr>(py.import("remanent._store.read_only")?.getattr("freeze")?.unbind())
        })?;
        freeze.bind(py).call1((copy.into_any(), self.what, self.instead))
    }

    /// Converts values to a list of a class that raises an error on changes.
    pub fn freeze_list<'py, T>(
        self,
        py: Python<'py>,
        values: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        T: IntoPyObject<'py>,
    {
        self.freeze(PyList::new(py, values)?)
    }
}

pub fn to_py<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
        Value::I64(value) => value.into_pyobject(py)?.into_any(),
        Value::U64(value) => value.into_pyobject(py)?.into_any(),
        Value::F64(value) => PyFloat::new(py, *value).into_any(),
        Value::String(value) => PyString::new(py, value).into_any(),
        Value::Bytes(value) => PyBytes::new(py, value).into_any(),
        Value::List(values) => {
            let list = PyList::empty(py);
            for value in values {
                list.append(to_py(py, value)?)?;
            }
            list.into_any()
        }
        Value::Map(entries) => metadata_to_py(py, entries)?.into_any(),
    })
}

pub fn metadata_to_py<'py>(py: Python<'py>, entries: &Metadata) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in entries {
        dict.set_item(name, to_py(py, value)?)?;
    }
    Ok(dict)
}

/// Converts a Python object to a value. Returns an error for an object whose type would not be restored.
pub fn from_py(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    value_from(object, DEPTH_MAX)
}

pub fn metadata_from_py(dict: &Bound<'_, PyDict>) -> PyResult<Metadata> {
    entries_from(dict, DEPTH_MAX)
}

fn entries_from(dict: &Bound<'_, PyDict>, depth_left: usize) -> PyResult<Metadata> {
    let mut entries = Metadata::new();
    // The items at this moment: while values are converted, the caller's code and other threads may change
    // the dict.
    for item in dict.items() {
        let (name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let name = name.cast::<PyString>().map_err(|_| {
            invalid_type(
                format!("metadata names must be str, not {}", type_name(&name)),
                "convert the names to str",
            )
        })?;
        entries.insert(name.to_str()?.to_owned(), value_from(&value, depth_left)?);
    }
    Ok(entries)
}

fn value_from(object: &Bound<'_, PyAny>, depth_left: usize) -> PyResult<Value> {
    let deeper = || {
        depth_left.checked_sub(1).ok_or_else(|| {
            invalid_type(
                format!("values must not be nested more than {DEPTH_MAX} levels deep"),
                "store the inner values separately",
            )
        })
    };
    if object.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(value) = object.cast::<PyBool>() {
        return Ok(Value::Bool(value.is_true()));
    }
    if object.is_instance_of::<PyInt>() || object.hasattr("__index__")? {
        if let Ok(value) = object.extract::<u64>() {
            return Ok(Value::U64(value));
        }
        return match object.extract::<i64>() {
            Ok(value) => Ok(Value::I64(value)),
            Err(_) => Err(invalid("the integer does not fit in 64 bits", "store it as str or bytes")),
        };
    }
    if let Ok(value) = object.cast::<PyFloat>() {
        return Ok(Value::F64(value.value()));
    }
    if let Ok(value) = object.cast::<PyString>() {
        return Ok(Value::String(value.to_str()?.to_owned()));
    }
    if let Ok(value) = object.cast::<PyBytes>() {
        return Ok(Value::Bytes(value.as_bytes().to_vec()));
    }
    if let Ok(value) = object.cast::<PyByteArray>() {
        return Ok(Value::Bytes(value.to_vec()));
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        return entries_from(dict, deeper()?).map(Value::Map);
    }
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        let depth_left = deeper()?;
        let values = object.try_iter()?.map(|value| value_from(&value?, depth_left));
        return values.collect::<PyResult<_>>().map(Value::List);
    }
    Err(invalid_type(
        format!(
            "metadata values must be None, bool, int, float, str, bytes, list or dict, not {}",
            type_name(object)
        ),
        "convert the value to one of these",
    ))
}

fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "this".to_owned(), |name| name.to_string())
}
