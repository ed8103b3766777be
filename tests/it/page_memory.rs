//! Opens that load pages into caller-owned memory: all sources of a page's bytes, and the opens that fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use remanent::device::host::HostDevice;
use remanent::device::{CallerMemory, Device, KernelAddresses};
use remanent::error::{Refused, Remedy};
use remanent::options::{Compression, ImageOptions, LogOptions, MemoryOptions, PageLoad, SnapshotSchedule};
use remanent::stats::Purpose;
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, Store, WriteBatch};

use crate::gpu;

const PLACE: Place = Place::Device(0);
/// Lengths of pages. One is so short that pages share a slab on the host device, and two are not. One is
/// longer than an open allocates in one piece.
const LENS: [u64; 3] = [700, 5000, 5 << 20];

fn options() -> Options {
    Options::new().log(LogOptions::new().segment_len(1 << 20)).snapshots(SnapshotSchedule::never())
}

fn devices() -> [Arc<dyn Device>; 2] {
    [Arc::new(HostDevice::new()), Arc::new(LateDevice::new(Arc::new(HostDevice::new())))]
}

fn commit(store: &Store, build: impl FnOnce(&mut WriteBatch)) -> Vec<PageId> {
    let mut batch = store.batch();
    build(&mut batch);
    store.commit(batch).unwrap().pages
}

fn content(store: &Store, page: PageId) -> Vec<u8> {
    let mut bytes = vec![0; store.page(page).unwrap().len as usize];
    store.read(page, 0, &mut bytes).unwrap();
    bytes
}

/// Where an open finds a page's bytes: in an image, in the log, or in both.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Log,
    Snapshot,
    Both,
    /// The snapshot and the log, which resizes the page.
    Resized,
    /// Neither, because the page was never written.
    Zeros,
}

const SOURCES: [Source; 5] = [Source::Log, Source::Snapshot, Source::Both, Source::Resized, Source::Zeros];

/// Returns a closed store with pages of several lengths, and the bytes of each.
fn directory(source: Source) -> (SimDisk, Vec<(PageId, Vec<u8>)>) {
    let disk = SimDisk::new();
    let store = Store::open_on(Arc::new(disk.clone()), devices()[0].clone(), options()).unwrap();
    let begun = |len: u64| if source == Source::Resized { len + 10 } else { len };
    let pages = commit(&store, |batch| {
        for len in LENS {
            let page = batch.create(begun(len), PLACE).page();
            if source != Source::Zeros {
                batch.fill(page, 0, begun(len), &[3]);
            }
        }
        // Create a page for which the caller supplies no memory, and an empty page.
        batch.create_from(vec![8; 100], PLACE);
        batch.create(0, PLACE);
    });
    if matches!(source, Source::Snapshot | Source::Both | Source::Resized) {
        store.snapshot().unwrap();
    }
    if matches!(source, Source::Both | Source::Resized) {
        commit(&store, |batch| {
            for (page, len) in pages.iter().zip(LENS) {
                if source == Source::Resized {
                    batch.resize(*page, len);
                }
                batch.write(*page, len - 5, &[4; 5]);
            }
        });
    }
    let bytes = pages.iter().map(|page| (*page, content(&store, *page))).collect();
    store.close().unwrap();
    (disk, bytes)
}

#[test]
fn pages_recover_into_given_memory() {
    for source in SOURCES {
        for (number, page_load) in [PageLoad::Eager, PageLoad::OnDemand].into_iter().enumerate() {
            for device in devices() {
                let what = format!("{source:?} {page_load:?} {}", device.label());
                let (disk, expected) = directory(source);
                let tensors: Vec<CallerMemory> =
                    LENS.map(|len| CallerMemory::from_vec(vec![0xEE; len as usize], PLACE)).to_vec();
                let (given, requested) = (tensors.clone(), Arc::new(Mutex::new(Vec::new())));
                let told = requested.clone();
                // The budget suffices only for the page without caller-owned memory.
                let options = options().memory(
                    MemoryOptions::new().load(page_load).budget(PLACE, 100).page_memory(move |info| {
                        told.lock().unwrap().push((info.page, info.len));
                        LENS.iter().position(|len| *len == info.len).map(|at| given[at].clone())
                    }),
                );
                let store = Store::open_on(Arc::new(disk.clone()), device.clone(), options).unwrap();
                let with_bytes = expected.iter().filter(|(_, bytes)| !bytes.is_empty());
                let lens: Vec<_> = with_bytes.map(|(page, bytes)| (*page, bytes.len() as u64)).collect();
                assert_eq!(*requested.lock().unwrap(), lens, "{what}");
                if number == 1 && source == Source::Snapshot {
                    assert!(store.recovered().unloaded_pages > 0, "{what}");
                }
                store.wait_loaded().unwrap();
                for ((page, bytes), tensor) in expected.iter().zip(&tensors) {
                    assert!(content(&store, *page) == *bytes, "{what}: page {page}");
                    let tensor = store.caller_bytes(tensor).unwrap();
                    let mut found = vec![0; bytes.len()];
                    tensor.read(0, &mut found).unwrap();
                    assert!(found == *bytes, "{what}: the tensor of page {page}");
                    assert_eq!(tensor.page(), Some(*page), "{what}");
                    let refused = tensor.write(0, &[1]);
                    assert!(
                        matches!(refused, Err(Error::Refused(Refused::MemoryInUse { .. }))),
                        "{what}: {refused:?}"
                    );
                }
                let usage = store.stats().places[0].1;
                assert_eq!(
                    (usage.bytes_for(Purpose::Lent), usage.used()),
                    (LENS.iter().sum(), 100),
                    "{what}"
                );
                // From now on, the page behaves like any other page.
                let (page, tensor) = (expected[1].0, store.caller_bytes(&tensors[1]).unwrap());
                commit(&store, |batch| _ = batch.write(page, 0, &[6; 8]));
                assert_eq!(content(&store, page)[..9], [6, 6, 6, 6, 6, 6, 6, 6, expected[1].1[8]]);
                let mut found = [0; 8];
                tensor.read(0, &mut found).unwrap();
                assert_eq!(found, [6; 8], "{what}");
                store.snapshot().unwrap();
                store.close().unwrap();
                let store = Store::open_on(Arc::new(disk), device, self::options()).unwrap();
                assert_eq!(content(&store, page)[..8], [6; 8], "{what}");
                assert_eq!(content(&store, expected[2].0), expected[2].1, "{what}");
            }
        }
    }
}

/// A callback that returns the memory for each page.
type Give = Box<dyn Fn(&remanent::PageInfo) -> Option<CallerMemory> + Send + Sync>;
/// A mistake: its name, a callback that makes it, and the check of the resulting error.
type Row = (&'static str, Give, fn(&Error) -> bool);

#[test]
fn unusable_page_memory_fails_open_harmlessly() {
    let shared = CallerMemory::from_vec(vec![0; 64], PLACE);
    let rows: [Row; 6] = [
        ("too short", Box::new(|info| tensor(info.len - 1, PLACE)), |error| {
            matches!(error, Error::Refused(Refused::Memory { .. }))
        }),
        ("too long", Box::new(|info| tensor(info.len + 1, PLACE)), |error| {
            matches!(error, Error::Refused(Refused::Memory { .. }))
        }),
        ("another place", Box::new(|info| tensor(info.len, Place::Pinned)), |error| {
            matches!(error, Error::Refused(Refused::Memory { .. }))
        }),
        ("nowhere", Box::new(|info| Some(nowhere(info.len))), |error| {
            matches!(error, Error::Refused(Refused::Memory { .. }))
        }),
        ("the same for two", Box::new(move |_| Some(shared.clone())), |error| {
            matches!(error, Error::Refused(Refused::MemoryInUse { page: PageId(1), .. }))
        }),
        ("a panic", Box::new(|info| if info.page.0 == 2 { panic!("as arranged") } else { None }), |error| {
            matches!(error, Error::Panicked { .. }) && error.to_string().contains("page_memory")
        }),
    ];
    for (what, give, is_expected) in rows {
        let disk = SimDisk::new();
        let device = devices()[0].clone();
        let store = Store::open_on(Arc::new(disk.clone()), device.clone(), options()).unwrap();
        let pages = commit(&store, |batch| {
            batch.create_from(vec![1; 64], PLACE);
            batch.create_from(vec![2; 64], PLACE);
        });
        store.close().unwrap();
        let files = |disk: &SimDisk| disk.bytes(remanent::error::FileName::Store);
        let before = files(&disk);
        let opened = Store::open_on(
            Arc::new(disk.clone()),
            device.clone(),
            options().memory(MemoryOptions::new().page_memory(give)),
        );
        let error = opened.map(drop).unwrap_err();
        assert!(is_expected(&error), "{what}: {error}");
        assert!(matches!(error.remedy(), Remedy::ChangeCall | Remedy::Retry | Remedy::Reopen), "{what}");
        assert_eq!(files(&disk), before);
        let store = Store::open_on(Arc::new(disk), device, options()).unwrap();
        assert_eq!((content(&store, pages[0]), content(&store, pages[1])), (vec![1; 64], vec![2; 64]));
    }
}

fn tensor(len: u64, place: Place) -> Option<CallerMemory> {
    Some(CallerMemory::from_vec(vec![0; len as usize], place))
}

/// Returns memory at an address of a GPU, which a host device cannot access.
fn nowhere(len: u64) -> CallerMemory {
    // SAFETY: the device is the host device, which accepts no GPU address.
    unsafe { CallerMemory::from_cuda(64, len, ()) }
}

/// An open that falls back from a damaged snapshot calls the callback again. The memory of the first attempt
/// is free by then.
#[test]
fn open_that_skips_snapshot_reuses_same_memory() {
    let (disk, device) = (SimDisk::new(), devices()[0].clone());
    let plain = options().images(ImageOptions::new().compression(Compression::Off));
    let store = Store::open_on(Arc::new(disk.clone()), device.clone(), plain).unwrap();
    let page = commit(&store, |batch| _ = batch.create_from(vec![1; 5000], PLACE))[0];
    store.snapshot().unwrap();
    commit(&store, |batch| _ = batch.fill(page, 0, 5000, &[2]));
    store.snapshot().unwrap();
    store.close().unwrap();
    let newest = (1..9).rev().map(remanent::error::FileName::Pages).find(|file| disk.bytes(*file).is_some());
    let newest = newest.expect("the images of a snapshot");
    let image = disk.bytes(newest).unwrap();
    let at = image.windows(64).rposition(|bytes| bytes == [2; 64]).expect("an image that is not compressed");
    disk.damage(newest, at as u64, &[0xFF; 64]);
    let (tensor, requested) = (CallerMemory::from_vec(vec![0; 5000], PLACE), Arc::new(AtomicU64::new(0)));
    let (given, count) = (tensor.clone(), requested.clone());
    let options = options().memory(MemoryOptions::new().page_memory(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Some(given.clone())
    }));
    let store = Store::open_on(Arc::new(disk), device, options).unwrap();
    assert_eq!(requested.load(Ordering::Relaxed), 2, "once for each snapshot that was tried");
    let tensor = store.caller_bytes(&tensor).unwrap();
    let mut found = vec![0; 5000];
    tensor.read(0, &mut found).unwrap();
    assert_eq!((found, content(&store, page)), (vec![2; 5000], vec![2; 5000]));
    assert_eq!(tensor.page(), Some(page));
}

#[test]
fn gpu_tensors_receive_recovered_pages() {
    let (Some(gpu), Some(callers)) = (gpu::device(), gpu::device()) else { return };
    let (disk, expected) = directory(Source::Both);
    let memory = LENS.map(|len| callers.allocate(PLACE, len).unwrap());
    let addresses = memory.map(|memory| callers.address(memory).unwrap());
    let options = options().memory(MemoryOptions::new().page_memory(move |info| {
        let at = LENS.iter().position(|len| *len == info.len)?;
        // SAFETY: the device keeps the memory until it is released below.
        Some(unsafe { CallerMemory::from_cuda(addresses[at], info.len, ()) })
    }));
    let store = Store::open_on(Arc::new(disk), gpu, options).unwrap();
    for ((page, bytes), address) in expected.iter().zip(addresses) {
        assert_eq!(store.pin(*page).unwrap().address(), Some(address));
        assert!(content(&store, *page) == *bytes);
    }
    store.close().unwrap();
    memory.into_iter().for_each(|memory| callers.release(memory).unwrap());
}
