//! Runs a test under many schedules.

use std::env::{self, VarError};
use std::num::NonZero;

use remanent::testing::sync::sleeps_until;
use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, Runner, thread};

/// The default number of schedules per test.
const SCHEDULES: usize = 300;
const SEED: u64 = 1;
/// Stack size of a thread. The engine's call chains are deeper than the scheduler's default permits.
const STACK_BYTES: usize = 1 << 20;
/// Maximum number of priority changes in a schedule with random priorities.
const DEPTH: usize = 3;

/// When a wait with a timeout ends by its timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// Only when no other thread can run, as if all work took no time.
    Patient,
    /// Whenever the scheduler selects it, as if any work could take any time.
    Hasty,
}

/// Runs `work` under a number of schedules of each kind: with threads that are selected at random at each
/// step, for both kinds of time, and with random thread priorities that change occasionally, which finds rare
/// interleavings.
pub fn explore(work: fn(Time)) {
    if let Some(schedule) = variable::<String>("REMANENT_SCHEDULE") {
        // The prefix of a printed schedule states the kind of time.
        let (time, schedule) = schedule.split_once(':').expect("patient:… or hasty:…");
        let time = if time == "patient" { Time::Patient } else { Time::Hasty };
        run(ReplayScheduler::new_from_encoded(schedule), time, work);
        return;
    }
    let count = variable::<NonZero<usize>>("REMANENT_SCHEDULES").map_or(SCHEDULES, NonZero::get);
    let seed = variable("REMANENT_SEED").unwrap_or(SEED);
    let share = count.div_ceil(4);
    run(Patient(RandomScheduler::new_from_seed(seed, share)), Time::Patient, work);
    run(Patient(PctScheduler::new_from_seed(seed, DEPTH, share)), Time::Patient, work);
    run(RandomScheduler::new_from_seed(seed, share), Time::Hasty, work);
    run(PctScheduler::new_from_seed(seed, DEPTH, share), Time::Hasty, work);
}

/// Runs all of `works` concurrently. The calling thread does nothing else in the meantime, because the end of
/// a thread scope wakes it wherever it waits.
pub fn at_once(works: &[&(dyn Fn() + Sync)]) {
    thread::scope(|scope| {
        for work in works {
            scope.spawn(work);
        }
    });
}

fn run(scheduler: impl Scheduler + 'static, time: Time, work: fn(Time)) {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    // The documentation of the crate states this limit.
    config.silence_warnings = true;
    eprintln!(
        "schedules of {time:?} time; REMANENT_SCHEDULE begins with `{}:`",
        format!("{time:?}").to_lowercase()
    );
    Runner::new(scheduler, config).run(move || work(time));
}

/// Parses an environment variable, if it is set.
fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    match env::var(name) {
        Ok(value) => Some(value.parse().unwrap_or_else(|_| panic!("{name} is {value:?}"))),
        Err(VarError::NotPresent) => None,
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Wakes a thread from a timed wait only if no other thread can run. Then wakes the thread with the earliest
/// deadline.
#[derive(Debug)]
struct Patient<S>(S);

impl<S: Scheduler> Scheduler for Patient<S> {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.0.new_execution()
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let awake: Vec<&Task> =
            runnable.iter().copied().filter(|task| sleeps_until(task.id()).is_none()).collect();
        if !awake.is_empty() {
            return self.0.next_task(&awake, current, is_yielding);
        }
        let first = *runnable.iter().min_by_key(|task| sleeps_until(task.id())).expect("a thread can go on");
        self.0.next_task(&[first], current, is_yielding)
    }

    fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }
}
