//! Functions that open stores with the engine, query the engine about a store, and convert its errors to failures.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;
use remanent::error::FileName;
use remanent::options::Create;
use remanent::{Error, Options, Retention, Store, SurveyedStore};
use remanent_format::state::follow::Resolution;
use remanent_format::state::survey::Survey;

use crate::cli::exit::Failure;

/// Opens a store for writing. The options keep all snapshots and the whole log, so that every batch can be restored.
pub fn open(dir: &Path, create: Create) -> Result<Store, Failure> {
    let options = Options::new()
        .create(create)
        .retention(Retention::new().snapshots_kept(usize::MAX).log_kept(u64::MAX));
    options.open(dir).map_err(engine_failure)
}

/// Returns the files that an open or a prune would remove because they are not needed. `newest` is the newest state of
/// `survey`, or `None` if the engine must search for a state that can be opened. `holder` is the process that had the
/// store open before the survey. Returns an empty set if the engine cannot open the store, because all files of a
/// damaged store may be evidence.
pub fn unneeded(
    dir: &Path,
    survey: &Survey,
    newest: Option<&Resolution>,
    holder: Option<u32>,
) -> BTreeSet<FileName> {
    let disk: Arc<dyn Disk> = Arc::new(DirDisk::new(dir));
    let retention = Retention::default().names_only(true);
    let pruned = match newest {
        Some(newest) => {
            let store = SurveyedStore { survey, newest, is_locked: holder.is_some() };
            Store::would_prune_surveyed(&disk, &store, &retention)
        }
        None => Store::would_prune_on(&disk, &retention),
    };
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
