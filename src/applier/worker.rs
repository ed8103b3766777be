//! The applier's thread, which encodes batches as command lists and submits the lists to the lane. Memory is freed
//! after the last list that uses the memory.

use std::collections::VecDeque;
use std::sync::Arc;

use remanent_format::op::{Op, OpAt, for_each_op};
use remanent_format::{Lsn, PageId, Place};

use super::changes::{AppliedBatch, WrittenRanges};
use super::commands::{ListBuilder, PayloadAt, needs_aside};
use super::in_flight::{InFlight, UnreportedBatches};
use super::queue::Request;
use super::{
    AppliedState, Applier, ApplierParts, ApplyWork, FilledMemory, Handover, LIST_BYTES, Leases,
    NewDiskImages, Provision, Turn,
};
use crate::base::queue::Queue;
use crate::device::{CommandList, EngineDevice, Lane};
use crate::error::{Error, Result};
use crate::images::disk_pages::{DiskPage, DiskPages};
use crate::memory::arena::{Arena, PageMemory};
use crate::memory::staging::{GrownBytes, StagingPool};
use crate::versions::{PageWalk, Versions};

/// The number of lists in flight at which the applier waits for the oldest list.
const IN_FLIGHT_MAX: usize = 32;

/// The applier's thread: the pages' state in the lane, and the command list under construction.
pub(super) struct Worker {
    shared: Arc<Applier>,
    device: Arc<EngineDevice>,
    arena: Arc<Arena>,
    staging: Arc<StagingPool>,
    leases: Arc<Leases>,
    versions: Arc<Versions>,
    disk_pages: Arc<DiskPages>,
    wait_logged: Box<dyn Fn(Lsn) -> Result<()> + Send>,
    applied: AppliedState,
    list: ListBuilder,
    /// Memory to free after the list under construction.
    retiring: Queue<PageMemory>,
    /// Memory that callers also use, and that pages have left. The store's last use of the memory is the list under
    /// construction.
    vacated: Queue<PageMemory>,
    /// Memory to pass to a caller after the list under construction, with its receiver.
    handed_over: Vec<(Arc<Handover>, PageMemory)>,
    /// The changes of the batches in the list under construction, for streams. If there was no memory for a batch's
    /// changes, only its Lsn. Empty while there are no streams.
    unreported: Vec<Result<AppliedBatch, Lsn>>,
    in_flight: InFlight,
    /// The fence value of the newest submitted list.
    fence: u64,
    /// The error after which memory no longer matches the table, or `None` while memory matches.
    lost: Option<Error>,
}

impl Worker {
    pub fn new(
        shared: Arc<Applier>,
        parts: ApplierParts,
        wait_logged: Box<dyn Fn(Lsn) -> Result<()> + Send>,
        applied: AppliedState,
    ) -> Self {
        let ApplierParts { device, arena, staging, poison: _, leases, versions, disk_pages } = parts;
        Self {
            shared,
            device,
            arena,
            staging,
            leases,
            versions,
            disk_pages,
            wait_logged,
            applied,
            list: ListBuilder::default(),
            retiring: Queue::default(),
            vacated: Queue::default(),
            handed_over: Vec::new(),
            unreported: Vec::new(),
            in_flight: InFlight::default(),
            fence: 0,
            lost: None,
        }
    }

    /// Applies batches and runs turns until the applier is stopped.
    pub fn run(&mut self) {
        let mut requests = VecDeque::new();
        while self.next(&mut requests) {
            let newest = requests.iter().rev().find_map(|request| match request {
                Request::Batch(work) => Some(work.point.lsn),
                Request::Turn(_) => None,
            });
            let all_are_logged = newest.is_none_or(|newest| (self.wait_logged)(newest).is_ok());
            for request in requests.drain(..) {
                match request {
                    Request::Batch(work)
                        if !all_are_logged && (self.wait_logged)(work.point.lsn).is_err() =>
                    {
                        self.refuse(work);
                    }
                    Request::Batch(work) => {
                        self.batch(work);
                        if self.list.payload_bytes() >= LIST_BYTES {
                            self.flush();
                        }
                    }
                    Request::Turn(turn) => {
                        self.flush();
                        // The lists are verified first, because a turn inspects pages or starts reads of them.
                        self.prove_all();
                        let was_lost = self.lost.is_some();
                        turn(&mut Turn {
                            applied: &mut self.applied,
                            arena: &self.arena,
                            versions: &self.versions,
                            device: &self.device,
                            lost: &mut self.lost,
                        });
                        // A caller that waits for bytes that the turn lost is notified.
                        if let Some(error) = self.lost.clone().filter(|_| !was_lost) {
                            self.record_loss(error);
                        }
                    }
                }
            }
            self.flush();
        }
        while self.in_flight.len() > 0 {
            self.finish_oldest();
        }
        // Lists of other threads, such as reads and gathers, may be in flight too. When one more list completes, all of
        // them have. If it fails, they may still run, and the memory that they name is not freed.
        let last = self.device.submit(Lane::Apply, CommandList::default());
        let last = last.and_then(|pending| self.device.finish(pending));
        match last.and_then(|_| self.leases.wait_ended()) {
            Ok(()) => self.release_pages(),
            Err(error) => tracing::warn!(%error, "page memory stays allocated"),
        }
    }

    /// Moves the queued requests to `requests`. Waits if the queue is empty. Returns `false` once the applier is
    /// stopped and the queue is empty.
    fn next(&mut self, requests: &mut VecDeque<Request>) -> bool {
        // No other thread checks whether a list is complete. If there are more requests, submitting the next list does.
        if self.in_flight.is_unproven() && self.shared.requests.is_empty() {
            self.prove_all();
        }
        self.shared.requests.take(requests)
    }

    /// Discards a batch whose logging failed. No reader sees the batch, and the logged batches can still be read.
    fn refuse(&mut self, work: ApplyWork) {
        // Logged batches are completed first, because a caller that waits for such a batch must not receive this error.
        self.flush();
        self.prove_all();
        self.shared.progress(|progress| progress.is_lost = true);
        self.shared.changes().end();
        self.staging.put_grown(work.payload);
        if let Some(provision) = work.provision {
            provision.give_back(&self.staging, &self.arena);
        }
    }

    /// Adds a batch's commands to the list, and installs its changes in the table.
    fn batch(&mut self, work: ApplyWork) {
        let ApplyWork { point, payload, changes, provision } = work;
        let provision = provision.map_or_else(Provision::default, |provision| *provision);
        let Provision { filled, to_disk, pending, sums, room, handover, .. } = provision;
        let Provision { mut memory, mut relocations, mut asides, .. } = provision;
        let is_filled = |page: PageId, new: &PageMemory| filled.has(page, new.span().memory);
        let mut ranges = self.shared.changes().is_watched().then(WrittenRanges::default);
        if !self.list.has_room(&room) {
            self.flush();
            self.list.begin_in(room);
        }
        assert!(point.lsn == self.applied.point.lsn.next()); // I3: in log order, without a gap.
        let in_list = PayloadAt { index: self.list.payload_index(), offset: 0 };
        if let Some(sums) = sums {
            self.list.prove(sums);
        }
        let all_versions = self.versions.clone();
        let mut versions = all_versions.walk();
        // The operations are decoded one by one, because the batch is logged, and memory for a list of all operations
        // could be unavailable.
        let apply = |at: OpAt<'_>| {
            if let Some(ranges) = &mut ranges {
                ranges.note(&at.op);
            }
            match at.op {
                Op::Create { page, len, place: Place::Disk, .. } => {
                    self.applied.on_disk.insert(page, self.disk_pages.zeros(len));
                }
                Op::Create { page, .. } => {
                    let new = memory.pop_front().expect("one for each create");
                    if !is_filled(page, &new) {
                        self.zero(&new, 0);
                    }
                    versions.moved(page, new.span().memory);
                    self.applied.memory.insert(page, new);
                }
                Op::Resize { page, .. } if self.applied.on_disk.contains(page) => {
                    self.change_on_disk(page, |on_disk| on_disk.apply(&at.op));
                }
                Op::Resize { page, .. } => {
                    let new = memory.pop_front().expect("one for each resize");
                    let is_filled = is_filled(page, &new);
                    self.replace(&mut versions, page, new, is_filled);
                }
                Op::Move { page, place: Place::Disk } => self.move_to_disk(page, &to_disk),
                Op::Move { page, .. } if self.applied.on_disk.contains(page) => {
                    let new = memory.pop_front().expect("one for each move to another place");
                    assert!(is_filled(page, &new)); // I10: memory that goes to a page has the page's bytes.
                    self.change_on_disk(page, |_| {});
                    self.applied.on_disk.remove(page);
                    versions.moved(page, new.span().memory);
                    self.applied.memory.insert(page, new);
                }
                Op::Move { page, place } => {
                    let here = self.applied.memory.get(page).expect("planned on a page that exists").place();
                    if here == place {
                        // The page's Lsn changes nevertheless, so a cut keeps the page with the old Lsn.
                        self.before_change(page, &mut relocations);
                    } else {
                        let new = memory.pop_front().expect("one for each move to another place");
                        self.replace(&mut versions, page, new, false);
                    }
                }
                Op::Delete { page } => {
                    if self.applied.on_disk.contains(page) {
                        self.change_on_disk(page, |_| {});
                        self.applied.on_disk.remove(page);
                    }
                    if let Some(old) = self.applied.memory.remove(page) {
                        match handover.as_ref().filter(|handover| handover.page == page) {
                            Some(handover) => self.hand_over(old, handover),
                            None => self.give_up(page, old),
                        }
                    }
                    if let Some(deleted) = &mut self.applied.deleted {
                        deleted.insert(page, point.lsn);
                    }
                }
                _ if at.op.page().is_some_and(|page| self.applied.on_disk.contains(page)) => {
                    let page = at.op.page().expect("looked at just now");
                    let new = match at.op {
                        Op::Image { image, len, .. } => {
                            Some(self.disk_pages.page(Some(self.disk_pages.image(image, len))))
                        }
                        _ => None,
                    };
                    self.change_on_disk(page, |on_disk| match new {
                        Some(new) => *on_disk = new,
                        None => on_disk.apply(&at.op),
                    });
                }
                _ => {
                    let is_in_place =
                        matches!(at.op, Op::Image { page, .. } if self.holds_image(page, &filled));
                    let has_aside = needs_aside(&at.op) && !is_in_place;
                    let aside = if has_aside { asides.pop_front() } else { None };
                    if let Some(page) = at.op.page() {
                        self.before_change(page, &mut relocations);
                        self.before_write(page, at.op.range());
                        let memory = self.applied.memory.get(page).expect("planned on a page that exists");
                        if !is_in_place {
                            self.list.data(&at, in_list, memory, aside);
                        }
                    }
                }
            }
        };
        for_each_op(&payload, apply).expect("decoded before it was logged");
        // The batch's writes to pages on disk are now counted there.
        drop(pending);
        match payload {
            GrownBytes::Staged(staged) => self.list.payload(staged),
            // No operation on a page in memory has bytes in this payload, so no operation has converted bytes or a
            // proof either.
            GrownBytes::Plain(_) => {}
        }
        if let Some(ranges) = ranges {
            self.unreported.push(AppliedBatch::of(&changes, &self.applied.table, ranges));
        }
        self.applied.table.install(&changes);
        self.applied.point = point;
    }

    /// Changes a page on disk. If a cut must preserve the page, the cut first records the page's current state.
    fn change_on_disk(&mut self, page: PageId, change: impl FnOnce(&mut DiskPage)) {
        let AppliedState { table, on_disk, cut, .. } = &mut self.applied;
        // The table still contains the state before this batch, which the cut keeps.
        if let Some(cut) = cut
            && let Some(info) = table.get(page)
        {
            cut.before_change_on_disk(&info, on_disk.get(page).expect("planned on a page that exists"));
        }
        on_disk.change(page, change).expect("planned on a page that exists");
    }

    /// Moves a page to disk. An image of the page already contains its bytes.
    fn move_to_disk(&mut self, page: PageId, images: &NewDiskImages) {
        if self.applied.on_disk.contains(page) {
            return self.change_on_disk(page, |_| {});
        }
        let at = images.binary_search_by_key(&page, |(of, _)| *of).expect("one for each move to disk");
        let (_, image) = &images[at];
        let old = self.applied.memory.remove(page).expect("planned on a page that exists");
        self.give_up(page, old);
        self.versions.moved_to_disk(page);
        self.applied.on_disk.insert(page, self.disk_pages.page(image.clone()));
    }

    /// Returns whether the page's memory already contains the bytes of the batch's image of the page.
    fn holds_image(&self, page: PageId, filled: &FilledMemory) -> bool {
        let memory = self.applied.memory.get(page).expect("planned on a page that exists");
        filled.has_image(page, memory.span().memory)
    }

    /// Moves a page to new memory, and truncates it or extends it with zeros to the new length. If `is_filled`, the new
    /// memory already contains the page's bytes, and nothing is copied.
    fn replace(&mut self, versions: &mut PageWalk<'_>, page: PageId, new: PageMemory, is_filled: bool) {
        if !is_filled {
            let old = self.applied.memory.get(page).expect("planned on a page that exists");
            let kept = new.byte_len().min(old.byte_len());
            self.list.copy(old.part(0, kept), new.part(0, kept));
            self.zero(&new, kept);
            self.submit_copies();
        }
        let memory = new.span().memory;
        let old = self.applied.memory.insert(page, new).expect("planned on a page that exists");
        self.give_up(page, old);
        versions.moved(page, memory);
    }

    /// Fills new memory with zeros from offset `from` on. Skipped if the device allocates zeroed memory, because
    /// writing gigabytes of zeros would delay every later batch and read. Caller-owned memory may contain any bytes and
    /// is always filled.
    fn zero(&mut self, new: &PageMemory, from: u64) {
        if new.is_lent() || !self.device.allocates_zeros(new.place(), new.byte_len()) {
            self.list.zero(new.part(from, new.byte_len() - from));
        }
    }

    /// Prepares a page for a change in place. A page that a cut preserves is copied aside. A page that callers use
    /// moves to its relocation memory.
    fn before_change(&mut self, page: PageId, relocations: &mut Vec<(PageId, PageMemory)>) {
        let AppliedState { table, memory, cut, gathers, .. } = &mut self.applied;
        let Some(current) = memory.get(page) else { return };
        // The table still contains the state before this batch, which the cut keeps.
        if let Some(cut) = cut
            && let Some(info) = table.get(page)
        {
            cut.before_change(&info, current, &self.arena, &mut self.list);
        }
        let Some(at) = relocations.iter().position(|(moved, _)| *moved == page) else { return };
        let (_, relocation) = relocations.swap_remove(at);
        if self.leases.leave(page, current.span().memory) {
            if let Some(gather) = gathers.get_mut(&page) {
                gather.mark_lost();
            }
            self.list.copy(current.span(), relocation.span());
            self.versions.moved(page, relocation.span().memory);
            if let Some(old) = memory.insert(page, relocation) {
                self.vacated.push_back(old);
            }
        } else {
            // Another batch has already moved the page, or the caller's work is done.
            self.arena.discard_all([relocation]);
        }
    }

    /// Prepares a range of a page for a write: copies aside any part of the range that a snapshot has not gathered yet.
    fn before_write(&mut self, page: PageId, range: Option<(u64, u64)>) {
        let AppliedState { memory, gathers, .. } = &mut self.applied;
        if gathers.is_empty() {
            return;
        }
        if let (Some(gather), Some(memory), Some(range)) = (gathers.get_mut(&page), memory.get(page), range) {
            gather.before_write(range, memory, &self.arena, &mut self.list);
        }
    }

    /// Disposes of memory that its page has left: passes it to a cut, keeps it for its callers, or returns it to the
    /// arena.
    fn give_up(&mut self, page: PageId, old: PageMemory) {
        let AppliedState { table, cut, gathers, .. } = &mut self.applied;
        if let Some(gather) = gathers.get_mut(&page) {
            gather.mark_lost();
        }
        let watched = cut.as_mut().and_then(|cut| Some((cut, table.get(page)?)));
        if self.leases.leave(page, old.span().memory) {
            if let Some((cut, info)) = watched {
                cut.before_change(&info, &old, &self.arena, &mut self.list);
            }
            self.vacated.push_back(old);
        } else {
            let old = match watched {
                Some((cut, info)) => cut.before_removal(&info, old),
                None => Some(old),
            };
            if let Some(old) = old {
                self.retiring.push_back(old);
            }
        }
    }

    /// Passes the memory of a deleted page to a caller, after the list under construction. The page must not be leased.
    /// If a cut preserves the page, the page is first copied for the cut, because a cut would keep the memory itself
    /// until its snapshot is complete.
    fn hand_over(&mut self, old: PageMemory, handover: &Arc<Handover>) {
        let page = handover.page;
        let AppliedState { table, cut, gathers, .. } = &mut self.applied;
        if let Some(gather) = gathers.get_mut(&page) {
            gather.mark_lost();
        }
        if let Some((cut, info)) = cut.as_mut().and_then(|cut| Some((cut, table.get(page)?))) {
            cut.before_change(&info, &old, &self.arena, &mut self.list);
        }
        self.leases.leave(page, old.span().memory);
        self.handed_over.push((handover.clone(), old));
    }

    /// Submits the copies of a batch that moves many pages before all of its commands are added. The batch is not
    /// reported until its last list is in the lane, and the memory that its pages left is freed after that list.
    fn submit_copies(&mut self) {
        if self.lost.is_some() {
            return;
        }
        let Some(copies) = self.list.take_copies() else { return };
        match self.device.submit(Lane::Apply, copies) {
            Ok(pending) => {
                self.fence = pending.fence().value;
                self.in_flight.push(pending, Vec::new());
            }
            Err(error) => return self.record_loss(error),
        }
        while self.in_flight.len() > IN_FLIGHT_MAX {
            self.finish_oldest();
        }
    }

    /// Submits the list under construction. Every later list observes the batches of this list.
    fn flush(&mut self) {
        // Memory that pages left needs a list, even an empty one, for its fence.
        let gives_up = !(self.retiring.is_empty() && self.vacated.is_empty() && self.handed_over.is_empty());
        if gives_up || !self.list.is_empty() {
            let (list, proofs) = self.list.take();
            if self.lost.is_none() {
                match self.device.submit(Lane::Apply, list) {
                    Ok(pending) => {
                        let retiring = std::iter::from_fn(|| self.retiring.pop_front());
                        self.arena.retire_all(retiring, pending.fence());
                        while let Some(memory) = self.vacated.pop_front() {
                            self.leases.give_up(memory, pending.fence());
                        }
                        for (handover, memory) in self.handed_over.drain(..) {
                            if let Err(memory) = handover.deliver(memory, pending.fence()) {
                                self.leases.give_up(memory, pending.fence());
                            }
                        }
                        self.fence = pending.fence().value;
                        self.in_flight.push(pending, proofs);
                    }
                    Err(error) => self.record_loss(error),
                }
            }
        }
        let (applied, fence) = (self.applied.point.lsn, self.fence);
        self.in_flight.note(UnreportedBatches {
            applied,
            fence,
            changes: std::mem::take(&mut self.unreported),
        });
        self.report();
        let reached = self.device.reached(Lane::Apply);
        while self.in_flight.oldest().is_some_and(|fence| fence <= reached)
            || self.in_flight.len() > IN_FLIGHT_MAX
        {
            self.finish_oldest();
        }
    }

    /// Reports batches as applied once their lists are verified (I12).
    fn report(&mut self) {
        if self.lost.is_some() {
            return;
        }
        while let Some(UnreportedBatches { applied, fence, changes }) = self.in_flight.next_reportable() {
            self.shared.progress(|progress| (progress.applied, progress.fence) = (applied, fence));
            // The changes are published after the progress, because a notified caller may immediately check that the
            // batch is applied.
            changes.into_iter().for_each(|batch_changes| self.shared.changes().publish(batch_changes));
        }
    }

    /// Waits until every list in flight is verified.
    fn prove_all(&mut self) {
        while self.in_flight.is_unproven() {
            self.finish_oldest();
        }
    }

    /// Waits for the oldest list, verifies it, and returns its staging to the pool.
    fn finish_oldest(&mut self) {
        let proven = match self.in_flight.finish_oldest(&self.device) {
            Ok(Some((staging, proven))) => {
                self.staging.put_all(staging);
                proven
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        match proven {
            Ok(()) => self.report(),
            Err(error) => self.record_loss(error),
        }
    }

    /// Records that a list is lost because of `error`, and poisons the store.
    fn record_loss(&mut self, error: Error) {
        let error = self.shared.poison.set(error);
        self.lost.get_or_insert(error);
        self.shared.progress(|progress| progress.is_lost = true);
        // No later batch is applied.
        self.shared.changes().end();
    }

    fn release_pages(&mut self) {
        let is_free = |(page, memory): &(PageId, PageMemory)| !self.leases.leave(*page, memory.span().memory);
        // Memory of a lease that was never ended is left to that lease.
        let pages =
            std::mem::take(&mut self.applied.memory).into_items().filter(is_free).map(|(_, memory)| memory);
        let handed_over = self.handed_over.drain(..).map(|(_, memory)| memory);
        let retiring = std::iter::from_fn(|| self.retiring.pop_front());
        self.arena.discard_all(pages.chain(retiring).chain(handed_over));
        if let Err(error) = self.arena.reap_all() {
            tracing::warn!(%error, "cannot give page memory back");
        }
    }
}
