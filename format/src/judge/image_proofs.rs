//! A cache of the results of image checks.

use std::collections::BTreeMap;

use crate::defect::{Damage, Defect};
use crate::ids::Lsn;
use crate::image::ImageRef;
use crate::image::read::check_image;
use crate::names::{FileName, ReadAt};

/// A cache of the results of image checks. Several snapshots and batches can name the same image, and the cache reads
/// each image once.
pub struct ImageProofs<'s> {
    source: &'s dyn ReadAt,
    read: BTreeMap<(u64, u64, u64, u32), Option<Defect>>,
    bytes: u64,
}

impl<'s> ImageProofs<'s> {
    /// Creates an empty cache.
    #[must_use]
    pub fn new(source: &'s dyn ReadAt) -> Self {
        Self { source, read: BTreeMap::new(), bytes: 0 }
    }

    /// Checks the image of a page of length `len`. Returns `None` if the image is valid, or damage with the Lsn `lsn`.
    pub fn check(&mut self, lsn: Lsn, image: Option<ImageRef>, len: u64) -> Option<Damage> {
        let image = image?;
        let name = (image.file, image.offset, image.stored_len, image.stored_crc);
        let defect = match self.read.get(&name) {
            Some(known) => known.clone(),
            None => {
                self.bytes = self.bytes.saturating_add(image.stored_len);
                let defect = check_image(self.source, &image, len).err().map(|damage| damage.defect);
                self.read.insert(name, defect.clone());
                defect
            }
        };
        defect.map(|defect| defect.at_lsn(FileName::Pages(image.file), image.offset, lsn))
    }

    /// Removes damaged images from the cache, so that they are read again. A running writer may have deleted these
    /// images during the first read.
    pub fn forget_damaged(&mut self) {
        self.read.retain(|_, defect| defect.is_none());
    }

    /// Returns the number of images in the cache.
    #[must_use]
    pub fn count(&self) -> usize {
        self.read.len()
    }

    /// Returns the total stored length of the images that the cache has read, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the numbers of the image files that contain images in the cache, in ascending order.
    pub fn files(&self) -> impl Iterator<Item = u64> {
        let mut files: Vec<u64> = self.read.keys().map(|(file, ..)| *file).collect();
        files.dedup();
        files.into_iter()
    }
}

impl std::fmt::Debug for ImageProofs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageProofs").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
