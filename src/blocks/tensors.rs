//! Blocks in an engine's tensors: loading them from pages, writing them to pages, and capturing their changes.

use remanent_format::{Lsn, Width};

use super::pages::{BlockPages, PagedBlock};
use crate::base::allocation::push;
use crate::device::DeviceBytes;
use crate::error::Result;
use crate::layout::{BlockLayout, Extent, LayoutError, LayoutResult};
use crate::store::Store;
use crate::write::batch::{NewPage, PageRef, WorkingCopy, WriteBatch};
use crate::write::commit::{InitialCopy, Shadow};

/// Tensors in device memory in which an inference engine keeps its blocks, one tensor for each region of the layout.
/// The blocks must have the same shape as the blocks in the store's pages, but the layouts may differ.
///
/// ```
/// use remanent::layout::{Arrangement, BlockLayout, BlockShape};
/// use remanent::blocks::{BlockPages, BlockTensors};
/// use remanent::{Options, Place};
/// # use remanent::DeviceChoice;
/// # let options = Options::new().device(DeviceChoice::Host);
/// let store = options.open_temporary()?;
/// let shape = BlockShape { layers: 2, outer: 2, tokens: 4, inner: 8, width: 2 };
///
/// // `[2, num_blocks, tokens, heads, dim]` per layer.
/// let of_engine = BlockLayout::new(shape, 10, Arrangement::LayersApart { block_first: false }, 1)?;
/// let tensor = || store.device_bytes(of_engine.region_len(), Place::Device(0));
/// let engine = BlockTensors::new(of_engine, vec![tensor()?, tensor()?])?;
///
/// let of_store = BlockLayout::new(shape, 2, Arrangement::Contiguous, 1)?;
/// let mut batch = store.batch();
/// BlockPages::create(&mut batch, of_store, Place::Disk);
/// let created = store.commit(batch)?.pages;
/// let pages = BlockPages::new(&store, of_store, created)?;
///
/// // Blocks 7 and 3 leave the engine, and return as blocks 0 and 1.
/// engine.tensors()[0].write(7 * 64, &[9; 64])?; // a kernel's work
/// let mut batch = store.batch();
/// engine.write(&mut batch, &[(7, pages.block(0)), (3, pages.block(1))])?;
/// store.commit(batch)?;
/// engine.load(&store, &[(pages.block(0), 0), (pages.block(1), 1)])?;
/// let mut bytes = [0; 64];
/// engine.tensors()[0].read(0, &mut bytes)?;
/// assert_eq!(bytes, [9; 64]);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct BlockTensors {
    layout: BlockLayout,
    tensors: Vec<DeviceBytes>,
}

/// Tensors that are working copies of pages with the same layout. After an engine has changed blocks in the tensors,
/// [`capture`](Self::capture) adds the changes to a batch.
#[derive(Clone, Debug)]
pub struct WorkingBlocks {
    layout: BlockLayout,
    copies: Vec<WorkingCopy>,
}

impl BlockTensors {
    /// Returns the blocks in `tensors`, which become the regions of `layout` in order. A tensor may be longer
    /// than its region.
    ///
    /// # Errors
    /// [`LayoutError::RegionCount`], [`LayoutError::RegionLen`].
    pub fn new(layout: BlockLayout, tensors: Vec<DeviceBytes>) -> LayoutResult<Self> {
        layout.check_regions(tensors.iter().map(DeviceBytes::byte_len))?;
        Ok(Self { layout, tensors })
    }

    /// Returns the layout of the blocks in the tensors.
    #[must_use]
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// Returns the tensors, one for each region of the layout.
    #[must_use]
    pub fn tensors(&self) -> &[DeviceBytes] {
        &self.tensors
    }

    /// Creates pages in the memory of these tensors, like [`WriteBatch::create_in`]. After the commit, only the store
    /// may write to the memory. Pass the ids of the pages to [`BlockPages::new`].
    pub fn create_pages(&self, batch: &mut WriteBatch) -> Vec<NewPage> {
        self.tensors.iter().map(|tensor| batch.create_in(tensor).page()).collect()
    }

    /// Loads blocks of pages into blocks of the tensors. Each pair contains a source block and the index of its target
    /// block. All blocks are read in the same state, and the newest batch of that state is returned.
    ///
    /// One command list loads all blocks, like [`Store::read_device`]. Pages on disk are read through the store's
    /// pinned memory.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for blocks of another shape and for an index out of range; the errors
    /// of [`Store::read_device`], after which the contents of the target blocks are undefined.
    pub fn load(&self, store: &Store, blocks: &[(PagedBlock<'_>, u64)]) -> Result<Lsn> {
        let mut ranges = Vec::new();
        for (source, block) in blocks {
            let BlockPages { layout, pages } = source.pages;
            for copy in layout.copies(source.block, &self.layout, *block)? {
                let (page, offset) = (pages[copy.from.region], copy.from.offset);
                push(&mut ranges, (page, offset, self.part(&copy.to)?))?;
            }
        }
        let ranges: Vec<_> = ranges.iter().map(|(page, offset, part)| (*page, *offset, part)).collect();
        store.read_device(&ranges)
    }

    /// Adds writes to `batch` that copy blocks of the tensors to blocks of pages. Each pair contains the index
    /// of a source block and its target block. The bytes are read when the batch is submitted, with one command
    /// list per 32 MiB.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid), as in [`load`](Self::load); the batch is then unchanged.
    pub fn write(&self, batch: &mut WriteBatch, blocks: &[(u64, PagedBlock<'_>)]) -> Result<()> {
        let mut writes = Vec::new();
        for (block, PagedBlock { pages, block: target }) in blocks {
            self.add_writes(&mut writes, *block, &pages.layout, &pages.pages, *target)?;
        }
        write_all(batch, &writes);
        Ok(())
    }

    /// Adds writes to `batch` that copy blocks of the tensors to pages that the same batch creates. Each entry of
    /// `blocks` contains the index of the source block, the index of the target block, and the pages that form the
    /// regions of `layout`, as returned by [`BlockPages::create`].
    ///
    /// # Errors
    /// The errors of [`write`](Self::write); [`LayoutError::RegionCount`] if the number of pages differs from the
    /// number of regions of the layout.
    pub fn write_new(
        &self,
        batch: &mut WriteBatch,
        layout: &BlockLayout,
        blocks: &[(u64, u64, &[NewPage])],
    ) -> Result<()> {
        let mut writes = Vec::new();
        for (block, target, pages) in blocks {
            // The lengths of the new pages are checked by the batch.
            layout.check_regions(pages.iter().map(|_| layout.region_len()))?;
            self.add_writes(&mut writes, *block, layout, pages, *target)?;
        }
        write_all(batch, &writes);
        Ok(())
    }

    /// Adds the writes that copy a block of the tensors to a block of pages.
    fn add_writes<P: Copy>(
        &self,
        writes: &mut Vec<(P, u64, DeviceBytes)>,
        block: u64,
        layout: &BlockLayout,
        pages: &[P],
        target: u64,
    ) -> Result<()> {
        for copy in self.layout.copies(block, layout, target)? {
            push(writes, (pages[copy.to.region], copy.to.offset, self.part(&copy.from)?))?;
        }
        Ok(())
    }

    /// Turns the tensors into working copies of pages with the same layout and length, like [`Store::working_copy_in`].
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for pages of another layout; the errors of [`Store::working_copy_in`].
    pub fn working_copies(
        &self,
        store: &Store,
        pages: &BlockPages,
        width: Width,
        shadow: Shadow,
        initial_copy: InitialCopy,
    ) -> Result<WorkingBlocks> {
        if self.layout != pages.layout {
            let (tensors, pages) = (self.layout.to_string(), pages.layout.to_string());
            return Err(LayoutError::OtherLayout { tensors, pages }.into());
        }
        let mut copies = Vec::new();
        for (page, tensor) in pages.pages.iter().zip(&self.tensors) {
            push(&mut copies, store.working_copy_in(*page, tensor, width, shadow, initial_copy)?)?;
        }
        Ok(WorkingBlocks { layout: self.layout, copies })
    }

    fn part(&self, extent: &Extent) -> Result<DeviceBytes> {
        self.tensors[extent.region].part(extent.range())
    }
}

fn write_all<'k, P: Copy + Into<PageRef<'k>>>(batch: &mut WriteBatch, writes: &[(P, u64, DeviceBytes)]) {
    for (page, offset, part) in writes {
        batch.write_device(*page, *offset, part);
    }
}

impl WorkingBlocks {
    /// Returns the working copies, one for each region of the layout.
    #[must_use]
    pub fn copies(&self) -> &[WorkingCopy] {
        &self.copies
    }

    /// Adds to `batch` the changes of these blocks since they were last loaded or captured, like
    /// [`WriteBatch::capture_ranges`]. With [`Shadow::Digest`], whole chunks are compared, so changes of
    /// neighboring blocks may be captured, too.
    ///
    /// # Errors
    /// [`LayoutError::OutOfRange`]; the batch is then unchanged.
    pub fn capture(&self, batch: &mut WriteBatch, blocks: &[u64]) -> LayoutResult<()> {
        let mut ranges = vec![Vec::new(); self.copies.len()];
        for block in blocks {
            for extent in self.layout.extents(*block)? {
                ranges[extent.region].push(extent.range());
            }
        }
        for (copy, ranges) in self.copies.iter().zip(&ranges) {
            if !ranges.is_empty() {
                batch.capture_ranges(copy, ranges);
            }
        }
        Ok(())
    }
}
