//! The directory of pages: a two-level table from page ids to versions.
//!
//! Ids are assigned in ascending order, so pages are grouped in chunks, and chunks in rows. Empty chunks and rows are
//! removed, because a long-lived store uses many ids. Readers access the table without a lock, and one writer at a time
//! adds and removes entries. A reader may hold a chunk that was removed in the meantime. The reader finds this chunk
//! empty, because chunks are removed only when they are empty.

use std::array;
use std::iter::Peekable;
use std::sync::Arc;

use remanent_format::PageId;

use super::chain::{PageState, Version};
use crate::base::sync::Swap;
use crate::base::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::device::MemoryId;

/// The number of pages in a chunk, and the number of chunks in a row. The number is small under a test scheduler, which
/// can switch threads at each slot.
const WIDTH: usize = if cfg!(shuttle) { 4 } else { 256 };

/// A table of the versions and the memory of all pages of a store, in rows of chunks.
pub(super) struct Directory {
    /// The rows with their numbers, in ascending order. The value is never `None`, so that readers need not handle
    /// `None`.
    rows: Swap<Vec<(u64, Arc<Row>)>>,
}

struct Row {
    chunks: [Swap<Chunk>; WIDTH],
    /// The number of chunks in the row. Only the writer reads and changes this counter.
    used: AtomicUsize,
}

/// A chunk of pages with adjacent ids.
struct Chunk {
    slots: [PageSlot; WIDTH],
    /// The number of slots that contain a page. Only the writer reads and changes this counter.
    used: AtomicUsize,
}

/// A sequence of page lookups that caches the chunk of the last page, because a long batch usually accesses adjacent
/// pages. A cached chunk that was removed in the meantime is empty. Only the writer can rely on this: for other
/// threads, a new chunk may have replaced the removed one.
pub(super) struct SlotWalk<'d> {
    directory: &'d Directory,
    /// The cached chunk, and the id of its first page divided by [`WIDTH`].
    chunk: Option<(u64, Arc<Chunk>)>,
}

/// The versions and the memory of one page.
pub(super) struct PageSlot {
    /// The versions of the page, newest first.
    pub newest: Swap<Version<PageState>>,
    /// The id of the memory that contains the page's bytes, or 0 if the page has no memory. Set by the applier.
    memory: AtomicU64,
}

impl PageSlot {
    fn new(newest: Option<Arc<Version<PageState>>>, memory: Option<MemoryId>) -> Self {
        let memory = memory.map_or(0, |memory| memory.0);
        Self { newest: Swap::new(newest), memory: AtomicU64::new(memory) }
    }

    /// Returns the memory that contains the page's bytes, or `None` if the page has no memory.
    pub fn memory(&self) -> Option<MemoryId> {
        let memory = self.memory.load(Ordering::Acquire);
        (memory != 0).then_some(MemoryId(memory))
    }

    /// Sets the memory that contains the page's bytes, or `None` if the page no longer has memory.
    pub fn set_memory(&self, memory: Option<MemoryId>) {
        self.memory.store(memory.map_or(0, |memory| memory.0), Ordering::Release);
    }
}

impl Row {
    fn new() -> Self {
        Self { chunks: array::from_fn(|_| Swap::new(None)), used: AtomicUsize::new(0) }
    }
}

impl Chunk {
    /// Creates chunk `at` of row `row`, and consumes the pages of that chunk from `pages`. `pages` must be ordered by
    /// id.
    fn of<P>(row: u64, at: usize, pages: &mut Peekable<P>) -> Self
    where
        P: Iterator<Item = (PageId, PageState, Option<MemoryId>)>,
    {
        let mut used = 0;
        let slots = array::from_fn(|slot| {
            let page = pages.next_if(|(page, _, _)| locate(page.0) == (row, at, slot));
            let Some((_, state, memory)) = page else { return PageSlot::new(None, None) };
            used += 1;
            PageSlot::new(Some(Version::new(state, None)), memory)
        });
        Self { slots, used: AtomicUsize::new(used) }
    }
}

/// Returns the row of a page, its chunk in the row, and its slot in the chunk.
fn locate(page: u64) -> (u64, usize, usize) {
    let width = WIDTH as u64;
    (page / width / width, (page / width % width) as usize, (page % width) as usize)
}

impl SlotWalk<'_> {
    /// Calls `look` with the slot of a page and returns the result, or `None` if the page has no slot.
    pub fn with<R>(&mut self, page: PageId, look: impl FnOnce(&PageSlot) -> R) -> Option<R> {
        let number = page.0 / WIDTH as u64;
        if self.chunk.as_ref().is_none_or(|(held, _)| *held != number) {
            self.chunk = self.directory.chunk(page).map(|chunk| (number, chunk));
        }
        let (_, chunk) = self.chunk.as_ref()?;
        Some(look(&chunk.slots[locate(page.0).2]))
    }
}

impl Directory {
    /// Creates a directory of `pages`, which must be ordered by id.
    pub fn new(pages: impl Iterator<Item = (PageId, PageState, Option<MemoryId>)>) -> Self {
        let mut rows: Vec<(u64, Arc<Row>)> = Vec::new();
        let mut pages = pages.peekable();
        while let Some((first, _, _)) = pages.peek() {
            let (row, at, _) = locate(first.0);
            let chunk = Arc::new(Chunk::of(row, at, &mut pages));
            if rows.last().is_none_or(|(last, _)| *last != row) {
                rows.push((row, Arc::new(Row::new())));
            }
            let (_, of_chunk) = rows.last().expect("pushed just now");
            of_chunk.chunks[at].set(Some(chunk));
            of_chunk.used.fetch_add(1, Ordering::Relaxed);
        }
        Self { rows: Swap::new(Some(Arc::new(rows))) }
    }

    /// Calls `look` with the slot of a page and returns the result, or `None` if the page has no slot.
    pub fn with<R>(&self, page: PageId, look: impl FnOnce(&PageSlot) -> R) -> Option<R> {
        let (row, at, slot) = locate(page.0);
        let rows = self.rows.load();
        let rows = rows.as_ref()?;
        let position = rows.binary_search_by_key(&row, |(number, _)| *number).ok()?;
        let chunk = rows[position].1.chunks[at].load();
        Some(look(&chunk.as_ref()?.slots[slot]))
    }

    fn chunk(&self, page: PageId) -> Option<Arc<Chunk>> {
        let (row, at, _) = locate(page.0);
        let rows = self.rows.load();
        let rows = rows.as_ref()?;
        let position = rows.binary_search_by_key(&row, |(number, _)| *number).ok()?;
        rows[position].1.chunks[at].get()
    }

    pub fn walk(&self) -> SlotWalk<'_> {
        SlotWalk { directory: self, chunk: None }
    }

    /// Returns whether the directory has no chunk for a page, so that neither the page nor its neighbors exist.
    pub fn lacks_chunk(&self, page: PageId) -> bool {
        let (row, at, _) = locate(page.0);
        let rows = self.rows.load();
        let Some(rows) = rows.as_ref() else { return true };
        let found = rows.binary_search_by_key(&row, |(number, _)| *number);
        found.map_or(true, |position| rows[position].1.chunks[at].load().is_none())
    }

    /// Returns whether both pages are in the same chunk.
    pub fn are_neighbours(page: PageId, other: PageId) -> bool {
        page.0 / WIDTH as u64 == other.0 / WIDTH as u64
    }

    /// Adds a chunk of pages, ordered by id. [`lacks_chunk`](Self::lacks_chunk) must return `true` for the pages. Only
    /// the writer may call this.
    ///
    /// Adding the pages of a long batch to their slots separately would be slower, because it would exchange a shared
    /// pointer for each page while the submission lock is held.
    pub fn add(&self, pages: impl IntoIterator<Item = (PageId, PageState)>) {
        let mut pages = pages.into_iter().map(|(page, state)| (page, state, None)).peekable();
        let Some(&(first, _, _)) = pages.peek() else { return };
        let (row, at, _) = locate(first.0);
        let chunk = Chunk::of(row, at, &mut pages);
        assert!(pages.next().is_none(), "neighbours, in the order of their ids");
        let row = self.row_or_new(row);
        row.chunks[at].set(Some(Arc::new(chunk)));
        row.used.fetch_add(1, Ordering::Relaxed);
    }

    /// Stores a version in the slot of a page. Only the writer may call this.
    pub fn set(&self, page: PageId, version: Arc<Version<PageState>>) {
        let (row, at, slot) = locate(page.0);
        let row = self.row_or_new(row);
        let chunk = row.chunks[at].get().unwrap_or_else(|| {
            let chunk =
                Chunk { slots: array::from_fn(|_| PageSlot::new(None, None)), used: AtomicUsize::new(0) };
            let chunk = Arc::new(chunk);
            row.chunks[at].set(Some(chunk.clone()));
            row.used.fetch_add(1, Ordering::Relaxed);
            chunk
        });
        let newest = &chunk.slots[slot].newest;
        let is_new = newest.load().is_none();
        newest.set(Some(version));
        chunk.used.fetch_add(is_new.into(), Ordering::Relaxed);
    }

    /// Empties the slot of a permanently deleted page. If the page's chunk or row becomes empty, removes the chunk or
    /// row. Only the writer may call this.
    pub fn clear(&self, page: PageId) {
        let (number, at, slot) = locate(page.0);
        let rows = self.rows.get().unwrap_or_default();
        let Ok(position) = rows.binary_search_by_key(&number, |(number, _)| *number) else { return };
        let row = &rows[position].1;
        let Some(chunk) = row.chunks[at].get() else { return };
        chunk.slots[slot].newest.set(None);
        chunk.slots[slot].memory.store(0, Ordering::Release);
        if chunk.used.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        row.chunks[at].set(None);
        if row.used.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        let left = rows.iter().filter(|(other, _)| *other != number).cloned().collect();
        self.rows.set(Some(Arc::new(left)));
    }

    fn row_or_new(&self, number: u64) -> Arc<Row> {
        let rows = self.rows.get().unwrap_or_default();
        match rows.binary_search_by_key(&number, |(number, _)| *number) {
            Ok(position) => rows[position].1.clone(),
            Err(position) => {
                let row = Arc::new(Row::new());
                let mut more = (*rows).clone();
                more.insert(position, (number, row.clone()));
                self.rows.set(Some(Arc::new(more)));
                row
            }
        }
    }

    /// Returns the number of rows.
    #[cfg(test)]
    pub fn row_count(&self) -> usize {
        self.rows.get().map_or(0, |rows| rows.len())
    }

    /// Calls `look` with the slots of pages with id `from` or higher, and returns the first result that is not `None`.
    pub fn find<R>(&self, from: PageId, look: impl Fn(PageId, &PageSlot) -> Option<R>) -> Option<R> {
        let (mut row_from, mut chunk_from, mut slot_from) = locate(from.0);
        let rows = self.rows.get()?;
        let first = rows.partition_point(|(number, _)| *number < row_from);
        for (number, row) in &rows[first..] {
            if *number != row_from {
                (row_from, chunk_from, slot_from) = (*number, 0, 0);
            }
            for at in chunk_from..WIDTH {
                let chunk = row.chunks[at].load();
                let from = if at == chunk_from { slot_from } else { 0 };
                let Some(chunk) = chunk.as_ref() else { continue };
                let first_id = (number * WIDTH as u64 + at as u64) * WIDTH as u64;
                let mut slots = chunk.slots.iter().enumerate().skip(from);
                let found = slots.find_map(|(slot, state)| look(PageId(first_id + slot as u64), state));
                if found.is_some() {
                    return found;
                }
            }
        }
        None
    }
}
