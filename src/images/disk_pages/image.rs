//! An image in an image file, from which a page on disk is read.

use std::ops::ControlFlow;
use std::sync::Arc;

use remanent_format::image::proven::ProvenImage;
use remanent_format::image::read::{read_image, read_image_into, stream_image};
use remanent_format::image::{Codec, ImageRef};
use remanent_format::{Damage, FileName, PageId, ReadAt};

use super::FileUse;
use crate::base::sync::Mutex;
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::Result;
use crate::images::read::ImageRequest;

/// The maximum length in bytes of a page that every read loads and verifies as a whole. The first read of a longer page
/// verifies the whole page to obtain the checksums of its pieces, and then reads the requested pieces again.
const WHOLE_LEN_MAX: u64 = 1 << 20;

/// An image that contains the bytes of a page on disk. The image's files are not removed during the lifetime of this
/// value.
pub(crate) struct DiskImage {
    image: ImageRef,
    /// The length of the page in the image, in bytes.
    len: u64,
    disk: Arc<dyn Disk>,
    /// Whether the image was read back from the medium and was intact, so that a snapshot may name it (I7).
    is_proven: bool,
    /// The checksums of a long page's pieces, or `None` until the page is first read.
    pieces: Mutex<Option<Arc<ProvenImage>>>,
    /// The known checksums of the previous image's base. They are used if this image is an overlay over the same base.
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

    pub fn image(&self) -> &ImageRef {
        &self.image
    }

    /// Returns whether the image was read back from the medium and was intact.
    pub fn is_proven(&self) -> bool {
        self.is_proven
    }

    /// Returns the length of the page in the image, in bytes.
    pub fn page_len(&self) -> u64 {
        self.len
    }

    /// Returns a request to read this image for `page`.
    pub fn request(&self, page: PageId) -> ImageRequest {
        ImageRequest { page, len: self.len, image: self.image }
    }

    /// Fills `out` with verified bytes of the page, starting at `offset`. The first partial read of a long page reads
    /// the whole page. Later reads of the page read only the pieces that contain the requested bytes.
    ///
    /// # Errors
    /// `Damaged` if the bytes on the medium are also wrong; `OutOfMemory`.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        // Each read reopens the file: an open file would keep its space after it is removed.
        let cached = DiskSource::new(self.disk.clone());
        match self.read_from(&cached, offset, out) {
            Err(damage) if cached.archive_failure(&damage).is_some() => Err(cached.error_of(damage)),
            // Only the page cache may be damaged, so the read is repeated from the medium.
            Err(_) => Ok(self.read_from(&DiskSource::bypassing_cache(self.disk.clone()), offset, out)?),
            Ok(()) => Ok(()),
        }
    }

    /// Fills `out` with bytes of the page, starting at `offset`, without verifying them. Returns `false`, with
    /// unspecified bytes in `out`, if the image does not contain these bytes uncompressed and contiguously, or if they
    /// cannot be read.
    pub fn peek(&self, offset: u64, out: &mut [u8]) -> bool {
        let source = DiskSource::new(self.disk.clone());
        let at = self.image.offset.saturating_add(offset);
        self.is_raw() && source.read_at(FileName::Pages(self.image.file), at, out).is_ok()
    }

    /// Returns whether the image contains the bytes of the page contiguously and uncompressed.
    pub fn is_raw(&self) -> bool {
        self.image.codec == Codec::Raw
    }

    /// Passes the bytes of the page to `visit` in order and in pieces, and verifies the image at the same time. The
    /// pieces of a raw image consist of whole elements of any width. Returns `true` if the bytes are verified, and
    /// `false` if `visit` ended the scan.
    ///
    /// # Errors
    /// `Damaged` if the bytes are wrong, in the page cache or on the medium.
    pub fn scan(&self, mut visit: impl FnMut(u64, &[u8]) -> ControlFlow<()>) -> Result<bool> {
        let mut at = 0;
        let source = DiskSource::new(self.disk.clone());
        let scanned = stream_image(&source, &self.image, self.len, |piece| {
            let flow = visit(at, piece);
            at += piece.len() as u64;
            if flow.is_break() { Err(ScanEnd::Stopped) } else { Ok(()) }
        });
        match scanned {
            Ok(()) => Ok(true),
            Err(ScanEnd::Stopped) => Ok(false),
            Err(ScanEnd::Damaged(damage)) => Err(source.error_of(damage)),
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

    /// Verifies the whole image and returns the checksums of its pieces. The checksums of a long page are cached.
    fn pieces(&self, source: &DiskSource) -> Result<Arc<ProvenImage>, Damage> {
        let prove =
            || ProvenImage::prove_over(source, &self.image, self.len, self.base.as_ref()).map(Arc::new);
        if self.len <= WHOLE_LEN_MAX {
            return prove();
        }
        // The lock is held during the read, so that two concurrent readers read the image once.
        let mut pieces = self.pieces.lock();
        match &*pieces {
            Some(pieces) => Ok(pieces.clone()),
            None => Ok(pieces.insert(prove()?).clone()),
        }
    }

    /// Verifies the whole image and returns the checksums of its pieces. For an overlay, also verifies the base.
    ///
    /// # Errors
    /// Same as [`read`](Self::read).
    pub fn prove(&self) -> Result<Arc<ProvenImage>> {
        let cached = DiskSource::new(self.disk.clone());
        match self.pieces(&cached) {
            Err(damage) if cached.archive_failure(&damage).is_some() => Err(cached.error_of(damage)),
            Err(_) => Ok(self.pieces(&DiskSource::bypassing_cache(self.disk.clone()))?),
            Ok(pieces) => Ok(pieces),
        }
    }
}

/// The reason why a scan ended before the end of the page.
enum ScanEnd {
    Stopped,
    Damaged(Damage),
}

impl From<Damage> for ScanEnd {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage)
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
