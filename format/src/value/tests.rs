//! Tests of values and their envelopes: round trips, specified bytes, and invalid input.

use super::*;
use crate::defect::Defect;
use crate::limits::{METADATA_LEN_MAX, NAME_LEN_MAX, VALUE_DEPTH_MAX};

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

fn envelope(content: &[u8]) -> Vec<u8> {
    let mut out = (content.len() as u32).to_le_bytes().to_vec();
    out.extend_from_slice(&crc32fast::hash(content).to_le_bytes());
    out.extend_from_slice(content);
    out
}

fn name(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

const NULL: [u8; 4] = [0; 4];

fn nested(depth: usize) -> Value {
    (0..depth).fold(Value::Null, |value, level| {
        if level % 2 == 0 { Value::List(vec![value]) } else { Value::Map([(String::new(), value)].into()) }
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
fn value_encoding_has_specified_bytes() {
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
    let too_long =
        Defect::Limit { what: "metadata length", found: content_len as u64, limit: content_len as u64 - 1 };
    assert_eq!(decode_metadata(&bytes, content_len - 1).unwrap_err(), too_long);
    assert_eq!(encode_metadata(&sample(), content_len - 1).unwrap_err(), too_long);
}

#[test]
fn envelope_with_non_canonical_encoding_is_refused() {
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
fn encoding_and_decoding_limit_nesting_and_names() {
    let deepest = nested(VALUE_DEPTH_MAX);
    let bytes = encode_entry("v", &deepest, LIMIT).unwrap();
    assert_eq!(decode_entry(&bytes, LIMIT).unwrap().0.1, deepest);
    assert!(matches!(
        encode_entry("v", &nested(VALUE_DEPTH_MAX + 1), LIMIT),
        Err(Defect::Limit { found: 33, limit: 32, .. })
    ));

    // A list nested 4,000 deep, in valid bytes that this encoder never writes.
    let step = [&7_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat();
    let content = [name("v"), step.repeat(4000), NULL.to_vec()].concat();
    let found = decode_entry(&envelope(&content), LIMIT);
    assert_eq!(found, Err(Defect::Metadata("value is nested more than 32 levels deep".into())));

    let longest = "n".repeat(NAME_LEN_MAX);
    let bytes = encode_entry(&longest, &Value::Null, LIMIT).unwrap();
    assert_eq!(decode_entry(&bytes, LIMIT).unwrap().0.0, longest);
    let inner = Value::Map([("n".repeat(256), Value::Null)].into());
    for found in [encode_entry(&"n".repeat(256), &Value::Null, LIMIT), encode_entry("v", &inner, LIMIT)] {
        assert!(matches!(found, Err(Defect::Limit { found: 256, limit: 255, .. })), "{found:?}");
    }
}
