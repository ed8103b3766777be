//! Pages in host memory: the device that defines what is correct (I11).
//!
//! Every list runs inside `submit`, on the caller's thread, so a fence has passed when it is handed out. The
//! code is plain on purpose: kernels are held to the bytes that these loops produce. Read [`Device`] first.
//! Nothing here outlives the process, so a crash loses all of it; the log brings it back.
//!
//! Locks: the table of memories is locked only to look one up, so a long copy never holds up `allocate`. Each
//! memory has its own lock, or shares that of its slab (`memory.rs`), so lanes run at the same time. No
//! command waits for a lock while it holds another, so commands cannot deadlock. A command that wants several
//! locks takes them only if all are free.

mod memory;

use std::borrow::Borrow;
use std::collections::HashSet;
use std::convert::Infallible;
use std::fmt::Display;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::limits::GROUP_ALIGN;
use remanent_format::{Place, Width};
use zerocopy::FromZeros;

use self::memory::{HostAllocation, HostBlock, HostMemories};
use super::counted::moves;
use super::{
    CallerMemory, Command, CommandList, Device, Fence, INDEX_OUT_OF_BOUNDS, INDEX_TWICE, IndexList, Lane,
    MemoryId, PageBytes, Payload, Pending, Piece, PieceKind, RawStream, Selection, Span, Staging,
    StagingMemory, StagingSpan,
};
use crate::base::aligned_buf::AlignedBuf;
use crate::base::parallel;
use crate::base::sync::Mutex;
use crate::base::sync::locks::RwLock;
use crate::error::{Error, Result};

/// The most deltas that are merged together.
const TOGETHER_MAX: usize = 256;
/// The most bytes of such deltas.
const TOGETHER_BYTES_MAX: u64 = 64 << 10;
/// The longest delta that is merged with others, in bytes: a reader of one of their pages waits for
/// microseconds.
const SHORT_LEN_MAX: u64 = 1024;
/// Bytes of deltas that follow each other in a list from which on several threads apply them.
const WIDE_BYTES_MIN: u64 = 4 << 20;
/// Threads that apply deltas.
const THREADS_MAX: usize = 16;
/// Shares of deltas for each of the threads: one that has done its share takes another.
const SHARES_EACH: usize = 4;
/// Bytes that lie aside at a time, while they are copied or compared. Memory for more could be refused, and a
/// command cannot fail for it.
const PART_LEN_MAX: u64 = 64 << 10;
/// Bytes of bits whose numbers lie aside at a time.
const BITS_AT_ONCE: u64 = 1024;

/// Pages in ordinary memory, whatever place they name; only [`Place::Disk`] is unavailable.
#[derive(Debug)]
pub struct HostDevice {
    memories: RwLock<HostMemories>,
    lanes: [HostLane; Lane::ALL.len()],
    label: String,
    /// Bytes of deltas from which on several threads apply them.
    wide_bytes_min: u64,
}

/// A lane: one list at a time, in the order in which `submit` was called.
#[derive(Debug, Default)]
struct HostLane {
    running: Mutex<()>,
    reached: AtomicU64,
}

impl Default for HostDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl HostDevice {
    /// A device without any page memory yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            memories: RwLock::default(),
            lanes: Default::default(),
            label: "host".to_owned(),
            wide_bytes_min: WIDE_BYTES_MIN,
        }
    }

    /// Has several threads apply deltas from this number of bytes on, so that a test need not be long.
    #[doc(hidden)]
    #[must_use]
    pub fn wide_from(mut self, bytes: u64) -> Self {
        self.wide_bytes_min = bytes;
        self
    }

    /// A device that says in its label why it is not a GPU.
    #[must_use]
    pub fn instead_of_a_gpu(reason: impl Display) -> Self {
        Self { label: format!("host, no GPU: {reason}"), ..Self::new() }
    }

    fn memory(&self, id: MemoryId) -> HostAllocation {
        self.memories.read().get(id).clone()
    }

    /// As [`memory`](Self::memory), for several at one go.
    fn memories_of<P: Borrow<Piece>>(&self, pieces: &[P]) -> Vec<HostAllocation> {
        let memories = self.memories.read();
        pieces.iter().map(|piece| memories.get(piece.borrow().target.memory).clone()).collect()
    }

    fn lane(&self, lane: Lane) -> &HostLane {
        &self.lanes[lane as usize]
    }

    /// Panics if a fence has not passed. Lists run at submit, so such a fence was never handed out, and
    /// waiting for it would never end.
    fn assert_passed(&self, fence: Fence) {
        let reached = self.reached(fence.lane);
        assert!(fence.value <= reached, "{fence:?} was not handed out: the lane is at {reached}");
    }

    fn run(&self, command: Command, staging: &mut [Staging]) {
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

    /// Runs a list's commands in their order. Many deltas in a row are applied by several threads.
    fn run_all(&self, commands: Vec<Command>, staging: &mut [Staging]) {
        let bytes_of = |command: &Command| match command {
            Command::Apply { pieces } => pieces.iter().map(|piece| piece.target.len).sum(),
            _ => 0,
        };
        if commands.iter().map(bytes_of).sum::<u64>() < self.wide_bytes_min {
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

    /// Applies deltas by several threads as if one after the other: each block of memory is one thread's,
    /// which applies its deltas in their order. Returns `false`, with nothing done, if one thread is to apply
    /// them.
    fn apply_by_threads(&self, rows: &[Vec<Piece>], staging: &[Staging]) -> bool {
        let threads = parallel::threads(THREADS_MAX);
        let shares = if threads > 1 { self.shares(rows, threads * SHARES_EACH) } else { None };
        let Some(shares) = shares else { return false };
        let apply = |share: Vec<&Piece>| {
            self.apply_all(&share, staging);
            Ok::<(), Infallible>(())
        };
        let Ok(_) = parallel::for_each(threads, shares, apply);
        true
    }

    /// Shares of deltas, of which none has a block of memory that another one has. `None` if a delta lies in
    /// page memory, which another thread may change, or if there is no memory.
    fn shares<'p>(&self, rows: &'p [Vec<Piece>], count: usize) -> Option<Vec<Vec<&'p Piece>>> {
        let mut shares: Vec<Vec<&Piece>> = vec![Vec::new(); count];
        let memories = self.memories.read();
        for piece in rows.iter().flatten() {
            let Payload::Staging { .. } = piece.payload else { return None };
            let block = Arc::as_ptr(memories.get(piece.target.memory).block()).addr() as u64;
            // Blocks lie side by side, at multiples of one distance.
            let share = &mut shares[(block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % count];
            share.try_reserve(1).ok()?;
            share.push(piece);
        }
        Some(shares)
    }

    /// Applies deltas: short ones many at a time, the others one by one.
    fn apply_all<P: Borrow<Piece>>(&self, pieces: &[P], staging: &[Staging]) {
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

    /// Merges short deltas, all of whose memories are locked first. A lock that is let go waits until the
    /// stores before it are done, and a short delta's stores mostly miss the cache: in a profile of the
    /// replay of 256-byte deltas seven tenths of the time spent here were this wait. Together the misses
    /// overlap.
    ///
    /// Returns `false`, with nothing done, if one of the memories is in use: a thread that holds locks waits
    /// for none.
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
            // The payload is copied aside, so that only one memory is locked at a time.
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

    /// Copies through a small area of its own, so that only one memory is locked at a time.
    fn copy(&self, source: Span, target: Span) {
        assert_eq!(source.len, target.len, "a copy between ranges of different lengths");
        assert!(!overlap(source, target), "a copy between overlapping ranges: {source:?}, {target:?}");
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

    /// Copies through a small area of its own, so that only one memory is locked at a time.
    fn diff(&self, left: Span, right: Span, width: Width, target: Span) {
        let (left_memory, right_memory) = (self.memory(left.memory), self.memory(right.memory));
        let clashes = overlap(left, target) || overlap(right, target);
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
            let mut index = 0;
            left_memory.read(part(left, done, part_len), |left| aside.extend_from_slice(left));
            right_memory.read(part(right, done, part_len), |right| {
                let pairs = aside.chunks_exact(width.bytes()).zip(right.chunks_exact(width.bytes()));
                for (left, right) in pairs {
                    bits[index / 8] |= u8::from(left != right) << (index % 8);
                    index += 1;
                }
            });
            // A part is a whole number of bytes of bits.
            self.upload(&bits, part(target, done / width.bytes() as u64 / 8, bits.len() as u64));
        }
    }

    /// Numbers bits into memory of its own, so that only one memory is locked at a time.
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
                // Bounds are checked for all of the room.
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

    /// Picks into memory of its own, so that only one memory is locked at a time.
    fn pick(&self, source: Span, width: Width, indices: &[u8], target: Span) {
        let bound = elements(source.len as usize, width);
        assert_eq!(indices.len(), 4 * elements(target.len as usize, width), "one index for each element");
        assert!(!overlap(source, target), "picked from and to overlapping ranges: {source:?}, {target:?}");
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
            let mut seen = HashSet::new();
            let mut wrong = 0;
            memory.read(*indices, |bytes| {
                for index in bytes.chunks_exact(4).map(index_of) {
                    if index as u64 >= *bound {
                        wrong |= INDEX_OUT_OF_BOUNDS;
                    } else if !seen.insert(index) {
                        wrong |= INDEX_TWICE;
                    }
                }
            });
            found.copy_from_slice(&wrong.to_le_bytes());
        }
    }
}

impl Device for HostDevice {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn allocate(&self, place: Place, len: u64) -> Result<MemoryId> {
        match place {
            Place::Device(_) | Place::Pinned | Place::Host | Place::Unified => {}
            _ => {
                let reason = "the host device keeps pages in host memory only";
                return Err(Error::PlaceUnavailable { place, reason });
            }
        }
        if HostAllocation::is_short(len) {
            return self.memories.write().insert_short(place, len);
        }
        let memory = HostAllocation::long(place, len)?;
        Ok(self.memories.write().insert(memory))
    }

    /// Only long memory is zeros. A slot of a slab may hold bytes of the page before. A long memory is the
    /// system's, which zeroes it when it is first touched.
    fn allocates_zeros(&self, _place: Place, len: u64) -> bool {
        !HostAllocation::is_short(len)
    }

    fn release(&self, memory: MemoryId) -> Result<()> {
        // Taken out under the lock, freed after it.
        let released = self.memories.write().remove(memory);
        drop(released);
        Ok(())
    }

    fn staging(&self, len: usize) -> Result<Staging> {
        let out_of_memory = || Error::OutOfMemory { place: Place::Host, len: len as u64 };
        // No direct read fills less than a block: short staging need not begin where one does.
        if len < GROUP_ALIGN as usize {
            return Ok(Staging::new(u8::new_vec_zeroed(len).map_err(|_| out_of_memory())?));
        }
        Ok(Staging::new(HostStaging(AlignedBuf::try_new(len).ok_or_else(out_of_memory)?)))
    }

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        let CommandList { commands, mut staging } = list;
        let lane_state = self.lane(lane);
        let running = lane_state.running.lock();
        self.run_all(commands, &mut staging);
        // The counter changes only here, and only under the lane's lock. Release: a thread that sees the
        // fence as reached sees the bytes.
        let value = lane_state.reached.load(Ordering::Relaxed) + 1;
        lane_state.reached.store(value, Ordering::Release);
        drop(running);
        Ok(Pending::new(Fence { lane, value }, Arc::new(Mutex::new(staging))))
    }

    fn reached(&self, lane: Lane) -> u64 {
        self.lane(lane).reached.load(Ordering::Acquire)
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        self.assert_passed(fence);
        Ok(())
    }

    fn after(&self, _lane: Lane, fence: Fence) -> Result<()> {
        self.assert_passed(fence);
        Ok(())
    }

    fn wait_external(&self, _lane: Lane, stream: RawStream) -> Result<()> {
        Err(no_streams(stream))
    }

    fn signal_external(&self, stream: RawStream, _fence: Fence) -> Result<()> {
        Err(no_streams(stream))
    }

    fn wait_stream(&self, stream: RawStream) -> Result<()> {
        Err(no_streams(stream))
    }

    fn address(&self, _memory: MemoryId) -> Option<u64> {
        None
    }

    fn reads_now(&self) -> bool {
        true
    }

    fn read_now(&self, memory: MemoryId, offset: u64, out: &mut [u8]) -> bool {
        let found = self.memories.read().find(memory).cloned();
        let Some(found) = found.filter(|found| found.has(offset, out.len() as u64)) else { return false };
        found.read(Span { memory, offset, len: out.len() as u64 }, |bytes| out.copy_from_slice(bytes));
        true
    }

    fn bytes(&self, memory: MemoryId) -> Option<PageBytes> {
        let bytes = self.memory(memory).share();
        Some(bytes)
    }

    fn adopt(&self, memory: &CallerMemory) -> Result<(MemoryId, Place)> {
        let Ok(bytes) = memory.owner().downcast::<CallerBytes>() else {
            let reason = "it is a GPU's, and pages live in host memory here".to_owned();
            return Err(Error::MemoryRefused { len: memory.byte_len(), reason });
        };
        let adopted = self.memories.write().insert(HostAllocation::of(bytes.block.clone(), bytes.place));
        Ok((adopted, bytes.place))
    }

    fn place_of(&self, memory: MemoryId) -> Place {
        self.memories.read().get(memory).place()
    }

    /// Under one lock: lists name thousands of memories.
    fn tell_moves(&self, commands: &[Command], tell: &mut dyn FnMut(Place, Place, u64)) {
        let memories = self.memories.read();
        moves(commands, |memory| memories.get(memory).place(), tell);
    }

    fn alias(&self, span: Span) -> Result<MemoryId> {
        let mut memories = self.memories.write();
        let alias = memories.get(span.memory).alias(span);
        Ok(memories.insert(alias))
    }

    fn rename(&self, memory: MemoryId) -> Result<MemoryId> {
        let mut memories = self.memories.write();
        // A thread that found it by its old name may be reading it now.
        let block = memories.get(memory).block().clone();
        let renamed = memories.rename(memory);
        drop(memories);
        drop(block.bytes.write());
        Ok(renamed)
    }

    fn origin(&self, memory: MemoryId) -> (u64, u64) {
        let memory = self.memory(memory);
        (Arc::as_ptr(memory.block()).addr() as u64, memory.extent().0)
    }
}

/// The owner of host memory that stands for a caller's.
struct CallerBytes {
    block: Arc<HostBlock>,
    place: Place,
}

impl CallerMemory {
    /// Bytes of the host that stand for memory of the caller's in this place, for a store whose pages live in
    /// host memory: so code that brings its own memory runs, and is tested, without a GPU. A GPU refuses
    /// them. [`Store::caller_bytes`](crate::Store::caller_bytes) of the same value reads them back.
    ///
    /// ```
    /// use remanent::{CallerMemory, Options, Place, Store};
    /// # use remanent::DeviceChoice;
    /// # let options = Options::default().device(DeviceChoice::Host);
    /// let store = Store::temporary(options)?;
    /// let tensor = CallerMemory::from_vec(b"its bytes".to_vec(), Place::Device(0));
    /// let bytes = store.caller_bytes(&tensor)?;
    /// let mut found = [0; 5];
    /// bytes.read(4, &mut found)?;
    /// assert_eq!(&found, b"bytes");
    /// # Ok::<(), remanent::Error>(())
    /// ```
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>, place: Place) -> Self {
        let block = Arc::new(HostBlock::of(bytes));
        let len = block.byte_len();
        // No address: the bytes may move when they are changed, and only the host device finds them.
        Self { address: 0, len, owner: Arc::new(CallerBytes { block, place }) }
    }
}

fn no_streams(stream: RawStream) -> Error {
    Error::StreamRefused { stream: stream.handle(), reason: "pages live in host memory, not on a GPU" }
}

/// Staging that direct reads fill as it lies.
struct HostStaging(AlignedBuf);

impl StagingMemory for HostStaging {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// The numbers of the bits that are set, lowest first, where the first one has this number.
fn set_bits(bits: &[u8], first: u32) -> Vec<u32> {
    let is_set = |bit: &u32| bits[*bit as usize / 8] >> (bit % 8) & 1 == 1;
    (0..8 * bits.len() as u32).filter(is_set).map(|bit| first + bit).collect()
}

/// Whether a delta takes hardly longer than finding and locking its memory.
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

/// The number of a little-endian u32.
fn index_of(bytes: &[u8]) -> usize {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize
}

/// The number of elements in a range; panics if the last one is not whole.
fn elements(len: usize, width: Width) -> usize {
    assert_eq!(len % width.bytes(), 0, "{len} bytes are no whole number of elements");
    len / width.bytes()
}

fn staged(staging: &[Staging], span: StagingSpan) -> &[u8] {
    &staging[span.index][span.offset..][..span.len]
}

fn staged_mut(staging: &mut [Staging], span: StagingSpan) -> &mut [u8] {
    &mut staging[span.index][span.offset..][..span.len]
}

/// The span of `len` bytes from `offset` in another span; panics if they do not lie in it.
fn part(span: Span, offset: u64, len: u64) -> Span {
    let within = offset.checked_add(len).is_some_and(|end| end <= span.len);
    assert!(within, "bytes {offset}..+{len} are not within {span:?}");
    Span { memory: span.memory, offset: span.offset + offset, len }
}

/// The starts of the parts of `len` bytes that lie aside one after the other. At least one, so that bounds
/// are checked for empty ranges too.
fn starts(len: u64) -> impl Iterator<Item = u64> {
    (0..len.max(1)).step_by(PART_LEN_MAX as usize)
}

fn overlap(one: Span, other: Span) -> bool {
    let before = |a: Span, b: Span| a.offset.saturating_add(a.len) <= b.offset;
    one.memory == other.memory && !before(one, other) && !before(other, one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_reads_fill_staging_as_it_lies() {
        let device = HostDevice::new();
        for len in [4096, 100_000, 4 << 20] {
            let staging = device.staging(len).unwrap();
            assert_eq!((staging.len(), staging.as_ptr().addr() % 4096), (len, 0));
        }
        // No direct read fills less than a block.
        assert!([0, 1, 4095].iter().all(|len| *device.staging(*len).unwrap() == *vec![0; *len]));
        let Err(error) = device.staging(usize::MAX) else { panic!("that much cannot be had") };
        assert!(matches!(error, Error::OutOfMemory { place: Place::Host, .. }), "{error}");
    }

    /// Deltas of every kind over a few pages, long ones and some that share a slab, in commands with a fill
    /// between some of them.
    #[test]
    fn many_threads_leave_the_bytes_that_one_leaves() {
        let (one, many) = (HostDevice::new().wide_from(u64::MAX), HostDevice::new().wide_from(1));
        let lens = [64, 200, 900, 5000, 70_000, 200_000];
        let memories = |device: &HostDevice| lens.map(|len| device.allocate(Place::Host, len).unwrap());
        let pages = memories(&one);
        assert_eq!(pages, memories(&many), "the names that both give");
        let mut drawn = 5_u64;
        let mut random = |below: u64| {
            drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (drawn >> 33) % below
        };
        for round in 0..40 {
            let mut commands = Vec::new();
            let mut payload = one.staging(256 << 10).unwrap();
            payload.iter_mut().for_each(|byte| *byte = random(256) as u8);
            for _ in 0..6 {
                let mut pieces = Vec::new();
                for _ in 0..100 {
                    // Mostly the first bytes of a page: there each delta meets the one before.
                    let at = random(lens.len() as u64) as usize;
                    let len = (8 + 8 * random(1 + lens[at] / 16)).min(lens[at]);
                    let offset = random(3) * random(1 + (lens[at] - len) / 2).min(16);
                    let (target, from) = (Span { memory: pages[at], offset, len }, random(1000) as usize);
                    let payload = Payload::Staging { index: 0, offset: 4 * from };
                    let is_masked = len < 10_000 && random(3) == 0;
                    let masked = PieceKind::Masked { width: Width::W1, bytes_at: len.div_ceil(8) as usize };
                    let kind = if is_masked { masked } else { PieceKind::Dense };
                    pieces.push(Piece { target, payload, kind });
                }
                commands.push(Command::Apply { pieces });
                if random(3) == 0 {
                    let target = Span { memory: pages[3], offset: 0, len: 3000 };
                    commands.push(Command::Fill { target, pattern: [round; 16], width: Width::W1 });
                }
            }
            for device in [&one, &many] {
                let mut staging = device.staging(payload.len()).unwrap();
                staging.copy_from_slice(&payload);
                let list = CommandList { commands: commands.clone(), staging: vec![staging] };
                device.submit(Lane::Apply, list).unwrap();
            }
            for (page, len) in pages.iter().zip(lens) {
                let bytes = |device: &HostDevice| device.bytes(*page).unwrap();
                let (one, many) = (bytes(&one), bytes(&many));
                assert!((*one).as_ref() == (*many).as_ref(), "the page of {len} bytes in round {round}");
            }
        }
    }
}
