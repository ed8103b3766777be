//! Reports phases of the engine's work to a hook, so that the kill suite can kill the process during a phase. Without
//! the feature `testing`, phases are not reported.

/// A phase of the engine's work during which a test can simulate a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    /// A batch is appended to the log.
    Commit = 1,
    /// A group of batches is made durable.
    GroupSync,
    /// The log switches to the next segment, or creates a segment.
    SegmentRoll,
    /// A snapshot copies pages.
    SnapshotGather,
    /// A manifest is written and renamed.
    Publish,
    /// Files that no kept snapshot needs are removed or prepared for reuse.
    Recycle,
    /// A store is opened and recovered.
    Recovery,
    /// A batch's pages are written to an image file, before the batch is logged.
    WriteAhead,
    /// Pages are moved to or from disk, before the batch that moves them is logged.
    Move,
}

/// The event that a hook receives: the start or the end of a phase. Phases nest, and several threads can run the same
/// phase concurrently.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// The phase begins.
    Enter,
    /// The phase ends.
    Leave,
}

#[cfg(feature = "testing")]
type Hook = Box<dyn Fn(Phase, Edge) + Send + Sync>;

#[cfg(feature = "testing")]
static HOOK: std::sync::OnceLock<Hook> = std::sync::OnceLock::new();

/// Registers a hook. Each thread calls the hook at the start and the end of each of its phases. Only the first
/// registered hook is used.
#[cfg(feature = "testing")]
pub fn on_phase(hook: impl Fn(Phase, Edge) + Send + Sync + 'static) {
    let _first_stays = HOOK.set(Box::new(hook));
}

/// A guard of a running phase. Dropping the guard ends the phase.
#[must_use = "the phase ends when this is dropped"]
pub(crate) struct PhaseGuard {
    #[cfg(feature = "testing")]
    phase: Phase,
}

/// Starts a phase. The phase ends when the returned guard is dropped.
pub(crate) fn enter(phase: Phase) -> PhaseGuard {
    #[cfg(feature = "testing")]
    {
        if let Some(hook) = HOOK.get() {
            hook(phase, Edge::Enter);
        }
        PhaseGuard { phase }
    }
    #[cfg(not(feature = "testing"))]
    {
        let _ = phase;
        PhaseGuard {}
    }
}

#[cfg(feature = "testing")]
impl Drop for PhaseGuard {
    fn drop(&mut self) {
        if let Some(hook) = HOOK.get() {
            hook(self.phase, Edge::Leave);
        }
    }
}
