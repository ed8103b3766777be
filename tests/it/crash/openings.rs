//! Opens of stores in many different states. Each open is crashed at every event, and the opens after those
//! crashes are crashed as well.
//!
//! The other workloads crash a store that is open, and produce few kinds of directories for an open. Here, a
//! table lists such directories, and the workload consists of only the open, which commits nothing. An open
//! may omit an incarnation from the line, reuse segments, copy batches and remove files. Every row is
//! explored in each mode of writing the log, also by followers whose positions are in earlier incarnations.
//!
//! Each row is also opened with each segment of the log missing, and with each pair of segments missing.

use remanent::error::FileName;
use remanent::follow::Replica;
use remanent::options::{LogIo, Retention};
use remanent::testing::sim_disk::{SimDisk, Tears};
use remanent::{Ack, Error, Metadata, Options, PageId, Store};
use remanent_format::judge::{ImageProofs, judge};
use remanent_format::segment::SEGMENT_HEADER_BLOCK;
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;

use super::explore::{Level, same};
use super::followers::replica_at_end;
use super::model::{Act, Line, Target, rebuilt};
use super::work::{Driver, Floors, Random, open};
use super::{Lives, from_env, options, suite_at};
use crate::files::Files;
use crate::with_options::With;

/// The state of the directory before the open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beginning {
    /// There is no frame, because the process was killed as soon as the store was open.
    Nothing,
    SealOnly,
    /// The segment of the last batch has no space for the seal.
    SealInTheNextSegment,
    TornBatch,
    /// A torn frame that is longer than a segment.
    TornLongFrame,
    /// Batches that no mark covers. An open only copied them.
    CopiedTail,
    /// An incarnation without a batch that took a snapshot, and another one.
    Snapshot,
    NamedSnapshot,
    Prune,
    /// An incarnation whose only batch is a restore.
    Restore,
    /// A fork that was never opened.
    Fork,
    /// A fork that was opened once, without a commit.
    OpenedFork,
}

use Beginning::*;

const BEGINNINGS: [Beginning; 12] = [
    Nothing,
    SealOnly,
    SealInTheNextSegment,
    TornBatch,
    TornLongFrame,
    CopiedTail,
    Snapshot,
    NamedSnapshot,
    Prune,
    Restore,
    Fork,
    OpenedFork,
];

/// Levels for opens, which are short and numerous.
const LEVELS: [Level; 4] = [
    Level { tears: Tears::Few(1), images_max: 3, closely_of: 16, nest_of: 40 },
    Level { tears: Tears::None, images_max: 2, closely_of: 16, nest_of: 1000 },
    Level { tears: Tears::None, images_max: 2, closely_of: 16, nest_of: 1000 },
    Level { tears: Tears::None, images_max: 2, closely_of: 16, nest_of: 1 },
];

/// The minimum number of images of a row. Most rows have twice as many. On a slow machine, the log may be
/// sealed before the kill, and the next open then has less to do.
const IMAGES_MIN: usize = 30;

fn options_of(log_io: LogIo) -> Options {
    options().retention(Retention::new().snapshots_kept(2)).with(|options| options.log.io = Some(log_io))
}

#[test]
fn opens_of_a_mapped_log_survive() {
    for beginning in BEGINNINGS {
        suite_at(&LEVELS, options_of(LogIo::Mapped), IMAGES_MIN, |driver, random| {
            beginning.open(driver, random)
        });
    }
}

#[test]
fn opens_of_a_buffered_log_survive() {
    for beginning in BEGINNINGS {
        suite_at(&LEVELS, options_of(LogIo::Buffered), IMAGES_MIN, |driver, random| {
            beginning.open(driver, random)
        });
    }
}

#[test]
fn opens_of_a_direct_log_survive() {
    for beginning in BEGINNINGS {
        suite_at(&LEVELS, options_of(LogIo::Direct), IMAGES_MIN, |driver, random| {
            beginning.open(driver, random)
        });
    }
}

#[test]
fn lost_segment_is_reported_or_harmless() {
    for log_io in [LogIo::Mapped, LogIo::Buffered, LogIo::Direct] {
        let mut count = LossCount::default();
        for (beginning, goes_on) in BEGINNINGS.into_iter().flat_map(|row| [(row, false), (row, true)]) {
            let options = options_of(log_io);
            let driver = Driver::new(SimDisk::new(), options.clone(), Line::default(), Floors::default());
            let mut random = Random(from_env("CRASH_SEED"));
            let mut next = beginning.begin(driver, &mut random, &mut Vec::new());
            if goes_on {
                next = next.and_then(|driver| commit_over_segments(&driver, &mut random));
            }
            let next = next.expect("the lives before it meet no fault");
            let files = Files::of(&next.disk);
            let segments = files.segments();
            assert!(segments.len() >= 2, "{beginning:?}: {segments:?}");
            for (at, first) in segments.iter().enumerate() {
                for second in &segments[at..] {
                    let mut left = files.clone();
                    left.0.retain(|file, _| file != first && file != second);
                    let what = format!("{log_io} {beginning:?}, {goes_on}, without {first} and {second}");
                    count.add(open_without(&what, &left, &options, &next));
                }
            }
        }
        assert!(count.whole > 10 && count.refused > 30, "{log_io}: {count:?}");
    }
}

/// Opens the store, commits one durable batch per segment, and is killed.
fn commit_over_segments(driver: &Driver, random: &mut Random) -> Result<Driver, Error> {
    let store = driver.open()?;
    for _ in 0..3 {
        driver.commit_acts(&store, part_of_a_page(random, 9000), Ack::Durable)?;
    }
    Ok(driver.killed())
}

/// Numbers of opens with missing segments, by outcome.
#[derive(Debug, Default)]
struct LossCount {
    whole: usize,
    shorter: usize,
    refused: usize,
}

impl LossCount {
    fn add(&mut self, outcome: LossOutcome) {
        match outcome {
            LossOutcome::Whole => self.whole += 1,
            LossOutcome::Shorter => self.shorter += 1,
            LossOutcome::Refused => self.refused += 1,
        }
    }
}

/// The outcome of an open with missing segments.
enum LossOutcome {
    /// The open recovers the newest state.
    Whole,
    /// The open recovers the state of an earlier batch, and no mark covered the later batches.
    Shorter,
    Refused,
}

/// Opens a store whose segments are missing. The engine, the pure rebuild and `judge` must all produce the
/// same state, which contains every batch that was acknowledged as durable, or must all report damage.
fn open_without(what: &str, files: &Files, options: &Options, before: &Driver) -> LossOutcome {
    let line = before.line();
    let pure = rebuild(files, &RebuildOptions::default());
    let verdict = Survey::read(files).map(|survey| judge(&survey, files, &mut ImageProofs::new(files)));
    let judged = verdict.as_ref().ok().and_then(|verdict| verdict.state.as_ref());
    let store = match open(&files.disk(), options) {
        Ok(store) => store,
        Err(Error::Damaged(damage)) => {
            assert!(pure.is_err(), "{what}: refused with {damage}, and rebuilt: {pure:?}");
            assert!(judged.is_none(), "{what}: refused with {damage}, and judged sound: {judged:?}");
            return LossOutcome::Refused;
        }
        Err(error) => panic!("{what}: {error}"),
    };
    let (lsn, created) = (store.recovered().position.lsn.0, store.recovered().created);
    let floors = before.floors;
    assert!(!created, "{what}: a new store in place of one that was there");
    assert!(lsn >= floors.durable, "{what}: {floors:?}, recovered {lsn}");
    let found = same(&line, lsn, &store).unwrap_or_else(|violation| panic!("{what}: {violation}"));
    let pure = pure.unwrap_or_else(|damage| panic!("{what}: opened, and not rebuilt: {damage}"));
    assert_eq!((pure.table.lsn().0, found.difference(&rebuilt(&pure))), (lsn, None), "{what}");
    let judged = judged.unwrap_or_else(|| panic!("{what}: opened, and judged lost: {verdict:?}"));
    assert_eq!(judged.resolved.table.lsn().0, lsn, "{what}");
    if lsn == line.last() { LossOutcome::Whole } else { LossOutcome::Shorter }
}

impl Beginning {
    /// Runs the open that is to be crashed, and closes the store.
    fn open(self, driver: Driver, random: &mut Random) -> Result<Lives, Error> {
        let mut replicas = Vec::new();
        let driver = self.begin(driver, random, &mut replicas)?;
        replicas.extend(replica_at_end(&driver));
        replicas.iter().for_each(|replica| driver.note_follower(replica));
        let store = driver.open()?;
        driver.check(&store);
        driver.close(store)?;
        Ok(driver.into())
    }

    /// Runs the lives before that open. `replicas` receives positions of followers that no crash invalidates.
    fn begin(
        self,
        driver: Driver,
        random: &mut Random,
        replicas: &mut Vec<Replica>,
    ) -> Result<Driver, Error> {
        match self {
            Nothing => {
                let _store = driver.open()?;
                return Ok(driver.killed());
            }
            SealOnly => {
                let store = driver.open()?;
                driver.close(store)?;
                return Ok(driver.killed());
            }
            SealInTheNextSegment => {
                let store = driver.open()?;
                driver.commit_acts(&store, part_of_a_page(random, 5000), Ack::Durable)?;
                driver.close(store)?;
                let next = driver.killed();
                assert!(has_seal_alone(&next.disk), "the seal lies with the batch");
                return Ok(next);
            }
            TornBatch | TornLongFrame => {
                let store = driver.open()?;
                driver.commit_acts(&store, part_of_a_page(random, 100), Ack::Durable)?;
                replicas.extend(replica_at_end(&driver));
                let events = driver.disk.events();
                let len = if self == TornBatch { 3000 } else { 20_000 };
                driver.commit_acts(&store, part_of_a_page(random, len), Ack::Logged)?;
                return Ok(driver.crashed(events, is_torn).expect("a crash that tears the frame"));
            }
            CopiedTail => {
                let store = driver.open()?;
                for _ in 0..3 {
                    driver.commit_acts(&store, part_of_a_page(random, 100), Ack::Logged)?;
                }
                let next = driver.killed();
                drop(store);
                let store = next.open()?;
                // In a direct log, each group records that the previous groups are durable.
                assert!(store.recovered().copied_batches > 0);
                replicas.extend(replica_at_end(&next));
                return Ok(next.killed());
            }
            Snapshot | NamedSnapshot | Prune | Restore | Fork | OpenedFork => {}
        }

        // Take two snapshots, and commit batches after each.
        let store = driver.open()?;
        let pages = driver.create_pages(&store, random, 3, 300)?;
        driver.snapshot(&store)?;
        self.go_on(&driver, &store, random, &pages)?;
        driver.snapshot(&store)?;
        self.go_on(&driver, &store, random, &pages[..1])?;
        let lsn = store.lsn().0;
        driver.close(store)?;
        if matches!(self, Fork | OpenedFork) {
            let fork = driver.fork(lsn, SimDisk::new())?.killed();
            if self == Fork {
                return Ok(fork);
            }
            replicas.extend(replica_at_end(&fork));
            let _store = fork.open()?;
            return Ok(fork.killed());
        }
        replicas.extend(replica_at_end(&driver));
        let next = driver.killed();
        let store = next.open()?;
        match self {
            Snapshot => _ = next.snapshot(&store)?,
            NamedSnapshot => _ = next.snapshot_named(&store, "a name")?,
            Prune => {
                let pruned = store.prune(&store.retention().snapshots_kept(1))?;
                assert_eq!(pruned.snapshots.len(), 1);
            }
            _ => next.restore_to(&store, lsn - 1)?,
        }
        Ok(next.killed())
    }

    fn go_on(
        self,
        driver: &Driver,
        store: &Store,
        random: &mut Random,
        pages: &[PageId],
    ) -> Result<(), Error> {
        driver.change(store, random, pages)?;
        driver.wait_durable(store, store.lsn())
    }
}

/// Creates a page and writes all of its bytes except the first, because a whole-page write would be stored in
/// an image file.
fn part_of_a_page(random: &mut Random, len: usize) -> Vec<Act> {
    let create = Act::Create { len: len + 1, key: None, metadata: Metadata::new() };
    vec![create, Act::Write { page: Target::New(0), offset: 1, bytes: random.bytes(len) }]
}

fn is_torn(disk: &SimDisk) -> bool {
    let rebuilt = rebuild(disk, &RebuildOptions::default());
    rebuilt.is_ok_and(|rebuilt| rebuilt.end.is_some_and(|end| end.torn.is_some()))
}

/// Returns true if the log's second segment contains a frame, which is the seal after the only batch.
fn has_seal_alone(disk: &SimDisk) -> bool {
    let segment = disk.bytes(FileName::Segment(2)).expect("a segment is ahead");
    segment[usize::try_from(SEGMENT_HEADER_BLOCK).expect("a short block")..].iter().any(|byte| *byte != 0)
}
