//! A store as a cache of blocks: each request's blocks are brought to the fast place, or made there.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use remanent::tiers::{Prefetch, ReadAhead};
use remanent::{Error, Key, PageId, Place, Store};

use super::latency::Latency;
use super::room::{BenchStop, Room};
use crate::cli::exit::Failure;
use crate::replay::simulate::SplitMix64;

/// Bytes at the beginning of a block that are compared each time, and at its middle and its end after a run.
const CHECKED: u64 = 16;

/// A store, and the requests that it has yet to see.
pub struct BlockCache<'b> {
    pub store: Store,
    pub room: &'b Room,
    /// The first of the tiers.
    pub fast: Place,
    /// Bytes of a block: a multiple of 8, and at least [`CHECKED`].
    pub len: u64,
    /// Blocks that are asked for at once.
    pub piece: usize,
    /// How many requests' blocks are on their way while one is served.
    pub ahead: Ahead,
    /// How long a request is served once its blocks are there. The caller is idle meanwhile.
    pub service: Duration,
}

/// How far blocks come ahead of the request that asks for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// Those of this number of requests.
    Requests(usize),
    /// As far as the store finds worth while.
    Measured,
}

impl Ahead {
    /// No block comes ahead.
    pub const NONE: Self = Self::Requests(0);
}

/// Blocks that are on their way.
enum InFlightBlocks<'s> {
    Requests { ahead: usize, coming: Vec<Option<Prefetch>> },
    Measured { ahead: ReadAhead<'s>, pushed: usize },
}

/// What a cache did.
pub struct CacheTotals {
    /// Blocks that were there already, by the place in which they were found.
    pub found: BTreeMap<Place, u64>,
    /// Of each request: its blocks that were found in the fast place, and all that were there already.
    pub of_each: Vec<(u64, u64)>,
    /// The time until the blocks of a request that were there already were in the fast place; by request, and
    /// by block: the request's share.
    pub ready: Latency,
    pub ready_block: Latency,
    pub ready_took: Duration,
    /// The same of those requests only that had a block in a slower place.
    pub brought: Latency,
    pub brought_took: Duration,
    /// Blocks that were made, and the time of each request's.
    pub made: u64,
    pub making: Latency,
    pub making_took: Duration,
    /// From the first request to the end of the last one, without the bytes' making and checking.
    pub took: Duration,
    /// Calls ahead that found no room.
    pub refused_ahead: u64,
}

impl CacheTotals {
    /// Nothing was played yet.
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

    /// Blocks that were there when they were asked for.
    pub fn known(&self) -> u64 {
        self.found.values().sum()
    }
}

/// The key of a block.
fn key(id: u64) -> Key {
    Key::new(id.to_be_bytes()).expect("eight bytes")
}

/// A word of a block: every word can be had without those before it.
fn word(id: u64, index: u64) -> [u8; 8] {
    SplitMix64::new(id.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(index)).next_word().to_le_bytes()
}

/// The bytes of a block from one multiple of 8 to another one.
fn bytes(id: u64, from: u64, to: u64) -> Vec<u8> {
    (from / 8..to / 8).flat_map(|index| word(id, index)).collect()
}

impl BlockCache<'_> {
    /// Serves requests, one after the other.
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
                    // What has not begun yet is this request's own work.
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
                // Nothing is ever sent: waiting for it is how a caller is idle.
                let (_silent, silence) = mpsc::channel::<()>();
                let _timeout = silence.recv_timeout(self.service);
            }
        }
        Ok(())
    }

    /// Has blocks come of the requests after `at`. Of a request that is due itself none come ahead.
    fn send_for(
        &self,
        coming: &mut InFlightBlocks<'_>,
        requests: &[Vec<u64>],
        at: usize,
    ) -> Result<(), BenchStop> {
        match coming {
            // Those of the requests in between are under way.
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

    /// The pages of those of these blocks that the store has.
    fn known(&self, request: &[u64]) -> Result<Vec<PageId>, BenchStop> {
        let mut pages = Vec::new();
        for id in request {
            pages.extend(self.lookup(*id)?.map(|(page, _)| page));
        }
        Ok(pages)
    }

    fn lookup(&self, id: u64) -> Result<Option<(PageId, Place)>, BenchStop> {
        match self.store.page_by_key(&key(id)) {
            Ok(info) => Ok(Some((info.page, info.place))),
            Err(Error::UnknownKey { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Serves a request that has waited this long for blocks that came ahead.
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

    /// Compares some bytes of blocks, from this offset on, with those that they were made of.
    fn check(&self, blocks: &[(u64, PageId)], from: u64) -> Result<(), BenchStop> {
        let ranges: Vec<_> = blocks.iter().map(|(_, page)| (*page, from..from + CHECKED)).collect();
        let found = self.store.read_many(&ranges)?.wait()?;
        for (index, (id, page)) in blocks.iter().enumerate() {
            if found.get(index) != bytes(*id, from, from + CHECKED) {
                let text = format!("block {id}, {page}, has other bytes at {from} than it was made of");
                return Err(Failure::Damage(text).into());
            }
        }
        Ok(())
    }

    /// Compares bytes of all blocks, wherever they are. Each must be there.
    pub fn check_all(&self, blocks: impl Iterator<Item = u64>) -> Result<(), BenchStop> {
        let mut all = Vec::new();
        for id in blocks {
            let Some((page, _)) = self.lookup(id)? else {
                return Err(Failure::Damage(format!("block {id} is gone")).into());
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
