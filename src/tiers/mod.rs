//! Tiers, for more pages than fit in a place: unused pages are demoted, and promoted again when requested.
//!
//! [`Tiers`] defines an order of places. A thread (`keeper`) keeps part of each place free. The thread asks the
//! eviction policy of the place for victims, and moves the victims by an ordinary batch to the next place with enough
//! free memory. Thus after a crash each page is in either its old or its new place. Commits and other calls that lack
//! memory wait for that thread (`mover`). Requested pages are promoted by the caller's own thread, or in advance by a
//! background thread (`prefetch`), early enough for the time that they take to arrive (`read_ahead`).
//!
//! Eviction policies are notified of all changes and most reads (`residents`). None of this is on disk. An open starts
//! with the pages ordered by their last change.

mod keeper;
mod mover;
mod prefetch;
mod read_ahead;
mod residents;
pub(crate) mod stats;

pub(crate) use keeper::{TierKeeper, TierThread};
pub(crate) use mover::PageMover;
pub use prefetch::Prefetch;
pub(crate) use prefetch::PrefetchThread;
pub use read_ahead::ReadAhead;
pub(crate) use residents::Residents;
pub(crate) use stats::TierCounts;

pub use crate::eviction::{EvictionPolicy, Lru, S3Fifo};
pub use crate::options::tiers::Tiers;
