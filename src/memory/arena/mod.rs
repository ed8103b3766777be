//! Page memory: allocated within the budget, and given back only when no lane uses it.
//!
//! The page table owns one [`PageMemory`] for each page. When a page goes or moves, its memory is retired
//! with the fence of its last use and released once that fence has passed. Until then it counts against the
//! budget (I10), for it is still there. Nothing here is on disk: recovery allocates anew.
//!
//! The device may keep released memory for itself: [`Device::trim`] gives it back.

mod account;
mod lent;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::{PageId, Place};

use self::account::Account;
pub use self::account::{PlaceUsage, Purpose};
use self::lent::LentMemories;
use crate::base::allocation::make_room;
use crate::base::queue::Queue;
use crate::base::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::base::sync::{Condvar, Mutex, RwLock};
use crate::device::{Device, DeviceBytes, Fence, Lane, MemoryId, MemoryLink, MemoryOwner, Span};
use crate::error::{Error, Result};
use crate::options::Budget;

/// The lanes that never wait for a caller.
const OWN_LANES: [Lane; 4] = [Lane::Apply, Lane::Drain, Lane::Stage, Lane::Load];
/// The lanes to wait for where nothing may be waited for, not even for memory that the device keeps back.
const NO_LANES: [Lane; 0] = [];

/// Scratch longer than this comes in pieces of this length, which a GPU cuts from blocks that all allocations
/// share. A longer block would be one of its own, which serves no other length, and giving it back to the
/// driver waits for all work of the GPU. So the memory that scratch leaves behind never exceeds its own
/// limit.
const SCRATCH_PIECE_LEN: u64 = 16 << 20;
/// The most scratch of a place. A longer read goes to the host in lane order, 20 ms for this length on an
/// H200.
pub(crate) const SCRATCH_BYTES_MAX: u64 = 1 << 30;
/// The longest wait for scratch. Scratch is on its way to the host, which takes milliseconds. If that never
/// ends, the device has stopped, and the waiting thread learns it from its next call.
const SCRATCH_WAIT_MAX: Duration = Duration::from_secs(10);

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
    link: Arc<MemoryLink>,
}

/// The memory of one page. It is given back by [`Arena::retire`] or [`Arena::discard`], never by being
/// dropped: a drop cannot know which lane still uses it.
#[derive(Debug)]
pub struct PageMemory {
    memory: MemoryId,
    len: u64,
    /// The place, as two numbers: so it fills the gap that alignment leaves, and there is one of these for
    /// each page.
    place_ordinal: u32,
    place_kind: u8,
    purpose: Purpose,
    given_back: bool,
}

const _: () = assert!(size_of::<PageMemory>() == 24);

/// Bytes of the budget that are put by for allocations to come, so that these cannot fail half way for lack
/// of budget. Bytes left when it is dropped are free again.
pub struct Reservation<'a> {
    arena: &'a Arena,
    purpose: Purpose,
    left: Vec<(Arc<Account>, Place, AtomicU64)>,
    /// The lanes whose retired memory is waited for where memory is short. With none, only free memory is
    /// taken.
    awaited: &'static [Lane],
}

/// Scratch that snapshots gather into, and long reads. It takes all the room there is, so it must not keep an
/// allocation out. An allocation that would fit without it waits until it is given back, which never waits
/// for a commit. No scratch is given out meanwhile.
#[derive(Default)]
struct ScratchMemory {
    /// Claimed and allocated bytes of scratch.
    bytes: BTreeMap<Place, u64>,
    waiting: usize,
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
        let (place_kind, place_ordinal) = place.to_raw();
        Ok(PageMemory { memory, len, place_ordinal, place_kind, purpose: Purpose::Lent, given_back: false })
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
        let reserved = self.reserve(purpose, pages)?;
        for (place, len) in pages {
            match reserved.allocate(*place, *len) {
                Ok(page) => memory.push(page),
                Err(error) => {
                    memory.into_iter().try_for_each(|page| self.discard(page))?;
                    return Err(error);
                }
            }
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

    /// Whether this number of bytes would fit if nothing were retired, and nothing on its way to the host.
    fn fits_without_scratch(&self, place: Place, len: u64) -> bool {
        let scratch = self.scratch.lock().bytes.get(&place).copied();
        scratch.is_some_and(|scratch| self.account(place).fits_without_retired(len.saturating_sub(scratch)))
    }

    /// Scratch for a snapshot or a read: at least `len` bytes, in pieces of [`SCRATCH_PIECE_LEN`] or in one
    /// that is shorter. The caller submits to the lanes, so nothing is waited for: scratch is only the memory
    /// that the budget and the device have at once. None is given out while an allocation waits for scratch.
    ///
    /// # Errors
    /// `OverBudget`, also for more than [`SCRATCH_BYTES_MAX`] together; `OutOfMemory`, `PlaceUnavailable`, a
    /// device error. Nothing is allocated then.
    pub(crate) fn allocate_scratch(&self, place: Place, len: u64) -> Result<Vec<PageMemory>> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let piece_len = len.min(SCRATCH_PIECE_LEN);
        let whole_len = len.checked_next_multiple_of(piece_len).unwrap_or(u64::MAX);
        {
            let mut scratch = self.scratch.lock();
            let left = SCRATCH_BYTES_MAX - scratch.bytes.get(&place).copied().unwrap_or(0);
            if scratch.waiting > 0 || whole_len > left {
                let available = self.available(place).min(left);
                let budget = self.budget.limit(place);
                return Err(Error::OverBudget { place, asked: len, available, budget });
            }
            *scratch.bytes.entry(place).or_default() += whole_len;
        }
        let mut pieces = Vec::new();
        let allocated = self.reserve_awaiting(&NO_LANES, Purpose::Gather, &[(place, whole_len)]);
        let allocated = allocated.and_then(|reserved| {
            for _ in 0..whole_len / piece_len {
                pieces.push(reserved.allocate(place, piece_len)?);
            }
            Ok(())
        });
        match allocated {
            Ok(()) => Ok(pieces),
            Err(error) => {
                self.scratch_is_back(place, whole_len - piece_len * pieces.len() as u64);
                pieces.into_iter().try_for_each(|piece| self.discard(piece))?;
                Err(error)
            }
        }
    }

    fn scratch_is_back(&self, place: Place, len: u64) {
        let mut scratch = self.scratch.lock();
        if let Some(left) = scratch.bytes.get_mut(&place) {
            *left -= len;
            if *left == 0 {
                scratch.bytes.remove(&place);
            }
        }
        self.scratch_given_back.notify_all();
    }

    /// Gives memory back once `fence`, that of the last list that names it, has passed.
    pub fn retire(&self, page: PageMemory, fence: Fence) {
        let account = self.account(page.place());
        if page.is_lent() {
            account.given_up(page.len);
            self.lent.retire(page.memory);
        } else {
            account.retired(page.purpose, page.len);
        }
        let scratch = (page.purpose == Purpose::Gather).then_some((page.place(), page.len));
        self.retired_count.fetch_add(1, Ordering::AcqRel);
        self.retired[fence.lane as usize].lock().push_back(RetiredMemory { page, fence });
        if let Some((place, len)) = scratch {
            self.scratch_is_back(place, len);
        }
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
                account.retired(page.purpose, page.len);
                account.released(page.len);
            }
        }
        if page.purpose == Purpose::Gather {
            self.scratch_is_back(page.place(), page.len);
        }
        released
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
    /// A device error of a wait or a release.
    pub fn reap_all(&self) -> Result<()> {
        self.reap_awaiting(&Lane::ALL)
    }

    fn reap_awaiting(&self, lanes: &[Lane]) -> Result<()> {
        for lane in lanes {
            let _reaping = self.reaping[*lane as usize].lock();
            while let Some(retired) = self.next_retired(*lane, |_| true) {
                self.device.wait(retired.fence)?;
                self.release(retired)?;
            }
        }
        Ok(())
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

    /// Claims all or nothing.
    fn claim(
        &self,
        awaited: &'static [Lane],
        purpose: Purpose,
        sums: &BTreeMap<Place, u64>,
    ) -> Result<Reservation<'_>> {
        // A reservation that is dropped on the way puts back the bytes it has.
        let mut reservation =
            Reservation { arena: self, purpose, left: Vec::with_capacity(sums.len()), awaited };
        for (place, sum) in sums {
            let account = self.account(*place);
            account.claim(*sum)?;
            reservation.left.push((account, *place, AtomicU64::new(*sum)));
        }
        Ok(reservation)
    }

    fn next_retired(&self, lane: Lane, ready: impl Fn(Fence) -> bool) -> Option<RetiredMemory> {
        let mut retired = self.retired[lane as usize].lock();
        if !ready(retired.front()?.fence) {
            return None;
        }
        self.retired_count.fetch_sub(1, Ordering::AcqRel);
        retired.pop_front()
    }

    fn release(&self, retired: RetiredMemory) -> Result<()> {
        let mut page = retired.page;
        page.given_back = true;
        self.device.release(page.memory)?;
        if page.is_lent() {
            self.lent.let_go(self.lent.end(page.memory));
        } else {
            self.account(page.place()).released(page.len);
        }
        Ok(())
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

impl Reservation<'_> {
    /// Memory for a page, of unspecified content, out of the bytes that were put by. If the device is full,
    /// retired memory is released and the device is asked once more, except where nothing may be waited for.
    /// Several threads may take from one reservation.
    ///
    /// # Errors
    /// `OutOfMemory`, `PlaceUnavailable`, a device error. The bytes stay put by.
    ///
    /// # Panics
    /// If fewer bytes are left for the place.
    pub fn allocate(&self, place: Place, len: u64) -> Result<PageMemory> {
        let left = self.left.iter().find(|(_, reserved, _)| *reserved == place);
        let (account, _, left) = left.unwrap_or_else(|| panic!("nothing is reserved in place {place}"));
        let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(len));
        if let Err(left) = taken {
            panic!("{len} bytes of {left} that are left of a reservation in place {place}");
        }
        let memory = self.ask(place, len).inspect_err(|_| _ = left.fetch_add(len, Ordering::Relaxed))?;
        account.allocated(self.purpose, len);
        let (place_kind, place_ordinal) = place.to_raw();
        Ok(PageMemory { memory, len, place_ordinal, place_kind, purpose: self.purpose, given_back: false })
    }

    fn ask(&self, place: Place, len: u64) -> Result<MemoryId> {
        let Arena { device, .. } = self.arena;
        if self.awaited.is_empty() {
            return device.allocate_at_once(place, len);
        }
        match device.allocate(place, len) {
            Err(Error::OutOfMemory { .. }) => {
                self.arena.reap_awaiting(self.awaited)?;
                device.allocate(place, len)
            }
            other => other,
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.left.iter_mut().for_each(|(account, _, left)| account.unclaim(*left.get_mut()));
    }
}

impl PageMemory {
    /// The span of the whole page.
    #[must_use]
    pub fn span(&self) -> Span {
        Span { memory: self.memory, offset: 0, len: self.len }
    }

    /// The span of `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If they do not lie within the page: the caller checked that.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Span {
        let within = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(within, "bytes {offset}..+{len} are not within a page of {} bytes", self.len);
        Span { memory: self.memory, offset, len }
    }

    /// Whether it is a caller's. Then it holds whatever its last use left.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.purpose == Purpose::Lent
    }

    /// The place where the memory lies.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::from_raw(self.place_kind, self.place_ordinal).expect("the numbers of a place")
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
                place = %self.place(),
                len = self.len,
                "page memory dropped without being given back: it stays allocated and in the budget"
            );
        }
    }
}
