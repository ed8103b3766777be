//! Payload of a batch, which contains a 16-byte head and then operations.
//!
//! An operation is a 32-byte header and a body. The body is padded with zeros to a multiple of 16 bytes, so that a
//! device can read every body at an aligned address.
//!
//! The log contains after-images only (I2). A body contains the bytes to store, and no operation computes bytes from
//! other bytes.

mod indices;
mod reader;
mod writer;

pub use indices::{Indices, gap_code, gap_coded, gap_coded_len};
pub use reader::{claimed_ops, decode_payload, decode_single, for_each_byte_change, for_each_op};
pub use writer::{PayloadBytes, PayloadWriter};

use crate::defect::{Defect, check_limit};
use crate::ids::{Key, Lsn, PageId, Place, Width};
use crate::image::ImageRef;
use crate::layout::layout;
use crate::limits::{DEVICE_ORDINAL_MAX, FRAME_ALIGN, align_up};
use crate::value::{Metadata, Value};

/// Length of the head of a payload in bytes.
pub const PAYLOAD_HEAD_LEN: usize = PayloadHeadRaw::LEN;
/// Length of the header of an operation in bytes.
pub const OP_HEADER_LEN: usize = OpHeaderRaw::LEN;

const CREATE: u16 = 1;
const WRITE: u16 = 2;
const MASKED: u16 = 3;
const SCATTER: u16 = 4;
const FILL: u16 = 5;
const RESIZE: u16 = 6;
const DELETE: u16 = 7;
const SET_METADATA: u16 = 8;
const REMOVE_METADATA: u16 = 9;
const SET_ROOT: u16 = 10;
const REMOVE_ROOT: u16 = 11;
const NOTE: u16 = 12;
const RESTORE: u16 = 13;
const IMAGE: u16 = 14;
const MOVE: u16 = 15;

layout! {
    /// The encoded head of a batch's payload.
    pub struct PayloadHeadRaw: 16 {
        /// Number of operations in the payload.
        0 => op_count: u32,
        /// Reserved, always zero.
        4 => reserved: u32,
        /// Reserved, always zero.
        8 => reserved_2: u64,
    }
}

layout! {
    /// The encoded header of an operation.
    pub struct OpHeaderRaw: 32 {
        /// Number that represents the kind of the operation.
        0 => kind: u16,
        /// Width of an element in bytes, or zero if the operation has no elements.
        2 => width: u8,
        /// Encoding of the indices of a sparse delta, 0 or 1; zero for other operations.
        3 => encoding: u8,
        /// Length of the body in bytes, without padding.
        4 => body_len: u32,
        /// Page that the operation changes, or zero if it changes no single page.
        8 => page: PageId,
        /// First argument of the operation. Depends on `kind`: an offset, a length, the number of a table file, or the
        /// kind of a place.
        16 => first: u64,
        /// Second argument of the operation. Depends on `kind`: a length, a count, or the ordinal of a place.
        24 => second: u64,
    }
}

layout! {
    /// The fixed part of the body of a create operation. The key and the metadata envelope follow it.
    pub struct CreateBodyRaw: 16 {
        /// Number that represents the kind of the new page's place.
        0 => place_kind: u8,
        /// Length of the key in bytes, or zero if the page has no key.
        1 => key_len: u8,
        /// Reserved, always zero.
        2 => reserved: u16,
        /// Ordinal of the new page's place.
        4 => place_ordinal: u32,
        /// Length of the metadata envelope in bytes.
        8 => metadata_len: u32,
        /// Reserved, always zero.
        12 => reserved_2: u32,
    }
}

layout! {
    /// The encoded body of a restore operation.
    pub struct RestoreBodyRaw: 16 {
        /// Lsn of the restored state.
        0 => restored: Lsn,
        /// Checksum of the header of the table file that describes the restored state.
        8 => table_crc: u32,
        /// Reserved, always zero.
        12 => reserved: u32,
    }
}

layout! {
    /// The encoded body of an image operation.
    pub struct ImageBodyRaw: 40 {
        /// Number of the image file that contains the payload.
        0 => file: u64,
        /// Offset of the payload, in bytes from the start of the file.
        8 => offset: u64,
        /// Length of the stored payload in bytes.
        16 => stored_len: u64,
        /// CRC-32 of the stored payload.
        24 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        28 => raw_crc: u32,
        /// Encoding of the payload. 0: uncompressed, 1: zstd.
        32 => codec: u8,
        /// Reserved, always zero.
        33 => reserved: [u8; 7],
    }
}

/// A range of a page whose bytes an operation changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteChange {
    /// The id of the page.
    pub page: PageId,
    /// Offset of the range, in bytes from the start of the page.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

/// A decoded operation of a batch. Its bytes are borrowed from the payload.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op<'a> {
    /// Creates a page that contains zeros.
    Create {
        /// The id of the new page.
        page: PageId,
        /// Length of the page in bytes.
        len: u64,
        /// The place of the page.
        place: Place,
        /// The key of the page, or `None` if the page has no key.
        key: Option<Key>,
        /// The metadata of the page.
        metadata: Metadata,
    },
    /// Replaces the bytes of a range.
    Write {
        /// The id of the page.
        page: PageId,
        /// Offset of the range in the page, in bytes.
        offset: u64,
        /// The new bytes of the range.
        bytes: &'a [u8],
    },
    /// Replaces those elements of a range whose bits in a mask are 1.
    Masked {
        /// The id of the page.
        page: PageId,
        /// Offset of the range in the page, in bytes.
        offset: u64,
        /// The width of an element.
        width: Width,
        /// The mask, with one bit per element and the lowest bit first. Bits past the last element are zero.
        mask: &'a [u8],
        /// The new bytes of the range. The bytes of unchanged elements are zero.
        bytes: &'a [u8],
    },
    /// Replaces individual elements of a page.
    Scatter {
        /// The id of the page.
        page: PageId,
        /// The width of an element.
        width: Width,
        /// Offset of the element with index 0 in the page, in bytes.
        base: u64,
        /// The indices of the elements, which must be distinct.
        indices: Indices<'a>,
        /// The new bytes of the elements, back to back.
        values: &'a [u8],
    },
    /// Fills a range with a repeated pattern.
    Fill {
        /// The id of the page.
        page: PageId,
        /// Offset of the range in the page, in bytes.
        offset: u64,
        /// Length of the range in bytes, a multiple of the pattern's length.
        len: u64,
        /// The pattern, of 1, 2, 4, 8 or 16 bytes.
        pattern: &'a [u8],
    },
    /// Changes the length of a page. A shorter page is truncated, and a longer page is extended with zeros.
    Resize {
        /// The id of the page.
        page: PageId,
        /// The new length of the page in bytes.
        len: u64,
    },
    /// Deletes a page and frees its key.
    Delete {
        /// The id of the page.
        page: PageId,
    },
    /// Sets an entry of a page's metadata.
    SetMetadata {
        /// The id of the page.
        page: PageId,
        /// The name of the entry.
        name: String,
        /// The value of the entry.
        value: Value,
    },
    /// Removes an entry of a page's metadata if the entry exists.
    RemoveMetadata {
        /// The id of the page.
        page: PageId,
        /// The name of the entry.
        name: &'a str,
    },
    /// Sets an entry of the root.
    SetRoot {
        /// The name of the entry.
        name: String,
        /// The value of the entry.
        value: Value,
    },
    /// Removes an entry of the root if the entry exists.
    RemoveRoot {
        /// The name of the entry.
        name: &'a str,
    },
    /// Adds a note to the batch, which has no effect on pages.
    Note {
        /// The text of the note.
        text: &'a str,
    },
    /// Replaces all bytes of a page with the bytes of an image.
    ///
    /// The image file is synced before the batch is logged, so the log need not contain the bytes. The length of the
    /// image is the current length of the page. No other operation of the batch changes the bytes of the page.
    Image {
        /// The id of the page.
        page: PageId,
        /// Length of the page in bytes.
        len: u64,
        /// The reference to the image that contains the bytes.
        image: ImageRef,
    },
    /// Moves a page to another place. The bytes and the epoch of the page are unchanged.
    Move {
        /// The id of the page.
        page: PageId,
        /// The new place of the page.
        place: Place,
    },
    /// Replaces all pages and the root with the content of a table file. The table file describes an earlier state of
    /// the store. A restore is the only operation of its batch.
    Restore {
        /// The number of the table file.
        table: u64,
        /// The checksum of the table file's header.
        table_crc: u32,
        /// The Lsn of the restored state.
        restored: Lsn,
    },
}

/// A decoded operation, and the location of its body in the payload.
#[derive(Clone, Debug, PartialEq)]
pub struct OpAt<'a> {
    /// The decoded operation.
    pub op: Op<'a>,
    /// Offset of the body, in bytes from the start of the payload.
    pub body_at: usize,
}

impl Op<'_> {
    /// Returns the page that the operation changes, or `None` if it changes no single page.
    #[must_use]
    pub fn page(&self) -> Option<PageId> {
        match self {
            Op::Create { page, .. }
            | Op::Write { page, .. }
            | Op::Masked { page, .. }
            | Op::Scatter { page, .. }
            | Op::Fill { page, .. }
            | Op::Resize { page, .. }
            | Op::Delete { page }
            | Op::SetMetadata { page, .. }
            | Op::RemoveMetadata { page, .. }
            | Op::Image { page, .. }
            | Op::Move { page, .. } => Some(*page),
            Op::SetRoot { .. } | Op::RemoveRoot { .. } | Op::Note { .. } | Op::Restore { .. } => None,
        }
    }

    /// Returns the offset and the length in bytes of the page's range that the operation can write. Returns `None` for
    /// operations without a range.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        match self {
            Op::Write { offset, bytes, .. } | Op::Masked { offset, bytes, .. } => {
                Some((*offset, bytes.len() as u64))
            }
            Op::Fill { offset, len, .. } => Some((*offset, *len)),
            Op::Image { len, .. } => Some((0, *len)),
            Op::Scatter { width, base, indices, .. } => {
                let count = indices.highest().map_or(0, |highest| u64::from(highest) + 1);
                Some((*base, count * width.bytes() as u64))
            }
            _ => None,
        }
    }

    /// Returns true if the operation changes bytes that the page already has. Returns false for a create or an image,
    /// because they supply all bytes of the page.
    #[must_use]
    pub fn changes_bytes(&self) -> bool {
        match self {
            Op::Write { .. }
            | Op::Masked { .. }
            | Op::Scatter { .. }
            | Op::Fill { .. }
            | Op::Resize { .. } => true,
            Op::Create { .. }
            | Op::Image { .. }
            | Op::Move { .. }
            | Op::Delete { .. }
            | Op::SetMetadata { .. }
            | Op::RemoveMetadata { .. }
            | Op::SetRoot { .. }
            | Op::RemoveRoot { .. }
            | Op::Note { .. }
            | Op::Restore { .. } => false,
        }
    }

    /// Returns the range of existing bytes that the operation changes. Returns `None` for a resize, and for operations
    /// that do not change existing bytes.
    #[must_use]
    pub fn byte_change(&self) -> Option<ByteChange> {
        let (offset, len) = self.range().filter(|_| self.changes_bytes())?;
        Some(ByteChange { page: self.page()?, offset, len })
    }

    /// Returns the name of the kind of operation, for output of tools.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Op::Create { .. } => "create",
            Op::Write { .. } => "write",
            Op::Masked { .. } => "masked",
            Op::Scatter { .. } => "scatter",
            Op::Fill { .. } => "fill",
            Op::Resize { .. } => "resize",
            Op::Delete { .. } => "delete",
            Op::SetMetadata { .. } => "set-metadata",
            Op::RemoveMetadata { .. } => "remove-metadata",
            Op::SetRoot { .. } => "set-root",
            Op::RemoveRoot { .. } => "remove-root",
            Op::Note { .. } => "note",
            Op::Restore { .. } => "restore",
            Op::Image { .. } => "image",
            Op::Move { .. } => "move",
        }
    }
}

/// Returns the offset of the new bytes in the body of a masked delta. `mask_len` is the length of the mask in bytes.
#[must_use]
pub const fn masked_bytes_at(mask_len: usize) -> usize {
    align_up(mask_len as u64, FRAME_ALIGN) as usize
}

/// Returns the offset of the values in the body of a sparse delta. `indices_len` is the length of the encoded indices
/// in bytes, without the padding that precedes the values.
#[must_use]
pub const fn scatter_values_at(indices_len: usize) -> usize {
    align_up(indices_len as u64, FRAME_ALIGN) as usize
}

/// Checks that the ordinal of a device is within its limit.
fn check_place(place: Place) -> Result<(), Defect> {
    match place {
        Place::Device(ordinal) => check_limit("device ordinal", ordinal.into(), DEVICE_ORDINAL_MAX.into()),
        _ => Ok(()),
    }
}
