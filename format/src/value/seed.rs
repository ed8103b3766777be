//! Decoding of values. Nesting is bounded, text and bytes are borrowed before they are copied, and no memory is
//! allocated for a count before the items are decoded.

use std::fmt;

use serde::de::{DeserializeSeed, EnumAccess, Error as _, MapAccess, SeqAccess, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Metadata, Value};
use crate::limits::{NAME_LEN_MAX, ROOT_LEN_MAX, VALUE_DEPTH_MAX};

/// Deserializes a byte string that [`serialize_bytes`](super::serialize_bytes) serialized.
pub(crate) fn deserialize_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    BytesSeed.deserialize(deserializer)
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ValueSeed { depth_left: VALUE_DEPTH_MAX }.deserialize(deserializer)
    }
}

/// The kinds of [`Value`], in the order of their numbers on disk.
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

/// Decodes a value that contains up to `depth_left` levels of lists and maps.
struct ValueSeed {
    depth_left: usize,
}

impl ValueSeed {
    fn deeper<E: serde::de::Error>(&self) -> Result<usize, E> {
        self.depth_left
            .checked_sub(1)
            .ok_or_else(|| E::custom(format_args!("value is nested more than {VALUE_DEPTH_MAX} levels deep")))
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
        // The list grows as values are decoded, because the count is not trusted. Each value takes at least four bytes
        // of input.
        let mut values = Vec::new();
        while let Some(value) = access.next_element_seed(ValueSeed { depth_left: self.depth_left })? {
            values.push(value);
        }
        Ok(values)
    }
}

/// Decodes a map. Returns an error if its names are not in strictly ascending order.
pub(super) struct MapSeed {
    pub depth_left: usize,
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
                return Err(A::Error::custom("names are not in ascending order"));
            }
            let value = access.next_value_seed(ValueSeed { depth_left: self.depth_left })?;
            entries.insert(name, value);
        }
        Ok(entries)
    }
}

pub(super) struct EntrySeed;

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

/// Decodes text, which is borrowed from the input before it is copied.
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

/// Decodes a byte string, which is borrowed from the input before it is copied.
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

    /// Accepts a list of numbers, because text formats cannot represent a byte string.
    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Vec<u8>, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = access.next_element()? {
            bytes.push(byte);
        }
        Ok(bytes)
    }
}
