//! The kind of remedy for each error, and which errors are transient. The module `advice` contains the texts.

use std::io;

use remanent_format::SHORTAGES;

use super::{ArchiveErrorKind, Error, IoAction, IoObject, NcclError, NixlError, Refused};

/// The kind of action that resolves an [`Error`]. [`Error::advice`] describes the action in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Change the arguments, because the call cannot succeed with the given arguments. [`Error::advice`] states the
    /// required change. The call had no effect.
    ChangeCall,
    /// Repeat the call: another change was made first, another caller holds the object, or the system was short of open
    /// files, memory or threads. The call had no effect.
    Retry,
    /// Free disk space or memory, then repeat the call. The call had no effect.
    FreeSpace,
    /// Give the system access to the named object: grant permission, create a missing file, or use another path. The
    /// call had no effect.
    Permit,
    /// Close the store and open it again; acknowledged batches are recovered.
    Reopen,
    /// Open the store in a new process, because the device context of this one is lost.
    NewProcess,
    /// Discard all data read so far and start from the newest snapshot.
    StartOver,
    /// Inspect the damage with `remanent verify`, which lists it. The call changed nothing.
    Inspect,
}

impl Error {
    /// Returns the kind of remedy.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Error::Refused(Refused::MemoryInUse { .. })
            | Error::Conflict { .. }
            | Error::Locked { .. }
            | Error::Leased { .. } => Remedy::Retry,
            Error::UnknownPage { .. }
            | Error::UnknownKey { .. }
            | Error::Invalid(_)
            | Error::OutOfBounds { .. }
            | Error::Taken(_)
            | Error::Limit { .. }
            | Error::Unavailable(_)
            | Error::Refused(_)
            | Error::NoSuchState(_)
            | Error::NoStore { .. }
            | Error::Mismatch(_)
            | Error::Forked { .. }
            | Error::Closed => Remedy::ChangeCall,
            Error::DiskFull { .. } | Error::OverBudget { .. } | Error::OutOfMemory { .. } => {
                Remedy::FreeSpace
            }
            error if error.is_shortage() => Remedy::Retry,
            Error::Io { object: IoObject::File { .. } | IoObject::Folder { .. }, source, .. }
                if !is_the_systems(source) =>
            {
                Remedy::Reopen
            }
            Error::Io { .. } => Remedy::Permit,
            Error::Panicked { .. } | Error::Superseded { .. } | Error::Device { context_lost: false, .. } => {
                Remedy::Reopen
            }
            Error::Device { context_lost: true, .. } => Remedy::NewProcess,
            Error::Overtaken { .. } | Error::Diverged { .. } => Remedy::StartOver,
            Error::Damaged(_) => Remedy::Inspect,
            Error::Nccl(error) => remedy_of_nccl(error),
            Error::Nixl(error) => remedy_of_nixl(error),
            Error::Archive(error) => remedy_of_archive(error.kind),
            Error::Poisoned(cause) => remedy_of_poisoned(cause),
        }
    }

    /// Returns whether the call failed because the system was temporarily short of open files, memory or threads. Such
    /// a call had no effect, and may succeed later. A failed sync is never a shortage, regardless of its error code,
    /// because the system may have dropped the data that it could not write.
    #[must_use]
    pub(crate) fn is_shortage(&self) -> bool {
        match self {
            Error::Io { action: IoAction::Sync, .. } => false,
            Error::Io { source, .. } => source.raw_os_error().is_some_and(|errno| SHORTAGES.contains(&errno)),
            _ => false,
        }
    }

    /// Returns whether a failure to create a file or object left the store unchanged: no space, no memory, a failed
    /// caller-supplied source, a [shortage](Self::is_shortage), or a page that could not be fetched from an archive.
    #[must_use]
    pub(crate) fn is_passing(&self) -> bool {
        matches!(
            self,
            Error::DiskFull { .. }
                | Error::OutOfMemory { .. }
                | Error::Io { object: IoObject::Source { .. }, .. }
        ) || self.is_shortage()
            || self.is_of_fetch()
    }

    /// Returns whether a page could not be fetched from an archive. The store is unchanged.
    #[must_use]
    pub(crate) fn is_of_fetch(&self) -> bool {
        let Error::Archive(archive) = self else { return false };
        matches!(archive.kind, ArchiveErrorKind::Bucket | ArchiveErrorKind::Damaged)
    }

    /// Returns whether a page can probably be fetched from an archive later: the bucket cannot be reached, or the disk
    /// is full.
    #[must_use]
    pub(crate) fn is_passing_fetch(&self) -> bool {
        let is_of_bucket =
            matches!(self, Error::Archive(archive) if archive.kind == ArchiveErrorKind::Bucket);
        is_of_bucket || self.is_no_space() || self.is_shortage()
    }

    /// Returns whether the file system reported that no space is left.
    #[must_use]
    pub(crate) fn is_no_space(&self) -> bool {
        match self {
            Error::DiskFull { .. } => true,
            Error::Io { object: IoObject::File { .. } | IoObject::Folder { .. }, source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            _ => false,
        }
    }
}

/// Returns the remedy for a failure of an archive.
fn remedy_of_archive(kind: ArchiveErrorKind) -> Remedy {
    match kind {
        ArchiveErrorKind::NoArchive
        | ArchiveErrorKind::Settings
        | ArchiveErrorKind::OtherStore
        | ArchiveErrorKind::Limit
        | ArchiveErrorKind::Unnamed
        | ArchiveErrorKind::NotGiven => Remedy::ChangeCall,
        ArchiveErrorKind::Superseded | ArchiveErrorKind::Diverged => Remedy::StartOver,
        ArchiveErrorKind::Lost | ArchiveErrorKind::Bucket | ArchiveErrorKind::Unsupported => Remedy::Permit,
        ArchiveErrorKind::Damaged | ArchiveErrorKind::Directory => Remedy::Inspect,
    }
}

/// Returns the remedy for a failure of NCCL: install another library, correct the call, or make a new communicator.
fn remedy_of_nccl(error: &NcclError) -> Remedy {
    match error {
        NcclError::NotFound { .. } | NcclError::MissingSymbol { .. } | NcclError::TooOld { .. } => {
            Remedy::Permit
        }
        NcclError::NoSuchRank { .. } | NcclError::RankTaken { .. } | NcclError::Unlike { .. } => {
            Remedy::ChangeCall
        }
        NcclError::Failed { .. }
        | NcclError::JoinTimedOut { .. }
        | NcclError::TimedOut { .. }
        | NcclError::Aborted { .. } => Remedy::Retry,
    }
}

/// Returns the remedy for a failure of NIXL: install another library, correct the call, or send the request to the peer
/// again.
fn remedy_of_nixl(error: &NixlError) -> Remedy {
    match error {
        NixlError::NotFound { .. }
        | NixlError::MissingSymbol { .. }
        | NixlError::OtherVersion { .. }
        | NixlError::OtherPeerVersion { .. }
        | NixlError::UnexpectedAnswer { .. } => Remedy::Permit,
        NixlError::InvalidName { .. }
        | NixlError::UnsupportedMemory { .. }
        | NixlError::OutOfRegion { .. }
        | NixlError::InvalidTransfer { .. }
        | NixlError::InvalidMetadata { .. }
        | NixlError::Refused { .. } => Remedy::ChangeCall,
        NixlError::Failed { .. }
        | NixlError::TimedOut { .. }
        | NixlError::Corrupted { .. }
        | NixlError::Unsettled { .. }
        | NixlError::NotConnected { .. }
        | NixlError::Lost { .. } => Remedy::Retry,
    }
}

/// Returns the remedy for a store that was stopped by `cause`. The store must always be opened again. If the failed
/// call also needs a remedy, such as free space, the open reports that remedy.
pub(super) fn remedy_of_poisoned(cause: &Error) -> Remedy {
    match cause.remedy() {
        remedy @ (Remedy::NewProcess | Remedy::Inspect) => remedy,
        _ => Remedy::Reopen,
    }
}

/// Returns whether the system will fail this call for every caller until permissions, names or media change.
fn is_the_systems(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::PermissionDenied
            | Kind::NotFound
            | Kind::NotADirectory
            | Kind::IsADirectory
            | Kind::AlreadyExists
            | Kind::ReadOnlyFilesystem
            | Kind::InvalidFilename
    )
}
