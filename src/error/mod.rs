//! The error type of the crate: cause, location, state of the store, remedy.

mod advice;
mod display;
mod kinds;
mod nearest;
mod remedy;

use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

pub use remanent_format::log::TornTail;
pub use remanent_format::{Damage, Defect, FileName, Folder, KeyLenError, UnknownPlace};
use remanent_format::{Epoch, Key, Lsn, PageId, Place, Position, SnapshotId};

pub use self::kinds::{Invalid, IoAction, IoObject, Mismatch, NoSuchState, Refused, Taken, Unavailable};
#[doc(hidden)]
pub use self::nearest::nearest;
pub use self::remedy::Remedy;
pub use crate::layout::LayoutError;

/// A result whose default error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error type of all fallible calls.
///
/// Each variant states the cause: the caller, the environment (the system, a disk, another process), damaged
/// data, or a bug. It also states the store afterwards. An *unchanged* store continues as if the call had not
/// been made. A *poisoned* store fails commits and snapshots with [`Error::Poisoned`], until it is opened again.
/// The message states the failure, and then the remedy in words, which [`Error::advice`] returns.
/// [`Error::remedy`] returns the kind of remedy. A clone is cheap because it shares sources.
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
    /// A call to the operating system failed, or a caller-supplied source of bytes.
    ///
    /// The cause is the environment. The store is unchanged if the remedy is to retry or to permit access, and
    /// otherwise must be opened again.
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
    /// The disk has no space for a segment, an image or a manifest. The store continues when space is available
    /// again. Batches that only delete use reserved space. The space of deleted pages is freed by the next
    /// [snapshot](crate::Store::snapshot), if no kept snapshot needs it;
    /// [`Store::prune`](crate::Store::prune) gives up older snapshots.
    ///
    /// The cause is the environment. The store is unchanged.
    DiskFull {
        /// The file that could not be created.
        file: FileName,
        /// The length of that file in bytes.
        needed: u64,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// Data on disk is damaged, beyond a torn tail.
    ///
    /// The cause is damaged data. The store is unchanged.
    Damaged(Box<StoreDamage>),
    /// Another process, or another handle in this process, has the store open.
    ///
    /// The cause is the environment. The store is unchanged.
    Locked {
        /// The holder, as it identified itself.
        holder: String,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// Another writer opened the store after this one, because no lock prevented it or a program replaced or
    /// removed `LOCK`. This writer acknowledges no more batches and changes no more files. The store now
    /// belongs to the other writer, whose state starts with the batches that this one acknowledged as
    /// durable.
    ///
    /// The cause is the environment. The store is poisoned.
    Superseded {
        /// The other writer, as it identified itself.
        holder: String,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// A thread panicked and left its work incomplete.
    ///
    /// The cause is a bug. The store is poisoned.
    Panicked {
        /// The name of the thread.
        thread: &'static str,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// The handle was inherited by a forked child. Only the process that opened a store can use it.
    ///
    /// The cause is the caller. The store is unchanged.
    Forked {
        /// The process that opened the store.
        opener: u32,
    },
    /// The directory contains no store, and `Create::Never` was set, or a new store needs an empty directory.
    ///
    /// The cause is the caller. The store is unchanged.
    NoStore {
        /// The directory of the store.
        path: String,
        /// The name of a file in the directory, if no store can be created because the directory is not empty.
        found: Option<String>,
    },
    /// The store was created with another identity or layout fingerprint than the given one.
    ///
    /// The cause is the caller. The store is unchanged.
    Mismatch(Mismatch),
    /// An argument, or the call itself, is invalid.
    ///
    /// The cause is the caller. The store is unchanged.
    Invalid(Invalid),
    /// A length or count exceeds a limit of the format.
    ///
    /// The cause is the caller. The store is unchanged.
    Limit {
        /// The name of the length or count.
        what: &'static str,
        /// The length or count; `u64::MAX` if unknown.
        found: u64,
        /// The limit of the format.
        limit: u64,
    },
    /// No page has this id.
    ///
    /// The cause is the caller. The store is unchanged.
    UnknownPage {
        /// The requested id.
        page: PageId,
    },
    /// No page has this key.
    ///
    /// The cause is the caller. The store is unchanged.
    UnknownKey {
        /// The requested key.
        key: Key,
    },
    /// The range is outside the page.
    ///
    /// The cause is the caller. The store is unchanged.
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
    /// Another page has the key, or another kept snapshot the name.
    ///
    /// The cause is the caller. The store is unchanged.
    Taken(Taken),
    /// A precondition failed because another batch changed the page first.
    ///
    /// The cause is the caller. The store is unchanged.
    Conflict {
        /// The id of the page.
        page: PageId,
        /// The expected epoch; 0 means that the page must not exist.
        expected: Epoch,
        /// The epoch of the page; 0 if it does not exist.
        found: Epoch,
    },
    /// The page is leased, and a restore would replace it or a pin would fix its address; or the page is
    /// pinned, and the call would move it.
    ///
    /// The cause is the caller. The store is unchanged.
    Leased {
        /// The id of the page.
        page: PageId,
    },
    /// Caller-owned memory or a caller's stream does not meet the requirements of the call.
    ///
    /// The cause is the caller. The store is unchanged.
    Refused(Refused),
    /// A place cannot hold pages in this store, or a device cannot be used on this machine.
    ///
    /// The cause is the environment. The store is unchanged.
    Unavailable(Unavailable),
    /// The budget of the place has too little room left.
    ///
    /// The cause is the caller. The store is unchanged.
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
    /// The cause is the environment. The store is unchanged.
    OutOfMemory {
        /// The requested place.
        place: Place,
        /// The number of requested bytes.
        len: u64,
    },
    /// The requested state is not kept, or does not exist yet.
    ///
    /// The cause is the caller. The store is unchanged.
    NoSuchState(NoSuchState),
    /// The data to be read is no longer kept: its batches were recycled before they were read.
    ///
    /// The cause is the caller, who reads too slowly. The store is unchanged.
    Overtaken {
        /// The first missing batch.
        lsn: Lsn,
        /// The newest snapshot, if any, to start from.
        snapshot: Option<SnapshotId>,
    },
    /// The position of a follower is not in the store's history: the batch was lost in a crash, or the
    /// position is of another store.
    ///
    /// The cause is the environment. The store is unchanged.
    Diverged {
        /// The requested position.
        position: Position,
        /// The last surviving batch of that incarnation, if known.
        survived: Option<Lsn>,
    },
    /// A call to the device failed.
    ///
    /// The cause is the environment. The store is poisoned.
    Device {
        /// A description of the failure.
        reason: String,
        /// Whether the process's device context was lost.
        context_lost: bool,
    },
    /// An earlier failure, contained here, stopped commits and snapshots.
    ///
    /// The cause is the contained error. The store is poisoned.
    Poisoned(Arc<Error>),
    /// The store is being closed by another thread.
    ///
    /// The cause is the caller. The store is unchanged.
    Closed,
}

/// Damage, and the store that contains it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreDamage {
    /// The damage and its location.
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
    /// The error for a key that no page has, or that no page can have.
    pub(crate) fn unknown_key(key: &[u8]) -> Self {
        Key::new(key).map_or_else(Self::from, |key| Self::UnknownKey { key })
    }

    /// Creates the error for a name that no kept snapshot has.
    pub(crate) fn no_snapshot_named<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Self {
        let nearest = nearest(name, known).map(str::to_owned);
        Error::NoSuchState(NoSuchState::Name { name: name.to_owned(), nearest })
    }

    /// Returns the file concerned, if known.
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

    /// Returns the offset in that file, in bytes, if known.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        match self {
            Error::Io { object: IoObject::File { offset, .. }, .. } => *offset,
            Error::Damaged(damage) => Some(damage.offset),
            Error::Poisoned(cause) => cause.offset(),
            _ => None,
        }
    }

    /// Returns the batch concerned, if known.
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

    /// Creates the error for a failed file system call on one of the store's files. It is never
    /// [`Error::DiskFull`], which only code that allocates space returns.
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

    /// Creates the error for a disk without space for a file of this length.
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

    /// Adds the directory of the store. The cause in [`Error::Poisoned`] received it when the store was
    /// poisoned.
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

/// Required by conversions that cannot fail, such as from [`Key`] to itself.
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
    /// Data that could not be read because of a shortage or lack of memory is not reported as damage: nothing
    /// is known to be wrong with it.
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
    /// Creates the error for a refused allocation of ordinary memory.
    pub(crate) fn no_memory(len: u64) -> Self {
        Error::OutOfMemory { place: Place::Host, len }
    }

    /// Converts a refused allocation in the format crate, from a call that has no other failure.
    pub(crate) fn of_memory(defect: Defect) -> Self {
        match defect {
            Defect::Memory { needed } => Error::no_memory(needed),
            other => panic!("no memory was asked for: {other}"),
        }
    }
}

#[cfg(test)]
mod tests;
