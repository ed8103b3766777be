//! A crew: threads that stay while one long work goes on, for the many short ones that it is made of.
//!
//! Threads that are started for each short work hold each other up: a start and an end change the process's
//! memory map, which one thread may do at a time. Of a replay of a gibibyte in windows of 16 MiB, on 16
//! cores, that took half the time.
//!
//! A crew lives within one call, and ends before that returns. So a child of a fork finds none, which would
//! have no threads there.

use std::cell::RefCell;
use std::sync::Arc;

use rayon_core::{ThreadBuilder, ThreadPool, ThreadPoolBuilder};

use crate::base::sync::threads;

/// Threads that wait for work.
pub(crate) struct Crew(Option<Arc<ThreadPool>>);

/// A thread's membership, until this is dropped.
#[must_use = "the thread leaves the crew when this is dropped"]
pub(crate) struct Membership;

thread_local! {
    static OWN: RefCell<Option<Arc<ThreadPool>>> = const { RefCell::new(None) };
}

/// Does `work` with a crew of this number of threads. One that cannot be started is not missed: threads are
/// started for each work then, as far as there are any.
pub(crate) fn with_crew<R>(count: usize, work: impl FnOnce(&Crew) -> R) -> R {
    std::thread::scope(|scope| {
        let start =
            |thread: ThreadBuilder| threads::start_scoped(scope, "remanent-crew", || thread.run()).map(drop);
        let pool = ThreadPoolBuilder::new().num_threads(count).spawn_handler(start).build();
        work(&Crew(pool.ok().map(Arc::new)))
    })
}

impl Crew {
    /// From now on the crew does what this thread shares out by [`parallel`](super::parallel).
    pub fn join(&self) -> Membership {
        OWN.set(self.0.clone());
        Membership
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        // Gone is gone.
        let _left = OWN.try_with(|own| own.take());
    }
}

/// The crew of this thread. One that ends, and what it drops then, has none.
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

    /// The threads that do four works at once.
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
    fn a_crew_does_the_works_of_threads_that_joined_it() {
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
    fn a_panic_of_the_crew_s_is_the_caller_s() {
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
