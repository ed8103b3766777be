//! Floor 5. What lies on disk already: which pages the next snapshot need not gather.
//!
//! A page's bytes are those of an image as long as no batch touched the page since, and its Lsn tells: one Lsn
//! of one page is one content. So a snapshot gathers the pages whose Lsn is another than that of the image
//! known, and names the known image for the others. A batch that only moves a page leaves its epoch, and one
//! epoch of one page is one content, too: then the snapshot says where it is now, and names the image that it
//! had. It takes about 90 bytes of memory a page.
//!
//! Nothing here is on disk: it is rebuilt by each open from the snapshot used and the log behind it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind};
use remanent_format::rebuild::{Survey, check_image};
use remanent_format::replay::Resolved;
use remanent_format::{Epoch, Lsn, PageId, PageTable, ReadAt, SnapshotId};

use super::entry;
use crate::error::Result;
use crate::sync::Mutex;

/// A snapshot follows the one before as long as it has at most this many links, its base and itself among them.
const LINKS_MAX: usize = 8;
/// And as long as all changes since the base are at most this share of the pages: one in so many.
const CHANGED_SHARE: usize = 2;

/// An image that holds a page as batch `lsn` left it; none if the page is empty.
#[derive(Clone, Copy)]
struct Known {
    lsn: Lsn,
    /// The page's version then, where that is known.
    epoch: Option<Epoch>,
    image: Option<ImageRef>,
}

/// The link that the next snapshot may follow.
#[derive(Clone)]
pub(crate) struct Link {
    pub snapshot: SnapshotId,
    pub manifest_crc: u32,
    /// The links before it, the newest first.
    pub before: Vec<SnapshotId>,
    /// Entries and tombstones of all changes since the base.
    pub changed: usize,
}

/// The newest snapshot: its link, and the images that it names.
#[derive(Clone, Default)]
pub(crate) struct Newest {
    pub link: Option<Link>,
    pages: BTreeMap<PageId, Known>,
}

/// The images that lie on disk and hold a page's bytes of now, or of a moment ago.
#[derive(Default)]
pub(crate) struct KnownImages {
    newest: Mutex<Arc<Newest>>,
    /// Images that the newest snapshot does not name: those of a restore's table, and those that were written
    /// ahead of their batch.
    beside: Mutex<BTreeMap<PageId, Known>>,
    /// Images that were written ahead of their batch, and that nobody read back yet; with the pages' lengths.
    ahead: Mutex<BTreeMap<PageId, (Known, u64)>>,
    /// Images that do not hold any more, by file and offset: no snapshot names them again.
    spoilt: Mutex<HashSet<(u64, u64)>>,
}

/// What a snapshot has to do, as of the batch at which it begins.
pub(crate) struct Sorted {
    /// The pages to gather, with their lengths in bytes.
    pub gather: Vec<(PageId, u64)>,
    /// Pages that it must name, and whose images are known.
    pub entries: Vec<ManifestEntry>,
    /// Pages of the newest snapshot that are gone.
    pub gone: Vec<PageId>,
    /// The link that it follows; if none, it names all pages.
    pub follows: Option<Link>,
}

impl KnownImages {
    /// What an open knows once it followed the log behind a snapshot.
    pub fn recovered(survey: &Survey, base: Option<SnapshotId>, resolved: &Resolved) -> Result<Self> {
        let mut newest = Newest::default();
        if let Some(base) = base {
            let chain = survey.chain(base)?;
            newest.link = Some(Link {
                snapshot: base,
                manifest_crc: survey.links[&base].as_ref().map_err(Clone::clone)?.1.header_crc,
                before: chain[1..].iter().map(|link| link.snapshot).collect(),
                changed: chain[..chain.len() - 1].iter().map(|link| link.changes()).sum(),
            });
            newest.pages = survey.snapshot(base)?.entries.iter().map(known).collect();
        }
        // What replay took from elsewhere: a restore's table, images named by the log.
        let beside = resolved.bases.iter().filter_map(|(page, base)| {
            let info = resolved.table.get(*page)?;
            let is_newest = newest.pages.get(page).is_some_and(|known| known.lsn == info.lsn);
            let holds = info.lsn <= base.lsn && !base.resized && (base.image.is_some() || info.len == 0);
            (holds && !is_newest).then_some((*page, Known { lsn: info.lsn, epoch: None, image: base.image }))
        });
        let beside = Mutex::new(beside.collect());
        Ok(Self { newest: Mutex::new(Arc::new(newest)), beside, ..Self::default() })
    }

    /// The newest snapshot.
    pub fn newest(&self) -> Arc<Newest> {
        self.newest.lock().clone()
    }

    /// Notes an image that no snapshot names yet, and that holds the page as batch `lsn` left it. Something
    /// else keeps its file until one does.
    pub fn note(&self, page: PageId, lsn: Lsn, image: Option<ImageRef>) {
        self.beside.lock().insert(page, Known { lsn, epoch: None, image });
    }

    /// Notes an image that was written ahead of batch `lsn`, for a page of length `len`.
    pub fn note_ahead(&self, page: PageId, lsn: Lsn, image: ImageRef, len: u64) {
        self.ahead.lock().insert(page, (Known { lsn, epoch: None, image: Some(image) }, len));
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
    pub fn spoil(&self, image: &ImageRef) {
        let is_it = |known: &Known| known.image.is_some_and(|known| place(&known) == place(image));
        self.beside.lock().retain(|_, known| !is_it(known));
        // It stays among the newest snapshot's: were its page deleted, the next one must say that it is gone.
        self.spoilt.lock().insert(place(image));
    }

    /// Lets the next snapshot follow none: a link before it does not hold.
    pub fn unlink(&self) {
        Arc::make_mut(&mut *self.newest.lock()).link = None;
    }

    /// Sorts the pages of a table into those to gather and those that are known. `carry` names image files
    /// whose images are to be written again, with the bytes that this takes, the most wasteful first: as many
    /// of them as fit into `carry_bytes_max`, or into what the snapshot writes anyway.
    pub fn sort_out(&self, table: &PageTable, carry: &[(u64, u64)], carry_bytes_max: u64) -> Sorted {
        let (newest, beside) = (self.newest(), self.beside.lock());
        let spoilt = self.spoilt.lock();
        let holds = |known: &Known| known.image.is_none_or(|image| !spoilt.contains(&place(&image)));
        let is_unchanged =
            |page, lsn| newest.pages.get(&page).filter(|known| known.lsn == lsn && holds(known));
        let (mut gather, mut entries) = (Vec::new(), Vec::new());
        for info in table.pages() {
            if is_unchanged(info.page, info.lsn).is_some() {
                continue;
            }
            let beside = beside.get(&info.page).filter(|known| known.lsn == info.lsn);
            let only_moved = |known: &&Known| known.epoch == Some(info.epoch) && holds(known);
            match beside.or_else(|| newest.pages.get(&info.page).filter(only_moved)) {
                Some(known) => entries.push(entry(info, known.image)),
                None => gather.push((info.page, info.len)),
            }
        }
        let dirty_bytes: u64 = gather.iter().map(|(_, len)| len).sum();
        let mut room = dirty_bytes.max(carry_bytes_max);
        let mut carried = BTreeSet::new();
        for (file, bytes) in carry {
            if *bytes <= room {
                room -= bytes;
                carried.insert(*file);
            }
        }
        let is_carried = |known: &Known| known.image.is_some_and(|image| carried.contains(&image.file));
        if !carried.is_empty() {
            let more = table.pages().filter(|info| is_unchanged(info.page, info.lsn).is_some_and(is_carried));
            gather.extend(more.map(|info| (info.page, info.len)));
            gather.sort_unstable();
        }
        let gone: Vec<PageId> =
            newest.pages.keys().copied().filter(|page| table.get(*page).is_none()).collect();
        let changes = gather.len() + entries.len() + gone.len();
        let follows = newest.link.clone().filter(|link| {
            // Its base, itself, and the one to come.
            link.before.len() + 2 <= LINKS_MAX
                && (link.changed + changes).saturating_mul(CHANGED_SHARE) <= table.pages().len()
        });
        if follows.is_none() {
            let unchanged = table.pages().filter_map(|info| {
                let known = is_unchanged(info.page, info.lsn).filter(|known| !is_carried(known))?;
                Some(entry(info, known.image))
            });
            entries.extend(unchanged);
        }
        Sorted { gather, entries, gone, follows }
    }

    /// A snapshot was published: `manifest` is its own link.
    pub fn advance(&self, manifest: &Manifest, link: Link) -> Arc<Newest> {
        let mut guard = self.newest.lock();
        let newest = Arc::make_mut(&mut *guard);
        if manifest.kind == ManifestKind::Base {
            newest.pages.clear();
        }
        newest.pages.extend(manifest.entries.iter().map(known));
        for tombstone in &manifest.tombstones {
            newest.pages.remove(&tombstone.page);
        }
        newest.link = Some(link);
        // Whatever was known up to there, this snapshot names, or it is of the past.
        self.beside.lock().retain(|_, known| known.lsn > manifest.redo.lsn);
        guard.clone()
    }
}

impl Newest {
    /// The images that the snapshot names, one a page.
    pub fn images(&self) -> impl Iterator<Item = Option<ImageRef>> + '_ {
        self.pages.values().map(|known| known.image)
    }
}

/// Where an image lies: numbers of files are never used again, so this is its name.
fn place(image: &ImageRef) -> (u64, u64) {
    (image.file, image.offset)
}

fn known(entry: &ManifestEntry) -> (PageId, Known) {
    (entry.page, Known { lsn: entry.lsn, epoch: Some(entry.epoch), image: entry.image })
}
