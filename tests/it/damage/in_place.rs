//! Damage to a store that reuses image files in place. Devices copy pages to mapped files, so a reused file
//! keeps its length and contains bytes of older images after its last image.
//!
//! The files are on a memory file system, because devices cannot write to the files of the simulated disk.

use remanent::Options;
use remanent::device::host::HostDevice;
use remanent::options::{Compression, ImageOptions, Retention};
use remanent_format::image::ImageRef;

use super::*;
use crate::machine::skipped;
use crate::with_options::With;

fn options() -> Options {
    let options = small()
        .retention(Retention::new().snapshots_kept(1))
        .images(ImageOptions::new().chunk_len(16 << 10))
        .with(|options| options.log.reserve_bytes = Some(0));
    options.with(|options| {
        options.images.compression = Compression::Off;
        options.images.io = ImageIo::Mapped;
    })
}

/// Returns a cleanly closed store, the image file of its newest snapshot, and the offset at which the images
/// end in that longer file. Returns `None` and prints a message if there is no memory file system.
fn victim() -> Option<(Victim, FileName, u64)> {
    let folder = tempfile::tempdir_in("/dev/shm");
    let folder =
        folder.inspect_err(|error| skipped("files in memory", &format!("/dev/shm: {error}"))).ok()?;
    let store = options().open_with(folder.path(), std::sync::Arc::new(HostDevice::new())).unwrap();
    let mut states = BTreeMap::new();
    let mut commit = |fill: &dyn Fn(&mut remanent::WriteBatch)| {
        let mut batch = store.batch();
        fill(&mut batch);
        let pages = store.commit(batch).unwrap().pages;
        states.insert(store.lsn(), State::of(&store));
        pages
    };
    let lens = [3000, 2000, 5000];
    let pages = commit(&|batch| lens.iter().for_each(|len| _ = batch.create(*len, Place::Device(0))));
    // Nearly all of each page changes, so that a snapshot writes whole pages.
    let change = |batch: &mut remanent::WriteBatch, seed: u64, pages: &[PageId]| {
        for page in pages {
            let len = lens[page.0 as usize - 1] - 1;
            let bytes: Vec<u8> = (0..len).map(|at| mix(seed << 40 | page.0 << 20 | at) as u8).collect();
            batch.write(*page, 0, &bytes);
        }
    };
    for seed in 0..4 {
        commit(&|batch| change(batch, seed, &pages));
        store.snapshot().unwrap();
    }
    commit(&|batch| _ = batch.delete(pages[2]));
    for seed in 4..6 {
        commit(&|batch| change(batch, seed, &pages[..2]));
        store.snapshot().unwrap();
    }
    (6..9).for_each(|seed| _ = commit(&|batch| change(batch, seed, &pages[..1])));
    assert!(store.stats().snapshots.bytes_in_place > 0, "none was in place");
    let last = store.lsn();
    store.close().unwrap();
    let files = read_folder(folder.path());
    let newest = Survey::read(&files).unwrap().snapshot(SnapshotId(6)).unwrap();
    let images: Vec<ImageRef> = newest.entries.iter().filter_map(|entry| entry.image).collect();
    let file = FileName::Pages(images[0].file);
    assert!(images.iter().all(|image| image.file == images[0].file), "one file has all of them");
    let end =
        images.iter().map(|image| image.offset + image.stored_len).max().unwrap().next_multiple_of(4096);
    let tail = &files.0[&file][end as usize..];
    assert!(tail.iter().filter(|byte| **byte != 0).count() > 1000, "{file} ends in {} bytes", tail.len());
    Some((Victim { files, states, last, marked: last, older: Vec::new() }, file, end))
}

/// Reads the files of a store's directory.
fn read_folder(root: &std::path::Path) -> Files {
    let mut files = Files::default();
    for folder in [Folder::Root, Folder::Log, Folder::Pages, Folder::Snapshots] {
        for entry in std::fs::read_dir(root.join(folder.name())).unwrap() {
            let entry = entry.unwrap();
            let name = FileName::parse(folder, entry.file_name().to_str().unwrap());
            if let Some(name) = name.filter(|name| !matches!(name, FileName::Lock | FileName::Readers)) {
                files.0.insert(name, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    files
}

#[test]
fn damage_to_files_rewritten_in_place_is_detected_or_harmless() {
    let Some((victim, image_file, end)) = victim() else { return };
    let count = Count::default();
    damage_files(&victim.files, &Files::default(), |what, files| {
        let verdict = victim.open(what, files);
        assert_eq!(verdict, victim.rebuild(what, files), "{what}");
        count.add(verdict);
    });
    let [whole, cut, traceless, refused] = count.get("a file damaged, opened");
    assert_eq!((cut, traceless), (0, 0));
    assert!(whole >= at_least(100) && refused >= at_least(30), "{whole} whole, {refused} refused");

    // Flip bits in images and spares. Damage to old bytes has no effect, and all other bytes are in use.
    let is_image = |file: FileName| file.folder() == Folder::Pages;
    let places: Vec<_> = (0..victim.files.bytes_len()).map(|number| place(&victim.files, number)).collect();
    let places: Vec<_> = places.into_iter().filter(|(file, _)| is_image(*file)).collect();
    let count = Count::default();
    let step = if is_long() { 1 } else { 61 };
    sweep(&victim.files, places.len() / step, |files, number| {
        let place = places[number * step];
        let verdict = open_flipped(&victim, files, place, mix(number as u64) % 8);
        let is_old = place.0 != image_file || place.1 as u64 >= end;
        assert!(!is_old || verdict == Verdict::Whole, "{place:?}: {verdict:?}");
        count.add(verdict);
    });
    let [whole, cut, traceless, refused] = count.get("a bit of an image flipped, opened");
    assert_eq!((cut, traceless), (0, 0));
    assert!(whole >= at_least(100) && refused >= at_least(10), "{whole} whole, {refused} refused");
}
