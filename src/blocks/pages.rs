//! Blocks in pages of a store: writing them from memory with any layout, reading them, and copying them between
//! pages.

use std::ops::Range;

use remanent_format::{Lsn, PageId, Place};

use crate::base::allocation::push;
use crate::error::Result;
use crate::layout::{BlockCopy, BlockLayout, LayoutResult};
use crate::store::Store;
use crate::write::batch::{NewPage, WriteBatch};

/// The pages of a store that form the regions of a layout, one page for each region.
///
/// ```
/// use remanent::layout::{Arrangement, BlockLayout, BlockShape};
/// use remanent::blocks::BlockPages;
/// use remanent::{Place, Store};
/// let shape = BlockShape { layers: 2, outer: 2, tokens: 4, inner: 8, width: 2 };
/// let of_store = BlockLayout::new(shape, 1, Arrangement::Contiguous, 1)?;
/// let of_engine = BlockLayout::new(shape, 10, Arrangement::LayersApart { block_first: true }, 1)?;
/// let tensors = [vec![1; of_engine.region_len() as usize], vec![2; of_engine.region_len() as usize]];
///
/// let store = Store::temporary()?;
/// let mut batch = store.batch();
/// BlockPages::create(&mut batch, of_store, Place::Host);
/// let created = store.commit(batch)?.pages;
/// let pages = BlockPages::new(&store, of_store, created)?;
///
/// // Block 3 of the engine becomes block 0 of the store, in one batch.
/// let mut batch = store.batch();
/// pages.write(&mut batch, 0, &of_engine, &[&tensors[0], &tensors[1]], 3)?;
/// store.commit(batch)?;
/// assert_eq!(store.read_to_vec(pages.pages()[0])?, [[1; 128], [2; 128]].concat());
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPages {
    pub(super) layout: BlockLayout,
    pub(super) pages: Vec<PageId>,
}

/// A block of [`BlockPages`], for calls that accept blocks of several sets of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedBlock<'p> {
    /// The pages that contain the block.
    pub pages: &'p BlockPages,
    /// The index of the block. Calls return an error if it is out of range.
    pub block: u64,
}

impl BlockPages {
    /// Adds to `batch` the creation of one zeroed page per region. After the commit,
    /// [`CommitReceipt::pages`](crate::CommitReceipt::pages) contains the ids of the pages. Pass the ids to
    /// [`BlockPages::new`].
    pub fn create(batch: &mut WriteBatch, layout: BlockLayout, place: Place) -> Vec<NewPage> {
        (0..layout.region_count()).map(|_| batch.create(layout.region_len(), place).page()).collect()
    }

    /// Returns the blocks in `pages`, which become the regions of `layout` in order. A page may be longer than
    /// its region.
    ///
    /// # Errors
    /// [`Error::UnknownPage`](crate::Error::UnknownPage); [`Error::Invalid`](crate::Error::Invalid) if the number of
    /// pages differs from the number of regions, or if a page is shorter than its region.
    pub fn new(store: &Store, layout: BlockLayout, pages: Vec<PageId>) -> Result<Self> {
        let mut lens = Vec::new();
        for page in &pages {
            push(&mut lens, store.page(*page)?.len)?;
        }
        layout.check_regions(lens.into_iter())?;
        Ok(Self { layout, pages })
    }

    /// Returns the layout of the blocks in the pages.
    #[must_use]
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// Returns the pages that form the regions of the layout, in order.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Returns a handle to block `block`. The index is checked by the calls that use the handle.
    #[must_use]
    pub fn block(&self, block: u64) -> PagedBlock<'_> {
        PagedBlock { pages: self, block }
    }

    /// Adds writes to `batch` that set `block` to block `from_block` of the caller's `regions`, which have the layout
    /// `from`.
    ///
    /// # Errors
    /// A [`LayoutError`](crate::layout::LayoutError) if the shapes differ, a block is out of range, or a region is too
    /// short; the batch is then unchanged.
    pub fn write(
        &self,
        batch: &mut WriteBatch,
        block: u64,
        from: &BlockLayout,
        regions: &[&[u8]],
        from_block: u64,
    ) -> LayoutResult<()> {
        from.check_regions(regions.iter().map(|region| region.len() as u64))?;
        for copy in from.copies(from_block, &self.layout, block)? {
            let at = copy.from.offset as usize;
            let bytes = &regions[copy.from.region][at..at + copy.from.len as usize];
            batch.write(self.pages[copy.to.region], copy.to.offset, bytes);
        }
        Ok(())
    }

    /// Adds copies to `batch` that set `block` to the contents of a block in other pages of the same store. If all
    /// pages are on one device, the bytes stay on the device.
    ///
    /// # Errors
    /// A [`LayoutError`](crate::layout::LayoutError) if the shapes differ or a block is out of range.
    pub fn copy(
        &self,
        batch: &mut WriteBatch,
        block: u64,
        from: &BlockPages,
        from_block: u64,
    ) -> LayoutResult<()> {
        for copy in from.layout.copies(from_block, &self.layout, block)? {
            let (source, target) = (from.pages[copy.from.region], self.pages[copy.to.region]);
            batch.copy(source, copy.from.range(), target, copy.to.offset);
        }
        Ok(())
    }

    /// Adds writes to `batch` that copy blocks of another store. Each pair of `blocks` contains a block of `from` and
    /// its target. The layouts may differ, but the shapes of the blocks must be equal.
    ///
    /// All blocks are read in the same state of `from`, whose newest batch is returned, and are copied through host
    /// memory.
    ///
    /// ```
    /// use remanent::layout::{Arrangement, BlockLayout, BlockShape};
    /// use remanent::blocks::BlockPages;
    /// use remanent::{Place, Store};
    /// let shape = BlockShape { layers: 2, outer: 2, tokens: 4, inner: 8, width: 2 };
    /// let store_of = |arrangement, blocks| -> Result<_, remanent::Error> {
    ///     let store = Store::temporary()?;
    ///     let layout = BlockLayout::new(shape, blocks, arrangement, 1)?;
    ///     let mut batch = store.batch();
    ///     BlockPages::create(&mut batch, layout, Place::Host);
    ///     let created = store.commit(batch)?.pages;
    ///     let pages = BlockPages::new(&store, layout, created)?;
    ///     Ok((store, pages))
    /// };
    /// let (source, from) = store_of(Arrangement::LayersApart { block_first: false }, 10)?;
    /// let (target, to) = store_of(Arrangement::Contiguous, 2)?;
    /// let mut batch = source.batch();
    /// from.write(&mut batch, 7, to.layout(), &[&[5; 512]], 1)?;
    /// source.commit(batch)?;
    ///
    /// let mut batch = target.batch();
    /// BlockPages::import(&mut batch, &source, &[(from.block(7), to.block(0))])?;
    /// target.commit(batch)?;
    /// assert_eq!(target.read_to_vec(to.pages()[0])?, [[5; 256], [0; 256]].concat());
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid), as in [`write`](Self::write); the errors of [`Store::read_many`]. The
    /// batch is then unchanged.
    pub fn import(
        batch: &mut WriteBatch,
        from: &Store,
        blocks: &[(PagedBlock<'_>, PagedBlock<'_>)],
    ) -> Result<Lsn> {
        let (mut sources, mut targets) = (Vec::new(), Vec::new());
        for (source, target) in blocks {
            for copy in source.pages.layout.copies(source.block, &target.pages.layout, target.block)? {
                push(&mut sources, source.range(&copy))?;
                push(&mut targets, (target.pages.pages[copy.to.region], copy.to.offset))?;
            }
        }
        let bytes = from.read_many(&sources)?.wait()?;
        for (index, (page, offset)) in targets.into_iter().enumerate() {
            batch.write(page, offset, bytes.get(index));
        }
        Ok(bytes.lsn())
    }

    /// Reads `block` into block `to_block` of the caller's `regions`, which have the layout `to`. All bytes of
    /// the block are read in the same state.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid), as in [`write`](Self::write); the errors of [`Store::read_many`]. The
    /// regions are then unchanged.
    pub fn read(
        &self,
        store: &Store,
        block: u64,
        to: &BlockLayout,
        regions: &mut [&mut [u8]],
        to_block: u64,
    ) -> Result<()> {
        to.check_regions(regions.iter().map(|region| region.len() as u64))?;
        let copies = self.layout.copies(block, to, to_block)?;
        let sources: Vec<_> = copies.iter().map(|copy| self.block(block).range(copy)).collect();
        let bytes = store.read_many(&sources)?.wait()?;
        for (index, copy) in copies.iter().enumerate() {
            let at = copy.to.offset as usize;
            regions[copy.to.region][at..at + copy.to.len as usize].copy_from_slice(bytes.get(index));
        }
        Ok(())
    }
}

impl PagedBlock<'_> {
    /// Returns the page and the byte range that `copy` reads.
    fn range(&self, copy: &BlockCopy) -> (PageId, Range<u64>) {
        (self.pages.pages[copy.from.region], copy.from.range())
    }
}
