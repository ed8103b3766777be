//! The report of an open: the state that it found, and the steps that it took.

use std::time::Duration;

use remanent_format::log::TornTail;
use remanent_format::{Damage, Position, SnapshotId};

use super::Recovery;

/// The report of an open: the state that it found, and the steps that it took.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RecoveryReport {
    /// Whether the store was created by this open.
    pub created: bool,
    /// The incarnation begun, and the last batch that is there.
    pub position: Position,
    /// The last batch as the incarnation before knew it; `None` for a new store.
    pub previous: Option<Position>,
    /// The snapshot used; `None` if the log was replayed from its beginning.
    pub snapshot: Option<SnapshotId>,
    /// Batches replayed on top of it.
    pub replayed_batches: u64,
    /// Bytes of their frames.
    pub replayed_bytes: u64,
    /// Batches above the last durable mark, copied into the new incarnation.
    pub copied_batches: u64,
    /// Pages that were yet to be loaded when the open returned ([`crate::Options::page_load`]).
    pub unloaded_pages: u64,
    /// Pages that the open took to slower places, because the budget has no room for them where they were
    /// ([`crate::Options::tiers`]).
    pub lowered_pages: u64,
    /// The frames that were cut from the end of the log, if any.
    pub torn: Option<TornTail>,
    /// Damage that cost nothing of the newest state: snapshots passed over, kept snapshots whose
    /// manifests are missing, an empty segment's header. A lost snapshot is reported by the open that
    /// finds it, and not again.
    pub harmless: Vec<Damage>,
    /// The device that was chosen.
    pub device: String,
    /// How the log is written, and why not mapped if it is not.
    pub log_io: String,
    /// How images are written.
    pub image_io: String,
    /// How long the open took.
    pub elapsed: Duration,
}

impl Recovery<'_> {
    /// Begins the report of an open; the caller fills in the rest.
    pub(super) fn report(&self, position: Position, created: bool) -> RecoveryReport {
        RecoveryReport {
            created,
            position,
            previous: None,
            snapshot: None,
            replayed_batches: 0,
            replayed_bytes: 0,
            copied_batches: 0,
            unloaded_pages: 0,
            lowered_pages: 0,
            torn: None,
            harmless: Vec::new(),
            device: self.device.label(),
            log_io: String::new(),
            image_io: String::new(),
            elapsed: Duration::ZERO,
        }
    }
}
