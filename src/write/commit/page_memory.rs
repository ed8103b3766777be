//! Allocates page memory for a batch: for pages that it creates, resizes or moves, and for leased pages that it
//! changes.
//!
//! The memory is allocated before an Lsn is assigned, so that a batch without room fails and changes nothing (I10).
//! Once the batch is logged, it must be applied. The places of pages are read without the lock, and checked again under
//! the submission lock.

use std::collections::{BTreeMap, HashMap};

use remanent_format::limits::PAGE_LEN_MAX;
use remanent_format::op::{Op, OpAt};
use remanent_format::{PageId, PageTable, Place};

use super::Committer;
use crate::applier::Provision;
use crate::base::allocation::{collected, insert, make_room, map_of};
use crate::device::{CommandList, DeviceBytes, Lane, MemoryId};
use crate::error::{Error, Refused, Result};
use crate::memory::arena::{PageMemory, Purpose};

impl Committer {
    /// Allocates page memory for the creates, resizes and moves of a batch, in order. A new page uses its memory from
    /// `lent`, or from `ready`, where the memory already contains the page's bytes. Returns the operation that needs
    /// each piece of memory, in the same order as `provision.memory`.
    pub(super) fn allocate(
        &self,
        provision: &mut Provision,
        ops: &[OpAt<'_>],
        lent: &LentPages<'_>,
        ready: &mut ReadyMemory<'_>,
        locked: Option<&PageTable>,
    ) -> Result<Vec<RequiredMemory>> {
        // Places are read without the lock, unless the caller holds it. `append` repeats this check under the lock, and
        // finds the draft stale if a page has moved since.
        let locations = match locked {
            Some(table) => required_memory(ops, table)?,
            None if ops.iter().any(|at| may_take_memory(&at.op)) => {
                required_memory(ops, &self.submitted.lock())?
            }
            None => Vec::new(),
        };
        if locations.is_empty() {
            return Ok(locations);
        }
        let in_lent = |made: &RequiredMemory| lent.get(&made.new_page?).copied().zip(made.new_page);
        let is_ready = |made: &RequiredMemory| made.new_page.is_some_and(|page| ready.has(page));
        let is_own = |made: &&RequiredMemory| in_lent(made).is_none() && !is_ready(made);
        let own = collected(locations.iter().filter(is_own).map(|made| made.at))?;
        // This can fail, so it precedes the allocation, whose memory would otherwise have to be freed.
        let Provision { memory, filled, .. } = provision;
        filled.add_images(ready.iter())?;
        let refused = |_| Error::no_memory((locations.len() * size_of::<PageMemory>()) as u64);
        memory.try_reserve_exact(locations.len()).map_err(refused)?;
        let mut own = self.allocate_all(Purpose::Page, &own)?.into_iter();
        for made in &locations {
            let of_page = match (in_lent(made), made.new_page.and_then(|page| ready.take(page))) {
                (Some((bytes, page)), _) => self.lend(page, bytes),
                (None, Some(ready)) => Ok(ready),
                (None, None) => Ok(own.next().expect("allocated for each that has none")),
            };
            match of_page {
                Ok(of_page) => memory.push_back(of_page),
                Err(error) => {
                    self.engine.arena.discard_all(own);
                    return Err(error);
                }
            }
        }
        // I10: the memory of each page has the page's place and length.
        assert!(memory.iter().map(location).eq(locations.iter().map(|made| made.at)));
        Ok(locations)
    }

    /// Uses caller-owned memory for a page. An earlier page in that memory may have been deleted by a logged batch that
    /// is not applied yet. If the memory is in use, this function therefore waits for the applier and tries again.
    fn lend(&self, page: PageId, bytes: &DeviceBytes) -> Result<PageMemory> {
        match self.engine.arena.lend(page, bytes) {
            Err(Error::Refused(Refused::MemoryInUse { .. })) => {
                self.engine.applier.turn(|_| Ok(()))?;
                self.engine.arena.lend(page, bytes)
            }
            lent => lent,
        }
    }

    /// Allocates page memory from the arena. If there is no room, waits until the applier has applied all batches, and
    /// retries.
    pub(super) fn allocate_all(&self, purpose: Purpose, pages: &[(Place, u64)]) -> Result<Vec<PageMemory>> {
        match self.engine.arena.allocate_all(purpose, pages) {
            // Logged deletes that the applier has not reached still occupy memory. Waiting for them makes the outcome
            // independent of the applier's progress.
            Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => {
                // The empty closure runs after all earlier batches are applied, so the memory of pages that they
                // deleted is free.
                self.engine.applier.turn(|_| Ok(()))?;
                self.engine.arena.allocate_all(purpose, pages)
            }
            other => other,
        }
    }

    /// Allocates the memory to which leased pages move when the batch changes them. Allocates memory for all of these
    /// pages or for none.
    pub(super) fn relocations(
        &self,
        ops: &[OpAt<'_>],
        locked: Option<&PageTable>,
    ) -> Result<Vec<(PageId, PageMemory)>> {
        // Leases are read without the lock. `append` detects a lease that is taken later, and the draft is prepared
        // again.
        let mut relocations = Vec::new();
        for page in self.engine.leases.leased(changed_in_place(ops)) {
            let wanted = locked
                .map_or_else(|| location_in(&self.submitted.lock(), page), |table| location_in(table, page));
            // If the page does not exist, the operation is rejected later, when the changes are planned.
            let Some(wanted) = wanted.filter(|(place, _)| *place != Place::Disk) else { continue };
            match self.allocate_all(Purpose::Relocation, &[wanted]) {
                Ok(relocation) => {
                    relocations.extend(relocation.into_iter().map(|relocation| (page, relocation)))
                }
                // The page has moved to other memory since, so it is no longer leased and needs no relocation.
                Err(_) if self.engine.leases.leased([page]).is_empty() => {}
                Err(error) => {
                    self.engine.arena.discard_all(relocations.into_iter().map(|(_, memory)| memory));
                    return Err(error);
                }
            }
        }
        Ok(relocations)
    }

    /// Frees memory that command lists in flight may use, after these lists are complete.
    pub(super) fn discard_filling(&self, memory: impl IntoIterator<Item = PageMemory>) {
        let device = &*self.engine.device;
        // A lane (device queue) runs its lists in order, so an empty list completes after all lists that may use the
        // memory. If the device fails, the memory is not freed and stays counted in the budget.
        let last = |lane: &Lane| {
            device.submit(*lane, CommandList::default()).and_then(|last| device.finish(last)).map(drop)
        };
        match LANES.iter().try_for_each(last) {
            Ok(()) => self.engine.arena.discard_all(memory),
            Err(failed) => tracing::warn!(%failed, "memory of pages that were not filled stays allocated"),
        }
    }
}

/// The lanes (device queues) that fill new memory. No logged batch uses the memory yet, so these copies need not be
/// ordered with batches.
pub(super) const LANES: [Lane; 2] = [Lane::Drain, Lane::Load];

/// Memory of new pages that already contains the pages' bytes. Dropping this value frees the memory that was not taken.
pub(super) struct ReadyMemory<'a> {
    committer: &'a Committer,
    memory: BTreeMap<PageId, PageMemory>,
}

impl<'a> ReadyMemory<'a> {
    /// Creates the value that owns the memory of the given pages.
    pub fn new(committer: &'a Committer, memory: impl IntoIterator<Item = (PageId, PageMemory)>) -> Self {
        Self { committer, memory: map_of(memory) }
    }

    /// Removes and returns the memory of a page, or returns `None` if there is none.
    pub fn take(&mut self, page: PageId) -> Option<PageMemory> {
        self.memory.remove(&page)
    }

    /// Returns the memory, by page.
    pub fn iter(&self) -> impl Iterator<Item = (PageId, MemoryId)> {
        self.memory.iter().map(|(page, memory)| (*page, memory.span().memory))
    }

    /// Returns whether there is memory for a page.
    pub fn has(&self, page: PageId) -> bool {
        self.memory.contains_key(&page)
    }
}

impl Drop for ReadyMemory<'_> {
    fn drop(&mut self) {
        if !self.memory.is_empty() {
            self.committer.engine.arena.discard_all(std::mem::take(&mut self.memory).into_values());
        }
    }
}

/// The caller-owned memory in which a batch creates pages, by page.
pub(super) type LentPages<'a> = BTreeMap<PageId, &'a DeviceBytes>;

/// An operation that needs new page memory, and the place and length of that memory.
pub(super) struct RequiredMemory {
    /// The operation's index in the payload.
    pub op: usize,
    /// The page that the operation creates, or `None` if the page already exists.
    pub new_page: Option<PageId>,
    pub at: PageLocation,
}

/// The place and the length in bytes of a page or of its memory.
pub(super) type PageLocation = (Place, u64);

pub(super) fn location_in(table: &PageTable, page: PageId) -> Option<PageLocation> {
    table.entry(page).map(|entry| (entry.place(), entry.len()))
}

pub(super) fn location(memory: &PageMemory) -> PageLocation {
    (memory.place(), memory.byte_len())
}

/// Returns the memory that the creates, resizes and moves of a batch need, in order, if the batch is applied to
/// `table`.
pub(super) fn required_memory(ops: &[OpAt<'_>], table: &PageTable) -> Result<Vec<RequiredMemory>> {
    let mut made = Vec::new();
    let Some(first) = ops.iter().position(|at| may_take_memory(&at.op)) else { return Ok(made) };
    make_room(&mut made, ops.len() - first)?;
    // The current location of each page at this point of the batch. A batch may resize a page and then move it.
    let mut now: HashMap<PageId, PageLocation> = HashMap::new();
    let comes_once = each_comes_once(ops);
    for (op, at) in ops.iter().enumerate() {
        let old = |page| {
            let before = || location_in(table, page);
            let here = if comes_once { before() } else { now.get(&page).copied().or_else(before) };
            here.ok_or(Error::UnknownPage { page })
        };
        let (page, place, len) = match at.op {
            Op::Create { page, len, place, .. } => (page, place, len),
            Op::Resize { page, len } => (page, old(page)?.0, len),
            Op::Move { page, place } => match old(page)? {
                // A move to the page's current place needs no memory.
                (here, _) if here == place => continue,
                (_, len) => (page, place, len),
            },
            _ => continue,
        };
        // This check precedes the allocation, because a length above the limit is an invalid argument, not a lack of
        // memory.
        if len > PAGE_LEN_MAX {
            return Err(Error::Limit { what: "page length", found: len, limit: PAGE_LEN_MAX });
        }
        if !comes_once {
            insert(&mut now, page, (place, len))?;
        }
        // A page on disk has no memory.
        if place == Place::Disk {
            continue;
        }
        let new_page = matches!(at.op, Op::Create { .. }).then_some(page);
        made.push(RequiredMemory { op, new_page, at: (place, len) });
    }
    Ok(made)
}

/// Returns whether the operations are in ascending page order, so that no page has two operations. Batches that move
/// thousands of pages have this order. For such batches, building a table of pages would take a tenth of the time.
pub(super) fn each_comes_once(ops: &[OpAt<'_>]) -> bool {
    ops.is_sorted_by(|before, after| before.op.page() < after.op.page())
}

/// Returns whether an operation may allocate memory for its page.
pub(super) fn may_take_memory(op: &Op<'_>) -> bool {
    matches!(op, Op::Create { .. } | Op::Resize { .. } | Op::Move { .. })
}

/// Returns whether an operation moves its page to other memory.
pub(super) fn moves_to_other_memory(op: &Op<'_>) -> bool {
    matches!(op, Op::Resize { .. } | Op::Move { .. })
}

/// Returns the operation's page if the operation moves it to other memory, which must fail for a pinned page.
pub(super) fn page_moved_away(
    op: &Op<'_>,
    location_of: impl Fn(PageId) -> Option<PageLocation>,
) -> Option<PageId> {
    match *op {
        Op::Resize { page, .. } | Op::Delete { page } => Some(page),
        Op::Move { page, place } => location_of(page).is_some_and(|(here, _)| here != place).then_some(page),
        _ => None,
    }
}

/// Returns whether an operation changes a page's bytes or frees the page's memory.
fn reaches_bytes(op: &Op<'_>) -> bool {
    op.changes_bytes() || matches!(op, Op::Image { .. } | Op::Delete { .. } | Op::Move { .. })
}

/// Returns the pages whose memory the operations change in place. If such a page is leased, the batch must move it to
/// other memory first.
pub(super) fn changed_in_place<'a>(ops: &'a [OpAt<'_>]) -> impl Iterator<Item = PageId> + 'a {
    let in_place =
        |op: &Op<'_>| reaches_bytes(op) && !moves_to_other_memory(op) && !matches!(op, Op::Delete { .. });
    ops.iter().filter(move |at| in_place(&at.op)).filter_map(|at| at.op.page())
}
