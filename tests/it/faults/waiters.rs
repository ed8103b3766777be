//! A waiting thread gets an error when the store fails or is dropped.

use std::sync::Barrier;
use std::sync::mpsc::sync_channel;

use remanent::Ticket;
use remanent::error::NoSuchState;
use remanent::testing::faulty_device::{DeviceCall, FaultyDevice};
use remanent::testing::sim_disk::{EIO, Operation, SyncPoint};

use super::*;

/// Two threads submit one batch each and wait for it. Returns their results or panics.
fn two_try(store: &Store, ack: Ack) -> Vec<std::thread::Result<Result<()>>> {
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut batch = store.batch();
                    batch.create(10, Place::Host);
                    start.wait();
                    store.submit(batch)?.wait(ack)
                })
            })
            .collect();
        waiting.into_iter().map(|thread| thread.join()).collect()
    })
}

/// Like `two_try`, but expects no thread to panic.
fn two_wait(store: &Store, ack: Ack) -> Vec<Result<()>> {
    two_try(store, ack).into_iter().map(|told| told.unwrap()).collect()
}

/// Asserts that both waits failed with this reason.
fn all_told(outcomes: &[Result<()>], reason: &str) {
    for outcome in outcomes {
        let error = outcome.as_ref().unwrap_err();
        assert!(matches!(error, Error::Poisoned(_)) && error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn failed_sync_wakes_every_waiter() {
    for round in 0..50 {
        watched(&format!("round {round}"), || {
            let disk = SimDisk::new();
            let store = open_on_host(&disk).unwrap();
            let fault = |operation| remanent::testing::sim_disk::DiskFault {
                operation,
                skip: 0,
                times: 1,
                errno: EIO,
            };
            disk.fail(fault(Operation::SyncWindow));
            all_told(&two_wait(&store, Ack::Durable), "os error 5");
            store.close().unwrap_err();
        });
    }
}

#[test]
fn device_failure_wakes_every_waiter() {
    for round in 0..50 {
        watched(&format!("round {round}"), || {
            let device = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
            let store = open(&SimDisk::new(), device.clone()).unwrap();
            device.arm(remanent::testing::faulty_device::DeviceFault {
                call: Some(DeviceCall::Submit),
                nth: 1,
                context_lost: false,
            });
            all_told(&two_wait(&store, Ack::Applied), "failed as arranged");
            // The log is not affected, so its batches still become durable.
            store.wait_durable(store.lsn()).unwrap();
        });
    }
}

#[test]
fn applier_panic_is_reported_without_loss() {
    watched("a device that panics", || {
        let (disk, device) = (SimDisk::new(), Gauge::host());
        let store = open(&disk, device.clone()).unwrap();
        let line = Line::begin(&store);
        device.panics.store(true, Ordering::SeqCst);
        let outcomes = two_wait(&store, Ack::Applied);
        all_told(&outcomes, "the applier's thread of the store in a simulated disk panicked");
        assert!(matches!(store.read(line.page, 0, &mut [0; 8]), Err(Error::Poisoned(_))));
        // The page table does not depend on the failed thread, and logged batches stay logged.
        assert!(store.contains(line.page).unwrap());
        poisoned(&store);
        let logged = store.lsn();
        store.close().unwrap_err();
        assert_eq!(open_on_host(&disk).unwrap().lsn(), logged);
    });
}

#[test]
fn keeper_panic_is_reported() {
    watched("a disk that panics", || {
        let disk = SimDisk::new();
        let store = open_on_host(&disk).unwrap();
        Line::begin(&store);
        store.wait_durable(Lsn(1)).unwrap();
        let (strikes, struck) = sync_channel(8);
        disk.skip_syncs(move |point| {
            matches!(point, SyncPoint::Window(_)) && {
                strikes.send(()).unwrap();
                panic!("as arranged")
            }
        });
        // No thread waits for the sync, so the log thread syncs when the sync is due.
        let mut batch = store.batch();
        batch.create(10, Place::Host);
        store.submit(batch).unwrap();
        struck.recv().unwrap();
        all_told(&two_wait(&store, Ack::Durable), "syncs the log of the store in a simulated disk panicked");
        poisoned(&store);
        store.close().unwrap_err();
    });
}

#[test]
fn a_panic_of_the_syncing_thread_reaches_every_waiter() {
    watched("a disk that panics", || {
        let disk = SimDisk::new();
        let store = open_on_host(&disk).unwrap();
        Line::begin(&store);
        store.wait_durable(Lsn(1)).unwrap();
        disk.skip_syncs(|point| matches!(point, SyncPoint::Window(_)) && panic!("as arranged"));
        let told: Vec<_> = two_try(&store, Ack::Durable).into_iter().filter_map(|told| told.ok()).collect();
        assert_eq!(told.len(), 1, "one of them panicked");
        all_told(&told, "syncs the log of the store in a simulated disk panicked");
        poisoned(&store);
        store.close().unwrap_err();
    });
}

#[test]
fn dropped_store_makes_awaited_batches_durable() {
    for round in 0..20 {
        watched(&format!("round {round}"), || {
            let disk = SimDisk::new();
            let store = open_on_host(&disk).unwrap();
            let (sender, receiver) = sync_channel::<Ticket>(0);
            let waiter = std::thread::spawn(move || {
                let ticket = receiver.recv().unwrap();
                ticket.wait(Ack::Applied).and_then(|()| ticket.wait(Ack::Durable))
            });
            let mut batch = store.batch();
            batch.create(10, Place::Host);
            sender.send(store.submit(batch).unwrap()).unwrap();
            drop(store);
            waiter.join().unwrap().unwrap();
            assert_eq!(open_on_host(&disk.after_power_cut()).unwrap().lsn(), Lsn(1));
        });
    }
}

#[test]
fn a_wait_for_a_batch_that_does_not_exist_is_refused() {
    watched("the future", || {
        let store = open_on_host(&SimDisk::new()).unwrap();
        Line::begin(&store);
        store.wait_durable(Lsn(1)).unwrap();
        let error = store.wait_durable(Lsn(2)).unwrap_err();
        assert!(
            matches!(
                error,
                Error::NoSuchState(NoSuchState::NotCommitted { requested: Lsn(2), newest: Lsn(1) })
            ),
            "{error}"
        );
        store.wait_durable(Lsn(0)).unwrap();
    });
}
