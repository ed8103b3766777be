//! Records which new page memory already contains its page's bytes when the batch is logged. The applier does not write
//! to such memory.

use remanent_format::PageId;

use crate::base::allocation::push;
use crate::device::MemoryId;
use crate::error::Result;

/// The pieces of new page memory that were filled before the batch is logged. A page may get several pieces of memory
/// in one batch, and each piece may or may not be filled.
#[derive(Debug, Default)]
pub(crate) struct FilledMemory {
    /// Memory that contains the bytes of a page's image in the batch, sorted by page and memory.
    images: Vec<(PageId, MemoryId)>,
    /// Memory that contains a page's bytes before the batch, sorted by page and memory.
    moved: Vec<(PageId, MemoryId)>,
}

impl FilledMemory {
    /// Records memory that contains the bytes of images.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn add_images(&mut self, memory: impl IntoIterator<Item = (PageId, MemoryId)>) -> Result<()> {
        add(&mut self.images, memory)
    }

    /// Records memory that contains the bytes of pages before the batch.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn add_moved(&mut self, memory: impl IntoIterator<Item = (PageId, MemoryId)>) -> Result<()> {
        add(&mut self.moved, memory)
    }

    /// Returns whether `memory`, which the batch allocated for the page, was filled.
    pub fn has(&self, page: PageId, memory: MemoryId) -> bool {
        self.has_image(page, memory) || self.moved.binary_search(&(page, memory)).is_ok()
    }

    /// Returns whether `memory` contains the bytes of the batch's image of the page.
    pub fn has_image(&self, page: PageId, memory: MemoryId) -> bool {
        self.images.binary_search(&(page, memory)).is_ok()
    }

    /// Returns whether any memory contains the bytes of the batch's image of the page. A batch has at most one image of
    /// a page.
    pub fn has_image_of(&self, page: PageId) -> bool {
        let at = self.images.partition_point(|(of, _)| *of < page);
        self.images.get(at).is_some_and(|(of, _)| *of == page)
    }
}

/// Adds items to a sorted list, and sorts the list.
fn add(
    list: &mut Vec<(PageId, MemoryId)>,
    memory: impl IntoIterator<Item = (PageId, MemoryId)>,
) -> Result<()> {
    memory.into_iter().try_for_each(|of_page| push(list, of_page))?;
    list.sort_unstable();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_memory_is_not_taken_for_image() {
        let mut filled = FilledMemory::default();
        filled.add_images([(PageId(9), MemoryId(1)), (PageId(2), MemoryId(4))]).unwrap();
        filled.add_moved([(PageId(5), MemoryId(2)), (PageId(2), MemoryId(3))]).unwrap();
        assert!(filled.has_image(PageId(9), MemoryId(1)) && filled.has_image(PageId(2), MemoryId(4)));
        assert!(!filled.has_image(PageId(2), MemoryId(3)), "this one has the old bytes");
        assert!(filled.has(PageId(2), MemoryId(3)) && filled.has(PageId(5), MemoryId(2)));
        assert!(!filled.has(PageId(5), MemoryId(1)) && !filled.has(PageId(9), MemoryId(2)));
        assert!(filled.has_image_of(PageId(2)) && filled.has_image_of(PageId(9)));
        assert!(!filled.has_image_of(PageId(5)), "its old bytes came, no image");
    }
}
