//! Filling the new memory of pages from their images, before the batch that brings the memory is logged.

use std::collections::HashMap;

use remanent_format::PageId;

use super::Committer;
use crate::base::parallel;
use crate::device::{Lane, Span};
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};
use crate::images::read::{ImageRequest, SummedBy};
use crate::recovery::image_loader::ImageLoader;

/// Threads that fill pages.
const THREADS_MAX: usize = 4;
/// The lanes by which the bytes go up. No list of a batch names the memory yet, so it need not be in the
/// order of batches.
pub(super) const LANES: [Lane; 2] = [Lane::Drain, Lane::Load];

impl Committer {
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
        let target = |page: PageId| Ok(targets[&page]);
        let mut load = |source: &DiskSource| {
            let loader = ImageLoader {
                device: &*self.engine.device,
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
            // The cached copy alone may be damaged: the medium decides.
            Err(Error::Damaged(_)) => load(&source.on_medium()),
            loaded => loaded,
        }
    }
}
