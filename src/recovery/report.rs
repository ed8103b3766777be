//! The report of an open, returned by [`Store::recovered`](crate::Store::recovered).

use std::time::Duration;

use remanent_format::log::TornTail;
use remanent_format::{Damage, Position, SnapshotId};

use super::Recovery;

/// The report of an open: the state that the open found, and the steps that it took. Returned by
/// [`Store::recovered`](crate::Store::recovered).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RecoveryReport {
    /// Whether this open created the store.
    pub created: bool,
    /// The position at which the store was opened: the new incarnation and the last batch found.
    pub position: Position,
    /// The position of the last accepted batch in the previous incarnation, or `None` for a new store.
    pub previous: Option<Position>,
    /// The snapshot from which the state was rebuilt, or `None` if the log was replayed from its beginning.
    pub snapshot: Option<SnapshotId>,
    /// The number of batches replayed on top of the snapshot.
    pub replayed_batches: u64,
    /// The total length in bytes of the frames of the replayed batches.
    pub replayed_bytes: u64,
    /// The number of batches above the last durable mark. The open copied them into the new incarnation.
    pub copied_batches: u64,
    /// The number of pages not loaded yet when the open returned ([`crate::options::MemoryOptions::load`]).
    pub unloaded_pages: u64,
    /// The number of pages that the open moved to slower places because they exceeded the memory budget
    /// ([`crate::Options::tiers`]).
    pub lowered_pages: u64,
    /// The pages that the open exchanged with other ranks
    /// ([`MemoryOptions::gather`](crate::options::MemoryOptions::gather)). `None` without that option, for a new store,
    /// and if the open loaded no snapshot.
    #[cfg(feature = "nccl")]
    pub gather: Option<GatherReport>,
    /// The frames that were cut from the end of the log, or `None` if the log was intact.
    pub torn: Option<TornTail>,
    /// Damage that did not affect the newest state, such as skipped snapshots, kept snapshots whose manifests are
    /// missing, or the header of an empty segment. A lost snapshot is reported only by the open that detects it.
    pub harmless: Vec<Damage>,
    /// A description of the device that the store uses.
    pub device: String,
    /// The mode in which the log is written and, if it is not mapped, the reason.
    pub log_io: String,
    /// The mode in which the store writes image files.
    pub image_io: String,
    /// The time that the open took.
    pub elapsed: Duration,
}

/// The pages that an open loaded together with other ranks.
#[cfg(feature = "nccl")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GatherReport {
    /// The number of ranks.
    pub ranks: u32,
    /// The number of pages in the share that this rank loaded for all ranks.
    pub loaded_pages: u64,
    /// The total length of these pages in bytes.
    pub loaded_bytes: u64,
    /// The number of pages that arrived from other ranks.
    pub received_pages: u64,
    /// The total length of these pages in bytes.
    pub received_bytes: u64,
    /// The reason why the ranks did not exchange all pages, or `None` if they did. This rank loaded the remaining pages
    /// itself.
    pub stopped: Option<String>,
}

impl Recovery<'_> {
    /// Creates a report with default values. The caller sets the other fields.
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
            #[cfg(feature = "nccl")]
            gather: self.gather.report(),
            torn: None,
            harmless: Vec::new(),
            device: self.device.label(),
            log_io: String::new(),
            image_io: String::new(),
            elapsed: Duration::ZERO,
        }
    }
}
