//! Images that are written ahead of their batch, which then only names them.
//!
//! 1. The file gets its number, and is kept from now on whatever else is removed.
//! 2. Images are written and synced, and the file's name with them: a frame must never name a file that a
//!    crash takes away (I7 for batches).
//! 3. The batch is logged. From here on the file stays while replay may start before the batch.
//!
//! A batch that is refused, or finds no space, takes its file with it. Where it is unknown whether the frame
//! is in the log, the file is left, because recovery may find the frame. A crash before 3 leaves a file that
//! no frame names; the next open finds that no replayed frame names it.

use remanent_format::image::{ImagePurpose, ImageRef};
use remanent_format::{Lsn, PageId, PageInfo, Place, StoreId};

use super::{ImageOptions, ImageWriter, PageRead};
use crate::base::allocation::collected;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::error::{Error, Result};
use crate::images::numbers::ImageFiles;

/// The images of a batch that is not logged yet. Dropping this removes their file.
pub(crate) struct AheadImages<'a> {
    files: &'a ImageFiles,
    file: u64,
    images: Vec<ImageRef>,
    is_refused: bool,
}

impl<'a> AheadImages<'a> {
    /// Writes pages, none of them empty, to a file of their own, and makes it durable. A lack of space is a
    /// clean failure.
    pub fn write(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        pages: &[(PageId, &'a [u8])],
    ) -> Result<Self> {
        let info = |(page, bytes): &(PageId, &'a [u8])| (info(*page, bytes.len() as u64), *bytes);
        let pages = collected(pages.iter().map(info))?;
        Self::make(files, store, options, pages.len(), |writer| writer.write_all(&pages))
    }

    /// As [`write`](Self::write), for pages of these lengths that `read` gives piece by piece. Of a long page
    /// no more than a piece is held at a time.
    ///
    /// # Errors
    /// What `read` fails with, too: also a clean failure.
    pub fn write_read(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        pages: &[(PageId, u64)],
        read: PageRead<'_, Error>,
    ) -> Result<Self> {
        let pages = collected(pages.iter().map(|(page, len)| info(*page, *len)))?;
        Self::make(files, store, options, pages.len(), |writer| writer.write_pages(&pages, read))
    }

    fn make(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        count: usize,
        write: impl FnOnce(&ImageWriter) -> Result<Vec<ImageRef>>,
    ) -> Result<Self> {
        let _phase = phases::enter(Phase::WriteAhead);
        // 1. From here on the number is taken, whatever becomes of the file.
        let file = files.begin_for_batch();
        let (disk, purpose) = (files.disk().clone(), ImagePurpose::Batch);
        let writer = ImageWriter::create(disk, store, file, purpose, options);
        let writer = writer.inspect_err(|_| files.forget(file))?;
        // 2. Dropping this before the batch is logged removes the file.
        let mut ahead = Self { files, file, images: Vec::new(), is_refused: true };
        ahead.images = write(&writer)?;
        writer.sync()?;
        assert!(ahead.images.len() == count); // I7: all that the frame will name is synced.
        Ok(ahead)
    }

    /// The images, in the order of the pages.
    pub fn images(&self) -> &[ImageRef] {
        &self.images
    }

    /// 3. Notes that batch `lsn` is logged: the file stays.
    pub fn logged(mut self, lsn: Lsn) {
        self.is_refused = false;
        self.files.logged(self.file, lsn);
    }

    /// Leaves the file, because the batch may be logged or not. The next open finds out.
    pub fn leave(&mut self) {
        self.is_refused = false;
    }
}

/// Describes a page to the image writer. Neither epoch nor Lsn is known before the batch is logged, and an
/// image does not state its place.
fn info(page: PageId, len: u64) -> PageInfo {
    PageInfo::new(page, len, Place::Host)
}

impl Drop for AheadImages<'_> {
    fn drop(&mut self) {
        if self.is_refused {
            self.files.abandon(self.file);
        }
    }
}
