//! The one error type: whose fault, where, what state the store is in, what helps.

mod advice;
mod display;
mod nearest;
mod remedy;

use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

use remanent_format::{
    Damage, Defect, Epoch, FileName, Key, KeyLenError, Lsn, PageId, Place, Position, SnapshotId,
};

use self::advice::advice_of_poisoned;
use self::display::{
    Fingerprint, NearestDisplay, OffsetDisplay, PathDisplay, Size, StartFrom, StoreDisplay, Survived,
    single_states,
};
pub use self::nearest::nearest;
pub use self::remedy::Remedy;
pub use crate::layout::LayoutError;

/// What the library returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong.
///
/// Cheap to clone; sources are shared. [`Error::remedy`] returns the kind of remedy, [`Error::advice`] the
/// remedy in words.
///
/// ```
/// use remanent::{Error, Options, Remedy, Store};
/// let store = Store::temporary(Options::default())?;
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
        /// What was tried.
        action: &'static str,
        /// The file, within the store directory.
        file: FileName,
        /// The offset in the file, in bytes, where one is known.
        offset: Option<u64>,
        /// The store's directory.
        store: Option<Arc<str>>,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// A call to the file system failed on a folder or on the store directory itself.
    #[error("cannot {action} {path}: {source}")]
    Folder {
        /// What was tried.
        action: &'static str,
        /// The path that was refused.
        path: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// There is no space for a segment, an image or a manifest. Nothing changed; the store goes on when space
    /// returns. Batches that only delete have a reserve; what pages took that were deleted comes back with
    /// the next [snapshot](crate::Store::snapshot), once no kept snapshot needs it:
    /// [`Store::prune`](crate::Store::prune) gives up older ones.
    #[error(
        "no space for {file}{} ({needed} bytes): free some space or delete pages, then try again",
        StoreDisplay(.store.as_deref())
    )]
    DiskFull {
        /// The file that could not be made.
        file: FileName,
        /// Bytes that it needs.
        needed: u64,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// Bytes on disk are not what they should be, and more than a torn tail.
    #[error("the store{store} is damaged: {0}; `remanent verify` lists all damage", store = PathDisplay(.0.store.as_deref()))]
    Damaged(Box<StoreDamage>),
    /// Another process, or another handle in this one, has the store open.
    #[error("the store{} is open in {holder}", PathDisplay(.store.as_deref()))]
    Locked {
        /// The holder, as it described itself.
        holder: String,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// Another writer has opened the store since this one did, because no lock kept it out, or a program
    /// replaced or removed `LOCK`. This writer acknowledges nothing more and changes no file. The state is
    /// the other writer's: it begins with the batches that this one had acknowledged as durable.
    #[error("the store{} was opened by another writer: {holder}", PathDisplay(.store.as_deref()))]
    Superseded {
        /// The other writer, as it described itself.
        holder: String,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// A thread could not be started. Nothing happened.
    #[error("cannot start {thread}{}: {source}", StoreDisplay(.store.as_deref()))]
    Thread {
        /// The thread in question.
        thread: &'static str,
        /// The store's directory.
        store: Option<Arc<str>>,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// A thread panicked, so that its work is left half done.
    #[error("{thread}{} panicked", StoreDisplay(.store.as_deref()))]
    Panicked {
        /// The thread in question.
        thread: &'static str,
        /// The store's directory.
        store: Option<Arc<str>>,
    },
    /// The system gave no random bytes, of which identities are made. Nothing happened.
    #[error("cannot draw random bytes for an identity: {source}")]
    Randomness {
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The handle was inherited by a forked child. Only the process that opened a store may use it.
    #[error("the store was opened by process {opener}; a forked child must open it itself")]
    Forked {
        /// The process that opened the store.
        opener: u32,
    },
    /// There is no store in the directory, and `Create::Never` was asked for.
    #[error("there is no store in {path}")]
    NoStore {
        /// The directory of the store.
        path: String,
    },
    /// The directory holds something else. Nothing was touched.
    #[error("no store can be made in {path}, which is not empty (it holds {found}): give an empty directory")]
    ForeignDirectory {
        /// The directory of the store.
        path: String,
        /// The name of one foreign file.
        found: String,
    },
    /// The caller's identity blob is not the store's.
    #[error("the store was created with another identity")]
    IdentityMismatch {
        /// The store's blob.
        found: Vec<u8>,
    },
    /// The caller's layout fingerprint is not the store's: its pages would be misread.
    #[error("the store's layout fingerprint is {}, and the caller's is {}", Fingerprint(.found.as_ref()), Fingerprint(Some(.expected)))]
    LayoutMismatch {
        /// The caller's fingerprint.
        expected: [u8; 32],
        /// The store's fingerprint, if it has one.
        found: Option<[u8; 32]>,
    },
    /// An option's value cannot be used.
    #[error("option {option}: {reason}")]
    InvalidOption {
        /// The name of the option.
        option: &'static str,
        /// The reason why not.
        reason: String,
    },
    /// The text names no state.
    #[error("expected lsn:N, snapshot:N or the name of a snapshot, found {found:?}")]
    InvalidStatePoint {
        /// The text that was given.
        found: String,
    },
    /// No page has this id.
    #[error("there is no page {page}")]
    UnknownPage {
        /// The id asked for.
        page: PageId,
    },
    /// A key cannot be that long, or that short.
    #[error(transparent)]
    InvalidKey(#[from] KeyLenError),
    /// A block layout cannot be, or cannot be used this way.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No page has this key.
    #[error("there is no page with key {key}")]
    UnknownKey {
        /// The key in question.
        key: Key,
    },
    /// The range does not lie within the page.
    #[error("bytes {offset}..{offset}+{len} are outside page {page}, which is {page_len} bytes long")]
    OutOfBounds {
        /// The page in question.
        page: PageId,
        /// The first byte asked for.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// The page's length.
        page_len: u64,
    },
    /// Another page has this key.
    #[error("key {key} is page {holder}'s")]
    KeyTaken {
        /// The key in question.
        key: Key,
        /// The page that has it.
        holder: PageId,
    },
    /// A precondition does not hold: another batch changed the page first. Nothing changed.
    #[error("page {page} is at epoch {found}, the batch demands {expected}")]
    Conflict {
        /// The page in question.
        page: PageId,
        /// The epoch demanded; 0 demands that there is no such page.
        expected: Epoch,
        /// The page's epoch; 0 if there is no such page.
        found: Epoch,
    },
    /// An operation contradicts itself or its page. Nothing changed.
    #[error("operation {index} of the batch: {reason}")]
    InvalidOperation {
        /// The operation's place in the batch, from 0.
        index: usize,
        /// The reason why not.
        reason: String,
    },
    /// A source did not give the bytes of a page. Nothing changed.
    #[error(
        "operation {index} of the batch: the source of its bytes cannot be read at offset {offset}: {source}"
    )]
    SourceFailed {
        /// The operation's place in the batch, from 0.
        index: usize,
        /// The offset in the source, in bytes, of the piece asked for.
        offset: u64,
        /// What the source said.
        source: Arc<io::Error>,
    },
    /// A length or count is over the format's limit.
    #[error("{what} is {}over the limit of {limit}", Size(*.found))]
    Limit {
        /// What is too large.
        what: &'static str,
        /// Its size; `u64::MAX` if it cannot be told.
        found: u64,
        /// The limit that holds.
        limit: u64,
    },
    /// The place has no room left in its budget. Nothing changed.
    #[error("{asked} bytes in place {place} are over the budget: {available} of {budget} left")]
    OverBudget {
        /// The place in question.
        place: Place,
        /// Bytes asked for.
        asked: u64,
        /// Bytes that are left.
        available: u64,
        /// The budget of the place.
        budget: u64,
    },
    /// Pages cannot live in this place here.
    #[error("no page can live in place {place}: {reason}")]
    PlaceUnavailable {
        /// The place in question.
        place: Place,
        /// The reason why not.
        reason: &'static str,
    },
    /// The device asked for cannot be used on this machine.
    #[error("device {device} cannot be used: {reason}")]
    DeviceUnavailable {
        /// The device, as it is asked for.
        device: String,
        /// What is missing.
        reason: String,
    },
    /// A stream of the caller's cannot be waited for, nor told to wait. Nothing changed.
    #[error("stream {stream:#x} cannot be used: {reason}")]
    StreamRefused {
        /// The handle of the stream.
        stream: u64,
        /// The reason why not.
        reason: &'static str,
    },
    /// The page is leased, and a restore would replace it or a pin would hold it where it is; or it is
    /// pinned, and would not stay where it is. Nothing changed.
    #[error("page {page} is leased or pinned: end that first")]
    Leased {
        /// The page in question.
        page: PageId,
    },
    /// Memory of a caller's, or a range of it, is not what the call needs. Nothing changed.
    #[error("{len} bytes of a caller's memory cannot be used: {reason}")]
    MemoryRefused {
        /// How many bytes.
        len: u64,
        /// The reason why not.
        reason: String,
    },
    /// Memory takes no hints on where it is to lie. Nothing changed.
    #[error("memory in place {place} takes no hints: {reason}")]
    HintRefused {
        /// The place in question.
        place: Place,
        /// The reason why not.
        reason: &'static str,
    },
    /// A page lives in memory of a caller's, where only the store writes, or a lane may still use it for a
    /// page that left. Nothing changed.
    #[error("{len} bytes of a caller's memory cannot be used: page {page} lives there")]
    MemoryInUse {
        /// How many bytes.
        len: u64,
        /// The page that lives there.
        page: PageId,
    },
    /// The two pages are not equally long.
    #[error("pages {} and {} are {} and {} bytes long", pages[0], pages[1], lens[0], lens[1])]
    LengthsDiffer {
        /// The pages in question.
        pages: [PageId; 2],
        /// How many bytes each has.
        lens: [u64; 2],
    },
    /// Another snapshot that is kept has this name.
    #[error("snapshot {snapshot} is named {name:?}")]
    NameTaken {
        /// The name in question.
        name: String,
        /// The snapshot that has it.
        snapshot: SnapshotId,
    },
    /// There is no such snapshot, or it is not kept any more.
    #[error("there is no snapshot {snapshot}")]
    NoSnapshot {
        /// The snapshot asked for.
        snapshot: SnapshotId,
    },
    /// No snapshot that is kept has this name.
    #[error("there is no snapshot named {name:?}{}", NearestDisplay(nearest.as_deref()))]
    NoSnapshotNamed {
        /// The name in question.
        name: String,
        /// The most similar name of a snapshot that is kept, if one is similar.
        nearest: Option<String>,
    },
    /// The state asked for cannot be computed any more, or there is no such batch yet.
    #[error(
        "the state at batch {asked} is out of reach: the store goes back to {oldest}, and is at {newest}{}",
        single_states(below)
    )]
    OutsideWindow {
        /// The batch asked for.
        asked: Lsn,
        /// The oldest state that can be computed.
        oldest: Lsn,
        /// The newest batch.
        newest: Lsn,
        /// The single states that are kept from before the oldest of these, ascending: those of named
        /// snapshots.
        below: Vec<Lsn>,
    },
    /// What was being read is not kept any more: batches were recycled before they could be read.
    #[error("batch {lsn} is not kept any more{}", StartFrom(*.snapshot))]
    Overtaken {
        /// The first batch that is missing.
        lsn: Lsn,
        /// The newest snapshot, to start from.
        snapshot: Option<SnapshotId>,
    },
    /// A follower's position is not on the store's line: a crash took the batch, or it is another store's.
    #[error("batch {position} is not in the store's history{}", Survived(*.survived))]
    Diverged {
        /// The position asked for.
        position: Position,
        /// The last batch of that incarnation that survived, where it is still known.
        survived: Option<Lsn>,
    },
    /// A replica was given a batch that does not follow its last one.
    #[error("batch {lsn} does not follow: batch {expected} is the next one")]
    OutOfOrder {
        /// The batch in question.
        lsn: Lsn,
        /// The one that would follow.
        expected: Lsn,
    },
    /// A call to the device failed.
    #[error("device: {reason}")]
    Device {
        /// A description of what failed.
        reason: String,
        /// Whether the process's device context went with it.
        context_lost: bool,
    },
    /// The device's memory, or the host's, is exhausted. Nothing changed.
    #[error("cannot allocate {len} bytes in place {place}")]
    OutOfMemory {
        /// The place in question.
        place: Place,
        /// Bytes asked for.
        len: u64,
    },
    /// An earlier failure stopped commits and snapshots; this is that failure.
    #[error("the store stopped after an earlier failure: {0}; {remedy}", remedy = advice_of_poisoned(.0))]
    Poisoned(Arc<Error>),
    /// The store is being closed by another thread.
    #[error("the store is closed")]
    Closed,
}

/// Damage, and the store that it was found in.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreDamage {
    /// What is damaged, and where.
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
    /// No snapshot of these has the name.
    pub(crate) fn no_snapshot_named<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Self {
        let nearest = nearest(name, known).map(str::to_owned);
        Error::NoSnapshotNamed { name: name.to_owned(), nearest }
    }

    /// The file concerned, where there is one.
    #[must_use]
    pub fn file(&self) -> Option<FileName> {
        match self {
            Error::Io { file, .. } | Error::DiskFull { file, .. } => Some(*file),
            Error::Damaged(damage) => Some(damage.file),
            Error::Poisoned(cause) => cause.file(),
            _ => None,
        }
    }

    /// The offset in that file, in bytes, where one is known.
    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        match self {
            Error::Io { offset, .. } => *offset,
            Error::Damaged(damage) => Some(damage.offset),
            Error::Poisoned(cause) => cause.offset(),
            _ => None,
        }
    }

    /// The batch concerned, where one is known.
    #[must_use]
    pub fn lsn(&self) -> Option<Lsn> {
        match self {
            Error::Damaged(damage) => damage.lsn,
            Error::Overtaken { lsn, .. } | Error::OutOfOrder { lsn, .. } => Some(*lsn),
            Error::OutsideWindow { asked, .. } => Some(*asked),
            Error::Diverged { position, .. } => Some(position.lsn),
            Error::Poisoned(cause) => cause.lsn(),
            _ => None,
        }
    }

    /// An error of the file system on one of the store's files; "no space" becomes [`Error::DiskFull`]
    /// only where space is made, so not here.
    #[must_use]
    pub(crate) fn io(action: &'static str, file: FileName, offset: Option<u64>, source: io::Error) -> Self {
        Error::Io { action, file, offset, store: None, source: Arc::new(source) }
    }

    /// There is no space for a file of this length.
    #[must_use]
    pub(crate) fn disk_full(file: FileName, needed: u64) -> Self {
        Error::DiskFull { file, needed, store: None }
    }

    /// A thread could not be started.
    #[must_use]
    pub(crate) fn thread(thread: &'static str, source: io::Error) -> Self {
        Error::Thread { thread, store: None, source: Arc::new(source) }
    }

    /// A thread panicked.
    #[must_use]
    pub(crate) fn panicked(thread: &'static str) -> Self {
        Error::Panicked { thread, store: None }
    }

    /// The error with the directory of the store that it is about. What is in [`Error::Poisoned`] has it
    /// since the store was poisoned.
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

/// For conversions that cannot fail, of a [`Key`] into a key.
impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

impl From<Damage> for Error {
    /// What could not be looked at, for a shortage or for want of memory, is no damage: nothing is known to
    /// be wrong with it.
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
    /// Ordinary memory of this length was refused.
    pub(crate) fn no_memory(len: u64) -> Self {
        Error::OutOfMemory { place: Place::Host, len }
    }

    /// A refusal of memory in the format crate, by a call that fails in no other way.
    pub(crate) fn of_memory(defect: Defect) -> Self {
        match defect {
            Defect::Memory { needed } => Error::no_memory(needed),
            other => panic!("no memory was asked for: {other}"),
        }
    }
}
