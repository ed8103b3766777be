//! Buffered reading of a segment, and the search for the frames of a segment.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::sums::{BufferedSums, ChunkSums, distance_to_magic};
use crate::defect::Defect;
use crate::frame::{FRAME_MAGIC, FrameHeaderRaw, UncheckedFrame};
use crate::ids::StoreId;
use crate::limits::{FRAME_ALIGN, GROUP_ALIGN, align_up};
use crate::names::{FileName, NEVER_REFUSED_LEN, ReadAt, allocate};
use crate::segment::SEGMENT_HEADER_BLOCK;

/// Minimum length of a read, in bytes. Shorter reads would fit into the L2 cache, but copying from the page cache would
/// be only slightly faster (6.7 GB/s instead of 6.2 GB/s) and a replay would take as long.
const READ_AHEAD: u64 = 1 << 20;
/// Length in bytes of the first read of a search. A search usually needs only the start of a segment.
const FIRST_READ_LEN: u64 = 64 << 10;
/// Length in bytes of all reads of a search after the first. With this length, a search of an empty segment of 16 MiB
/// takes 1.8 ms, of which copying from the page cache takes 1.2 ms. With reads of 1 MiB, the search takes 2.2 ms.
const NEXT_READ_LEN: u64 = 256 << 10;
/// Maximum length of a read, in bytes. A read is as long as the longest frame so far, clamped to the minimum and this
/// maximum.
const READ_AHEAD_MAX: u64 = 8 << 20;

/// A function that allocates a buffer of at least the given length in bytes. The initial content of the buffer is
/// unspecified.
pub type AllocateBuffer<'s, B> = &'s dyn Fn(usize) -> io::Result<B>;

/// A function that fills memory with bytes of a segment and computes their checksums, on several threads. The arguments
/// are the number of the segment, the offset of the first byte, and the memory. The result contains the checksums in
/// the order of their offsets.
pub type ReadChunks<'s> = &'s dyn Fn(u64, u64, &mut [u8]) -> io::Result<Vec<ChunkSums>>;

/// The way in which a walk reads segments: the source of its buffers, and the number of threads.
#[expect(missing_debug_implementations, reason = "it is functions")]
pub struct Reading<'s, B> {
    /// The function that allocates the buffers for the bytes of segments.
    pub allocate: AllocateBuffer<'s, B>,
    /// The configuration for reading on several threads. `None` to read only on the thread of the walk.
    pub windows: Option<Windows<'s>>,
}

/// Configuration for reading a segment on several threads. A window is the range of a segment that is read at a time.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "it is a function")]
pub struct Windows<'s> {
    /// Length of a window in bytes. A frame that is longer gets a window of its own length.
    pub len: u64,
    /// The function that reads a window on several threads.
    pub read: ReadChunks<'s>,
}

impl<B> Clone for Reading<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Reading<'_, B> {}

impl<'s, B> Reading<'s, B> {
    /// Returns a configuration that reads only on the thread of the walk.
    pub fn single_threaded(allocate: AllocateBuffer<'s, B>) -> Self {
        Self { allocate, windows: None }
    }
}

const _: () = assert!(FIRST_READ_LEN as usize <= NEVER_REFUSED_LEN, "a search must not skip a header");

/// The allocation function that uses the global allocator.
pub(super) const ORDINARY: AllocateBuffer<'static, Vec<u8>> = &allocate;

/// A buffered reader of one segment. The buffer is reused unless a caller still shares it.
pub(super) struct SegmentReader<'s, B = Vec<u8>> {
    source: &'s dyn ReadAt,
    number: u64,
    file_len: Option<u64>,
    reading: Reading<'s, B>,
    buffer: Option<Arc<B>>,
    /// Range of the file that the buffer contains.
    buffered: Range<u64>,
    /// Checksums of parts of the buffered range.
    sums: BufferedSums,
    read_ahead: u64,
    /// Length in bytes of the longest request so far, plus the length of a frame header. Windows are multiples of this
    /// length.
    longest: u64,
}

impl<'s> SegmentReader<'s> {
    pub fn new(source: &'s dyn ReadAt, number: u64) -> Self {
        Self::reading_into(source, number, Reading::single_threaded(ORDINARY))
    }

    /// Creates a reader for a search, whose reads are short.
    pub fn for_search(source: &'s dyn ReadAt, number: u64) -> Self {
        Self { read_ahead: FIRST_READ_LEN, ..Self::new(source, number) }
    }
}

impl<'s, B: AsRef<[u8]> + AsMut<[u8]>> SegmentReader<'s, B> {
    pub fn reading_into(source: &'s dyn ReadAt, number: u64, reading: Reading<'s, B>) -> Self {
        Self {
            source,
            number,
            file_len: None,
            reading,
            buffer: None,
            buffered: 0..0,
            sums: BufferedSums::default(),
            read_ahead: READ_AHEAD,
            longest: GROUP_ALIGN,
        }
    }

    /// Discards the buffered bytes and their checksums, and from now on reads only on the calling thread. A walk calls
    /// this method when no next frame was found, which is usually the end of the log.
    pub fn forget(&mut self) {
        self.buffered = 0..0;
        self.reading.windows = None;
    }

    pub fn file_len(&mut self) -> Result<u64, Defect> {
        match self.file_len {
            Some(len) => Ok(len),
            None => {
                let len = self.source.len(FileName::Segment(self.number)).map_err(unreadable)?;
                Ok(*self.file_len.insert(len.ok_or(Defect::Missing)?))
            }
        }
    }

    /// Returns `len` bytes at `offset`. Returns an error if the range exceeds the file, so the buffer is never longer
    /// than the file.
    pub fn bytes(&mut self, offset: u64, len: usize) -> Result<&[u8], Defect> {
        let (buffer, at) = self.shared(offset, len)?;
        Ok(&(**buffer).as_ref()[at..at + len])
    }

    /// Returns the buffer that contains `len` bytes from `offset`, and the position of the first of them in the buffer.
    /// The buffer does not change while a caller keeps a clone of the `Arc`, because later reads then use another
    /// buffer. Returns the same errors as [`bytes`](Self::bytes).
    pub fn shared(&mut self, offset: u64, len: usize) -> Result<(&Arc<B>, usize), Defect> {
        let file_len = self.file_len()?;
        let end = offset.saturating_add(len as u64);
        if end > file_len {
            return Err(Defect::Truncated { needed: end, have: file_len });
        }
        if offset < self.buffered.start || end > self.buffered.end {
            self.fill(offset, end, file_len)?;
        }
        let buffer = self.buffer.as_ref().expect("the buffer was filled above");
        Ok((buffer, (offset - self.buffered.start) as usize))
    }

    pub fn crc(&mut self, offset: u64, len: usize) -> Result<u32, Defect> {
        let (_, at) = self.shared(offset, len)?;
        let buffer = self.buffer.as_ref().expect("the buffer was filled above");
        let bytes = &(**buffer).as_ref()[at..at + len];
        Ok(self.sums.crc(offset..offset + len as u64, bytes))
    }

    /// Returns true if no read has failed so far. Failed allocations do not count.
    pub fn all_is_readable(&self) -> bool {
        self.read_ahead > 0
    }

    /// Returns the buffered bytes from `offset` on, or an empty slice if `offset` is not buffered.
    fn buffered_from(&self, offset: u64) -> &[u8] {
        let buffered = self.buffer.as_ref().filter(|_| self.buffered.contains(&offset));
        buffered.map_or(&[], |buffer| {
            let buffer = &(**buffer).as_ref()[..(self.buffered.end - self.buffered.start) as usize];
            &buffer[(offset - self.buffered.start) as usize..]
        })
    }

    /// Fills the buffer with at least the bytes from `offset` to `end`. Reads start and end at block boundaries, so
    /// that direct I/O needs no copy.
    fn fill(&mut self, offset: u64, end: u64, file_len: u64) -> Result<(), Defect> {
        let start = offset - offset % GROUP_ALIGN;
        if let Some(windows) = self.reading.windows {
            self.longest = self.longest.max((end - offset + 2 * GROUP_ALIGN).min(READ_AHEAD_MAX));
            // The length of a window is a multiple of the longest frame so far, because a frame that crosses the end of
            // a window must be copied into the next window.
            let window = (windows.len / self.longest).max(1) * self.longest;
            let window_end = align_up(end.max(start.saturating_add(window)), GROUP_ALIGN);
            if self.read(start..window_end.min(file_len)).is_ok() {
                return Ok(());
            }
            // An allocation or a read of a sector failed. Shorter reads on this thread may still return the bytes
            // before the bad sector.
            self.reading.windows = None;
        }
        if self.read_ahead > 0 {
            // The read also covers the next header, and the bytes between a block boundary and the frame.
            self.read_ahead = self.read_ahead.max((end - offset + 2 * GROUP_ALIGN).min(READ_AHEAD_MAX));
            let ahead = align_up(end.max(start.saturating_add(self.read_ahead)), GROUP_ALIGN);
            match self.read(start..ahead.min(file_len)) {
                Ok(()) => {
                    self.read_ahead = self.read_ahead.max(NEXT_READ_LEN);
                    return Ok(());
                }
                // A failed allocation does not mean that a sector is bad.
                Err(Defect::Memory { .. }) => self.read_ahead = FIRST_READ_LEN,
                // A bad sector must not make the bytes before it unreadable.
                Err(_) => self.read_ahead = 0,
            }
        }
        // Read whole blocks. If that fails, read only the requested bytes.
        let blocks_end = align_up(end, GROUP_ALIGN).min(file_len);
        self.read(start..blocks_end).or_else(|_| self.read(offset..end))
    }

    /// Replaces the content of the buffer with this range. Bytes that are already in the buffer are moved and not read
    /// again.
    fn read(&mut self, range: Range<u64>) -> Result<(), Defect> {
        let len = (range.end - range.start) as usize;
        let buffered = std::mem::replace(&mut self.buffered, 0..0);
        let is_buffered = buffered.contains(&range.start);
        let kept = if is_buffered { buffered.end.min(range.end) - range.start } else { 0 } as usize;
        let kept_at = if is_buffered { range.start - buffered.start } else { 0 } as usize;
        match self.buffer.as_mut().and_then(Arc::get_mut).filter(|own| (**own).as_ref().len() >= len) {
            Some(own) => own.as_mut().copy_within(kept_at..kept_at + kept, 0),
            None => {
                let mut new = (self.reading.allocate)(len).map_err(|error| match error.kind() {
                    io::ErrorKind::OutOfMemory => Defect::Memory { needed: len as u64 },
                    _ => unreadable(error),
                })?;
                if let Some(old) = &self.buffer {
                    new.as_mut()[..kept].copy_from_slice(&(**old).as_ref()[kept_at..kept_at + kept]);
                }
                self.buffer = Some(Arc::new(new));
            }
        }
        let own = self.buffer.as_mut().and_then(Arc::get_mut).expect("its own, or new");
        let target = &mut own.as_mut()[kept..len];
        let at = range.start + kept as u64;
        self.sums.keep(&(range.start..at));
        match self.reading.windows {
            Some(windows) => {
                self.sums.extend((windows.read)(self.number, at, target).map_err(unreadable)?);
            }
            None => self.source.read_at(FileName::Segment(self.number), at, target).map_err(unreadable)?,
        }
        self.buffered = range;
        Ok(())
    }
}

fn unreadable(error: io::Error) -> Defect {
    Defect::of_read(&error)
}

/// Returns the frames of a segment from `offset` on whose headers name their own location. Unreadable bytes are
/// skipped.
pub(super) fn own_frames<'r>(
    reader: &'r mut SegmentReader<'_>,
    store: StoreId,
    number: u64,
    offset: u64,
) -> impl Iterator<Item = UncheckedFrame> + 'r {
    let file_len = reader.file_len().unwrap_or(0);
    let mut at = align_up(offset, FRAME_ALIGN);
    std::iter::from_fn(move || {
        while at < file_len {
            at += distance_to_magic(reader.buffered_from(at)) as u64;
            if at >= file_len {
                break;
            }
            let here = at;
            at += FRAME_ALIGN;
            match reader.bytes(here, FrameHeaderRaw::LEN) {
                Ok(bytes) if bytes.starts_with(&FRAME_MAGIC) => {
                    if let Ok(frame) = UncheckedFrame::decode(bytes)
                        && frame.is_at(store, number, here)
                    {
                        return Some(frame);
                    }
                }
                Ok(_) => {}
                // Skip the block, because each attempt to read a bad sector may take seconds.
                Err(_) => at = align_up(at, GROUP_ALIGN),
            }
        }
        None
    })
}

/// Returns all frames of a segment whose headers name their own location, even if other frames or the header of the
/// segment are damaged. Only the checksums of the frame headers are verified.
pub fn frames_of_segment(source: &dyn ReadAt, store: StoreId, number: u64) -> Vec<UncheckedFrame> {
    let mut reader = SegmentReader::new(source, number);
    let mut end = 0;
    own_frames(&mut reader, store, number, SEGMENT_HEADER_BLOCK)
        .filter(|frame| {
            // Bytes inside a frame are payload, even if they contain a frame header.
            let header = frame.unproven();
            let is_outside = header.offset >= end;
            end = end.max(header.end());
            is_outside
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Folder;

    /// A directory that contains one segment.
    struct OneFile(Vec<u8>);

    impl ReadAt for OneFile {
        fn list(&self, _: Folder) -> io::Result<Vec<String>> {
            Ok(Vec::new())
        }
        fn len(&self, _: FileName) -> io::Result<Option<u64>> {
            Ok(Some(self.0.len() as u64))
        }
        fn read_at(&self, _: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
            let found = self.0.get(offset as usize..offset as usize + out.len());
            out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }

    #[test]
    fn skipped_bytes_contain_no_frame_header() {
        const STEP: usize = FRAME_ALIGN as usize;
        for len in [0, 1, 3, 4, 80, 63 * STEP, 64 * STEP, 64 * STEP + 1, 130 * STEP + 3, 130 * STEP + 4] {
            // Zeros, and bytes that nearly match the frame magic at every position.
            for nearly in [[0; 4], [b'R', b'M', b'F', 0], [0, b'M', b'F', b'R']] {
                let mut bytes: Vec<u8> = nearly.iter().copied().cycle().take(len).collect();
                // The last bytes, which are too short to contain a header, are requested again together with the bytes
                // after them.
                let whole = len / STEP * STEP;
                assert_eq!(distance_to_magic(&bytes), whole, "{len}");
                for at in (0..whole).step_by(STEP) {
                    bytes[at..at + 4].copy_from_slice(&FRAME_MAGIC);
                    assert_eq!(distance_to_magic(&bytes), at, "{len}");
                    bytes[at..at + 4].copy_from_slice(&nearly);
                    bytes[at + 4..at + 8].copy_from_slice(&FRAME_MAGIC);
                    assert_eq!(distance_to_magic(&bytes), whole, "{len}");
                    bytes[at + 4..at + 8].copy_from_slice(&nearly);
                }
            }
        }
    }

    /// Also covers positions around the boundaries of individual reads.
    #[test]
    fn frames_are_found_at_exactly_their_positions() {
        const STORE: StoreId = StoreId([7; 16]);
        let len = FIRST_READ_LEN + 2 * NEXT_READ_LEN;
        let header = |offset| crate::frame::FrameHeader {
            kind: crate::frame::FrameKind::Batch,
            group_start: false,
            incarnation: crate::ids::Incarnation { number: 1, random: 1 },
            store: STORE,
            segment: 1,
            offset,
            lsn: crate::ids::Lsn(1),
            durable: crate::ids::Lsn(0),
            payload_len: 0,
            payload_crc: 0,
            chain_prev: 0,
        };
        let ends = [SEGMENT_HEADER_BLOCK, FIRST_READ_LEN, FIRST_READ_LEN + NEXT_READ_LEN, len];
        let around = |end: u64| {
            (end.saturating_sub(2048)..len.min(end + 2048)).step_by(FRAME_ALIGN as usize * crate::CASES_STEP)
        };
        for at in ends.into_iter().flat_map(around) {
            let mut file = OneFile(vec![0; len as usize]);
            let bytes = header(at).encode().0;
            let fits = at + FrameHeaderRaw::LEN as u64 <= len;
            let cut = bytes.len().min((len - at) as usize);
            file.0[at as usize..][..cut].copy_from_slice(&bytes[..cut]);
            let found = |from| -> Vec<u64> {
                let mut reader = SegmentReader::for_search(&file, 1);
                own_frames(&mut reader, STORE, 1, from).map(|frame| frame.unproven().offset).collect()
            };
            let expected: &[u64] = if fits { &[at] } else { &[] };
            assert_eq!(found(0), expected, "{at}");
            assert_eq!(found(at), expected, "{at}");
            assert_eq!(found(at + 1), [], "{at}");
        }
    }

    /// Reads ranges forward and backward, shorter and longer than the read-ahead. Every third buffer is kept.
    #[test]
    #[cfg_attr(miri, ignore = "it compares gigabytes")]
    fn later_reads_do_not_overwrite_shared_buffers() {
        let file =
            OneFile((0..5_000_003_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect());
        let mut reader = SegmentReader::new(&file, 1);
        let mut held = Vec::new();
        let mut drawn = 1_u64;
        for round in 0..600 {
            drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let len = [16, 80, 4096, 100_000, 1_500_000][(drawn >> 60) as usize % 5];
            // Most reads move forward a little, as the reads of a walk do.
            let offset = match round % 7 {
                0 => (drawn >> 20) % (file.0.len() - len) as u64,
                _ => (reader.buffered.start + (drawn >> 40) % 600_000).min((file.0.len() - len) as u64),
            };
            let expected = &file.0[offset as usize..][..len];
            let (memory, at) = reader.shared(offset, len).unwrap();
            assert!(memory[at..at + len] == *expected, "{offset}+{len} in round {round}");
            if round % 3 == 0 {
                held.push((memory.clone(), at, offset, len));
                held.drain(..held.len().saturating_sub(4));
            }
            for (memory, at, offset, len) in &held {
                let expected = &file.0[*offset as usize..][..*len];
                assert!(memory[*at..*at + *len] == *expected, "{offset}+{len} held in round {round}");
            }
        }
        let end = file.0.len() as u64;
        assert_eq!(reader.bytes(end - 3, 3).unwrap(), &file.0[file.0.len() - 3..]);
        assert_eq!(reader.bytes(end - 3, 4), Err(Defect::Truncated { needed: end + 1, have: end }));
    }
}
