//! Floor 0. What others say of an image: where it lies, how it is stored, what proves it.

use super::chunk::CHUNK_OFFSET_MAX;
use super::file::IMAGE_HEADER_BLOCK;
use crate::defect::{Defect, check_crc, check_equal, check_limit};
use crate::limits::{CHUNK_LEN_MAX, FRAME_ALIGN, PAGE_LEN_MAX};

const CODEC_RAW: u8 = 0;

/// How a payload is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Codec {
    /// The page's bytes as they are.
    #[default]
    Raw,
}

impl Codec {
    /// The codec's number on disk.
    #[must_use]
    pub fn to_raw(self) -> u8 {
        match self {
            Codec::Raw => CODEC_RAW,
        }
    }

    /// The codec of a number on disk.
    ///
    /// # Errors
    /// [`Defect::Field`] if this build knows no such codec.
    pub fn from_raw(raw: u8) -> Result<Self, Defect> {
        match raw {
            CODEC_RAW => Ok(Codec::Raw),
            other => Err(Defect::Field { what: "image codec", found: other.into() }),
        }
    }
}

/// Where an image lies, and how its bytes are proven: what manifests and frames say of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageRef {
    /// The image file's number.
    pub file: u64,
    /// Where the payload lies: bytes from the file's start.
    pub offset: u64,
    /// Length of the payload as it is stored.
    pub stored_len: u64,
    /// CRC-32 of the payload as it is stored.
    pub stored_crc: u32,
    /// CRC-32 of the page's bytes.
    pub raw_crc: u32,
    /// How the payload is stored.
    pub codec: Codec,
}

impl ImageRef {
    /// Refuses an image that cannot be a page's of length `len`.
    ///
    /// # Errors
    /// The defect.
    pub fn check(&self, len: u64) -> Result<(), Defect> {
        check_extent(len, self.stored_len, self.offset)?;
        match self.codec {
            Codec::Raw => {
                check_equal("stored length of a raw image", self.stored_len, len)?;
                check_equal("raw checksum of a raw image", self.raw_crc.into(), self.stored_crc.into())
            }
        }
    }

    /// Refuses bytes that are not this image's payload as it is stored.
    ///
    /// # Errors
    /// [`Defect::Mismatch`] if there are too many or too few of them, [`Defect::Checksum`].
    pub fn check_payload(&self, stored: &[u8]) -> Result<(), Defect> {
        check_equal("length of an image's payload", stored.len() as u64, self.stored_len)?;
        check_crc("image", self.stored_crc, stored)
    }
}

/// Refuses lengths and offsets that no image has.
fn check_extent(len: u64, stored_len: u64, offset: u64) -> Result<(), Defect> {
    for (what, found) in [("page length", len), ("stored length", stored_len)] {
        check_limit(what, found, PAGE_LEN_MAX)?;
        if found == 0 {
            return Err(Defect::Field { what, found });
        }
    }
    check_limit("image offset", offset, CHUNK_OFFSET_MAX + CHUNK_LEN_MAX)?;
    if offset < IMAGE_HEADER_BLOCK || !offset.is_multiple_of(FRAME_ALIGN) {
        return Err(Defect::Field { what: "image offset", found: offset });
    }
    Ok(())
}
