//! Pages in `Place::Disk`. They use no memory, and all operations on pages support them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::batch::Width;
use remanent::device::host::HostDevice;
use remanent::error::{FileName, Folder, Invalid, Remedy, Unavailable};
use remanent::options::{Compression, ImageOptions, MemoryOptions, PageLoad, Retention};
use remanent::testing::sim_disk::{Operation, SimDisk};
use remanent::{Ack, Error, Options, PageId, Place, SnapshotOptions, StatePoint, Store};

use crate::files::{Files, small};
use crate::gpu::{self, on_each_device};
use crate::interrupted_reads::InterruptedDisk;
use crate::kill::workload::Random;
use crate::with_options::With;

/// Length of a page, longer than a piece of an image and not a multiple of any block size.
const LONG: u64 = (3 << 20) + 77;
const SHORT: u64 = 5000;

pub fn commit(store: &Store, build: impl FnOnce(&mut remanent::WriteBatch)) -> Vec<PageId> {
    let mut batch = store.batch();
    build(&mut batch);
    store.commit(batch).unwrap().pages
}

pub fn move_to(store: &Store, page: PageId, place: Place) {
    commit(store, |batch| _ = batch.move_to(page, place));
}

/// Returns options without memory for pages, so that all pages are on disk.
fn without_memory() -> Options {
    let memory = MemoryOptions::new().budget(Place::Disk, 1 << 20);
    let in_memory = [Place::Host, Place::Pinned, Place::Device(0)];
    small().memory(in_memory.into_iter().fold(memory, |memory, place| memory.budget(place, 0)))
}

pub fn opened(disk: &SimDisk, options: Options) -> Store {
    Store::open_on(Arc::new(disk.clone()), gpu::under_test(), options).unwrap()
}

/// Returns options without compression, so that a test can find a page's bytes in the files.
pub fn uncompressed() -> Options {
    small().images(ImageOptions::new().compression(Compression::Off))
}

/// A thousand short pages move to disk and back. Some have images of a snapshot, some have images of a batch,
/// and some have later writes. The disk and the device get many requests at once.
#[test]
fn many_pages_move_at_once() {
    on_each_device(|| {
        let disk = SimDisk::new();
        let store = opened(&disk, uncompressed());
        let mut random = Random(3);
        let mut plain: Vec<Vec<u8>> = (0..1000).map(|_| random.bytes(3000)).collect();
        let pages = commit(&store, |batch| {
            plain.iter().for_each(|bytes| _ = batch.create_from(bytes.clone(), Place::Host));
        });
        store.snapshot().unwrap();
        let write = |plain: &mut Vec<Vec<u8>>, every: usize, value: u8| {
            commit(&store, |batch| {
                for (page, bytes) in pages.iter().zip(plain).step_by(every) {
                    bytes[..100].fill(value);
                    batch.write(*page, 0, &[value; 100]);
                }
            });
        };
        // Half of the pages have no image of their current content.
        write(&mut plain, 2, 1);
        let requested = || {
            let reads = [Operation::Read, Operation::ReadBypassingCache].map(|kind| disk.calls(kind));
            let lists = store.stats().lanes.iter().map(|(_, lane)| lane.lists).sum::<u64>();
            (reads.iter().sum::<usize>(), disk.calls(Operation::Open), lists)
        };
        let move_all = |to: Place| {
            let before = requested();
            commit(&store, |batch| pages.iter().for_each(|page| _ = batch.move_to(*page, to)));
            let after = requested();
            (after.0 - before.0, after.1 - before.1, after.2 - before.2)
        };
        for round in 0..3 {
            let (reads, opens, lists) = move_all(Place::Disk);
            assert!(
                reads < 10 && opens < 10 && lists < 10,
                "down: {reads} reads, {opens} opens, {lists} lists"
            );
            let are_alike = |(page, bytes): (&PageId, &Vec<u8>)| store.read_to_vec(*page).unwrap() == *bytes;
            assert!(pages.iter().zip(&plain).all(are_alike), "on disk in round {round}");
            let (reads, opens, lists) = move_all(Place::Host);
            assert!(
                reads < 10 && opens < 10 && lists < 10,
                "up: {reads} reads, {opens} opens, {lists} lists"
            );
            assert!(pages.iter().zip(&plain).all(are_alike), "in memory in round {round}");
        }
        // A page with writes after its image moves separately, and the others move together.
        move_all(Place::Disk);
        write(&mut plain, 100, 2);
        let (reads, ..) = move_all(Place::Host);
        assert!((10..30).contains(&reads), "{reads} reads for ten pages and the others");
        for (page, bytes) in pages.iter().zip(&plain) {
            assert!(store.read_to_vec(*page).unwrap() == *bytes, "{page}");
        }
    });
}

/// Pages of all lengths move from all places in one batch. The bytes are too many for one thread, and differ
/// between pages.
#[test]
fn one_batch_demotes_pages_of_all_lengths_and_places() {
    on_each_device(|| {
        let store = opened(&SimDisk::new(), uncompressed());
        let mut random = Random(11);
        let (mut plain, mut places) =
            (Vec::new(), [Place::Host, Place::Pinned, Place::Device(0)].into_iter().cycle());
        for len in [LONG, 5 << 20, 0, 1].into_iter().chain((0..300).map(|at| 1 + at * 7919 % 60_000)) {
            plain.push((random.bytes(len), places.next().unwrap()));
        }
        let pages = commit(&store, |batch| {
            plain.iter().for_each(|(bytes, place)| _ = batch.create_from(bytes.clone(), *place));
        });
        store.ensure(&pages, Place::Disk).unwrap();
        let are_alike =
            |(page, (bytes, _)): (&PageId, &(Vec<u8>, _))| store.read_to_vec(*page).unwrap() == *bytes;
        assert!(pages.iter().zip(&plain).all(are_alike), "on disk");
        store.ensure(&pages, Place::Device(0)).unwrap();
        assert!(pages.iter().zip(&plain).all(are_alike), "on the device");
    });
}

/// Every kind of change is read back immediately, after a snapshot, and after a restart with and without the
/// snapshot.
#[test]
fn device_bytes_equal_committed_bytes() {
    let disk = SimDisk::new();
    let mut random = Random(11);
    let mut store = opened(&disk, without_memory());
    let mut plain: Vec<Vec<u8>> = Vec::new();
    let pages = commit(&store, |batch| {
        for len in [LONG, SHORT, 1, 0] {
            batch.create(len, Place::Disk);
        }
        let bytes = random.bytes(LONG);
        batch.create_from(bytes.clone(), Place::Disk);
        plain.extend([LONG, SHORT, 1, 0].map(|len| vec![0; len as usize]));
        plain.push(bytes);
    });
    for round in 0..12 {
        commit(&store, |batch| {
            for (page, bytes) in pages.iter().zip(&mut plain).filter(|(_, bytes)| bytes.len() > 4000) {
                let at = random.next() as usize % (bytes.len() - 1000);
                let written = random.bytes(700);
                bytes[at..at + 700].copy_from_slice(&written);
                batch.write(*page, at as u64, &written);
                batch.scatter(*page, Width::W4, &[1, 5, 900], &[round; 12]);
                for element in [1, 5, 900] {
                    bytes[4 * element..4 * element + 4].fill(round);
                }
                batch.fill(*page, 64, 32, &[round, 1]);
                (64..96).for_each(|at| bytes[at] = if at % 2 == 0 { round } else { 1 });
            }
            let len = 3000 + random.next() as usize % 4000;
            plain[1].resize(len, 0);
            batch.resize(pages[1], len as u64);
        });
        match round {
            2 | 7 => _ = store.snapshot().unwrap(),
            4 => _ = store.snapshot_with(SnapshotOptions::new().exact()).unwrap(),
            3 | 8 | 9 => {
                drop(store);
                store = opened(&disk, without_memory());
            }
            _ => {}
        }
        for (page, bytes) in pages.iter().zip(&plain) {
            assert!(store.read_to_vec(*page).unwrap() == *bytes, "{page} after round {round}");
            assert_eq!(store.page(*page).unwrap().place, Place::Disk);
        }
    }
    let mut part = [0; 100];
    store.read(pages[4], LONG - 100, &mut part).unwrap();
    assert_eq!(part[..], plain[4][LONG as usize - 100..]);
    let many = store.read_many(&[(pages[0], 60..80), (pages[1], 0..9)]).unwrap();
    assert_eq!(many.wait().unwrap().as_bytes(), [&plain[0][60..80], &plain[1][..9]].concat());
    assert!(store.audit().unwrap().changed.is_empty());
    assert_eq!(store.compare(pages[4], pages[4], Width::W1).unwrap().differing, 0);
}

/// A page moves to disk and back without a change of its bytes and epoch. On disk, it uses no memory.
#[test]
fn pages_round_trip_through_disk() {
    let disk = SimDisk::new();
    let memory = MemoryOptions::new().budget(Place::Host, LONG + SHORT);
    let store = opened(&disk, small().memory(memory.clone()));
    let (long, short) = (Random(1).bytes(LONG), Random(2).bytes(SHORT));
    let pages = commit(&store, |batch| {
        batch.create_from(long.clone(), Place::Host);
        batch.create_from(short.clone(), Place::Host);
        batch.create(0, Place::Host);
    });
    let used = || {
        store.trim().unwrap();
        store.stats().places.iter().map(|(_, usage)| usage.allocated_bytes).sum::<u64>()
    };
    let epochs = || pages.iter().map(|page| store.page(*page).unwrap().epoch).collect::<Vec<_>>();
    let (before, lease) = (epochs(), store.lease(pages[1]).unwrap());
    for page in &pages {
        move_to(&store, *page, Place::Disk);
    }
    assert_eq!(lease.bytes().unwrap(), short, "a lease shows what it showed");
    drop(lease);
    assert_eq!((epochs(), used()), (before.clone(), 0));
    assert!(store.read_to_vec(pages[0]).unwrap() == long && store.read_to_vec(pages[1]).unwrap() == short);
    for refused in [store.lease(pages[1]).map(drop), store.pin(pages[1]).map(drop)] {
        let refused = refused.unwrap_err();
        assert!(
            matches!(refused, Error::Unavailable(Unavailable::Place { place: Place::Disk, .. })),
            "{refused}"
        );
        assert_eq!(refused.remedy(), Remedy::ChangeCall);
    }
    // Other pages use the freed memory.
    let other = commit(&store, |batch| _ = batch.create(LONG, Place::Host))[0];
    let refused = store.ensure(&pages, Place::Host).unwrap_err();
    assert!(matches!(refused, Error::OverBudget { place: Place::Host, .. }), "{refused}");
    commit(&store, |batch| _ = batch.delete(other));
    commit(&store, |batch| _ = batch.write(pages[0], 9, b"changed on disk"));
    store.ensure(&pages, Place::Host).unwrap();
    let mut changed = long.clone();
    changed[9..24].copy_from_slice(b"changed on disk");
    assert!(store.read_to_vec(pages[0]).unwrap() == changed && store.read_to_vec(pages[1]).unwrap() == short);
    assert_eq!(used(), LONG + SHORT);
    // Move and change a page in one batch, in both orders.
    commit(&store, |batch| _ = batch.move_to(pages[1], Place::Disk).write(pages[1], 0, b"after"));
    let mut batch = store.batch();
    batch.write(pages[0], 0, b"before").move_to(pages[0], Place::Disk);
    let refused = store.commit(batch).unwrap_err();
    assert!(matches!(refused, Error::Invalid(Invalid::Operation { index: 1, .. })), "{refused}");
    store.snapshot().unwrap();
    drop(store);
    let store = opened(&disk, small().memory(memory));
    let mut after = short;
    after[..5].copy_from_slice(b"after");
    assert_eq!(
        (store.page(pages[0]).unwrap().place, store.page(pages[1]).unwrap().place),
        (Place::Host, Place::Disk)
    );
    assert!(store.read_to_vec(pages[0]).unwrap() == changed && store.read_to_vec(pages[1]).unwrap() == after);
}

/// The first read of a long page verifies the whole page, and later reads access only the pieces that they
/// need. Each read of a short page reads all of it.
#[test]
fn partial_read_of_disk_page_reads_only_its_pieces() {
    const PIECE: u64 = 1 << 20;
    // Number of additional bytes: the blocks around the requested bytes, and the headers of images.
    const BESIDE: u64 = 16 << 10;
    let disk = Arc::new(InterruptedDisk::never(&SimDisk::new()));
    let store = Store::open_on(disk.clone(), Arc::new(HostDevice::new()), uncompressed()).unwrap();
    let (long, short) = (Random(1).bytes(LONG), Random(2).bytes(SHORT));
    let pages = commit(&store, |batch| {
        batch.create_from(long.clone(), Place::Disk);
        batch.create_from(short.clone(), Place::Disk);
    });
    store.snapshot().unwrap();
    store.wait_verified().unwrap();
    let read = |number: usize, at: u64, len: u64| {
        disk.bytes_read();
        let mut out = vec![0; len as usize];
        store.read(pages[number], at, &mut out).unwrap();
        assert!(out == [&long, &short][number][at as usize..(at + len) as usize], "{len} bytes from {at}");
        disk.bytes_read()
    };
    assert!((LONG..LONG + PIECE + BESIDE).contains(&read(0, 5, 10)), "all of it, once");
    for (at, len, pieces) in [(5, 10, 1), (PIECE + 100, 4096, 1), (PIECE - 50, 4096, 2), (LONG - 9, 9, 1)] {
        let found = read(0, at, len);
        assert!((len..pieces * (PIECE + BESIDE)).contains(&found), "{found} bytes for {len} from {at}");
    }
    assert!((LONG..LONG + BESIDE).contains(&read(0, 0, LONG)));
    for at in [0, 4000] {
        assert!((SHORT..SHORT + BESIDE).contains(&read(1, at, 7)));
    }
}

/// The image files of pages on disk are kept, and all others are removed. If pages are rewritten repeatedly,
/// the disk usage equals that of pages in memory.
#[test]
fn disk_use_is_bounded_and_images_survive() {
    let disk = SimDisk::new();
    let store = opened(&disk, without_memory().retention(Retention::new().snapshots_kept(1)));
    let mut plain = Random(5).bytes(200_000);
    let page = commit(&store, |batch| _ = batch.create_from(plain.clone(), Place::Disk))[0];
    let quiet = commit(&store, |batch| _ = batch.create_from(vec![9; 100_000], Place::Disk))[0];
    for round in 0..40_u64 {
        plain[round as usize] = round as u8;
        commit(&store, |batch| _ = batch.write(page, round, &[round as u8]));
        if round % 3 == 2 {
            store.snapshot().unwrap();
            assert_eq!(store.stats().pending_bytes, 0, "an image has what was written");
        }
        assert!(store.read_to_vec(page).unwrap() == plain);
        assert!(store.read_to_vec(quiet).unwrap() == [9; 100_000]);
    }
    let files = Files::of(&disk).0.into_iter().filter(|(file, _)| file.folder() == Folder::Pages);
    let bytes: usize = files.map(|(_, bytes)| bytes.len()).sum();
    assert!(bytes <= 2 * 2 * 300_000 + 200_000, "{bytes}");
}

/// The bytes written between two snapshots exceed the limit of pending bytes. With background snapshots,
/// commits wait. Without them, commits fail and change nothing.
#[test]
fn pending_bytes_are_bounded() {
    on_each_device(|| {
        let disk = SimDisk::new();
        let options = || small().memory(MemoryOptions::new().budget(Place::Disk, 64 << 10));
        let store = opened(&disk, options().with(|options| options.snapshots.log_bytes = None));
        let page = commit(&store, |batch| _ = batch.create(1 << 20, Place::Disk))[0];
        let write = |store: &Store, number: u64| {
            let mut batch = store.batch();
            batch.write(page, number * 8192, &[number as u8; 8192]);
            store.commit(batch).map(drop)
        };
        let refused = (0..100).find_map(|number| write(&store, number).err()).unwrap();
        let Error::OverBudget { place: Place::Disk, budget, .. } = refused else { panic!("{refused}") };
        assert_eq!((budget, refused.remedy()), (64 << 10, Remedy::FreeSpace));
        store.snapshot().unwrap();
        write(&store, 0).unwrap();
        drop(store);
        let store = opened(&disk, options().with(|options| options.snapshots.log_bytes = Some(1 << 30)));
        for number in 0..100 {
            write(&store, number).unwrap();
        }
        let bytes = store.read_to_vec(page).unwrap();
        assert!((0..100).all(|number| bytes[number * 8192] == number as u8));
        assert!(!store.snapshots().is_empty());
    });
}

/// After a restore and in a fork, pages have the places of the earlier state, including the disk.
#[test]
fn restores_and_forks_have_pages_on_disk() {
    on_each_device(|| {
        let disk = SimDisk::new();
        let store = opened(&disk, small().retention(Retention::new().log_kept(1 << 30)));
        let pages = commit(&store, |batch| {
            batch.create_from(Random(1).bytes(SHORT), Place::Disk);
            batch.create_from(Random(2).bytes(SHORT), Place::Host);
        });
        commit(&store, |batch| _ = batch.write(pages[0], 0, b"then").write(pages[1], 0, b"then"));
        let then = store.lsn();
        let was = pages.iter().map(|page| store.read_to_vec(*page).unwrap()).collect::<Vec<_>>();
        commit(&store, |batch| _ = batch.write(pages[0], 0, b"now!").write(pages[1], 0, b"now!"));
        move_to(&store, pages[0], Place::Host);
        move_to(&store, pages[1], Place::Disk);
        store.snapshot().unwrap();
        store.restore(StatePoint::Lsn(then)).unwrap();
        let places =
            |store: &Store| pages.iter().map(|page| store.page(*page).unwrap().place).collect::<Vec<_>>();
        let bytes =
            |store: &Store| pages.iter().map(|page| store.read_to_vec(*page).unwrap()).collect::<Vec<_>>();
        assert_eq!(places(&store), [Place::Disk, Place::Host]);
        assert!(bytes(&store) == was);
        commit(&store, |batch| _ = batch.write(pages[0], 1, b"later"));
        let now = bytes(&store);
        let view = store.view().unwrap();
        let mut seen = [0; 6];
        view.read(pages[0], 0, &mut seen).unwrap();
        assert_eq!(&seen, b"tlater");
        drop(view);
        store.snapshot().unwrap();
        drop(store);
        let store = opened(&disk, small().memory(MemoryOptions::new().load(PageLoad::OnDemand)));
        assert_eq!((places(&store), bytes(&store)), (vec![Place::Disk, Place::Host], now));
        assert!(store.audit().unwrap().changed.is_empty());
    });
}

/// A damaged image is reported only to readers of its page. Other pages can be used, and the damaged page can
/// be used after a batch has written new bytes.
#[test]
fn damage_affects_only_the_page() {
    let disk = SimDisk::new();
    let store = opened(&disk, uncompressed());
    let pages = commit(&store, |batch| {
        batch.create_from(vec![1; 300_000], Place::Disk);
        batch.create_from(vec![2; 300_000], Place::Disk);
    });
    store.snapshot().unwrap();
    drop(store);
    let mut files = Files::of(&disk);
    let position = |bytes: &[u8]| bytes.windows(64).position(|bytes| bytes == [1; 64]);
    let is_image = |file: &FileName| file.folder() == Folder::Pages;
    let of_images = files.0.iter_mut().filter(|(file, _)| is_image(file));
    let damaged = of_images.filter_map(|(_, bytes)| Some((position(bytes)?, bytes)));
    damaged.for_each(|(at, bytes)| bytes[at + 1000] ^= 4);
    let store = opened(&files.disk(), uncompressed());
    let damaged = store.read_to_vec(pages[0]).unwrap_err();
    let Error::Damaged(damage) = &damaged else { panic!("{damaged}") };
    assert!(matches!(damage.file, FileName::Pages(_)));
    assert!(store.read_to_vec(pages[1]).unwrap() == [2; 300_000]);
    commit(&store, |batch| _ = batch.write(pages[0], 0, &[3; 300_000]));
    assert!(store.read_to_vec(pages[0]).unwrap() == [3; 300_000]);
    store.snapshot().unwrap();
    assert!(store.read_to_vec(pages[0]).unwrap() == [3; 300_000]);
}

/// A page with an image of a snapshot needs no other image to move to disk. If that image is damaged on the
/// medium, another one is written while the bytes are still in memory.
#[test]
fn image_is_verified_before_memory_is_freed() {
    on_each_device(|| {
        let disk = SimDisk::new();
        let store = opened(&disk, uncompressed());
        let pages = commit(&store, |batch| {
            [1, 2, 3].iter().for_each(|byte| _ = batch.create_from(vec![*byte; 5000], Place::Host));
        });
        store.snapshot().unwrap();
        store.wait_verified().unwrap();
        let images = |disk: &SimDisk| {
            let files = Files::of(disk).0;
            files.into_iter().filter(|(file, _)| file.folder() == Folder::Pages).collect::<Vec<_>>()
        };
        let before = images(&disk);
        for (file, bytes) in &before {
            if let Some(at) = bytes.windows(64).position(|bytes| bytes == [2; 64]) {
                disk.damage(*file, at as u64 + 1000, &[9]);
            }
        }
        commit(&store, |batch| pages.iter().for_each(|page| _ = batch.move_to(*page, Place::Disk)));
        let of_page = |byte: u8| {
            let has_image = |bytes: &[u8]| bytes.windows(64).any(|bytes| bytes == [byte; 64]);
            images(&disk).iter().filter(|(_, bytes)| has_image(bytes)).count()
        };
        for (page, byte) in pages.iter().zip(1..) {
            assert!(store.read_to_vec(*page).unwrap() == [byte; 5000], "{page}");
        }
        let counts = [1, 2, 3].map(of_page);
        assert_eq!(
            counts,
            [counts[0], counts[0] + 1, counts[0]],
            "another image of the page whose image was damaged"
        );
    });
}

/// An open reads an image that the log names and no snapshot has verified, so that damage is reported while
/// the log that can repair it still exists.
#[test]
fn open_verifies_unverified_images() {
    let disk = SimDisk::new();
    let store = opened(&disk, uncompressed());
    let page = commit(&store, |batch| _ = batch.create_from(vec![1; 300_000], Place::Disk))[0];
    commit(&store, |batch| _ = batch.write(page, 5, b"later"));
    drop(store);
    let sound = Files::of(&disk);
    let mut damaged = sound.clone();
    let of_images = damaged.0.iter_mut().filter(|(file, _)| file.folder() == Folder::Pages);
    of_images.for_each(|(_, bytes)| {
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
    });
    let refused =
        Store::open_on(Arc::new(damaged.disk()), Arc::new(HostDevice::new()), uncompressed()).map(drop);
    assert!(matches!(refused, Err(Error::Damaged(_))), "{refused:?}");
    let mut bytes = vec![1; 300_000];
    bytes[5..10].copy_from_slice(b"later");
    assert!(opened(&sound.disk(), uncompressed()).read_to_vec(page).unwrap() == bytes);
}

/// A page moves to disk and back while other threads write it, read it and take snapshots. No write is lost,
/// and each read returns the bytes of one batch.
#[test]
fn moves_writes_and_reads_run_concurrently() {
    on_each_device(|| {
        const WRITES: u64 = 300;
        let disk = SimDisk::new();
        let store = opened(&disk, small());
        let page = commit(&store, |batch| _ = batch.create(64 << 10, Place::Host))[0];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..2_u64)
                .map(|writer| {
                    let store = &store;
                    scope.spawn(move || {
                        for number in 1..=WRITES {
                            // Write the same number at both ends, so that a reader can check that its bytes
                            // are those of one batch.
                            let number = number.to_le_bytes();
                            let at = 8 * writer;
                            commit(store, |batch| {
                                batch.write(page, at, &number).write(page, (63 << 10) + at, &number);
                            });
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                let mut round = 0;
                while !is_over.load(Ordering::Relaxed) {
                    move_to(&store, page, if round % 2 == 0 { Place::Disk } else { Place::Host });
                    if round % 5 == 0 {
                        store.snapshot().unwrap();
                    }
                    round += 1;
                }
            });
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let bytes = store.read_to_vec(page).unwrap();
                    assert_eq!(bytes[..16], bytes[63 << 10..][..16]);
                }
            });
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
        });
        let check = |store: &Store| {
            let bytes = store.read_to_vec(page).unwrap();
            let expected = [WRITES.to_le_bytes(), WRITES.to_le_bytes()].concat();
            assert_eq!((&bytes[..16], &bytes[63 << 10..][..16]), (&expected[..], &expected[..]));
        };
        check(&store);
        assert!(store.audit().unwrap().changed.is_empty());
        drop(store);
        check(&opened(&disk, small()));
    });
}

/// A store with far more pages than memory opens, reads and writes within its memory budget.
#[test]
fn a_store_holds_more_pages_than_memory() {
    on_each_device(|| {
        const PAGES: u64 = 400;
        let disk = SimDisk::new();
        let options = || {
            small()
                .memory(MemoryOptions::new().budget(Place::Host, 1 << 20))
                .with(|options| options.log.segment_len = 1 << 20)
        };
        let store = opened(&disk, options());
        let keys = |number: u64| remanent::Key::new(format!("page {number}")).unwrap();
        for first in (0..PAGES).step_by(50) {
            commit(&store, |batch| {
                for number in first..first + 50 {
                    batch.create_from(vec![number as u8; 64 << 10], Place::Disk).key(keys(number));
                }
            });
        }
        store.snapshot().unwrap();
        drop(store);
        let store = opened(&disk, options());
        let page = |number: u64| store.page_by_key(keys(number)).unwrap().page;
        // As in a cache, the newest pages are in memory, and each page replaces another.
        for number in 0..PAGES {
            store.ensure(&[page(number)], Place::Host).unwrap();
            assert!(store.read_to_vec(page(number)).unwrap() == vec![number as u8; 64 << 10]);
            if number >= 15 {
                store.ensure(&[page(number - 15)], Place::Disk).unwrap();
            }
        }
        let written = store.snapshot().unwrap().bytes_written;
        assert_eq!(written, 0, "pages that only moved are not written again");
    });
}

/// However pages move to and from disk, the counters agree with the page table.
#[test]
fn pages_on_disk_are_counted() {
    let disk = SimDisk::new();
    let options = || small().ack(Ack::Applied);
    let mut store = opened(&disk, options());
    let mut random = Random(31);
    let places = [Place::Host, Place::Disk, Place::Device(0)];
    let check = |store: &Store, what: &str| {
        let on_disk = store.pages().unwrap().filter(|info| info.place == Place::Disk);
        let lens: Vec<u64> = on_disk.map(|info| info.len).collect();
        let found = store.stats().on_disk;
        assert_eq!((found.pages, found.bytes), (lens.len() as u64, lens.iter().sum()), "{what}");
    };
    let (mut pages, mut earlier) = (Vec::new(), None);
    for round in 0..120 {
        let place = places[random.below(3) as usize];
        match random.below(6) {
            0 | 1 => pages.extend(commit(&store, |batch| {
                batch.create_from(vec![1; random.below(9000) as usize], place);
                batch.create(random.below(100), Place::Disk);
            })),
            _ if pages.is_empty() => {}
            kind => {
                let at = random.below(pages.len() as u64) as usize;
                let page = pages[at];
                commit(&store, |batch| match kind {
                    2 => _ = batch.delete(page),
                    3 => _ = batch.resize(page, random.below(9000)),
                    _ => _ = batch.move_to(page, place),
                });
                if kind == 2 {
                    pages.swap_remove(at);
                }
            }
        }
        check(&store, &format!("round {round}"));
        match round {
            60 => {
                earlier = Some(store.snapshot().unwrap().id);
                store.close().unwrap();
                store = opened(&disk, options());
                check(&store, "after an open");
            }
            90 => {
                store.restore(StatePoint::Snapshot(earlier.unwrap())).unwrap();
                pages = store.pages().unwrap().map(|info| info.page).collect();
                check(&store, "after a restore");
            }
            _ => {}
        }
    }
}
