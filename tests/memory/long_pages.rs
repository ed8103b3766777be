//! A page of any length is read and written piece by piece: the memory that an operation takes in addition to
//! the page's own does not grow with it.

use std::path::Path;

use remanent::{Options, PageId, Place, StatePoint, Store};

use crate::allocator::{alone, peak};

/// A length that is a multiple of nothing.
const LEN: u64 = (320 << 20) + 4099;
/// The most bytes that an operation may take in addition to the page.
const EXTRA_MAX: usize = 128 << 20;
const PIECE: u64 = 16 << 20;

/// The bytes of a page: words that rise slowly, which compress well, or noise, which does not.
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

/// Options with which snapshots are taken when the test says so.
fn options() -> Options {
    Options::default().snapshot_log_bytes(None).snapshot_interval(None)
}

fn pieces() -> impl Iterator<Item = (u64, u64)> {
    (0..LEN).step_by(PIECE as usize).map(|from| (from, LEN.min(from + PIECE)))
}

fn create(directory: &Path, content: Content) -> (Store, PageId) {
    let store = Store::open(directory, options()).unwrap();
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

    // A restore must bring all changed bytes back.
    for at in [0, LEN / 2, LEN - 1] {
        let mut batch = store.batch();
        batch.write(page, at, &[content.byte(at) ^ 1]);
        store.commit(batch).unwrap();
    }
    let (restored, taken) = peak(|| store.restore(&StatePoint::Snapshot(snapshot.id)).map(drop));
    restored.unwrap();
    assert_bounded("a restore", content, taken, 0);
    check(&store, page, content);
    let (scrubbed, taken) = peak(|| store.scrub().unwrap());
    assert!(scrubbed.damage.is_empty(), "{:?}", scrubbed.damage);
    assert_bounded("a scrub", content, taken, 0);
    store.close().unwrap();

    let (store, taken) = peak(|| Store::open(directory.path(), options()).unwrap());
    assert_bounded("an open", content, taken, LEN);
    check(&store, page, content);
    store.close().unwrap();

    let on_demand = options().page_load(remanent::PageLoad::OnDemand);
    let ((), taken) = peak(|| {
        let store = Store::open(directory.path(), on_demand).unwrap();
        store.read(page, 5, &mut [0; 5]).unwrap();
        store.close().unwrap();
    });
    assert_bounded("an open on demand", content, taken, LEN);
}

#[test]
fn a_long_page_that_compresses_takes_little_extra_memory() {
    life(Content::Rising);
}

#[test]
fn a_long_page_of_noise_takes_little_extra_memory() {
    life(Content::Noise);
}
