//! Floor 0. Image files: the bytes of pages, as snapshots and bulk creates write them.
//!
//! ```text
//! pages/<n>.pages
//! 0      header block (4096 bytes)
//! 4096   chunk: header, table of image headers, payloads on 16-byte boundaries
//! ...    chunk, at a multiple of 4096
//! ```
//!
//! A manifest entry names an image by file, offset, length and checksum, and is the authority on it; the
//! table in front of the payloads records what was known when they were written, for inspection and for
//! salvage. A page of length 0 has no image.

use crate::defect::{Defect, array, check_crc, check_equal, check_limit, check_zero, check_zeros, slice};
use crate::ids::{Epoch, Lsn, PageId, StoreId};
use crate::layout::layout;
use crate::limits::{CHUNK_IMAGES_MAX, CHUNK_LEN_MAX, FRAME_ALIGN, GROUP_ALIGN, PAGE_LEN_MAX, align_up};
use crate::segment::FORMAT_VERSION;

/// Length of an image file's header block; the first chunk starts here.
pub const IMAGE_HEADER_BLOCK: u64 = 4096;
/// The first bytes of an image file.
pub const IMAGE_FILE_MAGIC: [u8; 8] = *b"RMNTPAGE";
/// The first bytes of a chunk.
pub const CHUNK_MAGIC: [u8; 8] = *b"RMNTCHNK";

const CODEC_RAW: u8 = 0;

layout! {
    /// The bytes of an image file's header; the rest of its block is zero.
    pub struct ImageFileHeaderRaw: 64 {
        /// `RMNTPAGE`.
        0 => magic: [u8; 8],
        /// Format version, 1.
        8 => version: u32,
        /// Zero.
        12 => reserved: u32,
        /// The store.
        16 => store: StoreId,
        /// The file's own number, as in its name.
        32 => file: u64,
        /// Zero.
        40 => reserved_2: [u8; 20],
        /// CRC-32 of the bytes before.
        60 => header_crc: u32,
    }
}

layout! {
    /// The bytes of a chunk's header; the table follows.
    pub struct ChunkHeaderRaw: 64 {
        /// `RMNTCHNK`.
        0 => magic: [u8; 8],
        /// The store.
        8 => store: StoreId,
        /// Own position: the image file's number.
        24 => file: u64,
        /// Own position: bytes from the file's start.
        32 => offset: u64,
        /// Number of images.
        40 => image_count: u32,
        /// Length of the table.
        44 => table_len: u32,
        /// Length of the chunk, padding included.
        48 => chunk_len: u64,
        /// CRC-32 of the table.
        56 => table_crc: u32,
        /// CRC-32 of the bytes before.
        60 => header_crc: u32,
    }
}

layout! {
    /// The bytes of one image's header in a chunk's table.
    pub struct ImageHeaderRaw: 64 {
        /// The page; zero if it was not known.
        0 => page: PageId,
        /// The page's epoch at the moment of capture; zero if it was not known.
        8 => epoch: Epoch,
        /// The newest batch in the image; zero if the image was written ahead of its batch.
        16 => lsn: Lsn,
        /// The page's length.
        24 => len: u64,
        /// Length of the payload as it is stored.
        32 => stored_len: u64,
        /// Where the payload lies: bytes from the file's start.
        40 => offset: u64,
        /// CRC-32 of the payload as it is stored.
        48 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        52 => raw_crc: u32,
        /// 0: stored as it is. 1 is reserved for zstd.
        56 => codec: u8,
        /// Zero.
        57 => reserved: [u8; 7],
    }
}

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

/// What an image file says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFileHeader {
    /// The store.
    pub store: StoreId,
    /// The file's own number.
    pub file: u64,
}

impl ImageFileHeader {
    /// The header's bytes; the rest of the header block is zero.
    #[must_use]
    pub fn encode(&self) -> [u8; ImageFileHeaderRaw::LEN] {
        let mut raw = ImageFileHeaderRaw {
            magic: IMAGE_FILE_MAGIC,
            version: FORMAT_VERSION,
            reserved: 0,
            store: self.store,
            file: self.file,
            reserved_2: [0; 20],
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..60]);
        raw.to_bytes()
    }

    /// Reads a header from the start of an image file. Whether the file is this store's, and has the
    /// number in its name, the caller compares.
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
        check_zero("reserved image file bytes", raw.reserved.into())?;
        check_zeros("reserved image file bytes", &raw.reserved_2)?;
        Ok(Self { store: raw.store, file: raw.file })
    }
}

/// A page's bytes that are to become an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// The page; zero if it is not known.
    pub page: PageId,
    /// Its epoch; zero if it is not known.
    pub epoch: Epoch,
    /// The newest batch in the bytes; zero if they are written ahead of their batch.
    pub lsn: Lsn,
    /// Number of bytes, at least one.
    pub len: u64,
    /// Their CRC-32.
    pub crc: u32,
}

/// What a chunk's table says of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// The page; zero if it was not known.
    pub page: PageId,
    /// The page's epoch; zero if it was not known.
    pub epoch: Epoch,
    /// The newest batch in the image; zero if the image was written ahead of its batch.
    pub lsn: Lsn,
    /// The page's length.
    pub len: u64,
    /// Where the payload lies, and its checksums.
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

/// A chunk: where it lies, how long it is, and where each payload goes.
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
/// };
/// let chunk = Chunk::plan(3, 4096, &[image, image])?;
/// assert_eq!(chunk.len, 4096);
/// assert_eq!(chunk.images[0].image.offset, 4096 + 64 + 2 * 64);
/// assert_eq!(chunk.images[1].image.offset, chunk.images[0].image.offset + 112);
///
/// let bytes = chunk.encode(StoreId([7; 16]));
/// let header = ChunkHeader::decode(&bytes)?;
/// header.check_place(StoreId([7; 16]), 3, 4096)?;
/// assert_eq!(header.decode_table(&bytes)?, chunk);
/// # Ok::<(), remanent_format::Defect>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The image file's number.
    pub file: u64,
    /// Bytes from the file's start, a multiple of 4096.
    pub offset: u64,
    /// Length in bytes, a multiple of 4096.
    pub len: u64,
    /// The images in the order of their payloads.
    pub images: Vec<ImageHeader>,
}

impl Chunk {
    /// Lays out images, stored as they are, in a chunk at `offset` of image file `file`.
    ///
    /// # Errors
    /// [`Defect::Limit`] or [`Defect::Field`] if there are too many of them, or one is empty or too long,
    /// or no chunk can start there.
    pub fn plan(file: u64, offset: u64, images: &[NewImage]) -> Result<Self, Defect> {
        check_chunk_offset(offset)?;
        check_image_count(images.len() as u64)?;
        let mut at = payloads_at(offset, images.len() as u64);
        let mut headers = Vec::with_capacity(images.len());
        for image in images {
            let header = ImageHeader {
                page: image.page,
                epoch: image.epoch,
                lsn: image.lsn,
                len: image.len,
                image: ImageRef {
                    file,
                    offset: at,
                    stored_len: image.len,
                    stored_crc: image.crc,
                    raw_crc: image.crc,
                    codec: Codec::Raw,
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

    /// The bytes of header and table: the chunk's first bytes. The payloads follow at the offsets in
    /// `images`; what lies between and behind them is zero.
    #[must_use]
    pub fn encode(&self, store: StoreId) -> Vec<u8> {
        let table: Vec<u8> = self.images.iter().flat_map(|image| image.to_raw().to_bytes()).collect();
        let mut raw = ChunkHeaderRaw {
            magic: CHUNK_MAGIC,
            store,
            file: self.file,
            offset: self.offset,
            image_count: self.images.len() as u32,
            table_len: table.len() as u32,
            chunk_len: self.len,
            table_crc: crc32fast::hash(&table),
            header_crc: 0,
        };
        raw.header_crc = crc32fast::hash(&raw.to_bytes()[..60]);
        let mut out = raw.to_bytes().to_vec();
        out.extend_from_slice(&table);
        out
    }
}

/// What a chunk's header says; the table is still unproven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The store.
    pub store: StoreId,
    /// Own position: the image file's number.
    pub file: u64,
    /// Own position: bytes from the file's start.
    pub offset: u64,
    /// Number of images.
    pub image_count: u32,
    /// Length of the chunk, padding included.
    pub chunk_len: u64,
    table_crc: u32,
}

impl ChunkHeader {
    /// Reads a header from the start of a chunk.
    ///
    /// # Errors
    /// A [`Defect`].
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

    /// Refuses a chunk that was not written at this place of this store.
    ///
    /// # Errors
    /// [`Defect::Foreign`] or [`Defect::Mismatch`].
    pub fn check_place(&self, store: StoreId, file: u64, offset: u64) -> Result<(), Defect> {
        if self.store != store {
            return Err(Defect::Foreign);
        }
        check_equal("chunk's file", self.file, file)?;
        check_equal("chunk's offset", self.offset, offset)
    }

    /// Bytes of header and table together.
    #[must_use]
    pub fn table_end(&self) -> usize {
        ChunkHeaderRaw::LEN + self.image_count as usize * ImageHeaderRaw::LEN
    }

    /// Reads the table; `bytes` starts with the header, as for [`ChunkHeader::decode`].
    ///
    /// # Errors
    /// A [`Defect`], also if the payloads do not lie exactly as [`Chunk::plan`] lays them out.
    pub fn decode_table(&self, bytes: &[u8]) -> Result<Chunk, Defect> {
        let table = slice(bytes, ChunkHeaderRaw::LEN, self.table_end() - ChunkHeaderRaw::LEN)?;
        check_crc("image table", self.table_crc, table)?;
        let mut at = payloads_at(self.offset, self.image_count.into());
        let mut images = Vec::with_capacity(table.len() / ImageHeaderRaw::LEN);
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

/// The highest offset at which a chunk may start; sums of offsets and lengths cannot overflow below it.
const CHUNK_OFFSET_MAX: u64 = 1 << 62;

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

/// Where a chunk's first payload lies.
fn payloads_at(offset: u64, image_count: u64) -> u64 {
    offset + ChunkHeaderRaw::LEN as u64 + image_count * ImageHeaderRaw::LEN as u64
}

/// Where the next payload lies, or the chunk's padding.
fn payload_end(image: &ImageRef) -> u64 {
    align_up(image.offset + image.stored_len, FRAME_ALIGN)
}

const _: () =
    assert!((ImageHeaderRaw::LEN as u64).is_multiple_of(FRAME_ALIGN), "payloads would not be aligned");
const _: () =
    assert!((ChunkHeaderRaw::LEN as u64).is_multiple_of(FRAME_ALIGN), "payloads would not be aligned");

#[cfg(test)]
mod tests {
    use super::*;

    const STORE: StoreId = StoreId([0x5a; 16]);

    fn new_image(page: u64, len: u64) -> NewImage {
        NewImage { page: PageId(page), epoch: Epoch(2), lsn: Lsn(9), len, crc: 0xdead_0000 + page as u32 }
    }

    fn sample() -> Chunk {
        Chunk::plan(3, 8192, &[new_image(1, 1), new_image(2, 16), new_image(5, 5000)]).unwrap()
    }

    fn decode(bytes: &[u8]) -> Result<Chunk, Defect> {
        ChunkHeader::decode(bytes)?.decode_table(bytes)
    }

    /// The sample with header and first row changed, and all checksums made to fit.
    fn with_rows(change: impl FnOnce(&mut ChunkHeaderRaw, &mut ImageHeaderRaw)) -> Vec<u8> {
        let mut bytes = sample().encode(STORE);
        let mut header = ChunkHeaderRaw::from_bytes(bytes[..64].try_into().unwrap());
        let mut row = ImageHeaderRaw::from_bytes(bytes[64..128].try_into().unwrap());
        change(&mut header, &mut row);
        bytes[64..128].copy_from_slice(&row.to_bytes());
        header.table_crc = crc32fast::hash(&bytes[64..]);
        header.header_crc = crc32fast::hash(&header.to_bytes()[..60]);
        bytes[..64].copy_from_slice(&header.to_bytes());
        bytes
    }

    #[test]
    fn file_header_round_trips_and_refuses_every_flipped_bit() {
        let header = ImageFileHeader { store: STORE, file: 0x0102_0304 };
        let bytes = header.encode();
        assert_eq!(ImageFileHeader::decode(&bytes), Ok(header));
        for bit in 0..8 * bytes.len() {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(ImageFileHeader::decode(&damaged).is_err(), "bit {bit}");
        }
        assert!(matches!(
            ImageFileHeader::decode(&bytes[..63]),
            Err(Defect::Truncated { needed: 64, have: 63 })
        ));
        let mut newer = ImageFileHeaderRaw::from_bytes(&bytes);
        newer.version = 2;
        newer.header_crc = crc32fast::hash(&newer.to_bytes()[..60]);
        assert_eq!(
            ImageFileHeader::decode(&newer.to_bytes()),
            Err(Defect::Version { version: 2, features: 0 })
        );
    }

    #[test]
    fn payloads_lie_back_to_back_on_16_bytes() {
        let chunk = sample();
        let offsets: Vec<u64> = chunk.images.iter().map(|header| header.image.offset).collect();
        let first = 8192 + 64 + 3 * 64;
        assert_eq!(offsets, [first, first + 16, first + 32]);
        assert_eq!(chunk.len, 8192);
    }

    #[test]
    fn chunk_round_trips_to_the_same_bytes_and_refuses_every_flipped_bit() {
        let bytes = sample().encode(STORE);
        let decoded = decode(&bytes).unwrap();
        assert_eq!(decoded, sample());
        assert_eq!(decoded.encode(STORE), bytes);
        for bit in 0..8 * bytes.len() {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let found = decode(&damaged);
            assert!(
                matches!(found, Err(Defect::Magic { .. } | Defect::Checksum { .. })),
                "bit {bit}: {found:?}"
            );
        }
        for len in 0..bytes.len() {
            let found = decode(&bytes[..len]);
            assert!(matches!(found, Err(Defect::Truncated { .. })), "cut to {len}: {found:?}");
        }
    }

    #[test]
    fn misplaced_and_foreign_chunks_are_refused() {
        let header = ChunkHeader::decode(&sample().encode(STORE)).unwrap();
        assert_eq!(header.check_place(STORE, 3, 8192), Ok(()));
        assert_eq!(header.check_place(StoreId([0; 16]), 3, 8192), Err(Defect::Foreign));
        for (file, offset) in [(4, 8192), (3, 4096)] {
            assert!(matches!(header.check_place(STORE, file, offset), Err(Defect::Mismatch { .. })));
        }
    }

    #[test]
    fn sound_checksums_over_wrong_fields_are_refused() {
        assert_eq!(decode(&with_rows(|_, _| ())), Ok(sample()));
        type Change = fn(&mut ChunkHeaderRaw, &mut ImageHeaderRaw);
        let rows: [(&str, Change); 16] = [
            ("no images", |header, _| header.image_count = 0),
            ("too many images", |header, _| header.image_count = u32::MAX),
            ("another table length", |header, _| header.table_len += 64),
            ("a chunk in the header block", |header, _| header.offset = 0),
            ("a chunk off its boundary", |header, _| header.offset += 512),
            ("a chunk at the end of the world", |header, _| header.offset = !4095),
            ("another chunk length", |header, _| header.chunk_len += 4096),
            ("an endless chunk", |header, _| header.chunk_len = u64::MAX),
            ("an unknown codec", |_, row| row.codec = 1),
            ("reserved bytes", |_, row| row.reserved[6] = 1),
            ("an empty page", |_, row| (row.len, row.stored_len) = (0, 0)),
            ("an endless page", |_, row| (row.len, row.stored_len) = (u64::MAX, u64::MAX)),
            ("a raw image of another length", |_, row| row.stored_len = 2),
            ("a raw image with two checksums", |_, row| row.raw_crc ^= 1),
            ("a payload elsewhere", |_, row| row.offset += 16),
            ("a batch of no page", |_, row| row.page = PageId(0)),
        ];
        for (why, change) in rows {
            let found = decode(&with_rows(change));
            assert!(
                matches!(found, Err(Defect::Field { .. } | Defect::Limit { .. } | Defect::Mismatch { .. })),
                "{why}: {found:?}"
            );
        }
    }

    #[test]
    fn a_payload_is_proven_by_length_and_checksum() {
        let content = [3; 16];
        let new = NewImage { crc: crc32fast::hash(&content), ..new_image(1, 16) };
        let image = Chunk::plan(3, 8192, &[new]).unwrap().images[0].image;
        assert_eq!(image.check_payload(&content), Ok(()));
        assert!(matches!(
            image.check_payload(&[3; 17]),
            Err(Defect::Mismatch { found: 17, expected: 16, .. })
        ));
        assert!(matches!(image.check_payload(&[4; 16]), Err(Defect::Checksum { what: "image", .. })));
    }

    #[test]
    fn chunks_that_cannot_be_are_not_planned() {
        for (why, found) in [
            ("no images", Chunk::plan(1, 4096, &[])),
            ("an empty page", Chunk::plan(1, 4096, &[new_image(1, 0)])),
            ("a page too long", Chunk::plan(1, 4096, &[new_image(1, PAGE_LEN_MAX + 1)])),
            ("a place off the boundary", Chunk::plan(1, 4097, &[new_image(1, 1)])),
            ("too long together", Chunk::plan(1, 4096, &[new_image(1, PAGE_LEN_MAX); 2])),
        ] {
            assert!(matches!(found, Err(Defect::Field { .. } | Defect::Limit { .. })), "{why}: {found:?}");
        }
        assert!(Chunk::plan(1, 4096, &[new_image(1, PAGE_LEN_MAX)]).is_ok());
        // Written ahead of its batch, an image need not know whose it is.
        let ahead = NewImage { page: PageId(0), epoch: Epoch(0), lsn: Lsn(0), len: 1, crc: 0 };
        assert!(Chunk::plan(1, 4096, &[ahead]).is_ok());
    }
}
