//! Payload of a batch: a 16-byte head, then operations.
//!
//! An operation is a 32-byte header and a body, padded with zeros to a multiple of 16, so that bodies stay
//! aligned for a device that reads them in place.
//!
//! The log holds after-images only (I2): a body contains the bytes to store, never a computation on other
//! bytes.

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

/// Length of a payload head in bytes.
pub const PAYLOAD_HEAD_LEN: usize = PayloadHeadRaw::LEN;
/// Length of an operation header in bytes.
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
    /// Encoded head of a batch's payload.
    pub struct PayloadHeadRaw: 16 {
        /// Number of operations.
        0 => op_count: u32,
        /// Reserved, always zero.
        4 => reserved: u32,
        /// Reserved, always zero.
        8 => reserved_2: u64,
    }
}

layout! {
    /// Encoded operation header.
    pub struct OpHeaderRaw: 32 {
        /// The kind of operation.
        0 => kind: u16,
        /// Element width in bytes if the operation has elements, otherwise zero.
        2 => width: u8,
        /// Encoding of a sparse delta's indices, 0 or 1. Zero for other operations.
        3 => encoding: u8,
        /// Length of the body in bytes, without padding.
        4 => body_len: u32,
        /// Page that the operation applies to, or zero if it applies to none.
        8 => page: PageId,
        /// First argument: an offset, a length, the number of a table file or the kind of a place.
        16 => first: u64,
        /// Second argument: a length, a count or the ordinal of a place.
        24 => second: u64,
    }
}

layout! {
    /// Fixed part of a create's body; the key and the metadata envelope follow.
    pub struct CreateBodyRaw: 16 {
        /// Kind of the place.
        0 => place_kind: u8,
        /// Length of the key in bytes; zero if the page has none.
        1 => key_len: u8,
        /// Reserved, always zero.
        2 => reserved: u16,
        /// Ordinal of the place.
        4 => place_ordinal: u32,
        /// Length of the metadata envelope in bytes.
        8 => metadata_len: u32,
        /// Reserved, always zero.
        12 => reserved_2: u32,
    }
}

layout! {
    /// Encoded body of a restore.
    pub struct RestoreBodyRaw: 16 {
        /// The Lsn whose state is restored.
        0 => restored: Lsn,
        /// Checksum of the table's header.
        8 => table_crc: u32,
        /// Reserved, always zero.
        12 => reserved: u32,
    }
}

layout! {
    /// Encoded body of an image operation.
    pub struct ImageBodyRaw: 40 {
        /// Number of the image file.
        0 => file: u64,
        /// The payload's offset, in bytes from the file's start.
        8 => offset: u64,
        /// Stored length of the payload in bytes.
        16 => stored_len: u64,
        /// CRC-32 of the payload as stored.
        24 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        28 => raw_crc: u32,
        /// Encoding of the payload, as in an image header.
        32 => codec: u8,
        /// Reserved, always zero.
        33 => reserved: [u8; 7],
    }
}

/// A range of a page whose bytes an operation changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteChange {
    /// The page's id.
    pub page: PageId,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

/// An operation of a batch. Bytes are borrowed from the payload.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op<'a> {
    /// Creates a page filled with zeros.
    Create {
        /// The page's id.
        page: PageId,
        /// Its length in bytes.
        len: u64,
        /// The page's place.
        place: Place,
        /// The user's key for the page.
        key: Option<Key>,
        /// The page's metadata.
        metadata: Metadata,
    },
    /// Replaces the bytes of a range.
    Write {
        /// The page's id.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// The bytes written.
        bytes: &'a [u8],
    },
    /// Replaces the elements of a range whose mask bit is set.
    Masked {
        /// The page's id.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// The width of an element.
        width: Width,
        /// One bit per element, lowest bit first. Bits past the last element are zero.
        mask: &'a [u8],
        /// The bytes of the whole range; those of unchanged elements are zero.
        bytes: &'a [u8],
    },
    /// Replaces individual elements.
    Scatter {
        /// The page's id.
        page: PageId,
        /// The width of an element.
        width: Width,
        /// The byte offset of element 0.
        base: u64,
        /// The indices of the elements, all different.
        indices: Indices<'a>,
        /// The bytes of the elements, back to back.
        values: &'a [u8],
    },
    /// Fills a range with a repeated pattern.
    Fill {
        /// The page's id.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// Length of the range in bytes, a multiple of the pattern's length.
        len: u64,
        /// The pattern: 1, 2, 4, 8 or 16 bytes.
        pattern: &'a [u8],
    },
    /// Changes the length of the page: truncates it or extends it with zeros.
    Resize {
        /// The page's id.
        page: PageId,
        /// The new length in bytes.
        len: u64,
    },
    /// Deletes the page and frees its key.
    Delete {
        /// The page's id.
        page: PageId,
    },
    /// Sets one entry of the page's metadata.
    SetMetadata {
        /// The page's id.
        page: PageId,
        /// The entry's name.
        name: String,
        /// The entry's value.
        value: Value,
    },
    /// Removes one entry of the page's metadata, if it exists.
    RemoveMetadata {
        /// The page's id.
        page: PageId,
        /// The entry's name.
        name: &'a str,
    },
    /// Sets one entry of the root.
    SetRoot {
        /// The entry's name.
        name: String,
        /// The entry's value.
        value: Value,
    },
    /// Removes one entry of the root, if it exists.
    RemoveRoot {
        /// The entry's name.
        name: &'a str,
    },
    /// Attaches a note to the batch.
    Note {
        /// The note's text.
        text: &'a str,
    },
    /// Replaces the page's whole content by an image.
    ///
    /// The image is durable before the batch is logged, so the bytes are written only once. The page already
    /// has the image's length, and no other operation of the batch changes its bytes.
    Image {
        /// The page's id.
        page: PageId,
        /// The page's length in bytes.
        len: u64,
        /// The image that holds the bytes.
        image: ImageRef,
    },
    /// Moves the page to another place. Its bytes and its epoch are unchanged.
    Move {
        /// The page's id.
        page: PageId,
        /// The new place.
        place: Place,
    },
    /// Replaces all pages and the root by an earlier state, recorded in a table file. It must be the only
    /// operation of its batch.
    Restore {
        /// The number of the table file.
        table: u64,
        /// The checksum of the table's header.
        table_crc: u32,
        /// The Lsn of the restored state.
        restored: Lsn,
    },
}

/// An operation and the offset of its body in the payload.
#[derive(Clone, Debug, PartialEq)]
pub struct OpAt<'a> {
    /// The operation itself.
    pub op: Op<'a>,
    /// Offset of the body from the start of the payload, in bytes.
    pub body_at: usize,
}

impl Op<'_> {
    /// Returns the page that the operation applies to, if any.
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

    /// Returns the range of the page that the operation can write, as offset and length. Returns `None` for
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

    /// Returns true if the operation changes existing bytes of a page. A create or an image does not: it
    /// supplies the bytes that later operations change.
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

    /// Returns the range that the operation changes, if changing existing bytes of a page is all that it
    /// does. Returns `None` for a resize.
    #[must_use]
    pub fn byte_change(&self) -> Option<ByteChange> {
        let (offset, len) = self.range().filter(|_| self.changes_bytes())?;
        Some(ByteChange { page: self.page()?, offset, len })
    }

    /// Returns the name of the operation, as tools print it.
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

/// Returns the offset of a masked delta's bytes from the start of its body, given the length of the mask.
#[must_use]
pub const fn masked_bytes_at(mask_len: usize) -> usize {
    align_up(mask_len as u64, FRAME_ALIGN) as usize
}

/// Returns the offset of a sparse delta's values from the start of its body, given the length of its encoded
/// indices. Padding separates the two.
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
