//! Defects of bytes, and the place where each was found.

use std::{fmt, io};

use crate::ids::{LogPoint, Lsn};
use crate::limits::{NUMBER_MAX, SEGMENT_LEN_MAX};
use crate::names::FileName;

/// The reason why bytes are not as they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// The structure does not fit into the bytes that are there.
    #[error("cut short: {needed} bytes needed, {have} there")]
    Truncated {
        /// Bytes that the structure takes.
        needed: u64,
        /// Bytes that are there.
        have: u64,
    },
    /// The first bytes are not this structure's.
    #[error("not a {expected}: the magic number does not match")]
    Magic {
        /// The structure that was expected.
        expected: &'static str,
    },
    /// A checksum does not match.
    #[error("{what} checksum is {found:#010x}, the bytes give {computed:#010x}")]
    Checksum {
        /// The bytes that the checksum covers.
        what: &'static str,
        /// The checksum on disk.
        found: u32,
        /// The checksum of the bytes on disk.
        computed: u32,
    },
    /// Written by a version, or with a feature, that this build does not know.
    #[error("format version {version} with incompatible features {features:#x} is newer than this build")]
    Version {
        /// The version found.
        version: u32,
        /// The unknown incompatible feature bits.
        features: u32,
    },
    /// Another store's bytes.
    #[error("belongs to another store")]
    Foreign,
    /// A length or count is over its limit.
    #[error("{what} is {found}, over the limit of {limit}")]
    Limit {
        /// The length or count that is too large.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The largest value allowed.
        limit: u64,
    },
    /// A field holds a value that it must not hold.
    #[error("{what} is {found}")]
    Field {
        /// The field's name.
        what: &'static str,
        /// The value found.
        found: u64,
    },
    /// A field does not hold the value that its place demands.
    #[error("{what} is {found}, expected {expected}")]
    Mismatch {
        /// The field's name.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The value that it should have.
        expected: u64,
    },
    /// Encoded metadata does not decode.
    #[error("metadata does not decode: {0}")]
    Metadata(String),
    /// An error of zstd about a compressed image.
    #[error("zstd: {0}")]
    Compression(String),
    /// A batch cannot follow the state before it.
    #[error("the batch does not apply: {0}")]
    Batch(String),
    /// A file that must be there is not.
    #[error("missing")]
    Missing,
    /// There is no memory for the bytes. They may be sound, or a length may be absurd.
    #[error("there is no memory for {needed} bytes")]
    Memory {
        /// Bytes that were asked for.
        needed: u64,
    },
    /// The medium reported an error.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// The system lacked something that reading takes, such as open files. That says nothing of the bytes.
    #[error("cannot be read now: {}", io::Error::from_raw_os_error(*.errno))]
    Shortage {
        /// The system's error number, one of [`SHORTAGES`].
        errno: i32,
    },
}

/// The system's error numbers for a passing shortage: EAGAIN, ENOMEM, ENFILE, EMFILE.
pub const SHORTAGES: [i32; 4] = [11, 12, 23, 24];

/// A defect and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// The file's name.
    pub file: FileName,
    /// The offset of the damaged structure, in bytes from the file's start.
    pub offset: u64,
    /// The batch that is affected, where it is known.
    pub lsn: Option<Lsn>,
    /// The defect found there.
    pub defect: Defect,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at offset {}", self.file, self.offset)?;
        if let Some(lsn) = self.lsn {
            write!(f, " (lsn {lsn})")?;
        }
        write!(f, ": {}", self.defect)
    }
}

impl std::error::Error for Damage {}

impl Defect {
    /// The defect of a failed read: the file is missing, the medium failed, or the system is short of
    /// something.
    #[must_use]
    pub fn of_read(error: &io::Error) -> Self {
        match error.raw_os_error() {
            _ if error.kind() == io::ErrorKind::NotFound => Defect::Missing,
            Some(errno) if SHORTAGES.contains(&errno) => Defect::Shortage { errno },
            _ => Defect::Unreadable(error.to_string()),
        }
    }

    /// Whether the bytes could not be looked at, so that nothing is known of them.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        matches!(self, Defect::Unreadable(_) | Defect::Shortage { .. } | Defect::Memory { .. })
    }

    /// The defect, at a place.
    #[must_use]
    pub fn at(self, file: FileName, offset: u64) -> Damage {
        Damage { file, offset, lsn: None, defect: self }
    }

    /// The defect, at a place, with the batch that it touches.
    #[must_use]
    pub fn at_lsn(self, file: FileName, offset: u64, lsn: Lsn) -> Damage {
        Damage { file, offset, lsn: Some(lsn), defect: self }
    }
}

/// Takes `len` bytes at `offset`, or says how many are missing.
pub(crate) fn slice(bytes: &[u8], offset: usize, len: usize) -> Result<&[u8], Defect> {
    let end = offset.checked_add(len).ok_or(Defect::Field { what: "length", found: len as u64 })?;
    bytes.get(offset..end).ok_or(Defect::Truncated { needed: end as u64, have: bytes.len() as u64 })
}

/// Takes a fixed-size array at `offset`, or says how many bytes are missing.
pub(crate) fn array<const N: usize>(bytes: &[u8], offset: usize) -> Result<&[u8; N], Defect> {
    Ok(slice(bytes, offset, N)?.try_into().expect("slice returned N bytes"))
}

/// Makes room for `len` bytes in all, or says that there is none: a length from disk must not abort.
pub(crate) fn reserve(bytes: &mut Vec<u8>, len: u64) -> Result<(), Defect> {
    let no_memory = Defect::Memory { needed: len };
    let Ok(len) = usize::try_from(len) else { return Err(no_memory) };
    bytes.try_reserve_exact(len.saturating_sub(bytes.len())).map_err(|_| no_memory)
}

/// Zeroed memory of this length.
pub(crate) fn zeros(len: u64) -> Result<Vec<u8>, Defect> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, len)?;
    bytes.resize(len as usize, 0);
    Ok(bytes)
}

/// Makes room for `count` items more, or says that there is none.
pub(crate) fn reserve_items<T>(items: &mut Vec<T>, count: usize) -> Result<(), Defect> {
    let needed = items.len().saturating_add(count).saturating_mul(size_of::<T>()) as u64;
    items.try_reserve_exact(count).map_err(|_| Defect::Memory { needed })
}

/// Adds an item to a list that may grow too long.
pub(crate) fn push<T>(items: &mut Vec<T>, item: T) -> Result<(), Defect> {
    let needed = 2 * items.len() * size_of::<T>();
    items.try_reserve(1).map_err(|_| Defect::Memory { needed: needed as u64 })?;
    items.push(item);
    Ok(())
}

/// A list of items, which may be too many.
pub(crate) fn collected<T>(items: impl IntoIterator<Item = T>) -> Result<Vec<T>, Defect> {
    let items = items.into_iter();
    let mut all = Vec::new();
    reserve_items(&mut all, items.size_hint().0)?;
    for item in items {
        push(&mut all, item)?;
    }
    Ok(all)
}

/// Refuses a checksum that the bytes do not give.
pub(crate) fn check_crc(what: &'static str, found: u32, bytes: &[u8]) -> Result<(), Defect> {
    let computed = crc32fast::hash(bytes);
    if found == computed { Ok(()) } else { Err(Defect::Checksum { what, found, computed }) }
}

/// Refuses a reserved field that is not zero.
pub(crate) fn check_zero(what: &'static str, found: u64) -> Result<(), Defect> {
    if found == 0 { Ok(()) } else { Err(Defect::Field { what, found }) }
}

/// Refuses reserved bytes that are not all zero.
pub(crate) fn check_zeros(what: &'static str, bytes: &[u8]) -> Result<(), Defect> {
    check_zero(what, bytes.iter().find(|&&byte| byte != 0).map_or(0, |&byte| byte.into()))
}

/// Refuses a field without the value that its place demands.
pub(crate) fn check_equal(what: &'static str, found: u64, expected: u64) -> Result<(), Defect> {
    if found == expected { Ok(()) } else { Err(Defect::Mismatch { what, found, expected }) }
}

/// Refuses a point in the log whose numbers are over their limits. A point that another structure names need
/// not exist; but no arithmetic on it overflows.
///
/// # Errors
/// [`Defect::Limit`].
pub(crate) fn check_point(point: &LogPoint) -> Result<(), Defect> {
    check_limit("lsn of a point in the log", point.lsn.0, NUMBER_MAX)?;
    check_limit("segment of a point in the log", point.segment, NUMBER_MAX)?;
    check_limit("offset of a point in the log", point.offset, 2 * SEGMENT_LEN_MAX)
}

/// Refuses a value above a limit.
pub(crate) fn check_limit(what: &'static str, found: u64, limit: u64) -> Result<(), Defect> {
    if found <= limit { Ok(()) } else { Err(Defect::Limit { what, found, limit }) }
}
