//! Automatic scrubs by a background thread, at intervals and at a limited rate.
//!
//! If the disk is full or memory is short, the failure is reported in the store's stats, and the next scrub finds the
//! same damage. Any other failure has poisoned the store and ends the thread. When the store closes, the current pass
//! is abandoned.

use std::sync::Arc;
use std::time::Duration;

use super::super::SnapshotRequest;
use super::Scrub;
use crate::base::poison::PoisonOnPanic;
use crate::base::sync::Instant;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::error::{Error, Result};

/// A handle to the thread that runs background scrubs.
pub(crate) struct Scrubber {
    scrub: Arc<Scrub>,
    thread: Option<JoinHandle<()>>,
}

impl Scrubber {
    /// Starts the thread if `interval` is set.
    pub fn start(scrub: Arc<Scrub>, interval: Option<Duration>) -> Result<Self> {
        let thread = match interval {
            Some(interval) => {
                let poison = scrub.snapshots.engine.poison.clone();
                // A panic poisons the store, which would otherwise run unscrubbed without notice.
                let poisons = PoisonOnPanic { poison, thread: "the thread for scrubs" };
                let scrub = scrub.clone();
                let thread = threads::start("remanent-scrub", move || {
                    let _poisons = poisons;
                    live(&scrub, interval);
                });
                Some(thread.map_err(|error| Error::thread("the thread for scrubs", error))?)
            }
            None => None,
        };
        Ok(Self { scrub, thread })
    }
}

impl Drop for Scrubber {
    /// Stops the thread and abandons the current pass. The caller must first cancel any snapshot that the thread is
    /// taking.
    fn drop(&mut self) {
        self.scrub.pace.call_off();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for scrubs panicked");
        }
    }
}

/// Runs scrub passes until the store closes. The interval counts from the start of one pass to the start of the next.
/// Each pass reads at a limited rate, so that other work can use the disk.
fn live(scrub: &Scrub, interval: Duration) {
    let pace = &scrub.pace;
    // The first pass starts one interval after the open.
    let mut began = Instant::now();
    while pace.rest(began.checked_add(interval)).is_ok() {
        began = Instant::now();
        match scrub.run(pace, SnapshotRequest { paced: true, ..SnapshotRequest::default() }) {
            Ok(_) => {}
            // Nothing was changed. The next pass will find the damage again, and shortages are transient.
            Err(error) if error.is_passing() || matches!(error, Error::Damaged(_)) => {
                tracing::warn!(%error, "a scrub failed and will be retried");
            }
            // The store is closing, or it is poisoned and reports the reason itself.
            Err(_) => return,
        }
    }
}
