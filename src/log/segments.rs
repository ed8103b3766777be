//! Floor 5. Segment files: made whole before they get their name, reused when nothing needs them.
//!
//! A crash here loses nothing: a temporary file is nobody's, a spare holds nothing, and a segment that has
//! its name is empty, synced and in its folder before the first frame enters its predecessor (I8).

use std::sync::Arc;

use remanent_format::limits::GROUP_ALIGN;
use remanent_format::segment::{SEGMENT_HEADER_BLOCK, SegmentHeader};
use remanent_format::{FileName, Folder, StoreId};

use crate::disk::{Disk, DiskFile};
use crate::error::{Error, Result};
use crate::options::LogIo;
use crate::phases::{self, Phase};
use crate::sync::Mutex;

/// Bytes of spares that are kept beyond the reserve at most.
const SURPLUS_BYTES_MAX: u64 = 512 << 20;

/// Who asks for space. The reserve of a full disk is for those who free space or end a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpacePurpose {
    /// A batch of the user's.
    User,
    /// A batch that only deletes, a seal.
    Reserve,
    /// An open, which takes spares before it makes a segment: the maker fills the reserve behind it.
    Open,
}

/// A segment file, wholly written.
pub(crate) struct SegmentFile {
    pub number: u64,
    pub len: u64,
    pub file: Arc<dyn DiskFile>,
}

/// Makes segments and takes them back.
pub(crate) struct SegmentPool {
    disk: Arc<dyn Disk>,
    store: StoreId,
    segment_len: u64,
    reserve: usize,
    /// How they will be written.
    io: LogIo,
    /// Numbers of the spare files, all of `segment_len`. Held while files are made, so that two makers
    /// never take the same spare.
    spares: Mutex<Vec<u64>>,
}

impl SegmentPool {
    /// A pool that keeps `reserve` spares back. Spares of an earlier run with another length are removed, and those that
    /// were copied with holes: mapped, a hole turns a full disk into SIGBUS.
    pub fn new(
        disk: Arc<dyn Disk>,
        store: StoreId,
        segment_len: u64,
        reserve: usize,
        io: LogIo,
    ) -> Result<Self> {
        let mut spares = Vec::new();
        for name in disk.list(Folder::Log)? {
            if let Some(FileName::Spare(number)) = FileName::parse(Folder::Log, &name) {
                let spare = disk.open(FileName::Spare(number), false)?;
                if spare.len()? == segment_len && spare.is_without_holes()? {
                    spares.push(number);
                } else {
                    disk.remove(FileName::Spare(number))?;
                }
            }
        }
        Ok(Self { disk, store, segment_len, reserve, io, spares: Mutex::new(spares) })
    }

    /// The usual length of a segment.
    pub fn segment_len(&self) -> u64 {
        self.segment_len
    }

    /// Makes the empty segment `number`, durable with its name when this returns.
    pub fn make(&self, number: u64, purpose: SpacePurpose) -> Result<SegmentFile> {
        let _phase = phases::enter(Phase::SegmentRoll);
        let header = SegmentHeader {
            store: self.store,
            segment: number,
            segment_len: self.segment_len,
            opening: None,
        };
        let mut spares = self.spares.lock();
        let at_hand = spares.len() > self.reserve || (purpose == SpacePurpose::Open && !spares.is_empty());
        if !at_hand {
            match self.build(number, &header, &[]) {
                Ok(file) => {
                    self.publish(FileName::Temporary(Folder::Log, number), number)?;
                    return Ok(SegmentFile { number, len: self.segment_len, file });
                }
                Err(Error::DiskFull { .. }) if purpose == SpacePurpose::Reserve && !spares.is_empty() => {}
                Err(error) => return Err(error),
            }
        }
        // A spare is already under a name that recovery does not read; its stale frames name another
        // position. Header, sync, name, folder, in this order: a segment is never seen with an old header.
        let spare = *spares.last().expect("one at hand, or a reserve that is not empty");
        let file = self.disk.open(FileName::Spare(spare), true)?;
        file.write_at(0, &header_block(&header))?;
        file.sync()?;
        self.publish(FileName::Spare(spare), number)?;
        spares.pop();
        Ok(SegmentFile { number, len: self.segment_len, file })
    }

    /// Replaces the empty segment `number` by one that has room for `frame_len` bytes. The caller made
    /// sure that the segment after it exists.
    pub fn make_long(&self, number: u64, frame_len: u64) -> Result<SegmentFile> {
        let _phase = phases::enter(Phase::SegmentRoll);
        let _one_maker = self.spares.lock();
        let len = (SEGMENT_HEADER_BLOCK + frame_len).next_multiple_of(GROUP_ALIGN).max(self.segment_len);
        let header = SegmentHeader { store: self.store, segment: number, segment_len: len, opening: None };
        let file = self.build(number, &header, &[])?;
        self.publish(FileName::Temporary(Folder::Log, number), number)?;
        Ok(SegmentFile { number, len, file })
    }

    /// Writes a whole segment under a temporary name, and syncs it. No space is a clean failure.
    fn build(&self, number: u64, header: &SegmentHeader, frames: &[u8]) -> Result<Arc<dyn DiskFile>> {
        let make = |temporary| self.disk.create(temporary);
        self.written(number, header, make, |file| {
            file.write_at(0, &header_block(header))?;
            file.write_at(SEGMENT_HEADER_BLOCK, frames)?;
            // Every byte is written before the file is mapped: a hole would turn a full disk into SIGBUS.
            let end = SEGMENT_HEADER_BLOCK + frames.len() as u64;
            file.write_zeros(end, header.segment_len, self.io)?;
            file.sync()?;
            Ok(file)
        })
    }

    /// As `build`, for an open: into a spare, where there is one of that length. Zeros for a new segment and their
    /// sync took as long as all else that the open of a small store does.
    pub fn build_opening(
        &self,
        number: u64,
        header: &SegmentHeader,
        frames: &[u8],
    ) -> Result<Arc<dyn DiskFile>> {
        let mut spares = self.spares.lock();
        let spare = spares.pop_if(|_| header.segment_len == self.segment_len);
        let Some(spare) = spare else { return self.build(number, header, frames) };
        // 1. It is no spare any more, and that for good: frames of a place that is yet to be written must not
        //    come back under a name that lasts.
        let make = |temporary| self.disk.rename(FileName::Spare(spare), temporary).map(|()| temporary);
        self.written(number, header, make, |temporary| {
            self.disk.sync_folder(Folder::Log)?;
            // 2. What it held names other places, and lies behind what is valid now.
            let file = self.disk.open(temporary, true)?;
            file.write_at(0, &header_block(header))?;
            file.write_at(SEGMENT_HEADER_BLOCK, frames)?;
            file.sync().map(|()| file)
        })
    }

    /// Makes a file and writes a segment to it. What was made and not wholly written is removed.
    fn written<T>(
        &self,
        number: u64,
        header: &SegmentHeader,
        make: impl FnOnce(FileName) -> Result<T>,
        write: impl FnOnce(T) -> Result<Arc<dyn DiskFile>>,
    ) -> Result<Arc<dyn DiskFile>> {
        let temporary = FileName::Temporary(Folder::Log, number);
        let remove = |_: &Error| {
            if let Err(error) = self.disk.remove(temporary) {
                tracing::warn!(%error, "cannot remove an unfinished segment; the next open will");
            }
        };
        make(temporary).and_then(|made| write(made).inspect_err(remove)).map_err(|error| {
            if error.is_no_space() {
                Error::DiskFull { file: FileName::Segment(number), needed: header.segment_len }
            } else {
                error
            }
        })
    }

    /// Gives a file that is wholly written and synced its name as a segment, for good.
    pub fn publish(&self, source: FileName, number: u64) -> Result<()> {
        self.disk.rename(source, FileName::Segment(number))?;
        self.disk.sync_folder(Folder::Log)
    }

    /// Takes back segments that nothing needs any more: as spares as far as they are wanted, else they are
    /// removed. Oldest first, so that a crash leaves no gap among those that are needed.
    ///
    /// Wanted are enough of them that a log which grows from snapshot to snapshot makes no segment anew. That costs
    /// as many bytes of zeros as the segment will hold of frames, and the frames wait for them: with a single spare
    /// beyond the reserve, 8 threads that committed 64 KiB each durably waited for segments half of their time.
    pub fn recycle(&self, numbers: &[u64]) -> Result<()> {
        if numbers.is_empty() {
            return Ok(());
        }
        let _phase = phases::enter(Phase::Recycle);
        let mut spares = self.spares.lock();
        let surplus_max = usize::try_from(SURPLUS_BYTES_MAX / self.segment_len).unwrap_or(usize::MAX);
        let spares_max = self.reserve.saturating_add(surplus_max.max(1));
        for &number in numbers {
            let segment = FileName::Segment(number);
            if spares.len() < spares_max && self.disk.open(segment, false)?.len()? == self.segment_len {
                let spare = next_spare(&spares);
                self.disk.rename(segment, FileName::Spare(spare))?;
                spares.push(spare);
            } else {
                self.disk.remove(segment)?;
            }
        }
        self.disk.sync_folder(Folder::Log)
    }

    /// Adds a spare to the reserve if that lacks one; returns whether it is full. One at a time: who needs a segment
    /// meanwhile, or wants to stop, waits for one of them only.
    pub fn add_to_reserve(&self) -> Result<bool> {
        let mut spares = self.spares.lock();
        if spares.len() < self.reserve {
            let number = next_spare(&spares);
            let header = SegmentHeader {
                store: self.store,
                segment: number,
                segment_len: self.segment_len,
                opening: None,
            };
            self.build(number, &header, &[])?;
            self.disk.rename(FileName::Temporary(Folder::Log, number), FileName::Spare(number))?;
            self.disk.sync_folder(Folder::Log)?;
            spares.push(number);
        }
        Ok(spares.len() >= self.reserve)
    }

    /// Does what makes files; where there is no space for them, gives up the spares beyond the reserve and does it
    /// once more. What fails for lack of space must have changed nothing.
    pub fn with_surplus<T>(&self, mut make: impl FnMut() -> Result<T>) -> Result<T> {
        match make() {
            Err(Error::DiskFull { .. }) if self.release_surplus()? => make(),
            made => made,
        }
    }

    /// Gives up the spares beyond the reserve; returns whether there were any.
    pub fn release_surplus(&self) -> Result<bool> {
        let mut spares = self.spares.lock();
        let had_any = spares.len() > self.reserve;
        while spares.len() > self.reserve
            && let Some(spare) = spares.pop()
        {
            self.disk.remove(FileName::Spare(spare))?;
        }
        Ok(had_any)
    }

    /// Gives up one spare, of the reserve if need be, so that a small file that must be written finds space.
    pub fn release_reserve(&self) -> Result<bool> {
        match self.spares.lock().pop() {
            Some(spare) => self.disk.remove(FileName::Spare(spare)).map(|()| true),
            None => Ok(false),
        }
    }
}

fn next_spare(spares: &[u64]) -> u64 {
    spares.iter().max().map_or(0, |number| number + 1)
}

fn header_block(header: &SegmentHeader) -> Vec<u8> {
    let mut block = header.encode().to_vec();
    block.resize(SEGMENT_HEADER_BLOCK as usize, 0);
    block
}
