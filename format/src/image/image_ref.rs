//! References to an image: where it lies, how it is stored, and the checksums that prove it.

use std::borrow::Cow;

use super::codec::{Codec, EXPANSION_MAX, decompress};
use super::file::IMAGE_HEADER_BLOCK;
use crate::defect::{Defect, check_crc, check_equal, check_limit, reserve};
use crate::limits::{CHUNK_LEN_MAX, FRAME_ALIGN, PAGE_LEN_MAX};

/// The highest offset at which a chunk may start; sums of offsets and lengths cannot overflow below it.
pub(super) const CHUNK_OFFSET_MAX: u64 = 1 << 62;

/// The place and the checksums of an image, as manifests and frames give them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageRef {
    /// The image file's number.
    pub file: u64,
    /// The payload's offset, in bytes from the file's start.
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
    /// The image files that hold it, each with the bytes of it that lie there: one, or that of an overlay and
    /// that of its base.
    pub fn files(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let base = match self.codec {
            Codec::Raw | Codec::Zstd => None,
            Codec::Overlay(base) => Some((base.file, base.stored_len)),
        };
        std::iter::once((self.file, self.stored_len)).chain(base)
    }

    /// Whether the payload alone gives the page's bytes.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !matches!(self.codec, Codec::Overlay(_))
    }

    /// Refuses an image that cannot be one of a page of length `len` (SPEC C4 and M7).
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
            Codec::Zstd => {
                // A writer keeps a compressed payload only if it is shorter, and no zstd frame stands for
                // more.
                check_limit("stored length of a compressed image", self.stored_len, len - 1)?;
                check_limit(
                    "length of a compressed image",
                    len,
                    self.stored_len.saturating_mul(EXPANSION_MAX),
                )
            }
            Codec::Overlay(base) => {
                // Likewise: a page of which more changed is written whole.
                check_limit("stored length of an overlay", self.stored_len, len - 1)?;
                base.check()
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

    /// The page's bytes, `len` of them, from the payload of an image that is whole. The payload is checked as
    /// it is stored before anything is made of it, and its result is checked once more. No more than `len`
    /// bytes are ever held.
    ///
    /// # Errors
    /// A [`Defect`].
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

    /// Refuses a payload that does not give a page of length `len`, as that of an overlay never does alone.
    /// It takes little memory, whatever the length.
    ///
    /// # Errors
    /// As for [`ImageRef::decode`].
    pub fn check_content(&self, stored: &[u8], len: u64) -> Result<(), Defect> {
        self.content_pieces(stored, len, |_| {})
    }

    /// As [`ImageRef::check_content`], and hands the page's bytes to `sink`, piece by piece. They are proven
    /// when this returns, and not before.
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

/// The payload of an overlay was taken for a page's.
fn without_base() -> Defect {
    Defect::Field { what: "codec of a payload that is to be a whole page", found: 2 }
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
