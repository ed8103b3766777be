//! Opens a view of an archived state, which is read without restoring it.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use remanent_archive::Error as Failure;
use remanent_archive::directory::ViewDirectory;
use remanent_archive::line::{Archive, Line, RestoredEnd, SystemNonces, ViewPoint};
use remanent_archive::mirror::{self, ViewedState};
use remanent_archive::remote::RemoteBucket;
use remanent_archive::rules::Rules;
use remanent_format::Lsn;

use super::archived_disk::{ArchivedDisk, PartSource, SourceParts};
use super::bucket::open_bucket;
use super::failures::error_of;
use super::part_cache::PartCache;
use crate::base::process::ForkGuard;
use crate::disk::Disk;
use crate::error::{ArchiveError, ArchiveErrorKind, Error, IoAction, NoSuchState, Result};
use crate::follower::Replica;
use crate::history::point::StatePoint;
use crate::history::view::View;
use crate::options::ArchiveOptions;

type ArchiveLine<'a> = Line<'a, RemoteBucket, SystemNonces>;

/// Opens a view of an archived state. `folder` is an empty temporary folder for local files, and `local` is a [`Disk`]
/// for the same folder.
///
/// # Errors
/// The errors of [`View::open_archive_at`].
pub(crate) fn open_view(
    options: &ArchiveOptions,
    point: Option<&StatePoint>,
    folder: tempfile::TempDir,
    local: Arc<dyn Disk>,
) -> Result<View> {
    View::open_on(&open_files(options, point, folder, local)?, point)
}

/// Loads a replica of the newest snapshot of an archive. The arguments are those of [`open_view`].
///
/// # Errors
/// The errors of [`Replica::from_archive`](crate::follow::Replica::from_archive).
pub(crate) fn open_replica(
    options: &ArchiveOptions,
    folder: tempfile::TempDir,
    local: Arc<dyn Disk>,
) -> Result<Replica> {
    Replica::from_snapshot_on(&open_files(options, None, folder, local)?)
}

/// Returns a disk with the files of an archived state.
fn open_files(
    options: &ArchiveOptions,
    point: Option<&StatePoint>,
    folder: tempfile::TempDir,
    local: Arc<dyn Disk>,
) -> Result<Arc<dyn Disk>> {
    let bucket = open_bucket(options)?;
    let _span = tracing::info_span!("view", archive = options.url).entered();
    let mut line = Line::new(Archive { bucket: &bucket, nonces: &SystemNonces, rules: Rules::default() });
    let directory = ViewDirectory::new(folder.path());
    let viewed = bucket.block_on(mirror::view(&mut line, &directory, &view_point(point)));
    let failed = |source| Error::folder(IoAction::Write, folder.path().display().to_string(), source);
    let ViewedState { end, images, .. } = match viewed {
        Ok(viewed) => viewed,
        Err(failure) => return Err(error_of_view(options, point, &bucket, &mut line, failure, failed)),
    };
    let file = tempfile::tempfile_in(folder.path()).map_err(failed)?;
    drop(line);
    let source: PartSource = Arc::new(ForkGuard::new(SourceParts {
        url: options.url.clone(),
        bucket,
        cache: PartCache::new(file, options.cache_len_max),
        _folder: folder,
    }));
    Ok(Arc::new(ArchivedDisk::new(local, images.into_iter().enumerate(), shown_batch(point, &end), source)))
}

fn view_point(point: Option<&StatePoint>) -> ViewPoint {
    match point {
        None => ViewPoint::End,
        Some(StatePoint::Lsn(lsn)) => ViewPoint::Batch(*lsn),
        Some(StatePoint::Snapshot(snapshot)) => ViewPoint::Snapshot(*snapshot),
        Some(StatePoint::Name(name)) => ViewPoint::Name(name.clone()),
    }
}

/// Returns the last batch that a view contains. The local log may contain later batches of the same run.
fn shown_batch(point: Option<&StatePoint>, end: &RestoredEnd) -> Lsn {
    match point {
        Some(StatePoint::Lsn(lsn)) => end.batch.lsn.min(*lsn),
        _ => end.batch.lsn,
    }
}

/// Converts the failure to read an archived state to an error of the store. `failed` creates the error for a failure of
/// the temporary folder.
fn error_of_view(
    options: &ArchiveOptions,
    point: Option<&StatePoint>,
    bucket: &RemoteBucket,
    line: &mut ArchiveLine<'_>,
    failure: Failure,
    failed: impl FnOnce(io::Error) -> Error,
) -> Error {
    match failure {
        Failure::CutTooOld { lsn } => {
            let oldest = match bucket.block_on(line.oldest()) {
                Ok(oldest) => oldest,
                Err(failure) => return error_of(&options.url, &failure),
            };
            let mut below: Vec<Lsn> = line.catalog().iter().map(|kept| kept.batch.lsn).collect();
            below.retain(|lsn| *lsn < oldest);
            let (requested, newest) = (Lsn(lsn), line.archived().lsn);
            Error::NoSuchState(NoSuchState::OutsideWindow { requested, oldest, newest, below })
        }
        Failure::InGap { lsn, after, until } => {
            let (requested, oldest, newest) = (Lsn(lsn), Lsn(until), line.archived().lsn);
            Error::NoSuchState(NoSuchState::OutsideWindow {
                requested,
                oldest,
                newest,
                below: vec![Lsn(after)],
            })
        }
        Failure::UnknownSnapshot { snapshot } => Error::NoSuchState(NoSuchState::Snapshot { snapshot }),
        Failure::UnknownName { name } => {
            Error::no_snapshot_named(&name, line.catalog().iter().map(|kept| kept.name.as_str()))
        }
        Failure::Overtaken { .. } => {
            let lsn = if let Some(StatePoint::Lsn(lsn)) = point { *lsn } else { line.archived().lsn };
            Error::Overtaken { lsn, snapshot: None }
        }
        // The frames and manifests of the archive are inconsistent.
        Failure::Local(error) if error.kind() == ErrorKind::InvalidData => {
            let (url, reason) = (options.url.clone(), error.to_string());
            ArchiveError { url, kind: ArchiveErrorKind::Damaged, reason }.into()
        }
        Failure::Local(error) => failed(error),
        failure => error_of(&options.url, &failure),
    }
}
