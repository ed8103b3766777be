//! Writes whole blocks of a file with direct I/O.
//!
//! Chunks of images are whole blocks. Only the image of a long page is written in pieces of arbitrary length,
//! and its head is written last. If a piece covers only a part of a block, the part is kept in memory until the
//! other bytes of the block are written.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use remanent_format::limits::GROUP_ALIGN;

use super::Space;
use crate::base::aligned_buf::{AlignedBuf, is_aligned};
use crate::base::sync::Mutex;
use crate::disk::DiskFile;
use crate::error::Result;

const BLOCK: usize = GROUP_ALIGN as usize;

/// The maximum number of bytes that are copied to aligned memory at a time.
const BOUNCE_LEN_MAX: usize = 1 << 20;
/// The value that replaces [`BOUNCE_LEN_MAX`] if memory is short. An allocation of this length does not fail.
const BOUNCE_LEN_SHORT: usize = 32 << 10;

/// Writes bytes of any offset and length to a file with direct I/O, which accepts only whole blocks.
pub(super) struct BlockWriter {
    file: Arc<dyn DiskFile>,
    space: Space,
    blocks: Mutex<Blocks>,
    /// Aligned buffers that later writes reuse.
    areas: Mutex<Vec<AlignedBuf>>,
}

#[derive(Default)]
struct Blocks {
    /// The incomplete blocks, by their file offset.
    waiting: BTreeMap<u64, WaitingBlock>,
    /// The end offset of the highest block written to the file.
    end: u64,
}

struct WaitingBlock {
    bytes: AlignedBuf,
    /// The range from the first to the last byte received, relative to the block.
    received: Range<usize>,
}

impl BlockWriter {
    /// Creates a writer for a file to which no block was written yet.
    pub fn new(file: Arc<dyn DiskFile>, space: Space) -> Self {
        Self { space, file, blocks: Mutex::default(), areas: Mutex::default() }
    }

    /// Writes bytes at `offset`. Whole blocks are written immediately, and partial blocks once they are complete.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        // If the file system cannot allocate space without writing, `reach` changes nothing, and the writes below
        // allocate it.
        self.space.reach(offset + bytes.len() as u64)?;
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let within = (at % GROUP_ALIGN) as usize;
            let len = if within == 0 && rest.len() >= BLOCK {
                let whole = rest.len() / BLOCK * BLOCK;
                self.put_blocks(at, &rest[..whole])?;
                whole
            } else {
                let len = rest.len().min(BLOCK - within);
                self.put_part(at - within as u64, within, &rest[..len])?;
                len
            };
            at += len as u64;
            rest = &rest[len..];
        }
        Ok(())
    }

    /// Writes the incomplete blocks below `end`, and discards the other incomplete blocks. No write may follow.
    pub fn flush(&self, end: u64) -> Result<()> {
        // The file stays open until it is read back, but its buffers are no longer needed.
        self.areas.lock().clear();
        let waiting = std::mem::take(&mut self.blocks.lock().waiting);
        waiting.range(..end).try_for_each(|(at, block)| self.file.write_direct(*at, &block.bytes))
    }

    fn put_blocks(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        {
            let mut blocks = self.blocks.lock();
            let end = offset + bytes.len() as u64;
            // An abandoned image may have left incomplete parts of these blocks.
            blocks.waiting.retain(|at, _| !(offset..end).contains(at));
            blocks.end = blocks.end.max(end);
        }
        if is_aligned(offset, bytes) {
            return self.file.write_direct(offset, bytes);
        }
        let mut area = self.take_area();
        let len = area.len();
        for (index, piece) in bytes.chunks(len).enumerate() {
            area[..piece.len()].copy_from_slice(piece);
            self.file.write_direct(offset + (index * len) as u64, &area[..piece.len()])?;
        }
        self.areas.lock().push(area);
        Ok(())
    }

    /// Stores bytes of the block at offset `block`, and writes the block once all of its bytes are stored.
    fn put_part(&self, block: u64, within: usize, bytes: &[u8]) -> Result<()> {
        let mut blocks = self.blocks.lock();
        let mut waiting = match blocks.waiting.remove(&block) {
            Some(waiting) => waiting,
            None => {
                let mut old = AlignedBuf::new(BLOCK);
                if block < blocks.end {
                    self.file.read_at(block, &mut old)?;
                }
                WaitingBlock { bytes: old, received: within..within }
            }
        };
        let to = within + bytes.len();
        waiting.bytes[within..to].copy_from_slice(bytes);
        waiting.received = waiting.received.start.min(within)..waiting.received.end.max(to);
        if waiting.received == (0..BLOCK) {
            self.file.write_direct(block, &waiting.bytes)?;
            blocks.end = blocks.end.max(block + GROUP_ALIGN);
        } else {
            blocks.waiting.insert(block, waiting);
        }
        Ok(())
    }

    fn take_area(&self) -> AlignedBuf {
        let kept = self.areas.lock().pop();
        let made = kept.or_else(|| AlignedBuf::try_new(BOUNCE_LEN_MAX));
        made.unwrap_or_else(|| AlignedBuf::new(BOUNCE_LEN_SHORT))
    }
}
