//! Sample manifests for tests.

use std::sync::Arc;

use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind};
use remanent_format::{Epoch, LogPoint, Lsn, PageId, PageInfo, Place, SnapshotId, StoreId};

use super::entry;

/// Returns the manifest of an exact base snapshot with the given entries.
pub(crate) fn base(entries: Vec<ManifestEntry>) -> Manifest {
    let end = entries.iter().map(|entry| entry.lsn).max().unwrap_or(Lsn(1));
    let files = entries.iter().filter_map(|entry| entry.image).flat_map(|image| image.files());
    Manifest {
        kind: ManifestKind::Base,
        store: StoreId([7; 16]),
        snapshot: SnapshotId(1),
        name: None,
        created_unix_ms: 0,
        redo: LogPoint { lsn: end, ..LogPoint::default() },
        end,
        next_page: entries.last().map_or(1, |entry| entry.page.0 + 1),
        epoch_high: entries.iter().map(|entry| entry.epoch).max().unwrap_or(Epoch(1)),
        next_file: files.map(|(file, _)| file).max().map_or(1, |last| last + 1),
        ahead_from: 0,
        tombstones: Vec::new(),
        entries,
        root: Arc::default(),
    }
}

/// Returns the manifest of a base snapshot with `count` empty pages.
pub(crate) fn of_empty_pages(count: u64) -> Manifest {
    let page = |page| {
        let mut info = PageInfo::new(PageId(page), 0, Place::Host);
        (info.epoch, info.lsn) = (Epoch(1), Lsn(1));
        entry(&info, None)
    };
    base((1..=count).map(page).collect())
}
