use std::cell::Cell;

use proptest::prelude::*;
use remanent_format::image::Codec;
use remanent_format::op::Op;
use remanent_format::state::apply::apply;
use remanent_format::{Defect, FileName, Folder, PageId, Width};

use super::*;
use crate::testing::sim_disk::SimDisk;

const PAGE: PageId = PageId(1);
/// The length of a page of several blocks, the last of which is partial.
const LEN: usize = 3 * 4096 + 100;

/// A change to a page, whose bytes are derived from `seed`.
#[derive(Clone, Debug)]
enum Change {
    Write {
        at: usize,
        len: usize,
        seed: u8,
    },
    Masked {
        at: usize,
        count: usize,
        mask: u64,
        seed: u8,
    },
    Scatter {
        indices: Vec<u32>,
        seed: u8,
    },
    Fill {
        at: usize,
        count: usize,
        seed: u8,
    },
    Resize {
        len: usize,
    },
    /// Clones the page, to make an image of the clone later.
    Gather,
    /// Completes the image of the oldest clone.
    Rebase,
}

fn change() -> impl Strategy<Value = Change> {
    let (at, seed) = (0..LEN, any::<u8>());
    prop_oneof![
        6 => (at.clone(), prop_oneof![4 => 0..200usize, 1 => 3000..9000usize], seed)
            .prop_map(|(at, len, seed)| Change::Write { at, len, seed }),
        2 => (at.clone(), 1..60usize, any::<u64>(), seed)
            .prop_map(|(at, count, mask, seed)| Change::Masked { at, count, mask, seed }),
        2 => (prop::collection::btree_set(0..(LEN / 4) as u32, 0..40), seed)
            .prop_map(|(indices, seed)| Change::Scatter { indices: indices.into_iter().collect(), seed }),
        1 => (at, 0..3000usize, seed).prop_map(|(at, count, seed)| Change::Fill { at, count, seed }),
        1 => (0..2 * LEN).prop_map(|len| Change::Resize { len }),
        2 => Just(Change::Gather),
        2 => Just(Change::Rebase),
    ]
}

fn drawn(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| seed ^ (at as u8).wrapping_mul(31) ^ (at >> 8) as u8).collect()
}

/// Image files on a simulated disk, each of which contains the bytes of one page.
struct Images {
    disk: Arc<SimDisk>,
    pages: DiskPages,
    next: u64,
}

impl Images {
    fn new() -> Self {
        let disk = Arc::new(SimDisk::new());
        disk.make_folder(Folder::Pages).unwrap();
        Self { pages: DiskPages::new(disk.clone(), u64::MAX), disk, next: 1 }
    }

    fn write(&mut self, bytes: &[u8]) -> Option<Arc<DiskImage>> {
        if bytes.is_empty() {
            return None;
        }
        let file = self.next;
        self.next += 1;
        let crc = crc32fast::hash(bytes);
        let (stored_len, codec) = (bytes.len() as u64, Codec::Raw);
        let image = ImageRef { file, offset: 4096, stored_len, stored_crc: crc, raw_crc: crc, codec };
        self.disk.create(FileName::Pages(file)).and_then(|file| file.write_at(4096, bytes)).unwrap();
        Some(self.pages.image(image, stored_len))
    }

    /// Creates the image that a snapshot would create from a clone: an overlay if little changed, otherwise a whole
    /// image.
    fn gather(&mut self, copy: &DiskPage, bytes: &[u8]) -> Option<Arc<DiskImage>> {
        let Some(mut new) = copy.overlay().unwrap() else { return self.write(bytes) };
        let len = new.payload().len;
        let mut payload = vec![7; len as usize];
        // The payload is read in parts that end at arbitrary positions.
        for at in (0..len).step_by(77) {
            new.read(at, &mut payload[at as usize..len.min(at + 77) as usize]).unwrap();
        }
        let stored = *self.write(&payload).unwrap().image();
        let image = new.image(&stored);
        assert_eq!(image.raw_crc, crc32fast::hash(bytes));
        let before = copy.image().map(AsRef::as_ref);
        Some(self.pages.image_after(image, copy.byte_len(), before))
    }
}

fn read_all(page: &DiskPage) -> Vec<u8> {
    let mut bytes = vec![7; page.byte_len() as usize];
    page.read(0, &mut bytes).unwrap();
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// A page on disk equals the result of the simplest implementation of its operations, and clones never change.
    /// Images that arrive late, out of order or never only affect the memory in use.
    #[test]
    fn page_equals_replayed_operations(
        changes in prop::collection::vec(change(), 1..40),
        ranges in prop::collection::vec((0..2 * LEN, 0..6000usize), 4),
        newest_first in any::<bool>(),
    ) {
        let mut images = Images::new();
        let mut plain = drawn(1, LEN);
        let base = images.write(&plain);
        let mut page = images.pages.page(base);
        let mut copies: Vec<(DiskPage, Vec<u8>)> = Vec::new();
        for change in changes {
            let len = plain.len();
            let fit = |at: usize, wanted: usize, width: usize| {
                let at = at.min(len);
                (at, wanted.min((len - at) / width))
            };
            match change {
                Change::Write { at, len, seed } => {
                    let (at, len) = fit(at, len, 1);
                    let op = Op::Write { page: PAGE, offset: at as u64, bytes: &drawn(seed, len) };
                    page.apply(&op);
                    apply(&op, &mut plain);
                }
                Change::Masked { at, count, mask, seed } => {
                    let (at, count) = fit(at, count, 2);
                    let mask = (mask & ((1 << count) - 1)).to_le_bytes();
                    let bytes = drawn(seed, 2 * count);
                    let (mask, width) = (&mask[..count.div_ceil(8)], Width::W2);
                    let op = Op::Masked { page: PAGE, offset: at as u64, width, mask, bytes: &bytes };
                    page.apply(&op);
                    apply(&op, &mut plain);
                }
                Change::Scatter { indices, seed } => {
                    for index in indices.into_iter().filter(|index| 4 * *index as usize + 4 <= len) {
                        // The elements are expected as separate writes, because the format crate tests the operation
                        // itself.
                        let bytes = drawn(seed, 4);
                        let op = Op::Write { page: PAGE, offset: 4 * u64::from(index), bytes: &bytes };
                        page.apply(&op);
                        apply(&op, &mut plain);
                    }
                }
                Change::Fill { at, count, seed } => {
                    let (at, count) = fit(at, count, 4);
                    let pattern = drawn(seed, 4);
                    let op = Op::Fill { page: PAGE, offset: at as u64, len: 4 * count as u64, pattern: &pattern };
                    page.apply(&op);
                    apply(&op, &mut plain);
                }
                Change::Resize { len } => {
                    let op = Op::Resize { page: PAGE, len: len as u64 };
                    page.apply(&op);
                    apply(&op, &mut plain);
                }
                Change::Gather => copies.push((page.clone(), plain.clone())),
                Change::Rebase if copies.is_empty() => {}
                Change::Rebase => {
                    let at = if newest_first { copies.len() - 1 } else { 0 };
                    let (copy, was) = copies.remove(at);
                    prop_assert_eq!(&read_all(&copy), &was);
                    let image = images.gather(&copy, &was);
                    page.rebase(&copy, image);
                }
            }
            prop_assert_eq!(read_all(&page), &plain[..]);
            for (from, len) in &ranges {
                let from = (*from).min(plain.len());
                let to = plain.len().min(from + len);
                let mut bytes = vec![7; to - from];
                let range = from as u64..to as u64;
                page.part(&range).read(range.start, &mut bytes).unwrap();
                prop_assert_eq!(&bytes, &plain[from..to]);
            }
        }
        // With an image of the newest clone, no bytes are pending.
        let copy = page.clone();
        let image = images.gather(&copy, &plain);
        page.rebase(&copy, image);
        drop((copy, copies));
        prop_assert_eq!(read_all(&page), plain);
        prop_assert_eq!(images.pages.pending_bytes(), 0);
    }
}

/// Memory is proportional to the blocks in use, and a file remains in use while a page is read from it.
#[test]
fn memory_and_files_are_counted() {
    let mut images = Images::new();
    let base = images.write(&drawn(3, LEN));
    let mut page = images.pages.page(base);
    let copy = page.clone();
    assert_eq!((images.pages.pending_bytes(), images.pages.uses_file(1)), (0, true));
    let write = |page: &mut DiskPage, offset| page.apply(&Op::Write { page: PAGE, offset, bytes: &[1; 10] });
    write(&mut page, 4090);
    let two_blocks = images.pages.pending_bytes();
    let block = page::BLOCK_LEN as u64;
    assert!(two_blocks > 2 * block && two_blocks < 3 * block, "{two_blocks}");
    assert!(pending_bytes_of(&Op::Write { page: PAGE, offset: 4090, bytes: &[1; 10] }) >= two_blocks);
    let captured = page.part(&(4080..4090));
    write(&mut page, 4090);
    assert_eq!(images.pages.pending_bytes(), two_blocks + two_blocks / 2, "one block is the reader's");
    drop(captured);
    assert_eq!(images.pages.pending_bytes(), two_blocks);
    page = images.pages.zeros(3);
    assert_eq!((images.pages.pending_bytes(), images.pages.uses_file(1)), (0, true));
    drop(copy);
    assert!(!images.pages.uses_file(1));
    assert_eq!(read_all(&page), [0; 3]);
}

/// Blocks that one write filled share memory. It is freed although later writes leave some of the blocks, and a clone
/// does not change.
#[test]
fn blocks_of_long_writes_do_not_keep_each_others_memory() {
    let (blocks, block) = (300, page::BLOCK_LEN);
    let images = Images::new();
    let mut page = images.pages.zeros((blocks * block) as u64);
    let mut plain = vec![0; blocks * block];
    let mut write = |page: &mut DiskPage, first: usize, count: usize, seed: u8| {
        let (offset, bytes) = (first * block, drawn(seed, count * block));
        plain[offset..offset + bytes.len()].copy_from_slice(&bytes);
        let op = Op::Write { page: PAGE, offset: offset as u64, bytes: &bytes };
        let needed = pending_bytes_of(&op);
        let before = images.pages.pending_bytes();
        page.apply(&op);
        assert!(images.pages.pending_bytes() <= before + needed, "no more than was claimed");
        assert_eq!(read_all(page), plain);
        images.pages.pending_bytes()
    };
    let whole = write(&mut page, 0, blocks, 1);
    assert!((whole as usize) < blocks * (block + 100), "{whole}");
    let clone = page.clone();
    let was = read_all(&clone);
    // Each write leaves one block of the one before.
    for first in 1..200 {
        write(&mut page, first, blocks - first, first as u8);
    }
    assert_eq!(read_all(&clone), was);
    drop(clone);
    // Short writes leave every tenth block.
    for number in (0..blocks).filter(|number| number % 10 > 0) {
        let pending = write(&mut page, number, 1, 9);
        assert!(pending as usize <= 3 * blocks * (block + 100), "{pending} after block {number}");
    }
    // A cut leaves one block of a run.
    let op = Op::Write { page: PAGE, offset: 0, bytes: &vec![1; 100 * block] };
    page.apply(&op);
    page.apply(&Op::Resize { page: PAGE, len: block as u64 });
    assert_eq!(read_all(&page), vec![1; block]);
    assert!(images.pages.pending_bytes() < 2 * block as u64);
    drop(page);
    assert_eq!(images.pages.pending_bytes(), 0);
}

/// A committer waits while a snapshot that can free host memory is coming. Without such a snapshot, the claim fails.
#[test]
fn room_is_awaited_only_if_it_can_free_up() {
    let disk: Arc<SimDisk> = Arc::new(SimDisk::new());
    let pages = DiskPages::new(disk, 20 << 10);
    let mut page = pages.zeros(1 << 20);
    page.apply(&Op::Write { page: PAGE, offset: 0, bytes: &[1; 3 * 4096] });
    assert!(pages.is_snapshot_due());
    pages.wait_for_room(4 << 10, || panic!("there is room")).unwrap();
    let over = |requested: u64, is_coming: bool| {
        let refused = pages.wait_for_room(requested, || Ok(is_coming)).unwrap_err();
        assert!(
            matches!(refused, Error::OverBudget { place: Place::Disk, requested: found, .. } if found == requested)
        );
    };
    over(8 << 10, false);
    over(21 << 10, true);
    let failed = pages.wait_for_room(8 << 10, || Err(Error::Closed)).unwrap_err();
    assert!(matches!(failed, Error::Closed));
    // A waiting committer makes a snapshot due, however few bytes are pending.
    let short = DiskPages::new(Arc::new(SimDisk::new()), 64 << 10);
    let mut little = short.zeros(1 << 20);
    little.apply(&Op::Write { page: PAGE, offset: 0, bytes: &[1] });
    assert!(!short.is_snapshot_due());
    let refused = short.wait_for_room((64 << 10) - 1, || Ok(!short.is_snapshot_due()));
    assert!(refused.is_err() && !short.is_snapshot_due(), "it was due, and nobody waits any more");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pages.wait_for_room(8 << 10, || Ok(true)));
        page = pages.zeros(1);
        waiting.join().unwrap().unwrap();
    });
}

/// If no snapshot can be taken because a page cannot be read, the committer gets that error.
#[test]
fn impossible_snapshot_is_not_awaited() {
    let pages = DiskPages::new(Arc::new(SimDisk::new()), 8 << 10);
    let damage = Defect::Missing.at(FileName::Pages(1), 4096);
    pages.note_unreadable(Some(&Error::from(damage)));
    drop(pages.wait_for_room(4 << 10, || panic!("there is room")).unwrap());
    let _held = pages.wait_for_room(8 << 10, || Ok(true)).unwrap();
    // Limits the duration of a wait.
    let is_coming = || {
        let left = Cell::new(100);
        move || Ok(left.replace(left.get() - 1) > 0)
    };
    let refused = pages.wait_for_room(1, is_coming()).unwrap_err();
    assert!(matches!(refused, Error::Damaged(_)), "{refused}");
    pages.note_unreadable(None);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pages.wait_for_room(1, is_coming()).unwrap_err());
        while pages.waiting.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        pages.note_unreadable(Some(&Error::from(Defect::Missing.at(FileName::Pages(1), 4096))));
        let refused = waiting.join().unwrap();
        assert!(matches!(refused, Error::Damaged(_)), "one that waits already: {refused}");
    });
}

/// Batches are logged much faster than they are applied, so claims that wait for the applier count as well.
#[test]
fn claim_counts_until_released() {
    let pages = DiskPages::new(Arc::new(SimDisk::new()), 16 << 10);
    let is_refused = |needed| match pages.wait_for_room(needed, || Ok(false)) {
        Err(Error::OverBudget { requested, available, .. }) => (requested == needed).then_some(available),
        other => panic!("{other:?}"),
    };
    let claims: Vec<_> = (0..4).map(|_| pages.wait_for_room(4 << 10, || Ok(false)).unwrap()).collect();
    assert_eq!(is_refused(1), Some(0));
    drop(claims);
    let claim = pages.wait_for_room(12 << 10, || Ok(false)).unwrap();
    assert_eq!(is_refused(8 << 10), Some(4 << 10));
    // This caller cannot wait.
    let more = pages.claim(32 << 10);
    assert_eq!(is_refused(1), Some(0));
    drop((claim, more));
    drop(pages.wait_for_room(16 << 10, || Ok(false)).unwrap());
}

/// A page of which little changed repeatedly gets an overlay. Any other page gets none.
#[test]
fn overlay_contains_changes_since_full_image() {
    let mut images = Images::new();
    let mut plain = drawn(1, LEN);
    let base = images.write(&plain);
    let mut page = images.pages.page(base);
    let write = |page: &mut DiskPage, plain: &mut Vec<u8>, at: usize, len: usize| {
        let bytes = drawn(at as u8, len);
        plain[at..at + len].copy_from_slice(&bytes);
        page.apply(&Op::Write { page: PAGE, offset: at as u64, bytes: &bytes });
    };
    assert!(page.overlay().unwrap().is_none(), "nothing changed");
    for (at, len, stored) in [
        (5, 100, 64 + 16 + 100),
        // This write is close enough to be merged with the previous piece.
        (160, 10, 64 + 16 + 165),
        // This write is in another block and crosses a block boundary.
        (8100, 200, 64 + 2 * 16 + 165 + 200),
        // This write overlaps an earlier change.
        (8150, 50, 64 + 2 * 16 + 165 + 200),
        (0, 5, 64 + 2 * 16 + 170 + 200),
    ] {
        write(&mut page, &mut plain, at, len);
        let copy = page.clone();
        assert_eq!(copy.overlay().unwrap().map(|new| new.payload().len), Some(stored), "{at}");
        let image = images.gather(&copy, &plain);
        assert!(image.as_ref().is_some_and(|image| !image.image().is_whole()));
        page.rebase(&copy, image);
        // The page can be written to another file unchanged.
        assert_eq!(page.overlay().unwrap().map(|new| new.payload().len), Some(stored), "{at}");
        assert!(read_all(&page) == plain, "{at}");
        assert!(images.pages.uses_file(1), "the base");
    }
    write(&mut page, &mut plain, 3000, LEN / 8 - 400);
    assert!(page.overlay().unwrap().is_none(), "too much, with what was before");
    let copy = page.clone();
    let image = images.gather(&copy, &plain);
    page.rebase(&copy, image);
    drop(copy);
    assert!(!images.pages.uses_file(1) && read_all(&page) == plain, "a whole image needs no base");
    write(&mut page, &mut plain, 1, 1);
    page.apply(&Op::Resize { page: PAGE, len: LEN as u64 + 1 });
    assert!(page.overlay().unwrap().is_none(), "the page has another length than its image");
}
