//! The commands of a list, implemented as loops over bytes. Deltas are in `deltas.rs`.
//!
//! No command waits for a lock while it holds another one: bytes copied between allocations are buffered.

use std::collections::HashSet;
use std::convert::Infallible;

use remanent_format::Width;

use super::super::digests::{check_digests, digest};
use super::super::{
    Command, DIGEST_CHUNK_LEN, DIGEST_LEN, INDEX_OUT_OF_BOUNDS, INDEX_TWICE, IndexList, Selection, Span,
    Staging, StagingSpan,
};
use super::HostDevice;
use crate::base::parallel;

/// The number of bytes buffered at a time during a copy or comparison. The allocation of a larger buffer could fail,
/// and a command cannot report that.
const PART_LEN_MAX: u64 = 64 << 10;
/// The number of bytes of a bitmap whose set bits are buffered at a time.
const BITS_AT_ONCE: u64 = 1024;

/// The minimum number of chunks per thread for digests. Starting a thread takes as long as digesting some chunks.
const DIGESTED_PER_THREAD: usize = 32;
/// The number of chunks whose digests are buffered at a time.
const DIGESTED_AT_ONCE: usize = 1024;

impl HostDevice {
    /// Runs one command.
    pub(super) fn run(&self, command: Command, staging: &mut [Staging]) {
        match command {
            Command::Upload { source, target } => self.upload(staged(staging, source), target),
            Command::Download { source, target } => self.download(source, staged_mut(staging, target)),
            Command::Apply { pieces } => self.apply_all(&pieces, staging),
            Command::Copy { source, target } => self.copy(source, target),
            Command::Fill { target, pattern, width } => self.fill(target, pattern, width),
            Command::Gather { sources, target } => {
                for (source, offset) in sources {
                    self.copy(source, part(target, offset, source.len));
                }
            }
            Command::Scatter { source, targets } => {
                for (offset, target) in targets {
                    self.copy(part(source, offset, target.len), target);
                }
            }
            Command::Diff { left, right, width, target } => self.diff(left, right, width, target),
            Command::Select { bitmaps, target } => self.select(&bitmaps, staged_mut(staging, target)),
            Command::Crc { sources, target } => self.crc(&sources, staged_mut(staging, target)),
            Command::Digest { sources, key, target } => {
                check_digests(&sources, key, target);
                self.digest(&sources, key, staged_mut(staging, target));
            }
            Command::Pick { source, width, indices, target } => {
                self.pick(source, width, staged(staging, indices), target);
            }
            Command::Validate { lists, target } => self.validate(&lists, staged_mut(staging, target)),
        }
    }

    fn upload(&self, source: &[u8], target: Span) {
        let memory = self.memory(target.memory);
        memory.write(target, |target| target.copy_from_slice(source));
    }

    fn download(&self, source: Span, target: &mut [u8]) {
        let memory = self.memory(source.memory);
        memory.read(source, |source| target.copy_from_slice(source));
    }

    /// Copies through a small buffer, so that only one allocation is locked at a time.
    pub(super) fn copy(&self, source: Span, target: Span) {
        assert_eq!(source.len, target.len, "a copy between ranges of different lengths");
        assert!(!source.overlaps(target), "a copy between overlapping ranges: {source:?}, {target:?}");
        let (source_memory, target_memory) = (self.memory(source.memory), self.memory(target.memory));
        let mut aside = Vec::new();
        for done in starts(source.len) {
            let part_len = PART_LEN_MAX.min(source.len - done);
            aside.clear();
            source_memory.read(part(source, done, part_len), |source| aside.extend_from_slice(source));
            target_memory.write(part(target, done, part_len), |target| target.copy_from_slice(&aside));
        }
    }

    fn fill(&self, target: Span, pattern: [u8; 16], width: Width) {
        let memory = self.memory(target.memory);
        // Every width divides 16, so sixteen bytes of repeated pattern tile the target.
        let tile: [u8; 16] = std::array::from_fn(|i| pattern[i % width.bytes()]);
        memory.write(target, |target| {
            let _whole = elements(target.len(), width);
            let mut tiles = target.chunks_exact_mut(tile.len());
            tiles.by_ref().for_each(|chunk| chunk.copy_from_slice(&tile));
            let rest = tiles.into_remainder();
            rest.copy_from_slice(&tile[..rest.len()]);
        });
    }

    /// Compares through small buffers, so that only one allocation is locked at a time.
    fn diff(&self, left: Span, right: Span, width: Width, target: Span) {
        let (left_memory, right_memory) = (self.memory(left.memory), self.memory(right.memory));
        let clashes = left.overlaps(target) || right.overlaps(target);
        assert!(!clashes, "a diff to a range that it compares: {left:?}, {right:?}, {target:?}");
        assert_eq!(left.len, right.len, "a diff of ranges of different lengths");
        let bits_len = elements(left.len as usize, width).div_ceil(8);
        assert_eq!(target.len, bits_len as u64, "the length of a diff's target");
        let (mut aside, mut bits) = (Vec::new(), Vec::new());
        for done in starts(left.len) {
            let part_len = PART_LEN_MAX.min(left.len - done);
            aside.clear();
            bits.clear();
            bits.resize(elements(part_len as usize, width).div_ceil(8), 0);
            left_memory.read(part(left, done, part_len), |left| aside.extend_from_slice(left));
            right_memory.read(part(right, done, part_len), |right| match width {
                Width::W1 => mark_differing::<1>(&aside, right, &mut bits),
                Width::W2 => mark_differing::<2>(&aside, right, &mut bits),
                Width::W4 => mark_differing::<4>(&aside, right, &mut bits),
                Width::W8 => mark_differing::<8>(&aside, right, &mut bits),
                Width::W16 => mark_differing::<16>(&aside, right, &mut bits),
            });
            // The bits of a part fill a whole number of bytes.
            self.upload(&bits, part(target, done / width.bytes() as u64 / 8, bits.len() as u64));
        }
    }

    /// Buffers the indices, so that only one allocation is locked at a time.
    fn select(&self, bitmaps: &[Selection], target: &mut [u8]) {
        assert_eq!(target.len(), 4 * bitmaps.len(), "the length of a selection's target");
        for (selection, found) in bitmaps.iter().zip(target.chunks_exact_mut(4)) {
            let Selection { bits, indices } = *selection;
            selection.check();
            let (bits_memory, memory) = (self.memory(bits.memory), self.memory(indices.memory));
            let mut count = 0;
            for done in (0..bits.len).step_by(BITS_AT_ONCE as usize) {
                let here = part(bits, done, BITS_AT_ONCE.min(bits.len - done));
                let set = bits_memory.read(here, |bits| set_bits(bits, 8 * done as u32));
                let room = set.len().min((indices.len as usize / 4).saturating_sub(count));
                let numbers: Vec<u8> = set[..room].iter().flat_map(|index| index.to_le_bytes()).collect();
                // All indices are counted, but only those that fit in the target are written.
                let at = 4 * count.min(indices.len as usize / 4);
                memory.write(indices, |indices| indices[at..at + numbers.len()].copy_from_slice(&numbers));
                count += set.len();
            }
            found.copy_from_slice(&(count as u32).to_le_bytes());
        }
    }

    fn crc(&self, sources: &[Span], target: &mut [u8]) {
        assert_eq!(target.len(), 4 * sources.len(), "the length of a checksum command's target");
        for (source, sum) in sources.iter().zip(target.chunks_exact_mut(4)) {
            let memory = self.memory(source.memory);
            sum.copy_from_slice(&memory.read(*source, crc32fast::hash).to_le_bytes());
        }
    }

    fn digest(&self, sources: &[Span], key: Span, target: &mut [u8]) {
        // The key is copied first, so that only one allocation is locked at a time.
        let mut key_bytes = Vec::new();
        self.memory(key.memory).read(key, |key| key_bytes.extend_from_slice(key));
        let mut digests = target.chunks_exact_mut(DIGEST_LEN);
        for source in sources {
            let memory = self.memory(source.memory);
            memory.read(*source, |bytes| {
                for bytes in bytes.chunks(DIGESTED_AT_ONCE * DIGEST_CHUNK_LEN as usize) {
                    let chunk = |index: usize| {
                        let rest = &bytes[index * DIGEST_CHUNK_LEN as usize..];
                        &rest[..rest.len().min(DIGEST_CHUNK_LEN as usize)]
                    };
                    let count = bytes.len().div_ceil(DIGEST_CHUNK_LEN as usize);
                    let of = |(): &mut (), index| Ok::<_, Infallible>(digest(chunk(index), &key_bytes));
                    let threads = parallel::threads(count / DIGESTED_PER_THREAD + 1);
                    let Ok(found) = parallel::map_indexed(threads, count, || (), of);
                    found.iter().zip(&mut digests).for_each(|(digest, out)| out.copy_from_slice(digest));
                }
            });
        }
    }

    /// Picks into a buffer, so that only one allocation is locked at a time.
    fn pick(&self, source: Span, width: Width, indices: &[u8], target: Span) {
        let bound = elements(source.len as usize, width);
        assert_eq!(indices.len(), 4 * elements(target.len as usize, width), "one index for each element");
        assert!(!source.overlaps(target), "picked from and to overlapping ranges: {source:?}, {target:?}");
        let at_once = PART_LEN_MAX as usize / width.bytes();
        let mut picked = Vec::with_capacity(at_once.min(indices.len() / 4) * width.bytes());
        let memory = self.memory(source.memory);
        let mut done = 0;
        for indices in indices.chunks(4 * at_once) {
            picked.clear();
            memory.read(source, |source| {
                for index in indices.chunks_exact(4).map(index_of) {
                    assert!(index < bound, "an index that is not within its range");
                    picked.extend_from_slice(&source[index * width.bytes()..][..width.bytes()]);
                }
            });
            self.upload(&picked, part(target, done, picked.len() as u64));
            done += picked.len() as u64;
        }
    }

    fn validate(&self, lists: &[IndexList], target: &mut [u8]) {
        assert_eq!(target.len(), 4 * lists.len(), "the length of a validation's target");
        for (IndexList { indices, bound }, found) in lists.iter().zip(target.chunks_exact_mut(4)) {
            assert!(indices.offset.is_multiple_of(4) && indices.len.is_multiple_of(4), "whole indices");
            let memory = self.memory(indices.memory);
            let wrong = memory.read(*indices, |bytes| faults(bytes, *bound));
            found.copy_from_slice(&wrong.to_le_bytes());
        }
    }
}

/// Returns the flags that apply to the indices, as `Command::Validate` defines them.
fn faults(indices: &[u8], bound: u64) -> u32 {
    let all = || indices.chunks_exact(4).map(index_of);
    let mut wrong = if all().any(|index| index as u64 >= bound) { INDEX_OUT_OF_BOUNDS } else { 0 };
    // If every index is greater than the one before, none occurs twice.
    if !all().is_sorted_by(|before, after| before < after) {
        let mut seen = HashSet::new();
        if all().any(|index| (index as u64) < bound && !seen.insert(index)) {
            wrong |= INDEX_TWICE;
        }
    }
    wrong
}

/// Sets the bit of each element of `W` bytes that differs. All bits must be 0 before the call.
fn mark_differing<const W: usize>(left: &[u8], right: &[u8], bits: &mut [u8]) {
    // The bits of eight elements share a byte, and most elements are equal.
    let groups = left.chunks(8 * W).zip(right.chunks(8 * W));
    for ((left, right), bits) in groups.zip(bits) {
        if left != right {
            let pairs = left.chunks_exact(W).zip(right.chunks_exact(W));
            *bits = pairs.enumerate().map(|(bit, (left, right))| u8::from(left != right) << bit).sum();
        }
    }
}

/// Returns the indices of the set bits, in rising order. The first bit of `bits` has index `first`.
fn set_bits(bits: &[u8], first: u32) -> Vec<u32> {
    let mut numbers = Vec::new();
    for (index, &byte) in bits.iter().enumerate() {
        let mut left = byte;
        while left != 0 {
            numbers.push(first + 8 * index as u32 + left.trailing_zeros());
            left &= left - 1;
        }
    }
    numbers
}

/// Decodes a little-endian u32.
pub(super) fn index_of(bytes: &[u8]) -> usize {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize
}

/// Returns the number of elements in `len` bytes. Panics if the last element is incomplete.
pub(super) fn elements(len: usize, width: Width) -> usize {
    assert_eq!(len % width.bytes(), 0, "{len} bytes are not a whole number of elements");
    len / width.bytes()
}

fn staged(staging: &[Staging], span: StagingSpan) -> &[u8] {
    &staging[span.index][span.offset..][..span.len]
}

fn staged_mut(staging: &mut [Staging], span: StagingSpan) -> &mut [u8] {
    &mut staging[span.index][span.offset..][..span.len]
}

/// Returns the sub-span of `len` bytes at `offset`. Panics if it exceeds the span.
pub(super) fn part(span: Span, offset: u64, len: u64) -> Span {
    let within = offset.checked_add(len).is_some_and(|end| end <= span.len);
    assert!(within, "bytes {offset}..+{len} are not within {span:?}");
    Span { memory: span.memory, offset: span.offset + offset, len }
}

/// Returns the start offsets of the parts in which `len` bytes are buffered. An empty range has one part, so that its
/// bounds are checked too.
fn starts(len: u64) -> impl Iterator<Item = u64> {
    (0..len.max(1)).step_by(PART_LEN_MAX as usize)
}
