//! Fills the memory of new or moved pages before their batch is logged.
//!
//! The bytes come from an image that was just written from a source, or from the page on disk, and are uploaded piece
//! by piece. The applier then has nothing to copy, and later batches do not wait for the upload. A crash loses all
//! memory, and the next open fills it from the images.

use std::collections::{HashMap, VecDeque};

use remanent_format::PageId;
use remanent_format::op::{Op, OpAt};

use super::Committer;
use super::disk_moves::DiskOps;
use super::draft::SourceVersions;
use super::page_memory::{LANES, RequiredMemory};
use super::sources::SourceImages;
use crate::applier::{FilledMemory, Provision};
use crate::base::allocation::{insert, push};
use crate::base::parallel;
use crate::device::Span;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, SummedBy};
use crate::memory::arena::PageMemory;
use crate::recovery::image_loader::ImageLoader;

/// The maximum number of threads that fill the memory of a batch's pages.
const THREADS_MAX: usize = 4;
/// The sources from which the new memory of a batch is filled.
pub(super) struct FillSources<'a> {
    /// The images of the pages whose bytes were read from sources.
    pub sources: &'a SourceImages<'a>,
    /// The operations that move pages from disk.
    pub disk_ops: &'a DiskOps,
}

impl Committer {
    /// Fills new memory with the bytes of its pages. Skips memory that is already filled. `made` lists the operations
    /// that need memory, in the same order as the memory in `provision`. Returns the versions of the pages that were
    /// read from disk. On an error, the memory is freed.
    ///
    /// # Errors
    /// `Damaged` if a file does not contain the bytes that were written; `OutOfMemory`; a device error.
    pub(super) fn fill_memory(
        &self,
        provision: &mut Provision,
        from: &FillSources<'_>,
        ops: &[OpAt<'_>],
        made: &[RequiredMemory],
    ) -> Result<SourceVersions> {
        let Provision { memory, filled, .. } = provision;
        let mut fill = || {
            if from.sources.is_any() {
                self.fill_from_sources(from, ops, made, memory, filled)?;
            }
            if from.disk_ops.from_disk.is_empty() {
                return Ok(SourceVersions::new());
            }
            self.fill_from_disk(from.disk_ops, ops, made, memory, filled)
        };
        let versions = fill();
        if versions.is_err() {
            // Command lists in flight may still write to the memory, so it is freed only after them.
            self.discard_filling(std::mem::take(memory));
        }
        versions
    }

    /// Fills the memory of pages whose bytes are read from sources.
    fn fill_from_sources(
        &self,
        from: &FillSources<'_>,
        ops: &[OpAt<'_>],
        made: &[RequiredMemory],
        memory: &VecDeque<PageMemory>,
        filled: &mut FilledMemory,
    ) -> Result<()> {
        let mut images = Vec::new();
        let mut targets: HashMap<PageId, Span> = HashMap::new();
        for (made, memory) in made.iter().zip(memory) {
            // The operation that sets the page's length needs memory, and the operation with the image follows it.
            let Some(op) = ops.get(made.op + 1).map(|at| &at.op) else { continue };
            let Op::Image { page, len, image } = op else { continue };
            if !from.sources.holds(op) {
                continue;
            }
            assert!(memory.byte_len() == *len); // I10: the memory is as long as the page.
            push(&mut images, ImageRequest { page: *page, len: *len, image: *image })?;
            insert(&mut targets, *page, memory.span())?;
        }
        // Pages on disk need no memory, because their new content is the image itself.
        let is_on_disk = |index: &&usize| from.sources.holds(&ops[**index].op);
        let on_disk = from.disk_ops.on_disk.iter().filter(is_on_disk).count();
        // I1: the memory of each page that the frame takes from a source is filled, unless the page is on disk.
        assert!(images.len() + on_disk == from.sources.count());
        // Reads through the page cache, which still contains the bytes. A snapshot that names the image reads it back
        // from the medium (I7).
        self.fill_from_images(&mut images, &targets)?;
        filled.add_images(targets.iter().map(|(page, span)| (*page, span.memory)))
    }

    /// Fills page memory with the bytes of images, and verifies the images.
    ///
    /// # Errors
    /// `Damaged` if an image is damaged on the medium as well; `OutOfMemory`; a device error. Command lists that use
    /// the memory may then still be in flight.
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
            let loader = ImageLoader {
                device: &self.engine.device,
                staging: &self.engine.staging,
                source,
                lanes: &LANES,
                target: &target,
                summed_by: SummedBy::Device,
            };
            loader.load(std::iter::once(&mut *images), parallel::threads(THREADS_MAX))
        };
        let source = DiskSource::new(self.engine.disk.clone());
        match load(&source) {
            // The damage may be limited to the page cache, so the images are read again from the medium.
            Err(Error::Damaged(_)) => load(&source.on_medium()),
            loaded => loaded,
        }
    }
}
