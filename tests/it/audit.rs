//! Audits report exactly the pages that were changed without the store's knowledge, whatever batches are
//! committed concurrently.
//!
//! To simulate a faulty kernel, a test writes to a leased address on the device that the store's device
//! wraps.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use remanent::device::host::HostDevice;
use remanent::device::{Command, CommandList, Device, Fence, Lane, Pending, StagingSpan};
use remanent::options::{LogOptions, SnapshotSchedule};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::late_device::LateDevice;
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Key, Options, PageId, Result, Store};

use crate::device_ops::{PLACE, content, page};
use crate::kill::workload::Random;

/// A function that the auditing thread calls while checksums are being computed.
type Between = Box<dyn FnMut(&Store) + Send>;

/// A device that executes work late, whose memory can be changed without the store's knowledge, and that
/// calls back during an audit.
struct Rogue {
    beneath: Arc<HostDevice>,
    late: LateDevice,
    state: Mutex<State>,
    store: OnceLock<Weak<Store>>,
}

#[derive(Default)]
struct State {
    sums_are_on_their_way: bool,
    between: Option<Between>,
}

impl Rogue {
    fn new() -> Arc<Self> {
        let beneath = Arc::new(HostDevice::new());
        let late = LateDevice::seeded(beneath.clone(), 5);
        Arc::new(Self { beneath, late, state: Mutex::default(), store: OnceLock::new() })
    }

    /// Changes the byte at `offset` of a page without the store's knowledge.
    fn change(&self, store: &Store, page: PageId, offset: u64) {
        let before = content(store, page)[offset as usize];
        let address = store.lease(page).unwrap().address().expect("a page that has bytes");
        let mut staging = self.beneath.staging(1).unwrap();
        staging[0] = !before;
        let source = StagingSpan { index: 0, offset: 0, len: 1 };
        let commands = vec![Command::Upload { source, target: self.late.span_at(address + offset, 1) }];
        let list = CommandList { commands, staging: vec![staging] };
        self.beneath.submit(Lane::Drain, list).unwrap().finish(&*self.beneath).unwrap();
    }
}

impl Device for Rogue {
    forward!(late: label allocate release staging reached after places_and_abilities);

    fn submit(&self, lane: Lane, list: CommandList) -> Result<Pending> {
        if lane == Lane::Apply && matches!(list.commands[..], [Command::Crc { .. }]) {
            self.state.lock().unwrap().sums_are_on_their_way = true;
        }
        self.late.submit(lane, list)
    }

    fn wait(&self, fence: Fence) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        if std::mem::take(&mut state.sums_are_on_their_way) {
            // The callback is removed during the call, so that a batch that it commits does not call it
            // again.
            if let Some(mut between) = state.between.take() {
                drop(state);
                between(&self.store.get().and_then(Weak::upgrade).expect("the store is open"));
                self.state.lock().unwrap().between = Some(between);
            }
        }
        self.late.wait(fence)
    }
}

/// Opens a store with segments of 1 MiB. A batch that writes 256 KiB of whole pages first writes them to an
/// image file.
fn open(device: Arc<dyn Device>) -> Arc<Store> {
    let options =
        Options::new().log(LogOptions::new().segment_len(1 << 20)).snapshots(SnapshotSchedule::never());
    Arc::new(Store::open_on(Arc::new(SimDisk::new()), device, options).unwrap())
}

/// Returns the pages that an audit reports, each with its first difference.
fn changed(store: &Store) -> BTreeMap<PageId, Option<u64>> {
    let changed = store.audit().unwrap().changed;
    changed.into_iter().map(|changed| (changed.page, changed.first_difference)).collect()
}

fn write(store: &Store, page: PageId, offset: u64, bytes: &[u8]) {
    let mut batch = store.batch();
    batch.write(page, offset, bytes);
    store.commit(batch).unwrap();
}

/// Creates pages of all kinds: with an image of exactly this version, with an image and a later delta, with
/// only the log, never written, lengthened, moved under a lease, and empty.
fn pages_of_all_origins(store: &Store) -> Vec<PageId> {
    let mut random = Random(3);
    let mut pages = vec![page(store, &random.bytes(5000)), page(store, &random.bytes(5000))];
    store.snapshot().unwrap();
    write(store, pages[1], 4000, &[7; 100]);
    let mut batch = store.batch();
    batch.create_from(random.bytes(300_000), PLACE).key(Key::new("ahead").unwrap());
    batch.create(4096, PLACE);
    batch.create(0, PLACE);
    pages.extend(store.commit(batch).unwrap().pages);
    pages.push(page(store, &random.bytes(100)));
    pages.push(page(store, &random.bytes(60)));
    let mut batch = store.batch();
    batch.resize(pages[5], 5000).write(pages[5], 4000, &[1; 100]);
    store.commit(batch).unwrap();
    let lease = store.lease(pages[6]).unwrap();
    std::thread::scope(|scope| _ = scope.spawn(|| write(store, pages[6], 10, &[2; 10])));
    drop(lease);
    pages
}

#[test]
fn audit_names_exactly_pages_changed_without_batch() {
    let device = Rogue::new();
    let store = open(device.clone());
    assert_eq!(store.audit().unwrap(), Default::default(), "a store without pages");
    let pages = pages_of_all_origins(&store);
    let lens: Vec<u64> = pages.iter().map(|page| store.page(*page).unwrap().len).collect();
    let audit = store.audit().unwrap();
    assert_eq!((audit.pages, audit.bytes), (6, lens.iter().sum()));
    assert_eq!((audit.by_image, audit.by_replay, audit.changed), (2, 4, vec![]));
    let mut random = Random(8);
    // Change each page alone, then an increasing number of pages.
    let mut expected = BTreeMap::new();
    for (page, len) in pages.iter().zip(&lens).filter(|(_, len)| **len > 0) {
        let offset = random.below(*len);
        device.change(&store, *page, offset);
        assert_eq!(changed(&store), [(*page, Some(offset))].into());
        device.change(&store, *page, offset);
        assert_eq!(changed(&store), [].into(), "changed back");
        let offset = random.below(*len);
        expected.insert(*page, Some(offset));
    }
    for (page, offset) in &expected {
        device.change(&store, *page, offset.unwrap());
    }
    let audit = store.audit().unwrap();
    let named = audit.changed.iter().map(|changed| (changed.page, changed.first_difference)).collect();
    assert_eq!(expected, named);
    let keyed = audit.changed.iter().find(|changed| changed.key.is_some()).unwrap();
    assert_eq!((keyed.page, keyed.epoch), (pages[2], store.page(pages[2]).unwrap().epoch));
}

#[test]
fn batch_repairs_only_written_bytes_of_page() {
    let device = Rogue::new();
    let store = open(device.clone());
    let page = page(&store, &[1; 1000]);
    device.change(&store, page, 600);
    write(&store, page, 0, &[2; 100]);
    assert_eq!(changed(&store), [(page, Some(600))].into());
    // The previous snapshot shares its image with the next one. The change in memory is still reported.
    write(&store, page, 600, &[2]);
    assert_eq!(changed(&store), [].into());
    store.snapshot().unwrap();
    device.change(&store, page, 30);
    store.snapshot().unwrap();
    assert_eq!(changed(&store), [(page, Some(30))].into());
}

#[test]
fn audit_compares_pages_changed_concurrently() {
    const LEN: usize = 3 << 20;
    let device = Rogue::new();
    let store = open(device.clone());
    device.store.set(Arc::downgrade(&store)).expect("set once");
    // Each page forms its own chunk.
    let pages: Vec<PageId> = (0..6).map(|number| page(&store, &vec![number; LEN])).collect();
    store.snapshot().unwrap();
    device.change(&store, pages[1], 500);
    device.change(&store, pages[2], 700);
    let (second, calls) = (pages.clone(), Arc::new(Mutex::new(0)));
    let counted = calls.clone();
    // The change is made while the checksums of the first page are being computed. All pages except the
    // second change concurrently.
    device.state.lock().unwrap().between = Some(Box::new(move |store| {
        let mut calls = counted.lock().unwrap();
        *calls += 1;
        let mut batch = store.batch();
        for page in [second[0], second[2], second[3]] {
            batch.write(page, *calls, &[9]);
        }
        if *calls == 1 {
            batch.delete(second[4]).resize(second[5], 0);
            batch.create(10, PLACE);
        }
        store.commit(batch).unwrap();
    }));
    let audit = store.audit().unwrap();
    let named: Vec<_> =
        audit.changed.iter().map(|changed| (changed.page, changed.first_difference)).collect();
    // The second of these pages was changed again before its bytes could be compared.
    assert_eq!(named, [(pages[1], Some(500)), (pages[2], None)]);
    device.state.lock().unwrap().between = None;
    assert_eq!(changed(&store), [(pages[1], Some(500)), (pages[2], Some(700))].into());
    // Two pages are compared with their first version, and two with a later version.
    assert_eq!((audit.pages, audit.bytes), (4, 4 * LEN as u64));
    assert_eq!((audit.by_image, audit.by_replay), (2, 2));
    assert!(*calls.lock().unwrap() > 4, "batches came between");
}

#[test]
fn audit_during_commits_and_snapshots_reports_no_false_finding() {
    let device = Rogue::new();
    let store = open(device.clone());
    let pages: Vec<PageId> = (0..40).map(|number| page(&store, &[number; 50_000])).collect();
    store.snapshot().unwrap();
    device.change(&store, pages[39], 1);
    std::thread::scope(|scope| {
        let (ended, told) = std::sync::mpsc::channel::<()>();
        let work = scope.spawn(|| {
            let told = told;
            let mut random = Random(4);
            while let Err(std::sync::mpsc::TryRecvError::Empty) = told.try_recv() {
                for _ in 0..20 {
                    write(&store, pages[random.below(39) as usize], random.below(40_000), &random.bytes(900));
                }
                store.snapshot().unwrap();
            }
        });
        let ended = ended;
        for _ in 0..15 {
            assert_eq!(changed(&store), [(pages[39], Some(1))].into());
        }
        drop(ended);
        work.join().unwrap();
    });
}

#[test]
fn device_error_in_audit_poisons_store() {
    for call in [DeviceCall::Staging, DeviceCall::Submit, DeviceCall::Wait] {
        let device = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
        let store = open(device.clone());
        page(&store, &[1; 40_000]);
        device.arm(DeviceFault { call: Some(call), nth: 1, context_lost: false });
        // The idle staging memory would suffice for a few checksums, so release it first.
        store.trim().unwrap();
        let error = store.audit().unwrap_err();
        assert!(matches!(&error, Error::Poisoned(_)) && error.to_string().contains("as arranged"), "{error}");
        let later = store.commit(store.batch()).unwrap_err();
        assert!(matches!(later, Error::Poisoned(_)), "{later}");
    }
}
