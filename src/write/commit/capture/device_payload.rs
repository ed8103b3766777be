//! Completes payloads that contain bytes from device memory.
//!
//! The bytes are first gathered on the device. The device then checks the indices and sums the bytes. Then the bytes
//! are copied to the host exactly as they are logged and applied. Even if the caller's memory is modified in the
//! meantime, checksum and bytes belong to the same payload.
//!
//! Nothing is logged before these steps are complete, so a crash loses a batch that was never acknowledged.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;

use crc32fast::Hasher;
use remanent_format::limits::{FRAME_ALIGN, align_up};
use remanent_format::op::decode_payload;
use remanent_format::{PageId, PageTable, Place};

use crate::base::allocation::{append, collected, copied, push};
use crate::base::parallel;
use crate::device::sums::{sum_each, sums_in, sums_len, transfer_corrupted};
use crate::device::{
    Access, Command, CommandList, DIGEST_CHUNK_LEN, DIGEST_LEN, DeviceBytes, INDEX_OUT_OF_BOUNDS, IndexList,
    Lane, Span, Staging, StagingSpan, digest_count,
};
use crate::error::{Error, Invalid, Result};
use crate::memory::arena::Purpose;
use crate::memory::staging::{GrowingStaging, GrownBytes, StagingBuf};
use crate::write::batch::{ChunkDigests, DeviceFill, FillSource, WriteBatch};
use crate::write::commit::Committer;

/// The maximum number of bytes that are gathered on the device at a time, a multiple of the chunk length.
pub(super) const WAVE_LEN: u64 = 16 << 20;
/// The number of bytes for which one more thread is used to sum and copy.
const SHARE_LEN: usize = 1 << 20;
/// The maximum number of threads that sum and copy a payload.
const HOST_THREADS_MAX: usize = 4;
/// The minimum length in bytes at which combining two sums is cheaper than summing the bytes again.
const COMBINED_LEN_MIN: u64 = 4 << 10;

impl Committer {
    /// Runs commands in the lane for staging and waits for them. In the lane of deltas, other batches would have to
    /// wait for these commands.
    pub(super) fn run(&self, commands: Vec<Command>, staging: Vec<Staging>) -> Result<Vec<Staging>> {
        let device = &self.engine.device;
        device.finish(device.submit(Lane::Stage, CommandList { commands, staging })?)
    }

    /// Waits until the batch's bytes have been produced on their streams. Returns the place in which these bytes are
    /// gathered, or `None` if the batch has no bytes from device memory. `pages` contains the ids of the new pages.
    ///
    /// The committing thread waits instead of the lane, because a caller's stream may stall for long.
    pub(in crate::write::commit) fn arrivals(
        &self,
        batch: &WriteBatch,
        pages: &[PageId],
    ) -> Result<Option<Place>> {
        let mut streams = BTreeSet::new();
        for bytes in batch.device_bytes() {
            bytes.check_device(&self.engine.device)?;
            bytes.wait_uses(Access::Read)?;
            streams.extend(bytes.stream());
        }
        // Each stream is waited for once, however many ranges it produces.
        for stream in streams {
            self.engine.device.wait_stream(stream)?;
        }
        for (_, memory) in batch.lent(pages) {
            memory.check_device(&self.engine.device)?;
            memory.check_process()?;
            // The store writes to this memory next. A kernel that still runs would overwrite the store's bytes, or lose
            // its own.
            memory.arrived(Access::Write)?;
        }
        let captured = batch.captures().map(|(_, copy, _)| copy.bytes());
        Ok(batch.device_bytes().chain(captured).next().map(DeviceBytes::place))
    }

    /// Returns the lengths of the pages that the batch changes at indices in device memory. The lengths are checked
    /// again under the lock, when the highest index is known.
    pub(in crate::write::commit) fn lens(
        &self,
        batch: &WriteBatch,
        locked: Option<&PageTable>,
    ) -> HashMap<PageId, u64> {
        let mut pages = batch.scattered_pages().peekable();
        if pages.peek().is_none() {
            return HashMap::new();
        }
        let in_table = |table: &PageTable| {
            pages.filter_map(|page| table.get(page).map(|info| (page, info.len))).collect()
        };
        match locked {
            Some(table) => in_table(table),
            None => in_table(&self.submitted.lock()),
        }
    }

    /// Completes a payload whose blanks are zeros so far.
    ///
    /// Blanks are filled in waves of bounded length, which also bounds the device memory for them. One list does the
    /// device's part of a wave, in this order:
    ///
    /// 1. The caller's bytes are gathered. After the gather of the last wave, the caller may modify its memory again.
    /// 2. The bytes of each blank are summed and digested, and the lists of indices are checked.
    /// 3. The bytes are copied to the host, each to its blank.
    ///
    /// Then the host sums the arrived bytes. The batch continues only if both sums agree: logged with the device's sum,
    /// bytes that changed in transit would look like damage on disk at the next open.
    ///
    /// A long payload whose bytes all belong to pages on disk stays in ordinary memory, because no list names it, and a
    /// GPU would pin staging for this batch alone. Its waves are copied to separate staging, which is kept for the next
    /// batch unless it is longer than a wave.
    pub(in crate::write::commit) fn fill(
        &self,
        mut payload: GrowingStaging,
        blanks: Vec<DeviceFill<'_>>,
        gathered_in: Option<Place>,
        locked: Option<&PageTable>,
    ) -> Result<FilledPayload> {
        let staging = &self.engine.staging;
        let Some(place) = gathered_in.filter(|_| !blanks.is_empty()) else {
            let crc = crc32fast::hash(payload.as_mut());
            let payload = self.grown(payload, locked)?;
            return Ok(FilledPayload { payload, crc, digests: CapturedDigests::new() });
        };
        let waves = waves(blanks)?;
        let area_len = waves.iter().map(|wave| wave_len(wave)).max().unwrap_or_default();
        let area = self.stage_memory(Purpose::Stage, place, area_len)?;
        let area = area.part(0, area_len);
        let (mut sums, mut digests) = (Vec::new(), CapturedDigests::new());
        let payload = match self.grown(payload, locked)? {
            GrownBytes::Staged(mut staged) => {
                for blanks in &waves {
                    let wave = Wave::new(blanks, area, |blank, _| blank.at)?;
                    let of_wave;
                    (staged, of_wave) = self.fill_wave(staged, &wave, &mut digests)?;
                    append(&mut sums, of_wave)?;
                }
                GrownBytes::Staged(staged)
            }
            GrownBytes::Plain(mut bytes) => {
                let mut landing = staging.take(area_len as usize)?;
                for blanks in &waves {
                    let wave = Wave::new(blanks, area, |_, source| (source.offset - area.offset) as usize)?;
                    let of_wave;
                    (landing, of_wave) = self.fill_wave(landing, &wave, &mut digests)?;
                    wave.take_to(&mut bytes, &landing)?;
                    append(&mut sums, of_wave)?;
                }
                staging.put(landing.into_staging());
                GrownBytes::Plain(bytes)
            }
        };
        let crc = whole_sum(&payload, waves.iter().flatten().zip(sums));
        Ok(FilledPayload { payload, crc, digests })
    }

    /// Moves a complete payload to staging. If all bytes of a long payload belong to pages on disk, the payload stays
    /// in ordinary memory.
    pub(in crate::write::commit) fn grown(
        &self,
        mut payload: GrowingStaging,
        locked: Option<&PageTable>,
    ) -> Result<GrownBytes> {
        let staging = &self.engine.staging;
        match payload.is_long() && self.is_for_disk(payload.as_mut(), locked)? {
            true => Ok(staging.grown_plain(payload)),
            false => staging.grown(payload).map(Into::into),
        }
    }

    /// Returns whether all bytes of a payload belong to pages on disk. The resulting draft becomes stale when one of
    /// the pages moves.
    fn is_for_disk(&self, payload: &[u8], locked: Option<&PageTable>) -> Result<bool> {
        match decode_payload(payload) {
            Ok(ops) => Ok(!self.disk_ops(&ops, locked)?.leaves_bytes(&ops)),
            // The draft reports the defect, because it also decodes the payload, after the blanks are filled.
            Err(_) => Ok(false),
        }
    }

    /// Fills the blanks of a wave through the staging buffer `landing`. Returns `landing` and the sum of each blank,
    /// and adds the digests of captured chunks.
    fn fill_wave(
        &self,
        landing: StagingBuf,
        wave: &Wave<'_>,
        digests: &mut CapturedDigests,
    ) -> Result<(StagingBuf, Vec<u32>)> {
        let device = &*self.engine.device;
        let Wave { blanks, area, copies } = wave;
        let (mut sources, mut picks) = (Vec::new(), Vec::new());
        let (mut lists, mut steps) = (Vec::new(), Vec::new());
        let (mut picked_indices, mut picked_len) = (Vec::new(), 0);
        let (mut digested, mut chunks) = (Vec::new(), Vec::new());
        let mut keys = Vec::new();
        for (blank, copy) in blanks.iter().zip(copies) {
            let target = copy.source;
            match &blank.content {
                FillSource::Bytes(span) => push(&mut sources, (*span, target.offset - area.offset))?,
                FillSource::Chunks { span, key, step, first } => {
                    push(&mut sources, (*span, target.offset - area.offset))?;
                    push(&mut digested, target)?;
                    push(&mut chunks, (*step, *first, digest_count(span.len) as usize))?;
                    push(&mut keys, *key)?;
                }
                // The device checks indices before they are logged, because applying a wrong index would write outside
                // its page.
                FillSource::Indices { span, bound, step } => {
                    push(&mut sources, (*span, target.offset - area.offset))?;
                    push(&mut lists, IndexList { indices: target, bound: *bound })?;
                    push(&mut steps, *step)?;
                }
                FillSource::Elements { source, width, indices: picked } => {
                    // The elements are picked from the staged copy by indices from the host, so only the elements cross
                    // the bus.
                    let indices = StagingSpan { index: 2, offset: picked_len, len: 4 * picked.len() };
                    push(&mut picks, Command::Pick { source: *source, width: *width, indices, target })?;
                    push(&mut picked_indices, *picked)?;
                    picked_len += indices.len;
                }
            }
        }
        let found_len = 4 * lists.len();
        let mut commands = vec![Command::Gather { sources, target: *area }];
        append(&mut commands, picks)?;
        let target = StagingSpan { index: 3, offset: 0, len: found_len };
        commands.push(Command::Validate { lists, target });
        let digests_len = DIGEST_LEN * chunks.iter().map(|(_, _, count)| count).sum::<usize>();
        // Copies in one place share one key.
        if let Some(key) = keys.first() {
            let target = StagingSpan { index: 4, offset: 0, len: digests_len };
            commands.push(Command::Digest { sources: digested, key: *key, target });
        }
        download_blanks(&mut commands, copies, device.crosses_bus())?;
        let mut picked = self.engine.staging.take(picked_len)?;
        let mut places = picked.as_chunks_mut().0.iter_mut();
        for indices in picked_indices {
            indices.iter().zip(&mut places).for_each(|(index, place)| *place = index.to_le_bytes());
        }
        let (len, sums_len) = (landing.len(), sums_len(copies.len()));
        let [sums, found, digest_bytes] = [sums_len, found_len, digests_len];
        let sums = self.engine.staging.take(sums)?;
        let found = self.engine.staging.take(found)?;
        let digest_bytes = self.engine.staging.take(digest_bytes)?;
        let staging = [landing, sums, picked, found, digest_bytes].map(StagingBuf::into_staging);
        let mut returned = self.run(commands, staging.into())?.into_iter();
        let mut next = |len| StagingBuf::new(returned.next().expect("as many as went in"), len);
        let (mut landed, mut sums, picked) = (next(len), next(sums_len), next(picked_len));
        let (found, digest_bytes) = (next(found_len), next(digests_len));
        // A wrong index would write outside the page, and a repeated one has no defined result on a device, so both are
        // refused before the batch is logged. There is one word per list, which is 0 if its indices are valid.
        let wrong = steps.into_iter().zip(sums_in(&found)).find(|(_, wrong)| *wrong != 0);
        let mut all = digest_bytes.as_chunks::<DIGEST_LEN>().0;
        for (step, first, count) in chunks {
            let (these, rest) = all.split_at(count);
            all = rest;
            push(digests.entry(step).or_default(), ChunkDigests { first, digests: copied(these)? })?;
        }
        for staging in [picked, found, digest_bytes] {
            self.engine.staging.put(staging.into_staging());
        }
        if let Some((index, wrong)) = wrong {
            for staging in [landed, sums] {
                self.engine.staging.put(staging.into_staging());
            }
            let reason = if wrong & INDEX_OUT_OF_BOUNDS != 0 {
                "an index is not within the page: it counts elements from the page's start".to_owned()
            } else {
                "an element is given twice".to_owned()
            };
            return Err(Error::Invalid(Invalid::Operation { index, reason }));
        }
        let is_summed = device.crosses_bus();
        let mut arrived = proven_sums(&landed, copies, is_summed.then_some(&*sums))?;
        if arrived.is_none() {
            // I12: the bytes are still on the device, so a transfer error need not fail the commit.
            tracing::warn!(device = device.label(), "a payload changed on its way to the host: once more");
            let mut commands = Vec::new();
            download_blanks(&mut commands, copies, is_summed)?;
            let again = self.run(commands, vec![landed.into_staging(), sums.into_staging()])?;
            let mut again = again.into_iter();
            let mut next = |len| StagingBuf::new(again.next().expect("as many as went in"), len);
            (landed, sums) = (next(len), next(sums_len));
            arrived = proven_sums(&landed, copies, Some(&*sums))?;
        }
        self.engine.staging.put(sums.into_staging());
        let arrived = arrived.ok_or_else(|| transfer_corrupted(device, "a payload"))?;
        Ok((landed, arrived))
    }
}

/// A payload in which the device has filled all blanks.
pub(in crate::write::commit) struct FilledPayload {
    pub payload: GrownBytes,
    pub crc: u32,
    /// The digests of captured chunks, computed from the bytes in the payload.
    pub digests: CapturedDigests,
}

/// The digests of captured chunks, by the operation's index.
pub(in crate::write::commit) type CapturedDigests = BTreeMap<usize, Vec<ChunkDigests>>;

/// Divides blanks into waves of limited length. The bytes of a blank may be split between waves. Indices and elements
/// are not split.
fn waves(blanks: Vec<DeviceFill<'_>>) -> Result<Vec<Vec<DeviceFill<'_>>>> {
    let (mut waves, mut wave, mut len) = (Vec::new(), Vec::new(), 0);
    for blank in blanks {
        let mut rest = Some(blank);
        while let Some(mut blank) = rest.take() {
            // The part consists of whole chunks, because a chunk is digested as a whole.
            let room = (WAVE_LEN - len) / DIGEST_CHUNK_LEN * DIGEST_CHUNK_LEN;
            if blank.byte_len() > WAVE_LEN - len {
                rest = (room > 0).then(|| blank.split_off(room)).flatten();
                if rest.is_none() && len > 0 {
                    push(&mut waves, std::mem::take(&mut wave))?;
                    len = 0;
                    rest = Some(blank);
                    continue;
                }
            }
            len = align_up(len + blank.byte_len(), FRAME_ALIGN).min(WAVE_LEN);
            push(&mut wave, blank)?;
        }
    }
    push(&mut waves, wave)?;
    Ok(waves)
}

/// Returns the number of bytes of device memory that a wave needs.
fn wave_len(blanks: &[DeviceFill<'_>]) -> u64 {
    blanks.iter().fold(0, |len, blank| align_up(len + blank.byte_len(), FRAME_ALIGN))
}

/// Blanks of a payload that one command list fills together.
struct Wave<'b> {
    blanks: &'b [DeviceFill<'b>],
    /// The device memory in which the blanks' bytes are gathered.
    area: Span,
    /// The copy of each blank from the device to staging.
    copies: Vec<BlankCopy>,
}

/// The copy of one blank's bytes from device memory to a staging buffer.
struct BlankCopy {
    /// The offset in the staging buffer to which the bytes are copied.
    at: usize,
    /// The location of the bytes in device memory.
    source: Span,
}

impl<'b> Wave<'b> {
    /// Assigns consecutive ranges of `area` to the blanks, each aligned for kernels. `lands_at` returns the offset in
    /// the staging buffer for a blank, given its span on the device.
    fn new(
        blanks: &'b [DeviceFill<'b>],
        area: Span,
        lands_at: impl Fn(&DeviceFill<'_>, Span) -> usize,
    ) -> Result<Self> {
        let mut at = 0;
        let copy_of = |blank: &DeviceFill<'_>| {
            let source = Span { offset: area.offset + at, len: blank.byte_len(), ..area };
            at = align_up(at + source.len, FRAME_ALIGN);
            BlankCopy { at: lands_at(blank, source), source }
        };
        Ok(Self { blanks, area, copies: collected(blanks.iter().map(copy_of))? })
    }

    /// Copies the arrived bytes to the blanks of a payload, with several threads, because the first write to new memory
    /// takes several times as long as the copy.
    fn take_to(&self, payload: &mut [u8], landed: &[u8]) -> Result<()> {
        let (mut rest, mut rest_at) = (payload, 0);
        let mut pieces = Vec::new();
        for (blank, copy) in self.blanks.iter().zip(&self.copies) {
            let len = copy.source.len as usize;
            let (_, from_blank) = rest.split_at_mut(blank.at - rest_at);
            let (target, after) = from_blank.split_at_mut(len);
            (rest, rest_at) = (after, blank.at + len);
            let source = &landed[copy.at..][..len];
            append(&mut pieces, target.chunks_mut(SHARE_LEN).zip(source.chunks(SHARE_LEN)))?;
        }
        let copy = |share: Vec<(&mut [u8], &[u8])>| {
            share.into_iter().for_each(|(target, source)| target.copy_from_slice(source));
            Ok::<_, Infallible>(())
        };
        let shares = shares(pieces, |(target, _)| target.len())?;
        let Ok(_) = parallel::for_each(parallel::threads(HOST_THREADS_MAX), shares, copy);
        Ok(())
    }
}

/// Adds the commands that copy the blanks' bytes to staging 0, and their sums to staging 1.
fn download_blanks(commands: &mut Vec<Command>, copies: &[BlankCopy], is_summed: bool) -> Result<()> {
    if is_summed {
        push(commands, sum_each(collected(copies.iter().map(|copy| copy.source))?, 1))?;
    }
    let download = |copy: &BlankCopy| {
        let target = StagingSpan { index: 0, offset: copy.at, len: copy.source.len as usize };
        Command::Download { source: copy.source, target }
    };
    append(commands, copies.iter().map(download))
}

/// Returns the CRC-32 of the arrived bytes of each blank, or `None` if a sum differs from the device's sum.
fn proven_sums(landed: &[u8], copies: &[BlankCopy], of_device: Option<&[u8]>) -> Result<Option<Vec<u32>>> {
    let arrived = sums_of(copies.iter().map(|copy| &landed[copy.at..][..copy.source.len as usize]))?;
    let is_sent = of_device.is_none_or(|sums| arrived.iter().copied().eq(sums_in(sums)));
    Ok(is_sent.then_some(arrived))
}

/// Returns the CRC-32 of a payload, given the sums of its blanks in order. The sums of long blanks are combined instead
/// of computed again.
fn whole_sum<'b>(payload: &[u8], blanks: impl Iterator<Item = (&'b DeviceFill<'b>, u32)>) -> u32 {
    let mut whole = Hasher::new();
    // The host has the bytes between two blanks. Blanks do not overlap.
    let mut known_from = 0;
    for (blank, sum) in blanks {
        let (at, len) = (blank.at, blank.byte_len());
        let end = at + len as usize;
        whole.update(&payload[known_from..at]);
        known_from = end;
        if len < COMBINED_LEN_MIN {
            whole.update(&payload[at..end]);
        } else {
            whole.combine(&Hasher::new_with_initial_len(sum, len));
        }
    }
    whole.update(&payload[known_from..]);
    whole.finalize()
}

/// Returns the CRC-32 of each run of bytes. Several threads sum long runs, because a GPU sends several times as fast as
/// one thread sums.
fn sums_of<'b>(runs: impl Iterator<Item = &'b [u8]>) -> Result<Vec<u32>> {
    let mut sums = Vec::new();
    let mut pieces = Vec::new();
    for (run, bytes) in runs.enumerate() {
        push(&mut sums, Hasher::new())?;
        append(&mut pieces, bytes.chunks(SHARE_LEN).map(|piece| (run, piece)))?;
    }
    let shares = shares(pieces, |(_, piece)| piece.len())?;
    let sum = |(): &mut (), index: usize| {
        collected(shares[index].iter().map(|(run, piece)| {
            let mut sum = Hasher::new();
            sum.update(piece);
            (*run, sum)
        }))
    };
    let threads = parallel::threads(HOST_THREADS_MAX);
    for (run, sum) in parallel::map_indexed(threads, shares.len(), || (), sum)?.into_iter().flatten() {
        sums[run].combine(&sum);
    }
    collected(sums.into_iter().map(Hasher::finalize))
}

/// Divides pieces, in order, among threads. `len_of` returns the length of a piece in bytes.
fn shares<P>(pieces: Vec<P>, len_of: impl Fn(&P) -> usize) -> Result<Vec<Vec<P>>> {
    let (mut shares, mut share, mut len) = (Vec::new(), Vec::new(), 0);
    for piece in pieces {
        len += len_of(&piece);
        push(&mut share, piece)?;
        if len >= SHARE_LEN {
            push(&mut shares, std::mem::take(&mut share))?;
            len = 0;
        }
    }
    if !share.is_empty() {
        push(&mut shares, share)?;
    }
    Ok(shares)
}
