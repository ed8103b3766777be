//! Publishes a store's counters and sizes through the `metrics` facade. The caller requests each publication, so that
//! commits do no work for metrics.

use std::time::Duration;

use metrics::{Label, counter, gauge};
use remanent_format::Place;

use super::Store;
use super::stats::Stats;
use crate::memory::arena::PlaceUsage;

impl Store {
    /// Publishes [`Store::stats`] to the recorder of the `metrics` facade. Call this at intervals, or before an
    /// exporter is read.
    ///
    /// Every metric has the label `store`, which is the store's directory. Metrics of a place also have the label
    /// `place`, those of a lane `lane`, and those of transfers and moves `from` and `to`.
    ///
    /// | metric | kind | description |
    /// |---|---|---|
    /// | `remanent_lsn` with `state` = `logged`, `applied`, `durable` | counter | the newest batch in each state |
    /// | `remanent_log_bytes`, `remanent_log_syncs` | counter | bytes written to the log, and syncs of it, since the open |
    /// | `remanent_place_bytes` with `state` = `allocated`, `retired`, `claimed` | gauge | budget of a place that is in use |
    /// | `remanent_pages` | gauge | allocations in a place |
    /// | `remanent_disk_pages`, `remanent_disk_bytes` | gauge | pages in [`Place::Disk`], and their bytes |
    /// | `remanent_pending_bytes` | gauge | host memory that buffers the writes of batches to pages on disk |
    /// | `remanent_tier_hits`, `_misses`, `_evictions`, `_waits`, `_wait_seconds` | counter, gauge | [`TierStats`] |
    /// | `remanent_move_pages`, `_bytes`, `_seconds` | counter, gauge | [`MoveStats`] |
    /// | `remanent_allocations`, `remanent_frees`, `remanent_refusals` | counter | [`AllocationStats`] |
    /// | `remanent_transfer_pages`, `_bytes`, `_lists`, `_seconds` | counter, gauge | [`TransferStats`] |
    /// | `remanent_lane_lists`, `_waits`, `_queued`, `_wait_seconds` | counter, gauge | [`LaneStats`] |
    ///
    /// Nothing is published in a forked child.
    ///
    /// ```
    /// use remanent::Store;
    /// let store = Store::temporary()?;
    /// store.commit(store.batch().set_root("step", 1u64))?;
    /// store.publish_metrics(); // to the recorder that the program installed, if it did
    /// # Ok::<(), remanent::Error>(())
    /// ```
    ///
    /// [`TierStats`]: crate::stats::TierStats
    /// [`MoveStats`]: crate::stats::MoveStats
    /// [`AllocationStats`]: crate::stats::AllocationStats
    /// [`TransferStats`]: crate::stats::TransferStats
    /// [`LaneStats`]: crate::stats::LaneStats
    pub fn publish_metrics(&self) {
        if self.check_process().is_err() {
            return;
        }
        let store = Label::new("store", self.disk().label());
        publish(&store, &self.stats());
    }
}

fn publish(store: &Label, stats: &Stats) {
    let labels = |more: &[(&'static str, String)]| {
        let more = more.iter().map(|(name, value)| Label::new(*name, value.clone()));
        std::iter::once(store.clone()).chain(more).collect::<Vec<_>>()
    };
    let states = [("logged", stats.logged), ("applied", stats.applied), ("durable", stats.durable)];
    for (state, lsn) in states {
        counter!("remanent_lsn", labels(&[("state", state.to_owned())])).absolute(lsn.0);
    }
    counter!("remanent_log_bytes", labels(&[])).absolute(stats.log.bytes);
    counter!("remanent_log_syncs", labels(&[])).absolute(stats.log.syncs);
    let of_place = |place: Place| labels(&[("place", place.to_string())]);
    for (place, usage) in &stats.places {
        let PlaceUsage { allocated_bytes, retired_bytes, claimed_bytes, count, .. } = *usage;
        let states = [("allocated", allocated_bytes), ("retired", retired_bytes), ("claimed", claimed_bytes)];
        for (state, bytes) in states {
            let labels = labels(&[("place", place.to_string()), ("state", state.to_owned())]);
            gauge!("remanent_place_bytes", labels).set(bytes as f64);
        }
        gauge!("remanent_pages", of_place(*place)).set(count as f64);
    }
    gauge!("remanent_disk_pages", labels(&[])).set(stats.on_disk.pages as f64);
    gauge!("remanent_disk_bytes", labels(&[])).set(stats.on_disk.bytes as f64);
    gauge!("remanent_pending_bytes", labels(&[])).set(stats.pending_bytes as f64);
    for tier in &stats.tiers {
        let labels = of_place(tier.place);
        counter!("remanent_tier_hits", labels.clone()).absolute(tier.hits);
        counter!("remanent_tier_misses", labels.clone()).absolute(tier.misses);
        counter!("remanent_tier_evictions", labels.clone()).absolute(tier.evictions);
        counter!("remanent_tier_waits", labels.clone()).absolute(tier.waits);
        gauge!("remanent_tier_wait_seconds", labels).set(seconds(tier.waited));
    }
    let of_pair = |from: Place, to: Place| labels(&[("from", from.to_string()), ("to", to.to_string())]);
    for moved in &stats.moves {
        let labels = of_pair(moved.from, moved.to);
        counter!("remanent_move_pages", labels.clone()).absolute(moved.pages);
        counter!("remanent_move_bytes", labels.clone()).absolute(moved.bytes);
        gauge!("remanent_move_seconds", labels).set(seconds(moved.took));
    }
    for (place, allocations) in &stats.allocations {
        counter!("remanent_allocations", of_place(*place)).absolute(allocations.allocations);
        counter!("remanent_frees", of_place(*place)).absolute(allocations.frees);
        counter!("remanent_refusals", of_place(*place)).absolute(allocations.refusals);
    }
    for moved in &stats.transfers {
        let labels = of_pair(moved.from, moved.to);
        counter!("remanent_transfer_pages", labels.clone()).absolute(moved.pages);
        counter!("remanent_transfer_bytes", labels.clone()).absolute(moved.bytes);
        counter!("remanent_transfer_lists", labels.clone()).absolute(moved.lists);
        gauge!("remanent_transfer_seconds", labels).set(seconds(moved.time));
    }
    for (lane, of_lane) in &stats.lanes {
        let labels = labels(&[("lane", format!("{lane:?}").to_lowercase())]);
        counter!("remanent_lane_lists", labels.clone()).absolute(of_lane.lists);
        counter!("remanent_lane_waits", labels.clone()).absolute(of_lane.waits);
        gauge!("remanent_lane_queued", labels.clone()).set(of_lane.queued as f64);
        gauge!("remanent_lane_wait_seconds", labels).set(seconds(of_lane.wait_time));
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}
