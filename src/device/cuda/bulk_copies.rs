//! The single queue of long copies from the GPU to the host.
//!
//! A copy engine with deep queues delays all other copies, including the caller's own, by seconds. Long copies are
//! therefore issued in pieces of at most 2 MiB. On each GPU, the store has at most two pieces in flight over all lanes:
//! the engine copies one piece while the second waits, so that the engine does not idle. A thread that queues a third
//! piece waits. This wait delays the thread's own lane, and other lanes only at their long copies.
//!
//! Commits have priority. Their short copies and the fences of all lanes are written by kernels or by the stream
//! itself, without this queue. Long copies of a commit use an urgent lane, whose pieces precede those of the other
//! (patient) lanes, so a commit waits for two pieces and not for a whole snapshot. During uninterrupted urgent copies,
//! one piece in [`URGENT_TURNS_MAX`] + 1 still belongs to a patient lane, because a patient copy occupies scratch
//! memory for which others may be waiting.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::completion::CompletionWord;
use super::context::{Context, ContextGuard};
use super::lane::Timeline;
use crate::base::sync::{Condvar, Mutex, MutexGuard};
use crate::error::Result;

/// The maximum length of a piece in bytes. A GPU copies such a piece in about 40 µs: a short wait, yet enough to keep
/// the engine busy while the next piece is queued. The engine idles for 2 to 3 µs between two pieces: an H100 copied 45
/// GB/s in pieces of 1 MiB, 49.5 GB/s in pieces of 2 MiB, and 53 GB/s in one piece.
const PIECE_LEN_MAX: u64 = 2 << 20;
/// The maximum number of pieces in flight: one being copied, and one ready to follow it.
const PIECES_MAX: usize = 2;

/// The number of urgent pieces that may precede a waiting patient piece. A GPU copies 64 pieces in some milliseconds.
const URGENT_TURNS_MAX: u32 = 64;

/// Copies in flight, oldest first. Each entry has the lane's counter word and the word's value after the copy.
pub(super) struct BulkQueue {
    context: &'static Context,
    under_way: Turns<VecDeque<(Arc<CompletionWord>, u64)>>,
}

impl BulkQueue {
    /// Creates an empty queue.
    pub fn new(context: &'static Context) -> Self {
        Self { context, under_way: Turns::default() }
    }

    /// Queues a copy from the GPU on a lane, piece by piece. Returns when the last piece is queued.
    ///
    /// # Errors
    /// A device error; earlier pieces may have been queued.
    ///
    /// # Safety
    /// Page memory contains the source, and staging contains the target. Source and target stay allocated, and their
    /// owners use them for nothing else, until the lane's next value has passed.
    pub unsafe fn down(
        &self,
        entered: &ContextGuard<'_>,
        lane: &Timeline,
        source: u64,
        target: u64,
        len: u64,
    ) -> Result<()> {
        // The whole copy uses one handle. If the lane is urgent, no patient lane copies between two of these pieces,
        // unless [`URGENT_TURNS_MAX`] urgent pieces have preceded it.
        let mut turns = self.under_way.join(lane.is_urgent());
        for begin in (0..len).step_by(PIECE_LEN_MAX as usize) {
            let piece_len = PIECE_LEN_MAX.min(len - begin);
            let mut turn = turns.take();
            let under_way = &mut turn.value;
            // The lock is held during this wait. Otherwise another lane could queue its piece first, and the count of
            // pieces would be wrong. If the stream has stopped, the entry remains, and every later copy gets the same
            // error instead of waiting forever.
            while under_way.len() >= PIECES_MAX {
                let (word, value) = &under_way[0];
                word.wait(*value)?;
                under_way.pop_front();
            }
            // SAFETY: the context is current; the ranges are the caller's promise.
            let queued = unsafe {
                entered.copy_to_host(
                    (target + begin) as *mut c_void,
                    source + begin,
                    piece_len as usize,
                    lane.stream(),
                )
            };
            queued.map_err(|code| self.context.fault(code))?;
            let value = lane.pieces().count(entered)?;
            under_way.push_back((lane.pieces().clone(), value));
        }
        Ok(())
    }
}

/// A mutex with two priorities. Urgent threads acquire the lock before patient threads. However, after
/// [`URGENT_TURNS_MAX`] urgent acquisitions, one waiting patient thread acquires it next.
#[derive(Default)]
struct Turns<T> {
    state: Mutex<TurnsState<T>>,
    /// The number of urgent handles. Incremented before the thread of a handle takes the lock, so that the lock holder
    /// sees waiting threads; decremented under the lock.
    urgent: AtomicUsize,
    /// Signaled when no urgent handle remains, or when a patient thread must acquire the lock next.
    patient_may: Condvar,
    /// Signaled when a patient thread has acquired the lock.
    urgent_may: Condvar,
}

#[derive(Default)]
struct TurnsState<T> {
    value: T,
    /// The number of patient threads that wait for urgent threads.
    patient: u32,
    /// The number of urgent acquisitions since the last patient acquisition, counted while a patient thread waited.
    urgent_turns: u32,
}

impl<T> TurnsState<T> {
    /// Returns whether a patient thread must acquire the lock next, because enough urgent acquisitions have preceded
    /// it.
    fn is_patient_due(&self) -> bool {
        self.patient > 0 && self.urgent_turns >= URGENT_TURNS_MAX
    }
}

/// A handle with which a thread acquires the lock, any number of times. While urgent handles exist, patient threads
/// wait.
struct TurnHandle<'t, T> {
    turns: &'t Turns<T>,
    is_urgent: bool,
}

impl<T> Turns<T> {
    fn join(&self, is_urgent: bool) -> TurnHandle<'_, T> {
        if is_urgent {
            self.urgent.fetch_add(1, Ordering::SeqCst);
        }
        TurnHandle { turns: self, is_urgent }
    }
}

impl<T> TurnHandle<'_, T> {
    /// Waits until the thread may acquire the lock, and returns the locked value.
    fn take(&mut self) -> MutexGuard<'_, TurnsState<T>> {
        let Turns { state, urgent, patient_may, urgent_may } = self.turns;
        let mut state = state.lock();
        if self.is_urgent {
            // Without this wait, urgent threads could acquire the lock again before the notified patient thread runs.
            while state.is_patient_due() {
                urgent_may.wait(&mut state);
            }
            // Urgent acquisitions are counted only while a patient thread waits. Earlier acquisitions do not shorten
            // its wait.
            state.urgent_turns += u32::from(state.patient > 0);
            if state.is_patient_due() {
                patient_may.notify_one();
            }
        } else {
            state.patient += 1;
            while urgent.load(Ordering::SeqCst) > 0 && !state.is_patient_due() {
                patient_may.wait(&mut state);
            }
            state.patient -= 1;
            state.urgent_turns = 0;
            urgent_may.notify_all();
        }
        state
    }
}

impl<T> Drop for TurnHandle<'_, T> {
    fn drop(&mut self) {
        if self.is_urgent {
            // The lock is held during the change: otherwise a patient thread that is about to wait could miss the
            // notification.
            let _state = self.turns.state.lock();
            self.turns.urgent.fetch_sub(1, Ordering::SeqCst);
            self.turns.patient_may.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Lets two patient threads wait while an urgent thread acquires the lock `urgent_turns` times. Returns the kinds
    /// of threads in the order of their acquisitions.
    fn turns_of_one_urgent_and_two_patient(urgent_turns: u32) -> Vec<&'static str> {
        let (sender, order) = mpsc::channel();
        // If no notification wakes the patient threads, this thread never ends, and the test fails by its timeout.
        std::thread::spawn(move || {
            let turns = Turns::<Vec<&str>>::default();
            std::thread::scope(|scope| {
                let mut urgent = turns.join(true);
                for _ in 0..2 {
                    scope.spawn(|| turns.join(false).take().value.push("patient"));
                }
                // A patient thread either waits or has already acquired the lock.
                let here = |state: &TurnsState<Vec<&str>>| state.patient as usize + state.value.len();
                while here(&turns.state.lock()) < 2 {
                    std::thread::yield_now();
                }
                (0..urgent_turns).for_each(|_| urgent.take().value.push("urgent"));
            });
            sender.send(turns.state.into_inner().value)
        });
        order.recv_timeout(Duration::from_secs(60)).expect("no visitor waits for good")
    }

    #[test]
    fn urgent_turns_go_first() {
        let order = turns_of_one_urgent_and_two_patient(URGENT_TURNS_MAX - 1);
        assert_eq!(order, [&["urgent"; URGENT_TURNS_MAX as usize - 1][..], &["patient"; 2]].concat());
    }

    #[test]
    fn patient_turn_follows_limited_urgent_turns() {
        let order = turns_of_one_urgent_and_two_patient(3 * URGENT_TURNS_MAX);
        let turns = [&["urgent"; URGENT_TURNS_MAX as usize][..], &["patient"]].concat();
        // The remaining acquisitions are urgent, because no patient thread waits any more.
        assert_eq!(order, [&turns[..], &turns, &turns[..URGENT_TURNS_MAX as usize]].concat());
    }
}
