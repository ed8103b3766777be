//! Page memory: allocated within the budget, and given back only when no lane uses it.
//!
//! The page table owns one [`PageMemory`] for each page. When a page goes or moves, its memory is retired
//! with the fence of its last use and released once that fence has passed. Until then it counts against the
//! budget (I10), for it is still there. Nothing here is on disk: recovery allocates anew.
//!
//! The device may keep released memory for itself: [`Device::trim`] gives it back.

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
pub(crate) use self::files::{FileTarget, FileWay, RegisteredFile};
use self::lent::LentMemories;
pub use self::page_memory::PageMemory;
pub use self::reservation::Reservation;
use self::scratch::{SCRATCH_WAIT_MAX, ScratchMemory};
use crate::base::allocation::make_room;
use crate::base::queue::Queue;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::{Condvar, Mutex, RwLock};
use crate::device::{Device, DeviceBytes, Fence, Lane, MemoryLink, MemoryOwner};
use crate::error::{Error, Result};
use crate::options::Budget;

/// The lanes that never wait for a caller.
const OWN_LANES: [Lane; 4] = [Lane::Apply, Lane::Drain, Lane::Stage, Lane::Load];

/// The page memory of one device, under one budget. Shared by threads.
pub struct Arena {
    device: Arc<dyn Device>,
    budget: Budget,
    accounts: RwLock<BTreeMap<Place, Arc<Account>>>,
    /// Retired memory by lane, in the order of retirement. An entry after one with a later fence waits for
    /// it, which costs time and nothing else.
    retired: [Mutex<Queue<RetiredMemory>>; Lane::ALL.len()],
    retired_count: AtomicUsize,
    /// The scratch in use, and the threads that wait for it.
    scratch: Mutex<ScratchMemory>,
    scratch_given_back: Condvar,
    /// Held while reaping a lane, so that a thread that asks how much memory is free waits until the release
    /// is counted. There is one lock for each lane: a thread that waits for callers does not hold up threads
    /// that reap the other lanes.
    reaping: [Mutex<()>; Lane::ALL.len()],
    /// Callers' memory in which pages live.
    lent: LentMemories,
    /// Files that the device copies to.
    files: RegisteredFiles,
    link: Arc<MemoryLink>,
}

/// Memory of a page that is gone, for a caller.
pub enum HandedOut {
    /// The caller's own, as it lent it.
    Lent(DeviceBytes),
    /// The store's, to be given back like any other.
    Own(PageMemory),
}

struct RetiredMemory {
    page: PageMemory,
    fence: Fence,
}

/// Memories that are released at once, so that the lists of them stay short.
const RELEASED_AT_ONCE: usize = 1024;

impl Arena {
    /// An arena without pages.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, budget: Budget) -> Self {
        Self {
            device,
            budget,
            accounts: RwLock::default(),
            retired: Default::default(),
            retired_count: AtomicUsize::new(0),
            scratch: Mutex::default(),
            scratch_given_back: Condvar::new(),
            reaping: Default::default(),
            lent: LentMemories::default(),
            files: RegisteredFiles::default(),
            link: Arc::default(),
        }
    }

    /// Takes memory of the caller's for a page. It is beside the budget. Where a page gave up a part of it,
    /// this waits until no lane uses that any more. No stream uses the memory, and no work of it is under
    /// way.
    ///
    /// # Errors
    /// `MemoryInUse` if a page lives in a part of it, or gave it up just now; a device error.
    pub fn lend(&self, page: PageId, bytes: &DeviceBytes) -> Result<PageMemory> {
        let memory = match bytes.lend(page)? {
            Some(memory) => memory,
            None => {
                self.reap_all()?;
                let in_use =
                    || Error::MemoryInUse { len: bytes.byte_len(), page: bytes.page().unwrap_or(page) };
                bytes.lend(page)?.ok_or_else(in_use)?
            }
        };
        self.lent.keep(memory, bytes.clone());
        let (place, len) = (bytes.place(), bytes.byte_len());
        self.account(place).lent(len);
        Ok(PageMemory::new(memory, place, len, Purpose::Lent))
    }

    /// Takes the memory of a page that is gone for a caller: no list names it any more. Memory that a caller
    /// lent comes back as the handle that it lent; all other memory gets a name that no reader knows, and
    /// stays counted.
    ///
    /// # Errors
    /// A device error; the memory then stays counted.
    pub fn hand_out(&self, mut page: PageMemory) -> Result<HandedOut> {
        if page.is_lent() {
            page.given_back = true;
            self.device.release(page.memory)?;
            self.account(page.place()).given_up(page.len);
            return Ok(HandedOut::Lent(self.lent.end(page.memory)));
        }
        match self.device.rename(page.memory) {
            Ok(renamed) => {
                self.account(page.place()).handed_out(page.purpose, page.len);
                (page.memory, page.purpose) = (renamed, Purpose::Caller);
                Ok(HandedOut::Own(page))
            }
            Err(error) => {
                page.given_back = true;
                Err(error)
            }
        }
    }

    /// The link between the store and memory that callers have of it.
    pub fn link(&self) -> &Arc<MemoryLink> {
        &self.link
    }

    /// Drops the owner of memory that callers' streams used, after this fence, as
    /// [`drop_let_go`](Self::drop_let_go) does.
    pub fn keep_until(&self, owner: MemoryOwner, fence: Fence) {
        self.lent.keep_until(owner, fence);
    }

    /// Drops callers' memory in which no page lives any more. That may run a caller's code, so it is for
    /// threads of callers, and for none that holds a lock.
    pub fn drop_let_go(&self) {
        self.lent.drop_let_go(&*self.device);
    }

    #[cfg(test)]
    /// Memory for a page, of unspecified content. A length of 0 costs nothing of the budget.
    ///
    /// Where only retired memory stands in the way, this waits for its fences rather than fail: whether
    /// a batch fits must not depend on how far the lanes have come.
    ///
    /// # Errors
    /// `OverBudget`, `OutOfMemory`, `PlaceUnavailable`, a device error. Nothing is allocated then.
    pub fn allocate(&self, purpose: Purpose, place: Place, len: u64) -> Result<PageMemory> {
        self.reserve(purpose, &[(place, len)])?.allocate(place, len)
    }

    /// As [`allocate`](Self::allocate), for a thread that submits to the lanes. It waits only for lanes that
    /// never wait for a caller. A caller's stream may stand still, and all batches would stand still with it.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    pub fn allocate_for_lane(&self, purpose: Purpose, place: Place, len: u64) -> Result<PageMemory> {
        self.reserve_awaiting(&OWN_LANES, purpose, &[(place, len)])?.allocate(place, len)
    }

    /// Memory for several pages, in their order: for all of them or none. The budget is checked on all of
    /// them together before the first is allocated.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate); `OverBudget` tells the sum that they ask of a place.
    pub fn allocate_all(&self, purpose: Purpose, pages: &[(Place, u64)]) -> Result<Vec<PageMemory>> {
        let mut memory = Vec::new();
        make_room(&mut memory, pages.len())?;
        if let Err(error) = self.reserve(purpose, pages)?.allocate_all(pages, &mut memory) {
            memory.into_iter().try_for_each(|page| self.discard(page))?;
            return Err(error);
        }
        Ok(memory)
    }

    /// Puts by the bytes that these allocations take of the budget, each by its place and its length. Where
    /// only retired memory stands in the way, this waits for its fences and asks once more.
    ///
    /// # Errors
    /// `OverBudget` tells the sum that they ask of a place, and the bytes left there; a device error. Nothing
    /// is put by then.
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
        // Also where nothing is retired any more: another thread may have taken the last of it off the queue,
        // and be releasing it just now. A batch that came in that moment was refused.
        let claimed = match self.claim(awaited, purpose, &sums) {
            Err(Error::OverBudget { place, asked, .. })
                if self.account(place).fits_without_retired(asked) =>
            {
                self.reap_awaiting(awaited)?;
                self.claim(awaited, purpose, &sums)
            }
            claimed => claimed,
        };
        // Files are registered only to be fast. Scratch is refused rather: it is for a snapshot to them.
        let claimed = match claimed {
            Err(Error::OverBudget { place: Place::Pinned, asked, available, .. })
                if purpose != Purpose::Gather && self.give_up_files(asked.saturating_sub(available)) =>
            {
                self.claim(awaited, purpose, &sums)
            }
            claimed => claimed,
        };
        match claimed {
            Err(Error::OverBudget { place, asked, .. })
                if purpose != Purpose::Gather && self.fits_without_scratch(place, asked) =>
            {
                let mut scratch = self.scratch.lock();
                scratch.waiting += 1;
                let is_used = |scratch: &mut ScratchMemory| !scratch.bytes.is_empty();
                self.scratch_given_back.wait_while_for(&mut scratch, is_used, SCRATCH_WAIT_MAX);
                drop(scratch);
                let claimed = self.reap_awaiting(awaited).and_then(|()| self.claim(awaited, purpose, &sums));
                self.scratch.lock().waiting -= 1;
                claimed
            }
            claimed => claimed,
        }
    }

    /// Gives memory back once `fence`, that of the last list that names it, has passed.
    pub fn retire(&self, page: PageMemory, fence: Fence) {
        self.retire_all([page], fence);
    }

    /// As [`retire`](Self::retire), for the memory of several pages.
    pub fn retire_all(&self, pages: impl IntoIterator<Item = PageMemory>, fence: Fence) {
        let mut scratch = Vec::new();
        let mut sums = AccountSums::default();
        let mut queue = self.retired[fence.lane as usize].lock();
        for page in pages {
            if page.is_lent() {
                self.account(page.place()).given_up(page.len);
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
        // Counted as retired while no thread can take it off the queue, and count it as released.
        sums.end(|place, sum| self.count_retired(place, sum));
        drop(queue);
        scratch.into_iter().for_each(|(place, len)| self.scratch_is_back(place, len));
    }

    fn count_retired(&self, place: Place, AccountSum { purpose, count, len }: AccountSum) {
        self.account(place).retired(purpose, count, len);
    }

    /// Gives back memory that no pending list names: no list ever named it, or the fences of all that did
    /// were waited for.
    ///
    /// # Errors
    /// A device error; the memory then stays counted, for it is not known to be free.
    pub fn discard(&self, mut page: PageMemory) -> Result<()> {
        page.given_back = true;
        let released = self.device.release(page.memory);
        if released.is_ok() {
            let account = self.account(page.place());
            if page.is_lent() {
                account.given_up(page.len);
                self.lent.let_go(self.lent.end(page.memory));
            } else {
                account.retired(page.purpose, 1, page.len);
                account.released(page.len);
            }
        }
        if page.purpose == Purpose::Gather {
            self.scratch_is_back(page.place(), page.len);
        }
        released
    }

    /// As [`discard`](Self::discard), for callers that have an error to tell already, or none to tell it to.
    /// What the device does not take back stays counted, and a warning says so.
    pub fn discard_all(&self, memory: impl IntoIterator<Item = PageMemory>) {
        for page in memory {
            if let Err(error) = self.discard(page) {
                tracing::warn!(%error, "cannot give page memory back");
            }
        }
    }

    /// Releases retired memory whose fence has passed. Does not wait, neither for a fence nor for another
    /// thread that reaps already.
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

    /// How much room a place has, from now on.
    pub(crate) fn room(&self, place: Place) -> PlaceRoom {
        PlaceRoom::new(self.account(place))
    }

    /// The limit of a place in bytes; `u64::MAX` if it has none.
    #[must_use]
    pub fn budget(&self, place: Place) -> u64 {
        self.budget.limit(place)
    }

    /// Bytes of the budget that are left in a place, retired memory counted as used.
    #[must_use]
    pub fn available(&self, place: Place) -> u64 {
        self.account(place).available()
    }

    #[cfg(test)]
    /// The use of one place's budget.
    #[must_use]
    pub fn usage(&self, place: Place) -> PlaceUsage {
        self.account(place).usage()
    }

    /// The use of each place that memory was ever asked of.
    #[must_use]
    pub fn usages(&self) -> BTreeMap<Place, PlaceUsage> {
        self.accounts.read().iter().map(|(place, account)| (*place, account.usage())).collect()
    }

    /// Lets every place's peak begin anew, at what is in use now.
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

    /// Releases the retired memory of a lane that has come to this fence. The caller holds the lane's lock of
    /// reaping.
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

    /// Gives back memory that nothing uses. What the device does not take back stays counted.
    fn release(&self, mut pages: Vec<PageMemory>) -> Result<()> {
        let memory: Vec<_> = pages.iter().map(|page| (page.place(), page.memory)).collect();
        pages.iter_mut().for_each(|page| page.given_back = true);
        let mut kept = Vec::new();
        self.device.release_all(&memory, &mut |index, error| kept.push((index, error)));
        let mut sums = AccountSums::default();
        for (index, page) in pages.iter().enumerate() {
            if kept.iter().any(|(kept, _)| *kept == index) {
                continue;
            }
            if page.is_lent() {
                self.lent.let_go(self.lent.end(page.memory));
            } else {
                sums.add(page, |place, sum| self.account(place).released(sum.len));
            }
        }
        sums.end(|place, sum| self.account(place).released(sum.len));
        kept.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// What pages that follow each other have together, of one place and for one purpose.
#[derive(Clone, Copy)]
struct AccountSum {
    purpose: Purpose,
    count: u64,
    len: u64,
}

/// Sums over pages, so that an account need not be looked up for each of thousands.
#[derive(Default)]
struct AccountSums(Option<(Place, AccountSum)>);

impl AccountSums {
    /// Adds a page. Where it is of another place or purpose, `told` hears of those before it.
    fn add(&mut self, page: &PageMemory, told: impl FnOnce(Place, AccountSum)) {
        let (place, purpose) = (page.place(), page.purpose);
        match &mut self.0 {
            Some((of, sum)) if *of == place && sum.purpose == purpose => {
                (sum.count, sum.len) = (sum.count + 1, sum.len + page.len);
            }
            before => {
                let new = (place, AccountSum { purpose, count: 1, len: page.len });
                if let Some((place, sum)) = before.replace(new) {
                    told(place, sum);
                }
            }
        }
    }

    /// Tells of the last pages.
    fn end(self, told: impl FnOnce(Place, AccountSum)) {
        if let Some((place, sum)) = self.0 {
            told(place, sum);
        }
    }
}

impl Drop for Arena {
    /// Releases retired memory, because the device may outlive the arena. A device that fails now keeps the
    /// memory; its error was, or will be, reported by the next call that uses it.
    fn drop(&mut self) {
        if let Err(error) = self.reap_all() {
            tracing::warn!(%error, "retired page memory could not be released");
        }
        self.lent.drop_leaving(&*self.device);
    }
}
