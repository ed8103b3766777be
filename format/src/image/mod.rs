//! Image files, which contain the bytes of pages. Snapshots write images of pages. A commit can also write images,
//! before its batch is logged.
//!
//! ```text
//! pages/<n>.pages
//! 0      header block (4096 bytes)
//! 4096   chunk: header, table of image headers, payloads on 16-byte boundaries
//! ...    chunk, at a multiple of 4096
//! ```
//!
//! An entry of a manifest names an image by file, offset, length and checksum, and is the authority for the image. The
//! table at the start of a chunk describes the images as of the time of writing, for inspection and salvage. A page of
//! length 0 has no image.
//!
//! An image can be an [`Overlay`], whose pieces replace parts of another image. The table of a chunk lists an overlay
//! as an image of an unknown page, because the bytes of the overlay have no meaning without the entry of the manifest.

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
