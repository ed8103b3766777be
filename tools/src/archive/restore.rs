//! `remanent restore --from` restores a store from an archive.

use std::path::{Path, PathBuf};
use std::{fs, io};

use remanent::error::FileName;
use remanent::{StatePoint, Store};
use remanent_archive::directory::RestoreTarget;
use remanent_archive::line::{RestoredEnd, Status, probe, status};
use remanent_archive::mirror;

use super::watched_bucket::{WatchedBucket, local_failure};
use crate::cli::engine::engine_failure;
use crate::cli::exit::{Ending, Failure, Outcome};
use crate::cli::json::object;
use crate::cli::output::Output;
use crate::cli::progress;
use crate::read::store_dir::StoreDir;
use crate::read::writer_lock;

/// Restores the end of the archive at `url` into `dir`, which need not exist. With `is_on_demand`, pages stay in the
/// archive until the store is opened with it.
pub fn restore(dir: &Path, url: &str, is_on_demand: bool, is_json: bool, out: &mut Output) -> Outcome {
    let bucket = WatchedBucket::open(url)?;
    let failed = |error| local_failure(Some(dir), &error);
    // All checks run before the archive is claimed, because a claim supersedes the current writer.
    let found = checked_status(dir, &bucket)?;
    fs::create_dir_all(dir).map_err(failed)?;
    let target = target_of(dir, &bucket, &found)?.url(url);
    let end = bucket.run(Some(dir), async {
        probe(bucket.archive(), found.store).await?;
        if is_on_demand {
            mirror::restore_on_demand(bucket.archive(), &target).await
        } else {
            mirror::restore(bucket.archive(), &target).await
        }
    })?;
    report(dir, &end, is_on_demand, is_json, out)?;
    Ok(Ending::Fine)
}

/// Restores the state `at` of the archive at `url` as a new store with its own id, whose history starts at this state.
/// Does not change the archive.
pub fn restore_at(dir: &Path, url: &str, at: &StatePoint, is_json: bool, out: &mut Output) -> Outcome {
    let bucket = WatchedBucket::open(url)?;
    let failed = |error| local_failure(Some(dir), &error);
    let found = checked_status(dir, &bucket)?;
    if dir.join(FileName::Archive.name()).exists() {
        let error = format!("{} contains an unfinished restore; use another directory", dir.display());
        return Err(Failure::Environment(error));
    }
    // The copy is next to the directory, so that image files can be linked instead of copied. An interrupted copy is
    // started over.
    let copy = copy_path(dir)?;
    if copy.exists() {
        fs::remove_dir_all(&copy).map_err(|error| local_failure(Some(&copy), &error))?;
    }
    fs::create_dir_all(&copy).map_err(failed)?;
    let target = target_of(&copy, &bucket, &found)?;
    let lsn = if let StatePoint::Lsn(lsn) = at { Some(*lsn) } else { None };
    bucket.run(Some(dir), mirror::copy(bucket.archive(), &target, lsn))?;
    drop(target);
    let forked = Store::open_at(&copy, at).and_then(|view| Ok((view.lsn(), view.fork(dir)?)));
    fs::remove_dir_all(&copy).map_err(|error| local_failure(Some(&copy), &error))?;
    let (lsn, store) = forked.map_err(engine_failure)?;
    if is_json {
        out.line(object! { "store": store.to_string(), "lsn": lsn.0 })?;
    } else {
        out.line(format_args!(
            "restored the state after lsn {lsn} into {}, as store {store}; the archive was not changed",
            dir.display()
        ))?;
    }
    Ok(Ending::Fine)
}

/// Checks that a store can be restored into `dir`, and returns the status of the archive.
fn checked_status(dir: &Path, bucket: &WatchedBucket) -> Result<Status, Failure> {
    RestoreTarget::check(dir).map_err(names_directory)?;
    bucket.run(Some(dir), status(bucket.archive()))
}

/// Checks the free space of `dir`, locks it as the target of a restore, and shows a progress bar.
fn target_of(dir: &Path, bucket: &WatchedBucket, found: &Status) -> Result<RestoreTarget, Failure> {
    let (objects, bytes) =
        found.manifest.as_ref().map_or((0, 0), |newest| (newest.data_objects, newest.data_bytes));
    check_space(dir, bytes)?;
    let target = RestoreTarget::open(dir, writer_lock::acquire(dir)?).map_err(names_directory)?;
    bucket.show_progress(progress::bar(found.line_objects() + objects, "restoring objects"));
    Ok(target)
}

/// Converts an error whose message already contains the path of the directory.
fn names_directory(error: io::Error) -> Failure {
    local_failure(None, &error)
}

/// Returns the path of the intermediate copy of an archive.
fn copy_path(dir: &Path) -> Result<PathBuf, Failure> {
    let name = dir.file_name().ok_or_else(|| {
        Failure::Environment(format!(
            "{}: the path does not end with a directory name; specify the full path",
            dir.display()
        ))
    })?;
    let mut copy = std::ffi::OsString::from(".");
    copy.push(name);
    copy.push(".copy-of-archive");
    Ok(dir.with_file_name(copy))
}

/// Checks that `needed` bytes, the size of the snapshot files, are free. The log needs additional space.
fn check_space(dir: &Path, needed: u64) -> Result<(), Failure> {
    let failed = |error| local_failure(Some(dir), &error);
    let system = rustix::fs::statvfs(dir).map_err(|errno| failed(errno.into()))?;
    // The restore removes the files of an unfinished restore.
    let left: u64 = StoreDir::open(dir)?.files().map_err(failed)?.iter().map(|(.., len)| len).sum();
    let free = system.f_bavail.saturating_mul(system.f_frsize).saturating_add(left);
    if free >= needed {
        return Ok(());
    }
    Err(Failure::Environment(format!(
        "{}: the restore needs more than {needed} bytes, but only {free} bytes are free; free space or use another \
         directory",
        dir.display()
    )))
}

fn report(
    dir: &Path,
    end: &RestoredEnd,
    is_on_demand: bool,
    is_json: bool,
    out: &mut Output,
) -> Result<(), Failure> {
    let RestoredEnd { store, batch, fence, named, .. } = end;
    if is_json {
        let (store, lsn) = (store.to_string(), batch.lsn.0);
        return out.line(object! { "store": store, "lsn": lsn, "term": fence, "named": named });
    }
    let named = match named {
        0 => String::new(),
        count => format!(", with {count} named snapshots"),
    };
    out.line(format_args!(
        "restored store {store} into {}, up to lsn {}{named}; this directory continues the archive{}",
        dir.display(),
        batch.lsn,
        if is_on_demand { ", and fetches its pages when it is opened with the archive" } else { "" }
    ))
}
