//! Copies of ranges between pages of one batch. The copied bytes are those of the source at the copy's
//! position in the batch.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::batch::PageRef;
use remanent::device::host::HostDevice;
use remanent::error::Invalid;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, Store, WriteBatch};

use crate::device_ops::{content, devices, open, page};
use crate::kill::workload::Random;

const PLACES: [Place; 3] = [Place::Device(0), Place::Pinned, Place::Host];

/// Adds a random operation to a batch, and applies it to plain vectors.
fn operation(
    random: &mut Random,
    batch: &mut WriteBatch,
    names: &mut Vec<PageRef>,
    plain: &mut Vec<Vec<u8>>,
) {
    let count = plain.len() as u64;
    let (from, to) = (random.below(count) as usize, random.below(count) as usize);
    match random.below(8) {
        0 => {
            let len = random.below(9_000) as usize;
            plain[to].resize(len, 0);
            batch.resize(names[to], len as u64);
        }
        1 if count < 8 => {
            let len = 1 + random.below(500);
            let bytes = random.bytes(len);
            names.push(batch.create_from(bytes.clone(), PLACES[random.below(3) as usize]).page().into());
            plain.push(bytes);
        }
        2 => {
            let at = random.below(plain[to].len() as u64 + 1) as usize;
            let bytes = random.bytes((plain[to].len() - at) as u64);
            plain[to][at..].copy_from_slice(&bytes);
            batch.write(names[to], at as u64, &bytes);
        }
        3 => {
            batch.move_to(names[to], PLACES[random.below(3) as usize]);
        }
        // Most operations are copies, including empty ones and copies within one page, whose ranges may
        // overlap.
        _ => {
            let len = random.below(plain[from].len().min(plain[to].len()) as u64 + 1) as usize;
            let start = random.below((plain[from].len() - len) as u64 + 1) as usize;
            let at = random.below((plain[to].len() - len) as u64 + 1) as usize;
            let bytes = plain[from][start..start + len].to_vec();
            plain[to][at..at + len].copy_from_slice(&bytes);
            batch.copy(names[from], start as u64..(start + len) as u64, names[to], at as u64);
        }
    }
}

#[test]
fn copy_reads_bytes_at_its_point_in_batch() {
    for device in devices() {
        let label = device.label();
        let disk = SimDisk::new();
        let store = open(&disk, device);
        let mut random = Random(5);
        let mut plain: Vec<Vec<u8>> = [100, 4096, 7001].map(|len| random.bytes(len)).into();
        let mut batch = store.batch();
        for (bytes, place) in plain.iter().zip(PLACES) {
            batch.create_from(bytes.clone(), place);
        }
        let mut pages = store.commit(batch).unwrap().pages;
        for round in 0..60 {
            let mut batch = store.batch();
            let mut names: Vec<PageRef> = pages.iter().map(|page| PageRef::from(*page)).collect();
            for _ in 0..1 + random.below(8) {
                operation(&mut random, &mut batch, &mut names, &mut plain);
            }
            pages.extend(store.commit(batch).unwrap().pages);
            for (page, bytes) in pages.iter().zip(&plain) {
                assert!(content(&store, *page) == *bytes, "{page}, round {round} on {label}");
            }
        }
        drop(store);
        // The log contains the copied bytes, not a reference to other bytes (I2).
        let store = open(&disk, Arc::new(HostDevice::new()));
        for (page, bytes) in pages.iter().zip(&plain) {
            assert!(content(&store, *page) == *bytes, "{page} recovered from {label}");
        }
    }
}

/// A copy of a few bytes of a long page logs only these bytes, and does not change the source.
#[test]
fn copy_logs_only_its_range() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let (long, short) = (page(&store, &[7; 300_000]), page(&store, &[0; 8]));
    let (before, epoch) = (store.stats().log.bytes, store.page(long).unwrap().epoch);
    store.commit(store.batch().copy(long, 299_996..300_000, short, 2)).unwrap();
    assert!(store.stats().log.bytes - before <= 4096);
    assert_eq!(content(&store, short), [0, 0, 7, 7, 7, 7, 0, 0]);
    assert_eq!(store.page(long).unwrap().epoch, epoch);
}

#[test]
fn invalid_copy_changes_nothing() {
    type Build = fn(&Store, &mut WriteBatch, [PageId; 2]);
    type Expected = fn(&Error) -> bool;
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let pages = [page(&store, &[1; 64]), page(&store, &[2; 32])];
    let rows: [(&str, Build, Expected); 10] = [
        (
            "past the source's end",
            |_, batch, [one, other]| _ = batch.copy(one, 60..65, other, 0),
            |error| matches!(error, Error::OutOfBounds { offset: 60, len: 5, page_len: 64, .. }),
        ),
        (
            "past the target's end",
            |_, batch, [one, other]| _ = batch.copy(one, 0..8, other, 25),
            |error| matches!(error, Error::OutOfBounds { offset: 25, len: 8, page_len: 32, .. }),
        ),
        (
            "past the source's end, changed before",
            |_, batch, [one, other]| _ = batch.resize(one, 10).copy(one, 8..11, other, 0),
            |error| matches!(error, Error::OutOfBounds { offset: 8, len: 3, page_len: 10, .. }),
        ),
        (
            "nothing, past the source's end",
            |_, batch, [one, other]| _ = batch.copy(one, 65..65, other, 0),
            |error| matches!(error, Error::OutOfBounds { offset: 65, len: 0, .. }),
        ),
        (
            "nothing, past the target's end",
            |_, batch, [one, other]| _ = batch.copy(one, 0..0, other, 33),
            |error| matches!(error, Error::OutOfBounds { offset: 33, len: 0, .. }),
        ),
        (
            "a range that ends before it begins",
            #[allow(clippy::reversed_empty_ranges, reason = "a caller may")]
            |_, batch, [one, other]| _ = batch.copy(one, 9..3, other, 0),
            |error| matches!(error, Error::Invalid(Invalid::Operation { index: 0, .. })),
        ),
        (
            "more than a frame holds",
            |_, batch, [one, other]| _ = batch.copy(one, 0..2 << 30, other, 0),
            |error| matches!(error, Error::Limit { what: "batch", found: 0x8000_0000, .. }),
        ),
        (
            "from a page that is gone",
            |_, batch, [one, other]| _ = batch.delete(one).copy(one, 0..1, other, 0),
            |error| matches!(error, Error::UnknownPage { .. }),
        ),
        (
            "from another batch's page",
            |store, batch, [_, other]| {
                let foreign = store.batch().create(9, Place::Host).page();
                batch.copy(foreign, 0..1, other, 0);
            },
            |error| matches!(error, Error::UnknownPage { page: PageId(0) }),
        ),
        (
            "of bytes that only the device has",
            |store, batch, [one, other]| {
                let memory = store.device_bytes(4, Place::Device(0)).unwrap();
                batch.write_device(one, 0, &memory).copy(one, 0..1, other, 0);
            },
            |error| matches!(error, Error::Invalid(Invalid::Operation { index: 0, .. })),
        ),
    ];
    let lsn = store.lsn();
    for (name, build, is_expected) in rows {
        let mut batch = store.batch();
        build(&store, &mut batch, pages);
        let error = store.commit(batch).unwrap_err();
        assert!(is_expected(&error), "{name}: {error}");
        assert_eq!(store.lsn(), lsn, "{name}");
    }
    // The device's bytes may be overwritten after the copy. The copy reads the earlier bytes.
    let memory = store.device_bytes(4, Place::Device(0)).unwrap();
    let mut batch = store.batch();
    batch.copy(pages[0], 0..2, pages[1], 0).write_device(pages[0], 0, &memory);
    store.commit(batch).unwrap();
    assert_eq!((&content(&store, pages[1])[..3], content(&store, pages[0])[0]), (&[1, 1, 2][..], 0));
}

/// The source is read before the batch has a position in the log. If another batch writes the source in
/// between, the target must still contain the bytes that the source has at the position of the copying batch.
#[test]
fn concurrent_copy_reads_source_at_its_log_position() {
    const LEN: u64 = 5000;
    let device = Arc::new(LateDevice::seeded(Arc::new(HostDevice::new()), 9));
    let store = open(&SimDisk::new(), device);
    let (source, target) = (page(&store, &[0; LEN as usize]), page(&store, &[0; LEN as usize]));
    let copied = AtomicBool::new(false);
    let mut written = vec![(store.lsn().0, 0_u8)];
    let copies = std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            let copy = || {
                let lsn = store.commit(store.batch().copy(source, 0..LEN, target, 0)).unwrap().position.lsn.0;
                (lsn, content(&store, target))
            };
            let copies: Vec<_> = (0..200).map(|_| copy()).collect();
            copied.store(true, Ordering::Relaxed);
            copies
        });
        while !copied.load(Ordering::Relaxed) {
            let number = written.len() as u8;
            let lsn = store.commit(store.batch().fill(source, 0, LEN, &[number])).unwrap().position.lsn.0;
            written.push((lsn, number));
        }
        copier.join().unwrap()
    });
    for (lsn, bytes) in copies {
        let (_, number) = written[written.partition_point(|(written, _)| *written < lsn) - 1];
        assert!(bytes == [number; LEN as usize], "the copy in batch {lsn}");
    }
}

/// A lease of the target keeps the old bytes, and a lease of the source needs no additional memory.
#[test]
fn lease_of_a_copy_target_keeps_the_old_bytes() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let (source, target) = (page(&store, b"from"), page(&store, b"to: "));
    let used = || -> u64 { store.stats().places.iter().map(|(_, usage)| usage.used()).sum() };
    let before = used();
    let (of_source, of_target) = (store.lease(source).unwrap(), store.lease(target).unwrap());
    store.commit(store.batch().copy(source, 0..4, target, 0)).unwrap();
    assert_eq!((of_source.bytes().unwrap(), of_target.bytes().unwrap()), (&b"from"[..], &b"to: "[..]));
    assert_eq!(content(&store, target), b"from");
    assert_eq!(used() - before, 4, "a spare for the target, none for the source");
}

/// Copies between all places of one device, of short pages and of pages that are too long for the fast path.
#[test]
fn pages_copy_between_all_places() {
    for device in devices() {
        let store = Store::open_on(Arc::new(SimDisk::new()), device, Options::new()).unwrap();
        let bytes = Random(3).bytes(200_001);
        for [from, to] in PLACES.iter().flat_map(|from| PLACES.map(|to| [*from, to])) {
            let mut batch = store.batch();
            batch.create_from(bytes.clone(), from);
            batch.create(bytes.len() as u64, to);
            let pages = store.commit(batch).unwrap().pages;
            let range: Range<u64> = 1..bytes.len() as u64;
            store.commit(store.batch().copy(pages[0], range, pages[1], 0)).unwrap();
            assert!(content(&store, pages[1])[..200_000] == bytes[1..], "{from} to {to}");
        }
    }
}
