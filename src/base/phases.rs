//! Phases of the engine, reported to a hook, so that the kill suite can strike during a phase. Without the
//! feature `testing` there is no hook, and entering a phase does nothing.

/// A part of the engine's work that a crash can interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    /// Appending a batch to the log.
    Commit = 1,
    /// Making a group durable.
    GroupSync,
    /// Switching to the next segment, or creating one.
    SegmentRoll,
    /// Copying pages for a snapshot.
    SnapshotGather,
    /// Writing and renaming a manifest.
    Publish,
    /// Removing or reusing files that no kept snapshot needs.
    Recycle,
    /// Opening a directory after a crash.
    Recovery,
    /// Writing a batch's pages to an image file, before the batch is logged.
    WriteAhead,
    /// Moving pages to or from disk, before the batch that moves them is logged.
    Move,
}

/// The start or end of a phase. Phases nest, and several threads can be in one concurrently.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// The phase begins now.
    Enter,
    /// The phase ends now.
    Leave,
}

#[cfg(feature = "testing")]
type Hook = Box<dyn Fn(Phase, Edge) + Send + Sync>;

#[cfg(feature = "testing")]
static HOOK: std::sync::OnceLock<Hook> = std::sync::OnceLock::new();

/// Registers a `hook` that is called at the start and end of each phase, on the thread in the phase. Only the
/// first registered hook is used.
#[cfg(feature = "testing")]
pub fn on_phase(hook: impl Fn(Phase, Edge) + Send + Sync + 'static) {
    let _first_stays = HOOK.set(Box::new(hook));
}

/// A phase that ends when the guard is dropped.
#[must_use = "the phase ends when this is dropped"]
pub(crate) struct PhaseGuard {
    #[cfg(feature = "testing")]
    phase: Phase,
}

/// Starts a phase.
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
