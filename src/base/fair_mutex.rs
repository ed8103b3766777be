//! A lock that goes round.

use super::sync::{Mutex, MutexGuard};

/// A lock that a thread gets before one that has just given it back and wants it again.
///
/// [`Mutex`] promises no order. A thread that took snapshots without a pause got the lock back each time
/// before a thread that had been woken could take it: a restore waited for minutes, and all commits with it.
#[derive(Debug, Default)]
pub(crate) struct FairMutex<T> {
    /// Held while a thread waits for the value, so that a later one waits here.
    turn: Mutex<()>,
    value: Mutex<T>,
}

impl<T> FairMutex<T> {
    pub fn new(value: T) -> Self {
        Self { turn: Mutex::new(()), value: Mutex::new(value) }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let _turn = self.turn.lock();
        self.value.lock()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_comes_before_one_that_asks_again() {
        let lock = FairMutex::new(Vec::new());
        std::thread::scope(|scope| {
            let held = lock.lock();
            scope.spawn(|| lock.lock().push("waited"));
            // Until it waits for the value.
            while lock.turn.try_lock().is_some() {
                std::thread::yield_now();
            }
            drop(held);
            lock.lock().push("asked again");
        });
        assert_eq!(*lock.lock(), ["waited", "asked again"]);
    }
}
