//! Page memory, which is allocated within the budget, and freed only when no lane uses it.
//!
//! The page table owns one [`PageMemory`] for each page. When a page is deleted or moved, its memory is retired with
//! the fence of its last use and released once that fence has passed. Until then the memory still exists and counts
//! against the budget (I10). No memory is stored on disk, and recovery allocates new memory.
//!
//! The device may cache released memory. [`MemoryCache::trim`](crate::device::MemoryCache::trim) frees
//! the cached memory.

mod account;
mod page_memory;
mod reservation;
mod scratch;
mod lent;
mod files;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use remanent_format::{PageId, Place};

use self::account::Account;
pub(crate) use self::account::PlaceRoom;
pub use self::account::{PlaceUsage, Purpose};
use self::files::RegisteredFiles;
pub(crate) use self::files::{CopyDirection, FileTarget, RegisteredFile};
use self::lent::LentMemories;
pub use self::page_memory::PageMemory;
pub use self::reservation::Reservation;
use self::scratch::{SCRATCH_WAIT_MAX, ScratchMemory};
use crate::base::allocation::make_room;
use crate::base::queue::Queue;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::{Condvar, Mutex, Rank, RwLock};
use crate::device::{DeviceBytes, EngineDevice, Fence, Lane, MemoryLink, MemoryOwner};
use crate::error::{Error, Refused, Result};
use crate::options::Budget;

/// The lanes whose lists never wait for a caller.
const OWN_LANES: [Lane; 4] = [Lane::Apply, Lane::Drain, Lane::Stage, Lane::Load];

/// The allocator of page memory on one device, within one budget, shared by threads.
pub struct Arena {
    device: Arc<EngineDevice>,
    budget: Budget,
    accounts: RwLock<BTreeMap<Place, Arc<Account>>>,
    /// Retired memory by lane, in the order of retirement. Memory queued behind memory with a later fence waits for
    /// that fence, which only delays its release.
    retired: [Mutex<Queue<RetiredMemory>>; Lane::ALL.len()],
    retired_count: AtomicUsize,
    /// The scratch memory in use, and the number of threads that wait for scratch.
    scratch: Mutex<ScratchMemory>,
    scratch_returned: Condvar,
    /// The locks that are held while retired memory of a lane is released. A thread that queries the free memory waits
    /// until the release is counted. Each lane has its own lock, so that a thread that waits for callers does not delay
    /// threads that release memory of the other lanes.
    reaping: [Mutex<()>; Lane::ALL.len()],
    /// The handles of caller-owned memory in which pages are stored.
    lent: LentMemories,
    /// The image files to whose memory the device copies.
    files: RegisteredFiles,
    link: Arc<MemoryLink>,
}

/// The memory of a deleted page, which is passed to a caller.
pub enum HandedOut {
    /// Caller-owned memory, returned as the handle that the caller lent.
    Lent(DeviceBytes),
    /// Memory of the store, which the caller must return to the arena.
    Own(PageMemory),
}

struct RetiredMemory {
    page: PageMemory,
    fence: Fence,
}

/// The maximum number of allocations that are released in one call to the device.
const RELEASED_AT_ONCE: usize = 1024;

impl Arena {
    /// Creates an arena without pages.
    #[must_use]
    pub fn new(device: Arc<EngineDevice>, budget: Budget) -> Self {
        Self {
            device,
            budget,
            accounts: RwLock::of_rank(Rank::ARENA, BTreeMap::new()),
            retired: std::array::from_fn(|_| Mutex::of_rank(Rank::ARENA_RETIRED, Queue::default())),
            retired_count: AtomicUsize::new(0),
            scratch: Mutex::of_rank(Rank::ARENA_SCRATCH, ScratchMemory::default()),
            scratch_returned: Condvar::new(),
            reaping: std::array::from_fn(|_| Mutex::of_rank(Rank::ARENA_REAPING, ())),
            lent: LentMemories::default(),
            files: RegisteredFiles::default(),
            link: Arc::default(),
        }
    }

    /// Assigns caller-owned memory to a page, outside the budget. If another page has left a part of the memory,
    /// waits until no lane uses that part. The caller must ensure that no stream uses the memory and that no work on it
    /// is in flight.
    ///
    /// # Errors
    /// `Refused` if a page uses a part of the memory or has just left it; a device error.
    pub fn lend(&self, page: PageId, bytes: &DeviceBytes) -> Result<PageMemory> {
        let memory = match bytes.lend(page)? {
            Some(memory) => memory,
            None => {
                self.reap_all()?;
                let in_use = || {
                    Error::Refused(Refused::MemoryInUse {
                        len: bytes.byte_len(),
                        page: bytes.page().unwrap_or(page),
                    })
                };
                bytes.lend(page)?.ok_or_else(in_use)?
            }
        };
        self.lent.keep(memory, bytes.clone());
        let (place, len) = (bytes.place(), bytes.byte_len());
        self.account(place).lent(len);
        Ok(PageMemory::new(memory, place, len, Purpose::Lent))
    }

    /// Passes the memory of a deleted page to a caller. No command list may use the memory any more. Caller-owned
    /// memory is returned as the handle that the caller passed. All other memory gets a new id, which no reader has,
    /// and stays counted.
    ///
    /// # Errors
    /// A device error. The memory then stays counted.
    pub fn hand_out(&self, mut page: PageMemory) -> Result<HandedOut> {
        if page.is_lent() {
            page.is_returned = true;
            self.device.release(page.memory)?;
            self.account(page.place()).lent_returned(page.len);
            return Ok(HandedOut::Lent(self.lent.end(page.memory)));
        }
        match self.device.rename(page.memory) {
            Ok(renamed) => {
                self.account(page.place()).handed_out(page.purpose, page.len);
                (page.memory, page.purpose) = (renamed, Purpose::Caller);
                Ok(HandedOut::Own(page))
            }
            Err(error) => {
                page.is_returned = true;
                Err(error)
            }
        }
    }

    /// Returns the link between the store and the memory handles that callers hold.
    pub fn link(&self) -> &Arc<MemoryLink> {
        &self.link
    }

    /// Keeps the owner of memory that callers' streams used until `fence` has passed.
    /// [`drop_released`](Self::drop_released) then drops the owner.
    pub fn keep_until(&self, owner: MemoryOwner, fence: Fence) {
        self.lent.keep_until(owner, fence);
    }

    /// Drops the handles of caller-owned memory that no page uses any more. The call may run a caller's code, so it
    /// must be made on a caller's thread that holds no lock.
    pub fn drop_released(&self) {
        self.lent.drop_released(&self.device);
    }

    #[cfg(test)]
    /// Allocates memory for a page, with unspecified contents. A length of 0 uses no budget.
    ///
    /// If only retired memory prevents the allocation, the call waits for the fences of the retired memory instead of
    /// failing, because whether a batch fits must not depend on the progress of the lanes.
    ///
    /// # Errors
    /// `OverBudget`, `OutOfMemory`, `Unavailable`, a device error. On failure no memory is allocated.
    pub fn allocate(&self, purpose: Purpose, place: Place, len: u64) -> Result<PageMemory> {
        self.reserve(purpose, &[(place, len)])?.allocate(place, len)
    }

    /// Allocates memory like `allocate`, for a thread that submits to the lanes. The call waits only
    /// for lanes that never wait for a caller. If it waited for other lanes, a stalled caller's stream would stall all
    /// batches.
    ///
    /// # Errors
    /// Same as `allocate`.
    pub fn allocate_for_lane(&self, purpose: Purpose, place: Place, len: u64) -> Result<PageMemory> {
        self.reserve_awaiting(&OWN_LANES, purpose, &[(place, len)])?.allocate(place, len)
    }

    /// Allocates memory for several pages, in order. If any allocation fails, no memory is allocated. The budget is
    /// checked for the sum of the pages before the first allocation.
    ///
    /// # Errors
    /// Same as `allocate`. `OverBudget` states the total requested in a place.
    pub fn allocate_all(&self, purpose: Purpose, pages: &[(Place, u64)]) -> Result<Vec<PageMemory>> {
        let mut memory = Vec::new();
        make_room(&mut memory, pages.len())?;
        if let Err(error) = self.reserve(purpose, pages)?.allocate_all(pages, &mut memory) {
            memory.into_iter().try_for_each(|page| self.discard(page))?;
            return Err(error);
        }
        Ok(memory)
    }

    /// Reserves the budget for several allocations, each with its place and its length. If only retired memory prevents
    /// the reservation, waits for the fences of the retired memory and tries again once.
    ///
    /// # Errors
    /// `OverBudget`, which states the total requested in a place and the bytes left in the place; a device error. On
    /// failure no budget is reserved.
    pub fn reserve(&self, purpose: Purpose, pages: &[(Place, u64)]) -> Result<Reservation<'_>> {
        self.reserve_awaiting(&Lane::ALL, purpose, pages)
    }

    fn reserve_awaiting(
        &self,
        awaited: &'static [Lane],
        purpose: Purpose,
        pages: &[(Place, u64)],
    ) -> Result<Reservation<'_>> {
        self.reap()?;
        let mut sums: BTreeMap<Place, u64> = BTreeMap::new();
        for (place, len) in pages {
            let sum = sums.entry(*place).or_default();
            *sum = sum.saturating_add(*len);
        }
        // The retry also happens if no memory is retired any more. Another thread may have removed the last retired
        // memory from the queue and be releasing it. Before this retry existed, a batch at that moment was rejected
        // although its memory was about to become free.
        let claimed = match self.claim(awaited, purpose, &sums) {
            Err(Error::OverBudget { place, requested, .. })
                if self.account(place).fits_without_retired(requested) =>
            {
                self.reap_awaiting(awaited)?;
                self.claim(awaited, purpose, &sums)
            }
            claimed => claimed,
        };
        // Registered files only make snapshots faster, so they are unregistered to make room. A request for scratch
        // fails instead, because scratch is used for the snapshot that writes these files.
        let claimed = match claimed {
            Err(Error::OverBudget { place: Place::Pinned, requested, available, .. })
                if purpose != Purpose::Gather && self.release_files(requested.saturating_sub(available)) =>
            {
                self.claim(awaited, purpose, &sums)
            }
            claimed => claimed,
        };
        match claimed {
            Err(Error::OverBudget { place, requested, .. })
                if purpose != Purpose::Gather && self.fits_without_scratch(place, requested) =>
            {
                let mut scratch = self.scratch.lock();
                scratch.waiting += 1;
                let is_used = |scratch: &mut ScratchMemory| !scratch.bytes.is_empty();
                self.scratch_returned.wait_while_for(&mut scratch, is_used, SCRATCH_WAIT_MAX);
                drop(scratch);
                let claimed = self.reap_awaiting(awaited).and_then(|()| self.claim(awaited, purpose, &sums));
                self.scratch.lock().waiting -= 1;
                claimed
            }
            claimed => claimed,
        }
    }

    /// Releases memory once `fence` has passed. `fence` must be the fence of the last command list that uses the
    /// memory.
    pub fn retire(&self, page: PageMemory, fence: Fence) {
        self.retire_all([page], fence);
    }

    /// Retires the memory of several pages, like [`retire`](Self::retire).
    pub fn retire_all(&self, pages: impl IntoIterator<Item = PageMemory>, fence: Fence) {
        let mut scratch = Vec::new();
        let mut sums = AccountSums::default();
        let mut queue = self.retired[fence.lane as usize].lock();
        for page in pages {
            if page.is_lent() {
                self.account(page.place()).lent_returned(page.len);
                self.lent.retire(page.memory);
            } else {
                sums.add(&page, |place, sum| self.count_retired(place, sum));
            }
            if page.purpose == Purpose::Gather {
                scratch.push((page.place(), page.len));
            }
            self.retired_count.fetch_add(1, Ordering::AcqRel);
            queue.push_back(RetiredMemory { page, fence });
        }
        // The memory is counted as retired before the queue is unlocked. Otherwise another thread could remove it and
        // count it as released first.
        sums.end(|place, sum| self.count_retired(place, sum));
        drop(queue);
        scratch.into_iter().for_each(|(place, len)| self.return_scratch(place, len));
    }

    fn count_retired(&self, place: Place, AccountSum { purpose, count, len }: AccountSum) {
        self.account(place).retired(purpose, count, len);
    }

    /// Releases memory immediately. No command list in flight may use the memory: either no list ever used it, or the
    /// caller has waited for the fences of all such lists.
    ///
    /// # Errors
    /// A device error. The memory then stays counted, because it may not be free.
    pub fn discard(&self, mut page: PageMemory) -> Result<()> {
        page.is_returned = true;
        let released = self.device.release(page.memory);
        if released.is_ok() {
            let account = self.account(page.place());
            if page.is_lent() {
                account.lent_returned(page.len);
                self.lent.release_handle(self.lent.end(page.memory));
            } else {
                account.retired(page.purpose, 1, page.len);
                account.released(page.len);
            }
        }
        if page.purpose == Purpose::Gather {
            self.return_scratch(page.place(), page.len);
        }
        released
    }

    /// Discards memory like [`discard`](Self::discard), for callers that already have an error to report or cannot
    /// report one. Memory that the device fails to release stays counted and is logged with a warning.
    pub fn discard_all(&self, memory: impl IntoIterator<Item = PageMemory>) {
        for page in memory {
            if let Err(error) = self.discard(page) {
                tracing::warn!(%error, "cannot release page memory");
            }
        }
    }

    /// Releases retired memory whose fence has passed. Waits neither for a fence nor for another thread that is
    /// releasing memory.
    ///
    /// # Errors
    /// A device error of a release.
    pub fn reap(&self) -> Result<()> {
        if self.retired_count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        for lane in Lane::ALL {
            let Some(_reaping) = self.reaping[lane as usize].try_lock() else { continue };
            self.release_passed(lane, self.device.reached(lane))?;
        }
        Ok(())
    }

    /// Waits for the fences of all retired memory and releases it.
    ///
    /// # Errors
    /// A device error of a wait or a release.
    pub fn reap_all(&self) -> Result<()> {
        self.reap_awaiting(&Lane::ALL)
    }

    fn reap_awaiting(&self, lanes: &[Lane]) -> Result<()> {
        for lane in lanes {
            let _reaping = self.reaping[*lane as usize].lock();
            while let Some(fence) = self.oldest_fence(*lane) {
                self.device.wait(fence)?;
                self.release_passed(*lane, fence.value)?;
            }
        }
        Ok(())
    }

    /// Returns a handle that reads the free budget of a place without a lock.
    pub(crate) fn room(&self, place: Place) -> PlaceRoom {
        PlaceRoom::new(self.account(place))
    }

    /// Returns the limit of a place in bytes, or `u64::MAX` if the place has no limit.
    #[must_use]
    pub fn budget(&self, place: Place) -> u64 {
        self.budget.limit(place)
    }

    /// Returns the number of unused bytes of the budget of a place. Retired memory counts as used.
    #[must_use]
    pub fn available(&self, place: Place) -> u64 {
        self.account(place).available()
    }

    #[cfg(test)]
    /// Returns the number of bytes used in one place, by state and by purpose.
    #[must_use]
    pub fn usage(&self, place: Place) -> PlaceUsage {
        self.account(place).usage()
    }

    /// Returns the usage of each place in which memory was ever requested.
    #[must_use]
    pub fn usages(&self) -> BTreeMap<Place, PlaceUsage> {
        self.accounts.read().iter().map(|(place, account)| (*place, account.usage())).collect()
    }

    /// Resets every place's peak to its current usage.
    pub fn reset_peaks(&self) {
        self.accounts.read().values().for_each(|account| account.reset_peak());
    }

    fn account(&self, place: Place) -> Arc<Account> {
        if let Some(account) = self.accounts.read().get(&place) {
            return account.clone();
        }
        let new = || Arc::new(Account::new(place, self.budget.limit(place)));
        self.accounts.write().entry(place).or_insert_with(new).clone()
    }

    fn oldest_fence(&self, lane: Lane) -> Option<Fence> {
        self.retired[lane as usize].lock().front().map(|retired| retired.fence)
    }

    /// Releases the retired memory of a lane whose fence is at or before `reached`. The caller must hold the lane's
    /// lock in `reaping`.
    fn release_passed(&self, lane: Lane, reached: u64) -> Result<()> {
        loop {
            let mut passed = Vec::new();
            {
                let mut retired = self.retired[lane as usize].lock();
                while passed.len() < RELEASED_AT_ONCE
                    && retired.front().is_some_and(|oldest| oldest.fence.value <= reached)
                {
                    passed.extend(retired.pop_front().map(|retired| retired.page));
                }
            }
            if passed.is_empty() {
                return Ok(());
            }
            self.retired_count.fetch_sub(passed.len(), Ordering::AcqRel);
            self.release(passed)?;
        }
    }

    /// Releases memory that is no longer in use. Memory that the device fails to release stays counted.
    fn release(&self, mut pages: Vec<PageMemory>) -> Result<()> {
        let memory: Vec<_> = pages.iter().map(|page| (page.place(), page.memory)).collect();
        pages.iter_mut().for_each(|page| page.is_returned = true);
        let kept = self.device.release_all(&memory);
        let mut sums = AccountSums::default();
        for (index, page) in pages.iter().enumerate() {
            if kept.iter().any(|(kept, _)| *kept == index) {
                continue;
            }
            if page.is_lent() {
                self.lent.release_handle(self.lent.end(page.memory));
            } else {
                sums.add(page, |place, sum| self.account(place).released(sum.len));
            }
        }
        sums.end(|place, sum| self.account(place).released(sum.len));
        kept.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// The total count and length of consecutive pages with the same place and purpose.
#[derive(Clone, Copy)]
struct AccountSum {
    purpose: Purpose,
    count: u64,
    len: u64,
}

/// Sums pages by place and purpose. With the sums, an account is looked up once for thousands of pages.
#[derive(Default)]
struct AccountSums(Option<(Place, AccountSum)>);

impl AccountSums {
    /// Adds a page. If its place or purpose differs from those of the previous pages, calls `report_sum` with the total
    /// of the previous pages.
    fn add(&mut self, page: &PageMemory, report_sum: impl FnOnce(Place, AccountSum)) {
        let (place, purpose) = (page.place(), page.purpose);
        match &mut self.0 {
            Some((of, sum)) if *of == place && sum.purpose == purpose => {
                (sum.count, sum.len) = (sum.count + 1, sum.len + page.len);
            }
            before => {
                let new = (place, AccountSum { purpose, count: 1, len: page.len });
                if let Some((place, sum)) = before.replace(new) {
                    report_sum(place, sum);
                }
            }
        }
    }

    /// Calls `report_sum` with the total of the pages that were not reported yet.
    fn end(self, report_sum: impl FnOnce(Place, AccountSum)) {
        if let Some((place, sum)) = self.0 {
            report_sum(place, sum);
        }
    }
}

impl Drop for Arena {
    /// Releases retired memory, because the device may outlive the arena. If the device fails during the release, it
    /// keeps the memory, and the next call that uses the device reports the error.
    fn drop(&mut self) {
        if let Err(error) = self.reap_all() {
            tracing::warn!(%error, "retired page memory could not be released");
        }
        self.lent.drop_leaving(&self.device);
    }
}
