//! Completes payloads that contain bytes from device memory.
//!
//! The device gathers the bytes in its own memory, checks the indices, and computes checksums. The bytes are then
//! copied to the host, where they are logged and applied unchanged. Because the gathered bytes no longer change, bytes
//! and checksum agree even if the caller's memory is modified in the meantime.
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
/// The number of bytes for which one more thread computes checksums and copies bytes.
const SHARE_LEN: usize = 1 << 20;
/// The maximum number of threads that compute checksums of a payload and copy it.
const HOST_THREADS_MAX: usize = 4;
/// The minimum length in bytes of a placeholder whose checksum is combined with those of its neighbors. For shorter
/// placeholders, computing a checksum over all the bytes is cheaper.
const COMBINED_LEN_MIN: u64 = 4 << 10;

impl Committer {
    /// Runs commands in [`Lane::Stage`], the device queue for work before a batch is logged, and waits for them. In
    /// [`Lane::Apply`], they would delay the deltas of other batches.
    pub(super) fn run(&self, commands: Vec<Command>, staging: Vec<Staging>) -> Result<Vec<Staging>> {
        let device = &self.engine.device;
        device.finish(device.submit(Lane::Stage, CommandList { commands, staging })?)
    }

    /// Waits until the batch's bytes have been produced on their streams. Returns the place in which these bytes are
    /// gathered, or `None` if the batch has no bytes from device memory. `pages` contains the ids of the new pages.
    ///
    /// The committing thread waits on the host. If a device queue waited instead, a stalled stream would delay the work
    /// of other batches.
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
        // Several ranges may come from the same stream, which is waited for once.
        for stream in streams {
            self.engine.device.wait_stream(stream)?;
        }
        for (_, memory) in batch.lent(pages) {
            memory.check_device(&self.engine.device)?;
            memory.check_process()?;
            // The store writes to this memory later. A kernel that is still running would overwrite these bytes, or
            // read them instead of the bytes that it expects.
            memory.arrived(Access::Write)?;
        }
        let captured = batch.captures().map(|(_, copy, _)| copy.bytes());
        Ok(batch.device_bytes().chain(captured).next().map(DeviceBytes::place))
    }

    /// Returns the lengths of the pages in which the batch replaces elements at indices in device memory. The device
    /// checks the indices against these lengths, and the lengths are checked again under the submission lock.
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

    /// Completes a payload whose placeholders are zeros so far.
    ///
    /// The placeholders are divided into groups of bounded length, called waves, so that the device memory in which
    /// bytes are gathered is bounded. One command list performs the device's steps of a wave:
    ///
    /// 1. Gather the caller's bytes. After this step of the last wave, the caller may modify its memory again.
    /// 2. Compute checksums of each placeholder and digests of captured chunks, and check the lists of indices.
    /// 3. Copy the bytes to the host.
    ///
    /// Then the host computes checksums of the received bytes. The commit continues only if they equal those of the
    /// device. Otherwise, bytes that changed in transit would be logged, and the next open would report them as damage
    /// on disk.
    ///
    /// A long payload whose bytes all belong to pages on disk remains in ordinary memory: no command list reads it, and
    /// staging memory of that length would have to be pinned for this batch alone. Its waves arrive in a separate
    /// staging buffer, which later batches reuse unless it is longer than a wave.
    pub(in crate::write::commit) fn fill(
        &self,
        mut payload: GrowingStaging,
        placeholders: Vec<DeviceFill<'_>>,
        gathered_in: Option<Place>,
        locked: Option<&PageTable>,
    ) -> Result<FilledPayload> {
        let staging = &self.engine.staging;
        let Some(place) = gathered_in.filter(|_| !placeholders.is_empty()) else {
            let crc = crc32fast::hash(payload.as_mut());
            let payload = self.grown(payload, locked)?;
            return Ok(FilledPayload { payload, crc, digests: CapturedDigests::new() });
        };
        let waves = waves(placeholders)?;
        let area_len = waves.iter().map(|wave| wave_len(wave)).max().unwrap_or_default();
        let area = self.stage_memory(Purpose::Stage, place, area_len)?;
        let area = area.part(0, area_len);
        let (mut sums, mut digests) = (Vec::new(), CapturedDigests::new());
        let payload = match self.grown(payload, locked)? {
            GrownBytes::Staged(mut staged) => {
                for placeholders in &waves {
                    let wave = Wave::new(placeholders, area, |placeholder, _| placeholder.at)?;
                    let of_wave;
                    (staged, of_wave) = self.fill_wave(staged, &wave, &mut digests)?;
                    append(&mut sums, of_wave)?;
                }
                GrownBytes::Staged(staged)
            }
            GrownBytes::Plain(mut bytes) => {
                let mut landing = staging.take(area_len as usize)?;
                for placeholders in &waves {
                    let wave =
                        Wave::new(placeholders, area, |_, source| (source.offset - area.offset) as usize)?;
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

    /// Returns whether all bytes of a payload belong to pages on disk. If one of these pages moves to memory before the
    /// draft is logged, the draft is stale.
    fn is_for_disk(&self, payload: &[u8], locked: Option<&PageTable>) -> Result<bool> {
        match decode_payload(payload) {
            Ok(ops) => Ok(!self.disk_ops(&ops, locked)?.leaves_bytes(&ops)),
            // This result does not matter: `log_draft` decodes the complete payload again, and reports the defect.
            Err(_) => Ok(false),
        }
    }

    /// Fills the placeholders of one wave. The bytes arrive in the staging buffer `landing`, which is returned together
    /// with the checksum of each placeholder. Adds the digests of captured chunks to `digests`.
    fn fill_wave(
        &self,
        landing: StagingBuf,
        wave: &Wave<'_>,
        digests: &mut CapturedDigests,
    ) -> Result<(StagingBuf, Vec<u32>)> {
        let device = &*self.engine.device;
        let steps = WaveSteps::new(wave, device.crosses_bus())?;
        let sums_len = sums_len(wave.copies.len());
        let lens =
            [landing.len(), sums_len, steps.picked_len(), steps.found_len(), digests_len(&steps.chunks)];
        let picked = steps.picked(self.engine.staging.take(steps.picked_len())?);
        let sums = self.engine.staging.take(sums_len)?;
        let found = self.engine.staging.take(steps.found_len())?;
        let digest_bytes = self.engine.staging.take(digests_len(&steps.chunks))?;
        let staging = [landing, sums, picked, found, digest_bytes].map(StagingBuf::into_staging);
        let returned = self.run(steps.commands, staging.into())?;
        let [landed, sums, picked, found, digest_bytes] = returned_buffers(returned, lens);
        // An invalid index would write outside the page, and the result of a duplicate index is undefined on a device,
        // so both are rejected before the batch is logged. The device returns one word per list of indices, which is 0
        // if all are valid.
        let wrong = steps.operations.into_iter().zip(sums_in(&found)).find(|(_, wrong)| *wrong != 0);
        let mut all = digest_bytes.as_chunks::<DIGEST_LEN>().0;
        for (step, first, count) in steps.chunks {
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
        self.proven_wave(landed, sums, &wave.copies)
    }

    /// Compares the received bytes of a wave with the device's checksums. If they differ, the bytes are copied once
    /// more. Returns the bytes, and the checksum of each placeholder.
    fn proven_wave(
        &self,
        mut landed: StagingBuf,
        mut sums: StagingBuf,
        copies: &[PlaceholderCopy],
    ) -> Result<(StagingBuf, Vec<u32>)> {
        let device = &*self.engine.device;
        let is_summed = device.crosses_bus();
        let mut arrived = proven_sums(&landed, copies, is_summed.then_some(&*sums))?;
        if arrived.is_none() {
            // I12: the bytes are still on the device, so a transfer error need not fail the commit.
            tracing::warn!(device = device.label(), "a payload changed in transit; it is copied again");
            let mut commands = Vec::new();
            download_placeholders(&mut commands, copies, is_summed)?;
            let lens = [landed.len(), sums.len()];
            let again = self.run(commands, vec![landed.into_staging(), sums.into_staging()])?;
            [landed, sums] = returned_buffers(again, lens);
            arrived = proven_sums(&landed, copies, Some(&*sums))?;
        }
        self.engine.staging.put(sums.into_staging());
        let arrived = arrived.ok_or_else(|| transfer_corrupted(device, "a payload"))?;
        Ok((landed, arrived))
    }
}

/// Returns the staging buffers of a command list, which the device returns in the order in which it received them.
fn returned_buffers<const N: usize>(returned: Vec<Staging>, lens: [usize; N]) -> [StagingBuf; N] {
    let mut returned = returned.into_iter();
    lens.map(|len| StagingBuf::new(returned.next().expect("as many as went in"), len))
}

/// A payload in which the device has filled all placeholders.
pub(in crate::write::commit) struct FilledPayload {
    pub payload: GrownBytes,
    pub crc: u32,
    /// The digests of captured chunks, computed from the bytes in the payload.
    pub digests: CapturedDigests,
}

/// The digests of captured chunks, by the operation's index.
pub(in crate::write::commit) type CapturedDigests = BTreeMap<usize, Vec<ChunkDigests>>;

/// Divides placeholders into waves of at most [`WAVE_LEN`] bytes. Ranges of bytes may be split between waves. Lists of
/// indices or elements are not split, so one of them can exceed the limit.
fn waves(placeholders: Vec<DeviceFill<'_>>) -> Result<Vec<Vec<DeviceFill<'_>>>> {
    let (mut waves, mut wave, mut len) = (Vec::new(), Vec::new(), 0);
    for placeholder in placeholders {
        let mut rest = Some(placeholder);
        while let Some(mut placeholder) = rest.take() {
            // Digests cover whole chunks, so the range is split at a chunk boundary.
            let room = (WAVE_LEN - len) / DIGEST_CHUNK_LEN * DIGEST_CHUNK_LEN;
            if placeholder.byte_len() > WAVE_LEN - len {
                rest = (room > 0).then(|| placeholder.split_off(room)).flatten();
                if rest.is_none() && len > 0 {
                    push(&mut waves, std::mem::take(&mut wave))?;
                    len = 0;
                    rest = Some(placeholder);
                    continue;
                }
            }
            len = align_up(len + placeholder.byte_len(), FRAME_ALIGN).min(WAVE_LEN);
            push(&mut wave, placeholder)?;
        }
    }
    push(&mut waves, wave)?;
    Ok(waves)
}

/// Returns the number of bytes of device memory that a wave needs.
fn wave_len(placeholders: &[DeviceFill<'_>]) -> u64 {
    placeholders.iter().fold(0, |len, placeholder| align_up(len + placeholder.byte_len(), FRAME_ALIGN))
}

/// Placeholders of a payload that one command list fills together.
struct Wave<'b> {
    placeholders: &'b [DeviceFill<'b>],
    /// The device memory in which the placeholders' bytes are gathered.
    area: Span,
    /// The copy of each placeholder from the device to staging.
    copies: Vec<PlaceholderCopy>,
}

/// The commands of one wave, and the information with which their results are interpreted.
struct WaveSteps<'b> {
    commands: Vec<Command>,
    /// The indices of the elements that the device picks from working copies. The host uploads them.
    picked_indices: Vec<&'b [u32]>,
    /// The operation of each list of indices that the device checks.
    operations: Vec<usize>,
    /// For each digested range, its operation, its first chunk, and the number of its chunks.
    chunks: Vec<(usize, usize, usize)>,
}

impl<'b> WaveSteps<'b> {
    fn new(wave: &Wave<'b>, is_summed: bool) -> Result<Self> {
        let Wave { placeholders, area, copies } = wave;
        let (mut sources, mut picks, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        let (mut digested, mut keys) = (Vec::new(), Vec::new());
        let (mut operations, mut chunks) = (Vec::new(), Vec::new());
        let (mut picked_indices, mut picked_len) = (Vec::new(), 0);
        for (placeholder, copy) in placeholders.iter().zip(copies) {
            let target = copy.source;
            match &placeholder.content {
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
                    push(&mut operations, *step)?;
                }
                FillSource::Elements { source, width, indices: picked } => {
                    // The host uploads the indices, and the device collects these elements from the staged copy. Thus
                    // only the changed elements cross the bus.
                    let indices = StagingSpan { index: 2, offset: picked_len, len: 4 * picked.len() };
                    push(&mut picks, Command::Pick { source: *source, width: *width, indices, target })?;
                    push(&mut picked_indices, *picked)?;
                    picked_len += indices.len;
                }
            }
        }
        let mut steps = Self { commands: Vec::new(), picked_indices, operations, chunks };
        let commands = &mut steps.commands;
        push(commands, Command::Gather { sources, target: *area })?;
        append(commands, picks)?;
        let target = StagingSpan { index: 3, offset: 0, len: 4 * lists.len() };
        push(commands, Command::Validate { lists, target })?;
        // All working copies in one place use the same key.
        if let Some(key) = keys.first() {
            let target = StagingSpan { index: 4, offset: 0, len: digests_len(&steps.chunks) };
            push(commands, Command::Digest { sources: digested, key: *key, target })?;
        }
        download_placeholders(commands, copies, is_summed)?;
        Ok(steps)
    }

    /// Writes the indices of picked elements to a staging buffer.
    fn picked(&self, mut buffer: StagingBuf) -> StagingBuf {
        let mut places = buffer.as_chunks_mut().0.iter_mut();
        for indices in &self.picked_indices {
            indices.iter().zip(&mut places).for_each(|(index, place)| *place = index.to_le_bytes());
        }
        buffer
    }

    /// Returns the length in bytes of the indices of picked elements.
    fn picked_len(&self) -> usize {
        4 * self.picked_indices.iter().map(|indices| indices.len()).sum::<usize>()
    }

    /// Returns the length in bytes of the results of checking the lists of indices.
    fn found_len(&self) -> usize {
        4 * self.operations.len()
    }
}

/// Returns the length in bytes of the digests of `chunks`; see [`WaveSteps::chunks`].
fn digests_len(chunks: &[(usize, usize, usize)]) -> usize {
    DIGEST_LEN * chunks.iter().map(|(_, _, count)| count).sum::<usize>()
}

/// The copy of one placeholder's bytes from device memory to a staging buffer.
struct PlaceholderCopy {
    /// The offset in the staging buffer to which the bytes are copied.
    at: usize,
    /// The location of the bytes in device memory.
    source: Span,
}

impl<'b> Wave<'b> {
    /// Assigns consecutive ranges of `area` to the placeholders, each aligned for kernels. `lands_at` returns the
    /// offset in the staging buffer for a placeholder, given its span on the device.
    fn new(
        placeholders: &'b [DeviceFill<'b>],
        area: Span,
        lands_at: impl Fn(&DeviceFill<'_>, Span) -> usize,
    ) -> Result<Self> {
        let mut at = 0;
        let copy_of = |placeholder: &DeviceFill<'_>| {
            let source = Span { offset: area.offset + at, len: placeholder.byte_len(), ..area };
            at = align_up(at + source.len, FRAME_ALIGN);
            PlaceholderCopy { at: lands_at(placeholder, source), source }
        };
        Ok(Self { placeholders, area, copies: collected(placeholders.iter().map(copy_of))? })
    }

    /// Copies the received bytes to the placeholders of a payload. Several threads copy, because the first write to
    /// newly allocated memory takes several times as long as the copy itself.
    fn take_to(&self, payload: &mut [u8], landed: &[u8]) -> Result<()> {
        let (mut rest, mut rest_at) = (payload, 0);
        let mut pieces = Vec::new();
        for (placeholder, copy) in self.placeholders.iter().zip(&self.copies) {
            let len = copy.source.len as usize;
            let (_, from_placeholder) = rest.split_at_mut(placeholder.at - rest_at);
            let (target, after) = from_placeholder.split_at_mut(len);
            (rest, rest_at) = (after, placeholder.at + len);
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

/// Adds the commands that copy the placeholders' bytes to staging buffer 0 and, if `is_summed`, their checksums to
/// staging buffer 1.
fn download_placeholders(
    commands: &mut Vec<Command>,
    copies: &[PlaceholderCopy],
    is_summed: bool,
) -> Result<()> {
    if is_summed {
        push(commands, sum_each(collected(copies.iter().map(|copy| copy.source))?, 1))?;
    }
    let download = |copy: &PlaceholderCopy| {
        let target = StagingSpan { index: 0, offset: copy.at, len: copy.source.len as usize };
        Command::Download { source: copy.source, target }
    };
    append(commands, copies.iter().map(download))
}

/// Returns the CRC-32 of the received bytes of each placeholder, or `None` if one of them differs from the device's
/// checksum.
fn proven_sums(
    landed: &[u8],
    copies: &[PlaceholderCopy],
    of_device: Option<&[u8]>,
) -> Result<Option<Vec<u32>>> {
    let arrived = sums_of(copies.iter().map(|copy| &landed[copy.at..][..copy.source.len as usize]))?;
    let is_sent = of_device.is_none_or(|sums| arrived.iter().copied().eq(sums_in(sums)));
    Ok(is_sent.then_some(arrived))
}

/// Returns the CRC-32 of a payload, given the CRC-32 of each placeholder in order. For long placeholders, the checksums
/// are combined, so that their bytes are not read again.
fn whole_sum<'b>(payload: &[u8], placeholders: impl Iterator<Item = (&'b DeviceFill<'b>, u32)>) -> u32 {
    let mut whole = Hasher::new();
    // The bytes between placeholders were encoded by the host. Placeholders do not overlap.
    let mut known_from = 0;
    for (placeholder, sum) in placeholders {
        let (at, len) = (placeholder.at, placeholder.byte_len());
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

/// Returns the CRC-32 of each byte range. Several threads share a long list, because a GPU transfers bytes several
/// times as fast as one thread computes checksums.
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

/// Divides pieces, in order, into one share per thread, of about equal length. `len_of` returns the length of a piece
/// in bytes.
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
