//! A log that closes gives back the space that only an open log needs: the room ahead of its last frame, the
//! frames before the oldest replay, and most of its spares.
//!
//! Nothing is shortened in place but spares, which hold nothing. A segment is replaced by a shorter file that
//! was written whole, synced and read back, with one rename. So a crash at any point leaves the longer file
//! or the shorter one, both valid and with the same frames:
//!
//! 1. **Spares** are cut to the shortest length, or removed. A full disk still finds what the next open and a
//!    few deletes need.
//! 2. **Empty segments** but the first are removed, from the last one down: a gap would look like a lost
//!    segment. The first one stays, because a segment with frames has a successor (I8), and is made short.
//! 3. **The last segment** is made as short as its frames. Frames before the oldest replay are left out, and
//!    their room is a hole: each frame that stays keeps its place (I3).
//!
//! A failure here costs space and nothing else, so that the caller only reports it.

use std::ops::Range;
use std::sync::Arc;

use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::segment::{SEGMENT_HEADER_BLOCK, SegmentHeader, SegmentHeaderRaw};
use remanent_format::{Defect, FileName, Folder, Incarnation};

use super::file::header_block;
use super::spares::{KEPT_FOR_OPENS, Spare};
use super::{NOTHING, SegmentPool};
use crate::disk::DiskFile;
use crate::error::{Error, Result};

/// Spares of the reserve that a closed log keeps, at the shortest length.
const RESERVE_CLOSED_MAX: usize = 2;

/// Bytes that are copied at a time. The system does not refuse so little memory.
const PIECE_LEN: u64 = 64 << 10;

/// A segment is rewritten if it gives back at least one byte for this many that are copied.
const COPIED_PER_BYTE_MAX: u64 = 16;

/// The end of a log to which nothing is appended any more, and of which everything is synced.
pub(crate) struct ClosedEnd {
    /// The incarnation of the last frame.
    pub incarnation: Incarnation,
    /// The segment with the last frame.
    pub number: u64,
    pub len: u64,
    /// The frames in it that a replay or a reader may need, padding included.
    pub needed: Range<u64>,
    /// The empty segments after it: numbers and lengths.
    pub empty: Vec<(u64, u64)>,
}

impl SegmentPool {
    /// Gives back the space that a closed log does not need.
    ///
    /// # Errors
    /// What the system says. Everything that the log holds is still there.
    pub fn shrink(&self, end: &ClosedEnd) -> Result<()> {
        // 1.
        self.shrink_spares()?;
        // 2.
        let Some((&(next, next_len), surplus)) = end.empty.split_first() else { return Ok(()) };
        for &(number, len) in surplus.iter().rev() {
            self.open_own(number, len, None)?;
            self.disk.remove(FileName::Segment(number))?;
        }
        if next_len > SEGMENT_LEN_MIN {
            self.open_own(next, next_len, None)?;
            self.make_anew(next, SEGMENT_LEN_MIN, NOTHING)?;
        }
        // 3.
        self.shrink_last(end)
    }

    /// Cuts the spares that stay, the shortest ones, and removes the others. Neither is synced: a power cut
    /// may bring a spare's length or name back, which costs only its space.
    fn shrink_spares(&self) -> Result<()> {
        self.image_spares.release()?;
        let mut spares = self.spares.lock();
        let kept = match self.rules.reserve {
            0 => 0,
            reserve => KEPT_FOR_OPENS + reserve.min(RESERVE_CLOSED_MAX),
        };
        while spares.files.len() > kept {
            let longest = spares.files.len() - 1;
            self.give_up(&mut spares, longest)?;
        }
        let mut at = 0;
        while let Some(&Spare { number, len }) = spares.files.get(at) {
            let file = self.disk.open(FileName::Spare(number), true)?;
            if !file.has_one_name()? {
                // A copy of the directory that was made of hard links may store to the same file.
                self.give_up(&mut spares, at)?;
                continue;
            }
            if len > SEGMENT_LEN_MIN {
                file.cut(SEGMENT_LEN_MIN)?;
                spares.files[at].len = SEGMENT_LEN_MIN;
            }
            at += 1;
        }
        Ok(())
    }

    fn shrink_last(&self, end: &ClosedEnd) -> Result<()> {
        let ClosedEnd { number, len, ref needed, .. } = *end;
        let len_new = align_up(needed.end, GROUP_ALIGN).max(SEGMENT_LEN_MIN);
        let given_back = (len - len_new) + (needed.start - SEGMENT_HEADER_BLOCK);
        let copied = needed.end - needed.start;
        if given_back == 0 || copied / COPIED_PER_BYTE_MAX > given_back {
            return Ok(());
        }
        let source = self.open_own(number, len, Some(end.incarnation))?;
        let opening = source.header.opening;
        let temporary = FileName::Temporary(Folder::Log, number);
        let make = |temporary| self.disk.create(temporary);
        self.written(number, len_new, make, |target| {
            target.write_at(0, &header_block(&self.header(number, len_new, opening)))?;
            by_pieces(needed, |at, piece| {
                source.file.read_at(at, piece)?;
                target.write_at(at, piece)
            })?;
            // Zeros up to the shortest length: a file with a hole at its end is no spare later.
            target.write_zeros(needed.end, len_new, self.io)?;
            target.sync()?;
            // The frames are durable where they are. Their copy takes their place only once the medium has
            // it: a sync that lied, or a byte that changed on the way, would lose them all.
            let mut expected = vec![0; piece_len(needed)];
            by_pieces(needed, |at, piece| {
                let expected = &mut expected[..piece.len()];
                source.file.read_at(at, expected)?;
                target.read_past_cache(at, piece)?;
                if piece == expected { Ok(()) } else { Err(differs(temporary, at)) }
            })?;
            Ok(target)
        })?;
        self.publish(temporary, number).inspect_err(|_| self.remove_unfinished(temporary))
    }

    /// Opens a segment of this log that is about to be replaced or removed: one that no incarnation but
    /// `opened_by` opened.
    ///
    /// # Errors
    /// Damage if another file has its name by now: one of another writer, where locks failed.
    fn open_own(&self, number: u64, len: u64, opened_by: Option<Incarnation>) -> Result<OwnSegment> {
        let name = FileName::Segment(number);
        let file = self.disk.open(name, false)?;
        let mut bytes = [0; SegmentHeaderRaw::LEN];
        file.read_at(0, &mut bytes)?;
        let header = SegmentHeader::decode_at(&bytes, self.store, number, len);
        let header = header.map_err(|defect| Error::from(defect.at(name, 0)))?;
        match header.opening {
            Some(opening) if Some(opening.incarnation) != opened_by => {
                let (what, found) = ("opening of another incarnation", opening.incarnation.number.into());
                Err(Defect::Field { what, found }.at(name, 0).into())
            }
            _ => Ok(OwnSegment { file, header }),
        }
    }
}

struct OwnSegment {
    file: Arc<dyn DiskFile>,
    header: SegmentHeader,
}

fn differs(file: FileName, at: u64) -> Error {
    let defect = Defect::Field { what: "copy of a segment that differs from the segment", found: 0 };
    defect.at(file, at).into()
}

fn piece_len(range: &Range<u64>) -> usize {
    (range.end - range.start).min(PIECE_LEN) as usize
}

/// Calls `each` with the pieces of a range, in their order, and memory for each of them.
fn by_pieces(range: &Range<u64>, mut each: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
    let mut piece = vec![0; piece_len(range)];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(PIECE_LEN);
        each(at, &mut piece[..len as usize])?;
        at += len;
    }
    Ok(())
}
