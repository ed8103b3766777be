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
    /// The incarnation begun, and the last batch found.
    pub position: Position,
    /// The last accepted batch, as a position in the previous incarnation; `None` for a new store.
    pub previous: Option<Position>,
    /// The snapshot used; `None` if the log was replayed from its beginning.
    pub snapshot: Option<SnapshotId>,
    /// Batches replayed on top of the snapshot.
    pub replayed_batches: u64,
    /// Bytes of their frames.
    pub replayed_bytes: u64,
    /// Batches above the last durable mark, copied into the new incarnation.
    pub copied_batches: u64,
    /// Pages not loaded yet when the open returned ([`crate::Options::page_load`]).
    pub unloaded_pages: u64,
    /// Pages that the open moved to slower places because the budget had no room for them
    /// ([`crate::Options::tiers`]).
    pub lowered_pages: u64,
    /// The frames cut from the end of the log, if any.
    pub torn: Option<TornTail>,
    /// Damage that did not affect the newest state: skipped snapshots, kept snapshots whose manifests are
    /// missing, an empty segment's header. A lost snapshot is reported only by the open that detects it.
    pub harmless: Vec<Damage>,
    /// The device in use.
    pub device: String,
    /// How the log is written and, if it is not mapped, the reason.
    pub log_io: String,
    /// How images are written.
    pub image_io: String,
    /// The duration of the open.
    pub elapsed: Duration,
}

impl Recovery<'_> {
    /// Starts the report of an open; the caller fills in the rest.
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
