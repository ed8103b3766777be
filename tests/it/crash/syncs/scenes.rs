//! The workloads in which a sync is omitted. Each workload states the first event whose crashes are checked.

use remanent::disk::Disk;
use remanent::error::{FileName, Folder};
use remanent::testing::sim_disk::{DiskFault, ENOSPC, Operation, SimDisk};
use remanent::{Ack, Error, Metadata, Options, Store};

use super::super::forks::pages_to_share;
use super::super::model::{Act, Line, Target};
use super::super::work::{Driver, Floors, Random, Writer};
use super::rule::Rule;

/// The length of a chain of links that the next snapshot folds into one.
const LINKS_MAX: usize = 8;

/// The disk options and the rule of a workload.
pub struct Bench {
    options: Options,
    /// The sync to omit. With `None`, the same workload must cause no violation.
    rule: Option<Rule>,
    /// The first event that the missing sync may affect.
    pub from: usize,
}

impl Bench {
    pub fn new(options: Options, rule: Option<Rule>) -> Self {
        Self { options, rule, from: 0 }
    }

    /// Returns the store after another scene that omitted no sync.
    fn after_scene(&self, scene: fn(&mut Bench) -> Result<Driver, Error>) -> Result<Driver, Error> {
        scene(&mut Bench::new(self.options.clone(), None))
    }

    fn new_store(&self) -> Driver {
        Driver::new(SimDisk::new(), self.options.clone(), Line::default(), Floors::default())
    }

    /// Returns a store whose process was killed after a logged commit. The log has the current segment and
    /// one more, so an open has nothing to clean up.
    fn killed_store(&self) -> Result<Driver, Error> {
        let driver = self.new_store();
        // Permit three files: the opening segment, the next segment, and STORE. The log thread cannot create
        // another segment.
        no_files_after(&driver.disk, 3);
        let store = driver.open()?;
        // Make only one commit, so that the segment has space for it however often the log thread syncs and
        // seals in the meantime.
        driver.commit(&store, &mut Writer::new("before", 1), Ack::Logged)?;
        let killed = driver.killed();
        drop(store);
        Ok(killed)
    }

    /// Returns such a store with two spare segments, which contain bytes of earlier segments.
    fn killed_store_with_spares(&self) -> Result<Driver, Error> {
        let driver = self.killed_store()?;
        for number in 0..2 {
            let spare = driver.disk.create(FileName::Spare(number))?;
            spare.write_at(0, &[0xee; 16 << 10])?;
            spare.sync()?;
        }
        driver.disk.sync_folder(Folder::Log)?;
        Ok(driver)
    }

    /// Omits the selected sync from now on.
    fn leave_out(&mut self, disk: &SimDisk) {
        self.from = disk.events();
        if let Some(rule) = self.rule {
            disk.skip_syncs(rule.chooses());
        }
    }

    /// Omits the sync from now on, opens the store and makes `commits` durable commits.
    fn open_and_commit(&mut self, driver: Driver, commits: usize) -> Result<Driver, Error> {
        self.leave_out(&driver.disk);
        let store = driver.open()?;
        commit_durably(&driver, &store, commits)?;
        drop(store);
        Ok(driver)
    }
}

/// Lets the disk create `count` more files, and makes every later creation fail.
fn no_files_after(disk: &SimDisk, count: usize) {
    disk.fail(DiskFault { operation: Operation::Create, skip: count, times: usize::MAX, errno: ENOSPC });
}

/// Makes `count` durable commits, three of which fill a segment.
fn commit_durably(driver: &Driver, store: &Store, count: usize) -> Result<(), Error> {
    let mut writer = Writer::new("durable", 2);
    (0..count).try_for_each(|_| driver.commit(store, &mut writer, Ack::Durable).map(drop))
}

/// Commits a batch whose frame is longer than a usual segment. It writes all bytes of a page except one,
/// because a whole-page write would go to an image file.
fn commit_a_long_frame(driver: &Driver, store: &Store) -> Result<(), Error> {
    commit_a_page(driver, store, 1)
}

/// Commits a batch that creates a page and writes its bytes from `offset` on.
fn commit_a_page(driver: &Driver, store: &Store, offset: usize) -> Result<(), Error> {
    let page = Target::New(0);
    let len = 20 << 10;
    let create = Act::Create { len, key: None, metadata: Metadata::new() };
    let write = Act::Write { page, offset, bytes: (offset..len).map(|at| at as u8 | 1).collect() };
    driver.commit_acts(store, vec![create, write], Ack::Durable).map(drop)
}

/// Creates a store and commits.
pub fn creation(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    bench.open_and_commit(driver, 1)
}

/// Creates a store and fills segments until the second segment is no longer the newest, because a bad header
/// of the newest segment is harmless.
pub fn rolling_at_once(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    bench.open_and_commit(driver, 8)
}

/// Creates a store over the files of a creation that was interrupted just before STORE was renamed.
pub fn second_creation(bench: &mut Bench) -> Result<Driver, Error> {
    let first = bench.new_store();
    drop(first.open()?);
    let driver = first.killed_after("sync 0000000000000000.tmp");
    bench.open_and_commit(driver, 1)
}

/// Opens a killed store and commits. The log thread creates no segment, because its sync of the folder would
/// hide a missing sync.
pub fn opening(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.killed_store()?;
    no_files_after(&driver.disk, 2);
    bench.open_and_commit(driver, 1)
}

/// Like [`opening`], but with spare segments, which become the first two segments of the new incarnation.
pub fn opening_with_spares(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.killed_store_with_spares()?;
    no_files_after(&driver.disk, 0);
    bench.open_and_commit(driver, 1)
}

/// Like [`opening_with_spares`], but also fills segments.
pub fn rolling_with_spares(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.killed_store_with_spares()?;
    bench.open_and_commit(driver, 9)
}

/// Opens a store that was killed after a segment of an open was renamed and before its folder was synced.
pub fn opening_after_an_opening(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.after_scene(opening)?.killed_after("rename log/");
    bench.open_and_commit(driver, 1)
}

/// Opens a store that was killed after STORE was renamed and before its folder was synced.
pub fn opening_after_the_creation(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.after_scene(creation)?.killed_after("rename 0000000000000000.tmp");
    bench.open_and_commit(driver, 1)
}

/// Opens a store that was killed after a manifest was renamed and before its folder was synced. Then commits
/// and takes another snapshot.
pub fn opening_after_a_publish(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.after_scene(first_snapshot)?.killed_after("rename snapshots/");
    bench.leave_out(&driver.disk);
    let store = driver.open()?;
    commit_durably(&driver, &store, 4)?;
    driver.snapshot(&store)?;
    commit_durably(&driver, &store, 1)?;
    drop(store);
    Ok(driver)
}

/// Opens a killed store and fills segments.
pub fn rolling(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.killed_store()?;
    bench.open_and_commit(driver, 9)
}

/// Commits batches to an open store.
pub fn committing(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    bench.leave_out(&driver.disk);
    commit_durably(&driver, &store, 2)?;
    drop(store);
    Ok(driver)
}

/// Commits a frame that is longer than a segment to a new store. The log thread creates no later segment,
/// because its sync of the folder would hide a missing sync.
pub fn long_frame(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    bench.leave_out(&driver.disk);
    no_files_after(&driver.disk, 5);
    let store = driver.open()?;
    commit_a_long_frame(&driver, &store)?;
    drop(store);
    Ok(driver)
}

/// Commits a batch that writes a whole page.
pub fn whole_page(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    bench.leave_out(&driver.disk);
    commit_a_page(&driver, &store, 0)?;
    commit_durably(&driver, &store, 1)?;
    drop(store);
    Ok(driver)
}

/// Takes snapshots and fills segments between them, so that recycled segments are reused.
pub fn recycling_rounds(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    bench.leave_out(&driver.disk);
    let store = driver.open()?;
    for _ in 0..3 {
        let mut writer = Writer::new("round", store.lsn().0);
        for _ in 0..8 {
            driver.commit(&store, &mut writer, Ack::Durable)?;
        }
        driver.snapshot(&store)?;
    }
    drop(store);
    Ok(driver)
}

/// Opens a killed store, commits until the log thread has filled the reserve, and then commits some more.
pub fn filling_the_reserve(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.killed_store()?;
    bench.leave_out(&driver.disk);
    let store = driver.open()?;
    let mut writer = Writer::new("durable", 2);
    while !driver.disk.history().iter().any(|event| event.ends_with(".spare")) {
        driver.commit(&store, &mut writer, Ack::Durable)?;
    }
    for _ in 0..6 {
        driver.commit(&store, &mut writer, Ack::Durable)?;
    }
    drop(store);
    Ok(driver)
}

/// Takes the first snapshot of a store whose log has several segments.
pub fn first_snapshot(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    commit_durably(&driver, &store, 8)?;
    bench.leave_out(&driver.disk);
    driver.snapshot(&store)?;
    driver.commit(&store, &mut Writer::new("more", 3), Ack::Durable)?;
    drop(store);
    Ok(driver)
}

/// Takes a snapshot, commits, and takes a second one, which replaces the first.
pub fn second_snapshot(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    // The page has content, so that both snapshots have an image.
    commit_a_long_frame(&driver, &store)?;
    driver.snapshot(&store)?;
    let mut writer = Writer::new("more", 3);
    for _ in 0..5 {
        driver.commit(&store, &mut writer, Ack::Durable)?;
    }
    // Change most pages, so that the second snapshot is not based on the first.
    let page = Target::Page(store.pages()?.next().expect("a page").page);
    let fill = Act::Fill { page, offset: 0, len: 4, pattern: vec![7; 4] };
    driver.commit_acts(&store, vec![fill], Ack::Durable)?;
    bench.leave_out(&driver.disk);
    driver.snapshot(&store)?;
    driver.commit(&store, &mut writer, Ack::Durable)?;
    drop(store);
    Ok(driver)
}

/// Takes three snapshots that contain all pages. The third overwrites the file that the second freed.
pub fn writing_again(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    commit_a_long_frame(&driver, &store)?;
    let page = Target::Page(store.pages()?.next().expect("a page").page);
    for round in 0..3 {
        let fill = Act::Fill { page, offset: 0, len: 4, pattern: vec![round; 4] };
        driver.commit_acts(&store, vec![fill], Ack::Durable)?;
        if round == 2 {
            bench.leave_out(&driver.disk);
        }
        driver.snapshot(&store)?;
    }
    assert_eq!(store.stats().snapshots.files_reused, 1);
    driver.commit(&store, &mut Writer::new("more", 3), Ack::Durable)?;
    drop(store);
    Ok(driver)
}

/// Restores the state of a snapshot.
pub fn restoring(bench: &mut Bench) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    commit_durably(&driver, &store, 3)?;
    let snapshot = driver.snapshot(&store)?;
    let mut writer = Writer::new("left", 3);
    for _ in 0..2 {
        driver.commit(&store, &mut writer, Ack::Durable)?;
    }
    bench.leave_out(&driver.disk);
    driver.restore(&store, snapshot)?;
    driver.commit(&store, &mut Writer::new("on", 4), Ack::Durable)?;
    drop(store);
    Ok(driver)
}

/// Takes a snapshot, which is the base of a chain, and another one whose manifest names only the changes.
pub fn change_link(bench: &mut Bench) -> Result<Driver, Error> {
    following_snapshots(bench, 1)
}

/// Takes snapshots until their chain has the maximum length, and then one that folds the chain.
pub fn folding(bench: &mut Bench) -> Result<Driver, Error> {
    following_snapshots(bench, LINKS_MAX)
}

/// Takes `count` snapshots. The sync is omitted in or after the last one.
fn following_snapshots(bench: &mut Bench, count: usize) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    let random = &mut Random(5);
    let pages = driver.create_pages(&store, random, 24, 40)?;
    driver.snapshot(&store)?;
    for round in 1..=count {
        driver.change(&store, random, &pages[round..=round])?;
        if round == count {
            bench.leave_out(&driver.disk);
        }
        driver.snapshot(&store)?;
    }
    commit_durably(&driver, &store, 1)?;
    drop(store);
    Ok(driver)
}

/// Forks a store to an empty disk.
pub fn forking(bench: &mut Bench) -> Result<Driver, Error> {
    let source = bench.new_store();
    let store = source.open()?;
    pages_to_share(&source, &store, &mut Random(6))?;
    let at = store.lsn().0;
    source.close(store)?;
    let target = SimDisk::new();
    bench.leave_out(&target);
    source.fork(at, target)
}
