//! Blocks in pages of a store: written from, read to and copied between regions of any layout.

use remanent_format::{PageId, Place};

use super::{BlockCopy, BlockLayout, LayoutResult};
use crate::device::DeviceBytes;
use crate::error::Result;
use crate::store::{ManyBytes, Store};
use crate::write::batch::{NewPage, WriteBatch};

/// The pages that are the regions of a layout, one for each.
///
/// ```
/// use remanent::layout::{Arrangement, BlockLayout, BlockPages, BlockShape};
/// use remanent::{Options, Place, Store};
/// let shape = BlockShape { layers: 2, outer: 2, tokens: 4, inner: 8, width: 2 };
/// let of_store = BlockLayout::new(shape, 1, Arrangement::Contiguous, 1)?;
/// let of_engine = BlockLayout::new(shape, 10, Arrangement::LayersApart { block_first: true }, 1)?;
/// let tensors = [vec![1; of_engine.region_len() as usize], vec![2; of_engine.region_len() as usize]];
///
/// let store = Store::temporary(Options::default())?;
/// let mut batch = store.batch();
/// BlockPages::create(&mut batch, of_store, Place::Host);
/// let pages = BlockPages::new(of_store, store.commit(batch)?.pages)?;
///
/// // Block 3 of the engine becomes block 0 of the store, in one batch.
/// let mut batch = store.batch();
/// pages.write(&mut batch, 0, &of_engine, &[&tensors[0], &tensors[1]], 3)?;
/// store.commit(batch)?;
/// assert_eq!(store.read_to_vec(pages.pages()[0])?, [[1; 128], [2; 128]].concat());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockPages {
    layout: BlockLayout,
    pages: Vec<PageId>,
}

impl BlockPages {
    /// Creates the regions' pages in a batch, zeroed. Once it is committed, their ids are in
    /// [`CommitReceipt::pages`](crate::CommitReceipt::pages), for [`BlockPages::new`].
    pub fn create(batch: &mut WriteBatch, layout: BlockLayout, place: Place) -> Vec<NewPage> {
        (0..layout.region_count()).map(|_| batch.create(layout.region_len(), place).page()).collect()
    }

    /// Takes pages as the regions of a layout, in their order.
    ///
    /// # Errors
    /// [`LayoutError::RegionCount`](super::LayoutError::RegionCount). The pages' lengths are checked by the
    /// calls that use them.
    pub fn new(layout: BlockLayout, pages: Vec<PageId>) -> LayoutResult<Self> {
        let len = layout.region_len();
        layout.check_regions(pages.iter().map(|_| len))?;
        Ok(Self { layout, pages })
    }

    /// The layout of the blocks in the pages.
    #[must_use]
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// The regions' pages.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Writes a block from the caller's memory, which has the layout `from`: its block `from_block`.
    ///
    /// # Errors
    /// A [`LayoutError`](super::LayoutError): other shapes, a block that is not there, regions that are too
    /// short. The batch is unchanged then.
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

    /// Writes a block from memory of a device, as [`write`](Self::write) does from a host's. The bytes are
    /// read when the batch is submitted, all runs by one list of commands.
    ///
    /// # Errors
    /// [`Error::Layout`](crate::Error::Layout), as for `write`.
    pub fn write_device(
        &self,
        batch: &mut WriteBatch,
        block: u64,
        from: &BlockLayout,
        regions: &[DeviceBytes],
        from_block: u64,
    ) -> Result<()> {
        from.check_regions(regions.iter().map(DeviceBytes::byte_len))?;
        let copies = from.copies(from_block, &self.layout, block)?;
        let parts = copies.iter().map(|copy| regions[copy.from.region].part(copy.from.range()));
        let parts: Vec<DeviceBytes> = parts.collect::<Result<_>>()?;
        for (copy, part) in copies.iter().zip(&parts) {
            batch.write_device(self.pages[copy.to.region], copy.to.offset, part);
        }
        Ok(())
    }

    /// Copies a block from other pages of the same store. Where the pages are on one device, the bytes stay
    /// there.
    ///
    /// # Errors
    /// A [`LayoutError`](super::LayoutError): other shapes, a block that is not there.
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

    /// Reads a block into the caller's memory, which has the layout `to`: its block `to_block`. All runs are
    /// of one batch.
    ///
    /// # Errors
    /// [`Error::Layout`](crate::Error::Layout), as for [`write`](Self::write); those of [`Store::read_many`].
    /// The caller's memory is unchanged then.
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
        let bytes = self.read_all(store, &copies)?;
        for (index, copy) in copies.iter().enumerate() {
            let at = copy.to.offset as usize;
            regions[copy.to.region][at..at + copy.to.len as usize].copy_from_slice(bytes.get(index));
        }
        Ok(())
    }

    /// Reads a block into memory of a device, as [`read`](Self::read) does into a host's: all runs by one
    /// list of commands.
    ///
    /// # Errors
    /// [`Error::Layout`](crate::Error::Layout), as for `write`; those of [`Store::read_device`], after which
    /// the device's memory may hold a part.
    pub fn read_device(
        &self,
        store: &Store,
        block: u64,
        to: &BlockLayout,
        regions: &[DeviceBytes],
        to_block: u64,
    ) -> Result<()> {
        to.check_regions(regions.iter().map(DeviceBytes::byte_len))?;
        let copies = self.layout.copies(block, to, to_block)?;
        let parts = copies.iter().map(|copy| regions[copy.to.region].part(copy.to.range()));
        let parts: Vec<DeviceBytes> = parts.collect::<Result<_>>()?;
        let of_page = |copy: &BlockCopy| (self.pages[copy.from.region], copy.from.offset);
        let ranges: Vec<_> =
            copies.iter().map(of_page).zip(&parts).map(|((page, at), part)| (page, at, part)).collect();
        store.read_device(&ranges).map(drop)
    }

    fn read_all(&self, store: &Store, copies: &[BlockCopy]) -> Result<ManyBytes> {
        let range = |copy: &BlockCopy| (self.pages[copy.from.region], copy.from.range());
        store.read_many(&copies.iter().map(range).collect::<Vec<_>>())?.wait()
    }
}
