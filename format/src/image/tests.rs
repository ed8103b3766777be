//! Tests of image files, chunks and references.

use std::io;
use std::ops::Range;

use super::proven::ProvenImage;
use super::*;
use crate::defect::Defect;
use crate::ids::{Epoch, Lsn, PageId, StoreId};
use crate::limits::PAGE_LEN_MAX;
use crate::names::{FileName, Folder, ReadAt};

const STORE: StoreId = StoreId([0x5a; 16]);

fn new_image(page: u64, len: u64) -> NewImage {
    NewImage {
        page: PageId(page),
        epoch: Epoch(2),
        lsn: Lsn(9),
        len,
        crc: 0xdead_0000 + page as u32,
        compressed: None,
    }
}

fn sample() -> Chunk {
    Chunk::plan(3, 8192, &[new_image(1, 1), new_image(2, 16), new_image(5, 5000)]).unwrap()
}

fn decode(bytes: &[u8]) -> Result<Chunk, Defect> {
    ChunkHeader::decode(bytes)?.decode_table(bytes)
}

/// Encodes the sample with a modified header and first row, and with matching checksums.
fn with_rows(change: impl FnOnce(&mut ChunkHeaderRaw, &mut ImageHeaderRaw)) -> Vec<u8> {
    let mut bytes = sample().encode(STORE).unwrap();
    let mut header = ChunkHeaderRaw::from_bytes(bytes[..64].try_into().unwrap());
    let mut row = ImageHeaderRaw::from_bytes(bytes[64..128].try_into().unwrap());
    change(&mut header, &mut row);
    bytes[64..128].copy_from_slice(&row.to_bytes());
    header.table_crc = crc32fast::hash(&bytes[64..]);
    header.header_crc = crc32fast::hash(&header.to_bytes()[..60]);
    bytes[..64].copy_from_slice(&header.to_bytes());
    bytes
}

#[test]
fn image_file_header_round_trips_and_rejects_bit_flips() {
    let header = ImageFileHeader { store: STORE, file: 0x0102_0304, purpose: ImagePurpose::Batch };
    let bytes = header.encode();
    assert_eq!(ImageFileHeader::decode(&bytes), Ok(header));
    for bit in (0..8 * bytes.len()).step_by(crate::CASES_STEP) {
        let mut damaged = bytes;
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(ImageFileHeader::decode(&damaged).is_err(), "bit {bit}");
    }
    assert!(matches!(ImageFileHeader::decode(&bytes[..63]), Err(Defect::Truncated { needed: 64, have: 63 })));
    let changed = |change: fn(&mut ImageFileHeaderRaw)| {
        let mut raw = ImageFileHeaderRaw::from_bytes(&bytes);
        change(&mut raw);
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..60]);
        ImageFileHeader::decode(&raw.to_bytes())
    };
    let newer = changed(|raw| raw.version = 2);
    assert_eq!(newer, Err(Defect::Version { version: 2, features: 0 }));
    for purpose in [0, 3] {
        let found = changed(if purpose == 0 { |raw| raw.purpose = 0 } else { |raw| raw.purpose = 3 });
        assert_eq!(found, Err(Defect::Field { what: "purpose of an image file", found: purpose }));
    }
}

#[test]
fn payloads_are_contiguous_at_16_byte_alignment() {
    let chunk = sample();
    let offsets: Vec<u64> = chunk.images.iter().map(|header| header.image.offset).collect();
    let first = 8192 + 64 + 3 * 64;
    assert_eq!(offsets, [first, first + 16, first + 32]);
    assert_eq!(chunk.len, 8192);
}

#[test]
fn chunk_round_trips_and_rejects_every_bit_flip() {
    let bytes = sample().encode(STORE).unwrap();
    let decoded = decode(&bytes).unwrap();
    assert_eq!(decoded, sample());
    assert_eq!(decoded.encode(STORE).unwrap(), bytes);
    for bit in (0..8 * bytes.len()).step_by(crate::CASES_STEP) {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let found = decode(&damaged);
        assert!(matches!(found, Err(Defect::Magic { .. } | Defect::Checksum { .. })), "bit {bit}: {found:?}");
    }
    for len in 0..bytes.len() {
        let found = decode(&bytes[..len]);
        assert!(matches!(found, Err(Defect::Truncated { .. })), "cut to {len}: {found:?}");
    }
}

#[test]
fn misplaced_and_foreign_chunks_are_refused() {
    let header = ChunkHeader::decode(&sample().encode(STORE).unwrap()).unwrap();
    assert_eq!(header.check_location(STORE, 3, 8192), Ok(()));
    assert_eq!(header.check_location(StoreId([0; 16]), 3, 8192), Err(Defect::Foreign));
    for (file, offset) in [(4, 8192), (3, 4096)] {
        assert!(matches!(header.check_location(STORE, file, offset), Err(Defect::Mismatch { .. })));
    }
}

#[test]
fn invalid_fields_with_valid_checksums_are_refused() {
    assert_eq!(decode(&with_rows(|_, _| ())), Ok(sample()));
    type Change = fn(&mut ChunkHeaderRaw, &mut ImageHeaderRaw);
    let rows: [(&str, Change); 17] = [
        ("no images", |header, _| header.image_count = 0),
        ("too many images", |header, _| header.image_count = u32::MAX),
        ("another table length", |header, _| header.table_len += 64),
        ("a chunk in the header block", |header, _| header.offset = 0),
        ("a chunk off its boundary", |header, _| header.offset += 512),
        ("a chunk offset that overflows", |header, _| header.offset = !4095),
        ("another chunk length", |header, _| header.chunk_len += 4096),
        ("a chunk length that overflows", |header, _| header.chunk_len = u64::MAX),
        ("an unknown codec", |_, row| row.codec = 3),
        ("an overlay", |_, row| row.codec = 2),
        ("reserved bytes", |_, row| row.reserved[6] = 1),
        ("an empty page", |_, row| (row.len, row.stored_len) = (0, 0)),
        ("a page length that overflows", |_, row| (row.len, row.stored_len) = (u64::MAX, u64::MAX)),
        ("a raw image of another length", |_, row| row.stored_len = 2),
        ("a raw image with two checksums", |_, row| row.raw_crc ^= 1),
        ("a payload elsewhere", |_, row| row.offset += 16),
        ("a batch of no page", |_, row| row.page = PageId(0)),
    ];
    for (why, change) in rows {
        let found = decode(&with_rows(change));
        assert!(
            matches!(found, Err(Defect::Field { .. } | Defect::Limit { .. } | Defect::Mismatch { .. })),
            "{why}: {found:?}"
        );
    }
}

#[test]
fn payload_is_verified_by_length_and_checksum() {
    let content = [3; 16];
    let new = NewImage { crc: crc32fast::hash(&content), ..new_image(1, 16) };
    let image = Chunk::plan(3, 8192, &[new]).unwrap().images[0].image;
    assert_eq!(image.check_payload(&content), Ok(()));
    assert!(matches!(image.check_payload(&[3; 17]), Err(Defect::Mismatch { found: 17, expected: 16, .. })));
    assert!(matches!(image.check_payload(&[4; 16]), Err(Defect::Checksum { what: "image", .. })));
}

/// Compresses a page in pieces. Returns the reference and the frames.
fn compressed(content: &[u8], piece_len: usize) -> (ImageRef, Vec<u8>) {
    let mut compressor = Compressor::new(1).unwrap();
    let frames: Vec<u8> =
        content.chunks(piece_len).flat_map(|piece| compressor.frame(piece).unwrap()).collect();
    let stored = CompressedBytes { len: frames.len() as u64, crc: crc32fast::hash(&frames) };
    let new = NewImage {
        crc: crc32fast::hash(content),
        compressed: Some(stored),
        ..new_image(1, content.len() as u64)
    };
    (Chunk::plan(3, 8192, &[new]).unwrap().images[0].image, frames)
}

#[test]
#[cfg_attr(miri, ignore = "zstd is C")]
fn compressed_pages_decode_from_any_frame_count() {
    let content: Vec<u8> = (0..300_000u32).flat_map(|word| (word / 7).to_le_bytes()).collect();
    for piece_len in [1 << 10, 70_000, COMPRESSED_PIECE_LEN] {
        let (image, frames) = compressed(&content, piece_len);
        assert!(frames.len() < content.len() / 2);
        assert_eq!(image.codec, Codec::Zstd);
        let len = content.len() as u64;
        assert_eq!(image.decode(frames.as_slice().into(), len).unwrap(), content);
        assert_eq!(image.check_content(&frames, len), Ok(()));
    }
    let refused = Compressor::new(1).unwrap().frame(&vec![0; COMPRESSED_PIECE_LEN + 1]);
    assert!(matches!(refused, Err(Defect::Limit { .. })), "{refused:?}");
}

/// Zeros, which compress best, stay within the ratio that is checked before decompression.
#[test]
#[cfg_attr(miri, ignore = "zstd is C")]
fn highest_compression_stays_within_checked_ratio() {
    let content = vec![0; 64 << 20];
    let (image, frames) = compressed(&content, COMPRESSED_PIECE_LEN);
    assert_eq!(image.check_content(&frames, content.len() as u64), Ok(()));
    let absurd = image.check_content(&frames, PAGE_LEN_MAX);
    assert!(matches!(absurd, Err(Defect::Limit { found: PAGE_LEN_MAX, .. })), "{absurd:?}");
}

#[test]
#[cfg_attr(miri, ignore = "zstd is C")]
fn oversized_window_is_refused_before_allocation() {
    let content = vec![5; 1 << 20];
    let (image, mut frames) = compressed(&content, COMPRESSED_PIECE_LEN);
    // The window follows the descriptor in a frame that is not a single segment. Set the window to 2^41 bytes.
    assert_eq!((frames[4], frames[5] >> 3), (0x80, 9));
    frames[5] = 31 << 3;
    let stored = (frames.len() as u64, crc32fast::hash(&frames));
    let image = ImageRef { stored_len: stored.0, stored_crc: stored.1, ..image };
    let refused = image.decode(frames.into(), content.len() as u64);
    assert!(matches!(refused, Err(Defect::Compression(_))), "{refused:?}");
}

/// The part of an image file that starts with the payload.
struct Payload<'p>(&'p ImageRef, Vec<u8>);

impl ReadAt for Payload<'_> {
    fn list(&self, _: Folder) -> io::Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        Ok((file == FileName::Pages(self.0.file)).then_some(self.0.offset + self.1.len() as u64))
    }

    fn read_at(&self, _: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let from = (offset - self.0.offset) as usize;
        let read = self.1.get(from..from + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(read);
        Ok(())
    }
}

/// Returns images of one page with their payloads: uncompressed, in frames of several lengths, and in one frame that is
/// longer than those of this crate's writer.
fn images_of(content: &[u8]) -> Vec<(&'static str, ImageRef, Vec<u8>)> {
    let new = NewImage { crc: crc32fast::hash(content), ..new_image(1, content.len() as u64) };
    let raw = Chunk::plan(3, 8192, &[new]).unwrap().images[0].image;
    let (short, short_frames) = compressed(content, 70_000);
    let (ours, our_frames) = compressed(content, COMPRESSED_PIECE_LEN);
    let one = zstd::bulk::compress(content, 1).unwrap();
    let stored = CompressedBytes { len: one.len() as u64, crc: crc32fast::hash(&one) };
    let long = Chunk::plan(3, 8192, &[NewImage { compressed: Some(stored), ..new }]).unwrap().images[0].image;
    vec![
        ("raw", raw, content.to_vec()),
        ("short frames", short, short_frames),
        ("frames", ours, our_frames),
        ("one frame", long, one),
    ]
}

#[test]
#[cfg_attr(miri, ignore = "zstd is C")]
fn range_reads_return_proven_bytes_or_an_error() {
    const MIB: usize = 1 << 20;
    let content: Vec<u8> = (0..3 * MIB + 4099).map(|at| (at >> 6 ^ at >> 15) as u8).collect();
    let len = content.len();
    let ranges = [
        0..0,
        0..1,
        0..len,
        MIB - 1..MIB + 1,
        MIB..2 * MIB,
        MIB + 7..2 * MIB + 9,
        3 * MIB..len,
        len - 1..len,
        len..len,
    ];
    for (what, image, payload) in images_of(&content) {
        let mut source = Payload(&image, payload);
        let proven = ProvenImage::prove(&source, &image, len as u64).unwrap();
        let read = |source: &Payload<'_>, range: &Range<usize>| {
            let mut found = vec![0xee; range.len()];
            proven.read(source, range.start as u64, &mut found).map(|()| found)
        };
        for range in &ranges {
            assert!(read(&source, range).unwrap() == content[range.clone()], "{what}, {range:?}");
        }
        // The image was proven before its bytes changed. A read must not return the changed bytes.
        let middle = source.1.len() / 2;
        source.1[middle] ^= 1;
        let refused = read(&source, &(0..len)).unwrap_err();
        assert_eq!((refused.file, refused.offset), (FileName::Pages(3), image.offset), "{what}");
        assert!(matches!(refused.defect, Defect::Checksum { .. } | Defect::Compression(_)), "{refused}");
        if what != "one frame" {
            assert!(read(&source, &(0..MIB)).unwrap() == content[..MIB], "{what}: the first piece is sound");
        }
        ProvenImage::prove(&source, &image, len as u64).unwrap_err();
        source.1.truncate(middle);
        ProvenImage::prove(&source, &image, len as u64).unwrap_err();
    }
}

#[test]
fn invalid_chunk_layouts_are_refused() {
    for (why, found) in [
        ("no images", Chunk::plan(1, 4096, &[])),
        ("an empty page", Chunk::plan(1, 4096, &[new_image(1, 0)])),
        ("a page too long", Chunk::plan(1, 4096, &[new_image(1, PAGE_LEN_MAX + 1)])),
        ("an offset off the boundary", Chunk::plan(1, 4097, &[new_image(1, 1)])),
        ("too long together", Chunk::plan(1, 4096, &[new_image(1, PAGE_LEN_MAX); 2])),
    ] {
        assert!(matches!(found, Err(Defect::Field { .. } | Defect::Limit { .. })), "{why}: {found:?}");
    }
    assert!(Chunk::plan(1, 4096, &[new_image(1, PAGE_LEN_MAX)]).is_ok());
    // An image that is written before its batch is logged need not name its page.
    let ahead = NewImage { page: PageId(0), epoch: Epoch(0), lsn: Lsn(0), len: 1, crc: 0, compressed: None };
    assert!(Chunk::plan(1, 4096, &[ahead]).is_ok());
}
