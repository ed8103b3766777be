//! Consistency checks of the fields of a manifest. Decoding and encoding both apply these checks.

use std::ops::Range;

use super::{Manifest, ManifestEntry, ManifestKind};
use crate::defect::{Defect, check_equal, check_limit, check_point};
use crate::ids::{Lsn, PageId, Place};
use crate::limits::{
    DEVICE_ORDINAL_MAX, MANIFEST_ENTRIES_MAX, NUMBER_MAX, PAGE_LEN_MAX, SNAPSHOT_NAME_LEN_MAX,
};

impl Manifest {
    /// Checks that all fields except the entries are consistent (SPEC M2, M4 and M6).
    pub(super) fn check_header_fields(&self) -> Result<(), Defect> {
        if let ManifestKind::Change { previous, .. } = self.kind {
            if previous.0 == 0 {
                return Err(Defect::Field { what: "previous link of a change", found: 0 });
            }
            check_limit("previous link", previous.0, self.snapshot.0.saturating_sub(1))?;
        }
        for (what, found) in [
            ("snapshot number", self.snapshot.0),
            ("next page id", self.next_page),
            ("next image file", self.next_file),
        ] {
            check_limit(what, found, NUMBER_MAX)?;
            if found == 0 {
                return Err(Defect::Field { what, found });
            }
        }
        if let Some(name) = &self.name {
            check_limit("snapshot name length", name.len() as u64, SNAPSHOT_NAME_LEN_MAX as u64)?;
            if name.is_empty() || self.kind == ManifestKind::Table {
                return Err(Defect::Field {
                    what: "length of an empty or forbidden name",
                    found: name.len() as u64,
                });
            }
        }
        check_limit("lowest image file of later batches", self.ahead_from, self.next_file)?;
        check_limit("end", self.end.0, NUMBER_MAX)?;
        check_limit("highest epoch", self.epoch_high.0, NUMBER_MAX)?;
        check_point(&self.redo)?;
        check_limit("redo lsn", self.redo.lsn.0, self.end.0)?;
        check_limit("entry count", self.entries.len() as u64, MANIFEST_ENTRIES_MAX)?;
        check_limit("tombstone count", self.tombstones.len() as u64, MANIFEST_ENTRIES_MAX)?;
        self.check_tombstones()?;
        self.tombstones.iter().try_for_each(|tombstone| self.check_range(tombstone.page, tombstone.lsn))
    }

    /// Checks that this manifest is the table that the restore in batch `lsn` names (SPEC M9).
    ///
    /// # Errors
    /// Returns [`Defect::Mismatch`] if the manifest has another end or contains tombstones.
    pub fn check_restored(&self, lsn: Lsn) -> Result<(), Defect> {
        check_equal("end of the restored table", self.end.0, lsn.0)?;
        check_equal("tombstones of the restored table", self.tombstones.len() as u64, 0)
    }

    /// Checks the entries of a range (SPEC M6 and M7) and their order (SPEC M5).
    pub(super) fn check_entries(&self, range: Range<usize>) -> Result<(), Defect> {
        self.check_order(range.clone())?;
        self.entries[range].iter().try_for_each(|entry| self.check_entry(entry))
    }

    /// Checks that the page ids of a range ascend strictly.
    fn check_order(&self, range: Range<usize>) -> Result<(), Defect> {
        let with_before = &self.entries[range.start.saturating_sub(1)..range.end];
        match with_before.windows(2).find(|pair| pair[0].page >= pair[1].page) {
            Some(pair) => descends("page out of order", pair[1].page),
            None => Ok(()),
        }
    }

    /// Checks that the tombstones ascend strictly by page, and that no page has both a tombstone and an entry (SPEC
    /// M5). The check of the second condition requires ordered entries, which [`Self::check_entries`] verifies.
    fn check_tombstones(&self) -> Result<(), Defect> {
        if let Some(pair) = self.tombstones.windows(2).find(|pair| pair[0].page >= pair[1].page) {
            return descends("tombstone out of order for page", pair[1].page);
        }
        let is_entry = |page| self.entries.binary_search_by_key(&page, |entry| entry.page).is_ok();
        match self.tombstones.iter().find(|tombstone| is_entry(tombstone.page)) {
            Some(tombstone) => descends("tombstone of an existing page", tombstone.page),
            None => Ok(()),
        }
    }

    fn check_entry(&self, entry: &ManifestEntry) -> Result<(), Defect> {
        self.check_range(entry.page, entry.lsn)?;
        check_limit("page length", entry.len, PAGE_LEN_MAX)?;
        check_limit("page's epoch", entry.epoch.0, self.epoch_high.0)?;
        if entry.epoch.0 == 0 {
            return Err(Defect::Field { what: "page's epoch", found: 0 });
        }
        if let Place::Device(ordinal) = entry.place {
            check_limit("device ordinal", ordinal.into(), DEVICE_ORDINAL_MAX.into())?;
        }
        match &entry.image {
            None => check_equal("length of a page without image", entry.len, 0),
            Some(image) => {
                image.check(entry.len)?;
                let mut files = image.files();
                files.try_for_each(|(file, _)| {
                    check_limit("image file", file, self.next_file.saturating_sub(1))
                })
            }
        }
    }

    /// Checks that a page id is below `next_page` and that an Lsn is not above `end`.
    fn check_range(&self, page: PageId, lsn: Lsn) -> Result<(), Defect> {
        check_limit("page id", page.0, self.next_page.saturating_sub(1))?;
        check_limit("page's lsn", lsn.0, self.end.0)?;
        if page.0 == 0 || lsn.0 == 0 {
            return Err(Defect::Field { what: "page id or lsn", found: 0 });
        }
        Ok(())
    }
}

fn descends(what: &'static str, page: PageId) -> Result<(), Defect> {
    Err(Defect::Field { what, found: page.0 })
}
