//! Every crash of small workloads: the whole engine on a simulated disk, cut short at every event, in the
//! middle of every write, with every part of what was pending kept or lost.
//!
//! Each workload runs once, on real threads. Then every state that a death of the process or a power cut
//! could have left is opened. Whatever is found must be the model's state at the Lsn that recovery reports;
//! that Lsn must not be below anything acknowledged at the level which the crash spares; nothing may be
//! refused; the pure `rebuild` must find the same; and what the open returned must survive a power cut at
//! once, and carry a new commit. In a part of the images the recovery, and the commits after it, are
//! themselves crashed, two deep. All suites together open at least 100,000 images: each asserts its part.
//!
//! [`model`] says what must be there, [`work`] drives the store and notes what was acknowledged,
//! [`explore`] opens and judges. The works are in [`commits`], [`snapshots`], [`scrubs`], [`forks`] and [`followers`], whose
//! followers are asked after each crash, too. [`lies`] has a medium that does not write what it says. [`syncs`]
//! leaves out one sync after the other and shows that this is seen.

mod model;
mod work;
mod explore;
mod followers;
mod commits;
mod scrubs;
mod snapshots;
mod forks;
mod lies;
mod syncs;

use std::time::Instant;

use remanent::disk::sim::{SimDisk, Tears};
use remanent::{Error, Options};

use explore::{Explorer, Level};
use model::Line;
use work::{Driver, Floors, Random};

/// Segments as short as they can be, so that a few batches cross every boundary; no snapshots and no scrubs but
/// those that a work asks for.
fn options() -> Options {
    let options = Options::default().segment_len(16 << 10).reserve_bytes(0);
    options.snapshot_log_bytes(None).snapshot_interval(None).scrub_interval(None)
}

/// The usual effort: a work's own crashes thoroughly, those of recoveries from a sample of them.
const LEVELS: &[Level] = &[
    Level { tears: Tears::Few(4), images_max: 12, closely_of: 8, nest_of: 80 },
    Level { tears: Tears::Few(2), images_max: 5, closely_of: 16, nest_of: 60 },
    Level { tears: Tears::None, images_max: 4, closely_of: 16, nest_of: 1 },
];

/// A number from the environment, 1 if it is not given: which choices are made, and how many times the
/// usual effort.
fn from_env(name: &str) -> u64 {
    std::env::var(name).ok().map_or(1, |number| number.parse().expect("a number"))
}

/// A run of the work, all of its crashes, and at least so many images.
fn suite<Work>(options: Options, at_least: usize, work: Work)
where
    Work: FnOnce(Driver, &mut Random) -> Result<Lives, Error>,
{
    suite_at(LEVELS, options, at_least, work);
}

/// The same, as thoroughly as told.
#[expect(
    clippy::print_stdout,
    reason = "the figures of a failing test; else cargo shows them only when asked"
)]
fn suite_at<Work>(levels: &[Level], options: Options, at_least: usize, work: Work)
where
    Work: FnOnce(Driver, &mut Random) -> Result<Lives, Error>,
{
    let seed = from_env("CRASH_SEED");
    let effort = from_env("CRASH_EFFORT");
    let levels: Vec<Level> = levels.iter().map(|level| level.times(effort)).collect();
    let started = Instant::now();
    let driver = Driver::new(SimDisk::new(), options.clone(), Line::default(), Floors::default());
    let Lives(lives) = work(driver, &mut Random(seed)).expect("the work itself meets no fault");
    let explorer = Explorer::new(&options, &levels, seed);
    // The path of the test: it is the one that the work was written in.
    let test = std::any::type_name::<Work>().trim_start_matches("it::").trim_end_matches("::{{closure}}");
    let mut events = 0;
    for driver in &lives {
        events += driver.disk.events();
        if let Err(violation) = explorer.explore(driver) {
            panic!(
                "{violation}\nseed {seed}; again: CRASH_SEED={seed} CRASH_EFFORT={effort} cargo test -p remanent \
                 --test it -- --exact {test}"
            );
        }
    }
    let images = explorer.images.borrow();
    println!("{test}: {events} events, {images:?} images, {:.1?}, seed {seed}", started.elapsed());
    let total: usize = images.iter().sum();
    assert!(total >= at_least, "{total} images are fewer than the {at_least} that this work should make");
}

/// What a work did between its own deaths: a disk for each life.
struct Lives(Vec<Driver>);

impl From<Driver> for Lives {
    fn from(driver: Driver) -> Self {
        Self(vec![driver])
    }
}
