//! Content of the golden files: every structure of the format, in each of its forms.

use std::sync::Arc;

use remanent_format::frame::{FrameHeader, FrameKind, VerifiedSnapshot, encode_seal};
use remanent_format::image::{
    Chunk, Codec, CompressedBytes, ImageFileHeader, ImagePurpose, ImageRef, NewImage, Overlay, OverlayBase,
};
use remanent_format::limits::SEGMENT_LEN_MIN;
use remanent_format::manifest::{Manifest, ManifestEntry, ManifestKind, Tombstone};
use remanent_format::op::{Indices, Op, PayloadWriter};
use remanent_format::segment::{Opening, SegmentHeader};
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::value::{encode_entry, encode_metadata};
use remanent_format::{
    Epoch, Incarnation, Key, LogPoint, Lsn, Metadata, PageId, Place, SnapshotId, StoreId, Value, Width,
};

use crate::explain::explain;
use crate::frames;

/// The structure in a golden file, which determines how it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Structure {
    Metadata,
    Entry,
    Store,
    Segment,
    Frame,
    Groups,
    Images,
    Overlay,
    Manifest,
}

/// A valid file.
pub struct Sound {
    pub name: &'static str,
    pub structure: Structure,
    pub bytes: Vec<u8>,
    pub text: String,
}

pub const STORE: StoreId = StoreId(*b"sixteen bytes id");
const INCARNATION: Incarnation = Incarnation { number: 3, random: 0x5eed_1234 };

/// The point that precedes the frames of the golden files.
pub const BEFORE: LogPoint =
    LogPoint { incarnation: INCARNATION, lsn: Lsn(41), segment: 7, offset: 8000, chain: 0x0102_0304 };
/// The segment and offset of these frames.
pub const FRAME_AT: (u64, u64) = (7, 8192);
/// The number of the image file, and the offset of the chunk in it.
pub const CHUNK_AT: (u64, u64) = (2, 4096);

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
    // The store with a fingerprint is a fork.
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

pub fn payload(ops: &[Op<'_>]) -> Vec<u8> {
    let mut writer = PayloadWriter::default();
    ops.iter().for_each(|op| writer.push(op).unwrap());
    writer.finish()
}

/// Encodes a whole frame at its position after [`BEFORE`].
fn frame(kind: FrameKind, payload: &[u8]) -> Vec<u8> {
    frame_after(&BEFORE, FRAME_AT.1, true, kind, payload).0
}

/// Encodes a whole frame at an offset of the same segment. Returns the frame and the point after it.
fn frame_after(
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

/// Encodes two groups: two batches made durable by one sync, then a seal.
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
        let (frame, end) = frame_after(&point, offset, group_start, kind, &payload);
        bytes.extend_from_slice(&frame);
        point = end;
    }
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes
}

fn seal() -> Vec<u8> {
    encode_seal(&[
        VerifiedSnapshot { snapshot: SnapshotId(3), manifest_crc: 0x3333_3333, log_kept: false },
        VerifiedSnapshot { snapshot: SnapshotId(4), manifest_crc: 0x4444_4444, log_kept: false },
    ])
}

pub fn contents() -> [Vec<u8>; 2] {
    [b"seventeen bytes, ".to_vec(), (0..48).collect()]
}

/// Encodes a whole image file of one chunk.
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

/// Returns the contents of two pages. The second page is 64 bytes of 9 and 100 bytes of 0.
pub fn compressed_contents() -> [Vec<u8>; 2] {
    [contents()[0].clone(), frames::runs(&[(9, 64), (0, 100)])]
}

/// Encodes an image file of one chunk with one compressed image.
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
    let compressed = CompressedBytes { len: second.len() as u64, crc: crc32fast::hash(&second) };
    let news = [new(1, &first, None), new(5, &page, Some(compressed))];
    let chunk = Chunk::plan(CHUNK_AT.0, CHUNK_AT.1, &news).unwrap();
    images_of(&chunk, &[first, second])
}

pub fn images_of(chunk: &Chunk, contents: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes =
        ImageFileHeader { store: STORE, file: chunk.file, purpose: ImagePurpose::Snapshot }.encode().to_vec();
    bytes.resize(chunk.offset as usize, 0);
    bytes.extend_from_slice(&chunk.encode(STORE).unwrap());
    bytes.resize((chunk.offset + chunk.len) as usize, 0);
    for (image, content) in chunk.images.iter().zip(contents) {
        bytes[image.image.offset as usize..][..content.len()].copy_from_slice(content);
    }
    bytes
}

/// Encodes an overlay with two pieces over an uncompressed image of a page of 4096 bytes.
fn overlay() -> Vec<u8> {
    let base = ImageRef {
        file: 1,
        offset: 4096 + 128,
        stored_len: 4096,
        stored_crc: 0x1111_1111,
        raw_crc: 0x1111_1111,
        codec: Codec::Raw,
    };
    let mut bytes = Overlay::new(base, 4096, vec![5..8, 4000..4096]).unwrap().encode_head().unwrap();
    bytes.extend_from_slice(b"new");
    bytes.resize(bytes.len() + 96, 7);
    bytes
}

/// Returns a base in which the image of the first page is an overlay.
fn overlaid() -> Manifest {
    let mut manifest = manifest(ManifestKind::Base);
    let entry = &mut manifest.entries[0];
    let base = OverlayBase { file: 1, stored_len: 4096 };
    let payload = overlay();
    let (stored_len, stored_crc) = (payload.len() as u64, crc32fast::hash(&payload));
    (entry.len, entry.place) = (4096, Place::Disk);
    entry.image = entry.image.map(|image| ImageRef {
        stored_len,
        stored_crc,
        raw_crc: 0x2222_2222,
        codec: Codec::Overlay(base),
        ..image
    });
    manifest
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
        metadata: Metadata::from([("dtype".to_owned(), Value::from("bf16"))]).into(),
        image: Some(image),
    };
    let bare = ManifestEntry {
        page: PageId(6),
        key: None,
        len: 0,
        epoch: Epoch(1),
        lsn: Lsn(39),
        place: Place::Host,
        metadata: Default::default(),
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
        ahead_from: 0,
        entries: vec![entry, bare],
        tombstones: vec![Tombstone { page: PageId(4), lsn: Lsn(39) }],
        root: Arc::new([("step".to_owned(), Value::from(11_u64))].into()),
    }
}

const CHANGE: ManifestKind = ManifestKind::Change { previous: SnapshotId(3), previous_crc: 0x3333_3333 };

pub fn sound_files() -> Vec<Sound> {
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
        ("store-features", Store, "STORE with a feature that a build must know", {
            let features = Features { incompatible: 1, ..Features::default() };
            StoreFile { features, ..store(None) }.encode().unwrap()
        }),
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
        (
            "frame-seal-floor",
            Frame,
            "A seal that names two verified snapshots and keeps the log after one",
            {
                let named =
                    |snapshot, log_kept| VerifiedSnapshot { snapshot, manifest_crc: 0x3333_3333, log_kept };
                frame(
                    FrameKind::Seal,
                    &encode_seal(&[named(SnapshotId(3), false), named(SnapshotId(4), true)]),
                )
            },
        ),
        ("groups", Groups, "Two groups: two batches, then a seal", groups()),
        ("images", Images, "An image file of one chunk with two images", images()),
        ("images-zstd", Images, "The same with one image compressed", compressed_images()),
        ("overlay", Overlay, "An overlay of two pieces", overlay()),
        ("manifest-overlay", Manifest, "A base with a page whose image is an overlay", {
            overlaid().encode().unwrap()
        }),
        ("manifest-base", Manifest, "A base", manifest(ManifestKind::Base).encode().unwrap()),
        ("manifest-ahead", Manifest, "A base that says which files were written ahead", {
            let mut ahead = manifest(ManifestKind::Base);
            ahead.ahead_from = 2;
            ahead.encode().unwrap()
        }),
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
