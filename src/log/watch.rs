//! Waits for growth of the log, for the thread that takes background snapshots.
//!
//! The thread sleeps until an append reaches the requested growth. A polling thread would instead wake a CPU of an idle
//! store, and would detect a burst of commits late.

use remanent_format::Lsn;

use super::state::{GrowthWatch, LogState};
use super::writer::Log;
use crate::base::sync::Instant;

impl Log {
    /// Waits until the log contains batch `lsn`, until replaying the appended batches would read `bytes` bytes, until
    /// the time `until`, or until a call of [`call_watcher`](Self::call_watcher), whichever is first. Only one thread
    /// may call this function at a time.
    pub fn watch(&self, lsn: Lsn, bytes: u64, until: Option<Instant>) {
        let mut state = self.state.lock();
        // The request is set before the log's growth is checked, under one lock, so no append between the two steps is
        // missed.
        state.watch.wanted = Some((lsn, bytes));
        let is_over = |state: &LogState| {
            state.watch.is_called || state.watch.is_reached(state.point.lsn, state.replay_bytes())
        };
        while !is_over(&state) {
            match until {
                Some(until) => {
                    if self.grown.wait_until(&mut state, until).timed_out() {
                        break;
                    }
                }
                None => self.grown.wait(&mut state),
            }
        }
        state.watch = GrowthWatch::default();
    }

    /// Returns the newest batch, and the number of bytes that a replay of the batches appended since the open would
    /// read.
    pub fn length(&self) -> (Lsn, u64) {
        let state = self.state.lock();
        (state.point.lsn, state.replay_bytes())
    }

    /// Counts `bytes` bytes of images that an appended batch names. A replay reads these images, so they count
    /// like log bytes when the store decides whether a snapshot is due.
    pub fn count_ahead(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.ahead_bytes += bytes;
        if state.watch.is_reached(state.point.lsn, state.replay_bytes()) {
            self.grown.notify_one();
        }
    }

    /// Ends the wait of the thread in [`watch`](Self::watch). If no thread is waiting, the next wait ends immediately.
    pub fn call_watcher(&self) {
        self.state.lock().watch.is_called = true;
        self.grown.notify_one();
    }
}
