//! Scrubs detect damage on the medium while the store is open, and repair it from memory. Each row damages
//! one structure of an open store. The scrub must report the damage, and afterwards the store must open
//! without it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::{Damage, FileName};
use remanent::testing::sim_disk::{Moment, SimDisk};
use remanent::{Error, Lsn, Options, PageId, Place, SnapshotId, SnapshotOptions, StatePoint, Store};
use remanent_format::frame::{FrameHeader, FrameKind};
use remanent_format::image::ImageRef;
use remanent_format::log::LogWalk;
use remanent_format::state::survey::{Survey, read_manifest};

use crate::damage::mix;
use crate::faults::watched;
use crate::files::{Files, State, open, small};
use crate::with_options::With;

/// Number of pages, one of which changes.
const PAGES: u64 = 20;

/// Returns incompressible bytes.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| mix(seed << 32 | at) as u8).collect()
}

/// An open store whose first page never changed, so that all snapshots share its image.
struct Subject {
    disk: SimDisk,
    store: Store,
    pages: Vec<PageId>,
}

impl Subject {
    /// Creates two snapshots with a log after each. The second follows the first, which is kept only as a
    /// link.
    fn new() -> Self {
        let disk = SimDisk::new();
        let store = open(&disk).unwrap();
        let mut batch = store.batch();
        // Create enough pages that a snapshot is based on the previous one.
        for seed in 0..PAGES {
            let page = batch.create(1500, Place::Host).page();
            batch.write(page, 0, &noise(seed, 1500));
        }
        let pages = store.commit(batch).unwrap().pages;
        let subject = Self { disk, store, pages };
        for round in 0..3 {
            subject.commit(20, round);
            subject.store.snapshot().unwrap();
        }
        subject.commit(20, 9);
        let kept: Vec<_> = subject.store.snapshots().iter().map(|kept| kept.id).collect();
        assert_eq!(kept, [SnapshotId(2), SnapshotId(3)]);
        let survey = subject.survey();
        assert!(survey.log.beginning().is_none(), "the log was recycled");
        assert_eq!(survey.chain(SnapshotId(3)).unwrap().len(), 3, "the snapshots follow each other");
        subject
    }

    /// Returns such a store with a restore whose table both preceding snapshots need, and with a page that a
    /// batch wrote to an image file.
    fn with_restore() -> Self {
        let subject = Self::new();
        subject.store.restore(StatePoint::Lsn(subject.store.lsn())).unwrap();
        subject.commit(3, 10);
        let mut batch = subject.store.batch();
        batch.create_from(noise(11, 6000), Place::Host);
        subject.store.commit(batch).unwrap();
        subject.commit(3, 12);
        subject.store.wait_durable(subject.store.lsn()).unwrap();
        subject
    }

    fn commit(&self, count: u64, round: u64) {
        for number in 0..count {
            let mut batch = self.store.batch();
            batch.write(self.pages[1], number, &noise(round << 8 | number, 800)).set_root("step", number);
            self.store.commit(batch).unwrap();
        }
        self.store.wait_durable(self.store.lsn()).unwrap();
    }

    fn survey(&self) -> Survey {
        Survey::read(&self.disk).unwrap()
    }

    fn image_of(&self, page: PageId) -> ImageRef {
        let survey = self.survey();
        let newest = survey.snapshot(*survey.links.keys().next_back().unwrap()).unwrap();
        newest.entries.iter().find(|entry| entry.page == page).unwrap().image.unwrap()
    }

    /// Returns the segment and the offset of the first batch after a snapshot.
    fn batch_after(&self, snapshot: u64) -> (FileName, u64) {
        let survey = self.survey();
        let redo = survey.snapshot(SnapshotId(snapshot)).unwrap().redo;
        let mut walk = LogWalk::new(&self.disk, &survey.log, redo, Lsn(0)).unwrap();
        loop {
            let header = walk.next().unwrap().unwrap().header;
            if header.kind == FrameKind::Batch {
                return (FileName::Segment(header.segment), header.offset);
            }
        }
    }

    fn flip(&self, file: FileName, offset: u64) {
        let byte = self.disk.bytes(file).unwrap()[offset as usize];
        self.disk.damage(file, offset, &[byte ^ 0x10]);
    }

    fn flip_both_copies(&self, file: FileName) {
        let second = self.disk.bytes(file).unwrap().len() as u64 / 2;
        self.flip(file, 300);
        self.flip(file, second + 300);
    }

    /// Leaves no free byte on the disk, even if the store removes all spares. The number of spares beyond the
    /// reserve depends on the number of groups of the commits.
    fn fill_disk(&self) {
        self.disk.set_capacity(Some(0));
    }

    /// Returns the disk as a kill at this moment would leave it.
    fn killed(&self) -> SimDisk {
        self.disk.after_kill(Moment { event: self.disk.events(), tear: None })
    }

    /// Waits until the store's threads are idle.
    fn rest(&self) {
        while !self.is_at_rest() {
            std::thread::yield_now();
        }
    }

    /// Returns true if the log ends with a seal that covers it, has two prepared segments and a full reserve,
    /// and does not change.
    fn is_at_rest(&self) -> bool {
        let disk = self.disk.after_power_cut();
        let survey = Survey::read(&disk).unwrap();
        let newest = survey.snapshot(*survey.links.keys().next_back().unwrap()).unwrap();
        let mut walk = LogWalk::new(&disk, &survey.log, newest.redo, Lsn(0)).unwrap();
        let mut last = None;
        while let Some(frame) = walk.next().unwrap() {
            last = Some(frame.header);
        }
        let is_sealed = |last: &FrameHeader| last.kind == FrameKind::Seal && last.durable == self.store.lsn();
        let Some(last) = last.filter(is_sealed) else { return false };
        let files = Files::of(&disk);
        let is_ahead = |file| matches!(file, FileName::Segment(number) if number > last.segment);
        let is_spare = |file| matches!(file, FileName::Spare(_));
        files.names(is_ahead).len() >= 2 && files.names(is_spare).len() >= 2
    }

    /// Asserts that the files on disk contain no damage and open with the state in memory.
    fn check_left(&self, what: &str) {
        self.check_left_but(what, FileName::Store);
    }

    /// Like [`check_left`](Self::check_left), except for one damaged manifest of older snapshots that cannot
    /// be repaired. These snapshots are kept and reported as damaged.
    fn check_left_but(&self, what: &str, manifest: FileName) {
        let store = open(&self.killed()).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(State::of(&store) == State::of(&self.store), "{what}: another state");
        let harmless = &store.recovered().harmless;
        let is_told = |damage: &Damage| {
            damage.file == manifest && matches!(manifest, FileName::Manifest(_)) && damage.lsn.is_none()
        };
        assert!(harmless.iter().all(is_told), "{what}: {harmless:?}");
    }
}

#[test]
fn sound_store_is_read_completely_without_writes() {
    let subject = Subject::with_restore();
    subject.rest();
    let events = subject.disk.events();
    let scrubbed = subject.store.scrub().unwrap();
    assert_eq!((scrubbed.damage.as_slice(), scrubbed.mended.is_none()), (&[][..], true));
    assert_eq!(subject.disk.history()[events..], [] as [String; 0], "a scrub only reads");
    // Count the images of kept snapshots and of the restored table once each, and the image that the batch
    // names.
    let survey = subject.survey();
    let kept = subject.store.snapshots();
    let kept = kept.iter().map(|kept| survey.snapshot(kept.id).unwrap().entries.clone());
    let tables = Files::of(&subject.disk).names(|file| matches!(file, FileName::Table(_)));
    let tables =
        tables.iter().map(|file| read_manifest(&subject.disk, *file, &survey.store).unwrap().0.entries);
    let images = kept.chain(tables).flatten().filter_map(|entry| entry.image);
    let places: BTreeSet<_> = images.map(|image| (image.file, image.offset)).collect();
    assert_eq!(scrubbed.images, places.len() as u64 + 1);
    let oldest = subject.store.snapshots()[0].redo;
    assert_eq!(scrubbed.batches, subject.store.lsn().0 - oldest.0);
    assert!(scrubbed.log_bytes > scrubbed.batches * 800 && scrubbed.image_bytes > 6000 + PAGES * 1500);
    let stats = subject.store.stats().scrubs;
    assert_eq!((stats.done, stats.failed, stats.damaged), (1, 0, 0));
}

#[test]
fn shared_damaged_image_is_repaired_from_memory() {
    let subject = Subject::new();
    let image = subject.image_of(subject.pages[0]);
    let file = FileName::Pages(image.file);
    subject.flip(file, image.offset + 700);
    let Err(Error::Damaged(refused)) = open(&subject.killed()) else { panic!("all snapshots need it") };
    assert_eq!((refused.file, refused.offset), (file, image.offset));

    let scrubbed = subject.store.scrub().unwrap();
    assert_eq!(scrubbed.damage.len(), 1, "{scrubbed:?}");
    assert_eq!((scrubbed.damage[0].file, scrubbed.damage[0].offset), (file, image.offset));
    assert!(matches!(scrubbed.mended, Some(Ok(SnapshotId(4)))), "{scrubbed:?}");
    subject.check_left("mended");
    assert_ne!(subject.image_of(subject.pages[0]), image);
    // A damaged snapshot does not count as kept. It stays until there are two intact snapshots, and is not
    // read again.
    let kept = || subject.store.snapshots().iter().map(|kept| kept.id.0).collect::<Vec<_>>();
    assert_eq!(kept(), [2, 3, 4]);
    let again = subject.store.scrub().unwrap();
    assert!(again.damage.is_empty() && again.mended.is_none(), "{again:?}");
    subject.commit(2, 20);
    subject.store.snapshot().unwrap();
    assert_eq!(kept(), [4, 5]);
    let survey = subject.survey();
    let named = [4, 5].map(|id| survey.snapshot(SnapshotId(id)).unwrap().entries.clone()).concat();
    assert!(named.iter().all(|entry| entry.image != Some(image)), "nothing names it any more");
}

#[test]
fn damage_is_reported_and_repaired_row_by_row() {
    type Rot = fn(&Subject) -> FileName;
    // The damage, and whether its repair needs a snapshot.
    let rows: &[(&str, bool, Rot)] = &[
        ("STORE", false, |s| {
            s.flip(FileName::Store, 40);
            FileName::Store
        }),
        ("STORE is another store's", false, |s| {
            let foreign = SimDisk::new();
            drop(open(&foreign).unwrap());
            s.disk.damage(FileName::Store, 0, &foreign.bytes(FileName::Store).unwrap());
            FileName::Store
        }),
        ("STORE is missing", false, |s| {
            s.disk.remove(FileName::Store).unwrap();
            FileName::Store
        }),
        ("one copy of the newest link", false, |s| {
            s.flip(FileName::Manifest(4), 300);
            FileName::Manifest(4)
        }),
        ("the other copy of a link that others follow", false, |s| {
            let second = s.disk.bytes(FileName::Manifest(1)).unwrap().len() as u64 / 2;
            s.flip(FileName::Manifest(1), second + 300);
            FileName::Manifest(1)
        }),
        ("the newest link", true, |s| {
            s.flip_both_copies(FileName::Manifest(4));
            FileName::Manifest(4)
        }),
        ("the base that all follow", true, |s| {
            s.flip_both_copies(FileName::Manifest(1));
            FileName::Manifest(1)
        }),
        ("the base that all follow is missing", true, |s| {
            s.disk.remove(FileName::Manifest(1)).unwrap();
            FileName::Manifest(1)
        }),
        ("a shared image", true, |s| {
            let image = s.image_of(s.pages[2]);
            s.flip(FileName::Pages(image.file), image.offset);
            FileName::Pages(image.file)
        }),
        ("an image file is missing", true, |s| {
            let file = FileName::Pages(s.image_of(s.pages[2]).file);
            s.disk.remove(file).unwrap();
            file
        }),
        ("an image file is cut short", true, |s| {
            let file = FileName::Pages(s.image_of(s.pages[2]).file);
            s.disk.damage_len(file, 5000);
            file
        }),
        ("the log after the older snapshot", true, |s| {
            let (file, offset) = s.batch_after(2);
            s.flip(file, offset + 200);
            file
        }),
        ("the log after the newest snapshot", true, |s| {
            let (file, offset) = s.batch_after(4);
            s.flip(file, offset + 30);
            file
        }),
        ("a segment's header", true, |s| {
            let (file, _) = s.batch_after(3);
            s.flip(file, 40);
            file
        }),
        ("a segment is missing", true, |s| {
            let (file, _) = s.batch_after(2);
            s.disk.remove(file).unwrap();
            file
        }),
        ("a restore's table", true, |s| {
            let tables = Files::of(&s.disk).names(|file| matches!(file, FileName::Table(_)));
            s.flip_both_copies(tables[0]);
            tables[0]
        }),
        ("an image that a batch names", true, |s| {
            let files = Files::of(&s.disk).names(|file| matches!(file, FileName::Pages(_)));
            let newest = *files.last().unwrap();
            s.flip(newest, 6000);
            newest
        }),
    ];
    for (what, by_snapshot, rot) in rows {
        let subject = Subject::with_restore();
        let file = rot(&subject);
        subject.disk.sync_folder(file.folder()).unwrap();
        let scrubbed = subject.store.scrub().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(!scrubbed.damage.is_empty(), "{what}");
        assert!(scrubbed.damage.iter().all(|damage| damage.file == file), "{what}: {:?}", scrubbed.damage);
        assert_eq!(matches!(scrubbed.mended, Some(Ok(_))), *by_snapshot, "{what}: {:?}", scrubbed.mended);
        subject.check_left_but(what, file);
        let again = subject.store.scrub().unwrap();
        assert!(again.damage.is_empty() && again.mended.is_none(), "{what}: {again:?}");
        // The store continues to work, and later batches are correct.
        subject.commit(2, 30);
        subject.store.snapshot().unwrap();
        subject.check_left_but(what, file);
        subject.store.close().unwrap();
    }
}

#[test]
fn first_snapshot_repairs_damaged_log() {
    let disk = SimDisk::new();
    let store = open(&disk).unwrap();
    let mut batch = store.batch();
    batch.create(100, Place::Host);
    let pages = store.commit(batch).unwrap().pages;
    let subject = Subject { disk, store, pages };
    // The frame of the second batch records that the first batch is durable.
    subject.store.wait_durable(Lsn(1)).unwrap();
    let mut batch = subject.store.batch();
    batch.set_root("step", 1u64);
    let lsn = subject.store.commit(batch).unwrap().position.lsn;
    subject.store.wait_durable(lsn).unwrap();
    subject.flip(FileName::Segment(1), 8192 + 90);
    assert!(matches!(open(&subject.killed()), Err(Error::Damaged(_))));
    let scrubbed = subject.store.scrub().unwrap();
    assert_eq!(scrubbed.damage[0].lsn, Some(Lsn(1)));
    assert!(matches!(scrubbed.mended, Some(Ok(SnapshotId(1)))), "{scrubbed:?}");
    let store = open(&subject.killed()).unwrap();
    assert!(State::of(&store) == State::of(&subject.store));
}

#[test]
fn page_deleted_before_image_repair_stays_deleted() {
    let subject = Subject::new();
    let image = subject.image_of(subject.pages[0]);
    subject.flip(FileName::Pages(image.file), image.offset);
    subject.fill_disk();
    let scrubbed = subject.store.scrub().unwrap();
    assert!(matches!(scrubbed.mended, Some(Err(Error::DiskFull { .. }))), "{scrubbed:?}");
    let mut batch = subject.store.batch();
    batch.delete(subject.pages[0]);
    subject.store.commit(batch).unwrap();
    subject.disk.set_capacity(None);
    subject.store.snapshot().unwrap();
    subject.check_left("deleted");
    let store = open(&subject.killed()).unwrap();
    assert!(matches!(store.page(subject.pages[0]), Err(Error::UnknownPage { .. })));
}

#[test]
fn repair_without_space_is_retried_by_next_scrub() {
    let subject = Subject::new();
    let image = subject.image_of(subject.pages[0]);
    subject.flip(FileName::Pages(image.file), image.offset);
    subject.fill_disk();
    for _ in 0..2 {
        let scrubbed = subject.store.scrub().unwrap();
        assert!(matches!(scrubbed.mended, Some(Err(Error::DiskFull { .. }))), "{scrubbed:?}");
    }
    subject.disk.set_capacity(None);
    let scrubbed = subject.store.scrub().unwrap();
    assert!(!scrubbed.damage.is_empty() && matches!(scrubbed.mended, Some(Ok(_))), "{scrubbed:?}");
    subject.check_left("mended late");
    assert_eq!(subject.store.scrub().unwrap().damage, []);
}

#[test]
fn scrub_does_not_replace_a_named_snapshot() {
    let subject = Subject::new();
    let named = subject.store.snapshot_with(SnapshotOptions::new().name("then")).unwrap();
    let image = subject.image_of(subject.pages[0]);
    subject.flip(FileName::Pages(image.file), image.offset);
    let scrubbed = subject.store.scrub().unwrap();
    assert!(matches!(scrubbed.mended, Some(Ok(_))), "{scrubbed:?}");
    for round in 40..43 {
        subject.commit(1, round);
        subject.store.snapshot().unwrap();
    }
    assert!(subject.store.snapshots().iter().any(|kept| kept.id == named.id));
    // The file is not read again while the store is open. A later open has no record of the damage, and
    // detects it again.
    assert_eq!(subject.store.scrub().unwrap().damage, []);
    let store = open(&subject.killed()).unwrap();
    assert!(State::of(&store) == State::of(&subject.store));
    assert!(store.snapshots().iter().any(|kept| kept.name.as_deref() == Some("then")));
    let again = store.scrub().unwrap();
    assert_eq!(again.damage[0].file, FileName::Pages(image.file));
    assert!(again.mended.is_none(), "the newest state does not need it: {again:?}");
}

fn open_scrubbing(disk: &SimDisk, options: Options) -> Store {
    Store::open_on(Arc::new(disk.clone()), Arc::new(HostDevice::new()), options).unwrap()
}

#[test]
fn store_scrubs_automatically() {
    let subject = Subject::new();
    let (disk, page) = (subject.disk.clone(), subject.pages[0]);
    let image = subject.image_of(page);
    subject.store.close().unwrap();
    let store = open_scrubbing(
        &disk,
        small().with(|options| options.scrubs.interval = Some(Duration::from_millis(1))),
    );
    store.wait_for_scrubs(1);
    assert_eq!((store.stats().scrubs.failed, store.stats().scrubs.damaged), (0, 0));
    disk.damage(FileName::Pages(image.file), image.offset, &[0; 16]);
    // The running scrub may have read the file before it was damaged.
    store.wait_for_scrubs(store.stats().scrubs.done + 2);
    assert_eq!(store.stats().scrubs.damaged, 1);
    let state = State::of(&store);
    store.close().unwrap();
    let store = open(&disk).unwrap();
    assert!(State::of(&store) == state && store.recovered().harmless.is_empty());
}

#[test]
fn slow_scrub_is_cancelled_at_close() {
    let subject = Subject::new();
    let disk = subject.disk.clone();
    subject.store.close().unwrap();
    // At one byte per second, this scrub would take hours.
    let options = small().with(|options| {
        options.scrubs.interval = Some(Duration::ZERO);
        options.scrubs.bytes_per_second = Some(1);
    });
    open_scrubbing(&disk, options).close().unwrap();
}

/// A manual scrub is not limited to the rate of background scrubs. At one byte per second, it would take hours.
#[test]
fn manual_scrub_lifts_background_rate_limit() {
    watched("a scrub by hand", || {
        let subject = Subject::new();
        let disk = subject.disk.clone();
        subject.store.close().unwrap();
        let options = small().with(|options| {
            options.scrubs.interval = Some(Duration::ZERO);
            options.scrubs.bytes_per_second = Some(1);
        });
        let store = open_scrubbing(&disk, options);
        for _ in 0..3 {
            assert!(store.scrub().unwrap().damage.is_empty());
        }
        store.close().unwrap();
    });
}

#[test]
fn a_poisoned_store_is_not_scrubbed() {
    use remanent::testing::sim_disk::{DiskFault, EIO, Operation};
    let subject = Subject::new();
    subject.disk.fail(DiskFault { operation: Operation::SyncWindow, skip: 0, times: 1, errno: EIO });
    let mut batch = subject.store.batch();
    batch.set_root("step", 1u64);
    let lsn = subject.store.commit(batch).unwrap().position.lsn;
    assert!(matches!(subject.store.wait_durable(lsn), Err(Error::Poisoned(_))));
    assert!(matches!(subject.store.scrub(), Err(Error::Poisoned(_))));
    let stats = subject.store.stats().scrubs;
    assert_eq!((stats.done, stats.failed), (0, 1));
}
