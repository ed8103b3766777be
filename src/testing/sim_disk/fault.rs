//! Injected failures of operations.
//!
//! `file.rs` and `state.rs` define the state after a failed operation. A failed write stores half of the bytes. After a
//! failed sync, no later sync makes the affected sectors durable although it succeeds. A *short* write is not a fault
//! at this interface. An implementation continues where the write stopped, so a crash in between is a torn write.

use std::collections::BTreeMap;
use std::io;

use super::SimDisk;

/// The error number for "no space left".
pub const ENOSPC: i32 = 28;
/// The error number for an input or output error.
pub const EIO: i32 = 5;

/// A kind of operation that can fail.
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
    /// A call to `DiskFile::read_past_cache`.
    ReadPastCache,
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

/// A fault: the first `skip` operations of a kind succeed, and the next `times` fail.
#[derive(Clone, Copy, Debug)]
pub struct DiskFault {
    /// The kind of operation.
    pub operation: Operation,
    /// The number of operations that succeed first.
    pub skip: usize,
    /// The number of operations that fail afterwards.
    pub times: usize,
    /// The error number to report.
    pub errno: i32,
}

/// The remaining faults of a disk, and the operations that were counted for them.
#[derive(Default)]
pub(super) struct DiskFaults {
    waiting: Vec<DiskFault>,
    calls: BTreeMap<Operation, usize>,
    struck_at: Option<usize>,
}

impl DiskFaults {
    /// Counts an operation, and returns the error of the first fault that applies to it. `events` is the number of
    /// earlier events.
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
    /// Adds a fault, which counts operations from now on.
    pub fn fail(&self, fault: DiskFault) {
        self.shared.lock().faults.waiting.push(fault);
    }

    /// Returns the total number of operations that are yet to fail.
    #[must_use]
    pub fn faults_left(&self) -> usize {
        let shared = self.shared.lock();
        shared.faults.waiting.iter().fold(0, |left, fault| left.saturating_add(fault.times))
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.shared.lock().faults.waiting.clear();
    }

    /// Returns the number of operations of this kind so far, including failed operations.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> usize {
        self.shared.lock().faults.calls.get(&operation).copied().unwrap_or(0)
    }

    /// Returns the number of events before the first fault occurred, or `None` if no fault has occurred.
    #[must_use]
    pub fn struck_at(&self) -> Option<usize> {
        self.shared.lock().faults.struck_at
    }
}
