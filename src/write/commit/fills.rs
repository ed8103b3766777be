//! Filling new memory with its page's bytes before the batch that brings the memory is logged.
//!
//! The bytes are those of an image that the batch names, or those of a page that comes from disk. An image
//! was just written: of bytes that the caller has in memory, which go up from there, or of a source, which is
//! not read again, since it may say something else than before.
//!
//! A page's bytes go up piece by piece. The applier finds them in place, and the batches after this one do
//! not wait for them. A crash loses all memory, and the open fills it from the images.

use std::collections::{BTreeMap, HashMap, VecDeque};

use remanent_format::PageId;
use remanent_format::op::{Op, OpAt};

use super::Committer;
use super::disk_moves::DiskOps;
use super::draft::SourceVersions;
use super::page_memory::MadeMemory;
use super::sources::SourceImages;
use crate::applier::FilledMemory;
use crate::base::allocation::{insert, push};
use crate::base::parallel;
use crate::device::{CommandList, Lane, Span};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, SummedBy};
use crate::memory::arena::PageMemory;
use crate::recovery::image_loader::{ImageLoader, PageBytes};

/// Threads that fill pages.
const THREADS_MAX: usize = 4;
/// The lanes by which the bytes go up. No list of a batch names the memory yet, so it need not be in the
/// order of batches.
const LANES: [Lane; 2] = [Lane::Drain, Lane::Load];

/// The bytes of whole pages that are in images ahead of their batch.
pub(super) type WholeBytes<'a> = BTreeMap<PageId, &'a [u8]>;

/// What new memory of a batch is filled with.
pub(super) struct FillSources<'a> {
    /// Bytes that the caller has, by page.
    pub whole: &'a WholeBytes<'a>,
    /// Pages that come from sources.
    pub sources: &'a SourceImages<'a>,
    /// Pages that come from disk.
    pub disk_ops: &'a DiskOps,
}

/// Page memory for a batch, some of which holds its page's bytes already.
pub(super) struct NewMemory {
    /// The memory, in the order of the operations that need it.
    pub memory: VecDeque<PageMemory>,
    /// What is filled.
    pub filled: FilledMemory,
    /// The versions of the pages that were read for it.
    pub versions: SourceVersions,
}

impl Committer {
    /// Fills new memory with the bytes of its pages. `made` and `memory` are of the operations that need
    /// memory, in their order. Without success the memory is given back.
    ///
    /// # Errors
    /// `Damaged` if a file does not hold what was written; no memory; a device error.
    pub(super) fn fill_memory(
        &self,
        from: &FillSources<'_>,
        ops: &[OpAt<'_>],
        made: &[MadeMemory],
        memory: VecDeque<PageMemory>,
    ) -> Result<NewMemory> {
        let (mut filled, mut versions) = (FilledMemory::default(), Vec::new());
        let mut fill = || {
            if from.sources.is_any() || !from.whole.is_empty() {
                self.fill_with_images(from, ops, made, &memory, &mut filled)?;
            }
            if !from.disk_ops.coming.is_empty() {
                versions = self.fill_from_disk(from.disk_ops, ops, made, &memory, &mut filled)?;
            }
            Ok(())
        };
        match fill() {
            Ok(()) => Ok(NewMemory { memory, filled, versions }),
            Err(error) => {
                self.discard_filling(memory);
                Err(error)
            }
        }
    }

    /// Gives memory back that lists may name which are under way.
    fn discard_filling(&self, memory: VecDeque<PageMemory>) {
        let device = &*self.engine.device;
        // One more list in each lane tells when those before it are done. If the device fails at that, the
        // memory stays counted, and a warning says so.
        let last = |lane: &Lane| {
            device.submit(*lane, CommandList::default()).and_then(|last| last.finish(device)).map(drop)
        };
        match LANES.iter().try_for_each(last) {
            Ok(()) => self.discard(memory),
            Err(failed) => tracing::warn!(%failed, "memory of pages that were not filled stays allocated"),
        }
    }

    /// Fills the memory of pages that the batch's images give their bytes.
    fn fill_with_images(
        &self,
        from: &FillSources<'_>,
        ops: &[OpAt<'_>],
        made: &[MadeMemory],
        memory: &VecDeque<PageMemory>,
        filled: &mut FilledMemory,
    ) -> Result<()> {
        let (mut bytes, mut images) = (Vec::new(), Vec::new());
        let mut targets: HashMap<PageId, Span> = HashMap::new();
        for (made, memory) in made.iter().zip(memory) {
            // The image follows the operation that gives the page its length, and so its memory.
            let Some(Op::Image { page, len, image }) = ops.get(made.op + 1).map(|at| &at.op) else {
                continue;
            };
            if ops[made.op].op.page() != Some(*page) {
                continue;
            }
            assert!(memory.byte_len() == *len); // I10: the memory is as long as the page.
            let request = ImageRequest { page: *page, len: *len, image: *image };
            match from.whole.get(page) {
                Some(whole) => push(&mut bytes, (request, *whole))?,
                None => push(&mut images, request)?,
            }
            insert(&mut targets, *page, memory.span())?;
        }
        // The applier reads a page on disk from its image.
        let is_on_disk = |index: &&usize| from.sources.holds(&ops[**index].op);
        let on_disk = from.disk_ops.on_disk.iter().filter(is_on_disk).count();
        // I1: each page that the frame takes from a source is filled.
        assert!(images.len() + on_disk == from.sources.count());
        self.fill_from_bytes(&bytes, &targets)?;
        // What was just written is in the page cache. A snapshot that is to name it asks the medium (I7).
        self.fill_from_images(&mut images, &targets)?;
        filled.add_images(targets.iter().map(|(page, span)| (*page, span.memory)))
    }

    /// Fills the memory of these images' pages, and proves them there.
    ///
    /// # Errors
    /// `Damaged` if the medium does not hold an image, either; no memory; a device error. Lists that name the
    /// memory may still be under way then.
    pub(super) fn fill_from_images(
        &self,
        images: &mut [ImageRequest],
        targets: &HashMap<PageId, Span>,
    ) -> Result<()> {
        if images.is_empty() {
            return Ok(());
        }
        let target = |page: PageId| Ok(targets[&page]);
        let mut load = |source: &DiskSource| {
            let loader = self.loader(source, &target);
            loader.load(std::iter::once(&mut *images), parallel::threads(THREADS_MAX))
        };
        let source = DiskSource::new(self.engine.disk.clone());
        match load(&source) {
            // The cached copy alone may be damaged: the medium decides.
            Err(Error::Damaged(_)) => load(&source.on_medium()),
            loaded => loaded,
        }
    }

    /// Fills the memory of pages with bytes that the caller has, of which there are images.
    fn fill_from_bytes(&self, pages: &[PageBytes<'_>], targets: &HashMap<PageId, Span>) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let target = |page: PageId| Ok(targets[&page]);
        let source = DiskSource::new(self.engine.disk.clone());
        self.loader(&source, &target).load_bytes(pages, parallel::threads(THREADS_MAX))
    }

    fn loader<'a>(
        &'a self,
        source: &'a DiskSource,
        target: &'a (dyn Fn(PageId) -> Result<Span> + Sync),
    ) -> ImageLoader<'a> {
        ImageLoader {
            device: &*self.engine.device,
            staging: &self.engine.staging,
            source,
            lanes: &LANES,
            target,
            summed_by: SummedBy::Device,
        }
    }
}
