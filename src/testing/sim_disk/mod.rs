//! `SimDisk`: an in-memory disk that records its history. From the history, a test can derive every state that a crash
//! at any moment could have left.
//!
//! `state.rs` describes the durability model, `event.rs` the recorded events, `crash.rs` the enumeration of states
//! after a crash, `fault.rs` failing operations, and `lies.rs` a medium that reports writes falsely.

mod crash;
mod event;
mod fault;
mod file;
mod lies;
mod node;
mod state;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::Arc;

use remanent_format::{FileName, Folder, ReadAt, SnapshotId};

use crate::base::process::Process;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::disk::{Disk, DiskFile, DiskLock, Hold};
use crate::error::{Error, IoAction, Result};
use crate::options::{ImageIo, LogIo};

pub use crash::{Crash, CrashImage, CrashPlan};
use event::DiskEvent;
pub use event::{Moment, SyncPoint, Tear, Tears};
use fault::DiskFaults;
pub use fault::{DiskFault, EIO, ENOSPC, Operation};
use file::SimFile;
use lies::Stale;
pub use lies::{Lie, LieKind};
use node::FileId;
use state::DiskState;

/// The error number that the operating system reports if a file handle does not permit an operation.
const EBADF: i32 = 9;

/// An in-memory disk. Clones are handles of the same disk. A mutex orders the events of all handles.
///
/// ```
/// use remanent::disk::Disk;
/// use remanent::testing::sim_disk::{CrashPlan, SimDisk};
/// use remanent::error::{FileName, Folder};
/// let disk = SimDisk::new();
/// let file = disk.create(FileName::Store)?;
/// file.write_at(0, b"bytes")?;
/// file.sync()?;
/// let mut nameless = 0;
/// disk.power_images(&CrashPlan::default(), |image| {
///     nameless += usize::from(image.disk.list(Folder::Root).unwrap().is_empty());
/// });
/// assert!(nameless > 0, "the sync of a file does not make its name durable");
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone)]
pub struct SimDisk {
    shared: Arc<Mutex<SimCore>>,
    /// The number of the last writer lock taken through this handle and its clones.
    writer: Arc<AtomicU64>,
}

type SkipRule = Box<dyn FnMut(SyncPoint) -> bool + Send>;

#[derive(Default)]
struct SimCore {
    /// The state of the disk before the first recorded event.
    start: DiskState,
    now: DiskState,
    events: Vec<DiskEvent>,
    locked: bool,
    /// Whether a writer lock can be taken while another writer holds it.
    has_no_locks: bool,
    /// The number of writer locks taken so far, which is also the number of the newest writer.
    writers: u64,
    /// The number of readers that currently hold each snapshot.
    held: BTreeMap<SnapshotId, usize>,
    retiring: BTreeSet<SnapshotId>,
    capacity: Option<u64>,
    /// The number of bytes that must be free for a rename to succeed.
    name_bytes: u64,
    /// The number of bytes that must be free for the creation of a file to succeed.
    file_bytes: u64,
    faults: DiskFaults,
    skip: Option<SkipRule>,
    /// A sector whose next read returns its previous bytes, or `None`.
    stale: Option<Stale>,
    /// The files of which any part was read. The simulated page cache contains these files completely.
    read_ahead: BTreeSet<FileId>,
    /// The number of mapped parts of each file that are currently open.
    mapped: BTreeMap<FileId, usize>,
    /// The mode of writing images that this disk does not support, or `None` if it supports all modes.
    refused: Option<ImageIo>,
    /// The number of notifications that were sent to watchers of a file.
    notifications: u64,
}

impl SimCore {
    fn record(&mut self, event: DiskEvent) {
        self.now.apply(&event);
        self.events.push(event);
    }

    /// Counts an operation, and returns the error of the first fault that applies to the operation.
    fn fault(&mut self, operation: Operation) -> Option<io::Error> {
        self.faults.strike(operation, self.events.len())
    }

    fn check(&mut self, operation: Operation) -> io::Result<()> {
        self.fault(operation).map_or(Ok(()), Err)
    }

    /// Returns whether a sync must be omitted, and records the omission.
    fn skips(&mut self, point: SyncPoint) -> bool {
        let skips = self.skip.as_mut().is_some_and(|rule| rule(point));
        if skips {
            self.record(DiskEvent::Skipped { point });
        }
        skips
    }

    /// Returns the file that will get another name, or an error if there is no space for the name.
    fn find_for_name(&self, file: FileName) -> io::Result<FileId> {
        let found = self.now.find(file).ok_or_else(not_found)?;
        match self.capacity {
            Some(capacity) if self.now.used_bytes() + self.name_bytes > capacity => {
                Err(io::Error::from_raw_os_error(ENOSPC))
            }
            _ => Ok(found),
        }
    }

    /// Returns an error if there is no space for a new file.
    fn check_for_file(&self) -> io::Result<()> {
        match self.capacity {
            Some(capacity) if self.now.used_bytes() + self.file_bytes > capacity => {
                Err(io::Error::from_raw_os_error(ENOSPC))
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of bytes, out of `len` bytes at `offset`, that fit on the disk.
    fn fitting(&self, id: FileId, offset: u64, len: usize) -> usize {
        let Some(capacity) = self.capacity else { return len };
        let file_len = self.now.node(id).visible.len();
        let longest = file_len + capacity.saturating_sub(self.now.used_bytes());
        longest.saturating_sub(offset).min(len as u64) as usize
    }
}

impl Default for SimDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimDisk after {} events", self.events())
    }
}

impl SimDisk {
    /// Creates an empty disk.
    #[must_use]
    pub fn new() -> Self {
        Self::from_state(DiskState::default())
    }

    fn from_state(state: DiskState) -> Self {
        let shared = SimCore { start: state.clone(), now: state, ..SimCore::default() };
        Self { shared: Arc::new(Mutex::new(shared)), writer: Arc::default() }
    }

    /// Creates a disk on which several writers can hold the writer lock at the same time.
    #[must_use]
    pub fn without_locks() -> Self {
        let disk = Self::new();
        disk.shared.lock().has_no_locks = true;
        disk
    }

    /// Returns a handle of the same disk for another writer, which represents a writer in another process.
    #[must_use]
    pub fn for_another_writer(&self) -> Self {
        Self { shared: self.shared.clone(), writer: Arc::default() }
    }

    /// Returns an error if another writer has opened the store since this handle's writer opened it.
    fn check_newest(&self, shared: &SimCore) -> Result<()> {
        match self.writer.load(Ordering::Relaxed) {
            writer if writer > 0 && writer < shared.writers => {
                Err(Error::Superseded { holder: format!("writer {}", shared.writers), store: None })
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of events so far.
    #[must_use]
    pub fn events(&self) -> usize {
        self.shared.lock().events.len()
    }

    /// Returns the events, one line each, for the message of a failing test.
    #[must_use]
    pub fn history(&self) -> Vec<String> {
        self.shared.lock().events.iter().map(ToString::to_string).collect()
    }

    /// Records an acknowledgement. Images of later crashes contain `value` in [`CrashImage::acks`].
    pub fn note_ack(&self, value: u64) {
        self.shared.lock().record(DiskEvent::Ack(value));
    }

    /// Limits the total length of the files, or removes the limit if `bytes` is `None`. Operations that would exceed
    /// the limit fail with ENOSPC. Writes within the length of a file always succeed.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.shared.lock().capacity = bytes;
    }

    /// Makes renames fail with ENOSPC if fewer than `bytes` bytes are free. XFS fails in this way if a folder must grow
    /// for the new name. A rename itself uses no space.
    pub fn set_name_bytes(&self, bytes: u64) {
        self.shared.lock().name_bytes = bytes;
    }

    /// Makes the creation of files fail with ENOSPC if fewer than `bytes` bytes are free. XFS fails in this way because
    /// it reserves space for 64 inodes. A new file itself uses no space.
    pub fn set_file_bytes(&self, bytes: u64) {
        self.shared.lock().file_bytes = bytes;
    }

    /// Makes the disk report that it does not support the mode `io` of writing images.
    pub fn refuse_images(&self, io: ImageIo) {
        self.shared.lock().refused = Some(io);
    }

    /// Returns the number of notifications that were sent to watchers of a file.
    #[must_use]
    pub fn notifications(&self) -> u64 {
        self.shared.lock().notifications
    }

    /// Returns the total length of all files in bytes.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.shared.lock().now.used_bytes()
    }

    /// Omits every sync for which `rule` returns `true`. An omitted sync succeeds without effect, so that a test can
    /// show that the sync is required. The rule runs inside the operation and must not use the disk.
    pub fn skip_syncs(&self, rule: impl FnMut(SyncPoint) -> bool + Send + 'static) {
        self.shared.lock().skip = Some(Box::new(rule));
    }

    /// Overwrites bytes on the medium and in the page cache, to simulate a fault of the medium.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn damage(&self, file: FileName, offset: u64, bytes: &[u8]) {
        let mut shared = self.shared.lock();
        let id = shared.now.find(file).expect("the file to damage exists");
        shared.record(DiskEvent::Damage { file, id, offset, bytes: bytes.into() });
    }

    /// Sets a file's length on the medium and in the page cache, to simulate a fault of the medium.
    ///
    /// # Panics
    /// If the file does not exist.
    pub fn damage_len(&self, file: FileName, len: u64) {
        let mut shared = self.shared.lock();
        let id = shared.now.find(file).expect("the file to damage exists");
        shared.record(DiskEvent::Truncate { file, id, len });
    }

    /// Returns all visible bytes of a file, or `None` if the file does not exist.
    #[must_use]
    pub fn bytes(&self, file: FileName) -> Option<Vec<u8>> {
        let shared = self.shared.lock();
        let content = &shared.now.node(shared.now.find(file)?).visible;
        let mut bytes = vec![0; content.len() as usize];
        content.read(0, &mut bytes);
        Some(bytes)
    }

    fn handle(&self, file: FileName, id: FileId, write: bool) -> SimFile {
        SimFile { disk: self.clone(), file, id, write }
    }
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

fn folder_failed(action: IoAction, folder: Folder) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::folder(action, format!("sim/{}", folder.name()), source)
}

fn file_failed(action: IoAction, file: FileName, offset: Option<u64>) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::io(action, file, offset, source)
}

impl Disk for SimDisk {
    fn label(&self) -> String {
        "a simulated disk".to_owned()
    }

    fn lock(&self) -> Result<Box<dyn DiskLock>> {
        let mut shared = self.shared.lock();
        if shared.locked && !shared.has_no_locks {
            return Err(Error::Locked { holder: "this process".to_owned(), store: None });
        }
        shared.locked = true;
        shared.writers += 1;
        self.writer.store(shared.writers, Ordering::Relaxed);
        Ok(Box::new(SimLock::new(self, SimLockKind::Store)))
    }

    fn check_writer(&self) -> Result<()> {
        self.check_newest(&self.shared.lock())
    }

    fn is_locked(&self) -> Result<bool> {
        Ok(self.shared.lock().locked)
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        let shared = self.shared.lock();
        Ok(shared.capacity.map(|capacity| capacity.saturating_sub(shared.now.used_bytes())))
    }

    fn hold(&self, id: SnapshotId) -> Result<Hold> {
        let mut shared = self.shared.lock();
        if shared.retiring.contains(&id) {
            return Ok(Hold::Retiring);
        }
        *shared.held.entry(id).or_default() += 1;
        Ok(Hold::Held(Box::new(SimLock::new(self, SimLockKind::Held(id)))))
    }

    fn try_retire(&self, id: SnapshotId) -> Result<Option<Box<dyn DiskLock>>> {
        let mut shared = self.shared.lock();
        if shared.held.contains_key(&id) || !shared.retiring.insert(id) {
            return Ok(None);
        }
        Ok(Some(Box::new(SimLock::new(self, SimLockKind::Retiring(id)))))
    }

    fn is_held(&self, id: SnapshotId) -> Result<bool> {
        Ok(self.shared.lock().held.contains_key(&id))
    }

    fn list(&self, folder: Folder) -> Result<Vec<String>> {
        let entries = self.shared.lock().now.entries(folder);
        let files = entries.files.keys().map(|file| file.name());
        let mut names: Vec<String> =
            files.chain(entries.folders.iter().map(|folder| folder.name().to_owned())).collect();
        names.sort_unstable();
        Ok(names)
    }

    fn notify_watchers(&self, _file: FileName) {
        self.shared.lock().notifications += 1;
    }

    fn make_folder(&self, folder: Folder) -> Result<()> {
        let mut shared = self.shared.lock();
        self.check_newest(&shared)?;
        shared.check(Operation::MakeFolder).map_err(folder_failed(IoAction::Create, folder))?;
        if !shared.now.has_folder(folder) {
            shared.record(DiskEvent::MakeFolder { folder });
        }
        Ok(())
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        let mut shared = self.shared.lock();
        shared.check(Operation::SyncFolder).map_err(folder_failed(IoAction::Sync, folder))?;
        if !shared.now.has_folder(folder) {
            return Err(folder_failed(IoAction::Sync, folder)(not_found()));
        }
        if !shared.skips(SyncPoint::Folder(folder)) {
            shared.record(DiskEvent::SyncFolder { folder });
        }
        Ok(())
    }

    fn create(&self, file: FileName) -> Result<Arc<dyn DiskFile>> {
        let mut shared = self.shared.lock();
        self.check_newest(&shared)?;
        let checked = shared.check(Operation::Create).and_then(|()| shared.check_for_file());
        checked.map_err(file_failed(IoAction::Create, file, None))?;
        if !shared.now.has_folder(file.folder()) {
            return Err(file_failed(IoAction::Create, file, None)(not_found()));
        }
        let id = shared.now.find(file).unwrap_or_else(|| shared.now.new_id());
        shared.record(DiskEvent::Create { file, id });
        Ok(Arc::new(self.handle(file, id, true)))
    }

    fn open(&self, file: FileName, write: bool) -> Result<Arc<dyn DiskFile>> {
        let mut shared = self.shared.lock();
        if write {
            self.check_newest(&shared)?;
        }
        let opened = shared.check(Operation::Open).and_then(|()| shared.now.find(file).ok_or_else(not_found));
        let id = opened.map_err(file_failed(IoAction::Open, file, None))?;
        Ok(Arc::new(self.handle(file, id, write)))
    }

    /// Copies the file's bytes with all their pending versions. The copy equals the original until the original is
    /// written to.
    fn link(&self, source: &dyn Disk, file: FileName) -> Result<bool> {
        let source: &dyn Any = source;
        let Some(source) = source.downcast_ref::<Self>() else { return Ok(false) };
        // The two locks are never held together, because both may belong to the same disk.
        let node = {
            let source = source.shared.lock();
            source.now.find(file).map(|id| source.now.nodes[&id].clone())
        };
        let mut shared = self.shared.lock();
        self.check_newest(&shared)?;
        let linked = shared.check(Operation::Link).and_then(|()| {
            let node = node.filter(|_| shared.now.has_folder(file.folder())).ok_or_else(not_found)?;
            if shared.now.find(file).is_some() { Err(io::ErrorKind::AlreadyExists.into()) } else { Ok(node) }
        });
        let (node, id) = (linked.map_err(file_failed(IoAction::Link, file, None))?, shared.now.new_id());
        node.is_shared.store(true, Ordering::Relaxed);
        shared.record(DiskEvent::Link { file, id, node });
        Ok(true)
    }

    fn rename(&self, source: FileName, target: FileName) -> Result<()> {
        let mut shared = self.shared.lock();
        self.check_newest(&shared)?;
        let found = shared.check(Operation::Rename).and_then(|()| shared.find_for_name(source));
        found.map_err(file_failed(IoAction::Rename, source, None))?;
        if source != target {
            shared.record(DiskEvent::Rename { source, target });
        }
        Ok(())
    }

    fn remove(&self, file: FileName) -> Result<()> {
        let mut shared = self.shared.lock();
        self.check_newest(&shared)?;
        let found =
            shared.check(Operation::Remove).and_then(|()| shared.now.find(file).ok_or_else(not_found));
        found.map_err(file_failed(IoAction::Remove, file, None))?;
        shared.record(DiskEvent::Remove { file });
        Ok(())
    }

    fn refuses(&self, _io: LogIo) -> Result<Option<String>> {
        Ok(None)
    }

    fn refuses_images(&self, io: ImageIo) -> Result<Option<String>> {
        let refused = self.shared.lock().refused == Some(io);
        Ok(refused.then(|| "this simulated disk was told so".to_owned()))
    }
}

impl ReadAt for SimDisk {
    fn list(&self, folder: Folder) -> io::Result<Vec<String>> {
        Disk::list(self, folder).map_err(|_| not_found())
    }

    fn len(&self, file: FileName) -> io::Result<Option<u64>> {
        let shared = self.shared.lock();
        Ok(shared.now.find(file).map(|id| shared.now.node(id).visible.len()))
    }

    fn read_at(&self, file: FileName, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut shared = self.shared.lock();
        shared.check(Operation::Read)?;
        let id = shared.now.find(file).ok_or_else(not_found)?;
        let whole = shared.now.node(id).visible.read(offset, out);
        shared.age(id, offset, out);
        if whole { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// A lock of a simulated disk, which is released on drop.
struct SimLock {
    disk: SimDisk,
    locked: SimLockKind,
    owner: Process,
}

impl SimLock {
    fn new(disk: &SimDisk, locked: SimLockKind) -> Self {
        Self { disk: disk.clone(), locked, owner: Process::current() }
    }
}

/// The lock that a [`SimLock`] holds.
enum SimLockKind {
    Store,
    Held(SnapshotId),
    Retiring(SnapshotId),
}

impl DiskLock for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return;
        }
        let mut shared = self.disk.shared.lock();
        match self.locked {
            SimLockKind::Store => shared.locked = false,
            SimLockKind::Held(id) => {
                let holders = shared.held.get_mut(&id).expect("a guard counts until it is dropped");
                *holders -= 1;
                if *holders == 0 {
                    shared.held.remove(&id);
                }
            }
            SimLockKind::Retiring(id) => _ = shared.retiring.remove(&id),
        }
    }
}
