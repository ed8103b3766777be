//! Callers' streams on a GPU: the guarantees of leases, tickets and captures for the caller's kernels.
//!
//! The caller's kernels are copies by the driver. A stream that waits for a word in host memory simulates a
//! kernel that does not end.

use std::thread;

use remanent::batch::{InitialCopy, Shadow, Width, WorkingCopy};
use remanent::device::Lane;
use remanent::device::cuda::CudaDevice;
use remanent::error::Refused;
use remanent::options::LogOptions;
use remanent::{DeviceChoice, Error, Lease, Options, PageId, Place, Store};

use crate::gpu::{self, Caller, Memory, Stream};

const LEN: u64 = 100_000;
const PLACE: Place = Place::Device(0);

fn options() -> Options {
    Options::new().device(DeviceChoice::Cuda(0)).log(LogOptions::new().segment_len(4 << 20))
}

/// Creates a store with one page that is filled with ones.
fn store(place: Place) -> (Store, PageId) {
    let store = options().open_temporary().unwrap();
    let mut batch = store.batch();
    let page = batch.create(LEN, place).page();
    batch.fill(page, 0, LEN, &[1]);
    let page = store.commit(batch).unwrap().pages[0];
    (store, page)
}

fn fill(store: &Store, page: PageId, byte: u8) {
    let mut batch = store.batch();
    batch.fill(page, 0, LEN, &[byte]);
    store.commit(batch).unwrap();
}

/// Returns the value of all bytes. Asserts that all bytes are equal.
fn value(bytes: &[u8]) -> u8 {
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "bytes of several versions");
    bytes[0]
}

fn read(store: &Store, page: PageId) -> u8 {
    let mut bytes = vec![0; LEN as usize];
    store.read(page, 0, &mut bytes).unwrap();
    value(&bytes)
}

/// Queues a copy of the leased page on the stream.
fn queue_read(stream: &Stream, lease: &Lease<'_>, seen: &Memory) {
    stream.copy(seen.address, lease.address().unwrap(), LEN);
}

#[test]
fn stalled_stream_blocks_no_commit_and_sees_leased_bytes() {
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        for place in [PLACE, Place::Host, Place::Unified] {
            let (store, page) = store(place);
            let (stream, seen) = (caller.stream(), caller.memory(LEN));
            let lease = store.lease(page).unwrap();
            let hold = stream.hold();
            lease.on(stream.raw()).unwrap();
            queue_read(&stream, &lease, &seen);
            let address = lease.address();
            thread::scope(|scope| _ = scope.spawn(|| (2..=9).for_each(|byte| fill(&store, page, byte))));
            assert_eq!((read(&store, page), lease.address()), (9, address));
            queue_read(&stream, &lease, &seen);
            drop(lease);
            fill(&store, page, 10);
            fill(&store, page, 11);
            // An allocation must not reuse the memory that the stream has yet to read.
            let mut batch = store.batch();
            let other = batch.create(LEN, place).page();
            batch.fill(other, 0, LEN, &[77]);
            store.commit(batch).unwrap();
            store.snapshot().unwrap();
            assert_eq!((read(&store, page), stream.is_done()), (11, false));
            hold.let_go();
            stream.synchronize();
            assert_eq!(value(&seen.content()), 1, "in {place}");
            store.close().unwrap();
        }
    });
}

#[test]
fn a_stream_sees_the_batches_that_it_waits_for() {
    let Some(caller) = Caller::new() else { return };
    let (store, page) = store(PLACE);
    let (stream, seen) = (caller.stream(), caller.memory(LEN));
    let address = store.lease(page).unwrap().address().unwrap();
    for byte in 2..200 {
        let mut batch = store.batch();
        batch.write(page, 0, &vec![byte; LEN as usize]);
        let ticket = store.submit(batch).unwrap();
        ticket.wait_on(stream.raw()).unwrap();
        stream.copy(seen.address, address, LEN);
        stream.synchronize();
        assert_eq!(value(&seen.content()), byte);
    }
    assert_eq!(
        store.lease(page).unwrap().address(),
        Some(address),
        "a page that no lease holds stays where it is"
    );
    // A lease orders several streams, including the default stream, after the preceding batches.
    let (second, seen_too) = (caller.default_stream(), caller.memory(LEN));
    for byte in 2..100 {
        let mut batch = store.batch();
        batch.write(page, 0, &vec![byte; LEN as usize]);
        store.submit(batch).unwrap();
        let lease = store.lease(page).unwrap();
        lease.on(stream.raw()).unwrap().on(second.raw()).unwrap();
        queue_read(&stream, &lease, &seen);
        queue_read(&second, &lease, &seen_too);
        lease.end().unwrap();
        stream.synchronize();
        second.synchronize();
        assert_eq!((value(&seen.content()), value(&seen_too.content())), (byte, byte));
    }
}

#[test]
fn graph_capture_survives_store_calls() {
    let Some(caller) = Caller::new() else { return };
    let (store, page) = store(PLACE);
    let (stream, source, seen) = (caller.stream(), caller.memory(LEN), caller.memory(LEN));
    let lease = store.lease(page).unwrap();
    lease.on(stream.raw()).unwrap();
    let ticket = {
        let mut batch = store.batch();
        batch.create(1, PLACE);
        store.submit(batch).unwrap()
    };
    let capture = stream.capture();
    queue_read(&stream, &lease, &source);
    let refused = [lease.on(stream.raw()).map(drop), ticket.wait_on(stream.raw())];
    for refused in refused {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Refused(Refused::Stream { .. })), "{error}");
    }
    // Use all operations of the store, on this thread and on another: memory, copies, fences and streams.
    let work = |store: &Store| {
        let mut batch = store.batch();
        let other = batch.create(LEN, PLACE).page();
        batch.fill(other, 0, LEN, &[9]);
        let other = store.commit(batch).unwrap().pages[0];
        assert_eq!(read(store, other), 9);
        store.snapshot().unwrap();
        let second = caller.stream();
        store.lease(other).unwrap().on(second.raw()).unwrap();
        let gpu = CudaDevice::open(0).unwrap();
        assert_eq!(remanent::device::Device::reached(&gpu, Lane::Apply), 0);
        drop(gpu);
        let mut batch = store.batch();
        batch.delete(other);
        store.commit(batch).unwrap();
    };
    work(&store);
    thread::scope(|scope| {
        _ = scope.spawn(|| {
            caller.enter();
            fill(&store, page, 2);
            work(&store);
        });
    });
    stream.copy(seen.address, source.address, LEN);
    let graph = capture.end();
    for _ in 0..3 {
        graph.launch(&stream);
        fill_elsewhere(&store, page);
    }
    stream.synchronize();
    assert_eq!(value(&seen.content()), 1, "what was leased when the graph was captured");
    drop(lease);
    assert_eq!(read(&store, page), 3);
}

fn fill_elsewhere(store: &Store, page: PageId) {
    thread::scope(|scope| _ = scope.spawn(|| fill(store, page, 3)));
}

#[test]
fn store_opens_on_gpu_and_host_alternately() {
    // This test has its own process, because closing a store frees memory, which waits for every stream of
    // the process.
    let Some(_caller) = Caller::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let open = |device| options().device(device).open(directory.path()).unwrap();
    let (host, gpu) = (DeviceChoice::Host, DeviceChoice::Cuda(0));
    let mut pages = Vec::new();
    for (round, choice) in [host, gpu, gpu, host, gpu].into_iter().enumerate() {
        let store = open(choice);
        for (number, page) in pages.iter().enumerate() {
            assert_eq!(read(&store, *page), number as u8 + 1, "round {round}");
        }
        let mut batch = store.batch();
        for place in [PLACE, Place::Host] {
            let page = batch.create(LEN, place).page();
            pages.push(PageId(0));
            batch.fill(page, 0, LEN, &[pages.len() as u8]);
        }
        let created = store.commit(batch).unwrap().pages;
        let known = pages.len() - 2;
        pages[known..].copy_from_slice(&created);
        if round == 2 {
            store.snapshot().unwrap();
        }
    }
}

#[test]
fn audit_detects_kernel_write_to_page() {
    let Some(caller) = Caller::new() else { return };
    for place in [PLACE, Place::Host, Place::Unified] {
        let (store, page) = store(place);
        store.snapshot().unwrap();
        let mut batch = store.batch();
        let second = batch.create(3 * LEN, place).page();
        batch.fill(second, 0, LEN, &[2]);
        let second = store.commit(batch).unwrap().pages[0];
        assert_eq!(store.audit().unwrap().changed, []);
        let (stream, zeros) = (caller.stream(), caller.memory(10));
        for (page, offset) in [(page, 70), (second, 99_990)] {
            let lease = store.lease(page).unwrap();
            lease.on(stream.raw()).unwrap();
            stream.copy(lease.address().unwrap() + offset, zeros.address, 10);
            lease.end().unwrap();
            stream.synchronize();
        }
        let audit = store.audit().unwrap();
        assert_eq!((audit.pages, audit.bytes, audit.by_image, audit.by_replay), (2, 4 * LEN, 1, 1));
        let changed: Vec<_> =
            audit.changed.iter().map(|changed| (changed.page, changed.first_difference)).collect();
        assert_eq!(changed, [(page, Some(70)), (second, Some(99_990))], "in {place}");
    }
}

/// This test does not run with compute-sanitizer's memcheck, under which no kernel of any stream ends while
/// one stream is blocked.
#[test]
fn stalled_stream_blocks_only_its_own_capture() {
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let (store, first) = store(PLACE);
        let mut batch = store.batch();
        batch.create(LEN, PLACE);
        let second = store.commit(batch).unwrap().pages[0];
        let (slow, quick) = (caller.stream(), caller.stream());
        let zeros = caller.memory(LEN);
        let copy_on = |page, stream: &Stream| {
            let memory = store.device_bytes(LEN, PLACE).unwrap().on(stream.raw());
            store.working_copy_in(page, &memory, Width::W4, Shadow::Page, InitialCopy::Load).unwrap()
        };
        let (slow_copy, quick_copy) = (copy_on(first, &slow), copy_on(second, &quick));
        let capture = |copy: &WorkingCopy| {
            let mut batch = store.batch();
            batch.capture(copy);
            store.commit(batch)
        };
        let hold = slow.hold();
        slow.copy(slow_copy.bytes().address().unwrap(), zeros.address, LEN);
        // The fast stream copies the page of ones through the caller's memory.
        quick.copy(
            quick_copy.bytes().address().unwrap(),
            store.lease(first).unwrap().address().unwrap(),
            LEN,
        );
        thread::scope(|scope| {
            let slow_capture = scope.spawn(|| capture(&slow_copy));
            // Make fifty commits, so that some of them certainly happen while the other stream is waiting.
            for _ in 0..50 {
                capture(&quick_copy).unwrap();
            }
            assert_eq!((read(&store, first), read(&store, second), slow.is_done()), (1, 1, false));
            hold.let_go();
            slow_capture.join().unwrap().unwrap();
        });
        assert_eq!(read(&store, first), 0);
    });
}
