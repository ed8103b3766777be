//! The content of a page longer than 4 GiB after each batch. The model stores only blocks that batches
//! change. All other blocks are zeros.

use std::collections::BTreeMap;

use remanent::batch::Width;
use remanent::{PageId, WriteBatch};

use crate::kill::workload::Random;

/// The first offset that does not fit into 32 bits.
pub const FOUR_GIB: u64 = 1 << 32;
/// Length of the page in bytes, which is not a multiple of any block size.
pub const LEN: u64 = FOUR_GIB + (256 << 20) + 77;

const BLOCK: u64 = 1 << 20;
/// Length of a change in bytes.
const CHANGED: u64 = 1000;
/// Offsets of changes below and above 4 GiB. Changes at the second offset cross 4 GiB.
const SPOTS: [u64; 4] = [4096 + 17, FOUR_GIB - 600, FOUR_GIB + 12_345, LEN - 10_000];

#[derive(Clone, Default)]
pub struct Model {
    blocks: BTreeMap<u64, Vec<u8>>,
}

/// One change of the page.
enum Change {
    Write(Vec<u8>),
    Fill(Vec<u8>),
    /// Scatters every third element of four bytes.
    Scatter(Vec<u32>, Vec<u8>),
    /// Copies from this offset.
    Copy(u64),
}

/// Returns the offset of the change of batch `number`, and the change. All combinations of offset and kind
/// occur.
fn change(number: u64) -> (u64, Change) {
    let offset = SPOTS[number as usize % 4] + 4 * (number % 97);
    let mut random = Random(number);
    let change = match number / 4 % 4 {
        0 => Change::Write(random.bytes(CHANGED)),
        1 => Change::Fill(random.bytes(8)),
        2 => {
            let indices = (0..CHANGED / 12).map(|nth| u32::try_from(offset / 4 + 3 * nth).unwrap()).collect();
            Change::Scatter(indices, random.bytes(CHANGED / 12 * 4))
        }
        _ => Change::Copy(SPOTS[(number as usize + 2) % 4]),
    };
    (offset, change)
}

/// Adds the change of batch `number` to a batch.
pub fn add_change(batch: &mut WriteBatch, page: PageId, number: u64) {
    let (offset, change) = change(number);
    match change {
        Change::Write(bytes) => batch.write(page, offset, &bytes),
        Change::Fill(pattern) => batch.fill(page, offset, CHANGED, &pattern),
        Change::Scatter(indices, bytes) => batch.scatter(page, Width::W4, &indices, &bytes),
        Change::Copy(source) => batch.copy(page, source..source + CHANGED, page, offset),
    };
}

impl Model {
    /// Returns the page after these batches.
    pub fn after(batches: impl IntoIterator<Item = u64>) -> Self {
        let mut model = Self::default();
        batches.into_iter().for_each(|number| model.apply(number));
        model
    }

    pub fn apply(&mut self, number: u64) {
        let (offset, change) = change(number);
        match change {
            Change::Write(bytes) => self.write(offset, &bytes),
            Change::Fill(pattern) => self.write(offset, &pattern.repeat(CHANGED as usize / 8)),
            Change::Scatter(indices, bytes) => {
                for (index, element) in indices.iter().zip(bytes.chunks(4)) {
                    self.write(4 * u64::from(*index), element);
                }
            }
            Change::Copy(source) => {
                let mut bytes = vec![0; CHANGED as usize];
                self.read(source, &mut bytes);
                self.write(offset, &bytes);
            }
        }
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (at, byte) in (offset..).zip(bytes) {
            let block = self.blocks.entry(at / BLOCK).or_insert_with(|| vec![0; BLOCK as usize]);
            block[(at % BLOCK) as usize] = *byte;
        }
    }

    pub fn read(&self, offset: u64, out: &mut [u8]) {
        for (at, byte) in (offset..).zip(out) {
            *byte = self.blocks.get(&(at / BLOCK)).map_or(0, |block| block[(at % BLOCK) as usize]);
        }
    }

    /// Compares every block of a page.
    pub fn check_all(&self, what: &str, read: impl FnMut(u64, &mut [u8])) {
        self.check_blocks(what, 0..LEN.div_ceil(BLOCK), read);
    }

    /// Compares the changed blocks, the blocks whose offsets have the same low 32 bits, and a few others.
    pub fn check_changed(&self, what: &str, read: impl FnMut(u64, &mut [u8])) {
        let aliases = |block: &u64| [*block, block % (FOUR_GIB / BLOCK), block + FOUR_GIB / BLOCK];
        let others = [0, 1000, LEN / BLOCK];
        let blocks = self.blocks.keys().flat_map(aliases).chain(others).filter(|block| *block <= LEN / BLOCK);
        let mut blocks: Vec<u64> = blocks.collect();
        blocks.sort_unstable();
        blocks.dedup();
        self.check_blocks(what, blocks, read);
    }

    fn check_blocks(
        &self,
        what: &str,
        blocks: impl IntoIterator<Item = u64>,
        mut read: impl FnMut(u64, &mut [u8]),
    ) {
        let (zeros, mut found) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
        for block in blocks {
            let len = BLOCK.min(LEN - block * BLOCK) as usize;
            found.fill(0xee);
            read(block * BLOCK, &mut found[..len]);
            let expected = self.blocks.get(&block).unwrap_or(&zeros);
            let differs =
                (0..len).find(|at| found[*at] != expected[*at]).filter(|_| found[..len] != expected[..len]);
            assert_eq!(
                differs.map(|at| block * BLOCK + at as u64),
                None,
                "{what}: the first byte that differs"
            );
        }
    }
}
