//! More pages than a place has room for: pages that are not used go down, and come up when they are asked
//! for.
//!
//! [`Tiers`](crate::Tiers) names an order of places. A thread ([`keeper`]) keeps a part of each place free:
//! it asks the place's policy which pages leave, and moves them to the next place that has room by a batch
//! like any other, so that a crash finds each page in the old place or in the new one. Commits and other
//! calls that find no room wait for it ([`mover`]). What is asked for is moved up by the caller's own thread,
//! or by one that runs ahead of it ([`prefetch`]), as far as pages take to come ([`read_ahead`]).
//!
//! The policies hear of all changes and of most reads ([`residents`]). Nothing of that is on disk: an open
//! begins with the order in which pages were changed last.

mod keeper;
mod mover;
mod prefetch;
mod read_ahead;
mod residents;
mod stats;

pub(crate) use keeper::{TierKeeper, TierThread};
pub(crate) use mover::PageMover;
pub use prefetch::Prefetch;
pub(crate) use prefetch::PrefetchThread;
pub use read_ahead::ReadAhead;
pub(crate) use stats::TierCounts;
pub use stats::{MoveStats, TierStats};
