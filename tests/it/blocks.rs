//! Blocks of an inference engine's cache, in pages and in the engine's own tensors. Results are compared with a
//! byte-by-byte loop, and each call must submit one command list for any number of blocks.

use std::collections::BTreeMap;

use remanent::batch::{InitialCopy, Shadow, Width};
use remanent::blocks::{BlockPages, BlockTensors};
use remanent::device::DeviceBytes;
use remanent::device::Lane;
use remanent::error::{Invalid, Refused};
use remanent::layout::{Arrangement, BlockLayout, BlockShape, LayoutError};
use remanent::testing::sim_disk::SimDisk;
use remanent::{Ack, Error, PageId, Place, Store};

use crate::device_ops::{PLACE, content, devices, open};
use crate::kill::workload::Random;

const ARRANGEMENTS: [Arrangement; 3] = [
    Arrangement::Contiguous,
    Arrangement::LayersApart { block_first: true },
    Arrangement::LayersApart { block_first: false },
];
/// A shape in which the length of a block's contiguous ranges is not a multiple of any vector width.
const SHAPE: BlockShape = BlockShape { layers: 3, outer: 2, tokens: 5, inner: 7, width: 2 };

/// The bytes of the regions of a layout, of an engine or a store.
type Regions = Vec<Vec<u8>>;

fn layout(arrangement: usize, blocks: u64, align: u32) -> BlockLayout {
    BlockLayout::new(SHAPE, blocks, ARRANGEMENTS[arrangement % 3], align).unwrap()
}

/// Returns the offset and the length of the contiguous range of each (block, layer, outer part). The ranges follow each
/// other in the order of the arrangement.
fn runs(layout: &BlockLayout) -> BTreeMap<(u64, u32, u8), (usize, usize)> {
    let BlockShape { layers, outer, tokens, inner, width } = layout.shape();
    let run_len = tokens as usize * inner as usize * usize::from(width);
    let stride = run_len.next_multiple_of(layout.align() as usize);
    let all =
        (0..layout.blocks()).flat_map(|b| (0..layers).flat_map(move |l| (0..outer).map(move |o| (b, l, o))));
    let mut ordered: Vec<_> = all.collect();
    ordered.sort_by_key(|&(block, layer, outer)| match layout.arrangement() {
        Arrangement::Contiguous => (0, block, u64::from(layer), u64::from(outer)),
        Arrangement::LayersApart { block_first: true } => (layer, block, u64::from(outer), 0),
        Arrangement::LayersApart { block_first: false } => (layer, u64::from(outer), block, 0),
    });
    let mut ends = vec![0; layout.region_count()];
    let mut found = BTreeMap::new();
    for (block, layer, outer) in ordered {
        let region = if ends.len() == 1 { 0 } else { layer as usize };
        found.insert((block, layer, outer), (region, ends[region]));
        ends[region] += stride;
    }
    found
}

/// Copies a block byte by byte.
fn slow_copy(
    (from, source, block): (&BlockLayout, &Regions, u64),
    (to, target, to_block): (&BlockLayout, &mut Regions, u64),
) {
    let BlockShape { tokens, inner, width, .. } = from.shape();
    let (of_source, of_target) = (runs(from), runs(to));
    for ((_, layer, outer), (region, at)) in of_source.into_iter().filter(|((of, ..), _)| *of == block) {
        let (to_region, to_at) = of_target[&(to_block, layer, outer)];
        for byte in 0..tokens as usize * inner as usize * usize::from(width) {
            target[to_region][to_at + byte] = source[region][at + byte];
        }
    }
}

fn random_regions(random: &mut Random, layout: &BlockLayout) -> Regions {
    (0..layout.region_count()).map(|_| random.bytes(layout.region_len())).collect()
}

/// Creates the pages of a layout with these bytes, including gaps.
fn pages(store: &Store, layout: BlockLayout, place: Place, regions: &Regions) -> BlockPages {
    let mut batch = store.batch();
    for page in BlockPages::create(&mut batch, layout, place).into_iter().zip(regions) {
        batch.write(page.0, 0, page.1);
    }
    let ticket = store.submit(batch).unwrap();
    // Wait, so that no command list of this batch is submitted later.
    ticket.wait(Ack::Applied).unwrap();
    BlockPages::new(store, layout, ticket.pages().to_vec()).unwrap()
}

fn contents(store: &Store, pages: &BlockPages) -> Regions {
    pages.pages().iter().map(|page| content(store, *page)).collect()
}

fn tensors(store: &Store, layout: BlockLayout, regions: &Regions) -> BlockTensors {
    let memory = regions.iter().map(|region| {
        let memory = store.device_bytes(region.len() as u64, PLACE).unwrap();
        memory.write(0, region).unwrap();
        memory
    });
    BlockTensors::new(layout, memory.collect()).unwrap()
}

fn bytes_in(tensors: &[DeviceBytes]) -> Regions {
    let bytes = |memory: &DeviceBytes| {
        let mut bytes = vec![0; memory.byte_len() as usize];
        memory.read(0, &mut bytes).unwrap();
        bytes
    };
    tensors.iter().map(bytes).collect()
}

/// Returns the number of command lists that the store has submitted to its device on a lane.
fn lists(store: &Store, lane: Lane) -> u64 {
    store.stats().lanes.iter().filter(|(of, _)| *of == lane).map(|(_, lane)| lane.lists).sum()
}

/// For pages and tensors of each arrangement in each place, one call loads or writes its blocks with one command list.
/// The result equals that of a byte-by-byte loop, and gaps and other blocks are unchanged.
#[test]
fn many_blocks_are_loaded_and_written_by_one_list() {
    let places = [PLACE, Place::Pinned, Place::Disk];
    for device in devices() {
        let label = device.label();
        let store = open(&SimDisk::new(), device);
        let mut random = Random(23);
        for round in 0..9_usize {
            let place = places[(round / 3 + round) % 3];
            let of_engine = layout(round, 9, 1);
            let of_store = layout(round / 3, 5, 16);
            let (mut in_engine, mut in_pages) =
                (random_regions(&mut random, &of_engine), random_regions(&mut random, &of_store));
            let engine = tensors(&store, of_engine, &in_engine);
            let pages = pages(&store, of_store, place, &in_pages);
            // Also use a layout with one block per page.
            let of_one = layout(0, 1, 1);
            let one = self::pages(&store, of_one, place, &vec![vec![7; of_one.region_len() as usize]]);
            let mut in_one = contents(&store, &one);

            let submitted = lists(&store, Lane::Apply);
            let blocks = [(pages.block(4), 0), (pages.block(0), 8), (one.block(0), 3), (pages.block(2), 1)];
            assert_eq!(engine.load(&store, &blocks).unwrap(), store.lsn());
            if place != Place::Disk {
                assert_eq!(lists(&store, Lane::Apply) - submitted, 1, "round {round} on {label}");
            }
            slow_copy((&of_one, &in_one, 0), (&of_engine, &mut in_engine, 3));
            for (block, to_block) in [(4, 0), (0, 8), (2, 1)] {
                slow_copy((&of_store, &in_pages, block), (&of_engine, &mut in_engine, to_block));
            }
            assert!(bytes_in(engine.tensors()) == in_engine, "loaded in round {round} on {label}");

            let mut batch = store.batch();
            engine.write(&mut batch, &[(5, pages.block(1)), (3, one.block(0)), (2, pages.block(3))]).unwrap();
            store.commit(batch).unwrap();
            slow_copy((&of_engine, &in_engine, 3), (&of_one, &mut in_one, 0));
            for (block, to_block) in [(5, 1), (2, 3)] {
                slow_copy((&of_engine, &in_engine, block), (&of_store, &mut in_pages, to_block));
            }
            assert!(contents(&store, &pages) == in_pages, "written in round {round} on {label}");
            assert!(contents(&store, &one) == in_one, "written in round {round} on {label}");
        }
    }
}

/// A batch that creates pages can fill the pages from tensors.
#[test]
fn new_pages_are_created_in_tensors() {
    for device in devices() {
        let label = device.label();
        let store = open(&SimDisk::new(), device);
        let mut random = Random(9);
        for round in 0..9_usize {
            let (of_engine, of_store) = (layout(round, 5, 1), layout(round / 3, 2, 8));
            let in_engine = random_regions(&mut random, &of_engine);
            let engine = tensors(&store, of_engine, &in_engine);
            let mut batch = store.batch();
            let new = [PLACE, Place::Disk].map(|place| BlockPages::create(&mut batch, of_store, place));
            engine.write_new(&mut batch, &of_store, &[(4, 0, &new[0]), (2, 1, &new[1])]).unwrap();
            let refused = engine.write_new(&mut batch, &of_store, &[(0, 0, &[])]).unwrap_err();
            assert!(
                matches!(refused, Error::Invalid(Invalid::Layout(LayoutError::RegionCount { found: 0, .. }))),
                "{refused}"
            );
            let created = store.commit(batch).unwrap().pages;
            for (pages, (block, target)) in created.chunks(of_store.region_count()).zip([(4, 0), (2, 1)]) {
                let pages = BlockPages::new(&store, of_store, pages.to_vec()).unwrap();
                let mut expected = vec![vec![0; of_store.region_len() as usize]; of_store.region_count()];
                slow_copy((&of_engine, &in_engine, block), (&of_store, &mut expected, target));
                assert!(contents(&store, &pages) == expected, "round {round} on {label}");
            }
        }
    }
}

/// The device gathers any number of written blocks with as many command lists as for one block.
#[test]
fn block_count_does_not_change_list_count() {
    for device in devices() {
        let label = device.label();
        let store = open(&SimDisk::new(), device);
        let mut random = Random(1);
        let layout = layout(2, 20, 1);
        let regions = random_regions(&mut random, &layout);
        let engine = tensors(&store, layout, &regions);
        let pages = pages(&store, layout, Place::Disk, &regions);
        let of_count = |count: u64| {
            let submitted = lists(&store, Lane::Stage);
            let mut batch = store.batch();
            let blocks: Vec<_> = (0..count).map(|block| (block, pages.block(block))).collect();
            engine.write(&mut batch, &blocks).unwrap();
            store.commit(batch).unwrap();
            lists(&store, Lane::Stage) - submitted
        };
        // Two command lists: the gather, and an empty list after which the memory of the gather is freed.
        assert_eq!((of_count(1), of_count(20)), (2, 2), "on {label}");
    }
}

/// Captures log the changes that an engine made in the named blocks, with page shadows and with digests.
#[test]
fn changed_blocks_are_captured_from_tensors() {
    let cases = [
        (PLACE, Shadow::Page),
        (PLACE, Shadow::Kept(PLACE)),
        (Place::Disk, Shadow::Kept(PLACE)),
        (Place::Disk, Shadow::Digest),
    ];
    for device in devices() {
        let label = device.label();
        let store = open(&SimDisk::new(), device);
        for (round, (place, shadow)) in cases.into_iter().enumerate() {
            let mut random = Random(round as u64);
            let layout = layout(2, 6, 2);
            let mut expected = random_regions(&mut random, &layout);
            let pages = pages(&store, layout, place, &expected);
            let engine = tensors(&store, layout, &random_regions(&mut random, &layout));
            let working =
                engine.working_copies(&store, &pages, Width::W2, shadow, InitialCopy::Load).unwrap();
            assert!(bytes_in(engine.tensors()) == expected, "{shadow:?} on {label}");
            for blocks in [&[3_u64, 0][..], &[5], &[]] {
                let work = random_regions(&mut random, &layout);
                let mut in_engine = bytes_in(engine.tensors());
                for block in blocks {
                    slow_copy((&layout, &work, *block), (&layout, &mut in_engine, *block));
                    slow_copy((&layout, &work, *block), (&layout, &mut expected, *block));
                }
                for (memory, bytes) in engine.tensors().iter().zip(&in_engine) {
                    memory.write(0, bytes).unwrap();
                }
                let mut batch = store.batch();
                working.capture(&mut batch, blocks).unwrap();
                store.commit(batch).unwrap();
                assert!(contents(&store, &pages) == expected, "{shadow:?} on {label}");
            }
            let mut batch = store.batch();
            assert!(matches!(working.capture(&mut batch, &[6]), Err(LayoutError::OutOfRange { .. })));
        }
    }
}

/// Blocks are copied in both directions between two stores whose layouts share only the block shape, for each pair of
/// arrangements.
#[test]
fn stores_of_different_layouts_exchange_blocks() {
    let [ours, theirs] = [0, 1].map(|_| devices().into_iter());
    for (device, other) in ours.zip(theirs) {
        let label = device.label();
        let stores = [open(&SimDisk::new(), device), open(&SimDisk::new(), other)];
        let mut random = Random(8);
        for round in 0..9_usize {
            let layouts = [layout(round, 4, 1), layout(round / 3, 7, 32)];
            let mut expected = layouts.map(|layout| random_regions(&mut random, &layout));
            let place = [PLACE, Place::Host, Place::Disk][round % 3];
            let held = [0, 1].map(|of| pages(&stores[of], layouts[of], place, &expected[of]));
            for (from, to) in [(0, 1), (1, 0)] {
                let count = layouts.iter().map(BlockLayout::blocks).min().unwrap();
                let mut blocks: Vec<u64> = (0..count).collect();
                (1..blocks.len()).rev().for_each(|at| blocks.swap(at, random.below(at as u64 + 1) as usize));
                let pairs: Vec<_> = (0..3).zip(blocks).collect();
                let named: Vec<_> =
                    pairs.iter().map(|(a, b)| (held[from].block(*a), held[to].block(*b))).collect();
                let mut batch = stores[to].batch();
                let lsn = BlockPages::import(&mut batch, &stores[from], &named).unwrap();
                assert_eq!(lsn, stores[from].lsn());
                stores[to].commit(batch).unwrap();
                let source = expected[from].clone();
                for (block, to_block) in pairs {
                    slow_copy((&layouts[from], &source, block), (&layouts[to], &mut expected[to], to_block));
                }
                for of in 0..2 {
                    assert!(contents(&stores[of], &held[of]) == expected[of], "round {round} on {label}");
                }
            }
        }
    }
}

/// Blocks in the caller's host memory are written to a store, copied to pages of another layout, and read back.
#[test]
fn blocks_round_trip_through_store() {
    for device in devices() {
        let store = open(&SimDisk::new(), device);
        let mut random = Random(3);
        let of_engine = layout(2, 4, 1);
        let source = random_regions(&mut random, &of_engine);
        let slices: Vec<&[u8]> = source.iter().map(Vec::as_slice).collect();
        let [whole, apart] = [(0, 16), (1, 1)].map(|(arrangement, align)| {
            let layout = layout(arrangement, 2, align);
            pages(&store, layout, PLACE, &random_regions(&mut random, &layout))
        });
        let mut batch = store.batch();
        whole.write(&mut batch, 0, &of_engine, &slices, 3).unwrap();
        whole.write(&mut batch, 1, &of_engine, &slices, 1).unwrap();
        store.commit(batch).unwrap();
        let mut batch = store.batch();
        apart.copy(&mut batch, 1, &whole, 0).unwrap();
        apart.copy(&mut batch, 0, &whole, 1).unwrap();
        store.commit(batch).unwrap();

        let mut expected = random_regions(&mut random, &of_engine);
        let mut found = expected.clone();
        slow_copy((&of_engine, &source, 3), (&of_engine, &mut expected, 0));
        slow_copy((&of_engine, &source, 1), (&of_engine, &mut expected, 2));
        let mut targets: Vec<&mut [u8]> = found.iter_mut().map(Vec::as_mut_slice).collect();
        apart.read(&store, 1, &of_engine, &mut targets, 0).unwrap();
        apart.read(&store, 0, &of_engine, &mut targets, 2).unwrap();
        assert!(found == expected);
    }
}

/// Pages can be placed in the engine's own tensors. The engine then reads the bytes that the store writes.
#[test]
fn pages_live_in_engine_tensors() {
    for device in devices() {
        let store = open(&SimDisk::new(), device);
        let mut random = Random(6);
        let (of_engine, of_store) = (layout(1, 3, 1), layout(0, 2, 1));
        let [in_engine, in_pages] = [of_engine, of_store].map(|layout| random_regions(&mut random, &layout));
        let engine = tensors(&store, of_engine, &in_engine);
        let mut batch = store.batch();
        engine.create_pages(&mut batch);
        let created = store.commit(batch).unwrap().pages;
        let in_tensors = BlockPages::new(&store, of_engine, created).unwrap();
        let source = pages(&store, of_store, Place::Disk, &in_pages);
        let mut batch = store.batch();
        in_tensors.copy(&mut batch, 2, &source, 1).unwrap();
        let ticket = store.submit(batch).unwrap();
        ticket.wait(Ack::Applied).unwrap();
        let mut expected: Regions = in_engine.iter().map(|region| vec![0; region.len()]).collect();
        slow_copy((&of_store, &in_pages, 1), (&of_engine, &mut expected, 2));
        assert!(contents(&store, &in_tensors) == expected);
        assert!(bytes_in(engine.tensors()) == expected);
        // Only the store may write to these pages' memory.
        let refused = engine.load(&store, &[(source.block(0), 0)]).unwrap_err();
        assert!(matches!(refused, Error::Refused(Refused::MemoryInUse { .. })), "{refused}");
    }
}

#[test]
fn pages_and_tensors_that_do_not_hold_the_layout_are_refused() {
    let store = open(&SimDisk::new(), devices().remove(0));
    let layout = layout(1, 2, 1);
    let regions: Regions = vec![vec![1; layout.region_len() as usize]; 3];
    let held = pages(&store, layout, PLACE, &regions);
    let longer = BlockLayout::new(SHAPE, 3, layout.arrangement(), 1).unwrap();
    let taken = |layout, pages: &[PageId]| BlockPages::new(&store, layout, pages.to_vec()).unwrap_err();
    let (found, expected) = (layout.region_len(), longer.region_len());
    assert!(matches!(
        taken(longer, held.pages()),
        Error::Invalid(Invalid::Layout(LayoutError::RegionLen { region: 0, found: at, expected: of })) if (at, of) == (found, expected)
    ));
    let few = taken(layout, &held.pages()[1..]);
    assert!(
        matches!(few, Error::Invalid(Invalid::Layout(LayoutError::RegionCount { found: 2, expected: 3 }))),
        "{few}"
    );
    assert!(matches!(taken(layout, &[PageId(99); 3]), Error::UnknownPage { page: PageId(99) }));

    let engine = tensors(&store, layout, &regions);
    let few = BlockTensors::new(layout, engine.tensors()[1..].to_vec()).unwrap_err();
    assert_eq!(few, LayoutError::RegionCount { found: 2, expected: 3 });
    let short = BlockTensors::new(longer, engine.tensors().to_vec()).unwrap_err();
    assert_eq!(short, LayoutError::RegionLen { region: 0, found, expected });

    // If one of the blocks does not exist or has another shape, the call adds no operation to the batch.
    let mut batch = store.batch();
    let outside = engine.write(&mut batch, &[(0, held.block(0)), (1, held.block(2))]).unwrap_err();
    assert!(
        matches!(outside, Error::Invalid(Invalid::Layout(LayoutError::OutOfRange { index: 2, .. }))),
        "{outside}"
    );
    let other = BlockLayout::new(BlockShape { layers: 1, ..SHAPE }, 1, Arrangement::Contiguous, 1).unwrap();
    let of_other = pages(&store, other, PLACE, &vec![vec![0; other.region_len() as usize]]);
    let pairs = [(held.block(0), held.block(1)), (of_other.block(0), held.block(0))];
    let refused = BlockPages::import(&mut batch, &store, &pairs).unwrap_err();
    assert!(matches!(refused, Error::Invalid(Invalid::Layout(LayoutError::OtherShape { .. }))), "{refused}");
    store.commit(batch).unwrap();
    assert_eq!(contents(&store, &held), regions);
    let refused = engine
        .working_copies(&store, &of_other, Width::W2, Shadow::Page, InitialCopy::Load)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("3 layers") && refused.contains("1 layers"), "{refused}");
}
