//! Metadata: self-describing values, their bytes, and the envelope that guards them.
//!
//! A value is encoded by serde and bincode with fixed-width little-endian integers, which is simple
//! enough to be specified byte by byte. The encoding is canonical: map entries ascend, nothing may
//! follow, so decoding and encoding again gives the same bytes. Pages carry at most
//! [`METADATA_LEN_MAX`](crate::limits::METADATA_LEN_MAX) bytes of it, the root
//! [`ROOT_LEN_MAX`](crate::limits::ROOT_LEN_MAX).
//!
//! Decoding is safe on any input: nesting is bounded, text and bytes are borrowed from the input before
//! they are copied, and no container reserves room for a count that the input merely claims.

mod envelope;
mod seed;
mod shared_metadata;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

pub use self::shared_metadata::SharedMetadata;
pub use envelope::{ENVELOPE_HEAD_LEN, decode_entry, decode_metadata, encode_entry, encode_metadata};
pub(crate) use envelope::{bincode_config, decode_all};
pub(crate) use seed::deserialize_bytes;

/// A value of a metadata or root entry.
///
/// Two values are equal if their encodings are: floats are compared by their bits, so a NaN equals itself
/// and 0.0 differs from -0.0.
///
/// ```
/// use remanent_format::value::{Metadata, Value, decode_metadata, encode_metadata};
/// let metadata = Metadata::from([("step".into(), Value::from(7_u64)), ("lr".into(), Value::from(0.5))]);
/// let bytes = encode_metadata(&metadata, 4096)?;
/// assert_eq!(decode_metadata(&bytes, 4096)?, (metadata, bytes.len()));
/// # Ok::<(), remanent_format::Defect>(())
/// ```
#[derive(Clone, Debug, Serialize)]
pub enum Value {
    /// No value at all.
    Null,
    /// True or false.
    Bool(bool),
    /// A signed integer.
    I64(i64),
    /// An unsigned integer.
    U64(u64),
    /// A float; every bit is kept, also the payload of a NaN.
    F64(f64),
    /// Text in UTF-8.
    String(String),
    /// Bytes of any content.
    Bytes(#[serde(serialize_with = "serialize_bytes")] Vec<u8>),
    /// Values in order.
    List(Vec<Value>),
    /// Values by name.
    Map(BTreeMap<String, Value>),
}

/// Named values: a page's metadata, or the root.
pub type Metadata = BTreeMap<String, Value>;

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Value::Null, Value::Null) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::I64(a), Value::I64(b)) => a == b,
            (Value::U64(a), Value::U64(b)) => a == b,
            (Value::F64(a), Value::F64(b)) => a.to_bits() == b.to_bits(),
            (Value::String(a), Value::String(b)) => a == b,
            (Value::Bytes(a), Value::Bytes(b)) => a == b,
            (Value::List(a), Value::List(b)) => a == b,
            (Value::Map(a), Value::Map(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Value {}

macro_rules! value_from {
    ($($source:ty => $variant:ident),* $(,)?) => {$(
        impl From<$source> for Value {
            fn from(value: $source) -> Self {
                Value::$variant(value.into())
            }
        }
    )*};
}
value_from! {
    bool => Bool,
    i32 => I64,
    i64 => I64,
    u32 => U64,
    u64 => U64,
    f32 => F64,
    f64 => F64,
    &str => String,
    String => String,
    &[u8] => Bytes,
    Vec<u8> => Bytes,
    Vec<Value> => List,
    BTreeMap<String, Value> => Map,
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Value::U64(value as u64)
    }
}

/// What a value is, where it is of the kind asked for. Integers convert where they fit, whichever of the two
/// kinds they were stored as; nothing else converts.
///
/// ```
/// use remanent_format::Value;
/// assert_eq!(Value::from(5_i64).as_u64(), Some(5));
/// assert_eq!(Value::from(-5_i64).as_u64(), None);
/// assert_eq!(Value::from("five").as_u64(), None);
/// assert_eq!(Value::from(0.5_f32).as_f64(), Some(0.5));
/// ```
impl Value {
    /// True or false, if it is a boolean.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(value) = self { Some(*value) } else { None }
    }

    /// An unsigned integer, or a signed one that is not negative.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::U64(value) => Some(*value),
            Value::I64(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A signed integer, or an unsigned one that fits.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Value::I64(value) => Some(*value),
            Value::U64(value) => i64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A float, if it is one.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        if let Value::F64(value) = self { Some(*value) } else { None }
    }

    /// A text, if it is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Value::String(value) = self { Some(value) } else { None }
    }

    /// Bytes, if it is bytes.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        if let Value::Bytes(value) = self { Some(value) } else { None }
    }

    /// The values of a list.
    #[must_use]
    pub fn as_list(&self) -> Option<&[Value]> {
        if let Value::List(values) = self { Some(values) } else { None }
    }

    /// The values of a map, by name.
    #[must_use]
    pub fn as_map(&self) -> Option<&BTreeMap<String, Value>> {
        if let Value::Map(values) = self { Some(values) } else { None }
    }
}

/// Gives bytes to serde as bytes; a `Vec<u8>` alone would be a list of numbers.
pub(crate) fn serialize_bytes<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}
