//! The events of a simulated disk, in order, and the moments at which a crash can occur.

use std::fmt;
use std::sync::Arc;

use remanent_format::limits::SECTOR_LEN;
use remanent_format::{FileName, Folder};

use super::node::{FileId, Node};

/// An event in the history of a simulated disk, usually a completed operation.
#[derive(Clone, Debug)]
pub(super) enum DiskEvent {
    /// A file was created, or an existing file with that name was truncated.
    Create { file: FileName, id: FileId },
    /// A file of another disk was linked to a name on this disk.
    Link { file: FileName, id: FileId, node: Arc<Node> },
    /// Bytes were written with `write_at` or `write_direct`.
    Write { file: FileName, id: FileId, offset: u64, bytes: Arc<[u8]> },
    /// Bytes were stored in a window of a file.
    Put { file: FileName, id: FileId, offset: u64, bytes: Arc<[u8]> },
    /// Space was allocated for a file up to offset `end`.
    Reserve { file: FileName, id: FileId, end: u64 },
    /// A file was truncated to `len` bytes.
    SetLen { file: FileName, id: FileId, len: u64 },
    /// A file was synced.
    SyncFile { file: FileName, id: FileId },
    /// A range of a window was synced to its file.
    SyncWindow { file: FileName, id: FileId, offset: u64, len: u64 },
    /// A sync of a file or of a window failed because of an injected fault.
    FailedSync { file: FileName, id: FileId, offset: u64, len: u64 },
    /// A sync was omitted by [`SimDisk::skip_syncs`](super::SimDisk::skip_syncs).
    Skipped { point: SyncPoint },
    /// A file was renamed.
    Rename { source: FileName, target: FileName },
    /// A file was removed.
    Remove { file: FileName },
    /// A folder was created.
    MakeFolder { folder: Folder },
    /// A folder was synced.
    SyncFolder { folder: Folder },
    /// Bytes were damaged on the medium.
    Damage { file: FileName, id: FileId, offset: u64, bytes: Arc<[u8]> },
    /// The length of a file was damaged on the medium.
    Truncate { file: FileName, id: FileId, len: u64 },
    /// The test recorded an acknowledgement.
    Ack(u64),
}

impl DiskEvent {
    /// Returns the event as a crash during the event would leave it, or `None` if the event is atomic.
    pub(super) fn torn(&self, tear: Tear) -> Option<Self> {
        let mut torn = self.clone();
        match &mut torn {
            DiskEvent::Write { offset, bytes, .. } | DiskEvent::Put { offset, bytes, .. } => {
                match tear {
                    Tear::Head(len) => *bytes = bytes[..len].into(),
                    Tear::Tail(len) => {
                        let start = bytes.len() - len;
                        *offset += start as u64;
                        *bytes = bytes[start..].into();
                    }
                }
                Some(torn)
            }
            _ => None,
        }
    }

    /// Returns the tears of this event at the positions that `tears` selects.
    pub(super) fn tears(&self, tears: Tears) -> Vec<Tear> {
        let (offset, len, is_put) = match self {
            DiskEvent::Write { offset, bytes, .. } => (*offset, bytes.len(), false),
            DiskEvent::Put { offset, bytes, .. } => (*offset, bytes.len(), true),
            _ => return Vec::new(),
        };
        let mut heads: Vec<usize> = match tears {
            Tears::None => Vec::new(),
            Tears::Every => (1..len).collect(),
            Tears::Few(count) => {
                let first_border = SECTOR_LEN - (offset % SECTOR_LEN as u64) as usize;
                let borders: Vec<usize> = (first_border..len).step_by(SECTOR_LEN).collect();
                // The first and the last border, and some of those in between, at equal distances.
                let step = borders.len().div_ceil(count.max(1)).max(1);
                let some = borders.iter().step_by(step).chain(borders.last()).copied();
                some.chain([1, len / 2, len.saturating_sub(1)]).collect()
            }
        };
        heads.sort_unstable();
        heads.dedup();
        heads.retain(|head| (1..len).contains(head));
        // A copy into memory may run backwards, or store its last bytes first. A write to a file does not.
        let tails: Vec<Tear> = match tears {
            Tears::Every if is_put => (1..len).map(Tear::Tail).collect(),
            Tears::Few(_) if is_put && len > 1 => {
                vec![Tear::Tail(1), Tear::Tail(len / 2), Tear::Tail(len - 1)]
            }
            _ => Vec::new(),
        };
        heads.into_iter().map(Tear::Head).chain(tails).collect()
    }
}

impl fmt::Display for DiskEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskEvent::Create { file, .. } => write!(f, "create {file}"),
            DiskEvent::Link { file, .. } => write!(f, "link {file}"),
            DiskEvent::Write { file, offset, bytes, .. } => {
                write!(f, "write {file} {offset}+{}", bytes.len())
            }
            DiskEvent::Put { file, offset, bytes, .. } => write!(f, "put {file} {offset}+{}", bytes.len()),
            DiskEvent::Reserve { file, end, .. } => write!(f, "reserve {file} up to {end}"),
            DiskEvent::SetLen { file, len, .. } => write!(f, "set length {file} {len}"),
            DiskEvent::SyncFile { file, .. } => write!(f, "sync {file}"),
            DiskEvent::SyncWindow { file, offset, len, .. } => write!(f, "sync window {file} {offset}+{len}"),
            DiskEvent::FailedSync { file, .. } => write!(f, "failed sync {file}"),
            DiskEvent::Skipped { point } => write!(f, "skipped sync {point:?}"),
            DiskEvent::Rename { source, target } => write!(f, "rename {source} to {target}"),
            DiskEvent::Remove { file } => write!(f, "remove {file}"),
            DiskEvent::MakeFolder { folder } => write!(f, "make folder {folder:?}"),
            DiskEvent::SyncFolder { folder } => write!(f, "sync folder {folder:?}"),
            DiskEvent::Damage { file, offset, bytes, .. } => {
                write!(f, "damage {file} {offset}+{}", bytes.len())
            }
            DiskEvent::Truncate { file, len, .. } => write!(f, "truncate {file} to {len}"),
            DiskEvent::Ack(value) => write!(f, "ack {value}"),
        }
    }
}

/// A sync, as passed to the rule of [`SimDisk::skip_syncs`](super::SimDisk::skip_syncs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SyncPoint {
    /// A sync of a file.
    File(FileName),
    /// A sync of a window onto a file.
    Window(FileName),
    /// A sync of a folder.
    Folder(Folder),
}

/// The part of a torn write or put that reached the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tear {
    /// Only the given number of bytes at the start.
    Head(usize),
    /// Only the given number of bytes at the end.
    Tail(usize),
}

/// The positions at which each write and put is torn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tears {
    /// At no position. Every event is atomic.
    None,
    /// After the first byte, in the middle, before the last byte, and at up to the given number of sector borders.
    Few(usize),
    /// At every byte of the write or put.
    Every,
}

/// The moment of a crash, either before an event or during the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Moment {
    /// The number of the event in the history, starting at 0. All earlier events are complete.
    pub event: usize,
    /// The stored part of the event if the crash occurs during the event, or `None` if the crash occurs before it.
    pub tear: Option<Tear>,
}
