//! Tests of overlays: the pages that they produce, and invalid input.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::super::codec::{COMPRESSED_PIECE_LEN, Compressor};
use super::super::proven::ProvenImage;
use super::super::read::{check_image, read_image, read_image_into, stream_image};
use super::*;
use crate::ids::PageId;
use crate::names::{FileName, Folder, ReadAt};
use crate::op::{Op, PayloadWriter};
use crate::{Damage, Defect};

const BASE_AT: u64 = 4096 + 128;

/// Image files in memory.
#[derive(Clone, Default)]
struct Files(BTreeMap<FileName, Vec<u8>>);

impl ReadAt for Files {
    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        Ok(self.0.get(&file).map(|bytes| bytes.len() as u64))
    }

    fn list(&self, _: Folder) -> io::Result<Vec<String>> {
        Ok(self.0.keys().map(|file| file.name()).collect())
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.get(&file).ok_or(io::ErrorKind::NotFound)?;
        let part = bytes.get(offset as usize..offset as usize + out.len());
        out.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Files {
    /// Writes a payload to a new file.
    fn write(&mut self, number: u64, payload: &[u8]) -> ImageRef {
        let mut bytes = vec![0xee; BASE_AT as usize];
        bytes.extend_from_slice(payload);
        self.0.insert(FileName::Pages(number), bytes);
        let (stored_len, crc) = (payload.len() as u64, crc32fast::hash(payload));
        ImageRef {
            file: number,
            offset: BASE_AT,
            stored_len,
            stored_crc: crc,
            raw_crc: crc,
            codec: Codec::Raw,
        }
    }

    /// Writes an overlay that turns `base` into `page`.
    fn overlay(&mut self, number: u64, base: ImageRef, page: &[u8], pieces: Vec<Range<u64>>) -> ImageRef {
        let overlay = Overlay::new(base, page.len() as u64, pieces).unwrap();
        let mut payload = overlay.encode_head().unwrap();
        for piece in overlay.pieces() {
            payload.extend_from_slice(&page[piece.start as usize..piece.end as usize]);
        }
        let stored = self.write(number, &payload);
        overlay.reference(&stored, crc32fast::hash(page))
    }
}

fn drawn(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u32).map(|at| ((seed ^ at).wrapping_mul(2_654_435_761) >> 23) as u8).collect()
}

/// Creates an overlay of `pieces` over a raw or compressed base. Returns the files, the reference and the page.
fn sample(len: usize, pieces: &[Range<u64>], is_compressed: bool) -> (Files, ImageRef, Vec<u8>) {
    let mut files = Files::default();
    let old = if is_compressed { vec![9; len] } else { drawn(1, len) };
    let base = match is_compressed {
        false => files.write(1, &old),
        true => {
            let mut compressor = Compressor::new(1).unwrap();
            let frames: Vec<u8> =
                old.chunks(COMPRESSED_PIECE_LEN).flat_map(|piece| compressor.frame(piece).unwrap()).collect();
            ImageRef { raw_crc: crc32fast::hash(&old), codec: Codec::Zstd, ..files.write(1, &frames) }
        }
    };
    let mut page = old;
    for piece in pieces {
        let new = drawn(piece.start as u32 + 5, (piece.end - piece.start) as usize);
        page[piece.start as usize..piece.end as usize].copy_from_slice(&new);
    }
    let image = files.overlay(2, base, &page, pieces.to_vec());
    (files, image, page)
}

/// Reads the image with every available function, and checks that the results agree.
fn read_all(files: &Files, image: &ImageRef, len: u64) -> Result<Vec<u8>, Damage> {
    let read = read_image(files, image, len);
    let mut streamed = Vec::new();
    let all = stream_image(files, image, len, |piece| {
        streamed.extend_from_slice(piece);
        Ok::<_, Damage>(())
    });
    assert_eq!(all.map(|()| streamed), read);
    let mut into = vec![0; len as usize];
    assert_eq!(read_image_into(files, image, &mut into).map(|()| into), read);
    assert_eq!(check_image(files, image, len).err(), read.as_ref().err().cloned());
    let proven = ProvenImage::prove(files, image, len).map(Arc::new);
    assert_eq!(proven.is_ok(), read.is_ok(), "{:?} {:?}", proven.err(), read.err());
    let Ok(proven) = proven else { return read };
    let mut piece = vec![0; len as usize];
    proven.read(files, 0, &mut piece).unwrap();
    assert!(Ok(&piece) == read.as_ref());
    // Prove the image again with a known base.
    let again = ProvenImage::prove_over(files, image, len, Some(&proven.base())).unwrap();
    for at in [0, len / 3, len - 1] {
        let mut part = vec![0; (len - at).min(700) as usize];
        again.read(files, at, &mut part).unwrap();
        assert!(part == piece[at as usize..][..part.len()], "at {at}");
    }
    read
}

/// An overlay over its base produces the page, for random pieces and both codecs of the base.
#[test]
fn overlay_over_base_produces_the_page() {
    let mut state = 1_u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    let mut tried = 0;
    for case in 0..if cfg!(miri) { 3 } else { 60 } {
        // Lengths that are below or close to the length of one read.
        let len = if case % 3 > 0 { 600 + below(5000) } else { (1 << 20) - 3 + below(7) };
        let mut cuts: Vec<u64> = (0..2 + 2 * below(6)).map(|_| below(len.min(6000) + 1)).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let mut pieces: Vec<Range<u64>> = cuts.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect();
        while 64 + pieces.iter().map(|piece| 16 + piece.end - piece.start).sum::<u64>() >= len {
            pieces.pop();
        }
        if pieces.is_empty() {
            continue;
        }
        let (files, image, page) = sample(len as usize, &pieces, case % 2 == 0);
        assert!(read_all(&files, &image, len).unwrap() == page, "{pieces:?} of {len}");
        assert_eq!(image.files().map(|(file, _)| file).collect::<Vec<_>>(), [2, 1]);
        tried += 1;
    }
    assert!(cfg!(miri) || tried > 40, "{tried}");
}

/// A source that records which bytes of the first file are read.
struct ReadRecorder<'f>(&'f Files, RefCell<Vec<Range<u64>>>);

impl ReadAt for ReadRecorder<'_> {
    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        self.0.len(file)
    }

    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        self.0.list(folder)
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if file == FileName::Pages(1) {
            let from = offset - BASE_AT;
            self.1.borrow_mut().push(from..from + out.len() as u64);
        }
        self.0.read_at(file, offset, out)
    }
}

/// An overlay over a known base is proven without reading windows of the base that pieces cover completely or do not
/// touch.
#[test]
fn overlay_reads_known_base_only_near_pieces() {
    const WINDOW: u64 = 64 << 10;
    let len = 40 * WINDOW + 100;
    let pieces =
        [WINDOW..3 * WINDOW, 5 * WINDOW + 7..7 * WINDOW, 20 * WINDOW + 1..20 * WINDOW + 9, 40 * WINDOW..len];
    let (files, image, page) = sample(len as usize, &pieces, false);
    assert!(read_all(&files, &image, len).unwrap() == page);
    let base = ProvenImage::prove(&files, &image, len).map(Arc::new).unwrap().base();
    assert_eq!(base.window_len(), WINDOW);
    let noted = ReadRecorder(&files, RefCell::default());
    let proven = ProvenImage::prove_over(&noted, &image, len, Some(&base)).unwrap();
    assert_eq!(noted.1.take(), [5 * WINDOW..6 * WINDOW, 20 * WINDOW..21 * WINDOW]);
    let mut found = vec![0; 2];
    proven.read(&noted, 30 * WINDOW, &mut found).unwrap();
    let read = noted.1.take();
    assert_eq!((read.len(), read[0].clone()), (1, 30 * WINDOW..31 * WINDOW));
    // The reference has the checksum of another page.
    let wrong = ImageRef { raw_crc: !image.raw_crc, ..image };
    let refused = ProvenImage::prove_over(&files, &wrong, len, Some(&base)).unwrap_err();
    assert!(matches!(refused.defect, Defect::Checksum { what: "page", .. }), "{refused}");
    // The pieces of a compressed base contain 1 MiB of the page each.
    let (files, image, page) = sample(len as usize, &pieces, true);
    assert!(read_all(&files, &image, len).unwrap() == page);
    assert_eq!(ProvenImage::prove(&files, &image, len).unwrap().window_len(), 16 * WINDOW);
}

/// Every flipped bit and every truncation of the overlay or its base is detected.
#[test]
fn every_bit_flip_and_truncation_of_overlay_is_detected() {
    const LEN: u64 = 700;
    let (files, image, page) = sample(LEN as usize, &[3..40, 41..44, 600..700], false);
    assert!(read_all(&files, &image, LEN).unwrap() == page);
    for number in [1, 2] {
        let name = FileName::Pages(number);
        let end = files.0[&name].len();
        for bit in (8 * BASE_AT as usize..8 * end).step_by(crate::CASES_STEP) {
            let mut damaged = files.clone();
            damaged.0.get_mut(&name).unwrap()[bit / 8] ^= 1 << (bit % 8);
            let damage = read_all(&damaged, &image, LEN).unwrap_err();
            assert_eq!((damage.file, damage.offset), (name, BASE_AT), "bit {bit}: {damage}");
        }
        for len in (0..end).step_by(37) {
            let mut cut = files.clone();
            cut.0.get_mut(&name).unwrap().truncate(len);
            let damage = read_all(&cut, &image, LEN).unwrap_err();
            assert!(
                damage.file == name && matches!(damage.defect, Defect::Truncated { .. }),
                "{len}: {damage}"
            );
        }
        let mut gone = files.clone();
        gone.0.remove(&name);
        assert_eq!(read_all(&gone, &image, LEN).unwrap_err().defect, Defect::Missing);
    }
}

/// A manifest entry that contradicts the overlay is rejected.
#[test]
fn overlay_that_contradicts_its_entry_is_rejected() {
    const LEN: u64 = 700;
    let (files, image, _) = sample(LEN as usize, &[3..40, 50..60], false);
    let Codec::Overlay(base) = image.codec else { panic!("{image:?}") };
    for (why, wrong, len) in [
        ("another file", ImageRef { codec: Codec::Overlay(OverlayBase { file: 3, ..base }), ..image }, LEN),
        (
            "another length",
            ImageRef { codec: Codec::Overlay(OverlayBase { stored_len: 9, ..base }), ..image },
            LEN,
        ),
        ("another page", image, LEN + 1),
        ("another sum", ImageRef { raw_crc: 1, ..image }, LEN),
        ("shorter than its header", ImageRef { stored_len: 63, ..image }, LEN),
        ("no overlay", ImageRef { file: 1, stored_len: 600, ..image }, LEN),
    ] {
        assert!(read_all(&files, &wrong, len).is_err(), "{why}");
    }
    // The payload alone is not a page.
    let payload = &files.0[&FileName::Pages(2)][BASE_AT as usize..];
    assert!(image.decode(payload.into(), LEN).is_err() && image.check_content(payload, LEN).is_err());
    assert!(Overlay::new(image, LEN, vec![3..40, 50..60]).is_err(), "an overlay over an overlay");
    // An operation has no field for the base of an overlay.
    let op = Op::Image { page: PageId(1), len: LEN, image };
    assert!(PayloadWriter::default().push(&op).is_err());
}
