//! Parallel work in three forms: several threads that share one list of tasks, a pipeline of a producer and a consumer
//! thread, and two tasks that run concurrently.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::ScopedJoinHandle;

use crate::base::crew;
use crate::base::sync::thread;
use crate::base::sync::threads;

/// Returns the number of threads that can run concurrently on this system, limited to `at_most`.
pub(crate) fn threads(at_most: usize) -> usize {
    // The number is queried once, because the system reads files to determine it.
    static COUNT: OnceLock<usize> = OnceLock::new();
    (*COUNT.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get))).min(at_most)
}

/// Returns whether the calling thread has joined a crew. Parallel work of such a thread starts no threads.
pub(crate) fn has_crew() -> bool {
    crew::own().is_some()
}

/// Calls `work` for each index below `count` on up to `threads` threads, including the caller's, and returns the
/// results in index order. Each thread creates its own state with `equip`. A single thread processes the indices in
/// order, like a plain loop.
///
/// If a thread cannot be started, the other threads do its work. If the caller belongs to a [`crew`], the crew does the
/// work.
///
/// # Errors
/// The first error of any thread. No new work is started after an error.
pub(crate) fn map_indexed<W, T: Send, E: Send>(
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
    let helpers = threads.min(count).saturating_sub(1);
    let mut done = match crew::own() {
        Some(crew) if helpers > 0 => {
            let all = Mutex::new(Vec::new());
            let add = |done| all.lock().unwrap_or_else(PoisonError::into_inner).extend(done);
            crew.in_place_scope(|scope| {
                (0..helpers).for_each(|_| scope.spawn(|_| add(run())));
                add(run());
            });
            all.into_inner().unwrap_or_else(PoisonError::into_inner)
        }
        _ => std::thread::scope(|scope| {
            let helpers: Vec<_> =
                (0..helpers).map_while(|_| threads::start_scoped(scope, "remanent-crew", run).ok()).collect();
            let mut done = run();
            for helper in helpers {
                done.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            done
        }),
    };
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    done.sort_unstable_by_key(|(index, _)| *index);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

/// Calls `work` with each piece like [`map_indexed`]. Pieces are passed by value, and may be mutable borrows.
pub(crate) fn for_each<P: Send, T: Send, E: Send>(
    threads: usize,
    pieces: impl IntoIterator<Item = P>,
    work: impl Fn(P) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let pieces: Vec<Mutex<Option<P>>> = pieces.into_iter().map(|piece| Mutex::new(Some(piece))).collect();
    let take = |index: usize| pieces[index].lock().unwrap_or_else(PoisonError::into_inner).take();
    let each = |(): &mut (), index: usize| work(take(index).expect("each is taken once"));
    map_indexed(threads, pieces.len(), || (), each)
}

/// Runs `there` and `here` concurrently and returns their results. `there` runs on its own thread. If the system has a
/// single core, or the thread cannot be started, `there` runs after `here`.
pub(crate) fn join<A: Send, B>(there: impl FnOnce() -> A + Send, here: impl FnOnce() -> B) -> (A, B) {
    let there = Mutex::new(Some(there));
    let run = || there.lock().unwrap_or_else(PoisonError::into_inner).take().map(|there| there());
    let (done, here) = std::thread::scope(|scope| {
        let may_start = threads(2) > 1;
        let helper = may_start.then(|| threads::start_scoped(scope, "remanent-both", run));
        let here = here();
        let join = |helper: ScopedJoinHandle<'_, _>| {
            helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        (helper.and_then(Result::ok).and_then(join), here)
    });
    (done.or_else(run).expect("no thread has taken it"), here)
}

/// The error that [`pipeline`] returns if its producer thread panics.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProducerPanic;

/// Calls `take` with each piece that `make` produces, in order, and returns the result of `make`. `make` passes pieces
/// to its callback. The callback returns `false` when no more pieces are needed.
///
/// `make` runs on its own thread and produces up to `count_max` pieces in advance. If `count_max` is 0, the system has
/// a single core, or the thread cannot be started, each piece is taken as soon as it is produced.
///
/// # Errors
/// The first error of `take`; [`ProducerPanic`].
pub(crate) fn pipeline<T: Send, R: Send, E: From<ProducerPanic>>(
    count_max: usize,
    make: impl Fn(&mut dyn FnMut(T) -> bool) -> R + Sync,
    mut take: impl FnMut(T) -> Result<(), E>,
) -> Result<R, E> {
    let threads = if count_max == 0 { 1 } else { threads(2) };
    std::thread::scope(|scope| {
        let (sender, pieces) = mpsc::sync_channel(count_max);
        let make = &make;
        let maker = (threads > 1).then(|| {
            threads::start_scoped(scope, "remanent-pipeline", move || {
                make(&mut |piece| sender.send(piece).is_ok())
            })
        });
        let Some(Ok(maker)) = maker else {
            let mut taken = Ok(());
            let made = make(&mut |piece| {
                // `make` may offer one more piece after its callback has returned `false`.
                if taken.is_ok() {
                    taken = take(piece);
                }
                taken.is_ok()
            });
            return taken.map(|()| made);
        };
        // Consuming the receiver closes the channel, which unblocks a producer that waits to send another piece.
        let taken = pieces.into_iter().try_for_each(take);
        let made = maker.join();
        taken?;
        made.map_err(|_panic| ProducerPanic.into())
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn results_are_in_work_order() {
        for (threads, count) in [(1, 0), (4, 0), (1, 5), (4, 1), (4, 1000)] {
            let squares = map_indexed(threads, count, || (), |(), index| Ok::<_, Infallible>(index * index));
            assert_eq!(squares, Ok((0..count).map(|index| index * index).collect()), "{threads} {count}");
        }
    }

    #[test]
    fn single_thread_runs_in_order_and_single_item_needs_none() {
        let seen = Mutex::new(Vec::new());
        let caller = std::thread::current().id();
        let note = |(): &mut (), index| {
            assert_eq!(std::thread::current().id(), caller);
            seen.lock().unwrap().push(index);
            Ok::<_, Infallible>(())
        };
        map_indexed(1, 100, || (), note).unwrap();
        map_indexed(8, 1, || (), note).unwrap();
        assert_eq!(*seen.lock().unwrap(), (0..100).chain([0]).collect::<Vec<_>>());
    }

    #[test]
    fn no_work_starts_after_error() {
        let begun = AtomicUsize::new(0);
        let work = |(): &mut (), index| {
            begun.fetch_add(1, Ordering::Relaxed);
            if index == 3 { Err("the fourth") } else { Ok(()) }
        };
        assert_eq!(map_indexed(1, 100, || (), work), Err("the fourth"));
        assert_eq!(begun.load(Ordering::Relaxed), 4);
        assert_eq!(map_indexed(4, 100, || (), work), Err("the fourth"));
    }

    #[test]
    fn several_threads_work_at_once() {
        let together = std::sync::Barrier::new(3);
        let met = map_indexed(3, 3, || (), |(), _| Ok::<_, Infallible>(together.wait().is_leader())).unwrap();
        assert_eq!(met.iter().filter(|leads| **leads).count(), 1);
    }

    #[test]
    fn join_runs_both_concurrently() {
        let together = std::sync::Barrier::new(threads(2));
        let caller = std::thread::current().id();
        let mut here = 1;
        let there = || {
            together.wait();
            std::thread::current().id()
        };
        let (there, ()) = join(there, || {
            if threads(2) > 1 {
                together.wait();
            }
            here += 1;
        });
        assert_eq!((there != caller, here), (threads(2) > 1, 2));
    }

    /// Runs a pipeline over the numbers up to 100. Returns the numbers that `take` received, and the pipeline's result.
    fn numbers(count_max: usize, refused: u32) -> (Vec<u32>, Result<&'static str, Failure>) {
        let mut taken = Vec::new();
        let made = pipeline(
            count_max,
            |emit| {
                let all = (0..100).all(&mut *emit);
                // The producer still offers a piece after the callback returned `false`.
                let last = emit(100);
                if all && last { "all" } else { "some" }
            },
            |number| {
                taken.push(number);
                if number == refused { Err(Failure::Refused) } else { Ok(()) }
            },
        );
        (taken, made)
    }

    #[derive(Debug, PartialEq, Eq)]
    enum Failure {
        Refused,
        Panicked,
    }

    impl From<ProducerPanic> for Failure {
        fn from(_: ProducerPanic) -> Self {
            Self::Panicked
        }
    }

    #[test]
    fn pieces_are_taken_in_their_order_until_one_is_refused() {
        for count_max in [0, 1, 2, 1000] {
            assert_eq!(numbers(count_max, 101), ((0..101).collect(), Ok("all")), "{count_max}");
            for refused in [0, 50, 99, 100] {
                let expected = ((0..=refused).collect(), Err(Failure::Refused));
                assert_eq!(numbers(count_max, refused), expected, "{count_max}");
            }
        }
    }

    /// Tests a full and an empty channel. No thread may wait for a piece that never comes.
    #[test]
    fn panic_in_producer_is_an_error() {
        if threads(2) < 2 {
            eprintln!("SKIPPED: one thread at a time can run here, so nothing is made in advance");
            return;
        }
        for panics_at in [0, 1, 5] {
            let mut taken = 0;
            let make = |emit: &mut dyn FnMut(u32) -> bool| {
                (0..panics_at).for_each(|number| assert!(emit(number)));
                panic!("as this test wants it");
            };
            let made: Result<(), Failure> = pipeline(2, make, |_| {
                taken += 1;
                Ok(())
            });
            assert_eq!((made, taken), (Err(Failure::Panicked), panics_at));
        }
    }
}
