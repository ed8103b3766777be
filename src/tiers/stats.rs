//! Counts of what the tiers did.

use std::collections::BTreeMap;
use std::time::Duration;

use remanent_format::Place;

use crate::base::sync::Mutex;

/// What happened at one place since the store was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierStats {
    /// Which place this is about.
    pub place: Place,
    /// Pages that [`Store::ensure`](crate::Store::ensure) and [`Store::prefetch`](crate::Store::prefetch)
    /// asked for here, and found here.
    pub hits: u64,
    /// Pages that they asked for here, and found elsewhere. [`Stats::moves`](crate::Stats::moves) says where.
    pub misses: u64,
    /// Pages that left to make room.
    pub evictions: u64,
    /// Commits and other calls that waited for room here.
    pub waits: u64,
    /// How long they waited together.
    pub waited: Duration,
}

impl TierStats {
    fn of(place: Place) -> Self {
        Self { place, hits: 0, misses: 0, evictions: 0, waits: 0, waited: Duration::ZERO }
    }
}

/// Pages that the store moved from one place to another since it was opened: what callers asked for, and
/// what left to make room. Moves that a batch of the caller's own names are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MoveStats {
    /// Where the pages were.
    pub from: Place,
    /// Where they went.
    pub to: Place,
    /// Number of pages.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// How long callers and the store's thread took: with what left, until its room was free; with what a
    /// caller asked for, until the move was logged. By then pages from disk are there. Of a batch that moves
    /// pages from several places each place has the share of its bytes.
    ///
    /// A device copies pages from one memory to another after that, while the caller goes on.
    /// [`TransferStats::time`](crate::TransferStats::time) of the same two places ends with its fence.
    pub took: Duration,
}

/// The counts, for all threads.
#[derive(Default)]
pub(crate) struct TierCounts(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    tiers: BTreeMap<Place, TierStats>,
    moves: BTreeMap<(Place, Place), MoveStats>,
}

impl TierCounts {
    /// Counts at one place.
    pub fn at(&self, place: Place, count: impl FnOnce(&mut TierStats)) {
        count(self.0.lock().tiers.entry(place).or_insert_with(|| TierStats::of(place)));
    }

    /// Counts pages that moved to a place: for each the place that it came from, and its length.
    pub fn moved(&self, to: Place, pages: &[(Place, u64)], took: Duration) {
        let all: u64 = pages.iter().map(|(_, len)| len).sum();
        let mut counts = self.0.lock();
        for (from, len) in pages {
            let none = MoveStats { from: *from, to, pages: 0, bytes: 0, took: Duration::ZERO };
            let moves = counts.moves.entry((*from, to)).or_insert(none);
            moves.pages += 1;
            moves.bytes += len;
            moves.took += if all == 0 { Duration::ZERO } else { took.mul_f64(*len as f64 / all as f64) };
        }
    }

    pub fn tiers(&self) -> Vec<TierStats> {
        self.0.lock().tiers.values().copied().collect()
    }

    pub fn moves(&self) -> Vec<MoveStats> {
        self.0.lock().moves.values().copied().collect()
    }
}
