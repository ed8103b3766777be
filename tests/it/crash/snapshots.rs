//! Crashes of snapshots, of the files that they share and replace, and of restores. Batches are committed while
//! snapshots are taken, so each image has its own Lsn, and replay skips the batches that an image includes (I2).

use remanent::options::{ImageIo, ImageOptions, MemoryOptions, PageLoad, Retention};
use remanent::{Ack, Error, Metadata, Place};

use super::model::{Act, Target};
use super::work::{Random, Writer, commit_concurrently};
use super::{Lives, images, options, suite};
use crate::faults::disk_full::{is_held, until};
use crate::with_options::With;

#[test]
fn snapshots_during_commits_survive() {
    suite(images(ImageIo::Mapped), 2100, |driver, random| {
        let store = driver.open()?;
        let (mut writer, other) = (Writer::new("a", random.next()), Writer::new("b", random.next()));
        for _ in 0..4 {
            driver.commit(&store, &mut writer, Ack::Logged)?;
        }
        commit_concurrently(&driver, &store, [other], [Ack::Logged; 10], || {
            (0..2).try_for_each(|_| {
                driver.snapshot(&store)?;
                driver.commit(&store, &mut writer, Ack::Logged).map(drop)
            })
        })?;
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

/// Several threads write a snapshot, each to its own file. A crash leaves any subset of these files. Each page is
/// longer than a chunk and written in pieces, and the header of its file is written last.
#[test]
fn snapshots_of_several_files_survive() {
    const LEN: usize = 400;
    suite(
        images(ImageIo::Direct)
            .retention(Retention::new().snapshots_kept(1))
            .with(|options| options.images.chunk_len = Some(LEN as u64 / 8)),
        1900,
        |driver, random| {
            let store = driver.open()?;
            let pages = driver.create_pages(&store, random, 6, LEN)?;
            driver.snapshot(&store)?;
            commit_concurrently(
                &driver,
                &store,
                [Writer::new("a", random.next())],
                [Ack::Logged; 3],
                || {
                    driver.change(&store, random, &pages[..4])?;
                    driver.snapshot(&store).map(drop)
                },
            )?;
            driver.change(&store, random, &pages[3..])?;
            driver.publish(&store)?;
            driver.check(&store);
            driver.close(store)?;
            let store = driver.open()?;
            driver.change(&store, random, &pages)?;
            driver.snapshot(&store)?;
            driver.check(&store);
            drop(store);
            Ok(driver.into())
        },
    );
}

/// Later snapshots overwrite the files that a snapshot frees, in every mode of writing images. Each batch changes all
/// pages, so each snapshot frees the files of the previous one.
fn image_files_written_again(io: ImageIo, at_least: usize) {
    const LEN: usize = 6000;
    suite(
        images(io)
            .retention(Retention::new().snapshots_kept(1))
            .with(|options| options.images.chunk_len = Some(LEN as u64)),
        at_least,
        |driver, random| {
            let store = driver.open()?;
            let pages = driver.create_pages(&store, random, 2, LEN)?;
            for _ in 0..3 {
                driver.change(&store, random, &pages)?;
                driver.snapshot(&store)?;
            }
            driver.check(&store);
            assert!(store.stats().snapshots.files_reused > 0 || driver.disk.struck_at().is_some());
            // The spare comes from an incarnation that was not closed, and the pages are longer and shorter than the
            // spare.
            let next = driver.killed();
            drop(store);
            let store = next.open()?;
            next.change(&store, random, &pages)?;
            next.snapshot(&store)?;
            assert!(store.stats().snapshots.files_reused > 0 || next.disk.struck_at().is_some());
            next.create_pages(&store, random, 1, LEN)?;
            next.change(&store, random, &pages)?;
            next.snapshot(&store)?;
            next.check(&store);
            drop(store);
            Ok(Lives(vec![driver, next]))
        },
    );
}

#[test]
fn mapped_image_files_written_again_survive() {
    image_files_written_again(ImageIo::Mapped, 600);
}

#[test]
fn buffered_image_files_written_again_survive() {
    image_files_written_again(ImageIo::Buffered, 600);
}

#[test]
fn direct_image_files_written_again_survive() {
    image_files_written_again(ImageIo::Direct, 600);
}

/// Background snapshots are taken whenever the growth of the log triggers one, while two threads commit.
#[test]
fn background_snapshots_during_commits_survive() {
    suite(options(), 3500, |driver, random| {
        let store = driver.open_with(options().with(|options| options.snapshots.log_bytes = Some(5000)))?;
        let writers = [Writer::new("a", random.next()), Writer::new("b", random.next())];
        commit_concurrently(&driver, &store, writers, [Ack::Logged; 6], || Ok(()))?;
        let mut writer = Writer::new("c", random.next());
        while store.stats().snapshots.taken < 2 {
            driver.commit(&store, &mut writer, Ack::Durable)?;
        }
        assert!(store.stats().snapshots.failed == 0 || driver.disk.struck_at().is_some());
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

/// Exact snapshots are taken while another thread commits. Each contains the state of its Lsn without the log.
#[test]
fn exact_snapshots_during_commits_survive() {
    suite(images(ImageIo::Direct), 1800, |driver, random| {
        let store = driver.open()?;
        let (mut writer, other) = (Writer::new("a", random.next()), Writer::new("b", random.next()));
        for _ in 0..3 {
            driver.commit(&store, &mut writer, Ack::Logged)?;
        }
        commit_concurrently(&driver, &store, [other], [Ack::Logged; 8], || {
            (0..2).try_for_each(|_| {
                driver.snapshot_exact(&store)?;
                driver.commit(&store, &mut writer, Ack::Logged).map(drop)
            })
        })?;
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}

/// Snapshots are durable before they are verified. The files that they replace are kept until then.
#[test]
fn snapshots_verified_in_the_background_survive() {
    suite(images(ImageIo::Mapped).retention(Retention::new().snapshots_kept(1)), 1300, |driver, random| {
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 3, 3000)?;
        for round in 0..4 {
            driver.publish(&store)?;
            driver.change(&store, random, &pages[..1 + round % 3])?;
        }
        store.wait_verified()?;
        driver.publish(&store)?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    });
}

/// Thin snapshots: the disk is full, all pages have changed, and each deleted page frees its space.
#[test]
fn thin_snapshots_on_a_full_disk_survive() {
    const LEN: usize = 20_000;
    const RESERVE: usize = 4;
    let reserve_bytes = RESERVE as u64 * (16 << 10);
    suite(
        images(ImageIo::Mapped)
            .retention(Retention::new().snapshots_kept(1))
            .with(|options| options.log.reserve_bytes = Some(reserve_bytes)),
        1300,
        |driver, random| {
            let store = driver.open()?;
            let mut pages = Vec::new();
            for _ in 0..4 {
                pages.extend(driver.create_pages(&store, random, 1, LEN)?);
                driver.snapshot(&store)?;
            }
            driver.change(&store, random, &pages)?;
            // When the disk becomes full, a segment under construction is discarded, which would leave space for all
            // images.
            until(|| is_held(&driver.disk, RESERVE) || driver.disk.struck_at().is_some());
            driver.disk.set_capacity(Some(driver.disk.used_bytes() + 4096));
            let mut thin = 0;
            for page in &pages[..3] {
                let before = store.snapshots().pop().expect("one is kept");
                driver.commit_acts(&store, vec![Act::Delete { page: Target::Page(*page) }], Ack::Durable)?;
                match driver.snapshot(&store) {
                    Ok(_) => {}
                    Err(Error::DiskFull { .. }) => {
                        let now = store.snapshots().pop().expect("one is kept");
                        thin += usize::from(now.redo == before.redo && now.end > before.end);
                    }
                    Err(error) => return Err(error),
                }
            }
            assert!(thin > 0 || driver.disk.struck_at().is_some());
            driver.check(&store);
            driver.disk.set_capacity(None);
            driver.close(store)?;
            let store = driver.open()?;
            driver.change(&store, random, &pages[3..])?;
            driver.snapshot(&store)?;
            driver.check(&store);
            drop(store);
            Ok(driver.into())
        },
    );
}

/// A store is used before its pages are loaded. Explores every crash of this store, and every such open after a crash.
#[test]
fn stores_loaded_on_demand_survive() {
    suite(
        options()
            .retention(Retention::new().snapshots_kept(1))
            .memory(MemoryOptions::new().load(PageLoad::OnDemand)),
        1900,
        |driver, random| {
            let store = driver.open()?;
            let pages = driver.create_pages(&store, random, 6, 3000)?;
            driver.snapshot(&store)?;
            let write = |page: usize, random: &mut Random| {
                vec![Act::Write { page: Target::Page(pages[page]), offset: 50, bytes: random.bytes(40) }]
            };
            driver.commit_acts(&store, write(0, random), Ack::Logged)?;
            driver.check(&store);
            let second = driver.killed();
            drop(store);
            let store = second.open()?;
            // Change an unloaded page, and take snapshots with calls and in the background.
            second.commit_acts(&store, write(5, random), Ack::Logged)?;
            second.snapshot(&store)?;
            second.commit_acts(&store, write(4, random), Ack::Durable)?;
            second.commit_acts(&store, vec![Act::Delete { page: Target::Page(pages[3]) }], Ack::Logged)?;
            second.snapshot(&store)?;
            let third = second.killed();
            drop(store);
            let store = third.open()?;
            third.commit_acts(&store, write(1, random), Ack::Logged)?;
            third.check(&store);
            third.close(store)?;
            Ok(Lives(vec![driver, second, third]))
        },
    );
}

/// Pages move between snapshots, during snapshots, and in batches with and without other changes. A restore then
/// returns to a state before the moves.
#[test]
fn moves_survive() {
    const PLACES: [Place; 3] = [Place::Pinned, Place::Device(0), Place::Host];
    // The restore returns to a state before the older of two snapshots.
    let options = options().retention(Retention::new().log_kept(1 << 30));
    suite(options, 2500, |driver, random| {
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 3, 200)?;
        let round = |number: usize, random: &mut Random| {
            let (page, place) = (Target::Page(pages[number % 3]), PLACES[number / 2 % 3]);
            let write = Act::Write { page, offset: number, bytes: random.bytes(20) };
            let to = Act::Move { page, place };
            let acts = match number % 4 {
                0 => vec![to],
                1 => vec![to, write],
                2 => vec![write, to],
                _ => vec![Act::Move { page, place: Place::Unified }, write, to],
            };
            driver.commit_acts(&store, acts, Ack::Logged).map(drop)
        };
        round(0, random)?;
        commit_concurrently(&driver, &store, [Writer::new("a", random.next())], [Ack::Logged; 4], || {
            driver.snapshot(&store)?;
            (1..5).try_for_each(|number| round(number, random))?;
            driver.snapshot_exact(&store)?;
            (5..8).try_for_each(|number| round(number, random))
        })?;
        driver.check(&store);
        driver.restore_to(&store, 5)?;
        driver.check(&store);
        round(9, random)?;
        driver.snapshot(&store)?;
        driver.close(store)?;
        Ok(driver.into())
    });
}

/// Pages are created on disk, or move to and from disk, between and during snapshots. A restore then returns to a state
/// before some of the moves.
#[test]
fn pages_on_disk_survive() {
    let options = options().retention(Retention::new().log_kept(1 << 30));
    suite(options, 3900, |driver, random| {
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 3, 200)?;
        let round = |number: usize, random: &mut Random| {
            let page = Target::Page(pages[number % 3]);
            let write = Act::Write { page, offset: number, bytes: random.bytes(20) };
            let place = if (number / 3).is_multiple_of(2) { Place::Disk } else { Place::Host };
            let to = Act::Move { page, place };
            let acts = if number.is_multiple_of(2) { vec![to, write] } else { vec![to] };
            driver.commit_acts(&store, acts, Ack::Logged)?;
            let write = Act::Write { page, offset: 2 * number, bytes: random.bytes(9) };
            driver.commit_acts(&store, vec![write], Ack::Logged).map(drop)
        };
        (0..3).try_for_each(|number| round(number, random))?;
        commit_concurrently(&driver, &store, [Writer::new("a", random.next())], [Ack::Logged; 4], || {
            driver.snapshot(&store)?;
            (3..5).try_for_each(|number| round(number, random))?;
            driver.snapshot_exact(&store)?;
            (6..8).try_for_each(|number| round(number, random))
        })?;
        driver.check(&store);
        driver.restore_to(&store, 5)?;
        driver.check(&store);
        round(12, random)?;
        driver.snapshot(&store)?;
        round(13, random)?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    });
}

/// Long pages on disk have small changes: successive overlays over one image, a restore to a state with an overlay, a
/// page with an overlay that leaves the disk, and image files that contain only the base of an overlay.
#[test]
fn overlays_survive() {
    const LEN: usize = 3000;
    let options = options()
        .retention(Retention::new().log_kept(1 << 30).snapshots_kept(1))
        .images(ImageOptions::new().chunk_len(4096));
    suite(options, 1500, |driver, random| {
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 2, LEN)?;
        let to = |place| pages.iter().map(|page| Act::Move { page: Target::Page(*page), place }).collect();
        driver.commit_acts(&store, to(Place::Disk), Ack::Logged)?;
        driver.snapshot(&store)?;
        let write = |page: usize, offset: usize, random: &mut Random| {
            let act = Act::Write { page: Target::Page(pages[page]), offset, bytes: random.bytes(30) };
            driver.commit_acts(&store, vec![act], Ack::Logged)
        };
        let mut written = Vec::new();
        for round in 0..3 {
            write(0, 700 * round + 5, random)?;
            write(1, 90 * round, random)?;
            written.push(driver.snapshot(&store)?.bytes_written);
        }
        assert!(
            driver.disk.struck_at().is_some() || written.iter().all(|bytes| *bytes < LEN as u64),
            "{written:?}"
        );
        let (before, _) = write(0, 2900, random)?;
        driver.check(&store);
        driver.close(store)?;
        let store = driver.open()?;
        driver.check(&store);
        driver.commit_acts(
            &store,
            vec![Act::Move { page: Target::Page(pages[1]), place: Place::Host }],
            Ack::Logged,
        )?;
        driver.snapshot(&store)?;
        driver.check(&store);
        driver.restore_to(&store, before.0 - 1)?;
        driver.check(&store);
        driver.snapshot(&store)?;
        driver.close(store)?;
        Ok(driver.into())
    });
}

/// Captures of pages on disk are stored in an image that the frame names, or in the frame. One page has moved to
/// memory.
#[test]
fn captured_pages_on_disk_survive() {
    suite(images(ImageIo::Mapped).retention(Retention::new().snapshots_kept(1)), 1500, |driver, random| {
        let len = 6 << 10;
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 2, len)?;
        let to = |page, place| Act::Move { page: Target::Page(page), place };
        let both = |place| vec![to(pages[0], place), to(pages[1], place)];
        driver.commit_acts(&store, both(Place::Disk), Ack::Logged)?;
        let capture = |page, random: &mut Random| Act::Capture { page, bytes: random.bytes(len) };
        driver.commit_acts(&store, vec![capture(pages[0], random)], Ack::Logged)?;
        let write = Act::Write { page: Target::Page(pages[0]), offset: 9, bytes: vec![1; 9] };
        driver.commit_acts(&store, vec![write, capture(pages[1], random)], Ack::Durable)?;
        driver.snapshot(&store)?;
        driver.check(&store);
        driver.commit_acts(&store, pages.iter().map(|page| capture(*page, random)).collect(), Ack::Logged)?;
        let second = driver.killed();
        drop(store);
        let store = second.open()?;
        second.check(&store);
        second.commit_acts(&store, vec![to(pages[1], Place::Host)], Ack::Logged)?;
        let captures = pages.iter().map(|page| capture(*page, random)).collect();
        second.commit_acts(&store, captures, Ack::Logged)?;
        second.snapshot(&store)?;
        second.commit_acts(&store, vec![capture(pages[0], random)], Ack::Durable)?;
        second.check(&store);
        second.close(store)?;
        Ok(Lives(vec![driver, second]))
    });
}

/// Crashes while compressed images are written and restored lose no batch and damage no page.
#[test]
fn compressed_images_survive() {
    suite(images(ImageIo::Mapped), 1400, |driver, random| {
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
    suite(images(ImageIo::Mapped).retention(Retention::new().snapshots_kept(2)), 5900, |driver, random| {
        let mut store = driver.open()?;
        let pages = driver.create_pages(&store, random, 24, 40)?;
        // Take more snapshots than a chain may have links, so that the chain is folded.
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
    });
}

#[test]
fn names_pruning_and_compaction_survive() {
    suite(images(ImageIo::Direct).retention(Retention::new().snapshots_kept(1)), 6500, |driver, random| {
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 30, 1000)?;
        let named = driver.snapshot_named(&store, "first")?;
        for part in pages.chunks(10).take(2) {
            driver.change(&store, random, part)?;
            driver.snapshot(&store)?;
        }
        assert_eq!(store.snapshots()[0].id, named.id);
        assert_eq!(driver.give_up(&store, "first", false)?, [named]);
        // Two thirds of the first image file are no longer named, so the next snapshot rewrites the rest.
        let emptying = driver.snapshot(&store)?;
        assert_eq!(emptying.bytes_written, 10 * 1000);
        driver.change(&store, random, &pages[..1])?;
        driver.snapshot(&store)?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    });
}

/// The newest snapshot is kept after its name was released, because the next snapshots follow it and share its images.
#[test]
fn dropped_names_survive_crash() {
    suite(images(ImageIo::Mapped).retention(Retention::new().snapshots_kept(2)), 2000, |driver, random| {
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 6, 400)?;
        let first = driver.snapshot_named(&store, "first")?;
        assert_eq!(driver.give_up(&store, "first", true)?, []);
        driver.change(&store, random, &pages[..2])?;
        driver.publish(&store)?;
        driver.change(&store, random, &pages[1..3])?;
        let second = driver.snapshot_named(&store, "second")?;
        assert_eq!(driver.give_up(&store, "first", true)?, [first]);
        assert_eq!(driver.give_up(&store, "second", true)?, []);
        driver.change(&store, random, &pages[2..4])?;
        driver.snapshot(&store)?;
        assert_eq!(driver.give_up(&store, "second", true)?, [second]);
        driver.change(&store, random, &pages[..1])?;
        driver.check(&store);
        driver.close(store)?;
        let store = driver.open()?;
        driver.change(&store, random, &pages[..1])?;
        driver.snapshot(&store)?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    });
}

/// A name is kept from the publication of its snapshot on, even if later snapshots are published before this one is
/// verified.
#[test]
fn names_of_published_snapshots_survive() {
    suite(images(ImageIo::Buffered).retention(Retention::new().snapshots_kept(1)), 2000, |driver, random| {
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 4, 400)?;
        driver.publish_named(&store, "first")?;
        driver.change(&store, random, &pages[..2])?;
        driver.publish_named(&store, "second")?;
        driver.change(&store, random, &pages[1..3])?;
        driver.publish(&store)?;
        driver.change(&store, random, &pages[..1])?;
        driver.publish_named(&store, "third")?;
        driver.change(&store, random, &pages[..1])?;
        driver.snapshot(&store)?;
        driver.give_up(&store, "second", true)?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    });
}

#[test]
fn replaced_snapshot_files_are_recycled() {
    suite(images(ImageIo::Direct).retention(Retention::new().snapshots_kept(2)), 1900, |driver, random| {
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
    });
}

#[test]
fn a_restore_survives() {
    suite(images(ImageIo::Mapped), 1400, |driver, random| {
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

/// Opens a view between two snapshots, and a view of a state from before a restore.
#[test]
fn a_restore_to_a_batch_survives() {
    suite(images(ImageIo::Direct), 1800, |driver, random| {
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
