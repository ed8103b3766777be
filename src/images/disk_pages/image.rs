//! An image from which a page on disk is read.

use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::image::proven::ProvenImage;
use remanent_format::image::read::{read_image, read_image_into};
use remanent_format::{Damage, PageId};

use super::FileUse;
use crate::base::sync::Mutex;
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::Result;
use crate::images::read::ImageRequest;

/// The longest page that is read whole. To note what its pieces sum to would be to read it twice.
const WHOLE_LEN_MAX: u64 = 1 << 20;

/// An image of a page on disk. Its file stays while this exists.
pub(crate) struct DiskImage {
    image: ImageRef,
    /// The page's length in the image, in bytes.
    len: u64,
    disk: Arc<dyn Disk>,
    /// What the pieces of a long page sum to, once it was read.
    pieces: Mutex<Option<Arc<ProvenImage>>>,
    _file: FileUse,
}

impl DiskImage {
    pub(super) fn new(disk: Arc<dyn Disk>, file: FileUse, image: ImageRef, len: u64) -> Arc<Self> {
        Arc::new(Self { image, len, disk, pieces: Mutex::new(None), _file: file })
    }

    /// The page's length in the image, in bytes.
    pub fn page_len(&self) -> u64 {
        self.len
    }

    /// A request to read the image, whose page this is.
    pub fn request(&self, page: PageId) -> ImageRequest {
        ImageRequest { page, len: self.len, image: self.image }
    }

    /// Reads bytes of the page, all of them proven. The first read of a part of a long page reads all of it;
    /// later ones read the pieces that hold what is asked for.
    ///
    /// # Errors
    /// `Damaged`, if the medium holds other bytes, too; no memory.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        // Each read opens the file anew: a file that was kept open would keep its space when it is removed.
        let cached = DiskSource::new(self.disk.clone());
        match self.read_from(&cached, offset, out) {
            // The cached copy alone may be damaged: the medium decides.
            Err(_) => Ok(self.read_from(&DiskSource::past_cache(self.disk.clone()), offset, out)?),
            Ok(()) => Ok(()),
        }
    }

    fn read_from(&self, source: &DiskSource, offset: u64, out: &mut [u8]) -> Result<(), Damage> {
        if out.len() as u64 == self.len {
            return read_image_into(source, &self.image, out);
        }
        if self.len <= WHOLE_LEN_MAX {
            let bytes = read_image(source, &self.image, self.len)?;
            out.copy_from_slice(&bytes[offset as usize..][..out.len()]);
            return Ok(());
        }
        let pieces = {
            // Held while it is read: two readers that come at once read it once.
            let mut pieces = self.pieces.lock();
            match &*pieces {
                Some(pieces) => pieces.clone(),
                None => {
                    let proven = Arc::new(ProvenImage::prove(source, &self.image, self.len)?);
                    pieces.insert(proven).clone()
                }
            }
        };
        pieces.read(source, offset, out)
    }
}

impl std::fmt::Debug for DiskImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskImage")
            .field("image", &self.image)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
