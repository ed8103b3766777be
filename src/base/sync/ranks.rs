//! The order in which a thread takes locks, asserted in builds with debug assertions.
//!
//! A thread that holds a lock takes only locks of a higher rank, so no two threads wait for each other. A lock without
//! a rank is not part of the order: it protects only its own fields, or only the threads of one call share it.
//! `docs/concurrency.md` lists the locks and explains the order.

use std::ops::{Deref, DerefMut};

#[cfg(debug_assertions)]
use std::cell::Cell;

#[cfg(not(shuttle))]
use super::locks as backend;
#[cfg(shuttle)]
use super::scheduled as backend;

/// The position of a lock in the order of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(u8);

impl Rank {
    /// One call that moves pages, or one scrub, at a time.
    pub const CALL: Self = Self(0);
    pub const CATALOG_TURN: Self = Self(1);
    pub const CATALOG: Self = Self(2);
    pub const SUBMITTED: Self = Self(3);
    /// Drafts that wait for the lock holder; snapshots that were read back; the keys of digests.
    pub const WAITING: Self = Self(4);
    pub const IMAGE_REMOVALS: Self = Self(5);
    pub const IMAGE_NUMBERS: Self = Self(6);
    pub const LOG_GROWTH: Self = Self(7);
    pub const SEGMENT_SPARES: Self = Self(8);
    pub const IMAGE_SPARES: Self = Self(9);
    pub const IMAGE_SPARES_READY: Self = Self(10);
    /// The states of the log, the known images, the versions, the applier's queue, prefetches and eviction. A thread
    /// holds one of them at a time.
    pub const STATE: Self = Self(11);
    pub const LEASES: Self = Self(12);
    /// A file in whose memory images are written.
    pub const REGISTERED_FILE: Self = Self(13);
    pub const ARENA_SCRATCH: Self = Self(14);
    pub const ARENA_REAPING: Self = Self(15);
    pub const ARENA_RETIRED: Self = Self(16);
    pub const ARENA: Self = Self(17);
    /// The rank of every lock that is not part of the order.
    pub const NONE: Self = Self(u8::MAX);
}

/// A lock with a rank. In builds without debug assertions it is only the lock.
#[derive(Debug)]
pub struct Ranked<Lock> {
    #[cfg(debug_assertions)]
    rank: Rank,
    lock: Lock,
}

/// The guard of a locked [`Ranked`].
#[derive(Debug)]
pub struct RankedGuard<Guard> {
    pub(super) guard: Guard,
    _held: Held,
}

/// A mutual exclusion lock.
pub type Mutex<T> = Ranked<backend::Mutex<T>>;
/// The guard of a locked [`Mutex`].
pub type MutexGuard<'a, T> = RankedGuard<backend::MutexGuard<'a, T>>;
/// A reader-writer lock. A thread that holds read access must not request it again: if a writer waits in between, the
/// thread deadlocks.
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

    /// Asserts that this thread may take the lock now, takes it by `take`, and records that it is held.
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
    /// Makes a mutex that is not part of the order of locks.
    pub const fn new(value: T) -> Self {
        Self::of_rank(Rank::NONE, value)
    }

    /// Makes a mutex of the given rank.
    pub const fn of_rank(rank: Rank, value: T) -> Self {
        Self::with_rank(backend::Mutex::new(value), rank)
    }

    /// Waits for the lock and acquires it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.take(|| self.lock.lock())
    }

    /// Acquires the lock, or returns `None` if another thread holds it. Never waits, so it may be called whatever locks
    /// the thread holds.
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
    /// Makes a lock that is not part of the order of locks.
    pub const fn new(value: T) -> Self {
        Self::of_rank(Rank::NONE, value)
    }

    /// Makes a lock of the given rank.
    pub const fn of_rank(rank: Rank, value: T) -> Self {
        Self::with_rank(backend::RwLock::new(value), rank)
    }

    /// Waits for shared access and acquires it.
    pub fn read(&self) -> RankedGuard<backend::RwLockReadGuard<'_, T>> {
        self.take(|| self.lock.read())
    }

    /// Waits for exclusive access and acquires it.
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

/// The record that a thread holds a lock.
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
    /// The ranks of the locks that the thread holds: one bit for each rank.
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
