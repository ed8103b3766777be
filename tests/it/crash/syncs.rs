//! Every sync, left out: behind each acknowledgement stands a chain of syncs, and this table leaves out one
//! of them at a time. The crashes of the same work must then show a loss, or the engine must notice on the
//! spot, because it reads back past the cache what it depends on. Where a sync cannot matter the row says
//! why, and the same enumeration finds nothing.

use std::fmt;

use remanent::disk::sim::{Fault, Operation, SimDisk, SyncPoint, Tears};
use remanent::{Ack, Error, FileName, Folder, Metadata, Options};

use super::explore::{Explorer, Level, Violation};
use super::model::{Act, Line, Target};
use super::options;
use super::work::{Driver, Floors, Writer};

/// What becomes of a sync that is left out.
enum Fate {
    /// Something acknowledged is lost, or a sound store is refused.
    Seen,
    /// The engine reads back past the cache what it has written, and stops.
    NoticedAtOnce,
    /// Nothing: this is why.
    Harmless(&'static str),
}
use Fate::{Harmless, NoticedAtOnce, Seen};

struct Row {
    sync: &'static str,
    options: Options,
    work: fn(&mut Bench) -> Result<Driver, Error>,
    fate: Fate,
}

/// Where a row's work is done.
struct Bench {
    options: Options,
    /// Whether the sync is really left out; else the same work must be beyond reproach.
    armed: bool,
    /// The first event that may suffer from it.
    from: usize,
}

impl Bench {
    fn new_store(&self) -> Driver {
        Driver::new(SimDisk::new(), self.options.clone(), Line::default(), Floors::default())
    }

    /// A store as a death of the process left it, with a commit that is logged at least. Its log has the
    /// current segment and one more, so that an open finds nothing to tidy up.
    fn killed_store(&self) -> Result<Driver, Error> {
        let driver = self.new_store();
        // The opening segment, the one after it, STORE; the keeper gets no further segment.
        no_files_after(&driver.disk, 3);
        let store = driver.open()?;
        // One, so that there is room for it however often the keeper syncs and seals meanwhile.
        driver.commit(&store, &mut Writer::new("before", 1), Ack::Logged)?;
        let killed = driver.killed();
        drop(store);
        Ok(killed)
    }

    /// From now on leaves out the syncs that the rule chooses.
    fn leave_out(&mut self, driver: &Driver, rule: impl FnMut(SyncPoint) -> bool + Send + 'static) {
        self.from = driver.disk.events();
        if self.armed {
            driver.disk.skip_syncs(rule);
        }
    }
}

/// Lets the disk make so many more files, and none after them.
fn no_files_after(disk: &SimDisk, count: usize) {
    const ENOSPC: i32 = remanent::disk::sim::ENOSPC;
    disk.fail(Fault { operation: Operation::Create, skip: count, times: usize::MAX, errno: ENOSPC });
}

/// The `n`-th sync of a kind, from 1.
fn nth(n: usize, kind: impl Fn(SyncPoint) -> bool) -> impl FnMut(SyncPoint) -> bool {
    let mut seen = 0;
    move |point| {
        seen += usize::from(kind(point));
        kind(point) && seen == n
    }
}

/// The first sync of a kind after the `n`-th of another.
fn after(
    n: usize,
    other: impl Fn(SyncPoint) -> bool,
    kind: impl Fn(SyncPoint) -> bool,
) -> impl FnMut(SyncPoint) -> bool {
    let (mut seen, mut done) = (0, false);
    move |point| {
        let hit = seen >= n && !done && kind(point);
        done |= hit;
        seen += usize::from(other(point));
        hit
    }
}

fn window(point: SyncPoint) -> bool {
    matches!(point, SyncPoint::Window(_))
}

fn images(point: SyncPoint) -> bool {
    matches!(point, SyncPoint::File(FileName::Pages(_)))
}

fn folder(folder: Folder) -> impl Fn(SyncPoint) -> bool + Copy {
    move |point| point == SyncPoint::Folder(folder)
}

fn temporary(folder: Folder) -> impl Fn(SyncPoint) -> bool + Copy {
    move |point| matches!(point, SyncPoint::File(FileName::Temporary(of, _)) if of == folder)
}

fn temporary_segment(number: u64) -> impl Fn(SyncPoint) -> bool + Copy {
    move |point| point == SyncPoint::File(FileName::Temporary(Folder::Log, number))
}

/// So many durable commits: three fill a segment.
fn commit_durably(driver: &Driver, store: &remanent::Store, count: usize) -> Result<(), Error> {
    let mut writer = Writer::new("durable", 2);
    (0..count).try_for_each(|_| driver.commit(store, &mut writer, Ack::Durable).map(drop))
}

/// A batch that no usual segment has room for. It writes all bytes of its page but one: those of a whole page
/// would go to an image file.
fn commit_a_long_frame(driver: &Driver, store: &remanent::Store) -> Result<(), Error> {
    commit_a_page(driver, store, 1)
}

/// A batch that creates a page and writes its bytes from an offset on.
fn commit_a_page(driver: &Driver, store: &remanent::Store, offset: usize) -> Result<(), Error> {
    let page = Target::New(0);
    let len = 20 << 10;
    let create = Act::Create { len, key: None, metadata: Metadata::new() };
    let write = Act::Write { page, offset, bytes: (offset..len).map(|at| at as u8 | 1).collect() };
    driver.commit_acts(store, vec![create, write], Ack::Durable).map(drop)
}

/// Commits a batch that writes a whole page; leaves out what the rule chooses.
fn whole_page(
    bench: &mut Bench,
    rule: impl FnMut(SyncPoint) -> bool + Send + 'static,
) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    bench.leave_out(&driver, rule);
    commit_a_page(&driver, &store, 0)?;
    commit_durably(&driver, &store, 1)?;
    drop(store);
    Ok(driver)
}

/// One snapshot, then commits, then leaves out what the rule chooses during a second snapshot, which
/// replaces the first.
fn second_snapshot(
    bench: &mut Bench,
    rule: impl FnMut(SyncPoint) -> bool + Send + 'static,
) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    // A page with bytes, so that both snapshots have an image.
    commit_a_long_frame(&driver, &store)?;
    driver.snapshot(&store)?;
    let mut writer = Writer::new("more", 3);
    for _ in 0..5 {
        driver.commit(&store, &mut writer, Ack::Durable)?;
    }
    // Most pages changed, so that the second snapshot does not follow the first.
    let page = Target::Page(store.pages()?[0].page);
    let fill = Act::Fill { page, offset: 0, len: 4, pattern: vec![7; 4] };
    driver.commit_acts(&store, vec![fill], Ack::Durable)?;
    bench.leave_out(&driver, rule);
    driver.snapshot(&store)?;
    driver.commit(&store, &mut writer, Ack::Durable)?;
    drop(store);
    Ok(driver)
}

/// The first snapshot of a store whose log has several segments; leaves out what the rule chooses.
fn first_snapshot(
    bench: &mut Bench,
    rule: impl FnMut(SyncPoint) -> bool + Send + 'static,
) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    commit_durably(&driver, &store, 8)?;
    bench.leave_out(&driver, rule);
    driver.snapshot(&store)?;
    driver.commit(&store, &mut Writer::new("more", 3), Ack::Durable)?;
    drop(store);
    Ok(driver)
}

/// Creates a store and commits; leaves out what the rule chooses.
fn creation(
    bench: &mut Bench,
    rule: impl FnMut(SyncPoint) -> bool + Send + 'static,
) -> Result<Driver, Error> {
    let driver = bench.new_store();
    bench.leave_out(&driver, rule);
    let store = driver.open()?;
    commit_durably(&driver, &store, 1)?;
    drop(store);
    Ok(driver)
}

/// Creates a store over what a creation left that was cut short just before STORE got its name.
fn second_creation(
    bench: &mut Bench,
    rule: impl FnMut(SyncPoint) -> bool + Send + 'static,
) -> Result<Driver, Error> {
    let first = bench.new_store();
    drop(first.open()?);
    let driver = first.killed_after("sync 0000000000000000.tmp");
    bench.leave_out(&driver, rule);
    let store = driver.open()?;
    commit_durably(&driver, &store, 1)?;
    drop(store);
    Ok(driver)
}

/// Opens a killed store and commits; leaves out what the rule chooses. The keeper makes no segment: its
/// sync of the folder would make up for one that was left out.
fn opening(bench: &mut Bench, rule: impl FnMut(SyncPoint) -> bool + Send + 'static) -> Result<Driver, Error> {
    let driver = bench.killed_store()?;
    no_files_after(&driver.disk, 2);
    bench.leave_out(&driver, rule);
    let store = driver.open()?;
    commit_durably(&driver, &store, 1)?;
    drop(store);
    Ok(driver)
}

/// Opens a killed store and fills segments; leaves out what the rule chooses.
fn rolling(bench: &mut Bench, rule: impl FnMut(SyncPoint) -> bool + Send + 'static) -> Result<Driver, Error> {
    let driver = bench.killed_store()?;
    bench.leave_out(&driver, rule);
    let store = driver.open()?;
    commit_durably(&driver, &store, 9)?;
    drop(store);
    Ok(driver)
}

/// Opens a killed store and commits until the keeper has found the time to fill the reserve, and on; leaves
/// out what the rule chooses.
fn filling_the_reserve(
    bench: &mut Bench,
    rule: impl FnMut(SyncPoint) -> bool + Send + 'static,
) -> Result<Driver, Error> {
    let driver = bench.killed_store()?;
    bench.leave_out(&driver, rule);
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

/// Opens a store that was killed between the renaming of a manifest and the sync of its folder, commits,
/// and takes another snapshot; leaves out what the rule chooses.
fn opening_after_a_publish(
    bench: &mut Bench,
    rule: impl FnMut(SyncPoint) -> bool + Send + 'static,
) -> Result<Driver, Error> {
    let first =
        first_snapshot(&mut Bench { armed: false, options: bench.options.clone(), from: 0 }, |_| false)?;
    let driver = first.killed_after("rename snapshots/");
    bench.leave_out(&driver, rule);
    let store = driver.open()?;
    commit_durably(&driver, &store, 4)?;
    driver.snapshot(&store)?;
    commit_durably(&driver, &store, 1)?;
    drop(store);
    Ok(driver)
}

/// Goes back to a snapshot; leaves out what the rule chooses.
fn restoring(
    bench: &mut Bench,
    rule: impl FnMut(SyncPoint) -> bool + Send + 'static,
) -> Result<Driver, Error> {
    let driver = bench.new_store();
    let store = driver.open()?;
    commit_durably(&driver, &store, 3)?;
    let snapshot = driver.snapshot(&store)?;
    let mut writer = Writer::new("left", 3);
    for _ in 0..2 {
        driver.commit(&store, &mut writer, Ack::Durable)?;
    }
    bench.leave_out(&driver, rule);
    driver.restore(&store, snapshot)?;
    driver.commit(&store, &mut Writer::new("on", 4), Ack::Durable)?;
    drop(store);
    Ok(driver)
}

fn rows() -> Vec<Row> {
    let usual = options;
    // One snapshot kept: what it replaces is gone as soon as possible.
    let one = || options().snapshots_kept(1);
    let spare = || options().reserve_bytes(16 << 10);
    let row = |sync, options, work, fate| Row { sync, options, work, fate };
    vec![
        // Creation.
        row("folders of a new store", usual(), |b| creation(b, nth(1, folder(Folder::Root))), Seen),
        row("first opening segment", usual(), |b| creation(b, nth(1, temporary(Folder::Log))), NoticedAtOnce),
        row(
            "first empty segment",
            usual(),
            |b| {
                let driver = b.new_store();
                b.leave_out(&driver, nth(2, temporary(Folder::Log)));
                let store = driver.open()?;
                // Until it is not the newest any more: before that, a bad header of it is harmless.
                commit_durably(&driver, &store, 8)?;
                drop(store);
                Ok(driver)
            },
            Seen,
        ),
        row("STORE", usual(), |b| creation(b, nth(1, temporary(Folder::Root))), Seen),
        row("name of STORE", usual(), |b| creation(b, nth(2, folder(Folder::Root))), Seen),
        row(
            "removal of an unfinished creation's segments",
            usual(),
            |b| second_creation(b, nth(1, folder(Folder::Log))),
            Harmless("the new segments get the same names, and their folder is synced before STORE is there"),
        ),
        row(
            "removal of an unfinished creation's images",
            usual(),
            |b| second_creation(b, nth(1, folder(Folder::Pages))),
            Harmless("there are only temporary files to remove, which are nobody's"),
        ),
        row(
            "removal of an unfinished creation's manifests",
            usual(),
            |b| second_creation(b, nth(1, folder(Folder::Snapshots))),
            Harmless("there are only temporary files to remove, which are nobody's"),
        ),
        // Opening.
        row(
            "names in log/ at open",
            usual(),
            |b| {
                // Killed between the renaming of an opening segment and the sync of its folder.
                let second =
                    opening(&mut Bench { armed: false, options: b.options.clone(), from: 0 }, |_| false)?;
                let driver = second.killed_after("rename log/");
                b.leave_out(&driver, nth(1, folder(Folder::Log)));
                let store = driver.open()?;
                commit_durably(&driver, &store, 1)?;
                drop(store);
                Ok(driver)
            },
            Harmless("nothing depends on them before the name of the segment after the opening is synced"),
        ),
        row(
            "names in the store directory at open",
            usual(),
            |b| {
                let first =
                    creation(&mut Bench { armed: false, options: b.options.clone(), from: 0 }, |_| false)?;
                let driver = first.killed_after("rename 0000000000000000.tmp");
                b.leave_out(&driver, nth(1, folder(Folder::Root)));
                let store = driver.open()?;
                commit_durably(&driver, &store, 1)?;
                drop(store);
                Ok(driver)
            },
            Seen,
        ),
        row(
            "names in pages/ at open",
            one(),
            |b| opening_after_a_publish(b, nth(1, folder(Folder::Pages))),
            Harmless("whatever names an image or a table is written only after their names are durable"),
        ),
        row(
            "names in snapshots/ at open",
            one(),
            |b| opening_after_a_publish(b, nth(1, folder(Folder::Snapshots))),
            Harmless("a manifest that no seal records is published anew, folder and all"),
        ),
        row(
            "manifest published anew",
            one(),
            |b| opening_after_a_publish(b, nth(1, temporary(Folder::Snapshots))),
            NoticedAtOnce,
        ),
        row(
            "name of a manifest published anew",
            one(),
            |b| opening_after_a_publish(b, nth(2, folder(Folder::Snapshots))),
            Harmless("the name was synced at open, and both files say the same"),
        ),
        row("opening segment", usual(), |b| opening(b, nth(1, temporary(Folder::Log))), NoticedAtOnce),
        row("segment after the opening", usual(), |b| rolling(b, nth(2, temporary(Folder::Log))), Seen),
        row(
            "name of the segment after the opening",
            usual(),
            |b| opening(b, nth(2, folder(Folder::Log))),
            Seen,
        ),
        row("name of the opening segment", usual(), |b| opening(b, nth(3, folder(Folder::Log))), Seen),
        // Commits and rolls.
        row(
            "group",
            usual(),
            |b| {
                let driver = b.new_store();
                let store = driver.open()?;
                b.leave_out(&driver, nth(1, window));
                commit_durably(&driver, &store, 2)?;
                drop(store);
                Ok(driver)
            },
            Seen,
        ),
        row("segment made ahead", usual(), |b| rolling(b, nth(3, temporary(Folder::Log))), Seen),
        row("name of a segment made ahead", usual(), |b| rolling(b, nth(4, folder(Folder::Log))), Seen),
        row(
            "long segment",
            usual(),
            |b| {
                let driver = b.new_store();
                b.leave_out(&driver, nth(2, temporary_segment(2)));
                let store = driver.open()?;
                commit_a_long_frame(&driver, &store)?;
                drop(store);
                Ok(driver)
            },
            Seen,
        ),
        row(
            "name of a long segment",
            usual(),
            |b| {
                let driver = b.new_store();
                b.leave_out(&driver, after(2, temporary_segment(2), folder(Folder::Log)));
                // The keeper's next segment would sync the folder.
                no_files_after(&driver.disk, 5);
                let store = driver.open()?;
                commit_a_long_frame(&driver, &store)?;
                drop(store);
                Ok(driver)
            },
            Seen,
        ),
        row(
            "spare that becomes a segment",
            one(),
            |b| {
                let driver = b.new_store();
                b.leave_out(&driver, nth(1, |point| matches!(point, SyncPoint::File(FileName::Spare(_)))));
                let store = driver.open()?;
                for _ in 0..3 {
                    let lsn = store.lsn().0;
                    let mut writer = Writer::new("round", lsn);
                    for _ in 0..8 {
                        driver.commit(&store, &mut writer, Ack::Durable)?;
                    }
                    driver.snapshot(&store)?;
                }
                drop(store);
                Ok(driver)
            },
            Seen,
        ),
        row(
            "spare of the reserve",
            spare(),
            |b| filling_the_reserve(b, nth(1, temporary_segment(0))),
            Harmless("it holds nothing, and is synced as a whole when it becomes a segment"),
        ),
        row(
            "name of a spare of the reserve",
            spare(),
            |b| filling_the_reserve(b, after(1, temporary_segment(0), folder(Folder::Log))),
            Harmless("a spare that is lost costs nothing, and its next name includes the first"),
        ),
        row("images of a batch", usual(), |b| whole_page(b, nth(1, images)), Seen),
        row("name of a batch's image file", usual(), |b| whole_page(b, nth(1, folder(Folder::Pages))), Seen),
        // Snapshots.
        row("images", one(), |b| first_snapshot(b, nth(1, images)), NoticedAtOnce),
        row("name of the image file", one(), |b| first_snapshot(b, nth(1, folder(Folder::Pages))), Seen),
        row("manifest", one(), |b| first_snapshot(b, nth(1, temporary(Folder::Snapshots))), NoticedAtOnce),
        row("name of the manifest", one(), |b| first_snapshot(b, nth(1, folder(Folder::Snapshots))), Seen),
        row(
            "record that a snapshot is verified",
            one(),
            |b| first_snapshot(b, after(1, folder(Folder::Snapshots), window)),
            // Not for the record's own sake, but because the frames after it follow it in the chain.
            Seen,
        ),
        row(
            "removal of the manifest before",
            one(),
            |b| second_snapshot(b, nth(2, folder(Folder::Snapshots))),
            Harmless("a manifest that comes back is older than the one used"),
        ),
        row(
            "removal of the images before",
            one(),
            |b| second_snapshot(b, nth(2, folder(Folder::Pages))),
            Harmless("an image file that comes back is nobody's"),
        ),
        row(
            "recycling",
            one(),
            |b| second_snapshot(b, after(2, folder(Folder::Snapshots), folder(Folder::Log))),
            Harmless(
                "a segment that comes back lies before all that is read, and a spare's names follow each other",
            ),
        ),
        // Restores.
        row(
            "table of the old state",
            usual(),
            |b| restoring(b, nth(1, temporary(Folder::Pages))),
            NoticedAtOnce,
        ),
        row("name of the table", usual(), |b| restoring(b, nth(1, folder(Folder::Pages))), Seen),
    ]
}

/// Crashes of the work alone: recovery is not what is tried here.
const LEVELS: &[Level] =
    &[Level { tears: Tears::None, images_max: 40, closely_of: usize::MAX, nest_of: usize::MAX }];

/// What came of a run.
enum Verdict {
    Clean,
    /// The work itself failed.
    Stopped(Error),
    /// A crash of it showed something that must never be.
    Found(Violation),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Clean => f.write_str("nothing was found"),
            Verdict::Stopped(error) => write!(f, "it stopped: {error}"),
            Verdict::Found(violation) => write!(f, "{violation}"),
        }
    }
}

fn run(row: &Row, armed: bool) -> Verdict {
    let mut bench = Bench { options: row.options.clone(), armed, from: 0 };
    let driver = match (row.work)(&mut bench) {
        Ok(driver) => driver,
        Err(error) => return Verdict::Stopped(error),
    };
    let left_out = driver.disk.history().iter().filter(|event| event.starts_with("skipped sync")).count();
    assert_eq!(left_out, usize::from(armed), "{}: one sync is left out", row.sync);
    let explorer = Explorer { from: bench.from, ..Explorer::new(&row.options, LEVELS, 1) };
    match explorer.explore(&driver.disk, &driver.line(), driver.floors) {
        Ok(()) => Verdict::Clean,
        Err(violation) => Verdict::Found(violation),
    }
}

fn check(rows: impl Iterator<Item = Row>) {
    let mut wrong = Vec::new();
    for row in rows {
        match run(&row, false) {
            Verdict::Clean => {}
            verdict => wrong.push(format!("{}: nothing is left out, and yet {verdict}", row.sync)),
        }
        let verdict = run(&row, true);
        match (&row.fate, &verdict) {
            (Seen, Verdict::Found(_))
            | (NoticedAtOnce, Verdict::Stopped(_))
            | (Harmless(_), Verdict::Clean) => {}
            (Seen | NoticedAtOnce, _) => wrong.push(format!("{}: left out, and {verdict}", row.sync)),
            (Harmless(why), _) => wrong.push(format!("{}: harmless, as {why}, but {verdict}", row.sync)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// So many rows come before the first that takes a snapshot; two tests run beside each other.
const ROWS_BEFORE_SNAPSHOTS: usize = 17;

#[test]
fn each_sync_of_openings_matters() {
    check(rows().into_iter().take(ROWS_BEFORE_SNAPSHOTS));
}

#[test]
fn each_sync_of_commits_and_snapshots_matters() {
    check(rows().into_iter().skip(ROWS_BEFORE_SNAPSHOTS));
}
