//! Reads pages from sources when a batch is committed. The bytes of a long page are first written to an image file, and
//! then copied from the file to memory.
//!
//! 1. Read the sources piece by piece into an image file, and sync the file and its name. No lock is held, because
//!    reading a source runs the caller's code.
//! 2. Encode the batch. Its frame names the images, as for other whole pages.
//! 3. Fill the memory of the pages from the images ([`super::fills`]) and verify their checksums. The sources are not
//!    read a second time: they could return different bytes, so that the page in memory would differ from the page in
//!    the log.
//! 4. Log the batch. The applier has nothing to copy.
//!
//! After a failure or a crash before step 4, the memory is freed and the image file is removed.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use remanent_format::image::ImageRef;
use remanent_format::op::Op;
use remanent_format::{PageId, PageInfo};

use super::Committer;
use super::batch_images::BatchImages;
use crate::base::allocation::{collected, insert, make_room, push, set_of};
use crate::error::{Error, Result};
use crate::write::batch::{CopySources, SourcePage, WHOLE_PAGE_LEN_MIN, WriteBatch};

/// The bytes that a batch has read from sources: the images of long pages, and the bytes of short pages.
#[derive(Default)]
pub(super) struct SourceImages<'a> {
    /// The long pages, whose bytes are in images, in the order of the images.
    pages: Vec<SourcePage<'a>>,
    /// The images of the long pages. Their files are removed if the batch fails.
    pub file: BatchImages<'a>,
    /// The ids of the long pages.
    of_pages: BTreeSet<PageId>,
    /// The bytes of the short pages, by the operation's index.
    pub short: BTreeMap<usize, Vec<u8>>,
}

impl SourceImages<'_> {
    /// Returns whether the bytes of any page are in an image.
    pub fn is_any(&self) -> bool {
        self.file.is_any()
    }

    /// Returns the number of pages whose bytes are in images.
    pub fn count(&self) -> usize {
        self.pages.len()
    }

    /// Returns whether `op` refers to one of these images.
    pub fn holds(&self, op: &Op<'_>) -> bool {
        let Op::Image { page, .. } = op else { return false };
        self.is_any() && self.of_pages.contains(page)
    }

    /// Returns the images, each with the index of its operation in the batch.
    pub fn images(&self) -> impl Iterator<Item = (usize, ImageRef)> {
        self.pages.iter().map(|page| page.step).zip(self.file.refs())
    }
}

impl Committer {
    /// Reads the sources of a batch: long pages into an image file, short pages into memory. On return, the file and
    /// its name are durable.
    ///
    /// # Errors
    /// `Io`; the errors of [`WriteBatch::source_pages`]; `DiskFull`; `OutOfMemory`. After an error, no files remain.
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

    /// Returns an error if a page of `found` is neither new nor exists in the store. This check precedes the reads of
    /// the sources, which may take minutes.
    fn check_exists(&self, found: &[SourcePage<'_>], new_pages: &[PageId]) -> Result<()> {
        let mut old =
            found.iter().map(|page| page.page).filter(|page| new_pages.binary_search(page).is_err());
        let table = self.submitted.lock();
        match old.find(|page| table.get(*page).is_none()) {
            Some(page) => Err(Error::UnknownPage { page }),
            None => Ok(()),
        }
    }

    /// Performs step 1 of the module documentation for long pages. Several threads read one page each.
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
