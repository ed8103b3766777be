//! I/O errors during the workloads. Every call that writes, syncs or changes names fails once, in each life
//! of a store.
//!
//! The workload ends with the error, or continues without the failed call. In both cases, batches that were
//! acknowledged before must exist: after a kill of the process, and after a power cut that discards the
//! writes that a failed sync left pending, although each later sync succeeds. An acknowledgement after a
//! failed sync is therefore detected as a loss.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use remanent::testing::sim_disk::{DiskFault, EIO, ENOSPC, Operation, SimDisk, Tears};
use remanent::{Error, Options};

use super::Lives;
use super::explore::{Explorer, Level, Violation};
use super::model::Line;
use super::work::{Driver, Floors, Random};

/// Operations that fail, with their possible errors. `faults/disk_errors.rs` makes reads fail.
const TROUBLES: [(Operation, &[i32]); 9] = [
    (Operation::Create, &[EIO, ENOSPC]),
    (Operation::Link, &[EIO, ENOSPC]),
    (Operation::Rename, &[EIO]),
    (Operation::Remove, &[EIO]),
    (Operation::SyncFolder, &[EIO]),
    (Operation::Write, &[EIO, ENOSPC]),
    (Operation::Sync, &[EIO, ENOSPC]),
    (Operation::Put, &[EIO]),
    (Operation::SyncWindow, &[EIO, ENOSPC]),
];

/// The level for crashes after the fault. The workload sets `closely_of`.
const LEVEL: Level = Level { tears: Tears::None, images_max: 4, closely_of: usize::MAX, nest_of: usize::MAX };

/// A fault in one of the lives of a workload, and the drivers that the fault affects.
pub struct Trouble {
    /// The number of the life, from 0, and the fault. `None` to only count the calls.
    fault: Option<(usize, DiskFault)>,
    lives: AtomicUsize,
    drivers: Mutex<Vec<Driver>>,
}

impl Trouble {
    fn new(fault: Option<(usize, DiskFault)>) -> Arc<Self> {
        Arc::new(Self { fault, lives: AtomicUsize::new(0), drivers: Mutex::default() })
    }

    /// Counts a new life, and injects the fault if the fault belongs to this life.
    pub fn join(&self, driver: &Driver) {
        let life = self.lives.fetch_add(1, Ordering::SeqCst);
        if let Some((_, fault)) = self.fault.filter(|(struck, _)| *struck == life) {
            driver.disk.fail(fault);
        }
        // The driver is stored without its reference to the trouble, because the two would otherwise keep
        // each other alive.
        self.drivers.lock().unwrap().push(driver.clone().out_of_trouble());
    }
}

/// Runs the workload once for each `one_of`-th of its calls in this part, and makes that call fail. Returns
/// the number of faults that were hit, and the number of crash images that were checked.
pub fn strike<Work>(
    options: &Options,
    seed: u64,
    one_of: usize,
    (part, parts): (usize, usize),
    closely_of: usize,
    work: &Work,
) -> Result<Vec<usize>, Violation>
where
    Work: Fn(Driver, &mut Random) -> Result<Lives, Error>,
{
    let run = |trouble: &Arc<Trouble>| {
        let driver = Driver::new(SimDisk::new(), options.clone(), Line::default(), Floors::default());
        let outcome = work(driver.in_trouble(trouble), &mut Random(seed)).map(drop);
        (outcome, std::mem::take(&mut *trouble.drivers.lock().unwrap()))
    };
    let (counted, lives) = run(&Trouble::new(None));
    counted.expect("the work itself meets no fault");
    let faults = lives.iter().enumerate().flat_map(|(life, driver)| {
        TROUBLES.into_iter().flat_map(move |(operation, errors)| {
            (0..driver.disk.calls(operation)).flat_map(move |skip| {
                errors.iter().map(move |&errno| (life, DiskFault { operation, skip, times: 1, errno }))
            })
        })
    });
    let (mut struck, mut images) = (0, 0);
    for (life, fault) in faults.skip(seed as usize % one_of).step_by(one_of).skip(part).step_by(parts) {
        let (outcome, lives) = run(&Trouble::new(Some((life, fault))));
        let found = judge(options, seed, closely_of, &lives, &outcome)
            .map_err(|violation| violation.of(format_args!("{fault:?} in life {life}")))?;
        struck += usize::from(found > 0);
        images += found;
    }
    Ok(vec![struck, images])
}

/// Checks the crashes of the affected driver from the fault on. There may be none, because the engine's
/// threads may make fewer calls than when they were counted.
fn judge(
    options: &Options,
    seed: u64,
    closely_of: usize,
    lives: &[Driver],
    outcome: &Result<(), Error>,
) -> Result<usize, Violation> {
    let struck = lives.iter().find_map(|driver| Some((driver, driver.disk.struck_at()?)));
    let Some((driver, from)) = struck else {
        assert!(outcome.is_ok(), "nothing was struck, and yet {outcome:?}");
        return Ok(0);
    };
    let levels = [Level { closely_of, ..LEVEL }];
    let explorer = Explorer { from, ..Explorer::new(options, &levels, seed) };
    explorer.explore(driver).map_err(|violation| violation.of(format_args!("the work: {outcome:?}")))?;
    let images = explorer.images.borrow().iter().sum();
    Ok(images)
}
