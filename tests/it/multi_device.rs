//! Several devices combined into one, with pages on each of them and copies between them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;

use remanent::batch::Width;
use remanent::device::host::HostDevice;
use remanent::device::multi::MultiDevice;
use remanent::device::{
    Abilities, Command, CommandList, Device, DeviceStreams, Fence, Lane, MemoryCache, MemoryId, MemoryStats,
    Payload, Pending, Piece, PieceKind, Span, StagingSpan,
};
use remanent::error::{Refused, Remedy, Unavailable};
use remanent::options::{LogOptions, Retention, SnapshotSchedule};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{DeviceChoice, Error, Options, PageId, Place, SnapshotOptions, StatePoint, Store};

use crate::faults::Gauge;
use crate::gpu::{self, Caller};

const LEN: u64 = 10_000;

pub fn host() -> Arc<dyn Device> {
    Arc::new(HostDevice::new())
}

pub fn late(seed: u64) -> Arc<dyn Device> {
    Arc::new(LateDevice::seeded(host(), seed))
}

pub fn two_of(one: Arc<dyn Device>, other: Arc<dyn Device>) -> Arc<dyn Device> {
    Arc::new(MultiDevice::new(vec![one, other]))
}

/// Two devices that execute as late as permitted, and the combination of both.
fn late_pair() -> ([Arc<LateDevice>; 2], Arc<dyn Device>) {
    let [one, other] = [(); 2].map(|()| Arc::new(LateDevice::new(host())));
    ([one.clone(), other.clone()], two_of(one, other))
}

/// Returns the streams of a combined device.
fn streams(pair: &Arc<dyn Device>) -> &dyn DeviceStreams {
    pair.abilities().streams.expect("GPUs and late devices have streams")
}

fn memories(pair: &Arc<dyn Device>, len: u64) -> [Span; 2] {
    let memory = |slot| pair.allocate(Place::Device(slot), len).unwrap();
    [0, 1].map(|slot| Span { memory: memory(slot), offset: 0, len })
}

fn fill(target: Span, byte: u8) -> Command {
    Command::Fill { target, pattern: [byte; 16], width: Width::W1 }
}

fn submit(device: &Arc<dyn Device>, lane: Lane, commands: Vec<Command>) -> remanent::Result<Pending> {
    device.submit(lane, CommandList { commands, staging: vec![device.staging(64)?] })
}

/// Returns pairs of GPUs with peer access and, on the fake driver, a pair without it, as far as they are
/// present.
fn pairs_of_gpus() -> Vec<Arc<dyn Device>> {
    let pairs = [gpu::two(), gpu::two_apart()].into_iter().flatten();
    pairs.map(|[one, other]| two_of(one, other)).collect()
}

/// Returns two host devices, two late devices, and two GPUs if they are present.
fn pairs() -> Vec<Arc<dyn Device>> {
    let mut pairs = vec![two_of(host(), host()), two_of(late(1), late(2))];
    pairs.extend(pairs_of_gpus());
    pairs
}

fn options() -> Options {
    // The restored state is older than two snapshots.
    let options = Options::new()
        .log(LogOptions::new().segment_len(64 << 10))
        .retention(Retention::new().snapshots_kept(100));
    options.snapshots(SnapshotSchedule::never())
}

fn open(disk: &SimDisk, device: &Arc<dyn Device>) -> remanent::Result<Store> {
    Store::open_on(Arc::new(disk.clone()), device.clone(), options())
}

fn bytes(store: &Store, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; store.page(page).unwrap().len as usize];
    store.read(page, 0, &mut bytes).unwrap();
    bytes
}

/// Commits batches that change pages of both devices, together and separately, with every operation. Returns
/// the bytes of the pages.
fn work(store: &Store) -> Vec<(PageId, Vec<u8>)> {
    let mut batch = store.batch();
    let new: Vec<_> = [0, 1, 0, 1].map(|slot| batch.create(LEN, Place::Device(slot)).page()).into();
    for (number, page) in (1..).zip(&new) {
        batch.fill(*page, 0, LEN, &[number]);
    }
    let mut pages = store.commit(batch).unwrap().pages;
    for round in 0..20_u8 {
        let mut batch = store.batch();
        for (page, number) in pages.iter().zip(0..) {
            let at = u64::from(round) * 100 + number;
            batch.write(*page, at, &[round; 64]);
            batch.scatter(*page, Width::W2, &[1, 4000 + u32::from(round)], &[number as u8, 7, round, 9]);
        }
        store.submit(batch).unwrap();
        if round % 5 == 0 {
            store.snapshot().unwrap();
        }
        if round % 7 == 0 {
            store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
        }
    }
    let mut batch = store.batch();
    batch.resize(pages[1], LEN / 2).delete(pages[2]);
    batch.clone_page(pages[3]);
    pages.extend(store.commit(batch).unwrap().pages);
    pages.remove(2);
    pages.into_iter().map(|page| (page, bytes(store, page))).collect()
}

#[test]
fn pages_on_several_devices_commit_together_and_reopen_on_any() {
    let on_one = work(&open(&SimDisk::new(), &host()).unwrap());
    for pair in pairs() {
        let disk = SimDisk::new();
        let store = open(&disk, &pair).unwrap();
        let pages = work(&store);
        assert_eq!(pages, on_one, "on {}", pair.label());
        store.restore(StatePoint::Lsn(remanent::Lsn(9))).unwrap();
        let restored = bytes(&store, pages[0].0);
        drop(store);
        for device in [host(), pair.clone(), two_of(host(), late(3))] {
            let store = open(&disk, &device).unwrap();
            assert_eq!(bytes(&store, pages[0].0), restored, "on {}", device.label());
            assert_eq!(store.page(pages[1].0).unwrap().place, Place::Device(1));
        }
    }
}

#[test]
fn slot_without_device_is_refused() {
    let disk = SimDisk::new();
    let pair = two_of(host(), host());
    let store = open(&disk, &pair).unwrap();
    let mut batch = store.batch();
    batch.create(1, Place::Device(1));
    batch.create(1, Place::Device(2));
    let error = store.commit(batch).unwrap_err();
    assert!(
        matches!(error, Error::Unavailable(Unavailable::Place { place: Place::Device(2), .. })),
        "{error}"
    );
    assert_eq!((store.lsn().0, error.remedy()), (0, Remedy::ChangeCall));
    let mut batch = store.batch();
    batch.create(1, Place::Device(1));
    store.commit(batch).unwrap();
    drop(store);
    let one: Arc<dyn Device> = Arc::new(MultiDevice::new(vec![host()]));
    let error = open(&disk, &one).unwrap_err();
    assert!(
        matches!(error, Error::Unavailable(Unavailable::Place { place: Place::Device(1), .. })),
        "{error}"
    );
    assert_eq!(open(&disk, &pair).unwrap().lsn().0, 1);
}

#[test]
fn slots_are_bound_at_open() {
    let directory = tempfile::tempdir().unwrap();
    let two = options().slots([DeviceChoice::Host, DeviceChoice::Host]);
    let store = two.open(directory.path()).unwrap();
    assert_eq!(store.recovered().device, "host and host");
    let mut batch = store.batch();
    let page = batch.create(4, Place::Device(1)).page();
    batch.write(page, 0, b"kept");
    let page = store.commit(batch).unwrap().pages[0];
    drop(store);
    let refused = options().slots([DeviceChoice::Host]).open(directory.path()).unwrap_err();
    assert!(
        matches!(refused, Error::Unavailable(Unavailable::Place { place: Place::Device(1), .. })),
        "{refused}"
    );
    let store = options().device(DeviceChoice::Host).open(directory.path()).unwrap();
    assert_eq!(bytes(&store, page), b"kept");
}

#[test]
fn long_copies_go_from_one_device_to_another_in_pieces() {
    const LONG: u64 = (9 << 20) + 5;
    for pair in pairs() {
        let memories = [0, 1].map(|slot| pair.allocate(Place::Device(slot), LONG).unwrap());
        let whole = |memory: MemoryId| Span { memory, offset: 0, len: LONG };
        let staged = StagingSpan { index: 0, offset: 0, len: LONG as usize };
        let mut staging = pair.staging(LONG as usize).unwrap();
        for (at, byte) in staging.iter_mut().enumerate() {
            *byte = (at % 251) as u8;
        }
        let expected = staging.to_vec();
        let commands = vec![
            Command::Upload { source: staged, target: whole(memories[0]) },
            Command::Copy { source: whole(memories[0]), target: whole(memories[1]) },
            // This command is executed after the copy, so its bytes are not in the copy.
            Command::Fill { target: whole(memories[0]), pattern: [0xEE; 16], width: Width::W1 },
        ];
        let list = CommandList { commands, staging: vec![staging] };
        let copied = pair.submit(Lane::Apply, list).unwrap().fence();
        pair.after(Lane::Drain, copied).unwrap();
        let found = memories.map(|memory| {
            let commands = vec![Command::Download { source: whole(memory), target: staged }];
            let list = CommandList { commands, staging: vec![pair.staging(LONG as usize).unwrap()] };
            pair.submit(Lane::Drain, list).unwrap().finish(&*pair).unwrap().remove(0)
        });
        assert!(
            found[0].iter().all(|byte| *byte == 0xEE) && found[1][..] == expected[..],
            "{}",
            pair.label()
        );
        memories.into_iter().for_each(|memory| pair.release(memory).unwrap());
    }
}

/// The first GPU executes no work until all work is queued, in each way of copying bytes.
#[test]
fn peer_copy_blocks_neither_gpu() {
    const LONG: u64 = (9 << 20) + 5;
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        for pair in pairs_of_gpus() {
            let places = [0, 1, 0, 1].map(Place::Device).into_iter().chain([Place::Pinned]);
            let spans: Vec<Span> = places
                .map(|place| Span { memory: pair.allocate(place, LONG).unwrap(), offset: 0, len: LONG })
                .collect();
            let [first, second, first_too, second_too, pinned] = spans[..] else { panic!("five") };
            let zero = spans.iter().map(|span| fill(*span, 0)).collect();
            submit(&pair, Lane::Callers, zero).unwrap().finish(&*pair).unwrap();
            let stream = caller.stream();
            let hold = stream.hold();
            streams(&pair).wait_external(Lane::Callers, stream.raw()).unwrap();
            let copy = |source, target| Command::Copy { source, target };
            let commands = vec![
                fill(first, 1),
                copy(first, second),
                // This command is executed after the copy, so its bytes are not in the copy.
                fill(first, 2),
                copy(second, first_too),
                copy(second, pinned),
                fill(second, 3),
                copy(pinned, second_too),
            ];
            let list = submit(&pair, Lane::Callers, commands).unwrap();
            assert!(!stream.is_done() && pair.reached(Lane::Callers) < list.fence().value);
            // Another lane of the first GPU that waits for the list also waits for copies from that GPU.
            pair.after(Lane::Stage, list.fence()).unwrap();
            submit(&pair, Lane::Stage, vec![fill(first, 4)]).unwrap();
            hold.let_go();
            list.finish(&*pair).unwrap();
            pair.wait(submit(&pair, Lane::Stage, Vec::new()).unwrap().fence()).unwrap();
            for (span, byte) in [(first, 4), (second, 3), (first_too, 1), (second_too, 1), (pinned, 1)] {
                let target = StagingSpan { index: 0, offset: 0, len: LONG as usize };
                let staging = vec![pair.staging(LONG as usize).unwrap()];
                let list =
                    CommandList { commands: vec![Command::Download { source: span, target }], staging };
                let found = pair.submit(Lane::Stage, list).unwrap().finish(&*pair).unwrap().remove(0);
                assert!(found.iter().all(|found| *found == byte), "{byte} in {span:?} of {}", pair.label());
                pair.release(span.memory).unwrap();
            }
            stream.synchronize();
        }
    });
}

/// A list is split at copies between the devices. A later part reads staging memory that an earlier part
/// wrote.
#[test]
fn peer_copy_runs_between_staging_write_and_read() {
    for pair in pairs() {
        let [here, there] = memories(&pair, 8);
        let staged = |offset| StagingSpan { index: 0, offset, len: 8 };
        let commands = vec![
            fill(here, 5),
            Command::Download { source: here, target: staged(8) },
            Command::Copy { source: here, target: there },
            fill(here, 6),
            Command::Upload { source: staged(8), target: here },
            Command::Download { source: there, target: staged(0) },
        ];
        let returned = submit(&pair, Lane::Apply, commands).unwrap().finish(&*pair).unwrap();
        assert_eq!(returned[0][..8], [5; 8], "{}", pair.label());
        let read = vec![Command::Download { source: here, target: staged(0) }];
        let returned = submit(&pair, Lane::Apply, read).unwrap().finish(&*pair).unwrap();
        assert_eq!(returned[0][..8], [5; 8], "{}", pair.label());
        [here, there].into_iter().for_each(|span| pair.release(span.memory).unwrap());
    }
}

#[test]
fn staging_written_by_one_device_is_read_by_another() {
    let pair = two_of(late(4), late(5));
    let memories = [0, 1].map(|slot| pair.allocate(Place::Device(slot), 4).unwrap());
    let span = |number: usize| Span { memory: memories[number], offset: 0, len: 4 };
    let staged = |offset| StagingSpan { index: 0, offset, len: 4 };
    let commands = vec![
        Command::Fill { target: span(0), pattern: [5; 16], width: Width::W1 },
        Command::Download { source: span(0), target: staged(4) },
        Command::Upload { source: staged(4), target: span(1) },
        Command::Download { source: span(1), target: staged(0) },
    ];
    let list = CommandList { commands, staging: vec![pair.staging(8).unwrap()] };
    let returned = pair.submit(Lane::Apply, list).unwrap().finish(&*pair).unwrap();
    assert_eq!(returned[0][..4], [5; 4]);
    assert_eq!(pair.reached(Lane::Apply), 1);
}

#[test]
fn a_lease_on_the_second_device_waits_for_no_lane() {
    let second = Arc::new(LateDevice::new(host()));
    let pair = two_of(Arc::new(LateDevice::new(host())), second.clone());
    let store = open(&SimDisk::new(), &pair).unwrap();
    let mut batch = store.batch();
    let page = batch.create(8, Place::Device(1)).page();
    batch.fill(page, 0, 8, &[1]);
    let page = store.commit(batch).unwrap().pages[0];
    let lease = store.lease(page).unwrap();
    let stream = second.stream();
    second.hold(stream, true);
    lease.on(stream).unwrap();
    let (source, seen) = (second.span_at(lease.address().unwrap(), 8), Arc::new(Mutex::new(Vec::new())));
    let kernel = seen.clone();
    second.queue(stream, move |device| {
        let target = StagingSpan { index: 0, offset: 0, len: 8 };
        let commands = vec![Command::Download { source, target }];
        let list = CommandList { commands, staging: vec![device.staging(8).unwrap()] };
        *kernel.lock().unwrap() =
            device.submit(Lane::Drain, list).unwrap().finish(device).unwrap()[0].to_vec();
    });
    let fill = |byte: u8| {
        let mut batch = store.batch();
        batch.fill(page, 0, 8, &[byte]);
        store.commit(batch).unwrap();
    };
    thread::scope(|scope| _ = scope.spawn(|| fill(2)));
    assert_eq!(bytes(&store, page), [2; 8]);
    drop(lease);
    fill(3);
    assert_eq!(bytes(&store, page), [3; 8]);
    second.hold(stream, false);
    second.synchronize(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), [1; 8]);
    let foreign = LateDevice::new(host()).stream();
    assert!(matches!(store.lease(page).unwrap().on(foreign), Err(Error::Refused(Refused::Stream { .. }))));
    store.close().unwrap();
}

#[test]
fn device_fault_stops_store_and_reopen_uses_another_device() {
    for nth in 1..12 {
        let faulty = Arc::new(FaultyDevice::new(late(nth)));
        let pair = two_of(late(6), faulty.clone());
        let disk = SimDisk::new();
        let store = open(&disk, &pair).unwrap();
        let mut batch = store.batch();
        let new = [0, 1].map(|slot| batch.create(LEN, Place::Device(slot)).page());
        batch.fill(new[0], 0, LEN, &[1]).fill(new[1], 0, LEN, &[1]);
        let pages = store.commit(batch).unwrap().pages;
        assert_eq!(bytes(&store, pages[1]), [1; LEN as usize]);
        faulty.arm(DeviceFault { call: Some(DeviceCall::Submit), nth, context_lost: true });
        let mut logged = 1;
        let error = loop {
            let mut batch = store.batch();
            let byte = logged + 1;
            batch.fill(pages[0], 0, LEN, &[byte]).fill(pages[1], 0, LEN, &[byte]);
            if let Err(error) = store.commit(batch) {
                break error;
            }
            logged = byte;
            if let Err(error) = store.read(pages[1], 0, &mut [0; 8]) {
                break error;
            }
        };
        assert_eq!(error.remedy(), Remedy::NewProcess, "{error}");
        assert!(faulty.struck());
        drop(store);
        let store = open(&disk, &two_of(host(), host())).unwrap();
        for page in pages {
            assert_eq!(bytes(&store, page), [logged; LEN as usize], "fault {nth}");
        }
    }
}

#[test]
fn list_completes_when_all_devices_complete() {
    let ([one, other], pair) = late_pair();
    let spans = memories(&pair, 8);
    let list = submit(&pair, Lane::Apply, spans.map(|span| fill(span, 1)).into()).unwrap();
    let first = Fence { lane: Lane::Apply, value: 1 };
    one.wait(first).unwrap();
    assert_eq!(
        (pair.reached(Lane::Apply), other.reached(Lane::Apply)),
        (0, 0),
        "no command was for the second"
    );
    other.wait(first).unwrap();
    assert_eq!(pair.reached(Lane::Apply), 1);
    list.finish(&*pair).unwrap();
}

#[test]
fn a_wait_for_another_lane_covers_all_of_its_devices() {
    let ([one, other], pair) = late_pair();
    let spans = memories(&pair, 8);
    let applied = submit(&pair, Lane::Apply, vec![fill(spans[1], 1)]).unwrap().fence();
    pair.after(Lane::Drain, applied).unwrap();
    // This list belongs only to the first device.
    let drained = submit(&pair, Lane::Drain, vec![fill(spans[0], 2)]).unwrap().fence();
    pair.wait(drained).unwrap();
    assert_eq!([&one, &other].map(|part| part.reached(Lane::Drain)), [1, 1]);
    assert_eq!(other.reached(Lane::Apply), 1, "it was waited for");
}

#[test]
fn device_stream_waits_for_other_devices() {
    let ([one, other], pair) = late_pair();
    let spans = memories(&pair, 8);
    let list = submit(&pair, Lane::Apply, spans.map(|span| fill(span, 1)).into()).unwrap();
    let stream = one.stream();
    streams(&pair).signal_external(stream, list.fence()).unwrap();
    // The second device cannot make that stream wait, so the host waits instead. For the part of the first
    // device, the stream itself waits.
    assert_eq!([&one, &other].map(|part| part.reached(Lane::Apply)), [0, 1]);
    one.synchronize(stream).unwrap();
    assert_eq!(one.reached(Lane::Apply), 1);
    let foreign = LateDevice::new(host()).stream();
    let refused = streams(&pair).signal_external(foreign, list.fence()).unwrap_err();
    assert!(matches!(refused, Error::Refused(Refused::Stream { .. })), "{refused}");
}

#[test]
fn partly_queued_list_stops_lane() {
    let faulty = Arc::new(FaultyDevice::new(host()));
    let pair = two_of(host(), faulty.clone());
    let spans = memories(&pair, 8);
    faulty.arm(DeviceFault { call: Some(DeviceCall::Submit), nth: 1, context_lost: false });
    // The first device has already received its part.
    let half = submit(&pair, Lane::Apply, spans.map(|span| fill(span, 1)).into());
    assert!(faulty.struck());
    for refused in [half, submit(&pair, Lane::Apply, vec![fill(spans[0], 2)])] {
        let error = refused.map(|pending| pending.fence()).unwrap_err();
        assert!(error.to_string().contains("as arranged"), "{error}");
    }
    submit(&pair, Lane::Drain, vec![fill(spans[0], 3)]).unwrap().finish(&*pair).unwrap();
}

#[test]
fn memory_for_bytes_of_other_device_is_freed() {
    let gauges = [Gauge::host(), Gauge::host()];
    let pair = two_of(gauges[0].clone(), gauges[1].clone());
    let spans = memories(&pair, 8);
    let live = || gauges.each_ref().map(|gauge| gauge.live());
    let bits = pair.allocate(Place::Device(0), 2).unwrap();
    let diff = |offset| {
        let target = Span { memory: bits, offset, len: 1 };
        Command::Diff { left: spans[0], right: spans[1], width: Width::W1, target }
    };
    submit(&pair, Lane::Apply, vec![diff(0), diff(1)]).unwrap().finish(&*pair).unwrap();
    assert_eq!(live(), [2, 1], "the two pages and the bits");
    gauges[0].allow(1);
    let refused = submit(&pair, Lane::Apply, vec![diff(0), diff(1)]).map(|pending| pending.fence());
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    assert_eq!(live(), [2, 1], "the first of the two was there already");
}

#[test]
fn pieces_read_earlier_staging_writes_of_other_device() {
    let pair = two_of(late(7), late(8));
    let [here, there] = memories(&pair, 8);
    let staged = StagingSpan { index: 0, offset: 0, len: 4 };
    let half = |offset| Span { offset, len: 4, ..there };
    let piece = |target, offset| Command::Apply {
        pieces: vec![Piece {
            target,
            payload: Payload::Staging { index: 0, offset },
            kind: PieceKind::Dense,
        }],
    };
    let commands = vec![
        fill(here, 5),
        Command::Download { source: Span { len: 4, ..here }, target: staged },
        // One list reads no written bytes, and the other reads the bytes that the first device wrote.
        piece(half(0), 16),
        piece(half(4), 0),
    ];
    submit(&pair, Lane::Apply, commands).unwrap().finish(&*pair).unwrap();
    let read = Command::Download { source: there, target: StagingSpan { len: 8, ..staged } };
    let found = submit(&pair, Lane::Apply, vec![read]).unwrap().finish(&*pair).unwrap();
    assert_eq!(found[0][..8], [0, 0, 0, 0, 5, 5, 5, 5]);
}

#[test]
fn gather_past_its_area_panics_across_devices() {
    let pair = two_of(host(), host());
    let [here, there] = memories(&pair, 64);
    let (area, part) = (Span { len: 16, ..here }, Span { len: 8, ..there });
    let rows = [
        ("gather past its area", Command::Gather { sources: vec![(part, 9)], target: area }),
        ("scatter past its area", Command::Scatter { source: area, targets: vec![(9, part)] }),
        ("lengths that differ", Command::Copy { source: area, target: part }),
    ];
    for (name, command) in rows {
        let submitted = catch_unwind(AssertUnwindSafe(|| submit(&pair, Lane::Apply, vec![command]).is_ok()));
        assert!(submitted.is_err(), "{name}");
    }
}

/// A device whose memory is exhausted until a caller waits for its queued work.
struct Busy {
    inner: HostDevice,
}

impl Device for Busy {
    forward!(inner: label allocate release staging submit reached wait after);

    fn read_places(&self, read: &mut dyn FnMut(&dyn Fn(MemoryId) -> Place)) {
        self.inner.read_places(read);
    }

    fn abilities(&self) -> Abilities<'_> {
        Abilities { cache: Some(self), ..Abilities::default() }
    }
}

impl MemoryCache for Busy {
    fn allocate_at_once(&self, place: Place, len: u64) -> remanent::Result<MemoryId> {
        Err(Error::OutOfMemory { place, len })
    }

    fn trim(&self) -> remanent::Result<u64> {
        Ok(0)
    }

    fn memory_stats(&self) -> Vec<(Place, MemoryStats)> {
        Vec::new()
    }
}

#[test]
fn an_immediate_allocation_waits_for_no_inner_device() {
    let busy = || Arc::new(Busy { inner: HostDevice::new() }) as Arc<dyn Device>;
    for device in [two_of(busy(), busy()), Arc::new(FaultyDevice::new(busy()))] {
        let cache = device.abilities().cache.expect("it caches memory");
        let refused = cache.allocate_at_once(Place::Device(0), LEN).unwrap_err();
        assert!(matches!(refused, Error::OutOfMemory { len: LEN, .. }), "{}: {refused}", device.label());
        device.release(device.allocate(Place::Device(0), LEN).unwrap()).unwrap();
    }
}

#[test]
fn statistics_are_reported_per_slot() {
    let Some([one, other]) = gpu::two() else { return };
    let pair = two_of(one, other);
    let spans = memories(&pair, 1000);
    let stats = pair.abilities().cache.unwrap().memory_stats();
    for slot in [0, 1] {
        let of_slot =
            stats.iter().filter(|(place, stats)| *place == Place::Device(slot) && stats.used_bytes > 0);
        assert_eq!(of_slot.count(), 1, "slot {slot} in {stats:?}");
    }
    spans.into_iter().for_each(|span| pair.release(span.memory).unwrap());
}
