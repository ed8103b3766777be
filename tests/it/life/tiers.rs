//! A long life with tiers. Pages constantly move to the disk and back, and the store is closed, killed and
//! reopened. The size of the directory depends on the kept states, not on how long the store has run.

use std::sync::Arc;

use remanent::options::{ImageIo, ImageOptions, LogIo, MemoryOptions};
use remanent::testing::sim_disk::{Moment, SimDisk};
use remanent::tiers::Tiers;
use remanent::{Key, Options, PageId, Place, Store};

use crate::files::{Files, small};
use crate::gpu;
use crate::kill::workload::Random;
use crate::with_options::With;

const LEN: u64 = 4096;
const PAGES: u64 = 40;
/// Length of the longest page, for which snapshots write overlays.
const LONG_LEN: u64 = 160 << 10;
const DEVICE: Place = Place::Device(0);
/// Number of opens. There is little work between most opens, and much work after every fifth one.
const OPENS: usize = 25;
const STEPS: [u64; 2] = [20, 300];

fn options(random: &mut Random) -> Options {
    let memory = MemoryOptions::new().budget(DEVICE, 12 * LEN).budget(Place::Host, 6 * LEN);
    let log_io = [LogIo::Mapped, LogIo::Buffered, LogIo::Direct][random.below(3) as usize];
    let image_io = [ImageIo::Mapped, ImageIo::Buffered, ImageIo::Direct][random.below(3) as usize];
    let tiers = Tiers::new([DEVICE, Place::Host, Place::Disk]);
    small()
        .memory(memory)
        .tiers(tiers)
        .images(ImageOptions::new().io(image_io))
        .with(|options| options.log.io = Some(log_io))
}

fn open(disk: &SimDisk, random: &mut Random) -> Store {
    Store::open_on(Arc::new(disk.clone()), gpu::under_test(), options(random)).unwrap()
}

fn key(number: u64) -> Key {
    Key::new(format!("page/{number}")).unwrap()
}

fn bytes(number: u64, version: u64) -> Vec<u8> {
    let len = if number == 0 { LONG_LEN } else { LEN };
    Random(number << 32 | version).bytes(len)
}

/// Length of the images of all pages, each in its own file.
const IMAGES: u64 = PAGES * (LEN + 4096) + LONG_LEN + 8192;
/// Maximum size of the directory: twice the images of all pages in two snapshots and in the running store,
/// and the segments of the log with spares. A life writes several times this number of bytes.
const BYTES_MAX: u64 = 2 * 3 * IMAGES + (1 << 20);
/// Maximum number of files: an image of each page in two snapshots and in the running store, and the files of
/// the log.
const FILES_MAX: usize = 3 * PAGES as usize + 60;

#[test]
fn long_run_with_tiers_stays_within_retained_space() {
    gpu::on_each_device(|| (1..=2).for_each(live));
}

fn live(seed: u64) {
    let random = &mut Random(seed);
    let mut disk = SimDisk::new();
    let mut store = open(&disk, random);
    let mut versions: Vec<u64> = vec![0; PAGES as usize];
    let pages: Vec<PageId> = (0..PAGES)
        .map(|number| {
            let place = if number == 0 { Place::Disk } else { DEVICE };
            store.put(key(number), bytes(number, 0), place).unwrap().0
        })
        .collect();
    let (mut evictions, mut most) = (0, (0, 0));
    for opened in 0..OPENS {
        for step in 0..STEPS[usize::from(opened % 5 == 4)] {
            let what = format!("seed {seed}, open {opened}, step {step}");
            let pick = |random: &mut Random| 1 + random.below(PAGES - 1);
            match random.below(12) {
                0..=4 => {
                    let number = pick(random);
                    versions[number as usize] += 1;
                    store.put(key(number), bytes(number, versions[number as usize]), DEVICE).unwrap();
                }
                5..=6 => {
                    let requested: Vec<PageId> = (0..4).map(|_| pages[pick(random) as usize]).collect();
                    store.ensure(&requested, DEVICE).unwrap();
                }
                7 => store.demote(&[pages[pick(random) as usize], pages[pick(random) as usize]]).unwrap(),
                8 => store.prefetch(&[pages[pick(random) as usize]], DEVICE).unwrap().wait().unwrap(),
                9 => {
                    let mut batch = store.batch();
                    batch.write(pages[0], random.below(LONG_LEN - 16), &[step as u8; 16]);
                    store.commit(batch).unwrap();
                }
                10 => _ = store.snapshot().unwrap(),
                _ => {
                    let number = pick(random);
                    let found = store.read_to_vec(pages[number as usize]).unwrap();
                    assert!(found == bytes(number, versions[number as usize]), "{what}: page {number}");
                }
            }
            let files = Files::of(&disk).0;
            let taken = disk.used_bytes();
            assert!(taken <= BYTES_MAX, "{what}: {taken} bytes");
            assert!(files.len() <= FILES_MAX, "{what}: {} files", files.len());
            most = (most.0.max(taken), most.1.max(files.len()));
        }
        evictions += store.stats().tiers.iter().map(|tier| tier.evictions).sum::<u64>();
        if random.below(3) == 0 {
            disk = disk.after_kill(Moment { event: disk.events(), tear: None });
            std::mem::forget(store);
        } else {
            store.close().unwrap();
        }
        store = open(&disk, random);
    }
    for (number, version) in (1..PAGES).map(|number| (number, versions[number as usize])) {
        assert!(
            store.read_to_vec(pages[number as usize]).unwrap() == bytes(number, version),
            "page {number}"
        );
    }
    assert!(evictions > 1000 && most.0 > IMAGES, "{evictions} evictions, at most {most:?}");
}
