//! How commands open a store with the engine, ask it about one that is only read, and map its errors.

use std::collections::BTreeSet;
use std::path::Path;

use remanent::error::FileName;
use remanent::options::Create;
use remanent::{Error, Options, Retention, Store};

use crate::cli::exit::Failure;

/// Opens a store to bring history into it, or to change it. All snapshots and all of the log are kept, so
/// that every batch can be returned to.
pub fn open(dir: &Path, create: Create) -> Result<Store, Failure> {
    let options = Options::default().create(create).snapshots_kept(usize::MAX).log_kept(u64::MAX);
    Store::open(dir, options).map_err(engine_failure)
}

/// The files that nothing needs any more, which an open or a prune removes. There are none if the engine
/// refuses the store: all of its files are evidence then.
pub fn unneeded(dir: &Path) -> BTreeSet<FileName> {
    let pruned = Store::would_prune_at(dir, &Retention::default().names_only(true));
    pruned.map(|pruned| pruned.files.into_iter().map(|(file, _)| file).collect()).unwrap_or_default()
}

/// The failure of the command for an error of the engine.
pub fn engine_failure(error: Error) -> Failure {
    match &error {
        Error::Locked { .. } => Failure::Locked(error.to_string()),
        Error::Damaged(_) => Failure::Damage(error.to_string()),
        Error::Poisoned(cause) if matches!(**cause, Error::Damaged(_)) => Failure::Damage(error.to_string()),
        _ => Failure::Environment(error.to_string()),
    }
}
