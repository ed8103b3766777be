//! Phases of the engine, told to a hook: the kill suite strikes while a phase lasts. Without the feature
//! `testing` there is no hook, and entering a phase does nothing.

/// A stretch of the engine's work that a crash may interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    /// Appending a batch to the log.
    Commit = 1,
    /// Making a group durable.
    GroupSync,
    /// Going on to the next segment, or making one.
    SegmentRoll,
    /// Copying pages for a snapshot.
    SnapshotGather,
    /// Writing and renaming a manifest.
    Publish,
    /// Removing or reusing files that no kept snapshot needs.
    Recycle,
    /// Opening a directory as a crash left it.
    Recovery,
    /// Writing a batch's pages to an image file, before the batch is logged.
    WriteAhead,
    /// Taking pages to disk or from there to memory, before the batch that moves them is logged.
    Move,
}

/// The end of a phase that a thread is at. Phases nest, and several threads may be in one.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// The phase begins.
    Enter,
    /// The phase is over.
    Leave,
}

#[cfg(feature = "testing")]
type Hook = Box<dyn Fn(Phase, Edge) + Send + Sync>;

#[cfg(feature = "testing")]
static HOOK: std::sync::OnceLock<Hook> = std::sync::OnceLock::new();

/// Has `hook` called whenever a phase begins or ends, from the thread that is in it. The first hook stays.
#[cfg(feature = "testing")]
pub fn on_phase(hook: impl Fn(Phase, Edge) + Send + Sync + 'static) {
    let _first_stays = HOOK.set(Box::new(hook));
}

/// A phase that lasts until this is dropped.
#[must_use = "the phase ends when this is dropped"]
pub(crate) struct PhaseGuard {
    #[cfg(feature = "testing")]
    phase: Phase,
}

/// Begins a phase.
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
