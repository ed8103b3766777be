//! Working copies that are compared with digests of what they were: sixteen bytes for each chunk of 64 KiB
//! ([`digests`](crate::device)), in the host's memory.
//!
//! 1. **Look**: the device digests the copy where it lies. Chunks with other digests than before are
//!    captured.
//! 2. **Gather**: the bytes of these chunks are copied aside in waves of a bounded length, digested there,
//!    and brought to the host: to the payload, or to the image of a page on disk.
//! 3. The digests of 2 become the copy's when the batch is logged.
//!
//! Were those of 1 kept, and the caller wrote to the copy between the two, the log would have other bytes
//! than the digest is of, and the change would never be captured.
//!
//! A crash ends all digests. The key is drawn when the store first needs one.

use std::ops::Range;

use remanent_format::{Epoch, PageId, Place};

use super::Committer;
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

/// Bytes that are looked at by one list, so that its digests are a mebibyte at most.
const LOOK_LEN: u64 = 4 << 30;

/// The key of all digests, in each place where there are copies to digest.
#[derive(Default)]
pub(crate) struct DigestKeys {
    /// As devices read it; empty until it is drawn. In all places it is the same: what one device digested
    /// may be compared with what another one did.
    bytes: Vec<u8>,
    places: Vec<(Place, DeviceBytes)>,
}

impl Committer {
    /// The key for copies in a place.
    ///
    /// # Errors
    /// `OverBudget`, `OutOfMemory`; no randomness; a device error.
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

    /// The digests of ranges, after these commands.
    fn digests(&self, sources: Vec<Span>, key: Span, before: Vec<Command>) -> Result<Vec<Digest>> {
        let count: u64 = sources.iter().map(|source| digest_count(source.len)).sum();
        let target = StagingSpan { index: 0, offset: 0, len: DIGEST_LEN * count as usize };
        let mut commands = before;
        push(&mut commands, Command::Digest { sources, key, target })?;
        let staging = vec![self.engine.staging.take(target.len)?.into_staging()];
        let mut returned = self.run(commands, staging)?;
        let bytes = StagingBuf::new(returned.pop().expect("one staging went in"), target.len);
        let found = copied(bytes.as_chunks().0);
        self.engine.staging.give(bytes.into_staging());
        found
    }

    /// The digests of many ranges, by lists of a bounded length.
    pub(super) fn all_digests(&self, ranges: impl Iterator<Item = Span>, key: Span) -> Result<Vec<Digest>> {
        let (mut all, mut sources, mut len) = (Vec::new(), Vec::new(), 0);
        for span in ranges {
            if len + span.len > LOOK_LEN && len > 0 {
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

    /// Prepares a look at a copy, once the streams' uses of it are done.
    pub(super) fn begin_look<'a>(
        &self,
        step: usize,
        copy: &'a WorkingCopy,
        (epoch, page_len): (Epoch, u64),
        ranges: Option<&[Range<u64>]>,
        key: Span,
    ) -> Result<CopyLook<'a>> {
        let parts = parts(copy.page(), ranges, page_len, DIGEST_CHUNK_LEN)?;
        let live = copy.bytes().arrived(Access::Read)?;
        // Nothing is known after memory became a copy that its page is to follow: all of it counts as
        // changed.
        let is_needed = copy.has_digests();
        Ok(CopyLook { step, copy, epoch, parts, live, key, is_needed, now: Vec::new() })
    }

    /// Step 1, for all copies of a batch: a list for each is a wait for each.
    pub(super) fn look(&self, looks: &mut [CopyLook<'_>]) -> Result<()> {
        for of_place in looks.chunk_by_mut(|one, next| one.key == next.key) {
            let needed = of_place.iter().filter(|look| look.is_needed);
            let ranges = needed.flat_map(|look| look.parts.iter().map(|(range, _)| part(look.live, range)));
            let mut digests = self.all_digests(ranges, of_place[0].key)?.into_iter();
            for look in of_place.iter_mut().filter(|look| look.is_needed) {
                let count: u64 =
                    look.parts.iter().map(|(range, _)| digest_count(range.end - range.start)).sum();
                append(&mut look.now, digests.by_ref().take(count as usize))?;
            }
        }
        Ok(())
    }
}

/// A copy that is looked at.
pub(super) struct CopyLook<'a> {
    /// The operation's index in the batch.
    pub step: usize,
    pub copy: &'a WorkingCopy,
    /// The epoch of the state that it is compared with.
    pub epoch: Epoch,
    /// The ranges that are looked at, whole chunks.
    pub parts: Vec<(Range<u64>, u64)>,
    /// The place of the copy's bytes, and of the key.
    pub live: Span,
    pub key: Span,
    is_needed: bool,
    /// The digests of the parts, one after the other; none if none are needed.
    now: Vec<Digest>,
}

impl CopyLook<'_> {
    /// The changed chunks, as ranges of the page.
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

/// Digests that say nothing: every chunk of a copy of this length counts as changed.
pub(super) fn unknown_digests(len: u64) -> Result<Vec<Digest>> {
    let (mut digests, count) = (Vec::new(), digest_count(len) as usize);
    make_room(&mut digests, count)?;
    digests.resize(count, UNKNOWN_DIGEST);
    Ok(digests)
}

/// The bytes of a wave of one page. Each thread that reads copies has one, and all of them together are a
/// wave of a payload.
const PAGE_WAVE_LEN: u64 = WAVE_LEN / IMAGE_THREADS_MAX as u64;

/// Reads whole copies aside, wave by wave: step 2 for pages whose bytes go to an image.
pub(super) struct CopyWaves<'c> {
    committer: &'c Committer,
    /// The memory of a wave, in this place.
    memory: Option<(Place, StageMemory)>,
    /// What it holds: this range of a page.
    holds: Option<(PageId, Range<u64>)>,
}

impl<'c> CopyWaves<'c> {
    pub fn new(committer: &'c Committer) -> Self {
        Self { committer, memory: None, holds: None }
    }

    /// Reads bytes of a copy as they were gathered, and notes the digests of what was. Reads of a page come
    /// in the order of its bytes, or begin anew.
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
            // Gathered at its first byte, also when the page is read a second time: what is written then is
            // what is digested.
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

    /// Memory for a wave of a page of this length.
    fn memory(&mut self, place: Place, page_len: u64) -> Result<Span> {
        let len = page_len.min(PAGE_WAVE_LEN);
        if let Some((of, memory)) = &self.memory
            && *of == place
            && memory.byte_len() >= len
        {
            return Ok(memory.part(0, len));
        }
        // The old one goes first: two at a time would be more than a wave.
        (self.memory, self.holds) = (None, None);
        let memory = self.committer.stage_memory(Purpose::Stage, place, len)?;
        let span = memory.part(0, len);
        self.memory = Some((place, memory));
        Ok(span)
    }
}
