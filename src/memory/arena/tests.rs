//! Tests of page memory on a device that delays all work as long as possible.

use std::sync::Barrier;

use super::scratch::{SCRATCH_BYTES_MAX, SCRATCH_PIECE_LEN};
use super::*;
use crate::device::host::HostDevice;
use crate::device::{Command, CommandList};
use crate::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use crate::testing::late_device::LateDevice;
use remanent_format::Width;

const PLACE: Place = Place::Device(0);

/// Returns a device that delays all work as long as possible, and an arena of 100 bytes on the device.
fn late_arena() -> (Arc<EngineDevice>, Arena) {
    let device = EngineDevice::new(Arc::new(LateDevice::new(Arc::new(HostDevice::new()))));
    (device.clone(), Arena::new(device, Budget::default().with(PLACE, 100)))
}

/// Submits a list that uses the memory of a page, and returns its fence. The list is not complete on return.
fn use_page(device: &EngineDevice, page: &PageMemory) -> Fence {
    let fill = Command::Fill { target: page.span(), pattern: [1; 16], width: Width::W1 };
    let list = CommandList { commands: vec![fill], staging: Vec::new() };
    device.submit(Lane::Apply, list).unwrap().fence()
}

fn discard_all(arena: &Arena, pieces: Vec<PageMemory>) {
    pieces.into_iter().for_each(|piece| arena.discard(piece).unwrap());
}

/// Returns the number of allocated bytes, the number of retired bytes, the peak of their sum, and the number of pages.
fn usage(arena: &Arena) -> (u64, u64, u64, u64) {
    let usage = arena.usage(PLACE);
    assert_eq!(usage.used(), usage.allocated_bytes + usage.retired_bytes, "nothing stays claimed");
    (usage.allocated_bytes, usage.retired_bytes, usage.peak_bytes, usage.count)
}

/// Releases the memory of many pages together. Memory that the device fails to release must stay counted, and all other
/// memory must be free.
#[test]
fn only_memory_kept_by_device_stays_counted() {
    let faulty = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
    let device = EngineDevice::new(faulty.clone());
    let arena = Arena::new(device.clone(), Budget::default().with(PLACE, 100));
    let pages = [(PLACE, 10), (PLACE, 20), (PLACE, 5), (Place::Host, 7), (PLACE, 8)];
    let memory = arena.allocate_all(Purpose::Page, &pages).unwrap();
    assert_eq!(memory.iter().map(|page| (page.place(), page.byte_len())).collect::<Vec<_>>(), pages);
    let fence = use_page(&device, &memory[0]);
    arena.retire_all(memory, fence);
    assert_eq!(usage(&arena), (0, 43, 43, 0));
    faulty.arm(DeviceFault { call: Some(DeviceCall::Release), nth: 3, context_lost: false });
    assert!(arena.reap_all().is_err());
    assert_eq!((usage(&arena), arena.available(PLACE)), ((0, 5, 43, 0), 95));
    assert_eq!(arena.usage(Place::Host).used(), 0);
    let error = arena.allocate(Purpose::Page, PLACE, 96).unwrap_err();
    assert!(matches!(error, Error::OverBudget { available: 95, .. }), "{error}");
}

#[test]
fn budget_is_exact_and_reports_remainder() {
    let (_, arena) = late_arena();
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    let error = arena.allocate(Purpose::Page, PLACE, 41).unwrap_err();
    assert_eq!(
        error.to_string(),
        Error::OverBudget { place: PLACE, requested: 41, available: 40, budget: 100 }.to_string()
    );
    assert_eq!(usage(&arena), (60, 0, 60, 1));
    let rest = arena.allocate(Purpose::Page, PLACE, 40).unwrap();
    assert_eq!((arena.available(PLACE), usage(&arena)), (0, (100, 0, 100, 2)));
    // Another place has a separate budget, in this case none.
    let elsewhere = arena.allocate(Purpose::Page, Place::Host, 1000).unwrap();
    for page in [page, rest, elsewhere] {
        arena.discard(page).unwrap();
    }
    assert_eq!(usage(&arena), (0, 0, 100, 0));
    assert_eq!(arena.usages().keys().copied().collect::<Vec<_>>(), [PLACE, Place::Host]);
}

#[test]
fn empty_pages_cost_nothing_even_when_the_budget_is_used_up() {
    let (_, arena) = late_arena();
    let full = arena.allocate(Purpose::Page, PLACE, 100).unwrap();
    let empty = arena.allocate(Purpose::Page, PLACE, 0).unwrap();
    assert_eq!((empty.byte_len(), usage(&arena)), (0, (100, 0, 100, 2)));
    arena.discard(full).unwrap();
    arena.discard(empty).unwrap();
    assert_eq!(arena.usage(PLACE).count, 0);
}

#[test]
fn retired_memory_counts_until_its_fence_has_passed() {
    let (device, arena) = late_arena();
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    let fence = use_page(&device, &page);
    arena.retire(page, fence);
    // The test device panics if memory is released before a list that uses it has run.
    arena.reap().unwrap();
    assert_eq!((arena.available(PLACE), usage(&arena)), (40, (0, 60, 60, 0)));
    device.wait(fence).unwrap();
    arena.reap().unwrap();
    assert_eq!((arena.available(PLACE), usage(&arena)), (100, (0, 0, 60, 0)));
}

#[test]
fn allocation_waits_for_retired_memory_that_makes_it_fit() {
    let (device, arena) = late_arena();
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    let fence = use_page(&device, &page);
    arena.retire(page, fence);
    let next = arena.allocate(Purpose::Page, PLACE, 100).unwrap();
    assert_eq!((device.reached(Lane::Apply), usage(&arena)), (fence.value, (100, 0, 100, 1)));
    arena.discard(next).unwrap();
}

#[test]
fn an_allocation_that_can_never_fit_does_not_wait() {
    let (device, arena) = late_arena();
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    let fence = use_page(&device, &page);
    arena.retire(page, fence);
    let error = arena.allocate(Purpose::Page, PLACE, 101).unwrap_err();
    assert!(matches!(error, Error::OverBudget { requested: 101, available: 40, budget: 100, .. }), "{error}");
    assert_eq!(device.reached(Lane::Apply), 0);
}

#[test]
fn submitter_waits_for_lanes_not_callers() {
    let (device, arena) = late_arena();
    for (lane, is_awaited) in [(Lane::Apply, true), (Lane::Drain, true), (Lane::Callers, false)] {
        let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
        let fence = device.submit(lane, CommandList::default()).unwrap().fence();
        arena.retire(page, fence);
        let allocated = arena.allocate_for_lane(Purpose::Aside, PLACE, 50);
        assert_eq!(device.reached(lane) >= fence.value, is_awaited, "{lane:?}");
        match allocated {
            Ok(memory) if is_awaited => arena.discard(memory).unwrap(),
            other => {
                assert!(
                    matches!(other, Err(Error::OverBudget { requested: 50, available: 40, .. })),
                    "{other:?}"
                )
            }
        }
    }
    // A thread that commits may wait for all lanes.
    arena.discard(arena.allocate(Purpose::Page, PLACE, 50).unwrap()).unwrap();
}

#[test]
fn submitter_does_not_wait_for_thread_waiting_on_callers() {
    let (device, arena) = late_arena();
    let _waits_for_a_caller = arena.reaping[Lane::Callers as usize].lock();
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    let fence = use_page(&device, &page);
    arena.retire(page, fence);
    arena.discard(arena.allocate_for_lane(Purpose::Aside, PLACE, 50).unwrap()).unwrap();
}

/// Another allocation must fit whether or not a snapshot is in progress.
#[test]
fn scratch_wait_blocks_other_scratch() {
    let (_, arena) = late_arena();
    let areas = [30, 20].map(|len| arena.allocate_scratch(PLACE, len).unwrap());
    assert!(matches!(
        arena.allocate(Purpose::Page, PLACE, 101),
        Err(Error::OverBudget { requested: 101, .. })
    ));
    std::thread::scope(|scope| {
        let page = scope.spawn(|| arena.allocate(Purpose::Page, PLACE, 90).unwrap());
        while arena.scratch.lock().waiting == 0 {
            std::thread::yield_now();
        }
        let refused = arena.allocate_scratch(PLACE, 1);
        for area in areas {
            assert!(!page.is_finished());
            discard_all(&arena, area);
        }
        arena.discard(page.join().unwrap()).unwrap();
        assert!(matches!(refused, Err(Error::OverBudget { requested: 1, available: 50, .. })), "{refused:?}");
    });
    discard_all(&arena, arena.allocate_scratch(PLACE, 100).unwrap());
}

/// An allocation of scratch must not wait, because the requesting thread submits the work that it would wait for.
#[test]
fn scratch_is_immediate_or_none() {
    let (device, arena) = late_arena();
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    let fence = use_page(&device, &page);
    arena.retire(page, fence);
    let refused = arena.allocate_scratch(PLACE, 50).unwrap_err();
    assert!(matches!(refused, Error::OverBudget { requested: 50, available: 40, .. }), "{refused}");
    assert_eq!(device.reached(Lane::Apply), 0, "no thread waited for the list");
    device.wait(fence).unwrap();
    discard_all(&arena, arena.allocate_scratch(PLACE, 50).unwrap());
    assert_eq!(usage(&arena), (0, 0, 60, 0));
}

#[test]
fn long_scratch_is_limited_and_in_equal_pieces() {
    let arena = Arena::new(EngineDevice::new(Arc::new(HostDevice::new())), Budget::default());
    let lens = |len| {
        let pieces = arena.allocate_scratch(PLACE, len).unwrap();
        let lens: Vec<u64> = pieces.iter().map(PageMemory::byte_len).collect();
        discard_all(&arena, pieces);
        lens
    };
    assert_eq!(lens(0), Vec::<u64>::new());
    assert_eq!(lens(SCRATCH_PIECE_LEN), [SCRATCH_PIECE_LEN]);
    assert_eq!(lens(SCRATCH_PIECE_LEN + 1), [SCRATCH_PIECE_LEN; 2]);
    assert_eq!(lens(SCRATCH_BYTES_MAX).len() as u64, SCRATCH_BYTES_MAX / SCRATCH_PIECE_LEN);
    let some = arena.allocate_scratch(PLACE, 1).unwrap();
    for len in [SCRATCH_BYTES_MAX, SCRATCH_BYTES_MAX + 1, u64::MAX] {
        let refused = arena.allocate_scratch(PLACE, len).unwrap_err();
        let available = SCRATCH_BYTES_MAX - 1;
        let expected = Error::OverBudget { place: PLACE, requested: len, available, budget: u64::MAX };
        assert_eq!(refused.to_string(), expected.to_string());
    }
    // The limit applies to each place.
    discard_all(&arena, arena.allocate_scratch(Place::Host, SCRATCH_BYTES_MAX).unwrap());
    discard_all(&arena, some);
    assert_eq!(lens(SCRATCH_BYTES_MAX)[0], SCRATCH_PIECE_LEN);
}

#[test]
fn incomplete_scratch_is_returned() {
    let faulty = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
    let arena = Arena::new(EngineDevice::new(faulty.clone()), Budget::default());
    faulty.arm(DeviceFault { call: Some(DeviceCall::Allocate), nth: 3, context_lost: false });
    let refused = arena.allocate_scratch(PLACE, 3 * SCRATCH_PIECE_LEN).unwrap_err();
    assert!(matches!(refused, Error::Device { .. }), "{refused}");
    assert_eq!(usage(&arena), (0, 0, 2 * SCRATCH_PIECE_LEN, 0));
    assert!(arena.scratch.lock().bytes.is_empty(), "no scratch is counted");
}

#[test]
fn full_device_is_retried_after_reaping() {
    let device = EngineDevice::new(Arc::new(LateDevice::new(Arc::new(HostDevice::new()))));
    let arena = Arena::new(device.clone(), Budget::default());
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    let fence = use_page(&device, &page);
    arena.retire(page, fence);
    // The length exceeds any address space, so the second attempt fails too, and no bytes stay counted.
    let error = arena.allocate(Purpose::Page, PLACE, 1 << 60).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { place: PLACE, len } if len == 1 << 60), "{error}");
    assert_eq!(device.reached(Lane::Apply), fence.value);
    assert_eq!(usage(&arena), (0, 0, 60, 0));
}

#[test]
fn a_dropped_arena_leaves_no_retired_memory_on_the_device() {
    let (device, arena) = late_arena();
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    let (memory, fence) = (page.span().memory, use_page(&device, &page));
    arena.retire(page, fence);
    drop(arena);
    // The test device would panic on an early release.
    device.wait(fence).unwrap();
    let again = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| device.release(memory)));
    assert!(again.is_err(), "the arena had not released it");
}

#[test]
#[should_panic(expected = "bytes 10..+51 are not within a page of 60 bytes")]
fn page_part_must_be_within_page() {
    let (_, arena) = late_arena();
    let page = arena.allocate(Purpose::Page, PLACE, 60).unwrap();
    assert_eq!((page.part(10, 50).offset, page.part(10, 50).len), (10, 50));
    let _ = page.part(10, 51);
}

#[test]
fn dropped_memory_stays_in_budget() {
    let (_, arena) = late_arena();
    drop(arena.allocate(Purpose::Page, PLACE, 60).unwrap());
    assert_eq!(usage(&arena), (60, 0, 60, 1));
}

#[test]
fn several_pages_are_reserved_together_or_not_at_all() {
    let (_, arena) = late_arena();
    let kept = arena.allocate(Purpose::Page, PLACE, 30).unwrap();
    let elsewhere = Place::Host;
    let error = arena.allocate_all(Purpose::Page, &[(elsewhere, 9), (PLACE, 40), (PLACE, 31)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        Error::OverBudget { place: PLACE, requested: 71, available: 70, budget: 100 }.to_string()
    );
    assert_eq!((usage(&arena), arena.usage(elsewhere).used()), ((30, 0, 30, 1), 0));

    let reserved = arena.reserve(Purpose::Page, &[(PLACE, 40), (PLACE, 30), (elsewhere, 9)]).unwrap();
    assert_eq!((arena.available(PLACE), arena.usage(PLACE).claimed_bytes), (0, 70));
    assert!(arena.allocate(Purpose::Page, PLACE, 1).is_err(), "bytes that are put by are taken");
    let page = reserved.allocate(PLACE, 40).unwrap();
    assert_eq!((arena.available(PLACE), arena.usage(PLACE).claimed_bytes), (0, 30));
    drop(reserved);
    assert_eq!((arena.available(PLACE), usage(&arena)), (30, (70, 0, 70, 2)));
    for page in [kept, page] {
        arena.discard(page).unwrap();
    }
    assert_eq!(usage(&arena), (0, 0, 70, 0));
}

#[test]
fn device_out_of_memory_midway_frees_all_pages_of_request() {
    let device = EngineDevice::new(Arc::new(HostDevice::new()));
    let arena = Arena::new(device, Budget::default());
    let error = arena.allocate_all(Purpose::Page, &[(PLACE, 60), (PLACE, 1 << 60)]).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { len, .. } if len == 1 << 60), "{error}");
    assert_eq!(usage(&arena), (0, 0, 60, 0));
}

#[test]
#[should_panic(expected = "31 bytes of 30 that are left of a reservation")]
fn reservation_never_exceeds_reserved_amount() {
    let (_, arena) = late_arena();
    let reserved = arena.reserve(Purpose::Page, &[(PLACE, 30)]).unwrap();
    let _fails = reserved.allocate(PLACE, 31);
}

#[test]
fn usage_is_reported_by_purpose_and_peaks_reset() {
    let (device, arena) = late_arena();
    let page = arena.allocate(Purpose::Page, PLACE, 50).unwrap();
    let aside = arena.allocate(Purpose::Aside, PLACE, 20).unwrap();
    let by_purpose = || Purpose::ALL.map(|purpose| arena.usage(PLACE).bytes_for(purpose));
    assert_eq!(by_purpose(), [50, 0, 20, 0, 0, 0, 0, 0]);
    let fence = use_page(&device, &aside);
    arena.retire(aside, fence);
    assert_eq!((by_purpose(), usage(&arena)), ([50, 0, 0, 0, 0, 0, 0, 0], (50, 20, 70, 1)));
    arena.reset_peaks();
    assert_eq!(usage(&arena).2, 70, "retired memory is still there");
    arena.reap_all().unwrap();
    arena.reset_peaks();
    assert_eq!(usage(&arena), (50, 0, 50, 1));
    arena.discard(page).unwrap();
}

/// The scheduler determines how many of the threads fail. After all threads have ended, the whole budget must be
/// available to the next allocation, which waits for the lists of the threads.
#[test]
fn threads_never_exceed_the_budget_together() {
    let device = EngineDevice::new(Arc::new(HostDevice::new()));
    let arena = Arena::new(device.clone(), Budget::default().with(PLACE, 1000));
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (arena, device) = (&arena, &device);
            scope.spawn(move || {
                for round in 0..2000 {
                    match arena.allocate(Purpose::Page, PLACE, 200 + (thread + round) % 200) {
                        Ok(page) if round % 2 == 0 => arena.discard(page).unwrap(),
                        Ok(page) => {
                            let fence = use_page(device, &page);
                            arena.retire(page, fence);
                        }
                        Err(error) => {
                            assert!(matches!(error, Error::OverBudget { budget: 1000, .. }), "{error}");
                        }
                    }
                }
            });
        }
    });
    let whole = arena.allocate(Purpose::Page, PLACE, 1000).unwrap();
    assert_eq!(usage(&arena), (1000, 0, 1000, 1));
    arena.discard(whole).unwrap();
}

/// In each round, one of the threads returns a page as long as the budget, and all threads request a share of the
/// budget during the release. Bytes that another thread is releasing must not count as used.
#[test]
fn fitting_pages_are_never_refused_during_concurrent_release() {
    // The page is so long that its release takes time, because the system reclaims its memory immediately.
    const BUDGET: u64 = 64 << 20;
    let device = EngineDevice::new(Arc::new(HostDevice::new()));
    let arena = Arena::new(device.clone(), Budget::default().with(PLACE, BUDGET));
    let (barrier, refused) = (Barrier::new(4), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..200 {
                    if barrier.wait().is_leader() {
                        let whole = arena.allocate(Purpose::Page, PLACE, BUDGET).unwrap();
                        let target = whole.part(0, BUDGET / 64);
                        let fill = Command::Fill { target, pattern: [1; 16], width: Width::W1 };
                        let list = CommandList { commands: vec![fill], staging: Vec::new() };
                        arena.retire(whole, device.submit(Lane::Apply, list).unwrap().fence());
                    }
                    barrier.wait();
                    let allocated = arena.allocate(Purpose::Page, PLACE, BUDGET / 4);
                    barrier.wait();
                    match allocated {
                        Ok(page) => arena.discard(page).unwrap(),
                        // The thread does not panic, because the others would wait at the barrier forever.
                        Err(error) => refused.lock().push(format!("round {round}: {error}")),
                    }
                }
            });
        }
    });
    assert_eq!(refused.into_inner(), [""; 0]);
}

#[test]
fn unused_reservation_is_freed_on_drop() {
    let budget = Budget::default().with(Place::Host, 100);
    let arena = Arena::new(EngineDevice::new(Arc::new(HostDevice::new())), budget);
    let reserved = arena.reserve(Purpose::Page, &[(Place::Host, 60), (Place::Host, 30)]).unwrap();
    let page = reserved.allocate(Place::Host, 60).unwrap();
    assert_eq!(arena.available(Place::Host), 10);
    drop(reserved);
    assert_eq!(arena.available(Place::Host), 40);
    arena.discard(page).unwrap();
}
