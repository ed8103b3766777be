//! Headers of image files.

use crate::defect::{Defect, array, check_crc, check_zeros};
use crate::ids::StoreId;
use crate::layout::layout;
use crate::segment::FORMAT_VERSION;

/// Length of an image file's header block in bytes. The first chunk starts at this offset.
pub const IMAGE_HEADER_BLOCK: u64 = 4096;
/// First bytes of an image file.
pub const IMAGE_FILE_MAGIC: [u8; 8] = *b"RMNTPAGE";

layout! {
    /// Encoded header of an image file. The rest of its block is zero.
    pub struct ImageFileHeaderRaw: 64 {
        /// The magic `RMNTPAGE`.
        0 => magic: [u8; 8],
        /// Format version, 1.
        8 => version: u32,
        /// Purpose for which the file was written: 1 or 2.
        12 => purpose: u32,
        /// The store's id.
        16 => store: StoreId,
        /// Number of this file, as in its name.
        32 => file: u64,
        /// Reserved, always zero.
        40 => reserved: [u8; 20],
        /// CRC-32 of the preceding bytes.
        60 => header_crc: u32,
    }
}

/// The reason that an image file was written. If no manifest or table names the file, this decides whether
/// the log may still need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImagePurpose {
    /// Written for a snapshot, or for the table of an old state.
    Snapshot,
    /// Written ahead of a batch, which names its images once they are durable.
    Batch,
}

impl ImagePurpose {
    /// Returns the number that represents the purpose on disk.
    #[must_use]
    pub fn to_raw(self) -> u32 {
        match self {
            ImagePurpose::Snapshot => 1,
            ImagePurpose::Batch => 2,
        }
    }

    /// Decodes a purpose.
    ///
    /// # Errors
    /// Returns [`Defect::Field`] if the number is unknown.
    pub fn from_raw(raw: u32) -> Result<Self, Defect> {
        match raw {
            1 => Ok(ImagePurpose::Snapshot),
            2 => Ok(ImagePurpose::Batch),
            other => Err(Defect::Field { what: "purpose of an image file", found: other.into() }),
        }
    }
}

/// Decoded header of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFileHeader {
    /// The store's id.
    pub store: StoreId,
    /// The number of this file.
    pub file: u64,
    /// The purpose for which the file was written.
    pub purpose: ImagePurpose,
}

impl ImageFileHeader {
    /// Encodes the header. The rest of the header block is zero.
    #[must_use]
    pub fn encode(&self) -> [u8; ImageFileHeaderRaw::LEN] {
        let mut raw = ImageFileHeaderRaw {
            magic: IMAGE_FILE_MAGIC,
            version: FORMAT_VERSION,
            purpose: self.purpose.to_raw(),
            store: self.store,
            file: self.file,
            reserved: [0; 20],
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..60]);
        raw.to_bytes()
    }

    /// Decodes a header from the start of an image file (SPEC H1). The caller must compare the store with
    /// STORE (SPEC H2) and the number with the file name (SPEC H3).
    ///
    /// # Errors
    /// Returns a [`Defect`] if the header is invalid.
    pub fn decode(bytes: &[u8]) -> Result<Self, Defect> {
        let bytes: &[u8; ImageFileHeaderRaw::LEN] = array(bytes, 0)?;
        let raw = ImageFileHeaderRaw::from_bytes(bytes);
        if raw.magic != IMAGE_FILE_MAGIC {
            return Err(Defect::Magic { expected: "file of images" });
        }
        check_crc("image file header", raw.header_crc, &bytes[..60])?;
        if raw.version != FORMAT_VERSION {
            return Err(Defect::Version { version: raw.version, features: 0 });
        }
        let purpose = ImagePurpose::from_raw(raw.purpose)?;
        check_zeros("reserved image file bytes", &raw.reserved)?;
        Ok(Self { store: raw.store, file: raw.file, purpose })
    }
}
