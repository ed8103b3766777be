//! What some tests need of the machine beside a file system: `strace`, root, loop devices, programs that make
//! file systems. Where it is missing they say so, past the capture of their output, and do nothing: a run
//! without them is never taken for one with them.

pub mod mounts;
pub mod strace;

use std::io::Write;
use std::num::NonZeroUsize;
use std::sync::Mutex;

/// Says that this test, or a part of it, does nothing here.
pub fn skipped(part: &str, reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let mut uncaptured = std::io::stderr();
    writeln!(uncaptured, "SKIPPED {part}: {test}: {reason}").unwrap();
}

/// A number from the environment: how much a suite does in its long form.
pub fn effort(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|number| number.parse().expect("a number"))
}

/// Does all jobs, as many at a time as there are processors, and returns what each came to, in their order.
pub fn in_parallel<Job: Sync, Outcome: Send>(
    jobs: &[Job],
    run: impl Fn(&Job) -> Outcome + Sync,
) -> Vec<Outcome> {
    let lanes = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let next = Mutex::new(jobs.iter().enumerate());
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..lanes.min(jobs.len()) {
            scope.spawn(|| {
                loop {
                    let Some((index, job)) = next.lock().unwrap().next() else { return };
                    let outcome = run(job);
                    outcomes.lock().unwrap().push((index, outcome));
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap();
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}
