//! Chains of manifests. A base and the changes that follow it form one snapshot (SPEC L1 to L4).
//!
//! A change lists the pages that changed since the previous link. Its other fields, such as `redo`, `end` and the root,
//! apply to the whole snapshot, so merging combines only pages. Merging removes the pages that older links list as
//! deleted, and then drops the tombstones of these links, because replay starts at the `redo` of the newest link, after
//! these deletions. A change with the same `redo` as the previous link repeats the tombstones that replay may still
//! need.

use std::collections::BTreeMap;

use super::{Manifest, ManifestEntry, ManifestKind};
use crate::defect::{Defect, check_equal, check_limit, reserve_items};
use crate::ids::PageId;
use crate::limits::{CHAIN_LINKS_MAX, MANIFEST_ENTRIES_MAX};

/// Checks that `change` follows `previous`, whose header checksum is `previous_crc` (SPEC L2 and L3).
///
/// # Errors
/// Returns a [`Defect`] for the first field that contradicts `previous`: the store, the number, the checksum, a range
/// of batches, or a counter that decreases.
pub fn check_link(change: &Manifest, previous: &Manifest, previous_crc: u32) -> Result<(), Defect> {
    let ManifestKind::Change { previous: number, previous_crc: named_crc } = change.kind else {
        return Err(Defect::Field { what: "manifest kind", found: change.kind.to_raw().into() });
    };
    if previous.store != change.store || previous.kind == ManifestKind::Table {
        return Err(Defect::Foreign);
    }
    check_equal("number of the previous link", previous.snapshot.0, number.0)?;
    check_equal("checksum of the previous link", previous_crc.into(), named_crc.into())?;
    // No counter decreases, so the conditions that each link meets are also met by the merged manifest. A change with
    // the `redo` of the previous link repeats its tombstones, and must therefore reach the same `end` or a later one.
    let reached = if change.redo == previous.redo { change.end } else { change.redo.lsn };
    check_limit("end of the previous link", previous.end.0, reached.0)?;
    check_limit("next page id of the previous link", previous.next_page, change.next_page)?;
    check_limit("highest epoch of the previous link", previous.epoch_high.0, change.epoch_high.0)?;
    check_limit("next image file of the previous link", previous.next_file, change.next_file)
}

/// Merges the links of a chain, from the newest to the base, into one manifest of the whole snapshot. The caller must
/// have checked each pair of neighbors with [`check_link`].
///
/// # Errors
/// Returns [`Defect::Limit`] if there are more than [`CHAIN_LINKS_MAX`] links (SPEC L1) or too many pages (SPEC L4),
/// [`Defect::Missing`] if the last link is not a base, or [`Defect::Memory`] if there is not enough memory.
pub fn merge(links: &[&Manifest]) -> Result<Manifest, Defect> {
    let merged = merged_entries(links)?;
    // Reserve the maximum. Unused capacity costs nothing, whereas a growing vector is copied.
    let mut entries = Vec::new();
    reserve_items(&mut entries, links.iter().map(|link| link.entries.len()).sum())?;
    entries.extend(merged.cloned());
    check_limit("entry count", entries.len() as u64, MANIFEST_ENTRIES_MAX)?;
    Ok(Manifest { kind: ManifestKind::Base, entries, ..links[0].without_entries() })
}

/// Returns the entries of a snapshot in the order of their page ids, without building a merged manifest.
///
/// # Errors
/// Returns the same [`Defect`] as [`merge`], but does not limit the number of pages.
pub(crate) fn merged_entries<'m>(
    links: &[&'m Manifest],
) -> Result<impl Iterator<Item = &'m ManifestEntry> + use<'m>, Defect> {
    check_limit("links of a snapshot", links.len() as u64, CHAIN_LINKS_MAX as u64)?;
    let Some((base, changes)) = links.split_last() else { return Err(Defect::Missing) };
    if base.kind != ManifestKind::Base {
        return Err(Defect::Missing);
    }
    // For each page, the newest link that names the page determines its entry.
    let mut changed: BTreeMap<PageId, Option<&ManifestEntry>> = BTreeMap::new();
    for link in changes {
        for entry in &link.entries {
            changed.entry(entry.page).or_insert(Some(entry));
        }
        for tombstone in &link.tombstones {
            changed.entry(tombstone.page).or_insert(None);
        }
    }
    let of_base = base.entries.iter().map(|entry| (entry.page, entry));
    Ok(apply_changes(of_base, changed.into_iter()).map(|(_, entry)| entry))
}

/// Merges two sequences of pages. A change replaces the entry of its page, and the change `None` removes it. Both
/// iterators must be in the order of their page ids.
pub(crate) fn apply_changes<T>(
    before: impl Iterator<Item = (PageId, T)>,
    changes: impl Iterator<Item = (PageId, Option<T>)>,
) -> impl Iterator<Item = (PageId, T)> {
    let (mut before, mut changes) = (before.peekable(), changes.peekable());
    std::iter::from_fn(move || {
        loop {
            let changed = changes.peek().map(|(page, _)| *page);
            if let Some(unchanged) = before.next_if(|(page, _)| changed.is_none_or(|changed| *page < changed))
            {
                return Some(unchanged);
            }
            let (page, now) = changes.next()?;
            before.next_if(|(before, _)| *before == page);
            if let Some(now) = now {
                return Some((page, now));
            }
        }
    })
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
