//! Locks of the standard library without lock poisoning, and condition variables whose notifications cost nothing while
//! no thread waits.
//!
//! The locks keep all of their state in the lock itself. `parking_lot` instead keeps one table of waiting
//! threads per process, and a forked child inherits a copy of the table. A child that opens stores of its own
//! would then wake threads of the parent instead of its own threads, because their stacks have the same
//! addresses.
//!
//! [`Poison`](crate::base::poison::Poison) handles state that a panic leaves inconsistent, so locks remain usable after
//! a panic.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{self as system, PoisonError, TryLockError};
use std::time::{Duration, Instant};

pub use std::sync::{RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult};

/// A mutual exclusion lock.
#[derive(Debug, Default)]
pub struct Mutex<T>(system::Mutex<T>);

/// A guard of a locked [`Mutex`]. Dropping the guard releases the lock.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(
    /// The guard of the standard library. `None` only during a wait.
    Option<system::MutexGuard<'a, T>>,
);

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(system::Mutex::new(value))
    }

    /// Blocks until the calling thread has acquired the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Acquires the lock, or returns `None` if another thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        taken(self.0.try_lock()).map(|guard| MutexGuard(Some(guard)))
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_deref().expect(HELD)
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_deref_mut().expect(HELD)
    }
}

const HELD: &str = "a guard holds its lock except during a wait";

/// A reader-writer lock. A thread with read access must not request read access again, because it deadlocks if a writer
/// waits at that time.
#[derive(Debug, Default)]
pub struct RwLock<T>(system::RwLock<T>);

impl<T> RwLock<T> {
    pub const fn new(value: T) -> Self {
        Self(system::RwLock::new(value))
    }

    /// Blocks until the calling thread has shared access.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until the calling thread has exclusive access.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acquires exclusive access, or returns `None` if another thread has access.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        taken(self.0.try_write())
    }
}

fn taken<Guard>(taken: Result<Guard, TryLockError<Guard>>) -> Option<Guard> {
    match taken {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A condition variable. Threads must change the awaited state under the mutex that the waiting threads pass to
/// [`wait`](Self::wait).
#[derive(Debug, Default)]
pub struct Condvar {
    inner: system::Condvar,
    /// The number of waiting threads. Without this counter, every notification would make a system call. The counter is
    /// incremented under the mutex, so a thread that acquires the mutex later observes the increment.
    waiting: AtomicUsize,
}

impl Condvar {
    pub const fn new() -> Self {
        Self { inner: system::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Releases the lock, waits for a notification, and reacquires the lock. May return spuriously.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.count_while(guard, |held| (self.inner.wait(held).unwrap_or_else(PoisonError::into_inner), ()));
    }

    /// Waits like [`wait`](Self::wait), but not beyond the time `until`. May return spuriously.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> WaitTimeoutResult {
        let time = until.saturating_duration_since(Instant::now());
        self.count_while(guard, |held| {
            self.inner.wait_timeout(held, time).unwrap_or_else(PoisonError::into_inner)
        })
    }

    /// Waits while `condition` returns `true`, but for at most the given time.
    pub fn wait_while_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        condition: impl FnMut(&mut T) -> bool,
        time: Duration,
    ) -> WaitTimeoutResult {
        self.count_while(guard, |held| {
            self.inner.wait_timeout_while(held, time, condition).unwrap_or_else(PoisonError::into_inner)
        })
    }

    /// Wakes one waiting thread. Does nothing if no thread waits.
    pub fn notify_one(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_one();
        }
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_all();
        }
    }

    fn count_while<'a, T, Outcome>(
        &self,
        guard: &mut MutexGuard<'a, T>,
        wait: impl FnOnce(system::MutexGuard<'a, T>) -> (system::MutexGuard<'a, T>, Outcome),
    ) -> Outcome {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let (held, outcome) = wait(guard.0.take().expect(HELD));
        guard.0 = Some(held);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        outcome
    }
}
