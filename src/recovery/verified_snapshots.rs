//! Determines the verified snapshots from the record at the end of the log and from the files on disk.

use remanent_format::SnapshotId;
use remanent_format::frame::VerifiedSnapshot;
use remanent_format::judge::Record;
use remanent_format::log::LogEnd;
use remanent_format::manifest::Manifest;
use remanent_format::state::follow::Resolution;
use remanent_format::state::survey::Survey;

/// Returns the snapshots that the new incarnation records as verified, and the links that must be published again
/// first.
///
/// A link is published again if only this open verified its snapshot, or if one of the link's copies is damaged. The
/// earlier links in the chain were durable before the link was written.
pub(super) fn verified<'s>(
    survey: &'s Survey,
    end: &LogEnd,
    base: Option<SnapshotId>,
) -> (Vec<VerifiedSnapshot>, Vec<&'s Manifest>) {
    let health = |snapshot: SnapshotId| survey.links[&snapshot].as_ref().map(|(_, health)| health).ok();
    let on_disk = |snapshot: SnapshotId| on_disk(survey, snapshot);
    // Snapshots newer than the loaded one were skipped. If they were recorded, later opens would rely on them.
    let usable = |snapshot: SnapshotId| base.is_some_and(|base| snapshot <= base);
    let recorded = end.verified.iter().copied();
    let mut verified: Vec<VerifiedSnapshot> =
        recorded.filter(|entry| usable(entry.snapshot) && is_same(on_disk(entry.snapshot), entry)).collect();
    let is_recorded = |used: &VerifiedSnapshot| verified.iter().any(|entry| is_same(Some(*used), entry));
    // No seal records the loaded snapshot if a crash occurred between its rename and the seal. It is recorded now: its
    // images were just read with O_DIRECT, and its manifest is published again (I7).
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

/// Returns whether a frame records that the snapshot `base` is verified (I7).
pub(super) fn is_verified(survey: &Survey, base: &Manifest, resolution: &Resolution) -> bool {
    let end = resolution.end.as_ref().expect("followed to its end");
    Record(&end.verified).has_verified(survey, base.snapshot)
}

/// Returns the record of a snapshot on disk, or `None` if one of the snapshot's links cannot be read.
fn on_disk(survey: &Survey, snapshot: SnapshotId) -> Option<VerifiedSnapshot> {
    survey.chain(snapshot).ok()?;
    let (_, health) = survey.links[&snapshot].as_ref().ok()?;
    Some(VerifiedSnapshot { snapshot, manifest_crc: health.header_crc, log_kept: false })
}

/// Returns whether the snapshot on disk equals the recorded snapshot. `log_kept` is ignored, because the snapshot's
/// files do not contain it.
fn is_same(on_disk: Option<VerifiedSnapshot>, recorded: &VerifiedSnapshot) -> bool {
    on_disk.is_some_and(|found| {
        (found.snapshot, found.manifest_crc) == (recorded.snapshot, recorded.manifest_crc)
    })
}
