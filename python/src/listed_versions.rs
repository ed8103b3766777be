//! Lists the versions in a directory.

use std::path::PathBuf;

use pyo3::prelude::*;
use remanent_tools::Failure;

use crate::errors::own;

/// A version: its Lsn, step, name, note, time in seconds since 1970, bytes, and the Lsn of each rank.
pub type ListedVersion =
    (u64, Option<u64>, Option<String>, Option<String>, Option<f64>, Option<u64>, Vec<u64>);

/// Returns the versions in the directory of a store, or of a run with several ranks, oldest first.
///
/// # Errors
/// `NoStoreError` if there is no store or run, `DamagedError` for damaged files, and `StoreIOError` for errors of the
/// system.
pub fn list(py: Python<'_>, path: PathBuf) -> PyResult<Vec<ListedVersion>> {
    let has_store = path.join("STORE").exists() || path.join("points").is_dir();
    let shown = path.display().to_string();
    let found = py.detach(|| remanent_tools::versions(&path)).map_err(|failure| {
        let (class, message, remedy) = match failure {
            Failure::Damage(message) => ("DamagedError", message, "run `remanent verify` to list all damage"),
            Failure::Environment(message) if !has_store => {
                ("NoStoreError", message, "use the directory to which the versions were saved")
            }
            Failure::Environment(message) | Failure::Locked(message) => {
                ("StoreIOError", message, "allow this user to read the directory")
            }
            Failure::ClosedPipe => ("StoreIOError", "a pipe was closed".to_owned(), "try again"),
        };
        own(py, class, &message, remedy, Some(&shown))
    })?;
    let seconds = |ms: u64| ms as f64 / 1000.0;
    let listed = found.into_iter().map(|each| {
        let created = each.created_unix_ms.map(seconds);
        (each.lsn, each.step, each.name, each.note, created, each.bytes, each.ranks)
    });
    Ok(listed.collect())
}
