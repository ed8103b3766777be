//! Floor 0. The chain of links: a base and the changes that follow it are one snapshot.
//!
//! A change says what became of the pages since the link before; everything else in it, `redo` and `end`, the
//! root and the numbers, is the snapshot's own. So merging copies pages only, and tombstones of older links
//! have done their work once the pages are gone: replay starts at the newest link's `redo`, behind them.

use std::collections::BTreeMap;

use super::{Manifest, ManifestEntry, ManifestKind};
use crate::defect::{Defect, check_equal, check_limit};
use crate::ids::PageId;
use crate::limits::{CHAIN_LINKS_MAX, MANIFEST_ENTRIES_MAX};

/// Whether `previous`, whose header checksum is `previous_crc`, is the link that `change` follows.
///
/// # Errors
/// What does not fit: the checksum, the store, the batches, or a number that went back.
pub fn check_link(change: &Manifest, previous: &Manifest, previous_crc: u32) -> Result<(), Defect> {
    let ManifestKind::Change { previous: number, previous_crc: named_crc } = change.kind else {
        return Err(Defect::Field { what: "manifest kind", found: change.kind.to_raw().into() });
    };
    if previous.store != change.store || previous.kind == ManifestKind::Table {
        return Err(Defect::Foreign);
    }
    check_equal("number of the link before", previous.snapshot.0, number.0)?;
    check_equal("checksum of the link before", previous_crc.into(), named_crc.into())?;
    // What the link before caught is caught for this one too, and no number goes back: so what holds for each
    // link on its own holds for the merged manifest.
    check_limit("end of the link before", previous.end.0, change.redo.lsn.0)?;
    check_limit("next page id of the link before", previous.next_page, change.next_page)?;
    check_limit("highest epoch of the link before", previous.epoch_high.0, change.epoch_high.0)?;
    check_limit("next image file of the link before", previous.next_file, change.next_file)
}

/// The whole snapshot of which `links` consist, the newest first and the base last, each of them checked to
/// follow the next one by [`check_link`].
///
/// # Errors
/// [`Defect::Limit`] if there are more than [`CHAIN_LINKS_MAX`], or too many pages; [`Defect::Missing`] if the
/// last one is not a base.
pub fn merge(links: &[&Manifest]) -> Result<Manifest, Defect> {
    check_limit("links of a snapshot", links.len() as u64, CHAIN_LINKS_MAX as u64)?;
    let (Some(newest), Some(base)) = (links.first(), links.last()) else { return Err(Defect::Missing) };
    if base.kind != ManifestKind::Base {
        return Err(Defect::Missing);
    }
    // The newest link that mentions a page has the last word.
    let mut changed: BTreeMap<PageId, Option<&ManifestEntry>> = BTreeMap::new();
    for link in &links[..links.len() - 1] {
        for entry in &link.entries {
            changed.entry(entry.page).or_insert(Some(entry));
        }
        for tombstone in &link.tombstones {
            changed.entry(tombstone.page).or_insert(None);
        }
    }
    let unchanged = base.entries.iter().filter(|entry| !changed.contains_key(&entry.page));
    let mut entries: Vec<ManifestEntry> =
        unchanged.chain(changed.values().copied().flatten()).cloned().collect();
    entries.sort_by_key(|entry| entry.page);
    check_limit("entry count", entries.len() as u64, MANIFEST_ENTRIES_MAX)?;
    Ok(Manifest { kind: ManifestKind::Base, entries, ..newest.without_entries() })
}

impl Manifest {
    fn without_entries(&self) -> Self {
        Self {
            entries: Vec::new(),
            tombstones: self.tombstones.clone(),
            root: self.root.clone(),
            name: self.name.clone(),
            ..*self
        }
    }
}
