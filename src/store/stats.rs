//! Counts and sizes of a store, and giving memory back.

use remanent_format::{Lsn, Place};

use super::{Store, StoreParts};
use crate::device::{AllocationStats, Lane, LaneStats, MemoryStats, TransferStats};
use crate::engine::Engine;
use crate::error::Result;
use crate::images::disk_pages::DiskUsage;
use crate::log::LogStats;
use crate::memory::arena::PlaceUsage;
use crate::snapshot::{ScrubStats, SnapshotStats};
use crate::tiers::{MoveStats, TierStats};

/// Counts and sizes of an open store.
///
/// ```
/// use remanent::{Ack, DeviceChoice, Options, Place, Store};
/// let options = Options::default().device(DeviceChoice::Host).ack(Ack::Applied);
/// let store = Store::temporary(options)?;
/// let mut batch = store.batch();
/// let page = batch.create(100, Place::Device(0)).page();
/// batch.write(page, 0, &[1; 60]);
/// let page = store.commit(batch)?.pages[0];
/// store.ensure(&[page], Place::Pinned)?;
///
/// let stats = store.stats();
/// let moved = |from, to| stats.transfers.iter().find(|moved| (moved.from, moved.to) == (from, to));
/// assert_eq!(moved(Place::Host, Place::Device(0)).unwrap().bytes, 60);
/// assert_eq!(moved(Place::Device(0), Place::Pinned).unwrap().bytes, 100);
/// let pinned = stats.allocations.iter().find(|(place, _)| *place == Place::Pinned);
/// assert_eq!(pinned.unwrap().1.allocations, 1);
/// # Ok::<(), remanent::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// The newest batch logged.
    pub logged: Lsn,
    /// The newest batch in the device's queue.
    pub applied: Lsn,
    /// The newest batch that survives a power cut.
    pub durable: Lsn,
    /// What the log did since it was opened.
    pub log: LogStats,
    /// The segment that takes frames.
    pub segment: u64,
    /// Page memory by place.
    pub places: Vec<(Place, PlaceUsage)>,
    /// What was asked for and what left, by place, as far as anything was.
    pub tiers: Vec<TierStats>,
    /// Pages that the store moved from place to place.
    pub moves: Vec<MoveStats>,
    /// Pages of [`Place::Disk`].
    pub on_disk: DiskUsage,
    /// Bytes of host memory that hold what batches wrote to pages on disk since their newest images.
    pub pending_bytes: u64,
    /// What the device holds from its driver for places that share it, in use or idle; empty where the device
    /// keeps nothing back.
    pub device_memory: Vec<(Place, MemoryStats)>,
    /// Page memory that was allocated and given back since the store was opened, by place.
    pub allocations: Vec<(Place, AllocationStats)>,
    /// What was moved between places since then, on the host device as well: deltas and images to the pages,
    /// reads and snapshots to the host, moves from place to place. Most reads of pages in host memory are a
    /// thread's own, and move nothing.
    pub transfers: Vec<TransferStats>,
    /// The lists of each lane since then: how many are queued, and how long threads waited.
    pub lanes: Vec<(Lane, LaneStats)>,
    /// Bytes of staging that lie idle.
    pub staging_idle_bytes: usize,
    /// Snapshots taken, and how far the one being taken has come.
    pub snapshots: SnapshotStats,
    /// Scrubs, and what the last one found.
    pub scrubs: ScrubStats,
}

impl Store {
    /// Counts and sizes; all zero in a forked child.
    #[must_use]
    pub fn stats(&self) -> Stats {
        if self.check_process().is_err() {
            return Stats::default();
        }
        let Engine { log, applier, device, arena, staging, disk_pages, counts, .. } = self.engine();
        let StoreParts { snapshots, scrub, mover, .. } = &*self.parts;
        Stats {
            logged: self.lsn(),
            applied: applier.applied(),
            durable: log.durable(),
            log: log.stats(),
            segment: log.current_segment(),
            places: arena.usages().into_iter().collect(),
            tiers: mover.counts.tiers(),
            moves: mover.counts.moves(),
            on_disk: disk_pages.usage(),
            pending_bytes: disk_pages.pending_bytes(),
            device_memory: device.memory_stats(),
            allocations: counts.allocations(),
            transfers: counts.transfers(),
            lanes: counts.lanes(),
            staging_idle_bytes: staging.idle_bytes(),
            snapshots: snapshots.progress.stats(),
            scrubs: scrub.stats(),
        }
    }

    /// Gives back memory that no page uses any more: what deletes left, idle staging, and what the device
    /// keeps from its driver. Returns how many bytes went back to the driver. On a GPU this waits for
    /// everything that the GPU has to do, the caller's own work included, so it is for a caller that needs
    /// the memory elsewhere.
    ///
    /// ```
    /// use remanent::{Options, Place, Store};
    /// let store = Store::temporary(Options::default())?;
    /// let mut batch = store.batch();
    /// batch.create(1 << 20, Place::Host);
    /// let created = store.commit(batch)?;
    /// let mut batch = store.batch();
    /// batch.delete(created.pages[0]);
    /// store.commit(batch)?;
    /// store.trim()?;
    /// let usage = store.stats().places[0].1;
    /// assert_eq!((usage.used(), usage.peak_bytes), (0, 1 << 20));
    /// store.reset_peaks();
    /// assert_eq!(store.stats().places[0].1.peak_bytes, 0);
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// # Errors
    /// A device error.
    pub fn trim(&self) -> Result<u64> {
        self.check_process()?;
        let Engine { applier, device, arena, staging, .. } = self.engine();
        // Behind the deletes submitted so far.
        applier.turn(|_| Ok(()))?;
        arena.reap_all()?;
        arena.drop_let_go();
        // Memory of the store's that held a page for a caller is retired by the drop.
        arena.reap_all()?;
        staging.trim();
        device.trim()
    }

    /// Lets the peak of every place begin anew, at what is in use now: [`Stats::places`] then tells the most
    /// that was in use since.
    pub fn reset_peaks(&self) {
        if self.check_process().is_ok() {
            self.engine().arena.reset_peaks();
        }
    }
}
