//! Batches that wait to be logged, and who logs them.
//!
//! The log has one order, so one thread at a time appends: who holds the submission lock. Handed from one committer to
//! the next, the lock would take the table's, the log's and the queue's words from core to core for each batch, and
//! wake a sleeper for each. So who finds it taken leaves the draft here, and the holder logs it with its own:
//!
//! 1. Leave the draft.
//! 2. Wait for the lock, or until the holder is done with the draft, whichever comes first.
//! 3. Who has the lock logs all that wait, in the order in which they came.
//!
//! Where there are cores enough, who waits looks for a while before it sleeps: a holder that had to wake each of them
//! would do little else. With 8 threads on 16 cores that makes 800,000 batches of 256 bytes a second instead of
//! 400,000 (720,000 with a fourth of the looks, 610,000 with a sixteenth); on 2 cores it loses a tenth or more.
//!
//! No draft is forgotten, though its committer may come just after the holder's last look: whoever leaves one goes for
//! the lock himself, until he sees the outcome, and a holder lets nobody else have the lock amid those that it took.

use std::sync::Arc;

use remanent_format::PageTable;
use remanent_format::op::decode_payload;

use super::Committer;
use super::draft::{Draft, Outcome};
use crate::base::sync;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::error::{Error, Result};

/// How often a holder takes what waits before it minds its own business: others hold the lock next.
const ROUNDS: usize = 4;

/// How often a committer looks whether its draft is logged before it sleeps: for some hundred microseconds, in which a
/// holder logs a hundred batches.
const LOOKS: usize = 4096;
/// It tries for the lock once in so many looks: the lock's word belongs to the holder's cache.
const LOOKS_A_TRY: usize = 8;
/// With fewer cores nobody looks: who looks is in the holder's way.
const CORES_TO_LOOK: usize = 8;

/// The batches that wait.
pub(crate) struct CombineQueue {
    /// How many, so that a holder who finds none takes no lock.
    count: AtomicUsize,
    places: Mutex<Vec<Arc<Place>>>,
    /// While so many wait for somebody to take them, the next one sleeps at once: it takes a core to look.
    lookers: usize,
}

/// Where a committer leaves a draft and finds what became of it. It is the committer's alone again when the holder is
/// done with it: then nobody else gives back memory that the committer's thread has allocated. If it holds no outcome
/// by then, the holder panicked.
struct Place(Mutex<QueuedBytes>);

enum QueuedBytes {
    Draft(Draft),
    /// The holder has it.
    Taken,
    Outcome(Outcome),
}

impl CombineQueue {
    /// None.
    pub fn new() -> Self {
        let cores = sync::cores();
        let lookers = if cores < CORES_TO_LOOK { 0 } else { cores / 2 };
        Self { count: AtomicUsize::new(0), places: Mutex::default(), lookers }
    }

    fn leave(&self, draft: Draft) -> Arc<Place> {
        let place = Arc::new(Place(Mutex::new(QueuedBytes::Draft(draft))));
        let mut places = self.places.lock();
        places.push(place.clone());
        self.count.store(places.len(), Ordering::Release);
        place
    }

    /// All that wait by now. The caller holds the submission lock.
    fn take(&self) -> Vec<Arc<Place>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut places = self.places.lock();
        self.count.store(0, Ordering::Release);
        // As much room as was needed now: it would grow under the lock else.
        let empty = Vec::with_capacity(places.len());
        std::mem::replace(&mut places, empty)
    }
}

impl Committer {
    /// Has a draft logged by whoever holds the submission lock next.
    ///
    /// # Errors
    /// `Poisoned`: who logged it panicked, and nobody knows how far it came.
    pub(super) fn log_in_turn(&self, draft: Draft) -> Result<Outcome> {
        let place = self.waiting.leave(draft);
        if !self.is_logged_soon(&place) {
            self.log_waiting(&mut self.submitted.lock());
        }
        outcome(place).ok_or_else(|| self.poison.set(Error::panicked("a committer's thread")))
    }

    /// Looks for a while whether the holder is done with a draft, or gone: then it logs the draft itself.
    fn is_logged_soon(&self, place: &Arc<Place>) -> bool {
        if self.waiting.count.load(Ordering::Relaxed) >= self.waiting.lookers {
            return false;
        }
        for look in 1..=LOOKS {
            if Arc::strong_count(place) == 1 {
                return true;
            }
            if look % LOOKS_A_TRY == 0
                && let Some(mut table) = self.submitted.try_lock()
            {
                self.log_waiting(&mut table);
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Logs what waits, for who holds the submission lock.
    pub(super) fn log_waiting(&self, table: &mut PageTable) {
        for _ in 0..ROUNDS {
            let places = self.waiting.take();
            if places.is_empty() {
                break;
            }
            for place in places {
                let mut content = place.0.lock();
                if let QueuedBytes::Draft(draft) = std::mem::replace(&mut *content, QueuedBytes::Taken) {
                    let ops = decode_payload(&draft.payload).expect("decoded before it was left");
                    let appended = self.append(table, &draft, &ops);
                    *content = QueuedBytes::Outcome(self.hand_over(table, draft, appended, |_, _| {}));
                }
            }
        }
    }
}

/// What a place holds that nobody else has any more; `None` if the holder panicked before it was done.
fn outcome(place: Arc<Place>) -> Option<Outcome> {
    match Arc::into_inner(place).expect("nobody else has it").0.into_inner() {
        QueuedBytes::Outcome(outcome) => Some(outcome),
        QueuedBytes::Draft(_) | QueuedBytes::Taken => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::device::host::HostDevice;
    use crate::log::SpacePurpose;
    use crate::memory::staging::StagingPool;

    fn draft(payload_crc: u32) -> Draft {
        let pool = StagingPool::new(Arc::new(HostDevice::new()), 0);
        Draft {
            payload: pool.take(0).unwrap(),
            payload_crc,
            purpose: SpacePurpose::User,
            expected: Vec::new(),
            staged: Vec::new(),
            lens: Vec::new(),
            memory: VecDeque::new(),
            spares: Vec::new(),
            asides: VecDeque::new(),
        }
    }

    fn is_alone(place: &Arc<Place>) -> bool {
        Arc::strong_count(place) == 1
    }

    #[test]
    fn a_holder_takes_all_that_wait_in_their_order_and_once() {
        let waiting = CombineQueue::new();
        let mine: Vec<Arc<Place>> = (1..=3).map(|crc| waiting.leave(draft(crc))).collect();
        let taken = waiting.take();
        assert!(waiting.take().is_empty());
        let crcs = taken.iter().map(|place| match &*place.0.lock() {
            QueuedBytes::Draft(draft) => draft.payload_crc,
            _ => 0,
        });
        assert_eq!(crcs.collect::<Vec<u32>>(), [1, 2, 3]);
        let late = waiting.leave(draft(4));
        drop(taken);
        assert!(mine.iter().all(is_alone) && !is_alone(&late));
        assert_eq!(waiting.take().len(), 1);
    }

    #[test]
    fn what_a_holder_left_undone_has_no_outcome() {
        let waiting = CombineQueue::new();
        let mine = [1, 2, 3].map(|crc| waiting.leave(draft(crc)));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for place in waiting.take() {
                let mut content = place.0.lock();
                let QueuedBytes::Draft(draft) = std::mem::replace(&mut *content, QueuedBytes::Taken) else {
                    continue;
                };
                assert!(draft.payload_crc < 2, "the second one");
                *content = QueuedBytes::Outcome(Outcome::Stale(draft));
            }
        }));
        assert!(panicked.is_err() && mine.iter().all(is_alone));
        assert_eq!(mine.map(|place| outcome(place).is_some()), [true, false, false]);
    }
}
