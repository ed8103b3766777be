//! Floor 0. Metadata: self-describing values, their bytes, and the envelope that guards them.
//!
//! A value is encoded by serde and bincode with fixed-width little-endian integers, which is simple
//! enough to be specified byte by byte. The encoding is canonical: map entries ascend, nothing may
//! follow, so decoding and encoding again gives the same bytes. Pages carry at most
//! [`METADATA_LEN_MAX`](crate::limits::METADATA_LEN_MAX) bytes of it, the root
//! [`ROOT_LEN_MAX`].
//!
//! Decoding is safe on any input: nesting is bounded, text and bytes are borrowed from the input before
//! they are copied, and no container reserves room for a count that the input merely claims.

use std::collections::BTreeMap;
use std::fmt;

use bincode::error::DecodeError;
use serde::de::{DeserializeSeed, EnumAccess, Error as _, MapAccess, SeqAccess, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::defect::{Defect, array, check_crc, check_limit, slice};
use crate::layout::Field;
use crate::limits::{NAME_LEN_MAX, ROOT_LEN_MAX, VALUE_DEPTH_MAX};

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
    /// Nothing.
    Null,
    /// True or false.
    Bool(bool),
    /// A signed integer.
    I64(i64),
    /// An unsigned integer.
    U64(u64),
    /// A float; every bit is kept, those of a NaN too.
    F64(f64),
    /// Text.
    String(String),
    /// Bytes.
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
    f64 => F64,
    &str => String,
    String => String,
    &[u8] => Bytes,
    Vec<u8> => Bytes,
    Vec<Value> => List,
    BTreeMap<String, Value> => Map,
}

/// The bytes of `metadata` in their envelope.
///
/// # Errors
/// [`Defect::Limit`] if the encoding is longer than `limit`, a name is too long or a value nests too
/// deeply.
pub fn encode_metadata(metadata: &Metadata, limit: usize) -> Result<Vec<u8>, Defect> {
    check_entries(metadata, VALUE_DEPTH_MAX)?;
    seal(metadata, limit)
}

/// The metadata at the start of `bytes`, and how many bytes its envelope takes.
///
/// # Errors
/// The defect, if the envelope is longer than `limit`, cut short, damaged, or holds anything but one
/// canonical encoding.
pub fn decode_metadata(bytes: &[u8], limit: usize) -> Result<(Metadata, usize), Defect> {
    open(bytes, limit, MapSeed { depth_left: VALUE_DEPTH_MAX })
}

/// The bytes of one named value in their envelope.
///
/// # Errors
/// [`Defect::Limit`], as for [`encode_metadata`].
pub fn encode_entry(name: &str, value: &Value, limit: usize) -> Result<Vec<u8>, Defect> {
    check_name(name)?;
    check_depth(value, VALUE_DEPTH_MAX)?;
    seal(&(name, value), limit)
}

/// The named value at the start of `bytes`, and how many bytes its envelope takes.
///
/// # Errors
/// The defect, as for [`decode_metadata`].
pub fn decode_entry(bytes: &[u8], limit: usize) -> Result<((String, Value), usize), Defect> {
    open(bytes, limit, EntrySeed)
}

/// Bytes in front of an envelope's content: its length and its CRC-32.
pub const ENVELOPE_HEAD_LEN: usize = 8;

/// The configuration of every bincode encoding in the format. The input's own length, checked before, is
/// the tighter limit; this one holds even if a check were forgotten.
pub(crate) const fn bincode_config() -> impl bincode::config::Config {
    bincode::config::standard()
        .with_little_endian()
        .with_fixed_int_encoding()
        .with_limit::<{ ROOT_LEN_MAX }>()
}

/// Puts an encoding into an envelope.
fn seal(content: &impl Serialize, limit: usize) -> Result<Vec<u8>, Defect> {
    let content = bincode::serde::encode_to_vec(content, bincode_config())
        .map_err(|error| Defect::Metadata(error.to_string()))?;
    check_limit("metadata length", content.len() as u64, limit.min(ROOT_LEN_MAX) as u64)?;
    let mut out = Vec::with_capacity(ENVELOPE_HEAD_LEN + content.len());
    out.extend_from_slice(&(content.len() as u32).to_le_bytes());
    out.extend_from_slice(&crc32fast::hash(&content).to_le_bytes());
    out.extend_from_slice(&content);
    Ok(out)
}

/// Takes an encoding out of its envelope and decodes all of it.
fn open<'a, S>(bytes: &'a [u8], limit: usize, seed: S) -> Result<(S::Value, usize), Defect>
where
    S: DeserializeSeed<'a>,
{
    let head: &[u8; ENVELOPE_HEAD_LEN] = array(bytes, 0)?;
    let (len, crc) = (u32::get(head), u32::get(&head[4..]));
    check_limit("metadata length", u64::from(len), limit.min(ROOT_LEN_MAX) as u64)?;
    let content = slice(bytes, ENVELOPE_HEAD_LEN, len as usize)?;
    check_crc("metadata", crc, content)?;
    Ok((decode_all(seed, content)?, ENVELOPE_HEAD_LEN + content.len()))
}

/// Decodes `content`, of which nothing may be left over.
pub(crate) fn decode_all<'a, S>(seed: S, content: &'a [u8]) -> Result<S::Value, Defect>
where
    S: DeserializeSeed<'a>,
{
    let (value, used) = bincode::serde::seed_decode_from_slice(seed, content, bincode_config()).map_err(
        |error| match error {
            DecodeError::OtherString(text) => Defect::Metadata(text),
            other => Defect::Metadata(format!("{other:?}")),
        },
    )?;
    if used != content.len() {
        return Err(Defect::Metadata(format!("{} bytes are left over", content.len() - used)));
    }
    Ok(value)
}

/// Refuses a value that nests more deeply than decoding allows.
fn check_depth(value: &Value, depth_left: usize) -> Result<(), Defect> {
    let deeper = || {
        depth_left.checked_sub(1).ok_or(Defect::Limit {
            what: "nesting depth of a value",
            found: VALUE_DEPTH_MAX as u64 + 1,
            limit: VALUE_DEPTH_MAX as u64,
        })
    };
    match value {
        Value::List(values) => {
            let depth_left = deeper()?;
            values.iter().try_for_each(|value| check_depth(value, depth_left))
        }
        Value::Map(entries) => check_entries(entries, deeper()?),
        _ => Ok(()),
    }
}

fn check_entries(entries: &Metadata, depth_left: usize) -> Result<(), Defect> {
    entries.iter().try_for_each(|(name, value)| {
        check_name(name)?;
        check_depth(value, depth_left)
    })
}

fn check_name(name: &str) -> Result<(), Defect> {
    check_limit("length of a name", name.len() as u64, NAME_LEN_MAX as u64)
}

/// Gives bytes to serde as bytes; a `Vec<u8>` alone would be a list of numbers.
pub(crate) fn serialize_bytes<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

/// Takes bytes from serde as bytes.
pub(crate) fn deserialize_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    BytesSeed.deserialize(deserializer)
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ValueSeed { depth_left: VALUE_DEPTH_MAX }.deserialize(deserializer)
    }
}

/// The variants of [`Value`], in the order that gives their number on disk.
#[derive(Clone, Copy, Deserialize)]
#[serde(variant_identifier)]
enum Kind {
    Null,
    Bool,
    I64,
    U64,
    F64,
    String,
    Bytes,
    List,
    Map,
}

const KINDS: &[&str] = &["Null", "Bool", "I64", "U64", "F64", "String", "Bytes", "List", "Map"];

/// Decodes a value in which `depth_left` more lists and maps may nest.
struct ValueSeed {
    depth_left: usize,
}

impl ValueSeed {
    fn deeper<E: serde::de::Error>(&self) -> Result<usize, E> {
        self.depth_left
            .checked_sub(1)
            .ok_or_else(|| E::custom(format_args!("a value nests more than {VALUE_DEPTH_MAX} deep")))
    }
}

impl<'de> DeserializeSeed<'de> for ValueSeed {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_enum("Value", KINDS, self)
    }
}

impl<'de> Visitor<'de> for ValueSeed {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<Value, A::Error> {
        let (kind, content) = access.variant::<Kind>()?;
        Ok(match kind {
            Kind::Null => {
                content.unit_variant()?;
                Value::Null
            }
            Kind::Bool => Value::Bool(content.newtype_variant()?),
            Kind::I64 => Value::I64(content.newtype_variant()?),
            Kind::U64 => Value::U64(content.newtype_variant()?),
            Kind::F64 => Value::F64(content.newtype_variant()?),
            Kind::String => Value::String(content.newtype_variant_seed(TextSeed { len_max: ROOT_LEN_MAX })?),
            Kind::Bytes => Value::Bytes(content.newtype_variant_seed(BytesSeed)?),
            Kind::List => {
                let depth_left = self.deeper()?;
                Value::List(content.newtype_variant_seed(ListSeed { depth_left })?)
            }
            Kind::Map => {
                let depth_left = self.deeper()?;
                Value::Map(content.newtype_variant_seed(MapSeed { depth_left })?)
            }
        })
    }
}

/// Decodes the values of a list.
struct ListSeed {
    depth_left: usize,
}

impl<'de> DeserializeSeed<'de> for ListSeed {
    type Value = Vec<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<Value>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ListSeed {
    type Value = Vec<Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of values")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Vec<Value>, A::Error> {
        // Grown as values arrive: the count is only a claim, and each value takes at least four bytes.
        let mut values = Vec::new();
        while let Some(value) = access.next_element_seed(ValueSeed { depth_left: self.depth_left })? {
            values.push(value);
        }
        Ok(values)
    }
}

/// Decodes named values, which must ascend strictly.
struct MapSeed {
    depth_left: usize,
}

impl<'de> DeserializeSeed<'de> for MapSeed {
    type Value = Metadata;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Metadata, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MapSeed {
    type Value = Metadata;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("named values in ascending order")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Metadata, A::Error> {
        let mut entries = Metadata::new();
        while let Some(name) = access.next_key_seed(TextSeed { len_max: NAME_LEN_MAX })? {
            if entries.last_key_value().is_some_and(|(last, _)| *last >= name) {
                return Err(A::Error::custom("names do not ascend"));
            }
            let value = access.next_value_seed(ValueSeed { depth_left: self.depth_left })?;
            entries.insert(name, value);
        }
        Ok(entries)
    }
}

/// Decodes a name and its value.
struct EntrySeed;

impl<'de> DeserializeSeed<'de> for EntrySeed {
    type Value = (String, Value);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(String, Value), D::Error> {
        deserializer.deserialize_tuple(2, self)
    }
}

impl<'de> Visitor<'de> for EntrySeed {
    type Value = (String, Value);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name and a value")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<(String, Value), A::Error> {
        let missing = |index| A::Error::invalid_length(index, &"a name and a value");
        let name = access.next_element_seed(TextSeed { len_max: NAME_LEN_MAX })?.ok_or_else(|| missing(0))?;
        let value =
            access.next_element_seed(ValueSeed { depth_left: VALUE_DEPTH_MAX })?.ok_or_else(|| missing(1))?;
        Ok((name, value))
    }
}

/// Decodes text, borrowing it from the input first, so that a claimed length allocates nothing.
struct TextSeed {
    len_max: usize,
}

impl<'de> DeserializeSeed<'de> for TextSeed {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for TextSeed {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "text of at most {} bytes", self.len_max)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<String, E> {
        if text.len() > self.len_max {
            return Err(E::invalid_length(text.len(), &self));
        }
        Ok(text.to_owned())
    }
}

/// Decodes bytes, borrowing them from the input first.
struct BytesSeed;

impl<'de> DeserializeSeed<'de> for BytesSeed {
    type Value = Vec<u8>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<u8>, D::Error> {
        deserializer.deserialize_bytes(self)
    }
}

impl<'de> Visitor<'de> for BytesSeed {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
        Ok(bytes.to_vec())
    }

    /// Text formats have no bytes of their own and give a list of numbers.
    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Vec<u8>, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = access.next_element()? {
            bytes.push(byte);
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::METADATA_LEN_MAX;

    const LIMIT: usize = METADATA_LEN_MAX;

    fn sample() -> Metadata {
        let inner = Metadata::from([("a".into(), Value::Null), ("b".into(), Value::from(-3_i64))]);
        Metadata::from([
            ("bool".into(), Value::from(true)),
            ("bytes".into(), Value::from(vec![0_u8, 255])),
            ("float".into(), Value::F64(f64::from_bits(0x7ff8_dead_beef_0001))),
            ("list".into(), Value::from(vec![Value::from(u64::MAX), Value::from("é")])),
            ("map".into(), Value::from(inner)),
            ("text".into(), Value::from("")),
        ])
    }

    /// `content` in an envelope that is itself sound.
    fn envelope(content: &[u8]) -> Vec<u8> {
        let mut out = (content.len() as u32).to_le_bytes().to_vec();
        out.extend_from_slice(&crc32fast::hash(content).to_le_bytes());
        out.extend_from_slice(content);
        out
    }

    /// A name as a map key.
    fn name(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    const NULL: [u8; 4] = [0; 4];

    fn nested(depth: usize) -> Value {
        (0..depth).fold(Value::Null, |value, level| {
            if level % 2 == 0 {
                Value::List(vec![value])
            } else {
                Value::Map([(String::new(), value)].into())
            }
        })
    }

    #[test]
    fn metadata_and_entries_round_trip_to_the_same_bytes() {
        for metadata in [Metadata::new(), sample()] {
            let bytes = encode_metadata(&metadata, LIMIT).unwrap();
            let mut more = bytes.clone();
            more.extend_from_slice(b"what follows is not part of it");
            let (decoded, used) = decode_metadata(&more, LIMIT).unwrap();
            assert_eq!((&decoded, used), (&metadata, bytes.len()));
            assert_eq!(encode_metadata(&decoded, LIMIT).unwrap(), bytes);
        }
        for (name, value) in sample() {
            let bytes = encode_entry(&name, &value, LIMIT).unwrap();
            assert_eq!(decode_entry(&bytes, LIMIT).unwrap(), ((name, value), bytes.len()));
        }
    }

    #[test]
    fn bytes_are_as_specified() {
        let value = Value::from(vec![Value::Null, Value::from(7_u64)]);
        let bytes = encode_entry("ab", &value, LIMIT).unwrap();
        let content = [
            &[2, 0, 0, 0, 0, 0, 0, 0][..], // length of the name
            b"ab",
            &[7, 0, 0, 0],             // kind: list
            &[2, 0, 0, 0, 0, 0, 0, 0], // two values
            &NULL,
            &[3, 0, 0, 0], // kind: u64
            &[7, 0, 0, 0, 0, 0, 0, 0],
        ]
        .concat();
        assert_eq!(bytes, envelope(&content));
    }

    #[test]
    fn floats_are_equal_by_their_bits() {
        assert_eq!(Value::F64(f64::NAN), Value::F64(f64::NAN));
        assert_ne!(Value::F64(0.0), Value::F64(-0.0));
        assert_ne!(Value::I64(1), Value::U64(1));
    }

    #[test]
    fn damaged_envelopes_are_refused() {
        let bytes = encode_metadata(&sample(), LIMIT).unwrap();
        for len in 0..bytes.len() {
            assert!(
                matches!(decode_metadata(&bytes[..len], LIMIT), Err(Defect::Truncated { .. })),
                "cut to {len}"
            );
        }
        for index in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[index] ^= 0x10;
            assert!(decode_metadata(&damaged, LIMIT).is_err(), "bit flipped in byte {index}");
        }
        let content_len = bytes.len() - ENVELOPE_HEAD_LEN;
        let too_long = Defect::Limit {
            what: "metadata length",
            found: content_len as u64,
            limit: content_len as u64 - 1,
        };
        assert_eq!(decode_metadata(&bytes, content_len - 1).unwrap_err(), too_long);
        assert_eq!(encode_metadata(&sample(), content_len - 1).unwrap_err(), too_long);
    }

    #[test]
    fn sound_envelopes_of_anything_but_one_canonical_encoding_are_refused() {
        let count = |n: u64| n.to_le_bytes().to_vec();
        let kind = |n: u32| n.to_le_bytes().to_vec();
        let pair = |a: &str, b: &str| [count(2), name(a), NULL.to_vec(), name(b), NULL.to_vec()].concat();
        assert!(decode_metadata(&envelope(&pair("a", "b")), LIMIT).is_ok());
        let one = |value: &[Vec<u8>]| [count(1), name("a"), value.concat()].concat();
        for (why, content) in [
            ("nothing at all", vec![]),
            ("bytes left over", [count(0), vec![0]].concat()),
            ("names descend", pair("b", "a")),
            ("a name twice", pair("a", "a")),
            ("an unknown kind", one(&[kind(9)])),
            ("a bool of 2", one(&[kind(1), vec![2]])),
            ("text that is not UTF-8", one(&[kind(5), count(1), vec![0xff]])),
            ("more text than there is", one(&[kind(5), count(u64::MAX), vec![b'a']])),
            ("more bytes than there are", one(&[kind(6), count(1 << 40), vec![b'a']])),
            ("more values than there are", one(&[kind(7), count(u64::MAX)])),
            ("more entries than there are", count(u64::MAX)),
            ("a name of 256 bytes", [count(1), name(&"n".repeat(256)), NULL.to_vec()].concat()),
        ] {
            let found = decode_metadata(&envelope(&content), LIMIT);
            assert!(matches!(found, Err(Defect::Metadata(_))), "{why}: {found:?}");
        }
    }

    #[test]
    fn nesting_and_names_are_limited_on_both_ways() {
        let deepest = nested(VALUE_DEPTH_MAX);
        let bytes = encode_entry("v", &deepest, LIMIT).unwrap();
        assert_eq!(decode_entry(&bytes, LIMIT).unwrap().0.1, deepest);
        assert!(matches!(
            encode_entry("v", &nested(VALUE_DEPTH_MAX + 1), LIMIT),
            Err(Defect::Limit { found: 33, limit: 32, .. })
        ));

        // A list within a list, 4,000 deep, in sound bytes that no encoder of ours makes.
        let step = [&7_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat();
        let content = [name("v"), step.repeat(4000), NULL.to_vec()].concat();
        let found = decode_entry(&envelope(&content), LIMIT);
        assert_eq!(found, Err(Defect::Metadata("a value nests more than 32 deep".into())));

        let longest = "n".repeat(NAME_LEN_MAX);
        let bytes = encode_entry(&longest, &Value::Null, LIMIT).unwrap();
        assert_eq!(decode_entry(&bytes, LIMIT).unwrap().0.0, longest);
        let inner = Value::Map([("n".repeat(256), Value::Null)].into());
        for found in [encode_entry(&"n".repeat(256), &Value::Null, LIMIT), encode_entry("v", &inner, LIMIT)] {
            assert!(matches!(found, Err(Defect::Limit { found: 256, limit: 255, .. })), "{found:?}");
        }
    }
}
