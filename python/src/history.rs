//! Snapshots of a store, changes of a page, and restores and forks of earlier states.

use std::path::{Path, PathBuf};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use remanent::{Error, Retention, SnapshotId, SnapshotOptions, StatePoint, Store};

use crate::blame::PyValueChange;
use crate::gate::{self, Gate};
use crate::page_name::{PageName, state_point};
use crate::snapshot::{Pruned, SnapshotInfo};

pub fn here(store: &Store) -> Result<PathBuf, Error> {
    Ok(store.directory()?.expect("a store that was opened by its path is in a file system"))
}

/// Returns the changes of a page's bytes up to the newest state.
pub fn blame(
    gate: &Gate,
    page: &Bound<'_, PyAny>,
    offset: u64,
    length: Option<u64>,
) -> PyResult<Vec<PyValueChange>> {
    let name = PageName::take(page)?;
    // The store stays open meanwhile, so no other process writes to the directory.
    gate.call(page.py(), |store| {
        crate::blame::blame(&Store::open_read_only(here(store)?)?, &name, offset, length)
    })
}

/// Finds the first bad state. The search ends at the newest state if `bad` is `None`.
pub fn bisect<'py>(
    gate: &Gate,
    is_good: &Bound<'py, PyAny>,
    good: &Bound<'py, PyAny>,
    bad: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = is_good.py();
    let bounds = PyDict::new(py);
    bounds.set_item("good", good)?;
    bounds.set_item("bad", bad)?;
    let directory = gate.inspect(py, |store| Ok(here(store)?.into_os_string()))?;
    let bisect = py.import("remanent._store.bisect")?.getattr("bisect")?;
    bisect.call((directory, is_good), Some(&bounds))
}

pub fn snapshot(
    py: Python<'_>,
    gate: &Gate,
    name: Option<String>,
    exact: bool,
    verify: bool,
) -> PyResult<SnapshotInfo> {
    let mut options = SnapshotOptions::new();
    if let Some(name) = name {
        options = options.name(name);
    }
    if exact {
        options = options.exact();
    }
    if !verify {
        options = options.only_published();
    }
    gate.call(py, |store| store.snapshot_with(options)).map(|info| SnapshotInfo::from(&info))
}

/// Restores all pages and the root to an earlier state. Returns the Lsn of the restoring batch.
pub fn restore(py: Python<'_>, gate: &Gate, point: &StatePoint) -> PyResult<u64> {
    gate.call(py, |store| store.restore(point).map(|position| position.lsn.0))
}

/// The longest part of a wait for which a call stays in the store. A close waits for that part.
const WAIT_PART: Duration = Duration::from_secs(1);

/// Waits until the archive keeps a named snapshot. Returns whether it does.
pub fn wait_archived(
    py: Python<'_>,
    gate: &Gate,
    snapshot: SnapshotId,
    timeout: Option<Duration>,
) -> PyResult<bool> {
    gate::wait(py, timeout, Some(&gate.path), |slice| {
        gate.enter()?.wait_archived(snapshot, Some(slice.min(WAIT_PART)))
    })
}

/// Creates a store whose history begins at an earlier state, and returns its id.
pub fn fork(py: Python<'_>, gate: &Gate, path: &Path, at: &Bound<'_, PyAny>) -> PyResult<String> {
    let point = state_point(at)?;
    gate.call(py, |store| store.fork(path, &point).map(|id| id.to_string()))
}

/// Removes the snapshots and files that no rule keeps. With `dry_run`, only returns them.
pub fn prune(
    py: Python<'_>,
    gate: &Gate,
    dry_run: bool,
    rules: impl FnOnce(&Store) -> Retention + Send,
) -> PyResult<Pruned> {
    let pruned = gate.call(py, |store| {
        let rules = rules(store);
        if dry_run { store.would_prune(&rules) } else { store.prune(&rules) }
    })?;
    Ok(Pruned::from(&pruned))
}
