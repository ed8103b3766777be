//! The things that a follower hands over: a whole batch, or the state that a restore put in place of
//! everything.

use std::fmt;
use std::sync::Arc;

use remanent_format::image::ImageRef;
use remanent_format::image::proven::ProvenImage;
use remanent_format::image::read::{read_image, stream_image};
use remanent_format::manifest::Manifest;
use remanent_format::op::{Op, each_op};
use remanent_format::{Damage, Defect, Lsn, Metadata, PageId, PageInfo};

use super::position::FollowerPosition;
use super::survey::missing_file;
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// A batch as it was committed, every byte checked.
///
/// Its operations are after-images (I2). Applied in their order to the pages as the batches before left them,
/// they give the pages as this one left them. [`crate::Replica`] does that.
#[derive(Clone)]
pub struct FollowedBatch {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) position: FollowerPosition,
    pub(super) durable: Lsn,
    /// The segment in which its frame lies.
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) payload: Vec<u8>,
    pub(super) restored: Option<RestoredState>,
}

impl FollowedBatch {
    /// The batch's number.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.position.lsn
    }

    /// The position from which a follower goes on after this batch. Keep it together with the results of the
    /// batch.
    #[must_use]
    pub fn position(&self) -> FollowerPosition {
        self.position
    }

    /// The newest batch that was known to survive a power cut when this one was logged. This one itself may
    /// not survive it: if a power cut takes it, its position has diverged.
    #[must_use]
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// The batch's operations, in order.
    #[must_use]
    pub fn operations(&self) -> Vec<Op<'_>> {
        let mut ops = Vec::new();
        each_op(&self.payload, |at| ops.push(at.op)).expect("decoded before it was handed over");
        ops
    }

    /// The bytes in which its operations lie, as the log has them: what [`operations`](Self::operations)
    /// borrows from.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Reads the bytes that an [`Op::Image`] of the batch makes its page's whole content, and checks them.
    /// Such bytes lie in a file of their own, so a batch is handed over without having them in memory.
    ///
    /// # Errors
    /// [`Error::UnknownPage`] if no such operation names the page; [`Error::Overtaken`] if the file is not
    /// kept any more; [`Error::Damaged`].
    pub fn image(&self, page: PageId) -> Result<Vec<u8>> {
        let (image, len) = self.image_named(page)?;
        ImageSource::new(&self.disk, self.lsn()).read(&image, len)
    }

    /// As [`FollowedBatch::image`], for a follower that keeps no pages: hands the bytes to `sink`, in their
    /// order and piece by piece. However long the page is, memory is held for one piece. The bytes are proven
    /// when this returns `Ok`, and not before.
    ///
    /// # Errors
    /// As for [`FollowedBatch::image`].
    pub fn stream_image(&self, page: PageId, sink: impl FnMut(&[u8])) -> Result<()> {
        let (image, len) = self.image_named(page)?;
        ImageSource::new(&self.disk, self.lsn()).stream(&image, len, sink)
    }

    fn image_named(&self, page: PageId) -> Result<(ImageRef, u64)> {
        let named = self.operations().into_iter().find_map(|op| match op {
            Op::Image { page: of, len, image } if of == page => Some((image, len)),
            _ => None,
        });
        named.ok_or(Error::UnknownPage { page })
    }

    /// The remark that the batch carries; `None` if it carries none.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        self.operations().into_iter().find_map(|op| match op {
            Op::Note { text } => Some(text.to_owned()),
            _ => None,
        })
    }

    /// The state that the batch puts in place of everything, if it is a restore.
    #[must_use]
    pub fn restored(&self) -> Option<&RestoredState> {
        self.restored.as_ref()
    }
}

/// The state that a restore put in place of all pages and the root.
#[derive(Clone)]
pub struct RestoredState {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) lsn: Lsn,
    pub(super) of: Lsn,
    pub(super) table: Arc<Manifest>,
    pub(super) pages: Vec<PageInfo>,
}

impl RestoredState {
    /// The batch whose state it is; an earlier one.
    #[must_use]
    pub fn of(&self) -> Lsn {
        self.of
    }

    /// All pages, in the order of their ids. A page with the same epoch and batch as before the restore has
    /// the same bytes, too.
    #[must_use]
    pub fn pages(&self) -> &[PageInfo] {
        &self.pages
    }

    /// The root's names and values.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        &self.table.root
    }

    /// Reads a page's bytes, and checks them.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Overtaken`] if the image is not kept any more; [`Error::Damaged`].
    pub fn read(&self, page: PageId) -> Result<Vec<u8>> {
        match self.image_of(page)? {
            Some((image, len)) => ImageSource::new(&self.disk, self.lsn).read(&image, len),
            None => Ok(Vec::new()),
        }
    }

    /// As [`RestoredState::read`], for a follower that keeps no pages: hands the bytes to `sink`, in their
    /// order and piece by piece. However long the page is, memory is held for one piece. The bytes are proven
    /// when this returns `Ok`, and not before.
    ///
    /// # Errors
    /// As for [`RestoredState::read`].
    pub fn stream(&self, page: PageId, sink: impl FnMut(&[u8])) -> Result<()> {
        match self.image_of(page)? {
            Some((image, len)) => ImageSource::new(&self.disk, self.lsn).stream(&image, len, sink),
            None => Ok(()),
        }
    }

    /// The image of a page, and its length; a page of no bytes has none.
    pub(super) fn image_of(&self, page: PageId) -> Result<Option<(ImageRef, u64)>> {
        let entries = &self.table.entries;
        let at = entries
            .binary_search_by_key(&page, |entry| entry.page)
            .map_err(|_| Error::UnknownPage { page })?;
        Ok(entries[at].image.map(|image| (image, entries[at].len)))
    }
}

/// Reads images that a batch names. Files stay open between reads.
pub(super) struct ImageSource<'d> {
    disk: &'d Arc<dyn Disk>,
    lsn: Lsn,
    source: DiskSource,
}

impl<'d> ImageSource<'d> {
    pub fn new(disk: &'d Arc<dyn Disk>, lsn: Lsn) -> Self {
        Self { disk, lsn, source: DiskSource::new(disk.clone()) }
    }

    fn read(&self, image: &ImageRef, len: u64) -> Result<Vec<u8>> {
        read_image(&self.source, image, len).map_err(|damage| self.error(damage))
    }

    fn stream(&self, image: &ImageRef, len: u64, mut sink: impl FnMut(&[u8])) -> Result<()> {
        let streamed = stream_image(&self.source, image, len, |piece| {
            sink(piece);
            Ok(())
        });
        streamed.map_err(|damage| self.error(damage))
    }

    /// Proves an image, so that [`fill`](Self::fill) can be had of it.
    pub fn prove(&self, image: &ImageRef, len: u64) -> Result<ProvenImage> {
        ProvenImage::prove(&self.source, image, len).map_err(|damage| self.error(damage))
    }

    /// Reads all of a page.
    pub fn fill(&self, image: &ProvenImage, out: &mut [u8]) -> Result<()> {
        image.read(&self.source, 0, out).map_err(|damage| self.error(damage))
    }

    /// The writer may have written over a file that this source keeps open (I13). It takes the file's name
    /// away before: where the name is gone, the file was overtaken, and what was read of it says nothing.
    fn error(&self, damage: Damage) -> Error {
        match damage.defect {
            Defect::Missing => missing_file(self.disk, self.lsn, damage),
            Defect::Memory { .. } | Defect::Shortage { .. } => damage.into(),
            _ if self.source.is_gone(damage.file) => missing_file(self.disk, self.lsn, damage),
            _ => damage.into(),
        }
    }
}

impl fmt::Debug for FollowedBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FollowedBatch")
            .field("position", &self.position)
            .field("operations", &self.operations())
            .field("restored", &self.restored)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for RestoredState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Restored").field("of", &self.of).field("pages", &self.pages).finish_non_exhaustive()
    }
}
