//! The JSON representation of values in the output of all commands.
//!
//! A command prints one object per line, and each object starts with `"schema": 1`. 64-bit integers are numbers. Bytes,
//! and keys that are not UTF-8, are `{"$bytes": base64}`. Floats that JSON cannot represent are the strings `"NaN"`,
//! `"Infinity"` and `"-Infinity"`. A place is its name, such as `"host"` or `"device:0"`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use remanent_format::Key;
use remanent_format::value::{Metadata, Value};
use serde_json::{Map, json};

/// Version of the objects that `--json` prints. Adding a field to an object does not change the version.
pub const SCHEMA: u32 = 1;

/// Builds an object of the current schema that contains the given fields in order.
macro_rules! object {
    ($($name:literal: $value:expr),* $(,)?) => {
        serde_json::json!({ "schema": $crate::cli::json::SCHEMA, $($name: $value),* })
    };
}
pub(crate) use object;

/// Returns bytes as a JSON object with their base64 encoding.
pub fn bytes(bytes: &[u8]) -> serde_json::Value {
    json!({ "$bytes": STANDARD.encode(bytes) })
}

/// Returns the key of a page as a JSON string, or as an object with its bytes if the key is not UTF-8. Returns null if
/// the page has no key.
pub fn key(key: Option<&Key>) -> serde_json::Value {
    key.map_or(serde_json::Value::Null, |key| key.as_str().map_or_else(|| bytes(key.as_bytes()), Into::into))
}

/// Returns a float as a JSON number, or as a JSON string if no JSON number represents the float.
pub fn float(value: f64) -> serde_json::Value {
    if value.is_finite() {
        value.into()
    } else if value.is_nan() {
        "NaN".into()
    } else if value > 0.0 {
        "Infinity".into()
    } else {
        "-Infinity".into()
    }
}

/// Returns a metadata value as JSON.
pub fn value(of: &Value) -> serde_json::Value {
    match of {
        Value::Null => serde_json::Value::Null,
        Value::Bool(value) => (*value).into(),
        Value::I64(value) => (*value).into(),
        Value::U64(value) => (*value).into(),
        Value::F64(value) => float(*value),
        Value::String(value) => value.as_str().into(),
        Value::Bytes(value) => bytes(value),
        Value::List(values) => values.iter().map(value).collect(),
        Value::Map(values) => metadata(values),
    }
}

/// Returns the metadata of a page, or the root, as a JSON object.
pub fn metadata(of: &Metadata) -> serde_json::Value {
    of.iter().map(|(name, of)| (name.clone(), value(of))).collect::<Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_value_converts_to_json() {
        for (of, expected) in [
            (Value::Null, "null"),
            (Value::Bool(true), "true"),
            (Value::I64(i64::MIN), "-9223372036854775808"),
            (Value::U64(u64::MAX), "18446744073709551615"),
            (Value::F64(0.5), "0.5"),
            (Value::F64(-0.0), "-0.0"),
            (Value::F64(f64::NAN), r#""NaN""#),
            (Value::F64(f64::INFINITY), r#""Infinity""#),
            (Value::F64(f64::NEG_INFINITY), r#""-Infinity""#),
            (Value::String("é\n".to_owned()), r#""é\n""#),
            (Value::Bytes(vec![0, 255, 254]), r#"{"$bytes":"AP/+"}"#),
            (Value::List(vec![Value::Null, Value::U64(1)]), "[null,1]"),
            (Value::Map(Metadata::from([("a".to_owned(), Value::Bytes(vec![]))])), r#"{"a":{"$bytes":""}}"#),
        ] {
            assert_eq!(value(&of).to_string(), expected);
        }
    }

    #[test]
    fn key_is_shown_as_text_if_possible() {
        assert_eq!(key(None).to_string(), "null");
        assert_eq!(key(Some(&Key::new("182789").unwrap())).to_string(), r#""182789""#);
        assert_eq!(key(Some(&Key::new([0xff]).unwrap())).to_string(), r#"{"$bytes":"/w=="}"#);
    }

    #[test]
    fn json_object_starts_with_schema_in_order() {
        assert_eq!(
            object! { "page": 1, "key": key(None) }.to_string(),
            r#"{"schema":1,"page":1,"key":null}"#
        );
    }
}
