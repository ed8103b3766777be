//! Crashes of forks. A fork uses two directories, and either of them can crash.
//!
//! A fork writes nothing to its source, so a crash affects the source like any store. The source and the fork
//! share image files as hard links, and never write to these files again. The crashes of one disk therefore
//! do not depend on the state of the other, and each disk is explored separately.

use remanent::error::FileName;
use remanent::options::{ImageIo, Retention};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, Metadata, PageId, Store};

use super::model::{Act, Target};
use super::work::{Driver, Random};
use super::{Lives, images, suite};

/// Creates pages with images of a snapshot, two pages with images of a batch, and three pages that changed
/// later.
pub fn pages_to_share(driver: &Driver, store: &Store, random: &mut Random) -> Result<Vec<PageId>, Error> {
    let mut pages = driver.create_pages(store, random, 12, 300)?;
    driver.snapshot(store)?;
    let len = 6 << 10;
    let acts = (0..2).flat_map(|index| {
        let create = Act::Create { len, key: None, metadata: Metadata::new() };
        [create, Act::Write { page: Target::New(index), offset: 0, bytes: random.bytes(len) }]
    });
    pages.extend(driver.commit_acts(store, acts.collect(), Ack::Logged)?.1);
    driver.change(store, random, &pages[..3])?;
    Ok(pages)
}

/// Returns the number of image files that a fork linked.
fn linked(disk: &SimDisk) -> usize {
    disk.history().iter().filter(|event| event.starts_with("link pages/")).count()
}

/// Forks a closed store, then forks the fork. Meanwhile, the source removes the shared files.
#[test]
fn fork_is_complete_or_absent_and_source_unchanged() {
    suite(images(ImageIo::Direct).retention(Retention::new().snapshots_kept(1)), 5000, |driver, random| {
        let store = driver.open()?;
        let pages = pages_to_share(&driver, &store, random)?;
        let at = store.lsn().0;
        driver.change(&store, random, &pages[2..5])?;
        driver.close(store)?;
        let events = driver.disk.events();
        let fork = driver.fork(at, SimDisk::new())?;
        assert_eq!(driver.disk.events(), events, "a fork writes nothing into its source");
        assert_eq!(linked(&fork.disk), 2);

        // The source changes all pages, so its image files are removed.
        let store = driver.open()?;
        for _ in 0..2 {
            driver.change(&store, random, &pages)?;
            driver.snapshot(&store)?;
        }
        assert_eq!(driver.disk.bytes(FileName::Pages(1)), None);
        driver.check(&store);
        driver.close(store)?;

        // The fork can be used like any other store.
        let store = fork.open()?;
        fork.check(&store);
        fork.change(&store, random, &pages[4..7])?;
        fork.snapshot(&store)?;
        fork.change(&store, random, &pages[..2])?;
        let second = fork.fork(store.lsn().0, SimDisk::new())?;
        assert!(linked(&second.disk) >= 2);
        fork.restore_to(&store, at + 1)?;
        fork.check(&store);
        drop(store);
        let store = second.open()?;
        second.check(&store);
        second.change(&store, random, &pages)?;
        second.close(store)?;
        Ok(Lives(vec![driver, fork, second]))
    });
}
