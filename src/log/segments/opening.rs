//! The opening segment of an incarnation. An open writes the segment completely, and then commits by renaming it to its
//! segment name.
//!
//! A crash before the rename leaves the log unchanged (I5). A crash after the rename leaves the new incarnation.

use std::sync::Arc;

use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::segment::{Opening, SEGMENT_HEADER_BLOCK};
use remanent_format::{FileName, Folder};

use super::SegmentPool;
use super::file::{SegmentFile, header_block};
use super::spares::{Spare, Spares};
use crate::disk::DiskFile;
use crate::error::{Error, Result};

impl SegmentPool {
    /// Writes and syncs the opening segment `number` under a temporary name.
    ///
    /// Uses a short spare if one exists. On a full disk, the segment is as short as its frames allow, or uses any spare
    /// that is long enough, because an open must succeed. As a last resort, a spare is removed for its space. The freed
    /// space also suffices for the segment after the opening segment.
    pub fn build_opening(&self, number: u64, opening: Opening, frames: &[u8]) -> Result<SegmentFile> {
        let mut spares = self.spares.lock();
        let needed = align_up(SEGMENT_HEADER_BLOCK + frames.len() as u64, GROUP_ALIGN);
        // The segment after the opening needs space as well. If the disk has space for neither and only one spare is
        // left, that spare is removed instead of reused, because its space suffices for two shorter segments.
        let free = self.free_bytes();
        let is_cramped = free < self.first_len() && spares.files.len() < 2;
        let is_short = |spare: &Spare| (needed..=self.first_len()).contains(&spare.len);
        let len_min = needed.max(SEGMENT_LEN_MIN);
        let mut len = if free < 2 * self.first_len() { len_min } else { needed.max(self.first_len()) };
        loop {
            let kept = spares.open_spare_count();
            let short = spares.files.iter().skip(kept).position(is_short).filter(|_| !is_cramped);
            let short = short.map(|at| kept + at);
            let built = match short {
                Some(at) => self.open_spare(&mut spares, at, number, opening, frames),
                None => {
                    let file = self.build(number, len, Some(opening), (SEGMENT_HEADER_BLOCK, frames));
                    file.and_then(|file| self.opened(number, len, file))
                }
            };
            let Err(Error::DiskFull { .. }) = built else { return built };
            if short.is_none() && len > len_min {
                len = len_min;
                continue;
            }
            let long = spares.files.iter().position(|spare| spare.len >= needed);
            if let Some(at) = long.filter(|_| spares.files.len() > 1) {
                let opened = self.open_spare(&mut spares, at, number, opening, frames);
                let Err(Error::DiskFull { .. }) = opened else { return opened };
            }
            match spares.files.len() {
                0 => return built,
                count => self.give_up(&mut spares, count - 1)?,
            }
        }
    }

    fn open_spare(
        &self,
        spares: &mut Spares,
        at: usize,
        number: u64,
        opening: Opening,
        frames: &[u8],
    ) -> Result<SegmentFile> {
        let Spare { number: spare, len } = spares.files[at];
        // 1. Durably rename the file, so that it is no longer a spare, before writing to it. Otherwise a power cut
        //    could keep the new frames and undo the rename. The spare would then contain frames of a position that is
        //    yet to be written, and might become the segment of that position.
        self.rename(FileName::Spare(spare), FileName::Temporary(Folder::Log, number))?;
        spares.take(at);
        let file = self.written(number, len, Ok, |temporary| {
            self.disk.sync_folder(Folder::Log)?;
            // 2. The stale frames in the file state other positions, so none of them is valid after the new ones (I3).
            let file = self.disk.open(temporary, true)?;
            file.write_at(0, &header_block(&self.header(number, len, Some(opening))))?;
            file.write_at(SEGMENT_HEADER_BLOCK, frames)?;
            file.sync().map(|()| file)
        })?;
        self.opened(number, len, file)
    }

    fn opened(&self, number: u64, len: u64, file: Arc<dyn DiskFile>) -> Result<SegmentFile> {
        let temporary = FileName::Temporary(Folder::Log, number);
        SegmentFile::new(number, len, file, self.io).inspect_err(|_| self.remove_unfinished(temporary))
    }

    /// Durably renames the completely written and synced opening segment `number` to its name. This rename is the
    /// commit point of an open (I5). Spares are removed if there is no space for the name.
    pub fn publish_opening(&self, number: u64) -> Result<()> {
        let mut spares = self.spares.lock();
        let temporary = FileName::Temporary(Folder::Log, number);
        loop {
            match self.publish(temporary, number) {
                Err(Error::DiskFull { .. }) if !spares.files.is_empty() => self.give_up(&mut spares, 0)?,
                published => return published,
            }
        }
    }

    /// Turns an opening segment that was not published into a spare for the next attempt.
    pub fn retract(&self, opening: &SegmentFile) {
        let mut spares = self.spares.lock();
        let temporary = FileName::Temporary(Folder::Log, opening.number);
        let number = spares.next_number();
        // No later open treats the frames in this file as valid, because recovery does not read spares.
        match self.disk.rename(temporary, FileName::Spare(number)) {
            Ok(()) => spares.add(Spare { number, len: opening.len }),
            Err(error) if error.is_no_space() => self.remove_unfinished(temporary),
            Err(error) => {
                tracing::warn!(%error, "cannot turn an unused opening segment into a spare; the next open removes it")
            }
        }
    }
}
