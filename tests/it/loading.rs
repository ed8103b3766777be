//! Loading of images when a store is opened. Many images are loaded at once, and long images in parts.

use std::path::Path;
use std::sync::Arc;

use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::disk::dir::{DirDisk, DirReader};
use remanent::options::{Compression, ImageOptions, MemoryOptions, PageLoad};
use remanent::snapshot::SnapshotInfo;
use remanent::testing::late_device::LateDevice;
use remanent::{Options, PageId, Place, Store};
use remanent_format::state::survey::Survey;
use remanent_format::{Defect, FileName, Folder};

/// Lengths below and above the limit up to which an image is read as a whole. Some images share a read, and some
/// need several reads.
const LENS: [u64; 14] = [
    5,
    0,
    4096,
    (4 << 20) - 8192,
    (4 << 20) - 8191,
    70_000,
    13,
    (9 << 20) + 13,
    (8 << 20) - 16_384,
    2 << 20,
    2 << 20,
    100,
    3 << 20,
    1,
];
/// A page whose image has more than two parts.
const LONG: PageId = PageId(8);

fn content(page: PageId, len: u64) -> Vec<u8> {
    let mut state = page.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // A part of the content is compressible.
        if state & 7 < 5 { 0 } else { (state >> 24) as u8 }
    };
    (0..len).map(next).collect()
}

fn write(store: &Store) -> SnapshotInfo {
    let mut batch = store.batch();
    for (page, len) in (1..).map(PageId).zip(LENS) {
        batch.create_from(content(page, len), Place::Device(0));
    }
    store.commit(batch).unwrap();
    store.snapshot().unwrap()
}

fn check(store: &Store, why: &str) {
    for (page, len) in (1..).map(PageId).zip(LENS) {
        let mut bytes = vec![0xee; len as usize];
        store.read(page, 0, &mut bytes).unwrap();
        assert!(bytes == content(page, len), "{why}: {page}");
    }
}

fn open(directory: &Path, device: Arc<dyn Device>, compression: Compression) -> Store {
    let options = Options::new().images(ImageOptions::new().compression(compression));
    Store::open_on(Arc::new(DirDisk::new(directory)), device, options).unwrap()
}

#[test]
fn images_of_every_length_round_trip() {
    for compression in [Compression::Off, Compression::Zstd] {
        let directory = tempfile::tempdir().unwrap();
        write(&open(directory.path(), Arc::new(HostDevice::new()), compression));
        let late = || LateDevice::new(Arc::new(HostDevice::new()));
        let devices: [Arc<dyn Device>; 2] = [Arc::new(HostDevice::new()), Arc::new(late())];
        for device in devices {
            let label = device.label();
            for restore in [PageLoad::Eager, PageLoad::OnDemand] {
                let options = Options::new()
                    .images(ImageOptions::new().compression(compression))
                    .memory(MemoryOptions::new().load(restore));
                let disk = Arc::new(DirDisk::new(directory.path()));
                let store = Store::open_on(disk, device.clone(), options).unwrap();
                assert_eq!(store.recovered().replayed_batches, 0, "{label}");
                let unloaded = if restore == PageLoad::Eager { 0 } else { LENS.len() as u64 - 1 };
                assert_eq!(
                    store.recovered().unloaded_pages,
                    unloaded,
                    "all but the one that is empty, on {label}"
                );
                check(&store, &label);
            }
        }
    }
}

/// The checksum covers every part and their order, and the error names the whole image.
#[test]
fn long_image_is_verified_as_a_whole() {
    let directory = tempfile::tempdir().unwrap();
    let newest = {
        let store = open(directory.path(), Arc::new(HostDevice::new()), Compression::Off);
        let older = write(&store);
        let mut batch = store.batch();
        batch.write(LONG, 0, &content(LONG, 10));
        store.commit(batch).unwrap();
        let newest = store.snapshot().unwrap();
        assert!(older.id < newest.id);
        newest
    };
    let manifest = Survey::read(&DirReader::new(directory.path())).unwrap().snapshot(newest.id).unwrap();
    let image = manifest.entries.iter().find_map(|entry| entry.image.filter(|_| entry.page == LONG)).unwrap();
    let file = FileName::Pages(image.file);
    let path = directory.path().join(Folder::Pages.name()).join(file.name());
    let sound = std::fs::read(&path).unwrap();
    let (first, len) = (image.offset as usize, image.stored_len as usize);
    let flipped = |at: usize| {
        let mut bytes = sound.clone();
        bytes[first + at] ^= 1;
        bytes
    };
    let swapped = {
        let mut bytes = sound.clone();
        let (one, other) = bytes[first..].split_at_mut(4 << 20);
        one[..1 << 20].swap_with_slice(&mut other[..1 << 20]);
        bytes
    };
    let rows =
        [("first byte", flipped(0)), ("second part", flipped(5 << 20)), ("last byte", flipped(len - 1))];
    for (why, bytes) in rows.into_iter().chain([("two parts swapped", swapped)]) {
        let copy = tempfile::tempdir().unwrap();
        copy_all(directory.path(), copy.path());
        std::fs::write(copy.path().join(Folder::Pages.name()).join(file.name()), bytes).unwrap();
        let store = open(copy.path(), Arc::new(HostDevice::new()), Compression::Off);
        let recovered = store.recovered();
        assert!(recovered.snapshot.is_some_and(|used| used < newest.id), "{why}: {recovered:?}");
        let [damage] = &recovered.harmless[..] else { panic!("{why}: {recovered:?}") };
        assert_eq!((damage.file, damage.offset), (file, image.offset), "{why}");
        assert!(matches!(damage.defect, Defect::Checksum { what: "image", .. }), "{why}: {damage}");
        check(&store, why);
    }
}

fn copy_all(source: &Path, target: &Path) {
    for entry in std::fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        let target = target.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&target).unwrap();
            copy_all(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}
