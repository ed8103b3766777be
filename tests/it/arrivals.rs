//! Bytes that are produced on a caller's stream. A batch that reads the bytes waits for the stream, and other
//! batches do not.
//!
//! The device executes all work as late as permitted. A stream that the test holds executes nothing, as if
//! its kernel never ended. An engine lane that waited for such a stream would panic.

use std::sync::Arc;
use std::thread;

use remanent::batch::{InitialCopy, Shadow, Width};
use remanent::device::DeviceBytes;
use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Lane, RawStream};
use remanent::error::Refused;
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, PageId, Result, Store, WriteBatch};

use crate::device_ops::{PLACE, content, open, page};

const LEN: u64 = 64;

/// A store with one page of zeros, on a device that executes its work late.
struct Bench {
    device: Arc<LateDevice>,
    store: Store,
    page: PageId,
}

impl Bench {
    fn new() -> Self {
        let device = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
        let store = open(&SimDisk::new(), device.clone());
        let page = page(&store, &[0; LEN as usize]);
        Self { device, store, page }
    }

    /// Allocates device memory and creates a stream that fills it.
    fn memory(&self) -> (DeviceBytes, RawStream) {
        let stream = self.device.stream();
        (self.store.device_bytes(LEN, PLACE).unwrap().on(stream), stream)
    }

    /// Queues a kernel that fills the memory, on the memory's stream.
    fn fill(&self, memory: &DeviceBytes, byte: u8) {
        let target = self.device.span_at(memory.address().unwrap(), memory.byte_len());
        self.device.queue(memory.stream().unwrap(), move |inner| {
            let fill = Command::Fill { target, pattern: [byte; 16], width: Width::W1 };
            let list = CommandList { commands: vec![fill], staging: Vec::new() };
            inner.submit(Lane::Drain, list).unwrap().finish(inner).unwrap();
        });
    }
}

fn copied(memory: &DeviceBytes) -> Vec<u8> {
    let mut bytes = vec![0; memory.byte_len() as usize];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// A batch operation that reads bytes produced on a stream, with a name for messages. It writes the first
/// byte of the memory to the first byte of the page.
type Take<'b> = (&'static str, Box<dyn Fn() -> Result<()> + Send + Sync + 'b>);

/// Returns all operations of this kind, for a page that is as long as the memory.
fn takes<'b>(store: &'b Store, page: PageId, memory: &'b DeviceBytes) -> [Take<'b>; 3] {
    let commit = move |add: &dyn Fn(&mut WriteBatch)| {
        let mut batch = store.batch();
        add(&mut batch);
        store.commit(batch).map(drop)
    };
    let first_index = store.device_bytes(4, PLACE).unwrap();
    let first_byte = memory.part(0..1).unwrap();
    let copy = store.working_copy_in(page, memory, Width::W1, Shadow::Page, InitialCopy::Load).unwrap();
    [
        ("a write", Box::new(move || commit(&|batch| _ = batch.write_device(page, 0, memory)))),
        (
            "a scatter",
            Box::new(move || {
                commit(&|batch| _ = batch.scatter_device(page, Width::W1, &first_index, &first_byte))
            }),
        ),
        ("a capture", Box::new(move || commit(&|batch| _ = batch.capture(&copy)))),
    ]
}

#[test]
fn batch_uses_stream_output_not_previous_bytes() {
    for way in 0..3 {
        let bench = Bench::new();
        let (memory, _) = bench.memory();
        let (what, take) = &takes(&bench.store, bench.page, &memory)[way];
        bench.fill(&memory, 7);
        take().unwrap();
        assert_eq!(content(&bench.store, bench.page)[0], 7, "{what}");
    }
}

#[test]
fn bytes_are_accessed_after_the_work_of_their_stream() {
    let bench = Bench::new();
    let plain = bench.store.device_bytes(LEN, PLACE).unwrap();
    let stream = bench.device.stream();
    let memory = plain.on(stream);
    assert_eq!((plain.stream(), memory.stream(), memory.address()), (None, Some(stream), plain.address()));
    bench.fill(&memory, 1);
    assert_eq!(copied(&plain), [0; LEN as usize], "no stream was named as their maker");
    assert_eq!(copied(&memory), [1; LEN as usize]);
    bench.fill(&memory, 2);
    // The range is written on the stream of the whole memory.
    memory.part(10..20).unwrap().write(3, &[9; 4]).unwrap();
    let mut expected = [2; LEN as usize];
    expected[13..17].fill(9);
    assert_eq!(copied(&plain), expected);
}

#[test]
fn stalled_stream_blocks_only_its_own_batch() {
    for (stuck, other) in (0..9).map(|pair| (pair / 3, pair % 3)) {
        let bench = Bench::new();
        let Bench { device, store, page: first } = &bench;
        let second = page(store, &[0; LEN as usize]);
        let ((slow, slow_stream), (memory, _)) = (bench.memory(), bench.memory());
        let (what, slow_take) = &takes(store, *first, &slow)[stuck];
        let (other_what, take) = &takes(store, second, &memory)[other];
        device.hold(slow_stream, true);
        bench.fill(&slow, 1);
        bench.fill(&memory, 2);
        thread::scope(|scope| {
            let slow = scope.spawn(slow_take);
            device.wait_for_waiter(slow_stream);
            take().unwrap();
            let found = (content(store, *first)[0], content(store, second)[0]);
            assert_eq!(found, (0, 2), "{other_what} while {what} waits");
            device.hold(slow_stream, false);
            slow.join().unwrap().unwrap();
        });
        assert_eq!(content(store, *first)[0], 1, "{what}");
    }
}

#[test]
fn capturing_stream_is_refused_without_changes() {
    let bench = Bench::new();
    let (memory, stream) = bench.memory();
    let takes = takes(&bench.store, bench.page, &memory);
    bench.fill(&memory, 3);
    bench.device.capture(stream, true);
    let before = bench.store.lsn();
    let requested =
        takes.iter().map(|(_, take)| take()).chain([memory.read(0, &mut [0]), memory.write(0, &[4])]);
    for refused in requested {
        assert!(matches!(refused, Err(Error::Refused(Refused::Stream { .. }))), "{refused:?}");
    }
    assert_eq!((bench.store.lsn(), content(&bench.store, bench.page)[0]), (before, 0));
    bench.device.capture(stream, false);
    takes[2].1().unwrap();
    assert_eq!(content(&bench.store, bench.page)[0], 3);
}

#[test]
fn device_error_on_byte_access_poisons_store() {
    for call in [DeviceCall::StreamEvent, DeviceCall::Staging, DeviceCall::Submit, DeviceCall::Wait] {
        for reads in [false, true] {
            let late = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
            let device = Arc::new(FaultyDevice::new(late.clone()));
            let store = open(&SimDisk::new(), device.clone());
            let memory = store.device_bytes(LEN, PLACE).unwrap().on(late.stream());
            device.arm(DeviceFault { call: Some(call), nth: 1, context_lost: false });
            let error = if reads { memory.read(0, &mut [0]) } else { memory.write(0, &[1]) }.unwrap_err();
            assert!(
                matches!(error, Error::Poisoned(_)) && error.to_string().contains("as arranged"),
                "{error}"
            );
            let later = store.commit(store.batch()).unwrap_err();
            assert!(matches!(later, Error::Poisoned(_)), "{call:?}: {later}");
        }
    }
}
