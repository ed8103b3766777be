//! Compressed images in every component that reads images.

use std::path::Path;

use remanent::options::{Compression, ImageOptions};
use remanent::snapshot::SnapshotInfo;
use remanent::{Options, PageId, Place, StatePoint, Store};
use remanent_format::image::read::check_image;
use remanent_format::state::rebuild::{RebuildOptions, rebuild};
use remanent_format::state::survey::Survey;
use remanent_format::{FileName, Folder};

use remanent::disk::dir::DirReader;
use remanent_format::image::Codec;

/// Returns short and long pages of zeros, of slowly ascending words and of random bytes.
fn contents() -> Vec<Vec<u8>> {
    let words = |count: u32| (0..count).flat_map(|word| (word / 5).to_le_bytes()).collect::<Vec<u8>>();
    let mut state = 88_172_645_463_325_252_u64;
    let mut noise = |len: usize| {
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        (0..len).map(next).collect::<Vec<u8>>()
    };
    let (short, long) = (noise(3000), noise(600_000));
    // Together, these pages are longer than one upload to the device.
    vec![vec![0; 100], vec![0; 70_000], words(1000), words(700_000), short, long, vec![], vec![9; 5 << 20]]
}

fn store(directory: &Path, compression: Compression) -> (Store, SnapshotInfo) {
    let store = Options::new().images(ImageOptions::new().compression(compression)).open(directory).unwrap();
    for content in contents() {
        let mut batch = store.batch();
        let page = batch.create(content.len() as u64, Place::Host).page();
        batch.write(page, 0, &content);
        store.commit(batch).unwrap();
    }
    let snapshot = store.snapshot().unwrap();
    (store, snapshot)
}

fn check(store: &Store) {
    for (page, content) in (1..).map(PageId).zip(contents()) {
        let mut bytes = vec![0xee; content.len()];
        store.read(page, 0, &mut bytes).unwrap();
        assert!(bytes == content, "page {page}");
    }
}

#[test]
fn every_reader_reads_compressed_images() {
    let directory = tempfile::tempdir().unwrap();
    let raw: u64 = contents().iter().map(|content| content.len() as u64).sum();
    let (store, snapshot) = store(directory.path(), Compression::Zstd);
    assert!(snapshot.bytes < raw / 3, "{} of {raw} bytes", snapshot.bytes);

    // Each image has the expected codec and is intact.
    let reader = DirReader::new(directory.path());
    let survey = Survey::read(&reader).unwrap();
    let manifest = survey.readable().next().unwrap();
    for (entry, content) in manifest.entries.iter().zip(contents()) {
        let Some(image) = &entry.image else { continue };
        let stays = content.len() < 256 || content[..4] == contents()[4][..4] || content == contents()[5];
        let expected = if stays { Codec::Raw } else { Codec::Zstd };
        assert_eq!((image.codec, image.raw_crc), (expected, crc32fast::hash(&content)), "{}", entry.page);
        check_image(&reader, image, entry.len).unwrap();
    }

    // A restore reads these images.
    let mut batch = store.batch();
    for (page, content) in (1..).map(PageId).zip(contents()) {
        if content.is_empty() {
            batch.delete(page);
        } else {
            batch.fill(page, 0, content.len() as u64, &[0xaa]);
        }
    }
    store.commit(batch).unwrap();
    store.restore(StatePoint::Snapshot(snapshot.id)).unwrap();
    check(&store);
    store.close().unwrap();

    // A rebuild and an open read these images, with a page whose length changes after its image.
    let rebuilt = rebuild(&reader, &RebuildOptions::default()).unwrap();
    assert!(rebuilt.contents.values().eq(&contents()));
    let store = Store::open(directory.path()).unwrap();
    assert!(store.recovered().snapshot.is_some());
    check(&store);
    let mut batch = store.batch();
    batch.resize(PageId(8), 1 << 20).resize(PageId(8), 5 << 20).fill(PageId(8), 1 << 20, 4 << 20, &[9]);
    store.commit(batch).unwrap();
    drop(store);
    check(&Store::open(directory.path()).unwrap());
}

#[test]
fn store_is_readable_with_any_image_io() {
    let directory = tempfile::tempdir().unwrap();
    let raw: u64 = contents().iter().map(|content| content.len() as u64).sum();
    let (written, snapshot) = store(directory.path(), Compression::Off);
    assert_eq!(snapshot.bytes, raw);
    drop(written);
    for compression in [Compression::Zstd, Compression::Off, Compression::Zstd] {
        let store = Options::new()
            .images(ImageOptions::new().compression(compression))
            .open(directory.path())
            .unwrap();
        check(&store);
        store.snapshot().unwrap();
    }
}

/// If a bit of any compressed image is flipped, recovery uses the previous snapshot and reports the damage.
#[test]
fn a_damaged_compressed_image_falls_back() {
    let directory = tempfile::tempdir().unwrap();
    let (written, _) = store(directory.path(), Compression::Zstd);
    let mut batch = written.batch();
    for page in [2, 3, 4, 8] {
        batch.fill(PageId(page), 0, 4, &[1]);
    }
    written.commit(batch).unwrap();
    let newest = written.snapshot().unwrap();
    drop(written);
    let survey = Survey::read(&DirReader::new(directory.path())).unwrap();
    let manifest = survey.snapshot(newest.id).unwrap();
    let entry = manifest.entries.iter().find(|entry| entry.page == PageId(8)).unwrap();
    let image = entry.image.unwrap();
    assert_eq!(image.codec, Codec::Zstd);
    let file = FileName::Pages(image.file);
    let path = directory.path().join(Folder::Pages.name()).join(file.name());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[(image.offset + image.stored_len / 2) as usize] ^= 0x10;
    std::fs::write(&path, bytes).unwrap();

    let store = Store::open(directory.path()).unwrap();
    let recovered = store.recovered();
    assert!(recovered.snapshot.is_some_and(|used| used < newest.id), "{recovered:?}");
    assert_eq!((recovered.harmless[0].file, recovered.harmless[0].offset), (file, image.offset));
    let mut bytes = vec![0; 5 << 20];
    store.read(PageId(8), 0, &mut bytes).unwrap();
    assert!(bytes[..4] == [1; 4] && bytes[4..].iter().all(|byte| *byte == 9));
}
