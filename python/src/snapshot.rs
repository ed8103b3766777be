//! Snapshots, and the result of a prune, as Python objects.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use remanent::snapshot::PruneReport;
use remanent::{Metadata, Store};

use crate::values::{REPORT, ROOT, metadata_to_py};

/// A snapshot of a store. Returned by `Store.snapshot` and `Store.snapshots`.
#[pyclass(frozen, eq, module = "remanent")]
#[derive(Clone, PartialEq)]
pub struct SnapshotInfo {
    /// The number of the snapshot.
    #[pyo3(get)]
    pub id: u64,
    /// The name, or None. A name keeps the snapshot until the name is passed to `prune` as `give_up`.
    #[pyo3(get)]
    pub name: Option<String>,
    /// The time when the snapshot was written, in milliseconds since 1970.
    #[pyo3(get)]
    pub created_unix_ms: u64,
    /// The Lsn after which an open replays the log.
    #[pyo3(get)]
    pub redo: u64,
    /// The Lsn of the batch whose state the snapshot contains.
    #[pyo3(get)]
    pub end: u64,
    /// The number of pages in the snapshot.
    #[pyo3(get)]
    pub pages: u64,
    /// The total bytes of all images that the snapshot names.
    #[pyo3(get)]
    pub bytes: u64,
    /// The bytes of the images that this snapshot wrote. All other images are shared with older snapshots.
    #[pyo3(get)]
    pub bytes_written: u64,
    /// Whether the snapshot was read back from the disk and verified.
    #[pyo3(get)]
    pub verified: bool,
    root: Arc<Metadata>,
}

impl From<&remanent::snapshot::SnapshotInfo> for SnapshotInfo {
    fn from(info: &remanent::snapshot::SnapshotInfo) -> Self {
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
            root: info.root.clone(),
        }
    }
}

#[pymethods]
impl SnapshotInfo {
    /// A read-only copy of the root as of batch `end`.
    #[getter]
    fn root<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        ROOT.freeze(metadata_to_py(py, &self.root)?)
    }

    /// Returns an HTML table for notebooks.
    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("remanent._store.html")?.call_method1("snapshot", (slf,))
    }

    fn __repr__(&self) -> String {
        let name = self.name.as_ref().map_or_else(String::new, |name| format!(", name={name:?}"));
        format!(
            "SnapshotInfo(id={}{name}, end={}, pages={}, bytes={})",
            self.id, self.end, self.pages, self.bytes
        )
    }
}

/// The snapshots and files that a prune removed or, with `dry_run`, would remove. Returned by `Store.prune`.
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
    /// The removed snapshots.
    #[getter]
    fn snapshots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.snapshots.iter().cloned())
    }

    /// The numbers of snapshots that no rule keeps but that are in use by a reader.
    #[getter]
    fn held<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.held.iter().copied())
    }

    /// The removed files as (path, length in bytes) pairs.
    #[getter]
    fn files<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        REPORT.freeze_list(py, self.files.iter().cloned())
    }

    /// The total length of the removed files in bytes.
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

/// Returns retention rules. A rule that the caller does not pass is that of the store.
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
