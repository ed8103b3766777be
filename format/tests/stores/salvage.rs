//! Salvage of damaged stores: which pages are salvaged, and which are not.

use remanent_format::manifest::{Manifest, ManifestKind};
use remanent_format::op::Op;
use remanent_format::salvage::{FoundBytes, PageRemains, Salvage};
use remanent_format::store::{Features, StoreFile, StoreRecord};
use remanent_format::{Epoch, FileName, Lsn};

use crate::maker::{Maker, PAGE, STORE, content};
use crate::verdict::{four, resum, segment};

fn salvage(maker: &Maker) -> Salvage<'_> {
    let store = StoreFile { store: STORE, features: Features::default(), record: StoreRecord::default() };
    Salvage::read(&maker.files, store, 1 << 20).unwrap()
}

fn all(salvage: &Salvage<'_>, bytes: &FoundBytes, len: u64) -> Vec<u8> {
    salvage.window(bytes, 0..len).unwrap()
}

/// Salvage ignores bytes that resemble a batch or a version but were never committed.
#[test]
fn salvage_invents_no_state() {
    let salvaged = |maker: &Maker| {
        let salvage = salvage(maker);
        let info = salvage.state().table.get(PAGE).expect("the page").clone();
        let PageRemains::Exact(bytes) = salvage.find(&info) else { panic!("{:?}", salvage.find(&info)) };
        assert_eq!(info.lsn, salvage.state().table.lsn());
        assert_eq!(all(&salvage, &bytes, info.len), content(info.lsn.0), "the page at {}", info.lsn);
        info.lsn.0
    };
    assert_eq!(salvaged(&four()), 4);

    // A batch after the end that the next incarnation states was cut off, although its chain hash is correct.
    let mut cut = four();
    let mut longer = cut.clone();
    longer.batch();
    let (number, at) = longer.at(5);
    assert_eq!(number, 2);
    let frame = longer.frame_at(5).to_vec();
    cut.reopen(2);
    segment(&mut cut, number)[at..][..frame.len()].copy_from_slice(&frame);
    assert_eq!(salvaged(&cut), 4);

    // A frame that follows no other frame and that no durable mark covers.
    let mut stray = four();
    stray.frame_at(4)[72] ^= 1;
    resum(stray.frame_at(4));
    assert_eq!(salvaged(&stray), 3);
    // The frame's own durable mark does not prove the frame.
    stray.frame_at(4)[56] = 9;
    resum(stray.frame_at(4));
    assert_eq!(salvaged(&stray), 3);

    // The table of an uncommitted restore assigns the next batch's number to older content.
    let mut maker = four();
    maker.batch();
    let mut table = Manifest { kind: ManifestKind::Table, ..maker.manifest(9, 2, 2, 5) };
    (table.entries[0].lsn, table.entries[0].epoch, table.epoch_high) = (Lsn(5), Epoch(5), Epoch(5));
    maker.publish(FileName::Table(9), &table);
    assert_eq!(salvaged(&maker), 5);
}

/// The snapshot and the beginning of the log both need a lost batch. The snapshot's version of the page can
/// be proven, but no structure determines the state.
#[test]
fn salvage_without_known_state_reports_no_exact_page() {
    let mut maker = four();
    maker.snapshot(1, 2, 3, 4);
    [1, 4].into_iter().for_each(|lsn| maker.frame_at(lsn)[8] ^= 1);
    let salvage = salvage(&maker);
    assert!(!salvage.state().is_whole);
    let info = salvage.state().table.get(PAGE).expect("the page");
    let PageRemains::Older { version, bytes, .. } = salvage.find(&info) else {
        panic!("{:?}", salvage.find(&info))
    };
    assert_eq!((version.lsn, all(&salvage, &bytes, version.len)), (Lsn(3), content(3)));
}

/// Memory is needed only for the final length of a version, so a page that was longer before is not lost.
#[test]
fn shrunk_page_is_salvaged() {
    let long = |len| Op::Resize { page: PAGE, len };
    let mut maker = four();
    maker
        .batch_of(&[long(1 << 40), long(5)], true)
        .batch_of(&[long(1 << 40)], true)
        .batch_of(&[long(9)], true);
    let expected = [4, 4, 4, 4, 4, 0, 0, 0, 0];
    let find = |maker: &Maker| {
        let salvage = salvage(maker);
        let info = salvage.state().table.get(PAGE).expect("the page");
        let found = salvage.find(&info);
        let bytes = match &found {
            PageRemains::Exact(bytes) => all(&salvage, bytes, info.len),
            PageRemains::Older { version, bytes, .. } => all(&salvage, bytes, version.len),
            PageRemains::Lost(_) => Vec::new(),
        };
        (found, bytes)
    };
    let (found, bytes) = find(&maker);
    assert!(matches!(&found, PageRemains::Exact(_)) && bytes == expected, "{found:?}: {bytes:?}");

    // The newest version needs a missing file. The version before was temporarily long as well.
    maker.batch_of(&[long(64)], true).batch_with_image(7);
    maker.files.0.remove(&FileName::Pages(7));
    let (found, bytes) = find(&maker);
    let PageRemains::Older { version, .. } = &found else { panic!("{found:?}") };
    assert_eq!((version.lsn, bytes.len(), &bytes[..9]), (Lsn(8), 64, &expected[..]));

    // The limit applies to the requested version.
    let mut maker = four();
    maker.batch_of(&[long((1 << 20) + 1)], true);
    let (found, bytes) = find(&maker);
    let PageRemains::Older { version, why, .. } = &found else { panic!("{found:?}") };
    assert!(why.to_string().contains("page length is 1048577, over the limit of 1048576"), "{why}");
    assert_eq!((version.lsn, bytes), (Lsn(4), content(4)));
}
