//! A batch's payload: a head of 16 bytes, then operations. Each is a header of 32 bytes and a
//! body, padded with zeros to a multiple of 16, so that bodies stay aligned for a device that reads them
//! in place.
//!
//! The log holds after-images only (I2): every body is bytes to store, never a formula over other bytes.

mod indices;
mod reader;
mod writer;

pub use indices::{Indices, gap_code, gap_coded, gap_coded_len};
pub use reader::{claimed_ops, decode_payload, decode_single, each_byte_change, each_op};
pub use writer::{PayloadBytes, PayloadWriter};

use crate::defect::{Defect, check_limit};
use crate::ids::{Key, Lsn, PageId, Place, Width};
use crate::image::ImageRef;
use crate::layout::layout;
use crate::limits::{DEVICE_ORDINAL_MAX, FRAME_ALIGN, align_up};
use crate::value::{Metadata, Value};

/// Length of a payload's head.
pub const PAYLOAD_HEAD_LEN: usize = PayloadHeadRaw::LEN;
/// Length of an operation's header.
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
    /// The head of a batch's payload.
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
    /// The header of an operation.
    pub struct OpHeaderRaw: 32 {
        /// The kind of operation.
        0 => kind: u16,
        /// Element width in bytes, where the operation has elements; else zero.
        2 => width: u8,
        /// How a sparse delta's indices are stored: 0 or 1. Zero for other operations.
        3 => encoding: u8,
        /// Length of the body, padding not included.
        4 => body_len: u32,
        /// The page; zero where the operation is about none.
        8 => page: PageId,
        /// First argument: an offset, a length, a place's kind.
        16 => first: u64,
        /// Second argument: a length, a count, a place's ordinal.
        24 => second: u64,
    }
}

layout! {
    /// The fixed start of a create's body; key and metadata envelope follow.
    pub struct CreateBodyRaw: 16 {
        /// The place's kind.
        0 => place_kind: u8,
        /// Length of the key; zero if there is none.
        1 => key_len: u8,
        /// Reserved, always zero.
        2 => reserved: u16,
        /// The place's ordinal.
        4 => place_ordinal: u32,
        /// Length of the metadata envelope.
        8 => metadata_len: u32,
        /// Reserved, always zero.
        12 => reserved_2: u32,
    }
}

layout! {
    /// The body of a restore.
    pub struct RestoreBodyRaw: 16 {
        /// The Lsn whose state is restored.
        0 => restored: Lsn,
        /// The checksum of the table's header.
        8 => table_crc: u32,
        /// Reserved, always zero.
        12 => reserved: u32,
    }
}

layout! {
    /// The body of an operation that names an image.
    pub struct ImageBodyRaw: 40 {
        /// The image file's number.
        0 => file: u64,
        /// The payload's offset, in bytes from the file's start.
        8 => offset: u64,
        /// Length of the payload as it is stored.
        16 => stored_len: u64,
        /// CRC-32 of the payload as it is stored.
        24 => stored_crc: u32,
        /// CRC-32 of the page's bytes.
        28 => raw_crc: u32,
        /// How the payload is stored, as in an image header.
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
    /// Number of bytes.
    pub len: u64,
}

/// One operation of a batch; bytes are borrowed from the payload.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op<'a> {
    /// A new page of zeros.
    Create {
        /// The page's id.
        page: PageId,
        /// Its length in bytes.
        len: u64,
        /// The page's place.
        place: Place,
        /// The user's name for it.
        key: Option<Key>,
        /// The page's metadata.
        metadata: Metadata,
    },
    /// Bytes replace a range.
    Write {
        /// The page's id.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// The bytes written.
        bytes: &'a [u8],
    },
    /// Elements of a range are replaced where a bit is set.
    Masked {
        /// The page's id.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// The elements' width.
        width: Width,
        /// One bit an element, lowest bit first; bits past the last element are zero.
        mask: &'a [u8],
        /// Bytes of the whole range; bytes of elements that are not replaced are zero.
        bytes: &'a [u8],
    },
    /// Elements are replaced one by one.
    Scatter {
        /// The page's id.
        page: PageId,
        /// The elements' width.
        width: Width,
        /// Byte offset of element 0.
        base: u64,
        /// Element indices, all different.
        indices: Indices<'a>,
        /// The elements' bytes, one after the other.
        values: &'a [u8],
    },
    /// A pattern is repeated over a range.
    Fill {
        /// The page's id.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// Length of the range, a multiple of the pattern's.
        len: u64,
        /// 1, 2, 4, 8 or 16 bytes.
        pattern: &'a [u8],
    },
    /// The page is shortened, or extended by zeros.
    Resize {
        /// The page's id.
        page: PageId,
        /// Its new length in bytes.
        len: u64,
    },
    /// The page and its key are gone.
    Delete {
        /// The page's id.
        page: PageId,
    },
    /// One entry of the page's metadata is set.
    SetMetadata {
        /// The page's id.
        page: PageId,
        /// The entry's name.
        name: String,
        /// The entry's value.
        value: Value,
    },
    /// One entry of the page's metadata is removed, if it is there.
    RemoveMetadata {
        /// The page's id.
        page: PageId,
        /// The entry's name.
        name: &'a str,
    },
    /// One entry of the root is set.
    SetRoot {
        /// The entry's name.
        name: String,
        /// The entry's value.
        value: Value,
    },
    /// One entry of the root is removed, if it is there.
    RemoveRoot {
        /// The entry's name.
        name: &'a str,
    },
    /// A remark that travels with the batch.
    Note {
        /// The note's text.
        text: &'a str,
    },
    /// An image becomes the page's whole content. It is durable before the batch is logged, so that the bytes
    /// are written once. No other operation of the batch changes the page's bytes, and it has its length by
    /// then.
    Image {
        /// The page's id.
        page: PageId,
        /// The page's length in bytes.
        len: u64,
        /// The image to take the bytes from.
        image: ImageRef,
    },
    /// The page lives elsewhere from now on; its bytes and its epoch stay as they are.
    Move {
        /// The page's id.
        page: PageId,
        /// The page's place.
        place: Place,
    },
    /// Everything is replaced by an earlier state, which a table file names. The only operation of its
    /// batch.
    Restore {
        /// The number of the table file.
        table: u64,
        /// The checksum of the table's header.
        table_crc: u32,
        /// The Lsn whose state it is.
        restored: Lsn,
    },
}

/// An operation, and where its body lies in the payload.
#[derive(Clone, Debug, PartialEq)]
pub struct OpAt<'a> {
    /// The operation itself.
    pub op: Op<'a>,
    /// Offset of the body from the payload's first byte.
    pub body_at: usize,
}

impl Op<'_> {
    /// The page concerned, if there is one.
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

    /// The range of the page's bytes that the operation reaches, as offset and length, if it has one.
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

    /// Whether it changes the bytes that a page has. A create and an image do not: they give it those that
    /// later operations change.
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

    /// The range that it changes, if it changes bytes that a page has and nothing else.
    #[must_use]
    pub fn byte_change(&self) -> Option<ByteChange> {
        let (offset, len) = self.range().filter(|_| self.changes_bytes())?;
        Some(ByteChange { page: self.page()?, offset, len })
    }

    /// The operation's name, as tools print it.
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

/// Offset of a masked delta's bytes from the start of its body.
#[must_use]
pub const fn masked_bytes_at(mask_len: usize) -> usize {
    align_up(mask_len as u64, FRAME_ALIGN) as usize
}

/// Offset of a sparse delta's values from the start of its body: after the bytes of its indices, padded.
#[must_use]
pub const fn scatter_values_at(indices_len: usize) -> usize {
    align_up(indices_len as u64, FRAME_ALIGN) as usize
}

/// Refuses a device slot that no store has.
fn check_place(place: Place) -> Result<(), Defect> {
    match place {
        Place::Device(ordinal) => check_limit("device ordinal", ordinal.into(), DEVICE_ORDINAL_MAX.into()),
        _ => Ok(()),
    }
}
