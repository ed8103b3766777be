//! Locks, threads and time under a test scheduler, with the same interface as the locks, threads and time of the
//! system.
//!
//! This module implements its own condition variable, because the scheduler's has no waits with a timeout. Time
//! advances only when a wait times out, to the end of that wait. The scheduler considers a thread in a timed
//! wait runnable, because any such wait may time out. A scheduler should let time pass only when no other thread
//! is runnable, and [`sleeps_until`] identifies the threads that it should leave asleep. Under such a scheduler,
//! a missing notification becomes visible as elapsed time.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::{Add, Sub};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use shuttle::future::batch_semaphore::{BatchSemaphore, Fairness};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::TaskId;
use shuttle_parking_lot::{self as parking_lot};

pub use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
pub use shuttle::sync::{atomic, mpsc};

/// Threads of the test scheduler, which simulates a single processor.
pub mod thread {
    use std::io;
    use std::num::NonZero;

    pub use shuttle::thread::*;

    /// Returns 1, so that parallel work runs on the calling thread.
    pub fn available_parallelism() -> io::Result<NonZero<usize>> {
        Ok(NonZero::<usize>::MIN)
    }
}

std::thread_local! {
    /// The time since the start of the simulated clock. All threads of a schedule run on one system thread.
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// The threads in timed waits, each with the time at which its wait times out.
    static SLEEPERS: RefCell<BTreeMap<usize, Instant>> = const { RefCell::new(BTreeMap::new()) };
}

/// A point in simulated time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    /// Returns the current simulated time: the end of the latest wait that timed out.
    pub fn now() -> Self {
        Self(NOW.get())
    }

    pub fn elapsed(&self) -> Duration {
        Self::now() - *self
    }

    /// Returns the instant `time` after this instant, or `None` if the result cannot be represented.
    pub fn checked_add(self, time: Duration) -> Option<Self> {
        self.0.checked_add(time).map(Self)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Returns a number of cores that enables the code paths for machines with many cores.
pub fn cores() -> usize {
    64
}

/// Returns the time at which the wait of thread `task` times out. Returns `None` if the thread does not wait, or waits
/// without a timeout.
pub fn sleeps_until(task: TaskId) -> Option<Instant> {
    SLEEPERS.with_borrow(|sleepers| sleepers.get(&task.into()).copied())
}

/// A condition variable for [`Mutex`], without spurious wakeups. The scheduler chooses at random which of several
/// waiting threads to notify.
#[derive(Debug, Default)]
pub struct Condvar {
    /// The waiting threads. This lock is never held while another thread runs.
    waiting: std::sync::Mutex<Vec<Arc<Waiter>>>,
}

#[derive(Debug)]
struct Waiter {
    thread: usize,
    is_called: AtomicBool,
    /// The semaphore that wakes the waiting thread. Parking is unsuitable, because a parked thread may wake spuriously.
    call: BatchSemaphore,
}

/// The outcome of a timed wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns whether the wait ended without a notification.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    pub const fn new() -> Self {
        Self { waiting: std::sync::Mutex::new(Vec::new()) }
    }

    /// Releases the lock, waits for a notification, and reacquires the lock.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let waiter = self.join();
        MutexGuard::unlocked(guard, || {
            waiter.call.acquire_blocking(1).expect("it is not closed");
        });
    }

    /// Waits like [`wait`](Self::wait), but not beyond the time `until`.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> WaitTimeoutResult {
        let waiter = self.join();
        let timed_out = MutexGuard::unlocked(guard, || {
            SLEEPERS.with_borrow_mut(|sleepers| sleepers.insert(waiter.thread, until));
            if !waiter.is_called() {
                thread::yield_now();
            }
            // The scheduler runs no other thread between this check and the next statement.
            let timed_out = !waiter.is_called();
            SLEEPERS.with_borrow_mut(|sleepers| sleepers.remove(&waiter.thread));
            if timed_out {
                NOW.set(NOW.get().max(until.0));
                self.waiting().retain(|other| !Arc::ptr_eq(other, &waiter));
            }
            timed_out
        });
        WaitTimeoutResult(timed_out)
    }

    /// Waits while `condition` returns `true`, but for at most the given time.
    pub fn wait_while_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut condition: impl FnMut(&mut T) -> bool,
        timeout: Duration,
    ) -> WaitTimeoutResult {
        let until = Instant::now() + timeout;
        let mut timed_out = false;
        while condition(guard) && !timed_out {
            timed_out = self.wait_until(guard, until).timed_out();
        }
        WaitTimeoutResult(timed_out)
    }

    /// Wakes one waiting thread. Does nothing if no thread waits.
    pub fn notify_one(&self) {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            return;
        }
        let drawn = thread_rng().gen_range(0..waiting.len());
        let waiter = waiting.remove(drawn);
        drop(waiting);
        waiter.call();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        let waiting = std::mem::take(&mut *self.waiting());
        waiting.iter().for_each(|waiter| waiter.call());
    }

    fn join(&self) -> Arc<Waiter> {
        let thread = thread::current().id().into();
        let call = BatchSemaphore::new(0, Fairness::StrictlyFair);
        let waiter = Arc::new(Waiter { thread, is_called: AtomicBool::new(false), call });
        self.waiting().push(waiter.clone());
        waiter
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Waiter>>> {
        self.waiting.lock().expect("nothing panics that holds it")
    }
}

impl Waiter {
    fn is_called(&self) -> bool {
        self.is_called.load(Ordering::Relaxed)
    }

    fn call(&self) {
        // The scheduler runs no other thread between the next two statements, so the wait can no longer time out.
        self.is_called.store(true, Ordering::Relaxed);
        SLEEPERS.with_borrow_mut(|sleepers| sleepers.remove(&self.thread));
        self.call.release(1);
    }
}
