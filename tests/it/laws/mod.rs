//! Conformance tests of devices, called laws: one table of cases that every device must pass (I11).
//!
//! A case contains the initial content of page memory and staging memory, and the lists to run. `model.rs`
//! computes the expected content. A device passes if the bytes are equal, including those around the ranges.
//! A run with `--nocapture` prints a summary for each device, its receipt (`receipt.rs`).
//!
//! Under a GPU sanitizer, each launch takes milliseconds. With `REMANENT_LAWS=short`, only one in
//! [`SHORT_EVERY`] cases of each parameter grid runs, and every case that belongs to no grid.

mod cases;
mod model;
mod receipt;

use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::cuda::CudaDevice;
use remanent::device::cuda::resource::{
    DriverMemory, GuardedMemory, LimitedMemory, LoggedMemory, MemoryAccess, Pool,
};
use remanent::device::host::HostDevice;
use remanent::device::multi::MultiDevice;
use remanent::device::{
    Command, CommandList, Device, IndexList, KernelAddresses, Lane, MemoryCache, MemoryId, Payload, Pending,
    Piece, PieceKind, Selection, Span, Staging, StagingSpan,
};
use remanent::testing::faulty_device::FaultyDevice;
use remanent::testing::late_device::LateDevice;
use remanent::{Error, Place};

use self::model::{Case, Outcome};
use self::receipt::Receipt;
use crate::gpu;

const PLACES: [Place; 5] = [Place::Device(0), Place::Device(1), Place::Pinned, Place::Host, Place::Unified];
const DRAWN_CASES: u64 = 500;
/// The interval between cases in a short run. It is coprime to the dimensions of the parameter grids, so that
/// a short run includes each value of each parameter.
const SHORT_EVERY: usize = 37;

#[test]
fn host_device_obeys_laws() {
    keeps_the_laws(&HostDevice::new());
}

#[test]
fn lazy_device_obeys_laws() {
    keeps_the_laws(&LateDevice::new(Arc::new(HostDevice::new())));
}

#[test]
fn randomly_scheduled_devices_obey_laws() {
    for seed in 0..4 {
        println!("schedule of seed {seed}");
        keeps_the_laws(&LateDevice::seeded(Arc::new(HostDevice::new()), seed));
    }
}

#[test]
fn idle_faulty_device_obeys_laws() {
    keeps_the_laws(&FaultyDevice::new(Arc::new(HostDevice::new())));
}

#[test]
fn multi_device_obeys_laws() {
    let host = || Arc::new(HostDevice::new());
    keeps_the_laws(&MultiDevice::new(vec![host(), host()]));
    keeps_the_laws(&MultiDevice::new(vec![
        Arc::new(LateDevice::seeded(host(), 5)),
        Arc::new(LateDevice::new(host())),
    ]));
}

#[test]
fn two_gpus_obey_laws_as_one_device() {
    for gpus in [gpu::two(), gpu::two_apart()].into_iter().flatten() {
        keeps_the_laws(&MultiDevice::new(gpus.into()));
    }
}

#[test]
fn gpu_obeys_laws() {
    let Some(gpu) = gpu::device() else { return };
    keeps_the_laws(&*gpu);
    keeps_the_laws(&LateDevice::seeded(gpu, 4));
}

/// The test allocates the memory. Each page is between canaries and initially filled with junk, and the
/// releases of pages are recorded.
#[test]
fn gpu_obeys_laws_in_guarded_memory() {
    if gpu::device().is_none() {
        return;
    }
    let driver = || DriverMemory::of(0).unwrap();
    let limited = LimitedMemory::new(LoggedMemory::new(driver(), "driver"), 64 << 20);
    let guarded = Arc::new(GuardedMemory::new(LoggedMemory::new(Pool::new(limited), "pages"), driver()));
    let gpu = CudaDevice::open_with(0, guarded.clone()).unwrap();
    let of_pages = |gpu: &CudaDevice| gpu.memory_stats()[0].1;
    let receipt = run_laws(&gpu, SHORT_EVERY);
    assert_eq!(receipt.results(), run_laws(&HostDevice::new(), SHORT_EVERY).results());
    // Submitting a list frees the resources of the previous list.
    for lane in Lane::ALL {
        gpu.submit(lane, CommandList::default()).unwrap().finish(&gpu).unwrap();
    }
    // The canaries were intact when their pages were released, and the memory limit was not exceeded.
    assert_eq!(guarded.live(), []);
    assert!(matches!(gpu.allocate(Place::Device(0), 65 << 20), Err(Error::OutOfMemory { .. })));
    let kept = gpu.allocate(Place::Device(0), 1000).unwrap();
    let address = gpu.address(kept).unwrap();
    assert_eq!((guarded.live(), of_pages(&gpu).used_bytes > 0), (vec![(address, 1000)], true));

    // Simulate a kernel that writes one byte after the end of a page. SAFETY: the canary is at this address,
    // and no other command uses it.
    unsafe { driver().write(address + 1000, &[0]) }.unwrap();
    let broken = gpu.release(kept).unwrap_err();
    assert!(broken.to_string().contains("byte 0 past the end"), "{broken}");
}

/// The model determines the expected result of every case, so the model itself is compared with results that
/// were computed by hand.
#[test]
fn the_model_agrees_with_hand_made_results() {
    let whole = |len| Span { memory: MemoryId(0), offset: 0, len };
    let to = |len| StagingSpan { index: 0, offset: 0, len };
    let piece = |kind| Command::Apply {
        pieces: vec![Piece { target: whole(6), payload: Payload::Staging { index: 0, offset: 0 }, kind }],
    };
    let check =
        |name: &str, page: &[u8], staged: &[u8], command: Command, page_then: &[u8], staged_then: &[u8]| {
            let case = Case::new(name.to_owned(), vec![page.to_vec()], vec![staged.to_vec()], vec![command]);
            let outcome = case.outcome();
            assert_eq!(outcome.memories, [page_then], "{name}");
            let known: Vec<u8> = outcome.staging[0][0].iter().flatten().copied().collect();
            assert_eq!(known, staged_then, "{name}: bytes that were read are unspecified");
            agree(&HostDevice::new(), &case);
        };

    let masked = PieceKind::Masked { width: Width::W2, bytes_at: 1 };
    check("mask", &[0; 6], &[0b101, 1, 2, 3, 4, 5, 6], piece(masked), &[1, 2, 0, 0, 5, 6], &[]);
    let sparse = PieceKind::Sparse { width: Width::W2, count: 2, values_at: 8 };
    let payload = [2, 0, 0, 0, 0, 0, 0, 0, 7, 8, 9, 10];
    check("scatter", &[0; 6], &payload, piece(sparse), &[9, 10, 0, 0, 7, 8], &[]);
    let pattern = *b"abcdefghijklmnop";
    let fill = Command::Fill { target: whole(6), pattern, width: Width::W2 };
    check("fill", &[0; 6], &[], fill, b"ababab", &[]);
    let halves = |left, right| (Span { len: 3, ..whole(6) }, Span { offset: left, len: right, ..whole(6) });
    let (left, right) = halves(3, 3);
    let bits = Span { offset: 6, len: 1, ..whole(7) };
    let diff = Command::Diff { left, right, width: Width::W1, target: bits };
    check("diff", &[1, 2, 3, 1, 0, 9, 0xFF], &[], diff, &[1, 2, 3, 1, 0, 9, 0b110], &[]);
    let indices = Span { offset: 4, len: 8, ..whole(16) };
    let bitmaps = vec![Selection { bits: Span { len: 2, ..whole(16) }, indices }];
    let select = Command::Select { bitmaps, target: to(4) };
    let (before, after) =
        ([2, 5, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9], [2, 5, 9, 9, 1, 0, 0, 0, 8, 0, 0, 0, 9, 9, 9, 9]);
    check("select, with room for two of three", &before, &[9; 4], select, &after, &[3, 0, 0, 0]);
    let two = Span { len: 2, ..right };
    let pick = Command::Pick { source: left, width: Width::W1, indices: to(8), target: two };
    check("pick", &[1, 2, 3, 4, 5, 6], &[2, 0, 0, 0, 0, 0, 0, 0], pick, &[1, 2, 3, 3, 1, 6], &[]);
    let list = |bound| IndexList { indices: whole(12), bound };
    let validate = Command::Validate { lists: vec![list(8), list(7)], target: to(8) };
    let indices = [7, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0];
    check("validation", &indices, &[9; 8], validate, &indices, &[2, 0, 0, 0, 3, 0, 0, 0]);
    // The standard check value of CRC-32.
    let crc = Command::Crc { sources: vec![whole(9)], target: to(4) };
    check("checksum", b"123456789", &[0; 4], crc, b"123456789", &0xCBF4_3926_u32.to_le_bytes());
}

#[test]
fn receipt_lists_operations_and_outcome() {
    let short = run_laws(&HostDevice::new(), SHORT_EVERY);
    let ran: Vec<&str> = short.ran().collect();
    let all = [
        "copy", "crc", "dense", "diff", "digest", "download", "fill", "gather", "masked", "pick", "scatter",
        "select", "sparse", "upload", "validate",
    ];
    assert_eq!(ran, all, "a short run leaves no command out");

    let fill = |byte| {
        let target = Span { memory: MemoryId(0), offset: 1, len: 1 };
        let fill = Command::Fill { target, pattern: [byte; 16], width: Width::W1 };
        let case = Case::new("one byte".to_owned(), vec![vec![0; 3]], vec![], vec![fill]);
        let mut receipt = Receipt::new(&HostDevice::new());
        receipt.agreed(&case, &agree(&HostDevice::new(), &case));
        receipt
    };
    assert_ne!(fill(1).results(), fill(2).results(), "one byte is another");
    let text = fill(1).to_string();
    let sum = format!("results  {:08x}", crc32fast::hash(&[0, 1, 0]));
    assert!(text.contains("cases    1: fill 1\n") && text.ends_with(&sum), "{text}");
}

#[expect(clippy::print_stdout, reason = "the receipt is for the one run of the laws, on its device")]
fn keeps_the_laws(device: &dyn Device) {
    let every = match std::env::var("REMANENT_LAWS").as_deref() {
        Ok("short") => SHORT_EVERY,
        Ok(other) => panic!("REMANENT_LAWS is {other:?}, and may be \"short\""),
        Err(_) => 1,
    };
    println!("{}", run_laws(device, every));
}

/// Runs one in `every` of the cases in parameter grids, and all other cases.
fn run_laws(device: &dyn Device, every: usize) -> Receipt {
    let mut receipt = Receipt::new(device);
    let drawn = (0..DRAWN_CASES).step_by(every).map(cases::drawn);
    for case in cases::table(every).into_iter().chain(drawn) {
        let outcome = agree(device, &case);
        receipt.agreed(&case, &outcome);
    }
    receipt
}

/// Runs the case, and compares all bytes whose values the model specifies. Returns the outcome.
fn agree(device: &dyn Device, case: &Case) -> Outcome {
    let (found, expected) = (run(device, case), case.outcome());
    let label = format!("{} on {}", case.name, device.label());
    assert_eq!(found.memories, expected.memories, "page memory after {label}");
    for (list, (found, expected)) in found.staging.iter().zip(&expected.staging).enumerate() {
        assert_eq!(found.len(), expected.len(), "number of stagings of list {list} after {label}");
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let known: Vec<Option<u8>> =
                found.iter().zip(expected).map(|(found, expected)| expected.and(*found)).collect();
            assert_eq!(found.len(), expected.len(), "length of staging {index} of list {list} after {label}");
            assert_eq!(&known, expected, "staging {index} of list {list} after {label}");
        }
    }
    expected
}

/// Submits the lists of the case, ordered across lanes only by `after`, and waits for them from last to
/// first.
fn run(device: &dyn Device, case: &Case) -> Outcome {
    let ids: Vec<MemoryId> = case
        .memories
        .iter()
        .zip(PLACES.iter().cycle())
        .map(|(bytes, place)| page(device, *place, bytes))
        .collect();

    let mut pending: Vec<Pending> = Vec::new();
    for list in &case.lists {
        if let Some(last) = pending.last().map(Pending::fence).filter(|fence| fence.lane != list.lane) {
            device.after(list.lane, last).unwrap();
        }
        let commands = list.commands.iter().map(|command| named(command, &ids)).collect();
        let staging = list.staging.iter().map(|bytes| staged(device, bytes)).collect();
        pending.push(device.submit(list.lane, CommandList { commands, staging }).unwrap());
    }
    let mut staging = Vec::new();
    for list in pending.into_iter().rev() {
        let fence = list.fence();
        let returned = list.finish(device).unwrap();
        assert!(device.reached(fence.lane) >= fence.value, "{fence:?} has passed on {}", device.label());
        staging.push(returned.iter().map(|bytes| bytes.iter().copied().map(Some).collect()).collect());
    }
    staging.reverse();

    let memories =
        ids.iter().zip(&case.memories).map(|(id, bytes)| content(device, *id, bytes.len())).collect();
    ids.into_iter().for_each(|id| device.release(id).unwrap());
    Outcome { memories, staging }
}

/// Allocates page memory that contains these bytes.
fn page(device: &dyn Device, place: Place, bytes: &[u8]) -> MemoryId {
    let memory = device.allocate(place, bytes.len() as u64).unwrap();
    let source = StagingSpan { index: 0, offset: 0, len: bytes.len() };
    let target = Span { memory, offset: 0, len: bytes.len() as u64 };
    let commands = vec![Command::Upload { source, target }];
    let list = CommandList { commands, staging: vec![staged(device, bytes)] };
    device.submit(Lane::Apply, list).unwrap().finish(device).unwrap();
    memory
}

fn content(device: &dyn Device, memory: MemoryId, len: usize) -> Vec<u8> {
    let target = StagingSpan { index: 0, offset: 0, len };
    let commands = vec![Command::Download { source: Span { memory, offset: 0, len: len as u64 }, target }];
    let list = CommandList { commands, staging: vec![device.staging(len).unwrap()] };
    device.submit(Lane::Apply, list).unwrap().finish(device).unwrap()[0].to_vec()
}

/// Allocates staging memory that contains these bytes.
fn staged(device: &dyn Device, bytes: &[u8]) -> Staging {
    let mut staging = device.staging(bytes.len()).unwrap();
    assert!(staging.iter().all(|byte| *byte == 0), "staging comes zeroed");
    staging.copy_from_slice(bytes);
    staging
}

/// Returns the command with the memory ids of the device instead of those of the case.
fn named(command: &Command, ids: &[MemoryId]) -> Command {
    let on = |span: &Span| Span { memory: ids[span.memory.0 as usize], ..*span };
    match command {
        Command::Upload { source, target } => Command::Upload { source: *source, target: on(target) },
        Command::Download { source, target } => Command::Download { source: on(source), target: *target },
        Command::Apply { pieces } => {
            let payload = |payload| match payload {
                Payload::Device(span) => Payload::Device(on(&span)),
                staged => staged,
            };
            let piece = |piece: &Piece| Piece {
                target: on(&piece.target),
                payload: payload(piece.payload),
                kind: piece.kind,
            };
            Command::Apply { pieces: pieces.iter().map(piece).collect() }
        }
        Command::Copy { source, target } => Command::Copy { source: on(source), target: on(target) },
        Command::Fill { target, pattern, width } => {
            Command::Fill { target: on(target), pattern: *pattern, width: *width }
        }
        Command::Gather { sources, target } => Command::Gather {
            sources: sources.iter().map(|(source, offset)| (on(source), *offset)).collect(),
            target: on(target),
        },
        Command::Scatter { source, targets } => Command::Scatter {
            source: on(source),
            targets: targets.iter().map(|(offset, target)| (*offset, on(target))).collect(),
        },
        Command::Diff { left, right, width, target } => {
            Command::Diff { left: on(left), right: on(right), width: *width, target: on(target) }
        }
        Command::Select { bitmaps, target } => {
            let on = |of: &Selection| Selection { bits: on(&of.bits), indices: on(&of.indices) };
            Command::Select { bitmaps: bitmaps.iter().map(on).collect(), target: *target }
        }
        Command::Digest { sources, key, target } => {
            Command::Digest { sources: sources.iter().map(on).collect(), key: on(key), target: *target }
        }
        Command::Crc { sources, target } => {
            Command::Crc { sources: sources.iter().map(on).collect(), target: *target }
        }
        Command::Pick { source, width, indices, target } => {
            Command::Pick { source: on(source), width: *width, indices: *indices, target: on(target) }
        }
        Command::Validate { lists, target } => {
            let list = |list: &IndexList| IndexList { indices: on(&list.indices), ..*list };
            Command::Validate { lists: lists.iter().map(list).collect(), target: *target }
        }
    }
}
