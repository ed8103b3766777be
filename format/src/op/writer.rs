//! Encoding of operations into a payload.

use super::{
    CREATE, CreateBodyRaw, DELETE, FILL, IMAGE, ImageBodyRaw, Indices, MASKED, MOVE, NOTE, OP_HEADER_LEN, Op,
    OpHeaderRaw, PAYLOAD_HEAD_LEN, PayloadHeadRaw, REMOVE_METADATA, REMOVE_ROOT, RESIZE, RESTORE,
    RestoreBodyRaw, SCATTER, SET_METADATA, SET_ROOT, WRITE, check_place, masked_bytes_at, scatter_values_at,
};
use crate::defect::{Defect, check_limit};
use crate::ids::{Key, PageId, Place, Width};
use crate::image::{Codec, ImageRef};
use crate::limits::{FRAME_ALIGN, METADATA_LEN_MAX, NAME_LEN_MAX, NOTE_LEN_MAX, ROOT_LEN_MAX, align_up};
use crate::value::{Metadata, encode_entry, encode_metadata};

/// A growable buffer into which [`PayloadWriter`] encodes a payload. The engine implements this trait for its own
/// memory.
pub trait PayloadBytes: AsMut<[u8]> {
    /// Returns the length of the buffer in bytes.
    fn byte_len(&self) -> usize;

    /// Appends `bytes` to the buffer.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if the buffer cannot grow.
    fn append(&mut self, bytes: &[u8]) -> Result<(), Defect>;

    /// Appends `count` zero bytes to the buffer.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if the buffer cannot grow.
    fn append_zeros(&mut self, count: usize) -> Result<(), Defect>;
}

impl PayloadBytes for Vec<u8> {
    fn byte_len(&self) -> usize {
        self.len()
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Defect> {
        make_room(self, bytes.len())?;
        self.extend_from_slice(bytes);
        Ok(())
    }

    fn append_zeros(&mut self, count: usize) -> Result<(), Defect> {
        make_room(self, count)?;
        self.resize(self.len() + count, 0);
        Ok(())
    }
}

impl<B: PayloadBytes + ?Sized> PayloadBytes for &mut B
where
    Self: AsMut<[u8]>,
{
    fn byte_len(&self) -> usize {
        (**self).byte_len()
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), Defect> {
        (**self).append(bytes)
    }

    fn append_zeros(&mut self, count: usize) -> Result<(), Defect> {
        (**self).append_zeros(count)
    }
}

/// Reserves capacity for `count` more bytes. The capacity grows geometrically. Returns an error instead of aborting the
/// process.
fn make_room(bytes: &mut Vec<u8>, count: usize) -> Result<(), Defect> {
    let needed = (bytes.len() + count) as u64;
    bytes.try_reserve(count).map_err(|_| Defect::Memory { needed })
}

/// An encoder that appends operations to the payload of one batch.
#[derive(Debug)]
pub struct PayloadWriter<B = Vec<u8>> {
    bytes: B,
    op_count: u32,
}

impl Default for PayloadWriter {
    fn default() -> Self {
        Self::on(Vec::new())
    }
}

impl<B: PayloadBytes> PayloadWriter<B> {
    /// Starts an empty payload in `bytes`.
    ///
    /// # Panics
    /// Panics if `bytes` is not empty, or if there is not enough memory for the payload's head.
    #[must_use]
    pub fn on(mut bytes: B) -> Self {
        assert_eq!(bytes.byte_len(), 0, "a payload begins with its head");
        bytes.append_zeros(PAYLOAD_HEAD_LEN).expect("room for a few bytes");
        Self { bytes, op_count: 0 }
    }

    /// Appends an operation to the payload.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if the buffer cannot grow, [`Defect::Limit`] if a part of the operation exceeds a
    /// limit of the format, [`Defect::Field`] if an image is an overlay, or an error of [`ImageRef::check`].
    ///
    /// [`ImageRef::check`]: crate::image::ImageRef::check
    pub fn push(&mut self, op: &Op<'_>) -> Result<(), Defect> {
        let (mut header, body_at) = self.begin(op.page().unwrap_or_default())?;
        match op {
            Op::Create { len, place, key, metadata, .. } => {
                (header.kind, header.first) = (CREATE, *len);
                self.append_create(*place, key.as_ref(), metadata)?;
            }
            Op::Write { offset, bytes, .. } => {
                (header.kind, header.first, header.second) = (WRITE, *offset, bytes.len() as u64);
                self.bytes.append(bytes)?;
            }
            Op::Masked { offset, width, mask, bytes, .. } => {
                (header.kind, header.first, header.second) = (MASKED, *offset, bytes.len() as u64);
                header.width = width.bytes() as u8;
                self.bytes.append(mask)?;
                self.pad_to(body_at + masked_bytes_at(mask.len()))?;
                self.bytes.append(bytes)?;
            }
            Op::Scatter { width, base, indices, values, .. } => {
                self.scatter_up_to_values(&mut header, *width, *base, *indices)?;
                self.bytes.append(values)?;
            }
            Op::Fill { offset, len, pattern, .. } => {
                (header.kind, header.first, header.second) = (FILL, *offset, *len);
                header.width = pattern.len() as u8;
                self.bytes.append(pattern)?;
            }
            Op::Resize { len, .. } => (header.kind, header.first) = (RESIZE, *len),
            Op::Delete { .. } => header.kind = DELETE,
            Op::SetMetadata { name, value, .. } => {
                header.kind = SET_METADATA;
                self.bytes.append(&encode_entry(name, value, METADATA_LEN_MAX)?)?;
            }
            Op::RemoveMetadata { name, .. } => {
                header.kind = REMOVE_METADATA;
                check_limit("name length", name.len() as u64, NAME_LEN_MAX as u64)?;
                self.bytes.append(name.as_bytes())?;
            }
            Op::SetRoot { name, value } => {
                header.kind = SET_ROOT;
                self.bytes.append(&encode_entry(name, value, ROOT_LEN_MAX)?)?;
            }
            Op::RemoveRoot { name } => {
                header.kind = REMOVE_ROOT;
                check_limit("name length", name.len() as u64, NAME_LEN_MAX as u64)?;
                self.bytes.append(name.as_bytes())?;
            }
            Op::Note { text } => {
                header.kind = NOTE;
                check_limit("note length", text.len() as u64, NOTE_LEN_MAX as u64)?;
                self.bytes.append(text.as_bytes())?;
            }
            Op::Image { len, image, .. } => {
                (header.kind, header.first) = (IMAGE, *len);
                image.check(*len)?;
                self.append_image(image)?;
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
                self.bytes.append(&body.to_bytes())?;
            }
        }
        self.end(header, body_at)
    }

    /// Appends the body of [`Op::Create`].
    fn append_create(&mut self, place: Place, key: Option<&Key>, metadata: &Metadata) -> Result<(), Defect> {
        check_place(place)?;
        let (place_kind, place_ordinal) = place.to_raw();
        let metadata = encode_metadata(metadata, METADATA_LEN_MAX)?;
        let key = key.map_or(&[][..], Key::as_bytes);
        let fixed = CreateBodyRaw {
            place_kind,
            key_len: u8::try_from(key.len()).expect("keys are at most 64 bytes"),
            reserved: 0,
            place_ordinal,
            metadata_len: u32::try_from(metadata.len()).expect("metadata is at most 64 KiB"),
            reserved_2: 0,
        };
        self.bytes.append(&fixed.to_bytes())?;
        self.bytes.append(key)?;
        self.bytes.append(&metadata)
    }

    /// Appends the body of [`Op::Image`].
    fn append_image(&mut self, image: &ImageRef) -> Result<(), Defect> {
        // Reject overlays, because only a manifest can record their base.
        Codec::from_raw(image.codec.to_raw())?;
        let body = ImageBodyRaw {
            file: image.file,
            offset: image.offset,
            stored_len: image.stored_len,
            stored_crc: image.stored_crc,
            raw_crc: image.raw_crc,
            codec: image.codec.to_raw(),
            reserved: [0; 7],
        };
        self.bytes.append(&body.to_bytes())
    }

    /// Appends a write of `len` zeros, so that the caller can write the new bytes into the payload later. The zeros
    /// start [`OP_HEADER_LEN`] bytes after the previous end of the payload.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if the buffer cannot grow, or [`Defect::Limit`] if `len` exceeds a limit of the
    /// format.
    pub fn push_placeholder_write(&mut self, page: PageId, offset: u64, len: u64) -> Result<(), Defect> {
        check_limit("operation length", len, crate::limits::FRAME_PAYLOAD_LEN_MAX)?;
        let (mut header, body_at) = self.begin(page)?;
        (header.kind, header.first, header.second) = (WRITE, offset, len);
        self.bytes.append_zeros(len as usize)?;
        self.end(header, body_at)
    }

    /// Appends a sparse delta whose values are zeros, so that the caller can write the new values into the payload
    /// later. The values start [`OP_HEADER_LEN`] plus `scatter_values_at(indices.as_bytes().len())` bytes after the
    /// previous end of the payload.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if the buffer cannot grow, or [`Defect::Limit`] if the operation exceeds a limit of
    /// the format.
    pub fn push_placeholder_scatter(
        &mut self,
        page: PageId,
        width: Width,
        base: u64,
        indices: Indices<'_>,
    ) -> Result<(), Defect> {
        let (mut header, body_at) = self.begin(page)?;
        self.scatter_up_to_values(&mut header, width, base, indices)?;
        self.bytes.append_zeros(indices.len() * width.bytes())?;
        self.end(header, body_at)
    }

    /// Appends the encoded indices of a sparse delta with their padding, and sets the fields of its header.
    fn scatter_up_to_values(
        &mut self,
        header: &mut OpHeaderRaw,
        width: Width,
        base: u64,
        indices: Indices<'_>,
    ) -> Result<(), Defect> {
        (header.kind, header.first, header.second) = (SCATTER, base, indices.len() as u64);
        (header.width, header.encoding) = (width.bytes() as u8, indices.encoding());
        let values_at = self.bytes.byte_len() + scatter_values_at(indices.as_bytes().len());
        self.bytes.append(indices.as_bytes())?;
        self.pad_to(values_at)
    }

    /// Appends zeros for the header of an operation. Returns a header whose remaining fields the caller sets, and the
    /// offset of the body.
    fn begin(&mut self, page: PageId) -> Result<(OpHeaderRaw, usize), Defect> {
        self.bytes.append_zeros(OP_HEADER_LEN)?;
        let header = OpHeaderRaw { kind: 0, width: 0, encoding: 0, body_len: 0, page, first: 0, second: 0 };
        Ok((header, self.bytes.byte_len()))
    }

    /// Writes the header of an operation. The body consists of all bytes from `body_at` on.
    fn end(&mut self, mut header: OpHeaderRaw, body_at: usize) -> Result<(), Defect> {
        let body_len = (self.bytes.byte_len() - body_at) as u64;
        check_limit("operation length", body_len, crate::limits::FRAME_PAYLOAD_LEN_MAX)?;
        header.body_len = body_len as u32;
        self.bytes.as_mut()[body_at - OP_HEADER_LEN..body_at].copy_from_slice(&header.to_bytes());
        self.pad_to(align_up(self.bytes.byte_len() as u64, FRAME_ALIGN) as usize)?;
        self.op_count += 1;
        Ok(())
    }

    /// Returns the length of the payload so far, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.byte_len()
    }

    /// Returns true if the payload contains no operation.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.op_count == 0
    }

    /// Writes the head of the payload, and returns the buffer.
    #[must_use]
    pub fn finish(mut self) -> B {
        let head = PayloadHeadRaw { op_count: self.op_count, reserved: 0, reserved_2: 0 };
        self.bytes.as_mut()[..PAYLOAD_HEAD_LEN].copy_from_slice(&head.to_bytes());
        self.bytes
    }

    fn pad_to(&mut self, len: usize) -> Result<(), Defect> {
        self.bytes.append_zeros(len - self.bytes.byte_len())
    }
}
