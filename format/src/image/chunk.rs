//! Chunks of an image file. A chunk contains a header, a table of images, and the payloads of the images.

use super::codec::Codec;
use super::file::IMAGE_HEADER_BLOCK;
use super::image_ref::{CHUNK_OFFSET_MAX, ImageRef};
use crate::defect::{Defect, array, check_crc, check_equal, check_limit, check_zeros, reserve_items, slice};
use crate::ids::{Epoch, Lsn, PageId, StoreId};
use crate::layout::layout;
use crate::limits::{CHUNK_IMAGES_MAX, CHUNK_LEN_MAX, FRAME_ALIGN, GROUP_ALIGN, align_up};

/// Magic bytes at the start of a chunk.
pub const CHUNK_MAGIC: [u8; 8] = *b"RMNTCHNK";

layout! {
    /// The encoded header of a chunk. The table of images follows.
    pub struct ChunkHeaderRaw: 64 {
        /// Magic bytes, always `RMNTCHNK`.
        0 => magic: [u8; 8],
        /// The id of the store.
        8 => store: StoreId,
        /// Number of the image file that contains the chunk.
        24 => file: u64,
        /// Offset of this chunk, in bytes from the start of the file.
        32 => offset: u64,
        /// Number of images in the chunk.
        40 => image_count: u32,
        /// Length of the table of images in bytes.
        44 => table_len: u32,
        /// Length of the chunk in bytes, including padding.
        48 => chunk_len: u64,
        /// CRC-32 of the table of images.
        56 => table_crc: u32,
        /// CRC-32 of the preceding bytes.
        60 => header_crc: u32,
    }
}

layout! {
    /// The encoded description of an image in the table of a chunk.
    pub struct ImageHeaderRaw: 64 {
        /// Id of the page, or zero if it is unknown.
        0 => page: PageId,
        /// Epoch of the page at the time of the capture, or zero if it is unknown.
        8 => epoch: Epoch,
        /// Lsn of the newest batch that the image includes. Zero if the image was written before its batch was logged.
        16 => lsn: Lsn,
        /// Length of the page in bytes.
        24 => len: u64,
        /// Length of the stored payload in bytes.
        32 => stored_len: u64,
        /// Offset of the payload, in bytes from the start of the file.
        40 => offset: u64,
        /// CRC-32 of the stored payload.
        48 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        52 => raw_crc: u32,
        /// Encoding of the payload. 0: uncompressed, 1: zstd.
        56 => codec: u8,
        /// Reserved, always zero.
        57 => reserved: [u8; 7],
    }
}

/// The description of an image that the caller will write to a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// The id of the page, or zero if it is unknown.
    pub page: PageId,
    /// The epoch of the page, or zero if it is unknown.
    pub epoch: Epoch,
    /// The newest batch that the image includes. Zero if the image is written before its batch is logged.
    pub lsn: Lsn,
    /// Length of the uncompressed page in bytes, at least 1.
    pub len: u64,
    /// CRC-32 of the uncompressed page.
    pub crc: u32,
    /// The length and checksum of the compressed bytes, or `None` to store the bytes uncompressed.
    pub compressed: Option<CompressedBytes>,
}

/// The length and checksum of the compressed bytes of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedBytes {
    /// Length in bytes, which must be less than the length of the page.
    pub len: u64,
    /// CRC-32 of the compressed bytes.
    pub crc: u32,
}

/// The decoded description of an image in the table of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// The id of the page, or zero if it is unknown.
    pub page: PageId,
    /// The epoch of the page, or zero if it is unknown.
    pub epoch: Epoch,
    /// The newest batch that the image includes. Zero if the image was written before its batch was logged.
    pub lsn: Lsn,
    /// The length of the page in bytes.
    pub len: u64,
    /// The location and checksums of the payload.
    pub image: ImageRef,
}

impl ImageHeader {
    fn to_raw(self) -> ImageHeaderRaw {
        ImageHeaderRaw {
            page: self.page,
            epoch: self.epoch,
            lsn: self.lsn,
            len: self.len,
            stored_len: self.image.stored_len,
            offset: self.image.offset,
            stored_crc: self.image.stored_crc,
            raw_crc: self.image.raw_crc,
            codec: self.image.codec.to_raw(),
            reserved: [0; 7],
        }
    }

    fn from_raw(raw: &ImageHeaderRaw, file: u64) -> Result<Self, Defect> {
        check_zeros("reserved image bytes", &raw.reserved)?;
        if raw.lsn.0 != 0 && (raw.page.0 == 0 || raw.epoch.0 == 0) {
            return Err(Defect::Field { what: "page or epoch of an image of a known batch", found: 0 });
        }
        let image = ImageRef {
            file,
            offset: raw.offset,
            stored_len: raw.stored_len,
            stored_crc: raw.stored_crc,
            raw_crc: raw.raw_crc,
            codec: Codec::from_raw(raw.codec)?,
        };
        image.check(raw.len)?;
        Ok(Self { page: raw.page, epoch: raw.epoch, lsn: raw.lsn, len: raw.len, image })
    }
}

/// The layout of a chunk: its location, and the locations of the payloads of its images.
///
/// ```
/// use remanent_format::image::{Chunk, ChunkHeader, NewImage};
/// use remanent_format::{Epoch, Lsn, PageId, StoreId};
/// let content = [5; 100];
/// let image = NewImage {
///     page: PageId(1),
///     epoch: Epoch(1),
///     lsn: Lsn(1),
///     len: 100,
///     crc: crc32fast::hash(&content),
///     compressed: None,
/// };
/// let chunk = Chunk::plan(3, 4096, &[image, image])?;
/// assert_eq!(chunk.len, 4096);
/// assert_eq!(chunk.images[0].image.offset, 4096 + 64 + 2 * 64);
/// assert_eq!(chunk.images[1].image.offset, chunk.images[0].image.offset + 112);
///
/// let bytes = chunk.encode(StoreId([7; 16]))?;
/// let header = ChunkHeader::decode(&bytes)?;
/// header.check_location(StoreId([7; 16]), 3, 4096)?;
/// assert_eq!(header.decode_table(&bytes)?, chunk);
/// # Ok::<(), remanent_format::Defect>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The number of the image file.
    pub file: u64,
    /// Offset of the chunk in bytes from the start of the file, a multiple of 4096.
    pub offset: u64,
    /// Length of the chunk in bytes, a multiple of 4096.
    pub len: u64,
    /// The descriptions of the images, in the order of their payloads.
    pub images: Vec<ImageHeader>,
}

impl Chunk {
    /// Computes the layout of a chunk at `offset` of image file `file`.
    ///
    /// # Errors
    /// Returns a [`Defect`] if `offset` is invalid, if `images` is empty or too long, or if an image is empty or
    /// exceeds a limit. Returns [`Defect::Memory`] if there is not enough memory.
    pub fn plan(file: u64, offset: u64, images: &[NewImage]) -> Result<Self, Defect> {
        check_chunk_offset(offset)?;
        check_image_count(images.len() as u64)?;
        let mut at = payloads_at(offset, images.len() as u64);
        let mut headers = Vec::new();
        reserve_items(&mut headers, images.len())?;
        for image in images {
            let (codec, stored) = match image.compressed {
                Some(compressed) => (Codec::Zstd, compressed),
                None => (Codec::Raw, CompressedBytes { len: image.len, crc: image.crc }),
            };
            let header = ImageHeader {
                page: image.page,
                epoch: image.epoch,
                lsn: image.lsn,
                len: image.len,
                image: ImageRef {
                    file,
                    offset: at,
                    stored_len: stored.len,
                    stored_crc: stored.crc,
                    raw_crc: image.crc,
                    codec,
                },
            };
            ImageHeader::from_raw(&header.to_raw(), file)?;
            headers.push(header);
            at = payload_end(&header.image);
        }
        let len = align_up(at - offset, GROUP_ALIGN);
        check_limit("chunk length", len, CHUNK_LEN_MAX)?;
        Ok(Self { file, offset, len, images: headers })
    }

    /// Returns the length in bytes of the header and the table of a chunk with `image_count` images. The first payload
    /// follows the table.
    #[must_use]
    pub fn head_len(image_count: u64) -> u64 {
        payloads_at(0, image_count)
    }

    /// Encodes the header and the table, which are the first bytes of the chunk. The caller must write the payloads at
    /// the offsets in `images`, and fill the gaps with zeros.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if there is not enough memory.
    pub fn encode(&self, store: StoreId) -> Result<Vec<u8>, Defect> {
        let mut out = Vec::new();
        reserve_items(&mut out, ChunkHeaderRaw::LEN + self.images.len() * ImageHeaderRaw::LEN)?;
        out.resize(ChunkHeaderRaw::LEN, 0);
        self.images.iter().for_each(|image| out.extend_from_slice(&image.to_raw().to_bytes()));
        let table = &out[ChunkHeaderRaw::LEN..];
        let mut raw = ChunkHeaderRaw {
            magic: CHUNK_MAGIC,
            store,
            file: self.file,
            offset: self.offset,
            image_count: self.images.len() as u32,
            table_len: table.len() as u32,
            chunk_len: self.len,
            table_crc: crc32fast::hash(table),
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..60]);
        out[..ChunkHeaderRaw::LEN].copy_from_slice(&raw.to_bytes());
        Ok(out)
    }
}

/// The decoded header of a chunk. [`ChunkHeader::decode_table`] decodes and checks the table of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The id of the store.
    pub store: StoreId,
    /// The number of the image file that contains the chunk.
    pub file: u64,
    /// The offset of the chunk, in bytes from the start of the file.
    pub offset: u64,
    /// Number of images in the chunk.
    pub image_count: u32,
    /// Length of the chunk in bytes, including padding.
    pub chunk_len: u64,
    table_crc: u32,
}

impl ChunkHeader {
    /// Decodes a header from the start of a chunk (SPEC C1).
    ///
    /// # Errors
    /// Returns a [`Defect`] if the header is invalid.
    pub fn decode(bytes: &[u8]) -> Result<Self, Defect> {
        let bytes: &[u8; ChunkHeaderRaw::LEN] = array(bytes, 0)?;
        let raw = ChunkHeaderRaw::from_bytes(bytes);
        if raw.magic != CHUNK_MAGIC {
            return Err(Defect::Magic { expected: "chunk of images" });
        }
        check_crc("chunk header", raw.header_crc, &bytes[..60])?;
        check_chunk_offset(raw.offset)?;
        check_image_count(raw.image_count.into())?;
        let table_len = u64::from(raw.image_count) * ImageHeaderRaw::LEN as u64;
        check_equal("table length", raw.table_len.into(), table_len)?;
        check_limit("chunk length", raw.chunk_len, CHUNK_LEN_MAX)?;
        Ok(Self {
            store: raw.store,
            file: raw.file,
            offset: raw.offset,
            image_count: raw.image_count,
            chunk_len: raw.chunk_len,
            table_crc: raw.table_crc,
        })
    }

    /// Checks that the header contains this store, image file and offset (SPEC C2).
    ///
    /// # Errors
    /// Returns [`Defect::Foreign`] if the store differs, and [`Defect::Mismatch`] if the file or the offset differs.
    pub fn check_location(&self, store: StoreId, file: u64, offset: u64) -> Result<(), Defect> {
        if self.store != store {
            return Err(Defect::Foreign);
        }
        check_equal("chunk's file", self.file, file)?;
        check_equal("chunk's offset", self.offset, offset)
    }

    /// Returns the length in bytes of the header and the table of images together.
    #[must_use]
    pub fn table_end(&self) -> usize {
        ChunkHeaderRaw::LEN + self.image_count as usize * ImageHeaderRaw::LEN
    }

    /// Decodes the table of images (SPEC C3 to C6). `bytes` must start with the header of the chunk.
    ///
    /// # Errors
    /// Returns a [`Defect`] if the table is invalid or the offsets of the payloads differ from those that
    /// [`Chunk::plan`] computes.
    pub fn decode_table(&self, bytes: &[u8]) -> Result<Chunk, Defect> {
        let table = slice(bytes, ChunkHeaderRaw::LEN, self.table_end() - ChunkHeaderRaw::LEN)?;
        check_crc("image table", self.table_crc, table)?;
        let mut at = payloads_at(self.offset, self.image_count.into());
        let mut images = Vec::new();
        reserve_items(&mut images, table.len() / ImageHeaderRaw::LEN)?;
        for raw in table.chunks_exact(ImageHeaderRaw::LEN) {
            let header = ImageHeader::from_raw(&ImageHeaderRaw::from_bytes(array(raw, 0)?), self.file)?;
            check_equal("image offset", header.image.offset, at)?;
            at = payload_end(&header.image);
            images.push(header);
        }
        check_equal("chunk length", self.chunk_len, align_up(at - self.offset, GROUP_ALIGN))?;
        Ok(Chunk { file: self.file, offset: self.offset, len: self.chunk_len, images })
    }
}

fn check_chunk_offset(offset: u64) -> Result<(), Defect> {
    check_limit("chunk offset", offset, CHUNK_OFFSET_MAX)?;
    if offset < IMAGE_HEADER_BLOCK || !offset.is_multiple_of(GROUP_ALIGN) {
        return Err(Defect::Field { what: "chunk offset", found: offset });
    }
    Ok(())
}

fn check_image_count(count: u64) -> Result<(), Defect> {
    check_limit("image count", count, CHUNK_IMAGES_MAX.into())?;
    if count == 0 { Err(Defect::Field { what: "image count", found: 0 }) } else { Ok(()) }
}

/// Returns the offset in the file of the first payload. `offset` is the offset of the chunk.
fn payloads_at(offset: u64, image_count: u64) -> u64 {
    offset + ChunkHeaderRaw::LEN as u64 + image_count * ImageHeaderRaw::LEN as u64
}

/// Returns the offset at which the payload and its padding end. The next payload starts at this offset.
fn payload_end(image: &ImageRef) -> u64 {
    align_up(image.offset + image.stored_len, FRAME_ALIGN)
}

const _: () =
    assert!((ImageHeaderRaw::LEN as u64).is_multiple_of(FRAME_ALIGN), "payloads would not be aligned");
const _: () =
    assert!((ChunkHeaderRaw::LEN as u64).is_multiple_of(FRAME_ALIGN), "payloads would not be aligned");
