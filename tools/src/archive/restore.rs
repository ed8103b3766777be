//! `remanent restore --from` makes a store from an archive.

use std::path::Path;
use std::{fs, io};

use remanent_archive::directory::RestoreTarget;
use remanent_archive::line::{RestoredEnd, probe, status};
use remanent_archive::mirror;

use super::watched_bucket::{WatchedBucket, local_failure};
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::read::store_dir::StoreDir;
use crate::read::writer_lock;

/// Restores the end of the archive at `url` into `dir`, which need not exist.
pub fn restore(dir: &Path, url: &str, is_json: bool, out: &mut Output) -> Outcome {
    let bucket = WatchedBucket::open(url)?;
    let failed = |error| local_failure(Some(dir), &error);
    // These errors name the directory.
    let refused = |error: io::Error| local_failure(None, &error);
    // All that can be refused is refused before the archive is claimed, which ends the term of its writer.
    RestoreTarget::check(dir).map_err(refused)?;
    let found = bucket.run(Some(dir), status(bucket.archive()))?;
    let data = found.manifest.as_ref().map_or((0, 0), |newest| (newest.data_objects, newest.data_bytes));
    fs::create_dir_all(dir).map_err(failed)?;
    check_space(dir, data.1)?;
    let lock = writer_lock::acquire(dir)?;
    let target = RestoreTarget::open(dir, lock).map_err(refused)?;
    bucket.show_progress(progress::bar(found.line_objects() + data.0, "restoring objects"));
    let end = bucket.run(Some(dir), async {
        probe(bucket.archive(), found.store).await?;
        mirror::restore(bucket.archive(), &target).await
    })?;
    report(dir, &end, is_json, out)?;
    Ok(Ending::Fine)
}

/// Checks that the files of the snapshot fit on the disk. The log needs more.
fn check_space(dir: &Path, needed: u64) -> Result<(), Failure> {
    let failed = |error| local_failure(Some(dir), &error);
    let system = rustix::fs::statvfs(dir).map_err(|errno| failed(errno.into()))?;
    // The files of an unfinished restore are removed.
    let left: u64 = StoreDir::open(dir)?.files().map_err(failed)?.iter().map(|(.., len)| len).sum();
    let free = system.f_bavail.saturating_mul(system.f_frsize).saturating_add(left);
    if free >= needed {
        return Ok(());
    }
    Err(Failure::Environment(format!(
        "{}: the restore needs more than {needed} bytes, and {free} bytes are free; free space, or use another directory",
        dir.display()
    )))
}

fn report(dir: &Path, end: &RestoredEnd, is_json: bool, out: &mut Output) -> Result<(), Failure> {
    let RestoredEnd { store, batch, fence, .. } = end;
    if is_json {
        return out.line(object! { "store": store.to_string(), "lsn": batch.lsn.0, "term": fence });
    }
    out.line(format_args!(
        "restored store {store} into {}, up to lsn {}; this directory continues the archive",
        dir.display(),
        batch.lsn
    ))
}
