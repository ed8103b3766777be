//! Eviction policies, which choose the pages to evict from a full place.
//!
//! A policy tracks the pages of one place. The policy is notified of arrivals, uses and departures, and makes one
//! decision: the page to evict next. A policy has no access to the store, so the same policy can be measured on a
//! trace.

mod lru;
mod s3_fifo;
#[cfg(test)]
mod tests;

use remanent_format::PageId;

pub use lru::Lru;
pub use s3_fifo::S3Fifo;

/// A policy that chooses the pages to evict from a place. Implement this trait to replace the built-in policies of
/// [`Tiers`](crate::tiers::Tiers).
///
/// A store has one policy for each place of its tiers except the last. The store notifies the policy of the pages in
/// this place, in batch order. Uses are reported with some delay, and some uses are omitted if there are very many.
///
/// ```
/// use remanent::tiers::{EvictionPolicy, Lru};
/// use remanent::PageId;
/// let mut policy = Lru::default();
/// policy.arrived(PageId(1), 4096);
/// policy.arrived(PageId(2), 4096);
/// policy.used(PageId(1));
/// assert_eq!(policy.victim(), Some(PageId(2)));
/// assert_eq!(policy.victim(), Some(PageId(1)));
/// assert_eq!(policy.victim(), None);
/// ```
pub trait EvictionPolicy: Send {
    /// Called when a page arrives in the place. `len` is the page's length in bytes.
    fn arrived(&mut self, page: PageId, len: u64);

    /// Called when a page is read or changed. Must ignore pages that are not in the place.
    fn used(&mut self, page: PageId);

    /// Called when a page is deleted or moved to another place. Must ignore pages that are not in the place.
    fn left(&mut self, page: PageId);

    /// Removes and returns the next page to evict, or returns `None` if there are no pages. If a caller uses the page's
    /// memory, the page cannot be evicted, and the store calls [`arrived`](Self::arrived) for the page again.
    fn victim(&mut self) -> Option<PageId>;
}
