//! Snapshots that name images of batches before these images are read back.

use remanent::options::{MemoryOptions, PageLoad};
use remanent::testing::sim_disk::Moment;

use super::*;

/// Length for which a batch writes the page to an image file, so that the frame only names the image.
const LONG: usize = 200_000;

fn published() -> SnapshotOptions {
    SnapshotOptions::new().only_published()
}

/// Creates a store with a verified snapshot and then a page whose batch wrote its image.
fn store_with_batch_image(disk: &SimDisk, place: Place) -> (Store, PageId, FileName) {
    let (store, _) = store_of(disk, small().retention(Retention::new().snapshots_kept(1)), 4);
    store.snapshot().unwrap();
    let files_before = image_files(disk);
    let mut batch = store.batch();
    let bytes: Vec<u8> = (0..LONG).map(|at| (at % 251) as u8).collect();
    batch.create_from(bytes, place);
    let page = store.commit(batch).unwrap().pages[0];
    let [file] = image_files(disk).difference(&files_before).copied().collect::<Vec<_>>()[..] else {
        panic!("the batch writes one image file");
    };
    (store, page, file)
}

fn image_files(disk: &SimDisk) -> BTreeSet<FileName> {
    (1..20).map(FileName::Pages).filter(|file| disk.bytes(*file).is_some()).collect()
}

#[test]
fn published_snapshot_names_batch_images_unread() {
    for place in [Place::Host, Place::Disk] {
        let disk = SimDisk::new();
        let (store, page, _) = store_with_batch_image(&disk, place);
        let snapshot = store.snapshot_with(published()).unwrap();
        assert_eq!(
            (snapshot.bytes_written, snapshot.verified),
            (0, false),
            "{place}: the image is not written twice"
        );
        let state = State::of(&store);
        // After a power cut before the images were read back, the open reads them.
        let cut = open_with(&disk.after_power_cut(), small()).unwrap();
        assert_eq!(
            (cut.recovered().snapshot, State::of(&cut)),
            (Some(snapshot.id), State::of(&store)),
            "{place}"
        );
        store.wait_verified().unwrap();
        let [kept] = &store.snapshots()[..] else { panic!("{place}: {:?}", ids(&store)) };
        assert_eq!((kept.id, kept.verified), (snapshot.id, true), "{place}");
        // The next snapshot names the image again.
        assert_eq!(store.snapshot().unwrap().bytes_written, 0, "{place}");
        store.close().unwrap();
        let store = open_with(&disk, small()).unwrap();
        assert_eq!(State::of(&store), state, "{place}");
        assert_eq!(store.read_to_vec(page).unwrap().len(), LONG);
    }
}

/// The disk loses bytes of the image before the image is read back.
#[test]
fn lost_batch_image_is_gathered_again_from_memory() {
    let disk = SimDisk::new();
    let (store, _, file) = store_with_batch_image(&disk, Place::Host);
    disk.damage(file, 4096 + 50_000, b"lost");
    let state = State::of(&store);
    let first = store.snapshots()[0].id;
    let damaged = store.snapshot_with(published()).unwrap().id;
    store.wait_verified().unwrap();
    // Another snapshot has replaced the damaged one and wrote the page.
    let newest = store.snapshots().last().unwrap().clone();
    assert!(newest.id > damaged && newest.verified && newest.bytes_written >= LONG as u64, "{newest:?}");
    assert!(newest.id > first);
    assert!(store.scrub().unwrap().damage.is_empty(), "nothing that is kept is damaged");
    let cut = open_with(&disk.after_power_cut(), small()).unwrap();
    assert_eq!((cut.recovered().snapshot, State::of(&cut)), (Some(newest.id), state));
}

/// A page on disk has no other copy. The previous snapshot stays, and the store continues to work.
#[test]
fn lost_batch_image_of_page_on_disk_keeps_older_snapshot() {
    let disk = SimDisk::new();
    let (store, page, file) = store_with_batch_image(&disk, Place::Disk);
    let first = store.snapshots()[0].clone();
    disk.damage(file, 4096 + 50_000, b"lost");
    store.snapshot_with(published()).unwrap();
    store.wait_verified().unwrap();
    assert!(ids(&store).contains(&first.id.0), "{:?}", ids(&store));
    assert!(matches!(store.read_to_vec(page), Err(Error::Damaged(_))));
    assert!(matches!(store.snapshot(), Err(Error::Damaged(_))), "the page cannot be read");
    store.commit(store.batch().delete(page)).unwrap();
    let state = State::of(&store);
    store.snapshot().unwrap();
    store.close().unwrap();
    assert_eq!(State::of(&open_with(&disk, small()).unwrap()), state);
}

/// A snapshot whose caller waits for verification reads the images of batches before it names them, so its name never
/// refers to a damaged snapshot.
#[test]
fn verified_named_snapshot_never_names_lost_image() {
    let disk = SimDisk::new();
    let (store, _, file) = store_with_batch_image(&disk, Place::Host);
    disk.damage(file, 4096 + 50_000, b"lost");
    store.snapshot_with(published()).unwrap();
    let state = State::of(&store);
    let named = store.snapshot_with(SnapshotOptions::new().name("kept")).unwrap();
    assert!(named.verified);
    store.restore(StatePoint::Snapshot(named.id)).unwrap();
    assert_eq!(State::of(&store).pages, state.pages);
}

/// With `OnDemand`, an open does not read the images that durable batches wrote for pages on disk.
#[test]
fn on_demand_open_verifies_batch_image_when_it_is_read() {
    let disk = SimDisk::new();
    let (store, page, file) = store_with_batch_image(&disk, Place::Disk);
    let state = State::of(&store);
    store.close().unwrap();
    let on_demand = || small().memory(MemoryOptions::new().load(PageLoad::OnDemand));
    let store = open_with(&disk, on_demand()).unwrap();
    assert_eq!(State::of(&store), state);
    // The next snapshot reads the image back before it counts as verified.
    let snapshot = store.snapshot().unwrap();
    assert_eq!((snapshot.verified, snapshot.bytes_written), (true, 0));
    drop(store);

    let disk = SimDisk::new();
    let (store, page_too, file_too) = store_with_batch_image(&disk, Place::Disk);
    assert_eq!((page_too, file_too), (page, file));
    store.close().unwrap();
    disk.damage(file, 4096 + 50_000, b"lost");
    let refused = open_with(&disk, small()).unwrap_err();
    assert_eq!(refused.file(), Some(file), "{refused}");
    let store = open_with(&disk, on_demand()).unwrap();
    let read = store.read_to_vec(page).unwrap_err();
    assert_eq!(read.file(), Some(file), "{read}");
    assert!(matches!(store.snapshot(), Err(Error::Damaged(_))), "no snapshot names the damaged image");
}

/// The last batch may exist only in the page cache, and the disk may have lost its image.
#[test]
fn on_demand_open_verifies_image_of_batch_without_mark() {
    let disk = SimDisk::new();
    let (store, _, file) = store_with_batch_image(&disk, Place::Disk);
    let killed = disk.after_kill(Moment { event: disk.events(), tear: None });
    drop(store);
    killed.damage(file, 4096 + 50_000, b"lost");
    let on_demand = small().memory(MemoryOptions::new().load(PageLoad::OnDemand));
    let refused = open_with(&killed, on_demand).unwrap_err();
    assert_eq!(refused.file(), Some(file), "{refused}");
}
