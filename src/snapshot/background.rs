//! Automatic snapshots, triggered by growth of the log or by elapsed time.
//!
//! A thread watches the log. The thread takes a snapshot if a batch was committed since the last snapshot and a trigger
//! of the [`SnapshotSchedule`](crate::options::SnapshotSchedule) fires. Snapshots that callers take count as well.
//! Without commits, nothing is written.
//!
//! A process that is restarted often may never write enough log in one run. Therefore the log segments that exist when
//! the store is opened count as log growth, with their length on disk. After more than [`RESTARTS_MAX`] openings
//! without a snapshot, the thread takes a snapshot when the store is opened or, if that fails, when the store is
//! closed.
//!
//! A full disk, a lack of memory or another shortage leaves the store unchanged. The failure is reported in the store's
//! stats, and the snapshot is retried later. An unreadable page on disk is handled in the same way, because the page
//! may be rewritten or deleted. Any other failure has poisoned the store and ends the thread. When the store closes, a
//! snapshot in progress is abandoned.

use std::sync::Arc;
use std::time::Duration;

use remanent_format::Lsn;

use super::{SnapshotRequest, Snapshots};
use crate::base::poison::PoisonOnPanic;
use crate::base::sync::Instant;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::catalog::SnapshotInfo;
use crate::error::{Error, Result};

/// The delay before a failed snapshot is retried, unless the log grows by [`AGAIN_PART`] first.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// The inverse of the fraction of `log_bytes` by which the log must grow before a failed snapshot is retried.
const AGAIN_PART: u64 = 8;

/// The maximum number of openings of the store that may follow the newest snapshot. At the next opening, a snapshot is
/// due.
pub(crate) const RESTARTS_MAX: usize = 16;

/// The thresholds of log growth and time at which the background thread takes a snapshot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// The log growth, in bytes, that makes a snapshot due.
    pub log_bytes: Option<u64>,
    /// The time since the last snapshot began that makes a snapshot due.
    pub interval: Option<Duration>,
}

/// The end of the last snapshot, with the length of the log and the time when the snapshot began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastSnapshot {
    /// The last batch that the snapshot contains.
    pub lsn: Lsn,
    /// The number of bytes written to the log between the open and the beginning of the snapshot. The value is negative
    /// for log that the open replayed and no snapshot covers.
    pub bytes: i64,
    /// The number of openings of the store that follow the snapshot in the log, including the current one.
    pub restarts: usize,
    /// The time at which the snapshot began.
    pub at: Instant,
}

impl LastSnapshot {
    /// Returns whether more than [`RESTARTS_MAX`] openings of the store follow the snapshot in the log. A snapshot is
    /// then due regardless of the log's length.
    pub fn is_in_pieces(&self) -> bool {
        self.restarts > RESTARTS_MAX
    }
}

/// The next action of the background thread: take a snapshot, or wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Take,
    /// Waits until the log reaches batch `lsn` or the given length in bytes, or until the given time.
    Wait {
        lsn: Lsn,
        bytes: u64,
        until: Option<Instant>,
    },
}

/// An Lsn that no batch ever gets. Waiting for this Lsn waits only for the other conditions.
const NO_BATCH: Lsn = Lsn(u64::MAX);

impl Rules {
    /// Decides whether to take a snapshot, for a log that ends with batch `lsn` and is `bytes` bytes long.
    ///
    /// `is_pending_due` states whether the changes of pages on disk use so much memory that a snapshot is due. After a
    /// failed attempt, `again` contains the log length and the time at which to retry, whichever is reached first. The
    /// thread calls this function for both of its checks, so that their decisions cannot differ.
    fn next(
        &self,
        (lsn, bytes): (Lsn, u64),
        last: LastSnapshot,
        is_pending_due: bool,
        again: Option<(u64, Instant)>,
        now: Instant,
    ) -> Next {
        // No batch was committed since the last snapshot. Seals may have lengthened the log.
        if lsn <= last.lsn {
            return Next::Wait { lsn: last.lsn.next(), bytes: u64::MAX, until: None };
        }
        // The growth counts from the length of the log when the last snapshot began.
        let due_bytes = self.log_bytes.map_or(u64::MAX, |more| more.saturating_add_signed(last.bytes));
        let due_at = self.interval.and_then(|interval| last.at.checked_add(interval));
        if !last.is_in_pieces()
            && !is_pending_due
            && bytes < due_bytes
            && due_at.is_none_or(|due_at| now < due_at)
        {
            return Next::Wait { lsn: NO_BATCH, bytes: due_bytes, until: due_at };
        }
        match again {
            Some((again_bytes, again_at)) if bytes < again_bytes && now < again_at => {
                Next::Wait { lsn: NO_BATCH, bytes: again_bytes, until: Some(again_at) }
            }
            _ => Next::Take,
        }
    }
}

/// A handle to the thread that takes background snapshots.
pub(crate) struct BackgroundSnapshots {
    snapshots: Arc<Snapshots>,
    /// The thread, or `None` if no trigger is configured or the thread has ended.
    thread: Option<JoinHandle<()>>,
}

impl BackgroundSnapshots {
    /// Starts the thread if a log length or an interval is configured.
    pub fn start(snapshots: Arc<Snapshots>, rules: Rules) -> Result<Self> {
        let thread = if rules.log_bytes.is_some() || rules.interval.is_some() {
            let life = SnapshotLoop(snapshots.clone());
            // Without snapshots the log would grow forever, so a panic poisons the store.
            let poisons =
                PoisonOnPanic { poison: snapshots.engine.poison.clone(), thread: "the thread for snapshots" };
            let thread = threads::start("remanent-snapshot", move || {
                let _poisons = poisons;
                life.live(rules);
            });
            Some(thread.map_err(|error| Error::thread("the thread for snapshots", error))?)
        } else {
            None
        };
        Ok(Self { snapshots, thread })
    }
}

impl Drop for BackgroundSnapshots {
    /// Stops the thread and abandons its snapshot in progress. Snapshots that wait for verification are still verified.
    fn drop(&mut self) {
        // This cancels a rate-limited snapshot, whose thread may be waiting for its next write.
        self.snapshots.pace.call_off();
        // If no snapshot is in progress, the thread waits for the log to grow, and is woken here.
        self.snapshots.engine.log.call_watcher();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for snapshots panicked");
        }
        self.snapshots.unverified.join();
    }
}

impl Snapshots {
    /// Takes a snapshot that includes batch `lsn` at the rate of background snapshots, unless a snapshot with this
    /// batch was taken in the meantime.
    #[cfg(feature = "archive")]
    pub fn take_in_background(self: &Arc<Self>, lsn: Lsn) -> Result<()> {
        let is_due = || self.last.lock().lsn < lsn;
        SnapshotLoop(self.clone()).take(lsn, is_due).map(drop)
    }
}

struct SnapshotLoop(Arc<Snapshots>);

impl SnapshotLoop {
    fn live(&self, rules: Rules) {
        let snapshots = &*self.0;
        let mut again = None;
        while !snapshots.pace.is_called_off() {
            // The length of the log must be read first, so that a snapshot which a caller takes in between postpones
            // the next one. In the other order, the commits before and after that snapshot would be added up and
            // trigger an unnecessary snapshot.
            let log = snapshots.engine.log.length();
            let last = *snapshots.last.lock();
            let is_pending_due = snapshots.engine.disk_pages.is_snapshot_due();
            match rules.next(log, last, is_pending_due, again, Instant::now()) {
                Next::Wait { lsn, bytes, until } => snapshots.engine.log.watch(lsn, bytes, until),
                // The condition is checked again when the snapshot can begin, because a caller may have taken a
                // snapshot in between.
                Next::Take => match self.take(log.0, || {
                    let is_pending_due = snapshots.engine.disk_pages.is_snapshot_due();
                    rules.next(log, *snapshots.last.lock(), is_pending_due, again, Instant::now())
                        == Next::Take
                }) {
                    Ok(_) => again = None,
                    // The damaged page may still be rewritten or deleted, after which a snapshot is possible.
                    Err(error) if error.is_passing() || matches!(error, Error::Damaged(_)) => {
                        tracing::warn!(%error, "cannot take a snapshot; will retry");
                        // Without this delay, the retry would happen at the next batch, gather the same pages, and fail
                        // again.
                        let more = rules.log_bytes.map_or(u64::MAX, |bytes| (bytes / AGAIN_PART).max(1));
                        let bytes = log.1.saturating_add(more);
                        again = Some((bytes, Instant::now() + AGAIN_AFTER));
                    }
                    // The store is closing, or it is poisoned and reports the reason itself.
                    Err(_) => return,
                },
            }
        }
    }
}

impl SnapshotLoop {
    /// Takes a snapshot that includes batch `lsn`, which is logged but possibly not applied yet. Calls `is_due` once
    /// the batch is applied, and returns `None` if the result is `false`.
    fn take(&self, lsn: Lsn, is_due: impl FnOnce() -> bool) -> Result<Option<SnapshotInfo>> {
        // A snapshot begins at the last applied batch: without this wait it might not include `lsn`.
        self.0.engine.applier.wait_applied(lsn)?;
        // A background snapshot waits for the lock without making the snapshot that holds it run at full speed.
        let mut catalog = self.0.catalog.lock_patiently();
        let request = SnapshotRequest { paced: true, ..SnapshotRequest::default() };
        // A caller's snapshot, for which this thread has waited, may have made this one unnecessary.
        is_due().then(|| self.0.take(&mut catalog, &request)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests the decision for log growth, elapsed time and idle stores. A snapshot without a preceding commit would
    /// make an idle store write forever.
    #[test]
    fn snapshot_is_due_by_bytes_or_time_only_after_a_commit() {
        let begun = Instant::now();
        let later = |seconds| begun + Duration::from_secs(seconds);
        let last = LastSnapshot { lsn: Lsn(5), bytes: 1000, restarts: 0, at: begun };
        let opened = LastSnapshot { lsn: Lsn(5), bytes: -600, restarts: RESTARTS_MAX, at: begun };
        let often = LastSnapshot { restarts: RESTARTS_MAX + 1, ..opened };
        let wait =
            |lsn, bytes, until: Option<u64>| Next::Wait { lsn: Lsn(lsn), bytes, until: until.map(later) };
        let both = Rules { log_bytes: Some(500), interval: Some(Duration::from_secs(60)) };
        let by_bytes = Rules { interval: None, ..both };
        let by_time = Rules { log_bytes: None, ..both };
        let (none, max) = (None, u64::MAX);
        let again = Some((1562, later(10)));
        for (why, rules, log, last, again, now, expected) in [
            ("no commit, whatever seals take", both, (5, 9000), last, none, 900, wait(6, max, None)),
            ("one commit", both, (6, 1100), last, none, 1, wait(max, 1500, Some(60))),
            ("grown", both, (6, 1500), last, none, 1, Next::Take),
            ("time has passed", both, (6, 1001), last, none, 60, Next::Take),
            ("by bytes alone", by_bytes, (6, 1001), last, none, 900, wait(max, 1500, None)),
            ("by time alone", by_time, (6, 9000), last, none, 1, wait(max, max, Some(60))),
            ("replayed more than enough", both, (8, 0), opened, none, 0, Next::Take),
            ("replayed, by time alone", by_time, (8, 0), opened, none, 0, wait(max, max, Some(60))),
            ("opened too often", by_time, (6, 0), often, none, 0, Next::Take),
            ("opened too often, no commit", both, (5, 0), often, none, 900, wait(6, max, None)),
            ("failed", both, (6, 1500), last, again, 9, wait(max, 1562, Some(10))),
            ("failed, grown since", both, (7, 1562), last, again, 9, Next::Take),
            ("failed long ago", both, (6, 1500), last, again, 10, Next::Take),
        ] {
            assert_eq!(rules.next((Lsn(log.0), log.1), last, false, again, later(now)), expected, "{why}");
            // Pending changes make a snapshot due just as log growth does.
            let by_pending = rules.next((Lsn(log.0), log.1), last, true, again, later(now));
            let is_due = log.0 > last.lsn.0 && again.is_none_or(|again| log.1 >= again.0 || now >= 10);
            assert_eq!(by_pending == Next::Take, is_due, "{why}");
        }
    }
}
