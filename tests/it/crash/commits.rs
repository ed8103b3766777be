//! Crashes of commits: groups, changes of the segment, frames and pages of any length, and stores whose
//! process was killed earlier.

use crate::with_options::With;
use remanent::options::{ImageIo, LogIo, Retention};
use remanent::testing::sim_disk::Tears;
use remanent::{Ack, Metadata};

use super::explore::Level;
use super::model::{Act, Target};
use super::work::{Random, Writer, commit_concurrently};
use super::{Lives, images, options, suite, suite_at};

#[test]
fn durable_commits_survive() {
    suite(options(), 900, |driver, random| {
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
    suite(options(), 1300, |driver, random| {
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
    suite(options(), 1300, |driver, random| {
        let store = driver.open()?;
        let writers = [Writer::new("a", random.next()), Writer::new("b", random.next())];
        let ack = |step| if step % 3 == 2 { Ack::Durable } else { Ack::Logged };
        commit_concurrently(&driver, &store, writers, (0..8).map(ack), || Ok(()))?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    });
}

#[test]
fn segment_changes_survive() {
    suite(options(), 800, |driver, random| {
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

/// Segments grow, spares have many lengths, and one frame is too long for the first segments. Checks the
/// files after each step, and the store that the next open recovers from them.
#[test]
fn segments_that_grow_survive() {
    const LEN: usize = 400_000;
    let levels = [
        Level { tears: Tears::Few(2), images_max: 5, closely_of: 16, nest_of: 150 },
        Level { tears: Tears::None, images_max: 3, closely_of: 16, nest_of: 1 },
    ];
    suite_at(
        &levels,
        options()
            .retention(Retention::new().snapshots_kept(1))
            .with(|options| options.log.segment_len = 1 << 20),
        500,
        |driver, random| {
            let store = driver.open()?;
            let page = driver.create_pages(&store, random, 1, LEN)?[0];
            let write = |random: &mut Random, len: usize| {
                let bytes = random.bytes(64).into_iter().cycle().take(len).collect();
                vec![Act::Write { page: Target::Page(page), offset: random.below(LEN - len), bytes }]
            };
            for len in [90_000, 90_000, 90_000, 300_000, 90_000] {
                driver.commit_acts(&store, write(random, len), Ack::Logged)?;
            }
            driver.commit_acts(&store, write(random, 90_000), Ack::Durable)?;
            driver.check(&store);
            let second = driver.killed();
            drop(store);
            let store = second.open()?;
            for len in [90_000, 200_000] {
                second.commit_acts(&store, write(random, len), Ack::Durable)?;
            }
            // The snapshot turns obsolete segments into spares of many lengths for the next open.
            second.snapshot(&store)?;
            second.close(store)?;
            let store = second.open()?;
            for _ in 0..4 {
                second.commit_acts(&store, write(random, 90_000), Ack::Logged)?;
            }
            second.check(&store);
            second.close(store)?;
            Ok(Lives(vec![driver, second]))
        },
    );
}

/// The next opens reuse segments that a snapshot made obsolete, while these segments still contain their old
/// frames.
#[test]
fn opens_using_spares_survive() {
    suite(options().retention(Retention::new().snapshots_kept(1)), 900, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        let store = driver.open()?;
        for _ in 0..9 {
            driver.commit(&store, &mut writer, Ack::Durable)?;
        }
        driver.snapshot(&store)?;
        driver.close(store)?;
        for _ in 0..2 {
            let store = driver.open()?;
            driver.commit(&store, &mut writer, Ack::Logged)?;
            driver.commit(&store, &mut writer, Ack::Durable)?;
            driver.check(&store);
            driver.close(store)?;
        }
        let is_taken = |event: &String| event.contains(".spare to log/") && event.ends_with(".tmp");
        assert!(driver.disk.history().iter().any(is_taken), "no open took a spare");
        Ok(driver.into())
    });
}

/// With a direct log, no byte of a group is in a file before the group is synced. A logged batch is therefore
/// durable, even after a kill.
#[test]
fn direct_logs_survive() {
    suite(
        images(ImageIo::Direct).with(|options| options.log.io = Some(LogIo::Direct)),
        1200,
        |driver, random| {
            let store = driver.open()?;
            let writers = [Writer::new("a", random.next()), Writer::new("b", random.next())];
            let ack = |step| if step % 3 == 2 { Ack::Durable } else { Ack::Logged };
            commit_concurrently(&driver, &store, writers, (0..8).map(ack), || Ok(()))?;
            assert!(store.stats().log.rolls >= 1, "{:?}", store.stats().log);
            driver.snapshot(&store)?;
            driver.check(&store);
            let second = driver.killed();
            drop(store);
            let mut writer = Writer::new("c", random.next());
            let store = second.open()?;
            for _ in 0..4 {
                second.commit(&store, &mut writer, Ack::Logged)?;
            }
            second.check(&store);
            drop(store);
            Ok(Lives(vec![driver, second]))
        },
    );
}

#[test]
fn oversized_frame_survives() {
    suite(options(), 1400, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        let store = driver.open()?;
        driver.commit(&store, &mut writer, Ack::Logged)?;
        // Write all bytes except one, because a whole page would be written to an image file.
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
    suite(images(ImageIo::Mapped).retention(Retention::new().snapshots_kept(1)), 1400, |driver, random| {
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
        // The snapshot names one image of a batch. The other images are removed together with the log that
        // names them.
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

/// New and replaced pages from sources, together with deltas and other whole pages in one batch. The images
/// are written before the frame that names them.
#[test]
fn pages_from_sources_survive() {
    suite(images(ImageIo::Mapped).retention(Retention::new().snapshots_kept(1)), 1300, |driver, random| {
        let mut writer = Writer::new("a", random.next());
        let len = 6 << 10;
        let store = driver.open()?;
        driver.commit(&store, &mut writer, Ack::Logged)?;
        let mut stream = |len| Act::Stream { bytes: random.bytes(len) };
        // The second source is short, so its bytes are in the frame.
        let pages = vec![stream(len), stream(100), stream(len + 9)];
        let (_, pages) = driver.commit_acts(&store, pages, Ack::Logged)?;
        let (one, short) = (Target::Page(pages[0]), Target::Page(pages[1]));
        let mut replace = |page, len| Act::Replace { page, bytes: random.bytes(len) };
        driver.commit_acts(
            &store,
            vec![Act::Write { page: one, offset: 9, bytes: vec![1; 9] }, replace(short, len)],
            Ack::Durable,
        )?;
        driver.snapshot(&store)?;
        driver.commit_acts(&store, vec![replace(one, len / 2), replace(short, len)], Ack::Logged)?;
        driver.check(&store);
        let second = driver.killed();
        drop(store);
        let store = second.open()?;
        let whole = Act::Write { page: one, offset: 0, bytes: random.bytes(len / 2) };
        second.commit_acts(&store, vec![whole, Act::Stream { bytes: random.bytes(len) }], Ack::Logged)?;
        second.snapshot(&store)?;
        let replaced = Act::Replace { page: short, bytes: random.bytes(len + 1) };
        second.commit_acts(&store, vec![replaced, Act::Delete { page: one }], Ack::Durable)?;
        second.check(&store);
        second.close(store)?;
        Ok(Lives(vec![driver, second]))
    });
}

#[test]
fn a_store_opened_after_a_kill_survives() {
    suite(images(ImageIo::Mapped), 2700, |driver, random| {
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

/// Runs every operation, in random order, with several kills and power cuts.
#[test]
fn random_operations_survive() {
    suite(images(ImageIo::Direct), 2400, |mut driver, random| {
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
