//! Encodings of image payloads.
//!
//! A compressed payload is a sequence of zstd frames (RFC 8878) without a dictionary. A reader verifies the checksum of
//! the stored payload before it decompresses. Therefore zstd receives only bytes that a store wrote, unless damaged
//! bytes have the same checksum.

use std::io::BufRead;
use std::ops::ControlFlow;

use zstd::stream::raw::{DParameter, Decoder, Operation};

use crate::defect::{Defect, check_equal, check_limit, reserve, zeros};
use crate::limits::{NUMBER_MAX, PAGE_LEN_MAX};

const CODEC_RAW: u8 = 0;
const CODEC_ZSTD: u8 = 1;
const CODEC_OVERLAY: u8 = 2;

/// Maximum number of page bytes per compressed frame. A writer splits a longer page, so that several threads can
/// compress the page.
pub const COMPRESSED_PIECE_LEN: usize = 1 << 20;
/// Base-2 logarithm of the largest permitted window of a frame in bytes. A decompressor allocates memory for one
/// window.
const WINDOW_LOG_MAX: u32 = 23;
/// Maximum ratio of the uncompressed to the compressed length. The shortest block of zstd has 4 bytes and represents at
/// most 128 KiB.
pub(super) const EXPANSION_MAX: u64 = (128 << 10) / 4;
/// Maximum number of bytes that are decompressed in one step.
const DECOMPRESSED_AT_ONCE: u64 = 128 << 10;

const _: () = assert!(COMPRESSED_PIECE_LEN <= 1 << WINDOW_LOG_MAX);

/// The base of an overlay, as recorded in an entry of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlayBase {
    /// Number of the image file that contains the base.
    pub file: u64,
    /// Length of the base's stored payload in bytes.
    pub stored_len: u64,
}

impl OverlayBase {
    pub(super) fn check(&self) -> Result<(), Defect> {
        for (what, found, limit) in [
            ("image file of an overlay's base", self.file, NUMBER_MAX),
            ("stored length of an overlay's base", self.stored_len, PAGE_LEN_MAX),
        ] {
            check_limit(what, found, limit)?;
            if found == 0 {
                return Err(Defect::Field { what, found });
            }
        }
        Ok(())
    }
}

/// The encoding of the payload of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Codec {
    /// The bytes of the page, uncompressed.
    #[default]
    Raw,
    /// A sequence of zstd frames.
    Zstd,
    /// An [overlay](super::Overlay), which contains pieces of the page and refers to a base image. Only a manifest can
    /// name an image with this encoding.
    Overlay(OverlayBase),
}

impl Codec {
    /// Returns the number that represents the codec on disk.
    #[must_use]
    pub fn to_raw(self) -> u8 {
        match self {
            Codec::Raw => CODEC_RAW,
            Codec::Zstd => CODEC_ZSTD,
            Codec::Overlay(_) => CODEC_OVERLAY,
        }
    }

    /// Converts the number on disk to the codec of an image that is not an overlay.
    ///
    /// # Errors
    /// Returns [`Defect::Field`] if the number is unknown or means an overlay.
    pub fn from_raw(raw: u8) -> Result<Self, Defect> {
        match raw {
            CODEC_RAW => Ok(Codec::Raw),
            CODEC_ZSTD => Ok(Codec::Zstd),
            other => Err(Defect::Field { what: "image codec", found: other.into() }),
        }
    }

    /// Returns true if the number on disk means an overlay.
    pub(crate) fn is_overlay(raw: u8) -> bool {
        raw == CODEC_OVERLAY
    }
}

/// A compressor for [`Codec::Zstd`]. Reuse it for several pieces, because its creation builds tables.
pub struct Compressor(zstd::bulk::Compressor<'static>);

impl Compressor {
    /// Creates a compressor with the compression level `level` of zstd.
    ///
    /// # Errors
    /// Returns [`Defect::Compression`] if zstd rejects the level, or [`Defect::Memory`] if there is not enough memory.
    pub fn new(level: i32) -> Result<Self, Defect> {
        zstd::bulk::Compressor::new(level).map(Self).map_err(compression)
    }

    /// Compresses up to [`COMPRESSED_PIECE_LEN`] bytes into one frame.
    ///
    /// # Errors
    /// Returns [`Defect::Limit`] if `bytes` is longer. Returns [`Defect::Memory`] or [`Defect::Compression`] if there
    /// is not enough memory.
    pub fn frame(&mut self, bytes: &[u8]) -> Result<Vec<u8>, Defect> {
        check_limit("length of a piece to compress", bytes.len() as u64, COMPRESSED_PIECE_LEN as u64)?;
        let mut frame = Vec::new();
        reserve(&mut frame, zstd::zstd_safe::compress_bound(bytes.len()) as u64)?;
        self.0.compress_to_buffer(bytes, &mut frame).map_err(compression)?;
        Ok(frame)
    }
}

/// Decompresses `frames` to exactly `len` bytes and passes the bytes to `sink` in pieces. The lengths that the frames
/// record are not trusted (I9).
pub(super) fn decompress(frames: &[u8], len: u64, mut sink: impl FnMut(&[u8])) -> Result<(), Defect> {
    decompress_from(frames, len, |piece| {
        sink(piece);
        ControlFlow::Continue(())
    })
}

/// Like [`decompress`], but stops when `sink` returns `Break`.
pub(crate) fn decompress_from(
    frames: impl BufRead,
    len: u64,
    mut sink: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> Result<(), Defect> {
    decompress_frames(
        frames,
        len,
        |piece, _| {
            if piece.is_empty() { ControlFlow::Continue(()) } else { sink(piece) }
        },
    )
}

/// Like [`decompress_from`], but with the last piece of a frame, `sink` also receives the offset in the payload at
/// which the frame ends.
pub(crate) fn decompress_frames(
    mut frames: impl BufRead,
    len: u64,
    mut sink: impl FnMut(&[u8], Option<u64>) -> ControlFlow<()>,
) -> Result<(), Defect> {
    let mut piece = zeros(DECOMPRESSED_AT_ONCE)?;
    let mut decoder = Decoder::new().map_err(compression)?;
    decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(compression)?;
    let (mut total, mut read, mut is_within_frame) = (0, 0, false);
    loop {
        let input = frames.fill_buf().map_err(compression)?;
        let is_end = input.is_empty();
        if is_end && !is_within_frame {
            return check_equal("decompressed length of an image", total, len);
        }
        let step = decoder.run_on_buffers(input, &mut piece).map_err(compression)?;
        frames.consume(step.bytes_read);
        if is_end && step.bytes_written == 0 {
            return Err(Defect::Compression("incomplete frame".to_owned()));
        }
        read += step.bytes_read as u64;
        total += step.bytes_written as u64;
        if total > len {
            return check_limit("decompressed length of an image", total, len);
        }
        is_within_frame = step.remaining > 0;
        if sink(&piece[..step.bytes_written], (!is_within_frame).then_some(read)).is_break() {
            return Ok(());
        }
    }
}

fn compression(error: std::io::Error) -> Defect {
    let message = error.to_string();
    // zstd does not report how much memory it failed to allocate.
    match message.starts_with("Allocation error") {
        true => Defect::Memory { needed: 1 << WINDOW_LOG_MAX },
        false => Defect::Compression(message),
    }
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").finish_non_exhaustive()
    }
}
