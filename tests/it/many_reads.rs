//! Reads of many ranges at once return the right bytes in the right places, all as of one batch, without
//! waiting for commits.

use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::device::{Device, Fence, Lane};
use remanent::store::{ManyBytes, ReadMany};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, PageId, Place, Store};

use crate::device_ops::{PLACE, content, devices, open, page};
use crate::kill::workload::Random;

const MIB: u64 = 1 << 20;

fn read(store: &Store, ranges: &[(PageId, Range<u64>)]) -> ManyBytes {
    store.read_many(ranges).unwrap().wait().unwrap()
}

/// Reads ranges of the same pages on early and late devices: short and long ranges together, in one place and
/// in several, empty ranges, and the same bytes twice.
#[test]
fn each_range_holds_its_own_bytes() {
    for device in devices() {
        let label = device.label();
        let store = open(&SimDisk::new(), device);
        let mut random = Random(8);
        let mut pages = Vec::new();
        for (len, place) in
            [(100, PLACE), (200_001, PLACE), (5000, Place::Pinned), (0, PLACE), (70_000, PLACE)]
        {
            let bytes = random.bytes(len);
            let created = store.commit({
                let mut batch = store.batch();
                batch.create_from(bytes.clone(), place);
                batch
            });
            pages.push((created.unwrap().pages[0], bytes));
        }
        for round in 0..60 {
            // Every second round reads from one place only, so that the ranges can be gathered on the device.
            let among: Vec<usize> = if round % 2 == 0 { vec![0, 1, 3, 4] } else { vec![0, 1, 2, 3, 4] };
            let ranges: Vec<(usize, Range<u64>)> = (0..random.below(12))
                .map(|_| {
                    let page = among[random.below(among.len() as u64) as usize];
                    let start = random.below(pages[page].1.len() as u64 + 1);
                    let end = start + random.below(pages[page].1.len() as u64 - start + 1);
                    (page, start..end)
                })
                .collect();
            let requested: Vec<_> =
                ranges.iter().map(|(page, range)| (pages[*page].0, range.clone())).collect();
            let found = read(&store, &requested);
            assert_eq!((found.count(), found.lsn()), (ranges.len(), store.lsn()));
            let mut whole = Vec::new();
            for (index, (page, range)) in ranges.iter().enumerate() {
                let expected = &pages[*page].1[range.start as usize..range.end as usize];
                assert!(found.get(index) == expected, "range {index} of round {round} on {label}");
                assert_eq!(found.range(index), whole.len()..whole.len() + expected.len());
                whole.extend_from_slice(expected);
            }
            assert!(found.as_bytes() == whole, "round {round} on {label}");
        }
    }
}

/// Each batch writes its number to all pages, so all bytes of a read must equal the number of the batch that
/// the read reports.
#[test]
fn ranges_of_one_read_are_of_one_batch() {
    const LEN: u64 = 40_000;
    let host = || Arc::new(HostDevice::new());
    let devices: [Arc<dyn Device>; 2] = [host(), Arc::new(LateDevice::seeded(host(), 6))];
    for device in devices {
        let store = open(&SimDisk::new(), device);
        let pages: Vec<PageId> = (0..4).map(|_| page(&store, &[0; LEN as usize])).collect();
        let first = store.lsn().0;
        let is_done = AtomicBool::new(false);
        let reads = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    let number = (store.lsn().0 + 1 - first) as u8;
                    let mut batch = store.batch();
                    pages.iter().for_each(|page| _ = batch.fill(*page, 0, LEN, &[number]));
                    // A read waits for all earlier batches, so batches must not accumulate.
                    store.submit(batch).unwrap().wait(Ack::Applied).unwrap();
                }
            });
            let requested: Vec<_> = pages.iter().map(|page| (*page, 10..LEN)).collect();
            let begin = || {
                let newest = store.lsn();
                (newest, store.read_many(&requested))
            };
            // Several reads run at the same time.
            let begun: Vec<_> = (0..40).map(|_| [begin(), begin(), begin()]).collect();
            let wait = |(lsn, read): (_, remanent::Result<ReadMany>)| (lsn, read.and_then(ReadMany::wait));
            let reads: Vec<_> = begun.into_iter().flatten().map(wait).collect();
            is_done.store(true, Ordering::Relaxed);
            reads
        });
        for (newest, found) in reads {
            let found = found.unwrap();
            assert!(found.lsn() >= newest, "a batch that was logged before the read is missing");
            let number = (found.lsn().0 - first) as u8;
            assert!(found.as_bytes().iter().all(|byte| *byte == number), "as of {}", found.lsn());
        }
    }
}

#[test]
fn invalid_range_is_reported_by_handle() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let page = page(&store, &[1; 64]);
    let error = |ranges: &[(PageId, Range<u64>)]| store.read_many(ranges).unwrap().wait().unwrap_err();
    let past = error(&[(page, 0..1), (page, 60..65)]);
    assert!(matches!(past, Error::OutOfBounds { offset: 60, len: 5, page_len: 64, .. }), "{past}");
    #[allow(clippy::reversed_empty_ranges, reason = "a caller may")]
    let reversed = error(&[(page, 9..3)]);
    assert!(matches!(reversed, Error::OutOfBounds { offset: 9, len: 0, .. }), "{reversed}");
    let unknown = error(&[(page, 0..1), (PageId(77), 0..1)]);
    assert!(matches!(unknown, Error::UnknownPage { page: PageId(77) }), "{unknown}");
    assert!(read(&store, &[]).as_bytes().is_empty());
    // The memory of these reads no longer counts toward the limit.
    assert_eq!(read(&store, &[(page, 0..64)]).as_bytes(), [1; 64]);
}

/// The memory of reads has a common limit, whether the reads are running, complete and held, or dropped.
#[test]
fn memory_of_concurrent_reads_is_limited() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let page = page(&store, &vec![7; MIB as usize]);
    let ask = |count: usize| store.read_many(&vec![(page, 0..MIB); count]);
    let refused = |read: remanent::Result<ReadMany>, requested: u64| {
        let error = read.unwrap_err();
        let is_it = matches!(error, Error::OutOfMemory { place: Place::Pinned, len } if len == requested);
        assert!(is_it, "{error}");
    };
    refused(ask(257), 257 * MIB);
    let held = ask(200).unwrap().wait().unwrap();
    refused(ask(57), 57 * MIB);
    // A failed read frees its memory, and a read that is dropped while it is running does too.
    assert!(store.read_many(&[(page, 0..50 * MIB)]).unwrap().wait().is_err());
    drop(ask(56).unwrap());
    while ask(56).is_err() {
        std::thread::yield_now();
    }
    drop(held);
    while ask(256).is_err() {
        std::thread::yield_now();
    }
}

/// A device that completes no bulk copy to the host until the test opens the gate.
struct Gate {
    inner: LateDevice,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Device for Gate {
    forward!(inner: label allocate release staging submit reached after places_and_abilities);

    fn wait(&self, fence: Fence) -> remanent::Result<()> {
        if fence.lane == Lane::Drain {
            let _is_open = self.opened.wait_while(self.is_open.lock().unwrap(), |is_open| !*is_open).unwrap();
        }
        self.inner.wait(fence)
    }
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A running read is polled, waited for and awaited. Concurrent commits succeed, and their bytes are not
/// returned by the read.
#[test]
fn running_read_blocks_no_commit() {
    let inner = LateDevice::new(Arc::new(HostDevice::new()));
    let gate = Arc::new(Gate { inner, is_open: Mutex::new(false), opened: Condvar::new() });
    let store = open(&SimDisk::new(), gate.clone());
    let page = page(&store, &[1; 100_000]);
    let [waited, awaited, dropped] = [(); 3].map(|()| store.read_many(&[(page, 0..100_000)]).unwrap());
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut context = Context::from_waker(&waker);
    let mut awaited = pin!(awaited);
    for _ in 0..3 {
        assert!(awaited.as_mut().poll(&mut context).is_pending());
    }
    assert!(!waited.is_ready().unwrap() && !waited.wait_timeout(Duration::from_millis(1)).unwrap());
    store.commit(store.batch().fill(page, 0, 100_000, &[2])).unwrap();
    assert_eq!(woken.0.load(Ordering::SeqCst), 0);
    drop(dropped);

    *gate.is_open.lock().unwrap() = true;
    gate.opened.notify_all();
    assert!(waited.wait_timeout(Duration::MAX).unwrap() && waited.is_ready().unwrap());
    assert!(waited.wait().unwrap().as_bytes() == [1; 100_000]);
    // The read of the other handle completes after it, on the same thread.
    while woken.0.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let Poll::Ready(found) = awaited.as_mut().poll(&mut context) else { panic!("woken for nothing") };
    assert!(found.unwrap().as_bytes() == [1; 100_000]);
    assert!(content(&store, page) == [2; 100_000]);
}

/// A handle outlives its store. Bytes that are being downloaded arrive, and their memory is freed.
#[test]
fn close_waits_for_reads() {
    let host = Arc::new(HostDevice::new());
    let store = open(&SimDisk::new(), Arc::new(LateDevice::seeded(host, 2)));
    let page = page(&store, &[5; 100_000]);
    let read = store.read_many(&[(page, 1..100_000)]).unwrap();
    store.close().unwrap();
    assert!(read.is_ready().unwrap());
    assert!(read.wait().unwrap().as_bytes() == [5; 99_999]);
}

/// A device that fails during a read poisons the store, and the handle returns the error.
#[test]
fn failed_device_read_is_an_error() {
    for (call, nth) in [(DeviceCall::Submit, 1), (DeviceCall::Submit, 2), (DeviceCall::Wait, 1)] {
        let late = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
        let device = Arc::new(FaultyDevice::new(late));
        let store = open(&SimDisk::new(), device.clone());
        let page = page(&store, &[5; 100_000]);
        assert!(content(&store, page) == [5; 100_000]);
        device.arm(DeviceFault { call: Some(call), nth, context_lost: false });
        let error = store.read_many(&[(page, 0..100_000)]).unwrap().wait().unwrap_err();
        assert!(device.struck() && error.to_string().contains("as arranged"), "{call:?} {nth}: {error}");
        assert!(matches!(store.commit(store.batch()), Err(Error::Poisoned(_))), "{call:?} {nth}");
    }
}
