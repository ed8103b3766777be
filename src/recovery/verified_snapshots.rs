//! The verified snapshots, according to a record in the log and to the files on disk.

use remanent_format::SnapshotId;
use remanent_format::frame::VerifiedSnapshot;
use remanent_format::judge::Record;
use remanent_format::log::LogEnd;
use remanent_format::manifest::Manifest;
use remanent_format::state::follow::Resolution;
use remanent_format::state::survey::Survey;

/// Returns the snapshots that the new incarnation records as verified, and the links that must be published
/// again first.
///
/// A link is published again if its snapshot is verified only by this open, or if one of its copies is bad.
/// The links that it follows were durable before it was written.
pub(super) fn verified<'s>(
    survey: &'s Survey,
    end: &LogEnd,
    base: Option<SnapshotId>,
) -> (Vec<VerifiedSnapshot>, Vec<&'s Manifest>) {
    let health = |snapshot: SnapshotId| survey.links[&snapshot].as_ref().map(|(_, health)| health).ok();
    let on_disk = |snapshot: SnapshotId| on_disk(survey, snapshot);
    // Newer snapshots were skipped: recording them would declare that they can be started from.
    let usable = |snapshot: SnapshotId| base.is_some_and(|base| snapshot <= base);
    let recorded = end.verified.iter().copied();
    let mut verified: Vec<VerifiedSnapshot> =
        recorded.filter(|entry| usable(entry.snapshot) && is_same(on_disk(entry.snapshot), entry)).collect();
    let is_recorded = |used: &VerifiedSnapshot| verified.iter().any(|entry| is_same(Some(*used), entry));
    // If a crash came between the rename and the seal of the snapshot that was used, no frame records it. It
    // counts from now on: its images were just read past the cache, and its manifest is published again (I7).
    let used = base.and_then(on_disk).filter(|used| !is_recorded(used));
    verified.extend(used);
    verified.sort_unstable_by_key(|entry| entry.snapshot);
    let chain = base.and_then(|base| survey.chain(base).ok()).unwrap_or_default();
    let is_due = |link: &&Manifest| {
        let is_new = used.is_some_and(|used| used.snapshot == link.snapshot);
        is_new || health(link.snapshot).is_some_and(|health| !health.is_whole())
    };
    (verified, chain.into_iter().map(AsRef::as_ref).filter(is_due).collect())
}

/// Whether a frame records the snapshot from which recovery starts as verified (I7).
pub(super) fn is_verified(survey: &Survey, base: &Manifest, resolution: &Resolution) -> bool {
    let end = resolution.end.as_ref().expect("followed to its end");
    Record(&end.verified).has_verified(survey, base.snapshot)
}

/// Returns a snapshot in the form of a record of verified ones, or `None` if one of its links cannot be read.
fn on_disk(survey: &Survey, snapshot: SnapshotId) -> Option<VerifiedSnapshot> {
    survey.chain(snapshot).ok()?;
    let (_, health) = survey.links[&snapshot].as_ref().ok()?;
    Some(VerifiedSnapshot { snapshot, manifest_crc: health.header_crc, log_kept: false })
}

/// Whether the snapshot on disk is the one that was recorded. `log_kept` is ignored: only the record knows
/// it.
fn is_same(on_disk: Option<VerifiedSnapshot>, recorded: &VerifiedSnapshot) -> bool {
    on_disk.is_some_and(|found| {
        (found.snapshot, found.manifest_crc) == (recorded.snapshot, recorded.manifest_crc)
    })
}
