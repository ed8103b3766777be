//! Leases during commits. The bytes of a lease do not change, and memory that pages no longer use is freed.

use std::sync::Arc;
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::options::MemoryOptions;
use remanent::testing::late_device::LateDevice;
use remanent::{Ack, Lsn, Place};
use shuttle::thread;

use crate::ground::{Ground, PAGE_LEN, bytes, options};
use crate::runner::{at_once, explore};

#[test]
fn leased_bytes_are_stable_during_other_commits() {
    explore(|time| {
        let ground = Ground::new(time, options(), 1);
        let write = || ground.count_to(3, 0, Ack::Applied);
        let lease = || {
            for _ in 0..2 {
                let lease = ground.store.lease(ground.pages(0)[0]).unwrap();
                // Batch 1 created the page, and batch n + 1 filled it with n.
                let shown = bytes(lease.lsn().0 - 1);
                for _ in 0..3 {
                    assert_eq!(lease.bytes().unwrap(), shown);
                    thread::yield_now();
                }
                lease.end().unwrap();
            }
        };
        at_once(&[&write, &lease]);
        assert_eq!(ground.read(0), 3);
        assert_eq!(ground.used_bytes(), 2 * PAGE_LEN, "what the page left is free again");
        ground.close(Lsn(4), Duration::ZERO);
    });
}

#[test]
fn lease_on_a_late_device_needs_one_copy() {
    explore(|time| {
        // The budget suffices for both pages and one copy of the leased page.
        let options = options().memory(MemoryOptions::new().budget(Place::Host, 3 * PAGE_LEN));
        let device = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
        let ground = Ground::on(time, options, 1, device.clone());
        let stream = device.stream();
        let write = || ground.count_to(2, 0, Ack::Applied);
        let lease = || {
            let lease = ground.store.lease(ground.pages(0)[0]).unwrap();
            lease.on(stream).unwrap();
            lease.end().unwrap();
        };
        at_once(&[&write, &lease]);
        device.synchronize(stream).unwrap();
        assert_eq!(ground.read(0), 2);
        ground.close(Lsn(3), Duration::ZERO);
    });
}

#[test]
fn leases_of_several_threads_end_in_any_order() {
    explore(|time| {
        let ground = Ground::new(time, options(), 1);
        let lease = || {
            let lease = ground.store.lease(ground.pages(0)[0]).unwrap();
            assert_eq!(lease.bytes().unwrap(), bytes(lease.lsn().0 - 1));
        };
        at_once(&[&lease, &lease, &|| _ = ground.count(0, 1, Ack::Durable).unwrap()]);
        assert_eq!(ground.read(0), 1);
        assert_eq!(ground.used_bytes(), 2 * PAGE_LEN);
        ground.close(Lsn(2), Duration::ZERO);
    });
}
