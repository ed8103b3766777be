//! Defects in the encoding of an object, with their offsets.

use remanent_format::layout::Field;

/// The reason why the bytes of an object are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// A structure extends past the end of the object.
    #[error("truncated: {needed} bytes needed, {have} bytes available")]
    Truncated {
        /// Number of bytes that the structure needs.
        needed: u64,
        /// Number of bytes that are available.
        have: u64,
    },
    /// The object does not start with the magic number of archive objects.
    #[error("not an archive object: the magic number does not match")]
    Magic,
    /// The checksum of the header is wrong.
    #[error("header checksum is {found:#010x}, but the checksum of the bytes is {computed:#010x}")]
    HeaderChecksum {
        /// The stored checksum.
        found: u32,
        /// The checksum of the bytes.
        computed: u32,
    },
    /// The checksum of the body is wrong.
    #[error("body checksum is {found:#018x}, but the checksum of the bytes is {computed:#018x}")]
    BodyChecksum {
        /// The stored checksum.
        found: u64,
        /// The checksum of the bytes.
        computed: u64,
    },
    /// The object has a version that this build does not support.
    #[error("object version {found} is newer than this build")]
    Version {
        /// The version that was found.
        found: u32,
    },
    /// The object belongs to another store.
    #[error("belongs to another store")]
    Foreign,
    /// The object is stored under another key than its header states.
    #[error("the header states another key")]
    Misplaced,
    /// A length or count exceeds its limit.
    #[error("{what} is {found}, over the limit of {limit}")]
    Limit {
        /// Name of the length or count.
        what: &'static str,
        /// Value that was found.
        found: u64,
        /// Largest permitted value.
        limit: u64,
    },
    /// A field contains an invalid value.
    #[error("{what} is {found}")]
    Field {
        /// Name of the field.
        what: &'static str,
        /// Value that was found.
        found: u64,
    },
    /// A structure of the store format, such as a segment header, is invalid.
    #[error(transparent)]
    Store(#[from] remanent_format::Defect),
}

/// A defect and its location in the object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at offset {offset}: {defect}")]
pub struct ObjectDefect {
    /// Offset of the invalid structure or field in bytes, from the start of the object.
    pub offset: u64,
    /// The reason why the bytes are invalid.
    pub defect: Defect,
}

impl Defect {
    /// Returns the defect together with its offset in the object.
    #[must_use]
    pub fn at(self, offset: usize) -> ObjectDefect {
        ObjectDefect { offset: offset as u64, defect: self }
    }
}

pub(super) fn check_limit(
    what: &'static str,
    found: u64,
    limit: u64,
    offset: usize,
) -> Result<(), ObjectDefect> {
    if found <= limit { Ok(()) } else { Err(Defect::Limit { what, found, limit }.at(offset)) }
}

pub(super) fn check_field(
    ok: bool,
    what: &'static str,
    found: u64,
    offset: usize,
) -> Result<(), ObjectDefect> {
    if ok { Ok(()) } else { Err(Defect::Field { what, found }.at(offset)) }
}

pub(super) fn check_zeros(what: &'static str, bytes: &[u8], offset: usize) -> Result<(), ObjectDefect> {
    let other = bytes.iter().find(|&&byte| byte != 0);
    check_field(other.is_none(), what, other.map_or(0, |&byte| byte.into()), offset)
}

/// A cursor that reads the structures of an object in order, and never past the end of the object.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], offset: usize) -> Self {
        Self { bytes, offset }
    }

    /// Returns the offset of the next byte in the object.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], ObjectDefect> {
        let truncated = Defect::Truncated { needed: len as u64, have: self.bytes.len() as u64 };
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or_else(|| truncated.at(self.offset))?;
        self.bytes = rest;
        self.offset += len;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], ObjectDefect> {
        Ok(self.take(N)?.try_into().expect("take returned N bytes"))
    }

    /// Returns all remaining bytes.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        let bytes = std::mem::take(&mut self.bytes);
        self.offset += bytes.len();
        bytes
    }

    /// Checks that `count` structures of `len` bytes each are available. Call this before memory is reserved for them.
    pub(super) fn check_count(&self, count: u32, len: usize) -> Result<(), ObjectDefect> {
        let needed = u64::from(count) * len as u64;
        let have = self.bytes.len() as u64;
        if needed <= have { Ok(()) } else { Err(Defect::Truncated { needed, have }.at(self.offset)) }
    }

    pub(super) fn finish(&self) -> Result<(), ObjectDefect> {
        check_field(
            self.bytes.is_empty(),
            "number of bytes after the last structure",
            self.bytes.len() as u64,
            self.offset,
        )
    }
}

/// Appends the encoding of a field to `bytes`.
pub(super) fn put<T: Field>(out: &mut Vec<u8>, value: &T) {
    let at = out.len();
    out.resize(at + T::SIZE, 0);
    value.put(&mut out[at..]);
}
