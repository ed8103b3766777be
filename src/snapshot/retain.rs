//! Floor 6. Retention: what goes with the snapshots that are not kept (I8). `plan.rs` says which are.
//!
//! A crash here leaves files that nothing kept needs; the next retention or open removes them.

use std::collections::BTreeSet;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::{FileName, Folder, Lsn, SnapshotId};

use super::Snapshots;
use super::plan::{LogOnDisk, Plan, plan};
use crate::disk::DiskLock;
use crate::error::Result;
use crate::keeping::{Keeping, SnapshotInfo, unix_ms};
use crate::phases::{self, Phase};
use crate::retention::Retention;

/// What a retention removed, or would remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pruned {
    /// The snapshots that go.
    pub snapshots: Vec<SnapshotInfo>,
    /// The snapshots that no rule keeps, but a reader.
    pub held: Vec<SnapshotId>,
    /// The files that go, with their lengths in bytes. Segments of the log may be used again.
    pub files: Vec<(FileName, u64)>,
}

impl Pruned {
    /// Bytes of all files that go.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, len)| len).sum()
    }
}

/// A plan, and what it removes. The locks keep readers from beginning to read what is going.
struct Removal {
    plan: Plan,
    pruned: Pruned,
    _going: Vec<Box<dyn DiskLock>>,
}

impl Snapshots {
    /// Phase 6, the record of it: every verified snapshot that stays.
    pub fn record(&self, keeping: &Keeping, stays: impl Fn(&SnapshotId) -> bool) -> Result<()> {
        let kept = keeping.snapshots.values().filter(|kept| kept.info.verified && stays(&kept.info.id));
        let record =
            kept.map(|kept| VerifiedSnapshot { snapshot: kept.info.id, manifest_crc: kept.manifest_crc });
        self.log.record_verified(record.collect())
    }

    /// Phases 6 (the record of it) and 7. While pages are cold only the record: where an image turns out damaged, an
    /// older snapshot and more log can stand in for it.
    pub fn retain(&self, keeping: &mut Keeping) -> Result<()> {
        if self.applier.cold().is_any() {
            return self.record(keeping, |_| true);
        }
        self.prune(keeping, &self.retention).map(drop)
    }

    /// What `prune` would remove.
    pub fn would_prune(&self, keeping: &Keeping, retention: &Retention) -> Result<Pruned> {
        let _none_goes = keeping.files.hold_removals();
        Ok(self.plan_removal(keeping, retention)?.pruned)
    }

    /// Removes what nothing needs: first the record of it, then manifests, log, images. Each step is durable
    /// before the next, so that whatever can still be found is whole: a manifest, or a batch that names images.
    pub fn prune(&self, keeping: &mut Keeping, retention: &Retention) -> Result<Pruned> {
        // What is not verified stands in for nothing (I7).
        self.verify(keeping)?;
        let files = keeping.files.clone();
        let _none_goes = files.hold_removals();
        let Removal { plan, pruned, _going } = self.plan_removal(keeping, retention)?;
        // Only a record that is durable licenses recycling: a manifest that a lost rename takes away must
        // not have cost us the one before.
        self.record(keeping, |id| plan.snapshots.contains(id))?;
        let _phase = phases::enter(Phase::Recycle);
        keeping.snapshots.retain(|id, _| plan.snapshots.contains(id));
        keeping.tables.retain(|_, table| is_needed(table.restored_at, &plan));
        self.remove_all(Folder::Snapshots, &pruned)?;
        let segments: Vec<u64> = pruned
            .files
            .iter()
            .filter_map(|(file, _)| if let FileName::Segment(number) = file { Some(*number) } else { None })
            .collect();
        self.pool.recycle(&segments)?;
        files.recycled(plan.log_from.map_or(0, |(segment, _)| segment));
        self.remove_all(Folder::Pages, &pruned)?;
        Ok(pruned)
    }

    fn remove_all(&self, folder: Folder, pruned: &Pruned) -> Result<()> {
        let files = || pruned.files.iter().map(|(file, _)| *file).filter(|file| file.folder() == folder);
        files().try_for_each(|file| self.disk.remove(file))?;
        if files().next().is_some() { self.disk.sync_folder(folder) } else { Ok(()) }
    }

    fn plan_removal(&self, keeping: &Keeping, retention: &Retention) -> Result<Removal> {
        let log = self.log_on_disk()?;
        let (now, nobody) = (unix_ms(), BTreeSet::new());
        let wanted = plan(&keeping.snapshots, retention, &log, now, &nobody, false);
        // I8: what a reader holds stays, and nobody begins to read what is going. A snapshot that a name keeps may
        // lose the log behind it, which its reader may be following.
        let (mut going, mut held) = (Vec::new(), BTreeSet::new());
        for (id, _) in keeping.snapshots.iter().filter(|(_, kept)| wanted.takes_from(kept, &log)) {
            match self.disk.try_retire(*id)? {
                Some(lock) => going.push(lock),
                None => _ = held.insert(*id),
            }
        }
        let beginning = self.disk.try_retire(SnapshotId(0))?;
        let mut plan = plan(&keeping.snapshots, retention, &log, now, &held, beginning.is_none());
        going.extend(beginning);
        // A reader may begin at a link, too, that is there only for those which follow it. What that needs is not
        // known any more: until the reader has gone, all stays.
        for id in links_alone(keeping) {
            match self.disk.try_retire(id)? {
                Some(lock) => going.push(lock),
                None => {
                    plan = Plan { snapshots: keeping.snapshots.keys().copied().collect(), log_from: None }
                }
            }
        }
        let gone = keeping.snapshots.values().filter(|kept| !plan.snapshots.contains(&kept.info.id));
        let snapshots = gone.map(|kept| kept.info.clone()).collect();
        let files = self.unneeded_files(keeping, &plan, &log)?;
        let held = held.into_iter().filter(|id| !wanted.snapshots.contains(id)).collect();
        let pruned = Pruned { snapshots, held, files };
        Ok(Removal { plan, pruned, _going: going })
    }

    /// The files that nothing needs which stays: in the order of their removal.
    fn unneeded_files(
        &self,
        keeping: &Keeping,
        plan: &Plan,
        log: &LogOnDisk,
    ) -> Result<Vec<(FileName, u64)>> {
        let kept = || keeping.snapshots.values().filter(|kept| plan.snapshots.contains(&kept.info.id));
        let links: BTreeSet<SnapshotId> =
            kept().flat_map(|kept| kept.links.iter().copied().chain([kept.info.id])).collect();
        let tables = || keeping.tables.iter().filter(|(_, table)| is_needed(table.restored_at, plan));
        let named: BTreeSet<u64> = kept()
            .flat_map(|kept| kept.files.keys())
            .chain(tables().flat_map(|(_, table)| &table.files))
            .copied()
            .collect();
        // What could not be read goes with the ones of its age: until then it is evidence.
        let settled = kept().filter(|kept| plan.log_from.is_some_and(|from| kept.redo.lsn >= from.1));
        let settled = settled.map(|kept| kept.info.id).min();
        let mut files = self.lens(Folder::Snapshots, |file| match file {
            FileName::Manifest(number) => {
                let id = SnapshotId(number);
                let is_old = settled.is_some_and(|settled| id < settled);
                !links.contains(&id) && (is_old || keeping.snapshots.contains_key(&id))
            }
            _ => false,
        })?;
        let bound = plan.log_from.map_or(0, |(segment, _)| segment);
        if plan.log_from.is_some() {
            files.extend(self.lens(Folder::Pages, |file| match file {
                FileName::Pages(number) => {
                    !named.contains(&number) && !keeping.files.is_for_batch(number, bound)
                }
                FileName::Table(number) => !tables().any(|(kept, _)| *kept == number),
                _ => false,
            })?);
        }
        files.extend(log.segments.range(..bound).map(|(number, len)| (FileName::Segment(*number), *len)));
        Ok(files)
    }

    fn log_on_disk(&self) -> Result<LogOnDisk> {
        let segments = self.lens(Folder::Log, |file| matches!(file, FileName::Segment(_)))?;
        let segments = segments.into_iter().filter_map(|(file, len)| match file {
            FileName::Segment(number) => Some((number, len)),
            _ => None,
        });
        Ok(LogOnDisk { segments: segments.collect(), current: self.log.current_segment() })
    }

    /// The files of a folder that are wanted, with their lengths in bytes.
    fn lens(&self, folder: Folder, wanted: impl Fn(FileName) -> bool) -> Result<Vec<(FileName, u64)>> {
        let names = self.disk.list(folder)?;
        let files =
            names.iter().filter_map(|name| FileName::parse(folder, name)).filter(|file| wanted(*file));
        files.map(|file| Ok((file, self.disk.open(file, false)?.len()?))).collect()
    }
}

/// The links of snapshots that are no snapshots of their own any more.
fn links_alone(keeping: &Keeping) -> BTreeSet<SnapshotId> {
    let links = keeping.snapshots.values().flat_map(|kept| kept.links.iter().copied());
    links.filter(|id| !keeping.snapshots.contains_key(id)).collect()
}

/// Whether replay from what stays may pass a restore.
fn is_needed(restored_at: Lsn, plan: &Plan) -> bool {
    plan.log_from.is_none_or(|(_, redo)| restored_at > redo)
}
