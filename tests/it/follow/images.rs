//! Followers of batches whose long pages are in image files. The bytes of these pages are read on request.

use remanent::error::{FileName, Folder};
use remanent::options::{Compression, Retention};

use super::*;
use crate::kill::workload::Random;
use crate::with_options::With;

/// Length of a page, longer than a segment of these tests.
const LEN: u64 = 20 << 10;

fn content(seed: u64) -> Vec<u8> {
    Random(seed).bytes(LEN)
}

/// Creates a store of three long pages and a short one in one batch.
fn imported(disk: &Arc<dyn Disk>) -> (Store, Vec<PageId>) {
    let options = options().with(|options| options.images.compression = Compression::Off);
    let store = Store::open_on(disk.clone(), Arc::new(HostDevice::new()), options).unwrap();
    let mut batch = store.batch();
    for seed in 0..3 {
        batch.create_from(content(seed), Place::Host);
    }
    let short = batch.create(8, Place::Host).page();
    batch.write(short, 0, b"in place");
    let pages = store.commit(batch).unwrap().pages;
    (store, pages)
}

fn next(follower: &mut Follower) -> FollowedBatch {
    follower.next(Duration::ZERO).unwrap().expect("it is logged")
}

fn kinds(batch: &FollowedBatch) -> Vec<&'static str> {
    batch.operations().iter().map(Op::kind).collect()
}

#[test]
fn a_batch_that_names_images_is_followed_like_any_other() {
    let (_, disk) = sim();
    let (store, pages) = imported(&disk);
    let mut batch = store.batch();
    batch.write(pages[0], 0, &content(10)).set_metadata(pages[0], "step", 1u64);
    batch.resize(pages[1], 2 * LEN).write(pages[1], 0, &[content(11), content(12)].concat());
    batch.write(pages[2], 5, b"within").write(pages[3], 0, b"anew");
    let copy = batch.clone_page(pages[0]);
    let copy = store.commit(batch).unwrap().pages[copy.index()];
    let mut batch = store.batch();
    batch.write(pages[0], LEN - 4, b"tail").delete(pages[1]);
    store.commit(batch).unwrap();

    let mut follower = Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap();
    let mut replica = Replica::default();
    let batch = next(&mut follower);
    assert_eq!(kinds(&batch).iter().filter(|kind| **kind == "image").count(), 3, "{:?}", kinds(&batch));
    for (page, seed) in pages.iter().zip(0..3) {
        assert_eq!(batch.image(*page).unwrap(), content(seed));
    }
    assert!(matches!(batch.image(pages[3]), Err(Error::UnknownPage { .. })));
    replica.apply(&batch).unwrap();
    assert_eq!(replica.bytes(pages[2]), Some(&content(2)[..]));

    let batch = next(&mut follower);
    assert_eq!(kinds(&batch).iter().filter(|kind| **kind == "image").count(), 2, "{:?}", kinds(&batch));
    replica.apply(&batch).unwrap();
    assert_eq!(replica.bytes(pages[1]), Some(&[content(11), content(12)].concat()[..]));
    assert_eq!(replica.bytes(copy), Some(&content(10)[..]));
    replica.apply(&next(&mut follower)).unwrap();

    let check = |replica: &Replica| {
        assert!(replica.pages().eq(store.pages().unwrap()));
        for info in store.pages().unwrap() {
            let mut bytes = vec![0; info.len as usize];
            store.read(info.page, 0, &mut bytes).unwrap();
            assert!(replica.bytes(info.page) == Some(&bytes), "page {}", info.page);
        }
    };
    check(&replica);
    store.snapshot().unwrap();
    check(&Replica::from_snapshot_on(&disk).unwrap());
}

/// A snapshot has overlays for pages on disk. One replica follows the moves of these pages from the beginning
/// of the log, and another starts from the snapshot.
#[test]
fn pages_on_disk_are_followed_and_overlays_read() {
    let (sim, disk) = sim();
    let options = || {
        options()
            .retention(Retention::new().log_kept(1 << 30))
            .with(|options| options.images.compression = Compression::Off)
    };
    let store = Store::open_on(disk.clone(), Arc::new(HostDevice::new()), options()).unwrap();
    let mut batch = store.batch();
    (0..3).for_each(|seed| _ = batch.create_from(content(seed), Place::Disk));
    let pages = store.commit(batch).unwrap().pages;
    store.snapshot().unwrap();
    let commit = |fill: &dyn Fn(&mut remanent::WriteBatch)| {
        let mut batch = store.batch();
        fill(&mut batch);
        store.commit(batch).unwrap();
    };
    commit(&|batch| _ = batch.write(pages[0], 70, b"little").move_to(pages[1], Place::Host));
    commit(&|batch| _ = batch.write(pages[0], LEN - 5, b"more").write(pages[1], 0, b"in memory"));
    commit(&|batch| _ = batch.move_to(pages[1], Place::Disk).write(pages[2], 9, b"on disk"));
    let snapshot = store.snapshot().unwrap();
    let survey = remanent_format::state::survey::Survey::read(&sim).unwrap();
    let entries = &survey.snapshot(snapshot.id).unwrap().entries;
    let overlays = entries.iter().filter(|entry| entry.image.is_some_and(|image| !image.is_whole())).count();
    assert_eq!(overlays, 2, "{entries:?}");
    let mut replica = Replica::from_snapshot_on(&disk).unwrap();
    commit(&|batch| _ = batch.write(pages[0], 3, b"after it").move_to(pages[2], Place::Pinned));
    let mut follower = Follower::open_on(disk.clone(), replica.position().into()).unwrap();
    replica.apply(&next(&mut follower)).unwrap();
    let mut from_the_beginning = Replica::default();
    let mut follower = Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap();
    while let Some(batch) = follower.next(Duration::ZERO).unwrap() {
        from_the_beginning.apply(&batch).unwrap();
    }
    for replica in [replica, from_the_beginning] {
        assert!(replica.pages().eq(store.pages().unwrap()));
        for page in &pages {
            assert!(replica.bytes(*page) == Some(&store.read_to_vec(*page).unwrap()[..]), "page {page}");
        }
    }
}

#[test]
fn replica_reports_damaged_image_and_is_unchanged() {
    let (sim, disk) = sim();
    let (store, pages) = imported(&disk);
    let mut follower = Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap();
    let batch = next(&mut follower);
    drop(store);
    let file = image_file(&sim);
    let place = sim.bytes(file).unwrap().windows(64).position(|window| *window == content(1)[..64]);
    let place = place.expect("the image holds the page") as u64;
    sim.damage(file, place + 9, &[!content(1)[9]]);
    let mut replica = Replica::default();
    for _ in 0..2 {
        let Err(Error::Damaged(damage)) = replica.apply(&batch) else { panic!("an image is damaged") };
        assert_eq!((damage.file, damage.offset), (file, place));
        assert_eq!((replica.lsn(), replica.pages().len()), (Lsn(0), 0));
        assert_eq!(replica.bytes(pages[0]), None);
    }
    assert_eq!(batch.image(pages[2]).unwrap(), content(2), "the others are sound");
    sim.damage(file, place + 9, &[content(1)[9]]);
    replica.apply(&batch).unwrap();
    assert_eq!(replica.bytes(pages[1]), Some(&content(1)[..]));
}

#[test]
fn missing_image_means_overtaken_or_lost() {
    let (sim, disk) = sim();
    let (store, pages) = imported(&disk);
    let mut follower = Follower::open_on(disk.clone(), FollowFrom::Beginning).unwrap();
    let batch = next(&mut follower);
    let file = image_file(&sim);
    let bytes = sim.bytes(file).unwrap();
    // No mark records that the file is no longer needed.
    sim.remove(file).unwrap();
    let mut replica = Replica::default();
    let Err(Error::Damaged(damage)) = replica.apply(&batch) else { panic!("an image is lost") };
    assert_eq!(damage.file, file);
    sim.create(file).unwrap().write_at(0, &bytes).unwrap();

    // Every page changes, and the log is recycled with the images that it names.
    let mut turn = 0;
    while sim.bytes(file).is_some() {
        turn += 1;
        for _ in 0..20 {
            let mut batch = store.batch();
            pages.iter().for_each(|page| _ = batch.fill(*page, 0, 8, &[turn]));
            batch.note("n".repeat(900));
            store.commit(batch).unwrap();
        }
        store.snapshot().unwrap();
    }
    let newest = store.snapshots().last().unwrap().id;
    for error in [batch.image(pages[0]).map(drop), replica.apply(&batch)].map(Result::unwrap_err) {
        assert!(
            matches!(error, Error::Overtaken { lsn: Lsn(1), snapshot: Some(id) } if id == newest),
            "{error}"
        );
    }
    assert_eq!(replica.lsn(), Lsn(0));
    let replica = Replica::from_snapshot_on(&disk).unwrap();
    assert_eq!(replica.lsn(), store.lsn());
    assert_eq!(replica.bytes(pages[0]).unwrap()[..9], [&[turn; 8][..], &content(0)[8..9]].concat());
}

/// Returns the name of the only image file.
fn image_file(disk: &SimDisk) -> FileName {
    let names = disk.list(Folder::Pages).unwrap();
    let [name] = &names[..] else { panic!("one image file: {names:?}") };
    FileName::parse(Folder::Pages, name).unwrap()
}
