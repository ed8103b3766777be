//! Floor 0. What an operation does to a page's bytes, as plainly as it can be said. `rebuild` uses this;
//! devices are held against it.

use crate::op::Op;

/// Applies an operation to the bytes of its page. Bounds were checked by [`crate::table::PageTable::plan`];
/// operations that change no bytes do nothing, nor
/// does one that names an image: whoever follows the log starts the page from there.
///
/// # Panics
/// If the operation does not fit the page.
pub fn apply(op: &Op<'_>, content: &mut Vec<u8>) {
    match op {
        Op::Write { offset, bytes, .. } => range(content, *offset, bytes.len()).copy_from_slice(bytes),
        Op::Masked { offset, width, mask, bytes, .. } => {
            let width = width.bytes();
            let target = range(content, *offset, bytes.len());
            for (index, element) in bytes.chunks_exact(width).enumerate() {
                if mask[index / 8] >> (index % 8) & 1 == 1 {
                    target[index * width..][..width].copy_from_slice(element);
                }
            }
        }
        Op::Scatter { width, base, indices, values, .. } => {
            let width = width.bytes();
            for (index, element) in indices.iter().zip(values.chunks_exact(width)) {
                range(content, base + u64::from(index) * width as u64, width).copy_from_slice(element);
            }
        }
        Op::Fill { offset, len, pattern, .. } => {
            for element in range(content, *offset, *len as usize).chunks_exact_mut(pattern.len()) {
                element.copy_from_slice(pattern);
            }
        }
        Op::Create { len, .. } => {
            content.clear();
            content.resize(*len as usize, 0);
        }
        Op::Resize { len, .. } => content.resize(*len as usize, 0),
        Op::Delete { .. } => content.clear(),
        // Its bytes lie elsewhere: they are what the page is made from, and this batch is in them.
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

fn range(content: &mut [u8], offset: u64, len: usize) -> &mut [u8] {
    &mut content[offset as usize..][..len]
}
