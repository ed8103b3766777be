//! The account of one place, which counts the used bytes of the place's budget by purpose.
//!
//! Threads that allocate concurrently share only these counters, so an allocation takes no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::Place;

use crate::error::{Error, Result};

/// The purpose for which page memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Purpose {
    /// The bytes of a page.
    Page,
    /// The memory to which a leased page is copied when a batch changes the page.
    Relocation,
    /// The earlier contents of a page, kept until an exact snapshot has gathered the page.
    Aside,
    /// Memory that callers use: sources of a batch, working copies, and shadows.
    Caller,
    /// Memory in which a commit is assembled on the device before it is logged.
    Stage,
    /// Memory in which snapshots and long reads gather bytes before the bytes are copied to the host. The bitmaps of
    /// comparisons are also counted here.
    Gather,
    /// A page in caller-owned memory. Such memory is outside the budget, because it belongs to the caller or is already
    /// counted for [`Purpose::Caller`].
    Lent,
    /// The memory of an image file to which the device copies pages. This memory is freed when an allocation for any
    /// other purpose needs the budget.
    Image,
}

impl Purpose {
    /// All purposes, in the order of their discriminants.
    pub const ALL: [Self; 8] = [
        Self::Page,
        Self::Relocation,
        Self::Aside,
        Self::Caller,
        Self::Stage,
        Self::Gather,
        Self::Lent,
        Self::Image,
    ];
}

/// The number of bytes used in one place, by state and by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlaceUsage {
    /// The number of allocated bytes, excluding caller-owned memory.
    pub allocated_bytes: u64,
    /// The number of bytes that their owner no longer needs, but that a lane may still use.
    pub retired_bytes: u64,
    /// The number of bytes claimed for allocations that are not complete yet.
    pub claimed_bytes: u64,
    /// The maximum total of allocated and retired bytes since the peak was last reset.
    pub peak_bytes: u64,
    /// The number of allocations and pieces of caller-owned memory, including those of length 0.
    pub count: u64,
    /// The number of allocated bytes and caller-owned bytes for each purpose.
    by_purpose: [u64; Purpose::ALL.len()],
}

impl PlaceUsage {
    /// Returns the number of bytes that count against the budget.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.allocated_bytes + self.retired_bytes + self.claimed_bytes
    }

    /// Returns the number of bytes allocated for `purpose`. Bytes are counted for the purpose for which they were
    /// allocated, until they are retired or passed to a caller.
    #[must_use]
    pub fn bytes_for(&self, purpose: Purpose) -> u64 {
        self.by_purpose[purpose as usize]
    }
}

/// A handle that reads the free budget of a place without a lock.
#[derive(Clone, Debug)]
pub struct PlaceRoom(Arc<Account>);

impl PlaceRoom {
    pub(super) fn new(account: Arc<Account>) -> Self {
        Self(account)
    }

    /// Returns the limit of the place in bytes, or `u64::MAX` if the place has no limit.
    pub fn budget(&self) -> u64 {
        self.0.budget
    }

    /// Returns the number of bytes that are free or will be free after the work queued on the lanes.
    pub fn free_soon(&self) -> u64 {
        // Retired bytes are read first. If bytes are released between the two reads, they count as free twice, but
        // never as used.
        let retired = self.0.retired.load(Ordering::Acquire);
        let used = self.0.used.load(Ordering::Relaxed).saturating_sub(retired);
        self.0.budget.saturating_sub(used)
    }
}

/// The budget of a place, and the counters of its use. Bytes are claimed before the device is called, so that
/// concurrent threads cannot exceed the budget together.
#[derive(Debug)]
pub(super) struct Account {
    place: Place,
    budget: u64,
    /// The total number of claimed, allocated and retired bytes.
    used: AtomicU64,
    /// The total number of allocated and retired bytes, of which `peak` records the maximum.
    taken: AtomicU64,
    retired: AtomicU64,
    peak: AtomicU64,
    count: AtomicU64,
    by_purpose: [AtomicU64; Purpose::ALL.len()],
}

impl Account {
    pub fn new(place: Place, budget: u64) -> Self {
        Self {
            place,
            budget,
            used: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            count: AtomicU64::new(0),
            by_purpose: Default::default(),
        }
    }

    /// Claims `len` bytes of the budget.
    ///
    /// # Errors
    /// `OverBudget` if fewer bytes are left. No bytes are then claimed.
    pub fn claim(&self, len: u64) -> Result<()> {
        let within = |used: u64| used.checked_add(len).filter(|sum| *sum <= self.budget); // I10
        let claimed = self.used.fetch_update(Ordering::Acquire, Ordering::Relaxed, within);
        let (place, budget) = (self.place, self.budget);
        let over = |used| Error::OverBudget { place, requested: len, available: budget - used, budget };
        claimed.map(drop).map_err(over)
    }

    /// Returns to the budget `len` claimed bytes that were not allocated.
    pub fn unclaim(&self, len: u64) {
        self.used.fetch_sub(len, Ordering::Relaxed);
    }

    /// Counts claimed bytes as allocated for `count` pages.
    pub fn allocated(&self, purpose: Purpose, count: u64, len: u64) {
        let taken = self.taken.fetch_add(len, Ordering::Relaxed) + len;
        self.peak.fetch_max(taken, Ordering::Relaxed);
        self.count.fetch_add(count, Ordering::Relaxed);
        self.by_purpose[purpose as usize].fetch_add(len, Ordering::Relaxed);
    }

    /// Counts a page's bytes for [`Purpose::Caller`] instead of `purpose` from now on.
    pub fn handed_out(&self, purpose: Purpose, len: u64) {
        self.by_purpose[purpose as usize].fetch_sub(len, Ordering::Relaxed);
        self.by_purpose[Purpose::Caller as usize].fetch_add(len, Ordering::Relaxed);
    }

    /// Counts `len` caller-owned bytes that a page starts to use. Such bytes do not use the budget.
    pub fn lent(&self, len: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.by_purpose[Purpose::Lent as usize].fetch_add(len, Ordering::Relaxed);
    }

    /// Counts `len` caller-owned bytes that a page no longer uses.
    pub fn lent_returned(&self, len: u64) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.by_purpose[Purpose::Lent as usize].fetch_sub(len, Ordering::Relaxed);
    }

    /// Counts `len` allocated bytes of `count` pages as retired. A lane may still use the bytes.
    pub fn retired(&self, purpose: Purpose, count: u64, len: u64) {
        self.retired.fetch_add(len, Ordering::Relaxed);
        self.count.fetch_sub(count, Ordering::Relaxed);
        self.by_purpose[purpose as usize].fetch_sub(len, Ordering::Relaxed);
    }

    /// Counts `len` retired bytes as released.
    pub fn released(&self, len: u64) {
        // The order of these two operations matters. A thread that claims the released bytes no longer counts them in
        // `taken`, so the peak never exceeds the budget. A thread that no longer counts them as retired no longer
        // counts them as used either.
        self.taken.fetch_sub(len, Ordering::Relaxed);
        self.used.fetch_sub(len, Ordering::Release);
        self.retired.fetch_sub(len, Ordering::Release);
    }

    /// Returns whether `len` bytes would fit into the budget if no memory were retired.
    pub fn fits_without_retired(&self, len: u64) -> bool {
        // The two counters are read at different times, retired bytes first. Bytes that are released in between make
        // the result `true`, and the following claim decides exactly.
        let retired = self.retired.load(Ordering::Acquire);
        let used = self.used.load(Ordering::Relaxed).saturating_sub(retired);
        used.checked_add(len).is_some_and(|sum| sum <= self.budget)
    }

    /// Returns the number of bytes of the budget that are neither claimed, allocated nor retired.
    pub fn available(&self) -> u64 {
        self.budget - self.used.load(Ordering::Relaxed)
    }

    /// Resets the peak to the number of bytes that are currently allocated or retired.
    pub fn reset_peak(&self) {
        self.peak.store(self.taken.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns the current usage. Counters that change during the call may be read at different moments.
    pub fn usage(&self) -> PlaceUsage {
        let [used, taken, retired, peak, count] =
            [&self.used, &self.taken, &self.retired, &self.peak, &self.count]
                .map(|number| number.load(Ordering::Relaxed));
        PlaceUsage {
            allocated_bytes: taken.saturating_sub(retired),
            retired_bytes: retired,
            claimed_bytes: used.saturating_sub(taken),
            peak_bytes: peak,
            count,
            by_purpose: self.by_purpose.each_ref().map(|bytes| bytes.load(Ordering::Relaxed)),
        }
    }
}
