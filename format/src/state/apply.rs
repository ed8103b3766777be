//! The effect of operations on the bytes of a page, in the simplest possible code. `rebuild` uses this module, and
//! tests compare the results of devices with it.

use std::ops::Range;

use crate::image::read::copy_common;
use crate::op::Op;

/// Maximum length of a run of a repeated pattern, in bytes.
const FILL_RUN_LEN: usize = 4 << 10;

/// Applies an operation to the bytes of its page. The caller must have checked the bounds with
/// [`crate::state::table::PageTable::plan`]. Operations that change no bytes have no effect. An image operation also
/// has no effect, because a reader of the log loads the bytes from the image.
///
/// # Panics
/// Panics if the range of the operation exceeds the page.
pub fn apply(op: &Op<'_>, content: &mut Vec<u8>) {
    assert_fits(op, content.len() as u64);
    apply_clipped(op, content, &(0..u64::MAX));
}

/// Panics if the range of an operation exceeds a page of `page_len` bytes.
pub(crate) fn assert_fits(op: &Op<'_>, page_len: u64) {
    if let Some((offset, len)) = op.range() {
        let fits = offset.checked_add(len).is_some_and(|end| end <= page_len);
        assert!(
            fits,
            "bytes {offset}..+{len} of a page of {page_len} bytes: the plan did not reject the operation"
        );
    }
}

/// Applies an operation to the part of its page inside `window`, whose bytes are `content`. If an element crosses a
/// boundary of the window, only its bytes inside the window are written.
pub(crate) fn apply_clipped(op: &Op<'_>, content: &mut Vec<u8>, window: &Range<u64>) {
    match op {
        Op::Create { len, .. } => {
            content.clear();
            content.resize(part_len(*len, window), 0);
        }
        Op::Resize { len, .. } => content.resize(part_len(*len, window), 0),
        Op::Delete { .. } => content.clear(),
        _ => write_clipped(op, content, window.start),
    }
}

/// Applies an operation that does not change the length of its page to `content`, which are bytes of the page from
/// offset `from` on.
///
/// # Panics
/// Panics if the operation changes the length of its page.
pub(crate) fn write_clipped(op: &Op<'_>, content: &mut [u8], from: u64) {
    match op {
        Op::Write { offset, bytes, .. } => copy_common(content, from, bytes, *offset),
        Op::Masked { offset, width, mask, bytes, .. } => {
            let width = width.bytes();
            let within = elements_within(content, from, *offset, bytes.len() as u64, width);
            for (index, element) in within.clone().zip(bytes.chunks_exact(width).skip(within.start)) {
                if mask[index / 8] >> (index % 8) & 1 == 1 {
                    copy_common(content, from, element, offset + (index * width) as u64);
                }
            }
        }
        Op::Scatter { width, base, indices, values, .. } => {
            let width = width.bytes();
            for (index, element) in indices.iter().zip(values.chunks_exact(width)) {
                copy_common(content, from, element, base + u64::from(index) * width as u64);
            }
        }
        Op::Fill { offset, len, pattern, .. } => {
            for index in elements_within(content, from, *offset, *len, pattern.len()) {
                copy_common(content, from, pattern, offset + (index * pattern.len()) as u64);
            }
        }
        Op::Create { .. } | Op::Resize { .. } | Op::Delete { .. } => {
            panic!("the operation changes the length of its page")
        }
        // The bytes are in an image file. The image becomes the base of the page and includes this batch.
        Op::Image { .. }
        | Op::Move { .. }
        | Op::SetMetadata { .. }
        | Op::RemoveMetadata { .. }
        | Op::SetRoot { .. }
        | Op::RemoveRoot { .. }
        | Op::Note { .. }
        | Op::Restore { .. } => {}
    }
}

/// Calls `write` with every run of bytes that an operation writes, and with the offset of the run in the page. An image
/// operation writes no run, because its bytes are in an image file.
pub fn each_write(op: &Op<'_>, mut write: impl FnMut(u64, &[u8])) {
    match op {
        Op::Write { offset, bytes, .. } => write(*offset, bytes),
        Op::Masked { offset, width, mask, bytes, .. } => {
            let is_set = |index: usize| mask[index / 8] >> (index % 8) & 1 == 1;
            let (width, count) = (width.bytes(), bytes.len() / width.bytes());
            let mut next = 0;
            while let Some(first) = (next..count).find(|index| is_set(*index)) {
                next = (first..count).find(|index| !is_set(*index)).unwrap_or(count);
                write(offset + (first * width) as u64, &bytes[first * width..next * width]);
            }
        }
        Op::Scatter { width, base, indices, values, .. } => {
            let width = width.bytes();
            for (index, element) in indices.iter().zip(values.chunks_exact(width)) {
                write(base + u64::from(index) * width as u64, element);
            }
        }
        Op::Fill { offset, len, pattern, .. } => {
            // Each run starts with the pattern, because the length of a run is a multiple of every pattern's length.
            let run: Vec<u8> = pattern.iter().copied().cycle().take(FILL_RUN_LEN).collect();
            for at in (0..*len).step_by(FILL_RUN_LEN) {
                write(offset + at, &run[..(len - at).min(FILL_RUN_LEN as u64) as usize]);
            }
        }
        _ => {}
    }
}

/// Returns the number of bytes inside `window` that exist in a page of length `page_len`.
pub(crate) fn part_len(page_len: u64, window: &Range<u64>) -> usize {
    page_len.min(window.end).saturating_sub(window.start) as usize
}

/// Returns the indices of the elements that overlap `content`. The first element starts at `offset` of the page, and
/// `content` starts at `from` of the page.
fn elements_within(content: &[u8], from: u64, offset: u64, len: u64, width: usize) -> Range<usize> {
    let (width, to) = (width as u64, from + content.len() as u64);
    let last = to.saturating_sub(offset).min(len).div_ceil(width);
    let first = (from.saturating_sub(offset) / width).min(last);
    first as usize..last as usize
}
