//! Stores that cannot be opened.

use crate::with_options::With;
use remanent::disk::dir::DirDisk;
use remanent::error::{Invalid, Mismatch, Remedy};
use remanent::layout::{Arrangement, BlockLayout, BlockShape};
use remanent::options::{Create, Retention};

use super::*;

#[test]
fn store_opens_only_with_matching_identity_and_layout() {
    let disk = SimDisk::new();
    let opened = |options| Store::open_on(Arc::new(disk.clone()), Gauge::host(), options);
    let own = small().identity("run 7").layout_fingerprint([7; 32]);
    drop(opened(own.clone()).unwrap());
    let events = disk.events();
    let other = opened(own.clone().identity("run 8")).unwrap_err();
    assert!(matches!(&other, Error::Mismatch(Mismatch::Identity { found }) if found == b"run 7"), "{other}");
    let other = opened(own.clone().layout_fingerprint([8; 32])).unwrap_err();
    assert!(
        matches!(other, Error::Mismatch(Mismatch::Layout { found: Some(found), .. }) if found == [7; 32]),
        "{other}"
    );
    let changed = disk.history()[events..].iter().any(|event| !event.starts_with("sync folder"));
    assert!(!changed, "{:#?}", &disk.history()[events..]);
    // Options without an identity and a layout fingerprint match every store.
    drop(opened(small()).unwrap());
    drop(opened(own.create(Create::Never)).unwrap());

    let plain = SimDisk::new();
    drop(open_on_host(&plain).unwrap());
    let requested = small().layout_fingerprint([7; 32]);
    let other = Store::open_on(Arc::new(plain.clone()), Gauge::host(), requested).unwrap_err();
    assert!(matches!(other, Error::Mismatch(Mismatch::Layout { found: None, .. })), "{other}");
    let other = Store::open_on(Arc::new(plain), Gauge::host(), small().identity("run 7")).unwrap_err();
    assert!(matches!(other, Error::Mismatch(Mismatch::Identity { .. })), "{other}");
}

/// If both fingerprints belong to known layouts, the error describes the layouts in words.
#[test]
fn open_with_another_layout_reports_both_layouts() {
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
    let error = opened(other.fingerprint()).unwrap_err().to_string();
    let expected = format!(
        "the store's layout fingerprint is that of {of}, contiguous, aligned to 512, but the caller's is that of \
         {of}, layers apart, outer first, aligned to 512; "
    );
    assert!(error.starts_with(&expected), "{error}");
    // An unknown fingerprint is printed as bytes.
    let error = opened([0xCD; 32]).unwrap_err().to_string();
    assert!(error.contains("contiguous") && error.contains(&"cd".repeat(32)), "{error}");
}

#[test]
fn store_is_not_created_without_create() {
    let directory = tempfile::tempdir().unwrap();
    for path in [directory.path().join("missing"), directory.path().to_owned()] {
        let error = small().create(Create::Never).open(&path).unwrap_err();
        assert!(
            matches!(&error, Error::NoStore { path: found, found: None } if *found == path.display().to_string()),
            "{error}"
        );
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    std::fs::write(directory.path().join("thesis.tex"), "precious").unwrap();
    for create in [Create::Never, Create::IfEmpty] {
        let error = small().create(create).open(directory.path()).unwrap_err();
        assert!(
            matches!(&error, Error::NoStore { found: Some(found), .. } if found == "thesis.tex"),
            "{error}"
        );
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
        assert!(
            matches!(error, Error::Invalid(Invalid::Option { option, .. }) if option == named),
            "{error}"
        );
        assert_eq!((error.remedy(), disk.events()), (Remedy::ChangeCall, 0), "{error}");
    }
    let disk = SimDisk::new();
    let largest = small().identity(vec![1; 64 << 10]);
    drop(Store::open_on(Arc::new(disk.clone()), Gauge::host(), largest).unwrap());
    open_on_host(&disk).unwrap();
}

#[test]
fn second_writer_gets_process_id_of_the_first() {
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
