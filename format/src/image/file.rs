//! The header of an image file.

use crate::defect::{Defect, array, check_crc, check_zeros};
use crate::ids::StoreId;
use crate::layout::layout;
use crate::segment::FORMAT_VERSION;

/// Length of an image file's header block; the first chunk starts here.
pub const IMAGE_HEADER_BLOCK: u64 = 4096;
/// The first bytes of an image file.
pub const IMAGE_FILE_MAGIC: [u8; 8] = *b"RMNTPAGE";

layout! {
    /// The bytes of an image file's header; the rest of its block is zero.
    pub struct ImageFileHeaderRaw: 64 {
        /// The magic `RMNTPAGE`.
        0 => magic: [u8; 8],
        /// Format version, 1.
        8 => version: u32,
        /// The purpose that the file was written for.
        12 => purpose: u32,
        /// The store's id.
        16 => store: StoreId,
        /// The file's own number, as in its name.
        32 => file: u64,
        /// Reserved, always zero.
        40 => reserved: [u8; 20],
        /// CRC-32 of the bytes before.
        60 => header_crc: u32,
    }
}

/// The purpose of an image file: if no manifest or table names the file, this says whether the log may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImagePurpose {
    /// For a snapshot, or for the table of an old state.
    Snapshot,
    /// For a batch, which names its images once they are durable.
    Batch,
}

impl ImagePurpose {
    /// The purpose's number on disk.
    #[must_use]
    pub fn to_raw(self) -> u32 {
        match self {
            ImagePurpose::Snapshot => 1,
            ImagePurpose::Batch => 2,
        }
    }

    /// The purpose of a number on disk.
    ///
    /// # Errors
    /// [`Defect::Field`] if there is no such purpose.
    pub fn from_raw(raw: u32) -> Result<Self, Defect> {
        match raw {
            1 => Ok(ImagePurpose::Snapshot),
            2 => Ok(ImagePurpose::Batch),
            other => Err(Defect::Field { what: "purpose of an image file", found: other.into() }),
        }
    }
}

/// The content of an image file's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFileHeader {
    /// The store's id.
    pub store: StoreId,
    /// The file's own number.
    pub file: u64,
    /// The purpose that it was written for.
    pub purpose: ImagePurpose,
}

impl ImageFileHeader {
    /// The header's bytes; the rest of the header block is zero.
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

    /// Reads a header from the start of an image file (SPEC H1). The caller compares the store with STORE
    /// (SPEC H2) and the number with the file's name (SPEC H3).
    ///
    /// # Errors
    /// A [`Defect`].
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
