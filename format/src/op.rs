//! Floor 0. A batch's payload: a head of 16 bytes, then operations. Each is a header of 32 bytes and a
//! body, padded with zeros to a multiple of 16, so that bodies stay aligned for a device that reads them
//! in place.
//!
//! The log holds after-images only (I2): every body is bytes to store, never a formula over other bytes.

use crate::defect::{Defect, array, check_limit, check_zero, slice};
use crate::ids::{Key, Lsn, PageId, Place, Width};
use crate::layout::layout;
use crate::limits::{
    DEVICE_ORDINAL_MAX, FRAME_ALIGN, METADATA_LEN_MAX, NAME_LEN_MAX, NOTE_LEN_MAX, NUMBER_MAX, ROOT_LEN_MAX,
    align_up,
};
use crate::value::{Metadata, Value, decode_entry, decode_metadata, encode_entry, encode_metadata};

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

layout! {
    /// The head of a batch's payload.
    pub struct PayloadHeadRaw: 16 {
        /// Number of operations.
        0 => op_count: u32,
        /// Zero.
        4 => reserved: u32,
        /// Zero.
        8 => reserved_2: u64,
    }
}

layout! {
    /// The header of an operation.
    pub struct OpHeaderRaw: 32 {
        /// Which operation.
        0 => kind: u16,
        /// Element width in bytes, where the operation has elements; else zero.
        2 => width: u8,
        /// Zero; other encodings of the same operation get other numbers.
        3 => encoding: u8,
        /// Length of the body, padding not included.
        4 => body_len: u32,
        /// The page; zero where the operation is about none.
        8 => page: PageId,
        /// First argument: an offset or a length.
        16 => first: u64,
        /// Second argument: a length or a count.
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
        /// Zero.
        2 => reserved: u16,
        /// The place's ordinal.
        4 => place_ordinal: u32,
        /// Length of the metadata envelope.
        8 => metadata_len: u32,
        /// Zero.
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
        /// Zero.
        12 => reserved: u32,
    }
}

/// One operation of a batch; bytes are borrowed from the payload.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op<'a> {
    /// A new page of zeros.
    Create {
        /// Its id.
        page: PageId,
        /// Its length in bytes.
        len: u64,
        /// Where it lives.
        place: Place,
        /// The user's name for it.
        key: Option<Key>,
        /// Its metadata.
        metadata: Metadata,
    },
    /// Bytes replace a range.
    Write {
        /// The page.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Elements of a range are replaced where a bit is set.
    Masked {
        /// The page.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// The elements' width.
        width: Width,
        /// One bit an element, lowest bit first; bits past the last element are zero.
        mask: &'a [u8],
        /// Bytes of the whole range; those of elements that are not replaced are zero.
        bytes: &'a [u8],
    },
    /// Elements are replaced one by one.
    Scatter {
        /// The page.
        page: PageId,
        /// The elements' width.
        width: Width,
        /// Byte offset of element 0.
        base: u64,
        /// Element indices, four little-endian bytes each, all different.
        indices: &'a [u8],
        /// The elements.
        values: &'a [u8],
    },
    /// A pattern is repeated over a range.
    Fill {
        /// The page.
        page: PageId,
        /// First byte of the range.
        offset: u64,
        /// Length of the range, a multiple of the pattern's.
        len: u64,
        /// 1, 2, 4, 8 or 16 bytes.
        pattern: &'a [u8],
    },
    /// The page is cut, or extended by zeros.
    Resize {
        /// The page.
        page: PageId,
        /// Its new length in bytes.
        len: u64,
    },
    /// The page and its key are gone.
    Delete {
        /// The page.
        page: PageId,
    },
    /// One entry of the page's metadata is set.
    SetMetadata {
        /// The page.
        page: PageId,
        /// The entry's name.
        name: String,
        /// Its value.
        value: Value,
    },
    /// One entry of the page's metadata is removed, if it is there.
    RemoveMetadata {
        /// The page.
        page: PageId,
        /// The entry's name.
        name: &'a str,
    },
    /// One entry of the root is set.
    SetRoot {
        /// The entry's name.
        name: String,
        /// Its value.
        value: Value,
    },
    /// One entry of the root is removed, if it is there.
    RemoveRoot {
        /// The entry's name.
        name: &'a str,
    },
    /// A remark that travels with the batch.
    Note {
        /// The text.
        text: &'a str,
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
    /// The operation.
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
            | Op::RemoveMetadata { page, .. } => Some(*page),
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
            Op::Scatter { width, base, indices, .. } => {
                let highest = indices
                    .chunks_exact(4)
                    .map(|raw| u64::from(u32::from_le_bytes(raw.try_into().expect("four bytes"))) + 1)
                    .max();
                Some((*base, highest.unwrap_or(0) * width.bytes() as u64))
            }
            _ => None,
        }
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
        }
    }
}

/// Offset of a masked delta's bytes from the start of its body.
#[must_use]
pub const fn masked_bytes_at(mask_len: usize) -> usize {
    align_up(mask_len as u64, FRAME_ALIGN) as usize
}

/// Offset of a sparse delta's values from the start of its body.
#[must_use]
pub const fn scatter_values_at(count: usize) -> usize {
    align_up(4 * count as u64, FRAME_ALIGN) as usize
}

/// Encodes operations one after another into a payload.
#[derive(Debug)]
pub struct PayloadWriter {
    bytes: Vec<u8>,
    op_count: u32,
}

impl Default for PayloadWriter {
    fn default() -> Self {
        Self { bytes: vec![0; PAYLOAD_HEAD_LEN], op_count: 0 }
    }
}

impl PayloadWriter {
    /// Appends an operation.
    ///
    /// # Errors
    /// [`Defect::Limit`] if a part of it is longer than the format allows.
    pub fn push(&mut self, op: &Op<'_>) -> Result<(), Defect> {
        let mut header = OpHeaderRaw {
            kind: 0,
            width: 0,
            encoding: 0,
            body_len: 0,
            page: op.page().unwrap_or_default(),
            first: 0,
            second: 0,
        };
        let header_at = self.bytes.len();
        self.bytes.resize(header_at + OP_HEADER_LEN, 0);
        let body_at = self.bytes.len();
        match op {
            Op::Create { len, place, key, metadata, .. } => {
                (header.kind, header.first) = (CREATE, *len);
                check_place(*place)?;
                let (place_kind, place_ordinal) = place.to_raw();
                let metadata = encode_metadata(metadata, METADATA_LEN_MAX)?;
                let key = key.as_ref().map_or(&[][..], Key::as_bytes);
                let fixed = CreateBodyRaw {
                    place_kind,
                    key_len: u8::try_from(key.len()).expect("keys are at most 64 bytes"),
                    reserved: 0,
                    place_ordinal,
                    metadata_len: u32::try_from(metadata.len()).expect("metadata is at most 64 KiB"),
                    reserved_2: 0,
                };
                self.bytes.extend_from_slice(&fixed.to_bytes());
                self.bytes.extend_from_slice(key);
                self.bytes.extend_from_slice(&metadata);
            }
            Op::Write { offset, bytes, .. } => {
                (header.kind, header.first, header.second) = (WRITE, *offset, bytes.len() as u64);
                self.bytes.extend_from_slice(bytes);
            }
            Op::Masked { offset, width, mask, bytes, .. } => {
                (header.kind, header.first, header.second) = (MASKED, *offset, bytes.len() as u64);
                header.width = width.bytes() as u8;
                self.bytes.extend_from_slice(mask);
                self.bytes.resize(body_at + masked_bytes_at(mask.len()), 0);
                self.bytes.extend_from_slice(bytes);
            }
            Op::Scatter { width, base, indices, values, .. } => {
                let count = indices.len() / 4;
                (header.kind, header.first, header.second) = (SCATTER, *base, count as u64);
                header.width = width.bytes() as u8;
                self.bytes.extend_from_slice(indices);
                self.bytes.resize(body_at + scatter_values_at(count), 0);
                self.bytes.extend_from_slice(values);
            }
            Op::Fill { offset, len, pattern, .. } => {
                (header.kind, header.first, header.second) = (FILL, *offset, *len);
                header.width = pattern.len() as u8;
                self.bytes.extend_from_slice(pattern);
            }
            Op::Resize { len, .. } => (header.kind, header.first) = (RESIZE, *len),
            Op::Delete { .. } => header.kind = DELETE,
            Op::SetMetadata { name, value, .. } => {
                header.kind = SET_METADATA;
                self.bytes.extend_from_slice(&encode_entry(name, value, METADATA_LEN_MAX)?);
            }
            Op::RemoveMetadata { name, .. } => {
                header.kind = REMOVE_METADATA;
                check_limit("name length", name.len() as u64, NAME_LEN_MAX as u64)?;
                self.bytes.extend_from_slice(name.as_bytes());
            }
            Op::SetRoot { name, value } => {
                header.kind = SET_ROOT;
                self.bytes.extend_from_slice(&encode_entry(name, value, ROOT_LEN_MAX)?);
            }
            Op::RemoveRoot { name } => {
                header.kind = REMOVE_ROOT;
                check_limit("name length", name.len() as u64, NAME_LEN_MAX as u64)?;
                self.bytes.extend_from_slice(name.as_bytes());
            }
            Op::Note { text } => {
                header.kind = NOTE;
                check_limit("note length", text.len() as u64, NOTE_LEN_MAX as u64)?;
                self.bytes.extend_from_slice(text.as_bytes());
            }
            Op::Restore { table, table_crc, restored } => {
                (header.kind, header.first) = (RESTORE, *table);
                let body = RestoreBodyRaw { restored: *restored, table_crc: *table_crc, reserved: 0 };
                self.bytes.extend_from_slice(&body.to_bytes());
            }
        }
        let body_len = (self.bytes.len() - body_at) as u64;
        check_limit("operation length", body_len, crate::limits::FRAME_PAYLOAD_LEN_MAX)?;
        header.body_len = body_len as u32;
        self.bytes[header_at..body_at].copy_from_slice(&header.to_bytes());
        self.bytes.resize(align_up(self.bytes.len() as u64, FRAME_ALIGN) as usize, 0);
        self.op_count += 1;
        Ok(())
    }

    /// Bytes written so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is no operation yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.op_count == 0
    }

    /// The payload.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        let head = PayloadHeadRaw { op_count: self.op_count, reserved: 0, reserved_2: 0 };
        self.bytes[..PAYLOAD_HEAD_LEN].copy_from_slice(&head.to_bytes());
        self.bytes
    }
}

/// Reads the operations of a payload.
///
/// # Errors
/// A [`Defect`] if the payload is not exactly a head and so many well-formed operations.
pub fn decode_payload(payload: &[u8]) -> Result<Vec<OpAt<'_>>, Defect> {
    let head = PayloadHeadRaw::from_bytes(array(payload, 0)?);
    check_zero("reserved payload bytes", u64::from(head.reserved) | head.reserved_2)?;
    // An operation takes a header at least, so the count cannot make us allocate more than there is.
    check_limit("operation count", head.op_count.into(), (payload.len() / OP_HEADER_LEN) as u64)?;
    let mut ops = Vec::with_capacity(head.op_count as usize);
    let mut at = PAYLOAD_HEAD_LEN;
    for _ in 0..head.op_count {
        let header = OpHeaderRaw::from_bytes(array(payload, at)?);
        let body_at = at + OP_HEADER_LEN;
        let body_len = header.body_len as usize;
        let body = slice(payload, body_at, body_len)?;
        let padded_len = align_up(body_len as u64, FRAME_ALIGN) as usize;
        let padding = slice(payload, body_at + body_len, padded_len - body_len)?;
        check_zero("operation padding", padding.iter().map(|&byte| u64::from(byte)).sum())?;
        ops.push(OpAt { op: decode_op(&header, body)?, body_at });
        at = body_at + padded_len;
    }
    if at != payload.len() {
        return Err(Defect::Field {
            what: "bytes after the last operation",
            found: (payload.len() - at) as u64,
        });
    }
    Ok(ops)
}

/// Refuses a device slot that no store has.
fn check_place(place: Place) -> Result<(), Defect> {
    match place {
        Place::Device(ordinal) => check_limit("device ordinal", ordinal.into(), DEVICE_ORDINAL_MAX.into()),
        _ => Ok(()),
    }
}

fn decode_op<'a>(header: &OpHeaderRaw, body: &'a [u8]) -> Result<Op<'a>, Defect> {
    check_zero("operation encoding", header.encoding.into())?;
    let page = header.page;
    check_limit("operation's page", page.0, NUMBER_MAX)?;
    let OpHeaderRaw { first, second, .. } = *header;
    let about_page = matches!(header.kind, CREATE..=REMOVE_METADATA);
    if about_page == (page == PageId(0)) {
        return Err(Defect::Field { what: "operation's page", found: page.0 });
    }
    let width = || {
        Width::from_bytes(header.width.into())
            .ok_or(Defect::Field { what: "element width", found: header.width.into() })
    };
    if !matches!(header.kind, MASKED | SCATTER | FILL) {
        check_zero("element width", header.width.into())?;
    }
    let unused = |value: u64| check_zero("unused operation argument", value);
    let empty = || check_zero("operation body length", body.len() as u64);
    let has_len = |what, found: usize, expected: u64| {
        if found as u64 == expected {
            Ok(())
        } else {
            Err(Defect::Mismatch { what, found: found as u64, expected })
        }
    };
    let text = |limit: usize| {
        check_limit("text length", body.len() as u64, limit as u64)?;
        std::str::from_utf8(body).map_err(|_| Defect::Metadata("text is not UTF-8".to_owned()))
    };
    match header.kind {
        CREATE => {
            unused(second)?;
            let raw = CreateBodyRaw::from_bytes(array(body, 0)?);
            check_zero("reserved create bytes", u64::from(raw.reserved) | u64::from(raw.reserved_2))?;
            let key_len = usize::from(raw.key_len);
            let key = match slice(body, CreateBodyRaw::LEN, key_len)? {
                [] => None,
                bytes => Some(Key::new(bytes).map_err(|error| Defect::Limit {
                    what: "key length",
                    found: error.len as u64,
                    limit: crate::limits::KEY_LEN_MAX as u64,
                })?),
            };
            let envelope = &body[CreateBodyRaw::LEN + key_len..];
            has_len("metadata length", envelope.len(), raw.metadata_len.into())?;
            let (metadata, consumed) = decode_metadata(envelope, METADATA_LEN_MAX)?;
            has_len("metadata length", consumed, envelope.len() as u64)?;
            let place = Place::from_raw(raw.place_kind, raw.place_ordinal)
                .ok_or(Defect::Field { what: "place", found: raw.place_kind.into() })?;
            check_place(place)?;
            Ok(Op::Create { page, len: first, place, key, metadata })
        }
        WRITE => {
            has_len("written length", body.len(), second)?;
            Ok(Op::Write { page, offset: first, bytes: body })
        }
        MASKED => {
            let width = width()?;
            check_limit("masked length", second, body.len() as u64)?;
            let len = second as usize;
            if !len.is_multiple_of(width.bytes()) {
                return Err(Defect::Field { what: "masked length", found: second });
            }
            let count = len / width.bytes();
            let mask_len = count.div_ceil(8);
            let bytes_at = masked_bytes_at(mask_len);
            has_len("masked body length", body.len(), (bytes_at + len) as u64)?;
            let mask = &body[..mask_len];
            check_zero("mask padding", body[mask_len..bytes_at].iter().map(|&byte| u64::from(byte)).sum())?;
            if !count.is_multiple_of(8) {
                check_zero("mask bits past the end", u64::from(mask[mask_len - 1] >> (count % 8)))?;
            }
            Ok(Op::Masked { page, offset: first, width, mask, bytes: &body[bytes_at..] })
        }
        SCATTER => {
            let width = width()?;
            check_limit("element count", second, body.len() as u64)?;
            let count = second as usize;
            let values_at = scatter_values_at(count);
            has_len("scatter body length", body.len(), (values_at + count * width.bytes()) as u64)?;
            check_zero(
                "index padding",
                body[4 * count..values_at].iter().map(|&byte| u64::from(byte)).sum(),
            )?;
            Ok(Op::Scatter {
                page,
                width,
                base: first,
                indices: &body[..4 * count],
                values: &body[values_at..],
            })
        }
        FILL => {
            has_len("pattern length", body.len(), width()?.bytes() as u64)?;
            if second % body.len() as u64 != 0 {
                return Err(Defect::Field { what: "filled length", found: second });
            }
            Ok(Op::Fill { page, offset: first, len: second, pattern: body })
        }
        RESIZE => {
            unused(second)?;
            empty()?;
            Ok(Op::Resize { page, len: first })
        }
        DELETE => {
            unused(first | second)?;
            empty()?;
            Ok(Op::Delete { page })
        }
        SET_METADATA | SET_ROOT => {
            unused(first | second)?;
            let limit = if header.kind == SET_ROOT { ROOT_LEN_MAX } else { METADATA_LEN_MAX };
            let ((name, value), consumed) = decode_entry(body, limit)?;
            has_len("entry length", consumed, body.len() as u64)?;
            Ok(if header.kind == SET_ROOT {
                Op::SetRoot { name, value }
            } else {
                Op::SetMetadata { page, name, value }
            })
        }
        REMOVE_METADATA => {
            unused(first | second)?;
            Ok(Op::RemoveMetadata { page, name: text(NAME_LEN_MAX)? })
        }
        REMOVE_ROOT => {
            unused(first | second)?;
            Ok(Op::RemoveRoot { name: text(NAME_LEN_MAX)? })
        }
        NOTE => {
            unused(first | second)?;
            Ok(Op::Note { text: text(NOTE_LEN_MAX)? })
        }
        RESTORE => {
            unused(second)?;
            has_len("restore body length", body.len(), RestoreBodyRaw::LEN as u64)?;
            let raw = RestoreBodyRaw::from_bytes(array(body, 0)?);
            check_zero("reserved restore bytes", raw.reserved.into())?;
            Ok(Op::Restore { table: first, table_crc: raw.table_crc, restored: raw.restored })
        }
        other => Err(Defect::Field { what: "operation kind", found: other.into() }),
    }
}
