//! Floor 3. The one queue of long copies from the GPU to the host.
//!
//! A copy engine with deep queues lets everybody else's copies wait, the caller's own included, for seconds.
//! So long copies go out in pieces of at most a mebibyte, and a GPU has at most two of ours under way, whatever
//! the lane: one that moves and one behind it, so that the engine does not stand still. Whoever queues the third
//! waits, which holds up its own lane and no other.
//!
//! Commits go first. Their short copies, and the fences of all lanes, never come here: kernels and the stream
//! itself write those. What a commit gathered on the GPU may be long; it comes on an urgent lane, and as long as
//! one is here no other queues a piece. So a commit waits for two pieces, and never for a snapshot.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::context::{Context, Entered};
use super::lane::Timeline;
use super::word::Word;
use crate::error::Result;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The longest piece.
const PIECE_LEN_MAX: u64 = 1 << 20;
/// The most pieces under way.
const PIECES_MAX: usize = 2;

/// Copies under way, oldest first: each lane's word for them, and the value that it then has.
pub(super) struct BulkQueue {
    context: &'static Context,
    under_way: Turns<VecDeque<(Arc<Word>, u64)>>,
}

impl BulkQueue {
    /// Nothing under way.
    pub fn new(context: &'static Context) -> Self {
        Self { context, under_way: Turns::default() }
    }

    /// Queues a copy on a lane, piece by piece; returns when the last piece is queued.
    ///
    /// # Errors
    /// A device error; pieces before it may have been queued.
    pub fn down(
        &self,
        entered: &Entered<'_>,
        lane: &Timeline,
        source: u64,
        target: u64,
        len: u64,
    ) -> Result<()> {
        let mut turns = self.under_way.come(lane.is_urgent());
        for begin in (0..len).step_by(PIECE_LEN_MAX as usize) {
            let piece_len = PIECE_LEN_MAX.min(len - begin);
            let mut under_way = turns.take();
            while under_way.len() >= PIECES_MAX {
                let (word, value) = &under_way[0];
                word.wait(*value)?;
                under_way.pop_front();
            }
            // SAFETY: the context is current; the list's page memory and staging were checked to hold the
            // ranges, and stay until the lane's next value has passed.
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

/// A value that one has at a time, the urgent first.
#[derive(Default)]
struct Turns<T> {
    value: Mutex<T>,
    /// How many urgent ones are here. Counted up before the lock is asked for, so that whoever has the lock
    /// sees who waits for it; counted down under it.
    urgent: AtomicUsize,
    urgent_left: Condvar,
}

/// One who is here, and takes turns until it is dropped.
struct Visit<'t, T> {
    turns: &'t Turns<T>,
    is_urgent: bool,
}

impl<T> Turns<T> {
    fn come(&self, is_urgent: bool) -> Visit<'_, T> {
        if is_urgent {
            self.urgent.fetch_add(1, Ordering::SeqCst);
        }
        Visit { turns: self, is_urgent }
    }
}

impl<T> Visit<'_, T> {
    /// The value, for one turn.
    fn take(&mut self) -> MutexGuard<'_, T> {
        let mut value = self.turns.value.lock();
        while !self.is_urgent && self.turns.urgent.load(Ordering::SeqCst) > 0 {
            self.turns.urgent_left.wait(&mut value);
        }
        value
    }
}

impl<T> Drop for Visit<'_, T> {
    fn drop(&mut self) {
        if self.is_urgent {
            // Under the lock: who has just looked and is about to wait must not miss it.
            let _value = self.turns.value.lock();
            self.turns.urgent.fetch_sub(1, Ordering::SeqCst);
            self.turns.urgent_left.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_urgent_have_all_their_turns_first() {
        let turns = Turns::<Vec<&str>>::default();
        std::thread::scope(|scope| {
            let mut urgent = turns.come(true);
            let first = urgent.take();
            let others = [(); 2].map(|()| scope.spawn(|| turns.come(false).take().push("patient")));
            drop(first);
            for _ in 0..200 {
                urgent.take().push("urgent");
                std::thread::yield_now();
            }
            drop(urgent);
            for other in others {
                other.join().expect("it took its turn");
            }
        });
        assert_eq!(turns.value.into_inner(), [&["urgent"; 200][..], &["patient"; 2]].concat());
    }
}
