//! Every crash of small workloads: the whole engine on a simulated disk, cut short at every event, in the
//! middle of every write, with every part of what was pending kept or lost.
//!
//! Each workload runs once, on real threads. Then every state that a death of the process or a power cut
//! could have left is opened. Whatever is found must be the model's state at the Lsn that recovery reports;
//! that Lsn must not be below anything acknowledged at the level which the crash spares; nothing may be
//! refused; the pure `rebuild` must find the same; and what the open returned must survive a power cut at
//! once, and carry a new commit. In a part of the images the recovery, and the commits after it, are
//! themselves crashed, two deep. All suites together open at least 20,000 images: each asserts its part.
//!
//! [`model`] says what must be there, [`work`] drives the store and notes what was acknowledged,
//! [`explore`] opens and judges; [`syncs`] leaves out one sync after the other and shows that this is seen.

mod explore;
mod model;
mod syncs;
mod work;

use std::time::Instant;

use remanent::disk::sim::{SimDisk, Tears};
use remanent::{Ack, Error, Metadata, Options};

use explore::{Explorer, Level};
use model::{Act, Line, Target};
use work::{Driver, Floors, Random, Writer};

/// Segments as short as they can be, so that a few batches cross every boundary; no snapshots but those that a
/// work takes.
fn options() -> Options {
    let options = Options::default().segment_len(16 << 10).reserve_bytes(0);
    options.snapshot_log_bytes(None).snapshot_interval(None)
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
#[expect(
    clippy::print_stdout,
    reason = "the figures of a failing test; else cargo shows them only when asked"
)]
fn suite(
    name: &str,
    options: Options,
    levels: &[Level],
    at_least: usize,
    work: impl FnOnce(Driver, &mut Random) -> Result<Lives, Error>,
) {
    let seed = from_env("CRASH_SEED");
    let effort = from_env("CRASH_EFFORT");
    let levels: Vec<Level> = levels.iter().map(|level| level.times(effort)).collect();
    let started = Instant::now();
    let driver = Driver::new(SimDisk::new(), options.clone(), Line::default(), Floors::default());
    let Lives(lives) = work(driver, &mut Random(seed)).expect("the work itself meets no fault");
    let explorer = Explorer::new(&options, &levels, seed);
    let mut events = 0;
    for driver in &lives {
        events += driver.disk.events();
        if let Err(violation) = explorer.explore(&driver.disk, &driver.line(), driver.floors) {
            panic!(
                "{violation}\nseed {seed}; again: CRASH_SEED={seed} cargo test -p remanent --test it \
                 crash::{name}"
            );
        }
    }
    let images = explorer.images.borrow();
    println!("{name}: {events} events, {images:?} images, {:.1?}, seed {seed}", started.elapsed());
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

#[test]
fn durable_commits_survive() {
    suite("durable_commits_survive", options(), LEVELS, 2300, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        for _ in 0..2 {
            let store = driver.open()?;
            for _ in 0..5 {
                driver.commit(&store, &mut writer, Ack::Durable)?;
            }
            driver.check(&store);
            driver.close(store)?;
        }
        Ok(driver.into())
    });
}

#[test]
fn logged_commits_survive_a_kill() {
    suite("logged_commits_survive_a_kill", options(), LEVELS, 2300, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        let store = driver.open()?;
        for step in 1..=16 {
            let lsn = driver.commit(&store, &mut writer, Ack::Logged)?;
            if step % 5 == 0 {
                driver.wait_durable(&store, lsn)?;
            }
        }
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

#[test]
fn commits_of_two_threads_share_groups() {
    suite("commits_of_two_threads_share_groups", options(), LEVELS, 2300, |driver, random| {
        let store = driver.open()?;
        let writers = [Writer::new("a", random.next()), Writer::new("b", random.next())];
        std::thread::scope(|scope| {
            let threads = writers.map(|mut writer| {
                let (driver, store) = (&driver, &store);
                scope.spawn(move || {
                    (0..8).try_for_each(|step| {
                        let ack = if step % 3 == 2 { Ack::Durable } else { Ack::Logged };
                        driver.commit(store, &mut writer, ack).map(drop)
                    })
                })
            });
            threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
        })?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    });
}

#[test]
fn segments_roll() {
    suite("segments_roll", options(), LEVELS, 2300, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        let store = driver.open()?;
        for step in 0..12 {
            let ack = if step % 4 == 1 { Ack::Logged } else { Ack::Durable };
            driver.commit(&store, &mut writer, ack)?;
        }
        assert!(store.stats().log.rolls >= 2, "{:?}", store.stats().log);
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

#[test]
fn a_frame_longer_than_a_segment_survives() {
    suite("a_frame_longer_than_a_segment_survives", options(), LEVELS, 2300, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        let store = driver.open()?;
        driver.commit(&store, &mut writer, Ack::Logged)?;
        // All bytes but one: those of a whole page would go to an image file.
        let len = 20 << 10;
        let page = Target::New(0);
        let long = vec![
            Act::Create { len, key: None, metadata: Metadata::new() },
            Act::Write { page, offset: 1, bytes: random.bytes(len - 1) },
        ];
        let (_, pages) = driver.commit_acts(&store, long, Ack::Logged)?;
        driver.commit(&store, &mut writer, Ack::Durable)?;
        let page = Target::Page(pages[0]);
        let again = vec![Act::Write { page, offset: 1, bytes: random.bytes(len - 1) }];
        driver.commit_acts(&store, again, Ack::Durable)?;
        driver.commit(&store, &mut writer, Ack::Durable)?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    });
}

#[test]
fn whole_pages_survive() {
    suite("whole_pages_survive", options().snapshots_kept(1), LEVELS, 2300, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        let len = 6 << 10;
        let create = || Act::Create { len, key: None, metadata: Metadata::new() };
        let mut whole = |page| Act::Write { page, offset: 0, bytes: random.bytes(len) };
        let store = driver.open()?;
        driver.commit(&store, &mut writer, Ack::Logged)?;
        let (one, two) = (Target::New(0), Target::New(1));
        let pages = vec![create(), whole(one), create(), whole(two)];
        let (_, pages) = driver.commit_acts(&store, pages, Ack::Logged)?;
        let (one, two) = (Target::Page(pages[0]), Target::Page(pages[1]));
        driver.commit_acts(&store, vec![whole(one)], Ack::Logged)?;
        driver.commit_acts(
            &store,
            vec![Act::Write { page: one, offset: 9, bytes: vec![1; 9] }],
            Ack::Durable,
        )?;
        driver.snapshot(&store)?;
        driver.check(&store);
        let second = driver.killed();
        drop(store);
        // The snapshot names one image of a batch; the others go with the log that names them.
        let store = second.open()?;
        second.commit_acts(&store, vec![whole(two)], Ack::Durable)?;
        second.commit_acts(&store, vec![Act::Delete { page: one }], Ack::Logged)?;
        second.snapshot(&store)?;
        second.commit_acts(&store, vec![create(), whole(Target::New(0))], Ack::Logged)?;
        second.check(&store);
        second.close(store)?;
        Ok(Lives(vec![driver, second]))
    });
}

#[test]
fn snapshots_beside_commits() {
    suite("snapshots_beside_commits", options(), LEVELS, 2300, |driver, random| {
        let store = driver.open()?;
        let (mut writer, mut other) = (Writer::new("a", random.next()), Writer::new("b", random.next()));
        for _ in 0..4 {
            driver.commit(&store, &mut writer, Ack::Logged)?;
        }
        std::thread::scope(|scope| {
            let thread = scope
                .spawn(|| (0..10).try_for_each(|_| driver.commit(&store, &mut other, Ack::Logged).map(drop)));
            for _ in 0..2 {
                driver.snapshot(&store)?;
                driver.commit(&store, &mut writer, Ack::Logged)?;
            }
            thread.join().expect("no panic")
        })?;
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

/// As many snapshots as the log has them taken, while two threads commit.
#[test]
fn background_snapshots_beside_commits() {
    suite("background_snapshots_beside_commits", options(), LEVELS, 2300, |driver, random| {
        let store = driver.open_with(options().snapshot_log_bytes(5000))?;
        let writers = [Writer::new("a", random.next()), Writer::new("b", random.next())];
        std::thread::scope(|scope| {
            let threads = writers.map(|mut writer| {
                let (driver, store) = (&driver, &store);
                scope.spawn(move || {
                    (0..6).try_for_each(|_| driver.commit(store, &mut writer, Ack::Logged).map(drop))
                })
            });
            threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
        })?;
        let mut writer = Writer::new("c", random.next());
        while store.stats().snapshots.taken < 2 {
            driver.commit(&store, &mut writer, Ack::Durable)?;
        }
        assert_eq!(store.stats().snapshots.failed, 0);
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

/// Exact snapshots while another thread commits: each alone, without the log, is the state of its Lsn.
#[test]
fn exact_snapshots_beside_commits() {
    suite("exact_snapshots_beside_commits", options(), LEVELS, 2300, |driver, random| {
        let store = driver.open()?;
        let (mut writer, mut other) = (Writer::new("a", random.next()), Writer::new("b", random.next()));
        for _ in 0..3 {
            driver.commit(&store, &mut writer, Ack::Logged)?;
        }
        std::thread::scope(|scope| {
            let thread = scope
                .spawn(|| (0..8).try_for_each(|_| driver.commit(&store, &mut other, Ack::Logged).map(drop)));
            for _ in 0..2 {
                driver.snapshot_exact(&store)?;
                driver.commit(&store, &mut writer, Ack::Logged)?;
            }
            thread.join().expect("no panic")
        })?;
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

/// Pages that are worth compressing, in snapshots and in a restore.
#[test]
fn compressed_images_survive() {
    suite("compressed_images_survive", options(), LEVELS, 2000, |driver, random| {
        let store = driver.open()?;
        let len = 6000;
        let create = |_| Act::Create { len, key: None, metadata: Metadata::new() };
        let (_, pages) = driver.commit_acts(&store, (0..3).map(create).collect(), Ack::Logged)?;
        let fill = |random: &mut Random| {
            let (page, offset) = (Target::Page(pages[random.below(3)]), 8 * random.below(100));
            let pattern = random.next().to_le_bytes().to_vec();
            vec![Act::Fill { page, offset, len: 4000, pattern }]
        };
        driver.commit_acts(&store, fill(random), Ack::Logged)?;
        let snapshot = driver.snapshot(&store)?;
        assert!(snapshot.bytes < len as u64, "{snapshot:?}");
        for _ in 0..2 {
            driver.commit_acts(&store, fill(random), Ack::Durable)?;
        }
        driver.snapshot(&store)?;
        driver.commit_acts(&store, fill(random), Ack::Logged)?;
        driver.restore(&store, snapshot)?;
        driver.commit_acts(&store, fill(random), Ack::Durable)?;
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

#[test]
fn snapshots_that_follow_each_other_survive() {
    suite(
        "snapshots_that_follow_each_other_survive",
        options().snapshots_kept(2),
        LEVELS,
        2300,
        |driver, random| {
            let mut store = driver.open()?;
            let pages = driver.create_pages(&store, random, 24, 40)?;
            // More than a chain has links: it is folded on the way.
            for round in 0..11 {
                driver.change(&store, random, &pages[round..=round])?;
                if round == 4 {
                    let acts = vec![Act::Delete { page: Target::Page(pages[20]) }];
                    driver.commit_acts(&store, acts, Ack::Durable)?;
                }
                driver.snapshot(&store)?;
                if round == 6 {
                    driver.close(store)?;
                    store = driver.open()?;
                }
            }
            driver.change(&store, random, &pages[..2])?;
            driver.check(&store);
            drop(store);
            Ok(driver.into())
        },
    );
}

#[test]
fn names_pruning_and_compaction_survive() {
    suite(
        "names_pruning_and_compaction_survive",
        options().snapshots_kept(1),
        LEVELS,
        2300,
        |driver, random| {
            let store = driver.open()?;
            let pages = driver.create_pages(&store, random, 30, 1000)?;
            let named = driver.snapshot_named(&store, "first")?;
            for part in pages.chunks(10).take(2) {
                driver.change(&store, random, part)?;
                driver.snapshot(&store)?;
            }
            assert_eq!(store.snapshots()[0].id, named.id);
            let pruned = store.prune(&store.retention().give_up("first"))?;
            assert_eq!(pruned.snapshots, [named]);
            // Two thirds of the first image file are named no more: the next snapshot writes what is left of it.
            let emptying = driver.snapshot(&store)?;
            assert_eq!(emptying.bytes_written, 10 * 1000);
            driver.change(&store, random, &pages[..1])?;
            driver.snapshot(&store)?;
            driver.check(&store);
            driver.close(store)?;
            Ok(driver.into())
        },
    );
}

#[test]
fn what_snapshots_replace_is_recycled() {
    suite(
        "what_snapshots_replace_is_recycled",
        options().snapshots_kept(2),
        LEVELS,
        2500,
        |driver, random| {
            let store = driver.open()?;
            let mut writer = Writer::new("a", random.next());
            for _ in 0..4 {
                for step in 0..4 {
                    let ack = if step == 1 { Ack::Logged } else { Ack::Durable };
                    driver.commit(&store, &mut writer, ack)?;
                }
                driver.snapshot(&store)?;
            }
            assert_eq!(store.snapshots().len(), 2);
            driver.check(&store);
            driver.close(store)?;
            Ok(driver.into())
        },
    );
}

#[test]
fn a_restore_survives() {
    suite("a_restore_survives", options(), LEVELS, 2300, |driver, random| {
        let store = driver.open()?;
        let mut writer = Writer::new("a", random.next());
        for _ in 0..3 {
            driver.commit(&store, &mut writer, Ack::Logged)?;
        }
        let snapshot = driver.snapshot(&store)?;
        for _ in 0..3 {
            driver.commit(&store, &mut writer, Ack::Logged)?;
        }
        driver.restore(&store, snapshot)?;
        driver.check(&store);
        driver.commit(&store, &mut Writer::new("b", random.next()), Ack::Durable)?;
        driver.check(&store);
        drop(store);
        let store = driver.open()?;
        driver.commit(&store, &mut Writer::new("c", random.next()), Ack::Durable)?;
        driver.check(&store);
        Ok(driver.into())
    });
}

/// Between two snapshots, and over a restore that went another way.
#[test]
fn a_restore_to_a_batch_survives() {
    suite("a_restore_to_a_batch_survives", options(), LEVELS, 2300, |driver, random| {
        let store = driver.open()?;
        let mut writer = Writer::new("a", random.next());
        for step in 0..6 {
            driver.commit(&store, &mut writer, Ack::Logged)?;
            if step == 1 {
                driver.snapshot(&store)?;
            }
        }
        driver.restore_to(&store, 3 + random.below(3) as u64)?;
        driver.check(&store);
        driver.commit(&store, &mut Writer::new("b", random.next()), Ack::Logged)?;
        driver.restore_to(&store, 2 + random.below(7) as u64)?;
        driver.check(&store);
        driver.commit(&store, &mut Writer::new("c", random.next()), Ack::Durable)?;
        driver.check(&store);
        drop(store);
        driver.check(&driver.open()?);
        Ok(driver.into())
    });
}

#[test]
fn a_store_opened_after_a_kill_survives() {
    suite("a_store_opened_after_a_kill_survives", options(), LEVELS, 2300, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        let store = driver.open()?;
        for _ in 0..5 {
            driver.commit(&store, &mut writer, Ack::Logged)?;
        }
        let second = driver.killed();
        drop(store);
        let store = second.open()?;
        second.commit(&store, &mut writer, Ack::Logged)?;
        second.snapshot(&store)?;
        second.commit(&store, &mut writer, Ack::Logged)?;
        let third = second.killed();
        drop(store);
        let store = third.open()?;
        for ack in [Ack::Logged, Ack::Durable, Ack::Logged] {
            third.commit(&store, &mut writer, ack)?;
        }
        third.snapshot(&store)?;
        third.commit(&store, &mut writer, Ack::Logged)?;
        third.check(&store);
        third.close(store)?;
        Ok(Lives(vec![driver, second, third]))
    });
}

/// Everything, in an order that the seed chooses, over several deaths and power cuts.
#[test]
fn anything_in_any_order_survives() {
    suite("anything_in_any_order_survives", options(), LEVELS, 2300, |mut driver, random| {
        let mut lives = Vec::new();
        let mut kept = Vec::new();
        for _life in 0..3 {
            let store = driver.open()?;
            driver.check(&store);
            let mut writer = Writer::new("a", random.next()).over(&driver.line());
            for _ in 0..6 {
                match random.below(8) {
                    0 => kept.push(driver.snapshot(&store)?),
                    1 if !kept.is_empty() => {
                        let at = kept[random.below(kept.len())].clone();
                        if store.snapshots().iter().any(|kept| kept.id == at.id) {
                            driver.restore(&store, at)?;
                            writer = writer.over(&driver.line());
                        }
                    }
                    2 | 3 => {
                        driver.commit(&store, &mut writer, Ack::Durable)?;
                    }
                    _ => {
                        driver.commit(&store, &mut writer, Ack::Logged)?;
                    }
                }
            }
            driver.check(&store);
            let next = match random.below(3) {
                0 => {
                    driver.close(store)?;
                    continue;
                }
                1 => driver.killed(),
                _ => driver.cut_off(),
            };
            lives.push(std::mem::replace(&mut driver, next));
        }
        lives.push(driver);
        Ok(Lives(lives))
    });
}
