//! Parses the names that callers pass for pages (ids or keys) and for earlier states.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyIterator, PyString};
use remanent::store::ReadPages;
use remanent::{Error, Key, PageId, PageInfo, Result, StatePoint, Store};

use crate::arguments;
use crate::errors::{OrRaise, invalid, invalid_type};
use crate::page_info::Info;

const LOOK_UP: &str = "look pages up with info(key) or pages()";
const STATES: &str = "list the states with snapshots()";

/// A page as named by a caller: by id, by key, or by the result of an earlier lookup.
pub enum PageName {
    Id(PageId),
    Key(Key),
}

impl PageName {
    /// Parses the name of a page.
    ///
    /// # Errors
    /// `TypeError` or `InvalidError` if the object is not the name of a page.
    pub fn take(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(info) = object.cast::<Info>() {
            return Ok(Self::Id(info.get().0.page));
        }
        if object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>() {
            return key(object).map(Self::Key);
        }
        match object.extract::<u64>() {
            Ok(id) => Ok(Self::Id(PageId(id))),
            Err(_) if object.is_instance_of::<PyInt>() => {
                Err(invalid(format!("a page's id must be 0 to 2^64 - 1, not {object}"), LOOK_UP))
            }
            Err(_) => Err(invalid_type(
                format!(
                    "a page must be an id (int), a key (str or bytes) or a PageInfo, not {}",
                    object.get_type().name()?
                ),
                LOOK_UP,
            )),
        }
    }

    pub fn find(&self, pages: &dyn ReadPages) -> Result<PageInfo> {
        match self {
            Self::Id(page) => pages.page(*page),
            Self::Key(key) => pages.page_by_key(key.as_bytes()),
        }
    }
}

pub fn key(object: &Bound<'_, PyAny>) -> PyResult<Key> {
    let key = if let Ok(text) = object.cast::<PyString>() {
        Key::new(text.to_str()?)
    } else if let Ok(bytes) = object.cast::<PyBytes>() {
        Key::new(bytes.as_bytes())
    } else {
        let kind = object.get_type().name()?;
        return Err(invalid_type(format!("a key must be str or bytes, not {kind}"), "pass str or bytes"));
    };
    key.map_err(Error::from).or_raise(object.py(), None)
}

/// Parses a state: an Lsn, text in one of the three forms, or a snapshot.
pub fn state_point(object: &Bound<'_, PyAny>) -> PyResult<StatePoint> {
    if let Ok(text) = object.cast::<PyString>() {
        return text.to_str()?.parse().or_raise(object.py(), None);
    }
    if let Ok(snapshot) = object.cast::<crate::snapshot::SnapshotInfo>() {
        return Ok(StatePoint::Snapshot(remanent::SnapshotId(snapshot.get().id)));
    }
    match object.extract::<u64>() {
        Ok(lsn) => Ok(StatePoint::Lsn(remanent::Lsn(lsn))),
        Err(_) if object.is_instance_of::<PyInt>() => {
            Err(invalid(format!("an Lsn must be 0 to 2^64 - 1, not {object}"), STATES))
        }
        Err(_) => Err(invalid_type(
            format!(
                "expected an Lsn (int), \"lsn:N\", \"snapshot:N\", the name of a snapshot or a SnapshotInfo, found {}",
                object.get_type().name()?
            ),
            STATES,
        )),
    }
}

/// Returns the state of a snapshot, given by its number or its `SnapshotInfo`.
pub fn snapshot_point(object: &Bound<'_, PyAny>) -> PyResult<StatePoint> {
    snapshot_id(object).map(StatePoint::Snapshot)
}

/// Returns the number of a snapshot from an int or a `SnapshotInfo`.
pub fn snapshot_id(object: &Bound<'_, PyAny>) -> PyResult<remanent::SnapshotId> {
    let id = match object.cast::<crate::snapshot::SnapshotInfo>() {
        Ok(snapshot) => snapshot.get().id,
        Err(_) => arguments::value(object, "snapshot", "the number of a snapshot (int) or a SnapshotInfo")?,
    };
    Ok(remanent::SnapshotId(id))
}

pub fn prefix_of(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes().to_vec());
    }
    match object.cast::<PyBytes>() {
        Ok(bytes) => Ok(bytes.as_bytes().to_vec()),
        Err(_) => Err(invalid_type("a prefix must be str or bytes", "pass str or bytes")),
    }
}

/// Returns an iterator over the pages that a caller names.
///
/// # Errors
/// `TypeError` if `pages` is not iterable, or is the key of a single page, whose iteration would yield
/// letters.
pub fn each_page<'py>(pages: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyIterator>> {
    if pages.is_instance_of::<PyString>() || pages.is_instance_of::<PyBytes>() {
        let kind = pages.get_type().name()?;
        return Err(invalid_type(
            format!("pages must be an iterable, such as a list, not a single {kind}"),
            "pass [page]",
        ));
    }
    iterable(pages, "pages must be an iterable, such as a list")
}

/// Returns an object's iterator.
///
/// # Errors
/// `InvalidTypeError` with `message` if the object is not iterable, and errors of the object's own code.
pub fn iterable<'py>(object: &Bound<'py, PyAny>, message: &str) -> PyResult<Bound<'py, PyIterator>> {
    object.try_iter().map_err(|error| {
        match error.is_instance_of::<pyo3::exceptions::PyTypeError>(object.py()) {
            true => invalid_type(message, "pass a list"),
            false => error,
        }
    })
}

/// Parses the names of pages.
///
/// # Errors
/// `TypeError`, `ValueError` or `InvalidError` if an object is not the name of a page.
pub fn page_names(pages: &Bound<'_, PyAny>) -> PyResult<Vec<PageName>> {
    each_page(pages)?.map(|page| PageName::take(&page?)).collect()
}

pub fn found(store: &Store, names: &[PageName]) -> Result<Vec<PageId>> {
    names.iter().map(|name| Ok(name.find(store)?.page)).collect()
}
