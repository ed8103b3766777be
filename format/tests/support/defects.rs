//! One file for each kind of defect: a valid file, and the change applied to it.

use crate::annotate::difference;
use crate::samples::{Sound, Structure};

/// A file with one fault, and the defect that reading it must report.
pub struct Damaged {
    pub name: &'static str,
    pub structure: Structure,
    pub bytes: Vec<u8>,
    pub text: String,
    pub defect: &'static str,
}

/// Writes the checksum of the bytes before `crc_at` at `crc_at`.
fn resum(bytes: &mut [u8], from: usize, crc_at: usize) {
    let crc = crc32fast::hash(&bytes[from..crc_at]);
    bytes[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Changes the encoding in an envelope and updates its length and checksum.
fn in_envelope(bytes: &mut Vec<u8>, change: impl FnOnce(&mut Vec<u8>)) {
    let mut content = bytes.split_off(8);
    change(&mut content);
    bytes[..4].copy_from_slice(&(content.len() as u32).to_le_bytes());
    bytes[4..].copy_from_slice(&crc32fast::hash(&content).to_le_bytes());
    bytes.append(&mut content);
}

/// Changes the payload of a frame and updates its lengths and checksums.
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

/// Changes the body of both copies of a manifest and updates their checksums.
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

/// Changes a chunk and updates its checksums.
fn in_chunk(bytes: &mut [u8], change: impl FnOnce(&mut [u8])) {
    let chunk = &mut bytes[4096..];
    change(chunk);
    let table_crc = crc32fast::hash(&chunk[64..192]);
    chunk[56..60].copy_from_slice(&table_crc.to_le_bytes());
    resum(chunk, 0, 60);
}

/// Changes the compressed payload of the second image of a chunk, and updates the checksums of the stored
/// bytes.
fn in_frames(bytes: &mut [u8], change: impl FnOnce(&mut [u8])) {
    in_chunk(bytes, |chunk| {
        let offset = u64::from_le_bytes(chunk[128 + 40..128 + 48].try_into().unwrap()) as usize - 4096;
        let len = u64::from_le_bytes(chunk[128 + 32..128 + 40].try_into().unwrap()) as usize;
        change(&mut chunk[offset..offset + len]);
        let crc = crc32fast::hash(&chunk[offset..offset + len]);
        chunk[128 + 48..128 + 52].copy_from_slice(&crc.to_le_bytes());
    });
}

/// A fault: its name, the valid file, the change, and the text of the defect.
type Fault = (&'static str, &'static str, fn(&mut Vec<u8>), &'static str);

#[rustfmt::skip]
const FAULTS: &[Fault] = &[
    // Envelopes and values.
    ("envelope-cut", "metadata", |b| b.truncate(100), "truncated: 213 bytes needed, 100 bytes available"),
    ("envelope-checksum", "metadata", |b| b[30] ^= 1, "metadata checksum is 0x"),
    ("envelope-limit", "metadata", |b| b[2] = 2, "metadata length is 131277, over the limit of 65536"),
    ("value-kind", "entry", |b| in_envelope(b, |c| c[12] = 9), "metadata cannot be decoded: "),
    ("value-bool", "metadata", |b| in_envelope(b, |c| c[24] = 2), "metadata cannot be decoded: InvalidBooleanValue(2)"),
    ("value-order", "metadata", |b| in_envelope(b, |c| c[16] = b'z'), "metadata cannot be decoded: names are not in ascending order"),
    ("value-text", "entry", |b| in_envelope(b, |c| c[8] = 0xff), "metadata cannot be decoded: Utf8"),
    ("value-count", "metadata", |b| in_envelope(b, |c| c[0] = 7), "metadata cannot be decoded: UnexpectedEnd"),
    ("value-left-over", "entry", |b| in_envelope(b, |c| c.push(0)), "metadata cannot be decoded: 1 bytes follow the encoding"),
    ("value-depth", "entry", |b| in_envelope(b, |c| {
        c.truncate(12);
        for _ in 0..33 { c.extend_from_slice(&[7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]) }
        c.extend_from_slice(&[0; 4]);
    }), "metadata cannot be decoded: value is nested more than 32 levels deep"),
    ("value-name", "entry", |b| in_envelope(b, |c| {
        c.splice(..12, [&256_u64.to_le_bytes()[..], &[b'n'; 256]].concat());
    }), "metadata cannot be decoded: invalid length 256, expected text of at most 255 bytes"),
    // STORE.
    ("store-cut", "store", |b| b.truncate(100), "truncated: 153 bytes needed, 100 bytes available"),
    ("store-longer", "store", |b| b.push(0), "STORE length is 154, expected 153"),
    ("store-magic", "store", |b| b[0] = b'X', "not a STORE file"),
    ("store-checksum", "store", |b| b[24] ^= 1, "STORE header checksum is 0x"),
    ("store-record-checksum", "store", |b| b[64] ^= 1, "STORE record checksum is 0x"),
    ("store-version", "store", |b| { b[8] = 2; resum(b, 0, 60) }, "format version 2 with incompatible features 0x0 is newer"),
    ("store-feature", "store", |b| { b[23] = 0x80; resum(b, 0, 60) }, "format version 1 with incompatible features 0x80000000 is newer"),
    ("store-reserved", "store", |b| { b[48] = 1; resum(b, 0, 60) }, "reserved STORE bytes is 1"),
    ("store-limit", "store", |b| { b[43] = 1; resum(b, 0, 60) }, "STORE record length is 16777305, over the limit of 66617"),
    // Segment headers.
    ("segment-cut", "segment", |b| b.truncate(127), "truncated: 128 bytes needed, 127 bytes available"),
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
    // Frames that are not readable.
    ("frame-cut", "frame-batch", |b| b.truncate(79), "truncated: 80 bytes needed, 79 bytes available"),
    ("frame-payload-cut", "frame-batch", |b| b.truncate(200), "truncated: "),
    ("frame-magic", "frame-batch", |b| b[0] = 0, "not a frame"),
    ("frame-checksum", "frame-batch", |b| b[56] ^= 1, "frame header checksum is 0x"),
    ("frame-kind", "frame-batch", |b| { b[4] = 3; resum(b, 0, 76) }, "frame kind is 3"),
    ("frame-flags", "frame-batch", |b| { b[5] = 2; resum(b, 0, 76) }, "frame flags is 2, over the limit of 1"),
    ("frame-reserved", "frame-batch", |b| { b[6] = 1; resum(b, 0, 76) }, "reserved frame bytes is 1"),
    ("frame-limit", "frame-batch", |b| { b[67] = 0x80; resum(b, 0, 76) }, "payload length is "),
    // Frames that are readable but not valid in the order of the log.
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
    ("seal-reserved", "frame-seal", |b| in_payload(b, |p| p[12] = 2), "unknown flags of a seal's entry is 2"),
    // Payloads with valid checksums.
    ("payload-count", "frame-batch", |b| in_payload(b, |p| p[0] = 13), "truncated: "),
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
    ("op-key", "frame-batch", |b| in_payload(b, |p| p[49] = 65), "truncated: "),
    // Images.
    ("images-cut", "images", |b| b.truncate(4200), "truncated: "),
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
    ("zstd-shorter", "images-zstd", |b| in_chunk(b, |c| c[128 + 24] += 1), "decompressed length of an image is 164, expected 165"),
    ("zstd-longer", "images-zstd", |b| in_chunk(b, |c| c[128 + 24] -= 1), "decompressed length of an image is 164, over the limit of 163"),
    ("zstd-content", "images-zstd", |b| in_frames(b, |p| p[9] = 8), "page checksum is 0x"),
    ("image-offset", "images", |b| in_chunk(b, |c| c[64 + 40] += 16), "image offset is 4304, expected 4288"),
    ("image-stored-length", "images", |b| in_chunk(b, |c| c[64 + 32] = 16), "stored length of a raw image is 16, expected 17"),
    ("image-page", "images", |b| in_chunk(b, |c| c[64] = 0), "page or epoch of an image of a known batch is 0"),
    // Manifests, with the same fault in both copies.
    ("manifest-cut", "manifest-base", |b| b.truncate(300), "truncated: "),
    ("manifest-magic", "manifest-base", |b| { b[0] = 0; b[4096] = 0 }, "not a manifest"),
    ("manifest-checksum", "manifest-base", |b| { b[56] ^= 1; b[4096 + 56] ^= 1 }, "manifest header checksum is 0x"),
    ("manifest-body-checksum", "manifest-base", |b| { b[300] ^= 1; b[4096 + 300] ^= 1 }, "manifest body checksum is 0x"),
    ("manifest-version", "manifest-base", |b| in_copies(b, |c| c[8] = 2), "format version 2 with"),
    ("manifest-kind", "manifest-base", |b| in_copies(b, |c| c[12] = 4), "manifest kind is 4"),
    ("manifest-name", "manifest-change", |b| in_copies(b, |c| c[164] = 65), "snapshot name length is 65, over the limit of 64"),
    ("manifest-previous", "manifest-change", |b| in_copies(b, |c| c[40] = 4), "previous link is 4, over the limit of 3"),
    ("manifest-no-previous", "manifest-change", |b| in_copies(b, |c| c[40] = 0), "previous link of a change is 0"),
    ("manifest-base-previous", "manifest-base", |b| in_copies(b, |c| c[40] = 3), "previous link of a base or table is 3"),
    ("manifest-redo", "manifest-base", |b| in_copies(b, |c| c[72] = 42), "redo lsn is 42, over the limit of 41"),
    ("manifest-next-page", "manifest-base", |b| in_copies(b, |c| c[112] = 6), "page id is 6, over the limit of 5"),
    ("manifest-epoch", "manifest-base", |b| in_copies(b, |c| c[120] = 1), "page's epoch is 2, over the limit of 1"),
    ("manifest-next-file", "manifest-base", |b| in_copies(b, |c| c[128] = 2), "image file is 2, over the limit of 1"),
    ("manifest-ahead-from", "manifest-base", |b| in_copies(b, |c| c[232] = 4), "lowest image file of later batches is 4, over the limit of 3"),
    ("manifest-entries", "manifest-base", |b| in_copies(b, |c| c[143] = 1), "entry count is "),
    ("manifest-body-limit", "manifest-base", |b| in_copies(b, |c| c[159] = 1), "manifest body length is "),
    ("manifest-order", "manifest-base", |b| in_copies(b, |c| c[256] = 7), "page out of order is 6"),
    ("manifest-codec", "manifest-base", |b| in_copies(b, |c| c[256 + 72] = 3), "image codec is 3"),
    ("manifest-overlay-file", "manifest-overlay", |b| in_copies(b, |c| c[256 + 80] = 0), "image file of an overlay's base is 0"),
    ("manifest-overlay-next-file", "manifest-overlay", |b| in_copies(b, |c| c[256 + 80] = 3), "image file is 3, over the limit of 2"),
    ("manifest-overlay-length", "manifest-overlay", |b| in_copies(b, |c| c[256 + 89] = 0), "stored length of an overlay's base is 0"),
    ("manifest-overlay-no-shorter", "manifest-overlay", |b| in_copies(b, |c| c[256 + 49] = 16), "stored length of an overlay is 4291, over the limit of 4095"),
    ("overlay-magic", "overlay", |b| b[0] = 0, "not a header of an overlay"),
    ("overlay-reserved", "overlay", |b| b[63] = 1, "reserved overlay bytes"),
    ("overlay-codec", "overlay", |b| b[52] = 2, "image codec is 2"),
    ("overlay-base-length", "overlay", |b| b[25] = 0, "stored length is 0"),
    ("overlay-base-file", "overlay", |b| b[8] = 0, "image file of an overlay's base is 0"),
    ("overlay-empty", "overlay", |b| b[48] = 0, "number of an overlay's pieces is 0"),
    ("overlay-cut", "overlay", |b| b.truncate(90), "truncated: "),
    ("overlay-order", "overlay", |b| (b[80], b[81]) = (7, 0), "start of an overlay's piece is 7"),
    ("overlay-empty-piece", "overlay", |b| b[72] = 0, "start of an overlay's piece is 5"),
    ("overlay-end", "overlay", |b| b[88] = 97, "end of an overlay's piece is 4097, over the limit of 4096"),
    ("manifest-place", "manifest-base", |b| in_copies(b, |c| c[256 + 73] = 0), "place is 0"),
    ("manifest-lost-image", "manifest-base", |b| in_copies(b, |c| c[256 + 48] = 0), "image field of a page without image is 2"),
];

pub fn damaged_files(sound: &[Sound]) -> Vec<Damaged> {
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
