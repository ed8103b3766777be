//! Decoding of manifests. Bytes from disk are not trusted (I9).

use std::sync::Arc;

use super::layout::{
    ENTRY_ALIGN, KIND_BASE, KIND_CHANGE, KIND_TABLE, MANIFEST_MAGIC, ManifestEntryRaw, ManifestHeaderRaw,
    OverlayBaseRaw, TombstoneRaw, copy_len,
};
use super::{CopyHealth, Manifest, ManifestEntry, ManifestKind, Tombstone};
use crate::defect::{
    Defect, array, check_crc, check_equal, check_limit, check_zero, check_zeros, reserve_items, slice,
};
use crate::ids::{Epoch, Key, Lsn, PageId, Place};
use crate::image::{Codec, ImageRef, OverlayBase};
use crate::limits::{
    GROUP_ALIGN, MANIFEST_BODY_LEN_MAX, METADATA_LEN_MAX, ROOT_LEN_MAX, SNAPSHOT_NAME_LEN_MAX, align_up,
};
use crate::segment::FORMAT_VERSION;
use crate::value::{Metadata, SharedMetadata, decode_metadata};

/// A set of threads that share the work on the entries of a manifest. The engine implements this trait, because this
/// crate starts no threads.
pub trait WorkPool {
    /// Returns the number of entries that one thread processes at a time, which is at least 1.
    fn pieces_len(&self) -> usize;

    /// Applies `work` to every piece, on several threads if possible. Returns the results in the order of the pieces.
    ///
    /// # Errors
    /// Returns the error of a call of `work`.
    fn map_pieces<P: Send, T: Send, E: Send>(
        &self,
        pieces: Vec<P>,
        work: impl Fn(P) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E>;

    /// Runs two closures, concurrently if possible. `here` runs on the calling thread.
    fn join<A: Send, B>(&self, other: impl FnOnce() -> A + Send, here: impl FnOnce() -> B) -> (A, B);
}

/// A pool that runs all work on the calling thread.
pub(crate) struct SingleThread;

impl WorkPool for SingleThread {
    fn pieces_len(&self) -> usize {
        usize::MAX
    }

    fn map_pieces<P: Send, T: Send, E: Send>(
        &self,
        pieces: Vec<P>,
        work: impl Fn(P) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        pieces.into_iter().map(work).collect()
    }

    fn join<A: Send, B>(&self, other: impl FnOnce() -> A + Send, here: impl FnOnce() -> B) -> (A, B) {
        (other(), here())
    }
}

impl Manifest {
    /// Decodes a manifest file. Returns the first valid copy, and the defects of both copies.
    ///
    /// # Errors
    /// Returns the [`Defect`] of the first copy if both are invalid.
    pub fn decode(bytes: &[u8]) -> Result<(Self, CopyHealth), Defect> {
        match Self::decode_copy(bytes, 0) {
            Ok((manifest, header_crc)) => {
                let second = Self::check_second(bytes).err();
                Ok((manifest, CopyHealth { defects: [None, second], header_crc }))
            }
            Err(first) => match Self::decode_copy(bytes, 1) {
                Ok((manifest, header_crc)) => {
                    Ok((manifest, CopyHealth { defects: [Some(first), None], header_crc }))
                }
                Err(_) => Err(first),
            },
        }
    }

    /// Decodes the first copy, given the first half of a file. Returns the manifest and the checksum of its header, or
    /// `None` if the copy is invalid.
    pub(crate) fn decode_first(half: &[u8]) -> Option<(Self, u32)> {
        Self::decode_first_by(half, &SingleThread)
    }

    /// Decodes the first copy on several threads, given the first half of a file. Returns `None` if the copy is
    /// invalid. [`Manifest::decode`] then returns the defect.
    #[must_use]
    pub fn decode_first_by(half: &[u8], threads: &impl WorkPool) -> Option<(Self, u32)> {
        let is_half = Self::copy_len(array(half, 0).ok()?) == Some(half.len() as u64);
        is_half.then(|| Self::decode_copy_by(half, 0, threads).ok()).flatten()
    }

    /// Returns the length of a manifest copy in bytes, including padding. Returns `None` if `header` is not a valid
    /// manifest header. A file contains two copies, so a reader can check the length of the file before it reads a
    /// copy.
    #[must_use]
    pub fn copy_len(header: &[u8; ManifestHeaderRaw::LEN]) -> Option<u64> {
        let raw = ManifestHeaderRaw::from_bytes(header);
        let is_proven = raw.magic == MANIFEST_MAGIC && raw.header_crc == crc32fast::hash(&header[..252]);
        (is_proven && raw.body_len <= MANIFEST_BODY_LEN_MAX).then(|| copy_len(raw.body_len))
    }

    /// Decodes the first copy of a manifest file if `which` is 0, or the second if `which` is 1. Returns the manifest
    /// and the checksum of its header (SPEC M1 to M7). The second copy is found even if the first is damaged, because
    /// both copies have the same length.
    ///
    /// # Errors
    /// Returns a [`Defect`] if the copy is invalid.
    pub fn decode_copy(bytes: &[u8], which: usize) -> Result<(Self, u32), Defect> {
        Self::decode_copy_by(bytes, which, &SingleThread)
    }

    fn decode_copy_by(bytes: &[u8], which: usize, threads: &impl WorkPool) -> Result<(Self, u32), Defect> {
        let copy = slice(bytes, copy_at(bytes, which), bytes.len() - copy_at(bytes, which))?;
        let header: &[u8; ManifestHeaderRaw::LEN] = array(copy, 0)?;
        let raw = ManifestHeaderRaw::from_bytes(header);
        if raw.magic != MANIFEST_MAGIC {
            return Err(Defect::Magic { expected: "manifest" });
        }
        check_crc("manifest header", raw.header_crc, &header[..252])?;
        if raw.version != FORMAT_VERSION {
            return Err(Defect::Version { version: raw.version, features: 0 });
        }
        check_zero("manifest flags", raw.flags.into())?;
        check_zero("reserved manifest bytes", raw.reserved.into())?;
        check_zeros("reserved manifest bytes", &raw.reserved_2)?;
        check_zeros("reserved manifest bytes", &raw.reserved_3)?;
        check_limit("manifest body length", raw.body_len, MANIFEST_BODY_LEN_MAX)?;
        let body = slice(copy, ManifestHeaderRaw::LEN, raw.body_len as usize)?;
        let (kind, entries, tombstones, root) = decode_body(&raw, body, threads)?;
        let manifest = Self {
            kind,
            store: raw.store,
            snapshot: raw.snapshot,
            name: decode_name(&raw)?,
            created_unix_ms: raw.created_unix_ms,
            redo: raw.redo,
            end: raw.end,
            next_page: raw.next_page,
            epoch_high: raw.epoch_high,
            next_file: raw.next_file,
            ahead_from: raw.ahead_from,
            entries,
            tombstones,
            root: Arc::new(root),
        };
        manifest.check_header_fields()?;
        let (count, at_once) = (manifest.entries.len(), threads.pieces_len());
        let pieces = (0..count).step_by(at_once).map(|start| start..count.min(start.saturating_add(at_once)));
        threads.map_pieces(pieces.collect(), |piece| manifest.check_entries(piece))?;
        Ok((manifest, raw.header_crc))
    }

    /// Checks that the second copy equals the first, which must be valid, and that the file ends after the second copy.
    fn check_second(bytes: &[u8]) -> Result<(), Defect> {
        let header = ManifestHeaderRaw::from_bytes(array(bytes, 0)?);
        let (at, len) = (copy_at(bytes, 1), ManifestHeaderRaw::LEN + header.body_len as usize);
        if slice(bytes, at, len)? == slice(bytes, 0, len)? {
            let file_len = 2 * copy_len(header.body_len);
            return check_equal("manifest file length", bytes.len() as u64, file_len);
        }
        let (_, header_crc) = Self::decode_copy(bytes, 1)?;
        check_equal("second copy's checksum", header_crc.into(), header.header_crc.into())
    }
}

impl ManifestEntry {
    /// Creates a placeholder for an entry that is not decoded yet.
    fn blank() -> Self {
        Self {
            page: PageId(0),
            key: None,
            len: 0,
            epoch: Epoch(0),
            lsn: Lsn(0),
            place: Place::Host,
            metadata: SharedMetadata::default(),
            image: None,
        }
    }

    /// Decodes the entry at offset `at` of the body. Returns the entry and the offset of the next entry.
    fn decode(body: &[u8], at: usize) -> Result<(Self, usize), Defect> {
        let raw = ManifestEntryRaw::from_bytes(array(body, at)?);
        check_zeros("reserved entry bytes", &raw.reserved)?;
        let key_at = at + raw.key_at();
        let key = slice(body, key_at, raw.key_len.into())?;
        let key = if key.is_empty() { None } else { Some(decode_key(key)?) };
        let metadata_at = key_at + usize::from(raw.key_len);
        let envelope = slice(body, metadata_at, raw.metadata_len as usize)?;
        let (metadata, used) = decode_metadata(envelope, METADATA_LEN_MAX)?;
        check_equal("metadata envelope", used as u64, envelope.len() as u64)?;
        let (end, next) = (metadata_at + used, align_up((metadata_at + used) as u64, ENTRY_ALIGN) as usize);
        check_zeros("entry padding", slice(body, end, next - end)?)?;
        let place = Place::from_raw(raw.place_kind, raw.place_ordinal)
            .ok_or(Defect::Field { what: "place", found: raw.place_kind.into() })?;
        let entry = Self {
            page: raw.page,
            key,
            len: raw.len,
            epoch: raw.epoch,
            lsn: raw.lsn,
            place,
            metadata: metadata.into(),
            image: decode_image(
                &raw,
                slice(body, at + ManifestEntryRaw::LEN, raw.key_at() - ManifestEntryRaw::LEN)?,
            )?,
        };
        Ok((entry, next))
    }
}

/// Decodes the image of an entry. A stored length of zero means that the page has no image. `base` contains the encoded
/// base of an overlay, or is empty.
fn decode_image(raw: &ManifestEntryRaw, base: &[u8]) -> Result<Option<ImageRef>, Defect> {
    if raw.stored_len == 0 {
        for field in [raw.image_file, raw.image_offset, raw.stored_crc.into(), raw.raw_crc.into()] {
            check_zero("image field of a page without image", field)?;
        }
        check_zero("image field of a page without image", raw.codec.into())?;
        return Ok(None);
    }
    let codec = if base.is_empty() {
        Codec::from_raw(raw.codec)?
    } else {
        let OverlayBaseRaw { file, stored_len } = OverlayBaseRaw::from_bytes(array(base, 0)?);
        Codec::Overlay(OverlayBase { file, stored_len })
    };
    Ok(Some(ImageRef {
        file: raw.image_file,
        offset: raw.image_offset,
        stored_len: raw.stored_len,
        stored_crc: raw.stored_crc,
        raw_crc: raw.raw_crc,
        codec,
    }))
}

fn decode_name(raw: &ManifestHeaderRaw) -> Result<Option<String>, Defect> {
    check_limit("snapshot name length", raw.name_len.into(), SNAPSHOT_NAME_LEN_MAX as u64)?;
    let (name, rest) = raw.name.split_at(raw.name_len.into());
    check_zeros("bytes after the snapshot's name", rest)?;
    let name = str::from_utf8(name).map_err(|error| Defect::Field {
        what: "non-UTF-8 byte in a snapshot name",
        found: name[error.valid_up_to()].into(),
    })?;
    Ok((!name.is_empty()).then(|| name.to_owned()))
}

fn decode_key(bytes: &[u8]) -> Result<Key, Defect> {
    Key::new(bytes).map_err(|error| Defect::Limit {
        what: "key length",
        found: error.len as u64,
        limit: crate::limits::KEY_LEN_MAX as u64,
    })
}

fn decode_kind(raw: &ManifestHeaderRaw) -> Result<ManifestKind, Defect> {
    let kind = match raw.kind {
        KIND_BASE => ManifestKind::Base,
        KIND_CHANGE => ManifestKind::Change { previous: raw.previous, previous_crc: raw.previous_crc },
        KIND_TABLE => ManifestKind::Table,
        other => return Err(Defect::Field { what: "manifest kind", found: other.into() }),
    };
    if raw.kind != KIND_CHANGE {
        check_zero("previous link of a base or table", raw.previous.0)?;
        check_zero("previous checksum of a base or table", raw.previous_crc.into())?;
    }
    Ok(kind)
}

type Body = (ManifestKind, Vec<ManifestEntry>, Vec<Tombstone>, Metadata);

fn decode_body(raw: &ManifestHeaderRaw, body: &[u8], threads: &impl WorkPool) -> Result<Body, Defect> {
    // Every entry and tombstone contains its fixed part, so a count that is too large for the body is rejected before
    // memory is allocated.
    let fits = |len: usize| (body.len() / len) as u64;
    // Allocate memory for the entries while the body is checked and the entries are located, because the allocation
    // takes longer. Then decode each entry at its final position. Concatenating per-thread lists took a fifth of the
    // time to read a link.
    let at_once = threads.pieces_len();
    let proven = || {
        check_crc("manifest body", raw.body_crc, body)?;
        let kind = decode_kind(raw)?;
        check_limit("entry count", raw.entry_count, fits(ManifestEntryRaw::LEN))?;
        check_limit("tombstone count", raw.tombstone_count, fits(TombstoneRaw::LEN))?;
        Ok::<_, Defect>((kind, starts(body, raw.entry_count as usize, at_once)?))
    };
    let (proven, blank) =
        threads.join(proven, || blank_entries(raw.entry_count.min(fits(ManifestEntryRaw::LEN))));
    let ((kind, starts), mut entries) = (proven?, blank?);
    let pieces = entries.chunks_mut(at_once).zip(starts).collect();
    let ends = threads.map_pieces(pieces, |(entries, start)| decode_entries(body, start, entries))?;
    let mut at = ends.last().copied().unwrap_or_default();
    let mut tombstones = Vec::new();
    reserve_items(&mut tombstones, raw.tombstone_count as usize)?;
    for _ in 0..raw.tombstone_count {
        let tombstone = TombstoneRaw::from_bytes(array(body, at)?);
        tombstones.push(Tombstone { page: tombstone.page, lsn: tombstone.lsn });
        at += TombstoneRaw::LEN;
    }
    let (root, used) = decode_metadata(&body[at..], ROOT_LEN_MAX)?;
    check_equal("manifest body length", body.len() as u64, (at + used) as u64)?;
    Ok((kind, entries, tombstones, root))
}

fn blank_entries(count: u64) -> Result<Vec<ManifestEntry>, Defect> {
    let mut entries = Vec::new();
    reserve_items(&mut entries, count as usize)?;
    entries.resize_with(count as usize, ManifestEntry::blank);
    Ok(entries)
}

/// Decodes entries from offset `at` of the body until `entries` is full. Returns the offset after the last entry.
fn decode_entries(body: &[u8], mut at: usize, entries: &mut [ManifestEntry]) -> Result<usize, Defect> {
    for entry in entries {
        (*entry, at) = ManifestEntry::decode(body, at)?;
    }
    Ok(at)
}

/// Returns the offsets at which the pieces of the entries start. A piece has `at_once` entries.
fn starts(body: &[u8], count: usize, at_once: usize) -> Result<Vec<usize>, Defect> {
    let mut starts = Vec::new();
    let mut at = 0;
    for index in 0..count {
        if index % at_once == 0 {
            starts.push(at);
            if count - index <= at_once {
                break;
            }
        }
        let raw = ManifestEntryRaw::from_bytes(array(body, at)?);
        let end = (at + raw.key_at()) as u64 + u64::from(raw.key_len);
        at = align_up(end + u64::from(raw.metadata_len), ENTRY_ALIGN) as usize;
    }
    Ok(starts)
}

/// Returns the offset of a copy in a manifest file. The header of the first copy determines the offset of the second.
/// If that header is damaged, the second copy starts at half of the file's length.
fn copy_at(bytes: &[u8], which: usize) -> usize {
    if which == 0 {
        return 0;
    }
    let by_header = array(bytes, 0).ok().and_then(Manifest::copy_len);
    let by_length = bytes.len() as u64 / 2 / GROUP_ALIGN * GROUP_ALIGN;
    by_header.unwrap_or(by_length).min(bytes.len() as u64) as usize
}
