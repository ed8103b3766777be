//! Requirements of the CUDA device beyond those in `device_laws`: bounded memory, the order within large lists, and
//! errors with a remedy.

mod caching;
mod callers;
mod drivers;
mod pinned;

use std::path::Path;
use std::process::{Command as Process, Output};
use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::cuda::CudaDevice;
use remanent::device::cuda::resource::{DriverMemory, LimitedMemory, Pool};
use remanent::device::host::HostDevice;
use remanent::device::{
    Command, CommandList, Device, DeviceStreams, Lane, MemoryCache, MemoryId, Payload, Piece, PieceKind,
    Span, Staging, StagingSpan,
};
use remanent::error::Remedy;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, Place, Store};

use crate::gpu::{self, Caller};
use crate::kill::workload::Random;

const PLACE: Place = Place::Device(0);
/// An environment variable that is set in a child process and selects the missing part of the child's driver.
const ERRAND: &str = "REMANENT_CUDA_ERRAND";

/// Runs a test of this folder in a child process. The libraries in `directory` are first in the search path.
fn in_a_child(test: &str, errand: &str, directory: Option<&Path>) -> Output {
    let mut child = Process::new(std::env::current_exe().unwrap());
    child.args(["--exact", &format!("cuda::{test}"), "--nocapture"]).env(ERRAND, errand);
    if let Some(directory) = directory {
        child.env("LD_LIBRARY_PATH", directory);
    }
    child.output().unwrap()
}

fn assert_success(output: &Output) {
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", output.status);
}

#[test]
fn million_allocations_do_not_grow_memory() {
    let Some(gpu) = gpu::device() else { return };
    let mut random = Random(1);
    let mut live: Vec<MemoryId> = Vec::new();
    let mut held = 0;
    for cycle in 0..1_000_000_u32 {
        // Choose lengths from a byte to 64 KiB, with short ones more often.
        let power = random.below(17);
        let len = 1 + random.below(1 << power);
        live.push(gpu.allocate(PLACE, len).unwrap());
        if live.len() > 1000 {
            let released = random.below(live.len() as u64) as usize;
            gpu.release(live.swap_remove(released)).unwrap();
        }
        if cycle == 100_000 {
            held = held_on(&gpu);
        }
    }
    assert!(held_on(&gpu) <= held + held / 4, "{} bytes, {held} after a tenth", held_on(&gpu));
    live.into_iter().for_each(|memory| gpu.release(memory).unwrap());
    let idle = held_on(&gpu);
    assert!(idle > 0 && gpu.trim().unwrap() >= idle, "idle memory is given back");
    assert_eq!(held_on(&gpu), 0);
}

/// Releasing memory to the driver waits for all queued GPU work, so idle memory is kept.
#[test]
fn immediate_allocation_does_not_trim_driver_memory() {
    const IDLE: u64 = 18 << 20;
    let Some(_) = gpu::device() else { return };
    let memory = Pool::new(LimitedMemory::new(DriverMemory::of(0).unwrap(), 20 << 20));
    let gpu = CudaDevice::open_with(0, Arc::new(memory)).unwrap();
    gpu.release(gpu.allocate(PLACE, IDLE).unwrap()).unwrap();
    let refused = gpu.allocate_at_once(PLACE, 4 << 20).unwrap_err();
    assert!(matches!(refused, Error::OutOfMemory { place: PLACE, len } if len == 4 << 20), "{refused}");
    assert_eq!(held_on(&gpu), IDLE);
    // An immediate allocation can use idle memory, and memory that the driver has left.
    for len in [IDLE, 2 << 20] {
        gpu.release(gpu.allocate_at_once(PLACE, len).unwrap()).unwrap();
    }
    gpu.release(gpu.allocate(PLACE, 4 << 20).unwrap()).unwrap();
    assert_eq!(held_on(&gpu), 4 << 20);
}

/// A long copy is split into pieces, and only a few pieces are queued at a time, so that another thread's copies do not
/// wait for all of them.
#[test]
fn stalled_long_copy_blocks_only_its_lane() {
    const LEN: u64 = 8 << 20;
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let gpu = CudaDevice::open(0).unwrap();
        let span = Span { memory: gpu.allocate(PLACE, LEN).unwrap(), offset: 0, len: LEN };
        let run = |lane, command, staging| {
            gpu.submit(lane, CommandList { commands: vec![command], staging: vec![staging] }).unwrap()
        };
        let bring = |len: u64| Command::Download {
            source: Span { len, ..span },
            target: StagingSpan { index: 0, offset: 0, len: len as usize },
        };
        let (long, mut short) = (gpu.staging(LEN as usize).unwrap(), gpu.staging(64).unwrap());
        let fill = Command::Fill { target: span, pattern: [7; 16], width: Width::W1 };
        short = run(Lane::Apply, fill, short).finish(&gpu).unwrap().remove(0);
        let stream = caller.stream();
        let hold = stream.hold();
        gpu.wait_external(Lane::Drain, stream.raw()).unwrap();
        std::thread::scope(|scope| {
            let queued = scope.spawn(|| run(Lane::Drain, bring(LEN), long));
            for _ in 0..100 {
                short = run(Lane::Apply, bring(64), short).finish(&gpu).unwrap().remove(0);
                assert_eq!(short[..], [7; 64]);
            }
            let is_queued = queued.is_finished();
            hold.let_go();
            assert!(!is_queued, "all of it was queued at once");
            let found = queued.join().unwrap().finish(&gpu).unwrap().remove(0);
            assert!(found.iter().all(|byte| *byte == 7));
        });
        stream.synchronize();
    });
}

/// A read finds the GPU's memory exhausted while a caller's stream waits for the result of the read.
#[test]
fn long_read_without_room_fails_immediately() {
    const LEN: u64 = 20 << 20;
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let memory = Pool::new(LimitedMemory::new(DriverMemory::of(0).unwrap(), 3 * LEN));
        let gpu = CudaDevice::open_with(0, Arc::new(memory)).unwrap();
        let store = Store::open_on(Arc::new(SimDisk::new()), Arc::new(gpu), Options::new()).unwrap();
        let mut batch = store.batch();
        let page = batch.create(LEN, PLACE).page();
        // The remaining memory is insufficient for a long allocation.
        let other = batch.create(LEN + (12 << 20), PLACE).page();
        batch.fill(page, 0, LEN, &[5]).fill(other, 0, 1, &[6]);
        let pages = store.commit(batch).unwrap().pages;
        // Allocate staging memory in advance, because pinning more memory may wait for all work of a GPU.
        let mut bytes = vec![0; LEN as usize];
        store.read(pages[0], 0, &mut bytes).unwrap();
        bytes.fill(0);
        let mut batch = store.batch();
        batch.delete(pages[1]);
        store.commit(batch).unwrap();
        let stream = caller.stream();
        let hold = stream.hold();
        store.read(pages[0], 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 5) && !stream.is_done());
        hold.let_go();
        stream.synchronize();
    });
}

/// Reads of every length reuse the same memory. One block per length would be kept until the caller trims the device.
#[test]
fn long_reads_retain_same_memory_for_all_lengths() {
    let Some(gpu) = gpu::device() else { return };
    let store = Store::open_on(Arc::new(SimDisk::new()), gpu.clone(), Options::new()).unwrap();
    let mut batch = store.batch();
    batch.create(32 << 20, PLACE);
    let page = store.commit(batch).unwrap().pages[0];
    let read = |len: u64| {
        store.read(page, 0, &mut vec![0; len as usize]).unwrap();
        held_on(&gpu)
    };
    let held = read(32 << 20);
    for len in (17 << 20..32 << 20).step_by(2 << 20) {
        assert_eq!(read(len), held, "{len} bytes");
    }
}

/// Returns the number of bytes of GPU memory that a device holds, both in use and idle.
fn held_on(gpu: &CudaDevice) -> u64 {
    let stats = gpu.memory_stats().into_iter().find(|(place, _)| *place == PLACE);
    stats.expect("a GPU has memory").1.reserved_bytes
}

#[test]
fn allocation_beyond_gpu_memory_is_out_of_memory() {
    let Some(gpu) = gpu::device() else { return };
    let kept = gpu.allocate(PLACE, 1 << 20).unwrap();
    for place in [PLACE, Place::Pinned, Place::Unified] {
        for len in [1 << 45, 1 << 60, u64::MAX] {
            let error = gpu.allocate(place, len).unwrap_err();
            assert!(
                matches!(error, Error::OutOfMemory { place: named, len: requested } if (named, requested) == (place, len))
            );
        }
    }
    assert!(matches!(gpu.staging(1 << 45), Err(Error::OutOfMemory { .. })));
    // Idle memory is freed before an allocation fails.
    let page = gpu.allocate(PLACE, 1 << 20).unwrap();
    gpu.release(kept).unwrap();
    gpu.release(page).unwrap();
}

/// Returns a random list of long and short copies that overlap in all ways. `payload` contains its staged bytes.
fn overlapping_list(seed: u64, memories: &[MemoryId], memory_len: u64, payload: Staging) -> CommandList {
    let mut random = Random(seed);
    let payload_len = payload.len() as u64;
    let mut span = |longest: u64| {
        let len = (1 + random.below(longest)).min(memory_len);
        let memory = memories[random.below(memories.len() as u64) as usize];
        (
            Span { memory, offset: random.below(memory_len - len + 1), len },
            random.below(payload_len - len + 1),
        )
    };
    let mut commands = Vec::new();
    for round in 0..12 {
        let (target, _) = span(memory_len);
        let pattern = [round as u8; 16];
        commands.push(Command::Fill { target, pattern, width: Width::W1 });
        let mut piece = |longest| {
            let (target, offset) = span(longest);
            let payload = Payload::Staging { index: 0, offset: offset as usize };
            Piece { target, payload, kind: PieceKind::Dense }
        };
        let mut pieces: Vec<Piece> = (0..40).map(|_| piece(700)).collect();
        pieces.extend((0..4).map(|_| piece(memory_len)));
        pieces.extend((0..200).map(|_| piece(64)));
        commands.push(Command::Apply { pieces });
        let (source, offset) = span(memory_len);
        let staged = StagingSpan { index: 0, offset: offset as usize, len: source.len as usize };
        commands.push(Command::Upload { source: staged, target: source });
    }
    CommandList { commands, staging: vec![payload] }
}

#[test]
fn long_pieces_that_overlap_keep_the_order_of_the_list() {
    const LEN: u64 = 5 << 20;
    let Some(gpu) = gpu::device() else { return };
    for seed in 0..6 {
        let found = [&HostDevice::new() as &dyn Device, &*gpu].map(|device| {
            let memories: Vec<MemoryId> = (0..3).map(|_| device.allocate(PLACE, LEN).unwrap()).collect();
            let mut payload = device.staging(2 * LEN as usize).unwrap();
            let mut random = Random(seed);
            payload.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
            let zero = memories.iter().map(|memory| Command::Fill {
                target: Span { memory: *memory, offset: 0, len: LEN },
                pattern: [0; 16],
                width: Width::W1,
            });
            let list = CommandList { commands: zero.collect(), staging: vec![] };
            device.submit(Lane::Apply, list).unwrap();
            let list = overlapping_list(seed, &memories, LEN, payload);
            let applied = device.submit(Lane::Apply, list).unwrap().fence();
            // The list is longer than one piece of a long copy, so wait for it on the other lane.
            device.after(Lane::Drain, applied).unwrap();
            let bytes: Vec<Vec<u8>> = memories.iter().map(|memory| content(device, *memory, LEN)).collect();
            memories.into_iter().for_each(|memory| device.release(memory).unwrap());
            bytes
        });
        let [host, gpu] = found;
        for (memory, (host, gpu)) in host.iter().zip(&gpu).enumerate() {
            let differs = host.iter().zip(gpu).position(|(host, gpu)| host != gpu);
            assert_eq!(differs, None, "seed {seed}, memory {memory}");
        }
    }
}

#[test]
fn unawaited_list_keeps_staging() {
    const LEN: usize = 1 << 20;
    let Some(gpu) = gpu::device() else { return };
    let memory = gpu.allocate(PLACE, LEN as u64).unwrap();
    let target = Span { memory, offset: 0, len: LEN as u64 };
    for round in 1..=50_u8 {
        let mut staging = gpu.staging(LEN).unwrap();
        staging.fill(round);
        let source = StagingSpan { index: 0, offset: 0, len: LEN };
        let list = CommandList { commands: vec![Command::Upload { source, target }], staging: vec![staging] };
        drop(gpu.submit(Lane::Apply, list).unwrap());
        // If the staging memory had been freed, this call would reuse and overwrite it.
        gpu.staging(LEN).unwrap().fill(0xEE);
    }
    let wait = gpu.submit(Lane::Apply, CommandList::default()).unwrap().fence();
    gpu.after(Lane::Drain, wait).unwrap();
    assert!(content(&*gpu, memory, LEN as u64).iter().all(|byte| *byte == 50));
}

#[test]
fn gpu_fault_requires_new_process() {
    if std::env::var_os(ERRAND).is_some() {
        // The host does not check indices in GPU memory. An index far out of range causes a GPU fault.
        let gpu = gpu::device().expect("the parent had one");
        let memory = gpu.allocate(PLACE, 64).unwrap();
        let span = |offset, len| Span { memory, offset, len };
        let fill = Command::Fill { target: span(0, 64), pattern: [0xFF; 16], width: Width::W1 };
        let kind = PieceKind::Sparse { width: Width::W16, count: 1, values_at: 16 };
        let piece = Piece { target: span(0, 16), payload: Payload::Device(span(32, 32)), kind };
        let commands = vec![fill, Command::Apply { pieces: vec![piece] }];
        let error = gpu
            .submit(Lane::Apply, CommandList { commands, staging: vec![] })
            .and_then(|list| list.finish(&*gpu))
            .unwrap_err();
        assert_eq!(error.remedy(), Remedy::NewProcess, "{error}");
        let later = [
            gpu.submit(Lane::Drain, CommandList::default()).map(drop),
            gpu.allocate(PLACE, 1 << 30).map(drop),
            CudaDevice::open(0).map(drop),
            Store::temporary().map(drop),
        ];
        for later in later {
            assert_eq!(later.unwrap_err().remedy(), Remedy::NewProcess);
        }
        return;
    }
    if gpu::device().is_some() {
        assert_success(&in_a_child("gpu_fault_requires_new_process", "fault", None));
    }
}

#[test]
fn devices_can_be_reopened_in_one_process() {
    let Some(first) = gpu::device() else { return };
    let memory = first.allocate(PLACE, 4096).unwrap();
    let fill = |byte| Command::Fill {
        target: Span { memory, offset: 0, len: 4096 },
        pattern: [byte; 16],
        width: Width::W1,
    };
    first.submit(Lane::Apply, CommandList { commands: vec![fill(3)], staging: vec![] }).unwrap();
    let staging = first.staging(4096).unwrap();
    for _ in 0..5 {
        let other: Arc<CudaDevice> = gpu::device().expect("it was there just now");
        let page = other.allocate(PLACE, 1 << 20).unwrap();
        other.submit(Lane::Apply, CommandList::default()).unwrap();
        assert!(page.0 > 0);
    }
    let target = StagingSpan { index: 0, offset: 0, len: 4096 };
    let download = Command::Download { source: Span { memory, offset: 0, len: 4096 }, target };
    let list = CommandList { commands: vec![download], staging: vec![staging] };
    let bytes = first.submit(Lane::Apply, list).unwrap().finish(&*first).unwrap();
    drop(first);
    // Staging memory outlives its device.
    assert!(bytes[0].iter().all(|byte| *byte == 3));
}

fn content(device: &dyn Device, memory: MemoryId, len: u64) -> Vec<u8> {
    let target = StagingSpan { index: 0, offset: 0, len: len as usize };
    let commands = vec![Command::Download { source: Span { memory, offset: 0, len }, target }];
    let list = CommandList { commands, staging: vec![device.staging(len as usize).unwrap()] };
    device.submit(Lane::Drain, list).unwrap().finish(device).unwrap()[0].to_vec()
}
