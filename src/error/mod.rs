//! The error type of the crate: cause, location, state of the store, remedy.

mod advice;
mod display;
mod nearest;
mod remedy;

use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

pub use remanent_format::log::TornTail;
pub use remanent_format::{Damage, Defect, FileName, Folder, KeyLenError, UnknownPlace};
use remanent_format::{Epoch, Key, Lsn, PageId, Place, Position, SnapshotId};

use self::advice::advice_of_poisoned;
use self::display::{
    Fingerprint, LastSurvivingBatch, NearestDisplay, OffsetDisplay, PathDisplay, Size, StartFrom,
    StoreDisplay, single_states,
};
#[doc(hidden)]
pub use self::nearest::nearest;
pub use self::remedy::Remedy;
pub use crate::layout::LayoutError;

/// A result whose default error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error type of all fallible calls.
///
/// It is cheap to clone because sources are shared. [`Error::remedy`] returns the kind of remedy,
/// [`Error::advice`] the remedy in words.
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
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call to the file system failed.
    #[error("cannot {action} {file}{}{}: {source}", OffsetDisplay(*.offset), StoreDisplay(.store.as_deref()))]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The file, within the store directory.
        file: FileName,
        /// The offset in the file, in bytes, if known.
        offset: Option<u64>,
        /// The store's directory.
        store: Option<Arc<str>>,
        /// The error of the operating system.
        source: Arc<io::Error>,
    },
    /// A call to the file system failed on a folder or on the store directory itself.
    #[error("cannot {action} {path}: {source}")]
    Folder {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The path of the folder.
        path: String,
        /// The error of the operating system.
        source: Arc<io::Error>,
    },
    /// The disk has no space for a segment, an image or a manifest. Nothing changed; the store continues when
    /// space is available again. Batches that only delete use reserved space. The space of deleted pages is
    /// freed by the next [snapshot](crate::Store::snapshot), if no kept snapshot needs it;
    /// [`Store::prune`](crate::Store::prune) gives up older snapshots.
    #[error(
        "no space for {file}{} ({needed} bytes): free some space or delete pages, then try again",
        StoreDisplay(.store.as_deref())
    )]
    DiskFull {
        /// The file that could not be created.
        file: FileName,
        /// The length of that file in bytes.
        needed: u64,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// Data on disk is damaged, beyond a torn tail.
    #[error("the store{store} is damaged: {0}; `remanent verify` lists all damage", store = PathDisplay(.0.store.as_deref()))]
    Damaged(Box<StoreDamage>),
    /// Another process, or another handle in this process, has the store open.
    #[error("the store{} is open in {holder}", PathDisplay(.store.as_deref()))]
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
    #[error("the store{} was opened by another writer: {holder}", PathDisplay(.store.as_deref()))]
    Superseded {
        /// The other writer, as it identified itself.
        holder: String,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// A thread could not be started. The call had no effect.
    #[error("cannot start {thread}{}: {source}", StoreDisplay(.store.as_deref()))]
    Thread {
        /// The name of the thread.
        thread: &'static str,
        /// The store's directory.
        store: Option<Arc<str>>,
        /// The error of the operating system.
        source: Arc<io::Error>,
    },
    /// A thread panicked and left its work incomplete.
    #[error("{thread}{} panicked", StoreDisplay(.store.as_deref()))]
    Panicked {
        /// The name of the thread.
        thread: &'static str,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// The operating system returned no random bytes for an identity. The call had no effect.
    #[error("cannot draw random bytes for an identity: {source}")]
    Randomness {
        /// The error of the operating system.
        source: Arc<io::Error>,
    },
    /// The handle was inherited by a forked child. Only the process that opened a store can use it.
    #[error("the store was opened by process {opener}; a forked child must open it itself")]
    Forked {
        /// The process that opened the store.
        opener: u32,
    },
    /// The directory contains no store, and `Create::Never` was set.
    #[error("there is no store in {path}")]
    NoStore {
        /// The directory of the store.
        path: String,
    },
    /// The directory contains other files. Nothing was changed.
    #[error("no store can be made in {path}, which is not empty (it holds {found}): give an empty directory")]
    ForeignDirectory {
        /// The directory of the store.
        path: String,
        /// The name of one of these files.
        found: String,
    },
    /// The given identity differs from that of the store.
    #[error("the store was created with another identity")]
    IdentityMismatch {
        /// The identity of the store.
        found: Vec<u8>,
    },
    /// The given layout fingerprint differs from that of the store, so its pages would be misinterpreted.
    #[error("the store's layout fingerprint is {}, and the caller's is {}", Fingerprint(.found.as_ref()), Fingerprint(Some(.expected)))]
    LayoutMismatch {
        /// The given layout fingerprint.
        expected: [u8; 32],
        /// The layout fingerprint of the store, if it has one.
        found: Option<[u8; 32]>,
    },
    /// An option has an invalid value.
    #[error("option {option}: {reason}")]
    InvalidOption {
        /// The name of the option.
        option: &'static str,
        /// The reason why it is invalid.
        reason: String,
    },
    /// The text is not a valid state point.
    #[error("expected lsn:N, snapshot:N or the name of a snapshot, found {found:?}")]
    InvalidStatePoint {
        /// The given text.
        found: String,
    },
    /// No page has this id.
    #[error("there is no page {page}")]
    UnknownPage {
        /// The requested id.
        page: PageId,
    },
    /// A key is empty or too long.
    #[error(transparent)]
    InvalidKey(#[from] KeyLenError),
    /// A block layout is invalid, or cannot be used this way.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No page has this key.
    #[error("there is no page with key {key}")]
    UnknownKey {
        /// The requested key.
        key: Key,
    },
    /// The range is outside the page.
    #[error("bytes {offset}..{offset}+{len} are outside page {page}, which is {page_len} bytes long")]
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
    /// Another page has this key.
    #[error("key {key} is page {holder}'s")]
    KeyTaken {
        /// The key that is already in use.
        key: Key,
        /// The page with this key.
        holder: PageId,
    },
    /// A precondition failed because another batch changed the page first. Nothing changed.
    #[error("page {page} is at epoch {found}, the batch demands {expected}")]
    Conflict {
        /// The id of the page.
        page: PageId,
        /// The expected epoch; 0 means that the page must not exist.
        expected: Epoch,
        /// The epoch of the page; 0 if it does not exist.
        found: Epoch,
    },
    /// An operation is inconsistent with itself or with its page. Nothing changed.
    #[error("operation {index} of the batch: {reason}")]
    InvalidOperation {
        /// The index of the operation in the batch, from 0.
        index: usize,
        /// The reason why it is invalid.
        reason: String,
    },
    /// The source of a page's bytes failed. Nothing changed.
    #[error(
        "operation {index} of the batch: the source of its bytes cannot be read at offset {offset}: {source}"
    )]
    SourceFailed {
        /// The index of the operation in the batch, from 0.
        index: usize,
        /// The offset in the source of the requested piece, in bytes.
        offset: u64,
        /// The error of the source.
        source: Arc<io::Error>,
    },
    /// A length or count exceeds a limit of the format.
    #[error("{what} is {}over the limit of {limit}", Size(*.found))]
    Limit {
        /// The name of the length or count.
        what: &'static str,
        /// The length or count; `u64::MAX` if unknown.
        found: u64,
        /// The limit of the format.
        limit: u64,
    },
    /// The budget of the place has too little room left. Nothing changed.
    #[error("{requested} bytes in place {place} are over the budget: {available} of {budget} left")]
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
    /// The place cannot hold pages in this store.
    #[error("no page can live in place {place}: {reason}")]
    PlaceUnavailable {
        /// The requested place.
        place: Place,
        /// Why the place cannot hold pages.
        reason: &'static str,
    },
    /// The requested device cannot be used on this machine.
    #[error("device {device} cannot be used: {reason}")]
    DeviceUnavailable {
        /// The device, as it was requested.
        device: String,
        /// Why the device cannot be used, for example because the driver is missing.
        reason: String,
    },
    /// A caller's stream cannot be waited for or made to wait. Nothing changed.
    #[error("stream {stream:#x} cannot be used: {reason}")]
    StreamRefused {
        /// The handle of the stream.
        stream: u64,
        /// Why the stream cannot be used.
        reason: &'static str,
    },
    /// The page is leased, and a restore would replace it or a pin would fix its address; or the page is
    /// pinned, and the call would move it. Nothing changed.
    #[error("page {page} is leased or pinned: end that first")]
    Leased {
        /// The id of the page.
        page: PageId,
    },
    /// Caller-owned memory, or a range of it, does not meet the requirements of the call. Nothing changed.
    #[error("{len} bytes of a caller's memory cannot be used: {reason}")]
    MemoryRefused {
        /// The length of the memory in bytes.
        len: u64,
        /// Why the memory cannot be used.
        reason: String,
    },
    /// The memory does not accept hints about its location. Nothing changed.
    #[error("memory in place {place} takes no hints: {reason}")]
    HintRefused {
        /// The place of the memory.
        place: Place,
        /// Why the memory does not accept hints.
        reason: &'static str,
    },
    /// The caller-owned memory contains a page, so only the store may write to it, or a lane may still access
    /// it for a page that has left. Nothing changed.
    #[error("{len} bytes of a caller's memory cannot be used: page {page} lives there")]
    MemoryInUse {
        /// The length of the memory in bytes.
        len: u64,
        /// The page in this memory.
        page: PageId,
    },
    /// The two pages differ in length.
    #[error("pages {} and {} are {} and {} bytes long", pages[0], pages[1], lens[0], lens[1])]
    LengthsDiffer {
        /// The ids of the pages.
        pages: [PageId; 2],
        /// The lengths of the pages in bytes.
        lens: [u64; 2],
    },
    /// Another kept snapshot has this name.
    #[error("snapshot {snapshot} is named {name:?}")]
    NameTaken {
        /// The name that is already in use.
        name: String,
        /// The snapshot with this name.
        snapshot: SnapshotId,
    },
    /// The snapshot does not exist, or is no longer kept.
    #[error("there is no snapshot {snapshot}")]
    NoSnapshot {
        /// The requested snapshot.
        snapshot: SnapshotId,
    },
    /// No kept snapshot has this name.
    #[error("there is no snapshot named {name:?}{}", NearestDisplay(nearest.as_deref()))]
    NoSnapshotNamed {
        /// The requested name.
        name: String,
        /// The most similar name of a kept snapshot, if one is similar.
        nearest: Option<String>,
    },
    /// The requested state can no longer be reconstructed, or the batch does not exist yet.
    #[error(
        "the state at batch {requested} is out of reach: the store goes back to {oldest}, and is at {newest}{}",
        single_states(below)
    )]
    OutsideWindow {
        /// The requested batch.
        requested: Lsn,
        /// The oldest batch whose state can be reconstructed.
        oldest: Lsn,
        /// The newest batch.
        newest: Lsn,
        /// Older states that are still available individually, because a named snapshot keeps each of them;
        /// in ascending order.
        below: Vec<Lsn>,
    },
    /// The data to be read is no longer kept: its batches were recycled before they were read.
    #[error("batch {lsn} is not kept any more{}", StartFrom(*.snapshot))]
    Overtaken {
        /// The first missing batch.
        lsn: Lsn,
        /// The newest snapshot, if any, to start from.
        snapshot: Option<SnapshotId>,
    },
    /// The position of a follower is not in the store's history: the batch was lost in a crash, or the
    /// position is of another store.
    #[error("batch {position} is not in the store's history{}", LastSurvivingBatch(*.survived))]
    Diverged {
        /// The requested position.
        position: Position,
        /// The last surviving batch of that incarnation, if known.
        survived: Option<Lsn>,
    },
    /// The batch does not follow the last batch of the replica.
    #[error("batch {lsn} does not follow: batch {expected} is the next one")]
    OutOfOrder {
        /// The batch that was given.
        lsn: Lsn,
        /// The batch that would follow.
        expected: Lsn,
    },
    /// A call to the device failed.
    #[error("device: {reason}")]
    Device {
        /// A description of the failure.
        reason: String,
        /// Whether the process's device context was lost.
        context_lost: bool,
    },
    /// The device or the host has too little memory. Nothing changed.
    #[error("cannot allocate {len} bytes in place {place}")]
    OutOfMemory {
        /// The requested place.
        place: Place,
        /// The number of requested bytes.
        len: u64,
    },
    /// An earlier failure, contained here, stopped commits and snapshots.
    #[error("the store stopped after an earlier failure: {0}; {remedy}", remedy = advice_of_poisoned(.0))]
    Poisoned(Arc<Error>),
    /// The store is being closed by another thread.
    #[error("the store is closed")]
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
        Key::new(key).map_or_else(Self::InvalidKey, |key| Self::UnknownKey { key })
    }

    /// Creates the error for a name that no kept snapshot has.
    pub(crate) fn no_snapshot_named<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Self {
        let nearest = nearest(name, known).map(str::to_owned);
        Error::NoSnapshotNamed { name: name.to_owned(), nearest }
    }

    /// Returns the file concerned, if known.
    #[must_use]
    pub fn file(&self) -> Option<FileName> {
        match self {
            Error::Io { file, .. } | Error::DiskFull { file, .. } => Some(*file),
            Error::Damaged(damage) => Some(damage.file),
            Error::Poisoned(cause) => cause.file(),
            _ => None,
        }
    }

    /// Returns the offset in that file, in bytes, if known.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        match self {
            Error::Io { offset, .. } => *offset,
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
            Error::Overtaken { lsn, .. } | Error::OutOfOrder { lsn, .. } => Some(*lsn),
            Error::OutsideWindow { requested, .. } => Some(*requested),
            Error::Diverged { position, .. } => Some(position.lsn),
            Error::Poisoned(cause) => cause.lsn(),
            _ => None,
        }
    }

    /// Creates the error for a failed file system call on one of the store's files. It is never
    /// [`Error::DiskFull`], which only code that allocates space returns.
    #[must_use]
    pub(crate) fn io(action: &'static str, file: FileName, offset: Option<u64>, source: io::Error) -> Self {
        Error::Io { action, file, offset, store: None, source: Arc::new(source) }
    }

    /// Creates the error for a disk without space for a file of this length.
    #[must_use]
    pub(crate) fn disk_full(file: FileName, needed: u64) -> Self {
        Error::DiskFull { file, needed, store: None }
    }

    /// Creates the error for a thread that could not be started.
    #[must_use]
    pub(crate) fn thread(thread: &'static str, source: io::Error) -> Self {
        Error::Thread { thread, store: None, source: Arc::new(source) }
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
            Error::Io { store, .. }
            | Error::DiskFull { store, .. }
            | Error::Locked { store, .. }
            | Error::Superseded { store, .. }
            | Error::Thread { store, .. }
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

impl From<Damage> for Error {
    /// Data that could not be read because of a shortage or lack of memory is not reported as damage: nothing
    /// is known to be wrong with it.
    fn from(damage: Damage) -> Self {
        match damage.defect {
            Defect::Memory { needed } => Error::no_memory(needed),
            Defect::Shortage { errno } => {
                Error::io("read", damage.file, Some(damage.offset), io::Error::from_raw_os_error(errno))
            }
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
