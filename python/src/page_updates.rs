//! What makes a page hold other bytes: the elements that differ, or all of it where they are many.

use remanent::{Epoch, Error, PageChanges, PageId, PageInfo, Place, Store, Width};

/// A page of which changes take more than this part is written whole.
const LOGGED_PART: u64 = 4;
/// Bytes that updates of a batch log together unless told otherwise: well below what may wait for a snapshot.
pub const LOGGED_MAX: u64 = 48 << 20;
/// Bytes of a page that are compared at once.
const COMPARED_LEN: usize = 4 << 20;
/// Bytes that are looked at first, at the start and in the middle of a page: one of which more than a part
/// changed in both has mostly changed as a whole, and the rest of it need not be read.
const PROBED_LEN: usize = 64 << 10;
/// The shortest page of which so little is looked at first that it pays.
const PROBES_LEN_MIN: usize = 4 * PROBED_LEN;
/// Bytes of a page on disk that wait together, and what they take with the marks of what was written.
const BLOCK_LEN: usize = 4 << 10;
const BLOCK_BYTES: u64 = 4608;

/// The changes that make a page hold `data`, and what they take; `None` if that is more than `left` bytes, or
/// the page is to be written whole. With the epoch of the page that was compared.
pub fn changes(
    store: &Store,
    page: PageId,
    data: &[u8],
    width: Width,
    left: u64,
) -> remanent::Result<(Epoch, Option<(PageChanges, u64)>)> {
    let info = store.page(page)?;
    if info.len != data.len() as u64 {
        return Ok((info.epoch, None));
    }
    let mut before = vec![0; COMPARED_LEN.min(data.len())];
    if left == 0 {
        // All or nothing: which elements differ is of no use. A page that changed mostly differs soon.
        let (mut at, mut len) = (0, PROBED_LEN);
        while at < data.len() {
            let after = &data[at..data.len().min(at + len)];
            store.read(page, at as u64, &mut before[..after.len()])?;
            if before[..after.len()] != *after {
                return Ok((info.epoch, None));
            }
            (at, len) = (at + after.len(), COMPARED_LEN);
        }
        return Ok((info.epoch, Some((PageChanges::new(width), 0))));
    }
    if data.len() >= PROBES_LEN_MIN {
        let mut mostly_changed = |at: usize| {
            let (before, after) = (&mut before[..PROBED_LEN], &data[at..at + PROBED_LEN]);
            store.read(page, at as u64, before)?;
            let elements = before.chunks(width.bytes()).zip(after.chunks(width.bytes()));
            let changed = elements.filter(|(before, after)| before != after).count() * width.bytes();
            Ok::<_, Error>(changed as u64 > PROBED_LEN as u64 / LOGGED_PART)
        };
        let middle = data.len() / 2 / BLOCK_LEN * BLOCK_LEN;
        if mostly_changed(0)? && mostly_changed(middle)? {
            return Ok((info.epoch, None));
        }
    }
    let (mut changes, mut blocks) = (PageChanges::new(width), 0);
    for (index, after) in data.chunks(COMPARED_LEN).enumerate() {
        let (at, before) = ((index * COMPARED_LEN) as u64, &mut before[..after.len()]);
        store.read(page, at, before)?;
        changes.compare(at, before, after);
        let of_piece = before.chunks(BLOCK_LEN).zip(after.chunks(BLOCK_LEN));
        blocks += of_piece.filter(|(before, after)| before != after).count() as u64;
        let is_much = changes.cost() > data.len() as u64 / LOGGED_PART;
        if is_much || taken(&info, &mut changes, blocks) > left {
            return Ok((info.epoch, None));
        }
    }
    let taken = taken(&info, &mut changes, blocks);
    Ok((info.epoch, Some((changes, taken))))
}

/// What changes take until the next snapshot. Of a page on disk, as a commit claims it: two blocks for each
/// element, if the page has as many, and those of ranges.
fn taken(info: &PageInfo, changes: &mut PageChanges, blocks: u64) -> u64 {
    if info.place != Place::Disk {
        return changes.cost();
    }
    let all_blocks = info.len / BLOCK_LEN as u64 + 2;
    BLOCK_BYTES * (2 * changes.count()).min(all_blocks).max(2 * blocks)
}
