//! Batches with more bytes than the store's staging memory. Memory for a GPU is pinned, and pinning takes
//! longer than the batch itself, so bytes for pages on disk are copied through the existing staging memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use remanent::device::host::HostDevice;
use remanent::options::MemoryOptions;
use remanent::testing::faulty_device::{BitFlip, BusTransfer, FaultyDevice};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Options, PageId, Place, Store, WriteBatch};

use crate::kill::workload::Random;
use crate::pages_on_disk::{commit, move_to, uncompressed};

/// Length of the page, longer than the store's staging memory.
const LEN: u64 = (66 << 20) + 77;
/// Number of bytes that are downloaded to the host at a time.
const WAVE_LEN: usize = 16 << 20;

/// Options with enough memory for the changes of several batches since the last snapshot.
fn options() -> Options {
    uncompressed().memory(MemoryOptions::new().budget(Place::Disk, 1 << 30))
}

struct LongPage {
    device: Arc<FaultyDevice>,
    disk: SimDisk,
    store: Store,
    page: PageId,
}

impl LongPage {
    fn at(place: Place) -> Self {
        let device = Arc::new(FaultyDevice::across_a_bus(Arc::new(HostDevice::new())));
        let disk = SimDisk::new();
        let store = Store::open_on(Arc::new(disk.clone()), device.clone(), options()).unwrap();
        let page = commit(&store, |batch| _ = batch.create(LEN + 2, place))[0];
        Self { device, disk, store, page }
    }

    /// Writes all bytes of the page except its first and last byte, from device or host memory. Returns the
    /// written bytes.
    fn write(&self, is_born_there: bool, salt: u64) -> remanent::Result<Vec<u8>> {
        let bytes = Random(salt).bytes(LEN);
        let mut batch = self.store.batch();
        if is_born_there {
            let memory = self.store.device_bytes(LEN, Place::Device(0)).unwrap();
            // Write the memory in pieces, because this also needs staging memory.
            for (piece, at) in bytes.chunks(1 << 20).zip((0..).step_by(1 << 20)) {
                memory.write(at, piece).unwrap();
            }
            // Add short writes next to the long one, in the same downloaded piece.
            batch.write_device(self.page, 1, &memory.part(0..100).unwrap());
            batch.write_device(self.page, 101, &memory.part(100..LEN - 5000).unwrap());
            batch.write(self.page, 1 + LEN - 5000, &bytes[LEN as usize - 5000..]);
        } else {
            batch.write(self.page, 1, &bytes);
        }
        self.store.commit(batch)?;
        Ok(bytes)
    }

    fn holds(&self, written: &[u8]) -> bool {
        let bytes = self.store.read_to_vec(self.page).unwrap();
        bytes[1..=LEN as usize] == *written && bytes[0] == 0 && bytes[LEN as usize + 1] == 0
    }
}

#[test]
fn disk_page_write_uses_bounded_staging() {
    let on_disk = LongPage::at(Place::Disk);
    for (is_born_there, salt) in [(true, 1), (false, 2)] {
        let written = on_disk.write(is_born_there, salt).unwrap();
        assert!(on_disk.holds(&written));
        assert_eq!(on_disk.store.page(on_disk.page).unwrap().place, Place::Disk);
    }
    let longest = on_disk.device.longest_staging();
    assert!(longest <= WAVE_LEN, "{longest} bytes");
    let written = on_disk.write(true, 3).unwrap();
    let LongPage { device, disk, store, page } = on_disk;
    drop(store);
    let store = Store::open_on(Arc::new(disk.clone()), device.clone(), options()).unwrap();
    assert!(LongPage { device, disk, store, page }.holds(&written));

    // Bytes for a page in memory are uploaded directly from the caller's memory.
    let in_memory = LongPage::at(Place::Device(0));
    let written = in_memory.write(true, 4).unwrap();
    assert!(in_memory.holds(&written));
    assert!(in_memory.device.longest_staging() as u64 >= LEN);
}

#[test]
fn bit_flip_on_transfer_to_long_payload_is_detected() {
    let on_disk = LongPage::at(Place::Disk);
    for (nth, times) in [(1, 1), (2, 1), (3, 1), (4, 1), (2, u64::MAX)] {
        on_disk.device.flip(BitFlip { way: BusTransfer::Down, nth, times });
        let written = on_disk.write(true, nth);
        assert!(on_disk.device.end_flips() > 0, "copy {nth} came");
        match written {
            Ok(written) => assert!(times == 1 && on_disk.holds(&written)),
            Err(error) => assert!(times > 1, "{error}"),
        }
    }
}

/// A page moves to memory while a batch is built for it as a page on disk.
#[test]
fn a_page_moves_while_a_long_payload_is_made_for_it() {
    let long = LongPage::at(Place::Disk);
    let is_over = AtomicBool::new(false);
    let moves = std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let places = [Place::Host, Place::Disk].into_iter().cycle();
            let moves = places.take_while(|_| !is_over.load(Ordering::Relaxed));
            moves.map(|place| move_to(&long.store, long.page, place)).count()
        });
        for salt in 1..=6 {
            let written = long.write(salt % 2 == 0, salt).unwrap();
            assert!(long.holds(&written));
        }
        is_over.store(true, Ordering::Relaxed);
        mover.join().unwrap()
    });
    assert!(moves > 0, "none");
}

/// A batch with bytes for a page on disk also moves another page out of memory. The released memory is
/// available to the next batch, although no list has been executed.
#[test]
fn memory_released_by_long_payload_is_reusable() {
    const OTHER_LEN: u64 = 4096;
    let give_up: [fn(&mut WriteBatch, PageId); 2] =
        [|batch, page| _ = batch.delete(page), |batch, page| _ = batch.move_to(page, Place::Disk)];
    for give_up in give_up {
        let options = options()
            .memory(MemoryOptions::new().budget(Place::Disk, 1 << 30).budget(Place::Pinned, OTHER_LEN));
        let store = Store::open_on(Arc::new(SimDisk::new()), Arc::new(HostDevice::new()), options).unwrap();
        let long = commit(&store, |batch| _ = batch.create(LEN + 2, Place::Disk))[0];
        for is_leased in [false, true] {
            let other = commit(&store, |batch| _ = batch.create(OTHER_LEN, Place::Pinned))[0];
            let lease = is_leased.then(|| store.lease(other).unwrap());
            commit(&store, |batch| {
                give_up(batch, other);
                batch.write(long, 1, &vec![7; LEN as usize]);
            });
            drop(lease);
        }
        commit(&store, |batch| _ = batch.create(OTHER_LEN, Place::Pinned));
    }
}
