//! Locks of the standard library, without poisoning, and with condition variables that cost nothing while no
//! thread waits.
//!
//! A lock must keep all its state in itself. A forked child has a copy of every lock and none of the threads
//! that wait for them, and it may open stores of its own. `parking_lot` has one table of waiting threads for
//! the whole process. With it the child would wake threads of the parent in place of its own threads, whose
//! stacks lie where the parent's lay.
//!
//! A state that a panic leaves behind a lock is the business of [`Poison`](crate::base::poison::Poison), so a
//! lock goes on.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{self as system, PoisonError, TryLockError};
use std::time::{Duration, Instant};

pub use std::sync::{RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult};

/// A value that one thread at a time has.
#[derive(Debug, Default)]
pub struct Mutex<T>(system::Mutex<T>);

/// The lock of a [`Mutex`], held.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(
    /// The system's guard; `None` only during a wait.
    Option<system::MutexGuard<'a, T>>,
);

impl<T> Mutex<T> {
    /// A lock that holds this value.
    pub const fn new(value: T) -> Self {
        Self(system::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Takes the lock, if no thread has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        taken(self.0.try_lock()).map(|guard| MutexGuard(Some(guard)))
    }

    /// The value, for its only owner.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the value out of the lock.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> From<T> for Mutex<T> {
    fn from(value: T) -> Self {
        Self::new(value)
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

/// A value that many threads read, or one changes. A thread that reads must not ask again: a writer may wait
/// in between.
#[derive(Debug, Default)]
pub struct RwLock<T>(system::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock that holds this value.
    pub const fn new(value: T) -> Self {
        Self(system::RwLock::new(value))
    }

    /// Waits for the lock, to read.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lock, to change the value.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock, if no thread has it.
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

/// A point at which threads wait until another one calls them. The state they wait for changes under the lock
/// that they wait with.
#[derive(Debug, Default)]
pub struct Condvar {
    inner: system::Condvar,
    /// The number of waiting threads. The standard library's condition variable makes a system call at every
    /// notification to find out. Counted with the lock held: a thread that has had the lock since sees it.
    waiting: AtomicUsize,
}

impl Condvar {
    /// A condition variable without waiters.
    pub const fn new() -> Self {
        Self { inner: system::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Lets go of the lock until another thread calls. May return without a call.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.count_while(guard, |held| (self.inner.wait(held).unwrap_or_else(PoisonError::into_inner), ()));
    }

    /// Lets go of the lock until another thread calls, or until this time. May return without a call.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> WaitTimeoutResult {
        let time = until.saturating_duration_since(Instant::now());
        self.count_while(guard, |held| {
            self.inner.wait_timeout(held, time).unwrap_or_else(PoisonError::into_inner)
        })
    }

    /// Lets go of the lock as long as the condition holds, for this time at most.
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

    /// Calls one waiter, if there is any.
    pub fn notify_one(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_one();
        }
    }

    /// Calls all waiters.
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
