//! Scrubs of the store's own accord: a thread that waits, reads at a pace, and waits again.
//!
//! A full disk, or no memory, is told in the store's stats, and the next scrub finds the same damage. Every
//! other failure has poisoned the store, and ends the thread. When the store closes, the pass is given up.

use std::sync::Arc;
use std::time::Duration;

use super::super::SnapshotRequest;
use super::Scrub;
use crate::base::poison::PanicPoisons;
use crate::base::sync::thread::JoinHandle;
use crate::base::sync::threads;
use crate::base::sync::{Instant, Mutex};
use crate::error::{Error, Result};

/// The thread.
pub(crate) struct Scrubber {
    scrub: Arc<Scrub>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Scrubber {
    /// Starts it, if there is an interval.
    pub fn start(scrub: Arc<Scrub>, interval: Option<Duration>) -> Result<Self> {
        let thread = match interval {
            Some(interval) => {
                let poison = scrub.snapshots.poison.clone();
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
        Ok(Self { scrub, thread: Mutex::new(thread) })
    }

    /// Ends the thread; what it is reading is given up. A snapshot that it is taking must be called off before.
    pub fn stop(&self) {
        self.scrub.pace.call_off();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for scrubs panicked");
        }
    }
}

fn live(scrub: &Scrub, interval: Duration) {
    let pace = &scrub.pace;
    let mut began = Instant::now();
    while pace.rest(began.checked_add(interval)).is_ok() {
        began = Instant::now();
        match scrub.run(pace, SnapshotRequest { paced: true, ..SnapshotRequest::default() }) {
            Ok(_) => {}
            Err(error) if error.is_passing() || matches!(error, Error::Damaged(_)) => {
                tracing::warn!(%error, "a scrub failed; it is tried again later");
            }
            // The store closes, or it is poisoned and says why itself.
            Err(_) => return,
        }
    }
}
