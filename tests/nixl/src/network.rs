//! Agents, their registered memory, and transfers between them.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use crate::faults;

/// A range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub address: usize,
    pub len: usize,
    pub device: u64,
}

impl Range {
    fn contains(&self, other: &Self) -> bool {
        let end = other.address.checked_add(other.len);
        self.device == other.device
            && self.address <= other.address
            && end.is_some_and(|end| end <= self.address + self.len)
    }
}

/// Ranges of one kind of memory.
#[derive(Clone, Debug, Default)]
pub struct List {
    pub kind: c_int,
    pub ranges: Vec<Range>,
}

/// The kind of memory that stands for files.
pub const FILE: c_int = 4;

/// Registered ranges, each with its kind of memory.
pub type Registered = Vec<(c_int, Range)>;

/// Messages by sender.
pub type Messages = BTreeMap<Vec<u8>, Vec<Vec<u8>>>;

/// An agent.
#[derive(Default)]
pub struct Agent {
    pub has_progress_thread: bool,
    pub backends: Vec<String>,
    pub registered: Registered,
    /// The registered memory of peers, as of their newest metadata.
    pub peers: BTreeMap<Vec<u8>, Registered>,
    pub received: Messages,
}

static AGENTS: Mutex<BTreeMap<Vec<u8>, Agent>> = Mutex::new(BTreeMap::new());

/// Adds an agent. Returns false if the name is in use.
pub fn add(name: &[u8]) -> bool {
    AGENTS.lock().unwrap().insert(name.to_vec(), Agent::default()).is_none()
}

pub fn remove(name: &[u8]) {
    assert!(AGENTS.lock().unwrap().remove(name).is_some(), "the agent is destroyed twice");
}

/// Returns the number of agents with a progress thread.
pub fn progress_threads() -> u64 {
    AGENTS.lock().unwrap().values().filter(|agent| agent.has_progress_thread).count() as u64
}

/// Calls `work` with an agent, which must exist.
pub fn with<T>(name: &[u8], work: impl FnOnce(&mut Agent) -> T) -> T {
    work(AGENTS.lock().unwrap().get_mut(name).expect("a live agent"))
}

/// Delivers a message. Returns false if the receiver does not exist.
pub fn deliver(from: &[u8], to: &[u8], message: &[u8]) -> bool {
    let mut agents = AGENTS.lock().unwrap();
    let Some(receiver) = agents.get_mut(to) else { return false };
    receiver.received.entry(from.to_vec()).or_default().push(message.to_vec());
    true
}

/// Encodes the name and the registered memory of an agent.
pub fn metadata(name: &[u8]) -> Vec<u8> {
    let mut bytes = (name.len() as u64).to_le_bytes().to_vec();
    bytes.extend(name);
    with(name, |agent| {
        for (kind, Range { address, len, device }) in &agent.registered {
            for number in [*kind as u64, *address as u64, *len as u64, *device] {
                bytes.extend(number.to_le_bytes());
            }
        }
    });
    bytes
}

/// Decodes the name and the registered memory of an agent.
pub fn parse(bytes: &[u8]) -> Option<(Vec<u8>, Registered)> {
    let number = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?));
    let len = number(bytes)? as usize;
    let name = bytes.get(8..8 + len)?.to_vec();
    let rest = &bytes[8 + len..];
    let mut registered = Vec::new();
    for entry in rest.chunks(32) {
        let [kind, address, len, device] = [0, 8, 16, 24].map(|at| number(entry.get(at..)?));
        let range = Range { address: address? as usize, len: len? as usize, device: device? };
        registered.push((kind? as c_int, range));
    }
    Some((name, registered))
}

/// Returns true if all ranges of `list` are registered with the agent, or if the agent does not exist.
pub fn is_registered(name: &[u8], list: &List) -> bool {
    AGENTS.lock().unwrap().get(name).is_none_or(|agent| covers(&agent.registered, list))
}

/// Returns true if all ranges of `list` are registered.
pub fn covers(registered: &[(c_int, Range)], list: &List) -> bool {
    list.ranges
        .iter()
        .all(|range| registered.iter().any(|(kind, own)| *kind == list.kind && own.contains(range)))
}

fn with_file<T>(range: &Range, work: impl FnOnce(&std::fs::File) -> T) -> T {
    // SAFETY: the descriptor belongs to the registered file, and is not closed here.
    work(&ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(range.device as i32) }))
}

/// Copies the bytes of all pairs of ranges. Returns false if reading or writing a file failed.
///
/// # Safety
/// The ranges of memory must be valid, and nothing else may use the targets.
pub unsafe fn copy(from: &List, to: &List) -> bool {
    for (source, target) in from.ranges.iter().zip(&to.ranges) {
        let mut bytes = vec![0; source.len];
        if from.kind == FILE {
            if with_file(source, |file| file.read_exact_at(&mut bytes, source.address as u64)).is_err() {
                return false;
            }
        } else {
            // SAFETY: the caller guarantees this.
            unsafe {
                std::ptr::copy_nonoverlapping(source.address as *const u8, bytes.as_mut_ptr(), source.len)
            };
        }
        if faults::flips() {
            bytes[0] ^= 1;
        }
        if to.kind == FILE {
            if with_file(target, |file| file.write_all_at(&bytes, target.address as u64)).is_err() {
                return false;
            }
        } else {
            // SAFETY: the caller guarantees this.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.address as *mut u8, bytes.len()) };
        }
    }
    true
}
