//! Batches: the operations that a batch may combine for a page, and the resulting state of the page.

use remanent_format::image::ImagePurpose;
use remanent_format::op::Op;
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::{Epoch, FileName, Lsn, Metadata, PageId, Place, SnapshotId, Value};

use crate::maker::{Maker, PAGE, content};
use crate::verdict::{Clean, Refused, check, check_state, four, rebuilt};

#[test]
fn batch_may_name_prewritten_image() {
    let mut maker = Maker::new();
    maker.batch().batch().batch_with_image(7);
    check("the batch that names it is the last", &maker, &Clean(3));
    maker.batch().snapshot(9, 1, 1, 1);
    check("a write follows it, an older image goes before", &maker, &Clean(4));
    maker.snapshot(10, 2, 3, 4);
    check("the snapshot caught the page with it", &maker, &Clean(4));
    maker.batch_with_image(11).batch_with_image(12);
    check("one follows another", &maker, &Clean(6));
    let until = RebuildOptions { until: Some(Lsn(5)), ..RebuildOptions::default() };
    check_state("the first of the two", &rebuild(&maker.files, &until).unwrap(), 5);

    maker.files.0.remove(&FileName::Pages(11));
    check("no newer state needs the first of the two", &maker, &Clean(6));
    maker.files.0.get_mut(&FileName::Pages(12)).unwrap()[4096 + 128] ^= 1;
    check("a rotten one is named", &maker, &Refused("000000000000000c.pages at offset 4224: image checksum"));
}

/// Creates a store in which batch 3 only moves the page, and batch 4 moves it and writes to it.
pub fn moved() -> Maker {
    let mut maker = Maker::new();
    maker.batch().batch();
    let root = |number: u64| Op::SetRoot { name: "n".into(), value: Value::from(number) };
    let to = |place| Op::Move { page: PAGE, place };
    let bytes = &content(4)[..8];
    let write = Op::Write { page: PAGE, offset: 0, bytes };
    maker.batch_of(&[to(Place::Device(1)), root(3)], true);
    maker.batch_of(&[to(Place::Host), write, to(Place::Pinned), root(4)], true);
    maker.batch();
    maker
}

/// Returns the place and epoch of that page after a batch, and the batch that wrote its bytes.
fn moved_at(lsn: u64) -> (Place, Epoch, u64) {
    match lsn {
        1 | 2 => (Place::Host, Epoch(lsn), lsn),
        3 => (Place::Device(1), Epoch(2), 2),
        4 | 5 => (Place::Pinned, Epoch(lsn - 1), lsn),
        _ => unreachable!("five batches"),
    }
}

/// Adds a snapshot that captured that page after batch `caught`.
pub fn snapshot_of_moved(maker: &mut Maker, redo: u64, caught: u64, end: u64) {
    let (place, epoch, written) = moved_at(caught);
    let mut manifest = maker.manifest(1, redo, caught, end);
    let image = maker.image(1, ImagePurpose::Snapshot, written);
    let entry = &mut manifest.entries[0];
    (entry.place, entry.epoch, entry.image) = (place, epoch, Some(image));
    maker.publish(FileName::Manifest(1), &manifest);
}

#[test]
fn moved_page_has_newest_place_at_any_capture_time() {
    let mut looked_at = 0;
    for (redo, caught, end) in (1..=5_u64)
        .flat_map(|redo| (redo..=5).flat_map(move |caught| (caught..=5).map(move |end| (redo, caught, end))))
    {
        let mut maker = moved();
        snapshot_of_moved(&mut maker, redo, caught, end);
        for until in (end..=5).map(Lsn) {
            let base = Some(SnapshotId(1));
            let options = RebuildOptions { base, until: Some(until), ..RebuildOptions::default() };
            let rebuilt = rebuild(&maker.files, &options).unwrap();
            let why = format!("from {redo}, caught behind {caught}, up to {end}, seen behind {until}");
            let (place, epoch, written) = moved_at(until.0);
            let info = rebuilt.table.get(PAGE).unwrap();
            assert_eq!((info.place, info.epoch, info.lsn), (place, epoch, until), "{why}");
            assert_eq!(rebuilt.contents[&PAGE], content(written), "{why}");
            looked_at += 1;
        }
    }
    assert!(looked_at > 50, "only {looked_at} states");
    let from_beginning = rebuilt(&moved()).unwrap();
    let info = from_beginning.table.get(PAGE).unwrap();
    assert_eq!((info.place, info.epoch, info.lsn), (Place::Pinned, Epoch(4), Lsn(5)));
}

#[test]
fn move_of_unknown_page_is_refused() {
    let mut maker = Maker::new();
    maker.batch().batch_of(&[Op::Move { page: PageId(2), place: Place::Host }], true);
    assert!(rebuilt(&maker).unwrap_err().contains("page 2 does not exist"));
}

#[test]
fn id_of_deleted_page_is_not_reused_in_same_batch() {
    let create = |page, len| {
        let (place, key, metadata) = (Place::Host, None, Metadata::new());
        Op::Create { page, len, place, key, metadata }
    };
    let new = PageId(2);
    let write = Op::Write { page: new, offset: 8, bytes: &[1; 2] };
    let delete = |page| Op::Delete { page };
    for (page, ops) in [
        (1, vec![delete(PAGE), create(PAGE, 5)]),
        (2, vec![create(new, 10), write, delete(new), create(new, 5)]),
    ] {
        let mut maker = four();
        maker.batch_of(&ops, true);

        let damage = rebuilt(&maker).unwrap_err();
        assert!(damage.contains(&format!("page {page} already exists")), "{damage}");
    }
}

#[test]
fn image_is_only_operation_on_its_page() {
    let mut maker = Maker::new();
    let image = maker.image(7, ImagePurpose::Batch, 2);
    let (page, len) = (PAGE, 64);
    let named = Op::Image { page, len, image };
    let write = Op::Write { page, offset: 0, bytes: &[1] };
    let set = Op::SetMetadata { page, name: "a".into(), value: Value::Null };
    let to_pinned = Op::Move { page, place: Place::Pinned };
    let resize = |len| Op::Resize { page, len };
    let new = PageId(2);
    let create = Op::Create { page: new, len, place: Place::Host, key: None, metadata: Metadata::new() };
    let of_new = Op::Image { page: new, len, image };
    let alone = Some("the batch contains an image of page 1 and other changes of its bytes");
    let too_long = Some("image length is 64 bytes, but page 1 has 63 bytes");
    for (why, ops, refusal) in [
        ("alone", vec![&named], None),
        ("a page that the batch creates", vec![&create, &of_new], None),
        ("resized to its length before", vec![&resize(9), &resize(len), &named], None),
        ("deleted after", vec![&named, &Op::Delete { page }], None),
        ("metadata beside it", vec![&named, &set], None),
        ("moved before and after", vec![&to_pinned, &named, &to_pinned], None),
        ("written before", vec![&write, &named], alone),
        ("written after", vec![&named, &write], alone),
        ("written after something else", vec![&named, &create, &write], alone),
        ("resized after", vec![&named, &resize(len)], alone),
        ("twice", vec![&named, &named], alone),
        ("another length", vec![&resize(63), &named], too_long),
    ] {
        let mut maker = maker.clone();
        let ops: Vec<Op<'_>> = ops.into_iter().cloned().collect();
        maker.batch().batch_of(&ops, true);
        match (rebuilt(&maker), refusal) {
            (Ok(found), None) => assert_eq!(found.table.lsn(), Lsn(2), "{why}"),
            (Err(damage), Some(text)) => assert!(damage.contains(text), "{why}: {damage}"),
            (found, _) => panic!("{why}: {found:?}"),
        }
    }
}
