//! Images that are written before their batch is logged. The batch then contains only references to the images.
//!
//! 1. The image files get their numbers. From now on, the files are protected from removal.
//! 2. The images and the files' names are written and synced, because a frame must never name a file that a crash could
//!    remove (I7 for batches).
//! 3. The batch is logged. From now on, the files are kept while replay may start before the batch.
//!
//! If logging the batch fails, the image files are removed. If it is unknown whether the frame is in the log, the files
//! are kept, because recovery may find the frame. A crash before step 3 leaves files that no frame names. The next open
//! detects such files during replay.

use std::ops::Range;

use remanent_format::image::ImageRef;
use remanent_format::{Lsn, PageId, PageInfo, Place, StoreId};

use super::ImageWriters;
use super::writers::ahead_file_count;
use crate::base::allocation::collected;
use crate::base::phases;
use crate::base::phases::Phase;
use crate::error::Result;
use crate::images::numbers::ImageFiles;
use crate::options::ImageOptions;

/// The images of a batch that is not logged yet. Dropping this value removes the image files.
pub(crate) struct PendingImages<'a> {
    files: &'a ImageFiles,
    numbers: Range<u64>,
    images: Vec<ImageRef>,
    is_refused: bool,
}

impl<'a> PendingImages<'a> {
    /// Writes non-empty pages to new image files, and makes the files durable. If there is no space, the call fails
    /// without any change.
    pub fn write(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        pages: &[(PageId, &'a [u8])],
    ) -> Result<Self> {
        let info = |(page, bytes): &(PageId, &'a [u8])| (info(*page, bytes.len() as u64), *bytes);
        let pages = collected(pages.iter().map(info))?;
        let bytes = pages.iter().map(|(info, _)| info.len).sum();
        let count = ahead_file_count(&pages, bytes, |(info, _)| info.len)?;
        Self::make(files, store, options, bytes, count, |writers| writers.write_all(&pages))
    }

    /// Writes pages of the given lengths like [`write`](Self::write). `read` provides the bytes of a page piece by
    /// piece. Each page is read by one of several threads, with the state that `equip` created for that thread. Only
    /// one piece of a long page is in memory at a time.
    ///
    /// # Errors
    /// Any error of `read` and the error of a full disk leave the store unchanged.
    pub fn write_read<W>(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        pages: &[(PageId, u64)],
        equip: impl Fn() -> W + Sync,
        read: impl Fn(&mut W, &PageInfo, u64, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<Self> {
        let pages = collected(pages.iter().map(|(page, len)| info(*page, *len)))?;
        let bytes = pages.iter().map(|info| info.len).sum();
        let count = ahead_file_count(&pages, bytes, |info| info.len)?;
        Self::make(files, store, options, bytes, count, |writers| writers.write_read(&pages, equip, read))
    }

    fn make(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        bytes: u64,
        count: u64,
        write: impl FnOnce(&ImageWriters) -> Result<Vec<ImageRef>>,
    ) -> Result<Self> {
        let _phase = phases::enter(Phase::WriteAhead);
        // 1. The numbers count as assigned from here on, even if a file is not created.
        let numbers = files.begin_for_batch(count);
        let writers = ImageWriters::create_ahead(files, store, numbers.clone(), bytes, options);
        let writers = writers.inspect_err(|_| numbers.clone().for_each(|file| files.forget(file)))?;
        // 2. If this value is dropped before the batch is logged, the files are removed.
        let mut ahead = Self { files, numbers, images: Vec::new(), is_refused: true };
        ahead.images = write(&writers)?;
        writers.sync()?;
        Ok(ahead)
    }

    /// Returns the references to the images, in page order.
    pub fn images(&self) -> &[ImageRef] {
        &self.images
    }

    /// Performs step 3: records that batch `lsn` is logged, so that the image files are kept.
    pub fn logged(mut self, lsn: Lsn) {
        self.is_refused = false;
        self.numbers.clone().for_each(|file| self.files.logged(file, lsn));
    }

    /// Keeps the image files although the commit failed, because the batch may be in the log. If the log does not
    /// contain the batch, the next open removes the files.
    pub fn leave(&mut self) {
        self.is_refused = false;
    }
}

/// Describes a page for the image writer. The epoch and the Lsn are unknown before the batch is logged, and an image
/// does not record the page's place.
fn info(page: PageId, len: u64) -> PageInfo {
    PageInfo::new(page, len, Place::Host)
}

impl Drop for PendingImages<'_> {
    fn drop(&mut self) {
        if self.is_refused {
            self.numbers.clone().for_each(|file| self.files.abandon(file));
        }
    }
}
