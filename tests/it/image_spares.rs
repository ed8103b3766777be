//! Later snapshots overwrite image files that are no longer needed. No reader accepts bytes of another image
//! (I13).

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use remanent::disk::Disk;
use remanent::error::{FileName, Folder, Invalid};
use remanent::follow::{FollowFrom, Follower};
use remanent::options::{Compression, ImageIo, ImageOptions};
use remanent::testing::sim_disk::{CrashPlan, SimDisk, SyncPoint, Tears};
use remanent::{Error, Options, PageId, Place, Retention, StatePoint, Store, View};
use remanent_format::state::survey::Survey;

use crate::files::{Files, State, open_with, small};
use crate::kill::workload::Random;
use crate::with_options::With;

const WAYS: [ImageIo; 3] = [ImageIo::Mapped, ImageIo::Buffered, ImageIo::Direct];
const LEN: u64 = 100_000;

/// Options that keep one snapshot and permit the reuse of files of any length.
fn options() -> Options {
    small()
        .retention(Retention::new().snapshots_kept(1))
        .images(ImageOptions::new().chunk_len(LEN).compression(Compression::Off))
}

/// Creates pages, and takes a snapshot of them.
fn begin(store: &Store, count: u64) -> Vec<PageId> {
    let mut batch = store.batch();
    for _ in 0..count {
        batch.create(LEN, Place::Host);
    }
    let pages = store.commit(batch).unwrap().pages;
    rewrite(store, &pages, 1);
    pages
}

/// Changes a part of each page, and takes a snapshot, which writes all pages.
fn rewrite(store: &Store, pages: &[PageId], seed: u64) {
    change(store, pages, seed);
    store.snapshot().unwrap();
}

fn change(store: &Store, pages: &[PageId], seed: u64) {
    let mut batch = store.batch();
    for page in pages {
        batch.write(*page, 0, &Random(seed * 1000 + page.0).bytes(LEN / 20));
    }
    store.commit(batch).unwrap();
}

fn reused(store: &Store) -> u64 {
    store.stats().snapshots.files_reused
}

/// Returns the names of image files with their inodes and lengths.
fn inodes(directory: &Path) -> BTreeMap<FileName, (u64, u64)> {
    let files = std::fs::read_dir(directory.join("pages")).unwrap().map(|entry| {
        let entry = entry.unwrap();
        let (metadata, name) = (entry.metadata().unwrap(), entry.file_name().into_string().unwrap());
        (FileName::parse(Folder::Pages, &name).unwrap(), (metadata.ino(), metadata.len()))
    });
    files.collect()
}

fn spares(disk: &SimDisk) -> Vec<(FileName, u64)> {
    let files = Files::of(disk).0.into_iter();
    let spares = files.filter(|(file, _)| matches!(file, FileName::ImageSpare(_)));
    spares.map(|(file, bytes)| (file, bytes.len() as u64)).collect()
}

/// Returns the number of bytes in image files and spares.
fn image_bytes(disk: &SimDisk) -> u64 {
    let files = Files::of(disk).0.into_iter();
    let files = files.filter(|(file, _)| matches!(file, FileName::Pages(_) | FileName::ImageSpare(_)));
    files.map(|(_, bytes)| bytes.len() as u64).sum()
}

#[test]
fn files_that_snapshots_free_are_written_again_in_place() {
    for io in WAYS {
        let directory = tempfile::tempdir().unwrap();
        let open = || match options().with(|options| options.images.io = io).open(directory.path()) {
            Err(Error::Invalid(Invalid::Option { .. })) => {
                eprintln!("SKIPPED: {io} images in {}", directory.path().display());
                None
            }
            opened => Some(opened.unwrap()),
        };
        let Some(store) = open() else { continue };
        let pages = begin(&store, 2);
        let first = inodes(directory.path());
        let [(FileName::Pages(_), (inode, _))] = first.iter().map(|(f, i)| (*f, *i)).collect::<Vec<_>>()[..]
        else {
            panic!("{io}: {first:?}")
        };
        rewrite(&store, &pages, 2);
        let is_spare = |file: &FileName| matches!(file, FileName::ImageSpare(_));
        let second = inodes(directory.path());
        assert_eq!(second.iter().find(|(file, _)| is_spare(file)).unwrap().1.0, inode, "{io}: {second:?}");
        rewrite(&store, &pages, 3);
        let third = inodes(directory.path());
        let (name, _) = third.iter().find(|(_, (other, _))| *other == inode).unwrap();
        assert!(matches!(name, FileName::Pages(_)), "{io}: {third:?}");
        assert_eq!(reused(&store), 1, "{io}");
        let state = State::of(&store);
        store.close().unwrap();

        let store = open().unwrap();
        assert_eq!(State::of(&store), state, "{io}");
        assert_eq!(inodes(directory.path()).len(), 1, "{io}: a close removes spares");
        rewrite(&store, &pages, 4);
        rewrite(&store, &pages, 5);
        assert_eq!(reused(&store), 1, "{io}");
        assert_eq!(inodes(directory.path()).len(), 2, "{io}");
        // A prune by the caller also removes spares.
        store.prune(&Retention::default().snapshots_kept(1)).unwrap();
        assert_eq!(inodes(directory.path()).keys().filter(|file| is_spare(file)).count(), 0, "{io}");
        let state = State::of(&store);
        store.close().unwrap();
        assert_eq!(State::of(&open().unwrap()), state, "{io}");
    }
}

#[test]
fn file_shared_with_fork_is_not_reused() {
    let (directory, beside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = options().open(directory.path()).unwrap();
    let pages = begin(&store, 2);
    let state = State::of(&store);
    let view = Store::open_at(directory.path(), StatePoint::Snapshot(store.snapshots()[0].id)).unwrap();
    view.fork(beside.path()).unwrap();
    drop(view);
    for seed in 2..6 {
        rewrite(&store, &pages, seed);
    }
    assert!(reused(&store) > 0);
    let shared: Vec<u64> = inodes(beside.path()).into_values().map(|(inode, _)| inode).collect();
    // Keep the files open, so that their inode numbers are not reused.
    let files = inodes(beside.path()).into_keys();
    let _open: Vec<_> =
        files.map(|file| std::fs::File::open(beside.path().join(file.to_string())).unwrap()).collect();
    assert!(inodes(directory.path()).values().all(|(inode, _)| !shared.contains(inode)));

    let fork = options().open(beside.path()).unwrap();
    assert_eq!(State::of(&fork), state);
    // After the ancestor is removed, its file has one link. Readers of the ancestor hold no lock in this
    // store.
    store.close().unwrap();
    drop(directory);
    rewrite(&fork, &pages, 7);
    assert!(inodes(beside.path()).values().all(|(inode, _)| !shared.contains(inode)), "it is unlinked");
    rewrite(&fork, &pages, 8);
    rewrite(&fork, &pages, 9);
    assert!(reused(&fork) > 0, "files of its own are written again");
}

/// A backup by hard links that is taken while the store is open keeps its bytes.
#[test]
fn hard_linked_spare_is_not_reused() {
    let directory = tempfile::tempdir().unwrap();
    let store = options().open(directory.path()).unwrap();
    let pages = begin(&store, 2);
    rewrite(&store, &pages, 2);
    let spare = |file: &&FileName| matches!(file, FileName::ImageSpare(_));
    let found = inodes(directory.path());
    let spare = directory.path().join(found.keys().find(spare).unwrap().to_string());
    let copy = directory.path().join("copy");
    std::fs::hard_link(&spare, &copy).unwrap();
    let before = std::fs::read(&copy).unwrap();
    for seed in 3..6 {
        rewrite(&store, &pages, seed);
    }
    assert!(std::fs::read(&copy).unwrap() == before);
    assert_eq!(std::fs::metadata(&copy).unwrap().nlink(), 1, "the spare itself is gone");
}

/// On a full disk, a write through a mapping to a hole would kill the process with SIGBUS.
#[test]
fn sparse_spare_is_not_reused() {
    let directory = tempfile::tempdir().unwrap();
    let store = options().open(directory.path()).unwrap();
    let pages = begin(&store, 2);
    rewrite(&store, &pages, 2);
    let found = inodes(directory.path());
    let (name, (_, len)) = found.iter().find(|(file, _)| matches!(file, FileName::ImageSpare(_))).unwrap();
    let path = directory.path().join(name.to_string());
    let head = std::fs::read(&path).unwrap()[..4096].to_vec();
    // A close removes the spare that a killed process would leave.
    store.close().unwrap();
    assert!(!path.exists());
    std::fs::write(&path, head).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(*len).unwrap();

    let store = options().open(directory.path()).unwrap();
    rewrite(&store, &pages, 3);
    assert_eq!(reused(&store), 0);
    assert!(!path.exists());
}

#[test]
fn file_held_by_reader_is_not_reused() {
    let sim = SimDisk::new();
    let store = open_with(&sim, options()).unwrap();
    let pages = begin(&store, 2);
    let state = State::of(&store);
    let disk: Arc<dyn Disk> = Arc::new(sim.clone());
    let point = StatePoint::Snapshot(store.snapshots()[0].id);
    let view = View::open_on(&disk, Some(&point)).unwrap();
    let check = |view: &View| {
        for (page, expected) in &state.contents {
            let mut bytes = vec![0; expected.len()];
            view.read(*page, 0, &mut bytes).unwrap();
            assert!(bytes == *expected, "page {page}");
        }
    };
    // From now on, the view has files open.
    view.read(pages[0], 0, &mut [0; 10]).unwrap();
    for seed in 2..6 {
        rewrite(&store, &pages, seed);
    }
    check(&view);
    drop(view);
    for seed in 6..9 {
        rewrite(&store, &pages, seed);
    }
    assert!(reused(&store) > 0);
    let Err(error) = View::open_on(&disk, Some(&point)) else { panic!("the snapshot is gone") };
    assert!(!matches!(error, Error::Damaged(_)), "{error}");
}

/// The writer frees an image file and overwrites it while a follower reads an image in it.
#[test]
fn follower_of_overwritten_image_is_overtaken() {
    const LONG: u64 = 4 << 20;
    let directory = tempfile::tempdir().unwrap();
    let store = options().open(directory.path()).unwrap();
    let mut batch = store.batch();
    batch.create_from(Random(1).bytes(LONG), Place::Host);
    let pages = store.commit(batch).unwrap().pages;
    let mut follower = Follower::open(directory.path(), FollowFrom::Beginning).unwrap();
    let batch = follower.next(Duration::ZERO).unwrap().unwrap();
    let named = inodes(directory.path());
    let [(inode, _)] = named.values().copied().collect::<Vec<_>>()[..] else { panic!("{named:?}") };

    let mut pieces = 0;
    let streamed = batch.stream_image(pages[0], |_| {
        pieces += 1;
        if pieces > 1 {
            return;
        }
        // The next snapshot still names the image, and each later snapshot frees a file.
        for seed in 1..5 {
            let mut batch = store.batch();
            batch.write(pages[0], 8, &Random(seed).bytes(LONG - 8));
            store.commit(batch).unwrap();
            store.snapshot().unwrap();
        }
    });
    let now = inodes(directory.path());
    let is_written_over =
        |(file, (other, _)): (&FileName, &(u64, u64))| matches!(file, FileName::Pages(_)) && *other == inode;
    assert!(now.iter().any(is_written_over), "{now:?} was {named:?}");
    let error = streamed.unwrap_err();
    assert!(matches!(error, Error::Overtaken { .. }), "{error}");
    let error = batch.image(pages[0]).unwrap_err();
    assert!(matches!(error, Error::Overtaken { .. }), "{error}");
}

/// Images and spares together use at most twice the bytes of the images that snapshots name.
#[test]
fn spares_use_at_most_image_space() {
    let sim = SimDisk::new();
    let store = open_with(&sim, options().with(|options| options.images.chunk_len = Some(8 * LEN))).unwrap();
    let pages = begin(&store, 8);
    for seed in 2..5 {
        rewrite(&store, &pages, seed);
        let named: u64 = store.snapshots().iter().map(|info| info.bytes).sum();
        let found = image_bytes(&sim);
        assert!(found <= 2 * (named + 3 * 4096 * 4), "{found} bytes for {named}");
        assert!(!spares(&sim).is_empty());
    }
    let mut batch = store.batch();
    pages[1..].iter().for_each(|page| _ = batch.delete(*page));
    store.commit(batch).unwrap();
    rewrite(&store, &pages[..1], 5);
    let found = image_bytes(&sim);
    assert!(found <= 2 * (LEN + 3 * 4096), "{found} bytes after deletes; spares: {:?}", spares(&sim));
}

/// On a full disk, spares are removed first: for batches, for snapshots, and for an open.
#[test]
fn full_disk_releases_spares() {
    let rules = || {
        options().with(|options| {
            options.log.reserve_bytes = Some(64 << 10);
            options.images.chunk_len = Some(4 * LEN);
        })
    };
    let made = || {
        let sim = SimDisk::new();
        let store = open_with(&sim, rules()).unwrap();
        let pages = begin(&store, 4);
        rewrite(&store, &pages, 2);
        assert!(!spares(&sim).is_empty());
        (sim, store, pages)
    };
    let (sim, store, pages) = made();
    sim.set_capacity(Some(sim.used_bytes()));
    // No batch fails while spares can be removed. The exact number of batches depends on the segments that
    // the log thread creates.
    let free: u64 = spares(&sim).iter().map(|(_, len)| len).sum();
    let mut logged = 0;
    let error = loop {
        let mut batch = store.batch();
        batch.write(pages[0], 0, &Random(logged + 1).bytes(4000));
        match store.commit(batch) {
            Ok(_) => logged += 4000,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::DiskFull { .. }), "{error}");
    assert!(logged > free / 3, "{logged} of {free} bytes");
    assert!(spares(&sim).is_empty());
    drop(store);

    let (sim, store, pages) = made();
    // A page that is as long as all spares together fits only if they are removed.
    let free: u64 = spares(&sim).iter().map(|(_, len)| len).sum();
    let mut batch = store.batch();
    batch.create(free - (40 << 10), Place::Host);
    store.commit(batch).unwrap();
    sim.set_capacity(Some(sim.used_bytes() + (60 << 10)));
    store.snapshot().unwrap();
    assert!(spares(&sim).is_empty());
    let mut batch = store.batch();
    batch.delete(pages[0]);
    store.commit(batch).unwrap();
    store.close().unwrap();
    drop(open_with(&sim, rules()).unwrap());
}

/// After no crash does a spare contain a chunk with a file number that may be assigned again, because the
/// chunk would look valid in a later file of that number. The sync of the folder before the first chunk
/// prevents this. Without that sync, some crashes leave such a chunk.
#[test]
fn spares_hold_no_chunk_with_future_number() {
    for is_synced in [true, false] {
        let sim = SimDisk::new();
        let store = open_with(&sim, options().with(|options| options.images.chunk_len = Some(9000))).unwrap();
        let mut batch = store.batch();
        batch.create(9000, Place::Host);
        let pages = store.commit(batch).unwrap().pages;
        let write = |seed: u64| {
            let mut batch = store.batch();
            batch.write(pages[0], 0, &Random(seed).bytes(500));
            store.commit(batch).unwrap();
            store.snapshot().unwrap();
        };
        (1..4).for_each(write);
        let from = sim.events();
        let is_pages = |point| point == SyncPoint::Folder(Folder::Pages);
        let mut first = !is_synced;
        sim.skip_syncs(move |point| is_pages(point) && std::mem::take(&mut first));
        write(4);
        assert!(reused(&store) > 0);
        let plan = CrashPlan {
            events: from..usize::MAX,
            tears: Tears::None,
            images_max: 200,
            ..CrashPlan::default()
        };
        let (mut images, mut to_come) = (0, Vec::new());
        sim.power_images(&plan, |image| {
            images += 1;
            let next = next_number(&image.disk);
            for (name, bytes) in &Files::of(&image.disk).0 {
                let FileName::ImageSpare(_) = name else { continue };
                for block in bytes.chunks_exact(4096).filter(|block| block.starts_with(b"RMNTCHNK")) {
                    let number = u64::from_le_bytes(block[24..32].try_into().unwrap());
                    if number >= next {
                        to_come.push(format!(
                            "{name} has a chunk of {number} after event {}",
                            image.moment.event
                        ));
                    }
                }
            }
        });
        assert!(images > 50, "{images} images");
        assert_eq!(to_come.is_empty(), is_synced, "{to_come:?}");
    }
}

/// Returns the number that an open assigns to the next image file.
fn next_number(disk: &SimDisk) -> u64 {
    let numbers = Disk::list(disk, Folder::Pages).unwrap().into_iter().filter_map(|name| {
        match FileName::parse(Folder::Pages, &name)? {
            FileName::Pages(number) | FileName::Table(number) | FileName::ImageSpare(number) => {
                Some(number + 1)
            }
            _ => None,
        }
    });
    let survey = Survey::read(disk).unwrap();
    let named = survey.readable().map(|manifest| manifest.next_file);
    numbers.chain(named).max().unwrap_or(1)
}
