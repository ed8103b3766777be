//! Damaged objects and damaged directories.

use std::collections::BTreeSet;
use std::fs;

use remanent_archive::Error;
use remanent_archive::object::{Kind, decode_header};

use crate::bed::{Bed, Life, open_state};

#[test]
fn bit_flip_in_any_object_is_reported_with_its_key() {
    let bed = Bed::new(7);
    let mut life = Life::new(7);
    for _ in 0..3 {
        let store = life.work(3);
        store.snapshot().unwrap();
        store.close().unwrap();
        life.work(2).close().unwrap();
        bed.push(&life.path).unwrap();
    }
    life.work(2).close().unwrap();
    bed.push(&life.path).unwrap(); // Adds a fence and a run after the newest boundary.
    let newest = *life.states.keys().next_back().unwrap();
    let objects = bed.world.borrow().objects.clone();
    let mut kinds = BTreeSet::new();
    for (key, bytes) in &objects {
        let kind = decode_header(bytes).unwrap().kind;
        for at in [9, 30, 50, 70, 100, 127, bytes.len() / 2, bytes.len() - 1] {
            let damaged = bed.copy();
            let mut flipped = bytes.to_vec();
            flipped[at] ^= 4;
            damaged.world.borrow_mut().objects.insert(*key, flipped.into());
            let directory = tempfile::tempdir().unwrap();
            match damaged.restore(directory.path()) {
                Err(Error::Damaged { key: found, .. }) => {
                    assert_eq!(found, *key);
                    kinds.insert(kind);
                }
                Err(error) => panic!("{key}, byte {at}: {error}"),
                // A restore does not need objects below the start of the newest manifest, which a boundary has passed.
                Ok(_) => assert!(open_state(directory.path()) == life.states[&newest]),
            }
        }
    }
    let expected = [Kind::Fence, Kind::Run, Kind::Manifest, Kind::Boundary, Kind::Bound, Kind::Data];
    assert!(expected.iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
}

/// A snapshot with a damaged image is not archived, and no boundary is appended over it.
#[test]
fn snapshot_with_a_damaged_image_is_skipped() {
    let bed = Bed::new(8);
    let mut life = Life::new(8);
    let store = life.work(12);
    store.snapshot().unwrap();
    store.close().unwrap();
    for entry in fs::read_dir(life.path.join("pages")).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        bytes.iter_mut().skip(4096).for_each(|byte| *byte ^= 1);
        fs::write(&path, bytes).unwrap();
    }
    let refused = bed.push(&life.path);
    match refused {
        Ok(pushed) => assert!(pushed.snapshot.is_none() && !pushed.damaged.is_empty(), "{pushed:?}"),
        Err(error) => assert!(error.to_string().contains("pages/"), "{error}"),
    }
}
