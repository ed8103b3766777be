//! The crate's error type. An error states its cause, its location, the state of the store afterwards, and the remedy.

mod advice;
mod archive;
mod display;
mod kinds;
mod nccl;
mod nearest;
mod nixl;
mod remedy;

use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

pub use remanent_format::log::TornTail;
pub use remanent_format::{Damage, Defect, FileName, Folder, KeyLenError, UnknownPlace};
use remanent_format::{Epoch, Key, Lsn, PageId, Place, Position, SnapshotId};

pub use self::archive::{ArchiveError, ArchiveErrorKind};
pub use self::kinds::{Invalid, IoAction, IoObject, Mismatch, NoSuchState, Refused, Taken, Unavailable};
pub use self::nccl::NcclError;
#[doc(hidden)]
pub use self::nearest::nearest;
pub use self::nixl::NixlError;
pub use self::remedy::Remedy;
pub use crate::layout::LayoutError;

/// A [`Result`](std::result::Result) whose default error type is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The value of `what` in an [`Error::Limit`] for a store that has used all incarnation numbers.
pub(crate) const INCARNATION: &str = "incarnation";

/// The error type of all fallible calls.
///
/// Each variant states the cause: the caller, the environment (the system, a disk, another process), damaged data, or a
/// bug. Each variant also states the condition of the store afterwards. An *unchanged* store continues as if the call
/// had not been made. A *poisoned* store fails commits and snapshots with [`Error::Poisoned`] until it is opened again.
///
/// The message states the failure and then the remedy in words. [`Error::advice`] returns only the remedy in words, and
/// [`Error::remedy`] returns its kind. A clone is cheap because it shares sources.
///
/// ```
/// use remanent::error::Remedy;
/// use remanent::{Error, Store};
/// let store = Store::temporary()?;
/// let mut out = [0; 4];
/// let error = store.read(remanent::PageId(7), 0, &mut out).unwrap_err();
/// assert!(matches!(error, Error::UnknownPage { .. }));
/// assert_eq!(error.remedy(), Remedy::ChangeCall);
/// assert_eq!(error.advice(), "list the pages that exist: the id of a deleted page is not given again");
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// A call to the operating system or a caller-supplied source of bytes failed.
    ///
    /// Caused by the environment. The store is unchanged if the remedy is to retry or to permit access. Otherwise it
    /// must be opened again.
    Io {
        /// The attempted action.
        action: IoAction,
        /// The object of the action.
        object: IoObject,
        /// The store's directory.
        store: Option<Arc<str>>,
        /// The error of the operating system or of the source.
        source: Arc<io::Error>,
    },
    /// The disk has no space for a segment, an image or a manifest. The store continues when space is available again.
    /// Batches that only delete use reserved space.
    ///
    /// The next [snapshot](crate::Store::snapshot) frees the space of deleted pages, unless a kept snapshot needs it.
    /// [`Store::prune`](crate::Store::prune) removes older snapshots.
    ///
    /// Caused by the environment. The store is unchanged.
    DiskFull {
        /// The file that could not be created.
        file: FileName,
        /// The length of that file in bytes.
        needed: u64,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// Data on disk is damaged. A torn tail, which a crash leaves, is not reported as damage.
    ///
    /// Caused by damaged data. The store is unchanged.
    Damaged(Box<StoreDamage>),
    /// Another process, or another handle in this process, has the store open.
    ///
    /// Caused by the environment. The store is unchanged.
    Locked {
        /// The holder, as it identified itself.
        holder: String,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// Another writer opened the store after this one, because no lock prevented it or a program replaced or removed
    /// `LOCK`. This writer acknowledges no more batches and changes no more files. The store now belongs to the other
    /// writer, whose state includes all batches that this writer acknowledged as durable.
    ///
    /// Caused by the environment. The store is poisoned.
    Superseded {
        /// The other writer, as it identified itself.
        holder: String,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// A thread of the store panicked and left its work incomplete.
    ///
    /// Caused by a bug. The store is poisoned.
    Panicked {
        /// The name of the thread.
        thread: &'static str,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// The handle was inherited by a forked child. Only the process that opened a store can use it.
    ///
    /// Caused by the caller. The store is unchanged.
    Forked {
        /// The id of the process that opened the store.
        opener: u32,
    },
    /// The directory contains no store, and none was created: either `Create::Never` was set, or the directory is not
    /// empty.
    ///
    /// Caused by the caller. The store is unchanged.
    NoStore {
        /// The path of the store's directory.
        path: String,
        /// The name of a file in the directory, if the directory is not empty.
        found: Option<String>,
    },
    /// The given identity or layout fingerprint differs from the one with which the store was created.
    ///
    /// Caused by the caller. The store is unchanged.
    Mismatch(Mismatch),
    /// An argument, or the call itself, is invalid.
    ///
    /// Caused by the caller. The store is unchanged.
    Invalid(Invalid),
    /// A length or count exceeds a limit of the format.
    ///
    /// Caused by the caller. The store is unchanged.
    Limit {
        /// The name of the length or count that exceeds the limit.
        what: &'static str,
        /// The value of the length or count; `u64::MAX` if unknown.
        found: u64,
        /// The largest value that the format allows.
        limit: u64,
    },
    /// No page has this id.
    ///
    /// Caused by the caller. The store is unchanged.
    UnknownPage {
        /// The requested id.
        page: PageId,
    },
    /// No page has this key.
    ///
    /// Caused by the caller. The store is unchanged.
    UnknownKey {
        /// The requested key.
        key: Key,
    },
    /// The requested range exceeds the page.
    ///
    /// Caused by the caller. The store is unchanged.
    OutOfBounds {
        /// The id of the page.
        page: PageId,
        /// The offset of the first requested byte.
        offset: u64,
        /// The number of requested bytes.
        len: u64,
        /// The length of the page in bytes.
        page_len: u64,
    },
    /// Another page has the key, or another kept snapshot has the name.
    ///
    /// Caused by the caller. The store is unchanged.
    Taken(Taken),
    /// A precondition failed because another batch changed the page first.
    ///
    /// Caused by the caller. The store is unchanged.
    Conflict {
        /// The id of the page.
        page: PageId,
        /// The expected epoch; 0 means that the page must not exist.
        expected: Epoch,
        /// The epoch of the page; 0 if it does not exist.
        found: Epoch,
    },
    /// A lease or a pin of the page excludes the call:
    ///
    /// - A leased page cannot be replaced by a restore or pinned.
    /// - A pinned page cannot be moved.
    ///
    /// Caused by the caller. The store is unchanged.
    Leased {
        /// The id of the page.
        page: PageId,
    },
    /// Caller-owned memory or a caller's stream does not meet the requirements of the call.
    ///
    /// Caused by the caller. The store is unchanged.
    Refused(Refused),
    /// A place cannot hold pages in this store, or a device cannot be used on this machine.
    ///
    /// Caused by the environment. The store is unchanged.
    Unavailable(Unavailable),
    /// The request exceeds the unused part of the place's budget.
    ///
    /// Caused by the caller. The store is unchanged.
    OverBudget {
        /// The requested place.
        place: Place,
        /// The number of requested bytes.
        requested: u64,
        /// The number of bytes left in the budget.
        available: u64,
        /// The budget of the place in bytes.
        budget: u64,
    },
    /// The device or the host has too little memory.
    ///
    /// Caused by the environment. The store is unchanged.
    OutOfMemory {
        /// The requested place.
        place: Place,
        /// The number of requested bytes.
        len: u64,
    },
    /// The requested state is no longer kept, or does not exist yet.
    ///
    /// Caused by the caller. The store is unchanged.
    NoSuchState(NoSuchState),
    /// The log no longer contains the requested batches, because their space was reused before they were read.
    ///
    /// Caused by the caller, who reads too slowly. The store is unchanged.
    Overtaken {
        /// The first batch that is no longer in the log.
        lsn: Lsn,
        /// The newest snapshot from which the reader can start, if any.
        snapshot: Option<SnapshotId>,
    },
    /// The position of a follower is not in the store's history. Either its batch was lost in a crash, or the position
    /// belongs to another store.
    ///
    /// Caused by the environment. The store is unchanged.
    Diverged {
        /// The follower's position.
        position: Position,
        /// The last batch of the position's incarnation that survived the crash, if known.
        survived: Option<Lsn>,
    },
    /// A call to the device failed.
    ///
    /// Caused by the environment. The store is poisoned.
    Device {
        /// A description of the failure.
        reason: String,
        /// Whether the process's device context was lost.
        context_lost: bool,
    },
    /// NCCL cannot be used, or a communicator failed. The ranks of a communicator that failed need a new one.
    ///
    /// Caused by the environment. The store is unchanged.
    Nccl(Box<NcclError>),
    /// NIXL cannot be used, or a transfer with a peer failed.
    ///
    /// Caused by the environment. The store is unchanged.
    Nixl(Box<NixlError>),
    /// The archive of the store cannot be used, or a request to it failed.
    ///
    /// Caused by the environment. The store is unchanged. [`ArchiveErrorKind::Superseded`] also poisons an open
    /// store, because another directory continues its archive.
    Archive(Box<ArchiveError>),
    /// The store was stopped by the contained error. Commits and snapshots fail until it is opened again.
    ///
    /// Caused by the contained error. The store is poisoned.
    Poisoned(Arc<Error>),
    /// Another thread is closing the store.
    ///
    /// Caused by the caller. The store is unchanged.
    Closed,
}

/// Damage to data on disk, and the store that contains the data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreDamage {
    /// The kind of damage, and the file and offset of the damaged data.
    pub damage: Damage,
    /// The store's directory.
    pub store: Option<Arc<str>>,
}

impl Deref for StoreDamage {
    type Target = Damage;

    fn deref(&self) -> &Damage {
        &self.damage
    }
}

impl fmt::Display for StoreDamage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.damage.fmt(f)
    }
}

impl Error {
    /// Creates the error for a key that no page has, or that is not a valid key.
    pub(crate) fn unknown_key(key: &[u8]) -> Self {
        Key::new(key).map_or_else(Self::from, |key| Self::UnknownKey { key })
    }

    /// Creates the error for a name that no kept snapshot has.
    pub(crate) fn no_snapshot_named<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Self {
        let nearest = nearest(name, known).map(str::to_owned);
        Error::NoSuchState(NoSuchState::Name { name: name.to_owned(), nearest })
    }

    /// Returns the file that the error names, if any.
    #[must_use]
    pub fn file(&self) -> Option<FileName> {
        match self {
            Error::Io { object: IoObject::File { file, .. }, .. } | Error::DiskFull { file, .. } => {
                Some(*file)
            }
            Error::Damaged(damage) => Some(damage.file),
            Error::Poisoned(cause) => cause.file(),
            _ => None,
        }
    }

    /// Returns the offset that the error names in [`file`](Self::file), in bytes, if known.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        match self {
            Error::Io { object: IoObject::File { offset, .. }, .. } => *offset,
            Error::Damaged(damage) => Some(damage.offset),
            Error::Poisoned(cause) => cause.offset(),
            _ => None,
        }
    }

    /// Returns the number of the batch that the error names, if any.
    #[must_use]
    pub fn lsn(&self) -> Option<Lsn> {
        match self {
            Error::Damaged(damage) => damage.lsn,
            Error::Overtaken { lsn, .. } | Error::Invalid(Invalid::OutOfOrder { lsn, .. }) => Some(*lsn),
            Error::NoSuchState(
                NoSuchState::OutsideWindow { requested, .. } | NoSuchState::NotCommitted { requested, .. },
            ) => Some(*requested),
            Error::Diverged { position, .. } => Some(position.lsn),
            Error::Poisoned(cause) => cause.lsn(),
            _ => None,
        }
    }

    /// Creates the error for a failed file system call on one of the store's files. It is never [`Error::DiskFull`]:
    /// only code that allocates space returns that error.
    #[must_use]
    pub(crate) fn io(action: IoAction, file: FileName, offset: Option<u64>, source: io::Error) -> Self {
        Error::system(action, IoObject::File { file, offset }, source)
    }

    /// Creates the error for a failed file system call on a folder.
    #[must_use]
    pub(crate) fn folder(action: IoAction, path: String, source: io::Error) -> Self {
        Error::system(action, IoObject::Folder { path }, source)
    }

    /// Creates the error for a failed call to the operating system.
    #[must_use]
    pub(crate) fn system(action: IoAction, object: IoObject, source: io::Error) -> Self {
        Error::Io { action, object, store: None, source: Arc::new(source) }
    }

    /// Creates the error for a disk without space for `file`, which needs `needed` bytes.
    #[must_use]
    pub(crate) fn disk_full(file: FileName, needed: u64) -> Self {
        Error::DiskFull { file, needed, store: None }
    }

    /// Creates the error for a thread that could not be started.
    #[must_use]
    pub(crate) fn thread(thread: &'static str, source: io::Error) -> Self {
        Error::system(IoAction::Start, IoObject::Thread { thread }, source)
    }

    /// Creates the error for a thread that panicked.
    #[must_use]
    pub(crate) fn panicked(thread: &'static str) -> Self {
        Error::Panicked { thread, store: None }
    }

    /// Adds the directory of the store to the error. An [`Error::Poisoned`] is unchanged, because its cause received
    /// the directory when the store was poisoned.
    #[must_use]
    pub(crate) fn in_store(mut self, directory: &str) -> Self {
        if let Some(store @ None) = self.store_mut() {
            *store = Some(directory.into());
        }
        self
    }

    fn store_mut(&mut self) -> Option<&mut Option<Arc<str>>> {
        match self {
            // The path of a folder contains the store's directory.
            Error::Io { object: IoObject::Folder { .. }, .. } => None,
            Error::Io { store, .. }
            | Error::DiskFull { store, .. }
            | Error::Locked { store, .. }
            | Error::Superseded { store, .. }
            | Error::Panicked { store, .. } => Some(store),
            Error::Damaged(damage) => Some(&mut damage.store),
            _ => None,
        }
    }
}

impl From<ArchiveError> for Error {
    fn from(error: ArchiveError) -> Self {
        Error::Archive(Box::new(error))
    }
}

impl From<NcclError> for Error {
    fn from(error: NcclError) -> Self {
        Error::Nccl(Box::new(error))
    }
}

impl From<NixlError> for Error {
    fn from(error: NixlError) -> Self {
        Error::Nixl(Box::new(error))
    }
}

/// Allows generic code to convert the error of an infallible conversion, such as from [`Key`] to itself.
impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

impl From<KeyLenError> for Error {
    fn from(error: KeyLenError) -> Self {
        Error::Invalid(Invalid::Key(error))
    }
}

impl From<LayoutError> for Error {
    fn from(error: LayoutError) -> Self {
        Error::Invalid(Invalid::Layout(error))
    }
}

impl From<Damage> for Error {
    /// Converts damage to an error. If a lack of memory or another shortage prevented the read, the error is not
    /// [`Error::Damaged`], because the data may be intact.
    fn from(damage: Damage) -> Self {
        match damage.defect {
            Defect::Memory { needed } => Error::no_memory(needed),
            Defect::Shortage { errno } => Error::io(
                IoAction::Read,
                damage.file,
                Some(damage.offset),
                io::Error::from_raw_os_error(errno),
            ),
            _ => Error::Damaged(Box::new(StoreDamage { damage, store: None })),
        }
    }
}

impl Error {
    /// Creates the error for a failed allocation of `len` bytes of ordinary memory.
    pub(crate) fn no_memory(len: u64) -> Self {
        Error::OutOfMemory { place: Place::Host, len }
    }

    /// Converts a failed allocation in the format crate. The defect must come from a call that has no other failure.
    pub(crate) fn of_memory(defect: Defect) -> Self {
        match defect {
            Defect::Memory { needed } => Error::no_memory(needed),
            other => panic!("no memory was asked for: {other}"),
        }
    }
}

#[cfg(test)]
mod tests;
