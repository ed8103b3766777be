//! Memory for the pages that an open loads. The budget for all pages is claimed before any memory is allocated (I10).
//! The memory is then allocated piece by piece while other threads load into completed pieces. When all memory was
//! allocated before loading, allocation took a third of the time to load pages of 16 KiB.
//!
//! A single thread allocates. With several threads, the C library's allocator used a separate heap per thread instead
//! of the memory that the previous store had freed, and opening took a quarter longer.

use std::sync::OnceLock;

use remanent_format::state::id_map::{IdMap, ROW};
use remanent_format::{PageId, PageTable, Place};

use super::lent_pages::LentPages;
use crate::base::allocation::push;
use crate::device::Span;
use crate::error::{Error, Result};
use crate::memory::arena::{Arena, PageMemory, Purpose, Reservation};

/// The maximum number of bytes in a piece, not counting its last page. A thread that needs a page waits until the whole
/// piece is allocated and, on the host device, filled with zeros. Pieces end at row boundaries of the page table, so
/// that the final table can take over whole rows.
const PIECE_BYTES: u64 = 4 << 20;

/// The memory of all pages of a table during an open, while one thread allocates it and other threads load pages into
/// it.
pub(super) struct PageMemories<'a> {
    /// The claim on the budget from which page memory is allocated.
    reserved: Reservation<'a>,
    table: &'a PageTable,
    /// The caller-owned memory, for the pages that have such memory.
    lent: LentPages<'a>,
    /// The units of allocation, in page order.
    pieces: Vec<MemoryPiece>,
}

/// A unit of allocation: consecutive pages of the table whose memory is allocated together.
struct MemoryPiece {
    first: PageId,
    last: PageId,
    allocated: OnceLock<PieceResult>,
}

/// The result of allocating a piece: the memory of all its pages, or of the pages before the first failure.
#[derive(Default)]
struct PieceResult {
    memory: IdMap<PageId, PageMemory>,
    refused: Option<Error>,
}

impl<'a> PageMemories<'a> {
    /// Claims the memory of all pages, as one sum per place (I10).
    ///
    /// If memory were claimed page by page, a table over the budget would be detected only after most of it is loaded.
    ///
    /// # Errors
    /// `OverBudget` if the pages exceed the budget, or a device error.
    pub fn reserve(arena: &'a Arena, table: &'a PageTable, lent: LentPages<'a>) -> Result<Self> {
        let mut sums: Vec<(Place, u64)> = Vec::new();
        let mut pieces: Vec<MemoryPiece> = Vec::new();
        let mut bytes = 0;
        for (page, place, len) in table.lens() {
            // Caller-owned memory does not count toward the budget, and a page on disk has no memory. The pieces still
            // contain all pages, because other steps divide the table into the same pieces.
            let own_len = if lent.has(page) || place == Place::Disk { 0 } else { len };
            match sums.iter_mut().find(|(of, _)| *of == place) {
                Some((_, sum)) => *sum = sum.saturating_add(own_len),
                None if place == Place::Disk => {}
                None => sums.push((place, own_len)),
            }
            match pieces.last_mut() {
                Some(piece) if bytes < PIECE_BYTES && page.0 / ROW == piece.first.0 / ROW => {
                    piece.last = page
                }
                _ => {
                    bytes = 0;
                    push(&mut pieces, MemoryPiece { first: page, last: page, allocated: OnceLock::new() })?;
                }
            }
            bytes += len;
        }
        // The budget is checked only here. Afterwards, allocation fails only for lack of memory.
        let reserved = arena.reserve(Purpose::Page, &sums)?;
        Ok(Self { reserved, table, lent, pieces })
    }

    /// Allocates the memory of all pages. Stops at the first failure, because the open fails anyway.
    pub fn allocate(&self) {
        // On every exit, the guard sets a result for the pieces that were not reached.
        let mut rest = PieceGuard { memories: self, refused: None };
        for piece in &self.pieces {
            let pages = self.table.lens_between(piece.first, piece.last);
            let pages = pages.filter(|(_, place, _)| *place != Place::Disk);
            let memory = pages.map_while(|(page, place, len)| {
                if let Some(lent) = self.lent.take_out(page) {
                    return Some((page, lent));
                }
                let memory = self.reserved.allocate(place, len).map_err(|error| rest.refused = Some(error));
                Some((page, memory.ok()?))
            });
            let memory = memory.collect();
            // The result is set even after a failure, because threads may be waiting for the piece.
            let refused = rest.refused.clone();
            let _set_once = piece.allocated.set(PieceResult { memory, refused });
            if rest.refused.is_some() {
                break;
            }
        }
    }

    /// Divides the pages into at least one and at most `count_max` parts, and returns the first and last page of each.
    pub fn parts(&self, count_max: usize) -> Vec<(PageId, PageId)> {
        let parts = self.pieces.chunks(self.pieces.len().div_ceil(count_max).max(1));
        parts.map(|pieces| (pieces[0].first, pieces[pieces.len() - 1].last)).collect()
    }

    /// Waits until a page's memory is allocated, and returns the memory.
    ///
    /// # Errors
    /// `OutOfMemory`, `Unavailable`, or a device error.
    ///
    /// # Panics
    /// If the table does not contain the page.
    pub fn of(&self, page: PageId) -> Result<Span> {
        self.memory_of(page).map(PageMemory::span)
    }

    /// Waits until a page's memory is allocated, and returns whether the memory is caller-owned.
    ///
    /// # Errors
    /// Same as [`of`](Self::of).
    pub fn is_lent(&self, page: PageId) -> Result<bool> {
        self.memory_of(page).map(PageMemory::is_lent)
    }

    fn memory_of(&self, page: PageId) -> Result<&PageMemory> {
        let piece = self.pieces.partition_point(|piece| piece.last < page);
        let PieceResult { memory, refused } = self.pieces[piece].allocated.wait();
        match (memory.get(page), refused) {
            (Some(memory), _) => Ok(memory),
            (None, Some(refused)) => Err(refused.clone()),
            (None, None) => panic!("page {page} is in no table"),
        }
    }

    /// Returns the allocated memory, and the first allocation error.
    pub fn finish(self) -> (IdMap<PageId, PageMemory>, Result<()>) {
        let (table, mut all, mut refused) = (self.table, IdMap::default(), Ok(()));
        for PieceResult { memory, refused: why } in
            self.pieces.into_iter().filter_map(|piece| piece.allocated.into_inner())
        {
            all.absorb(memory);
            refused = refused.and(why.map_or(Ok(()), Err));
        }
        if refused.is_ok() {
            let wanted = table.lens().filter(|(_, place, _)| *place != Place::Disk).count();
            assert!(all.len() == wanted); // I10: exactly the claimed memory was allocated.
        }
        (all, refused)
    }
}

/// A guard that wakes all threads that wait for pieces which will not be allocated. Without the guard, a panic of the
/// allocating thread would leave the loading threads asleep, and the open would hang.
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
                .get_or_init(|| PieceResult { memory: IdMap::default(), refused: Some(refused.clone()) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use remanent_format::{Epoch, Lsn, PageInfo};

    use super::*;
    use crate::device::EngineDevice;
    use crate::device::host::HostDevice;
    use crate::device::multi::MultiDevice;
    use crate::error::Unavailable;
    use crate::options::Budget;

    /// Returns a table of more than three pieces, with some long pages and gaps between ids.
    fn table(place_of_500: Place) -> PageTable {
        let info = |number: u64| {
            let len = if number % 300 == 7 { PIECE_BYTES } else { number % 50 };
            let place = if number == 500 { place_of_500 } else { Place::Host };
            PageInfo::new(PageId(3 * number), len, place)
        };
        PageTable::from_parts((1..1000).map(info), Arc::default(), 1, Epoch(1), Lsn(1))
    }

    /// Returns an arena of ordinary host memory without a limit.
    fn arena() -> Arena {
        Arena::new(EngineDevice::new(Arc::new(HostDevice::new())), Budget::default())
    }

    /// Tests a loading thread that needs a page before the page's memory is allocated. The thread must wait and get the
    /// page's final memory, because with any other memory it would overwrite another page.
    #[test]
    fn thread_waits_until_page_memory_is_available() {
        let (arena, table) = (arena(), table(Place::Host));
        let memories = PageMemories::reserve(&arena, &table, LentPages::none(&arena)).unwrap();
        assert!(memories.pieces.len() > 3);
        let all: u64 = table.lens().map(|(_, _, len)| len).sum();
        assert_eq!(arena.usage(Place::Host).claimed_bytes, all, "claimed before any is allocated");
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

    /// The parts must cover all pages exactly once. A page in no part would never be loaded, and a page in two parts
    /// would be loaded twice.
    #[test]
    fn parts_cover_all_pages_once() {
        // There are two pages per row.
        let info = |number: u64| PageInfo::new(PageId(ROW / 2 * number), 1, Place::Host);
        let table = PageTable::from_parts((2..400).map(info), Arc::default(), 1, Epoch(1), Lsn(1));
        let arena = arena();
        let memories = PageMemories::reserve(&arena, &table, LentPages::none(&arena)).unwrap();
        for (count_max, expected) in [(1, 1), (2, 2), (3, 3), (1000, 199)] {
            let parts = memories.parts(count_max);
            assert_eq!(parts.len(), expected);
            let pages = parts.into_iter().flat_map(|(first, last)| table.lens_between(first, last));
            assert!(pages.eq(table.lens()), "{count_max}");
        }
    }

    /// A thread that waits for a page after a failed allocation must be notified. Otherwise the open hangs forever.
    #[test]
    fn pages_after_a_refused_page_are_refused() {
        // No device is bound to the slot.
        let device = EngineDevice::new(Arc::new(MultiDevice::new(vec![Arc::new(HostDevice::new())])));
        let (arena, table) = (Arena::new(device, Budget::default()), table(Place::Device(1)));
        let memories = PageMemories::reserve(&arena, &table, LentPages::none(&arena)).unwrap();
        let refused = |page| {
            matches!(
                memories.of(page),
                Err(Error::Unavailable(Unavailable::Place { place: Place::Device(1), .. }))
            )
        };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| refused(PageId(3 * 999)));
            memories.allocate();
            assert!(waiting.join().unwrap());
        });
        for number in 1..1000 {
            assert_eq!(refused(PageId(3 * number)), number >= 500, "{number}");
        }
        let (memory, allocated) = memories.finish();
        assert!(matches!(allocated, Err(Error::Unavailable(Unavailable::Place { .. }))));
        assert_eq!(memory.len(), 499);
        memory.into_items().for_each(|(_, memory)| arena.discard(memory).unwrap());
        assert_eq!(arena.usage(Place::Host).used(), 0);
    }
}
