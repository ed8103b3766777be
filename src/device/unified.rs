//! Hints for page memory in [`Place::Unified`](remanent_format::Place::Unified), which a GPU's driver moves
//! between host and GPU as it is used.
//!
//! A hint changes no byte and is not logged: a crash, and a move of the page, end it.

/// A hint on where a page of [`Place::Unified`](crate::Place::Unified) best lies: [`Store::hint_unified`].
///
/// [`Store::hint_unified`]: crate::Store::hint_unified
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnifiedHint {
    /// The memory stays there where it can, and the other side reaches it over the bus. `None` takes the
    /// hint back: it moves to the side that uses it.
    Prefer(Option<UnifiedSide>),
    /// Both sides keep a copy that they read, until one of them writes; `false` takes the hint back.
    ReadMostly(bool),
    /// The bytes go there now, in the background. Lists that need them do not wait for it.
    Fetch(UnifiedSide),
}

/// A side of the bus on which unified memory can lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnifiedSide {
    /// The memory of the GPU that allocated it.
    Gpu,
    /// The memory of the host.
    Host,
}

/// What a device can do for pages in [`Place::Unified`](crate::Place::Unified):
/// [`Store::unified_memory`](crate::Store::unified_memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnifiedSupport {
    /// Pages can live there. Without a GPU it is memory of the host like any other.
    pub has_pages: bool,
    /// It takes hints. Only a GPU that shares memory with the host page by page does, while both use it.
    pub takes_hints: bool,
}
