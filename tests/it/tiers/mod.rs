//! Tiers: pages that are not used go down, so that more pages are held than a place has room for.

mod growing;
mod less_memory;
mod read_ahead;
mod sources;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::testing::faulty_device::FaultyDevice;
use remanent::testing::sim_disk::{CrashImage, CrashPlan, SimDisk, Tears};
use remanent::{Ack, Budget, Error, EvictionPolicy, Key, Options, PageId, Place, Store, TierStats, Tiers};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};

use crate::faults::disk_full::{is_held, until};
use crate::files::small;
use crate::gpu::{self, on_each_device};
use crate::interrupted_reads::InterruptedDisk;

const LEN: u64 = 4096;
/// Pages that the first place has room for.
const ROOM: u64 = 16;
const DEVICE: Place = Place::Device(0);

/// A place with room for [`ROOM`] pages above the disk.
fn two_tiers() -> Options {
    small().budget(Budget::default().with(DEVICE, ROOM * LEN)).tiers(Tiers::new([DEVICE, Place::Disk]).lru())
}

fn open(disk: &SimDisk, options: Options) -> Store {
    Store::open_on(Arc::new(disk.clone()), gpu::under_test(), options).unwrap()
}

fn key(number: u64) -> Key {
    Key::new(format!("page/{number}")).unwrap()
}

/// The bytes of a page, other ones in each version.
fn bytes(number: u64, version: u64) -> Vec<u8> {
    (0..LEN).map(|at| (at ^ (number * 31 + version * 101)) as u8).collect()
}

fn put(store: &Store, number: u64, version: u64, place: Place) -> PageId {
    store.put(&key(number), bytes(number, version), place).unwrap().0
}

fn place(store: &Store, page: PageId) -> Place {
    store.page(page).unwrap().place
}

fn places(store: &Store, pages: &[PageId]) -> Vec<Place> {
    pages.iter().map(|page| place(store, *page)).collect()
}

fn tier(store: &Store, place: Place) -> TierStats {
    *store.stats().tiers.iter().find(|tier| tier.place == place).expect("something happened there")
}

fn peak(store: &Store, place: Place) -> u64 {
    store.stats().places.iter().find(|(of, _)| *of == place).map_or(0, |(_, usage)| usage.peak_bytes)
}

/// Looks at the images that kills and power cuts leave of a life.
fn each_crash(disk: &SimDisk, check: &mut impl FnMut(CrashImage)) {
    let kills = CrashPlan { tears: Tears::None, ..CrashPlan::default() };
    disk.kill_images(&kills, &mut *check);
    let cuts = CrashPlan { tears: Tears::None, images_max: 6, ..CrashPlan::default() };
    disk.power_images(&cuts, check);
}

/// Opens what a crash left: each page has the bytes that the log says, and is where it says, or lower.
fn open_after(image: &CrashImage, options: Options) -> Store {
    let logged = rebuild(&image.disk, &RebuildOptions::default());
    let store = open(&image.disk, options);
    if store.recovered().created {
        return store;
    }
    let logged = logged.unwrap_or_else(|damage| panic!("{image}: {damage}"));
    let rank = |place: Place| [DEVICE, Place::Host, Place::Disk].iter().position(|of| *of == place);
    for info in store.pages().unwrap() {
        let (was, is) = (logged.table.get(info.page).unwrap().place, info.place);
        assert!(rank(is).unwrap() >= rank(was).unwrap(), "{image}: page {} in {is}, not {was}", info.page);
        assert!(
            store.read_to_vec(info.page).unwrap() == logged.contents[&info.page],
            "{image}: {}",
            info.page
        );
    }
    assert_eq!(store.page_count().unwrap(), logged.table.pages().count() as u64, "{image}");
    store
}

/// A store that was opened after a crash goes on from there.
fn goes_on(store: &Store, image: &CrashImage) {
    (50..60).for_each(|number| _ = put(store, number, 0, DEVICE));
    assert!(store.audit().unwrap().changed.is_empty(), "{image}");
}

/// Asserts that every page that was acknowledged before a crash has its newest bytes, where `number_of` tells
/// the page that a round wrote. Returns the places of these pages.
fn places_after(store: &Store, image: &CrashImage, number_of: impl Fn(u64) -> u64) -> Vec<Place> {
    let acked = image.acks.len() as u64;
    let expected: BTreeMap<u64, u64> = (0..acked).map(|round| (number_of(round), round)).collect();
    let check = |(number, version)| {
        let info = store.page_by_key(&key(number)).unwrap_or_else(|error| panic!("{image}: {error}"));
        let found = store.read_to_vec(info.page).unwrap();
        // The batch after the last one acknowledged may be there.
        let is_next = number_of(acked) == number && found == bytes(number, acked);
        assert!(is_next || found == bytes(number, version), "{image}: page {number}");
        info.place
    };
    expected.into_iter().map(check).collect()
}

#[test]
fn more_pages_than_room_are_held_and_found_where_they_were() {
    on_each_device(|| {
        let disk = SimDisk::new();
        let store = open(&disk, two_tiers());
        let pages: Vec<PageId> = (0..5 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        // Pages that left are changed where they are.
        for number in [0, 1, ROOM] {
            assert_eq!(place(&store, pages[number as usize]), Place::Disk);
            put(&store, number, 1, DEVICE);
        }
        let check = |store: &Store| {
            for (number, page) in (0..).zip(&pages) {
                let version = u64::from([0, 1, ROOM].contains(&number));
                assert_eq!(store.read_to_vec(*page).unwrap(), bytes(number, version), "page {number}");
            }
        };
        check(&store);
        assert!(peak(&store, DEVICE) <= ROOM * LEN);
        let stats = store.stats();
        let [moves] = stats.moves[..] else { panic!("{:?}", stats.moves) };
        assert_eq!((moves.from, moves.to, moves.bytes), (DEVICE, Place::Disk, moves.pages * LEN));
        assert_eq!(tier(&store, DEVICE).evictions, moves.pages);
        assert!(moves.pages >= 4 * ROOM);
        let before = places(&store, &pages);
        store.close().unwrap();
        let store = open(&disk, two_tiers());
        assert_eq!(places(&store, &pages), before, "a restart finds the pages where they were");
        check(&store);
        store.audit().unwrap();
    });
}

#[test]
fn each_place_overflows_into_the_next_one() {
    on_each_device(|| {
        let budget = Budget::default()
            .with(DEVICE, ROOM * LEN)
            .with(Place::Pinned, ROOM * LEN)
            .with(Place::Host, 4 * LEN);
        let tiers = Tiers::new([DEVICE, Place::Pinned, Place::Host, Place::Disk]).lru();
        let store = open(&SimDisk::new(), small().budget(budget).tiers(tiers));
        let pages: Vec<PageId> = (0..4 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        // The longer ago a page was used, the lower it is.
        let found = places(&store, &pages);
        let rank = |place: &Place| {
            [Place::Disk, Place::Host, Place::Pinned, DEVICE].iter().position(|of| of == place)
        };
        assert!(found.is_sorted_by_key(rank), "{found:?}");
        for place in [DEVICE, Place::Pinned, Place::Host, Place::Disk] {
            assert!(found.contains(&place), "{found:?}");
        }
        for (place, room) in [(DEVICE, ROOM), (Place::Pinned, ROOM), (Place::Host, 4)] {
            assert!(peak(&store, place) <= room * LEN, "{place}");
        }
        for (number, page) in (0..).zip(&pages) {
            assert_eq!(store.read_to_vec(*page).unwrap(), bytes(number, 0));
        }
        // A page that is longer than what is below passes it by.
        let mut batch = store.batch();
        batch.create_from(vec![7; 8 * LEN as usize], DEVICE);
        let long = store.commit(batch).unwrap().pages[0];
        store.demote(&[long]).unwrap();
        assert_eq!(place(&store, long), Place::Pinned);
        (0..4 * ROOM).for_each(|number| _ = put(&store, 100 + number, 0, DEVICE));
        assert_eq!(place(&store, long), Place::Disk);
        assert_eq!(store.read_to_vec(long).unwrap(), vec![7; 8 * LEN as usize]);
    });
}

#[test]
fn pages_that_are_used_stay() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let used: Vec<PageId> = (0..4).map(|number| put(&store, number, 0, DEVICE)).collect();
        for number in 4..200 {
            put(&store, number, 0, DEVICE);
            // Each by another way to use it.
            store.read_to_vec(used[0]).unwrap();
            store.lease(used[1]).unwrap().end().unwrap();
            put(&store, 2, number, DEVICE);
            store.ensure(&used[3..4], DEVICE).unwrap();
        }
        assert_eq!(places(&store, &used), [DEVICE; 4]);
        let found = tier(&store, DEVICE);
        assert_eq!((found.hits, found.misses), (196, 0));
    });
}

#[test]
fn leased_and_pinned_pages_stay_and_where_no_page_can_leave_there_is_no_room() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let pages: Vec<PageId> = (0..8).map(|number| put(&store, number, 0, DEVICE)).collect();
        let leases: Vec<_> = pages[..4].iter().map(|page| store.lease(*page).unwrap()).collect();
        let pins: Vec<_> = pages[4..].iter().map(|page| store.pin(*page).unwrap()).collect();
        for number in 8..8 + 3 * ROOM {
            put(&store, number, 0, DEVICE);
        }
        assert_eq!(places(&store, &pages), [DEVICE; 8]);
        // Nothing else is left there.
        let mut batch = store.batch();
        batch.create((ROOM - 7) * LEN, DEVICE);
        let refused = store.commit(batch).unwrap_err();
        assert!(matches!(refused, Error::OverBudget { place: DEVICE, .. }), "{refused}");
        assert_eq!(places(&store, &pages), [DEVICE; 8]);
        assert!(tier(&store, DEVICE).waits > 0);
        drop((leases, pins));
        let mut batch = store.batch();
        batch.create((ROOM - 7) * LEN, DEVICE);
        store.commit(batch).unwrap();
        // Longer than the whole place.
        let mut batch = store.batch();
        batch.create((ROOM + 1) * LEN, DEVICE);
        assert!(matches!(store.commit(batch).unwrap_err(), Error::OverBudget { .. }));
    });
}

#[test]
fn what_is_asked_for_comes_together_or_not_at_all() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let pages: Vec<PageId> = (0..4 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        // Some are there and some are not; none leaves for another one.
        for from in (0..3 * ROOM as usize).step_by(5) {
            // A part of the place is kept free.
            let asked = &pages[from..from + ROOM as usize - 2];
            store.ensure(asked, DEVICE).unwrap();
            assert_eq!(places(&store, asked), vec![DEVICE; asked.len()]);
        }
        assert!(peak(&store, DEVICE) <= ROOM * LEN);
        let before = places(&store, &pages);
        let refused = store.ensure(&pages[..ROOM as usize + 1], DEVICE).unwrap_err();
        assert!(matches!(refused, Error::OverBudget { place: DEVICE, .. }), "{refused}");
        let came = |now: &[Place]| {
            before.iter().zip(now).filter(|(before, now)| before != now && **now == DEVICE).count()
        };
        assert_eq!(came(&places(&store, &pages)), 0);
        for (number, page) in (0..).zip(&pages) {
            assert_eq!(store.read_to_vec(*page).unwrap(), bytes(number, 0));
        }
    });
}

/// Threads that create, change, read and bring back pages at once: none is refused, and the place never holds
/// more than it may.
#[test]
fn threads_share_a_place_that_is_full() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..40 {
                        let number = 1000 * thread + round % 13;
                        let page = put(store, number, round, DEVICE);
                        let other = store.page_by_key(&key(1000 * thread + round % 5)).unwrap().page;
                        store.ensure(&[other], DEVICE).unwrap();
                        assert_eq!(store.read_to_vec(page).unwrap(), bytes(number, round));
                    }
                });
            }
        });
        assert!(peak(&store, DEVICE) <= ROOM * LEN);
        for thread in 0..4 {
            for number in 0..13 {
                let page = store.page_by_key(&key(1000 * thread + number)).unwrap().page;
                let version = (0..40).rev().find(|round| round % 13 == number).unwrap();
                assert_eq!(store.read_to_vec(page).unwrap(), bytes(1000 * thread + number, version));
            }
        }
        assert!(store.audit().unwrap().changed.is_empty());
    });
}

#[test]
fn pages_come_ahead_of_the_caller() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers());
        let pages: Vec<PageId> = (0..4 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        let mut batch = store.batch();
        batch.delete(pages[1]);
        store.commit(batch).unwrap();
        // One that is gone is passed over.
        let coming = store.prefetch(&pages[..4], DEVICE).unwrap();
        coming.wait().unwrap();
        assert!(coming.is_done().unwrap());
        assert!(coming.wait_timeout(Duration::ZERO).unwrap());
        for page in [0, 2, 3] {
            assert_eq!(place(&store, pages[page]), DEVICE);
        }
        // More than there is room for: the failure is told once.
        let mut batch = store.batch();
        let mut long = Vec::new();
        for _ in 0..2 {
            long.push(batch.create((ROOM / 2 + 1) * LEN, Place::Disk).page());
        }
        let long = store.commit(batch).unwrap().pages;
        let coming = store.prefetch(&long, DEVICE).unwrap();
        assert!(matches!(coming.wait().unwrap_err(), Error::OverBudget { .. }));
        coming.wait().unwrap();
        // Given up before it begins or while it is under way: nothing hangs, and what came is whole.
        for _ in 0..20 {
            let coming = store.prefetch(&pages[8..16], DEVICE).unwrap();
            coming.cancel().unwrap();
            assert!(coming.is_done().unwrap());
            coming.wait().unwrap();
            store.ensure(&pages[8..16], Place::Disk).unwrap();
        }
        let coming = store.prefetch(&pages[2..60], DEVICE).unwrap();
        store.close().unwrap();
        assert!(matches!(coming.wait(), Ok(()) | Err(Error::Closed | Error::OverBudget { .. })));
    });
}

#[test]
fn a_callers_own_policy_decides() {
    /// The page with the highest id leaves first.
    #[derive(Default)]
    struct Highest(std::collections::BTreeSet<PageId>);

    impl EvictionPolicy for Highest {
        fn arrived(&mut self, page: PageId, len: u64) {
            assert_eq!(len, LEN);
            assert!(self.0.insert(page), "it is new here");
        }

        fn used(&mut self, _page: PageId) {}

        fn left(&mut self, page: PageId) {
            self.0.remove(&page);
        }

        fn victim(&mut self) -> Option<PageId> {
            self.0.pop_last()
        }
    }

    let made = Arc::new(AtomicU64::new(0));
    let counts = made.clone();
    let tiers = Tiers::new([DEVICE, Place::Disk]).policy(move |place| {
        assert_eq!(place, DEVICE);
        counts.fetch_add(1, Ordering::Relaxed);
        Box::<Highest>::default()
    });
    let options = two_tiers().tiers(tiers).ack(Ack::Applied);
    let store = open(&SimDisk::new(), options);
    let pages: Vec<PageId> = (0..3 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
    assert_eq!(made.load(Ordering::Relaxed), 1);
    let found = places(&store, &pages);
    assert_eq!(found[..8], [DEVICE; 8], "the first ones never leave");
    assert!(
        found[8..].contains(&Place::Disk) && found.iter().filter(|place| **place == DEVICE).count() <= 16
    );
}

/// What brings a page is no use of it: else each page that comes up would look as if it came again. A second
/// call that asks for it is.
#[test]
fn a_page_that_comes_is_used_when_it_is_asked_for_again() {
    /// The oldest page leaves first; all that it hears is kept.
    #[derive(Default)]
    struct Heard(std::collections::VecDeque<PageId>, Arc<Mutex<Vec<(&'static str, PageId)>>>);

    impl EvictionPolicy for Heard {
        fn arrived(&mut self, page: PageId, _len: u64) {
            self.0.push_back(page);
            self.1.lock().unwrap().push(("arrived", page));
        }

        fn used(&mut self, page: PageId) {
            self.1.lock().unwrap().push(("used", page));
        }

        fn left(&mut self, page: PageId) {
            self.0.retain(|other| *other != page);
        }

        fn victim(&mut self) -> Option<PageId> {
            self.0.pop_front()
        }
    }

    let all = Arc::<Mutex<Vec<_>>>::default();
    let heard = all.clone();
    let tiers = Tiers::new([DEVICE, Place::Disk])
        .policy(move |_| Box::new(Heard(std::collections::VecDeque::new(), heard.clone())));
    let store = open(&SimDisk::new(), two_tiers().tiers(tiers).ack(Ack::Applied));
    let coming = put(&store, 999, 0, Place::Disk);
    // Others come until the policy is told.
    let fill = |from: u64| (from..from + 3 * ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
    let of_page = || {
        let heard = all.lock().unwrap();
        heard.iter().filter(|(_, page)| *page == coming).map(|(what, _)| *what).collect::<Vec<_>>()
    };
    store.ensure(&[coming], DEVICE).unwrap();
    fill(0);
    assert_eq!(of_page(), ["arrived"]);
    store.ensure(&[coming], DEVICE).unwrap();
    store.ensure(&[coming], DEVICE).unwrap();
    fill(100);
    assert_eq!(of_page(), ["arrived", "arrived", "used"]);
}

#[test]
fn orders_that_cannot_be_kept_are_refused() {
    let budget = || Budget::default().with(DEVICE, 1 << 20).with(Place::Host, 1 << 20);
    for (tiers, reason) in [
        (Tiers::new([DEVICE]), "two places"),
        (Tiers::new([DEVICE, Place::Host, DEVICE]), "twice"),
        (Tiers::new([Place::Disk, Place::Host]), "last of all"),
        (Tiers::new([DEVICE, Place::Pinned, Place::Disk]), "no limit"),
        (Tiers::new([DEVICE, Place::Disk]).free_part(1), "kept free"),
        (Tiers::new([DEVICE, Place::Disk]).free_part(0), "kept free"),
    ] {
        let refused = Store::temporary(Options::default().budget(budget()).tiers(tiers)).unwrap_err();
        let Error::InvalidOption { option: "tiers", .. } = refused else { panic!("{refused}") };
        assert!(refused.to_string().contains(reason), "{refused}");
    }
    let store = Store::temporary(Options::default()).unwrap();
    assert!(matches!(store.demote(&[]), Err(Error::InvalidOption { option: "tiers", .. })));
    let tiers = Tiers::new([DEVICE, Place::Host]);
    assert_eq!(tiers.places(), [DEVICE, Place::Host]);
    Store::temporary(Options::default().budget(budget()).tiers(tiers)).unwrap();
}

/// A restore brings pages back to where they were, and the policies know it.
#[test]
fn a_restore_finds_its_room() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers().log_kept(1 << 30));
        let mut pages = Vec::new();
        for number in 0..ROOM - 2 {
            pages.push(put(&store, number, 0, DEVICE));
        }
        let then = store.lsn();
        (100..100 + 2 * ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
        assert!(places(&store, &pages).contains(&Place::Disk));
        store.restore(&remanent::StatePoint::Lsn(then)).unwrap();
        for (number, page) in (0..).zip(&pages) {
            assert_eq!(store.read_to_vec(*page).unwrap(), bytes(number, 0));
        }
        (200..200 + 2 * ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
        assert!(peak(&store, DEVICE) <= ROOM * LEN);
        assert!(store.audit().unwrap().changed.is_empty());
    });
}

/// After each crash of a life in which pages go down and come up all the time, every page that was
/// acknowledged is there, with its newest bytes, where it was logged to be, or lower.
#[test]
fn a_crash_finds_every_page_where_it_was_or_lower() {
    let disk = SimDisk::new();
    let options = || {
        let budget = Budget::default().with(DEVICE, 6 * LEN).with(Place::Host, 3 * LEN);
        small().budget(budget).tiers(Tiers::new([DEVICE, Place::Host, Place::Disk])).ack(Ack::Durable)
    };
    let store = open(&disk, options());
    let rounds = 40;
    let number_of = |round: u64| round * 7 % 17;
    for round in 0..rounds {
        let page = put(&store, number_of(round), round, DEVICE);
        disk.note_ack(round);
        if round % 3 == 0 {
            store.ensure(&[page], DEVICE).unwrap();
        }
        if round % 16 == 9 {
            store.snapshot().unwrap();
        }
    }
    drop(store);
    let (mut images, mut below) = (0, 0);
    let mut check = |image: CrashImage| {
        let store = open_after(&image, options());
        for place in places_after(&store, &image, number_of) {
            below += u64::from(place != DEVICE);
        }
        images += 1;
        if images % 16 == 0 {
            goes_on(&store, &image);
        }
    };
    each_crash(&disk, &mut check);
    assert!(images > 500 && below > images, "{images} images, {below} pages below");
}

/// A lease or a pin needs an address, so the page comes to memory, and stays there as long as it lasts,
/// however many others come.
#[test]
fn leases_and_pins_bring_pages_from_disk() {
    let store = open(&SimDisk::new(), two_tiers());
    let pages: Vec<PageId> = (0..3 * ROOM).map(|number| put(&store, number, 0, Place::Disk)).collect();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let store = &store;
        scope.spawn(|| {
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                put(store, 1000 + number % ROOM, number, DEVICE);
            }
        });
        for round in 0..10_u64 {
            let of =
                |at: u64| ((5 * round + at) % (3 * ROOM), pages[((5 * round + at) % (3 * ROOM)) as usize]);
            let leases: Vec<_> = (0..4).map(|at| (of(at).0, store.lease(of(at).1).unwrap())).collect();
            let (number, pinned) = of(4);
            let pin = store.pin(pinned).unwrap();
            for (number, lease) in &leases {
                assert_eq!(lease.bytes().unwrap(), bytes(*number, 0), "page {number}");
                assert_eq!(place(store, lease.info().page), DEVICE);
            }
            assert_eq!(pin.byte_len(), LEN);
            assert_eq!(place(store, pinned), DEVICE);
            assert_eq!(store.read_to_vec(pinned).unwrap(), bytes(number, 0));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    // Without tiers no place is named to come to.
    let store = open(&SimDisk::new(), small());
    let page = put(&store, 0, 0, Place::Disk);
    for refused in [store.lease(page).map(drop), store.pin(page).map(drop)] {
        assert!(matches!(refused, Err(Error::PlaceUnavailable { place: Place::Disk, .. })), "{refused:?}");
    }
    assert!(matches!(store.lease(PageId(999)), Err(Error::UnknownPage { .. })));
}

/// The device counts what is allocated of it: in no place it is ever a byte more than the budget, whatever
/// comes and goes, and while snapshots set copies aside.
#[test]
fn no_place_has_more_than_its_budget_by_the_devices_own_count() {
    let budgets = [(DEVICE, ROOM * LEN), (Place::Pinned, 6 * LEN + 100), (Place::Host, 4 * LEN)];
    let budget = budgets.iter().fold(Budget::default(), |budget, (place, bytes)| budget.with(*place, *bytes));
    let tiers = Tiers::new([DEVICE, Place::Pinned, Place::Host, Place::Disk]);
    let device = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
    let options = small().budget(budget).tiers(tiers);
    let store = Store::open_on(Arc::new(SimDisk::new()), device.clone(), options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let store = &store;
            scope.spawn(move || {
                let mut pages = Vec::new();
                for round in 0..60 {
                    let number = 1000 * thread + round * 7 % 23;
                    let mut batch = store.batch();
                    batch.create((1 + number % 3) * LEN / 2 + number, DEVICE);
                    pages.push(store.commit(batch).unwrap().pages[0]);
                    put(store, number, round, DEVICE);
                    let page = |at: u64| pages[(round * at) as usize % pages.len()];
                    store.ensure(&[page(3), page(5)], DEVICE).unwrap();
                    store.demote(&[page(7)]).unwrap_or_else(|error| panic!("{error}"));
                    assert!(store.read_to_vec(page(11)).is_ok());
                    if round % 20 == thread {
                        store.snapshot().unwrap();
                    }
                }
            });
        }
    });
    for (place, budget) in budgets {
        let peak = device.peak_bytes(place);
        assert!((budget / 2..=budget).contains(&peak), "{peak} bytes in {place}, of {budget}");
    }
}

/// As long as a place has room, commits wait for nothing, even while the disk, to which pages leave, stands
/// still.
#[test]
fn commits_wait_for_no_slow_disk_while_there_is_room() {
    const ROOM: u64 = 64;
    let budget = Budget::default().with(DEVICE, ROOM * LEN);
    let options = || {
        small()
            .segment_len(4 << 20)
            .budget(budget.clone())
            .tiers(Tiers::new([DEVICE, Place::Disk]).free_part(4))
    };
    let (stands, goes) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
    // The thread of the tiers reads back what it has written, before memory goes.
    let disk = InterruptedDisk::of_thread(&SimDisk::new(), "remanent-tiers", move || {
        stands.0.send(()).unwrap();
        goes.1.recv().unwrap();
    });
    let store = Store::open_on(Arc::new(disk), Arc::new(HostDevice::new()), options()).unwrap();
    let mut count = 0;
    while stands.1.try_recv().is_err() {
        put(&store, count, 0, DEVICE);
        count += 1;
        if count == ROOM - 4 {
            // Fewer than half of the pages that are kept free are left, so it was called.
            stands.1.recv_timeout(Duration::from_secs(60)).expect("it reads what it has written");
            break;
        }
    }
    let before = count;
    assert!(before < ROOM, "there is room left");
    (before..ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
    let waits = |store: &Store| store.stats().tiers.iter().map(|tier| tier.waits).sum::<u64>();
    assert_eq!(waits(&store), 0);
    goes.0.send(()).unwrap();
    (ROOM..2 * ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
    for number in 0..2 * ROOM {
        let page = store.page_by_key(&key(number)).unwrap().page;
        assert_eq!(store.read_to_vec(page).unwrap(), bytes(number, 0));
    }
}

/// A full disk takes no page: what has no room is refused, nothing that was there is lost, and with space the
/// pages go down as before, also after a restart.
#[test]
fn a_full_disk_keeps_pages_where_they_are() {
    on_each_device(|| {
        let disk = SimDisk::new();
        let options = || two_tiers().compression(remanent::Compression::Off);
        let mut store = open(&disk, options());
        let mut held: Vec<(u64, PageId)> = Vec::new();
        let mut next = 0;
        for turn in 0..3 {
            for number in next..next + ROOM {
                held.push((number, put(&store, number, 0, DEVICE)));
            }
            next += ROOM;
            // What the next open needs is made by another thread, and only then kept on a full disk.
            until(|| is_held(&disk, 1));
            disk.set_capacity(Some(disk.used_bytes()));
            let mut refusals = 0;
            for number in next..next + 2 * ROOM {
                match store.put(&key(number), bytes(number, 0), DEVICE) {
                    Ok((page, _)) => held.push((number, page)),
                    Err(Error::OverBudget { place: DEVICE, .. } | Error::DiskFull { .. }) => refusals += 1,
                    Err(error) => panic!("turn {turn}: {error}"),
                }
            }
            next += 2 * ROOM;
            assert!(refusals > 0, "turn {turn}: there was no room for {} pages", 2 * ROOM);
            let check = |store: &Store, what: &str| {
                for (number, page) in &held {
                    assert_eq!(store.read_to_vec(*page).unwrap(), bytes(*number, 0), "{what}: page {number}");
                }
            };
            check(&store, "on the full disk");
            assert!(peak(&store, DEVICE) <= ROOM * LEN);
            drop(store);
            store = open(&disk, options());
            check(&store, "on the full disk, opened anew");
            disk.set_capacity(None);
            for number in next..next + ROOM {
                put(&store, number, 0, DEVICE);
            }
            next += ROOM;
            check(&store, "with space");
        }
    });
}
