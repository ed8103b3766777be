//! Metadata values, their encoding, and the envelope that protects the encoding.
//!
//! A value is encoded with serde and bincode, with fixed-width little-endian integers. SPEC.md specifies the encoding
//! byte by byte. The encoding is canonical: the names in a map ascend, and no bytes may follow. Decoding and
//! re-encoding therefore produces the same bytes. An encoding has at most
//! [`METADATA_LEN_MAX`](crate::limits::METADATA_LEN_MAX) bytes for a page and at most
//! [`ROOT_LEN_MAX`](crate::limits::ROOT_LEN_MAX) bytes for the root.
//!
//! Decoding is safe for all input. Nesting is bounded, text and bytes are borrowed from the input before they are
//! copied, and no memory is allocated for a count before the items are decoded.

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
/// Two values are equal if their encodings are equal. Floats are compared by their bits, so a NaN equals itself and 0.0
/// differs from -0.0.
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
    /// The absence of a value.
    Null,
    /// A boolean.
    Bool(bool),
    /// A signed 64-bit integer.
    I64(i64),
    /// An unsigned 64-bit integer.
    U64(u64),
    /// A 64-bit float. All bits are preserved, including the payload of a NaN.
    F64(f64),
    /// A text string.
    String(String),
    /// A byte string with any content.
    Bytes(#[serde(serialize_with = "serialize_bytes")] Vec<u8>),
    /// An ordered list of values.
    List(Vec<Value>),
    /// A map from names to values.
    Map(BTreeMap<String, Value>),
}

/// Named values: the metadata of a page, or the root of a store.
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

/// Typed access to a value. A method returns `None` for a value of another kind. Integers are the only exception: a
/// signed integer can be read as unsigned and the reverse, if the number is in range.
///
/// ```
/// use remanent_format::Value;
/// assert_eq!(Value::from(5_i64).as_u64(), Some(5));
/// assert_eq!(Value::from(-5_i64).as_u64(), None);
/// assert_eq!(Value::from("five").as_u64(), None);
/// assert_eq!(Value::from(0.5_f32).as_f64(), Some(0.5));
/// ```
impl Value {
    /// Returns the boolean, or `None` if the value is of another kind.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(value) = self { Some(*value) } else { None }
    }

    /// Returns the integer, or `None` if it is negative or the value is of another kind.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::U64(value) => Some(*value),
            Value::I64(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// Returns the integer, or `None` if it exceeds `i64::MAX` or the value is of another kind.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Value::I64(value) => Some(*value),
            Value::U64(value) => i64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// Returns the float, or `None` if the value is of another kind.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        if let Value::F64(value) = self { Some(*value) } else { None }
    }

    /// Returns the text, or `None` if the value is of another kind.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Value::String(value) = self { Some(value) } else { None }
    }

    /// Returns the bytes, or `None` if the value is of another kind.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        if let Value::Bytes(value) = self { Some(value) } else { None }
    }

    /// Returns the values of the list, or `None` if the value is of another kind.
    #[must_use]
    pub fn as_list(&self) -> Option<&[Value]> {
        if let Value::List(values) = self { Some(values) } else { None }
    }

    /// Returns the entries of the map, or `None` if the value is of another kind.
    #[must_use]
    pub fn as_map(&self) -> Option<&BTreeMap<String, Value>> {
        if let Value::Map(values) = self { Some(values) } else { None }
    }
}

/// Serializes a byte string. Without this function, serde would serialize a `Vec<u8>` as a list of numbers.
pub(crate) fn serialize_bytes<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}
