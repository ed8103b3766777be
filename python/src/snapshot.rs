//! Snapshots that are kept, and what a retention removes, as a caller sees them.

use std::time::Duration;

use pyo3::prelude::*;
use remanent::{PruneReport, Store};

use crate::values::REPORT;

/// A snapshot that is kept.
#[pyclass(frozen, get_all, eq, module = "remanent")]
#[derive(Clone, PartialEq)]
pub struct SnapshotInfo {
    /// The snapshot's number.
    pub id: u64,
    /// Its name, which keeps it until it is given up; None if it has none.
    pub name: Option<String>,
    /// When it was written, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Replay starts after this batch.
    pub redo: u64,
    /// The batch whose state it is.
    pub end: u64,
    /// The number of pages.
    pub pages: u64,
    /// Bytes of the pages' images.
    pub bytes: u64,
    /// Bytes of the images that it wrote itself; it shares the others with older ones.
    pub bytes_written: u64,
    /// Whether it was read back past the cache.
    pub verified: bool,
}

impl From<&remanent::SnapshotInfo> for SnapshotInfo {
    fn from(info: &remanent::SnapshotInfo) -> Self {
        Self {
            id: info.id.0,
            name: info.name.clone(),
            created_unix_ms: info.created_unix_ms,
            redo: info.redo.0,
            end: info.end.0,
            pages: info.pages,
            bytes: info.bytes,
            bytes_written: info.bytes_written,
            verified: info.verified,
        }
    }
}

#[pymethods]
impl SnapshotInfo {
    /// A small table for notebooks.
    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("remanent._html")?.call_method1("snapshot", (slf,))
    }

    fn __repr__(&self) -> String {
        let name = self.name.as_ref().map_or_else(String::new, |name| format!(", name={name:?}"));
        format!(
            "SnapshotInfo(id={}{name}, end={}, pages={}, bytes={})",
            self.id, self.end, self.pages, self.bytes
        )
    }
}

/// What a prune removed, or would remove.
#[pyclass(frozen, module = "remanent")]
pub struct Pruned {
    snapshots: Vec<SnapshotInfo>,
    held: Vec<u64>,
    files: Vec<(String, u64)>,
    bytes: u64,
}

impl From<&PruneReport> for Pruned {
    fn from(report: &PruneReport) -> Self {
        Self {
            snapshots: report.snapshots.iter().map(SnapshotInfo::from).collect(),
            held: report.held.iter().map(|id| id.0).collect(),
            files: report.files.iter().map(|(file, len)| (file.to_string(), *len)).collect(),
            bytes: report.bytes(),
        }
    }
}

#[pymethods]
impl Pruned {
    /// The snapshots that go.
    #[getter]
    fn snapshots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.snapshots.iter().cloned())
    }

    /// The numbers of snapshots that no rule keeps, but a reader does.
    #[getter]
    fn held<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.held.iter().copied())
    }

    /// The files that go, with their lengths in bytes.
    #[getter]
    fn files<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.files.iter().cloned())
    }

    /// Bytes of all files that go.
    #[getter]
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn __repr__(&self) -> String {
        format!(
            "Pruned(snapshots={}, files={}, bytes={})",
            self.snapshots.len(),
            self.files.len(),
            self.bytes
        )
    }
}

/// What a retention keeps, with the store's own rules where nothing is said.
pub fn retention(
    store: &Store,
    snapshots_kept: Option<usize>,
    snapshots_kept_for: Option<Duration>,
    log_kept: Option<u64>,
    give_up: &[String],
    names_only: bool,
) -> remanent::Retention {
    let mut rules = store.retention();
    if let Some(count) = snapshots_kept {
        rules = rules.snapshots_kept(count);
    }
    if let Some(age) = snapshots_kept_for {
        rules = rules.snapshots_kept_for(age);
    }
    if let Some(bytes) = log_kept {
        rules = rules.log_kept(bytes);
    }
    give_up.iter().fold(rules, |rules, name| rules.give_up(name)).names_only(names_only)
}
