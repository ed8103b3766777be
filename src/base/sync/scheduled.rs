//! Locks, threads and time under a test's scheduler, shaped like those of the system.
//!
//! A condition variable is built here: one with a lock of parking_lot's shape, whose waits can end by time. Time
//! stands still until a wait is ended by it, and then it is what that wait was for. To the scheduler who waits so can
//! always go on: any wait may prove too long. A scheduler that lets time pass only when nobody else can go on finds
//! out by [`sleeps_until`] whom to leave asleep; with it, a thread that was not woken shows in the time that passed.

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

/// Threads. There is one processor.
pub mod thread {
    use std::io;
    use std::num::NonZero;

    pub use shuttle::thread::*;

    /// One: who asks for a crew works alone.
    pub fn available_parallelism() -> io::Result<NonZero<usize>> {
        Ok(NonZero::<usize>::MIN)
    }
}

std::thread_local! {
    /// The time since no particular moment. All threads of a schedule are one thread to the system.
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Who waits, until when at the latest.
    static SLEEPERS: RefCell<BTreeMap<usize, Instant>> = const { RefCell::new(BTreeMap::new()) };
}

/// A moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    /// The last moment that somebody waited for.
    pub fn now() -> Self {
        Self(NOW.get())
    }

    /// The time since then.
    pub fn elapsed(&self) -> Duration {
        Self::now() - *self
    }

    /// So much later, if there is such a moment.
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

/// As many as it takes for what is done only where there are many.
pub fn cores() -> usize {
    64
}

/// Until when a thread waits that nobody has woken yet; `None` if it does not, or not for a time.
pub fn sleeps_until(task: TaskId) -> Option<Instant> {
    SLEEPERS.with_borrow(|sleepers| sleepers.get(&task.into()).copied())
}

/// A condition variable over [`Mutex`]. Nobody is woken without having been called; of several who wait, the
/// scheduler draws who is.
#[derive(Debug, Default)]
pub struct Condvar {
    /// Never locked while another thread runs.
    waiting: std::sync::Mutex<Vec<Arc<Waiter>>>,
}

#[derive(Debug)]
struct Waiter {
    thread: usize,
    is_called: AtomicBool,
    /// What wakes it. Parking would not do: a parked thread may wake without a call.
    call: BatchSemaphore,
}

/// How a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Whether the time has come, and nobody called.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// One that nobody waits for.
    pub const fn new() -> Self {
        Self { waiting: std::sync::Mutex::new(Vec::new()) }
    }

    /// Lets go of the lock until somebody calls.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let waiter = self.join();
        MutexGuard::unlocked(guard, || {
            waiter.call.acquire_blocking(1).expect("it is not closed");
        });
    }

    /// Lets go of the lock until somebody calls, or until then.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> WaitTimeoutResult {
        let waiter = self.join();
        let timed_out = MutexGuard::unlocked(guard, || {
            SLEEPERS.with_borrow_mut(|sleepers| sleepers.insert(waiter.thread, until));
            if !waiter.is_called() {
                thread::yield_now();
            }
            // Nothing runs between this look and the next line.
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

    /// Lets go of the lock as long as the condition holds, for so long at most.
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

    /// Calls one who waits, if anybody does.
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

    /// Calls all who wait.
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
        // First what no other thread can come between: from here on its time does not come any more.
        self.is_called.store(true, Ordering::Relaxed);
        SLEEPERS.with_borrow_mut(|sleepers| sleepers.remove(&self.thread));
        self.call.release(1);
    }
}
