//! The newest snapshot in memory: the images that it names, by page and by file.

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::image::{ImageHeaderRaw, ImageRef};
use remanent_format::limits::{FRAME_ALIGN, align_up};
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind};
use remanent_format::state::id_map::IdMap;
use remanent_format::{Epoch, Lsn, PageId, SnapshotId};

use crate::base::allocation::collected;
use crate::error::Result;

/// The maximum number of links of a snapshot, including its base and itself.
pub(super) const LINKS_MAX: usize = 8;
/// The inverse of the share of pages that all changes since the base may affect.
const CHANGED_SHARE: usize = 2;

/// An image of a page after batch `lsn`, or no image if the page is empty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct KnownImage {
    pub lsn: Lsn,
    pub image: Option<ImageRef>,
}

/// The newest snapshot's entry for a page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SnapshotPage {
    /// The version of the page in the image.
    pub epoch: Epoch,
    pub known: KnownImage,
}

/// A link of the newest snapshot, with the pages in it.
pub(crate) struct Link {
    pub snapshot: SnapshotId,
    pub manifest_crc: u32,
    /// The pages in the link, existing or deleted. Empty for a base.
    pub pages: Vec<PageId>,
}

impl Link {
    /// Returns the snapshot's own link.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn of(manifest: &Manifest, manifest_crc: u32) -> Result<Self> {
        let (entries, tombstones) = (manifest.entries.iter(), manifest.tombstones.iter());
        let pages = entries.map(|entry| entry.page).chain(tombstones.map(|tombstone| tombstone.page));
        let is_base = manifest.kind == ManifestKind::Base;
        let pages = if is_base { Vec::new() } else { collected(pages)? };
        Ok(Self { snapshot: manifest.snapshot, manifest_crc, pages })
    }
}

/// The number of pages that a snapshot names, and the size of their images.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ImageTotals {
    /// The number of pages, including empty pages.
    pub pages: u64,
    /// The total size of the pages' images in bytes.
    pub bytes: u64,
    /// The image files, with the number of bytes in each that the snapshot names.
    pub files: BTreeMap<u64, u64>,
}

impl ImageTotals {
    /// Returns the totals of pages with these images.
    pub fn of(images: impl Iterator<Item = Option<ImageRef>>) -> Self {
        let mut sums = Self::default();
        images.for_each(|image| sums.add(image));
        sums
    }

    fn add(&mut self, image: Option<ImageRef>) {
        self.pages += 1;
        if let Some(image) = image {
            for (file, stored_len) in image.files() {
                self.bytes += stored_len;
                *self.files.entry(file).or_default() += in_file(stored_len);
            }
        }
    }

    /// Subtracts an image that was added before.
    fn subtract(&mut self, image: Option<ImageRef>) {
        self.pages -= 1;
        if let Some(image) = image {
            for (file, stored_len) in image.files() {
                self.bytes -= stored_len;
                let left = self.files.get_mut(&file).expect("added before");
                *left -= in_file(stored_len);
                if *left == 0 {
                    self.files.remove(&file);
                }
            }
        }
    }
}

/// Returns the number of bytes that an image of this length takes in its file.
fn in_file(stored_len: u64) -> u64 {
    align_up(stored_len, FRAME_ALIGN) + ImageHeaderRaw::LEN as u64
}

/// The newest snapshot: its links, and the images that it names. The value is updated link by link, so that a snapshot
/// with few changes is not read as a whole.
#[derive(Default)]
pub(crate) struct NewestSnapshot {
    /// The links, starting with the base. Empty if there is no snapshot, or none that the next snapshot may follow.
    pub(super) links: Vec<Link>,
    pages: IdMap<PageId, SnapshotPage>,
    sums: ImageTotals,
    /// The pages with an image in each file, as runs. Some of these pages may now have a newer image in another file. A
    /// file is removed once none of its images is named.
    runs: BTreeMap<u64, FileRuns>,
}

/// The pages with an image in one file, as runs. A map makes only small allocations, which is required because the
/// snapshot is already published when the pages are recorded, and a failed allocation could no longer be handled.
#[derive(Default)]
struct FileRuns {
    /// The number of pages in each run, by its first page.
    counts: BTreeMap<PageId, u64>,
    /// The first page of the run that was extended last.
    newest: PageId,
}

impl FileRuns {
    /// Records a page, which usually extends the last run.
    fn note(&mut self, page: PageId) {
        match self.counts.get_mut(&self.newest) {
            Some(count) if self.newest.0 + *count == page.0 => *count += 1,
            _ => {
                // Runs of other snapshots may overlap this one, so a page can be in several.
                self.counts.entry(page).or_insert(1);
                self.newest = page;
            }
        }
    }

    fn pages(&self) -> impl Iterator<Item = PageId> + '_ {
        self.counts.iter().flat_map(|(first, count)| (first.0..first.0 + count).map(PageId))
    }
}

impl NewestSnapshot {
    /// Assembles a snapshot from its links. `entries` contains all its pages.
    pub(super) fn of<'e>(links: Vec<Link>, entries: impl Iterator<Item = &'e ManifestEntry>) -> Self {
        let mut newest = Self { links, ..Self::default() };
        let noted = entries.inspect(|entry| {
            newest.sums.add(entry.image);
            note(&mut newest.runs, entry);
        });
        newest.pages = noted.map(|entry| (entry.page, named(entry))).collect();
        newest
    }

    /// Prepares a snapshot without a predecessor before it becomes the newest. Only its link is omitted, whose checksum
    /// may not be known yet.
    pub fn of_base(manifest: &Manifest) -> Self {
        Self::of(Vec::new(), manifest.entries.iter())
    }

    /// Advances to a snapshot that follows no other. `base` is the result of [`of_base`](Self::of_base) for this
    /// snapshot.
    pub fn advance_to_base(&mut self, manifest: &Manifest, manifest_crc: u32, base: Self) {
        *self = base;
        self.links = vec![Link { snapshot: manifest.snapshot, manifest_crc, pages: Vec::new() }];
    }

    /// Advances to a snapshot that follows `previous`, which may be older than the newest snapshot. `manifest` is the
    /// snapshot's own link.
    pub fn advance_by_change(&mut self, manifest: &Manifest, link: Link, previous: SnapshotId) {
        assert!(previous < manifest.snapshot); // I8: links ascend, and retention keeps the earlier ones.
        self.links.retain(|before| before.snapshot <= previous);
        self.links.push(link);
        for entry in &manifest.entries {
            if let Some(before) = self.pages.insert(entry.page, named(entry)) {
                self.sums.subtract(before.known.image);
            }
            self.sums.add(entry.image);
            note(&mut self.runs, entry);
        }
        for tombstone in &manifest.tombstones {
            if let Some(before) = self.pages.remove(tombstone.page) {
                self.sums.subtract(before.known.image);
            }
        }
        self.runs.retain(|file, _| self.sums.files.contains_key(file));
    }

    /// Returns the link that the next snapshot follows, with the other pages of the links that it replaces. `changed`
    /// contains the pages that changed since the newest snapshot, in ascending order. Returns `None` if the next
    /// snapshot must name all of `pages_max` pages.
    ///
    /// If there are too many links, the newest links are folded into the next link, as long as each of them is no
    /// longer than the next link has become so far. Thus older links are longer, and few pages are named repeatedly. A
    /// base is written only after enough changes that it costs little more.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn fold(&self, changed: &[PageId], pages_max: usize) -> Result<Option<(&Link, Vec<PageId>)>> {
        let Some(mut at) = self.links.len().checked_sub(1) else { return Ok(None) };
        let mut folded = BTreeSet::new();
        if self.links.len() >= LINKS_MAX {
            let newest = at;
            while at > 0 && (at == newest || self.links[at].pages.len() <= changed.len() + folded.len()) {
                let pages = self.links[at].pages.iter();
                folded.extend(pages.filter(|page| changed.binary_search(page).is_err()));
                at -= 1;
            }
        }
        let mentioned = changed.len() + folded.len();
        let changes = self.links[..=at].iter().map(|link| link.pages.len()).sum::<usize>() + mentioned;
        if changes.saturating_mul(CHANGED_SHARE) > pages_max {
            return Ok(None);
        }
        Ok(Some((&self.links[at], collected(folded)?)))
    }

    /// Returns whether the snapshot names only images of these pages in some image file.
    pub fn has_file_of(&self, pages: &[PageId]) -> bool {
        let mut theirs = ImageTotals::default();
        let images = pages.iter().filter_map(|page| self.get(*page)).map(|named| named.known.image);
        images.for_each(|image| theirs.add(image));
        theirs.files.iter().any(|(file, bytes)| self.sums.files.get(file) == Some(bytes))
    }

    pub(super) fn get(&self, page: PageId) -> Option<&SnapshotPage> {
        self.pages.get(page)
    }

    /// Returns the pages that the snapshot names.
    pub fn pages(&self) -> impl Iterator<Item = PageId> + '_ {
        self.pages.iter().map(|(page, _)| page)
    }

    /// Returns the pages that the snapshot names, with their entries.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PageId, &SnapshotPage)> {
        self.pages.iter()
    }

    pub fn sums(&self) -> &ImageTotals {
        &self.sums
    }

    /// Returns the pages with a named image in a file, each of them once.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn pages_in(&self, file: u64) -> Result<Vec<PageId>> {
        let pages = self.runs.get(&file).into_iter().flat_map(FileRuns::pages);
        let is_there = |page: &PageId| {
            let image = self.get(*page).and_then(|named| named.known.image);
            image.is_some_and(|image| image.files().any(|(of, _)| of == file))
        };
        let mut pages = collected(pages.filter(is_there))?;
        pages.sort_unstable();
        pages.dedup();
        Ok(pages)
    }
}

/// Records that the file of an entry's image contains an image of the page. Entries must be in ascending order, so that
/// a file with adjacent pages has few runs.
fn note(runs: &mut BTreeMap<u64, FileRuns>, entry: &ManifestEntry) {
    let Some(image) = entry.image else { return };
    image.files().for_each(|(file, _)| runs.entry(file).or_default().note(entry.page));
}

fn named(entry: &ManifestEntry) -> SnapshotPage {
    SnapshotPage { epoch: entry.epoch, known: KnownImage { lsn: entry.lsn, image: entry.image } }
}
