//! Floor 3. The one queue of long copies from the GPU to the host.
//!
//! A copy engine with deep queues lets everybody else's copies wait, the caller's own included, for seconds.
//! So long copies go out in pieces, and a GPU has at most two of ours under way, whatever the lane: one that
//! moves and one behind it, so that the engine does not stand still. Whoever queues the third waits, which
//! holds up its own lane and no other.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;

use parking_lot::Mutex;

use super::context::{Context, Entered};
use super::lane::Timeline;
use super::word::Word;
use crate::error::Result;

/// The longest piece.
const PIECE_LEN_MAX: u64 = 1 << 20;
/// The most pieces under way.
const PIECES_MAX: usize = 2;

/// Copies under way, oldest first: each lane's word for them, and the value that it then has.
pub(super) struct BulkQueue {
    context: &'static Context,
    under_way: Mutex<VecDeque<(Arc<Word>, u64)>>,
}

impl BulkQueue {
    /// Nothing under way.
    pub fn new(context: &'static Context) -> Self {
        Self { context, under_way: Mutex::default() }
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
        for begin in (0..len).step_by(PIECE_LEN_MAX as usize) {
            let piece_len = PIECE_LEN_MAX.min(len - begin);
            let mut under_way = self.under_way.lock();
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
