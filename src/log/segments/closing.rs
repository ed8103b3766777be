//! Frees the space of a closing log that only an open log needs: most spares, all empty segments except the first, the
//! space after the last frame, and the frames before the kept log.
//!
//! Only spares, which contain no data, are shortened in place. A segment is replaced through a rename by a shorter file
//! that was written completely, synced and read back. So a crash at any point leaves either the longer or the shorter
//! file, both valid and with the same frames:
//!
//! 1. **Spares**, including those of images, are cut to the minimum length or removed. The closed log keeps as many
//!    spares as the open log had spares and empty segments in reserve, so that the next open and later deletes succeed
//!    even if the disk is full by then.
//! 2. **Empty segments** except the first are removed in descending order, because a gap would look like a lost
//!    segment. The first empty segment remains, because a segment with frames has a successor (I8), but its file is
//!    shortened.
//! 3. **The last segment** is cut after its frames. Frames before the kept log are omitted and become a hole. Each
//!    remaining frame keeps its offset (I3).
//!
//! Steps 2 and 3 need syncs, so they are skipped if step 1 frees enough space. On a nearly full disk no space is freed,
//! because another program would take the space, and the next open would lack it.
//!
//! A failure costs only space, so the caller merely logs it.

use std::ops::Range;
use std::sync::Arc;

use remanent_format::limits::{GROUP_ALIGN, SEGMENT_LEN_MIN, align_up};
use remanent_format::segment::{SEGMENT_HEADER_BLOCK, SegmentHeader, SegmentHeaderRaw};
use remanent_format::{Defect, FileName, Folder, Incarnation};

use super::file::header_block;
use super::spares::{SPARES_FOR_OPENS, Spare};
use super::{NOTHING, SegmentPool};
use crate::disk::DiskFile;
use crate::error::{Error, Result};

/// The maximum number of spares that a closed log keeps: the spares for opens, two spares of the reserve, and one spare
/// in place of the removed empty segment.
const SPARES_MAX: usize = SPARES_FOR_OPENS + 3;

/// The maximum number of unused bytes in a closed log: the lengths of its spares and of an empty segment, and the space
/// after the last frame.
const UNUSED_BYTES_MAX: u64 = (SPARES_MAX as u64 + 2) * SEGMENT_LEN_MIN;

/// The minimum free space on the disk, as a multiple of the reserve, for which a closing log frees any space.
const RESERVES_FREE_MIN: u64 = 4;

/// The number of bytes that are copied at a time.
const PIECE_LEN: u64 = 64 << 10;

/// The maximum number of bytes to copy per freed byte. The last segment is not replaced if the copy would be longer.
const COPIED_PER_BYTE_MAX: u64 = 16;

/// The end position of a log that has stopped and whose frames are all synced, for [`SegmentPool::shrink`].
pub(crate) struct ClosedEnd {
    /// The incarnation of the last frame.
    pub incarnation: Incarnation,
    /// The number of the segment with the last frame.
    pub number: u64,
    pub len: u64,
    /// The range of offsets in the last segment whose frames a replay or a reader may need. The range includes padding.
    pub needed: Range<u64>,
    /// The numbers and lengths of the empty segments after the last segment with frames. At least one such segment
    /// exists.
    pub empty: Vec<(u64, u64)>,
}

impl SegmentPool {
    /// Frees the space of a stopped log that only an open log needs.
    ///
    /// # Errors
    /// Errors of the file system. The log still contains all its frames.
    pub fn shrink(&self, mut end: ClosedEnd) -> Result<()> {
        self.disk.check_writer()?;
        if self.free_bytes() < RESERVES_FREE_MIN.saturating_mul(self.reserve_bytes()) {
            return Ok(());
        }
        // Step 1.
        self.image_spares.release()?;
        self.shrink_spares()?;
        // Step 2.
        while self.unused_bytes(&end) > UNUSED_BYTES_MAX && end.empty.len() > 1 {
            let (number, len) = end.empty.pop().expect("more than one");
            self.open_own(number, len, None)?;
            self.disk.remove(FileName::Segment(number))?;
            if end.empty.len() > 1 {
                // Each removal is synced before the next one. Otherwise a power cut could undo this removal but
                // not the next one, which would leave a gap.
                self.disk.sync_folder(Folder::Log)?;
            }
        }
        if self.unused_bytes(&end) > UNUSED_BYTES_MAX
            && let [(next, len)] = &mut end.empty[..]
            && *len > SEGMENT_LEN_MIN
        {
            self.open_own(*next, *len, None)?;
            self.build(*next, SEGMENT_LEN_MIN, None, NOTHING)?;
            self.replace(*next)?;
            *len = SEGMENT_LEN_MIN;
        }
        // Step 3.
        if self.unused_bytes(&end) > UNUSED_BYTES_MAX { self.shrink_last(&end) } else { Ok(()) }
    }

    /// Returns the number of bytes that an open log keeps in reserve when its segments have the maximum length.
    fn reserve_bytes(&self) -> u64 {
        let opens = self.rules.open_spare_count() as u64 * self.first_len();
        (self.rules.reserve as u64).saturating_mul(self.rules.len).saturating_add(opens)
    }

    /// Returns the number of bytes in the log's files that contain no frame that is still needed.
    fn unused_bytes(&self, end: &ClosedEnd) -> u64 {
        let spares: u64 = self.spares.lock().files.iter().map(|spare| spare.len).sum();
        let empty: u64 = end.empty.iter().map(|(_, len)| len).sum();
        spares + empty + (end.len - end.needed.end) + (end.needed.start - SEGMENT_HEADER_BLOCK)
    }

    /// Shortens the shortest spares to the minimum length, and removes the other spares. The changes are not synced.
    /// After a power cut, a spare may have its old length or name again. Such a spare costs only its space.
    fn shrink_spares(&self) -> Result<()> {
        let mut spares = self.spares.lock();
        let kept_max =
            if self.rules.reserve == 0 { SPARES_MAX } else { self.rules.reserved_spare_count() + 1 };
        while spares.files.len() > SPARES_MAX.min(kept_max) {
            let longest = spares.files.len() - 1;
            self.give_up(&mut spares, longest)?;
        }
        let mut at = 0;
        while let Some(&Spare { number, len }) = spares.files.get(at) {
            let file = self.disk.open(FileName::Spare(number), true)?;
            if !file.has_one_name()? {
                // The file also has a name in another directory, which was copied with hard links, so it must not be
                // changed.
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
            // The file is padded with zeros to the minimum length, because a file with a hole at its end cannot become
            // a spare.
            target.write_zeros(needed.end, len_new, self.io)?;
            target.sync()?;
            // The frames are durable in the old file. The copy replaces it only after it was read back from the medium:
            // an ineffective sync or a corrupted byte would lose all frames.
            let mut expected = vec![0; PIECE_LEN as usize];
            by_pieces(needed, |at, piece| {
                let expected = &mut expected[..piece.len()];
                source.file.read_at(at, expected)?;
                target.read_bypassing_cache(at, piece)?;
                if piece == expected { Ok(()) } else { Err(differs(temporary, at)) }
            })?;
            Ok(target)
        })?;
        self.replace(number)
    }

    /// Renames the synced temporary file of a segment to the segment's name, without a sync of the folder. After a
    /// power cut, the segment may have its old, longer file again, which is equally valid.
    fn replace(&self, number: u64) -> Result<()> {
        let temporary = FileName::Temporary(Folder::Log, number);
        let renamed = self.rename(temporary, FileName::Segment(number));
        renamed.inspect_err(|_| self.remove_unfinished(temporary))
    }

    /// Opens a segment of this log that is to be replaced or removed, and checks that no incarnation except `opened_by`
    /// opened the segment.
    ///
    /// # Errors
    /// Damage if another writer has replaced the file. Another writer can exist only where locks do not work.
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

/// Calls `each` for each piece of `range`, in ascending order. The arguments are the piece's offset and a buffer of the
/// piece's length.
fn by_pieces(range: &Range<u64>, mut each: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
    let mut piece = vec![0; PIECE_LEN as usize];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(PIECE_LEN);
        each(at, &mut piece[..len as usize])?;
        at += len;
    }
    Ok(())
}
