//! Blocks of a cache in pages of every device: device memory of one layout goes to pages of two others and
//! comes back, also after a restart and by another store's pages.

use remanent::device::DeviceBytes;
use remanent::layout::{Arrangement, BlockLayout, BlockPages, BlockShape};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Place, Store};

use crate::device_ops::{PLACE, devices, open};
use crate::kill::workload::Random;

const BLOCKS: u64 = 5;

fn layout(arrangement: Arrangement, align: u32) -> BlockLayout {
    let shape = BlockShape { layers: 3, outer: 2, tokens: 4, inner: 13, width: 2 };
    BlockLayout::new(shape, BLOCKS, arrangement, align).unwrap()
}

fn create(store: &Store, layout: BlockLayout, place: Place) -> BlockPages {
    let mut batch = store.batch();
    BlockPages::create(&mut batch, layout, place);
    BlockPages::new(layout, store.commit(batch).unwrap().pages).unwrap()
}

/// Regions of a layout with these bytes, in memory of the device.
fn regions(store: &Store, contents: &[Vec<u8>]) -> Vec<DeviceBytes> {
    let region = |bytes: &Vec<u8>| {
        let memory = store.device_bytes(bytes.len() as u64, PLACE).unwrap();
        memory.write(0, bytes).unwrap();
        memory
    };
    contents.iter().map(region).collect()
}

fn bytes(memory: &DeviceBytes) -> Vec<u8> {
    let mut bytes = vec![0; memory.byte_len() as usize];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn blocks_of_every_device_go_through_pages_and_come_back() {
    let of_engine = layout(Arrangement::LayersApart { block_first: false }, 1);
    let (whole, apart) =
        (layout(Arrangement::Contiguous, 512), layout(Arrangement::LayersApart { block_first: true }, 16));
    let mut random = Random(17);
    let engine: Vec<Vec<u8>> =
        (0..of_engine.region_count()).map(|_| random.bytes(of_engine.region_len())).collect();
    let zeros: Vec<Vec<u8>> = engine.iter().map(|region| vec![0; region.len()]).collect();
    for device in devices() {
        let (label, disk) = (device.label(), SimDisk::new());
        let store = open(&disk, device.clone());
        let (first, second) = (create(&store, whole, PLACE), create(&store, apart, Place::Disk));
        let source = regions(&store, &engine);
        for block in 0..BLOCKS {
            let mut batch = store.batch();
            // By the device into one layout, by a copy into the other, in another order.
            first.write_device(&mut batch, block, &of_engine, &source, block).unwrap();
            store.commit(batch).unwrap();
            let mut batch = store.batch();
            second.copy(&mut batch, (block + 2) % BLOCKS, &first, block).unwrap();
            store.commit(batch).unwrap();
        }
        let check = |store: &Store| {
            for (pages, shift) in [(&first, 0), (&second, 2)] {
                let target = regions(store, &zeros);
                let mut by_host = zeros.clone();
                for block in 0..BLOCKS {
                    let at = (block + shift) % BLOCKS;
                    pages.read_device(store, at, &of_engine, &target, block).unwrap();
                    let mut slices: Vec<&mut [u8]> = by_host.iter_mut().map(Vec::as_mut_slice).collect();
                    pages.read(store, at, &of_engine, &mut slices, block).unwrap();
                }
                assert!(target.iter().map(bytes).eq(engine.iter().cloned()), "{label}, by the device");
                assert!(by_host == engine, "{label}, by the host");
            }
        };
        check(&store);
        store.snapshot().unwrap();
        drop((store, source));
        check(&open(&disk, device));
    }
}
