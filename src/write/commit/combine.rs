//! Flat combining: the thread that holds the submission lock also logs the batches of threads that wait for the lock.
//!
//! The log has one order, so one thread at a time appends: the holder of the submission lock. If the lock passed from
//! committer to committer, every batch would move the cache lines of the table, the log and the queue from core to
//! core, and wake a sleeping thread. Instead, a committer that finds the lock taken adds its draft to a queue, and the
//! lock holder logs the draft after its own:
//!
//! 1. Add the draft to the queue.
//! 2. Wait for the lock, or until the holder is done with the draft, whichever comes first.
//! 3. A committer that gets the lock logs all waiting drafts, in the order of their arrival.
//!
//! With enough cores, a waiting committer spins for a while before it sleeps, because a holder that had to wake each
//! committer would do little else. With 8 threads on 16 cores this yields 800,000 batches of 256 bytes per second
//! instead of 400,000 (720,000 with a fourth of the spins, 610,000 with a sixteenth). On 2 cores, spinning costs a
//! tenth or more, so it is disabled there.
//!
//! No draft is forgotten, even if it arrives just after the holder's last check. A committer that leaves a draft tries
//! to take the lock itself until it observes the outcome, and a holder does not release the lock while it works on
//! drafts.

use std::sync::Arc;

use remanent_format::PageTable;
use remanent_format::op::decode_payload;

use super::Committer;
use super::draft::{Draft, Outcome};
use crate::base::sync;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::base::sync::{Mutex, Rank};
use crate::error::{Error, Result};

/// The maximum number of times that a lock holder takes all waiting drafts before it releases the lock.
const ROUNDS: usize = 4;

/// The number of times that a committer checks its draft before it sleeps. All checks together take some hundred
/// microseconds. In that time, a lock holder logs a hundred batches.
const SPINS_MAX: usize = 4096;
/// The number of checks of the draft between two attempts to take the lock. Each attempt takes the lock's cache line
/// away from the holder.
const SPINS_PER_TRY: usize = 8;
/// The minimum number of cores at which committers spin. With fewer cores, a spinning committer would take the holder's
/// core.
const CORES_TO_SPIN: usize = 8;

/// The drafts that wait for a lock holder.
pub(crate) struct CombineQueue {
    /// The number of waiting drafts. A holder that finds 0 need not lock `entries`.
    count: AtomicUsize,
    entries: Mutex<Vec<Arc<Entry>>>,
    /// The number of waiting drafts at which a further committer sleeps without spinning, because spinning occupies a
    /// core.
    spinner_max: usize,
}

/// The slot through which a committer passes a draft to the lock holder and receives the outcome.
///
/// The committer and the lock holder share the slot by an `Arc`. The holder drops its reference when it is done, so the
/// committer's thread frees the memory that it allocated. If there is no outcome in the slot by then, the holder
/// panicked.
struct Entry(Mutex<DraftState>);

enum DraftState {
    Draft(Draft),
    /// A lock holder is logging the draft.
    Taken,
    Outcome(Outcome),
}

impl CombineQueue {
    pub fn new() -> Self {
        let cores = sync::cores();
        let spinner_max = if cores < CORES_TO_SPIN { 0 } else { cores / 2 };
        Self { count: AtomicUsize::new(0), entries: Mutex::of_rank(Rank::WAITING, Vec::new()), spinner_max }
    }

    /// Adds a draft to the queue. The count is stored after the draft is in its slot, so a holder that observes the
    /// count finds the draft.
    fn leave(&self, draft: Draft) -> Arc<Entry> {
        let entry = Arc::new(Entry(Mutex::of_rank(Rank::WAITING, DraftState::Draft(draft))));
        let mut entries = self.entries.lock();
        entries.push(entry.clone());
        self.count.store(entries.len(), Ordering::Release);
        entry
    }

    /// Takes all waiting drafts. The caller must hold the submission lock, so that only one holder takes each draft.
    fn take(&self) -> Vec<Arc<Entry>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut entries = self.entries.lock();
        self.count.store(0, Ordering::Release);
        // The replacement gets the same capacity. Otherwise it would grow again under the lock, while all committers
        // wait.
        let empty = Vec::with_capacity(entries.len());
        std::mem::replace(&mut entries, empty)
    }
}

impl Committer {
    /// Adds a draft to the queue, and waits until it is logged, either by the current holder of the submission lock or
    /// by this thread after it acquires the lock.
    ///
    /// # Errors
    /// `Poisoned` if the thread that logged the draft panicked. Its progress is unknown, so the batch may be in the
    /// log.
    pub(super) fn log_in_turn(&self, draft: Draft) -> Result<Outcome> {
        let entry = self.waiting.leave(draft);
        if !self.is_logged_soon(&entry) {
            self.log_waiting(&mut self.submitted.lock());
        }
        outcome(entry).ok_or_else(|| self.engine.poison.set(Error::panicked("a committer's thread")))
    }

    /// Spins until another thread has logged the draft, or until this thread acquires the lock and logs it. Returns
    /// `false` if the draft is still not logged after [`SPINS_MAX`] checks, or if too many drafts are waiting for
    /// spinning to be useful.
    fn is_logged_soon(&self, entry: &Arc<Entry>) -> bool {
        if self.waiting.count.load(Ordering::Relaxed) >= self.waiting.spinner_max {
            return false;
        }
        for spin in 1..=SPINS_MAX {
            if Arc::strong_count(entry) == 1 {
                return true;
            }
            if spin % SPINS_PER_TRY == 0
                && let Some(mut table) = self.submitted.try_lock()
            {
                self.log_waiting(&mut table);
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Logs the waiting drafts. The caller must hold the submission lock.
    pub(super) fn log_waiting(&self, table: &mut PageTable) {
        for _ in 0..ROUNDS {
            let entries = self.waiting.take();
            if entries.is_empty() {
                break;
            }
            for entry in entries {
                let mut content = entry.0.lock();
                if let DraftState::Draft(draft) = std::mem::replace(&mut *content, DraftState::Taken) {
                    // The operations borrow the payload, so the draft could not store them. The first decoding
                    // succeeded, so only a lack of memory can make this one fail.
                    let ops = decode_payload(&draft.payload).map_err(Error::of_memory);
                    let appended = ops.and_then(|ops| self.append(table, &draft, &ops));
                    *content = DraftState::Outcome(self.hand_over(table, draft, appended, |_, _| {}));
                }
            }
        }
    }
}

/// Returns the outcome in a slot that no other thread shares, or `None` if the holder panicked before it set an
/// outcome.
fn outcome(entry: Arc<Entry>) -> Option<Outcome> {
    match Arc::into_inner(entry).expect("the holder has let go of it").0.into_inner() {
        DraftState::Outcome(outcome) => Some(outcome),
        DraftState::Draft(_) | DraftState::Taken => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::SpacePurpose;
    use crate::memory::staging::GrownBytes;

    /// Returns a draft that tests recognize by its checksum.
    fn draft(payload_crc: u32) -> Draft {
        Draft::new(GrownBytes::Plain(Vec::new()), payload_crc, SpacePurpose::User, Vec::new())
    }

    /// Returns whether the lock holder has dropped its reference to the entry, which means that it is done with the
    /// draft.
    fn is_alone(entry: &Arc<Entry>) -> bool {
        Arc::strong_count(entry) == 1
    }

    /// Drafts are logged in the order of the queue. A draft taken by two holders would be logged twice.
    #[test]
    fn combiner_takes_waiting_drafts_in_order_once() {
        let waiting = CombineQueue::new();
        let mine: Vec<Arc<Entry>> = (1..=3).map(|crc| waiting.leave(draft(crc))).collect();
        let taken = waiting.take();
        assert!(waiting.take().is_empty());
        let crcs = taken.iter().map(|entry| match &*entry.0.lock() {
            DraftState::Draft(draft) => draft.payload_crc,
            _ => 0,
        });
        assert_eq!(crcs.collect::<Vec<u32>>(), [1, 2, 3]);
        let late = waiting.leave(draft(4));
        drop(taken);
        assert!(mine.iter().all(is_alone) && !is_alone(&late));
        assert_eq!(waiting.take().len(), 1);
    }

    /// The committer of a draft that was lost in a panic must neither wait forever nor consider the draft logged.
    #[test]
    fn unfinished_draft_of_holder_has_no_outcome() {
        let waiting = CombineQueue::new();
        let mine = [1, 2, 3].map(|crc| waiting.leave(draft(crc)));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for entry in waiting.take() {
                let mut content = entry.0.lock();
                let DraftState::Draft(draft) = std::mem::replace(&mut *content, DraftState::Taken) else {
                    continue;
                };
                assert!(draft.payload_crc < 2, "the second one");
                *content = DraftState::Outcome(Outcome::Stale(draft));
            }
        }));
        assert!(panicked.is_err() && mine.iter().all(is_alone));
        assert_eq!(mine.map(|entry| outcome(entry).is_some()), [true, false, false]);
    }
}
