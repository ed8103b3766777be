//! Defects found in bytes, and their locations.

use std::{fmt, io};

use crate::ids::{LogPoint, Lsn};
use crate::limits::{NUMBER_MAX, SEGMENT_LEN_MAX};
use crate::names::FileName;

/// The reason that bytes are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// The structure extends past the available bytes.
    #[error("cut short: {needed} bytes needed, {have} there")]
    Truncated {
        /// Number of bytes that the structure needs.
        needed: u64,
        /// Number of bytes available.
        have: u64,
    },
    /// The magic number is not that of the expected structure.
    #[error("not a {expected}: the magic number does not match")]
    Magic {
        /// The structure that was expected.
        expected: &'static str,
    },
    /// A checksum does not match.
    #[error("{what} checksum is {found:#010x}, the bytes give {computed:#010x}")]
    Checksum {
        /// The part whose checksum does not match.
        what: &'static str,
        /// The checksum recorded on disk.
        found: u32,
        /// The checksum computed from the bytes.
        computed: u32,
    },
    /// The bytes need a format version or feature that this build does not know.
    #[error("format version {version} with incompatible features {features:#x} is newer than this build")]
    Version {
        /// The version found.
        version: u32,
        /// The unknown incompatible feature bits.
        features: u32,
    },
    /// The bytes belong to another store.
    #[error("belongs to another store")]
    Foreign,
    /// A length or count exceeds its limit.
    #[error("{what} is {found}, over the limit of {limit}")]
    Limit {
        /// The length or count.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The largest allowed value.
        limit: u64,
    },
    /// A field holds an invalid value.
    #[error("{what} is {found}")]
    Field {
        /// The field's name.
        what: &'static str,
        /// The value found.
        found: u64,
    },
    /// A field holds a value other than the one its position requires.
    #[error("{what} is {found}, expected {expected}")]
    Mismatch {
        /// The field's name.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The value required.
        expected: u64,
    },
    /// Encoded metadata cannot be decoded.
    #[error("metadata does not decode: {0}")]
    Metadata(String),
    /// zstd failed to decompress or compress an image.
    #[error("zstd: {0}")]
    Compression(String),
    /// A batch cannot be applied to the state before it.
    #[error("the batch does not apply: {0}")]
    Batch(String),
    /// A required file does not exist.
    #[error("missing")]
    Missing,
    /// The bytes do not fit into memory. They may be intact, or the length may be corrupt.
    #[error("there is no memory for {needed} bytes")]
    Memory {
        /// Number of bytes requested.
        needed: u64,
    },
    /// The medium reported an error.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// The system lacked a resource that reading needs, such as file descriptors. The bytes may be intact.
    #[error("cannot be read now: {}", io::Error::from_raw_os_error(*.errno))]
    Shortage {
        /// The system's error number, one of [`SHORTAGES`].
        errno: i32,
    },
}

/// Error numbers for a temporary shortage: EAGAIN, ENOMEM, ENFILE and EMFILE.
pub const SHORTAGES: [i32; 4] = [11, 12, 23, 24];

/// A defect and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// The file's name.
    pub file: FileName,
    /// The offset of the damaged structure, in bytes from the file's start.
    pub offset: u64,
    /// The affected batch, if known.
    pub lsn: Option<Lsn>,
    /// The defect itself.
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
    /// Classifies a failed read: the file is missing, the medium failed, or the system lacks a resource.
    #[must_use]
    pub fn of_read(error: &io::Error) -> Self {
        match error.raw_os_error() {
            _ if error.kind() == io::ErrorKind::NotFound => Defect::Missing,
            Some(errno) if SHORTAGES.contains(&errno) => Defect::Shortage { errno },
            _ => Defect::Unreadable(error.to_string()),
        }
    }

    /// Returns true if the bytes could not be examined, so that their state is unknown.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        matches!(self, Defect::Unreadable(_) | Defect::Shortage { .. } | Defect::Memory { .. })
    }

    /// Locates the defect in a file.
    #[must_use]
    pub fn at(self, file: FileName, offset: u64) -> Damage {
        Damage { file, offset, lsn: None, defect: self }
    }

    /// Locates the defect in a file and names the affected batch.
    #[must_use]
    pub fn at_lsn(self, file: FileName, offset: u64, lsn: Lsn) -> Damage {
        Damage { file, offset, lsn: Some(lsn), defect: self }
    }
}

/// Returns `len` bytes from `offset`, or the shortage as a [`Defect::Truncated`].
pub(crate) fn slice(bytes: &[u8], offset: usize, len: usize) -> Result<&[u8], Defect> {
    let end = offset.checked_add(len).ok_or(Defect::Field { what: "length", found: len as u64 })?;
    bytes.get(offset..end).ok_or(Defect::Truncated { needed: end as u64, have: bytes.len() as u64 })
}

/// Returns `N` bytes from `offset` as an array, or the shortage as a [`Defect::Truncated`].
pub(crate) fn array<const N: usize>(bytes: &[u8], offset: usize) -> Result<&[u8; N], Defect> {
    Ok(slice(bytes, offset, N)?.try_into().expect("slice returned N bytes"))
}

/// Reserves capacity for `len` bytes in total. Fails instead of aborting, because `len` may come from disk.
pub(crate) fn reserve(bytes: &mut Vec<u8>, len: u64) -> Result<(), Defect> {
    let no_memory = Defect::Memory { needed: len };
    let Ok(len) = usize::try_from(len) else { return Err(no_memory) };
    bytes.try_reserve_exact(len.saturating_sub(bytes.len())).map_err(|_| no_memory)
}

/// Allocates `len` zero bytes. Fails instead of aborting.
pub(crate) fn zeros(len: u64) -> Result<Vec<u8>, Defect> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, len)?;
    bytes.resize(len as usize, 0);
    Ok(bytes)
}

/// Reserves capacity for `count` additional items. Fails instead of aborting.
pub(crate) fn reserve_items<T>(items: &mut Vec<T>, count: usize) -> Result<(), Defect> {
    let needed = items.len().saturating_add(count).saturating_mul(size_of::<T>()) as u64;
    items.try_reserve_exact(count).map_err(|_| Defect::Memory { needed })
}

/// Appends an item. Fails instead of aborting if the list cannot grow.
pub(crate) fn push<T>(items: &mut Vec<T>, item: T) -> Result<(), Defect> {
    let needed = 2 * items.len() * size_of::<T>();
    items.try_reserve(1).map_err(|_| Defect::Memory { needed: needed as u64 })?;
    items.push(item);
    Ok(())
}

/// Collects items into a list. Fails instead of aborting if the list cannot grow.
pub(crate) fn collected<T>(items: impl IntoIterator<Item = T>) -> Result<Vec<T>, Defect> {
    let items = items.into_iter();
    let mut all = Vec::new();
    reserve_items(&mut all, items.size_hint().0)?;
    for item in items {
        push(&mut all, item)?;
    }
    Ok(all)
}

/// Checks that `bytes` have the checksum `found`.
pub(crate) fn check_crc(what: &'static str, found: u32, bytes: &[u8]) -> Result<(), Defect> {
    let computed = crc32fast::hash(bytes);
    if found == computed { Ok(()) } else { Err(Defect::Checksum { what, found, computed }) }
}

/// Checks that a reserved field is zero.
pub(crate) fn check_zero(what: &'static str, found: u64) -> Result<(), Defect> {
    if found == 0 { Ok(()) } else { Err(Defect::Field { what, found }) }
}

/// Checks that reserved bytes are all zero.
pub(crate) fn check_zeros(what: &'static str, bytes: &[u8]) -> Result<(), Defect> {
    check_zero(what, bytes.iter().find(|&&byte| byte != 0).map_or(0, |&byte| byte.into()))
}

/// Checks that a field has the value that its position requires.
pub(crate) fn check_equal(what: &'static str, found: u64, expected: u64) -> Result<(), Defect> {
    if found == expected { Ok(()) } else { Err(Defect::Mismatch { what, found, expected }) }
}

/// Checks that the numbers of a point in the log are within their limits. A point named by another structure
/// need not exist, but arithmetic on it must not overflow.
///
/// # Errors
/// Returns [`Defect::Limit`] for the first number that is too high.
pub(crate) fn check_point(point: &LogPoint) -> Result<(), Defect> {
    check_limit("lsn of a point in the log", point.lsn.0, NUMBER_MAX)?;
    check_limit("segment of a point in the log", point.segment, NUMBER_MAX)?;
    check_limit("offset of a point in the log", point.offset, 2 * SEGMENT_LEN_MAX)
}

/// Checks that a value is within its limit.
pub(crate) fn check_limit(what: &'static str, found: u64, limit: u64) -> Result<(), Defect> {
    if found <= limit { Ok(()) } else { Err(Defect::Limit { what, found, limit }) }
}
