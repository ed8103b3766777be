//! Page memory that a batch brings along: for the pages that it makes, resizes and moves, and for those that
//! it changes while they are leased.
//!
//! It is allocated before an Lsn is taken, so that a batch that finds no room fails with nothing changed
//! (I10): once it is logged, the applier cannot refuse it. The places of pages are only looked at then,
//! and checked again under the submission lock.

use std::collections::{BTreeMap, HashMap};

use remanent_format::limits::PAGE_LEN_MAX;
use remanent_format::op::{Op, OpAt};
use remanent_format::{PageId, PageTable, Place};

use super::Committer;
use crate::applier::Provision;
use crate::base::allocation::{collected, insert, make_room, map_of};
use crate::device::{CommandList, DeviceBytes, Lane, MemoryId};
use crate::error::{Error, Result};
use crate::memory::arena::{PageMemory, Purpose};

impl Committer {
    /// Allocates page memory for the creates, resizes and moves of a batch, in their order. Returns the
    /// operation that needs it for each. New pages live in the memory that `lent` has for them, or `ready`,
    /// which has their bytes.
    pub(super) fn allocate(
        &self,
        provision: &mut Provision,
        ops: &[OpAt<'_>],
        lent: &LentPages<'_>,
        ready: &mut ReadyMemory<'_>,
        locked: Option<&PageTable>,
    ) -> Result<Vec<MadeMemory>> {
        // Without the lock, unless the caller holds it: `append` looks again, and a draft with other
        // memory is stale.
        let homes = match locked {
            Some(table) => homes_made(ops, table)?,
            None if ops.iter().any(|at| may_take_memory(&at.op)) => homes_made(ops, &self.submitted.lock())?,
            None => Vec::new(),
        };
        if homes.is_empty() {
            return Ok(homes);
        }
        let in_lent = |made: &MadeMemory| lent.get(&made.new_page?).copied().zip(made.new_page);
        let is_ready = |made: &MadeMemory| made.new_page.is_some_and(|page| ready.has(page));
        let is_own = |made: &&MadeMemory| in_lent(made).is_none() && !is_ready(made);
        let own = collected(homes.iter().filter(is_own).map(|made| made.at))?;
        // Before page memory is allocated, which would have to be given back.
        let Provision { memory, filled, .. } = provision;
        filled.add_images(ready.iter())?;
        let refused = |_| Error::no_memory((homes.len() * size_of::<PageMemory>()) as u64);
        memory.try_reserve_exact(homes.len()).map_err(refused)?;
        let mut own = self.allocate_all(Purpose::Page, &own)?.into_iter();
        for made in &homes {
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
        // I10: each page brings its memory along.
        assert!(memory.iter().map(home).eq(homes.iter().map(|made| made.at)));
        Ok(homes)
    }

    /// Takes memory of the caller's for a page, again when the applier has caught up: a delete that is logged
    /// may not have reached it yet.
    fn lend(&self, page: PageId, bytes: &DeviceBytes) -> Result<PageMemory> {
        match self.engine.arena.lend(page, bytes) {
            Err(Error::MemoryInUse { .. }) => {
                self.engine.applier.turn(|_| Ok(()))?;
                self.engine.arena.lend(page, bytes)
            }
            lent => lent,
        }
    }

    /// Allocates from the arena, again when the applier has caught up.
    pub(super) fn allocate_all(&self, purpose: Purpose, pages: &[(Place, u64)]) -> Result<Vec<PageMemory>> {
        match self.engine.arena.allocate_all(purpose, pages) {
            // Deletes that are logged may not have reached the applier yet. Whether a batch fits must not
            // depend on how far the applier has come.
            Err(Error::OverBudget { .. } | Error::OutOfMemory { .. }) => {
                // An empty turn: when it is over, the batches before it are applied, and what they
                // deleted is given back.
                self.engine.applier.turn(|_| Ok(()))?;
                self.engine.arena.allocate_all(purpose, pages)
            }
            other => other,
        }
    }

    /// Allocates the memory to which leased pages move when a batch changes them: for all of them or none.
    pub(super) fn relocations(
        &self,
        ops: &[OpAt<'_>],
        locked: Option<&PageTable>,
    ) -> Result<Vec<(PageId, PageMemory)>> {
        // Looked at without the lock. A lease that is taken after this is seen under it, and the draft is
        // made anew.
        let mut relocations = Vec::new();
        for page in self.engine.leases.leased(changed_in_place(ops)) {
            let wanted =
                locked.map_or_else(|| home_in(&self.submitted.lock(), page), |table| home_in(table, page));
            // The plan refuses a page that is not there, with its operation.
            let Some(wanted) = wanted.filter(|(place, _)| *place != Place::Disk) else { continue };
            match self.allocate_all(Purpose::Relocation, &[wanted]) {
                Ok(relocation) => {
                    relocations.extend(relocation.into_iter().map(|relocation| (page, relocation)))
                }
                // Meanwhile the applier came to a batch that moved the page: no lease is on this memory
                // any more.
                Err(_) if self.engine.leases.leased([page]).is_empty() => {}
                Err(error) => {
                    self.engine.arena.discard_all(relocations.into_iter().map(|(_, memory)| memory));
                    return Err(error);
                }
            }
        }
        Ok(relocations)
    }

    /// Gives memory back that lists may name which are under way.
    pub(super) fn discard_filling(&self, memory: impl IntoIterator<Item = PageMemory>) {
        let device = &*self.engine.device;
        // One more list in each lane tells when those before it are done. If the device fails at that, the
        // memory stays counted, and a warning says so.
        let last = |lane: &Lane| {
            device.submit(*lane, CommandList::default()).and_then(|last| last.finish(device)).map(drop)
        };
        match LANES.iter().try_for_each(last) {
            Ok(()) => self.engine.arena.discard_all(memory),
            Err(failed) => tracing::warn!(%failed, "memory of pages that were not filled stays allocated"),
        }
    }
}

/// The lanes by which new memory is filled. No list of a batch names it yet, so the bytes need not come in
/// the order of batches.
pub(super) const LANES: [Lane; 2] = [Lane::Drain, Lane::Load];

/// Memory of new pages that holds their bytes. Dropping it gives back what no batch took.
pub(super) struct ReadyMemory<'a> {
    committer: &'a Committer,
    memory: BTreeMap<PageId, PageMemory>,
}

impl<'a> ReadyMemory<'a> {
    /// Takes over this memory of pages.
    pub fn new(committer: &'a Committer, memory: impl IntoIterator<Item = (PageId, PageMemory)>) -> Self {
        Self { committer, memory: map_of(memory) }
    }

    /// Takes a page's memory, if it is there.
    pub fn take(&mut self, page: PageId) -> Option<PageMemory> {
        self.memory.remove(&page)
    }

    /// The memory that is there, by page.
    pub fn iter(&self) -> impl Iterator<Item = (PageId, MemoryId)> {
        self.memory.iter().map(|(page, memory)| (*page, memory.span().memory))
    }

    /// Whether a page's memory is there.
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

/// Memory of callers' in which new pages are to live.
pub(super) type LentPages<'a> = BTreeMap<PageId, &'a DeviceBytes>;

/// Memory that an operation needs.
pub(super) struct MadeMemory {
    /// The operation's index in the payload.
    pub op: usize,
    /// The page that the operation creates; `None` if the page is there already.
    pub new_page: Option<PageId>,
    pub at: PageLocation,
}

/// Where a page is, or its memory: the place, and the length in bytes.
pub(super) type PageLocation = (Place, u64);

/// Where a table says that a page is.
pub(super) fn home_in(table: &PageTable, page: PageId) -> Option<PageLocation> {
    table.entry(page).map(|entry| (entry.place(), entry.len()))
}

/// Where memory is.
pub(super) fn home(memory: &PageMemory) -> PageLocation {
    (memory.place(), memory.byte_len())
}

/// The memory that a batch's creates, resizes and moves need, in their order, when it follows this table.
pub(super) fn homes_made(ops: &[OpAt<'_>], table: &PageTable) -> Result<Vec<MadeMemory>> {
    let mut made = Vec::new();
    let Some(first) = ops.iter().position(|at| may_take_memory(&at.op)) else { return Ok(made) };
    make_room(&mut made, ops.len() - first)?;
    // Where pages are in the course of the batch: a page may be resized and then moved.
    let mut now: HashMap<PageId, PageLocation> = HashMap::new();
    let comes_once = each_comes_once(ops);
    for (op, at) in ops.iter().enumerate() {
        let old = |page| {
            let before = || home_in(table, page);
            let here = if comes_once { before() } else { now.get(&page).copied().or_else(before) };
            here.ok_or(Error::UnknownPage { page })
        };
        let (page, place, len) = match at.op {
            Op::Create { page, len, place, .. } => (page, place, len),
            Op::Resize { page, len } => (page, old(page)?.0, len),
            Op::Move { page, place } => match old(page)? {
                // A move to where the page is costs no memory.
                (here, _) if here == place => continue,
                (_, len) => (page, place, len),
            },
            _ => continue,
        };
        // Before any memory is asked for: a length of a TiB is a mistake, not a lack of memory.
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
        made.push(MadeMemory { op, new_page, at: (place, len) });
    }
    Ok(made)
}

/// Whether it is plain to see that no page has two operations: they come in the order of their pages. So do
/// moves of thousands of pages, for which a table of pages would take a tenth of the time.
pub(super) fn each_comes_once(ops: &[OpAt<'_>]) -> bool {
    ops.is_sorted_by(|before, after| before.op.page() < after.op.page())
}

/// Whether an operation may give its page memory.
pub(super) fn may_take_memory(op: &Op<'_>) -> bool {
    matches!(op, Op::Create { .. } | Op::Resize { .. } | Op::Move { .. })
}

/// Whether an operation takes its page to other memory.
pub(super) fn goes_elsewhere(op: &Op<'_>) -> bool {
    matches!(op, Op::Resize { .. } | Op::Move { .. })
}

/// The page that an operation takes out of the memory that it has before the batch. A pin forbids that.
pub(super) fn taken_elsewhere(
    op: &Op<'_>,
    home_of: impl Fn(PageId) -> Option<PageLocation>,
) -> Option<PageId> {
    match *op {
        Op::Resize { page, .. } | Op::Delete { page } => Some(page),
        Op::Move { page, place } => home_of(page).is_some_and(|(here, _)| here != place).then_some(page),
        _ => None,
    }
}

/// Whether an operation changes a page's bytes, or takes its memory away.
fn reaches_bytes(op: &Op<'_>) -> bool {
    op.changes_bytes() || matches!(op, Op::Image { .. } | Op::Delete { .. } | Op::Move { .. })
}

/// The pages that operations change where they lie. A lease on one of these needs a relocation; for all
/// others there is new memory, or none.
pub(super) fn changed_in_place<'a>(ops: &'a [OpAt<'_>]) -> impl Iterator<Item = PageId> + 'a {
    let in_place = |op: &Op<'_>| reaches_bytes(op) && !goes_elsewhere(op) && !matches!(op, Op::Delete { .. });
    ops.iter().filter(move |at| in_place(&at.op)).filter_map(|at| at.op.page())
}
