//! Floor 0. Operations to bytes: a payload under construction.

use super::{
    CREATE, CreateBodyRaw, DELETE, FILL, IMAGE, ImageBodyRaw, MASKED, MOVE, NOTE, OP_HEADER_LEN, Op,
    OpHeaderRaw, PAYLOAD_HEAD_LEN, PayloadHeadRaw, REMOVE_METADATA, REMOVE_ROOT, RESIZE, RESTORE,
    RestoreBodyRaw, SCATTER, SET_METADATA, SET_ROOT, WRITE, check_place, masked_bytes_at, scatter_values_at,
};
use crate::defect::{Defect, check_limit};
use crate::ids::Key;
use crate::limits::{FRAME_ALIGN, METADATA_LEN_MAX, NAME_LEN_MAX, NOTE_LEN_MAX, ROOT_LEN_MAX, align_up};
use crate::value::{encode_entry, encode_metadata};

/// Encodes operations one after another into a payload.
#[derive(Debug)]
pub struct PayloadWriter {
    bytes: Vec<u8>,
    op_count: u32,
}

impl Default for PayloadWriter {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl PayloadWriter {
    /// An empty payload, with room for operations of so many bytes before it moves to more memory.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(PAYLOAD_HEAD_LEN.saturating_add(capacity));
        bytes.resize(PAYLOAD_HEAD_LEN, 0);
        Self { bytes, op_count: 0 }
    }

    /// Appends an operation.
    ///
    /// # Errors
    /// [`Defect::Limit`] if a part of it is longer than the format allows; what [`ImageRef::check`] says of an
    /// image.
    ///
    /// [`ImageRef::check`]: crate::image::ImageRef::check
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
                (header.kind, header.first, header.second) = (SCATTER, *base, indices.len() as u64);
                (header.width, header.encoding) = (width.bytes() as u8, indices.encoding());
                self.bytes.extend_from_slice(indices.as_bytes());
                self.bytes.resize(body_at + scatter_values_at(indices.as_bytes().len()), 0);
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
            Op::Image { len, image, .. } => {
                (header.kind, header.first) = (IMAGE, *len);
                image.check(*len)?;
                let body = ImageBodyRaw {
                    file: image.file,
                    offset: image.offset,
                    stored_len: image.stored_len,
                    stored_crc: image.stored_crc,
                    raw_crc: image.raw_crc,
                    codec: image.codec.to_raw(),
                    reserved: [0; 7],
                };
                self.bytes.extend_from_slice(&body.to_bytes());
            }
            Op::Move { place, .. } => {
                check_place(*place)?;
                let (place_kind, place_ordinal) = place.to_raw();
                (header.kind, header.first) = (MOVE, place_kind.into());
                header.second = place_ordinal.into();
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
