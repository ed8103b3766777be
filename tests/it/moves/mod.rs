//! Pages that move from one place to another. The bytes and the epoch are unchanged, the place changes, and
//! all components that track pages use the new place.
//!
//! Where possible, tests run on every device: two combined host devices, two late devices, and two GPUs.

mod concurrent;

use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::{Remedy, Unavailable};
use remanent::follow::{FollowFrom, Follower, Replica};
use remanent::options::{Compression, ImageOptions, MemoryOptions, Retention};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, SnapshotOptions, StatePoint, Store, View};
use remanent_format::state::rebuild::{RebuildOptions, rebuild};

use crate::files::{Files, State, small};
use crate::gpu;
use crate::multi_device::{host, late, two_of};
use crate::with_options::With;

/// A length that is not a multiple of any block size, and needs more than one copy.
const LEN: u64 = 70_001;
/// A sequence of places that contains a move between each pair of places, in both directions.
const WAY: [Place; 9] = [
    Place::Device(1),
    Place::Pinned,
    Place::Device(0),
    Place::Device(1),
    Place::Host,
    Place::Device(1),
    Place::Device(0),
    Place::Pinned,
    Place::Host,
];

/// Returns devices with two slots: several combinations, and GPUs if two are present.
fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices = vec![host(), late(1), two_of(host(), host()), two_of(late(2), late(3))];
    let pairs: Vec<_> = [gpu::two(), gpu::two_apart()].into_iter().flatten().collect();
    if pairs.is_empty() {
        devices.extend(gpu::device().map(|gpu| gpu as Arc<dyn Device>));
    }
    devices.extend(pairs.into_iter().map(|[one, other]| two_of(one, other)));
    devices
}

fn open(disk: &SimDisk, device: &Arc<dyn Device>, options: Options) -> Store {
    Store::open_on(Arc::new(disk.clone()), device.clone(), options).unwrap()
}

fn move_to(store: &Store, page: PageId, place: Place) -> remanent::Result<()> {
    let mut batch = store.batch();
    batch.move_to(page, place);
    store.commit(batch).map(drop)
}

/// Creates a page in this place. Its bytes depend on their offset and on `number`.
fn create(store: &Store, place: Place, number: u8) -> (PageId, Vec<u8>) {
    let content: Vec<u8> = (0..LEN).map(|at| (at % 251) as u8 ^ number).collect();
    let mut batch = store.batch();
    let page = batch.create(LEN, place).page();
    batch.write(page, 0, &content).set_metadata(page, "number", u64::from(number));
    (store.commit(batch).unwrap().pages[0], content)
}

fn bytes(store: &Store, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; store.page(page).unwrap().len as usize];
    store.read(page, 0, &mut bytes).unwrap();
    bytes
}

/// Returns the number of bytes of pages in each place, without places that have none. A test that calls this
/// function after a batch must first read a page, because memory is freed when the batch is applied, not when
/// it is logged.
fn allocated(store: &Store) -> Vec<(Place, u64)> {
    let places = store.stats().places.into_iter().map(|(place, usage)| (place, usage.allocated_bytes));
    places.filter(|(_, bytes)| *bytes > 0).collect()
}

/// Asserts that the directory contains the state of the store, according to the pure rebuild and to an open
/// on another device.
fn assert_survives(store: Store, disk: &SimDisk, device: &Arc<dyn Device>) -> Store {
    let state = State::of(&store);
    let rebuilt = rebuild(&Files::of(disk), &RebuildOptions::default()).unwrap();
    assert_eq!(State::rebuilt(&rebuilt), state);
    drop(store);
    let store = open(disk, device, small());
    assert_eq!(State::of(&store), state, "opened on {}", device.label());
    let mut places: Vec<(Place, u64)> = Vec::new();
    for info in &state.pages {
        match places.iter_mut().find(|(place, _)| *place == info.place) {
            Some((_, len)) => *len += info.len,
            None => places.push((info.place, info.len)),
        }
    }
    places.retain(|(_, len)| *len > 0);
    places.sort_unstable();
    assert_eq!(allocated(&store), places, "opened on {}", device.label());
    store
}

#[test]
fn move_changes_only_the_place() {
    for device in devices() {
        let disk = SimDisk::new();
        let mut store = open(&disk, &device, small());
        let (page, content) = create(&store, Place::Device(0), 7);
        let before = store.page(page).unwrap();
        for (number, place) in WAY.into_iter().enumerate() {
            move_to(&store, page, place).unwrap();
            let info = store.page(page).unwrap();
            assert_eq!((info.place, info.lsn), (place, store.lsn()), "{}", device.label());
            assert_eq!((info.epoch, info.len, &info.metadata), (before.epoch, LEN, &before.metadata));
            assert_eq!(bytes(&store, page), content, "to {place} on {}", device.label());
            assert_eq!(allocated(&store), [(place, LEN)], "on {}", device.label());
            match number % 4 {
                0 => _ = store.snapshot().unwrap(),
                1 => store = assert_survives(store, &disk, &device),
                2 => _ = store.snapshot_with(SnapshotOptions::new().exact()).unwrap(),
                _ => {}
            }
        }
        // A move to the current place allocates no memory, so it succeeds even if there is no memory for a
        // second copy.
        store = assert_survives(store, &disk, &host());
        drop(store);
        let store = open(&disk, &device, small().memory(MemoryOptions::new().budget(Place::Host, LEN)));
        move_to(&store, page, Place::Host).unwrap();
        let info = store.page(page).unwrap();
        assert_eq!((info.epoch, info.lsn), (before.epoch, store.lsn()));
        assert_eq!(bytes(&store, page), content);
    }
}

/// A move of thousands of pages is submitted in parts but forms one batch. A reader finds each page's bytes
/// at any time, a view has the places of its batch, and a restart finds all logged moves.
#[test]
fn thousands_of_pages_move_together() {
    const COUNT: u64 = 9000;
    const PAGE_LEN: u64 = 24;
    for device in [host(), late(20), two_of(late(21), late(22))] {
        let disk = SimDisk::new();
        let store = open(&disk, &device, small().with(|options| options.log.segment_len = 4 << 20));
        let content = |page: PageId| [page.0.to_le_bytes(), (!page.0).to_le_bytes(), [7; 8]].concat();
        let mut pages = Vec::new();
        while pages.len() < COUNT as usize {
            let mut batch = store.batch();
            (0..500).for_each(|_| _ = batch.create(PAGE_LEN, Place::Host));
            let new = store.commit(batch).unwrap().pages;
            let mut batch = store.batch();
            new.iter().for_each(|page| _ = batch.write(*page, 0, &content(*page)));
            store.commit(batch).unwrap();
            pages.extend(new);
        }
        let lease = store.lease(pages[2]).unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let mut before = Place::Host;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut reads = pages.iter().rev().step_by(7).cycle();
                while !is_over.load(std::sync::atomic::Ordering::Acquire) {
                    let page = *reads.next().unwrap();
                    assert_eq!(bytes(&store, page), content(page));
                }
            });
            for place in [Place::Device(1), Place::Device(0), Place::Pinned] {
                let view = store.view().unwrap();
                // Ids may be in any order and may be repeated.
                let named: Vec<PageId> = pages.iter().rev().chain(&pages[..9]).copied().collect();
                store.ensure(&named, place).unwrap();
                assert!(pages.iter().all(|page| view.page(*page).unwrap().place == before));
                assert!(pages.iter().all(|page| store.page(*page).unwrap().place == place));
                before = place;
            }
            is_over.store(true, std::sync::atomic::Ordering::Release);
        });
        drop(lease);
        let store = assert_survives(store, &disk, &device);
        assert!(pages.iter().all(|page| bytes(&store, *page) == content(*page)));
        assert_eq!(allocated(&store), [(Place::Pinned, COUNT * PAGE_LEN)]);
    }
}

/// A call for many pages commits several independent batches. A refused batch moves no page, and the other
/// batches do. If the place has no space for all pages, none moves.
#[test]
fn ensure_of_many_pages_uses_several_batches() {
    const COUNT: usize = 9000;
    let disk = SimDisk::new();
    let memory = MemoryOptions::new().budget(Place::Device(0), 9 * COUNT as u64 - 1);
    let store =
        open(&disk, &late(23), small().memory(memory).with(|options| options.log.segment_len = 4 << 20));
    let mut batch = store.batch();
    (0..COUNT).for_each(|number| _ = batch.create_from((number as u64).to_le_bytes(), Place::Host));
    let pages = store.commit(batch).unwrap().pages;
    let in_place = |place| pages.iter().filter(|page| store.page(**page).unwrap().place == place).count();
    let moved = |to| {
        let all = store.stats().moves.into_iter().filter(move |moves| moves.to == to);
        all.map(|moves| (moves.pages, moves.bytes))
            .fold((0, 0), |sum, moves| (sum.0 + moves.0, sum.1 + moves.1))
    };

    let lsn = store.lsn();
    let last = store.ensure(&pages, Place::Pinned).unwrap().unwrap();
    assert_eq!((last.lsn, store.lsn().0), (store.lsn(), lsn.0 + 3));
    assert_eq!((in_place(Place::Pinned), moved(Place::Pinned)), (COUNT, (COUNT as u64, 8 * COUNT as u64)));

    let pin = store.pin(pages[5000]).unwrap();
    let error = store.ensure(&pages, Place::Host).unwrap_err();
    assert!(matches!(error, Error::Leased { page } if page == pages[5000]), "{error}");
    assert_eq!(in_place(Place::Host), COUNT - 4096);
    assert_eq!(moved(Place::Host), ((COUNT - 4096) as u64, 8 * (COUNT - 4096) as u64));
    drop(pin);
    store.ensure(&pages, Place::Host).unwrap();

    let mut batch = store.batch();
    pages.iter().for_each(|page| _ = batch.resize(*page, 9));
    store.commit(batch).unwrap();
    let lsn = store.lsn();
    let error = store.ensure(&pages, Place::Device(0)).unwrap_err();
    assert!(matches!(error, Error::OverBudget { place: Place::Device(0), .. }), "{error}");
    assert_eq!((store.lsn(), in_place(Place::Host)), (lsn, COUNT));
    let store = assert_survives(store, &disk, &late(24));
    assert!(pages.iter().enumerate().all(|(number, page)| bytes(&store, *page)[..8] == number.to_le_bytes()));
}

#[test]
fn move_is_ordered_among_batch_operations() {
    for device in devices() {
        let disk = SimDisk::new();
        let store = open(&disk, &device, small());
        let (page, mut content) = create(&store, Place::Host, 1);
        let (gone, _) = create(&store, Place::Host, 2);
        let epoch = store.page(page).unwrap().epoch;
        let mut batch = store.batch();
        batch.write(page, 5, &[1; 64]).move_to(page, Place::Device(1)).scatter(
            page,
            Width::W2,
            &[4],
            &[2, 3],
        );
        let copy = batch.clone_page(page);
        batch.resize(page, LEN + 9).move_to(page, Place::Pinned).fill(page, LEN + 1, 8, &[9]);
        batch.move_to(copy, Place::Device(0));
        let born = batch.create(16, Place::Device(1)).page();
        batch.fill(born, 0, 16, &[4]).move_to(born, Place::Host).move_to(born, Place::Device(0));
        batch.move_to(gone, Place::Pinned).delete(gone);
        let born_and_gone = batch.create(LEN, Place::Device(0)).page();
        batch.move_to(born_and_gone, Place::Device(1)).delete(born_and_gone);
        let pages = store.commit(batch).unwrap().pages;

        content[5..69].fill(1);
        content[8..10].copy_from_slice(&[2, 3]);
        assert_eq!(bytes(&store, pages[0]), content, "the copy, on {}", device.label());
        content.push(0);
        content.extend([9; 8]);
        assert_eq!(bytes(&store, page), content, "on {}", device.label());
        assert_eq!(bytes(&store, pages[1]), [4; 16], "on {}", device.label());
        let place = |page| store.page(page).unwrap().place;
        assert_eq!(
            [place(page), place(pages[0]), place(pages[1])],
            [Place::Pinned, Place::Device(0), Place::Device(0)]
        );
        // One batch raises the epoch by one, however many operations it has.
        assert_eq!(store.page(page).unwrap().epoch.0, epoch.0 + 1);
        assert!(matches!(store.page(gone), Err(Error::UnknownPage { .. })));
        assert_eq!(allocated(&store), [(Place::Device(0), LEN + 16), (Place::Pinned, LEN + 9)]);
        assert_survives(store, &disk, &device);
    }
}

#[test]
fn clone_is_created_at_current_place_of_source() {
    let disk = SimDisk::new();
    let store = open(&disk, &host(), small());
    let (page, content) = create(&store, Place::Host, 1);
    let mut batch = store.batch();
    let before = batch.clone_page(page);
    batch.move_to(page, Place::Pinned);
    let behind = batch.clone_page(page);
    let pages = store.commit(batch).unwrap().pages;
    let place = |index: usize| store.page(pages[index]).unwrap().place;
    assert_eq!((place(before.index()), place(behind.index())), (Place::Host, Place::Pinned));
    assert!(pages.iter().all(|page| bytes(&store, *page) == content));
    assert_survives(store, &disk, &host());
}

#[test]
fn prewritten_whole_page_can_move() {
    let disk = SimDisk::new();
    let store = open(&disk, &two_of(late(4), late(5)), small());
    let (page, _) = create(&store, Place::Host, 1);
    let whole = vec![8; LEN as usize];
    let mut batch = store.batch();
    batch.move_to(page, Place::Device(1)).write(page, 0, &whole).move_to(page, Place::Device(0));
    store.commit(batch).unwrap();
    assert!(store.stats().log.bytes < 2 * LEN, "the log names the page's image");
    assert_eq!((bytes(&store, page), store.page(page).unwrap().place), (whole, Place::Device(0)));
    store.snapshot().unwrap();
    assert_survives(store, &disk, &host());
}

#[test]
fn impossible_move_is_refused_without_changes() {
    let disk = SimDisk::new();
    let memory = MemoryOptions::new().budget(Place::Pinned, LEN + 9);
    let store = open(&disk, &two_of(late(6), late(7)), small().memory(memory));
    let (page, content) = create(&store, Place::Host, 1);
    let (other, _) = create(&store, Place::Host, 2);
    let lsn = store.lsn();
    let refused = |build: &dyn Fn(&mut remanent::WriteBatch)| {
        let mut batch = store.batch();
        build(&mut batch);
        let error = store.commit(batch).unwrap_err();
        assert_eq!((store.lsn(), store.page(page).unwrap().place), (lsn, Place::Host), "{error}");
        assert_eq!(allocated(&store), [(Place::Host, 2 * LEN)], "{error}");
        error
    };
    let error = refused(&|batch| _ = batch.move_to(page, Place::Pinned).move_to(other, Place::Pinned));
    let over = matches!(error, Error::OverBudget { place: Place::Pinned, requested, available, .. }
        if (requested, available) == (2 * LEN, LEN + 9));
    assert!(over && error.remedy() == Remedy::FreeSpace, "{error}");
    for place in [Place::Device(2), Place::Device(64)] {
        let error = refused(&|batch| _ = batch.move_to(page, place));
        assert!(
            matches!(error, Error::Unavailable(Unavailable::Place { place: found, .. }) if found == place),
            "{error}"
        );
        assert_eq!(error.remedy(), Remedy::ChangeCall, "{error}");
    }
    let error = refused(&|batch| _ = batch.move_to(PageId(99), Place::Pinned));
    assert!(matches!(error, Error::UnknownPage { page: PageId(99) }), "{error}");
    let error = refused(&|batch| _ = batch.delete(page).move_to(page, Place::Pinned));
    assert!(matches!(error, Error::UnknownPage { page: found } if found == page), "{error}");
    let pin = store.pin(page).unwrap();
    let error = refused(&|batch| _ = batch.move_to(page, Place::Pinned));
    assert!(matches!(error, Error::Leased { page: found } if found == page), "{error}");
    drop(pin);
    // One of the pages fits into the place.
    move_to(&store, page, Place::Pinned).unwrap();
    assert_eq!(bytes(&store, page), content);
    assert_eq!(allocated(&store), [(Place::Pinned, LEN), (Place::Host, LEN)]);
}

#[test]
fn lease_keeps_old_address_after_move() {
    for device in devices() {
        let store = open(&SimDisk::new(), &device, small());
        let (page, content) = create(&store, Place::Host, 1);
        let lease = store.lease(page).unwrap();
        let address = lease.address();
        std::thread::scope(|scope| {
            let moves = || {
                move_to(&store, page, Place::Device(1)).unwrap();
                let mut batch = store.batch();
                batch.fill(page, 0, LEN, &[3]).move_to(page, Place::Device(0)).write(page, 0, &[4]);
                store.commit(batch).unwrap();
            };
            scope.spawn(moves).join().unwrap();
        });
        let mut changed = vec![3; LEN as usize];
        changed[0] = 4;
        assert_eq!(bytes(&store, page), changed, "on {}", device.label());
        assert_eq!((lease.address(), lease.info().place), (address, Place::Host));
        if let Ok(bytes) = lease.bytes() {
            assert_eq!(bytes, content, "on {}", device.label());
        }
        assert_eq!(allocated(&store), [(Place::Device(0), LEN), (Place::Host, LEN)]);
        lease.end().unwrap();
        assert_eq!(allocated(&store), [(Place::Device(0), LEN)], "on {}", device.label());
    }
}

#[test]
fn restore_to_earlier_places_bumps_epochs_only_of_changed_pages() {
    for device in devices() {
        let disk = SimDisk::new();
        let store = open(&disk, &device, small().retention(Retention::new().snapshots_kept(9)));
        let (moved, content) = create(&store, Place::Device(0), 1);
        let (changed, _) = create(&store, Place::Device(0), 2);
        let (still, _) = create(&store, Place::Device(1), 3);
        let then = (store.lsn(), State::of(&store), store.snapshot().unwrap().id);
        move_to(&store, moved, Place::Pinned).unwrap();
        let mut batch = store.batch();
        batch.move_to(changed, Place::Device(1)).fill(changed, 0, 9, &[1]);
        store.commit(batch).unwrap();
        for point in [StatePoint::Lsn(then.0), StatePoint::Snapshot(then.2)] {
            let disk: Arc<dyn Disk> = Arc::new(disk.clone());
            let old = View::open_on(&disk, Some(&point)).unwrap();
            assert!(old.pages().eq(then.1.pages.clone()), "{point:?}");
        }
        for back in [true, false] {
            let lsn = if back {
                store.restore(StatePoint::Lsn(then.0)).unwrap().lsn
            } else {
                move_to(&store, moved, Place::Host).unwrap();
                store.restore(StatePoint::Snapshot(then.2)).unwrap().lsn
            };
            let [moved, changed, still] = [moved, changed, still].map(|page| store.page(page).unwrap());
            assert_eq!(State::of(&store).contents, then.1.contents, "on {}", device.label());
            let places = [moved.place, changed.place, still.place];
            assert_eq!(places, [Place::Device(0), Place::Device(0), Place::Device(1)]);
            assert_eq!((moved.lsn, moved.epoch), (lsn, then.1.pages[0].epoch), "a move is no version");
            assert!(changed.epoch > then.1.pages[1].epoch, "a change is one");
            assert_eq!(still, then.1.pages[2]);
            assert_eq!(allocated(&store), [(Place::Device(0), 2 * LEN), (Place::Device(1), LEN)]);
        }
        assert_eq!(bytes(&store, moved), content);
        let store = assert_survives(store, &disk, &device);
        // Every state can be computed from the kept log, including the moves.
        move_to(&store, moved, Place::Host).unwrap();
        let state = State::of(&store);
        let fork = SimDisk::new();
        let forked: Arc<dyn Disk> = Arc::new(fork.clone());
        let source: Arc<dyn Disk> = Arc::new(disk.clone());
        View::open_on(&source, None).unwrap().fork_on(&forked).unwrap();
        assert_eq!(State::of(&open(&fork, &device, small())), state, "a fork");
    }
}

#[test]
fn snapshot_does_not_rewrite_moved_page() {
    for device in devices() {
        let disk = SimDisk::new();
        let store = open(&disk, &device, small().images(ImageOptions::new().compression(Compression::Off)));
        let (moved, content) = create(&store, Place::Device(0), 1);
        let (changed, _) = create(&store, Place::Device(0), 2);
        create(&store, Place::Host, 3);
        store.snapshot().unwrap();
        move_to(&store, moved, Place::Pinned).unwrap();
        assert_eq!(store.snapshot().unwrap().bytes_written, 0);
        let mut batch = store.batch();
        batch.move_to(changed, Place::Device(1)).fill(changed, 0, 9, &[1]);
        store.commit(batch).unwrap();
        move_to(&store, moved, Place::Host).unwrap();
        assert_eq!(store.snapshot().unwrap().bytes_written, LEN, "the one that changed, too");
        assert_eq!((store.page(moved).unwrap().place, bytes(&store, moved)), (Place::Host, content));
        let store = assert_survives(store, &disk, &device);
        store.scrub().unwrap();
    }
}

#[test]
fn followers_see_moves() {
    let disk = SimDisk::new();
    let store = open(&disk, &two_of(late(8), late(9)), small());
    let (page, _) = create(&store, Place::Device(0), 1);
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    let mut follower = Follower::open_on(shared.clone(), FollowFrom::Beginning).unwrap();
    let mut replica = Replica::default();
    let then = store.lsn();
    move_to(&store, page, Place::Device(1)).unwrap();
    let mut batch = store.batch();
    batch.move_to(page, Place::Pinned).fill(page, 1, 3, &[1]);
    store.commit(batch).unwrap();
    store.restore(StatePoint::Lsn(then)).unwrap();
    move_to(&store, page, Place::Host).unwrap();
    store.wait_durable(store.lsn()).unwrap();
    let mut kinds = Vec::new();
    while let Some(batch) = follower.next(std::time::Duration::ZERO).unwrap() {
        kinds.push(batch.operations().iter().map(remanent::batch::Op::kind).collect::<Vec<_>>().join(" "));
        replica.apply(&batch).unwrap();
    }
    assert_eq!(kinds[1..], ["move", "move fill", "restore", "move"]);
    assert_eq!(replica.page(page), Some(store.page(page).unwrap()));
    assert_eq!(replica.bytes(page).unwrap(), bytes(&store, page));
    store.snapshot().unwrap();
    let from_snapshot = Replica::from_snapshot_on(&shared).unwrap();
    assert_eq!(from_snapshot.page(page), replica.page(page));
}
