//! The header at the start of every object.

use std::fmt;

use remanent_format::layout::{Field, layout};
use remanent_format::limits::NUMBER_MAX;
use remanent_format::{Incarnation, Lsn, StoreId};

use super::defect::{Defect, ObjectDefect, check_field, check_limit, check_zeros};
use super::key::{DataKey, ObjectKey};

/// Magic bytes at the start of every object.
pub const OBJECT_MAGIC: [u8; 8] = *b"RMNTARCH";
/// Version of the object format.
pub const OBJECT_VERSION: u32 = 1;
/// Maximum length in bytes of a line object, a copy of a boundary, a hint or a probe.
pub const LINE_OBJECT_LEN_MAX: usize = 4 << 20;
/// Maximum length of a data object in bytes.
pub const DATA_OBJECT_LEN_MAX: usize = 8 << 20;

layout! {
    /// The encoded header of an object.
    pub struct ObjectHeaderRaw: 128 {
        /// Magic bytes, always `RMNTARCH`.
        0 => magic: [u8; 8],
        /// Version of the object format; always 1.
        8 => version: u32,
        /// The kind of the object.
        12 => kind: u32,
        /// The id of the store.
        16 => store: StoreId,
        /// For a data object: the term in its own key. Otherwise zero.
        32 => key_term: u64,
        /// For a data object: the random number in its own key. Otherwise zero.
        40 => key_random: u64,
        /// The number in the object's own key.
        48 => key_number: u64,
        /// Term of the writer that created the object.
        56 => term: u64,
        /// Nonce of the object.
        64 => nonce: Nonce,
        /// Nonce of the preceding line object, or zero.
        80 => nonce_before: Nonce,
        /// Length of the body in bytes.
        96 => body_len: u64,
        /// CRC-64 of the body.
        104 => body_crc: u64,
        /// Reserved, always zero.
        112 => reserved: [u8; 12],
        /// CRC-32 of the preceding bytes.
        124 => header_crc: u32,
    }
}

/// A random number that identifies an object, so that a process recognizes the objects that it created. Zero means that
/// there is no nonce.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nonce(pub [u8; 16]);

impl fmt::Display for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nonce({self})")
    }
}

impl Field for Nonce {
    const SIZE: usize = 16;
    fn put(&self, out: &mut [u8]) {
        self.0.put(out);
    }
    fn get(bytes: &[u8]) -> Self {
        Self(Field::get(bytes))
    }
}

/// A batch and the history up to that batch, identified by the Lsn, the incarnation and the chain hash of the batch's
/// frame. All zeros represent the empty store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BatchPoint {
    /// The incarnation that wrote the frame.
    pub incarnation: Incarnation,
    /// Lsn of the batch.
    pub lsn: Lsn,
    /// Chain hash of the frame.
    pub chain: u32,
}

impl fmt::Display for BatchPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lsn {} in incarnation {}", self.lsn, self.incarnation)
    }
}

impl Field for BatchPoint {
    const SIZE: usize = 20;
    fn put(&self, out: &mut [u8]) {
        self.incarnation.put(out);
        self.lsn.put(&mut out[8..]);
        self.chain.put(&mut out[16..]);
    }
    fn get(bytes: &[u8]) -> Self {
        Self { incarnation: Field::get(bytes), lsn: Field::get(&bytes[8..]), chain: Field::get(&bytes[16..]) }
    }
}

/// The kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Kind {
    /// A line object that starts the term of a writer.
    Fence = 1,
    /// A line object that contains frames of the log.
    Run = 2,
    /// A line object that names a snapshot.
    Manifest = 3,
    /// A line object that permits deleting objects below its start.
    Boundary = 4,
    /// The copy of a boundary, stored under the number of the boundary.
    Bound = 5,
    /// A part of a file or of a long run.
    Data = 6,
    /// The hint, which states the position of the end of the line.
    Hint = 7,
    /// An object that a probe of the bucket creates.
    Probe = 8,
    /// A line object that lists the named snapshots that the archive keeps.
    Catalog = 9,
}

impl Kind {
    /// All kinds, ordered by number.
    pub const ALL: [Kind; 9] = [
        Kind::Fence,
        Kind::Run,
        Kind::Manifest,
        Kind::Boundary,
        Kind::Bound,
        Kind::Data,
        Kind::Hint,
        Kind::Probe,
        Kind::Catalog,
    ];

    /// Returns the name of the kind that SPEC.md uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Fence => "fence",
            Kind::Run => "run",
            Kind::Manifest => "manifest",
            Kind::Boundary => "boundary",
            Kind::Bound => "bound",
            Kind::Data => "data",
            Kind::Hint => "hint",
            Kind::Probe => "probe",
            Kind::Catalog => "catalog",
        }
    }
}

/// The decoded header of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the object.
    pub kind: Kind,
    /// The id of the store.
    pub store: StoreId,
    /// The key under which the object was created.
    pub key: ObjectKey,
    /// Term of the writer: the position of its fence. For a fence, its own position.
    pub term: u64,
    /// Nonce of the object. For a copy of a boundary, this is the nonce of the boundary.
    pub nonce: Nonce,
    /// Nonce of the preceding line object, or zero.
    pub nonce_before: Nonce,
}

impl Header {
    /// Encodes an object that consists of this header and `body`.
    pub(super) fn encode(&self, body: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(ObjectHeaderRaw::LEN + body.len());
        out.extend_from_slice(&self.encode_alone(body.len(), crc64(body)));
        out.extend_from_slice(body);
        out
    }

    /// Encodes the header of an object with a body of `body_len` bytes.
    pub(super) fn encode_alone(&self, body_len: usize, body_crc: u64) -> [u8; ObjectHeaderRaw::LEN] {
        let [key_term, key_random, key_number] = self.key.numbers();
        let mut raw = ObjectHeaderRaw {
            magic: OBJECT_MAGIC,
            version: OBJECT_VERSION,
            kind: self.kind as u32,
            store: self.store,
            key_term,
            key_random,
            key_number,
            term: self.term,
            nonce: self.nonce,
            nonce_before: self.nonce_before,
            body_len: body_len as u64,
            body_crc,
            reserved: [0; 12],
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..124]);
        raw.to_bytes()
    }

    /// Checks the header of an object and the checksum of its body (SPEC A1 to A5), and returns both. Does not decode
    /// the body.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), ObjectDefect> {
        Self::decode_with_crc(bytes).map(|(header, body, _)| (header, body))
    }

    /// Checks an object like [`decode`](Self::decode), and also returns the CRC-64 of its body.
    pub(super) fn decode_with_crc(bytes: &[u8]) -> Result<(Self, &[u8], u64), ObjectDefect> {
        let truncated = Defect::Truncated { needed: ObjectHeaderRaw::LEN as u64, have: bytes.len() as u64 };
        let (head, body) = bytes.split_first_chunk().ok_or_else(|| truncated.at(0))?;
        let raw = ObjectHeaderRaw::from_bytes(head);
        if raw.magic != OBJECT_MAGIC {
            return Err(Defect::Magic.at(0));
        }
        let computed = crc32fast::hash(&head[..124]);
        if raw.header_crc != computed {
            return Err(Defect::HeaderChecksum { found: raw.header_crc, computed }.at(124));
        }
        if raw.version != OBJECT_VERSION {
            return Err(Defect::Version { found: raw.version }.at(8));
        }
        check_zeros("reserved byte of the header", &raw.reserved, 112)?;
        let header = Self::check_fields(&raw)?;
        let limit = if header.kind == Kind::Data { DATA_OBJECT_LEN_MAX } else { LINE_OBJECT_LEN_MAX };
        check_limit("length of the body", raw.body_len, (limit - ObjectHeaderRaw::LEN) as u64, 96)?;
        if body.len() as u64 != raw.body_len {
            return Err(Defect::Truncated { needed: raw.body_len, have: body.len() as u64 }.at(96));
        }
        let computed = crc64(body);
        if raw.body_crc != computed {
            return Err(Defect::BodyChecksum { found: raw.body_crc, computed }.at(104));
        }
        Ok((header, body, computed))
    }

    /// Checks that the object belongs under `key` and, if `store` is set, to this store.
    pub(super) fn check_place(&self, key: ObjectKey, store: Option<StoreId>) -> Result<(), ObjectDefect> {
        if store.is_some_and(|store| self.store != store) {
            return Err(Defect::Foreign.at(16));
        }
        if self.key != key {
            return Err(Defect::Misplaced.at(32));
        }
        Ok(())
    }

    /// Checks kind, key, term and nonces (SPEC A3).
    fn check_fields(raw: &ObjectHeaderRaw) -> Result<Self, ObjectDefect> {
        let known = Kind::ALL.into_iter().find(|kind| *kind as u32 == raw.kind);
        let kind = known.ok_or_else(|| Defect::Field { what: "kind", found: raw.kind.into() }.at(12))?;
        check_limit("term in the key", raw.key_term, NUMBER_MAX, 32)?;
        check_limit("random number in the key", raw.key_random, NUMBER_MAX, 40)?;
        check_limit("number in the key", raw.key_number, NUMBER_MAX, 48)?;
        check_limit("term", raw.term, NUMBER_MAX, 56)?;
        let key = match kind {
            Kind::Fence | Kind::Run | Kind::Manifest | Kind::Boundary | Kind::Catalog => {
                ObjectKey::Line(raw.key_number)
            }
            Kind::Bound => ObjectKey::Bound(raw.key_number),
            Kind::Data => {
                ObjectKey::Data(DataKey { term: raw.key_term, random: raw.key_random, index: raw.key_number })
            }
            Kind::Hint => ObjectKey::Newest,
            Kind::Probe => ObjectKey::Probe(raw.key_number),
        };
        let is_numbered = matches!(key, ObjectKey::Line(_) | ObjectKey::Bound(_));
        check_field(!is_numbered || raw.key_number > 0, "number in the key", 0, 48)?;
        let unused = [raw.key_term, raw.key_random, raw.key_number]
            .iter()
            .zip(key.numbers())
            .position(|(a, b)| *a != b);
        check_field(unused.is_none(), "unused number in the key", 1, 32 + 8 * unused.unwrap_or(0))?;
        check_field((raw.nonce == Nonce::default()) == (kind == Kind::Hint), "nonce", 0, 64)?;
        let is_unordered = matches!(kind, Kind::Data | Kind::Hint | Kind::Probe);
        check_field(!is_unordered || raw.nonce_before == Nonce::default(), "unused nonce before", 1, 80)?;
        let own_term = match kind {
            Kind::Fence => raw.key_number,
            Kind::Data => raw.key_term,
            Kind::Probe => 0,
            _ => raw.term,
        };
        check_field(raw.term == own_term, "term", raw.term, 56)?;
        check_field(kind != Kind::Probe || raw.body_len == 0, "length of a probe's body", raw.body_len, 96)?;
        Ok(Self {
            kind,
            store: raw.store,
            key,
            term: raw.term,
            nonce: raw.nonce,
            nonce_before: raw.nonce_before,
        })
    }
}

/// Returns the CRC-64/XZ of `bytes`.
#[must_use]
pub fn crc64(bytes: &[u8]) -> u64 {
    let mut digest = Crc64::new();
    digest.write(bytes);
    digest.sum()
}

/// The CRC-64/XZ of bytes that arrive in pieces.
pub(crate) struct Crc64(crc64fast::Digest);

impl Crc64 {
    pub fn new() -> Self {
        Self(crc64fast::Digest::new())
    }

    pub fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub fn sum(&self) -> u64 {
        self.0.sum64()
    }
}

pub(super) fn check_point(what: &'static str, point: &BatchPoint, offset: usize) -> Result<(), ObjectDefect> {
    check_limit(what, point.lsn.0, NUMBER_MAX, offset + 8)?;
    let is_empty = point.lsn.0 == 0;
    check_field(!is_empty || *point == BatchPoint::default(), what, point.chain.into(), offset)
}
