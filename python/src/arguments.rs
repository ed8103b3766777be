//! Extraction of arguments: the expected type of each argument, and the error for a wrong value.
//!
//! PyO3's own extraction raises a plain `TypeError` or `OverflowError`, which states neither the argument nor
//! the expected value. Every argument that is not an arbitrary object uses a function of this module in
//! `from_py_with`.

use std::path::PathBuf;

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::batch::Batch;
use crate::errors::{invalid, invalid_type};
use crate::follower::PyFollowedBatch;
use crate::working_copy::PyWorkingCopy;

pub const UNSIGNED: &str = "an int from 0 to 2^64 - 1";
pub const UNSIGNED_OR_NONE: &str = "an int from 0 to 2^64 - 1, or None";
const INDEX: &str = "an int";
pub const SECONDS: &str = "a number of seconds";
pub const SECONDS_OR_NONE: &str = "a number of seconds, or None";
pub const TEXT: &str = "a str";
pub const TEXT_OR_NONE: &str = "a str or None";
pub const TEXTS: &str = "a list of str";
pub const BOOL: &str = "True or False";
const BOOL_OR_NONE: &str = "True, False or None";
const PATH: &str = "a path (str or os.PathLike)";
const PATH_OR_NONE: &str = "a path (str or os.PathLike), or None";
const SHAPE_OR_NONE: &str = "a list of lengths (int), or None";
const RANGES_OR_NONE: &str = "a list of pairs of int, or None";
pub const DICT: &str = "a dict";
pub const DICT_OR_NONE: &str = "a dict or None";
const BYTES: &str = "bytes";

/// The largest length of a value that an error repeats, in bytes.
const SHOWN_MAX: usize = 60;

fn take<'a, 'py, T>(object: &'a Bound<'py, PyAny>, name: &str, expected: &str) -> PyResult<T>
where
    T: FromPyObject<'a, 'py>,
{
    object.extract().map_err(|error: T::Error| refused(object, name, expected, error.into()))
}

/// Returns the error for an argument that could not be extracted. An error raised by the object's own code is
/// returned unchanged.
fn refused(object: &Bound<'_, PyAny>, name: &str, expected: &str, error: PyErr) -> PyErr {
    let py = object.py();
    let remedy = || format!("pass {expected}");
    if error.is_instance_of::<PyOverflowError>(py) || error.is_instance_of::<PyValueError>(py) {
        let found = object.repr().map_or_else(|_| "this".to_owned(), |text| text.to_string());
        let found = if found.len() > SHOWN_MAX { "a value outside this range".to_owned() } else { found };
        return invalid(format!("{name} must be {expected}, not {found}"), remedy());
    }
    if error.is_instance_of::<PyTypeError>(py) {
        let kind = object.get_type().name().map_or_else(|_| "this".to_owned(), |name| name.to_string());
        return invalid_type(format!("{name} must be {expected}, not {kind}"), remedy());
    }
    error
}

/// Defines an extraction function for each argument. An entry contains the function's name, the argument's
/// name in errors if that differs, its type, and the description of the expected value.
macro_rules! arguments {
    ($($function:ident $(as $name:literal)?: $type:ty, $expected:ident;)*) => { $(
        pub fn $function(object: &Bound<'_, PyAny>) -> PyResult<$type> {
            take(object, arguments!(@name $function $($name)?), $expected)
        }
    )* };
    (@name $function:ident) => { stringify!($function) };
    (@name $function:ident $name:literal) => { $name };
}

/// Defines extraction functions for arguments that borrow from the object.
macro_rules! borrowed {
    ($($function:ident $(as $name:literal)?: $expected:ident;)*) => { $(
        pub fn $function<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
            take(object, arguments!(@name $function $($name)?), $expected)
        }
    )* };
}

macro_rules! borrowed_or_none {
    ($($function:ident as $name:literal;)*) => { $(
        pub fn $function<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Option<&'a str>> {
            take(object, $name, TEXT_OR_NONE)
        }
    )* };
}

/// Defines extraction functions for arguments that are objects of one class.
macro_rules! objects {
    ($($function:ident $(as $name:literal)?: $type:ty, $expected:expr;)*) => { $(
        pub fn $function<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, $type>> {
            let cast = object.cast::<$type>().cloned();
            let name = arguments!(@name $function $($name)?);
            cast.map_err(|error| refused(object, name, $expected, error.into()))
        }
    )* };
}

arguments! {
    offset: u64, UNSIGNED;
    start: u64, UNSIGNED;
    length: u64, UNSIGNED;
    optional_length as "length": Option<u64>, UNSIGNED_OR_NONE;
    width: usize, UNSIGNED;
    epoch: u64, UNSIGNED;
    page_id as "page": u64, UNSIGNED;
    stream: u64, UNSIGNED;
    number as "index": isize, INDEX;
    good: u64, UNSIGNED;
    bad: u64, UNSIGNED;
    lsn: u64, UNSIGNED;
    optional_lsn as "lsn": Option<u64>, UNSIGNED_OR_NONE;
    logged_max: Option<u64>, UNSIGNED_OR_NONE;
    timeout: Option<f64>, SECONDS_OR_NONE;
    seconds as "timeout": f64, SECONDS;
    shape: Option<Vec<usize>>, SHAPE_OR_NONE;
    ranges: Option<Vec<(u64, u64)>>, RANGES_OR_NONE;
    optional_name as "name": Option<String>, TEXT_OR_NONE;
    at_commit: bool, BOOL;
    zeros: bool, BOOL;
    load: bool, BOOL;
    exact: bool, BOOL;
    verify: bool, BOOL;
    names_only: bool, BOOL;
    dry_run: bool, BOOL;
    is_good: Option<bool>, BOOL_OR_NONE;
    progress: Option<bool>, BOOL_OR_NONE;
    give_up: Vec<String>, TEXTS;
    names: Vec<String>, TEXTS;
    path: PathBuf, PATH;
    optional_path as "path": Option<PathBuf>, PATH_OR_NONE;
    optional_snapshots_kept as "snapshots_kept": Option<usize>, UNSIGNED_OR_NONE;
    optional_snapshots_kept_for as "snapshots_kept_for": Option<f64>, SECONDS_OR_NONE;
    optional_log_kept as "log_kept": Option<u64>, UNSIGNED_OR_NONE;
}

borrowed! {
    ack: TEXT;
    place: TEXT;
    device: TEXT;
    shadow: TEXT;
    name: TEXT;
    text: TEXT;
    follow_start as "start": TEXT;
}

borrowed_or_none! {
    optional_ack as "ack";
    optional_note as "note";
    optional_dtype as "dtype";
}

objects! {
    batch: Batch, "a Batch of this store";
    followed_batch as "batch": PyFollowedBatch, "a FollowedBatch";
    copy: PyWorkingCopy, "a WorkingCopy";
    pattern: PyBytes, BYTES;
    pages as "pages": PyDict, DICT;
    archive as "archive": PyDict, DICT;
}

pub fn metadata<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
    optional_dict(object, "metadata")
}

fn optional_dict<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyDict>>> {
    if object.is_none() {
        return Ok(None);
    }
    let dict = object.cast::<PyDict>().cloned();
    dict.map(Some).map_err(|error| refused(object, name, DICT_OR_NONE, error.into()))
}

/// Extracts a value from inside a container. Errors refer to the value as `name`.
pub fn value<'a, 'py, T>(object: &'a Bound<'py, PyAny>, name: &str, expected: &str) -> PyResult<T>
where
    T: FromPyObject<'a, 'py>,
{
    take(object, name, expected)
}
