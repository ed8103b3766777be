//! Copies between device memory and stores that keep their pages elsewhere. A copy transfers exactly the
//! right bytes, or fails with an error that names the cause.

use std::sync::Arc;

use remanent::batch::Width;
use remanent::device::CallerMemory;
use remanent::device::DeviceBytes;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::error::{IoObject, Refused};
use remanent::history::DeviceCopier;
use remanent::options::{Compression, SnapshotSchedule};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, StatePoint, Store, View, WriteBatch};
use remanent_format::FileName;
use remanent_format::image::ImageRef;

use crate::device_ops::{PLACE, bytes_of, devices};
use crate::kill::workload::Random;
use crate::overlays::image_of;
use crate::with_options::With;

/// Lengths below and above the limit up to which an image is read as a whole, and the length of a view's window.
const LENS: [u64; 8] = [5, 0, 4096, 70_001, (4 << 20) - 8192, (4 << 20) + 3, 9 << 20, (1 << 20) + 13];

fn open(disk: &SimDisk, compression: Compression) -> Store {
    let options = Options::new().snapshots(SnapshotSchedule::never());
    let device = Arc::new(HostDevice::new());
    Store::open_on(
        Arc::new(disk.clone()),
        device,
        options.with(|options| options.images.compression = compression),
    )
    .unwrap()
}

fn view(disk: &SimDisk, point: Option<&StatePoint>) -> View {
    View::open_on(&(Arc::new(disk.clone()) as Arc<dyn Disk>), point).unwrap()
}

/// Returns random bytes, half of which are compressible.
fn content(random: &mut Random, len: u64) -> Vec<u8> {
    let mut bytes = random.bytes(len);
    bytes.truncate(len as usize / 2);
    bytes.resize(len as usize, 7);
    bytes
}

/// Creates pages with only an image, with later batches, and without an image.
fn write(store: &Store, random: &mut Random) -> Vec<(PageId, Vec<u8>)> {
    let mut pages = Vec::new();
    for (at, len) in LENS.into_iter().enumerate() {
        let bytes = content(random, len);
        let mut batch = store.batch();
        batch.create_from(bytes.clone(), if at % 2 == 0 { Place::Disk } else { PLACE });
        pages.push((store.commit(batch).unwrap().pages[0], bytes));
    }
    store.snapshot().unwrap();
    for (at, (page, bytes)) in pages.iter_mut().enumerate().filter(|(at, _)| at % 3 == 2) {
        let mut batch = store.batch();
        batch.write(*page, 50, &[at as u8; 30]);
        store.commit(batch).unwrap();
        bytes[50..80].fill(at as u8);
    }
    let mut batch = store.batch();
    batch.create(100_000, PLACE);
    pages.push((store.commit(batch).unwrap().pages[0], vec![0; 100_000]));
    pages
}

/// Allocates device memory that contains other bytes than the pages.
fn targets(memories: &Store, pages: &[(PageId, Vec<u8>)]) -> Vec<DeviceBytes> {
    let memory = |(_, bytes): &(PageId, Vec<u8>)| {
        let memory = memories.device_bytes(bytes.len() as u64, PLACE).unwrap();
        memory.write(0, &vec![0xee; bytes.len()]).unwrap();
        memory
    };
    pages.iter().map(memory).collect()
}

fn named<'m>(pages: &[(PageId, Vec<u8>)], memories: &'m [DeviceBytes]) -> Vec<(PageId, &'m DeviceBytes)> {
    pages.iter().map(|(page, _)| *page).zip(memories).collect()
}

#[test]
fn view_loads_every_page_into_its_memory() {
    for compression in [Compression::Off, Compression::Zstd] {
        let (disk, mut random) = (SimDisk::new(), Random(3));
        let store = open(&disk, compression);
        let then = write(&store, &mut random);
        let lsn = store.lsn();
        // Later states do not affect the view.
        let mut now = then.clone();
        let mut batch = store.batch();
        for (page, bytes) in now.iter_mut().filter(|(_, bytes)| bytes.len() > 5) {
            batch.write(*page, 1, b"later");
            bytes[1..6].copy_from_slice(b"later");
        }
        store.commit(batch).unwrap();
        for device in devices() {
            let label = device.label();
            let memories = Store::open_on(Arc::new(SimDisk::new()), device.clone(), Options::new()).unwrap();
            let copier = DeviceCopier::open_on(device);
            for (point, expected) in [(Some(StatePoint::Lsn(lsn)), &then), (None, &now)] {
                let (view, targets) = (view(&disk, point.as_ref()), targets(&memories, expected));
                let mut wanted = named(expected, &targets);
                // The order of the pages does not matter.
                wanted.reverse();
                copier.load(&view, &wanted).unwrap();
                for ((page, bytes), memory) in expected.iter().zip(&targets) {
                    assert!(bytes_of(memory) == *bytes, "{page} at {point:?} on {label}, {compression:?}");
                }
                // Load a single page.
                copier.load(&view, &named(&expected[3..4], &targets[2..3])).unwrap_err();
                copier.load(&view, &[]).unwrap();
            }
        }
    }
}

/// Pages whose images later batches changed are read into host and device memory as a store has them: changes of
/// every kind, within and across the pieces in which they are applied, of pages without an image, of pages whose length
/// changed, and of a damaged image that was overwritten completely.
#[test]
fn changed_pages_are_read_over_their_images() {
    const LEN: u64 = 9 << 20;
    type Change = fn(&mut WriteBatch, PageId);
    let changes: [(&str, Change); 9] = [
        ("no change", |_, _| {}),
        ("first and last byte", |batch, page| _ = batch.write(page, 0, b"a").write(page, LEN - 1, b"z")),
        ("across two pieces", |batch, page| _ = batch.write(page, (4 << 20) - 7, &b"ab".repeat(3 << 19))),
        ("two writes of the same bytes", |batch, page| {
            batch.write(page, 70, &[1; 20]).write(page, 60, &[2; 20]);
        }),
        ("pattern", |batch, page| _ = batch.fill(page, 16, 8 << 20, b"0123456789abcdef")),
        ("scattered elements", |batch, page| {
            batch.scatter(page, Width::W4, &[3, 1 << 20, (LEN / 4 - 1) as u32], b"AAAABBBBCCCC");
        }),
        ("masked elements", |batch, page| {
            batch.write_masked(page, (4 << 20) - 4, Width::W2, &[0b1010], b"aabbccdd");
        }),
        ("shorter and longer", |batch, page| {
            batch.resize(page, 5 << 20).write(page, 9, b"later").resize(page, LEN);
        }),
        ("everything", |batch, page| {
            batch.write(page, 0, &b"c".repeat(5 << 20)).fill(page, 5 << 20, LEN - (5 << 20), &[6]);
        }),
    ];
    for (compression, damages) in
        [Compression::Off, Compression::Zstd].map(|each| [(each, false), (each, true)]).concat()
    {
        let (disk, mut random) = (SimDisk::new(), Random(7));
        let store = open(&disk, compression);
        let pages: Vec<PageId> = changes
            .iter()
            .map(|_| {
                let mut batch = store.batch();
                batch.create_from(content(&mut random, LEN), Place::Disk);
                store.commit(batch).unwrap().pages[0]
            })
            .collect();
        let snapshot = store.snapshot().unwrap();
        let mut batch = store.batch();
        let mut all: Vec<(PageId, &str)> = Vec::new();
        for (page, (name, change)) in pages.iter().zip(changes) {
            change(&mut batch, *page);
            all.push((*page, name));
        }
        store.commit(batch).unwrap();
        let mut batch = store.batch();
        batch.create(LEN, PLACE);
        let without_image = store.commit(batch).unwrap().pages[0];
        let mut batch = store.batch();
        batch.write(without_image, 4 << 20, b"later");
        store.commit(batch).unwrap();
        all.push((without_image, "without an image"));
        let expected: Vec<(PageId, Vec<u8>)> =
            all.iter().map(|(page, _)| (*page, store.read_to_vec(*page).unwrap())).collect();
        drop(store);
        if damages {
            let ImageRef { file, offset, .. } = image_of(&disk, &snapshot, pages[8]);
            disk.damage(FileName::Pages(file), offset + 9, &[1, 2, 3]);
        }
        let view = view(&disk, None);
        view.prove_pages(&all.iter().map(|(page, _)| *page).collect::<Vec<_>>()).unwrap();
        let mut read: Vec<Vec<u8>> = expected.iter().map(|(_, bytes)| vec![0xee; bytes.len()]).collect();
        let mut wanted: Vec<_> =
            all.iter().zip(&mut read).map(|((page, _), out)| (*page, &mut out[..])).collect();
        view.read_pages(&mut wanted).unwrap();
        for ((_, name), (read, (_, bytes))) in all.iter().zip(read.iter().zip(&expected)) {
            assert!(read == bytes, "{name}, {compression:?}, damaged: {damages}");
        }
        for device in devices() {
            let label = device.label();
            let memories = Store::open_on(Arc::new(SimDisk::new()), device.clone(), Options::new()).unwrap();
            let (copier, targets) = (DeviceCopier::open_on(device), targets(&memories, &expected));
            copier.load(&view, &named(&expected, &targets)).unwrap();
            for ((_, name), (memory, (_, bytes))) in all.iter().zip(targets.iter().zip(&expected)) {
                assert!(bytes_of(memory) == *bytes, "{name} on {label}, {compression:?}, damaged: {damages}");
            }
        }
    }
}

/// Bytes that arrive in another way are proven by the checksum of the page's image.
#[test]
fn checksums_of_memory_are_those_of_its_image() {
    for compression in [Compression::Off, Compression::Zstd] {
        let (disk, mut random) = (SimDisk::new(), Random(5));
        let pages = write(&open(&disk, compression), &mut random);
        let view = view(&disk, None);
        for device in devices() {
            let label = device.label();
            let memories = Store::open_on(Arc::new(SimDisk::new()), device.clone(), Options::new()).unwrap();
            let (copier, targets) = (DeviceCopier::open_on(device), targets(&memories, &pages));
            copier.load(&view, &named(&pages, &targets)).unwrap();
            let sums = copier.checksums(&targets.iter().collect::<Vec<_>>()).unwrap();
            let mut with_image = 0;
            for ((page, bytes), sum) in pages.iter().zip(&sums) {
                assert_eq!(*sum, crc32fast::hash(bytes), "{page} on {label}");
                let of_image = view.image_checksum(*page).unwrap();
                assert!(of_image.is_none_or(|of_image| of_image == *sum), "{page} on {label}");
                with_image += usize::from(of_image.is_some());
            }
            assert!((2..pages.len()).contains(&with_image), "pages with and without later batches");
            // A flipped bit changes the checksum of its range alone.
            let changed = targets.iter().position(|memory| memory.byte_len() > 9).unwrap();
            let [byte] = pages[changed].1[8..9] else { unreachable!() };
            targets[changed].write(8, &[byte ^ 1]).unwrap();
            let again = copier.checksums(&targets.iter().collect::<Vec<_>>()).unwrap();
            let differ: Vec<_> = (0..sums.len()).filter(|at| sums[*at] != again[*at]).collect();
            assert_eq!(differ, [changed], "on {label}");
        }
        assert!(view.image_checksum(PageId(99)).is_err());
    }
    let copier = DeviceCopier::open_on(Arc::new(HostDevice::new()));
    assert!(copier.checksums(&[]).unwrap().is_empty());
}

/// Memory that another owner allocated on the host can also be filled. This needs one more copy.
#[test]
fn caller_memory_is_filled() {
    let (disk, mut random) = (SimDisk::new(), Random(4));
    let pages = write(&open(&disk, Compression::Off), &mut random);
    let copier = DeviceCopier::open_on(Arc::new(LateDevice::new(Arc::new(HostDevice::new()))));
    let adopted = |(_, bytes): &(PageId, Vec<u8>)| {
        copier.caller_bytes(&CallerMemory::from_vec(vec![1; bytes.len()], Place::Pinned)).unwrap()
    };
    let memories: Vec<DeviceBytes> = pages.iter().map(adopted).collect();
    copier.load(&view(&disk, None), &named(&pages, &memories)).unwrap();
    for ((page, bytes), memory) in pages.iter().zip(&memories) {
        assert!(bytes_of(memory) == *bytes, "{page}");
    }
}

/// Creates short and long pages, in memory and on disk, from a part of device memory.
#[test]
fn page_of_any_store_is_created_from_device_memory() {
    for device in devices() {
        let (label, mut random) = (device.label(), Random(8));
        let memories = Store::open_on(Arc::new(SimDisk::new()), device.clone(), Options::new()).unwrap();
        let copier = DeviceCopier::open_on(device);
        let disk = SimDisk::new();
        let store = open(&disk, Compression::Zstd);
        let mut batch = store.batch();
        let mut contents = Vec::new();
        for (at, len) in LENS.into_iter().enumerate() {
            let bytes = content(&mut random, len);
            let memory = memories.device_bytes(len + 7, PLACE).unwrap();
            memory.write(3, &bytes).unwrap();
            let source = Arc::new(copier.source(memory.part(3..len + 3).unwrap()).unwrap());
            batch.create_from_source(len, source, if at % 2 == 0 { Place::Disk } else { PLACE });
            contents.push(bytes);
        }
        let pages = store.commit(batch).unwrap().pages;
        let check = |store: &Store| {
            for (page, bytes) in pages.iter().zip(&contents) {
                assert!(store.read_to_vec(*page).unwrap() == *bytes, "{page} of {label}");
            }
        };
        check(&store);
        store.snapshot().unwrap();
        drop(store);
        check(&open(&disk, Compression::Zstd));
        // A range beyond the end of the memory is rejected.
        let store = open(&SimDisk::new(), Compression::Zstd);
        let short = Arc::new(copier.source(memories.device_bytes(9, PLACE).unwrap()).unwrap());
        let mut batch = store.batch();
        batch.create_from_source(10, short, PLACE);
        let failed = store.commit(batch).unwrap_err();
        assert!(matches!(failed, Error::Io { object: IoObject::Source { .. }, .. }), "{failed}");
        assert_eq!(store.pages().unwrap().len(), 0);
    }
}

#[test]
fn invalid_copy_target_is_refused() {
    let (disk, mut random) = (SimDisk::new(), Random(5));
    let pages = write(&open(&disk, Compression::Off), &mut random);
    let device = Arc::new(HostDevice::new());
    let memories = Store::open_on(Arc::new(SimDisk::new()), device.clone(), Options::new()).unwrap();
    let (copier, view) = (DeviceCopier::open_on(device), view(&disk, None));
    let memory = memories.device_bytes(8192, PLACE).unwrap();
    memory.write(0, &[1; 8192]).unwrap();
    let part = |at: u64, len: u64| memory.part(at..at + len).unwrap();
    let (short, first, whole, beside) = (part(0, 4), part(0, 5), part(0, 4096), part(4096, 4096));
    let refusal = |wanted: &[(PageId, &DeviceBytes)]| match copier.load(&view, wanted).unwrap_err() {
        Error::Refused(Refused::Memory { reason, .. }) => reason,
        error => panic!("{error}"),
    };
    let (five, long) = (pages[0].0, pages[2].0);
    assert_eq!(refusal(&[(five, &short)]), format!("page {five} is 5 bytes long"));
    assert_eq!(refusal(&[(five, &first), (long, &whole)]), "it overlaps other memory of the same call");
    assert_eq!(refusal(&[(long, &beside), (long, &whole)]), format!("page {long} is named twice"));
    let elsewhere = Store::open_on(Arc::new(SimDisk::new()), Arc::new(HostDevice::new()), Options::new());
    let elsewhere = elsewhere.unwrap().device_bytes(5, PLACE).unwrap();
    assert!(refusal(&[(five, &elsewhere)]).contains("another"));
    let unknown = copier.load(&view, &[(PageId(99), &first)]).unwrap_err();
    assert!(matches!(unknown, Error::UnknownPage { page: PageId(99) }), "{unknown}");
    assert!(bytes_of(&memory).iter().all(|byte| *byte == 1), "nothing was written");
}

/// The error names the damaged image, whether it is loaded in parts or together with others. Other pages can
/// be loaded.
#[test]
fn damage_is_reported_and_affects_only_its_page() {
    for at in [3_usize, 6] {
        let (disk, mut random) = (SimDisk::new(), Random(6));
        let store = open(&disk, Compression::Off);
        let pages = write(&store, &mut random);
        let snapshot = store.snapshot().unwrap();
        drop(store);
        let ImageRef { file, offset, stored_len, .. } = image_of(&disk, &snapshot, pages[at].0);
        let (file, middle) = (FileName::Pages(file), offset + stored_len / 2);
        let bit = disk.bytes(file).unwrap()[middle as usize] ^ 1;
        disk.damage(file, middle, &[bit]);
        let device = Arc::new(HostDevice::new());
        let memories = Store::open_on(Arc::new(SimDisk::new()), device.clone(), Options::new()).unwrap();
        let (copier, view) = (DeviceCopier::open_on(device), view(&disk, None));
        let targets = targets(&memories, &pages);
        let error = copier.load(&view, &named(&pages, &targets)).unwrap_err();
        assert!(matches!(error, Error::Damaged(_)), "{error}");
        assert_eq!((error.file(), error.offset()), (Some(file), Some(offset)), "{error}");
        let mut others = named(&pages, &targets);
        others.remove(at);
        copier.load(&view, &others).unwrap();
    }
}
