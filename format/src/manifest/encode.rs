//! Floor 0. Writing manifests.

use std::borrow::Cow;

use super::layout::{
    ENTRY_ALIGN, MANIFEST_MAGIC, ManifestEntryRaw, ManifestHeaderRaw, TombstoneRaw, copy_len,
};
use super::{Manifest, ManifestEntry, ManifestKind};
use crate::defect::{Defect, array, check_limit};
use crate::ids::{Key, SnapshotId};
use crate::limits::{MANIFEST_BODY_LEN_MAX, METADATA_LEN_MAX, ROOT_LEN_MAX, SNAPSHOT_NAME_LEN_MAX, align_up};
use crate::segment::FORMAT_VERSION;
use crate::value::{Metadata, encode_metadata};

impl Manifest {
    /// The whole file, both copies.
    ///
    /// # Errors
    /// The defect that decoding would find: a limit passed, entries out of order, fields that contradict
    /// each other.
    pub fn encode(&self) -> Result<Vec<u8>, Defect> {
        self.check()?;
        let mut out = vec![0; ManifestHeaderRaw::LEN];
        self.encode_body(&mut out)?;
        let body = &out[ManifestHeaderRaw::LEN..];
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
            body_len: body.len() as u64,
            body_crc: crc32fast::hash(body),
            name_len: 0,
            name: [0; SNAPSHOT_NAME_LEN_MAX],
            reserved_2: [0; 23],
            header_crc: 0,
        };
        if let Some(name) = &self.name {
            raw.name_len = name.len() as u8;
            raw.name[..name.len()].copy_from_slice(name.as_bytes());
        }
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..252]);
        let copy_len = copy_len(body.len() as u64) as usize;
        out[..ManifestHeaderRaw::LEN].copy_from_slice(&raw.to_bytes());
        out.resize(copy_len, 0);
        out.extend_from_within(..);
        Ok(out)
    }

    /// The checksum by which what [`Manifest::encode`] gave is known.
    ///
    /// # Errors
    /// [`Defect::Truncated`] if it cannot have been given by that.
    pub fn header_crc(encoded: &[u8]) -> Result<u32, Defect> {
        Ok(ManifestHeaderRaw::from_bytes(array(encoded, 0)?).header_crc)
    }

    /// Appends the body to `out`, whose first bytes are the header's.
    fn encode_body(&self, out: &mut Vec<u8>) -> Result<(), Defect> {
        // Most pages have none.
        let no_metadata = encode_metadata(&Metadata::new(), METADATA_LEN_MAX)?;
        let entry_len = ManifestEntryRaw::LEN + align_up(no_metadata.len() as u64, ENTRY_ALIGN) as usize;
        let body_len = self.entries.len() * entry_len + self.tombstones.len() * TombstoneRaw::LEN;
        // Both copies, and what comes between and behind them.
        out.reserve(2 * copy_len(body_len as u64) as usize);
        for entry in &self.entries {
            entry.encode(out, &no_metadata)?;
        }
        for tombstone in &self.tombstones {
            out.extend_from_slice(&TombstoneRaw { page: tombstone.page, lsn: tombstone.lsn }.to_bytes());
        }
        out.extend_from_slice(&encode_metadata(&self.root, ROOT_LEN_MAX)?);
        let body_len = out.len() - ManifestHeaderRaw::LEN;
        check_limit("manifest body length", body_len as u64, MANIFEST_BODY_LEN_MAX)
    }
}

impl ManifestEntry {
    /// Appends the entry to a body, which begins on a multiple of the alignment of entries. `no_metadata` is what
    /// stands for none.
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
        body.extend_from_slice(&raw.to_bytes());
        body.extend_from_slice(key);
        body.extend_from_slice(&metadata);
        body.resize(align_up(body.len() as u64, ENTRY_ALIGN) as usize, 0);
        Ok(())
    }
}
