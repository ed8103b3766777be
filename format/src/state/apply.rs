//! The effect of an operation on a page's bytes, in the plainest code. `rebuild` uses it, and tests compare
//! devices with it.

use crate::op::Op;

/// Applies an operation to the bytes of its page. [`crate::state::table::PageTable::plan`] has checked bounds
/// before. Operations that change no bytes do nothing. Nor does one that names an image: a reader of the log
/// starts the page from there.
///
/// # Panics
/// If the operation does not fit the page.
pub fn apply(op: &Op<'_>, content: &mut Vec<u8>) {
    assert_fits(op, content.len() as u64);
    apply_clipped(op, content, u64::MAX);
}

/// Asserts that an operation fits a page of `page_len` bytes.
pub(crate) fn assert_fits(op: &Op<'_>, page_len: u64) {
    if let Some((offset, len)) = op.range() {
        let fits = offset.checked_add(len).is_some_and(|end| end <= page_len);
        assert!(fits, "bytes {offset}..+{len} of a page of {page_len} bytes: no plan lets that pass");
    }
}

/// Applies an operation to the first bytes of its page, which `content` holds. They never become more than
/// `len_max`; of an element that lies across their end, the bytes before it count.
pub(crate) fn apply_clipped(op: &Op<'_>, content: &mut Vec<u8>, len_max: u64) {
    match op {
        Op::Write { offset, bytes, .. } => {
            let target = held(content, *offset, bytes.len() as u64);
            target.copy_from_slice(&bytes[..target.len()]);
        }
        Op::Masked { offset, width, mask, bytes, .. } => {
            let width = width.bytes();
            let targets = held(content, *offset, bytes.len() as u64).chunks_mut(width);
            for (index, (target, element)) in targets.zip(bytes.chunks_exact(width)).enumerate() {
                if mask[index / 8] >> (index % 8) & 1 == 1 {
                    target.copy_from_slice(&element[..target.len()]);
                }
            }
        }
        Op::Scatter { width, base, indices, values, .. } => {
            let width = width.bytes();
            for (index, element) in indices.iter().zip(values.chunks_exact(width)) {
                let target = held(content, base + u64::from(index) * width as u64, width as u64);
                target.copy_from_slice(&element[..target.len()]);
            }
        }
        Op::Fill { offset, len, pattern, .. } => {
            for target in held(content, *offset, *len).chunks_mut(pattern.len()) {
                target.copy_from_slice(&pattern[..target.len()]);
            }
        }
        Op::Create { len, .. } => {
            content.clear();
            content.resize((*len).min(len_max) as usize, 0);
        }
        Op::Resize { len, .. } => content.resize((*len).min(len_max) as usize, 0),
        Op::Delete { .. } => content.clear(),
        // Its bytes lie elsewhere: the page is made from them, and this batch is in them.
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

/// The part of a page's range that `content` holds.
fn held(content: &mut [u8], offset: u64, len: u64) -> &mut [u8] {
    let end = content.len() as u64;
    let range = offset.min(end)..offset.saturating_add(len).min(end);
    &mut content[range.start as usize..range.end as usize]
}
