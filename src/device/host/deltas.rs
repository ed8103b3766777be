//! Merging of deltas into their ranges: one by one, many short deltas at a time, or by several threads.
//!
//! Each method produces the same bytes as merging the deltas in order (I11). No command waits for a lock while it holds
//! another one: several locks are acquired together only if all are free.

use std::borrow::Borrow;
use std::convert::Infallible;
use std::ptr;
use std::sync::Arc;

use remanent_format::Width;

use super::super::{Command, Payload, Piece, PieceKind, Staging};
use super::HostDevice;
use super::commands::{elements, index_of, part};
use super::memory::{HostAllocation, HostBlock};
use crate::base::parallel;
use crate::device::many_deltas::{NotPartitioned, THREADS_MAX, partition};

/// The maximum number of deltas merged together.
const TOGETHER_MAX: usize = 256;
/// The maximum total length of deltas merged together, in bytes.
const TOGETHER_BYTES_MAX: u64 = 64 << 10;
/// The longest delta, in bytes, that is merged together with others. The bound limits how long a reader of a page
/// waits: some microseconds.
const SHORT_LEN_MAX: u64 = 1024;

impl HostDevice {
    /// Looks up the allocations of several deltas under one lock.
    fn memories_of<P: Borrow<Piece>>(&self, pieces: &[P]) -> Vec<HostAllocation> {
        let memories = self.memories.read();
        pieces.iter().map(|piece| memories.get(piece.borrow().target.memory).clone()).collect()
    }

    /// Runs a list's commands in order. Several threads apply long runs of deltas.
    pub(super) fn run_all(&self, commands: Vec<Command>, staging: &mut [Staging]) {
        let mut bytes = 0;
        // The length of the deltas decides. The search ends as soon as they are long enough.
        let is_wide = commands.iter().flat_map(Command::deltas).any(|piece| {
            bytes += piece.target.len;
            bytes >= self.wide_bytes_min
        });
        if !is_wide {
            return commands.into_iter().for_each(|command| self.run(command, staging));
        }
        let is_apply = |command: &Command| matches!(command, Command::Apply { .. });
        let mut commands = commands.into_iter().peekable();
        while let Some(command) = commands.next() {
            let Command::Apply { pieces } = command else {
                self.run(command, staging);
                continue;
            };
            let mut rows = vec![pieces];
            while let Some(Command::Apply { pieces }) = commands.next_if(is_apply) {
                rows.push(pieces);
            }
            if !self.apply_by_threads(&rows, staging) {
                rows.iter().for_each(|pieces| self.apply_all(pieces, staging));
            }
        }
    }

    /// Applies deltas with several threads. The result is the same as in list order, because each block of memory
    /// belongs to one thread, which applies the block's deltas in order. Returns `false`, with nothing done, if one
    /// thread should apply the deltas.
    fn apply_by_threads(&self, rows: &[Vec<Piece>], staging: &[Staging]) -> bool {
        let threads = parallel::threads(THREADS_MAX);
        if threads == 1 {
            return false;
        }
        let rows = rows.iter().map(Vec::as_slice);
        let partitioned = partition(
            rows,
            || self.memories.read(),
            |memories, piece: &Piece| match piece.payload {
                Payload::Staging { .. } => {
                    let block = memories.get(piece.target.memory).block();
                    Ok(Some((Arc::as_ptr(block).addr() as u64, piece)))
                }
                // The payload is in page memory, which another thread may change concurrently.
                Payload::Device(_) => Err(NotPartitioned),
            },
        );
        let Ok(partitioned) = partitioned else { return false };
        let apply = |(): &mut (), share: usize| {
            // Merging a whole share at once allows larger groups. If memory for that is unavailable, the share is
            // merged slice by slice.
            let mut pieces: Vec<&Piece> = Vec::new();
            if pieces.try_reserve_exact(partitioned.share(share).map(<[_]>::len).sum()).is_ok() {
                pieces.extend(partitioned.share(share).flatten());
                self.apply_all(&pieces, staging);
            } else {
                partitioned.share(share).for_each(|pieces| self.apply_all(pieces, staging));
            }
            Ok::<(), Infallible>(())
        };
        let Ok(_) = parallel::map_indexed(threads, partitioned.count(), || (), apply);
        true
    }

    /// Applies deltas: short ones in groups, the others one by one.
    pub(super) fn apply_all<P: Borrow<Piece>>(&self, pieces: &[P], staging: &[Staging]) {
        for alike in pieces.chunk_by(|one, next| is_short(one.borrow()) && is_short(next.borrow())) {
            let mut rest = alike;
            while !rest.is_empty() {
                let mut bytes = 0;
                let fits = |piece: &&P| {
                    bytes += (*piece).borrow().target.len;
                    bytes <= TOGETHER_BYTES_MAX
                };
                let count = rest.iter().take(TOGETHER_MAX).take_while(fits).count().max(1);
                let (some, more) = rest.split_at(count);
                if count == 1 || !self.merge_together(some, staging) {
                    some.iter().for_each(|piece| self.apply(piece.borrow(), staging));
                }
                rest = more;
            }
        }
    }

    /// Merges short deltas after locking all of their allocations. Releasing a lock waits for the stores before it, and
    /// most stores of a short delta miss the cache. In a profile of a replay of 256-byte deltas, this wait took seven
    /// tenths of the time of this module. In a group, the misses overlap.
    ///
    /// Returns `false`, with nothing done, if another thread holds the lock of one of the allocations. A thread that
    /// holds locks never waits for another lock.
    fn merge_together<P: Borrow<Piece>>(&self, pieces: &[P], staging: &[Staging]) -> bool {
        let memories = self.memories_of(pieces);
        let mut blocks: Vec<&HostBlock> = memories.iter().map(|memory| &**memory.block()).collect();
        blocks.sort_unstable_by_key(|block| ptr::from_ref(*block));
        blocks.dedup_by_key(|block| ptr::from_ref(*block));
        let guards: Option<Vec<_>> = blocks.iter().map(|block| block.bytes.try_write()).collect();
        let Some(mut guards) = guards else { return false };
        let mut contents: Vec<&mut [u8]> = guards.iter_mut().map(|bytes| bytes.make_mut()).collect();
        for (piece, memory) in pieces.iter().map(Borrow::borrow).zip(&memories) {
            let Payload::Staging { index, offset } = piece.payload else {
                unreachable!("short ones are staged")
            };
            let at = blocks.binary_search_by_key(&Arc::as_ptr(memory.block()), |block| ptr::from_ref(*block));
            let content = &mut *contents[at.expect("each piece's is among them")];
            merge(&mut content[memory.range(piece.target)], piece.kind, &staging[index][offset..]);
        }
        true
    }

    fn apply(&self, piece: &Piece, staging: &[Staging]) {
        match (piece.payload, piece.kind) {
            (Payload::Staging { index, offset }, _) => self.merge(piece, &staging[index][offset..]),
            (Payload::Device(payload), PieceKind::Dense) => {
                self.copy(part(payload, 0, piece.target.len), piece.target);
            }
            // The payload is buffered, so that only one allocation is locked at a time.
            (Payload::Device(payload), _) => {
                let aside = self.memory(payload.memory).read(payload, <[u8]>::to_vec);
                self.merge(piece, &aside);
            }
        }
    }

    fn merge(&self, piece: &Piece, payload: &[u8]) {
        let memory = self.memory(piece.target.memory);
        memory.write(piece.target, |target| merge(target, piece.kind, payload));
    }
}

/// Returns whether merging a delta takes hardly longer than looking up and locking its allocation.
fn is_short(piece: &Piece) -> bool {
    matches!(piece.payload, Payload::Staging { .. }) && piece.target.len <= SHORT_LEN_MAX
}

/// Merges a delta's bytes into its range.
fn merge(target: &mut [u8], kind: PieceKind, payload: &[u8]) {
    match kind {
        PieceKind::Dense => target.copy_from_slice(&payload[..target.len()]),
        PieceKind::Masked { width, bytes_at } => {
            let count = elements(target.len(), width);
            merge_masked(target, &payload[..count.div_ceil(8)], &payload[bytes_at..], width);
        }
        PieceKind::Sparse { width, count, values_at } => {
            merge_sparse(target, &payload[..4 * count], &payload[values_at..], width);
        }
    }
}

/// Replaces the elements whose bit is 1.
fn merge_masked(target: &mut [u8], mask: &[u8], bytes: &[u8], width: Width) {
    let bytes = &bytes[..target.len()];
    let pairs = target.chunks_exact_mut(width.bytes()).zip(bytes.chunks_exact(width.bytes()));
    for (index, (target, bytes)) in pairs.enumerate() {
        if mask[index / 8] >> (index % 8) & 1 == 1 {
            target.copy_from_slice(bytes);
        }
    }
}

/// Replaces the elements at the indices.
fn merge_sparse(target: &mut [u8], indices: &[u8], values: &[u8], width: Width) {
    let width = width.bytes();
    for (position, index) in indices.chunks_exact(4).enumerate() {
        let index = index_of(index);
        target[index * width..][..width].copy_from_slice(&values[position * width..][..width]);
    }
}
