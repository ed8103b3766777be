//! Followers of a writer that recycles its log, and their results after a crash.
//!
//! A follower has a position in the log. It may read the store before an open recovers the store, and again
//! while the next writer works. Each time, it continues without a gap or gets an error. The error is
//! *overtaken* only if no kept snapshot needs the log after the position, and *diverged* if and only if the
//! crash removed the batch at the position.

use std::sync::Arc;
use std::time::Duration;

use remanent::disk::Disk;
use remanent::error::Invalid;
use remanent::follow::{Follower, Replica};
use remanent::options::Retention;
use remanent::testing::sim_disk::{Crash, CrashImage, Moment, SimDisk};
use remanent::{Ack, Error, Options, Store};

use super::explore::{Kind, Violation, commit_another};
use super::model::{Line, replicated};
use super::work::{Driver, Floors, Writer, open};
use super::{options, suite};

/// The result of following the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    UpToDate,
    Overtaken,
    Diverged,
}

/// The followers of a workload.
#[derive(Default)]
pub struct Followers {
    options: Options,
    followed: Vec<(usize, Replica)>,
}

impl Followers {
    pub fn of(driver: &Driver, options: &Options) -> Self {
        Self { options: options.clone(), followed: driver.followed() }
    }

    /// Selects a follower from before the crash by `number`, and continues it on the recovered store.
    pub fn judge(&self, image: &CrashImage, line: &Line, number: usize) -> Result<(), Violation> {
        let there: Vec<&Replica> = self
            .followed
            .iter()
            .filter(|(events, _)| *events <= image.moment.event)
            .map(|(_, replica)| replica)
            .collect();
        let Some(replica) = there.get(number % there.len().max(1)) else { return Ok(()) };
        let copy = image.disk.after_kill(Moment { event: image.disk.events(), tear: None });
        let judged = self.go_on(&copy, image.crash, line, replica);
        judged.map_err(|violation| violation.of(format_args!("a follower from {}", replica.position())))
    }

    fn go_on(&self, disk: &SimDisk, crash: Crash, line: &Line, replica: &Replica) -> Result<(), Violation> {
        let shared: Arc<dyn Disk> = Arc::new(disk.clone());
        // Read the files that the crash left, before any open.
        let mut early = replica.clone();
        let end = catch_up(&shared, &mut early, line)?;
        if crash == Crash::Kill && end == End::Diverged {
            return Err(Violation::new(Kind::Wrong, "diverged, and a kill takes no batch"));
        }

        // Read while the next writer works, with the follower that has already read and with one that has
        // not.
        let store =
            open(disk, &self.options).map_err(|error| Violation::new(Kind::Refused, format!("{error}")))?;
        let survived = store.recovered().position.lsn;
        let driver = Driver::new(disk.clone(), self.options.clone(), line.clone(), Floors::default());
        driver.adopt(&store);
        for ack in [Ack::Logged, Ack::Durable] {
            commit_another(&driver, &store, ack)?;
        }
        for mut replica in [replica.clone(), early] {
            let from = replica.lsn();
            let end = catch_up(&shared, &mut replica, &driver.line())?;
            let expected = match end {
                End::Diverged => from > survived,
                End::UpToDate => from <= survived && replica.lsn() == store.lsn(),
                End::Overtaken => {
                    from <= survived && self.may_be_overtaken(&shared, &store, &driver, from.0)?
                }
            };
            if !expected {
                let what = format!("{end:?} at {} from {from}, and {survived} survived", replica.lsn());
                return Err(Violation::new(Kind::Wrong, what));
            }
        }
        Ok(())
    }

    /// Returns true if no kept state needs the log after this batch, so that a follower at this batch may be
    /// overtaken. Also checks that a new follower reaches the end in that case.
    fn may_be_overtaken(
        &self,
        disk: &Arc<dyn Disk>,
        store: &Store,
        driver: &Driver,
        from: u64,
    ) -> Result<bool, Violation> {
        let mut replica = Replica::from_snapshot_on(disk)
            .map_err(|error| Violation::new(Kind::Refused, format!("to start over: {error}")))?;
        let end = catch_up(disk, &mut replica, &driver.line())?;
        let oldest = store.snapshots().iter().map(|snapshot| snapshot.redo).min();
        Ok(end == End::UpToDate
            && replica.lsn() == store.lsn()
            && oldest.is_some_and(|oldest| from < oldest.0))
    }
}

/// Returns a replica at the end of a driver's log, or `None` if the beginning of the log was removed.
pub fn replica_at_end(driver: &Driver) -> Option<Replica> {
    let disk: Arc<dyn Disk> = Arc::new(driver.disk.clone());
    let mut replica = Replica::default();
    let end = catch_up(&disk, &mut replica, &driver.line());
    let end = end.unwrap_or_else(|violation| panic!("{violation}"));
    (end == End::UpToDate).then_some(replica)
}

/// Follows the log from the replica's position to its end, and compares every state with the model.
fn catch_up(disk: &Arc<dyn Disk>, replica: &mut Replica, line: &Line) -> Result<End, Violation> {
    let ended = |error: Error| match error {
        Error::Overtaken { .. } => Ok(End::Overtaken),
        Error::Diverged { .. } => Ok(End::Diverged),
        error => Err(Violation::new(Kind::Refused, error.to_string())),
    };
    let mut follower = match Follower::open_on(disk.clone(), replica.position().into()) {
        Ok(follower) => follower,
        Err(error) => return ended(error),
    };
    loop {
        let batch = match follower.next(Duration::ZERO) {
            Ok(Some(batch)) => batch,
            Ok(None) => return Ok(End::UpToDate),
            Err(error) => return ended(error),
        };
        match replica.apply(&batch) {
            Ok(()) => {}
            Err(error @ Error::Invalid(Invalid::OutOfOrder { .. })) => {
                return Err(Violation::new(Kind::Lost, error.to_string()));
            }
            Err(error) => return ended(error),
        }
        let lsn = replica.lsn().0;
        if lsn > line.last() {
            return Err(Violation::new(Kind::Wrong, format!("batch {lsn} was never committed")));
        }
        if let Some(difference) = line.at(lsn).difference(&replicated(replica)) {
            return Err(Violation::new(Kind::Wrong, format!("a replica at batch {lsn}, {difference}")));
        }
    }
}

/// A fast follower, a slow one, one that reads only once and one that restarts follow a writer that recycles
/// segments which some of them have not read, and that restores an earlier state.
#[test]
fn followers_during_recycling_continue_or_fail_with_reason() {
    suite(options().retention(Retention::new().snapshots_kept(1)), 2200, |driver, random| {
        let disk: Arc<dyn Disk> = Arc::new(driver.disk.clone());
        let follow = |replica: &mut Replica| {
            let end =
                catch_up(&disk, replica, &driver.line()).unwrap_or_else(|violation| panic!("{violation}"));
            driver.note_follower(replica);
            end
        };
        let store = driver.open()?;
        let mut writer = Writer::new("a", random.next());
        let (mut quick, mut slow) = (Replica::default(), Replica::default());
        driver.note_follower(&slow);
        for round in 0..3 {
            for step in 0..5 {
                let ack = if step % 2 == 1 { Ack::Logged } else { Ack::Durable };
                driver.commit(&store, &mut writer, ack)?;
                if step % 2 == 0 {
                    assert_eq!((follow(&mut quick), quick.lsn()), (End::UpToDate, store.lsn()));
                } else if round == 0 {
                    assert_eq!(follow(&mut slow), End::UpToDate);
                }
            }
            let snapshot = driver.snapshot(&store)?;
            assert_eq!(follow(&mut quick), End::UpToDate);
            match round {
                1 => {
                    driver.restore(&store, snapshot)?;
                    writer = writer.over(&driver.line());
                }
                2 => {
                    assert_eq!(follow(&mut slow), End::Overtaken);
                    slow = Replica::from_snapshot_on(&disk)?;
                    assert_eq!(follow(&mut slow), End::UpToDate);
                }
                _ => {}
            }
        }
        for ack in [Ack::Durable, Ack::Logged] {
            driver.commit(&store, &mut writer, ack)?;
        }
        assert_eq!((follow(&mut slow), slow.lsn()), (End::UpToDate, store.lsn()));
        driver.check(&store);
        drop(store);
        Ok(driver.into())
    });
}
