//! Compresses the images of pages that a quick test finds compressible, with several threads.

use std::convert::Infallible;
use std::ops::Range;

use remanent_format::Defect;
use remanent_format::image::{COMPRESSED_PIECE_LEN, Compressor};

use crate::base::allocation::{append, collected};
use crate::base::parallel;
use crate::error::Result;
use crate::options::Compression;

/// The zstd compression level, the fastest of the regular levels. With a disk of 1 to 3 GB/s, a snapshot would have to
/// wait for a slower level.
const LEVEL: i32 = 1;
/// The minimum percentage of bytes that compression must save for an image to be stored compressed.
const SAVED_PERCENT_MIN: u64 = 12;
/// The minimum length in bytes of a page that is compressed. Shorter pages gain little, because images start on 16-byte
/// boundaries and each decompression has a cost.
const LEN_MIN: usize = 256;
/// The minimum length in bytes of a page that is tested with samples before it is compressed.
const SAMPLED_LEN_MIN: usize = 256 << 10;
/// The number of samples that test whether a page is compressible.
const SAMPLES: u64 = 4;
const SAMPLE_LEN: usize = 16 << 10;
/// The number of pieces that are compressed together. This number limits the length of the list of compressed frames.
const PIECES_AT_ONCE: usize = 1024;
/// The number of bytes below which one thread compresses a chunk. Starting another thread costs as much as compressing
/// about 50 KiB.
const PARALLEL_LEN_MIN: usize = 256 << 10;
const THREADS_MAX: usize = 8;

const _: () = assert!(SAMPLES as usize * SAMPLE_LEN < SAMPLED_LEN_MIN && SAMPLE_LEN <= COMPRESSED_PIECE_LEN);

/// Compresses the pages for which compression saves enough, with up to `threads_max` threads. The result contains
/// `None` for each other page.
///
/// # Errors
/// `OutOfMemory`.
pub(super) fn compress(
    compression: Compression,
    pages: &[&[u8]],
    threads_max: usize,
) -> Result<Vec<Option<Vec<u8>>>> {
    let mut images = collected(pages.iter().map(|_| None))?;
    if compression == Compression::Off {
        return Ok(images);
    }
    let mut pieces: Vec<(usize, Range<usize>)> = Vec::new();
    for (index, page) in pages.iter().enumerate().filter(|(_, page)| pays_by_samples(page)) {
        let starts = (0..page.len()).step_by(COMPRESSED_PIECE_LEN);
        append(&mut pieces, starts.map(|at| (index, at..page.len().min(at + COMPRESSED_PIECE_LEN))))?;
    }
    let mut frames = Vec::new();
    for pieces in pieces.chunks(PIECES_AT_ONCE) {
        append(&mut frames, pieces.iter().zip(compress_pieces(pages, pieces, threads_max)))?;
    }
    for of_page in frames.chunk_by(|a, b| a.0.0 == b.0.0) {
        let index = of_page[0].0.0;
        // A page that could not be compressed is stored uncompressed, which is always valid.
        let lens = of_page.iter().map(|(_, frame)| Some(frame.as_ref()?.len()));
        let Some(len) = lens.sum::<Option<usize>>() else { continue };
        let mut whole = Vec::new();
        if pays(pages[index].len() as u64, len as u64) && whole.try_reserve_exact(len).is_ok() {
            of_page.iter().filter_map(|(_, frame)| frame.as_deref()).for_each(|frame| whole.extend(frame));
            images[index] = Some(whole);
        }
    }
    Ok(images)
}

/// Returns whether storing `stored_len` bytes instead of `page_len` bytes saves at least [`SAVED_PERCENT_MIN`] percent.
pub(super) fn pays(page_len: u64, stored_len: u64) -> bool {
    stored_len
        <= page_len / 100 * (100 - SAVED_PERCENT_MIN) + page_len % 100 * (100 - SAVED_PERCENT_MIN) / 100
}

/// Returns whether samples of the page indicate that compressing the page saves enough. Pages shorter than
/// [`SAMPLED_LEN_MIN`] are not sampled.
fn pays_by_samples(page: &[u8]) -> bool {
    if page.len() < SAMPLED_LEN_MIN {
        return page.len() >= LEN_MIN;
    }
    let samples: Vec<&[u8]> = sample_ranges(page.len() as u64)
        .map(|range| &page[range.start as usize..range.end as usize])
        .collect();
    pays_by_samples_of(&samples)
}

/// Returns the byte ranges of the samples of a page.
pub(super) fn sample_ranges(page_len: u64) -> impl Iterator<Item = Range<u64>> {
    let len = (SAMPLE_LEN as u64).min(page_len);
    let apart = (page_len - len) / (SAMPLES - 1);
    (0..SAMPLES).map(move |sample| sample * apart..sample * apart + len)
}

/// Returns whether these samples indicate that compressing the page saves enough.
pub(super) fn pays_by_samples_of(samples: &[impl AsRef<[u8]>]) -> bool {
    let samples: Vec<&[u8]> = samples.iter().map(AsRef::as_ref).collect();
    let whole: Vec<(usize, Range<usize>)> =
        samples.iter().enumerate().map(|(index, sample)| (index, 0..sample.len())).collect();
    let frames: Option<Vec<Vec<u8>>> = compress_pieces(&samples, &whole, 1).into_iter().collect();
    let bytes = samples.iter().map(|sample| sample.len() as u64).sum();
    frames.is_some_and(|frames| pays(bytes, frames.iter().map(|frame| frame.len() as u64).sum()))
}

/// Compresses each piece to a frame. Returns the frames in the order of the pieces, with `None` for a piece for which
/// zstd ran out of memory.
pub(super) fn compress_pieces(
    pages: &[&[u8]],
    pieces: &[(usize, Range<usize>)],
    threads_max: usize,
) -> Vec<Option<Vec<u8>>> {
    let bytes: usize = pieces.iter().map(|(_, range)| range.len()).sum();
    let threads = if bytes < PARALLEL_LEN_MIN { 1 } else { parallel::threads(THREADS_MAX.min(threads_max)) };
    let frames = parallel::map_indexed(
        threads,
        pieces.len(),
        || Compressor::new(LEVEL),
        |compressor, index| {
            let (page, range) = &pieces[index];
            let frame = match compressor {
                Ok(compressor) => compressor.frame(&pages[*page][range.clone()]),
                Err(defect) => Err(defect.clone()),
            };
            let warn = |defect: &Defect| tracing::warn!(%defect, "an image is stored uncompressed");
            Ok::<_, Infallible>(frame.inspect_err(warn).ok())
        },
    );
    let Ok(frames) = frames;
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `len` incompressible bytes.
    fn noise(len: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..len).map(next).collect()
    }

    #[test]
    fn only_compressible_bytes_are_compressed() {
        let mut half = noise(1 << 20);
        half[1 << 19..].fill(0);
        // One sample of four is zeros, so the whole page is compressed, which does not save enough.
        let mut end = noise(4 << 20);
        end[(4 << 20) - SAMPLE_LEN..].fill(0);
        let pages = [
            ("noise", noise(5000), false),
            ("zeros", vec![0; 5000], true),
            ("a short page", vec![0; LEN_MIN - 1], false),
            ("a long page of noise", noise(3 << 20), false),
            ("half of it zeros", half, true),
            ("samples that promise too much", end, false),
            ("a long page of zeros", vec![0; (5 << 20) + 77], true),
            ("the shortest page", vec![7; LEN_MIN], true),
        ];
        let bytes: Vec<&[u8]> = pages.iter().map(|(_, page, _)| page.as_slice()).collect();
        let images = compress(Compression::Zstd, &bytes, THREADS_MAX).unwrap();
        for ((why, page, expected), image) in pages.iter().zip(&images) {
            assert_eq!(image.is_some(), *expected, "{why}");
            assert!(image.as_ref().is_none_or(|image| image.len() <= page.len() * 88 / 100), "{why}");
        }
        assert!(pays_by_samples(bytes[5]), "the whole of it was tried");
        assert_eq!(compress(Compression::Off, &bytes, THREADS_MAX).unwrap(), vec![None; bytes.len()]);
    }

    #[test]
    fn threads_change_no_byte() {
        let page: Vec<u8> = (0..2_000_000u32).flat_map(|word| (word / 9).to_le_bytes()).collect();
        let image = compress(Compression::Zstd, &[&page], THREADS_MAX).unwrap().pop().unwrap().unwrap();
        let mut alone = Compressor::new(LEVEL).unwrap();
        let frames = page.chunks(COMPRESSED_PIECE_LEN).flat_map(|piece| alone.frame(piece).unwrap());
        assert_eq!(image, frames.collect::<Vec<u8>>());
    }
}
