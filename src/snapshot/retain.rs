//! Floor 6. Retention: which snapshots are kept, and what goes with those that are not (I8).
//!
//! A crash here leaves files that nothing kept needs; the next retention or open removes them.

use std::collections::BTreeSet;

use remanent_format::frame::VerifiedSnapshot;
use remanent_format::{FileName, Folder, SnapshotId};

use super::Snapshots;
use crate::error::Result;
use crate::keeping::Keeping;
use crate::phases::{self, Phase};

impl Snapshots {
    /// Phases 6 (the record of it) and 7.
    pub fn retain(&self, keeping: &mut Keeping) -> Result<()> {
        let verified: Vec<SnapshotId> =
            keeping.snapshots.values().filter(|kept| kept.info.verified).map(|kept| kept.info.id).collect();
        let oldest = verified.iter().rev().nth(self.count_kept - 1).copied();
        let kept_ids = |id: &SnapshotId| oldest.is_none_or(|oldest| *id >= oldest);
        let record = keeping.snapshots.values().filter(|kept| kept.info.verified && kept_ids(&kept.info.id));
        let record =
            record.map(|kept| VerifiedSnapshot { snapshot: kept.info.id, manifest_crc: kept.manifest_crc });
        // Only a record that is durable licenses recycling: a manifest that a lost rename takes away must
        // not have cost us the one before.
        self.log.record_verified(record.collect())?;
        let Some(oldest) = oldest else { return Ok(()) };
        let _phase = phases::enter(Phase::Recycle);
        keeping.snapshots.retain(|id, _| *id >= oldest);
        let redo = keeping.snapshots[&oldest].redo;
        keeping.tables.retain(|_, table| table.restored_at > redo.lsn);

        // Manifests first, and durably, then what only they named; those that a kept snapshot follows stay.
        // Manifests that could not be read go with the ones of their age.
        let links: BTreeSet<u64> =
            keeping.snapshots.values().flat_map(|kept| &kept.links).map(|link| link.0).collect();
        let manifests =
            |file: &FileName| matches!(file, FileName::Manifest(id) if *id < oldest.0 && !links.contains(id));
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
