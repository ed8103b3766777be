//! Floor 4. Page memory: what is allocated, within the budget, and given back only when no lane uses it.
//!
//! The page table owns a [`PageMemory`] a page. When a page goes or moves, its memory is retired with the
//! fence of its last use and released once that fence has passed; until then it counts against the
//! budget (I10), for it is still there. Nothing here is on disk: recovery allocates anew.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use remanent_format::Place;

use crate::device::{Device, Fence, Lane, MemoryId, Span};
use crate::error::{Error, Result};
use crate::options::Budget;

/// The page memory of one device, under one budget. Shared by threads.
pub struct Arena {
    device: Arc<dyn Device>,
    budget: Budget,
    state: Mutex<State>,
    /// Held by who reaps, so that who must know how much can be had waits for what is being released.
    reaping: Mutex<()>,
}

/// The memory of one page. It is given back by [`Arena::retire`] or [`Arena::discard`], never by being
/// dropped: a drop cannot know which lane still uses it.
#[derive(Debug)]
pub struct PageMemory {
    memory: MemoryId,
    place: Place,
    len: u64,
    given_back: bool,
}

/// How much of a place is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaceUsage {
    /// Bytes of pages.
    pub allocated_bytes: u64,
    /// Bytes given up that a lane may still use.
    pub retired_bytes: u64,
    /// The most bytes that both have been together.
    pub peak_bytes: u64,
    /// Number of pages, those of length 0 included.
    pub count: u64,
}

#[derive(Default)]
struct State {
    places: BTreeMap<Place, PlaceUsage>,
    /// By lane, in the order of retirement. An entry behind one with a later fence waits for it, which
    /// costs time and nothing else.
    retired: HashMap<Lane, VecDeque<Retired>>,
}

struct Retired {
    page: PageMemory,
    fence: Fence,
}

impl Arena {
    /// An arena without pages.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, budget: Budget) -> Self {
        Self { device, budget, state: Mutex::default(), reaping: Mutex::default() }
    }

    /// Memory for a page, of unspecified content. A length of 0 costs nothing of the budget.
    ///
    /// Where only retired memory stands in the way, this waits for its fences rather than fail: whether
    /// a batch fits must not depend on how far the lanes have come.
    ///
    /// # Errors
    /// `OverBudget`, `OutOfMemory`, `PlaceUnavailable`, a device error. Nothing is allocated then.
    pub fn allocate(&self, place: Place, len: u64) -> Result<PageMemory> {
        self.reap()?;
        if let Err(over) = self.reserve(place, len) {
            if !self.fits_without_retired(place, len) {
                return Err(over);
            }
            self.reap_all()?;
            self.reserve(place, len)?;
        }
        let allocated = match self.device.allocate(place, len) {
            Err(Error::OutOfMemory { .. }) => self.reap_all().and_then(|()| self.device.allocate(place, len)),
            other => other,
        };
        match allocated {
            Ok(memory) => {
                self.state.lock().note_peak(place);
                Ok(PageMemory { memory, place, len, given_back: false })
            }
            Err(error) => {
                self.state.lock().unreserve(place, len);
                Err(error)
            }
        }
    }

    /// Gives memory back once `fence`, that of the last list that names it, has passed.
    pub fn retire(&self, page: PageMemory, fence: Fence) {
        let mut state = self.state.lock();
        let usage = state.places.entry(page.place).or_default();
        usage.allocated_bytes -= page.len;
        usage.retired_bytes += page.len;
        usage.count -= 1;
        state.retired.entry(fence.lane).or_default().push_back(Retired { page, fence });
    }

    /// Gives back memory that no list names which has yet to run: none ever did, or all their fences
    /// were waited for.
    ///
    /// # Errors
    /// A device error; the memory then stays counted, for it is not known to be free.
    pub fn discard(&self, mut page: PageMemory) -> Result<()> {
        page.given_back = true;
        self.device.release(page.memory)?;
        self.state.lock().unreserve(page.place, page.len);
        Ok(())
    }

    /// Releases retired memory whose fence has passed. Does not wait, neither for a fence nor for another
    /// thread that reaps already.
    ///
    /// # Errors
    /// A device error.
    pub fn reap(&self) -> Result<()> {
        let Some(_reaping) = self.reaping.try_lock() else { return Ok(()) };
        let lanes: Vec<Lane> = self.state.lock().retired.keys().copied().collect();
        for lane in lanes {
            let reached = self.device.reached(lane);
            while let Some(retired) = self.next_retired(lane, |fence| fence.value <= reached) {
                self.release(retired)?;
            }
        }
        Ok(())
    }

    /// Waits for the fences of all retired memory and releases it.
    ///
    /// # Errors
    /// A device error.
    pub fn reap_all(&self) -> Result<()> {
        let _reaping = self.reaping.lock();
        let lanes: Vec<Lane> = self.state.lock().retired.keys().copied().collect();
        for lane in lanes {
            while let Some(retired) = self.next_retired(lane, |_| true) {
                self.device.wait(retired.fence)?;
                self.release(retired)?;
            }
        }
        Ok(())
    }

    /// Bytes of the budget that are left in a place, retired memory counted as used.
    #[must_use]
    pub fn available(&self, place: Place) -> u64 {
        self.budget.limit(place) - self.usage(place).used()
    }

    /// How much of a place is in use.
    #[must_use]
    pub fn usage(&self, place: Place) -> PlaceUsage {
        self.state.lock().places.get(&place).copied().unwrap_or_default()
    }

    /// How much of each place that was ever used is in use.
    #[must_use]
    pub fn usages(&self) -> BTreeMap<Place, PlaceUsage> {
        self.state.lock().places.clone()
    }

    /// Takes the bytes out of the budget before the device is asked, so that threads which allocate at
    /// the same time cannot exceed it together.
    fn reserve(&self, place: Place, len: u64) -> Result<()> {
        let budget = self.budget.limit(place);
        let mut state = self.state.lock();
        let used = state.places.get(&place).map_or(0, PlaceUsage::used);
        let available = budget - used; // I10
        if len > available {
            return Err(Error::OverBudget { place, asked: len, available, budget });
        }
        let usage = state.places.entry(place).or_default();
        usage.allocated_bytes += len;
        usage.count += 1;
        Ok(())
    }

    fn fits_without_retired(&self, place: Place, len: u64) -> bool {
        len <= self.budget.limit(place) - self.usage(place).allocated_bytes
    }

    fn next_retired(&self, lane: Lane, ready: impl Fn(Fence) -> bool) -> Option<Retired> {
        let mut state = self.state.lock();
        let retired = state.retired.get_mut(&lane)?;
        if !ready(retired.front()?.fence) {
            return None;
        }
        retired.pop_front()
    }

    fn release(&self, retired: Retired) -> Result<()> {
        let mut page = retired.page;
        page.given_back = true;
        self.device.release(page.memory)?;
        let mut state = self.state.lock();
        state.places.entry(page.place).or_default().retired_bytes -= page.len;
        Ok(())
    }
}

impl Drop for Arena {
    /// The device may outlive the arena, so what is retired is released. A device that fails now keeps
    /// the memory; its error was, or will be, reported by whoever uses it next.
    fn drop(&mut self) {
        if let Err(error) = self.reap_all() {
            tracing::warn!(%error, "retired page memory could not be released");
        }
    }
}

impl PageMemory {
    /// All of it.
    #[must_use]
    pub fn span(&self) -> Span {
        Span { memory: self.memory, offset: 0, len: self.len }
    }

    /// `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If they do not lie within the page: the caller checked that.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Span {
        let within = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(within, "bytes {offset}..+{len} are not within a page of {} bytes", self.len);
        Span { memory: self.memory, offset, len }
    }

    /// Where it lies.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// Its length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.len
    }
}

impl Drop for PageMemory {
    fn drop(&mut self) {
        if !self.given_back {
            tracing::warn!(
                memory = self.memory.0,
                place = %self.place,
                len = self.len,
                "page memory dropped without being given back: it stays allocated and in the budget"
            );
        }
    }
}

impl PlaceUsage {
    /// Bytes that count against the budget.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.allocated_bytes + self.retired_bytes
    }
}

impl State {
    fn note_peak(&mut self, place: Place) {
        let usage = self.places.entry(place).or_default();
        usage.peak_bytes = usage.peak_bytes.max(usage.used());
    }

    fn unreserve(&mut self, place: Place, len: u64) {
        let usage = self.places.entry(place).or_default();
        usage.allocated_bytes -= len;
        usage.count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::HostDevice;
    use crate::device::late::LateDevice;
    use crate::device::{Command, CommandList};
    use remanent_format::Width;

    const PLACE: Place = Place::Device(0);

    /// A device that runs nothing before it must, and an arena of 100 bytes on it.
    fn late_arena() -> (Arc<dyn Device>, Arena) {
        let device: Arc<dyn Device> = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
        (device.clone(), Arena::new(device, Budget::default().with(PLACE, 100)))
    }

    /// A list that uses the page, and is not done yet.
    fn use_page(device: &dyn Device, page: &PageMemory) -> Fence {
        let fill = Command::Fill { target: page.span(), pattern: [1; 16], width: Width::W1 };
        let list = CommandList { commands: vec![fill], staging: Vec::new() };
        device.submit(Lane::Apply, list).unwrap().fence()
    }

    fn usage(allocated_bytes: u64, retired_bytes: u64, peak_bytes: u64, count: u64) -> PlaceUsage {
        PlaceUsage { allocated_bytes, retired_bytes, peak_bytes, count }
    }

    #[test]
    fn the_budget_holds_to_the_byte_and_says_what_is_left() {
        let (_, arena) = late_arena();
        let page = arena.allocate(PLACE, 60).unwrap();
        let error = arena.allocate(PLACE, 41).unwrap_err();
        assert_eq!(
            error.to_string(),
            Error::OverBudget { place: PLACE, asked: 41, available: 40, budget: 100 }.to_string()
        );
        assert_eq!(arena.usage(PLACE), usage(60, 0, 60, 1));
        let rest = arena.allocate(PLACE, 40).unwrap();
        assert_eq!((arena.available(PLACE), arena.usage(PLACE)), (0, usage(100, 0, 100, 2)));
        // Another place has its own budget, none in this case.
        let elsewhere = arena.allocate(Place::Host, 1000).unwrap();
        for page in [page, rest, elsewhere] {
            arena.discard(page).unwrap();
        }
        assert_eq!(arena.usage(PLACE), usage(0, 0, 100, 0));
        assert_eq!(arena.usages().keys().copied().collect::<Vec<_>>(), [PLACE, Place::Host]);
    }

    #[test]
    fn empty_pages_cost_nothing_even_when_the_budget_is_used_up() {
        let (_, arena) = late_arena();
        let full = arena.allocate(PLACE, 100).unwrap();
        let empty = arena.allocate(PLACE, 0).unwrap();
        assert_eq!((empty.byte_len(), arena.usage(PLACE)), (0, usage(100, 0, 100, 2)));
        arena.discard(full).unwrap();
        arena.discard(empty).unwrap();
        assert_eq!(arena.usage(PLACE).count, 0);
    }

    #[test]
    fn retired_memory_counts_until_its_fence_has_passed() {
        let (device, arena) = late_arena();
        let page = arena.allocate(PLACE, 60).unwrap();
        let fence = use_page(&*device, &page);
        arena.retire(page, fence);
        // The late device panics if the memory is released before the list ran.
        arena.reap().unwrap();
        assert_eq!((arena.available(PLACE), arena.usage(PLACE)), (40, usage(0, 60, 60, 0)));
        device.wait(fence).unwrap();
        arena.reap().unwrap();
        assert_eq!((arena.available(PLACE), arena.usage(PLACE)), (100, usage(0, 0, 60, 0)));
    }

    #[test]
    fn an_allocation_that_fits_once_retired_memory_is_free_waits_for_it() {
        let (device, arena) = late_arena();
        let page = arena.allocate(PLACE, 60).unwrap();
        let fence = use_page(&*device, &page);
        arena.retire(page, fence);
        let next = arena.allocate(PLACE, 100).unwrap();
        assert_eq!((device.reached(Lane::Apply), arena.usage(PLACE)), (fence.value, usage(100, 0, 100, 1)));
        arena.discard(next).unwrap();
    }

    #[test]
    fn an_allocation_that_can_never_fit_does_not_wait() {
        let (device, arena) = late_arena();
        let page = arena.allocate(PLACE, 60).unwrap();
        let fence = use_page(&*device, &page);
        arena.retire(page, fence);
        let error = arena.allocate(PLACE, 101).unwrap_err();
        assert!(matches!(error, Error::OverBudget { asked: 101, available: 40, budget: 100, .. }), "{error}");
        assert_eq!(device.reached(Lane::Apply), 0);
    }

    #[test]
    fn a_full_device_is_reaped_and_asked_again() {
        let device: Arc<dyn Device> = Arc::new(LateDevice::new(Arc::new(HostDevice::new())));
        let arena = Arena::new(device.clone(), Budget::default());
        let page = arena.allocate(PLACE, 60).unwrap();
        let fence = use_page(&*device, &page);
        arena.retire(page, fence);
        // More than any address space holds: it fails the second time too, and nothing stays counted.
        let error = arena.allocate(PLACE, 1 << 60).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { place: PLACE, len } if len == 1 << 60), "{error}");
        assert_eq!(device.reached(Lane::Apply), fence.value);
        assert_eq!(arena.usage(PLACE), usage(0, 0, 60, 0));
    }

    #[test]
    fn a_dropped_arena_leaves_no_retired_memory_on_the_device() {
        let (device, arena) = late_arena();
        let page = arena.allocate(PLACE, 60).unwrap();
        let (memory, fence) = (page.span().memory, use_page(&*device, &page));
        arena.retire(page, fence);
        drop(arena);
        let again = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| device.release(memory)));
        assert!(again.is_err(), "the arena had not released it");
    }

    #[test]
    fn memory_that_is_dropped_instead_stays_in_the_budget() {
        let (_, arena) = late_arena();
        drop(arena.allocate(PLACE, 60).unwrap());
        assert_eq!(arena.usage(PLACE), usage(60, 0, 60, 1));
    }
}
