//! Finds the changes in working copies by digests of their earlier contents. The digests take sixteen bytes of host
//! memory for each chunk of 64 KiB ([`digests`](crate::device)).
//!
//! 1. **Scan**: the device computes digests of the copy in place. Chunks whose digests have changed are captured.
//! 2. **Gather**: pieces of bounded length of these chunks, called waves, are copied to separate device memory,
//!    digested again, and transferred to the host: to the payload, or to the image of a page on disk.
//! 3. When the batch is logged, the digests of step 2 become those of the copy.
//!
//! The digests of step 1 cannot be used for this. If the caller modified the copy between the two steps, the log would
//! contain other bytes than were digested, and the next scan would not find the change.
//!
//! A crash discards all digests. The key is drawn when the store first needs it.

use std::ops::Range;

use remanent_format::{Epoch, PageId, Place};

use super::device_payload::WAVE_LEN;
use super::ranges::{part, parts};
use super::stage_memory::StageMemory;
use crate::base::allocation::{append, copied, make_room, push};
use crate::device::{
    Access, Command, DIGEST_CHUNK_LEN, DIGEST_KEY_LEN, DIGEST_LEN, DeviceBytes, Digest, Lane, Span,
    StagingSpan, digest_count, digest_key,
};
use crate::error::{Error, Result};
use crate::images::THREADS_MAX as IMAGE_THREADS_MAX;
use crate::memory::arena::Purpose;
use crate::memory::staging::StagingBuf;
use crate::recovery::opening::random;
use crate::write::batch::{ChunkDigests, UNKNOWN_DIGEST, WorkingCopy};
use crate::write::commit::Committer;

/// The maximum number of bytes that one command list digests. The digests of a list then take at most 1 MiB.
const DIGEST_LIST_LEN: u64 = 4 << 30;

/// The key for digests, with a copy in device memory for each place that has working copies with digests.
#[derive(Default)]
pub(crate) struct DigestKeys {
    /// The key in the form that devices read, or empty before the key is drawn. All places share one key, so that
    /// digests computed by different devices can be compared.
    bytes: Vec<u8>,
    places: Vec<(Place, DeviceBytes)>,
}

impl Committer {
    /// Returns the key in device memory, for working copies in `place`. The first call draws the key.
    ///
    /// # Errors
    /// `OverBudget`, `OutOfMemory`; no source of randomness; a device error.
    pub(super) fn digest_key(&self, place: Place) -> Result<DeviceBytes> {
        let mut keys = self.digest_keys.lock();
        if let Some((_, key)) = keys.places.iter().find(|(of, _)| *of == place) {
            return Ok(key.clone());
        }
        if keys.bytes.is_empty() {
            keys.bytes = digest_key(&random()?)?;
        }
        let key = self.device_bytes(place, DIGEST_KEY_LEN)?;
        key.write(0, &keys.bytes)?;
        push(&mut keys.places, (place, key.clone()))?;
        Ok(key)
    }

    /// Runs the commands `before`, then computes and returns the digests of the chunks of `sources`.
    fn digests(&self, sources: Vec<Span>, key: Span, before: Vec<Command>) -> Result<Vec<Digest>> {
        let count: u64 = sources.iter().map(|source| digest_count(source.len)).sum();
        let target = StagingSpan { index: 0, offset: 0, len: DIGEST_LEN * count as usize };
        let mut commands = before;
        push(&mut commands, Command::Digest { sources, key, target })?;
        let staging = vec![self.engine.staging.take(target.len)?.into_staging()];
        let mut returned = self.run(commands, staging)?;
        let bytes = StagingBuf::new(returned.pop().expect("one staging went in"), target.len);
        let found = copied(bytes.as_chunks().0);
        self.engine.staging.put(bytes.into_staging());
        found
    }

    /// Returns the digests of many ranges, computed by command lists of bounded length.
    pub(super) fn all_digests(&self, ranges: impl Iterator<Item = Span>, key: Span) -> Result<Vec<Digest>> {
        let (mut all, mut sources, mut len) = (Vec::new(), Vec::new(), 0);
        for span in ranges {
            if len + span.len > DIGEST_LIST_LEN && len > 0 {
                append(&mut all, self.digests(std::mem::take(&mut sources), key, Vec::new())?)?;
                len = 0;
            }
            push(&mut sources, span)?;
            len += span.len;
        }
        if !sources.is_empty() {
            append(&mut all, self.digests(sources, key, Vec::new())?)?;
        }
        Ok(all)
    }

    /// Waits for the streams that use a working copy, and returns a scan of its ranges that has not computed digests
    /// yet.
    pub(super) fn begin_scan<'a>(
        &self,
        step: usize,
        copy: &'a WorkingCopy,
        (epoch, page_len): (Epoch, u64),
        ranges: Option<&[Range<u64>]>,
        key: Span,
    ) -> Result<DigestScan<'a>> {
        let parts = parts(copy.page(), ranges, page_len, DIGEST_CHUNK_LEN)?;
        let live = copy.bytes().arrived(Access::Read)?;
        // If the memory became a working copy without loading the page, no digests are known, and all of it counts as
        // changed. A scan would find nothing more.
        let is_needed = copy.has_digests();
        Ok(DigestScan { step, copy, epoch, parts, live, key, is_needed, now: Vec::new() })
    }

    /// Performs step 1 of the module documentation for all copies of a batch together, because each command list
    /// requires a wait.
    pub(super) fn scan(&self, scans: &mut [DigestScan<'_>]) -> Result<()> {
        for of_place in scans.chunk_by_mut(|one, next| one.key == next.key) {
            let needed = of_place.iter().filter(|scan| scan.is_needed);
            let ranges = needed.flat_map(|scan| scan.parts.iter().map(|(range, _)| part(scan.live, range)));
            let mut digests = self.all_digests(ranges, of_place[0].key)?.into_iter();
            for scan in of_place.iter_mut().filter(|scan| scan.is_needed) {
                let count: u64 =
                    scan.parts.iter().map(|(range, _)| digest_count(range.end - range.start)).sum();
                append(&mut scan.now, digests.by_ref().take(count as usize))?;
            }
        }
        Ok(())
    }
}

/// A working copy whose changed chunks are found in step 1.
pub(super) struct DigestScan<'a> {
    /// The operation's index in the batch.
    pub step: usize,
    pub copy: &'a WorkingCopy,
    /// The epoch of the page state with which the working copy is compared.
    pub epoch: Epoch,
    /// The ranges of the page to scan, in whole chunks, each with its offset.
    pub parts: Vec<(Range<u64>, u64)>,
    /// The memory of the working copy.
    pub live: Span,
    /// The memory of the key for digests.
    pub key: Span,
    is_needed: bool,
    /// The current digests of all scanned chunks, in order, or empty if no digests are needed.
    now: Vec<Digest>,
}

impl DigestScan<'_> {
    /// Returns the chunks whose digests have changed, as ranges of the page.
    pub fn changed(&self) -> Result<Vec<Range<u64>>> {
        let mut changed: Vec<Range<u64>> = Vec::new();
        let mut now = self.now.iter();
        for (range, _) in &self.parts {
            let first = (range.start / DIGEST_CHUNK_LEN) as usize;
            let mut starts = (range.start..range.end).step_by(DIGEST_CHUNK_LEN as usize);
            let mut made = Ok(());
            let is_there = self.copy.each_digest(self.epoch, first, |known| {
                let Some(start) = starts.next() else { return };
                if now.next().is_some_and(|now| now == known) {
                    return;
                }
                let chunk = start..range.end.min(start + DIGEST_CHUNK_LEN);
                match changed.last_mut().filter(|last| last.end == chunk.start) {
                    Some(last) => last.end = chunk.end,
                    None if made.is_ok() => made = push(&mut changed, chunk),
                    None => {}
                }
            });
            made?;
            if !is_there {
                let (page, found) = (self.copy.page(), self.copy.epoch());
                return Err(Error::Conflict { page, expected: self.epoch, found });
            }
        }
        Ok(changed)
    }
}

/// Returns a list of unknown digests for a working copy of `len` bytes, so that every chunk counts as changed.
pub(super) fn unknown_digests(len: u64) -> Result<Vec<Digest>> {
    let (mut digests, count) = (Vec::new(), digest_count(len) as usize);
    make_room(&mut digests, count)?;
    digests.resize(count, UNKNOWN_DIGEST);
    Ok(digests)
}

/// The number of bytes of a page that one thread gathers at a time. All threads together gather at most as many bytes
/// as a wave of a payload.
const PAGE_WAVE_LEN: u64 = WAVE_LEN / IMAGE_THREADS_MAX as u64;

/// Gathers the bytes of whole working copies in pieces of bounded length (waves). This is step 2 for pages whose
/// contents are written to an image.
pub(super) struct CopyWaves<'c> {
    committer: &'c Committer,
    /// The memory of the current wave and its place, or `None` before the first wave.
    memory: Option<(Place, StageMemory)>,
    /// The range of a page whose bytes are in the memory, or `None` before bytes are gathered into the memory.
    holds: Option<(PageId, Range<u64>)>,
}

impl<'c> CopyWaves<'c> {
    pub fn new(committer: &'c Committer) -> Self {
        Self { committer, memory: None, holds: None }
    }

    /// Fills `out` with bytes of a working copy, and records the digests of these bytes. A page must be read in
    /// ascending order, and may be read again from its start.
    pub fn read(
        &mut self,
        copy: &WorkingCopy,
        (live, key): (Span, Span),
        mut offset: u64,
        mut out: &mut [u8],
        digests: &mut ChunkDigests,
    ) -> Result<()> {
        let page = copy.page();
        while !out.is_empty() {
            let begin = offset / PAGE_WAVE_LEN * PAGE_WAVE_LEN;
            let wave = begin..live.len.min(begin + PAGE_WAVE_LEN);
            let aside = self.memory(copy.bytes().place(), live.len)?;
            let target = Span { len: wave.end - wave.start, ..aside };
            // A wave is gathered when its first byte is read. If the page is read a second time, its waves are gathered
            // again, so that the digests always cover the bytes that are returned.
            if offset == begin || self.holds != Some((page, wave.clone())) {
                let gather = Command::Copy { source: part(live, &wave), target };
                let found = self.committer.digests(vec![target], key, vec![gather])?;
                let first = (begin / DIGEST_CHUNK_LEN) as usize;
                digests.digests.truncate(first);
                append(&mut digests.digests, found)?;
                self.holds = Some((page, wave.clone()));
            }
            let len = (wave.end - offset).min(out.len() as u64);
            let source = Span { offset: target.offset + offset - begin, len, ..target };
            let (now, later) = out.split_at_mut(len as usize);
            self.committer.engine.staging.download(Lane::Stage, source, now)?;
            (offset, out) = (offset + len, later);
        }
        Ok(())
    }

    /// Returns device memory for one wave of a page of length `page_len`.
    fn memory(&mut self, place: Place, page_len: u64) -> Result<Span> {
        let len = page_len.min(PAGE_WAVE_LEN);
        if let Some((of, memory)) = &self.memory
            && *of == place
            && memory.byte_len() >= len
        {
            return Ok(memory.part(0, len));
        }
        // The old memory is released first, because two waves would exceed the limit.
        (self.memory, self.holds) = (None, None);
        let memory = self.committer.stage_memory(Purpose::Stage, place, len)?;
        let span = memory.part(0, len);
        self.memory = Some((place, memory));
        Ok(span)
    }
}
