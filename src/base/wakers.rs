//! The async tasks that wait for batches, each with the waker of its executor.
//!
//! Tasks wait for a state of a batch, for example durable. The thread that advances this state wakes all tasks that wait
//! for the batch or an earlier batch.

use std::task::Waker;

use remanent_format::Lsn;

use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};

/// The async tasks that wait until a batch reaches some state.
#[derive(Default)]
pub(crate) struct Wakers {
    waiting: Mutex<Vec<WaitingTask>>,
    /// The number of waiting tasks. If the number is 0, [`wake`](Self::wake) takes no lock. A task checks its batch
    /// again after adding itself. Therefore the task is woken, or its check finds that the batch has reached the state.
    count: AtomicUsize,
    next: AtomicUsize,
}

struct WaitingTask {
    id: usize,
    lsn: Lsn,
    waker: Waker,
}

impl Wakers {
    /// Returns a new id with which a task registers its waker.
    pub fn id(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Registers `waker` for task `id`, which waits for batch `lsn`. Replaces an earlier waker of the task.
    pub fn add(&self, id: usize, lsn: Lsn, waker: &Waker) {
        let mut waiting = self.waiting.lock();
        match waiting.iter_mut().find(|task| task.id == id) {
            Some(task) => task.waker.clone_from(waker),
            None => waiting.push(WaitingTask { id, lsn, waker: waker.clone() }),
        }
        self.count.store(waiting.len(), Ordering::SeqCst);
    }

    /// Removes a task that no longer waits.
    pub fn remove(&self, id: usize) {
        let mut waiting = self.waiting.lock();
        waiting.retain(|task| task.id != id);
        self.count.store(waiting.len(), Ordering::SeqCst);
    }

    /// Wakes the tasks that wait for batch `reached` or an earlier batch. `Lsn(u64::MAX)` wakes all tasks. The caller
    /// must have changed the state that the tasks check before this call.
    pub fn wake(&self, reached: Lsn) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let woken: Vec<WaitingTask> = {
            let mut waiting = self.waiting.lock();
            let woken = waiting.extract_if(.., |task| task.lsn <= reached).collect();
            self.count.store(waiting.len(), Ordering::SeqCst);
            woken
        };
        // Wakers are called outside the lock, because an executor may poll the task in this call.
        woken.into_iter().for_each(|task| task.waker.wake());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn tasks_are_woken_once_when_their_batch_is_reached() {
        let wakers = Wakers::default();
        let counts: Vec<Arc<Count>> = (0..3).map(|_| Arc::default()).collect();
        let ids: Vec<usize> = counts.iter().map(|_| wakers.id()).collect();
        for (index, count) in counts.iter().enumerate() {
            wakers.add(ids[index], Lsn(index as u64 + 1), &Arc::clone(count).into());
            wakers.add(ids[index], Lsn(index as u64 + 1), &Arc::clone(count).into());
        }
        let woken = || counts.iter().map(|count| count.0.load(Ordering::Relaxed)).collect::<Vec<_>>();
        wakers.wake(Lsn(0));
        assert_eq!(woken(), [0, 0, 0]);
        wakers.wake(Lsn(2));
        wakers.wake(Lsn(2));
        assert_eq!(woken(), [1, 1, 0]);
        wakers.remove(ids[2]);
        wakers.wake(Lsn(u64::MAX));
        assert_eq!(woken(), [1, 1, 0], "a task that was dropped is not woken");
    }
}
