//! Crews: threads that are started once for a long operation and execute its many short tasks.
//!
//! Starting a thread per task is slow because the start and the end of a thread change the process's memory map, and
//! only one thread can change the map at a time. These changes took half the time of a replay of 1 GiB in windows of 16
//! MiB on 16 cores.
//!
//! A crew exists only during one call, so a forked child never inherits a crew, whose threads would not exist in the
//! child.

use std::cell::RefCell;
use std::sync::Arc;

use rayon_core::{ThreadBuilder, ThreadPool, ThreadPoolBuilder};

use crate::base::sync::threads;

/// The threads that execute the short tasks of one long operation, or `None` if they could not be started.
pub(crate) struct Crew(Option<Arc<ThreadPool>>);

/// A thread's membership in a crew. The membership ends when this guard is dropped.
#[must_use = "the thread leaves the crew when this is dropped"]
pub(crate) struct Membership;

thread_local! {
    static OWN: RefCell<Option<Arc<ThreadPool>>> = const { RefCell::new(None) };
}

/// Runs `work` with a crew of `count` threads. If the crew cannot be started, each task in `work` starts its own
/// threads, as far as the system permits.
pub(crate) fn with_crew<R>(count: usize, work: impl FnOnce(&Crew) -> R) -> R {
    std::thread::scope(|scope| {
        let start =
            |thread: ThreadBuilder| threads::start_scoped(scope, "remanent-crew", || thread.run()).map(drop);
        let pool = ThreadPoolBuilder::new().num_threads(count).spawn_handler(start).build();
        work(&Crew(pool.ok().map(Arc::new)))
    })
}

impl Crew {
    /// Adds the calling thread to the crew until the guard is dropped. The crew then executes the tasks that the thread
    /// distributes through [`parallel`](super::parallel).
    pub fn join(&self) -> Membership {
        OWN.set(self.0.clone());
        Membership
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        // This fails while the thread ends, when its thread-local variables are already destroyed.
        let _left = OWN.try_with(|own| own.take());
    }
}

/// Returns the crew that the calling thread has joined. Returns `None` if the thread has joined no crew or is exiting.
pub(super) fn own() -> Option<Arc<ThreadPool>> {
    OWN.try_with(|own| own.borrow().clone()).ok().flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::convert::Infallible;
    use std::sync::{Barrier, Mutex};
    use std::thread::ThreadId;

    use super::*;
    use crate::base::parallel;

    /// Returns the threads that run four tasks concurrently.
    fn at_work() -> HashSet<ThreadId> {
        let (together, seen) = (Barrier::new(4), Mutex::new(HashSet::new()));
        let work = |(): &mut (), _| {
            together.wait();
            seen.lock().unwrap().insert(std::thread::current().id());
            Ok::<_, Infallible>(())
        };
        let Ok(_) = parallel::map_indexed(4, 4, || (), work);
        seen.into_inner().unwrap()
    }

    #[test]
    fn crew_runs_work_of_joined_threads() {
        let caller = HashSet::from([std::thread::current().id()]);
        with_crew(3, |crew| {
            let before = at_work();
            let membership = crew.join();
            let (first, second) = (at_work(), at_work());
            assert_eq!((first.len(), &first), (4, &second));
            assert_eq!(&before & &first, caller);
            std::thread::scope(|scope| {
                let elsewhere = scope.spawn(at_work).join().unwrap();
                assert!(elsewhere.is_disjoint(&first));
            });
            drop(membership);
            assert_eq!(&at_work() & &first, caller);
        });
        assert_eq!(at_work().len(), 4);
    }

    #[test]
    #[should_panic(expected = "the third work")]
    fn crew_panic_reaches_caller() {
        with_crew(3, |crew| {
            let _crew = crew.join();
            let work = |(): &mut (), index| -> Result<(), Infallible> {
                assert!(index != 2, "the third work");
                Ok(())
            };
            let Ok(_) = parallel::map_indexed(4, 4, || (), work);
        });
    }
}
