//! Pinned memory. The host reads it without a command list, and never sees a partially executed list.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::batch::Width;
use remanent::device::cuda::CudaDevice;
use remanent::device::{
    Command, CommandList, Device, DeviceStreams, DirectReads, Lane, Payload, Piece, PieceKind, Selection,
    Span, StagingSpan,
};
use remanent::error::Unavailable;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, Place, Store};

use super::{PLACE, content};
use crate::gpu::{self, Caller};

/// Returns lists that write to pinned memory in different ways, and one list that only reads it.
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
fn pinned_memory_is_read_directly_unless_list_writes_to_it() {
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

/// A read returns the content between two lists, never within one.
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
            // In some rounds, a list is still running when the next list is queued.
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
    let store = Store::open_on(Arc::new(SimDisk::new()), gpu.clone(), Options::new()).unwrap();
    let mut batch = store.batch();
    for place in [Place::Pinned, Place::Host] {
        let page = batch.create(200_000, place).page();
        batch.fill(page, 0, 200_000, &[5]);
    }
    let committed = store.commit(batch).unwrap();
    // Use another way to wait for the lane.
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
fn leased_host_page_is_readable_at_its_address() {
    const LEN: u64 = 5000;
    let Some(gpu) = gpu::device() else { return };
    let store = Store::open_on(Arc::new(SimDisk::new()), gpu, Options::new()).unwrap();
    for place in [Place::Pinned, Place::Host, Place::Unified, PLACE] {
        let mut batch = store.batch();
        let page = batch.create(LEN, place).page();
        batch.fill(page, 0, LEN, &[7, 9]);
        let page = store.commit(batch).unwrap().pages[0];
        let lease = store.lease(page).unwrap();
        let refused = lease.bytes().unwrap_err();
        let Error::Unavailable(Unavailable::Place { place: named, reason }) = refused else {
            panic!("{refused}")
        };
        assert_eq!((named, reason.contains("the host's as well")), (place, place != PLACE), "{reason}");
        let told = lease.descriptor().unwrap();
        assert_eq!((Some(told.address), told.len, told.gpu), (lease.address(), LEN, Some(0)), "{place}");
        if place != PLACE {
            assert_eq!(
                gpu::host_sees(lease.address().unwrap(), LEN),
                [7, 9].repeat(LEN as usize / 2),
                "{place}"
            );
        }
    }
}
