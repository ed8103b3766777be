//! Returns counters and sizes of a store, and frees unused memory.

use remanent_format::{Lsn, Place};

use super::{Store, StoreParts};
use crate::device::counts::{AllocationStats, LaneStats, TransferStats};
use crate::device::{Lane, MemoryStats};
use crate::engine::Engine;
use crate::error::Result;
use crate::images::disk_pages::DiskUsage;
use crate::log::LogStats;
use crate::memory::arena::PlaceUsage;
use crate::snapshot::progress::SnapshotStats;
use crate::snapshot::scrub::ScrubStats;
use crate::tiers::stats::{MoveStats, TierStats};

/// Counters and sizes of an open store, returned by [`Store::stats`].
///
/// ```
/// use remanent::{Ack, DeviceChoice, Options, Place};
/// let options = Options::new().device(DeviceChoice::Host).ack(Ack::Applied);
/// let store = options.open_temporary()?;
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
    /// The Lsn of the newest logged batch.
    pub logged: Lsn,
    /// The Lsn of the newest batch in the device's queue.
    pub applied: Lsn,
    /// The Lsn of the newest batch that survives a power cut.
    pub durable: Lsn,
    /// Counters of the log since the store was opened.
    pub log: LogStats,
    /// The number of the log segment that receives new frames.
    pub segment: u64,
    /// The usage of page memory, by place.
    pub places: Vec<(Place, PlaceUsage)>,
    /// Hits, misses and evictions of each place that has had a hit, miss or eviction.
    pub tiers: Vec<TierStats>,
    /// Counters of the pages that the store moved between places.
    pub moves: Vec<MoveStats>,
    /// The number and size of the pages in [`Place::Disk`].
    pub on_disk: DiskUsage,
    /// The number of bytes of host memory that buffer writes to pages on disk. The memory is freed when the pages get
    /// new images.
    pub pending_bytes: u64,
    /// Memory that the device has allocated from its driver for places that share it, in use or idle. Empty if the
    /// device keeps no idle memory.
    pub device_memory: Vec<(Place, MemoryStats)>,
    /// Allocations and frees of page memory since the store was opened, by place.
    pub allocations: Vec<(Place, AllocationStats)>,
    /// Counters of transfers between places since the store was opened. They include deltas and images to pages, reads
    /// and snapshots to the host, and moves between places. The host device counts transfers as well. The calling
    /// thread does most reads of pages in host memory, and these reads are not counted.
    pub transfers: Vec<TransferStats>,
    /// Counters of each lane's command lists since the store was opened. They include the number of queued lists, and
    /// the time that threads waited for lists.
    pub lanes: Vec<(Lane, LaneStats)>,
    /// The size of idle staging memory, in bytes.
    pub staging_idle_bytes: usize,
    /// Counters of snapshots, and the progress of the current snapshot.
    pub snapshots: SnapshotStats,
    /// Counters of scrubs, and the outcome of the last scrub.
    pub scrubs: ScrubStats,
    /// Counters of the archive, or `None` if the store has none.
    #[cfg(feature = "archive")]
    pub archive: Option<crate::log::ArchiveStats>,
}

impl Store {
    /// Returns the store's counters and sizes. All values are zero in a forked child.
    #[must_use]
    pub fn stats(&self) -> Stats {
        if self.check_process().is_err() {
            return Stats::default();
        }
        let Engine { log, applier, device, arena, staging, disk_pages, .. } = self.engine();
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
            device_memory: device.abilities().cache.map_or_else(Vec::new, |cache| cache.memory_stats()),
            allocations: device.counts().allocations(),
            transfers: device.counts().transfers(),
            lanes: device.counts().lanes(),
            staging_idle_bytes: staging.idle_bytes(),
            snapshots: snapshots.progress.stats(),
            scrubs: scrub.stats(),
            #[cfg(feature = "archive")]
            archive: self.engine().archive.as_ref().map(|archive| archive.stats()),
        }
    }

    /// Frees memory that no page uses: the memory of deleted pages, idle staging memory, and idle memory that the
    /// device has kept from its driver. Returns the number of bytes returned to the driver.
    ///
    /// On a GPU this call waits for all queued work of the GPU, including the caller's own. Use it when other code
    /// needs the memory.
    ///
    /// ```
    /// use remanent::{Place, Store};
    /// let store = Store::temporary()?;
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
        // The empty closure runs after all deletes that were submitted before, so their memory can be freed.
        applier.turn(|_| Ok(()))?;
        arena.reap_all()?;
        arena.drop_released();
        // Dropping the last handles to memory that pages have left may have retired more memory.
        arena.reap_all()?;
        staging.trim();
        device.abilities().cache.map_or(Ok(0), |cache| cache.trim())
    }

    /// Resets the recorded peak usage of every place to its current usage. [`Stats::places`] then reports the peak
    /// usage since this call.
    pub fn reset_peaks(&self) {
        if self.check_process().is_ok() {
            self.engine().arena.reset_peaks();
        }
    }
}
