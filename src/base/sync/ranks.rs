//! The order in which threads acquire locks, checked in builds with debug assertions.
//!
//! A thread that holds a lock acquires only locks of a higher rank, so no two threads wait for each other. A lock
//! without a rank is not part of the order, because it protects only its own fields, or only the threads of one call
//! share it. `docs/concurrency.md` lists the locks and explains the order.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

#[cfg(debug_assertions)]
use std::cell::Cell;

use super::Instant;
#[cfg(not(shuttle))]
use super::locks as backend;
#[cfg(shuttle)]
use super::scheduled as backend;

/// The position of a lock in the order of locks. A thread acquires locks in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(u8);

impl Rank {
    /// The lock that permits one page move or one scrub at a time.
    pub const CALL: Self = Self(0);
    pub const CATALOG_TURN: Self = Self(1);
    pub const CATALOG: Self = Self(2);
    pub const SUBMITTED: Self = Self(3);
    /// The locks of three lists: batches to be submitted by the thread that holds the submission lock, snapshots
    /// that were read back, and the keys of digests.
    pub const WAITING: Self = Self(4);
    pub const IMAGE_REMOVALS: Self = Self(5);
    pub const IMAGE_NUMBERS: Self = Self(6);
    pub const LOG_GROWTH: Self = Self(7);
    pub const SEGMENT_SPARES: Self = Self(8);
    pub const IMAGE_SPARES: Self = Self(9);
    pub const IMAGE_SPARES_READY: Self = Self(10);
    /// The locks of the log's state, the known images, the versions, the applier's queue, prefetches and eviction. A
    /// thread holds at most one of these locks at a time.
    pub const STATE: Self = Self(11);
    pub const LEASES: Self = Self(12);
    /// The lock of a file into whose memory images are written.
    pub const REGISTERED_FILE: Self = Self(13);
    pub const ARENA_SCRATCH: Self = Self(14);
    pub const ARENA_REAPING: Self = Self(15);
    pub const ARENA_RETIRED: Self = Self(16);
    pub const ARENA: Self = Self(17);
    /// The rank of each lock that is not part of the order.
    pub const NONE: Self = Self(u8::MAX);
}

/// A lock with a rank, so that debug builds can check the order in which threads acquire locks. Without debug
/// assertions, the rank is not stored.
#[derive(Debug)]
pub struct Ranked<Lock> {
    #[cfg(debug_assertions)]
    rank: Rank,
    lock: Lock,
}

/// A guard of a locked [`Ranked`]. Dropping the guard releases the lock.
#[derive(Debug)]
pub struct RankedGuard<Guard> {
    guard: Guard,
    _held: Held,
}

/// A mutual exclusion lock with a rank.
pub type Mutex<T> = Ranked<backend::Mutex<T>>;
/// A guard of a locked [`Mutex`]. Dropping the guard releases the lock.
pub type MutexGuard<'a, T> = RankedGuard<backend::MutexGuard<'a, T>>;
/// A reader-writer lock with a rank. A thread with read access must not request read access again, because it deadlocks
/// if a writer waits at that time.
pub type RwLock<T> = Ranked<backend::RwLock<T>>;

impl<Lock> Ranked<Lock> {
    const fn with_rank(lock: Lock, rank: Rank) -> Self {
        let _ = rank;
        Self {
            #[cfg(debug_assertions)]
            rank,
            lock,
        }
    }

    /// Acquires the lock with `take`, and records that this thread holds the lock. With debug assertions, panics if
    /// this thread must not acquire the lock now.
    fn take<Guard>(&self, take: impl FnOnce() -> Guard) -> RankedGuard<Guard> {
        #[cfg(debug_assertions)]
        self.check();
        RankedGuard { guard: take(), _held: self.held() }
    }

    fn held(&self) -> Held {
        Held::new(
            #[cfg(debug_assertions)]
            self.rank,
        )
    }
}

impl<Lock: Default> Default for Ranked<Lock> {
    fn default() -> Self {
        Self::with_rank(Lock::default(), Rank::NONE)
    }
}

impl<T> Mutex<T> {
    /// Creates a mutex that is not part of the order of locks.
    pub const fn new(value: T) -> Self {
        Self::of_rank(Rank::NONE, value)
    }

    /// Creates a mutex of rank `rank`.
    pub const fn of_rank(rank: Rank, value: T) -> Self {
        Self::with_rank(backend::Mutex::new(value), rank)
    }

    /// Blocks until the calling thread has acquired the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.take(|| self.lock.lock())
    }

    /// Acquires the lock, or returns `None` if another thread holds it. The call never waits, so the thread may hold
    /// locks of any rank.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.lock.try_lock().map(|guard| RankedGuard { guard, _held: self.held() })
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.lock.get_mut()
    }

    pub fn into_inner(self) -> T {
        self.lock.into_inner()
    }
}

impl<T> From<T> for Mutex<T> {
    fn from(value: T) -> Self {
        Self::new(value)
    }
}

impl<T> RwLock<T> {
    /// Creates a lock that is not part of the order of locks.
    pub const fn new(value: T) -> Self {
        Self::of_rank(Rank::NONE, value)
    }

    /// Creates a lock of rank `rank`.
    pub const fn of_rank(rank: Rank, value: T) -> Self {
        Self::with_rank(backend::RwLock::new(value), rank)
    }

    /// Blocks until the calling thread has shared access.
    pub fn read(&self) -> RankedGuard<backend::RwLockReadGuard<'_, T>> {
        self.take(|| self.lock.read())
    }

    /// Blocks until the calling thread has exclusive access.
    pub fn write(&self) -> RankedGuard<backend::RwLockWriteGuard<'_, T>> {
        self.take(|| self.lock.write())
    }

    /// Acquires exclusive access, or returns `None` if another thread has access.
    pub fn try_write(&self) -> Option<RankedGuard<backend::RwLockWriteGuard<'_, T>>> {
        self.lock.try_write().map(|guard| RankedGuard { guard, _held: self.held() })
    }
}

impl<Guard: Deref> Deref for RankedGuard<Guard> {
    type Target = Guard::Target;

    fn deref(&self) -> &Guard::Target {
        &self.guard
    }
}

impl<Guard: DerefMut> DerefMut for RankedGuard<Guard> {
    fn deref_mut(&mut self) -> &mut Guard::Target {
        &mut self.guard
    }
}

/// A condition variable. Threads must change the awaited state under the mutex that the waiting threads pass to
/// [`wait`](Self::wait).
#[derive(Debug, Default)]
pub struct Condvar(backend::Condvar);

impl Condvar {
    pub const fn new() -> Self {
        Self(backend::Condvar::new())
    }

    /// Releases the lock, waits for a notification, and reacquires the lock. May return spuriously.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.0.wait(&mut guard.guard);
    }

    /// Waits like [`wait`](Self::wait), but at most until the given time. May return spuriously.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> backend::WaitTimeoutResult {
        self.0.wait_until(&mut guard.guard, until)
    }

    /// Waits while `condition` returns true, for at most the given time.
    pub fn wait_while_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        condition: impl FnMut(&mut T) -> bool,
        time: Duration,
    ) -> backend::WaitTimeoutResult {
        self.0.wait_while_for(&mut guard.guard, condition, time)
    }

    /// Wakes one waiter, if there is any.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiters, if there are any.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A record that the current thread holds a lock of some rank, kept until the record is dropped.
#[derive(Debug)]
struct Held {
    #[cfg(debug_assertions)]
    rank: Rank,
}

impl Held {
    #[cfg(not(debug_assertions))]
    fn new() -> Self {
        Self {}
    }
}

#[cfg(all(debug_assertions, not(shuttle)))]
std::thread_local! {
    /// A bit mask of the ranks of the locks that the current thread holds, with one bit per rank.
    static HELD: Cell<u32> = const { Cell::new(0) };
}
#[cfg(all(debug_assertions, shuttle))]
shuttle::thread_local! {
    static HELD: Cell<u32> = Cell::new(0);
}

#[cfg(debug_assertions)]
impl<Lock> Ranked<Lock> {
    fn check(&self) {
        if self.rank == Rank::NONE {
            return;
        }
        let held = HELD.with(Cell::get);
        assert!(
            held.checked_ilog2().is_none_or(|highest| highest < u32::from(self.rank.0)),
            "a lock of rank {} is taken while locks of the ranks in {held:#b} are held",
            self.rank.0,
        );
    }
}

#[cfg(debug_assertions)]
impl Held {
    fn new(rank: Rank) -> Self {
        if rank != Rank::NONE {
            HELD.with(|held| held.set(held.get() | 1 << rank.0));
        }
        Self { rank }
    }
}

#[cfg(debug_assertions)]
impl Drop for Held {
    fn drop(&mut self) {
        if self.rank != Rank::NONE {
            HELD.with(|held| held.set(held.get() & !(1 << self.rank.0)));
        }
    }
}

#[cfg(all(test, debug_assertions, not(shuttle)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn is_refused(take: impl FnOnce()) -> bool {
        catch_unwind(AssertUnwindSafe(take)).is_err()
    }

    #[test]
    fn locks_are_taken_in_the_order_of_their_ranks() {
        let (first, second) = (Mutex::of_rank(Rank::CATALOG, ()), Mutex::of_rank(Rank::SUBMITTED, ()));
        let (unordered, shared) = (Mutex::new(()), RwLock::of_rank(Rank::ARENA, ()));
        {
            let _held = (unordered.lock(), first.lock(), second.lock(), shared.read());
        }
        let held = second.lock();
        assert!(is_refused(|| drop(first.lock())), "a lower rank");
        assert!(is_refused(|| drop(Mutex::of_rank(Rank::SUBMITTED, ()).lock())), "the same rank");
        assert!(first.try_lock().is_some(), "an attempt never waits");
        drop(held);
        let held = shared.write();
        assert!(is_refused(|| drop(first.lock())), "a lower rank than that of a reader-writer lock");
        drop(held);
        drop(first.lock());
    }
}
