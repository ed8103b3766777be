//! Guards of memory that callers' streams use: which operations wait for the work of the streams, and which
//! do not.
//!
//! The device executes all work as late as permitted. If a thread wrongly waits for a held stream, it panics
//! or hangs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use remanent::batch::Width;
use remanent::device::host::HostDevice;
use remanent::device::{Access, CallerMemory, DeviceBytes};
use remanent::device::{Command, CommandList, Device, Lane, RawStream, Span, StagingSpan};
use remanent::error::Refused;
use remanent::options::{LogOptions, SnapshotSchedule};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, Store, WriteBatch};

use crate::gpu::{self, Caller};

const LEN: u64 = 2000;
const PLACE: Place = Place::Device(0);

struct Bench {
    device: Arc<LateDevice>,
    store: Store,
    memory: DeviceBytes,
}

fn options() -> Options {
    Options::new().log(LogOptions::new().segment_len(64 << 10)).snapshots(SnapshotSchedule::never())
}

impl Bench {
    fn new() -> Self {
        let device = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
        let store = Store::open_on(Arc::new(SimDisk::new()), device.clone(), options()).unwrap();
        let memory = store.device_bytes(LEN, PLACE).unwrap();
        Self { device, store, memory }
    }

    fn commit(&self, build: impl FnOnce(&mut WriteBatch)) -> remanent::Result<Vec<PageId>> {
        let mut batch = self.store.batch();
        build(&mut batch);
        Ok(self.store.commit(batch)?.pages)
    }

    /// Queues a kernel on the stream that fills the bytes.
    fn fill(&self, stream: RawStream, bytes: &DeviceBytes, byte: u8) {
        let target = self.device.span_at(bytes.address().unwrap(), bytes.byte_len());
        self.device.queue(stream, move |inner| fill(inner, target, byte));
    }

    /// Queues a kernel on the stream that reads the bytes.
    fn queue_read(&self, stream: RawStream, bytes: &DeviceBytes) -> Arc<Mutex<Vec<u8>>> {
        let source = self.device.span_at(bytes.address().unwrap(), bytes.byte_len());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sent = seen.clone();
        self.device.queue(stream, move |inner| *sent.lock().unwrap() = content(inner, source));
        seen
    }

    /// Returns the number of bytes that were released but are not freed yet.
    fn retired(&self) -> u64 {
        // A commit frees memory whose use has ended, without waiting.
        self.commit(|batch| _ = batch.set_root("step", 1u64)).unwrap();
        self.store.stats().places.iter().map(|(_, usage)| usage.retired_bytes).sum()
    }

    fn read(&self, page: PageId) -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize];
        self.store.read(page, 0, &mut bytes).unwrap();
        bytes
    }
}

fn fill(device: &dyn Device, target: Span, byte: u8) {
    let fill = Command::Fill { target, pattern: [byte; 16], width: Width::W1 };
    let list = CommandList { commands: vec![fill], staging: Vec::new() };
    device.submit(Lane::Drain, list).unwrap().finish(device).unwrap();
}

fn content(device: &dyn Device, source: Span) -> Vec<u8> {
    let target = StagingSpan { index: 0, offset: 0, len: source.len as usize };
    let staging = vec![device.staging(source.len as usize).unwrap()];
    let list = CommandList { commands: vec![Command::Download { source, target }], staging };
    device.submit(Lane::Drain, list).unwrap().finish(device).unwrap()[0].to_vec()
}

fn page_of(byte: u8) -> Vec<u8> {
    vec![byte; LEN as usize]
}

#[test]
fn memory_is_released_after_stream_work_without_blocking_drop() {
    for access in [Access::Read, Access::Write] {
        let bench = Bench::new();
        let stream = bench.device.stream();
        bench.device.hold(stream, true);
        let memory = bench.store.device_bytes(LEN, PLACE).unwrap();
        let used = memory.part(8..16).unwrap();
        let guard = used.begin(stream, access).unwrap();
        // An allocation would reuse that memory if it were not kept.
        bench.fill(stream, &used, 3);
        guard.end().unwrap();
        drop((memory, used));
        assert_eq!(bench.retired(), LEN, "the stream stands still");
        bench.device.hold(stream, false);
        bench.store.trim().unwrap();
        assert_eq!(bench.retired(), 0);
        // The fill was executed before the memory was freed.
        bench.device.synchronize(stream).unwrap();
    }
}

#[test]
fn only_a_batch_that_reads_guarded_memory_waits() {
    let bench = Bench::new();
    let stream = bench.device.stream();
    bench.device.hold(stream, true);
    let guard = bench.memory.begin(stream, Access::Write).unwrap();
    bench.fill(stream, &bench.memory, 7);
    drop(guard);
    let page = bench.commit(|batch| _ = batch.create(LEN, PLACE)).unwrap()[0];
    let has_committed = AtomicBool::new(false);
    thread::scope(|scope| {
        let taking = scope.spawn(|| {
            bench.commit(|batch| _ = batch.write_device(page, 0, &bench.memory)).unwrap();
            has_committed.store(true, Ordering::Release);
        });
        bench.device.wait_for_waiter(stream);
        // Other batches continue in the meantime.
        bench.commit(|batch| _ = batch.fill(page, 0, LEN, &[1])).unwrap();
        assert_eq!((bench.read(page), has_committed.load(Ordering::Acquire)), (page_of(1), false));
        bench.device.hold(stream, false);
        taking.join().unwrap();
    });
    assert_eq!(bench.read(page), page_of(7));
}

#[test]
fn write_waits_for_stream_readers_and_read_does_not() {
    let bench = Bench::new();
    let stream = bench.device.stream();
    bench.memory.write(0, &page_of(4)).unwrap();
    bench.device.hold(stream, true);
    let guard = bench.memory.begin(stream, Access::Read).unwrap();
    let seen = bench.queue_read(stream, &bench.memory);
    drop(guard);
    let mut bytes = page_of(0);
    bench.memory.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, page_of(4));
    thread::scope(|scope| {
        let writing = scope.spawn(|| bench.memory.write(0, &page_of(5)).unwrap());
        bench.device.wait_for_waiter(stream);
        bench.device.hold(stream, false);
        writing.join().unwrap();
    });
    bench.device.synchronize(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), page_of(4));
}

#[test]
fn streams_are_ordered_if_one_writes() {
    for [first, second] in [Access::Read, Access::Write]
        .into_iter()
        .flat_map(|first| [Access::Read, Access::Write].map(|second| [first, second]))
    {
        let bench = Bench::new();
        let [one, other] = [bench.device.stream(), bench.device.stream()];
        bench.device.hold(one, true);
        let guard = bench.memory.begin(one, first).unwrap();
        let seen = match first {
            Access::Read => Some(bench.queue_read(one, &bench.memory)),
            Access::Write => {
                bench.fill(one, &bench.memory, 1);
                None
            }
        };
        guard.end().unwrap();
        // The host does not wait for the blocked stream.
        let guard = bench.memory.begin(other, second).unwrap();
        let later = match second {
            Access::Read => Some(bench.queue_read(other, &bench.memory)),
            Access::Write => {
                bench.fill(other, &bench.memory, 2);
                None
            }
        };
        guard.end().unwrap();
        // For other memory, the store waits for no stream.
        let beside = bench.store.device_bytes(LEN, PLACE).unwrap();
        let third = bench.device.stream();
        drop(beside.begin(third, Access::Write).unwrap());
        bench.device.synchronize(third).unwrap();
        if [first, second] != [Access::Read; 2] {
            bench.device.hold(one, false);
        }
        bench.device.synchronize(other).unwrap();
        bench.device.hold(one, false);
        bench.device.synchronize(one).unwrap();
        let what = format!("{first:?}, {second:?}");
        if let Some(seen) = seen {
            assert_eq!(*seen.lock().unwrap(), page_of(0), "{what}");
        }
        if let Some(later) = later {
            let expected = if first == Access::Write { 1 } else { 0 };
            assert_eq!(*later.lock().unwrap(), page_of(expected), "{what}");
        }
    }
}

#[test]
fn page_guard_reads_after_earlier_batches_and_forbids_writes() {
    let bench = Bench::new();
    let page = bench.commit(|batch| _ = batch.create_in(&bench.memory)).unwrap()[0];
    let stream = bench.device.stream();
    for byte in 1..20 {
        bench.store.submit(bench.store.batch().fill(page, 0, LEN, &[byte])).unwrap();
        let guard = bench.memory.begin(stream, Access::Read).unwrap();
        let seen = bench.queue_read(stream, &bench.memory);
        drop(guard);
        bench.device.synchronize(stream).unwrap();
        assert_eq!(*seen.lock().unwrap(), page_of(byte));
    }
    let refused = bench.memory.part(5..6).unwrap().begin(stream, Access::Write);
    assert!(
        matches!(refused, Err(Error::Refused(Refused::MemoryInUse { page: of, .. })) if of == page),
        "{refused:?}"
    );
    // The page is deleted. A kernel that started under a guard can still use the memory, because the handle
    // keeps it.
    bench.commit(|batch| _ = batch.delete(page)).unwrap();
    bench.store.trim().unwrap();
    drop(bench.memory.begin(stream, Access::Write).unwrap());
}

#[test]
fn store_does_not_use_bytes_while_guard_is_open() {
    let bench = Bench::new();
    let stream = bench.device.stream();
    let page = bench.commit(|batch| _ = batch.create(LEN, PLACE)).unwrap()[0];
    let refused = |result: remanent::Result<()>| match result {
        Err(Error::Refused(Refused::Memory { reason, .. })) => assert!(reason.contains("stream"), "{reason}"),
        other => panic!("{other:?}"),
    };
    let take = |memory: &DeviceBytes| bench.commit(|batch| _ = batch.write_device(page, 0, memory)).map(drop);
    let live_in = |memory: &DeviceBytes| bench.commit(|batch| _ = batch.create_in(memory)).map(drop);
    let guard = bench.memory.part(100..200).unwrap().begin(stream, Access::Write).unwrap();
    refused(take(&bench.memory));
    refused(bench.memory.read(150, &mut [0]));
    refused(bench.memory.write(150, &[0]));
    refused(live_in(&bench.memory));
    // On its stream, the memory is read in its current state, and the guard does not prevent this.
    take(&bench.memory.on(stream)).unwrap();
    bench.memory.write(99, &[6]).unwrap();
    guard.end().unwrap();
    take(&bench.memory).unwrap();

    let guard = bench.memory.begin(stream, Access::Read).unwrap();
    take(&bench.memory).unwrap();
    refused(bench.memory.write(150, &[0]));
    refused(live_in(&bench.memory));
    drop(guard);
    live_in(&bench.memory).unwrap();
    assert_eq!(bench.read(page)[98..101], [0, 6, 0]);
}

#[test]
fn a_guard_whose_end_cannot_be_recorded_keeps_the_memory() {
    let bench = Bench::new();
    let stream = bench.device.stream();
    let memory = bench.store.device_bytes(LEN, PLACE).unwrap();
    let guard = memory.begin(stream, Access::Write).unwrap();
    bench.device.capture(stream, true);
    let refused = memory.begin(stream, Access::Read);
    assert!(matches!(refused, Err(Error::Refused(Refused::Stream { .. }))), "{refused:?}");
    let refused = guard.end();
    assert!(matches!(refused, Err(Error::Refused(Refused::Stream { .. }))), "{refused:?}");
    bench.device.capture(stream, false);
    let refused = bench.commit(|batch| _ = batch.create_in(&memory));
    assert!(matches!(refused, Err(Error::Refused(Refused::Memory { .. }))), "{refused:?}");
    drop(memory);
    bench.store.trim().unwrap();
    let usage = bench.store.stats().places[0].1;
    assert_eq!(usage.used(), 2 * LEN, "it is not given to another");
}

#[test]
fn guard_on_device_without_streams_is_refused() {
    let late = LateDevice::new(Arc::new(HostDevice::new()));
    let store = Store::open_on(Arc::new(SimDisk::new()), Arc::new(HostDevice::new()), options()).unwrap();
    assert!(!store.supports_streams() && Bench::new().store.supports_streams());
    let memory = store.device_bytes(LEN, PLACE).unwrap();
    let refused = memory.begin(late.stream(), Access::Read);
    assert!(matches!(refused, Err(Error::Refused(Refused::Stream { .. }))), "{refused:?}");
    memory.write(0, &[1]).unwrap();
}

#[test]
fn device_error_in_guard_poisons_store() {
    type Use = fn(&DeviceBytes, RawStream, RawStream) -> remanent::Result<()>;
    let end: Use = |memory, stream, _| memory.begin(stream, Access::Write)?.end();
    let other: Use = |memory, stream, other| {
        memory.begin(stream, Access::Write)?.end()?;
        memory.begin(other, Access::Read).map(drop)
    };
    let read: Use = |memory, stream, _| {
        memory.begin(stream, Access::Write)?.end()?;
        memory.read(0, &mut [0])
    };
    let rows = [
        (DeviceCall::SignalExternal, end),
        (DeviceCall::StreamEvent, end),
        (DeviceCall::WaitExternal, end),
        (DeviceCall::Submit, end),
        (DeviceCall::HoldStream, other),
        (DeviceCall::WaitEvent, read),
    ];
    for (call, work) in rows {
        let late = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
        let device = Arc::new(FaultyDevice::new(late.clone()));
        let store = Store::open_on(Arc::new(SimDisk::new()), device.clone(), options()).unwrap();
        let memory = store.device_bytes(LEN, PLACE).unwrap();
        let streams = [late.stream(), late.stream()];
        // Queue work on the stream, so that the stream has not reached this point.
        late.queue(streams[0], |_| {});
        device.arm(DeviceFault { call: Some(call), nth: 1, context_lost: false });
        let error = work(&memory, streams[0], streams[1]).unwrap_err();
        assert!(matches!(error, Error::Poisoned(_)), "{call:?}: {error}");
        assert!(matches!(store.commit(store.batch()), Err(Error::Poisoned(_))), "{call:?}");
    }
}

/// A tensor that records when it is dropped.
struct Tensor(Arc<AtomicBool>);

impl Drop for Tensor {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn gpu_tensor_is_freed_after_its_stream_work() {
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let device = gpu::device().expect("it was there just now");
        let store = Store::open_on(Arc::new(SimDisk::new()), device, options()).unwrap();
        assert!(store.supports_streams());
        let step = || _ = store.commit(store.batch().set_root("step", 1u64)).unwrap();
        let (tensor, source) = (caller.memory(LEN), caller.memory(LEN));
        let [stream, other] = [caller.stream(), caller.stream()];
        let is_gone = Arc::new(AtomicBool::new(false));
        let owner = Tensor(is_gone.clone());
        // SAFETY: the caller keeps the memory until the end of the test.
        let memory = store.caller_bytes(&unsafe { CallerMemory::from_cuda(tensor.address, LEN, owner) });
        let memory = memory.unwrap();
        memory.write(0, &page_of(9)).unwrap();
        let hold = stream.hold();
        let guard = memory.begin(stream.raw(), Access::Write).unwrap();
        stream.copy(tensor.address, source.address, LEN);
        guard.end().unwrap();
        // Another stream waits for the end of the guard on the device.
        let guard = memory.begin(other.raw(), Access::Read).unwrap();
        other.copy(source.address, tensor.address, LEN);
        guard.end().unwrap();
        drop(memory);
        step();
        assert_eq!(
            (is_gone.load(Ordering::Acquire), stream.is_done(), other.is_done()),
            (false, false, false)
        );
        hold.let_go();
        stream.synchronize();
        other.synchronize();
        store.trim().unwrap();
        assert!(is_gone.load(Ordering::Acquire));
        assert_eq!(tensor.content(), source.content());
        store.close().unwrap();
    });
}
