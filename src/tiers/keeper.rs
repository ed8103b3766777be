//! The thread that evicts pages so that part of each place stays free.
//!
//! The thread sleeps until a commit finds too little free memory in a place. The thread then processes the places from
//! last to first, so that the places below have free memory for pages that are evicted from a place above. An evicted
//! page is moved to the next place with enough free memory. Before a page is moved to disk, the thread writes an image
//! of the page, unless an image with exactly its bytes exists. The submission lock is not held during that write.
//!
//! A page that another batch changes in the meantime is in use, and is not evicted.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use remanent_format::{PageId, PageTable, Place};

use super::Tiers;
use super::residents::Residents;
use super::stats::TierCounts;
use crate::base::poison::PoisonOnPanic;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::{Condvar, Instant, Mutex, Rank, RwLock, threads};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::memory::arena::PlaceRoom;
use crate::versions::uses::{PageUse, PageUses};
use crate::write::batch::WriteBatch;
use crate::write::commit::Committer;

/// The maximum number of bytes of the pages that one batch evicts. A longer page is evicted alone.
const BATCH_BYTES: u64 = 32 << 20;
/// The maximum number of pages that one batch evicts.
const BATCH_PAGES: usize = 4096;
/// The number of consecutive batches without an evicted page after which the thread stops evicting from a place.
const FUTILE_BATCHES_MAX: usize = 3;
/// The number of unprocessed changes and reads of pages at which the thread is woken.
const UNPROCESSED_MIN: usize = 64 << 10;
/// The time for which the thread pauses after a round that could not free enough memory. During the pause, only a
/// commit that finds no room wakes the thread.
const PAUSE: Duration = Duration::from_millis(20);

/// The tiers of a store with their eviction policies. Callers request room from the keeper, and its thread evicts
/// pages.
pub(crate) struct TierKeeper {
    engine: Arc<Engine>,
    committer: Arc<Committer>,
    tiers: Vec<Tier>,
    uses: Arc<PageUses>,
    residents: Mutex<Residents>,
    calls: Mutex<Calls>,
    called: Condvar,
    round_ended: Condvar,
    /// A lock that keeps concurrent moves from starving each other. Calls that move pages lock it for reading, because
    /// their pages cannot be evicted in the meantime. A call that failed for lack of memory because of other moves
    /// locks it for writing. No caller-supplied code runs while the lock is held.
    pub moves_in_progress: RwLock<()>,
    counts: Arc<TierCounts>,
}

/// A place in the order of tiers.
struct Tier {
    place: Place,
    room: PlaceRoom,
    /// The number of bytes that the thread keeps free in this place. 0 in the last place.
    free_bytes: u64,
}

/// The requests to the thread, and the results of its rounds of eviction.
#[derive(Default)]
struct Calls {
    /// Whether the thread must start a round because a place is short of free memory.
    is_called: bool,
    /// The number of bytes for which commits wait, by the index of the tier.
    requested: HashMap<usize, u64>,
    /// The number of rounds that have begun.
    begun: u64,
    /// The number of rounds that have ended.
    ended: u64,
    /// The indices of the tiers from which the last round could evict no more pages.
    stuck: Vec<usize>,
    /// The error of the last round, which the next waiting call returns.
    failure: Option<Error>,
    /// The time before which the thread starts no round without a waiting commit.
    not_before: Option<Instant>,
    is_over: bool,
}

/// The running thread of a [`TierKeeper`]. The store owns this handle, and dropping the handle ends the thread.
pub(crate) struct TierThread {
    keeper: Arc<TierKeeper>,
    thread: Option<JoinHandle<()>>,
}

impl TierKeeper {
    /// Returns the pages that exist when the store is opened, with their last change as their last use.
    pub fn residents(options: &Tiers, table: &PageTable) -> Residents {
        let places = options.places();
        let left = &places[..places.len() - 1];
        let mut residents =
            Residents::new(left.iter().map(|place| (*place, options.new_policy(*place))).collect());
        let mut pages: Vec<_> = table.lens().zip(table.lsns()).map(|(page, (_, lsn))| (lsn, page)).collect();
        pages.sort_unstable_by_key(|(lsn, (page, ..))| (*lsn, *page));
        for (_, (page, place, len)) in pages {
            residents.record(PageUse::Changed(page, Some((place, len))));
        }
        residents
    }

    /// Creates a keeper of the places in the options, with the existing pages.
    pub fn new(
        engine: Arc<Engine>,
        committer: Arc<Committer>,
        options: &Tiers,
        uses: Arc<PageUses>,
        residents: Residents,
        counts: Arc<TierCounts>,
    ) -> Self {
        let places = options.places();
        let mut tiers = Vec::new();
        for (at, place) in places.iter().enumerate() {
            let room = engine.arena.room(*place);
            let is_last = at + 1 == places.len();
            let free_bytes = if is_last { 0 } else { options.free_bytes(room.budget()) };
            tiers.push(Tier { place: *place, room, free_bytes });
        }
        Self {
            engine,
            committer,
            tiers,
            uses,
            residents: Mutex::of_rank(Rank::STATE, residents),
            calls: Mutex::of_rank(Rank::STATE, Calls::default()),
            called: Condvar::new(),
            round_ended: Condvar::new(),
            moves_in_progress: RwLock::of_rank(Rank::CALL, ()),
            counts,
        }
    }

    /// Wakes the thread if less than half of a place's `free_bytes` is free.
    pub fn wake_if_short(&self) {
        let is_short = |tier: &Tier| tier.room.free_soon() < tier.free_bytes / 2;
        if !self.tiers.iter().any(is_short) && self.uses.waiting() < UNPROCESSED_MIN {
            return;
        }
        let mut calls = self.calls.lock();
        if calls.not_before.is_some_and(|time| Instant::now() < time) || calls.is_called {
            return;
        }
        calls.is_called = true;
        self.called.notify_all();
    }

    /// Returns whether pages can be evicted from `place`, and the budget of `place` is at least `bytes` bytes.
    pub fn may_make_room(&self, place: Place, bytes: u64) -> bool {
        self.tier_with_budget(place, bytes).is_some()
    }

    /// Returns the index of the tier of `place`, if pages can be evicted from `place` and its budget is at least
    /// `bytes` bytes.
    fn tier_with_budget(&self, place: Place, bytes: u64) -> Option<usize> {
        let mut left = self.tiers[..self.tiers.len() - 1].iter();
        left.position(|tier| tier.place == place && bytes <= tier.room.budget())
    }

    /// Returns the first place below `place` with a budget of at least `bytes` bytes, or `None` if the budget of
    /// `place` suffices.
    pub fn place_below(&self, place: Place, bytes: u64) -> Option<Place> {
        let at = self.tiers.iter().position(|tier| tier.place == place)?;
        let can_have = |tier: &&Tier| tier.place == Place::Disk || bytes <= tier.room.budget();
        self.tiers[at..].iter().find(can_have).map(|tier| tier.place).filter(|below| *below != place)
    }

    /// Waits until the thread has freed `bytes` bytes in a place. Other threads may use the memory before the caller
    /// does. Returns `false` if no page can be evicted from the place.
    ///
    /// # Errors
    /// The error that prevented the thread from moving pages.
    pub fn make_room(&self, place: Place, bytes: u64) -> Result<bool> {
        let Some(tier) = self.tier_with_budget(place, bytes) else { return Ok(false) };
        let room = &self.tiers[tier].room;
        let begun = Instant::now();
        let mut calls = self.calls.lock();
        let requested = calls.requested.entry(tier).or_default();
        *requested = requested.saturating_add(bytes);
        self.called.notify_all();
        // A round that is already in progress may have begun before this request, so the next round counts.
        let round = calls.begun + 1;
        while calls.ended < round && !calls.is_over {
            self.round_ended.wait(&mut calls);
        }
        let failure = calls.failure.take();
        let is_stuck = calls.stuck.contains(&tier);
        drop(calls);
        self.counts.at(place, |counts| {
            counts.waits += 1;
            counts.waited += begun.elapsed();
        });
        self.engine.poison.check()?;
        match failure {
            Some(error) => Err(error),
            None => Ok(!is_stuck || room.free_soon() >= bytes),
        }
    }

    /// Prevents the eviction of `pages` until [`release`](Self::release), while a call moves other pages to the same
    /// place.
    pub fn hold(&self, pages: &[PageId]) {
        self.residents.lock().hold(pages);
    }

    /// Allows the eviction of pages that [`hold`](Self::hold) protected.
    pub fn release(&self, pages: &[PageId]) {
        self.residents.lock().release(pages);
    }

    /// Protects `pages` from eviction while other pages can be evicted, until [`unkeep`](Self::unkeep).
    pub fn keep(&self, pages: &[PageId]) {
        self.residents.lock().keep(pages);
    }

    /// Ends the protection of pages by [`keep`](Self::keep).
    pub fn unkeep(&self, pages: &[PageId]) {
        self.residents.lock().unkeep(pages);
    }

    fn live(&self) {
        let mut calls = self.calls.lock();
        loop {
            while !calls.is_called && calls.requested.is_empty() && !calls.is_over {
                self.called.wait(&mut calls);
            }
            if calls.is_over {
                return;
            }
            calls.is_called = false;
            let requested = std::mem::take(&mut calls.requested);
            calls.begun += 1;
            drop(calls);
            let outcome = self.round(&requested);
            calls = self.calls.lock();
            calls.ended = calls.begun;
            calls.stuck.clear();
            calls.not_before = match outcome {
                Ok(stuck) => {
                    calls.stuck = stuck;
                    (!calls.stuck.is_empty()).then(|| Instant::now() + PAUSE)
                }
                Err(error) => {
                    // Any other error has poisoned the store, and later calls return it.
                    calls.is_over = !error.is_passing();
                    if error.is_passing() {
                        tracing::warn!(%error, "pages could not be moved to a slower place");
                    }
                    calls.failure = Some(error);
                    Some(Instant::now() + PAUSE)
                }
            };
            self.round_ended.notify_all();
        }
    }

    /// Evicts pages from each place until its `free_bytes`, or the requested number of bytes if larger, are free.
    /// Returns the tiers from which no more pages can be evicted.
    fn round(&self, requested: &HashMap<usize, u64>) -> Result<Vec<usize>> {
        let _span = tracing::debug_span!("make_room").entered();
        let mut stuck = Vec::new();
        for (at, tier) in self.tiers[..self.tiers.len() - 1].iter().enumerate().rev() {
            let requested = requested.get(&at).copied().unwrap_or(0).min(tier.room.budget());
            if !self.free_up(at, tier.free_bytes.max(requested))? {
                stuck.push(at);
            }
        }
        Ok(stuck)
    }

    /// Evicts pages from a tier until `goal` bytes are free. Returns `false` if no more pages can be evicted. Also
    /// stops after several batches in which every victim was changed by other calls, because such pages are in use.
    fn free_up(&self, at: usize, goal: u64) -> Result<bool> {
        let mut futile = 0;
        while futile < FUTILE_BATCHES_MAX {
            self.update_policies();
            let free = self.tiers[at].room.free_soon();
            if free >= goal {
                break;
            }
            let leases = &self.engine.leases;
            let bytes = (goal - free).min(BATCH_BYTES);
            let may_leave = |page| !leases.is_used(page);
            let victims = self.residents.lock().choose(at, (bytes, BATCH_PAGES), may_leave);
            if victims.is_empty() {
                return Ok(false);
            }
            match self.move_down(at, victims)? {
                None => return Ok(false),
                Some(0) => futile += 1,
                Some(_) => futile = 0,
            }
        }
        Ok(true)
    }

    /// Reports the recorded changes and reads of pages to the eviction policies.
    fn update_policies(&self) {
        let uses = self.uses.take();
        let mut residents = self.residents.lock();
        uses.into_iter().for_each(|page_use| residents.record(page_use));
    }

    /// Moves pages from a tier to the next place that has free memory for them. Pages that are not moved are returned
    /// to the policy. Returns the number of moved pages, or `None` if no place has enough memory.
    fn move_down(&self, at: usize, mut pages: Vec<(PageId, u64)>) -> Result<Option<usize>> {
        // Pages in caller-owned memory are not evicted. This memory does not count toward the budget, and the caller
        // expects the pages to stay there.
        let requested: Vec<PageId> = pages.iter().map(|(page, _)| *page).collect();
        let lent = self.engine.applier.turn(move |turn| {
            turn.intact()?;
            let is_lent =
                |page: &PageId| turn.applied.memory.get(*page).is_some_and(|memory| memory.is_lent());
            Ok(requested.into_iter().filter(is_lent).collect::<Vec<_>>())
        })?;
        pages.retain(|(page, _)| !lent.contains(page));
        let bytes = pages.iter().map(|(_, len)| len).sum();
        match self.room_below(at, bytes) {
            Ok(Some(target)) => self.move_to(self.tiers[at].place, target, pages).map(Some),
            none => {
                self.stay(&pages);
                none.map(|_| None)
            }
        }
    }

    /// Returns the first place below tier `at` with room for `bytes` bytes, or `None` if no such place has room.
    fn room_below(&self, at: usize, bytes: u64) -> Result<Option<Place>> {
        for below in at + 1..self.tiers.len() {
            if self.has_room(below, bytes)? {
                return Ok(Some(self.tiers[below].place));
            }
        }
        Ok(None)
    }

    /// Returns whether a tier has room for `bytes` bytes, after evicting pages from the tier if needed.
    fn has_room(&self, at: usize, bytes: u64) -> Result<bool> {
        let Tier { place, room, .. } = &self.tiers[at];
        if *place == Place::Disk {
            return Ok(true);
        }
        if bytes > room.budget() {
            return Ok(false);
        }
        if at + 1 < self.tiers.len() {
            self.free_up(at, bytes)?;
        }
        Ok(room.free_soon() >= bytes)
    }

    /// Moves pages from one place to another with one batch. Pages that are changed or used in the meantime are not
    /// moved. Returns the number of moved pages.
    fn move_to(&self, from: Place, to: Place, mut pages: Vec<(PageId, u64)>) -> Result<usize> {
        let begun = Instant::now();
        loop {
            let mut batch = WriteBatch::default();
            pages.retain(|(page, _)| {
                let info = self.engine.versions.page(*page, |seen| seen.info(*page));
                let Some(info) = info.filter(|info| info.place == from) else { return false };
                batch.expect_epoch(*page, info.epoch).move_to(*page, to);
                true
            });
            if pages.is_empty() {
                return Ok(0);
            }
            match self.committer.submit(&batch) {
                Ok((point, _)) => {
                    // The memory of the moved pages is free only after the applier has applied the batch.
                    self.engine.applier.wait_applied(point.lsn)?;
                    let moved: Vec<_> = pages.iter().map(|(_, len)| (from, *len)).collect();
                    self.counts.moved(to, &moved, begun.elapsed());
                    self.counts.at(from, |counts| counts.evictions += pages.len() as u64);
                    return Ok(pages.len());
                }
                Err(Error::Conflict { page, .. } | Error::UnknownPage { page } | Error::Leased { page }) => {
                    let stays = pages.extract_if(.., |(other, _)| *other == page).collect::<Vec<_>>();
                    self.stay(&stays);
                }
                Err(Error::OverBudget { .. }) => {
                    // Other threads have taken the free memory, so the pages stay where they are.
                    self.stay(&pages);
                    return Ok(0);
                }
                Err(error) => {
                    self.stay(&pages);
                    return Err(error);
                }
            }
        }
    }

    fn stay(&self, pages: &[(PageId, u64)]) {
        let mut residents = self.residents.lock();
        pages.iter().for_each(|(page, _)| residents.return_to_policy(*page));
    }
}

impl TierThread {
    /// Starts the thread of a keeper.
    ///
    /// # Errors
    /// [`Error::Io`] if the thread cannot be started.
    pub fn start(keeper: Arc<TierKeeper>) -> Result<Self> {
        let poisons = PoisonOnPanic { poison: keeper.engine.poison.clone(), thread: "the thread for tiers" };
        let life = keeper.clone();
        let thread = threads::start("remanent-tiers", move || {
            let _poisons = poisons;
            let _over = EndCallsOnDrop(&life);
            life.live();
        });
        let thread = thread.map_err(|error| Error::thread("the thread for tiers", error))?;
        Ok(Self { keeper, thread: Some(thread) })
    }
}

/// A guard that wakes the calls waiting for room when the thread ends.
struct EndCallsOnDrop<'k>(&'k TierKeeper);

impl Drop for EndCallsOnDrop<'_> {
    fn drop(&mut self) {
        self.0.calls.lock().is_over = true;
        self.0.round_ended.notify_all();
    }
}

impl Drop for TierThread {
    fn drop(&mut self) {
        self.keeper.calls.lock().is_over = true;
        self.keeper.called.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for tiers panicked");
        }
    }
}
