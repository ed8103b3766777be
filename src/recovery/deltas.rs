//! Converts the deltas of the log to command lists for the device, and to changes of pages in host memory.

use std::collections::{BTreeMap, HashMap};

use remanent_format::op::{OpAt, claimed_ops, decode_payload};
use remanent_format::state::id_map::IdMap;
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

/// The number of bytes for which computing a checksum takes as long as decoding one operation.
const SUMMED_PER_OP: usize = 1 << 10;

/// A page whose length changes during replay.
pub(super) enum ResizedPage {
    /// The bytes of the page in host memory, up to its final length.
    Whole(PageWindow),
    /// The changes of a page that is assembled window by window after the replay.
    Windows(PageTrail),
}

/// The pages whose base (the image from which replay starts) is newer than the start of the replay. Replay skips the
/// batches that such a base already contains.
///
/// A snapshot is gathered while batches continue, so its image of a page may contain batches after `redo`. Applying
/// these batches again usually produces the same bytes, because the log contains after-images (I2). However, a batch
/// that precedes a resize may write past the end of the page in the image.
#[derive(Default)]
pub(super) struct NewerBases {
    /// The newest batch that the base of each page contains, by page.
    pages: IdMap<PageId, Lsn>,
    /// The newest batch in `pages`. Later batches apply to every page.
    newest: Lsn,
}

impl NewerBases {
    /// Creates the set from pages, each with the newest batch that its base contains.
    pub fn of(late: Vec<(PageId, Lsn)>) -> Self {
        let newest = late.iter().map(|(_, base)| *base).max().unwrap_or_default();
        Self { pages: late.into_iter().collect(), newest }
    }

    /// Returns whether replay must apply batch `lsn` to `page`.
    fn applies(&self, page: PageId, lsn: Lsn) -> bool {
        // Most batches are newer than every base and need no lookup per page.
        lsn > self.newest || self.pages.get(page).is_none_or(|base| lsn > *base)
    }
}

/// The pages that the host changes during replay, instead of the device.
#[derive(Default)]
pub(super) struct HostPages {
    /// The pages whose length changes during replay.
    pub resized: HashMap<PageId, ResizedPage>,
    /// The pages on disk, which have no page memory.
    pub on_disk: IdMap<PageId, DiskPage>,
}

impl HostPages {
    fn is_empty(&self) -> bool {
        self.resized.is_empty() && self.on_disk.is_empty()
    }
}

/// Builds command lists from batches in advance. The thread that replays the log submits the lists.
pub(super) struct Deltas<'l> {
    /// The memory of pages on the device. Deleted and unloaded pages have no memory.
    pub memory: &'l IdMap<PageId, PageMemory>,
    pub on_host: &'l Mutex<HostPages>,
    /// The pages whose bases already contain some of the batches to replay.
    pub late: &'l NewerBases,
    pub staging: &'l StagingPool,
    /// Whether bytes cross a bus to reach the device. If so, the device verifies long writes after they arrive (I12).
    pub crosses_bus: bool,
}

impl Deltas<'_> {
    /// Builds a command list from the batches of a run, in log order, for pages in device memory. Batches for pages in
    /// host memory are applied immediately.
    pub fn list(&self, run: BatchRun) -> Result<(CommandList, Vec<ArrivalProof>)> {
        // Only one thread builds lists, so this lock is uncontended.
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
        // The device reads deltas from the memory into which the frames were read, so the command list owns that
        // memory.
        if list.is_empty() {
            self.staging.put(run.memory.into_staging());
        } else {
            list.payload(run.memory);
        }
        Ok(list.take())
    }

    /// Returns the cost of a payload as an equivalent number of operations. The cost of a long write to a GPU includes
    /// its checksum.
    fn ops_of(&self, payload: &[u8]) -> usize {
        let Self { crosses_bus, .. } = *self;
        claimed_ops(payload) + if crosses_bus { payload.len() / SUMMED_PER_OP } else { 0 }
    }

    /// Builds the commands of some consecutive batches of a run.
    fn part(&self, run: &BatchRun, batches: &[LoggedBatch], on_host: &mut HostPages) -> Result<ListBuilder> {
        let mut list = ListBuilder::default();
        let index = list.payload_index();
        for batch in batches {
            let lsn = batch.header.lsn;
            let payload = PayloadAt { index, offset: batch.payload.start };
            let ops = decode_payload(run.payload(batch)).map_err(|defect| batch.damage(defect))?;
            list.make_room(&ops)?;
            let page_of = |op: &OpAt<'_>| op.op.page().filter(|page| self.late.applies(*page, lsn));
            // A page without memory is on disk, or a later batch deletes it, or it is not loaded yet. In the last case,
            // no batch of this run changes it.
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
                        // If a frame names an image of the page, that image is the page's base, and the frame is not
                        // replayed.
                        let aside = stage_aside(&op.op, &BTreeMap::new(), self.staging)?;
                        list.data(op, payload, memory, aside);
                    }
                }
            }
        }
        Ok(list)
    }
}
