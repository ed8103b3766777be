//! Copying a directory to an archive, and back, without the engine.
//!
//! [`push`] archives a store that no process has open. [`restore`] writes a directory that the engine opens, and that
//! continues the archive.

use std::collections::BTreeSet;

use remanent_format::{Damage, Lsn, SnapshotId};

use crate::bucket::Bucket;
use crate::directory::{ArchivedDirectory, RestoreTarget};
use crate::error::{Error, Result};
use crate::line::{Archive, Line, NamedParts, Nonces, Pruned, RestoredEnd, SnapshotParts, Takeover};
use crate::local::{FenceRecord, LocalStore};
use crate::object::{BatchPoint, KeptSnapshot, Part};

/// Number of boundaries that may pass a restore before it gives up.
const READ_ATTEMPTS: u32 = 6;

/// The result of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pushed {
    /// The last archived batch.
    pub archived: BatchPoint,
    /// Position of the fence, or `None` if there was nothing to archive.
    pub term: Option<u64>,
    /// Number of runs that were appended.
    pub runs: u64,
    /// The snapshot that was archived, or `None` if there was no new one.
    pub snapshot: Option<SnapshotId>,
    /// Number of named snapshots that were archived.
    pub named: u64,
    /// Snapshots that were skipped because an image or a manifest is damaged.
    pub damaged: Vec<Damage>,
    /// The boundary over the new snapshot, and what was deleted.
    pub pruned: Pruned,
}

/// Archives the batches of a directory that are not archived yet, its newest snapshot and its named snapshots. A
/// boundary is appended over the new snapshot, and the objects below the boundary before it are deleted.
///
/// A push that failed or was interrupted is repeated by the next push.
///
/// # Errors
/// Returns [`Error::Diverged`] if the archive does not end in the history of this directory, with nothing changed;
/// [`Error::Superseded`] if another writer took over; [`Error::Local`] if the directory is damaged or the log after the
/// last archived batch was recycled and there is no snapshot; and the errors of the bucket.
pub async fn push<B: Bucket, N: Nonces>(
    archive: Archive<'_, B, N>,
    directory: &mut ArchivedDirectory,
    takeover: Takeover,
) -> Result<Pushed> {
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
    // A takeover gives up names that the directory never had.
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

/// Named snapshots that the archive lacks, and those that the directory gave up.
struct Names {
    new: Vec<NamedParts>,
    given_up: Vec<SnapshotId>,
}

/// Returns the newest snapshot if the archive does not contain it.
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

/// Appends runs and a snapshot in the term of a fence.
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
    directory.record_named(&directory.name_changes(line.catalog()).common)?;
    let Some(snapshot) = snapshot else { return Ok(()) };
    if !snapshot.follows_gap {
        line.upload_ahead(directory, &line.missing_parts(&snapshot.parts)).await?;
        line.append_manifest(directory, &snapshot).await?;
    }
    pushed.snapshot = Some(snapshot.snapshot);
    // Rule 18: every part is read back before anything is deleted for it.
    if let Some(verified) = line.verify_manifest().await? {
        pushed.pruned = line.prune(verified).await?;
    }
    Ok(())
}

/// Restores the end of an archive and its named snapshots into a directory, which then continues the archive: every
/// other directory of the store is refused from now on.
///
/// A restore that failed or was interrupted leaves a directory that the engine refuses. The next restore begins again.
///
/// # Errors
/// Returns [`Error::Empty`] if there is nothing to restore, [`Error::Damaged`] with the name of an object that is missing
/// or invalid, [`Error::Overtaken`] if boundaries pass faster than the archive can be read, and the errors of the disk and
/// of the bucket.
pub async fn restore<B: Bucket, N: Nonces>(
    archive: Archive<'_, B, N>,
    target: &RestoreTarget,
) -> Result<RestoredEnd> {
    let mut line = Line::new(archive);
    line.find().await?;
    let store = line.store().ok_or(Error::Empty)?;
    // The nonce is durable before it is used (rule 5).
    let nonce = archive.nonces.draw();
    target.record_claim(store, FenceRecord { position: line.next(), nonce, is_confirmed: false })?;
    let claim = line.claim(nonce).await?;
    target.record_claim(store, claim)?;
    for _ in 0..READ_ATTEMPTS {
        let mut state = target.begin()?;
        match line.read_state(&mut state).await {
            Ok(end) => {
                state.finish(&end, Some(claim))?;
                return Ok(end);
            }
            Err(Error::Overtaken { .. }) => line.find().await?,
            Err(error) => return Err(error),
        }
    }
    Err(Error::Overtaken { position: line.start() })
}

/// Copies an earlier state of an archive into a directory, with the batches after it in the same run, and with the
/// named snapshots up to it. If no kept manifest precedes the batch `at`, or if `at` is `None`, copies the end and
/// all named snapshots. The archive is not changed, and the directory must not continue it: the caller makes a store
/// of its own from it, with another id.
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
        let mut state = target.begin()?;
        let read = match at.filter(|at| *at < line.archived().lsn) {
            Some(at) => line.read_state_through(at, &mut state).await,
            None => line.read_state(&mut state).await,
        };
        let read = match read {
            Err(Error::CutTooOld { .. }) => {
                state = target.begin()?;
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
