//! Detects replicas that have diverged, by comparing digests of the pages in the stores of all ranks.
//!
//! 1. The ranks exchange random seeds, and all derive the digest key from the seed of rank 0. With a new random key for
//!    each comparison, different contents have equal digests only with a probability below 2^-100
//!    ([`digests`](crate::device)).
//! 2. Each rank digests its pages, on the device and in one state of the store. Only sixteen bytes for each chunk of 64
//!    KiB reach the host. The host combines them to one digest of all pages, and digests the page table.
//! 3. The ranks exchange the two digests. If these are equal on all ranks, the comparison ends. Equal replicas thus
//!    exchange a few hundred bytes, regardless of the number of pages.
//! 4. Otherwise each rank combines the digests of the chunks of each page, the ranks exchange the digests of all pages,
//!    and each rank determines the pages that differ.
//!
//! A rank that fails locally still takes part in the next exchange, so that the other ranks detect the failure
//! immediately.

use std::collections::BTreeMap;
use std::ops::Range;

use remanent_format::{Lsn, PageId, PageInfo, Place};

use super::Store;
use crate::applier::Turn;
use crate::base::allocation::{append, make_room, push};
use crate::device::{
    Command, CommandList, Communicator, DIGEST_CHUNK_LEN, DIGEST_KEY_LEN, DIGEST_LEN, DIGEST_SEED_LEN,
    DeviceBytes, Digest, Pending, Span, StagingSpan, digest_count, digest_key, digest_of_bytes,
    digest_of_chunks,
};
use crate::engine::Engine;
use crate::error::{Error, NcclError, Refused, Result};
use crate::images::disk_pages::DiskPage;
use crate::memory::staging::{StagingBuf, StagingPool};
use crate::recovery::opening::random;

/// The maximum number of bytes that one command list digests. The digests of a list then take at most 1 MiB of staging.
const DIGEST_LIST_LEN: u64 = 4 << 30;

/// The maximum number of bytes that a rank contributes to one exchange of page digests.
const EXCHANGE_LEN: usize = 4 << 20;

/// The result of [`Store::agrees`], which is the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Agreement {
    /// The newest batch that each rank's pages reflect, by rank.
    pub lsns: Vec<Lsn>,
    /// The number of pages that were compared.
    pub pages: u64,
    /// The number of bytes that were compared.
    pub bytes: u64,
    /// The pages whose contents differ, in ascending order.
    pub diverged: Vec<DivergedPage>,
}

impl Agreement {
    /// Returns whether all pages are equal on all ranks.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.diverged.is_empty()
    }
}

/// A page whose contents differ between ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DivergedPage {
    /// The page's id.
    pub page: PageId,
    /// The ranks, grouped by equal contents. The largest group is first. Of equally large groups, the one with the
    /// lowest rank is first.
    pub groups: Vec<Vec<u32>>,
}

/// The summary of a rank's pages, which the ranks exchange.
struct Summary {
    /// Whether the rank failed to digest its pages. The other fields are then zero.
    has_failed: bool,
    lsn: Lsn,
    pages: u64,
    bytes: u64,
    /// The digest of the page table: ids, lengths and keys.
    table: Digest,
    /// The digest of the chunk digests of all pages.
    contents: Digest,
}

impl Summary {
    const LEN: usize = 32 + 2 * DIGEST_LEN;

    fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let words = [u64::from(self.has_failed), self.lsn.0, self.pages, self.bytes];
        for (at, word) in bytes.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        bytes[32..48].copy_from_slice(&self.table);
        bytes[48..].copy_from_slice(&self.contents);
        bytes
    }

    fn of(bytes: &[u8]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
        let digest = |at: usize| std::array::from_fn(|byte| bytes[at + byte]);
        Self {
            has_failed: word(0) != 0,
            lsn: Lsn(word(1)),
            pages: word(2),
            bytes: word(3),
            table: digest(32),
            contents: digest(48),
        }
    }

    fn failed() -> Self {
        Self { has_failed: true, lsn: Lsn(0), pages: 0, bytes: 0, table: [0; 16], contents: [0; 16] }
    }
}

/// The digests of all pages of a store in one state.
struct PageDigests {
    /// The pages, each with the range of its chunks.
    pages: Vec<(PageId, Range<usize>)>,
    /// The digests of the chunks of all pages.
    chunks: Vec<Digest>,
    summary: Summary,
}

impl PageDigests {
    /// Returns the digest of each page, which takes the host about 7 us per page.
    fn of_pages(&self, key: &[u8]) -> Result<Vec<Digest>> {
        let mut digests = Vec::new();
        make_room(&mut digests, self.pages.len())?;
        for (_, chunks) in &self.pages {
            digests.push(digest_of_chunks(&self.chunks[chunks.clone()], key)?);
        }
        Ok(digests)
    }
}

/// The pages of a store in one state, and the command lists in flight that digest them.
struct Digesting {
    lsn: Lsn,
    infos: Vec<PageInfo>,
    lists: Vec<DigestList>,
    on_disk: Vec<(usize, DiskPage)>,
}

/// A command list in flight that digests pages of one place.
struct DigestList {
    pending: Pending,
    /// The pages, by their position in the table.
    pages: Vec<usize>,
    /// The length of the digests in bytes.
    len: usize,
}

impl Store {
    /// Compares the pages of all ranks' stores, and returns which pages differ between which ranks. Use it to detect
    /// replicas that have diverged silently.
    ///
    /// All ranks must call this. Each rank's pages are compared in their state after all batches that the rank has
    /// submitted, so replicas that commit in lockstep call it after the same batch. Batches may be committed during the
    /// comparison. The pages are digested on the GPU at the speed of its memory. Equal replicas exchange only a few
    /// hundred bytes. Pages are identified by their ids. Places, epochs and metadata are not compared, but lengths and
    /// keys are.
    ///
    /// ```no_run
    /// # fn agree(store: &remanent::Store, communicator: &remanent::nccl::Communicator) -> remanent::Result<()> {
    /// let agreement = store.agrees(communicator)?;
    /// for diverged in &agreement.diverged {
    ///     eprintln!("page {} differs: equal ranks are {:?}", diverged.page, diverged.groups);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`NcclError::Unlike`] if the stores have pages with different ids, lengths or keys, or if another rank failed;
    /// [`Error::Refused`] if the communicator's GPU holds no pages of the store; [`Error::Nccl`]; [`Error::OverBudget`]
    /// or [`Error::OutOfMemory`] if the GPU has no memory for the exchange; [`Error::Damaged`] for a page on disk;
    /// a device error.
    pub fn agrees(&self, communicator: &Communicator) -> Result<Agreement> {
        self.of_device(|| {
            let exchange = Exchange { store: self, communicator, place: self.place_on(communicator.gpu())? };
            // Step 1.
            let own_seed: [u8; DIGEST_SEED_LEN] = random()?;
            let seeds = exchange.gather(&own_seed)?;
            let key = digest_key(seeds.first_chunk().expect("rank 0 has contributed"))?;
            // Step 2.
            let own = self.page_digests(&key);
            // Step 3.
            let failed = Summary::failed();
            let summary = own.as_ref().map_or(&failed, |own| &own.summary);
            let summaries = exchange.gather(&summary.to_bytes())?;
            let summaries: Vec<Summary> = summaries.chunks_exact(Summary::LEN).map(Summary::of).collect();
            let own = own?;
            check_alike(&summaries)?;
            let mut agreement = Agreement {
                lsns: summaries.iter().map(|summary| summary.lsn).collect(),
                pages: own.summary.pages,
                bytes: own.summary.bytes,
                diverged: Vec::new(),
            };
            // Step 4.
            if summaries.iter().any(|summary| summary.contents != own.summary.contents) {
                let digests = own.of_pages(&key);
                // The others would wait for a rank that has no digests.
                let failed = exchange.gather(&[u8::from(digests.is_err())])?;
                let digests = digests?;
                if let Some(rank) = failed.iter().position(|failed| *failed != 0) {
                    return Err(failed_to_digest(rank));
                }
                let pieces = own.pages.chunks(EXCHANGE_LEN / DIGEST_LEN);
                for (pages, digests) in pieces.zip(digests.chunks(EXCHANGE_LEN / DIGEST_LEN)) {
                    let all = exchange.gather(digests.as_flattened())?;
                    append(&mut agreement.diverged, diverged(pages, all.as_chunks().0))?;
                }
            }
            Ok(agreement)
        })
    }

    /// Returns the place of pages in the memory of the given GPU.
    ///
    /// # Errors
    /// `Refused` if no device slot is bound to the GPU.
    fn place_on(&self, gpu: u32) -> Result<Place> {
        let device = &self.engine().device;
        let place = self.parts.options.device_places().find(|place| device.gpu_at(*place) == Some(gpu));
        place.ok_or_else(|| {
            let reason = format!("the store has no pages on GPU {gpu}, which the communicator uses");
            Error::Refused(Refused::Memory { len: 0, reason })
        })
    }

    /// Digests all pages in one state.
    fn page_digests(&self, key: &[u8]) -> Result<PageDigests> {
        let Engine { applier, device, staging, .. } = self.engine();
        let mut keys: Vec<(Place, DeviceBytes)> = Vec::new();
        applier.unloaded().wait_all()?;
        // The places of the pages are known only on the applier's thread. Each attempt may find another place that
        // needs a key.
        let Digesting { lsn, infos, lists, on_disk } = loop {
            let (pool, key_spans) =
                (staging.clone(), keys.iter().map(|(place, key)| (*place, key.span())).collect());
            match applier.turn(move |turn| begin(turn, &pool, &key_spans))? {
                Begun::Digesting(digesting) => break digesting,
                Begun::NoKeyIn(place) => {
                    let bytes = self.committer().device_bytes(place, DIGEST_KEY_LEN)?;
                    bytes.write(0, key)?;
                    push(&mut keys, (place, bytes))?;
                }
            }
        };
        let (mut pages, mut count) = (Vec::new(), 0);
        make_room(&mut pages, infos.len())?;
        for info in &infos {
            let end = count + digest_count(info.len) as usize;
            pages.push((info.page, count..end));
            count = end;
        }
        let mut chunks = Vec::new();
        make_room(&mut chunks, count)?;
        chunks.resize(count, [0; DIGEST_LEN]);
        // Even after an error, all lists must end, because they use the memory of the keys.
        let finished: Vec<_> =
            lists.into_iter().map(|list| (list.pages, list.len, device.finish(list.pending))).collect();
        for (numbers, len, returned) in finished {
            let bytes = StagingBuf::new(returned?.pop().expect("one staging went in"), len);
            let mut found: &[Digest] = bytes.as_chunks().0;
            for number in numbers {
                let (own, rest) = found.split_at(digest_count(infos[number].len) as usize);
                chunks[pages[number].1.clone()].copy_from_slice(own);
                found = rest;
            }
            staging.put(bytes.into_staging());
        }
        for (number, on_disk) in on_disk {
            digest_on_disk(&on_disk, infos[number].len, key, &mut chunks[pages[number].1.clone()])?;
        }
        let summary = summarized(lsn, &infos, &chunks, key)?;
        Ok(PageDigests { pages, chunks, summary })
    }
}

/// The result of an attempt to start digesting.
enum Begun {
    Digesting(Digesting),
    /// A page is in this place, for which `keys` contains no key.
    NoKeyIn(Place),
}

/// Starts to digest all pages. Digests nothing if `keys` contains no key for the place of a page.
fn begin(turn: &mut Turn<'_>, pool: &StagingPool, keys: &BTreeMap<Place, Span>) -> Result<Begun> {
    turn.intact()?;
    let mut infos = Vec::new();
    append(&mut infos, turn.applied.table.pages())?;
    let mut on_disk = Vec::new();
    let mut batches: BTreeMap<Place, DigestSources> = BTreeMap::new();
    let mut ready = Vec::new();
    for (number, info) in infos.iter().enumerate() {
        if let Some(page) = turn.applied.on_disk.get(info.page) {
            push(&mut on_disk, (number, page.clone()))?;
        } else if info.len > 0 {
            let Some(key) = keys.get(&info.place) else { return Ok(Begun::NoKeyIn(info.place)) };
            let sources = batches.entry(info.place).or_insert_with(|| DigestSources::new(*key));
            if sources.len + info.len > DIGEST_LIST_LEN && sources.len > 0 {
                push(&mut ready, std::mem::replace(sources, DigestSources::new(*key)))?;
            }
            sources.len += info.len;
            push(&mut sources.spans, turn.applied.memory[info.page].span())?;
            push(&mut sources.pages, number)?;
        }
    }
    append(&mut ready, batches.into_values())?;
    let mut lists = Vec::new();
    make_room(&mut lists, ready.len())?;
    for sources in ready {
        lists.push(sources.submit(turn, pool)?);
    }
    Ok(Begun::Digesting(Digesting { lsn: turn.applied.point.lsn, infos, lists, on_disk }))
}

/// The pages that one command list will digest.
struct DigestSources {
    key: Span,
    spans: Vec<Span>,
    pages: Vec<usize>,
    len: u64,
}

impl DigestSources {
    fn new(key: Span) -> Self {
        Self { key, spans: Vec::new(), pages: Vec::new(), len: 0 }
    }

    fn submit(self, turn: &Turn<'_>, pool: &StagingPool) -> Result<DigestList> {
        let count: u64 = self.spans.iter().map(|span| digest_count(span.len)).sum();
        let target = StagingSpan { index: 0, offset: 0, len: DIGEST_LEN * count as usize };
        let staging = vec![pool.take(target.len)?.into_staging()];
        let commands = vec![Command::Digest { sources: self.spans, key: self.key, target }];
        let pending = turn.submit(CommandList { commands, staging })?;
        Ok(DigestList { pending, pages: self.pages, len: target.len })
    }
}

/// Digests the chunks of a page on disk on the calling thread.
fn digest_on_disk(page: &DiskPage, len: u64, key: &[u8], chunks: &mut [Digest]) -> Result<()> {
    let mut bytes = Vec::new();
    make_room(&mut bytes, DIGEST_CHUNK_LEN as usize)?;
    for (offset, chunk) in (0..len).step_by(DIGEST_CHUNK_LEN as usize).zip(chunks) {
        bytes.resize(DIGEST_CHUNK_LEN.min(len - offset) as usize, 0);
        page.read(offset, &mut bytes)?;
        *chunk = digest_of_bytes(&bytes, key)?;
    }
    Ok(())
}

/// Combines the digests of all chunks. The table, which contains the lengths, determines the page of each chunk.
fn summarized(lsn: Lsn, infos: &[PageInfo], chunks: &[Digest], key: &[u8]) -> Result<Summary> {
    let (mut table, mut bytes) = (Vec::new(), 0_u64);
    for info in infos {
        bytes = bytes.saturating_add(info.len);
        // A key is at most 64 bytes long, so a byte holds its length.
        let page_key = info.key.as_ref().map_or(&[][..], |key| key.as_bytes());
        let row = info.page.0.to_le_bytes().into_iter().chain(info.len.to_le_bytes());
        append(&mut table, row.chain([page_key.len() as u8]).chain(page_key.iter().copied()))?;
    }
    Ok(Summary {
        has_failed: false,
        lsn,
        pages: infos.len() as u64,
        bytes,
        table: digest_of_bytes(&table, key)?,
        contents: digest_of_chunks(chunks, key)?,
    })
}

/// Returns an error if a rank failed, or if the page tables of two ranks differ.
///
/// # Errors
/// `Unlike`, which names the rank.
fn check_alike(summaries: &[Summary]) -> Result<()> {
    if let Some(rank) = summaries.iter().position(|summary| summary.has_failed) {
        return Err(failed_to_digest(rank));
    }
    let groups = groups(summaries.iter().map(|summary| (summary.table, summary.pages, summary.bytes)));
    let [common, other, ..] = &groups[..] else { return Ok(()) };
    let of = |rank: u32| {
        let Summary { pages, bytes, lsn, .. } = &summaries[rank as usize];
        format!("{pages} pages with {bytes} bytes at batch {lsn}")
    };
    let reason = format!(
        "its pages have other ids, lengths or keys than those of rank {}: it has {}, not {}",
        common[0],
        of(other[0]),
        of(common[0])
    );
    Err(NcclError::Unlike { rank: other[0], reason }.into())
}

fn failed_to_digest(rank: usize) -> Error {
    NcclError::Unlike { rank: rank as u32, reason: "it failed to digest its pages".to_owned() }.into()
}

/// Groups the ranks by equal values. The largest group is first. Of equally large groups, the one with the lowest rank
/// is first.
fn groups<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<Vec<u32>> {
    let mut groups: Vec<(T, Vec<u32>)> = Vec::new();
    for (rank, value) in (0..).zip(values) {
        match groups.iter_mut().find(|(of, _)| *of == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((value, vec![rank])),
        }
    }
    let mut groups: Vec<Vec<u32>> = groups.into_iter().map(|(_, ranks)| ranks).collect();
    groups.sort_by_key(|ranks| (std::cmp::Reverse(ranks.len()), ranks[0]));
    groups
}

/// Returns the pages whose digests differ. `digests` contains the digests of all ranks, one rank after another.
fn diverged(pages: &[(PageId, Range<usize>)], digests: &[Digest]) -> Vec<DivergedPage> {
    let of_page = |number: usize| digests.iter().skip(number).step_by(pages.len());
    let differs = |(number, (page, _)): (usize, &(PageId, Range<usize>))| {
        let groups = groups(of_page(number));
        (groups.len() > 1).then_some(DivergedPage { page: *page, groups })
    };
    pages.iter().enumerate().filter_map(differs).collect()
}

/// Exchanges short byte strings between the ranks.
struct Exchange<'a> {
    store: &'a Store,
    communicator: &'a Communicator,
    place: Place,
}

impl Exchange<'_> {
    /// Sends `own`, and returns the bytes of all ranks, one rank after another. All ranks must send the same number of
    /// bytes, at least one.
    fn gather(&self, own: &[u8]) -> Result<Vec<u8>> {
        let (rank, ranks) = (u64::from(self.communicator.rank()), u64::from(self.communicator.ranks()));
        let len = own.len() as u64;
        let all = self.store.committer().device_bytes(self.place, len * ranks)?;
        let part = all.part(rank * len..(rank + 1) * len)?;
        part.write(0, own)?;
        self.communicator.all_gather(&part, &all)?.wait()?;
        let mut bytes = Vec::new();
        make_room(&mut bytes, all.byte_len() as usize)?;
        bytes.resize(all.byte_len() as usize, 0);
        all.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_grouped_by_majority() {
        assert_eq!(groups([5, 5, 5].into_iter()), [[0, 1, 2]]);
        assert_eq!(groups([5, 7, 7].into_iter()), [vec![1, 2], vec![0]]);
        assert_eq!(groups([5, 7].into_iter()), [[0], [1]]);
        assert_eq!(groups([9, 7, 5, 7, 9].into_iter()), [vec![0, 4], vec![1, 3], vec![2]]);
    }

    #[test]
    fn pages_with_different_digests_are_found() {
        let digest = |byte| [byte; DIGEST_LEN];
        let pages = [(PageId(3), 0..1), (PageId(5), 1..4), (PageId(8), 4..4)];
        let ranks = [[1, 2, 3], [1, 9, 3], [1, 2, 4]];
        let digests: Vec<Digest> = ranks.as_flattened().iter().map(|byte| digest(*byte)).collect();
        let found = diverged(&pages, &digests);
        let expected = [(PageId(5), vec![vec![0, 2], vec![1]]), (PageId(8), vec![vec![0, 1], vec![2]])];
        assert!(found.iter().map(|of| (of.page, of.groups.clone())).eq(expected), "{found:?}");
    }

    #[test]
    fn summary_survives_the_exchange() {
        let summary =
            Summary { has_failed: false, lsn: Lsn(5), pages: 6, bytes: 7, table: [8; 16], contents: [9; 16] };
        let read = Summary::of(&summary.to_bytes());
        assert_eq!((read.has_failed, read.lsn, read.pages, read.bytes), (false, Lsn(5), 6, 7));
        assert_eq!((read.table, read.contents), ([8; 16], [9; 16]));
        assert!(Summary::of(&Summary::failed().to_bytes()).has_failed);
    }
}
