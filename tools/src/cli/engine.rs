//! Functions that open stores with the engine, query the engine about a store, and convert its errors to failures.

use std::collections::BTreeSet;
use std::path::Path;

use remanent::error::FileName;
use remanent::options::Create;
use remanent::{Error, Options, Retention, Store};

use crate::cli::exit::Failure;

/// Opens a store for writing. The options keep all snapshots and the whole log, so that every batch can be restored.
pub fn open(dir: &Path, create: Create) -> Result<Store, Failure> {
    let options = Options::new()
        .create(create)
        .retention(Retention::new().snapshots_kept(usize::MAX).log_kept(u64::MAX));
    options.open(dir).map_err(engine_failure)
}

/// Returns the files that an open or a prune would remove because they are not needed. Returns an empty set if the
/// engine cannot open the store, because all files of a damaged store may be evidence.
pub fn unneeded(dir: &Path) -> BTreeSet<FileName> {
    let pruned = Store::would_prune_at(dir, &Retention::default().names_only(true));
    pruned.map(|pruned| pruned.files.into_iter().map(|(file, _)| file).collect()).unwrap_or_default()
}

/// Converts an error of the engine to a failure with the matching exit code.
pub fn engine_failure(error: Error) -> Failure {
    match &error {
        Error::Locked { .. } => Failure::Locked(error.to_string()),
        Error::Damaged(_) => Failure::Damage(error.to_string()),
        Error::Poisoned(cause) if matches!(**cause, Error::Damaged(_)) => Failure::Damage(error.to_string()),
        _ => Failure::Environment(error.to_string()),
    }
}
