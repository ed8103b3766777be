//! The chain of links: a base and the changes that follow it are one snapshot (SPEC L1 to L4).
//!
//! A change lists the pages that changed since the link before. All else in it, `redo` and `end`, the root
//! and the numbers, is the snapshot's own. So merging copies pages only. Tombstones of older links have done
//! their work once the pages are gone: replay starts at the newest link's `redo`, after them. A change that
//! begins at the `redo` of the link before repeats the tombstones that replay may still meet.

use std::collections::BTreeMap;

use super::{Manifest, ManifestEntry, ManifestKind};
use crate::defect::{Defect, check_equal, check_limit, reserve_items};
use crate::ids::PageId;
use crate::limits::{CHAIN_LINKS_MAX, MANIFEST_ENTRIES_MAX};

/// Whether `previous`, whose header checksum is `previous_crc`, is the link that `change` follows (SPEC L2
/// and L3).
///
/// # Errors
/// The first field that does not fit: the checksum, the store, the batches, or a number that went back.
pub fn check_link(change: &Manifest, previous: &Manifest, previous_crc: u32) -> Result<(), Defect> {
    let ManifestKind::Change { previous: number, previous_crc: named_crc } = change.kind else {
        return Err(Defect::Field { what: "manifest kind", found: change.kind.to_raw().into() });
    };
    if previous.store != change.store || previous.kind == ManifestKind::Table {
        return Err(Defect::Foreign);
    }
    check_equal("number of the link before", previous.snapshot.0, number.0)?;
    check_equal("checksum of the link before", previous_crc.into(), named_crc.into())?;
    // A page that the link before caught is caught for this one too, and no number goes back. So every
    // condition that holds for each link on its own holds for the merged manifest. A change that begins where
    // the link before does repeats its tombstones, and reaches no less far.
    let reached = if change.redo == previous.redo { change.end } else { change.redo.lsn };
    check_limit("end of the link before", previous.end.0, reached.0)?;
    check_limit("next page id of the link before", previous.next_page, change.next_page)?;
    check_limit("highest epoch of the link before", previous.epoch_high.0, change.epoch_high.0)?;
    check_limit("next image file of the link before", previous.next_file, change.next_file)
}

/// The whole snapshot that `links` make up, the newest first and the base last. Each of them was checked by
/// [`check_link`] to follow the next one.
///
/// # Errors
/// [`Defect::Limit`] if there are more than [`CHAIN_LINKS_MAX`] (SPEC L1), or too many pages (SPEC L4);
/// [`Defect::Missing`] if the last one is not a base.
pub fn merge(links: &[&Manifest]) -> Result<Manifest, Defect> {
    let merged = merged_entries(links)?;
    // As many as there can be: memory that is not touched costs nothing, and a vector that grows is copied.
    let mut entries = Vec::new();
    reserve_items(&mut entries, links.iter().map(|link| link.entries.len()).sum())?;
    entries.extend(merged.cloned());
    check_limit("entry count", entries.len() as u64, MANIFEST_ENTRIES_MAX)?;
    Ok(Manifest { kind: ManifestKind::Base, entries, ..links[0].without_entries() })
}

/// The pages of that snapshot, in the order of their ids, for a caller that needs no merged manifest.
///
/// # Errors
/// As for [`merge`], but that there may be too many pages.
pub(crate) fn merged_entries<'m>(
    links: &[&'m Manifest],
) -> Result<impl Iterator<Item = &'m ManifestEntry> + use<'m>, Defect> {
    check_limit("links of a snapshot", links.len() as u64, CHAIN_LINKS_MAX as u64)?;
    let Some((base, changes)) = links.split_last() else { return Err(Defect::Missing) };
    if base.kind != ManifestKind::Base {
        return Err(Defect::Missing);
    }
    // The newest link that mentions a page has the last word.
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
    Ok(overlaid(of_base, changed.into_iter()).map(|(_, entry)| entry))
}

/// Entries with changes laid over them; a page that is gone has no entry any more. Both ascend.
pub(crate) fn overlaid<T>(
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
