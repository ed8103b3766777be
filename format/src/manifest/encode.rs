//! Encoding of manifests.

use std::borrow::Cow;
use std::ops::Range;

use super::layout::{
    ENTRY_ALIGN, MANIFEST_MAGIC, ManifestEntryRaw, ManifestHeaderRaw, OverlayBaseRaw, TombstoneRaw, copy_len,
};
use super::{Manifest, ManifestEntry, ManifestKind};
use crate::defect::{Defect, array, check_limit, reserve_items};
use crate::ids::{Key, SnapshotId};
use crate::image::{Codec, OverlayBase};
use crate::limits::{MANIFEST_BODY_LEN_MAX, METADATA_LEN_MAX, ROOT_LEN_MAX, SNAPSHOT_NAME_LEN_MAX, align_up};
use crate::segment::FORMAT_VERSION;
use crate::value::{Metadata, encode_metadata};

/// The encoded entries of a part of a manifest, with their checksum.
#[derive(Debug)]
pub struct EncodedEntries {
    bytes: Vec<u8>,
    crc: crc32fast::Hasher,
    range: Range<usize>,
}

impl Manifest {
    /// Encodes a manifest file, which contains two copies of the manifest.
    ///
    /// # Errors
    /// Returns a [`Defect`] if a field exceeds its limit, if the entries or tombstones are out of order, or if fields
    /// contradict each other.
    pub fn encode(&self) -> Result<Vec<u8>, Defect> {
        self.check_header_fields()?;
        let entries = self.encode_entries(0..self.entries.len())?;
        let mut out = self.encode_around(vec![entries])?.pop().expect("as many pieces as there were");
        let len = out.len();
        reserve_items(&mut out, len)?;
        out.extend_from_within(..);
        Ok(out)
    }

    /// Encodes a range of the entries, so that several threads can share the work. [`Manifest::encode_around`] joins
    /// the results.
    ///
    /// # Errors
    /// Returns the same [`Defect`] as [`Manifest::encode`] if one of these entries is invalid.
    ///
    /// # Panics
    /// Panics if the range exceeds the entries.
    pub fn encode_entries(&self, range: Range<usize>) -> Result<EncodedEntries, Defect> {
        self.check_entries(range.clone())?;
        // Most pages have no metadata, so the encoding of empty metadata is computed once.
        let no_metadata = encode_metadata(&Metadata::new(), METADATA_LEN_MAX)?;
        let entry_len = ManifestEntryRaw::LEN + align_up(no_metadata.len() as u64, ENTRY_ALIGN) as usize;
        let entries = &self.entries[range.clone()];
        let mut bytes = Vec::new();
        reserve_items(&mut bytes, entries.len() * entry_len)?;
        for entry in entries {
            entry.encode(&mut bytes, &no_metadata)?;
        }
        let mut crc = crc32fast::Hasher::new();
        crc.update(&bytes);
        Ok(EncodedEntries { bytes, crc, range })
    }

    /// Encodes one copy of the manifest from its encoded entries. Returns the copy in as many pieces as `entries` has.
    /// The caller must write the copy to the file twice.
    ///
    /// # Errors
    /// Returns the same [`Defect`] as [`Manifest::encode`].
    ///
    /// # Panics
    /// Panics if `entries` is empty, or if it does not contain all entries of the manifest in order.
    pub fn encode_around(&self, entries: Vec<EncodedEntries>) -> Result<Vec<Vec<u8>>, Defect> {
        self.check_header_fields()?;
        let end =
            entries.iter().try_fold(0, |end, piece| (piece.range.start == end).then_some(piece.range.end));
        assert!(end == Some(self.entries.len()) && !entries.is_empty(), "all entries, in their order");
        let mut body_crc = crc32fast::Hasher::new();
        entries.iter().for_each(|piece| body_crc.combine(&piece.crc));
        let behind = self.encode_rest()?;
        body_crc.update(&behind);
        let body_len = entries.iter().map(|piece| piece.bytes.len()).sum::<usize>() + behind.len();
        check_limit("manifest body length", body_len as u64, MANIFEST_BODY_LEN_MAX)?;
        let header = self.header(body_len as u64, body_crc.finalize()).to_bytes();
        let mut pieces: Vec<Vec<u8>> = entries.into_iter().map(|piece| piece.bytes).collect();
        reserve_items(&mut pieces[0], header.len())?;
        pieces[0].splice(..0, header);
        let padding = copy_len(body_len as u64) as usize - ManifestHeaderRaw::LEN - body_len;
        let last = pieces.last_mut().expect("at least one");
        reserve_items(last, behind.len() + padding)?;
        last.extend_from_slice(&behind);
        last.resize(last.len() + padding, 0);
        Ok(pieces)
    }

    fn header(&self, body_len: u64, body_crc: u32) -> ManifestHeaderRaw {
        let (previous, previous_crc) = match self.kind {
            ManifestKind::Change { previous, previous_crc } => (previous, previous_crc),
            ManifestKind::Base | ManifestKind::Table => (SnapshotId(0), 0),
        };
        let mut raw = ManifestHeaderRaw {
            magic: MANIFEST_MAGIC,
            version: FORMAT_VERSION,
            kind: self.kind.to_raw(),
            store: self.store,
            snapshot: self.snapshot,
            previous,
            previous_crc,
            flags: 0,
            created_unix_ms: self.created_unix_ms,
            redo: self.redo,
            reserved: 0,
            end: self.end,
            next_page: self.next_page,
            epoch_high: self.epoch_high,
            next_file: self.next_file,
            entry_count: self.entries.len() as u64,
            tombstone_count: self.tombstones.len() as u64,
            body_len,
            body_crc,
            name_len: 0,
            name: [0; SNAPSHOT_NAME_LEN_MAX],
            reserved_2: [0; 3],
            ahead_from: self.ahead_from,
            reserved_3: [0; 12],
            header_crc: 0,
        };
        if let Some(name) = &self.name {
            raw.name_len = name.len() as u8;
            raw.name[..name.len()].copy_from_slice(name.as_bytes());
        }
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..252]);
        raw
    }

    /// Returns the header checksum of an encoded manifest file. Seals and links identify the manifest by this checksum.
    ///
    /// # Errors
    /// Returns [`Defect::Truncated`] if `encoded` is shorter than a header.
    pub fn header_crc(encoded: &[u8]) -> Result<u32, Defect> {
        Ok(ManifestHeaderRaw::from_bytes(array(encoded, 0)?).header_crc)
    }

    /// Encodes the tombstones and the root, which follow the entries.
    fn encode_rest(&self) -> Result<Vec<u8>, Defect> {
        let root = encode_metadata(&self.root, ROOT_LEN_MAX)?;
        let mut out = Vec::new();
        reserve_items(&mut out, self.tombstones.len() * TombstoneRaw::LEN + root.len())?;
        for tombstone in &self.tombstones {
            out.extend_from_slice(&TombstoneRaw { page: tombstone.page, lsn: tombstone.lsn }.to_bytes());
        }
        out.extend_from_slice(&root);
        Ok(out)
    }
}

impl ManifestEntry {
    /// Appends the encoded entry to `body`. The length of `body` must be a multiple of [`ENTRY_ALIGN`]. `no_metadata`
    /// is the encoding of empty metadata.
    fn encode(&self, body: &mut Vec<u8>, no_metadata: &[u8]) -> Result<(), Defect> {
        let metadata: Cow<'_, [u8]> = if self.metadata.is_empty() {
            no_metadata.into()
        } else {
            encode_metadata(&self.metadata, METADATA_LEN_MAX)?.into()
        };
        let key = self.key.as_ref().map_or(&[][..], Key::as_bytes);
        let (place_kind, place_ordinal) = self.place.to_raw();
        let mut raw = ManifestEntryRaw {
            page: self.page,
            epoch: self.epoch,
            lsn: self.lsn,
            len: self.len,
            image_file: 0,
            image_offset: 0,
            stored_len: 0,
            stored_crc: 0,
            raw_crc: 0,
            place_ordinal,
            metadata_len: metadata.len() as u32,
            codec: 0,
            place_kind,
            key_len: key.len() as u8,
            reserved: [0; 5],
        };
        if let Some(image) = &self.image {
            (raw.image_file, raw.image_offset) = (image.file, image.offset);
            (raw.stored_len, raw.stored_crc, raw.raw_crc) =
                (image.stored_len, image.stored_crc, image.raw_crc);
            raw.codec = image.codec.to_raw();
        }
        let base = match self.image.map(|image| image.codec) {
            Some(Codec::Overlay(OverlayBase { file, stored_len })) => {
                Some(OverlayBaseRaw { file, stored_len }.to_bytes())
            }
            _ => None,
        };
        let len = raw.key_at() + key.len() + metadata.len() + ENTRY_ALIGN as usize;
        let needed = (body.len() + len) as u64;
        body.try_reserve(len).map_err(|_| Defect::Memory { needed })?;
        body.extend_from_slice(&raw.to_bytes());
        body.extend(base.into_iter().flatten());
        body.extend_from_slice(key);
        body.extend_from_slice(&metadata);
        body.resize(align_up(body.len() as u64, ENTRY_ALIGN) as usize, 0);
        Ok(())
    }
}
