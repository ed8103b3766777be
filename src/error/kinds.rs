//! The specific causes of errors that have several possible causes, such as each invalid argument of
//! [`Error::Invalid`](super::Error::Invalid).

use std::fmt;

use remanent_format::{FileName, Key, KeyLenError, Lsn, PageId, Place, SnapshotId};

use super::display::{Fingerprint, NearestDisplay, OffsetDisplay, single_states};
use crate::layout::LayoutError;

/// The action of a failed call in [`Error::Io`](super::Error::Io).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoAction {
    /// Opens a file or folder.
    Open,
    /// Creates a file or folder.
    Create,
    /// Creates a file in the store's directory, which was removed.
    CreateInRemoved,
    /// Reads a file or a caller-supplied source.
    Read,
    /// Writes a file.
    Write,
    /// Writes a trial file, bypassing the page cache.
    WriteDirect,
    /// Makes a file or folder durable. [`Error::remedy`](super::Error::remedy) never classifies a failed sync as a
    /// temporary shortage.
    Sync,
    /// Maps a file into memory.
    Map,
    /// Locks a file.
    Lock,
    /// Queries attributes of a file or file system.
    Inspect,
    /// Lists a folder.
    List,
    /// Creates a hard link: a second name of a file.
    Link,
    /// Renames a file.
    Rename,
    /// Removes a file.
    Remove,
    /// Shortens a file.
    Truncate,
    /// Allocates space for bytes of a file.
    Allocate,
    /// Starts a thread.
    Start,
    /// Obtains random bytes from the operating system.
    Draw,
}

impl fmt::Display for IoAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoAction::Open => "open",
            IoAction::Create => "create",
            IoAction::CreateInRemoved => "create a file in the removed directory",
            IoAction::Read => "read",
            IoAction::Write => "write",
            IoAction::WriteDirect => "write past the page cache in",
            IoAction::Sync => "sync",
            IoAction::Map => "map",
            IoAction::Lock => "lock",
            IoAction::Inspect => "inspect",
            IoAction::List => "list",
            IoAction::Link => "link",
            IoAction::Rename => "rename",
            IoAction::Remove => "remove",
            IoAction::Truncate => "truncate",
            IoAction::Allocate => "allocate space in",
            IoAction::Start => "start",
            IoAction::Draw => "draw",
        })
    }
}

/// The object of a failed call in [`Error::Io`](super::Error::Io).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoObject {
    /// A file in the store's directory.
    File {
        /// The name of the file.
        file: FileName,
        /// The offset in the file, in bytes, if known.
        offset: Option<u64>,
    },
    /// A folder, or the store directory itself.
    Folder {
        /// The path of the folder.
        path: String,
    },
    /// A thread of the store.
    Thread {
        /// The name of the thread.
        thread: &'static str,
    },
    /// The caller-supplied source of a page's bytes.
    Source {
        /// The index of the operation in the batch, from 0.
        index: usize,
        /// The offset, in bytes, of the requested bytes in the source.
        offset: u64,
    },
    /// The operating system's random bytes, requested for an identity.
    Randomness,
}

impl fmt::Display for IoObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IoObject::File { file, offset } => write!(f, "{file}{}", OffsetDisplay(*offset)),
            IoObject::Folder { path } => f.write_str(path),
            IoObject::Thread { thread } => f.write_str(thread),
            IoObject::Source { index, offset } => {
                write!(f, "the source of operation {index} of the batch at offset {offset}")
            }
            IoObject::Randomness => f.write_str("random bytes for an identity"),
        }
    }
}

/// The property in which a store differs from the options of its opener, for
/// [`Error::Mismatch`](super::Error::Mismatch).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The given identity differs from that of the store.
    #[error("the store was created with another identity")]
    Identity {
        /// The identity of the store.
        found: Vec<u8>,
    },
    /// The given layout fingerprint differs from that of the store. The caller would misinterpret the store's pages.
    #[error("the store's layout fingerprint is {}, but the caller's is {}", Fingerprint(.found.as_ref()), Fingerprint(Some(.expected)))]
    Layout {
        /// The given layout fingerprint.
        expected: [u8; 32],
        /// The layout fingerprint of the store, if it has one.
        found: Option<[u8; 32]>,
    },
}

/// The argument or call that is invalid, for [`Error::Invalid`](super::Error::Invalid).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    /// An option has an invalid value.
    #[error("option {option}: {reason}")]
    Option {
        /// The name of the option.
        option: &'static str,
        /// The reason why the argument is invalid.
        reason: String,
    },
    /// The text is not a valid state point.
    #[error("expected lsn:N, snapshot:N or the name of a snapshot, found {found:?}")]
    StatePoint {
        /// The given text.
        found: String,
    },
    /// A key is empty or too long.
    #[error(transparent)]
    Key(KeyLenError),
    /// A block layout is invalid, or does not fit the call.
    #[error(transparent)]
    Layout(LayoutError),
    /// An operation of a batch contradicts itself or its page.
    #[error("operation {index} of the batch: {reason}")]
    Operation {
        /// The index of the operation in the batch, from 0.
        index: usize,
        /// The reason why the argument is invalid.
        reason: String,
    },
    /// A call requires two pages of equal length, but their lengths differ.
    #[error("pages {} and {} are {} and {} bytes long", pages[0], pages[1], lens[0], lens[1])]
    LengthsDiffer {
        /// The ids of the pages.
        pages: [PageId; 2],
        /// The lengths of the pages in bytes.
        lens: [u64; 2],
    },
    /// The batch given to a replica does not directly follow the replica's last batch.
    #[error("batch {lsn} does not follow: batch {expected} is the next one")]
    OutOfOrder {
        /// The number of the given batch.
        lsn: Lsn,
        /// The number of the batch that directly follows the replica's last batch.
        expected: Lsn,
    },
}

/// The key or name that is already in use, and its holder, for [`Error::Taken`](super::Error::Taken).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Taken {
    /// Another page has this key.
    #[error("key {key} already belongs to page {holder}")]
    Key {
        /// The key that is already in use.
        key: Key,
        /// The page with this key.
        holder: PageId,
    },
    /// Another kept snapshot has this name.
    #[error("name {name:?} already belongs to snapshot {snapshot}")]
    Name {
        /// The name that is already in use.
        name: String,
        /// The snapshot with this name.
        snapshot: SnapshotId,
    },
}

/// The caller's memory or stream that a call cannot use, for [`Error::Refused`](super::Error::Refused).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// The caller's stream and the store cannot wait for each other.
    #[error("stream {stream:#x} cannot be used: {reason}")]
    Stream {
        /// The handle of the stream.
        stream: u64,
        /// The reason why the stream cannot be used.
        reason: &'static str,
    },
    /// Caller-owned memory, or a range of it, does not meet the requirements of the call.
    #[error("caller-owned memory of {len} bytes cannot be used: {reason}")]
    Memory {
        /// The length of the memory in bytes.
        len: u64,
        /// The reason why the memory cannot be used.
        reason: String,
    },
    /// A page is stored in the caller-owned memory, or has left it while the device may still access the memory. Only
    /// the store may write to a page's memory.
    #[error("caller-owned memory of {len} bytes cannot be used: it is in use by page {page}")]
    MemoryInUse {
        /// The length of the memory in bytes.
        len: u64,
        /// The page that is stored in this memory, or that has left it.
        page: PageId,
    },
    /// The page's memory does not support hints about its location.
    #[error("memory in place {place} accepts no hints: {reason}")]
    Hint {
        /// The place of the page's memory.
        place: Place,
        /// The reason why the memory does not support hints.
        reason: &'static str,
    },
}

/// The place or device that cannot be used, for [`Error::Unavailable`](super::Error::Unavailable).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The place cannot hold pages in this store.
    #[error("place {place} cannot hold pages: {reason}")]
    Place {
        /// The requested place.
        place: Place,
        /// The reason why the place cannot contain pages.
        reason: &'static str,
    },
    /// The requested device cannot be used on this machine.
    #[error("device {device} cannot be used: {reason}")]
    Device {
        /// The requested device.
        device: String,
        /// The reason why the device cannot be used, for example that the driver is missing.
        reason: String,
    },
}

/// The requested state that does not exist, for [`Error::NoSuchState`](super::Error::NoSuchState).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoSuchState {
    /// The snapshot does not exist, or is no longer kept.
    #[error("there is no snapshot {snapshot}")]
    Snapshot {
        /// The requested snapshot.
        snapshot: SnapshotId,
    },
    /// No kept snapshot has this name.
    #[error("there is no snapshot named {name:?}{}", NearestDisplay(nearest.as_deref()))]
    Name {
        /// The requested name.
        name: String,
        /// The kept snapshot's name that is most similar to `name`, if any is similar.
        nearest: Option<String>,
    },
    /// The state after this batch can no longer be reconstructed, or the batch does not exist yet.
    #[error("batch {requested} is outside the retained range {oldest}..={newest}{}", single_states(below))]
    OutsideWindow {
        /// The requested batch.
        requested: Lsn,
        /// The oldest batch whose state can be reconstructed.
        oldest: Lsn,
        /// The newest batch.
        newest: Lsn,
        /// Older batches whose states are still available because named snapshots keep them, in ascending order.
        below: Vec<Lsn>,
    },
    /// A call waits for a batch that was not committed yet.
    #[error("batch {requested} is not committed yet: the newest is {newest}")]
    NotCommitted {
        /// The requested batch.
        requested: Lsn,
        /// The newest batch.
        newest: Lsn,
    },
}
