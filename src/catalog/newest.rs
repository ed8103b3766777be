//! The newest snapshot in memory: the images that the snapshot names, by page and by file.

use std::collections::{BTreeMap, BTreeSet};

use remanent_format::image::{ImageHeaderRaw, ImageRef};
use remanent_format::limits::{FRAME_ALIGN, align_up};
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind};
use remanent_format::state::id_map::IdMap;
use remanent_format::{Epoch, Lsn, PageId, SnapshotId};

use crate::base::allocation::collected;
use crate::error::Result;

/// The maximum length of a snapshot's chain of links, including the base and the snapshot's own link.
pub(super) const LINKS_MAX: usize = 8;
/// The inverse of the maximum share of all pages that the links after the base may contain. If the links would contain
/// more pages, the next snapshot is a base.
const CHANGED_SHARE: usize = 2;

/// An image of a page after batch `lsn`, or no image if the page is empty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct KnownImage {
    pub lsn: Lsn,
    pub image: Option<ImageRef>,
}

/// The entry of one page in the newest snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SnapshotPage {
    /// The version of the page that the image contains.
    pub epoch: Epoch,
    pub known: KnownImage,
}

/// A link of the newest snapshot, and the pages that the link names.
pub(crate) struct Link {
    pub snapshot: SnapshotId,
    pub manifest_crc: u32,
    /// The existing and deleted pages that the link names. Empty for a base.
    pub pages: Vec<PageId>,
}

impl Link {
    /// Returns the link that `manifest` contains.
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
    /// The number of bytes that the snapshot names in each image file, by file number.
    pub files: BTreeMap<u64, u64>,
}

impl ImageTotals {
    /// Returns the number of pages and bytes of `images`. `None` counts as an empty page.
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

    /// Removes a page with this image from the totals. The page must have been added before.
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

/// Returns the number of bytes that an image of `stored_len` bytes occupies in its file, including header and padding.
fn in_file(stored_len: u64) -> u64 {
    align_up(stored_len, FRAME_ALIGN) + ImageHeaderRaw::LEN as u64
}

/// The newest snapshot in memory: its links, and the images that it names. Each new snapshot updates this value with
/// the pages in its own link, so that the cost is proportional to the changes.
#[derive(Default)]
pub(crate) struct NewestSnapshot {
    /// The links, starting with the base. Empty if the next snapshot must be a base.
    pub(super) links: Vec<Link>,
    pages: IdMap<PageId, SnapshotPage>,
    sums: ImageTotals,
    /// The pages with an image in each file, as runs of consecutive pages, by file number. A page in a run may
    /// now have a newer image in another file. The entry of a file is removed when the snapshot names no image
    /// in the file.
    runs: BTreeMap<u64, FileRuns>,
}

/// The pages with an image in one file, as runs of consecutive pages. Runs are recorded after the snapshot is
/// published, when a failed allocation can no longer be handled. A map therefore stores the runs, because a map makes
/// only small allocations.
#[derive(Default)]
struct FileRuns {
    /// The number of pages in each run, by the first page of the run.
    counts: BTreeMap<PageId, u64>,
    /// The first page of the run that was extended last.
    newest: PageId,
}

impl FileRuns {
    /// Adds a page. Usually the page extends the run that was extended last.
    fn note(&mut self, page: PageId) {
        match self.counts.get_mut(&self.newest) {
            Some(count) if self.newest.0 + *count == page.0 => *count += 1,
            _ => {
                // Runs that other snapshots added may overlap this one, so a page can be in several runs.
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
    /// Assembles a snapshot from its links. `entries` contains the entries of all pages of the snapshot.
    pub(super) fn of<'e>(links: Vec<Link>, entries: impl Iterator<Item = &'e ManifestEntry>) -> Self {
        let mut newest = Self { links, ..Self::default() };
        let noted = entries.inspect(|entry| {
            newest.sums.add(entry.image);
            note(&mut newest.runs, entry);
        });
        newest.pages = noted.map(|entry| (entry.page, named(entry))).collect();
        newest
    }

    /// Prepares the state for a snapshot without a predecessor, before the snapshot is published. The result has no
    /// link yet, because the checksum of the link may not be known.
    pub fn of_base(manifest: &Manifest) -> Self {
        Self::of(Vec::new(), manifest.entries.iter())
    }

    /// Replaces this value with a snapshot that follows no other. `base` is the result of [`of_base`](Self::of_base)
    /// for the new snapshot.
    pub fn advance_to_base(&mut self, manifest: &Manifest, manifest_crc: u32, base: Self) {
        *self = base;
        self.links = vec![Link { snapshot: manifest.snapshot, manifest_crc, pages: Vec::new() }];
    }

    /// Updates this value to a snapshot that follows `previous`, a snapshot that may be older than the newest.
    /// `manifest` is the own link of the new snapshot.
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

    /// Returns the link that the next snapshot follows, and the pages of the replaced links that `changed` does not
    /// contain. `changed` contains the pages that changed since the newest snapshot, in ascending order. Returns `None`
    /// if the next snapshot must name all of `pages_max` pages.
    ///
    /// At [`LINKS_MAX`] links, the next link also lists the pages of the newest link, which it thus replaces (the
    /// newest link is *folded*). Each earlier link is folded as well, as long as it has no more pages than the next
    /// link has so far. Older links are therefore longer, and few pages are listed repeatedly. A base is written only
    /// after enough changes that it costs little more than a link.
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

    /// Returns whether there is an image file whose images in the snapshot all belong to `pages`.
    pub fn has_file_of(&self, pages: &[PageId]) -> bool {
        let mut theirs = ImageTotals::default();
        let images = pages.iter().filter_map(|page| self.get(*page)).map(|named| named.known.image);
        images.for_each(|image| theirs.add(image));
        theirs.files.iter().any(|(file, bytes)| self.sums.files.get(file) == Some(bytes))
    }

    pub(super) fn get(&self, page: PageId) -> Option<&SnapshotPage> {
        self.pages.get(page)
    }

    /// Returns all pages that the snapshot names.
    pub fn pages(&self) -> impl Iterator<Item = PageId> + '_ {
        self.pages.iter().map(|(page, _)| page)
    }

    /// Returns all pages that the snapshot names, with their entries.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PageId, &SnapshotPage)> {
        self.pages.iter()
    }

    pub fn sums(&self) -> &ImageTotals {
        &self.sums
    }

    /// Returns the pages with a named image in `file`, without duplicates.
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

/// Adds the page of `entry` to the runs of its image's file. Callers must pass entries in ascending order, so that
/// adjacent pages share a run.
fn note(runs: &mut BTreeMap<u64, FileRuns>, entry: &ManifestEntry) {
    let Some(image) = entry.image else { return };
    image.files().for_each(|(file, _)| runs.entry(file).or_default().note(entry.page));
}

fn named(entry: &ManifestEntry) -> SnapshotPage {
    SnapshotPage { epoch: entry.epoch, known: KnownImage { lsn: entry.lsn, image: entry.image } }
}
