//! The applier's thread, which translates batches to command lists and submits the lists to [`Lane::Apply`]. Memory is
//! freed after the last list that uses it.

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

/// The applier's thread: the state of the pages after all submitted lists, and the command list under construction.
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
    /// Memory that pages have left, to be freed after the list under construction.
    retiring: Queue<PageMemory>,
    /// Memory that pages have left, but that leases still use. The list under construction is the store's last
    /// use of this memory.
    vacated: Queue<PageMemory>,
    /// Memory to pass to callers after the list under construction.
    handed_over: Vec<(Arc<Handover>, PageMemory)>,
    /// The changes of the batches in the list under construction, for change streams. `Err` with the batch's Lsn if
    /// there was no memory to record them. Empty while there are no streams.
    unreported: Vec<Result<AppliedBatch, Lsn>>,
    in_flight: InFlight,
    /// The fence value of the newest submitted list.
    fence: u64,
    /// The error that lost a command list, so that memory no longer matches the page table. `None` if no list was lost.
    lost: Option<Error>,
}

/// A batch that is being applied.
struct BatchContext<'v> {
    lsn: Lsn,
    /// The position of the batch's payload in the list under construction.
    in_list: PayloadAt,
    /// The resources of the batch that no operation has taken yet.
    provision: Provision,
    versions: PageWalk<'v>,
}

impl BatchContext<'_> {
    /// Returns the memory for the next create, resize or move to another place.
    fn next_memory(&mut self) -> PageMemory {
        self.provision.memory.pop_front().expect("one for each create, resize and move to another place")
    }

    /// Returns whether new memory already contains the bytes of its page.
    fn is_filled(&self, page: PageId, new: &PageMemory) -> bool {
        self.provision.filled.has(page, new.span().memory)
    }
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

    /// Applies batches and runs closures until the applier is stopped.
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
                        // Lists in flight are verified first, because the closure may read pages.
                        self.prove_all();
                        let was_lost = self.lost.is_some();
                        turn(&mut Turn {
                            applied: &mut self.applied,
                            arena: &self.arena,
                            versions: &self.versions,
                            device: &self.device,
                            lost: &mut self.lost,
                        });
                        // If the closure has lost a command list, callers that wait for later batches receive the
                        // error.
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
        // Lists that other threads submitted, such as reads and gathers, may still be in flight. The lane runs lists in
        // order, so an empty list completes after them. If the device fails, they may never complete, and the memory
        // that they use is not freed.
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
        // Unverified lists are only checked when a list is submitted. If no request follows, they are checked here.
        if self.in_flight.is_unproven() && self.shared.requests.is_empty() {
            self.prove_all();
        }
        self.shared.requests.take(requests)
    }

    /// Discards a batch that could not be logged. No reader has seen the batch, and the logged batches remain readable.
    fn refuse(&mut self, work: ApplyWork) {
        // All earlier batches are applied first, because a caller that waits for one of them must not receive this
        // error.
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
        let mut provision = provision.map_or_else(Provision::default, |provision| *provision);
        let mut ranges = self.shared.changes().is_watched().then(WrittenRanges::default);
        if !self.list.has_room(&provision.room) {
            self.flush();
            self.list.begin_in(std::mem::take(&mut provision.room));
        }
        assert!(point.lsn == self.applied.point.lsn.next()); // I3: in log order, without a gap.
        let in_list = PayloadAt { index: self.list.payload_index(), offset: 0 };
        if let Some(sums) = provision.sums.take() {
            self.list.prove(sums);
        }
        let versions = self.versions.clone();
        let mut batch = BatchContext { lsn: point.lsn, in_list, provision, versions: versions.walk() };
        // The operations are decoded one at a time, because memory for a list of all operations may be unavailable, and
        // a logged batch must be applied.
        let apply = |at: OpAt<'_>| {
            if let Some(ranges) = &mut ranges {
                ranges.note(&at.op);
            }
            self.apply(&at, &mut batch);
        };
        for_each_op(&payload, apply).expect("decoded before it was logged");
        // The pages on disk now count the batch's pending writes themselves.
        drop(batch.provision.pending);
        match payload {
            GrownBytes::Staged(staged) => self.list.payload(staged),
            // Such a payload contains no bytes for pages in memory, so there are no converted bytes or checksums
            // either.
            GrownBytes::Plain(_) => {}
        }
        if let Some(ranges) = ranges {
            self.unreported.push(AppliedBatch::of(&changes, &self.applied.table, ranges));
        }
        self.applied.table.install(&changes);
        self.applied.point = point;
    }

    /// Adds the commands of one operation to the list.
    fn apply(&mut self, at: &OpAt<'_>, batch: &mut BatchContext<'_>) {
        match at.op {
            Op::Create { page, len, place: Place::Disk, .. } => {
                self.applied.on_disk.insert(page, self.disk_pages.zeros(len));
            }
            Op::Create { page, .. } => {
                let new = batch.next_memory();
                if !batch.is_filled(page, &new) {
                    self.zero(&new, 0);
                }
                batch.versions.moved(page, new.span().memory);
                self.applied.memory.insert(page, new);
            }
            Op::Resize { page, .. } if self.applied.on_disk.contains(page) => {
                self.change_on_disk(page, |on_disk| on_disk.apply(&at.op));
            }
            Op::Resize { page, .. } => {
                let new = batch.next_memory();
                let is_filled = batch.is_filled(page, &new);
                self.replace(&mut batch.versions, page, new, is_filled);
            }
            Op::Move { page, place: Place::Disk } => self.move_to_disk(page, &batch.provision.to_disk),
            Op::Move { page, place } => self.move_to_memory(page, place, batch),
            Op::Delete { page } => self.delete(page, batch),
            _ => match at.op.page() {
                Some(page) if self.applied.on_disk.contains(page) => self.write_on_disk(page, &at.op),
                Some(page) => self.write_in_memory(page, at, batch),
                None => {}
            },
        }
    }

    fn move_to_memory(&mut self, page: PageId, place: Place, batch: &mut BatchContext<'_>) {
        if self.applied.on_disk.contains(page) {
            let new = batch.next_memory();
            assert!(batch.is_filled(page, &new)); // I10: memory that goes to a page has the page's bytes.
            self.change_on_disk(page, |_| {});
            self.applied.on_disk.remove(page);
            batch.versions.moved(page, new.span().memory);
            self.applied.memory.insert(page, new);
            return;
        }
        let here = self.applied.memory.get(page).expect("planned on a page that exists").place();
        if here == place {
            // The page's Lsn changes although its bytes do not, so an exact cut preserves the page with its
            // earlier Lsn.
            self.before_change(page, &mut batch.provision.relocations);
        } else {
            let new = batch.next_memory();
            self.replace(&mut batch.versions, page, new, false);
        }
    }

    fn delete(&mut self, page: PageId, batch: &BatchContext<'_>) {
        if self.applied.on_disk.contains(page) {
            self.change_on_disk(page, |_| {});
            self.applied.on_disk.remove(page);
        }
        if let Some(old) = self.applied.memory.remove(page) {
            match batch.provision.handover.as_ref().filter(|handover| handover.page == page) {
                Some(handover) => self.hand_over(old, handover),
                None => self.give_up(page, old),
            }
        }
        if let Some(deleted) = &mut self.applied.deleted {
            deleted.insert(page, batch.lsn);
        }
    }

    /// Changes the bytes of a page on disk.
    fn write_on_disk(&mut self, page: PageId, op: &Op<'_>) {
        let new = match *op {
            Op::Image { image, len, .. } => {
                Some(self.disk_pages.page(Some(self.disk_pages.image(image, len))))
            }
            _ => None,
        };
        self.change_on_disk(page, |on_disk| match new {
            Some(new) => *on_disk = new,
            None => on_disk.apply(op),
        });
    }

    /// Adds a change of the bytes of a page in memory to the list.
    fn write_in_memory(&mut self, page: PageId, at: &OpAt<'_>, batch: &mut BatchContext<'_>) {
        let Provision { filled, asides, relocations, .. } = &mut batch.provision;
        let is_in_place = matches!(at.op, Op::Image { .. }) && self.holds_image(page, filled);
        let has_aside = needs_aside(&at.op) && !is_in_place;
        let aside = if has_aside { asides.pop_front() } else { None };
        self.before_change(page, relocations);
        self.before_write(page, at.op.range());
        let memory = self.applied.memory.get(page).expect("planned on a page that exists");
        if !is_in_place {
            self.list.data(at, batch.in_list, memory, aside);
        }
    }

    /// Changes a page on disk. If an exact cut preserves the page, the cut first takes a copy of the page's state.
    fn change_on_disk(&mut self, page: PageId, change: impl FnOnce(&mut DiskPage)) {
        let AppliedState { table, on_disk, cut, .. } = &mut self.applied;
        // The table still contains the page's information before this batch, which the cut preserves.
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

    /// Prepares a page for a change in place. Copies the page if an exact cut preserves it. If the page is leased,
    /// moves it to the memory that the batch allocated for this.
    fn before_change(&mut self, page: PageId, relocations: &mut Vec<(PageId, PageMemory)>) {
        let AppliedState { table, memory, cut, gathers, .. } = &mut self.applied;
        let Some(current) = memory.get(page) else { return };
        // The table still contains the page's information before this batch, which the cut preserves.
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
            // The memory is not needed: an earlier batch has already moved the page, or the lease has ended.
            self.arena.discard_all([relocation]);
        }
    }

    /// Prepares a range of a page for a write. Copies those parts of the range that a snapshot in progress has not
    /// gathered yet.
    fn before_write(&mut self, page: PageId, range: Option<(u64, u64)>) {
        let AppliedState { memory, gathers, .. } = &mut self.applied;
        if gathers.is_empty() {
            return;
        }
        if let (Some(gather), Some(memory), Some(range)) = (gathers.get_mut(&page), memory.get(page), range) {
            gather.before_write(range, memory, &self.arena, &mut self.list);
        }
    }

    /// Disposes of memory that a page no longer uses. An exact cut may take over the memory, leases may still use it,
    /// and otherwise it is freed.
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

    /// Passes the memory of a deleted page to the caller that released the page, after the list under construction. The
    /// page must not be leased. If an exact cut preserves the page, the cut gets a copy. Otherwise it would keep the
    /// memory until its snapshot is complete.
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

    /// Submits the copies of a batch that moves many pages while the batch's other commands are still being added. The
    /// batch is reported as applied, and the memory that its pages left is freed, after the batch's last list.
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

    /// Submits the list under construction. Lists submitted later see its effects.
    fn flush(&mut self) {
        // Memory is freed after a fence, and a fence requires a list, even an empty one.
        let gives_up = !(self.retiring.is_empty() && self.vacated.is_empty() && self.handed_over.is_empty());
        if gives_up || !self.list.is_empty() {
            self.submit_list();
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

    /// Submits the list under construction, and then frees or passes on the memory that its batches leave. After
    /// a device has failed, drops the list.
    fn submit_list(&mut self) {
        let (list, proofs) = self.list.take();
        if self.lost.is_some() {
            return;
        }
        let pending = match self.device.submit(Lane::Apply, list) {
            Ok(pending) => pending,
            Err(error) => return self.record_loss(error),
        };
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

    /// Reports batches as applied once their lists are verified (I12).
    fn report(&mut self) {
        if self.lost.is_some() {
            return;
        }
        while let Some(UnreportedBatches { applied, fence, changes }) = self.in_flight.next_reportable() {
            self.shared.progress(|progress| (progress.applied, progress.fence) = (applied, fence));
            // The changes are published after the progress: a subscriber that receives a batch may immediately check
            // that it is applied.
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

    /// Records that a command list was lost because of `error`, and poisons the store.
    fn record_loss(&mut self, error: Error) {
        let error = self.shared.poison.set(error);
        self.lost.get_or_insert(error);
        self.shared.progress(|progress| progress.is_lost = true);
        // The change streams end, because no later batch will be applied.
        self.shared.changes().end();
    }

    fn release_pages(&mut self) {
        let is_free = |(page, memory): &(PageId, PageMemory)| !self.leases.leave(*page, memory.span().memory);
        // The memory of leases that were never ended is not freed.
        let pages =
            std::mem::take(&mut self.applied.memory).into_items().filter(is_free).map(|(_, memory)| memory);
        let handed_over = self.handed_over.drain(..).map(|(_, memory)| memory);
        let retiring = std::iter::from_fn(|| self.retiring.pop_front());
        self.arena.discard_all(pages.chain(retiring).chain(handed_over));
        if let Err(error) = self.arena.reap_all() {
            tracing::warn!(%error, "cannot release page memory");
        }
    }
}
