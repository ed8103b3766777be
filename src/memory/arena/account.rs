//! The account of one place: how much of its budget is used, and for what.
//!
//! Threads that allocate at the same time meet in these numbers only, so no lock is held for a page.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use remanent_format::Place;

use crate::error::{Error, Result};

/// The purpose that page memory is allocated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Purpose {
    /// A page's own bytes.
    Page,
    /// The memory to which a page moves that is changed while it is leased.
    Relocation,
    /// A page as it was, for an exact snapshot.
    Aside,
    /// Memory for a caller's kernels: bytes that a batch takes, working copies, shadows.
    Caller,
    /// Memory in which a commit is put together on the device before it is logged.
    Stage,
    /// Memory in which a snapshot gathers pages, or a long read its bytes, on their way to the host; the
    /// marks of a comparison.
    Gather,
    /// A page in memory of the caller's, which is beside the budget: it is the caller's own, or counted for
    /// [`Purpose::Caller`] already.
    Lent,
    /// The memory of an image file that the device copies to. It gives way to every other purpose.
    Image,
}

impl Purpose {
    /// All purposes, in the order of their numbers.
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

/// The use of a place's budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlaceUsage {
    /// Bytes of pages.
    pub allocated_bytes: u64,
    /// Bytes given up that a lane may still use.
    pub retired_bytes: u64,
    /// Bytes claimed for allocations that are being made.
    pub claimed_bytes: u64,
    /// The most bytes that allocated and retired have been together since the peak was last reset.
    pub peak_bytes: u64,
    /// Number of pages, those of length 0 included.
    pub count: u64,
    /// Allocated bytes by their purpose.
    by_purpose: [u64; Purpose::ALL.len()],
}

impl PlaceUsage {
    /// Bytes that count against the budget.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.allocated_bytes + self.retired_bytes + self.claimed_bytes
    }

    /// Bytes allocated for this purpose. Bytes stay counted for the purpose that they were allocated for
    /// until they are given up.
    #[must_use]
    pub fn bytes_for(&self, purpose: Purpose) -> u64 {
        self.by_purpose[purpose as usize]
    }
}

/// How much room a place has, looked at without a lock.
#[derive(Clone, Debug)]
pub struct PlaceRoom(Arc<Account>);

impl PlaceRoom {
    pub(super) fn new(account: Arc<Account>) -> Self {
        Self(account)
    }

    /// The limit of the place in bytes; `u64::MAX` if it has none.
    pub fn budget(&self) -> u64 {
        self.0.budget
    }

    /// Bytes that are free, or will be once the lanes have come as far as they were told to.
    pub fn free_soon(&self) -> u64 {
        // What is released in between is not counted twice: retired bytes are read first.
        let retired = self.0.retired.load(Ordering::Acquire);
        let used = self.0.used.load(Ordering::Relaxed).saturating_sub(retired);
        self.0.budget.saturating_sub(used)
    }
}

/// A place's budget and its use. Bytes are claimed before the device is asked, so that threads which allocate
/// at the same time cannot exceed the budget together.
#[derive(Debug)]
pub(super) struct Account {
    place: Place,
    budget: u64,
    /// Claimed, allocated and retired bytes.
    used: AtomicU64,
    /// Allocated and retired bytes.
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

    /// Takes bytes out of the budget.
    ///
    /// # Errors
    /// `OverBudget`, with nothing taken.
    pub fn claim(&self, len: u64) -> Result<()> {
        let within = |used: u64| used.checked_add(len).filter(|sum| *sum <= self.budget); // I10
        let claimed = self.used.fetch_update(Ordering::Acquire, Ordering::Relaxed, within);
        let (place, budget) = (self.place, self.budget);
        let over = |used| Error::OverBudget { place, asked: len, available: budget - used, budget };
        claimed.map(drop).map_err(over)
    }

    /// Puts claimed bytes back that were not allocated.
    pub fn unclaim(&self, len: u64) {
        self.used.fetch_sub(len, Ordering::Relaxed);
    }

    /// Counts claimed bytes as allocated for some pages.
    pub fn allocated(&self, purpose: Purpose, count: u64, len: u64) {
        let taken = self.taken.fetch_add(len, Ordering::Relaxed) + len;
        self.peak.fetch_max(taken, Ordering::Relaxed);
        self.count.fetch_add(count, Ordering::Relaxed);
        self.by_purpose[purpose as usize].fetch_add(len, Ordering::Relaxed);
    }

    /// Counts bytes of a page as a caller's from now on.
    pub fn handed_out(&self, purpose: Purpose, len: u64) {
        self.by_purpose[purpose as usize].fetch_sub(len, Ordering::Relaxed);
        self.by_purpose[Purpose::Caller as usize].fetch_add(len, Ordering::Relaxed);
    }

    /// Counts bytes that a caller lent to a page. They are not of the budget.
    pub fn lent(&self, len: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.by_purpose[Purpose::Lent as usize].fetch_add(len, Ordering::Relaxed);
    }

    /// Counts lent bytes as given up by their page.
    pub fn given_up(&self, len: u64) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.by_purpose[Purpose::Lent as usize].fetch_sub(len, Ordering::Relaxed);
    }

    /// Counts allocated bytes of some pages as given up; a lane may still use them.
    pub fn retired(&self, purpose: Purpose, count: u64, len: u64) {
        self.retired.fetch_add(len, Ordering::Relaxed);
        self.count.fetch_sub(count, Ordering::Relaxed);
        self.by_purpose[purpose as usize].fetch_sub(len, Ordering::Relaxed);
    }

    /// Counts retired bytes as released.
    pub fn released(&self, len: u64) {
        // In this order: a thread that claims these bytes finds them not taken any more, so that the peak
        // never exceeds the budget. A thread that finds them not retired any more finds them not used either.
        self.taken.fetch_sub(len, Ordering::Relaxed);
        self.used.fetch_sub(len, Ordering::Release);
        self.retired.fetch_sub(len, Ordering::Release);
    }

    /// Whether this number of bytes would fit if nothing were retired.
    pub fn fits_without_retired(&self, len: u64) -> bool {
        // The two numbers are of different moments, the retired bytes of the earlier one: what is released in
        // between makes the answer yes. The caller claims afterwards, and that answer is certain.
        let retired = self.retired.load(Ordering::Acquire);
        let used = self.used.load(Ordering::Relaxed).saturating_sub(retired);
        used.checked_add(len).is_some_and(|sum| sum <= self.budget)
    }

    /// Bytes of the budget that are left.
    pub fn available(&self) -> u64 {
        self.budget - self.used.load(Ordering::Relaxed)
    }

    /// Lets the peak begin anew, at what is taken now.
    pub fn reset_peak(&self) {
        self.peak.store(self.taken.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The account as it is; numbers that change meanwhile may be of different moments.
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
