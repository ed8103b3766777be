//! Reads into device memory return the right bytes in the right places, all as of one batch, and change no other byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::device::DeviceBytes;
use remanent::device::host::HostDevice;
use remanent::error::Refused;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, PageId, Place, Store};

use crate::device_ops::{PLACE, bytes_of, devices, open, page};
use crate::kill::workload::Random;

/// For pages in all places, short and long ranges, and memory in two places, each byte equals the result of a
/// byte-by-byte copy.
#[test]
fn each_device_memory_gets_its_range() {
    const LEN: u64 = 300_000;
    for device in devices() {
        let label = device.label();
        let store = open(&SimDisk::new(), device);
        let mut random = Random(5);
        let mut pages = Vec::new();
        for (len, place) in
            [(100, PLACE), (200_001, PLACE), (5000, Place::Pinned), (0, PLACE), (90_000, Place::Disk)]
        {
            let mut bytes = random.bytes(len);
            let mut batch = store.batch();
            batch.create_from(bytes.clone(), place);
            let created = store.commit(batch).unwrap().pages[0];
            if len > 80 {
                // Write to the pages after their images were written, including the page on disk.
                let mut batch = store.batch();
                batch.write(created, 50, &[7; 30]);
                store.commit(batch).unwrap();
                bytes[50..80].fill(7);
            }
            pages.push((created, bytes));
        }
        for round in 0..30 {
            let place = if round % 3 == 0 { Place::Pinned } else { PLACE };
            let memory = store.device_bytes(LEN, place).unwrap();
            let mut plain = random.bytes(LEN);
            memory.write(0, &plain).unwrap();
            let (mut parts, mut at) = (Vec::new(), 0);
            for _ in 0..random.below(9) {
                let (page, bytes) = &pages[random.below(pages.len() as u64) as usize];
                at += random.below(2000);
                let offset = random.below(bytes.len() as u64 + 1);
                let len = random.below(bytes.len() as u64 - offset + 1).min(LEN - at);
                let (from, to) = (offset as usize..(offset + len) as usize, at as usize..(at + len) as usize);
                plain[to].copy_from_slice(&bytes[from]);
                parts.push((*page, offset, memory.part(at..at + len).unwrap()));
                at += len;
                if at + 2000 > LEN {
                    break;
                }
            }
            let ranges: Vec<_> = parts.iter().map(|(page, offset, part)| (*page, *offset, part)).collect();
            assert_eq!(store.read_device(&ranges).unwrap(), store.lsn());
            assert!(bytes_of(&memory) == plain, "round {round} on {label}");
        }
    }
}

/// Each batch writes its number to all pages, so all memories must contain the number of the batch that the read
/// returns.
#[test]
fn device_reads_return_state_after_one_batch() {
    const LEN: u64 = 40_000;
    let device = Arc::new(LateDevice::seeded(Arc::new(HostDevice::new()), 6));
    let store = open(&SimDisk::new(), device);
    let pages: Vec<PageId> = (0..4).map(|_| page(&store, &[0; LEN as usize])).collect();
    let memory: Vec<DeviceBytes> = pages.iter().map(|_| store.device_bytes(LEN, PLACE).unwrap()).collect();
    let first = store.lsn().0;
    let is_done = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let number = (store.lsn().0 + 1 - first) as u8;
                let mut batch = store.batch();
                pages.iter().for_each(|page| _ = batch.fill(*page, 0, LEN, &[number]));
                // A read waits for all earlier batches, so batches must not accumulate.
                store.submit(batch).unwrap().wait(Ack::Applied).unwrap();
            }
        });
        let ranges: Vec<_> = pages.iter().zip(&memory).map(|(page, memory)| (*page, 0, memory)).collect();
        // Check only after the writer has ended, because a failure must not leave it running.
        let read =
            |_| store.read_device(&ranges).map(|lsn| (lsn, memory.iter().map(bytes_of).collect::<Vec<_>>()));
        let found: Vec<_> = (0..30).map(read).collect();
        is_done.store(true, Ordering::Relaxed);
        found
    });
    for found in found {
        let (lsn, memories) = found.unwrap();
        let number = (lsn.0 - first) as u8;
        for bytes in memories {
            assert!(bytes.iter().all(|byte| *byte == number), "as of {lsn}");
        }
    }
}

#[test]
fn unreadable_source_or_target_is_refused() {
    let device = Arc::new(HostDevice::new());
    let store = open(&SimDisk::new(), device.clone());
    let one = page(&store, &[1; 100]);
    let memory = store.device_bytes(100, PLACE).unwrap();
    let refused = |ranges: &[(PageId, u64, &DeviceBytes)]| store.read_device(ranges).unwrap_err();
    assert!(matches!(refused(&[(PageId(99), 0, &memory)]), Error::UnknownPage { page: PageId(99) }));
    let outside = refused(&[(one, 1, &memory)]);
    assert!(matches!(outside, Error::OutOfBounds { offset: 1, len: 100, page_len: 100, .. }), "{outside}");
    assert!(matches!(refused(&[(one, u64::MAX, &memory)]), Error::OutOfBounds { .. }));
    let (left, right) = (memory.part(0..60).unwrap(), memory.part(59..100).unwrap());
    let overlap = refused(&[(one, 0, &right), (one, 0, &left)]);
    assert!(
        matches!(&overlap, Error::Refused(Refused::Memory { reason, .. }) if reason.contains("overlaps")),
        "{overlap}"
    );
    let foreign = Store::temporary().unwrap().device_bytes(100, PLACE).unwrap();
    assert!(matches!(refused(&[(one, 0, &foreign)]), Error::Refused(Refused::Memory { .. })));
    // The target is memory that a page uses.
    let mut batch = store.batch();
    batch.create_in(&memory);
    let lent = store.commit(batch).unwrap().pages[0];
    assert!(
        matches!(refused(&[(one, 0, &memory)]), Error::Refused(Refused::MemoryInUse { page, .. }) if page == lent)
    );
    assert_eq!(store.read_to_vec(lent).unwrap(), [0; 100]);
    // An empty list is valid.
    store.read_device(&[]).unwrap();
    store.read_device(&[(one, 100, &store.device_bytes(0, PLACE).unwrap())]).unwrap();
}
