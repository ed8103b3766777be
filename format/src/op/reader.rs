//! Decoding of operations. Bytes are checked before they are used (I9).

use std::hint::black_box;

use super::indices::{GAPS, PLAIN};
use super::{
    ByteChange, CREATE, CreateBodyRaw, DELETE, FILL, IMAGE, ImageBodyRaw, Indices, MASKED, MOVE, NOTE,
    OP_HEADER_LEN, Op, OpAt, OpHeaderRaw, PAYLOAD_HEAD_LEN, PayloadHeadRaw, REMOVE_METADATA, REMOVE_ROOT,
    RESIZE, RESTORE, RestoreBodyRaw, SCATTER, SET_METADATA, SET_ROOT, WRITE, check_place, masked_bytes_at,
    scatter_values_at,
};
use crate::defect::{Defect, array, check_equal, check_limit, check_zero, check_zeros, reserve_items, slice};
use crate::ids::{Key, PageId, Place, Width};
use crate::image::{Codec, ImageRef};
use crate::limits::{
    FRAME_ALIGN, METADATA_LEN_MAX, NAME_LEN_MAX, NOTE_LEN_MAX, NUMBER_MAX, ROOT_LEN_MAX, align_up,
};
use crate::value::{decode_entry, decode_metadata};

/// Decodes all operations of a payload.
///
/// # Errors
/// Returns a [`Defect`] if the payload is not a head followed by the stated number of valid operations.
pub fn decode_payload(payload: &[u8]) -> Result<Vec<OpAt<'_>>, Defect> {
    let mut ops = Vec::new();
    reserve_items(&mut ops, op_count(payload)?)?;
    for_each_op(payload, |op| ops.push(op))?;
    Ok(ops)
}

/// Calls `each` with every byte range that the payload changes. Returns true if all operations of the payload only
/// change existing bytes of pages.
///
/// Returns false if an operation does anything else or the payload is invalid. `each` may then have been called for some
/// ranges. [`decode_payload`] returns the defect of an invalid payload.
pub fn for_each_byte_change(payload: &[u8], mut each: impl FnMut(ByteChange)) -> bool {
    let mut are_all = true;
    let read = for_each_op(payload, |at| match at.op.byte_change() {
        Some(change) if are_all => each(change),
        Some(_) => {}
        None => are_all = false,
    });
    read.is_ok() && are_all
}

/// Returns the number of operations that the head of a payload states. Returns 0 if the head is invalid, or if the
/// payload is too short for this number of operations.
///
/// The operations are not decoded, so use the result only to reserve memory.
#[must_use]
pub fn claimed_ops(payload: &[u8]) -> usize {
    op_count(payload).unwrap_or(0)
}

/// Returns the number of operations that the head of a payload states. Checks that the payload is long enough for this
/// number.
fn op_count(payload: &[u8]) -> Result<usize, Defect> {
    let head = PayloadHeadRaw::from_bytes(array(payload, 0)?);
    check_zero("reserved payload bytes", u64::from(head.reserved) | head.reserved_2)?;
    // An operation contains a header, so a count that is too large for the payload is rejected before memory is
    // allocated.
    check_limit("operation count", head.op_count.into(), (payload.len() / OP_HEADER_LEN) as u64)?;
    Ok(head.op_count as usize)
}

/// Calls `each` with every operation of a payload in order, without allocating a list. After an error, `each` may have
/// been called for some operations.
///
/// # Errors
/// Returns the same [`Defect`] as [`decode_payload`].
pub fn for_each_op<'p>(payload: &'p [u8], mut each: impl FnMut(OpAt<'p>)) -> Result<(), Defect> {
    let mut at = PAYLOAD_HEAD_LEN;
    let mut op_len = 0;
    for _ in 0..op_count(payload)? {
        // The offset of the next operation depends on this header, which may still be in the cache of the core that
        // read the log. Usually the distance is that of the previous operation. If so, the loop continues from the
        // expected offset, and a processor that predicts the branch need not wait for the header.
        let foretold = at + op_len;
        let unseen = black_box(foretold);
        let (header, body, end) = take(payload, at)?;
        let body_at = at + OP_HEADER_LEN;
        // A long log contains mostly writes, so they are decoded without the general case.
        if header.kind == WRITE {
            each(OpAt { op: decode_write(&header, body)?, body_at });
        } else {
            each(OpAt { op: decode_op(&header, body)?, body_at });
        }
        if end == foretold {
            at = unseen;
        } else {
            op_len = other_len(end, at);
            at = end;
        }
    }
    check_end(payload, at)
}

/// Returns `end - at`. This function is separate so that the compiler emits a branch at the call. A conditional move
/// would wait for both values.
#[cold]
#[inline(never)]
fn other_len(end: usize, at: usize) -> usize {
    end - at
}

/// Decodes one operation from its bytes, including padding.
///
/// # Errors
/// Returns a [`Defect`] if the bytes are not one valid operation.
pub fn decode_single(bytes: &[u8]) -> Result<Op<'_>, Defect> {
    let (header, body, end) = take(bytes, 0)?;
    let op = decode_op(&header, body)?;
    check_end(bytes, end)?;
    Ok(op)
}

fn check_end(payload: &[u8], at: usize) -> Result<(), Defect> {
    if at == payload.len() {
        return Ok(());
    }
    Err(Defect::Field { what: "bytes after the last operation", found: (payload.len() - at) as u64 })
}

/// Returns the header and the body of the operation at offset `at`, and the offset of the next operation.
#[inline(always)]
fn take(payload: &[u8], at: usize) -> Result<(OpHeaderRaw, &[u8], usize), Defect> {
    let header = OpHeaderRaw::from_bytes(array(payload, at)?);
    let body_at = at + OP_HEADER_LEN;
    let body_len = header.body_len as usize;
    let body = slice(payload, body_at, body_len)?;
    let padded_len = align_up(body_len as u64, FRAME_ALIGN) as usize;
    let padding = slice(payload, body_at + body_len, padded_len - body_len)?;
    check_zero("operation padding", padding.iter().map(|&byte| u64::from(byte)).sum())?;
    Ok((header, body, body_at + padded_len))
}

/// Checks the conditions that apply to operations of all kinds.
#[inline(always)]
fn check_header(header: &OpHeaderRaw) -> Result<(), Defect> {
    if header.kind != SCATTER {
        check_zero("operation encoding", header.encoding.into())?;
    }
    let page = header.page;
    check_limit("operation's page", page.0, NUMBER_MAX)?;
    let about_page = matches!(header.kind, CREATE..=REMOVE_METADATA | IMAGE | MOVE);
    if about_page == (page == PageId(0)) {
        return Err(Defect::Field { what: "operation's page", found: page.0 });
    }
    if !matches!(header.kind, MASKED | SCATTER | FILL) {
        check_zero("element width", header.width.into())?;
    }
    Ok(())
}

#[inline(always)]
fn decode_write<'a>(header: &OpHeaderRaw, body: &'a [u8]) -> Result<Op<'a>, Defect> {
    check_header(header)?;
    check_equal("written length", body.len() as u64, header.second)?;
    Ok(Op::Write { page: header.page, offset: header.first, bytes: body })
}

fn decode_op<'a>(header: &OpHeaderRaw, body: &'a [u8]) -> Result<Op<'a>, Defect> {
    check_header(header)?;
    let OpHeaderRaw { page, first, second, .. } = *header;
    let width = || {
        Width::from_bytes(header.width.into())
            .ok_or(Defect::Field { what: "element width", found: header.width.into() })
    };
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
            let place = read_place(raw.place_kind.into(), raw.place_ordinal.into())?;
            Ok(Op::Create { page, len: first, place, key, metadata })
        }
        WRITE => decode_write(header, body),
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
            let indices = match header.encoding {
                PLAIN => Indices::plain(slice(body, 0, 4 * count)?),
                GAPS => Indices::read_gaps(body, count)?,
                other => return Err(Defect::Field { what: "operation encoding", found: other.into() }),
            };
            let indices_len = indices.as_bytes().len();
            let values_at = scatter_values_at(indices_len);
            has_len("scatter body length", body.len(), (values_at + count * width.bytes()) as u64)?;
            check_zeros("index padding", &body[indices_len..values_at])?;
            Ok(Op::Scatter { page, width, base: first, indices, values: &body[values_at..] })
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
            check_limit("number of a table", first, NUMBER_MAX)?;
            check_limit("restored lsn", raw.restored.0, NUMBER_MAX)?;
            check_zero("reserved restore bytes", raw.reserved.into())?;
            Ok(Op::Restore { table: first, table_crc: raw.table_crc, restored: raw.restored })
        }
        IMAGE => {
            unused(second)?;
            has_len("image body length", body.len(), ImageBodyRaw::LEN as u64)?;
            let raw = ImageBodyRaw::from_bytes(array(body, 0)?);
            check_zeros("reserved image bytes", &raw.reserved)?;
            let image = ImageRef {
                file: raw.file,
                offset: raw.offset,
                stored_len: raw.stored_len,
                stored_crc: raw.stored_crc,
                raw_crc: raw.raw_crc,
                codec: Codec::from_raw(raw.codec)?,
            };
            check_limit("image file", image.file, NUMBER_MAX)?;
            if image.file == 0 {
                return Err(Defect::Field { what: "image file", found: 0 });
            }
            image.check(first)?;
            Ok(Op::Image { page, len: first, image })
        }
        MOVE => {
            empty()?;
            Ok(Op::Move { page, place: read_place(first, second)? })
        }
        other => Err(Defect::Field { what: "operation kind", found: other.into() }),
    }
}

/// Returns the place that a kind and an ordinal represent. Checks that the ordinal is within its limit.
fn read_place(kind: u64, ordinal: u64) -> Result<Place, Defect> {
    let raw = u8::try_from(kind).ok().zip(u32::try_from(ordinal).ok());
    let place = raw.and_then(|(kind, ordinal)| Place::from_raw(kind, ordinal));
    let place = place.ok_or(Defect::Field { what: "place", found: kind })?;
    check_place(place)?;
    Ok(place)
}
