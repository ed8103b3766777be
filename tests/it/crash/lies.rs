//! A storage medium that loses or misplaces writes without an error: a sector keeps its old content, the
//! bytes land in another sector, or a later read returns other bytes. Each case has one such fault, in one
//! sector that a sync of the workload made durable.
//!
//! The store was closed, so a mark covers every batch. The next open must then recover all batches or report
//! the damage. Only a loss that cannot be distinguished from a torn tail may be cut off, and the cut must be
//! reported.

use remanent::testing::sim_disk::{Lie, LieKind, SimDisk};
use remanent::{Ack, Error, Options};

use super::explore::same;
use super::forks::pages_to_share;
use super::model::Line;
use super::work::{Driver, Floors, Random, Writer, open};
use super::{from_env, options};

/// The outcome of an open after such a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// All acknowledged batches are present.
    Harmless,
    /// The open fails because of damage.
    Refused,
    /// A tail was cut off and the cut was reported.
    Cut,
}

fn judge(lie: &Lie, options: &Options, line: &Line) -> Result<Outcome, String> {
    let store = match open(&lie.disk, options) {
        Ok(store) => store,
        // A single wrong read leaves the medium unchanged, so the next open succeeds.
        Err(Error::Damaged(_)) if lie.kind == LieKind::Stale => {
            let store = open(&lie.disk, options).map_err(|error| format!("once more: {error}"))?;
            same(line, line.last(), &store).map_err(|violation| format!("once more: {violation}"))?;
            return Ok(Outcome::Refused);
        }
        Err(Error::Damaged(_)) => return Ok(Outcome::Refused),
        Err(error) => return Err(format!("another error than damage: {error}")),
    };
    let lsn = store.recovered().position.lsn.0;
    same(line, lsn, &store).map_err(|violation| violation.to_string())?;
    match &store.recovered().torn {
        _ if lsn == line.last() => Ok(Outcome::Harmless),
        Some(_) => Ok(Outcome::Cut),
        None => Err(format!("batch {lsn} of {}, and not a word of it", line.last())),
    }
}

/// Commits batches with changes of the segment and images of batches and of snapshots, then a restore, and a
/// second incarnation.
fn work(driver: &Driver, random: &mut Random) -> Result<(), Error> {
    let store = driver.open()?;
    let mut writer = Writer::new("a", random.next());
    for ack in [Ack::Logged, Ack::Durable, Ack::Durable] {
        driver.commit(&store, &mut writer, ack)?;
    }
    let pages = pages_to_share(driver, &store, random)?;
    let snapshot = driver.snapshot(&store)?;
    driver.change(&store, random, &pages[4..9])?;
    driver.restore(&store, snapshot)?;
    driver.close(store)?;
    let store = driver.open()?;
    driver.change(&store, random, &pages[..3])?;
    driver.snapshot(&store)?;
    // Most of the log follows the last snapshot, and frames are longer than a sector.
    driver.create_pages(&store, random, 8, 1500)?;
    driver.change(&store, random, &pages)?;
    driver.close(store)
}

#[test]
fn lying_medium_is_harmless_or_detected() {
    let seed = from_env("CRASH_SEED");
    let driver = Driver::new(SimDisk::new(), options(), Line::default(), Floors::default());
    work(&driver, &mut Random(seed)).expect("the work itself meets no fault");
    let line = driver.line();
    let mut outcomes = Vec::new();
    driver.disk.lies(seed, |lie| match judge(&lie, &options(), &line) {
        Ok(outcome) => outcomes.push((lie.kind, outcome)),
        Err(what) => panic!(
            "{what}\n{:?} write of {} at offset {} in event {}:\n{:#?}\nseed {seed}; again: CRASH_SEED={seed} \
             cargo test -p remanent --test it crash::lies",
            lie.kind,
            lie.file,
            lie.offset,
            lie.event,
            driver.disk.history(),
        ),
    });
    let count = |kind, outcome| outcomes.iter().filter(|lie| **lie == (kind, outcome)).count();
    for kind in [LieKind::Lost, LieKind::Misdirected, LieKind::Stale] {
        let [harmless, refused, cut] =
            [Outcome::Harmless, Outcome::Refused, Outcome::Cut].map(|outcome| count(kind, outcome));
        println!("{kind:?}: {harmless} harmless, {refused} refused, {cut} cut and reported");
        let refused_min = if kind == LieKind::Stale { 0 } else { 20 };
        assert!(harmless >= 20 && refused >= refused_min, "{kind:?}: {harmless} harmless, {refused} refused");
        assert!(kind != LieKind::Stale || cut == 0, "{cut} stale reads cost a tail");
    }
}
