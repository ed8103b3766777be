//! Block layouts of inference engines: the addresses of the bytes of a block of a key-value cache.
//!
//! An engine keeps its cache in blocks. A block contains, for each layer and each *outer* part (keys and values), the
//! same number of tokens. The bytes of one block, layer and outer part are contiguous and form a *run*. The order of
//! runs differs between engines, and [`BlockLayout`] describes it:
//!
//! | arrangement | regions | order of the runs in a region |
//! |---|---|---|
//! | [`Arrangement::Contiguous`] | 1 | block, layer, outer |
//! | [`Arrangement::LayersApart`], block first | 1 for each layer | block, outer |
//! | [`Arrangement::LayersApart`], outer first | 1 for each layer | outer, block |
//!
//! A *region* is one contiguous piece of memory: a page of the store ([`BlockPages`](crate::blocks::BlockPages)), a
//! tensor of the engine ([`BlockTensors`](crate::blocks::BlockTensors)), or a slice. Blocks can be copied run by run
//! between any two layouts whose blocks have the same shape ([`BlockLayout::copies`]), regardless of their
//! arrangements.
//!
//! A layout can be encoded in 32 bytes without loss ([`BlockLayout::fingerprint`]). If these bytes are passed to
//! [`Options::layout_fingerprint`](crate::Options::layout_fingerprint), a program with another layout cannot open the
//! store, and its error states both layouts.
//!
//! ```
//! use remanent::layout::{Arrangement, BlockLayout, BlockShape};
//! // 32 layers of keys and values, 16 tokens per block, 8 heads of 128 elements, two bytes each.
//! let shape = BlockShape { layers: 32, outer: 2, tokens: 16, inner: 8 * 128, width: 2 };
//! let of_store = BlockLayout::new(shape, 1, Arrangement::Contiguous, 512)?;
//! assert_eq!((of_store.region_count(), of_store.region_len()), (1, 2 << 20));
//!
//! let of_engine = BlockLayout::new(shape, 1000, Arrangement::LayersApart { block_first: false }, 1)?;
//! let run = of_engine.extent(7, 3, 1)?;
//! assert_eq!((run.region, run.offset, run.len), (3, (1000 + 7) * 32768, 32768));
//! assert_eq!(BlockLayout::from_fingerprint(of_engine.fingerprint())?, of_engine);
//! # Ok::<(), remanent::layout::LayoutError>(())
//! ```

mod error;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use self::error::ALIGN_MAX;
pub use self::error::LayoutError;

/// The version of the encodings that [`BlockLayout::fingerprint`] and [`BlockLayout::to_json`] produce.
const VERSION: u16 = 1;
/// The first bytes of a fingerprint, which identify it as a block layout.
const MAGIC: [u8; 2] = *b"BL";
/// The shape of a block, independent of the order of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockShape {
    /// The number of layers.
    pub layers: u32,
    /// The number of outer parts: 2 for separate keys and values, 1 if they are stored together.
    pub outer: u8,
    /// The number of tokens per block.
    pub tokens: u32,
    /// The number of elements per token in one layer and outer part, usually the number of heads times the head size.
    pub inner: u32,
    /// The size of an element in bytes.
    pub width: u8,
}

/// The order of the runs of a layout, by block, layer and outer part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arrangement {
    /// All runs in one region, ordered by block, then layer, then outer part.
    Contiguous,
    /// One region per layer.
    LayersApart {
        /// Whether all outer parts of a block are stored next to each other. If false, the first outer parts of all
        /// blocks are stored next to each other, then the second ones, and so on.
        block_first: bool,
    },
}

/// A range of bytes in one region of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The index of the region that contains the range.
    pub region: usize,
    /// The offset of the first byte in the region.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
}

/// One copy operation of a block transfer, between extents of the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockCopy {
    /// The extent to read.
    pub from: Extent,
    /// The extent to write.
    pub to: Extent,
}

/// A result whose error is a [`LayoutError`].
pub type LayoutResult<T> = std::result::Result<T, LayoutError>;

/// The positions of all blocks in the regions of a cache. All arithmetic is checked once, when the layout is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockLayout {
    shape: BlockShape,
    blocks: u64,
    arrangement: Arrangement,
    align: u32,
    /// The length of a run in bytes, without the gap after it.
    run_len: u64,
    /// The distance between the starts of consecutive runs, in bytes.
    run_stride: u64,
}

impl BlockLayout {
    /// Creates a layout of `blocks` blocks in which each run starts at a multiple of `align` bytes from the start of
    /// its region. With an alignment of 1, there are no gaps between runs, as in an engine's tensor.
    ///
    /// # Errors
    /// [`LayoutError::Zero`], [`LayoutError::Align`], [`LayoutError::TooLong`].
    pub fn new(shape: BlockShape, blocks: u64, arrangement: Arrangement, align: u32) -> LayoutResult<Self> {
        let BlockShape { layers, outer, tokens, inner, width } = shape;
        let dimensions = [
            ("the number of blocks", blocks),
            ("the number of layers", layers.into()),
            ("the number of outer parts", outer.into()),
            ("the number of tokens", tokens.into()),
            ("the number of elements of a token", inner.into()),
            ("the width of an element", width.into()),
        ];
        if let Some((dimension, _)) = dimensions.into_iter().find(|(_, count)| *count == 0) {
            return Err(LayoutError::Zero { dimension });
        }
        if !align.is_power_of_two() || align > ALIGN_MAX {
            return Err(LayoutError::Align { align });
        }
        let run_len = product("a run", [tokens.into(), inner.into(), width.into()])?;
        let run_stride =
            run_len.checked_next_multiple_of(align.into()).ok_or(LayoutError::TooLong { what: "a run" })?;
        let layout = Self { shape, blocks, arrangement, align, run_len, run_stride };
        product("the layout", [run_stride, outer.into(), layers.into(), blocks])?;
        Ok(layout)
    }

    /// Returns the shape of a block.
    #[must_use]
    pub fn shape(&self) -> BlockShape {
        self.shape
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the order of the runs.
    #[must_use]
    pub fn arrangement(&self) -> Arrangement {
        self.arrangement
    }

    /// Returns the alignment of each run in bytes.
    #[must_use]
    pub fn align(&self) -> u32 {
        self.align
    }

    /// Returns the length of one block in bytes, without gaps.
    #[must_use]
    pub fn block_len(&self) -> u64 {
        self.run_len * self.runs_of_block()
    }

    /// Returns the number of regions.
    #[must_use]
    pub fn region_count(&self) -> usize {
        match self.arrangement {
            Arrangement::Contiguous => 1,
            Arrangement::LayersApart { .. } => self.shape.layers as usize,
        }
    }

    /// Returns the length of each region in bytes, including the gap after its last run.
    #[must_use]
    pub fn region_len(&self) -> u64 {
        self.run_stride * self.blocks * self.runs_of_block() / self.region_count() as u64
    }

    fn runs_of_block(&self) -> u64 {
        u64::from(self.shape.layers) * u64::from(self.shape.outer)
    }

    /// Returns the extent of the run of a block, layer and outer part.
    ///
    /// # Errors
    /// [`LayoutError::OutOfRange`].
    pub fn extent(&self, block: u64, layer: u32, outer: u8) -> LayoutResult<Extent> {
        check_index("block", block, self.blocks)?;
        check_index("layer", layer.into(), self.shape.layers.into())?;
        check_index("outer part", outer.into(), self.shape.outer.into())?;
        let (layers, outers) = (u64::from(self.shape.layers), u64::from(self.shape.outer));
        let (layer, outer) = (u64::from(layer), u64::from(outer));
        let (region, run) = match self.arrangement {
            Arrangement::Contiguous => (0, (block * layers + layer) * outers + outer),
            Arrangement::LayersApart { block_first: true } => (layer, block * outers + outer),
            Arrangement::LayersApart { block_first: false } => (layer, outer * self.blocks + block),
        };
        Ok(Extent { region: region as usize, offset: run * self.run_stride, len: self.run_len })
    }

    /// Returns the extents of a block, ordered by layer, then outer part. Adjacent runs are merged into one extent.
    ///
    /// # Errors
    /// [`LayoutError::OutOfRange`].
    pub fn extents(&self, block: u64) -> LayoutResult<Vec<Extent>> {
        // A copy of the block to itself is divided into the block's extents.
        Ok(self.copies(block, self, block)?.into_iter().map(|copy| copy.from).collect())
    }

    /// Returns the shortest list of copies that transfers a block of this layout to a block of `to`. Runs that are
    /// adjacent on both sides are merged into one copy.
    ///
    /// # Errors
    /// [`LayoutError::OtherShape`] if the blocks' shapes differ; [`LayoutError::OutOfRange`].
    pub fn copies(&self, block: u64, to: &Self, to_block: u64) -> LayoutResult<Vec<BlockCopy>> {
        if self.shape != to.shape {
            return Err(LayoutError::OtherShape { from: self.to_string(), to: to.to_string() });
        }
        let mut copies: Vec<BlockCopy> = Vec::new();
        for layer in 0..self.shape.layers {
            for outer in 0..self.shape.outer {
                let (from, to) = (self.extent(block, layer, outer)?, to.extent(to_block, layer, outer)?);
                match copies.last_mut() {
                    Some(last) if last.from.is_right_before(&from) && last.to.is_right_before(&to) => {
                        last.from.len += from.len;
                        last.to.len += to.len;
                    }
                    _ => copies.push(BlockCopy { from, to }),
                }
            }
        }
        Ok(copies)
    }

    /// Returns an error unless regions of these lengths can contain the layout.
    ///
    /// # Errors
    /// [`LayoutError::RegionCount`], [`LayoutError::RegionLen`].
    pub fn check_regions(&self, lens: impl ExactSizeIterator<Item = u64>) -> LayoutResult<()> {
        let (found, expected) = (lens.len(), self.region_count());
        if found != expected {
            return Err(LayoutError::RegionCount { found, expected });
        }
        let expected = self.region_len();
        match lens.enumerate().find(|(_, found)| *found < expected) {
            Some((region, found)) => Err(LayoutError::RegionLen { region, found, expected }),
            None => Ok(()),
        }
    }

    /// Returns a lossless encoding of the layout in 32 bytes, for
    /// [`Options::layout_fingerprint`](crate::Options::layout_fingerprint).
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let BlockShape { layers, outer, tokens, inner, width } = self.shape;
        let arrangement = match self.arrangement {
            Arrangement::Contiguous => 0,
            Arrangement::LayersApart { block_first: true } => 1,
            Arrangement::LayersApart { block_first: false } => 2,
        };
        let mut bytes = [0; 32];
        bytes[0..2].copy_from_slice(&MAGIC);
        bytes[2..4].copy_from_slice(&VERSION.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[12..16].copy_from_slice(&layers.to_le_bytes());
        bytes[16..20].copy_from_slice(&tokens.to_le_bytes());
        bytes[20..24].copy_from_slice(&inner.to_le_bytes());
        // An alignment is a power of two, so its exponent suffices.
        bytes[24..28].copy_from_slice(&[outer, width, arrangement, self.align.trailing_zeros() as u8]);
        bytes
    }

    /// Decodes a layout from a fingerprint.
    ///
    /// # Errors
    /// [`LayoutError::Fingerprint`] if the bytes are not a fingerprint; the errors of [`BlockLayout::new`].
    pub fn from_fingerprint(bytes: [u8; 32]) -> LayoutResult<Self> {
        let refused = |reason| LayoutError::Fingerprint { reason };
        let four = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if bytes[0..2] != MAGIC {
            return Err(refused("it begins with other bytes"));
        }
        if bytes[2..4] != VERSION.to_le_bytes() {
            return Err(refused("it is of another version"));
        }
        let [outer, width, arrangement, exponent] = four(24).to_le_bytes();
        let arrangement = match arrangement {
            0 => Arrangement::Contiguous,
            1 => Arrangement::LayersApart { block_first: true },
            2 => Arrangement::LayersApart { block_first: false },
            _ => return Err(refused("it names an unknown arrangement")),
        };
        if bytes[28..32] != [0; 4] {
            return Err(refused("its reserved bytes are not zero"));
        }
        let blocks = u64::from_le_bytes(bytes[4..12].try_into().expect("eight bytes"));
        let shape = BlockShape { layers: four(12), outer, tokens: four(16), inner: four(20), width };
        let align = 1_u32.checked_shl(exponent.into()).ok_or(refused("its alignment is too large"))?;
        Self::new(shape, blocks, arrangement, align)
    }

    /// Returns the layout as a JSON object, for another process or language.
    #[must_use]
    pub fn to_json(&self) -> String {
        let BlockShape { layers, outer, tokens, inner, width } = self.shape;
        let arrangement = self.arrangement;
        format!(
            "{{\"version\":{VERSION},\"blocks\":{},\"layers\":{layers},\"outer\":{outer},\"tokens\":{tokens},\
             \"inner\":{inner},\"width\":{width},\"arrangement\":\"{arrangement}\",\"align\":{},\
             \"regions\":{},\"region_len\":{}}}",
            self.blocks,
            self.align,
            self.region_count(),
            self.region_len(),
        )
    }
}

impl fmt::Display for Arrangement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arrangement::Contiguous => "contiguous",
            Arrangement::LayersApart { block_first: true } => "layers apart, block first",
            Arrangement::LayersApart { block_first: false } => "layers apart, outer first",
        })
    }
}

impl fmt::Display for BlockLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BlockShape { layers, outer, tokens, inner, width } = self.shape;
        let arrangement = self.arrangement;
        write!(
            f,
            "{} blocks of {layers} layers x {outer} x {tokens} tokens x {inner} elements of {width} bytes, \
             {arrangement}, aligned to {}",
            self.blocks, self.align
        )
    }
}

impl Extent {
    /// Returns the byte range of the extent within its region.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    fn is_right_before(&self, other: &Self) -> bool {
        self.region == other.region && self.offset + self.len == other.offset
    }
}

fn product(what: &'static str, factors: impl IntoIterator<Item = u64>) -> LayoutResult<u64> {
    let product = factors.into_iter().try_fold(1_u64, u64::checked_mul);
    product.filter(|product| *product < 1 << 63).ok_or(LayoutError::TooLong { what })
}

fn check_index(dimension: &'static str, index: u64, count: u64) -> LayoutResult<()> {
    if index < count { Ok(()) } else { Err(LayoutError::OutOfRange { dimension, index, count }) }
}
