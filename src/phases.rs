//! Floor 1. Where the engine is, told to a hook: the kill suite strikes on seeing a phase. Without the
//! feature `test-phases` nothing of this is compiled in.

/// What the engine is doing.
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
    /// Removing or reusing what no kept snapshot needs.
    Recycle,
    /// Opening what a crash left.
    Recovery,
}

#[cfg(feature = "test-phases")]
static HOOK: std::sync::OnceLock<Box<dyn Fn(Phase) + Send + Sync>> = std::sync::OnceLock::new();

/// Calls `hook` whenever a phase begins, from the thread that enters it. The first hook stays.
#[cfg(feature = "test-phases")]
pub fn on_phase(hook: impl Fn(Phase) + Send + Sync + 'static) {
    let _first_stays = HOOK.set(Box::new(hook));
}

/// Says that a phase begins.
pub(crate) fn enter(phase: Phase) {
    #[cfg(feature = "test-phases")]
    if let Some(hook) = HOOK.get() {
        hook(phase);
    }
    let _ = phase;
}
