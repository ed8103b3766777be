//! Errors of the protocol. Each message states the failure and the remedy.

use remanent_format::{SnapshotId, StoreId};

use crate::bucket::BucketError;
use crate::object::{BatchPoint, Defect, Kind, ObjectDefect, ObjectKey};

/// The result of an operation of the protocol.
pub type Result<T> = std::result::Result<T, Error>;

/// The error of an operation of the protocol.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request to the bucket failed in every attempt.
    #[error("{action} {key}: {source}")]
    Bucket {
        /// Name of the request: `get`, `put`, `list` or `create`.
        action: &'static str,
        /// Key of the object.
        key: ObjectKey,
        /// The last failure.
        source: BucketError,
    },
    /// Every attempt of a create failed, so its outcome is unknown. The object may exist or may still appear.
    #[error("it is unknown whether {key} was created: {source}; call again once the bucket can be reached")]
    Unknown {
        /// Key of the object.
        key: ObjectKey,
        /// The last failure.
        source: BucketError,
    },
    /// Another process took over the archive. No batch was acknowledged after its fence.
    #[error(
        "the writer of term {term} was superseded: another process created {found}; close the store, and \
         restore or detach it"
    )]
    Superseded {
        /// Term of the superseded writer.
        term: u64,
        /// Key of the object that the other process created.
        found: ObjectKey,
    },
    /// The last archived batch is not in the history of the directory. Nothing was changed.
    #[error(
        "the archive ends at {archived}, which is {reason} (the directory is at {local}); restore the archive into an \
         empty directory, or detach this directory"
    )]
    Diverged {
        /// The last archived batch.
        archived: BatchPoint,
        /// The newest batch of the directory.
        local: BatchPoint,
        /// The failed check.
        reason: Divergence,
    },
    /// A newer boundary permits deleting objects that were read.
    #[error(
        "a newer boundary has released the objects from position {position} on; read the newest state again"
    )]
    Overtaken {
        /// The lowest position that was read.
        position: u64,
    },
    /// An object that must exist is missing or invalid.
    #[error("{key} is damaged: {damage}")]
    Damaged {
        /// Key of the object.
        key: ObjectKey,
        /// The damage.
        damage: Damage,
    },
    /// The archive is empty, or ends below the position of a fence that the directory recorded.
    #[error(
        "the archive ends at position {end}, but this directory created a fence at position {recorded}; check the \
         URL and the bucket's lifecycle rules, or detach this directory"
    )]
    ArchiveLost {
        /// Position of the fence that the directory recorded.
        recorded: u64,
        /// Last position of the archive, or 0 if it is empty.
        end: u64,
    },
    /// The archive belongs to another store.
    #[error("the archive belongs to store {found}, not to store {expected}; use another URL")]
    IdentityMismatch {
        /// Id of the store in the archive.
        found: StoreId,
        /// Id of the store in the directory.
        expected: StoreId,
    },
    /// The archive contains no fence, so it has no state to restore.
    #[error("the archive is empty; check the URL")]
    Empty,
    /// The bucket does not behave as the protocol requires.
    #[error("the bucket does not support archives: {reason}; use another bucket or server")]
    NotSupported {
        /// The failed check.
        reason: &'static str,
    },
    /// Another process appended to the line during a prune.
    #[error("a {} was appended at position {position} during the prune; prune again", .kind.name())]
    Busy {
        /// Position of the appended object.
        position: u64,
        /// Kind of the appended object.
        kind: Kind,
    },
    /// The run that contains the end of a snapshot must be appended before its manifest.
    #[error(
        "the snapshot needs the log up to lsn {end}, but only lsn {archived} is archived; append the run first"
    )]
    EndNotArchived {
        /// Lsn of the last batch that a restore of the snapshot replays.
        end: u64,
        /// Lsn of the last archived batch.
        archived: u64,
    },
    /// A named snapshot is older than the newest one in the archive. Named snapshots must be archived in order.
    #[error(
        "snapshot {snapshot} is not newer than the newest named snapshot of the archive, {newest}; take a new one"
    )]
    NotNewer {
        /// Number of the snapshot.
        snapshot: SnapshotId,
        /// Number of the newest named snapshot of the archive.
        newest: SnapshotId,
    },
    /// The log that a snapshot needs is not in the archive.
    #[error("the archive does not contain the log from lsn {redo} on; archive a newer snapshot")]
    StartNotKept {
        /// Lsn after which a restore of the snapshot replays the log.
        redo: u64,
    },
    /// A writer operation was called without a fence.
    #[error("no fence was created; call `fence` first")]
    NoFence,
    /// The operation is not permitted while the outcome of an append is unknown.
    #[error("the outcome of an append is unknown; call `append_run` first")]
    AppendPending,
    /// The line cannot be read or cut at the batch, because no kept manifest precedes the batch.
    #[error("no kept manifest ends at or below lsn {lsn}; choose a later point")]
    CutTooOld {
        /// Lsn of the batch.
        lsn: u64,
    },
    /// The archive does not contain the batch, because it continued with a snapshot while the bucket was unavailable.
    #[error(
        "the archive has no batches between lsn {after} and lsn {until}; choose lsn {after} or {until}, not {lsn}"
    )]
    InGap {
        /// Lsn of the batch.
        lsn: u64,
        /// Lsn of the last batch before the gap.
        after: u64,
        /// Lsn of the first batch after the gap whose state can be read.
        until: u64,
    },
    /// The archive keeps no snapshot with this number.
    #[error("the archive keeps no snapshot {snapshot}; give the number of a kept one, a name or a batch")]
    UnknownSnapshot {
        /// Number of the snapshot.
        snapshot: SnapshotId,
    },
    /// The archive keeps no snapshot with this name.
    #[error("the archive keeps no snapshot named {name:?}; list the names with `remanent archive status`")]
    UnknownName {
        /// The name.
        name: String,
    },
    /// An object exceeds a limit of the format.
    #[error("{key} cannot be encoded: {source}")]
    TooLarge {
        /// Key of the object.
        key: ObjectKey,
        /// The exceeded limit.
        source: ObjectDefect,
    },
    /// The directory could not be read or written.
    #[error("store directory: {0}")]
    Local(#[from] std::io::Error),
}

/// The reason why a directory cannot continue an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Divergence {
    /// The directory has no record of the newest fence, so another directory created that fence. A takeover waives this
    /// check.
    UnknownFence,
    /// The archive keeps a named snapshot that the directory never had. A takeover waives this check and removes the
    /// snapshot from the archive.
    UnknownName,
    /// The history of the directory does not contain the last archived batch.
    NotOnLine,
    /// The last archived batch is above the newest batch that a durable mark proves, so the next opening would drop it.
    Unproven,
}

impl std::fmt::Display for Divergence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Divergence::UnknownFence => "in the term of a fence that this directory did not create",
            Divergence::UnknownName => "after a named snapshot that this directory never had",
            Divergence::NotOnLine => "not in the history of this directory",
            Divergence::Unproven => "above the last batch that a durable mark of this directory proves",
        })
    }
}

/// The kind of damage of an object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The object does not exist, although no boundary has passed it.
    #[error("missing; usual causes are a lifecycle rule, a replica bucket, or an archive tier")]
    Missing,
    /// The bytes of the object are invalid.
    #[error(transparent)]
    Bytes(#[from] ObjectDefect),
    /// The nonce that the object states for the preceding object differs from that object's nonce.
    #[error("the nonce that it states for the preceding object does not match that object")]
    NotNext,
    /// The frames of a run do not continue the state before them.
    #[error("its frames continue {found}, but the state before them is {expected}")]
    Gap {
        /// The batch after which the frames start.
        found: BatchPoint,
        /// The last batch of the state.
        expected: BatchPoint,
    },
    /// The archived log ends before the end of a snapshot.
    #[error("the snapshot needs the log up to {end}, but the archived log ends at {found}")]
    EndNotReached {
        /// The batch up to which a restore of the snapshot replays the log.
        end: BatchPoint,
        /// The last batch of the line.
        found: BatchPoint,
    },
    /// An object has a kind that is not valid at its position.
    #[error("another writer created a {} at a position where only a fence or a boundary is valid", .0.name())]
    Unexpected(Kind),
    /// The archive keeps no manifest from which a restore can start.
    #[error("no kept manifest precedes it")]
    NoStart,
    /// The bucket refuses to create the object although it does not contain the object.
    #[error("the bucket refuses to create it but does not contain it")]
    Refused,
}

impl Error {
    pub(crate) fn missing(key: ObjectKey) -> Self {
        Error::Damaged { key, damage: Damage::Missing }
    }

    pub(crate) fn invalid(key: ObjectKey, defect: ObjectDefect) -> Self {
        Error::Damaged { key, damage: Damage::Bytes(defect) }
    }

    /// Returns true if the error is that an object belongs to another store.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        let Error::Damaged { damage: Damage::Bytes(defect), .. } = self else { return false };
        defect.defect == Defect::Foreign
    }
}
