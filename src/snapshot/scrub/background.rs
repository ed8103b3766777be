//! Scrubs of the store's own accord: a thread that waits, reads at a pace, and waits again.
//!
//! After a full disk, or a lack of memory, the store's stats tell of it, and the next scrub finds the
//! same damage. Every other failure has poisoned the store, and ends the thread. When the store closes,
//! the pass is given up.

use std::sync::Arc;
use std::time::Duration;

use super::super::SnapshotRequest;
use super::Scrub;
use crate::base::poison::PanicPoisons;
use crate::base::sync::Instant;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::error::{Error, Result};

/// The thread for scrubs, as the store holds it.
pub(crate) struct Scrubber {
    scrub: Arc<Scrub>,
    thread: Option<JoinHandle<()>>,
}

impl Scrubber {
    /// Starts the thread, if there is an interval.
    pub fn start(scrub: Arc<Scrub>, interval: Option<Duration>) -> Result<Self> {
        let thread = match interval {
            Some(interval) => {
                let poison = scrub.snapshots.engine.poison.clone();
                // A panic must show: otherwise the store would go on unscrubbed in silence.
                let poisons = PanicPoisons { poison, thread: "the thread for scrubs" };
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
    /// Ends the thread; the pass that it is reading is given up. A snapshot that it is taking must be
    /// called off before.
    fn drop(&mut self) {
        self.scrub.pace.call_off();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for scrubs panicked");
        }
    }
}

/// The life of the thread. The interval counts from the begin of one pass to that of the next.
///
/// A pass reads at a pace, so that it takes no more of the disk than it was given; a store that closes
/// calls it off.
fn live(scrub: &Scrub, interval: Duration) {
    let pace = &scrub.pace;
    // The first pass comes an interval after the open.
    let mut began = Instant::now();
    while pace.rest(began.checked_add(interval)).is_ok() {
        began = Instant::now();
        match scrub.run(pace, SnapshotRequest { paced: true, ..SnapshotRequest::default() }) {
            Ok(_) => {}
            // Nothing was changed. Damage is still there for the next pass, and a shortage passes.
            Err(error) if error.is_passing() || matches!(error, Error::Damaged(_)) => {
                tracing::warn!(%error, "a scrub failed; it is tried again later");
            }
            // The store closes, or it is poisoned and says why itself.
            Err(_) => return,
        }
    }
}
