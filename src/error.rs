//! The one error type: whose fault, where, what state the store is in, what helps.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::hash::Hash;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

use remanent_format::{
    Damage, Defect, Epoch, FileName, Key, KeyLenError, Lsn, PageId, Place, Position, SHORTAGES, SnapshotId,
};

/// What the library returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong.
///
/// Cheap to clone; sources are shared. [`Error::remedy`] says what helps.
///
/// ```
/// use remanent::{Error, Options, Remedy, Store};
/// let store = Store::temporary(Options::default())?;
/// let mut out = [0; 4];
/// let error = store.read(remanent::PageId(7), 0, &mut out).unwrap_err();
/// assert!(matches!(error, Error::UnknownPage { .. }));
/// assert_eq!(error.remedy(), Remedy::ChangeCall);
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
    #[error("the store's layout fingerprint is {}, not the caller's", Hex(.found.as_ref()))]
    LayoutMismatch {
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
    /// No page has this id.
    #[error("there is no page {page}")]
    UnknownPage {
        /// The id asked for.
        page: PageId,
    },
    /// A key cannot be that long, or that short.
    #[error(transparent)]
    InvalidKey(#[from] KeyLenError),
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
    #[error("there is no snapshot named {name:?}")]
    NoSnapshotNamed {
        /// The name in question.
        name: String,
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
    #[error("the store stopped after an earlier failure: {0}; {remedy}", remedy = remedy_of_poisoned(.0))]
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

/// What helps against an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// The call is wrong: change it. Nothing happened.
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

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Remedy::ChangeCall => "change the call",
            Remedy::Retry => "try again",
            Remedy::FreeSpace => "free some space, then try again",
            Remedy::Permit => "see to what the system refuses, then try again",
            Remedy::Reopen => "close the store, if it is open, and open it again",
            Remedy::NewProcess => "open the store in a new process",
            Remedy::StartOver => "start over from the newest snapshot",
            Remedy::Inspect => "run `remanent verify`",
        })
    }
}

impl Error {
    /// The remedy that helps.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Error::UnknownPage { .. }
            | Error::UnknownKey { .. }
            | Error::InvalidKey(_)
            | Error::OutOfBounds { .. }
            | Error::KeyTaken { .. }
            | Error::InvalidOperation { .. }
            | Error::InvalidOption { .. }
            | Error::Limit { .. }
            | Error::PlaceUnavailable { .. }
            | Error::DeviceUnavailable { .. }
            | Error::StreamRefused { .. }
            | Error::MemoryRefused { .. }
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
            Error::Conflict { .. } | Error::Locked { .. } | Error::Leased { .. } => Remedy::Retry,
            Error::DiskFull { .. } | Error::OverBudget { .. } | Error::OutOfMemory { .. } => {
                Remedy::FreeSpace
            }
            error if error.is_shortage() => Remedy::Retry,
            Error::Io { source, .. } | Error::Folder { source, .. } if is_the_systems(source) => {
                Remedy::Permit
            }
            Error::Thread { .. } | Error::Randomness { .. } => Remedy::Permit,
            Error::Io { .. }
            | Error::Folder { .. }
            | Error::Panicked { .. }
            | Error::Device { context_lost: false, .. } => Remedy::Reopen,
            Error::Device { context_lost: true, .. } => Remedy::NewProcess,
            Error::Overtaken { .. } | Error::Diverged { .. } => Remedy::StartOver,
            Error::Damaged(_) => Remedy::Inspect,
            Error::Poisoned(cause) => remedy_of_poisoned(cause),
        }
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
            | Error::Thread { store, .. }
            | Error::Panicked { store, .. } => Some(store),
            Error::Damaged(damage) => Some(&mut damage.store),
            _ => None,
        }
    }

    /// Whether the system was short of something that passes: open files, memory, threads. Nothing was done
    /// then, and the same call may succeed later. A failed sync is none of these, whatever the system said:
    /// it may have dropped what it could not write.
    #[must_use]
    pub(crate) fn is_shortage(&self) -> bool {
        match self {
            Error::Io { action: "sync", .. } | Error::Folder { action: "sync", .. } => false,
            Error::Io { source, .. } | Error::Folder { source, .. } | Error::Thread { source, .. } => {
                source.raw_os_error().is_some_and(|errno| SHORTAGES.contains(&errno))
            }
            _ => false,
        }
    }

    /// Whether the failure leaves everything as it was where something is made anew: no space,
    /// no memory, or a [shortage](Self::is_shortage).
    #[must_use]
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Error::DiskFull { .. } | Error::OutOfMemory { .. }) || self.is_shortage()
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

/// The length in bytes of memory for `count` items.
fn items_len<T>(count: usize) -> u64 {
    count.saturating_mul(size_of::<T>()) as u64
}

/// Makes room for `count` items more.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn make_room<T>(items: &mut Vec<T>, count: usize) -> Result<()> {
    let len = items.len();
    items.try_reserve(count).map_err(|_| Error::no_memory(items_len::<T>(len.saturating_add(count))))
}

/// Adds an item to a list that may grow too long.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn push<T>(items: &mut Vec<T>, item: T) -> Result<()> {
    make_room(items, 1)?;
    items.push(item);
    Ok(())
}

/// Adds items to a list that may grow too long.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn append<T>(items: &mut Vec<T>, more: impl IntoIterator<Item = T>) -> Result<()> {
    let more = more.into_iter();
    make_room(items, more.size_hint().0)?;
    for item in more {
        push(items, item)?;
    }
    Ok(())
}

/// A list of items, which may be too many.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn collected<T>(items: impl IntoIterator<Item = T>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    append(&mut all, items)?;
    Ok(all)
}

/// A map of items. It asks for short memory only. `collect` does not: it sorts all items in one piece of
/// memory first, which cannot be refused.
pub(crate) fn map_of<K: Ord, T>(items: impl IntoIterator<Item = (K, T)>) -> BTreeMap<K, T> {
    let mut map = BTreeMap::new();
    map.extend(items);
    map
}

/// A set of items. As [`map_of`], it asks for short memory only.
pub(crate) fn set_of<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    let mut set = BTreeSet::new();
    set.extend(items);
    set
}

/// Adds an item to a map that may grow too large.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn insert<K: Eq + Hash, T>(map: &mut HashMap<K, T>, key: K, item: T) -> Result<()> {
    let count = 2 * (map.len() + 1);
    map.try_reserve(1).map_err(|_| Error::no_memory(items_len::<(K, T)>(count)))?;
    map.insert(key, item);
    Ok(())
}

/// A copy of what may be too much.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn copied<T: Copy>(items: &[T]) -> Result<Vec<T>> {
    let mut copy = Vec::new();
    make_room(&mut copy, items.len())?;
    copy.extend_from_slice(items);
    Ok(copy)
}

/// The end of a message on a state that is out of reach: single states that are not.
fn single_states(below: &[Lsn]) -> String {
    let batches: Vec<String> = below.iter().map(Lsn::to_string).collect();
    match batches.len() {
        0 => String::new(),
        1 => format!("; of older states it has that at batch {}", batches[0]),
        _ => format!("; of older states it has those at batches {}", batches.join(", ")),
    }
}

/// What helps a store that stopped for this reason. What helped the failed call, such as free space, helps
/// the open that must follow, which says so where it is needed.
fn remedy_of_poisoned(cause: &Error) -> Remedy {
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

/// Shows an offset that may be unknown.
struct OffsetDisplay(Option<u64>);

impl fmt::Display for OffsetDisplay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |offset| write!(f, " at offset {offset}"))
    }
}

/// Shows the store that a file is of.
struct StoreDisplay<'a>(Option<&'a str>);

impl fmt::Display for StoreDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |store| write!(f, " of the store in {store}"))
    }
}

/// Shows where a store lies.
struct PathDisplay<'a>(Option<&'a str>);

impl fmt::Display for PathDisplay<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |store| write!(f, " in {store}"))
    }
}

/// Shows a size that may be unknown.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == u64::MAX { Ok(()) } else { write!(f, "{}, ", self.0) }
    }
}

/// Shows a snapshot to start from.
struct StartFrom(Option<SnapshotId>);

impl fmt::Display for StartFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |snapshot| write!(f, ": start from snapshot {snapshot}"))
    }
}

/// Shows what is left of an incarnation.
struct Survived(Option<Lsn>);

impl fmt::Display for Survived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |lsn| write!(f, ", where {lsn} is the last one of that incarnation"))
    }
}

/// Shows a fingerprint.
struct Hex<'a>(Option<&'a [u8; 32]>);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
            None => f.write_str("none"),
        }
    }
}
