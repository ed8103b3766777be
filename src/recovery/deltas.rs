//! The deltas of the log, as lists for the device and as changes of pages in host memory.

use std::collections::{BTreeMap, HashMap};

use remanent_format::op::{OpAt, claimed_ops, decode_payload};
use remanent_format::state::by_id::ById;
use remanent_format::state::trail::PageTrail;
use remanent_format::state::window::PageWindow;
use remanent_format::{Lsn, PageId};

use super::log_reader::{BatchRun, LoggedBatch};
use crate::applier::{ArrivalProof, ArrivalSums, ListBuilder, PayloadAt, stage_aside};
use crate::base::sync::Mutex;
use crate::device::CommandList;
use crate::error::Result;
use crate::images::disk_pages::DiskPage;
use crate::memory::arena::PageMemory;
use crate::memory::staging::StagingPool;

/// Bytes that a thread sums while it decodes an operation.
const SUMMED_PER_OP: usize = 1 << 10;

/// A page whose length changes during replay.
pub(super) enum ResizedPage {
    /// Its bytes: no more than it has in the end.
    Whole(PageWindow),
    /// It is put together after the replay, window by window.
    Windows(PageTrail),
}

/// The pages whose bases are newer than the batch after which the replay begins. For all other pages each
/// batch that is read is news.
///
/// A snapshot is gathered while batches go on, so its image of a page may hold batches after `redo`.
/// Applied again, after-images give the same bytes (I2). But a batch from before a resize may write past
/// the end of the page that the image holds.
#[derive(Default)]
pub(super) struct NewerBases {
    /// The newest batch that the base of each such page holds.
    pages: ById<PageId, Lsn>,
    /// The newest of these batches: after it, every batch applies to every page.
    newest: Lsn,
}

impl NewerBases {
    /// Takes the pages, each with the newest batch that its base holds.
    pub fn of(late: Vec<(PageId, Lsn)>) -> Self {
        let newest = late.iter().map(|(_, base)| *base).max().unwrap_or_default();
        Self { pages: late.into_iter().collect(), newest }
    }

    /// Whether a batch is to be applied to the bytes of a page of the table.
    fn applies(&self, page: PageId, lsn: Lsn) -> bool {
        // Most batches are newer than every base: they need no look-up for each page.
        lsn > self.newest || self.pages.get(page).is_none_or(|base| lsn > *base)
    }
}

/// The pages to which this thread applies batches.
#[derive(Default)]
pub(super) struct HostPages {
    /// Those that become shorter or longer on the way.
    pub resized: HashMap<PageId, ResizedPage>,
    /// Those that have no memory.
    pub on_disk: ById<PageId, DiskPage>,
}

impl HostPages {
    fn is_empty(&self) -> bool {
        self.resized.is_empty() && self.on_disk.is_empty()
    }
}

/// Makes lists of batches, ahead of the thread that submits them.
pub(super) struct Deltas<'l> {
    /// Where pages lie on the device. Deleted and unloaded ones have none.
    pub memory: &'l ById<PageId, PageMemory>,
    pub on_host: &'l Mutex<HostPages>,
    /// The batches that a page's base holds already.
    pub late: &'l NewerBases,
    pub staging: &'l StagingPool,
    /// Whether the device proves long writes where they arrive (I12).
    pub crosses_bus: bool,
}

impl Deltas<'_> {
    /// Makes the list of a run's batches for pages in device memory, in the order of the log. Batches of
    /// pages in host memory are applied at once.
    pub fn list(&self, run: BatchRun) -> Result<(CommandList, Vec<ArrivalProof>)> {
        // One thread has lists made, so this lock is never waited for.
        let mut on_host = self.on_host.lock();
        let parts = if on_host.is_empty() {
            let part = |batches| self.part(&run, &run.batches[batches], &mut HostPages::default());
            run.by_threads(|batch| self.ops_of(run.payload(batch)), part)?
        } else {
            vec![self.part(&run, &run.batches, &mut on_host)?]
        };
        let mut list = ListBuilder::default();
        for part in parts {
            list.append(part)?;
        }
        // The device reads deltas from where the frames were read: the list owns that memory until it is
        // done.
        if list.is_empty() {
            self.staging.give(run.memory.into_staging());
        } else {
            list.payload(run.memory);
        }
        Ok(list.take())
    }

    /// How many operations take as long as these. Long writes to a GPU are summed, too.
    fn ops_of(&self, payload: &[u8]) -> usize {
        let Self { crosses_bus, .. } = *self;
        claimed_ops(payload) + if crosses_bus { payload.len() / SUMMED_PER_OP } else { 0 }
    }

    /// The part of a list that some batches of a run are.
    fn part(&self, run: &BatchRun, batches: &[LoggedBatch], on_host: &mut HostPages) -> Result<ListBuilder> {
        let mut list = ListBuilder::default();
        let index = list.payload_index();
        for batch in batches {
            let lsn = batch.header.lsn;
            let payload = PayloadAt { index, offset: batch.payload.start };
            let ops = decode_payload(run.payload(batch)).map_err(|defect| batch.damage(defect))?;
            list.make_room(&ops)?;
            let page_of = |op: &OpAt<'_>| op.op.page().filter(|page| self.late.applies(*page, lsn));
            // A page without memory is on disk, or deleted by a later batch, or stays unloaded: then no batch
            // here changes it.
            let target = |op: &OpAt<'_>| {
                let page = page_of(op)?;
                Some((page, self.memory.get(page)?))
            };
            if self.crosses_bus {
                let on_device =
                    |op: &&OpAt<'_>| target(op).is_some_and(|(page, _)| !on_host.resized.contains_key(&page));
                let writes = ops.iter().filter(on_device).map(|op| &op.op);
                if let Some(sums) = ArrivalSums::of(writes, self.staging)? {
                    list.prove(sums);
                }
            }
            for (index, op) in ops.iter().enumerate() {
                if let Some(on_disk) = page_of(op).and_then(|page| on_host.on_disk.get_mut(page)) {
                    on_disk.apply(&op.op);
                    continue;
                }
                let Some((page, memory)) = target(op) else { continue };
                match on_host.resized.get_mut(&page) {
                    Some(ResizedPage::Whole(whole)) => whole.apply(&op.op),
                    Some(ResizedPage::Windows(trail)) => trail
                        .note(&batch.header, run.payload(batch), &ops, index)
                        .map_err(|defect| batch.damage(defect))?,
                    None => {
                        // No frame that names an image applies here: the image is its page's base from that
                        // batch on.
                        let aside = stage_aside(&op.op, &BTreeMap::new(), self.staging)?;
                        list.data(op, payload, memory, aside);
                    }
                }
            }
        }
        Ok(list)
    }
}
