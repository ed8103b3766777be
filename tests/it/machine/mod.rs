//! Requirements of some tests in addition to a file system: `strace`, root, loop devices, and programs that
//! create file systems. If a requirement is missing, the test prints a message that bypasses the capture of
//! test output and does nothing, so that such a run cannot be mistaken for a complete one.

pub mod filler;
pub mod mounts;
pub mod strace;

use std::io::Write;
use std::num::NonZeroUsize;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use crate::faults::watched_for;

/// Environment variable which states that the process runs only this test, so that the test need not start
/// another process.
const ALONE: &str = "REMANENT_ALONE";

/// Returns true if the process runs only this test.
pub fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs the body of a test in its own process.
pub fn alone<Test: FnOnce() + Send + 'static>(body: Test) {
    alone_for(Duration::from_secs(60), body);
}

/// Like [`alone`], but with this time limit.
#[expect(clippy::print_stdout, reason = "the figures of the test's long run")]
pub fn alone_for<Test: FnOnce() + Send + 'static>(limit: Duration, body: Test) {
    let test = std::any::type_name::<Test>().trim_start_matches("it::").trim_end_matches("::{{closure}}");
    if is_alone() {
        return watched_for(limit, test, body);
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", test, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
    std::io::stderr().write_all(err.as_bytes()).unwrap();
    // Print the test's output, which cargo shows on request.
    print!("{out}");
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
}

/// Prints that this test, or a part of it, is skipped.
pub fn skipped(part: &str, reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let mut uncaptured = std::io::stderr();
    writeln!(uncaptured, "SKIPPED {part}: {test}: {reason}").unwrap();
}

/// Reads the amount of work of a suite in its long form from the environment.
pub fn effort(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|number| number.parse().expect("a number"))
}

/// Runs all jobs, as many at a time as there are cores. Returns their outcomes in the order of the jobs.
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
