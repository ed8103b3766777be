//! Transfers pages' bytes to the host without delaying deltas.
//!
//! A long transfer to the host takes milliseconds. In [`Lane::Apply`], deltas queued after it would wait that long.
//! Therefore, that lane only copies the bytes to separate device memory, which takes 30 µs for 64 MiB on an H200.
//! Another lane then transfers these copies to the host. If the budget has no room for the copies, the bytes are
//! transferred in [`Lane::Apply`]: deltas wait longer, but a store that fills its budget can still be read and
//! snapshotted.
//!
//! The caller allocates the staging buffer before the bytes are captured. A GPU pins memory at 1.5 GB/s, so the
//! allocation can take seconds, during which neither deltas nor other readers should wait.

use std::ops::Range;
use std::sync::Arc;

use crc32fast::Hasher;
use remanent_format::{Place, Width};

use super::Turn;
use crate::base::allocation::{collected, push};
use crate::device::sums::{sums_in, sums_len, transfer_corrupted};
use crate::device::{Command, CommandList, EngineDevice, Fence, Lane, Pending, Span, StagingSpan};
use crate::error::Result;
use crate::memory::arena::{Arena, CopyDirection, FileTarget, PageMemory};
use crate::memory::staging::{StagingBuf, StagingPool};

/// A transfer of captured bytes to the host. The bytes were captured between two batches.
pub(crate) struct Drain {
    /// The number of bytes to transfer to the staging buffer.
    len: usize,
    copies: CopySource,
    /// The ranges whose checksums are compared after the transfer, or `None` if no checksums are computed.
    summed: Option<SummedCopies>,
}

/// The source of the captured bytes of a [`Drain`].
enum CopySource {
    /// The bytes were copied to separate device memory. They are transferred to this staging buffer, starting at this
    /// offset.
    Aside(AsideBuffer, StagingBuf, u64),
    /// The transfer to the host is in flight.
    UnderWay(Pending),
}

/// Separate device memory to which bytes of pages were copied, to be transferred later.
struct AsideBuffer {
    /// The memory of the copies, in order.
    pieces: Vec<PageMemory>,
    /// The fence after which the copies are complete.
    gathered: Fence,
    arena: Arc<Arena>,
}

/// Bytes that were captured between two batches for a chunk of a snapshot.
pub(crate) enum GatheredBytes {
    /// The bytes were copied to separate device memory, and the destination of their transfer is still to be chosen.
    Aside(CopiesAside),
    /// There was no room for copies, so the bytes are being transferred to a staging buffer in batch order.
    Staged(Drain),
}

/// Copies, in separate device memory, of page ranges for one chunk of a snapshot.
pub(crate) struct CopiesAside {
    aside: AsideBuffer,
    /// The range within the chunk from the start of the first copy to the end of the last copy.
    chunk_range: Range<u64>,
    summed: SummedCopies,
}

/// The ranges whose checksums are compared to detect bytes that change in transit. Each range is a source, or a part of
/// a source that was divided between two pieces of memory.
struct SummedCopies {
    /// The location of each range's copy on the device.
    spans: Vec<Span>,
    /// Whether the bytes cross a bus, so that the device must compute checksums as well.
    crosses_bus: bool,
    /// The range of the staging buffer in which each range arrives, and the index of its source.
    arrivals: Vec<(Range<usize>, usize)>,
    /// The number of sources.
    sources: usize,
    pool: Arc<StagingPool>,
}

/// Captured bytes after their transfer to the host.
pub(crate) struct Drained {
    /// The staging buffer with the arrived bytes, each source at its offset.
    pub bytes: StagingBuf,
    /// The CRC-32 of each source, in order, if requested. For bytes that crossed a bus, these checksums equal the
    /// checksums that the device computed.
    pub sums: Vec<Hasher>,
}

impl Drained {
    /// Returns the CRC-32 of the concatenation of all sources.
    pub fn sum(&self) -> u32 {
        let mut whole = Hasher::new();
        self.sums.iter().for_each(|sum| whole.combine(sum));
        whole.finalize()
    }
}

impl Turn<'_> {
    /// Captures the current contents of ranges of pages, each with its offset among `len` bytes. The ranges are copied
    /// to device memory in `place`, and then transferred to `staged`, after the first `from` bytes of `staged`. Bytes
    /// that no range covers are unspecified.
    ///
    /// If `sums` is present, checksums of each range are computed on the device and again after the transfer. The
    /// device computes them from the copy instead of the page, so that deltas do not wait.
    ///
    /// # Errors
    /// A device error; the earlier error that lost the pages' bytes; `OutOfMemory`.
    pub fn drain(
        &self,
        place: Place,
        sources: Vec<(Span, u64)>,
        len: u64,
        staged: StagingBuf,
        from: u64,
        sums: Option<&Arc<StagingPool>>,
    ) -> Result<Drain> {
        assert!(from + len <= staged.len() as u64);
        self.intact()?;
        let Some(pieces) = self.arena.try_scratch(place, len)? else {
            return self.download(sources, staged, from, sums);
        };
        let (aside, summed) = self.copy_aside(pieces, sources, from, sums)?;
        Ok(Drain { len: staged.len(), copies: CopySource::Aside(aside, staged, from), summed })
    }

    /// Captures ranges like [`drain`](Self::drain), but transfers them from page memory in batch order. Deltas wait
    /// until all bytes are at the host.
    ///
    /// # Errors
    /// Same as `drain`.
    pub fn drain_in_order(
        &self,
        sources: Vec<(Span, u64)>,
        staged: StagingBuf,
        from: u64,
        sums: Option<&Arc<StagingPool>>,
    ) -> Result<Drain> {
        self.intact()?;
        self.download(sources, staged, from, sums)
    }

    /// Captures ranges like [`drain`](Self::drain), for a chunk of `chunk_len` bytes whose destination is not
    /// chosen yet. The ranges are only copied to separate device memory. If there is no room for the copies,
    /// this method allocates a staging buffer of the chunk's length, and transfers the ranges to it in batch
    /// order. Later deltas then wait for the allocation and the transfer.
    ///
    /// # Errors
    /// Same as `drain`.
    pub fn gather_aside(
        &self,
        place: Place,
        sources: Vec<(Span, u64)>,
        len: u64,
        from: u64,
        chunk_len: u64,
        pool: &Arc<StagingPool>,
    ) -> Result<GatheredBytes> {
        self.intact()?;
        let Some(pieces) = self.arena.try_scratch(place, len)? else {
            let staged = pool.take(chunk_len as usize)?;
            return Ok(GatheredBytes::Staged(self.download(sources, staged, from, Some(pool))?));
        };
        let (aside, summed) = self.copy_aside(pieces, sources, from, Some(pool))?;
        let summed = summed.expect("they were asked for");
        Ok(GatheredBytes::Aside(CopiesAside { aside, chunk_range: from..from + len, summed }))
    }

    fn copy_aside(
        &self,
        pieces: Vec<PageMemory>,
        sources: Vec<(Span, u64)>,
        from: u64,
        sums: Option<&Arc<StagingPool>>,
    ) -> Result<(AsideBuffer, Option<SummedCopies>)> {
        let mut summed = sums.map(|pool| SummedCopies::new(self.device, pool, sources.len()));
        let queued = divide(&pieces, sources, from, &mut summed)
            .and_then(|commands| self.submit(CommandList { commands, staging: Vec::new() }));
        match queued {
            Ok(pending) => {
                let (gathered, arena) = (pending.fence(), self.arena.clone());
                Ok((AsideBuffer { pieces, gathered, arena }, summed))
            }
            Err(error) => {
                pieces.into_iter().try_for_each(|piece| self.arena.discard(piece))?;
                Err(error)
            }
        }
    }

    fn download(
        &self,
        sources: Vec<(Span, u64)>,
        staging: StagingBuf,
        from: u64,
        sums: Option<&Arc<StagingPool>>,
    ) -> Result<Drain> {
        let len = staging.len();
        assert!(sources.iter().all(|(source, at)| from + at + source.len <= len as u64), "it all fits");
        let mut summed = sums.map(|pool| SummedCopies::new(self.device, pool, sources.len()));
        if let Some(summed) = &mut summed {
            for (index, (source, at)) in sources.iter().enumerate() {
                summed.add(*source, (from + at) as usize, index)?;
            }
        }
        let download = |(source, at): (Span, u64)| {
            let target = StagingSpan { index: 0, offset: (from + at) as usize, len: source.len as usize };
            Command::Download { source, target }
        };
        let commands = collected(sources.into_iter().map(download))?;
        let list = with_sums(CommandList { commands, staging: vec![staging.into_staging()] }, &summed)?;
        Ok(Drain { len, copies: CopySource::UnderWay(self.submit(list)?), summed })
    }
}

impl Drain {
    /// Returns the fence after the store's last use of the pages' memory.
    pub fn fence(&self) -> Fence {
        match &self.copies {
            CopySource::Aside(aside, ..) => aside.gathered,
            CopySource::UnderWay(pending) => pending.fence(),
        }
    }

    /// Waits until the bytes are at the host, and returns them with their checksums if requested. Must not be called on
    /// the applier's thread.
    ///
    /// # Errors
    /// A device error, including the error for arrived bytes that differ from the bytes that the device sent.
    pub fn finish(self, device: &EngineDevice) -> Result<Drained> {
        self.finish_once(device)?.ok_or_else(|| transfer_corrupted(device, "bytes of pages"))
    }

    /// Waits like [`finish`](Self::finish), but returns `None` if the bytes changed in transit, so that the caller can
    /// capture them again. Bytes in separate device memory are transferred a second time before `None` is returned.
    ///
    /// # Errors
    /// A device error.
    pub fn finish_once(self, device: &EngineDevice) -> Result<Option<Drained>> {
        let Self { len, copies, summed } = self;
        match copies {
            // The bytes were transferred from page memory, which may have changed since. Only the caller can decide
            // whether to capture them again.
            CopySource::UnderWay(pending) => arrived(device, pending, len, &summed),
            CopySource::Aside(aside, staging, from) => aside.finish(device, staging, from, &summed),
        }
    }
}

impl GatheredBytes {
    /// Returns the fence after the store's last use of the pages' memory.
    pub fn fence(&self) -> Fence {
        match self {
            GatheredBytes::Aside(copies) => copies.aside.gathered,
            GatheredBytes::Staged(drain) => drain.fence(),
        }
    }
}

impl CopiesAside {
    /// Frees the copies without transferring them.
    pub fn give_up(self) {
        let AsideBuffer { pieces, gathered, arena } = self.aside;
        pieces.into_iter().for_each(|piece| arena.retire(piece, gathered));
    }

    /// Prepares the transfer of the copies to a staging buffer of the chunk's length, as a [`Drain`].
    pub fn drain_to(self, staging: StagingBuf) -> Drain {
        let Self { aside, chunk_range, summed } = self;
        let len = staging.len();
        let copies = CopySource::Aside(aside, staging, chunk_range.start);
        Drain { len, copies, summed: Some(summed) }
    }

    /// Makes the device copy the bytes to a file's memory, for a chunk that begins at `offset` of the file. `gaps`
    /// contains the ranges of the chunk between and after the copies, which are filled with zeros. Waits until the
    /// device has sent all bytes, and returns the CRC-32 of each source. The device computes these checksums from the
    /// copies (I12). When the snapshot is verified, the bytes in the file are compared with them. Must not be called on
    /// the applier's thread.
    ///
    /// The checksums are computed in another lane. Between two copies in the same lane, they took an eighth of a
    /// snapshot's time.
    ///
    /// # Errors
    /// A device error; `OutOfMemory`.
    pub fn finish_in_place(
        self,
        device: &EngineDevice,
        target: &FileTarget,
        offset: u64,
        gaps: &[Range<u64>],
    ) -> Result<Vec<Hasher>> {
        let Self { aside, chunk_range, summed } = self;
        let AsideBuffer { pieces, gathered, arena } = aside;
        let mut last_use = gathered;
        let mut copy = || {
            let mut sums = CommandList::default();
            summed.pool.add_sums(&mut sums, collected(summed.spans.iter().copied())?)?;
            device.after(Lane::Load, gathered)?;
            let sums = device.submit(Lane::Load, sums)?;
            last_use = sums.fence();
            let mut list = CommandList::default();
            let mut at = chunk_range.start;
            for piece in &pieces {
                // The last piece of memory may be longer than the bytes that it contains.
                let len = (chunk_range.end - at).min(piece.byte_len());
                let target = target.part(offset + at, len);
                push(&mut list.commands, Command::Copy { source: piece.part(0, len), target })?;
                at += len;
            }
            for gap in gaps {
                let target = target.part(offset + gap.start, gap.end - gap.start);
                push(&mut list.commands, Command::Fill { target, pattern: [0; 16], width: Width::W1 })?;
            }
            let sent = target.submit(CopyDirection::To, Some(last_use), list)?;
            last_use = sent.fence();
            device.finish(sent)?;
            let words = device.finish(sums)?.into_iter().next().expect("one staging went in");
            let sums = summed.by_source(sums_in(&words[..sums_len(summed.spans.len())]))?;
            summed.pool.put(words);
            Ok(sums)
        };
        let copied = copy();
        match &copied {
            Ok(_) => pieces.into_iter().try_for_each(|piece| arena.discard(piece))?,
            // A command list may still use the copies, so they are freed after its fence.
            Err(_) => pieces.into_iter().for_each(|piece| arena.retire(piece, last_use)),
        }
        copied
    }
}

impl AsideBuffer {
    fn finish(
        self,
        device: &EngineDevice,
        staging: StagingBuf,
        from: u64,
        summed: &Option<SummedCopies>,
    ) -> Result<Option<Drained>> {
        let Self { pieces, gathered, arena } = self;
        let mut last_use = gathered;
        let mut drain = |staging: StagingBuf| {
            let len = staging.len();
            let pending = queue(device, &pieces, gathered, staging, from as usize, summed)?;
            last_use = pending.fence();
            arrived(device, pending, len, summed)
        };
        let len = staging.len();
        let drained = match drain(staging) {
            Ok(Some(drained)) => Ok(Some(drained)),
            // The copies still exist on the device, so the transfer is repeated before it is reported as an error.
            Ok(None) => {
                tracing::warn!(
                    device = device.label(),
                    "bytes were damaged in transit to the host; repeating the transfer"
                );
                let pool = &summed.as_ref().expect("sums that differ").pool;
                pool.take(len).and_then(&mut drain)
            }
            Err(error) => Err(error),
        };
        match &drained {
            Ok(_) => pieces.into_iter().try_for_each(|piece| arena.discard(piece))?,
            // A command list may still use the copies, so they are freed after its fence.
            Err(_) => pieces.into_iter().for_each(|piece| arena.retire(piece, last_use)),
        }
        drained
    }
}

impl SummedCopies {
    fn new(device: &EngineDevice, pool: &Arc<StagingPool>, sources: usize) -> Self {
        let (crosses_bus, pool) = (device.crosses_bus(), pool.clone());
        Self { spans: Vec::new(), crosses_bus, arrivals: Vec::new(), sources, pool }
    }

    /// Adds a range, given its bytes on the device, their offset in the staging buffer, and the index of their source.
    fn add(&mut self, span: Span, at: usize, source: usize) -> Result<()> {
        push(&mut self.spans, span)?;
        push(&mut self.arrivals, (at..at + span.len as usize, source))
    }

    /// Computes checksums of the received bytes. Returns the checksum of each source, or `None` if one of them differs
    /// from the device's checksum (I12).
    fn check(&self, bytes: &[u8], of_device: Option<&[u8]>) -> Result<Option<Vec<Hasher>>> {
        let sums = self.arrivals.iter().map(|(range, _)| crc32fast::hash(&bytes[range.clone()]));
        let sums = collected(sums)?;
        if of_device.is_some_and(|of_device| !sums_in(of_device).eq(sums.iter().copied())) {
            return Ok(None);
        }
        self.by_source(sums.into_iter()).map(Some)
    }

    /// Combines the checksums of ranges into checksums of sources, because a source may be divided into several ranges.
    fn by_source(&self, of_ranges: impl Iterator<Item = u32>) -> Result<Vec<Hasher>> {
        let mut sums = collected((0..self.sources).map(|_| Hasher::new()))?;
        for ((range, source), sum) in self.arrivals.iter().zip(of_ranges) {
            sums[*source].combine(&Hasher::new_with_initial_len(sum, range.len() as u64));
        }
        Ok(sums)
    }
}

/// Returns the commands that copy sources to `pieces`. A source that crosses the end of a piece is divided there.
fn divide(
    pieces: &[PageMemory],
    sources: Vec<(Span, u64)>,
    from: u64,
    summed: &mut Option<SummedCopies>,
) -> Result<Vec<Command>> {
    let mut parts: Vec<Vec<(Span, u64)>> = pieces.iter().map(|_| Vec::new()).collect();
    let piece_len = pieces.first().map_or(1, PageMemory::byte_len);
    for (index, (mut source, mut at)) in sources.into_iter().enumerate() {
        while source.len > 0 {
            let (number, offset) = (at / piece_len, at % piece_len);
            let len = source.len.min(piece_len - offset);
            push(&mut parts[number as usize], (Span { len, ..source }, offset))?;
            if let Some(summed) = summed {
                let copy = pieces[number as usize].part(offset, len);
                summed.add(copy, (from + at) as usize, index)?;
            }
            source = Span { offset: source.offset + len, len: source.len - len, ..source };
            at += len;
        }
    }
    let gather = |(piece, sources): (&PageMemory, _)| Command::Gather { sources, target: piece.span() };
    Ok(pieces.iter().zip(parts).map(gather).collect())
}

/// Adds commands that compute checksums of the bytes that the list copies, and store them in a second staging buffer.
fn with_sums(mut list: CommandList, summed: &Option<SummedCopies>) -> Result<CommandList> {
    if let Some(SummedCopies { spans, crosses_bus: true, pool, .. }) = summed
        && !spans.is_empty()
    {
        pool.add_sums(&mut list, collected(spans.iter().copied())?)?;
    }
    Ok(list)
}

/// Waits for a list that transfers bytes to its first staging buffer, and verifies the bytes. Returns `None` if they
/// changed in transit.
fn arrived(
    device: &EngineDevice,
    pending: Pending,
    len: usize,
    summed: &Option<SummedCopies>,
) -> Result<Option<Drained>> {
    let mut returned = device.finish(pending)?.into_iter();
    let bytes = StagingBuf::new(returned.next().expect("one staging went in"), len);
    let Some(summed) = summed else { return Ok(Some(Drained { bytes, sums: Vec::new() })) };
    let of_device = returned.next();
    let sums =
        summed.check(&bytes, of_device.as_ref().map(|words| &words[..sums_len(summed.spans.len())]))?;
    of_device.into_iter().for_each(|words| summed.pool.put(words));
    match sums {
        Some(sums) => Ok(Some(Drained { bytes, sums })),
        None => {
            summed.pool.put(bytes.into_staging());
            Ok(None)
        }
    }
}

fn queue(
    device: &EngineDevice,
    pieces: &[PageMemory],
    gathered: Fence,
    staging: StagingBuf,
    from: usize,
    summed: &Option<SummedCopies>,
) -> Result<Pending> {
    device.after(Lane::Drain, gathered)?;
    let mut offset = from;
    let download = |piece: &PageMemory| {
        // The last piece of memory may be longer than the bytes that it contains.
        let len = (staging.len() - offset).min(piece.byte_len() as usize);
        let target = StagingSpan { index: 0, offset, len };
        offset += len;
        Command::Download { source: piece.part(0, len as u64), target }
    };
    let commands = pieces.iter().map(download).collect();
    let list = CommandList { commands, staging: vec![staging.into_staging()] };
    device.submit(Lane::Drain, with_sums(list, summed)?)
}
