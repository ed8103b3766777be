//! Looking at all files of a store that a writer may be changing, and the meaning of a missing one.
//!
//! A survey lists names first and reads the files after, while a writer makes, replaces and removes them. The
//! files that it found are right, because everything proves itself. A file that it did not find may have been
//! there at every moment under another name. So a complaint about a survey counts only if the same files
//! still lie there after it.

use std::sync::Arc;

use remanent_format::state::survey::Survey;
use remanent_format::{Damage, Defect, FileName, Folder, LogPoint, Lsn, SnapshotId};

use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// How many surveys are tried while a writer changes files faster than they can be read.
const ATTEMPTS: usize = 64;

/// Looks at all files of a store directory, as they are now.
pub(super) fn survey(disk: &Arc<dyn Disk>) -> Result<Survey> {
    let names = disk.list(Folder::Root)?;
    if !names.iter().any(|name| FileName::parse(Folder::Root, name) == Some(FileName::Store)) {
        return Err(Error::NoStore { path: disk.label() });
    }
    Ok(Survey::read(&DiskSource::new(disk.clone()))?)
}

/// Asks a survey about batch `lsn`. It asks another survey as long as the answer is a `complaint` and files
/// come and go.
pub(super) fn ask<T>(
    disk: &Arc<dyn Disk>,
    lsn: Lsn,
    complaint: impl Fn(&Error) -> bool,
    mut question: impl FnMut(&Survey) -> Result<T>,
) -> Result<T> {
    let mut newest = None;
    for _ in 0..ATTEMPTS {
        let survey = survey(disk)?;
        newest = survey.links.keys().next_back().copied();
        match question(&survey) {
            Err(error) if complaint(&error) && !is_there_still(disk, &survey)? => {}
            answer => return answer,
        }
    }
    // The writer recycles faster than this reader can look, and the batch is older than all of it.
    Err(Error::Overtaken { lsn, snapshot: newest })
}

/// Whether no follower is told of this error before it is certain.
pub(super) fn is_grave(error: &Error) -> bool {
    matches!(error, Error::Damaged(_) | Error::Diverged { .. })
}

/// The newest snapshot that can be used: its number, its redo, its end.
pub(super) fn newest_snapshot(survey: &Survey) -> Option<(SnapshotId, LogPoint, Lsn)> {
    let mut usable = survey.candidates().filter_map(|candidate| candidate.ok().flatten());
    usable.next().map(|manifest| (manifest.snapshot, manifest.redo, manifest.end))
}

/// The error for a missing log after `point`.
pub(super) fn missing(disk: &Arc<dyn Disk>, point: LogPoint) -> Error {
    let lsn = point.lsn.next();
    let damage = Defect::Missing.at_lsn(FileName::Segment(point.segment), point.offset, lsn);
    // A writer recycles nothing that the newest snapshot needs.
    gone(disk, lsn, &damage, |redo| redo.segment > point.segment)
}

/// The error for a missing file that batch `lsn` names.
pub(super) fn missing_file(disk: &Arc<dyn Disk>, lsn: Lsn, damage: Damage) -> Error {
    // A file that a batch names is kept for as long as the batch may be replayed.
    gone(disk, lsn, &damage, |redo| redo.lsn >= lsn)
}

/// Batch `lsn` was overtaken if the newest snapshot needs nothing of it; otherwise the missing file is lost.
fn gone(disk: &Arc<dyn Disk>, lsn: Lsn, damage: &Damage, needs_nothing: impl Fn(LogPoint) -> bool) -> Error {
    let newest = ask(disk, lsn, is_grave, |survey| match newest_snapshot(survey) {
        Some((snapshot, redo, _)) if needs_nothing(redo) => Ok(snapshot),
        _ => Err(damage.clone().into()),
    });
    newest.map_or_else(|error| error, |snapshot| Error::Overtaken { lsn, snapshot: Some(snapshot) })
}

/// Whether the segments and snapshots that a survey listed are still the present ones. Their numbers are
/// never used again.
fn is_there_still(disk: &Arc<dyn Disk>, survey: &Survey) -> Result<bool> {
    let mut snapshots = Vec::new();
    for name in disk.list(Folder::Snapshots)? {
        if let Some(FileName::Manifest(number)) = FileName::parse(Folder::Snapshots, &name) {
            snapshots.push(SnapshotId(number));
        }
    }
    snapshots.sort_unstable();
    Ok(segments(&**disk)?.iter().eq(survey.log.segments().keys()) && snapshots.iter().eq(survey.links.keys()))
}

/// The numbers of all present segments, ascending.
pub(super) fn segments(disk: &dyn Disk) -> Result<Vec<u64>> {
    let names = disk.list(Folder::Log)?;
    let mut numbers: Vec<u64> = names
        .iter()
        .filter_map(|name| match FileName::parse(Folder::Log, name) {
            Some(FileName::Segment(number)) => Some(number),
            _ => None,
        })
        .collect();
    numbers.sort_unstable();
    Ok(numbers)
}
