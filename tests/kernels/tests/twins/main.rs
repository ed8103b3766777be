//! Every kernel has the same result as its counterpart in the host device, in whatever order its threads run
//! (I11).
//!
//! Cases are generated from seeds, which a failure reports. All memory ends at an unmapped page.

mod memory;

use std::mem::size_of;

use kernels_on_cpu::{launch, launch_apply};
use memory::{Fenced, Random};
use remanent::Place;
use remanent::batch::Width;
use remanent::device::cuda::abi::{
    APPLY_BY_BLOCK, APPLY_BY_WARP, CRC_CHUNK_LEN, CRC_CHUNKS, CRC_COMBINE, CRC_FIRST, CRC_LAST, CombineRow,
    CrcRow, DIFF, DIGEST, DiffRow, DigestRow, IndexRow, MASK_STEPS, OUT_OF_BOUNDS, PartRow, PieceRow,
    SELECT_COUNT, SELECT_EMIT, SELECT_SCAN, ScanRow, SelectRow, TWICE, VALIDATE,
};
use remanent::device::host::HostDevice;
use remanent::device::{
    Command, CommandList, DIGEST_CHUNK_LEN, DIGEST_LEN, DIGEST_SEED_LEN, Device, Lane, Payload, Piece,
    PieceKind, Span, Staging, StagingSpan, digest_count, digest_key,
};

const WIDTHS: [Width; 5] = [Width::W1, Width::W2, Width::W4, Width::W8, Width::W16];

/// Returns the bytes of a page after a command of the host device.
fn on_host(page: &[u8], payload: &[u8], commands: impl FnOnce(Span) -> Vec<Command>) -> Vec<u8> {
    let device = HostDevice::new();
    let memory = device.allocate(Place::Host, page.len() as u64).unwrap();
    let span = Span { memory, offset: 0, len: page.len() as u64 };
    let whole = |index| StagingSpan { index, offset: 0, len: page.len() };
    let mut all = vec![Command::Upload { source: whole(0), target: span }];
    all.extend(commands(span));
    all.push(Command::Download { source: span, target: whole(0) });
    let staging = vec![Staging::new(page.to_vec()), Staging::new(payload.to_vec())];
    let pending = device.submit(Lane::Apply, CommandList { commands: all, staging }).unwrap();
    pending.finish(&device).unwrap().swap_remove(0).to_vec()
}

/// A delta, both as a command and as a row of a table.
struct Delta {
    /// The offset of the delta's range in the page.
    offset: usize,
    len: usize,
    kind: DeltaKind,
    /// The offset of the delta's parts in the payload.
    payload_at: usize,
    values_at: usize,
}

enum DeltaKind {
    Dense,
    Masked(Width),
    Sparse(Width, usize),
    Fill(Width, [u8; 16]),
}

impl Delta {
    /// Generates a random delta, and appends its bytes to the payload.
    fn random(random: &mut Random, page_len: usize, payload: &mut Vec<u8>) -> Self {
        let width = WIDTHS[random.below(5)];
        let bytes = width.bytes();
        let mut offset = random.below(page_len + 1);
        // In half of the cases, use the alignment of real pages.
        if random.below(2) == 0 {
            offset -= offset % 16;
        }
        let len = random.len(page_len - offset);
        let whole = len - len % bytes;
        let gap = [0, 16 - payload.len() % 16, random.below(16)][random.below(3)];
        payload.extend(random.bytes(gap));
        let payload_at = payload.len();
        let mut values_at = payload_at;
        let (len, kind) = match random.below(4) {
            0 => {
                payload.extend(random.bytes(len));
                (len, DeltaKind::Dense)
            }
            1 => {
                let bitmap = match random.below(3) {
                    0 => random.bytes(whole.div_ceil(8 * bytes)),
                    1 => vec![0xff; whole.div_ceil(8 * bytes)],
                    _ => (0..whole.div_ceil(8 * bytes)).map(|_| 1 << random.below(30).min(7)).collect(),
                };
                payload.extend(bitmap);
                payload.resize(payload.len().next_multiple_of([1, 16][random.below(2)]), 0);
                values_at = payload.len();
                payload.extend(random.bytes(whole));
                (whole, DeltaKind::Masked(width))
            }
            2 => {
                let indices = distinct(random, whole / bytes);
                indices.iter().for_each(|index| payload.extend(index.to_le_bytes()));
                payload.resize(payload.len().next_multiple_of([1, 16][random.below(2)]), 0);
                values_at = payload.len();
                payload.extend(random.bytes(indices.len() * bytes));
                (whole, DeltaKind::Sparse(width, indices.len()))
            }
            _ => {
                let pattern = std::array::from_fn(|_| random.next() as u8);
                (whole, DeltaKind::Fill(width, pattern))
            }
        };
        Self { offset, len, kind, payload_at, values_at }
    }

    fn command(&self, page: Span) -> Command {
        let target = Span { offset: self.offset as u64, len: self.len as u64, ..page };
        let values_at = self.values_at - self.payload_at;
        let kind = match self.kind {
            DeltaKind::Fill(width, pattern) => return Command::Fill { target, pattern, width },
            DeltaKind::Dense => PieceKind::Dense,
            DeltaKind::Masked(width) => PieceKind::Masked { width, bytes_at: values_at },
            DeltaKind::Sparse(width, count) => PieceKind::Sparse { width, count, values_at },
        };
        let payload = Payload::Staging { index: 1, offset: self.payload_at };
        Command::Apply { pieces: vec![Piece { target, payload, kind }] }
    }

    fn row(&self, page: u64, payload: u64) -> PieceRow {
        let (target, len) = (page + self.offset as u64, self.len as u64);
        let (payload, values) = (payload + self.payload_at as u64, payload + self.values_at as u64);
        match self.kind {
            DeltaKind::Dense => PieceRow::dense(target, payload, len),
            DeltaKind::Masked(width) => {
                PieceRow::masked(target, payload, values, len / width.bytes() as u64, width)
            }
            DeltaKind::Sparse(width, count) => PieceRow::sparse(target, payload, values, count as u64, width),
            DeltaKind::Fill(width, pattern) => PieceRow::fill(target, pattern, width, len),
        }
    }
}

/// Returns different indices below a bound, in random order.
fn distinct(random: &mut Random, bound: usize) -> Vec<u32> {
    let mut indices: Vec<u32> = (0..bound as u32).collect();
    (1..bound).for_each(|i| indices.swap(i, random.below(i + 1)));
    indices.truncate(random.below(bound + 1));
    indices
}

/// Deltas on one page are applied in order, by one warp and by one block.
#[test]
fn pieces_of_a_page_are_applied_in_order() {
    for seed in 0..600 {
        let random = &mut Random(seed);
        let max = 40 << 10;
        let page_len = random.len(max);
        let page = random.bytes(page_len);
        let mut payload = Vec::new();
        let count = 1 + random.below(5);
        let deltas: Vec<Delta> =
            (0..count).map(|_| Delta::random(random, page.len(), &mut payload)).collect();
        let expected =
            on_host(&page, &payload, |span| deltas.iter().map(|delta| delta.command(span)).collect());
        let payload = Fenced::of(&payload);
        for kernel in [APPLY_BY_WARP, APPLY_BY_BLOCK] {
            let found = Fenced::of(&page);
            let pieces: Vec<PieceRow> =
                deltas.iter().map(|delta| delta.row(found.address(), payload.address())).collect();
            let parts = [PartRow::whole(0, pieces.len() as u32)];
            // SAFETY: targets and payloads are within the page and the payload, which live until the end.
            unsafe { launch_apply(kernel, &parts, &pieces, seed) };
            assert!(*found == *expected, "{}, seed {seed}", kernel.name);
        }
    }
}

/// One long piece is split into parts of many lengths, and many pages are changed in one launch.
#[test]
fn parts_of_piece_equal_whole() {
    for seed in 0..300 {
        let random = &mut Random(seed);
        let pages: Vec<Vec<u8>> = (0..1 + random.below(6))
            .map(|_| {
                let len = random.len(10 << 10);
                random.bytes(len)
            })
            .collect();
        let mut payload = Vec::new();
        let deltas: Vec<Delta> =
            pages.iter().map(|page| Delta::random(random, page.len(), &mut payload)).collect();
        let expected: Vec<Vec<u8>> = pages
            .iter()
            .zip(&deltas)
            .map(|(page, delta)| on_host(page, &payload, |span| vec![delta.command(span)]))
            .collect();
        let payload = Fenced::of(&payload);
        for kernel in [APPLY_BY_WARP, APPLY_BY_BLOCK] {
            let found: Vec<Fenced> = pages.iter().map(|page| Fenced::of(page)).collect();
            let (mut pieces, mut parts) = (Vec::new(), Vec::new());
            for (delta, page) in deltas.iter().zip(&found) {
                let row = delta.row(page.address(), payload.address());
                let cut = MASK_STEPS * (1 + random.below(8) as u64);
                for begin in (0..row.steps).step_by(cut as usize) {
                    let end = begin + cut;
                    parts.push(PartRow { piece_first: pieces.len() as u32, piece_count: 1, begin, end });
                }
                pieces.push(row);
            }
            // SAFETY: targets and payloads are within the pages and the payload, which live until the end.
            unsafe { launch_apply(kernel, &parts, &pieces, seed) };
            for (found, expected) in found.iter().zip(&expected) {
                assert!(**found == **expected, "{}, seed {seed}", kernel.name);
            }
        }
    }
}

/// Elements are copied from the positions that their indices name.
#[test]
fn picked_elements_match_host_device() {
    for seed in 0..300 {
        let random = &mut Random(seed);
        let width = WIDTHS[random.below(5)];
        let bytes = width.bytes();
        let bound = 1 + random.below(3000);
        let source = random.bytes(bound * bytes);
        let count = random.below(3000);
        let indices: Vec<u32> = (0..count).map(|_| random.below(bound) as u32).collect();
        let index_bytes: Vec<u8> = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
        let page = random.bytes((bound + count) * bytes);
        let picked = bound * bytes;
        let expected = on_host(&page, &[source.clone(), index_bytes.clone()].concat(), |span| {
            let from = Span { len: source.len() as u64, ..span };
            let to = Span { offset: picked as u64, len: (count * bytes) as u64, ..span };
            let staged = |offset, len| StagingSpan { index: 1, offset, len };
            vec![
                Command::Upload { source: staged(0, source.len()), target: from },
                Command::Pick { source: from, width, indices: staged(source.len(), 4 * count), target: to },
            ]
        });
        let (source, gap) = (Fenced::of(&source), random.below(2));
        let index_bytes = Fenced::of(&[vec![0; gap], index_bytes].concat());
        for kernel in [APPLY_BY_WARP, APPLY_BY_BLOCK] {
            let found = Fenced::of(&page[picked..]);
            let indices_at = index_bytes.address() + gap as u64;
            let row = PieceRow::pick(found.address(), indices_at, source.address(), count as u64, width);
            let cut = 1 + random.below(count + 1) as u64;
            let parts: Vec<PartRow> = (0..row.steps)
                .step_by(cut as usize)
                .map(|begin| PartRow { piece_first: 0, piece_count: 1, begin, end: begin + cut })
                .collect();
            // SAFETY: target, indices and source live until the end, and the indices are within the source.
            unsafe { launch_apply(kernel, &parts, &[row], seed) };
            assert!(*found == expected[picked..], "{}, {width:?}, seed {seed}", kernel.name);
        }
    }
}

/// Allocates `count` words of four bytes, aligned to four.
fn words(count: usize) -> Fenced {
    Fenced::zeroed(count * size_of::<u32>())
}

fn word(words: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(words[4 * index..][..4].try_into().unwrap())
}

#[test]
fn checksums_of_many_ranges_match_crc32fast() {
    for seed in 0..40 {
        let random = &mut Random(seed);
        // Lengths around those at which the kernel changes its method.
        let edges = [0, 4, 8, 128, 2048, 4096, 6144, CRC_CHUNK_LEN as usize];
        let sources: Vec<Fenced> = (0..40)
            .map(|_| {
                let edge = edges[random.below(edges.len())];
                let len = (edge + random.below(9)).saturating_sub(4).min(CRC_CHUNK_LEN as usize);
                Fenced::of(&random.bytes(len))
            })
            .collect();
        // Checksums are written to any address.
        let (sums, shift) = (words(sources.len() + 1), random.below(4));
        let rows: Vec<CrcRow> = (0u64..)
            .zip(&sources)
            .map(|(index, source)| CrcRow {
                source: source.address(),
                target: sums.address() + 4 * index + shift as u64,
                len: source.len() as u32,
                flags: CRC_FIRST | CRC_LAST,
            })
            .collect();
        // SAFETY: sources and sums live until the end.
        unsafe { launch(CRC_CHUNKS, &rows, seed) };
        for (index, source) in sources.iter().enumerate() {
            let len = source.len();
            assert_eq!(word(&sums[shift..], index), crc32fast::hash(source), "{len} bytes, seed {seed}");
        }
    }
}

#[test]
fn checksums_of_chunks_combine() {
    let chunk_len = CRC_CHUNK_LEN as usize;
    for (seed, chunks) in [2, 3, 31, 32, 33, 70].into_iter().enumerate() {
        let random = &mut Random(seed as u64);
        // The first chunk may be so short that the initial one bits of the checksum extend into the second
        // chunk.
        let first_len = [1, 2, 3, 7, 1000, chunk_len][seed];
        let source = Fenced::of(&random.bytes(first_len + (chunks - 1) * chunk_len));
        let (remainders, sum, shift) = (words(chunks), words(2), seed % 4);
        let rows: Vec<CrcRow> = (0..chunks)
            .map(|chunk| CrcRow {
                source: source.address()
                    + (first_len + chunk * chunk_len).saturating_sub(chunk_len) as u64 * u64::from(chunk > 0),
                target: remainders.address() + 4 * chunk as u64,
                len: if chunk == 0 { first_len as u32 } else { CRC_CHUNK_LEN },
                flags: if chunk == 0 { CRC_FIRST } else { CRC_LAST * u32::from(chunk == chunks - 1) },
            })
            .collect();
        let combine = [CombineRow {
            remainders: remainders.address(),
            target: sum.address() + shift as u64,
            count: chunks as u32,
            reserved: 0,
        }];
        // SAFETY: the source, the remainders and the sum live until the end.
        unsafe { launch(CRC_CHUNKS, &rows, seed as u64) };
        // SAFETY: as above.
        unsafe { launch(CRC_COMBINE, &combine, seed as u64) };
        assert_eq!(
            word(&sum[shift..], 0),
            crc32fast::hash(&source),
            "{chunks} chunks, the first of {first_len} bytes"
        );
    }
}

/// Returns two ranges that differ in some bytes.
fn pair(random: &mut Random, len: usize) -> (Fenced, Fenced) {
    let left = random.bytes(len);
    let mut right = left.clone();
    for _ in 0..random.below(len / 20 + 2) {
        if len > 0 {
            right[random.below(len)] ^= 1 << random.below(8);
        }
    }
    (Fenced::of(&left), Fenced::of(&right))
}

#[test]
fn differing_elements_are_marked() {
    for seed in 0..600 {
        let random = &mut Random(seed);
        let width = WIDTHS[random.below(5)];
        let bytes = width.bytes();
        let mut len = random.len(40 << 10);
        len -= len % bytes;
        let (left, right) = pair(random, len);
        let expected: Vec<u8> = (0..(len / bytes).div_ceil(8))
            .map(|byte| {
                let differs = |element: usize| {
                    let range = element * bytes..(element + 1) * bytes;
                    left.get(range.clone()) != right.get(range)
                };
                (0..8).map(|bit| u8::from(differs(8 * byte + bit)) << bit).sum()
            })
            .collect();
        let found = Fenced::of(&random.bytes(expected.len()));
        // Each row has a length that is a multiple of eight elements, except the last one, which is shorter.
        let cut = 8 * bytes * (1 + random.below(500));
        let rows: Vec<DiffRow> = (0..len)
            .step_by(cut)
            .map(|begin| DiffRow {
                left: left.address() + begin as u64,
                right: right.address() + begin as u64,
                target: found.address() + (begin / bytes / 8) as u64,
                len: cut.min(len - begin) as u32,
                width: bytes as u32,
            })
            .collect();
        // SAFETY: both ranges and the bitmap live until the end.
        unsafe { launch(DIFF, &rows, seed) };
        assert!(*found == *expected, "{width:?}, seed {seed}");
    }
}

#[test]
fn digests_equal_host_digests() {
    let random = &mut Random(7);
    let seed = random.bytes(DIGEST_SEED_LEN).try_into().unwrap();
    let key = Fenced::of(&digest_key(&seed).unwrap());
    let edges = [0, 1, 16, 4096, 8192, 32 << 10, DIGEST_CHUNK_LEN as usize, 3 * DIGEST_CHUNK_LEN as usize];
    for seed in 0..60 {
        let random = &mut Random(seed);
        let sources: Vec<Fenced> = (0..4)
            .map(|_| {
                let edge = edges[random.below(edges.len())];
                let len = (edge + random.below(35)).saturating_sub(17).max(1);
                // Memory that ends at the unmapped page starts at any address, unless its length is a
                // multiple of 16.
                let len = [len, len.next_multiple_of(16)][random.below(2)];
                Fenced::of(&random.bytes(len))
            })
            .collect();
        let expected: Vec<Vec<u8>> = sources.iter().map(|source| digests_on_host(source, &key)).collect();
        let found = Fenced::of(&vec![0; expected.iter().map(Vec::len).sum()]);
        let mut target = found.address();
        let row = |(source, expected): (&Fenced, &Vec<u8>)| {
            let (source, len, at) = (source.address(), source.len() as u32, target);
            target += expected.len() as u64;
            DigestRow { source, key: key.address(), target: at, len, reserved: 0 }
        };
        let rows: Vec<DigestRow> = sources.iter().zip(&expected).map(row).collect();
        // SAFETY: sources, key and digests live until the end.
        unsafe { launch(DIGEST, &rows, seed) };
        assert_eq!(*found, *expected.concat(), "seed {seed}");
    }
}

/// Returns the digests of all chunks, computed by the host device.
fn digests_on_host(chunks: &[u8], key: &[u8]) -> Vec<u8> {
    let device = HostDevice::new();
    let (mut commands, mut staging) = (Vec::new(), Vec::new());
    let mut uploaded = |bytes: &[u8]| {
        let len = bytes.len() as u64;
        let target = Span { memory: device.allocate(Place::Host, len).unwrap(), offset: 0, len };
        let source = StagingSpan { index: staging.len(), offset: 0, len: bytes.len() };
        staging.push(Staging::new(bytes.to_vec()));
        commands.push(Command::Upload { source, target });
        target
    };
    let (source, key) = (uploaded(chunks), uploaded(key));
    let len = DIGEST_LEN * digest_count(source.len) as usize;
    let target = StagingSpan { index: 2, offset: 0, len };
    commands.push(Command::Digest { sources: vec![source], key, target });
    staging.push(Staging::new(vec![0; len]));
    let pending = device.submit(Lane::Apply, CommandList { commands, staging }).unwrap();
    pending.finish(&device).unwrap().swap_remove(2).to_vec()
}

/// Tests bitmaps of every density, in rows of any number of words, with more output space than necessary and
/// with less.
#[test]
fn indices_of_set_bits_are_listed_in_order() {
    for seed in 0..400 {
        let random = &mut Random(seed);
        let bitmaps: Vec<Vec<u8>> = (0..1 + random.below(3))
            .map(|_| {
                let (len, density) = (random.len(6 << 10), [1, 2, 40, 5000][random.below(4)]);
                (0..len).map(|_| if random.below(density) == 0 { random.next() as u8 } else { 0 }).collect()
            })
            .collect();
        let (mut selects, mut scans, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for bitmap in &bitmaps {
            let set: Vec<u32> = (0..8 * bitmap.len() as u32)
                .filter(|bit| bitmap[*bit as usize / 8] >> (bit % 8) & 1 == 1)
                .collect();
            let room = [set.len(), set.len() + 3, random.below(set.len() + 1)][random.below(3)];
            // If there is more output space than numbers, the rest is unchanged.
            let expected: Vec<u32> = set.iter().copied().chain([0; 3]).take(room).collect();
            let cut = 4 * (1 + random.below(700));
            let count = bitmap.len().div_ceil(cut);
            // In half of the cases, the bitmap is misaligned.
            let gap = random.below(4);
            let bits = Fenced::of(&[vec![0xff; gap], bitmap.clone()].concat());
            let (target, numbers, sum) = (words(room), words(count), words(1));
            let row = |row: usize| SelectRow {
                bits: bits.address() + (gap + row * cut) as u64,
                target: target.address(),
                before: numbers.address() + 4 * row as u64,
                len: cut.min(bitmap.len() - row * cut) as u32,
                first: (8 * row * cut) as u32,
                room: room as u32,
                reserved: 0,
            };
            selects.extend((0..count).map(row));
            let (numbers_at, count) = (numbers.address(), count as u32);
            scans.push(ScanRow { numbers: numbers_at, target: sum.address(), count, reserved: 0 });
            kept.push((bits, target, numbers, sum, set.len() as u32, expected));
        }
        for (kernel, is_scan) in [(SELECT_COUNT, false), (SELECT_SCAN, true), (SELECT_EMIT, false)] {
            if is_scan {
                // SAFETY: the numbers and the sums live until the end.
                unsafe { launch(kernel, &scans, seed) };
            } else if !selects.is_empty() {
                // SAFETY: bits, numbers and targets live until the end.
                unsafe { launch(kernel, &selects, seed) };
            }
        }
        for (bits, target, _, sum, count, expected) in &kept {
            assert_eq!(word(sum, 0), *count, "seed {seed}, {} bytes", bits.len());
            let found: Vec<u32> = (0..expected.len()).map(|index| word(target, index)).collect();
            assert_eq!(found, *expected, "seed {seed}, {} bytes", bits.len());
        }
    }
}

#[test]
fn invalid_and_duplicate_indices_are_detected() {
    for seed in 0..300 {
        let random = &mut Random(seed);
        let bound = 1 + random.below(3000);
        let mut indices = distinct(random, bound);
        let mut expected = 0;
        if random.below(3) == 0 {
            indices.insert(random.below(indices.len() + 1), (bound + random.below(3)) as u32);
            expected |= OUT_OF_BOUNDS;
        }
        if random.below(3) == 0 && indices.iter().any(|index| (*index as usize) < bound) {
            let within: Vec<u32> =
                indices.iter().copied().filter(|index| (*index as usize) < bound).collect();
            indices.insert(random.below(indices.len() + 1), within[random.below(within.len())]);
            expected |= TWICE;
        }
        let bytes: Vec<u8> = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
        let (list, seen, verdict) = (Fenced::of(&bytes), words(bound.div_ceil(32)), words(1));
        let cut = 1 + random.below(indices.len().max(1));
        let rows: Vec<IndexRow> = (0..indices.len())
            .step_by(cut)
            .map(|begin| IndexRow {
                indices: list.address() + 4 * begin as u64,
                seen: seen.address(),
                target: verdict.address(),
                bound: bound as u64,
                count: cut.min(indices.len() - begin) as u64,
            })
            .collect();
        // SAFETY: the list, the bits and the verdict live until the end.
        unsafe { launch(VALIDATE, &rows, seed) };
        assert_eq!(word(&verdict, 0), expected, "seed {seed}");
    }
}
