//! Locks, threads and time: those of the system or, when built with `--cfg shuttle`, those of a test
//! scheduler.
//!
//! Threads of the engine synchronize only through the types that this module exports. `tests/schedules`
//! builds the engine with `--cfg shuttle`, which runs all threads in turn on a single system thread. Each
//! lock, wait and atomic operation is a point at which the scheduler may switch threads, and time passes only
//! when a thread has waited for it. Thus the engine itself runs under thousands of schedules, and a failure
//! names the schedule to replay.
//!
//! Some things do not come from this module: statics, which outlive a schedule; counters without waiters;
//! parallel work over one list ([`crate::base::parallel`]), which has one thread under a scheduler; the host
//! device, which holds a [lock](locks) only while it copies; and followers, which wait for files.

pub mod locks;
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

#[cfg(not(shuttle))]
pub use locks::{Condvar, Mutex, MutexGuard, RwLock};
pub use shared::{Map, Swap, SwapGuard};

#[cfg(shuttle)]
pub use scheduled::{Condvar, Instant, Mutex, MutexGuard, RwLock, atomic, cores, mpsc, sleeps_until, thread};

/// Returns the number of threads that can run concurrently.
#[cfg(not(shuttle))]
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}
