//! A page on disk: its image, and the later writes of batches.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::op::Op;
use remanent_format::state::apply::each_write;

use super::PendingBytes;
use super::image::DiskImage;
use crate::base::allocation::make_room;
use crate::device::{Lane, Span};
use crate::error::Result;
use crate::memory::staging::StagingPool;

/// The size in bytes of the blocks that hold the written bytes of a page. Each scattered single-element write occupies
/// one block. With blocks of 4 KiB, one changed element in a thousand occupied as much memory as the page.
pub(super) const BLOCK_LEN: usize = 512;
const WORDS: usize = BLOCK_LEN / 64;
/// The minimum and the maximum number of consecutive whole blocks of one write that share an allocation. Single
/// allocations for the blocks of long writes took most of the time of applying them.
const RUN_BLOCKS: [usize; 2] = [8, 128];
/// The number of bytes that are read at a time when all bytes of a page are processed.
const READ_AT_ONCE: u64 = 4 << 20;

/// A page on disk in its state after one batch. A clone is unaffected by later batches. Clones share unchanged blocks.
#[derive(Clone, Debug)]
pub(crate) struct DiskPage {
    len: u64,
    image: Option<Arc<DiskImage>>,
    /// The number of leading bytes of the image that belong to the page. All later bytes of the page are zeros, unless
    /// a batch wrote to them.
    image_len: u64,
    /// The blocks that batches wrote to, by block number.
    blocks: BTreeMap<u64, Written>,
    lineage: Lineage,
    pending: Arc<PendingBytes>,
}

/// A version of a page. It shows whether a clone is an earlier state of the page.
#[derive(Clone, Copy, Debug)]
struct Lineage {
    /// A number that changes when the page is resized or a batch replaces its image.
    number: u64,
    /// The number of writes to the page since `number` changed.
    writes: u64,
    /// The number of writes, among those counted in `writes`, whose bytes are in the image.
    in_image: u64,
}

impl Lineage {
    fn new() -> Self {
        /// The next lineage number, unique within the process.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed suffices, because the numbers only need to be distinct.
        Self { number: NEXT.fetch_add(1, Ordering::Relaxed), writes: 0, in_image: 0 }
    }
}

/// The bytes that batches wrote to a block of a page. Clones share them.
#[derive(Clone, Debug)]
enum Written {
    /// Any bytes of the block.
    Block(Arc<Block>),
    /// All bytes of the block. The second value is the index of the block in the run.
    InRun(Arc<Run>, usize),
}

/// Consecutive blocks of a page, all of whose bytes one write wrote. A run never changes.
struct Run {
    bytes: Box<[u8]>,
    pending: Arc<PendingBytes>,
}

/// A block of a page with the bytes that batches wrote.
struct Block {
    bytes: [u8; BLOCK_LEN],
    /// A bit mask with one bit per byte of the block. A bit is set if a batch wrote the byte.
    written: [u64; WORDS],
    pending: Arc<PendingBytes>,
}

/// The number of bytes of host memory that a block occupies, including its reference counts and its entry in the map.
/// A block in a run occupies less.
const BLOCK_BYTES: u64 = size_of::<Block>() as u64 + 48;
/// The number of bytes that a block in a run occupies in addition to its own, for its entry in the map and its share of
/// the run.
const RUN_ENTRY_BYTES: usize = size_of::<Written>() + 24;

/// Returns the number of blocks that overlap `len` bytes from `offset` on.
fn blocks(offset: u64, len: u64) -> u64 {
    let end = offset.saturating_add(len).div_ceil(BLOCK_LEN as u64);
    if len == 0 { 0 } else { end - offset / BLOCK_LEN as u64 }
}

/// Returns the maximum number of bytes of host memory that `op` may need for pending writes.
pub(crate) fn pending_bytes_of(op: &Op<'_>) -> u64 {
    let (offset, len) = op.range().unwrap_or_default();
    match op {
        Op::Image { .. } => 0,
        Op::Scatter { indices, .. } => pending_bytes_of_elements(indices.len() as u64, offset, len),
        _ => pending_bytes_of_write(offset, len),
    }
}

/// Returns the maximum number of bytes of host memory that a write of `len` bytes at `offset` may need.
pub(crate) fn pending_bytes_of_write(offset: u64, len: u64) -> u64 {
    blocks(offset, len).saturating_mul(BLOCK_BYTES)
}

/// Returns the maximum number of bytes of host memory that writes of `count` elements may need, if all elements are
/// within `len` bytes starting at `offset`.
pub(crate) fn pending_bytes_of_elements(count: u64, offset: u64, len: u64) -> u64 {
    // Each element overlaps at most two blocks.
    blocks(offset, len).min(count.saturating_mul(2)).saturating_mul(BLOCK_BYTES)
}

impl DiskPage {
    /// Creates a page with the bytes of `image`, or with zeros. The page has `len` bytes.
    pub(super) fn new(image: Option<Arc<DiskImage>>, len: u64, pending: Arc<PendingBytes>) -> Self {
        let image_len = image.as_ref().map_or(0, |image| image.page_len());
        Self { len, image, image_len, blocks: BTreeMap::new(), lineage: Lineage::new(), pending }
    }

    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// Applies an operation of a batch to the page. The operation must not name an image.
    pub fn apply(&mut self, op: &Op<'_>) {
        match op {
            Op::Resize { len, .. } => self.resize(*len),
            _ => {
                self.lineage.writes += 1;
                each_write(op, |offset, bytes| self.write(offset, bytes));
            }
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= self.len); // I10: planning rejects longer writes.
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let (number, within) = (at / BLOCK_LEN as u64, at as usize % BLOCK_LEN);
            let whole = if within == 0 { rest.len() / BLOCK_LEN } else { 0 };
            let [least, most] = RUN_BLOCKS;
            let here = if whole >= least {
                let (here, after) = rest.split_at(whole.min(most) * BLOCK_LEN);
                rest = after;
                self.write_run(number, here);
                here
            } else {
                let (here, after) = rest.split_at(rest.len().min(BLOCK_LEN - within));
                rest = after;
                self.change_block(number, |block| block.write(within, here));
                here
            };
            at += here.len() as u64;
        }
    }

    /// Writes whole blocks, from block `first` on.
    fn write_run(&mut self, first: u64, bytes: &[u8]) {
        let run = Arc::new(Run::new(bytes, self.pending.clone()));
        let mut left: Vec<(Arc<Run>, u64)> = Vec::new();
        for index in 0..run.blocks() {
            let number = first + index as u64;
            if let Some(Written::InRun(before, at)) =
                self.blocks.insert(number, Written::InRun(run.clone(), index))
                && left.last().is_none_or(|(last, _)| !Arc::ptr_eq(last, &before))
            {
                left.push((before, number - at as u64));
            }
        }
        left.into_iter().for_each(|(run, first)| self.split_if_sparse(&run, first));
    }

    /// Changes a block, which is created if no batch has written to it yet. If a snapshot, a reader or a run shares the
    /// block, a copy is changed.
    fn change_block(&mut self, number: u64, change: impl FnOnce(&mut Block)) {
        let new = || Written::Block(Arc::new(Block::new(self.pending.clone())));
        let written = self.blocks.entry(number).or_insert_with(new);
        let mut left = None;
        if let Written::InRun(run, index) = written {
            let block = Arc::new(run.block(*index));
            left = Some((run.clone(), number - *index as u64));
            *written = Written::Block(block);
        }
        let Written::Block(block) = written else { unreachable!("the block has left its run") };
        change(Arc::make_mut(block));
        if let Some((run, first)) = left {
            self.split_if_sparse(&run, first);
        }
    }

    /// Copies the remaining blocks of a run to blocks of their own if less than half of the run is in use. Otherwise
    /// one block could keep the memory of all others. `first` is the number of the run's first block.
    fn split_if_sparse(&mut self, run: &Arc<Run>, first: u64) {
        // The caller's own reference is not a use.
        let uses = Arc::strong_count(run) - 1;
        if uses == 0 || 2 * uses >= run.blocks() {
            return;
        }
        let mut own = Vec::new();
        for (_, written) in self.blocks.range_mut(first..first + run.blocks() as u64) {
            match written {
                Written::InRun(other, index) if Arc::ptr_eq(other, run) => own.push((*index, written)),
                _ => {}
            }
        }
        // While clones use the run, copies would only need more memory.
        if own.len() == uses {
            own.into_iter()
                .for_each(|(index, written)| *written = Written::Block(Arc::new(run.block(index))));
        }
    }

    fn resize(&mut self, len: u64) {
        self.lineage = Lineage::new();
        if len < self.len {
            self.image_len = self.image_len.min(len);
            let (last, within) = (len / BLOCK_LEN as u64, len as usize % BLOCK_LEN);
            // Written bytes after the new end are dropped. They must not reappear if the page is extended again.
            self.blocks.split_off(&(last + u64::from(within > 0)));
            if within > 0 && self.blocks.contains_key(&last) {
                self.change_block(last, |block| block.forget(within..BLOCK_LEN));
            }
            let before = last.checked_sub(1).and_then(|number| Some((number, self.blocks.get(&number)?)));
            if let Some((number, Written::InRun(run, index))) = before {
                let (run, first) = (run.clone(), number - *index as u64);
                self.split_if_sparse(&run, first);
            }
        }
        self.len = len;
    }

    /// Returns the page's image if the page consists of exactly the image's bytes.
    pub fn only_image(&self) -> Option<&Arc<DiskImage>> {
        self.image_below().filter(|_| self.blocks.is_empty())
    }

    /// Returns the page's image if the image has the same length as the page. All differences are then in the blocks.
    pub(super) fn image_below(&self) -> Option<&Arc<DiskImage>> {
        let is_as_long = |image: &&Arc<DiskImage>| self.image_len == self.len && image.page_len() == self.len;
        self.image.as_ref().filter(is_as_long)
    }

    /// Returns the image that contains the bytes that no batch has overwritten, or `None` if the page has no image.
    pub fn image(&self) -> Option<&Arc<DiskImage>> {
        self.image.as_ref()
    }

    /// Estimates the number of bytes in the page's next image. The estimate assumes an overlay if an overlay is
    /// possible.
    pub fn next_image_bytes(&self) -> u64 {
        let changed = self.blocks.len() as u64 * BLOCK_LEN as u64;
        let before = match self.image.as_ref().map(|image| image.image()) {
            Some(image) if !image.is_whole() => image.stored_len,
            // A page without changes is written as a whole.
            _ if changed == 0 => self.len,
            _ => 0,
        };
        (before + changed).min(self.len)
    }

    /// Returns the ranges of the page that batches wrote after its image was made, in ascending order.
    pub(super) fn written(&self) -> impl Iterator<Item = Range<u64>> {
        self.blocks.iter().flat_map(|(number, block)| block.written_at(number * BLOCK_LEN as u64))
    }

    /// Overwrites `bytes`, image bytes that begin at `offset` of the page, with the bytes that batches wrote.
    pub(super) fn apply_pieces(&self, offset: u64, bytes: &mut [u8]) {
        for (number, block) in self.blocks_in(&(offset..offset + bytes.len() as u64)) {
            block.copy_to(number * BLOCK_LEN as u64, bytes, offset);
        }
    }

    /// Returns a clone of the page with only the blocks that overlap `bytes`. The clone serves reads within `bytes`.
    pub fn part(&self, bytes: &Range<u64>) -> Self {
        let blocks = self.blocks_in(bytes).map(|(number, block)| (number, block.clone())).collect();
        let Self { len, image_len, lineage, .. } = *self;
        Self { len, image: self.image.clone(), image_len, blocks, lineage, pending: self.pending.clone() }
    }

    fn blocks_in(&self, bytes: &Range<u64>) -> impl Iterator<Item = (u64, &Written)> {
        let numbers = bytes.start / BLOCK_LEN as u64..bytes.end.div_ceil(BLOCK_LEN as u64);
        // If `bytes` is empty, its computed last block may precede its first block.
        let numbers = numbers.start..numbers.end.max(numbers.start);
        self.blocks.range(numbers).map(|(number, block)| (*number, block))
    }

    /// Fills `out` with bytes of the page, starting at `offset`. Must not run on the applier's thread, because the read
    /// waits for the disk.
    ///
    /// # Errors
    /// `Damaged`; `OutOfMemory`.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset + out.len() as u64;
        assert!(end <= self.len, "the caller knows the page's length");
        if out.is_empty() {
            return Ok(());
        }
        let of_image = self.image_len.saturating_sub(offset).min(out.len() as u64) as usize;
        let (from_image, after) = out.split_at_mut(of_image);
        after.fill(0);
        if let Some(image) = self.image.as_ref().filter(|_| !from_image.is_empty())
            && !self.is_written(offset..offset + of_image as u64)
        {
            image.read(offset, from_image)?;
        }
        self.apply_pieces(offset, out);
        Ok(())
    }

    /// Copies the bytes of the page from `offset` on to the device memory `target`. Must not run on the applier's
    /// thread.
    ///
    /// # Errors
    /// Same as [`read`](Self::read); a device error.
    pub fn upload(&self, offset: u64, staging: &StagingPool, target: Span) -> Result<()> {
        let mut piece = Vec::new();
        make_room(&mut piece, target.len.min(READ_AT_ONCE) as usize)?;
        for at in (0..target.len).step_by(READ_AT_ONCE as usize) {
            let len = READ_AT_ONCE.min(target.len - at);
            piece.resize(len as usize, 0);
            self.read(offset + at, &mut piece)?;
            let target = Span { offset: target.offset + at, len, ..target };
            staging.upload(Lane::Load, target, &piece)?;
        }
        Ok(())
    }

    /// Returns the CRC-32 of the page's bytes. Must not run on the applier's thread.
    ///
    /// # Errors
    /// Same as [`read`](Self::read).
    pub fn sum(&self) -> Result<u32> {
        let mut bytes = Vec::new();
        make_room(&mut bytes, self.len.min(READ_AT_ONCE) as usize)?;
        bytes.resize(self.len.min(READ_AT_ONCE) as usize, 0);
        let mut sum = crc32fast::Hasher::new();
        for at in (0..self.len).step_by(READ_AT_ONCE as usize) {
            let piece = &mut bytes[..READ_AT_ONCE.min(self.len - at) as usize];
            self.read(at, piece)?;
            sum.update(piece);
        }
        Ok(sum.finalize())
    }

    /// Returns whether batches wrote every byte in `bytes`, so that no byte of the image is visible in this range.
    fn is_written(&self, bytes: Range<u64>) -> bool {
        let mut next = bytes.start;
        for (number, block) in self.blocks_in(&bytes) {
            let start = number * BLOCK_LEN as u64;
            let (from, to) = (start.max(bytes.start), (start + BLOCK_LEN as u64).min(bytes.end));
            if next < from || !block.has((from - start) as usize..(to - start) as usize) {
                return false;
            }
            next = to;
        }
        next == bytes.end
    }

    /// Replaces the page's image with the image that was made from `gathered`, an earlier clone of this page. Writes
    /// after the clone remain pending.
    ///
    /// Two kinds of pages are left unchanged:
    ///
    /// - A page that was resized or got another image after the clone. The next snapshot creates its image.
    /// - A page whose image contains more writes than the clone. Dropping blocks that the older clone contains would
    ///   lose writes that are in neither image.
    pub fn rebase(&mut self, gathered: &Self, image: Option<Arc<DiskImage>>) {
        let (now, then) = (self.lineage, gathered.lineage);
        if now.number != then.number || now.in_image > then.writes {
            return;
        }
        let is_in_image = |number: &u64, block: &Written| {
            gathered.blocks.get(number).is_some_and(|gathered| gathered.is_same(block))
        };
        self.blocks.retain(|number, block| !is_in_image(number, block));
        (self.image_len, self.image) = (gathered.len, image);
        self.lineage.in_image = then.writes;
    }
}

impl Written {
    /// Returns whether two values are of the same write.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Block(block), Self::Block(other)) => Arc::ptr_eq(block, other),
            (Self::InRun(run, index), Self::InRun(other, at)) => Arc::ptr_eq(run, other) && index == at,
            _ => false,
        }
    }

    /// Returns the ranges of written bytes in this block, relative to the page. `start` is the block's offset in the
    /// page.
    fn written_at(&self, start: u64) -> impl Iterator<Item = Range<u64>> {
        let (block, whole) = match self {
            Self::Block(block) => (Some(block.written_at(start)), None),
            Self::InRun(..) => (None, Some(start..start + BLOCK_LEN as u64)),
        };
        block.into_iter().flatten().chain(whole)
    }

    /// Returns whether batches wrote every byte in `range`.
    fn has(&self, range: Range<usize>) -> bool {
        match self {
            Self::Block(block) => block.has(range),
            Self::InRun(..) => true,
        }
    }

    /// Copies the written bytes of this block to `out`. `start` is the offset of the block in the page, and `offset` is
    /// the offset of `out` in the page.
    fn copy_to(&self, start: u64, out: &mut [u8], offset: u64) {
        match self {
            Self::Block(block) => block.copy_to(start, out, offset),
            Self::InRun(run, index) => {
                let (from, to) =
                    (offset.max(start), (offset + out.len() as u64).min(start + BLOCK_LEN as u64));
                if from < to {
                    let bytes = &run.bytes_of(*index)[(from - start) as usize..(to - start) as usize];
                    out[(from - offset) as usize..(to - offset) as usize].copy_from_slice(bytes);
                }
            }
        }
    }
}

impl Run {
    fn new(bytes: &[u8], pending: Arc<PendingBytes>) -> Self {
        let run = Self { bytes: bytes.into(), pending };
        run.pending.add(run.byte_count());
        run
    }

    fn blocks(&self) -> usize {
        self.bytes.len() / BLOCK_LEN
    }

    /// Returns the number of bytes of host memory that the run occupies, at most [`BLOCK_BYTES`] for each block.
    fn byte_count(&self) -> u64 {
        (self.bytes.len() + self.blocks() * RUN_ENTRY_BYTES) as u64
    }

    fn bytes_of(&self, index: usize) -> &[u8] {
        &self.bytes[index * BLOCK_LEN..][..BLOCK_LEN]
    }

    /// Copies a block.
    fn block(&self, index: usize) -> Block {
        let mut block = Block::new(self.pending.clone());
        block.write(0, self.bytes_of(index));
        block
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.pending.sub(self.byte_count());
    }
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run").field("blocks", &self.blocks()).finish_non_exhaustive()
    }
}

impl Block {
    fn new(pending: Arc<PendingBytes>) -> Self {
        pending.add(BLOCK_BYTES);
        Self { bytes: [0; BLOCK_LEN], written: [0; WORDS], pending }
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        each_word(at..at + bytes.len(), |word, bits| self.written[word] |= bits);
    }

    fn forget(&mut self, range: Range<usize>) {
        each_word(range, |word, bits| self.written[word] &= !bits);
    }

    /// Returns the ranges of written bytes in this block, relative to the page. `start` is the block's offset in the
    /// page.
    fn written_at(&self, start: u64) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < BLOCK_LEN && !self.has(at..at + 1) {
                let rest = self.written[at / 64] >> (at % 64);
                at += (rest.trailing_zeros() as usize).clamp(1, 64 - at % 64);
            }
            let from = at;
            while at < BLOCK_LEN && self.has(at..at + 1) {
                let rest = !(self.written[at / 64] >> (at % 64));
                at += (rest.trailing_zeros() as usize).clamp(1, 64 - at % 64);
            }
            (from < at).then(|| start + from as u64..start + at as u64)
        })
    }

    /// Returns whether batches wrote every byte in `range`.
    fn has(&self, range: Range<usize>) -> bool {
        let mut has_all = true;
        each_word(range, |word, bits| has_all &= self.written[word] & bits == bits);
        has_all
    }

    /// Copies the written bytes of this block to `out`. `start` is the offset of the block in the page, and `offset` is
    /// the offset of `out` in the page.
    fn copy_to(&self, start: u64, out: &mut [u8], offset: u64) {
        let from = offset.saturating_sub(start).min(BLOCK_LEN as u64) as usize;
        let to = (offset + out.len() as u64).saturating_sub(start).min(BLOCK_LEN as u64) as usize;
        let mut at = from;
        while at < to {
            let (word, bit) = (at / 64, at % 64);
            let rest = self.written[word] >> bit;
            let gap = rest.trailing_zeros() as usize;
            if gap > 0 {
                // Skips the cleared bits before the next set bit, but not past the end of the word.
                at += gap.min(64 - bit);
                continue;
            }
            let run = ((!rest).trailing_zeros() as usize).min(64 - bit).min(to - at);
            let target = (start + at as u64 - offset) as usize;
            out[target..target + run].copy_from_slice(&self.bytes[at..at + run]);
            at += run;
        }
    }
}

impl Clone for Block {
    fn clone(&self) -> Self {
        self.pending.add(BLOCK_BYTES);
        Self { bytes: self.bytes, written: self.written, pending: self.pending.clone() }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pending.sub(BLOCK_BYTES);
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Block").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for PendingBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingBytes").finish_non_exhaustive()
    }
}

/// Calls `each` for each word that contains some of `bits`, with the word's index and a mask of those bits.
fn each_word(bits: Range<usize>, mut each: impl FnMut(usize, u64)) {
    let mut at = bits.start;
    while at < bits.end {
        let (word, bit) = (at / 64, at % 64);
        let count = (64 - bit).min(bits.end - at);
        let mask = if count == 64 { u64::MAX } else { ((1 << count) - 1) << bit };
        each(word, mask);
        at += count;
    }
}
