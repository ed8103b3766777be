//! Archives and restores store directories without the engine.
//!
//! [`push`] archives a store that is not open. [`restore`] writes a directory that the engine can open and that
//! continues the archive. [`copy`] writes an earlier state. [`view`] writes a temporary directory in
//! which the engine opens a view.

use std::collections::BTreeSet;

use futures_util::future::join;
use remanent_format::{Damage, Lsn, SnapshotId};

use crate::bucket::Bucket;
use crate::directory::{ArchivedDirectory, RestoreTarget, ViewDirectory};
use crate::error::{Error, Result};
use crate::line::{
    Archive, Line, ListedPart, NamedParts, Nonces, Pruned, RestoredEnd, SnapshotParts, Takeover, ViewPoint,
};
use crate::local::{FenceRecord, LocalStore};
use crate::object::{BatchPoint, Hint, KeptSnapshot, Part};
use crate::read_ahead::ReadAhead;

/// Maximum number of attempts to read a state. An attempt fails if a boundary overtakes it.
const READ_ATTEMPTS: u32 = 6;

/// The result of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pushed {
    /// The last archived batch, including those of earlier pushes.
    pub archived: BatchPoint,
    /// Position of the fence, or `None` if there was nothing to archive.
    pub term: Option<u64>,
    /// Number of appended runs.
    pub runs: u64,
    /// The snapshot that was archived, or `None` if the archive already contains the newest one.
    pub snapshot: Option<SnapshotId>,
    /// Number of named snapshots that were archived.
    pub named: u64,
    /// Snapshots that were skipped because an image or a manifest is damaged.
    pub damaged: Vec<Damage>,
    /// The boundary that was appended for the new snapshot, and the number of deleted objects.
    pub pruned: Pruned,
}

/// Archives the batches of `directory` that the archive lacks, the newest snapshot and the named snapshots. Then
/// appends a boundary for the new snapshot, and deletes the objects that the previous boundary released.
///
/// After a failed or interrupted push, call `push` again.
///
/// # Errors
/// Returns [`Error::Diverged`] if the end of the archive is not in the history of this directory, with nothing changed;
/// [`Error::Superseded`] if another writer took over; [`Error::Local`] if the directory is damaged, or if the log after
/// the last archived batch was recycled and there is no snapshot to continue with; and the errors of the bucket.
pub async fn push<B: Bucket, N: Nonces>(
    archive: Archive<'_, B, N>,
    directory: &mut ArchivedDirectory,
    takeover: Takeover,
) -> Result<Pushed> {
    directory.check_fetched()?;
    let mut line = Line::new(archive);
    line.find().await?;
    line.check_lineage(directory, takeover)?;
    let mut damaged = Vec::new();
    let mut pushed = Pushed {
        archived: line.archived(),
        term: None,
        runs: 0,
        snapshot: None,
        named: 0,
        damaged: Vec::new(),
        pruned: Pruned::Nothing,
    };
    let snapshot = newest_snapshot(&line, directory, &mut damaged)?;
    // A takeover removes the named snapshots that the directory never had.
    let known: Vec<&KeptSnapshot> = line.catalog().iter().filter(|kept| directory.knows_name(kept)).collect();
    let (newest_named, has_unknown) =
        (known.last().map(|kept| kept.snapshot), known.len() < line.catalog().len());
    let names = Names {
        new: directory.new_named(newest_named, &mut damaged)?,
        given_up: directory.name_changes(line.catalog()).given_up,
    };
    let is_complete = snapshot.is_none()
        && directory.proven().lsn <= line.archived().lsn
        && names.new.is_empty()
        && names.given_up.is_empty()
        && !has_unknown;
    if line.is_empty() || !is_complete {
        line.fence(directory, takeover).await?;
        pushed.term = line.term();
        append(&mut line, directory, snapshot, &names, &mut pushed).await?;
        pushed.archived = line.archived();
    }
    pushed.damaged = damaged;
    Ok(pushed)
}

/// The differences in named snapshots: the snapshots that the archive lacks, and the snapshots whose names were given
/// up in the directory.
struct Names {
    new: Vec<NamedParts>,
    given_up: Vec<SnapshotId>,
}

/// Returns the newest snapshot, or `None` if the archive already contains it.
fn newest_snapshot<B: Bucket, N: Nonces>(
    line: &Line<'_, B, N>,
    directory: &mut ArchivedDirectory,
    damaged: &mut Vec<Damage>,
) -> Result<Option<SnapshotParts>> {
    let archived = line.archived();
    let snapshot = directory.newest_snapshot(&archived, line.manifest(), damaged)?;
    if snapshot.is_none() && !directory.continues(&archived)? {
        let cause = match damaged.first() {
            Some(damage) => damage.to_string(),
            None => "there is no snapshot".to_owned(),
        };
        let reason = format!(
            "the log after {archived} was recycled, and no snapshot can be archived: {cause}; take a snapshot"
        );
        return Err(Error::Local(std::io::Error::new(std::io::ErrorKind::InvalidData, reason)));
    }
    Ok(snapshot)
}

/// Appends runs, named snapshots and a snapshot after the fence was created.
async fn append<B: Bucket, N: Nonces>(
    line: &mut Line<'_, B, N>,
    directory: &ArchivedDirectory,
    snapshot: Option<SnapshotParts>,
    names: &Names,
    pushed: &mut Pushed,
) -> Result<()> {
    let after_gap = snapshot.as_ref().filter(|snapshot| snapshot.follows_gap);
    if let Some(snapshot) = after_gap {
        line.append_manifest(directory, snapshot).await?;
    }
    while line.append_run(directory).await?.is_some() {
        pushed.runs += 1;
    }
    line.append_catalog(directory, &names.given_up, None).await?;
    let parts: BTreeSet<Part> = names.new.iter().flat_map(|new| new.parts.iter().copied()).collect();
    let parts: Vec<Part> = parts.into_iter().collect();
    line.upload_ahead(directory, &line.missing_parts(&parts)).await?;
    for new in &names.new {
        line.append_catalog(directory, &[], Some(new)).await?;
        pushed.named += 1;
    }
    let common = directory.name_changes(line.catalog()).common;
    directory.record_names(line.catalog(), &common, directory.has_lost_snapshots())?;
    let Some(snapshot) = snapshot else { return Ok(()) };
    if !snapshot.follows_gap {
        line.upload_ahead(directory, &line.missing_parts(&snapshot.parts)).await?;
        line.append_manifest(directory, &snapshot).await?;
    }
    pushed.snapshot = Some(snapshot.snapshot);
    // Every part is read back before the boundary permits deletes (rule 18).
    if let Some(verified) = line.verify_manifest().await? {
        pushed.pruned = line.prune(verified).await?;
    }
    Ok(())
}

/// Restores the end of an archive and its named snapshots into `target`. The restored directory continues the archive;
/// from now on, every other directory of the store is rejected.
///
/// After a failed or interrupted restore, the engine refuses to open the directory. Call `restore` again to start over.
///
/// # Errors
/// Returns [`Error::Empty`] if the archive is empty, [`Error::Damaged`] with the key of an object that is missing or
/// invalid, [`Error::Overtaken`] if the state was overtaken by boundaries in every attempt, and the errors of the disk
/// and of the bucket.
pub async fn restore<B: Bucket, N: Nonces>(
    archive: Archive<'_, B, N>,
    target: &RestoreTarget,
) -> Result<RestoredEnd> {
    restore_files(archive, target, false, async |_: &Hint| {}).await
}

/// Restores the end of an archive like [`restore`], but without the contents of image files. The log, manifests and
/// tables are restored. An open of the directory with the archive fetches images when pages are read, and all other
/// images in the background. Until all images are fetched, the directory can be opened only for writing and only with
/// the archive.
///
/// The restore claims the archive. The data objects that the directory lacks are therefore kept until they are fetched,
/// unless another directory claims the archive.
///
/// # Errors
/// Returns the errors of [`restore`].
pub async fn restore_on_demand<B: Bucket, N: Nonces>(
    archive: Archive<'_, B, N>,
    target: &RestoreTarget,
) -> Result<RestoredEnd> {
    let bucket = ReadAhead::new(archive.bucket);
    let archive = Archive { bucket: &bucket, nonces: archive.nonces, rules: archive.rules };
    restore_files(archive, target, true, async |hint: &Hint| bucket.fetch(hint).await).await
}

async fn restore_files<B: Bucket, N: Nonces>(
    archive: Archive<'_, B, N>,
    target: &RestoreTarget,
    is_on_demand: bool,
    prefetch: impl AsyncFn(&Hint),
) -> Result<RestoredEnd> {
    let mut line = Line::new(archive);
    let claim = claim(&mut line, target, prefetch).await?;
    for _ in 0..READ_ATTEMPTS {
        let mut state = target.begin(is_on_demand)?;
        match line.read_state(&mut state).await {
            Ok(end) => {
                state.finish(&end, Some(claim))?;
                return Ok(end);
            }
            Err(Error::Overtaken { .. }) => line.find_to_read().await?,
            Err(error) => return Err(error),
        }
    }
    Err(Error::Overtaken { position: line.start() })
}

/// Claims the archive for a directory. Meanwhile, `prefetch` may read the objects that the restore reads next.
async fn claim<B: Bucket, N: Nonces>(
    line: &mut Line<'_, B, N>,
    target: &RestoreTarget,
    prefetch: impl AsyncFn(&Hint),
) -> Result<FenceRecord> {
    let mut attempt = 1;
    loop {
        line.find_to_claim().await?;
        let store = line.store().ok_or(Error::Empty)?;
        // The nonce is made durable before it is used (rule 5).
        let nonce = line.draw_nonce();
        target.record_claim(store, FenceRecord { position: line.next(), nonce, is_confirmed: false })?;
        let hint = line.hint_at_end();
        let ((), claimed) = join(prefetch(&hint), line.claim(nonce)).await;
        match claimed {
            Ok(claim) => {
                target.record_claim(store, claim)?;
                return Ok(claim);
            }
            // A boundary has passed the position of the claim.
            Err(Error::Superseded { .. }) if attempt < READ_ATTEMPTS => attempt += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Copies the state as of batch `at` into `target`, with the later batches of the same run and the named snapshots up
/// to `at`. If `at` is `None`, or if no kept manifest precedes it, copies the end of the archive and all named
/// snapshots. Does not change the archive. The caller must give the copy a new store id, because the directory must not
/// continue this archive.
///
/// # Errors
/// Returns the errors of [`restore`].
pub async fn copy<B: Bucket, N: Nonces>(
    archive: Archive<'_, B, N>,
    target: &RestoreTarget,
    at: Option<Lsn>,
) -> Result<RestoredEnd> {
    let mut line = Line::new(archive);
    line.find().await?;
    let store = line.store().ok_or(Error::Empty)?;
    target.record_copy(store)?;
    for _ in 0..READ_ATTEMPTS {
        let mut state = target.begin(false)?;
        let read = match at.filter(|at| *at < line.archived().lsn) {
            Some(at) => line.read_state_through(at, &mut state).await,
            None => line.read_state(&mut state).await,
        };
        let read = match read {
            Err(Error::CutTooOld { .. }) => {
                state = target.begin(false)?;
                line.read_state(&mut state).await
            }
            read => read,
        };
        match read {
            Ok(end) => {
                state.finish(&end, None)?;
                return Ok(end);
            }
            Err(Error::Overtaken { .. }) => line.find().await?,
            Err(error) => return Err(error),
        }
    }
    Err(Error::Overtaken { position: line.start() })
}

/// A state of an archive that was written into a [`ViewDirectory`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ViewedState {
    /// The end of the state in the directory. The engine can open the state at an earlier batch.
    pub end: RestoredEnd,
    /// The parts of image files, in the order in which they were listed. If two parts of a file have the same offset,
    /// the later part is used. [`fetch_part`](crate::line::fetch_part) fetches a part.
    pub images: Vec<ListedPart>,
}

/// Writes a state of an archive into a temporary directory, except for its image files, and lists their parts. The
/// archive is not changed, and its writer continues.
///
/// # Errors
/// Returns [`Error::Empty`] if the archive is empty; [`Error::CutTooOld`], [`Error::InGap`], [`Error::UnknownSnapshot`]
/// or [`Error::UnknownName`] if it does not keep the state; [`Error::Damaged`] with the name of an object that is
/// missing or invalid; [`Error::Overtaken`] if boundaries pass faster than the archive can be read; and the errors of
/// the disk and of the bucket.
pub async fn view<B: Bucket, N: Nonces>(
    line: &mut Line<'_, B, N>,
    directory: &ViewDirectory,
    point: &ViewPoint,
) -> Result<ViewedState> {
    for _ in 0..READ_ATTEMPTS {
        line.find_to_read().await?;
        if line.is_empty() {
            return Err(Error::Empty);
        }
        let mut state = directory.begin()?;
        match line.read_view(point, &mut state).await {
            Ok(end) => return Ok(ViewedState { end, images: state.finish_view(&end)? }),
            Err(Error::Overtaken { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::Overtaken { position: line.start() })
}
