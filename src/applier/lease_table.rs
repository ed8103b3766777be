//! The table of leases and pins, which determines when callers have finished using page memory.
//!
//! Leased memory is never written. The committer of a batch that changes a leased page allocates new memory, to which
//! the page is copied first, and callers continue to see the old version. Thus no batch waits for a lease, and a batch
//! without room for the copy fails before it is logged.
//!
//! - A lease begins under the submission lock. Every batch that was logged earlier is passed to the applier before the
//!   closure that determines the lease's memory. Every later batch finds the lease in this table.
//! - A lease ends when the streams on which it was used have finished their work. The lane [`Lane::Callers`] waits for
//!   these streams, so its next fence passes when they are done. A stream may be arbitrarily slow. Until the fence has
//!   passed, the memory counts as leased, but no other lane waits.
//! - A pinned page cannot be leased, and a leased page cannot be pinned. A pinned page keeps its memory. A batch that
//!   would move the page fails with `Leased` before it is logged.
//! - Memory that its page has left is freed after the last lease, and after the store's own last use of the memory.

use std::collections::HashMap;
use std::sync::Arc;

use remanent_format::PageId;

use crate::base::poison::Poison;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::{Mutex, Rank};
use crate::device::{CommandList, EngineDevice, Fence, Lane, MemoryId, RawStream};
use crate::error::{Error, Result};
use crate::memory::arena::{Arena, PageMemory};

/// The leases and pins of one store. Committers, readers and the applier share this table.
pub(crate) struct Leases {
    device: Arc<EngineDevice>,
    arena: Arc<Arena>,
    poison: Arc<Poison>,
    /// The number of leased pages. While it is 0, batches need not lock `state`.
    leased_pages: AtomicUsize,
    state: Mutex<LeaseState>,
}

/// The id of a lease, unique among the leases of the same page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseId(u64);

#[derive(Default)]
struct LeaseState {
    begun: u64,
    pages: HashMap<PageId, Vec<Record>>,
    /// The number of pins of each pinned page.
    pins: HashMap<PageId, usize>,
    /// Memory that pages left while it was leased. Each piece has the fence of the store's last use.
    orphaned: Vec<(PageMemory, Fence)>,
}

struct Record {
    id: LeaseId,
    /// The id of the leased memory, or `None` until the applier has determined it.
    memory: Option<MemoryId>,
    /// Whether the page has moved to other memory. Batches may then change the page in place.
    is_old: bool,
    /// The fence value of [`Lane::Callers`] at which the caller's streams are done, or `None` while the lease
    /// continues.
    ended: Option<u64>,
}

impl Leases {
    pub fn new(device: Arc<EngineDevice>, arena: Arc<Arena>, poison: Arc<Poison>) -> Self {
        Self {
            device,
            arena,
            poison,
            leased_pages: AtomicUsize::new(0),
            state: Mutex::of_rank(Rank::LEASES, LeaseState::default()),
        }
    }

    /// Makes later work of a caller's stream wait until `fence` has passed.
    ///
    /// # Errors
    /// `Refused`; a device error, which poisons the store.
    pub fn signal(&self, stream: RawStream, fence: Fence) -> Result<()> {
        let signalled =
            self.device.streams(stream).and_then(|streams| streams.signal_external(stream, fence));
        signalled.map_err(|error| self.poison.set_by_device(error))
    }

    /// Begins a lease. The caller must hold the submission lock.
    ///
    /// # Errors
    /// `Leased` if the page is pinned, because a change to a leased page would move it.
    pub fn begin(&self, page: PageId) -> Result<LeaseId> {
        let reached = self.device.reached(Lane::Callers);
        let mut state = self.state.lock();
        if state.pins.contains_key(&page) {
            return Err(Error::Leased { page });
        }
        // Ended leases are removed here, because a page that is only read is never checked by a batch.
        state.remove(page, |record| record.ended.is_some_and(|value| value <= reached));
        state.begun += 1;
        let id = LeaseId(state.begun);
        let record = Record { id, memory: None, is_old: false, ended: None };
        state.pages.entry(page).or_default().push(record);
        self.count(&state);
        Ok(id)
    }

    /// Pins a page in the memory that the page has after every batch passed to the applier so far. The caller must hold
    /// the submission lock.
    ///
    /// # Errors
    /// `Leased` if the page is leased, because a change would then move the page.
    pub fn pin(&self, page: PageId) -> Result<()> {
        if !self.leased([page]).is_empty() {
            return Err(Error::Leased { page });
        }
        *self.state.lock().pins.entry(page).or_default() += 1;
        Ok(())
    }

    /// Removes one pin from the page.
    pub fn unpin(&self, page: PageId) {
        let mut state = self.state.lock();
        let pins = state.pins.get_mut(&page).expect("a page that was pinned and not unpinned");
        *pins -= 1;
        if *pins == 0 {
            state.pins.remove(&page);
        }
    }

    /// Returns whether callers use the page's memory through a lease, or rely on its address through a pin.
    pub fn is_used(&self, page: PageId) -> bool {
        let is_pinned = self.state.lock().pins.contains_key(&page);
        is_pinned || !self.leased([page]).is_empty()
    }

    /// Returns an error if any of these pages is pinned and therefore must not move. The caller must hold the
    /// submission lock.
    ///
    /// # Errors
    /// `Leased` for the first pinned page.
    pub fn check_unpinned(&self, pages: impl IntoIterator<Item = PageId>) -> Result<()> {
        let mut pages = pages.into_iter().peekable();
        if pages.peek().is_none() {
            return Ok(());
        }
        let state = self.state.lock();
        if state.pins.is_empty() {
            return Ok(());
        }
        let pinned = pages.find(|page| state.pins.contains_key(page));
        pinned.map_or(Ok(()), |page| Err(Error::Leased { page }))
    }

    /// Returns an error if the page has an open lease. The caller must hold the submission lock.
    ///
    /// # Errors
    /// `Leased`.
    pub fn check_unleased(&self, page: PageId) -> Result<()> {
        let state = self.state.lock();
        let mut records = state.pages.get(&page).into_iter().flatten();
        if records.any(|record| record.ended.is_none()) { Err(Error::Leased { page }) } else { Ok(()) }
    }

    /// Waits until the streams of the page's ended leases are done.
    ///
    /// # Errors
    /// A device error.
    pub fn wait_ended_of(&self, page: PageId) -> Result<()> {
        let ended =
            self.state.lock().pages.get(&page).into_iter().flatten().filter_map(|record| record.ended).max();
        ended.map_or(Ok(()), |value| self.device.wait(Fence { lane: Lane::Callers, value }))
    }

    /// Records the memory of a lease. Must be called between two batches, with the memory that the page then has.
    pub fn name(&self, page: PageId, id: LeaseId, memory: MemoryId) {
        self.state.lock().record(page, id).memory = Some(memory);
    }

    /// Removes a lease whose creation failed.
    pub fn cancel(&self, page: PageId, id: LeaseId) {
        let mut state = self.state.lock();
        state.remove(page, |record| record.id == id);
        self.count(&state);
    }

    fn count(&self, state: &LeaseState) {
        self.leased_pages.store(state.pages.len(), Ordering::Release);
    }

    /// Returns whether no page is leased. A caller that holds the submission lock sees every lease that has begun.
    fn is_unused(&self) -> bool {
        self.leased_pages.load(Ordering::Acquire) == 0
    }

    /// Ends a lease that was used on these streams.
    ///
    /// # Errors
    /// `Refused`; a device error, which poisons the store. After an error, the memory stays leased, because the end of
    /// its use is unknown.
    pub fn end(&self, page: PageId, id: LeaseId, streams: &[RawStream]) -> Result<()> {
        self.end_on(page, id, streams).map_err(|error| self.poison.set_by_device(error))
    }

    fn end_on(&self, page: PageId, id: LeaseId, streams: &[RawStream]) -> Result<()> {
        if streams.is_empty() {
            self.cancel(page, id);
        } else {
            // If another lease ends concurrently, its streams are included, and the fence passes later.
            for stream in streams {
                self.device.streams(*stream)?.wait_external(Lane::Callers, *stream)?;
            }
            let fence = self.device.submit(Lane::Callers, CommandList::default())?.fence();
            self.state.lock().record(page, id).ended = Some(fence.value);
        }
        self.release_free()
    }

    /// Returns the leased pages among `pages`. A batch that changes such a page needs new memory, to which the page is
    /// copied first.
    pub fn leased(&self, pages: impl IntoIterator<Item = PageId>) -> Vec<PageId> {
        if self.is_unused() {
            return Vec::new();
        }
        let mut state = self.state.lock();
        let reached = self.device.reached(Lane::Callers);
        let mut leased = Vec::new();
        for page in pages {
            state.remove(page, |record| record.ended.is_some_and(|value| value <= reached));
            let records = state.pages.get(&page);
            let is_leased = records.is_some_and(|records| records.iter().any(|record| !record.is_old));
            if is_leased && !leased.contains(&page) {
                leased.push(page);
            }
        }
        self.count(&state);
        leased
    }

    /// Records that a page is about to leave `memory`, or to be changed in `memory`. Returns whether callers use the
    /// memory.
    pub fn leave(&self, page: PageId, memory: MemoryId) -> bool {
        if self.leased([page]).is_empty() {
            return false;
        }
        let mut state = self.state.lock();
        let records = state.pages.get_mut(&page).into_iter().flatten();
        let mut is_used = false;
        for record in records.filter(|record| record.memory == Some(memory)) {
            record.is_old = true;
            is_used = true;
        }
        is_used
    }

    /// Returns an error if any lease is open or any page is pinned. Otherwise waits until the streams of ended leases
    /// are done. The caller must hold the submission lock, so that no lease can begin.
    ///
    /// # Errors
    /// `Leased`, a device error.
    pub fn check_none(&self) -> Result<()> {
        let open = |(page, records): (&PageId, &Vec<Record>)| {
            records.iter().any(|record| record.ended.is_none()).then_some(*page)
        };
        let leased = {
            let state = self.state.lock();
            state.pages.iter().find_map(open).or_else(|| state.pins.keys().next().copied())
        };
        leased.map_or(Ok(()), |page| Err(Error::Leased { page }))?;
        self.wait_ended()
    }

    /// Takes over memory that a page has left while it was leased, and frees it after the lease. The store's own last
    /// use of the memory precedes `fence`.
    pub fn give_up(&self, memory: PageMemory, fence: Fence) {
        self.state.lock().orphaned.push((memory, fence));
        if let Err(error) = self.release_free() {
            let error = self.poison.set_by_device(error);
            tracing::warn!(%error, "memory that was leased stays allocated");
        }
    }

    /// Waits until the streams of all ended leases are done.
    ///
    /// # Errors
    /// A device error.
    pub fn wait_ended(&self) -> Result<()> {
        let ended = self.state.lock().pages.values().flatten().filter_map(|record| record.ended).max();
        ended.map_or(Ok(()), |value| self.device.wait(Fence { lane: Lane::Callers, value }))
    }

    /// Frees memory that pages have left and that no lease uses any more.
    fn release_free(&self) -> Result<()> {
        let mut state = self.state.lock();
        let LeaseState { pages, orphaned, .. } = &mut *state;
        let is_open = |memory: &PageMemory| {
            let open =
                |record: &Record| record.ended.is_none() && record.memory == Some(memory.span().memory);
            pages.values().flatten().any(open)
        };
        let free: Vec<(PageMemory, Fence)> =
            orphaned.extract_if(.., |(memory, _)| !is_open(memory)).collect();
        if free.is_empty() {
            return Ok(());
        }
        for (_, fence) in &free {
            self.device.after(Lane::Callers, *fence)?;
        }
        // The lane has waited for the streams of all ended leases, so this fence follows their work.
        let fence = self.device.submit(Lane::Callers, CommandList::default())?.fence();
        for (memory, _) in free {
            self.arena.retire(memory, fence);
        }
        Ok(())
    }
}

impl LeaseState {
    fn record(&mut self, page: PageId, id: LeaseId) -> &mut Record {
        let records = self.pages.get_mut(&page).into_iter().flatten();
        records.into_iter().find(|record| record.id == id).expect("a lease that has begun and not ended")
    }

    fn remove(&mut self, page: PageId, is_done: impl Fn(&Record) -> bool) {
        let Some(records) = self.pages.get_mut(&page) else { return };
        records.retain(|record| !is_done(record));
        if records.is_empty() {
            self.pages.remove(&page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::HostDevice;
    use crate::options::Budget;
    use crate::testing::late_device::LateDevice;

    #[test]
    fn read_leases_leave_no_records() {
        let late = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
        let device = EngineDevice::new(late.clone());
        let arena = Arc::new(Arena::new(device.clone(), Budget::default()));
        let leases = Leases::new(device, arena, Arc::new(Poison::default()));
        let (stream, page) = (late.stream(), PageId(1));
        for _ in 0..10 {
            let id = leases.begin(page).unwrap();
            leases.name(page, id, MemoryId(1));
            leases.end(page, id, &[stream]).unwrap();
            // The stream's work is done, so the lease is no longer in the table.
            leases.wait_ended().unwrap();
            assert_eq!(leases.state.lock().pages[&page].len(), 1);
        }
        leases.begin(page).unwrap();
        assert_eq!(leases.state.lock().pages[&page].len(), 1, "the one that is open");
    }
}
