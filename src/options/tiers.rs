//! The order of places through which unused pages are demoted.

use std::fmt;
use std::sync::Arc;

use remanent_format::Place;

use super::{Budget, invalid};
use crate::error::Result;
use crate::eviction::{EvictionPolicy, Lru, S3Fifo};

/// A function that creates the eviction policy of a place.
type PolicyMaker = dyn Fn(Place) -> Box<dyn EvictionPolicy> + Send + Sync;

/// An order of places, fastest first. When one place is full, its unused pages are demoted to the next place.
///
/// Every place but the last needs a limit ([`MemoryOptions::budget`](super::MemoryOptions::budget)). A background
/// thread keeps part of each limit free ([`free_part`](Self::free_part)) so that commits find room immediately. A
/// commit that finds no room waits for that thread. Pages are moved by logged batches, as with
/// [`WriteBatch::move_to`](crate::WriteBatch::move_to): after a crash, a page is either in its new place or still in
/// the previous one. Pages that are leased, pinned or in caller-owned memory are not moved.
///
/// If an open has less memory than the pages need, for example on a smaller machine, it demotes the pages that have
/// been unchanged for longest before it loads any ([`RecoveryReport::lowered_pages`](crate::store::RecoveryReport)).
/// Without tiers, such an open fails.
///
/// Pages are never promoted automatically: use [`Store::ensure`](crate::Store::ensure) and
/// [`Store::prefetch`](crate::Store::prefetch).
///
/// ```
/// use remanent::options::MemoryOptions;
/// use remanent::tiers::Tiers;
/// use remanent::{Options, Place};
/// let store = Options::new()
///     .memory(MemoryOptions::new().budget(Place::Host, 64 << 10))
///     .tiers(Tiers::new([Place::Host, Place::Disk]))
///     .open_temporary()?;
/// // Four times the host's limit.
/// for at in 0..64u8 {
///     store.put(format!("block/{at}"), [at; 4096], Place::Host)?;
/// }
/// let first = store.page_by_key("block/0")?;
/// assert_eq!(first.place, Place::Disk);
/// assert_eq!(store.read_to_vec(first.page)?, [0; 4096]);
/// store.ensure(&[first.page], Place::Host)?;
/// assert_eq!(store.page(first.page)?.place, Place::Host);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone)]
pub struct Tiers {
    places: Vec<Place>,
    free_part: u32,
    policy: Arc<PolicyMaker>,
}

impl Tiers {
    /// Creates tiers from `places`, fastest first.
    #[must_use]
    pub fn new(places: impl Into<Vec<Place>>) -> Self {
        Self { places: places.into(), free_part: 16, policy: Arc::new(|_| Box::<S3Fifo>::default()) }
    }

    /// Sets the fraction of each budget that is kept free: 1/`part`. Eviction starts when less than half of that
    /// fraction is free. Default: 16.
    #[must_use]
    pub fn free_part(mut self, part: u32) -> Self {
        self.free_part = part;
        self
    }

    /// Evicts the least recently used page first ([`Lru`]). Default: [`S3Fifo`].
    #[must_use]
    pub fn lru(self) -> Self {
        self.policy(|_| Box::<Lru>::default())
    }

    /// Uses a custom eviction policy, created by `make` for each place.
    #[must_use]
    pub fn policy(mut self, make: impl Fn(Place) -> Box<dyn EvictionPolicy> + Send + Sync + 'static) -> Self {
        self.policy = Arc::new(make);
        self
    }

    /// Returns the places, fastest first.
    #[must_use]
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Creates a policy for `place`.
    pub(crate) fn new_policy(&self, place: Place) -> Box<dyn EvictionPolicy> {
        (self.policy)(place)
    }

    /// Returns how many bytes of a budget are kept free.
    pub(crate) fn free_bytes(&self, budget: u64) -> u64 {
        budget / u64::from(self.free_part)
    }

    /// Returns an error if the places or their budgets do not form a usable order.
    pub(super) fn check(&self, budget: &Budget) -> Result<()> {
        let invalid = |reason| invalid("tiers", reason);
        if self.places.len() < 2 {
            return invalid("at least two places are needed, one to leave and one to go to".to_owned());
        }
        if self.free_part < 2 {
            return invalid(format!("one part in {} of a budget cannot be kept free", self.free_part));
        }
        for (at, place) in self.places.iter().enumerate() {
            let is_last = at + 1 == self.places.len();
            if self.places[..at].contains(place) {
                return invalid(format!("{place} is there twice"));
            }
            if *place == Place::Disk && !is_last {
                return invalid("the disk is the last of all places".to_owned());
            }
            if !is_last && budget.limit(*place) == u64::MAX {
                return invalid(format!("{place} has no limit in the budget, so it is never full"));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiers")
            .field("places", &self.places)
            .field("free_part", &self.free_part)
            .finish_non_exhaustive()
    }
}
