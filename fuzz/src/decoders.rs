//! Tests the guarantees of every decoder with plain functions of bytes, so that the ordinary tests can run
//! them on golden files and on inputs that once failed, without the fuzzer.
//!
//! All targets check the same guarantees. No input causes a panic, or an allocation or loop that is out of
//! proportion to its length (the fuzzer's limits on memory and time check the latter). Bytes that decode are
//! re-encoded to the same bytes. Each input is tried unchanged, and again with corrected checksums, because
//! mutation would almost never produce valid ones.

use std::collections::BTreeMap;

use remanent_format::frame::{FrameHeaderRaw, FrameKind, UncheckedFrame, decode_seal, encode_seal};
use remanent_format::image::{ChunkHeader, Codec, ImageFileHeader, ImageHeader, ImageRef, Overlay};
use remanent_format::limits::ROOT_LEN_MAX;
use remanent_format::manifest::Manifest;
use remanent_format::op::{Op, PayloadWriter, decode_payload};
use remanent_format::segment::SegmentHeader;
use remanent_format::state::apply::apply;
use remanent_format::state::rebuild::{RebuildOptions, rebuild as rebuild_store};
use remanent_format::state::table::PlanMode;
use remanent_format::store::StoreFile;
use remanent_format::value::{decode_entry, decode_metadata, encode_entry, encode_metadata};
use remanent_format::{LogPoint, Lsn, PageTable};

use crate::archive::Files;
use crate::fit::{fit_header, fit_images, fit_manifest, fit_payload, fit_store};

/// The maximum total length of pages that are built.
const PAGE_BYTES_MAX: u64 = 1 << 16;

/// A target: its name, and the function that processes an input.
pub type Target = (&'static str, fn(&[u8]));

/// All targets by name.
pub const TARGETS: [Target; 8] = [
    ("value", value),
    ("store_file", store_file),
    ("segment_header", segment_header),
    ("frame", frame),
    ("payload", payload),
    ("image", image),
    ("manifest", manifest),
    ("rebuild", rebuild),
];

/// Decodes metadata and entries, in the envelope of the input and in a new envelope.
pub fn value(data: &[u8]) {
    let mut wrapped = (data.len() as u32).to_le_bytes().to_vec();
    wrapped.extend_from_slice(&crc32fast::hash(data).to_le_bytes());
    wrapped.extend_from_slice(data);
    for bytes in [data, &wrapped] {
        if let Ok((metadata, used)) = decode_metadata(bytes, ROOT_LEN_MAX) {
            assert_eq!(encode_metadata(&metadata, ROOT_LEN_MAX).unwrap(), bytes[..used]);
        }
        if let Ok(((name, value), used)) = decode_entry(bytes, ROOT_LEN_MAX) {
            assert_eq!(encode_entry(&name, &value, ROOT_LEN_MAX).unwrap(), bytes[..used]);
        }
    }
}

/// Decodes a STORE file.
pub fn store_file(data: &[u8]) {
    let mut fitted = data.to_vec();
    fit_store(&mut fitted);
    for bytes in [data, &fitted] {
        if let Ok(file) = StoreFile::decode(bytes) {
            assert_eq!(file.encode().unwrap(), bytes);
        }
    }
}

/// Decodes a segment header.
pub fn segment_header(data: &[u8]) {
    let mut fitted = data.to_vec();
    fit_header(&mut fitted, b"RMNTSEGM", 124);
    for bytes in [data, &fitted] {
        if let Ok(header) = SegmentHeader::decode(bytes) {
            assert_eq!(header.encode(), bytes[..128]);
        }
    }
}

/// Decodes a frame, and checks its position in the order of the log and the payload of a seal.
pub fn frame(data: &[u8]) {
    let mut fitted = data.to_vec();
    fit_header(&mut fitted, b"RMFR", 76);
    for bytes in [data, &fitted] {
        let Ok(unchecked) = UncheckedFrame::decode(bytes) else { continue };
        let header = *unchecked.unproven();
        let (encoded, chain) = header.encode();
        assert_eq!(encoded, bytes[..FrameHeaderRaw::LEN]);
        let before = LogPoint {
            incarnation: header.incarnation,
            lsn: if header.kind == FrameKind::Batch {
                Lsn(header.lsn.0.saturating_sub(1))
            } else {
                header.lsn
            },
            segment: header.segment,
            offset: header.offset,
            chain: header.chain_prev,
        };
        if let Ok((_, end)) = unchecked.follow(&before, header.store, header.segment, header.offset) {
            assert_eq!(end.chain, chain);
        }
        if let Ok(seal) = decode_seal(&bytes[FrameHeaderRaw::LEN..]) {
            assert_eq!(encode_seal(&seal), bytes[FrameHeaderRaw::LEN..]);
        }
    }
}

/// Decodes the payload of a batch, plans its operations on an empty store, and applies them.
pub fn payload(data: &[u8]) {
    let mut fitted = data.to_vec();
    fit_payload(&mut fitted);
    for bytes in [data, &fitted] {
        let Ok(ops) = decode_payload(bytes) else { continue };
        let mut writer = PayloadWriter::default();
        ops.iter().for_each(|at| writer.push(&at.op).unwrap());
        assert_eq!(writer.finish(), bytes);

        let mut table = PageTable::new();
        let Ok(changes) = table.plan(Lsn(1), &ops, PlanMode::Commit) else { continue };
        table.install(&changes);
        let mut contents = BTreeMap::new();
        let mut page_bytes = 0_u64;
        for at in &ops {
            if let (Some(page), Op::Create { len, .. } | Op::Resize { len, .. }) = (at.op.page(), &at.op) {
                contents.insert(page, Vec::new());
                page_bytes = page_bytes.saturating_add(*len);
            }
        }
        if page_bytes > PAGE_BYTES_MAX {
            continue;
        }
        for at in &ops {
            if let Some(page) = at.op.page() {
                apply(&at.op, contents.get_mut(&page).expect("the plan knows the page"));
            }
        }
        for info in table.pages() {
            assert_eq!(contents[&info.page].len() as u64, info.len);
        }
    }
}

/// Decodes an overlay, or the headers of an image file and of its first chunk.
pub fn image(data: &[u8]) {
    if let Ok(overlay) = Overlay::decode_head(data) {
        let head = overlay.encode_head().unwrap();
        assert_eq!(head, data[..head.len()]);
    }
    let mut fitted = data.to_vec();
    fit_images(&mut fitted);
    for bytes in [data, &fitted] {
        if let Ok(header) = ImageFileHeader::decode(bytes) {
            assert_eq!(header.encode(), bytes[..64]);
        }
        let at = bytes.get(4096..).unwrap_or_default();
        if let Ok(header) = ChunkHeader::decode(at)
            && let Ok(chunk) = header.decode_table(at)
        {
            let encoded = chunk.encode(header.store).unwrap();
            assert_eq!(encoded, at[..encoded.len()]);
            for image in &chunk.images {
                let payload = bytes.get(image.image.offset as usize..);
                if let Some(stored) = payload.and_then(|rest| rest.get(..image.image.stored_len as usize)) {
                    content(image, stored);
                }
            }
        }
    }
}

/// Decodes the content of an image after correcting the checksums of the stored bytes, so that the
/// decompressor is reached.
fn content(header: &ImageHeader, stored: &[u8]) {
    if header.len > CONTENT_LEN_MAX {
        return;
    }
    let stored_crc = crc32fast::hash(stored);
    let raw_crc = if header.image.codec == Codec::Raw { stored_crc } else { header.image.raw_crc };
    let image = ImageRef { stored_crc, raw_crc, ..header.image };
    let checked = image.check_content(stored, header.len);
    match image.decode(stored.into(), header.len) {
        Ok(bytes) => {
            assert_eq!((bytes.len() as u64, crc32fast::hash(&bytes)), (header.len, raw_crc));
            assert_eq!(checked, Ok(()));
        }
        Err(defect) => assert_eq!(checked, Err(defect)),
    }
}

/// The maximum length of a page whose content is read.
const CONTENT_LEN_MAX: u64 = 1 << 20;

/// Decodes both copies of a manifest.
pub fn manifest(data: &[u8]) {
    let mut fitted = data.to_vec();
    let second = fitted.len() / 2 / 4096 * 4096;
    fit_manifest(&mut fitted[second..]);
    fit_manifest(&mut fitted);
    for bytes in [data, &fitted] {
        let Ok((manifest, health)) = Manifest::decode(bytes) else { continue };
        let encoded = manifest.encode().unwrap();
        assert_eq!(encoded[252..256], health.header_crc.to_le_bytes());
        if health.defects[0].is_none() {
            let body_len = u64::from_le_bytes(bytes[152..160].try_into().unwrap()) as usize;
            assert_eq!(encoded[..256 + body_len], bytes[..256 + body_len]);
        }
    }
}

/// Rebuilds a store from an archive of its files.
pub fn rebuild(data: &[u8]) {
    let mut files = Files::from_archive(data);
    for _ in 0..2 {
        let options = RebuildOptions { page_bytes_max: PAGE_BYTES_MAX, ..RebuildOptions::default() };
        if let Ok(rebuilt) = rebuild_store(&files, &options) {
            let mut bytes = 0;
            for info in rebuilt.table.pages() {
                assert_eq!(rebuilt.contents[&info.page].len() as u64, info.len);
                bytes += info.len;
            }
            assert!(bytes <= PAGE_BYTES_MAX);
            assert_eq!(rebuilt.contents.len(), rebuilt.table.pages().len());
        }
        files.fit();
    }
}
