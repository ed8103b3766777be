//! Pages that an open moves to slower places because they exceed the memory budget.
//!
//! A store may be opened with less memory than before, on a smaller machine or next to another process. If [`Tiers`]
//! define an order of places, the least recently changed pages are demoted before memory is claimed and pages are
//! loaded. A page demoted to disk remains in its image. The new incarnation logs the moves as its first batch, before
//! the store can be used.
//!
//! A crash before that batch loses nothing. The next open finds the pages in their old places, and decides again.

use std::collections::BTreeMap;

use remanent_format::limits::FRAME_PAYLOAD_LEN_MAX;
use remanent_format::manifest::Manifest;
use remanent_format::op::{Op, PayloadWriter, decode_payload};
use remanent_format::state::bases::Bases;
use remanent_format::state::table::{PlanMode, Refusal};
use remanent_format::{Lsn, PageId, PageTable, Place};

use crate::base::allocation::{collected, push};
use crate::error::{Error, Result};
use crate::images::disk_pages::pending_max;
use crate::options::Budget;
use crate::options::tiers::Tiers;

/// The pages to demote, and the batch that demotes them. The batch is logged when the new incarnation begins.
pub(super) struct LoweredPages {
    /// The page table after the demotions.
    pub table: PageTable,
    /// The pages to demote, in ascending order.
    pub pages: Vec<PageId>,
    /// The payload of the batch that demotes the pages.
    pub payload: Vec<u8>,
}

/// A page that may be demoted. For a move to disk, pages whose image contains their current bytes are demoted first.
/// Among equal pages, the least recently changed page is demoted first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct LeavingPage {
    waits_in_memory: bool,
    lsn: Lsn,
    page: PageId,
    len: u64,
}

/// Returns the pages that are in a place after the given moves, each with its length in bytes and its last change.
fn residents<'a>(
    table: &'a PageTable,
    moves: &'a BTreeMap<PageId, Place>,
    place: Place,
) -> impl Iterator<Item = (PageId, u64, Lsn)> + 'a {
    let pages = table.lens().zip(table.lsns());
    let is_there = move |page, before| moves.get(&page).copied().unwrap_or(before) == place;
    pages
        .filter_map(move |((page, before, len), (_, lsn))| is_there(page, before).then_some((page, len, lsn)))
}

/// The images from which an open loads pages, used to find pages whose current bytes are already on disk.
pub(super) struct ImagedPages<'a> {
    pub bases: &'a Bases,
    /// The snapshot from which recovery starts, with its complete list of entries.
    pub snapshot: Option<&'a Manifest>,
}

impl ImagedPages<'_> {
    /// Returns whether an image contains the bytes that `page` has in `table`.
    fn has(&self, table: &PageTable, page: PageId) -> bool {
        let (Some(info), Some(base)) = (table.get(page), self.bases.get(page)) else { return false };
        let Some(image) = base.image else { return false };
        if base.lsn == info.lsn {
            return true;
        }
        // If the page was only moved since the image was written, its bytes are unchanged.
        let entries = self.snapshot.map_or(&[][..], |snapshot| &snapshot.entries);
        let named = entries.binary_search_by_key(&page, |entry| entry.page).map(|at| &entries[at]);
        named.is_ok_and(|named| named.image == Some(image) && named.epoch == info.epoch)
    }
}

impl LoweredPages {
    /// Finds the pages to demote. Returns `None` if no page needs to be demoted. Also returns `None` if too few pages
    /// can be demoted, and claiming memory then fails with `OverBudget`. `is_lent` identifies pages in caller-owned
    /// memory, which the budget does not count.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], `Error::Limit`.
    pub fn find(
        table: &PageTable,
        imaged: &ImagedPages<'_>,
        tiers: &Tiers,
        budget: &Budget,
        is_lent: impl Fn(PageId) -> bool,
    ) -> Result<Option<Self>> {
        let in_memory = table.lens().filter(|(_, place, _)| *place != Place::Disk);
        // Usually all pages fit in their places.
        if budget.check(in_memory.map(|(_, place, len)| (place, len))).is_ok() {
            return Ok(None);
        }
        let mut moves = BTreeMap::new();
        let places = tiers.places();
        for pair in places.windows(2) {
            let &[from, to] = pair else { unreachable!("pairs") };
            let there = || residents(table, &moves, from).filter(|(page, ..)| !is_lent(*page));
            let used = there().fold(0, |sum: u64, (_, len, _)| sum.saturating_add(len));
            let limit = budget.limit(from);
            if used <= limit {
                continue;
            }
            let mut leaving = Vec::new();
            for (page, len, lsn) in there().filter(|(_, len, _)| *len > 0) {
                let waits_in_memory = to == Place::Disk && !imaged.has(table, page);
                push(&mut leaving, LeavingPage { waits_in_memory, lsn, page, len })?;
            }
            leaving.sort_unstable();
            // Pages are demoted until the place has the free share that its tier requires, not only until the pages
            // fit.
            let mut surplus = used - (limit - tiers.free_bytes(limit));
            let mut waiting = 0;
            for LeavingPage { waits_in_memory, page, len, .. } in leaving {
                if surplus == 0 {
                    break;
                }
                waiting += if waits_in_memory { len } else { 0 };
                if waiting > pending_max(budget.limit(Place::Disk)) {
                    return Ok(None);
                }
                moves.insert(page, to);
                surplus = surplus.saturating_sub(len);
            }
        }
        if moves.is_empty() { Ok(None) } else { Self::after(table, &moves).map(Some) }
    }

    fn after(table: &PageTable, moves: &BTreeMap<PageId, Place>) -> Result<Self> {
        let mut writer = PayloadWriter::default();
        for (&page, &place) in moves {
            writer.push(&Op::Move { page, place }).map_err(Error::of_memory)?;
        }
        let payload = writer.finish();
        let (len, limit) = (payload.len() as u64, FRAME_PAYLOAD_LEN_MAX);
        if len > limit {
            return Err(Error::Limit { what: "batch", found: len, limit });
        }
        let mut after = table.clone();
        let ops = decode_payload(&payload).map_err(Error::of_memory)?;
        let planned = after.plan(table.lsn().next(), &ops, PlanMode::Commit);
        let changes = planned.map_err(|(_, refusal)| match refusal {
            Refusal::Memory { needed } => Error::no_memory(needed),
            other => panic!("these pages are there: {other}"),
        })?;
        after.install(&changes);
        drop(ops);
        Ok(Self { table: after, pages: collected(moves.keys().copied())?, payload })
    }
}
