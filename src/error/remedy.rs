//! The kind of remedy of each error, and the errors that pass by themselves. `advice` has the words.

use std::io;

use remanent_format::SHORTAGES;

use super::Error;

/// The kind of remedy against an [`Error`]; [`Error::advice`] says how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// The call cannot succeed as it is; [`Error::advice`] says what to give instead. Nothing happened.
    ChangeCall,
    /// Another change came first, another caller has it, or the system was short of open files, memory
    /// or threads: try again. Nothing happened.
    Retry,
    /// Make room, then try again. Nothing happened.
    FreeSpace,
    /// The system refuses what the error names: permit it, make what is missing, or name another place.
    /// Nothing happened.
    Permit,
    /// Close and open the store again; what was acknowledged is there.
    Reopen,
    /// Start a new process and open the store there: this one's device context is lost.
    NewProcess,
    /// Forget what was read so far, and start from the newest snapshot.
    StartOver,
    /// A person must look: `remanent verify` says what is damaged. Nothing was changed.
    Inspect,
}

impl Error {
    /// The kind of remedy that helps.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Error::UnknownPage { .. }
            | Error::UnknownKey { .. }
            | Error::InvalidKey(_)
            | Error::Layout(_)
            | Error::OutOfBounds { .. }
            | Error::KeyTaken { .. }
            | Error::InvalidOperation { .. }
            | Error::InvalidOption { .. }
            | Error::InvalidStatePoint { .. }
            | Error::Limit { .. }
            | Error::PlaceUnavailable { .. }
            | Error::DeviceUnavailable { .. }
            | Error::StreamRefused { .. }
            | Error::MemoryRefused { .. }
            | Error::HintRefused { .. }
            | Error::LengthsDiffer { .. }
            | Error::NameTaken { .. }
            | Error::NoSnapshot { .. }
            | Error::NoSnapshotNamed { .. }
            | Error::OutsideWindow { .. }
            | Error::NoStore { .. }
            | Error::ForeignDirectory { .. }
            | Error::IdentityMismatch { .. }
            | Error::LayoutMismatch { .. }
            | Error::Forked { .. }
            | Error::OutOfOrder { .. }
            | Error::Closed => Remedy::ChangeCall,
            Error::Conflict { .. }
            | Error::Locked { .. }
            | Error::Leased { .. }
            | Error::MemoryInUse { .. } => Remedy::Retry,
            Error::DiskFull { .. } | Error::OverBudget { .. } | Error::OutOfMemory { .. } => {
                Remedy::FreeSpace
            }
            error if error.is_shortage() => Remedy::Retry,
            Error::Io { source, .. } | Error::Folder { source, .. } if is_the_systems(source) => {
                Remedy::Permit
            }
            Error::Thread { .. } | Error::Randomness { .. } | Error::SourceFailed { .. } => Remedy::Permit,
            Error::Io { .. }
            | Error::Folder { .. }
            | Error::Panicked { .. }
            | Error::Superseded { .. }
            | Error::Device { context_lost: false, .. } => Remedy::Reopen,
            Error::Device { context_lost: true, .. } => Remedy::NewProcess,
            Error::Overtaken { .. } | Error::Diverged { .. } => Remedy::StartOver,
            Error::Damaged(_) => Remedy::Inspect,
            Error::Poisoned(cause) => remedy_of_poisoned(cause),
        }
    }

    /// Whether the system was short of something that passes: open files, memory, threads. Nothing was done
    /// then, and the same call may succeed later. A failed sync is none of these, whatever the system said:
    /// it may have dropped what it could not write.
    #[must_use]
    pub(crate) fn is_shortage(&self) -> bool {
        match self {
            Error::Io { action: "sync", .. } | Error::Folder { action: "sync", .. } => false,
            Error::Io { source, .. }
            | Error::Folder { source, .. }
            | Error::Thread { source, .. }
            | Error::SourceFailed { source, .. } => {
                source.raw_os_error().is_some_and(|errno| SHORTAGES.contains(&errno))
            }
            _ => false,
        }
    }

    /// Whether the failure leaves everything as it was where something is made anew: no space,
    /// no memory, a source of the caller's that fails, or a [shortage](Self::is_shortage).
    #[must_use]
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Error::DiskFull { .. } | Error::OutOfMemory { .. } | Error::SourceFailed { .. })
            || self.is_shortage()
    }

    /// Whether the file system said that there is no space left.
    #[must_use]
    pub(crate) fn is_no_space(&self) -> bool {
        match self {
            Error::DiskFull { .. } => true,
            Error::Io { source, .. } | Error::Folder { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            _ => false,
        }
    }
}

/// What helps a store that stopped for this reason. What helped the failed call, such as free space, helps
/// the open that must follow, which says so where it is needed.
pub(super) fn remedy_of_poisoned(cause: &Error) -> Remedy {
    match cause.remedy() {
        remedy @ (Remedy::NewProcess | Remedy::Inspect) => remedy,
        _ => Remedy::Reopen,
    }
}

/// Whether the system refuses this to every caller until rights, names or media are changed.
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
