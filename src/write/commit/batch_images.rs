//! The images that a batch writes before it is logged.
//!
//! The image files and their names are synced before the batch can be logged. After a crash in between, no frame names
//! the files, and the next open removes them.

use remanent_format::image::ImageRef;
use remanent_format::{LogPoint, PageId, PageInfo};

use super::Committer;
use crate::catalog::KnownImages;
use crate::error::{Error, Result};
use crate::images::PendingImages;
use crate::log::Log;

/// The images that were written for a batch; most batches have none. Dropping this value removes their files, unless
/// [`logged`](Self::logged) or [`leave`](Self::leave) was called.
#[derive(Default)]
pub(super) struct BatchImages<'a> {
    /// The written images, or `None`. Boxed, because a batch has up to four values of this type.
    written: Option<Box<WrittenImages<'a>>>,
}

struct WrittenImages<'a> {
    ahead: PendingImages<'a>,
    /// For each image, in order: the page and its length in bytes. `None` if the batch changes the page further, so
    /// that the page no longer equals the image.
    pages: Vec<Option<(PageId, u64)>>,
}

impl Committer {
    /// Calls `write`, which writes images of `bytes` page bytes before their batch is logged. The images may not use
    /// the disk space that is reserved for deletes. If `write` fails, the store is poisoned, unless the failure left
    /// the store unchanged.
    pub(super) fn in_space<'a>(
        &self,
        bytes: u64,
        write: impl FnMut() -> Result<PendingImages<'a>>,
    ) -> Result<PendingImages<'a>> {
        let pool = &self.engine.log.pool;
        // The reserved segments are created first. Otherwise the image could take the space that deletes need on a full
        // disk.
        pool.fill(bytes).and_then(|()| pool.with_surplus(write)).map_err(|error| match error {
            // The page changed while it was read. The caller retries.
            Error::Overtaken { .. } => error,
            error if error.is_passing() => error,
            error => self.engine.poison.set(error),
        })
    }

    /// Writes images of pages with the lengths `lens`, before their batch is logged. `read` fills a slice with bytes of
    /// a page.
    pub(super) fn write_read<W>(
        &self,
        lens: &[(PageId, u64)],
        equip: impl Fn() -> W + Sync,
        read: impl Fn(&mut W, &PageInfo, u64, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<PendingImages<'_>> {
        let Self { files, engine, images, .. } = self;
        let bytes = lens.iter().map(|(_, len)| len).fold(0, |sum: u64, len| sum.saturating_add(*len));
        self.in_space(bytes, || PendingImages::write_read(files, engine.store, *images, lens, &equip, &read))
    }
}

impl<'a> BatchImages<'a> {
    /// Creates the value that owns the images of `pages`. Each element of `pages` contains the page's length in bytes.
    pub fn new(ahead: PendingImages<'a>, pages: Vec<Option<(PageId, u64)>>) -> Self {
        assert!(ahead.images().len() == pages.len()); // I7: each image is its page's.
        Self { written: Some(Box::new(WrittenImages { ahead, pages })) }
    }

    /// Returns whether any image was written.
    pub fn is_any(&self) -> bool {
        self.written.is_some()
    }

    /// Returns the images, in the order of their pages.
    pub fn refs(&self) -> impl Iterator<Item = ImageRef> {
        self.written.iter().flat_map(|written| written.ahead.images()).copied()
    }

    /// Records that the batch is logged, so that the files are kept. Must be called under the submission lock: a
    /// snapshot that begins after this batch refers to the images instead of writing the pages.
    pub fn logged(&mut self, known: &KnownImages, log: &Log, point: LogPoint) {
        let Some(written) = self.written.take() else { return };
        let WrittenImages { ahead, pages } = *written;
        // The next snapshot names these images, so they need not be written again.
        for (page, image) in pages.iter().zip(ahead.images()) {
            if let Some((page, len)) = page {
                known.note_ahead(*page, point.lsn, *image, *len);
            }
        }
        // The bytes of these images count as log bytes when the store decides whether a snapshot is due.
        log.count_ahead(ahead.images().iter().map(|image| image.stored_len).sum());
        ahead.logged(point.lsn);
    }

    /// Keeps the files although the commit failed, because the batch may be in the log. If the batch is not in the log,
    /// recovery removes the files.
    pub fn leave(&mut self) {
        if let Some(written) = &mut self.written {
            written.ahead.leave();
        }
    }
}
