//! A store with a log and images beyond 4 GiB: frames and payloads at offsets that exceed 32 bits, in sparse
//! files that take no space.

use std::collections::BTreeMap;
use std::io;

use remanent_format::frame::{FrameHeader, FrameKind};
use remanent_format::image::{Codec, ImageRef};
use remanent_format::manifest::Manifest;
use remanent_format::op::{Op, PayloadWriter};
use remanent_format::segment::{Opening, SegmentHeader};
use remanent_format::{FileName, Folder, Incarnation, LogPoint, Lsn, Place, ReadAt, SnapshotId};

use crate::maker::{Maker, PAGE, STORE, content};

/// A file of zeros, except for some bytes that are keyed by their offsets.
#[derive(Clone, Default)]
pub struct SparseFile {
    pub len: u64,
    pub pieces: BTreeMap<u64, Vec<u8>>,
}

#[derive(Clone, Default)]
pub struct SparseFiles(pub BTreeMap<FileName, SparseFile>);

impl ReadAt for SparseFiles {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        Ok(self.0.keys().filter(|file| file.folder() == folder).map(|file| file.name()).collect())
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        Ok(self.0.get(&file).map(|file| file.len))
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let file = self.0.get(&file).ok_or(io::ErrorKind::NotFound)?;
        let end = offset + out.len() as u64;
        if end > file.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        out.fill(0);
        for (at, bytes) in file.pieces.range(..end) {
            let piece_end = at + bytes.len() as u64;
            let (from, to) = (offset.max(*at), end.min(piece_end));
            if from < to {
                let source = &bytes[(from - at) as usize..(to - at) as usize];
                out[(from - offset) as usize..(to - offset) as usize].copy_from_slice(source);
            }
        }
        Ok(())
    }
}

/// An offset that exceeds 32 bits, and a multiple of 4096.
pub const FAR: u64 = (1 << 32) + (3 << 12);

/// A store with batches 1 to 3, of which the last two are far into segment 1, and a snapshot of batch 1 whose image is
/// far into its file. The durable mark of the last frame covers the previous frame.
pub struct FarStore {
    pub files: SparseFiles,
    /// Offsets of the frames of batches 2 and 3.
    pub frames: [u64; 2],
}

/// Creates the store. Its page has this length and place, and contains zeros after the bytes that the maker wrote.
pub fn far_store(page_len: u64, place: Place) -> FarStore {
    let mut maker = Maker::new();
    maker.batch();
    let near = maker.files.0.clone();
    let mut files = SparseFiles::default();
    let whole = |bytes: &[u8]| SparseFile { len: bytes.len() as u64, pieces: [(0, bytes.to_vec())].into() };
    files.0.insert(FileName::Store, whole(&near[&FileName::Store]));
    let incarnation = Incarnation { number: 1, random: 5 };
    let opening =
        Opening { incarnation, predecessor: LogPoint::default(), accepted: Lsn(0), accepted_chain: 0 };
    let segment_len = FAR + (64 << 10);
    let header =
        |segment, segment_len, opening| SegmentHeader { store: STORE, segment, segment_len, opening };
    let first = header(1, segment_len, Some(opening)).encode().to_vec();
    let mut segment = SparseFile { len: segment_len, pieces: [(0, first)].into() };
    // Replay starts as if 4 GiB of frames came before. A valid frame near the start of the segment keeps the search for
    // the first frame short.
    let redo = LogPoint { incarnation, lsn: Lsn(1), segment: 1, offset: FAR - 16, chain: 77 };
    let mut chain_prev = 0;
    let mut frame = |lsn: u64, durable: u64, op: Op<'_>, offset: u64| {
        let mut writer = PayloadWriter::default();
        writer.push(&op).unwrap();
        let payload = writer.finish();
        let header = FrameHeader {
            kind: FrameKind::Batch,
            group_start: true,
            incarnation,
            store: STORE,
            segment: 1,
            offset,
            lsn: Lsn(lsn),
            durable: Lsn(durable),
            payload_len: payload.len() as u32,
            payload_crc: crc32fast::hash(&payload),
            chain_prev,
        };
        let (bytes, chain) = header.encode();
        segment.pieces.insert(offset, [&bytes[..], &payload].concat());
        chain_prev = if lsn == 1 { redo.chain } else { chain };
        offset
    };
    let write = |bytes| Op::Write { page: PAGE, offset: 0, bytes };
    frame(1, 0, Op::Note { text: "the first" }, 4096);
    let second = frame(2, 1, write(&[2; 8]), FAR);
    let third = frame(3, 2, write(&[3; 8]), FAR + 4096);
    files.0.insert(FileName::Segment(1), segment);
    let next = header(2, 16 << 10, None).encode().to_vec();
    files.0.insert(FileName::Segment(2), SparseFile { len: 16 << 10, pieces: [(0, next)].into() });

    let mut manifest = maker.manifest(1, 1, 1, 1);
    manifest.redo = redo;
    let bytes = content(1);
    let crc = crc_with_zeros(&bytes, page_len);
    let image = ImageRef {
        file: 1,
        offset: FAR,
        stored_len: page_len,
        stored_crc: crc,
        raw_crc: crc,
        codec: Codec::Raw,
    };
    let entry = &mut manifest.entries[0];
    (entry.len, entry.place, entry.image) = (page_len, place, Some(image));
    let manifest = Manifest { snapshot: SnapshotId(1), ..manifest };
    files.0.insert(FileName::Manifest(1), whole(&manifest.encode().unwrap()));
    let pages = SparseFile { len: FAR + page_len, pieces: [(FAR, bytes)].into() };
    files.0.insert(FileName::Pages(1), pages);
    FarStore { files, frames: [second, third] }
}

/// Returns the CRC-32 of `bytes`, followed by zeros up to `len`.
fn crc_with_zeros(bytes: &[u8], len: u64) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(bytes);
    let (zeros, mut left) = (vec![0; 1 << 20], len - bytes.len() as u64);
    while left > 0 {
        let piece = left.min(zeros.len() as u64);
        hasher.update(&zeros[..piece as usize]);
        left -= piece;
    }
    hasher.finalize()
}
