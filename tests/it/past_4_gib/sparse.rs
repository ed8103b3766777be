//! Stores whose log and image are at offsets beyond 4 GiB in files that consist mostly of holes.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use remanent_format::Folder;

use super::*;
use crate::far_store::{FAR, FarStore, far_store};
use crate::maker::{PAGE_LEN, content};

/// Writes the store's files, with holes instead of zeros.
fn write(store: &FarStore, directory: &Path) {
    for (name, file) in &store.files.0 {
        let folder = match name.folder() {
            Folder::Root => directory.to_owned(),
            inner => directory.join(inner.name()),
        };
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name.name());
        let written = OpenOptions::new().write(true).create_new(true).open(path).unwrap();
        written.set_len(file.len).unwrap();
        file.pieces.iter().for_each(|(at, bytes)| written.write_all_at(bytes, *at).unwrap());
    }
}

/// Opens the store, and asserts that it has the content of its batches up to `lsn`.
fn opens_at(lsn: u64, directory: &Path) {
    let store = options().open(directory).unwrap();
    assert_eq!(store.lsn(), Lsn(lsn));
    let page = store.page_by_key("p").unwrap();
    let mut model = Model::default();
    model.write(0, &content(lsn));
    if page.len == LEN {
        let read = |offset, out: &mut [u8]| _ = store.read(page.page, offset, out).unwrap();
        model.check_changed("found", read);
        for number in store.lsn().0 + 1..store.lsn().0 + 33 {
            commit(&store, |batch| add_change(batch, page.page, number));
            model.apply(number);
        }
        store.snapshot().unwrap();
        drop(store);
        let store = options().open(directory).unwrap();
        let read = |offset, out: &mut [u8]| _ = store.read(page.page, offset, out).unwrap();
        model.check_changed("changed and opened again", read);
    } else {
        assert_eq!(store.read_to_vec(page.page).unwrap(), content(lsn));
    }
}

#[test]
fn damage_past_4_gib_of_a_file_is_named_by_the_engine() {
    if !is_complete() {
        return skipped("damage past 4 GiB", "only with REMANENT_TEST_SIZE=full");
    }
    alone_for(limit(), || {
        for (page_len, place) in [(PAGE_LEN as u64, Place::Host), (LEN, Place::Disk)] {
            let far = far_store(page_len, place);
            let (log, pages) = (FileName::Segment(1), FileName::Pages(1));
            let damaged = |file: FileName, at: u64| {
                let directory = tempfile::tempdir().unwrap();
                write(&far, directory.path());
                let folder = directory.path().join(file.folder().name());
                flip(&folder.join(file.name()), at);
                directory
            };
            let directory = tempfile::tempdir().unwrap();
            write(&far, directory.path());
            opens_at(3, directory.path());
            // The last batch is a torn tail.
            opens_at(2, damaged(log, far.frames[1] + 90).path());
            damage_is_named(damaged(log, far.frames[0] + 90).path(), log, far.frames[0]);
            damage_is_named(damaged(pages, FAR + 3).path(), pages, FAR);
            if page_len > FOUR_GIB {
                damage_is_named(damaged(pages, FAR + FOUR_GIB + 5).path(), pages, FAR);
            }
        }
    });
}
