//! Hints for page memory in [`Place::Unified`](remanent_format::Place::Unified), which a GPU's driver migrates between
//! host and GPU on use.
//!
//! A hint changes no byte and is not logged. It ends when the page moves or the process crashes.

/// A hint about the best location of a page in [`Place::Unified`](crate::Place::Unified), for
/// [`Store::hint_unified`].
///
/// [`Store::hint_unified`]: crate::Store::hint_unified
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnifiedHint {
    /// Keeps the memory on this side if possible. The other side then accesses the memory over the bus. `None` removes
    /// the hint, and the memory migrates to the side that uses it.
    Prefer(Option<UnifiedSide>),
    /// Keeps a readable copy on both sides until one side writes. `false` removes the hint.
    ReadMostly(bool),
    /// Starts to move the bytes to this side in the background. Lists that need the bytes do not wait for the move.
    Fetch(UnifiedSide),
}

/// A side of the bus on which unified memory can reside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnifiedSide {
    /// The memory of the GPU that allocated the page's memory.
    Gpu,
    /// The memory of the host.
    Host,
}

/// A device's capabilities for pages in [`Place::Unified`](crate::Place::Unified), returned by
/// [`Store::unified_memory`](crate::Store::unified_memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnifiedSupport {
    /// Whether pages can be stored in [`Place::Unified`](crate::Place::Unified). Without a GPU, that place is ordinary
    /// host memory.
    pub has_pages: bool,
    /// Whether the device supports hints. Only a GPU that can share single memory pages with the host supports hints;
    /// both sides can use such a page at the same time.
    pub takes_hints: bool,
}
