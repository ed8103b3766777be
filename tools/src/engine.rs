//! How commands that change a store open it, and what the engine's errors mean for them.

use std::path::Path;

use remanent::{Create, Error, Options, Store};

use crate::exit::Failure;

/// Opens a store to bring history into it, or to change it. All snapshots and all of the log are kept, so that
/// every batch can be returned to.
pub fn open(dir: &Path, create: Create) -> Result<Store, Failure> {
    let options = Options::default().create(create).snapshots_kept(usize::MAX).log_kept(u64::MAX);
    Store::open(dir, options).map_err(engine_failure)
}

/// What an engine's error means for the command.
pub fn engine_failure(error: Error) -> Failure {
    match &error {
        Error::Locked { .. } => Failure::Locked(error.to_string()),
        Error::Damaged(_) => Failure::Damage(error.to_string()),
        Error::Poisoned(cause) if matches!(**cause, Error::Damaged(_)) => Failure::Damage(error.to_string()),
        _ => Failure::Environment(error.to_string()),
    }
}
