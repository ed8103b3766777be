//! What every fuzz target holds, as plain functions of bytes: so that the ordinary tests can run them on
//! golden files and on inputs that once failed, without the fuzzer.
//!
//! All targets hold the same promises: no panic, no allocation or loop beyond what the input's length
//! justifies (the fuzzer's limits on memory and time see to that), and what decodes encodes to the same
//! bytes. Each input is tried as it is, and once more with its checksums made to fit, or mutation would
//! never get behind them.

use std::collections::BTreeMap;
use std::io;

use remanent_format::apply::apply;
use remanent_format::frame::{FrameHeaderRaw, FrameKind, UncheckedFrame, decode_seal, encode_seal};
use remanent_format::image::{ChunkHeader, Codec, ImageFileHeader, ImageHeader, ImageRef};
use remanent_format::limits::ROOT_LEN_MAX;
use remanent_format::manifest::Manifest;
use remanent_format::op::{Op, PayloadWriter, decode_payload};
use remanent_format::rebuild::{RebuildOptions, rebuild as rebuild_store};
use remanent_format::segment::SegmentHeader;
use remanent_format::store::StoreFile;
use remanent_format::table::PlanMode;
use remanent_format::value::{decode_entry, decode_metadata, encode_entry, encode_metadata};
use remanent_format::{FileName, Folder, LogPoint, Lsn, PageTable, ReadAt};

/// Pages longer than this together are not built.
const PAGE_BYTES_MAX: u64 = 1 << 16;

/// A target: its name, and what it does with an input.
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

/// Metadata and entries, in the input's envelope and in one of their own.
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

/// STORE.
pub fn store_file(data: &[u8]) {
    let mut fitted = data.to_vec();
    fit_store(&mut fitted);
    for bytes in [data, &fitted] {
        if let Ok(file) = StoreFile::decode(bytes) {
            assert_eq!(file.encode().unwrap(), bytes);
        }
    }
}

/// The header of a segment.
pub fn segment_header(data: &[u8]) {
    let mut fitted = data.to_vec();
    fit_header(&mut fitted, b"RMNTSEGM", 124);
    for bytes in [data, &fitted] {
        if let Ok(header) = SegmentHeader::decode(bytes) {
            assert_eq!(header.encode(), bytes[..128]);
        }
    }
}

/// A frame: its header, its place in the order, and a seal's payload.
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

/// A batch's payload: its operations, what they change in an empty store, and the bytes that they leave.
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

/// The header of an image file, and of the chunk behind it.
pub fn image(data: &[u8]) {
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
            let encoded = chunk.encode(header.store);
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

/// What an image gives, with the checksum as it is stored made to fit, so that the decompressor is reached.
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

/// Bytes that a page may have for its content to be looked at.
const CONTENT_LEN_MAX: u64 = 1 << 20;

/// A manifest, both copies.
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

/// A whole store, from an archive of its files.
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

/// The files of a store, in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files(pub BTreeMap<FileName, Vec<u8>>);

/// Bytes that a file of an archive may be long. Files of stores are mostly zeros, so an archive of a few
/// hundred bytes can stand for a whole store.
const FILE_LEN_MAX: usize = 1 << 18;
/// Bytes that all its files may be long together.
const FILES_LEN_MAX: usize = 1 << 21;

const FILE_STORE: u8 = 0;
const FILE_SEGMENT: u8 = 1;
const FILE_PAGES: u8 = 2;
const FILE_TABLE: u8 = 3;
const FILE_MANIFEST: u8 = 4;
const PIECE: u8 = 5;

impl Files {
    /// Reads an archive: records of 6 bytes, which are a kind in 1, a number in 1, and *a* and *b* in 2
    /// bytes each. A file is named by kind and number, 4096 *a* + *b* bytes long, and zero. A piece is *b*
    /// bytes, which follow it, for offset 16 *a* of the file before it. What does not fit is left out, so
    /// every input is an archive.
    pub fn from_archive(mut data: &[u8]) -> Self {
        let mut files = BTreeMap::new();
        let mut current = FileName::Store;
        let mut bytes_left = FILES_LEN_MAX;
        while let Some((record, rest)) = data.split_first_chunk::<6>() {
            data = rest;
            let number = u64::from(record[1]);
            let a = usize::from(u16::from_le_bytes([record[2], record[3]]));
            let b = usize::from(u16::from_le_bytes([record[4], record[5]]));
            if record[0] >= PIECE {
                let (piece, rest) = data.split_at(b.min(data.len()));
                data = rest;
                if let Some(file) =
                    files.get_mut(&current).and_then(|file: &mut Vec<u8>| file.get_mut(16 * a..))
                {
                    let len = piece.len().min(file.len());
                    file[..len].copy_from_slice(&piece[..len]);
                }
                continue;
            }
            current = match record[0] {
                FILE_STORE => FileName::Store,
                FILE_SEGMENT => FileName::Segment(number),
                FILE_PAGES => FileName::Pages(number),
                FILE_TABLE => FileName::Table(number),
                _ => FileName::Manifest(number),
            };
            let len = (4096 * a + b).min(FILE_LEN_MAX).min(bytes_left);
            bytes_left -= len;
            files.insert(current, vec![0; len]);
        }
        Self(files)
    }

    /// Writes an archive, for seeds. Numbers must fit a byte, and files [`FILE_LEN_MAX`].
    pub fn to_archive(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut record = |kind: u8, number: u64, a: usize, b: usize, piece: &[u8]| {
            out.extend_from_slice(&[kind, u8::try_from(number).expect("a small number")]);
            out.extend_from_slice(&u16::try_from(a).expect("a short file").to_le_bytes());
            out.extend_from_slice(&u16::try_from(b).expect("a short piece").to_le_bytes());
            out.extend_from_slice(piece);
        };
        for (name, bytes) in &self.0 {
            let (kind, number) = match *name {
                FileName::Store => (FILE_STORE, 0),
                FileName::Segment(number) => (FILE_SEGMENT, number),
                FileName::Pages(number) => (FILE_PAGES, number),
                FileName::Table(number) => (FILE_TABLE, number),
                FileName::Manifest(number) => (FILE_MANIFEST, number),
                FileName::Lock | FileName::Readers | FileName::Spare(_) | FileName::Temporary(..) => continue,
            };
            record(kind, number, bytes.len() / 4096, bytes.len() % 4096, &[]);
            let is_zero = |line: &[u8]| line.iter().all(|&byte| byte == 0);
            let mut at = 0;
            while at < bytes.len() {
                // A piece ends before four lines of zeros, or where its length would not fit.
                let lines = bytes[at..].chunks(16);
                let zeros = lines.clone().take_while(|line| is_zero(line)).count();
                if zeros > 0 {
                    at += 16 * zeros;
                    continue;
                }
                let count = (0..lines.len().min(4000))
                    .find(|&index| lines.clone().skip(index).take(4).all(is_zero))
                    .unwrap_or(lines.len().min(4000));
                let end = bytes.len().min(at + 16 * count);
                record(PIECE, 0, at / 16, end - at, &bytes[at..end]);
                at = end.next_multiple_of(16);
            }
        }
        out
    }

    /// Makes the checksums of all files fit.
    fn fit(&mut self) {
        // The chain goes from segment to segment.
        let mut chain = 0;
        for (name, bytes) in &mut self.0 {
            match name {
                FileName::Store => fit_store(bytes),
                FileName::Segment(_) => fit_segment(bytes, &mut chain),
                FileName::Pages(_) => fit_images(bytes),
                FileName::Table(_) | FileName::Manifest(_) => {
                    let second = bytes.len() / 2 / 4096 * 4096;
                    fit_manifest(&mut bytes[second..]);
                    fit_manifest(bytes);
                }
                FileName::Lock | FileName::Readers | FileName::Spare(_) | FileName::Temporary(..) => {}
            }
        }
    }
}

impl ReadAt for Files {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        Ok(self.0.keys().filter(|name| name.folder() == folder).map(|name| name.name()).collect())
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        Ok(self.0.get(&file).map(|bytes| bytes.len() as u64))
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.get(&file).ok_or(io::ErrorKind::NotFound)?;
        let range = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)?.get(..out.len()));
        out.copy_from_slice(range.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

fn get_u32(bytes: &[u8], at: usize) -> Option<usize> {
    let raw = bytes.get(at..)?.first_chunk()?;
    usize::try_from(u32::from_le_bytes(*raw)).ok()
}

fn put_crc(bytes: &mut [u8], at: usize, crc: u32) {
    if let Some(field) = bytes.get_mut(at..at + 4) {
        field.copy_from_slice(&crc.to_le_bytes());
    }
}

/// Puts a header's magic in front, and its checksum at `crc_at`.
fn fit_header(bytes: &mut [u8], magic: &[u8], crc_at: usize) {
    if bytes.len() >= crc_at + 4 {
        bytes[..magic.len()].copy_from_slice(magic);
        let crc = crc32fast::hash(&bytes[..crc_at]);
        put_crc(bytes, crc_at, crc);
    }
}

fn fit_store(bytes: &mut [u8]) {
    let Some(record) = bytes.get(64..) else { return };
    let (len, crc) = (record.len() as u32, crc32fast::hash(record));
    put_crc(bytes, 40, len);
    put_crc(bytes, 44, crc);
    fit_header(bytes, b"RMNTSTOR", 60);
}

/// Fits the envelope at `at`, if it is whole.
fn fit_envelope(bytes: &mut [u8], at: usize) {
    let content = get_u32(bytes, at).and_then(|len| bytes.get(at + 8..)?.get(..len));
    if let Some(crc) = content.map(crc32fast::hash) {
        put_crc(bytes, at + 4, crc);
    }
}

/// Fits the envelopes in a payload.
fn fit_payload(bytes: &mut [u8]) {
    let mut at = 16;
    while let Some(&[kind, 0, ..]) = bytes.get(at..).and_then(|rest| rest.first_chunk::<32>()) {
        let Some(body_len) = get_u32(bytes, at + 4) else { return };
        match kind {
            1 => {
                let key_len = bytes.get(at + 33).copied().unwrap_or_default();
                fit_envelope(bytes, at + 48 + usize::from(key_len));
            }
            8 | 10 => fit_envelope(bytes, at + 32),
            _ => {}
        }
        at = at.saturating_add(32).saturating_add(body_len).next_multiple_of(16);
    }
}

/// Fits the header of a segment and all its frames.
fn fit_segment(bytes: &mut [u8], chain: &mut u32) {
    fit_header(bytes, b"RMNTSEGM", 124);
    // An opening segment starts from its predecessor's chain hash.
    if bytes.get(12) == Some(&1) {
        *chain = get_u32(bytes, 88).unwrap_or_default() as u32;
    }
    let mut at = 4096;
    while at + FrameHeaderRaw::LEN <= bytes.len() {
        if bytes[at..at + 4] != *b"RMFR" {
            at = (at + 1).next_multiple_of(4096);
            continue;
        }
        let payload_at = at + FrameHeaderRaw::LEN;
        let payload_len = get_u32(bytes, at + 64).unwrap_or_default().min(bytes.len() - payload_at);
        let payload = &mut bytes[payload_at..payload_at + payload_len];
        fit_payload(payload);
        let payload_crc = crc32fast::hash(payload);
        put_crc(bytes, at + 68, payload_crc);
        put_crc(bytes, at + 72, *chain);
        *chain = crc32fast::hash(&bytes[at..at + 76]);
        put_crc(bytes, at + 76, *chain);
        at = (payload_at + payload_len).next_multiple_of(16);
    }
}

/// Fits the header of an image file, and its first chunk.
fn fit_images(bytes: &mut [u8]) {
    fit_header(bytes, b"RMNTPAGE", 60);
    let Some(chunk) = bytes.get_mut(4096..) else { return };
    if let Some(count) = get_u32(chunk, 40)
        && let Some(table) = chunk.get(64..).and_then(|rest| rest.get(..count.checked_mul(64)?))
    {
        let crc = crc32fast::hash(table);
        put_crc(chunk, 56, crc);
    }
    fit_header(chunk, b"RMNTCHNK", 60);
}

/// Fits one copy of a manifest, and the envelopes in it.
fn fit_manifest(copy: &mut [u8]) {
    let count = |at: usize| {
        copy.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |raw| u64::from_le_bytes(*raw))
    };
    let (entries, tombstones, body_len) = (count(136), count(144), count(152));
    let body = copy.get_mut(256..).and_then(|rest| rest.get_mut(..usize::try_from(body_len).ok()?));
    if let Some(body) = body {
        let mut at = 0;
        for _ in 0..entries {
            let Some(metadata_len) = get_u32(body, at + 68) else { break };
            let key_len = body.get(at + 74).copied().unwrap_or_default();
            let envelope = at + 80 + usize::from(key_len);
            fit_envelope(body, envelope);
            at = (envelope + metadata_len).next_multiple_of(8);
        }
        let root = usize::try_from(tombstones).ok().and_then(|count| count.checked_mul(16)?.checked_add(at));
        if let Some(root) = root.filter(|&root| root < body.len()) {
            fit_envelope(body, root);
        }
        let crc = crc32fast::hash(body);
        put_crc(copy, 160, crc);
    }
    fit_header(copy, b"RMNTMANI", 252);
}
