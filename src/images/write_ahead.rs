//! Images that are written before their batch, which then contains only references to them.
//!
//! 1. The files get their numbers, and are protected from removal from then on.
//! 2. The images and the files' names are written and synced, because a frame must never name a file that a crash could
//!    remove (I7 for batches).
//! 3. The batch is logged. From here on, the files are kept while replay may start before the batch.
//!
//! If a batch is refused or finds no space, its files are removed. If it is unknown whether the frame is in the log,
//! the files are left, because recovery may find the frame. A crash before step 3 leaves files that no frame names. The
//! next open detects such files during replay.

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

/// The images of a batch that is not logged yet. Dropping this value removes their files.
pub(crate) struct PendingImages<'a> {
    files: &'a ImageFiles,
    numbers: Range<u64>,
    images: Vec<ImageRef>,
    is_refused: bool,
}

impl<'a> PendingImages<'a> {
    /// Writes non-empty pages to new files, and makes the files durable. A lack of space changes nothing.
    pub fn write(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        pages: &[(PageId, &'a [u8])],
    ) -> Result<Self> {
        let info = |(page, bytes): &(PageId, &'a [u8])| (info(*page, bytes.len() as u64), *bytes);
        let pages = collected(pages.iter().map(info))?;
        let count = ahead_file_count(&pages, |(info, _)| info.len)?;
        Self::make(files, store, options, count, |writers| writers.write_all(&pages))
    }

    /// Writes pages of these lengths like [`write`](Self::write), with bytes that `read` provides piece by piece. Each
    /// page is read by one of several threads, with that thread's own state from `equip`. Only one piece of a long page
    /// is in memory at a time.
    ///
    /// # Errors
    /// The errors of `read` and of a full disk leave the store unchanged.
    pub fn write_read<W>(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        pages: &[(PageId, u64)],
        equip: impl Fn() -> W + Sync,
        read: impl Fn(&mut W, &PageInfo, u64, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<Self> {
        let pages = collected(pages.iter().map(|(page, len)| info(*page, *len)))?;
        let count = ahead_file_count(&pages, |info| info.len)?;
        Self::make(files, store, options, count, |writers| writers.write_read(&pages, equip, read))
    }

    fn make(
        files: &'a ImageFiles,
        store: StoreId,
        options: ImageOptions,
        count: u64,
        write: impl FnOnce(&ImageWriters) -> Result<Vec<ImageRef>>,
    ) -> Result<Self> {
        let _phase = phases::enter(Phase::WriteAhead);
        // 1. From here on the numbers are assigned for good, whether or not the files are created.
        let numbers = files.begin_for_batch(count);
        let writers = ImageWriters::create_ahead(files, store, numbers.clone(), options);
        let writers = writers.inspect_err(|_| numbers.clone().for_each(|file| files.forget(file)))?;
        // 2. Dropping this value before the batch is logged removes the files.
        let mut ahead = Self { files, numbers, images: Vec::new(), is_refused: true };
        ahead.images = write(&writers)?;
        writers.sync()?;
        Ok(ahead)
    }

    /// Returns the references to the images, in page order.
    pub fn images(&self) -> &[ImageRef] {
        &self.images
    }

    /// 3. Records that batch `lsn` is logged, so that the files are kept.
    pub fn logged(mut self, lsn: Lsn) {
        self.is_refused = false;
        self.numbers.clone().for_each(|file| self.files.logged(file, lsn));
    }

    /// Keeps the files, because it is unknown whether the batch is logged. The next open determines this from the log.
    pub fn leave(&mut self) {
        self.is_refused = false;
    }
}

/// Describes a page to the image writer. Epoch and Lsn are unknown before the batch is logged, and an image does not
/// record its place.
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
