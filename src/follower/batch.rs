//! The values that a follower returns: batches, and the states that restores produce.

use std::fmt;
use std::sync::Arc;

use remanent_format::frame::FrameHeader;
use remanent_format::image::ImageRef;
use remanent_format::image::proven::ProvenImage;
use remanent_format::image::read::{read_image, stream_image};
use remanent_format::manifest::Manifest;
use remanent_format::op::{Op, OpAt, decode_payload, for_each_op};
use remanent_format::state::replay::page_info;
use remanent_format::state::survey::read_manifest;
use remanent_format::store::StoreFile;
use remanent_format::{Damage, Defect, FileName, LogPoint, Lsn, Metadata, PageId, PageInfo};

use super::position::FollowerPosition;
use super::seek;
use super::survey::missing_file;
use crate::base::allocation::collected;
use crate::disk::Disk;
use crate::disk::source::DiskSource;
use crate::error::{Error, Result};

/// A verified batch, as it was committed.
///
/// Its operations are after-images (I2): applied in order to the pages after the previous batch, they produce the pages
/// after this batch. [`crate::follow::Replica`] applies them.
#[derive(Clone)]
pub struct FollowedBatch {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) position: FollowerPosition,
    pub(super) durable: Lsn,
    /// The number of the segment that contains the batch's frame.
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) payload: Vec<u8>,
    pub(super) restored: Option<RestoredState>,
}

impl FollowedBatch {
    /// Returns the Lsn of the batch.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        self.position.lsn
    }

    /// Returns the position from which a follower can resume after this batch. Store the position together with the
    /// results of processing the batch.
    #[must_use]
    pub fn position(&self) -> FollowerPosition {
        self.position
    }

    /// Returns the newest batch that was known to survive a power cut when this batch was logged. A power cut may still
    /// lose this batch itself. The batch's position then diverges.
    #[must_use]
    pub fn durable(&self) -> Lsn {
        self.durable
    }

    /// Returns the operations of the batch, in order.
    #[must_use]
    pub fn operations(&self) -> Vec<Op<'_>> {
        let mut ops = Vec::new();
        for_each_op(&self.payload, |at| ops.push(at.op)).expect("decoded before it was handed over");
        ops
    }

    /// Returns the encoded operations, exactly as in the log. [`operations`](Self::operations) decodes them.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Reads and verifies the bytes of an [`Op::Image`], which replaces the whole content of `page`. These bytes are in
    /// a separate file and are not loaded with the batch.
    ///
    /// # Errors
    /// [`Error::UnknownPage`] if no such operation names the page; [`Error::Overtaken`] if the file is no longer kept;
    /// [`Error::Damaged`].
    pub fn image(&self, page: PageId) -> Result<Vec<u8>> {
        let (image, len) = self.image_named(page)?;
        ImageSource::new(&self.disk, self.lsn()).read(&image, len)
    }

    /// Passes the bytes that [`FollowedBatch::image`] returns to `sink`, in order and piece by piece. Only one piece is
    /// in memory at a time, regardless of the page's length. The bytes are verified only once this call returns `Ok`.
    ///
    /// # Errors
    /// The errors of [`FollowedBatch::image`].
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

    /// Returns the note of the batch, if it has one.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        self.operations().into_iter().find_map(|op| match op {
            Op::Note { text } => Some(text.to_owned()),
            _ => None,
        })
    }

    /// Returns the restored state if the batch is a restore, otherwise `None`. The restored state replaces all pages
    /// and the root.
    #[must_use]
    pub fn restored(&self) -> Option<&RestoredState> {
        self.restored.as_ref()
    }
}

/// A state that a restore produced, with all pages and the root.
#[derive(Clone)]
pub struct RestoredState {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) lsn: Lsn,
    pub(super) of: Lsn,
    pub(super) table: Arc<Manifest>,
    pub(super) pages: Vec<PageInfo>,
}

impl RestoredState {
    /// Returns the earlier batch whose state was restored.
    #[must_use]
    pub fn of(&self) -> Lsn {
        self.of
    }

    /// Returns all pages, in the order of their ids. A page whose epoch and Lsn are unchanged by the restore has the
    /// same bytes as before.
    #[must_use]
    pub fn pages(&self) -> &[PageInfo] {
        &self.pages
    }

    /// Returns the names and values of the root.
    #[must_use]
    pub fn root(&self) -> &Arc<Metadata> {
        &self.table.root
    }

    /// Reads and verifies the bytes of a page.
    ///
    /// # Errors
    /// [`Error::UnknownPage`]; [`Error::Overtaken`] if the image is no longer kept; [`Error::Damaged`].
    pub fn read(&self, page: PageId) -> Result<Vec<u8>> {
        match self.image_of(page)? {
            Some((image, len)) => ImageSource::new(&self.disk, self.lsn).read(&image, len),
            None => Ok(Vec::new()),
        }
    }

    /// Passes the bytes that [`RestoredState::read`] returns to `sink`, in order and piece by piece. Only one piece is
    /// in memory at a time, regardless of the page's length. The bytes are verified only once this call returns `Ok`.
    ///
    /// # Errors
    /// The errors of [`RestoredState::read`].
    pub fn stream(&self, page: PageId, sink: impl FnMut(&[u8])) -> Result<()> {
        match self.image_of(page)? {
            Some((image, len)) => ImageSource::new(&self.disk, self.lsn).stream(&image, len, sink),
            None => Ok(()),
        }
    }

    /// Returns the image of a page and its length, or `None` for a page of length 0.
    pub(super) fn image_of(&self, page: PageId) -> Result<Option<(ImageRef, u64)>> {
        let entries = &self.table.entries;
        let at = entries
            .binary_search_by_key(&page, |entry| entry.page)
            .map_err(|_| Error::UnknownPage { page })?;
        Ok(entries[at].image.map(|image| (image, entries[at].len)))
    }
}

/// The frame of a batch, and the disk with the files that the batch names.
pub(crate) struct BatchFrame<'a> {
    pub disk: &'a Arc<dyn Disk>,
    pub store: &'a StoreFile,
    pub header: FrameHeader,
    pub payload: Vec<u8>,
    /// The point in the log after the frame.
    pub end: LogPoint,
    /// The newest batch that is known to survive a power cut.
    pub durable: Lsn,
}

impl BatchFrame<'_> {
    /// Decodes and checks the batch. For a restore, also reads the table.
    ///
    /// # Errors
    /// [`Error::Damaged`], and [`Error::Overtaken`] if the table is no longer kept.
    pub fn open(self) -> Result<FollowedBatch> {
        let Self { header, .. } = &self;
        let at = |defect: Defect| defect.at_lsn(FileName::Segment(header.segment), header.offset, header.lsn);
        let ops = decode_payload(&self.payload).map_err(at)?;
        let restored = match ops.as_slice() {
            [OpAt { op: Op::Restore { table, table_crc, restored }, .. }] => {
                Some(self.open_restore(*table, *table_crc, *restored)?)
            }
            _ => None,
        };
        Ok(FollowedBatch {
            disk: self.disk.clone(),
            position: seek::at(self.end),
            durable: self.durable,
            segment: header.segment,
            offset: header.offset,
            payload: self.payload,
            restored,
        })
    }

    fn open_restore(&self, table: u64, table_crc: u32, of: Lsn) -> Result<RestoredState> {
        let (file, lsn) = (FileName::Table(table), self.header.lsn);
        let source = DiskSource::new(self.disk.clone());
        let gone = |damage: Damage| match (source.archive_failure(&damage), &damage.defect) {
            (Some(failure), _) => failure,
            (None, Defect::Missing) => missing_file(self.disk, lsn, damage),
            (None, _) => damage.into(),
        };
        let (table, health) = read_manifest(&source, file, self.store).map_err(gone)?;
        if health.header_crc != table_crc {
            let (found, expected) = (health.header_crc.into(), table_crc.into());
            let defect = Defect::Mismatch { what: "checksum of the restored table", found, expected };
            return Err(defect.at_lsn(file, 0, lsn).into());
        }
        table.check_restored(lsn).map_err(|defect| Error::from(defect.at_lsn(file, 0, lsn)))?;
        let pages = collected(table.entries.iter().map(page_info))?;
        Ok(RestoredState { disk: self.disk.clone(), lsn, of, table: Arc::new(table), pages })
    }
}

/// Reads the images that a batch names. Files stay open between reads.
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

    /// Verifies an image. Pass the result to [`fill`](Self::fill) to read the image.
    pub fn prove(&self, image: &ImageRef, len: u64) -> Result<ProvenImage> {
        ProvenImage::prove(&self.source, image, len).map_err(|damage| self.error(damage))
    }

    /// Fills `out` with all bytes of the image's page.
    pub fn fill(&self, image: &ProvenImage, out: &mut [u8]) -> Result<()> {
        image.read(&self.source, 0, out).map_err(|damage| self.error(damage))
    }

    /// Converts damage found in a file to an error. Returns [`Error::Overtaken`] if the file's name no longer exists.
    ///
    /// The writer removes a file's name before it overwrites the file (I13), and this source may keep the file open.
    /// The content of a file without a name does not indicate damage.
    fn error(&self, damage: Damage) -> Error {
        if let Some(failure) = self.source.archive_failure(&damage) {
            return failure;
        }
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
