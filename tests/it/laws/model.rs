//! The meaning of a command list, computed one byte at a time. The code is slow and short, so that it can be
//! verified by reading it.

use remanent::device::{Command, Lane, Payload, Piece, PieceKind, Selection, Span, StagingSpan};

/// Lists, and their memory. Page memory `n` of the case is `MemoryId(n)`.
#[derive(Clone, Debug)]
pub struct Case {
    /// The name of the case in messages.
    pub name: String,
    /// The initial content of the page memory.
    pub memories: Vec<Vec<u8>>,
    /// The lists, in the order in which they must appear to be executed.
    pub lists: Vec<CaseList>,
}

/// One command list of a case.
#[derive(Clone, Debug)]
pub struct CaseList {
    /// The lane to which the list is submitted.
    pub lane: Lane,
    /// The commands of the list.
    pub commands: Vec<Command>,
    /// The initial content of the list's staging memory.
    pub staging: Vec<Vec<u8>>,
}

/// The expected content after all lists were executed.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The content of the page memory.
    pub memories: Vec<Vec<u8>>,
    /// The staging memory of each list. A byte that the list read is `None`, because its value is unspecified
    /// afterwards.
    pub staging: Vec<Vec<Vec<Option<u8>>>>,
}

impl Case {
    /// Returns a case with one list, on the lane for deltas.
    pub fn new(name: String, memories: Vec<Vec<u8>>, staging: Vec<Vec<u8>>, commands: Vec<Command>) -> Self {
        Self { name, memories, lists: vec![CaseList { lane: Lane::Apply, commands, staging }] }
    }

    /// Returns the outcome of the case.
    pub fn outcome(&self) -> Outcome {
        let mut outcome = Outcome { memories: self.memories.clone(), staging: Vec::new() };
        for list in &self.lists {
            let mut run = Run {
                memories: &mut outcome.memories,
                read: list.staging.iter().map(|bytes| vec![false; bytes.len()]).collect(),
                staging: list.staging.clone(),
            };
            list.commands.iter().for_each(|command| run.command(command));
            let known = |(bytes, read): (Vec<u8>, Vec<bool>)| {
                bytes.into_iter().zip(read).map(|(byte, read)| (!read).then_some(byte)).collect()
            };
            let staging = run.staging.into_iter().zip(run.read).map(known).collect();
            outcome.staging.push(staging);
        }
        outcome
    }
}

/// The execution of one list.
struct Run<'a> {
    memories: &'a mut [Vec<u8>],
    staging: Vec<Vec<u8>>,
    read: Vec<Vec<bool>>,
}

impl Run<'_> {
    fn command(&mut self, command: &Command) {
        match command {
            Command::Upload { source, target } => {
                for at in 0..target.len {
                    let byte = self.staged(source.index, source.offset + at as usize);
                    self.set(*target, at, byte);
                }
            }
            Command::Download { source, target } => {
                for at in 0..source.len {
                    self.stage(*target, at as usize, self.get(*source, at));
                }
            }
            Command::Apply { pieces } => pieces.iter().for_each(|piece| self.apply(piece)),
            Command::Copy { source, target } => {
                for at in 0..source.len {
                    self.set(*target, at, self.get(*source, at));
                }
            }
            Command::Fill { target, pattern, width } => {
                for at in 0..target.len {
                    self.set(*target, at, pattern[at as usize % width.bytes()]);
                }
            }
            Command::Gather { sources, target } => {
                for (source, offset) in sources {
                    for at in 0..source.len {
                        self.set(*target, offset + at, self.get(*source, at));
                    }
                }
            }
            Command::Scatter { source, targets } => {
                for (offset, target) in targets {
                    for at in 0..target.len {
                        self.set(*target, at, self.get(*source, offset + at));
                    }
                }
            }
            Command::Diff { left, right, width, target } => {
                let mut bits = vec![0; target.len as usize];
                for at in 0..left.len {
                    let element = at as usize / width.bytes();
                    if self.get(*left, at) != self.get(*right, at) {
                        bits[element / 8] |= 1 << (element % 8);
                    }
                }
                bits.into_iter().zip(0..).for_each(|(byte, at)| self.set(*target, at, byte));
            }
            Command::Select { bitmaps, target } => {
                for (number, Selection { bits, indices }) in bitmaps.iter().enumerate() {
                    let is_set = |bit: &u64| self.get(*bits, bit / 8) >> (bit % 8) & 1 == 1;
                    let set: Vec<u64> = (0..8 * bits.len).filter(is_set).collect();
                    for (index, at) in set.iter().zip((0..indices.len).step_by(4)) {
                        let bytes = (*index as u32).to_le_bytes();
                        bytes.into_iter().zip(at..).for_each(|(byte, at)| self.set(*indices, at, byte));
                    }
                    let count = (set.len() as u32).to_le_bytes();
                    count.into_iter().enumerate().for_each(|(at, byte)| {
                        self.stage(*target, 4 * number + at, byte);
                    });
                }
            }
            Command::Crc { sources, target } => {
                for (number, source) in sources.iter().enumerate() {
                    let bytes: Vec<u8> = (0..source.len).map(|at| self.get(*source, at)).collect();
                    let sum = crc32fast::hash(&bytes).to_le_bytes();
                    sum.into_iter().enumerate().for_each(|(at, byte)| {
                        self.stage(*target, 4 * number + at, byte);
                    });
                }
            }
            Command::Digest { sources, key, target } => {
                let key: Vec<u8> = (0..key.len).map(|at| self.get(*key, at)).collect();
                let mut number = 0;
                for source in sources {
                    let bytes: Vec<u8> = (0..source.len).map(|at| self.get(*source, at)).collect();
                    for byte in bytes.chunks(64 << 10).flat_map(|chunk| digest(chunk, &key)) {
                        self.stage(*target, number, byte);
                        number += 1;
                    }
                }
            }
            Command::Pick { source, width, indices, target } => {
                for number in 0..indices.len / 4 {
                    let index =
                        [0, 1, 2, 3].map(|at| self.staged(indices.index, indices.offset + 4 * number + at));
                    let element = u64::from(u32::from_le_bytes(index));
                    for at in 0..width.bytes() as u64 {
                        let byte = self.get(*source, element * width.bytes() as u64 + at);
                        self.set(*target, (number * width.bytes()) as u64 + at, byte);
                    }
                }
            }
            Command::Validate { lists, target } => {
                for (number, list) in lists.iter().enumerate() {
                    let indices: Vec<u32> = (0..list.indices.len / 4)
                        .map(|index| {
                            u32::from_le_bytes([0, 1, 2, 3].map(|at| self.get(list.indices, 4 * index + at)))
                        })
                        .collect();
                    let (good, bad): (Vec<u32>, Vec<u32>) =
                        indices.into_iter().partition(|index| u64::from(*index) < list.bound);
                    let twice = good.iter().enumerate().any(|(at, index)| good[..at].contains(index));
                    let found = u32::from(!bad.is_empty()) + 2 * u32::from(twice);
                    found.to_le_bytes().into_iter().enumerate().for_each(|(at, byte)| {
                        self.stage(*target, 4 * number + at, byte);
                    });
                }
            }
        }
    }

    fn apply(&mut self, piece: &Piece) {
        let target = piece.target;
        match piece.kind {
            PieceKind::Dense => {
                for at in 0..target.len {
                    let byte = self.payload(piece.payload, at as usize);
                    self.set(target, at, byte);
                }
            }
            PieceKind::Masked { width, bytes_at } => {
                for at in 0..target.len {
                    let element = at as usize / width.bytes();
                    let bits = self.payload(piece.payload, element / 8);
                    let byte = self.payload(piece.payload, bytes_at + at as usize);
                    if bits & (1 << (element % 8)) != 0 {
                        self.set(target, at, byte);
                    }
                }
            }
            PieceKind::Sparse { width, count, values_at } => {
                for number in 0..count {
                    let index = [0, 1, 2, 3].map(|at| self.payload(piece.payload, 4 * number + at));
                    let element = u64::from(u32::from_le_bytes(index));
                    for at in 0..width.bytes() {
                        let byte = self.payload(piece.payload, values_at + number * width.bytes() + at);
                        self.set(target, element * width.bytes() as u64 + at as u64, byte);
                    }
                }
            }
        }
    }

    fn get(&self, span: Span, at: u64) -> u8 {
        assert!(at < span.len);
        self.memories[span.memory.0 as usize][(span.offset + at) as usize]
    }

    fn set(&mut self, span: Span, at: u64, byte: u8) {
        assert!(at < span.len);
        self.memories[span.memory.0 as usize][(span.offset + at) as usize] = byte;
    }

    fn payload(&mut self, payload: Payload, at: usize) -> u8 {
        match payload {
            Payload::Staging { index, offset } => self.staged(index, offset + at),
            Payload::Device(span) => self.get(span, at as u64),
        }
    }

    fn staged(&mut self, index: usize, at: usize) -> u8 {
        self.read[index][at] = true;
        self.staging[index][at]
    }

    fn stage(&mut self, span: StagingSpan, at: usize, byte: u8) {
        assert!(at < span.len);
        self.staging[span.index][span.offset + at] = byte;
    }
}

/// Computes the digest of a chunk as defined, column by column and without intermediate reduction.
fn digest(chunk: &[u8], key: &[u8]) -> Vec<u8> {
    let prime = (1_u128 << 61) - 1;
    let word = |bytes: &[u8], at: usize| -> u128 {
        let byte = |index| bytes.get(at + index).copied().unwrap_or(0);
        u128::from(u64::from_le_bytes(std::array::from_fn(byte)))
    };
    let pass = |pass: usize| {
        let point = word(key, 8 * (34 + 257 * pass));
        let (mut value, mut power) = (chunk.len() as u128, 1);
        for column in 0..256 {
            let mut sum = 0_u128;
            for row in 0..16 {
                let at = 16 * (256 * row + column);
                if at < chunk.len() {
                    let factor = |half: usize| {
                        let key = word(key, 8 * (2 * (row + pass) + half));
                        (word(chunk, at + 8 * half) + key) % (1 << 64)
                    };
                    sum = sum.wrapping_add(factor(0) * factor(1));
                }
            }
            for limb in [sum % (1 << 60), (sum >> 60) % (1 << 60), sum >> 120] {
                power = power * point % prime;
                value = (value + limb * power) % prime;
            }
        }
        (value as u64).to_le_bytes()
    };
    [pass(0), pass(1)].concat()
}
