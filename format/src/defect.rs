//! Defects in the bytes of a store, and their locations.

use std::{fmt, io};

use crate::ids::{LogPoint, Lsn};
use crate::limits::{NUMBER_MAX, SEGMENT_LEN_MAX};
use crate::names::FileName;

/// The reason why bytes of a store are invalid or cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// The structure extends past the end of the available bytes.
    #[error("truncated: {needed} bytes needed, {have} bytes available")]
    Truncated {
        /// Number of bytes that the structure needs.
        needed: u64,
        /// Number of bytes that are available.
        have: u64,
    },
    /// The bytes do not start with the magic number of the expected structure.
    #[error("not a {expected}: the magic number does not match")]
    Magic {
        /// Name of the expected structure.
        expected: &'static str,
    },
    /// A stored checksum differs from the checksum of the bytes that it covers.
    #[error("{what} checksum is {found:#010x}, but the checksum of the bytes is {computed:#010x}")]
    Checksum {
        /// Name of the structure that the checksum covers.
        what: &'static str,
        /// The checksum that is stored on disk.
        found: u32,
        /// The checksum computed from the bytes.
        computed: u32,
    },
    /// The bytes require a format version or a feature that this build does not support.
    #[error("format version {version} with incompatible features {features:#x} is newer than this build")]
    Version {
        /// Format version that was found.
        version: u32,
        /// Bit set of the incompatible features that this build does not support.
        features: u32,
    },
    /// The bytes belong to another store.
    #[error("belongs to another store")]
    Foreign,
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
        /// Value that was found in the field.
        found: u64,
    },
    /// A field does not have the value that its position in the store requires.
    #[error("{what} is {found}, expected {expected}")]
    Mismatch {
        /// Name of the field.
        what: &'static str,
        /// Value that was found in the field.
        found: u64,
        /// Value that the field must have.
        expected: u64,
    },
    /// The encoding of metadata is invalid.
    #[error("metadata cannot be decoded: {0}")]
    Metadata(String),
    /// zstd could not compress or decompress an image.
    #[error("zstd: {0}")]
    Compression(String),
    /// A batch cannot be applied to the preceding state.
    #[error("the batch cannot be applied: {0}")]
    Batch(String),
    /// A file that must exist does not exist.
    #[error("missing")]
    Missing,
    /// Parts of image files exist only in the archive of the store.
    #[error(
        "parts of image files are only in the archive; open the store with `Options::archive`, which fetches them"
    )]
    Unfetched,
    /// An allocation for the bytes failed. Either the bytes are intact and memory is short, or their recorded length is
    /// corrupt.
    #[error("cannot allocate {needed} bytes")]
    Memory {
        /// Number of bytes that were requested.
        needed: u64,
    },
    /// The medium returned an error.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// The operating system lacks a resource, such as a file descriptor, to read the bytes. The bytes may be intact.
    #[error("temporarily unreadable: {}", io::Error::from_raw_os_error(*.errno))]
    Shortage {
        /// Error number from the operating system, one of [`SHORTAGES`].
        errno: i32,
    },
}

/// Error numbers that report a temporary shortage of a system resource: EAGAIN, ENOMEM, ENFILE and EMFILE. The bytes
/// that could not be read may be intact.
pub const SHORTAGES: [i32; 4] = [11, 12, 23, 24];

/// A defect in a file of a store, with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// Name of the damaged file.
    pub file: FileName,
    /// Offset of the damaged structure, in bytes from the start of the file.
    pub offset: u64,
    /// Lsn of the affected batch, or `None` if it is not known.
    pub lsn: Option<Lsn>,
    /// Reason why the structure is invalid.
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
    /// Converts an I/O error from a read to [`Defect::Missing`], [`Defect::Shortage`] or [`Defect::Unreadable`].
    #[must_use]
    pub fn of_read(error: &io::Error) -> Self {
        match error.raw_os_error() {
            _ if error.kind() == io::ErrorKind::NotFound => Defect::Missing,
            Some(errno) if SHORTAGES.contains(&errno) => Defect::Shortage { errno },
            _ => Defect::Unreadable(error.to_string()),
        }
    }

    /// Returns true if the bytes could not be read into memory. The bytes may still be valid.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        matches!(self, Defect::Unreadable(_)) || self.is_shortage()
    }

    /// Returns true if memory or another resource was too short to read the bytes. A later read may succeed.
    #[must_use]
    pub fn is_shortage(&self) -> bool {
        matches!(self, Defect::Shortage { .. } | Defect::Memory { .. })
    }

    /// Returns the defect with its location: a file, and an offset in bytes.
    #[must_use]
    pub fn at(self, file: FileName, offset: u64) -> Damage {
        Damage { file, offset, lsn: None, defect: self }
    }

    /// Returns the defect with its location and the Lsn of the affected batch.
    #[must_use]
    pub fn at_lsn(self, file: FileName, offset: u64, lsn: Lsn) -> Damage {
        Damage { file, offset, lsn: Some(lsn), defect: self }
    }
}

/// Returns `len` bytes of `bytes` from `offset` on, or [`Defect::Truncated`] if `bytes` ends earlier.
pub(crate) fn slice(bytes: &[u8], offset: usize, len: usize) -> Result<&[u8], Defect> {
    let end = offset.checked_add(len).ok_or(Defect::Field { what: "length", found: len as u64 })?;
    bytes.get(offset..end).ok_or(Defect::Truncated { needed: end as u64, have: bytes.len() as u64 })
}

/// Returns `N` bytes of `bytes` from `offset` on as an array, or [`Defect::Truncated`] if `bytes` ends earlier.
pub(crate) fn array<const N: usize>(bytes: &[u8], offset: usize) -> Result<&[u8; N], Defect> {
    Ok(slice(bytes, offset, N)?.try_into().expect("slice returned N bytes"))
}

/// Reserves capacity for `len` bytes in total. Returns an error instead of aborting the process, because `len` may come
/// from disk.
pub(crate) fn reserve(bytes: &mut Vec<u8>, len: u64) -> Result<(), Defect> {
    let no_memory = Defect::Memory { needed: len };
    let Ok(len) = usize::try_from(len) else { return Err(no_memory) };
    bytes.try_reserve_exact(len.saturating_sub(bytes.len())).map_err(|_| no_memory)
}

/// Returns `len` zero bytes. Returns an error instead of aborting the process if there is not enough memory.
pub(crate) fn zeros(len: u64) -> Result<Vec<u8>, Defect> {
    let mut bytes = Vec::new();
    reserve(&mut bytes, len)?;
    bytes.resize(len as usize, 0);
    Ok(bytes)
}

/// Reserves capacity for `count` additional items. Returns an error instead of aborting the process.
pub(crate) fn reserve_items<T>(items: &mut Vec<T>, count: usize) -> Result<(), Defect> {
    let needed = items.len().saturating_add(count).saturating_mul(size_of::<T>()) as u64;
    items.try_reserve_exact(count).map_err(|_| Defect::Memory { needed })
}

/// Appends an item. Returns an error instead of aborting the process if the list cannot grow.
pub(crate) fn push<T>(items: &mut Vec<T>, item: T) -> Result<(), Defect> {
    let needed = 2 * items.len() * size_of::<T>();
    items.try_reserve(1).map_err(|_| Defect::Memory { needed: needed as u64 })?;
    items.push(item);
    Ok(())
}

/// Collects items into a list. Returns an error instead of aborting the process if the list cannot grow.
pub(crate) fn collected<T>(items: impl IntoIterator<Item = T>) -> Result<Vec<T>, Defect> {
    let items = items.into_iter();
    let mut all = Vec::new();
    reserve_items(&mut all, items.size_hint().0)?;
    for item in items {
        push(&mut all, item)?;
    }
    Ok(all)
}

/// Checks that the CRC-32 of `bytes` is `found`.
pub(crate) fn check_crc(what: &'static str, found: u32, bytes: &[u8]) -> Result<(), Defect> {
    let computed = crc32fast::hash(bytes);
    if found == computed { Ok(()) } else { Err(Defect::Checksum { what, found, computed }) }
}

pub(crate) fn check_zero(what: &'static str, found: u64) -> Result<(), Defect> {
    if found == 0 { Ok(()) } else { Err(Defect::Field { what, found }) }
}

pub(crate) fn check_zeros(what: &'static str, bytes: &[u8]) -> Result<(), Defect> {
    check_zero(what, bytes.iter().find(|&&byte| byte != 0).map_or(0, |&byte| byte.into()))
}

/// Checks that a field has the expected value.
pub(crate) fn check_equal(what: &'static str, found: u64, expected: u64) -> Result<(), Defect> {
    if found == expected { Ok(()) } else { Err(Defect::Mismatch { what, found, expected }) }
}

/// Checks that the numbers of a log point are within their limits, so that arithmetic with them cannot overflow. Does
/// not check that the log contains the point.
///
/// # Errors
/// Returns [`Defect::Limit`] for the first number that exceeds its limit.
pub(crate) fn check_point(point: &LogPoint) -> Result<(), Defect> {
    check_limit("lsn of a point in the log", point.lsn.0, NUMBER_MAX)?;
    check_limit("segment of a point in the log", point.segment, NUMBER_MAX)?;
    check_limit("offset of a point in the log", point.offset, 2 * SEGMENT_LEN_MAX)
}

pub(crate) fn check_limit(what: &'static str, found: u64, limit: u64) -> Result<(), Defect> {
    if found <= limit { Ok(()) } else { Err(Defect::Limit { what, found, limit }) }
}
