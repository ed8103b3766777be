//! Second directories that continue an archive.

use remanent_archive::Error;

use crate::bed::{Bed, Life, copy_directory, open_state};

/// A restored directory continues the archive. The first directory is rejected, even after more commits. This is
/// repeated for several generations.
#[test]
fn restore_continues_and_original_directory_is_refused() {
    let bed = Bed::new(1);
    let mut first = Life::new(1);
    let store = first.work(5);
    store.snapshot().unwrap();
    store.close().unwrap();
    first.work(2).close().unwrap();
    bed.push(&first.path).unwrap();

    for generation in 0..4 {
        let mut second = Life::new(10 + generation);
        std::fs::create_dir_all(&second.path).unwrap();
        bed.restore(&second.path).unwrap();
        let newest = *first.states.keys().next_back().unwrap();
        assert!(open_state(&second.path) == first.states[&newest]);
        let store = second.work(4);
        if generation % 2 == 0 {
            store.snapshot().unwrap();
        }
        store.close().unwrap();
        let pushed = bed.push(&second.path).unwrap();
        let newest = *second.states.keys().next_back().unwrap();
        assert_eq!(pushed.archived.lsn.0, newest);
        assert!(bed.restored_state() == second.states[&newest], "generation {generation}");

        first.work(2).close().unwrap();
        let objects = bed.world.borrow().objects.clone();
        let refused = bed.push(&first.path).unwrap_err();
        assert!(matches!(refused, Error::Diverged { .. }), "{refused}");
        assert!(bed.world.borrow().objects == objects, "a refused push changes nothing");
        bed.push(&second.path).unwrap();
        first = second;
    }
}

/// An older copy of the directory has no record of the newest fence.
#[test]
fn older_copy_of_the_directory_is_refused() {
    let bed = Bed::new(2);
    let mut life = Life::new(2);
    life.work(3).close().unwrap();
    bed.push(&life.path).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    copy_directory(&life.path, scratch.path());
    life.work(2).close().unwrap();
    bed.push(&life.path).unwrap();
    let refused = bed.push(scratch.path()).unwrap_err();
    assert!(matches!(refused, Error::Diverged { .. }), "{refused}");
    life.work(1).close().unwrap();
    bed.push(&life.path).unwrap();
}

/// A push creates no object if there are no new batches.
#[test]
fn push_of_an_archived_store_changes_nothing() {
    let bed = Bed::new(3);
    let mut life = Life::new(3);
    let store = life.work(3);
    store.snapshot().unwrap();
    store.close().unwrap();
    bed.push(&life.path).unwrap();
    let objects = bed.world.borrow().objects.clone();
    let pushed = bed.push(&life.path).unwrap();
    assert_eq!((pushed.term, pushed.runs, pushed.snapshot), (None, 0, None));
    assert!(bed.world.borrow().objects == objects);
}
