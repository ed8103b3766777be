//! Surveys of a store that a writer may be changing, and the interpretation of missing files.
//!
//! A survey lists names first and reads the files afterwards, while a writer creates, replaces and removes files. The
//! files that the survey finds are valid, because all data is verified by checksums. A file that the survey does not
//! find may exist under another name. Therefore an error from a survey counts only if the same files still exist
//! afterwards.

use std::sync::Arc;

use remanent_format::state::survey::Survey;
use remanent_format::{Damage, Defect, FileName, Folder, LogPoint, Lsn, SnapshotId};

use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// The maximum number of surveys while a writer changes the files faster than they are read.
const ATTEMPTS: usize = 64;

/// Reads the headers, links and log of a store directory in their current state.
pub(super) fn survey(disk: &Arc<dyn Disk>) -> Result<Survey> {
    let names = disk.list(Folder::Root)?;
    if !names.iter().any(|name| FileName::parse(Folder::Root, name) == Some(FileName::Store)) {
        return Err(Error::NoStore { path: disk.label(), found: None });
    }
    Ok(Survey::read(&DiskSource::new(disk.clone()))?)
}

/// Calls `question` with a survey and returns the result. If the result is a `complaint` and files have changed,
/// repeats the call with a new survey. `lsn` is the batch that the question is about.
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
    // The writer recycles files faster than they are read here, and all remaining files are newer than the batch.
    Err(Error::Overtaken { lsn, snapshot: newest })
}

/// Returns whether an error must be confirmed with another survey before a follower returns it.
pub(super) fn needs_confirmation(error: &Error) -> bool {
    matches!(error, Error::Damaged(_) | Error::Diverged { .. })
}

/// Returns the number, the `redo` and the end of the newest usable snapshot, or `None` if no snapshot is usable.
pub(super) fn newest_snapshot(survey: &Survey) -> Option<(SnapshotId, LogPoint, Lsn)> {
    let mut usable = survey.candidates().filter_map(|candidate| candidate.ok().flatten());
    usable.next().map(|manifest| (manifest.snapshot, manifest.redo, manifest.end))
}

/// Returns the error for a follower that finds no log after `point`: overtaken if the newest snapshot does not need
/// that log, otherwise damaged.
pub(super) fn missing(disk: &Arc<dyn Disk>, point: LogPoint) -> Error {
    let lsn = point.lsn.next();
    let damage = Defect::Missing.at_lsn(FileName::Segment(point.segment), point.offset, lsn);
    // A writer recycles no files that the newest snapshot needs.
    gone(disk, lsn, &damage, |redo| redo.segment > point.segment)
}

/// Returns the error for frames after `point` that the writer omitted from its last segment when it closed the store,
/// or `None` if no frame after `point` was omitted.
///
/// The segment must [lack its first frames](super::segment::lacks_first_frames).
pub(super) fn left_out(disk: &Arc<dyn Disk>, point: LogPoint) -> Option<Error> {
    let lsn = point.lsn.next();
    let damage = Defect::Missing.at_lsn(FileName::Segment(point.segment), point.offset, lsn);
    let begins_later = |redo: LogPoint| redo.segment == point.segment && redo.lsn > point.lsn;
    Some(gone(disk, lsn, &damage, begins_later)).filter(|error| matches!(error, Error::Overtaken { .. }))
}

/// Returns the error for a missing file that batch `lsn` names.
pub(super) fn missing_file(disk: &Arc<dyn Disk>, lsn: Lsn, damage: Damage) -> Error {
    // A file that a batch names is kept while the batch may be replayed.
    gone(disk, lsn, &damage, |redo| redo.lsn >= lsn)
}

/// Returns [`Error::Overtaken`] if the newest snapshot does not need batch `lsn`. Otherwise returns `damage`, which
/// describes the missing file.
fn gone(disk: &Arc<dyn Disk>, lsn: Lsn, damage: &Damage, needs_nothing: impl Fn(LogPoint) -> bool) -> Error {
    let newest = ask(disk, lsn, needs_confirmation, |survey| match newest_snapshot(survey) {
        Some((snapshot, redo, _)) if needs_nothing(redo) => Ok(snapshot),
        _ => Err(damage.clone().into()),
    });
    newest.map_or_else(|error| error, |snapshot| Error::Overtaken { lsn, snapshot: Some(snapshot) })
}

/// Returns whether the directory still contains exactly the segments and snapshots of a survey. Numbers of segments and
/// snapshots are never reused.
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

/// Returns the numbers of all existing segments in ascending order.
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
