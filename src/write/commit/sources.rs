//! Pages that a batch reads from sources. The bytes of a long page are written to disk before they are in memory.
//!
//! 1. The sources are read piece by piece and written to an image file, which is synced together with its name. No lock
//!    is held, because a source is the caller's code.
//! 2. The frame names the images, as for other whole pages.
//! 3. Memory of the pages is filled from the images ([`super::fills`]), and their sums are checked. A source that is
//!    read again may return different bytes, so the page in memory would differ from the page in the log.
//! 4. The batch is logged. The applier finds the bytes in place.
//!
//! A failure or a crash before step 4 leaves neither batch nor memory, and the image file is removed.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use remanent_format::image::ImageRef;
use remanent_format::op::Op;
use remanent_format::{PageId, PageInfo};

use super::Committer;
use super::batch_images::BatchImages;
use crate::base::allocation::{collected, insert, make_room, push, set_of};
use crate::error::{Error, Result};
use crate::write::batch::{CopySources, SourcePage, WHOLE_PAGE_LEN_MIN, WriteBatch};

/// The pages of a batch that come from sources, after the sources were read.
#[derive(Default)]
pub(super) struct SourceImages<'a> {
    /// The pages whose bytes are in images, in the order of the images.
    pages: Vec<SourcePage<'a>>,
    /// The images, whose files are removed if the batch is refused.
    pub file: BatchImages<'a>,
    /// The ids of these pages.
    of_pages: BTreeSet<PageId>,
    /// The bytes of the other pages, by the operation's index.
    pub short: BTreeMap<usize, Vec<u8>>,
}

impl SourceImages<'_> {
    /// Returns whether any page's bytes are in an image.
    pub fn is_any(&self) -> bool {
        self.file.is_any()
    }

    /// Returns how many pages have their bytes in images.
    pub fn count(&self) -> usize {
        self.pages.len()
    }

    /// Returns whether an operation of the payload names one of the images.
    pub fn holds(&self, op: &Op<'_>) -> bool {
        let Op::Image { page, .. } = op else { return false };
        self.is_any() && self.of_pages.contains(page)
    }

    /// Returns the images, each with the operation's index.
    pub fn images(&self) -> impl Iterator<Item = (usize, ImageRef)> {
        self.pages.iter().map(|page| page.step).zip(self.file.refs())
    }
}

impl Committer {
    /// Reads the sources of a batch: long pages into an image file, short pages into memory. On return, the file and
    /// its name are durable.
    ///
    /// # Errors
    /// `Io`; the errors of a contradictory batch; no space or no memory. In all cases no files remain.
    pub(super) fn read_sources<'a>(
        &'a self,
        batch: &'a WriteBatch,
        pages: &[PageId],
        copied: &CopySources,
    ) -> Result<SourceImages<'a>> {
        let mut sources = SourceImages::default();
        let found = batch.source_pages(pages, copied)?;
        if found.is_empty() {
            return Ok(sources);
        }
        self.check_exists(&found, pages)?;
        let bytes = found.iter().fold(0_u64, |bytes, page| bytes.saturating_add(page.len));
        let is_long = |page: &SourcePage<'_>| bytes >= self.ahead_bytes_min && page.len >= WHOLE_PAGE_LEN_MIN;
        for page in found {
            if is_long(&page) {
                push(&mut sources.pages, page)?;
                continue;
            }
            let mut read = Vec::new();
            make_room(&mut read, page.len as usize)?;
            read.resize(page.len as usize, 0);
            page.read_at(0, &mut read)?;
            sources.short.insert(page.step, read);
        }
        if !sources.pages.is_empty() {
            sources.of_pages = set_of(sources.pages.iter().map(|page| page.page));
            sources.file = self.write_sources(&sources.pages)?;
        }
        Ok(sources)
    }

    /// Returns an error if a page does not exist, before its source is read, which may take minutes.
    fn check_exists(&self, found: &[SourcePage<'_>], new_pages: &[PageId]) -> Result<()> {
        let mut old =
            found.iter().map(|page| page.page).filter(|page| new_pages.binary_search(page).is_err());
        let table = self.submitted.lock();
        match old.find(|page| table.get(*page).is_none()) {
            Some(page) => Err(Error::UnknownPage { page }),
            None => Ok(()),
        }
    }

    /// Runs step 1: writes the images. Several threads read one page each.
    fn write_sources(&self, pages: &[SourcePage<'_>]) -> Result<BatchImages<'_>> {
        let lens = collected(pages.iter().map(|page| (page.page, page.len)))?;
        let mut by_id = HashMap::new();
        for page in pages {
            insert(&mut by_id, page.page, page)?;
        }
        let read =
            |(): &mut (), info: &PageInfo, offset, out: &mut [u8]| by_id[&info.page].read_at(offset, out);
        let ahead = self.write_read(&lens, || (), read)?;
        Ok(BatchImages::new(ahead, collected(lens.into_iter().map(Some))?))
    }
}
