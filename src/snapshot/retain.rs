//! Floor 6. Retention: which snapshots are kept, and what goes with those that are not (I8).
//!
//! A crash here leaves files that nothing kept needs; the next retention or open removes them.

use std::collections::BTreeSet;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::{FileName, Folder, LogPoint, SnapshotId};

use super::Snapshots;
use crate::error::Result;
use crate::keeping::Keeping;
use crate::phases::{self, Phase};

impl Snapshots {
    /// Phase 6, the record of it: every verified snapshot that stays.
    pub fn record(&self, keeping: &Keeping, stays: impl Fn(&SnapshotId) -> bool) -> Result<()> {
        let kept = keeping.snapshots.values().filter(|kept| kept.info.verified && stays(&kept.info.id));
        let record =
            kept.map(|kept| VerifiedSnapshot { snapshot: kept.info.id, manifest_crc: kept.manifest_crc });
        self.log.record_verified(record.collect())
    }

    /// Phases 6 (the record of it) and 7.
    pub fn retain(&self, keeping: &mut Keeping) -> Result<()> {
        let verified: Vec<SnapshotId> =
            keeping.snapshots.values().filter(|kept| kept.info.verified).map(|kept| kept.info.id).collect();
        let oldest = verified.iter().rev().nth(self.count_kept - 1).copied();
        let Some(oldest) = oldest else { return self.record(keeping, |_| true) };
        // I8: what a reader holds stays. Of the others the locks are kept until all is removed, so that nobody
        // begins to read what is going.
        let mut going = Vec::new();
        let mut held = BTreeSet::new();
        for id in keeping.snapshots.keys().filter(|id| **id < oldest) {
            match self.disk.try_retire(*id)? {
                Some(lock) => going.push(lock),
                None => _ = held.insert(*id),
            }
        }
        let beginning = self.disk.try_retire(SnapshotId(0))?;
        let stays = |id: &SnapshotId| *id >= oldest || held.contains(id);
        // Only a record that is durable licenses recycling: a manifest that a lost rename takes away must
        // not have cost us the one before.
        self.record(keeping, stays)?;
        let _phase = phases::enter(Phase::Recycle);
        keeping.snapshots.retain(|id, _| stays(id));
        // Whoever reads from the log's beginning needs all of the log.
        let redo = match beginning {
            Some(_) => keeping.snapshots.values().next().expect("the oldest stays").redo,
            None => LogPoint::default(),
        };
        keeping.tables.retain(|_, table| table.restored_at > redo.lsn);

        // Manifests first, and durably, then what only they named; those that a kept snapshot follows stay.
        // Manifests that could not be read go with the ones of their age.
        let links: BTreeSet<u64> =
            keeping.snapshots.values().flat_map(|kept| &kept.links).map(|link| link.0).collect();
        let needed = |id: u64| links.contains(&id) || keeping.snapshots.contains_key(&SnapshotId(id));
        let manifests =
            |file: &FileName| matches!(file, FileName::Manifest(id) if *id < oldest.0 && !needed(*id));
        self.remove_all(Folder::Snapshots, manifests)?;
        self.remove_unnamed_images(keeping)?;
        let bound = self.log_bound(redo.segment)?;
        let segments = self.numbers(Folder::Log, |file| match file {
            FileName::Segment(number) if number < bound => Some(number),
            _ => None,
        })?;
        self.pool.recycle(&segments)
    }

    /// Removes image files and tables that nothing kept names.
    pub fn remove_unnamed_images(&self, keeping: &Keeping) -> Result<()> {
        let named = keeping.named_files();
        self.remove_all(Folder::Pages, |file| match file {
            FileName::Pages(number) => !named.contains(number),
            FileName::Table(number) => !keeping.tables.contains_key(number),
            _ => false,
        })
    }

    /// The lowest segment to keep when replay may start in `needed`: lower, if the caller wants more log.
    fn log_bound(&self, needed: u64) -> Result<u64> {
        let mut older = self.numbers(Folder::Log, |file| match file {
            FileName::Segment(number) if number < needed => Some(number),
            _ => None,
        })?;
        let (mut bound, mut kept_bytes) = (needed, 0);
        while kept_bytes < self.log_kept
            && let Some(number) = older.pop()
        {
            kept_bytes += self.disk.open(FileName::Segment(number), false)?.len()?;
            bound = number;
        }
        Ok(bound)
    }

    fn numbers(&self, folder: Folder, wanted: impl Fn(FileName) -> Option<u64>) -> Result<Vec<u64>> {
        let names = self.disk.list(folder)?;
        Ok(names.iter().filter_map(|name| FileName::parse(folder, name)).filter_map(wanted).collect())
    }

    fn remove_all(&self, folder: Folder, unwanted: impl Fn(&FileName) -> bool) -> Result<()> {
        let names = self.disk.list(folder)?;
        let files: Vec<FileName> = names
            .iter()
            .filter_map(|name| FileName::parse(folder, name))
            .filter(|file| unwanted(file))
            .collect();
        for file in &files {
            self.disk.remove(*file)?;
        }
        if files.is_empty() { Ok(()) } else { self.disk.sync_folder(folder) }
    }
}
