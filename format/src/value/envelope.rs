//! Envelopes of metadata. An envelope contains the length, the CRC-32 and the bytes of an encoding. A decoder checks
//! the length and the CRC-32 before it decodes the bytes.

use bincode::error::DecodeError;
use serde::Serialize;
use serde::de::DeserializeSeed;

use super::seed::{EntrySeed, MapSeed};
use super::{Metadata, Value};
use crate::defect::{Defect, array, check_crc, check_limit, slice};
use crate::layout::Field;
use crate::limits::{NAME_LEN_MAX, ROOT_LEN_MAX, VALUE_DEPTH_MAX};

/// Encodes `metadata` in an envelope.
///
/// # Errors
/// Returns [`Defect::Limit`] if the encoding is longer than `limit` bytes, a name is too long, or a value is nested too
/// deeply.
pub fn encode_metadata(metadata: &Metadata, limit: usize) -> Result<Vec<u8>, Defect> {
    check_entries(metadata, VALUE_DEPTH_MAX)?;
    seal(metadata, limit)
}

/// Decodes the metadata at the start of `bytes`. Returns the metadata and the length of its envelope in bytes.
///
/// # Errors
/// Returns a [`Defect`] if the encoding is longer than `limit` bytes, truncated, damaged or not canonical.
pub fn decode_metadata(bytes: &[u8], limit: usize) -> Result<(Metadata, usize), Defect> {
    open(bytes, limit, MapSeed { depth_left: VALUE_DEPTH_MAX })
}

/// Encodes a name and a value in an envelope.
///
/// # Errors
/// Returns the same [`Defect::Limit`] as [`encode_metadata`].
pub fn encode_entry(name: &str, value: &Value, limit: usize) -> Result<Vec<u8>, Defect> {
    check_name(name)?;
    check_depth(value, VALUE_DEPTH_MAX)?;
    seal(&(name, value), limit)
}

/// Decodes the name and the value at the start of `bytes`. Returns the name, the value, and the length of the envelope
/// in bytes.
///
/// # Errors
/// Returns the same [`Defect`] as [`decode_metadata`].
pub fn decode_entry(bytes: &[u8], limit: usize) -> Result<((String, Value), usize), Defect> {
    open(bytes, limit, EntrySeed)
}

/// Length in bytes of the head of an envelope, which contains the length and the CRC-32 of the content.
pub const ENVELOPE_HEAD_LEN: usize = 8;

/// Returns the bincode configuration for all encodings in the format. Callers check the length of the input first; the
/// limit in this configuration is a second check.
pub(crate) const fn bincode_config() -> impl bincode::config::Config {
    bincode::config::standard()
        .with_little_endian()
        .with_fixed_int_encoding()
        .with_limit::<{ ROOT_LEN_MAX }>()
}

/// Encodes `content` in an envelope.
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

/// Checks an envelope and decodes its content.
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

/// Decodes `content`. Returns an error if `content` is longer than the encoding.
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
        return Err(Defect::Metadata(format!("{} bytes follow the encoding", content.len() - used)));
    }
    Ok(value)
}

/// Checks that a value is not nested more deeply than a decoder accepts.
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
