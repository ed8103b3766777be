//! Image files: the bytes of pages, as snapshots and bulk creates write them.
//!
//! ```text
//! pages/<n>.pages
//! 0      header block (4096 bytes)
//! 4096   chunk: header, table of image headers, payloads on 16-byte boundaries
//! ...    chunk, at a multiple of 4096
//! ```
//!
//! A manifest entry names an image by file, offset, length and checksum, and is the authority on it; the
//! table in front of the payloads records the facts known when they were written, for inspection and for
//! salvage. A page of length 0 has no image. An image may be an [`Overlay`]: pieces over another image. In
//! its chunk's table it stands as an image of no known page, because its bytes mean nothing without the entry
//! that names it.

mod file;
mod image_ref;
mod codec;
mod chunk;
mod overlay;
pub mod read;
pub mod proven;
#[cfg(test)]
mod tests;

pub use chunk::{
    CHUNK_MAGIC, Chunk, ChunkHeader, ChunkHeaderRaw, CompressedBytes, ImageHeader, ImageHeaderRaw, NewImage,
};
pub use codec::{COMPRESSED_PIECE_LEN, Codec, Compressor, OverlayBase};
pub use file::{IMAGE_FILE_MAGIC, IMAGE_HEADER_BLOCK, ImageFileHeader, ImageFileHeaderRaw, ImagePurpose};
pub use image_ref::ImageRef;
pub use overlay::{OVERLAY_MAGIC, Overlay, OverlayHeaderRaw, OverlayPieceRaw, sum_after_change};
