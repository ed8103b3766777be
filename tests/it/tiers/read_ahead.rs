//! Read-ahead. The pages of each step are in the requested place when the step begins, however far the store
//! reads ahead.

use remanent::options::MemoryOptions;
use remanent::testing::sim_disk::SimDisk;
use remanent::tiers::Tiers;
use remanent::{Ack, Error, PageId, Place, Store};

use super::{DEVICE, LEN, ROOM, bytes, open, peak, place, put, two_tiers};
use crate::files::small;

/// Creates a store whose pages are all on disk.
fn on_disk(pages: u64) -> (Store, Vec<PageId>) {
    let store = open(&SimDisk::new(), two_tiers().ack(Ack::Applied));
    let pages: Vec<PageId> = (0..pages).map(|number| put(&store, number, 0, Place::Disk)).collect();
    (store, pages)
}

/// Reads several times as many pages as fit, in steps of one, two and three pages. The caller reads some of
/// the pages, and does nothing else in the meantime.
#[test]
fn read_ahead_steps_are_in_order_and_within_budget() {
    let (store, pages) = on_disk(6 * ROOM);
    let numbers: Vec<usize> = (0..pages.len()).collect();
    let mut steps = Vec::new();
    let mut rest = &numbers[..];
    while !rest.is_empty() {
        let (step, after) = rest.split_at((1 + steps.len() % 3).min(rest.len()));
        steps.push(step.to_vec());
        rest = after;
    }
    let mut ahead = store.read_ahead(DEVICE).unwrap();
    let (mut coming, mut served, mut most) = (steps.iter(), Vec::new(), 0);
    loop {
        while ahead.wants_more() {
            let Some(step) = coming.next() else { break };
            ahead.push(&step.iter().map(|number| pages[*number]).collect::<Vec<_>>()).unwrap();
        }
        most = most.max(ahead.steps_in_flight());
        let Some(step) = ahead.next_step().unwrap() else { break };
        assert!(ahead.steps_in_flight() > 0 || coming.len() == 0, "none comes while this one is used");
        for page in step {
            let number = pages.iter().position(|other| *other == page).unwrap();
            assert_eq!(place(&store, page), DEVICE, "page {number}");
            assert!(store.read_to_vec(page).unwrap() == bytes(number as u64, 0), "page {number}");
            served.push(number);
        }
    }
    assert_eq!(served, numbers);
    // Steps are started up to a quarter of the budget, four pages. The last one may exceed it by its three pages.
    assert!((1..=7).contains(&most), "{most} steps at once");
    assert!(peak(&store, DEVICE) <= ROOM * LEN);
    assert!(ahead.next_step().unwrap().is_none() && ahead.wants_more());
}

/// The pages of a step remain in the place while the next steps are prefetched, although the caller has not yet
/// read these pages and has read all others.
#[test]
fn unread_pages_of_current_step_stay_during_prefetch() {
    let (store, pages) = on_disk(6 * ROOM);
    let mut ahead = store.read_ahead(DEVICE).unwrap();
    let mut steps = pages.chunks(2);
    loop {
        while ahead.wants_more() {
            let Some(step) = steps.next() else { break };
            ahead.push(step).unwrap();
        }
        let Some(step) = ahead.next_step().unwrap() else { break };
        while ahead.wants_more() {
            let Some(step) = steps.next() else { break };
            ahead.push(step).unwrap();
        }
        // The thread handles this empty prefetch after all others.
        store.prefetch(&[], DEVICE).unwrap().wait().unwrap();
        for page in step {
            let number = pages.iter().position(|other| *other == page).unwrap();
            assert_eq!(place(&store, page), DEVICE, "page {number}");
            assert!(store.read_to_vec(page).unwrap() == bytes(number as u64, 0), "page {number}");
        }
    }
    assert!(peak(&store, DEVICE) <= ROOM * LEN);
}

/// A step of up to half of the budget is prefetched while the previous step is in use.
#[test]
fn next_step_is_prefetched_during_use() {
    for step in [1, 4, 5, 8] {
        let (store, pages) = on_disk(4 * ROOM);
        let mut ahead = store.read_ahead(DEVICE).unwrap();
        let mut steps = pages.chunks(step);
        loop {
            while ahead.wants_more() {
                let Some(step) = steps.next() else { break };
                ahead.push(step).unwrap();
            }
            let Some(pages) = ahead.next_step().unwrap() else { break };
            assert!(ahead.steps_in_flight() > 0 || steps.len() == 0, "steps of {step} of {ROOM} pages");
            assert_eq!(place(&store, pages[0]), DEVICE);
        }
        assert!(peak(&store, DEVICE) <= ROOM * LEN);
    }
}

/// A read-ahead scan does not evict pages that are used repeatedly, because a prefetch does not count as an
/// access.
#[test]
fn read_ahead_scan_keeps_reused_pages() {
    let tiers = Tiers::new([DEVICE, Place::Disk]);
    let memory = MemoryOptions::new().budget(DEVICE, 8 * ROOM * LEN);
    let store = open(&SimDisk::new(), small().memory(memory).tiers(tiers).ack(Ack::Applied));
    let mut pages = (0..).map(|number| put(&store, number, 0, Place::Disk));
    let hot: Vec<PageId> = pages.by_ref().take(4 * ROOM as usize).collect();
    let cold: Vec<PageId> = pages.take(40 * ROOM as usize).collect();
    for _ in 0..4 {
        hot.iter().for_each(|page| _ = store.ensure(&[*page], DEVICE).unwrap());
    }
    let mut ahead = store.read_ahead(DEVICE).unwrap();
    let mut steps = cold.chunks(4);
    loop {
        while ahead.wants_more() {
            let Some(step) = steps.next() else { break };
            ahead.push(step).unwrap();
        }
        if ahead.next_step().unwrap().is_none() {
            break;
        }
    }
    let left = hot.iter().filter(|page| place(&store, **page) == DEVICE).count();
    assert!(left > hot.len() / 2, "{left} of {} pages that are used again", hot.len());
}

/// Steps may be pushed although `wants_more` returns false. A step that does not fit fails, and the next one
/// is prefetched.
#[test]
fn read_ahead_refuses_step_without_room_and_continues() {
    let (store, pages) = on_disk(2 * ROOM);
    let mut ahead = store.read_ahead(DEVICE).unwrap();
    ahead.push(&pages[..4]).unwrap();
    ahead.push(&pages[..ROOM as usize + 1]).unwrap();
    assert!(!ahead.wants_more(), "more than a quarter of the budget");
    ahead.push(&pages[20..22]).unwrap();
    assert_eq!(ahead.next_step().unwrap().unwrap(), pages[..4]);
    let refused = ahead.next_step().unwrap_err();
    assert!(matches!(refused, Error::OverBudget { place: DEVICE, .. }), "{refused}");
    assert_eq!(ahead.next_step().unwrap().unwrap(), pages[20..22]);
    assert_eq!(place(&store, pages[21]), DEVICE);
}

#[test]
fn concurrently_deleted_pages_are_omitted() {
    let (store, pages) = on_disk(4);
    let mut ahead = store.read_ahead(DEVICE).unwrap();
    ahead.push(&pages).unwrap();
    ahead.push(&pages[1..2]).unwrap();
    let mut batch = store.batch();
    batch.delete(pages[1]);
    store.commit(batch).unwrap();
    assert_eq!(ahead.next_step().unwrap().unwrap(), [pages[0], pages[2], pages[3]]);
    assert_eq!(ahead.next_step().unwrap().unwrap(), []);
    // A page that is deleted before it is pushed is also omitted.
    ahead.push(&pages[1..3]).unwrap();
    assert_eq!(ahead.next_step().unwrap().unwrap(), [pages[2]]);
}

/// Dropping the read-ahead cancels all prefetches that have not begun, and no more batches are logged for
/// them.
#[test]
fn abandoned_prefetch_moves_no_pages() {
    // Without tiers, only the thread that prefetches moves pages.
    let store = open(&SimDisk::new(), small());
    let pages: Vec<PageId> = (0..ROOM).map(|number| put(&store, number, 0, Place::Disk)).collect();
    for _ in 0..20 {
        let mut ahead = store.read_ahead(DEVICE).unwrap();
        for page in &pages {
            ahead.push(std::slice::from_ref(page)).unwrap();
        }
        drop(ahead);
        let logged = store.lsn();
        // The thread handles this empty prefetch after all others.
        store.prefetch(&[], DEVICE).unwrap().wait().unwrap();
        assert_eq!(store.lsn(), logged, "a page still came");
        store.ensure(&pages, Place::Disk).unwrap();
    }
    store.close().unwrap();
}

/// Reads ahead to a place without a budget, and to the disk.
#[test]
fn read_ahead_works_to_every_place() {
    let memory = MemoryOptions::new().budget(Place::Disk, 1 << 20).budget(DEVICE, ROOM * LEN);
    let options = two_tiers().tiers(Tiers::new([DEVICE, Place::Disk])).memory(memory);
    let store = open(&SimDisk::new(), options);
    let pages: Vec<PageId> = (0..ROOM / 2).map(|number| put(&store, number, 3, DEVICE)).collect();
    for to in [Place::Host, Place::Disk, DEVICE, Place::Pinned] {
        let mut ahead = store.read_ahead(to).unwrap();
        for page in &pages {
            ahead.push(&[*page]).unwrap();
        }
        while let Some(step) = ahead.next_step().unwrap() {
            assert_eq!(place(&store, step[0]), to);
        }
    }
    for (number, page) in (0..).zip(&pages) {
        assert!(store.read_to_vec(*page).unwrap() == bytes(number, 3));
    }
}
