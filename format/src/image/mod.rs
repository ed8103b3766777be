//! Image files: the bytes of pages, written by snapshots and ahead of batches.
//!
//! ```text
//! pages/<n>.pages
//! 0      header block (4096 bytes)
//! 4096   chunk: header, table of image headers, payloads on 16-byte boundaries
//! ...    chunk, at a multiple of 4096
//! ```
//!
//! A manifest entry names an image by file, offset, length and checksum, and is the authority on it. The
//! table at the start of a chunk records what was known when the payloads were written, for inspection and
//! salvage. A page of length 0 has no image.
//!
//! An image can be an [`Overlay`]: pieces that replace parts of another image. The chunk's table lists an
//! overlay as an image of an unknown page, because its bytes have no meaning without the manifest entry that
//! names it.

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
