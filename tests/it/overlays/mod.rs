//! Overlays. For a long page on disk with small changes, a snapshot writes only the changes.

mod life;

use std::sync::Arc;

use remanent::disk::Disk;
use remanent::error::{FileName, Folder};
use remanent::options::ImageIo;
use remanent::snapshot::{SnapshotInfo, SnapshotPhase};
use remanent::store::ReadPages;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, StatePoint, Store, View};
use remanent_format::image::{Codec, ImageRef};
use remanent_format::state::survey::Survey;

use crate::faults::disk_full::until;
use crate::files::{Files, small};
use crate::gpu::on_each_device;
use crate::kill::workload::Random;
use crate::pages_on_disk::{commit, move_to, opened, uncompressed};
use crate::with_options::With;

/// Length of the page, longer than the bytes that are read in one piece, and not a multiple of any block
/// size.
const LONG: u64 = (3 << 20) + 77;

/// Creates a page of random bytes on disk, and takes a snapshot.
fn sample(disk: &SimDisk, options: Options, random: &mut Random) -> (Store, PageId, Vec<u8>) {
    let store = opened(disk, options);
    let plain = random.bytes(LONG);
    let page = commit(&store, |batch| _ = batch.create_from(plain.clone(), Place::Disk))[0];
    store.snapshot().unwrap();
    (store, page, plain)
}

/// Writes `len` bytes at a random offset, to the page and to its expected content.
fn write(store: &Store, page: PageId, plain: &mut [u8], len: usize, random: &mut Random) {
    let at = random.next() as usize % (plain.len() - len);
    let bytes = random.bytes(len as u64);
    plain[at..at + len].copy_from_slice(&bytes);
    commit(store, |batch| _ = batch.write(page, at as u64, &bytes));
}

/// Returns the image of a page that a snapshot names.
pub fn image_of(disk: &SimDisk, snapshot: &SnapshotInfo, page: PageId) -> ImageRef {
    let survey = Survey::read(&Files::of(disk)).unwrap();
    let manifest = survey.snapshot(snapshot.id).unwrap();
    manifest.entries.iter().find(|entry| entry.page == page).unwrap().image.unwrap()
}

fn is_overlay(image: &ImageRef) -> bool {
    matches!(image.codec, Codec::Overlay(_))
}

/// Returns the total length of all image files in bytes.
fn image_bytes(disk: &SimDisk) -> usize {
    let files = Files::of(disk).0;
    files.iter().filter(|(file, _)| file.folder() == Folder::Pages).map(|(_, bytes)| bytes.len()).sum()
}

/// Each snapshot writes the changes since the base image, until they exceed an eighth of the page. Then the
/// whole page is written and becomes the new base. Tests each mode of writing images, with and without
/// compression.
#[test]
fn snapshot_writes_only_changes_of_a_long_page() {
    for (number, options) in [
        uncompressed().with(|options| options.images.io = ImageIo::Buffered),
        uncompressed().with(|options| options.images.io = ImageIo::Mapped),
        uncompressed().with(|options| options.images.io = ImageIo::Direct),
        small(),
    ]
    .into_iter()
    .enumerate()
    {
        let (disk, mut random) = (SimDisk::new(), Random(number as u64));
        let options = options.with(|options| options.retention.snapshots_kept = 1);
        let (mut store, page, mut plain) = sample(&disk, options.clone(), &mut random);
        let (mut overlays, mut wholes) = (0, 0);
        for round in 0..40 {
            // Some writes overlap earlier ones, and some cross the boundary of the bytes that are read in one
            // piece.
            (0..3).for_each(|_| write(&store, page, &mut plain, 9000, &mut random));
            let snapshot = store.snapshot().unwrap();
            let (image, written) = (image_of(&disk, &snapshot, page), snapshot.bytes_written);
            if is_overlay(&image) {
                overlays += 1;
                assert!((27_000..LONG / 8).contains(&written), "{written} bytes in round {round}");
                assert!(image.files().count() == 2);
            } else {
                wholes += 1;
                assert!(overlays > 5, "whole in round {round}");
            }
            if round % 5 == 4 {
                drop(store);
                store = opened(&disk, options.clone());
            }
            assert!(store.read_to_vec(page).unwrap() == plain, "round {round}");
            let mut part = vec![0; 5000];
            store.read(page, 1_000_000, &mut part).unwrap();
            assert!(part == plain[1_000_000..1_005_000]);
            // The files contain the page, the overlay, and images that are about to be removed.
            assert!(image_bytes(&disk) < 4 * LONG as usize, "{} bytes of images", image_bytes(&disk));
        }
        assert!(overlays > 20 && wholes >= 2, "{overlays} and {wholes}");
        assert!(store.audit().unwrap().changed.is_empty());
    }
}

/// A page moves to disk while a snapshot captures other pages, and its image is written before the snapshot
/// reaches it. The base of its overlay is then newer than the snapshot's own file.
#[test]
fn base_image_may_be_newer_than_snapshot_files() {
    let (disk, mut random) = (SimDisk::new(), Random(11));
    let options = || {
        uncompressed().with(|options| {
            options.images.chunk_len = Some(4096);
            options.log.segment_len = 1 << 20;
        })
    };
    let store = opened(&disk, options());
    let others = commit(&store, |batch| (0..64).for_each(|_| _ = batch.create(16 << 10, Place::Host)));
    let mut plain = random.bytes(20_000);
    let page = commit(&store, |batch| _ = batch.create_from(plain.clone(), Place::Host))[0];
    let mut newer = 0;
    for round in 0..200_u8 {
        commit(&store, |batch| others.iter().for_each(|page| _ = batch.fill(*page, 0, 16 << 10, &[round])));
        move_to(&store, page, Place::Host);
        write(&store, page, &mut plain, 100, &mut random);
        let snapshot = std::thread::scope(|scope| {
            let taken = scope.spawn(|| store.snapshot());
            let is_gathering = || store.stats().snapshots.phase == SnapshotPhase::Gather;
            until(|| is_gathering() || taken.is_finished());
            move_to(&store, page, Place::Disk);
            write(&store, page, &mut plain, 100, &mut random);
            taken.join().unwrap().unwrap()
        });
        let image = image_of(&disk, &snapshot, page);
        let files: Vec<u64> = image.files().map(|(file, _)| file).collect();
        newer += usize::from(files.len() == 2 && files[1] > files[0]);
        if newer == 3 {
            break;
        }
    }
    assert_eq!(newer, 3, "no page went to disk while a snapshot was under way");
    assert!(store.read_to_vec(page).unwrap() == plain);
    drop(store);
    let store = opened(&disk, options());
    assert!(store.read_to_vec(page).unwrap() == plain);
    assert!(store.audit().unwrap().changed.is_empty());
}

/// The base of an overlay is kept while any snapshot, reader, fork or restore table has the overlay.
#[test]
fn overlay_base_is_kept_while_needed() {
    on_each_device(|| {
        let (disk, mut random) = (SimDisk::new(), Random(7));
        let options = uncompressed().with(|options| {
            options.retention.snapshots_kept = 1;
            options.retention.log_kept = 1 << 30;
        });
        let (store, page, mut plain) = sample(&disk, options.clone(), &mut random);
        write(&store, page, &mut plain, 100, &mut random);
        let first = store.snapshot().unwrap();
        let (then, image) = (plain.clone(), image_of(&disk, &first, page));
        assert!(is_overlay(&image));
        let (base, _) = image.files().last().unwrap();
        let shared: Arc<dyn Disk> = Arc::new(disk.clone());
        let view = View::open_on(&shared, Some(&StatePoint::Lsn(first.end))).unwrap();
        let forked = SimDisk::new();
        view.fork_on(&(Arc::new(forked.clone()) as Arc<dyn Disk>)).unwrap();
        // The whole page changes, and the earlier snapshots are removed.
        for _ in 0..3 {
            plain = random.bytes(LONG);
            commit(&store, |batch| _ = batch.write(page, 0, &plain));
            store.snapshot().unwrap();
        }
        assert!(view.read_to_vec(page).unwrap() == then, "for a reader");
        drop(view);
        assert!(opened(&forked, options.clone()).read_to_vec(page).unwrap() == then, "for a fork");
        store.restore(StatePoint::Lsn(first.end)).unwrap();
        assert!(store.read_to_vec(page).unwrap() == then, "for a restore");
        drop(store);
        let store = opened(&disk, options);
        assert!(store.read_to_vec(page).unwrap() == then, "for an open after it");
        assert!(disk.bytes(FileName::Pages(base)).is_some());
    });
}

/// A page that leaves the disk, is resized or is written whole needs no overlay, and keeps its bytes.
#[test]
fn pages_with_overlays_move_to_any_place() {
    let (disk, mut random) = (SimDisk::new(), Random(8));
    let (store, page, mut plain) = sample(&disk, uncompressed(), &mut random);
    let check = |store: &Store, plain: &[u8], why: &str| {
        assert!(store.read_to_vec(page).unwrap() == plain, "{why}");
        drop(store.snapshot().unwrap());
        assert!(store.read_to_vec(page).unwrap() == plain, "{why}, in a snapshot");
    };
    write(&store, page, &mut plain, 100, &mut random);
    check(&store, &plain, "an overlay");
    move_to(&store, page, Place::Host);
    check(&store, &plain, "in memory");
    write(&store, page, &mut plain, 100, &mut random);
    move_to(&store, page, Place::Disk);
    check(&store, &plain, "on disk again");
    write(&store, page, &mut plain, 100, &mut random);
    check(&store, &plain, "an overlay again");
    for len in [LONG / 2, LONG, LONG + 5000] {
        commit(&store, |batch| _ = batch.resize(page, len));
        plain.resize(len as usize, 0);
        write(&store, page, &mut plain, 100, &mut random);
        check(&store, &plain, "resized");
        write(&store, page, &mut plain, 100, &mut random);
        let snapshot = store.snapshot().unwrap();
        assert!(is_overlay(&image_of(&disk, &snapshot, page)), "over the image of its new length");
    }
    move_to(&store, page, Place::Host);
    drop(store);
    let store = opened(&disk, uncompressed());
    assert!(store.read_to_vec(page).unwrap() == plain);
    assert!(store.audit().unwrap().changed.is_empty());
}

/// A short page, or a page with many small changes, is written whole, because an overlay would not be
/// smaller.
#[test]
fn short_pages_are_written_whole() {
    let (disk, mut random) = (SimDisk::new(), Random(9));
    let store = opened(&disk, uncompressed());
    let pages = commit(&store, |batch| {
        batch.create_from(random.bytes(64 << 10), Place::Disk);
        batch.create_from(random.bytes(1 << 20), Place::Disk);
    });
    store.snapshot().unwrap();
    commit(&store, |batch| {
        batch.write(pages[0], 9, b"little");
        (0..8000).for_each(|at| _ = batch.write(pages[1], 130 * at, b"much"));
    });
    let snapshot = store.snapshot().unwrap();
    assert!(pages.iter().all(|page| !is_overlay(&image_of(&disk, &snapshot, *page))));
    assert_eq!(snapshot.bytes_written, (64 << 10) + (1 << 20));
}

/// An image that a batch wrote and that has not been verified yet is not used as a base, because the snapshot
/// would depend on it.
#[test]
fn unverified_image_is_no_base() {
    let (disk, mut random) = (SimDisk::new(), Random(11));
    let (store, page, mut plain) = sample(&disk, uncompressed(), &mut random);
    let mut next = |store: &Store, plain: &mut [u8]| {
        write(store, page, plain, 100, &mut random);
        let snapshot = store.snapshot().unwrap();
        image_of(&disk, &snapshot, page)
    };
    assert!(is_overlay(&next(&store, &mut plain)), "read back by the snapshot before");
    plain = Random(12).bytes(LONG);
    commit(&store, |batch| _ = batch.write(page, 0, &plain));
    assert!(!is_overlay(&next(&store, &mut plain)), "written ahead since");
    assert!(is_overlay(&next(&store, &mut plain)), "read back by the snapshot before");
    drop(store);
    assert!(is_overlay(&next(&opened(&disk, uncompressed()), &mut plain)), "read back by the open");
}

/// A page whose base is in a file that is to be emptied is written whole, and the file is removed.
#[test]
fn overlay_is_not_based_on_mostly_unused_file() {
    let (disk, mut random) = (SimDisk::new(), Random(12));
    let store = opened(&disk, uncompressed().with(|options| options.retention.snapshots_kept = 1));
    let (mut plain, lens) = (random.bytes(LONG), [LONG, 3 * LONG]);
    let pages = commit(&store, |batch| {
        batch.create_from(plain.clone(), Place::Disk);
        batch.create_from(random.bytes(lens[1]), Place::Disk);
    });
    let first = store.snapshot().unwrap();
    let shared = image_of(&disk, &first, pages[0]).file;
    assert_eq!(shared, image_of(&disk, &first, pages[1]).file);
    // From now on, most of the file is unused.
    commit(&store, |batch| _ = batch.write(pages[1], 0, &random.bytes(lens[1])));
    write(&store, pages[0], &mut plain, 100, &mut random);
    let second = store.snapshot().unwrap();
    assert!(is_overlay(&image_of(&disk, &second, pages[0])));
    write(&store, pages[0], &mut plain, 100, &mut random);
    let third = store.snapshot().unwrap();
    assert!(!is_overlay(&image_of(&disk, &third, pages[0])), "its base keeps the file");
    store.prune(&Default::default()).unwrap();
    assert!(disk.bytes(FileName::Pages(shared)).is_none());
    assert!(store.read_to_vec(pages[0]).unwrap() == plain);
}

/// A page whose overlay and base are in two files that are to be emptied is captured once.
#[test]
fn page_in_two_wasteful_files_is_listed_once() {
    let (disk, mut random) = (SimDisk::new(), Random(14));
    let store = opened(&disk, uncompressed().with(|options| options.retention.snapshots_kept = 1));
    let mut page_of = |lens: &[u64]| {
        let bytes: Vec<Vec<u8>> = lens.iter().map(|len| random.bytes(*len)).collect();
        let pages = commit(&store, |batch| {
            bytes.iter().for_each(|bytes| _ = batch.create_from(bytes.clone(), Place::Disk));
        });
        (pages, bytes)
    };
    let (first, mut of_first) = page_of(&[300_000, 900_000]);
    let (others, mut of_others) = page_of(&[300_000; 10]);
    store.snapshot().unwrap();
    let mut change = |pages: &[PageId], plain: &mut [Vec<u8>]| {
        pages.iter().zip(plain).for_each(|(page, bytes)| write(&store, *page, bytes, 3000, &mut random));
    };
    change(&first[..1], &mut of_first);
    change(&others, &mut of_others);
    let overlaid = store.snapshot().unwrap();
    let overlaid = image_of(&disk, &overlaid, first[0]);
    assert!(is_overlay(&overlaid));
    change(&others, &mut of_others);
    of_first[1] = Random(15).bytes(900_000);
    commit(&store, |batch| _ = batch.write(first[1], 0, &of_first[1]));
    store.snapshot().unwrap();
    // Now only a small part of the overlay's file and of the base's file is still used.
    change(&others[..1], &mut of_others);
    let last = store.snapshot().unwrap();
    for (page, bytes) in first.iter().zip(&of_first).chain(others.iter().zip(&of_others)) {
        assert!(store.read_to_vec(*page).unwrap() == *bytes, "{page}");
    }
    let files: Vec<u64> = overlaid.files().map(|(file, _)| file).collect();
    let now = image_of(&disk, &last, first[0]);
    assert!(now.files().all(|(file, _)| !files.contains(&file)), "both were emptied: {now:?}");
}

/// A file of overlays is emptied by rewriting the overlays instead of the pages.
#[test]
fn overlay_file_is_compacted_cheaply() {
    const LEN: u64 = 300_000;
    let (disk, mut random) = (SimDisk::new(), Random(13));
    let store = opened(&disk, uncompressed().with(|options| options.retention.snapshots_kept = 1));
    let mut plain: Vec<Vec<u8>> = (0..20).map(|_| random.bytes(LEN)).collect();
    let pages = commit(&store, |batch| {
        plain.iter().for_each(|bytes| _ = batch.create_from(bytes.clone(), Place::Disk));
    });
    store.snapshot().unwrap();
    let mut change = |plain: &mut [Vec<u8>], count: usize| {
        let changed = pages.iter().zip(plain).take(count);
        changed.for_each(|(page, bytes)| write(&store, *page, bytes, 3000, &mut random));
        store.snapshot().unwrap()
    };
    let first = change(&mut plain, 20);
    let shared = image_of(&disk, &first, pages[19]).file;
    // Most of the overlays are replaced, so the file is to be emptied.
    change(&mut plain, 15);
    let last = change(&mut plain, 1);
    assert!(last.bytes_written < 40_000, "{} bytes", last.bytes_written);
    assert!(image_of(&disk, &last, pages[19]).file != shared);
    for (page, bytes) in pages.iter().zip(&plain) {
        assert!(is_overlay(&image_of(&disk, &last, *page)) && store.read_to_vec(*page).unwrap() == *bytes);
    }
}

/// If a scrub finds damage to a base, all overlays over this base are unusable. The page is not treated as
/// intact, and gets no more overlays over this base.
#[test]
fn damaged_base_gets_no_new_overlay() {
    let (disk, mut random) = (SimDisk::new(), Random(16));
    let (store, page, mut plain) =
        sample(&disk, uncompressed().with(|options| options.retention.snapshots_kept = 3), &mut random);
    let mut images = Vec::new();
    for _ in 0..2 {
        write(&store, page, &mut plain, 100, &mut random);
        let snapshot = store.snapshot().unwrap();
        images.push(image_of(&disk, &snapshot, page));
    }
    let bases: Vec<(u64, u64)> = images.iter().map(|image| image.files().last().unwrap()).collect();
    assert!(images.iter().all(is_overlay) && bases[0] == bases[1]);
    disk.damage(FileName::Pages(bases[0].0), 4096 + 2_000_000, &[1, 2, 3, 4]);
    let found = store.scrub().unwrap();
    let is_base = |damage: &remanent::error::Damage| damage.file == FileName::Pages(bases[0].0);
    assert!(found.damage.iter().any(is_base), "{found:?}");
    // Neither overlay can be used, although the damage was found through only one of them.
    write(&store, page, &mut plain, 100, &mut random);
    let refused = store.snapshot().unwrap_err();
    assert!(matches!(refused, Error::Damaged(_)), "{refused}");
    plain = random.bytes(LONG);
    commit(&store, |batch| _ = batch.write(page, 0, &plain));
    let snapshot = store.snapshot().unwrap();
    assert!(!is_overlay(&image_of(&disk, &snapshot, page)) && store.read_to_vec(page).unwrap() == plain);
    assert!(store.scrub().unwrap().damage.iter().all(is_base), "of the older snapshots");
}

/// A page with many changes of a few bytes is written whole, because a reader would have to keep a table of
/// all changes in memory.
#[test]
fn page_with_many_tiny_changes_is_written_whole() {
    let (disk, mut random) = (SimDisk::new(), Random(17));
    let (store, page, mut plain) = sample(&disk, uncompressed(), &mut random);
    commit(&store, |batch| {
        for at in (0..LONG as usize - 4).step_by(1000) {
            plain[at..at + 4].copy_from_slice(b"bits");
            batch.write(page, at as u64, b"bits");
        }
    });
    let snapshot = store.snapshot().unwrap();
    assert!(!is_overlay(&image_of(&disk, &snapshot, page)) && store.read_to_vec(page).unwrap() == plain);
    // With half as many changes, an overlay is written.
    commit(&store, |batch| {
        for at in (0..LONG as usize - 4).step_by(2100) {
            plain[at..at + 4].copy_from_slice(b"more");
            batch.write(page, at as u64, b"more");
        }
    });
    let snapshot = store.snapshot().unwrap();
    assert!(is_overlay(&image_of(&disk, &snapshot, page)) && store.read_to_vec(page).unwrap() == plain);
}

/// A bit flip in the base or in the overlay is detected by the next reader and by a scrub, which reports the
/// file. Other pages are not affected.
#[test]
fn damage_to_an_overlay_and_to_its_base_is_found() {
    for of_base in [false, true] {
        let (disk, mut random) = (SimDisk::new(), Random(10));
        let (store, page, mut plain) = sample(&disk, uncompressed(), &mut random);
        let other = commit(&store, |batch| _ = batch.create_from(vec![5; 200_000], Place::Disk))[0];
        store.snapshot().unwrap();
        write(&store, page, &mut plain, 100, &mut random);
        let snapshot = store.snapshot().unwrap();
        let image = image_of(&disk, &snapshot, page);
        let (file, len) =
            if of_base { image.files().last().unwrap() } else { (image.file, image.stored_len) };
        assert!(is_overlay(&image) && store.read_to_vec(page).unwrap() == plain);
        drop(store);
        let mut files = Files::of(&disk);
        let bytes = files.0.get_mut(&FileName::Pages(file)).unwrap();
        let at = if of_base { bytes.len() as u64 - len / 2 } else { image.offset + len - 1 };
        bytes[at as usize] ^= 1;
        let damaged = files.disk();
        let store = opened(&damaged, uncompressed());
        let refused = store.read_to_vec(page).unwrap_err();
        let Error::Damaged(damage) = &refused else { panic!("{refused}") };
        assert_eq!(damage.file, FileName::Pages(file));
        let found = store.scrub().unwrap();
        assert!(found.damage.iter().any(|damage| damage.file == FileName::Pages(file)), "{found:?}");
        assert!(store.read_to_vec(other).unwrap() == [5; 200_000]);
        // No snapshot can include the page, but the store continues to work.
        write(&store, page, &mut plain, 100, &mut random);
        let refused = store.snapshot().unwrap_err();
        assert!(matches!(refused, Error::Damaged(_)), "{refused}");
        // A page that is rewritten needs neither its base nor its overlay.
        plain = random.bytes(LONG);
        commit(&store, |batch| _ = batch.write(page, 0, &plain));
        let snapshot = store.snapshot().unwrap();
        assert!(
            store.read_to_vec(page).unwrap() == plain && !is_overlay(&image_of(&damaged, &snapshot, page))
        );
    }
}
