//! Errors of the protocol. Each states what was found and the remedy.

use remanent_format::{SnapshotId, StoreId};

use crate::bucket::BucketError;
use crate::object::{BatchPoint, Defect, Kind, ObjectDefect, ObjectKey};

/// The result of a call of the protocol.
pub type Result<T> = std::result::Result<T, Error>;

/// The reason why a call of the protocol failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request to the bucket failed and was given up.
    #[error("{action} {key}: {source}")]
    Bucket {
        /// The request.
        action: &'static str,
        /// The object.
        key: ObjectKey,
        /// The failure.
        source: BucketError,
    },
    /// A create was given up before its outcome was known. The object may exist, or may still appear.
    #[error("whether {key} was created is unknown: {source}; call again once the bucket can be reached")]
    Unknown {
        /// The object.
        key: ObjectKey,
        /// The last failure.
        source: BucketError,
    },
    /// Another writer has taken over the archive. Nothing was acknowledged after its fence.
    #[error(
        "the writer of term {term} was superseded: {found} was found where it had to be newest; close the store, and \
         restore or detach it"
    )]
    Superseded {
        /// Term of the superseded writer.
        term: u64,
        /// The object that shows it.
        found: ObjectKey,
    },
    /// The history of the directory does not contain the archived batches. Nothing was fenced or changed.
    #[error(
        "the archive ends at {archived}, which is {reason} (the directory is at {local}); restore the archive into an \
         empty directory, or detach this directory"
    )]
    Diverged {
        /// The last archived batch.
        archived: BatchPoint,
        /// The newest batch of the directory.
        local: BatchPoint,
        /// The difference.
        reason: Divergence,
    },
    /// A boundary has passed the objects that were read.
    #[error(
        "objects from position {position} on were deleted behind a newer boundary; start again from the newest state"
    )]
    Overtaken {
        /// The lowest position that was read.
        position: u64,
    },
    /// An object that must exist is missing or invalid.
    #[error("{key} is damaged: {damage}")]
    Damaged {
        /// The object.
        key: ObjectKey,
        /// The damage.
        damage: Damage,
    },
    /// The archive is empty, or ends before a fence that the directory recorded.
    #[error(
        "the archive ends at position {end}, but this directory created position {recorded}; check the URL and the \
         bucket's lifecycle rules, or detach this directory"
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
        /// Store of the archive.
        found: StoreId,
        /// Store of the directory.
        expected: StoreId,
    },
    /// The archive has no fence, so that there is nothing to restore.
    #[error("the archive is empty; check the URL")]
    Empty,
    /// The bucket does not behave as the protocol requires.
    #[error("the bucket cannot hold an archive: {reason}; use another bucket or server")]
    NotSupported {
        /// The failed check.
        reason: &'static str,
    },
    /// Another process appended to the line during a prune.
    #[error("a {} was appended at position {position} during the prune; prune again", .kind.name())]
    Busy {
        /// Position of the object.
        position: u64,
        /// Kind of the object.
        kind: Kind,
    },
    /// A manifest cannot be appended before the run that holds its end.
    #[error(
        "the snapshot needs the log up to lsn {end}, but only lsn {archived} is archived; append the run first"
    )]
    EndNotArchived {
        /// Lsn up to which the snapshot needs the log.
        end: u64,
        /// Last archived Lsn.
        archived: u64,
    },
    /// A named snapshot is older than the newest one in the archive. They are archived in order.
    #[error(
        "snapshot {snapshot} is not newer than the newest named snapshot of the archive, {newest}; take a new one"
    )]
    NotNewer {
        /// Number of the snapshot.
        snapshot: SnapshotId,
        /// Number of the newest named snapshot of the archive.
        newest: SnapshotId,
    },
    /// The runs from which a snapshot needs the log are not in the archive.
    #[error("the archive does not contain the log from lsn {redo} on; archive a newer snapshot")]
    StartNotKept {
        /// Lsn from which the snapshot needs the log.
        redo: u64,
    },
    /// A writer's call without a fence.
    #[error("no fence was created; call `fence` first")]
    NoFence,
    /// A call while the outcome of an append is unknown.
    #[error("the outcome of an append is unknown; call `append_run` first")]
    AppendPending,
    /// A cut at a point that no kept manifest precedes.
    #[error("no kept manifest ends at or below lsn {lsn}; choose a later point")]
    CutTooOld {
        /// The point.
        lsn: u64,
    },
    /// An object would exceed the limits of the format.
    #[error("{key} cannot be encoded: {source}")]
    TooLarge {
        /// The object.
        key: ObjectKey,
        /// The exceeded limit.
        source: ObjectDefect,
    },
    /// The directory could not be read or written.
    #[error("the directory of the store: {0}")]
    Local(#[from] std::io::Error),
}

/// The difference between a directory and its archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Divergence {
    /// The newest fence was created by another directory. A takeover waives this check.
    UnknownFence,
    /// The directory never had a named snapshot that the archive keeps. A takeover waives this check, and gives up
    /// the name.
    UnknownName,
    /// The last archived batch is not in the directory, or another batch is in its place.
    NotOnLine,
    /// The last archived batch is above the point up to which the next opening keeps the log.
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

/// The damage of an object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The object does not exist, and no boundary has passed it.
    #[error("missing; usual causes are a lifecycle rule, a replica bucket, or an archive tier")]
    Missing,
    /// The bytes are invalid.
    #[error(transparent)]
    Bytes(#[from] ObjectDefect),
    /// The object does not name the object that is stored before it.
    #[error("it follows another object than the one that is stored before it")]
    NotNext,
    /// The frames do not continue the state before them.
    #[error("its frames continue {found}, but the state before them is {expected}")]
    Gap {
        /// The batch that the run continues.
        found: BatchPoint,
        /// The last batch of the state.
        expected: BatchPoint,
    },
    /// The line ends before the end of a snapshot.
    #[error("the snapshot needs the log up to {end}, but the line ends at {found}")]
    EndNotReached {
        /// The batch up to which the snapshot needs the log.
        end: BatchPoint,
        /// The last batch of the line.
        found: BatchPoint,
    },
    /// An object of a kind that nobody may have created here.
    #[error("a {} of another writer was found at a position that only a fence or a boundary can take", .0.name())]
    Unexpected(Kind),
    /// No manifest is kept from which a restore could start.
    #[error("no kept manifest precedes it")]
    NoStart,
    /// The bucket refuses to create the object and does not contain it.
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

    /// Returns true if the object is damaged because it belongs to another store.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        let Error::Damaged { damage: Damage::Bytes(defect), .. } = self else { return false };
        defect.defect == Defect::Foreign
    }
}
