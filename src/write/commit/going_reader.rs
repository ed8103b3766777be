//! Reading the pages that go to disk, many by one list of commands: one by one, each would wait for the
//! applier and for the device.

use std::ops::Range;

use remanent_format::PageInfo;

use crate::applier::VersionRange;
use crate::base::allocation::push;
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::images::{CHUNK_BYTES, chunks};
use crate::memory::staging::StagingBuf;

/// The pages that go to disk, for the threads that read them: each thread reads the pages of a chunk of
/// images, and takes them all at once.
pub(super) struct ReadPages<'r> {
    engine: &'r Engine,
    chunks: Vec<&'r [PageInfo]>,
    /// Whether a page was found changed.
    is_stale: AtomicBool,
}

/// One thread's reader of them, which reads chunks in their order.
pub(super) struct GoingReader<'r> {
    going: &'r ReadPages<'r>,
    /// The chunk that is read, and the page in it that was read last.
    chunk: usize,
    at: usize,
    /// Pages of the chunk that were read together.
    group: Option<Group>,
}

/// Pages that were read together.
struct Group {
    /// The first of them, by its index in the chunk.
    first: usize,
    /// Where the bytes of each begin, and the last one's end.
    starts: Vec<usize>,
    bytes: StagingBuf,
}

impl<'r> ReadPages<'r> {
    /// The pages, as they are by their versions.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(engine: &'r Engine, pages: &'r [PageInfo]) -> Result<Self> {
        let chunks = chunks(pages, CHUNK_BYTES, |info| info.len)?;
        Ok(Self { engine, chunks, is_stale: AtomicBool::new(false) })
    }

    /// Whether a read failed because a page is of another version by now.
    pub fn is_stale(&self) -> bool {
        self.is_stale.load(Ordering::Relaxed)
    }

    fn read_ranges(&self, ranges: &[VersionRange]) -> Result<StagingBuf> {
        let Engine { applier, device, staging, .. } = self.engine;
        let lsn = ranges[0].lsn;
        applier.read_versions(&**device, staging, ranges)?.ok_or_else(|| {
            self.is_stale.store(true, Ordering::Relaxed);
            Error::Overtaken { lsn, snapshot: None }
        })
    }
}

impl<'r> GoingReader<'r> {
    pub fn new(going: &'r ReadPages<'r>) -> Self {
        Self { going, chunk: 0, at: 0, group: None }
    }

    /// Reads bytes of a page: the one that was read last, or one after it.
    ///
    /// # Errors
    /// `Overtaken` where the page is of another version by now; no memory; a device error.
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
            let bytes = self.going.read_ranges(&[self.range(self.at, range)])?;
            out.copy_from_slice(&bytes);
            self.going.engine.staging.give(bytes.into_staging());
            return Ok(());
        }
        let has_it = |group: &Group| self.at + 1 < group.first + group.starts.len();
        if !self.group.as_ref().is_some_and(has_it) {
            self.read_group()?;
        }
        let group = self.group.as_ref().expect("it was just read");
        let start = group.starts[self.at - group.first] + offset as usize;
        out.copy_from_slice(&group.bytes[start..][..out.len()]);
        Ok(())
    }

    /// Reads the page that comes next, and with it those after it in the chunk that are in the same place.
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
        let bytes = self.going.read_ranges(&ranges)?;
        self.group = Some(Group { first: self.at, starts, bytes });
        Ok(())
    }

    fn pages(&self) -> &'r [PageInfo] {
        self.going.chunks[self.chunk]
    }

    fn range(&self, at: usize, range: Range<u64>) -> VersionRange {
        let PageInfo { page, lsn, .. } = self.pages()[at];
        VersionRange { page, lsn, range }
    }

    fn give_back(&mut self) {
        if let Some(group) = self.group.take() {
            self.going.engine.staging.give(group.bytes.into_staging());
        }
    }
}

impl Drop for GoingReader<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}
