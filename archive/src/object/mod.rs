//! The encoding of the objects of an archive: keys, headers and contents.
//!
//! The chapter "Objects of an archive" of `format/SPEC.md` specifies the encoding. [`LineObject::decode`] and its
//! counterparts accept untrusted bytes: they return an [`ObjectDefect`] with an offset, and allocate no more memory
//! than the length of their input.

mod key;
mod header;
mod content;
mod defect;

use std::ops::Deref;

use remanent_format::StoreId;
use remanent_format::layout::layout;
use remanent_format::limits::NUMBER_MAX;

use content::OwnFields;
use defect::{Cursor, check_field, check_limit, put};
use header::check_point;

pub use content::{
    Boundary, BoundaryRaw, Catalog, CatalogRaw, Content, Fence, FenceRaw, KeptFence, KeptSnapshot,
    KeptSnapshotRaw, Manifest, ManifestRaw, Run, RunRaw, predecessor,
};
pub use defect::{Defect, ObjectDefect};
pub(crate) use header::Crc64;
pub use header::{
    BatchPoint, DATA_OBJECT_LEN_MAX, Header, Kind, LINE_OBJECT_LEN_MAX, Nonce, OBJECT_MAGIC, OBJECT_VERSION,
    ObjectHeaderRaw, crc64,
};
pub use key::{DataKey, Folder, ObjectKey};

/// Maximum length of the payload of a data object in bytes.
pub const PART_LEN_MAX: usize = DATA_OBJECT_LEN_MAX - ObjectHeaderRaw::LEN;
/// Maximum length in bytes of the frames inside a run's own object. For longer runs, data objects contain the frames.
pub const INLINE_FRAMES_LEN_MAX: usize =
    LINE_OBJECT_LEN_MAX - ObjectHeaderRaw::LEN - LineHeadRaw::LEN - RunRaw::LEN;

layout! {
    /// The encoded start of the body of a line object.
    pub struct LineHeadRaw: 64 {
        /// Position of the newest fence below the object, or zero.
        0 => fence: u64,
        /// Position of the newest boundary below the object, or zero.
        8 => boundary: u64,
        /// Position of the newest manifest below the object, or zero.
        16 => manifest: u64,
        /// Position of the newest object below this one that lists data objects, or zero.
        24 => listing: u64,
        /// The last archived batch, including the batches of this object.
        32 => archived: BatchPoint,
        /// Number of data objects that the object lists.
        52 => listed: u32,
        /// Position of the newest catalog below the object, or zero.
        56 => catalog: u64,
    }
}

layout! {
    /// The encoded entry of a list of data objects.
    pub struct DataRefRaw: 64 {
        /// Term in the key of the data object.
        0 => term: u64,
        /// Random number in the key.
        8 => random: u64,
        /// Number in the key.
        16 => index: u64,
        /// Length of the payload in bytes.
        24 => len: u64,
        /// CRC-64 of the payload.
        32 => crc: u64,
        /// Kind of the file that the payload is part of.
        40 => role: u32,
        /// Reserved, always zero.
        44 => reserved: u32,
        /// Number of the file.
        48 => file: u64,
        /// Offset of the payload in the file.
        56 => offset: u64,
    }
}

layout! {
    /// The encoded start of the body of a copy of a boundary.
    pub struct BoundRaw: 8 {
        /// Position of the boundary on the line.
        0 => position: u64,
    }
}

layout! {
    /// The encoded body of the hint.
    pub struct HintRaw: 40 {
        /// Position of the last object of the line.
        0 => end: u64,
        /// Position of the newest manifest, or zero if there is none.
        8 => manifest: u64,
        /// Number of the newest boundary, or zero if there is none.
        16 => bound: u64,
        /// Position from which a restore of the end reads the line.
        24 => start: u64,
        /// Number of further positions.
        32 => lines: u32,
        /// Number of data objects.
        36 => data: u32,
    }
}

layout! {
    /// The encoded key of a data object in a hint.
    pub struct DataKeyRaw: 24 {
        /// Term in the key.
        0 => term: u64,
        /// Random number in the key.
        8 => random: u64,
        /// Number in the key.
        16 => index: u64,
    }
}

/// Positions of the newest object of each kind. Zero means that there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// The newest fence.
    pub fence: u64,
    /// The newest boundary.
    pub boundary: u64,
    /// The newest manifest.
    pub manifest: u64,
    /// The newest object that lists data objects.
    pub listing: u64,
    /// The newest catalog.
    pub catalog: u64,
}

impl Links {
    /// Returns the links that the object after `object` must contain, given the links of `object` itself.
    #[must_use]
    pub fn after(mut self, object: &LineObject) -> Self {
        let position = object.position;
        match object.content {
            Content::Fence(_) => self.fence = position,
            Content::Boundary(_) => self.boundary = position,
            Content::Manifest(_) => self.manifest = position,
            Content::Catalog(_) => self.catalog = position,
            Content::Run(_) => {}
        }
        if !object.data.is_empty() {
            self.listing = position;
        }
        self
    }
}

/// The kind of a file of which data objects contain parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Role {
    /// Frames of the log. The file number is the Lsn of the first batch.
    Frames = 1,
    /// An image file.
    Images = 2,
    /// The page table of an earlier state, stored in `pages/`.
    Table = 3,
    /// A manifest file: one link of a snapshot.
    Link = 4,
}

impl Role {
    /// All roles, ordered by number.
    pub const ALL: [Role; 4] = [Role::Frames, Role::Images, Role::Table, Role::Link];

    /// Returns the name of the role that SPEC.md uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Role::Frames => "frames",
            Role::Images => "images",
            Role::Table => "table",
            Role::Link => "link",
        }
    }
}

/// A part of a file of the store, at most 8 MiB long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    /// Kind of the file.
    pub role: Role,
    /// Number of the file.
    pub file: u64,
    /// Offset of the part in the file in bytes.
    pub offset: u64,
    /// Length of the part in bytes.
    pub len: u64,
    /// CRC-64 of the bytes of the part.
    pub crc: u64,
}

/// An entry of a list of data objects: a part, and the key of the data object that contains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DataRef {
    /// Key of the data object.
    pub key: DataKey,
    /// The part that the data object contains.
    pub part: Part,
}

/// A decoded line object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineObject {
    /// The id of the store.
    pub store: StoreId,
    /// Position of the object on the line.
    pub position: u64,
    /// Term of the writer.
    pub term: u64,
    /// Nonce of the object.
    pub nonce: Nonce,
    /// Nonce of the object at the previous position, or zero.
    pub nonce_before: Nonce,
    /// Positions of the newest object of each kind below this one.
    pub links: Links,
    /// The last archived batch, including the batches of this object.
    pub archived: BatchPoint,
    /// The data objects that the object lists.
    pub data: Vec<DataRef>,
    /// The contents of the object.
    pub content: Content,
}

/// The copy of a boundary in the folder `bound`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The boundary object on the line.
    pub object: LineObject,
}

/// A hint at the objects that a restore of the end of the line reads. It may be missing, out of date or wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// Position of the last object of the line.
    pub end: u64,
    /// Position of the newest manifest, or zero if there is none.
    pub manifest: u64,
    /// Number of the newest boundary, or zero if there is none.
    pub bound: u64,
    /// Position from which the line is read, or zero if it is not known.
    pub start: u64,
    /// Further positions that are read, at most [`LINES_MAX`](Self::LINES_MAX).
    pub lines: Vec<u64>,
    /// Data objects that are read, at most [`DATA_MAX`](Self::DATA_MAX).
    pub data: Vec<DataKey>,
}

impl LineObject {
    /// Encodes the object.
    ///
    /// # Errors
    /// Returns [`Defect::Limit`] if the object is longer than 4 MiB.
    pub fn encode(&self) -> Result<Vec<u8>, ObjectDefect> {
        let header = Header {
            kind: self.content.kind(),
            store: self.store,
            key: ObjectKey::Line(self.position),
            term: self.term,
            nonce: self.nonce,
            nonce_before: self.nonce_before,
        };
        let body = self.encode_body();
        let len = ObjectHeaderRaw::LEN + body.len();
        check_limit("length of a line object", len as u64, LINE_OBJECT_LEN_MAX as u64, 0)?;
        Ok(header.encode(&body))
    }

    fn encode_body(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let head = LineHeadRaw {
            fence: self.links.fence,
            boundary: self.links.boundary,
            manifest: self.links.manifest,
            listing: self.links.listing,
            archived: self.archived,
            listed: self.data.len() as u32,
            catalog: self.links.catalog,
        };
        body.extend_from_slice(&head.to_bytes());
        for entry in &self.data {
            body.extend_from_slice(&entry.to_raw().to_bytes());
        }
        self.content.encode(&mut body);
        body
    }

    /// Decodes the line object at `position`. If `store` is set, the object must belong to this store.
    ///
    /// # Errors
    /// Returns an [`ObjectDefect`] if the object is invalid, has another key, or belongs to another store.
    pub fn decode(bytes: &[u8], position: u64, store: Option<StoreId>) -> Result<Self, ObjectDefect> {
        let (header, body) = decode_at(bytes, ObjectKey::Line(position), store)?;
        let mut cursor = Cursor::new(body, ObjectHeaderRaw::LEN);
        Self::decode_body(&header, position, header.kind, &mut cursor)
    }

    /// Decodes the body of a line object, or of the boundary that a copy contains (SPEC A6).
    fn decode_body(
        header: &Header,
        position: u64,
        kind: Kind,
        cursor: &mut Cursor<'_>,
    ) -> Result<Self, ObjectDefect> {
        let at = cursor.offset();
        let raw = LineHeadRaw::from_bytes(cursor.array()?);
        let LineHeadRaw { fence, boundary, manifest, listing, catalog, .. } = raw;
        let links = Links { fence, boundary, manifest, listing, catalog };
        let offsets = [0, 8, 16, 24, 56];
        for (link, offset) in [fence, boundary, manifest, listing, catalog].into_iter().zip(offsets) {
            check_field(link < position, "position of an object below", link, at + offset)?;
        }
        check_point("last archived batch", &raw.archived, at + 32)?;
        cursor.check_count(raw.listed, DataRefRaw::LEN)?;
        let mut data = Vec::with_capacity(raw.listed as usize);
        for _ in 0..raw.listed {
            data.push(DataRef::decode(cursor)?);
        }
        let own = OwnFields {
            store: header.store,
            position,
            nonce: header.nonce,
            listed: raw.listed,
            // The sum cannot overflow, because each length is at most 8 MiB, and the number of entries is less than the
            // number of bytes of the object.
            listed_bytes: data.iter().map(|entry: &DataRef| entry.part.len).sum(),
        };
        let content = Content::decode(kind, cursor, own)?;
        if let Content::Manifest(manifest) = &content {
            let start = at + LineHeadRaw::LEN + data.len() * DataRefRaw::LEN + 8;
            check_field(manifest.start <= position, "start of a manifest", manifest.start, start)?;
        }
        Ok(Self {
            store: header.store,
            position,
            term: header.term,
            nonce: header.nonce,
            nonce_before: header.nonce_before,
            links,
            archived: raw.archived,
            data,
            content,
        })
    }
}

impl DataRef {
    fn to_raw(self) -> DataRefRaw {
        let Self { key, part } = self;
        DataRefRaw {
            term: key.term,
            random: key.random,
            index: key.index,
            len: part.len,
            crc: part.crc,
            role: part.role as u32,
            reserved: 0,
            file: part.file,
            offset: part.offset,
        }
    }

    /// Decodes an entry of a list of data objects (SPEC A7).
    fn decode(cursor: &mut Cursor<'_>) -> Result<Self, ObjectDefect> {
        let at = cursor.offset();
        let raw = DataRefRaw::from_bytes(cursor.array()?);
        for (field, number) in [raw.term, raw.random, raw.index].into_iter().enumerate() {
            check_limit("number in the key of a data object", number, NUMBER_MAX, at + 8 * field)?;
        }
        check_limit("length of a part", raw.len, PART_LEN_MAX as u64, at + 24)?;
        let role = Role::ALL.into_iter().find(|role| *role as u32 == raw.role);
        let role =
            role.ok_or_else(|| Defect::Field { what: "role of a part", found: raw.role.into() }.at(at + 40))?;
        check_field(raw.reserved == 0, "reserved field of a part", raw.reserved.into(), at + 44)?;
        check_limit("number of a file", raw.file, NUMBER_MAX, at + 48)?;
        check_limit("offset of a part", raw.offset, NUMBER_MAX, at + 56)?;
        Ok(Self {
            key: DataKey { term: raw.term, random: raw.random, index: raw.index },
            part: Part { role, file: raw.file, offset: raw.offset, len: raw.len, crc: raw.crc },
        })
    }
}

impl Bound {
    /// Returns the number of the boundary, or 0 if the object is not a boundary. Decoding rejects such an object.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.boundary().map_or(0, |boundary| boundary.number)
    }

    /// Returns the contents of the boundary.
    #[must_use]
    pub fn boundary(&self) -> Option<&Boundary> {
        if let Content::Boundary(boundary) = &self.object.content { Some(boundary) } else { None }
    }

    /// Encodes the copy. The same boundary always has the same encoding, so any process may create its copy.
    ///
    /// # Errors
    /// Returns [`Defect::Limit`] if the copy is longer than 4 MiB.
    pub fn encode(&self) -> Result<Vec<u8>, ObjectDefect> {
        let object = &self.object;
        let header = Header {
            kind: Kind::Bound,
            store: object.store,
            key: ObjectKey::Bound(self.number()),
            term: object.term,
            nonce: object.nonce,
            nonce_before: object.nonce_before,
        };
        let mut body = Vec::new();
        put(&mut body, &object.position);
        body.extend_from_slice(&object.encode_body());
        let len = ObjectHeaderRaw::LEN + body.len();
        check_limit("length of a boundary's copy", len as u64, LINE_OBJECT_LEN_MAX as u64, 0)?;
        Ok(header.encode(&body))
    }

    /// Decodes the copy of boundary `number` (SPEC B3).
    ///
    /// # Errors
    /// Returns an [`ObjectDefect`] if the object is invalid, has another key, or belongs to another store.
    pub fn decode(bytes: &[u8], number: u64, store: Option<StoreId>) -> Result<Self, ObjectDefect> {
        let (header, body) = decode_at(bytes, ObjectKey::Bound(number), store)?;
        let mut cursor = Cursor::new(body, ObjectHeaderRaw::LEN);
        let raw = BoundRaw::from_bytes(cursor.array()?);
        check_limit("position of a boundary", raw.position, NUMBER_MAX, ObjectHeaderRaw::LEN)?;
        let object = LineObject::decode_body(&header, raw.position, Kind::Boundary, &mut cursor)?;
        let bound = Self { object };
        check_field(bound.number() == number, "number of a boundary", bound.number(), ObjectHeaderRaw::LEN)?;
        let start = bound.boundary().map_or(0, |boundary| boundary.start);
        check_field(start < raw.position, "start of a boundary", start, ObjectHeaderRaw::LEN)?;
        Ok(bound)
    }
}

impl Hint {
    /// Number of positions after `end` for which a search first looks, at distances 1, 3, 7 and so on.
    pub const PROBES: u32 = 4;
    /// Maximum number of positions in `lines`.
    pub const LINES_MAX: usize = 32;
    /// Maximum number of data objects. A reader fetches all of them at once.
    pub const DATA_MAX: usize = 8;

    /// Encodes the hint as an object of `store`, written in `term`.
    #[must_use]
    pub fn encode(&self, store: StoreId, term: u64) -> Vec<u8> {
        let nonce = Nonce::default();
        let header =
            Header { kind: Kind::Hint, store, key: ObjectKey::Newest, term, nonce, nonce_before: nonce };
        let raw = HintRaw {
            end: self.end,
            manifest: self.manifest,
            bound: self.bound,
            start: self.start,
            lines: self.lines.len() as u32,
            data: self.data.len() as u32,
        };
        let mut body = raw.to_bytes().to_vec();
        self.lines.iter().for_each(|position| body.extend_from_slice(&position.to_le_bytes()));
        for DataKey { term, random, index } in self.data.iter().copied() {
            body.extend_from_slice(&DataKeyRaw { term, random, index }.to_bytes());
        }
        header.encode(&body)
    }

    /// Decodes the hint (SPEC B5).
    ///
    /// # Errors
    /// Returns an [`ObjectDefect`] if the object is invalid or belongs to another store. The caller then continues
    /// without a hint.
    pub fn decode(bytes: &[u8], store: Option<StoreId>) -> Result<Self, ObjectDefect> {
        let (_, body) = decode_at(bytes, ObjectKey::Newest, store)?;
        let mut cursor = Cursor::new(body, ObjectHeaderRaw::LEN);
        let raw = HintRaw::from_bytes(cursor.array()?);
        let HintRaw { end, manifest, bound, start, lines, data } = raw;
        let at = ObjectHeaderRaw::LEN;
        for (field, number) in [end, manifest, bound, start].into_iter().enumerate() {
            check_limit("number in the hint", number, NUMBER_MAX, at + 8 * field)?;
        }
        check_limit("number of positions", lines.into(), Self::LINES_MAX as u64, at + 32)?;
        check_limit("number of data objects", data.into(), Self::DATA_MAX as u64, at + 36)?;
        let mut hint = Self { end, manifest, bound, start, ..Self::default() };
        for entry in 0..lines as usize {
            let position = u64::from_le_bytes(*cursor.array()?);
            check_limit("position in the hint", position, NUMBER_MAX, at + HintRaw::LEN + 8 * entry)?;
            hint.lines.push(position);
        }
        let at = at + HintRaw::LEN + 8 * hint.lines.len();
        for entry in 0..data as usize {
            let DataKeyRaw { term, random, index } = DataKeyRaw::from_bytes(cursor.array()?);
            for (field, number) in [term, random, index].into_iter().enumerate() {
                let at = at + DataKeyRaw::LEN * entry + 8 * field;
                check_limit("number of a data object in the hint", number, NUMBER_MAX, at)?;
            }
            hint.data.push(DataKey { term, random, index });
        }
        cursor.finish()?;
        Ok(hint)
    }
}

/// Encodes a data object that contains `payload`.
///
/// # Errors
/// Returns [`Defect::Limit`] if the object is longer than 8 MiB.
pub fn encode_data(
    store: StoreId,
    key: DataKey,
    nonce: Nonce,
    payload: &[u8],
) -> Result<Vec<u8>, ObjectDefect> {
    check_limit("length of a part", payload.len() as u64, PART_LEN_MAX as u64, 0)?;
    Ok(data_header(store, key, nonce).encode(payload))
}

/// Completes a data object whose payload is in `object` from [`ObjectHeaderRaw::LEN`] on, and has the CRC-64 `crc`.
///
/// # Errors
/// Returns [`Defect::Limit`] if the object is longer than 8 MiB.
pub(crate) fn encode_data_header(
    store: StoreId,
    key: DataKey,
    nonce: Nonce,
    crc: u64,
    object: &mut [u8],
) -> Result<(), ObjectDefect> {
    let len = object.len() - ObjectHeaderRaw::LEN;
    check_limit("length of a part", len as u64, PART_LEN_MAX as u64, 0)?;
    let header = data_header(store, key, nonce).encode_alone(len, crc);
    object[..ObjectHeaderRaw::LEN].copy_from_slice(&header);
    Ok(())
}

fn data_header(store: StoreId, key: DataKey, nonce: Nonce) -> Header {
    let (term, nonce_before) = (key.term, Nonce::default());
    Header { kind: Kind::Data, store, key: ObjectKey::Data(key), term, nonce, nonce_before }
}

/// Checks a data object against its entry in a list, and returns its payload (SPEC B4).
///
/// # Errors
/// Returns an [`ObjectDefect`] if the object is invalid, or if its length or checksum differ from the entry.
pub fn decode_data<'a>(bytes: &'a [u8], entry: &DataRef, store: StoreId) -> Result<&'a [u8], ObjectDefect> {
    let (header, payload, computed) = Header::decode_with_crc(bytes)?;
    header.check_place(ObjectKey::Data(entry.key), Some(store))?;
    let at = ObjectHeaderRaw::LEN;
    check_field(payload.len() as u64 == entry.part.len, "length of a part", payload.len() as u64, at)?;
    if computed != entry.part.crc {
        return Err(Defect::BodyChecksum { found: entry.part.crc, computed }.at(at));
    }
    Ok(payload)
}

/// The payload of a data object, stored in the buffer that received the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    object: Vec<u8>,
    /// Offset of the payload in `object`.
    start: usize,
}

impl Payload {
    /// Checks a data object like [`decode_data`], and returns its payload without copying it.
    ///
    /// # Errors
    /// Returns the errors of [`decode_data`].
    pub fn decode(object: Vec<u8>, entry: &DataRef, store: StoreId) -> Result<Self, ObjectDefect> {
        decode_data(&object, entry, store)?;
        Ok(Self { object, start: ObjectHeaderRaw::LEN })
    }

    /// Returns the payload without the header of its object.
    #[must_use]
    pub fn into_bytes(mut self) -> Vec<u8> {
        self.object.drain(..self.start);
        self.object
    }
}

impl From<Vec<u8>> for Payload {
    /// Uses all of `bytes`, which are not in a data object.
    fn from(bytes: Vec<u8>) -> Self {
        Self { object: bytes, start: 0 }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.object[self.start..]
    }
}

/// Encodes an object for a probe of the bucket.
#[must_use]
pub fn encode_probe(store: StoreId, number: u64, nonce: Nonce) -> Vec<u8> {
    let key = ObjectKey::Probe(number);
    Header { kind: Kind::Probe, store, key, term: 0, nonce, nonce_before: Nonce::default() }.encode(&[])
}

/// Checks an object of any kind against its checksums, and returns its header.
///
/// # Errors
/// Returns an [`ObjectDefect`] if the object is invalid.
pub fn decode_header(bytes: &[u8]) -> Result<Header, ObjectDefect> {
    Header::decode(bytes).map(|(header, _)| header)
}

/// Decodes and checks the object that is stored under `key`. If `store` is set, the object must belong to this store.
fn decode_at(bytes: &[u8], key: ObjectKey, store: Option<StoreId>) -> Result<(Header, &[u8]), ObjectDefect> {
    let (header, body) = Header::decode(bytes)?;
    header.check_place(key, store)?;
    Ok((header, body))
}
