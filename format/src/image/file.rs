//! Headers of image files.

use crate::defect::{Defect, array, check_crc, check_zeros};
use crate::ids::StoreId;
use crate::layout::layout;
use crate::segment::FORMAT_VERSION;

/// Length of the header block of an image file in bytes. The first chunk starts at this offset.
pub const IMAGE_HEADER_BLOCK: u64 = 4096;
/// Magic bytes at the start of an image file.
pub const IMAGE_FILE_MAGIC: [u8; 8] = *b"RMNTPAGE";

layout! {
    /// The encoded header of an image file. The remaining bytes of the header block are zero.
    pub struct ImageFileHeaderRaw: 64 {
        /// Magic bytes, always `RMNTPAGE`.
        0 => magic: [u8; 8],
        /// Format version; always 1.
        8 => version: u32,
        /// Number that represents the purpose of the file, 1 or 2.
        12 => purpose: u32,
        /// The id of the store.
        16 => store: StoreId,
        /// Number of this file. The file name contains the same number.
        32 => file: u64,
        /// Reserved, always zero.
        40 => reserved: [u8; 20],
        /// CRC-32 of the preceding bytes.
        60 => header_crc: u32,
    }
}

/// The reason why an image file was written. A file of purpose [`Batch`](Self::Batch) must be kept while the log names
/// it, even if no manifest or table names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImagePurpose {
    /// The file was written for a snapshot, or for the table of an earlier state.
    Snapshot,
    /// The file was written for a batch. The file is synced before the batch that names its images is logged.
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

    /// Converts the number on disk to a purpose.
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

/// The decoded header of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFileHeader {
    /// The id of the store.
    pub store: StoreId,
    /// The number of this file.
    pub file: u64,
    /// The purpose for which the file was written.
    pub purpose: ImagePurpose,
}

impl ImageFileHeader {
    /// Encodes the header. The remaining bytes of the header block are zero.
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

    /// Decodes a header from the start of an image file (SPEC H1). The caller must check the store id (SPEC H2), and
    /// that the file name contains the same number (SPEC H3).
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
