//! A page on its way to a state, of which only those bytes are kept that are wanted of the state.

use std::ops::Range;

use crate::defect::{Damage, Defect, reserve, zeros};
use crate::image::proven::ProvenImage;
use crate::image::read::read_image_head;
use crate::names::{FileName, ReadAt};
use crate::op::Op;
use crate::state::apply::{apply_clipped, assert_fits, part_len};
use crate::state::bases::Base;

/// The bytes of a window of a page while operations make a state of it: never more than it has there in the
/// end.
///
/// No operation reads a page's bytes. So what lies outside of the window never shows, however long the page
/// is on its way: memory is asked for once, and for no more than the window (I10).
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
    /// The page's length by now, in bytes; `bytes` are as many of it as are kept.
    page_len: u64,
    window: Range<u64>,
}

impl PageWindow {
    /// A window, which ends where the page does in the end or before, of a page that has `page_len` bytes
    /// now. `bytes` are those from the window's start on, all that the page has or at least the window's.
    /// Applying what follows asks for no more memory.
    ///
    /// # Errors
    /// [`Defect::Memory`].
    ///
    /// # Panics
    /// If there are fewer bytes, or more than the page has.
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

    /// Applies an operation as [`crate::state::apply::apply`] does to a whole page.
    ///
    /// # Panics
    /// If the operation does not fit the page, as long as it is by now.
    pub fn apply(&mut self, op: &Op<'_>) {
        assert_fits(op, self.page_len);
        match op {
            Op::Create { len, .. } | Op::Resize { len, .. } => self.page_len = *len,
            Op::Delete { .. } => self.page_len = 0,
            _ => {}
        }
        apply_clipped(op, &mut self.bytes, &self.window);
    }

    /// The page's length by now, in bytes.
    #[must_use]
    pub fn page_len(&self) -> u64 {
        self.page_len
    }

    /// The window's bytes, as far as the page goes by now.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes of the window.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests;

/// What a page is made from that is `final_len` bytes long in the end: its image is proven whole, and no more
/// of it is kept than that.
///
/// # Errors
/// [`Damage`] in its image, or there is no memory.
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

/// A window of what a page is made from, `base_len` bytes, whose image, if it has one, was proven whole: no
/// more of it is read than that takes.
///
/// # Errors
/// [`Damage`] in the image, which held when it was proven, or there is no memory.
pub fn load_window(
    source: &dyn ReadAt,
    base_len: u64,
    image: Option<&ProvenImage>,
    window: Range<u64>,
) -> Result<PageWindow, Damage> {
    let (file, offset) = image.map_or((FileName::Store, 0), ProvenImage::location);
    let at = |defect: Defect| defect.at(file, offset);
    let mut bytes = zeros(part_len(base_len, &window) as u64).map_err(at)?;
    // A page that has become longer since may have a window that begins where its image has ended.
    if let Some(image) = image.filter(|_| !bytes.is_empty()) {
        image.read(source, window.start, &mut bytes)?;
    }
    PageWindow::new(bytes, base_len, window).map_err(at)
}
