//! Long pages, which a snapshot captures in pieces (16 KiB here) while batches are committed.

use std::collections::BTreeMap;

use crate::with_options::With;
use remanent::SnapshotOptions;
use remanent::options::{Compression, ImageOptions, MemoryOptions, Retention, SnapshotSchedule};
use remanent::testing::sim_disk::SimDisk;
use remanent_format::manifest::ManifestEntry;

use super::*;

const LEN: u64 = 1 << 20;
const PIECE: u64 = 16 << 10;

fn options() -> Options {
    Options::new().images(ImageOptions::new().chunk_len(PIECE / 2))
}

/// The bytes of a page after each batch.
type Versions = Arc<Mutex<BTreeMap<Lsn, Vec<u8>>>>;

/// Commits a change, and records the bytes of the page after the change.
fn commit(store: &Store, page: PageId, versions: &Versions, change: impl FnOnce(&mut remanent::WriteBatch)) {
    let mut batch = store.batch();
    change(&mut batch);
    let lsn = store.commit(batch).unwrap().position.lsn;
    versions.lock().unwrap().insert(lsn, bytes(store, page));
}

/// Returns the entry of the only page in the newest snapshot, and the bytes of its image.
fn entry(directory: &std::path::Path) -> (ManifestEntry, Vec<u8>) {
    let reader = DirReader::new(directory);
    let survey = Survey::read(&reader).unwrap();
    let newest = *survey.links.keys().next_back().unwrap();
    let entry = survey.snapshot(newest).unwrap().entries[0].clone();
    let bytes = read_image(&reader, &entry.image.unwrap(), entry.len).unwrap();
    (entry, bytes)
}

fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..LEN).map(next).collect()
}

/// Takes a snapshot of one page with this content. `between` is called while the snapshot is being taken, and
/// receives the number of earlier calls. Returns all versions of the page, and the entry and image in the
/// snapshot.
fn life(
    content: &[u8],
    options: Options,
    exact: bool,
    mut between: impl FnMut(&Store, PageId, &Versions, u64) + Send + 'static,
) -> (BTreeMap<Lsn, Vec<u8>>, ManifestEntry, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let (versions, page) = (Versions::default(), PageId(1));
    let (noted, mut called) = (versions.clone(), 0);
    let store = open(directory.path(), options.clone(), move |store, _| {
        if versions_begun(&noted) {
            between(store, page, &noted, called);
            called += 1;
        }
    });
    let mut batch = store.batch();
    batch.create(LEN, Place::Host);
    store.commit(batch).unwrap();
    commit(&store, page, &versions, |batch| _ = batch.write(page, 0, content));
    if exact {
        store.snapshot_with(SnapshotOptions::new().exact()).unwrap();
    } else {
        store.snapshot().unwrap();
    }
    let (entry, image) = entry(directory.path());
    let usage = store.stats().places[0].1;
    assert_eq!((usage.bytes_for(Purpose::Aside), usage.bytes_for(Purpose::Gather)), (0, 0));
    let newest = bytes(&store, page);
    drop(store);
    // From the image and the later log, an open recovers the final content of the page.
    let store = options.open(directory.path()).unwrap();
    assert!(bytes(&store, page) == newest);
    drop(store);
    let versions = std::mem::take(&mut *versions.lock().unwrap());
    (versions, entry, image)
}

fn versions_begun(versions: &Versions) -> bool {
    !versions.lock().unwrap().is_empty()
}

/// Writes before, after and inside the part that is being captured, across piece boundaries, and some bytes
/// twice.
fn scribble(store: &Store, page: PageId, versions: &Versions, called: u64) {
    commit(store, page, versions, |batch| {
        for step in 0..5 {
            let at = (called * 5 + step).wrapping_mul(77_777) % (LEN - PIECE);
            batch.fill(page, at, 100 + 3 * called, &[called as u8 + 1]);
        }
        batch.fill(page, LEN - 100, 100, &[called as u8]).fill(page, 0, 10, &[called as u8]);
    });
}

#[test]
fn long_page_gather_is_point_in_time_under_writes() {
    for (why, content) in [("noise", noise(1)), ("zeros, which compress", vec![0; LEN as usize])] {
        for exact in [false, true] {
            let (versions, entry, image) = life(&content, options(), exact, scribble);
            assert!(versions.len() > 30, "{why}: interrupted at each piece");
            assert_eq!(entry.lsn, Lsn(2), "{why}: it was caught when the first piece was");
            assert!(versions[&entry.lsn] == image, "{why}, exact {exact}");
        }
    }
}

/// The first samples of the page suggest that it is compressible, so the snapshot restarts when the rest
/// turns out not to be. The image must still be one version of the page.
#[test]
fn incompressible_long_page_is_point_in_time() {
    let mut content = noise(2);
    let apart = (LEN - (16 << 10)) / 3;
    for sample in 0..4 {
        content[(sample * apart) as usize..][..16 << 10].fill(0);
    }
    let (versions, entry, image) = life(&content, options(), false, scribble);
    assert!(versions.len() > 60);
    assert!(versions[&entry.lsn] == image);
    assert_eq!(entry.image.unwrap().stored_len, LEN, "stored as it is");
}

#[test]
fn moved_long_page_is_gathered_again() {
    let (versions, entry, image) =
        life(&noise(3), options(), false, |store, page, versions, called| match called {
            7 => commit(store, page, versions, |batch| _ = batch.resize(page, LEN / 2)),
            20 => commit(store, page, versions, |batch| _ = batch.move_to(page, Place::Unified)),
            _ => scribble_short(store, page, versions, called),
        });
    assert!(entry.lsn > Lsn(2) && versions[&entry.lsn] == image, "{entry:?}");
}

fn scribble_short(store: &Store, page: PageId, versions: &Versions, called: u64) {
    let at = called.wrapping_mul(77_777) % (LEN / 2 - 8);
    commit(store, page, versions, |batch| _ = batch.fill(page, at, 8, &[called as u8]));
}

/// A page that changes constantly, while there is no memory for old versions of its pieces, is captured as a
/// whole after some attempts.
#[test]
fn constantly_written_long_page_is_gathered() {
    let memory = MemoryOptions::new().budget(Place::Host, LEN + (64 << 10) - 1);
    let (versions, entry, image) =
        life(&noise(4), options().memory(memory), false, |store, page, versions, called| {
            commit(store, page, versions, |batch| _ = batch.fill(page, 0, LEN, &[called as u8 + 1]));
        });
    assert!(versions[&entry.lsn] == image);
}

/// A page that is deleted while the snapshot captures it is not in the snapshot.
#[test]
fn concurrently_deleted_long_page_is_omitted() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), options(), |store, gathered| {
        if gathered > 10 && store.page(PageId(1)).is_ok() {
            let mut batch = store.batch();
            batch.delete(PageId(1)).create(5, Place::Host);
            store.commit(batch).unwrap();
        }
    });
    let mut batch = store.batch();
    batch.create(LEN, Place::Host);
    store.commit(batch).unwrap();
    let snapshot = store.snapshot().unwrap();
    assert_eq!(snapshot.pages, 0, "{snapshot:?}");
    drop(store);
    let store = options().open(directory.path()).unwrap();
    assert_eq!(store.pages().unwrap().map(|info| info.page).collect::<Vec<_>>(), [PageId(2)]);
}

/// A page is changed and deleted while a snapshot is taken, so the snapshot's redo precedes the deletion. On
/// a full disk, a thin snapshot uses the same redo. Replay then reads changes of a page that neither snapshot
/// contains, so the thin snapshot must repeat the tombstone.
#[test]
fn thin_snapshot_repeats_previous_tombstones() {
    let disk = SimDisk::new();
    let options = || {
        let options = options()
            .retention(Retention::new().snapshots_kept(1))
            .with(|options| options.images.compression = Compression::Off);
        options.snapshots(SnapshotSchedule::never())
    };
    let store = open_on(Arc::new(disk.clone()), Box::new(HostDevice::new()), options(), |store, gathered| {
        // Delete the page during the third snapshot. The first two snapshots capture fewer pieces.
        if gathered > 140 && store.page(PageId(3)).is_ok() {
            let mut batch = store.batch();
            batch.write(PageId(3), 0, b"gone");
            store.commit(batch).unwrap();
            let mut batch = store.batch();
            batch.delete(PageId(3));
            store.commit(batch).unwrap();
        }
    });
    let create = |len| {
        let mut batch = store.batch();
        batch.create(len, Place::Host);
        store.commit(batch).unwrap();
    };
    for len in [40_000, 2 * LEN] {
        create(len);
        store.snapshot().unwrap();
    }
    create(LEN);
    let third = store.snapshot().unwrap();
    assert!(third.redo < third.end && third.pages == 2, "{third:?}");

    let mut batch = store.batch();
    batch.write(PageId(2), 0, b"changed").delete(PageId(1));
    store.commit(batch).unwrap();
    disk.set_capacity(Some(disk.used_bytes()));
    let full = store.snapshot().unwrap_err();
    assert!(matches!(full, Error::DiskFull { .. }), "{full}");
    let thin = store.snapshots().pop().unwrap();
    assert_eq!((thin.redo, thin.end, thin.pages), (third.redo, store.lsn(), 1), "{thin:?}");
    drop(store);
    disk.set_capacity(None);
    let store = Store::open_on(Arc::new(disk), Arc::new(HostDevice::new()), options()).unwrap();
    assert_eq!(store.recovered().snapshot, Some(thin.id), "{:?}", store.recovered());
    assert_eq!(store.pages().unwrap().map(|info| info.page).collect::<Vec<_>>(), [PageId(2)]);
}
