//! Memory for the pages that an open loads: put by for all of them before any is there (I10), and then allocated
//! piece by piece, while other threads load what is there already. Allocated before, it took a third of the time that
//! pages of 16 KiB take to load.
//!
//! One thread allocates. (Where each loader allocated what it came to, a store on the host took a quarter longer to open:
//! the allocator gave each of them memory that was new, and kept what the store before had given back.)
//!
//! Nothing on disk changes here, so a crash loses nothing.

use std::sync::OnceLock;

use remanent_format::state::by_id::{ById, ROW};
use remanent_format::{PageId, PageTable, Place};

use crate::device::Span;
use crate::error::{Error, Result};
use crate::memory::arena::{Arena, PageMemory, Purpose, Reservation};

/// Bytes of a piece, at most, but for the last page's. Who wants one of its pages waits until all are allocated, and the
/// host device writes zeros to them. Its pages are of one row, too: so what holds all of them in the end takes it as it is.
const PIECE_BYTES: u64 = 4 << 20;

/// The memory of all pages of a table.
pub(super) struct PageMemories<'a> {
    reserved: Reservation<'a>,
    table: &'a PageTable,
    /// In the order of their pages.
    pieces: Vec<MemoryPiece>,
}

/// Neighbours, that are allocated together.
struct MemoryPiece {
    first: PageId,
    last: PageId,
    allocated: OnceLock<PieceResult>,
}

/// What became of a piece: all of its pages are there, or those before the one that was refused.
#[derive(Default)]
struct PieceResult {
    memory: ById<PageId, PageMemory>,
    refused: Option<Error>,
}

impl<'a> PageMemories<'a> {
    /// Puts by what all pages take.
    ///
    /// # Errors
    /// `OverBudget`; a device error.
    pub fn reserve(arena: &'a Arena, table: &'a PageTable) -> Result<Self> {
        let mut sums: Vec<(Place, u64)> = Vec::new();
        let mut pieces: Vec<MemoryPiece> = Vec::new();
        let mut bytes = 0;
        for (page, place, len) in table.lens() {
            match sums.iter_mut().find(|(of, _)| *of == place) {
                Some((_, sum)) => *sum = sum.saturating_add(len),
                None => sums.push((place, len)),
            }
            match pieces.last_mut() {
                Some(piece) if bytes < PIECE_BYTES && page.0 / ROW == piece.first.0 / ROW => {
                    piece.last = page
                }
                _ => {
                    bytes = 0;
                    pieces.push(MemoryPiece { first: page, last: page, allocated: OnceLock::new() });
                }
            }
            bytes += len;
        }
        let reserved = arena.reserve(Purpose::Page, &sums)?;
        Ok(Self { reserved, table, pieces })
    }

    /// Allocates all of it. Where a page is refused, those behind it are, too.
    pub fn allocate(&self) {
        let mut rest = PieceGuard { memories: self, refused: None };
        for piece in &self.pieces {
            let pages = self.table.lens_between(piece.first, piece.last);
            let memory = pages.map_while(|(page, place, len)| {
                let memory = self.reserved.allocate(place, len).map_err(|error| rest.refused = Some(error));
                Some((page, memory.ok()?))
            });
            let memory = memory.collect();
            let refused = rest.refused.clone();
            let _nobody_else_sets_it = piece.allocated.set(PieceResult { memory, refused });
            if rest.refused.is_some() {
                break;
            }
        }
    }

    /// The pages in up to so many parts, at least one: the first and the last one of each.
    pub fn parts(&self, count_max: usize) -> Vec<(PageId, PageId)> {
        let parts = self.pieces.chunks(self.pieces.len().div_ceil(count_max).max(1));
        parts.map(|pieces| (pieces[0].first, pieces[pieces.len() - 1].last)).collect()
    }

    /// Where a page's memory is; waits until it is there.
    ///
    /// # Errors
    /// `OutOfMemory`, `PlaceUnavailable`, a device error.
    ///
    /// # Panics
    /// If the table has no such page.
    pub fn of(&self, page: PageId) -> Result<Span> {
        let piece = self.pieces.partition_point(|piece| piece.last < page);
        let PieceResult { memory, refused } = self.pieces[piece].allocated.wait();
        match (memory.get(page), refused) {
            (Some(memory), _) => Ok(memory.span()),
            (None, Some(refused)) => Err(refused.clone()),
            (None, None) => panic!("page {page} is in no table"),
        }
    }

    /// The memory that was allocated, and why not for all pages.
    pub fn finish(self) -> (ById<PageId, PageMemory>, Result<()>) {
        let (mut all, mut refused) = (ById::default(), Ok(()));
        for PieceResult { memory, refused: why } in
            self.pieces.into_iter().filter_map(|piece| piece.allocated.into_inner())
        {
            all.absorb(memory);
            refused = refused.and(why.map_or(Ok(()), Err));
        }
        (all, refused)
    }
}

/// When this goes, nobody waits any more for a piece that will not be there.
struct PieceGuard<'m, 'a> {
    memories: &'m PageMemories<'a>,
    refused: Option<Error>,
}

impl Drop for PieceGuard<'_, '_> {
    fn drop(&mut self) {
        let refused = self.refused.take().unwrap_or(Error::Closed);
        for piece in &self.memories.pieces {
            piece
                .allocated
                .get_or_init(|| PieceResult { memory: ById::default(), refused: Some(refused.clone()) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use remanent_format::{Epoch, Lsn, PageInfo};

    use super::*;
    use crate::device::host::HostDevice;
    use crate::options::Budget;

    /// Pages of three pieces and more, some of them long, with gaps between their ids.
    fn table(place_of_500: Place) -> PageTable {
        let info = |number: u64| {
            let len = if number % 300 == 7 { PIECE_BYTES } else { number % 50 };
            let place = if number == 500 { place_of_500 } else { Place::Host };
            PageInfo::new(PageId(3 * number), len, place)
        };
        PageTable::from_parts((1..1000).map(info), Arc::default(), 1, Epoch(1), Lsn(1))
    }

    fn arena() -> Arena {
        Arena::new(Arc::new(HostDevice::new()), Budget::default())
    }

    #[test]
    fn who_wants_a_page_waits_until_its_memory_is_there() {
        let (arena, table) = (arena(), table(Place::Host));
        let memories = PageMemories::reserve(&arena, &table).unwrap();
        assert!(memories.pieces.len() > 3);
        let all: u64 = table.lens().map(|(_, _, len)| len).sum();
        assert_eq!(arena.usage(Place::Host).claimed_bytes, all, "put by before any is allocated");
        let spans: Vec<(PageId, Span)> = std::thread::scope(|scope| {
            let of = |page| (page, memories.of(page).unwrap());
            let pages = || table.lens().map(|(page, _, _)| page);
            let waiting = scope.spawn(move || pages().map(of).collect());
            memories.allocate();
            waiting.join().unwrap()
        });
        let (memory, allocated) = memories.finish();
        allocated.unwrap();
        assert!(memory.iter().map(|(page, memory)| (page, memory.span())).eq(spans));
        assert!(
            memory.iter().map(|(page, memory)| (page, memory.place(), memory.byte_len())).eq(table.lens())
        );
        let usage = arena.usage(Place::Host);
        assert_eq!((usage.allocated_bytes, usage.claimed_bytes, usage.count), (all, 0, 999));
        memory.into_items().for_each(|(_, memory)| arena.discard(memory).unwrap());
    }

    #[test]
    fn the_parts_are_all_pages_and_none_twice() {
        // Two in each row.
        let info = |number: u64| PageInfo::new(PageId(ROW / 2 * number), 1, Place::Host);
        let table = PageTable::from_parts((2..400).map(info), Arc::default(), 1, Epoch(1), Lsn(1));
        let arena = arena();
        let memories = PageMemories::reserve(&arena, &table).unwrap();
        for (count_max, expected) in [(1, 1), (2, 2), (3, 3), (1000, 199)] {
            let parts = memories.parts(count_max);
            assert_eq!(parts.len(), expected);
            let pages = parts.into_iter().flat_map(|(first, last)| table.lens_between(first, last));
            assert!(pages.eq(table.lens()), "{count_max}");
        }
    }

    #[test]
    fn what_comes_behind_a_page_that_is_refused_is_refused() {
        // No device has memory there.
        let (arena, table) = (arena(), table(Place::Disk));
        let memories = PageMemories::reserve(&arena, &table).unwrap();
        let refused =
            |page| matches!(memories.of(page), Err(Error::PlaceUnavailable { place: Place::Disk, .. }));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| refused(PageId(3 * 999)));
            memories.allocate();
            assert!(waiting.join().unwrap());
        });
        for number in 1..1000 {
            assert_eq!(refused(PageId(3 * number)), number >= 500, "{number}");
        }
        let (memory, allocated) = memories.finish();
        assert!(matches!(allocated, Err(Error::PlaceUnavailable { .. })));
        assert_eq!(memory.len(), 499);
        memory.into_items().for_each(|(_, memory)| arena.discard(memory).unwrap());
        assert_eq!(arena.usage(Place::Host).used(), 0);
    }
}
