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

/// A policy that chooses the pages to evict from a place.
///
/// A store has one policy for each place of its [`Tiers`](crate::tiers::Tiers) except the last, and notifies it of the
/// pages in this place in batch order. Uses are reported with some delay, and some are omitted if there are very many.
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
    /// Called when a new page arrives in the place. `len` is its length in bytes.
    fn arrived(&mut self, page: PageId, len: u64);

    /// Called when a page is read or changed. Must ignore pages that have not arrived.
    fn used(&mut self, page: PageId);

    /// Called when a page is deleted or moved to another place. Must ignore pages that have not arrived.
    fn left(&mut self, page: PageId);

    /// Removes and returns the next page to evict, or returns `None` if there are no pages. If the page cannot be
    /// evicted because a caller uses its memory, [`arrived`](Self::arrived) is called for it again.
    fn victim(&mut self) -> Option<PageId>;
}
