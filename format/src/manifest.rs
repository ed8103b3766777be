//! Floor 0. Manifests: what a snapshot consists of.
//!
//! A snapshot is a base, or a base and a chain of changes; each is one file, and each names the link
//! before it by number and checksum. The table of an old state, which a restore record names, has the
//! same bytes under another kind.
//!
//! ```text
//! snapshots/<n>.manifest
//! 0      copy: header (256 bytes), entries, tombstones, root; zeros up to a multiple of 4096
//! half   the same copy again
//! ```
//!
//! `redo` and `end` make a fuzzy snapshot exact: every batch up to `redo` is in the images, replay starts
//! behind that point, and only once replay has reached `end` does every page stand at one Lsn. A manifest
//! is published after everything it names is synced (I7).

use std::sync::Arc;

use crate::defect::{Defect, array, check_crc, check_equal, check_limit, check_zero, check_zeros, slice};
use crate::ids::{Epoch, Key, LogPoint, Lsn, PageId, Place, SnapshotId, StoreId};
use crate::image::{Codec, ImageRef};
use crate::layout::layout;
use crate::limits::{
    DEVICE_ORDINAL_MAX, GROUP_ALIGN, MANIFEST_BODY_LEN_MAX, MANIFEST_ENTRIES_MAX, METADATA_LEN_MAX,
    NUMBER_MAX, PAGE_LEN_MAX, ROOT_LEN_MAX, align_up,
};
use crate::segment::FORMAT_VERSION;
use crate::value::{Metadata, decode_metadata, encode_metadata};

/// The first bytes of each copy of a manifest.
pub const MANIFEST_MAGIC: [u8; 8] = *b"RMNTMANI";
/// Entries start on multiples of this many bytes, counted from the start of the body.
pub const ENTRY_ALIGN: u64 = 8;

const KIND_BASE: u32 = 1;
const KIND_CHANGE: u32 = 2;
const KIND_TABLE: u32 = 3;

layout! {
    /// The bytes of a manifest's header; the body follows.
    pub struct ManifestHeaderRaw: 256 {
        /// `RMNTMANI`.
        0 => magic: [u8; 8],
        /// Format version, 1.
        8 => version: u32,
        /// 1: base, 2: change, 3: table of an old state.
        12 => kind: u32,
        /// The store.
        16 => store: StoreId,
        /// The snapshot's number, or the table's, as in the file's name.
        32 => snapshot: SnapshotId,
        /// The link before; zero unless this is a change.
        40 => previous: SnapshotId,
        /// The header checksum of the link before; zero unless this is a change.
        48 => previous_crc: u32,
        /// Zero.
        52 => flags: u32,
        /// When the manifest was written, in milliseconds since 1970.
        56 => created_unix_ms: u64,
        /// Where replay starts: every batch up to here is in the images.
        64 => redo: LogPoint,
        /// Zero.
        100 => reserved: u32,
        /// Where replay must arrive at least.
        104 => end: Lsn,
        /// The next page id; all ids below it are used.
        112 => next_page: u64,
        /// The highest epoch that any page ever had.
        120 => epoch_high: Epoch,
        /// The next number of an image file.
        128 => next_file: u64,
        /// Number of entries.
        136 => entry_count: u64,
        /// Number of tombstones.
        144 => tombstone_count: u64,
        /// Length of the body.
        152 => body_len: u64,
        /// CRC-32 of the body.
        160 => body_crc: u32,
        /// Zero.
        164 => reserved_2: [u8; 88],
        /// CRC-32 of the bytes before; the link's own checksum.
        252 => header_crc: u32,
    }
}

layout! {
    /// The fixed start of an entry; key, metadata envelope and zeros up to a multiple of 8 follow.
    pub struct ManifestEntryRaw: 80 {
        /// The page.
        0 => page: PageId,
        /// Its epoch in the image.
        8 => epoch: Epoch,
        /// The newest batch that changed it, in the image.
        16 => lsn: Lsn,
        /// Its length.
        24 => len: u64,
        /// The image file's number; zero, as all fields of the image, if the page is empty.
        32 => image_file: u64,
        /// Where the payload lies: bytes from the image file's start.
        40 => image_offset: u64,
        /// Length of the payload as it is stored.
        48 => stored_len: u64,
        /// CRC-32 of the payload as it is stored.
        56 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        60 => raw_crc: u32,
        /// The place's ordinal.
        64 => place_ordinal: u32,
        /// Length of the metadata envelope.
        68 => metadata_len: u32,
        /// How the payload is stored.
        72 => codec: u8,
        /// The place's kind.
        73 => place_kind: u8,
        /// Length of the key; zero if there is none.
        74 => key_len: u8,
        /// Zero.
        75 => reserved: [u8; 5],
    }
}

layout! {
    /// The bytes of a tombstone.
    pub struct TombstoneRaw: 16 {
        /// The page that was deleted.
        0 => page: PageId,
        /// The batch that deleted it.
        8 => lsn: Lsn,
    }
}

/// Which part a manifest plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestKind {
    /// All pages.
    Base,
    /// The pages that changed since the link before.
    Change {
        /// The link before.
        previous: SnapshotId,
        /// Its header checksum.
        previous_crc: u32,
    },
    /// All pages of an old state that a restore record names.
    Table,
}

impl ManifestKind {
    /// The kind's number on disk.
    #[must_use]
    pub fn to_raw(self) -> u32 {
        match self {
            ManifestKind::Base => KIND_BASE,
            ManifestKind::Change { .. } => KIND_CHANGE,
            ManifestKind::Table => KIND_TABLE,
        }
    }
}

/// A page as its snapshot caught it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The page.
    pub page: PageId,
    /// The user's name for it.
    pub key: Option<Key>,
    /// Its length in bytes.
    pub len: u64,
    /// Its epoch.
    pub epoch: Epoch,
    /// The newest batch that changed it.
    pub lsn: Lsn,
    /// Where it lives.
    pub place: Place,
    /// Its metadata.
    pub metadata: Arc<Metadata>,
    /// Its bytes; none if and only if the page is empty.
    pub image: Option<ImageRef>,
}

/// A page that was deleted while the snapshot was taken, or since the link before: replay skips it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The page.
    pub page: PageId,
    /// The batch that deleted it.
    pub lsn: Lsn,
}

/// One link of a snapshot, or the table of an old state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Its part.
    pub kind: ManifestKind,
    /// The store.
    pub store: StoreId,
    /// The snapshot's number, or the table's.
    pub snapshot: SnapshotId,
    /// When it was written, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Every batch up to this point is in the images; replay starts behind it.
    pub redo: LogPoint,
    /// Replay must reach at least this batch; it is a durable mark (I4).
    pub end: Lsn,
    /// The next page id; all ids below it are used.
    pub next_page: u64,
    /// The highest epoch that any page ever had.
    pub epoch_high: Epoch,
    /// The next number of an image file.
    pub next_file: u64,
    /// The pages, ascending.
    pub entries: Vec<ManifestEntry>,
    /// The deleted pages, ascending.
    pub tombstones: Vec<Tombstone>,
    /// The root, as captured together with `end`.
    pub root: Arc<Metadata>,
}

/// The state of a manifest's two copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyHealth {
    /// What is wrong with the first and the second copy.
    pub defects: [Option<Defect>; 2],
    /// The header checksum of the copy that was taken: the name under which the next link and the seals
    /// know this one.
    pub header_crc: u32,
}

impl CopyHealth {
    /// Whether both copies are good.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.defects.iter().all(Option::is_none)
    }
}

impl Manifest {
    /// The whole file, both copies.
    ///
    /// # Errors
    /// The defect that decoding would find: a limit passed, entries out of order, fields that contradict
    /// each other.
    pub fn encode(&self) -> Result<Vec<u8>, Defect> {
        self.check()?;
        let body = self.encode_body()?;
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
            body_crc: crc32fast::hash(&body),
            reserved_2: [0; 88],
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..252]);
        let copy_len = copy_len(body.len() as u64) as usize;
        let mut out = Vec::with_capacity(2 * copy_len);
        for end in [copy_len, 2 * copy_len] {
            out.extend_from_slice(&raw.to_bytes());
            out.extend_from_slice(&body);
            out.resize(end, 0);
        }
        Ok(out)
    }

    /// Reads a whole file: the first good copy, and how both are.
    ///
    /// # Errors
    /// The first copy's [`Defect`], if neither is good.
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

    /// Reads one copy, 0 or 1, and gives its header checksum with it. The copies are of one length, so the
    /// second is found even where the first is lost.
    ///
    /// # Errors
    /// A [`Defect`].
    pub fn decode_copy(bytes: &[u8], which: usize) -> Result<(Self, u32), Defect> {
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
        check_limit("manifest body length", raw.body_len, MANIFEST_BODY_LEN_MAX)?;
        let body = slice(copy, ManifestHeaderRaw::LEN, raw.body_len as usize)?;
        check_crc("manifest body", raw.body_crc, body)?;
        let kind = match raw.kind {
            KIND_BASE => ManifestKind::Base,
            KIND_CHANGE => ManifestKind::Change { previous: raw.previous, previous_crc: raw.previous_crc },
            KIND_TABLE => ManifestKind::Table,
            other => return Err(Defect::Field { what: "manifest kind", found: other.into() }),
        };
        if raw.kind != KIND_CHANGE {
            check_zero("previous link of a manifest that follows none", raw.previous.0)?;
            check_zero("previous checksum of a manifest that follows none", raw.previous_crc.into())?;
        }
        let (entries, tombstones, root) = decode_body(&raw, body)?;
        let manifest = Self {
            kind,
            store: raw.store,
            snapshot: raw.snapshot,
            created_unix_ms: raw.created_unix_ms,
            redo: raw.redo,
            end: raw.end,
            next_page: raw.next_page,
            epoch_high: raw.epoch_high,
            next_file: raw.next_file,
            entries,
            tombstones,
            root: Arc::new(root),
        };
        manifest.check()?;
        Ok((manifest, raw.header_crc))
    }

    /// Whether the second copy equals the first, which is good; if not, what is wrong with it.
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

    /// Refuses fields that contradict each other.
    fn check(&self) -> Result<(), Defect> {
        if let ManifestKind::Change { previous, .. } = self.kind {
            if previous.0 == 0 {
                return Err(Defect::Field { what: "previous link of a change", found: 0 });
            }
            check_limit("previous link", previous.0, self.snapshot.0.saturating_sub(1))?;
        }
        for (what, found) in [
            ("snapshot number", self.snapshot.0),
            ("next page id", self.next_page),
            ("next image file", self.next_file),
        ] {
            check_limit(what, found, NUMBER_MAX)?;
            if found == 0 {
                return Err(Defect::Field { what, found });
            }
        }
        check_limit("end", self.end.0, NUMBER_MAX)?;
        check_limit("highest epoch", self.epoch_high.0, NUMBER_MAX)?;
        check_limit("redo lsn", self.redo.lsn.0, self.end.0)?;
        check_limit("entry count", self.entries.len() as u64, MANIFEST_ENTRIES_MAX)?;
        check_limit("tombstone count", self.tombstones.len() as u64, MANIFEST_ENTRIES_MAX)?;
        self.check_order()?;
        self.entries.iter().try_for_each(|entry| self.check_entry(entry))?;
        self.tombstones.iter().try_for_each(|tombstone| self.check_range(tombstone.page, tombstone.lsn))
    }

    /// Pages ascend strictly, and none is both there and deleted: ids are never used again.
    fn check_order(&self) -> Result<(), Defect> {
        let descends = |what, page: PageId| Err(Defect::Field { what, found: page.0 });
        if let Some(pair) = self.entries.windows(2).find(|pair| pair[0].page >= pair[1].page) {
            return descends("page that does not ascend", pair[1].page);
        }
        if let Some(pair) = self.tombstones.windows(2).find(|pair| pair[0].page >= pair[1].page) {
            return descends("tombstone that does not ascend", pair[1].page);
        }
        let is_entry = |page| self.entries.binary_search_by_key(&page, |entry| entry.page).is_ok();
        match self.tombstones.iter().find(|tombstone| is_entry(tombstone.page)) {
            Some(tombstone) => descends("tombstone of a page that is there", tombstone.page),
            None => Ok(()),
        }
    }

    fn check_entry(&self, entry: &ManifestEntry) -> Result<(), Defect> {
        self.check_range(entry.page, entry.lsn)?;
        check_limit("page length", entry.len, PAGE_LEN_MAX)?;
        check_limit("page's epoch", entry.epoch.0, self.epoch_high.0)?;
        if entry.epoch.0 == 0 {
            return Err(Defect::Field { what: "page's epoch", found: 0 });
        }
        if let Place::Device(ordinal) = entry.place {
            check_limit("device ordinal", ordinal.into(), DEVICE_ORDINAL_MAX.into())?;
        }
        match &entry.image {
            None => check_equal("length of a page without image", entry.len, 0),
            Some(image) => {
                image.check(entry.len)?;
                check_limit("image file", image.file, self.next_file - 1)
            }
        }
    }

    /// A page that exists below `next_page`, and a batch up to `end`.
    fn check_range(&self, page: PageId, lsn: Lsn) -> Result<(), Defect> {
        check_limit("page id", page.0, self.next_page - 1)?;
        check_limit("page's lsn", lsn.0, self.end.0)?;
        if page.0 == 0 || lsn.0 == 0 {
            return Err(Defect::Field { what: "page id or lsn", found: 0 });
        }
        Ok(())
    }

    fn encode_body(&self) -> Result<Vec<u8>, Defect> {
        let mut body = Vec::new();
        for entry in &self.entries {
            entry.encode(&mut body)?;
        }
        for tombstone in &self.tombstones {
            body.extend_from_slice(&TombstoneRaw { page: tombstone.page, lsn: tombstone.lsn }.to_bytes());
        }
        body.extend_from_slice(&encode_metadata(&self.root, ROOT_LEN_MAX)?);
        check_limit("manifest body length", body.len() as u64, MANIFEST_BODY_LEN_MAX)?;
        Ok(body)
    }
}

impl ManifestEntry {
    /// Appends the entry to a body.
    fn encode(&self, body: &mut Vec<u8>) -> Result<(), Defect> {
        let metadata = encode_metadata(&self.metadata, METADATA_LEN_MAX)?;
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

    /// Reads the entry at `at`, and says where the next one starts.
    fn decode(body: &[u8], at: usize) -> Result<(Self, usize), Defect> {
        let raw = ManifestEntryRaw::from_bytes(array(body, at)?);
        check_zeros("reserved entry bytes", &raw.reserved)?;
        let key_at = at + ManifestEntryRaw::LEN;
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
            metadata: Arc::new(metadata),
            image: decode_image(&raw)?,
        };
        Ok((entry, next))
    }
}

/// The image that an entry names; the length of an image is never zero.
fn decode_image(raw: &ManifestEntryRaw) -> Result<Option<ImageRef>, Defect> {
    if raw.stored_len == 0 {
        for field in [raw.image_file, raw.image_offset, raw.stored_crc.into(), raw.raw_crc.into()] {
            check_zero("image field of a page without image", field)?;
        }
        check_zero("image field of a page without image", raw.codec.into())?;
        return Ok(None);
    }
    Ok(Some(ImageRef {
        file: raw.image_file,
        offset: raw.image_offset,
        stored_len: raw.stored_len,
        stored_crc: raw.stored_crc,
        raw_crc: raw.raw_crc,
        codec: Codec::from_raw(raw.codec)?,
    }))
}

fn decode_key(bytes: &[u8]) -> Result<Key, Defect> {
    Key::new(bytes).map_err(|error| Defect::Limit {
        what: "key length",
        found: error.len as u64,
        limit: crate::limits::KEY_LEN_MAX as u64,
    })
}

type Body = (Vec<ManifestEntry>, Vec<Tombstone>, Metadata);

fn decode_body(raw: &ManifestHeaderRaw, body: &[u8]) -> Result<Body, Defect> {
    // Each takes its fixed part at least, so no count can make us reserve more than there is.
    let fits = |len: usize| (body.len() / len) as u64;
    check_limit("entry count", raw.entry_count, fits(ManifestEntryRaw::LEN))?;
    check_limit("tombstone count", raw.tombstone_count, fits(TombstoneRaw::LEN))?;
    let mut entries = Vec::with_capacity(raw.entry_count as usize);
    let mut at = 0;
    for _ in 0..raw.entry_count {
        let (entry, next) = ManifestEntry::decode(body, at)?;
        entries.push(entry);
        at = next;
    }
    let mut tombstones = Vec::with_capacity(raw.tombstone_count as usize);
    for _ in 0..raw.tombstone_count {
        let tombstone = TombstoneRaw::from_bytes(array(body, at)?);
        tombstones.push(Tombstone { page: tombstone.page, lsn: tombstone.lsn });
        at += TombstoneRaw::LEN;
    }
    let (root, used) = decode_metadata(&body[at..], ROOT_LEN_MAX)?;
    check_equal("manifest body length", body.len() as u64, (at + used) as u64)?;
    Ok((entries, tombstones, root))
}

/// Bytes of one copy, padding included.
fn copy_len(body_len: u64) -> u64 {
    align_up(ManifestHeaderRaw::LEN as u64 + body_len, GROUP_ALIGN)
}

/// Where a copy starts. The first copy's header says where the second is; where that header is lost, the
/// file's length does, unless the file was cut as well.
fn copy_at(bytes: &[u8], which: usize) -> usize {
    if which == 0 {
        return 0;
    }
    let by_header = array(bytes, 0).ok().and_then(|header: &[u8; ManifestHeaderRaw::LEN]| {
        let raw = ManifestHeaderRaw::from_bytes(header);
        let proven = raw.magic == MANIFEST_MAGIC && raw.header_crc == crc32fast::hash(&header[..252]);
        (proven && raw.body_len <= MANIFEST_BODY_LEN_MAX).then(|| copy_len(raw.body_len))
    });
    let by_length = bytes.len() as u64 / 2 / GROUP_ALIGN * GROUP_ALIGN;
    by_header.unwrap_or(by_length).min(bytes.len() as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Incarnation;
    use crate::value::Value;

    /// Length of the sample's root envelope, the end of its body.
    const ROOT_LEN: usize = 40;

    fn image(file: u64, len: u64) -> Option<ImageRef> {
        Some(ImageRef {
            file,
            offset: 4096 + 128,
            stored_len: len,
            stored_crc: 0xabcd,
            raw_crc: 0xabcd,
            codec: Codec::Raw,
        })
    }

    fn entry(page: u64, len: u64) -> ManifestEntry {
        ManifestEntry {
            page: PageId(page),
            key: Some(Key::new(format!("key {page}")).unwrap()),
            len,
            epoch: Epoch(3),
            lsn: Lsn(8),
            place: Place::Device(1),
            metadata: Arc::new([("dtype".to_owned(), Value::from("bf16"))].into()),
            image: (len > 0).then(|| image(2, len)).flatten(),
        }
    }

    fn sample() -> Manifest {
        let bare = ManifestEntry { key: None, place: Place::Host, metadata: Arc::default(), ..entry(4, 0) };
        Manifest {
            kind: ManifestKind::Change { previous: SnapshotId(6), previous_crc: 0x1234_5678 },
            store: StoreId([0x5a; 16]),
            snapshot: SnapshotId(7),
            created_unix_ms: 1_700_000_000_123,
            redo: LogPoint {
                incarnation: Incarnation { number: 2, random: 99 },
                lsn: Lsn(5),
                segment: 3,
                offset: 8192,
                chain: 0x0bad_cafe,
            },
            end: Lsn(9),
            next_page: 10,
            epoch_high: Epoch(4),
            next_file: 3,
            entries: vec![entry(1, 100), bare, entry(9, 1 << 30)],
            tombstones: vec![Tombstone { page: PageId(2), lsn: Lsn(6) }],
            root: Arc::new([("step".to_owned(), Value::from(12_u64))].into()),
        }
    }

    fn first(bytes: &[u8]) -> Result<Manifest, Defect> {
        Manifest::decode_copy(bytes, 0).map(|(manifest, _)| manifest)
    }

    /// The sample's bytes, its first copy changed, and that copy's checksums made to fit.
    fn with_copy(change: impl FnOnce(&mut ManifestHeaderRaw, &mut [u8])) -> Vec<u8> {
        let mut bytes = sample().encode().unwrap();
        let mut raw = ManifestHeaderRaw::from_bytes(bytes[..256].try_into().unwrap());
        let body_end = 256 + raw.body_len as usize;
        change(&mut raw, &mut bytes[256..body_end]);
        raw.body_crc = crc32fast::hash(&bytes[256..body_end]);
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..252]);
        bytes[..256].copy_from_slice(&raw.to_bytes());
        bytes
    }

    #[test]
    fn manifest_round_trips_to_the_same_bytes() {
        let base = Manifest { kind: ManifestKind::Base, ..sample() };
        let table = Manifest { kind: ManifestKind::Table, ..sample() };
        let empty = Manifest {
            kind: ManifestKind::Base,
            redo: LogPoint::default(),
            end: Lsn(0),
            next_page: 1,
            epoch_high: Epoch(0),
            next_file: 1,
            entries: vec![],
            tombstones: vec![],
            root: Arc::default(),
            ..sample()
        };
        let many =
            Manifest { next_page: 1000, entries: (1..900).map(|page| entry(page, 7)).collect(), ..sample() };
        let many = Manifest { tombstones: vec![], ..many };
        for manifest in [sample(), base, table, empty, many] {
            let bytes = manifest.encode().unwrap();
            assert_eq!(bytes.len() % 8192, 0);
            assert_eq!(bytes[..bytes.len() / 2], bytes[bytes.len() / 2..]);
            let (decoded, health) = Manifest::decode(&bytes).unwrap();
            assert!(health.is_whole());
            assert_eq!(health.header_crc.to_le_bytes(), bytes[252..256]);
            assert_eq!(decoded, manifest);
            assert_eq!(decoded.encode().unwrap(), bytes);
        }
    }

    #[test]
    fn one_good_copy_is_enough_and_the_other_is_reported() {
        let bytes = sample().encode().unwrap();
        let body_end = 256 + u64::from_le_bytes(bytes[152..160].try_into().unwrap()) as usize;
        for (copy, at) in [(0, 0), (1, bytes.len() / 2)] {
            for index in 0..body_end {
                let mut damaged = bytes.clone();
                damaged[at + index] ^= 0x40;
                let (decoded, health) = Manifest::decode(&damaged).unwrap();
                assert_eq!(decoded, sample(), "copy {copy}, byte {index}");
                assert!(
                    matches!(health.defects[copy], Some(Defect::Magic { .. } | Defect::Checksum { .. })),
                    "copy {copy}, byte {index}: {health:?}"
                );
                assert_eq!(health.defects[1 - copy], None, "copy {copy}, byte {index}");
            }
        }
        let mut both = bytes;
        both[260] ^= 1;
        let second = both.len() / 2 + 300;
        both[second] ^= 1;
        assert!(matches!(Manifest::decode(&both), Err(Defect::Checksum { what: "manifest body", .. })));
    }

    #[test]
    fn files_of_the_wrong_length_lose_their_second_copy() {
        let bytes = sample().encode().unwrap();
        for (len, found) in [(bytes.len() - 4096, "cut by a page"), (4096 + 300, "cut within the copy")] {
            let (decoded, health) = Manifest::decode(&bytes[..len]).unwrap();
            assert_eq!(decoded, sample());
            assert!(matches!(health.defects, [None, Some(Defect::Truncated { .. })]), "{found}: {health:?}");
        }
        let longer = [&bytes[..], &[0; 8192]].concat();
        let (_, health) = Manifest::decode(&longer).unwrap();
        assert!(matches!(
            health.defects,
            [None, Some(Defect::Mismatch { what: "manifest file length", .. })]
        ));
        assert!(matches!(Manifest::decode(&bytes[..300]), Err(Defect::Truncated { .. })));
        assert!(matches!(Manifest::decode(&[]), Err(Defect::Truncated { .. })));
    }

    #[test]
    fn two_good_copies_that_differ_are_reported() {
        let mut bytes = sample().encode().unwrap();
        let other = Manifest { created_unix_ms: 1, ..sample() }.encode().unwrap();
        let half = bytes.len() / 2;
        bytes[half..].copy_from_slice(&other[half..]);
        let (decoded, health) = Manifest::decode(&bytes).unwrap();
        assert_eq!(decoded, sample());
        assert!(matches!(
            health.defects,
            [None, Some(Defect::Mismatch { what: "second copy's checksum", .. })]
        ));
    }

    #[test]
    fn sound_checksums_over_wrong_fields_are_refused() {
        assert_eq!(first(&with_copy(|_, _| ())), Ok(sample()));
        type Change = fn(&mut ManifestHeaderRaw, &mut [u8]);
        let rows: [(&str, Change); 26] = [
            ("manifest flags is 1", |header, _| header.flags = 1),
            ("reserved manifest bytes is 1", |header, _| header.reserved_2[87] = 1),
            ("manifest kind is 4", |header, _| header.kind = 4),
            ("previous link of a manifest that follows none is 6", |header, _| header.kind = KIND_BASE),
            ("previous link of a change is 0", |header, _| header.previous = SnapshotId(0)),
            ("previous link is 7, over the limit of 6", |header, _| header.previous = SnapshotId(7)),
            ("snapshot number is 0", |header, _| {
                (header.kind, header.snapshot) = (KIND_BASE, SnapshotId(0));
                (header.previous, header.previous_crc) = (SnapshotId(0), 0);
            }),
            ("redo lsn is 10, over the limit of 9", |header, _| header.redo.lsn = Lsn(10)),
            ("page id is 9, over the limit of 8", |header, _| header.next_page = 9),
            ("next page id is 0", |header, _| header.next_page = 0),
            ("page's epoch is 3, over the limit of 2", |header, _| header.epoch_high = Epoch(2)),
            ("image file is 2, over the limit of 1", |header, _| header.next_file = 2),
            ("page's lsn is 8, over the limit of 7", |header, _| header.end = Lsn(7)),
            ("manifest body length is", |header, _| header.body_len = u64::MAX),
            ("entry count is", |header, _| header.entry_count = u64::MAX),
            ("tombstone count is", |header, _| header.tombstone_count = u64::MAX),
            ("metadata checksum is", |header, _| header.entry_count -= 1),
            ("metadata checksum is", |header, _| header.tombstone_count -= 1),
            ("page that does not ascend is 4", |_, body| body[0] = 5),
            ("page id or lsn is 0", |_, body| body[0] = 0),
            ("tombstone of a page that is there is 1", |_, body| body[body.len() - ROOT_LEN - 16] = 1),
            ("page's epoch is 0", |_, body| body[8] = 0),
            ("stored length of a raw image is 101", |_, body| body[48] += 1),
            ("image codec is 1", |_, body| body[72] = 1),
            ("place is 9", |_, body| body[73] = 9),
            ("key length is 65", |_, body| body[74] = 65),
        ];
        for (expected, change) in rows {
            let found = first(&with_copy(change)).unwrap_err().to_string();
            assert!(found.contains(expected), "{expected}: {found}");
        }
        let newer = with_copy(|header, _| header.version = 2);
        assert_eq!(first(&newer), Err(Defect::Version { version: 2, features: 0 }));
    }

    #[test]
    fn manifests_that_contradict_themselves_are_not_written() {
        for (why, manifest) in [
            ("entries descend", Manifest { entries: vec![entry(2, 1), entry(1, 1)], ..sample() }),
            ("a page without its image", {
                Manifest { entries: vec![ManifestEntry { image: None, ..entry(1, 1) }], ..sample() }
            }),
            ("an image of an empty page", {
                Manifest { entries: vec![ManifestEntry { image: image(1, 1), ..entry(1, 0) }], ..sample() }
            }),
            ("a device that cannot be", {
                let place = Place::Device(DEVICE_ORDINAL_MAX + 1);
                Manifest { entries: vec![ManifestEntry { place, ..entry(1, 1) }], ..sample() }
            }),
        ] {
            assert!(manifest.encode().is_err(), "{why}");
        }
    }
}
