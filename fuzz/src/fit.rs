//! Corrects checksums after a mutation, because mutation would almost never produce valid ones.

use remanent_format::FileName;
use remanent_format::frame::FrameHeaderRaw;

use crate::archive::Files;

impl Files {
    /// Corrects the checksums of all files.
    pub fn fit(&mut self) {
        // The chain hash continues from segment to segment.
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
                FileName::Lock
                | FileName::Readers
                | FileName::Archive
                | FileName::Unfetched
                | FileName::Spare(_)
                | FileName::ImageSpare(_)
                | FileName::Temporary(..) => {}
            }
        }
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

/// Writes a header's magic at the front, and its checksum at `crc_at`.
pub fn fit_header(bytes: &mut [u8], magic: &[u8], crc_at: usize) {
    if bytes.len() >= crc_at + 4 {
        bytes[..magic.len()].copy_from_slice(magic);
        let crc = crc32fast::hash(&bytes[..crc_at]);
        put_crc(bytes, crc_at, crc);
    }
}

pub fn fit_store(bytes: &mut [u8]) {
    let Some(record) = bytes.get(64..) else { return };
    let (len, crc) = (record.len() as u32, crc32fast::hash(record));
    put_crc(bytes, 40, len);
    put_crc(bytes, 44, crc);
    fit_header(bytes, b"RMNTSTOR", 60);
}

/// Corrects the envelope at `at`, if it is complete.
pub fn fit_envelope(bytes: &mut [u8], at: usize) {
    let content = get_u32(bytes, at).and_then(|len| bytes.get(at + 8..)?.get(..len));
    if let Some(crc) = content.map(crc32fast::hash) {
        put_crc(bytes, at + 4, crc);
    }
}

/// Corrects the envelopes in a payload.
pub fn fit_payload(bytes: &mut [u8]) {
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

/// Corrects the header of a segment and all its frames.
pub fn fit_segment(bytes: &mut [u8], chain: &mut u32) {
    fit_header(bytes, b"RMNTSEGM", 124);
    // An opening segment starts with the chain hash of its predecessor.
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

/// Corrects the header of an image file, and its first chunk.
pub fn fit_images(bytes: &mut [u8]) {
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

/// Corrects one copy of a manifest, and the envelopes in it.
pub fn fit_manifest(copy: &mut [u8]) {
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
