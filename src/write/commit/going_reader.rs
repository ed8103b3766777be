//! Reading the pages that go to disk, many by one list of commands: one by one, each would wait for the
//! applier and for the device.

use std::ops::Range;

use remanent_format::PageInfo;

use crate::applier::VersionRange;
use crate::base::allocation::push;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::memory::staging::StagingBuf;

/// Bytes of pages that are read at a time.
const PIECE_LEN: u64 = 4 << 20;

/// Reads the pages that go to disk, in their order: short ones together, a long one piece by piece.
pub(super) struct GoingReader<'r> {
    engine: &'r Engine,
    pages: &'r [PageInfo],
    /// The page that was read last.
    at: usize,
    /// Short pages that were read together, and their bytes, one after the other.
    group: Option<(Range<usize>, StagingBuf)>,
    /// Whether a page was found changed.
    is_stale: bool,
}

impl<'r> GoingReader<'r> {
    /// A reader of these pages, as they are by their versions.
    pub fn new(engine: &'r Engine, pages: &'r [PageInfo]) -> Self {
        Self { engine, pages, at: 0, group: None, is_stale: false }
    }

    /// Whether a read failed because a page is of another version by now.
    pub fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// Reads bytes of a page: the one that was read last, or one after it.
    ///
    /// # Errors
    /// `Overtaken` where the page is of another version by now; no memory; a device error.
    pub fn read(&mut self, info: &PageInfo, offset: u64, out: &mut [u8]) -> Result<()> {
        while self.pages[self.at].page != info.page {
            self.at += 1;
        }
        if info.len > PIECE_LEN {
            let range = offset..offset + out.len() as u64;
            let bytes = self.read_ranges(&[self.range(self.at, range)])?;
            out.copy_from_slice(&bytes);
            self.engine.staging.give(bytes.into_staging());
            return Ok(());
        }
        let is_there = |(group, _): &(Range<usize>, StagingBuf)| group.contains(&self.at);
        if !self.group.as_ref().is_some_and(is_there) {
            self.read_group()?;
        }
        let (group, bytes) = self.group.as_ref().expect("it was just read");
        let before: u64 = self.pages[group.start..self.at].iter().map(|info| info.len).sum();
        out.copy_from_slice(&bytes[(before + offset) as usize..][..out.len()]);
        Ok(())
    }

    /// Reads the page that comes next, and with it those after it that are short, of one place.
    fn read_group(&mut self) -> Result<()> {
        self.give_back();
        let (first, mut bytes) = (&self.pages[self.at], 0);
        let joins = |info: &&PageInfo| {
            bytes += info.len;
            bytes <= PIECE_LEN && info.place == first.place
        };
        let end = self.at + self.pages[self.at..].iter().take_while(joins).count();
        let mut ranges = Vec::new();
        for at in self.at..end {
            push(&mut ranges, self.range(at, 0..self.pages[at].len))?;
        }
        self.group = Some((self.at..end, self.read_ranges(&ranges)?));
        Ok(())
    }

    fn range(&self, at: usize, range: Range<u64>) -> VersionRange {
        let PageInfo { page, lsn, .. } = self.pages[at];
        VersionRange { page, lsn, range }
    }

    fn read_ranges(&mut self, ranges: &[VersionRange]) -> Result<StagingBuf> {
        let Engine { applier, device, staging, .. } = self.engine;
        let lsn = ranges[0].lsn;
        let read = applier.read_versions(&**device, staging, ranges)?;
        self.is_stale = read.is_none();
        read.ok_or(Error::Overtaken { lsn, snapshot: None })
    }

    fn give_back(&mut self) {
        if let Some((_, bytes)) = self.group.take() {
            self.engine.staging.give(bytes.into_staging());
        }
    }
}

impl Drop for GoingReader<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}
