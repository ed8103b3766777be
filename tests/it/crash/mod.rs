//! Every crash of small workloads. The whole engine runs on a simulated disk and is interrupted at every
//! event and in the middle of every write, and each part of the pending writes is kept or lost.
//!
//! Each workload runs once, on real threads. Then every disk image that a kill of the process or a power cut
//! could have left is opened. The recovered content must be the model's state at the Lsn that recovery
//! reports. That Lsn must not be below any batch acknowledged at the level that the crash preserves. No open
//! may fail, and the pure `rebuild` must produce the same state. The recovered state must survive an
//! immediate power cut and accept a new commit. For some of the images, the recovery and the commits after it
//! are crashed as well, to a depth of three. All suites together open at least 60,000 images, and each suite
//! asserts its share.
//!
//! [`model`] computes the expected state, [`work`] drives the store and records acknowledgements, and
//! [`explore`] opens and checks the images. The workloads are in [`commits`], [`snapshots`], [`tiers`],
//! [`scrubs`], [`forks`], [`openings`] and [`followers`]. After each crash, followers and the [`names`] of
//! snapshots are also checked. In [`closes`], a store frees space. [`lies`] has a storage medium that loses
//! writes. [`syncs`] omits one sync at a time and checks that the loss is detected. [`trouble`] makes one
//! call at a time fail.
//!
//! # The long run
//!
//! ```text
//! CRASH_EFFORT=5 CRASH_THREADS=4 cargo test -p remanent --test it crash:: -- --nocapture
//! ```
//!
//! checks more images of each workload, makes every call of every workload fail, and prints the numbers of
//! images as a [`table`] after each workload. The last table contains all workloads. `CRASH_EFFORT`
//! multiplies the number of ways to tear a write, the number of images per crash point and the share of
//! recoveries that are crashed. From 5 on, every call fails once. `CRASH_THREADS` is the number of threads
//! that share one workload, while the test harness runs several workloads at a time. `CRASH_SEED` generates
//! different workloads.

mod model;
mod work;
mod explore;
mod followers;
mod names;
mod closes;
mod commits;
mod scrubs;
mod snapshots;
mod tiers;
mod forks;
mod openings;
mod lies;
mod syncs;
mod trouble;
mod table;

use std::time::Instant;

use remanent::options::{ImageIo, ImageOptions, LogOptions, ScrubSchedule, SnapshotSchedule};
use remanent::testing::sim_disk::{SimDisk, Tears};
use remanent::{Error, Options};

use explore::{Explorer, Level, Violation};
use model::Line;
use work::{Driver, Floors, Random};

use crate::size::sized;

/// Options with the shortest permitted segments, so that a few batches cross every boundary, and with
/// snapshots and scrubs only on request.
fn options() -> Options {
    let options = Options::new().log(LogOptions::new().segment_len(16 << 10).reserve_bytes(0));
    options.snapshots(SnapshotSchedule::never()).scrubs(ScrubSchedule::new().interval(None))
}

/// Returns these options with a mode of writing images. The workloads are distributed over the modes, because
/// running all of them in all modes would take three times as long.
fn images(io: ImageIo) -> Options {
    options().images(ImageOptions::new().io(io))
}

/// The default effort: all crashes of the workload itself, and a sample of the crashes of its recoveries.
const LEVELS: &[Level] = &[
    Level { tears: Tears::Few(4), images_max: 12, closely_of: 8, nest_of: 300 },
    Level { tears: Tears::Few(2), images_max: 5, closely_of: 16, nest_of: 60 },
    Level { tears: Tears::None, images_max: 4, closely_of: 16, nest_of: 1000 },
    Level { tears: Tears::None, images_max: 4, closely_of: 16, nest_of: 1 },
];

/// By default, one in this number of calls fails. `CRASH_EFFORT` can select all calls.
const FAULTS_ONE_OF: u64 = 40;

/// A sample checks one in this number of the workload's crash images and faults.
const SAMPLE_ONE_OF: usize = 5;

/// Reads a number from the environment, such as the seed of the workloads or a multiple of the default
/// effort. The default is 1.
fn from_env(name: &str) -> u64 {
    std::env::var(name).ok().map_or(1, |number| number.parse().expect("a number"))
}

/// Runs the workload, explores all of its crashes and asserts that there were at least `at_least` images.
/// Then repeats the workload, each time with another failing call.
fn suite<Work>(options: Options, at_least: usize, work: Work)
where
    Work: Fn(Driver, &mut Random) -> Result<Lives, Error> + Sync,
{
    suite_at(LEVELS, options, at_least, work);
}

/// Like [`suite`], with these levels.
fn suite_at<Work>(levels: &[Level], options: Options, at_least: usize, work: Work)
where
    Work: Fn(Driver, &mut Random) -> Result<Lives, Error> + Sync,
{
    let seed = from_env("CRASH_SEED");
    let effort = from_env("CRASH_EFFORT");
    let parts = usize::try_from(from_env("CRASH_THREADS")).expect("a small number");
    let levels: Vec<Level> = levels.iter().map(|level| level.times(effort)).collect();
    let started = Instant::now();
    let driver = Driver::new(SimDisk::new(), options.clone(), Line::default(), Floors::default());
    let Lives(lives) = work(driver, &mut Random(seed)).expect("the work itself meets no fault");
    // The path of the test function that contains the workload's closure.
    let test = std::any::type_name::<Work>().trim_start_matches("it::").trim_end_matches("::{{closure}}");
    let again = |violation| -> Vec<usize> {
        panic!(
            "{violation}\nseed {seed}; again: REMANENT_TEST_SIZE=full CRASH_SEED={seed} CRASH_EFFORT={effort} \
             cargo test -p remanent --test it -- --exact {test}"
        )
    };
    let crashes = in_parts(parts, |part| {
        let explorer = Explorer { part, ..Explorer::new(&options, &levels, seed) };
        lives.iter().try_for_each(|driver| explorer.explore(driver)).map(|()| explorer.images.take())
    });
    let images = crashes.unwrap_or_else(again);
    let total: usize = images.iter().sum();
    // The number of images in a sample varies.
    let at_least = at_least / sized(2 * SAMPLE_ONE_OF, 1);
    assert!(total >= at_least, "{total} images are fewer than the {at_least} that this work should make");

    let one_of = usize::try_from(FAULTS_ONE_OF / (effort * effort)).expect("a small number").max(1);
    let faults =
        in_parts(parts, |part| trouble::strike(&options, seed, one_of, part, levels[0].closely_of, &work));
    let faults = faults.unwrap_or_else(again);
    assert!(faults[0] > 0, "no fault struck");
    let events = lives.iter().map(|driver| driver.disk.events()).sum();
    table::add(table::Row { test: test.to_owned(), events, images, faults, elapsed: started.elapsed() });
}

/// Explores each part in its own thread, and sums up the counts. In a sample, there are more parts than
/// threads.
fn in_parts(
    parts: usize,
    work: impl Fn((usize, usize)) -> Result<Vec<usize>, Violation> + Sync,
) -> Result<Vec<usize>, Violation> {
    let all_parts = parts * sized(SAMPLE_ONE_OF, 1);
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..parts).map(|part| scope.spawn(move || work((part, all_parts)))).collect();
        let mut sums: Vec<usize> = Vec::new();
        for thread in threads {
            let counts = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            sums.resize(counts.len(), 0);
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        Ok(sums)
    })
}

/// The lives of a store in one workload. Each life lasts from an open to a kill or close and has its own
/// disk.
struct Lives(Vec<Driver>);

impl From<Driver> for Lives {
    fn from(driver: Driver) -> Self {
        Self(vec![driver])
    }
}
