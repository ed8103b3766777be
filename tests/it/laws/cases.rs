//! The table of cases, and random cases.

use remanent::batch::Width;
use remanent::device::{
    Command, DIGEST_CHUNK_LEN, DIGEST_LEN, DIGEST_SEED_LEN, IndexList, Lane, MemoryId, Payload, Piece,
    PieceKind, Selection, Span, StagingSpan, digest_count, digest_key,
};

use super::model::{Case, CaseList};

/// Lengths just below, at and above multiples of 16-byte accesses and of pages.
const LENGTHS: [usize; 8] = [0, 1, 15, 16, 17, 4095, 4096, 4097];
/// Offsets at which a 16-byte access is aligned, and offsets at which it is not.
const OFFSETS: [usize; 5] = [0, 1, 8, 15, 16];
/// Numbers of elements just below, at and above multiples of the number of elements per byte of a mask.
const COUNTS: [usize; 9] = [0, 1, 7, 8, 9, 16, 31, 256, 257];
const WIDTHS: [Width; 5] = [Width::W1, Width::W2, Width::W4, Width::W8, Width::W16];
/// Bytes on both sides of every range, which must not change.
const MARGIN: usize = 17;

/// Returns the cases of the table. Of the cases that differ only in numbers, returns one in `every`.
pub fn table(every: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for offset in OFFSETS {
        LENGTHS.iter().for_each(|len| moves(*len, offset, &mut cases));
        for width in WIDTHS {
            COUNTS.iter().for_each(|count| elements(*count, offset, width, &mut cases));
        }
    }
    for width in WIDTHS {
        (0..=255).for_each(|mask| cases.push(mask_of_eight(mask, width)));
    }
    cases = cases.into_iter().step_by(every).collect();
    cases.extend([
        overlapping_pieces(),
        gather_and_scatter_back(),
        many_checksums(),
        digests(),
        validations(),
        selections(),
        long_diff(),
        both_ways_in_one_staging(),
    ]);
    cases.extend([order_in_a_lane(), order_across_lanes(), no_commands(), long_copy()]);
    cases
}

/// Adds the commands that accept any length, for one length and offset.
fn moves(len: usize, offset: usize, cases: &mut Vec<Case>) {
    let name = |what: &str| format!("{what} of {len} bytes at {offset}");
    let page = |seed| bytes(seed, offset + len + MARGIN);
    let (here, there) = (span(0, offset, len), span(1, MARGIN - offset, len));
    let other = bytes(2, 2 * MARGIN + len);
    let staging = bytes(3, 3 + len + MARGIN);
    let staged = StagingSpan { index: 0, offset: 3, len };
    let mut push = |what: &str, memories, staging, command| {
        cases.push(Case::new(name(what), memories, staging, vec![command]));
    };
    push("upload", vec![page(1)], vec![staging.clone()], Command::Upload { source: staged, target: here });
    push(
        "download",
        vec![page(1)],
        vec![staging.clone()],
        Command::Download { source: here, target: staged },
    );
    let copy = Command::Copy { source: here, target: there };
    push("copy", vec![page(1), other.clone()], vec![], copy);
    let within = Command::Copy { source: here, target: span(0, offset + len, len) };
    push("copy within one memory", vec![bytes(1, offset + 2 * len + MARGIN)], vec![], within);
    let payload = Payload::Staging { index: 0, offset: 3 };
    let dense = apply(here, payload, PieceKind::Dense);
    push("dense piece", vec![page(1)], vec![staging], dense);
    let dense = apply(here, Payload::Device(there), PieceKind::Dense);
    push("dense piece from page memory", vec![page(1), other.clone()], vec![], dense);
    let sum = StagingSpan { index: 0, offset: 1, len: 4 };
    push("checksum", vec![page(1)], vec![bytes(4, 9)], Command::Crc { sources: vec![here], target: sum });
}

/// Adds the commands on whole elements, for one count, offset and width.
fn elements(count: usize, offset: usize, width: Width, cases: &mut Vec<Case>) {
    let name = |what: &str| format!("{what} of {count} elements of {width:?} at {offset}");
    let len = count * width.bytes();
    let page = |seed| bytes(seed, offset + len + MARGIN);
    let target = span(0, offset, len);
    let pattern = bytes(5, 16).try_into().unwrap();
    let fill = Command::Fill { target, pattern, width };
    cases.push(Case::new(name("fill"), vec![page(1)], vec![], vec![fill]));

    for (mask_name, mask) in [
        ("no bit set", vec![0; count.div_ceil(8)]),
        ("all bits set", vec![0xFF; count.div_ceil(8)]),
        ("random bits", bytes(6, count.div_ceil(8))),
    ] {
        let (payload, bytes_at) = joined(&mask, &bytes(7, len));
        let kind = PieceKind::Masked { width, bytes_at };
        either_payload(&name(&format!("mask, {mask_name},")), page(1), target, &payload, kind, cases);
    }

    let all: Vec<u32> = (0..count as u32).rev().collect();
    let every_third: Vec<u32> = (0..count as u32).step_by(3).collect();
    let ends: Vec<u32> = if count > 1 { vec![count as u32 - 1, 0] } else { vec![] };
    for (indices_name, indices) in [("all, backwards", all), ("every third", every_third), ("the ends", ends)]
    {
        let (payload, values_at) = joined(&index_bytes(&indices), &bytes(8, indices.len() * width.bytes()));
        let kind = PieceKind::Sparse { width, count: indices.len(), values_at };
        either_payload(&name(&format!("scatter, {indices_name},")), page(1), target, &payload, kind, cases);
    }

    // The first and last byte of every third element differ, and no others.
    let left = page(1);
    let mut right = left[offset..].to_vec();
    for element in (0..count).step_by(3) {
        let start = element * width.bytes();
        right[start + if element % 2 == 0 { 0 } else { width.bytes() - 1 }] ^= 0x80;
    }
    let diff = |left, right| {
        let target = span(2, 2, count.div_ceil(8));
        vec![Command::Diff { left, right, width, target }]
    };
    let bits = bytes(9, 2 + count.div_ceil(8) + MARGIN);
    let commands = diff(target, span(1, 0, len));
    cases.push(Case::new(name("diff"), vec![left, right, bits.clone()], vec![], commands));
    let itself = vec![page(1), vec![], bits];
    cases.push(Case::new(name("diff with itself"), itself, vec![], diff(target, target)));

    // Select every element in descending order, and the first element again.
    let picked: Vec<u32> = (0..count as u32).rev().chain((count > 0).then_some(0)).collect();
    let indices = StagingSpan { index: 0, offset: 3, len: 4 * picked.len() };
    let staging = [&bytes(17, 3)[..], &index_bytes(&picked), &bytes(18, 2)].concat();
    let to = span(1, MARGIN - offset, picked.len() * width.bytes());
    let memories = vec![page(1), bytes(19, 2 * MARGIN + to.len as usize)];
    let pick = Command::Pick { source: target, width, indices, target: to };
    cases.push(Case::new(name("pick"), memories, vec![staging], vec![pick]));
}

fn index_bytes(indices: &[u32]) -> Vec<u8> {
    indices.iter().flat_map(|index| index.to_le_bytes()).collect()
}

/// Validates lists of valid and invalid indices in one command. Some lists are longer than one thread block
/// processes.
fn validations() -> Case {
    let good: Vec<u32> = (0..40_000).rev().collect();
    let rows = [
        (good.clone(), 40_000),
        (good.clone(), 39_999),
        ([&good[..], &[17]].concat(), 40_000),
        ([&[u32::MAX, 0][..], &good].concat(), 40_000),
        (vec![], 0),
        (vec![0], 0),
        (vec![0], 1),
        (vec![1 << 20, u32::MAX >> 8], 1 << 24),
        (vec![31, 32, 31], 33),
    ];
    let mut memory = bytes(20, 4);
    let mut lists = Vec::new();
    for (indices, bound) in rows {
        lists.push(IndexList { indices: span(0, memory.len(), 4 * indices.len()), bound });
        memory.extend(index_bytes(&indices));
    }
    let target = StagingSpan { index: 0, offset: 1, len: 4 * lists.len() };
    let staging = bytes(21, target.len + 2);
    let validate = Command::Validate { lists, target };
    Case::new("validations".to_owned(), vec![memory], vec![staging], vec![validate])
}

/// Selects from bitmaps of many lengths in one command, with output space for all indices, some of them, and
/// none.
fn selections() -> Case {
    let (mut bits, mut room) = (bytes(24, 3), 4);
    let mut bitmaps = Vec::new();
    for (len, every) in [
        (0_usize, 1),
        (1, 1),
        (3, 1),
        (4, 9),
        (1023, 2),
        (1024, 30),
        (1025, 1),
        (8192, 7),
        (8193, 100),
        (50_001, 33),
    ] {
        let bitmap = (0..len).map(|byte| u8::from(byte % every == 0) << (byte % 8));
        let (at, set) = (bits.len(), len.div_ceil(every));
        bits.extend(bitmap);
        for indices in [set, set + 2, set / 2, 0] {
            bitmaps.push(Selection { bits: span(0, at, len), indices: span(1, room, 4 * indices) });
            room += 4 * indices;
        }
    }
    let target = StagingSpan { index: 0, offset: 3, len: 4 * bitmaps.len() };
    let staging = vec![bytes(25, target.len + 5)];
    let select = Command::Select { bitmaps, target };
    Case::new("selections".to_owned(), vec![bits, bytes(26, room + MARGIN)], staging, vec![select])
}

/// Compares ranges of many lengths to find the indices of differing elements.
fn long_diff() -> Case {
    let len = 600_003;
    let (left, mut right) = (bytes(22, len), bytes(22, len));
    (0..len).step_by(1000).for_each(|at| right[at] ^= 1);
    let (bits, indices) = (span(2, 1, len.div_ceil(8)), span(3, 4, 4 * 700));
    let diff =
        Command::Diff { left: span(0, 0, len), right: span(1, 0, len), width: Width::W1, target: bits };
    let target = StagingSpan { index: 0, offset: 0, len: 4 };
    let select = Command::Select { bitmaps: vec![Selection { bits, indices }], target };
    let memories = vec![left, right, bytes(23, len.div_ceil(8) + 3), bytes(27, 4 * 702)];
    Case::new("a long diff".to_owned(), memories, vec![vec![0; 4]], vec![diff, select])
}

/// Returns the same piece with its payload in staging memory, and in page memory.
fn either_payload(
    name: &str,
    page: Vec<u8>,
    target: Span,
    payload: &[u8],
    kind: PieceKind,
    cases: &mut Vec<Case>,
) {
    let shifted = [&bytes(10, 5), payload, &bytes(11, 3)].concat();
    let staged = apply(target, Payload::Staging { index: 0, offset: 5 }, kind);
    cases.push(Case::new(name.to_owned(), vec![page.clone()], vec![shifted.clone()], vec![staged]));
    let resident = apply(target, Payload::Device(span(1, 5, payload.len())), kind);
    cases.push(Case::new(format!("{name} from page memory"), vec![page, shifted], vec![], vec![resident]));
}

fn mask_of_eight(mask: u8, width: Width) -> Case {
    let len = 8 * width.bytes();
    let (payload, bytes_at) = joined(&[mask], &bytes(12, len));
    let kind = PieceKind::Masked { width, bytes_at };
    let command = apply(span(0, 1, len), Payload::Staging { index: 0, offset: 0 }, kind);
    Case::new(format!("mask {mask:08b} of {width:?}"), vec![bytes(1, len + 2)], vec![payload], vec![command])
}

/// A copy that is longer than a device copies in one step.
fn long_copy() -> Case {
    let len = 200_001;
    let copy = Command::Copy { source: span(0, 3, len), target: span(1, 5, len) };
    Case::new("a long copy".to_owned(), vec![bytes(1, len + 3), bytes(2, len + 7)], vec![], vec![copy])
}

/// Later pieces overwrite earlier pieces of the same page, whatever their kinds, within a list and from list
/// to list.
fn overlapping_pieces() -> Case {
    let piece = |offset, len, at, kind| Piece {
        target: span(0, offset, len),
        payload: Payload::Staging { index: 0, offset: at },
        kind,
    };
    let masked = PieceKind::Masked { width: Width::W2, bytes_at: 2 };
    let staging = [&bytes(13, 200)[..], &[3, 0, 0, 0, 1, 0, 0, 0], &bytes(14, 8)].concat();
    let sparse = PieceKind::Sparse { width: Width::W4, count: 2, values_at: 8 };
    let pieces = vec![
        piece(0, 100, 0, PieceKind::Dense),
        piece(50, 100, 20, PieceKind::Dense),
        piece(60, 32, 100, masked),
        piece(60, 16, 200, sparse),
        piece(70, 3, 7, PieceKind::Dense),
    ];
    Case::new(
        "overlapping pieces".to_owned(),
        vec![bytes(1, 160)],
        vec![staging],
        vec![Command::Apply { pieces }],
    )
}

/// Bytes that are gathered and then scattered back are restored, although the pages were overwritten in
/// between.
fn gather_and_scatter_back() -> Case {
    let parts = [(span(0, 0, 17), 0), (span(1, 3, 4096), 32), (span(0, 20, 0), 4128), (span(2, 1, 15), 4129)];
    let gather = Command::Gather { sources: parts.to_vec(), target: span(3, 16, 4200) };
    let wipe = parts.map(|(target, _)| Command::Fill { target, pattern: [0xEE; 16], width: Width::W1 });
    let targets = parts.map(|(target, offset)| (offset, target)).to_vec();
    let scatter = Command::Scatter { source: span(3, 16, 4200), targets };
    let commands = [vec![gather], wipe.to_vec(), vec![scatter]].concat();
    let memories = vec![bytes(1, 20), bytes(2, 4100), bytes(3, 16), bytes(4, 4300)];
    let case = Case::new("gather and scatter back".to_owned(), memories, vec![], commands);
    assert_eq!(case.outcome().memories[..3], case.memories[..3], "the round trip is no change");
    case
}

fn many_checksums() -> Case {
    let sources: Vec<Span> = LENGTHS.iter().flat_map(|len| OFFSETS.map(|at| span(0, at, *len))).collect();
    let target = StagingSpan { index: 0, offset: 4, len: 4 * sources.len() };
    let staging = vec![bytes(15, 4 * sources.len() + 8)];
    Case::new(
        "many checksums".to_owned(),
        vec![bytes(1, 5000)],
        staging,
        vec![Command::Crc { sources, target }],
    )
}

/// Computes digests for lengths just below, at and above multiples of vectors, rows and chunks, both aligned
/// to 16 bytes and not. The bytes are zeros, or have all bits set, which produces the largest sums.
fn digests() -> Case {
    const CHUNK: usize = DIGEST_CHUNK_LEN as usize;
    let lens = [0, 1, 15, 16, 17, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 40];
    let mut sources: Vec<Span> = lens.iter().flat_map(|len| OFFSETS.map(|at| span(0, at, *len))).collect();
    sources.extend([span(2, 0, CHUNK), span(3, 0, CHUNK)]);
    let count: u64 = sources.iter().map(|source| digest_count(source.len)).sum();
    let len = DIGEST_LEN * count as usize;
    let seed = bytes(16, DIGEST_SEED_LEN).try_into().unwrap();
    let key = [vec![0; 8], digest_key(&seed).unwrap()].concat();
    let key_at = span(1, 8, key.len() - 8);
    let target = StagingSpan { index: 0, offset: 8, len };
    Case::new(
        "digests".to_owned(),
        vec![bytes(1, 2 * CHUNK + 80), key, vec![0; CHUNK], vec![0xFF; CHUNK]],
        vec![bytes(17, len + 16)],
        vec![Command::Digest { sources, key: key_at, target }],
    )
}

fn both_ways_in_one_staging() -> Case {
    let (up, down) =
        (StagingSpan { index: 0, offset: 8, len: 40 }, StagingSpan { index: 0, offset: 48, len: 40 });
    let commands = vec![
        Command::Upload { source: up, target: span(0, 3, 40) },
        Command::Download { source: span(0, 0, 40), target: down },
        Command::Download { source: span(0, 1, 40), target: up },
    ];
    Case::new("both ways in one staging".to_owned(), vec![bytes(1, 50)], vec![bytes(16, 100)], commands)
}

/// Each list overwrites the result of the previous one. Staging memory of different lengths is returned in
/// order.
fn order_in_a_lane() -> Case {
    let list = |number: usize| {
        let down = StagingSpan { index: 1, offset: number, len: 20 };
        CaseList {
            lane: Lane::Drain,
            commands: vec![
                Command::Download { source: span(0, 0, 20), target: down },
                Command::Upload {
                    source: StagingSpan { index: 0, offset: 0, len: 20 },
                    target: span(0, number, 20),
                },
            ],
            staging: vec![bytes(20 + number as u64, 20), vec![0; 30], vec![number as u8; number]],
        }
    };
    Case {
        name: "order in a lane".to_owned(),
        memories: vec![bytes(1, 40)],
        lists: (0..5).map(list).collect(),
    }
}

/// Lists that read bytes that another lane has just written.
fn order_across_lanes() -> Case {
    let list = |number: usize| CaseList {
        lane: Lane::ALL[number % Lane::ALL.len()],
        commands: vec![
            Command::Download {
                source: span(0, 0, 24),
                target: StagingSpan { index: 0, offset: 0, len: 24 },
            },
            Command::Fill { target: span(0, 4 * number, 8), pattern: [number as u8; 16], width: Width::W8 },
        ],
        staging: vec![vec![0; 24]],
    };
    Case {
        name: "order across lanes".to_owned(),
        memories: vec![vec![0xFF; 32]],
        lists: (0..7).map(list).collect(),
    }
}

fn no_commands() -> Case {
    Case::new("no commands".to_owned(), vec![vec![], bytes(1, 3)], vec![vec![], bytes(2, 4)], vec![])
}

/// Returns a random case: up to eight lists of up to six commands over three pages, on all lanes.
pub fn drawn(seed: u64) -> Case {
    let mut random = Random(seed);
    let memories: Vec<Vec<u8>> = (0..3).map(|n| bytes(seed ^ n, 300 + random.below(600))).collect();
    let lists = (0..1 + random.below(8))
        .map(|_| {
            let lane = Lane::ALL[random.below(Lane::ALL.len())];
            // The first staging memory is read, and the second is written.
            let mut source = Vec::new();
            let commands = (0..1 + random.below(6)).map(|_| random.command(&memories, &mut source)).collect();
            CaseList { lane, commands, staging: vec![source, bytes(seed, 256)] }
        })
        .collect();
    Case { name: format!("seed {seed}"), memories, lists }
}

/// A SplitMix64 random number generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Returns a random range of at most 128 bytes, in whole elements of a memory.
    fn span(&mut self, memories: &[Vec<u8>], memory: usize, width: Width) -> Span {
        let len = self.below(129) / width.bytes() * width.bytes();
        span(memory, self.below(memories[memory].len() - len + 1), len)
    }

    /// Appends bytes to the staging memory that the list reads. Returns their offset.
    fn staged(&mut self, source: &mut Vec<u8>, payload: &[u8]) -> usize {
        source.extend(bytes(self.next(), self.below(5)));
        source.extend(payload);
        source.len() - payload.len()
    }

    fn target(&mut self, len: usize) -> StagingSpan {
        StagingSpan { index: 1, offset: self.below(256 - len + 1), len }
    }

    fn command(&mut self, memories: &[Vec<u8>], staging: &mut Vec<u8>) -> Command {
        let memory = self.below(memories.len());
        let other = (memory + 1 + self.below(memories.len() - 1)) % memories.len();
        let width = WIDTHS[self.below(WIDTHS.len())];
        let target = self.span(memories, memory, width);
        // Returns a range of the target's length in another memory.
        let like = |offset: usize| Span { memory: MemoryId(other as u64), offset: offset as u64, ..target };
        let room = memories[other].len() - target.len as usize + 1;
        match self.below(12) {
            0 => {
                let (payload, len) = (bytes(self.next(), target.len as usize), target.len as usize);
                let source = StagingSpan { index: 0, offset: self.staged(staging, &payload), len };
                Command::Upload { source, target }
            }
            1 => Command::Download { source: target, target: self.target(target.len as usize) },
            2 => Command::Copy { source: like(self.below(room)), target },
            3 => Command::Fill { target, pattern: bytes(self.next(), 16).try_into().unwrap(), width },
            4 => Command::Gather {
                sources: self.parts(memories, other).into_iter().collect(),
                target: span(memory, 0, 300),
            },
            5 => {
                let targets = self.parts(memories, other).into_iter().map(|(span, at)| (at, span)).collect();
                Command::Scatter { source: span(memory, 0, 300), targets }
            }
            6 => {
                let count = target.len as usize / width.bytes();
                let right = like(self.below(room));
                // The range is in the third memory.
                let third = 3 - memory - other;
                let bits_at = self.below(memories[third].len() - count.div_ceil(8) + 1);
                Command::Diff { left: target, right, width, target: span(third, bits_at, count.div_ceil(8)) }
            }
            7 => {
                let sources = vec![target, like(self.below(room))];
                Command::Crc { sources, target: self.target(8) }
            }
            8 => {
                let bound = target.len / width.bytes() as u64;
                let count = if bound == 0 { 0 } else { self.below(10) };
                let picked: Vec<u32> = (0..count).map(|_| self.below(bound as usize) as u32).collect();
                let indices = index_bytes(&picked);
                let indices =
                    StagingSpan { index: 0, offset: self.staged(staging, &indices), len: indices.len() };
                let len = count * width.bytes();
                let target_at = self.below(memories[other].len() - len + 1);
                Command::Pick { source: target, width, indices, target: span(other, target_at, len) }
            }
            9 => {
                let at = 4 * self.below(memories[memory].len() / 4);
                let len = 4 * self.below((memories[memory].len() - at) / 4 + 1);
                let bound = [1 << 16, 5][self.below(2)];
                let list = IndexList { indices: span(memory, at, len), bound };
                Command::Validate { lists: vec![list], target: self.target(4) }
            }
            10 => {
                let at = 4 * self.below(memories[other].len() / 4);
                let indices = span(other, at, 4 * self.below((memories[other].len() - at) / 4 + 1));
                let bitmaps = vec![Selection { bits: target, indices }];
                Command::Select { bitmaps, target: self.target(4) }
            }
            _ => Command::Apply {
                pieces: (0..1 + self.below(5)).map(|_| self.piece(memories, staging)).collect(),
            },
        }
    }

    /// Returns three ranges of one memory that do not overlap, each with an offset in an area of 300 bytes.
    fn parts(&mut self, memories: &[Vec<u8>], memory: usize) -> Vec<(Span, u64)> {
        let third = memories[memory].len() / 3;
        let part = |number: usize, random: &mut Self| {
            let len = random.below(100);
            let at = 100 * number + random.below(101 - len);
            (span(memory, third * number + random.below(third - len + 1), len), at as u64)
        };
        (0..3).map(|number| part(number, self)).collect()
    }

    fn piece(&mut self, memories: &[Vec<u8>], staging: &mut Vec<u8>) -> Piece {
        let memory = self.below(memories.len());
        let width = WIDTHS[self.below(WIDTHS.len())];
        let target = self.span(memories, memory, width);
        let len = target.len as usize;
        let count = len / width.bytes();
        let (payload, kind) = match self.below(3) {
            0 => (bytes(self.next(), len), PieceKind::Dense),
            1 => {
                let (payload, bytes_at) =
                    joined(&bytes(self.next(), count.div_ceil(8)), &bytes(self.next(), len));
                (payload, PieceKind::Masked { width, bytes_at })
            }
            _ => {
                let mut indices: Vec<u32> = (0..count as u32).collect();
                indices.sort_by_cached_key(|_| self.next());
                indices.truncate(self.below(count + 1));
                let values = bytes(self.next(), indices.len() * width.bytes());
                let (payload, values_at) = joined(&index_bytes(&indices), &values);
                (payload, PieceKind::Sparse { width, count: indices.len(), values_at })
            }
        };
        Piece { target, payload: Payload::Staging { index: 0, offset: self.staged(staging, &payload) }, kind }
    }
}

fn apply(target: Span, payload: Payload, kind: PieceKind) -> Command {
    Command::Apply { pieces: vec![Piece { target, payload, kind }] }
}

fn span(memory: usize, offset: usize, len: usize) -> Span {
    Span { memory: MemoryId(memory as u64), offset: offset as u64, len: len as u64 }
}

/// Concatenates two parts of a payload with a gap. Also returns the offset of the second part.
fn joined(first: &[u8], second: &[u8]) -> (Vec<u8>, usize) {
    let at = first.len().next_multiple_of(16);
    let mut payload = first.to_vec();
    payload.resize(at, 0x5A);
    payload.extend(second);
    (payload, at)
}

/// Returns pseudorandom bytes that depend only on the arguments.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0xD134_2543_DE82_EF95));
    (0..len).map(|_| random.next() as u8).collect()
}
