//! A store used as a cache of blocks: each request's blocks are moved to the fast place, or created there.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use remanent::tiers::{Prefetch, ReadAhead};
use remanent::{Error, Key, PageId, Place, Store};
use remanent_tools::shared::SplitMix64;
use remanent_tools::shared::exit::Failure;

use crate::latency::Latency;
use crate::room::{BenchStop, Room};

/// The number of bytes that are compared. At each request, they are at the start of a block. After a run, the
/// middle and the end are compared too.
const CHECKED: u64 = 16;

/// A store, and how requests are served from it.
pub struct BlockCache<'b> {
    pub store: Store,
    pub room: &'b Room,
    /// The first of the tiers.
    pub fast: Place,
    /// The length of a block in bytes: a multiple of 8, and at least [`CHECKED`].
    pub len: u64,
    /// The number of blocks that are requested at once.
    pub piece: usize,
    /// The number of later requests whose blocks are prefetched while a request is served.
    pub ahead: Ahead,
    /// The time for which the caller is idle after the blocks of a request are in place.
    pub service: Duration,
}

/// How far blocks are prefetched ahead of the request that needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// The blocks of this number of requests.
    Requests(usize),
    /// The number that the store's read-ahead chooses.
    Measured,
}

impl Ahead {
    /// Blocks are not prefetched.
    pub const NONE: Self = Self::Requests(0);
}

/// Blocks that are being prefetched.
enum InFlightBlocks<'s> {
    Requests { ahead: usize, coming: Vec<Option<Prefetch>> },
    Measured { ahead: ReadAhead<'s>, pushed: usize },
}

/// The results of a run.
pub struct CacheTotals {
    /// The number of existing blocks, by the place in which they were found.
    pub found: BTreeMap<Place, u64>,
    /// For each request, the number of blocks that were found in the fast place, and the number of blocks
    /// that existed.
    pub of_each: Vec<(u64, u64)>,
    /// The time until all existing blocks of a request were in the fast place: per request, and per block as
    /// the request's share.
    pub ready: Latency,
    pub ready_block: Latency,
    pub ready_took: Duration,
    /// The same time as `ready`, only for requests with a block in a slower place.
    pub brought: Latency,
    pub brought_took: Duration,
    /// The number of created blocks, and the time of each request's creations.
    pub made: u64,
    pub making: Latency,
    pub making_took: Duration,
    /// The time from the first request to the end of the last one, without generating and checking bytes.
    pub took: Duration,
    /// The number of prefetches that failed because the fast place was full.
    pub refused_ahead: u64,
}

impl CacheTotals {
    /// Creates empty results.
    pub fn new() -> Self {
        Self {
            found: BTreeMap::new(),
            of_each: Vec::new(),
            ready: Latency::new(),
            ready_block: Latency::new(),
            ready_took: Duration::ZERO,
            brought: Latency::new(),
            brought_took: Duration::ZERO,
            made: 0,
            making: Latency::new(),
            making_took: Duration::ZERO,
            took: Duration::ZERO,
            refused_ahead: 0,
        }
    }

    /// Returns the number of requested blocks that already existed.
    pub fn known(&self) -> u64 {
        self.found.values().sum()
    }
}

/// Returns the key of a block.
fn key(id: u64) -> Key {
    Key::new(id.to_be_bytes()).expect("eight bytes")
}

/// Returns one word of a block, independently of the words before it.
fn word(id: u64, index: u64) -> [u8; 8] {
    SplitMix64::new(id.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(index)).next_word().to_le_bytes()
}

/// Returns the bytes of a block between two multiples of 8.
fn bytes(id: u64, from: u64, to: u64) -> Vec<u8> {
    (from / 8..to / 8).flat_map(|index| word(id, index)).collect()
}

impl BlockCache<'_> {
    /// Serves requests one after the other.
    pub fn play(&self, requests: &[Vec<u64>], played: &mut CacheTotals) -> Result<(), BenchStop> {
        let mut coming = match self.ahead {
            Ahead::Requests(ahead) => InFlightBlocks::Requests { ahead, coming: Vec::new() },
            Ahead::Measured => {
                InFlightBlocks::Measured { ahead: self.store.read_ahead(self.fast)?, pushed: 0 }
            }
        };
        for (at, request) in requests.iter().enumerate() {
            self.room.check()?;
            self.send_for(&mut coming, requests, at)?;
            let started = Instant::now();
            let ended = match &mut coming {
                InFlightBlocks::Requests { coming, .. } => coming[at].take().map(|coming| {
                    // Cancel moves that have not started. The request itself then moves these blocks.
                    coming.cancel()?;
                    coming.wait()
                }),
                InFlightBlocks::Measured { ahead, .. } => Some(ahead.next_step().map(drop)),
            };
            let waited = if ended.is_some() { started.elapsed() } else { Duration::ZERO };
            match ended {
                Some(Err(Error::OverBudget { .. })) => played.refused_ahead += 1,
                ended => ended.unwrap_or(Ok(()))?,
            }
            self.serve(request, waited, played)?;
            if !self.service.is_zero() {
                // Nothing is ever sent: the receive timeout makes the caller idle.
                let (_silent, silence) = mpsc::channel::<()>();
                let _timeout = silence.recv_timeout(self.service);
            }
        }
        Ok(())
    }

    /// Starts prefetching for the requests after `at`. Blocks of the current request are not prefetched.
    fn send_for(
        &self,
        coming: &mut InFlightBlocks<'_>,
        requests: &[Vec<u64>],
        at: usize,
    ) -> Result<(), BenchStop> {
        match coming {
            // The blocks of earlier requests are already being prefetched.
            InFlightBlocks::Requests { ahead, coming } => {
                while coming.len() < (at + 1 + *ahead).min(requests.len()) {
                    let next = coming.len();
                    let pages = if next > at { self.known(&requests[next])? } else { Vec::new() };
                    let is_any = !pages.is_empty();
                    coming.push(if is_any { Some(self.store.prefetch(&pages, self.fast)?) } else { None });
                }
            }
            InFlightBlocks::Measured { ahead, pushed } => {
                while *pushed < requests.len() && (*pushed <= at || ahead.wants_more()) {
                    let pages = if *pushed > at { self.known(&requests[*pushed])? } else { Vec::new() };
                    ahead.push(&pages)?;
                    *pushed += 1;
                }
            }
        }
        Ok(())
    }

    /// Returns the pages of the blocks that exist.
    fn known(&self, request: &[u64]) -> Result<Vec<PageId>, BenchStop> {
        let mut pages = Vec::new();
        for id in request {
            pages.extend(self.lookup(*id)?.map(|(page, _)| page));
        }
        Ok(pages)
    }

    fn lookup(&self, id: u64) -> Result<Option<(PageId, Place)>, BenchStop> {
        match self.store.page_by_key(key(id)) {
            Ok(info) => Ok(Some((info.page, info.place))),
            Err(Error::UnknownKey { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Serves a request that has already waited `waited` for prefetched blocks.
    fn serve(&self, request: &[u64], waited: Duration, played: &mut CacheTotals) -> Result<(), BenchStop> {
        let (mut ready, mut making) = (waited, Duration::ZERO);
        let (mut in_fast, mut count, mut made) = (0, 0, 0);
        for piece in request.chunks(self.piece) {
            let (mut known, mut new) = (Vec::new(), Vec::new());
            for id in piece {
                match self.lookup(*id)? {
                    Some((page, place)) => {
                        *played.found.entry(place).or_default() += 1;
                        in_fast += u64::from(place == self.fast);
                        known.push((*id, page));
                    }
                    None => new.push(*id),
                }
            }
            if !known.is_empty() {
                let pages: Vec<PageId> = known.iter().map(|(_, page)| *page).collect();
                let started = Instant::now();
                self.store.ensure(&pages, self.fast)?;
                ready += started.elapsed();
                self.check(&known, 0)?;
                count += known.len() as u64;
            }
            if !new.is_empty() {
                let mut batch = self.store.batch();
                for id in &new {
                    batch.create_from(bytes(*id, 0, self.len), self.fast).key(key(*id));
                }
                let started = Instant::now();
                self.store.commit(batch)?;
                making += started.elapsed();
                made += new.len() as u64;
            }
        }
        played.of_each.push((in_fast, count));
        if count > 0 {
            played.ready.record(ready);
            played.ready_block.record(ready / count as u32);
            played.ready_took += ready;
            if in_fast < count {
                played.brought.record(ready);
                played.brought_took += ready;
            }
        }
        if made > 0 {
            played.making.record(making);
            played.making_took += making;
            played.made += made;
        }
        played.took += ready + making;
        Ok(())
    }

    /// Compares some bytes of blocks, from `from`, with the expected ones.
    fn check(&self, blocks: &[(u64, PageId)], from: u64) -> Result<(), BenchStop> {
        let ranges: Vec<_> = blocks.iter().map(|(_, page)| (*page, from..from + CHECKED)).collect();
        let found = self.store.read_many(&ranges)?.wait()?;
        for (index, (id, page)) in blocks.iter().enumerate() {
            if found.get(index) != bytes(*id, from, from + CHECKED) {
                let text = format!("block {id}, page {page}, has wrong bytes at offset {from}");
                return Err(Failure::Damage(text).into());
            }
        }
        Ok(())
    }

    /// Compares bytes of all blocks, in any place. Every block must exist.
    pub fn check_all(&self, blocks: impl Iterator<Item = u64>) -> Result<(), BenchStop> {
        let mut all = Vec::new();
        for id in blocks {
            let Some((page, _)) = self.lookup(id)? else {
                return Err(Failure::Damage(format!("block {id} is missing")).into());
            };
            all.push((id, page));
        }
        let last = self.len - CHECKED;
        for blocks in all.chunks(1024) {
            self.room.check()?;
            for from in [0, last / 16 * 8, last] {
                self.check(blocks, from)?;
            }
        }
        Ok(())
    }
}
