//! Long logs without a snapshot. An open replays the whole state, with one thread that reads and one that
//! applies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use remanent::batch::Width;
use remanent::device::Device;
use remanent::device::host::HostDevice;
use remanent::disk::Disk;
use remanent::disk::dir::DirDisk;
use remanent::options::{LogIo, LogOptions};
use remanent::testing::faulty_device::{DeviceCall, DeviceFault, FaultyDevice};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Error, Options, PageId, Place, Result, Store};

use crate::interrupted_reads::InterruptedDisk;
use crate::kill::workload::Random;

const PAGE_LEN: u64 = 256 << 10;
const PAGES: u64 = 20;

fn open(disk: impl Disk, device: Arc<dyn Device>, segment_len: u64) -> Result<Store> {
    let options = Options::new().log(LogOptions::new().io(LogIo::Buffered).segment_len(segment_len));
    Store::open_on(Arc::new(disk), device, options)
}

/// Commits batches with frames of `bytes` in total. Returns the resulting content of the pages. Most batches
/// are small, and some are longer than the read-ahead. Elements with gaps between their indices are staged
/// separately.
fn write(store: &Store, random: &mut Random, bytes: u64) -> Vec<(PageId, Vec<u8>)> {
    let mut batch = store.batch();
    (0..PAGES).for_each(|_| _ = batch.create(PAGE_LEN, Place::Host).page());
    let created = store.commit(batch).unwrap().pages;
    let mut pages: Vec<_> = created.into_iter().map(|page| (page, vec![0; PAGE_LEN as usize])).collect();
    let mut written = 0;
    while written < bytes {
        let (count, len_max) = match random.below(20) {
            // Write one byte less than the page has, because whole pages are written to images.
            0 if bytes > 8 << 20 => (10, PAGE_LEN - 1),
            1..4 => (1 + random.below(100), 600),
            _ => (1 + random.below(4), 5000),
        };
        let mut batch = store.batch();
        for _ in 0..count {
            let (page, content) = &mut pages[random.below(PAGES) as usize];
            let len = if count == 10 { len_max } else { 1 + random.below(len_max) };
            let offset = random.below(PAGE_LEN - len + 1);
            let new = random.bytes(len);
            if random.below(4) == 0 {
                let indices: Vec<u32> = (0..new.len() as u32).map(|index| 3 * index).collect();
                let indices = &indices[..new.len().min(1000)];
                batch.scatter(*page, Width::W1, indices, &new[..indices.len()]);
                for (index, byte) in indices.iter().zip(&new) {
                    content[*index as usize] = *byte;
                }
                written += indices.len() as u64;
            } else {
                content[offset as usize..][..new.len()].copy_from_slice(&new);
                batch.write(*page, offset, &new);
                written += len;
            }
        }
        store.commit(batch).unwrap();
    }
    pages
}

fn check(store: &Store, pages: &[(PageId, Vec<u8>)]) {
    for (page, expected) in pages {
        let mut found = vec![0; expected.len()];
        store.read(*page, 0, &mut found).unwrap();
        assert!(found == *expected, "{page}");
    }
}

#[test]
fn frames_of_all_lengths_replay_from_read_buffers() {
    let directory = tempfile::tempdir().unwrap();
    let disk = || DirDisk::new(directory.path());
    let store = open(disk(), Arc::new(HostDevice::new()), 4 << 20).unwrap();
    let pages = write(&store, &mut Random(5), 30 << 20);
    store.close().unwrap();
    let store = open(disk(), Arc::new(HostDevice::new()), 4 << 20).unwrap();
    let replayed = store.recovered().replayed_bytes;
    assert!(replayed > 30 << 20, "{replayed} bytes of {:?}", store.recovered().snapshot);
    check(&store, &pages);
}

/// Returns a store whose log has many segments, each with more than one batch.
fn many_segments() -> (SimDisk, Vec<(PageId, Vec<u8>)>) {
    let disk = SimDisk::new();
    let store = open(disk.clone(), Arc::new(HostDevice::new()), 64 << 10).unwrap();
    let pages = write(&store, &mut Random(6), 1 << 20);
    drop(store);
    (disk, pages)
}

#[test]
fn panic_in_read_ahead_thread_makes_open_fail() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        eprintln!("SKIPPED: one thread at a time can run here, so nothing is read ahead");
        return;
    }
    let (disk, pages) = many_segments();
    let panics = Arc::new(AtomicU32::new(0));
    for at in (0..).step_by(7) {
        let before = panics.load(Ordering::SeqCst);
        let counted = panics.clone();
        let interrupted = InterruptedDisk::new(&disk, at, move || {
            if std::thread::current().name() == Some("remanent-pipeline") {
                counted.fetch_add(1, Ordering::SeqCst);
                panic!("as this test wants it");
            }
        });
        let opened = open(interrupted, Arc::new(HostDevice::new()), 64 << 10);
        if panics.load(Ordering::SeqCst) > before {
            assert!(matches!(opened, Err(Error::Panicked { .. })), "read {at}");
        } else if before > 0 {
            // When no read remains to be interrupted, the whole log was read. The interrupted opens wrote
            // nothing.
            check(&opened.unwrap(), &pages);
            assert!(before > 5, "panicked {before} times");
            return;
        }
    }
}

#[test]
fn device_fault_during_replay_is_reported_as_itself() {
    const NEVER: u64 = 1 << 40;
    let (disk, pages) = many_segments();
    let mut failed = 0;
    let calls = [DeviceCall::Staging, DeviceCall::Submit];
    // A device that continues after a fault as if it had not happened reports the fault once.
    for (call, is_lost) in calls.into_iter().flat_map(|call| [(call, false), (call, true)]) {
        for nth in [1, 2, 3, 10] {
            let device = Arc::new(FaultyDevice::new(Arc::new(HostDevice::new())));
            device.arm(DeviceFault { call: Some(call), nth, context_lost: is_lost });
            match open(disk.clone(), device.clone(), 64 << 10) {
                // This open makes fewer such calls, or its second attempt succeeded.
                Ok(store) => {
                    device.arm(DeviceFault { call: Some(call), nth: NEVER, context_lost: is_lost });
                    check(&store, &pages);
                }
                Err(error) => {
                    let is_it =
                        matches!(error, Error::Device { context_lost, .. } if context_lost == is_lost);
                    assert!(is_it && device.struck(), "{call:?} {nth}: {error}");
                    failed += 1;
                }
            }
        }
    }
    assert!(failed >= 8, "{failed} failed");
}
