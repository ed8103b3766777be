//! Waiting for the log to grow, without looking again and again: for who takes snapshots of its own
//! accord.

use remanent_format::Lsn;

use super::state::{GrowthWatch, LogState};
use super::writer::Log;
use crate::base::sync::Instant;

impl Log {
    /// Waits until the log has this batch, or so many bytes since it was opened; until the time has come, if
    /// there is one; or until somebody calls. There is one watcher.
    pub fn watch(&self, lsn: Lsn, bytes: u64, until: Option<Instant>) {
        let mut state = self.state.lock();
        state.watch.wanted = Some((lsn, bytes));
        let is_over = |state: &LogState| {
            state.watch.called || state.watch.is_reached(state.point.lsn, state.replay_bytes())
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

    /// The newest batch, and the bytes since the log was opened: of frames, and of images that were written ahead.
    pub fn length(&self) -> (Lsn, u64) {
        let state = self.state.lock();
        (state.point.lsn, state.replay_bytes())
    }

    /// A batch that was appended names images of so many bytes.
    pub fn count_ahead(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.ahead_bytes += bytes;
        if state.watch.is_reached(state.point.lsn, state.replay_bytes()) {
            self.grown.notify_one();
        }
    }

    /// Ends the watcher's wait, also one that has yet to begin.
    pub fn call_watcher(&self) {
        self.state.lock().watch.called = true;
        self.grown.notify_one();
    }
}
