//! The images that a batch writes before it is logged.
//!
//! The image files and their names are durable before the batch can be logged. A crash before the batch is logged
//! leaves unreferenced files, which the next open removes.

use remanent_format::image::ImageRef;
use remanent_format::{LogPoint, PageId, PageInfo};

use super::Committer;
use crate::catalog::KnownImages;
use crate::error::{Error, Result};
use crate::images::PendingImages;
use crate::log::Log;

/// The images that were written for a batch, if any. Dropping this value removes their files, unless
/// [`logged`](Self::logged) or [`leave`](Self::leave) was called.
#[derive(Default)]
pub(super) struct BatchImages<'a> {
    /// The written images, or `None` for most batches. Boxed, because a batch has up to four values of this type.
    written: Option<Box<WrittenImages<'a>>>,
}

struct WrittenImages<'a> {
    ahead: PendingImages<'a>,
    /// The page and the page's length in bytes for each image, in order. An element is `None` if the batch also changes
    /// the page in other ways, so that the page differs from its image.
    pages: Vec<Option<(PageId, u64)>>,
}

impl Committer {
    /// Calls `write`, which writes images before their batch is logged. The images may use only space that no reserve
    /// needs. If `write` fails, the store is poisoned unless the failure left it unchanged.
    pub(super) fn in_space<'a>(
        &self,
        write: impl FnMut() -> Result<PendingImages<'a>>,
    ) -> Result<PendingImages<'a>> {
        let pool = &self.engine.log.pool;
        // The reserve is filled first: the image must not take the space that deletes need on a full disk.
        pool.fill().and_then(|()| pool.with_surplus(write)).map_err(|error| match error {
            // The page changed while it was read. Nothing failed.
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
        self.in_space(|| PendingImages::write_read(files, engine.store, *images, lens, &equip, &read))
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

    /// Records that the batch is logged, and keeps the files. Must be called under the submission lock, because a
    /// snapshot that begins after this batch must include the images in its plan.
    pub fn logged(&mut self, known: &KnownImages, log: &Log, point: LogPoint) {
        let Some(written) = self.written.take() else { return };
        let WrittenImages { ahead, pages } = *written;
        // The next snapshot names these images, so they need not be written again.
        for (page, image) in pages.iter().zip(ahead.images()) {
            if let Some((page, len)) = page {
                known.note_ahead(*page, point.lsn, *image, *len);
            }
        }
        // Images count like log toward the next snapshot.
        log.count_ahead(ahead.images().iter().map(|image| image.stored_len).sum());
        ahead.logged(point.lsn);
    }

    /// Keeps the files, because it is unknown whether the batch is in the log. Recovery determines this from the log.
    pub fn leave(&mut self) {
        if let Some(written) = &mut self.written {
            written.ahead.leave();
        }
    }
}
