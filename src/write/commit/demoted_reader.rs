//! Reads the pages that a batch moves to disk, so that their images can be written. One command list reads many pages,
//! because each separate read would wait for the applier and for the device.

use std::ops::Range;

use remanent_format::PageInfo;

use crate::applier::VersionRange;
use crate::base::allocation::push;
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::{CHUNK_BYTES, chunks};
use crate::memory::staging::StagingBuf;

/// The pages that a batch moves to disk, divided into chunks of an image file. Several threads write the chunks, and
/// each thread reads the pages of one chunk at a time.
pub(super) struct ReadPages<'r> {
    engine: &'r Engine,
    chunks: Vec<&'r [PageInfo]>,
    /// Whether a read found that a page has a newer version.
    is_stale: AtomicBool,
}

/// Reads the pages of each chunk in order, for one thread.
pub(super) struct DemotedReader<'r> {
    demoted: &'r ReadPages<'r>,
    /// The index of the current chunk.
    chunk: usize,
    /// The index within the chunk of the page that was read last.
    at: usize,
    /// The pages of the current chunk that were read together, with their bytes, or `None` if no such pages were read.
    group: Option<Group>,
}

/// The bytes of consecutive pages of a chunk that were read together.
struct Group {
    /// The index within the chunk of the first page.
    first: usize,
    /// The offset of each page's bytes in `bytes`, followed by the end of the last page.
    starts: Vec<usize>,
    bytes: StagingBuf,
}

impl<'r> ReadPages<'r> {
    /// Prepares to read the page versions in `pages`.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(engine: &'r Engine, pages: &'r [PageInfo]) -> Result<Self> {
        let chunks = chunks(pages, CHUNK_BYTES, |info| info.len)?;
        Ok(Self { engine, chunks, is_stale: AtomicBool::new(false) })
    }

    /// Returns whether a read failed because a page has a newer version.
    pub fn is_stale(&self) -> bool {
        self.is_stale.load(Ordering::Relaxed)
    }

    fn read_ranges(&self, ranges: &[VersionRange]) -> Result<StagingBuf> {
        let Engine { applier, device, staging, .. } = self.engine;
        let lsn = ranges[0].lsn;
        applier.read_versions(device, staging, ranges)?.ok_or_else(|| {
            self.is_stale.store(true, Ordering::Relaxed);
            Error::Overtaken { lsn, snapshot: None }
        })
    }
}

impl<'r> DemotedReader<'r> {
    pub fn new(demoted: &'r ReadPages<'r>) -> Self {
        Self { demoted, chunk: 0, at: 0, group: None }
    }

    /// Fills `out` with the bytes of page `info` that start at `offset`. Successive calls must request the pages in
    /// order; a page may be requested several times.
    ///
    /// # Errors
    /// `Overtaken` if the page has a newer version; `OutOfMemory`; a device error.
    pub fn read(&mut self, info: &PageInfo, offset: u64, out: &mut [u8]) -> Result<()> {
        while self.pages()[self.at].page != info.page {
            self.at += 1;
            if self.at == self.pages().len() {
                self.give_back();
                (self.chunk, self.at) = (self.chunk + 1, 0);
            }
        }
        if info.len > CHUNK_BYTES {
            let range = offset..offset + out.len() as u64;
            let bytes = self.demoted.read_ranges(&[self.range(self.at, range)])?;
            out.copy_from_slice(&bytes);
            self.demoted.engine.staging.put(bytes.into_staging());
            return Ok(());
        }
        let contains_page = |group: &Group| self.at + 1 < group.first + group.starts.len();
        if !self.group.as_ref().is_some_and(contains_page) {
            self.read_group()?;
        }
        let group = self.group.as_ref().expect("it was just read");
        let start = group.starts[self.at - group.first] + offset as usize;
        out.copy_from_slice(&group.bytes[start..][..out.len()]);
        Ok(())
    }

    /// Reads the current page, together with the directly following pages of the chunk that are in the same place.
    fn read_group(&mut self) -> Result<()> {
        self.give_back();
        let pages = self.pages();
        let place = pages[self.at].place;
        let (mut ranges, mut starts, mut end) = (Vec::new(), Vec::new(), 0);
        for (at, info) in pages.iter().enumerate().skip(self.at).take_while(|(_, info)| info.place == place) {
            push(&mut ranges, self.range(at, 0..info.len))?;
            push(&mut starts, end)?;
            end += info.len as usize;
        }
        push(&mut starts, end)?;
        let bytes = self.demoted.read_ranges(&ranges)?;
        self.group = Some(Group { first: self.at, starts, bytes });
        Ok(())
    }

    fn pages(&self) -> &'r [PageInfo] {
        self.demoted.chunks[self.chunk]
    }

    fn range(&self, at: usize, range: Range<u64>) -> VersionRange {
        let PageInfo { page, lsn, .. } = self.pages()[at];
        VersionRange { page, lsn, range }
    }

    fn give_back(&mut self) {
        if let Some(group) = self.group.take() {
            self.demoted.engine.staging.put(group.bytes.into_staging());
        }
    }
}

impl Drop for DemotedReader<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}
