//! Locks, threads and time under a test's scheduler, shaped like those of the system.
//!
//! The condition variable is built here: it takes a lock of parking_lot's shape, and its waits can end by
//! time. Time stands still until a wait ends by it, and then it is the time of that wait. To the scheduler a
//! thread in such a wait can always go on: any wait may prove too long. A scheduler may let time pass only
//! when no other thread can go on; it learns from [`sleeps_until`] which threads to leave asleep. With such a
//! scheduler, a thread that was not woken shows in the time that passed.

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

pub use parking_lot::{Mutex, MutexGuard, RwLock};
pub use shuttle::sync::{atomic, mpsc};

/// Threads of the scheduler. There is one processor.
pub mod thread {
    use std::io;
    use std::num::NonZero;

    pub use shuttle::thread::*;

    /// One: a caller that asks for parallel work works alone.
    pub fn available_parallelism() -> io::Result<NonZero<usize>> {
        Ok(NonZero::<usize>::MIN)
    }
}

std::thread_local! {
    /// The time since no particular moment. All threads of a schedule are one thread to the system.
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// The waiting threads, each with its latest time to wake.
    static SLEEPERS: RefCell<BTreeMap<usize, Instant>> = const { RefCell::new(BTreeMap::new()) };
}

/// A moment of the schedule's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    /// The last moment that a thread waited for.
    pub fn now() -> Self {
        Self(NOW.get())
    }

    /// The time since this moment.
    pub fn elapsed(&self) -> Duration {
        Self::now() - *self
    }

    /// The moment later by this time, if there is one.
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

/// Enough cores for the code paths that only run where there are many.
pub fn cores() -> usize {
    64
}

/// The time at which a waiting thread wakes if it is not called before. `None` if it does not wait, or not
/// for a time.
pub fn sleeps_until(task: TaskId) -> Option<Instant> {
    SLEEPERS.with_borrow(|sleepers| sleepers.get(&task.into()).copied())
}

/// A condition variable over [`Mutex`]. No thread wakes without having been called. Of several waiters, the
/// scheduler draws the one that wakes.
#[derive(Debug, Default)]
pub struct Condvar {
    /// The waiting threads. Never locked while another thread runs.
    waiting: std::sync::Mutex<Vec<Arc<Waiter>>>,
}

#[derive(Debug)]
struct Waiter {
    thread: usize,
    is_called: AtomicBool,
    /// Wakes the thread. Parking would not do: a parked thread may wake without a call.
    call: BatchSemaphore,
}

/// The way a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Whether the time has come without a call.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// A condition variable without waiters.
    pub const fn new() -> Self {
        Self { waiting: std::sync::Mutex::new(Vec::new()) }
    }

    /// Lets go of the lock until another thread calls.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let waiter = self.join();
        MutexGuard::unlocked(guard, || {
            waiter.call.acquire_blocking(1).expect("it is not closed");
        });
    }

    /// Lets go of the lock until another thread calls, or until this time.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> WaitTimeoutResult {
        let waiter = self.join();
        let timed_out = MutexGuard::unlocked(guard, || {
            SLEEPERS.with_borrow_mut(|sleepers| sleepers.insert(waiter.thread, until));
            if !waiter.is_called() {
                thread::yield_now();
            }
            // No other thread runs between this look and the next line.
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

    /// Lets go of the lock as long as the condition holds, for this time at most.
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

    /// Calls one waiter, if there is any.
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

    /// Calls all waiters.
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
        // First the two lines that no other thread can come between: from here on the wait does not end by
        // time.
        self.is_called.store(true, Ordering::Relaxed);
        SLEEPERS.with_borrow_mut(|sleepers| sleepers.remove(&self.thread));
        self.call.release(1);
    }
}
