//! Floor 1. Several threads over one list of work: images are checksummed, compressed, written and read so.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sync::thread;

/// How many threads can run at once, but at most so many.
pub(crate) fn threads(at_most: usize) -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(at_most)
}

/// Does `work` for each index below `count` on up to `threads` threads, the caller's among them, and returns what
/// it gave in the order of the indices. Each thread makes itself what it works with by `equip`. One thread goes
/// through the indices in their order, so that what has one piece of work is done as if there were no crew.
///
/// A thread that cannot be started is not missed: the others do its work.
///
/// # Errors
/// The first that a thread met; no work is begun after it.
pub(crate) fn map<W, T: Send, E: Send>(
    threads: usize,
    count: usize,
    equip: impl Fn() -> W + Sync,
    work: impl Fn(&mut W, usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    let run = || {
        let mut with = equip();
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return done;
            }
            match work(&mut with, index) {
                Ok(result) => done.push((index, result)),
                Err(error) => {
                    next.store(count, Ordering::Relaxed);
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return done;
                }
            }
        }
    };
    let mut done = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads.min(count))
            .map_while(|_| std::thread::Builder::new().spawn_scoped(scope, run).ok())
            .collect();
        let mut done = run();
        for helper in helpers {
            done.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    done.sort_unstable_by_key(|(index, _)| *index);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_work() {
        for (threads, count) in [(1, 0), (4, 0), (1, 5), (4, 1), (4, 1000)] {
            let squares = map(threads, count, || (), |(), index| Ok::<_, Infallible>(index * index));
            assert_eq!(squares, Ok((0..count).map(|index| index * index).collect()), "{threads} {count}");
        }
    }

    #[test]
    fn one_thread_goes_in_order_and_one_piece_of_work_needs_no_other() {
        let seen = Mutex::new(Vec::new());
        let caller = std::thread::current().id();
        let note = |(): &mut (), index| {
            assert_eq!(std::thread::current().id(), caller);
            seen.lock().unwrap().push(index);
            Ok::<_, Infallible>(())
        };
        map(1, 100, || (), note).unwrap();
        map(8, 1, || (), note).unwrap();
        assert_eq!(*seen.lock().unwrap(), (0..100).chain([0]).collect::<Vec<_>>());
    }

    #[test]
    fn nothing_is_begun_after_an_error() {
        let begun = AtomicUsize::new(0);
        let work = |(): &mut (), index| {
            begun.fetch_add(1, Ordering::Relaxed);
            if index == 3 { Err("the fourth") } else { Ok(()) }
        };
        assert_eq!(map(1, 100, || (), work), Err("the fourth"));
        assert_eq!(begun.load(Ordering::Relaxed), 4);
        assert_eq!(map(4, 100, || (), work), Err("the fourth"));
    }

    #[test]
    fn several_threads_work_at_once() {
        let together = std::sync::Barrier::new(3);
        let met = map(3, 3, || (), |(), _| Ok::<_, Infallible>(together.wait().is_leader())).unwrap();
        assert_eq!(met.iter().filter(|leads| **leads).count(), 1);
    }
}
