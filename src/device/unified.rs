//! Hints for page memory in [`Place::Unified`](remanent_format::Place::Unified), which a GPU's driver
//! migrates between host and GPU on use.
//!
//! A hint changes no byte and is not logged; it ends with a crash or when the page moves.

/// A hint about the best location of a page in [`Place::Unified`](crate::Place::Unified), for
/// [`Store::hint_unified`].
///
/// [`Store::hint_unified`]: crate::Store::hint_unified
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnifiedHint {
    /// Keeps the memory on this side if possible; the other side accesses it over the bus. `None` removes the
    /// hint, and the memory moves to the side that uses it.
    Prefer(Option<UnifiedSide>),
    /// Gives both sides a readable copy until one of them writes. `false` removes the hint.
    ReadMostly(bool),
    /// Moves the bytes to this side now, in the background. Lists that need them do not wait for the move.
    Fetch(UnifiedSide),
}

/// A side of the bus on which unified memory can reside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnifiedSide {
    /// The memory of the GPU that allocated it.
    Gpu,
    /// The memory of the host.
    Host,
}

/// A device's capabilities for pages in [`Place::Unified`](crate::Place::Unified), returned by
/// [`Store::unified_memory`](crate::Store::unified_memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnifiedSupport {
    /// Whether pages can live in this place. Without a GPU, it is ordinary host memory.
    pub has_pages: bool,
    /// Whether the device supports hints. Only a GPU that shares memory with the host page by page, while
    /// both use it, supports them.
    pub takes_hints: bool,
}
