//! Snapshots of the store's own accord: when the log has grown, or after a time.
//!
//! A thread waits for the log. It takes a snapshot when there was a commit since the last one and the log
//! has grown by [`Options::snapshot_log_bytes`](crate::Options::snapshot_log_bytes), or
//! [`Options::snapshot_interval`](crate::Options::snapshot_interval) has passed; a snapshot that the caller
//! takes counts as well. Where nothing is committed, nothing is written.
//!
//! A log may also consist of many short runs that commit a little each. The log that was there at the
//! open counts by the length of its segments on disk. After more than [`RESTARTS_MAX`] openings a
//! snapshot is due: at the open, or when the store is closed, if there was no time for it before.
//!
//! A full disk, no memory, or another shortage is a clean failure: the store's stats tell of it, and it
//! is tried again later. So is a page on disk that cannot be read: it may be written anew, or deleted. Every
//! other failure has poisoned the store, and ends the thread. When the store closes, the snapshot that is
//! being gathered is given up.

use std::sync::Arc;
use std::time::Duration;

use remanent_format::Lsn;

use super::{SnapshotRequest, Snapshots};
use crate::base::poison::PanicPoisons;
use crate::base::sync::Instant;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::catalog::SnapshotInfo;
use crate::error::{Error, Result};

/// The pause after a failure that changes nothing, unless the log grows by [`AGAIN_PART`] before.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// The share of the log that makes a snapshot due by which it must grow for another try.
const AGAIN_PART: u64 = 8;

/// Openings in the log after the newest snapshot; more of them make one due.
pub(crate) const RESTARTS_MAX: usize = 16;

/// The rules by which a snapshot is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// By how many bytes the log must have grown.
    pub log_bytes: Option<u64>,
    /// How long ago the last snapshot must have begun.
    pub interval: Option<Duration>,
}

/// How far the last snapshot goes, and where the log stood when it began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastSnapshot {
    /// The last batch that the snapshot has.
    pub lsn: Lsn,
    /// Bytes of the log since the open. Below zero: that much was replayed then, and is in no snapshot.
    pub bytes: i64,
    /// Openings in the log after the snapshot, that of this run among them.
    pub restarts: usize,
    /// When it began.
    pub at: Instant,
}

impl LastSnapshot {
    /// Whether the log after it consists of too many runs.
    pub fn is_in_pieces(&self) -> bool {
        self.restarts > RESTARTS_MAX
    }
}

/// The thread's next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Take,
    /// Until the log has this batch or this number of bytes, or the time has come.
    Wait {
        lsn: Lsn,
        bytes: u64,
        until: Option<Instant>,
    },
}

/// A batch that there will never be.
const NO_BATCH: Lsn = Lsn(u64::MAX);

impl Rules {
    /// Decides whether to take a snapshot, for a log that ends with batch `lsn` and has `bytes` bytes.
    /// `is_pending_due` says that changes of pages on disk take up enough memory to make one due.
    /// After a try that failed, `again` says before which length of the log, or which time, there is no
    /// other. This is the one place that decides, so that the thread's second look cannot differ from the
    /// first.
    fn next(
        &self,
        (lsn, bytes): (Lsn, u64),
        last: LastSnapshot,
        is_pending_due: bool,
        again: Option<(u64, Instant)>,
        now: Instant,
    ) -> Next {
        // Nothing was committed since, whatever seals added to the log.
        if lsn <= last.lsn {
            return Next::Wait { lsn: last.lsn.next(), bytes: u64::MAX, until: None };
        }
        // Counted from where the log stood when the last snapshot began.
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

/// The thread for snapshots, as the store holds it.
pub(crate) struct BackgroundSnapshots {
    snapshots: Arc<Snapshots>,
    /// The thread; `None` if there is no rule, or once it was ended.
    thread: Option<JoinHandle<()>>,
}

impl BackgroundSnapshots {
    /// Starts the thread, if there is a rule for it to follow.
    pub fn start(snapshots: Arc<Snapshots>, rules: Rules) -> Result<Self> {
        let thread = if rules.log_bytes.is_some() || rules.interval.is_some() {
            let life = SnapshotLoop(snapshots.clone());
            // A store whose snapshots have stopped would grow its log for ever: a panic must show.
            let poisons =
                PanicPoisons { poison: snapshots.engine.poison.clone(), thread: "the thread for snapshots" };
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
    /// Ends the thread; a snapshot that it is gathering is given up. The snapshots that wait to be verified
    /// are.
    fn drop(&mut self) {
        // The pace first: a thread that waits for its turn to write hears of it there.
        self.snapshots.pace.call_off();
        // And one that waits for the log to grow, here.
        self.snapshots.engine.log.call_watcher();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for snapshots panicked");
        }
        self.snapshots.unverified.join();
    }
}

/// The life of the thread.
struct SnapshotLoop(Arc<Snapshots>);

impl SnapshotLoop {
    fn live(&self, rules: Rules) {
        let snapshots = &*self.0;
        let mut again = None;
        while !snapshots.pace.is_called_off() {
            // In this order: a snapshot that a caller takes in between puts the next one off. In the
            // other order the commits before it and after it would be counted together, and call for a
            // needless one.
            let log = snapshots.engine.log.length();
            let last = *snapshots.last.lock();
            let is_pending_due = snapshots.engine.disk_pages.is_snapshot_due();
            match rules.next(log, last, is_pending_due, again, Instant::now()) {
                Next::Wait { lsn, bytes, until } => snapshots.engine.log.watch(lsn, bytes, until),
                // Looked at again once it may begin: a caller's snapshot that was being taken meanwhile
                // may have made it needless.
                Next::Take => match self.take(log.0, || {
                    let is_pending_due = snapshots.engine.disk_pages.is_snapshot_due();
                    rules.next(log, *snapshots.last.lock(), is_pending_due, again, Instant::now())
                        == Next::Take
                }) {
                    Ok(_) => again = None,
                    // A page whose image is damaged may be given new bytes, or be deleted.
                    Err(error) if error.is_passing() || matches!(error, Error::Damaged(_)) => {
                        tracing::warn!(%error, "no snapshot could be taken; it is tried again later");
                        // Not at the next batch: it would find the same shortage, and gather again what
                        // it gathered just now.
                        let more = rules.log_bytes.map_or(u64::MAX, |bytes| (bytes / AGAIN_PART).max(1));
                        let bytes = log.1.saturating_add(more);
                        again = Some((bytes, Instant::now() + AGAIN_AFTER));
                    }
                    // The store closes, or it is poisoned and says why itself.
                    Err(_) => return,
                },
            }
        }
    }
}

impl SnapshotLoop {
    /// Takes a snapshot that has batch `lsn`. That batch is logged, but perhaps on its way to the
    /// applier. `None` if the snapshot is not due any more when it could begin.
    fn take(&self, lsn: Lsn, is_due: impl FnOnce() -> bool) -> Result<Option<SnapshotInfo>> {
        // A snapshot begins at the last batch that is applied: without the wait it might not have this one.
        self.0.engine.applier.wait_applied(lsn)?;
        // Patiently: a snapshot in the background makes no other one hurry.
        let mut catalog = self.0.catalog.lock_patiently();
        let request = SnapshotRequest { paced: true, ..SnapshotRequest::default() };
        // A caller's snapshot that lasted may have made it needless.
        is_due().then(|| self.0.take(&mut catalog, &request)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All cases in which the thread decides, as a table. A snapshot without a commit before it would
    /// make a store that is not used write for ever.
    #[test]
    fn a_snapshot_is_due_by_bytes_or_by_time_and_never_without_a_commit() {
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
            // What is pending makes a snapshot due as the log does.
            let by_pending = rules.next((Lsn(log.0), log.1), last, true, again, later(now));
            let is_due = log.0 > last.lsn.0 && again.is_none_or(|again| log.1 >= again.0 || now >= 10);
            assert_eq!(by_pending == Next::Take, is_due, "{why}");
        }
    }
}
