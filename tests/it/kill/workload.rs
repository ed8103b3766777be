//! A workload that is a function of the Lsn. Batch `n` depends only on `n` and the existing pages, so the
//! state after any Lsn can be computed. Some batches are restores, and only their writer knows their targets.

use std::collections::BTreeMap;

use remanent::batch::Width;
use remanent::{DeviceChoice, Key, Lsn, Metadata, PageId, Place, Value, WriteBatch};

/// The existing pages with their lengths, which determine the next batch.
pub type Shape = BTreeMap<PageId, u64>;

/// Minimum number of pages. Between this number and the maximum, a batch may create or delete pages.
const PAGES_MIN: usize = 16;
const PAGES_MAX: usize = 24;
/// Length of a page whose frame does not fit into a segment of 64 KiB.
const LONG_LEN: u64 = 80 << 10;
/// Length of a page that a batch writes to an image file if segments have 64 KiB.
const BULK_LEN: u64 = 16 << 10;
/// Number of batches from one restore to the next. Pages of [`LONG_LEN`], and of [`BULK_LEN`] or longer, have
/// similar intervals.
const RESTORE_EVERY: u64 = 61;
const LONG_EVERY: u64 = 211;
const BULK_EVERY: u64 = 29;

/// Steele, Lea and Flood's SplitMix64 generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn bytes(&mut self, len: u64) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes());
        words.take(len as usize).collect()
    }
}

/// One change of a batch. Every length is a multiple of 8.
pub enum Change {
    Create {
        key: Key,
        content: Vec<u8>,
    },
    Clone {
        source: PageId,
    },
    /// Replaces all bytes of a page. The number of bytes is the new length.
    Replace {
        page: PageId,
        content: Vec<u8>,
    },
    Write {
        page: PageId,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// A masked write of elements of 4 bytes.
    WriteMasked {
        page: PageId,
        offset: u64,
        mask: Vec<u8>,
        bytes: Vec<u8>,
    },
    /// A scatter of elements of 8 bytes.
    Scatter {
        page: PageId,
        indices: Vec<u32>,
        values: Vec<u8>,
    },
    Fill {
        page: PageId,
        offset: u64,
        len: u64,
        pattern: [u8; 8],
    },
    Resize {
        page: PageId,
        len: u64,
    },
    Move {
        page: PageId,
        place: Place,
    },
    SetMetadata {
        page: PageId,
        value: u64,
    },
    Delete {
        page: PageId,
    },
}

/// Returns true if batch `n` is a restore, which is the only operation of its batch.
pub fn is_restore(n: Lsn) -> bool {
    n.0.is_multiple_of(RESTORE_EVERY)
}

/// Returns the number of the batch after `n`. With tiers, restores and pages that are longer than a tier are
/// skipped.
pub fn next(n: Lsn, is_tiered: bool) -> Lsn {
    let mut next = n.next();
    while is_tiered && (is_restore(next) || next.0.is_multiple_of(LONG_EVERY)) {
        next = next.next();
    }
    next
}

/// Returns the target of the restore `n`, unless its writer selected another target.
pub fn restore_target(n: Lsn) -> Lsn {
    Lsn(n.0 - 2)
}

/// Returns the device of the pages: the host, unless `REMANENT_KILL_DEVICE` names a GPU.
pub fn device() -> DeviceChoice {
    match std::env::var("REMANENT_KILL_DEVICE") {
        Ok(device) => device.parse().unwrap(),
        Err(_) => DeviceChoice::Host,
    }
}

/// Returns the place of the pages on that device.
pub fn place() -> Place {
    if matches!(device(), DeviceChoice::Cuda(_)) { Place::Device(0) } else { Place::Host }
}

/// Returns the changes of batch `n`, which is not a restore.
pub fn changes(n: Lsn, shape: &Shape) -> Vec<Change> {
    let mut random = Random(n.0);
    let mut changes = Vec::new();
    // Each page is changed at most once per batch, so the result does not depend on the order of the changes.
    let mut left: Vec<PageId> = shape.keys().copied().collect();
    for index in 0..1 + random.below(3) {
        let is_long = n.0.is_multiple_of(LONG_EVERY);
        let grow = shape.len() < PAGES_MIN || is_long;
        if left.is_empty() || (grow && index == 0) {
            let len = if is_long { LONG_LEN } else { 64 + 8 * random.below(1000) };
            let key = Key::new(format!("{n}.{index}")).unwrap();
            changes.push(Change::Create { key, content: random.bytes(len) });
            continue;
        }
        let page = left.swap_remove(random.below(left.len() as u64) as usize);
        if shape.len() > PAGES_MAX && index == 0 {
            changes.push(Change::Delete { page });
            continue;
        }
        if n.0.is_multiple_of(BULK_EVERY) && index == 0 {
            let len = BULK_LEN + 8 * random.below(1000);
            let content = random.bytes(len);
            changes.push(Change::Replace { page, content });
            continue;
        }
        let page_len = shape[&page];
        let len = (8 + 8 * random.below(64)).min(page_len);
        let offset = 8 * random.below((page_len - len) / 8 + 1);
        changes.push(match random.below(18) {
            0..=5 => Change::Write { page, offset, bytes: random.bytes(len) },
            6..=8 => {
                let mask = random.bytes((len / 4).div_ceil(8));
                Change::WriteMasked { page, offset, mask, bytes: random.bytes(len) }
            }
            9..=11 => {
                let step = 1 + random.below(3) as usize;
                let indices: Vec<u32> =
                    ((offset / 8) as u32..((offset + len) / 8) as u32).step_by(step).collect();
                let values = random.bytes(8 * indices.len() as u64);
                Change::Scatter { page, indices, values }
            }
            12 | 13 => Change::Fill { page, offset, len, pattern: random.next().to_le_bytes() },
            14 => Change::Resize { page, len: 64 + 8 * random.below(1000) },
            15 | 16 => Change::Move { page, place: [Place::Disk, place()][random.below(2) as usize] },
            _ => Change::Clone { source: page },
        });
        if random.below(4) == 0 {
            changes.push(Change::SetMetadata { page, value: n.0 });
        }
    }
    changes
}

/// Adds the changes of batch `n` to a batch.
pub fn fill(batch: &mut WriteBatch, n: Lsn, changes: &[Change]) {
    for change in changes {
        match change {
            Change::Create { key, content } => {
                let len = content.len() as u64;
                let page = batch.create(len, place()).key(key.clone()).metadata(born(n)).page();
                // A long page is written in two pieces, so that the batch writes no image of it.
                let (front, back) = content.split_at(content.len().min(LONG_LEN as usize / 2));
                batch.write(page, 0, front);
                if !back.is_empty() {
                    batch.write(page, front.len() as u64, back);
                }
            }
            Change::Replace { page, content } => {
                batch.resize(*page, content.len() as u64).write(*page, 0, content);
            }
            Change::Clone { source } => {
                batch.clone_page(*source);
            }
            Change::Write { page, offset, bytes } => {
                batch.write(*page, *offset, bytes);
            }
            Change::WriteMasked { page, offset, mask, bytes } => {
                batch.write_masked(*page, *offset, Width::W4, mask, bytes);
            }
            Change::Scatter { page, indices, values } => {
                batch.scatter(*page, Width::W8, indices, values);
            }
            Change::Fill { page, offset, len, pattern } => {
                batch.fill(*page, *offset, *len, pattern);
            }
            Change::Resize { page, len } => {
                batch.resize(*page, *len);
            }
            Change::Move { page, place } => {
                batch.move_to(*page, *place);
            }
            Change::SetMetadata { page, value } => {
                batch.set_metadata(*page, "touched", *value);
            }
            Change::Delete { page } => {
                batch.delete(*page);
            }
        }
    }
    batch.set_root("batch", n.0);
    if n.0.is_multiple_of(16) {
        batch.note(format!("batch {n}"));
    }
}

/// Applies these changes to the shape. `new` contains the pages that their creates and clones made.
pub fn reshape(shape: &mut Shape, changes: &[Change], new: &[PageId]) {
    let mut new = new.iter().copied();
    for change in changes {
        match change {
            Change::Create { content, .. } => {
                shape.insert(new.next().unwrap(), content.len() as u64);
            }
            Change::Clone { source } => {
                shape.insert(new.next().unwrap(), shape[source]);
            }
            Change::Replace { page, content } => {
                shape.insert(*page, content.len() as u64);
            }
            Change::Resize { page, len } => {
                shape.insert(*page, *len);
            }
            Change::Delete { page } => {
                shape.remove(page);
            }
            _ => {}
        }
    }
    assert_eq!(new.next(), None);
}

/// Returns the metadata of a page that batch `n` creates.
pub fn born(n: Lsn) -> Metadata {
    Metadata::from([("born".to_owned(), Value::U64(n.0))])
}
