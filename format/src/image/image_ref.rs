//! References to images. A reference contains the location, the encoding and the checksums of an image.

use std::borrow::Cow;

use super::codec::{Codec, EXPANSION_MAX, decompress};
use super::file::IMAGE_HEADER_BLOCK;
use crate::defect::{Defect, check_crc, check_equal, check_limit, reserve};
use crate::limits::{CHUNK_LEN_MAX, FRAME_ALIGN, PAGE_LEN_MAX};

/// Maximum offset of a chunk in bytes. The sum of such an offset and a length cannot overflow.
pub(super) const CHUNK_OFFSET_MAX: u64 = 1 << 62;

/// A reference to an image, as recorded in manifests and frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageRef {
    /// The number of the image file that contains the payload.
    pub file: u64,
    /// The offset of the payload, in bytes from the start of the file.
    pub offset: u64,
    /// Length of the stored payload in bytes.
    pub stored_len: u64,
    /// CRC-32 of the stored payload.
    pub stored_crc: u32,
    /// CRC-32 of the page's bytes.
    pub raw_crc: u32,
    /// The encoding of the payload.
    pub codec: Codec,
}

impl ImageRef {
    /// Returns the image files that contain this image, and the number of stored bytes in each file. An overlay has two
    /// files: its own file, and the file of its base.
    pub fn files(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let base = match self.codec {
            Codec::Raw | Codec::Zstd => None,
            Codec::Overlay(base) => Some((base.file, base.stored_len)),
        };
        std::iter::once((self.file, self.stored_len)).chain(base)
    }

    /// Returns true if the payload contains all bytes of the page. Only overlays do not.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !matches!(self.codec, Codec::Overlay(_))
    }

    /// Checks that the reference is valid for a page of length `len` (SPEC C4 and M7). The image file is not read.
    ///
    /// # Errors
    /// Returns the first [`Defect`] that is found.
    pub fn check(&self, len: u64) -> Result<(), Defect> {
        check_extent(len, self.stored_len, self.offset)?;
        match self.codec {
            Codec::Raw => {
                check_equal("stored length of a raw image", self.stored_len, len)?;
                check_equal("raw checksum of a raw image", self.raw_crc.into(), self.stored_crc.into())
            }
            Codec::Zstd => {
                // A writer stores a compressed payload only if it is shorter than the page. The ratio of zstd has a
                // maximum.
                check_limit("stored length of a compressed image", self.stored_len, len - 1)?;
                check_limit(
                    "length of a compressed image",
                    len,
                    self.stored_len.saturating_mul(EXPANSION_MAX),
                )
            }
            Codec::Overlay(base) => {
                // A writer stores an overlay only if it is shorter than the page.
                check_limit("stored length of an overlay", self.stored_len, len - 1)?;
                base.check()
            }
        }
    }

    /// Checks that `stored` is the stored payload of this image.
    ///
    /// # Errors
    /// Returns [`Defect::Mismatch`] if the length is wrong, or [`Defect::Checksum`] if the bytes are wrong.
    pub fn check_payload(&self, stored: &[u8]) -> Result<(), Defect> {
        check_equal("length of an image's payload", stored.len() as u64, self.stored_len)?;
        check_crc("image", self.stored_crc, stored)
    }

    /// Decodes a stored payload into the `len` bytes of the page. Verifies the checksums of the stored payload and of
    /// the page, and allocates memory for at most `len` bytes.
    ///
    /// # Errors
    /// Returns a [`Defect`] if the reference or the payload is invalid, if there is not enough memory, or if the image
    /// is an overlay.
    pub fn decode<'a>(&self, stored: Cow<'a, [u8]>, len: u64) -> Result<Cow<'a, [u8]>, Defect> {
        self.check(len)?;
        self.check_payload(&stored)?;
        match self.codec {
            Codec::Raw => Ok(stored),
            Codec::Zstd => {
                let mut bytes = Vec::new();
                reserve(&mut bytes, len)?;
                decompress(&stored, len, |piece| bytes.extend_from_slice(piece))?;
                check_crc("page", self.raw_crc, &bytes)?;
                Ok(bytes.into())
            }
            Codec::Overlay(_) => Err(without_base()),
        }
    }

    /// Checks that a stored payload decodes to a page of length `len`. The memory use does not depend on the length.
    /// The payload of an overlay always fails this check.
    ///
    /// # Errors
    /// Returns the same [`Defect`] as [`ImageRef::decode`].
    pub fn check_content(&self, stored: &[u8], len: u64) -> Result<(), Defect> {
        self.content_pieces(stored, len, |_| {})
    }

    /// Checks a payload as [`ImageRef::check_content`] does, and passes the bytes of the page to `sink` in pieces.
    /// Until this function returns `Ok`, the bytes are not verified.
    pub(crate) fn content_pieces(
        &self,
        stored: &[u8],
        len: u64,
        mut sink: impl FnMut(&[u8]),
    ) -> Result<(), Defect> {
        self.check(len)?;
        self.check_payload(stored)?;
        match self.codec {
            Codec::Raw => {
                sink(stored);
                Ok(())
            }
            Codec::Zstd => {
                let mut hasher = crc32fast::Hasher::new();
                decompress(stored, len, |piece| {
                    hasher.update(piece);
                    sink(piece);
                })?;
                let (found, computed) = (self.raw_crc, hasher.finalize());
                if found == computed {
                    Ok(())
                } else {
                    Err(Defect::Checksum { what: "page", found, computed })
                }
            }
            Codec::Overlay(_) => Err(without_base()),
        }
    }
}

/// Returns the defect for an overlay that is decoded without its base.
fn without_base() -> Defect {
    Defect::Field { what: "codec of an image that must not be an overlay", found: 2 }
}

/// Checks the ranges of the lengths and the offset of an image.
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
