//! An image file of a batch that is not logged yet.
//!
//! It is durable, with its name, before the batch can be logged: a crash before that leaves a file that
//! nothing names, and the next open removes it.

use remanent_format::image::ImageRef;
use remanent_format::{LogPoint, PageId};

use crate::catalog::KnownImages;
use crate::images::AheadImages;
use crate::log::Log;

/// Images that were written for a batch, if there are any. Without a word that the batch is logged, the file
/// goes when this is dropped.
#[derive(Default)]
pub(super) struct BatchImages<'a> {
    /// In a box: most batches have none of the four kinds.
    written: Option<Box<WrittenImages<'a>>>,
}

struct WrittenImages<'a> {
    ahead: AheadImages<'a>,
    /// What the images are of, in their order; `None` where the page is other than its image after the batch.
    pages: Vec<Option<(PageId, u64)>>,
}

impl<'a> BatchImages<'a> {
    /// Takes over images of these pages, with their lengths in bytes.
    pub fn new(ahead: AheadImages<'a>, pages: Vec<Option<(PageId, u64)>>) -> Self {
        assert!(ahead.images().len() == pages.len()); // I7: each image is its page's.
        Self { written: Some(Box::new(WrittenImages { ahead, pages })) }
    }

    /// Whether there are any.
    pub fn is_any(&self) -> bool {
        self.written.is_some()
    }

    /// The images, in the order of their pages.
    pub fn refs(&self) -> impl Iterator<Item = ImageRef> {
        self.written.iter().flat_map(|written| written.ahead.images()).copied()
    }

    /// The batch is logged. Under the submission lock still: a snapshot that begins after this batch must
    /// know of its images.
    pub fn logged(&mut self, known: &KnownImages, log: &Log, point: LogPoint) {
        let Some(written) = self.written.take() else { return };
        let WrittenImages { ahead, pages } = *written;
        // The next snapshot names them: they need not be written again.
        for (page, image) in pages.iter().zip(ahead.images()) {
            if let Some((page, len)) = page {
                known.note_ahead(*page, point.lsn, *image, *len);
            }
        }
        // Images count as log: a snapshot is due by them, too.
        log.count_ahead(ahead.images().iter().map(|image| image.stored_len).sum());
        ahead.logged(point.lsn);
    }

    /// Leaves the file, because the batch may be logged or not: recovery finds out.
    pub fn leave(&mut self) {
        if let Some(written) = &mut self.written {
            written.ahead.leave();
        }
    }
}
