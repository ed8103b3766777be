//! Tiers. Unused pages are demoted, so that a store can have more pages than fit into a place.

mod calls;
mod growing;
mod less_memory;
mod policies;
mod read_ahead;
mod room;
mod sources;

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent::error::Invalid;
use remanent::options::{MemoryOptions, Retention};
use remanent::stats::TierStats;
use remanent::testing::sim_disk::{CrashImage, CrashPlan, SimDisk, Tears};
use remanent::tiers::Tiers;
use remanent::{Ack, Error, Key, Options, PageId, Place, Store};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};

use crate::files::small;
use crate::gpu::{self, on_each_device};

const LEN: u64 = 4096;
/// Number of pages that fit into the first place.
const ROOM: u64 = 16;
const DEVICE: Place = Place::Device(0);

/// Returns options with a place for [`ROOM`] pages above the disk.
fn two_tiers() -> Options {
    small()
        .memory(MemoryOptions::new().budget(DEVICE, ROOM * LEN))
        .tiers(Tiers::new([DEVICE, Place::Disk]).lru())
}

fn open(disk: &SimDisk, options: Options) -> Store {
    Store::open_on(Arc::new(disk.clone()), gpu::under_test(), options).unwrap()
}

fn key(number: u64) -> Key {
    Key::new(format!("page/{number}")).unwrap()
}

/// Returns the bytes of a page, which differ between versions.
fn bytes(number: u64, version: u64) -> Vec<u8> {
    (0..LEN).map(|at| (at ^ (number * 31 + version * 101)) as u8).collect()
}

fn put(store: &Store, number: u64, version: u64, place: Place) -> PageId {
    store.put(key(number), bytes(number, version), place).unwrap().0
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

/// Checks the disk states that kills and power cuts during a life leave.
fn each_crash(disk: &SimDisk, check: &mut impl FnMut(CrashImage)) {
    let kills = CrashPlan { tears: Tears::None, ..CrashPlan::default() };
    disk.kill_images(&kills, &mut *check);
    let cuts = CrashPlan { tears: Tears::None, images_max: 6, ..CrashPlan::default() };
    disk.power_images(&cuts, check);
}

/// Opens the files that a crash left. Each page must have the bytes that the log states, and be in the logged
/// place or a lower one.
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

/// Asserts that a store that was opened after a crash can be used.
fn goes_on(store: &Store, image: &CrashImage) {
    (50..60).for_each(|number| _ = put(store, number, 0, DEVICE));
    assert!(store.audit().unwrap().changed.is_empty(), "{image}");
}

/// Asserts that every page acknowledged before a crash has its newest bytes, where `number_of` maps a round
/// to the page that it wrote. Returns the places of these pages.
fn places_after(store: &Store, image: &CrashImage, number_of: impl Fn(u64) -> u64) -> Vec<Place> {
    let acked = image.acks.len() as u64;
    let expected: BTreeMap<u64, u64> = (0..acked).map(|round| (number_of(round), round)).collect();
    let check = |(number, version)| {
        let info = store.page_by_key(key(number)).unwrap_or_else(|error| panic!("{image}: {error}"));
        let found = store.read_to_vec(info.page).unwrap();
        // The batch after the last acknowledged one may also exist.
        let is_next = number_of(acked) == number && found == bytes(number, acked);
        assert!(is_next || found == bytes(number, version), "{image}: page {number}");
        info.place
    };
    expected.into_iter().map(check).collect()
}

#[test]
fn pages_beyond_a_places_budget_are_evicted() {
    on_each_device(|| {
        let disk = SimDisk::new();
        let store = open(&disk, two_tiers());
        let pages: Vec<PageId> = (0..5 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        // Evicted pages are changed in their current place.
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
fn each_place_demotes_to_the_next() {
    on_each_device(|| {
        let memory = MemoryOptions::new()
            .budget(DEVICE, ROOM * LEN)
            .budget(Place::Pinned, ROOM * LEN)
            .budget(Place::Host, 4 * LEN);
        let tiers = Tiers::new([DEVICE, Place::Pinned, Place::Host, Place::Disk]).lru();
        let store = open(&SimDisk::new(), small().memory(memory).tiers(tiers));
        let pages: Vec<PageId> = (0..4 * ROOM).map(|number| put(&store, number, 0, DEVICE)).collect();
        // The longer ago a page was used, the lower is its tier.
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
        // A page that does not fit into the next lower tier skips it.
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
fn invalid_tier_options_are_refused() {
    let memory = || MemoryOptions::new().budget(DEVICE, 1 << 20).budget(Place::Host, 1 << 20);
    for (tiers, reason) in [
        (Tiers::new([DEVICE]), "two places"),
        (Tiers::new([DEVICE, Place::Host, DEVICE]), "twice"),
        (Tiers::new([Place::Disk, Place::Host]), "last of all"),
        (Tiers::new([DEVICE, Place::Pinned, Place::Disk]), "no limit"),
        (Tiers::new([DEVICE, Place::Disk]).free_part(1), "kept free"),
        (Tiers::new([DEVICE, Place::Disk]).free_part(0), "kept free"),
    ] {
        let refused = Options::new().memory(memory()).tiers(tiers).open_temporary().unwrap_err();
        let Error::Invalid(Invalid::Option { option: "tiers", .. }) = refused else { panic!("{refused}") };
        assert!(refused.to_string().contains(reason), "{refused}");
    }
    let store = Store::temporary().unwrap();
    assert!(matches!(store.demote(&[]), Err(Error::Invalid(Invalid::Option { option: "tiers", .. }))));
    let tiers = Tiers::new([DEVICE, Place::Host]);
    assert_eq!(tiers.places(), [DEVICE, Place::Host]);
    Options::new().memory(memory()).tiers(tiers).open_temporary().unwrap();
}

/// A restore moves pages back to their earlier places and notifies the eviction policies.
#[test]
fn restore_moves_pages_back_within_the_budget() {
    on_each_device(|| {
        let store = open(&SimDisk::new(), two_tiers().retention(Retention::new().log_kept(1 << 30)));
        let mut pages = Vec::new();
        for number in 0..ROOM - 2 {
            pages.push(put(&store, number, 0, DEVICE));
        }
        let then = store.lsn();
        (100..100 + 2 * ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
        assert!(places(&store, &pages).contains(&Place::Disk));
        store.restore(remanent::StatePoint::Lsn(then)).unwrap();
        for (number, page) in (0..).zip(&pages) {
            assert_eq!(store.read_to_vec(*page).unwrap(), bytes(number, 0));
        }
        (200..200 + 2 * ROOM).for_each(|number| _ = put(&store, number, 0, DEVICE));
        assert!(peak(&store, DEVICE) <= ROOM * LEN);
        assert!(store.audit().unwrap().changed.is_empty());
    });
}

/// After each crash of a life in which pages are constantly demoted and promoted, every acknowledged page
/// exists with its newest bytes, in its logged place or a lower one.
#[test]
fn after_crash_pages_are_at_same_or_lower_place() {
    let disk = SimDisk::new();
    let options = || {
        let memory = MemoryOptions::new().budget(DEVICE, 6 * LEN).budget(Place::Host, 3 * LEN);
        small().memory(memory).tiers(Tiers::new([DEVICE, Place::Host, Place::Disk])).ack(Ack::Durable)
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
