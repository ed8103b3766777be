//! Every crash of small workloads: the whole engine on a simulated disk, cut short at every event, in the
//! middle of every write, with every part of what was pending kept or lost.
//!
//! Each workload runs once, on real threads. Then every state that a death of the process or a power cut
//! could have left is opened. Its content must be the model's state at the Lsn that recovery reports; that
//! Lsn must not be below anything acknowledged at the level that the crash spares; no store may be refused;
//! the pure `rebuild` must agree; and the state that the open returned must survive a power cut at once, and
//! carry a new commit. In a part of the images the recovery, and the commits after it, are themselves
//! crashed, three deep. All suites together open at least 60,000 images: each asserts its part.
//!
//! [`model`] says what must be there, [`work`] drives the store and notes acknowledgements, [`explore`] opens
//! and judges. The works are in [`commits`], [`snapshots`], [`tiers`], [`scrubs`], [`forks`], [`openings`]
//! and [`followers`], whose followers are asked after each crash, too; so are snapshots for their [`names`].
//! In [`closes`] a store frees space. [`lies`] has a medium that does not write what it says. [`syncs`]
//! leaves out one sync after the other and shows that this is seen; [`trouble`] makes one call after the
//! other fail.
//!
//! # The long run
//!
//! ```text
//! CRASH_EFFORT=5 CRASH_THREADS=4 cargo test -p remanent --test it crash:: -- --nocapture
//! ```
//!
//! looks at more of the same, lets every call of every work fail, and counts the images in a [`table`]: the
//! last one printed has all works. `CRASH_EFFORT` multiplies the ways to tear a write, the images of one
//! moment and the share of recoveries that are crashed; from 5 on no call is left out. `CRASH_THREADS` is the
//! number of threads that share one work, while the test harness runs several works at a time; `CRASH_SEED`
//! makes other works.

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

/// Segments as short as they can be, so that a few batches cross every boundary; no snapshots and no scrubs
/// but those that a work asks for.
fn options() -> Options {
    let options = Options::new().log(LogOptions::new().segment_len(16 << 10).reserve_bytes(0));
    options.snapshots(SnapshotSchedule::never()).scrubs(ScrubSchedule::new().interval(None))
}

/// The same, with images that are written in this way. Each way has works of every kind: all of them in all
/// ways would take three times as long.
fn images(io: ImageIo) -> Options {
    options().images(ImageOptions::new().io(io))
}

/// The usual effort: a work's own crashes thoroughly, those of recoveries from a sample of them.
const LEVELS: &[Level] = &[
    Level { tears: Tears::Few(4), images_max: 12, closely_of: 8, nest_of: 300 },
    Level { tears: Tears::Few(2), images_max: 5, closely_of: 16, nest_of: 60 },
    Level { tears: Tears::None, images_max: 4, closely_of: 16, nest_of: 1000 },
    Level { tears: Tears::None, images_max: 4, closely_of: 16, nest_of: 1 },
];

/// The usual effort makes one call in this number fail; a multiple of it makes all of them fail, one after
/// the other.
const FAULTS_ONE_OF: u64 = 40;

/// A sample judges one in this number of the images of a work's own crashes, and of the faults.
const SAMPLE_ONE_OF: usize = 5;

/// A number from the environment, 1 if it is not given: the choice of works, or a multiple of the usual
/// effort.
fn from_env(name: &str) -> u64 {
    std::env::var(name).ok().map_or(1, |number| number.parse().expect("a number"))
}

/// A run of the work, all of its crashes, and at least this number of images; then the work again and again,
/// each time with another call that fails.
fn suite<Work>(options: Options, at_least: usize, work: Work)
where
    Work: Fn(Driver, &mut Random) -> Result<Lives, Error> + Sync,
{
    suite_at(LEVELS, options, at_least, work);
}

/// The same, with these levels.
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
    // The path of the test in which the work was written.
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
    // The images of a sample are not an exact share.
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

/// Does the parts, each in a thread of its own, and adds up their counts. In a sample there are more parts than
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

/// The lives of a work between its own deaths: a disk for each.
struct Lives(Vec<Driver>);

impl From<Driver> for Lives {
    fn from(driver: Driver) -> Self {
        Self(vec![driver])
    }
}
