//! The encoding of data that agents exchange: little-endian numbers, byte strings with their lengths, and a checksum at
//! the end.

use crate::base::allocation::make_room;
use crate::error::{NixlError, Result};

/// The length of the checksum at the end of a message, in bytes.
const CRC_LEN: usize = 4;

/// Encodes a message.
pub(super) struct Writer(Vec<u8>);

impl Writer {
    /// Starts a message with a magic number and a version.
    pub fn new(magic: [u8; 4], version: u8) -> Self {
        let mut bytes = magic.to_vec();
        bytes.push(version);
        Self(bytes)
    }

    /// Starts an encoding without a header. The caller adds the encoding to a message as a byte string.
    pub fn part() -> Self {
        Self(Vec::new())
    }

    pub fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    pub fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a byte string with its length.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self = self.u64(bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    /// Appends a byte string with its length to a long message.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn try_bytes(mut self, bytes: &[u8]) -> Result<Self> {
        make_room(&mut self.0, 8 + bytes.len() + CRC_LEN)?;
        Ok(self.bytes(bytes))
    }

    /// Returns the encoding without a checksum.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// Appends the checksum and returns the message.
    pub fn finish(mut self) -> Vec<u8> {
        self.0.extend(crc32fast::hash(&self.0).to_le_bytes());
        self.0
    }
}

/// Decodes a message whose checksum was verified.
pub(super) struct Reader<'b>(&'b [u8]);

/// The error for a truncated message.
const SHORT: NixlError = NixlError::InvalidMetadata { reason: "they are truncated" };

impl<'b> Reader<'b> {
    /// Verifies the checksum and the magic number of a message. Returns the version of the message, and a reader of its
    /// contents.
    ///
    /// # Errors
    /// `InvalidMetadata`.
    pub fn open(bytes: &'b [u8], magic: [u8; 4]) -> Result<(u8, Self), NixlError> {
        let (body, crc) = bytes.split_last_chunk::<CRC_LEN>().ok_or(SHORT)?;
        let contents = body.strip_prefix(&magic);
        let contents =
            contents.ok_or(NixlError::InvalidMetadata { reason: "their magic number does not match" })?;
        if crc32fast::hash(body) != u32::from_le_bytes(*crc) {
            return Err(NixlError::InvalidMetadata { reason: "their checksum does not match" });
        }
        let (version, contents) = contents.split_first().ok_or(SHORT)?;
        Ok((*version, Self(contents)))
    }

    /// Returns a reader of a byte string of a message.
    pub fn part(bytes: &'b [u8]) -> Self {
        Self(bytes)
    }

    fn take(&mut self, len: usize) -> Result<&'b [u8], NixlError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(SHORT)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], NixlError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(SHORT)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub fn u8(&mut self) -> Result<u8, NixlError> {
        self.array().map(u8::from_le_bytes)
    }

    pub fn u16(&mut self) -> Result<u16, NixlError> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, NixlError> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn numbers<const N: usize>(&mut self) -> Result<[u64; N], NixlError> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = self.u64()?;
        }
        Ok(numbers)
    }

    pub fn bytes(&mut self) -> Result<&'b [u8], NixlError> {
        let len = self.u64()?;
        self.take(usize::try_from(len).map_err(|_| SHORT)?)
    }

    pub fn text(&mut self) -> Result<String, NixlError> {
        let text = std::str::from_utf8(self.bytes()?);
        Ok(text.map_err(|_| NixlError::InvalidMetadata { reason: "a name is not UTF-8" })?.to_owned())
    }

    /// Reads a list of numbers.
    pub fn u64s(&mut self) -> Result<Vec<u64>, NixlError> {
        let count = usize::try_from(self.u64()?).map_err(|_| SHORT)?;
        let bytes = self.take(count.checked_mul(8).ok_or(SHORT)?)?;
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        Ok(bytes.chunks(8).map(number).collect())
    }

    /// Checks that all bytes were read.
    ///
    /// # Errors
    /// `InvalidMetadata`.
    pub fn finish(self) -> Result<(), NixlError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(NixlError::InvalidMetadata { reason: "they contain extra bytes at the end" })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: [u8; 4] = *b"test";

    fn read(bytes: &[u8]) -> Result<(u8, u16, u64, String), NixlError> {
        let (version, mut reader) = Reader::open(bytes, MAGIC)?;
        assert_eq!(version, 3);
        let read = (reader.u8()?, reader.u16()?, reader.u64()?, reader.text()?);
        reader.finish()?;
        Ok(read)
    }

    #[test]
    fn message_round_trips_and_damage_is_detected() {
        let message = || Writer::new(MAGIC, 3).u8(1).u16(2).u64(3).bytes("four".as_bytes());
        let bytes = message().finish();
        assert_eq!(read(&bytes), Ok((1, 2, 3, "four".to_owned())));
        for len in 0..bytes.len() {
            assert!(read(&bytes[..len]).is_err(), "{len} bytes");
        }
        for bit in 0..8 * bytes.len() {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&flipped).is_err(), "bit {bit}");
        }
        let reason = |bytes: Vec<u8>| match read(&bytes) {
            Err(NixlError::InvalidMetadata { reason }) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(reason(message().u8(0).finish()), "they contain extra bytes at the end");
        assert_eq!(
            reason(Writer::new(MAGIC, 3).u8(1).u16(2).u64(3).u64(u64::MAX).finish()),
            "they are truncated"
        );
        let not_text = Writer::new(MAGIC, 3).u8(1).u16(2).u64(3).bytes(&[0xFF]).finish();
        assert_eq!(reason(not_text), "a name is not UTF-8");
        assert_eq!(reason(Writer::new(*b"else", 3).finish()), "their magic number does not match");
    }
}
