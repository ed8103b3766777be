//! Windows of pages. A window is a byte range of a page that a caller reads without the other bytes of the page.

use std::ops::Range;

use crate::defect::{Damage, Defect, reserve, zeros};
use crate::image::proven::ProvenImage;
use crate::image::read::read_image_head;
use crate::names::{FileName, ReadAt};
use crate::op::Op;
use crate::state::apply::{apply_clipped, assert_fits, part_len};
use crate::state::bases::Base;

/// The bytes of a page inside a window. Operations are applied to these bytes.
///
/// No operation reads bytes of a page. Bytes outside the window therefore never affect bytes inside, and intermediate
/// lengths of the page do not matter. Memory is allocated once, for the length of the window (I10).
///
/// ```
/// use remanent_format::PageId;
/// use remanent_format::state::window::PageWindow;
/// use remanent_format::op::Op;
/// let page = PageId(1);
/// let mut window = PageWindow::new(vec![1; 3], 4, 1..6)?;
/// window.apply(&Op::Resize { page, len: 1 << 40 });
/// window.apply(&Op::Write { page, offset: 3, bytes: &[2; 9] });
/// window.apply(&Op::Resize { page, len: 6 });
/// assert_eq!(window.into_bytes(), [1, 1, 2, 2, 2]);
/// # Ok::<(), remanent_format::Defect>(())
/// ```
#[derive(Clone, Debug)]
pub struct PageWindow {
    bytes: Vec<u8>,
    /// Current length of the page in bytes.
    page_len: u64,
    window: Range<u64>,
}

impl PageWindow {
    /// Creates a window of a page whose current length is `page_len`. The window must be within the final length of the
    /// page.
    ///
    /// `bytes` are the bytes of the page from the start of the window on. Bytes after the end of the window are
    /// dropped. Operations allocate no more memory.
    ///
    /// # Errors
    /// Returns [`Defect::Memory`] if there is not enough memory for the window.
    ///
    /// # Panics
    /// Panics if `bytes` does not cover the part of the page inside the window, or extends past the end of the page.
    pub fn new(mut bytes: Vec<u8>, page_len: u64, window: Range<u64>) -> Result<Self, Defect> {
        let given = bytes.len();
        let (least, most) = (part_len(page_len, &window), page_len.saturating_sub(window.start) as usize);
        assert!((least..=most).contains(&given), "{given} bytes of {window:?} of {page_len}");
        if given > least {
            bytes.truncate(least);
            bytes.shrink_to_fit();
        }
        reserve(&mut bytes, window.end.saturating_sub(window.start))?;
        Ok(Self { bytes, page_len, window })
    }

    /// Applies an operation to the bytes inside the window, with the same result as [`crate::state::apply::apply`] for
    /// the whole page.
    ///
    /// # Panics
    /// Panics if the range of the operation exceeds the current length of the page.
    pub fn apply(&mut self, op: &Op<'_>) {
        assert_fits(op, self.page_len);
        match op {
            Op::Create { len, .. } | Op::Resize { len, .. } => self.page_len = *len,
            Op::Delete { .. } => self.page_len = 0,
            _ => {}
        }
        apply_clipped(op, &mut self.bytes, &self.window);
    }

    /// Returns the current length of the page in bytes.
    #[must_use]
    pub fn page_len(&self) -> u64 {
        self.page_len
    }

    /// Returns the bytes of the page inside the window, up to the current end of the page.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Consumes the window and returns its bytes, up to the current end of the page.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests;

/// Reads and proves the base of a page. Returns a window that covers the first `final_len` bytes of the page.
///
/// # Errors
/// Returns [`Damage`] if the image is damaged, or if there is not enough memory.
pub fn load_base(source: &dyn ReadAt, base: &Base, final_len: u64) -> Result<PageWindow, Damage> {
    let (file, offset) =
        base.image.map_or((FileName::Store, 0), |image| (FileName::Pages(image.file), image.offset));
    let at = |defect: Defect| defect.at_lsn(file, offset, base.lsn);
    let bytes = match &base.image {
        Some(image) => read_image_head(source, image, base.len, final_len)?,
        None => zeros(base.len.min(final_len)).map_err(at)?,
    };
    PageWindow::new(bytes, base.len, 0..final_len).map_err(at)
}

/// Reads a window of a base of `base_len` bytes. `image` is the proven image of the base, or `None` if the base is
/// zeros. Only the bytes inside the window are read.
///
/// # Errors
/// Returns [`Damage`] if the image has changed since it was proven, or if there is not enough memory.
pub fn load_window(
    source: &dyn ReadAt,
    base_len: u64,
    image: Option<&ProvenImage>,
    window: Range<u64>,
) -> Result<PageWindow, Damage> {
    let (file, offset) = image.map_or((FileName::Store, 0), ProvenImage::location);
    let at = |defect: Defect| defect.at(file, offset);
    let mut bytes = zeros(part_len(base_len, &window) as u64).map_err(at)?;
    // The page may have been extended later, so the window may start after the end of the image.
    if let Some(image) = image.filter(|_| !bytes.is_empty()) {
        image.read(source, window.start, &mut bytes)?;
    }
    PageWindow::new(bytes, base_len, window).map_err(at)
}
