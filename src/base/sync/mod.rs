//! Locks, threads and time, provided by the system or, with `--cfg shuttle`, by a test scheduler.
//!
//! Threads of the engine synchronize only through the types that this module exports. `tests/schedules` builds the
//! engine with `--cfg shuttle`, which runs one thread at a time on a single system thread. The scheduler may switch
//! threads at each lock, wait and atomic operation, and time advances only when a wait times out. The engine thus runs
//! under thousands of schedules, and a failure names the schedule to replay.
//!
//! The scheduler does not control statics, counters without waiters, the host device, or followers. Statics
//! outlive a schedule, the host device holds a [lock](locks) only while it copies, and followers wait for files.
//! Parallel work over one list ([`crate::base::parallel`]) uses one thread under a scheduler.

pub mod locks;
mod ranks;
#[cfg(shuttle)]
mod scheduled;
#[cfg(not(shuttle))]
mod shared;
#[cfg(shuttle)]
#[path = "shared_scheduled.rs"]
mod shared;
pub mod threads;

#[cfg(not(shuttle))]
use std::num::NonZero;

#[cfg(not(shuttle))]
pub use std::sync::{atomic, mpsc};
#[cfg(not(shuttle))]
pub use std::thread;
#[cfg(not(shuttle))]
pub use std::time::Instant;

pub use ranks::{Condvar, Mutex, MutexGuard, Rank, RwLock};
pub use shared::{Map, Swap, SwapGuard};

#[cfg(shuttle)]
pub use scheduled::{Instant, atomic, cores, mpsc, sleeps_until, thread};

/// Returns the number of processor cores that the process can use.
#[cfg(not(shuttle))]
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}
