//! Locks, threads and time: as the system has them, or, built with `--cfg shuttle`, as a test's scheduler has
//! them.
//!
//! Threads of the engine meet only by the types that this module gives out. `tests/schedules` builds the
//! engine with `--cfg shuttle`. There all threads take turns on one thread of the system. Each lock, wait and
//! atomic is a point at which the scheduler may go on with another one, and time passes only when a thread
//! has waited for it. So the engine itself runs under thousands of schedules, and a failure names the one to
//! run again.
//!
//! Some things do not come from here: statics, which outlive a schedule; counters without waiters; parallel
//! work over one list ([`crate::base::parallel`]), which has one thread under a scheduler; the host device,
//! which holds a [lock](locks) only while it copies; and followers, which wait for files.

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

/// The number of threads that run at a time.
#[cfg(not(shuttle))]
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}
