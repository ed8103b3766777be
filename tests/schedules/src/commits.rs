//! Commits: groups, the queue to the thread that applies batches, changes of the segment, and failures that
//! must reach every committer.

use std::time::Duration;

use remanent::options::LogIo;
use remanent::testing::sim_disk::{DiskFault, EIO, Operation};
use remanent::{Ack, Epoch, Error, Lsn, Place};

use crate::ground::{Ground, PAGE_LEN, log, options};
use crate::runner::{at_once, explore};

/// The modes of writing the log.
const WAYS: [LogIo; 3] = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct];

#[test]
fn durable_commits_of_two_threads_need_no_timer() {
    explore(|time| {
        for io in WAYS {
            let ground = Ground::new(time, options().log(log().io(io)), 2);
            let two_of = |writer| ground.count_to(2, writer, Ack::Durable);
            at_once(&[&|| two_of(0), &|| two_of(1)]);
            ground.close(Lsn(5), Duration::ZERO);
        }
    });
}

#[test]
fn bytes_that_were_read_are_logged() {
    explore(|time| {
        for io in WAYS {
            let ground = Ground::new(time, options().log(log().io(io)), 1);
            let write = || {
                let ticket = ground.store.submit(ground.batch(0, 1)).unwrap();
                ticket.wait(Ack::Applied).unwrap();
                assert_eq!(ground.read(0), 1);
                ground.count(0, 2, Ack::Applied).unwrap();
            };
            let read = || {
                let first = ground.read(0);
                assert!(first <= ground.read(0), "reads go forward");
            };
            at_once(&[&write, &read]);
            ground.close(Lsn(3), Duration::ZERO);
        }
    });
}

/// Every read that begins after the store reports a batch as newest includes this batch, whichever thread
/// logs it.
#[test]
fn read_includes_every_visible_batch() {
    explore(|time| {
        for io in WAYS {
            let ground = Ground::new(time, options().log(log().io(io)), 1);
            let write = || ground.count_to(2, 0, Ack::Logged);
            let read = || {
                let newest = ground.store.lsn();
                let found =
                    ground.store.read_many(&[(ground.pages(0)[0], 0..PAGE_LEN)]).unwrap().wait().unwrap();
                assert!(found.lsn() >= newest, "{} was visible, and {} was read", newest, found.lsn());
            };
            at_once(&[&write, &read]);
            ground.close(Lsn(3), Duration::ZERO);
        }
    });
}

#[test]
fn logged_batches_become_durable_automatically() {
    explore(|time| {
        let ground = Ground::new(time, options(), 1);
        ground.count_to(2, 0, Ack::Logged);
        // No thread waits for a sync, so only the clock triggers one.
        let durable = || ground.after_power_cut().1[&0];
        while durable() < 2 {
            pass(Duration::from_millis(5));
        }
        ground.close(Lsn(3), Duration::from_millis(15));
    });
}

/// Advances the simulated time by `time`.
fn pass(time: Duration) {
    let (lock, unused) = (remanent::testing::sync::Mutex::new(()), remanent::testing::sync::Condvar::new());
    let until = remanent::testing::sync::Instant::now() + time;
    unused.wait_until(&mut lock.lock(), until);
}

#[test]
fn segments_roll_under_two_writers() {
    explore(|time| {
        let ground = Ground::new(time, options(), 2);
        let three_of = |writer| {
            for count in 1..=3 {
                let mut batch = ground.batch(writer, count);
                batch.note("x".repeat(5000));
                ground.store.submit(batch).unwrap();
                ground.acked(Ack::Logged, writer, count);
            }
        };
        at_once(&[&|| three_of(0), &|| three_of(1)]);
        assert!(ground.store.stats().log.rolls >= 2);
        ground.close(Lsn(7), Duration::ZERO);
    });
}

/// The holder of the submission lock logs the batches of the threads that wait for it. Each thread gets its
/// own result.
#[test]
fn a_refused_batch_changes_no_other_outcome() {
    explore(|time| {
        let ground = Ground::new(time, options(), 3);
        let pages = ground.pages(2);
        let refused = || {
            let mut conflicting = ground.batch(2, 1);
            conflicting.expect_epoch(pages[0], Epoch(7));
            let error = ground.store.submit(conflicting).map(drop).unwrap_err();
            assert!(matches!(error, Error::Conflict { page, .. } if page == pages[0]), "{error}");
            let mut outside = ground.store.batch();
            outside.fill(pages[1], PAGE_LEN, 1, &[1]).create(PAGE_LEN, Place::Host);
            let error = ground.store.submit(outside).map(drop).unwrap_err();
            assert!(matches!(error, Error::OutOfBounds { page, .. } if page == pages[1]), "{error}");
        };
        at_once(&[&|| ground.count_to(2, 0, Ack::Logged), &refused, &|| ground.count_to(2, 1, Ack::Logged)]);
        assert_eq!(ground.used_bytes(), 6 * PAGE_LEN, "what a refused batch brought along is given back");
        ground.close(Lsn(5), Duration::ZERO);
    });
}

#[test]
fn failed_sync_fails_every_committer() {
    explore(|time| {
        let ground = Ground::new(time, options(), 2);
        ground.disk.fail(DiskFault { operation: Operation::SyncWindow, skip: 1, times: 1, errno: EIO });
        let until_it_fails = |writer| {
            let failed = (1..=3).find_map(|count| ground.count(writer, count, Ack::Durable).err());
            if let Some(error) = failed {
                assert!(matches!(error, Error::Poisoned(_)), "{error}");
            }
        };
        at_once(&[&|| until_it_fails(0), &|| until_it_fails(1)]);
        assert_eq!(ground.disk.faults_left(), 0);
        let refused = ground.count(0, 4, Ack::Durable).unwrap_err();
        assert!(matches!(refused, Error::Poisoned(_)), "{refused}");
        ground.took_at_most(Duration::ZERO);
        ground.check();
    });
}

#[test]
fn store_closes_during_background_work() {
    explore(|time| {
        for io in WAYS {
            let ground = Ground::new(time, options().log(log().io(io)), 1);
            let submitted = ground.store.submit(ground.batch(0, 1)).unwrap().position();
            ground.close(submitted.lsn, Duration::ZERO);
        }
    });
}
