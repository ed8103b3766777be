//! A mutex that threads acquire in the order in which they began to wait.

use super::sync::{Mutex, MutexGuard, Rank};

/// A mutex that prefers waiting threads to a thread that has just released the mutex.
///
/// [`Mutex`] guarantees no order. A thread that took snapshots without a pause reacquired the lock each time before a
/// woken thread could acquire it. As a result, a restore, and all commits that waited for the restore, took minutes.
#[derive(Debug, Default)]
pub(crate) struct FairMutex<T> {
    /// Held by the thread that will acquire `value` next. All other waiting threads wait for this lock.
    turn: Mutex<()>,
    value: Mutex<T>,
}

impl<T> FairMutex<T> {
    /// Creates a mutex whose inner locks `turn` and `value` have the given ranks.
    pub fn of_rank([turn, rank]: [Rank; 2], value: T) -> Self {
        Self { turn: Mutex::of_rank(turn, ()), value: Mutex::of_rank(rank, value) }
    }

    /// Blocks until the calling thread has acquired the mutex.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let _turn = self.turn.lock();
        self.value.lock()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn waiting_thread_precedes_repeat_requester() {
        let lock = FairMutex::of_rank([Rank::CATALOG_TURN, Rank::CATALOG], Vec::new());
        std::thread::scope(|scope| {
            let held = lock.lock();
            scope.spawn(|| lock.lock().push("waited"));
            // Waits until the other thread has acquired `turn`, and thus waits for the value.
            while lock.turn.try_lock().is_some() {
                std::thread::yield_now();
            }
            drop(held);
            lock.lock().push("asked again");
        });
        assert_eq!(*lock.lock(), ["waited", "asked again"]);
    }
}
