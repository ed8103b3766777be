//! Locks, threads and time: as the system has them, or, built with `--cfg shuttle`, as a test's scheduler
//! has them.
//!
//! Where threads of the engine meet, they meet by what this module gives out. `tests/schedules` builds the engine
//! with `--cfg shuttle`: there all threads take turns on one thread of the system, each lock, wait and atomic is a
//! point at which the scheduler may go on with another one, and time passes only when somebody has waited for it.
//! So it is the engine itself that runs under thousands of schedules, and a failure names the one to run again.
//!
//! Not from here are statics, which outlive a schedule; counters that nobody waits for; crews over one list of work
//! ([`crate::base::parallel`]), which have one member under a scheduler; the host device, which holds a [lock](locks) only while
//! it copies; and followers, which wait for files.

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

/// How many threads run at a time.
#[cfg(not(shuttle))]
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}
