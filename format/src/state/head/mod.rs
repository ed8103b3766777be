//! The first bytes of a page during replay: only those that the final state shows are kept.

use crate::defect::{Damage, Defect, reserve};
use crate::image::read::{read_image_head, zeros};
use crate::names::{FileName, ReadAt};
use crate::op::Op;
use crate::state::apply::{apply_clipped, assert_fits};
use crate::state::bases::Base;

/// The first bytes of a page while operations make a state of it: never more than the page has in the end.
///
/// No operation reads a page's bytes. So bytes past the final length never show, however long the page is for
/// a while. Memory is asked for once, and for no more than the final page table says (I10).
///
/// ```
/// use remanent_format::PageId;
/// use remanent_format::state::head::PageHead;
/// use remanent_format::op::Op;
/// let page = PageId(1);
/// let mut head = PageHead::new(vec![1; 4], 4, 6)?;
/// head.apply(&Op::Resize { page, len: 1 << 40 });
/// head.apply(&Op::Write { page, offset: 3, bytes: &[2; 9] });
/// head.apply(&Op::Resize { page, len: 6 });
/// assert_eq!(head.into_bytes(), [1, 1, 1, 2, 2, 2]);
/// # Ok::<(), remanent_format::Defect>(())
/// ```
#[derive(Clone, Debug)]
pub struct PageHead {
    bytes: Vec<u8>,
    /// The page's length by now, in bytes; `bytes` are as many of it as are kept.
    page_len: u64,
    len_max: u64,
}

impl PageHead {
    /// A page of `page_len` bytes that has `final_len` in the end. `bytes` are its first ones: all that it
    /// has, or at least `final_len`. Applying operations later asks for no more memory.
    ///
    /// # Errors
    /// [`Defect::Memory`].
    ///
    /// # Panics
    /// If there are fewer bytes, or more than the page has.
    pub fn new(mut bytes: Vec<u8>, page_len: u64, final_len: u64) -> Result<Self, Defect> {
        let given = bytes.len() as u64;
        assert!((page_len.min(final_len)..=page_len).contains(&given), "{given} bytes of {page_len}");
        if given > final_len {
            bytes.truncate(final_len as usize);
            bytes.shrink_to_fit();
        }
        reserve(&mut bytes, final_len)?;
        Ok(Self { bytes, page_len, len_max: final_len })
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
        apply_clipped(op, &mut self.bytes, self.len_max);
    }

    /// The page's length by now, in bytes.
    #[must_use]
    pub fn page_len(&self) -> u64 {
        self.page_len
    }

    /// The first bytes of the page, as they are by now.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the finished bytes.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests;

/// Loads the base of a page that is `final_len` bytes long in the end. The whole image is proven, and no more
/// of it is kept than that.
///
/// # Errors
/// [`Damage`] in its image, or there is no memory.
pub fn load_base(source: &dyn ReadAt, base: &Base, final_len: u64) -> Result<PageHead, Damage> {
    let (file, offset) =
        base.image.map_or((FileName::Store, 0), |image| (FileName::Pages(image.file), image.offset));
    let at = |defect: Defect| defect.at_lsn(file, offset, base.lsn);
    let bytes = match &base.image {
        Some(image) => read_image_head(source, image, base.len, final_len)?,
        None => zeros(base.len.min(final_len)).map_err(at)?,
    };
    PageHead::new(bytes, base.len, final_len).map_err(at)
}
