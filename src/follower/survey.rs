//! Looking at all files of a store that somebody may be writing, and what it means that one is gone.
//!
//! A survey lists names first and reads the files after, while a writer makes, replaces and removes them. So
//! what it found is right, for everything proves itself, but what it did not find may have been there at every
//! moment under another name. A complaint about a survey counts only if the same files lie there behind it.

use std::sync::Arc;

use remanent_format::state::survey::Survey;
use remanent_format::{Damage, Defect, FileName, Folder, LogPoint, Lsn, SnapshotId};

use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// How often files are surveyed anew that a writer changes faster than they can be read.
const ATTEMPTS: usize = 64;

/// Looks at all files of a store directory, as they are now.
pub(super) fn survey(disk: &Arc<dyn Disk>) -> Result<Survey> {
    let names = disk.list(Folder::Root)?;
    if !names.iter().any(|name| FileName::parse(Folder::Root, name) == Some(FileName::Store)) {
        return Err(Error::NoStore { path: disk.label() });
    }
    Ok(Survey::read(&DiskSource::new(disk.clone()))?)
}

/// Asks a survey about batch `lsn`, and another one for as long as it is answered by a `complaint` while files
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
    // So much was recycled meanwhile: nobody is as far behind as this one.
    Err(Error::Overtaken { lsn, snapshot: newest })
}

/// What no follower is told before it is sure.
pub(super) fn is_grave(error: &Error) -> bool {
    matches!(error, Error::Damaged(_) | Error::Diverged { .. })
}

/// The newest snapshot that can be used: its number, its redo, its end.
pub(super) fn newest_snapshot(survey: &Survey) -> Option<(SnapshotId, LogPoint, Lsn)> {
    let mut usable = survey.candidates().filter_map(|candidate| candidate.ok().flatten());
    usable.next().map(|manifest| (manifest.snapshot, manifest.redo, manifest.end))
}

/// What it means that the log behind `point` is gone.
pub(super) fn missing(disk: &Arc<dyn Disk>, point: LogPoint) -> Error {
    let lsn = point.lsn.next();
    let damage = Defect::Missing.at_lsn(FileName::Segment(point.segment), point.offset, lsn);
    // A writer recycles nothing that the newest snapshot needs.
    gone(disk, lsn, &damage, |redo| redo.segment > point.segment)
}

/// What it means that a file which batch `lsn` names is gone.
pub(super) fn missing_file(disk: &Arc<dyn Disk>, lsn: Lsn, damage: Damage) -> Error {
    // What a batch names is kept for as long as the batch may be replayed.
    gone(disk, lsn, &damage, |redo| redo.lsn >= lsn)
}

/// Batch `lsn` was overtaken if the newest snapshot needs nothing of it; else what is gone is lost.
fn gone(disk: &Arc<dyn Disk>, lsn: Lsn, damage: &Damage, needs_nothing: impl Fn(LogPoint) -> bool) -> Error {
    let newest = ask(disk, lsn, is_grave, |survey| match newest_snapshot(survey) {
        Some((snapshot, redo, _)) if needs_nothing(redo) => Ok(snapshot),
        _ => Err(damage.clone().into()),
    });
    newest.map_or_else(|error| error, |snapshot| Error::Overtaken { lsn, snapshot: Some(snapshot) })
}

/// Whether the segments and snapshots that a survey listed are those that there are now. Their numbers are
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

/// Numbers of the segments that there are, ascending.
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
