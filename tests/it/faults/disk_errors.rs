//! I/O errors at every disk operation, one at a time.

use crate::with_options::With;
use remanent::WriteBatch;
use remanent::disk::Disk;
use remanent::error::{FileName, Folder, Remedy};
use remanent::options::{ImageIo, ImageOptions, LogIo};
use remanent::testing::sim_disk::{DiskFault, EIO, Moment, Operation};

use super::*;

/// The last two are operations on the log. An open creates the log's segments with the other operations.
const OPERATIONS: [Operation; 11] = [
    Operation::Create,
    Operation::Open,
    Operation::Rename,
    Operation::Remove,
    Operation::SyncFolder,
    Operation::Read,
    Operation::ReadBypassingCache,
    Operation::Write,
    Operation::Sync,
    Operation::Put,
    Operation::SyncWindow,
];

/// Runs `case` with a failure of the first, the second, … operation of each kind, once and permanently, until
/// there are no more operations. `case` returns true if the fault was hit. (Several threads read during an
/// open, so the fifth read is not always the same one.)
fn at_every_operation(
    operations: &[Operation],
    case: impl Fn(DiskFault) -> bool + Send + Sync + Copy + 'static,
) {
    at_every_fault(operations, &[(1, EIO), (usize::MAX, EIO)], case);
}

fn is_the_fault(error: &Error) -> bool {
    error.to_string().contains("os error 5")
}

#[test]
fn disk_error_stops_store_without_loss() {
    at_every_operation(&OPERATIONS, |fault| stops_and_loses_nothing(fault, small()));
}

/// Bytes written with `Put` are not in the page cache.
#[test]
fn direct_write_error_stops_store_without_loss() {
    let operations = [Operation::Put, Operation::SyncWindow];
    at_every_operation(&operations, |fault| {
        stops_and_loses_nothing(fault, small().with(|options| options.log.io = Some(LogIo::Direct)))
    });
}

#[test]
fn image_write_error_stops_store_without_loss() {
    let steps = [Operation::Reserve, Operation::MapPart, Operation::Cut];
    at_every_operation(&steps, |fault| {
        stops_and_loses_nothing(fault, small().images(ImageOptions::new().io(ImageIo::Mapped)))
    });
    let steps = [Operation::Reserve, Operation::WriteDirect, Operation::Cut];
    at_every_operation(&steps, |fault| {
        stops_and_loses_nothing(fault, small().images(ImageOptions::new().io(ImageIo::Direct)))
    });
}

fn is_of_a_read(fault: DiskFault) -> bool {
    matches!(fault.operation, Operation::Read | Operation::ReadBypassingCache | Operation::Open)
}

/// Works until the fault is hit. Returns true if it was hit.
fn stops_and_loses_nothing(fault: DiskFault, options: Options) -> bool {
    let disk = SimDisk::new();
    let device = Gauge::host();
    let store = open_with(&disk, device.clone(), options).unwrap();
    let mut line = Line::begin(&store);
    disk.fail(fault);
    let outcome = line.work(&store);
    let struck = disk.faults_left() < fault.times;

    if let Err(error) = &outcome {
        assert!(is_the_fault(error), "{error}");
        let mut batch = WriteBatch::default();
        batch.note("after the error");
        match store.commit(batch) {
            // A restore that cannot read its snapshot has no effect.
            Ok(committed) => {
                assert!(is_of_a_read(fault), "{error}");
                line.logged = committed.position.lsn.0;
                line.steps.truncate(line.logged as usize);
                line.steps.push(line.steps[line.steps.len() - 1]);
            }
            Err(refused) => {
                let cause = poisoned(&store);
                assert!(is_the_fault(&cause), "{cause}");
                let expected =
                    if matches!(*cause, Error::Damaged(_)) { Remedy::Inspect } else { Remedy::Reopen };
                assert_eq!((refused.remedy(), cause.remedy()), (expected, expected), "{cause}");
            }
        }
    }
    // Bytes that could be read before are still correct. Exception: a restore that cannot read an image again
    // after verifying it has overwritten a part of memory, and reads of this part fail.
    if let Err(error) = line.check_read(&store) {
        assert!(is_of_a_read(fault), "{error}");
        assert!(is_the_fault(&error), "{error}");
    }
    let closed = store.close();
    assert!(outcome.is_ok() || closed.is_err() || is_of_a_read(fault));
    assert_eq!(device.live(), 0, "page memory was not given back");

    // A power cut preserves the batches that were acknowledged as durable. An open without a power cut finds
    // all acknowledged batches.
    disk.clear_faults();
    line.check(&open_on_host(&disk.after_power_cut()).unwrap(), line.durable);
    line.check(&open_on_host(&disk).unwrap(), line.logged);
    struck
}

#[test]
fn disk_error_during_open_loses_nothing() {
    // Only an open reads the images of a verified snapshot.
    let operations = [&OPERATIONS[..9], &[Operation::ReadProven]].concat();
    at_every_operation(&operations, |fault| {
        let (disk, line) = killed();
        disk.fail(fault);
        let device = Gauge::host();
        match open(&disk, device.clone()) {
            // The open succeeded without the failed call, or the call failed in a thread after the open.
            Ok(store) => line.check(&store, line.logged),
            Err(error) => assert!(is_the_fault(&error), "{error}"),
        }
        assert_eq!(device.live(), 0, "page memory was not given back");
        let struck = disk.faults_left() < fault.times;
        disk.clear_faults();
        let store = open_on_host(&disk).unwrap_or_else(|error| panic!("{error}\n{:#?}", disk.history()));
        line.check(&store, line.logged);
        let mut line = line;
        line.commits(&store, 3).unwrap();
        struck
    });
}

/// Returns the disk state after a kill: snapshots, a restore, a tail that no mark covers, and an unfinished
/// file.
fn killed() -> (SimDisk, Line) {
    let disk = SimDisk::new();
    let store = open_on_host(&disk).unwrap();
    let mut line = Line::begin(&store);
    for _ in 0..2 {
        line.commits(&store, 3).unwrap();
        store.snapshot().unwrap();
    }
    line.restore(&store, store.snapshots()[0].id).unwrap();
    for _ in 0..3 {
        line.commit(&store, Ack::Logged).unwrap();
    }
    let now = Moment { event: disk.events(), tear: None };
    let left = disk.after_kill(now);
    drop(store);
    // A file that an open must remove, whatever state the store's threads were in.
    left.create(FileName::Temporary(Folder::Log, 99)).unwrap();
    (left, line)
}
