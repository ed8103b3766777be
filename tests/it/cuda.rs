//! Promises of the CUDA device beyond the laws: it is never a reason to panic where there is no GPU. Where
//! there is one its memory stays bounded, large lists keep their order, and a fault says what helps.
//!
//! Faulty drivers are made here, by the compiler that builds these tests, and put in the way of a child
//! process: a library is found once a process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::device::cuda::CudaDevice;
use remanent::device::cuda::resource::{DriverMemory, LimitedMemory, Pool};
use remanent::device::host::HostDevice;
use remanent::device::multi::MultiDevice;
use remanent::device::{
    Command, CommandList, Device, Lane, MemoryId, Payload, Piece, PieceKind, Selection, Span, Staging,
    StagingSpan,
};
use remanent::testing::faulty_device::FaultyDevice;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{CallerMemory, DeviceChoice, Error, Options, Place, Remedy, Store, Width};

use crate::gpu::{self, Caller};
use crate::machine::skipped;

const PLACE: Place = Place::Device(0);
/// Tells a test that it is the child, and what its driver lacks.
const ERRAND: &str = "REMANENT_CUDA_ERRAND";

/// Runs one of these tests in a process of its own, with libraries of `directory` found before all others.
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

fn compiler() -> OsString {
    std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())
}

/// Makes a library of that name with these entry points.
fn driver(directory: &Path, source: &str) -> PathBuf {
    let (file, library) = (directory.join("driver.rs"), directory.join("libcuda.so"));
    std::fs::write(&file, format!("#![allow(non_snake_case)]\n{source}")).unwrap();
    let mut compile = Process::new(compiler());
    compile.args(["--edition", "2024", "--crate-type", "cdylib", "-C", "panic=abort", "-o"]);
    let compiled = compile.arg(&library).arg(&file).output().expect("the compiler that built this test");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    library
}

/// The source of an entry point that returns a number, and writes one to where its first argument points.
fn entry(name: &str, written: Option<i32>, code: u32) -> String {
    let write = written.map_or(String::new(), |value| format!("unsafe {{ *at = {value} }};"));
    format!(
        "#[unsafe(no_mangle)] pub extern \"C\" fn {name}(at: *mut i32) -> u32 {{ let _ = at; {write} {code} }}\n"
    )
}

/// The source of every entry point that is looked up, doing nothing.
fn all_but(special: &[&str]) -> String {
    let source = include_str!("../../src/device/cuda/driver.rs");
    let names = source.match_indices("= \"cu").map(|(at, _)| {
        let name = &source[at + 3..];
        &name[..name.find('"').unwrap()]
    });
    let names: Vec<&str> = names.filter(|name| !special.contains(name)).collect();
    assert!(names.len() > 20, "entry points found: {names:?}");
    names.into_iter().map(|name| entry(name, None, 999)).collect()
}

#[test]
fn a_driver_that_cannot_be_used_is_named_and_never_a_panic() {
    if let Ok(reason) = std::env::var(ERRAND) {
        let asked = CudaDevice::open(0).expect_err("the driver cannot be used");
        assert!(asked.to_string().contains(&reason), "{asked}");
        assert_eq!(asked.remedy(), Remedy::ChangeCall);
        let store = Store::temporary(Options::default()).unwrap();
        assert!(store.recovered().device.contains(&reason), "{}", store.recovered().device);
        let refused = Store::temporary(Options::default().device(DeviceChoice::Cuda(0))).unwrap_err();
        assert!(
            matches!(&refused, Error::DeviceUnavailable { device, .. } if device == "cuda:0"),
            "{refused}"
        );
        return;
    }
    // A suite may run on a machine other than the one that built it.
    if let Err(error) = Process::new(compiler()).arg("--version").output() {
        skipped("drivers that cannot be used", &format!("they take a compiler: {error}"));
        return;
    }
    let init = |code| entry("cuInit", None, code);
    let version = |number| entry("cuDriverGetVersion", Some(number), 0);
    let count = |number| entry("cuDeviceGetCount", Some(number), 0);
    let rest = all_but(&["cuInit", "cuDriverGetVersion", "cuDeviceGetCount"]);
    let rows = [
        ("the CUDA driver is too old: it has no cuDriverGetVersion", init(0)),
        (
            "the CUDA driver does not start: cuInit: no device (100)",
            init(100) + &version(12_040) + &count(0) + &rest,
        ),
        (
            "the CUDA driver does not start: cuInit: an error unknown here (4711)",
            init(4711) + &version(12_040) + &count(0) + &rest,
        ),
        (
            "the CUDA driver is of version 11.8, and 12.4 is needed",
            init(0) + &version(11_080) + &count(1) + &rest,
        ),
        ("the CUDA driver knows 0 GPUs", init(0) + &version(12_040) + &count(0) + &rest),
        ("cuDeviceGet: unknown (999)", init(0) + &version(12_040) + &count(1) + &rest),
    ];
    for (reason, source) in rows {
        let directory = tempfile::tempdir().unwrap();
        driver(directory.path(), &source);
        let test = "a_driver_that_cannot_be_used_is_named_and_never_a_panic";
        assert_success(&in_a_child(test, reason, Some(directory.path())));
    }
}

#[test]
fn the_choice_of_a_device_is_kept_and_reported() {
    let device = |choice| {
        let store = Store::temporary(Options::default().device(choice)).unwrap();
        store.recovered().device.clone()
    };
    assert_eq!(device(DeviceChoice::Host), "host");
    let beyond = Store::temporary(Options::default().device(DeviceChoice::Cuda(1000))).unwrap_err();
    assert!(matches!(&beyond, Error::DeviceUnavailable { device, .. } if device == "cuda:1000"), "{beyond}");
    match gpu::device() {
        Some(gpu) => {
            assert!(gpu.label().starts_with("cuda:0 (") && CudaDevice::count().unwrap() > 0);
            assert_eq!(
                [device(DeviceChoice::Auto), device(DeviceChoice::Cuda(0))],
                [gpu.label(), gpu.label()]
            );
        }
        None => assert!(device(DeviceChoice::Auto).starts_with("host, no GPU: ")),
    }
}

#[test]
fn a_million_allocations_leave_no_growth() {
    let Some(gpu) = gpu::device() else { return };
    let mut random = Random(1);
    let mut live: Vec<MemoryId> = Vec::new();
    let mut held = 0;
    for cycle in 0..1_000_000_u32 {
        // Lengths from a byte to 64 KiB, short ones more often.
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

/// Giving memory back waits for all that the GPU has to do, so idle memory stays.
#[test]
fn what_is_asked_for_at_once_gives_nothing_back_to_the_driver() {
    const IDLE: u64 = 18 << 20;
    let Some(_) = gpu::device() else { return };
    let memory = Pool::new(LimitedMemory::new(DriverMemory::of(0).unwrap(), 20 << 20));
    let gpu = CudaDevice::open_with(0, Arc::new(memory)).unwrap();
    gpu.release(gpu.allocate(PLACE, IDLE).unwrap()).unwrap();
    let refused = gpu.allocate_at_once(PLACE, 4 << 20).unwrap_err();
    assert!(matches!(refused, Error::OutOfMemory { place: PLACE, len } if len == 4 << 20), "{refused}");
    assert_eq!(held_on(&gpu), IDLE);
    // Idle memory is there at once, and so is memory that the driver has left.
    for len in [IDLE, 2 << 20] {
        gpu.release(gpu.allocate_at_once(PLACE, len).unwrap()).unwrap();
    }
    gpu.release(gpu.allocate(PLACE, 4 << 20).unwrap()).unwrap();
    assert_eq!(held_on(&gpu), 4 << 20);
}

/// A long copy goes in pieces. Few of them are under way at a time, so that another thread's copies do not
/// wait for the rest.
#[test]
fn a_long_copy_that_stands_still_holds_up_its_own_lane_alone() {
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

/// A read that finds the GPU's memory used up, while a stream of the caller's stands still until the bytes
/// are there.
#[test]
fn a_long_read_without_room_waits_for_no_caller() {
    const LEN: u64 = 20 << 20;
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let memory = Pool::new(LimitedMemory::new(DriverMemory::of(0).unwrap(), 3 * LEN));
        let gpu = CudaDevice::open_with(0, Arc::new(memory)).unwrap();
        let store = Store::open_on(Arc::new(SimDisk::new()), Arc::new(gpu), Options::default()).unwrap();
        let mut batch = store.batch();
        let page = batch.create(LEN, PLACE).page();
        // The memory that it leaves free is too short for anything long.
        let other = batch.create(LEN + (12 << 20), PLACE).page();
        batch.fill(page, 0, LEN, &[5]).fill(other, 0, 1, &[6]);
        let pages = store.commit(batch).unwrap().pages;
        // Staging is made ready: to pin more of it may wait for all that a GPU has to do.
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

/// A block of its own for every length would stay until a caller asks for it back.
#[test]
fn long_reads_of_all_lengths_leave_the_same_memory_behind() {
    let Some(gpu) = gpu::device() else { return };
    let store = Store::open_on(Arc::new(SimDisk::new()), gpu.clone(), Options::default()).unwrap();
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

/// Bytes of the GPU's memory that a device holds, in use or idle.
fn held_on(gpu: &CudaDevice) -> u64 {
    let stats = gpu.memory_stats().into_iter().find(|(place, _)| *place == PLACE);
    stats.expect("a GPU has memory").1.reserved_bytes
}

/// Lists that write to pinned memory, each in its own way, and one that only reads it.
fn lists_about(gpu: &CudaDevice, span: Span, other: Span) -> Vec<(&'static str, bool, CommandList)> {
    let staged = StagingSpan { index: 0, offset: 0, len: span.len as usize };
    let (width, piece) = (Width::W1, Span { len: 64, ..span });
    let bits = Span { len: 16, ..other };
    let apply =
        Piece { target: piece, payload: Payload::Staging { index: 0, offset: 0 }, kind: PieceKind::Dense };
    let indices = StagingSpan { index: 0, offset: 0, len: 4 * 64 };
    let commands = [
        ("upload", true, Command::Upload { source: staged, target: span }),
        ("apply", true, Command::Apply { pieces: vec![apply] }),
        ("copy", true, Command::Copy { source: other, target: span }),
        ("fill", true, Command::Fill { target: span, pattern: [1; 16], width }),
        ("gather", true, Command::Gather { sources: vec![(other, 0)], target: span }),
        ("scatter", true, Command::Scatter { source: other, targets: vec![(0, span)] }),
        ("diff", true, Command::Diff { left: bits, right: bits, width, target: Span { len: 2, ..span } }),
        (
            "select",
            true,
            Command::Select {
                bitmaps: vec![Selection { bits, indices: piece }],
                target: StagingSpan { len: 4, ..staged },
            },
        ),
        ("pick", true, Command::Pick { source: other, width, indices, target: piece }),
        ("download", false, Command::Download { source: span, target: staged }),
    ];
    let list = |command| {
        let mut staging = gpu.staging(span.len as usize).unwrap();
        staging.fill(0);
        CommandList { commands: vec![command], staging: vec![staging] }
    };
    commands.into_iter().map(|(name, writes, command)| (name, writes, list(command))).collect()
}

#[test]
fn a_thread_reads_pinned_memory_unless_a_list_under_way_writes_to_it() {
    const LEN: u64 = 4096;
    gpu::alone(|| {
        let Some(caller) = Caller::new() else { return };
        let gpu = CudaDevice::open(0).unwrap();
        let [span, other] = [(); 2].map(|()| {
            let span = Span { memory: gpu.allocate(Place::Pinned, LEN).unwrap(), offset: 0, len: LEN };
            let fill = Command::Fill { target: span, pattern: [7; 16], width: Width::W1 };
            let list = CommandList { commands: vec![fill], staging: vec![] };
            gpu.submit(Lane::Apply, list).unwrap().finish(&gpu).unwrap();
            span
        });
        let mut bytes = vec![0; LEN as usize];
        assert!(gpu.read_now(span.memory, 0, &mut bytes) && bytes.iter().all(|byte| *byte == 7));
        for (name, writes, list) in lists_about(&gpu, span, other) {
            let stream = caller.stream();
            let hold = stream.hold();
            gpu.wait_external(Lane::Callers, stream.raw()).unwrap();
            let pending = gpu.submit(Lane::Callers, list).unwrap();
            assert_eq!(gpu.read_now(span.memory, 0, &mut bytes), !writes, "{name}");
            assert!(gpu.read_now(other.memory, 0, &mut bytes), "{name}: no list writes to this one");
            hold.let_go();
            pending.finish(&gpu).unwrap();
            assert!(gpu.read_now(span.memory, 0, &mut bytes), "{name} has passed");
            assert_eq!(bytes, content(&gpu, span.memory, LEN), "{name}");
            stream.synchronize();
        }
        assert!(gpu.read_now(span.memory, LEN, &mut []));
        for (offset, len) in [(0, LEN + 1), (LEN, 1), (u64::MAX, 1)] {
            assert!(!gpu.read_now(span.memory, offset, &mut vec![0; len as usize]), "{offset}+{len}");
        }
        gpu.release(span.memory).unwrap();
        assert!(!gpu.read_now(span.memory, 0, &mut bytes), "it was released");
        let on_gpu = gpu.allocate(PLACE, LEN).unwrap();
        assert!(!gpu.read_now(on_gpu, 0, &mut bytes), "it is the GPU's");
    });
}

/// What a read gives is of one moment between two lists.
#[test]
fn reads_of_pinned_memory_never_see_half_a_list() {
    const LEN: usize = 64 << 10;
    let Some(gpu) = gpu::device() else { return };
    let span = Span { memory: gpu.allocate(Place::Pinned, LEN as u64).unwrap(), offset: 0, len: LEN as u64 };
    let is_over = AtomicBool::new(false);
    let reads = std::thread::scope(|scope| {
        let readers = [(); 2].map(|()| {
            scope.spawn(|| {
                let (mut bytes, mut reads) = (vec![0; LEN], 0);
                while !is_over.load(Ordering::Relaxed) {
                    if gpu.read_now(span.memory, 0, &mut bytes) {
                        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "half a list is seen");
                        reads += 1;
                    }
                }
                reads
            })
        });
        for round in 0..300_u32 {
            let fill = Command::Fill { target: span, pattern: [round as u8; 16], width: Width::W1 };
            let list = CommandList { commands: vec![fill], staging: vec![] };
            let pending = gpu.submit(Lane::Apply, list).unwrap();
            // Some rounds leave a list under way when the next one is queued.
            if round % 4 == 0 {
                pending.finish(&*gpu).unwrap();
                let mut byte = [0];
                assert!(gpu.read_now(span.memory, 0, &mut byte) && byte[0] == round as u8);
            }
        }
        is_over.store(true, Ordering::Relaxed);
        readers.map(|reader| reader.join().unwrap())
    });
    println!("{reads:?} reads");
}

#[test]
fn a_pinned_page_is_read_without_a_list() {
    let Some(gpu) = gpu::device() else { return };
    let store = Store::open_on(Arc::new(SimDisk::new()), gpu.clone(), Options::default()).unwrap();
    let mut batch = store.batch();
    for place in [Place::Pinned, Place::Host] {
        let page = batch.create(200_000, place).page();
        batch.fill(page, 0, 200_000, &[5]);
    }
    let committed = store.commit(batch).unwrap();
    // Another way to wait for the lane.
    let lists = || {
        let pending = gpu.submit(Lane::Apply, CommandList::default()).unwrap();
        let value = pending.fence().value;
        pending.finish(&*gpu).unwrap();
        value
    };
    let mut bytes = vec![0; 200_000];
    store.read(committed.pages[0], 0, &mut bytes).unwrap();
    let before = lists();
    for page in committed.pages {
        bytes.fill(0);
        store.read(page, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 5));
        assert_eq!(store.read_to_vec(page).unwrap(), bytes);
    }
    assert_eq!(lists(), before + 1, "no list but the one that counts");
}

#[test]
fn more_than_the_gpu_has_is_out_of_memory_and_no_fault() {
    let Some(gpu) = gpu::device() else { return };
    let kept = gpu.allocate(PLACE, 1 << 20).unwrap();
    for place in [PLACE, Place::Pinned, Place::Unified] {
        for len in [1 << 45, 1 << 60, u64::MAX] {
            let error = gpu.allocate(place, len).unwrap_err();
            assert!(
                matches!(error, Error::OutOfMemory { place: named, len: asked } if (named, asked) == (place, len))
            );
        }
    }
    assert!(matches!(gpu.staging(1 << 45), Err(Error::OutOfMemory { .. })));
    // Idle memory is given back before an allocation fails for want of it.
    let page = gpu.allocate(PLACE, 1 << 20).unwrap();
    gpu.release(kept).unwrap();
    gpu.release(page).unwrap();
}

/// A list of long and short pieces that overlap in all ways, drawn from a seed; its staging in `payload`.
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
            // Longer than one piece of the copy engine's queue, on the other lane.
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
fn a_list_that_is_never_waited_for_keeps_its_staging() {
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
        // This would reuse a staging that had been freed.
        gpu.staging(LEN).unwrap().fill(0xEE);
    }
    let wait = gpu.submit(Lane::Apply, CommandList::default()).unwrap().fence();
    gpu.after(Lane::Drain, wait).unwrap();
    assert!(content(&*gpu, memory, LEN as u64).iter().all(|byte| *byte == 50));
}

#[test]
fn a_fault_on_the_gpu_asks_for_a_new_process() {
    if std::env::var_os(ERRAND).is_some() {
        // Indices that lie on the GPU are the caller's word: one far outside is a fault.
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
            Store::temporary(Options::default()).map(drop),
        ];
        for later in later {
            assert_eq!(later.unwrap_err().remedy(), Remedy::NewProcess);
        }
        return;
    }
    if gpu::device().is_some() {
        assert_success(&in_a_child("a_fault_on_the_gpu_asks_for_a_new_process", "fault", None));
    }
}

#[test]
fn a_leased_page_in_host_memory_is_read_by_the_host_at_its_address() {
    const LEN: u64 = 5000;
    let Some(gpu) = gpu::device() else { return };
    let store = Store::open_on(Arc::new(SimDisk::new()), gpu, Options::default()).unwrap();
    for place in [Place::Pinned, Place::Host, Place::Unified, PLACE] {
        let mut batch = store.batch();
        let page = batch.create(LEN, place).page();
        batch.fill(page, 0, LEN, &[7, 9]);
        let page = store.commit(batch).unwrap().pages[0];
        let lease = store.lease(page).unwrap();
        let refused = lease.bytes().unwrap_err();
        let Error::PlaceUnavailable { place: named, reason } = refused else { panic!("{refused}") };
        assert_eq!((named, reason.contains("the host's as well")), (place, place != PLACE), "{reason}");
        if place != PLACE {
            assert_eq!(
                gpu::host_sees(lease.address().unwrap(), LEN),
                [7, 9].repeat(LEN as usize / 2),
                "{place}"
            );
        }
    }
}

#[test]
fn devices_come_and_go_in_one_process() {
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
    // Staging outlives its device.
    assert!(bytes[0].iter().all(|byte| *byte == 3));
}

fn content(device: &dyn Device, memory: MemoryId, len: u64) -> Vec<u8> {
    let target = StagingSpan { index: 0, offset: 0, len: len as usize };
    let commands = vec![Command::Download { source: Span { memory, offset: 0, len }, target }];
    let list = CommandList { commands, staging: vec![device.staging(len as usize).unwrap()] };
    device.submit(Lane::Drain, list).unwrap().finish(device).unwrap()[0].to_vec()
}

/// A generator of random numbers: SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

#[test]
fn memory_of_the_callers_is_taken_where_the_driver_knows_it() {
    let Some(gpu) = gpu::device() else { return };
    let Some(callers) = gpu::device() else { return };
    let disk = SimDisk::new();
    let store = Store::open_on(Arc::new(disk), gpu, Options::default()).unwrap();
    let mut batch = store.batch();
    batch.create_from(vec![0; 4096], PLACE);
    let page = store.commit(batch).unwrap().pages[0];
    for (place, content) in [(PLACE, 5), (Place::Pinned, 6)] {
        let memory = callers.allocate(place, 8192).unwrap();
        let address = callers.address(memory).unwrap();
        // SAFETY: the device keeps it until it is released, below.
        let adopt = |address, len| store.caller_bytes(&unsafe { CallerMemory::from_cuda(address, len, ()) });
        let bytes = adopt(address + 16, 4096).unwrap();
        assert_eq!((bytes.place(), bytes.address()), (place, Some(address + 16)));
        bytes.write(0, &[content; 4096]).unwrap();
        let mut batch = store.batch();
        batch.write_device(page, 0, &bytes);
        store.commit(batch).unwrap();
        let mut found = vec![0; 4096];
        store.read(page, 0, &mut found).unwrap();
        assert!(found == [content; 4096]);
        drop(bytes);

        let local = Box::new([0_u8; 64]);
        for (what, address, len) in [
            ("longer than all memory", address, u64::MAX),
            ("nowhere", 64, 64),
            ("of no device", local.as_ptr() as u64, 64),
            ("empty", address, 0),
        ] {
            let refused = adopt(address, len).unwrap_err();
            assert!(matches!(refused, Error::MemoryRefused { .. }), "{what}: {refused}");
        }
        // It was left to its owner: the store takes none of its own from there.
        let own = store.device_bytes(4096, place).unwrap();
        assert_ne!(own.address(), Some(address + 16));
        callers.release(memory).unwrap();
    }
}

#[test]
fn memory_of_another_gpu_is_refused() {
    let Some([one, other]) = gpu::two() else { return };
    let store = Store::open_on(Arc::new(SimDisk::new()), one, Options::default()).unwrap();
    let memory = other.allocate(PLACE, 4096).unwrap();
    let address = other.address(memory).unwrap();
    // SAFETY: the device keeps it until it is released, below.
    let refused = store.caller_bytes(&unsafe { CallerMemory::from_cuda(address, 4096, ()) }).unwrap_err();
    assert!(matches!(refused, Error::MemoryRefused { .. }), "{refused}");
    other.release(memory).unwrap();
}

#[test]
fn a_gpu_within_another_device_takes_memory_of_the_callers_too() {
    let (Some(gpu), Some(callers)) = (gpu::device(), gpu::device()) else { return };
    let gpu: Arc<dyn Device> = gpu;
    let host: Arc<dyn Device> = Arc::new(HostDevice::new());
    let wrapped: [(Arc<dyn Device>, Place); 3] = [
        (Arc::new(LateDevice::seeded(gpu.clone(), 1)), Place::Device(0)),
        (Arc::new(FaultyDevice::new(gpu.clone())), Place::Device(0)),
        (Arc::new(MultiDevice::new(vec![host, gpu])), Place::Device(1)),
    ];
    for (device, place) in wrapped {
        let memory = callers.allocate(PLACE, 64).unwrap();
        let address = callers.address(memory).unwrap();
        // SAFETY: the device keeps it until it is released, below.
        let (adopted, found) = device.adopt(&unsafe { CallerMemory::from_cuda(address, 64, ()) }).unwrap();
        assert_eq!(found, place, "{}", device.label());
        let target = Span { memory: adopted, offset: 0, len: 64 };
        let fill = Command::Fill { target, pattern: [7; 16], width: Width::W1 };
        let list = CommandList { commands: vec![fill], staging: vec![] };
        device.submit(Lane::Apply, list).unwrap().finish(&*device).unwrap();
        assert_eq!(content(&*callers, memory, 64), [7; 64], "{}", device.label());
        // SAFETY: no command reads it.
        let nowhere = unsafe { CallerMemory::from_cuda(64, 64, ()) };
        let refused = device.adopt(&nowhere).unwrap_err();
        assert!(matches!(refused, Error::MemoryRefused { .. }), "{refused}");
        device.release(adopted).unwrap();
        callers.release(memory).unwrap();
    }
}
