//! Random schedules with all faults. `REMANENT_TEST_SIZE=full` runs a million of them. `REMANENT_SEED=N` runs the
//! schedule of one seed and prints a trace.

use std::env;
use std::thread;

use remanent_archive::rules::Rules;
use remanent_archive::testing::run;

use crate::size::sized;

/// Number of schedules that each run of the tests contains.
const SAMPLE: u64 = 8_000;
/// Number of schedules with `REMANENT_TEST_SIZE=full`.
const FULL: u64 = 1_000_000;

/// Runs the schedules of the given seeds. Returns the number of acknowledged batches.
fn play(seeds: impl Iterator<Item = u64>) -> usize {
    let mut acknowledged = 0;
    for seed in seeds {
        let outcome = run(seed, Rules::default(), false);
        assert_eq!(outcome.violation, None, "replay with REMANENT_SEED={seed}");
        acknowledged += outcome.acknowledged;
    }
    acknowledged
}

#[test]
fn random_schedules_keep_all_promises() {
    if let Ok(seed) = env::var("REMANENT_SEED") {
        let outcome = run(seed.parse().expect("REMANENT_SEED is a number"), Rules::default(), true);
        outcome.trace.iter().for_each(|event| println!("{event}"));
        assert_eq!(outcome.violation, None);
        return;
    }
    let (count, threads) = (sized(SAMPLE, FULL), 2);
    let parts: Vec<_> = (0..threads)
        .map(|part| thread::spawn(move || play((part..count).step_by(threads as usize))))
        .collect();
    let acknowledged: usize = parts.into_iter().map(|part| part.join().expect("a violated promise")).sum();
    // A schedule that archives nothing proves nothing.
    assert!(acknowledged as u64 > 10 * count, "{acknowledged} batches in {count} schedules");
}
