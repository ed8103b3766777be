//! How the bytes of a page become an image's payload, and back.
//!
//! A compressed payload is zstd frames (RFC 8878), back to back, without a dictionary. A reader checks the
//! payload as it is stored first. So the bytes that zstd sees were written by a store, or are a checksum's
//! accident.

use std::io::BufRead;
use std::ops::ControlFlow;

use zstd::stream::raw::{DParameter, Decoder, Operation};

use crate::defect::{Defect, check_equal, check_limit, reserve, zeros};
use crate::limits::{NUMBER_MAX, PAGE_LEN_MAX};

const CODEC_RAW: u8 = 0;
const CODEC_ZSTD: u8 = 1;
const CODEC_OVERLAY: u8 = 2;

/// A writer compresses a page in frames of at most this many bytes of the page, so that many threads can
/// work on a long one.
pub const COMPRESSED_PIECE_LEN: usize = 1 << 20;
/// A frame's window is at most 2 to this power bytes: a reader must be able to hold it.
const WINDOW_LOG_MAX: u32 = 23;
/// The shortest block has 4 bytes and stands for at most 128 KiB.
pub(super) const EXPANSION_MAX: u64 = (128 << 10) / 4;
/// Bytes that are decompressed at a time.
const DECOMPRESSED_AT_ONCE: u64 = 128 << 10;

const _: () = assert!(COMPRESSED_PIECE_LEN <= 1 << WINDOW_LOG_MAX);

/// The image that an overlay lies over, as far as a manifest tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlayBase {
    /// The image file's number.
    pub file: u64,
    /// Length of the payload as it is stored.
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

/// How a payload is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Codec {
    /// The page's bytes as they are.
    #[default]
    Raw,
    /// Frames of zstd.
    Zstd,
    /// An [overlay](super::Overlay): pieces, and the image over which they lie. Only manifests name such.
    Overlay(OverlayBase),
}

impl Codec {
    /// The codec's number on disk.
    #[must_use]
    pub fn to_raw(self) -> u8 {
        match self {
            Codec::Raw => CODEC_RAW,
            Codec::Zstd => CODEC_ZSTD,
            Codec::Overlay(_) => CODEC_OVERLAY,
        }
    }

    /// The codec of a number on disk, of an image that is whole.
    ///
    /// # Errors
    /// [`Defect::Field`] if this build knows no such codec.
    pub fn from_raw(raw: u8) -> Result<Self, Defect> {
        match raw {
            CODEC_RAW => Ok(Codec::Raw),
            CODEC_ZSTD => Ok(Codec::Zstd),
            other => Err(Defect::Field { what: "image codec", found: other.into() }),
        }
    }

    /// Whether a number on disk is that of an overlay.
    pub(crate) fn is_overlay(raw: u8) -> bool {
        raw == CODEC_OVERLAY
    }
}

/// Makes frames of [`Codec::Zstd`]; kept, because its tables are made once.
pub struct Compressor(zstd::bulk::Compressor<'static>);

impl Compressor {
    /// A compressor at zstd's `level`.
    ///
    /// # Errors
    /// [`Defect::Compression`] if there is no such level, or no memory for it.
    pub fn new(level: i32) -> Result<Self, Defect> {
        zstd::bulk::Compressor::new(level).map(Self).map_err(compression)
    }

    /// Compresses up to [`COMPRESSED_PIECE_LEN`] bytes to one frame.
    ///
    /// # Errors
    /// [`Defect::Limit`] if there are more bytes; [`Defect::Memory`] or [`Defect::Compression`] if there is
    /// no memory.
    pub fn frame(&mut self, bytes: &[u8]) -> Result<Vec<u8>, Defect> {
        check_limit("length of a piece to compress", bytes.len() as u64, COMPRESSED_PIECE_LEN as u64)?;
        let mut frame = Vec::new();
        reserve(&mut frame, zstd::zstd_safe::compress_bound(bytes.len()) as u64)?;
        self.0.compress_to_buffer(bytes, &mut frame).map_err(compression)?;
        Ok(frame)
    }
}

/// Hands the `len` bytes that frames give to `sink`, piece by piece (I9: no length in a frame is believed).
pub(super) fn decompress(frames: &[u8], len: u64, mut sink: impl FnMut(&[u8])) -> Result<(), Defect> {
    decompress_from(frames, len, |piece| {
        sink(piece);
        ControlFlow::Continue(())
    })
}

/// As [`decompress`], from a reader, and for as long as `sink` wants more.
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

/// As [`decompress_from`]. `sink` is also told where a frame ends behind a piece: after how many bytes of the
/// payload.
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
            return check_equal("length of what a compressed image gives", total, len);
        }
        let step = decoder.run_on_buffers(input, &mut piece).map_err(compression)?;
        frames.consume(step.bytes_read);
        if is_end && step.bytes_written == 0 {
            return Err(Defect::Compression("incomplete frame".to_owned()));
        }
        read += step.bytes_read as u64;
        total += step.bytes_written as u64;
        if total > len {
            return check_limit("length of what a compressed image gives", total, len);
        }
        is_within_frame = step.remaining > 0;
        if sink(&piece[..step.bytes_written], (!is_within_frame).then_some(read)).is_break() {
            return Ok(());
        }
    }
}

fn compression(error: std::io::Error) -> Defect {
    let said = error.to_string();
    // Memory that zstd takes for itself. It does not say how much.
    match said.starts_with("Allocation error") {
        true => Defect::Memory { needed: 1 << WINDOW_LOG_MAX },
        false => Defect::Compression(said),
    }
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").finish_non_exhaustive()
    }
}
