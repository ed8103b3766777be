//! Change streams. A byte that no event reports is unchanged, batches arrive in the order of the log, and
//! missed batches are reported as a gap.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use remanent::batch::Width;
use remanent::device::host::HostDevice;
use remanent::error::Unavailable;
use remanent::follow::{AppliedBatch, AppliedChange, AppliedPage, ChangeEvent, ChangeStream};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Epoch, Error, Lsn, PageId, PageInfo, Place, StatePoint, Store, WriteBatch};

use crate::device_ops::{content, devices, open, page};
use crate::kill::workload::Random;

const PLACES: [Place; 3] = [Place::Device(0), Place::Pinned, Place::Host];

fn applied(changes: &mut ChangeStream) -> Arc<AppliedBatch> {
    match changes.next() {
        Some(ChangeEvent::Applied(batch)) => batch,
        other => panic!("{other:?}"),
    }
}

/// Commits a batch and waits until change streams have received it, so that a new stream starts between two
/// batches.
fn apply(store: &Store, batch: &mut WriteBatch) {
    let lsn = store.commit(batch).unwrap().position.lsn;
    assert!(store.changes().unwrap().begin_lsn() >= lsn);
}

/// The pages of a store as reconstructed from its change stream.
type Mirror = BTreeMap<PageId, (PageInfo, Vec<u8>)>;

/// Applies a batch to a mirror, using only the changes that the batch reports.
fn follow(store: &Store, batch: &AppliedBatch, mirror: &mut Mirror) {
    for AppliedPage { page, epoch, changes, .. } in &batch.pages {
        for change in changes {
            if *change == AppliedChange::Deleted {
                assert_eq!(mirror.remove(page).unwrap().0.epoch, *epoch);
                continue;
            }
            let info = store.page(*page).unwrap();
            match change {
                AppliedChange::Created => _ = mirror.insert(*page, (info, content(store, *page))),
                AppliedChange::Resized { len } => {
                    let (known, bytes) = mirror.get_mut(page).unwrap();
                    bytes.resize(*len as usize, 0);
                    known.len = *len;
                }
                AppliedChange::Moved { place } => mirror.get_mut(page).unwrap().0.place = *place,
                AppliedChange::Metadata => mirror.get_mut(page).unwrap().0.metadata = info.metadata,
                AppliedChange::Written { ranges } => {
                    let (_, bytes) = mirror.get_mut(page).unwrap();
                    for (range, next) in ranges.iter().zip(ranges.iter().skip(1)) {
                        assert!(range.start < range.end && range.end < next.start, "{ranges:?}");
                    }
                    for range in ranges {
                        let range = range.start as usize..range.end as usize;
                        store.read(*page, range.start as u64, &mut bytes[range]).unwrap();
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        if let Some((known, _)) = mirror.get_mut(page) {
            (known.epoch, known.lsn) = (*epoch, batch.lsn);
        }
    }
}

/// Adds a random operation to a batch.
fn operation(random: &mut Random, batch: &mut WriteBatch, page: PageId, len: u64) {
    let at = random.below(len + 1);
    match random.below(9) {
        0 => _ = batch.resize(page, random.below(2000)).resize(page, len),
        1 => _ = batch.move_to(page, PLACES[random.below(3) as usize]),
        2 => _ = batch.set_metadata(page, "name", random.below(9)),
        3 => _ = batch.scatter(page, Width::W1, &[(len / 2) as u32, 0], &[3, 4]),
        4 => _ = batch.write_masked(page, 0, Width::W1, &[5], &random.bytes(3)),
        5 => {
            let new = batch.create_from(random.bytes(50), PLACES[random.below(3) as usize]).page();
            if random.below(3) == 0 {
                batch.delete(new);
            }
        }
        6 => _ = batch.fill(page, at, len - at, &[random.below(200) as u8]),
        _ => {
            let len = random.below((len - at).min(40) + 1);
            let bytes = random.bytes(len);
            batch.write(page, at, &bytes);
        }
    }
}

#[test]
fn unreported_pages_are_unchanged() {
    for device in devices() {
        let label = device.label();
        let store = open(&SimDisk::new(), device);
        let mut random = Random(13);
        page(&store, &[0; 100]);
        let mut changes = store.changes().unwrap();
        assert_eq!(changes.begin_lsn(), store.lsn());
        let mut mirror = Mirror::new();
        for info in store.pages().unwrap() {
            mirror.insert(info.page, (info.clone(), content(&store, info.page)));
        }
        for round in 0..150 {
            let mut batch = store.batch();
            let pages: Vec<PageInfo> = store.pages().unwrap().collect();
            for info in pages.iter().filter(|info| info.len > 10) {
                (0..random.below(3)).for_each(|_| operation(&mut random, &mut batch, info.page, info.len));
            }
            if pages.len() > 4 {
                batch.delete(pages[1].page);
            }
            let resized = pages.last().filter(|info| info.len > 20 && random.below(4) == 0);
            if let Some(info) = resized {
                batch.resize(info.page, 11 + random.below(300));
            }
            let lsn = store.commit(batch).unwrap().position.lsn;
            let reported = applied(&mut changes);
            assert_eq!(reported.lsn, lsn);
            follow(&store, &reported, &mut mirror);
            let expected: Mirror = store
                .pages()
                .unwrap()
                .map(|info| (info.page, (info.clone(), content(&store, info.page))))
                .collect();
            assert!(mirror == expected, "round {round} on {label}: {reported:?}");
        }
        assert_eq!(changes.next_timeout(Duration::ZERO).unwrap(), None);
    }
}

#[test]
fn change_stream_reports_batch_page_by_page() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let (one, other) = (page(&store, &[0; 100]), page(&store, &[0; 64]));
    let mut changes = store.changes().unwrap();
    let mut batch = store.batch();
    let new = batch.create(4, Place::Host).page();
    batch.write(new, 0, b"page").delete(other).set_root("step", 1u64);
    batch.write(one, 50, &[1; 10]).fill(one, 60, 4, &[2]).write(one, 0, &[]).scatter(
        one,
        Width::W2,
        &[3, 5],
        &[0; 4],
    );
    batch.move_to(one, Place::Host).resize(one, 62);
    let committed = store.commit(batch).unwrap();
    let reported = applied(&mut changes);
    assert_eq!((reported.lsn, reported.root_changed), (committed.position.lsn, true));
    let reported: Vec<_> = reported
        .pages
        .iter()
        .map(|reported| (reported.page, reported.epoch, reported.changes.clone()))
        .collect();
    let written = AppliedChange::Written { ranges: vec![0..12, 50..62] };
    let of_one =
        vec![AppliedChange::Resized { len: 62 }, AppliedChange::Moved { place: Place::Host }, written];
    let expected = [
        (one, Epoch(2), of_one),
        (other, Epoch(1), vec![AppliedChange::Deleted]),
        (committed.pages[0], Epoch(1), vec![AppliedChange::Created]),
    ];
    assert_eq!(reported, expected);
    // A batch that does not change the bytes of a page still reports the page.
    store.commit(store.batch().move_to(one, Place::Host).note("nothing")).unwrap();
    let reported = applied(&mut changes);
    assert_eq!(
        (reported.pages[0].page, reported.pages[0].changes.len(), reported.root_changed),
        (one, 0, false)
    );
}

/// A stream that begins at any time receives each later batch once and in order, after the batch was applied.
#[test]
fn batches_of_all_threads_are_reported_in_order() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let pages: Vec<PageId> = (0..4).map(|_| page(&store, &[0; 16])).collect();
    let mut early = store.changes().unwrap();
    std::thread::scope(|scope| {
        for page in &pages {
            let store = &store;
            scope.spawn(move || {
                (0..500).for_each(|_| _ = store.submit(store.batch().fill(*page, 0, 16, &[1])).unwrap());
            });
        }
        for _ in 0..20 {
            let late = store.changes().unwrap();
            let begin = late.begin_lsn().0;
            // A stream that began after the last batch was applied receives no batch.
            for (event, lsn) in late.take(50.min(2004 - begin) as usize).zip(begin + 1..) {
                let ChangeEvent::Applied(batch) = event else { panic!("{event:?}") };
                assert_eq!(batch.lsn, Lsn(lsn));
                assert!(store.stats().applied >= batch.lsn);
            }
        }
    });
    for lsn in 5..=2004 {
        let batch = applied(&mut early);
        assert_eq!((batch.lsn, batch.pages.len()), (Lsn(lsn), 1));
    }
    assert_eq!(early.next_timeout(Duration::ZERO).unwrap(), None);
}

/// If a receiver is too slow, a gap replaces the batches that it missed. A restore is also reported as a gap.
#[test]
fn gap_is_reported_at_its_position() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let page = page(&store, &[0; 1 << 19]);
    let snapshot = store.snapshot().unwrap();
    let mut changes = store.changes().unwrap();
    // Each batch has 10,000 ranges that do not touch each other.
    for number in 0..8 {
        let mut batch = store.batch();
        (0..10_000).for_each(|at| _ = batch.write(page, 4 * at, &[number]));
        apply(&store, &mut batch);
    }
    for lsn in 2..=7 {
        assert_eq!(applied(&mut changes).lsn, Lsn(lsn));
    }
    assert_eq!(changes.next(), Some(ChangeEvent::Lagged { from: Lsn(8) }));
    assert_eq!(changes.next_timeout(Duration::ZERO).unwrap(), None);
    apply(&store, store.batch().write(page, 0, b"kept up"));
    assert_eq!(applied(&mut changes).lsn, Lsn(10));

    let restored = store.restore(StatePoint::Snapshot(snapshot.id)).unwrap().lsn;
    apply(&store, store.batch().write(page, 0, b"after"));
    assert_eq!(changes.next(), Some(ChangeEvent::Lagged { from: restored }));
    apply(&store, store.batch().write(page, 0, b"later"));
    assert_eq!(applied(&mut changes).lsn, Lsn(restored.0 + 2));
}

#[test]
fn a_stream_ends_with_its_store() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let page = page(&store, &[0; 16]);
    let mut changes = store.changes().unwrap();
    store.submit(store.batch().write(page, 0, b"last")).unwrap();
    store.close().unwrap();
    // All logged batches were applied before the store closed.
    assert_eq!(applied(&mut changes).lsn, Lsn(2));
    assert_eq!(changes.next(), None);
    assert!(matches!(changes.next_timeout(Duration::MAX), Err(Error::Closed)));

    let device = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
    let store = open(&SimDisk::new(), device.clone());
    let mut changes = store.changes().unwrap();
    device.arm(DeviceFault { call: Some(DeviceCall::Submit), nth: 1, context_lost: false });
    let mut batch = store.batch();
    batch.create(16, Place::Host);
    let _logged = store.submit(batch).unwrap();
    assert_eq!(changes.next(), None, "the batch is logged, and was not applied");
    assert!(matches!(changes.next_timeout(Duration::MAX), Err(Error::Poisoned(_))));
}

/// Pages in the requested place are not copied, and all other pages move in one batch.
#[test]
fn ensure_moves_only_pages_at_other_places() {
    let store = open(&SimDisk::new(), Arc::new(HostDevice::new()));
    let mut batch = store.batch();
    PLACES.iter().for_each(|place| _ = batch.create(8, *place));
    let pages = store.commit(batch).unwrap().pages;
    let mut changes = store.changes().unwrap();
    let lsn = store.lsn();
    assert_eq!(store.ensure(&[], Place::Host).unwrap(), None);
    assert_eq!(store.ensure(&[pages[2], pages[2]], Place::Host).unwrap(), None);
    let unknown = store.ensure(&[pages[0], PageId(99)], Place::Host).unwrap_err();
    assert!(matches!(unknown, Error::UnknownPage { page: PageId(99) }), "{unknown}");
    let refused = store.ensure(&pages, Place::Device(64)).unwrap_err();
    assert!(
        matches!(refused, Error::Unavailable(Unavailable::Place { place: Place::Device(64), .. })),
        "{refused}"
    );
    assert_eq!(store.lsn(), lsn, "nothing was logged");

    let twice = [&pages[..], &pages[..]].concat();
    let moved = store.ensure(&twice, Place::Host).unwrap().unwrap();
    assert_eq!((moved.lsn.0, store.lsn()), (lsn.0 + 1, moved.lsn));
    let reported = applied(&mut changes);
    let of_pages: Vec<_> =
        reported.pages.iter().map(|reported| (reported.page, reported.changes.clone())).collect();
    let is_moved = vec![AppliedChange::Moved { place: Place::Host }];
    assert_eq!(of_pages, [(pages[0], is_moved.clone()), (pages[1], is_moved)]);
    assert_eq!(store.ensure(&pages, Place::Host).unwrap(), None);
}
