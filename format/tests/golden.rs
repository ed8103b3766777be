//! The bytes of version 1, pinned. `golden/` holds one file for each structure and one for each kind of
//! defect, with a text beside it that explains every byte, or what differs from the sound file.
//!
//! The files are made by this test, and by nothing else:
//!
//! ```text
//! REMANENT_GOLDEN=write cargo test -p remanent-format --test golden
//! ```
//!
//! A change that alters one of the old files is a change of the format: it needs a new version, or a
//! feature bit, and a file of its own.

#[path = "support/annotate.rs"]
mod annotate;
#[path = "support/frames.rs"]
mod frames;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use annotate::{Annotate, difference};
use remanent_format::frame::{
    FrameHeader, FrameHeaderRaw, FrameKind, UncheckedFrame, VerifiedSnapshot, VerifiedSnapshotRaw,
    check_payload, decode_seal, encode_seal,
};
use remanent_format::image::{
    Chunk, ChunkHeader, ChunkHeaderRaw, Codec, Compressed, ImageFileHeader, ImageFileHeaderRaw,
    ImageHeaderRaw, ImagePurpose, ImageRef, NewImage,
};
use remanent_format::limits::{METADATA_LEN_MAX, ROOT_LEN_MAX, SEGMENT_LEN_MIN};
use remanent_format::manifest::{
    Manifest, ManifestEntry, ManifestEntryRaw, ManifestHeaderRaw, ManifestKind, Tombstone, TombstoneRaw,
};
use remanent_format::op::{
    CreateBodyRaw, ImageBodyRaw, Indices, Op, OpHeaderRaw, PayloadHeadRaw, PayloadWriter, RestoreBodyRaw,
    decode_payload,
};
use remanent_format::segment::{Opening, SegmentHeader, SegmentHeaderRaw};
use remanent_format::store::{Features, StoreFile, StoreHeaderRaw, StoreRecord};
use remanent_format::value::{decode_entry, decode_metadata, encode_entry, encode_metadata};
use remanent_format::{
    Defect, Epoch, Incarnation, Key, LogPoint, Lsn, Metadata, PageId, Place, SnapshotId, StoreId, Value,
    Width,
};

/// What a golden file holds, and so how it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Structure {
    Metadata,
    Entry,
    Store,
    Segment,
    Frame,
    Groups,
    Images,
    Manifest,
}

/// A file without a fault.
struct Sound {
    name: &'static str,
    structure: Structure,
    bytes: Vec<u8>,
    text: String,
}

/// A file with one fault, and the defect that reading it must report.
struct Damaged {
    name: &'static str,
    structure: Structure,
    bytes: Vec<u8>,
    text: String,
    defect: &'static str,
}

const STORE: StoreId = StoreId(*b"sixteen bytes id");
const INCARNATION: Incarnation = Incarnation { number: 3, random: 0x5eed_1234 };

/// The point behind which the frames of the golden files lie.
const BEFORE: LogPoint =
    LogPoint { incarnation: INCARNATION, lsn: Lsn(41), segment: 7, offset: 8000, chain: 0x0102_0304 };
/// Where they lie.
const FRAME_AT: (u64, u64) = (7, 8192);
/// The image file, and the chunk's offset in it.
const CHUNK_AT: (u64, u64) = (2, 4096);

fn metadata() -> Metadata {
    let inner = Metadata::from([("a".into(), Value::Null), ("b".into(), Value::from(-3_i64))]);
    Metadata::from([
        ("bool".into(), Value::from(true)),
        ("bytes".into(), Value::from(vec![0_u8, 255])),
        ("f64".into(), Value::from(0.5)),
        ("list".into(), Value::from(vec![Value::from(u64::MAX), Value::from("\u{e9}")])),
        ("map".into(), Value::from(inner)),
        ("nan".into(), Value::F64(f64::from_bits(0x7ff8_0000_dead_beef))),
    ])
}

fn store(layout_fingerprint: Option<[u8; 32]>) -> StoreFile {
    let identity = b"llama-8b, rank 0".to_vec();
    // The one with a fingerprint is a fork.
    let ancestors = layout_fingerprint.map(|_| StoreId([0xa1; 16])).into_iter().collect();
    StoreFile {
        store: STORE,
        features: Features { compatible: 1, ..Features::default() },
        record: StoreRecord { layout_fingerprint, identity, created_unix_ms: 1_700_000_000_123, ancestors },
    }
}

fn segment(opening: bool) -> SegmentHeader {
    let predecessor = LogPoint {
        incarnation: Incarnation { number: 2, random: 0xdead_beef },
        lsn: Lsn(40),
        segment: 6,
        offset: 12288,
        chain: 0x0a0b_0c0d,
    };
    let opening = opening.then_some(Opening {
        incarnation: INCARNATION,
        predecessor,
        accepted: Lsn(41),
        accepted_chain: 0x1111_2222,
    });
    SegmentHeader { store: STORE, segment: 7, segment_len: SEGMENT_LEN_MIN, opening }
}

fn ops() -> Vec<Op<'static>> {
    let page = PageId(5);
    vec![
        Op::Create {
            page,
            len: 64,
            place: Place::Device(1),
            key: Some(Key::new("layer.0").unwrap()),
            metadata: [("dtype".to_owned(), Value::from("bf16"))].into(),
        },
        Op::Write { page, offset: 3, bytes: b"dense" },
        Op::Masked {
            page,
            offset: 8,
            width: Width::W2,
            mask: &[0b0000_0101],
            bytes: &[1, 2, 0, 0, 5, 6, 0, 0],
        },
        Op::Scatter {
            page,
            width: Width::W4,
            base: 16,
            indices: Indices::plain(&[2, 0, 0, 0, 0, 0, 0, 0]),
            values: &[0xa0, 0xa1, 0xa2, 0xa3, 0xb0, 0xb1, 0xb2, 0xb3],
        },
        Op::Fill { page, offset: 32, len: 32, pattern: &[0xee, 0xff] },
        Op::Resize { page, len: 48 },
        Op::Delete { page: PageId(4) },
        Op::SetMetadata { page, name: "step".into(), value: Value::from(12_u64) },
        Op::RemoveMetadata { page, name: "dtype" },
        Op::SetRoot { name: "step".into(), value: Value::from(12_u64) },
        Op::RemoveRoot { name: "warmup" },
        Op::Note { text: "first step" },
    ]
}

fn payload(ops: &[Op<'_>]) -> Vec<u8> {
    let mut writer = PayloadWriter::default();
    ops.iter().for_each(|op| writer.push(op).unwrap());
    writer.finish()
}

/// A frame, whole, as it lies behind [`BEFORE`].
fn frame(kind: FrameKind, payload: &[u8]) -> Vec<u8> {
    frame_behind(&BEFORE, FRAME_AT.1, true, kind, payload).0
}

/// A frame, whole, at an offset of the same segment, and the point behind it.
fn frame_behind(
    before: &LogPoint,
    offset: u64,
    group_start: bool,
    kind: FrameKind,
    payload: &[u8],
) -> (Vec<u8>, LogPoint) {
    let lsn = if kind == FrameKind::Batch { before.lsn.next() } else { before.lsn };
    let header = FrameHeader {
        kind,
        group_start,
        incarnation: INCARNATION,
        store: STORE,
        segment: FRAME_AT.0,
        offset,
        lsn,
        durable: Lsn(40),
        payload_len: payload.len() as u32,
        payload_crc: crc32fast::hash(payload),
        chain_prev: before.chain,
    };
    let (encoded, chain) = header.encode();
    let mut bytes = encoded.to_vec();
    bytes.extend_from_slice(payload);
    bytes.resize(header.frame_len() as usize, 0);
    (bytes, LogPoint { lsn, segment: header.segment, offset: header.end(), chain, ..*before })
}

/// Two groups: two batches that one sync made durable, then a seal.
fn groups() -> Vec<u8> {
    let note = |text| payload(&[Op::Note { text }]);
    let mut bytes = Vec::new();
    let mut point = BEFORE;
    for (group_start, kind, payload) in [
        (true, FrameKind::Batch, note("one")),
        (false, FrameKind::Batch, note("two")),
        (true, FrameKind::Seal, seal()),
    ] {
        if group_start {
            bytes.resize(bytes.len().next_multiple_of(4096), 0);
        }
        let offset = FRAME_AT.1 + bytes.len() as u64;
        let (frame, end) = frame_behind(&point, offset, group_start, kind, &payload);
        bytes.extend_from_slice(&frame);
        point = end;
    }
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes
}

fn seal() -> Vec<u8> {
    encode_seal(&[
        VerifiedSnapshot { snapshot: SnapshotId(3), manifest_crc: 0x3333_3333 },
        VerifiedSnapshot { snapshot: SnapshotId(4), manifest_crc: 0x4444_4444 },
    ])
}

fn contents() -> [Vec<u8>; 2] {
    [b"seventeen bytes, ".to_vec(), (0..48).collect()]
}

/// An image file of one chunk, whole.
fn images() -> Vec<u8> {
    let new = |page, content: &Vec<u8>| NewImage {
        page: PageId(page),
        epoch: Epoch(2),
        lsn: Lsn(40),
        len: content.len() as u64,
        crc: crc32fast::hash(content),
        compressed: None,
    };
    let [first, second] = contents();
    let chunk = Chunk::plan(CHUNK_AT.0, CHUNK_AT.1, &[new(1, &first), new(5, &second)]).unwrap();
    images_of(&chunk, &[first, second])
}

/// The second page is 64 times 9 and 100 times 0.
fn compressed_contents() -> [Vec<u8>; 2] {
    [contents()[0].clone(), frames::runs(&[(9, 64), (0, 100)])]
}

/// An image file of one chunk, with one image compressed.
fn compressed_images() -> Vec<u8> {
    let [first, second] = compressed_contents();
    let page = [vec![9; 64], vec![0; 100]].concat();
    let new = |page, content: &[u8], compressed| NewImage {
        page: PageId(page),
        epoch: Epoch(2),
        lsn: Lsn(40),
        len: content.len() as u64,
        crc: crc32fast::hash(content),
        compressed,
    };
    let compressed = Compressed { len: second.len() as u64, crc: crc32fast::hash(&second) };
    let news = [new(1, &first, None), new(5, &page, Some(compressed))];
    let chunk = Chunk::plan(CHUNK_AT.0, CHUNK_AT.1, &news).unwrap();
    images_of(&chunk, &[first, second])
}

fn images_of(chunk: &Chunk, contents: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes =
        ImageFileHeader { store: STORE, file: chunk.file, purpose: ImagePurpose::Snapshot }.encode().to_vec();
    bytes.resize(chunk.offset as usize, 0);
    bytes.extend_from_slice(&chunk.encode(STORE));
    bytes.resize((chunk.offset + chunk.len) as usize, 0);
    for (image, content) in chunk.images.iter().zip(contents) {
        bytes[image.image.offset as usize..][..content.len()].copy_from_slice(content);
    }
    bytes
}

fn manifest(kind: ManifestKind) -> Manifest {
    let [_, content] = contents();
    let crc = crc32fast::hash(&content);
    let image = ImageRef {
        file: 2,
        offset: 4096 + 224,
        stored_len: content.len() as u64,
        stored_crc: crc,
        raw_crc: crc,
        codec: Codec::Raw,
    };
    let entry = ManifestEntry {
        page: PageId(5),
        key: Some(Key::new("layer.0").unwrap()),
        len: content.len() as u64,
        epoch: Epoch(2),
        lsn: Lsn(40),
        place: Place::Device(1),
        metadata: Arc::new([("dtype".to_owned(), Value::from("bf16"))].into()),
        image: Some(image),
    };
    let bare = ManifestEntry {
        page: PageId(6),
        key: None,
        len: 0,
        epoch: Epoch(1),
        lsn: Lsn(39),
        place: Place::Host,
        metadata: Arc::default(),
        image: None,
    };
    Manifest {
        kind,
        store: STORE,
        snapshot: SnapshotId(4),
        name: (kind == CHANGE).then(|| "epoch 3".to_owned()),
        created_unix_ms: 1_700_000_000_456,
        redo: LogPoint { lsn: Lsn(38), ..BEFORE },
        end: Lsn(41),
        next_page: 7,
        epoch_high: Epoch(9),
        next_file: 3,
        entries: vec![entry, bare],
        tombstones: vec![Tombstone { page: PageId(4), lsn: Lsn(39) }],
        root: Arc::new([("step".to_owned(), Value::from(11_u64))].into()),
    }
}

const CHANGE: ManifestKind = ManifestKind::Change { previous: SnapshotId(3), previous_crc: 0x3333_3333 };

/// The text beside a sound file.
fn explain(structure: Structure, title: &str, bytes: &[u8]) -> String {
    let mut text = Annotate::new(title, bytes);
    match structure {
        Structure::Metadata => text.metadata(),
        Structure::Entry => text.entry(),
        Structure::Store => {
            text.layout(&StoreHeaderRaw::TABLE).head("Record");
            let has_fingerprint = text.peek(1) == 1;
            text.part(1, if has_fingerprint { "a fingerprint follows" } else { "no fingerprint" });
            if has_fingerprint {
                text.part(32, "layout_fingerprint");
            }
            let identity_len = text.peek(8) as usize;
            text.part(8, &format!("identity of {identity_len} bytes")).part(identity_len, "identity");
            let created = format!("created_unix_ms = {}", text.peek(8));
            text.part(8, &created);
            let ancestors = text.peek(8);
            text.part(8, &format!("{ancestors} ancestors"));
            for _ in 0..ancestors {
                text.part(16, "ancestor");
            }
            &mut text
        }
        Structure::Segment => text.layout(&SegmentHeaderRaw::TABLE),
        Structure::Frame => explain_frame(&mut text, bytes),
        Structure::Groups => {
            text.head("First group: its first frame");
            explain_frame(&mut text, bytes).head("The frame that follows it");
            let first = FrameHeaderRaw::from_bytes(bytes[..80].try_into().unwrap());
            let second = FrameHeaderRaw::LEN + first.payload_len as usize;
            explain_frame(&mut text, &bytes[second..]).pad(4096, "up to a multiple of 4096");
            text.head("Second group");
            explain_frame(&mut text, &bytes[4096..]).pad(4096, "up to a multiple of 4096")
        }
        Structure::Images => {
            text.layout(&ImageFileHeaderRaw::TABLE).pad(4096, "rest of the header block");
            text.layout(&ChunkHeaderRaw::TABLE);
            text.layout(&ImageHeaderRaw::TABLE).layout(&ImageHeaderRaw::TABLE).head("Payloads");
            let is_compressed = bytes[4096 + 2 * 64 + 56] == 1;
            for content in if is_compressed { compressed_contents() } else { contents() } {
                text.part(content.len(), "payload").pad(16, "up to a multiple of 16");
            }
            text.pad(4096, "up to a multiple of 4096")
        }
        Structure::Manifest => {
            for copy in ["First copy", "Second copy, the same"] {
                text.head(copy);
                explain_manifest(&mut text);
            }
            &mut text
        }
    }
    .finish()
}

fn explain_frame<'t, 'a>(text: &'t mut Annotate<'a>, bytes: &[u8]) -> &'t mut Annotate<'a> {
    let header = FrameHeaderRaw::from_bytes(bytes[..80].try_into().unwrap());
    text.layout(&FrameHeaderRaw::TABLE);
    if header.kind == 2 {
        for _ in 0..header.payload_len / 16 {
            text.layout(&VerifiedSnapshotRaw::TABLE);
        }
        return text;
    }
    let op_count = PayloadHeadRaw::from_bytes(bytes[80..96].try_into().unwrap()).op_count;
    text.layout(&PayloadHeadRaw::TABLE);
    let mut at = 96;
    for _ in 0..op_count {
        let op = OpHeaderRaw::from_bytes(bytes[at..at + 32].try_into().unwrap());
        text.layout(&OpHeaderRaw::TABLE);
        match op.kind {
            1 => {
                text.layout(&CreateBodyRaw::TABLE);
                let key_len = usize::from(bytes[at + 32 + 1]);
                text.part(key_len, "key").metadata();
            }
            2 => _ = text.part(op.second as usize, "bytes"),
            3 => {
                let mask_len = (op.second as usize / usize::from(op.width)).div_ceil(8);
                text.part(mask_len, "mask").pad(16, "up to a multiple of 16");
                text.part(op.second as usize, "bytes");
            }
            4 => {
                let count = op.second as usize;
                if op.encoding == 0 {
                    text.part(4 * count, "indices");
                } else {
                    let ends = bytes[at + 32..].iter().enumerate().filter(|(_, byte)| **byte < 0x80);
                    let len = ends.map(|(end, _)| end + 1).take(count).last().unwrap_or(0);
                    text.part(len, "gaps between indices");
                }
                text.pad(16, "up to a multiple of 16");
                text.part(op.second as usize * usize::from(op.width), "elements");
            }
            5 => _ = text.part(op.width.into(), "pattern"),
            14 => _ = text.layout(&ImageBodyRaw::TABLE),
            8 | 10 => _ = text.entry(),
            9 | 11 | 12 => _ = text.part(op.body_len as usize, "text"),
            13 => _ = text.layout(&RestoreBodyRaw::TABLE),
            _ => {}
        }
        text.pad(16, "up to a multiple of 16");
        at = (at + 32 + op.body_len as usize).next_multiple_of(16);
    }
    text
}

fn explain_manifest(text: &mut Annotate<'_>) {
    text.layout(&ManifestHeaderRaw::TABLE);
    text.layout(&ManifestEntryRaw::TABLE).part(7, "key").metadata().pad(8, "up to a multiple of 8");
    text.layout(&ManifestEntryRaw::TABLE).metadata().pad(8, "up to a multiple of 8");
    text.layout(&TombstoneRaw::TABLE).metadata().pad(4096, "up to a multiple of 4096");
}

fn sound_files() -> Vec<Sound> {
    use Structure::*;
    let gaps = [Op::Scatter {
        page: PageId(5),
        width: Width::W2,
        base: 16,
        indices: Indices::gaps(&[3, 0, 0xef, 0x03], 3).unwrap(),
        values: &[0xa0, 0xa1, 0xb0, 0xb1, 0xc0, 0xc1],
    }];
    let image = [Op::Image {
        page: PageId(5),
        len: 17,
        image: ImageRef {
            file: 2,
            offset: 4288,
            stored_len: 17,
            stored_crc: 0x5555_5555,
            raw_crc: 0x5555_5555,
            codec: Codec::Raw,
        },
    }];
    let moves = [
        Op::Move { page: PageId(5), place: Place::Device(1) },
        Op::Move { page: PageId(6), place: Place::Pinned },
    ];
    let restore = [Op::Restore { table: 4, table_crc: 0x4444_4444, restored: Lsn(30) }];
    [
        (
            "metadata",
            Metadata,
            "A page's metadata: every kind of value",
            encode_metadata(&metadata(), 4096).unwrap(),
        ),
        ("metadata-empty", Metadata, "No metadata", encode_metadata(&Default::default(), 4096).unwrap()),
        ("entry", Entry, "One entry", encode_entry("step", &Value::from(12_u64), 4096).unwrap()),
        ("store", Store, "STORE with a fingerprint", store(Some([0xf1; 32])).encode().unwrap()),
        ("store-bare", Store, "STORE without a fingerprint", store(None).encode().unwrap()),
        ("segment-opening", Segment, "Header of an opening segment", segment(true).encode().to_vec()),
        ("segment", Segment, "Header of any other segment", segment(false).encode().to_vec()),
        (
            "frame-batch",
            Frame,
            "A batch of operations that name no file",
            frame(FrameKind::Batch, &payload(&ops())),
        ),
        (
            "frame-gaps",
            Frame,
            "A sparse delta with gap-coded indices",
            frame(FrameKind::Batch, &payload(&gaps)),
        ),
        (
            "frame-image",
            Frame,
            "A page whose bytes were written ahead",
            frame(FrameKind::Batch, &payload(&image)),
        ),
        ("frame-move", Frame, "Pages that move", frame(FrameKind::Batch, &payload(&moves))),
        ("frame-restore", Frame, "A restore", frame(FrameKind::Batch, &payload(&restore))),
        ("frame-seal", Frame, "A seal that names two verified snapshots", frame(FrameKind::Seal, &seal())),
        ("groups", Groups, "Two groups: two batches, then a seal", groups()),
        ("images", Images, "An image file of one chunk with two images", images()),
        ("images-zstd", Images, "The same with one image compressed", compressed_images()),
        ("manifest-base", Manifest, "A base", manifest(ManifestKind::Base).encode().unwrap()),
        ("manifest-change", Manifest, "A change", manifest(CHANGE).encode().unwrap()),
        (
            "manifest-table",
            Manifest,
            "The table of an old state",
            manifest(ManifestKind::Table).encode().unwrap(),
        ),
    ]
    .into_iter()
    .map(|(name, structure, title, bytes)| {
        let text = explain(structure, title, &bytes);
        Sound { name, structure, bytes, text }
    })
    .collect()
}

/// Reads a structure as SPEC.md demands it, checksums and place included, and writes it again.
fn read_and_write(structure: Structure, bytes: &[u8]) -> Result<Vec<u8>, Defect> {
    match structure {
        Structure::Metadata => {
            encode_metadata(&decode_metadata(bytes, METADATA_LEN_MAX)?.0, METADATA_LEN_MAX)
        }
        Structure::Entry => {
            let ((name, value), _) = decode_entry(bytes, ROOT_LEN_MAX)?;
            encode_entry(&name, &value, ROOT_LEN_MAX)
        }
        Structure::Store => StoreFile::decode(bytes)?.encode(),
        Structure::Segment => Ok(SegmentHeader::decode(bytes)?.encode().to_vec()),
        Structure::Frame => Ok(read_frame(bytes, &BEFORE, FRAME_AT.1)?.0),
        Structure::Groups => {
            let (mut out, mut point) = (Vec::new(), BEFORE);
            // The next frame lies right behind the last one, or else at the next boundary.
            while out.len() < bytes.len() {
                let frame = read_frame(&bytes[out.len()..], &point, FRAME_AT.1 + out.len() as u64);
                if frame.is_err() && out.len() % 4096 != 0 {
                    out.resize(out.len().next_multiple_of(4096), 0);
                    continue;
                }
                let (frame, end) = frame?;
                out.extend_from_slice(&frame);
                point = end;
            }
            Ok(out)
        }
        Structure::Images => {
            ImageFileHeader::decode(bytes)?;
            let at = bytes.get(4096..).unwrap_or_default();
            let header = ChunkHeader::decode(at)?;
            header.check_place(STORE, CHUNK_AT.0, CHUNK_AT.1)?;
            let chunk = header.decode_table(at)?;
            let content =
                |image: &ImageRef| bytes[image.offset as usize..][..image.stored_len as usize].to_vec();
            let contents: Vec<_> = chunk.images.iter().map(|header| content(&header.image)).collect();
            for (header, content) in chunk.images.iter().zip(&contents) {
                header.image.check_content(content, header.len)?;
            }
            Ok(images_of(&chunk, &contents))
        }
        Structure::Manifest => {
            let (manifest, health) = Manifest::decode(bytes)?;
            assert!(health.is_whole(), "{health:?}");
            manifest.encode()
        }
    }
}

/// Reads the frame behind a point, and writes it again; gives the point behind it.
fn read_frame(bytes: &[u8], before: &LogPoint, offset: u64) -> Result<(Vec<u8>, LogPoint), Defect> {
    let (header, end) = UncheckedFrame::decode(bytes)?.follow(before, STORE, FRAME_AT.0, offset)?;
    let needed = FrameHeaderRaw::LEN + header.payload_len as usize;
    let payload = bytes.get(FrameHeaderRaw::LEN..needed);
    let payload = payload.ok_or(Defect::Truncated { needed: needed as u64, have: bytes.len() as u64 })?;
    check_payload(&header, payload)?;
    let written = match header.kind {
        FrameKind::Seal => encode_seal(&decode_seal(payload)?),
        FrameKind::Batch => {
            let ops: Vec<_> = decode_payload(payload)?.into_iter().map(|at| at.op).collect();
            self::payload(&ops)
        }
    };
    let (header_bytes, chain) = header.encode();
    assert_eq!(chain, end.chain);
    let mut out = header_bytes.to_vec();
    out.extend_from_slice(&written);
    out.resize(header.frame_len() as usize, 0);
    Ok((out, end))
}

/// Puts the checksum of the bytes before it at `crc_at`.
fn resum(bytes: &mut [u8], from: usize, crc_at: usize) {
    let crc = crc32fast::hash(&bytes[from..crc_at]);
    bytes[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Applies a change to an envelope's encoding; length and checksum are made to fit.
fn in_envelope(bytes: &mut Vec<u8>, change: impl FnOnce(&mut Vec<u8>)) {
    let mut content = bytes.split_off(8);
    change(&mut content);
    bytes[..4].copy_from_slice(&(content.len() as u32).to_le_bytes());
    bytes[4..].copy_from_slice(&crc32fast::hash(&content).to_le_bytes());
    bytes.append(&mut content);
}

/// Applies a change to a frame's payload; lengths and checksums are made to fit.
fn in_payload(bytes: &mut Vec<u8>, change: impl FnOnce(&mut Vec<u8>)) {
    let len = u32::from_le_bytes(bytes[64..68].try_into().unwrap()) as usize;
    let mut payload = bytes[80..80 + len].to_vec();
    change(&mut payload);
    bytes.truncate(80);
    bytes[64..68].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes[68..72].copy_from_slice(&crc32fast::hash(&payload).to_le_bytes());
    bytes.append(&mut payload);
    bytes.resize(bytes.len().next_multiple_of(16), 0);
    resum(bytes, 0, 76);
}

/// Applies a change to the body of both copies of a manifest; checksums are made to fit.
fn in_copies(bytes: &mut [u8], change: impl Fn(&mut [u8])) {
    let half = bytes.len() / 2;
    for at in [0, half] {
        let copy = &mut bytes[at..at + half];
        change(copy);
        let body_len = u64::from_le_bytes(copy[152..160].try_into().unwrap()).min(half as u64 - 256) as usize;
        let body_crc = crc32fast::hash(&copy[256..256 + body_len]);
        copy[160..164].copy_from_slice(&body_crc.to_le_bytes());
        resum(copy, 0, 252);
    }
}

/// Applies a change to a chunk; checksums are made to fit.
fn in_chunk(bytes: &mut [u8], change: impl FnOnce(&mut [u8])) {
    let chunk = &mut bytes[4096..];
    change(chunk);
    let table_crc = crc32fast::hash(&chunk[64..192]);
    chunk[56..60].copy_from_slice(&table_crc.to_le_bytes());
    resum(chunk, 0, 60);
}

/// Applies a change to the compressed payload of a chunk, whose image header is the second one; checksums
/// of what is stored are made to fit.
fn in_frames(bytes: &mut [u8], change: impl FnOnce(&mut [u8])) {
    in_chunk(bytes, |chunk| {
        let offset = u64::from_le_bytes(chunk[128 + 40..128 + 48].try_into().unwrap()) as usize - 4096;
        let len = u64::from_le_bytes(chunk[128 + 32..128 + 40].try_into().unwrap()) as usize;
        change(&mut chunk[offset..offset + len]);
        let crc = crc32fast::hash(&chunk[offset..offset + len]);
        chunk[128 + 48..128 + 52].copy_from_slice(&crc.to_le_bytes());
    });
}

/// One fault: name, sound file, what is done to it, and how the defect reads.
type Fault = (&'static str, &'static str, fn(&mut Vec<u8>), &'static str);

#[rustfmt::skip]
const FAULTS: &[Fault] = &[
    // Envelopes and values.
    ("envelope-cut", "metadata", |b| b.truncate(100), "cut short: 213 bytes needed, 100 there"),
    ("envelope-checksum", "metadata", |b| b[30] ^= 1, "metadata checksum is 0x"),
    ("envelope-limit", "metadata", |b| b[2] = 2, "metadata length is 131277, over the limit of 65536"),
    ("value-kind", "entry", |b| in_envelope(b, |c| c[12] = 9), "metadata does not decode: "),
    ("value-bool", "metadata", |b| in_envelope(b, |c| c[24] = 2), "metadata does not decode: InvalidBooleanValue(2)"),
    ("value-order", "metadata", |b| in_envelope(b, |c| c[16] = b'z'), "metadata does not decode: names do not ascend"),
    ("value-text", "entry", |b| in_envelope(b, |c| c[8] = 0xff), "metadata does not decode: Utf8"),
    ("value-count", "metadata", |b| in_envelope(b, |c| c[0] = 7), "metadata does not decode: UnexpectedEnd"),
    ("value-left-over", "entry", |b| in_envelope(b, |c| c.push(0)), "metadata does not decode: 1 bytes are left over"),
    ("value-depth", "entry", |b| in_envelope(b, |c| {
        c.truncate(12);
        for _ in 0..33 { c.extend_from_slice(&[7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]) }
        c.extend_from_slice(&[0; 4]);
    }), "metadata does not decode: a value nests more than 32 deep"),
    ("value-name", "entry", |b| in_envelope(b, |c| {
        c.splice(..12, [&256_u64.to_le_bytes()[..], &[b'n'; 256]].concat());
    }), "metadata does not decode: invalid length 256, expected text of at most 255 bytes"),
    // STORE.
    ("store-cut", "store", |b| b.truncate(100), "cut short: 153 bytes needed, 100 there"),
    ("store-longer", "store", |b| b.push(0), "STORE length is 154, expected 153"),
    ("store-magic", "store", |b| b[0] = b'X', "not a STORE file"),
    ("store-checksum", "store", |b| b[24] ^= 1, "STORE header checksum is 0x"),
    ("store-record-checksum", "store", |b| b[64] ^= 1, "STORE record checksum is 0x"),
    ("store-version", "store", |b| { b[8] = 2; resum(b, 0, 60) }, "format version 2 with incompatible features 0x0 is newer"),
    ("store-feature", "store", |b| { b[20] = 4; resum(b, 0, 60) }, "format version 1 with incompatible features 0x4 is newer"),
    ("store-reserved", "store", |b| { b[48] = 1; resum(b, 0, 60) }, "reserved STORE bytes is 1"),
    ("store-limit", "store", |b| { b[43] = 1; resum(b, 0, 60) }, "STORE record length is 16777305, over the limit of 66617"),
    // Segment headers.
    ("segment-cut", "segment", |b| b.truncate(127), "cut short: 128 bytes needed, 127 there"),
    ("segment-magic", "segment", |b| b[0] = 0, "not a log segment"),
    ("segment-checksum", "segment", |b| b[40] ^= 1, "segment header checksum is 0x"),
    ("segment-version", "segment", |b| { b[8] = 2; resum(b, 0, 124) }, "format version 2 with"),
    ("segment-flags", "segment", |b| { b[12] = 2; resum(b, 0, 124) }, "segment flags is 2, over the limit of 1"),
    ("segment-length", "segment", |b| { b[40] = 1; resum(b, 0, 124) }, "segment length is 16385"),
    ("segment-short", "segment", |b| { b[41] = 0x30; resum(b, 0, 124) }, "segment length is 12288"),
    ("segment-names-incarnation", "segment", |b| { b[48] = 3; resum(b, 0, 124) }, "incarnation is 3"),
    ("segment-names-predecessor", "segment", |b| { b[64] = 3; resum(b, 0, 124) }, "unused segment header bytes is 1"),
    ("segment-opens-nothing", "segment-opening", |b| { b[48] = 0; resum(b, 0, 124) }, "incarnation is 0"),
    ("segment-own-predecessor", "segment-opening", |b| { b[56] = 3; resum(b, 0, 124) }, "predecessor's incarnation is 3"),
    ("segment-accepted", "segment-opening", |b| { b[92] = 39; resum(b, 0, 124) }, "accepted lsn is 39"),
    // Frames: not readable.
    ("frame-cut", "frame-batch", |b| b.truncate(79), "cut short: 80 bytes needed, 79 there"),
    ("frame-payload-cut", "frame-batch", |b| b.truncate(200), "cut short: "),
    ("frame-magic", "frame-batch", |b| b[0] = 0, "not a frame"),
    ("frame-checksum", "frame-batch", |b| b[56] ^= 1, "frame header checksum is 0x"),
    ("frame-kind", "frame-batch", |b| { b[4] = 3; resum(b, 0, 76) }, "frame kind is 3"),
    ("frame-flags", "frame-batch", |b| { b[5] = 2; resum(b, 0, 76) }, "frame flags is 2, over the limit of 1"),
    ("frame-reserved", "frame-batch", |b| { b[6] = 1; resum(b, 0, 76) }, "reserved frame bytes is 1"),
    ("frame-limit", "frame-batch", |b| { b[67] = 0x80; resum(b, 0, 76) }, "payload length is "),
    // Frames: readable, but not valid in the order of the log.
    ("frame-foreign", "frame-batch", |b| { b[16] ^= 1; resum(b, 0, 76) }, "belongs to another store"),
    ("frame-misdirected-segment", "frame-batch", |b| { b[32] = 8; resum(b, 0, 76) }, "frame's segment is 8, expected 7"),
    ("frame-misdirected-offset", "frame-batch", |b| { b[41] = 0x30; resum(b, 0, 76) }, "frame's offset is 12288, expected 8192"),
    ("frame-stale-incarnation", "frame-batch", |b| { b[8] = 2; resum(b, 0, 76) }, "frame's incarnation is 2, expected 3"),
    ("frame-other-attempt", "frame-batch", |b| { b[12] = 0; resum(b, 0, 76) }, "frame's incarnation tag is "),
    ("frame-lsn", "frame-batch", |b| { b[48] = 43; resum(b, 0, 76) }, "frame's lsn is 43, expected 42"),
    ("frame-chain", "frame-batch", |b| { b[72] = 0; resum(b, 0, 76) }, "chain hash is 16909056, expected 16909060"),
    ("frame-durable", "frame-batch", |b| { b[56] = 43; resum(b, 0, 76) }, "durable mark is 43, over the limit of 42"),
    ("frame-payload-checksum", "frame-batch", |b| b[80] ^= 1, "payload checksum is 0x"),
    ("seal-length", "frame-seal", |b| in_payload(b, |p| p.truncate(24)), "seal length is 24"),
    ("seal-reserved", "frame-seal", |b| in_payload(b, |p| p[12] = 1), "reserved seal bytes is 1"),
    // Payloads, under sound checksums.
    ("payload-count", "frame-batch", |b| in_payload(b, |p| p[0] = 13), "cut short: "),
    ("payload-count-endless", "frame-batch", |b| in_payload(b, |p| p[3] = 1), "operation count is "),
    ("payload-left-over", "frame-batch", |b| in_payload(b, |p| p.extend_from_slice(&[0; 16])), "bytes after the last operation is 16"),
    ("payload-reserved", "frame-batch", |b| in_payload(b, |p| p[4] = 1), "reserved payload bytes is 1"),
    ("op-kind", "frame-restore", |b| in_payload(b, |p| p[16] = 16), "operation kind is 16"),
    ("op-encoding", "frame-restore", |b| in_payload(b, |p| p[19] = 1), "operation encoding is 1"),
    ("op-indices-encoding", "frame-gaps", |b| in_payload(b, |p| p[19] = 2), "operation encoding is 2"),
    ("op-gap-overlong", "frame-gaps", |b| in_payload(b, |p| p[51] = 0), "last byte of an index gap is 0"),
    ("op-gap-endless", "frame-gaps", |b| in_payload(b, |p| p[48..54].fill(0x80)), "length of an index gap is 6, over the limit of 5"),
    ("op-gap-index", "frame-gaps", |b| in_payload(b, |p| p[48..53].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0x0f])), "element index is 4294967296, over the limit of 4294967295"),
    ("op-gap-padding", "frame-gaps", |b| in_payload(b, |p| p[52] = 1), "index padding is 1"),
    ("op-gap-count", "frame-gaps", |b| in_payload(b, |p| p[40] = 4), "scatter body length is 22, expected 24"),
    ("op-image-file", "frame-image", |b| in_payload(b, |p| p[48] = 0), "image file is 0"),
    ("op-image-length", "frame-image", |b| in_payload(b, |p| p[32] = 16), "stored length of a raw image is 17, expected 16"),
    ("op-image-offset", "frame-image", |b| in_payload(b, |p| p[57] = 0), "image offset is 192"),
    ("op-image-codec", "frame-image", |b| in_payload(b, |p| p[80] = 9), "image codec is 9"),
    ("op-image-reserved", "frame-image", |b| in_payload(b, |p| p[81] = 1), "reserved image bytes is 1"),
    ("op-image-page", "frame-image", |b| in_payload(b, |p| p[24] = 0), "operation's page is 0"),
    ("op-move-place", "frame-move", |b| in_payload(b, |p| p[32] = 6), "place is 6"),
    ("op-move-kind", "frame-move", |b| in_payload(b, |p| p[33] = 1), "place is 257"),
    ("op-move-device", "frame-move", |b| in_payload(b, |p| p[40] = 64), "device ordinal is 64, over the limit of 63"),
    ("op-move-ordinal", "frame-move", |b| in_payload(b, |p| p[72] = 1), "place is 2"),
    ("op-move-page", "frame-move", |b| in_payload(b, |p| p[24] = 0), "operation's page is 0"),
    ("op-move-body", "frame-move", |b| in_payload(b, |p| { p[52] = 16; p.extend_from_slice(&[0; 16]) }), "operation body length is 16"),
    ("op-width", "frame-restore", |b| in_payload(b, |p| p[18] = 1), "element width is 1"),
    ("op-argument", "frame-restore", |b| in_payload(b, |p| p[40] = 1), "unused operation argument is 1"),
    ("op-page", "frame-restore", |b| in_payload(b, |p| p[24] = 1), "operation's page is 1"),
    ("op-no-page", "frame-batch", |b| in_payload(b, |p| p[24] = 0), "operation's page is 0"),
    ("op-place", "frame-batch", |b| in_payload(b, |p| p[48] = 6), "place is 6"),
    ("op-device", "frame-batch", |b| in_payload(b, |p| p[52] = 64), "device ordinal is 64, over the limit of 63"),
    ("frame-number", "frame-batch", |b| { b[55] = 0x80; resum(b, 0, 76) }, "frame's lsn is 9223372036854775850, over the limit of 4611686018427387904"),
    ("op-key", "frame-batch", |b| in_payload(b, |p| p[49] = 65), "cut short: "),
    // Images.
    ("images-cut", "images", |b| b.truncate(4200), "cut short: "),
    ("images-magic", "images", |b| b[0] = 0, "not a file of images"),
    ("images-checksum", "images", |b| b[32] ^= 1, "image file header checksum is 0x"),
    ("images-purpose", "images", |b| { b[12] = 3; resum(b, 0, 60) }, "purpose of an image file is 3"),
    ("images-version", "images", |b| { b[8] = 2; resum(b, 0, 60) }, "format version 2 with"),
    ("chunk-magic", "images", |b| b[4096] = 0, "not a chunk of images"),
    ("chunk-checksum", "images", |b| b[4096 + 40] ^= 1, "chunk header checksum is 0x"),
    ("chunk-table-checksum", "images", |b| b[4096 + 64] ^= 1, "image table checksum is 0x"),
    ("chunk-foreign", "images", |b| in_chunk(b, |c| c[8] ^= 1), "belongs to another store"),
    ("chunk-misdirected", "images", |b| in_chunk(b, |c| c[33] = 0x20), "chunk's offset is 8192, expected 4096"),
    ("chunk-other-file", "images", |b| in_chunk(b, |c| c[24] = 3), "chunk's file is 3, expected 2"),
    ("chunk-limit", "images", |b| in_chunk(b, |c| c[43] = 1), "image count is 16777218, over the limit of 65536"),
    ("chunk-empty", "images", |b| in_chunk(b, |c| c[40] = 0), "image count is 0"),
    ("chunk-table-length", "images", |b| in_chunk(b, |c| c[44] = 64), "table length is 64, expected 128"),
    ("chunk-length", "images", |b| in_chunk(b, |c| c[49] = 0x20), "chunk length is 8192, expected 4096"),
    ("image-codec", "images", |b| in_chunk(b, |c| c[64 + 56] = 2), "image codec is 2"),
    ("image-payload", "images", |b| { let at = b.len() - 4096 + 192; b[at] ^= 1 }, "image checksum is 0x"),
    ("image-no-shorter", "images", |b| in_chunk(b, |c| c[64 + 56] = 1), "stored length of a compressed image is 17, over the limit of 16"),
    ("image-expansion", "images-zstd", |b| in_chunk(b, |c| c[128 + 26] = 9), "length of a compressed image is 589988, over the limit of 458752"),
    ("zstd-payload", "images-zstd", |b| { let at = b.len() - 4096 + 224 + 4; b[at] ^= 1 }, "image checksum is 0x"),
    ("zstd-magic", "images-zstd", |b| in_frames(b, |p| p[0] = 0), "zstd: "),
    ("zstd-cut", "images-zstd", |b| in_frames(b, |p| p[10] &= !1), "zstd: "),
    ("zstd-shorter", "images-zstd", |b| in_chunk(b, |c| c[128 + 24] += 1), "length of what a compressed image gives is 164, expected 165"),
    ("zstd-longer", "images-zstd", |b| in_chunk(b, |c| c[128 + 24] -= 1), "length of what a compressed image gives is 164, over the limit of 163"),
    ("zstd-content", "images-zstd", |b| in_frames(b, |p| p[9] = 8), "page checksum is 0x"),
    ("image-offset", "images", |b| in_chunk(b, |c| c[64 + 40] += 16), "image offset is 4304, expected 4288"),
    ("image-stored-length", "images", |b| in_chunk(b, |c| c[64 + 32] = 16), "stored length of a raw image is 16, expected 17"),
    ("image-page", "images", |b| in_chunk(b, |c| c[64] = 0), "page or epoch of an image of a known batch is 0"),
    // Manifests: the same fault in both copies.
    ("manifest-cut", "manifest-base", |b| b.truncate(300), "cut short: "),
    ("manifest-magic", "manifest-base", |b| { b[0] = 0; b[4096] = 0 }, "not a manifest"),
    ("manifest-checksum", "manifest-base", |b| { b[56] ^= 1; b[4096 + 56] ^= 1 }, "manifest header checksum is 0x"),
    ("manifest-body-checksum", "manifest-base", |b| { b[300] ^= 1; b[4096 + 300] ^= 1 }, "manifest body checksum is 0x"),
    ("manifest-version", "manifest-base", |b| in_copies(b, |c| c[8] = 2), "format version 2 with"),
    ("manifest-kind", "manifest-base", |b| in_copies(b, |c| c[12] = 4), "manifest kind is 4"),
    ("manifest-name", "manifest-change", |b| in_copies(b, |c| c[164] = 65), "snapshot name length is 65, over the limit of 64"),
    ("manifest-previous", "manifest-change", |b| in_copies(b, |c| c[40] = 4), "previous link is 4, over the limit of 3"),
    ("manifest-no-previous", "manifest-change", |b| in_copies(b, |c| c[40] = 0), "previous link of a change is 0"),
    ("manifest-base-previous", "manifest-base", |b| in_copies(b, |c| c[40] = 3), "previous link of a manifest that follows none is 3"),
    ("manifest-redo", "manifest-base", |b| in_copies(b, |c| c[72] = 42), "redo lsn is 42, over the limit of 41"),
    ("manifest-next-page", "manifest-base", |b| in_copies(b, |c| c[112] = 6), "page id is 6, over the limit of 5"),
    ("manifest-epoch", "manifest-base", |b| in_copies(b, |c| c[120] = 1), "page's epoch is 2, over the limit of 1"),
    ("manifest-next-file", "manifest-base", |b| in_copies(b, |c| c[128] = 2), "image file is 2, over the limit of 1"),
    ("manifest-entries", "manifest-base", |b| in_copies(b, |c| c[143] = 1), "entry count is "),
    ("manifest-body-limit", "manifest-base", |b| in_copies(b, |c| c[159] = 1), "manifest body length is "),
    ("manifest-order", "manifest-base", |b| in_copies(b, |c| c[256] = 7), "page that does not ascend is 6"),
    ("manifest-codec", "manifest-base", |b| in_copies(b, |c| c[256 + 72] = 2), "image codec is 2"),
    ("manifest-place", "manifest-base", |b| in_copies(b, |c| c[256 + 73] = 0), "place is 0"),
    ("manifest-lost-image", "manifest-base", |b| in_copies(b, |c| c[256 + 48] = 0), "image field of a page without image is 2"),
];

fn damaged_files(sound: &[Sound]) -> Vec<Damaged> {
    let damage = |&(name, sound_name, change, defect): &Fault| {
        let base = sound.iter().find(|file| file.name == sound_name).expect("a sound file of that name");
        let mut bytes = base.bytes.clone();
        change(&mut bytes);
        let title = format!("sound/{sound_name}.bin, damaged.\nReading it reports: {defect}");
        let text = difference(&title, &base.bytes, &bytes);
        Damaged { name, structure: base.structure, bytes, text, defect }
    };
    FAULTS.iter().map(damage).collect()
}

fn folder(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(kind)
}

/// All golden files as the code makes them; on request, the disk gets them first.
fn files() -> &'static (Vec<Sound>, Vec<Damaged>) {
    static FILES: OnceLock<(Vec<Sound>, Vec<Damaged>)> = OnceLock::new();
    FILES.get_or_init(|| {
        let sound = sound_files();
        let damaged = damaged_files(&sound);
        if std::env::var_os("REMANENT_GOLDEN").is_some_and(|value| value == "write") {
            for kind in ["sound", "damaged"] {
                // There is nothing to remove the first time.
                _ = std::fs::remove_dir_all(folder(kind));
                std::fs::create_dir_all(folder(kind)).unwrap();
            }
            sound.iter().for_each(|file| write("sound", file.name, &file.bytes, &file.text));
            damaged.iter().for_each(|file| write("damaged", file.name, &file.bytes, &file.text));
        }
        (sound, damaged)
    })
}

fn write(kind: &str, name: &str, bytes: &[u8], text: &str) {
    std::fs::write(folder(kind).join(format!("{name}.bin")), bytes).unwrap();
    std::fs::write(folder(kind).join(format!("{name}.txt")), text).unwrap();
}

/// The file on disk, which must be what the code makes, as must its text.
fn read(kind: &str, name: &str, bytes: &[u8], text: &str) -> Vec<u8> {
    let on_disk = std::fs::read(folder(kind).join(format!("{name}.bin"))).unwrap();
    assert!(on_disk == bytes, "{kind}/{name}.bin is not what the encoder makes");
    let text_on_disk = std::fs::read_to_string(folder(kind).join(format!("{name}.txt"))).unwrap();
    assert_eq!(text_on_disk, text, "{kind}/{name}.txt");
    on_disk
}

#[test]
fn sound_files_read_and_write_to_the_same_bytes() {
    for file in &files().0 {
        let on_disk = read("sound", file.name, &file.bytes, &file.text);
        let written = read_and_write(file.structure, &on_disk);
        assert!(written.as_ref() == Ok(&on_disk), "{}: {:?}", file.name, written.err());
    }
}

#[test]
fn every_defect_is_named() {
    let mut wrong = Vec::new();
    for file in &files().1 {
        let on_disk = read("damaged", file.name, &file.bytes, &file.text);
        let found = match read_and_write(file.structure, &on_disk) {
            Ok(_) => "no defect".to_owned(),
            Err(defect) => defect.to_string(),
        };
        if !found.starts_with(file.defect) {
            wrong.push(format!("{}: {found:?}, expected {:?}", file.name, file.defect));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn nothing_else_lies_among_the_golden_files() {
    let (sound, damaged) = files();
    let names = [
        ("sound", sound.iter().map(|file| file.name).collect::<Vec<_>>()),
        ("damaged", damaged.iter().map(|file| file.name).collect()),
    ];
    for (kind, names) in names {
        let entries = std::fs::read_dir(folder(kind)).unwrap();
        let found: BTreeSet<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let expected: BTreeSet<_> =
            names.iter().flat_map(|name| [format!("{name}.bin"), format!("{name}.txt")]).collect();
        assert_eq!(found, expected);
        assert_eq!(expected.len(), 2 * names.len(), "two files of one name");
    }
}
