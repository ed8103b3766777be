//! Types for identifiers and positions, on disk and in the API.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::layout::Field;
use crate::limits::{DEVICE_ORDINAL_MAX, KEY_LEN_MAX};

/// A type that wraps a number as an identifier, such as [`PageId`] or [`Lsn`].
pub trait Number: Copy {
    /// Returns the wrapped number.
    fn number(self) -> u64;
    /// Wraps a number.
    fn of(number: u64) -> Self;
}

macro_rules! number {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl Number for $name {
            fn number(self) -> u64 {
                self.0
            }

            fn of(number: u64) -> Self {
                Self(number)
            }
        }

        impl Field for $name {
            const SIZE: usize = 8;
            fn put(&self, out: &mut [u8]) {
                self.0.put(out);
            }
            fn get(bytes: &[u8]) -> Self {
                Self(u64::get(bytes))
            }
        }
    };
}

number! {
    /// The id of a page, assigned by the store. Ids rise from 1 and are never reused; 0 means no page.
    PageId
}
number! {
    /// The sequence number of a committed batch. Numbers rise from 1 without gaps. The number 0 means the empty store.
    Lsn
}
number! {
    /// The version of a page: 1 at creation, and 1 more for every committed batch that changes the page's content,
    /// length or metadata.
    Epoch
}
number! {
    /// The number of a snapshot. Numbers rise from 1. The number 0 means no snapshot.
    SnapshotId
}

impl Lsn {
    /// Returns the Lsn of the next batch.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// The identity of a store, drawn at random when the store is created. The header of every file on disk contains this
/// id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct StoreId(pub [u8; 16]);

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreId({self})")
    }
}

impl Field for StoreId {
    const SIZE: usize = 16;
    fn put(&self, out: &mut [u8]) {
        self.0.put(out);
    }
    fn get(bytes: &[u8]) -> Self {
        Self(Field::get(bytes))
    }
}

/// One run of a writer, as recorded in the log. Every open for writing begins a new incarnation with a higher number.
///
/// If an open crashes before it completes, the next open may use the same number. The random part then distinguishes
/// the two incarnations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation {
    /// Number of the incarnation, rising from 1; 0 means none.
    pub number: u32,
    /// Tag drawn at random at each open.
    pub random: u32,
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:08x}", self.number, self.random)
    }
}

impl Field for Incarnation {
    const SIZE: usize = 8;
    fn put(&self, out: &mut [u8]) {
        self.number.put(out);
        self.random.put(&mut out[4..]);
    }
    fn get(bytes: &[u8]) -> Self {
        Self { number: u32::get(bytes), random: u32::get(&bytes[4..]) }
    }
}

/// The position of a batch: its Lsn, and the incarnation that committed the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Position {
    /// Incarnation that committed the batch.
    pub incarnation: Incarnation,
    /// Lsn of the batch.
    pub lsn: Lsn,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in incarnation {}", self.lsn, self.incarnation)
    }
}

/// A point in the log at which a frame ends. It contains all information that a reader needs to continue with the next
/// frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LogPoint {
    /// Incarnation that wrote the frame.
    pub incarnation: Incarnation,
    /// Last batch that ends at or before the point.
    pub lsn: Lsn,
    /// Number of the segment that contains the frame.
    pub segment: u64,
    /// End of the frame, in bytes from the start of the segment.
    pub offset: u64,
    /// Chain hash that the next frame must name.
    pub chain: u32,
}

impl Field for LogPoint {
    const SIZE: usize = 36;
    fn put(&self, out: &mut [u8]) {
        self.incarnation.put(out);
        self.lsn.put(&mut out[8..]);
        self.segment.put(&mut out[16..]);
        self.offset.put(&mut out[24..]);
        self.chain.put(&mut out[32..]);
    }
    fn get(bytes: &[u8]) -> Self {
        Self {
            incarnation: Field::get(bytes),
            lsn: Field::get(&bytes[8..]),
            segment: Field::get(&bytes[16..]),
            offset: Field::get(&bytes[24..]),
            chain: Field::get(&bytes[32..]),
        }
    }
}

/// A name for a page that the caller assigns. A key has 1 to 64 bytes and is unique among the pages of a store.
///
/// ```
/// use remanent_format::Key;
/// let key = Key::new("layer.0.weight")?;
/// assert_eq!(key.as_bytes(), b"layer.0.weight");
/// assert!(Key::new("").is_err());
/// # Ok::<(), remanent_format::KeyLenError>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Arc<[u8]>);

/// The error for a key that is empty or longer than 64 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("key length is {len} bytes, expected 1 to {KEY_LEN_MAX} bytes")]
pub struct KeyLenError {
    /// The length of the rejected key, in bytes.
    pub len: usize,
}

impl Key {
    /// Creates a key from `bytes`.
    ///
    /// # Errors
    /// Returns [`KeyLenError`] if `bytes` is empty or longer than 64 bytes.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, KeyLenError> {
        let bytes = bytes.as_ref();
        if bytes.is_empty() || bytes.len() > KEY_LEN_MAX {
            return Err(KeyLenError { len: bytes.len() });
        }
        Ok(Self(bytes.into()))
    }

    /// Returns the bytes of the key.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the key as text, or `None` if the key is not valid UTF-8.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }
}

macro_rules! key_from {
    ($($source:ty),* $(,)?) => {$(
        impl TryFrom<$source> for Key {
            type Error = KeyLenError;

            fn try_from(bytes: $source) -> Result<Self, KeyLenError> {
                Self::new(bytes)
            }
        }
    )*};
}
key_from!(&str, &String, String, &[u8], Vec<u8>);

impl<const N: usize> TryFrom<&[u8; N]> for Key {
    type Error = KeyLenError;

    fn try_from(bytes: &[u8; N]) -> Result<Self, KeyLenError> {
        Self::new(bytes)
    }
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl From<&Key> for Key {
    fn from(key: &Key) -> Self {
        key.clone()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.as_str() {
            Some(text) => write!(f, "{}", text.escape_debug()),
            None => write!(f, "0x{}", self.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>()),
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// The place where a page is stored: a kind of memory, or disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Place {
    /// Memory of a GPU. The value is a logical slot, which is bound to a device when the store is opened.
    Device(u32),
    /// Page-locked host memory, which a GPU can access directly.
    Pinned,
    /// Ordinary host memory.
    Host,
    /// Memory that the host and the GPU share through page faults.
    Unified,
    /// No memory. The bytes of the page are read from an image file. Newly written bytes stay in host memory until the
    /// next snapshot.
    Disk,
}

impl Place {
    /// Returns the two numbers that represent the place on disk: the kind and the ordinal.
    #[must_use]
    pub fn to_raw(self) -> (u8, u32) {
        match self {
            Place::Device(ordinal) => (1, ordinal),
            Place::Pinned => (2, 0),
            Place::Host => (3, 0),
            Place::Unified => (4, 0),
            Place::Disk => (5, 0),
        }
    }

    /// Returns the place that a kind and an ordinal represent on disk, or `None` if there is no such place.
    ///
    /// The ordinal of a device is not compared with [`DEVICE_ORDINAL_MAX`].
    #[must_use]
    pub fn from_raw(kind: u8, ordinal: u32) -> Option<Self> {
        match (kind, ordinal) {
            (1, ordinal) => Some(Place::Device(ordinal)),
            (2, 0) => Some(Place::Pinned),
            (3, 0) => Some(Place::Host),
            (4, 0) => Some(Place::Unified),
            (5, 0) => Some(Place::Disk),
            _ => None,
        }
    }

    /// Packs the place into two bytes. Page tables in memory store one packed place per page.
    ///
    /// # Panics
    /// Panics if the device ordinal is above [`DEVICE_ORDINAL_MAX`].
    #[must_use]
    pub fn to_bits(self) -> u16 {
        let (kind, ordinal) = self.to_raw();
        assert!(ordinal <= DEVICE_ORDINAL_MAX, "place {self}");
        u16::from(kind) | (ordinal as u16) << PLACE_KIND_BITS
    }

    /// Unpacks a place that [`Place::to_bits`] packed. Returns `None` if the bits do not represent a place.
    #[must_use]
    pub fn from_bits(bits: u16) -> Option<Self> {
        Self::from_raw((bits & ((1 << PLACE_KIND_BITS) - 1)) as u8, u32::from(bits >> PLACE_KIND_BITS))
    }
}

/// Number of bits for the kind in a packed place. The remaining bits contain the ordinal.
const PLACE_KIND_BITS: u32 = 3;
const _: () = assert!(DEVICE_ORDINAL_MAX < 1 << (u16::BITS - PLACE_KIND_BITS));

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Device(ordinal) => write!(f, "device:{ordinal}"),
            Place::Pinned => f.write_str("pinned"),
            Place::Host => f.write_str("host"),
            Place::Unified => f.write_str("unified"),
            Place::Disk => f.write_str("disk"),
        }
    }
}

impl FromStr for Place {
    type Err = UnknownPlace;

    /// Parses a place from the format of its [`Display`](fmt::Display) implementation.
    ///
    /// ```
    /// use remanent_format::Place;
    /// assert_eq!("device:1".parse::<Place>()?, Place::Device(1));
    /// assert!("gpu".parse::<Place>().is_err());
    /// # Ok::<(), remanent_format::UnknownPlace>(())
    /// ```
    fn from_str(text: &str) -> Result<Self, UnknownPlace> {
        let unknown = || UnknownPlace(text.to_owned());
        match text {
            "pinned" => Ok(Place::Pinned),
            "host" => Ok(Place::Host),
            "unified" => Ok(Place::Unified),
            "disk" => Ok(Place::Disk),
            _ => {
                let ordinal = text.strip_prefix("device:").ok_or_else(unknown)?;
                ordinal.parse().map(Place::Device).map_err(|_| unknown())
            }
        }
    }
}

/// The error for text that does not name a [`Place`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown place {0:?}, expected host, pinned, unified, disk or device:N")]
pub struct UnknownPlace(pub String);

/// The width of the elements of a page, for masked and sparse deltas and for fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Width {
    /// Elements of 1 byte.
    W1,
    /// Elements of 2 bytes, such as bf16 and f16.
    W2,
    /// Elements of 4 bytes, such as f32.
    W4,
    /// Elements of 8 bytes, such as f64.
    W8,
    /// Elements of 16 bytes, such as complex128.
    W16,
}

impl Width {
    /// Returns the length of an element in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Width::W1 => 1,
            Width::W2 => 2,
            Width::W4 => 4,
            Width::W8 => 8,
            Width::W16 => 16,
        }
    }

    /// Returns the width that has `bytes` bytes, or `None` if `bytes` is not 1, 2, 4, 8 or 16.
    #[must_use]
    pub const fn from_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            1 => Some(Width::W1),
            2 => Some(Width::W2),
            4 => Some(Width::W4),
            8 => Some(Width::W8),
            16 => Some(Width::W16),
            _ => None,
        }
    }
}
