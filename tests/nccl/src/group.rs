//! The ranks that have joined with the same id, and their operations.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use crate::bytes::{self, Call};
use crate::{code, driver};

/// The id of a group.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Id(pub [u8; 128]);

struct Group {
    ranks: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    joined: BTreeSet<u32>,
    /// The calls of the ranks, for each operation that not all ranks have called.
    waiting: BTreeMap<u64, BTreeMap<u32, Call>>,
    /// The numbers of the operations that are done.
    done: BTreeSet<u64>,
}

/// One rank of a group.
pub struct Communicator {
    group: Arc<Group>,
    rank: u32,
    /// The number of operations that were queued, and that have ended.
    queued: AtomicU64,
    ended: AtomicU64,
    is_finalized: AtomicBool,
    is_aborted: AtomicBool,
}

static GROUPS: Mutex<BTreeMap<[u8; 128], Arc<Group>>> = Mutex::new(BTreeMap::new());
/// The number of communicators that were not freed.
static ALIVE: AtomicU64 = AtomicU64::new(0);
/// The asynchronous error of one rank of every group: the rank and the code.
static ERROR: Mutex<Option<(u32, u32)>> = Mutex::new(None);
/// The rank whose calls never complete; `u32::MAX` for none.
static STALLED: AtomicU32 = AtomicU32::new(u32::MAX);

pub fn alive() -> u64 {
    ALIVE.load(Ordering::SeqCst)
}

pub fn set_error(error: Option<(u32, u32)>) {
    *ERROR.lock().unwrap() = error;
}

pub fn stall(rank: u32) {
    STALLED.store(rank, Ordering::SeqCst);
}

/// Returns an id that no other process and no other call has.
pub fn new_id() -> Id {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0xA5; 128];
    id[..4].copy_from_slice(&std::process::id().to_le_bytes());
    id[4..12].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    Id(id)
}

/// Adds a rank to the group with this id. Returns `None` if the group has the rank already, or another number of ranks.
pub fn join(id: Id, rank: u32, ranks: u32) -> Option<Arc<Communicator>> {
    let new = || Arc::new(Group { ranks, state: Mutex::default(), changed: Condvar::new() });
    let group = GROUPS.lock().unwrap().entry(id.0).or_insert_with(new).clone();
    let is_new = group.state.lock().unwrap().joined.insert(rank);
    if group.ranks != ranks || rank >= ranks || !is_new {
        return None;
    }
    ALIVE.fetch_add(1, Ordering::SeqCst);
    Some(Arc::new(Communicator {
        group,
        rank,
        queued: AtomicU64::new(0),
        ended: AtomicU64::new(0),
        is_finalized: AtomicBool::new(false),
        is_aborted: AtomicBool::new(false),
    }))
}

/// An operation in a stream's queue.
struct Queued {
    communicator: Arc<Communicator>,
    number: u64,
    of_rank: Call,
}

impl Communicator {
    /// Returns the asynchronous error.
    pub fn state(&self) -> u32 {
        if let Some((rank, code)) = *ERROR.lock().unwrap()
            && rank == self.rank
        {
            return code;
        }
        if self.is_in_progress() || STALLED.load(Ordering::SeqCst) == self.rank {
            code::IN_PROGRESS
        } else {
            code::SUCCESS
        }
    }

    /// Returns whether the rank waits for others to join, or for its operations to end.
    fn is_in_progress(&self) -> bool {
        let is_joining = self.group.state.lock().unwrap().joined.len() < self.group.ranks as usize;
        let is_finalizing = self.is_finalized.load(Ordering::SeqCst) && self.is_busy();
        is_joining || is_finalizing
    }

    fn is_busy(&self) -> bool {
        self.ended.load(Ordering::SeqCst) < self.queued.load(Ordering::SeqCst)
    }

    /// Queues an operation.
    pub fn queue(self: Arc<Self>, stream: *mut c_void, of_rank: Call) -> u32 {
        assert!(!self.is_in_progress(), "rank {}: a call before all ranks have joined", self.rank);
        assert!(!self.is_finalized.load(Ordering::SeqCst), "rank {}: a call after the end", self.rank);
        let number = self.queued.fetch_add(1, Ordering::SeqCst);
        let data = Box::into_raw(Box::new(Queued { communicator: self, number, of_rank }));
        if driver::queue(stream, run, data.cast()) {
            return code::IN_PROGRESS;
        }
        // SAFETY: the driver did not take the value.
        let Queued { communicator, .. } = *unsafe { Box::from_raw(data) };
        communicator.ended.fetch_add(1, Ordering::SeqCst);
        code::CUDA
    }

    /// Waits until all ranks have called the operation. The last one moves the bytes.
    fn meet(&self, number: u64, of_rank: Call) {
        let Group { ranks, state, changed } = &*self.group;
        let mut state = state.lock().unwrap();
        if self.is_aborted.load(Ordering::SeqCst) {
            return;
        }
        let calls = state.waiting.entry(number).or_default();
        calls.insert(self.rank, of_rank);
        if calls.len() == *ranks as usize {
            let calls = state.waiting.remove(&number).expect("added just now");
            // SAFETY: every rank waits in its stream, so its memory is allocated, and no later work uses it.
            unsafe { bytes::exchange(&calls.into_values().collect::<Vec<_>>()) };
            state.done.insert(number);
            changed.notify_all();
        }
        while !state.done.contains(&number) && !self.is_aborted.load(Ordering::SeqCst) {
            state = changed.wait(state).unwrap();
        }
        if !state.done.contains(&number) {
            // The memory of an aborted rank is not used any more.
            state.waiting.entry(number).or_default().remove(&self.rank);
        }
    }

    pub fn finalize(&self) -> u32 {
        assert!(!self.is_finalized.swap(true, Ordering::SeqCst), "rank {}: finalized twice", self.rank);
        code::IN_PROGRESS
    }

    pub fn destroy(&self) -> u32 {
        assert!(
            self.is_finalized.load(Ordering::SeqCst),
            "rank {}: destroyed before it is finalized",
            self.rank
        );
        assert!(!self.is_busy(), "rank {}: destroyed while an operation runs", self.rank);
        ALIVE.fetch_sub(1, Ordering::SeqCst);
        code::SUCCESS
    }

    /// Ends the rank's operations, without their results.
    pub fn abort(&self) {
        {
            let _state = self.group.state.lock().unwrap();
            self.is_aborted.store(true, Ordering::SeqCst);
        }
        self.group.changed.notify_all();
        ALIVE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The function that a stream calls for an operation.
extern "C" fn run(data: *mut c_void) {
    // SAFETY: `queue` gave the value to the driver, which calls this function once.
    let Queued { communicator, number, of_rank } = *unsafe { Box::from_raw(data.cast::<Queued>()) };
    communicator.meet(number, of_rank);
    communicator.ended.fetch_add(1, Ordering::SeqCst);
}
