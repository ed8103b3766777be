//! Stores that may not be opened, and the content of every error.

use std::collections::BTreeSet;
use std::io;

use crate::with_options::With;
use remanent::disk::dir::DirDisk;
use remanent::error::{Defect, FileName, Remedy};
use remanent::layout::{Arrangement, BlockLayout, BlockShape};
use remanent::options::{Create, Retention};
use remanent::{Epoch, Key, Lsn, Position};

use super::*;

#[test]
fn store_opens_only_with_matching_kind() {
    let disk = SimDisk::new();
    let opened = |options| Store::open_on(Arc::new(disk.clone()), Gauge::host(), options);
    let own = small().identity("run 7").layout_fingerprint([7; 32]);
    drop(opened(own.clone()).unwrap());
    let events = disk.events();
    let other = opened(own.clone().identity("run 8")).unwrap_err();
    assert!(matches!(&other, Error::IdentityMismatch { found } if found == b"run 7"), "{other}");
    let other = opened(own.clone().layout_fingerprint([8; 32])).unwrap_err();
    assert!(matches!(other, Error::LayoutMismatch { found: Some(found), .. } if found == [7; 32]), "{other}");
    let changed = disk.history()[events..].iter().any(|event| !event.starts_with("sync folder"));
    assert!(!changed, "{:#?}", &disk.history()[events..]);
    // An option that is not given is not compared.
    drop(opened(small()).unwrap());
    drop(opened(own.create(Create::Never)).unwrap());

    let plain = SimDisk::new();
    drop(open_on_host(&plain).unwrap());
    let requested = small().layout_fingerprint([7; 32]);
    let other = Store::open_on(Arc::new(plain.clone()), Gauge::host(), requested).unwrap_err();
    assert!(matches!(other, Error::LayoutMismatch { found: None, .. }), "{other}");
    let other = Store::open_on(Arc::new(plain), Gauge::host(), small().identity("run 7")).unwrap_err();
    assert!(matches!(other, Error::IdentityMismatch { .. }), "{other}");
}

/// What a layout means can be read in the error, where the fingerprints are layouts of ours.
#[test]
fn an_open_with_another_layout_prints_both() {
    let shape = BlockShape { layers: 32, outer: 2, tokens: 16, inner: 1024, width: 2 };
    let layout = |arrangement| BlockLayout::new(shape, 100, arrangement, 512).unwrap();
    let own = layout(Arrangement::Contiguous);
    let other = layout(Arrangement::LayersApart { block_first: false });
    let disk = SimDisk::new();
    let opened = |fingerprint| {
        Store::open_on(Arc::new(disk.clone()), Gauge::host(), small().layout_fingerprint(fingerprint))
    };
    drop(opened(own.fingerprint()).unwrap());
    let of = "100 blocks of 32 layers x 2 x 16 tokens x 1024 elements of 2 bytes";
    assert_eq!(
        opened(other.fingerprint()).unwrap_err().to_string(),
        format!(
            "the store's layout fingerprint is that of {of}, contiguous, aligned to 512, and the caller's is \
             that of {of}, layers apart, outer first, aligned to 512"
        )
    );
    // Of other kinds the bytes are printed.
    let error = opened([0xCD; 32]).unwrap_err().to_string();
    assert!(error.contains("contiguous") && error.contains(&"cd".repeat(32)), "{error}");
}

#[test]
fn store_is_not_created_without_create() {
    let directory = tempfile::tempdir().unwrap();
    for path in [directory.path().join("missing"), directory.path().to_owned()] {
        let error = small().create(Create::Never).open(&path).unwrap_err();
        assert!(
            matches!(&error, Error::NoStore { path: found } if *found == path.display().to_string()),
            "{error}"
        );
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    std::fs::write(directory.path().join("thesis.tex"), "precious").unwrap();
    for create in [Create::Never, Create::IfEmpty] {
        let error = small().create(create).open(directory.path()).unwrap_err();
        assert!(matches!(&error, Error::ForeignDirectory { found, .. } if found == "thesis.tex"), "{error}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn invalid_options_are_named_and_change_nothing() {
    let cases = [
        ("log.segment_len", small().with(|options| options.log.segment_len = 0)),
        ("log.segment_len", small().with(|options| options.log.segment_len = 8 << 10)),
        ("log.segment_len", small().with(|options| options.log.segment_len = (16 << 10) + 1)),
        ("log.segment_len", small().with(|options| options.log.segment_len = (4 << 30) + 4096)),
        ("identity", small().identity(vec![0; (64 << 10) + 1])),
        ("retention.snapshots_kept", small().retention(Retention::new().snapshots_kept(0))),
        ("snapshots.bytes_per_second", small().with(|options| options.snapshots.bytes_per_second = Some(0))),
        ("scrubs.bytes_per_second", small().with(|options| options.scrubs.bytes_per_second = Some(0))),
    ];
    for (named, options) in cases {
        let disk = SimDisk::new();
        let error = Store::open_on(Arc::new(disk.clone()), Gauge::host(), options).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option, .. } if option == named), "{error}");
        assert_eq!((error.remedy(), disk.events()), (Remedy::ChangeCall, 0), "{error}");
    }
    let disk = SimDisk::new();
    let largest = small().identity(vec![1; 64 << 10]);
    drop(Store::open_on(Arc::new(disk.clone()), Gauge::host(), largest).unwrap());
    open_on_host(&disk).unwrap();
}

#[test]
fn second_writer_gets_holder_of_store() {
    let directory = tempfile::tempdir().unwrap();
    let _store = small().open(directory.path()).unwrap();
    let second = Store::open_on(Arc::new(DirDisk::new(directory.path())), Gauge::host(), small());
    let error = second.unwrap_err();
    assert!(
        matches!(&error, Error::Locked { holder, .. } if holder.contains(&std::process::id().to_string())),
        "{error}"
    );
    assert!(error.to_string().contains(directory.path().to_str().unwrap()), "{error}");
}

/// Every error: its file, offset and Lsn, what helps, and a word that its text must hold.
#[test]
fn every_error_names_location_and_remedy() {
    let source = || Arc::new(io::Error::from_raw_os_error(5));
    let short = || Arc::new(io::Error::from_raw_os_error(11));
    let (page, place) = (PageId(7), Place::Device(1));
    let key = || Key::new("weights").unwrap();
    let segment = FileName::Segment(3);
    let failed =
        Error::Io { action: "sync", file: segment, offset: Some(4096), store: None, source: source() };
    let damage = Defect::Missing.at_lsn(segment, 8192, Lsn(9));
    let lost = Error::Device { reason: "gone".to_owned(), context_lost: true };
    let nowhere = (None, None, None);
    let rows = [
        (failed.clone(), (Some(segment), Some(4096), None), Remedy::Reopen, "4096"),
        (
            Error::Io {
                action: "open",
                file: segment,
                offset: None,
                store: Some("/srv/pages".into()),
                source: source(),
            },
            (Some(segment), None, None),
            Remedy::Reopen,
            "cannot open",
        ),
        (
            Error::Folder { action: "sync", path: "store/log".to_owned(), source: source() },
            nowhere,
            Remedy::Reopen,
            "store/log",
        ),
        (
            Error::DiskFull { file: segment, needed: 16384, store: None },
            (Some(segment), None, None),
            Remedy::FreeSpace,
            "free some space",
        ),
        (
            Error::DiskFull { file: segment, needed: 16384, store: Some("/srv/pages".into()) },
            (Some(segment), None, None),
            Remedy::FreeSpace,
            "of the store in /srv/pages (16384 bytes)",
        ),
        (
            Error::Thread { thread: "a thread", store: Some("/srv/pages".into()), source: short() },
            nowhere,
            Remedy::Retry,
            "cannot start a thread of the store in /srv/pages: ",
        ),
        (
            Error::Thread { thread: "a thread", store: None, source: source() },
            nowhere,
            Remedy::Permit,
            "cannot start a thread: ",
        ),
        (
            Error::Panicked { thread: "a thread", store: Some("/srv/pages".into()) },
            nowhere,
            Remedy::Reopen,
            "a thread of the store in /srv/pages panicked",
        ),
        (Error::Randomness { source: source() }, nowhere, Remedy::Permit, "random bytes"),
        (Key::new("").unwrap_err().into(), nowhere, Remedy::ChangeCall, "1 to 64 bytes long"),
        (Error::from(damage), (Some(segment), Some(8192), Some(Lsn(9))), Remedy::Inspect, "remanent verify"),
        (Error::Locked { holder: "process 5".to_owned(), store: None }, nowhere, Remedy::Retry, "process 5"),
        (
            Error::Locked { holder: "process 5".to_owned(), store: Some("/srv/pages".into()) },
            nowhere,
            Remedy::Retry,
            "the store in /srv/pages is open in process 5",
        ),
        (
            Error::Superseded { holder: "process 5".to_owned(), store: Some("/srv/pages".into()) },
            nowhere,
            Remedy::Reopen,
            "the store in /srv/pages was opened by another writer: process 5",
        ),
        (Error::Forked { opener: 5 }, nowhere, Remedy::ChangeCall, "must open it itself"),
        (Error::NoStore { path: "store".to_owned() }, nowhere, Remedy::ChangeCall, "no store in store"),
        (
            Error::ForeignDirectory { path: "home".to_owned(), found: "thesis".to_owned() },
            nowhere,
            Remedy::ChangeCall,
            "empty directory",
        ),
        (Error::IdentityMismatch { found: vec![1] }, nowhere, Remedy::ChangeCall, "identity"),
        (
            Error::LayoutMismatch { expected: [0xCD; 32], found: Some([0xAB; 32]) },
            nowhere,
            Remedy::ChangeCall,
            "abab",
        ),
        (Error::LayoutMismatch { expected: [1; 32], found: None }, nowhere, Remedy::ChangeCall, "none"),
        (
            Error::InvalidOption { option: "ack", reason: "no".to_owned() },
            nowhere,
            Remedy::ChangeCall,
            "option ack",
        ),
        (Error::UnknownPage { page }, nowhere, Remedy::ChangeCall, "page 7"),
        (Error::UnknownKey { key: key() }, nowhere, Remedy::ChangeCall, "weights"),
        (
            Error::OutOfBounds { page, offset: 5, len: 4, page_len: 8 },
            nowhere,
            Remedy::ChangeCall,
            "8 bytes long",
        ),
        (Error::KeyTaken { key: key(), holder: page }, nowhere, Remedy::ChangeCall, "page 7"),
        (Error::Conflict { page, expected: Epoch(1), found: Epoch(2) }, nowhere, Remedy::Retry, "epoch 2"),
        (
            Error::InvalidOperation { index: 4, reason: "no".to_owned() },
            nowhere,
            Remedy::ChangeCall,
            "operation 4",
        ),
        (
            Error::SourceFailed { index: 4, offset: 4096, source: source() },
            nowhere,
            Remedy::Permit,
            "the source of its bytes cannot be read at offset 4096",
        ),
        (Error::SourceFailed { index: 4, offset: 0, source: short() }, nowhere, Remedy::Retry, "operation 4"),
        (Error::Limit { what: "note", found: 9, limit: 8 }, nowhere, Remedy::ChangeCall, "limit of 8"),
        (
            Error::OverBudget { place, requested: 9, available: 8, budget: 10 },
            nowhere,
            Remedy::FreeSpace,
            "8 of 10",
        ),
        (Error::PlaceUnavailable { place, reason: "no GPU" }, nowhere, Remedy::ChangeCall, "no GPU"),
        (Error::NoSnapshot { snapshot: SnapshotId(4) }, nowhere, Remedy::ChangeCall, "snapshot 4"),
        (
            Error::Overtaken { lsn: Lsn(9), snapshot: Some(SnapshotId(4)) },
            (None, None, Some(Lsn(9))),
            Remedy::StartOver,
            "start from snapshot 4",
        ),
        (
            Error::Overtaken { lsn: Lsn(9), snapshot: None },
            (None, None, Some(Lsn(9))),
            Remedy::StartOver,
            "9",
        ),
        (
            Error::Diverged {
                position: Position { lsn: Lsn(9), ..Position::default() },
                survived: Some(Lsn(7)),
            },
            (None, None, Some(Lsn(9))),
            Remedy::StartOver,
            "7 is the last one",
        ),
        (
            Error::Diverged { position: Position { lsn: Lsn(9), ..Position::default() }, survived: None },
            (None, None, Some(Lsn(9))),
            Remedy::StartOver,
            "9 in incarnation 0",
        ),
        (
            Error::OutOfOrder { lsn: Lsn(9), expected: Lsn(7) },
            (None, None, Some(Lsn(9))),
            Remedy::ChangeCall,
            "7 is the next",
        ),
        (Error::Device { reason: "busy".to_owned(), context_lost: false }, nowhere, Remedy::Reopen, "busy"),
        (lost.clone(), nowhere, Remedy::NewProcess, "gone"),
        (Error::OutOfMemory { place, len: 9 }, nowhere, Remedy::FreeSpace, "9 bytes"),
        (
            Error::Poisoned(Arc::new(failed)),
            (Some(segment), Some(4096), None),
            Remedy::Reopen,
            "open it again",
        ),
        (Error::Poisoned(Arc::new(lost)), nowhere, Remedy::NewProcess, "new process"),
        (
            Error::Poisoned(Arc::new(Error::DiskFull { file: segment, needed: 16384, store: None })),
            (Some(segment), None, None),
            Remedy::Reopen,
            "open it again",
        ),
        (
            Error::Poisoned(Arc::new(Error::OutOfMemory { place, len: 9 })),
            nowhere,
            Remedy::Reopen,
            "open it again",
        ),
        (Error::Closed, nowhere, Remedy::ChangeCall, "closed"),
        (
            Error::InvalidStatePoint { found: "12".to_owned() },
            nowhere,
            Remedy::ChangeCall,
            "expected lsn:N, snapshot:N or the name of a snapshot, found \"12\"",
        ),
        (
            Error::NoSnapshotNamed { name: "wram".to_owned(), nearest: Some("warm".to_owned()) },
            nowhere,
            Remedy::ChangeCall,
            "there is no snapshot named \"wram\"; did you mean \"warm\"?",
        ),
        (
            Error::NoSnapshotNamed { name: "x".to_owned(), nearest: None },
            nowhere,
            Remedy::ChangeCall,
            "named \"x\"",
        ),
        (
            Error::NameTaken { name: "warm".to_owned(), snapshot: SnapshotId(4) },
            nowhere,
            Remedy::ChangeCall,
            "snapshot 4",
        ),
        (
            Error::OutsideWindow { requested: Lsn(9), oldest: Lsn(2), newest: Lsn(7), below: vec![Lsn(1)] },
            (None, None, Some(Lsn(9))),
            Remedy::ChangeCall,
            "9",
        ),
        (
            Error::LengthsDiffer { pages: [page, page], lens: [1, 2] },
            nowhere,
            Remedy::ChangeCall,
            "1 and 2 bytes",
        ),
        (Error::Leased { page }, nowhere, Remedy::Retry, "page 7"),
        (Error::MemoryInUse { len: 9, page }, nowhere, Remedy::Retry, "page 7"),
        (Error::MemoryRefused { len: 9, reason: "no".to_owned() }, nowhere, Remedy::ChangeCall, "9 bytes"),
        (Error::HintRefused { place, reason: "no" }, nowhere, Remedy::ChangeCall, "hints"),
        (Error::StreamRefused { stream: 1, reason: "no" }, nowhere, Remedy::ChangeCall, "0x1"),
        (
            Error::DeviceUnavailable { device: "cuda:9".to_owned(), reason: "no".to_owned() },
            nowhere,
            Remedy::ChangeCall,
            "cuda:9",
        ),
    ];
    let mut advised = BTreeSet::new();
    for (error, place, remedy, word) in rows {
        assert_eq!((error.file(), error.offset(), error.lsn()), place, "{error}");
        assert_eq!(error.remedy(), remedy, "{error}");
        assert!(error.to_string().contains(word), "{error} does not say {word:?}");
        let advice = error.advice();
        assert!(advice.len() > 12 && !advice.contains("change the call"), "{error}: {advice}");
        assert!(!advice.ends_with('.') && !advice.starts_with(char::is_uppercase), "{error}: {advice}");
        advised.insert(advice.into_owned());
    }
    // Most errors have advice of their own.
    assert!(advised.len() > 35, "{advised:#?}");
}
