//! A page of any length is read and written in pieces. The additional memory of an operation does not depend
//! on the page's length.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use remanent::batch::{ByteSource, Width};
use remanent::disk::dir::DirReader;
use remanent::follow::{Follower, Replica};
use remanent::options::{MemoryOptions, SnapshotSchedule};
use remanent::{Options, PageId, Place, StatePoint, Store, View, WriteBatch};
use remanent_format::salvage::{PageRemains, Salvage};
use remanent_format::state::survey::read_store;

use crate::allocator::{alone, peak};

/// Length of the page, which is not a multiple of any block size.
const LEN: u64 = (320 << 20) + 4099;
/// Maximum number of bytes that an operation may allocate in addition to the page.
const EXTRA_MAX: usize = 128 << 20;
const PIECE: u64 = 16 << 20;

/// The content of a page: slowly ascending words, which are compressible, or noise, which is not.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    Rising,
    Noise,
}

impl Content {
    fn byte(self, at: u64) -> u8 {
        match self {
            Content::Rising => (at >> 12) as u8,
            Content::Noise => {
                let mixed = (at ^ (at >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                ((mixed ^ (mixed >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 56) as u8
            }
        }
    }

    fn piece(self, from: u64, to: u64) -> Vec<u8> {
        (from..to).map(|at| self.byte(at)).collect()
    }
}

/// Options with which only the tests take snapshots.
fn options() -> Options {
    Options::new().snapshots(SnapshotSchedule::never())
}

fn pieces() -> impl Iterator<Item = (u64, u64)> {
    (0..LEN).step_by(PIECE as usize).map(|from| (from, LEN.min(from + PIECE)))
}

fn create(directory: &Path, content: Content) -> (Store, PageId) {
    let store = options().open(directory).unwrap();
    let mut batch = store.batch();
    batch.create(LEN, Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    for (from, to) in pieces() {
        let mut batch = store.batch();
        batch.write(page, from, &content.piece(from, to));
        store.commit(batch).unwrap();
    }
    (store, page)
}

fn check(store: &Store, page: PageId, content: Content) {
    let mut found = vec![0; PIECE as usize];
    for (from, to) in pieces() {
        let found = &mut found[..(to - from) as usize];
        store.read(page, from, found).unwrap();
        assert!(*found == content.piece(from, to), "{content:?} at {from}");
    }
}

fn assert_bounded(what: &str, content: Content, taken: usize, own: u64) {
    let extra = taken.saturating_sub(own as usize);
    assert!(extra <= EXTRA_MAX, "{content:?}: {what} takes {extra} bytes in addition to the page");
}

fn life(content: Content) {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let (store, page) = create(directory.path(), content);
    let (snapshot, taken) = peak(|| store.snapshot().unwrap());
    assert_bounded("a snapshot", content, taken, 0);
    check(&store, page, content);

    // Change bytes that a restore must bring back.
    for at in [0, LEN / 2, LEN - 1] {
        let mut batch = store.batch();
        batch.write(page, at, &[content.byte(at) ^ 1]);
        store.commit(batch).unwrap();
    }
    let (restored, taken) = peak(|| store.restore(StatePoint::Snapshot(snapshot.id)).map(drop));
    restored.unwrap();
    assert_bounded("a restore", content, taken, 0);
    check(&store, page, content);
    let (scrubbed, taken) = peak(|| store.scrub().unwrap());
    assert!(scrubbed.damage.is_empty(), "{:?}", scrubbed.damage);
    assert_bounded("a scrub", content, taken, 0);
    store.close().unwrap();

    let (store, taken) = peak(|| options().open(directory.path()).unwrap());
    assert_bounded("an open", content, taken, LEN);
    check(&store, page, content);
    store.close().unwrap();

    let on_demand = options().memory(MemoryOptions::new().load(remanent::options::PageLoad::OnDemand));
    let ((), taken) = peak(|| {
        let store = on_demand.open(directory.path()).unwrap();
        store.read(page, 5, &mut [0; 5]).unwrap();
        store.close().unwrap();
    });
    assert_bounded("an open on demand", content, taken, LEN);
}

/// Changes the page with batches after a snapshot: writes of all kinds, some across the ends of windows and
/// pieces, and two resizes that shorten the page and lengthen it again. Each change is a separate batch.
fn change(store: &Store, page: PageId, expected: &mut [u8], salt: u8) {
    const MIB: u64 = 1 << 20;
    let commit = |make: &dyn Fn(&mut WriteBatch)| {
        let mut batch = store.batch();
        make(&mut batch);
        store.commit(batch).unwrap();
    };
    let long = vec![salt ^ 1; 3 * MIB as usize + 17];
    commit(&|batch| _ = batch.write(page, 15 * MIB + 5, &long));
    expected[15 * MIB as usize + 5..][..long.len()].copy_from_slice(&long);

    commit(&|batch| _ = batch.fill(page, 32 * MIB - 8, 16, &[salt ^ 2, 3]));
    expected[32 * MIB as usize - 8..][..16].copy_from_slice(&[salt ^ 2, 3].repeat(8));

    // The elements are distributed over the whole page.
    let indices: Vec<u32> = (0..200).map(|n| n * 400_000 + 1).collect();
    let values: Vec<u8> = (0..4 * indices.len()).map(|at| at as u8 ^ salt).collect();
    commit(&|batch| _ = batch.scatter(page, Width::W4, &indices, &values));
    for (index, value) in indices.iter().zip(values.chunks(4)) {
        expected[4 * *index as usize..][..4].copy_from_slice(value);
    }

    let (mask, elements) = (vec![0b1010_0101; 1000], vec![salt ^ 5; 8000 * 2]);
    commit(&|batch| _ = batch.write_masked(page, 100 * MIB - 7, Width::W2, &mask, &elements));
    for index in (0..8000).filter(|index| 0b1010_0101 >> (index % 8) & 1 == 1) {
        expected[100 * MIB as usize - 7 + 2 * index..][..2].fill(salt ^ 5);
    }

    commit(&|batch| _ = batch.resize(page, LEN - 5 * MIB));
    commit(&|batch| _ = batch.resize(page, LEN));
    expected[(LEN - 5 * MIB) as usize..].fill(0);
    commit(&|batch| _ = batch.write(page, LEN - 100, &[salt ^ 9; 100]));
    expected[LEN as usize - 100..].fill(salt ^ 9);
}

/// Views, restores and copies states for which no image exists.
fn history(content: Content) {
    let _alone = alone();
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("store");
    let (store, page) = create(&directory, content);
    let mut expected = content.piece(0, LEN);
    store.snapshot().unwrap();
    change(&store, page, &mut expected, 0x40);
    let then = store.lsn();
    let mut failed = Vec::new();
    let mut measure = |what: &str, own: u64, work: &mut dyn FnMut()| {
        let ((), taken) = peak(work);
        let beside = taken.saturating_sub(own as usize);
        if beside > EXTRA_MAX {
            failed.push(format!("{what} takes {} MiB beside the page", beside >> 20));
        }
    };
    let check_all = |expected: &[u8], read: &dyn Fn(u64, &mut [u8])| {
        let mut found = vec![0; PIECE as usize];
        for (from, to) in pieces() {
            let found = &mut found[..(to - from) as usize];
            read(from, found);
            assert!(*found == expected[from as usize..to as usize], "{content:?} from {from} on");
        }
    };
    let check_view = |view: &View, expected: &[u8]| {
        check_all(expected, &|from, out| view.read(page, from, out).unwrap());
    };

    measure("a view of a few bytes", 0, &mut || {
        let view = Store::open_read_only(&directory).unwrap();
        for at in [LEN - 150, 15 << 20, 0, (100 << 20) - 50, LEN / 2] {
            let mut found = [0; 100];
            view.read(page, at, &mut found).unwrap();
            assert_eq!(found, expected[at as usize..][..100], "{at}");
        }
    });
    measure("a view of everything", 0, &mut || {
        check_view(&Store::open_read_only(&directory).unwrap(), &expected);
    });
    measure("an audit", 0, &mut || {
        let audit = store.audit().unwrap();
        assert_eq!((audit.by_replay, audit.changed.len()), (1, 0));
    });
    let forked = place.path().join("forked");
    measure("a fork", 0, &mut || _ = store.fork(&forked, StatePoint::Lsn(then)).unwrap());
    check_view(&Store::open_read_only(&forked).unwrap(), &expected);
    measure("a salvage", 0, &mut || {
        let source = DirReader::new(&directory);
        let identity = read_store(&source).unwrap();
        let salvage = Salvage::read(&source, identity, u64::MAX).unwrap();
        let info = salvage.state().table.get(page).unwrap();
        let PageRemains::Exact(bytes) = salvage.find(&info) else { panic!("{:?}", salvage.find(&info)) };
        check_all(&expected, &|from, out| {
            out.copy_from_slice(&salvage.window(&bytes, from..from + out.len() as u64).unwrap());
        });
    });

    let mut replica = Replica::default();
    let follow = |replica: &mut Replica| {
        let mut follower = Follower::open(&directory, replica.position().into()).unwrap();
        while let Some(batch) = follower.next(Duration::ZERO).unwrap() {
            replica.apply(&batch).unwrap();
        }
    };
    measure("a replica of a snapshot", LEN, &mut || {
        replica = Replica::from_snapshot(&directory).unwrap();
        follow(&mut replica);
    });
    assert!(replica.bytes(page) == Some(&expected[..]), "{content:?}: a replica");

    store.close().unwrap();
    let mut opened = None;
    measure("an open whose log resizes the page", LEN, &mut || {
        opened = Some(options().open(&directory).unwrap());
    });
    let store = opened.unwrap();
    check_all(&expected, &|from, out| _ = store.read(page, from, out).unwrap());

    let mut later = expected.clone();
    change(&store, page, &mut later, 0x20);
    measure("a restore", 0, &mut || store.restore(StatePoint::Lsn(then)).map(drop).unwrap());
    check_all(&expected, &|from, out| _ = store.read(page, from, out).unwrap());
    measure("a replica that follows a restore", 0, &mut || follow(&mut replica));
    assert!(replica.bytes(page) == Some(&expected[..]), "{content:?}: a restored replica");

    let mut batch = store.batch();
    batch.write(page, 0, &later);
    store.commit(batch).unwrap();
    let mut follower = Follower::open(&directory, replica.position().into()).unwrap();
    let batch = follower.next(Duration::ZERO).unwrap().unwrap();
    measure("a batch that writes the whole page, streamed", 0, &mut || {
        let mut at = 0;
        let streamed = batch.stream_image(page, |piece| {
            assert!(*piece == later[at..at + piece.len()], "{content:?}: a whole page at {at}");
            at += piece.len();
        });
        streamed.unwrap();
        assert_eq!(at as u64, LEN);
    });
    measure("a replica that follows a whole page", 0, &mut || replica.apply(&batch).unwrap());
    assert!(replica.bytes(page) == Some(&later[..]), "{content:?}: a replica with a whole page");
    store.close().unwrap();
    assert!(failed.is_empty(), "{content:?}: {failed:#?}");
}

impl ByteSource for Content {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<()> {
        (offset..).zip(bytes).for_each(|(at, byte)| *byte = self.byte(at));
        Ok(())
    }
}

/// A batch creates a page from a source, twice. Only a few pieces are in memory in addition to the page.
fn stream(content: Content) {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let store = options().open(directory.path()).unwrap();
    let (page, taken) = peak(|| {
        let mut batch = store.batch();
        batch.create_from_source(LEN, Arc::new(content), Place::Host);
        store.commit(batch).unwrap().pages[0]
    });
    assert_bounded("a page from a source", content, taken, LEN);
    check(&store, page, content);
    let ((), taken) = peak(|| {
        store.commit(store.batch().replace_from_source(page, LEN, Arc::new(content))).unwrap();
        store.read(page, 0, &mut [0]).unwrap();
    });
    assert_bounded("a page that is replaced from a source", content, taken, LEN);
    check(&store, page, content);
    store.close().unwrap();
}

/// New pages with bytes from the caller need memory for only a few pieces in addition to the pages, however
/// many bytes the batch has.
#[test]
fn a_batch_of_whole_pages_is_staged_by_pieces() {
    const SHORT: u64 = 1 << 20;
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let store = options().open(directory.path()).unwrap();
    for content in [Content::Rising, Content::Noise] {
        let mut batch = store.batch();
        batch.create_from(content.piece(0, LEN), Place::Host);
        for number in 0..LEN / SHORT {
            batch.create_from(content.piece(number, number + SHORT), Place::Host);
        }
        let (pages, taken) = peak(|| store.commit(batch).unwrap().pages);
        assert_bounded("a batch of whole pages", content, taken, 2 * LEN);
        check(&store, pages[0], content);
        for (number, page) in (0..).zip(&pages[1..]) {
            assert!(store.read_to_vec(*page).unwrap() == content.piece(number, number + SHORT));
        }
    }
    store.close().unwrap();
}

#[test]
fn compressible_long_source_is_read_in_pieces() {
    stream(Content::Rising);
}

#[test]
fn incompressible_long_source_is_read_in_pieces() {
    stream(Content::Noise);
}

#[test]
fn compressible_long_page_history_uses_little_memory() {
    history(Content::Rising);
}

#[test]
fn incompressible_long_page_history_uses_little_memory() {
    history(Content::Noise);
}

#[test]
fn compressible_long_page_uses_little_memory() {
    life(Content::Rising);
}

#[test]
fn incompressible_long_page_uses_little_memory() {
    life(Content::Noise);
}
