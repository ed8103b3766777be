//! Moves of pages to disk, and from disk to memory.
//!
//! Before a batch that moves a page to disk is logged, an image contains the page's bytes. This is an image of the
//! newest snapshot, or one that is written for this batch. The batch's frame does not name the image. If a crash loses
//! it, the next open rebuilds the page from an older image and the log.
//!
//! For a page that moves from disk, new memory is filled with the page's bytes before the batch is logged, so the
//! applier never reads the disk.
//!
//! In both cases, the page is read without the submission lock. If another batch changes the page before this batch is
//! logged, the draft is stale: it is discarded and prepared again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use remanent_format::op::{Op, OpAt};
use remanent_format::{Lsn, PageId, PageInfo, PageTable, Place};

use super::Committer;
use super::batch_images::BatchImages;
use super::demoted_reader::{DemotedReader, ReadPages};
use super::page_memory::{RequiredMemory, each_comes_once};
use crate::applier::{FilledMemory, NewDiskImages};
use crate::base::allocation::{collected, insert, push, set_of};
use crate::base::phases::{self, Phase};
use crate::device::Span;
use crate::disk::source::DiskSource;
use crate::engine::Engine;
use crate::error::{Error, Invalid, Result};
use crate::images::PendingImages;
use crate::images::disk_pages::{DiskImage, DiskPage, PendingClaim, pending_bytes_of};
use crate::images::read::{damaged, prove};
use crate::memory::arena::PageMemory;

/// The operations of a batch that affect pages on disk.
#[derive(Debug, Default)]
pub(super) struct DiskOps {
    /// The indices of the operations whose page is on disk at that point of the batch.
    pub on_disk: Vec<usize>,
    /// The pages that move to disk.
    pub to_disk: Vec<PageId>,
    /// The pages that move from disk to memory.
    pub from_disk: Vec<PageId>,
}

/// The state of a page after some operations of a batch.
#[derive(Clone, Copy, Default)]
struct PageState {
    is_on_disk: bool,
    /// Whether the batch created the page, or changed its bytes or length.
    is_changed: bool,
    /// Whether the batch has moved the page to or from disk.
    has_moved: bool,
}

impl DiskOps {
    /// Finds the operations that affect pages on disk. `place_of` returns the places of pages before the batch.
    ///
    /// # Errors
    /// `Invalid` if the batch moves a page to or from disk after it changed the page's bytes, because the
    /// bytes that move are those before the batch.
    pub fn find(ops: &[OpAt<'_>], place_of: impl Fn(PageId) -> Option<Place>) -> Result<Self> {
        let mut found = Self::default();
        let mut states: HashMap<PageId, PageState> = HashMap::new();
        let comes_once = each_comes_once(ops);
        for (index, at) in ops.iter().enumerate() {
            let Some(page) = at.op.page() else { continue };
            let before = states.get(&page).copied().unwrap_or_else(|| PageState {
                is_on_disk: place_of(page) == Some(Place::Disk),
                ..PageState::default()
            });
            let mut state = before;
            match at.op {
                Op::Create { place, .. } => {
                    state =
                        PageState { is_on_disk: place == Place::Disk, is_changed: true, has_moved: false };
                }
                Op::Move { place, .. } if (place == Place::Disk) != before.is_on_disk => {
                    let list = if before.is_on_disk { &mut found.from_disk } else { &mut found.to_disk };
                    push(list, page)?;
                    if before.has_moved || before.is_changed {
                        let reason = "the batch moves a page to disk or from there after it changed or moved it: \
                                      move it first";
                        return Err(Error::Invalid(Invalid::Operation { index, reason: reason.to_owned() }));
                    }
                    (state.is_on_disk, state.has_moved) = (!before.is_on_disk, true);
                }
                Op::Delete { .. } | Op::Move { .. } | Op::SetMetadata { .. } | Op::RemoveMetadata { .. } => {}
                _ => {
                    state.is_changed = true;
                    if before.is_on_disk {
                        push(&mut found.on_disk, index)?;
                    }
                }
            }
            if !comes_once {
                insert(&mut states, page, state)?;
            }
        }
        Ok(found)
    }

    /// Returns whether no operation affects a page on disk.
    pub fn is_empty(&self) -> bool {
        self.on_disk.is_empty() && self.to_disk.is_empty() && self.from_disk.is_empty()
    }

    /// Returns whether both values contain the same operations and pages.
    ///
    /// The elements are compared one by one. Comparing two empty slices directly compiles to a call that reads nothing
    /// at a dangling address, which takes about 30 ns on processors with masked loads.
    pub fn is_same(&self, other: &Self) -> bool {
        self.on_disk.iter().eq(&other.on_disk)
            && self.to_disk.iter().eq(&other.to_disk)
            && self.from_disk.iter().eq(&other.from_disk)
    }

    /// Returns whether the page of operation `index` is on disk at that point of the batch.
    pub fn has(&self, index: usize) -> bool {
        self.on_disk.binary_search(&index).is_ok()
    }

    /// Returns whether the payload contains bytes for a page in memory. The applier copies such bytes to the page, so
    /// they must be in staging memory.
    pub fn leaves_bytes(&self, ops: &[OpAt<'_>]) -> bool {
        let has_bytes = |op: &Op<'_>| match op {
            Op::Fill { .. } => false,
            op => op.range().is_some_and(|(_, len)| len > 0),
        };
        ops.iter().enumerate().any(|(index, at)| has_bytes(&at.op) && !self.has(index))
    }

    /// Returns an upper bound of the bytes that the batch adds to pending writes of pages on disk.
    fn pending_bytes(&self, ops: &[OpAt<'_>]) -> u64 {
        let bytes = self.on_disk.iter().map(|index| pending_bytes_of(&ops[*index].op));
        bytes.fold(0, u64::saturating_add)
    }
}

/// The pages that a batch moves to disk, and the images that contain their bytes.
#[derive(Default)]
pub(super) struct DemotedPages<'a> {
    /// The images, in ascending order of page id.
    pub images: NewDiskImages,
    /// The page versions that the images contain. A version is identified by the Lsn of the page's last change.
    pub versions: Vec<(PageId, Lsn)>,
    /// The image files that were written for this batch.
    pub file: BatchImages<'a>,
}

impl Committer {
    /// Finds the operations of a batch that affect pages on disk. Looks up no page if no page has ever been on disk and
    /// the batch moves none to disk.
    pub(super) fn disk_ops(&self, ops: &[OpAt<'_>], locked: Option<&PageTable>) -> Result<DiskOps> {
        if !self.engine.disk_pages.is_any() && !new_places(ops).any(|place| place == Place::Disk) {
            return Ok(DiskOps::default());
        }
        let place_in = |table: &PageTable, page| table.entry(page).map(|entry| entry.place());
        DiskOps::find(ops, |page| match locked {
            Some(table) => place_in(table, page),
            None => place_in(&self.submitted.lock(), page),
        })
    }

    /// Claims host memory for the batch's writes to pages on disk, and waits until there is enough. A caller that holds
    /// the submission lock does not wait.
    pub(super) fn claim_pending(
        &self,
        found: &DiskOps,
        ops: &[OpAt<'_>],
        locked: Option<&PageTable>,
    ) -> Result<Option<PendingClaim>> {
        if found.on_disk.is_empty() {
            return Ok(None);
        }
        let Engine { disk_pages, log, poison, applier, .. } = &*self.engine;
        let call = || {
            poison.check()?;
            if self.takes_snapshots {
                log.call_watcher();
            }
            Ok(self.takes_snapshots)
        };
        let needed = found.pending_bytes(ops);
        let claim = match locked {
            Some(_) => disk_pages.claim(needed),
            None => match disk_pages.wait_for_room(needed, call) {
                // The applier may be copying bytes of earlier batches at this moment, and these are then counted twice.
                // The retry after those batches makes the outcome independent of the applier's progress.
                Err(Error::OverBudget { .. }) => {
                    applier.turn(|_| Ok(()))?;
                    disk_pages.wait_for_room(needed, call)?
                }
                claimed => claimed?,
            },
        };
        if disk_pages.is_snapshot_due() {
            call()?;
        }
        Ok(Some(claim))
    }

    /// Returns images of the pages that the batch moves to disk, and writes the missing images. Returns `None` if one
    /// of the pages has changed while it was read.
    pub(super) fn demoted_pages(
        &self,
        found: &DiskOps,
        ops: &[OpAt<'_>],
        locked: Option<&PageTable>,
    ) -> Result<Option<DemotedPages<'_>>> {
        let mut demoted = DemotedPages::default();
        if found.to_disk.is_empty() {
            return Ok(Some(demoted));
        }
        let _phase = phases::enter(Phase::Move);
        let (mut known, mut unwritten) = (Vec::new(), Vec::new());
        for &page in &found.to_disk {
            let info = match locked {
                Some(table) => table.get(page),
                None => self.submitted.lock().get(page),
            };
            let info = info.ok_or(Error::UnknownPage { page })?;
            push(&mut demoted.versions, (page, info.lsn))?;
            if info.len == 0 {
                push(&mut demoted.images, (page, None))?;
            } else if let Some(image) = self.known_image(&info) {
                push(&mut known, (info, image))?;
            } else {
                push(&mut unwritten, info)?;
            }
        }
        self.keep_proven(known, &mut demoted.images, &mut unwritten)?;
        if !unwritten.is_empty() && !self.write_unwritten(&unwritten, found, ops, &mut demoted)? {
            return Ok(None);
        }
        // The applier looks up each page's image by its id.
        demoted.images.sort_unstable_by_key(|(page, _)| *page);
        Ok(Some(demoted))
    }

    /// Writes images of the pages in `unwritten`, and adds them to `demoted`. Returns `false` if one of the pages has
    /// changed while it was read.
    fn write_unwritten<'a>(
        &'a self,
        unwritten: &[PageInfo],
        found: &DiskOps,
        ops: &[OpAt<'_>],
        demoted: &mut DemotedPages<'a>,
    ) -> Result<bool> {
        // If the batch also changes a page, the image contains the state before that change, so the next snapshot must
        // not refer to the image.
        let changed = set_of(found.on_disk.iter().filter_map(|index| ops[*index].op.page()));
        let is_changed = |page| changed.contains(&page);
        let stay = unwritten.iter().map(|info| (!is_changed(info.page)).then_some((info.page, info.len)));
        let stay = collected(stay)?;
        let Some(ahead) = self.write_demoted(unwritten)? else { return Ok(false) };
        let mut requests = Vec::new();
        for (info, image) in unwritten.iter().zip(ahead.images()) {
            // The image is verified before the batch is logged, or the batch fails.
            let image = self.engine.disk_pages.proven_image(*image, info.len);
            push(&mut requests, image.request(info.page))?;
            push(&mut demoted.images, (info.page, Some(image)))?;
        }
        // The images are read back before the pages' memory is freed, because no other copy of all the bytes exists
        // (I7).
        prove(&DiskSource::bypassing_cache(self.engine.disk.clone()), requests)?;
        demoted.file = BatchImages::new(ahead, stay);
        Ok(true)
    }

    /// Returns the newest snapshot's image of a page, if it contains the page's current version.
    fn known_image(&self, info: &PageInfo) -> Option<Arc<DiskImage>> {
        let named = self.known.image_of(info.page, info.epoch)?;
        let image = self.engine.disk_pages.proven_image(named, info.len);
        // The check is repeated after the image file was marked as used. If the snapshot still names the image, its
        // file will not be removed.
        (self.known.image_of(info.page, info.epoch) == Some(named)).then_some(image)
    }

    /// Reads images back from the medium. Adds the intact ones to `images`, and the pages of damaged ones to
    /// `unwritten`, so that new images of these pages are written (I7).
    fn keep_proven(
        &self,
        known: Vec<(PageInfo, Arc<DiskImage>)>,
        images: &mut NewDiskImages,
        unwritten: &mut Vec<PageInfo>,
    ) -> Result<()> {
        let source = DiskSource::bypassing_cache(self.engine.disk.clone());
        let mut requests = collected(known.iter().map(|(info, image)| image.request(info.page)))?;
        let damaged = damaged(&source, &mut requests, usize::MAX)?;
        let damaged: HashSet<_> = damaged.iter().map(|(image, _)| (image.file, image.offset)).collect();
        for (info, image) in known {
            let request = image.request(info.page).image;
            if damaged.contains(&(request.file, request.offset)) {
                push(unwritten, info)?;
            } else {
                push(images, (info.page, Some(image)))?;
            }
        }
        Ok(())
    }

    /// Writes images of pages to new files. Returns `None` if one of the pages has changed while it was read.
    fn write_demoted(&self, pages: &[PageInfo]) -> Result<Option<PendingImages<'_>>> {
        let lens = collected(pages.iter().map(|info| (info.page, info.len)))?;
        let demoted = ReadPages::new(&self.engine, pages)?;
        let read = |reader: &mut DemotedReader<'_>, info: &PageInfo, offset, out: &mut [u8]| {
            reader.read(info, offset, out)
        };
        match self.write_read(&lens, || DemotedReader::new(&demoted), read) {
            Ok(ahead) => Ok(Some(ahead)),
            Err(_) if demoted.is_stale() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Fills the new memory of pages that the batch moves from disk. Adds the filled pages to `filled`, and returns the
    /// page versions that were read. If a page has changed since, the returned version makes the draft stale.
    pub(super) fn fill_from_disk(
        &self,
        found: &DiskOps,
        ops: &[OpAt<'_>],
        made: &[RequiredMemory],
        memory: &VecDeque<PageMemory>,
        filled: &mut FilledMemory,
    ) -> Result<Vec<(PageId, Lsn)>> {
        let _phase = phases::enter(Phase::Move);
        // The bytes on disk are not needed if the batch has already filled the page's memory from an image.
        let from_disk = found.from_disk.iter().copied().filter(|page| !filled.has_image_of(*page));
        let mut left = set_of(from_disk);
        let (mut pages, mut targets) = (Vec::new(), HashMap::new());
        for (made, memory) in made.iter().zip(memory) {
            let Op::Move { page, .. } = ops[made.op].op else { continue };
            // If the batch moves a page several times, only the first move is from disk.
            if left.remove(&page) {
                push(&mut pages, page)?;
                insert(&mut targets, page, memory.span())?;
            }
        }
        filled.add_moved(targets.iter().map(|(page, span)| (*page, span.memory)))?;
        let copies = self.engine.applier.turn(move |turn| {
            turn.intact()?;
            let mut copies = Vec::new();
            for page in pages {
                let info = turn.applied.table.get(page).ok_or(Error::UnknownPage { page })?;
                push(&mut copies, (page, info.lsn, turn.applied.on_disk.get(page).cloned()))?;
            }
            Ok(copies)
        })?;
        self.fill_pages(&copies, &targets)?;
        collected(copies.iter().map(|(page, lsn, _)| (*page, *lsn)))
    }

    /// Fills memory with the bytes of pages on disk. Skips a page that is no longer on disk or has another length: the
    /// draft is then stale and will be prepared again.
    fn fill_pages(
        &self,
        copies: &[(PageId, Lsn, Option<DiskPage>)],
        targets: &HashMap<PageId, Span>,
    ) -> Result<()> {
        let mut images = Vec::new();
        for (page, _, copy) in copies {
            let target = targets[page];
            let Some(copy) = copy.as_ref().filter(|copy| copy.byte_len() == target.len) else { continue };
            match copy.only_image() {
                Some(image) => push(&mut images, image.request(*page))?,
                // Writes of later batches are pending, so the page's bytes are those of its image with these writes
                // applied.
                None => copy.upload(0, &self.engine.staging, target)?,
            }
        }
        self.fill_from_images(&mut images, targets)
    }

    /// Fills memory with the bytes of one page on disk.
    pub(super) fn fill_page(&self, page: PageId, copy: &DiskPage, target: Span) -> Result<()> {
        self.fill_pages(&[(page, Lsn(0), Some(copy.clone()))], &HashMap::from([(page, target)]))
    }
}

/// Returns whether a page is on disk according to this table.
pub(super) fn is_on_disk(table: &PageTable, page: PageId) -> bool {
    table.entry(page).is_some_and(|entry| entry.place() == Place::Disk)
}

/// Returns the places in which the operations create pages, or to which they move pages.
pub(super) fn new_places<'a>(ops: &'a [OpAt<'_>]) -> impl Iterator<Item = Place> + 'a {
    ops.iter().filter_map(|at| match at.op {
        Op::Create { place, .. } | Op::Move { place, .. } => Some(place),
        _ => None,
    })
}
