//! Tests that layouts agree with a slow element-by-element loop, and that invalid layouts are rejected.

use proptest::prelude::*;

use super::*;

const ARRANGEMENTS: [Arrangement; 3] = [
    Arrangement::Contiguous,
    Arrangement::LayersApart { block_first: true },
    Arrangement::LayersApart { block_first: false },
];

fn shape() -> impl Strategy<Value = BlockShape> {
    (1..4_u32, 1..3_u8, 1..4_u32, 1..5_u32, 1..4_u8)
        .prop_map(|(layers, outer, tokens, inner, width)| BlockShape { layers, outer, tokens, inner, width })
}

fn layout(shape: BlockShape) -> impl Strategy<Value = BlockLayout> {
    (1..5_u64, 0..3_usize, 0..6_u32).prop_map(move |(blocks, arrangement, align)| {
        BlockLayout::new(shape, blocks, ARRANGEMENTS[arrangement], 1 << align).unwrap()
    })
}

/// Computes the region and the offset of a run by counting the runs before it, from the definition of the arrangements
/// alone.
fn slow(layout: &BlockLayout, block: u64, layer: u32, outer: u8) -> (usize, u64) {
    let BlockShape { layers, outer: outers, tokens, inner, width } = layout.shape();
    let mut stride = u64::from(tokens) * u64::from(inner) * u64::from(width);
    while stride % u64::from(layout.align()) != 0 {
        stride += 1;
    }
    let mut offsets = vec![0; layout.region_count()];
    let mut found = None;
    let mut visit = |region: usize, at: (u64, u32, u8)| {
        if at == (block, layer, outer) {
            found = Some((region, offsets[region]));
        }
        offsets[region] += stride;
    };
    match layout.arrangement() {
        Arrangement::Contiguous => {
            for b in 0..layout.blocks() {
                for l in 0..layers {
                    (0..outers).for_each(|o| visit(0, (b, l, o)));
                }
            }
        }
        Arrangement::LayersApart { block_first: true } => {
            for l in 0..layers {
                for b in 0..layout.blocks() {
                    (0..outers).for_each(|o| visit(l as usize, (b, l, o)));
                }
            }
        }
        Arrangement::LayersApart { block_first: false } => {
            for l in 0..layers {
                for o in 0..outers {
                    (0..layout.blocks()).for_each(|b| visit(l as usize, (b, l, o)));
                }
            }
        }
    }
    assert!(offsets.iter().all(|end| *end == layout.region_len()));
    found.unwrap()
}

/// Returns regions of pseudorandom nonzero bytes, so that a copy that touches a gap is detected.
fn regions(layout: &BlockLayout, seed: u8) -> Vec<Vec<u8>> {
    let byte = |region: usize, at: u64| (region as u64 * 101 + at * 7 + u64::from(seed)) as u8 | 1;
    let region = |region| (0..layout.region_len()).map(|at| byte(region, at)).collect();
    (0..layout.region_count()).map(region).collect()
}

/// Copies a block run by run, at the positions computed by [`slow`].
fn slow_copy(
    (from, source, block): (&BlockLayout, &[Vec<u8>], u64),
    (to, target, to_block): (&BlockLayout, &mut [Vec<u8>], u64),
) {
    let BlockShape { layers, outer, tokens, inner, width } = from.shape();
    let run_len = tokens as usize * inner as usize * usize::from(width);
    for layer in 0..layers {
        for outer in 0..outer {
            let ((region, at), (to_region, to_at)) =
                (slow(from, block, layer, outer), slow(to, to_block, layer, outer));
            for byte in 0..run_len {
                target[to_region][to_at as usize + byte] = source[region][at as usize + byte];
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 512 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn run_wise_block_copy_equals_naive_copy(
        (from, to) in shape().prop_flat_map(|shape| (layout(shape), layout(shape))),
        seed: u8,
    ) {
        let source = regions(&from, seed);
        for (block, to_block) in [(0, to.blocks() - 1), (from.blocks() - 1, 0)] {
            let mut expected = regions(&to, seed.wrapping_add(2));
            let mut found = expected.clone();
            slow_copy((&from, &source, block), (&to, &mut expected, to_block));
            let copies = from.copies(block, &to, to_block).unwrap();
            for BlockCopy { from, to } in &copies {
                prop_assert_eq!(from.len, to.len);
                let bytes = &source[from.region][from.offset as usize..][..from.len as usize];
                found[to.region][to.offset as usize..][..to.len as usize].copy_from_slice(bytes);
            }
            prop_assert_eq!(found, expected);
            prop_assert_eq!(copies.iter().map(|copy| copy.from.len).sum::<u64>(), from.block_len());
            // The list is minimal: no two neighbors could be merged.
            let could_be_one = |pair: &[BlockCopy]| {
                pair[0].from.is_right_before(&pair[1].from) && pair[0].to.is_right_before(&pair[1].to)
            };
            prop_assert!(!copies.windows(2).any(could_be_one));
        }
    }

    #[test]
    fn fingerprint_round_trips_and_any_bytes_decode_or_fail(
        layout in shape().prop_flat_map(layout), any: [u8; 28],
    ) {
        prop_assert_eq!(BlockLayout::from_fingerprint(layout.fingerprint()), Ok(layout));
        let mut bytes = layout.fingerprint();
        bytes[4..].copy_from_slice(&any);
        if let Ok(layout) = BlockLayout::from_fingerprint(bytes) {
            prop_assert_eq!(layout.fingerprint(), bytes);
        }
        // If any bit is flipped, the result is another layout or an error.
        for bit in 0..256 {
            let mut bytes = layout.fingerprint();
            bytes[bit / 8] ^= 1 << (bit % 8);
            if let Ok(layout) = BlockLayout::from_fingerprint(bytes) {
                prop_assert_eq!(layout.fingerprint(), bytes);
            }
        }
    }
}

#[test]
fn invalid_layouts_are_refused_by_name() {
    let shape = BlockShape { layers: 2, outer: 2, tokens: 16, inner: 64, width: 2 };
    let made = |shape, blocks, align| BlockLayout::new(shape, blocks, Arrangement::Contiguous, align);
    let zero = |dimension| Err(LayoutError::Zero { dimension });
    assert_eq!(made(BlockShape { layers: 0, ..shape }, 1, 1), zero("the number of layers"));
    assert_eq!(made(BlockShape { width: 0, ..shape }, 1, 1), zero("the width of an element"));
    assert_eq!(made(shape, 0, 1), zero("the number of blocks"));
    for align in [0, 3, 4 << 20] {
        assert_eq!(made(shape, 1, align), Err(LayoutError::Align { align }));
    }
    let huge = BlockShape { tokens: u32::MAX, inner: u32::MAX, width: 255, ..shape };
    assert_eq!(made(huge, 1, 1), Err(LayoutError::TooLong { what: "a run" }));
    assert_eq!(made(shape, u64::MAX, 1), Err(LayoutError::TooLong { what: "the layout" }));
    assert_eq!(made(shape, 1 << 50, 1 << 21), Err(LayoutError::TooLong { what: "the layout" }));

    let layout = made(shape, 4, 512).unwrap();
    let out = |dimension, index, count| Err(LayoutError::OutOfRange { dimension, index, count });
    assert_eq!(layout.extent(4, 0, 0), out("block", 4, 4));
    assert_eq!(layout.extent(3, 2, 0), out("layer", 2, 2));
    assert_eq!(layout.extent(3, 1, 2), out("outer part", 2, 2));
    let other = made(BlockShape { inner: 32, ..shape }, 4, 1).unwrap();
    let refused = layout.copies(0, &other, 0).unwrap_err().to_string();
    assert!(refused.contains("64 elements") && refused.contains("32 elements"), "{refused}");
    assert_eq!(
        layout.check_regions([1, 2].into_iter()),
        Err(LayoutError::RegionCount { found: 2, expected: 1 })
    );
    let (found, expected) = (layout.region_len() - 1, layout.region_len());
    assert_eq!(
        layout.check_regions([found].into_iter()),
        Err(LayoutError::RegionLen { region: 0, found, expected })
    );
}

#[test]
fn json_describes_layout() {
    let shape = BlockShape { layers: 2, outer: 1, tokens: 16, inner: 64, width: 2 };
    let layout = BlockLayout::new(shape, 4, Arrangement::LayersApart { block_first: false }, 512).unwrap();
    let expected = r#"{"version":1,"blocks":4,"layers":2,"outer":1,"tokens":16,"inner":64,"width":2,"arrangement":"layers apart, outer first","align":512,"regions":2,"region_len":8192}"#;
    assert_eq!(layout.to_json(), expected);
}
