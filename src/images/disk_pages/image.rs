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

/// An image of a page on disk. Its files stay while this exists.
pub(crate) struct DiskImage {
    image: ImageRef,
    /// The page's length in the image, in bytes.
    len: u64,
    disk: Arc<dyn Disk>,
    /// Whether it was read back past the cache, so that a snapshot may name it (I7).
    is_proven: bool,
    /// What the pieces of a long page sum to, once it was read.
    pieces: Mutex<Option<Arc<ProvenImage>>>,
    /// The same of the image before it, over which it may lie as an overlay.
    base: Option<Arc<ProvenImage>>,
    _files: Vec<FileUse>,
}

impl DiskImage {
    pub(super) fn new(
        disk: Arc<dyn Disk>,
        files: Vec<FileUse>,
        (image, len): (ImageRef, u64),
        is_proven: bool,
        before: Option<&Self>,
    ) -> Arc<Self> {
        let known = before.and_then(|before| before.pieces.lock().clone());
        let base = known.map(|known| known.base()).or_else(|| before.and_then(|before| before.base.clone()));
        Arc::new(Self { image, len, disk, is_proven, pieces: Mutex::new(None), base, _files: files })
    }

    /// What manifests say of it.
    pub fn image(&self) -> &ImageRef {
        &self.image
    }

    /// Whether it was read back past the cache.
    pub fn is_proven(&self) -> bool {
        self.is_proven
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
        self.pieces(source)?.read(source, offset, out)
    }

    /// The image, proven whole. That of a long page is kept.
    fn pieces(&self, source: &DiskSource) -> Result<Arc<ProvenImage>, Damage> {
        let prove =
            || ProvenImage::prove_over(source, &self.image, self.len, self.base.as_ref()).map(Arc::new);
        if self.len <= WHOLE_LEN_MAX {
            return prove();
        }
        // Held while it is read: two readers that come at once read it once.
        let mut pieces = self.pieces.lock();
        match &*pieces {
            Some(pieces) => Ok(pieces.clone()),
            None => Ok(pieces.insert(prove()?).clone()),
        }
    }

    /// The image, proven whole: what lies over what, if it is an overlay.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn prove(&self) -> Result<Arc<ProvenImage>> {
        match self.pieces(&DiskSource::new(self.disk.clone())) {
            Err(_) => Ok(self.pieces(&DiskSource::past_cache(self.disk.clone()))?),
            Ok(pieces) => Ok(pieces),
        }
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
