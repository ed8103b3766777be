//! Crashes of a store whose tiers are too small for all pages. Commits evict pages, callers demote, promote
//! and prefetch pages, and snapshots and restarts happen in between.
//!
//! The store moves pages with its own batches, which the driver reads from the log. After a crash, each page
//! must be exactly in the place that the log states. Explored stores are opened without tiers, so that no
//! page moves any more. Opens with tiers, which may demote pages, are tested in `tiers::`.

use remanent::options::{MemoryOptions, Retention};
use remanent::tiers::Tiers;
use remanent::{Ack, Error, Options, PageId, Place, Store};

use super::model::{Act, Target};
use super::work::{Driver, Random};
use super::{Lives, options, suite};

const LEN: usize = 200;

/// Options with tiers for four pages, two pages, and the disk.
fn with_tiers(options: Options) -> Options {
    let len = LEN as u64;
    let memory = MemoryOptions::new().budget(Place::Host, 4 * len).budget(Place::Pinned, 2 * len);
    options.memory(memory).tiers(Tiers::new([Place::Host, Place::Pinned, Place::Disk]).free_part(4))
}

fn write(driver: &Driver, store: &Store, page: PageId, ack: Ack, random: &mut Random) -> Result<(), Error> {
    let write = Act::Write { page: Target::Page(page), offset: random.below(150), bytes: random.bytes(30) };
    driver.commit_acts(store, vec![write], ack).map(drop)
}

/// Pages are evicted because others are created, and return when they are read.
#[test]
fn evicted_pages_survive() {
    let options = options().retention(Retention::new().log_kept(1 << 30));
    suite(options.clone(), 2500, |driver, random| {
        let store = driver.open_with_tiers(with_tiers(options.clone()))?;
        let pages = driver.create_pages(&store, random, 6, LEN)?;
        write(&driver, &store, pages[0], Ack::Logged, random)?;
        driver.moved(&store, store.promote(&pages[..2])?, Ack::Logged)?;
        write(&driver, &store, pages[0], Ack::Durable, random)?;
        // Pages are written in their current places. The snapshot writes images of the pages on disk.
        pages[2..5].iter().try_for_each(|page| write(&driver, &store, *page, Ack::Logged, random))?;
        driver.snapshot(&store)?;
        // No image contains the content of these pages.
        write(&driver, &store, pages[5], Ack::Logged, random)?;
        driver.moved(&store, store.ensure(&pages[2..5], Place::Host)?, Ack::Durable)?;
        driver.create_pages(&store, random, 2, LEN)?;
        drop(store);
        let places: Vec<Place> = driver.line().last_state().pages.values().map(|page| page.place).collect();
        let is_there = |place| driver.disk.struck_at().is_some() || places.contains(&place);
        assert!([Place::Host, Place::Pinned, Place::Disk].into_iter().all(is_there), "{places:?}");
        Ok(driver.into())
    });
}

/// Calls demote, promote and prefetch pages, and the process is killed in between.
#[test]
fn demoted_and_prefetched_pages_survive() {
    let options = options().retention(Retention::new().log_kept(1 << 30).snapshots_kept(1));
    suite(options.clone(), 2500, |driver, random| {
        let tiers = with_tiers(options.clone());
        let store = driver.open_with_tiers(tiers.clone())?;
        let pages = driver.create_pages(&store, random, 4, LEN)?;
        store.demote(&pages[2..])?;
        write(&driver, &store, pages[2], Ack::Logged, random)?;
        store.demote(&pages)?;
        store.prefetch(&pages[..2], Place::Host)?.wait()?;
        // Write one page in memory, and one on disk, of which the snapshot writes an image.
        [1, 3].iter().try_for_each(|page| write(&driver, &store, pages[*page], Ack::Logged, random))?;
        driver.snapshot(&store)?;
        let second = driver.killed();
        drop(store);
        let store = second.open_with_tiers(tiers)?;
        store.prefetch(&pages, Place::Host)?.cancel()?;
        write(&second, &store, pages[3], Ack::Durable, random)?;
        second.moved(&store, store.ensure(&pages[..2], Place::Disk)?, Ack::Logged)?;
        second.moved(&store, store.promote(&pages[..2])?, Ack::Durable)?;
        write(&second, &store, pages[0], Ack::Logged, random)?;
        second.close(store)?;
        Ok(Lives(vec![driver, second]))
    });
}
