//! What lies on disk already: which pages the next snapshot need not gather.
//!
//! A page's bytes are those of an image as long as no batch touched the page since, and its Lsn tells: one Lsn
//! of one page is one content. So a snapshot gathers the pages whose Lsn is another than that of the image
//! known, and names the known image for the others. A batch that only moves a page leaves its epoch, and one
//! epoch of one page is one content, too: then the snapshot says where it is now, and names the image that it
//! had. It takes 56 bytes of memory a page.
//!
//! Nothing here is on disk: it is rebuilt by each open from the snapshot used and the log behind it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::image::read::check_image;
use remanent_format::limits::CHAIN_LINKS_MAX;
use remanent_format::manifest::{Manifest, ManifestEntry};
use remanent_format::state::bases::Base;
use remanent_format::state::survey::Survey;
use remanent_format::{Lsn, PageId, PageTable, ReadAt, SnapshotId};

use super::classify::PageClass;
use super::newest::{ImageTotals, KnownImage, Link, NewestSnapshot};
use crate::base::sync::{Mutex, MutexGuard};
use crate::error::Result;

/// The images that lie on disk and hold a page's bytes of now, or of a moment ago.
#[derive(Default)]
pub(crate) struct KnownImages {
    newest: Mutex<NewestSnapshot>,
    /// Images that the newest snapshot does not name: those of a restore's table, and those that were written
    /// ahead of their batch.
    beside: Mutex<BTreeMap<PageId, KnownImage>>,
    /// Images that were written ahead of their batch, and that nobody read back yet; with the pages' lengths.
    ahead: Mutex<BTreeMap<PageId, (KnownImage, u64)>>,
    /// Images that do not hold any more, by file and offset, with their pages: no snapshot names them again.
    spoilt: Mutex<BTreeMap<(u64, u64), PageId>>,
}

/// Images of pages as they are now that replay took from elsewhere than the snapshot: a restore's table, images named by
/// the log.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ReplayImages(BTreeMap<PageId, KnownImage>);

impl ReplayImages {
    /// Notes what `page` of a table is made from, if that is such an image; `named` is what the snapshot says of it.
    pub fn note(&mut self, page: PageId, named: Option<&ManifestEntry>, base: &Base, table: &PageTable) {
        // Nearly all: what became of such a page since then is not in it.
        if named.is_some_and(|entry| entry.lsn == base.lsn && entry.image == base.image) {
            return;
        }
        let Some(info) = table.get(page) else { return };
        let is_newest = named.is_some_and(|entry| entry.lsn == info.lsn);
        let holds = info.lsn <= base.lsn && !base.resized && (base.image.is_some() || info.len == 0);
        if holds && !is_newest {
            self.0.insert(page, KnownImage { lsn: info.lsn, image: base.image });
        }
    }

    /// Takes over what was noted of other pages.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }
}

impl KnownImages {
    /// What an open knows once it followed the log behind a snapshot, `base`, which is whole.
    pub fn recovered(survey: &Survey, base: Option<&Manifest>, beside: ReplayImages) -> Result<Self> {
        let newest = match base {
            Some(base) => {
                let crc = |link: SnapshotId| survey.links[&link].as_ref().map_err(Clone::clone);
                let link = |link: &Arc<Manifest>| Ok(Link::of(link, crc(link.snapshot)?.1.header_crc));
                let chain = survey.chain(base.snapshot)?;
                let links = chain.into_iter().rev().map(link).collect::<Result<_>>()?;
                NewestSnapshot::of(links, base.entries.iter())
            }
            None => NewestSnapshot::default(),
        };
        Ok(Self { newest: Mutex::new(newest), beside: Mutex::new(beside.0), ..Self::default() })
    }

    /// The pages of a table that are not as the newest snapshot has them. Who watches the table from here on need not
    /// look through it.
    pub fn changed(&self, table: &PageTable) -> Vec<PageId> {
        let newest = self.newest.lock();
        // Both ascend.
        let mut named = newest.iter().peekable();
        let mut changed = Vec::new();
        for (page, lsn) in table.lsns() {
            while let Some((gone, _)) = named.next_if(|(named, _)| *named < page) {
                changed.push(gone);
            }
            let named = named.next_if(|(named, _)| *named == page);
            if named.is_none_or(|(_, named)| named.known.lsn != lsn) {
                changed.push(page);
            }
        }
        changed.extend(named.map(|(gone, _)| gone));
        changed
    }

    /// What the newest snapshot names, together.
    pub fn sums(&self) -> ImageTotals {
        self.newest.lock().sums().clone()
    }

    /// Notes an image that no snapshot names yet, and that holds the page as batch `lsn` left it. Something
    /// else keeps its file until one does.
    pub fn note(&self, page: PageId, lsn: Lsn, image: Option<ImageRef>) {
        self.beside.lock().insert(page, KnownImage { lsn, image });
    }

    /// Notes an image that was written ahead of batch `lsn`, for a page of length `len`.
    pub fn note_ahead(&self, page: PageId, lsn: Lsn, image: ImageRef, len: u64) {
        self.ahead.lock().insert(page, (KnownImage { lsn, image: Some(image) }, len));
    }

    /// Reads the images back that were written ahead of their batches: a snapshot may name those that hold. The
    /// pages of the others are gathered, for their bytes are in memory.
    pub fn prove(&self, source: &dyn ReadAt) {
        let ahead = std::mem::take(&mut *self.ahead.lock());
        for (page, (known, len)) in ahead {
            let Some(image) = known.image else { continue };
            match check_image(source, &image, len) {
                Ok(()) => _ = self.beside.lock().insert(page, known),
                Err(damage) => tracing::warn!(%damage, %page, "an image that a batch names does not hold"),
            }
        }
    }

    /// Notes that an image does not hold any more: the next snapshot gathers its page.
    pub fn spoil(&self, page: PageId, image: &ImageRef) {
        let is_it = |known: &KnownImage| known.image.is_some_and(|known| place(&known) == place(image));
        self.beside.lock().retain(|_, known| !is_it(known));
        // It stays among the newest snapshot's: were its page deleted, the next one must say that it is gone.
        self.spoilt.lock().insert(place(image), page);
    }

    /// The newest snapshot's own link with its checksum, for a thin one to follow; none if it has too many links before it.
    pub fn newest_link(&self) -> Option<(SnapshotId, u32)> {
        let newest = self.newest.lock();
        let link = newest.links.last().filter(|_| newest.links.len() < CHAIN_LINKS_MAX / 2)?;
        Some((link.snapshot, link.manifest_crc))
    }

    /// Whether the newest snapshot names an image file only for these pages.
    pub fn has_file_of(&self, pages: &[PageId]) -> bool {
        self.newest.lock().has_file_of(pages)
    }

    /// Lets the next snapshot follow none: a link before it does not hold.
    pub fn unlink(&self) {
        self.newest.lock().links.clear();
    }

    /// What pages of a watched table are to the next snapshot; `deleted` are those that a batch deleted since it
    /// began. Pages that the newest snapshot has as they are need not be looked at again: these alone are settled, so
    /// that a snapshot which fails after this forgets nothing.
    pub fn look(
        &self,
        table: &mut PageTable,
        deleted: Option<&HashMap<PageId, Lsn>>,
        pages: &[PageId],
    ) -> Vec<PageClass> {
        let (newest, beside, spoilt) = (self.newest.lock(), self.beside.lock(), self.spoilt.lock());
        let holds = |known: &KnownImage| known.image.is_none_or(|image| !spoilt.contains_key(&place(&image)));
        let standing = |page: PageId| {
            let named = newest.get(page);
            let Some(info) = table.get(page) else {
                return match deleted.is_some_and(|deleted| deleted.contains_key(&page)) {
                    true => PageClass::Deleted,
                    false => PageClass::Gone { is_named: named.is_some() },
                };
            };
            let named = named.filter(|named| holds(&named.known));
            if let Some(named) = named.filter(|named| named.known.lsn == info.lsn) {
                return PageClass::Unchanged(info, named.known.image);
            }
            let beside = beside.get(&page).filter(|known| known.lsn == info.lsn);
            let only_moved = named.filter(|named| named.epoch == info.epoch).map(|named| &named.known);
            match beside.or(only_moved) {
                Some(known) => PageClass::Known(info, known.image),
                None => PageClass::Changed(info.len),
            }
        };
        let standings: Vec<PageClass> = pages.iter().map(|page| standing(*page)).collect();
        let settled = pages.iter().zip(&standings).filter(|(_, standing)| standing.is_settled());
        table.settle(settled.map(|(page, _)| *page));
        standings
    }

    /// The newest snapshot, as it is now.
    pub(super) fn newest(&self) -> MutexGuard<'_, NewestSnapshot> {
        self.newest.lock()
    }

    /// The pages of which an image does not hold any more.
    pub(super) fn spoilt(&self) -> Vec<PageId> {
        self.spoilt.lock().values().copied().collect()
    }

    /// A snapshot that follows none was published: `base` is what [`NewestSnapshot::of_base`] made of it. Returns what it
    /// names, together, and the links before it, of which there are none.
    pub fn advance_to_base(
        &self,
        manifest: &Manifest,
        manifest_crc: u32,
        base: NewestSnapshot,
    ) -> (ImageTotals, Vec<SnapshotId>) {
        let mut newest = self.newest.lock();
        newest.advance_to_base(manifest, manifest_crc, base);
        self.advanced(&newest, manifest)
    }

    /// A snapshot that follows `previous` was published: `manifest` is its own link. Returns what it names, together,
    /// and the links before it, the newest first.
    pub fn advance_by_change(
        &self,
        manifest: &Manifest,
        manifest_crc: u32,
        previous: SnapshotId,
    ) -> (ImageTotals, Vec<SnapshotId>) {
        let mut newest = self.newest.lock();
        newest.advance_by_change(manifest, manifest_crc, previous);
        self.advanced(&newest, manifest)
    }

    fn advanced(&self, newest: &NewestSnapshot, manifest: &Manifest) -> (ImageTotals, Vec<SnapshotId>) {
        // Whatever was known up to there, this snapshot names, or it is of the past.
        self.beside.lock().retain(|_, known| known.lsn > manifest.redo.lsn);
        let before = newest.links.iter().rev().skip(1).map(|link| link.snapshot).collect();
        (newest.sums().clone(), before)
    }
}

/// Where an image lies: numbers of files are never used again, so this is its name.
fn place(image: &ImageRef) -> (u64, u64) {
    (image.file, image.offset)
}
