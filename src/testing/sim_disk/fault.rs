//! Injected failures of disk operations.
//!
//! `file.rs` and `state.rs` define the state after a failed operation. A failed write stores half of the bytes. After a
//! failed sync, a later sync succeeds but does not make the affected sectors durable. A *short* write is not a fault at
//! this interface. An implementation continues where a short write stopped, so a crash at that point is a torn write.

use std::collections::BTreeMap;
use std::io;

use super::SimDisk;

/// The error number that the operating system reports if no space is left.
pub const ENOSPC: i32 = 28;
/// The error number that the operating system reports for a failed input or output operation.
pub const EIO: i32 = 5;

/// A kind of disk operation that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// A call to `Disk::create`.
    Create,
    /// A call to `Disk::open`.
    Open,
    /// A call to `DiskFile::window`.
    Window,
    /// A call to `Disk::link`.
    Link,
    /// A call to `Disk::rename`.
    Rename,
    /// A call to `Disk::remove`.
    Remove,
    /// A call to `Disk::make_folder`.
    MakeFolder,
    /// A call to `Disk::sync_folder`.
    SyncFolder,
    /// A call to `DiskFile::read_at`.
    Read,
    /// A call to `DiskFile::read_bypassing_cache`.
    ReadBypassingCache,
    /// A call to `DiskFile::read_proven`.
    ReadProven,
    /// A call to `DiskFile::write_at`. A failed call writes half of the bytes.
    Write,
    /// A call to `DiskFile::write_direct`. A failed call writes half of the bytes.
    WriteDirect,
    /// A call to `DiskFile::reserve`. A failed call allocates half of the space.
    Reserve,
    /// A call to `DiskFile::cut`.
    Cut,
    /// A call to `DiskFile::mapped_part`.
    MapPart,
    /// A call to `DiskFile::sync`.
    Sync,
    /// A call to `Window::put`. A failed call stores half of the bytes.
    Put,
    /// A call to `Window::sync`.
    SyncWindow,
}

/// A fault: the first `skip` operations of a kind succeed, and the next `times` operations fail.
#[derive(Clone, Copy, Debug)]
pub struct DiskFault {
    /// The kind of operation.
    pub operation: Operation,
    /// The number of operations that succeed before the first failure.
    pub skip: usize,
    /// The number of consecutive operations that fail.
    pub times: usize,
    /// The error number with which the operations fail.
    pub errno: i32,
}

/// The faults of a disk that have not occurred yet, and the number of operations of each kind.
#[derive(Default)]
pub(super) struct DiskFaults {
    waiting: Vec<DiskFault>,
    calls: BTreeMap<Operation, usize>,
    struck_at: Option<usize>,
}

impl DiskFaults {
    /// Counts an operation, and returns the error of the first fault that applies to the operation. `events` is the
    /// number of events recorded before the operation.
    pub(super) fn strike(&mut self, operation: Operation, events: usize) -> Option<io::Error> {
        *self.calls.entry(operation).or_default() += 1;
        let mut struck = None;
        for fault in self.waiting.iter_mut().filter(|fault| fault.operation == operation) {
            if fault.skip > 0 {
                fault.skip -= 1;
            } else if fault.times > 0 && struck.is_none() {
                fault.times -= 1;
                struck = Some(io::Error::from_raw_os_error(fault.errno));
            }
        }
        if struck.is_some() {
            self.struck_at.get_or_insert(events);
        }
        struck
    }
}

impl SimDisk {
    /// Adds a fault. Only later operations are counted.
    pub fn fail(&self, fault: DiskFault) {
        self.shared.lock().faults.waiting.push(fault);
    }

    /// Returns the number of operations that will still fail, over all faults.
    #[must_use]
    pub fn faults_left(&self) -> usize {
        let shared = self.shared.lock();
        shared.faults.waiting.iter().fold(0, |left, fault| left.saturating_add(fault.times))
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.shared.lock().faults.waiting.clear();
    }

    /// Returns the number of operations of a kind so far, including failed operations.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> usize {
        self.shared.lock().faults.calls.get(&operation).copied().unwrap_or(0)
    }

    /// Returns the number of events recorded before the first fault occurred, or `None` if no fault has occurred.
    #[must_use]
    pub fn struck_at(&self) -> Option<usize> {
        self.shared.lock().faults.struck_at
    }
}
