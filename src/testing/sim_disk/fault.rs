//! Operations that fail on purpose.
//!
//! What a failed operation leaves is in `file.rs` and `state.rs`: half of a write, and after a failed sync
//! sectors that no later sync makes up for, though it succeeds. A write that is merely *short* is no fault at this
//! seam: whoever implements it goes on where the write stopped, so that a crash in between is a torn write.

use std::collections::BTreeMap;
use std::io;

use super::SimDisk;

/// The system's number for "no space left".
pub const ENOSPC: i32 = 28;
/// The system's number for an input or output error.
pub const EIO: i32 = 5;

/// A kind of operation, for faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// `Disk::create`.
    Create,
    /// `Disk::open`.
    Open,
    /// `DiskFile::window`.
    Window,
    /// `Disk::link`.
    Link,
    /// `Disk::rename`.
    Rename,
    /// `Disk::remove`.
    Remove,
    /// `Disk::make_folder`.
    MakeFolder,
    /// `Disk::sync_folder`.
    SyncFolder,
    /// `DiskFile::read_at`.
    Read,
    /// `DiskFile::read_past_cache`.
    ReadPastCache,
    /// `DiskFile::read_proven`.
    ReadProven,
    /// `DiskFile::write_at`; half of the bytes are written.
    Write,
    /// `DiskFile::sync`.
    Sync,
    /// `Window::put`; half of the bytes are stored.
    Put,
    /// `Window::sync`.
    SyncWindow,
}

/// Makes operations fail: the first `skip` of the kind succeed, the next `times` fail.
#[derive(Clone, Copy, Debug)]
pub struct DiskFault {
    /// The kind of operation.
    pub operation: Operation,
    /// How many succeed first.
    pub skip: usize,
    /// How many fail then.
    pub times: usize,
    /// The system's error number.
    pub errno: i32,
}

/// The faults of a disk, and what they did so far.
#[derive(Default)]
pub(super) struct DiskFaults {
    waiting: Vec<DiskFault>,
    calls: BTreeMap<Operation, usize>,
    struck_at: Option<usize>,
}

impl DiskFaults {
    /// The error of the first fault that strikes this operation; counts down. `events` have happened before.
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
    /// Adds a fault. Counting starts now.
    pub fn fail(&self, fault: DiskFault) {
        self.shared.lock().faults.waiting.push(fault);
    }

    /// How many operations are yet to fail, together.
    #[must_use]
    pub fn faults_left(&self) -> usize {
        let shared = self.shared.lock();
        shared.faults.waiting.iter().fold(0, |left, fault| left.saturating_add(fault.times))
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.shared.lock().faults.waiting.clear();
    }

    /// How many operations of a kind there were so far, with those that failed.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> usize {
        self.shared.lock().faults.calls.get(&operation).copied().unwrap_or(0)
    }

    /// How many events had happened when the first fault struck; `None` if none did.
    #[must_use]
    pub fn struck_at(&self) -> Option<usize> {
        self.shared.lock().faults.struck_at
    }
}
