//! Policies: which page leaves a place that is full.
//!
//! A policy knows the pages of one place. It hears which came, which were used and which left, and is asked
//! for one decision: which page leaves next. It knows nothing of the store, so that the same policy can be
//! measured over a trace alone.

mod lru;
mod s3_fifo;
#[cfg(test)]
mod tests;

use remanent_format::PageId;

pub use lru::Lru;
pub use s3_fifo::S3Fifo;

/// The decision which page leaves a place.
///
/// A store has one for each place of its [`Tiers`](crate::Tiers) but the last, and tells it of the pages
/// there, in the order of batches; uses come with some delay, and some of very many uses are left out.
///
/// ```
/// use remanent::{EvictionPolicy, Lru, PageId};
/// let mut policy = Lru::default();
/// policy.arrived(PageId(1), 4096);
/// policy.arrived(PageId(2), 4096);
/// policy.used(PageId(1));
/// assert_eq!(policy.victim(), Some(PageId(2)));
/// assert_eq!(policy.victim(), Some(PageId(1)));
/// assert_eq!(policy.victim(), None);
/// ```
pub trait EvictionPolicy: Send {
    /// A page came that the policy does not know. `len` is its length in bytes.
    fn arrived(&mut self, page: PageId, len: u64);

    /// A page was read or changed. Nothing happens if the policy does not know it.
    fn used(&mut self, page: PageId);

    /// A page is gone, or lives elsewhere. Nothing happens if the policy does not know it.
    fn left(&mut self, page: PageId);

    /// Chooses the page that leaves next and forgets it; `None` if there is none. A page that cannot leave,
    /// because a caller uses its memory, arrives again.
    fn victim(&mut self) -> Option<PageId>;
}
