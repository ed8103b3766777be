//! Statistics of the tiers.

use std::collections::BTreeMap;
use std::time::Duration;

use remanent_format::Place;

use crate::base::sync::Mutex;

/// Statistics of one place since the store was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierStats {
    /// The place to which these statistics apply.
    pub place: Place,
    /// The number of pages that [`Store::ensure`](crate::Store::ensure) and [`Store::prefetch`](crate::Store::prefetch)
    /// requested in this place and found in it.
    pub hits: u64,
    /// The number of pages that were requested in this place and found in another place.
    /// [`Stats::moves`](crate::stats::Stats::moves) states in which places they were found.
    pub misses: u64,
    /// The number of pages evicted from this place to make room.
    pub evictions: u64,
    /// The number of commits and other calls that waited for room in this place.
    pub waits: u64,
    /// The total time for which commits and other calls waited for room in this place.
    pub waited: Duration,
}

impl TierStats {
    fn of(place: Place) -> Self {
        Self { place, hits: 0, misses: 0, evictions: 0, waits: 0, waited: Duration::ZERO }
    }
}

/// Statistics of moves between two places since the store was opened. The statistics include evictions and the moves
/// that [`Store::ensure`](crate::Store::ensure) and [`Store::prefetch`](crate::Store::prefetch) request. Moves in a
/// caller's own batches are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MoveStats {
    /// The place that the pages left.
    pub from: Place,
    /// The place that the pages moved to.
    pub to: Place,
    /// The number of pages moved.
    pub pages: u64,
    /// The total length of the moved pages in bytes.
    pub bytes: u64,
    /// The total time of the moves. The time of an eviction ends when its memory is free. The time of a requested move
    /// ends when the move is logged. Pages from disk have arrived by then. If a batch moves pages from several places,
    /// its time is divided among the places in proportion to their bytes.
    ///
    /// A device copies pages from one memory to another after the move is logged, while the caller continues.
    /// [`TransferStats::time`](crate::stats::TransferStats::time) of the same two places includes that copy.
    pub took: Duration,
}

/// The statistics of all places and moves, shared by all threads.
#[derive(Default)]
pub(crate) struct TierCounts(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    tiers: BTreeMap<Place, TierStats>,
    moves: BTreeMap<(Place, Place), MoveStats>,
}

impl TierCounts {
    /// Updates the statistics of one place.
    pub fn at(&self, place: Place, count: impl FnOnce(&mut TierStats)) {
        count(self.0.lock().tiers.entry(place).or_insert_with(|| TierStats::of(place)));
    }

    /// Counts pages that moved to a place, given the original place and the length of each page.
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
