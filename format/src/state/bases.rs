//! Bases of pages. A base is the image to which later batches are applied. The manifest of the snapshot contains the
//! bases of nearly all pages, so this module stores only the bases that batches changed.

use std::sync::Arc;

use crate::ids::{Lsn, PageId};
use crate::image::ImageRef;
use crate::manifest::{Manifest, ManifestEntry, apply_changes};
use crate::state::id_map::IdMap;

/// The initial bytes of a page: an image or zeros. Replay applies later batches to these bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// The image of the page, or `None` if the initial bytes are zeros. A snapshot or a batch wrote the image.
    pub image: Option<ImageRef>,
    /// The initial length of the page in bytes.
    pub len: u64,
    /// The newest batch that the base includes. Replay applies only later batches.
    pub lsn: Lsn,
    /// Whether a later batch changes the length of the page.
    pub resized: bool,
}

/// The bases of all pages of a state. A manifest in memory contains most of the bases.
#[derive(Clone, Debug, Default)]
pub struct Bases {
    named: Option<ManifestPages>,
    /// Bases that batches after the manifest changed. `None` for a deleted page.
    since: IdMap<PageId, Option<Base>>,
}

/// A manifest whose entries are the bases of pages.
#[derive(Clone, Debug)]
struct ManifestPages {
    manifest: Arc<Manifest>,
    /// Lsn of the batch whose restore names the manifest. The bases then include this batch. `None` if the manifest is
    /// a snapshot.
    restored: Option<Lsn>,
}

impl ManifestPages {
    /// Returns the bases of the pages from `first` to `last`, inclusive.
    fn between(&self, first: PageId, last: PageId) -> impl Iterator<Item = (PageId, Base)> {
        let entries = &self.manifest.entries;
        let from = entries.partition_point(|entry| entry.page < first);
        let named = entries[from..].iter().take_while(move |entry| entry.page <= last);
        named.map(|entry| (entry.page, self.base(entry)))
    }

    fn get(&self, page: PageId) -> Option<Base> {
        let entries = &self.manifest.entries;
        let at = entries.binary_search_by_key(&page, |entry| entry.page).ok()?;
        Some(self.base(&entries[at]))
    }

    fn base(&self, entry: &ManifestEntry) -> Base {
        let lsn = self.restored.unwrap_or(entry.lsn);
        Base { image: entry.image, len: entry.len, lsn, resized: false }
    }
}

impl Bases {
    /// Returns the bases of a snapshot. The manifest must name all pages.
    #[must_use]
    pub fn of_snapshot(manifest: Arc<Manifest>) -> Self {
        Self { named: Some(ManifestPages { manifest, restored: None }), since: IdMap::default() }
    }

    /// Returns the bases of the state after the restore in batch `lsn`.
    #[must_use]
    pub fn of_restore(lsn: Lsn, table: Arc<Manifest>) -> Self {
        Self { named: Some(ManifestPages { manifest: table, restored: Some(lsn) }), since: IdMap::default() }
    }

    /// Returns the base of a page, or `None` if the page does not exist.
    #[must_use]
    pub fn get(&self, page: PageId) -> Option<Base> {
        match self.since.get(page) {
            Some(since) => *since,
            None => self.named.as_ref()?.get(page),
        }
    }

    /// Returns the bases of all pages, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = (PageId, Base)> {
        self.range(PageId(0), PageId(u64::MAX))
    }

    /// Returns the bases of the pages from `first` to `last`, inclusive.
    pub fn range(&self, first: PageId, last: PageId) -> impl Iterator<Item = (PageId, Base)> {
        let named = self.named.iter().flat_map(move |named| named.between(first, last));
        apply_changes(named, self.since.range(first, last).map(|(page, base)| (page, *base)))
    }

    /// Sets the base of a page.
    pub fn insert(&mut self, page: PageId, base: Base) {
        self.since.insert(page, Some(base));
    }

    /// Removes the base of a deleted page.
    pub fn remove(&mut self, page: PageId) {
        match self.named.as_ref().and_then(|named| named.get(page)) {
            Some(_) => self.since.insert(page, None),
            None => self.since.remove(page),
        };
    }

    /// Keeps only the bases of the pages that `wanted` selects, which should be few.
    pub fn retain(&mut self, wanted: impl Fn(PageId) -> bool) {
        let kept = self.iter().filter(|(page, _)| wanted(*page));
        let since = kept.map(|(page, base)| (page, Some(base))).collect();
        *self = Self { named: None, since };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::ids::{Epoch, LogPoint, Place, SnapshotId, StoreId};
    use crate::image::Codec;
    use crate::manifest::ManifestKind;
    use crate::state::table::PageInfo;

    fn image(file: u64) -> ImageRef {
        ImageRef { file, offset: 64, stored_len: 9, stored_crc: 1, raw_crc: 1, codec: Codec::Raw }
    }

    /// Returns a manifest with every third page from 3 on. All properties of a page are derived from its id, so that
    /// pages cannot be confused.
    fn manifest() -> Arc<Manifest> {
        let entry = |page: u64| {
            let PageInfo { page, key, epoch, place, metadata, .. } =
                PageInfo::new(PageId(page), 9, Place::Host);
            let (lsn, image) = (Lsn(page.0), Some(image(page.0)));
            ManifestEntry { page, key, len: 9, epoch, lsn, place, metadata, image }
        };
        Arc::new(Manifest {
            kind: ManifestKind::Base,
            store: StoreId([7; 16]),
            snapshot: SnapshotId(1),
            name: None,
            created_unix_ms: 0,
            redo: LogPoint::default(),
            end: Lsn(2000),
            next_page: 3000,
            epoch_high: Epoch(1),
            next_file: 3000,
            ahead_from: 0,
            entries: (1..700).map(|number| entry(3 * number)).collect(),
            tombstones: Vec::new(),
            root: Arc::default(),
        })
    }

    /// A sequence of changes produces the same bases as in a standard map.
    #[test]
    fn last_change_of_a_base_wins() {
        let of_batch = |lsn| Base { image: None, len: lsn, lsn: Lsn(lsn), resized: lsn % 2 == 0 };
        let named = |lsn: fn(&ManifestEntry) -> Lsn| -> BTreeMap<PageId, Base> {
            let base = |entry: &ManifestEntry| Base {
                image: entry.image,
                len: entry.len,
                lsn: lsn(entry),
                resized: false,
            };
            manifest().entries.iter().map(|entry| (entry.page, base(entry))).collect()
        };
        for (mut bases, mut expected) in [
            (Bases::default(), BTreeMap::new()),
            (Bases::of_snapshot(manifest()), named(|entry| entry.lsn)),
            (Bases::of_restore(Lsn(5000), manifest()), named(|_| Lsn(5000))),
        ] {
            let mut drawn = 1_u64;
            for lsn in 6000..6900 {
                drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let page = PageId((drawn >> 40) % 2200);
                if drawn >> 62 == 0 {
                    bases.remove(page);
                    expected.remove(&page);
                } else {
                    bases.insert(page, of_batch(lsn));
                    expected.insert(page, of_batch(lsn));
                }
            }
            assert!((0..2300).map(PageId).all(|page| bases.get(page) == expected.get(&page).copied()));
            assert!(bases.iter().eq(expected.clone()));
            for (first, last) in [(0, 0), (3, 3), (4, 5), (100, 900), (2096, 2097), (2000, u64::MAX)] {
                let (first, last) = (PageId(first), PageId(last));
                let between = expected.range(first..=last).map(|(page, base)| (*page, *base));
                assert!(bases.range(first, last).eq(between), "{first} to {last}");
            }
            let wanted = |page: PageId| page.0.is_multiple_of(5);
            bases.retain(wanted);
            expected.retain(|page, _| wanted(*page));
            assert!(bases.iter().eq(expected.clone()));
            assert!((0..2300).map(PageId).all(|page| bases.get(page) == expected.get(&page).copied()));
        }
    }
}
