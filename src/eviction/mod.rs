//! Eviction policies, which choose the page that leaves a full place.
//!
//! A policy knows the pages of one place. It is notified of arrivals, uses and departures, and makes one
//! decision: which page is evicted next. It knows nothing about the store, so the same policy can be measured
//! on a trace.

mod lru;
mod s3_fifo;
#[cfg(test)]
mod tests;

use remanent_format::PageId;

pub use lru::Lru;
pub use s3_fifo::S3Fifo;

/// A policy that chooses which page is evicted from a place.
///
/// A store has one policy for each place of its [`Tiers`](crate::tiers::Tiers) except the last, and notifies it of
/// the pages there in batch order. Uses are reported with some delay, and some are omitted if there are very
/// many.
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
    /// Called when a page arrives that the policy does not know. `len` is its length in bytes.
    fn arrived(&mut self, page: PageId, len: u64);

    /// Called when a page is read or changed. Ignored if the policy does not know the page.
    fn used(&mut self, page: PageId);

    /// Called when a page is deleted or moved elsewhere. Ignored if the policy does not know the page.
    fn left(&mut self, page: PageId);

    /// Chooses the next page to evict and forgets it. Returns `None` if there are no pages. A page that
    /// cannot be evicted because a caller uses its memory arrives again.
    fn victim(&mut self) -> Option<PageId>;
}
