//! Basic operations of a store, and the state that a caller finds after a close or a crash.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::with_options::With;
use remanent::batch::Width;
use remanent::disk::dir::{DirDisk, DirReader};
use remanent::error::{FileName, Folder, Invalid, NoSuchState, Taken, Unavailable};
use remanent::options::{LogOptions, SnapshotSchedule};
use remanent::{
    Ack, Error, Key, Lsn, Metadata, Options, PageId, Place, SnapshotId, StatePoint, Store, Value,
};
use remanent_format::state::survey::Survey;

fn small() -> Options {
    Options::new().log(LogOptions::new().segment_len(16 << 10)).snapshots(SnapshotSchedule::never())
}

fn bytes(store: &Store, page: PageId) -> Vec<u8> {
    let mut out = vec![0; store.page(page).unwrap().len as usize];
    store.read(page, 0, &mut out).unwrap();
    out
}

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

#[test]
fn every_operation_survives_reopening() {
    let directory = tempfile::tempdir().unwrap();
    let store = small().open(directory.path()).unwrap();
    let mut batch = store.batch();
    let metadata = Metadata::from([("dtype".to_owned(), Value::from("bf16"))]);
    let page = batch.create(64, Place::Device(0)).key(key("weights")).metadata(metadata).page();
    batch.create(10, Place::Host);
    batch.write(page, 0, &[1; 16]);
    batch.write_masked(page, 16, Width::W2, &[0b0000_0101], &[9; 16]);
    batch.scatter(page, Width::W4, &[10, 8], &[2, 2, 2, 2, 3, 3, 3, 3]);
    batch.fill(page, 48, 8, &[7, 8]);
    batch.set_metadata(page, "step", 5u64).set_root("step", 5u64).note("one of each");
    let copy = batch.clone_page(page);
    batch.write(copy, 0, &[0xee]);
    let committed = store.commit(batch).unwrap();
    assert_eq!(committed.position.lsn, Lsn(1));
    let [page, gone, copy] = committed.pages[..] else { panic!("{:?}", committed.pages) };

    let mut batch = store.batch();
    batch.resize(page, 80).remove_metadata(page, "dtype").delete(gone).remove_root("nothing");
    store.commit(batch).unwrap();

    let mut expected = vec![0; 80];
    expected[..16].fill(1);
    expected[16..18].fill(9);
    expected[20..22].fill(9);
    expected[32..36].fill(3);
    expected[40..44].fill(2);
    expected[48..56].copy_from_slice(&[7, 8, 7, 8, 7, 8, 7, 8]);
    let mut cloned = expected[..64].to_vec();
    cloned[0] = 0xee;

    let check = |store: &Store| {
        assert_eq!(bytes(store, page), expected);
        assert_eq!(bytes(store, copy), cloned);
        assert!(matches!(store.page(gone), Err(Error::UnknownPage { .. })));
        let info = store.page_by_key(key("weights")).unwrap();
        assert_eq!((info.page, info.len, info.epoch.0, info.lsn), (page, 80, 2, Lsn(2)));
        assert_eq!(*info.metadata, Metadata::from([("step".to_owned(), Value::U64(5))]));
        assert_eq!(info.place, Place::Device(0));
        assert_eq!(store.page(copy).unwrap().key, None);
        assert_eq!(store.root().unwrap()["step"], Value::U64(5));
        assert_eq!(store.pages().unwrap().len(), 2);
    };
    check(&store);
    store.close().unwrap();
    for _ in 0..3 {
        let store = small().open(directory.path()).unwrap();
        assert_eq!(store.recovered().position.lsn, Lsn(2));
        assert_eq!(store.recovered().torn, None);
        check(&store);
        store.snapshot().unwrap();
        check(&store);
    }
}

#[test]
fn a_refused_batch_changes_nothing() {
    let store = small().open_temporary().unwrap();
    let mut batch = store.batch();
    let page = batch.create(8, Place::Host).key(key("a")).page();
    let page =
        store.commit(batch).map(|done| done.pages[0]).unwrap_or_else(|error| panic!("{error} {page:?}"));
    let before = (store.pages().unwrap().collect::<Vec<_>>(), store.lsn());
    let refuse = |build: &dyn Fn(&mut remanent::WriteBatch)| {
        let mut batch = store.batch();
        batch.set_root("touched", true);
        build(&mut batch);
        let error = store.commit(batch).unwrap_err();
        assert_eq!((store.pages().unwrap().collect::<Vec<_>>(), store.lsn()), before, "{error}");
        assert!(!store.root().unwrap().contains_key("touched"), "{error}");
        error
    };
    let out_of_bounds = refuse(&|batch| {
        batch.write(page, 5, &[0; 4]);
    });
    assert!(matches!(out_of_bounds, Error::OutOfBounds { page_len: 8, .. }), "{out_of_bounds}");
    let huge = refuse(&|batch| {
        batch.fill(page, u64::MAX, 4, &[0]);
    });
    assert!(matches!(huge, Error::OutOfBounds { .. }), "{huge}");
    let unknown = refuse(&|batch| {
        batch.delete(PageId(77));
    });
    assert!(matches!(unknown, Error::UnknownPage { page: PageId(77) }), "{unknown}");
    let twice = refuse(&|batch| {
        batch.scatter(page, Width::W1, &[1, 2, 1], &[0; 3]);
    });
    assert!(matches!(twice, Error::Invalid(Invalid::Operation { index: 1, .. })), "{twice}");
    let key_taken = refuse(&|batch| {
        batch.create(1, Place::Host).key(key("a"));
    });
    assert!(matches!(key_taken, Error::Taken(Taken::Key { .. })), "{key_taken}");
    let conflict = refuse(&|batch| {
        batch.expect_epoch(page, remanent::Epoch(3)).write(page, 0, &[1]);
    });
    assert!(matches!(conflict, Error::Conflict { found: remanent::Epoch(1), .. }), "{conflict}");
    let pattern = refuse(&|batch| {
        batch.fill(page, 0, 6, &[1, 2, 3]);
    });
    assert!(matches!(pattern, Error::Invalid(Invalid::Operation { .. })), "{pattern}");
    let nowhere = refuse(&|batch| {
        batch.create(1, Place::Device(64));
    });
    assert!(matches!(nowhere, Error::Unavailable(Unavailable::Place { .. })), "{nowhere}");
}

#[test]
fn commits_from_many_threads_all_survive() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(small().ack(Ack::Durable).open(directory.path()).unwrap());
    let pages: Vec<PageId> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u8)
            .map(|thread| {
                let store = &store;
                scope.spawn(move || {
                    let mut batch = store.batch();
                    batch.create(256, Place::Host);
                    let page = store.commit(batch).unwrap().pages[0];
                    for step in 0..50u8 {
                        let mut batch = store.batch();
                        batch.write(page, u64::from(step) * 4, &[thread, step, thread, step]);
                        store.commit(batch).unwrap();
                    }
                    page
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(store.lsn(), Lsn(8 * 51));
    let expected: Vec<Vec<u8>> = pages.iter().map(|page| bytes(&store, *page)).collect();
    drop(store);
    let store = small().open(directory.path()).unwrap();
    for (page, expected) in pages.iter().zip(expected) {
        assert_eq!(bytes(&store, *page), expected);
        assert_eq!(store.page(*page).unwrap().epoch.0, 51);
    }
}

#[test]
fn a_snapshot_lets_the_log_be_recycled() {
    let directory = tempfile::tempdir().unwrap();
    let store = small().open(directory.path()).unwrap();
    let mut batch = store.batch();
    batch.create(1000, Place::Host);
    let page = store.commit(batch).unwrap().pages[0];
    let mut lowest_before = 0;
    for round in 0..12u8 {
        for step in 0..60u8 {
            let mut batch = store.batch();
            batch.write(page, 0, &[round, step]).write(page, 100, &[step; 800]);
            store.commit(batch).unwrap();
        }
        store.snapshot().unwrap();
        let survey = Survey::read(&DirReader::new(directory.path())).unwrap();
        let lowest = *survey.log.segments().keys().next().unwrap();
        // The log from the beginning replaces the second snapshot until that snapshot is taken.
        let needed = match &store.snapshots()[..] {
            [_] => 1,
            [older, _] => survey.links[&older.id].as_ref().unwrap().0.redo.segment,
            more => panic!("{more:?}"),
        };
        assert_eq!(lowest, needed, "round {round}: the log after the older snapshot, and nothing before it");
        assert!(lowest > lowest_before, "round {round}: a round fills more than a segment");
        lowest_before = lowest;
    }
    drop(store);
    let store = small().open(directory.path()).unwrap();
    assert_eq!(store.recovered().snapshot, Some(SnapshotId(12)));
    assert_eq!(bytes(&store, page)[..2], [11, 59]);
    assert_eq!(store.page(page).unwrap().epoch.0, 721);
}

#[test]
fn restore_is_a_new_batch() {
    let directory = tempfile::tempdir().unwrap();
    let store = small().open(directory.path()).unwrap();
    let mut batch = store.batch();
    let (a, b) = (batch.create(100, Place::Host).page(), batch.create(50, Place::Host).page());
    batch.write(a, 0, &[1; 100]).write(b, 0, &[2; 50]).set_root("step", 1u64);
    let pages = store.commit(batch).unwrap().pages;
    let snapshot = store.snapshot().unwrap();
    let mut batch = store.batch();
    batch.write(pages[0], 0, &[9; 10]).delete(pages[1]).set_root("step", 2u64);
    let late = batch.create(5, Place::Host).page();
    let late = (store.commit(batch).unwrap().pages[0], late).0;

    let position = store.restore(StatePoint::Snapshot(snapshot.id)).unwrap();
    assert_eq!(position.lsn, Lsn(3));
    let check = |store: &Store| {
        assert_eq!(bytes(store, pages[0]), [1; 100]);
        assert_eq!(bytes(store, pages[1]), [2; 50]);
        assert!(store.page(late).is_err());
        assert_eq!(store.root().unwrap()["step"], Value::U64(1));
        assert!(store.page(pages[0]).unwrap().epoch.0 > 2);
    };
    check(&store);
    drop(store);
    let store = small().open(directory.path()).unwrap();
    check(&store);
    let mut batch = store.batch();
    batch.create(1, Place::Host);
    assert!(store.commit(batch).unwrap().pages[0] > late, "an id was used again");
    assert!(matches!(
        store.restore(StatePoint::Snapshot(SnapshotId(99))),
        Err(Error::NoSuchState(NoSuchState::Snapshot { .. }))
    ));
}

#[test]
fn oversized_frame_gets_own_segment() {
    let directory = tempfile::tempdir().unwrap();
    let store = small().open(directory.path()).unwrap();
    let content: Vec<u8> = (0..100_000u32).map(|at| at as u8).collect();
    let mut batch = store.batch();
    let page = batch.create(100_000, Place::Host).page();
    batch.write(page, 0, &content);
    let page = store.commit(batch).unwrap().pages[0];
    let mut batch = store.batch();
    batch.write(page, 1, &[0xff]);
    store.commit(batch).unwrap();
    drop(store);
    let store = small().open(directory.path()).unwrap();
    let found = bytes(&store, page);
    assert_eq!(found[0], 0);
    assert_eq!(found[1], 0xff);
    assert_eq!(found[2..], content[2..]);
}

#[test]
fn the_pure_rebuild_agrees_with_recovery() {
    let directory = tempfile::tempdir().unwrap();
    let store = small().open(directory.path()).unwrap();
    let mut batch = store.batch();
    let page = batch.create(30, Place::Host).page();
    batch.write(page, 3, b"abc");
    let page = store.commit(batch).unwrap().pages[0];
    let mut batch = store.batch();
    batch.resize(page, 5).resize(page, 9);
    store.commit(batch).unwrap();
    drop(store);
    let reader = remanent::disk::dir::DirReader::new(directory.path());
    let rebuilt = remanent_format::state::rebuild::rebuild(&reader, &Default::default()).unwrap();
    let store = Store::open_on(
        Arc::new(DirDisk::new(directory.path())),
        Arc::new(remanent::device::host::HostDevice::new()),
        small(),
    )
    .unwrap();
    assert_eq!(rebuilt.contents[&page], bytes(&store, page));
    assert_eq!(bytes(&store, page), b"\0\0\0ab\0\0\0\0");
    assert!(rebuilt.table.pages().eq(store.pages().unwrap()));
}

#[test]
fn new_page_reference_is_invalid_in_other_batch() {
    let store = Options::new().log(LogOptions::new().segment_len(64 << 10)).open_temporary().unwrap();
    let mut first = store.batch();
    first.create(4, Place::Host);
    let of_first = first.create(4, Place::Host).page();
    let mut second = store.batch();
    let of_second = [(); 2].map(|()| second.create(4, Place::Host).page());
    assert_eq!(of_first.index(), of_second[1].index());
    second.write(of_first, 0, b"lost");
    assert!(matches!(store.commit(second), Err(Error::UnknownPage { .. })));
    first.write(of_first, 0, b"kept");
    let committed = store.commit(first).unwrap();
    let mut bytes = [0; 4];
    store.read(committed.pages[of_first.index()], 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"kept");
}

/// A seal must not wait for a pause in the commits, because a snapshot ends only when its seal is durable.
#[test]
fn snapshots_finish_during_commits() {
    let directory = tempfile::tempdir().unwrap();
    let store = Options::new().log(LogOptions::new().segment_len(256 << 10)).open(directory.path()).unwrap();
    let mut batch = store.batch();
    for _ in 0..3 {
        batch.create(64, Place::Host);
    }
    let pages = store.commit(batch).unwrap().pages;
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for page in &pages {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let mut batch = store.batch();
                    batch.write(*page, 0, &[1; 64]);
                    store.commit(batch).unwrap();
                }
            });
        }
        for _ in 0..6 {
            let before = store.lsn();
            while store.lsn() == before {
                std::thread::yield_now();
            }
            assert!(store.snapshot().unwrap().end > before, "commits go on");
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(store.snapshots().len(), 2);
}

/// A tool that copies a directory may omit zeros and create holes. If a segment with holes were mapped, a
/// write to it on a full disk would kill the process.
#[test]
fn sparse_segments_are_not_reused() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        small()
            .with(|options| {
                options.log.segment_len = 1 << 20;
                options.log.reserve_bytes = Some(2 << 20);
            })
            .open(directory.path())
            .unwrap()
    };
    let segments = |is_wanted: fn(&FileName) -> bool| {
        let folder = directory.path().join(Folder::Log.name());
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let is_wanted =
            |name: &String| FileName::parse(Folder::Log, name).is_some_and(|name| is_wanted(&name));
        let wanted = names.map(|name| name.into_string().unwrap()).filter(is_wanted);
        wanted.map(|name| folder.join(name)).collect::<Vec<_>>()
    };
    let is_spare = |name: &FileName| matches!(name, FileName::Spare(_));
    // The thread that creates segments fills the reserve after an open.
    let store = open();
    while segments(is_spare).is_empty() {
        std::thread::yield_now();
    }
    store.close().unwrap();
    for spare in segments(is_spare) {
        let len = spare.metadata().unwrap().len();
        let file = File::create(&spare).unwrap();
        file.set_len(len).unwrap();
    }

    let store = open();
    for segment in segments(|name| matches!(name, FileName::Segment(_))) {
        let found = segment.metadata().unwrap();
        assert!(found.blocks() * 512 >= found.len(), "{} has holes", segment.display());
    }
    store.close().unwrap();
}
