//! Properties of single devices beyond those in `device_laws`: rejections by the host device, late execution,
//! and injected faults.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use remanent::batch::Width;
use remanent::device::host::HostDevice;
use remanent::device::{
    Access, Command, CommandList, Device, DeviceStreams, Fence, IndexList, KernelAddresses, Lane, MemoryId,
    Payload, Pending, Piece, PieceKind, RawStream, Selection, Span, Staging, StagingMemory, StagingSpan,
};
use remanent::error::{Refused, Remedy, Unavailable};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::{LateDevice, POISON};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, Place, Store};

use crate::gpu;

const PLACE: Place = Place::Device(0);

fn host() -> Arc<dyn Device> {
    Arc::new(HostDevice::new())
}

/// Returns the host device, and a GPU if one is present.
fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices = vec![host()];
    if let Some(gpu) = gpu::device() {
        devices.push(gpu);
    }
    devices
}

fn span(memory: MemoryId, offset: u64, len: u64) -> Span {
    Span { memory, offset, len }
}

fn staged(len: usize) -> StagingSpan {
    StagingSpan { index: 0, offset: 0, len }
}

fn fill(target: Span, byte: u8) -> Command {
    Command::Fill { target, pattern: [byte; 16], width: Width::W1 }
}

fn submit(device: &dyn Device, lane: Lane, command: Command, staging: Vec<Staging>) -> Pending {
    device.submit(lane, CommandList { commands: vec![command], staging }).unwrap()
}

fn panics(call: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(call)).is_err()
}

#[test]
fn absurd_lengths_return_out_of_memory() {
    for device in devices() {
        for len in [1 << 60, u64::MAX] {
            let error = device.allocate(PLACE, len).unwrap_err();
            assert!(
                matches!(error, Error::OutOfMemory { place: PLACE, len: found } if found == len),
                "{error}"
            );
            assert!(matches!(device.staging(len as usize), Err(Error::OutOfMemory { .. })));
        }
    }
}

#[test]
fn no_device_has_pages_on_disk() {
    for device in devices() {
        let error = device.allocate(Place::Disk, 1).unwrap_err();
        assert!(
            matches!(error, Error::Unavailable(Unavailable::Place { place: Place::Disk, .. })),
            "{error}"
        );
    }
}

#[test]
fn ranges_that_break_the_contract_panic() {
    devices().into_iter().for_each(ranges_that_break_the_contract_panic_on);
}

fn ranges_that_break_the_contract_panic_on(device: Arc<dyn Device>) {
    let (memory, other) = (device.allocate(PLACE, 64).unwrap(), device.allocate(PLACE, 64).unwrap());
    let ok = span(memory, 0, 16);
    let sparse = |index: u8| Piece {
        target: ok,
        payload: Payload::Staging { index: 0, offset: 0 },
        kind: PieceKind::Sparse { width: Width::W4, count: usize::from(index > 0), values_at: 4 },
    };
    let pick = |indices, target| Command::Pick { source: ok, width: Width::W4, indices, target };
    let validate = |offset, found_len| Command::Validate {
        lists: vec![IndexList { indices: span(memory, offset, 8), bound: 9 }],
        target: staged(found_len),
    };
    let select = |bits, indices, found_len| Command::Select {
        bitmaps: vec![Selection { bits, indices }],
        target: staged(found_len),
    };
    let digest = |key, len| Command::Digest { sources: vec![ok], key, target: staged(len) };
    let rows: Vec<(&str, Command)> = vec![
        ("past the end", fill(span(memory, 60, 5), 0)),
        ("empty, past the end", fill(span(memory, 65, 0), 0)),
        ("beyond all numbers", fill(span(memory, u64::MAX, 2), 0)),
        ("unknown memory", fill(span(MemoryId(99), 0, 1), 0)),
        ("past the end of staging", Command::Upload { source: staged(33), target: span(memory, 0, 33) }),
        ("unequal lengths up", Command::Upload { source: staged(8), target: ok }),
        ("unequal lengths down", Command::Download { source: ok, target: staged(8) }),
        ("unequal lengths across", Command::Copy { source: span(other, 0, 8), target: ok }),
        ("copy past the end", Command::Copy { source: span(other, 60, 16), target: ok }),
        ("copy onto itself", Command::Copy { source: span(memory, 15, 16), target: ok }),
        ("half an element", Command::Fill { target: span(memory, 0, 6), pattern: [0; 16], width: Width::W4 }),
        ("gather past its area", Command::Gather { sources: vec![(span(other, 0, 8), 9)], target: ok }),
        ("scatter past its area", Command::Scatter { source: ok, targets: vec![(9, span(other, 0, 8))] }),
        (
            "bits for more elements than there are",
            Command::Diff {
                left: ok,
                right: span(other, 0, 16),
                width: Width::W1,
                target: span(other, 16, 3),
            },
        ),
        (
            "bits into what is compared",
            Command::Diff {
                left: ok,
                right: span(other, 0, 16),
                width: Width::W1,
                target: span(other, 15, 2),
            },
        ),
        ("counts for more bitmaps than there are", select(ok, span(other, 0, 8), 8)),
        ("indices off their boundary, selected", select(ok, span(other, 2, 8), 4)),
        ("indices into their bitmap", select(ok, span(memory, 12, 8), 4)),
        ("indices past the end", select(ok, span(other, 60, 8), 4)),
        ("a bitmap past the end", select(span(memory, 60, 8), span(other, 0, 8), 4)),
        ("sums for fewer ranges than there are", Command::Crc { sources: vec![ok, ok], target: staged(4) }),
        ("digests for fewer chunks than there are", digest(span(other, 0, 8), 16)),
        ("half a key", digest(span(other, 0, 16), 32)),
        ("an index past the range", Command::Apply { pieces: vec![sparse(4)] }),
        ("a picked index past the range", pick(staged(4), span(other, 0, 4))),
        ("indices for fewer elements than there are", pick(staged(4), span(other, 0, 8))),
        ("findings for more lists than there are", validate(0, 8)),
        ("indices off their boundary", validate(2, 4)),
    ];
    for (name, command) in rows {
        let mut staging = device.staging(32).unwrap();
        staging[0] = 4;
        let list = CommandList { commands: vec![command], staging: vec![staging] };
        assert!(panics(|| drop(device.submit(Lane::Apply, list))), "{name} on {}", device.label());
    }
    // The lane remains usable after the rejected calls.
    let pending = submit(&*device, Lane::Apply, fill(ok, 1), vec![]);
    assert_eq!(pending.fence().value, 1);
    pending.finish(&*device).unwrap();
    assert_eq!(device.reached(Lane::Apply), 1);
}

#[test]
fn memory_is_released_once() {
    for device in devices() {
        let memory = device.allocate(PLACE, 8).unwrap();
        device.release(memory).unwrap();
        assert!(panics(|| drop(device.release(memory))));
    }
}

#[test]
fn unknown_fence_panics() {
    for device in devices().into_iter().chain([Arc::new(LateDevice::new(host())) as Arc<dyn Device>]) {
        let fence = Fence { lane: Lane::Drain, value: 1 };
        assert!(panics(|| drop(device.wait(fence))), "{}", device.label());
        assert!(panics(|| drop(device.after(Lane::Apply, fence))), "{}", device.label());
        device.wait(Fence { lane: Lane::Drain, value: 0 }).unwrap();
    }
}

/// Staging memory that lets another thread allocate memory when a list writes to it, and records whether the
/// allocation succeeded.
struct AllocatesMeanwhile {
    bytes: Vec<u8>,
    device: Arc<dyn Device>,
    allocated: mpsc::Sender<bool>,
}

impl StagingMemory for AllocatesMeanwhile {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let (device, (sender, receiver)) = (self.device.clone(), mpsc::channel());
        let thread = thread::spawn(move || {
            let memory = device.allocate(PLACE, 1).unwrap();
            submit(&*device, Lane::Apply, fill(span(memory, 0, 1), 1), vec![]);
            sender.send(()).unwrap();
        });
        // The timeout turns a deadlock into a failure.
        let done = receiver.recv_timeout(Duration::from_secs(20)).is_ok();
        if done {
            thread.join().unwrap();
        }
        self.allocated.send(done).unwrap();
        &mut self.bytes
    }
}

#[test]
fn long_copy_blocks_neither_allocation_nor_other_lane() {
    let device = host();
    let memory = device.allocate(PLACE, 8).unwrap();
    let (sender, receiver) = mpsc::channel();
    let probe = AllocatesMeanwhile { bytes: vec![0; 8], device: device.clone(), allocated: sender };
    let download = Command::Download { source: span(memory, 0, 8), target: staged(8) };
    submit(&*device, Lane::Drain, download, vec![Staging::new(probe)]);
    assert!(receiver.recv().unwrap(), "the download held a lock that others need");
}

#[test]
fn commands_of_two_lanes_neither_tear_nor_block() {
    devices().into_iter().for_each(commands_of_two_lanes_run_side_by_side_on);
}

fn commands_of_two_lanes_run_side_by_side_on(device: Arc<dyn Device>) {
    let pages: Vec<MemoryId> = (0..4).map(|_| device.allocate(PLACE, 1 << 16).unwrap()).collect();
    let bits = [(); 2].map(|()| device.allocate(PLACE, 512).unwrap());
    for (number, page) in pages.iter().enumerate() {
        submit(&*device, Lane::Apply, fill(span(*page, 0, 1 << 16), number as u8), vec![]);
    }
    let torn = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for (lane, step, bits) in [(Lane::Apply, 1, &bits[0]), (Lane::Drain, 3, &bits[1])] {
            let (device, pages, torn) = (&device, &pages, &torn);
            scope.spawn(move || {
                for round in 0..200_usize {
                    let (source, target) = (pages[round * step % 4], pages[(round * step + 1) % 4]);
                    let copy = Command::Copy { source: span(source, 0, 100), target: span(target, 100, 100) };
                    let diff = Command::Diff {
                        left: span(source, 0, 1 << 16),
                        right: span(source, 0, 1 << 16),
                        width: Width::W16,
                        target: span(*bits, 0, 512),
                    };
                    let bring = Command::Download { source: span(*bits, 0, 512), target: staged(512) };
                    let list = CommandList {
                        commands: vec![copy, diff, bring],
                        staging: vec![device.staging(512).unwrap()],
                    };
                    let staging = device.submit(lane, list).unwrap().finish(&**device).unwrap();
                    if staging[0].iter().any(|bits| *bits != 0) {
                        torn.lock().unwrap().push((lane, round));
                    }
                }
            });
        }
    });
    assert_eq!(*torn.lock().unwrap(), [], "memory that differed from itself");
    assert_eq!((device.reached(Lane::Apply), device.reached(Lane::Drain)), (204, 200));
}

#[test]
fn late_device_runs_lists_lazily() {
    let inner = host();
    let device = LateDevice::new(inner.clone());
    let memory = device.allocate(PLACE, 4).unwrap();
    let on_inner = || {
        let download = Command::Download { source: span(memory, 0, 4), target: staged(4) };
        let staging = vec![inner.staging(4).unwrap()];
        submit(&*inner, Lane::Drain, download, staging).finish(&*inner).unwrap()[0].to_vec()
    };
    let pending: Vec<Pending> = [1, 2, 3]
        .into_iter()
        .map(|byte| submit(&device, Lane::Apply, fill(span(memory, 0, 4), byte), vec![]))
        .collect();
    assert_eq!((device.reached(Lane::Apply), on_inner()), (0, vec![POISON; 4]));
    device.wait(pending[1].fence()).unwrap();
    assert_eq!((device.reached(Lane::Apply), on_inner()), (2, vec![2; 4]), "as far as was waited for");
    // The other lane must wait for the remaining lists.
    device.after(Lane::Drain, pending[2].fence()).unwrap();
    let drained = submit(&device, Lane::Drain, fill(span(memory, 0, 1), 9), vec![]);
    assert_eq!(device.reached(Lane::Apply), 2);
    device.wait(drained.fence()).unwrap();
    assert_eq!((device.reached(Lane::Apply), on_inner()), (3, vec![9, 3, 3, 3]));
}

#[test]
fn late_device_overwrites_undefined_bytes() {
    let device = LateDevice::new(host());
    let memory = device.allocate(PLACE, 4).unwrap();
    let mut staging = device.staging(6).unwrap();
    staging.copy_from_slice(&[1, 2, 3, 4, 5, 6]);
    let upload = Command::Upload { source: staged(4), target: span(memory, 0, 4) };
    let returned = submit(&device, Lane::Apply, upload, vec![staging]).finish(&device).unwrap();
    assert_eq!(returned[0][..], [POISON, POISON, POISON, POISON, 5, 6], "what was uploaded is spoilt");
    let download = Command::Download { source: span(memory, 0, 4), target: staged(4) };
    let returned = submit(&device, Lane::Apply, download, returned).finish(&device).unwrap();
    assert_eq!(returned[0][..], [1, 2, 3, 4, 5, 6], "what the list did not read is not");

    // The poison bytes in the download reveal a device that does not execute its list.
    let lying = LateDevice::new(Arc::new(DoesNothing));
    let download = Command::Download { source: span(memory, 0, 4), target: staged(4) };
    let returned =
        submit(&lying, Lane::Apply, download, vec![Staging::new(vec![0; 6])]).finish(&lying).unwrap();
    assert_eq!(returned[0][..], [POISON, POISON, POISON, POISON, 0, 0]);
}

/// A device that executes nothing, and returns staging memory unchanged.
struct DoesNothing;

impl Device for DoesNothing {
    fn label(&self) -> String {
        "idle".to_owned()
    }
    fn allocate(&self, _place: Place, _len: u64) -> remanent::Result<MemoryId> {
        Ok(MemoryId(0))
    }
    fn release(&self, _memory: MemoryId) -> remanent::Result<()> {
        Ok(())
    }
    fn staging(&self, len: usize) -> remanent::Result<Staging> {
        Ok(Staging::new(vec![0; len]))
    }
    fn submit(&self, lane: Lane, list: CommandList) -> remanent::Result<Pending> {
        Ok(Pending::new(Fence { lane, value: 1 }, Arc::new(list.staging.into())))
    }
    fn reached(&self, _lane: Lane) -> u64 {
        1
    }
    fn wait(&self, _fence: Fence) -> remanent::Result<()> {
        Ok(())
    }
    fn after(&self, _lane: Lane, _fence: Fence) -> remanent::Result<()> {
        Ok(())
    }
    fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(MemoryId) -> Place)) {
        read(&|_| PLACE);
    }
}

#[test]
fn a_late_device_catches_memory_released_too_early() {
    let device = LateDevice::new(host());
    let (used, unused) = (device.allocate(PLACE, 4).unwrap(), device.allocate(PLACE, 4).unwrap());
    let pending = submit(&device, Lane::Apply, fill(span(used, 0, 4), 1), vec![]);
    device.release(unused).unwrap();
    assert!(panics(|| drop(device.release(used))));
    device.wait(pending.fence()).unwrap();
    device.release(used).unwrap();
}

#[test]
fn polling_seeded_late_device_makes_progress() {
    let device = LateDevice::seeded(host(), 7);
    let memory = device.allocate(PLACE, 4).unwrap();
    let last =
        (0..50).map(|byte| submit(&device, Lane::Apply, fill(span(memory, 0, 4), byte), vec![]).fence());
    let last = last.last().unwrap();
    let polls = (0..10_000).take_while(|_| device.reached(Lane::Apply) < last.value).count();
    assert!((1..10_000).contains(&polls), "{polls} polls");
}

#[test]
fn injected_fault_hits_its_call_and_propagates() {
    type Make = fn(&FaultyDevice, MemoryId, RawStream) -> remanent::Result<()>;
    let rows: [(DeviceCall, Make); 9] = [
        (DeviceCall::Allocate, |device, _, _| device.allocate(PLACE, 1).map(drop)),
        (DeviceCall::Release, |device, memory, _| device.release(memory)),
        (DeviceCall::Staging, |device, _, _| device.staging(1).map(drop)),
        (DeviceCall::Submit, |device, _, _| device.submit(Lane::Apply, CommandList::default()).map(drop)),
        (DeviceCall::Wait, |device, _, _| device.wait(Fence { lane: Lane::Apply, value: 0 })),
        (DeviceCall::After, |device, _, _| device.after(Lane::Apply, Fence { lane: Lane::Drain, value: 0 })),
        (DeviceCall::WaitExternal, |device, _, stream| device.wait_external(Lane::Callers, stream)),
        (DeviceCall::SignalExternal, |device, _, stream| {
            device.signal_external(stream, Fence { lane: Lane::Apply, value: 0 })
        }),
        (DeviceCall::StreamEvent, |device, _, stream| device.stream_event(stream).map(drop)),
    ];
    for context_lost in [false, true] {
        for counted in [true, false] {
            for (call, make) in rows {
                let late = Arc::new(LateDevice::new(host()));
                let stream = late.stream();
                let device = FaultyDevice::new(late);
                let memories = [(); 3].map(|()| device.allocate(PLACE, 1).unwrap());
                device.arm(DeviceFault { call: counted.then_some(call), nth: 2, context_lost });
                make(&device, memories[0], stream).unwrap();
                assert!(!device.struck());
                let error = make(&device, memories[1], stream).unwrap_err();
                assert!(device.struck());
                let remedy = if context_lost { Remedy::NewProcess } else { Remedy::Reopen };
                assert_eq!(error.remedy(), remedy, "{error}");
                assert!(error.to_string().contains(&format!("{call:?}")), "{error}");
                // The store cannot recover from a lost context.
                assert_eq!(make(&device, memories[2], stream).is_err(), context_lost, "{call:?}");
            }
        }
    }
}

/// Returns a stream that belongs to no device of the store.
fn unknown_stream() -> RawStream {
    LateDevice::new(host()).stream()
}

#[test]
fn the_host_refuses_streams_and_has_no_addresses() {
    let device = host();
    let abilities = device.abilities();
    assert!(abilities.streams.is_none() && abilities.addresses.is_none());
    let stream = unknown_stream();
    let store = Store::open_on(Arc::new(SimDisk::new()), device, Options::default()).unwrap();
    let memory = store.device_bytes(8, PLACE).unwrap();
    assert_eq!(memory.address(), None);
    let mut batch = store.batch();
    batch.create(8, PLACE);
    let page = store.commit(batch).unwrap().pages[0];
    let requested = [
        memory.begin(stream, Access::Read).map(drop),
        memory.on(stream).read(0, &mut [0]),
        store.lease(page).unwrap().on(stream).map(drop),
        store.commit(store.batch().write_device(page, 0, &memory.on(stream))).map(drop),
    ];
    for refused in requested {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Refused(Refused::Stream { .. })), "{error}");
        assert_eq!(error.remedy(), Remedy::ChangeCall);
    }
}

#[test]
fn lane_and_caller_stream_wait_for_each_other() {
    let inner = host();
    let device = LateDevice::new(inner.clone());
    let memory = device.allocate(PLACE, 4).unwrap();
    let address = device.address(memory).unwrap();
    assert_eq!(device.span_at(address + 1, 3), span(memory, 1, 3));
    let stream = device.stream();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let queue_read = |device: &LateDevice| {
        let (seen, all) = (seen.clone(), device.span_at(address, 4));
        device.queue(stream, move |inner| {
            let download = Command::Download { source: all, target: staged(4) };
            let staging = vec![inner.staging(4).unwrap()];
            let bytes = submit(inner, Lane::Drain, download, staging).finish(inner).unwrap();
            seen.lock().unwrap().push(bytes[0][0]);
        });
    };
    let one = submit(&device, Lane::Apply, fill(span(memory, 0, 4), 1), vec![]).fence();
    device.signal_external(stream, one).unwrap();
    queue_read(&device);
    device.wait_external(Lane::Apply, stream).unwrap();
    let two = submit(&device, Lane::Apply, fill(span(memory, 0, 4), 2), vec![]).fence();
    // The lane does not wait for work that is queued on the stream after this call.
    queue_read(&device);
    assert_eq!((device.reached(Lane::Apply), &*seen.lock().unwrap()), (0, &vec![]));
    device.wait(two).unwrap();
    assert_eq!(*seen.lock().unwrap(), [1]);
    device.synchronize(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), [1, 2]);
}

#[test]
fn held_stream_blocks_only_its_dependents() {
    let device = LateDevice::seeded(host(), 3);
    let memory = device.allocate(PLACE, 4).unwrap();
    let stream = device.stream();
    device.queue(stream, |_| {});
    device.hold(stream, true);
    device.wait_external(Lane::Callers, stream).unwrap();
    let held = device.submit(Lane::Callers, CommandList::default()).unwrap().fence();
    device.after(Lane::Drain, held).unwrap();
    let behind = submit(&device, Lane::Drain, fill(span(memory, 0, 4), 1), vec![]).fence();
    let free = submit(&device, Lane::Apply, fill(span(memory, 0, 4), 2), vec![]).fence();
    let polls = (0..10_000).take_while(|_| device.reached(Lane::Apply) < free.value).count();
    assert!(polls < 10_000);
    assert_eq!((device.reached(Lane::Callers), device.reached(Lane::Drain)), (0, 0));
    assert!(panics(|| drop(device.wait(behind))), "this would never end");
}

#[test]
fn a_stream_from_which_a_graph_is_captured_is_refused() {
    let device = LateDevice::new(host());
    let stream = device.stream();
    let fence = device.submit(Lane::Apply, CommandList::default()).unwrap().fence();
    let calls = || [device.wait_external(Lane::Callers, stream), device.signal_external(stream, fence)];
    device.capture(stream, true);
    for refused in calls() {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Refused(Refused::Stream { .. })), "{error}");
    }
    device.capture(stream, false);
    calls().into_iter().for_each(|allowed| allowed.unwrap());
}

#[test]
fn fault_under_late_device_stops_lane_and_its_waiters() {
    let faulty = Arc::new(FaultyDevice::new(host()));
    let device = LateDevice::new(faulty.clone());
    let memory = device.allocate(PLACE, 4).unwrap();
    let before = submit(&device, Lane::Apply, fill(span(memory, 0, 4), 1), vec![]).fence();
    let failing = submit(&device, Lane::Apply, fill(span(memory, 0, 4), 2), vec![]);
    device.after(Lane::Drain, failing.fence()).unwrap();
    let behind = submit(&device, Lane::Drain, fill(span(memory, 0, 4), 3), vec![]).fence();
    faulty.arm(DeviceFault { call: Some(DeviceCall::Submit), nth: 2, context_lost: false });
    assert!(matches!(device.wait(behind), Err(Error::Device { .. })));
    assert!(matches!(failing.finish(&device), Err(Error::Device { .. })));
    device.wait(before).unwrap();
    assert_eq!((device.reached(Lane::Apply), device.reached(Lane::Drain)), (1, 0));
    assert!(matches!(device.submit(Lane::Drain, CommandList::default()), Err(Error::Device { .. })));
    // No queued command still uses the memory.
    device.release(memory).unwrap();
}
