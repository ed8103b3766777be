//! The images that are already on disk. The next snapshot need not gather a page whose current bytes are in such an
//! image.
//!
//! The bytes of a page equal those of an image until a batch changes the page. A change sets the Lsn of the page, and
//! for a given page an Lsn identifies one content. A snapshot therefore gathers the pages whose Lsn differs from that
//! of the known image, and names the known image for all other pages. An epoch also identifies one content, and a batch
//! that only moves a page does not change its epoch. For a moved page, the snapshot records the new place and names the
//! previous image. The memory cost is 56 bytes per page.
//!
//! The known images are not stored on disk. Each open rebuilds them from the loaded snapshot and the log after it.

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::limits::CHAIN_LINKS_MAX;
use remanent_format::manifest::{Manifest, ManifestEntry};
use remanent_format::state::bases::Base;
use remanent_format::state::survey::Survey;
use remanent_format::{Damage, Epoch, Lsn, PageId, PageTable, SnapshotId};

use super::classify::PageClass;
use super::newest::{ImageTotals, KnownImage, Link, NewestSnapshot};
use crate::base::allocation::{append, collected, map_of, push};
use crate::base::sync::{Mutex, MutexGuard, Rank};
use crate::disk::source::DiskSource;
use crate::error::Result;
use crate::images::read::{ImageRequest, damaged};

/// The number of read-back images that are recorded each time the lock is taken.
const NOTED_AT_ONCE: usize = 1024;

/// The images on disk that the next snapshot may name instead of writing the pages again, and the damaged images.
pub(crate) struct KnownImages(Mutex<KnownState>);

#[derive(Default)]
pub(super) struct KnownState {
    pub newest: NewestSnapshot,
    /// The images that the newest snapshot does not name, by page. They come from a restore's table, or were written
    /// before their batch was logged.
    unnamed: BTreeMap<PageId, KnownImage>,
    /// Images that were written before their batch was logged and have not been read back yet, with the length of each
    /// page.
    unverified: BTreeMap<PageId, (KnownImage, u64)>,
    /// Whether the snapshot in progress may name the images in `unverified`.
    names_unverified: bool,
    /// The pages with damaged images, by the file number and offset of the image. No snapshot names a damaged image
    /// again (I7).
    damaged_images: BTreeMap<(u64, u64), PageId>,
}

/// The images of current pages that replay found in a restore's table or in the log, but not in the snapshot.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ReplayImages {
    /// The images that the open reads back.
    proven: BTreeMap<PageId, KnownImage>,
    /// The images that the open does not read back, with the lengths of their pages in bytes.
    unverified: BTreeMap<PageId, (KnownImage, u64)>,
}

impl ReplayImages {
    /// Records the image of `base` if it contains the current state of `page` and the snapshot does not name that
    /// image. `named` is the snapshot's entry for the page, and `is_read` states whether the open reads the image back.
    pub fn note(
        &mut self,
        page: PageId,
        named: Option<&ManifestEntry>,
        base: &Base,
        table: &PageTable,
        is_read: bool,
    ) {
        // The snapshot already names the image of nearly all pages, so only the exceptions are stored.
        if named.is_some_and(|entry| entry.lsn == base.lsn && entry.image == base.image) {
            return;
        }
        let Some(info) = table.get(page) else { return };
        let is_newest = named.is_some_and(|entry| entry.lsn == info.lsn);
        let holds = info.lsn <= base.lsn && !base.resized && (base.image.is_some() || info.len == 0);
        if !holds || is_newest {
            return;
        }
        let known = KnownImage { lsn: info.lsn, image: base.image };
        if is_read {
            self.proven.insert(page, known);
        } else {
            self.unverified.insert(page, (known, base.len));
        }
    }

    /// Adds the images of `other`. No page may be in both sets.
    pub fn extend(&mut self, other: Self) {
        self.proven.extend(other.proven);
        self.unverified.extend(other.unverified);
    }
}

impl Default for KnownImages {
    fn default() -> Self {
        Self(Mutex::of_rank(Rank::STATE, KnownState::default()))
    }
}

impl KnownImages {
    /// Returns the images that are known after an open has replayed the log from a snapshot. `base` is the complete
    /// manifest of that snapshot. `found` contains the images that replay found elsewhere.
    pub fn recovered(survey: &Survey, base: Option<&Manifest>, found: ReplayImages) -> Result<Self> {
        let newest = match base {
            Some(base) => {
                let crc = |link: SnapshotId| survey.links[&link].as_ref().map_err(Clone::clone);
                let link = |link: &Arc<Manifest>| Link::of(link, crc(link.snapshot)?.1.header_crc);
                let chain = survey.chain(base.snapshot)?;
                let links = chain.into_iter().rev().map(link).collect::<Result<_>>()?;
                NewestSnapshot::of(links, base.entries.iter())
            }
            None => NewestSnapshot::default(),
        };
        Ok(Self(Mutex::of_rank(
            Rank::STATE,
            KnownState {
                newest,
                unnamed: found.proven,
                unverified: found.unverified,
                ..KnownState::default()
            },
        )))
    }

    /// Returns the pages of `table` that differ from the newest snapshot. The function searches the whole table, so
    /// callers run it once and track later changes.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn changed(&self, table: &PageTable) -> Result<Vec<PageId>> {
        let state = self.0.lock();
        // Both lists are sorted by page.
        let mut named = state.newest.iter().peekable();
        let mut changed = Vec::new();
        for (page, lsn) in table.lsns() {
            while let Some((gone, _)) = named.next_if(|(named, _)| *named < page) {
                push(&mut changed, gone)?;
            }
            let named = named.next_if(|(named, _)| *named == page);
            if named.is_none_or(|(_, named)| named.known.lsn != lsn) {
                push(&mut changed, page)?;
            }
        }
        append(&mut changed, named.map(|(gone, _)| gone))?;
        Ok(changed)
    }

    /// Returns the number of pages and bytes of the images that the newest snapshot names.
    pub fn sums(&self) -> ImageTotals {
        self.0.lock().newest.sums().clone()
    }

    /// Records an image that contains `page` after batch `lsn` and that no snapshot names yet. The caller must ensure
    /// that the image's file is kept until a snapshot names the image.
    pub fn note(&self, page: PageId, lsn: Lsn, image: Option<ImageRef>) {
        self.0.lock().unnamed.insert(page, KnownImage { lsn, image });
    }

    /// Records an image that was written before batch `lsn` was logged, for a page of `len` bytes.
    pub fn note_ahead(&self, page: PageId, lsn: Lsn, image: ImageRef, len: u64) {
        self.0.lock().unverified.insert(page, (KnownImage { lsn, image: Some(image) }, len));
    }

    /// Returns the image that the newest snapshot names for `page`. Returns `None` if that image contains another
    /// version than `epoch`, or is known to be damaged.
    pub fn image_of(&self, page: PageId, epoch: Epoch) -> Option<ImageRef> {
        let state = self.0.lock();
        let image = state.newest.get(page).filter(|named| named.epoch == epoch)?.known.image?;
        (!is_damaged(&state.damaged_images, page, &image)).then_some(image)
    }

    /// Returns whether the next snapshot may write an overlay over `image`. Three conditions apply:
    ///
    /// - `image` is not damaged.
    /// - The newest snapshot names an image of the page that is not damaged.
    /// - The two images are the same, or `is_proven` states that `image` was read back from the medium.
    pub fn may_be_base(&self, page: PageId, image: &ImageRef, is_proven: bool) -> bool {
        let state = self.0.lock();
        let named = state.newest.get(page).and_then(|named| named.known.image);
        let is_sound = |image: &ImageRef| !is_damaged(&state.damaged_images, page, image);
        // A damaged overlay is replaced with a whole image, because the damage may be in its base.
        is_sound(image) && named.is_some_and(|named| is_sound(&named) && (is_proven || named == *image))
    }

    /// Reads back the images that were written before their batch was logged, with up to `threads_max` threads. A
    /// snapshot may name the intact images (I7). The next snapshot gathers the pages of all other images from memory.
    /// Returns the number of page bytes read back.
    ///
    /// # Errors
    /// `OutOfMemory` or another shortage, without any change.
    pub fn prove(&self, source: &DiskSource, threads_max: usize) -> Result<u64> {
        let state = self.0.lock();
        let unverified =
            collected(state.unverified.iter().map(|(page, (known, len))| (*page, *known, *len)))?;
        drop(state);
        let request = |(page, known, len): &(PageId, KnownImage, u64)| {
            Some(ImageRequest { page: *page, len: *len, image: known.image? })
        };
        let mut wanted = collected(unverified.iter().filter_map(request))?;
        let bytes = wanted.iter().map(|wanted| wanted.len).sum();
        let damaged = damaged(source, &mut wanted, threads_max)?;
        let damaged: BTreeMap<(u64, u64), Damage> =
            map_of(damaged.into_iter().map(|(image, damage)| (location(&image), damage)));
        // The images are processed in chunks, because commits wait for the lock.
        for some in unverified.chunks(NOTED_AT_ONCE) {
            let KnownState { unnamed, unverified, damaged_images, .. } = &mut *self.0.lock();
            for (page, known, _) in some {
                // A batch may have rewritten the page in the meantime.
                if unverified.get(page).is_some_and(|(newest, _)| newest == known) {
                    unverified.remove(page);
                }
                let Some(image) = known.image else { continue };
                match damaged.get(&location(&image)) {
                    Some(damage) => {
                        tracing::warn!(%damage, %page, "an image that a batch names is damaged");
                    }
                    // A scrub may have found damage that this read did not find. The next read may find it again.
                    None if is_damaged(damaged_images, *page, &image) => {}
                    None => _ = unnamed.insert(*page, *known),
                }
            }
        }
        Ok(bytes)
    }

    /// Sets whether the next snapshot may name images that were not read back. If so, they must be read back after the
    /// snapshot is published, like the images that the snapshot itself writes (I7).
    pub fn set_names_unverified(&self, names_unverified: bool) {
        self.0.lock().names_unverified = names_unverified;
    }

    /// Returns requests to read back the images that `entries` names and that were not read back yet. The call must
    /// precede the publication, because a failed allocation after the publication could not be handled.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn unverified_in(&self, entries: &[ManifestEntry]) -> Result<Vec<ImageRequest>> {
        let state = self.0.lock();
        if state.unverified.is_empty() {
            return Ok(Vec::new());
        }
        let request = |entry: &ManifestEntry| {
            let (known, len) = state.unverified.get(&entry.page)?;
            let image = known.image.filter(|image| entry.image == Some(*image))?;
            Some(ImageRequest { page: entry.page, len: *len, image })
        };
        collected(entries.iter().filter_map(request))
    }

    /// Records that `image` or its base is damaged, so that the next snapshot gathers `page`. `at` is the file number
    /// and offset of the damage.
    pub fn mark_damaged(&self, page: PageId, image: &ImageRef, at: (u64, u64)) {
        let is_it = |known: &KnownImage| known.image.is_some_and(|known| location(&known) == location(image));
        let mut state = self.0.lock();
        // The image stays in the list of the newest snapshot: if its page is deleted, the next snapshot must record the
        // deletion.
        state.damaged_images.extend([(location(image), page), (at, page)]);
        state.unnamed.retain(|_, known| !is_it(known));
    }

    /// Returns the newest snapshot's own link and its checksum, for a thin snapshot to follow. Returns `None` if the
    /// newest snapshot already has too many links.
    pub fn newest_link(&self) -> Option<(SnapshotId, u32)> {
        let newest = &self.0.lock().newest;
        let link = newest.links.last().filter(|_| newest.links.len() < CHAIN_LINKS_MAX / 2)?;
        Some((link.snapshot, link.manifest_crc))
    }

    /// Returns whether there is an image file whose images in the newest snapshot all belong to `pages`. If these pages
    /// are deleted, a snapshot without them frees the file.
    pub fn has_file_of(&self, pages: &[PageId]) -> bool {
        self.0.lock().newest.has_file_of(pages)
    }

    /// Makes the next snapshot list all pages, because a manifest on which the newest snapshot is based is damaged.
    pub fn unlink(&self) {
        self.0.lock().newest.links.clear();
    }

    /// Classifies `pages` of a change-tracked table for the next snapshot. `deleted` contains the pages that a batch
    /// has deleted since the snapshot began.
    ///
    /// Pages for which the newest snapshot is correct are marked as settled, and need not be classified again until
    /// they change. No other page is marked, so that no change is forgotten if the snapshot fails later.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn classify(
        &self,
        table: &mut PageTable,
        deleted: Option<&BTreeMap<PageId, Lsn>>,
        pages: &[PageId],
    ) -> Result<Vec<PageClass>> {
        let KnownState { newest, unnamed, unverified, names_unverified, damaged_images } = &*self.0.lock();
        let holds = |page: PageId, known: &KnownImage| {
            known.image.is_none_or(|image| !is_damaged(damaged_images, page, &image))
        };
        let class = |page: PageId| {
            let named = newest.get(page);
            let Some(info) = table.get(page) else {
                return match deleted.is_some_and(|deleted| deleted.contains_key(&page)) {
                    true => PageClass::Deleted,
                    false => PageClass::Gone { is_named: named.is_some() },
                };
            };
            let named = named.filter(|named| holds(page, &named.known));
            if let Some(named) = named.filter(|named| named.known.lsn == info.lsn) {
                return PageClass::Unchanged(info, named.known.image);
            }
            let unverified = unverified.get(&page).map(|(known, _)| known);
            let unverified = unverified.filter(|known| *names_unverified && holds(page, known));
            let unnamed = unnamed.get(&page).or(unverified).filter(|known| known.lsn == info.lsn);
            let only_moved = named.filter(|named| named.epoch == info.epoch).map(|named| &named.known);
            match unnamed.or(only_moved) {
                Some(known) => PageClass::Known(info, known.image),
                None => PageClass::Changed(info.len),
            }
        };
        let classes = collected(pages.iter().map(|page| class(*page)))?;
        let settled = pages.iter().zip(&classes).filter(|(_, class)| class.is_settled());
        table.settle(settled.map(|(page, _)| *page));
        Ok(classes)
    }

    /// Locks the state of the known images.
    pub(super) fn lock(&self) -> MutexGuard<'_, KnownState> {
        self.0.lock()
    }

    /// Returns the pages with a damaged image.
    pub(super) fn damaged_images(&self) -> Vec<PageId> {
        self.0.lock().damaged_images.values().copied().collect()
    }

    /// Replaces the newest snapshot with a published snapshot that follows no other. `base` is the result of
    /// [`NewestSnapshot::of_base`] for the published snapshot. Returns the totals of its images and an empty list of
    /// links.
    pub fn advance_to_base(
        &self,
        manifest: &Manifest,
        manifest_crc: u32,
        base: NewestSnapshot,
    ) -> (ImageTotals, Vec<SnapshotId>) {
        let mut state = self.0.lock();
        state.newest.advance_to_base(manifest, manifest_crc, base);
        state.advanced(manifest)
    }

    /// Replaces the newest snapshot with a published snapshot that follows `previous`. The caller must create `link`
    /// from `manifest` before the publication, because a failed allocation after the publication could not be handled.
    /// Returns the totals of the snapshot's images, and the links before its own link, newest first.
    pub fn advance_by_change(
        &self,
        manifest: &Manifest,
        link: Link,
        previous: SnapshotId,
    ) -> (ImageTotals, Vec<SnapshotId>) {
        let mut state = self.0.lock();
        state.newest.advance_by_change(manifest, link, previous);
        state.advanced(manifest)
    }
}

impl KnownState {
    fn advanced(&mut self, manifest: &Manifest) -> (ImageTotals, Vec<SnapshotId>) {
        // If an image was recorded before `redo`, this snapshot lists it, or it contains an older version of its page.
        self.unnamed.retain(|_, known| known.lsn > manifest.redo.lsn);
        self.unverified.retain(|_, (known, _)| known.lsn > manifest.redo.lsn);
        let before = self.newest.links.iter().rev().skip(1).map(|link| link.snapshot).collect();
        (self.newest.sums().clone(), before)
    }
}

/// Returns whether an image of `page` or the base of the image is damaged. An image identifies its base by file only,
/// which suffices because a file contains at most one image of a page.
fn is_damaged(damaged_images: &BTreeMap<(u64, u64), PageId>, page: PageId, image: &ImageRef) -> bool {
    let of_base = |file| damaged_images.range((file, 0)..=(file, u64::MAX)).any(|(_, of)| *of == page);
    damaged_images.contains_key(&location(image)) || image.files().skip(1).any(|(file, _)| of_base(file))
}

/// Returns the file number and offset of an image. They identify the image, because file numbers are never reused.
fn location(image: &ImageRef) -> (u64, u64) {
    (image.file, image.offset)
}

#[cfg(test)]
mod tests {
    use remanent_format::image::{Codec, OverlayBase};
    use remanent_format::{FileName, Folder, PageInfo, Place};

    use super::*;
    use crate::catalog::entry;
    use crate::catalog::sample::base;
    use crate::disk::Disk;
    use crate::testing::sim_disk::{DiskFault, Operation, SimDisk};

    const PAGE: PageId = PageId(1);

    fn overlay(file: u64, base: u64) -> ImageRef {
        let codec = Codec::Overlay(OverlayBase { file: base, stored_len: 100_000 });
        ImageRef { file, offset: 4224, stored_len: 100, stored_crc: 1, raw_crc: 2, codec }
    }

    /// Adjacent images are read together, but each is verified separately.
    #[test]
    fn valid_read_back_images_become_known() {
        const LEN: usize = 5008;
        let disk = SimDisk::new();
        disk.make_folder(Folder::Pages).unwrap();
        let bytes: Vec<u8> = (0..20 * LEN).map(|at| (at % 251) as u8).collect();
        let file = disk.create(FileName::Pages(1)).unwrap();
        file.write_at(0, &bytes).and_then(|()| file.sync()).unwrap();
        disk.sync_folder(Folder::Pages).unwrap();
        let image = |number: usize| {
            let at = 4096 + LEN * number;
            let (offset, crc) = (at as u64, crc32fast::hash(&bytes[at..][..LEN]));
            let len = LEN as u64;
            ImageRef { file: 1, offset, stored_len: len, stored_crc: crc, raw_crc: crc, codec: Codec::Raw }
        };
        let known = KnownImages::default();
        for number in 0..8 {
            let mut image = image(number);
            match number {
                // Three of the images are bad: the bytes differ from the batch's checksum, the position is beyond the
                // end of the file, and the file does not exist.
                2 => image.raw_crc ^= 1,
                4 => image.offset += 1 << 20,
                5 => image.file = 9,
                _ => {}
            }
            known.note_ahead(PageId(number as u64), Lsn(7), image, LEN as u64);
        }
        // A scrub found damage that this read does not find.
        known.mark_damaged(PageId(6), &image(6), (1, image(6).offset));
        let disk = Arc::new(disk);
        let source = DiskSource::bypassing_cache(disk.clone());
        // While no file can be read for lack of file handles, no image is known to be damaged.
        disk.fail(DiskFault { operation: Operation::Open, skip: 0, times: usize::MAX, errno: libc::EMFILE });
        let error = known.prove(&source, 2).unwrap_err();
        assert!(error.is_shortage(), "{error}");
        disk.clear_faults();
        assert_eq!(known.prove(&source, 2).unwrap(), 8 * LEN as u64);
        let found: Vec<u64> = known.0.lock().unnamed.keys().map(|page| page.0).collect();
        assert_eq!(found, [0, 1, 3, 7]);
        assert_eq!(known.prove(&source, 2).unwrap(), 0, "none is read back twice");
    }

    /// Damage to a base found through one overlay applies to all other overlays of that base.
    #[test]
    fn damaged_base_invalidates_its_overlays() {
        let mut info = PageInfo::new(PAGE, 100_000, Place::Disk);
        (info.epoch, info.lsn) = (Epoch(1), Lsn(1));
        let (before, newest) = (overlay(5, 3), overlay(6, 3));
        let known = |page: PageId, at: (u64, u64)| {
            let (known, manifest) = (KnownImages::default(), base(vec![entry(&info, Some(newest))]));
            known.advance_to_base(&manifest, 0, NewestSnapshot::of_base(&manifest));
            known.mark_damaged(page, &before, at);
            (known.may_be_base(PAGE, &newest, true), known.image_of(PAGE, Epoch(1)).is_some())
        };
        assert_eq!(known(PAGE, (5, 4224)), (true, true), "the other overlay itself");
        assert_eq!(known(PAGE, (3, 4224)), (false, false), "what both lie over");
        assert_eq!(known(PageId(2), (3, 9000)), (true, true), "another page's image in that file");
    }
}
